// ddp.cu: sections 2 and 3. All-reduce, data parallel training in four ways, the sharded optimizer.
#include "cs336.h"

// -------------------------------------------------------------------------------------------------
// What ranks tell each other
static bool everywhere(const Communicator& c, bool mine) {
    const std::vector<char> all = gather<char>(c, {mine});
    return std::count(all.begin(), all.end(), false) == 0;
}
double mean_over_ranks(const Communicator& c, double mine) {
    double mean = 0;
    for (double of_rank : gather<double>(c, {mine})) { mean += of_rank / c.world; }
    return mean;
}
size_t room_of_each_rank(const Communicator& c) {
    const int gpus = std::max(1, c.local_gpus);
    const size_t sharing =
        context.device == CUDA ? (c.local_world + gpus - 1) / gpus : c.local_world;
    const std::vector<size_t> all = gather<size_t>(c, {available_memory(context.device) / sharing});
    return *std::min_element(all.begin(), all.end());
}

static std::string ranks(int n) { return counted(n, "rank"); }

// -------------------------------------------------------------------------------------------------
// distributed_communication_single_node. With n ranks, an all-reduce of S bytes that takes t has,
// as nccl-tests define it, a busbw of S/t 2(n-1)/n: what each link of a ring carries, whatever n
// is. MB = 1e6 bytes, GB = 1e9.

struct AllReduceGroup {  // of ranks that reduce tensors of all sizes
    bool nccl;           // on GPUs; else Gloo, on the CPU
    int ranks;
    double ms[4];  // by size: the median of all steps and ranks; NAN where it did not fit
};
static const double SIZES_MB[] = {1, 10, 100, 1000};
static int sizes(const Options& o) { return o.quick ? 2 : 4; }
// On a rank's device; the CPU has what is compared with the sums, too: floats twice, and doubles.
static size_t bytes_of(const AllReduceGroup& g, int size) {
    return (size_t)(SIZES_MB[size] * 1e6) * (g.nccl ? 1 : 5);
}
static double ring(int n) { return 2.0 * (n - 1) / n; }

// The median of all ranks and steps, in ms, of an all-reduce of n fp32 numbers.
static double time_all_reduce(const Communicator& c, int64_t n, int warmup, int steps) {
    std::vector<float> values(n);
    for (int64_t i = 0; i < n; i++) { values[i] = (float)(i % 1000 + c.rank); }
    const Tensor t = from_floats(values, {n});
    wait(c, all_reduce(c, t, SUM));
    for (float& x : values) { x = c.world * (x - c.rank) + c.world * (c.world - 1) / 2; }
    if (!everywhere(c, to_floats(t) == values)) {
        fail("all-reduce over %s: wrong sums", c.backend.c_str());
    }
    scale_in_place(t, 1e-20f);  // each further sum multiplies by up to the number of ranks
    std::vector<double> mine;
    for (int i = 0; i < warmup + steps; i++) {
        barrier(c);
        double start = now_ms();
        wait(c, all_reduce(c, t, SUM));
        synchronize();
        if (i >= warmup) { mine.push_back(now_ms() - start); }
    }
    return stats_of(gather(c, mine)).median;
}

// groups: by backend, then by ranks.
static void answer_distributed_communication_single_node(const std::vector<AllReduceGroup>& groups,
                                                         int sizes) {
    const double mb = SIZES_MB[sizes - 1];
    const AllReduceGroup *first[2] = {}, *before = nullptr;  // of Gloo, of NCCL
    for (const AllReduceGroup& g : groups) {
        const char* who = g.nccl ? "NCCL" : "Gloo";
        const double small = g.ms[0], large = g.ms[sizes - 1];
        if (std::isnan(large)) { continue; }
        if (!first[g.nccl]) {
            first[g.nccl] = &g;
            answer(
                "size",
                "%s: %s with %s takes %.4g ms for %g MB, %.0f times as long as for 1 MB (%.3g ms).",
                large / small < 0.8 * mb
                    ? "Latency limits the small tensor, bandwidth the large one"
                    : "Bandwidth limits both",
                who, ranks(g.ranks).c_str(), large, mb, large / small, small);
        } else {
            answer(
                "ranks",
                "From %d to %d ranks %s takes %.2f times as long for %g MB (a ring: %.2f times).",
                before->ranks, g.ranks, who, large / before->ms[sizes - 1], mb,
                ring(g.ranks) / ring(before->ranks));
        }
        before = &g;
    }
    if (first[0] && first[1]) {
        auto times = [&](int size) { return first[0]->ms[size] / first[1]->ms[size]; };
        answer("backend",
               "With %d ranks Gloo takes %.1f times as long as NCCL for 1 MB, and %.1f times for "
               "%g MB.",
               first[0]->ranks, times(0), times(sizes - 1), mb);
    }
}

static void print_all_reduces(const Options& o, const std::vector<AllReduceGroup>& groups) {
    Table table{strprintf("%s: all-reduce, float32, sums checked; median of all ranks and %s, a "
                          "barrier before each, after %s; busbw: algbw 2(n-1)/n",
                          o.command.c_str(), counted(o.steps, "step").c_str(),
                          counted(o.warmup[0], "warm-up").c_str()),
                {"Backend", "Device", "Ranks", "Tensor Size (MB)", "median ms", "algbw (GB/s)",
                 "busbw (GB/s)"}};
    for (const AllReduceGroup& g : groups) {
        for (int i = 0; i < sizes(o); i++) {
            const double rate = SIZES_MB[i] / g.ms[i];  // MB per ms are GB/s
            const std::string ms =
                std::isnan(rate) ? oom_cell(bytes_of(g, i)) : strprintf("%.3f", g.ms[i]);
            table.row(g.nccl ? "nccl" : "gloo", g.nccl ? "cuda" : "cpu", g.ranks, SIZES_MB[i], ms,
                      rate, rate * ring(g.ranks));
        }
    }
    print(table);
    answer_distributed_communication_single_node(groups, sizes(o));
}

// The handout's groups are this command again, with --nproc and --backend. Rank 0 of each adds what
// it found to the file whose descriptor is in RESULTS.
static const char* const RESULTS = "CS336_RESULTS";

