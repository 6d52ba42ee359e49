// ddp.cu: sections 2.2 to 3. Data parallel training in four ways, and the sharded optimizer.
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
bool goes_at_once(Strategy s) { return s == OVERLAPPED || s == BUCKETED; }

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
    while (goes_at_once(d.strategy) && d.next < d.buckets.size() && d.buckets[d.next].missing == 0) {
        start_next_bucket(d);
    }
}

// A collective between different tensors would end in garbage, or abort inside Gloo.
static void check_same_parameters(const Communicator& c, const std::vector<Parameter>& parameters) {
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

void optimizer_step(Optimizer& o) {
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
            g.sgd ? sgd_update(p, dp, g.m, g.adamw, g.momentum) : adamw_update(p, dp, g.m, g.v, g.adamw, g.step);
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
