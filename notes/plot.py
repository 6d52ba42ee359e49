#!/usr/bin/env python3
"""notes/plot.py: the pages' pictures, from what lies in notes/output, from snapshots of memory and from formulas that
the picture names (`make pictures`).

    plot.py [FOLDER]                         into notes/, from notes/output and the snapshots in FOLDER (build/pictures)
    plot.py --out FILE.svg FILE.pickle ...   memory over time, a panel per snapshot of memory_profiling --out
    plot.py --out FILE.svg CUT.json ...      timelines, one panel per window of a cut
    plot.py --out CUT.json --cut RANGE,... [--block N] TRACE.json ...
        cuts what --trace FILE wrote to what a picture needs: rank 0's ranges of these names (naive, overlapped, step),
        whole, or of the blocks N and N + 1, forward and backward; one block: --blocks 1; kernel by kernel: --kernels.
        The last range of a name; bucketed.0 is the first

Needs matplotlib. A picture that lacks something stays as it is, with a line on stderr. GitHub shows a picture about
800 pixels wide, and beside another one 400: text has 14 to 17 of the 800.
"""
import argparse, collections, json, math, os, pickle, re, sys

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
    right.plot(x, flash, "--", color=RED, label=f"FlashAttention would hold, D {max(lines)}")
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
    columns = [f"{p} {what} ms" for p in ("fw", "bw") for what in ("eager", "compiled")]
    try: theirs = by_width(rows_of("vs_pytorch", *columns), "d_model", "seq_len", *columns)
    except Missing: theirs = {}
    card = re.search(r"torch_compile \(a\):.*?NVIDIA (\w+)", text_of("vs_pytorch")) if theirs else None
    on = f" ({card[1]})" if card else ""
    figure, axes = panels(2, 5.2, sharey=True)
    x = [row[0] for row in ours[min(ours)]]
    for i, axis in enumerate(axes):
        if theirs:
            band(axis, theirs, lambda row: row[1 + 2 * i] / row[2 + 2 * i], color=ORANGE, alpha=0.35, lw=0,
                 label=f"torch.compile over PyTorch{on}, all D")
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
# Pictures of formulas, which each picture names

def formats(name):
    """The bits of a number, and what they make: range from the exponent, step at 1 from the fraction."""
    figure, axis = panels(1, 4.2)
    kinds = (("fp32", 8, 23), ("tf32", 8, 10), ("bf16", 8, 7), ("fp16", 5, 10))
    for y, (kind, exponent, fraction) in enumerate(kinds):
        for i in range(1 + exponent + fraction):
            colour = GREY if i == 0 else "#f6c28b" if i <= exponent else "#9ecae1"
            axis.add_patch(plt.Rectangle((i, y), 0.94, 0.5, fc=colour, ec="#777777", lw=0.5))
        bias = 2 ** (exponent - 1) - 1
        largest = (2 - 2.0**-fraction) * 2.0**bias
        axis.text(-0.4, y + 0.26, kind, ha="right", va="center", weight="bold")
        axis.text(0, y + 0.56, f"1 + {exponent} + {fraction} bits; up to {largest:.5g}, from {2.0**(1 - bias):.2g} "
                  f"on in full; after 1 comes 1 + $2^{{-{fraction}}}$", va="top", fontsize=14)
    axis.set(xlim=(-3.2, 32.2), ylim=(3.95, -0.15))
    axis.set_title("Sign (grey), exponent (orange), fraction (blue)")
    axis.axis("off")
    save(figure, name, "largest = (2 - 2^-fraction) 2^bias, bias = 2^(exponent - 1) - 1")


