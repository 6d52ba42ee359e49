"""tests/check_causes.py: ours, as formulas, and which small change of them gives what yours gives.

changes() reads a formula's own text and changes it in one place: a factor left out, eps outside the root, another axis,
power, sign, name or order of lines. A mistake has an entry here only if it is more than that, or has plainer words;
then rewritten() puts other lines into the formula's text."""
import ast, contextlib, functools, inspect, itertools, math, re, time, warnings
import torch
from torch import cos, exp, log, sigmoid, sin, softmax, sqrt, tanh, where  # noqa: F401, names of changed formulas
import torch.nn.functional as F
from torch.nn.functional import gelu, relu, silu  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SAME = 2e-5  # so near is ours with a mistake to yours, in fp32, if the mistake is yours
SECONDS = 2  # so long pairs of mistakes are tried
LR, DECAY = 2e-2, 0.01


def difference(a, b):
    """The norm of a - b over the norm of b. What is not finite counts as equal where both have the same."""
    a, b = a.detach().double(), b.detach().double().to(a.device)
    same = (a == b) | (a.isnan() & b.isnan())
    apart, norm = torch.where(same, 0, a - b).norm().item(), torch.where(b.isfinite(), b, 0).norm().item()
    return 0.0 if same.all() else apart / norm if norm > 0 and math.isfinite(apart) else math.inf


def not_finite(t):
    """Says how much of a tensor of two or more axes is NaN or infinite, if any is."""
    wrong, what = (~t.isfinite()).flatten(0, -2).any(-1), "NaN" if t.isnan().any() else "infinite"
    if not wrong.any(): return ""
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
    "gate value", "a b", "T D", "q k v dO O", "dP dS P D", "dQ dK dV", "scores masked p", "p m v g",
    "L m", "c s", "i j", "lr beta1 beta2 eps decay lr_t")]

# What stands for `a op b`: a part is left out, another operation or order, or the same twice.
CHANGED = {ast.Add: "a, b, a - b", ast.Sub: "a, a + b", ast.Mult: "a, b, a / b, a * b * b",
           ast.Div: "a, a * b, a / b / b", ast.MatMult: "b @ a"}


def alternatives(node, names):
    """What may stand for a part of a formula by mistake."""
    match node:
        case ast.BinOp(a, op, b):
            for other in CHANGED.get(type(op), "a").split(", "):
                yield re.sub(r"\b[ab]\b", lambda part: f"({ast.unparse(a if part[0] == 'a' else b)})", other)
            for x, y in ((a, b), (b, a)):  # f(x) + y becomes f(x + y)
                if isinstance(x, ast.Call) and x.args and isinstance(op, (ast.Add, ast.Mult)):
                    yield ast.unparse(ast.Call(x.func, [ast.BinOp(x.args[0], op, y), *x.args[1:]], []))
        case ast.Call(f, [x, *rest]):
            yield ast.unparse(x)
            if isinstance(x, ast.BinOp):  # f(x + y) becomes f(x) + y
                yield ast.unparse(ast.BinOp(ast.Call(f, [x.left, *rest], []), x.op, x.right))
        case ast.UnaryOp(_, x) | ast.Attribute(x, "mT"): yield ast.unparse(x)
        case ast.Constant(int(value)): yield from map(str, (value - 1, value + 1))
        case ast.Compare(a, [_], [b]):
            for op in ("<", "<=", ">", ">="): yield f"{ast.unparse(a)} {op} {ast.unparse(b)}"
        case ast.Name(name, ast.Load()):
            alike = set().union(*(words for words in ALIKE if name in words)) - {name}
            yield from sorted(alike & names if name in names else alike)
            if name in ("D", "L"): yield name + ".mT"


def variants(line, names):
    """Each text that is this line with one part changed."""
    for node in ast.walk(ast.parse(line)):
        for other in alternatives(node, names):
            yield ast.unparse(ast.parse(f"{line[:node.col_offset]}({other}){line[node.end_col_offset:]}"))


