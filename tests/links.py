#!/usr/bin/env python3
"""tests/links.py: do the links of README.md and of the pages in notes/ hold, and their numbers?

The file of a relative link exists, and so does its heading (file.md#heading). In [`name`](file.cu) or [`name`](file.h)
the file has that name; of a name that is gone, the files that have it now are said.
A measured number, which is one with a unit, stands in an output (notes/output) that its line links to, or else in one
of those that its page links to; on the answer sheets one without a unit, too. In a formula ($...$) a decimal of four
digits without a unit or a power of ten does. Not looked at: code, a paragraph with a link to elsewhere, a folded
answer, and what follows the heading "Elsewhere".
An exercise has its answer in a <details> block, with a diff whose old lines stand in a source. A page that links to a
GPU's output names its card in its first paragraph. A page has at most 700 words, notes/ at most 21,000, as `wc -w`
counts: code and folded answers, too."""
import glob, os, re, sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
SOURCE = (".cu", ".h", ".cpp", ".py")


def read(path):
    with open(path, encoding="utf-8") as f: return f.read()


def anchors_of(page):
    """What GitHub makes of a page's headings."""
    anchors = set()
    for heading in re.findall(r"^#+ +(.*)$", re.sub(r"^```.*?^```", "", read(page), flags=re.S | re.M), re.M):
        anchor = re.sub(r"[^\w\- ]", "", LINK.sub(r"\1", heading).lower()).replace(" ", "-")
        anchors.add(next(a for a in [anchor, *(f"{anchor}-{n}" for n in range(1, 100))] if a not in anchors))
    return anchors


def wrong_with(page, text, target):
    file, _, anchor = target.partition("#")
    path = os.path.normpath(os.path.join(os.path.dirname(page), file)) if file else page
    if not os.path.exists(path): return "no such file"
    if anchor: return None if path.endswith(".md") and anchor in anchors_of(path) else "no such heading"
    name = re.fullmatch(r"`(?:\w+::)*(\w+)`", text.strip())
    if not name or not path.endswith(SOURCE): return None
    word = re.compile(rf"\b{name[1]}\b")
    if word.search(read(path)): return None
    folders = {"", "lib/", "fast/", "tests/"}
    others = [d + f for d in folders if os.path.isdir(d or ".") for f in os.listdir(d or ".") if f.endswith(SOURCE)]
    return f"{name[1]} is not in it, but in: {', '.join(f for f in sorted(others) if word.search(read(f))) or 'no file'}"


NUMBER = re.compile(r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?) ?(ms|us|s|GiB|MiB|GB|MB|GB/s|TB/s|TFLOP/s|%|W|MHz)(?![\w/])")
FORMULA = re.compile(r"\$\$.*?\$\$|\$[^$\n]*\$", re.S)
SCALES = {"ms": (1, 1e3), "s": (1, 1e-3), "GiB": (1, 1 / 1024), "MiB": (1, 1024), "GB": (1, 1e-3), "MB": (1, 1e3),
          "GB/s": (1, 1e3), "TB/s": (1, 1e-3), "%": (1, 100)}


def outputs_in(page, text):
    linked = [os.path.normpath(os.path.join(os.path.dirname(page), target)) for _, target in LINK.findall(text)]
    return [path for path in linked if path.startswith("notes/output/") and os.path.isfile(path)]


def values_in(outputs):
    return [float(n.replace(",", "")) for path in outputs for n in re.findall(r"\d[\d,]*(?:\.\d+)?", read(path))]


