// fsdp.cu: the 2026 handout's sections 7 to 9. FSDP, its accounting, the calculations, the 8.1B
// step.
#include "cs336.h"

// -------------------------------------------------------------------------------------------------
// FSDP (Zhao et al., 2023; ZeRO-3; the 2026 handout): the weights are sharded, too. A rank keeps
// 1/N of each unit (the embedding, a block, the head) with its gradients and moments, in fp32 or,
// in pure bf16, in bf16. Norms are replicated.
//   forward    compute unit i, gather unit i + 1 beside it
//   backward   compute unit i, gather unit i - 1 and reduce-scatter unit i + 1's gradients beside
//   it
// Whole units lie in two buffers by turns, unit i in number i % 2; gradients in two more. So the
// gather of unit i + 1 overwrites unit i - 1. It starts when the compute stream has finished that
// unit, since collectives start behind what is queued there.

// what is gathered at once; its elements are those of the model's arena from begin
struct FsdpUnit {
    int64_t begin = 0, end = 0;
    int64_t part = 0;           // elements that each rank keeps; the last rank's end in padding
    int64_t offset = 0;         // of the own part, in Fsdp::shard
    Tensor weights, gradients;  // whole, [world * part], while the unit has its buffer
    Tensor gradient;            // the own part, averaged over the ranks; null until there is one
    // Its tensors that have a gradient, by their first elements.
    std::multimap<int64_t, Tensor> slots;
};
struct FsdpWait {  // of the compute stream, for a collective and what runs behind it
    int unit;      // -1: the norms
    WorkPtr work;
    Mark asked, got;
};
struct Fsdp {
    Communicator c;
    std::vector<Parameter> parameters;
    std::vector<FsdpUnit> units;
    // the own part of each unit, then the replicated weights
    ParameterGroup shard;
    std::map<std::string, int64_t> replicated_at;  // by name: its first element there
    int64_t replicated = 0;                        // where those begin
    // the own parts of all units but the first are (see FastWays)
    bool split = false;
    // of this backward; of all since the last step, or null
    Tensor replicated_gradients, replicated_sum;
    int in_buffer[2] = {-1, -1};  // the unit whose weights each buffer has
    WorkPtr gathers[2];
    std::vector<FsdpWait> waits;     // of this step
    bool steps_in_backward = false;  // see begin_step
    // the unit that backward has come to; before it, a number above the last
    int reached = 0;
    int reducing = -1;  // the unit whose reduce-scatter is under way
    WorkPtr reduce;
    Tensor reduced;  // the sum that it gives, of the own part
};
static Tensor own_part(const Fsdp& f, const FsdpUnit& u, const Tensor& whole) {
    return view(whole, f.c.rank * u.part, {u.part});
}

// Lays the weights out over the ranks, not set. The shard has weight_dtype(). Where that is fp32,
// compute_dtype is the one in which weights are sent and computed with, but for unit 0, the
// embedding, a look-up only, which stays fp32 as under autocast. Gradients are as the shard.
static std::unique_ptr<Fsdp> fully_shard(const Communicator& c,
                                         const std::vector<Parameter>& parameters,
                                         DType compute_dtype) {
    auto made = std::make_unique<Fsdp>();
    Fsdp& f = *made;
    f.c = c, f.parameters = parameters;
    const DType kept = weight_dtype();
    if (kept != F32) { compute_dtype = kept; }
    for (const Parameter& p : parameters) {
        if (p.unit < 0) { continue; }
        if (p.unit >= (int)f.units.size()) { f.units.resize(p.unit + 1); }
        FsdpUnit& u = f.units[p.unit];
        u.begin = u.end == 0 ? p.offset : std::min(u.begin, p.offset);
        u.end = std::max(u.end, p.offset + count(p.shape));
    }
    auto dtype_of = [&](size_t i) { return i == 0 ? kept : compute_dtype; };
    int64_t weight_bytes[2] = {0, 0}, gradient_bytes[2] = {0, 0};
    for (size_t i = 0; i < f.units.size(); i++) {
        FsdpUnit& u = f.units[i];
        u.part = aligned((u.end - u.begin + c.world - 1) / c.world);
        u.offset = f.replicated;
        f.replicated += u.part;
        int64_t n = c.world * u.part;
        weight_bytes[i % 2] = std::max<int64_t>(weight_bytes[i % 2], n * size_of(dtype_of(i)));
        gradient_bytes[i % 2] = std::max<int64_t>(gradient_bytes[i % 2], n * size_of(kept));
    }
    int64_t end = f.replicated;
    for (const Parameter& p : parameters) {
        if (p.unit < 0) { f.replicated_at[p.name] = end, end = aligned(end + count(p.shape)); }
    }
    allocate_shared(c, [&] { f.shard.weights = zeros({end}, kept, PARAMETERS); });
    f.replicated_gradients = zeros({end - f.replicated}, kept, GRADIENTS);
    for (size_t buffer = 0; buffer < 2; buffer++) {
        Tensor weights, gradients = empty({gradient_bytes[buffer]}, U8, GRADIENTS);
        allocate_shared(c, [&] { weights = empty({weight_bytes[buffer]}, U8, WEIGHT_COPIES); });
        for (size_t i = buffer; i < f.units.size(); i += 2) {
            FsdpUnit& u = f.units[i];
            u.weights = weights, u.gradients = gradients;
            u.weights.dtype = dtype_of(i), u.gradients.dtype = kept;
            u.weights.shape = u.gradients.shape = {c.world * u.part};
        }
    }
    f.reached = (int)f.units.size();
    return made;
}
static Tensor place(Fsdp& f, const Parameter& p, const Shape& shape) {  // see Place
    Tensor whole, gradients;
    int64_t at;
    if (p.unit < 0) {
        whole = view(f.shard.weights, f.replicated, f.replicated_gradients.shape);
        gradients = f.replicated_gradients, at = f.replicated_at.at(p.name) - f.replicated;
    } else {
        const FsdpUnit& u = f.units[p.unit];
        whole = u.weights, gradients = u.gradients, at = p.offset - u.begin;
    }
    Tensor t = require_gradient(view(whole, at, shape));
    t.gradient->is_parameter = true;
    t.gradient->value = view(gradients, at, shape);
    if (p.unit >= 0) { f.units[p.unit].slots.emplace(at, t); }
    return t;
}

