"""tests/check_ranks.py: check.py's ddp, sharded and fsdp: ranks over Gloo on the CPU, beside one process.

Each case forks its ranks. What they give is compared with the same steps on the whole batch here. A rank that hangs is
ended, and its place is said. The interfaces are those of the course's tests, 2025's and 2026's."""
import contextlib, datetime, faulthandler, functools, gc, inspect, math, multiprocessing, os, pathlib, pickle
import re, signal, sys, tempfile, time
from multiprocessing import connection
import torch
import torch._dynamo  # optimizers import it, which takes a second; so it is here before the ranks are forked
import torch.distributed as dist
import torch.nn as nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
import check
from check import Usage, apart, few, show
from check_causes import FACTORS, GIVEN, OTHER

BOUND = 1e-4  # fp32: sums in another order
FSDP_BOUNDS = {torch.float32: 1e-3, torch.float16: 3e-2}  # gradients are read from the weights' change
STEPS, RATE = 3, 0.5


# ----------------------------------------------------------------------------------------------------------------------
# Ranks

class Watch(TorchDispatchMode):
    """Notes each collective that this rank starts, and the largest share of the weights that measure() gives.

    The first one that is sent in backward or after it waits for `delay` seconds."""
    ALIKE = "allreduce_ broadcast_ reduce_ allgather_ _allgather_base_ reduce_scatter_ _reduce_scatter_base_".split()

    def __init__(self, path):
        super().__init__()
        self.file, self.sent, self.phase, self.delay = open(path, "w", buffering=1), [], "", 0
        self.measure, self.peak = None, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if function.namespace == "c10d":
            if self.phase in ("backward", "finish"):
                time.sleep(self.delay)
                self.delay = 0
            tensors = [t for part in args[1::-1] for t in tree_leaves(part) if isinstance(t, torch.Tensor)]
            if tensors: self.sent.append((self.phase, name, tensors[0].dtype, tensors[0].numel()))
            root = [f"from rank {args[2]}"] if name == "broadcast_" else []
            if name in self.ALIKE: print(name.strip("_"), "of", *(list(t.shape) for t in tensors), *root, file=self.file)
        if self.measure and (function.namespace == "c10d" or name == "mm"): self.peak = max(self.peak, self.measure())
        return function(*args, **(kwargs or {}))


def rank_main(work, rank, world, folder, seconds):
    signal.alarm(seconds + 5)  # which ends this rank also if check.py itself was killed
    gc.freeze()  # its garbage collector passes over what is here already
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    faulthandler.dump_traceback_later(seconds - 1, file=open(folder / f"where{rank}", "w"))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        limit = datetime.timedelta(seconds=seconds + 5)
        dist.init_process_group("gloo", f"file://{folder}/store", limit, world, rank)
        with Watch(folder / f"sent{rank}") as watch: result = work(rank, world, watch)
    except Usage as e: result = e
    except BaseException as e:
        gloo = re.search("CUDA|AVG|nccl", str(e), re.I)
        more = "; the ranks are on the CPU over Gloo, as in the public tests" if gloo else ""
        result = Usage(f"rank {rank} {check.raised(e)}{more}", check.NOT_YET if check.not_written(e) else check.CANNOT)
    (folder / f"result{rank}").write_bytes(pickle.dumps((time.time(), result)))
    with contextlib.suppress(Exception):
        if not isinstance(result, Usage): dist.barrier()
    os._exit(0)


