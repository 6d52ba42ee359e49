#!/usr/bin/env python3
"""tests/check.py: is your own PyTorch solution right? It compares yours with ./cs336, and what runs
on ranks with one PyTorch process.

  python3 tests/check.py all tests/adapters.py                 every part that the assignment's adapters name
  python3 tests/check.py model my_solution:TransformerLM       one part: model, attention, adamw, ddp, sharded or fsdp

Type it in your assignment's folder. In a notebook there are check_model, check_attention, check_adamw, check_ddp,
check_sharded and check_fsdp. The verdict is one of three: ok (exit code 0); DIFFERS, with the first place and the
cause (1); cannot be checked, with what to write (2). CS336_BINARY names another program than the ./cs336 above this
folder. See notes/check-your-own.md."""
import argparse, ast, contextlib, copy, ctypes, functools, importlib, inspect
import itertools, json, math, os, re, subprocess, sys, tempfile, textwrap, traceback

try:
    import torch
    import torch.nn.functional as F
    from torch.nn.modules.module import register_module_forward_hook
    import check_causes as formulas
    from check_causes import DECAY, GIVEN, LR, SAME, Seen, apart, difference, likely_causes, not_finite, say_cause
    no_torch = None
except ImportError as e:
    torch, no_torch = None, e

HERE = os.path.dirname(os.path.abspath(__file__))
# A difference above its bound is no rounding. bf16 is autocast's, with roundings at other places than ours; tf32 is for
# what multiplies in TF32 on a GPU, as Triton's tl.dot does unless told otherwise.
BOUNDS = {"fp32": 2e-5, "tf32": 3e-3, "bf16": 5e-2}

CANNOT, NOT_YET, NO_GPU = "cannot be checked", "not written yet", "not compared"  # the last two fail nothing else


class Usage(Exception):
    """Wrong usage, or what cannot be checked: exit code 2. word: the verdict in the last line."""
    def __init__(self, text, word=CANNOT):
        super().__init__(text)
        self.word = word


def note(text): print(f"note: {text}")
def few(names): return ", ".join(names[:4]) + (" ..." if names[4:] else "")


def place_of(frames):
    """Of (file, line, function) the last that is yours, in words."""
    libraries = (HERE, os.path.dirname(os.__file__), os.path.dirname(torch.__file__))
    other = lambda path: "site-packages" in path or os.path.abspath(path).startswith(libraries)
    yours = [f for f in frames if not f[0].startswith("<frozen") and not other(f[0])]
    return f" at {os.path.basename(yours[-1][0])}:{yours[-1][1]}, in {yours[-1][2]}" if yours else ""


def raised(e):
    """An exception of your code in one line, with the last line of yours that it passed."""
    where, text = place_of(traceback.extract_tb(e.__traceback__)), " ".join(str(e).split())[:300]
    return f"raised {type(e).__name__}{where}: {text}".rstrip(": ")


def not_written(e):
    """Here, too: a backward that is `pass`, and so returns one None."""
    words = r"not implemented|incorrect number of gradients.*got 1\)"
    return isinstance(e, NotImplementedError) or bool(re.search(words, str(e).lower(), re.S))


def returns_a_value(grad_fn):
    """Whether a torch.autograd.Function's backward returns more than None, as far as its source tells. One that does not
    (`pass`, `return None, None`) is not written yet."""
    try: tree = ast.parse(textwrap.dedent(inspect.getsource(grad_fn._forward_cls.backward)))
    except (AttributeError, OSError, TypeError, SyntaxError): return False
    returned = [line.value for line in ast.walk(tree) if isinstance(line, ast.Return)]
    return any(not isinstance(part, (ast.Tuple, ast.Constant, ast.expr_context)) for value in returned if value for part in ast.walk(value))


@contextlib.contextmanager
def your_code(what, hint="", later=()):
    """What your code raises becomes one line, and what it prints is no part of the verdict. later: what stands for
    code that is not written yet."""
    try:
        with contextlib.redirect_stdout(sys.stderr): yield
    except Usage: raise
    except (Exception, SystemExit) as e:
        if not_written(e) or isinstance(e, later): raise Usage(f"{what} {raised(e)}", NOT_YET) from e
        raise Usage(f"{what} {raised(e)}{hint}") from e


