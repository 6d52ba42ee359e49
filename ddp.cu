// ddp.cu: sections 2.2 to 3. Data parallel training in four ways, the sharded optimizer, and FSDP.
#include "cs336.h"

#include <algorithm>

// ---------------------------------------------------------------------------------------------------------------------
// Data parallel. The four ways differ in two things only: how the flat gradients are cut into buckets, and whether a
// bucket goes as soon as backward has finished it or after all of backward.
//   naive       a bucket per tensor, afterwards       overlapped  a bucket per tensor, at once
//   flat        one bucket, afterwards                bucketed    as many tensors as fit the cap, at once
// The gradients lie in one buffer, in the order in which backward finishes them. So buckets are ranges of this buffer,
// and nothing is copied.

const char* name_of(Strategy s) {
    static const char* const names[] = {"no sync", "naive", "flat", "overlapped", "bucketed"};
    return names[s];
}

static void cut_into_buckets(DataParallel& d, double bucket_mb) {
    double cap = d.strategy == FLAT ? INFINITY : d.strategy == BUCKETED ? bucket_mb * 1e6 : 0;
    double bytes = 0;
    for (const Parameter& p : d.parameters) {
        double more = (double)count(p.shape) * size_of(d.gradients.dtype);
        if (d.buckets.empty() || bytes + more > cap) {
            d.buckets.push_back({p.offset, 0, 0, 0});
            bytes = 0;
        }
        bytes += more;
        d.buckets.back().end = p.offset + count(p.shape);
        d.buckets.back().parameters++;
        d.bucket_of.push_back((int)d.buckets.size() - 1);
    }
}

static void start_next_bucket(DataParallel& d) {
    const Bucket& b = d.buckets[d.next++];
    d.works.push_back(all_reduce(d.c, view(d.gradients, b.begin, {b.end - b.begin}), AVERAGE));
}

// Backward has finished the gradient at [begin, end), of one parameter, or of several that are one product.
static void gradient_is_ready(DataParallel& d, int64_t begin, int64_t end) {
    for (size_t i = 0; i < d.parameters.size(); i++) {
        if (d.parameters[i].offset < begin || d.parameters[i].offset >= end || d.is_ready[i]) { continue; }
        d.is_ready[i] = true;
        d.buckets[d.bucket_of[i]].missing--;
    }
    bool at_once = d.strategy == OVERLAPPED || d.strategy == BUCKETED;
    while (at_once && d.next < d.buckets.size() && d.buckets[d.next].missing == 0) { start_next_bucket(d); }
}

// A collective between different tensors would end in garbage, or abort inside Gloo.
static void check_same_parameters(const Communicator& c, const std::vector<Parameter>& parameters) {
    if (context.device == META) { return; }
    std::string mine;
    for (const Parameter& p : parameters) { mine += p.name + " " + to_string(p.shape) + "\n"; }
    std::string first = gather_text(c, mine)[0];
    if (mine == first) { return; }
    size_t i = 0, line = 0;
    for (; i < mine.size() && i < first.size() && mine[i] == first[i]; i++) {
        if (mine[i] == '\n') { line = i + 1; }
    }
    auto at = [&](const std::string& text) {
        return line < text.size() ? text.substr(line, text.find('\n', line) - line) : std::string("nothing");
    };
    fail("the models differ: where rank 0 has %s, rank %d has %s", at(first).c_str(), c.rank, at(mine).c_str());
}

std::unique_ptr<DataParallel> data_parallel(const Communicator& c, Strategy strategy, double bucket_mb,
                                            const Tensor& weights, const Tensor& gradients,
                                            const std::vector<Parameter>& parameters,
                                            const std::vector<Tensor>& slots) {
    check_same_parameters(c, parameters);
    wait(c, broadcast(c, weights, 0));
    drop_weight_copies(slots);
    auto made = std::make_unique<DataParallel>();
    DataParallel& d = *made;
    d.c = c, d.strategy = strategy, d.gradients = gradients, d.parameters = parameters, d.slots = slots;
    d.is_ready.resize(parameters.size());
    if (strategy == NO_SYNC) { return made; }
    cut_into_buckets(d, bucket_mb);
    for (const Tensor& t : slots) {
        int64_t begin = (t.gradient->value.data - gradients.data) / (int64_t)size_of(gradients.dtype);
        t.gradient->ready = [&d, begin, end = begin + t.size()] { gradient_is_ready(d, begin, end); };
    }
    return made;
}
DataParallel::~DataParallel() {
    for (const Tensor& t : slots) { t.gradient->ready = nullptr; }
}