def on_ranks(work, world, seconds):
    """[what work(rank) returned]; Usage: what a rank raised first, or where it hung."""
    with tempfile.TemporaryDirectory() as name:
        fork, folder, results = multiprocessing.get_context("fork"), pathlib.Path(name), {}
        ranks = [fork.Process(target=rank_main, args=(work, rank, world, folder, seconds)) for rank in range(world)]
        for rank in ranks: rank.start()
        ended = connection.wait([rank.sentinel for rank in ranks], seconds)
        for rank in ranks: rank.join(1 if ended else 0)  # where one has ended, the others end soon, or wait in vain
        alive = [rank.is_alive() for rank in ranks]
        # Read before any rank is killed: those that wait for it would raise that it is gone.
        for rank in range(world):
            with contextlib.suppress(Exception): results[rank] = pickle.loads((folder / f"result{rank}").read_bytes())
        died = [rank for rank in range(world) if not alive[rank] and rank not in results]
        for rank in ranks: rank.kill()
        for rank in ranks: rank.join()
        failures = [(at, result) for at, result in results.values() if isinstance(result, Usage)]
        if len(results) == world and not failures: return [results[rank][1] for rank in range(world)]
        sent = [path.read_text().splitlines() for path in sorted(folder.glob("sent*"))]
        for n, texts in enumerate(zip(*sent), 1):
            if len(set(texts)) == 1: continue
            rank, text = next((rank, text) for rank, text in enumerate(texts) if text != texts[0])
            raise Usage(f"the ranks do not send the same in the same order: collective {n} is {texts[0]} on rank 0, "
                        f"and {text} on rank {rank}", "fails")
        hanging = [rank for rank in range(world) if alive[rank] and rank not in results]
        for rank in died:
            raise Usage(f"rank {rank} ended by signal {-ranks[rank].exitcode}: do the ranks send different sizes?")
        if failures: raise min(failures, key=lambda failure: failure[0])[1]
        frames = re.findall(r'File "(.*)", line (\d+) in (\w+)', (folder / f"where{hanging[0]}").read_text())
        ended = f", while rank {min(results)} has ended" if results else ""
        raise Usage(f"rank {hanging[0]} hangs{check.place_of(frames[::-1])}{ended}", "hangs")


# ----------------------------------------------------------------------------------------------------------------------
# Your class, by the course's interface

def beside_of(yours, ending):
    """What the course's adapters.py has beside get_NAME: NAME with this ending; or None."""
    name, module = getattr(yours, "__name__", ""), sys.modules.get(getattr(yours, "__module__", ""))
    return getattr(module, name[len("get_"):] + ending, None) if name.startswith("get_") else None


def beside(yours, ending, *arguments):
    """[what NAME with this ending returns]; []: it is not written."""
    call = beside_of(yours, ending)
    with contextlib.suppress(NotImplementedError): return [call(*arguments)] if call else []
    return []


def method(wrapper, wanted, pattern, what):
    """The method of that name, or the first whose name is like it, that takes no arguments."""
    like = [name for name in dir(type(wrapper)) if re.search(pattern, name) and not hasattr(nn.Module, name)]
    for name in [wanted, *(name for name in like if name[0] != "_")]:
        call = getattr(wrapper, name, None)
        with contextlib.suppress(TypeError): return inspect.signature(call).bind() and call
    raise Usage(f"{type(wrapper).__name__} has no {wanted}(); write it, {what}")


def full_weights(yours, wrapper):
    full = beside(yours, "_gather_full_params", wrapper)
    if not full: full = [method(wrapper, "gather_full_params", "gather.*param|full", "to return all weights by name")()]
    return {name.replace("_orig_mod.", ""): t.detach().clone() for name, t in full[0].items()}


# ----------------------------------------------------------------------------------------------------------------------
# Models and data

class Toy(nn.Module):
    """Twelve weights of nearly one size, so that a fair share is a whole number of them; for ddp biases, too."""
    def __init__(self, kind, case):
        super().__init__()
        self.fc = nn.ModuleList(nn.Linear(8, n, bias=kind == "ddp") for n in (*11 * [8], 7))
        if case == "tied weights": self.fc[5].weight = self.fc[2].weight
        if case == "frozen parameters": self.fixed = nn.Parameter(torch.randn(8), requires_grad=False)
        if case == NO_GRADIENT: self.unused = nn.Linear(8, 8)
        if case == "a buffer": self.register_buffer("shift", torch.randn(8))

    def forward(self, x):
        for name in ("fixed", "shift"): x = x + getattr(self, name, 0)
        for layer in self.fc[:-1]: x = x + layer(x).tanh()
        return self.fc[-1](x)


@functools.cache
def course_layers():
    """Your course package's Embedding, Linear and RMSNorm, if it can be imported."""
    try: from cs336_basics import model
    except Exception:
        check.note("cs336_basics is not there: the model is made of nn.Embedding and nn.Linear")
        return nn.Embedding, functools.partial(nn.Linear, bias=False), functools.partial(nn.RMSNorm, eps=1e-5)
    return model.Embedding, model.Linear, model.RMSNorm


