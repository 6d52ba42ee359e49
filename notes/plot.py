#!/usr/bin/env python3
"""notes/plot.py: the pages' pictures, from the tables in notes/output (`make pictures`).

    plot.py                                   each picture whose table is there, into notes/
    plot.py --out FILE.svg FILE.pickle ...    memory over time, a panel per snapshot of memory_profiling --out
    plot.py --out FILE.svg FILE.json          one step of each way over time, from the --trace of a command with ranks

Needs matplotlib. Columns are found by name. A picture whose table is not there is left out, with a line on stderr.
"""
import argparse, collections, json, os, pickle, re, sys

try: import matplotlib
except ImportError: sys.exit("plot.py: needs matplotlib (python3-matplotlib)")
matplotlib.use("Agg")
import matplotlib.pyplot as plt

NOTES = os.path.dirname(os.path.abspath(__file__))
plt.rcParams.update({"font.size": 11, "svg.fonttype": "none", "svg.hashsalt": "cs336", "axes.grid": True,
                     "grid.color": "#dddddd", "axes.axisbelow": True, "axes.spines.top": False, "lines.markersize": 4,
                     "axes.spines.right": False, "axes.titlesize": 11, "legend.frameon": False})
SHADES = ["#9ecae1", "#4292c6", "#2171b5", "#08306b"]  # of D, from small to large
RED, BLUE, ORANGE, GREEN, VIOLET, YELLOW, GREY = "#e15759 #4e79a7 #f28e2b #59a14f #b07aa1 #edc948 #bab0ac".split()
CLASSES = {"matmul": BLUE, "elementwise": ORANGE, "reduction": GREEN, "copy": VIOLET, "attention": RED,
           "optimizer": YELLOW, "norm": "#76b7b2", "rmsnorm": "#76b7b2", "softmax": RED, "rope": ORANGE,
           "swiglu": GREEN, "other": GREY}
CATEGORIES = {"parameters": BLUE, "gradients": ORANGE, "optimizer state": GREEN, "activations": RED,
              "weight copies": VIOLET, "inputs": "#9c755f", "workspace": GREY}
PARTS = {"forward": BLUE, "backward": ORANGE, "wait": "#dddddd", "optimizer": YELLOW, "communication": RED}
CARDS = {"H200": 139.2, "H100": 79.1, "A100": 79.2, "B200": 178.0, "4090": 23.5, "T4": 14.6}  # GiB found free


class Missing(Exception):
    pass


# ----------------------------------------------------------------------------------------------------------------------
# Tables

Table = collections.namedtuple("Table", "caption columns rows")
S, D = ("seq_len", "seq", "context length", "s"), ("d_model", "d", "head size")


def tables_of(problem):
    """The Markdown tables of a problem's output; a caption is the paragraph before. Device and commit are the first one's."""
    path = os.path.join(NOTES, "output", problem + ".md")
    if not os.path.exists(path): raise Missing(f"no notes/output/{problem}.md")
    with open(path, encoding="utf-8") as f: blocks = f.read().split("\n\n")
    first = ""
    for before, block in zip([""] + blocks, blocks):
        lines = [[c.strip() for c in l.strip("|").split("|")] for l in block.splitlines() if l.startswith("|")]
        if len(lines) > 2:
            first = first or before
            caption = before if "commit" in before else f"{before}; {first}"
            yield Table(caption, [c.lower() for c in lines[0]], lines[2:])


def find(problem, *wanted):
    """The first table that has all columns, and their indices. A column is given as the names that it may have: it is
    the first of them that is there, else the first that begins so."""
    for table in tables_of(problem):
        fits = [lambda c, n: c == n, str.startswith]
        found = [next((i for fit in fits for n in names for i, c in enumerate(table.columns) if fit(c, n)), None)
                 for names in wanted]
        if None not in found: return table, found
    raise Missing(f"{problem}: no table with the columns {', '.join(names[0] for names in wanted)}")


def number(cell):
    match = re.search(r"-?\d[\d.]*(e[+-]?\d+)?", cell)
    return float(match[0]) if match and "OOM" not in cell else float("nan")


def by_width(problem, *columns):
    """{D: [[S, value of each column], ...]} of the first table that has them, and its caption"""
    table, (s, d, *values) = find(problem, S, D, *columns)
    lines = collections.defaultdict(list)
    for row in table.rows: lines[int(number(row[d]))].append([number(row[i]) for i in (s, *values)])
    return dict(sorted(lines.items())), table.caption


def machine(caption):
    parts = [part.strip().split(", driver")[0] for part in caption.split(";")]
    return "; ".join(part for part in parts if re.search(r"NVIDIA|EPYC|Xeon|CPU|commit", part))