static void start_gather(Fsdp& f, int i) {
    const FsdpUnit& u = f.units[i];
    WorkPtr& gather = f.gathers[i % 2];
    Tensor own = view(f.shard.weights, u.offset, {u.part});
    if (f.split && i > 0) { own = upper_halves(own); }
    bool casts = u.weights.dtype != own.dtype;
    if (casts) { copy_or_add(own_part(f, u, u.weights), own, false); }
    gather = all_gather(f.c, u.weights, casts ? Tensor() : own);
    f.in_buffer[i % 2] = i;
}
static void wait_for(Fsdp& f, int unit, const WorkPtr& work) {
    Mark asked = mark();
    wait(f.c, work);
    f.waits.push_back({unit, work, asked, mark()});
}
// Forward goes up to the last unit, then backward down. A checkpoint in between runs units up to
// the one that backward has come to.
static void pre_forward(Fsdp& f, int i) {
    Range range("gather");
    if (f.in_buffer[i % 2] != i) { start_gather(f, i); }
    wait_for(f, i, f.gathers[i % 2]);
    if (i + 1 == (int)f.units.size()) { f.reached = i; }
    const int next = i + 1 < f.reached ? i + 1 : i - 1;
    // backward needs no embedding
    if (next > 0 && f.in_buffer[next % 2] != next) { start_gather(f, next); }
}

static void finish_reduce(Fsdp& f) {
    if (f.reducing < 0) { return; }
    wait_for(f, f.reducing, f.reduce);
    Tensor& sum = f.units[f.reducing].gradient;
    if (sum) {
        copy_or_add(sum, f.reduced, true);
    } else if (!f.steps_in_backward) {
        sum = f.reduced;
    }
    f.reduced = Tensor(), f.reducing = -1;
}
// What has no gradient counts as zero: padding, and parameters that this rank's loss did not depend
// on.
static void zero_the_rest(FsdpUnit& u) {
    int64_t end = 0;
    auto zero_up_to = [&](int64_t begin) {
        if (begin > end) { fill_zero(view(u.gradients, end, {begin - end})); }
    };
    for (const auto& [begin, t] : u.slots) {
        if (!t.gradient->filled) { continue; }
        zero_up_to(begin);
        end = begin + t.size();
        t.gradient->filled = false;  // the next backward overwrites it
    }
    zero_up_to(u.gradients.size());
}
// Each gradient is a unit's, or that of all replicated weights.
static void update(Fsdp& f, std::vector<FlatGradient> gradients, float gradient_scale) {
    NoGrad no_grad;
    ParameterGroup& g = f.shard;
    auto plain = std::partition(gradients.begin(), gradients.end(), [&](const FlatGradient& one) {
        return f.split && one.offset > 0 && one.offset < f.replicated;  // of units 1 and up
    });
    adamw_update(g.weights, {plain, gradients.end()}, g.m, g.v, g.adamw, g.step, gradient_scale);
    adamw_update(g.weights, {gradients.begin(), plain}, g.m, g.v, g.adamw, g.step, gradient_scale,
                 f.split);
}
static void begin_update(Fsdp& f) {
    ParameterGroup& g = f.shard;
    for (Tensor* moment : {&g.m, &g.v}) {
        if (!*moment) { *moment = zeros(g.weights.shape, g.weights.dtype, OPTIMIZER); }
    }
    g.step++;
}
static void start_reduce(Fsdp& f, int i) {
    Range range("reduce");
    finish_reduce(f);  // of unit i + 1: backward now writes unit i - 1's gradients over them
    FsdpUnit& u = f.units[i];
    zero_the_rest(u);
    f.reduced = f.steps_in_backward ? own_part(f, u, u.gradients)
                                    : empty({u.part}, u.gradients.dtype, GRADIENTS);
    f.reduce = reduce_scatter(f.c, u.gradients, AVERAGE, f.reduced);
    f.reducing = i;
    if (!f.steps_in_backward) { return; }
    run_behind(f.c, f.reduce, [&f, &u] { update(f, {{f.reduced, u.offset}}, 1); });
}
static void pre_backward(Fsdp& f, int i) {
    while (f.reached > i) { start_reduce(f, f.reached--); }
    // a look-up's backward needs no weights, only the buffer for gradients
    if (i > 0) { pre_forward(f, i); }
}
// to a model that has been placed
static void add_hooks(Model& model, Fsdp& f) {
    // so that slots keep their gradients
    model.weights = f.shard.weights, model.gradients = f.replicated_gradients;
    model.pre_forward = [&f](int unit) { pre_forward(f, unit); };
    model.pre_backward = [&f](int unit) { pre_backward(f, unit); };
}
// A Transformer whose weights are f's, which has to outlive it.
static Model sharded_model(const ModelConfig& c, Fsdp& f) {
    Model model = lay_out_model(c);
    place_weights(model,
                  [&](const Parameter& p, const Shape& shape) { return place(f, p, shape); });
    add_hooks(model, f);
    return model;
}

