"""tests/check_causes.py: ours, as formulas, and which small change of them gives what yours gives.

changes() reads a formula's own text and changes it in one place: a factor left out, eps outside the root, another axis,
power, sign, name or order of lines. A mistake has an entry here only if it is more than that, or has plainer words."""
import ast, contextlib, copy, functools, inspect, itertools, math, time
import torch
from torch import cos, exp, log, sigmoid, sin, softmax, sqrt, tanh, where  # noqa: F401, names of changed formulas
import torch.nn.functional as F
from torch.nn.functional import gelu, relu, silu  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SAME = 2e-5  # so near is ours with a mistake to yours, in fp32, if the mistake is yours
LR, DECAY = 2e-2, 0.01


# ----------------------------------------------------------------------------------------------------------------------
# Differences

def difference(a, b):
    """The norm of a - b over the norm of b. What is not finite counts as equal where both have the same."""
    a, b = a.detach().double(), b.detach().double().to(a.device)
    same = (a == b) | (a.isnan() & b.isnan())
    apart, norm = torch.where(same, 0, a - b).norm().item(), torch.where(b.isfinite(), b, 0).norm().item()
    return 0.0 if same.all() else apart / norm if norm > 0 and math.isfinite(apart) else math.inf


def not_finite(t):
    """Says how much of a tensor is NaN or infinite, if any is."""
    wrong = (~t.isfinite()).flatten(0, -2).any(-1) if t.dim() > 1 else ~t.isfinite()
    if not wrong.any(): return ""
    what = "NaN" if t.isnan().any() else "infinite"
    first = int(wrong.int().argmax())
    return f" {int(wrong.sum())} of its {len(wrong)} rows hold what is {what}; the first is row {first}."


def apart(a, b):
    """The same, but what is missing, has another shape or is not finite differs."""
    return difference(a, b) if a is not None and a.shape == b.shape and bool(a.isfinite().all()) else math.inf


# ----------------------------------------------------------------------------------------------------------------------
# Causes: ours is run with one small change of a formula after the other

# Names that are taken for one another.
ALIKE = [set(words.split()) for words in (
    "silu gelu gelu_by_tanh relu sigmoid tanh", "mean total", "cos sin", "ln1 ln2", "attn ffn", "x h", "x w",
    "gate value", "a b", "T D", "q k v dO O", "dP dS P D", "dQ dK dV", "scores masked p", "p m v g", "m v m_hat v_hat",
    "lr beta1 beta2 eps decay lr_t")]


def alternatives(node, names):
    """What may stand for a part of a formula by mistake."""
    Bin, Call = ast.BinOp, ast.Call
    binary, call = (lambda a, op, b: Bin(a, op, b)), (lambda f, a, rest: Call(f, [a, *rest], []))
    if isinstance(node, Bin):
        a, op, b = node.left, node.op, node.right
        if not isinstance(op, ast.MatMult): yield a  # the factor, addend or power b is left out
        if isinstance(op, (ast.Mult, ast.Add)): yield b
        for one, other in ((ast.Add, ast.Sub), (ast.Mult, ast.Div)):
            if isinstance(op, (one, other)): yield binary(a, other() if isinstance(op, one) else one(), b)
        if isinstance(op, ast.MatMult): yield binary(b, op, a)
        for x, y in ((a, b), (b, a)):  # f(x) + y becomes f(x + y)
            if isinstance(x, Call) and x.args and isinstance(op, (ast.Add, ast.Mult)):
                yield call(x.func, binary(x.args[0], op, y), x.args[1:])
        if isinstance(op, (ast.Mult, ast.Div)): yield binary(node, op, b)  # twice
    if isinstance(node, Call) and node.args:
        yield node.args[0]
        x = node.args[0]
        if isinstance(x, Bin): yield binary(call(node.func, x.left, node.args[1:]), x.op, x.right)  # f(x + y): f(x) + y
    if isinstance(node, ast.UnaryOp): yield node.operand
    if isinstance(node, ast.Attribute) and node.attr == "mT": yield node.value
    if isinstance(node, ast.Constant) and type(node.value) is int:
        for value in (node.value - 1, node.value + 1): yield ast.Constant(value)
    if isinstance(node, ast.Compare):
        for op in (ast.Lt, ast.LtE, ast.Gt, ast.GtE):
            if not isinstance(node.ops[0], op): yield ast.Compare(node.left, [op()], node.comparators)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        alike = set().union(*(words for words in ALIKE if node.id in words)) - {node.id}
        for name in sorted(alike & names if node.id in names else alike): yield ast.Name(name, ast.Load())
        if node.id == "D": yield ast.Attribute(node, "mT", ast.Load())


