#!/usr/bin/env bash
# tests/check.sh NVCC BUDGET...: what `make check` does, in jobs side by side. Each step, and each case of what counts
# its cases, counts in the last line: `N passed, N failed, N skipped`. The logs stay in build/check. Without nvcc its
# flavour is skipped.
cd "$(dirname "$0")/.." || exit 1
nvcc=$1
shift
logs=build/check
rm -rf $logs && mkdir -p $logs && echo "0 passed, 1 failed, 0 skipped" >$logs/summary

skip() { echo "skipped  $1: $2" && echo "0 0 1" >>$logs/counts; }
# step NAME COMMAND...: its log may end in `N passed, N failed, N skipped`; else it is one that passed or failed.
step() {
    local name=$1 log="$logs/${1//[ \/]/_}.log" code=0 start=$SECONDS p f s
    shift
    "$@" >"$log" 2>&1 || code=$?
    read -r p f s < <(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed, ([0-9]+) skipped$/\1 \2 \3/p' "$log" | tail -n 1)
    local counted=${p:+: $p passed, $s skipped}
    if [ $code != 0 ]; then
        [ "${f:-0}" -gt 0 ] || f=1
        echo "FAILED   $name: exit code $code; from $log:"
        { grep -A 12 'ERROR:' "$log" | head -n 60; tail -n 20 "$log"; } | sed 's/^/    /'
    else
        echo "ok       $name$counted ($((SECONDS - start)) s)"
    fi
    echo "${p:-$((code == 0))} ${f:-0} ${s:-0}" >>$logs/counts
}
prints() { timeout 600 "$@" | grep .; }  # exit code 0, and something on stdout
build() { make INSTALL=0 WERROR=1 "$@"; }
set -o pipefail

# Programs that print a table take the place of two cs336.
turns() {
    local pair name columns time
    for pair in old:size,step_mean_ms:10.0 same:step_mean_ms,size:10.1 slow:size,step_mean_ms:10.5 other:size,GB:10.0; do
        IFS=: read -r name columns time <<<"$pair"
        local row=small,$time
        [ "$name" = same ] && columns=size,d_model,step_mean_ms row=small,64,$time
        printf '#!/bin/sh\necho "# a caption"; echo "%s"; echo "%s"\n' "$columns" "$row" >$logs/"$name"
        chmod +x $logs/"$name"
    done
    python3 tests/turns.py $logs/old $logs/same --rounds 3 -- x && ! python3 tests/turns.py $logs/old $logs/slow -- x &&
        python3 tests/turns.py $logs/old $logs/slow --bound 6 -- x && ! python3 tests/turns.py $logs/old $logs/other -- x
}

# What ptxas said of each kernel lies beside its object file. C75xx: it gave up on wgmma's or setmaxnreg's promise.
no_spills() {
    grep -q "bytes spill" "$1"/flash.o.log &&
        ! grep -rhE --include=*.o.log "[1-9][0-9]* bytes (stack frame|spill)|C75[0-9][0-9]" "$1"
}
cuda_flavour() {
    [ -n "$nvcc" ] || { skip "cuda flavour" "no nvcc"; return; }
    local program=build/cuda-werror/cs336
    local fast="CXXFLAGS=-O1 LINES="  # less of the code for the CPU, and no table of lines; kernels stay the same
    step "cuda build, warnings are errors" build NVCC="$nvcc" $fast EVERY_CARD="80 90" $program
    step "no kernel spills registers" no_spills build/cuda-werror
    for words in list "info --quick" "flash_forward --quick"; do step "cuda $words" prints $program $words; done
    # Each card has its own code: those of a T4, a B200 and a 5090, of the kernels that need the most registers. Only what
    # ptxas says of it is wanted, so the CPU's code, the same as above, is left out.
    step "attention for more cards" build NVCC="$nvcc" $fast PHASE=-fatbin BUILD=build/cuda-more EVERY_CARD="75 100 120" \
        build/cuda-more/flash.o build/cuda-more/fast/flash_fp32.o
    step "none of them spills registers" no_spills build/cuda-more
    if ls /dev/nvidia[0-9]* >/dev/null 2>&1; then step "cuda tests" build NVCC="$nvcc" $fast EVERY_CARD="80 90" test; fi
}
asan_flavour() {
    step "asan build" build ASAN=1 build/asan-werror/cs336 build/asan-werror/tests
    # Each block of memory remembers who asked for it: five functions here; by hand it is thirty, which take longer.
    ASAN_OPTIONS=malloc_context_size=5 CS336_REQUIRE_GPU=0 step "asan tests" build ASAN=1 test
}
# Each command once, of the program without the fast files; the rest of the whole program.
cpu_flavour() {
    local program=build/cpu-werror/cs336 plain=build/cpu-werror/cs336-plain command fixtures=tests/fixtures out=$logs/out
    step "cpu build, warnings are errors" build NVCC= $program
    step "cpu build without the fast files" build NVCC= PLAIN=1 $plain
    for command in $($plain list --format csv | sed -nE '/^command,/d; s/^([a-z_]+),.*/\1/p'); do
        case $command in
            train) step "plain train" prints $plain train --data LICENSE --quick ;;
            model) step "plain model" prints $plain model --weights $fixtures/model_weights.safetensors \
                --batch $fixtures/model_batch.safetensors --num_heads 2 --out $out ;;
            attention) step "plain attention" prints $plain attention --causal \
                --inputs $fixtures/attention_inputs.safetensors --out $out ;;
            reproduce) step "plain reproduce" $plain reproduce tp_calcs naive_ddp --quick --out $logs/notes ;;
            memory_profiling) step "plain memory_profiling" prints $plain memory_profiling --quick --out $logs/memory ;;
            benchmarking_script | nsys_profile | benchmarking_mixed_precision | torch_compile)  # half a minute each, else
                step "plain $command" prints $plain "$command" --quick --d_model 64 --d_ff 128 --num_layers 2 --num_heads 2 ;;
            *) step "plain $command" prints $plain "$command" --quick ;;
        esac
    done
    step "misuse" python3 tests/misuse.py $program
    step "check your own" python3 tests/check_self.py $program
    if git rev-parse HEAD >/dev/null 2>&1; then step "notebook" python3 tests/notebook.py notes/cs336.ipynb build/cpu-werror
    else skip notebook "not a clone of the repository"; fi
}
tsan_flavour() {
    step "tsan build" build TSAN=1
    step "tsan tests" build TSAN=1 test
}

if command -v clang-format >/dev/null; then step format clang-format --dry-run --Werror ./*.cu ./*.h lib/* fast/* tests/*.cpp tests/*.h
else skip format "no clang-format"; fi
step links python3 tests/links.py
step budget python3 tests/tokens.py "$@"
cat $logs/budget.log
step turns turns
# The longest first; as many at a time as there are cores, two or more.
for job in cuda_flavour asan_flavour cpu_flavour tsan_flavour; do
    while [ "$(jobs -rp | wc -l)" -ge "$(($(nproc) < 2 ? 2 : $(nproc)))" ]; do wait -n; done
    $job &
done
wait

awk '{ p += $1; f += $2; s += $3 } END { print p " passed, " f + 0 " failed, " s + 0 " skipped"; exit f > 0 }' $logs/counts |
    tee $logs/summary
