#!/usr/bin/env python3
"""tests/links.py [--write]: do the links of README.md, notes/ and notes/lab/ hold?

A link's file has to exist, and its heading. A link to a line of code, [`name`](file.cu#L12), has to show the name that
this line defines. --write mends the file and the line of such links: it takes the definition nearest to the old line.
"""
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
NOT_A_FUNCTION = {"__launch_bounds__", "__attribute__", "alignas", "decltype", "noexcept", "operator"}


def blank(match):
    return re.sub(r"[^\n]", " ", match.group())


def code_of(text):
    """The text with comments, strings and preprocessor lines blanked; each line keeps its number."""
    text = re.sub(r'R"(\w*)\(.*?\)\1"', blank, text, flags=re.S)
    text = re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|(?<!\w)'(?:\\.|[^'\\\n])+'",
                  blank, text, flags=re.S)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.M)


def blank_pairs(text, pair):
    """Blanks what stands between brackets, from the inside out; the outermost brackets become blanks, too."""
    inner = re.compile(re.escape(pair[0]) + "[^" + re.escape(pair) + "]*" + re.escape(pair[1]))
    while inner.search(text):
        text = inner.sub(blank, text)
    return text


def name_in(head, ends_in_brace, in_struct):
    """(what the head of a declaration names, where in it, whether it is a definition); a data member is none"""
    flat = blank_pairs(head.replace("->", "  "), "<>")
    match = re.search(r"\b(struct|class|union|enum(?: class)?)\s+(?:alignas\(\w+\)\s*)?(\w+)[^()=]*$", flat)
    if match:
        return match.group(2), match.start(2), ends_in_brace
    bare = blank_pairs(flat, "()")
    match = re.search(r"((?:\w+::)*\w+)\s*(?:\[[^\]]*\]\s*)*=(?!=)", bare)
    if match and "operator" not in bare:
        return match.group(1), match.start(1), not in_struct
    for match in re.finditer(r"((?:\w+::)*~?\w+)\s*\(", flat):
        if match.group(1) not in NOT_A_FUNCTION:
            return match.group(1), match.start(1), ends_in_brace
    match = re.search(r"(\w+)\s*(?:\[[^\]]*\]\s*)*$", bare)
    return (match.group(1), match.start(1), ends_in_brace) if match else ("", 0, False)


def names_of(path):
    """{name: [(line, whether it is a definition)]} of one source file; a member counts with and without its struct"""
    text = open(path, encoding="utf-8").read()
    names = {}

    def add(name, at, definition):
        for form in {name, name.split("::")[-1]}:
            names.setdefault(form, []).append((text.count("\n", 0, at) + 1, definition))

    for match in re.finditer(r"^[ \t]*#define[ \t]+(\w+)", text, re.M):
        add(match.group(1), match.start(1), True)
    code = code_of(text)
    scopes = []  # the names of the structs around; None: the inside of a function or an initializer
    start = parentheses = 0
    for at, char in enumerate(code):
        parentheses += (char == "(") - (char == ")")
        if char not in "{};" or parentheses > 0:
            continue
        head, inside = code[start:at], None in scopes
        start = at + 1
        if char == "}":
            if scopes:
                scopes.pop()
            continue
        if char == "{" and (inside or re.search(r'\bnamespace\b|\bextern\s*$', head)):
            scopes.append(None if inside else "")
            continue
        name, offset, definition = name_in(head, char == "{", any(scopes)) if not inside else ("", 0, False)
        if name:
            add("::".join([s for s in scopes if s] + [name]), at - len(head) + offset, definition)
        if char == "{":
            scopes.append(name if re.search(r"\b(struct|class|union)\b[^()=]*$", blank_pairs(head, "<>")) else None)
    return names


def headings_of(path):
    """The anchors that GitHub gives a page's headings."""
    anchors = set()
    for heading in re.findall(r"^#+ +(.*)$", re.sub(r"```.*?```", "", open(path, encoding="utf-8").read(), flags=re.S),
                              re.M):
        anchor = re.sub(r"[^\w\- ]", "", LINK.sub(r"\1", heading).lower()).replace(" ", "-")
        anchors.add(next(a for a in [anchor] + [f"{anchor}-{n}" for n in range(1, 100)] if a not in anchors))
    return anchors


def main():
    if sys.argv[1:] not in ([], ["--write"]):
        print(f"links.py: got '{' '.join(sys.argv[1:])}', takes nothing or --write", file=sys.stderr)
        return 2
    os.chdir(ROOT)
    sources = {f: names_of(f) for f in sorted(os.listdir(".")) if f.endswith((".cu", ".h"))}
    pages = ["README.md"] + sorted(f"{folder}/{f}" for folder in ("notes", "notes/lab") for f in os.listdir(folder)
                                   if f.endswith(".md"))
    bad = 0

    def mended(page, match):
        """The link as it should be; says what is wrong with it."""
        nonlocal bad
        text, (target, _, anchor) = match.group(1), match.group(2).partition("#")
        if re.match(r"\w+:", target):
            return match.group()
        folder = os.path.dirname(page)
        path = os.path.normpath(os.path.join(folder, target)) if target else page
        wrong = new = None
        if re.fullmatch(r"L\d+", anchor):
            name = " ".join(text.strip("`").split())
            everywhere = [(f, n, d) for f, names in sources.items() for n, d in names.get(name, [])]
            places = [p[:2] for p in everywhere if p[2]] or [p[:2] for p in everywhere]
            here = [p for p in places if p[0] == path] or places
            if not here:
                wrong = f"nothing defines '{name}'"
            elif len({p[0] for p in here}) > 1:
                wrong = f"'{name}' is defined in several other files"
            elif (path, int(anchor[1:])) not in here:
                new = min(here, key=lambda p: abs(p[1] - int(anchor[1:])))
                wrong = f"'{name}' is defined at {new[0]}:{new[1]}"
        elif not os.path.exists(path):
            wrong = "no such file"
        elif anchor and not (path.endswith(".md") and anchor in headings_of(path)):
            wrong = "no such heading"
        if not wrong:
            return match.group()
        mend = new and "--write" in sys.argv
        bad += not mend
        line = match.string.count("\n", 0, match.start()) + 1
        print(f"{page}:{line}: {' '.join(match.group().split())}: {wrong}{', mended' if mend else ''}")
        return f"[{text}]({os.path.relpath(new[0], folder or '.')}#L{new[1]})" if mend else match.group()

    for page in pages:
        old = open(page, encoding="utf-8").read()
        fences = [m.span() for m in re.finditer(r"^```.*?^```", old, re.M | re.S)]
        outside = lambda at: not any(begin <= at < end for begin, end in fences)
        new = LINK.sub(lambda match: mended(page, match) if outside(match.start()) else match.group(), old)
        if new != old:
            open(page, "w", encoding="utf-8").write(new)
    return 1 if bad else 0


sys.exit(main())