def ring(name):
    """Which ranks' numbers are in each part of each rank, after each step of a ring all-reduce."""
    n = 4
    held = [[{r} for _ in range(n)] for r in range(n)]  # [rank][part]
    states = [("start", held, set())]
    for step in range(2 * (n - 1)):
        after, sent = [[set(p) for p in parts] for parts in held], set()
        for r in range(n):
            part = (r - step) % n if step < n - 1 else (r + 1 - (step - n + 1)) % n
            to = (r + 1) % n
            after[to][part] = held[to][part] | held[r][part]
            sent.add((to, part))
        held = after
        states.append((f"step {step + 1}", held, sent))
    figure, axis = panels(1, 7.4)
    shades = ["#eef4fa", "#c6dbef", "#9ecae1", "#4292c6"]
    for i, (title, parts, new) in enumerate(states):  # above the start and reduce-scatter, below all-gather
        x, y = (i * 5, 0) if i < n else ((i - n + 1) * 5, 6.4)
        axis.text(x + 2, y - 0.3, title, ha="center")
        for r in range(n):
            for p in range(n):
                count = len(parts[r][p])
                axis.add_patch(plt.Rectangle((x + p, y + r), 0.95, 0.8, fc=shades[count - 1],
                                             lw=3 if (r, p) in new else 0.5, ec=RED if (r, p) in new else "#888888"))
                text = "all" if count == n else "".join(str(i) for i in sorted(parts[r][p]))
                axis.text(x + p + 0.48, y + r + 0.42, text, ha="center", va="center", fontsize=13 if count == 3 else 15,
                          color="white" if count == n else "black")
    for y, text in ((-1.15, "reduce-scatter: a rank adds the part that comes"),
                    (5.25, "all-gather: a rank keeps the finished part that comes")):
        axis.text(12, y, text, ha="center")
        for r in range(n): axis.text(-0.3 if y < 0 else 4.7, y + 1.55 + r, f"rank {r}", ha="right", va="center")
    axis.set(xlim=(-2.4, 19.3), ylim=(10.5, -1.7))
    axis.set_title("Ring all-reduce, 4 ranks, 4 parts: whose numbers a part holds (red: just came)")
    axis.axis("off")
    save(figure, name, "each rank sends 2 (n - 1) / n of the tensor: 6 parts of 4")


def bucket_model(name):
    """Backward and communication of the model in 2.3.3 (b), in units of s/w."""
    figure, axes = plt.subplots(3, 1, figsize=(10, 4.8), sharex=True, layout="constrained")
    o = 0.06
    for axis, n in zip(axes, (1, 4, 16)):
        for i in range(n):
            axis.barh(1, 1 / n, 0.8, i / n, color=ORANGE, ec="white", lw=0.8, label="backward computes a bucket")
            begin = 1 / n + i * (o + 1 / n)
            axis.barh(0, o, 0.8, begin, color=GREY, ec="white", lw=0.8, label="o, a call's fixed time")
            axis.barh(0, 1 / n, 0.8, begin + o, color=RED, ec="white", lw=0.8, label="the bucket's bytes")
        end = 1 / n + n * (o + 1 / n)
        axis.axvline(1, color="black", lw=1)
        axis.annotate("", (end, 1), (1, 1), arrowprops={"arrowstyle": "<->"})
        axis.text(end + 0.02, 1, f"{1 / n + n * o:.2f}", va="center")
        axis.set_title(f"$n_b$ = {n}: overhead 1/{n} + {n} x {o} = {1 / n + n * o:.2f}", loc="left", pad=4)
        axis.set_yticks([])
        axis.set_ylim(-0.5, 1.5)
    axes[-1].set(xlabel="time in units of s/w, backward's", xlim=(0, 2.3))
    handles, labels = axes[0].get_legend_handles_labels()
    formula = f"overhead = s/(n_b w) + n_b o, with o = {o} s/w: least at n_b = sqrt(s/(o w)), about 4"
    save(figure, name, formula, (handles, labels))