def places(tree):
    """(node, how to put another in its place) of each part of a tree."""
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, ast.AST): yield value, functools.partial(setattr, parent, field)
            for i, item in enumerate(value) if isinstance(value, list) else ():
                if isinstance(item, ast.AST): yield item, functools.partial(value.__setitem__, i)


# Changes that have plainer words than their formula.
PLAIN = {"t = steps": "t of the bias correction begins at 0 instead of 1",
         "t = steps + 2": "t of the bias correction begins at 2 instead of 1",
         "t = 1": "t of the bias correction is always 1: it does not grow",
         "lr_t = lr / (1 - beta1 ** t)": "only m gets its bias correction: sqrt(1 - beta2^t) is missing",
         "lr_t = lr * (1 - beta2 ** t) ** 0.5": "only v gets its bias correction: 1 - beta1^t is missing",
         "lr_t = lr * (1 - beta2 ** t) / (1 - beta1 ** t)": "the bias correction takes 1 - beta2^t without its root",
         "p = softmax(masked, -2)": "softmax runs over the queries instead of the keys: it takes dim=-1",
         "h = attn(ln1(x))": "the residual is missing around attention: it is x + attn(ln1(x))",
         "return ffn(ln2(h))": "the residual is missing around the FFN: it is x + ffn(ln2(x))",
         "return h + ffn(ln1(h))": "the FFN's norm is ln1 instead of ln2",
         "return h + ffn(ln2(x))": "attention and FFN are parallel: x + attn(ln1(x)) + ffn(ln2(x))",
         "return w * x / (sqrt(mean(x ** 2, -1)) + eps)": "RMSNorm's eps stands outside the root",
         "return w * x / (mean(x ** 2, -1) + eps)": "the norms take no root of mean(x^2) + eps",
         "return w * x / sqrt(total(x ** 2, -1) + eps)": "the norms sum x^2 instead of taking its mean",
         "return x / sqrt(mean(x ** 2, -1) + eps)": "the norms are not multiplied by their weight",
         "return gelu(gate) * value": "the activation is GELU instead of SiLU",
         "return relu(gate) * value": "the activation is ReLU instead of SiLU",
         "return silu(value) * gate": "w1 and w3 are swapped: SwiGLU is w2(silu(w1 x) * w3 x)",
         "return silu(gate * value)": "the FFN is w2(silu(w1 x * w3 x)) instead of w2(silu(w1 x) * w3 x)",
         "dS = P * (dP - D.mT)": "backward subtracts D along the keys: dP - D takes D[..., :, None]",
         "dK = dS @ q * scale": "dK is dS Q; dK = dS^T Q is right", "dV = P @ dO": "dV is P dO; dV = P^T dO is right",
         "dQ = dS @ k": "dQ lacks the factor 1/sqrt(D)", "dK = dS.mT @ q": "dK lacks the factor 1/sqrt(D)",
         "p = p - lr_t * m / sqrt(v + eps)": "eps stands inside the square root",
         "p = p - lr_t * m / (v + eps)": "v lacks its square root: it is sqrt(v) + eps",
         "p = p * (1 - decay)": "the weight decays by 1 - weight_decay; the handout's is 1 - lr * weight_decay"}


@functools.cache
def changes(formula):
    """[(a function that is formula with one small change, the change in words)], each once."""
    tree = ast.parse(inspect.getsource(formula))
    body, found = tree.body[0].body, {}
    if isinstance(body[0], ast.Expr): del body[0]  # what it says of itself
    arguments = [a.arg for a in tree.body[0].args.args]
    names = {*arguments, *(x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store))}
    before = [ast.unparse(line) for line in body]

    def keep():
        after = [ast.unparse(line) for line in body]
        if after == before or str(after) in found: return
        other = [(x, y) for x, y in zip(before, after) if x != y] if len(before) == len(after) else []
        lost = [x for x in before if x not in after]
        if sorted(before) == sorted(after): words = f"`{other[0][1]}` comes before `{other[0][0]}`"
        elif other: words = PLAIN.get(other[0][1]) or "; ".join(f"`{y}` instead of `{x}`" for x, y in other)
        else: words = f"`{lost[0]}` is left out"
        space = dict(formula.__globals__)
        with contextlib.suppress(SyntaxError, TypeError, ValueError):
            exec(compile(ast.fix_missing_locations(tree), formula.__name__, "exec"), space)
            found[str(after)] = space[formula.__name__], words

    for line in body:
        for node, put in places(line):
            for other in alternatives(node, names):
                put(copy.deepcopy(other))
                keep()
                put(node)
    for a, b in itertools.combinations(arguments, 2):  # two names are swapped throughout
        swap = {a: b, b: a}
        uses = [x for line in body for x in ast.walk(line) if isinstance(x, ast.Name) and x.id in swap]
        for x in uses: x.id = swap[x.id]
        keep()
        for x in uses: x.id = swap[x.id]
    for i, line in enumerate(body[:-1]):
        del body[i]  # a line is left out, or comes later
        keep()
        for j in range(i + 1, len(body)):
            body.insert(j, line)
            keep()
            del body[j]
        body.insert(i, line)
    return list(found.values())