# Changes that have plainer words than their formula.
PLAIN = {"t = steps + 2": "t of the bias correction begins at 2 instead of 1",
         "t = 1": "t of the bias correction is always 1: it does not grow",
         "lr_t = lr / (1 - beta1 ** t)": "only m gets its bias correction: sqrt(1 - beta2^t) is missing",
         "lr_t = lr * (1 - beta2 ** t) ** 0.5": "only v gets its bias correction: 1 - beta1^t is missing",
         "lr_t = lr * (1 - beta2 ** t) / (1 - beta1 ** t)": "the bias correction takes 1 - beta2^t without its root",
         "p = softmax(masked, -2)": "softmax runs over the queries instead of the keys: it takes dim=-1",
         "p = softmax(scores, -1)": "there is no causal mask",
         "scores = q @ k.mT": "scores are not divided by sqrt(D)",
         "scores = q @ k.mT / D": "scores are divided by D, or by sqrt(D) twice, instead of by sqrt(D)",
         "q = split(q)": "only k gets the rotary embedding, and q does not",
         "k = split(k)": "only q gets the rotary embedding, and k does not",
         "h = attn(ln1(x))": "the residual is missing around attention: it is x + attn(ln1(x))",
         "return ffn(ln2(h))": "the residual is missing around the FFN: it is x + ffn(ln2(x))",
         "return h + ffn(ln1(h))": "the FFN's norm is ln1 instead of ln2",
         "return w * x / (sqrt(mean(x ** 2, -1)) + eps)": "RMSNorm's eps stands outside the root",
         "return w * x / (mean(x ** 2, -1) + eps)": "the norms take no root of mean(x^2) + eps",
         "return w * x / sqrt(total(x ** 2, -1) + eps)": "the norms sum x^2 instead of taking its mean",
         "return x / sqrt(mean(x ** 2, -1) + eps)": "the norms are not multiplied by their weight",
         "return x @ w.T": "there is no norm before lm_head",
         "return gelu(gate) * value": "the activation is GELU instead of SiLU",
         "return silu(value) * gate": "w1 and w3 are swapped: SwiGLU is w2(silu(w1 x) * w3 x)",
         "return silu(gate * value)": "the FFN is w2(silu(w1 x * w3 x)) instead of w2(silu(w1 x) * w3 x)",
         "P = exp(S - L)": "backward recomputes P without the causal mask",
         "P = exp(S - L.mT) * seen": "backward subtracts L along the keys: S - L takes L[..., :, None]",
         "dS = P * dP": "backward lacks D = rowsum(dO * O): dS = P * (dP - D)",
         "dS = P * (dP - D.mT)": "backward subtracts D along the keys: dP - D takes D[..., :, None]",
         "dK = dS @ q * scale": "dK is dS Q; dK = dS^T Q is right", "dV = P @ dO": "dV is P dO; dV = P^T dO is right",
         "dQ = dS @ k": "dQ lacks the factor 1/sqrt(D)", "dK = dS.mT @ q": "dK lacks the factor 1/sqrt(D)",
         "p = p - lr_t * m / sqrt(v + eps)": "eps stands inside the square root",
         "p = p - lr_t * m / (v + eps)": "v lacks its square root: it is sqrt(v) + eps",
         "p = p * (1 - decay)": "the weight decays by 1 - weight_decay; the handout's is 1 - lr * weight_decay"}


@functools.cache
def lines_of(formula):
    if hasattr(formula, "lines"): return formula.lines
    return [ast.unparse(line) for line in ast.parse(inspect.getsource(formula)).body[0].body]


def with_lines(formula, lines):
    """The function that has these lines instead of the formula's."""
    space = dict(formula.__globals__)
    exec("\n    ".join([f"def other{inspect.signature(formula)}:", *lines]), space)
    space["other"].lines = lines
    return space["other"]


def rewritten(formula, *others):
    """formula with other lines, each in the place of the last that sets the same name, or that returns."""
    lines, sets = list(lines_of(formula)), lambda line: "return" if line[:6] == "return" else line.split(" = ")[0]
    for other in others: lines[max(i for i, line in enumerate(lines) if sets(line) == sets(other))] = other
    return with_lines(formula, lines)


def in_words(before, after):
    """How the lines of a formula have changed."""
    other = [(x, y) for x, y in zip(before, after) if x != y]
    if len(before) > len(after): return f"`{next(x for x in before if x not in after)}` is left out"
    if sorted(before) == sorted(after): return f"`{other[0][1]}` comes before `{other[0][0]}`"
    return PLAIN.get(other[0][1]) or "; ".join(f"`{y}` instead of `{x}`" for x, y in other)