def stale_numbers(page, text):
    """What the page says and its outputs do not, as (line, number)."""
    text = re.sub(r"^#+ Elsewhere$.*?(?=^# |^## |\Z)|<details>.*?</details>", lambda m: "\n" * m[0].count("\n"), text, flags=re.S | re.M)
    for formula in FORMULA.finditer(text):
        for n in re.finditer(r"(?<![\w.,])\d+\.\d+(?!\d|\\cdot ?10\^|\\ )", formula[0]):
            near, values = 0.5001 * 10.0 ** -len(n[0].partition(".")[2]), values_in(outputs_in(page, text))
            if len(n[0].replace(".", "").lstrip("0")) < 4: continue
            if not any(abs(v * scale - float(n[0])) <= near for v in values for scale in (1, 1e3, 1e-3)):
                yield text.count("\n", 0, formula.start()) + 1, n[0]
    text = re.sub(f"`[^`]*`|{FORMULA.pattern}", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
    line = 1
    for paragraph in re.split(r"(\n(?=\s*(?:\n|[*|] |\d+\. )))", text):
        if "](http" not in paragraph:
            values = values_in(outputs_in(page, paragraph) or outputs_in(page, text))
            for n in NUMBER.finditer(paragraph):
                number, decimals = float(n[1].replace(",", "")), len(n[1].partition(".")[2])
                near = 0.5001 * 10.0**-decimals  # what rounding may change
                if not any(abs(v * scale - number) <= near for v in values for scale in SCALES.get(n[2], (1,))):
                    yield line + paragraph.count("\n", 0, n.start()), n[0]
        line += paragraph.count("\n")


def missing_on_sheet(page, text):
    """Of the sheets' column of numbers, those without a unit (stale_numbers takes the others) that the row's output has
    not, as (line, number)."""
    for line, row in enumerate(text.split("\n"), 1):
        cells = row.split("|")
        if not os.path.basename(page).startswith("answers-") or len(cells) < 6: continue
        outputs = " ".join(map(read, outputs_in(page, cells[4])))
        for number in re.findall(r"\d[\d.]*(?:e[+-]\d+)?", NUMBER.sub("", cells[3])):
            if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\.?\d)", outputs): yield line, number


def missing_on_page(page):
    """What the page should have: an answer to its exercise, and its card."""
    text = read(page)
    exercise = re.search(r"^## Exercise$.*?(?=^## |\Z)", text, re.S | re.M)
    if exercise and not re.search(r"<details>.*(?:```diff|Stages).*</details>", exercise[0], re.S):
        yield "the exercise has no folded answer"
    sources = " ".join(" ".join(read(path) for path in glob.glob("*.cu") + glob.glob("lib/*.cu")).split())
    for diff in re.findall(r"```diff\n(.*?)```", exercise[0] if exercise else "", re.S):
        for line in diff.split("\n"):
            code = " ".join(line[1:].split())
            if line[:1] in "- " and not code.startswith("//") and not code.endswith("...") and code not in sources:
                yield f"the answer's diff expects what no file has: {code}"
    first = text.split("\n\n")[1] if text.count("\n\n") else ""
    measured = [path for path in outputs_in(page, first) if re.search(r"NVIDIA [A-Z]", read(path).split("\n\n")[0])]
    if measured and not re.search(r"H[12]00", first): yield "the first line does not name the card"


os.chdir(ROOT)
bad = words = 0
for page in ["README.md", *sorted(os.path.join("notes", f) for f in os.listdir("notes") if f.endswith(".md"))]:
    text = re.sub(r"^```.*?^```", lambda m: re.sub(r"[^\n]", " ", m[0]), read(page), flags=re.S | re.M)
    for link in LINK.finditer(text):
        wrong = None if re.match(r"\w+:", link[2]) else wrong_with(page, link[1], link[2])
        if not wrong: continue
        bad += 1
        print(f"{page}:{text.count(chr(10), 0, link.start()) + 1}: {' '.join(link[0].split())}: {wrong}")
    if page == "README.md": continue
    for line, number in [*stale_numbers(page, text), *missing_on_sheet(page, text)]:
        bad += 1
        print(f"{page}:{line}: {number} stands in no output that it links to")
    for what in missing_on_page(page):
        bad += 1
        print(f"{page}: {what}")
    of_page = len(read(page).split())
    words += of_page
    if of_page > 700:
        bad += 1
        print(f"{page}: {of_page} words, 700 is the most")
if words > 21000:
    bad += 1
    print(f"notes: {words} words, 21000 is the most")
sys.exit(1 if bad else 0)
