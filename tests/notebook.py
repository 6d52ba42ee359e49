#!/usr/bin/env python3
"""tests/notebook.py NOTEBOOK BUILD: do the notebook's cells run, one after the other, from the clone on?

It knows Python, and of Jupyter `!command` and `%cd folder`. What the reader sets at the top is set here: the address is
this checkout's, and the problems are run with --quick. The clone gets the object files of BUILD, a folder that `make`
made, such as build/cuda or build/cpu, so that its `make` has little to do; and my_solution.py has check_self.py's right
solutions. Without PyTorch the cells that import it are skipped. The last line is `N passed, N failed, N skipped`."""
import contextlib, io, json, os, re, shutil, subprocess, sys, tempfile, time, traceback

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if len(sys.argv) != 3 or not os.path.isfile(sys.argv[1]) or not os.path.isfile(os.path.join(sys.argv[2], "cs336")):
    print(f"notebook.py: got '{' '.join(sys.argv[1:])}', takes a notebook and the folder of a built cs336", file=sys.stderr)
    sys.exit(2)
NOTEBOOK, BUILD = map(os.path.abspath, sys.argv[1:])
SET = {"REPOSITORY": ROOT, "QUICK": "--quick"}
sys.path[0] = ""  # as in a notebook: the clone's check.py is imported, not the one beside this file
for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CS336_BINARY"): os.environ.pop(name, None)
os.environ.update(INSTALL="0", PYTHONDONTWRITEBYTECODE="1", GIT_CONFIG_COUNT="1",
                  GIT_CONFIG_KEY_0="safe.directory", GIT_CONFIG_VALUE_0="*")
if "cuda" not in os.path.basename(BUILD): os.environ["NVCC"] = ""
if BUILD.endswith("-werror"): os.environ["WERROR"] = "1"


def shell(command, names):
    """As IPython does: {name} is a variable's value. But here a command has to succeed."""
    command = re.sub(r"\{(\w+)\}", lambda m: str(names[m.group(1)]), command)
    run = subprocess.run(["bash", "-o", "pipefail", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(run.stdout, end="")
    if run.returncode: raise RuntimeError(f"exit code {run.returncode} of: {command}")
    if command.startswith("git clone"): use_what_is_built("cs336")


def use_what_is_built(clone):
    folder, now = os.path.join(clone, "build", os.path.basename(BUILD)), time.time()
    shutil.copytree(BUILD, folder, ignore=shutil.ignore_patterns("tests"))
    for place, _, names in os.walk(folder):
        for name in names: os.utime(os.path.join(place, name), (now, now))  # none is older than another


def run_cell(source, names):
    python = []

    def run_python():
        exec(compile("\n".join(python), "cell", "exec"), names)
        python.clear()

    for line in source.split("\n"):
        if line[:1] not in ("!", "%"):
            setting = re.match(r"(\w+) = ", line)
            python.append(f"{setting.group(1)} = {SET.pop(setting.group(1))!r}" if setting and setting.group(1) in SET else line)
            continue
        run_python()
        if line.startswith("%cd "): os.chdir(line[4:].strip())
        elif line.startswith("!"): shell(line[1:], names)
        else: raise RuntimeError(f"this runner does not know: {line}")
    run_python()


def main():
    with open(NOTEBOOK) as f: cells = json.load(f)["cells"]
    with open(os.path.join(ROOT, "tests", "check_self.py")) as f: solutions = re.findall(r"^(?:SOLUTION|RANKS) = '''(.*?)'''", f.read(), re.S | re.M)
    with open("my_solution.py", "w") as f: f.write("\n".join(solutions))
    try:
        import torch
    except ImportError: torch = None
    counts, names = {"passed": 0, "failed": 0, "skipped": 0}, {"__name__": "__main__"}
    for number, cell in enumerate(cells, 1):
        source, result, why, output, start = "".join(cell["source"]), "passed", "", io.StringIO(), time.time()
        if cell["cell_type"] != "code": continue
        if cell["outputs"] or cell["execution_count"]: result, why = "failed", "outputs are stored in the notebook"
        elif not torch and re.search(r"^(import torch|from check import)", source, re.M): result, why = "skipped", "no PyTorch"
        else:
            try:
                with contextlib.redirect_stdout(output): run_cell(source, names)
                if re.search("DIFFERS|cannot be checked", output.getvalue()): result, why = "failed", "a right solution is not ok"
            except BaseException: result, why = "failed", traceback.format_exc()
        counts[result] += 1
        print(f"{result:<8} cell {number}: {(source.splitlines() or [''])[0]} ({time.time() - start:.1f} s)", flush=True)
        if result == "failed": print(f"{output.getvalue()[-4000:]}\nERROR: {why}")
        if result == "failed": break  # what follows builds on it
    for name in SET: counts["failed"] += 1; print(f"ERROR: no cell sets {name}")
    print(", ".join(f"{n} {result}" for result, n in counts.items()))
    return counts["failed"] > 0


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    code = main()
    os.chdir("/")
sys.exit(code)
