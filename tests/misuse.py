#!/usr/bin/env python3
"""tests/misuse.py PROGRAM: every option of every command given what it does not take, files that are damaged, and
surroundings that fail. The options are those that the program's own --help lists. Last line: N passed, N failed, N skipped."""
import concurrent.futures, json, os, random, re, resource, signal, struct, subprocess, sys, tempfile, time

program = os.path.abspath(sys.argv[1])
os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
folder = tempfile.TemporaryDirectory(prefix="cs336_misuse_")
at = lambda name: os.path.join(folder.name, name)
counts, failures = {}, []


def run(words, **more):
    more = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60, **more}
    start = time.monotonic()
    try:
        r = subprocess.run([program, *words], **more)
    except subprocess.TimeoutExpired:
        return -99, b"", b"it hung\n", 60
    return r.returncode, r.stdout or b"", r.stderr or b"", time.monotonic() - start


def check(kind, what, *problems):
    passed, failed = counts.get(kind, (0, 0))
    problems = [p for p in problems if p]
    counts[kind] = (passed + (not problems), failed + bool(problems))
    if problems:
        failures.append(f"{kind}: {what}: {'; '.join(problems)}")


# ----------------------------------------------------------------------------------------------------------------------
# Options

def not_taken(takes):
    """Values that an option is not to take, by what its help says that it takes."""
    texts = ["", " ", "\n", "--", "nonsense", "ключ", "%s%n", "\x1b[31m", "x" * 5000]
    if "number" not in takes:
        if "one of" in takes or "one or more" in takes:
            return texts + ["0", "MD", "md ", "fp32,,fp16", "fp32,", ",", "small,tiny"]
        if "auto, or a name" in takes or takes == "a file name" or "step/backward" in takes:
            return ["", *([",", "a,,b"] if "step/backward" in takes else [])]
        return ["", "/", "/no/such/folder/x" + takes.split(" in ")[-1], at("file.svg/x"), at("file.svg/x.svg")]
    texts += ["-1", "nan", "-nan", "inf", "-inf", "infinity", "1e999", "0x10", " 1", "1 ", "1\n", "1_000", "1;2", "1,5 ", "１",
              "99999999999999999999", "-99999999999999999999", "1e", "1e+", "--1", "+-1", "1.2.3", "."]
    if "whole" in takes:
        low, high = map(int, re.search(r"from (\d+) to (\d+)", takes).groups())
        texts += ["2.5", "1e3", "+1", str(high + 1), str(2**64), str(2**63) if high < 2**63 else str(2**65)]
        texts += [str(2**31), str(2**32 + 1)] if high < 2**31 else []
        texts += ["0"] if low > 0 else []
    else:
        texts += ["0" if "0 or greater" not in takes else "-0.5", "-1e-9"]
        texts += ["1e5001"] + (["1"] if "less than 1 " in takes + " " else []) + (["1e6"] if "100000" in takes or "1e5" in takes else [])
    return texts + (["1,,2", "1,2,", ",1", "1, 2", "1,-2"] if "commas" in takes else ["1,2", "1,5"])


def usage(what, words, option, value=None):
    code, out, err, seconds = run(words, timeout=10)
    text = err.decode("utf-8", "replace")
    check("options", what, code != 2 and f"exit code {code}", out and "something on stdout",
          (text.count("\n") != 1 or not text.endswith("\n")) and f"stderr has {text.count(chr(10))} lines",
          any(ord(c) < 32 for c in text[:-1]) and "a control character on stderr",
          option not in text and f"{option} is not named: {text!r}", "takes" not in text and f"not what it takes: {text!r}",
          len(text) > 7000 and "too long a line", seconds > 1 and f"{seconds:.1f} s")


def options_of(command):
    found = []
    for line in run([command, "--help"])[1].decode().splitlines():
        m = re.match(r"  --(\w+) +(REQUIRED)? *(.*)", line)
        if m:
            takes = re.search(r": ((?:a |one |numbers |whole |auto, |finite ).*)$", m[3])
            found.append((m[1], bool(m[2]), re.sub(r" \(default [^()]*\)$", "", takes[1]) if takes else None))
    return found