// the weights have changed
static void forget_gathered(Fsdp& f) { f.in_buffer[0] = f.in_buffer[1] = -1; }
static void drop_gradients(Fsdp& f) {
    for (FsdpUnit& u : f.units) { u.gradient = Tensor(); }
    f.replicated_sum = Tensor();
}
// Before a step's first forward: the weights have changed. steps_in_backward: each unit takes its
// AdamW step as soon as its gradient is an average, beside the rest of backward, and its gradient
// is not kept. That is for steps of one backward whose gradients need no norm first, for clipping
// or for fp16's loss scale. optimizer_step still follows: it steps the norms.
static void begin_step(Fsdp& f, bool steps_in_backward = false) {
    f.waits.clear(), drop_gradients(f), forget_gathered(f);
    f.steps_in_backward = steps_in_backward;
    if (steps_in_backward) { begin_update(f); }
}
// After each backward: then the own gradients are averages, or sums of averages.
static void finish_backward(Fsdp& f) {
    Range range("synchronize gradients");
    while (f.reached >= 0) { start_reduce(f, f.reached--); }
    finish_reduce(f);
    f.reached = (int)f.units.size();
    if (f.replicated_gradients.size() == 0) { return; }
    wait_for(f, -1, all_reduce(f.c, f.replicated_gradients, AVERAGE));
    const bool first = !f.replicated_sum;
    if (first) {
        f.replicated_sum = empty(f.replicated_gradients.shape, f.shard.weights.dtype, GRADIENTS);
    }
    copy_or_add(f.replicated_sum, f.replicated_gradients, !first);
    fill_zero(f.replicated_gradients);  // the next loss may not depend on all of them
}

static std::vector<FlatGradient> gradients_of(const Fsdp& f) {
    std::vector<FlatGradient> all;
    for (const FsdpUnit& u : f.units) {
        if (u.gradient) { all.push_back({u.gradient, u.offset}); }
    }
    if (f.replicated_sum) { all.push_back({f.replicated_sum, f.replicated}); }
    return all;
}
static double gradient_norm(const Fsdp& f) {
    std::vector<FlatGradient> gradients = gradients_of(f);
    if (f.c.rank > 0 && f.replicated_sum) { gradients.pop_back(); }  // they count once
    return norm_over_ranks(f.c, square_sum(gradients));
}
static double optimizer_step(Fsdp& f, LossScaler& scaler, double max_norm) {
    double norm = guarded_step(
        scaler, max_norm, [&] { return gradient_norm(f); },
        [&](float gradient_scale) {
            if (!f.steps_in_backward) { begin_update(f); }
            update(f, gradients_of(f), gradient_scale);
        });
    drop_gradients(f), forget_gathered(f);
    return norm;
}

// Every parameter in turn, whole, in the shard's dtype. With `write`, what `see` leaves there is
// cut up again. Every rank has to call it.
static void visit_whole(Fsdp& f, bool write,
                        const std::function<void(const Parameter& p, const Tensor& whole)>& see) {
    for (int i = -1; i < (int)f.units.size(); i++) {
        Tensor own = f.shard.weights, whole = own;
        int64_t begin = 0;
        const bool is_split = f.split && i > 0;
        if (i >= 0) {
            const FsdpUnit& u = f.units[i];
            own = view(own, u.offset, {u.part}),
            whole = empty({f.c.world * u.part}, own.dtype, WORKSPACE);
            begin = u.begin;
            if (is_split) { fast_ways.split(own, false); }
            wait(f.c, all_gather(f.c, whole, own));
        }
        for (const Parameter& p : f.parameters) {
            if (p.unit == i) {
                see(p, view(whole, i < 0 ? f.replicated_at.at(p.name) : p.offset - begin, p.shape));
            }
        }
        if (i >= 0 && write) { copy(own, own_part(f, f.units[i], whole)); }
        if (is_split) { fast_ways.split(own, true); }
    }
    if (write) { forget_gathered(f); }
}
static void init_weights(Fsdp& f, uint64_t seed) {
    visit_whole(f, true,
                [&](const Parameter& p, const Tensor& whole) { init_weight(whole, p.name, seed); });
}
// Splits the own parts, if then a gather needs no cast before it.
static void split_weights(Fsdp& f) {
    f.split = can_split(f.shard.weights.dtype, f.units[1].weights.dtype);
    for (size_t i = 1; f.split && i < f.units.size(); i++) {
        fast_ways.split(view(f.shard.weights, f.units[i].offset, {f.units[i].part}), true);
    }
}

static Trainer fsdp_trainer(const Communicator& c, const ModelConfig& config, uint64_t seed,
                            bool steps_in_backward = false, const AdamW& adamw = {}) {
    Trainer t;
    t.c = c;
    t.f = fully_shard(c, lay_out_model(config).parameters, matmul_dtype());
    Fsdp& f = *t.f;
    t.model = sharded_model(config, f);
    init_weights(f, seed);
    f.shard.adamw = adamw;
    split_weights(f);
    t.sums_gradients = true;
    t.before_step = [&f, steps_in_backward] { begin_step(f, steps_in_backward); };
    t.after_backward = [&f] { finish_backward(f); };
    t.step_optimizer = [&f](Trainer& t) { return optimizer_step(f, t.scaler, t.max_norm); };
    t.add_communication = [&f](const Trainer& t, StepNumbers& n) {
        for (const FsdpWait& w : f.waits) {
            size_t i = t.marks.size() - 2;
            while (i > 0 && ms_of(w.asked, t.marks[i].second) < 0) { i--; }
            const double waited = ms_of(w.got, w.asked);
            n[t.marks[i].first] -= waited, n[EXPOSED] += waited;
        }
    };
    return t;
}

// -------------------------------------------------------------------------------------------------
// fsdp: N ranks against one process that sees the whole batch, as in ddp.cu, in all precisions and
// modes.

constexpr int STEPS = 3;

struct FsdpCase {
    Precision precision;
    Mode mode;
    const char* checkpoint = "none";
    int batches = 1;  // backwards per step, whose gradients add up
};
static const std::vector<FsdpCase> fsdp_cases = {
    {FP32, EAGER},           {FP32, FUSED},
    {FP32, FLASH},           {PREC_BF16, EAGER},
    {PREC_BF16, FUSED},      {PREC_FP16, EAGER},
    {PREC_FP16, FUSED},      {FP32, FUSED, "1"},
    {FP32, FUSED, "2"},      {FP32, FUSED, "ffn"},
    {FP32, FUSED, "nested"}, {FP32, FUSED, "1", 2},
    {PREC_PURE_BF16, FUSED}, {PREC_PURE_BF16, FUSED, "1"}};