class ToyFSDP(nn.Module):
    """The public test's layers, and more of them: so many that a few gathered ones are far less than all."""
    def __init__(self):
        super().__init__()
        Embedding, Linear, RMSNorm = course_layers()
        self.embedding = Embedding(20, 64)
        self.norms = nn.ModuleList(RMSNorm(64) for _ in range(12))
        self.linears = nn.ModuleList(Linear(64, 64) for _ in range(12))
        self.lm_head = Linear(64, 20)

    def forward(self, x):
        x = self.embedding(x)
        for norm, linear in zip(self.norms, self.linears): x = x + torch.relu(linear(norm(x.float()).to(x.dtype)))
        return self.lm_head(x[:, -1])


def toy(kind, case):
    return ToyFSDP() if kind == "fsdp" else Toy(kind, case)


def batch(kind, rank=0, world=1):
    """Of all ranks each its part."""
    g = torch.Generator().manual_seed(340)
    if kind == "fsdp": x, y = torch.randint(20, (12, 2), generator=g), torch.randint(20, (12,), generator=g)
    else: x, y = (torch.randn(12, n, generator=g) for n in (8, 7))
    return x.chunk(world)[rank], y.chunk(world)[rank]


def loss_of(model, x, y):
    loss = nn.functional.mse_loss if y.dtype.is_floating_point else nn.functional.cross_entropy
    return loss(model(x).float(), y)


def gradients_at(model, weights, x, y, dtype):
    """By the formula, at these weights. Matrices are cast to dtype on the way, as FSDP's compute_dtype does."""
    leaves = {name: t.clone().requires_grad_() for name, t in weights.items()}
    cast = {name: t.to(dtype) if t.dim() == 2 else t for name, t in leaves.items()}
    loss_of(lambda x: torch.func.functional_call(model, cast, x, tie_weights=True), x, y).backward()
    learnt = [name for name, p in model.named_parameters() if p.requires_grad]
    return {name: leaves[name].grad for name in learnt if leaves[name].grad is not None}


def named(model):
    return {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}


# ----------------------------------------------------------------------------------------------------------------------
# DDP and FSDP

def in_words(names, names_of_all, all_of_them, some=""):
    return all_of_them if len(names) == len(names_of_all) else some + few(names)


def together(causes, *words):
    """[(whose, cause)] of {name: cause, or None}. words: as in_words() takes them"""
    names_of = {cause: [name for name in causes if causes[name] == cause] for cause in causes.values() if cause}
    return [(in_words(names, causes, *words), cause) for cause, names in names_of.items()]


def kind_of_gradient(g, own, last, before, bound, rounded, first):
    """What g is instead of the mean; None: it is that. The first axis is the ranks. own: each rank's gradient; last: of
    its second half; before: what g was at the step before; rounded: the type of 16 bits in which it is sent, if any;
    first: each rank's gradient at the first step's matrices"""
    n, total = len(own), own.sum(0)
    rows = torch.cat([t.flatten().tensor_split(n)[i] for i, t in enumerate(own)]).view_as(own[0])
    near = lambda right, bound=bound: apart(g, right.expand_as(g)) <= bound
    kinds = {None: total / n, "is the sum over the ranks instead of the mean": total, "is zero or None": total * 0,
             "is the sum over the ranks divided by 2, and not by their number": total / 2,
             "is each rank's own: it is not averaged": own,
             "is rank 0's on each rank": own[0], f"is rank {n - 1}'s on each rank": own[-1],
             "is each rank's own, divided by the number of ranks: nothing is added": own / n,
             "is divided by the number of ranks twice": total / n ** 2,
             "is added up twice, as a weight used twice may be": total * 2,
             "is the last backward's alone: what was there before it is lost": last.sum(0) / (2 * n),
             "is each rank's own rows of its own gradient: nothing is added": rows,
             "is each rank's own rows of its own gradient, divided by the number of ranks: nothing is added": rows / n,
             "is that of the first step's weights: forward does not see what the optimizer has changed": first.mean(0),
             "is still that of the step before": before, "is added to that of the step before": total / n + before}
    for kind, right in kinds.items():
        if near(right): return kind
    if rounded and near(total / n, 1e-2): return f"is the mean, but rounded: it is sent in {rounded}"
    return "is neither the mean nor what a usual mistake gives"