class Differs(Exception):
    """Ends a run whose numbers are not yours."""


def explains(run, wrong, yours):
    """(how many of yours agree before the first that does not, the largest difference if all agree, else None)"""
    agreed = []

    def see(name, x):
        if name not in yours: return
        far = difference(yours[name], x) if yours[name].shape == x.shape else math.inf
        if far > SAME: raise Differs
        agreed.append(far)

    try: run(see, **wrong)
    except Exception: return len(agreed), None  # Differs, or what no longer is a formula
    return len(agreed), max(agreed, default=None)


def likely_causes(mistakes, run, yours, seconds=3):
    """([cause], how near) of those (arguments of run, cause) that give what yours gives: one of them, or else two.

    run(see, **arguments) calls see(name, tensor) in the order in which it computes."""
    right = {}
    run(right.__setitem__)
    yours = {name: yours[name] for name, x in right.items() if name in yours and yours[name].shape == x.shape}
    common, singles = explains(run, {}, yours)[0], []
    for wrong, cause in mistakes:
        agree, far = explains(run, wrong, yours)
        if far is not None: singles.append((-1, far, wrong, cause))
        elif agree >= common: singles.append((common - agree, None, wrong, cause))
    near = [(far, cause) for _, far, _, cause in singles if far is not None]
    if not near:
        # Of two mistakes one explains more than none, or both act where the first difference is.
        singles.sort(key=lambda single: single[0])
        end = time.thread_time() + seconds
        acts = functools.cache(lambda i: explains(run, singles[i][2], right)[0] <= common)
        for i, j in itertools.combinations(range(len(singles)), 2):
            (more, _, a, x), (_, _, b, y) = singles[i], singles[j]
            if time.thread_time() > end or near and not more: break
            if a.keys() & b.keys() or not (more or acts(i) and acts(j)): continue
            far = explains(run, a | b, yours)[1]
            if far is not None: near.append((far, f"{x}; and {y}"))
    best = min(near, default=(None, ""))[0]
    return list(dict.fromkeys(cause for far, cause in near if far <= 3 * best + 1e-6)), best


def say_cause(causes, far, what, unseen=lambda: ""):
    """unseen: what is said where no cause is found. Words come before formulas, of which the shortest is said."""
    if not causes: return print(f"No usual mistake explains it, nor do two. {unseen()}".rstrip())
    causes = [cause for cause in causes if "`" not in cause] or [min(causes, key=len)]
    mistake = "both" if "; and" in causes[0] else "this mistake"
    print(f"Likely cause: {', or '.join(causes[:3])}. ({what} with {mistake} is {far:.1e} from yours.)")


class Seen(TorchDispatchMode):
    """Keeps what each operation of yours gives, sorted, so that its layout does not count."""
    def __init__(self):
        super().__init__()
        self.values = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.keep(out)
        return out

    def keep(self, out):
        for t in tree_leaves(out):
            if not isinstance(t, torch.Tensor) or t.numel() < 2: continue
            if t.is_complex(): t = torch.view_as_real(t)
            if t.dtype.is_floating_point: self.values.append(t.detach().float().flatten().sort().values)

    def has(self, x):
        """Of masked scores those count that are not masked."""
        x = x.detach().float().flatten().sort().values
        unmasked = lambda t: t[t.numel() - x.numel():] if (t[:t.numel() - x.numel()] < -1e3).all() else t[:0]
        return any(apart(unmasked(t), x) <= 1e-3 for t in self.values if t.numel() >= x.numel())

    def lacks(self, stages):
        """In words, which of ours {stage: tensor, or any of several}, in order, no operation of yours gives."""
        has = {name: any(map(self.has, x if isinstance(x, tuple) else (x,))) for name, x in stages.items()}
        lacks = [name for name in has if not has[name]]
        if not lacks: return ""
        some = ", ".join(name for name in has if has[name])
        start = f"Operations of yours give our {some}; none" if some else "No operation of yours"
        return f"{start} gives our {', then '.join(lacks)}."


# ----------------------------------------------------------------------------------------------------------------------
# The handout's model, and mistakes in it. B batch, T positions, C d_model, H heads, D head size
# changes() reads these formulas, so each is written as the handout has it.

def gelu_by_tanh(x): return F.gelu(x, approximate="tanh")


def mean(x, axis): return x.mean(axis, keepdim=True)


