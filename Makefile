# make run | test | check | notes | format | config | help | clean
#
# With nvcc, nvcc compiles the .cu files into build/cuda; without it (or with `make NVCC=`), g++ compiles the same files
# as C++ into build/cpu. ./cs336 is of the flavour made last. Variables: NVCC=path, ARCH="-gencode ...", INSTALL=0
# (install nothing), PLAIN=1 (without the fast_*.cu), WERROR=1 (warnings are errors, in a folder of its own), ASAN=1
# (both sanitizers), TSAN=1 (the thread sanitizer, for the ranks' threads).

SOURCES := $(filter-out $(if $(PLAIN),fast_%),$(wildcard *.cu))
TESTS := $(filter-out tests/fuzz_% $(if $(PLAIN),tests/test_fast%),$(wildcard tests/*.cpp))

ifeq ($(origin NVCC),undefined)
NVCC := $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
endif
ifdef ASAN
override NVCC :=
# The check of vptr takes a descriptor (a pipe tells it what can be read), and misreports where there is none left.
SANITIZE := -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer
endif
ifdef TSAN
override NVCC :=
SANITIZE := -fsanitize=thread
endif
FLAVOUR := $(if $(ASAN),asan,$(if $(TSAN),tsan,$(if $(NVCC),cuda,cpu)))
BUILD := build/$(FLAVOUR)$(if $(WERROR),-werror)
# PLAIN=1 links fewer of the same object files.
PROGRAM := $(BUILD)/cs336$(if $(PLAIN),-plain)
TEST_RUN := $(BUILD)/tests/run$(if $(PLAIN),-plain)
# The tests' own code is the same for all flavours, and nothing in it is worth sanitizing; but the thread sanitizer has
# to see all of a program.
TEST_BUILD := build/tests$(if $(TSAN),-tsan)$(if $(WERROR),-werror)
MAKEFLAGS := $(MAKEFLAGS) $(if $(MAKELEVEL:0=)$(filter -j%,$(MAKEFLAGS)),,-j$(shell nproc))

# ----------------------------------------------------------------------------------------------------------------------
# Flags. No fast-math anywhere: tests compare with exact results, and NaN has to stay NaN. Without math-errno sqrt is an
# instruction, also a vector's; its results are the same.

CXXFLAGS := -std=c++17 -O2 -fno-math-errno -g -fopenmp -Wall -Wextra $(if $(WERROR),-Werror)

ifeq ($(FLAVOUR),cuda)
# The machine's own cards; without any (or with one that nvcc does not know) T4, A100, 3090, 4090, H100, B200 and 5090, as
# far as nvcc knows them, and PTX, which the driver translates for what else there is from sm_90 on. nvcc hands g++
# rewritten text with parentheses of its own; the CPU flavour still warns about ours.
EVERY_CARD ?= 75 80 86 89 90 100 120
ARCH ?= $(foreach card,$(or $(CARDS),$(filter $(NVCC_KNOWS),$(EVERY_CARD)),80 90),-gencode \
	arch=compute_$(card),code=$(if $(CARDS)$(filter-out 90,$(card)),sm_$(card),[sm_$(card),compute_$(card)]))
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(realpath $(shell command -v $(NVCC))))
CUPTI_INCLUDE := $(wildcard $(CUDA_HOME)/extras/CUPTI/include)
CUDA_LIBS := $(wildcard $(CUDA_HOME)/lib64 $(CUDA_HOME)/lib $(CUDA_HOME)/extras/CUPTI/lib64)
COMPILE_CU = $(NVCC) -x cu -std=c++17 -O2 -g -lineinfo --threads 2 $(ARCH) -ccbin $(CXX) \
	-Xcompiler -fno-math-errno,-fopenmp,-Wall,-Wextra,-Wno-parentheses $(if $(WERROR),-Werror all-warnings -Xcompiler -Werror -Xptxas -v)
LINK = $(NVCC) $(ARCH) -ccbin $(CXX) -Xcompiler -fopenmp
LIBS = $(foreach lib,$(CUDA_LIBS),-L$(lib) -Xlinker -rpath -Xlinker $(lib)) -lcublas -lcublasLt $(HAVE_NCCL:yes=-lnccl) -ldl
else
COMPILE_CU = $(CXX) -x c++ $(CXXFLAGS) $(SANITIZE)
LINK = $(CXX) $(CXXFLAGS) $(SANITIZE)
LIBS = -ldl
endif

# ----------------------------------------------------------------------------------------------------------------------
# The program and its tests

all: ## build ./cs336, installing what is missing first
	$(call install,$(REQUIRED),$(OPTIONAL) $(REQUIRED_BY_TESTS))
	@$(MAKE) --no-print-directory cs336

cs336: $(PROGRAM) FORCE
	@ln -f $< $@

ifneq ($(filter-out clean help format config,$(or $(MAKECMDGOALS),all)),)
-include $(BUILD)/config.mk
endif
DEFINES = $(if $(HAVE_OPENBLAS),-DHAVE_OPENBLAS)
$(BUILD)/ranks.o: DEFINES += $(if $(HAVE_GLOO),-DHAVE_GLOO) $(if $(HAVE_NCCL),-DHAVE_NCCL)
LIBS += $(if $(HAVE_OPENBLAS),-lopenblas) $(if $(HAVE_GLOO),-lgloo -lpthread)
ifeq ($(FLAVOUR),cuda)
DEFINES += $(if $(HAVE_CUPTI),-DHAVE_CUPTI $(CUPTI_INCLUDE:%=-I%))
LIBS += $(if $(HAVE_CUPTI),-lcupti)
endif

OBJECTS := $(SOURCES:%.cu=$(BUILD)/%.o)
TEST_OBJECTS := $(TESTS:tests/%.cpp=$(TEST_BUILD)/%.o)

$(PROGRAM): $(OBJECTS)
	$(LINK) -o $@ $^ $(LIBS)

$(TEST_RUN): $(TEST_OBJECTS) $(filter-out $(BUILD)/main.o,$(OBJECTS))
	$(LINK) -o $@ $^ $(LIBS)

$(BUILD)/%.o: %.cu $(BUILD)/config.mk
	$(COMPILE_CU) $(DEFINES) -MMD -MP -MF $(@:.o=.d) -c -o $@ $< $(if $(WERROR),2>$@.log || { cat $@.log >&2; false; })

$(TEST_BUILD)/%.o: tests/%.cpp | $(BUILD)/config.mk
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) $(if $(TSAN),$(SANITIZE)) -I. -MMD -MP -c -o $@ $<

ifeq ($(FLAVOUR),cuda)
# Another ARCH, or a card that `make config` found, compiles everything again.
ASKED_ARCH := $(ARCH)
$(OBJECTS): $(BUILD)/arch
$(BUILD)/arch: FORCE | $(BUILD)/config.mk
	@echo '$(ASKED_ARCH)' | cmp -s - $@ || echo '$(ASKED_ARCH)' >$@
# A file without kernels is the same for all cards, and compiled for one only.
WITHOUT_KERNELS := $(shell grep -L __global__ $(SOURCES))
$(WITHOUT_KERNELS:%.cu=$(BUILD)/%.o): override ARCH := $(wordlist 1,2,$(ARCH))
# wgmma and setmaxnreg belong to this one architecture; no later card has them. Elsewhere the kernels have no body, which
# an ARCH that names its cards without a 90 can have.
HOPPER := -gencode arch=compute_90a,code=sm_90a
$(BUILD)/fast_flash_hopper.o: override ARCH := $(if $(findstring 90,$(ARCH)),$(HOPPER),$(if \
	$(findstring compute_,$(ARCH)),$(ARCH),$(HOPPER)))
endif

# The commit stands in every table's caption: measure.cu is compiled again when it changes.
$(BUILD)/measure.o: $(BUILD)/commit
$(BUILD)/measure.o: DEFINES += -DCS336_COMMIT='"$(shell cat $(BUILD)/commit)"'
$(BUILD)/commit: FORCE | $(BUILD)/config.mk
	@git describe --always --dirty --exclude '*' >$@.new 2>/dev/null || echo unknown >$@.new; \
	cmp -s $@.new $@ || cp $@.new $@

-include $(OBJECTS:.o=.d) $(TEST_OBJECTS:.o=.d)

# ----------------------------------------------------------------------------------------------------------------------
# What is there? Each probe compiles and links a line: a header without its library, or the reverse, does not count. The
# oldest card that the kernels are for is sm_75.
$(BUILD)/config.mk:
	@mkdir -p $(BUILD)/tests; probe() { printf '#include <%s>\nint main() { %s; }\n' "$$2" "$$3" | \
	    $(CXX) -std=c++17 $(CUDA_HOME:%=-I%/include) $(CUPTI_INCLUDE:%=-I%) -x c++ - -o $(BUILD)/probe $(CUDA_LIBS:%=-L%) $$4 2>/dev/null && \
	    echo "HAVE_$$1 := yes" || echo "HAVE_$$1 :="; }; \
	{ probe CLI11 CLI/Version.hpp 'return CLI11_VERSION_MAJOR'; \
	  probe JSON nlohmann/json_fwd.hpp 'nlohmann::json* j; (void)j'; \
	  probe DOCTEST doctest/doctest.h 'return DOCTEST_VERSION_MAJOR' -DDOCTEST_CONFIG_DISABLE; \
	  probe OPENBLAS cblas.h 'return *openblas_get_config()' -lopenblas; \
	  probe GLOO gloo/types.h 'gloo::Slot::build(0, 0)' -lgloo; \
	  probe NCCL nccl.h 'ncclUniqueId id; ncclGetUniqueId(&id)' -lnccl; \
	  probe CUPTI cupti.h 'uint32_t v; cuptiGetVersion(&v)' -lcupti; \
	  echo "NVCC_KNOWS := $(if $(NVCC),$(filter-out 3% 5% 6% 70 72,$(patsubst sm_%,%,$(shell $(NVCC) --list-gpu-code))))"; \
	  echo "FOUND := $(sort $(if $(NVCC),$(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader \
	    2>/dev/null | grep -xE '[0-9]+\.[0-9]+'))))"; \
	  echo 'CARDS := $$(if $$(filter-out $$(NVCC_KNOWS),$$(FOUND)),,$$(FOUND))'; } >$@; rm -f $(BUILD)/probe

config: ## look again for the libraries and cards, and print what was found
	@rm -f $(BUILD)/config.mk
	@$(MAKE) --no-print-directory found
found:
	@echo "flavour: $(FLAVOUR), nvcc: $(or $(NVCC),none), ARCH: $(ARCH)"; cat $(BUILD)/config.mk

REQUIRED = $(if $(HAVE_CLI11),,libcli11-dev) $(if $(HAVE_JSON),,nlohmann-json3-dev)
REQUIRED_BY_TESTS = $(if $(HAVE_DOCTEST),,doctest-dev)
OPTIONAL = $(if $(HAVE_OPENBLAS),,libopenblas-dev) $(if $(HAVE_GLOO),,libgloo-dev)

# install(required, optional): apt is asked only for what a probe missed. A machine without a network must not hang here.
define install
	@required="$(strip $1)"; optional="$(strip $2)"; [ -n "$$required$$optional" ] && [ "$(INSTALL)" != 0 ] || exit 0; \
	line="apt-get update && apt-get install -y --no-install-recommends $$required $$optional"; \
	if [ $$(id -u) = 0 ]; then sudo=; elif sudo -n true 2>/dev/null; then sudo=sudo; else \
	    echo "missing: $$required $$optional. Please type: sudo sh -c '$$line'$${optional:+, then make config}" >&2; \
	    [ -z "$$required" ] && exit; rm -f $(BUILD)/config.mk; exit 1; fi; \
	apt="$$sudo timeout $${required:+6}60 env DEBIAN_FRONTEND=noninteractive apt-get -q -o Acquire::Retries=0 \
	    -o Acquire::http::Timeout=5 -o Acquire::https::Timeout=5 -o DPkg::Lock::Timeout=60"; \
	tried=$(BUILD)/tried; [ -z "$$required" ] && [ "$$(cat $$tried 2>/dev/null)" = "$$optional" ] && exit 0; \
	echo "installing $$required $$optional"; $$apt update >$(BUILD)/apt.log 2>&1; \
	for package in $$required; do $$apt install -y --no-install-recommends $$package >>$(BUILD)/apt.log 2>&1 || \
	    { tail -n 3 $(BUILD)/apt.log >&2; echo "could not install $$package. Please type: $$line" >&2; \
	      rm -f $(BUILD)/config.mk; exit 1; }; done; \
	for package in $$optional; do $$apt install -y --no-install-recommends $$package >>$(BUILD)/apt.log 2>&1 || \
	    echo "warning: could not install $$package; going on without it" >&2; done; \
	echo "$$optional" >$$tried; rm -f $(BUILD)/config.mk
endef

# ----------------------------------------------------------------------------------------------------------------------
# What to type

run: all ## the same, then run ./cs336 benchmarking_script
	./cs336 benchmarking_script

test: ## build and run all tests, installing what is missing first
	$(call install,$(REQUIRED) $(REQUIRED_BY_TESTS),$(OPTIONAL))
	@$(MAKE) --no-print-directory $(PROGRAM) $(TEST_RUN)
	CS336_BINARY=$(PROGRAM) $(TEST_RUN)

check: ## what the CI runs: format, warnings as errors, tests in all flavours, sanitizers, every command once
	$(call install,$(REQUIRED) $(REQUIRED_BY_TESTS),$(OPTIONAL))
	+@tests/check.sh $(NVCC)

FUZZ_SECONDS := 300
fuzz: ## libFuzzer (needs clang), five minutes each, on the reader of safetensors and on the store; finds go to build/fuzz
	@for target in safetensors store; do mkdir -p build/fuzz/$$target; \
	    clang++ -x c++ -std=c++17 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -I. \
	        -DCS336_COMMIT='"fuzz"' tests/fuzz_$$target.cpp $$target.cu measure.cu trace.cu tensor.cu matmul.cu precision.cu \
	        -o build/fuzz/run_$$target -ldl -l:libgomp.so.1 && \
	    build/fuzz/run_$$target -max_total_time=$(FUZZ_SECONDS) -timeout=5 -max_len=4096 -print_final_stats=1 \
	        -artifact_prefix=build/fuzz/ build/fuzz/$$target tests/fuzz_corpus/$$target || exit; done

notes: cs336 ## run all problems and write their tables into notes/
	./cs336 reproduce

format: ## clang-format all sources in place
	clang-format -i *.cu *.h tests/*.cpp tests/*.h

help: ## this list
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 10

clean: ## remove everything that was built
	rm -rf build cs336

FORCE:
.PHONY: all run test check fuzz notes format config found help clean FORCE