@functools.cache
def changes(formula):
    """[(a function that is formula with one small change, the change in words)], each once."""
    lines, arguments, found = lines_of(formula), list(inspect.signature(formula).parameters), {}
    names = {*arguments, *(name for line in lines for name in re.findall(r"\w+", line.rpartition(" = ")[0]))}
    bodies = [[*lines[:i], other, *lines[i + 1:]] for i, line in enumerate(lines) for other in variants(line, names)]
    for a, b in itertools.combinations(arguments, 2):  # two names are swapped throughout
        swap = {a: b, b: a}
        bodies.append([re.sub(rf"\b({a}|{b})\b", lambda name: swap[name[0]], line) for line in lines])
    for i, line in enumerate(lines[:-1]):  # a line is left out, or comes later
        rest = lines[:i] + lines[i + 1:]
        bodies += [rest, *(rest[:j] + [line] + rest[j:] for j in range(i + 1, len(rest)))]
    for body in bodies:
        if body == lines or tuple(body) in found: continue
        with contextlib.suppress(SyntaxError, TypeError, ValueError):
            found[tuple(body)] = with_lines(formula, body), in_words(lines, body)
    return list(found.values())


def explains(run, wrong, yours):
    """(how many of yours agree before the first that does not, the largest difference if all agree, else None)"""
    agreed, told = [], []  # told: is it more than NaN, which many mistakes give

    def see(name, x):
        if name not in yours: return
        far = difference(yours[name], x) if yours[name].shape == x.shape else math.inf
        if far > SAME: raise ArithmeticError
        agreed.append(far)
        told.append(bool(x.isfinite().any()))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a changed formula: it is not the student's
            run(see, **wrong)
    except Exception: return len(agreed), None  # it differs, or is no formula any more
    return len(agreed), max(agreed) if any(told) else None


def likely_causes(mistakes, run, yours):
    """([cause], how near) of those (arguments of run, cause) that give what yours gives: one of them, or else two.

    run(see, **arguments) calls see(name, tensor) in the order in which it computes. Each mistake is tried, and then
    pairs, the likely ones first, until this thread has taken SECONDS more. It is alone: the tensors are small, and
    threads would wait for one another."""
    right, near, others, threads = {}, [], [], torch.get_num_threads()
    torch.set_num_threads(1)
    run(right.__setitem__)
    yours = {name: yours[name] for name, x in right.items() if name in yours and yours[name].shape == x.shape}
    common, all_agree = explains(run, {}, yours)
    if all_agree is not None: return [], None
    for wrong, cause in mistakes:
        agree, far = explains(run, wrong, yours)
        if far is not None: near.append((far, cause))
        elif agree >= common: others.append((agree - common, wrong, cause))
    # Of two mistakes one explains more than none, or both act where the first difference is. Usual ones have words.
    others = [] if near else sorted(others, key=lambda other: (-other[0], "`" in other[2]))
    acts = functools.cache(lambda i: explains(run, others[i][1], right)[0] <= common)
    end, n, helpful = time.thread_time() + SECONDS, len(others), sum(more > 0 for more, _, _ in others)
    one_helps = ((i, j) for i in range(helpful) for j in range(i + 1, n))
    both_act = ((i, j) for j in range(helpful, n) for i in range(helpful, j))
    for i, j in itertools.chain(one_helps, both_act):
        (more, a, x), (_, b, y) = others[i], others[j]
        if time.thread_time() > end or near and not more: break
        if a.keys() & b.keys() or not (more or acts(i) and acts(j)): continue
        far = explains(run, a | b, yours)[1]
        if far is not None: near.append((far, f"{x}; and {y}"))
    torch.set_num_threads(threads)
    best = min(near, default=(None, ""))[0]
    return list(dict.fromkeys(cause for far, cause in near if far <= 3 * best + 1e-6)), best


def say_cause(causes, far, what, unseen=lambda: ""):
    """unseen: what is said where no cause is found. Words come before formulas, of which the shortest is said."""
    if not causes: return print(f"No usual mistake explains it, nor do two. {unseen()}".rstrip())
    causes = [cause for cause in causes if "`" not in cause] or [min(causes, key=len)]
    mistake = "both" if "; and" in causes[0] else "this mistake"
    print(f"Likely cause: {', or '.join(causes[:3])}. ({what} with {mistake} is {far:.1e} from yours.)")