def held_share(wrapper, own, gradients=False):
    """The bytes that this rank holds, over those of all weights. A view counts as all that it keeps alive.

    Tensors count that this rank has made, but neither `own` nor small ones, which may be activations. Gradients count
    if they are asked for."""
    parameters = list(wrapper.parameters())
    grads = [p.grad for p in parameters if p.grad is not None]
    sizes = lambda tensors: {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    held = sizes([*parameters, *grads, *(x for x in gc.get_objects() if issubclass(type(x), torch.Tensor))])
    for at in sizes([*own.values(), *([] if gradients else grads)]): held.pop(at, None)
    return sum(n for n in held.values() if n > 4096) / sum(t.nbytes for t in own.values() if t.nbytes > 4096)


def train(kind, rank, world, watch, yours, case):
    """What a rank does: steps of SGD on its part of the batch."""
    torch.manual_seed(10 if kind == "fsdp" else 10 + rank)
    module = toy(kind, case)
    own, (x, y) = named(module), batch(kind, rank, world)
    watch.phase = "start"
    # A class that takes bucket_size_mb gets small buckets, as in the public test.
    options = {name: 0.0004 for name in inspect.signature(yours).parameters if "bucket" in name}
    if kind == "fsdp": options["compute_dtype"] = torch.float16 if case == "fp16" else None
    wrapper = yours(module, **options)
    if not callable(wrapper):
        raise Usage(f"{yours.__name__}(module) gives {type(wrapper).__name__}, takes a wrapper with a forward")
    inner, causes = getattr(wrapper, "module", None), []
    if not isinstance(inner, nn.Module): raise Usage("the wrapper has no .module, which the public tests read", "fails")
    if not set(inner.parameters()) <= set(getattr(wrapper, "parameters", list)()):
        raise Usage("wrapper.parameters() does not give the module's: is it an nn.Module that has it as an attribute?",
                    "fails")
    share = functools.partial(held_share, wrapper, own) if kind == "fsdp" else float
    gc.collect()
    out = {"own": own, "late": [], "causes": causes, "held": {"before the first step": share()}}
    parameters = lambda: {check.staff_name(name): p for name, p in wrapper.named_parameters()}
    matrices = [name for name, t in own.items() if t.dim() == 2 and kind == "fsdp"]
    whole = [name for name, p in parameters().items() if name in matrices and p.numel() > 0.6 * own[name].numel()]
    if whole: causes.append((in_words(whole, matrices, "the weights"), "are not sharded: each rank has all of them"))
    narrow = [name for name, p in parameters().items() if p.dtype != torch.float32]
    if narrow:
        causes.append((few(narrow), f"is {str(parameters()[narrow[0]].dtype).removeprefix('torch.')}; "
                                    "the weights that the optimizer steps stay float32"))
    out["weights"] = [own if kind == "fsdp" else named(inner)]
    with contextlib.suppress(Exception):  # which may be able to gather only after a step
        full = full_weights(yours, wrapper) if kind == "fsdp" else {}
        other = [name for name, t in full.items() if name in own and t.shape == own[name].shape and apart(t, own[name]) > BOUND]
        if other: causes.append(("before the first step", f"gather_full_params() does not give the module's {few(other)}"))
    full = None  # or it would count as held
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=RATE)
    parts = list(zip(*(t.chunk(2 if case in TWICE else 1) for t in (x, y))))
    for step in range(STEPS):
        watch.delay = 0.3 if case == "a late rank" and rank == 1 and step == 0 else 0
        beside(yours, "_on_train_batch_start", wrapper, optimizer)  # before zero_grad(), as in the public test
        optimizer.zero_grad()
        for group in [parts] if case == "two forwards" else [[part] for part in parts]:
            watch.phase = "forward"
            loss = sum(loss_of(wrapper, *part) for part in group) / len(parts)
            if step == 0: out["held"]["before backward"] = share()
            if step == 0 and kind == "ddp":  # a buffer may be sent by the first forward
                out["weights"][0] |= {name: t.clone() for name, t in inner.named_buffers()}
            watch.phase, start = "backward", named(inner) if kind == "ddp" else {}
            loss.backward()
            watch.phase = "finish"
            if beside(yours, "_on_after_backward", wrapper, optimizer): continue
            method(wrapper, "finish_gradient_synchronization", "finish|sync", "to be called after backward")()
        moved = [name for name, t in start.items() if not torch.equal(t, named(inner)[name])]
        if moved: causes.append(("backward", f"changes {few(moved)}; of a hook's parameter the gradient is .grad"))
        kind_of = lambda t: t if t is None else (t.shape, t.dtype)
        odd = [name for name, p in parameters().items() if p.requires_grad and kind_of(p.grad) != kind_of(p)]
        if odd and kind == "fsdp":
            what = str(getattr(parameters()[odd[0]].grad, "dtype", None)).removeprefix("torch.")
            causes.append((f"after backward the gradient of {few(odd)}",
                          f"is {what}, not of its parameter's shape and type"))
        if case == "a late rank" and step == 0:
            now = {name: p.grad.clone() for name, p in parameters().items() if p.grad is not None}
            time.sleep(0.5)
            out["late"] = [name for name in now if apart(parameters()[name].grad, now[name]) > BOUND]
        optimizer.step()
        if case == "fp32" and step == 0:
            gc.collect()
            out["held"]["after a step, gradients counted,"] = share(gradients=True)
            watch.phase, watch.measure = "forward", share
            with torch.no_grad(): wrapper(x)  # without a graph, so that what is held is the wrapper's
            watch.measure = None
            gc.collect()
            out["held"] |= {"after forward": share(), "peak": watch.peak}
        out["weights"].append(full_weights(yours, wrapper) if kind == "fsdp" else named(inner))
    return out | {"sent": watch.sent}


