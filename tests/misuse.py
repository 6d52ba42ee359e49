#!/usr/bin/env python3
"""tests/misuse.py PROGRAM [--short] [--write] [options|files|surroundings|strangers|gpu ...]: the program given what it does not take.

  options       every option of every command, as --help lists them, with values of the wrong kind or out of range
  files         safetensors that are damaged, lie or hold nonsense, and what is no file at all
  surroundings  signals, full disks, closed streams, locales, environment variables, no GPU
  strangers     connections to rank 0's port that are no ranks
  gpu           a GPU that others keep busy, or whose memory they hold

Failures are printed as they occur. At the end come a table (with --write in notes/misuse.md, too) and
the line `N passed, N failed, N skipped`, in rows of it. --short: every option, fewer values and files."""
import collections, concurrent.futures, csv, ctypes, json, math, os, random, re, resource, shutil, signal, socket, struct, subprocess, sys, tempfile, time

os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
PROGRAM = os.path.abspath(sys.argv[1])
SHORT, WRITE = "--short" in sys.argv, "--write" in sys.argv
PARTS = [word for word in sys.argv[2:] if not word.startswith("--")] or ["options", "files", "surroundings", "strangers", "gpu"]
FOLDER = tempfile.TemporaryDirectory(prefix="cs336_misuse_")
FIXTURES = "tests/fixtures/"
# What the program would otherwise set for itself, by starting once more: twice the time of a call.
os.environ.update(OMP_WAIT_POLICY="passive", OPENBLAS_CORETYPE=os.environ.get("OPENBLAS_CORETYPE", "Haswell"))


def at(name):
    return os.path.join(FOLDER.name, name)


# ----------------------------------------------------------------------------------------------------------------------
# Running, checking, counting

Result = collections.namedtuple("Result", "code out err seconds")
rows = {}  # what was tried -> [exit codes, number of failures, why it was skipped]