static void run_as_rank(const Communicator& c, const Options& o) {
    if (c.world == 1) { usage_error("--nproc: got 1, takes 2 or more: one rank sends nothing"); }
    AllReduceGroup g{c.backend == "nccl", c.world, {}};
    for (int i = 0; i < sizes(o); i++) {
        const bool fits = bytes_of(g, i) <= room_of_each_rank(c);
        const int64_t n = (int64_t)(SIZES_MB[i] * 1e6 / 4);
        g.ms[i] = fits ? time_all_reduce(c, n, o.warmup[0], o.steps) : NAN;
    }
    if (c.rank > 0) { return; }
    if (!getenv(RESULTS)) { return print_all_reduces(o, {g}); }
    if (write(atoi(getenv(RESULTS)), &g, sizeof g) != sizeof g) {
        fail("%s: %s", RESULTS, strerror(errno));
    }
}
int cmd_distributed_communication_single_node(const Options& o) {
    if (is_rank() || o.has("nproc") || o.has("backend")) {  // one group
        return run_ranks(o, [&](const Communicator& c) { run_as_rank(c, o); });
    }
    FILE* results = tmpfile();
    if (!results) { fail("tmpfile: %s", strerror(errno)); }
    setenv(RESULTS, std::to_string(fileno(results)).c_str(), true);
    std::vector<std::string> missing;
    for (auto [backend, device] : {std::pair("gloo", CPU), {"nccl", CUDA}}) {
        if (o.device == (device == CPU ? "cuda" : "cpu")) { continue; }
        for (int n : {2, 4, 6}) {
            const std::string why = why_not(backend, device, n);
            if (!why.empty()) {
                missing.push_back(strprintf("%s from %d ranks on (%s)", backend, n, why.c_str()));
                break;
            }
            progress("all-reduce: %s, %d ranks", backend, n);
            std::vector<std::string> words = o.command_line;
            words.insert(words.end(), {"--nproc", std::to_string(n), "--backend", backend});
            if (const int code = launch_ranks(n, words, o.timeout)) { return code; }
        }
    }
    std::vector<AllReduceGroup> groups;
    AllReduceGroup group;
    for (rewind(results); fread(&group, sizeof group, 1, results) == 1;) {
        groups.push_back(group);
    }
    context.device = cuda_devices() > 0 && o.device != "cpu" ? CUDA : CPU;
    print_all_reduces(o, groups);
    if (!missing.empty()) { answer("", "Not measured: %s.", list_of(missing).c_str()); }
    return groups.empty();
}

// -------------------------------------------------------------------------------------------------
// Data parallel. The four ways differ in two things: how the flat gradients are cut into buckets,
// and whether a bucket goes as soon as backward has finished it or after all of backward. The
// gradients lie in one buffer, in the order in which backward finishes them. So buckets are ranges
// of this buffer, and nothing is copied. The step is model.cu's train_step, with
// data_parallel_trainer's hooks.

// The ways, in the order of cs336.h's Strategy.
static const struct {
    const char* name;
    double cap_mb;  // of a bucket, in 1e6 bytes; a tensor that is larger has one of its own
    bool at_once;
} WAYS[] = {
    {"no sync", NAN, false},    // sends nothing
    {"naive", 0, false},        // a bucket per tensor, afterwards
    {"flat", INFINITY, false},  // one bucket, afterwards
    {"overlapped", 0, true},    // a bucket per tensor, at once
    {"bucketed", NAN, true},    // as many tensors as fit --bucket_size_mb, at once
};
const char* name_of(Strategy s) { return WAYS[s].name; }

struct Bucket {          // what goes as one all-reduce
    int64_t begin, end;  // elements of the flat gradients
    int first, past;     // parameters [first, past)
};
struct DataParallel {
    Communicator c;
    Strategy strategy;
    Tensor gradients;  // flat, in backward order
    // those with gradients, by offset; a tied one stands here once
    std::vector<Parameter> parameters;
    std::vector<bool> is_ready;  // of these, in this step
    std::vector<Bucket> buckets;
    size_t next = 0;             // the bucket to go next: the order is the same on all ranks
    std::vector<WorkPtr> works;  // of this step
};

static void cut_into_buckets(DataParallel& d, double cap_mb) {
    double bytes = 0;
    for (int i = 0; i < (int)d.parameters.size(); i++) {
        const Parameter& p = d.parameters[i];
        double more = (double)count(p.shape) * size_of(d.gradients.dtype);
        if (d.buckets.empty() || bytes + more > 1e6 * cap_mb) {
            d.buckets.push_back({p.offset, 0, i, 0});
            bytes = 0;
        }
        bytes += more;
        d.buckets.back().end = p.offset + count(p.shape), d.buckets.back().past = i + 1;
    }
}

static void start_next_bucket(DataParallel& d) {
    const Bucket& b = d.buckets[d.next++];
    const int64_t n = b.end - b.begin;
    // all_reduce then makes two calls, which with a smaller bucket cost more than they gain.
    const bool beside = WAYS[d.strategy].at_once && n > 8000000;
    d.works.push_back(all_reduce(d.c, view(d.gradients, b.begin, {n}), AVERAGE, beside));
}

// Backward has finished the gradient at [begin, end), of one parameter, or of several that are one
// product.
static void gradient_is_ready(DataParallel& d, int64_t begin, int64_t end) {
    for (size_t i = 0; i < d.parameters.size(); i++) {
        if (d.parameters[i].offset >= begin && d.parameters[i].offset < end) {
            d.is_ready[i] = true;
        }
    }
    auto is_complete = [&](const Bucket& b) {
        return std::count(d.is_ready.begin() + b.first, d.is_ready.begin() + b.past, false) == 0;
    };
    while (WAYS[d.strategy].at_once && d.next < d.buckets.size() &&
           is_complete(d.buckets[d.next])) {
        start_next_bucket(d);
    }
}

// Sends rank 0's weights to all. bucket_mb: BUCKETED's cap.
static std::unique_ptr<DataParallel> data_parallel(const Communicator& c, Strategy strategy,
                                                   double bucket_mb, const Model& m) {
    wait(c, broadcast(c, m.weights, 0));
    drop_weight_copies(m.slots);
    auto made = std::make_unique<DataParallel>();
    DataParallel& d = *made;
    d.c = c, d.strategy = strategy, d.gradients = m.gradients, d.parameters = m.parameters;
    d.is_ready.resize(m.parameters.size());
    if (strategy == NO_SYNC) { return made; }
    cut_into_buckets(d, strategy == BUCKETED ? bucket_mb : WAYS[strategy].cap_mb);
    for (const Tensor& t : m.slots) {
        int64_t begin =
            (t.gradient->value.data - d.gradients.data) / (int64_t)size_of(d.gradients.dtype);
        t.gradient->ready = [&d, begin, end = begin + t.size()] {
            gradient_is_ready(d, begin, end);
        };
    }
    return made;
}

static void begin_step(DataParallel& d) {  // before each backward
    d.next = 0;
    d.works.clear();
    d.is_ready.assign(d.parameters.size(), false);
}

// After backward: the compute stream waits until the gradients are averages.
static void finish_gradient_synchronization(DataParallel& d) {
    if (d.strategy == NO_SYNC) { return; }
    Range range("synchronize gradients");
    for (size_t i = 0; i < d.parameters.size(); i++) {
        if (d.is_ready[i]) { continue; }
        const Parameter& p = d.parameters[i];  // this rank's loss does not depend on it
        fill_zero(view(d.gradients, p.offset, p.shape));
        gradient_is_ready(d, p.offset, p.offset + count(p.shape));
        p.weight.gradient->filled = true;
    }
    while (d.next < d.buckets.size()) { start_next_bucket(d); }
    for (const WorkPtr& work : d.works) { wait(d.c, work); }
}

// -------------------------------------------------------------------------------------------------
// Section 3: the optimizer, sharded. AdamW keeps 8 bytes of state beside each weight's 4 and its
// gradient's 4. With N ranks, each rank keeps the state of 1/N of the elements only. Elements that
// each rank sends, of Psi parameters:
//   unsharded   all-reduce of the gradients                                  2 Psi (N-1)/N
//   broadcast   the same, and a broadcast of each shard of the weights       3 Psi (N-1)/N
//   ZeRO-1      reduce-scatter of the gradients, all-gather of the weights   2 Psi (N-1)/N

