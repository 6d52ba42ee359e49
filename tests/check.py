#!/usr/bin/env python3
"""tests/check.py: is your PyTorch model, optimizer or attention the handout's? It compares them with ./cs336.

  python3 tests/check.py model my_solution:TransformerLM --kwargs vocab_size=1000 context_length=64 d_model=64 \\
      num_layers=2 num_heads=4 d_ff=128 rope_theta=10000.0
  python3 tests/check.py model ... --optimizer my_solution:AdamW     also the weights after 3 steps
  python3 tests/check.py attention my_solution:attention             attention(q, k, v, causal), forward and backward

What stands before the colon is a module, or a .py file; behind it is a class, a function, or an object that is there.
In a notebook (its arguments are the options below):

  import sys; sys.path.append("/where/you/cloned/it/tests")
  from check import check_attention, check_model
  check_model(model, num_heads=4)            # prints the table and the verdict; returns whether all is ok

The model's parameters have the staff model's names. A copy of it gets random weights under which every mistake shows,
or those of --weights. Differences are relative: the norm of the difference over the norm of ours. Where something
differs, the handout's model is run with one usual mistake after the other; the one that gives what yours gives is
named. Exit code 0: all is ok; 1: something differs; 2: wrong usage. See notes/check-your-own.md."""
import argparse, ast, contextlib, copy, importlib, importlib.util, math, os, sys

try:
    import torch
    import torch.nn.functional as F
    from adapter import cs336, load
    no_torch = None
except ImportError as e:
    torch, no_torch = None, e

# A difference above its bound is no rounding. bf16 is autocast's, with roundings at other places than ours; tf32 is for
# what multiplies in TF32 on a GPU, as Triton's tl.dot does unless told otherwise.
BOUNDS = {"fp32": 2e-5, "tf32": 3e-3, "bf16": 5e-2}
SAME = 2e-5  # so near is a model with a mistake to yours, in fp32, if the mistake is yours
LR, DECAY = 1e-2, 0.01


class Usage(Exception):
    """Wrong usage: exit code 2."""


def note(text):
    print(f"note: {text}")


def difference(a, b):
    """The norm of a - b over the norm of b. What is not finite counts as equal where both have the same."""
    a, b = a.detach().double(), b.detach().double().to(a.device)
    same = (a == b) | (a.isnan() & b.isnan())
    apart, norm = torch.where(same, 0, a - b).norm().item(), torch.where(b.isfinite(), b, 0).norm().item()
    return 0.0 if same.all() else apart / norm if norm > 0 and math.isfinite(apart) else math.inf


def differs(x, bound):
    return not x <= bound