class Seen(TorchDispatchMode):
    """Keeps what each operation of yours gives, sorted, so that its layout does not count. What torch.empty gives does
    not count: it may be a tensor of ours that was freed."""
    def __init__(self):
        super().__init__()
        self.values = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if "empty" not in str(function): self.keep(out)
        return out

    def keep(self, out):
        for t in tree_leaves(out):
            if not isinstance(t, torch.Tensor) or t.numel() < 2: continue
            if t.is_complex(): t = torch.view_as_real(t.resolve_conj())
            if t.dtype.is_floating_point: self.values.append(t.detach().float().flatten().sort().values)

    def has(self, x):
        """Of masked scores those count that are not masked."""
        x = x.detach().float().flatten().sort().values
        unmasked = lambda t: t[t.numel() - x.numel():] if (t[:t.numel() - x.numel()] < -1e3).all() else t[:0]
        return any(apart(unmasked(t), x) <= 1e-3 for t in self.values if t.numel() >= x.numel())

    def lacks(self, stages):
        """In words, which of ours {stage: tensor, or any of several}, in order, no operation of yours gives."""
        parts = {name: x if isinstance(x, tuple) else (x,) for name, x in stages.items()}
        most = max((t.numel() for t in self.values), default=0)  # by tiles, no operation gives a whole one
        has = {name: any(map(self.has, x)) for name, x in parts.items() if most >= min(t.numel() for t in x)}
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
def positions(scores): return [torch.arange(n, device=scores.device) for n in scores.shape[-2:]]


def attend(q, k, v, causal, D):
    scores = q @ k.mT / D ** 0.5
    i, j = positions(scores)
    seen = j <= i[:, None]
    masked = where(seen, scores, -math.inf) if causal else scores
    p = softmax(masked, -1)
    return p @ v


def rope(x, theta, T, D):
    k = torch.arange(D // 2, dtype=torch.float64)
    angle = (torch.arange(T)[:, None] * theta ** (-2 * k / D)).to(x)
    c, s = cos(angle), sin(angle)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)


def heads_of(q, k, v, split, turn):
    q = turn(split(q))
    k = turn(split(k))
    return q, k, split(v)


def split(y, H): return y.unflatten(-1, (H, -1)).transpose(1, 2)
def join(o): return o.transpose(1, 2).flatten(-2)
def embedded(x): return x
def logits_of(x, norm, w): return norm(x) @ w.T
def rms_norm(x, w, eps=1e-5): return w * x / sqrt(mean(x ** 2, -1) + eps)
def swiglu(gate, value): return silu(gate) * value


def block(x, attn, ffn, ln1, ln2):
    h = x + attn(ln1(x))
    return h + ffn(ln2(h))


def steps_of_attention(q, k, v, causal):
    """What attend computes on the way, and m, a row's maximum, and L, its logsumexp. stages: what yours may compute."""
    steps = rewritten(attend, "return locals()")(q, k, v, causal, q.shape[-1])
    scores, masked, p = (steps[name] for name in ("scores", "masked", "p"))
    unmasked, stages = masked.isfinite(), {"scores": (scores, scores[masked.isfinite()]), "softmax": p}
    L, m = masked.logsumexp(-1, keepdim=True), masked.amax(-1, keepdim=True)
    return dict(scores=scores, masked=masked, unmasked=unmasked, L=L, m=m, p=p, O=p @ v, stages=stages)


def reference(see, w, tokens, heads, theta, order, norm=rms_norm, glu=swiglu, block=block, rope=rope, attend=attend,
              heads_of=heads_of, split=split, join=join, embedded=embedded, logits_of=logits_of, transposed=(),
              stages=None):
    """Calls see(module, its output) in the order of forward. w: weights by name. order: the layers, by number. stages
    gets what is computed inside a module. The rest: ours, or a mistake."""
    kept = set()

    def keep(name, x):
        if name not in kept: see(name, x)
        kept.add(name)
        return x

    def linear(name, x):
        weight = w[name + ".weight"]
        return keep(name, x @ (weight if name.endswith(transposed) else weight.T))

    def normed(name): return lambda x: keep(name, norm(x, w[name + ".weight"]))

    def attention(name, x):
        qkv = [linear(f"{name}.{p}_proj", x) for p in "qkv"]
        q, k, v = heads_of(*qkv, lambda y: split(y, heads), lambda y: rope(y, float(theta), *y.shape[-2:]))
        o = attend(q, k, v, True, q.shape[-1])
        if stages is not None:
            turned = {"q after the rotary embedding": q, "k after the rotary embedding": k}
            stages.setdefault(name, turned | steps_of_attention(q, k, v, True)["stages"] | {"values": o})
        return keep(name, linear(name + ".output_proj", join(o)))

    def ffn(name, x):
        gate, value = linear(name + ".w1", x), linear(name + ".w3", x)
        if stages is not None: stages[name] = {"silu(w1 x)": silu(gate), "silu(w1 x) * w3 x": glu(gate, value)}
        return keep(name, linear(name + ".w2", glu(gate, value)))

    x = embedded(keep("token_embeddings", w["token_embeddings.weight"][tokens]))
    for i in order:
        at, part = f"layers.{i}", functools.partial
        x = block(x, part(attention, at + ".attn"), part(ffn, at + ".ffn"), normed(at + ".ln1"), normed(at + ".ln2"))
        keep(at, x)
    keep("lm_head", logits_of(x, normed("ln_final"), w["lm_head.weight"]))


