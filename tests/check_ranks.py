"""tests/check_ranks.py: check.py's ddp, sharded and fsdp: two ranks over Gloo on the CPU, beside one process.

Each case forks two processes. What they give is compared with the same steps on the whole batch here. A rank that hangs
is ended, and its place is said. The interfaces are those of the course's tests, 2025's and 2026's."""
import contextlib, datetime, faulthandler, functools, inspect, multiprocessing, os, pickle, re, sys, tempfile, time
from multiprocessing import connection
import torch
import torch._dynamo  # optimizers import it, which takes a second; so it is here before the ranks are forked
import torch.distributed as dist
import torch.nn as nn
import check
from check import Usage, apart, few, show

BOUND = 1e-4  # fp32: sums in another order
FSDP_BOUNDS = {torch.float32: 1e-3, torch.float16: 3e-2}  # gradients are read from the weights' change
STEPS, RATE = 3, 0.5


# ----------------------------------------------------------------------------------------------------------------------
# Two ranks

class Hang(Usage):
    """No answer in time: this is a verdict, too."""


def rank_main(work, rank, folder, seconds, pipe):
    log = os.open(os.path.join(folder, f"log{rank}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1), os.dup2(log, 2)
    faulthandler.dump_traceback_later(seconds - 1, file=open(os.path.join(folder, f"where{rank}"), "w"))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if os.path.isdir("/sys/class/net/lo") else "lo0"
    torch.set_num_threads(1)
    try:
        store, limit = dist.FileStore(os.path.join(folder, "store"), 2), datetime.timedelta(seconds=seconds + 5)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
        result = work(rank)
    except Usage as e: result = e
    except BaseException as e:
        gloo = re.search("CUDA|AVG|nccl", str(e), re.I)
        more = "; the ranks are on the CPU over Gloo, as in the public tests" if gloo else ""
        result = (check.NotYet if check.not_written(e) else Usage)(f"rank {rank} {check.raised(e)}{more}")
    pipe.send_bytes(pickle.dumps((time.time(), result)))
    with contextlib.suppress(Exception):
        if not isinstance(result, Usage): dist.barrier()
    os._exit(0)


def on_two_ranks(work, seconds):
    """[what work(rank) returned]; Usage: what a rank raised first, or where it hung."""
    sys.stdout.flush()
    fork, pipes, ranks, results = multiprocessing.get_context("fork"), {}, [], {}
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(2):
            pipe, end_of_rank = fork.Pipe(duplex=False)
            pipes[pipe] = rank
            ranks.append(fork.Process(target=rank_main, args=(work, rank, folder, seconds, end_of_rank)))
            ranks[rank].start()
            end_of_rank.close()
        end = time.monotonic() + seconds
        while pipes:
            ready = connection.wait(list(pipes), max(0, end - time.monotonic()))
            if not ready: break
            for pipe in ready:
                rank = pipes.pop(pipe)
                with contextlib.suppress(EOFError): results[rank] = pickle.loads(pipe.recv_bytes())
                if rank in results and not isinstance(results[rank][1], Usage): continue
                end = min(end, time.monotonic() + 1)  # the other waits in vain
        for rank in ranks:
            rank.kill()
            rank.join()
        return what_came(folder, ranks, results, list(pipes.values()))


def what_came(folder, ranks, results, hanging):
    failures = [(at, str(result), result) for at, result in results.values() if isinstance(result, Usage)]
    if failures: raise min(failures)[2]
    for rank in range(2):
        if rank in results or rank in hanging: continue
        raise Usage(f"rank {rank} ended by signal {-ranks[rank].exitcode}: do the ranks send different sizes?")
    for rank in hanging:
        with open(os.path.join(folder, f"where{rank}")) as f:
            frames = re.findall(r'File "(.*)", line (\d+) in (\w+)', f.read())
        ended = f", while rank {1 - rank} has ended" if len(hanging) == 1 else ""
        raise Hang(f"rank {rank} hangs{check.place_of(frames[::-1])}{ended}")
    return [results[rank][1] for rank in range(2)]


# ----------------------------------------------------------------------------------------------------------------------
# Your class, by the course's interface

def beside(yours, ending):
    """What the course's adapters.py has beside get_NAME: NAME with this ending."""
    name, module = getattr(yours, "__name__", ""), sys.modules.get(getattr(yours, "__module__", ""))
    return getattr(module, name[len("get_"):] + ending, None) if name.startswith("get_") else None


def method(wrapper, wanted, pattern, what):
    """The method of that name, or the first whose name is like it, that takes no arguments."""
    like = [name for name in dir(type(wrapper)) if re.search(pattern, name) and not hasattr(nn.Module, name)]
    for name in [wanted, *(name for name in like if name[0] != "_")]:
        call = getattr(wrapper, name, None)
        if not callable(call): continue
        if all(a.default is not a.empty for a in inspect.signature(call).parameters.values()): return call
    raise Usage(f"{type(wrapper).__name__} has no {wanted}(); write it, {what}")


def finish(yours, wrapper, optimizer):
    after = beside(yours, "_on_after_backward")
    if after:
        with contextlib.suppress(NotImplementedError): return after(wrapper, optimizer)
    method(wrapper, "finish_gradient_synchronization", "finish|sync", "to be called after backward")()


def wrap(yours, module, **more):
    """Your wrapper around the module; a class that takes bucket_size_mb gets small buckets, as in the public test."""
    buckets = [name for name in inspect.signature(yours).parameters if "bucket" in name]
    return yours(module, **more, **dict.fromkeys(buckets, 0.0004))


def full_weights(yours, wrapper):
    gather = beside(yours, "_gather_full_params")
    if gather: full = gather(wrapper)
    else: full = method(wrapper, "gather_full_params", "gather.*param|full", "to return all weights by name")()
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
        if case == NO_GRADIENT: self.unused = nn.Linear(8, 8)
        self.late = case == "a late rank"

    def forward(self, x):
        x = self.fc2(self.fc1(x).tanh()).tanh()
        return self.fc4(self.fc3(Late.apply(x) if self.late else x).tanh())


@functools.cache
def course_layers():
    """Your course package's, if it can be imported."""
    try: from cs336_basics.model import Embedding, Linear, RMSNorm
    except Exception:
        Embedding, Linear, RMSNorm = nn.Embedding, nn.Linear, nn.RMSNorm
        return Embedding, functools.partial(Linear, bias=False), functools.partial(RMSNorm, eps=1e-5)
    return Embedding, Linear, RMSNorm


class ToyFSDP(nn.Module):
    """The public test's model, smaller."""
    def __init__(self, case):
        super().__init__()
        Embedding, Linear, RMSNorm = course_layers()
        self.embedding, self.norm1, self.linear1 = Embedding(20, 16), RMSNorm(16), Linear(16, 32)
        self.norm2, self.linear2, self.lm_head = RMSNorm(32), Linear(32, 16), Linear(16, 20)
        self.late = case == "a late rank"

    def forward(self, x):
        x = self.norm2(torch.relu(self.linear1(self.norm1(self.embedding(x)))))
        return self.lm_head(self.linear2(Late.apply(x) if self.late else x))


def toy(kind, case):
    return (ToyFSDP if kind == "fsdp" else Toy)(case)


def batch(kind, rank=None):
    """Of a rank its half, else the whole."""
    g = torch.Generator().manual_seed(340)
    if kind == "fsdp": x, y = torch.randint(20, (8, 6), generator=g), torch.randint(20, (8,), generator=g)
    else: x, y = torch.randn(8, 6, generator=g), torch.randn(8, 5, generator=g)
    return (x, y) if rank is None else (x.chunk(2)[rank], y.chunk(2)[rank])


def loss_of(model, x, y):
    out = model(x)
    if y.dtype.is_floating_point: return nn.functional.mse_loss(out, y)
    return nn.functional.cross_entropy(out[:, -1].float(), y)


def gradients_at(model, weights, x, y, dtype):
    """By the formula, at these weights. Matrices are cast to dtype on the way, as FSDP's compute_dtype does."""
    leaves = {name: t.clone().requires_grad_() for name, t in weights.items()}
    cast = {name: t.to(dtype) if t.dim() == 2 else t for name, t in leaves.items()}
    loss_of(lambda x: torch.func.functional_call(model, cast, x, tie_weights=True), x, y).backward()
    learnt = [name for name, p in model.named_parameters() if p.requires_grad]
    return {name: leaves[name].grad for name in learnt if leaves[name].grad is not None}


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
            "is still that of the step before": [before] * 2,
            "is added to that of the step before": [total / 2 + before] * 2, "is zero or None": [total * 0] * 2}


def explain_gradients(yours, own, before, late, bound):
    """Causes in words, for gradients by name on two ranks."""
    causes = {}
    for name in own[0]:
        mine = [g[name] for g in yours]
        kinds = kinds_of_gradients([g[name] for g in own], before.get(name, own[0][name] * 0))
        same = lambda right: all(apart(g, t) <= bound for g, t in zip(mine, right))
        kind = next((kind for kind, right in kinds.items() if same(right)), None)
        if kind == "is right": continue
        kind = kind or "is neither the mean nor what a usual mistake gives"
        if name in late: kind = "changes after finish...(): it returns before the gradient is averaged"
        causes.setdefault(kind, []).append(name)
    whose = lambda names: "every gradient" if len(names) == len(own[0]) > 1 else f"the gradient of {few(names)}"
    return [f"{whose(names)} {kind}" for kind, names in causes.items()]


def later_changed(parameters, seconds=0.5):
    """The names of gradients that still change, after finish_gradient_synchronization has returned."""
    now = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    time.sleep(seconds)
    changed = lambda name: parameters[name].grad is not None and apart(parameters[name].grad, now[name]) > BOUND
    return [name for name in now if changed(name)]


# ----------------------------------------------------------------------------------------------------------------------
# DDP and FSDP

def train(kind, rank, yours, case):
    """What a rank does: steps of SGD on its half of the batch."""
    torch.manual_seed(10 if kind == "fsdp" else 10 + rank)
    module = toy(kind, case)
    own = named(module)
    dtype = torch.float16 if case == "fp16" else None
    wrapper = wrap(yours, module, **({"compute_dtype": dtype} if kind == "fsdp" else {}))
    if not callable(wrapper):
        raise Usage(f"{yours.__name__}(module) gives {type(wrapper).__name__}, takes a wrapper with a forward")
    inner = wrapper.module if isinstance(getattr(wrapper, "module", None), nn.Module) else module
    learner = wrapper if kind == "fsdp" else inner
    weights = lambda: full_weights(yours, wrapper) if kind == "fsdp" else named(inner)
    held = lambda: sum(p.numel() for p in learner.parameters()) / sum(t.numel() for t in own.values())
    out = {"own": own, "weights": [own if kind == "fsdp" else named(inner)], "late": [], "held": held()}
    optimizer = torch.optim.SGD(learner.parameters(), lr=RATE)
    x, y = batch(kind, rank)
    for step in range(STEPS):
        before = beside(yours, "_on_train_batch_start")
        if before:
            with contextlib.suppress(NotImplementedError): before(wrapper, optimizer)
        optimizer.zero_grad()
        loss_of(wrapper, x, y).backward()
        finish(yours, wrapper, optimizer)
        parameters = {check.staff_name(name): p for name, p in learner.named_parameters()}
        out["none"] = [name for name, p in parameters.items() if p.requires_grad and p.grad is None]
        if case == "a late rank" and step == 0: out["late"] = later_changed(parameters)
        optimizer.step()
        out["weights"].append(weights())
    return out | {"after": held()}


def one_process(model, weights, x, y, dtype):
    """The weights after the steps on the whole batch."""
    for _ in range(STEPS):
        g = gradients_at(model, weights, x, y, dtype)
        weights = {name: t - RATE * g[name] if name in g else t for name, t in weights.items()}
    return weights


def compare_training(kind, case, results):
    """(cells of the table's row, is it ok, causes)"""
    model, dtype, start = toy(kind, case), torch.float16 if case == "fp16" else torch.float32, results[0]["own"]
    bound, weights = FSDP_BOUNDS[dtype] if kind == "fsdp" else BOUND, [r["weights"] for r in results]
    lost = [name for name, t in start.items() for w in sum(weights, []) if name not in w or w[name].shape != t.shape]
    if lost: raise Usage(f"the full weights lack {lost[0]}, {list(start[lost[0]].shape)}; their names are the module's")
    right, worst, said, before = one_process(model, start, *batch(kind), dtype), 0, [], {}
    for step in range(STEPS):  # SGD's change tells the gradient
        own = [gradients_at(model, w[step], *batch(kind, rank), dtype) for rank, w in enumerate(weights)]
        yours = [{name: (w[step][name] - w[step + 1][name]) / RATE for name in own[0]} for w in weights]
        worst = max(worst, *(apart(g[name], (own[0][name] + own[1][name]) / 2) for g in yours for name in own[0]))
        late = results[0]["late"] + results[1]["late"]
        said, before = said or explain_gradients(yours, own, before, late, bound), yours[0]
    change = lambda w, name: w[name] - start[name]
    far = lambda right: max(apart(change(w[-1], name), change(right, name)) for w in weights for name in own[0])
    last, more = far(right), explain_fsdp(results) if kind == "fsdp" else explain_start(model, start, weights)
    if case == "fp16" and far(one_process(model, start, *batch(kind), torch.float32)) <= BOUND:
        more.append("compute_dtype is not used: the weights are those of fp32")
    first = max(apart(w[0][name], t) for w in weights for name, t in start.items())
    at_start = f"{results[0]['held']:.0%}, {results[1]['held']:.0%}" if kind == "fsdp" else f"{first:.1e}"
    ok = not more and worst <= bound and last <= (2 * bound if kind == "fsdp" else bound)
    return [at_start, f"{worst:.1e}", f"{last:.1e}"], ok, more + said


def explain_start(model, start, weights):
    lost = [name for name, t in start.items() if any(apart(w[0][name], t) > BOUND for w in weights)]
    some = "" if len(lost) == len(start) else f" of {few(lost)}"
    if some and not any(model.get_parameter(name).requires_grad for name in lost): some += ", which need no gradient,"
    return [f"the weights{some} are not sent from rank 0 at the start"] if lost else []


def explain_fsdp(results):
    none = results[0]["none"]
    return [words for bad, words in [
        (min(r["held"] for r in results) > 0.95, "the weights are not sharded: each rank has all of them"),
        (max(r["after"] for r in results) > 0.95, "after the step a rank has all weights: they are not freed"),
        (none, f"after backward the gradient of {few(none)} is None")] if bad]


# ----------------------------------------------------------------------------------------------------------------------
# The sharded optimizer

SETTINGS = dict(lr=0.1, betas=(0.8, 0.99), eps=1e-8, weight_decay=0.1)


def sharded_groups(case, parameters):
    if case != "two groups": return parameters
    return [{"params": parameters[::2], "lr": 0.02}, {"params": parameters[1::2]}]


def step_sharded(kind, rank, yours, case):
    """What a rank does: steps on gradients that are the same on both."""
    made = []

    class Recorded(torch.optim.AdamW):
        """Your class makes these; their states are counted."""
        def __init__(self, *arguments, **options):
            made.append(self)
            super().__init__(*arguments, **options)

    torch.manual_seed(10)
    model = toy(kind, case)
    parameters = list(model.parameters())
    late = parameters.pop() if case == "add_param_group" else None
    optimizer = yours(sharded_groups(case, parameters), Recorded, **SETTINGS)
    if late is not None: optimizer.add_param_group({"params": [late]})
    out = {"gradients": [], "weights": [named(model)]}
    x, y = batch(kind)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.zero_grad()
        loss_of(model, x, y).backward()
        out["gradients"].append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        out["weights"].append(named(model))
    states = [t for o in made for state in o.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
    return out | {"states": sum(t.numel() for t in states)}


def adamw_steps(case, result, settings, own_rates=True):
    """The weights after each step of torch.optim.AdamW on the gradients that a rank had."""
    model, weights = Toy(case), []
    model.load_state_dict(result["weights"][0], strict=False)
    groups = sharded_groups(case, list(model.parameters()))
    if not own_rates: groups = [{"params": group["params"]} for group in groups]
    optimizer = torch.optim.AdamW(groups, **settings)
    for gradients in result["gradients"]:
        for name, p in model.named_parameters(): p.grad = gradients.get(name)
        optimizer.step()
        weights.append(named(model))
    return weights


def compare_sharded(kind, case, results):
    start, right = results[0]["weights"][0], adamw_steps(case, results[0], SETTINGS)
    learnt = [name for name, p in Toy(case).named_parameters() if p.requires_grad]
    held = [r["states"] / (2 * sum(start[name].numel() for name in learnt)) for r in results]
    far = lambda t: max(apart(r["weights"][t][name] - start[name], right[t - 1][name] - start[name])
                        for r in results for name in learnt)
    first, last, causes = far(1), far(STEPS), {}
    other = {"lacks its keyword arguments (lr, betas ...), which do not reach the optimizer": ({}, True),
             "lacks its group's own learning rate": (SETTINGS, case != "two groups")}
    other = {words: adamw_steps(case, results[0], *wrong)[0] for words, wrong in other.items()}
    for name in learnt:
        mine = [r["weights"][1][name] for r in results]
        are = lambda t: [apart(w, t[name]) <= 1e-5 for w in mine]
        new, old = are(right[0]), are(start)
        cause = next((words for words, w in other.items() if all(are(w))), "is not what AdamW gives")
        if any(new) and any(old): cause = "is not sent to the other rank after the step"
        elif all(old): cause = "never changes: no rank has it, or it is sent from a rank that does not"
        if not all(new): causes.setdefault(cause, []).append(name)
    said = [f"{few(names)} {cause}" for cause, names in causes.items()]
    if not causes and last > BOUND: said = ["the first step is right, a later one is not: are the states kept?"]
    whole = min(held) > 0.95
    if whole: said.append("the states are not sharded: each rank has those of all parameters")
    cells = [f"{first:.1e}", f"{last:.1e}", f"{held[0]:.0%}, {held[1]:.0%}"]
    return cells, max(first, last) <= BOUND and not whole, said


# ----------------------------------------------------------------------------------------------------------------------
# The verdict

CASES = ["plain", "tied weights", "frozen parameters"]
NO_GRADIENT = "a parameter without gradient"
KINDS = {"ddp": (train, compare_training, [*CASES, "a late rank", NO_GRADIENT],
                 ["case", "weights at the start", "gradients", f"weights after {STEPS} steps", f"bound {BOUND:g}"]),
         "sharded": (step_sharded, compare_sharded, [*CASES, "two groups", "add_param_group", NO_GRADIENT],
                     ["case", "weights after a step", f"after {STEPS}", "states on the ranks", f"bound {BOUND:g}"]),
         "fsdp": (train, compare_training, ["fp32", "fp16", "a late rank"],
                  ["case", "weights on the ranks", "gradients", f"weights after {STEPS} steps", "verdict"])}
MORE = {NO_GRADIENT: " This does not count: the public tests do not try it."}
MORE |= dict.fromkeys(("two groups", "add_param_group"), " The handout asks for this; the public tests do not try it.")


def check_ranks(kind, yours, seconds):
    """True: ok; False: differs; where the first case cannot be run, Usage."""
    name, (work, compare, cases, columns) = getattr(yours, "__qualname__", str(yours)), KINDS[kind]
    rows, good, lines = [], True, []
    if kind == "fsdp": course_layers()  # here, since it may take long, and a rank that takes long hangs
    for case in cases:
        try:
            cells, ok, said = compare(kind, case, on_two_ranks(lambda rank: work(kind, rank, yours, case), seconds))
            word = "ok" if ok else "DIFFERS"
        except Usage as e:
            word = "hangs" if isinstance(e, Hang) else "fails"
            if case == cases[0] and word == "fails": raise
            cells, ok, said = "-" * (len(columns) - 2), False, [str(e)]
        counts = case != NO_GRADIENT
        rows.append([case, *cells, word if ok or counts else "not asked"])
        good = good and (ok or not counts)
        lines += [f"{'Likely cause' if counts else 'note'}: {case}: {line}.{MORE.get(case, '')}" for line in said]
        if case == cases[0] and word == "hangs": break
    print(f"\n{name}: two ranks over Gloo on the CPU, beside one process with the whole batch:\n")
    show(columns, rows)
    wrong = ", ".join(row[0] for row in rows if row[-1] not in ("ok", "not asked"))
    print(*lines, f"ok: {name} does on two ranks what one process does." if good else f"DIFFERS: {wrong}.", sep="\n")
    return good
