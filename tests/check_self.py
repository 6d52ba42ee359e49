#!/usr/bin/env python3
"""tests/check_self.py PROGRAM [--verbose]: does tests/check.py find what is wrong with a solution?

A right solution has to pass. Then one mistake after the other is made in its text, and check.py has to name it. Without
PyTorch only check.py's options are tried. --verbose prints each verdict. The last line is `N passed, N failed, N skipped`."""
import contextlib, io, os, subprocess, sys, tempfile, traceback, types

HERE = os.path.dirname(os.path.abspath(__file__))
if sys.argv[2:] not in ([], ["--verbose"]) or not os.path.isfile("".join(sys.argv[1:2])):
    print(f"check_self.py: got '{' '.join(sys.argv[1:])}', takes the program that `make` builds, and --verbose", file=sys.stderr)
    sys.exit(2)
os.environ["CS336_BINARY"] = os.path.abspath(sys.argv[1])
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # solutions of one name change within a second
sys.dont_write_bytecode = True
counts = {"passed": 0, "failed": 0, "skipped": 0}


def count(result, what, why=""):
    counts[result] += 1
    if result != "passed": print(f"{result:<8} {what}: {why}", flush=True)


SOLUTION = '''
import math, torch, torch.nn as nn

class RMSNorm(nn.Module):
    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(d_model))

    def forward(self, x):
        return (x.float() / (x.float().pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.weight).to(x.dtype)

class Attention(nn.Module):
    def __init__(self, d_model, num_heads, theta, context_length):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        D = d_model // num_heads
        angle = torch.outer(torch.arange(context_length), theta ** (-torch.arange(0, D, 2) / D))
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        self.register_buffer("mask", torch.ones(context_length, context_length).tril() > 0)

    def rope(self, x):
        cos, sin = self.cos[:x.shape[-2]], self.sin[:x.shape[-2]]
        out = torch.empty_like(x)
        even, odd = slice(0, None, 2), slice(1, None, 2)
        out[..., even] = x[..., even] * cos - x[..., odd] * sin
        out[..., odd] = x[..., even] * sin + x[..., odd] * cos
        return out

    def forward(self, x):
        B, T, C = x.shape
        split = lambda y: y.view(B, T, self.num_heads, -1).transpose(1, 2)
        q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        scores = self.rope(q) @ self.rope(k).mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~self.mask[:T, :T], -math.inf)
        o = scores.softmax(dim=-1) @ v
        return self.output_proj(o.transpose(1, 2).reshape(B, T, C))

class SwiGLU(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w1, self.w3, self.w2 = (nn.Linear(*n, bias=False) for n in ((d_model, d_ff), (d_model, d_ff), (d_ff, d_model)))

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))

class Block(nn.Module):
    def __init__(self, d_model, num_heads, d_ff, theta, context_length):
        super().__init__()
        self.attn, self.ffn = Attention(d_model, num_heads, theta, context_length), SwiGLU(d_model, d_ff)
        self.ln1, self.ln2 = RMSNorm(d_model), RMSNorm(d_model)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.ffn(self.ln2(x))

class TransformerLM(nn.Module):
    def __init__(self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta=10000.0):
        super().__init__()
        self.token_embeddings = nn.Embedding(vocab_size, d_model)
        self.layers = nn.ModuleList(Block(d_model, num_heads, d_ff, rope_theta, context_length) for _ in range(num_layers))
        self.ln_final, self.lm_head = RMSNorm(d_model), nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, tokens):
        x = self.token_embeddings(tokens)
        for block in self.layers:
            x = block(x)
        return self.lm_head(self.ln_final(x))

class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal=False):
        scale = q.shape[-1] ** -0.5
        s = q @ k.mT * scale
        seen = torch.ones_like(s).tril(0) > 0
        if causal: s = torch.where(seen, s, -1e6)
        L = s.logsumexp(-1)
        o = s.softmax(dim=-1) @ v
        ctx.save_for_backward(q, k, v, o, L)
        ctx.causal, ctx.scale = causal, scale
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, L = ctx.saved_tensors
        p = (q @ k.mT * ctx.scale - L[..., None]).exp()
        if ctx.causal: p = p.tril()
        delta = (do * o).sum(-1, keepdim=True)
        ds = p * (do @ v.mT - delta) * ctx.scale
        return ds @ k, ds.mT @ q, p.mT @ do, None

attention = Flash.apply

class AdamW(torch.optim.Optimizer):
    def __init__(self, params, lr, betas, eps, weight_decay):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, (b1, b2), eps = group["lr"], group["betas"], group["eps"]
            for p in group["params"]:
                s = self.state.setdefault(p, {}) or {"t": 0, "m": 0, "v": 0}
                grad, wd = p.grad, group["weight_decay"]
                s["t"], s["m"], s["v"] = s["t"] + 1, b1 * s["m"] + (1 - b1) * grad, b2 * s["v"] + (1 - b2) * grad ** 2
                c1, c2 = 1 - b1 ** s["t"], 1 - b2 ** s["t"]
                p -= lr * wd * p
                p -= lr * math.sqrt(c2) / c1 * s["m"] / (s["v"].sqrt() + eps)
                self.state[p] = s
'''
MODEL = dict(vocab_size=97, context_length=24, d_model=32, num_layers=2, num_heads=4, d_ff=48)
DECAY = "                p -= lr * wd * p\n"
UPDATE = '                p -= lr * math.sqrt(c2) / c1 * s["m"] / (s["v"].sqrt() + eps)\n'