@contextlib.contextmanager
def matmuls(precision):
    """highest: fp32 without TF32; high: with it, on a GPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try: yield
    finally: torch.set_float32_matmul_precision(before)


def yours_in(precision):
    return matmuls("high" if precision == "tf32" else "highest")


# ----------------------------------------------------------------------------------------------------------------------
# The handout's model, and mistakes in it. B batch, T positions, C d_model, H heads, D head size

def attend(q, k, v, causal=True, scale=None, axis=-1, shift=0, fill=-math.inf, inverted=False):
    """shift: how many keys too many a query sees. fill: what a masked score becomes. inverted: the mask is the other way."""
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(shift)
        scores = scores.masked_fill(seen if inverted else ~seen, fill)
    return scores.softmax(axis) @ v


def rope(x, theta, halves=False, sign=1):
    T, D = x.shape[-2:]
    angle = torch.arange(T)[:, None] * float(theta) ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    cos, sin = angle.cos().to(x), sign * angle.sin().to(x)
    a, b = x.chunk(2, -1) if halves else (x[..., 0::2], x[..., 1::2])
    turned = (a * cos - b * sin, a * sin + b * cos)
    return torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2)


def reference(w, tokens, heads, theta, layers, **wrong):
    """{module: its output} in the order of forward, of that many layers. w: weights by name. wrong: one mistake."""
    out = {}
    core = {name: wrong[name] for name in ("scale", "axis", "shift", "fill", "inverted") if name in wrong}
    turn = {name: wrong[name] for name in ("halves", "sign") if name in wrong}

    def keep(name, x):
        out.setdefault(name, x)
        return x

    def linear(name, x):
        transposed = name.endswith(tuple(wrong.get("transposed", ())))
        return keep(name, x @ (w[name + ".weight"] if transposed else w[name + ".weight"].T))

    def norm(name, x):
        if "layer_norm" in wrong: x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + wrong.get("eps", 1e-5))
        return keep(name, x if "no_weight" in wrong else x * w[name + ".weight"])

    def attention(name, x):
        B, T, C = x.shape
        q, k, v = (linear(f"{name}.{p}_proj", x) for p in "qkv")
        if "cut" in wrong: q, k, v = (y.view(B, heads, T, C // heads) for y in (q, k, v))
        else: q, k, v = (y.view(B, T, heads, C // heads).transpose(1, 2) for y in (q, k, v))
        q, k, v = (rope(y, theta, **turn) if p in wrong.get("turned", "qk") else y for p, y in zip("qkv", (q, k, v)))
        o = attend(q, k, v, **core)
        return keep(name, linear(name + ".output_proj", (o if "join" in wrong else o.transpose(1, 2)).reshape(B, T, C)))

    def ffn(name, x):
        gate, value = (linear(f"{name}.{p}", x) for p in ("w1", "w3"))
        if "swapped" in wrong: gate, value = value, gate
        return keep(name, linear(name + ".w2", wrong.get("activation", F.silu)(gate) * value))

    x = keep("token_embeddings", w["token_embeddings.weight"][tokens])
    for i in range(layers):
        at = f"layers.{i}."
        if "post_norm" in wrong:
            x = norm(at + "ln1", x + attention(at + "attn", x))
            x = keep(f"layers.{i}", norm(at + "ln2", x + ffn(at + "ffn", x)))
        else:
            x = ("attn" not in wrong.get("alone", ())) * x + attention(at + "attn", norm(at + "ln1", x))
            ln2 = at + ("ln1" if "one_norm" in wrong else "ln2")
            x = keep(f"layers.{i}", ("ffn" not in wrong.get("alone", ())) * x + ffn(at + "ffn", norm(ln2, x)))
    linear("lm_head", x if "no_final_norm" in wrong else norm("ln_final", x))
    return out


def mistakes(w, heads, theta, first):
    """(what is to be changed in reference's arguments, the cause in words). first: the first module that differs"""
    C = w["token_embeddings.weight"].shape[1]
    D = C // heads
    yield dict(halves=True), "the rotary embedding turns x[i] with x[i + D/2] instead of x[2i] with x[2i + 1]"
    yield dict(halves=True, sign=-1), "the rotary embedding turns x[i] with x[i + D/2], and the other way"
    yield dict(sign=-1), "the rotary embedding turns the other way: the sign of sin is wrong"
    yield dict(turned=""), "there is no rotary embedding"
    yield dict(turned="q"), "only q gets the rotary embedding, and k does not"
    yield dict(turned="k"), "only k gets the rotary embedding, and q does not"
    yield dict(turned="qkv"), "v gets the rotary embedding, too; only q and k take it"
    for other in sorted({10, 100, 1000, 1e4, 1e5, 5e5, 1e6, theta ** 0.5} - {theta}):
        or_exponent = ", or its exponent lacks its factor 2: it is -2k/D" if other == theta ** 0.5 else ""
        yield dict(theta=other), f"theta of the rotary embedding is {other:g} instead of {theta:g}{or_exponent}"
    for other in range(1, C // 2 + 1):
        if other != heads and C % (2 * other) == 0: yield dict(heads=other), f"there are {other} heads instead of {heads}"
    for wrong in (dict(cut=True), dict(cut=True, join=True)):
        yield wrong, "heads are cut by view(B, H, T, D); the handout's by view(B, T, H, D).transpose(1, 2)"
    yield dict(join=True), "heads are joined without transpose(1, 2) before the reshape"
    yield from attention_mistakes(D)
    if C != D: yield dict(scale=C ** -0.5), "scores are divided by sqrt(d_model) instead of sqrt(D)"
    for other in (0, 1e-12, 1e-8, 1e-6, 1e-4, 1e-3):
        yield dict(eps=other), f"RMSNorm's eps is {other:g} instead of 1e-5"
    yield dict(layer_norm=True), "the norms subtract the mean, as LayerNorm does; RMSNorm does not"
    yield dict(no_weight=True), "the norms are not multiplied by their weight"
    yield dict(one_norm=True), "the FFN's norm is ln1 instead of ln2"
    yield dict(alone=["attn"]), "the residual is missing around attention: it is x + attn(ln1(x))"
    yield dict(alone=["ffn"]), "the residual is missing around the FFN: it is x + ffn(ln2(x))"
    yield dict(alone=["attn", "ffn"]), "both residuals of a block are missing: it is x + attn(ln1(x)), then x + ffn(ln2(x))"
    is_turned = "transposed: a Linear is x @ weight.T, and weight is [out, in]"
    square = [name[:-7] for name, p in w.items() if p.dim() == 2 and p.shape[0] == p.shape[1] and name.startswith("layers.0.")]
    for name in square:
        short = name.replace("layers.0", "")
        yield dict(transposed=[short]), f"each layer's {short[1:]}.weight is {is_turned}"
    yield dict(transposed=["_proj"]), f"each of attention's weights is {is_turned}"
    for name in square:
        name = name.replace("layers.0", ".".join(first.split(".")[:2]))
        yield dict(transposed=[name]), f"{name}.weight is {is_turned}"
    yield dict(swapped=True), "w1 and w3 are swapped: SwiGLU is w2(silu(w1 x) * w3 x)"
    yield dict(activation=F.gelu), "the activation is GELU instead of SiLU"
    yield dict(activation=F.relu), "the activation is ReLU instead of SiLU"
    yield dict(activation=torch.sigmoid), "the activation is the sigmoid s(x) instead of SiLU, x s(x)"
    yield dict(post_norm=True), "norms come after the residual sum; the handout's come before attention and before the FFN"
    yield dict(no_final_norm=True), "there is no norm before lm_head"


def attention_mistakes(D):
    yield dict(scale=1), "scores are not divided by sqrt(D)"
    yield dict(scale=1 / D), "scores are divided by D instead of sqrt(D)"
    yield dict(shift=1), "the causal mask is off by one: a query sees the key after its own"
    for fill in (-math.inf, -1e6, -1e9):
        yield dict(shift=-1, fill=fill), "the causal mask is off by one: a query does not see its own key"
    for fill in (-math.inf, -1e6, -1e9):
        yield dict(inverted=True, fill=fill), "the causal mask is inverted: a query sees only the keys after its own"
        yield dict(inverted=True, shift=-1, fill=fill), "the causal mask is inverted: a query sees its own key and those after it"
    yield dict(shift=1 << 30), "there is no causal mask"
    yield dict(axis=-2), "softmax runs over the queries instead of the keys: it takes dim=-1"
    yield dict(fill=0), "masked scores become 0; they have to become -inf before softmax"


def likely_causes(candidates, yours):
    """Of (cause, outputs by name) those whose outputs are all yours, the nearest first; and how near that is."""
    near = []
    for cause, out in candidates:
        apart = max((difference(yours[n], x) for n, x in out.items() if n in yours and yours[n].shape == x.shape), default=math.inf)
        if apart <= SAME: near.append((apart, cause))
    near.sort()
    return list(dict.fromkeys(cause for apart, cause in near if apart <= 3 * near[0][0] + 1e-6)), near[0][0] if near else None


def say_cause(causes, apart, what):
    if causes: print(f"Likely cause: {', or '.join(causes)}. ({what} with this mistake is {apart:.1e} from yours.)")
    else: print("No usual mistake alone explains it.")


def show(columns, rows):
    table = [columns, *rows]
    width = [max(map(len, column)) for column in zip(*table)]
    table.insert(1, ["-" * w for w in width])
    print(*("| " + " | ".join(f"{x:<{w}}" for x, w in zip(row, width)) + " |" for row in table), "", sep="\n")


# ----------------------------------------------------------------------------------------------------------------------
# Your model

def staff_name(name):
    """Without what torch.compile and DDP put before names, or between."""
    while name.startswith("module."): name = name[len("module."):]
    return name.replace("_orig_mod.", "")


def read_tensors(path, option):
    try:
        if not path.endswith((".pt", ".pth")): return load(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:
        raise Usage(f"{option}: got '{path}', takes a .safetensors, .pt or .pth file: {(str(e) or type(e).__name__).splitlines()[0]}")
    for name in ("model", "model_state_dict", "state_dict"):
        if isinstance(tensors, dict) and isinstance(tensors.get(name), dict):
            note(f"of {path} its '{name}' is read")
            tensors = tensors[name]
    if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise Usage(f"{option}: got '{path}', takes a file of tensors by name, such as a state_dict")
    return tensors


def expected_shapes(parameters):
    """Names and shapes that the handout's model of this size has, in the order of forward."""
    for name in ("token_embeddings.weight", "layers.0.ffn.w1.weight"):
        if name not in parameters or parameters[name].dim() != 2:
            few = ", ".join(list(parameters)[:6])
            raise Usage(f"the model has no matrix '{name}', takes the staff model's names (notes/check-your-own.md); yours: {few} ...")
    (V, C), w1 = parameters["token_embeddings.weight"].shape, parameters["layers.0.ffn.w1.weight"].shape
    d_ff = w1[0] if w1[1] == C else w1[1]
    shapes = {"token_embeddings": (V, C)}
    for i in range(len({n.split(".")[1] for n in parameters if n.startswith("layers.")})):
        at = f"layers.{i}."
        shapes |= {at + "ln1": (C,)} | {f"{at}attn.{p}_proj": (C, C) for p in ("q", "k", "v", "output")} | {at + "ln2": (C,)}
        shapes |= {at + "ffn.w1": (d_ff, C), at + "ffn.w3": (d_ff, C), at + "ffn.w2": (C, d_ff)}
    shapes |= {"ln_final": (C,), "lm_head": (V, C)}
    return {name + ".weight": shape for name, shape in shapes.items()}


def wrong_parameters(parameters, shapes):
    """What is wrong with names and shapes, so that nothing can be run; None: nothing."""
    for name, shape in shapes.items():
        if name not in parameters: return f"there is no parameter {name}; the handout's model has one"
        found = tuple(parameters[name].shape)
        if found == shape: continue
        turned = "; it is transposed: a Linear is x @ weight.T, and weight is [out, in]" if found == shape[::-1] else ""
        return f"{name} is {list(found)} instead of {list(shape)}{turned}"
    more = [name for name in parameters if name not in shapes]
    if more:
        is_norm = ".ln" in "." + more[0]
        why = "" if "bias" not in more[0] else ": its norms are RMSNorms, without bias" if is_norm else ": its Linear has no bias"
        return f"{more[0]} is a parameter that the handout's model does not have{why}"
    tied = {}
    for name, p in parameters.items():
        if tied.setdefault(p.data_ptr(), name) != name:
            return f"{name} and {tied[p.data_ptr()]} are one tensor; the handout's model does not tie them"


def random_weights(shapes):
    """Under which every mistake shows: with embeddings as small as these, RMSNorm's eps, too."""
    g = torch.Generator().manual_seed(336)
    normal = lambda shape, std: torch.randn(shape, generator=g) * std
    for name, shape in shapes.items():
        if len(shape) == 1: yield name, 1 + normal(shape, 0.1)
        else: yield name, normal(shape, 0.02 if "embeddings" in name else (2 / sum(shape)) ** 0.5)


def set_weights(model, parameters, shapes, given):
    if given is None: given = dict(random_weights(shapes))
    given = {staff_name(name): t for name, t in given.items()}
    missing = [name for name in shapes if name not in given]
    if missing: raise Usage(f"--weights: there is no tensor '{missing[0]}', takes the model's state_dict")
    more = [name for name in given if name not in shapes]
    if more: note(f"not compared, as the handout's model has no such weight: {', '.join(more[:4])}{' ...' if more[4:] else ''}")
    cast = {str(given[name].dtype)[6:] for name in shapes} - {"float32"}
    if cast: note(f"weights of {', '.join(sorted(cast))} are compared as float32")
    with torch.no_grad():
        for name, shape in shapes.items():
            if tuple(given[name].shape) != shape: raise Usage(f"--weights: {name} is {list(given[name].shape)}, takes {list(shape)}")
            parameters[name].copy_(given[name])


def batch_of(tokens, targets, V, T):
    g = torch.Generator().manual_seed(337)
    if tokens is None: tokens = torch.randint(V, (2, T), generator=g)
    if targets is None: targets = torch.randint(V, tokens.shape, generator=g)
    if tokens.dim() == 1:
        note("a batch of one dimension is taken as one sequence")
        tokens, targets = tokens[None], targets[None]
    if tokens.dim() != 2 or tokens.shape != targets.shape: raise Usage("--batch: takes tokens and targets of one shape, [B, T] or [T]")
    if tokens.is_floating_point() or targets.is_floating_point(): raise Usage("--batch: takes whole numbers")
    if (targets == -100).any():
        note(f"{int((targets == -100).sum())} targets of -100 become token 0 on both sides: ./cs336 masks none, so the model is "
             "checked, and not your loss's mask")
        targets = targets.masked_fill(targets == -100, 0)
    for name, t in (("tokens", tokens), ("targets", targets)):
        if t.numel() == 0 or t.min() < 0 or t.max() >= V: raise Usage(f"--batch: {name} are not from 0 to {V - 1}")
    return tokens.long(), targets.long()


def longest_that_runs(model, tokens):
    """How many of these tokens the model takes, found by bisection; 0: not even one."""
    def runs(T):
        try:
            with torch.no_grad(): model(tokens[:, :T])
        except Exception: return False
        return True

    low, high = 0, tokens.shape[1]  # it runs with low, and not with high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return low


def run_yours(model, names, tokens, targets, autocast):
    """{module: its first output} of those that were called, {module: calls}, the loss; the gradients are in the parameters."""
    out, modules = {}, {staff_name(name): m for name, m in model.named_modules()}
    calls = {name: 0 for name in names if name in modules}

    def keep(name):
        def hook(module, inputs, output):
            calls[name] += 1
            if isinstance(output, torch.Tensor) and name not in out: out[name] = output.detach().clone()
        return hook

    hooks = [modules[name].register_forward_hook(keep(name)) for name in calls]
    model.zero_grad(set_to_none=True)
    try:
        with autocast: logits = model(tokens)
    except Exception as e:
        T, longest = tokens.shape[1], longest_that_runs(model, tokens)
        if longest == 0: raise  # it is your code's
        raise Usage(f"the model takes {longest} tokens and fails with {T}: takes context_length={longest} or less") from e
    finally:
        for h in hooks: h.remove()
    if isinstance(logits, (tuple, list)):
        note("of what the model returns, the first is taken as the logits")
        logits = logits[0]
    if logits.numel() == targets.numel() * logits.shape[-1]: logits = logits.reshape(*targets.shape, -1)
    loss = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())
    loss.backward()
    return out | {"lm_head": logits.detach()}, calls, loss.detach()


def part_of(name):
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else name.split(".")[0]


def table_of(columns, bound, every):
    """A row per part of the model with the worst of each column, or per tensor. columns: {title: {tensor: difference}}"""
    parts = {}
    for title, numbers in columns.items():
        for name, x in numbers.items():
            parts.setdefault(name if every else part_of(name), {}).setdefault(title, []).append((x, name))
    rows = []
    for part, cells in parts.items():
        worst = {title: max(cell) for title, cell in cells.items()}
        inside = lambda name: name.removesuffix(".weight")[len(part):].lstrip(".")
        bad = any(differs(x, bound) for x, _ in worst.values())
        texts = [f"{worst[t][0]:.1e}" + (f" {inside(worst[t][1])}".rstrip() if differs(worst[t][0], bound) else "") if t in worst
                 else "-" for t in columns]
        rows.append([part, *texts, "DIFFERS" if bad else "ok"])
    show(["part", *columns, f"bound {bound:g}"], rows)


@matmuls("highest")
def check_model(model, num_heads, rope_theta=10000.0, weights=None, tokens=None, targets=None, context_length=32,
                precision="fp32", optimizer=None, adamw="handout", steps=3, device="auto", every=False):
    """Compares a copy of the nn.Module with ./cs336; prints and returns the verdict. Its arguments are the options."""
    for wrapper in ("module", "_orig_mod"): model = getattr(model, wrapper, model)  # DDP's, torch.compile's
    model = copy.deepcopy(model)
    kinds = {str(p.dtype)[6:] for p in model.parameters()} - {"float32"}
    if kinds: note(f"a copy of the model runs in float32 instead of {', '.join(sorted(kinds))}")
    model = model.float().eval()
    parameters = {staff_name(name): p.requires_grad_() for name, p in model.named_parameters(remove_duplicate=False)}
    buffers = sorted({staff_name(name).split(".")[-1] for name, _ in model.named_buffers()})
    if buffers: note(f"buffers are not compared: {', '.join(buffers)}")
    shapes = expected_shapes(parameters)
    wrong = wrong_parameters(parameters, shapes)
    if wrong:
        print(f"DIFFERS before anything is run: {wrong}.")
        return False
    (V, C), layers = shapes["token_embeddings.weight"], (len(shapes) - 3) // 9
    if num_heads < 1 or C % (2 * num_heads):
        raise Usage(f"--num_heads: got {num_heads}, takes a number that cuts d_model {C} into heads of even size")
    set_weights(model, parameters, shapes, weights)
    tokens, targets = batch_of(tokens, targets, V, context_length)
    here = next(iter(parameters.values())).device
    tokens, targets = tokens.to(here), targets.to(here)
    w = {name: parameters[name].detach().clone() for name in shapes}
    if optimizer is not None and precision != "fp32": raise Usage(f"--optimizer: got with --precision {precision}, takes fp32")
    if optimizer is None: steps = 0

    def ours(weights, steps, precision="fp32"):
        return cs336("model", {"weights": weights, "batch": {"tokens": tokens, "targets": targets}}, "--num_heads", num_heads,
                     "--rope_theta", rope_theta, "--device", device, "--precision", precision, "--lr", LR,
                     *(["--steps", steps] if steps else []))

    with torch.no_grad(): right = reference(w, tokens, num_heads, rope_theta, layers)
    autocast = torch.autocast(here.type, torch.bfloat16, enabled=precision == "bf16")
    with yours_in(precision): out, calls, loss = run_yours(model, right, tokens, targets, autocast)
    gradients = {name: parameters[name].grad for name in shapes}
    unused = [name for name, g in gradients.items() if g is None]
    if unused: note(f"no gradient reaches {', '.join(unused[:4])}{' ...' if unused[4:] else ''}")
    theirs, bound = ours(w, steps if adamw == "handout" else 0, "bf16" if precision == "bf16" else "fp32"), BOUNDS[precision]
    if differs(difference(right["lm_head"], theirs["logits"]), BOUNDS["bf16" if precision == "bf16" else "fp32"]):
        raise RuntimeError("./cs336 and the model in tests/check.py differ: please report it")
    apart = lambda a, b: difference(a, b) if a is not None and a.shape == b.shape and bool(a.isfinite().all()) else math.inf
    outputs = {name: apart(out[name], x) for name, x in right.items() if name in out}
    outputs["lm_head"] = apart(out["lm_head"], theirs["logits"])
    outputs["loss"] = apart(loss, theirs["loss"])
    columns = {"output": outputs, "gradient": {name: apart(g, theirs["grad." + name]) for name, g in gradients.items()}}
    print(f"\n{type(model).__name__}: {layers} layers, d_model {C}, {num_heads} heads, vocabulary {V}; batch {list(tokens.shape)}, "
          f"{precision}, {'random' if weights is None else 'your'} weights. Relative differences from ./cs336:\n")
    if optimizer is not None:
        columns[f"after {steps} steps"], causes = steps_of_yours(optimizer, adamw, steps, parameters, w, theirs, ours)
    table_of(columns, bound, every)
    ok = not any(differs(x, bound) for numbers in columns.values() for x in numbers.values())
    first = next((name for name, x in outputs.items() if differs(x, bound)), None)
    worst = next((name for name, x in reversed(columns["gradient"].items()) if differs(x, bound)), None)
    if first:
        explain_outputs(first, outputs, out, w, tokens, num_heads, rope_theta, layers, precision, model, targets)
        say_calls(calls)
    elif worst:
        print(f"DIFFERS. Forward agrees. The first gradient that differs, in the order of backward, is that of {worst}. Is there a "
              "backward of your own, a detach(), or a weight that is used twice?")
    if optimizer is not None and any(differs(x, bound) for x in columns[f"after {steps} steps"].values()):
        print(f"DIFFERS. After {steps} steps on our gradients (lr {LR}, betas 0.9 and 0.999, eps 1e-8, weight decay {DECAY}).")
        say_cause(*causes, "AdamW")
    if ok: print(f"ok: all relative differences are within {bound:g}, {precision}'s bound.")
    return ok


def say_calls(calls):
    """A forward calls each module once."""
    few = lambda names: ", ".join(names[:4]) + (" ..." if names[4:] else "")
    often, never = [n for n, c in calls.items() if c > 1], [n for n, c in calls.items() if c == 0]
    if often: print(f"Called more than once (the table has the first call's output): {few(often)}.")
    if never: print(f"Never called: {few(never)}.")


def explain_outputs(first, outputs, out, w, tokens, heads, theta, layers, precision, model, targets):
    before = list(outputs)[:list(outputs).index(first)]
    print(f"DIFFERS. The first module that differs, in the order of forward, is {first}"
          + (f"; all up to {before[-1]} agree." if before else "; no module before it was seen."))
    if precision != "fp32": out, _, _ = run_yours(model, list(out), tokens, targets, contextlib.nullcontext())
    with torch.no_grad():
        depth = min(int(first.split(".")[1]) + 1, layers) if first.startswith("layers.") else layers
        tried = ((dict(heads=heads, theta=theta, layers=layers) | wrong, cause) for wrong, cause in mistakes(w, heads, theta, first))
        # Up to the first layer that differs, it is quick to see which mistakes to run in full.
        seen = {name: x for name, x in out.items() if depth == layers or name not in ("ln_final", "lm_head")}
        near = [(a, cause) for a, cause in tried if likely_causes([(cause, reference(w, tokens, **a | dict(layers=depth)))], seen)[0]]
        causes, apart = likely_causes(((cause, reference(w, tokens, **a)) for a, cause in near), out)
    say_cause(causes, apart, "The handout's model")


# ----------------------------------------------------------------------------------------------------------------------
# Your optimizer

def adamw_rule(p, gradients, form="handout", correct=True, decay="before", root=False, betas=(0.9, 0.999)):
    """p after a step for each of the gradients, in double."""
    (b1, b2), p, m, v = betas, p.double(), 0, 0
    for t, g in enumerate(gradients, 1):
        g = g.double() + (DECAY * p if decay == "l2" else 0)
        if decay == "before": p = p * (1 - LR * DECAY)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        c1, c2 = (1 - b1 ** t, 1 - b2 ** t) if correct else (1, 1)
        with_eps = lambda v: (v + 1e-8).sqrt() if root else v.sqrt() + 1e-8
        p = p - LR * (m / c1 / with_eps(v / c2) if form == "torch" else c2 ** 0.5 / c1 * m / with_eps(v))
        if decay == "after": p = p * (1 - LR * DECAY)
    return p


def optimizer_mistakes(adamw):
    other = {"handout": "torch", "torch": "handout"}[adamw]
    where = {"handout": "eps is added to sqrt(v) before the bias correction, as in the handout",
             "torch": "eps is added after the bias correction, as torch.optim.AdamW does"}
    yield dict(form=other), f"{where[other]}: check it with --adamw {other}"
    for form in (adamw, other):
        yield dict(form=form, correct=False), "there is no bias correction"
        yield dict(form=form, decay="after"), "the weight decays after the step instead of before it"
        yield dict(form=form, decay="l2"), "weight decay is added to the gradient (Adam with L2) instead of to the weight"
        yield dict(form=form, decay="none"), "there is no weight decay"
        yield dict(form=form, root=True), "eps stands inside the square root"
        yield dict(form=form, betas=(0.999, 0.9)), "the betas are swapped: m takes 0.9 and v takes 0.999"


def steps_of_yours(optimizer, adamw, steps, parameters, w, theirs, ours):
    """({weight: difference of its change}, likely causes). Your optimizer gets ./cs336's gradients, so that only it is checked.

    AdamW's first step depends on a gradient's sign alone, which rounding decides where a gradient is nearly 0. So elements
    are compared whose gradients are 0 in each step, or at least a tenth of the tensor's rms."""
    with torch.no_grad():
        for name in w: parameters[name].copy_(w[name])
    stepper = lambda make: make(list(parameters.values()), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY)
    step, gradients, result = stepper(optimizer), [], theirs
    for t in range(steps):
        if t: result = ours({name: parameters[name] for name in w}, 0)
        gradients.append({name: result["grad." + name].to(parameters[name].device) for name in w})
        for name in w: parameters[name].grad = gradients[-1][name].clone()
        step.step()
    yours = {name: parameters[name].detach().clone() for name in w}
    if adamw == "handout": right = {name: theirs["param." + name] for name in w}
    else:
        with torch.no_grad():
            for name in w: parameters[name].copy_(w[name])
        step = stepper(torch.optim.AdamW)
        for g in gradients:
            for name in w: parameters[name].grad = g[name].clone()
            step.step()
        right = {name: p.detach() for name, p in parameters.items()}
    clear = {}
    for name in w:
        g = torch.stack([g[name] for g in gradients])
        rms = g.square().flatten(1).mean(1).sqrt().view(-1, *[1] * (g.dim() - 1))
        clear[name] = (g.abs() > 0.1 * rms).all(0) | (g == 0).all(0)
    change = lambda name, p: (p.to(w[name].device).double() - w[name].double()).masked_select(clear[name])
    numbers = {name: difference(change(name, yours[name]), change(name, right[name])) for name in w}
    tried = ((cause, {name: change(name, adamw_rule(w[name], [g[name] for g in gradients], **{"form": adamw} | wrong)) for name in w})
             for wrong, cause in optimizer_mistakes(adamw))
    bad = any(differs(x, SAME) for x in numbers.values())
    return numbers, likely_causes(tried, {name: change(name, yours[name]) for name in w}) if bad else ([], None)


# ----------------------------------------------------------------------------------------------------------------------
# Your attention

def wrong_backwards(q, k, v, do, causal):
    """(cause, {dq, dk, dv}): forward is right, backward has one mistake."""
    scale, o = q.shape[-1] ** -0.5, attend(q, k, v, causal)
    scores = q @ k.transpose(-1, -2) * scale
    seen = torch.ones_like(scores, dtype=torch.bool).tril() if causal else torch.ones_like(scores, dtype=torch.bool)
    L = scores.masked_fill(~seen, -math.inf).logsumexp(-1, keepdim=True)
    masked, plain = (scores - L).exp() * seen, (scores - L).exp()

    def gradients(p=masked, delta=1, scale=scale):
        ds = p * (do @ v.transpose(-1, -2) - delta * (do * o).sum(-1, keepdim=True)) * scale
        return {"dq": ds @ k, "dk": ds.transpose(-1, -2) @ q, "dv": p.transpose(-1, -2) @ do}

    yield "backward lacks D = rowsum(dO * O): dS = P * (dP - D)", gradients(delta=0)
    yield "dQ and dK lack the factor 1/sqrt(D)", gradients(scale=1)
    if causal: yield "backward recomputes P without the causal mask", gradients(p=plain)


@matmuls("highest")
def check_attention(attention, precision="fp32", batch_size=4, context_length=128, head_size=64, num_heads=None, device="auto"):
    """Compares attention(q, k, v, causal) with ./cs336, forward and backward; prints and returns the verdict.

    q, k and v are [B, S, D], as in the public tests, or with num_heads [B, H, S, D]. Instead of the function it also takes a
    torch.autograd.Function. Where this saves the logsumexp, the logsumexp is compared, too."""
    if isinstance(attention, type) and issubclass(attention, torch.autograd.Function): attention = attention.apply
    here = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(338)
    shape = [batch_size, *([num_heads] if num_heads else []), context_length, head_size]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    q, k, v, do = (torch.randn(shape, generator=g).to(here, dtype) for _ in range(4))
    bound, rows, causes, good, backward = BOUNDS[precision], [], {}, True, True
    for causal in (False, True):
        qkv = [t.clone().requires_grad_() for t in (q, k, v)]
        theirs = cs336("attention", {"inputs": {"q": q, "k": k, "v": v, "do": do}}, "--device", device, *["--causal"][:causal])
        with yours_in(precision): o = attention(*qkv, causal)
        if not isinstance(o, torch.Tensor) or o.shape != q.shape:
            raise Usage(f"attention: takes a function that returns a tensor of {shape}")
        saved = getattr(o.grad_fn, "saved_tensors", None) or ()
        lse = [t for t in saved if t is not None and list(t.shape) == shape[:-1]]
        yours = {"o": o.detach()} | ({"lse": lse[0]} if len(lse) == 1 else {})
        backward = backward and o.grad_fn is not None
        try:
            with yours_in(precision):
                if backward: o.backward(do)
        except NotImplementedError: backward = False
        if backward: yours |= {name: t.grad for name, t in zip(("dq", "dk", "dv"), qkv)}
        apart = lambda a, b: difference(a, b) if a is not None and bool(a.isfinite().all()) else math.inf
        numbers = {name: apart(t, theirs[name]) for name, t in yours.items()}
        rows += [["yes" if causal else "no", name, f"{x:.1e}", "DIFFERS" if differs(x, bound) else "ok"]
                 for name, x in numbers.items()]
        if not any(differs(x, bound) for x in numbers.values()): continue
        good = False
        if differs(numbers["o"], bound):
            if precision == "bf16": yours = {"o": attention(q.float(), k.float(), v.float(), causal).detach()}
            wide = [t.float() for t in (q, k, v)]
            tried = ((cause, {"o": attend(*wide, **dict(causal=causal) | wrong)}) for wrong, cause in attention_mistakes(head_size))
            causes[causal] = likely_causes(tried, {"o": yours["o"]})
        elif differs(numbers.get("lse", 0), bound):
            base_2 = "the saved logsumexp is in base 2, as exp2 takes it; the handout's L is in base e, ln 2 times that"
            causes[causal] = likely_causes([(base_2, {"lse": theirs["lse"] / math.log(2)})], yours)
        elif precision != "bf16" and not any(t is None for t in yours.values()):
            causes[causal] = likely_causes(wrong_backwards(q, k, v, do, causal), {name: yours[name] for name in ("dq", "dk", "dv")})
        else: causes[causal] = [], None
    print(f"\nattention: {shape}, {precision}. Relative differences from ./cs336:\n")
    show(["causal", "tensor", "difference", f"bound {bound:g}"], rows)
    if not backward: print("backward is not there yet: only forward was checked")
    if good: print(f"ok: all relative differences are within {bound:g}, {precision}'s bound.")
    else:
        print("DIFFERS, " + " and ".join("causal" if c else "not causal" for c in causes) + ".")
        # A mistake that is no mask's shows without a mask; a mask's is seen only where it is used.
        say_cause(*causes[min(causes)], "Attention by its formula")
        worst = max(float(row[2]) for row in rows)
        if here == "cuda" and precision == "fp32" and worst <= BOUNDS["tf32"]:
            print("The difference is of TF32's size: for fp32, tl.dot takes input_precision='ieee'. --precision tf32 allows it.")
    return good


# ----------------------------------------------------------------------------------------------------------------------
# Options. They are read also where there is no torch.

class Parser(argparse.ArgumentParser):
    def error(self, message): raise Usage(message)


def whole(low):
    def read(text):
        if not text.isdigit() or int(text) < low: raise argparse.ArgumentTypeError(f"got '{text}', takes a whole number from {low}")
        return int(text)
    return read


def positive(text):
    try: value = float(text)
    except ValueError: value = math.nan
    if not 0 < value < math.inf: raise argparse.ArgumentTypeError(f"got '{text}', takes a finite number greater than 0")
    return value


def place(text):
    if not all(text.rpartition(":")): raise argparse.ArgumentTypeError(f"got '{text}', takes MODULE:NAME or FILE.py:NAME")
    return text


def key_value(text):
    key, equals, value = text.partition("=")
    if not key.isidentifier() or not equals: raise argparse.ArgumentTypeError(f"got '{text}', takes KEY=VALUE")
    try: return key, ast.literal_eval(value)
    except (ValueError, SyntaxError): return key, value


def parse(words):
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, prog="check.py")
    p.add_argument("what", choices=["model", "attention"])
    p.add_argument("yours", type=place, metavar="MODULE:NAME", help="e.g. my_solution:TransformerLM, or folder/my_solution.py:attention")
    p.add_argument("--precision", choices=list(BOUNDS), default="fp32", help="bf16: yours under autocast; tf32: fp32 with a wider bound")
    p.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto takes a GPU if any")
    p.add_argument("--num_heads", type=whole(1), metavar="H", help="model: if it is not in --kwargs; attention: [B, H, S, D]")
    p.add_argument("--context_length", type=whole(2), metavar="S", help="default 32, or less if --kwargs has less; attention: 128")
    m = p.add_argument_group("model")
    m.add_argument("--kwargs", type=key_value, nargs="+", default=[], metavar="KEY=VALUE", help="what your class is called with")
    m.add_argument("--rope_theta", type=positive, metavar="X", help="default 10000, or that of --kwargs")
    m.add_argument("--weights", metavar="FILE", help="a state_dict, .pt, .pth or .safetensors; default: random weights")
    m.add_argument("--batch", metavar="FILE", help="tokens and targets, [B, T] or [T]; default: random ones")
    m.add_argument("--optimizer", type=place, metavar="MODULE:NAME", help="your AdamW, e.g. my_solution:AdamW")
    m.add_argument("--adamw", choices=["handout", "torch"], help="which AdamW it should be: eps before or after the bias correction")
    m.add_argument("--steps", type=whole(1), metavar="N", help="of the optimizer, default 3")
    m.add_argument("--every", action="store_true", help="a row per tensor instead of per layer")
    a = p.add_argument_group("attention")
    a.add_argument("--batch_size", type=whole(1), metavar="B", help="default 4")
    a.add_argument("--head_size", type=int, choices=[16, 32, 64, 80, 128], help="default 64")
    o = p.parse_args(words)
    for group, other in ((m, "attention"), (a, "model")):
        for action in group._group_actions:
            if o.what == other and getattr(o, action.dest) != action.default:
                raise Usage(f"--{action.dest}: got with '{other}', takes '{group.title}'")
    if o.optimizer is None and (o.adamw or o.steps): raise Usage(f"--{'adamw' if o.adamw else 'steps'}: takes --optimizer with it")
    for option in ("weights", "batch"):
        if getattr(o, option) and not os.path.isfile(getattr(o, option)):
            raise Usage(f"--{option}: got '{getattr(o, option)}', takes a file that is there")
    return o


def find(text):
    """The object that MODULE:NAME or FILE.py:NAME names."""
    where, _, name = text.rpartition(":")
    try:
        if where.endswith(".py"):
            sys.path.insert(0, os.path.dirname(os.path.abspath(where)))
            where = os.path.basename(where)[:-3]
        module = importlib.import_module(where)
    except ImportError as e: raise Usage(f"got '{text}', takes a module that can be imported: {e}")
    if not hasattr(module, name): raise Usage(f"got '{text}', but {module.__file__} has no '{name}'")
    return getattr(module, name)


def main(words):
    o = parse(words)
    if torch is None: raise Usage(f"needs PyTorch (pip install torch): {no_torch}")
    if o.device == "cuda" and not torch.cuda.is_available(): raise Usage("--device: got 'cuda', but torch sees no GPU")
    sys.path.insert(0, os.getcwd())
    typed = lambda *names: {name: getattr(o, name) for name in names if getattr(o, name) is not None}
    yours = find(o.yours)
    if o.what == "attention":
        if not callable(yours): raise Usage(f"got '{o.yours}', takes a function")
        return check_attention(yours, **typed("precision", "device", "num_heads", "context_length", "batch_size", "head_size"))
    kwargs = dict(o.kwargs)
    torch.manual_seed(0)
    if not isinstance(yours, torch.nn.Module):
        try: yours = yours(**kwargs)
        except TypeError as e: raise Usage(f"--kwargs: {o.yours} does not take them: {e}")
    if not isinstance(yours, torch.nn.Module): raise Usage(f"got '{o.yours}', takes an nn.Module, or what makes one")
    if o.device != "cpu" and torch.cuda.is_available(): yours.to("cuda")
    more = typed("context_length", "rope_theta", "precision", "adamw", "steps", "device", "every")
    more.setdefault("context_length", min(32, kwargs.get("context_length", 32)))
    more.setdefault("rope_theta", kwargs.get("rope_theta", kwargs.get("theta", 10000.0)))
    heads = o.num_heads or kwargs.get("num_heads")
    if not isinstance(heads, int): raise Usage("--num_heads: takes the number of heads, here or in --kwargs")
    if o.weights: more["weights"] = read_tensors(o.weights, "--weights")
    if o.batch:
        batch = read_tensors(o.batch, "--batch")
        if set(batch) != {"tokens", "targets"}: raise Usage(f"--batch: got {', '.join(batch)} in '{o.batch}', takes tokens and targets")
        more |= batch
    if o.optimizer: more["optimizer"] = find(o.optimizer)
    return check_model(yours, heads, **more)


if __name__ == "__main__":
    try: sys.exit(0 if main(sys.argv[1:]) else 1)
    except Usage as e: wrong, code = e, 2
    except RuntimeError as e:
        if not str(e).startswith("./cs336"): raise  # it is your code's
        wrong, code = e, 1
    print(f"check.py: {wrong}", file=sys.stderr)
    sys.exit(code)