def total(x, axis): return x.sum(axis, keepdim=True)


def position(scores, axis):
    return torch.arange(scores.shape[axis], device=scores.device).unsqueeze(1 if axis == -2 else 0)


def attend(q, k, v, causal, D):
    scores = q @ k.mT / D ** 0.5
    seen = position(scores, -1) <= position(scores, -2)
    masked = where(seen, scores, -math.inf) if causal else scores
    p = softmax(masked, -1)
    return p @ v


def changed_attend(q, k, v, causal, D, shift=0, fill=-math.inf, added=False, inverted=False, after=False, rounded=None,
                   alone=False, stages=None):
    """shift: how many keys too many a query sees. fill: what a masked score becomes, or what is added to it. inverted:
    the mask is turned. after: it comes after softmax. rounded: P's type. alone: the first batch is taken for all."""
    if alone: q, k, v = (t[:1].expand_as(t) for t in (q, k, v))
    scores = q @ k.mT / D ** 0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(shift if causal else q.shape[-2])
    if inverted: seen = ~seen
    p = softmax(scores if after else where(seen, scores, scores + fill if added else fill), -1)
    if after: p = p * seen
    if stages is not None: stages |= {"scores": (scores, scores[seen.expand_as(scores)]), "softmax": p}
    return (p if rounded is None else p.to(rounded).to(p)) @ v


def rope(x, theta, T, D):
    k = torch.arange(D // 2, dtype=torch.float64)
    angle = (torch.arange(T)[:, None] * theta ** (-2 * k / D)).to(x)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos(angle) - b * sin(angle), a * sin(angle) + b * cos(angle)), -1).flatten(-2)


def changed_rope(x, theta, T, D, halves=False, sign=1, rounded=None, twice=False):
    angle = torch.arange(T)[:, None] * theta ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D) * (1 + twice)
    c, s = (t.to(rounded or x.dtype).to(x) for t in (cos(angle), sign * sin(angle)))
    a, b = x.chunk(2, -1) if halves else (x[..., 0::2], x[..., 1::2])
    turned = (a * c - b * s, a * s + b * c)
    return torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2)


def rms_norm(x, w, eps=1e-5):
    return w * x / sqrt(mean(x ** 2, -1) + eps)


def swiglu(gate, value):
    return silu(gate) * value


def block(x, attn, ffn, ln1, ln2):
    h = x + attn(ln1(x))
    return h + ffn(ln2(h))


def post_norm(x, attn, ffn, ln1, ln2):
    h = ln1(x + attn(x))
    return ln2(h + ffn(h))


def normed_residual(x, attn, ffn, ln1, ln2, first=True, second=True):
    x = ln1(x) + attn(ln1(x)) if first else x + attn(ln1(x))
    return ln2(x) + ffn(ln2(x)) if second else x + ffn(ln2(x))


def bare_block(x, attn, ffn, ln1, ln2):
    return ffn(ln2(attn(ln1(x))))


def reference(see, w, tokens, heads, theta, layers, norm=rms_norm, glu=swiglu, block=block, rope=rope, attend=attend,
              cut="", qk_norm=False, turned="qk", place="head", joined=False, transposed=(), exchanged=(), layer=None,
              embedding=1, final=True, end=lambda logits: logits, stages=None):
    """Calls see(module, its output) in the order of forward. w: weights by name. The rest: ours, or a mistake."""
    kept = set()

    def keep(name, x):
        if name not in kept: see(name, x)
        kept.add(name)
        return x

    def weight(name):
        for a, b in (exchanged, exchanged[::-1]) if exchanged else ():
            if name.endswith(a): return w[name.removesuffix(a) + b + ".weight"]
        return w[name + ".weight"]

    def linear(name, x):
        return keep(name, x @ (weight(name) if name.endswith(tuple(transposed)) else weight(name).T))

    def normed(name): return lambda x: keep(name, norm(x, weight(name)))

    def attention(name, x):
        B, T, C = x.shape
        D = C // heads
        q, k, v = (linear(f"{name}.{p}_proj", x) for p in "qkv")
        turn = lambda x: rope(x, float(theta), *x.shape[-2:])
        if qk_norm == "all": q, k = (rms_norm(y, torch.ones(C)) for y in (q, k))
        if place == "model": q, k = turn(q), turn(k)
        if cut == "view": q, k, v = (y.view(B, heads, T, D) for y in (q, k, v))
        elif cut == "last": q, k, v = (y.view(B, T, D, heads).permute(0, 3, 1, 2) for y in (q, k, v))
        else: q, k, v = (y.view(B, T, heads, D).transpose(1, 2) for y in (q, k, v))
        if qk_norm == "head": q, k = (rms_norm(y, torch.ones(D)) for y in (q, k))
        if place == "head": q, k, v = (turn(y) if p in turned else y for p, y in zip("qkv", (q, k, v)))
        o = attend(q, k, v, True, D)
        if stages is not None:
            inner = {"q after the rotary embedding": q, "k after the rotary embedding": k}
            changed_attend(q, k, v, True, D, stages=inner)
            stages.setdefault(name, inner | {"values": o})
        if not joined: o = o.transpose(1, 2)
        elif cut == "last": o = o.permute(0, 2, 3, 1)
        return keep(name, linear(name + ".output_proj", o.reshape(B, T, C)))

    def ffn(name, x):
        gate, value = linear(name + ".w1", x), linear(name + ".w3", x)
        if stages is not None: stages[name] = {"silu(w1 x)": silu(gate), "silu(w1 x) * w3 x": glu(gate, value)}
        return keep(name, linear(name + ".w2", glu(gate, value)))

    x = keep("token_embeddings", w["token_embeddings.weight"][tokens]) * embedding
    for i in range(layers):
        at = f"layers.{layer(i) if layer else i}."
        x = block(x, functools.partial(attention, at + "attn"), functools.partial(ffn, at + "ffn"), normed(at + "ln1"),
                  normed(at + "ln2"))
        keep(f"layers.{i}", x)
    x = normed("ln_final")(x) if final else x
    keep("lm_head", end(x @ weight("lm_head").T))