struct Optimizer {  // over flat weights
    Communicator c;
    Sharding sharding = UNSHARDED;
    std::vector<ParameterGroup> groups{};
};
static void add_parameter_group(Optimizer& o, const ParameterGroup& group) {  // also between steps
    if (o.sharding != UNSHARDED && group.weights.size() % o.c.world != 0) {
        fail("%ld weights are not %d equal shards", (long)group.weights.size(), o.c.world);
    }
    o.groups.push_back(group);
}

static void optimizer_step(Optimizer& o, float gradient_scale) {
    NoGrad no_grad;
    for (ParameterGroup& g : o.groups) {
        const bool whole = o.sharding == UNSHARDED;
        const int64_t n = g.weights.size() / (whole ? 1 : o.c.world),
                      begin = whole ? 0 : o.c.rank * n;
        if (o.sharding == ZERO1) { wait(o.c, reduce_scatter(o.c, g.gradients, AVERAGE)); }
        g.step++;
        Tensor p = view(g.weights, begin, {n}), dp = view(g.gradients, begin, {n});
        for (Tensor* moment : {&g.m, &g.v}) {
            if (!*moment) { *moment = zeros({n}, p.dtype, OPTIMIZER); }
        }
        adamw_update(p, {{dp, 0}}, g.m, g.v, g.adamw, g.step, gradient_scale);
        std::vector<WorkPtr> works;
        if (o.sharding == ZERO1) { works.push_back(all_gather(o.c, g.weights)); }
        for (int r = 0; o.sharding == BROADCAST && r < o.c.world; r++) {
            works.push_back(broadcast(o.c, view(g.weights, r * n, {n}), r));
        }
        for (const WorkPtr& work : works) { wait(o.c, work); }
    }
}

// -------------------------------------------------------------------------------------------------
// Trainers of several ranks

Trainer data_parallel_trainer(const Communicator& c, Model model, Strategy strategy,
                              double bucket_mb) {
    Trainer t;
    t.c = c, t.model = std::move(model);
    allocate_shared(c, [&] { make_gradients(t.model); });
    t.d = data_parallel(c, strategy, bucket_mb, t.model);
    DataParallel& d = *t.d;
    t.before_step = [&d] { begin_step(d); };
    t.before_optimizer = [&d] { finish_gradient_synchronization(d); };
    t.add_communication = [&d](const Trainer& t, StepNumbers& n) {
        const double begin = n[FORWARD_BLOCKS], end = begin + n[BACKWARD];  // of backward
        // What two collectives share counts once.
        double reached = 0;
        for (const WorkPtr& work : d.works) {
            const double from = std::max(reached, ms_of(work->begin, t.marks[0].second));
            const double to = reached = std::max(from, ms_of(work->end, t.marks[0].second));
            n[COMMUNICATION] += to - from;
            n[HIDDEN] += std::max(0.0, std::min(to, end) - std::max(from, begin));
        }
    };
    return t;
}

double norm_over_ranks(const Communicator& c, double square_sum) {
    if (context.device == META) { return 1; }
    Tensor sum = from_floats({(float)square_sum}, {1});
    wait(c, all_reduce(c, sum, SUM));
    return std::sqrt(to_floats(sum)[0]);
}
// which steps in place of the model's own
static void attach(Trainer& t, const Optimizer& optimizer) {
    t.sharded = std::make_shared<Optimizer>(optimizer);
    t.step_optimizer = [](Trainer& t) {
        // Only the ranks together know whether it is finite. Nothing else of it is used.
        auto norm = [&] { return norm_over_ranks(t.c, std::pow(gradient_norm(t.model), 2)); };
        return guarded_step(t.scaler, 0, norm, [&](float gradient_scale) {
            optimizer_step(*t.sharded, gradient_scale);
        });
    };
}
Trainer sharded_trainer(const Communicator& c, Model model, Sharding sharding, const AdamW& adamw) {
    split_weights(model, false);
    Trainer t = data_parallel_trainer(c, std::move(model), sharding == ZERO1 ? NO_SYNC : FLAT, 0);
    attach(t, {c, sharding});
    add_parameter_group(*t.sharded, {t.model.weights, t.model.gradients, adamw});
    return t;
}

// -------------------------------------------------------------------------------------------------
// naive_ddp, ddp_overlap_individual_parameters, ddp_overlap_bucketed, optimizer_state_sharding, and
// fsdp.cu's fsdp: N ranks, each with its part of a batch, against one process that sees all of it,
// on a small Transformer. Each rank starts from other weights, so that the broadcast is tested too.
// The weights are equal but for rounding: the sum over the batch is taken in another order.

std::vector<Batch> part_of(const Batch& all, const Communicator& c, int n) {
    const int64_t T = all.tokens.dim(1), rows = all.tokens.dim(0) / c.world / n;
    std::vector<Batch> batches;
    for (int64_t first = c.rank * n * rows; first < (c.rank + 1) * n * rows; first += rows) {
        batches.push_back(
            {view(all.tokens, first * T, {rows, T}), view(all.targets, first * T, {rows, T})});
    }
    return batches;
}
void train_both(const Communicator& c, Trainer& ours, Trainer& whole, uint64_t seed, int batches) {
    const Batch all = random_batch(ROWS * c.world, POSITIONS, VOCABULARY, seed);
    train_step(ours, part_of(all, c, batches));
    train_step(whole, {all});
}

void compare(WeightsCheck& d, const Tensor& got, const Tensor& want, double atol, double rtol) {
    std::vector<double> a = to_doubles(got), b = to_doubles(want);
    for (size_t i = 0; i < a.size(); i++) {
        double difference = std::fabs(a[i] - b[i]);
        d.match = d.match && difference <= atol + rtol * std::fabs(b[i]);  // NaN does not
        d.max = difference > d.max || std::isnan(difference) ? difference : d.max;
        d.sum += difference, d.n++;
    }
}
bool same_bits_everywhere(const Communicator& c, const Tensor& t) {
    Tensor host = to_device(t, CPU);
    const uint64_t mine = key_of({host.data, host.size() * size_of(host.dtype)});
    return everywhere(c, mine == gather<uint64_t>(c, {mine})[0]);
}

void print_checks(const Communicator& c, const std::string& caption,
                  const std::vector<WeightsCheck>& checks, const std::string& what) {
    Table table{caption + "; backend " + c.backend,
                {"Way", "What", "max diff", "mean diff", "Parameters"}};
    for (const WeightsCheck& x : checks) {
        table.row(x.way, x.what, strprintf("%.2e", x.max), strprintf("%.2e", x.sum / x.n),
                  x.match ? "match" : "DIFFER");
    }
    const int wrong = std::count_if(checks.begin(), checks.end(), [](auto& x) { return !x.match; });
    const WeightsCheck& worst = *std::max_element(checks.begin(), checks.end(),
                                                  [](auto& a, auto& b) { return a.max < b.max; });
    if (c.rank == 0) {
        print(table);
        answer(
            "", "The weights of %s %s: the largest difference is %.2e (%s, %s).%s%s", what.c_str(),
            wrong ? strprintf("DIFFER in %d of %zu rows", wrong, checks.size()).c_str() : "match",
            worst.max, worst.way.c_str(), worst.what.c_str(),
            wrong || worst.max == 0 ? "" : " Sums are taken in another order.",
            wrong ? "" : " All ranks hold the same bits.");
    }
    if (!everywhere(c, wrong == 0)) { fail("the weights differ"); }
}

struct CheckedWay {
    std::string name;
    Strategy strategy;
    double bucket_mb = 0;
    Sharding sharding = UNSHARDED;
};
constexpr int CHECKED_STEPS = 10;