static WeightsCheck check_case(const Communicator& c, const FsdpCase& k, uint64_t seed) {
    context.precision = k.precision, context.mode = k.mode,
    context.checkpoint = checkpointing_from(k.checkpoint);
    WeightsCheck check{std::string("FSDP, ") + name_of(k.precision),
                       strprintf("mode %s, checkpoint %s, %s per step", name_of(k.mode),
                                 k.checkpoint, counted(k.batches, "backward").c_str())};
    const ModelConfig config = {"lm", 64, 96, 3, 4, VOCABULARY};
    const bool pure = k.precision == PREC_PURE_BF16;
    AdamW adamw;
    // in bf16 a weight is rounded, so a small step may be none
    adamw.lr = pure ? 0.02f : 1e-3f;
    // else a gradient that is rounding alone moves its weight by lr
    adamw.eps = k.precision == FP32 ? 1e-5f : 1e-3f;
    Trainer ours = fsdp_trainer(c, config, seed, false, adamw), whole;
    whole.model = make_model(config), whole.adamw = adamw;
    init_weights(whole.model, seed), make_gradients(whole.model);
    ours.scaler.scale = whole.scaler.scale = 1024;  // a power of two: unscaling is exact
    // Pure bf16: rounding turns last bits (2^-7 of a weight or less) and goes on from there. In 20
    // runs with 2 and 3 ranks all weights were within these bounds.
    const double atol = pure                  ? 2e-3
                        : k.precision == FP32 ? 1e-6
                                              : 1e-4,
                 rtol = pure ? 1.0 / 64 : 1e-4;
    Fsdp& f = *ours.f;
    for (int step = 0; step < STEPS; step++) {
        train_both(c, ours, whole, seed + step, k.batches);
        visit_whole(f, false, [&](const Parameter& p, const Tensor& got) {
            compare(check, got, view(whole.model.weights, p.offset, p.shape), atol, rtol);
        });
    }
    const Tensor norms = view(f.shard.weights, f.replicated, f.replicated_gradients.shape);
    check.match = same_bits_everywhere(c, norms) && check.match;
    return check;
}

int cmd_fsdp(const Options& o) {
    return run_ranks(o, [&](const Communicator& c) {
        std::vector<WeightsCheck> checks;
        for (const FsdpCase& k : fsdp_cases) {
            if (k.mode == FLASH && !fastest_flash(context.device, F32, 16)) { continue; }
            checks.push_back(check_case(c, k, o.seed));
        }
        print_checks(
            c,
            strprintf("fsdp: weights after each of %d steps; World size: %d, Batch size: %d; "
                      "Transformer: d_model 64, 3 layers; AdamW with lr 0.001, in pure_bf16 0.02",
                      STEPS, c.world, ROWS * c.world),
            checks,
            strprintf("FSDP on %s and of one process with the whole batch",
                      counted(c.world, "rank").c_str()));
    });
}

// -------------------------------------------------------------------------------------------------
// fsdp_accounting: (a) what a rank holds at its peak with plain data parallel training, with the
// optimizer sharded, and with FSDP; (b) how long each unit's gather took, and how long the compute
// stream waited for it.

// early: see begin_step's steps_in_backward
enum Way { PLAIN_DDP, SHARDED_OPTIMIZER, FULLY_SHARDED, EARLY_ADAMW };
struct FsdpRun : WayRun {
    std::vector<double> gather{}, wait{};  // of each unit in forward, ms, in the mean step
};

// Adds the last of `steps` steps. Forward comes first and asks for each unit once, in order.
static void add_unit_times(const Fsdp& f, int steps, FsdpRun& r) {
    r.gather.resize(f.units.size()), r.wait.resize(f.units.size());
    for (size_t i = 0; i < f.units.size(); i++) {
        const FsdpWait& w = f.waits[i];
        r.gather[i] += ms_of(w.work->end, w.work->begin) / steps;
        r.wait[i] += ms_of(w.got, w.asked) / steps;
    }
}

static void print_tables(const std::string& caption, const std::vector<FsdpRun>& runs) {
    Table memory{caption +
                     "; (a): rank 0 at its peak, MiB; early AdamW: each unit's step in backward",
                 {"Way", "peak", "predicted", "parameters", "copies", "gradients", "optimizer",
                  "activations", "step (ms)"}};
    for (const FsdpRun& r : runs) {
        auto cell = [&](double bytes) { return r.oom ? "" : strprintf("%.1f", mib_of(bytes)); };
        const size_t* by = r.use.peak_by;
        memory.row(
            r.name, r.oom ? oom_cell(r.oom) : cell(r.use.peak),
            strprintf("%.1f", mib_of(r.predicted)), cell(by[PARAMETERS]), cell(by[WEIGHT_COPIES]),
            cell(by[GRADIENTS]), cell(by[OPTIMIZER]),
            cell(r.use.peak - by[PARAMETERS] - by[WEIGHT_COPIES] - by[GRADIENTS] - by[OPTIMIZER]),
            r.oom ? NAN : r.ms[TOTAL].mean);
    }
    print(memory);
    const std::vector<double>&gather = runs[FULLY_SHARDED].gather, &wait = runs[FULLY_SHARDED].wait;
    Table times{"(b): FSDP's all-gathers in forward, and its waits for them, ms; rank 0, mean step",
                {"unit", "gather", "wait"}};
    for (size_t i = 0; i < gather.size(); i++) {
        times.row(i == 0                   ? "embedding"
                  : i + 1 == gather.size() ? "lm_head"
                                           : strprintf("layer %zu", i - 1),
                  strprintf("%.3f", gather[i]), strprintf("%.3f", wait[i]));
    }
    if (!gather.empty()) { print(times); }
}

