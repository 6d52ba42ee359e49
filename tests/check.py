#!/usr/bin/env python3
"""tests/check.py: is your own PyTorch solution right? It compares yours with ./cs336.

  python3 tests/check.py all tests/adapters.py                 every part that the assignment's adapters name
  python3 tests/check.py model my_solution:TransformerLM       outputs, loss and gradients
  python3 tests/check.py attention my_solution:FlashAttention  a torch.autograd.Function, or attention(q, k, v, causal)
  python3 tests/check.py adamw my_solution:AdamW               the weights after three steps
  python3 tests/check.py ddp my_solution:DDP                   two ranks on the CPU beside one process; sharded, fsdp

Type it in your assignment's folder. Before the colon stands a module or a .py file; behind it a class, a function or an
object. Of an adapters.py the course's functions are taken, such as get_ddp or assignment 1's run_transformer_lm.
In a notebook there are check_model, check_attention, check_adamw, check_ddp, check_sharded and check_fsdp.

Differences are relative: the norm of the difference over the norm of ours. Where something differs, ours is run with
one usual mistake after the other, then with two; those that give what yours gives are named. The verdict is one of
three: ok (exit code 0); DIFFERS, with the first place and the cause (1); cannot be checked, with what to write (2).
See notes/check-your-own.md. CS336_BINARY names another program than the ./cs336 above this folder."""
import argparse, ast, contextlib, copy, ctypes, dataclasses, functools, importlib, importlib.metadata, inspect
import itertools, json, math, os, subprocess, sys, tempfile, time, traceback, typing

try:
    import torch
    import torch.nn.functional as F
    no_torch = None
except ImportError as e:
    torch, no_torch = None, e

HERE = os.path.dirname(os.path.abspath(__file__))
# A difference above its bound is no rounding. bf16 is autocast's, with roundings at other places than ours; tf32 is for
# what multiplies in TF32 on a GPU, as Triton's tl.dot does unless told otherwise.
BOUNDS = {"fp32": 2e-5, "tf32": 3e-3, "bf16": 5e-2}
SAME = 2e-5  # so near is ours with a mistake to yours, in fp32, if the mistake is yours
LR, DECAY = 1e-2, 0.01


class Usage(Exception):
    """Wrong usage, or what cannot be checked: exit code 2."""
    word = "cannot be checked"


class NotYet(Usage):
    """What you have not written yet: it fails nothing else."""
    word = "not written yet"


class NoGPU(NotYet):
    word = "not compared"


def note(text):
    print(f"note: {text}")


def few(names):
    return ", ".join(names[:4]) + (" ..." if names[4:] else "")


def place_of(frames):
    """Of (file, line, function) the last that is yours, in words."""
    libraries = (HERE, os.path.dirname(os.__file__), os.path.dirname(torch.__file__))
    other = lambda path: "site-packages" in path or os.path.abspath(path).startswith(libraries)
    yours = [f for f in frames if not f[0].startswith("<frozen") and not other(f[0])]
    return f" at {os.path.basename(yours[-1][0])}:{yours[-1][1]}, in {yours[-1][2]}" if yours else ""


def raised(e):
    """An exception of your code in one line, with the last line of yours that it passed."""
    where = place_of([(f.filename, f.lineno, f.name) for f in traceback.extract_tb(e.__traceback__)])
    return f"raised {type(e).__name__}{where}: {' '.join(str(e).split())[:300]}".rstrip(": ")


def not_written(e):
    return isinstance(e, NotImplementedError) or "not implemented" in str(e).lower()


@contextlib.contextmanager
def your_code(what):
    """What your code raises becomes one line."""
    try: yield
    except Usage: raise
    except (Exception, SystemExit) as e:
        if not_written(e): raise NotYet(f"{what} {raised(e)}") from e
        raise Usage(f"{what} {raised(e)}") from e


def verdict(check):
    """check, as a notebook calls it. True: ok; False: differs; None: cannot be checked, or not yet, which is said."""
    @functools.wraps(check)
    def run(*arguments, **options):
        try: return check(*arguments, **options)
        except Usage as e: print(f"{e.word}: {e}")
    return run


def difference(a, b):
    """The norm of a - b over the norm of b. What is not finite counts as equal where both have the same."""
    a, b = a.detach().double(), b.detach().double().to(a.device)
    same = (a == b) | (a.isnan() & b.isnan())
    apart, norm = torch.where(same, 0, a - b).norm().item(), torch.where(b.isfinite(), b, 0).norm().item()
    return 0.0 if same.all() else apart / norm if norm > 0 and math.isfinite(apart) else math.inf


def apart(a, b):
    """The same, but what is missing, has another shape or is not finite differs."""
    return difference(a, b) if a is not None and a.shape == b.shape and bool(a.isfinite().all()) else math.inf