// Adds rows to both.
static void train_and_compare(const Communicator& c, const ModelConfig& config,
                              const CheckedWay& way, uint64_t seed,
                              std::vector<WeightsCheck>& checks, Table& losses) {
    Trainer ours = data_parallel_trainer(c, random_model(config, seed + c.rank), way.strategy,
                                         way.bucket_mb),
            whole;
    whole.model = random_model(config, seed);
    make_gradients(whole.model);
    attach(ours, {c, way.sharding}), attach(whole, {});
    const Model &got = ours.model, &want = whole.model;
    AdamW adamw;
    adamw.lr = 0.01f, adamw.weight_decay = 0.1f;
    adamw.eps = 1e-5f;  // else a gradient that is rounding alone moves its weight by lr, either way
    const int64_t half = got.weights.size() / 2, rest = got.weights.size() - half;
    std::vector<WeightsCheck> rows;
    for (const Parameter& p : got.parameters) { rows.push_back({way.name, p.name}); }
    for (int step = 0; step < CHECKED_STEPS; step++) {
        for (const Trainer* t : {&ours, &whole}) {
            auto add_group = [&](int64_t begin, int64_t n) {
                const Model& m = t->model;
                add_parameter_group(*t->sharded, {view(m.weights, begin, {n}),
                                                  view(m.gradients, begin, {n}), adamw});
            };
            if (step == 0) { add_group(0, half); }
            if (step == CHECKED_STEPS / 2) { add_group(half, rest); }
        }
        train_both(c, ours, whole, seed + step);
        const double loss = mean_over_ranks(c, ours.loss);
        losses.row(way.name, step + 1, strprintf("%.6f", loss), strprintf("%.6f", whole.loss));
        for (size_t i = 0; i < rows.size(); i++) {
            compare(rows[i], got.parameters[i].weight, want.parameters[i].weight);
        }
    }
    const bool same = same_bits_everywhere(c, got.weights);
    for (WeightsCheck& x : rows) {
        x.match = x.match && same;
        if (way.sharding == UNSHARDED) { x.way += ", " + counted(ours.d->works.size(), "call"); }
        checks.push_back(x);
    }
}

static int check_ways(const Options& o, const std::vector<CheckedWay>& ways) {
    return run_ranks(o, [&](const Communicator& c) {
        Table losses{"Loss in each step, the mean over the ranks",
                     {"Way", "Step", ranks(c.world), "one process with the whole batch"}};
        std::vector<WeightsCheck> checks;
        const ModelConfig config = {"lm", 16, 32, 1, 2, VOCABULARY};
        for (const CheckedWay& way : ways) {
            train_and_compare(c, config, way, o.seed, checks, losses);
        }
        if (c.rank == 0) { print(losses); }
        print_checks(c,
                     strprintf("%s: weights after each of %d steps; World size: %d, Batch size: "
                               "%d; a Transformer of one block, d_model 16; AdamW, Learning rate: "
                               "0.01, a second parameter group after 5 steps",
                               o.command.c_str(), CHECKED_STEPS, c.world, ROWS * c.world),
                     checks, ranks(c.world) + " and of one process with the whole batch");
    });
}
int cmd_naive_ddp(const Options& o) { return check_ways(o, {{"naive", NAIVE}}); }
int cmd_ddp_overlap_individual_parameters(const Options& o) {
    return check_ways(o, {{"overlapped", OVERLAPPED}});
}
int cmd_ddp_overlap_bucketed(const Options& o) {
    std::vector<CheckedWay> ways;
    for (double mb : o.bucket_size_mb) { ways.push_back({strprintf("%g MB", mb), BUCKETED, mb}); }
    return check_ways(o, ways);
}
int cmd_optimizer_state_sharding(const Options& o) {
    return check_ways(o, {{"broadcast", FLAT, 0, BROADCAST}, {"ZeRO-1", NO_SYNC, 0, ZERO1}});
}

// -------------------------------------------------------------------------------------------------
// The benchmarking commands. A step's times come from marks on the device's time line, so that
// nothing waits in between:
//   | forward | backward          | exposed | optimizer |      compute stream
//             |   [all-reduce][all-reduce]  |                  communication stream
// Communication is hidden as far as it lies under backward.

ModelConfig choose_step(Options& o, const Communicator& c) {
    if (c.backend == "gloo" && !o.quick) {
        o.quick = true, context.sizes = "; Gloo, on the CPU: sizes of --quick where none is typed";
    }
    auto by_quick = [&](const char* name, int& field, int to) {
        if (o.quick && !o.has(name)) { field = to; }
    };
    if (!o.has("size")) {
        by_quick("d_model", o.d_model, 128), by_quick("d_ff", o.d_ff, 512);
        by_quick("num_layers", o.num_layers, 4), by_quick("num_heads", o.num_heads, 4);
    }
    by_quick("batch_size", o.batch_size, 1), by_quick("context_length", o.context_length, 32);
    by_quick("warmup", o.warmup[0], 2), by_quick("steps", o.steps, 3);
    const std::vector<ModelConfig> configs = configs_of(o);
    context.precision = precisions_of(o)[0];
    context.mode = modes_of(o, configs, {context.precision})[0];
    return configs[0];
}
double parameters_of(const ModelConfig& m) {
    double n = 0;
    for (const Parameter& p : lay_out_model(m).parameters) { n += (double)count(p.shape); }
    return n;
}
std::string caption_of(const Options& o, const ModelConfig& m, const Communicator& c) {
    const double millions = 1e-6 * parameters_of(m);
    return strprintf(
        "%s; %s, backend %s; size %s (%.4g million parameters, %.3g GB; d_model %d, d_ff %d, %s, "
        "%s, vocabulary %d), precision %s, mode %s; %s per rank, context length: %d, AdamW; %d "
        "warmup, %s",
        o.command.c_str(), ranks(c.world).c_str(), c.backend.c_str(), m.name.c_str(), millions,
        1e-3 * millions * size_of(weight_dtype()), m.d_model, m.d_ff,
        counted(m.num_layers, "layer").c_str(), counted(m.num_heads, "head").c_str(), m.vocab_size,
        name_of(context.precision), caption_of(context.mode).c_str(),
        counted(o.batch_size, "sequence").c_str(), o.context_length, o.warmup[0],
        counted(o.steps, "step").c_str());
}
static std::vector<Batch> batches_of(const Options& o, const ModelConfig& m, const Communicator& c,
                                     int n) {
    return part_of(random_batch(o.batch_size * c.world, o.context_length, m.vocab_size, o.seed + 1),
                   c, n);
}
size_t steps_peak(int world, const Options& o, const MakeTrainer& make, int n) {
    return planned_peak([&] {
        Communicator planned;
        planned.world = world;
        Trainer t = make(planned);
        reset_peak(META);
        const std::vector<Batch> batches = batches_of(o, t.model.config, planned, n);
        // FSDP has its moments from the first one's end on
        train_step(t, batches), train_step(t, batches);
    });
}