// By what FSDP's peak differs from the expected one, the largest part first. saved: the bytes that
// it should save of weights, and of gradients; of moments.
static std::string causes(const MemoryUse& other, const MemoryUse& fsdp, double saved,
                          double moments) {
    std::multimap<double, std::string> parts;
    for (Category k : {PARAMETERS, GRADIENTS, OPTIMIZER, WEIGHT_COPIES, ACTIVATIONS}) {
        const double expected = k < OPTIMIZER ? saved : k == OPTIMIZER ? moments : 0;
        const double mib = mib_of((double)fsdp.peak_by[k] - (double)other.peak_by[k] + expected);
        if (std::fabs(mib) >= 0.05) {
            parts.insert({-std::fabs(mib), strprintf("%s %+.1f", name_of(k), mib)});
        }
    }
    std::vector<std::string> all;
    for (const auto& part : parts) { all.push_back(part.second); }
    return list_of(all);
}

// runs: DDP, sharded optimizer, FSDP, ...; bytes: of a weight.
static void answer_fsdp_accounting(const std::vector<FsdpRun>& runs, int world, double psi,
                                   int bytes) {
    const double N = world, full = 4 * bytes * psi, split = (full + full / N) / 2, part = full / N;
    answer("a",
           "FSDP should save %.1f MiB against DDP and %.1f MiB against a sharded optimizer. "
           "Weights, gradients and two moments take %d Psi bytes with DDP, (%d + %d/N) Psi with "
           "the sharded optimizer and %d Psi/N with FSDP (Psi = %.4g, N = %d).",
           mib_of(full - part), mib_of(split - part), 4 * bytes, 2 * bytes, 2 * bytes, 4 * bytes,
           psi, world);
    const FsdpRun& fsdp = runs[FULLY_SHARDED];
    if (fsdp.oom) { return; }
    for (int way : {PLAIN_DDP, SHARDED_OPTIMIZER}) {
        const char* other = way == PLAIN_DDP ? "DDP" : "the sharded optimizer";
        if (runs[way].oom) {
            answer("a", "%s did not fit.", runs[way].name.c_str());
            continue;
        }
        const double saved = mib_of((double)runs[way].use.peak - (double)fsdp.use.peak);
        const double more = saved - mib_of((way == PLAIN_DDP ? full : split) - part);
        answer("a", "FSDP takes %.1f MiB %s than %s. It takes %.1f MiB %s than expected (MiB: %s).",
               std::fabs(saved), saved < 0 ? "more" : "less", other, std::fabs(more),
               more < 0 ? "more" : "less",
               causes(runs[way].use, fsdp.use, (full - part) / 4,
                      way == PLAIN_DDP ? (full - part) / 2 : 0)
                   .c_str());
    }
    double gathers = 0, waits = 0;  // of those in forward that have a block to hide under
    for (size_t u = 2; u < fsdp.gather.size(); u++) {
        gathers += fsdp.gather[u], waits += fsdp.wait[u];
    }
    answer("b",
           "%s in time for forward: those after layer 0 take %.3f ms, and forward waits %.3f ms "
           "for them. Those of the embedding and of layer 0 have no block to hide under: it waits "
           "%.3f and %.3f ms.",
           waits < 0.05 * gathers ? "The gathers come" : "Not all gathers come", gathers, waits,
           fsdp.wait[0], fsdp.wait[1]);
}

int cmd_fsdp_accounting(const Options& typed) {
    return run_ranks(typed, [&](const Communicator& c) {
        Options o = typed;
        const ModelConfig config = choose_step(o, c);
        auto plain = [&] { return random_model(config, o.seed); };
        const std::vector<std::pair<const char*, MakeTrainer>> ways = {
            {"DDP", [&](auto& c) { return data_parallel_trainer(c, plain(), OVERLAPPED, 0); }},
            {"sharded optimizer", [&](auto& c) { return sharded_trainer(c, plain(), ZERO1); }},
            {"FSDP", [&](auto& c) { return fsdp_trainer(c, config, o.seed); }},
            {"FSDP, early AdamW", [&](auto& c) { return fsdp_trainer(c, config, o.seed, true); }}};
        std::vector<FsdpRun> runs;
        std::vector<Trace> traces;
        for (const std::pair<const char*, MakeTrainer>& way : ways) {
            const char* name = way.first;
            // its step needs a norm first
            if (runs.size() == EARLY_ADAMW && context.precision == PREC_FP16) { break; }
            FsdpRun& r = runs.emplace_back(FsdpRun{{name}});
            run_way(r, c, o, way.second, 1, [&](Trainer& t) {
                if (t.f && t.steps > o.warmup[0]) { add_unit_times(*t.f, o.steps, r); }
                trace_step(t, name, o, config, traces);
            });
        }
        if (!o.trace.empty()) { write_trace(o.trace, traces, caption_of(o, config, c), c); }
        if (c.rank == 0) { print_tables(caption_of(o, config, c), runs); }
        if (can_compare(c, {runs.begin(), runs.end()}, false)) {
            answer_fsdp_accounting(runs, c.world, parameters_of(config),
                                   (int)size_of(weight_dtype()));
        }
    });
}

// -------------------------------------------------------------------------------------------------
// Section 8 of the 2026 handout: how many devices work on one feed-forward layer before
// communication takes longer than the products. It is arithmetic alone; tests/test_fsdp.cpp runs
// the layer on simulated devices and counts.
//
//   y = (f(x W1) * (x W2)) W3      x [B, D], W1 and W2 [D, D_FF], W3 [D_FF, D], 2 bytes per element
//
// Forward has three products of 2 B D D_FF FLOPs: x1 = x W1, x2 = x W2, z W3. Backward has two for
// each of them. A ring all-gather or reduce-scatter of S bytes sends (N - 1) / N S bytes out of
// each device, an all-reduce, being both, twice that.