@contextlib.contextmanager
def matmuls(precision):
    """On a GPU, fp32 is without TF32, and tf32 with it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try: yield
    finally: torch.set_float32_matmul_precision(before)


def show(columns, rows):
    table = [columns, *rows]
    width = [max(map(len, column)) for column in zip(*table)]
    table.insert(1, ["-" * w for w in width])
    print(*("| " + " | ".join(f"{x:<{w}}" for x, w in zip(row, width)) + " |" for row in table), "", sep="\n")


# ----------------------------------------------------------------------------------------------------------------------
# ./cs336: tensors go to it and come back in safetensors files

def save(path, tensors):
    """The header's length in 8 bytes, the header in JSON, then the tensors' bytes."""
    names, header, end = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}, {}, 0
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    for name, t in tensors.items():
        start, end = end, end + t.nbytes
        header[name] = {"dtype": names[t.dtype], "shape": list(t.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for t in tensors.values(): f.write(ctypes.string_at(t.data_ptr(), t.nbytes))


def load(path):
    with open(path, "rb") as f: data = bytearray(f.read())
    start = 8 + int.from_bytes(data[:8], "little")
    header, data = json.loads(data[8:start]), data[start:]
    header.pop("__metadata__", None)
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
    part = lambda t: torch.frombuffer(data[slice(*t["data_offsets"])], dtype=dtypes[t["dtype"]]).view(t["shape"])
    return {name: part(t) for name, t in header.items()}


def cs336(command, inputs, *options):
    """The tensors that `./cs336 COMMAND` writes. inputs: {name of an option that takes a file: tensors by name}."""
    program = os.environ.get("CS336_BINARY", os.path.join(HERE, "..", "cs336"))
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out.safetensors")
        words = [program, command, "--out", out, *map(str, options)]
        for option, tensors in inputs.items():
            words += ["--" + option, os.path.join(folder, option + ".safetensors")]
            save(words[-1], tensors)
        try: run = subprocess.run(words, capture_output=True, text=True)
        except OSError as e:
            raise Usage(f"./cs336: {program}: {e.strerror}; type `make` first, or set CS336_BINARY")
        if run.returncode: raise Usage(f"./cs336 {command}: {(run.stderr.strip() or 'failed').splitlines()[-1]}")
        return load(out)


# ----------------------------------------------------------------------------------------------------------------------
# Causes

def nearest(candidates, yours):
    """({cause}, how near) of those (cause, outputs by name) whose outputs are all yours."""
    near = []
    for cause, out in candidates:
        compared = [name for name, x in out.items() if name in yours and yours[name].shape == x.shape]
        far = max((difference(yours[name], out[name]) for name in compared), default=math.inf)
        if far <= SAME: near.append((far, cause))
    best = min(near, default=(None, ""))[0]
    return list(dict.fromkeys(cause for far, cause in sorted(near) if far <= 3 * best + 1e-6)), best


def likely_causes(mistakes, run, yours, seconds=4):
    """The same for (arguments of run, cause): one of them explains yours, or else two at once."""
    singles, end = list(mistakes), time.monotonic() + seconds
    pairs = ((a | b, f"{x}; and {y}") for (a, x), (b, y) in itertools.combinations(singles, 2)
             if not a.keys() & b.keys())
    in_time = itertools.takewhile(lambda _: time.monotonic() < end, pairs)
    for tries in (singles, in_time):
        causes, far = nearest(((cause, run(**wrong)) for wrong, cause in tries), yours)
        if causes: break
    return causes, far


def say_cause(causes, far, what):
    if not causes: return print("No usual mistake explains it, nor do two.")
    mistake = "both" if "; and" in causes[0] else "this mistake"
    print(f"Likely cause: {', or '.join(causes[:3])}. ({what} with {mistake} is {far:.1e} from yours.)")


# ----------------------------------------------------------------------------------------------------------------------
# The handout's model, and mistakes in it. B batch, T positions, C d_model, H heads, D head size

def attend(q, k, v, causal=True, scale=None, axis=-1, shift=0, fill=-math.inf, inverted=False):
    """shift: how many keys too many a query sees. fill: what a masked score becomes. inverted: the mask is turned."""
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
        if other != heads and C % (2 * other) == 0:
            yield dict(heads=other), f"there are {other} heads instead of {heads}"
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
    yield dict(alone=["attn", "ffn"]), "both residuals of a block are missing: x + attn(ln1(x)), then x + ffn(ln2(x))"
    is_turned = "transposed: a Linear is x @ weight.T, and weight is [out, in]"
    square = [name[:-7] for name, p in w.items() if name.startswith("layers.0.") and len(set(p.shape)) < p.dim()]
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
    yield dict(post_norm=True), "norms come after the residual sum, and not before attention and before the FFN"
    yield dict(no_final_norm=True), "there is no norm before lm_head"


def attention_mistakes(D):
    yield dict(scale=1), "scores are not divided by sqrt(D)"
    yield dict(scale=1 / D), "scores are divided by D instead of sqrt(D)"
    yield dict(shift=1), "the causal mask is off by one: a query sees the key after its own"
    for fill in (-math.inf, -1e6, -1e9):
        yield dict(shift=-1, fill=fill), "the causal mask is off by one: a query does not see its own key"
    for fill in (-math.inf, -1e6, -1e9):
        inverted = "the causal mask is inverted: a query sees"
        yield dict(inverted=True, fill=fill), f"{inverted} only the keys after its own"
        yield dict(inverted=True, shift=-1, fill=fill), f"{inverted} its own key and those after it"
    yield dict(shift=1 << 30), "there is no causal mask"
    yield dict(axis=-2), "softmax runs over the queries instead of the keys: it takes dim=-1"
    yield dict(fill=0), "masked scores become 0; they have to become -inf before softmax"


def tiled(q, k, v, causal, size, wrong):
    """FlashAttention over tiles of that many keys and queries, with one mistake."""
    scale, (S, B) = q.shape[-1] ** -0.5, (q.shape[-2], size)
    o, l, m = torch.zeros_like(q), q.new_zeros(*q.shape[:-1], 1), q.new_full((*q.shape[:-1], 1), -math.inf)
    row = torch.arange(S, device=q.device)[:, None]
    for j in range(0, B if wrong == "first" else S // B * B if wrong == "rest" else S, B):
        s = q @ k[..., j:j + B, :].transpose(-1, -2) * scale
        column = torch.arange(j, min(j + B, S), device=q.device)[None]
        if causal: s = s.masked_fill(column % B > row % B if wrong == "local" else column > row, -1e6)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        p, old = (s - new).exp(), (m - new).exp()
        l = (l if wrong == "l" else old * l) + p.sum(-1, keepdim=True)
        o = (o if wrong == "o" else old * o) + p @ v[..., j:j + B, :]
        m = s.amax(-1, keepdim=True) if wrong == "max" else new
    return o if wrong == "norm" else o / l


def tile_mistakes(q, k, v, causal):
    """(cause, {o}) for every size of tiles."""
    words = {"o": "O is not multiplied by exp(m_old - m_new) when the maximum grows",
             "l": "l is not multiplied by exp(m_old - m_new) when the maximum grows",
             "max": "m is the tile's maximum instead of the largest so far", "norm": "O is not divided by l at the end",
             "first": "only the first tile of keys is read", "rest": "the last keys, no whole tile, are left out"}
    if causal: words["local"] = "the causal mask compares places inside a tile instead of in the sequence"
    for wrong, size in itertools.product(words, (16, 32, 64, 128)):
        if size >= q.shape[-2] and wrong != "norm": continue
        yield f"{words[wrong]} (tiles of {size})", {"o": tiled(q, k, v, causal, size, wrong)}


# ----------------------------------------------------------------------------------------------------------------------
# Your model: names

def staff_name(name):
    """Without what torch.compile and DDP put before names, or between."""
    while name.startswith("module."): name = name[len("module."):]
    return name.replace("_orig_mod.", "")


def shapes_of(V, C, F, layers):
    """Names and shapes that the handout's model of this size has, in the order of forward."""
    shapes = {"token_embeddings": (V, C)}
    for i in range(layers):
        at = f"layers.{i}."
        shapes |= {at + "ln1": (C,)} | {f"{at}attn.{p}_proj": (C, C) for p in ("q", "k", "v", "output")}
        shapes |= {at + "ln2": (C,), at + "ffn.w1": (F, C), at + "ffn.w3": (F, C), at + "ffn.w2": (C, F)}
    shapes |= {"ln_final": (C,), "lm_head": (V, C)}
    return {name + ".weight": shape for name, shape in shapes.items()}