static StepNumbers numbers_of(const Trainer& t) {
    StepNumbers n{};
    const auto& at = t.marks;
    for (size_t i = 0; i + 1 < at.size(); i++) {
        n[at[i].first] += ms_of(at[i + 1].second, at[i].second);
    }
    n[TOTAL] = ms_of(at.back().second, at[0].second);
    if (t.add_communication) { t.add_communication(t, n); }
    return n;
}
// Warms up, then takes timed steps; each is the mean over the ranks.
static StepStats timed_steps(Trainer& t, const std::vector<Batch>& batches, const Options& o,
                             const char* name, const std::function<void(Trainer&)>& see) {
    std::vector<StepNumbers> mine;
    see(t);
    for (int i = -o.warmup[0]; i < o.steps; i++) {
        if (t.c.links) { barrier(t.c); }
        train_step(t, batches);
        if (i >= 0) { mine.push_back(numbers_of(t)); }
        if (t.c.rank == 0 && i < 0) {
            progress("%s: warm-up %d of %d", name, o.warmup[0] + i + 1, o.warmup[0]);
        }
        if (t.c.rank == 0 && i >= 0) {
            note("%s: Step %d/%d: %.1f ms, loss %.4f", name, i + 1, o.steps, mine.back()[TOTAL],
                 t.loss);
        }
        see(t);
    }
    const std::vector<StepNumbers> all = gather(t.c, mine);  // rank by rank
    StepStats stats;
    for (int k = 0; k < STEP_NUMBERS; k++) {
        std::vector<double> means(mine.size());
        for (size_t i = 0; i < all.size(); i++) { means[i % mine.size()] += all[i][k] / t.c.world; }
        stats[k] = stats_of(means);
    }
    return stats;
}
void run_way(WayRun& r, const Communicator& c, const Options& o, const MakeTrainer& make, int n,
             const std::function<void(Trainer&)>& see) {
    r.predicted = steps_peak(c.world, o, make, n);
    r.oom = r.predicted <= room_of_each_rank(c) ? 0 : r.predicted;
    if (r.oom) { return; }

    auto run = [&] {
        Trainer t = make(c);
        reset_peak(context.device);
        r.ms = timed_steps(t, batches_of(o, t.model.config, c, n), o, r.name.c_str(), see);
        r.loss = mean_over_ranks(c, t.loss);
        r.use = memory_use(context.device);
    };
    if (c.world > 1) {
        run();  // where one rank finds no memory, the others cannot go on
    } else {
        r.oom = run_if_fits(r.name, r.predicted, run, r.predicted);
    }
    free_shared(c);
}

struct DdpRun : WayRun {
    Strategy strategy;
    double bucket_mb;
    int calls = 0;
    double mb = 0;  // all-reduced per step
    DdpRun(Strategy s, double mb = 0)
        : WayRun{mb > 0 ? strprintf("%g MB", mb) : name_of(s)}, strategy(s), bucket_mb(mb) {}
};

void trace_step(Trainer& t, const char* name, const Options& o, const ModelConfig& config,
                std::vector<Trace>& traces) {
    if (o.trace.empty() || t.steps < o.warmup[0] + o.steps) { return; }
    start_tracing();
    {
        Range range(name);
        barrier(t.c);
        train_step(t, batches_of(o, config, t.c, 1));
    }
    traces.push_back(stop_tracing());
}
// Every way starts from the same weights and moments, so that their losses compare.
static void measure(const Communicator& c, const Options& o, const ModelConfig& config, DdpRun& r,
                    std::vector<Trace>& traces) {
    auto make = [&](const Communicator& c) {
        return data_parallel_trainer(c, random_model(config, o.seed), r.strategy, r.bucket_mb);
    };
    run_way(r, c, o, make, 1, [&](Trainer& t) {
        r.calls = (int)t.d->works.size(), r.mb = 0;
        for (const WorkPtr& work : t.d->works) { r.mb += (double)work->bytes / 1e6; }
        trace_step(t, name_of(r.strategy), o, config, traces);
    });
}

static std::string part_cell(const Stats& ms,
                             const Stats& total) {  // "28.49 ± 0.05, 21%" of the total
    const int digits = ms.mean < 100 ? 2 : ms.mean < 1000 ? 1 : 0;
    const std::string share =
        &ms == &total ? "" : strprintf(", %.0f%%", 100 * ms.mean / total.mean);
    const std::string noise = ms.n > 1 ? strprintf(" ± %.*f", digits, ms.std) : "";
    return strprintf("%.*f%s%s", digits, ms.mean, noise.c_str(), share.c_str());
}
// One process with the whole batch and, on the CPU, all cores; the other ranks wait.
static WayRun single_process(const Communicator& c, Options o, const ModelConfig& config) {
    WayRun r{"one process"};
    if (c.rank == 0) {
        const int threads = omp_get_max_threads();
        omp_set_num_threads(omp_get_num_procs());
        o.batch_size *= c.world;
        run_way(r, Communicator(), o, [&](const Communicator&) {
            Trainer t;
            t.model = random_model(config, o.seed);
            return t;
        });
        omp_set_num_threads(threads);
    }
    gather_text(c, "");
    return r;
}

bool can_compare(const Communicator& c, const std::vector<WayRun>& runs, bool all) {
    const size_t fit =
        std::count_if(runs.begin(), runs.end(), [](const WayRun& r) { return r.oom == 0; });
    if (fit == 0) { fail("no step ran: each rank needs %.1f GiB", runs.back().oom / 1073741824.0); }
    const bool can = c.world > 1 && (!all || fit == runs.size());
    if (c.rank == 0 && !can) {
        answer("", "Nothing to compare: that takes several ranks, and ways that fit.");
    }
    return c.rank == 0 && can;
}

Table step_table(const std::string& caption, const char* what) {
    return {caption + "; mean ± deviation over the steps, share of the step",
            {what, "Total Time (ms)", "Forward (ms)", "Backward (ms)", "Exposed Comm (ms)",
             "Optimizer (ms)"}};
}
void add_step(Table& table, const WayRun& r) {
    table.row(r.name);
    for (int part :
         {(int)TOTAL, (int)FORWARD_BLOCKS, (int)BACKWARD, (int)EXPOSED, (int)OPTIMIZER_STEP}) {
        table.rows.back().push_back(!r.oom          ? part_cell(r.ms[part], r.ms[TOTAL])
                                    : part == TOTAL ? oom_cell(r.oom)
                                                    : "");
    }
}
static void print_steps(const std::string& caption, const std::vector<DdpRun>& runs,
                        const WayRun& single, const Options& o, int ranks) {
    Table parts = step_table(caption, "Strategy");
    Table comparison{strprintf("The same steps; vs naive: step time saved; speed-up: over one "
                               "process with the whole batch (%s)",
                               single.oom ? "out of memory"
                                          : strprintf("%.2f ms", single.ms[TOTAL].mean).c_str()),
                     {"Strategy", "Comm Time (ms)", "hidden", "calls", "MB per step", "Samples/s",
                      "Tokens/s", "vs naive", "speed-up", "Loss"}};
    for (const DdpRun& r : runs) {
        const double total = r.ms[TOTAL].mean, comm = r.ms[COMMUNICATION].mean;
        const double rate = 1e3 * o.batch_size * ranks / total;
        add_step(parts, r);
        if (r.oom) { continue; }
        comparison.row(r.name, strprintf("%.2f", comm),
                       comm > 0 ? strprintf("%.1f%%", 100 * r.ms[HIDDEN].mean / comm) : "", r.calls,
                       strprintf("%.1f", r.mb), strprintf("%.2f", rate),
                       strprintf("%.0f", rate * o.context_length),
                       r.strategy != NO_SYNC
                           ? strprintf("%+.1f%%", 100 * (1 - total / runs[NAIVE].ms[TOTAL].mean))
                           : "",
                       single.oom ? "" : strprintf("%.2fx", single.ms[TOTAL].mean / total),
                       strprintf("%.4f", r.loss));
    }
    add_step(parts, single);
    print(parts);
    if (!runs[NAIVE].oom) { print(comparison); }
}