def one_process(model, weights, x, y, dtype):
    """The weights after the steps on the whole batch."""
    for _ in range(STEPS):
        gradients = gradients_at(model, weights, x, y, dtype)
        weights = weights | {name: weights[name] - RATE * g for name, g in gradients.items()}
    return weights


def compare_training(kind, case, results):
    """(cells of the table's row, is it ok, causes, notes)"""
    model, dtype, start = toy(kind, case), torch.float16 if case == "fp16" else torch.float32, results[0]["own"]
    bound, weights = FSDP_BOUNDS[dtype] if kind == "fsdp" else BOUND, [r["weights"] for r in results]
    lost = [name for name, t in start.items() for w in sum(weights, []) if name not in w or w[name].shape != t.shape]
    if lost: raise Usage(f"the full weights lack {lost[0]}, {list(start[lost[0]].shape)}; their names are the module's")
    right, worst, said, before = one_process(model, start, *batch(kind), dtype), 0, [], {}
    late, sent = sum((r["late"] for r in results), []), results[0]["sent"]
    reduced = {dtype for _, name, dtype, _ in sent if "reduce" in name}
    rounded = next((str(dtype)[6:] for dtype in (torch.float16, torch.bfloat16) if dtype in reduced), "")
    of_ranks = lambda ranks: {name: torch.stack([rank[name] for rank in ranks]) for name in ranks[0]}
    for step in range(STEPS):  # SGD's change tells the gradient
        own, last = (of_ranks([gradients_at(model, w[step], *(part(t) for t in batch(kind, rank, len(weights))), dtype)
                               for rank, w in enumerate(weights)]) for part in (lambda t: t, lambda t: t.chunk(2)[1]))
        yours = of_ranks([{name: (w[step][name] - w[step + 1][name]) / RATE for name in own} for w in weights])
        worst = max(worst, *(apart(g, own[name].mean(0).expand_as(g)) for name, g in yours.items()))
        matrices = [w[step] | {name: t for name, t in w[0].items() if t.dim() > 1} for w in weights]
        first = of_ranks([gradients_at(model, w, *batch(kind, rank, len(weights)), dtype) for rank, w in enumerate(matrices)])
        causes = {name: kind_of_gradient(g, own[name], last[name], before.get(name, g * 0), bound, rounded, first[name])
                  for name, g in yours.items()}
        causes |= dict.fromkeys(late, "changes after finish...(): it returns before the gradient is averaged")
        if step: causes = {name: cause and f"{cause}, from step {step + 1} on" for name, cause in causes.items()}
        said, before = said or together(causes, "every gradient", "the gradient of "), yours
    change = lambda w, name: w[name] - start[name]
    far = lambda right: max(apart(change(w[-1], name), change(right, name)) for w in weights for name in own)
    held = {when: max(r["held"][when] for r in results) for when in results[0]["held"]}
    last, more = far(right), explain_training(model, weights, results, held)
    if case == "fp16" and far(one_process(model, start, *batch(kind), torch.float32)) <= BOUND:
        more.append(("compute_dtype", "is not used: the weights are those of fp32"))
    first = f"{max(apart(w[0][name], t) for w in weights for name, t in start.items()):.1e}"
    shown = [held[when] for when in ("before the first step", "peak", "after forward") if when in held]
    if kind == "fsdp": first = ", ".join(f"{share:.0%}" for share in shown)
    # In fp16 roundings grow from step to step, also between two right ones: there each step's gradients tell.
    far_off = worst if case == "fp16" else last
    ok = not more + said and far_off <= (2 * bound if kind == "fsdp" else bound)
    return [first, f"{worst:.1e}", f"{last:.1e}"], ok, more + said, notes_of(kind, case, sent, rounded, held)


