"""tests/check_ranks.py: check.py's ddp, sharded and fsdp: two ranks over Gloo on the CPU, beside one process.

Each case forks two processes. What they give is compared with the same steps on the whole batch here. Of a gradient that
differs it is said what it is instead: the ranks' sum, its own, nothing yet ... A rank that hangs is ended, and its place
is said. The interfaces are those of the course's tests, 2025's and 2026's."""
import contextlib, datetime, faulthandler, inspect, os, pickle, re, signal, sys, tempfile, time
import torch
import torch._dynamo  # optimizers import it, which takes a second; so it is here before the ranks are forked
import torch.distributed as dist
import torch.nn as nn
import check
from check import Usage, apart, differs, raised, show

BOUND, WIDE = 1e-4, 3e-2  # fp32: sums in another order; fp16: FSDP's compute_dtype
STEPS, RATE = 3, 0.5


# ----------------------------------------------------------------------------------------------------------------------
# Two ranks

def rank_main(work, rank, folder, seconds):
    path = lambda name: os.path.join(folder, f"{name}{rank}")
    log = os.open(path("log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1), os.dup2(log, 2)
    where = open(path("where"), "w")
    faulthandler.dump_traceback_later(seconds - 1, file=where)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if os.path.isdir("/sys/class/net/lo") else "lo0"
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(os.path.join(folder, "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=seconds + 5))
        result = work(rank)
    except BaseException as e:
        result = {"error": raised(e), "later": check.not_written(e), "usage": isinstance(e, Usage) and str(e), "time": time.time()}
    with open(path("result"), "wb") as f: pickle.dump(result, f)
    with contextlib.suppress(Exception):
        if "error" not in result: dist.barrier()
    os._exit(0)


def on_two_ranks(work, seconds):
    """[what work(rank) returned]; Usage: what a rank raised, or where it hung."""
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        ranks, ended, results = [], {}, {}
        for rank in range(2):
            ranks.append(os.fork())
            if ranks[rank] == 0: rank_main(work, rank, folder, seconds)
        end = time.monotonic() + seconds
        while len(ended) < 2 and time.monotonic() < end:
            for rank, pid in enumerate(ranks):
                done, status = os.waitpid(pid, os.WNOHANG) if rank not in ended else (0, 0)
                if not done: continue
                ended[rank] = status
                with contextlib.suppress(OSError, EOFError), open(os.path.join(folder, f"result{rank}"), "rb") as f:
                    results[rank] = pickle.load(f)
                if "error" in results.get(rank, {"error"}): end = min(end, time.monotonic() + 1)  # the other waits in vain
            time.sleep(0.005)
        for rank, pid in enumerate(ranks):
            if rank not in ended: os.kill(pid, signal.SIGKILL), os.waitpid(pid, 0)
        return what_came(folder, ended, results)


def what_came(folder, ended, results):
    errors = sorted((r["time"], rank) for rank, r in results.items() if "error" in r)
    if errors:
        rank = errors[0][1]
        r, gloo = results[rank], "; the ranks are on the CPU over Gloo, as in the public tests"
        if r["usage"]: raise Usage(r["usage"])
        gloo = gloo if re.search("CUDA|AVG|nccl", r["error"], re.I) else ""
        raise (check.NotYet if r["later"] else Usage)(f"rank {rank} {r['error']}{gloo}")
    died = [rank for rank in ended if rank not in results]
    if died: raise Usage(f"rank {died[0]} ended by signal {os.WTERMSIG(ended[died[0]])}: do the ranks send different sizes?")
    for rank in range(2):
        if rank in ended: continue
        with open(os.path.join(folder, f"where{rank}")) as f: frames = re.findall(r'File "(.*)", line (\d+) in (\w+)', f.read())
        raise Hang(f"rank {rank} hangs{check.place_of(frames[::-1])}" + (f", while rank {1 - rank} has ended" if ended else ""))
    return [results[0], results[1]]


class Hang(Usage):
    """No answer in time: this is a verdict, too."""


# ----------------------------------------------------------------------------------------------------------------------
# Your class, by the course's interface

AFTER = {"get_ddp": "ddp_on_after_backward", "get_ddp_individual_parameters": "ddp_individual_parameters_on_after_backward",
         "get_ddp_bucketed": "ddp_bucketed_on_after_backward", "get_fsdp": "fsdp_on_after_backward"}
BEFORE = {"get_ddp_bucketed": "ddp_bucketed_on_train_batch_start"}


def hook_of(yours, table):
    """The function that the course's adapters.py has beside this one."""
    name = table.get(getattr(yours, "__name__", ""))
    return getattr(sys.modules.get(getattr(yours, "__module__", "")), name, None) if name else None


def method(wrapper, names, pattern):
    more = [name for name in dir(type(wrapper)) if re.search(pattern, name) and name[0] != "_" and not hasattr(nn.Module, name)]
    names = [*names, *more]
    calls = [getattr(wrapper, name) for name in names if callable(getattr(wrapper, name, None))]
    return next((call for call in calls if not any(a.default is a.empty for a in inspect.signature(call).parameters.values())), None)


def finish(yours, wrapper, optimizer):
    after = hook_of(yours, AFTER)
    if after:
        with contextlib.suppress(NotImplementedError): return after(wrapper, optimizer)
    call = method(wrapper, ["finish_gradient_synchronization"], "finish|sync")
    if not call: raise Usage(f"{type(wrapper).__name__} has no finish_gradient_synchronization(); write it, to be called after backward")
    call()


def wrap(yours, module, **more):
    """Your wrapper around the module; a class that takes bucket_size_mb gets small buckets, as in the public test."""
    try: takes = inspect.signature(yours).parameters
    except (TypeError, ValueError): takes = {}
    if any("bucket" in name for name in takes): more[next(name for name in takes if "bucket" in name)] = 0.0004
    return yours(module, **more)


def full_weights(yours, wrapper):
    gather = getattr(sys.modules.get(getattr(yours, "__module__", "")), "fsdp_gather_full_params", None)
    if gather and getattr(yours, "__name__", "") == "get_fsdp": full = gather(wrapper)
    else:
        call = method(wrapper, ["gather_full_params", "fsdp_gather_full_params"], "gather.*param|full")
        if not call: raise Usage(f"{type(wrapper).__name__} has no gather_full_params(); write it, to return all weights by name")
        full = call()
    return {check.staff_name(name): t.detach().clone() for name, t in full.items()}


# ----------------------------------------------------------------------------------------------------------------------
# Models and data

class Late(torch.autograd.Function):
    """Rank 1's first backward stops here for a while, so that rank 0 is through before what lies below is sent."""
    slept = False

    @staticmethod
    def forward(ctx, x): return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        if dist.is_initialized() and dist.get_rank() == 1 and not Late.slept: time.sleep(0.3)
        Late.slept = True
        return g


class Toy(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.fc1, self.fc2, self.fc3, self.fc4 = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        if case == "tied weights": self.fc3.weight = self.fc2.weight
        if case == "frozen parameters":
            self.fc2.bias.requires_grad_(False)
            self.fixed = nn.Parameter(torch.randn(2), requires_grad=False)
        if case == "a parameter without gradient": self.unused = nn.Linear(8, 8)
        self.late = case == "a late rank"

    def forward(self, x):
        x = self.fc2(self.fc1(x).tanh()).tanh()
        return self.fc4(self.fc3(Late.apply(x) if self.late else x).tanh())


class ToyFSDP(nn.Module):
    """The public test's model, smaller. layers: your course package's Embedding, Linear and RMSNorm."""
    def __init__(self, layers, case):
        super().__init__()
        Embedding, Linear, RMSNorm = layers
        self.embedding, self.norm1, self.linear1 = Embedding(20, 16), RMSNorm(16), Linear(16, 32)
        self.norm2, self.linear2, self.lm_head = RMSNorm(32), Linear(32, 16), Linear(16, 20)
        self.late = case == "a late rank"

    def forward(self, x):
        x = self.norm2(torch.relu(self.linear1(self.norm1(self.embedding(x)))))
        return self.lm_head(self.linear2(Late.apply(x) if self.late else x))


def batch(kind):
    g = torch.Generator().manual_seed(340)
    if kind == "fsdp": return torch.randint(20, (8, 6), generator=g), torch.randint(20, (8,), generator=g)
    return torch.randn(8, 6, generator=g), torch.randn(8, 5, generator=g)


def halves_of(kind):
    return [[t[4 * rank:4 * rank + 4] for t in batch(kind)] for rank in range(2)]


def loss_of(model, x, y):
    out = model(x)
    return nn.functional.mse_loss(out, y) if y.dtype.is_floating_point else nn.functional.cross_entropy(out[:, -1].float(), y)


def gradients_at(model, weights, x, y, dtype=None):
    """By the formula, at these weights. dtype: matrices are cast to it on the way, as FSDP's compute_dtype does."""
    leaves = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in weights.items()}
    cast = {name: t.to(dtype) if dtype and t.dim() == 2 else t for name, t in leaves.items()}
    loss_of(lambda x: torch.func.functional_call(model, cast, x, tie_weights=True), x, y).backward()
    return {name: t.grad for name, t in leaves.items()}


def named(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ----------------------------------------------------------------------------------------------------------------------
# What a gradient is instead

def kinds_of_gradients(own, before):
    """{kind: its value on each rank}; own: each rank's gradient; before: the last step's mean."""
    total = own[0] + own[1]
    return {"is right": [total / 2] * 2, "is the sum over the ranks instead of the mean": [total] * 2,
            "is each rank's own: it is not averaged": own,
            "is rank 0's on each rank": [own[0]] * 2, "is rank 1's on each rank": [own[1]] * 2,
            "is each rank's own, divided by the number of ranks: nothing is added": [g / 2 for g in own],
            "is divided by the number of ranks twice": [total / 4] * 2,
            "is added up twice, as a weight used twice may be": [total * 2] * 2,
            "is still that of the step before": [before] * 2, "is added to that of the step before": [total / 2 + before] * 2,
            "is zero": [total * 0] * 2}


def explain_gradients(yours, own, before, late, bound):
    """Causes in words, for gradients by name on two ranks."""
    causes = {}
    for name in own[0]:
        mine = [yours[rank].get(name) for rank in range(2)]
        kinds = kinds_of_gradients([own[rank][name] for rank in range(2)], before.get(name, own[0][name] * 0))
        kind = next((kind for kind, right in kinds.items() if all(apart(g, t) <= bound for g, t in zip(mine, right))), None)
        if kind == "is right": continue
        if name in late: kind = "changes after finish_gradient_synchronization: it returns before the gradient is averaged"
        elif any(g is None for g in mine): kind = "is None on a rank"
        kind = kind or "is neither the mean nor what a usual mistake gives"
        causes.setdefault(kind, []).append(name)
    all_of_them = lambda names: len(names) == len(own[0]) > 1
    return [f"{'every gradient' if all_of_them(names) else 'the gradient of ' + few(names)} {kind}" for kind, names in causes.items()]


def few(names):
    return ", ".join(names[:4]) + (" ..." if names[4:] else "")


def row_of(case, ok, *cells):
    return [case, *(cell if isinstance(cell, str) else f"{cell:.1e}" for cell in cells), "ok" if ok else "DIFFERS"], ok


def later_changed(parameters, seconds=0.5):
    """The names of gradients that still change, after finish_gradient_synchronization has returned."""
    now = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    time.sleep(seconds)
    return [name for name, g in now.items() if parameters[name].grad is not None and apart(parameters[name].grad, g) > BOUND]


# ----------------------------------------------------------------------------------------------------------------------
# DDP

def ddp_rank(rank, yours, case):
    torch.manual_seed(10 + rank)
    module = Toy(case)
    out = {"own": named(module), "gradients": [], "weights": [], "late": []}
    wrapper = wrap(yours, module)
    if not callable(wrapper): raise Usage(f"{yours.__name__}(module) gives {type(wrapper).__name__}, takes a wrapper with a forward")
    inner = wrapper.module if isinstance(getattr(wrapper, "module", None), nn.Module) else module
    parameters = dict(inner.named_parameters())
    optimizer = torch.optim.SGD(inner.parameters(), lr=RATE)
    out["start"] = named(inner)
    x, y = halves_of("ddp")[rank]
    for step in range(STEPS):
        before = hook_of(yours, BEFORE)
        if before:
            with contextlib.suppress(NotImplementedError): before(wrapper, optimizer)
        optimizer.zero_grad()
        loss_of(wrapper, x, y).backward()
        finish(yours, wrapper, optimizer)
        out["gradients"].append({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
        if case == "a late rank" and step == 0: out["late"] = later_changed(parameters)
        optimizer.step()
        out["weights"].append(named(inner))
    return out


def one_process(model, start, x, y, dtype=None):
    """The weights after the steps on the whole batch."""
    w = dict(start)
    for _ in range(STEPS):
        g = gradients_at(model, w, x, y, dtype)
        learns = {name for name, p in model.named_parameters() if p.requires_grad and g[name] is not None}
        w = {name: t - RATE * g[name] if name in learns else t for name, t in w.items()}
    return w


def compare_ddp(case, results):
    """(row of the table, ok, causes)"""
    model, halves, start = Toy(case), halves_of("ddp"), results[0]["own"]
    learnt = [name for name, p in model.named_parameters() if p.requires_grad]
    right, worst, causes = one_process(model, start, *batch("ddp")), 0, []
    lost = [name for name in start if any(apart(r["start"][name], start[name]) > BOUND for r in results)]
    change = lambda w: {name: w[name] - start[name] for name in learnt}
    last = max(apart(change(r["weights"][-1])[name], t) for r in results for name, t in change(right).items() if t.any())
    for step in range(STEPS):
        at = [r["weights"][step - 1] if step else r["start"] for r in results]
        own = [gradients_at(model, at[rank], *halves[rank]) for rank in range(2)]
        own = [{name: g[name] for name in learnt if g[name] is not None} for g in own]
        mean = {name: (g + own[1][name]) / 2 for name, g in own[0].items()}
        worst = max(worst, *(apart(r["gradients"][step].get(name), g) for r in results for name, g in mean.items()))
        before = results[0]["gradients"][step - 1] if step else {}
        late = results[0]["late"] + results[1]["late"]
        causes = causes or explain_gradients([r["gradients"][step] for r in results], own, before, late, BOUND)
    if lost:
        some = "" if len(lost) == len(start) else f" of {few(lost)}" + ("" if set(lost) & set(learnt) else ", which need no gradient,")
        causes = [f"the weights{some} are not sent from rank 0 at the start", *causes]
    first = max(apart(r["start"][name], start[name]) for r in results for name in start)
    return *row_of(case, max(first, worst, last) <= BOUND, first, worst, last), causes


# ----------------------------------------------------------------------------------------------------------------------
# The sharded optimizer

SETTINGS = dict(lr=0.1, betas=(0.8, 0.99), eps=1e-8, weight_decay=0.1)


def sharded_groups(case, parameters):
    if case != "two groups": return parameters
    return [{"params": parameters[::2], "lr": 0.02}, {"params": parameters[1::2]}]


def sharded_rank(rank, yours, case):
    made = []

    class Recorded(torch.optim.AdamW):
        """Your class makes these; their states are counted."""
        def __init__(self, *arguments, **options):
            made.append(self)
            super().__init__(*arguments, **options)

    torch.manual_seed(10)
    model = Toy(case)
    parameters = list(model.parameters())
    late = parameters.pop() if case == "add_param_group" else None
    optimizer = yours(sharded_groups(case, parameters), Recorded, **SETTINGS)
    if late is not None: optimizer.add_param_group({"params": [late]})
    out = {"gradients": [], "weights": [named(model)]}
    x, y = batch("sharded")
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.zero_grad()
        loss_of(model, x, y).backward()
        out["gradients"].append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        out["weights"].append(named(model))
    states = [t for o in made for state in o.state.values() for t in state.values() if isinstance(t, torch.Tensor) and t.dim()]
    return out | {"states": sum(t.numel() for t in states)}


def adamw_steps(case, result, settings, own_rates=True):
    """The weights after each step of torch.optim.AdamW on the gradients that a rank had."""
    model = Toy(case)
    model.load_state_dict(result["weights"][0], strict=False)
    groups = sharded_groups(case, list(model.parameters()))
    if not own_rates: groups = [{"params": group["params"]} for group in groups]
    optimizer, weights = torch.optim.AdamW(groups, **settings), []
    for gradients in result["gradients"]:
        for name, p in model.named_parameters(): p.grad = gradients.get(name)
        optimizer.step()
        weights.append(named(model))
    return weights


def compare_sharded(case, results):
    start, right = results[0]["weights"][0], adamw_steps(case, results[0], SETTINGS)
    learnt = [name for name, p in Toy(case).named_parameters() if p.requires_grad]
    held = [r["states"] / (2 * sum(start[name].numel() for name in learnt)) for r in results]
    change = lambda w, name: w[name] - start[name]
    far = lambda t: max(apart(change(r["weights"][t], name), change(right[t - 1], name)) for r in results for name in learnt)
    first, last, causes = far(1), far(STEPS), {}
    other = {"lacks its keyword arguments (lr, betas ...), which do not reach the optimizer": adamw_steps(case, results[0], {})[0],
             "lacks its group's own learning rate": adamw_steps(case, results[0], SETTINGS, case != "two groups")[0]}
    for name in learnt:
        mine = [r["weights"][1][name] for r in results]
        new, old = ([apart(w, t) <= 1e-5 for w in mine] for t in (right[0][name], start[name]))
        cause = next((words for words, w in other.items() if all(apart(m, w[name]) <= 1e-5 for m in mine)), "is not what AdamW gives")
        if any(new) and any(old): cause = "is not sent to the other rank after the step"
        elif all(old): cause = "never changes: no rank has it, or it is sent from a rank that does not"
        if not all(new): causes.setdefault(cause, []).append(name)
    said = [f"{few(names)} {cause}" for cause, names in causes.items()]
    if not causes and differs(last, BOUND): said.append("the first step is right, a later one is not: are the states kept?")
    whole = min(held) > 0.95
    if whole: said.append("the states are not sharded: each rank has those of all parameters")
    return *row_of(case, max(first, last) <= BOUND and not whole, first, last, f"{held[0]:.0%}, {held[1]:.0%}"), said


# ----------------------------------------------------------------------------------------------------------------------
# FSDP

def course_layers():
    try: from cs336_basics.model import Embedding, Linear, RMSNorm
    except Exception: return nn.Embedding, lambda a, b: nn.Linear(a, b, bias=False), lambda n: nn.RMSNorm(n, eps=1e-5)
    return Embedding, Linear, RMSNorm


def toy_fsdp(case):
    torch.manual_seed(10)
    return ToyFSDP(course_layers(), case)


def fsdp_rank(rank, yours, case):
    module = toy_fsdp(case)
    out = {"weights": [named(module)], "late": [], "none": []}
    wrapper = wrap(yours, module, compute_dtype=torch.float16 if case == "fp16" else None)
    out["held"] = sum(p.numel() for p in wrapper.parameters()) / sum(t.numel() for t in out["weights"][0].values())
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=RATE)
    x, y = halves_of("fsdp")[rank]
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss_of(wrapper, x, y).backward()
        finish(yours, wrapper, optimizer)
        parameters = {check.staff_name(name): p for name, p in wrapper.named_parameters()}
        out["none"] = [name for name, p in parameters.items() if p.requires_grad and p.grad is None]
        if case == "a late rank" and step == 0: out["late"] = later_changed(parameters)
        optimizer.step()
        out["weights"].append(full_weights(yours, wrapper))
    out["after"] = sum(p.numel() for p in wrapper.parameters()) / sum(t.numel() for t in out["weights"][0].values())
    return out


def compare_fsdp(case, results):
    model, halves, start = toy_fsdp(case), halves_of("fsdp"), results[0]["weights"][0]
    dtype, bound = (torch.float16, WIDE) if case == "fp16" else (None, 1e-3)
    full = [w for r in results for w in r["weights"]]
    lost = [name for name, t in start.items() if any(name not in w or w[name].shape != t.shape for w in full)]
    if lost: raise Usage(f"the full weights lack {lost[0]} as {list(start[lost[0]].shape)}; they have the module's names")
    right, said, worst = one_process(model, start, *batch("fsdp"), dtype), [], 0
    for step in range(STEPS):  # SGD's change tells the gradient
        yours = [{name: (r["weights"][step][name] - r["weights"][step + 1][name]) / RATE for name in start} for r in results]
        own = [gradients_at(model, results[rank]["weights"][step], *halves[rank], dtype) for rank in range(2)]
        worst = max(worst, *(apart(g[name], (own[0][name] + own[1][name]) / 2) for g in yours for name in start))
        said = said or explain_gradients(yours, own, {}, results[0]["late"] + results[1]["late"], bound)
    last = max(apart(r["weights"][-1][name] - start[name], right[name] - start[name]) for r in results for name in start)
    ok = worst <= bound and last <= 2 * bound
    for bad, words in [(min(r["held"] for r in results) > 0.95, "the weights are not sharded: each rank has all of them"),
                       (max(r["after"] for r in results) > 0.95, "after the step a rank has all weights: they are not freed"),
                       (results[0]["none"], f"after backward the gradient of {few(results[0]['none'])} is None")]:
        if bad: ok, said = False, [*said, words]
    return *row_of(case, ok, f"{results[0]['held']:.0%}, {results[1]['held']:.0%}", worst, last), said


# ----------------------------------------------------------------------------------------------------------------------
# The verdict

CASES = ["plain", "tied weights", "frozen parameters"]
NO_GRADIENT = "a parameter without gradient"
KINDS = {"ddp": (ddp_rank, compare_ddp, [*CASES, "a late rank", NO_GRADIENT],
                 ["case", "weights at the start", "gradients", f"weights after {STEPS} steps", f"bound {BOUND:g}"]),
         "sharded": (sharded_rank, compare_sharded, [*CASES, "two groups", "add_param_group", NO_GRADIENT],
                     ["case", "weights after a step", f"after {STEPS}", "states on the ranks", f"bound {BOUND:g}"]),
         "fsdp": (fsdp_rank, compare_fsdp, ["fp32", "fp16", "a late rank"],
                  ["case", "weights on the ranks", "gradients", f"weights after {STEPS} steps", "verdict"])}
BEYOND = {NO_GRADIENT: " This does not count: the public tests do not try it."}
ASKED = dict.fromkeys(("two groups", "add_param_group"), " The handout asks for this; the public tests do not try it.")


def check_cases(kind, yours, seconds):
    """(rows, are they ok, what to say); where the first case cannot be run, Usage."""
    work, compare, cases, columns = KINDS[kind]
    rows, good, lines = [], True, []
    for case in cases:
        try: row, ok, said = compare(case, on_two_ranks(lambda rank: work(rank, yours, case), seconds))
        except Usage as e:
            if case == cases[0] and not isinstance(e, Hang): raise
            row, ok, said = [case, *["-"] * (len(columns) - 2), "hangs" if isinstance(e, Hang) else "fails"], False, [str(e)]
        if not ok and case in BEYOND: row[-1] = "not asked"
        good = good and (ok or case in BEYOND)
        kind_of_line, more = "note" if case in BEYOND else "Likely cause", BEYOND.get(case, "") + ASKED.get(case, "")
        lines += [f"{kind_of_line}: {case}: {line}.{more}" for line in said]
        rows.append(row)
        if row[-1] == "hangs" and case == cases[0]: break
    return rows, good, lines


def check_ranks(kind, yours, seconds=8):
    """True: ok; False: differs."""
    name = getattr(yours, "__qualname__", str(yours))
    rows, good, lines = check_cases(kind, yours, seconds)
    print(f"\n{name}: two ranks over Gloo on the CPU, beside one process with the whole batch:\n")
    show(KINDS[kind][3], rows)
    wrong = ", ".join(row[0] for row in rows if row[-1] not in ("ok", "not asked"))
    print(*lines, f"ok: {name} does on two ranks what one process does." if good else f"DIFFERS: {wrong}.", sep="\n")
    return good