def verdict(check):
    """check, as a notebook calls it. True: ok; False: differs; None: cannot be checked, or not yet, which is said."""
    @functools.wraps(check)
    def run(*arguments, **options):
        try: return check(*arguments, **options)
        except Usage as e: print(f"{e.word}: {e}")
    return run


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
    names, header, data = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}, {}, bytearray()
    for name, t in tensors.items():
        t, start = t.detach().cpu().contiguous(), len(data)
        data += ctypes.string_at(t.data_ptr(), t.nbytes)
        header[name] = {"dtype": names[t.dtype], "shape": list(t.shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    with open(path, "wb") as f: f.write(len(text).to_bytes(8, "little") + text + data)


def load(path):
    with open(path, "rb") as f: header, data = json.loads(f.read(int.from_bytes(f.read(8), "little"))), f.read()
    header.pop("__metadata__")
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
    part = lambda t: torch.frombuffer(bytearray(data[slice(*t["data_offsets"])]), dtype=dtypes[t["dtype"]])
    return {name: part(t).view(t["shape"]) for name, t in header.items()}


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
# Your model

def staff_name(name):
    """Without what torch.compile and DDP put before names, or between."""
    return re.sub(r"^(module\.)+", "", name.replace("_orig_mod.", ""))


def shapes_of(V, C, F, layers):
    """Names and shapes that the handout's model of this size has, in the order of forward."""
    shapes = {"token_embeddings": (V, C)}
    for i in range(layers):
        at = f"layers.{i}."
        shapes |= {at + "ln1": (C,)} | {f"{at}attn.{p}_proj": (C, C) for p in ("q", "k", "v", "output")}
        shapes |= {at + "ln2": (C,), at + "ffn.w1": (F, C), at + "ffn.w3": (F, C), at + "ffn.w2": (C, F)}
    shapes |= {"ln_final": (C,), "lm_head": (V, C)}
    return {name + ".weight": shape for name, shape in shapes.items()}


def wrong_parameters(parameters, shapes):
    """What is wrong with names and shapes, so that nothing can be run; None: nothing."""
    for name, shape in shapes.items():
        found = tuple(parameters[name].shape)
        if found == shape: continue
        turned = "; it is transposed: a Linear is x @ weight.T, and weight is [out, in]" if found == shape[::-1] else ""
        return f"{name} is {list(found)} instead of {list(shape)}{turned}"
    for name in parameters:
        if name in shapes: continue
        why = ": its norms are RMSNorms, without bias" if ".ln" in "." + name else ": its Linear has no bias"
        return f"{name} is a parameter that the handout's model does not have{why if 'bias' in name else ''}"
    for (one, p), (other, q) in itertools.combinations(parameters.items(), 2):
        if p is q: return f"{other} and {one} are one tensor; the handout's model does not tie them"


def staff_places(shapes):
    """Of each weight its elements' numbers, counted over all weights."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    return {name: t.view(shapes[name]) for name, t in zip(shapes, torch.arange(sum(sizes)).split(sizes))}


STEP = 2.0 ** -20  # a model that got (number + 1) * STEP as its weights shows where it keeps each of them


def places_in(parameters, shapes):
    """{your parameter: the numbers of the staff's elements that it holds}; {} where one of them is missing."""
    count = sum(math.prod(shape) for shape in shapes.values())
    numbers = {own: p.detach().double().cpu() / STEP - 1 for own, p in parameters.items()}
    places = {own: n.long() for own, n in numbers.items() if ((n == n.round()) & (n >= 0) & (n < count)).all()}
    held = {number for place in places.values() for number in place.flatten().tolist()}
    return places if len(held) == count else {}


def random_weights(shapes):
    """Under which every mistake shows: with embeddings as small as these, RMSNorm's eps, too."""
    g = torch.Generator().manual_seed(336)
    normal = lambda shape, std: torch.randn(shape, generator=g) * std
    return {name: 1 + normal(shape, 0.1) if len(shape) == 1 else
            normal(shape, 0.02 if "embeddings" in name else (2 / sum(shape)) ** 0.5) for name, shape in shapes.items()}


def batch_of(V, T):
    g = torch.Generator().manual_seed(337)
    return {name: torch.randint(V, (2, T), generator=g) for name in ("tokens", "targets")}


def logits_of(model, tokens):
    hint = "; context_length sets fewer tokens, and tests/adapters.py:run_transformer_lm calls it as you do"
    with your_code(f"forward of {tokens.shape[1]} tokens", hint): logits = model(tokens)
    if isinstance(logits, (tuple, list)): logits = logits[0]
    if not isinstance(logits, torch.Tensor): raise Usage(f"forward returns {type(logits).__name__}, takes the logits")
    return logits.reshape(*tokens.shape, -1) if logits.numel() % tokens.numel() == 0 else logits


def modules_of(model, places, shapes, ours):
    """The modules whose outputs are compared, by the staff's names. ours: the names of what we have an output of."""
    modules = {staff_name(name): m for name, m in model.named_modules()}
    found = {name: m for name, m in modules.items() if name in ours}
    for (name, theirs), (own, place) in itertools.product(staff_places(shapes).items(), places.items()):
        m = modules.get(own.rpartition(".")[0])
        alone = m is not None and len(list(m.parameters())) == 1
        if alone and place.numel() == theirs.numel() and place.min() == theirs.min():
            found.setdefault(name.removesuffix(".weight"), m)
    return found


def run_yours(model, modules, batch, autocast):
    """{module: its first output} of those that were called, and the loss; the gradients are in the parameters.

    An output that is not [B, T, ...], of tokens side by side or padded, is not compared: what follows from it is."""
    names, out = {m: name for name, m in modules.items()}, {}

    def keep(module, inputs, output):
        if module not in names or not torch.is_tensor(output) or output.shape[:-1] != batch["tokens"].shape: return
        out.setdefault(names[module], output.detach().clone())

    model.zero_grad(set_to_none=True)
    with register_module_forward_hook(keep), autocast: logits = logits_of(model, batch["tokens"])
    if logits.grad_fn is None: raise Usage("the logits have no grad_fn: forward detaches them, or is under no_grad()")
    with your_code(f"cross_entropy of its logits {list(logits.shape)}"):
        loss = F.cross_entropy(logits.float().flatten(0, -2), batch["targets"].flatten())
    with your_code("backward"): loss.backward()
    return out | {"lm_head": logits.detach(), "loss": loss.detach()}


def table_of(columns, bound):
    """A row per part of the model with the worst of each column. columns: {title: {tensor: difference}}"""
    part_of, rows = lambda name: re.match(r"layers\.\d+|[^.]+", name)[0], []
    for part in dict.fromkeys(part_of(name) for numbers in columns.values() for name in numbers):
        cells, word = [], "ok"
        for numbers in columns.values():
            x, name = max(((x, name) for name, x in numbers.items() if part_of(name) == part), default=(-1, ""))
            cells.append("-" if x < 0 else f"{x:.1e}")
            if x <= bound: continue
            cells[-1], word = f"{x:.1e} {name.removesuffix('.weight')[len(part):].lstrip('.')}".rstrip(), "DIFFERS"
        rows.append([part, *cells, word])
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


def parameters_of(model):
    return {staff_name(name): p.requires_grad_() for name, p in model.named_parameters(remove_duplicate=False)}


@verdict
def check_model(model, num_heads=4, rope_theta=10000.0, context_length=32, precision="fp32"):
    """Compares a copy of the nn.Module, or assignment 1's run_transformer_lm, with ./cs336."""
    if not isinstance(model, torch.nn.Module): return check_model_function(model, context_length, precision)
    model = copy_of(model)
    parameters = parameters_of(model)
    layers = len({name.split(".")[1] for name in parameters if name.startswith("layers.")})
    lost = [name for name in shapes_of(1, 1, 1, max(layers, 1)) if name not in parameters]
    if lost:
        raise Usage(f"the model has no parameter {lost[0]}, but others than the staff's: {few(list(parameters))}: "
                    "check tests/adapters.py:run_transformer_lm of assignment 1, which gets the staff's names")
    V, C = parameters["token_embeddings.weight"].shape
    shapes = shapes_of(V, C, parameters["layers.0.ffn.w1.weight"].numel() // C, layers)
    if wrong := wrong_parameters(parameters, shapes): return bool(print(f"DIFFERS before anything is run: {wrong}."))
    if C % (2 * num_heads):
        raise Usage(f"--num_heads: got {num_heads}, takes a number that cuts d_model {C} into heads of even size")
    rest = shapes, context_length, num_heads, rope_theta, precision
    return compare_model(model, parameters, staff_places(shapes), *rest)


def check_model_function(function, context_length, precision):
    """run_transformer_lm gets the staff's names, and loads them into a model, which is caught here and checked."""
    V, T, C, layers, heads, d_ff, theta = SIZES.values()
    shapes, caught, context_length = shapes_of(V, C, d_ff, layers), [], min(T, context_length)
    call = lambda w, tokens: function(**SIZES, weights={name: t.clone() for name, t in w.items()}, in_indices=tokens)
    numbered = {name: STEP * (place + 1) for name, place in staff_places(shapes).items()}
    keep = lambda module, inputs, output: caught.append((module, len(inputs)))
    with your_code(function.__name__), register_module_forward_hook(keep):
        call(numbered, batch_of(V, context_length)["tokens"])
    rest = shapes, context_length, heads, theta, precision
    for model, inputs in reversed(caught):
        parameters = parameters_of(model)
        places = places_in(parameters, shapes)
        if places and inputs == 1: return compare_model(model.eval(), parameters, places, *rest)
    note("no module that takes the tokens alone has the weights: only the logits are compared, and no gradients")
    return compare_model(lambda tokens: call(random_weights(shapes), tokens), {}, {}, *rest)


@matmuls("fp32")
def compare_model(model, parameters, places, shapes, context_length, heads, theta, precision):
    """The verdict on a model. Where it has parameters, the places of the staff's weights in them are given."""
    (V, C), layers, bound = shapes["lm_head.weight"], (len(shapes) - 3) // 9, BOUNDS[precision]
    here = next(iter(parameters.values())).device if parameters else torch.device("cpu")
    w = {name: t.to(here) for name, t in random_weights(shapes).items()}
    batch = {name: t.to(here) for name, t in batch_of(V, context_length).items()}
    flat = torch.cat([t.flatten() for t in w.values()])
    for own, place in places.items(): parameters[own].data.copy_(flat[place])
    theirs = cs336("model", {"weights": w, "batch": batch}, "--num_heads", heads, "--rope_theta", theta,
                   "--precision", precision.replace("tf32", "fp32"))
    usual, right = dict(w=w, heads=heads, theta=theta, order=range(layers)), {}
    formula = torch.no_grad()(lambda see, **wrong: formulas.reference(see, tokens=batch["tokens"], **usual | wrong))
    formula(right.__setitem__)
    if difference(right["lm_head"], theirs["logits"]) > bound:
        raise Usage("./cs336 and the model in tests/check.py differ: please report it")
    right |= {"lm_head": theirs["logits"], "loss": theirs["loss"]}
    gradients = {}
    if parameters:
        modules = modules_of(model, places, shapes, right)
        autocast = torch.autocast(here.type, torch.bfloat16, enabled=precision == "bf16")
        with matmuls(precision): out = run_yours(model, modules, batch, autocast)
        grads, unused = torch.full_like(flat, math.nan), [own for own in places if parameters[own].grad is None]
        for own in places.keys() - unused: grads[places[own]] = parameters[own].grad
        if unused: note(f"no gradient reaches {few(unused)}")
        gradients = {name: apart(grads[at], theirs["grad." + name]) for name, at in staff_places(shapes).items()}
    else: out = {"lm_head": logits_of(model, batch["tokens"]).detach()}
    outputs = {name: apart(out[name], x) for name, x in right.items() if name in out}
    print(f"\n{type(model).__name__}: {layers} layers, d_model {C}, {heads} heads, vocabulary {V}; "
          f"batch {[2, context_length]}, {precision}. Relative differences from ./cs336:\n")
    table_of({"output": outputs} | ({"gradient": gradients} if gradients else {}), bound)
    first = next((name for name, x in outputs.items() if x > bound), None)
    worst = next((name for name, x in reversed(gradients.items()) if x > bound), None)
    if first:
        before = list(outputs)[:list(outputs).index(first)]
        all_up_to = f"all up to {before[-1]} agree" if before else "no module before it was seen"
        print(f"DIFFERS. The first module that differs, in the order of forward, is {first}; {all_up_to}."
              f"{not_finite(out[first])}")
        again = functools.partial(run_yours, model, modules, batch, contextlib.nullcontext()) if parameters else None
        explain_outputs(first, out, again, precision, batch["tokens"], formula, usual)
    elif worst:
        print(f"DIFFERS. Forward agrees. The first gradient that differs, in the order of backward, is {worst}'s. "
              "Is there a backward of your own, a detach(), or a weight that is used twice?")
    else: print(f"ok: all relative differences are within {bound:g}, {precision}'s bound.")
    return not first and not worst


def explain_outputs(first, out, again, precision, tokens, formula, usual):
    """Says what is likely wrong, from first on. again() runs yours in fp32."""
    seen, stages, random_words = Seen(), {}, ""
    if again:
        with seen: once_more = again()
        if difference(once_more["lm_head"], out["lm_head"]) > BOUNDS[precision]:
            random_words = "Two forwards of yours differ. "
        if precision != "fp32": out = once_more
    w, tried = usual["w"], list(formulas.mistakes(**usual, first=first))
    if "layers.0.ln1" in out:  # the eps of y = w x / sqrt(mean(x^2) + eps)
        x, weight, y = w["token_embeddings.weight"][tokens], w["layers.0.ln1.weight"], out["layers.0.ln1"]
        squares = (weight * x).double().square().sum(-1) / y.double().square().sum(-1)
        eps = max(0.0, float((squares - x.double().square().mean(-1)).median()))
        norm = functools.partial(formulas.rms_norm, eps=eps)
        tried.append((dict(norm=norm), f"RMSNorm's eps is {eps:.2g} instead of 1e-5"))
    formula(lambda name, x: None, stages=stages)
    inside = stages.get(".".join(first.split(".")[:3]), {})
    say_cause(*likely_causes(tried, formula, out), "The handout's model", lambda: random_words + seen.lacks(inside))


# ----------------------------------------------------------------------------------------------------------------------
# Your optimizer

# Which rules of AdamW are right, and whose they are.
HANDOUT = "2026's handout"
RULES = {HANDOUT: {}, "2025's handout, where the weight decays after the step": dict(after=True),
         "torch.optim.AdamW, where eps is added after the bias correction": dict(of_torch=True),
         "torch.optim.AdamW, but the weight decays after the step, as in 2025's": dict(of_torch=True, after=True)}


def step_yours(optimizer, w, gradients, groups, seen):
    """(your weights after a step for each of the gradients, the names of the gradients that step() changed)"""
    parameters, changed = {name: torch.nn.Parameter(t.clone()) for name, t in w.items()}, set()
    given = list(parameters.values())
    if groups: given = [{"params": given[0::2]}, {"params": given[1::2]} | formulas.OTHER]
    with_what = "two parameter groups" if groups else "(params, lr, betas, eps, weight_decay)"
    with your_code(f"with {with_what}, the optimizer"):
        step = optimizer(given, **GIVEN)
        for t, grads in enumerate(gradients):
            for name, p in parameters.items(): p.grad = grads[name].clone()
            for i, group in enumerate(step.param_groups if groups else []):
                setting = formulas.settings_of(i, t + 1)[t]
                group |= {key: setting[key] for key in formulas.FACTORS}
            with seen if t == len(gradients) - 1 else contextlib.nullcontext(): step.step()
            changed |= {name for name, p in parameters.items()
                        if p.grad is not None and not torch.equal(p.grad, grads[name])}
    for state in getattr(step, "state", {}).values(): seen.keep(list(state.values()) if isinstance(state, dict) else [])
    return {name: p.detach() for name, p in parameters.items()}, changed


@verdict
def check_adamw(optimizer, steps=3):
    """Compares three steps of your AdamW on the gradients of ./cs336's model with its steps, then two groups.

    AdamW's first step depends on a gradient's sign alone, which rounding decides where a gradient is nearly 0. So
    elements are compared whose gradients are 0 in each step, or at least a tenth of the tensor's rms."""
    w, seen, clear = random_weights(shapes_of(97, 32, 48, 2)), Seen(), {}

    def ours(part, weights, steps):
        files = {"weights": weights, "batch": batch_of(97, 24)}
        result = cs336("model", files, "--num_heads", 4, "--steps", steps, "--lr", LR)
        return {name: result[part + name] for name in w}

    theirs = [w, *(ours("param.", w, t) for t in range(1, steps + 1))]
    gradients = [ours("grad.", weights, 0) for weights in theirs[:-1]]
    given = {name: [g[name] for g in gradients] for name in w}
    for name, g in given.items():
        large = torch.stack([t.abs() > 0.1 * t.square().mean().sqrt() for t in g])
        clear[name] = large.all(0) | ~torch.stack(g).any(0)
    change = lambda name, p: (p.double() - w[name].double())[clear[name]]

    def by_rule(**wrong):
        for i, name in enumerate(w):
            settings = formulas.settings_of(groups and i % 2, steps, **wrong)
            yield name, change(name, formulas.after_steps(w[name], given[name], settings, **wrong)[0])

    columns, rules, changed = {}, RULES, set()
    for groups, title in ((False, f"after {steps} steps"), (True, "two groups, changed between steps")):
        weights, more = step_yours(optimizer, w, gradients, groups, seen)
        yours, changed = {name: change(name, p) for name, p in weights.items()}, changed | more
        right = {whose: by_rule(**rule) for whose, rule in rules.items()}
        if not groups: right[HANDOUT] = ((name, change(name, p)) for name, p in theirs[steps].items())
        numbers = {whose: {name: apart(yours[name], x) for name, x in by_name} for whose, by_name in right.items()}
        whose = min(numbers, key=lambda whose: max(numbers[whose].values()))
        columns[title], rules = numbers[whose], {whose: RULES[whose]}
        wrong = max(columns[title].values()) > SAME
        if wrong: break
    print(f"\nAdamW: {steps} steps on our gradients, lr {LR}, betas 0.9 and 0.999, eps 1e-8, weight decay {DECAY}. "
          "Relative differences of the weights' change:\n")
    table_of(columns, SAME)
    if wrong:
        where = " where there are two parameter groups, whose settings change between steps" if groups else ""
        print(f"DIFFERS{where}.")
        matrices = {name: x for name, x in yours.items() if w[name].dim() > 1}  # weights near 1 hide small changes
        p, m, v = formulas.after_steps(w["lm_head.weight"], given["lm_head.weight"], [GIVEN] * steps)
        stages = {} if groups else {"m": m, "v": v, "weight after the step": p}
        usual, of_groups = (RULES[whose], formulas.group_mistakes()) if groups else ({}, ())
        if not groups: usual = next((RULES[r] for r, n in numbers.items() if max(n[x] for x in matrices) <= SAME), {})
        run = lambda see, **wrong: [see(name, x) for name, x in by_rule(**usual | wrong)]
        mistakes = [*of_groups, *formulas.optimizer_mistakes()]
        say_cause(*likely_causes(mistakes, run, matrices), "AdamW", lambda: seen.lacks(stages))
    elif changed: print(f"DIFFERS: step() changes gradients in place: {few(sorted(changed))}.")
    else: print(f"ok: it is the AdamW of {whose}.")
    return not (wrong or changed)


# ----------------------------------------------------------------------------------------------------------------------
# Your attention

class Attention:
    """Your attention: called with (q, k, v, causal), whatever its fourth argument is."""

    def __init__(self, yours):
        own = getattr(yours, "__self__", yours)  # of MyFunction.apply it is MyFunction
        function = isinstance(own, type) and issubclass(own, torch.autograd.Function)
        if function: yours = own
        self.call = yours.apply if function else yours
        self.is_triton = "triton" in f"{getattr(yours, '__module__', '')} {getattr(yours, '__qualname__', '')}".lower()
        # forward's first argument is ctx, unless the Function has a setup_context() that gets it
        ctx = function and yours.setup_context is torch.autograd.Function.setup_context
        try: arguments = [*inspect.signature(yours.forward if function else yours).parameters.values()][ctx:]
        except (ValueError, TypeError): arguments = []
        many = not arguments or any(a.kind == a.VAR_POSITIONAL for a in arguments)
        self.masked = not function and len(arguments) > 3 and "mask" in arguments[3].name
        by_name = [a for i, a in enumerate(arguments) if a.kind == a.KEYWORD_ONLY or not function and not self.masked and i > 3]
        self.keyword = next((a.name for a in by_name if "causal" in a.name), None)
        self.takes_causal = many or len(arguments) > 3

    def __call__(self, q, k, v, causal):
        S, more, named = q.shape[-2], [causal] if self.takes_causal and not self.keyword else [], {}
        if self.keyword: named = {self.keyword: causal}
        if self.masked: more = [torch.ones(S, S, dtype=torch.bool, device=q.device).tril(0 if causal else S)]
        with contextlib.redirect_stdout(sys.stderr): o = self.call(q, k, v, *more, **named)
        if isinstance(o, (tuple, list)): o = o[0]
        if isinstance(o, torch.Tensor) and o.shape == q.shape: return o
        found = list(o.shape) if isinstance(o, torch.Tensor) else type(o).__name__
        raise Usage(f"attention returns {found}, takes a function that returns a tensor of {list(q.shape)}")


def saved_lse(o, right, causal):
    """The logsumexp that your Function saved, or None."""
    saved = getattr(o.grad_fn, "saved_tensors", None)
    if saved is None: return None
    flat = [t for t in saved if t is not None and t.numel() == right.numel()]
    exact = [t for t in flat if t.shape == right.shape]
    if len(exact) == 1: return exact[0]
    found = min(exact or flat, key=lambda t: apart(t.float().reshape(right.shape), right), default=None)
    what = f"{len(exact)} saved tensors are {list(right.shape)}" if exact else "no logsumexp is saved"
    if flat and not exact: what = f"the logsumexp is saved as {list(found.shape)}"
    if not causal: note(f"{what}; the public test takes exactly one saved tensor of {list(right.shape)}")
    return None if found is None else found.reshape(right.shape)


def run_attention(attention, q, k, v, do, causal, lse, yours):
    """Puts into yours what your attention gives, by name, and says which inputs it changes. Usage: what it lacks."""
    qkv = [t.clone().requires_grad_() for t in (q, k, v)]
    what = "forward with is_causal" if causal else "forward"
    hint = "; if it takes [B, H, S, D], say --num_heads 4" if q.dim() == 3 else ""
    with your_code(what, hint, later=AssertionError if causal else ()): o = attention(*qkv, causal)
    lse, yours["o"] = saved_lse(o, lse.to(o.device), causal), o.detach()
    if lse is not None: yours["lse"] = lse
    if o.grad_fn is None: raise Usage("backward is not there: the output has no grad_fn", NOT_YET)
    own = do.clone()
    with your_code("backward"):
        try: o.backward(own)
        except RuntimeError as e:
            if "number of gradients" in str(e) and returns_a_value(o.grad_fn): raise Usage(f"backward {raised(e)}") from e
            raise
    if all(t.grad is None for t in qkv): raise Usage("backward returns no gradients", NOT_YET)
    yours |= {name: t.grad for name, t in zip(("dq", "dk", "dv"), qkv)}
    return [name for name, t, old in zip(["q", "k", "v", "do"], [*qkv, own], (q, k, v, do)) if not torch.equal(t, old)]


def attention_causes(attention, yours, numbers, inputs, causal, precision):
    q, k, v, do = (t.float() for t in inputs)
    bound, D = BOUNDS[precision], q.shape[-1]
    if numbers["o"] > bound:
        given = {"o": attention(q, k, v, causal).detach() if precision == "bf16" else yours["o"]}
        mistakes = [*formulas.mistakes_in(attend=formulas.attend), *formulas.tile_mistakes(causal)]
        run = lambda see, attend=formulas.attend: see("o", attend(q, k, v, causal, D))
    elif numbers.get("lse", 0) > bound:
        steps, lse = formulas.steps_of_attention(q, k, v, causal), yours["lse"].float()
        given, mistakes = {"lse": lse}, formulas.mistakes_in(lse_of=formulas.lse_of)
        run = lambda see, lse_of=formulas.lse_of: see("lse", lse_of(steps["masked"], steps["m"]).view(lse.shape))
    else:
        given, mistakes = {name: t for name, t in yours.items() if name[0] == "d"}, formulas.backward_mistakes()
        run = lambda see, **wrong: formulas.backward_with(see, q, k, v, do, causal, **wrong)
        if precision == "bf16" or any(t is None for t in given.values()): return None
    return likely_causes(mistakes, run, given)


def at_scores_of_100(attention, q, k, v, sign):
    """(the difference, in words what is not finite). The last component only adds 100 (or -100) to each score: the softmax is the other components'."""
    q, k = q.clone(), k.clone()
    q[..., -1] = (100 * q.shape[-1] ** 0.5) ** 0.5  # the last: what is summed after it would be rounded at its size
    k[..., -1] = sign * q[..., -1]
    theirs = cs336("attention", {"inputs": {"q": q, "k": k, "v": v, "do": v}})
    yours = attention(q, k, v, False).detach()
    why = " exp(-100) is nearly 0: subtract a row's maximum before exp, also one below 0, so m begins at -inf."
    if sign > 0: why = "" if yours.isfinite().all() else " exp(100) is infinite in fp32: subtract a row's maximum before exp."
    return apart(yours, theirs["o"].to(yours)), f"o, scores near {sign * 100}:{not_finite(yours)}{why}"


def same_where_transposed(attention, inputs, causal, yours, precision):
    """Whether the gradients are what yours were, where dO has the same numbers, transposed in memory."""
    leaves = [t.clone().requires_grad_() for t in inputs[:3]]
    with contextlib.suppress(Exception), matmuls(precision): attention(*leaves, causal).backward(inputs[3].mT.contiguous().mT)
    gradients = [(t.grad, yours[name]) for name, t in zip(("dq", "dk", "dv"), leaves)]
    return all(t is not None and apart(t, same) <= BOUNDS[precision] for t, same in gradients)


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
    rows, wrong, lacks, unmasked, more = [], {}, {}, False, {}
    for causal in (False, True)[:1 + attention.takes_causal]:
        theirs, yours = cs336("attention", {"inputs": {"q": q, "k": k, "v": v, "do": do}}, *["--causal"][:causal]), {}
        try:
            with matmuls(precision): changed = run_attention(attention, *inputs, causal, theirs["lse"], yours)
            if changed: more[f"attention changes its input {', '.join(changed)}"] = True
        except Usage as e: lacks.setdefault(str(e), e)
        numbers = {name: apart(t, theirs[name]) for name, t in yours.items()}
        bad = max(numbers.values(), default=0) > bound
        without = formulas.attend(q.float(), k.float(), v.float(), False, head_size).to(dtype)
        may_ignore = causal and not wrong and not (here == "cuda" and attention.is_triton)
        unmasked = bad and may_ignore and apart(yours["o"], without) <= bound
        word = lambda x: "no mask" if unmasked else "DIFFERS" if x > bound else "ok"
        rows += [["yes" if causal else "no", name, f"{x:.1e}", word(x)] for name, x in numbers.items()]
        if not bad or unmasked: continue
        wrong[causal] = yours, numbers
        more |= {f"{name}:{said}": True for name, t in yours.items() if t is not None and (said := not_finite(t))}
        more |= {f"backward returns None for {name}": True for name, t in yours.items() if t is None}
    broken = [e for e in lacks.values() if e.word != NOT_YET]
    if not rows: raise [*broken, *lacks.values()][0]
    if precision == "fp32" and here == "cpu" and not wrong:
        for sign in (1, -1):
            far, said = at_scores_of_100(attention, q, k, v, sign)
            rows.append(["no", f"o, scores near {sign * 100}", f"{far:.1e}", "DIFFERS" if far > bound else "ok"])
            if far > bound: more[said] = True
        width = 64 if head_size == 32 else 32
        other = {name: torch.randn([*shape[:-1], width], generator=g) for name in "qkv"}
        try:
            with your_code(f"forward at head size {width}"): o = attention(*other.values(), False).detach()
            far = apart(o, cs336("attention", {"inputs": other})["o"])
            rows.append(["no", f"o, head size {width}", f"{far:.1e}", "DIFFERS" if far > bound else "ok"])
            if far > bound: more[f"o, head size {width}. Does the scale, 1 / sqrt(D), come from q's last dimension?"] = True
        except Usage as e: lacks[f"head size {width}"] = e  # yours may have a size of its own
    if not wrong and not lacks and not same_where_transposed(attention, inputs, causal, yours, precision):
        note("where dO is not contiguous, as where heads are merged, backward fails or gives something else: heed dO's "
             "strides, or take dO.contiguous()")
    print(f"\nattention: {shape}, {precision}. Relative differences from ./cs336:\n")
    show(["causal", "tensor", "difference", f"bound {bound:g}"], rows)
    for e in lacks.values(): print(f"{NOT_YET if e.word == NOT_YET else 'not compared'}: {e}")
    if not attention.takes_causal: print("not compared: a causal mask, since the function takes (q, k, v)")
    for line in more: print(f"DIFFERS: {line}")
    if wrong:
        print("DIFFERS, " + " and ".join("causal" if causal else "not causal" for causal in wrong) + ".")
        for causal in sorted(wrong):  # a mistake that is no mask's shows without a mask; a mask's is seen only where it is used
            with matmuls("fp32"): found = attention_causes(attention, *wrong[causal], inputs, causal, precision)
            if found and found[0]: break
        else: causal = min(wrong)
        if found: say_cause(*found, "Attention by its formula", functools.partial(unseen_in_attention, attention, inputs, causal))
        elif precision == "bf16": print("What is wrong with a gradient is looked for in fp32: leave out --precision bf16.")
        worst = max(x for _, numbers in wrong.values() for x in numbers.values())
        if here == "cuda" and precision == "fp32" and worst <= BOUNDS["tf32"]:
            print("It is of TF32's size: for fp32, tl.dot takes input_precision='ieee'. --precision tf32 allows it")
        return False
    if broken: raise Usage(f"{broken[0]}; what is in the table is ok")
    if more: return False
    there = " of what is there" if lacks else ""
    print(f"ok: all relative differences{there} are within {bound:g}, {precision}'s bound.")
    if unmasked: print("Without the mask: is_causal is ignored, which flash_forward (a) allows in the PyTorch version; "
                       "its causal gradients are not judged. The Triton version takes the mask, by (c).")
    return True


def unseen_in_attention(attention, inputs, causal):
    """In words, which of ours no operation of yours gives."""
    q, k, v, do = (t.float() for t in inputs)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    with contextlib.suppress(Exception), Seen() as seen: attention(*leaves, causal).backward(do)
    steps, dp = formulas.steps_of_attention(q, k, v, causal), do @ v.mT
    ds = steps["p"] * (dp - (do * steps["O"]).sum(-1, keepdim=True))
    return seen.lacks(steps["stages"] | {"O": steps["O"], "dP": dp, "dS": ds})


# ----------------------------------------------------------------------------------------------------------------------
# Your distributed classes: tests/check_ranks.py. Where there is a GPU, they run in a process that sees none.

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
# What you typed. The options are read also where there is no torch.

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


# The functions of the course's adapters.py, per part. The ranks come first: they fork.
PARTS = {"ddp": ["get_ddp", "get_ddp_individual_parameters", "get_ddp_bucketed"],
         "sharded": ["get_sharded_optimizer"], "fsdp": ["get_fsdp"],
         "model": ["run_transformer_lm"], "adamw": ["get_adamw_cls"],
         "attention": ["get_flashattention_autograd_function_pytorch", "get_flashattention_autograd_function_triton",
                       "run_scaled_dot_product_attention"]}
# The batch has 32 tokens, fewer than the context; and theta is not the usual one, so that both have to be heeded.
SIZES = dict(vocab_size=97, context_length=48, d_model=64, num_layers=2, num_heads=4, d_ff=128, rope_theta=5000.0)


def import_place(where):
    """The module, be it named or a file. Of a file in a package its package is imported, with the folder above it."""
    folders = [os.getcwd()]
    if where.endswith(".py"):
        if not os.path.isfile(where): raise Usage(f"got '{where}', takes a file that is there")
        folder, name = os.path.split(os.path.abspath(where)[:-3])
        while os.path.isfile(os.path.join(folder, "__init__.py")) and folder != folders[0]:
            folder, package = os.path.split(folder)
            name = f"{package}.{name}"
        folders, where = [folder, *folders], name
    sys.path[:0] = [folder for folder in folders if os.path.isdir(folder) and folder not in sys.path]
    with your_code(f"import {where}"):
        try: return importlib.import_module(where)
        except ModuleNotFoundError as e:
            raise Usage(f"{where}: {e}; install it, or type `uv run python3 {sys.argv[0]} ...` in the assignment's "
                        "folder, or PYTHONPATH=.:FOLDER python3 ... with a folder that has it")


def find(text, part, need):
    """[(its name, the object)] that was typed; of an adapters.py, what it has for this part."""
    where, _, name = text.rpartition(":") if not text.endswith(".py") else (text, "", "")
    module = import_place(where)
    names = [name] if name else [name for name in PARTS[part] if hasattr(module, name)]
    if name and not hasattr(module, name): raise Usage(f"got '{text}', but {module.__file__} has no '{name}'")
    if need and not names: raise Usage(f"{text} has no {PARTS[part][0]}; write FILE.py:NAME")
    return [(name, getattr(module, name)) for name in names]


def check_typed_model(yours, o):
    check = functools.partial(check_model.__wrapped__, precision=o.precision)
    if inspect.isfunction(yours) and "weights" in inspect.signature(yours).parameters: return check(yours)
    kwargs = typed = dict(o.kwargs)
    torch.manual_seed(0)
    if not isinstance(yours, torch.nn.Module):
        name, signature = yours.__name__, inspect.signature(yours)
        kwargs = {key: SIZES[key] for key in signature.parameters if key in SIZES} | typed
        try: signature.bind(**kwargs)
        except TypeError as e:
            raise Usage(f"--kwargs: got {', '.join(typed) or 'none'}, but it is {name}{signature}: {e}")
        with your_code(f"{name}({', '.join(f'{k}={v}' for k, v in kwargs.items())})"): yours = yours(**kwargs)
    if not isinstance(yours, torch.nn.Module): raise Usage(f"got '{o.yours}', takes an nn.Module, or what makes one")
    if torch.cuda.is_available(): yours.to("cuda")
    heads = o.num_heads or kwargs.get("num_heads")
    if not isinstance(heads, int): raise Usage("--num_heads: takes the number of heads, here or in --kwargs")
    return check(yours, heads, kwargs.get("rope_theta", kwargs.get("theta", 10000.0)), min(32, kwargs.get("context_length", 32)))


def check_one(part, name, yours, o):
    if inspect.isfunction(yours) and name.startswith("get_") and not inspect.signature(yours).parameters:
        with your_code(name): yours = yours()  # get_adamw_cls and its like
    if not callable(yours): raise Usage(f"got '{o.yours}', takes a class or a function")
    if part == "model": return check_typed_model(yours, o)
    if part == "adamw": return check_adamw.__wrapped__(yours)
    if part != "attention": return on_ranks(part, yours)
    if "triton" in name and not torch.cuda.is_available(): raise Usage(f"{name} needs a GPU", NO_GPU)
    return check_attention.__wrapped__(yours, precision=o.precision, num_heads=o.num_heads)


def check_typed(o):
    """The exit code: 2 if something cannot be checked, or nothing was compared. What is not written yet fails nothing else."""
    if torch is None: raise Usage(f"check.py needs PyTorch (pip install torch): {no_torch}")
    words, order = [], ["ok", "DIFFERS", CANNOT, NOT_YET, NO_GPU]
    for part in PARTS if o.what == "all" else [o.what]:
        for name, yours in find(o.yours, part, o.what != "all"):
            print(f"\n== {part}: {name}")
            try: words.append({True: "ok", False: "DIFFERS", None: CANNOT}[check_one(part, name, yours, o)])
            except Usage as e:
                print(f"{e.word}: {e}")
                words.append(e.word)
    numbers = "no one two three four five six seven eight nine ten".split()
    counted = [f"{numbers[words.count(word)]} {word}" for word in order if word in words]
    if o.what == "all" and words: print(f"\n{', '.join(counted)}.")
    if not words: raise Usage(f"{o.yours} has no function of the course")
    return 1 if "DIFFERS" in words else 0 if "ok" in words and CANNOT not in words else 2


def run(words):
    """The exit code."""
    try: options = parse(words)
    except Usage as e: return print(f"check.py: {e}", file=sys.stderr) or 2
    try: return check_typed(options)
    except Usage as e: return print(f"{CANNOT}: {e}") or 2


if __name__ == "__main__":
    sys.modules["check"] = sys.modules["__main__"]  # for check_ranks.py
    sys.exit(run(sys.argv[1:]))