def staff_shapes(parameters):
    """The same for a model that has the staff's names."""
    size = lambda name: tuple(parameters[name].shape) if name in parameters and parameters[name].dim() == 2 else (0, 0)
    (V, C), w1 = size("token_embeddings.weight"), size("layers.0.ffn.w1.weight")
    layers = len({name.split(".")[1] for name in parameters if name.startswith("layers.")})
    shapes = shapes_of(V, C, w1[0] if w1[1] == C else w1[1], layers)
    lost = [name for name in shapes if name not in parameters or not V or not w1[0]]
    if not lost: return shapes
    raise Usage(f"the model has no parameter {lost[0]}, but others than the staff's: {few(list(parameters))}: check "
                "tests/adapters.py:run_transformer_lm of assignment 1, which gets the staff's names, or rename yours")


def wrong_parameters(parameters, shapes):
    """What is wrong with names and shapes, so that nothing can be run; None: nothing."""
    for name, shape in shapes.items():
        found = tuple(parameters[name].shape)
        if found == shape: continue
        turned = "; it is transposed: a Linear is x @ weight.T, and weight is [out, in]" if found == shape[::-1] else ""
        return f"{name} is {list(found)} instead of {list(shape)}{turned}"
    more = [name for name in parameters if name not in shapes]
    if more:
        is_norm = ".ln" in "." + more[0]
        why = ": its norms are RMSNorms, without bias" if is_norm else ": its Linear has no bias"
        return f"{more[0]} is a parameter that the handout's model does not have{why if 'bias' in more[0] else ''}"
    tied = {}
    for name, p in parameters.items():
        if tied.setdefault(p.data_ptr(), name) != name:
            return f"{name} and {tied[p.data_ptr()]} are one tensor; the handout's model does not tie them"


class Slot(typing.NamedTuple):
    """Where a weight of the staff's lies in your model: rows of a parameter, which may be transposed."""
    own: str
    rows: slice = slice(None)
    turned: bool = False

    def of(self, tensor):
        if tensor is None: return None
        return tensor[self.rows].T if self.turned else tensor[self.rows]


def slots_by_value(parameters, w):
    """Slots of a model that holds these weights; several may lie in one parameter."""
    slots = {}
    for own, p in parameters.items():
        for name, t in w.items():
            for turned in (False, True)[:t.dim()]:
                q = p.T if turned and p.dim() == 2 else p
                if q.shape[1:] != t.shape[1:]: continue
                for at in range(0, len(q) - len(t) + 1, len(t)):
                    if not torch.equal(q[at:at + len(t)], t): continue
                    slots[name] = Slot(own, slice(None), turned) if turned else Slot(own, slice(at, at + len(t)))
    return slots


# ----------------------------------------------------------------------------------------------------------------------
# Your model: numbers

def random_weights(shapes):
    """Under which every mistake shows: with embeddings as small as these, RMSNorm's eps, too."""
    g = torch.Generator().manual_seed(336)
    normal = lambda shape, std: torch.randn(shape, generator=g) * std
    return {name: 1 + normal(shape, 0.1) if len(shape) == 1 else
            normal(shape, 0.02 if "embeddings" in name else (2 / sum(shape)) ** 0.5) for name, shape in shapes.items()}


def batch_of(V, T):
    g = torch.Generator().manual_seed(337)
    return torch.randint(V, (2, T), generator=g), torch.randint(V, (2, T), generator=g)


def logits_of(model, tokens):
    try: logits = model(tokens)
    except Exception as e:
        as_yours = "tests/adapters.py:run_transformer_lm calls it as you do"
        hint = as_yours if isinstance(e, TypeError) else "context_length sets fewer tokens"
        raise Usage(f"forward of {tokens.shape[1]} tokens {raised(e)}; {hint}") from e
    if isinstance(logits, (tuple, list)):
        note("of what the model returns, the first is taken as the logits")
        logits = logits[0]
    if not isinstance(logits, torch.Tensor): raise Usage(f"forward returns {type(logits).__name__}, takes the logits")
    return logits.reshape(*tokens.shape, -1) if logits.numel() % tokens.numel() == 0 else logits


def modules_of(model, slots, right):
    """The modules whose outputs are compared, by the staff's names."""
    modules = {staff_name(name): m for name, m in model.named_modules()}
    found = {name: m for name, m in modules.items() if name in right}
    for name, slot in slots.items():
        m = modules.get(slot.own.rpartition(".")[0])
        whole = m is not None and [p.numel() for p in m.parameters()] == [right[name].numel()]
        if whole: found.setdefault(name.removesuffix(".weight"), m)
    return found


def run_yours(model, modules, tokens, targets, autocast):
    """{module: its first output} of those that were called, the loss; the gradients are in the parameters."""
    out = {}

    def keep(name):
        def hook(module, inputs, output):
            if isinstance(output, torch.Tensor) and name not in out: out[name] = output.detach().clone()
        return hook

    hooks = [m.register_forward_hook(keep(name)) for name, m in modules.items()]
    model.zero_grad(set_to_none=True)
    try:
        with autocast: logits = logits_of(model, tokens)
    finally:
        for h in hooks: h.remove()
    loss = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())
    with your_code("backward"): loss.backward()
    return out | {"lm_head": logits.detach()}, loss.detach()


def table_of(columns, bound):
    """A row per part of the model with the worst of each column. columns: {title: {tensor: difference}}"""
    parts, rows = {}, []
    part_of = lambda name: ".".join(name.split(".")[:2]) if name.startswith("layers.") else name.split(".")[0]
    for title, numbers in columns.items():
        for name, x in numbers.items(): parts.setdefault(part_of(name), {}).setdefault(title, []).append((x, name))
    for part, cells in parts.items():
        texts, word = [], "ok"
        for title in columns:
            x, name = max(cells.get(title, [(None, "")]))
            texts.append("-" if x is None else f"{x:.1e}")
            if x is None or x <= bound: continue
            texts[-1], word = f"{x:.1e} {name.removesuffix('.weight')[len(part):].lstrip('.')}".rstrip(), "DIFFERS"
        rows.append([part, *texts, word])
    show(["part", *columns, f"bound {bound:g}"], rows)