struct LayerSizes {
    double B, D, F, C, W;  // tokens, d_model, d_ff, FLOP/s of a device, bytes/s out of it
};
struct PassCost {  // of one device
    const char* what;
    double flops, communication;  // seconds
    double most;                  // devices, up to which computation takes as long
};
// Backward, forward. An all-reduce of all gradients, data parallelism's, sends what the gathers and
// reduce-scatters of FSDP's backward send.
static std::vector<PassCost> fsdp_costs(const LayerSizes& l, double N) {
    auto [B, D, F, C, W] = l;
    return {{"Backward", 12 * B * D * F / N, 12 * D * F * (N - 1) / N / W, 1 + B * W / C},
            {"Forward", 6 * B * D * F / N, 6 * D * F * (N - 1) / N / W, 1 + B * W / C}};
}
static std::vector<PassCost> tp_costs(const LayerSizes& l, double N) {
    auto [B, D, F, C, W] = l;
    return {{"Backward", 12 * B * D * F / N, 4 * B * D * (N - 1) / N / W, 1 + 3 * F * W / C},
            {"Forward", 6 * B * D * F / N, 4 * B * D * (N - 1) / N / W, 1 + 3 * F * W / (2 * C)}};
}
// Forward: N devices along the FSDP axis, M along the TP axis. With a = B W / C and b = 3 D_FF W /
// (2 C) the axes' times are at most the products' up to 1 + a and 1 + b devices. In turn they add
// up: 3 D_FF N + 2 B M <= Q, and N M is largest where both terms are Q / 2; where that is less than
// one device along an axis, the axis goes.
static std::vector<PassCost> fsdp_tp_costs(const LayerSizes& l, double N, double M) {
    auto [B, D, F, C, W] = l;
    const double a = B * W / C, b = 3 * F * W / (2 * C), Q = 3 * B * F * W / C + 3 * F + 2 * B;
    const double flops = 6 * B * D * F / (N * M);
    const double fsdp = 6 * D * F * (N - 1) / (N * M) / W, tp = 4 * B * D * (M - 1) / (N * M) / W;
    const double in_turn = b < a / (a + 1) ? 1 + a : a < b / (b + 1) ? 1 + b : Q * Q / (24 * B * F);
    return {{"FSDP axis", flops, fsdp, 1 + a},
            {"TP axis", flops, tp, 1 + b},
            {"both, overlapped", flops, std::max(fsdp, tp), (1 + a) * (1 + b)},
            {"both, in turn", flops, fsdp + tp, in_turn}};
}

static LayerSizes sizes_of(const Options& o) {
    return {(double)o.tokens, (double)o.d_model, (double)o.d_ff, o.tflops * 1e12,
            o.bandwidth_gb * 1e9};
}
static void print_setting(const Options& o, const std::string& devices) {
    answer("",
           "%s: y = (f(x W1) * (x W2)) W3, products only, 2 bytes per element; B = %d tokens, D = "
           "%d, D_FF = %d, C = %g TFLOP/s, W = %g GB/s out of each device; %s; %s",
           o.command.c_str(), o.tokens, o.d_model, o.d_ff, o.tflops, o.bandwidth_gb,
           devices.c_str(), origin().c_str());
}
int cmd_alternate_ring_all_reduce(const Options& o) {
    double S = o.tensor_mb * 1e6, W = o.bandwidth_gb * 1e9, N = o.devices;
    double ms = 1e3 * (N - 1) * S / W, usual_ms = 1e3 * 2 * (N - 1) * S / (N * W);
    answer("",
           "alternate_ring_all_reduce: S = %g MB per device, N = %g, W = %g GB/s out of each "
           "device; %s",
           o.tensor_mb, N, o.bandwidth_gb, origin().c_str());
    answer("",
           "The alternative takes (N - 1) S / W = (%g - 1) x %g / %g = %.4g ms: in each of N - 1 "
           "steps each device sends a whole tensor of S bytes. That is N / 2 = %g times as long as "
           "reduce-scatter and all-gather: these send S / N bytes in each of 2 (N - 1) steps, 2 (N "
           "- 1) S / (N W) = 2 x (%g - 1) x %g / (%g x %g) = %.4g ms.",
           N, S, W, ms, N / 2, N, S, N, W, usual_ms);
    return 0;
}

// n: the handout's name of the number of devices; sends: what backward sends twice.
static int split_of_batch(const Options& o, const char* n, const std::vector<PassCost>& costs,
                          const char* sends) {
    const auto [B, D, F, C, W] = sizes_of(o);
    const double N = o.devices;
    print_setting(o, strprintf("N = %s = %g", n, N));
    for (const PassCost& p : costs) {
        const int k = &p == &costs[0] ? 12 : 6;  // of backward, of forward
        answer("a",
               "%s: %d B D D_FF / N = %d x %.7g x %.7g x %.7g / %g = %.4g FLOP, %d products of 2 "
               "(B / N) D D_FF.",
               p.what, k, k, B, D, F, N, p.flops, k / 2);
    }
    for (const PassCost& p : costs) {
        const int k = &p == &costs[0] ? 12 : 6;
        answer("b",
               "%s: %d D D_FF (N - 1) / (N W) = %d x %.7g x %.7g x (%g - 1) / (%g x %g) = %.4g ms. "
               "A ring sends (N - 1) / N of 6 D D_FF bytes out of each device %s.",
               p.what, k, k, D, F, N, N, W, 1e3 * p.communication,
               k == 12 ? sends : "once, to gather the weights");
    }
    answer("c",
           "N <= 1 + B W / C = 1 + %.7g x %g / %g = %.4g devices%s, from 12 D D_FF (N - 1) / W <= "
           "12 B D D_FF / C.",
           B, W, C, costs[0].most, costs.size() > 1 ? " in both passes" : "");
    return 0;
}
int cmd_data_parallel_calcs(const Options& o) {
    return split_of_batch(o, "N_DP", {fsdp_costs(sizes_of(o), o.devices)[0]},
                          "twice, to all-reduce the gradients");
}
int cmd_fsdp_calcs(const Options& o) {
    return split_of_batch(o, "N_FSDP", fsdp_costs(sizes_of(o), o.devices),
                          "twice, to gather the weights and to reduce-scatter the gradients");
}