// "12.1 % less than naive (133.12 ms)", "2.10 times as long as flat (116.98 ms)", "level with flat
// (116.98 ms) within twice the standard error", or "too noisy to compare with naive (133.12 ms)".
static std::string against(const Stats& ours, const Stats& theirs, const char* name) {
    const double times = ours.mean / theirs.mean, more = 100 * std::fabs(times - 1);
    const std::string they = strprintf("%s (%.2f ms)", name, theirs.mean);
    const char* why = level(ours, theirs);
    return why && more > 10 ? strprintf("too noisy to compare with %s", they.c_str())
           : why            ? strprintf("level with %s %s", they.c_str(), why)
           : times > 2
               ? strprintf("%.2f times as long as %s", times, they.c_str())
               : strprintf("%.1f %% %s than %s", more, times > 1 ? "more" : "less", they.c_str());
}
// In the answers the runs stand in the order of Strategy.
static void answer_naive_ddp_benchmarking(const std::vector<DdpRun>& runs) {
    const DdpRun &none = runs[NO_SYNC], &naive = runs[NAIVE];
    const double total = naive.ms[TOTAL].mean, exposed = naive.ms[EXPOSED].mean,
                 comm = naive.ms[COMMUNICATION].mean;
    answer("",
           "A step takes %.2f ms: %s. %.2f ms of it (%.1f %%) are exposed communication, after "
           "backward. The %d all-reduces, one per tensor, move %.1f MB in %.2f ms (%.3g GB/s).",
           total, against(naive.ms[TOTAL], none.ms[TOTAL], "without communication").c_str(),
           exposed, 100 * exposed / total, naive.calls, naive.mb, comm, naive.mb / comm);
}
static void answer_minimal_ddp_flat_benchmarking(const std::vector<DdpRun>& runs) {
    const DdpRun &naive = runs[NAIVE], &flat = runs[FLAT];
    answer("",
           "With one all-reduce for all gradients a step takes %.2f ms: %s. The all-reduce of %.1f "
           "MB takes %.2f ms: %s.",
           flat.ms[TOTAL].mean, against(flat.ms[TOTAL], naive.ms[TOTAL], "naive").c_str(), flat.mb,
           flat.ms[COMMUNICATION].mean,
           against(flat.ms[COMMUNICATION], naive.ms[COMMUNICATION], "naive's calls").c_str());
}
static void answer_ddp_overlap_individual_parameters_benchmarking(const std::vector<DdpRun>& runs) {
    const DdpRun &naive = runs[NAIVE], &over = runs[OVERLAPPED];
    const Stats& total = over.ms[TOTAL];
    answer("a", "Overlapped, a step takes %.2f ms: %s, and %s.", total.mean,
           against(total, naive.ms[TOTAL], "naive").c_str(),
           against(total, runs[FLAT].ms[TOTAL], "flat").c_str());
    answer("b",
           "In naive's trace (--trace FILE.json) all all-reduces lie after backward, and the "
           "compute stream waits %.2f ms. In overlapped's, %.1f %% of their time lies under "
           "backward, and it waits %.2f ms.",
           naive.ms[EXPOSED].mean, 100 * over.ms[HIDDEN].mean / over.ms[COMMUNICATION].mean,
           over.ms[EXPOSED].mean);
    const double calls = over.ms[COMMUNICATION].mean, backward = over.ms[BACKWARD].mean;
    if (calls > backward) {
        answer("b", "The calls take %.2f ms, backward %.2f ms, so they cannot all lie under it.",
               calls, backward);
    }
}
// (b): n_b buckets of s bytes together at w bytes/s, and o for each call. o and w are those of the
// line through naive's calls and flat's one: they take n o + s/w and o + s/w.
static void answer_ddp_bucketed_benchmarking(const std::vector<DdpRun>& runs) {
    const DdpRun &none = runs[NO_SYNC], &flat = runs[FLAT], &over = runs[OVERLAPPED];
    const std::vector<DdpRun> buckets(&over + 1, runs.data() + runs.size());
    auto by_time = [](auto& a, auto& b) { return a.ms[TOTAL].mean < b.ms[TOTAL].mean; };
    auto by_calls = [](auto& a, auto& b) { return a.calls < b.calls; };
    const DdpRun& best = *std::min_element(buckets.begin(), buckets.end(), by_time);
    const DdpRun& few = *std::min_element(buckets.begin(), buckets.end(), by_calls);
    auto more = [](const DdpRun& a, const DdpRun& b, int part) {
        return a.ms[part].mean > b.ms[part].mean && !level(a.ms[part], b.ms[part]);
    };
    std::vector<std::string> also;
    for (const DdpRun& r : buckets) {
        const char* why = &r == &best ? nullptr : level(r.ms[TOTAL], best.ms[TOTAL]);
        if (why) {
            also.push_back(strprintf("%s (%.2f ms, %s)", r.name.c_str(), r.ms[TOTAL].mean, why));
        }
    }
    answer("a", "%s %s: a step takes %.2f ms, %s and %s.",
           also.empty() ? "The fastest buckets have" : "No bucket size is the fastest. With",
           best.name.c_str(), best.ms[TOTAL].mean,
           against(best.ms[TOTAL], over.ms[TOTAL], "a tensor per call").c_str(),
           against(best.ms[TOTAL], flat.ms[TOTAL], "flat").c_str());
    if (!also.empty()) { answer("a", "Level with it: %s.", list_of(also).c_str()); }
    if (few.calls < over.calls) {
        answer("a",
               "Fewer calls should take less time; here they %s: %.2f ms in %s, %s. A large last "
               "bucket should leave more exposed; here it does%s: %.2f ms with %s, %s.",
               more(over, few, COMMUNICATION) ? "do" : "do not", few.ms[COMMUNICATION].mean,
               counted(few.calls, "call").c_str(),
               against(few.ms[COMMUNICATION], over.ms[COMMUNICATION], "a tensor per call").c_str(),
               more(few, over, EXPOSED) ? "" : " not", few.ms[EXPOSED].mean, few.name.c_str(),
               against(few.ms[EXPOSED], over.ms[EXPOSED], "a tensor per call").c_str());
    }
    answer("a",
           "The model in (b) assumes that backward takes as long as communication. Here flat's "
           "all-reduce (%.2f ms) takes %.2f times as long as backward (%.2f ms).",
           flat.ms[COMMUNICATION].mean, flat.ms[COMMUNICATION].mean / none.ms[BACKWARD].mean,
           none.ms[BACKWARD].mean);
    const double s = flat.mb, n = runs[NAIVE].calls, sent = flat.ms[COMMUNICATION].mean;  // MB, ms
    const double o = (runs[NAIVE].ms[COMMUNICATION].mean - sent) / (n - 1), w = s / (sent - o);
    const double mb = std::min(s, sqrt(s * o * w));  // at least one bucket
    answer("b",
           "Backward ends at s/w. Sending starts after the first bucket, at s/(n_b w), and then "
           "takes n_b (o + s/(n_b w)). The difference of the ends is overhead(s, w, o, n_b) = "
           "s/(n_b w) + n_b o. It is least, 2 sqrt(s o/w), for n_b = sqrt(s/(o w)), so the best "
           "bucket has s/n_b = sqrt(s o w) bytes.");
    if (o > 0 && o < sent) {
        answer("b",
               "From naive's time (%.0f calls) and flat's (one call), for s = %.1f MB, follow o = "
               "%.4g us per call and w = %.4g GB/s. The best bucket then has %.4g MB and an "
               "overhead of %.3g ms.",
               n, s, 1e3 * o, w, mb, mb / w + s / mb * o);
    } else {
        answer(
            "b",
            "Naive's %.0f calls (%.2f ms) and flat's one (%.2f ms) do not give an o and a w here.",
            n, runs[NAIVE].ms[COMMUNICATION].mean, sent);
    }
}

