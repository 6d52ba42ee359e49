#!/usr/bin/env bash
# tests/run.sh RUNNER: all test cases. Most run eight in each process, in JOBS processes at a time (as many as cores, at
# most 8). Those of the ranks, which have deadlines and mostly wait, run afterwards, two in each of three processes at a
# time; and by themselves those over NCCL and those that look at the memory in use or at the time. Each process is a
# line, with its first case's number. The logs stay in RUNNER.logs; the last line is `N passed, N failed, N skipped`.
export RUNNER=$1 LOGS=$1.logs
export OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1  # without these each cs336 sets them, and starts itself anew
rm -rf "$LOGS" && mkdir -p "$LOGS" || exit 1

part() {  # part NAME OPTIONS...: one process. Its log is shown if it fails, and ends in its counts also if it died.
    local log=$LOGS/$1 code=0 start=$SECONDS
    "$RUNNER" "${@:2}" >"$log" 2>&1 || code=$?
    [ $code = 0 ] && echo "$1: $(tail -n 1 "$log"); $((SECONDS - start)) s" && return
    tail -n 1 "$log" | grep -qE '^[0-9]+ passed, [1-9][0-9]* failed' || echo "0 passed, 1 failed, 0 skipped" >>"$log"
    echo "--- $LOGS/$1: exit code $code of $RUNNER ${*:2}"
    grep -A 12 -E 'ERROR:|runtime error|Sanitizer' "$log" | head -n 60
    tail -n 5 "$log"
}
export -f part

# parts PROCESSES CASES NAME FILTER: the cases that the filter leaves, so many in each process.
parts() {
    local cases
    cases=$("$RUNNER" -c "$4" | sed -nE 's/.*filters: ([0-9]+)$/\1/p')
    [ "${cases:-0}" -gt 0 ] || echo "0 passed, 1 failed, 0 skipped" >"$LOGS/none: $4"
    seq 1 "$2" "${cases:-0}" | xargs -P "$1" -I{} bash -c "part $3{} '$4' -f={} -l=\$(({} + $2 - 1))"
}

parts "${JOBS:-$(($(nproc) < 8 ? $(nproc) : 8))}" 8 "" -tce="ranks:*,NCCL:*,measure:*"
parts 3 2 ranks -tc="ranks:*"
part alone -tc="NCCL:*,measure:*"
for log in "$LOGS"/*; do grep '^skipped ' "$log"; tail -n 1 "$log"; done | awk '
    /^skipped/ { n = $2 + 0; sub(/^[^:]*: /, ""); why[$0] += n }
    /passed/ { p += $1; f += $3; s += $5 }
    END { for (w in why) print "skipped " why[w] ": " w; print p + 0 " passed, " f + 0 " failed, " s + 0 " skipped"; exit !p || f > 0 }'