# (what is checked, the text, the mistake in its place, words of the verdict)
MISTAKES = [
    ("model", "even, odd = slice(0, None, 2), slice(1, None, 2)", "h = x.shape[-1] // 2; even, odd = slice(0, h), slice(h, None)",
     "turns x[i] with x[i + D/2]"),
    ("model", "sin = self.cos[:x.shape[-2]], self.sin", "sin = self.cos[:x.shape[-2]], -self.sin", "the sign of sin"),
    ("model", "self.rope(q) @ self.rope(k).mT", "q @ k.mT", "no rotary embedding"),
    ("model", "rope_theta=10000.0", "rope_theta=500000.0", "theta of the rotary embedding is 500000 instead of 10000"),
    ("model", "num_heads, d_ff, rope_theta, context_length) for", "2, d_ff, rope_theta, context_length) for", "2 heads instead of 4"),
    ("model", "y.view(B, T, self.num_heads, -1).transpose(1, 2)", "y.view(B, self.num_heads, T, -1)", "heads are cut by view"),
    ("model", "o.transpose(1, 2).reshape(B, T, C)", "o.reshape(B, T, C)", "heads are joined without"),
    ("model", " / math.sqrt(q.shape[-1])", "", "not divided by sqrt(D)"),
    ("model", "math.sqrt(q.shape[-1])", "math.sqrt(C)", "divided by sqrt(d_model)"),
    ("model", "torch.ones(context_length, context_length).tril()", "torch.ones(context_length, context_length).tril(1)",
     "sees the key after its own"),
    ("model", "torch.ones(context_length, context_length).tril()", "torch.ones(context_length, context_length).tril(-1)",
     "does not see its own key"),
    ("model", "~self.mask[:T, :T], -math.inf", "~self.mask[:T, :T].tril(-1), -1e6", "does not see its own key"),
    ("model", "scores = scores.masked_fill(~self.mask[:T, :T], -math.inf)", "pass", "no causal mask"),
    ("model", "eps=1e-5", "eps=1e-6", "eps is 1e-06 instead of 1e-5"),
    ("model", "scores.softmax(dim=-1)", "scores.softmax(dim=-2)", "softmax runs over the queries"),
    ("model", "split(self.k_proj(x))", "split(x @ self.k_proj.weight)", "each layer's attn.k_proj.weight is transposed"),
    ("model", "x = self.token_embeddings(tokens)", "x = self.token_embeddings(tokens); w = self.layers[1].attn.v_proj.weight.data; "
     "w.copy_(w.T.clone())", "layers.1.attn.v_proj.weight is transposed"),
    ("model", "nn.Linear(*n, bias=False) for n in ((d_model, d_ff),", "nn.Linear(*n, bias=False) for n in ((d_ff, d_model),",
     "layers.0.ffn.w1.weight is [32, 48] instead of [48, 32]; it is transposed"),
    ("model", "silu(self.w1(x)) * self.w3(x)", "silu(self.w3(x)) * self.w1(x)", "w1 and w3 are swapped"),
    ("model", "functional.silu", "functional.gelu", "GELU instead of SiLU"),
    ("model", "x = x + self.attn(self.ln1(x))", "x = self.ln1(x + self.attn(x)); return self.ln2(x + self.ffn(x))", "after the residual sum"),
    ("model", "self.lm_head(self.ln_final(x))", "self.lm_head(x)", "no norm before lm_head"),
    ("model", "nn.Linear(d_model, vocab_size, bias=False)", "nn.Linear(d_model, vocab_size)", "lm_head.bias is a parameter"),
    ("model", "theta ** (-torch.arange(0, D, 2) / D)", "theta ** (-torch.arange(D // 2) / D)",
     "is 100 instead of 10000, or its exponent lacks its factor 2"),
    ("model", "self.rope(k).mT", "k.mT", "only q gets the rotary embedding"),
    ("model", "self.rope(q) @", "q @", "only k gets the rotary embedding"),
    ("model", "softmax(dim=-1) @ v\n        return self", "softmax(dim=-1) @ self.rope(v)\n        return self", "v gets the rotary embedding, too"),
    ("model", "~self.mask[:T, :T], -math.inf", "self.mask[:T, :T], -math.inf", "inverted: a query sees only the keys after its own"),
    ("model", "~self.mask[:T, :T], -math.inf", "self.mask[:T, :T].tril(-1), -1e9", "inverted: a query sees its own key and those after"),
    ("model", "return (x.float() /", "x = x - x.mean(-1, keepdim=True); return (x.float() /", "subtract the mean, as LayerNorm does"),
    ("model", ".sqrt() * self.weight)", ".sqrt())", "not multiplied by their weight"),
    ("model", "self.ln1, self.ln2 = RMSNorm(d_model), RMSNorm(d_model)", "self.ln1, self.ln2 = RMSNorm(d_model), nn.LayerNorm(d_model)",
     "layers.0.ln2.bias is a parameter that the handout's model does not have: its norms are RMSNorms"),
    ("model", "self.ffn(self.ln2(x))", "self.ffn(self.ln1(x))", "the FFN's norm is ln1 instead of ln2"),
    ("model", "self.ffn(self.ln2(x))", "self.ffn(self.ln1(x))", "Called more than once (the table has the first call's output): layers.0.ln1, layers.1.ln1."),
    ("model", "self.ffn(self.ln2(x))", "self.ffn(self.ln1(x))", "Never called: layers.0.ln2, layers.1.ln2."),
    ("model", "x = x + self.attn(self.ln1(x))", "x = self.attn(self.ln1(x))", "the residual is missing around attention"),
    ("model", "return x + self.ffn(", "return self.ffn(", "the residual is missing around the FFN"),
    ("model", "x = x + self.attn(self.ln1(x))", "x = self.attn(self.ln1(x)); return self.ffn(self.ln2(x))", "both residuals"),
    ("model", "self.output_proj(o.transpose", "self.output_proj(o.detach().transpose", "Forward agrees"),
    ("model", "split(self.q_proj(x))", "split(self.q_proj(x)).detach()", "no gradient reaches layers.0.attn.q_proj.weight"),
    ("model", "return x + self.ffn(self.ln2(x))", "return x + self.ffn(self.ln2(x)) * 1.01", "in the order of forward, is layers.0; all up to layers.0.ffn agree"),
    ("attention", "scale = q.shape[-1] ** -0.5", "scale = 1", "not divided by sqrt(D)"),
    ("attention", "tril(0)", "tril(1)", "sees the key after its own"),
    ("attention", "tril(0)", "tril(-1)", "does not see its own key"),
    ("attention", "if causal: s =", "if False: s =", "no causal mask"),
    ("attention", "torch.where(seen, s, -1e6)", "torch.where(seen, -1e6, s)", "inverted: a query sees only the keys after its own"),
    ("attention", "L = s.logsumexp(-1)", "L = s.logsumexp(-1) / math.log(2)", "the saved logsumexp is in base 2"),
    ("attention", "o = s.softmax(dim=-1)", "o = s.softmax(dim=-2)", "softmax runs over the queries"),
    ("attention", "do @ v.mT - delta", "do @ v.mT", "lacks D = rowsum(dO * O)"),
    ("attention", "(do @ v.mT - delta) * ctx.scale", "(do @ v.mT - delta)", "lack the factor 1/sqrt(D)"),
    ("attention", "if ctx.causal: p = p.tril()", "pass", "without the causal mask"),
    ("adamw", "c1, c2 = 1 - b1 ** s[\"t\"], 1 - b2 ** s[\"t\"]", "c1 = c2 = 1", "no bias correction"),
    ("adamw", DECAY + UPDATE, UPDATE + DECAY, "decays after the step"),
    ("adamw", 'grad, wd = p.grad, group["weight_decay"]', 'grad, wd = p.grad + group["weight_decay"] * p, 0', "added to the gradient (Adam with L2)"),
    ("adamw", DECAY, "", "no weight decay"),
    ("adamw", 'lr, (b1, b2), eps =', 'lr, (b2, b1), eps =', "the betas are swapped"),
    ("adamw", 'p -= lr * math.sqrt(c2) / c1 * s["m"] / (s["v"].sqrt() + eps)', 'p -= lr * (s["m"] / c1) / ((s["v"] / c2).sqrt() + eps)',
     "check it with --adamw torch"),
    ("adamw", '(s["v"].sqrt() + eps)', '(s["v"] + eps).sqrt()', "inside the square root"),
]