static std::vector<int> ends_of_buckets(const ModelConfig& config, double cap_mb) {
    DataParallel d;
    d.parameters = lay_out_model(config).parameters, d.gradients.dtype = weight_dtype();
    cut_into_buckets(d, cap_mb);
    std::vector<int> ends;
    for (const Bucket& b : d.buckets) { ends.push_back(b.past); }
    return ends;
}
// Neighbouring caps that cut the same buckets become one way, with both names.
static void join_equal_caps(const ModelConfig& config, std::vector<DdpRun>& runs) {
    for (size_t i = BUCKETED + 1; i < runs.size();) {
        DdpRun &r = runs[i], &before = runs[i - 1];
        if (ends_of_buckets(config, r.bucket_mb) != ends_of_buckets(config, before.bucket_mb)) {
            i++;
            continue;
        }
        before.name += " = " + r.name;
        runs.erase(runs.begin() + i);
    }
}

static int benchmark(const Options& asked, std::vector<DdpRun> runs,
                     void (*print_answer)(const std::vector<DdpRun>&)) {
    return run_ranks(asked, [&](const Communicator& c) {
        Options o = asked;
        const ModelConfig config = choose_step(o, c);
        const std::string caption = caption_of(o, config, c);
        join_equal_caps(config, runs);
        std::vector<Trace> traces;
        for (DdpRun& r : runs) { measure(c, o, config, r, traces); }
        if (!o.trace.empty()) { write_trace(o.trace, traces, caption, c); }
        const WayRun single = single_process(c, o, config);
        if (c.rank == 0) { print_steps(caption, runs, single, o, c.world); }
        if (can_compare(c, {runs.begin(), runs.end()})) { print_answer(runs); }
    });
}
int cmd_naive_ddp_benchmarking(const Options& o) {
    return benchmark(o, {NO_SYNC, NAIVE}, answer_naive_ddp_benchmarking);
}
int cmd_minimal_ddp_flat_benchmarking(const Options& o) {
    return benchmark(o, {NO_SYNC, NAIVE, FLAT}, answer_minimal_ddp_flat_benchmarking);
}
int cmd_ddp_overlap_individual_parameters_benchmarking(const Options& o) {
    return benchmark(o, {NO_SYNC, NAIVE, FLAT, OVERLAPPED},
                     answer_ddp_overlap_individual_parameters_benchmarking);
}
int cmd_ddp_bucketed_benchmarking(const Options& o) {
    std::vector<DdpRun> runs = {NO_SYNC, NAIVE, FLAT, OVERLAPPED};
    for (double mb : o.bucket_size_mb) { runs.push_back({BUCKETED, mb}); }
    return benchmark(o, runs, answer_ddp_bucketed_benchmarking);
}

// -------------------------------------------------------------------------------------------------
// Section 2.4, communication_accounting: the handout's XXL model, L blocks of two Linear layers D x
// F and F x D, whose 2 D F L = P parameters take 16 P bytes with their gradients and AdamW's
// moments, in fp32. A: all activations that a device's tokens save; every second layer's are
// sharded, like the weights, the rest is not. C: FLOP/s of a chip; W: bytes/s of a link; X chips
// share the FSDP axis with M_X links, Y the TP axis with M_Y. Forward of one block of B tokens:
// T_math = 4 B D F / (X Y C); gather of the weights T_FSDP = 4 D F / (Y W M_X); all-reduce of the
// activations T_TP = 4 B D / (X W M_Y).

static const double GB = 1e9;
static const double GPU_GB = 80, CHIP_GB = 95;  // the memory of a GPU in (a), of a chip in (b)
// mesh axes, so links, of the FSDP and of the TP traffic
static const double M_X = 2, M_Y = 1;

