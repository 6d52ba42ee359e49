#!/usr/bin/env python3
"""tests/vs_pytorch.py: our model and our attention beside PyTorch's, in turn on one GPU, as a table of ratios.

  python3 tests/vs_pytorch.py                       the five sizes in bf16 and fp32
  python3 tests/vs_pytorch.py --context_length 512,1024 --size large,xl,2.7B --precision bf16
  python3 tests/vs_pytorch.py --attention           attention's shapes, too (with --no_model only those)
  python3 tests/vs_pytorch.py --no_model --torch_compile     problem 1.3 by PyTorch itself: eager and compiled
  python3 tests/vs_pytorch.py --no_model --fsdp     2026, 7 and 9: steps on two GPUs beside FSDP2's
  python3 tests/vs_pytorch.py --max_ratio 1         exit code 1 if any of our times is longer than PyTorch's
  python3 tests/vs_pytorch.py --device cpu --quick  tries this script where there is no GPU

The peer is PyTorch at its best, as far as we know it: each block under torch.compile, attention by SDPA, AdamW with fused=True, and each
phase captured in one CUDA graph, so that no host slows it. The step without the graph is a column of its own. bf16 is
autocast's, with weights and AdamW's moments in fp32, as ours is, but its gradients are in fp32, while those of our
matrices are in 16 bits; fp32 is true fp32, without TF32. The model is the handout's, with a matrix each for q, k, v, w1
and w3, or with --joined one for q, k and v and one for w1 and w3, as ours. There is no max-autotune.

torch_compile: attention as in pytorch_attention, and the model with the handout's attention and RMSNorm, written as formulas;
compiled is torch.compile of the whole, as the handout asks. AdamW is PyTorch's default.

fsdp: the same model under FSDP2, each block compiled and a unit of its own, head and loss for 2048 tokens at a time,
attention by cuDNN where it is not fp32. What runs again in backward is torch.utils.checkpoint's.

Model: 5 warm-up and 10 timed steps of each phase, a synchronisation after every step, their mean. Memory: the most that
tensors took during whole steps. Attention: batch 1, 16 heads, runs queued one behind the other, each between two events, the
L2 cache as the run before left it, their median. Both sides alike and in turn; of --rounds rounds the median. Ratios are
ours / PyTorch's: below 1, ours is faster, or needs less. In --torch_compile they are eager / compiled. In --fsdp our 8B
step is a mean of 8 steps after 3."""
import argparse, contextlib, csv, gc, importlib.metadata, itertools, math, statistics, subprocess, sys, tempfile, time, typing

SIZES = {"small": (768, 3072, 12, 12), "medium": (1024, 4096, 24, 16), "large": (1280, 5120, 36, 20),
         "xl": (1600, 6400, 48, 25), "2.7B": (2560, 10240, 32, 32)}  # d_model, d_ff, num_layers, num_heads
VOCAB = 10000
SHAPES = [(1024, 64), (4096, 64), (16384, 64), (65536, 64), (4096, 128), (16384, 128), (4096, 80)]  # S, D

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

def number(text): return text.isdigit() and int(text)

def numbers(text):
    each = [number(t) for t in text.split(",")]
    return all(each) and each

whole, wholes = takes("a whole number from 1", number), takes("whole numbers from 1, separated by commas", numbers)
positive = takes("a finite number greater than 0", lambda text: 0 < float(text) < math.inf and float(text))