def try_options(pool):
    open(at("file.svg"), "w").close()
    commands = re.findall(r"^  [\d. ]{5} (\w+) ", run(["--help"])[1].decode(), re.M)
    assert len(commands) > 25, commands
    jobs, rng = [], random.Random(0)  # two values an option; with CS336_ALL=1 all of them, some minutes
    for command in commands:
        options = options_of(command)
        if command == "reproduce" and not options: continue
        assert options, command
        given = [w for name, required, takes in options if required for w in (f"--{name}", "3" if "number" in takes else at("o"))]
        for name, required, takes in options:
            option, rest = f"--{name}", [w for i, w in enumerate(given) if given[i - i % 2] != f"--{name}"]
            one = lambda *words: jobs.append((" ".join([command, *words])[:100], [command, *rest, *words], option))
            if takes is None:  # a flag
                for word in ("=1", "=", "=true", "=x"): one(option + word)
                continue
            one(option)
            values = not_taken(takes)
            if "CS336_ALL" not in os.environ: values = rng.sample(values, min(len(values), 2))
            for value in values: one(option, value)
            one(option, "1", option, "1")
        for word in ("--nonsense", "extra", "-x", "--", "-", "--Format", "---format", "--formatmd"):
            jobs.append((f"{command} {word}", [command, *given, word], word.strip("-") and word))
        names = {name for name, _, _ in options}
        for other in names & {"d_model", "d_ff", "num_layers", "num_heads"}:
            if "size" in names: jobs.append((f"{command} --size --{other}", [command, *given, "--size", "small", f"--{other}", "4"], f"--{other}"))
    list(pool.map(lambda job: usage(job[0], job[1], job[2] or ""), jobs))


# ----------------------------------------------------------------------------------------------------------------------
# Files

def header_of(data):
    n = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:8 + n]), data[8 + n:]