def copy_of(model):
    if hasattr(model, "_orig_mod"):
        note("what torch.compile was given is checked")
        model = model._orig_mod
    wrapped = isinstance(getattr(model, "module", None), torch.nn.Module)
    if wrapped: note(f"the wrapper {type(model).__name__} is checked as it is")
    try: model = copy.deepcopy(model)
    except Exception as e: raise Usage(f"the model cannot be copied ({type(e).__name__}); give what is inside it")
    for name, t in model.named_buffers():
        if not t.dtype in (torch.float16, torch.bfloat16): continue
        raise Usage(f"the buffer {name} is rounded to {str(t.dtype)[6:]}; give the model before .half() or .bfloat16()")
    kinds = {str(p.dtype)[6:] for p in model.parameters()} - {"float32"}
    if kinds: note(f"a copy of the model runs in float32 instead of {', '.join(sorted(kinds))}")
    return model.float().eval()


@verdict
def check_model(model, num_heads=4, rope_theta=10000.0, context_length=32, precision="fp32"):
    """Compares a copy of the nn.Module, or assignment 1's run_transformer_lm, with ./cs336."""
    if not isinstance(model, torch.nn.Module): return check_model_function(model, context_length, precision)
    model = copy_of(model)
    parameters = {staff_name(name): p.requires_grad_() for name, p in model.named_parameters(remove_duplicate=False)}
    shapes = staff_shapes(parameters)
    wrong = wrong_parameters(parameters, shapes)
    if wrong: return bool(print(f"DIFFERS before anything is run: {wrong}."))
    V, C = shapes["lm_head.weight"]
    if C % (2 * num_heads):
        raise Usage(f"--num_heads: got {num_heads}, takes a number that cuts d_model {C} into heads of even size")
    slots, w, batch = {name: Slot(name) for name in shapes}, random_weights(shapes), batch_of(V, context_length)
    return compare_model(model, parameters, slots, w, *batch, num_heads, rope_theta, precision)


def check_model_function(function, context_length, precision):
    """run_transformer_lm gets the staff's names, and loads them into a model, which is caught here and checked."""
    names = "vocab_size context_length d_model num_layers num_heads d_ff rope_theta"
    sizes = {name: SIZES[name] for name in names.split()}
    V, T, C, layers, heads, d_ff, theta = sizes.values()
    w, caught = random_weights(shapes_of(V, C, d_ff, layers)), []
    tokens, targets = batch_of(V, min(T, context_length))
    keep = lambda module, inputs, output: caught.append((module, len(inputs)))
    hook = torch.nn.modules.module.register_module_forward_hook(keep)
    try:
        with your_code(function.__name__):
            logits = function(**sizes, weights={name: t.clone() for name, t in w.items()}, in_indices=tokens)
    finally: hook.remove()
    rest = w, tokens, targets, heads, theta, precision
    for model, inputs in reversed(caught):
        parameters = {name: p.requires_grad_() for name, p in model.named_parameters(remove_duplicate=False)}
        slots = slots_by_value({name: p.detach() for name, p in parameters.items()}, w)
        if slots.keys() == w.keys() and inputs == 1: return compare_model(model.eval(), parameters, slots, *rest)
    note("no module that takes the tokens alone has the weights: only the logits are compared, and no gradients")
    return compare_model(lambda tokens: logits, {}, {}, *rest)


@matmuls("fp32")
def compare_model(model, parameters, slots, w, tokens, targets, heads, theta, precision):
    (V, C), layers, bound = w["lm_head.weight"].shape, (len(w) - 3) // 9, BOUNDS[precision]
    here = next(iter(parameters.values())).device if parameters else tokens.device
    w, tokens, targets = {name: t.to(here) for name, t in w.items()}, tokens.to(here), targets.to(here)
    for name, slot in slots.items(): slot.of(parameters[slot.own].data).copy_(w[name])
    theirs = cs336("model", {"weights": w, "batch": {"tokens": tokens, "targets": targets}}, "--num_heads", heads,
                   "--rope_theta", theta, "--precision", precision.replace("tf32", "fp32"))
    usual = dict(heads=heads, theta=theta, layers=layers)
    formula = torch.no_grad()(lambda **wrong: reference(w, tokens, **usual | wrong))
    right = formula()
    if difference(right["lm_head"], theirs["logits"]) > BOUNDS[precision]:
        raise Usage("./cs336 and the model in tests/check.py differ: please report it")
    right["lm_head"], gradients = theirs["logits"], {}
    if parameters:
        modules = modules_of(model, slots, right | w)
        autocast = torch.autocast(here.type, torch.bfloat16, enabled=precision == "bf16")
        with matmuls(precision): out, loss = run_yours(model, modules, tokens, targets, autocast)
        own = {name: slot.of(parameters[slot.own].grad) for name, slot in slots.items()}
        unused = [name for name, g in own.items() if g is None]
        if unused: note(f"no gradient reaches {few(unused)}")
        gradients = {name: apart(g, theirs["grad." + name]) for name, g in own.items()}
    else: out = {"lm_head": logits_of(model, tokens).detach()}
    outputs = {name: apart(out[name], x) for name, x in right.items() if name in out}
    if parameters: outputs["loss"] = apart(loss, theirs["loss"])
    print(f"\n{type(model).__name__}: {layers} layers, d_model {C}, {heads} heads, vocabulary {V}; "
          f"batch {list(tokens.shape)}, {precision}. Relative differences from ./cs336:\n")
    table_of({"output": outputs} | ({"gradient": gradients} if gradients else {}), bound)
    first = next((name for name, x in outputs.items() if x > bound), None)
    worst = next((name for name, x in reversed(gradients.items()) if x > bound), None)
    if first:
        if precision != "fp32" and parameters:
            out, _ = run_yours(model, modules, tokens, targets, contextlib.nullcontext())
        explain_outputs(first, outputs, out, w, tokens, heads, theta, formula)
    elif worst:
        print(f"DIFFERS. Forward agrees. The first gradient that differs, in the order of backward, is {worst}'s. "
              "Is there a backward of your own, a detach(), or a weight that is used twice?")
    else: print(f"ok: all relative differences are within {bound:g}, {precision}'s bound.")
    return not first and not worst


def solved_eps(out, w, tokens):
    """The eps with which RMSNorm gives layers.0.ln1's output: y = w x / sqrt(mean(x^2) + eps)."""
    x, weight = w["token_embeddings.weight"][tokens].double(), w["layers.0.ln1.weight"].double()
    squares = (weight * x).square().sum(-1) / out["layers.0.ln1"].double().square().sum(-1)
    return float((squares - x.square().mean(-1)).median())


