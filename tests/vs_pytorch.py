#!/usr/bin/env python3
"""tests/vs_pytorch.py: our model and our attention beside PyTorch's, in turn on one GPU, as a table of ratios.

  python3 tests/vs_pytorch.py                       the five sizes in bf16 and fp32
  python3 tests/vs_pytorch.py --attention           attention's shapes, too (with --no_model only those)
  python3 tests/vs_pytorch.py --max_ratio 1         exit code 1 if any of our times is longer than PyTorch's
  python3 tests/vs_pytorch.py --device cpu --quick  tries this script where there is no GPU

The peer is what somebody who knows PyTorch well would run: each block under torch.compile, attention by SDPA, AdamW with
fused=True. bf16 is autocast's, with weights and AdamW's moments in fp32, as ours is; fp32 is true fp32, without TF32. The model
is the handout's, with a matrix each for q, k, v, w1 and w3. It uses no CUDA graphs and no max-autotune.

Model: 5 warm-up and 10 timed steps of each phase, a synchronisation after every step, their mean. Memory: the most that
tensors took during whole steps. Attention: batch 1, 16 heads, runs queued one behind the other, each between two events, the
L2 cache as the run before left it, their median. Both sides alike and in turn; of --rounds rounds the median. Ratios are
ours / PyTorch's: below 1, ours is faster, or needs less."""
import argparse, gc, json, math, statistics, subprocess, sys, time

SIZES = {"small": (768, 3072, 12, 12), "medium": (1024, 4096, 24, 16), "large": (1280, 5120, 36, 20),
         "xl": (1600, 6400, 48, 25), "2.7B": (2560, 10240, 32, 32)}  # d_model, d_ff, num_layers, num_heads
VOCAB = 10000
SHAPES = [(1024, 64, True), (4096, 64, True), (16384, 64, True), (65536, 64, True), (16384, 128, True), (16384, 128, False),
          (4096, 80, True)]  # S, D, causal

# ----------------------------------------------------------------------------------------------------------------------
# Options. They are read before torch is imported, which takes seconds, or may not be there.

def stop(message, code=2):
    print(f"vs_pytorch: {message}", file=sys.stderr)
    sys.exit(code)

class Parser(argparse.ArgumentParser):
    def error(self, message): stop(message)

def takes(what, read):
    """A reader for argparse: what `read` makes of the text, unless it fails or makes nothing of it."""
    def reader(text):
        try: value = read(text)
        except ValueError: value = None
        if not value: raise argparse.ArgumentTypeError(f"got '{text}', takes {what}")
        return value
    return reader

def several(names):
    return takes("one or more of " + ",".join(names), lambda text: set(text.split(",")) <= set(names) and text.split(","))

whole = takes("a whole number from 1", lambda text: text.isdigit() and int(text))
positive = takes("a finite number greater than 0", lambda text: 0 < float(text) < math.inf and float(text))

p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
p.add_argument("--size", type=several(SIZES), default=list(SIZES), metavar="S", help="of " + ",".join(SIZES))
p.add_argument("--precision", type=several(["bf16", "fp32"]), default=["bf16", "fp32"], metavar="P", help="of bf16,fp32")
p.add_argument("--context_length", type=whole, default=256, metavar="N", help="default 256")
p.add_argument("--batch_size", type=whole, default=4, metavar="N", help="default 4")
p.add_argument("--rounds", type=whole, default=2, metavar="N", help="default 2")
p.add_argument("--max_ratio", type=positive, metavar="R", help="exit 1 if any ratio of times is larger")
p.add_argument("--attention", action="store_true", help="attention against two of SDPA's backends, too")
p.add_argument("--no_model", action="store_true", help="without the model's table")
p.add_argument("--program", default="./cs336", metavar="FILE", help="ours, default ./cs336")
p.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default cuda")
p.add_argument("--quick", action="store_true", help="size small, context 32, batch 1, 2 steps, one round, short sequences")
p.set_defaults(warmup=5, steps=10, heads=16, shapes=SHAPES)
if "--quick" in sys.argv:
    p.set_defaults(size=["small"], context_length=32, batch_size=1, rounds=1, warmup=1, steps=2, heads=2,
                   shapes=[(256, 64, True), (256, 128, False)])