def lengths(axis, values, title):
    axis.set(xscale="log", xlabel="positions S", title=title)
    axis.set_xticks(values, [f"{v:g}" for v in values], fontsize=10)
    axis.minorticks_off()


def save(figure, name, caption="", legend=None):
    """legend: (handles, labels), below the axes; the caption below it."""
    height, strip = figure.get_figheight(), 0.25 if caption else 0.05  # inches
    if legend:
        ncols = 3 if max(map(len, legend[1])) > 20 else 7
        figure.legend(*legend, loc="lower center", ncols=ncols, bbox_to_anchor=(0.5, strip / height))
        strip += 0.1 + 0.25 * -(-len(legend[1]) // ncols)
    figure.get_layout_engine().set(rect=(0, strip / height, 1, 1 - strip / height))
    for axis in figure.axes:
        if axis.get_yscale() == "log": axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    figure.text(0.995, 0.05 / height, caption, ha="right", va="bottom", fontsize=9, color="#666666")
    figure.savefig(name, metadata={"Date": None} if name.endswith(".svg") else None)
    plt.close(figure)
    print(os.path.relpath(name))


# ----------------------------------------------------------------------------------------------------------------------
# Pictures of tables

def softmax(name):
    try:  # a row per phase, or forward's classes and the step's products in one row
        table, (size, s, phase, _) = find("nsys_profile", ("size",), S, ("phase",), ("matmul",))
    except Missing: table, (size, s, _, whole) = find("nsys_profile", ("size",), S, ("matmul",), ("step: matmul",))
    model, names, bars = table.rows[-1][size], {"forward": "fw", "forward+backward": "+bw", "step": "step"}, []
    for r in [r for r in table.rows if r[size] == model]:
        shares = {kind: number(r[c]) for c, kind in enumerate(table.columns) if kind in CLASSES}
        if "phase" not in table.columns: bars += [("fw", r[s], shares), ("step", r[s], {"matmul": number(r[whole])})]
        elif r[phase] in names: bars.append((names[r[phase]], r[s], shares))
    for _, _, shares in bars: shares["other"] = 100 - sum(shares.values())
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), width_ratios=[3, 2], layout="constrained")
    group = [bar[1] for bar in bars].count(bars[0][1])
    places = [i + i // group * 0.6 for i in range(len(bars))]  # a gap between lengths
    bottom = [0.0] * len(bars)
    for kind in CLASSES:
        heights = [shares.get(kind, 0) for _, _, shares in bars]
        if max(heights) < 0.5: continue
        left.bar(places, heights, 0.85, bottom, color=CLASSES[kind], label=kind)
        bottom = [b + h for b, h in zip(bottom, heights)]
    labels = [text + (f"\nS {length}" if i % group == group // 2 else "") for i, (text, length, _) in enumerate(bars)]
    left.set_xticks(places, labels, fontsize=9)
    left.set(ylabel="share of the kernels' time (%)", title=f"Kernels by class, {model}", ylim=(0, 100))
    left.grid(axis="x", visible=False)
    caption = machine(table.caption)
    table, (size, *columns) = find("nsys_profile", ("size",), S, ("softmax (ms)", "softmax ms"),
                                   ("products (ms)", "products ms"))
    rows = [[number(r[c]) for c in columns] for r in table.rows if r[size] == model]
    x, flops = [r[0] for r in rows], 5 / (4 * (80 if model in ("2.7B", "xl (2026)") else 64))
    right.plot(x, [r[1] / r[2] for r in rows], "o-", color=RED)
    right.plot(x, [flops] * len(x), "--", color=BLUE)
    right.text(x[0], rows[0][1] / rows[0][2] * 0.5, "in time", color=RED)
    right.text(x[0], flops * 1.25, "in FLOPs, 5 : 4 D", color=BLUE)
    lengths(right, x, "Softmax / attention's two products")
    right.set(yscale="log", ylim=(0.008, 3))
    save(figure, name, caption, left.get_legend_handles_labels())


def alignment(name):
    """1000 + 0.01 as the adder sees it: both significands at the larger one's exponent, then the rounded sum."""
    figure, axis = plt.subplots(figsize=(10, 4.6), layout="constrained")
    y = 0
    for title, fraction in (("fp32", 23), ("fp16", 10), ("bf16", 7)):  # bits behind the point
        rounded = lambda value, exponent: round(value * 2.0 ** (fraction - exponent)) * 2.0 ** (exponent - fraction)
        small = rounded(0.01, -7)
        total = rounded(1000 + small, 9)
        for text, value, first in (("1000", 1000, 9), ("0.01", small, -7), (f"= {total:.7g}", total, 9)):
            for place in range(first, first - fraction - 1, -1):
                colour = "#f3c6c3" if place < 9 - fraction else "#d5ead2" if "=" in text else "#cfe0f1"
                axis.add_patch(plt.Rectangle((9 - place, y), 0.94, 0.86, ec="#888888", lw=0.5, fc=colour))
                axis.text(9.47 - place, y + 0.45, int(value / 2.0**place) & 1, ha="center", va="center", fontsize=9)
            axis.text(-0.4, y + 0.43, text, ha="right", va="center")
            y += 1
        axis.text(-5.6, y - 1.57, title, ha="right", va="center", weight="bold")
        y += 0.7
    for place in (9, 0, -7, -14, -30): axis.text(9.47 - place, -0.4, f"$2^{{{place}}}$", ha="center")
    axis.set(xlim=(-7.5, 40.5), ylim=(y, -1.3))
    axis.set_title("1000 + 0.01: bits behind the last place (red) are rounded away")
    axis.axis("off")
    save(figure, name)


def attention(name):
    times, caption = by_width("pytorch_attention", ("forward_time", "forward"), ("backward_time", "backward"),
                              ("memory_usage_mb", "memory"))
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.9), layout="constrained")
    x = [row[0] for row in times[min(times)]]
    for (d, rows), colour in zip(times.items(), SHADES):
        for i in (0, 1): axes[i].plot(x, [1e3 * r[1 + i] for r in rows], "o-", color=colour, label=f"D {d}")
    for axis, title in zip(axes, ("forward (ms)", "backward (ms)", "held before backward (GiB)")):
        lengths(axis, x, title)
        axis.set_yscale("log")
        axis.tick_params("x", labelsize=9)
    axes[0].legend(loc="upper left")
    held = [[rows[i][3] / 1024 for rows in times.values()] for i in range(len(x))]
    axes[2].fill_between(x, [min(h) for h in held], [max(h) for h in held], color=SHADES[2])
    axes[2].text(x[0], held[2][0], f"naive, D {min(times)} to {max(times)}", color=SHADES[2])
    flash = [4 * 8 * s * (5 * max(times) + 1) / 2**30 for s in x]  # q, k, v, dO, O and L; batch 8
    axes[2].plot(x, flash, "--", color=RED)
    axes[2].text(x[-1], flash[1], f"FlashAttention\nwould hold (D {max(times)})", ha="right", va="center", color=RED)
    for card in [c for c in CARDS if c in caption][:1]:
        axes[2].axhline(CARDS[card], color="#444444", lw=1)
        axes[2].text(x[0], CARDS[card] * 0.9, f"the card has {CARDS[card]:.0f}", va="top", fontsize=10)
        axes[2].set_ylim(top=CARDS[card] * 2)
    save(figure, name, machine(caption))


def torch_compile(name):
    ours, caption = by_width("torch_compile", ("speedup fw",), ("speedup bw",))
    columns = [(f"{what} {p}",) for p in ("fw", "bw") for what in ("pytorch eager", "torch.compile")]
    try: theirs, _ = by_width("vs_pytorch", *columns)
    except Missing: theirs = {}
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    x = [row[0] for row in ours[min(ours)]]
    for i, axis in enumerate(axes):
        if theirs:
            factors = list(zip(*[[r[1 + 2 * i] / r[2 + 2 * i] for r in rows] for rows in theirs.values()]))
            axis.fill_between(x, [min(f) for f in factors], [max(f) for f in factors], color=ORANGE, alpha=0.35, lw=0,
                              label="torch.compile over PyTorch eager, all D")
        for (d, rows), colour in zip(ours.items(), SHADES):
            axis.plot(x, [r[1 + i] for r in rows], "o-", color=colour, label=f"fused over eager, D {d}")
        axis.axhline(1, color="#444444", lw=1)
        lengths(axis, x, ("forward", "backward")[i] + ": how many times as fast")
    axes[0].set_ylim(bottom=0)
    save(figure, name, machine(caption), axes[1].get_legend_handles_labels())


def flash(name):
    table, (s, d, dtype, *times) = find("flash_benchmarking", S, D, ("dtype",), ("naive tot", "naive both", "py tot"),
                                        ("flash tot", "flash both"))
    groups = collections.defaultdict(list)
    for r in table.rows: groups[r[dtype], r[d]].append([number(r[i]) for i in (s, *times)])
    kinds, widths = list(dict.fromkeys(k for k, _ in groups)), list(dict.fromkeys(w for _, w in groups))
    figure, axes = plt.subplots(len(kinds), len(widths), figsize=(10, 2.7 * len(kinds) + 0.6), sharex=True, sharey=True,
                                squeeze=False, layout="constrained")
    for (kind, width), rows in groups.items():
        axis = axes[kinds.index(kind)][widths.index(width)]
        for i, colour in ((1, "#888888"), (2, RED)):
            axis.plot([r[0] for r in rows], [r[i] for r in rows], "o-", color=colour)
        factors = [r[1] / r[2] for r in rows if r[1] / r[2] == r[1] / r[2]]  # not NAN
        axis.set(xscale="log", yscale="log")
        axis.set_title(f"{kind}, D {width}" + (f": {factors[-1]:.3g}x" if factors else ""))
        axis.set_xticks([128, 1024, 8192, 65536], ["128", "1k", "8k", "64k"])
        axis.minorticks_off()
    axes[0][0].text(9000, 60, "naive", color="#666666", ha="right")
    axes[0][0].text(4000, 0.025, "flash", color=RED)
    for axis in axes[-1]: axis.set_xlabel("positions S")
    for axis in axes[:, 0]: axis.set_ylabel("both passes (ms)")
    save(figure, name, "factors: naive / flash at the longest S; " + machine(table.caption))


# ----------------------------------------------------------------------------------------------------------------------
# Memory over time, from the snapshots of memory_profiling --out

def memory(paths, name):
    """x is the order of allocations and frees, as in memory_viz, but each phase has a width of its own: most events are
    the eager optimizer's, which takes a few percent of the time."""
    widths = {"forward": 3, "loss": 0.3, "backward": 5, "optimizer": 1.5}
    rows = (len(paths) + 1) // 2
    figure, axes = plt.subplots(rows, 2, figsize=(10, 3.6 * rows), width_ratios=[2, 3], squeeze=False,
                                layout="constrained")
    shown = {}
    for path, axis in zip(paths, axes.flat):
        with open(path, "rb") as f: events = pickle.load(f)["device_traces"][0]
        held, phases, phase = collections.Counter(), {}, None
        for e in events:
            if e["action"] not in ("alloc", "free_completed"): continue
            outer = e["frames"][-1]["name"]
            if e["time_us"] > 0 and outer in widths: phase = outer  # what was held before has the time 0
            held[e["category"]] += (e["size"] if e["action"] == "alloc" else -e["size"]) / 2**30
            if phase: phases.setdefault(phase, []).append(dict(held))
        x, points, start = [], [], 0.0
        for phase, of_phase in phases.items():
            x += [start + widths[phase] * i / len(of_phase) for i in range(len(of_phase))]
            points += of_phase
            start += widths[phase]
            axis.axvline(start, color="#888888", lw=0.8, ls=":")
            axis.text(start - widths[phase] / 2, 1.01, phase if phase != "loss" else "", ha="center", va="bottom",
                      fontsize=10, transform=axis.get_xaxis_transform())
        scale, unit = (1, "GiB") if max(sum(p.values()) for p in points) >= 1 else (1024, "MiB")
        points = [{c: scale * held for c, held in p.items()} for p in points]
        sums = [sum(p.values()) for p in points]
        peak, moving = max(sums), max(sums) - min(sums)
        bottom = peak - 3 * moving if len(phases) == 1 and moving < peak / 6 else 0
        seen = [c for c in CATEGORIES if max(p.get(c, 0) for p in points) > peak / 200]
        some = [range(i, min(i + max(1, len(x) // 250), len(x))) for i in range(0, len(x), max(1, len(x) // 250))]
        keep = sorted({f(part, key=sums.__getitem__) for part in some for f in (min, max)} | {0, len(x) - 1})
        for n in range(len(seen), 0, -1):  # the highest first, each down to the axis
            top = [(x[i], sum(points[i].get(c, 0) for c in seen[:n])) for i in keep]
            edge = [p for before, p, after in zip(top, top[1:], top[2:]) if not before[1] == p[1] == after[1]]
            edge = [(0, bottom), top[0], *edge, top[-1], (start, bottom)]
            shown[seen[n - 1]], = axis.fill(*zip(*edge), color=CATEGORIES[seen[n - 1]], lw=0)
        axis.axhline(peak, color="#444444", lw=0.8)
        axis.text(0.02 * start, peak + (peak - bottom) * 0.01, f"peak {peak:.1f} {unit}", va="bottom")
        title = re.sub(r"snapshot_(\w+?)_(.+)_(\d+)_(\w+)\.pickle", r"\1, \2, S \3, \4", os.path.basename(path))
        axis.set_title(title + (f" (axis from {bottom:.1f})" if bottom else ""), pad=20)
        axis.set(xlim=(0, start), ylim=(bottom, peak + (peak - bottom) * 0.14), xticks=[], ylabel=f"{unit} held")
    order = [c for c in CATEGORIES if c in shown]
    save(figure, name, "", ([shown[c] for c in order], order))


# ----------------------------------------------------------------------------------------------------------------------
# The steps of ranks over time, from --trace

def steps(path, name):
    """A panel per way (the range around a step). A rank's upper row computes, its lower one sends: kernels where there
    are any, else ranges."""
    with open(path) as f: trace = json.load(f)
    events = sorted((e for e in trace["traceEvents"] if e["ph"] == "X"), key=lambda e: e["ts"])
    part = {"loss": "forward", "synchronize gradients": "wait", "gradient norm": "optimizer"}
    kernels = any(e["cat"] == "kernel" for e in events)
    ways, bars = collections.defaultdict(dict), collections.defaultdict(list)
    for e in events:
        e["at"] = (e["args"].get("path") or e["args"].get("range") or "").split("/")
        e["sent"] = "nccl" in e["name"] or e["at"][-1] in ("all-reduce", "all-gather", "reduce-scatter")
        if e["cat"] == "range" and len(e["at"]) == 1 and not e["sent"]: ways[e["name"]][e["pid"]] = e
    for way, of_rank in ways.items():
        for e in events:
            around = of_rank.get(e["pid"])
            if not around or not 0 <= e["ts"] - around["ts"] < around["dur"]: continue
            second = e["at"][1] if len(e["at"]) > 1 else ""
            kind = "communication" if e["sent"] else part.get(second, second)
            if kind not in PARTS or e["cat"] != ("kernel" if kernels else "range"): continue
            if not kernels and not e["sent"] and len(e["at"]) != 2: continue
            spans, start, end = bars[way, e["pid"], kind], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3
            if spans and start - spans[-1][1] < 0.02: spans[-1][1] = max(spans[-1][1], end)  # hardly apart: one
            else: spans.append([start, end])
    ways, ranks = [list(dict.fromkeys(key[i] for key in bars)) for i in (0, 1)]
    if not ways: sys.exit(f"{path}: no range around a step is in it")
    figure, axes = plt.subplots(len(ways), 1, figsize=(10, 0.6 + 0.5 * len(ranks) * len(ways)), sharex=True,
                                squeeze=False, layout="constrained")
    for way, axis in zip(ways, axes.flat):
        mine = {key[1:]: spans for key, spans in bars.items() if key[0] == way}
        origin = min(spans[0][0] for (_, kind), spans in mine.items() if kind != "communication")
        for (rank, kind), spans in mine.items():
            later = [(a - origin, b - a) for a, b in spans if a >= origin]  # without the barrier before the step
            row = 2 * ranks.index(rank) + (kind == "communication")
            axis.broken_barh(later, (row + 0.06, 0.88), color=PARTS[kind], lw=0)
        end = max(spans[-1][1] for spans in mine.values()) - origin
        axis.set_title(f"{way}: {end:.1f} ms", loc="left", pad=2)
        axis.set_yticks([i + 0.5 for i in range(2 * len(ranks))], [t for r in ranks for t in (f"rank {r}", "sends")])
        axis.tick_params("y", labelsize=9)
        axis.set_ylim(2 * len(ranks), 0)
        axis.grid(axis="y", visible=False)
    axes.flat[-1].set_xlabel("ms")
    seen = [kind for kind in PARTS if any(key[2] == kind for key in bars)]
    save(figure, name, machine(trace["otherData"]["caption"]),
         ([plt.Rectangle((0, 0), 1, 1, color=PARTS[kind]) for kind in seen], seen))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="snapshots (.pickle), or one trace (.json)")
    parser.add_argument("--out", metavar="FILE", help="the picture of these files, .svg or .png")
    o = parser.parse_args()
    if bool(o.files) != bool(o.out): parser.error("files need --out, and --out needs files")
    if o.files: return memory(o.files, o.out) if o.files[0].endswith(".pickle") else steps(o.files[0], o.out)
    for draw, name in ((softmax, "1.1.4-softmax"), (alignment, "1.1.5-alignment"),
                       (attention, "1.2.1-pytorch_attention"), (torch_compile, "1.3-torch_compile"),
                       (flash, "1.3.2-flash_benchmarking")):
        try: draw(os.path.join(NOTES, name + ".svg"))
        except Missing as why: print(f"{name}.svg: left out, {why}", file=sys.stderr)


main()