void begin_step(DataParallel& d) {
    d.next = 0;
    d.works.clear();
    d.is_ready.assign(d.parameters.size(), false);
    for (Bucket& b : d.buckets) { b.missing = b.parameters; }
}

void finish_gradient_synchronization(DataParallel& d) {
    if (d.strategy == NO_SYNC) { return; }
    Range range("synchronize gradients");
    for (size_t i = 0; i < d.parameters.size(); i++) {  // this rank's loss did not depend on it: its part is zero
        if (d.is_ready[i]) { continue; }
        const Parameter& p = d.parameters[i];
        fill_zero(view(d.gradients, p.offset, p.shape));
        gradient_is_ready(d, p.offset, p.offset + count(p.shape));
        p.weight.gradient->filled = true;
    }
    while (d.next < d.buckets.size()) { start_next_bucket(d); }
    for (const WorkPtr& work : d.works) { wait(d.c, work); }
}

// ---------------------------------------------------------------------------------------------------------------------
// Section 3: the optimizer, sharded. AdamW keeps 8 bytes of state beside each weight's 4 and its gradient's 4. With N
// ranks, each rank keeps the state of 1/N of the elements only. Elements that each rank sends, of Psi parameters:
//   unsharded   all-reduce of the gradients                                  2 Psi (N-1)/N
//   broadcast   the same, and a broadcast of each shard of the weights       3 Psi (N-1)/N
//   ZeRO-1      reduce-scatter of the gradients, all-gather of the weights   2 Psi (N-1)/N

const char* name_of(Sharding s) {
    static const char* const names[] = {"unsharded", "sharded, broadcast", "sharded, ZeRO-1"};
    return names[s];
}

void add_parameter_group(Optimizer& optimizer, ParameterGroup group) {
    int64_t n = group.weights.size(), world = optimizer.c.world;
    group.bounds = {0};
    for (int64_t r = 1; r <= world; r++) { group.bounds.push_back(n * r / world); }
    optimizer.groups.push_back(group);
}

// PyTorch's SGD: g += wd p;  m = momentum m + g;  p -= lr m
static void sgd_update(const Tensor& p, const Tensor& g, const Tensor& m, const AdamW& a, float momentum) {
    scale_in_place(m, momentum);
    copy_or_add(m, g, true);
    if (a.weight_decay > 0) { copy_or_add(m, scale(p, a.weight_decay), true); }
    copy_or_add(p, scale(m, -a.lr), true);
}