def run_check(*words, python=(), **more):
    r = subprocess.run([sys.executable, *python, os.path.join(HERE, "check.py"), *words], capture_output=True, text=True, timeout=300, **more)
    return r.returncode, r.stdout, r.stderr


def options():
    """-S: no site-packages, so there is no torch."""
    code, out, err = run_check("--help", python=["-S"])
    count("passed" if code == 0 and "--adamw" in out else "failed", "--help", f"exit code {code}, {err}")
    for words, names in [("", "what"), ("modle a:b", "modle"), ("model", "MODULE:NAME"), ("model nowhere", "nowhere"), ("model a:", "a:"),
                         ("model a:b --precision fp8", "--precision"), ("model a:b --num_heads 0", "--num_heads"),
                         ("model a:b --num_heads 1.5", "--num_heads"), ("model a:b --context_length 1", "--context_length"),
                         ("model a:b --rope_theta nan", "--rope_theta"), ("model a:b --rope_theta -1", "--rope_theta"),
                         ("model a:b --kwargs d_model", "KEY=VALUE"), ("model a:b --weights no/such", "no/such"),
                         ("model a:b --batch no/such", "no/such"), ("model a:b --adamw torch", "--optimizer"),
                         ("model a:b --steps 2", "--optimizer"), ("model a:b --head_size 64", "--head_size"),
                         ("attention a:b --head_size 48", "--head_size"), ("attention a:b --weights x", "--weights"),
                         ("attention a:b --every", "--every"), ("attention a:b --speed 3", "--speed"), ("attention a:b", "PyTorch")]:
        code, out, err = run_check(*words.split(), python=["-S"])
        good = code == 2 and err.count("\n") == 1 and names in err and not out
        count("passed" if good else "failed", f"check.py {words}", f"exit code {code}, {out}{err}")