def explain_outputs(first, outputs, out, w, tokens, heads, theta, formula):
    before = list(outputs)[:list(outputs).index(first)]
    print(f"DIFFERS. The first module that differs, in the order of forward, is {first}"
          + (f"; all up to {before[-1]} agree." if before else "; no module before it was seen."))
    tried = list(mistakes(w, heads, theta, first))
    eps = solved_eps(out, w, tokens) if "layers.0.ln1" in outputs else 0
    if eps > 0: tried.append((dict(eps=eps), f"RMSNorm's eps is {eps:.2g} instead of 1e-5"))
    agree = lambda wrong: sum(apart(out[name], x) <= SAME for name, x in formula(**wrong).items() if name in out)
    tried.sort(key=lambda mistake: -agree(mistake[0]))  # of two mistakes, one alone explains more than none
    say_cause(*likely_causes(tried, formula, out), "The handout's model")


# ----------------------------------------------------------------------------------------------------------------------
# Your optimizer

# Which rules of AdamW are right, and whose they are.
RULES = {"2026's handout": dict(), "2025's handout, where the weight decays after the step": dict(decay="after"),
         "torch.optim.AdamW, where eps is added after the bias correction": dict(form="torch"),
         "torch.optim.AdamW, but the weight decays after the step, as in 2025's": dict(form="torch", decay="after")}


def adamw_rule(p, gradients, form="handout", correct=True, decay="before", root=False, betas=(0.9, 0.999)):
    """p after a step for each of the gradients, in double."""
    (b1, b2), p, m, v = betas, p.double(), 0, 0
    for t, g in enumerate(gradients, 1):
        g = g.double() + (DECAY * p if decay == "l2" else 0)
        if decay == "before": p = p * (1 - LR * DECAY)
        if decay == "unscaled": p = p * (1 - DECAY)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        c1, c2 = (1 - b1 ** t, 1 - b2 ** t) if correct else (1, 1)
        with_eps = lambda v: (v + 1e-8).sqrt() if root else v.sqrt() + 1e-8
        p = p - LR * (m / c1 / with_eps(v / c2) if form == "torch" else c2 ** 0.5 / c1 * m / with_eps(v))
        if decay == "after": p = p * (1 - LR * DECAY)
    return p


def optimizer_mistakes():
    yield dict(correct=False), "there is no bias correction"
    yield dict(decay="l2"), "weight decay is added to the gradient (Adam with L2) instead of to the weight"
    yield dict(decay="none"), "there is no weight decay"
    yield dict(decay="unscaled"), "the weight decays by 1 - weight_decay; the handout's is 1 - lr * weight_decay"
    yield dict(decay="after"), "the weight decays after the step (as in 2025's handout)"
    yield dict(root=True), "eps stands inside the square root"
    yield dict(betas=(0.999, 0.9)), "the betas are swapped: m takes 0.9 and v takes 0.999"
    yield dict(form="torch"), "eps is added after the bias correction (as in torch.optim.AdamW)"


@verdict
def check_adamw(optimizer, steps=3):
    """Compares three steps of your AdamW, each on the gradients of ./cs336's model, with its steps.

    AdamW's first step depends on a gradient's sign alone, which rounding decides where a gradient is nearly 0. So
    elements are compared whose gradients are 0 in each step, or at least a tenth of the tensor's rms."""
    w, (tokens, targets) = random_weights(shapes_of(97, 32, 48, 2)), batch_of(97, 24)
    batch = {"tokens": tokens, "targets": targets}
    ours = lambda weights, steps: cs336("model", {"weights": weights, "batch": batch}, "--num_heads", 4,
                                        "--steps", steps, "--lr", LR)
    parameters = {name: torch.nn.Parameter(t.clone()) for name, t in w.items()}
    gradients, theirs = [], ours(w, steps)
    with your_code("the optimizer, called with (params, lr, betas, eps, weight_decay),"):
        step = optimizer(list(parameters.values()), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY)
    for t in range(steps):
        result = ours({name: p.detach() for name, p in parameters.items()}, 0) if t else theirs
        gradients.append({name: result["grad." + name] for name in w})
        for name, p in parameters.items(): p.grad = gradients[-1][name].clone()
        with your_code("step()"): step.step()
    clear = {}
    for name in w:
        g = torch.stack([g[name] for g in gradients])
        rms = g.square().flatten(1).mean(1).sqrt().view(-1, *[1] * (g.dim() - 1))
        clear[name] = (g.abs() > 0.1 * rms).all(0) | (g == 0).all(0)
    change = lambda name, p: (p.double() - w[name].double()).masked_select(clear[name])
    given = {name: [g[name] for g in gradients] for name in w}
    by_rule = lambda **rule: {name: change(name, adamw_rule(w[name], given[name], **rule)) for name in w}
    yours = {name: change(name, p.detach()) for name, p in parameters.items()}
    right = {whose: by_rule(**rule) for whose, rule in RULES.items()}
    right["2026's handout"] = {name: change(name, theirs["param." + name]) for name in w}
    numbers = {whose: {name: difference(yours[name], x) for name, x in rule.items()} for whose, rule in right.items()}
    whose = min(numbers, key=lambda whose: max(numbers[whose].values()))
    print(f"\nAdamW: {steps} steps on our gradients, lr {LR}, betas 0.9 and 0.999, eps 1e-8, weight decay {DECAY}. "
          "Relative differences of the weights' change:\n")
    table_of({f"after {steps} steps": numbers[whose]}, SAME)
    if not any(x > SAME for x in numbers[whose].values()):
        return not print(f"ok: it is the AdamW of {whose}.")
    print("DIFFERS.")
    return bool(say_cause(*likely_causes([(dict(), ""), *optimizer_mistakes()], by_rule, yours), "AdamW"))


# ----------------------------------------------------------------------------------------------------------------------
# Your attention

def backward_with(q, k, v, do, causal, **wrong):
    """{dq, dk, dv}: forward is right, and backward has these mistakes."""
    scale, o = q.shape[-1] ** -0.5, attend(q, k, v, causal)
    scores = q @ k.transpose(-1, -2) * scale
    seen = torch.ones_like(scores, dtype=torch.bool).tril() if causal else torch.ones_like(scores, dtype=torch.bool)
    L, D = scores.masked_fill(~seen, -math.inf).logsumexp(-1, keepdim=True), (do * o).sum(-1, keepdim=True)
    if "L_along_keys" in wrong: L = L.transpose(-1, -2)
    if "D_along_keys" in wrong: D = D.transpose(-1, -2)
    if "no_D" in wrong: D = 0
    p = (scores - L).exp()
    if "no_mask" not in wrong: p = p * seen
    ds = p * (do @ v.transpose(-1, -2) - D) * wrong.get("scale", scale)
    turned = ds if "not_turned" in wrong else ds.transpose(-1, -2)
    dv = (p if "dv_not_turned" in wrong else p.transpose(-1, -2)) @ do
    return {"dq": ds @ (q if "swapped" in wrong else k), "dk": turned @ (k if "swapped" in wrong else q), "dv": dv}