def checkpoints(name):
    """Memory over time of N blocks' forward and backward. A plan cuts blocks [first, end) into checkpoints, which hold
    only their input, and single blocks that hold their residuals."""
    b, R, N = 1, 4, 4
    plans = {"no checkpoints": lambda first, end: [(i, None) for i in range(first, end)],
             "flat, a block each": lambda first, end: [(i, i + 1 if end - first > 1 else None)
                                                       for i in range(first, end)],
             "halves": lambda first, end: [(first, None)] if end - first == 1 else
                       [(first, (first + end) // 2), *plans["halves"]((first + end) // 2, end)],
             "linear nesting": lambda first, end: ([(first, end - 1)] if end - first > 1 else []) + [(end - 1, None)]}

    def memory_of(plan):
        points, inputs, residuals = [(0.0, 0)], collections.Counter(), 0

        def note(time):
            points.append((points[-1][0], b * sum(n > 0 for n in inputs.values()) + R * residuals))
            points.append((points[-1][0] + time, points[-1][1]))

        def run(first, end):  # forward of these blocks, then their backward
            nonlocal residuals
            pieces = plan(first, end)
            for begin, past in pieces:
                inputs[begin] += 1
                if past is None: residuals += 1
                note(1 if past is None else past - begin)
            for begin, past in reversed(pieces):
                if past is None:
                    note(2)
                    residuals -= 1
                else: run(begin, past)
                inputs[begin] -= 1

        run(0, N)
        return points

    figure, axes = plt.subplots(2, 2, figsize=(10, 5.6), sharex=True, sharey=True, layout="constrained")
    for (title, plan), axis, colour in zip(plans.items(), axes.flat, (GREY, BLUE, GREEN, RED)):
        x, y = zip(*memory_of(plan))
        axis.fill_between(x, y, color=colour, lw=0)
        axis.set_title(f"{title}: peak {max(y):g}, time {x[-1]:g}", loc="left", pad=4)
    for axis in axes[1]: axis.set_xlabel("time: a block's forward 1, backward 2")
    for axis in axes[:, 0]: axis.set_ylabel("held, in inputs b")
    axes[0][0].set(xlim=(0, 18), ylim=(0, None))
    save(figure, name, "counted, not measured: N = 4 blocks; residuals R = 4 b per block")


def buffers(name):
    """FSDP's two buffers over time, 3 blocks between embedding and head; a gather takes 0.6 of a unit's forward."""
    units = ["emb", "b0", "b1", "b2", "head"]
    figure, axis = panels(1, 5.2)
    shades = ["#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5"]
    last = len(units) - 1
    def bar(y, begin, end, i, text):
        axis.barh(y, end - begin, 0.8, begin, color=shades[i], ec="white", lw=1)
        short = {"emb": "e", "head": "h"}.get(text, text[-1])  # all labels have one size
        axis.text((begin + end) / 2, y, text if end - begin > 0.9 else short, ha="center", va="center",
                  color="white" if i > 2 else "black")
    gathers = [(0, 0)]  # (begin, unit), in order
    bar(1, 0, 0.6, 0, "emb")
    t = 0.6
    for i in range(last + 1):  # forward
        if i < last:
            gathers.append((t, i + 1))
            bar(1, t, t + 0.6, i + 1, units[i + 1])
        bar(0, t, t + 1, i, units[i])
        t += 1
    middle = t
    for i in range(last, -1, -1):  # backward: head's and the last block's weights still lie there
        if 1 < i < last:
            gathers.append((t, i - 1))
            bar(1, t, t + 0.6, i - 1, units[i - 1])
        if i < last: bar(2, t, t + 0.8, i + 1, units[i + 1])
        took = 2 if i else 0.8
        bar(0, t, t + took, i, units[i])
        t += took
    bar(2, t, t + 0.8, 0, "emb")
    for number in (0, 1):  # a gather's weights lie there until the next gather into this buffer
        fills = [g for g in gathers if g[1] % 2 == number]
        for (begin, i), (end, _) in zip(fills, fills[1:] + [(t + 0.8, -1)]): bar(3 + number, begin, end, i, units[i])
    axis.axvline(middle, color="black", lw=1)
    axis.text(middle - 0.1, -0.62, "forward", ha="right", va="center")
    axis.text(middle + 0.1, -0.62, "backward", ha="left", va="center")
    axis.set_yticks(range(5), ["computes", "all-gather", "reduce-scatter", "in buffer 0", "in buffer 1"])
    axis.set(ylim=(4.5, -0.9), xlim=(0, t + 0.85), xlabel="time: a unit's forward is 1, backward 2")
    axis.set_xticks([])
    axis.grid(visible=False)
    save(figure, name, "drawn by rule, not measured: gather 0.6, reduce-scatter 0.8 of a unit's forward")


def grid(name):
    figure, axis = panels(1, 4.6)
    rows, columns = 4, 2
    for r in range(rows):
        for c in range(columns):
            axis.add_patch(plt.Rectangle((c * 3.2, r), 2.2, 0.7, fc=("#9ecae1", "#f6c28b")[c], ec="#555555"))
            axis.text(c * 3.2 + 1.1, r + 0.35, f"rows {r + 1}/4 of x\ncolumns {c + 1}/2 of W", ha="center", va="center",
                      fontsize=13)
        axis.annotate("", (3.18, r + 0.35), (2.22, r + 0.35), arrowprops={"arrowstyle": "<->", "color": RED, "lw": 2})
    for c in range(columns):
        for r in range(rows - 1):
            axis.annotate("", (c * 3.2 + 1.1, r + 1), (c * 3.2 + 1.1, r + 0.7),
                          arrowprops={"arrowstyle": "<->", "color": BLUE, "lw": 2})
    axis.text(5.7, 0.7, "TP, along a row (red):\nall-reduce of a row's part of y,\n$2BD/N_F$ bytes, in each layer",
              color=RED, va="center")
    axis.text(5.7, 2.5, "FSDP, along a column (blue):\nall-gather of a column's part of\nthe weights, $6DF/N_T$ bytes",
              color=BLUE, va="center")
    axis.set(xlim=(-0.2, 11.4), ylim=(4, -0.3))
    axis.set_title("A grid of 8 devices, a box each: FSDP over $N_F$ = 4 rows, TP over $N_T$ = 2 columns.\n"
                   "A box names what the device multiplies, an arrow what travels")
    axis.axis("off")
    save(figure, name)


def roofline(name):
    """Measured: FLOPs and bytes by the formulas below, times from notes/output; the roofs are an H200's data sheet."""
    def of_setting(*columns):
        return next(r for r in rows_of("nsys_profile", "size", "S", *columns) if (r["size"], r["S"]) == ("2.7B", "512"))
    shares = of_setting("AdamW ms", "softmax ms", "products ms", "matmul")
    forward = number(of_setting("trace ms")["trace ms"])
    B, T, C, F, L, H, V = 4, 512, 2560, 10240, 32, 32, 10000
    scores = B * H * T * T * L
    weights = L * (4 * C * C + 3 * C * F) + 2 * V * C
    board = rows_of("flash_leaderboard", "implementation", "TFLOP/s")
    flash_rate, = (number(r["TFLOP/s"]) for r in board if r["implementation"] == "hopper")
    linear_ms = number(shares["matmul"]) / 100 * forward - number(shares["products ms"])
    # name, FLOPs per byte, TFLOP/s
    points = [("AdamW, eager: 13 FLOPs, 120 bytes per weight", 13 / 120,
               13 * weights / number(shares["AdamW ms"]) / 1e9),
              ("softmax, eager: 5 FLOPs, 32 bytes per score", 5 / 32, 5 * scores / number(shares["softmax ms"]) / 1e9),
              ("attention's products, fp32", 320 / (8 + 4 * 4 * 80 / T),
               320 * scores / number(shares["products ms"]) / 1e9),
              ("Linear layers, fp32", 2 * B * T * C * F / (4 * (B * T * C + C * F + B * T * F)),
               2 * B * T * (weights - V * C) / linear_ms / 1e9),
              ("flash, bf16, S 16384", 7 * 16384 * 16384 * 64 / (12 * 16384 * 64 * 2), flash_rate)]
    figure, axis = panels(1, 6)
    x = [2.0 ** (i / 8) for i in range(-32, 112)]
    for peak, colour, text in ((989, BLUE, "989 TFLOP/s: bf16, tensor cores"),
                               (67, ORANGE, "67 TFLOP/s: fp32, CUDA cores")):
        axis.plot(x, [min(peak, 4.8 * i) for i in x], color=colour)
        axis.text(1.4e4, peak * 1.12, text, color=colour, ha="right")
    axis.text(0.3, 1.5, "4.8 TB/s", color=BLUE, rotation=38, rotation_mode="anchor")
    for i, (text, intensity, rate) in enumerate(points):
        axis.plot(intensity, rate, "o", color=RED, ms=9)
        left = intensity > 1000
        axis.text(intensity * (0.8 if left else 1.25), rate * (0.62, 1, 0.6, 0.85, 0.62)[i], text,
                  ha="right" if left else "left", va="center", fontsize=13)
    axis.set(xscale="log", yscale="log", xlabel="FLOPs per byte of memory read or written", ylabel="TFLOP/s",
             xlim=(0.06, 1.6e4), ylim=(0.15, 2500))
    axis.set_title("What bounds each part, 2.7B at 512 tokens")
    axis.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    axis.minorticks_off()
    save(figure, name, machine("nsys_profile").split(";")[0])  # other outputs may be of other commits


# ----------------------------------------------------------------------------------------------------------------------
# Timelines, from --trace files. A cut is {"caption", "panels": [{"title", "bars": [[lane, part, begin, us], ...]}, ..]}

PHASES = {"forward": BLUE, "backward": ORANGE, "optimizer": YELLOW, "all-reduce": RED, "all-gather": VIOLET,
          "reduce-scatter": GREEN, "broadcast": RED, "other": GREY}
PARTS = {"matmul": BLUE, "softmax": RED, "attention": "#9c755f", "mask": VIOLET, "rope": ORANGE, "swiglu": GREEN,
         "rmsnorm": "#76b7b2", "other": GREY}
COLLECTIVE = re.compile(r"all.?reduce|reduce.?scatter|all.?gather|broadcast", re.I)


def part_of(path, kinds):
    """The innermost word of a path that has a colour."""
    return next((word for word in reversed(path.split("/")) if word in kinds), "other")


def collective_of(event):
    """Which collective it is: by its own name, else (NCCL copies with copy engines) a gather."""
    match = COLLECTIVE.search(event["name"])
    if not match: return "all-gather"
    return re.sub(r"[^a-z]", "", match[0].lower()).replace("all", "all-").replace("reduces", "reduce-s")


def blocks_in(bars, phase):
    """Where a phase's blocks begin and end. A block has two norms; forward begins with one, backward ends with one."""
    runs, last = [], None  # of the kernels of one norm
    for e in bars:
        path = e["args"]["path"]
        if f"{phase}/layer/" not in path + "/": continue
        if path.endswith("layer/rmsnorm"):
            if last != path: runs.append([e["ts"], e["ts"] + e["dur"]])
            runs[-1][1] = e["ts"] + e["dur"]
        last = path
    if phase == "forward":
        starts = [begin for begin, _ in runs[::2]]
        return list(zip(starts, starts[1:]))
    ends = [end for _, end in runs[1::2]]
    return list(zip(ends, ends[1:]))[::-1]  # block 0 is backward's last


def cut(paths, names, block, blocks, kernels, out):
    panels, captions = [], []
    for path in paths:
        with open(path, encoding="utf-8") as f: trace = json.load(f)
        captions.append(re.sub(r" --trace [^\s;]+", "", trace.get("otherData", {}).get("caption", "")))
        events = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 0]
        for e in events:  # backward's ranges name the range of forward, too, that made the operation
            e["args"]["path"] = re.sub(r"/backward/(.*/)?forward/", "/backward/", e["args"].get("path", ""))
        for name in names:
            name, _, which = name.partition(".")
            windows = [e for e in events if e["cat"] == "range" and e["args"]["path"] == name]
            if len(windows) <= int(which or 0): raise Missing(f"no range {name}.{which or 0} in {path}")
            number = int(which) if which else len(windows) - 1  # the first ones warm up
            whole = windows[number]
            begin, end = whole["ts"], whole["ts"] + whole["dur"]
            next_begin = next((e["ts"] for e in windows[number + 1:]), math.inf)
            gpu = sorted((e for e in events if e["cat"] != "range" and begin <= e["ts"] < next_begin and
                          e["args"]["path"].startswith(name + "/")), key=lambda e: e["ts"])
            if gpu:  # streams with NCCL's kernels communicate, and so do those that only copy: copy engines' gathers
                sends = {e["tid"] for e in gpu if "nccl" in e["name"].lower() or COLLECTIVE.search(e["name"])}
                sends |= {e["tid"] for e in gpu} - {e["tid"] for e in gpu if e["cat"] == "kernel"}
                compute, sent = ([e for e in gpu if (e["tid"] in sends) == lane] for lane in (False, True))
                starts = min(e["ts"] for e in compute)  # an all-reduce before that is the barrier before the step
                sent = [e for e in sent if collective_of(e) != "all-reduce" or e["ts"] + e["dur"] > starts]
            else:  # a CPU: the phases (or a block's parts) of the thread that computes, and the calls of Gloo's
                inside = sorted((e for e in events if begin <= e["ts"] < end), key=lambda e: e["ts"])
                bars_are = r"/(forward|backward|optimizer)$" if block is None else r"/layer/\w+$"
                compute = [e for e in inside if e["tid"] == whole["tid"] and re.search(bars_are, e["args"]["path"])]
                sent = [e for e in inside if e["tid"] != whole["tid"] and COLLECTIVE.search(e["name"])]
            cuts = [(name, begin, math.inf)]
            if block is not None:
                cuts = []
                for phase in ("forward", "backward"):
                    spans = blocks_in(compute, phase)[block:block + blocks]
                    if not spans: raise Missing(f"{path}: no block {block} in {name}'s {phase}")
                    which = f"block {block}" if blocks == 1 else f"blocks {block} to {block + blocks - 1}"
                    cuts.append((f"{phase} of {which}", min(b for b, _ in spans), max(e for _, e in spans)))
            for title, start, stop in cuts:
                bars = []
                for lane, of_lane in (("compute", compute), ("communication", sent)):
                    for e in of_lane:
                        at, us = max(e["ts"], start), min(e["ts"] + e["dur"], stop) - max(e["ts"], start)
                        if us <= 0: continue
                        of_compute = part_of(e["args"]["path"], PARTS if kernels else PHASES)
                        part = of_compute if lane == "compute" else collective_of(e)
                        last = bars[-1] if bars else ["", "", 0, 0]
                        gap = at - start - last[2] - last[3]
                        if not kernels and last[:2] == [lane, part] and lane == "compute" and gap < 50:
                            last[3] = round(at - start + us - last[2], 1)  # joined
                        else: bars.append([lane, part, round(at - start, 1), round(us, 1)])
                panels.append({"title": title, "bars": bars})
    with open(out, "w", encoding="utf-8") as f:
        f.write(json.dumps({"caption": "; ".join(dict.fromkeys(captions)), "panels": panels}, separators=(",", ":"))
                .replace('{"title"', '\n{"title"') + "\n")
    print(os.path.relpath(out))


def read_cut(name):
    path = name if os.path.exists(name) else os.path.join(NOTES, "output", name + ".json")
    if not os.path.exists(path): raise Missing(f"no notes/output/{name}.json")
    with open(path, encoding="utf-8") as f: return json.load(f)


def timeline(names, out, titles=None, in_us=False):
    """A panel per window of the cuts: compute above, communication below, a bar per call, as long as the call was."""
    cuts = [read_cut(name) for name in names]
    panels = [p for c in cuts for p in c["panels"]]
    kinds = PARTS if all(bar[1] in PARTS for p in panels for bar in p["bars"]) else PHASES
    scale = 1 if in_us else 1e-3
    sent = {bar[1] for p in panels for bar in p["bars"] if bar[0] != "compute"}
    sent = [kind for kind in PHASES if kind in sent]  # a lane each: they may overlap
    figure, axes = plt.subplots(len(panels), 1, figsize=(10, 0.9 + (1.0 + 0.45 * len(sent)) * len(panels)), sharex=True,
                                squeeze=False, layout="constrained")
    shown, share = {}, collections.Counter()  # of a panel's length, per part
    for i, (panel, axis) in enumerate(zip(panels, axes[:, 0])):
        bars = collections.defaultdict(list)  # all of a kind are one path, or the picture would be three times as large
        for lane, part, begin, us in panel["bars"]:
            y, left, right = 0 if lane == "compute" else -1 - sent.index(part), begin * scale, (begin + us) * scale
            bars[y, part].append([(left, y - 0.42), (right, y - 0.42), (right, y + 0.42), (left, y + 0.42)])
        for (y, part), corners in bars.items():
            path = matplotlib.path.Path.make_compound_path(*(matplotlib.path.Path(c, closed=False) for c in corners))
            shown.setdefault(part, axis.add_patch(matplotlib.patches.PathPatch(
                path, fc=kinds.get(part, GREY), lw=0.4, ec="white" if len(corners) < 60 else "none")))
        axis.autoscale_view()
        last = max(bar[2] + bar[3] for bar in panel["bars"])
        busy = sum(bar[3] for bar in panel["bars"] if bar[0] == "compute")
        for _, part, _, us in panel["bars"]: share[part] += us / last
        length = f"{last:.0f} us" if in_us else f"{last * scale:.1f} ms"
        title = (titles[i] if titles else panel["title"]) + ": " + length
        if kinds is PARTS: title += f", {len(panel['bars'])} kernels and copies, busy {100 * busy / last:.0f} %"
        axis.set_title(title, loc="left", pad=4)
        axis.set_yticks(range(0, -1 - len(sent), -1), ["computes", *sent]) if sent else axis.set_yticks([])
        axis.set_ylim(-0.5 - len(sent), 0.5)
        axis.grid(axis="y", visible=False)
    axes[-1][0].set_xlabel("us" if in_us else "ms")
    order = [part for part in kinds if share[part] > 1e-3]  # a shorter one is not seen
    words = [c.strip() for c in cuts[0]["caption"].replace(", driver", ";").split(";")]
    options = re.findall(r"--(size|context_length|precision) (\S+)", words[0])
    setting = ", ".join(f"S {value}" if option == "context_length" else value for option, value in options)
    if not setting: setting = ", ".join(re.findall(r"(?:size|precision) (\w+)", cuts[0]["caption"])[:2])
    machine = "; ".join([setting, *(w for w in words if re.match(r"NVIDIA|AMD|Intel|commit|\d ranks", w))])
    save(figure, out, machine, ([shown[p] for p in order], order))


def blocks(name):
    timeline(["trace-block", "trace-block-flash"], name,
             [f"{mode}, {phase}" for mode in ("eager", "flash") for phase in ("forward", "backward")], in_us=True)


def ddp_traces(name):
    timeline(["trace-ddp"], name)


def bucket_traces(name):
    timeline(["trace-buckets"], name, ["buckets of 1 MB", "100 MB", "1000 MB"])


def fsdp_traces(name):
    timeline(["trace-fsdp"], name)


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
    """A predicted snapshot has the order of allocations, but no times: nothing is computed. So a snapshot's times are
    not read, and only the phases' widths are times, nsys_profile's, at the size `same_as`; without them x has no unit."""
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
        many = max(1, len(x) // 250)
        some = [range(i, min(i + many, len(x))) for i in range(0, len(x), many)]
        keep = sorted({f(part, key=sums.__getitem__) for part in some for f in (min, max)} | {0, len(x) - 1})
        for n in range(len(seen), 0, -1):  # the highest first, each down to the axis
            top = [(x[i], sum(points[i].get(c, 0) for c in seen[:n])) for i in keep]
            edge = [p for before, p, after in zip(top, top[1:], top[2:]) if not before[1] == p[1] == after[1]]
            edge = [(0, 0), top[0], *edge, top[-1], (start, 0)]
            shown[seen[n - 1]], = axis.fill(*zip(*edge), color=CATEGORIES[seen[n - 1]], lw=0)
        axis.set_title(f"{kind}, S {length}: peak {peak:.1f} {unit}", pad=26)
        axis.locator_params(axis="y", nbins=6)
        axis.set(xlim=(0, start), ylim=(0, peak * 1.05), ylabel=unit,
                 xlabel="ms; within a phase by allocation" if measured else "in order, not timed")
        if not measured: axis.set_xticks([])
    order = [c for c in CATEGORIES if c in shown]
    save(figure, name, f"{size}, {precision}", ([shown[c] for c in order], order))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="for --out; without it the folder of snapshots")
    parser.add_argument("--out", metavar="FILE", help="the picture (.svg or .png), or the cut (.json)")
    parser.add_argument("--cut", metavar="RANGE,...", help="ranges to cut from the traces FILE ...")
    parser.add_argument("--block", type=int, metavar="N", help="only this block and the next, forward and backward")
    parser.add_argument("--blocks", type=int, default=2, metavar="N", help="so many blocks from --block on")
    parser.add_argument("--kernels", action="store_true", help="a bar per kernel, named after its part of the block")
    o = parser.parse_args()
    try:
        if o.cut: return cut(o.files, o.cut.split(","), o.block, o.blocks, o.kernels, o.out)
        if o.out and o.files[0].endswith(".json"): return timeline(o.files, o.out)
    except Missing as why: sys.exit(f"plot.py: {why}")
    if o.out: return memory(o.files, o.out)

    def timeline_of(size, lengths):
        names = [f"snapshot_{kind}_{size}_{s}_fp32.pickle" for s in lengths for kind in ("forward", "step")]
        paths = [os.path.join(*(o.files or ["build/pictures"]), name) for name in names]
        for path in paths:
            if not os.path.exists(path): raise Missing(f"no {path}")
        return lambda name: memory(paths, name, "2.7B")  # 2026's xl has the same numbers

    for name, draw in {"1.1.4-softmax": softmax, "1.1.4-block": blocks, "1.1.5-alignment": alignment,
                       "1.1.5-formats": formats,
                       "1.1.6-timeline": lambda name: timeline_of("2.7B", [512])(name),
                       "2026-2.1.6-timeline": lambda name: timeline_of("xl", [128, 2048])(name),
                       "1.2.1-pytorch_attention": attention, "1.3-torch_compile": torch_compile,
                       "1.3.2-flash_benchmarking": flash,
                       "2.1-ring": ring, "2.3.2-traces": ddp_traces, "2.3.3-buckets": bucket_model,
                       "2.3.3-traces": bucket_traces,
                       "2026-3.2.1-checkpoints": checkpoints, "2026-7-buffers": buffers,
                       "2026-7-traces": fsdp_traces, "2026-8.5-grid": grid, "gpu-roofline": roofline,
                       "2026-7-fsdp_accounting": gathers}.items():
        try: draw(os.path.join(NOTES, name + ".svg"))
        except Missing as why: print(f"{name}.svg: left as it is, {why}", file=sys.stderr)


main()