def packed(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def damaged(data, every, flips):
    """(what, bytes) of files made from a good one."""
    header, body = header_of(data)
    head = len(data) - len(body)
    for n in range(0, len(data), every): yield f"cut at {n}", data[:n]
    bits = range(8 * head) if 8 * head <= flips else random.Random(1).sample(range(8 * head), flips)
    for bit in bits:
        yield f"header bit {bit}", data[:bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1:]
    rng = random.Random(2)
    for i in range(40):
        broken = bytearray(data)
        for _ in range(1 + i): broken[rng.randrange(head, len(data))] ^= 1 << rng.randrange(8)
        yield f"data flips {i}", bytes(broken)
    first = next(k for k in header if k != "__metadata__")
    entry = header[first]
    for what, new in {"huge shape": {"shape": [2**32, 2**32]}, "shape of 2^63": {"shape": [2**63]}, "no dimensions": {"shape": []},
                      "zero": {"shape": [0] * len(entry["shape"])}, "many dimensions": {"shape": [1] * 100000},
                      "overlap": {"data_offsets": [entry["data_offsets"][0] + 4, entry["data_offsets"][1] + 4]},
                      "backwards": {"data_offsets": entry["data_offsets"][::-1]}, "dtype": {"dtype": "F31"}}.items():
        yield what, packed({**header, first: {**entry, **new}}, body)
    yield "huge header", struct.pack("<Q", 2**64 - 1) + data[8:]
    yield "deep", packed(b'{"a":' + b"[" * 100000 + b"]" * 100000 + b"}", body)
    yield "twice", packed(b'{"a":{},"a":{}}', body)
    yield "not UTF-8", packed(b'{"\xff\xfe":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x")
    yield "control characters", packed(b'{"\\u0007\\n\\u001b[2J":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x")
    yield "empty", b""
    for key in header.get("__metadata__", {}):
        for value in ("", "0", "-1", "nan", "1e999", "2147483647", "2.5", "x"):
            yield f"{key} = {value!r}", packed({**header, "__metadata__": {**header["__metadata__"], key: value}}, body)


def refused(what, words, may_pass, path):
    def limits():  # a wrong size must not take the machine along
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    code, out, err, seconds = run(words, timeout=20, preexec_fn=limits)
    text = err.decode("utf-8", "replace")
    lines = [l for l in text.splitlines() if not l.startswith("device ")]
    check("files", what, code not in ((0, 1) if may_pass else (1,)) and f"exit code {code}: {text[:300]!r}",
          code == 1 and len(lines) != 1 and f"{len(lines)} lines on stderr: {text[:300]!r}",
          code == 1 and path not in text and f"the file is not named: {text[:300]!r}",
          "cs336" not in text and code == 1 and "no cs336 in the line", seconds > 10 and f"{seconds:.1f} s")


def try_files(pool):
    open(at("text"), "w").write("to be or not to be, " * 60)
    tiny = ["train", "--data", at("text"), "--quick", "--device", "cpu", "--sample", "0"]
    code, _, err, _ = run([*tiny, "--steps", "1", "--d_model", "8", "--d_ff", "8", "--num_layers", "1", "--num_heads", "2",
                           "--context_length", "8", "--batch_size", "1", "--save", at("checkpoint")])
    assert code == 0, err
    fixtures = "tests/fixtures/"
    ways = {"model --weights": (fixtures + "model_weights.safetensors", 797, 300, lambda f: ["model", "--weights", f, "--batch",
                                fixtures + "model_batch.safetensors", "--num_heads", "2", "--out", f + ".out"]),
            "model --batch": (fixtures + "model_batch.safetensors", 7, 300, lambda f: ["model", "--weights",
                              fixtures + "model_weights.safetensors", "--batch", f, "--num_heads", "2", "--out", f + ".out"]),
            "attention --inputs": (fixtures + "attention_inputs.safetensors", 97, 300, lambda f: ["attention", "--inputs", f,
                                   "--out", f + ".out"]),
            "train --load": (at("checkpoint"), 97, 300, lambda f: [*tiny, "--load", f])}
    jobs = []
    for way, (good, every, flips, words) in ways.items():
        data = open(good, "rb").read()
        for i, (what, broken) in enumerate(damaged(data, every, flips)):
            path = at(f"{way.replace(' ', '')}{i}.safetensors")
            may_pass = what.startswith(("header bit", "data flips")) or " = " in what
            jobs.append((f"{way}: {what}", words, may_pass, path, broken))
        for path, what in ((folder.name, "a folder"), ("/dev/zero", "a device"), (at("none"), "not there"), (at("fifo"), "a FIFO")):
            if what == "a FIFO" and not os.path.exists(path): os.mkfifo(path)
            jobs.append((f"{way}: {what}", words, False, path, None))

    def one(job):
        what, words, may_pass, path, broken = job
        if broken is not None: open(path, "wb").write(broken)
        refused(what, words(path), may_pass, path)
        if broken is not None:
            os.unlink(path)
            if os.path.exists(path + ".out"): os.unlink(path + ".out")
    list(pool.map(one, jobs))


# ----------------------------------------------------------------------------------------------------------------------
# Surroundings

def surroundings():
    one_line = lambda err: err.count(b"\n") != 1 and f"stderr: {err[:300]!r}"
    with open("/dev/full", "wb") as full:
        for words in (["list"], ["list", "--format", "json"], ["list", "--help"], ["--help"], ["--version"], ["mixed_precision_accumulation"]):
            code, _, err, _ = run(words, stdout=full)
            check("surroundings", f"{words} > /dev/full", code != 1 and f"exit code {code}", one_line(err))
    for words in (["list"], ["--help"], ["list", "--help"]):
        code, _, err, _ = run(words, stdout=None, preexec_fn=lambda: os.close(1))
        check("surroundings", f"{words} >&-", code != 1 and f"exit code {code}", one_line(err))
    code, out, err, _ = run(["list", "--format", "csv"], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    check("surroundings", "CUDA_VISIBLE_DEVICES=", code != 0 and f"exit code {code}")
    for name in ("de_DE.UTF-8", "xx_XX", ""):
        r = run(["communication_accounting", "--tflops", "1.5", "--format", "csv"], env={**os.environ, "LC_ALL": name})
        c = run(["communication_accounting", "--tflops", "1.5", "--format", "csv"], env={**os.environ, "LC_ALL": "C"})
        check("surroundings", f"LC_ALL={name}", r[:2] != c[:2] and "another output than with LC_ALL=C")
    for command in ("list", "communication_accounting"):
        r = subprocess.run(f"set -o pipefail; {program} {command} | head -c 1", shell=True, executable="/bin/bash", capture_output=True)
        check("surroundings", f"{command} | head -c 1", r.returncode not in (0, 1) and f"exit code {r.returncode}", r.stderr.count(b"\n") > 1 and "more than a line")

    interrupted = {"train": ["train", "--data", "LICENSE", "--steps", "1000000", "--save", at("saved")],
                   "train while it saves": ["train", "--data", "LICENSE", "--d_model", "256", "--d_ff", "2048", "--num_layers", "6",
                                            "--steps", "1", "--save", at("saved")],
                   "benchmarking_script": ["benchmarking_script", "--steps", "100000"],
                   "naive_ddp_benchmarking": ["naive_ddp_benchmarking", "--nproc", "2", "--steps", "100000"]}
    for what, words in interrupted.items():
        for number in (signal.SIGINT, signal.SIGTERM):
            child = subprocess.Popen([program, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
            end = time.monotonic() + (10 if "saves" in what else 2)
            while time.monotonic() < end and not ("saves" in what and any(".tmp." in n for n in os.listdir(folder.name))): time.sleep(0.0005)
            child.send_signal(number)
            try:
                out, _ = child.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                out, _ = child.communicate()
                check("surroundings", f"{number.name}: {what}", "it did not end within 10 s")
                continue
            try:
                os.killpg(child.pid, 0)
                left = "processes are left"
            except ProcessLookupError: left = None
            check("surroundings", f"{number.name}: {what}", left, child.returncode not in (1, -number, 0) and f"exit code {child.returncode}",
                  out and not out.endswith(b"\n") and "output cut in a line",
                  any(".tmp." in n for n in os.listdir(folder.name)) and "a temporary file is left")
            for n in os.listdir(folder.name):
                if ".tmp." in n or n == "saved": os.unlink(at(n))


    mounted = at("disk")
    os.mkdir(mounted)
    mount = lambda options: subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", mounted], capture_output=True).returncode == 0
    tiny = ["train", "--data", "LICENSE", "--quick", "--steps", "2"]
    if not mount("size=64k"):
        return 2  # no right to mount
    outputs = [(["--save", "{}/x"], tiny), (["--trace", "{}/x.json"], tiny),
               (["--out", "{}/x"], ["model", "--weights", "tests/fixtures/model_weights.safetensors", "--batch",
                                    "tests/fixtures/model_batch.safetensors", "--num_heads", "2"]),
               (["--out", "{}/x"], ["attention", "--inputs", "tests/fixtures/attention_inputs.safetensors"])]
    try:
        open(mounted + "/big", "wb").write(b"x" * (60 << 10))
        for option, words in outputs:
            code, _, err, _ = run([*words, *[w.format(mounted) for w in option]])
            left = os.listdir(mounted)
            lines = [l for l in err.splitlines() if not l.startswith(b"device ")]
            check("surroundings", f"full disk: {words[0]} {option[0]}", code != 1 and f"exit code {code}", len(lines) != 1 and f"stderr: {err!r}",
                  b"No space" not in err and f"stderr: {err!r}", left != ["big"] and f"left: {left}")
        subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
        for option, words in outputs:
            option = [w.format(mounted) for w in option]
            code, out, err, seconds = run([*words, *option])
            check("surroundings", f"read-only folder: {words[0]} {option[0]}", code != 2 and f"exit code {code}: {err!r}", one_line(err),
                  out and "something on stdout")
    finally:
        subprocess.run(["umount", mounted], check=True)
    return 0


with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    for part in sys.argv[2:] or ["options", "files", "surroundings"]:
        start = time.monotonic()
        skipped = {"options": lambda: try_options(pool), "files": lambda: try_files(pool), "surroundings": surroundings}[part]() or 0
        print(f"{part}: {counts.get(part)} in {time.monotonic() - start:.1f} s")
for failure in failures: print("FAILED", failure.encode("ascii", "backslashreplace").decode())
passed, failed = (sum(c[i] for c in counts.values()) for i in (0, 1))
print(f"{passed} passed, {failed} failed, {skipped} skipped")
sys.exit(failed > 0)