void optimizer_step(Optimizer& o, float gradient_scale) {
    NoGrad no_grad;
    for (ParameterGroup& g : o.groups) {
        bool whole = o.sharding == UNSHARDED;
        int64_t begin = whole ? 0 : g.bounds[o.c.rank], n = (whole ? g.weights.size() : g.bounds[o.c.rank + 1]) - begin;
        if (o.sharding == ZERO1) { wait(o.c, reduce_scatter(o.c, g.gradients, g.bounds, AVERAGE)); }
        if (!g.m && n > 0) { g.m = zeros({n}, g.weights.dtype, OPTIMIZER); }
        if (!g.v && n > 0 && !g.sgd) { g.v = zeros({n}, g.weights.dtype, OPTIMIZER); }
        g.step++;
        if (n > 0) {
            Tensor p = view(g.weights, begin, {n}), dp = view(g.gradients, begin, {n});
            if (g.sgd) { scale_in_place(dp, gradient_scale), sgd_update(p, dp, g.m, g.adamw, g.momentum); }
            if (!g.sgd) { adamw_update(p, {{dp, 0}}, g.m, g.v, g.adamw, g.step, gradient_scale); }
        }
        std::vector<WorkPtr> works;
        if (o.sharding == ZERO1) { works.push_back(all_gather(o.c, g.weights, g.bounds)); }
        for (int r = 0; o.sharding == BROADCAST && r < o.c.world; r++) {
            Tensor shard = view(g.weights, g.bounds[r], {g.bounds[r + 1] - g.bounds[r]});
            if (shard.size() > 0) { works.push_back(broadcast(o.c, shard, r)); }
        }
        for (const WorkPtr& work : works) { wait(o.c, work); }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// FSDP (Zhao et al., 2023; ZeRO-3; the 2026 handout): the weights are sharded, too. A rank keeps
// 1/N of each unit (the embedding, a block, the head) with its gradients and moments, in fp32 or, in pure bf16, in
// bf16. Norms are replicated.
//   forward    compute unit i, gather unit i + 1 beside it
//   backward   compute unit i, gather unit i - 1 and reduce-scatter unit i + 1's gradients beside it
// Whole units lie in two buffers by turns, unit i in number i % 2; gradients in two more. So the gather of unit i + 1
// overwrites unit i - 1. It starts when the compute stream has finished that unit, since collectives start behind what
// is queued there.

static Tensor own_part(const Fsdp& f, const FsdpUnit& u, const Tensor& whole) {
    return view(whole, f.c.rank * u.part, {u.part});
}
static std::vector<int64_t> bounds_of(const Fsdp& f, const FsdpUnit& u) {
    std::vector<int64_t> bounds;
    for (int r = 0; r <= f.c.world; r++) { bounds.push_back(r * u.part); }
    return bounds;
}

std::unique_ptr<Fsdp> fully_shard(const Communicator& c, const std::vector<Parameter>& parameters,
                                  DType compute_dtype) {
    check_same_parameters(c, parameters);
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
    f.shard.weights = zeros({end}, kept, PARAMETERS);
    f.replicated_gradients = zeros({end - f.replicated}, kept, GRADIENTS);
    for (size_t buffer = 0; buffer < 2; buffer++) {
        Tensor weights = empty({weight_bytes[buffer]}, U8, WEIGHT_COPIES),
               gradients = empty({gradient_bytes[buffer]}, U8, GRADIENTS);
        for (size_t i = buffer; i < f.units.size(); i += 2) {
            FsdpUnit& u = f.units[i];
            u.weights = weights, u.gradients = gradients;
            u.weights.dtype = dtype_of(i), u.gradients.dtype = kept;
            u.weights.shape = u.gradients.shape = {c.world * u.part};
        }
    }
    f.to_reduce = (int)f.units.size() - 1;
    return made;
}
Tensor place(Fsdp& f, const Parameter& p, const Shape& shape) {
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
    if (p.unit >= 0) {
        std::vector<FsdpSlot>& slots = f.units[p.unit].slots;
        auto after = [&](const FsdpSlot& s) { return s.begin > at; };
        slots.insert(std::find_if(slots.begin(), slots.end(), after), {at, at + t.size(), t.gradient});
    }
    return t;
}

static void start_gather(Fsdp& f, int i) {
    const FsdpUnit& u = f.units[i];
    WorkPtr& gather = f.gathers[i % 2];
    wait(f.c, gather);  // of a unit that nobody asked for in the end
    Tensor own = view(f.shard.weights, u.offset, {u.part});
    if (f.form && i > 0) { own = f.form->lend(own); }
    bool casts = u.weights.dtype != own.dtype;
    if (casts) { copy_or_add(own_part(f, u, u.weights), own, false); }
    gather = all_gather(f.c, u.weights, bounds_of(f, u), casts ? Tensor() : own);
    f.in_buffer[i % 2] = i;
}
// The step before tells which unit comes next, also where checkpoints run units again. A unit of the first step, or one
// that needs unit i's own buffer (unit i - 2 after a checkpoint of two blocks), is gathered when it is asked for.
static void pre_forward(Fsdp& f, int i) {
    Range range("gather");
    if (f.in_buffer[i % 2] != i) { start_gather(f, i); }
    Mark asked = mark();
    wait(f.c, f.gathers[i % 2]);
    f.waits.push_back({i, f.gathers[i % 2], asked, mark()});
    f.order.push_back(i);
    size_t n = f.order.size();
    while (n < f.last_order.size() && f.last_order[n] == i) { n++; }  // a checkpoint's backward comes after its forward
    int next = n < f.last_order.size() ? f.last_order[n] : i;
    if (next % 2 != i % 2 && f.in_buffer[next % 2] != next) { start_gather(f, next); }
}

static void add_to(const Fsdp& f, Tensor& sum, const Tensor& x) {
    bool first = !sum;
    if (first) { sum = empty(x.shape, f.shard.weights.dtype, GRADIENTS); }
    copy_or_add(sum, x, !first);
}
static void wait_for_gradients(Fsdp& f, int unit, const WorkPtr& work) {
    Mark asked = mark();
    wait(f.c, work);
    f.reduce_waits.push_back({unit, work, asked, mark()});
}
static void finish_reduce(Fsdp& f) {
    if (f.reducing < 0) { return; }
    FsdpUnit& u = f.units[f.reducing];
    wait_for_gradients(f, f.reducing, f.reduce);
    if (f.reduces_in_place && !f.steps_in_backward) { add_to(f, u.gradient, own_part(f, u, u.gradients)); }
    f.reducing = -1;
}
// What has no gradient counts as zero: padding, and parameters that this rank's loss did not depend on.
static void zero_the_rest(FsdpUnit& u) {
    int64_t end = 0;
    auto zero_up_to = [&](int64_t begin) {
        if (begin > end) { fill_zero(view(u.gradients, end, {begin - end})); }
    };
    for (const FsdpSlot& slot : u.slots) {
        if (!slot.gradient->filled) { continue; }
        zero_up_to(slot.begin);
        end = slot.end;
        slot.gradient->filled = false;  // the next backward overwrites it
    }
    zero_up_to(u.gradients.size());
}
// Each gradient is a unit's, or that of all replicated weights.
static void update(Fsdp& f, std::vector<FlatGradient> gradients, float gradient_scale) {
    NoGrad no_grad;
    ParameterGroup& g = f.shard;
    auto plain = std::partition(gradients.begin(), gradients.end(), [&](const FlatGradient& one) {
        return f.form && one.offset > 0 && one.offset < f.replicated;  // of units 1 and up
    });
    if (!g.sgd) {
        adamw_update(g.weights, {plain, gradients.end()}, g.m, g.v, g.adamw, g.step, gradient_scale);
        adamw_update(g.weights, {gradients.begin(), plain}, g.m, g.v, g.adamw, g.step, gradient_scale, f.form);
        return;
    }
    if (f.form) { fail("FSDP: SGD takes plain weights"); }
    for (const FlatGradient& one : gradients) {
        auto own = [&](const Tensor& t) { return view(t, one.offset, one.g.shape); };
        scale_in_place(one.g, gradient_scale);
        sgd_update(own(g.weights), one.g, own(g.m), g.adamw, g.momentum);
    }
}
static void begin_update(Fsdp& f) {
    ParameterGroup& g = f.shard;
    if (!g.m) { g.m = zeros(g.weights.shape, g.weights.dtype, OPTIMIZER); }
    if (!g.v && !g.sgd) { g.v = zeros(g.weights.shape, g.weights.dtype, OPTIMIZER); }
    g.step++;
}
static void start_reduce(Fsdp& f, int i) {
    Range range("reduce");
    if (f.steps_in_backward && f.backwards > 0) { fail("FSDP: steps in backward take one backward each"); }
    finish_reduce(f);  // of unit i + 1: backward now writes unit i - 1's gradients over them
    FsdpUnit& u = f.units[i];
    zero_the_rest(u);
    f.reduces_in_place = f.steps_in_backward || u.gradient;
    if (!f.reduces_in_place) { u.gradient = empty({u.part}, u.gradients.dtype, GRADIENTS); }
    f.reduce = reduce_scatter(f.c, u.gradients, bounds_of(f, u), AVERAGE, f.reduces_in_place ? Tensor() : u.gradient);
    f.reducing = i;
    if (!f.steps_in_backward) { return; }
    run_behind(f.c, f.reduce, [&f, &u] { update(f, {{own_part(f, u, u.gradients), u.offset}}, 1); });
}
static void pre_backward(Fsdp& f, int i) {
    while (f.to_reduce > i) { start_reduce(f, f.to_reduce--); }
    if (i > 0) { pre_forward(f, i); }  // a look-up's backward needs no weights, only the buffer for gradients
}
void add_hooks(Model& model, Fsdp& f) {
    model.weights = f.shard.weights, model.gradients = f.replicated_gradients;  // so that slots keep their gradients
    model.pre_forward = [&f](int unit) { pre_forward(f, unit); };
    model.pre_backward = [&f](int unit) { pre_backward(f, unit); };
}
Model sharded_model(const ModelConfig& c, Fsdp& f) {
    Model model = lay_out_model(c);
    place_weights(model, [&](const Parameter& p, const Shape& shape) { return place(f, p, shape); });
    add_hooks(model, f);
    return model;
}

static void forget_gathered(Fsdp& f) { f.in_buffer[0] = f.in_buffer[1] = -1; }  // the weights have changed
static void drop_gradients(Fsdp& f) {
    for (FsdpUnit& u : f.units) { u.gradient = Tensor(); }
    f.replicated_sum = Tensor();
}
void begin_step(Fsdp& f, bool steps_in_backward) {
    f.last_order = std::move(f.order);
    f.order.clear(), f.waits.clear(), f.reduce_waits.clear();
    if (f.reducing >= 0) { wait(f.c, f.reduce); }  // an error has ended the step before
    f.reducing = -1, f.to_reduce = (int)f.units.size() - 1;
    drop_gradients(f), forget_gathered(f);
    f.backwards = 0, f.steps_in_backward = steps_in_backward;
    if (!steps_in_backward) { return; }
    if (f.shard.sgd || context.precision == PREC_FP16) { fail("FSDP: a step in backward is AdamW's, and not in fp16"); }
    begin_update(f);
}
Fsdp::~Fsdp() {
    if (c.backend != "nccl") { return; }  // Gloo's jobs hold their tensors
    try {
        for (const WorkPtr& work : {gathers[0], gathers[1], reduce}) { wait(c, work); }
    } catch (const std::exception&) {}  // the device has failed, and nothing writes into the buffers any more
}
void finish_backward(Fsdp& f) {
    Range range("synchronize gradients");
    while (f.to_reduce >= 0) { start_reduce(f, f.to_reduce--); }
    finish_reduce(f);
    f.to_reduce = (int)f.units.size() - 1, f.backwards++;
    if (f.replicated_gradients.size() == 0) { return; }
    wait_for_gradients(f, -1, all_reduce(f.c, f.replicated_gradients, AVERAGE));
    add_to(f, f.replicated_sum, f.replicated_gradients);
    fill_zero(f.replicated_gradients);  // the next loss may not depend on all of them
}

static std::vector<FlatGradient> gradients_of(const Fsdp& f) {
    if (f.backwards == 0) { fail("FSDP: the optimizer's step has no backward before it"); }
    std::vector<FlatGradient> all;
    for (const FsdpUnit& u : f.units) {
        if (u.gradient) { all.push_back({u.gradient, u.offset}); }
    }
    if (f.replicated_sum) { all.push_back({f.replicated_sum, f.replicated}); }
    return all;
}
// It is the same on all ranks, so all of them step, or none. It is infinite from 1.8e19 on.
static double norm_over_ranks(const Communicator& c, double square_sum) {
    Tensor sum = from_floats({(float)square_sum}, {1});
    wait(c, all_reduce(c, sum, SUM));
    return std::sqrt(to_floats(sum)[0]);
}
static double gradient_norm(const Fsdp& f) {
    if (context.device == META) { return 1; }
    std::vector<FlatGradient> gradients = gradients_of(f);
    if (f.c.rank > 0 && f.replicated_sum) { gradients.pop_back(); }  // they count once
    return norm_over_ranks(f.c, square_sum(gradients));
}
double optimizer_step(Fsdp& f, LossScaler& scaler, double max_norm) {
    if (f.steps_in_backward && max_norm > 0) { fail("FSDP: a step in backward does not clip"); }
    double norm = guarded_step(
        scaler, max_norm, [&] { return gradient_norm(f); },
        [&](float gradient_scale) {
            if (!f.steps_in_backward) { begin_update(f); }
            update(f, gradients_of(f), gradient_scale);
        });
    drop_gradients(f), forget_gathered(f);
    f.backwards = 0;
    return norm;
}

void visit_whole(Fsdp& f, const Tensor& flat, bool write,
                 const std::function<void(const Parameter& p, const Tensor& whole)>& see) {
    for (const WorkPtr& gather : f.gathers) { wait(f.c, gather); }  // they may read what changes its form here
    for (int i = -1; i < (int)f.units.size(); i++) {
        Tensor own = flat, whole = flat;
        int64_t begin = 0;
        const bool has_form = f.form && i > 0 && flat.data == f.shard.weights.data;
        if (i >= 0) {
            const FsdpUnit& u = f.units[i];
            own = view(flat, u.offset, {u.part}), whole = empty({f.c.world * u.part}, flat.dtype, WORKSPACE);
            begin = u.begin;
            if (has_form) { f.form->leave(own); }
            wait(f.c, all_gather(f.c, whole, bounds_of(f, u), own));
        }
        for (const Parameter& p : f.parameters) {
            if (p.unit == i) { see(p, view(whole, i < 0 ? f.replicated_at.at(p.name) : p.offset - begin, p.shape)); }
        }
        if (i >= 0 && write) { copy(own, own_part(f, f.units[i], whole)); }
        if (has_form) { f.form->enter(own); }
    }
    if (write) { forget_gathered(f); }
}
void init_weights(Fsdp& f, uint64_t seed) {
    visit_whole(f, f.shard.weights, true,
                [&](const Parameter& p, const Tensor& whole) { init_weight(whole, p.name, seed); });
}
void choose_form(Fsdp& f) {
    if (f.form || f.shard.sgd || f.units.size() < 2) { return; }
    f.form = form_for(f.shard.weights.dtype, f.units[1].weights.dtype);
    for (size_t i = 1; f.form && i < f.units.size(); i++) {
        f.form->enter(view(f.shard.weights, f.units[i].offset, {f.units[i].part}));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// A step of training, in one process or by any of these ways

Trainer data_parallel_trainer(const Communicator& c, Model model, Strategy strategy, double bucket_mb) {
    Trainer t;
    t.c = c, t.model = std::move(model);
    make_gradients(t.model);
    const Model& m = t.model;
    t.d = data_parallel(c, strategy, bucket_mb, m.weights, m.gradients, m.parameters, m.slots);
    return t;
}
Trainer sharded_trainer(const Communicator& c, Model model, Sharding sharding) {
    plain_weights(model);
    Trainer t = data_parallel_trainer(c, std::move(model), sharding == ZERO1 ? NO_SYNC : FLAT, 0);
    t.sharded = {c, sharding, {}};
    add_parameter_group(t.sharded, {t.model.weights, t.model.gradients});
    return t;
}
Trainer fsdp_trainer(const Communicator& c, const ModelConfig& config, uint64_t seed, bool steps_in_backward) {
    Trainer t;
    t.c = c, t.steps_in_backward = steps_in_backward;
    t.f = fully_shard(c, lay_out_model(config).parameters, matmul_dtype());
    t.model = sharded_model(config, *t.f);
    init_weights(*t.f, seed);
    choose_form(*t.f);
    return t;
}

static double optimizer_step(Trainer& t) {
    if (t.f) { return optimizer_step(*t.f, t.scaler, t.max_norm); }
    if (t.sharded.groups.empty()) {
        make_optimizer_state(t.model);
        return optimizer_step(t.model, t.adamw, t.scaler, t.max_norm);
    }
    auto norm = [&] {  // of sums that are not averaged yet: only the ranks together know whether one is finite
        double own = gradient_norm(t.model);
        return context.device == META ? own : norm_over_ranks(t.c, own * own);
    };
    return guarded_step(t.scaler, 0, norm, [&](float gradient_scale) { optimizer_step(t.sharded, gradient_scale); });
}
void train_step(Trainer& t, const std::vector<Batch>& batches, const std::function<void(StepPart)>& begins) {
    t.marks.clear();
    auto begin = [&](StepPart part) { t.marks.push_back({part, mark()}), begins(part); };
    if (t.d) { begin_step(*t.d); }
    if (t.f) { begin_step(*t.f, t.steps_in_backward); }
    std::vector<Tensor> losses;
    for (const Batch& batch : batches) {
        begin(FORWARD_BLOCKS);
        auto pass = losses.empty() || t.f ? forward_backward : add_gradients;
        losses.push_back(pass(t.model, batch, loss_scale_of(t.scaler) / batches.size(), [&] { begin(BACKWARD); }));
        if (t.f) { finish_backward(*t.f); }
    }
    begin(EXPOSED);
    if (t.d) { finish_gradient_synchronization(*t.d); }
    begin(OPTIMIZER_STEP);
    t.norm = optimizer_step(t);
    begin(STEP_PARTS);
    synchronize();
    t.steps++, t.loss = 0;
    if (context.device == META) { return; }
    for (const Tensor& loss : losses) { t.loss += to_doubles(loss)[0] / losses.size(); }
}