int cmd_tp_calcs(const Options& o) {
    const LayerSizes l = sizes_of(o);
    const auto [B, D, F, C, W] = l;
    const double N = o.devices;
    const std::vector<PassCost> costs = tp_costs(l, N);
    const PassCost &backward = costs[0], &forward = costs[1];
    print_setting(o, strprintf("N_TP = %g", N));
    answer("a",
           "Device i holds W1(i), W2(i), W3(i) and saved x, x1(i), x2(i), z(i). Each device has "
           "all of dY, because y was all-reduced, so nothing is sent before the end: there one "
           "all-reduce adds up the dx(i).");
    sketch(
        "dz(i)  = dY W3(i)^T                          (B, D_FF / N_TP)\n"
        "dx2(i) = dz(i) * f(x1(i))                    (B, D_FF / N_TP)   * is element by element\n"
        "dx1(i) = dz(i) * f'(x1(i)) * x2(i)           (B, D_FF / N_TP)\n"
        "dW3(i) = z(i)^T dY                           (D_FF / N_TP, D)   the device's own rows\n"
        "dW2(i) = x^T dx2(i)                          (D, D_FF / N_TP)   the device's own columns\n"
        "dW1(i) = x^T dx1(i)                          (D, D_FF / N_TP)\n"
        "dx(i)  = dx1(i) W1(i)^T + dx2(i) W2(i)^T     (B, D)             a partial sum\n"
        "dx     = all-reduce(dx(i))                   (B, D)\n");
    answer("b",
           "Forward: 6 B D D_FF / N_TP = 6 x %.7g x %.7g x %.7g / %g = %.4g FLOP, three products "
           "of 2 B D (D_FF / N_TP). Backward: 12 B D D_FF / N_TP = %.4g FLOP, six products.",
           B, D, F, N, forward.flops, backward.flops);
    answer("c",
           "Forward: 4 B D (N_TP - 1) / (N_TP W) = 4 x %.7g x %.7g x (%g - 1) / (%g x %g) = %.4g "
           "ms, an all-reduce of y, 2 B D bytes. Backward: the same, an all-reduce of dx.",
           B, D, N, N, W, 1e3 * forward.communication);
    answer("d",
           "Forward: N_TP <= 1 + 3 D_FF W / (2 C) = 1 + 3 x %.7g x %g / (2 x %g) = %.4g devices, "
           "from 4 (N_TP - 1) / W <= 6 D_FF / C, where B and D cancel. Backward: N_TP <= 1 + 3 "
           "D_FF W / C = %.4g devices, with twice the products for the same bytes.",
           F, W, C, forward.most, backward.most);
    return 0;
}