p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
p.add_argument("--size", type=several(SIZES), default=list(SIZES), metavar="S", help="of " + ",".join(SIZES))
p.add_argument("--precision", type=several(["bf16", "fp32"]), default=["bf16", "fp32"], metavar="P", help="of bf16,fp32")
p.add_argument("--context_length", type=wholes, default=[256], metavar="N", help="one or more, default 256")
p.add_argument("--batch_size", type=whole, default=4, metavar="N", help="default 4")
p.add_argument("--rounds", type=whole, default=2, metavar="N", help="default 2")
p.add_argument("--max_ratio", type=positive, metavar="R", help="exit 1 if any ratio of times is larger")
p.add_argument("--attention", action="store_true", help="attention against two of SDPA's backends and, if installed, FlashAttention-4, too")
p.add_argument("--no_model", action="store_true", help="without the model's table")
p.add_argument("--torch_compile", action="store_true", help="problem 1.3: attention and the model, eager and compiled")
p.add_argument("--joined", action="store_true", help="PyTorch's model has one matrix for q, k, v, and one for w1, w3")
p.add_argument("--fsdp", nargs="?", const=["xl", "8B"], type=several(["xl", "8B"]), metavar="S",
               help="2026's 7 and 9: steps on two GPUs against FSDP2's, too; of xl,8B")
p.add_argument("--passes", type=whole, default=100, metavar="N", help="of attention in --torch_compile, default 100")
p.add_argument("--program", default="./cs336", metavar="FILE", help="ours, default ./cs336")
p.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default cuda")
p.add_argument("--quick", action="store_true", help="size small, fp32, context 32, batch 1, 2 steps, one round, short sequences")
p.set_defaults(warmup=5, steps=10, heads=16, shapes=SHAPES, lengths=[256, 1024, 4096, 8192, 16384])
if "--quick" in sys.argv:
    p.set_defaults(size=["small"], precision=["fp32"], context_length=[32], batch_size=1, rounds=1, warmup=1, steps=2, heads=2,
                   shapes=[(256, 64), (256, 128)], lengths=[64], passes=3)
o = p.parse_args()
if o.no_model and not (o.attention or o.torch_compile or o.fsdp):
    stop("--no_model: takes --attention, --torch_compile or --fsdp with it, or nothing is left to do")
try: commit = subprocess.run([o.program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
except (OSError, subprocess.CalledProcessError) as e: stop(f"--program: got '{o.program}', takes what `make` builds: {e}")
try:
    import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.checkpoint import checkpoint
except ImportError as e: stop(f"needs PyTorch, 2.4 or later (pip install torch): {e}")
try: from flash_attn.cute import flash_attn_func  # another peer, where it is installed: pip install flash-attn-4
except ImportError: flash_attn_func = None
CUDA = o.device == "cuda"
joined = ", its products joined" if o.joined else ""
of_rounds = "one round" if o.rounds == 1 else f"median of {o.rounds} rounds"
if CUDA and not torch.cuda.is_available(): stop("--device: got 'cuda', but torch sees no GPU")
if o.fsdp:
    try: from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError as e: stop(f"--fsdp: needs PyTorch, 2.6 or later: {e}")
    if CUDA and torch.cuda.device_count() < 2: stop("--fsdp: needs two GPUs")
torch.set_float32_matmul_precision("highest")  # no TF32
torch._dynamo.config.cache_size_limit = 64  # beyond its limit dynamo goes on uncompiled

# ----------------------------------------------------------------------------------------------------------------------
# The handout's Transformer LM. B batch, T positions, C d_model, H heads, V vocabulary

def rope_table(T, D):
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
    return angle.cos(), angle.sin()

def rope(x, cos, sin):  # turns each pair of neighbours by its angle
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.stack((cos * x1 - sin * x2, sin * x1 + cos * x2), -1).flatten(-2).to(x.dtype)

def attention_formula(q, k, v, is_causal=True):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = torch.where(mask, scores, -math.inf)
    return torch.softmax(scores, -1) @ v

class RMSNormFormula(nn.Module):
    def __init__(self, C, eps):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(C))

    def forward(self, x):
        wide = x.to(torch.float32)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)