def explain_training(model, weights, results, held):
    """Causes, as (whose, what), that gradients do not show. held: {when: the share of the weights' bytes on a rank}"""
    start, causes = results[0]["own"], list(dict.fromkeys(sum((r["causes"] for r in results), [])))
    lost = [name for name, t in start.items() if any(apart(w[0][name], t) > BOUND for w in weights)]
    whose = in_words(lost, start, "the weights", "the weights of ")
    if set(lost) <= dict(model.named_buffers()).keys(): whose += ", a buffer,"
    elif not any(t.requires_grad for name, t in model.named_parameters() if name in lost):
        whose += ", which need no gradient,"
    if lost: causes.append((whose, "are not sent from rank 0 at the start"))
    for when, fair in (("before the first step", 0.5), ("after forward", 0.5), ("after a step, gradients counted,", 1)):
        if causes or held.get(when, 0) <= fair + 0.1: continue
        causes.append((when, f"a rank holds {held[when]:.0%} of the weights' bytes; its shards are {fair:.0%}"))
    return causes


def notes_of(kind, case, sent, rounded, held):
    """What is allowed, but poorer."""
    phases = {phase for phase, *_ in sent}
    peak, between = held.get("peak", 0), held["before backward"]
    wide = [dtype == torch.float32 and size > 1000 for phase, _, dtype, size in sent if phase == "forward"]
    notes = {"nothing is sent before backward has ended; gradients sent as they are ready overlap with it":
             kind == "ddp" and case == "plain" and "finish" in phases and "backward" not in phases,
             f"in forward a rank holds up to {peak:.0%} of the weights: they are gathered all at once": peak > 0.95,
             f"between forward and backward a rank holds {between:.0%} of the weights: autograd keeps what a product "
             "has saved, unless its storage is resized to 0": held.get("after forward", 1) <= 0.6 and between > 0.75,
             "weights are sent in float32; cast before they are gathered, they are half as many bytes":
             case == "fp16" and any(wide),
             f"gradients are sent in {rounded}, which rounds them": kind == "fsdp" and case == "fp16" and rounded}
    return [note for note, holds in notes.items() if holds]


# ----------------------------------------------------------------------------------------------------------------------
# The sharded optimizer

LATER = ": what is changed in param_groups later does not reach the optimizer"
GROUPS = ["two groups", "add_param_group"]


def sharded_groups(case, parameters, own=True):
    if case not in GROUPS: return parameters
    halves = [{"params": half} for half in (parameters[:6], parameters[6:])]
    return [halves[0] | (GIVEN if own else {}), *halves[1:]]  # all get OTHER; only the first has its own settings


def change_settings(case, optimizer, step, factors=FACTORS):
    """What a schedule does between steps."""
    if case not in ("a schedule", "two groups") or not step: return
    for group in optimizer.param_groups:
        lacks = factors.keys() - group.keys()
        if lacks: raise Usage(f"a group of param_groups has no '{min(lacks)}', which a schedule reads and sets")
        for key, factor in factors.items(): group[key] *= factor