int cmd_fsdp_tp_calcs(const Options& o) {
    const LayerSizes l = sizes_of(o);
    const auto [B, D, F, C, W] = l;
    const double N = o.fsdp, M = o.tp;
    const std::vector<PassCost> costs = fsdp_tp_costs(l, N, M);
    const PassCost &fsdp = costs[0], &tp = costs[1], &overlapped = costs[2];
    print_setting(o, strprintf("forward, N_FSDP = %g, N_TP = %g", N, M));
    answer("a",
           "6 B D D_FF / (N_FSDP N_TP) = 6 x %.7g x %.7g x %.7g / (%g x %g) = %.4g FLOP, three "
           "products of 2 (B / N_FSDP) D (D_FF / N_TP).",
           B, D, F, N, M, fsdp.flops);
    answer("b",
           "max(6 D D_FF (N_FSDP - 1), 4 B D (N_TP - 1)) / (N_FSDP N_TP W) = max(6 x %.7g x %.7g x "
           "(%g - 1), 4 x %.7g x %.7g x (%g - 1)) / (%g x %g x %g) = %.4g ms. FSDP's gather of a "
           "TP shard of the weights takes %.4g ms, TP's all-reduce of y %.4g ms.",
           D, F, N, B, D, M, N, M, W, 1e3 * overlapped.communication, 1e3 * fsdp.communication,
           1e3 * tp.communication);
    answer("c",
           "N_FSDP <= 1 + B W / C = 1 + %.7g x %g / %g = %.4g, where N_TP cancels. N_TP <= 1 + 3 "
           "D_FF W / (2 C) = 1 + 3 x %.7g x %g / (2 x %g) = %.4g, where N_FSDP cancels. So N <= "
           "%.4g x %.4g = %.4g devices.",
           B, W, C, fsdp.most, F, W, C, tp.most, fsdp.most, tp.most, overlapped.most);
    const double Q = 3 * B * F * W / C + 3 * F + 2 * B;
    answer(
        "d",
        "The times add: 3 D_FF N_FSDP + 2 B N_TP <= Q = 3 B D_FF W / C + 3 D_FF + 2 B = %.7g. "
        "N_FSDP N_TP is largest where both terms are Q / 2: N_FSDP = Q / (6 D_FF) = %.4g, N_TP = Q "
        "/ (4 B) = %.4g. So N <= Q^2 / (24 B D_FF) = %.7g^2 / (24 x %.7g x %.7g) = %.4g devices.",
        Q, Q / (6 * F), Q / (4 * B), Q, B, F, Q * Q / (24 * B * F));
    for (const PassCost& only : {fsdp, tp}) {
        if (costs[3].most != only.most) { continue; }
        answer("d",
               "The other axis then has less than one device. So there is only the %s, and N <= "
               "%.4g devices.",
               only.what, only.most);
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// The 2026 handout's leaderboard: one training step of an 8.1B model on 32,768 tokens, all in bf16.

struct LeaderboardRun : WayRun {
    int world = 1;
    double tokens = 0, flops = 0, first_loss = 0;
    double tflops() const { return flops / ms[TOTAL].mean / 1e9; }  // per second, of all ranks
};

// Without what runs again. Forward has a product for each weight and backward two; of attention's
// scores the causal half is needed, by two products in forward and five in backward.
static double step_flops(const ModelConfig& c, double B, double T) {
    const double C = c.d_model, F = c.d_ff, L = c.num_layers;
    // the embedding is a look-up
    const double weights = L * (4 * C * C + 3 * C * F) + c.vocab_size * C;
    return 6 * B * T * weights + 7 * B * T * T * C * L;
}

// A step takes its sequences one by one, a backward each.
static MakeTrainer trainer_of(const Options& o) {
    return [&o, config = configs_of(o)[0]](const Communicator& c) {
        if (c.world > 1) { return fsdp_trainer(c, config, o.seed); }
        Trainer t;
        t.model = random_model(config, o.seed);
        make_optimizer_state(t.model);
        if (o.batch_size > 1) { make_gradients(t.model); }  // in which they add up
        return t;
    };
}
// Sets what runs again in backward, context's recompute and checkpoint: the least that leaves each
// of `world` ranks a predicted peak of at most `room` bytes. What costs least comes first; in
// brackets per block and sequence of 8B on an H200. The norms and SwiGLU run again (0.8 ms); then
// feed-forwards (9 ms each); then whole blocks (24 ms more). The peak falls in a straight line with
// the number of those, so the ends of the line tell how many.
static void choose_what_runs_again(const Options& o, int world, double room) {
    auto peak = [&](bool recompute, const Checkpointing& checkpoint) {
        context.recompute = recompute, context.checkpoint = checkpoint;
        return (double)steps_peak(world, o, trainer_of(o), o.batch_size);
    };
    if (peak(false, {}) <= room) { return; }
    const double nothing = peak(true, {});
    if (nothing <= room) { return; }
    const double ffns = peak(true, {Checkpointing::BLOCKS, 0}),
                 blocks = peak(true, {Checkpointing::GROUPS, 1});
    const int L = configs_of(o)[0].num_layers;
    auto enough = [&](double from, double to) {
        return (int)std::ceil(L * (from - room) / (from - to));
    };
    if (ffns <= room) {
        context.checkpoint = {Checkpointing::FFN, enough(nothing, ffns)};
    } else if (blocks <= room) {
        context.checkpoint = {Checkpointing::BLOCKS, enough(ffns, blocks)};
    }
}

static void print_tables(const LeaderboardRun& r, const std::string& caption) {
    Table parts = step_table(caption, "Model");
    add_step(parts, r);
    print(parts);
    if (r.oom) { return; }
    Table table{
        "The same steps; head and loss, with the head's gradients, come between forward and "
        "backward",
        {"head and loss ms", "tokens/s", "TFLOP/s", "MFU %", "predicted MiB", "peak MiB",
         "first loss", "last loss"}};
    table.row(strprintf("%.2f", r.ms[HEAD_AND_LOSS].mean),
              strprintf("%.0f", r.tokens / r.ms[TOTAL].mean * 1e3), r.tflops(),
              percent_of_peak(r.tflops() / r.world, context.precision),
              strprintf("%.1f", mib_of(r.predicted)), strprintf("%.1f", mib_of(r.use.peak)),
              strprintf("%.5f", r.first_loss), strprintf("%.5f", r.loss));
    print(table);
}
static void answer_leaderboard(const LeaderboardRun& r) {
    answer("",
           "A step of %s on %s takes %.1f ms (mean of %s): %.4g TFLOP/s. The peak is %.4g GiB per "
           "rank.",
           r.name.c_str(), counted(r.world, "rank").c_str(), r.ms[TOTAL].mean,
           counted(r.ms[TOTAL].n, "step").c_str(), r.tflops(), mib_of(r.use.peak) / 1024);
}

static void leaderboard(Options o, const Communicator& c) {
    const ModelConfig config = choose_step(o, c);
    if (o.quick && !o.has("batch_size")) { o.batch_size = c.world; }
    if (o.batch_size % c.world != 0) {
        usage_error("--batch_size: got %d, takes a multiple of %d, the number of ranks",
                    o.batch_size, c.world);
    }
    if (context.mode == EAGER || context.precision == PREC_FP16) {
        usage_error("--mode %s, --precision %s: takes mode fused or flash, and not fp16",
                    name_of(context.mode), name_of(context.precision));
    }
    context.head_chunk = 2048;  // rows of the logits that the loss makes at a time
    // so that events can stand between the parts; a step's kernels hide the launches
    context.each_launch = true;
    LeaderboardRun r{{config.name}};
    r.world = c.world, r.tokens = (double)o.batch_size * o.context_length;
    r.flops = step_flops(config, o.batch_size, o.context_length);
    o.batch_size /= c.world;
    // A thirtieth of what a step needs is left for NCCL, cuBLAS and the gaps between buffers.
    if (!o.has("checkpoint")) {
        choose_what_runs_again(o, c.world, room_of_each_rank(c) * 30.0 / 31);
    }
    run_way(r, c, o, trainer_of(o), o.batch_size, [&](Trainer& t) {
        if (t.steps == 1) { r.first_loss = mean_over_ranks(c, t.loss); }
        if (t.steps > 0) { return; }
        t.model.pre_forward = [&t, head = config.num_layers + 1,
                               gather = t.model.pre_forward](int unit) {
            if (unit == head) { t.marks.push_back({HEAD_AND_LOSS, mark()}); }
            if (gather) { gather(unit); }
        };
    });
    if (c.rank == 0) {
        print_tables(
            r,
            caption_of(o, config, c) +
                strprintf(
                    "; causal; a sequence per backward; %.4g FLOP per step without what runs again",
                    r.flops));
    }
    if (r.oom) { fail("no step ran: each rank needs %.1f GiB", mib_of(r.oom) / 1024); }
    if (c.rank == 0) { answer_leaderboard(r); }
}
int cmd_leaderboard(const Options& typed) {
    Options o = typed;
    if (!o.has("nproc")) {
        o.nproc = o.device != "cpu" && why_not("nccl", CUDA, 2).empty() ? 2 : 1;
    }
    if (is_rank() || o.nproc > 1 || o.has("backend")) {
        return run_ranks(o, [&](const Communicator& c) { leaderboard(o, c); });
    }
    context.device = choose_device(o.device);
    leaderboard(o, {0, 1, 1, "none", nullptr});
    return 0;
}
