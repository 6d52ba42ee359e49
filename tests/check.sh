#!/usr/bin/env bash
# tests/check.sh [nvcc]: what `make check` does. Each check, and each test case of the three test runs, counts as one in
# the last line: `N passed, N failed, N skipped`. The logs stay in build/check. Without nvcc its flavour is skipped.
cd "$(dirname "$0")/.." || exit 1
nvcc=$1 passed=0 failed=0 skipped=0
logs=build/check
rm -rf $logs && mkdir -p $logs && echo "0 passed, 1 failed, 0 skipped" >$logs/summary

ok() { passed=$((passed + 1)) && echo "ok       $1 ($SECONDS s)"; }
skip() { skipped=$((skipped + 1)) && echo "skipped  $1: $2"; }
bad() {
    failed=$((failed + 1))
    echo "FAILED   $1: $2; the end of $3:"
    tail -n 40 "$3" | sed 's/^/    /'
}

# check NAME COMMAND...: one check
check() {
    local name=$1 log="$logs/${1//[ \/]/_}.log"
    shift
    if "$@" >"$log" 2>&1; then ok "$name"; else bad "$name" "exit code $?" "$log"; fi
}

# run_tests NAME COMMAND...: adds up the test cases
run_tests() {
    local name=$1 log="$logs/${1//[ \/]/_}.log" code=0 p=0 f=0 s=0
    shift
    "$@" >"$log" 2>&1 || code=$?
    read -r p f s < <(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed, ([0-9]+) skipped$/\1 \2 \3/p' "$log" | tail -n 1)
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    if [ $code = 0 ] && [ "${p:-0}" -gt 0 ]; then
        echo "ok       $name: $p passed, $s skipped ($SECONDS s)"
    else
        [ "${f:-0}" -gt 0 ] || failed=$((failed + 1))  # it died before its summary
        echo "FAILED   $name: exit code $code, ${f:-?} test cases failed; the end of $log:"
        { grep -A 12 'ERROR:' "$log" | head -n 60; tail -n 10 "$log"; } | sed 's/^/    /'
    fi
}

# run_command NAME COMMAND...: exit code 0 and something on stdout
run_command() {
    local name=$1 log="$logs/${1//[ \/]/_}.log"
    shift
    if timeout 900 "$@" >"$log" 2>"$log.err" && [ -s "$log" ]; then ok "$name"; else
        bad "$name" "exit code $?, or nothing on stdout" "$log.err"; fi
}

# every_command FLAVOUR PROGRAM: each command once, scaled down: the problems by `reproduce`, the tools by themselves
every_command() {
    local flavour=$1 program=$2 command section rest
    while IFS=, read -r command section rest; do
        [ "$section" = tool ] || continue
        case $command in
            reproduce)
                run_command "$flavour $command" "$program" reproduce --quick --out $logs/$flavour-notes
                skipped=$((skipped + $(grep -c '| could not run |' "$logs/${flavour}_$command.log"))) ;;
            train) run_command "$flavour $command" "$program" train --data LICENSE --quick ;;
            model)
                if [ -f tests/fixtures/model_weights.safetensors ]; then
                    run_command "$flavour $command" "$program" model --weights tests/fixtures/model_weights.safetensors \
                        --batch tests/fixtures/model_batch.safetensors --num_heads 2 --out $logs/$flavour.safetensors
                else skip "$flavour $command" "no tests/fixtures/model_weights.safetensors"; fi ;;
            attention) run_command "$flavour $command" "$program" attention --causal \
                --inputs tests/fixtures/attention_inputs.safetensors --out $logs/$flavour.safetensors ;;
            *) run_command "$flavour $command" "$program" "$command" --quick ;;
        esac
    done < <("$program" list --format csv)
}