def step_sharded(kind, rank, world, watch, yours, case):
    """What a rank does: steps on gradients that are the same on all."""
    held = {}  # {weight: its state in an AdamW that your class made}
    register_optimizer_step_post_hook(lambda o, *_: held.update(o.state if isinstance(o, torch.optim.AdamW) else {}))
    torch.manual_seed(10)
    model = toy(kind, case)
    groups = sharded_groups(case, list(model.parameters()))
    first, later = (groups[:1], groups[1]["params"]) if case == "add_param_group" else (groups, [])
    optimizer = yours(model.parameters() if case == "plain" else first, torch.optim.AdamW, **OTHER)
    for p in later: optimizer.add_param_group({"params": [p]})
    out = {"gradients": [], "weights": [named(model)], "left": []}
    for step in range(STEPS):
        change_settings(case, optimizer, step)
        optimizer.zero_grad()
        out["left"] += [name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()]
        model.zero_grad()
        loss_of(model, *batch(kind)).backward()
        out["gradients"].append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        out["weights"].append(named(model))
    tensors = lambda states: [t for state in states for t in state.values() if torch.is_tensor(t) and t.dim()]
    states, saved = tensors(held.values()), []
    with contextlib.suppress(Exception): saved = tensors(optimizer.state_dict()["state"].values())
    lost = [t for t in states if not any(torch.equal(t, other) for other in saved)]
    return out | {"states": sum(t.numel() for t in states), "lost": len(lost)}


def adamw_steps(case, result, settings, own=True, factors=FACTORS):
    """The weights after each step of torch.optim.AdamW on the gradients that a rank had."""
    model, weights = toy("sharded", case), []
    model.load_state_dict(result["weights"][0], strict=False)
    optimizer = torch.optim.AdamW(sharded_groups(case, list(model.parameters()), own), **settings)
    for step, gradients in enumerate(result["gradients"]):
        change_settings(case, optimizer, step, factors)
        for name, p in model.named_parameters(): p.grad = gradients.get(name)
        optimizer.step()
        weights.append(named(model))
    return weights


def compare_sharded(kind, case, results):
    start, model = results[0]["weights"][0], toy(kind, case)
    learnt = [name for name, p in model.named_parameters() if p.requires_grad]
    held = [r["states"] / (2 * sum(start[name].numel() for name in learnt)) for r in results]
    run = functools.partial(adamw_steps, case, results[0])
    right, others = run(OTHER), lambda settings, key: {k: v for k, v in settings.items() if k != key}
    far = lambda t: max(apart(r["weights"][t][name] - start[name], right[t - 1][name] - start[name])
                        for r in results for name in learnt)
    wrong = {"lacks its keyword arguments (lr, betas ...), which do not reach the optimizer": run({}),
             **{f"lacks the keyword argument {key}": run(others(OTHER, key)) for key in OTHER},
             "lacks its group's own settings": run(OTHER, False),
             **({"has the settings of another group": run(OTHER | GIVEN)} if case in GROUPS else {}),
             "gets only lr of its keyword arguments": run({"lr": OTHER["lr"]}),
             f"keeps its first settings{LATER}": run(OTHER, factors={}),
             **{f"keeps its first {key}{LATER}": run(OTHER, factors=others(FACTORS, key)) for key in FACTORS}}

    def cause_of(name):
        mine = [[w[name] for w in r["weights"][1:]] for r in results]
        are = lambda steps: [all(apart(w, s[name]) <= 1e-5 for w, s in zip(m, steps)) for m in mine]
        new, old = are(right[:1]), are([start])
        if all(are(right)): return None
        if name not in learnt: return "changes, and needs no gradient"
        if all(are([start] * STEPS)): return "never changes: no rank has it, or it is sent from a rank that does not"
        if any(new) and any(old): return "is not sent to the other rank after the step"
        for cause, steps in wrong.items():
            if all(are(steps)): return cause
        if all(are(right[:1])): return "is right after a step, but not after a later one; are the states kept"
        return "is not what AdamW gives"

    said = together({name: cause_of(name) for name in start}, "every weight")
    left = sum((r["left"] for r in results), [])
    if left: said.append(("zero_grad()", f"leaves the gradients of {few(list(dict.fromkeys(left)))}"))
    share = math.ceil(len(learnt) / len(results)) / len(learnt)  # a whole number of weights
    fair = max(held) <= 1.1 * share or case in ("frozen parameters", NO_GRADIENT)  # some solutions count such weights, some do not
    if min(held) > 0.95: said.append(("the states", "are not sharded: each rank has those of all parameters"))
    elif not fair: said.append(("a rank", f"holds {max(held):.0%} of the states; a fair share is {share:.0%}"))
    cells = [f"{far(1):.1e}", f"{far(STEPS):.1e}", ", ".join(f"{h:.0%}" for h in held)]
    lost = case == "plain" and any(r["lost"] for r in results)
    notes = ["state_dict() lacks states that its rank holds: a checkpoint loses them"] if lost else []
    return cells, max(far(1), far(STEPS)) <= BOUND and fair and not said, said, notes


