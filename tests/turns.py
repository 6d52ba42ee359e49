#!/usr/bin/env python3
"""tests/turns.py OLD NEW [--bound PERCENT] [--rounds N] [--same OLD_COLUMN=NEW_COLUMN ...] -- COMMAND...

Is NEW slower than OLD? Two cs336 run `COMMAND... --format csv` by turns, and each time that both print is compared: the
medians over the rounds, the noise (the width of the rounds' middle half, of the noisier one) and NEW/OLD. A time is a
number in a column whose name has "ms", "time" or "(s)"; a row is known by the words and whole numbers left of its first
time, and by the caption's mode and precision. What only one of them prints is left out. Exit code 1: a ratio is above 1 + bound (2 %) and
beyond the noise, a run failed, or nothing was there to compare."""
import argparse, collections, csv, re, statistics, subprocess, sys

TIME = re.compile(r"(^|[^a-z])ms($|[^a-z])|time|\(s\)|(Fwd|Bwd|Tot)$", re.I)
NONE = re.compile(r"std|dev|%|^x ", re.I)  # a deviation, a share or a ratio is no time
DECIMAL = re.compile(r"[+-]?\d+\.\d")


def times_of(text, same={}):
    """[(column, {what the row is known by}, time)]"""
    found, caption, columns = [], "", None
    for line in text.splitlines():
        if line.startswith("#") or not line:
            caption, columns = line or caption, None
        elif columns is None:
            columns = next(csv.reader([line]))
            times = [j for j, name in enumerate(columns) if TIME.search(name) and not NONE.search(name)]
        elif times:
            cells = next(csv.reader([line]))
            known = dict(re.findall(r"\b(mode|precision) (\w+)", caption))
            known |= {name: cell for name, cell in zip(columns[:times[0]], cells) if not DECIMAL.match(cell)}
            for j in times:
                if number := re.match(r"\d[\d.e+-]*", cells[j]):
                    found.append((same.get(columns[j], columns[j]), known, float(number[0])))
    return found


def rows_of(runs, names):
    """{(column, how the row is known, which of several such rows): its time in each run}"""
    rows = collections.defaultdict(list)
    for run in runs:
        seen = collections.Counter()
        for column, known, time in run:
            key = (column, " ".join(filter(None, (known.get(name, "") for name in names[column]))))
            seen[key] += 1
            rows[(*key, seen[key])].append(time)
    return rows


def main():
    if "--" not in sys.argv: sys.exit(__doc__)
    options = argparse.ArgumentParser(usage=__doc__)
    options.add_argument("old"), options.add_argument("new")
    options.add_argument("--bound", type=float, default=2), options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--same", action="append", default=[])  # where a column has got another name
    at = sys.argv.index("--")
    o, command = options.parse_args(sys.argv[1:at]), [*sys.argv[at + 1:], "--format", "csv"]
    runs = {o.old: [], o.new: []}
    if len(runs) == 1: sys.exit("turns.py: OLD and NEW are one file; a copy would do")
    for turn in range(o.rounds):
        for program in (o.old, o.new)[::1 if turn % 2 == 0 else -1]:  # old new, new old, ...
            r = subprocess.run([program, *command], capture_output=True, text=True)
            if r.returncode: sys.exit(f"turns.py: exit code {r.returncode} of {program} {' '.join(command)}: {r.stderr.strip()}")
            same = dict(pair.split("=", 1) for pair in o.same) if program == o.old else {}
            runs[program].append(times_of(r.stdout, same))
    names = collections.defaultdict(list)  # by column: what both know their rows by
    knows = [{column: known for run in side for column, known, _ in run} for side in runs.values()]
    for column in knows[0].keys() & knows[1].keys(): names[column] = [n for n in knows[0][column] if n in knows[1][column]]
    old, new = (rows_of(side, names) for side in runs.values())
    slower = 0
    print(f"{' '.join(command)}; {o.rounds} rounds, bound {o.bound:g} %\n\n| row | column | old | new | noise % | new/old | |")
    print("| --- | --- | ---: | ---: | ---: | ---: | --- |")
    both = [key for key in old if key in new]
    for column, row, number in both:
        pair = [side[column, row, number] for side in (old, new)]
        a, b = map(statistics.median, pair)
        quarters = [statistics.quantiles(times, method="inclusive") if len(times) > 1 else [0, 0, 0] for times in pair]
        noise = max((q[2] - q[0]) / median if median else 0 for q, median in zip(quarters, (a, b)))
        ratio = b / a if a else 1
        bad = ratio > 1 + max(o.bound / 100, noise)
        slower += bad
        print(f"| {row}{f' ({number})' if number > 1 else ''} | {column} | {a:g} | {b:g} | {100 * noise:.1f} | {ratio:.3f} | {'SLOWER' if bad else ''} |")
    print(f"\n{len(both)} times compared, {slower} slower; printed by one of them only: {len(old) + len(new) - 2 * len(both)}")
    return slower > 0 or not both


sys.exit(main())