def backward_mistakes(causal):
    yield dict(no_D=True), "backward lacks D = rowsum(dO * O): dS = P * (dP - D)"
    yield dict(scale=1), "dQ and dK lack the factor 1/sqrt(D)"
    if causal: yield dict(no_mask=True), "backward recomputes P without the causal mask"
    yield dict(L_along_keys=True), "backward subtracts L along the keys: S - L takes L[..., :, None]"
    yield dict(D_along_keys=True), "backward subtracts D along the keys: dP - D takes D[..., :, None]"
    yield dict(swapped=True), "dQ is dS Q and dK is dS^T K; dQ = dS K and dK = dS^T Q are right"
    yield dict(not_turned=True), "dK is dS Q; dK = dS^T Q is right"
    yield dict(dv_not_turned=True), "dV is P dO; dV = P^T dO is right"


class Attention:
    """Your attention: called with (q, k, v, causal), whatever its fourth argument is."""

    def __init__(self, yours):
        is_function = lambda x: isinstance(x, type) and issubclass(x, torch.autograd.Function)
        if is_function(getattr(yours, "__self__", None)): yours = yours.__self__  # MyFunction.apply
        function = is_function(yours)
        self.call = yours.apply if function else yours
        self.is_triton = "triton" in f"{getattr(yours, '__module__', '')} {getattr(yours, '__qualname__', '')}".lower()
        try: arguments = [*inspect.signature(yours.forward if function else yours).parameters.values()][function:]
        except (ValueError, TypeError): arguments = None
        many = arguments is None or any(a.kind == a.VAR_POSITIONAL for a in arguments)
        self.masked = bool(arguments and arguments[3:] and "mask" in arguments[3].name)
        self.keyword = next((a.name for a in arguments or () if a.kind == a.KEYWORD_ONLY and "causal" in a.name), None)
        self.takes_causal = many or len(arguments) > 3

    def __call__(self, q, k, v, causal):
        if self.keyword: return self.call(q, k, v, **{self.keyword: causal})
        if not self.takes_causal: return self.call(q, k, v)
        if not self.masked: return self.call(q, k, v, causal)
        S = q.shape[-2]
        return self.call(q, k, v, torch.ones(S, S, dtype=torch.bool, device=q.device).tril(0 if causal else S))


def saved_lse(o, right):
    """(the logsumexp that your Function saved or None, what the public test will say to it or None)"""
    saved = getattr(o.grad_fn, "saved_tensors", None)
    if saved is None: return None, None
    flat = [t for t in saved if t is not None and t.numel() == right.numel()]
    exact = [t for t in flat if t.shape == right.shape]
    if len(exact) == 1: return exact[0], None
    found = min(exact or flat, key=lambda t: apart(t.float().reshape(right.shape), right), default=None)
    what = f"{len(exact)} saved tensors are {list(right.shape)}" if exact else "no logsumexp is saved"
    if flat and not exact: what = f"the logsumexp is saved as {list(found.shape)}"
    found = None if found is None else found.reshape(right.shape)
    return found, f"{what}; the public test takes exactly one saved tensor of {list(right.shape)}"


def run_attention(attention, q, k, v, do, causal, theirs):
    """({tensor: yours}, what it lacks: (is it only not written yet, in words) or None, note on the logsumexp)"""
    qkv = [t.clone().requires_grad_() for t in (q, k, v)]
    try: o = attention(*qkv, causal)
    except (Exception, SystemExit) as e:
        later = not_written(e) or causal and isinstance(e, AssertionError)
        return {}, (later, f"forward{' with is_causal' if causal else ''} {raised(e)}"), None
    if isinstance(o, (tuple, list)): o = o[0]
    if not isinstance(o, torch.Tensor) or o.shape != q.shape:
        found = list(o.shape) if isinstance(o, torch.Tensor) else type(o).__name__
        raise Usage(f"attention returns {found}, takes a function that returns a tensor of {list(q.shape)}")
    lse, said = saved_lse(o, theirs["lse"].to(o.device))
    yours = {"o": o.detach()} | ({} if lse is None else {"lse": lse})
    if o.grad_fn is None: return yours, (True, "backward is not there: the output has no grad_fn"), said
    try: o.backward(do)
    except (Exception, SystemExit) as e:
        stub = "incorrect number of gradients" in str(e) and "got 1)" in str(e)
        return yours, (not_written(e) or stub, f"backward {raised(e)}"), said
    if all(t.grad is None for t in qkv): return yours, (True, "backward returns no gradients"), said
    return yours | {name: t.grad for name, t in zip(("dq", "dk", "dv"), qkv)}, None, said


def attention_causes(attention, yours, numbers, theirs, inputs, causal, precision):
    q, k, v, do = (t.float() for t in inputs)
    bound = BOUNDS[precision]
    if numbers["o"] > bound:
        yours = {"o": attention(q, k, v, causal).detach() if precision == "bf16" else yours["o"]}
        by_formula = lambda **wrong: {"o": attend(q, k, v, **dict(causal=causal) | wrong)}
        causes, far = likely_causes(attention_mistakes(q.shape[-1]), by_formula, yours)
        return (causes, far) if causes else nearest(tile_mistakes(q, k, v, causal), yours)
    if numbers.get("lse", 0) > bound:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if causal: scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -math.inf)
        base_2 = "the saved logsumexp is in base 2, as exp2 takes it; the handout's L is in base e, ln 2 times that"
        top = "the saved tensor is not the logsumexp but only the scores' maximum"
        return nearest([(base_2, {"lse": theirs["lse"] / math.log(2)}), (top, {"lse": scores.amax(-1)})], yours)
    gradients = {name: yours.get(name) for name in ("dq", "dk", "dv")}
    if precision == "bf16" or any(t is None for t in gradients.values()): return [], None
    by_formula = lambda **wrong: backward_with(q, k, v, do, causal, **wrong)
    return likely_causes(backward_mistakes(causal), by_formula, gradients)


