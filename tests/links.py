#!/usr/bin/env python3
"""tests/links.py: do the links of README.md and of the pages in notes/ hold?

The file of a relative link exists, and so does its heading (file.md#heading). In [`name`](file.cu) or [`name`](file.h)
the file has that name; of a name that is gone, the files that have it now are said."""
import os, re, sys

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


os.chdir(ROOT)
bad = 0
for page in ["README.md", *sorted(os.path.join("notes", f) for f in os.listdir("notes") if f.endswith(".md"))]:
    text = re.sub(r"^```.*?^```", lambda m: re.sub(r"[^\n]", " ", m[0]), read(page), flags=re.S | re.M)
    for link in LINK.finditer(text):
        wrong = None if re.match(r"\w+:", link[2]) else wrong_with(page, link[1], link[2])
        if not wrong: continue
        bad += 1
        print(f"{page}:{text.count(chr(10), 0, link.start()) + 1}: {' '.join(link[0].split())}: {wrong}")
sys.exit(1 if bad else 0)