def rounded_norm(dtype, x, w): return rms_norm(x.to(dtype), w.to(dtype)).to(x)


def mistakes(w, heads, theta, layers, first):
    """(what is to be changed in reference's arguments, the cause in words). first: the first module that differs"""
    C = w["token_embeddings.weight"].shape[1]
    D, part = C // heads, functools.partial
    turns = "the rotary embedding"
    for place, at in dict(head="", model=", before the heads are split").items():
        for sign, other in ((1, ""), (-1, ", and the other way")):
            yield (dict(place=place, rope=part(changed_rope, halves=True, sign=sign)),
                   f"{turns} turns x[i] with x[i + D/2] instead of x[2i] with x[2i + 1]{at}{other}")
        if place == "model": yield dict(place=place), f"{turns} comes{at[1:]}"
    yield dict(rope=part(changed_rope, sign=-1)), f"{turns} turns the other way: the sign of sin is wrong"
    yield dict(rope=part(changed_rope, twice=True)), f"{turns} is applied twice"
    yield dict(turned=""), f"there is no {turns[4:]}, or its positions are the heads"
    yield dict(turned="q"), f"only q gets {turns}, and k does not"
    yield dict(turned="k"), f"only k gets {turns}, and q does not"
    yield dict(turned="qkv"), f"v gets {turns}, too; only q and k take it"
    for other in sorted({10, 100, 1000, 1e4, 1e5, 5e5, 1e6, theta ** 0.5} - {theta}):
        or_exponent = ", or its exponent lacks its factor 2: it is -2k/D" if other == theta ** 0.5 else ""
        yield dict(theta=other), f"theta of {turns} is {other:g} instead of {theta:g}{or_exponent}"
    for other in range(1, C // 2 + 1):
        if other == heads or C % (2 * other): continue
        yield dict(heads=other), f"there are {other} heads instead of {heads}"
    for wrong in (dict(cut="view"), dict(cut="view", joined=True)):
        yield wrong, "heads are cut by view(B, H, T, D); the handout's by view(B, T, H, D).transpose(1, 2)"
    for wrong in (dict(cut="last"), dict(cut="last", joined=True)):
        yield wrong, "heads are interleaved: they are cut by view(B, T, D, H) instead of view(B, T, H, D)"
    yield dict(joined=True), "heads are joined without transpose(1, 2) before the reshape"
    for qk_norm in ("all", "head"): yield dict(qk_norm=qk_norm), "q and k are normed; the handout's are not"
    yield from attention_mistakes(D)
    if heads > 1: yield dict(attend=lambda q, k, v, causal, D: attend(q, k, v, causal, C)), \
        "scores are divided by sqrt(d_model) instead of sqrt(D)"
    for eps in (0, 1e-12, 1e-8, 1e-6, 1e-4, 1e-3):
        yield dict(norm=part(rms_norm, eps=eps)), f"RMSNorm's eps is {eps:g} instead of 1e-5"
    layer_norm = lambda x, w: rms_norm(x - mean(x, -1), w)
    yield dict(norm=layer_norm), "the norms subtract the mean, as LayerNorm does; RMSNorm does not"
    yield dict(norm=lambda x, w: rms_norm(x, 1 + w)), "the norms are multiplied by 1 + weight"
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype)[6:]
        yield dict(norm=part(rounded_norm, dtype)), f"the norms are computed in {name}"
        yield dict(rope=part(changed_rope, rounded=dtype)), f"{turns}'s cos and sin are rounded to {name}"
    yield dict(block=post_norm), "norms come after the residual sum, and not before attention and before the FFN"
    for which in ({}, dict(second=False), dict(first=False)):
        yield (dict(block=part(normed_residual, **which)),
               "a residual adds the normed x: it is x + attn(ln1(x)), then x + ffn(ln2(x))")
    yield dict(block=bare_block), "both residuals of a block are missing: x + attn(ln1(x)), then x + ffn(ln2(x))"
    is_turned = "transposed: a Linear is x @ weight.T, and weight is [out, in]"
    square = [name[:-7] for name, p in w.items() if name.startswith("layers.0.") and len(set(p.shape)) < p.dim()]
    for name in square:
        short, name = name.replace("layers.0", ""), name.replace("layers.0", ".".join(first.split(".")[:2]))
        yield dict(transposed=[short]), f"each layer's {short[1:]}.weight is {is_turned}"
        yield dict(transposed=[name]), f"{name}.weight is {is_turned}"
    yield dict(transposed=["_proj"]), f"each of attention's weights is {is_turned}"
    projections = itertools.combinations(("q_proj", "k_proj", "v_proj", "output_proj"), 2)
    for pair in [*projections, ("ln1", "ln2"), ("w1", "w3")]:
        yield dict(exchanged=pair), f"{pair[0]} and {pair[1]} are swapped"
    yield dict(final=False), "there is no norm before lm_head"
    yield dict(embedding=C ** 0.5), "the embedding is multiplied by sqrt(d_model)"
    for end in (torch.softmax, torch.log_softmax):
        yield dict(end=part(end, dim=-1)), f"the model returns {end.__name__}(logits) instead of logits"
    if layers > 1:
        yield dict(layers=layers - 1), "the last layer is left out"
        yield dict(layer=lambda i: 0), "each layer is the first one's block"
        yield dict(layer=lambda i: layers - 1 - i), "the layers run in the opposite order"
    for formula in (block, rms_norm, swiglu, rope, attend):
        key = {"rms_norm": "norm", "swiglu": "glu"}.get(formula.__name__, formula.__name__)
        for changed, words in changes(formula): yield {key: changed}, words