class Products(nn.Module):
    """n products of the same x: a matrix each, or with --joined one matrix for all."""
    def __init__(self, inputs, outputs, n):
        super().__init__()
        shapes = [(inputs, n * outputs)] if o.joined else n * [(inputs, outputs)]
        self.n, self.matrices = n, nn.ModuleList(nn.Linear(*shape, bias=False) for shape in shapes)

    def forward(self, x):
        if o.joined: return self.matrices[0](x).chunk(self.n, -1)
        return [matrix(x) for matrix in self.matrices]

class Block(nn.Module):
    def __init__(self, C, d_ff, H, formulas):
        super().__init__()
        RMSNorm = RMSNormFormula if formulas else nn.RMSNorm
        self.attention = attention_formula if formulas else F.scaled_dot_product_attention
        self.reruns_ffn = False  # whether backward runs the feed-forward again, instead of keeping its activations
        self.H, self.ln1, self.ln2 = H, RMSNorm(C, eps=1e-5), RMSNorm(C, eps=1e-5)
        self.qkv, self.o = Products(C, C, 3), nn.Linear(C, C, bias=False)
        self.w1_w3, self.w2 = Products(C, d_ff, 2), nn.Linear(d_ff, C, bias=False)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.H, C // self.H).transpose(1, 2) for y in self.qkv(self.ln1(x)))
        a = self.attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(B, T, C))
        if self.reruns_ffn: return x + checkpoint(self.feed_forward, x, use_reentrant=False)
        return x + self.feed_forward(x)

    def feed_forward(self, x):
        a, b = self.w1_w3(self.ln2(x))
        return self.w2(F.silu(a) * b)