def verdict(what, text, **more):
    """What check.py prints of this solution, and whether it is ok."""
    solution = types.ModuleType("solution")
    exec(text, solution.__dict__)
    torch.manual_seed(1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if what == "attention": ok = check.check_attention(solution.attention, **{"context_length": 32, "head_size": 16} | more)
        else:
            if what == "adamw": more = {"optimizer": solution.AdamW} | more
            ok = check.check_model(more.pop("model", None) or solution.TransformerLM(**MODEL), 4, context_length=24, **more)
    return ok, printed.getvalue(), solution


def expect(name, ok, words, what, text=SOLUTION, **more):
    try: got, printed, _ = verdict(what, text, **more)
    except Exception: got, printed = None, traceback.format_exc()
    good = got is ok and words in printed
    count("passed" if good else "failed", name, f"expected {'ok' if ok else 'DIFFERS'} and '{words}', got:\n{printed}")
    last = [line for line in printed.splitlines() if line.startswith(("ok", "DIFFERS", "Likely", "No usual"))]
    if good and sys.argv[2:]: print(name, *last, sep="\n    ", flush=True)


def solutions():
    for precision in ("fp32", "tf32", "bf16"):
        expect(f"model, {precision}", True, "ok: all", "model", precision=precision)
        expect(f"attention, {precision}", True, "ok: all", "attention", precision=precision)
    expect("attention with heads", True, "ok: all", "attention", num_heads=2)
    expect("AdamW", True, "ok: all", "adamw")
    expect("torch.optim.AdamW", True, "ok: all", "model", optimizer=torch.optim.AdamW, adamw="torch")
    for what, old, new, words in MISTAKES:
        assert SOLUTION.count(old) == 1, old
        expect(f"{what}: {new.strip()} instead of {old.strip()}", False, words, what, SOLUTION.replace(old, new))
    only_forward = "backward is not there yet: only forward was checked\nok: all"
    expect("attention, a Function", True, "lse", "attention", SOLUTION.replace("attention = Flash.apply", "attention = Flash"))
    at = SOLUTION.index("        q, k, v, o, L = ctx.saved_tensors")
    todo = SOLUTION[:at] + "        raise NotImplementedError\n" + SOLUTION[SOLUTION.index("\nattention = Flash"):]
    expect("attention, backward to be done", True, only_forward, "attention", todo)
    expect("attention, backward to be done: lse", True, "| lse ", "attention", todo)
    expect("attention, forward wrong, backward to be done", False, "only forward was checked", "attention", todo.replace("tril(0)", "tril(1)"))
    no_graph = SOLUTION.replace("attention = Flash.apply", "attention = torch.no_grad()(Flash.apply)")
    expect("attention without a grad_fn", True, only_forward, "attention", no_graph)
    halves = SOLUTION.replace(*MISTAKES[0][1:3])
    expect("bf16: halves", False, MISTAKES[0][3], "model", halves, precision="bf16")


def adapter_against_formula():
    """As the public tests do it: o and the saved logsumexp, then the gradients; and in fp64, with heads."""
    for shape, dtype in [((4, 128, 64), torch.float32), ((2, 3, 20, 16), torch.float64)]:
        for causal in (False, True):
            q, k, v, do = torch.randn(4, *shape, dtype=dtype)
            inputs = [[t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2)]
            ours, right = adapter.Attention.apply(*inputs[0], causal), check.attend(*inputs[1], causal)
            scores = (q @ k.mT * shape[-1] ** -0.5).masked_fill(torch.ones(q.shape[-2], q.shape[-2]).triu(1) * causal > 0, -torch.inf)
            saved = [t for t in ours.grad_fn.saved_tensors if t.shape == shape[:-1]]
            ours.backward(do), right.backward(do)
            pairs = [(ours, right), (saved[0], scores.logsumexp(-1)), *((a.grad, b.grad) for a, b in zip(*inputs))]
            good = len(saved) == 1 and ours.dtype == dtype and all(check.difference(a, b) < 1e-5 for a, b in pairs)
            count("passed" if good else "failed", f"adapter {shape}, {dtype}, causal {causal}", "is not the formula's")


def inputs():
    _, _, solution = verdict("model", SOLUTION)
    model = solution.TransformerLM(**MODEL)
    state, tokens = model.state_dict(), torch.randint(97, (3, 7))
    expect("_orig_mod. and module.", True, "", "model", weights={"module._orig_mod." + n: t for n, t in state.items()})
    ddp = torch.nn.Module()
    ddp.module = torch.compile(model)
    expect("a compiled model, wrapped", True, "buffers are not compared: cos, mask, sin", "model", model=ddp)
    expect("fp64", True, "float64", "model", model=solution.TransformerLM(**MODEL).double())
    expect("fp16 weights", True, "float16", "model", weights={n: t.half() for n, t in state.items()})
    expect("one dimension", True, "one sequence", "model", tokens=tokens[0], targets=tokens[1])
    masked = torch.cat([tokens[:, 1:], torch.full((3, 1), -100)], 1)
    expect("targets of -100", True, "3 targets of -100", "model", tokens=tokens, targets=masked)
    try: failed = check.check_model(solution.TransformerLM(**MODEL), num_heads=4)
    except check.Usage as e: failed = str(e)
    good = failed == "the model takes 24 tokens and fails with 32: takes context_length=24 or less"
    count("passed" if good else "failed", "a batch that is too long", failed)
    tied = solution.TransformerLM(**MODEL)
    tied.lm_head.weight = tied.token_embeddings.weight
    expect("tied weights", False, "are one tensor", "model", model=tied)
    with tempfile.TemporaryDirectory() as folder:
        path = lambda name: os.path.join(folder, name)
        with open(path("solution.py"), "w") as f: f.write(SOLUTION)
        with open(path("wrong.py"), "w") as f: f.write(SOLUTION.replace("eps=1e-5", "eps=1e-3"))
        torch.save({"model": state, "step": 3}, path("all.pt"))
        adapter.save(path("weights.safetensors"), state)
        adapter.save(path("batch.safetensors"), {"tokens": tokens.int(), "targets": tokens})
        kwargs = ["--kwargs", *(f"{k}={v}" for k, v in MODEL.items())]
        for words, expected, names in [
                (["model", "solution:TransformerLM", *kwargs, "--weights", "all.pt", "--every"], 0, "its 'model' is read"),
                (["model", "solution:TransformerLM", *kwargs, "--weights", "weights.safetensors", "--batch", "batch.safetensors"], 0, "ok: all"),
                (["model", path("wrong.py") + ":TransformerLM", *kwargs, "--optimizer", "solution:AdamW"], 1, "eps is 0.001"),
                (["attention", "solution:attention"], 0, "lse"),
                (["attention", "solution:nothing"], 2, "nothing"), (["attention", "nowhere:x"], 2, "nowhere"),
                (["model", "solution:TransformerLM", "--num_heads", "4"], 2, "--kwargs"),
                (["model", "solution:TransformerLM", *kwargs, "--weights", "batch.safetensors"], 2, "--weights"),
                (["model", "solution:TransformerLM", *kwargs, "--batch", "weights.safetensors"], 2, "--batch"),
                (["model", "solution:TransformerLM", *kwargs, "--weights", "solution.py"], 2, "--weights"),
                (["model", "solution:TransformerLM", *kwargs, "--num_heads", "5"], 2, "--num_heads"),
                (["model", "solution:attention", *kwargs], 2, "solution:attention")]:
            code, out, err = run_check(*words, cwd=folder)
            good = code == expected and names in out + err and (code < 2 or err.count("\n") == 1)
            count("passed" if good else "failed", " ".join(words), f"exit code {code}, {out}{err}")


options()
try:
    import torch
    sys.path.insert(0, HERE)
    import adapter, check
except ImportError as e:
    count("skipped", f"{len(MISTAKES)} mistakes in a solution", f"no PyTorch: {e}")
else:
    solutions()
    adapter_against_formula()
    inputs()
print(", ".join(f"{n} {result}" for result, n in counts.items()))
sys.exit(counts["failed"] > 0)