def attention_mistakes(D):
    made = lambda **wrong: dict(attend=functools.partial(changed_attend, **wrong))
    divided_by = lambda square: dict(attend=lambda q, k, v, causal, D: attend(q, k, v, causal, square))
    yield divided_by(1), "scores are not divided by sqrt(D)"
    yield divided_by(D ** 2), "scores are divided by D, or by sqrt(D) twice, instead of by sqrt(D)"
    yield made(shift=1), "the causal mask is off by one: a query sees the key after its own"
    yield made(shift=1 << 30), "there is no causal mask"
    for fill, added in ((-math.inf, False), (-1e6, False), (-1e9, False), (-1e6, True), (-1e9, True)):
        how, inverted = dict(fill=fill, added=added), "the causal mask is inverted: a query sees"
        yield made(shift=-1, **how), "the causal mask is off by one: a query does not see its own key"
        yield made(inverted=True, **how), f"{inverted} only the keys after its own"
        yield made(inverted=True, shift=-1, **how), f"{inverted} its own key and those after it"
    for fill, added in itertools.product((-1, -10, -100), (False, True)):
        words = "less by" if added else "becomes"
        yield made(fill=fill, added=added), f"a masked score {words} {-fill if added else fill}; it has to become -inf"
    yield made(fill=0), "masked scores become 0; they have to become -inf before softmax"
    yield made(after=True), "the mask comes after softmax: a row of P no longer adds up to 1"
    yield made(alone=True), "each batch gets what is the first one's"
    for dtype in ("bfloat16", "float16"): yield made(rounded=getattr(torch, dtype)), f"P is rounded to {dtype}"


