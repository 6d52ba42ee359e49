#!/usr/bin/env python3
"""notes/plot.py: the pages' pictures, from the tables in notes/output and from snapshots of memory (`make pictures`).

    plot.py [FOLDER]                         into notes/, from notes/output and the snapshots in FOLDER (build/pictures)
    plot.py --out FILE.svg FILE.pickle ...   memory over time, a panel per snapshot of memory_profiling --out

Needs matplotlib. A picture that lacks something stays as it is, with a line on stderr. GitHub shows a picture about
800 pixels wide, and beside another one 400: all text has 17 of the 800.
"""
import argparse, collections, os, pickle, re, sys

try: import matplotlib
except ImportError: sys.exit("plot.py: needs matplotlib (python3-matplotlib)")
matplotlib.use("Agg")
import matplotlib.pyplot as plt

NOTES = os.path.dirname(os.path.abspath(__file__))
plt.rcParams.update({"font.size": 15, "axes.titlesize": 15, "svg.fonttype": "none", "svg.hashsalt": "cs336",
                     "axes.grid": True, "grid.color": "#dddddd", "axes.axisbelow": True, "axes.spines.top": False,
                     "axes.spines.right": False, "lines.linewidth": 2, "legend.frameon": False,
                     "legend.columnspacing": 1.2, "legend.handlelength": 1.2})
SHADES = ["#9ecae1", "#4292c6", "#2171b5", "#08306b"]  # of D, from small to large
RED, BLUE, ORANGE, GREEN, VIOLET, YELLOW, GREY = "#e15759 #4e79a7 #f28e2b #59a14f #b07aa1 #edc948 #bab0ac".split()
CATEGORIES = {"parameters": BLUE, "gradients": ORANGE, "optimizer state": GREEN, "activations": RED,
              "weight copies": VIOLET, "inputs": "#9c755f", "workspace": GREY}


class Missing(Exception):
    pass


# ----------------------------------------------------------------------------------------------------------------------
# Tables

def text_of(problem):
    path = os.path.join(NOTES, "output", problem + ".md")
    if not os.path.exists(path): raise Missing(f"no notes/output/{problem}.md")
    with open(path, encoding="utf-8") as f: return f.read()


def rows_of(problem, *columns):
    """The rows, as {column: cell}, of the first Markdown table that has these columns."""
    for block in text_of(problem).split("\n\n"):
        lines = [[c.strip() for c in l.strip("|").split("|")] for l in block.splitlines() if l.startswith("|")]
        if lines and set(columns) <= set(lines[0]): return [dict(zip(lines[0], cells)) for cells in lines[2:]]
    raise Missing(f"{problem}: no table with the columns {', '.join(columns)}")


def machine(problem):
    """Device and commit, which the first caption names."""
    parts = [part.strip().split(", driver")[0] for part in text_of(problem).split("\n\n")[0].split(";")]
    return "; ".join(part for part in parts if re.search(r"NVIDIA|AMD|Intel|commit|--quick", part))


def number(cell):
    match = re.search(r"-?\d[\d.]*(e[+-]?\d+)?", cell)
    return float(match[0]) if match and "OOM" not in cell else float("nan")


def by_width(rows, d, *columns):
    """{D: [[S, the columns' values ...], ...]}"""
    lines = collections.defaultdict(list)
    for row in rows: lines[int(number(row[d]))].append([number(row[c]) for c in columns])
    return dict(sorted(lines.items()))


def band(axis, lines, value, **look):
    """From the least to the largest value over all D."""
    points = [(rows[0][0], *(least(map(value, rows)) for least in (min, max))) for rows in zip(*lines.values())]
    axis.fill_between(*zip(*points), **look)


def lengths(axis, values, title):
    wide = values[-1:]
    for s in reversed(values): wide += [s] if s * (values[-1] / values[0]) ** 0.25 <= wide[-1] else []
    axis.set(xscale="log", xlabel="positions S", title=title)
    axis.set_xticks(wide, [f"{s / 1024:g}k" if s >= 1024 else f"{s:g}" for s in wide])
    axis.minorticks_off()