def run(words, limit_gib=None, timeout=60, **more):
    """limit_gib: of address space, so that a wrong size cannot take the machine along."""
    if limit_gib:
        more["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_gib << 30,) * 2)
    more = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    start = time.monotonic()
    try:
        r = subprocess.run([PROGRAM, *words], timeout=timeout, **more)
    except subprocess.TimeoutExpired:
        return Result("hung", b"", b"", timeout)
    return Result(r.returncode, r.stdout or b"", r.stderr or b"", time.monotonic() - start)


def row(what):
    return rows.setdefault(what, [collections.Counter(), 0, ""])


def skip(what, why):
    row(what)[2] = why
    print(f"skipped  {what}: {why}", flush=True)


NO_NUMBER = re.compile(r"(?<![a-z])(nan|inf)x?(?![a-z])")
# A whole's time, and a rate, are never 0. A spread may be, and a part: what is sent by one rank, or computed by AdamW.
TIME_OR_RATE = re.compile(r"(\bms|_ms|\(ms\)|[Tt]ime|/s|/second)( |$)(?!\(%\))")
MAY_BE_0 = re.compile(r"std|StdDev|Comm|overhead|gradients|measured \(|matmul|attention ms")


def cells_of(text):
    """(column, cell) of all tables, in md, csv or json. Beside a column "unit" the unit belongs to each cell's column."""
    columns, csv_follows = None, False
    for line in text.splitlines():
        rows_here = []
        if line.startswith('{"caption"'):
            table = json.loads(line)
            columns, rows_here = table["columns"], table["rows"]
        elif line.startswith("|") or (csv_follows and line):
            cells = [c.strip() for c in line.strip("|").split("|")] if line[0] == "|" else next(csv.reader([line]))
            if columns: rows_here = [cells]
            else: columns = cells
        else: columns, csv_follows = None, line.startswith("# ")
        for cells in rows_here:
            unit = " " + cells[columns.index("unit")] if "unit" in columns else ""
            yield from ((column + unit, str(cell)) for column, cell in zip(columns, cells))


def no_result(r):
    """A cell that is no number, or a time or rate of 0, in a table of a run that succeeded."""
    for column, cell in cells_of(r.out.decode("utf-8", "replace")) if r.code == 0 else ():
        zero = re.fullmatch(r"-?[0.]*0[0.]*(e[+-]\d+)?( ?[a-zμ%/]+)?", cell, re.I)
        if NO_NUMBER.search(cell) or (zero and TIME_OR_RATE.search(column) and not MAY_BE_0.search(column)):
            return f"{cell} under {column}"


def check(what, words, r, codes, *problems, names=""):
    """One line on stderr (beside the one about --device auto) that says `names`, where it failed; no control characters;
    else tables of results."""
    lines = [l for l in r.err.decode("utf-8", "replace").split("\n") if l and not l.startswith(("device auto:", "backend"))]
    failed = r.code not in (0, -signal.SIGPIPE, -signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP)
    problems = [p for p in problems if p] + [p for p in (
        no_result(r),
        r.code not in codes and f"exit code {r.code}, expected {' or '.join(map(str, codes))}",
        failed and len(lines) != 1 and f"{len(lines)} lines on stderr",
        failed and any(ord(c) < 32 or ord(c) == 127 for l in lines for c in l) and "a control character on stderr",
        failed and max(map(len, lines), default=0) > 7000 and "a line of more than 7000 bytes",
        failed and names not in "".join(lines) and f"{names} is not named",
        r.code == 2 and r.out and "wrong usage, but something on stdout",
        r.code == 2 and r.seconds > 1.5 and f"wrong usage, found after {r.seconds:.1f} s") if p]
    row(what)[0][r.code] += 1
    if problems:
        row(what)[1] += 1
        call = " ".join(words)[:200].encode("ascii", "backslashreplace").decode()
        print(f"FAILED   {what}: {call}: {'; '.join(problems)}; {r.err[:300]!r}", flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# Options

TEXTS = ["", " ", "\n", "--", "nonsense", "ключ", "%s%n", "\x1b[31m\x07", "x" * 5000]
NO_NUMBERS = ["nan", "-nan", "inf", "-inf", "infinity", "0x10", "1e", "1e+", "--1", "+-1", "1.2.3", ".", "1_000", "1;2", "1 ", " 1",
              "1\n", "1,5 ", "１", "-1", "1e999", "-1e-9", "-99999999999999999999"]
EMPTY_ITEMS = [",", "1,,2", "1,2,", ",1", "1, 2", "1,-2"]
BAD_TARGETS = ["", "no/such/folder/x", "LICENSE/x", "tests", "tests/", "/dev/null", "/dev/full"]  # nothing is written there
KINDS = r"(?:a whole number from|whole numbers from|a finite number|numbers greater|one of|one or more|a file name|a folder)"


def wrong_values(takes):
    """(row of the table, value) for what an option refuses that takes what its help says."""
    if takes == "a file name":
        return [("a file name: empty", "")]  # others are found when it is read
    if takes.startswith(("a file name", "a folder")):
        ending = re.search(r"ends in (\.\w+)", takes)
        targets = BAD_TARGETS + ([f"no/such/folder/x{ending[1]}", f"LICENSE/x{ending[1]}", ending[1], "x"] if ending else [])
        if takes.startswith("a folder"):
            targets = ["", "no/such/folder/x", "LICENSE", "LICENSE/x", "/dev/null"]
        return [("a file to write: its folder is not there, it is a folder or a device", t) for t in targets]
    if "e.g. forward" in takes:
        return [("a list: an empty or unknown item", v) for v in ("", ",", "forward,", "nonsense", "forward,nonsense")]
    values = [("text: empty, blank, a word, control characters, `%n`, 5000 bytes", v) for v in TEXTS]
    if "number" not in takes:
        wrong = ["0", "md ", "fp32,,fp16", "fp32,", ",", "small,tiny", "fp32;fp16", "17"]
        return values + [("a name: unknown, with a blank, twice with nothing between", v) for v in wrong]
    low, high = (list(map(int, re.findall(r"\d+", takes))) + [0, 0])[:2] if "whole" in takes else (0, 0)
    numbers = NO_NUMBERS + (["2.5", "1e3", "+1"] if "whole" in takes else ["1e400"])
    if takes.endswith("less than 1"): numbers += ["1", "1.5"]
    if "whole" in takes: numbers += [str(high + 1), str(high + (1 << 32)), str(1 << 64), str((1 << 64) + 1)]
    if "whole" in takes and high < 1 << 31: numbers += [str(1 << 31), str(1 << 32), str((1 << 32) + 1), str(1 << 63)]
    if low > 0 or "greater than 0" in takes: numbers += ["0", "-0"]
    values += [("a number: not one, or out of range, up to past 2^64", v) for v in numbers]
    if "commas" in takes:
        return values + [("a list: an empty or unknown item", v) for v in EMPTY_ITEMS]
    return values + [("a list, or a decimal comma, where one number is taken", v) for v in ("1,2", "1,5", "1,")]


def options_of(command):
    """(name, whether it has to be given, what it takes or None for a flag)"""
    found = []
    for line in run([command, "--help"]).out.decode().splitlines():
        if m := re.match(r"  --(\w+) +(REQUIRED)? *(.*)", line):
            takes = re.search(rf"\. Takes ({KINDS}.*?)(?: \(default [^()]*\))?$", m[3])
            found.append((m[1], bool(m[2]), takes[1] if takes else None))
    return found


CONTRADICTIONS = """
benchmarking_script --size small --d_model 64            | --d_model
benchmarking_script --d_model 63 --num_heads 2           | --d_model 63
nsys_profile --d_model 62 --num_heads 2                  | --num_heads 2
memory_profiling --num_heads 1048576                     | --num_heads
naive_ddp_benchmarking --d_model 63 --num_heads 2        | --d_model 63
benchmarking_script --warmup 1,2 --table seconds         | --warmup
benchmarking_script --warmup 1,2 --plot build/x.svg      | --plot
benchmarking_script --warmup 1,2 --trace build/x.json    | --trace
benchmarking_script --warmup 1,2 --roofline              | --roofline
torch_compile --warmup 1,2                               | --warmup
optimizer_state_sharding_accounting --precision fp16     | --precision
nsys_profile --range step,nonsense                       | nonsense
nsys_profile --mode eager,fused --range forward/layer/attention/mask | mode fused
flash_leaderboard --head_size 17                         | --head_size
attention --inputs none --out build/x --impl none        | --impl
train --data LICENSE --steps 8 --stop_at 9               | --stop_at
train --data LICENSE --d_model 63                        | --d_model 63
train --data LICENSE --num_heads 128                     | --num_heads 128
nonsense                                                 | nonsense
benchmarking                                             | benchmarking_mixed_precision
--quick list                                             | --quick
"""

# The largest values that the options take: a row that says OOM, or a line, but never a crash or a wrapped number.
LARGEST = """
benchmarking_script --quick --d_model 1048576 --d_ff 1048576 --num_heads 1
benchmarking_script --quick --vocab_size 1048576 --d_model 1048576 --num_heads 8192
benchmarking_script --quick --batch_size 1048576 --context_length 1048576
torch_compile --quick --batch_size 1048576 --context_length 1048576
flash_leaderboard --quick --num_heads 1048576 --context_length 1048576
memory_profiling --quick --batch_size 1048576 --context_length 1048576 --precision fp32
nsys_profile --quick --batch_size 1048576 --context_length 1048576 --range forward
train --data LICENSE --quick --context_length 1048576
train --data LICENSE --quick --d_model 1048576 --d_ff 1048576
train --data LICENSE --quick --steps 1 --batch_size 1048576
naive_ddp_benchmarking --quick --d_model 1048576 --d_ff 1048576 --num_heads 1
naive_ddp_benchmarking --quick --batch_size 1048576 --context_length 1048576
distributed_communication_single_node --quick --nproc 2 --sizes_mb 1e5
communication_accounting --d_model 1048576 --d_ff 1048576 --num_layers 1048576 --tokens 1048576 --fsdp 1048576 --tp 1048576
communication_accounting --tflops 1e308 --bandwidth_gb 1e308 --gpu_gb 1e308 --tpu_gb 1e-308
fsdp_tp_calcs --batch_tokens 1048576 --d_model 1048576 --d_ff 1048576 --fsdp 1048576 --tp 1048576 --tflops 1e200 --bandwidth_gb 1e200
"""


def try_options(pool):
    commands = re.findall(r"^  [\d. ]{13} (\w+) ", run(["--help"]).out.decode(), re.M)
    assert len(commands) > 25, commands
    jobs, seen, pick = [], set(), random.Random(0)
    for command in commands:
        options = options_of(command)
        if not options and b"not built" in run([command]).err: continue
        assert options, command
        given = {f"--{name}": "3" if "number" in takes else at("o") for name, required, takes in options if required}
        others = lambda option: [word for pair in given.items() if pair[0] != option for word in pair]

        def job(what, words, option):
            jobs.append((what, [command, *words], option))

        for name, _, takes in options:
            option = f"--{name}"
            if takes is None:
                for end in ("=1", "=", "=true", "=false"): job("a flag that is given a value", [*others(option), option + end], option)
                continue
            job("an option without its value", [*others(option), option], option)
            job("an option given twice", [*others(option), option, "1", option, "1"], option)
            # One reader reads the option in every command: there all values once, then two more for each command.
            values = wrong_values(takes)
            if (name, takes) in seen or SHORT: values = pick.sample(values, min(len(values), 2))
            seen.add((name, takes))
            for what, value in values: job(what, [*others(option), option, value], option)
        for word in ("--nonsense", "extra", "-x", "--", "-", "-format", "---format", "--formatmd", "--no-quick"):
            job("an unknown option, a word too many", [*others(""), word], word)
    for what, _, _ in jobs: row(what)  # in this order, whichever call ends first
    list(pool.map(lambda j: check(j[0], j[1], run(j[1], timeout=10), [2], names=j[2]), jobs))
    for line in CONTRADICTIONS.strip().splitlines():
        call, names = map(str.strip, line.split("|"))
        check("options that contradict each other or the command", call.split(), run(call.split()), [2], names=names)
    for call in LARGEST.strip().splitlines()[:: 4 if SHORT else 1]:
        r = run([*call.split(), *([] if re.match(r"\w+_(accounting|calcs)", call) else ["--device", "cpu"])], limit_gib=16)
        check("the largest values, all at once", call.split(), r, [0, 1])


# ----------------------------------------------------------------------------------------------------------------------
# Files

def unpacked(data):
    n = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:8 + n]), data[8 + n:]