# ----------------------------------------------------------------------------------------------------------------------
# The verdict

CASES = ["plain", "tied weights", "frozen parameters"]
TWICE = ["two backwards", "two forwards"]
NO_GRADIENT, BUFFER = "a parameter without gradient", "a buffer"
KINDS = {"ddp": (train, compare_training,
                 [*CASES, BUFFER, "three ranks", "two backwards", "a late rank", NO_GRADIENT],
                 ["weights at the start", "gradients", f"weights after {STEPS} steps", f"bound {BOUND:g}"]),
         "sharded": (step_sharded, compare_sharded,
                     [*CASES, "a schedule", "three ranks", *GROUPS, NO_GRADIENT],
                     ["weights after a step", f"after {STEPS}", "states on the ranks", f"bound {BOUND:g}"]),
         "fsdp": (train, compare_training, ["fp32", "fp16", *TWICE, "a late rank"],
                  ["held: at rest, peak, after forward", "gradients", f"weights after {STEPS} steps", "verdict"])}
MORE = dict.fromkeys(GROUPS, " The handout asks for this; the public tests do not try it.")
MORE |= dict.fromkeys(("a schedule", "three ranks", *TWICE, NO_GRADIENT, BUFFER), " The public tests do not try it.")


def check_ranks(kind, yours, seconds):
    """True: ok; False: differs; where the first case cannot be run, Usage."""
    name, (work, compare, cases, columns) = getattr(yours, "__qualname__", str(yours)), KINDS[kind]
    rows, good, lines, notes = [], True, {}, []
    # This hook runs once, before both backwards. If it sets something back, the second may lack that. An empty hook
    # sets nothing back.
    code = getattr(beside_of(yours, "_on_train_batch_start"), "__code__", None)
    starts = code and {*code.co_names} - {"NotImplementedError"}
    if kind == "fsdp": course_layers()  # here, since it may take long, and a rank that takes long hangs
    for case in cases:
        run = lambda rank, world, watch: work(kind, rank, world, watch, yours, case)
        try:
            cells, ok, said, more = compare(kind, case, on_ranks(run, 3 if case == "three ranks" else 2, seconds))
            word = "ok" if ok else "DIFFERS"
        except Usage as e:
            word = "hangs" if e.word == "hangs" else "fails"
            if case == cases[0] and e.word not in ("hangs", "fails"): raise
            cells, ok, said, more = "-" * (len(columns) - 1), False, [("", str(e))], []
        unsent = case == BUFFER and said and all("a buffer," in whose for whose, _ in said)
        counts = case != NO_GRADIENT and not unsent and not (case in TWICE and (word == "fails" or starts))
        rows.append([case, *cells, word if ok or counts else "not asked"])
        good = good and (ok or not counts)
        for whose, what in said: lines.setdefault((what, counts), []).append((case, whose))
        notes += [f"note: {case}: {line}." for line in more]
        if case == cases[0] and word == "hangs": break
    print(f"\n{name}: ranks over Gloo on the CPU, beside one process with the whole batch:\n")
    show(["case", *columns], rows)
    for (what, counts), places in lines.items():
        (case, whose), also = places[0], [case for case, _ in places[1:]]
        too = f" (so, too: {', '.join(dict.fromkeys(also))})" if also else ""
        print(f"{'Likely cause' if counts else 'note'}: {case}: {f'{whose} {what}'.strip()}{too}.{'' if counts else ' This does not count.'}{MORE.get(case, '')}")
    wrong = ", ".join(row[0] for row in rows if row[-1] not in ("ok", "not asked"))
    print(*notes, f"ok: {name} does on its ranks what one process does." if good else f"DIFFERS: {wrong}.", sep="\n")
    return good
