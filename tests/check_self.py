#!/usr/bin/env python3
"""tests/check_self.py PROGRAM [--verbose]: does tests/check.py find what is wrong with a solution?

A right solution has to pass. Then one mistake after the other is made in its text, and check.py has to name it. Without
PyTorch only check.py's options are tried. --verbose prints each verdict. The last line is `N passed, N failed, N skipped`."""
import contextlib, io, os, pickle, subprocess, sys, tempfile, traceback, types

HERE = os.path.dirname(os.path.abspath(__file__))
if sys.argv[2:] not in ([], ["--verbose"]) or not os.path.isfile("".join(sys.argv[1:2])):
    print(f"check_self.py: got '{' '.join(sys.argv[1:])}', takes the program that `make` builds, and --verbose", file=sys.stderr)
    sys.exit(2)
os.environ["CS336_BINARY"] = os.path.abspath(sys.argv[1])
os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # small tensors; files change
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
RANKS = '''
import torch, torch.nn as nn, torch.distributed as dist

class DDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.handles = module, []
        for p in module.parameters():
            dist.broadcast(p.data, src=0)
            if p.requires_grad: p.register_post_accumulate_grad_hook(self.send)
        for t in module.buffers(): dist.broadcast(t, src=0)

    def send(self, p):
        p.grad /= dist.get_world_size()
        self.handles.append(dist.all_reduce(p.grad, async_op=True))

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_synchronization(self):
        for handle in self.handles: handle.wait()
        self.handles.clear()

class ShardedOptimizer(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **settings):
        self.owner, self.inner, self.make = {}, None, lambda groups: optimizer_cls(groups, **settings)
        super().__init__(params, settings)

    def add_param_group(self, group):
        super().add_param_group(group)
        group = self.param_groups[-1]
        for p in group["params"]: self.owner[p] = len(self.owner) % dist.get_world_size()
        mine = dict(group, params=[p for p in group["params"] if self.owner[p] == dist.get_rank()])
        if self.inner is None: self.inner = self.make([mine])
        else: self.inner.add_param_group(mine)

    def step(self):
        for group, mine in zip(self.param_groups, self.inner.param_groups):
            mine.update({key: value for key, value in group.items() if key != "params"})
        self.inner.step()
        for p, rank in self.owner.items(): dist.broadcast(p.data, src=rank)

class FSDP(nn.Module):
    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module, self.dtype, self.layers = module, compute_dtype, {}
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        for layer in module.modules():
            if not any(kind in type(layer).__name__ for kind in ("Linear", "Embedding")): continue
            self.layers[layer] = layer.weight.shape
            layer.weight.data = layer.weight.data.chunk(self.world)[self.rank].clone()
            layer.register_forward_pre_hook(self.gather)
            layer.register_forward_hook(self.free)
            if "Linear" in type(layer).__name__: layer.register_full_backward_pre_hook(self.gather)
            layer.weight.register_hook(lambda g, layer=layer: self.put_aside(layer))
            layer.weight.register_post_accumulate_grad_hook(lambda p, layer=layer: self.scatter(layer, p))

    def full(self, layer, dtype):
        whole = torch.empty(self.layers[layer], dtype=dtype)
        dist.all_gather(list(whole.chunk(self.world)), layer.shard.to(dtype))
        return whole

    def gather(self, layer, *_):
        if layer.weight.shape == self.layers[layer]: return
        layer.shard = layer.weight.data
        layer.weight.data = self.full(layer, self.dtype or torch.float32)

    def free(self, layer, *_):
        layer.weight.data = layer.shard

    def put_aside(self, layer):
        layer.before, layer.weight.grad = layer.weight.grad, None

    def scatter(self, layer, p):
        grad, p.grad = p.grad.float(), None
        self.free(layer)
        dist.all_reduce(grad)
        p.grad = grad.chunk(self.world)[self.rank] / self.world
        if layer.before is not None: p.grad += layer.before

    def forward(self, x):
        return self.module(x)

    def finish_gradient_synchronization(self):
        sharded = {layer.weight for layer in self.layers}
        for p in self.module.parameters():
            if p in sharded: continue
            dist.all_reduce(p.grad)
            p.grad /= self.world

    def gather_full_params(self):
        out = dict(self.module.named_parameters())
        for name, layer in self.module.named_modules():
            if layer in self.layers:
                layer.shard = layer.weight.data
                out[name + ".weight"] = self.full(layer, torch.float32)
        return out
'''
ADAPTERS = '''
import ranks, solution
def get_ddp(module): return ranks.DDP(module)
def ddp_on_after_backward(model, optimizer): model.finish_gradient_synchronization()
def get_fsdp(module, compute_dtype=None): raise NotImplementedError
def get_adamw_cls(): return solution.AdamW
def get_flashattention_autograd_function_pytorch(): return solution.Flash
def get_flashattention_autograd_function_triton(): return solution.Flash
def run_transformer_lm(vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta, weights, in_indices):
    model = solution.TransformerLM(vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta)
    model.load_state_dict(weights, strict=False)
    return model(in_indices)
'''
# What is counted in backward is set back when a batch starts, as 2025's adapters for buckets suggest.
STARTS = '''
import ranks
class Once(ranks.DDP):
    def send(self, p):
        self.left -= 1
        if self.left >= 0: super().send(p)

def get_ddp(module): return Once(module)
def ddp_on_train_batch_start(model, optimizer): model.left = sum(p.requires_grad for p in model.parameters())
def ddp_on_after_backward(model, optimizer): model.finish_gradient_synchronization()
'''
# With names of its own, and one weight for q, k and v.
FUSED = SOLUTION.replace("self.output_proj", "self.o").replace("self.token_embeddings", "self.embed").replace("self.lm_head", "self.head")
FUSED = FUSED.replace("self.q_proj, self.k_proj, self.v_proj, self.o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))",
                      "self.qkv, self.o = (nn.Linear(d_model, n * d_model, bias=False) for n in (3, 1))")