def packed(header, body):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def damaged(data):
    """(row of the table, what, bytes) made from a good file."""
    header, body = unpacked(data)
    head, pick = len(data) - len(body), random.Random(0)
    every = 15 if SHORT else 300
    cuts = range(len(data)) if len(data) <= every else sorted(pick.sample(range(len(data)), every))
    for n in cuts: yield "cut short", f"at {n}", data[:n]
    bits = range(8 * head) if 8 * head <= every else pick.sample(range(8 * head), every)
    for bit in bits:
        yield "a bit of the header flipped", f"bit {bit}", data[:bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1:]
    for i in range(every // 15):
        broken = bytearray(data)
        for _ in range(1 + i): broken[pick.randrange(head, len(data))] ^= 1 << pick.randrange(8)
        yield "bits of the data flipped", f"{i + 1} of them", bytes(broken)
    first = next(k for k in header if k != "__metadata__")
    entry = header[first]
    begin, end = entry["data_offsets"]
    for what, new in {"huge shape": {"shape": [2**32, 2**32]}, "2^63": {"shape": [2**63]}, "minus one": {"shape": [-1]},
                      "no dimensions": {"shape": []}, "nothing": {"shape": [0] * len(entry["shape"])},
                      "many dimensions": {"shape": [1] * 100000}, "overlap": {"data_offsets": [begin + 4, end + 4]},
                      "backwards": {"data_offsets": [end, begin]}, "past the end": {"data_offsets": [2**62, 2**62 + end - begin]},
                      "dtype": {"dtype": "F31"}, "another dtype": {"dtype": "U8"}}.items():
        yield "a header that lies: sizes, offsets, dtypes", what, packed({**header, first: {**entry, **new}}, body)
    yield "a header that lies: sizes, offsets, dtypes", "one byte more", data + b"x"
    for what, bad in {"2^64 - 1 bytes": struct.pack("<Q", 2**64 - 1) + data[8:], "1 GB": struct.pack("<Q", 10**9) + data[8:],
                      "100000 levels": packed(b'{"a":' + b"[" * 100000 + b"]" * 100000 + b"}", body), "a list": packed([], b""),
                      "a name twice": packed(b'{"a":{},"a":{}}', body), "nothing": b"", "no tensors": packed({}, b""),
                      "no UTF-8": packed(b'{"\xff":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
                      "control characters": packed(b'{"\\u0007\\n\\u001b[2J":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
                      }.items():
        yield "a header that is none", what, bad
    for key in header.get("__metadata__", {}):
        for value in ("", "0", "-1", "nan", "1e999", "2147483647", "2.5", "x"):
            new = {**header, "__metadata__": {**header["__metadata__"], key: value}}
            yield "a checkpoint's metadata: each entry wrong in 8 ways", f"{key} = {value!r}", packed(new, body)


MAY_PASS = ("a bit of the header flipped", "bits of the data flipped", "a checkpoint's metadata: each entry wrong in 8 ways")


def tensors(**content):
    """A file of {name: (dtype, shape, bytes)}."""
    header, body = {}, b""
    for name, (dtype, shape, data) in content.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    return packed(header, body)


def nonsense():
    """(which way, what, bytes, exit codes): files in order whose content is not."""
    tokens = lambda *values: ("I64", [1, len(values)], struct.pack(f"<{len(values)}q", *values))
    for what, x, y in (("token -1", tokens(0, -1), tokens(0, 1)), ("token past the vocabulary", tokens(0, 31), tokens(0, 1)),
                       ("token 2^32", tokens(0, 2**32), tokens(0, 1)), ("target 2^63 - 1", tokens(0, 1), tokens(0, 2**63 - 1)),
                       ("no tokens", tokens(), tokens()), ("fewer targets", tokens(0, 1), tokens(0))):
        yield "model --batch", what, tensors(tokens=x, targets=y), [1]
    header, body = unpacked(open(FIXTURES + "model_weights.safetensors", "rb").read())
    yield "model --weights", "NaN", packed(header, b"\xff" * len(body)), [0]
    floats = lambda shape: ("F32", list(shape), b"\xff" * (4 * math.prod(shape)))
    for what, width in (("d_model 0", 16), ("d_ff 0", 24)):
        entries = {k: [0 if n == width else n for n in v["shape"]] for k, v in header.items() if k != "__metadata__"}
        yield "model --weights", what, tensors(**{k: floats(shape) for k, shape in entries.items()}), [1]
    yield "attention --inputs", "dO for do", tensors(**{k: floats((1, 3, 16)) for k in ("q", "k", "v", "dO")}), [1]
    yield "model --batch", "a mask, too", tensors(tokens=tokens(0, 1), targets=tokens(1, 2), mask=tokens(1, 1)), [1]
    for what, q, k, v, codes in (("NaN", (1, 3, 16), (1, 3, 16), (1, 3, 16), [0]), ("empty", (1, 0, 16), (1, 0, 16), (1, 0, 16), [1]),
                                 ("head size 17", (1, 2, 17), (1, 2, 17), (1, 2, 17), [1]), ("a vector", (16,), (16,), (16,), [1]),
                                 ("another batch", (2, 3, 16), (1, 3, 16), (1, 3, 16), [1]), ("another v", (1, 3, 16), (1, 3, 16), (1, 4, 16), [1])):
        yield "attention --inputs", what, tensors(q=floats(q), k=floats(k), v=floats(v)), codes


def try_files(pool):
    tiny = "--d_model 8 --d_ff 8 --num_layers 1 --num_heads 2 --context_length 8 --batch_size 1 --steps 1".split()
    train = ["train", "--data", "LICENSE", "--device", "cpu", "--quick", "--sample", "0"]
    assert run([*train, *tiny, "--save", at("checkpoint")]).code == 0
    model = ["model", "--num_heads", "2", "--out", at("out"), "--device", "cpu"]
    weights, batch = FIXTURES + "model_weights.safetensors", FIXTURES + "model_batch.safetensors"
    ways = {"model --weights": (weights, lambda f: [*model, "--batch", batch, "--weights", f]),
            "model --batch": (batch, lambda f: [*model, "--weights", weights, "--batch", f]),
            "attention --inputs": (FIXTURES + "attention_inputs.safetensors", lambda f: ["attention", "--inputs", f, "--out", at("out"), "--device", "cpu"]),
            "train --load": (at("checkpoint"), lambda f: [*train, "--load", f])}
    os.mkfifo(at("fifo"))
    jobs = []
    for way, (good, call) in ways.items():
        for what, which, data in damaged(open(good, "rb").read()):
            jobs.append((what, f"{way} {which}", call, None, data, [0, 1] if what in MAY_PASS else [1]))
        for path in (FOLDER.name, "/dev/zero", "/dev/full", at("none"), at("fifo")):
            jobs.append(("no file: a folder, a device, a FIFO, nothing", f"{way} {path}", call, path, None, [1]))
    for way, which, data, codes in nonsense():
        jobs.append(("in order, but NaN, no tokens, empty, of other shapes", f"{way} {which}", ways[way][1], None, data, codes))
    for path in (FOLDER.name, "/dev/zero", "/dev/null", at("none")):
        jobs.append(("no file: a folder, a device, a FIFO, nothing", f"train --data {path}", lambda f: [*train[:1], *train[3:], "--data", f], path, None, [1]))
    with open(at("huge"), "wb") as f: f.truncate(3 << 30)  # sparse: it takes no room
    jobs.append(("a text of 3 GiB", "", lambda f: [*train[:1], *train[3:], "--data", f], at("huge"), None, [1]))

    def one(numbered):
        number, (what, which, call, path, data, codes) = numbered
        name = path or at(f"file{number}")
        if data is not None: open(name, "wb").write(data)
        r = run(call(name), limit_gib=4, timeout=20)
        check(what, [which], r, codes, r.seconds > 10 and f"{r.seconds:.1f} s", r.code == 1 and r.out and "something on stdout", names=name)
        if data is not None: os.unlink(name)
    for job in jobs: row(job[0])
    list(pool.map(one, enumerate(jobs)))


# ----------------------------------------------------------------------------------------------------------------------
# Surroundings

TEXT = at("text")
open(TEXT, "w").write("to be or not to be, " * 100)
TRAIN = ["train", "--data", TEXT, "--quick", "--sample", "0"]
TINY_TRAIN = [*TRAIN, "--steps", "2"]
MODEL = ["model", "--weights", FIXTURES + "model_weights.safetensors", "--batch", FIXTURES + "model_batch.safetensors", "--num_heads", "2"]
ATTENTION = ["attention", "--inputs", FIXTURES + "attention_inputs.safetensors"]
WRITERS = [(TINY_TRAIN, "--save", "x"), (TINY_TRAIN, "--trace", "x.json"), (MODEL, "--out", "x"), (ATTENTION, "--out", "x"),
           (["pytorch_attention", "--quick", "--steps", "1"], "--plot", "x.svg"), (["memory_profiling", "--quick"], "--out", "folder")]
ENDLESS = {  # what goes on until a signal comes
    "train": [*TRAIN, "--steps", "1000000", "--save", at("x")],
    "train over 2 ranks": [*TRAIN, "--steps", "1000000", "--save", at("x"), "--nproc", "2", "--backend", "gloo", "--device", "cpu"],
    "after a table": ["benchmarking_script", "--quick", "--mode", "eager,fused", "--steps", "5", "--d_model", "64", "--num_heads", "4"],
    "a child": ["benchmarking_script", "--warmup", "1,2", "--steps", "100000"],
    "2 ranks": "naive_ddp_benchmarking --nproc 2 --backend gloo --device cpu --steps 100000".split() + ["--trace", at("x.json")],
    "2 ranks in a child": ["distributed_communication_single_node", "--steps", "100000", "--sizes_mb", "100"],
    "a file being written": [*TRAIN, "--steps", "1", "--d_model", "512", "--d_ff", "4096", "--save", at("x")]}


def try_streams():
    for words in (["list"], ["list", "--format", "json"], ["list", "--help"], ["--help"], ["--version"], ["mixed_precision_accumulation"]):
        with open("/dev/full", "wb") as full: check("stdout is /dev/full", words, run(words, stdout=full), [1], names="stdout")
        check("stdout is closed", words, run(words, stdout=None, preexec_fn=lambda: os.close(1)), [1], names="stdout")
        r = run(words, stdout=None, preexec_fn=lambda: [os.close(fd) for fd in (0, 1, 2)])
        check("stdin, stdout and stderr are closed", words, r._replace(err=b"none"), [1])
        reader, writer = os.pipe()
        os.close(reader)
        check("stdout is a pipe that nobody reads", words, run(words, stdout=writer), [1, -signal.SIGPIPE])
        os.close(writer)
    r = run([*MODEL, "--out", at("x")], stdout=subprocess.DEVNULL, preexec_fn=lambda: [os.close(fd) for fd in (0, 2)])
    whole = r.code == 0 and unpacked(open(at("x"), "rb").read())
    check("stderr is closed: no line strays into a file", MODEL, r, [0], not whole and "the file is broken")
    os.unlink(at("x"))


def try_signals():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, as would all that it starts
    for what, words in ENDLESS.items():
        for number in (signal.SIGINT, signal.SIGTERM) if not SHORT else (signal.SIGINT,):
            child = subprocess.Popen([PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
            out = os.read(child.stdout.fileno(), 100) if what.startswith(("after a table", "train")) else b""
            end = time.monotonic() + (20 if "file" in what else 1.5)
            while out == b"" and time.monotonic() < end and not ("file" in what and any(".tmp." in n for n in os.listdir(FOLDER.name))):
                time.sleep(0.0005)
            child.send_signal(number)  # to the one process, not to its group as a terminal does
            start = time.monotonic()
            try: child.wait(10)
            except subprocess.TimeoutExpired: pass  # the group is killed below
            alive = True
            while alive and time.monotonic() < start + 12:  # the kernel ends the children soon after their parent
                try: os.killpg(child.pid, 0)
                except ProcessLookupError: alive = False
                else: time.sleep(0.02)
            if alive: os.killpg(child.pid, signal.SIGKILL)
            more, err = child.communicate()
            out += more
            left = [n for n in os.listdir(FOLDER.name) if n.startswith("x")]
            # train saves after such a signal; one that came while the name was only tried has left nothing.
            saved = left == ["x"] and "step" in unpacked(open(at("x"), "rb").read())[0]["__metadata__"]
            whole = saved if what.startswith("train") else not left or (saved and what == "a file being written")
            check(f"SIGINT, SIGTERM: {what}", words, Result(child.returncode, out, err, 0), [-number],
                  time.monotonic() - start > 4 and "it did not end within 4 s", alive and "processes are left", not whole and f"left: {left}",
                  out and not out.endswith(b"\n") and "a cut line", what == "after a table" and not out and "no output")
            for n in left: os.unlink(at(n))


def try_own_inputs():
    for words, given, option in ((MODEL, "--weights", "--out"), (MODEL, "--batch", "--out"), (ATTENTION, "--inputs", "--out"), (TINY_TRAIN, "--data", "--save")):
        place, name = words.index(given) + 1, at("own")
        shutil.copy(words[place], name)
        r = run([*words[:place], name, *words[place + 1:], option, name])
        same = open(name, "rb").read() == open(words[place], "rb").read()
        check("an output that is its command's own input", [*words, option], r, [2], not same and "it is overwritten", names=option)


def try_divergence():
    good = at("good")
    assert run([*TINY_TRAIN, "--save", good]).code == 0
    for steps in ("1", "2", "3"):
        for precision in ("fp32", "bf16", "fp16"):
            words = [*TRAIN, "--steps", steps, "--precision", precision, "--lr", "1e18", "--min_lr", "1e18", "--warmup_steps", "0"]
            before = open(good, "rb").read()
            r = run([*words, "--save", good])
            check("training into NaN over a good checkpoint", words, r, [1],
                  before != open(good, "rb").read() and "the good file is gone", names="not finite")


def try_planted():
    """Names that others could have planted, or that are no good; and what comes out of hostile names."""
    folder, victim = at("planted"), at("victim")
    os.mkdir(folder)
    open(victim, "w").write("untouched")
    for words, option, name in WRITERS[:5]:
        two = [*words, option, os.path.join(folder, name)]
        os.mkfifo(two[-1])
        check("a FIFO where the output goes", two, run(two, timeout=10), [2], names=option)
        os.unlink(two[-1])
        long = [*words, option, os.path.join(folder, "x" * (250 - len(name)) + name)]
        check("a name too long for a temporary file", long, run(long), [2], names="File name too long")
        # Process numbers can be guessed. These are of the next ones.
        child = subprocess.Popen([PROGRAM, *two], stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=lambda: [
            os.symlink(victim, f"{two[-1]}.tmp.{os.getpid()}")])
        out, err = child.communicate(timeout=60)
        written = os.path.isfile(two[-1]) and not os.path.islink(two[-1])
        check("a symbolic link planted where the temporary file would be", two, Result(child.returncode, out, err, 0), [0],
              open(victim, "rb").read() != b"untouched" and "its target is overwritten", not written and "no output")
        for n in os.listdir(folder): os.unlink(os.path.join(folder, n))
    hostile = os.path.join(folder.encode(), b"\x1b[2J\n\xe2\x80\xae\xff.json")
    shutil.copy(TEXT, hostile)
    for form in ("md", "csv", "json"):
        words = [b"train", b"--data", hostile, *(w.encode() for w in TINY_TRAIN[3:]), b"--trace", hostile + b".json", b"--format", form.encode()]
        r = run(words)
        texts = [(r.out + r.err).decode("utf-8", "surrogateescape"), open(hostile + b".json", errors="surrogateescape").read()]
        bad = any(c in t for t in texts for c in "\x1b\u202e\udcff")
        try: [json.loads(line) for line in [*(r.out.decode().splitlines() if form == "json" else []), texts[1]]]
        except ValueError as e: bad = str(e)
        check("control characters in file names", [repr(words)], r, [0], bad and f"in the output: {bad}")
    call = ["train", "--data", TEXT, "--save", "x" * 100000]
    check("a value of 100000 bytes", call, run(call), [2], len(run(call).err) > 5000 and "all of it on stderr", names="--save")
    two = [*TINY_TRAIN, "--save", os.path.join(folder, "x.json"), "--trace", os.path.join(folder, ".", "x.json")]
    check("two outputs of one name", two, run(two), [2], names="--trace")


def try_groups():
    """Memory limited by a control group around ours, of version 1 or 2."""
    what, outer = "memory limited to 100 MiB by a control group", None
    for parent, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        try:
            outer = f"{parent}/cs336_misuse_{os.getpid()}"
            os.makedirs(outer + "/inner")
            open(f"{outer}/{limit}", "r+").write(str(100 << 20))
            break
        except OSError:
            for group in (outer + "/inner", outer):
                if os.path.isdir(group): os.rmdir(group)
            outer = None
    if not outer: return skip(what, "no right to make one")
    with open(at("long"), "wb") as f: f.truncate(150 << 20)
    deep = "--d_model 256 --num_layers 12 --num_heads 4 --d_ff 512 --device cpu".split()
    try:
        for words in ([*TINY_TRAIN, *deep], ["train", "--data", at("long"), "--quick", "--device", "cpu"],
                      [*TINY_TRAIN, "--device", "cpu", "--batch_size", "2000"],
                      "distributed_communication_single_node --nproc 2 --sizes_mb 100 --device cpu --backend gloo".split()):
            r = run(words, preexec_fn=lambda: open(outer + "/inner/cgroup.procs", "w").write(str(os.getpid())))
            check(what, words, r, [1], names="out of memory")
    finally:
        time.sleep(0.2)
        for group in (outer + "/inner", outer): os.rmdir(group)


def try_without_proc():
    libc, what = ctypes.CDLL(None), "no /proc"

    def hide():
        private, new_mounts = 0x44000, 0x20000
        ok = libc.unshare(new_mounts) == 0 and libc.mount(b"none", b"/", None, private, None) == 0
        if not ok or libc.mount(b"tmpfs", b"/proc", b"tmpfs", 0, None) != 0: os._exit(99)
    if run(["--version"], preexec_fn=hide).code == 99: return skip(what, "no right to hide it")
    for words, code in ((["list"], 0), (TINY_TRAIN, 0), (["naive_ddp", "--backend", "gloo", "--device", "cpu"], 1),
                        (["benchmarking_script", "--warmup", "1,2", "--quick", "--device", "cpu"], 1)):
        check(what, words, run(words, preexec_fn=hide), [code], names="/proc/self/exe")


def try_disks():
    """A tmpfs of 64 KiB, full and then read-only; and a limit to the size of files."""
    for words, option, name in WRITERS[:4]:
        r = run([*words, option, at(name)], preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)))
        left = [n for n in os.listdir(FOLDER.name) if n.startswith("x")]
        check("files limited to 4 KiB (ulimit -f)", words, r, [1], left and f"left: {left}", names="File too large")
        for n in left: os.unlink(at(n))
    disk = at("disk")
    os.mkdir(disk)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode != 0:
        return skip("a full disk", "no right to mount"), skip("a read-only folder", "no right to mount")
    try:
        open(disk + "/big", "wb").write(b"x" * (60 << 10))
        for words, option, name in WRITERS:
            if option != "--plot":  # its few KiB would fit
                r = run([*words, option, f"{disk}/{name}"])
                left = [n for n in os.listdir(disk) if n not in ("big", "folder")]
                check("a full disk", [*words, option], r, [1], left and f"left: {left}", names="No space left")
        subprocess.run(["rm", "-rf", disk + "/folder"])
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for words, option, name in WRITERS:
            check("a read-only folder", [*words, option], run([*words, option, f"{disk}/{name}"]), [2], names=option)
        program = ["mixed_precision_accumulation"]
        check("a read-only folder to start in", program, run(program, cwd=disk), [0])
    finally:
        subprocess.run(["umount", disk], check=True)


def try_environment():
    call = ["communication_accounting", "--tflops", "1.5", "--format", "csv"]
    plain = run(call, env={})
    check("no environment at all", call, plain, [0])
    os.mkdir(at("locale"))
    made = subprocess.run(["localedef", "-i", "de_DE", "-f", "UTF-8", at("locale/de_DE.UTF-8")], capture_output=True)
    if not os.path.isdir(at("locale/de_DE.UTF-8")):
        skip("a locale with decimal commas (de_DE.UTF-8)", f"localedef: {made.stderr.decode().strip()[:80]}")
    else:
        r = run(call, env={**os.environ, "LC_ALL": "de_DE.UTF-8", "LOCPATH": at("locale")})
        check("a locale with decimal commas (de_DE.UTF-8)", call, r, [0], r.out != plain.out and "another output")
    for name in ("xx_XX", "", "tr_TR.UTF-8"):
        r = run(call, env={**os.environ, "LC_ALL": name})
        check("a locale that is not there", call, r, [0], r.out != plain.out and "another output")
    ddp = ["naive_ddp", "--timeout", "1"]
    for more in ("RANK=x", "RANK=2", "RANK=-1", "RANK=0 WORLD_SIZE=0", "MASTER_PORT=99999", "MASTER_PORT=x",
                 "MASTER_ADDR=no\n.such", "LOCAL_RANK=x", "RANK=1"):
        env = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", **dict(pair.split("=") for pair in more.split(" "))}
        check("RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT that make no sense", [more], run(ddp, env=env), [1, 2])
    r = run([*TINY_TRAIN, "--device", "cpu", "--d_model", "1024", "--num_layers", "24"], limit_gib=1)
    check("memory limited to 1 GiB (ulimit -v)", ["train"], r, [1], names="out of memory")
    for words in (["list"], [*TINY_TRAIN, "--device", "auto"]):
        check("CUDA_VISIBLE_DEVICES= (no GPU): --device auto", words, run(words, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}), [0])
    for words in ([*TINY_TRAIN, "--device", "cuda"], ["naive_ddp", "--device", "cuda"], ["naive_ddp", "--device", "cpu", "--backend", "nccl"]):
        r = run(words, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        check("CUDA_VISIBLE_DEVICES= (no GPU): --device cuda, --backend nccl", words, r, [1])


def try_gpu(_):
    """A GPU that another process keeps busy, or of whose memory another one has taken all but 600 MiB."""
    busy, full = "a busy GPU", "a GPU with 600 MiB left"
    try: cuda = ctypes.CDLL("libcuda.so.1")
    except OSError: cuda = None
    if not cuda or run([*TINY_TRAIN, "--device", "cuda"]).code != 0:
        return skip(busy, "no GPU"), skip(full, "no GPU")
    calls = [["benchmarking_script", "--size", "small,xl", "--device", "cuda", "--steps", "2"], ["flash_forward", "--device", "cuda"],
             [*MODEL, "--out", at("x")], [*TINY_TRAIN, "--device", "cuda"]]
    other = subprocess.Popen([PROGRAM, *ENDLESS["train"], "--device", "cuda"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(3)
    for words in calls: check(busy, words, run(words, timeout=300), [0])
    other.kill()
    other.wait()
    device, handle, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(handle), device) == 0 and cuda.cuCtxSetCurrent(handle) == 0
    assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    # A process needs some 500 MiB for its context alone.
    assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(free.value - (600 << 20))) == 0
    for words in calls: check(full, words, run(words, timeout=300), [0, 1], names="memory")
    cuda.cuDevicePrimaryCtxReset_v2(device)


def try_surroundings(_):
    try_streams()
    try_environment()
    try_own_inputs()
    try_divergence()
    try_planted()
    try_groups()
    try_without_proc()
    try_disks()
    try_signals()


# ----------------------------------------------------------------------------------------------------------------------
# Strangers

def frame(request, announced=None):
    return struct.pack("<I", len(request) if announced is None else announced) + request


def hello(**wrong):
    """As rank 1 would say it, but for one field; what a stranger cannot know it guesses."""
    fields = {"token": "/", "commit": run(["--version"]).out.decode().strip(), "rank": "1", "world": "2", "heartbeats": "0",
              "command": "naive_ddp", "option": "timeout", "value": "20", **wrong}
    return frame(b"H" + b"".join(str(value).encode() + b"\0" for value in fields.values()))


def try_strangers(_):
    """Ranks 0 and 1 by hand; before rank 1 comes strangers: many connections at once, which stay open, and many one by one."""
    words, pick = ["naive_ddp", "--device", "cpu", "--backend", "gloo", "--timeout", "20"], random.Random(0)
    kinds = {"connections that say nothing": [b""] * 300,
             "noise": [pick.randbytes(pick.randrange(1, 5000)) for _ in range(200)],
             "another protocol": [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"SSH-2.0-x\r\n"] * 20,
             "frames that announce up to 2^32 bytes": [frame(b"H" * 60000, n) for n in (65537, 1 << 26, 1 << 31, 2**32 - 1, 0)] * 10,
             "requests without a hello": [frame(r) for r in (b"B", b"Q", b"Sgather/0/1\0" b"1 1e-6", b"Sstarted/1\0", b"Gnccl", b"x", b"\0")] * 10,
             "a hello with a wrong field": [hello(**{field: wrong}) + frame(b"Q") for field in ("token", "commit", "rank", "world", "heartbeats", "command", "value")
                                            for wrong in ("", "x", "-1", "3", "100", "9" * 30, "\x1b[31m")] + [frame(b"Hmain\x00100 2 0") + frame(b"B\0")]}
    if b"without Gloo" in run([*words, "--nproc", "2"]).err:
        return [skip(f"a stranger at rank 0's port: {what}", "built without Gloo") for what in kinds]
    for what, messages in kinds.items():
        with socket.socket() as free: free.bind(("127.0.0.1", 0)); port = free.getsockname()[1]
        start = lambda rank: subprocess.Popen([PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={
            **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port)})
        ranks, open_ones = [start(0)], []
        for message in [b"", *messages]:
            for tries in range(500):
                try: open_ones.append(socket.create_connection(("127.0.0.1", port)))
                except OSError: time.sleep(0.02)
                else: break
            try: open_ones[-1].sendall(message)
            except OSError: pass
        for _ in range(500): socket.create_connection(("127.0.0.1", port)).close()
        ranks.append(start(1))
        for rank in ranks:
            out, err = rank.communicate(timeout=60)
            check(f"a stranger at rank 0's port: {what}", words, Result(rank.returncode, out, err, 0), [0])
        for one in open_ones: one.close()


# ----------------------------------------------------------------------------------------------------------------------

def table():
    lines = ["| what was tried | calls | exit codes | as it should be |", "| --- | ---: | --- | --- |"]
    for what, (codes, failed, why) in rows.items():
        show = lambda code: signal.Signals(-code).name if isinstance(code, int) and code < 0 else str(code)
        seen = ", ".join(f"{show(code)}: {n}" for code, n in sorted(codes.items(), key=str))
        lines.append(f"| {what} | {sum(codes.values())} | {seen} | {f'skipped: {why}' if why else 'all' if not failed else f'{failed} not'} |")
    return "\n".join(lines)


with concurrent.futures.ThreadPoolExecutor(2) as pool:
    for part in PARTS:
        start = time.monotonic()
        {"options": try_options, "files": try_files, "surroundings": try_surroundings, "strangers": try_strangers, "gpu": try_gpu}[part](pool)
        print(f"{part}: {time.monotonic() - start:.0f} s", flush=True)
print(table())
if WRITE:  # what was skipped, or is of another part, stays as it is
    key = lambda line: line.split(" | ")[0]
    new = {key(line): line for line in table().split("\n") if "| skipped: " not in line}
    lines = open("notes/misuse.md").read().split("\n")
    old = [i for i, line in enumerate(lines) if line.startswith("|")]
    known = {key(lines[i]) for i in old}
    for i in old: lines[i] = new.get(key(lines[i]), lines[i])
    lines[old[-1] + 1 : old[-1] + 1] = [line for what, line in new.items() if what not in known]
    open("notes/misuse.md", "w").write("\n".join(lines))
bad, skipped = sum(failed > 0 for _, failed, _ in rows.values()), sum(bool(why) for _, _, why in rows.values())
print(f"{len(rows) - bad - skipped} passed, {bad} failed, {skipped} skipped")
sys.exit(bad > 0)