int cmd_communication_accounting(const Options& o) {
    const double D = o.d_model, F = o.d_ff, L = o.num_layers, P = 2 * D * F * L,
                 per_token = 2 * L * (D + F);
    const double X = o.fsdp, Y = o.tp, N = X * Y, alpha = o.tflops * 1e12 / (o.bandwidth_gb * GB);
    const double most_Y = M_Y * F / alpha;
    if (Y >= most_Y) {
        usage_error("--tp: got %g; no batch is compute bound from M_Y F W / C = %.1f on", Y,
                    most_Y);
    }
    const double too_many = ceil(CHIP_GB * GB / (per_token / 2));  // tokens
    if (o.tokens >= too_many) {
        usage_error("--tokens: got %d, takes fewer than %.0f", o.tokens, too_many);
    }
    answer("", "communication_accounting; %s", origin().c_str());
    // the least N with (16 P + A/2) / N + A/2 < a chip's memory
    auto least_devices = [&](double A) {
        return floor((16 * P + A / 2) / (CHIP_GB * GB - A / 2)) + 1;
    };
    answer("a",
           "P = 2 D F L = 2 x %g x %g x %g = %.4g parameters take 4 P = %.1f GB in fp32. With "
           "gradients and AdamW's two moments they take 16 P = %.1f GB, the memory of %.1f / %g = "
           "%.2f, so %.0f GPUs. Backward saves 2 L (D + F) = 2 x %g x (%g + %g) = %.4g MB per "
           "token in bf16.",
           D, F, L, P, 4 * P / GB, 16 * P / GB, 16 * P / GB, GPU_GB, 16 * P / GB / GPU_GB,
           ceil(16 * P / GB / GPU_GB), L, D, F, per_token / 1e6);
    answer("b",
           "A device holds (16 P + A/2) / N + A/2 bytes, where A is what its tokens save for "
           "backward, half of it sharded. Without activations that is below %g GB from N = %.0f "
           "devices on; with %d tokens per device, from N = %.0f on. No N is enough from %g GB / "
           "(%.4g MB / 2) = %.0f tokens per device on, because A/2 alone fills the memory.",
           CHIP_GB, least_devices(0), o.tokens, least_devices(per_token * o.tokens), CHIP_GB,
           per_token / 1e6, too_many);
    // T_math = T_FSDP + T_TP
    const double overlapped = alpha * X / M_X, B = overlapped / (1 - Y / most_Y);
    answer("c",
           "alpha = C / W = %g TFLOP/s / %g GB/s = %.1f FLOP per byte. Forward is compute bound "
           "from B = (alpha X / M_X) / (1 - alpha Y / (M_Y F)) = (%.1f x %g / %g) / (1 - %.1f x %g "
           "/ (%g x %g)) = %.0f tokens overall, %.1f per chip. There FSDP's gathers and TP's "
           "all-reduces take turns. If both axes communicate at once, alpha X / M_X = %.0f tokens "
           "(%.1f per chip) are enough, with Y below M_Y F / alpha = %.1f.",
           o.tflops, o.bandwidth_gb, alpha, alpha, X, M_X, alpha, Y, M_Y, F, ceil(B), B / N,
           ceil(overlapped), overlapped / N, most_Y);
    double least = INFINITY, best_X = 0;  // tokens per chip, of the splits into whole numbers
    for (double x = 1; x <= N; x++) {
        const double y = N / x, tokens = alpha * x / M_X / (1 - y / most_Y) / N;
        if (y == floor(y) && y < most_Y && tokens < least) { least = tokens, best_X = x; }
    }
    // In turn, B(X) = (alpha X / M_X) / (1 - alpha N / (X M_Y F)) is least where TP takes half of
    // the time.
    const double per_chip = 4 * alpha * alpha / (M_X * M_Y * F);
    answer("d",
           "Choose the split: the least batch of %g chips is %.1f tokens per chip, with (X, Y) = "
           "(%g, %g). It would be 4 alpha^2 / (M_X M_Y F) = 4 x %.1f^2 / (%g x %g x %g) = %.1f, if "
           "X could be 2 alpha N / (M_Y F) = %.1f. Communication on both axes at once divides that "
           "by 4: alpha^2 / (M_X M_Y F) = %.1f. Fewer bytes (8-bit weights halve alpha X / M_X), "
           "more links per axis and pipeline stages lower it further. Gradient accumulation does "
           "not: each micro-batch gathers the weights.",
           N, least, best_X, N / best_X, alpha, M_X, M_Y, F, per_chip, 2 * N / most_Y,
           per_chip / 4);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// optimizer_state_sharding_accounting: peak memory in three stretches of a first step; the time of
// later ones

struct ShardingRun : WayRun {
    Sharding sharding;
    std::vector<std::pair<const char*, MemoryUse>> peaks{};  // moment, peak since the one before
    ShardingRun(const char* name, Sharding s) : WayRun{name}, sharding(s) {}
};
static void run_sharded(const Communicator& c, const Options& o, const ModelConfig& config,
                        ShardingRun& r) {
    size_t before = 0;  // held already, as cuBLAS's workspace
    auto moment = [&](const char* what) {
        synchronize();
        r.peaks.emplace_back(what, memory_use(context.device));
        r.peaks.back().second.peak -= before;
        reset_peak(context.device);
    };
    auto make = [&](const Communicator& c) {
        before = memory_use(context.device).now;
        reset_peak(context.device);
        Model model = make_model(config);
        init_weights(model, o.seed);
        if (c.links) { moment("after init"); }
        return sharded_trainer(c, model, r.sharding);
    };
    run_way(r, c, o, make, 1, [&](Trainer& t) {
        if (t.steps == 1) { moment("after step"); }
        if (t.steps > 0) { return; }
        t.step_optimizer = [&, step = t.step_optimizer](Trainer& t) {
            if (t.steps == 0) { moment("before step"); }
            return step(t);
        };
    });
}

static void answer_optimizer_state_sharding_accounting(const std::vector<ShardingRun>& runs,
                                                       int ranks) {
    const ShardingRun &whole = runs[UNSHARDED], &ours = runs[BROADCAST], &zero = runs[ZERO1];
    const size_t weights = whole.peaks[1].second.peak_by[PARAMETERS];  // 4 Psi bytes
    // MB, of which a rank sends two or three
    const double part = 1e-6 * weights * (ranks - 1) / ranks;
    auto peak = [](const ShardingRun& r, int i) { return mib_of(r.peaks[i].second.peak); };
    auto state = [](const ShardingRun& r) { return mib_of(r.peaks[2].second.peak_by[OPTIMIZER]); };
    answer("a",
           "Unsharded, the peak is %.1f MiB after init, %.1f before the optimizer's step and %.1f "
           "after it. Sharded, it is %.1f, %.1f and %.1f MiB.",
           peak(whole, 0), peak(whole, 1), peak(whole, 2), peak(ours, 0), peak(ours, 1),
           peak(ours, 2));
    answer("a",
           "Before the step weights take %.1f MiB and gradients %.1f MiB. The step adds AdamW's "
           "moments: %.1f MiB unsharded, %.1f MiB sharded, which is %sthe expected 1/%d.",
           mib_of(weights), mib_of(whole.peaks[1].second.peak_by[GRADIENTS]), state(whole),
           state(ours), std::fabs(state(ours) / state(whole) - 1.0 / ranks) < 0.01 ? "" : "not ",
           ranks);
    answer("b",
           "An iteration takes %.2f ms sharded, %s. Each rank steps only its share but then "
           "broadcasts it: the optimizer takes %.2f ms, %s.",
           ours.ms[TOTAL].mean, against(ours.ms[TOTAL], whole.ms[TOTAL], "unsharded").c_str(),
           ours.ms[OPTIMIZER_STEP].mean,
           against(ours.ms[OPTIMIZER_STEP], whole.ms[OPTIMIZER_STEP], "unsharded").c_str());
    answer("c",
           "ZeRO-1, too, shards only the optimizer's state: %.1f MiB per rank, ours %.1f MiB. It "
           "sends less: with a reduce-scatter of gradients and an all-gather of weights, a rank "
           "sends 2 Psi (N-1)/N elements (%.1f MB) of Psi parameters. Ours all-reduces gradients "
           "and broadcasts weights: 3 Psi (N-1)/N (%.1f MB). The handout's ranks own whole "
           "tensors; ours, like ZeRO's, own equal parts of one flat buffer.",
           state(zero), state(ours), 2 * part, 3 * part);
}
int cmd_optimizer_state_sharding_accounting(const Options& asked) {
    return run_ranks(asked, [&](const Communicator& c) {
        Options o = asked;
        const ModelConfig config = choose_step(o, c);
        // makes cuBLAS's workspace, which is no way's own
        matmul(zeros({1, 1}, F32), zeros({1, 1}, F32));
        Table time =
            step_table(caption_of(o, config, c) +
                           "; optimizer: with its waits for new weights and ZeRO-1's gradients",
                       "Optimizer");
        Table memory{"Peaks of rank 0 in a first step, MiB",
                     {"Optimizer", "Moment", "parameters", "gradients", "optimizer state",
                      "the rest", "peak"}};
        std::vector<ShardingRun> runs = {
            {"unsharded", UNSHARDED}, {"broadcast", BROADCAST}, {"ZeRO-1", ZERO1}};
        for (ShardingRun& r : runs) {
            run_sharded(c, o, config, r);
            add_step(time, r);
            auto cell = [](double x) { return strprintf("%.1f", mib_of(x)); };
            for (const auto& [what, use] : r.peaks) {
                const size_t *by = use.peak_by,
                             known = by[PARAMETERS] + by[GRADIENTS] + by[OPTIMIZER];
                memory.row(r.name, what, cell(by[PARAMETERS]), cell(by[GRADIENTS]),
                           cell(by[OPTIMIZER]), cell(use.peak - known), cell(use.peak));
            }
        }
        if (c.rank == 0) { print(time); }
        if (c.rank == 0 && !memory.rows.empty()) { print(memory); }
        if (can_compare(c, {runs.begin(), runs.end()})) {
            answer_optimizer_state_sharding_accounting(runs, c.world);
        }
    });
}