if command -v clang-format >/dev/null; then
    check format clang-format --dry-run --Werror ./*.cu ./*.h tests/*.cpp tests/*.h
else
    skip format "no clang-format"
fi

if command -v python3 >/dev/null; then
    check links python3 tests/links.py
else
    skip links "no python3"
fi

# What only makes it faster can be left out: the build and the tests of PLAIN=1, and nobody else names it.
no_fast_names() {
    ! grep -nE '(^|[^a-z_])fast[_.][a-z]' main.cu precision.cu attention.cu layers.cu model.cu ddp.cu cs336.h gpu.h measure.cu table.cu \
        trace.cu tensor.cu matmul.cu safetensors.cu store.cu ranks.cu
}
check "core and base do not name the fast files" no_fast_names

# check_flavour FLAVOUR NVCC SUFFIX: builds the whole program and the one without the fast files; tests, and runs each
# command of, the one with this suffix
check_flavour() {
    local flavour=$1 nvcc=$2 suffix=$3
    local build=build/$flavour-werror
    check "$flavour build, warnings are errors" make INSTALL=0 WERROR=1 NVCC="$nvcc" $build/cs336 $build/tests/run
    check "$flavour build without the fast files" make INSTALL=0 WERROR=1 PLAIN=1 NVCC="$nvcc" $build/cs336-plain
    run_tests "$flavour$suffix tests" make INSTALL=0 WERROR=1 PLAIN=${suffix:+1} NVCC="$nvcc" test
    if [ -x $build/cs336$suffix ]; then every_command "$flavour$suffix" $build/cs336$suffix; fi
}

# What ptxas said of each kernel lies beside its object file. C75xx: it gave up on wgmma's or setmaxnreg's promise.
no_spills() {
    [ -s build/cuda-werror/fast_flash_hopper.o.log ] &&
        ! grep -hE '[1-9][0-9]* bytes (stack frame|spill)|C75[0-9][0-9]' build/cuda-werror/*.o.log
}
# Seven architectures take four times as long as two, so where there is no card the program is built for two, and of the
# others only the core's kernels are compiled.
if [ -n "$nvcc" ]; then
    export EVERY_CARD="80 90"
    check_flavour cuda "$nvcc" ""
    check "no kernel spills registers" no_spills
    check "core kernels compile for every card" make INSTALL=0 WERROR=1 NVCC="$nvcc" BUILD=build/cards CARDS= \
        EVERY_CARD="75 86 89 100 120" build/cards/attention.o build/cards/layers.o
else
    skip "cuda flavour" "no nvcc"
fi
unset CS336_REQUIRE_GPU  # what follows has no GPU code
check_flavour cpu "" -plain  # the tests of the whole program, by g++, are those under the sanitizers
if command -v python3 >/dev/null; then
    run_tests "misuse" python3 tests/misuse.py build/cpu-werror/cs336 --short
    run_tests "check your own" python3 tests/check_self.py build/cpu-werror/cs336
    if git rev-parse HEAD >$logs/git.log 2>&1; then
        run_tests "notebook" python3 tests/notebook.py notes/cs336.ipynb build/cpu-werror
    else
        skip notebook "not a clone of the repository"
    fi
else
    skip misuse "no python3"
    skip "check your own" "no python3"
    skip notebook "no python3"
fi
run_tests "asan tests" make INSTALL=0 WERROR=1 ASAN=1 test
# One OpenMP thread, since the sanitizer does not know libgomp's barriers; and no case that asks for a speed.
tsan_tests() {
    make INSTALL=0 WERROR=1 TSAN=1 build/tsan-werror/cs336 build/tsan-werror/tests/run &&
        OMP_NUM_THREADS=1 CS336_BINARY=build/tsan-werror/cs336 build/tsan-werror/tests/run \
            -tc="store*,ranks: collectives over Gloo,ranks: strangers*,ranks: --nproc*,ranks: what torchrun*"
}
run_tests "tsan tests" tsan_tests

echo "$passed passed, $failed failed, $skipped skipped" | tee $logs/summary
[ $failed = 0 ]
