# make | run | test | check | fuzz | notes | pictures | format | config | help | clean
#
# With a card in the machine, or where CUDA=1, ARCH="-gencode ..." or NVCC=path asks for it, nvcc compiles the .cu files
# into build/cuda; else g++ compiles the same files as C++ into build/cpu. ./cs336 is of the flavour made last. Other
# variables: V=1 (show the commands), INSTALL=0 (install nothing), PLAIN=1 (without fast/), WERROR=1 (warnings are
# errors, in a folder of its own), ASAN=1 (address and undefined behaviour sanitizers), TSAN=1 (the thread sanitizer:
# only the tests of the ranks' threads are built).

# What `make check` refuses to let grow (tests/tokens.py): the tokens of all .cu and .h files but tests/, those of the
# top folder's, and the top's tokens per line of code. Comments and blank lines are free. Whoever deletes lowers it.
BUDGET := 136000 76000 10.8

CARD := $(wildcard /dev/nvidia[0-9]* /usr/lib/wsl/lib/nvidia-smi)
NVCC_FOUND := $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
ifeq ($(origin NVCC),undefined)
NVCC := $(if $(CARD)$(ARCH)$(CUDA),$(or $(NVCC_FOUND),$(if $(ARCH)$(CUDA),nvcc)))
ifdef NVCC
else ifdef CARD
HINT := This is the CPU build: a card, but no nvcc: install the CUDA Toolkit 12.x or newer, then make config and make.
else ifdef NVCC_FOUND
HINT := This is the CPU build as no card was found; `make CUDA=1` builds for GPUs.
endif
else
NVCC_FOUND := $(NVCC)
endif
override NVCC := $(if $(ASAN)$(TSAN),,$(NVCC))
ifdef NVCC
ifeq ($(shell command -v $(NVCC)),)
$(error no $(NVCC): install the CUDA Toolkit 12.x or newer, put nvcc into PATH or name it (NVCC=path), then make)
endif
endif
FLAVOUR := $(if $(ASAN),asan,$(if $(TSAN),tsan,$(if $(NVCC),cuda,cpu)))
BUILD := build/$(FLAVOUR)$(if $(WERROR),-werror)
# PLAIN=1 links fewer of the same object files.
PROGRAM := $(BUILD)/cs336$(if $(PLAIN),-plain)
TEST_RUN := $(BUILD)/tests$(if $(PLAIN),-plain)
SOURCES := $(wildcard *.cu lib/*.cu $(if $(PLAIN),,fast/*.cu))
TESTS := $(filter-out tests/fuzz_% $(if $(PLAIN),tests/test_fast%),$(wildcard tests/*.cpp))
BASE := lib/device.cu lib/trace.cu lib/table.cu lib/tensor.cu lib/matmul.cu  # is complete without the others
ifdef TSAN
SOURCES := $(BASE) lib/ranks.cu
TESTS := tests/runner.cpp tests/test_ranks.cpp
endif
OBJECTS := $(SOURCES:%.cu=$(BUILD)/%.o)
# A test file includes the source that it tests, to see all of it. The runner links the other sources' objects.
INCLUDED := $(shell sed -n 's/^\#include "\(.*\)\.cu"/\1/p' $(TESTS))
TEST_OBJECTS := $(TESTS:tests/%.cpp=$(BUILD)/%.o)
REST := $(filter-out $(BUILD)/main.o $(INCLUDED:%=$(BUILD)/%.o),$(OBJECTS))
MAKEFLAGS := $(MAKEFLAGS) $(if $(MAKELEVEL:0=)$(filter -j%,$(MAKEFLAGS)),,-j$(shell nproc))

# ----------------------------------------------------------------------------------------------------------------------
# Flags. No fast-math anywhere: tests compare with exact results, and NaN has to stay NaN. Without math-errno sqrt is an
# instruction, also a vector's; its results are the same.

CXXFLAGS := -O2
NEEDED := -std=c++17 -fno-math-errno -fopenmp -Wall -Wextra $(if $(WERROR),-Werror)
# The check of vptr takes a descriptor (a pipe tells it what can be read), and misreports where there is none left. That
# of null takes a sixth of the compiling, and the address sanitizer reports the access anyway. At a fixed address a
# process starts in half the time, since 24 MB of pointers need not be adjusted; the tests start many.
ASAN_FLAGS := -O1 -g1 -fno-pie -no-pie -fsanitize=address,undefined -fno-sanitize=vptr,null -fno-sanitize-recover=all \
	-fno-omit-frame-pointer
SANITIZE := $(if $(ASAN),$(ASAN_FLAGS),$(if $(TSAN),-O1 -g1 -fsanitize=thread))
PHASE := -c  # with nvcc also -fatbin: the cards' code alone
DEFINES = $(if $(HAVE_OPENBLAS),-DHAVE_OPENBLAS)
LIBS = $(if $(HAVE_OPENBLAS),-lopenblas) $(if $(HAVE_GLOO),-lgloo -lpthread) -ldl

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
# Of CXXFLAGS nvcc is given the level alone: it does not know g++'s other options.
LEVEL := $(or $(lastword $(filter -O0 -O1 -O2 -O3,$(CXXFLAGS))),-O2)
LINES := -lineinfo  # a profiler then knows which line an instruction comes from
LANGUAGE := cu
COMPILE_CU = $(NVCC) -x $(LANGUAGE) -std=c++17 $(LEVEL) $(LINES) --threads 2 $(ARCH) -ccbin $(lastword $(CXX)) \
	-Xcompiler -fno-math-errno,-fopenmp,-Wall,-Wextra,-Wno-parentheses $(if $(WERROR),-Werror all-warnings -Xcompiler -Werror -Xptxas -v)
TEST_FLAGS := --diag-suppress=3357  # a lambda may capture a structured binding, says g++
LINK = $(NVCC) $(ARCH) -ccbin $(lastword $(CXX)) -Xcompiler -fopenmp
DEFINES += -DHAVE_CUDA $(if $(HAVE_CUPTI),-DHAVE_CUPTI $(CUPTI_INCLUDE:%=-I%))
LIBS += $(foreach lib,$(CUDA_LIBS),-L$(lib) -Xlinker -rpath -Xlinker $(lib)) -lcublas \
	$(if $(HAVE_NCCL),-lnccl) $(if $(HAVE_CUPTI),-lcupti)
else
COMPILE_CU = $(CXX) -x c++ $(NEEDED) $(CXXFLAGS) $(SANITIZE)
TEST_FLAGS := -U_FORTIFY_SOURCE  # it needs the optimization that test.h switches off
LINK = $(CXX) $(NEEDED) $(CXXFLAGS) $(SANITIZE)
endif

# ----------------------------------------------------------------------------------------------------------------------
# The program and its tests

all: $(if $(TSAN),$(TEST_RUN),cs336) ## build ./cs336; the first time in a folder, install what is missing
cs336: $(PROGRAM) FORCE
	@ln -f $< $@
	@$(if $(HINT),echo '$(HINT)')

ifneq ($(filter-out clean help format config,$(or $(MAKECMDGOALS),all)),)
-include $(BUILD)/config.mk
endif
ifneq ($(ASAN)$(filter test $(TEST_RUN),$(MAKECMDGOALS)),)
ifeq ($(HAVE_CXX)$(HAVE_DOCTEST),yes)
$(error the tests need doctest. Please type: sudo apt-get install doctest-dev, then make config)
endif
endif

# `12 of 44 layers.cu`: of so many missing files; what is compiled beyond that number has no total.
Q := $(if $(V),,@)
LINKED := $(if $(ASAN),$(REST),$(OBJECTS)) $(if $(ASAN)$(filter test $(TEST_RUN),$(MAKECMDGOALS)),$(TEST_OBJECTS))
MISSING := $(filter-out $(wildcard $(OBJECTS) $(TEST_OBJECTS)),$(LINKED))
say = $(eval DONE += x)$(if $(V),,@echo '$(words $(DONE))$(if $(word $(words $(DONE)),$(MISSING)), of $(words $(MISSING))) $1')

ifdef ASAN  # the runner holds the program, too: a link to it, which saves a third of the compiling
$(PROGRAM): $(TEST_RUN)
	$(Q)ln -f $< $@
else
$(PROGRAM): $(OBJECTS)
	$(Q)$(LINK) -o $@ $^ $(LIBS)
endif
$(TEST_RUN): $(TEST_OBJECTS) $(REST)
	$(Q)$(LINK) -o $@ $^ $(LIBS)
$(BUILD)/%.o: %.cu $(BUILD)/config.mk
	$(call say,$<)
	@mkdir -p $(@D)
	$(Q)$(COMPILE_CU) -I. $(DEFINES) -MMD -MP -MF $(@:.o=.d) $(PHASE) -o $@ $< $(if $(WERROR),2>$@.log || { cat $@.log >&2; false; })
$(BUILD)/%.o: tests/%.cpp $(BUILD)/config.mk
	$(call say,$<)
	$(Q)$(COMPILE_CU) $(TEST_FLAGS) -I. -Itests $(DEFINES) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<

# These four tests hardly compute: with the sanitizers a quarter of the compiling is spent on making them faster.
ifdef ASAN
$(foreach test,main profile ddp model,$(BUILD)/test_$(test).o): TEST_FLAGS += -O0
endif

$(BUILD)/lib/ranks.o $(BUILD)/fast/collectives.o: DEFINES += $(if $(HAVE_GLOO),-DHAVE_GLOO) $(if $(HAVE_NCCL),-DHAVE_NCCL)
ifeq ($(FLAVOUR),cuda)
# Another ARCH, or a card that `make config` found, compiles everything again.
ASKED_ARCH := $(ARCH)
$(OBJECTS) $(TEST_OBJECTS): $(BUILD)/arch
$(BUILD)/arch: FORCE | $(BUILD)/config.mk
	@echo '$(ASKED_ARCH)' | cmp -s - $@ || echo '$(ASKED_ARCH)' >$@
# A file without kernels is C++, which nvcc hands to g++ at once: that takes less than half the time.
WITHOUT_KERNELS := $(shell grep -L __global__ $(SOURCES))
$(WITHOUT_KERNELS:%.cu=$(BUILD)/%.o): LANGUAGE := c++
# wgmma belongs to this one architecture; no later card has it. Elsewhere the kernels have no body, which
# an ARCH that names its cards without a 90 can have.
HOPPER := -gencode arch=compute_90a,code=sm_90a
$(BUILD)/fast/flash_hopper.o: override ARCH := $(if $(findstring 90,$(ARCH)),$(HOPPER),$(if \
	$(findstring compute_,$(ARCH)),$(ARCH),$(HOPPER)))
endif

# The commit stands in the first table's caption: lib/device.cu is compiled again when it changes. A repository that
# only holds this folder has commits of its own, which are not ours.
$(BUILD)/lib/device.o: $(BUILD)/commit
$(BUILD)/lib/device.o: DEFINES += -DCS336_COMMIT='"$(shell cat $(BUILD)/commit)"'
$(BUILD)/commit: FORCE | $(BUILD)/config.mk
	@{ [ -z "$$(git rev-parse --show-cdup 2>&1)" ] && git describe --always --dirty --exclude '*'; } >$@.new 2>/dev/null || \
	echo unknown >$@.new; \
	cmp -s $@.new $@ || cp $@.new $@

-include $(OBJECTS:.o=.d) $(TEST_OBJECTS:.o=.d)

# ----------------------------------------------------------------------------------------------------------------------
# What is there? Each probe compiles and links a line: a header without its library, or the reverse, does not count. What
# is missing apt installs, once for a folder, and gives up where its update reaches no archive: a machine without a network
# must not hang here. Where what is needed is missing still, config.mk is an error message that removes itself.
APT := $(if $(filter 0,$(shell id -u)),,sudo -n) timeout 300 env DEBIAN_FRONTEND=noninteractive LC_ALL=C \
	RES_OPTIONS='timeout:2 attempts:1' apt-get -q -o Acquire::Retries=0 -o Acquire::http::Timeout=5 \
	-o Acquire::https::Timeout=5 -o DPkg::Lock::Timeout=60
$(BUILD)/config.mk:
	@mkdir -p $(BUILD); log=$(BUILD)/apt.log; \
	has() { printf '#include <%s>\nint main() { %s; }\n' "$$2" "$$3" | $(CXX) -std=c++17 $(CUDA_HOME:%=-I%/include) \
	    $(CUPTI_INCLUDE:%=-I%) -x c++ - -o $(BUILD)/probe $(CUDA_LIBS:%=-L%) $$4 2>/dev/null && echo "HAVE_$$1 := yes"; }; \
	need() { package=$$1; shift; has "$$@" || lacks="$$lacks $$package"; }; \
	probe() { lacks=; need g++ CXX cstdio 'return 0'; \
	    need libcli11-dev CLI11 CLI/Version.hpp 'return CLI11_VERSION_MAJOR'; \
	    need nlohmann-json3-dev JSON nlohmann/json_fwd.hpp 'nlohmann::json* j; (void)j'; needed=$$lacks; \
	    need doctest-dev DOCTEST doctest/doctest.h 'return DOCTEST_VERSION_MAJOR' -DDOCTEST_CONFIG_DISABLE; \
	    need libopenblas-dev OPENBLAS cblas.h 'return *openblas_get_config()' -lopenblas; \
	    need libgloo-dev GLOO gloo/types.h 'gloo::Slot::build(0, 0)' -lgloo; }; \
	probe >$@.new; \
	if [ "$$lacks" ] && [ "$(INSTALL)" != 0 ]; then \
	    echo "installing$$lacks" >&2; \
	    $(APT) update >$$log 2>&1; \
	    if grep -qE '^(Get|Hit):' $$log; then \
	        for package in $$lacks; do $(APT) install -y --no-install-recommends $$package >>$$log 2>&1 || break; done; \
	    fi; \
	    why=$$(grep -E '^(E|W): |sudo: |not found' $$log | grep -v 'resolve host' | head -n 1 | tr -d '$$#()'); \
	    probe >$@.new; \
	fi; \
	line="missing:$$lacks.$${why:+ apt-get says: $$why.} Please type: sudo apt-get install$$lacks"; \
	if [ "$$needed" ]; then \
	    echo "\$$(shell rm -f $@)\$$(error $$line; then make)" >$@.new; \
	elif [ "$$lacks" ]; then \
	    echo "$$line; then make config. Going on without." >&2; \
	fi; \
	{ has NCCL nccl.h 'ncclUniqueId id; ncclGetUniqueId(&id)' -lnccl; \
	  has CUPTI cupti.h 'uint32_t v; cuptiGetVersion(&v)' -lcupti; \
	  echo "NVCC_KNOWS := $(if $(NVCC),$(filter-out 3% 5% 6% 70 72,$(patsubst sm_%,%,$(shell $(NVCC) --list-gpu-code))))"; \
	  echo "FOUND := $(sort $(if $(NVCC),$(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader \
	    2>/dev/null | grep -xE '[0-9]+\.[0-9]+'))))"; \
	  echo 'CARDS := $$(if $$(filter-out $$(NVCC_KNOWS),$$(FOUND)),,$$(FOUND))'; } >>$@.new; \
	if cmp -s $@.new $@.old; then mv $@.old $@; else mv $@.new $@; fi

config: ## look again for the libraries and cards, and print what was found
	@[ ! -f $(BUILD)/config.mk ] || mv $(BUILD)/config.mk $(BUILD)/config.mk.old  # the same again keeps its date
	@$(MAKE) --no-print-directory found
found:
	@echo "flavour: $(FLAVOUR), nvcc: $(or $(NVCC),none), ARCH: $(ARCH)"; cat $(BUILD)/config.mk

# ----------------------------------------------------------------------------------------------------------------------
# What to type

run: all ## build ./cs336, then run ./cs336 benchmarking_script
	./cs336 benchmarking_script
	@echo 'Next: `./cs336 list` shows all problems; `./cs336 flash_forward` checks FlashAttention and answers its questions.'

ifdef TSAN
test: $(TEST_RUN)  # one OpenMP thread, since the sanitizer does not know libgomp's barriers
	OMP_NUM_THREADS=1 $(TEST_RUN) -tc="ranks: collectives over Gloo"
else
test: $(PROGRAM) $(TEST_RUN) ## build and run all tests
	@CS336_BINARY=$(PROGRAM) tests/run.sh $(TEST_RUN)
endif

check: ## what the CI runs: format, warnings as errors, tests under sanitizers, every command once
	+@tests/check.sh "$(NVCC_FOUND)" $(BUDGET)

FUZZ_SECONDS := 300
fuzz: ## libFuzzer (needs clang), five minutes, on the reader of safetensors; finds go to build/fuzz
	@mkdir -p build/fuzz/corpus
	clang++ -x c++ -std=c++17 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -I. -DCS336_COMMIT='"fuzz"' \
	    tests/fuzz_safetensors.cpp lib/safetensors.cu $(BASE) -o build/fuzz/run -ldl -l:libgomp.so.1
	build/fuzz/run -max_total_time=$(FUZZ_SECONDS) -timeout=5 -max_len=4096 -print_final_stats=1 \
	    -artifact_prefix=build/fuzz/ build/fuzz/corpus tests/fuzz_corpus/safetensors

notes: cs336 ## run again those of 2025's problems whose outputs are stale, into notes/output
	./cs336 reproduce

# Snapshots of memory are predictions, which need no card; the phases' times come from nsys_profile's output.
pictures: cs336 ## draw the pages' pictures from notes/output (needs Python's matplotlib)
	./cs336 memory_profiling --device cpu --precision fp32 --context_length 512 --out build/pictures >/dev/null
	./cs336 memory_profiling --device cpu --precision fp32 --edition 2026 --out build/pictures >/dev/null
	python3 notes/plot.py

format: ## clang-format all sources in place
	clang-format -i *.cu *.h lib/* fast/* tests/*.cpp tests/*.h

help: ## this list
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 10
	@sed -n '2,/^$$/s/^#//p' Makefile

clean: ## remove everything that was built
	rm -rf build cs336

FORCE:
.PHONY: all run test check fuzz notes pictures format config found help clean FORCE
