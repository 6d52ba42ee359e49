#!/usr/bin/env python3
"""tests/misuse.py PROGRAM: wrong command lines. Each ends at once with exit code 2, nothing on stdout, and one
line on stderr that has these words. The last line is `N passed, N failed, N skipped`."""
import concurrent.futures, os, subprocess, sys, time

WRONG = """
nonsense                                                   | no such command
benchmarking_scrpt                                         | benchmarking_scrpt: no such command; `cs336 list` names them
--quick list                                               | --quick: no such command
list extra                                                 | extra: no such option; --help lists them, and a list takes commas
list --nonsense                                            | --nonsense: no such option
list --formt csv                                           | --formt: no such option; --help lists them
list -x                                                    | -x: no such option
list --format json                                         | --format: json not in {md,csv}
tp_calcs --steps 3                                         | --steps: no such option
train                                                      | --data is required
model --weights LICENSE --batch LICENSE --num_heads 2      | --out is required
benchmarking_script --size                                 | --size
benchmarking_script --size huge                            | --size: huge not in {small,medium
benchmarking_script --size ''                              | --size:  not in {small
benchmarking_script --size small --d_model 64              | excludes
benchmarking_script --steps 0                              | --steps: got 0, takes a whole number from
benchmarking_script --steps -1                             | --steps: got -1, takes a whole number from
benchmarking_script --steps 2.5                            | --steps: got 2.5, takes a whole number from
benchmarking_script --steps 1e3                            | --steps: got 1e3, takes a whole number from
benchmarking_script --steps ''                             | --steps: got , takes a whole number from
benchmarking_script --steps 1,2                            | --steps: got 1,2, takes a whole number from
benchmarking_script --steps 18446744073709551617           | --steps: got 18446744073709551617, takes a whole number from
benchmarking_script --precision fp32 bf16                   | bf16: no such option; --help lists them, and a list takes commas
benchmarking_script --warmup 1,,2                          | 1,,2: a comma has nothing before or behind it
benchmarking_script --warmup=1,2,                          | 1,2,: a comma has nothing before or behind it
benchmarking_script --size ,                               | ,: a comma has nothing before or behind it
benchmarking_script --steps 010                            | --steps: got 010, takes a whole number from
benchmarking_script --batch_size 0x10                      | --batch_size: got 0x10, takes a whole number from
benchmarking_script --seed 1.5                             | --seed: got 1.5, takes a whole number from
communication_accounting --tp 4097                         | --tp: got 4097, takes a whole number from 1 to 4096
fsdp_calcs --tokens 2147483648                             | --tokens: got 2147483648, takes a whole number from 1 to 2147483647
benchmarking_script --steps 1 --steps 2                    | --steps
benchmarking_script --quick=maybe                          | --quick
benchmarking_script --precision fp8                        | --precision: fp8 not in {fp32,tf32
benchmarking_script --mode fast                            | --mode: fast not in {eager,fused,flash}
benchmarking_script --device gpu                           | --device: gpu not in {auto,cpu,cuda}
benchmarking_script --edition 2024                         | --edition: 2024 not in {2025,2026}
benchmarking_script --d_model 63 --num_heads 2             | not divisible by --num_heads 2
benchmarking_script --d_model 62 --num_heads 2             | not divisible by --num_heads 2 into heads of an even size
benchmarking_script --checkpoint quarter                   | --checkpoint: got quarter, takes a whole number
benchmarking_script --seed -1                              | --seed: got -1, takes a whole number from
nsys_profile --trace ''                                    | --trace: takes a file's name
memory_profiling --out ''                                  | --out '': Invalid argument
attention --inputs LICENSE --out ''                        | --out: takes a file's name
reproduce tp_calcs --out ''                                | --out '': Invalid argument
reproduce tp_calcs --device cpu                            | --out: is required on a CPU
nsys_profile --trace no/such/x.json                        | --trace: no/such/x.json
nsys_profile --trace tests                                 | --trace: tests: cannot be written: expected a regular file
flash_leaderboard --d_model 1024 --num_heads 3             | --d_model 1024: takes 16, 32, 64, 80 or 128 times
flash_leaderboard --d_model 272 --num_heads 16             | --d_model 272: takes 16, 32, 64, 80 or 128 times
flash_leaderboard --impl none                              | --impl: none not in {all,auto,
attention --inputs README.md --out o --impl all            | --impl: all not in {auto,
benchmarking_script --warmup 0,1,0                         | --warmup: takes each value once
naive_ddp --nproc 0                                        | --nproc: got 0, takes a whole number from
naive_ddp --backend mpi                                    | --backend: mpi not in {auto,nccl,gloo}
naive_ddp --timeout nan                                    | --timeout: got nan, takes a number from 1.175494351e-38 to 100000
ddp_bucketed_benchmarking --bucket_size_mb inf             | --bucket_size_mb: got inf, takes a number from
train --data LICENSE --lr 0                                | --lr: got 0, takes a number from
train --data LICENSE --num_heads 3                         | not divisible by --num_heads 3
train --data no/such/file                                  | --data: File does not exist: no/such/file
attention --inputs LICENSE --out LICENSE                   | takes another file than the input
train --data LICENSE --save FILE                           | --save: no such option
reproduce nonsense                                         | nonsense
"""


def what_is_amiss(line):
    call, words = map(str.strip, line.split(" | "))
    start = time.monotonic()
    try:
        r = subprocess.run([PROGRAM, *(word.strip("'") for word in call.split())], capture_output=True, text=True,
                           stdin=subprocess.DEVNULL, timeout=20)
    except subprocess.TimeoutExpired: return f"{call}: it runs"
    amiss = {f"exit code {r.returncode}": r.returncode != 2, "something on stdout": r.stdout, "not one line on stderr": r.stderr.count("\n") != 1,
             f"no '{words}'": words not in r.stderr, "late": time.monotonic() - start > 5}
    return any(amiss.values()) and f"{call}: {', '.join(w for w in amiss if amiss[w])}: {r.stderr[:300]!r}"


PROGRAM = os.path.abspath(sys.argv[1])
os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool: results = list(pool.map(what_is_amiss, WRONG.strip().splitlines()))
failures = [r for r in results if r]
for failure in failures: print("ERROR:", failure)
print(f"{len(results) - len(failures)} passed, {len(failures)} failed, 0 skipped")
sys.exit(bool(failures))