def tiled(q, k, v, causal, size, wrong):
    """FlashAttention over tiles of that many keys and queries, with one mistake."""
    scale, (S, B) = q.shape[-1] ** -0.5, (q.shape[-2], size)
    o, l, m = torch.zeros_like(q), q.new_zeros(*q.shape[:-1], 1), q.new_full((*q.shape[:-1], 1), -math.inf)
    row = torch.arange(S, device=q.device)[:, None]
    end = {"first": B, "rest": S // B * B, "last": S - 1 - (S - 1) % B}.get(wrong, S)
    for j in range(0, end, B):
        s = q @ k[..., j:j + B, :].transpose(-1, -2) * scale
        column = torch.arange(j, min(j + B, S), device=q.device)[None]
        if causal: s = s.masked_fill(column % B > row % B if wrong == "local" else column > row, -1e6)
        if wrong == "diagonal": s = s.masked_fill(column // B >= (row // B).clamp(min=1), -math.inf)
        top = s.amax((-2, -1), keepdim=True) if wrong == "axis" else s.amax(-1, keepdim=True)
        new = torch.maximum(m, top)
        p, old = (s - new).exp(), (m - new).exp()
        l = (l if wrong == "l" else old * l) + p.sum(-1, keepdim=True)
        o = (o if wrong == "o" else o / old if wrong == "inverse" and j else old * o) + p @ v[..., j:j + B, :]
        m = s.amax(-1, keepdim=True) if wrong == "max" else new
    return o if wrong == "norm" else o / l


def tile_mistakes(causal):
    """({mistake, size of tiles}, cause)"""
    words = {"o": "O is not multiplied by exp(m_old - m_new) when the maximum grows",
             "l": "l is not multiplied by exp(m_old - m_new) when the maximum grows",
             "inverse": "O is divided by exp(m_old - m_new) instead of multiplied",
             "max": "m is the tile's maximum instead of the largest so far", "norm": "O is not divided by l at the end",
             "first": "only the first tile of keys is read", "last": "the last tile of keys is left out",
             "rest": "the last keys, no whole tile, are left out"}
    if causal:
        words["local"] = "the causal mask compares places inside a tile instead of in the sequence"
        words["diagonal"] = "the tile on the diagonal is left out, but for the first"
    for wrong, size in itertools.product(words, (16, 32, 64, 128)):
        yield dict(wrong=wrong, size=size), f"{words[wrong]} (tiles of {size})"


# ----------------------------------------------------------------------------------------------------------------------
# The handout's AdamW, and mistakes in it

GIVEN = dict(lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY)
OTHER = dict(lr=2e-2, betas=(0.8, 0.99), eps=1e-5, weight_decay=0.3)  # of the second group, where there are two
USUAL = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
FACTORS = dict(lr=1.5, weight_decay=2)  # what becomes of a group's settings before each step but the first


def adamw(p, m, v, g, steps, lr, beta1, beta2, eps, decay):
    t = steps + 1
    lr_t = lr * (1 - beta2 ** t) ** 0.5 / (1 - beta1 ** t)
    p = p * (1 - lr * decay)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g ** 2
    p = p - lr_t * m / (sqrt(v) + eps)
    return p, m, v


def adamw_of_torch(p, m, v, g, steps, lr, beta1, beta2, eps, decay):
    t = steps + 1
    p = p * (1 - lr * decay)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g ** 2
    m_hat = m / (1 - beta1 ** t)
    v_hat = v / (1 - beta2 ** t)
    p = p - lr * m_hat / (sqrt(v_hat) + eps)
    return p, m, v


def settings_of(group, steps, own=True, kept=(), stepped=(0, 1), **more):
    """A group's settings at each step."""
    setting = OTHER if group and own else GIVEN
    setting = setting | {key: value for key, value in more.items() if key in setting}
    factors = {} if group is False else {key: 1 if key in kept else factor for key, factor in FACTORS.items()}
    steps = steps if group in stepped else 0
    return [setting | {key: setting[key] * factor ** t for key, factor in factors.items()} for t in range(steps)]


def after_steps(p, gradients, settings, of_torch=False, formula=None, after=False, corrected=True, l2=False, **_):
    """[p, m, v] after a step for each of the gradients and settings, in double."""
    formula = formula or (adamw_of_torch if of_torch else adamw)
    state = p.double(), torch.zeros_like(p.double()), torch.zeros_like(p.double())
    for steps, (g, setting) in enumerate(zip(gradients, settings)):
        lr, betas, eps, decay = setting.values()
        steps = torch.tensor(float(steps) if corrected else math.inf, dtype=torch.float64)
        g = g.double() + (decay * state[0] if l2 else 0)
        p, m, v = formula(*state, g, steps, lr, *betas, eps, 0 if after or l2 else decay)
        state = p * (1 - lr * decay) if after else p, m, v
    return state


def optimizer_mistakes():
    yield dict(corrected=False), "there is no bias correction"
    yield dict(l2=True), "weight decay is added to the gradient (Adam with L2) instead of to the weight"
    yield dict(after=True), "the weight decays after the step (as in 2025's handout)"
    yield dict(of_torch=True), "eps is added after the bias correction (as in torch.optim.AdamW)"
    yield dict(betas=(0.999, 0.9)), "the betas are swapped: m takes 0.9 and v takes 0.999"
    yield dict(weight_decay=0), "there is no weight decay"
    for betas in ((0.9, 0.95), (0.9, 0.98), (0.9, 0.99)):
        yield dict(betas=betas), f"the betas are {betas} instead of (0.9, 0.999)"
    for eps in (1e-12, 1e-10, 1e-7, 1e-6, 1e-5): yield dict(eps=eps), f"eps is {eps:g} instead of 1e-8"
    for formula in (adamw, adamw_of_torch):
        for changed, words in changes(formula): yield dict(formula=changed), words


def group_mistakes():
    """With two groups, whose settings change between steps."""
    yield dict(own=False), "the second group gets the first one's settings"
    for group, words in enumerate(("first", "last")): yield dict(stepped=[group]), f"only the {words} group is stepped"
    for keys in (["lr"], ["weight_decay"], ["lr", "weight_decay"]):
        yield dict(kept=keys), f"{' and '.join(keys)}: read once; what is changed in param_groups later does nothing"
    for key, value in USUAL.items(): yield {key: value}, f"{key}: always {value}, whatever is given"


# ----------------------------------------------------------------------------------------------------------------------
# Attention's backward, and mistakes in it

def backward(q, k, v, dO, O, P, scale):
    dP = dO @ v.mT
    D = total(dO * O, -1)
    dS = P * (dP - D)
    dQ = dS @ k * scale
    dK = dS.mT @ q * scale
    dV = P.mT @ dO
    return dQ, dK, dV


def backward_with(see, q, k, v, do, causal, formula=backward, power=1, D=1, L="", masked=True, unnormalised=False,
                  order=(0, 1, 2), rounded=None, alone=False):
    """Calls see() with dq, dk, dv: forward is right, and backward is this formula. power: how often it has scale."""
    if alone: q, k, v, do = (t[:1].expand_as(t) for t in (q, k, v, do))
    scale, o = q.shape[-1] ** -0.5, attend(q, k, v, causal, q.shape[-1])
    scores = q @ k.mT * scale
    seen = torch.ones_like(scores, dtype=torch.bool).tril(0 if causal else q.shape[-2])
    visible = scores.masked_fill(~seen, -math.inf)
    m, lse = visible.amax(-1, keepdim=True), visible.logsumexp(-1, keepdim=True)
    p = exp(scores - {"": lse, "keys": lse.mT, "m": m, "l": exp(lse - m), "log l": lse - m}[L])
    if masked: p = p * seen
    if rounded: p = p.to(rounded).to(q)
    dq, dk, dv = formula(q, k, v, do, o * D, p, scale ** power)
    if unnormalised: dv = exp(visible - m).mT @ do
    for name, place in zip(("dq", "dk", "dv"), order): see(name, (dq, dk, dv)[place])


def backward_mistakes(causal):
    D_of_dP = lambda q, k, v, dO, O, P, scale: backward(q, k, v, dO, total(dO @ v.mT, -1) / dO / dO.shape[-1], P, scale)
    yield dict(formula=D_of_dP), "backward has D = rowsum(dP) instead of rowsum(dO * O)"
    yield dict(D=0), "backward lacks D = rowsum(dO * O): dS = P * (dP - D)"
    yield dict(power=0), "dQ and dK lack the factor 1/sqrt(D)"
    yield dict(power=2), "dQ and dK have the factor 1/sqrt(D) twice"
    for L, words in {"keys": "L along the keys: S - L takes L[..., :, None]",
                     "m": "only the scores' maximum m instead of L = m + log l",
                     "l": "l instead of L = m + log l", "log l": "log l instead of L = m + log l"}.items():
        yield dict(L=L), f"backward subtracts {words}"
    if causal: yield dict(masked=False), "backward recomputes P without the causal mask"
    yield dict(unnormalised=True), "dV takes exp(S - m), which is not divided by l, instead of P"
    for order in itertools.permutations(range(3)):
        got = ", ".join(("dQ", "dK", "dV")[i] for i in order)
        if order != (0, 1, 2): yield dict(order=order), f"backward returns {got} instead of dQ, dK, dV"
    for dtype in ("bfloat16", "float16"): yield dict(rounded=getattr(torch, dtype)), f"backward rounds P to {dtype}"
    yield dict(alone=True), "each batch gets what is the first one's gradient"
    for changed, words in changes(backward): yield dict(formula=changed), words


def lse_mistakes(scores, lse):
    """(another tensor, what it is)"""
    m = scores.amax(-1)
    l = exp(lse - m)
    base_2 = "the saved logsumexp is in base 2, as exp2 takes it; the handout's L is in base e, ln 2 times that"
    others = {"l": l, "log l": log(l), "m + l": m + l, "m * l": m * l, "the sum of exp(S)": exp(lse)}
    return [(lse / math.log(2), base_2), (m, "the saved tensor is not the logsumexp but only the scores' maximum"),
            *((t, f"the saved tensor is {what}; L = m + log l") for what, t in others.items())]