@verdict
def check_attention(attention, precision="fp32", context_length=128, head_size=64, num_heads=None):
    """Compares attention(q, k, v, causal) or a torch.autograd.Function with ./cs336, forward and backward.

    q, k and v are [B, S, D], as in the public tests, or with num_heads [B, H, S, D]. The logsumexp is compared where a
    Function saves it. The fourth argument may be a mask."""
    attention, bound = Attention(attention), BOUNDS[precision]
    here = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(338)
    shape = [4, *([num_heads] if num_heads else []), context_length, head_size]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    inputs = q, k, v, do = [torch.randn(shape, generator=g).to(here, dtype) for _ in range(4)]
    rows, causes, lacks, worst, unmasked = [], {}, {}, 0, False
    for causal in (False, True)[:1 + attention.takes_causal]:
        theirs = cs336("attention", {"inputs": {"q": q, "k": k, "v": v, "do": do}}, *["--causal"][:causal])
        with matmuls(precision): yours, lack, said = run_attention(attention, q, k, v, do, causal, theirs)
        if lack: lacks.setdefault(lack[1], lack[0])
        if not yours: continue
        if said and not causal: note(said)
        numbers = {name: apart(t, theirs[name]) for name, t in yours.items()}
        bad = any(x > bound for x in numbers.values())
        without = attend(q.float(), k.float(), v.float(), False).to(dtype)
        unmasked = bad and causal and not causes and apart(yours["o"], without) <= bound
        unmasked = unmasked and not (here == "cuda" and attention.is_triton)
        word = lambda x: "no mask" if unmasked else "DIFFERS" if x > bound else "ok"
        rows += [["yes" if causal else "no", name, f"{x:.1e}", word(x)] for name, x in numbers.items()]
        if not bad or unmasked: continue
        worst = max(worst, *numbers.values())
        with matmuls("fp32"):
            causes[causal] = attention_causes(attention, yours, numbers, theirs, inputs, causal, precision)
    if not rows: raise (NotYet if all(lacks.values()) else Usage)(next(iter(lacks)))
    print(f"\nattention: {shape}, {precision}. Relative differences from ./cs336:\n")
    show(["causal", "tensor", "difference", f"bound {bound:g}"], rows)
    for words, later in lacks.items(): print(f"{'not written yet' if later else 'not compared'}: {words}")
    if not attention.takes_causal: print("not compared: a causal mask, since the function takes (q, k, v)")
    if causes: return attention_differs(causes, here == "cuda" and precision == "fp32" and worst <= BOUNDS["tf32"])
    broken = [words for words, later in lacks.items() if not later]
    if broken: raise Usage(f"{broken[0]}; what is in the table is ok")
    there = " of what is there" if lacks else ""
    print(f"ok: all relative differences{there} are within {bound:g}, {precision}'s bound.")
    if unmasked: print("Without the mask: is_causal is ignored, which flash_forward (a) allows in the PyTorch version; "
                       "its causal gradients are not judged. The Triton version takes the mask, by (c).")
    return True


def attention_differs(causes, as_tf32):
    print("DIFFERS, " + " and ".join("causal" if causal else "not causal" for causal in causes) + ".")
    # A mistake that is no mask's shows without a mask; a mask's is seen only where it is used.
    say_cause(*causes[min(causes)], "Attention by its formula")
    if as_tf32: print("It is of TF32's size: for fp32, tl.dot takes input_precision='ieee'. --precision tf32 allows it")
    return False


# ----------------------------------------------------------------------------------------------------------------------
# Your distributed classes: tests/check_ranks.py. Where a GPU is in use, they run in a process that sees none.