def save(figure, name, caption="", legend=None):
    """legend: (handles, labels), below the axes; the caption below it."""
    height, strip = figure.get_figheight(), 0.3 if caption else 0.05  # inches
    if legend:
        lines = 1 + (sum(map(len, legend[1])) + 6 * len(legend[1])) // 88
        figure.legend(*legend, loc="lower center", ncols=-(-len(legend[1]) // lines),
                      bbox_to_anchor=(0.5, strip / height - 0.01))
        strip += 0.1 + 0.29 * lines
    figure.get_layout_engine().set(rect=(0, strip / height, 1, 1 - strip / height))
    for axis in figure.axes:
        if axis.get_yscale() == "log": axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    figure.text(0.995, 0.06 / height, caption, ha="right", va="bottom", color="#666666")
    figure.savefig(name, metadata={"Date": None} if name.endswith(".svg") else None)
    plt.close(figure)
    print(os.path.relpath(name))


def panels(count, height, **more):
    return plt.subplots(1, count, figsize=(10, height), layout="constrained", **more)


# ----------------------------------------------------------------------------------------------------------------------
# Pictures of tables

def softmax(name):
    rows = rows_of("nsys_profile", "size", "S", "matmul", "step: matmul", "softmax ms", "products ms")
    rows = [row for row in rows if row["size"] == rows[-1]["size"]]
    parts = {"matmul": BLUE, "softmax": RED, "rope": ORANGE, "swiglu": GREEN, "rmsnorm": "#76b7b2"}
    figure, (left, right) = panels(2, 5.2, width_ratios=[3, 2])
    bottom, places = [0.0] * len(rows), range(len(rows))
    for part, colour in [*parts.items(), ("other", GREY)]:
        heights = [number(r[part]) if part in r else 100 - b for r, b in zip(rows, bottom)]
        left.bar(places, heights, 0.7, bottom, color=colour, label=part)
        bottom = [b + h for b, h in zip(bottom, heights)]
    left.hlines([number(r["step: matmul"]) for r in rows], [i - 0.45 for i in places], [i + 0.45 for i in places],
                color="black", label="matmul, whole step")
    left.set_xticks(places, [row["S"] for row in rows])
    left.set(xlabel="positions S", ylabel="%", title=f"Forward's kernels, {rows[0]['size']}", ylim=(0, 100))
    left.grid(axis="x", visible=False)
    x, flops = [number(r["S"]) for r in rows], 5 / (4 * (80 if rows[0]["size"] in ("2.7B", "xl (2026)") else 64))
    times = [number(r["softmax ms"]) / number(r["products ms"]) for r in rows]
    right.plot(x, times, "o-", color=RED)
    right.plot(x, [flops] * len(x), "--", color=BLUE)
    right.text(x[0], times[0] * 0.4, "in time", color=RED)
    right.text(x[0], flops * 1.3, "in FLOPs, 5 : 4 D", color=BLUE)
    lengths(right, x, "Softmax / two products")
    right.set(yscale="log", ylim=(flops / 2, max(times) * 2))
    save(figure, name, machine("nsys_profile"), left.get_legend_handles_labels())


def alignment(name):
    """1000 + 0.01 as the adder sees it: both significands at the larger one's exponent, then the rounded sum."""
    figure, axis = panels(1, 5.4)
    y = 0
    for title, fraction in (("fp32", 23), ("fp16", 10), ("bf16", 7)):  # bits behind the point
        rounded = lambda value, exponent: round(value * 2.0 ** (fraction - exponent)) * 2.0 ** (exponent - fraction)
        small = rounded(0.01, -7)
        total = rounded(1000 + small, 9)
        for text, value, first in (("1000", 1000, 9), ("0.01", small, -7), (f"= {total:.7g}", total, 9)):
            for place in range(first, first - fraction - 1, -1):
                colour = "#f3c6c3" if place < 9 - fraction else "#d5ead2" if "=" in text else "#cfe0f1"
                axis.add_patch(plt.Rectangle((9 - place, y), 0.96, 0.9, ec="#888888", lw=0.5, fc=colour))
                axis.text(9.48 - place, y + 0.47, int(value / 2.0**place) & 1, ha="center", va="center")
            axis.text(-0.3, y + 0.45, text, ha="right", va="center")
            y += 1
        axis.text(40, y - 2.5 if title == "fp32" else y - 1.5, title, ha="right", va="center", weight="bold")
        y += 0.5
    for place in (9, 0, -7, -14, -30): axis.text(9.47 - place, -0.3, f"$2^{{{place}}}$", ha="center")
    axis.set(xlim=(-6.4, 40.2), ylim=(y - 0.3, -1.2))
    axis.set_title("1000 + 0.01: bits behind the last place (red) are rounded away")
    axis.axis("off")
    save(figure, name)


def attention(name):
    lines = by_width(rows_of("pytorch_attention", "seq_len", "forward_time", "memory_usage_mb"), "d_model", "seq_len",
                     "forward_time", "backward_time", "memory_usage_mb")
    figure, (left, right) = panels(2, 5)
    for axis in (left, right): axis.set_yscale("log")
    x, d = [row[0] for row in lines[max(lines)]], f"D {min(lines)} to {max(lines)}"
    for i, text, colour in ((1, "forward", BLUE), (2, "backward", ORANGE)):
        band(left, lines, lambda row: 1e3 * row[i], color=colour, alpha=0.7, label=text)
    lengths(left, x, f"Naive attention, {d}: ms")
    band(right, lines, lambda row: row[3] / 1024, color=GREEN, lw=2, label="naive")
    flash = [4 * 8 * s * (5 * max(lines) + 1) / 2**30 for s in x]  # q, k, v, dO, O and L; batch 8
    right.plot(x, flash, "--", color=RED, label="FlashAttention would hold")
    card = re.search(r"needs [\d.]+ GiB of (\d+(?:\.\d+)?)", text_of("pytorch_attention"))
    if card:
        right.axhline(float(card[1]), color="black")
        right.text(x[0], float(card[1]) * 1.25, f"the card: {float(card[1]):.0f} GiB")
        right.set_ylim(top=float(card[1]) * 4)
    lengths(right, x, "Held before backward: GiB")
    legends = [axis.get_legend_handles_labels() for axis in (left, right)]
    save(figure, name, machine("pytorch_attention"), (legends[0][0] + legends[1][0], legends[0][1] + legends[1][1]))


def torch_compile(name):
    ours = by_width(rows_of("torch_compile", "seq_len", "speedup fw"), "d_model", "seq_len", "speedup fw", "speedup bw")
    columns = [f"{what} {p}" for p in ("fw", "bw") for what in ("PyTorch eager", "torch.compile")]
    try: theirs = by_width(rows_of("vs_pytorch", *columns), "d_model", "seq_len", *columns)
    except Missing: theirs = {}
    figure, axes = panels(2, 5.2, sharey=True)
    x = [row[0] for row in ours[min(ours)]]
    for i, axis in enumerate(axes):
        if theirs:
            band(axis, theirs, lambda row: row[1 + 2 * i] / row[2 + 2 * i], color=ORANGE, alpha=0.35, lw=0,
                 label="torch.compile over PyTorch, all D")
        for (d, rows), colour in zip(ours.items(), SHADES):
            axis.plot(x, [r[1 + i] for r in rows], "o-", color=colour, label=f"ours, D {d}")
        axis.axhline(1, color="black", lw=1)
        lengths(axis, x, ("Forward", "Backward")[i] + ": eager / compiled")
    axes[0].set_ylim(bottom=0)
    save(figure, name, machine("torch_compile"), axes[1].get_legend_handles_labels())


def flash(name):
    rows = rows_of("flash_benchmarking", "Seq", "D", "dtype", "Naive Tot", "Flash Tot")
    kinds = list(dict.fromkeys(r["dtype"] for r in rows))
    figure, axes = panels(len(kinds), 5.2, sharey=True, squeeze=False)
    for kind, axis in zip(kinds, axes[0]):
        lines = by_width([r for r in rows if r["dtype"] == kind], "D", "Seq", "Naive Tot", "Flash Tot")
        x = [row[0] for row in lines[min(lines)]]
        band(axis, lines, lambda row: row[1], color="#888888", lw=2, label="naive, all D")
        for (d, line), colour in zip(lines.items(), SHADES):
            axis.plot(x, [row[2] for row in line], "o-", color=colour, label=f"flash, D {d}")
        times = sorted(row[1] / row[2] for line in lines.values() for row in line[-1:] if row[1] == row[1])  # not NAN
        faster = f": {times[0]:.0f} to {times[-1]:.0f} times\nas fast at S {x[-1]:.0f}" if times else ""
        lengths(axis, x, kind + faster)
        axis.set(yscale="log")
    axes[0][0].set_ylabel("both passes, ms")
    save(figure, name, machine("flash_benchmarking"), axes[0][0].get_legend_handles_labels())


def overlap(name):
    """A strategy's step, and below it its communication, which ends where the step waits for it no longer."""
    parts = {"Forward (ms)": BLUE, "Backward (ms)": ORANGE, "Exposed Comm (ms)": "#dddddd", "Optimizer (ms)": YELLOW}
    problem = "ddp_bucketed_benchmarking"
    rows, sent = rows_of(problem, "Strategy", *parts), rows_of(problem, "Strategy", "Comm Time (ms)")
    figure, axis = panels(1, 1.4 + 0.55 * len(rows))
    for y, (row, calls) in enumerate(zip(rows, sent)):
        start = 0.0
        for part, colour in parts.items():
            if part.startswith("Optimizer"):
                axis.barh(y + 0.25, -number(calls["Comm Time (ms)"]), 0.22, start, color=RED, label="communication")
            axis.barh(y - 0.1, number(row[part]), 0.48, start, color=colour, label=part.split(" (")[0])
            start += number(row[part])
    axis.set_yticks(range(len(rows)), [row["Strategy"] for row in rows])
    axis.invert_yaxis()
    axis.set_xlabel("ms from the step's start")
    axis.grid(axis="y", visible=False)
    handles, labels = axis.get_legend_handles_labels()
    save(figure, name, machine(problem), (handles[:5], ["waits" if "Exp" in l else l.lower() for l in labels[:5]]))


def gathers(name):
    rows = rows_of("fsdp_accounting", "unit", "gather", "wait")
    figure, axis = panels(1, 4)
    for i, (part, colour) in enumerate((("gather", BLUE), ("wait", RED))):
        places = [u - 0.2 + 0.4 * i for u in range(len(rows))]
        axis.bar(places, [number(r[part]) for r in rows], 0.4, color=colour, label=("all-gather", "wait for it")[i])
    some = [u for u, r in enumerate(rows) if u % 5 == 1 and 5 < u < len(rows) - 3 or not r["unit"].startswith("layer")]
    axis.set_xticks(some, [rows[u]["unit"].replace("layer ", "") for u in some])
    axis.set(xlabel="unit, in forward's order", ylabel="ms")
    axis.grid(axis="x", visible=False)
    save(figure, name, machine("fsdp_accounting"), axis.get_legend_handles_labels())


# ----------------------------------------------------------------------------------------------------------------------
# Memory over time, from the snapshots of memory_profiling --out

def times_of(size, length):
    """ms of a step's phases, as nsys_profile measured them in the same mode; none: that does not fit, or was not run"""
    try:
        is_it = lambda row: row["size"] == size and row["S"] == length
        whole, = filter(is_it, rows_of("nsys_profile", "size", "S", "forward ms", "step ms"))
        adamw, = filter(is_it, rows_of("nsys_profile", "size", "S", "AdamW ms"))
    except (Missing, ValueError): return {}
    forward, step, optimizer = number(whole["forward ms"]), number(whole["step ms"]), number(adamw["AdamW ms"])
    return {"forward": forward, "backward": step - forward - optimizer, "optimizer": optimizer} if step > 0 else {}


def memory(paths, name, same_as=""):
    """A snapshot has the order of allocations, but no times: the host runs ahead of a GPU, and a prediction computes
    nothing. So only the phases' widths are times, nsys_profile's, at the size `same_as`; without them x has no unit."""
    rows, columns = (len(paths) + 1) // 2, min(len(paths), 2)
    figure, axes = plt.subplots(rows, columns, figsize=(10, 4.4 * rows), width_ratios=[2, 3][-columns:], squeeze=False,
                                layout="constrained")
    for axis in axes.flat[len(paths):]: axis.axis("off")
    shown = {}
    for path, axis in zip(paths, axes.flat):
        what = re.match(r"snapshot_(\w+?)_(.+)_(\d+)_(\w+)\.pickle", os.path.basename(path))
        kind, size, length, precision = what.groups()
        with open(path, "rb") as f: events = pickle.load(f)["device_traces"][0]
        held, phases, phase = collections.Counter(), {}, None
        for e in events:
            if e["action"] not in ("alloc", "free_completed"): continue
            outer = e["frames"][-1]["name"]
            if e["time_us"] > 0 and outer in ("forward", "backward", "optimizer"): phase = outer  # at 0: held before
            held[e["category"]] += (e["size"] if e["action"] == "alloc" else -e["size"]) / 2**30
            if phase: phases.setdefault(phase, []).append(dict(held))
        measured = times_of(same_as or size, length)
        widths = measured or {"forward": 3, "backward": 6, "optimizer": 1}
        x, points, start = [], [], 0.0
        for i, (phase, of_phase) in enumerate(phases.items()):
            x += [start + widths[phase] * i / len(of_phase) for i in range(len(of_phase))]
            points += of_phase
            axis.axvspan(start, start + widths[phase], color=("#eeeeee", "#ffffff", "#dddddd")[i], zorder=0, lw=0)
            if len(phases) > 1:
                axis.text(start + widths[phase] / 2, 1.01, phase if phase != "optimizer" else "AdamW", ha="center",
                          va="bottom", transform=axis.get_xaxis_transform())
            start += widths[phase]
        scale, unit = (1, "GiB") if max(sum(p.values()) for p in points) >= 1 else (1024, "MiB")
        points = [{c: scale * held for c, held in p.items()} for p in points]
        sums = [sum(p.values()) for p in points]
        peak = max(sums)
        seen = [c for c in CATEGORIES if max(p.get(c, 0) for p in points) > peak / 200]
        bottom = min(sum(p.get(c, 0) for c in seen[:-1]) for p in points) if len(phases) == 1 else 0
        bottom = bottom - (peak - bottom) / 4 if bottom > peak * 0.8 else 0  # what moves is small: not from 0
        many = max(1, len(x) // 250)
        some = [range(i, min(i + many, len(x))) for i in range(0, len(x), many)]
        keep = sorted({f(part, key=sums.__getitem__) for part in some for f in (min, max)} | {0, len(x) - 1})
        for n in range(len(seen), 0, -1):  # the highest first, each down to the axis
            top = [(x[i], sum(points[i].get(c, 0) for c in seen[:n])) for i in keep]
            edge = [p for before, p, after in zip(top, top[1:], top[2:]) if not before[1] == p[1] == after[1]]
            edge = [(0, bottom), top[0], *edge, top[-1], (start, bottom)]
            shown[seen[n - 1]], = axis.fill(*zip(*edge), color=CATEGORIES[seen[n - 1]], lw=0)
        axis.set_title(f"{kind}, S {length}: peak {peak:.1f} {unit}", pad=26)
        axis.locator_params(axis="y", nbins=6)
        axis.set(xlim=(0, start), ylim=(bottom, peak + (peak - bottom) * 0.05), ylabel=unit,
                 xlabel="ms; within a phase by allocation" if measured else "in order, not timed")
        if not measured: axis.set_xticks([])
    order = [c for c in CATEGORIES if c in shown]
    save(figure, name, f"{size}, {precision}", ([shown[c] for c in order], order))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="snapshots for --out; without it the folder of them")
    parser.add_argument("--out", metavar="FILE", help="the picture of these snapshots, .svg or .png")
    o = parser.parse_args()
    if o.out: return memory(o.files, o.out)

    def timeline(size, lengths):
        names = [f"snapshot_{kind}_{size}_{s}_fp32.pickle" for s in lengths for kind in ("forward", "step")]
        paths = [os.path.join(*(o.files or ["build/pictures"]), name) for name in names]
        for path in paths:
            if not os.path.exists(path): raise Missing(f"no {path}")
        return lambda name: memory(paths, name, "2.7B")  # 2026's xl has the same numbers

    for name, draw in {"1.1.4-softmax": softmax, "1.1.5-alignment": alignment,
                       "1.1.6-timeline": lambda name: timeline("2.7B", [512])(name),
                       "2026-2.1.6-timeline": lambda name: timeline("xl", [128, 2048])(name),
                       "1.2.1-pytorch_attention": attention, "1.3-torch_compile": torch_compile,
                       "1.3.2-flash_benchmarking": flash, "bucket-overlap-fp32": overlap,
                       "2026-7-fsdp_accounting": gathers}.items():
        try: draw(os.path.join(NOTES, name + ".svg"))
        except Missing as why: print(f"{name}.svg: left as it is, {why}", file=sys.stderr)


main()