FUSED = FUSED.replace("split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))", "map(split, self.qkv(x).chunk(3, -1))") + '''
def run_transformer_lm(vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta, weights, in_indices):
    model = TransformerLM(vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta)
    own = {}
    for name, t in weights.items():
        name = name.replace("output_proj", "o").replace("token_embeddings", "embed").replace("lm_head", "head")
        if "_proj" in name: own.setdefault(name.replace(name.split(".")[-2], "qkv"), []).append(t)
        else: own[name] = [t]
    model.load_state_dict({name: torch.cat(ts) for name, ts in own.items()}, strict=False)
    return model(in_indices)
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
    ("model", "        return out", "        return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * "
     "torch.complex(cos, -sin)).flatten(-2)", "the rotary embedding turns the other way"),
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
    ("model", "x = x + self.attn(self.ln1(x))", "x = self.attn(self.ln1(x))", "the residual is missing around attention"),
    ("model", "return x + self.ffn(", "return self.ffn(", "the residual is missing around the FFN"),
    ("model", "x = x + self.attn(self.ln1(x))", "x = self.attn(self.ln1(x)); return self.ffn(self.ln2(x))", "both residuals"),
    ("model", "self.output_proj(o.transpose", "self.output_proj(o.detach().transpose", "Forward agrees"),
    ("model", "split(self.q_proj(x))", "split(self.q_proj(x)).detach()", "no gradient reaches layers.0.attn.q_proj.weight"),
    ("model", "return x + self.ffn(self.ln2(x))", "return x + self.ffn(self.ln2(x)) * 1.01", "in the order of forward, is layers.0; all up to layers.0.ffn agree"),
    ("attention", "scale = q.shape[-1] ** -0.5", "scale = 1", "not divided by sqrt(D)"),
    ("attention", "scale = q.shape[-1] ** -0.5", "scale = 0.25", "DIFFERS: o, head size 32. Does the scale"),
    ("attention", "tril(0)", "tril(1)", "sees the key after its own"),
    ("attention", "tril(0)", "tril(-1)", "does not see its own key"),
    ("attention", "torch.where(seen, s, -1e6)", "torch.where(seen, -1e6, s)", "inverted: a query sees only the keys after its own"),
    ("attention", "L = s.logsumexp(-1)", "L = s.logsumexp(-1) / math.log(2)", "the saved logsumexp is in base 2"),
    ("attention", "o = s.softmax(dim=-1)", "o = s.softmax(dim=-2)", "softmax runs over the queries"),
    ("attention", "do @ v.mT - delta", "do @ v.mT", "lacks D = rowsum(dO * O)"),
    ("attention", "(do @ v.mT - delta) * ctx.scale", "(do @ v.mT - delta)", "lack the factor 1/sqrt(D)"),
    ("attention", "if ctx.causal: p = p.tril()", "pass", "without the causal mask"),
    ("adamw", "c1, c2 = 1 - b1 ** s[\"t\"], 1 - b2 ** s[\"t\"]", "c1 = c2 = 1", "no bias correction"),
    ("adamw", DECAY, "                p -= wd * p\n", "decays by 1 - weight_decay"),
    ("adamw", 'grad, wd = p.grad, group["weight_decay"]', 'grad, wd = p.grad + group["weight_decay"] * p, 0', "added to the gradient (Adam with L2)"),
    ("adamw", DECAY, "", "no weight decay"),
    ("adamw", DECAY + UPDATE, UPDATE + "                if p.dim() > 1: p -= lr * wd * p\n", "No usual mistake explains it"),
    ("adamw", 'lr, (b1, b2), eps =', 'lr, (b2, b1), eps =', "the betas are swapped"),
    ("adamw", '(s["v"].sqrt() + eps)', '(s["v"] + eps).sqrt()', "inside the square root"),
    ("model", "eps=1e-5", "eps=3e-4", "eps is 0.0003 instead of 1e-5"),
    ("model", "eps=1e-5", "eps=torch.finfo(torch.float32).eps", "eps is 1.2e-07 instead of 1e-5"),
    ("attention", "L[..., None]).exp()", "L[..., None, :]).exp()", "subtracts L along the keys"),
    ("attention", "do @ v.mT - delta", "do @ v.mT - delta.mT", "subtracts D along the keys"),
    ("attention", "return ds @ k, ds.mT @ q", "return ds @ q, ds.mT @ k", "`dQ = dS @ q * scale` instead of `dQ = dS @ k * scale`; `dK = dS.mT @ k * scale`"),
    ("attention", "ds.mT @ q", "ds @ q", "dK is dS Q"),
    ("attention", "if ctx.causal: p = p.tril()", "if ctx.causal: p = p.tril(-1)", "backward's causal mask is off by one: a query does not see its own key"),
    ("attention", "L = s.logsumexp(-1)", "L = s.amax(-1) + (s - s.amax(-1, keepdim=True)).exp().sum(-1).log2()", "the saved logsumexp is m + log2(l)"),
    ("attention", "p.mT @ do", "p.mT @ do * ctx.scale", "dV has the factor 1/sqrt(D)"),
    ("attention", "p.mT @ do", "None", "backward returns None for dv"),
    ("attention", "scale = q.shape[-1] ** -0.5", "scale = q.shape[-2] ** -0.5", "the root of the sequence's length"),
    ("attention", "delta = ", "do.mul_(1.001); delta = ", "attention changes its input do"),
    ("attention", "return ds @ k,", "return ds[..., -16:] @ k[..., -16:, :],", "dQ is the last tile's alone: it is = instead of += (tiles of 16)"),
    ("attention", "p.mT @ do", "p @ do", "dV is P dO"),
    ("attention", "L = s.logsumexp(-1)", "L = s.amax(-1)", "only the scores' maximum"),
    ("adamw", 'group["lr"], group["betas"]', 'self.defaults["lr"], group["betas"]', "lr: read once; what is changed in param_groups later does nothing"),
    ("adamw", "for group in self.param_groups:", "for group in self.param_groups[:1]:", "only the first group is stepped"),
    ("adamw", 'grad, wd = p.grad, group', 'grad, wd = p.grad.mul_(1.0001), group', "step() changes gradients in place"),
    ("adamw", '= 1 - b1 ** s["t"], 1 - b2 ** s["t"]', '= 1 - b1 ** (s["t"] + 1), 1 - b2 ** (s["t"] + 1)', "begins at 2 instead of 1"),
    ("adamw", '= 1 - b1 ** s["t"], 1 - b2 ** s["t"]', "= 1 - b1, 1 - b2", "is always 1: it does not grow"),
    ("adamw", DECAY, "                p -= lr * math.sqrt(c2) / c1 * wd * p\n", "`p = p * (1 - lr_t * decay)`"),
    ("adamw", "lr * math.sqrt(c2) / c1", "lr / c1", "only m gets its bias correction"),
    ("adamw", "lr * math.sqrt(c2) / c1", "lr * math.sqrt(c2)", "only v gets its bias correction"),
    ("adamw", "math.sqrt(c2)", "c2", "takes 1 - beta2^t without its root"),
    ("adamw", "(1 - b1) * grad", "grad", "`m = beta1 * m + g`"),
    ("adamw", "(1 - b2) * grad ** 2", "grad ** 2", "`v = beta2 * v + g ** 2`"),
    ("adamw", '(s["v"].sqrt() + eps)', '(s["v"] + eps)', "v lacks its square root"),
    ("adamw", "grad ** 2", '(b1 * s["m"] + (1 - b1) * grad) ** 2', "`v = beta2 * v + (1 - beta2) * m ** 2`"),
    ("adamw", 'group["betas"], group["eps"]', '(0.9, 0.999), group["eps"]', "betas: always (0.9, 0.999), whatever is given"),
    ("attention", "scale = q.shape[-1] ** -0.5", "scale = q.shape[-1] ** -0.5; q.mul_(1.001)", "attention changes its input q"),
    ("attention", "o = s.softmax(dim=-1) @ v", "e = s.exp(); o = e / e.sum(-1, keepdim=True) @ v", "exp(100) is infinite in fp32"),
    ("attention", "o = s.softmax(dim=-1) @ v", "e = (s - s.amax(-1, keepdim=True).clamp(min=0)).exp(); o = e / e.sum(-1, keepdim=True) @ v",
     "exp(-100) is nearly 0"),
    ("attention", "return ds @ k,", "return ds @ k / ctx.scale,", "dQ lacks the factor 1/sqrt(D)"),
    ("attention", "ds.mT @ q", "ds.mT @ q / ctx.scale", "dK lacks the factor 1/sqrt(D)"),
    ("attention", "return ds @ k, ds.mT @ q,", "return ds.mT @ q, ds @ k,", "backward returns dK, dQ, dV instead of dQ, dK, dV"),
    ("attention", "L = s.logsumexp(-1)", "L = s.logsumexp(-1) - s.amax(-1)", "the saved tensor is log l"),
    ("attention", "L = s.logsumexp(-1)", "L = (s - s.amax(-1, keepdim=True)).exp().sum(-1)", "the saved tensor is l;"),
    ("attention", "o = s.softmax(dim=-1) @ v", "o = s[..., :32].softmax(dim=-1) @ v[..., :32, :]", "the last tile of keys is left out"),
    ("attention", "o = s.softmax(dim=-1) @ v", "o = s.softmax(dim=-1).bfloat16().float() @ v", "P is rounded to bfloat16"),
    ("attention", "(do * o).sum(-1, keepdim=True)", "(do @ v.mT).sum(-1, keepdim=True)", "D = rowsum(dP) instead of rowsum(dO * O)"),
    ("attention", "s = q @ k.mT * scale", "s = q @ k.mT * scale * scale", "by sqrt(D) twice"),
    ("attention", "o = s.softmax(dim=-1) @ v", "o = (s.softmax(dim=-1) @ v)[:1].expand_as(q).clone()", "each batch gets what is the first one's"),
    ("attention", "torch.where(seen, s, -1e6)", "torch.where(seen, s, -10.0)", "a masked score becomes -10"),
    ("attention", "        L = s.logsumexp(-1)", "        s = s + 0.1 * s ** 2; L = s.logsumexp(-1)", "gives our softmax, then O"),
    ("model", "y.view(B, T, self.num_heads, -1).transpose(1, 2)", "y.view(B, T, -1, self.num_heads).permute(0, 3, 1, 2)", "heads are interleaved"),
    ("model", "nn.functional.silu(self.w1(x)) * self.w3(x)", "nn.functional.silu(self.w1(x) * self.w3(x))", "the FFN is w2(silu(w1 x * w3 x))"),
    ("model", "return self.lm_head(self.ln_final(x))", "return self.lm_head(self.ln_final(x)).softmax(-1)", "the model returns softmax(logits)"),
    ("model", "x = self.token_embeddings(tokens)", "x = self.token_embeddings(tokens) * 32 ** 0.5", "the embedding is multiplied by sqrt(d_model)"),
    ("model", "return x + self.ffn(self.ln2(x))", "return x + self.ffn(self.ln2(x - self.attn(self.ln1(x))))", "No usual mistake explains it"),
    ("model", "self.eps).sqrt() *", "self.eps) *", "the norms take no root"),
    ("model", "mean(-1, keepdim=True) + self.eps).sqrt()", "mean(-1, keepdim=True).sqrt() + self.eps)", "RMSNorm's eps stands outside the root"),
    ("model", "pow(2).mean(-1", "pow(2).sum(-1", "the norms sum x^2 instead of taking its mean"),
    ("model", "x = x + self.attn(self.ln1(x))", "x = self.ln1(x); x = x + self.attn(x)", "a residual adds the normed x"),
    ("model", "for block in self.layers:", "for block in [self.layers[0], self.layers[0]]:", "each layer is the first one's block"),
    ("model", "for block in self.layers:", "for block in self.layers[:-1]:", "the last layer is left out"),
    ("model", "o = scores.softmax(dim=-1) @ v", "o = nn.functional.dropout(scores.softmax(dim=-1), 0.1) @ v", "Two forwards of yours differ"),
    ("model", "self.sin[:x.shape[-2]]", "self.sin[:x.shape[-2]].bfloat16().float(); cos = cos.bfloat16().float()", "cos and sin are rounded to bfloat16"),
    ("model", "scores = scores.masked_fill(", "scores = (scores + 0.1 * scores ** 2).masked_fill(", "gives our softmax, then values"),
]
for mistake, words in [("o", "O is not multiplied by exp(m_old - m_new)"), ("l", "l is not multiplied by exp(m_old - m_new)"), ("max", "m is the tile's maximum"),
                       ("first", "only the first tile of keys is read"), ("norm", "O is not divided by l"),
                       ("order", "m is overwritten before exp(m_old - m_new)"), ("each", "O is divided by l at each tile")]:
    MISTAKES.append(("attention", "o = s.softmax(dim=-1) @ v", f"import check_causes; o = check_causes.tiled(q, k, v, causal, 16, '{mistake}')", words))
MISTAKES.append(("attention", "o = s.softmax(dim=-1) @ v", "import check_causes; o = check_causes.tiled(q, k, v, causal, 16, 'local') if causal else s.softmax(-1) @ v", "inside a tile"))
# Two mistakes at once are two names.
TWO = [("model", [("/ math.sqrt(q.shape[-1])", ""), ("functional.silu", "functional.gelu")], ["not divided by sqrt(D)", "GELU instead of SiLU"]),
       ("model", [("even, odd = slice(0, None, 2), slice(1, None, 2)", "h = x.shape[-1] // 2; even, odd = slice(0, h), slice(h, None)"),
                  ("silu(self.w1(x)) * self.w3(x)", "silu(self.w3(x)) * self.w1(x)")], ["turns x[i] with x[i + D/2]", "w1 and w3 are swapped"]),
       ("attention", [("scale = q.shape[-1] ** -0.5", "scale = 1"), ("tril(0)", "tril(1)")], ["not divided by sqrt(D)"]),
       ("attention", [("do @ v.mT - delta) * ctx.scale", "do @ v.mT)")], ["lacks D = rowsum(dO * O)", "lack the factor 1/sqrt(D)"]),
       ("adamw", [('c1, c2 = 1 - b1 ** s["t"], 1 - b2 ** s["t"]', "c1 = c2 = 1"), (DECAY, "")], ["no bias correction", "no weight decay"])]

SEND = "            if p.requires_grad: p.register_post_accumulate_grad_hook(self.send)"
# (what is checked, the text, the mistake in its place, words of the verdict; None: ok)
RANK_MISTAKES = [
    ("ddp", "dist.broadcast(p.data, src=0)", "pass", "plain: the weights are not sent from rank 0 at the start"),
    ("ddp", "dist.broadcast(p.data, src=0)", "p.requires_grad and dist.broadcast(p.data, src=0)",
     "frozen parameters: the weights of fixed, which need no gradient, are not sent from rank 0"),
    ("ddp", "p.grad /= dist.get_world_size()", "pass", "plain: every gradient is the sum over the ranks instead of the mean"),
    ("ddp", "p.grad /= dist.get_world_size()", "p.grad /= dist.get_world_size() ** 2", "divided by the number of ranks twice"),
    ("ddp", "dist.all_reduce(p.grad, async_op=True)", "dist.broadcast(p.grad, 0, async_op=True)", "DIFFERS: plain"),
    ("ddp", "p.grad /= dist.get_world_size()", "return", "every gradient is each rank's own: it is not averaged"),
    ("ddp", "for handle in self.handles: handle.wait()", "pass", "it returns before the gradient is averaged"),
    ("ddp", "p.grad /= dist.get_world_size()", "p.grad /= 1 if p is self.module.fc[5].weight and p is self.module.fc[2].weight else 2",
     "tied weights: the gradient of fc.2.weight is the sum over the ranks"),
    ("ddp", SEND, SEND.replace("if p.requires_grad: ", ""), "frozen parameters: rank"),
    ("ddp", "for handle in self.handles: handle.wait()", "for p in self.module.parameters(): dist.all_reduce(p.grad * 0)",
     "a parameter without gradient: rank"),
    ("ddp", "for handle in self.handles: handle.wait()", "dist.get_rank() or dist.barrier()", "plain: rank 0 hangs at"),
    ("ddp", "return self.module(*inputs)", "return self.module(*inputs)[0]", "DIFFERS: plain"),
    ("ddp", "for t in module.buffers(): dist.broadcast(t, src=0)", "", "note: a buffer: the weights of shift, a buffer, are not sent from rank 0 at the start. This does not count"),
    ("ddp", "    def send(self, p):\n", "    def send(self, p):\n        if hasattr(self.module, 'shift'): return\n", "DIFFERS: a buffer"),
    ("ddp", "for t in module.buffers(): dist.broadcast(t, src=0)", "module.register_forward_pre_hook(lambda *_: None if [dist.broadcast(t, src=0) for t in module.buffers()] else None)",
     "| a buffer | 0.0e+00 "),
    ("ddp", "dist.broadcast(p.data, src=0)", "dist.broadcast(p.data, src=dist.get_rank())", "broadcast of [8, 8] from rank 0 on rank 0, and broadcast of [8, 8] from rank 1 on rank 1"),
    ("ddp", "        p.grad /= dist.get_world_size()\n", "        if dist.get_rank(): import ctypes; ctypes.string_at(0)\n        p.grad /= dist.get_world_size()\n", "rank 1 ended by signal 11"),
    ("ddp", "        p.grad /= dist.get_world_size()\n", "        self.sends = getattr(self, 'sends', 0) + 1\n        if self.sends > 24: return\n        p.grad /= dist.get_world_size()\n",
     "it is not averaged, from step 2 on"),
    ("ddp", "p.grad /= dist.get_world_size()", "p.grad /= 2", "three ranks: every gradient is the sum over the ranks divided by 2"),
    ("ddp", "dist.all_reduce(p.grad, async_op=True)", "dist.all_reduce(p.data, async_op=True)", "plain: backward changes fc.0.weight, fc.0.bias"),
    ("ddp", "        self.module, self.handles = module, []", "        self.__dict__['module'], self.handles = module, []",
     "plain: wrapper.parameters() does not give the module's"),
    ("ddp", "for p in module.parameters():\n            dist", "for p in list(module.parameters())[::1 - 2 * dist.get_rank()]:\n            dist",
     "collective 1 is broadcast of [8, 8] from rank 0 on rank 0, and broadcast of [7] from rank 0 on rank 1"),
    ("ddp", "        return self.module(*inputs)", "        for p in self.module.parameters(): p.grad = None\n        return self.module(*inputs)",
     "two backwards: every gradient is the last backward's alone"),
    ("ddp", "        p.grad /= dist.get_world_size()\n        self.handles.append(dist.all_reduce(p.grad, async_op=True))\n",
     "        self.handles.append(p)\n\n    def average(self, p):\n        p.grad /= dist.get_world_size()\n        return dist.all_reduce(p.grad, async_op=True)\n\n"
     "    def finish(self):\n        self.handles = [self.average(p) for p in self.handles]\n        self.finish_gradient_synchronization()\n\n"
     "    __getattribute__ = lambda self, name: super().__getattribute__('finish' if name == 'finish_gradient_synchronization' and self.handles "
     "and isinstance(self.handles[0], nn.Parameter) else name)\n", "note: plain: nothing is sent before backward has ended"),
    ("ddp", "def finish_gradient_synchronization(self):\n        for handle", "def done(self):\n        for handle", "has no finish_gradient_synchronization()"),
    ("ddp", "return self.module(*inputs)", "raise NotImplementedError", "not written yet: rank"),
    ("ddp", "        self.handles.append(dist.all_reduce(p.grad, async_op=True))", "        sent = p.grad.half()\n        dist.all_reduce(sent)\n        p.grad.copy_(sent)",
     "plain: every gradient is the mean, but rounded: it is sent in float16"),
    ("sharded", "for p, rank in self.owner.items(): dist.broadcast(p.data, src=rank)", "pass", "is not sent to the other rank after the step"),
    ("sharded", "for p, rank in self.owner.items(): dist.broadcast(p.data, src=rank)", "for p in self.owner: p.grad = p.grad if dist.get_rank() == 0 else None", "is not sent to the other rank"),
    ("sharded", "src=rank)", "src=0)", "never changes: no rank has it, or it is sent from a rank that does not"),
    ("sharded", "if self.owner[p] == dist.get_rank()]", "]", "the states are not sharded: each rank has those of all parameters"),
    ("sharded", "self.inner = self.make([mine])", "self.inner = self.make([group]); self.inner.__class__ = type('Own', (type(self.inner),), {})",
     "the states are not sharded: each rank has those of all parameters"),
    ("sharded", 'if key != "params"', "if key in ()", "a schedule: every weight keeps its first settings"),
    ("sharded", 'if key != "params"', "if key == 'eps'", "a schedule: every weight keeps its first settings: what is changed in param_groups"),
    ("sharded", 'if key != "params"', "if key not in ('params', 'lr')", "a schedule: every weight keeps its first lr"),
    ("sharded", 'if key != "params"', "if key not in ('params', 'weight_decay')", "a schedule: every weight keeps its first weight_decay"),
    ("sharded", "zip(self.param_groups, self.inner.param_groups)", "zip(self.param_groups[:1] * 9, self.inner.param_groups)",
     "two groups: fc.6.weight, fc.7.weight, fc.8.weight, fc.9.weight ... has the settings of another group"),
    ("sharded", "    def step(self):", "    def zero_grad(self, set_to_none=True): pass\n\n    def step(self):", "plain: zero_grad() leaves the gradients of"),
    ("sharded", "    def step(self):", "    def zero_grad(self): self.inner.zero_grad()\n\n    def step(self):", "plain: zero_grad() leaves the gradients of"),
    ("sharded", "len(self.owner) % dist.get_world_size()", "len(self.owner) % 2", "three ranks: a rank holds 51% of the states"),
    ("sharded", "len(self.owner) % dist.get_world_size()", "0", "plain: a rank holds 100% of the states; a fair share is 50%"),
    ("sharded", 'for p in group["params"]: self.owner[p] = len(self.owner) %', 'for i, p in enumerate(group["params"]): self.owner[p] = i %',
     "add_param_group: a rank holds 75% of the states"),
    ("sharded", "super().__init__(params, settings)", "list(params); super().__init__(params, settings)", "raised ValueError at"),
    ("sharded", "else: self.inner.add_param_group(mine)", "", "add_param_group: fc.6.weight, fc.7.weight, fc.8.weight, fc.9.weight ... never changes"),
    ("sharded", "        self.inner.step()", "        self.inner.state.clear(); self.inner.step()", "every weight is right after a step, but not after a later one"),
    ("sharded", "(groups, **settings)\n        super().__init__(params, settings)", '(groups, lr=settings["lr"])\n        super().__init__(params, {"lr": settings["lr"]})',
     "plain: every weight gets only lr of its keyword arguments"),
    ("sharded", "    def step(self):", "    def state_dict(self):\n        parts = [self.inner.state_dict()]\n        dist.broadcast_object_list(parts, src=0)\n"
     "        return parts[0]\n\n    def step(self):", "note: plain: state_dict() lacks states that its rank holds"),
    ("fsdp", "        dist.all_reduce(grad)", "        grad = grad.half()\n        dist.all_reduce(grad)\n        grad = grad.float()", "note: fp16: gradients are sent in float16"),
    ("fsdp", "            p.grad /= self.world", "            pass", "fp32: the gradient of norms.0.weight, norms.1.weight, norms.2.weight, norms.3.weight ... is the sum over the ranks"),
    ("fsdp", "            dist.all_reduce(p.grad)\n            p.grad /= self.world", "            pass", "the gradient of norms.0.weight, norms.1.weight, norms.2.weight, norms.3.weight ... is"),
    ("fsdp", "[self.rank] / self.world", "[self.rank]", "is the sum over the ranks instead of the mean"),
    ("fsdp", "p.grad = grad.chunk(self.world)[self.rank] / self.world", "p.grad = None", "after backward the gradient of embedding.weight, linears.0.weight, linears.1.weight, linears.2.weight ... is None"),
    ("fsdp", 'if not any(kind in type(layer).__name__ for kind in ("Linear", "Embedding")): continue', "continue", "the weights are not sharded"),
    ("fsdp", "self.module, self.dtype, self.layers = module, compute_dtype, {}", "self.module, self.dtype, self.layers = module, None, {}",
     "fp16: compute_dtype is not used: the weights are those of fp32"),
    ("fsdp", "        layer.weight.data = layer.shard\n\n    def put", "        layer.kept = layer.weight.data\n        layer.weight.data = layer.shard\n\n    def put",
     "fp32: after forward a rank holds"),
    ("fsdp", "[self.rank].clone()", "[self.rank]", "fp32: before the first step a rank holds"),
    ("fsdp", 'for kind in ("Linear", "Embedding")', 'for kind in ("Linear",)', "fp32: embedding.weight are not sharded"),
    ("fsdp", "self.full(layer, self.dtype or torch.float32)", "self.full(layer, torch.float32).to(self.dtype or torch.float32)",
     "note: fp16: weights are sent in float32; cast before they are gathered"),
    ("fsdp", "if layer.before is not None: p.grad += layer.before", "", "two backwards: the gradient of embedding.weight, linears.0.weight, linears.1.weight, "
     "linears.2.weight ... is the last backward's alone: what was there before it is lost"),
    ("fsdp", "        if layer.weight.shape == self.layers[layer]: return\n", "", "note: two forwards: rank"),
    ("fsdp", "        return self.module(x)", "        for layer in self.layers: self.gather(layer)\n        return self.module(x)", "they are gathered all at once"),
    ("fsdp", "self.world, self.rank = dist.get_world_size(), dist.get_rank()", "self.world, self.rank = dist.get_world_size(), dist.get_rank()\n        if compute_dtype: module.norms.half()",
     "fp16: norms.0.weight, norms.1.weight, norms.2.weight, norms.3.weight ... is float16; the weights that the optimizer steps stay float32"),
    ("fsdp", "layer.weight.data.chunk(self.world)[self.rank].clone()", "layer.weight.data.chunk(self.world)[1 - self.rank].clone()", "fp32: before the first step gather_full_params() does not give the module's"),
    ("fsdp", "        dist.all_reduce(grad)\n        p.grad = grad.chunk(self.world)[self.rank] / self.world", "        p.grad = grad.chunk(self.world)[self.rank].clone()", "is each rank's own rows of its own gradient: nothing is added"),
    ("fsdp", "out = dict(self.module.named_parameters())", "out = dict(self.named_parameters())", "the full weights lack"),
    ("fsdp", "def gather_full_params", "def nothing", "has no gather_full_params()"),
    ("fsdp", 'out[name + ".weight"] = self.full', 'out["x" + name] = self.full', "the full weights lack"),
]


def run_check(*words, python=(), **more):
    r = subprocess.run([sys.executable, *python, os.path.join(HERE, "check.py"), *words], capture_output=True, text=True, timeout=300, **more)
    return r.returncode, r.stdout, r.stderr


def options():
    """-S: no site-packages, so there is no torch."""
    code, out, err = run_check("--help", python=["-S", "-E", "-B"])
    count("passed" if code == 0 and "--kwargs" in out else "failed", "--help", f"exit code {code}, {err}")
    for words, names in [("", "what"), ("modle a:b", "modle"), ("model", "MODULE:NAME"), ("model nowhere", "nowhere"), ("model a:", "a:"),
                         ("model a:b --precision fp8", "--precision"), ("model a:b --num_heads 0", "--num_heads"),
                         ("model a:b --kwargs d_model", "KEY=VALUE"), ("attention a:b --kwargs d_model=8", "--kwargs"),
                         ("ddp a:b --num_heads 2", "--num_heads"), ("adamw a:b --precision bf16", "--precision"),
                         ("attention a:b --speed 3", "--speed")]:
        code, out, err = run_check(*words.split(), python=["-S", "-E", "-B"])
        good = code == 2 and err.count("\n") == 1 and names in err and not out
        count("passed" if good else "failed", f"check.py {words}", f"exit code {code}, {out}{err}")
    code, out, err = run_check("attention", "a:b", python=["-S", "-E", "-B"])
    count("passed" if code == 2 and "needs PyTorch" in out else "failed", "no PyTorch", f"exit code {code}, {out}{err}")


def solution_of(text):
    solution = types.ModuleType("solution")
    exec(text, solution.__dict__)
    return solution


def verdict(what, text, **more):
    """What check.py prints of this solution, and its verdict."""
    solution = solution_of(text)
    torch.manual_seed(1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if what == "attention": ok = check.check_attention(more.pop("attention", solution.attention), **{"context_length": 48, "head_size": 16} | more)
        elif what == "adamw": ok = check.check_adamw(more.pop("optimizer", solution.AdamW))
        else: ok = check.check_model(more.pop("model") if "model" in more else solution.TransformerLM(**MODEL), **{"context_length": 24} | more)
    return ok, printed.getvalue(), solution


def cached(ours, seen={}):
    """./cs336 gives the same on the same inputs, and most solutions here get the same."""
    def run(command, inputs, *options):
        key = pickle.dumps((command, options, [(n, k, t.detach().float().numpy().tobytes()) for n, ts in inputs.items() for k, t in ts.items()]))
        if key not in seen: seen[key] = ours(command, inputs, *options)
        return seen[key]
    return run


def ranks():
    """Before anything else runs here, so that the ranks are forked from a process without threads."""
    slow_package = tempfile.TemporaryDirectory()  # a course package that takes longer to import than a rank may hang
    os.mkdir(os.path.join(slow_package.name, "cs336_basics"))
    with open(os.path.join(slow_package.name, "cs336_basics", "model.py"), "w") as f:
        f.write("import time\ntime.sleep(5)\nfrom cs336_basics import nothing\n")
    sys.path.insert(0, slow_package.name)
    for what, name in [("ddp", "DDP"), ("sharded", "ShardedOptimizer"), ("fsdp", "FSDP")]:
        for kind, old, new, words in [(what, "", "", None), *RANK_MISTAKES]:
            if kind != what: continue
            assert not old or RANKS.count(old) == 1, old
            printed, known = io.StringIO(), check_ranks.KINDS[kind]
            # A mistake runs the first case, and that which its words name.
            wanted = [case for case in known[2] if words is None or case == known[2][0] or case in words]
            if "returns before" in str(words): wanted.append("a late rank")
            check_ranks.KINDS[kind] = *known[:2], wanted, known[3]
            seconds = 5 if "hangs" in str(words) else 15  # on a busy machine a rank that does not hang takes some
            with contextlib.redirect_stdout(printed):
                ok = check.verdict(check_ranks.check_ranks)(kind, getattr(solution_of(RANKS.replace(old, new) if old else RANKS), name), seconds)
            check_ranks.KINDS[kind] = known
            good = ok is True and "ok:" in printed.getvalue() if words is None else words in printed.getvalue()
            count("passed" if good else "failed", f"{kind}: {new.strip()} instead of {old.strip()}", f"expected '{words}', got {ok}:\n{printed.getvalue()}")
            if good and sys.argv[2:]: print(f"{kind}: {new.strip()}", *(line for line in printed.getvalue().splitlines() if line[:1] not in "|"), sep="\n    ", flush=True)
    sys.path.remove(slow_package.name)
    slow_package.cleanup()


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
    expect("AdamW", True, "ok: it is the AdamW of 2026's handout.", "adamw")
    expect("AdamW of 2025", True, "of 2025's handout, where the weight decays after", "adamw", SOLUTION.replace(DECAY + UPDATE, UPDATE + DECAY))
    class Bare:
        def __init__(self, params, **settings): self.step = torch.optim.AdamW(params, **settings).step
    expect("an optimizer without param_groups", None, "has no attribute 'param_groups'", "adamw", optimizer=Bare)
    expect("torch.optim.AdamW", True, "ok: it is the AdamW of torch.optim.AdamW", "adamw", optimizer=torch.optim.AdamW)
    for what, old, new, words in MISTAKES:
        assert SOLUTION.count(old) == 1, old
        expect(f"{what}: {new.strip()} instead of {old.strip()}", False, words, what, SOLUTION.replace(old, new))
    for what, changes, words in TWO:
        text = SOLUTION
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        for word in words: expect(f"{what}: two mistakes: {word}", False, word, what, text)
    halves = SOLUTION.replace(*MISTAKES[0][1:3])
    expect("bf16: dQ without its factor", False, "is looked for in fp32", "attention", SOLUTION.replace("return ds @ k,", "return ds @ k / ctx.scale,"), precision="bf16")
    expect("bf16: halves", False, MISTAKES[0][3], "model", halves, precision="bf16")


def attentions():
    """What students have: a part that is missing, or that the handout allows."""
    expect("a Function", True, "lse", "attention", SOLUTION.replace("attention = Flash.apply", "attention = Flash"))
    own_setup = ("        return o, L\n\n    @staticmethod\n    def setup_context(ctx, inputs, output):\n"
                 "        ctx.save_for_backward(*inputs[:3], *output)\n        ctx.causal, ctx.scale = inputs[3], 1 / inputs[0].shape[-1] ** 0.5\n")
    at, end = SOLUTION.index("        ctx.save_for_backward(q, k, v, o, L)"), SOLUTION.index("\n    @staticmethod\n    def backward(ctx, do)")
    with_setup = (SOLUTION[:at] + own_setup + SOLUTION[end:]).replace("forward(ctx, q", "forward(q").replace("backward(ctx, do)", "backward(ctx, do, dL)")
    expect("a Function with setup_context()", True, "| yes    | lse ", "attention", with_setup)
    expect("a Function with setup_context(), its mask wrong", False, "sees the key after its own", "attention", with_setup.replace("tril(0)", "tril(1)"))
    expect("no mask", True, "Without the mask: is_causal is ignored, which flash_forward (a) allows", "attention", SOLUTION.replace("if causal: s =", "if False: s ="))
    at = SOLUTION.index("        q, k, v, o, L = ctx.saved_tensors")
    todo = lambda line: SOLUTION[:at] + f"        {line}\n" + SOLUTION[SOLUTION.index("\nattention = Flash"):]
    part = "of what is there are within"
    for line in ("raise NotImplementedError", "pass", "return None, None, None, None"): expect(f"backward: {line}", True, part, "attention", todo(line))
    expect("backward to be done: lse", True, "| lse ", "attention", todo("raise NotImplementedError"))
    expect("backward raises", None, "backward raised ZeroDivisionError at <string>:", "attention", todo("1 / 0"))
    expect("forward wrong, backward to be done", False, "not written yet: backward", "attention", todo("raise NotImplementedError").replace("tril(0)", "tril(1)"))
    no_graph = SOLUTION.replace("attention = Flash.apply", "attention = torch.no_grad()(Flash.apply)")
    expect("without a grad_fn", True, "the output has no grad_fn", "attention", no_graph)
    later = SOLUTION.replace("if causal: s = torch.where(seen, s, -1e6)", "assert not causal")
    expect("no causal yet", True, "not written yet: forward with is_causal raised AssertionError", "attention", later)
    expect("causal raises", None, "forward with is_causal raised KeyError", "attention", later.replace("assert not causal", "causal and {}[0]"))
    save = "ctx.save_for_backward(q, k, v, o, L)"
    for new, words in [("ctx.save_for_backward(q, k, v, o); ctx.L = L", "no logsumexp is saved"), ("ctx.save_for_backward(q, k, v, o, L, L + 1)", "2 saved tensors are"),
                       ("ctx.save_for_backward(q, k, v, o, L[..., None])", "the logsumexp is saved as [4, 48, 1]")]:
        expect(new, None, words, "attention", SOLUTION.replace(save, new))
    masked = lambda q, k, v, mask=None: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    expect("a mask as the fourth argument", True, "ok: all", "attention", attention=masked)
    def narrow(q, k, v):
        if q.shape[-1] != 16: raise ValueError("16 alone")
        return torch.softmax(q @ k.mT / 4, -1) @ v
    def last(q, k, v, dropout_p=0.0, is_causal=False):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=is_causal)
    expect("is_causal as the fifth argument", True, "ok: all", "attention", attention=last)
    def exact(q, k, v, causal=False): return last(q.double(), k.double(), v.double(), is_causal=causal).to(q.dtype)
    expect("fp64, head size 128", True, "ok: all", "attention", attention=exact, head_size=128, context_length=128)
    strides = SOLUTION.replace("v, o, L = ctx.saved_tensors", "v, o, L = ctx.saved_tensors; do = do if do.is_contiguous() else 2 * do")
    expect("a dO that is not contiguous", True, "note: where dO is not contiguous", "attention", strides)
    with check.formulas.Seen() as seen: torch.empty(8)
    count("failed" if seen.values else "passed", "what torch.empty gives is not seen", "")
    expect("one head size alone", True, "not compared: forward at head size 32 raised ValueError", "attention", attention=narrow)
    expect("no fourth argument", True, "not compared: a causal mask", "attention", attention=lambda q, k, v: torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v)


def typed(words, folder):
    """(exit code, what check.py prints) in this process, which has PyTorch already."""
    here, path, printed = os.getcwd(), list(sys.path), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed): code = check.run(words)
    except Exception: code = traceback.print_exc(file=printed)
    finally:
        os.chdir(here)
        sys.path[:] = path
    return code, printed.getvalue()


def inputs():
    _, _, solution = verdict("model", SOLUTION)
    model = solution.TransformerLM(**MODEL)
    expect("_orig_mod. and module.", True, "what torch.compile was given is checked", "model", model=torch.compile(model))
    wrapper = torch.nn.Module()
    wrapper.module, wrapper.forward = model, lambda tokens: model(tokens) * 0
    expect("a wrapper that returns zeros", False, "the wrapper Module is checked as it is", "model", model=wrapper)
    expect("fp64", True, "float64", "model", model=solution.TransformerLM(**MODEL).double())
    half = solution.TransformerLM(**MODEL)
    for p in half.parameters(): p.data = p.data.half()
    expect("fp16 weights", True, "float16", "model", model=half)
    expect("fp16 buffers", None, "the buffer layers.0.attn.cos is rounded to float16", "model", model=half.half())
    last = SOLUTION.replace("self.lm_head(self.ln_final(x))", "self.lm_head(self.ln_final(x))[:, -1]")
    expect("the last position's logits", None, "cross_entropy of its logits [2, 97] raised", "model", last)
    expect("a batch that is too long", None, "forward of 30 tokens raised", "model", context_length=30)
    flat = SOLUTION.replace("self.ffn(self.ln2(x))", "self.ffn(self.ln2(x).flatten(0, 1)).view_as(x)")
    expect("a feed-forward layer of flattened tokens", True, "ok: all", "model", flat)
    tied = solution.TransformerLM(**MODEL)
    tied.lm_head.weight = tied.token_embeddings.weight
    expect("tied weights", False, "are one tensor", "model", model=tied)
    own = SOLUTION.replace("q_proj", "wq").replace("lm_head", "out")
    expect("names of its own", None, "check tests/adapters.py:run_transformer_lm", "model", own)
    with tempfile.TemporaryDirectory() as folder:
        path = lambda name: os.path.join(folder, name)
        with open(path("solution.py"), "w") as f: f.write(SOLUTION)
        with open(path("ranks.py"), "w") as f: f.write(RANKS)
        with open(path("adapters.py"), "w") as f: f.write(ADAPTERS)
        with open(path("own.py"), "w") as f: f.write(FUSED)
        with open(path("wrong.py"), "w") as f: f.write(FUSED.replace(" / math.sqrt(q.shape[-1])", ""))
        with open(path("theta.py"), "w") as f: f.write(SOLUTION.replace("d_ff, rope_theta, context_length) for", "d_ff, 1e4, context_length) for"))
        with open(path("renamed.py"), "w") as f: f.write(SOLUTION.replace("rope_theta", "theta"))
        with open(path("starts.py"), "w") as f: f.write(STARTS)
        lost = "class DDP(ranks.DDP):\n    def forward(self, *inputs):\n        for p in self.module.parameters(): p.grad = None\n        return super().forward(*inputs)\n"
        with open(path("skeleton.py"), "w") as f:
            f.write(ADAPTERS.replace("\ndef get_ddp", "\n" + lost + "def get_ddp").replace("ranks.DDP(module)", "DDP(module)")
                    + "def ddp_on_train_batch_start(model, optimizer): raise NotImplementedError\n")
        with open(path("listed.py"), "w") as f: f.write(SOLUTION.replace("return ds @ k, ds.mT @ q, p.mT @ do, None", "return [ds @ k, ds.mT @ q, p.mT @ do, None]"))
        with open(path("passed.py"), "w") as f: f.write(SOLUTION.replace("return ds @ k, ds.mT @ q, p.mT @ do, None", "pass"))
        with open(path("broken.py"), "w") as f: f.write("import argparse\nargparse.ArgumentParser().parse_args(['x'])\n")
        kwargs = ["--kwargs", *(f"{k}={v}" for k, v in MODEL.items())]
        for words, expected, names in [
                (["model", "solution:TransformerLM", *kwargs], 0, "batch [2, 24]"),
                (["model", "solution:TransformerLM"], 0, "ok: all"), (["attention", path("solution.py") + ":Flash"], 0, "lse"),
                (["model", "theta:TransformerLM"], 1, "theta of the rotary embedding is 10000 instead of 5000"),
                (["model", "renamed:TransformerLM", *kwargs, "theta=5000"], 0, "ok: all"),
                (["ddp", "adapters.py"], 0, "ok: get_ddp"), (["ddp", "starts.py"], 0, "note: two backwards: every gradient"),
                (["ddp", "skeleton.py"], 1, "Likely cause: two backwards: every gradient is the last backward's alone"),
                (["model", "adapters.py"], 0, "ok: all"), (["model", "own.py:run_transformer_lm"], 0, "ok: all"),
                (["model", "wrong.py:run_transformer_lm"], 1, "Likely cause: scores are not divided by sqrt(D)"), (["fsdp", "adapters.py"], 2, "not written yet: rank"),
                (["attention", "listed.py:Flash"], 2, "cannot be checked: backward raised RuntimeError"),
                (["attention", "passed.py:Flash"], 0, "not written yet: backward raised RuntimeError"),
                (["attention", "solution:nothing"], 2, "nothing"), (["attention", "nowhere:x"], 2, "PYTHONPATH"),
                (["attention", "broken:x"], 2, "import broken raised SystemExit at broken.py:2"),
                (["model", "solution:TransformerLM", "--kwargs", "a=1", "b=2"], 2, "got a, b, but it is TransformerLM(vocab_size, context_length"),
                (["model", "solution:TransformerLM", *kwargs, "--num_heads", "5"], 2, "--num_heads"),
                (["model", "solution:RMSNorm", "--kwargs", "d_model=8"], 2, "--num_heads")]:
            code, printed = typed(words, folder)
            count("passed" if code == expected and names in printed else "failed", " ".join(words), f"exit code {code}, {printed}")
        code, out, err = run_check("all", "adapters.py", cwd=folder)
        good = code == 0 and "ok: get_ddp" in out and "not written yet: rank" in out and "four ok, one not written yet" in out
        count("passed" if good else "failed", "check.py all adapters.py", f"exit code {code}, {out}{err}")


options()
try:
    import torch
    sys.path.insert(0, HERE)
    import check, check_ranks
except ImportError as e:
    count("skipped", f"{len(MISTAKES) + len(RANK_MISTAKES)} mistakes in a solution", f"no PyTorch: {e}")
else:
    torch.set_num_threads(1)
    ranks()
    check.cs336 = cached(check.cs336)
    solutions()
    attentions()
    inputs()
print(", ".join(f"{n} {result}" for result, n in counts.items()))
sys.exit(counts["failed"] > 0)