def mistakes_in(**formulas):
    """Those of formulas, (what is to be changed, the cause in words). formulas: by the arguments that take them"""
    for key, formula in formulas.items():
        for other, *lines, words in REWRITTEN:
            if other is formula: yield {key: rewritten(formula, *lines)}, words
        for other, words in changes(formula): yield {key: other}, words


def mistakes(w, heads, theta, order, first):
    """(what is to be changed in reference's arguments, the cause in words). first: the first module that differs"""
    C = w["ln_final.weight"].shape[0]
    yield from mistakes_in(rope=rope, heads_of=heads_of, attend=attend, norm=rms_norm, glu=swiglu, block=block,
                           split=split, join=join, embedded=embedded, logits_of=logits_of)
    for other in sorted({10, 100, 1000, 1e4, 1e5, 5e5, 1e6, theta ** 0.5} - {theta}):
        or_exponent = ", or its exponent lacks its factor 2: it is -2k/D" if other == theta ** 0.5 else ""
        yield dict(theta=other), f"theta of the rotary embedding is {other:g} instead of {theta:g}{or_exponent}"
    for other in range(1, C // 2 + 1):
        if other == heads or C % (2 * other): continue
        yield dict(heads=other), f"there are {other} heads instead of {heads}"
    is_turned = "transposed: a Linear is x @ weight.T, and weight is [out, in]"
    for name, p in w.items():
        if not name.startswith("layers.0.") or len(set(p.shape)) == p.dim(): continue
        short = name.removeprefix("layers.0").removesuffix(".weight")
        at = ".".join(first.split(".")[:2]) + short
        yield dict(transposed=short), f"each layer's {short[1:]}.weight is {is_turned}"
        yield dict(transposed=at), f"{at}.weight is {is_turned}"
    yield dict(transposed="_proj"), f"each of attention's weights is {is_turned}"
    projections = itertools.combinations(("q_proj", "k_proj", "v_proj", "output_proj"), 2)
    for a, b in [*projections, ("ln1", "ln2"), ("w1", "w3")]:
        other = {name: w[name.replace(a, b) if a in name else name.replace(b, a)] for name in w}
        yield dict(w=other), f"{a} and {b} are swapped"
    if len(order) > 1:
        yield dict(order=order[:-1]), "the last layer is left out"
        yield dict(order=[0] * len(order)), "each layer is the first one's block"
        yield dict(order=order[::-1]), "the layers run in the opposite order"


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
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        p, old = (s - new).exp(), (m - new).exp()
        if wrong == "order": old = torch.ones_like(old)
        l = (l if wrong == "l" else old * l) + p.sum(-1, keepdim=True)
        o = (o if wrong == "o" else o / old if wrong == "inverse" and j else old * o) + p @ v[..., j:j + B, :]
        if wrong == "each": o = o / l
        m = s.amax(-1, keepdim=True) if wrong == "max" else new
    return o if wrong == "norm" else o / l


def tile_mistakes(causal):
    words = {"o": "O is not multiplied by exp(m_old - m_new) when the maximum grows",
             "l": "l is not multiplied by exp(m_old - m_new) when the maximum grows",
             "inverse": "O is divided by exp(m_old - m_new) instead of multiplied",
             "order": "m is overwritten before exp(m_old - m_new), which is 1 then: neither O nor l is multiplied by it",
             "each": "O is divided by l at each tile, and not only at the end",
             "max": "m is the tile's maximum instead of the largest so far", "norm": "O is not divided by l at the end",
             "first": "only the first tile of keys is read", "last": "the last tile of keys is left out",
             "rest": "the last keys, no whole tile, are left out"}
    if causal:
        words["local"] = "the causal mask compares places inside a tile instead of in the sequence"
        words["diagonal"] = "the tile on the diagonal is left out, but for the first"
    for wrong, size in itertools.product(words, (16, 32, 64, 128)):
        by_tiles = lambda q, k, v, causal, D, size=size, wrong=wrong: tiled(q, k, v, causal, size, wrong)
        yield dict(attend=by_tiles), f"{words[wrong]} (tiles of {size})"


# ----------------------------------------------------------------------------------------------------------------------
# The handout's AdamW, and mistakes in it

GIVEN = dict(lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY)
OTHER = dict(lr=2e-2, betas=(0.8, 0.99), eps=1e-5, weight_decay=0.3)  # of the second group, where there are two
USUAL = GIVEN | dict(lr=1e-3)
FACTORS = dict(lr=1.5, weight_decay=2)  # what becomes of a group's settings before each step but the first


def adamw(p, m, v, g, steps, lr, beta1, beta2, eps, decay):
    t = steps + 1
    lr_t = lr * (1 - beta2 ** t) ** 0.5 / (1 - beta1 ** t)
    p = p * (1 - lr * decay)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g ** 2
    p = p - lr_t * m / (sqrt(v) + eps)
    return p, m, v


ADAMW_OF_TORCH = rewritten(adamw, "lr_t = lr / (1 - beta1 ** t)",
                           "p = p - lr_t * m / (sqrt(v / (1 - beta2 ** t)) + eps)")


def settings_of(group, steps, own=True, kept=(), stepped=(0, 1), **more):
    """A group's settings at each step."""
    setting = OTHER if group and own else GIVEN
    setting = setting | {key: value for key, value in more.items() if key in setting}
    factors = {} if group is False else {key: 1 if key in kept else factor for key, factor in FACTORS.items()}
    steps = steps if group in stepped else 0
    return [setting | {key: setting[key] * factor ** t for key, factor in factors.items()} for t in range(steps)]


def after_steps(p, gradients, settings, of_torch=False, formula=None, after=False, l2=False, **_):
    """[p, m, v] after a step for each of the gradients and settings, in double."""
    formula = formula or (ADAMW_OF_TORCH if of_torch else adamw)
    state = p.double(), torch.zeros_like(p.double()), torch.zeros_like(p.double())
    for steps, (g, setting) in enumerate(zip(gradients, settings)):
        lr, betas, eps, decay = setting.values()
        g = g.double() + (decay * state[0] if l2 else 0)
        p, m, v = formula(*state, g, torch.tensor(float(steps)).double(), lr, *betas, eps, 0 if after or l2 else decay)
        state = p * (1 - lr * decay) if after else p, m, v
    return state


def optimizer_mistakes():
    yield dict(l2=True), "weight decay is added to the gradient (Adam with L2) instead of to the weight"
    yield dict(after=True), "the weight decays after the step (as in 2025's handout)"
    yield dict(of_torch=True), "eps is added after the bias correction (as in torch.optim.AdamW)"
    yield dict(betas=(0.999, 0.9)), "the betas are swapped: m takes 0.9 and v takes 0.999"
    yield dict(weight_decay=0), "there is no weight decay"
    for betas in ((0.9, 0.95), (0.9, 0.98), (0.9, 0.99)):
        yield dict(betas=betas), f"the betas are {betas} instead of (0.9, 0.999)"
    for eps in (1e-12, 1e-10, 1e-7, 1e-6, 1e-5): yield dict(eps=eps), f"eps is {eps:g} instead of 1e-8"
    for formula in (adamw, ADAMW_OF_TORCH): yield from mistakes_in(formula=formula)


def group_mistakes():
    """With two groups, whose settings change between steps."""
    yield dict(own=False), "the second group gets the first one's settings"
    for group, words in enumerate(("first", "last")): yield dict(stepped=[group]), f"only the {words} group is stepped"
    for keys in (["lr"], ["weight_decay"], ["lr", "weight_decay"]):
        yield dict(kept=keys), f"{' and '.join(keys)}: read once; what is changed in param_groups later does nothing"
    for key, value in USUAL.items(): yield {key: value}, f"{key}: always {value}, whatever is given"


# ----------------------------------------------------------------------------------------------------------------------
# Attention's backward, and mistakes in it. S: scores, L: their logsumexp, m: their maximum

def backward(q, k, v, dO, O, S, L, m, seen, scale):
    P = exp(S - L) * seen
    dP = dO @ v.mT
    D = total(dO * O, -1)
    dS = P * (dP - D)
    dQ = dS @ k * scale
    dK = dS.mT @ q * scale
    dV = P.mT @ dO
    return dQ, dK, dV


def backward_with(see, q, k, v, do, causal, formula=backward, power=1, alone=False):
    """Calls see() with dq, dk, dv: forward is right, and backward is this formula. power: how often it has scale."""
    if alone: q, k, v, do = (t[:1].expand_as(t) for t in (q, k, v, do))
    steps, scale = steps_of_attention(q, k, v, causal), q.shape[-1] ** (-0.5 * power)
    O, S, L, m, seen = (steps[name] for name in ("O", "scores", "L", "m", "unmasked"))
    gradients = formula(q, k, v, do, O, S, L, m, seen, scale)
    for name, gradient in zip(("dq", "dk", "dv"), gradients): see(name, gradient)


def backward_mistakes():
    yield dict(power=0), "dQ and dK lack the factor 1/sqrt(D)"
    yield dict(power=2), "dQ and dK have the factor 1/sqrt(D) twice"
    yield dict(alone=True), "each batch gets what is the first one's gradient"
    for B in (16, 32, 64, 128):
        at = f"[..., {-B}:"
        for line, words in ((f"dQ = dS{at}] @ k{at}, :] * scale", "dQ"), (f"dK = dS{at}, :].mT @ q{at}, :] * scale", "dK"),
                            (f"dV = P{at}, :].mT @ dO{at}, :]", "dV")):
            yield dict(formula=rewritten(backward, line)), f"{words} is the last tile's alone: it is = instead of += (tiles of {B})"
    yield from mistakes_in(formula=backward)


def lse_of(S, m):
    l = total(exp(S - m), -1)
    return m + log(l)

# ----------------------------------------------------------------------------------------------------------------------
# Mistakes that are more than one change, or that have plainer words: (formula, its other lines, the cause in words)

HALVES = "the rotary embedding turns x[i] with x[i + D/2] instead of x[2i] with x[2i + 1]"
INVERTED = "the causal mask is inverted: a query sees"
NORMED = "a residual adds the normed x: it is x + attn(ln1(x)), then x + ffn(ln2(x))"
QK_NORM = "q and k are normed; the handout's are not"
REWRITTEN = [
    (rope, "a, b = x.chunk(2, -1)", "return torch.cat((a * c - b * s, a * s + b * c), -1)", HALVES),
    (rope, "a, b = x.chunk(2, -1)", "return torch.cat((a * c + b * s, b * c - a * s), -1)", HALVES + ", the other way"),
    (rope, "c, s = cos(angle), -sin(angle)", "the rotary embedding turns the other way: the sign of sin is wrong"),
    (rope, "c, s = cos(2 * angle), sin(2 * angle)", "the rotary embedding is applied twice"),
    (heads_of, "q = split(q)", "k = split(k)", "there is no rotary embedding, or its positions are the heads"),
    (heads_of, "q = split(turn(q))", "k = split(turn(k))", "the rotary embedding comes before the heads are split"),
    (heads_of, "return q, k, turn(split(v))", "v gets the rotary embedding, too; only q and k take it"),
    (heads_of, "q = turn(split(rms_norm(q, 1)))", "k = turn(split(rms_norm(k, 1)))", QK_NORM),
    (attend, "scores = rms_norm(q, 1) @ rms_norm(k, 1).mT / D ** 0.5", QK_NORM),
    (attend, "scores = q @ k.mT / (q.shape[1] * D) ** 0.5", "scores are divided by sqrt(d_model) instead of sqrt(D)"),
    (split, "return y.reshape(len(y), H, y.shape[1], -1)",
     "heads are cut by view(B, H, T, D); the handout's by view(B, T, H, D).transpose(1, 2)"),
    (split, "return y.unflatten(-1, (-1, H)).permute(0, 3, 1, 2)",
     "heads are interleaved: they are cut by view(B, T, D, H) instead of view(B, T, H, D)"),
    (join, "return o.permute(0, 2, 3, 1).flatten(-2)", "heads are interleaved when they are joined"),
    (join, "return o.reshape(len(o), o.shape[2], -1)", "heads are joined without transpose(1, 2) before the reshape"),
    (embedded, "return x * x.shape[-1] ** 0.5", "the embedding is multiplied by sqrt(d_model)"),
    (logits_of, "return softmax(norm(x) @ w.T, -1)", "the model returns softmax(logits) instead of logits"),
    (logits_of, "return log(softmax(norm(x) @ w.T, -1))", "the model returns log_softmax(logits) instead of logits"),
    (rms_norm, "return rms_norm(x - mean(x, -1), w)", "the norms subtract the mean, as LayerNorm does"),
    (rms_norm, "return rms_norm(x, 1 + w)", "the norms are multiplied by 1 + weight"),
    (block, "h = ln1(x + attn(x))", "return ln2(h + ffn(h))", "norms come after the residual sum, and not before it"),
    (block, "h = ln1(x) + attn(ln1(x))", "return ln2(h) + ffn(ln2(h))", NORMED),
    (block, "h = ln1(x) + attn(ln1(x))", NORMED),
    (block, "return ln2(h) + ffn(ln2(h))", NORMED),
    (block, "h = attn(ln1(x))", "return ffn(ln2(h))",
     "both residuals of a block are missing: it is x + attn(ln1(x)), then x + ffn(ln2(x))"),
    (attend, "p = softmax(scores, -1) * (seen if causal else 1)",
     "the mask comes after softmax: P does not add up to 1"),
    (attend, "return (p @ v)[:1].expand_as(v)", "each batch gets what is the first one's"),
    (attend, "seen = j - 1 <= i[:, None]", "the causal mask is off by one: a query sees the key after its own"),
    (adamw, "lr_t = lr", "there is no bias correction"),
    (backward, "D = total(dP, -1)", "backward has D = rowsum(dP) instead of rowsum(dO * O)"),
    (backward, "P = exp(S - exp(L - m)) * seen", "backward subtracts l instead of L = m + log l"),
    (backward, "P = exp(S - (L - m)) * seen", "backward subtracts log l instead of L = m + log l"),
    (backward, "dV = (exp(S - m) * seen).mT @ dO", "dV takes exp(S - m), which is not divided by l, instead of P"),
    (lse_of, "return m / math.log(2) + torch.log2(l)", "the saved logsumexp is in base 2; L is ln 2 times that"),
    (lse_of, "return m + torch.log2(l)", "the saved logsumexp is m + log2(l); L = m + log l"),
    (attend, "masked = where(seen, scores, -math.inf)", "the causal mask is there without is_causal, too"),
    (attend, "scores = q @ k.mT / q.shape[-2] ** 0.5", "scores are divided by the root of the sequence's length, and not of D"),
    (backward, "P = exp(S - L) * seen * torch.ones_like(S).tril(-1)", "backward's causal mask is off by one: a query does not see its own key"),
    (backward, "P = exp(S - L) * torch.ones_like(S).tril(1)", "backward's causal mask is off by one: a query sees the key after its own"),
    (backward, "dV = P.mT @ dO * scale", "dV has the factor 1/sqrt(D), which only dQ and dK have"),
    (backward, "P = exp(S * scale - L) * seen", "dQ = dS @ k * scale ** 2", "dK = dS.mT @ q * scale ** 2", "backward's scale is 1/D instead of 1/sqrt(D)"),
    (backward, "P = exp(S / scale - L) * seen", "dQ = dS @ k", "dK = dS.mT @ q", "backward's scale is 1 instead of 1/sqrt(D)"),
    (backward, "P = exp(q @ v.mT * scale - L) * seen", "dP = dO @ k.mT", "dQ = dS @ v * scale", "backward takes k and v out of saved_tensors in the wrong order"),
    (backward, "P = exp(S * scale - L) * seen", "dK = dS.mT @ q * scale ** 2", "backward multiplies by the scale a q that has it already"),
    (lse_of, "return m", "the saved tensor is not the logsumexp but only the scores' maximum"),
    (lse_of, "return l", "the saved tensor is l; L = m + log l"),
    (lse_of, "return log(l)", "the saved tensor is log l; L = m + log l"),
    (lse_of, "return exp(m + log(l))", "the saved tensor is the sum of exp(S); L = m + log l")]
for low, name in ((".bfloat16()", "bfloat16"), (".half()", "float16")):
    REWRITTEN += [
        (rope, f"c, s = cos(angle){low}.to(x), sin(angle){low}.to(x)", f"cos and sin are rounded to {name}"),
        (rms_norm, f"return rms_norm(x{low}, w{low}).to(x)", f"the norms are computed in {name}"),
        (attend, f"return p{low}.to(p) @ v", f"P is rounded to {name}"),
        (backward, f"P = (exp(S - L) * seen){low}.to(S)", f"backward rounds P to {name}")]
for order in itertools.permutations(("dQ", "dK", "dV")):
    got = ", ".join(order)
    REWRITTEN += [(backward, f"return {got}", f"backward returns {got} instead of dQ, dK, dV")]
for fill in ("-math.inf", "-1e6", "-1e9", "scores - 1e6", "scores - 1e9"):
    line = f"masked = where(seen, scores, {fill}) if causal else scores"
    REWRITTEN += [
        (attend, "seen = j < i[:, None]", line, "the causal mask is off by one: a query does not see its own key"),
        (attend, "seen = j > i[:, None]", line, f"{INVERTED} only the keys after its own"),
        (attend, "seen = j >= i[:, None]", line, f"{INVERTED} its own key and those after it")]
for fill in ("0", "-1", "-10", "-100", "scores - 1", "scores - 10", "scores - 100"):
    REWRITTEN += [(attend, f"masked = where(seen, scores, {fill}) if causal else scores",
                   f"a masked score becomes {fill}; it has to become -inf before softmax")]