o = p.parse_args()
if o.no_model and not o.attention: stop("--no_model: takes --attention with it, or nothing is left to do")
try: commit = subprocess.run([o.program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
except (OSError, subprocess.CalledProcessError) as e: stop(f"--program: got '{o.program}', takes what `make` builds: {e}")
try:
    import torch, torch.nn as nn, torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as e: stop(f"needs PyTorch, 2.4 or later (pip install torch): {e}")
CUDA = o.device == "cuda"
if CUDA and not torch.cuda.is_available(): stop("--device: got 'cuda', but torch sees no GPU")
torch.set_float32_matmul_precision("highest")  # no TF32
torch._dynamo.config.cache_size_limit = 64  # beyond its limit dynamo goes on uncompiled

# ----------------------------------------------------------------------------------------------------------------------
# The handout's Transformer LM. B batch, T positions, C d_model, H heads

def rope_table(T, D):
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
    return angle.cos(), angle.sin()

def rope(x, cos, sin):  # turns each pair of neighbours by its angle
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.stack((cos * x1 - sin * x2, sin * x1 + cos * x2), -1).flatten(-2).to(x.dtype)

class Block(nn.Module):
    def __init__(self, C, d_ff, H):
        super().__init__()
        self.H, self.ln1, self.ln2 = H, nn.RMSNorm(C, eps=1e-5), nn.RMSNorm(C, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(C, C, bias=False) for _ in range(4))
        self.w1, self.w3, self.w2 = (nn.Linear(*shape, bias=False) for shape in ((C, d_ff), (C, d_ff), (d_ff, C)))

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        n = self.ln1(x)
        q, k, v = (w(n).view(B, T, self.H, C // self.H).transpose(1, 2) for w in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(B, T, C))
        n = self.ln2(x)
        return x + self.w2(F.silu(self.w1(n)) * self.w3(n))

class LM(nn.Module):
    def __init__(self, T, C, d_ff, num_layers, H):
        super().__init__()
        self.embedding, self.rope = nn.Embedding(VOCAB, C), rope_table(T, C // H)
        self.blocks = nn.ModuleList(Block(C, d_ff, H) for _ in range(num_layers))
        self.ln_final, self.lm_head = nn.RMSNorm(C, eps=1e-5), nn.Linear(C, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks: x = block(x, *self.rope)
        return self.lm_head(self.ln_final(x))

# ----------------------------------------------------------------------------------------------------------------------
# Measuring: forward, forward+backward and step in ms, peak in MiB; of attention forward, backward and both in ms

def synchronize():
    if CUDA: torch.cuda.synchronize()

def mean_ms(f):
    times = []
    for _ in range(o.warmup + o.steps):
        synchronize()
        start = time.perf_counter()
        f()
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.mean(times[o.warmup:])

def model_pytorch(size, precision):
    with torch.device(o.device):
        model = LM(o.context_length, *SIZES[size])
        tokens, targets = torch.randint(VOCAB, (2, o.batch_size, o.context_length))
    for block in model.blocks: block.compile()  # what is compiled for the first serves all, and the next round's
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    autocast = torch.autocast(o.device, torch.bfloat16, enabled=precision == "bf16")

    def fw():
        with torch.no_grad(), autocast: model(tokens)

    def fwbw():
        optimizer.zero_grad(set_to_none=True)
        with autocast: loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()

    def step():
        fwbw()
        optimizer.step()

    times = [mean_ms(fw), mean_ms(fwbw)]
    if CUDA: torch.cuda.reset_peak_memory_stats()
    return times + [mean_ms(step), torch.cuda.max_memory_allocated() / 2**20 if CUDA else math.nan]

def ours(command, columns, *options):
    """These columns of the only row that a command of ours prints; NaN for what did not fit into memory."""
    words = [o.program, command, *map(str, options), "--device", o.device, "--format", "json"]
    run = subprocess.run(words, capture_output=True, text=True)
    if run.returncode: stop(f"{' '.join(words)}: {run.stderr.strip()}", 1)
    table = json.loads(run.stdout)
    cells = [table["rows"][0][table["columns"].index(column)] for column in columns]
    return [cell if isinstance(cell, (int, float)) else math.nan for cell in cells]

def model_ours(size, precision):
    return ours("benchmarking_script", ["fw_mean_ms", "fwbw_mean_ms", "step_mean_ms", "peak step MiB"], "--size", size,
                "--precision", precision, "--context_length", o.context_length, "--batch_size", o.batch_size,
                "--warmup", o.warmup, "--steps", o.steps)

def moment():
    if not CUDA: return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

def ms_between(start, end): return start.elapsed_time(end) if CUDA else (end - start) * 1e3

def median_ms(prepare, f):
    """As our flash_leaderboard --quick does it: 0.1 s of warm-up, 0.5 s of runs, at least 3."""
    def queued(warmup, n):
        moments = []
        for _ in range(warmup + n):
            x = prepare()
            moments.append((moment(), f(x), moment())[::2])
        synchronize()
        return statistics.median(ms_between(*pair) for pair in moments[warmup:])

    once = queued(1, 1)
    return queued(min(max(int(100 / once), 1), 5000), min(max(int(500 / once), 3), 5000))

def attention_pytorch(S, D, causal, backend):
    q, k, v, dO = torch.randn(4, 1, o.heads, S, D, dtype=torch.bfloat16 if CUDA else torch.float32, device=o.device)
    qkv = [x.requires_grad_() for x in (q, k, v)]
    forward = lambda _: F.scaled_dot_product_attention(*qkv, is_causal=causal)
    backward = lambda out: torch.autograd.grad(out, qkv, dO)
    with sdpa_kernel(backend):
        return [median_ms(lambda: None, forward), median_ms(lambda: forward(None), backward),
                median_ms(lambda: None, lambda _: backward(forward(None)))]

def attention_ours(S, D, causal):
    return ours("flash_leaderboard", ["forward ms", "backward ms", "forward+backward ms"], "--quick", "--impl", "auto",
                "--precision", "bf16" if CUDA else "fp32", "--num_heads", o.heads, "--head_size", D, "--context_length", S,
                *([] if causal else ["--not_causal"]))

def in_turn(what, sides):
    """From name -> function to name -> the medians, over all rounds, of each of the numbers that it returns."""
    rounds = {name: [] for name in sides}
    for _ in range(o.rounds):
        for name, f in sides.items():
            try: rounds[name].append(f())
            except RuntimeError as e:  # no memory, or this backend does not take this shape
                rounds[name].append([math.nan] * 4)
                print(f"{what}, {name}: {str(e).splitlines()[0]}", file=sys.stderr)
            gc.collect()  # the next one finds the GPU's memory free
            if CUDA: torch.cuda.empty_cache()
            print(f"{what}, {name}:", *(f"{x:.3f}" for x in rounds[name][-1]), file=sys.stderr)
    return {name: [statistics.median(column) for column in zip(*values)] for name, values in rounds.items()}

# ----------------------------------------------------------------------------------------------------------------------
# Tables

above = []  # ratios of times that are above --max_ratio

def ratio(what, x, peer):
    r = math.inf if math.isnan(x) and not math.isnan(peer) else x / peer
    if o.max_ratio and r > o.max_ratio: above.append(f"{what} {r:.2f}")
    return r

def show(caption, columns, rows):
    def cell(column, x):
        digits = 2 if "ratio" in column else 0 if "MiB" in column else 3
        return f"{x:.{digits}f}" if isinstance(x, float) else str(x)

    table = [columns] + [[cell(*pair) for pair in zip(columns, row)] for row in rows]
    width = [max(map(len, column)) for column in zip(*table)]
    table.insert(1, ["-" * (w - 1) + ":" for w in width])
    device = torch.cuda.get_device_name() if CUDA else "CPU"
    print(f"{caption}; median of {o.rounds} rounds; {device}, PyTorch {torch.__version__}; commit {commit}\n")
    for row in table: print("| " + " | ".join(f"{x:>{w}}" for x, w in zip(row, width)) + " |")
    print(flush=True)

def model_table():
    rows = []
    for size in o.size:
        for precision in o.precision:
            torch._dynamo.reset()
            t = in_turn(f"{size} {precision}", {"ours": lambda: model_ours(size, precision),
                                                "PyTorch": lambda: model_pytorch(size, precision)})
            row = [size, precision]
            for i, phase in enumerate(["fw", "fw+bw", "step"]):
                row += [t["ours"][i], t["PyTorch"][i], ratio(f"{size} {precision} {phase}", t["ours"][i], t["PyTorch"][i])]
            rows.append(row + [t["ours"][3], t["PyTorch"][3], t["ours"][3] / t["PyTorch"][3]])
    columns = [f"{phase} {column}" for phase in ("fw", "fw+bw", "step") for column in ("ours ms", "PyTorch ms", "ratio")]
    show(f"model: batch {o.batch_size}, context length {o.context_length}, mean of {o.steps} steps after {o.warmup}",
         ["size", "precision", *columns, "peak ours MiB", "peak PyTorch MiB", "peak ratio"], rows)

def attention_table():
    peers = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
    if not CUDA: peers = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA math": SDPBackend.MATH}
    rows = []
    for shape in o.shapes:
        what = "attention S {} D {} causal {}".format(*shape)
        sides = {"ours": lambda: attention_ours(*shape)}
        for name, backend in peers.items(): sides[name] = lambda backend=backend: attention_pytorch(*shape, backend)
        t = in_turn(what, sides)
        for i, which in enumerate(["forward", "backward", "both"]):
            row = [*shape, which, t["ours"][i]]
            for name in peers: row += [t[name][i], ratio(f"{what} {which}, {name}", t["ours"][i], t[name][i])]
            rows.append(row)
    columns = [f"{name} {column}" for name in peers for column in ("ms", "ratio")]
    show(f"attention: batch 1, {o.heads} heads, {'bf16' if CUDA else 'fp32'}",
         ["S", "D", "causal", "pass", "ours ms", *columns], rows)

if not o.no_model: model_table()
if o.attention: attention_table()
if above: stop(f"above --max_ratio {o.max_ratio:g}: " + "; ".join(above), 1)