def on_ranks(kind, yours, seconds=15):
    import check_ranks
    if not torch.cuda.is_available(): return check_ranks.check_ranks(kind, yours, seconds)
    try: where = f"{inspect.getsourcefile(yours)}:{yours.__qualname__}"
    except (TypeError, OSError): raise Usage("the class stands in no file: write it to one, and import it from there")
    words = [sys.executable, os.path.join(HERE, "check.py"), kind, where]
    r = subprocess.run(words, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    print(r.stdout, end="")
    if r.returncode not in (0, 1, 2): raise Usage(f"the ranks ended with {r.returncode}: {r.stderr.strip()[-300:]}")
    return {0: True, 1: False}.get(r.returncode)


check_ddp, check_sharded, check_fsdp = (verdict(functools.partial(on_ranks, x)) for x in ("ddp", "sharded", "fsdp"))


# ----------------------------------------------------------------------------------------------------------------------
# Options. They are read also where there is no torch.

class Parser(argparse.ArgumentParser):
    def error(self, message): raise Usage(message)


def key_value(text):
    key, equals, value = text.partition("=")
    if not key.isidentifier() or not equals: raise argparse.ArgumentTypeError(f"got '{text}', takes KEY=VALUE")
    try: return key, ast.literal_eval(value)
    except (ValueError, SyntaxError): return key, value


def parse(words):
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("what", choices=["all", *PARTS])
    p.add_argument("yours", metavar="MODULE:NAME", help="or folder/my_solution.py:NAME, or tests/adapters.py")
    p.add_argument("--precision", choices=list(BOUNDS), default="fp32",
                   help="of model or attention; bf16: autocast; tf32: fp32 with a wider bound")
    p.add_argument("--num_heads", type=int, metavar="H", help="model: if --kwargs lacks it; attention: [B, H, S, D]")
    p.add_argument("--kwargs", type=key_value, nargs="+", default=[], metavar="KEY=VALUE",
                   help="what your model's class gets; default: small sizes")
    o = p.parse_args(words)
    if not o.yours.endswith(".py") and not all(o.yours.rpartition(":")):
        raise Usage(f"got '{o.yours}', takes MODULE:NAME, FILE.py:NAME or an adapters.py")
    if o.num_heads is not None and o.num_heads < 1: raise Usage(f"--num_heads: got {o.num_heads}, takes 1 or more")
    both = "model or attention"
    for name, parts in {"precision": both, "num_heads": both, "kwargs": "model"}.items():
        if o.what in parts.split() or getattr(o, name) == p.get_default(name): continue
        raise Usage(f"--{name}: got with '{o.what}', takes {parts}")
    return o


# ----------------------------------------------------------------------------------------------------------------------
# What you typed

# The functions of the course's adapters.py, per part. The ranks come first: they fork.
PARTS = {"ddp": ["get_ddp", "get_ddp_individual_parameters", "get_ddp_bucketed"],
         "sharded": ["get_sharded_optimizer"], "fsdp": ["get_fsdp"],
         "model": ["run_transformer_lm"], "adamw": ["get_adamw_cls"],
         "attention": ["get_flashattention_autograd_function_pytorch", "get_flashattention_autograd_function_triton",
                       "run_scaled_dot_product_attention"]}
SIZES = {}
for names, value in {"vocab_size vocab n_vocab": 97,
                     "context_length context_len max_seq_len max_seq_length seq_len block_size max_len": 32,
                     "d_model dim hidden_size embed_dim emb_dim n_embd": 64, "num_layers n_layers n_layer": 2,
                     "num_heads n_heads n_head heads": 4, "d_ff ff_dim d_hidden": 128, "rope_theta theta": 10000.0,
                     "batch_size": 2, "dropout": 0.0, "device dtype": None}.items():
    SIZES |= dict.fromkeys(names.split(), value)


def version(name, installed=importlib.metadata.version):
    """The course's packages ask for their own, which only an installed one has."""
    try: return installed(name)
    except importlib.metadata.PackageNotFoundError:
        if name.startswith("cs336"): return "0"
        raise


def import_place(where):
    """The module, be it named or a file. Of a file in a package its package is imported, with the folder above it."""
    importlib.metadata.version, folders = version, [os.getcwd()]
    if where.endswith(".py"):
        if not os.path.isfile(where): raise Usage(f"got '{where}', takes a file that is there")
        folder, name = os.path.split(os.path.abspath(where)[:-3])
        while os.path.isfile(os.path.join(folder, "__init__.py")) and folder != folders[0]:
            folder, package = os.path.split(folder)
            name = f"{package}.{name}"
        folders, where = [folder, *folders], name
    folders += [os.path.join(folder, "cs336-basics") for folder in folders]
    sys.path[:0] = [folder for folder in folders if os.path.isdir(folder) and folder not in sys.path]
    try:
        with contextlib.redirect_stdout(sys.stderr): return importlib.import_module(where)
    except ModuleNotFoundError as e:
        raise Usage(f"{where}: {e}; install it, or type `uv run python3 {sys.argv[0]} ...` in the assignment's folder, "
                    "or PYTHONPATH=.:FOLDER python3 ... with a folder that has it")
    except (Exception, SystemExit) as e: raise Usage(f"import {where} {raised(e)}")


def find(text, part, need):
    """[(its name, the object)] that was typed; of an adapters.py, what it has for this part."""
    where, _, name = text.rpartition(":") if not text.endswith(".py") else (text, "", "")
    module = import_place(where)
    names = [name] if name else [name for name in PARTS[part] if hasattr(module, name)]
    if name and not hasattr(module, name): raise Usage(f"got '{text}', but {module.__file__} has no '{name}'")
    if need and not names: raise Usage(f"{text} has no {PARTS[part][0]}; write FILE.py:NAME")
    return [(name, getattr(module, name)) for name in names]


def filled(make, typed):
    """What a constructor is called with: what was typed, and small sizes for what has a usual name."""
    signature, kwargs = inspect.signature(make), dict(typed)
    takes = signature.parameters.values()
    wrong = [name for name in kwargs if name not in signature.parameters]
    if wrong and all(a.kind != a.VAR_KEYWORD for a in takes):
        raise Usage(f"--kwargs: got {', '.join(wrong)}, but it is {make.__name__}{signature}")
    try: hints = typing.get_type_hints(make.__init__ if isinstance(make, type) else make)
    except Exception: hints = {}
    for a in takes:
        if a.name in kwargs or a.kind in (a.VAR_POSITIONAL, a.VAR_KEYWORD): continue
        needed = a.default is a.empty
        computed = a.default is None and "theta" not in a.name  # from others
        if a.name in SIZES and (needed or not computed and SIZES[a.name] is not None): kwargs[a.name] = SIZES[a.name]
        elif not needed: continue
        elif dataclasses.is_dataclass(hints.get(a.name)): kwargs[a.name] = hints[a.name](**filled(hints[a.name], {}))
        else: raise Usage(f"--kwargs: {make.__name__}{signature} takes {a.name}; write --kwargs {a.name}=...")
    return kwargs


def check_typed_model(yours, o):
    check = functools.partial(check_model.__wrapped__, precision=o.precision)
    if inspect.isfunction(yours) and "weights" in inspect.signature(yours).parameters: return check(yours)
    kwargs = dict(o.kwargs)
    torch.manual_seed(0)
    if not isinstance(yours, torch.nn.Module):
        kwargs = filled(yours, kwargs)
        with your_code(f"{yours.__name__}({', '.join(f'{k}={v}' for k, v in kwargs.items())})"): yours = yours(**kwargs)
    if not isinstance(yours, torch.nn.Module): raise Usage(f"got '{o.yours}', takes an nn.Module, or what makes one")
    if torch.cuda.is_available(): yours.to("cuda")
    for config in [c for c in kwargs.values() if dataclasses.is_dataclass(c)]: kwargs |= dataclasses.asdict(config)
    size = lambda usual, default: next((kwargs[name] for name in kwargs if SIZES.get(name) == SIZES[usual]), default)
    heads = o.num_heads or size("num_heads", None)
    if not isinstance(heads, int): raise Usage("--num_heads: takes the number of heads, here or in --kwargs")
    return check(yours, heads, size("rope_theta", 10000.0), min(32, size("context_length", 32)))


def check_one(part, name, yours, o):
    if inspect.isfunction(yours) and name.startswith("get_") and not inspect.signature(yours).parameters:
        with your_code(name): yours = yours()  # get_adamw_cls and its like
    if not callable(yours): raise Usage(f"got '{o.yours}', takes a class or a function")
    if part == "model": return check_typed_model(yours, o)
    if part == "adamw": return check_adamw.__wrapped__(yours)
    if part != "attention": return on_ranks(part, yours)
    if "triton" in name and not torch.cuda.is_available(): raise NoGPU(f"{name} needs a GPU")
    return check_attention.__wrapped__(yours, precision=o.precision, num_heads=o.num_heads)


def check_typed(o):
    """The exit code. What is not written yet is said, and fails nothing else."""
    if torch is None: raise Usage(f"check.py needs PyTorch (pip install torch): {no_torch}")
    answers, later = [], False
    for part in PARTS if o.what == "all" else [o.what]:
        for name, yours in find(o.yours, part, o.what != "all"):
            print(f"\n== {part}: {name}")
            try: answers.append(check_one(part, name, yours, o))
            except Usage as e:
                print(f"{e.word}: {e}")
                if isinstance(e, NotYet): later = True
                else: answers.append(None)
    if not answers: raise Usage(f"{'nothing' if later else 'no function of the course'} of {o.yours} is written yet")
    return 1 if False in answers else 2 if None in answers else 0


def run(words):
    """The exit code."""
    try: options = parse(words)
    except Usage as e: return print(f"check.py: {e}", file=sys.stderr) or 2
    try: return check_typed(options)
    except Usage as e: return print(f"cannot be checked: {e}") or 2


if __name__ == "__main__":
    sys.modules["check"] = sys.modules["__main__"]  # for check_ranks.py
    sys.exit(run(sys.argv[1:]))