class LM(nn.Module):
    def __init__(self, V, T, C, d_ff, num_layers, H, formulas=False):
        super().__init__()
        self.embedding, self.rope = nn.Embedding(V, C), rope_table(T, C // H)
        self.blocks = nn.ModuleList(Block(C, d_ff, H, formulas) for _ in range(num_layers))
        self.ln_final, self.lm_head = (RMSNormFormula if formulas else nn.RMSNorm)(C, eps=1e-5), nn.Linear(C, V, bias=False)

    def hidden(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks: x = block(x, *self.rope)
        return self.ln_final(x)

    def forward(self, tokens):
        return self.lm_head(self.hidden(tokens))

# ----------------------------------------------------------------------------------------------------------------------
# Measuring: forward, forward+backward and step in ms, peak in MiB; of attention forward, backward and both in ms

def synchronize():
    if CUDA: torch.cuda.synchronize()

def free_memory():
    gc.collect()
    if CUDA: torch.cuda.empty_cache()

def mean_ms(f, prepare=lambda: None, steps=None):
    times = []
    for _ in range(o.warmup + (steps or o.steps)):
        x = prepare()
        synchronize()
        start = time.perf_counter()
        f() if x is None else f(x)
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.mean(times[o.warmup:])

def captured(f):
    """f as the replay of one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # all that happens only once happens before the capture
        for _ in range(4): f()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): f()
    return graph.replay

def ready(model, precision, graph=False):
    """Its optimizer, its autocast, and the loss of a batch. Autocast's cached copies of weights would outlive a captured graph."""
    autocast = torch.autocast(o.device, torch.bfloat16, enabled=precision == "bf16", cache_enabled=not graph)

    def loss_of(tokens, targets):
        with autocast: return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=graph), autocast, loss_of

def phases(model, optimizer, autocast, loss_of, tokens, targets):
    def fw():
        with torch.no_grad(), autocast: model(tokens)

    def fwbw():
        optimizer.zero_grad(set_to_none=True)
        loss_of(tokens, targets).backward()

    def step():
        fwbw()
        optimizer.step()

    return fw, fwbw, step

def compile_blocks(model):
    for block in model.blocks: block.compile()  # what is compiled for the first serves all, and the next round's

def model_pytorch(size, precision, T, graph):
    graph = graph and CUDA
    with torch.device(o.device):
        model = LM(VOCAB, T, *SIZES[size])
        tokens, targets = torch.randint(VOCAB, (2, o.batch_size, T))
    compile_blocks(model)
    optimizer, autocast, loss_of = ready(model, precision, graph)
    results = []
    for phase in phases(model, optimizer, autocast, loss_of, tokens, targets):
        optimizer.zero_grad(set_to_none=True)
        free_memory()
        if CUDA: torch.cuda.reset_peak_memory_stats()
        results.append(mean_ms(captured(phase) if graph else phase))
    return results + [torch.cuda.max_memory_allocated() / 2**20 if CUDA else math.nan]

def tables_of_ours(command, *options):
    """Of each table its header and its rows."""
    words = [o.program, command, *map(str, options), "--device", o.device, "--format", "csv"]
    run = subprocess.run(words, capture_output=True, text=True)
    if run.returncode: stop(f"{' '.join(words)}: {run.stderr.strip()}", 1)
    blocks = [[line for line in block.splitlines() if not line.startswith("#")] for block in run.stdout.split("\n\n")]
    return [(rows[0], rows[1:]) for rows in map(list, map(csv.reader, blocks)) if rows]

def ours(command, columns, *options, row=0):
    """These columns of a row of the first table that has them; NaN for what did not fit into memory."""
    tables = tables_of_ours(command, *options)
    def cell(column):
        header, rows = next(table for table in tables if column in table[0])
        try: return float(rows[row][header.index(column)].partition(" ")[0])  # without a deviation
        except ValueError: return math.nan
    return [cell(column) for column in columns]

def model_ours(size, precision, T):
    return ours("benchmarking_script", ["fw_mean_ms", "fwbw_mean_ms", "step_mean_ms", "peak step MiB"], "--size", size,
                "--precision", precision, "--context_length", T, "--batch_size", o.batch_size, "--warmup", o.warmup, "--steps",
                o.steps, "--mode", "flash")

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

def attention_pytorch(S, D, backend):
    shape = (o.heads, S, D) if backend else (S, o.heads, D)  # None: FlashAttention-4
    q, k, v, dO = torch.randn(4, 1, *shape, dtype=torch.bfloat16 if CUDA else torch.float32, device=o.device)
    qkv = [x.requires_grad_() for x in (q, k, v)]
    if backend: forward = lambda _: F.scaled_dot_product_attention(*qkv, is_causal=True)
    else: forward = lambda _: flash_attn_func(*qkv, causal=True)[0]
    backward = lambda out: torch.autograd.grad(out, qkv, dO)
    if CUDA: time.sleep(1)  # as long as our process takes to start: a card that has just been busy is slower
    with sdpa_kernel(backend) if backend else contextlib.nullcontext():
        return [median_ms(lambda: None, forward), median_ms(lambda: forward(None), backward),
                median_ms(lambda: None, lambda _: backward(forward(None)))]

def attention_ours(S, D):
    return ours("flash_leaderboard", ["forward ms", "backward ms", "forward+backward ms"], "--quick", "--impl", "auto",
                "--precision", "bf16" if CUDA else "fp32", "--num_heads", o.heads, "--d_model", o.heads * D, "--context_length", S)

def in_turn(what, sides):
    """From name -> function to name -> the medians, over all rounds, of each of the numbers that it returns."""
    rounds = {name: [] for name in sides}
    for _ in range(o.rounds):
        for name, f in sides.items():
            try: rounds[name].append(f())
            except RuntimeError as e:  # no memory, or this backend does not take this shape
                rounds[name].append([math.nan] * 4)
                print(f"{what}, {name}: {str(e).splitlines()[0]}", file=sys.stderr)
            free_memory()  # for the next one
            print(f"{what}, {name}:", *(f"{x:.3f}" for x in rounds[name][-1]), file=sys.stderr)
    return {name: [statistics.median(column) for column in zip(*values)] for name, values in rounds.items()}

# ----------------------------------------------------------------------------------------------------------------------
# FSDP2 on two GPUs: a process for each, started with this file

class FsdpCase(typing.NamedTuple):
    name: str
    command: str      # ours, and of its tables:
    row: int
    columns: list     # of the step's ms and of the peak's MiB
    precisions: list
    reruns: list      # what FSDP2 runs again in backward, one after the other
    vocabulary: int
    shape: tuple      # as in SIZES
    T: int
    batch: int        # sequences per rank

ACCOUNTING = ("fsdp_accounting", 2, ["step (ms)", "peak"], o.precision)
FSDP_CASES = [FsdpCase("xl (2026)", *ACCOUNTING, ["nothing"], VOCAB, (2560, 10240, 32, 32), 512, 2),
              FsdpCase("8B", "leaderboard", 0, ["Total Time (ms)", "peak MiB"], ["pure_bf16"], ["blocks", "feed-forwards"],
                       151936, (4096, 11008, 34, 32), 32768, 1)]
if o.quick:
    FSDP_CASES = [FsdpCase("quick", *ACCOUNTING, ["nothing", "blocks", "feed-forwards"], VOCAB, (128, 512, 4, 4), 32, 1)]

@torch.compile
def loss_and_gradients(x, weight, targets, tokens):
    """The part of the mean loss of `tokens` tokens that these have, and its gradients."""
    logits = (x @ weight.T).float()
    loss = F.cross_entropy(logits, targets, reduction="sum") / tokens
    d_logits = ((logits.softmax(-1) - F.one_hot(targets, logits.shape[-1])) / tokens).to(x.dtype)
    return loss, d_logits @ weight, d_logits.T @ x

class HeadAndLoss(torch.autograd.Function):
    """The logits of 2048 tokens at a time: those of all would take 10 GB in bf16, 20 GB in fp32."""
    @staticmethod
    def forward(context, x, weight, targets):
        d_x, d_weight, loss = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32), 0
        for rows in torch.arange(len(x)).split(2048):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            part_loss, d_x[part], d_part = loss_and_gradients(x[part], weight, targets[part], len(x))
            loss, d_weight = loss + part_loss, d_weight.add_(d_part)
        context.save_for_backward(d_x, d_weight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(context, d_loss):
        d_x, d_weight = context.saved_tensors
        return d_x * d_loss, d_weight * d_loss, None

class LMLoss(LM):
    def forward(self, tokens, targets):
        return HeadAndLoss.apply(self.hidden(tokens).flatten(0, 1), self.lm_head.weight, targets.flatten())

class RunsAgain(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *inputs): return checkpoint(self.block, *inputs, use_reentrant=False)

def fsdp2_rank(rank, store, results, case, precision, again):
    """A rank's steps. Rank 0 puts their mean in ms and its peak in MiB into `results`."""
    if CUDA: torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if CUDA else "gloo", init_method="file://" + store, rank=rank, world_size=2)
    compute = torch.float32 if precision == "fp32" else torch.bfloat16
    weights = torch.bfloat16 if precision == "pure_bf16" else torch.float32
    with torch.device(o.device):
        model = LMLoss(case.vocabulary, case.T, *case.shape).to(weights)
        tokens, targets = torch.randint(case.vocabulary, (2, case.batch, case.T))
    policy = MixedPrecisionPolicy() if compute == weights else MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=compute)
    for i, block in enumerate(model.blocks):
        block.reruns_ffn = again == "feed-forwards"
        model.blocks[i] = RunsAgain(torch.compile(block)) if again == "blocks" else torch.compile(block)
        fully_shard(model.blocks[i], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    free_memory()
    if CUDA: torch.cuda.reset_peak_memory_stats()

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(tokens, targets).backward()
        optimizer.step()

    backend = SDPBackend.EFFICIENT_ATTENTION if compute == torch.float32 else SDPBackend.CUDNN_ATTENTION
    try:
        with sdpa_kernel(backend) if CUDA else contextlib.nullcontext(): ms = mean_ms(step, dist.barrier)
        if rank == 0: results.put([ms, torch.cuda.max_memory_allocated() / 2**20 if CUDA else math.nan])
    except torch.cuda.OutOfMemoryError: pass
    dist.destroy_process_group()

def fsdp2(case, precision, again):
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(fsdp2_rank, (folder + "/store", results, case, precision, again), 2)
    if results.empty(): raise RuntimeError("out of memory")
    return results.get()

# ----------------------------------------------------------------------------------------------------------------------
# Tables

above = []  # ratios of times above --max_ratio

def ratio(what, x, peer):
    r = math.inf if math.isnan(x) and not math.isnan(peer) else x / peer
    if o.max_ratio and r > o.max_ratio: above.append(f"{what} {r:.2f}")
    return r

def where():
    device = torch.cuda.get_device_name() if CUDA else "CPU"
    return f"{device}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}; commit {commit}"

def show(caption, columns, rows):
    def cell(column, x):
        digits = 2 if "ratio" in column else 0 if "MiB" in column else 3 if "ms" in column else 4
        return f"{x:.{digits}f}" if isinstance(x, float) else str(x)

    table = [columns] + [[cell(*pair) for pair in zip(columns, row)] for row in rows]
    width = [max(map(len, column)) for column in zip(*table)]
    table.insert(1, ["-" * (w - 1) + ":" for w in width])
    print(f"{caption}; {where()}\n")
    for row in table: print("| " + " | ".join(f"{x:>{w}}" for x, w in zip(row, width)) + " |")
    print(flush=True)

def model_table():
    rows = []
    for size, precision, T in itertools.product(o.size, o.precision, o.context_length):
        torch._dynamo.reset()
        what = f"{size} {precision} {T}"
        t = in_turn(what, {"ours": lambda: model_ours(size, precision, T),
                           "graph": lambda: model_pytorch(size, precision, T, True),
                           "launches": lambda: model_pytorch(size, precision, T, False)})
        row = [size, precision, T]
        for i, phase in enumerate(["fw", "fw+bw", "step"]):
            row += [t["ours"][i], t["graph"][i], ratio(f"{what} {phase}", t["ours"][i], t["graph"][i])]
        rows.append(row + [t["launches"][2], t["ours"][3], t["graph"][3], t["ours"][3] / t["graph"][3]])
    columns = [f"{phase} {column}" for phase in ("fw", "fw+bw", "step") for column in ("ours ms", "PyTorch ms", "ratio")]
    columns += ["step without graph ms", "peak ours MiB", "peak PyTorch MiB", "peak ratio"]
    caption = f"model: batch {o.batch_size}, mean of {o.steps} steps after {o.warmup}, PyTorch in a CUDA graph{joined}; {of_rounds}"
    show(caption, ["size", "precision", "context length", *columns], rows)
    if "bf16" in o.precision:
        print("In bf16 our gradients of the matrices are in 16 bits (mode flash), PyTorch's under autocast in fp32.\n", flush=True)

def compile_attention_table():
    rows = []
    for D, S in itertools.product((16, 32, 64, 128), o.lengths):
        q, k, v, dO = torch.randn(4, 8, S, D, device=o.device)
        qkv = [x.requires_grad_() for x in (q, k, v)]
        torch._dynamo.reset()
        times = []
        for f in (attention_formula, torch.compile(attention_formula)):
            forward = lambda: f(*qkv, is_causal=False)
            backward = lambda out: torch.autograd.grad(out, qkv, dO)
            times.append((mean_ms(forward, steps=o.passes), mean_ms(backward, forward, o.passes)))
            free_memory()
        (fw, bw), (compiled_fw, compiled_bw) = times
        rows.append([D, S, fw, compiled_fw, fw / compiled_fw, bw, compiled_bw, bw / compiled_bw])
        print("torch_compile (a):", *rows[-1], file=sys.stderr)
    columns = [f"{phase} {column}" for phase in ("fw", "bw") for column in ("eager ms", "compiled ms", "ratio")]
    show(f"PyTorch's torch_compile (a): attention, batch 8, no heads, no mask, fp32, mean of {o.passes} passes",
         ["d_model", "seq_len", *columns], rows)

def compile_model_table():
    rows = []
    for size, precision in itertools.product(o.size, o.precision):
        T = o.context_length[0]
        times = []
        for compiles in (False, True):
            torch._dynamo.reset()
            with torch.device(o.device):
                model = LM(VOCAB, T, *SIZES[size], formulas=True)
                tokens, targets = torch.randint(VOCAB, (2, o.batch_size, T))
            if compiles: model.compile()
            _, autocast, loss_of = ready(model, precision)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            times.append([mean_ms(phase) for phase in phases(model, optimizer, autocast, loss_of, tokens, targets)])
            model = optimizer = loss_of = None
            free_memory()
        names = ("forward", "forward+backward", "forward+backward+optimizer")
        rows += [[size, precision, name, a, b, a / b] for name, a, b in zip(names, *times)]
        print("torch_compile (b):", *rows[-3:], file=sys.stderr)
    show(f"PyTorch's torch_compile (b): the model; batch {o.batch_size}, context length {o.context_length[0]}, mean of {o.steps} steps after {o.warmup}{joined}",
         ["size", "precision", "run_type", "eager ms", "compiled ms", "ratio"], rows)

def attention_table():
    peers = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
    if flash_attn_func: peers["FlashAttention-4 " + importlib.metadata.version("flash-attn-4")] = None
    if not CUDA: peers = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA math": SDPBackend.MATH}
    rows = []
    for shape in o.shapes:
        what = "attention S {} D {}".format(*shape)
        sides = {"ours": lambda: attention_ours(*shape)}
        for name, backend in peers.items(): sides[name] = lambda backend=backend: attention_pytorch(*shape, backend)
        t = in_turn(what, sides)
        for i, which in enumerate(["forward", "backward", "both"]):
            row = [*shape, which, t["ours"][i]]
            for name in peers: row += [t[name][i], ratio(f"{what} {which}, {name}", t["ours"][i], t[name][i])]
            rows.append(row)
    columns = [f"{name} {column}" for name in peers for column in ("ms", "ratio")]
    show(f"attention: batch 1, {o.heads} heads, causal, {'bf16' if CUDA else 'fp32'}; {of_rounds}",
         ["S", "D", "pass", "ours ms", *columns], rows)

def fsdp_table():
    rows = []
    for case in FSDP_CASES:
        if not o.quick and case.name.split()[0] not in o.fsdp: continue
        for precision in case.precisions:
            what = f"{case.name} {precision}"
            options = ["--edition", "2026", "--precision", precision] + ["--quick"] * o.quick
            sides = {"ours": lambda: ours(case.command, case.columns, *options, row=case.row)}
            for again in case.reruns: sides[again] = lambda again=again: fsdp2(case, precision, again)
            t = in_turn(what, sides)
            for again in case.reruns:
                times, peaks = ([t["ours"][i], t[again][i]] for i in (0, 1))
                rows.append([case.name, precision, again, *times, ratio(f"{what} {again}", *times), *peaks, peaks[0] / peaks[1]])
    show(f"fsdp: a step on two ranks, AdamW included; FSDP2's mean of {o.steps} steps after {o.warmup}{joined}; {of_rounds}",
         ["size", "precision", "FSDP2 runs again", "ours ms", "FSDP2 ms", "ratio", "peak ours MiB", "peak FSDP2 MiB", "peak ratio"],
         rows)

if __name__ == "__main__":  # and not in FSDP2's ranks
    if not o.no_model: model_table()
    if o.attention: attention_table()
    if o.torch_compile: compile_attention_table(), compile_model_table()
    if o.fsdp: fsdp_table()
    if above: stop("not within bounds: " + "; ".join(above), 1)
