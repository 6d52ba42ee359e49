// ddp.cu: sections 2.2, 2.3 and 3 of the 2025 handout. They share trainers, checks and timers, so
// the file is in this order:
//   2.2, 2.3       data parallel training in four ways
//   3              the sharded optimizer
//   2.2, 2.3, 3    trainers; naive_ddp, ddp_overlap_individual_parameters, ddp_overlap_bucketed and
//                  optimizer_state_sharding: the checks against one process
//   2.2, 2.3       the commands that benchmark, with their answers
//   3              optimizer_state_sharding_accounting: memory and time of the sharded optimizer
// Read WAYS first: it has a row for each of the four ways, and one for sending nothing. Then follow
// a bucket: gradient_is_ready, start_next_bucket, finish_gradient_synchronization. For section 3
// read step_parameter_groups. fast_ways.h declares what comes from elsewhere: AdamW on flat
// weights, and what NCCL can do beside products (names with `shared` or `beside`).
#include "ddp.h"
#include "fast_ways.h"

// -------------------------------------------------------------------------------------------------
// Data parallel. The four ways differ in two things: how the flat gradients are cut into buckets,
// and whether a bucket goes as soon as backward has finished it or after all of backward. The
// gradients lie in one buffer, in the order in which backward finishes them (but for a few: see
// DataParallel::missing). So buckets are ranges of this buffer, and nothing is copied. The step is
// model.cu's train_step, with data_parallel_trainer's hooks.

// The ways, in the order of ddp.h's Strategy. A new one goes here, into Strategy, both before
// BUCKETED, and into the lists of the commands that are to run it.
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
};
struct DataParallel {
    Communicator c;
    Strategy strategy;
    Tensor gradients;              // flat, in backward order
    vector<Parameter> parameters;  // the model's, by offset; test_ddp's tied one stands once
    // The offsets of the parameters whose gradient backward has not finished in this step. It is a
    // set, since in mode eager backward finishes q, k and v, and w1 and w3, in another order than
    // they lie, and since it never finishes one on which this rank's loss does not depend.
    set<int64_t> missing{};
    vector<Bucket> buckets{};
    // The bucket that is sent next. All ranks send them in this order, since a collective has no
    // name by which ranks could match their calls.
    size_t next = 0;
    vector<WorkPtr> works{};  // the all-reduces of this step
};

// Cuts the gradients of these parameters, which lie in one buffer in this order, into buckets of
// whole tensors. A bucket is full if the next tensor would exceed cap_mb.
static vector<Bucket> cut_into_buckets(const vector<Parameter>& parameters, DType dtype,
                                       double cap_mb) {
    vector<Bucket> buckets;
    double bytes = 0;
    for (const Parameter& parameter : parameters) {
        const int64_t n = count(parameter.shape);
        const double more = (double)n * size_of(dtype);
        if (buckets.empty() || bytes + more > MB * cap_mb) {
            buckets.push_back({parameter.offset, 0});
            bytes = 0;
        }
        bytes += more;
        buckets.back().end = parameter.offset + n;
    }
    return buckets;
}

// Starts the all-reduce of the next bucket. AVERAGE divides by the number of ranks: NCCL by
// ncclAvg, Gloo in gloo_all_reduce (lib/ranks.cu).
static void start_next_bucket(DataParallel& d) {
    const Bucket& bucket = d.buckets[d.next];
    const Tensor gradients = view(d.gradients, bucket.begin, {bucket.end - bucket.begin});
    if (WAYS[d.strategy].at_once && fast_ways.all_reduce_beside) {
        d.works.push_back(fast_ways.all_reduce_beside(d.c, gradients, AVERAGE));
    } else {
        d.works.push_back(all_reduce(d.c, gradients, AVERAGE));
    }
    d.next++;
}

// Notes that backward has finished the gradient at [begin, end), and starts the buckets that this
// completes. It is the gradient of one parameter, or of several that one product computes, as q, k
// and v.
static void gradient_is_ready(DataParallel& parallel, int64_t begin, int64_t end) {
    set<int64_t>& missing = parallel.missing;
    missing.erase(missing.lower_bound(begin), missing.lower_bound(end));

    if (!WAYS[parallel.strategy].at_once) { return; }
    while (parallel.next < parallel.buckets.size()) {
        // The buckets before it have gone, so nothing is missing in them.
        const bool is_complete =
            missing.empty() || *missing.begin() >= parallel.buckets[parallel.next].end;
        if (!is_complete) { return; }
        start_next_bucket(parallel);
    }
}

// Makes the model's gradients call gradient_is_ready (not NO_SYNC's), and returns the state that
// these calls change. First it sends rank 0's weights to all. bucket_mb: BUCKETED's cap.
static shared_ptr<DataParallel> data_parallel(const Communicator& c, Strategy strategy,
                                              double bucket_mb, const Model& model) {
    wait(c, broadcast(c, model.weights, 0));
    drop_weight_copies(model.slots);

    auto made =
        make_shared<DataParallel>(DataParallel{c, strategy, model.gradients, model.parameters});
    DataParallel& parallel = *made;
    if (strategy == NO_SYNC) { return made; }

    const DType dtype = model.gradients.dtype;
    parallel.buckets = cut_into_buckets(model.parameters, dtype,
                                        strategy == BUCKETED ? bucket_mb : WAYS[strategy].cap_mb);
    // A slot is a parameter's weight, or a joined one, as qkv (see Model). In a step either the
    // joined one's gradient becomes ready, or those of its parts do.
    for (const Tensor& slot : model.slots) {
        int64_t bytes = slot.gradient->value.data - model.gradients.data;
        int64_t begin = bytes / size_of(dtype);
        slot.gradient->ready = [&parallel, begin, end = begin + slot.size()] {
            gradient_is_ready(parallel, begin, end);
        };
    }
    return made;
}

static void reset_buckets(DataParallel& d) {  // before each step
    d.next = 0;
    d.works.clear();
    for (const Parameter& parameter : d.parameters) { d.missing.insert(parameter.offset); }
}

// After backward: zeroes what backward has not reached, starts the all-reduces that have not gone
// yet, and makes the compute stream (with Gloo the host) wait until all gradients are averages.
static void finish_gradient_synchronization(DataParallel& parallel) {
    if (parallel.strategy == NO_SYNC) { return; }
    Range range("synchronize gradients");
    for (const Parameter& parameter : parallel.parameters) {
        if (parallel.missing.count(parameter.offset) == 0) { continue; }
        // This rank's loss does not depend on the parameter, but the others wait for its gradient.
        fill_zero(view(parallel.gradients, parameter.offset, parameter.shape));
        parameter.weight.gradient->filled = true;
    }
    while (parallel.next < parallel.buckets.size()) { start_next_bucket(parallel); }
    for (const WorkPtr& work : parallel.works) { wait(parallel.c, work); }
}

// -------------------------------------------------------------------------------------------------
// Section 3: the optimizer, sharded. In fp32 AdamW keeps 8 bytes of state beside each weight's 4
// and its gradient's 4. With N ranks, each rank keeps the state of 1/N of the elements only.
// Elements that each rank sends, of Psi parameters:
//   unsharded   all-reduce of the gradients                                  2 Psi (N-1)/N
//   broadcast   the same, and a broadcast of each shard of the weights       3 Psi (N-1)/N
//   ZeRO-1      reduce-scatter of the gradients, all-gather of the weights   2 Psi (N-1)/N
// Over Gloo our reduce-scatter is an all-reduce, so there ZeRO-1 sends 3 Psi (N-1)/N, too.

struct Optimizer {     // over flat weights
    Communicator c{};  // the ranks that have a shard each; UNSHARDED: this process alone
    Sharding sharding = UNSHARDED;
    vector<ParameterGroup> groups{};
};
static void add_parameter_group(Optimizer& o, const ParameterGroup& group) {  // also between steps
    if (group.weights.size() % o.c.world != 0) {
        fail("%ld weights are not %d equal shards; with 1 to 8 ranks they always are",
             (long)group.weights.size(), o.c.world);
    }
    o.groups.push_back(group);
}

void begin_adamw_step(ParameterGroup& group, const Tensor& own) {
    for (Tensor* moment : {&group.m, &group.v}) {
        if (!*moment) { *moment = zeros(own.shape, own.dtype, OPTIMIZER); }
    }
    group.step++;
}

// Steps each group's weights, which then are the same on all ranks. A sharded optimizer steps only
// this rank's 1/N of them and gets the rest from the other ranks. For ZERO1 backward must have
// filled all gradients, as the Transformer's does. gradient_scale: see guarded_step.
static void step_parameter_groups(Optimizer& optimizer, float gradient_scale) {
    NoGrad no_grad;
    const Communicator& c = optimizer.c;
    const Sharding sharding = optimizer.sharding;
    for (ParameterGroup& group : optimizer.groups) {
        if (sharding == ZERO1) { wait(c, reduce_scatter(c, group.gradients, AVERAGE)); }

        const int64_t n = group.weights.size() / c.world, begin = c.rank * n;
        const Tensor own = view(group.weights, begin, {n});
        begin_adamw_step(group, own);
        adamw_update(own, {{view(group.gradients, begin, {n}), 0}}, group.m, group.v,
                     scalars_of(group.adamw, group.step, gradient_scale));

        if (sharding == ZERO1) { wait(c, all_gather(c, group.weights)); }
        if (sharding == BROADCAST) {
            for (int r = 0; r < c.world; r++) {
                wait(c, broadcast(c, view(group.weights, r * n, {n}), r));
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Trainers of several ranks

// Returns a trainer whose gradients are averages over the ranks before its optimizer steps. All
// ranks get rank 0's weights. bucket_mb: BUCKETED's cap.
Trainer data_parallel_trainer(const Communicator& c, Model model, Strategy strategy,
                              double bucket_mb) {
    Trainer trainer;
    trainer.c = c;
    trainer.model = move(model);
    allocate_shared(c, [&] { make_gradients(trainer.model); });
    trainer.d = data_parallel(c, strategy, bucket_mb, trainer.model);
    DataParallel& parallel = *trainer.d;
    trainer.before_step = [&parallel] { reset_buckets(parallel); };
    trainer.before_optimizer = [&parallel] { finish_gradient_synchronization(parallel); };

    trainer.add_communication = [&parallel](const Trainer& t, StepTimes& times) {
        const Mark& start = t.marks[0].at;
        // All in ms from the step's start, where forward begins.
        const double backward_begin = times.forward;
        const double backward_end = backward_begin + times.backward;
        double reached = 0;  // the time that two collectives share counts once
        for (const WorkPtr& work : parallel.works) {
            const double from = max(reached, ms_of(work->begin, start));
            reached = max(from, ms_of(work->end, start));
            times.communication += reached - from;
            const double hidden = min(reached, backward_end) - max(from, backward_begin);
            times.hidden += max(0.0, hidden);
        }
    };
    return trainer;
}

// Returns the root of the sum of all ranks' square_sum. On META it returns a finite number, so that
// a planned step is taken.
double norm_over_ranks(const Communicator& c, double square_sum) {
    if (context.device == META) { return 1; }
    Tensor sum = from_floats({(float)square_sum}, {1});
    wait(c, all_reduce(c, sum, SUM));
    return sqrt(to_floats(sum)[0]);
}

// Makes a trainer step with an optimizer over parameter groups in place of the model's own.
static void attach(Trainer& trainer, Sharding sharding) {
    trainer.sharded = make_shared<Optimizer>();
    trainer.sharded->sharding = sharding;
    if (sharding != UNSHARDED) { trainer.sharded->c = trainer.c; }
    trainer.step_optimizer = [](Trainer& t) {
        // Only whether this norm is finite matters. FLAT's gradients are averages, the same on all
        // N ranks, so the norm is sqrt(N) times theirs.
        auto norm = [&] { return norm_over_ranks(t.c, pow(gradient_norm(t.model), 2)); };
        // The 0 is max_norm: nothing is clipped, and t.max_norm is not read. So guarded_step calls
        // `norm` in fp16 alone, to see whether any rank's gradients hold inf or NaN.
        return guarded_step(t.scaler, 0, norm, [&](float gradient_scale) {
            step_parameter_groups(*t.sharded, gradient_scale);
        });
    };
}

Trainer sharded_trainer(const Communicator& c, Model model, Sharding sharding, const AdamW& adamw) {
    // A shard may begin inside a matrix, so the weights must have their plain form (FastWays).
    if (fast_ways.restore_weights) { fast_ways.restore_weights(model); }
    Trainer t = data_parallel_trainer(c, move(model), sharding == ZERO1 ? NO_SYNC : FLAT);
    attach(t, sharding);
    add_parameter_group(*t.sharded, {t.model.weights, t.model.gradients, adamw});
    return t;
}

// -------------------------------------------------------------------------------------------------
// naive_ddp, ddp_overlap_individual_parameters, ddp_overlap_bucketed, optimizer_state_sharding, and
// fsdp.cu's fsdp: N ranks, each with its part of a batch, against one process that sees all of it,
// on a small Transformer. In ddp.cu each rank starts from other weights, which tests the broadcast.
// The weights are equal but for rounding: the sum over the batch is taken in another order.

// Returns this rank's rows of a batch, cut into n batches of equal size.
vector<Batch> part_of(const Batch& all, const Communicator& c, int n) {
    const int64_t T = all.tokens.dim(1), rows = all.tokens.dim(0) / c.world / n;
    vector<Batch> batches;
    for (int i = 0; i < n; i++) {
        const int64_t at = (c.rank * n + i) * rows * T;
        batches.push_back({view(all.tokens, at, {rows, T}), view(all.targets, at, {rows, T})});
    }
    return batches;
}

void train_both(const Communicator& c, Trainer& ours, Trainer& whole, uint64_t seed, int batches) {
    const Batch all = random_batch(ROWS * c.world, POSITIONS, VOCABULARY, seed);
    train_step(ours, part_of(all, c, batches));
    if (c.rank == 0) { train_step(whole, {all}); }
}

void compare(WeightsCheck& check, const Tensor& got, const Tensor& want, double rtol, double atol) {
    const Comparison found = compare(got, want, rtol, atol);
    check.match &= found.ok();
    if (found.max_abs > check.max || isnan(found.max_abs)) { check.max = found.max_abs; }
    check.sum += found.sum_abs;
    check.n += got.size();
}

uint64_t key_of_bits(const Tensor& t) {
    Tensor host = to_device(t, CPU);
    return key_of({host.data, host.bytes()});
}
bool same_everywhere(const Communicator& c, uint64_t mine) {
    return everywhere(c, mine == gather<uint64_t>(c, {mine})[0]);
}

// Prints the table and its answer, and fails on all ranks if a row differs on one.
void print_checks(const Communicator& c, const Options& options, int steps, const char* setting,
                  const vector<WeightsCheck>& checks) {
    Table table{strprintf("%s: weights after each of %d steps; World size: %d, Batch size: %d; %s; "
                          "backend %s",
                          options.command.c_str(), steps, c.world, ROWS * c.world, setting,
                          c.backend.c_str()),
                {"Way", "What", "max diff", "mean diff", "Parameters"}};
    int wrong = 0;
    const WeightsCheck* worst = &checks[0];
    for (const WeightsCheck& check : checks) {
        table.row(check.way, check.what, strprintf("%.2e", check.max),
                  strprintf("%.2e", check.sum / check.n), check.match ? "match" : "DIFFER");
        if (!check.match) { wrong++; }
        if (check.max > worst->max || isnan(check.max)) { worst = &check; }
    }

    print(table);
    answer("",
           "The weights of %s%s and of one process with the whole batch %s: the largest "
           "difference is %.2e (%s, %s).%s%s",
           options.command == "fsdp" ? "FSDP on " : "", counted(c.world, "rank").c_str(),
           wrong ? strprintf("DIFFER in %d of %zu rows", wrong, checks.size()).c_str() : "match",
           worst->max, worst->way.c_str(), worst->what.c_str(),
           wrong || worst->max == 0 ? "" : " Rounding differs.",
           wrong ? "" : " All ranks hold the same bits.");
    if (!everywhere(c, wrong == 0)) { fail("the weights differ"); }
}

struct CheckedWay {
    string name;
    Strategy strategy;
    double bucket_mb = 0;
    Sharding sharding = UNSHARDED;
};
constexpr int CHECKED_STEPS = 10;

// Trains in one way and, on rank 0, in one process, and compares the weights there after each step.
// In the end all ranks must have the same bits. Adds a row per parameter to `checks` and one per
// step to `losses`. The second half of the weights joins the optimizer after half of the steps.
static void train_and_compare(const Communicator& c, const ModelConfig& config,
                              const CheckedWay& way, uint64_t seed, vector<WeightsCheck>& checks,
                              Table& losses) {
    Trainer ours =
        data_parallel_trainer(c, random_model(config, seed + c.rank), way.strategy, way.bucket_mb);
    Trainer whole;
    whole.model = random_model(config, seed);
    make_gradients(whole.model);
    attach(ours, way.sharding);
    attach(whole, UNSHARDED);

    AdamW adamw;
    adamw.lr = 0.01f;
    adamw.weight_decay = 0.1f;
    adamw.eps = 1e-5f;  // else a gradient of mere rounding errors moves its weight by lr
    const Model &got = ours.model, &want = whole.model;
    // A multiple of 3360 = 4 x 840, so of 1 to 8 ranks.
    const int64_t half = got.weights.size() / 2;
    auto add_half = [&](int64_t begin) {
        for (const Trainer* trainer : {&ours, &whole}) {
            const Model& model = trainer->model;
            add_parameter_group(*trainer->sharded, {view(model.weights, begin, {half}),
                                                    view(model.gradients, begin, {half}), adamw});
        }
    };

    vector<WeightsCheck> rows;
    for (const Parameter& parameter : got.parameters) {
        rows.push_back({way.name, parameter.name});
    }
    add_half(0);
    for (int step = 0; step < CHECKED_STEPS; step++) {
        if (step == CHECKED_STEPS / 2) { add_half(half); }
        train_both(c, ours, whole, seed + step);
        const double loss = mean_over_ranks(c, ours.loss);
        losses.row(way.name, step + 1, strprintf("%.6f", loss), strprintf("%.6f", whole.loss));
        if (c.rank > 0) { continue; }
        for (size_t i = 0; i < rows.size(); i++) {
            compare(rows[i], got.parameters[i].weight, want.parameters[i].weight);
        }
    }

    const bool same = same_everywhere(c, key_of_bits(got.weights));
    for (WeightsCheck& row : rows) {
        row.match &= same;
        if (way.sharding == UNSHARDED) { row.way += ", " + counted(ours.d->works.size(), "call"); }
        checks.push_back(row);
    }
}

// Checks several ways and prints their losses, the table and the answer. Returns the exit code.
static int check_ways(const Options& options, const vector<CheckedWay>& ways) {
    return run_ranks(options, [&](const Communicator& c) {
        Table losses{"Loss in each step, the mean over the ranks",
                     {"Way", "Step", counted(c.world, "rank"), "one process with the whole batch"}};
        vector<WeightsCheck> checks;
        const ModelConfig config = {"lm", 16, 32, 1, 2, VOCABULARY};
        for (const CheckedWay& way : ways) {
            train_and_compare(c, config, way, options.seed, checks, losses);
        }

        print(losses);
        print_checks(c, options, CHECKED_STEPS,
                     "a Transformer of one block, d_model 16; AdamW, Learning rate: 0.01, a second "
                     "parameter group after 5 steps",
                     checks);
    });
}

int cmd_naive_ddp(const Options& o) { return check_ways(o, {{"naive", NAIVE}}); }
int cmd_ddp_overlap_individual_parameters(const Options& o) {
    return check_ways(o, {{"overlapped", OVERLAPPED}});
}
int cmd_ddp_overlap_bucketed(const Options& o) {
    vector<CheckedWay> ways;
    for (double mb : o.bucket_size_mb) { ways.push_back({strprintf("%g MB", mb), BUCKETED, mb}); }
    return check_ways(o, ways);
}
int cmd_optimizer_state_sharding(const Options& o) {
    return check_ways(o, {{"broadcast", FLAT, 0, BROADCAST}, {"ZeRO-1", NO_SYNC, 0, ZERO1}});
}

// -------------------------------------------------------------------------------------------------
// The benchmarking commands. cs336.h draws the parts of a step (StepParts).

// Puts what --quick (and Gloo, on the CPU) makes smaller into the options that were not typed, sets
// the context's precision and mode, and returns the model.
ModelConfig choose_step(Options& options, const Communicator& c) {
    if (c.backend == "gloo" && !options.quick) {
        options.quick = true;
        context.sizes = "; Gloo, on the CPU: sizes of --quick where none is typed";
    }
    auto by_quick = [&](const char* name, int& field, int to) {
        if (options.quick && !options.has(name)) { field = to; }
    };
    if (!options.has("size")) {
        by_quick("d_model", options.d_model, 128);
        by_quick("d_ff", options.d_ff, 512);
        by_quick("num_layers", options.num_layers, 4);
        by_quick("num_heads", options.num_heads, 4);
    }
    by_quick("batch_size", options.batch_size, 1);
    by_quick("context_length", options.context_length, 32);
    by_quick("warmup", options.warmup[0], 2);
    by_quick("steps", options.steps, 3);

    const ModelConfigs configs = configs_of(options);
    context.precision = precisions_of(options)[0];
    context.mode = modes_of(options, configs)[0];
    return configs[0];
}

double parameters_of(const ModelConfig& m) {
    double n = 0;
    for (const Parameter& p : lay_out_model(m).parameters) { n += (double)count(p.shape); }
    return n;
}

// Returns the caption of a table of steps: the command, the ranks, the model and the setting.
string caption_of(const Options& options, const ModelConfig& model, const Communicator& c) {
    const double millions = 1e-6 * parameters_of(model);
    return strprintf(
        "%s; %s, backend %s%s; size %s (%.4g million parameters, %.3g GB; d_model %d, d_ff %d, %s, "
        "%s, vocabulary %d), precision %s, mode %s; %s per rank, context length: %d, AdamW; %d "
        "warmup, %s",
        options.command.c_str(), counted(c.world, "rank").c_str(), c.backend.c_str(),
        getenv("NCCL_P2P_DISABLE") ? ", NCCL_P2P_DISABLE is set" : "", model.name.c_str(), millions,
        1e-3 * millions * size_of(weight_dtype()), model.d_model, model.d_ff,
        counted(model.num_layers, "layer").c_str(), counted(model.num_heads, "head").c_str(),
        model.vocab_size, name_of(context.precision), caption_of(context.mode).c_str(),
        counted(options.batch_size, "sequence").c_str(), options.context_length, options.warmup[0],
        counted(options.steps, "step").c_str());
}

static vector<Batch> batches_of(const Options& o, const Trainer& t, int n) {
    const Batch all = random_batch(o.batch_size * t.c.world, o.context_length,
                                   t.model.config.vocab_size, o.seed + 1);
    return part_of(all, t.c, n);
}

// Returns the bytes that a rank holds at most in two steps of n batches each, planned on META.
size_t steps_peak(int world, const Options& options, const MakeTrainer& make, int n) {
    return planned_peak([&] {
        Communicator planned;
        planned.world = world;
        Trainer trainer = make(planned);
        reset_peak(META);
        const vector<Batch> batches = batches_of(options, trainer, n);
        // Most ways allocate the moments at the end of the first step, so only the second one holds
        // them throughout.
        train_step(trainer, batches);
        train_step(trainer, batches);
    });
}

// Returns the times of the last step's parts on this rank, from the marks.
static StepTimes times_of(const Trainer& trainer) {
    StepTimes times;
    const vector<StepMark>& marks = trainer.marks;
    for (size_t i = 0; i + 1 < marks.size(); i++) {
        times.*marks[i].part += ms_of(marks[i + 1].at, marks[i].at);
    }
    times.total = ms_of(marks.back().at, marks[0].at);
    if (trainer.add_communication) { trainer.add_communication(trainer, times); }
    return times;
}

// Warms up, takes the timed steps, and returns their times. A step's time is the mean over the
// ranks. `see` is called before the first step and after each.
static StepStats timed_steps(Trainer& trainer, const vector<Batch>& batches, const Options& options,
                             const char* name, const SeeStep& see) {
    const Communicator& c = trainer.c;
    const int warmup = options.warmup[0];
    vector<StepTimes> mine;
    see(trainer);
    for (int i = 0; i < warmup + options.steps; i++) {
        if (c.links) { barrier(c); }  // all begin at once; one process and a plan have no links
        train_step(trainer, batches);
        if (i < warmup) {
            if (c.rank == 0) { progress("%s: warm-up %d of %d", name, i + 1, warmup); }
        } else {
            mine.push_back(times_of(trainer));
            if (c.rank == 0) {
                note("%s, rank 0: Step %d/%d: %.1f ms, loss %.4f", name, i - warmup + 1,
                     options.steps, mine.back().total, trainer.loss);
            }
        }
        see(trainer);
    }

    const vector<StepTimes> all = gather(c, mine);  // rank by rank
    auto over_steps = [&](StepPart part) {
        vector<double> means(mine.size());
        for (size_t i = 0; i < all.size(); i++) {
            means[i % mine.size()] += all[i].*part / c.world;
        }
        return stats_of(means);
    };
    // in the order of StepParts
    return {over_steps(&StepTimes::forward),       over_steps(&StepTimes::head_and_loss),
            over_steps(&StepTimes::backward),      over_steps(&StepTimes::exposed),
            over_steps(&StepTimes::optimizer),     over_steps(&StepTimes::total),
            over_steps(&StepTimes::communication), over_steps(&StepTimes::hidden)};
}

// Fills `way` with what its steps take, or with the bytes that do not fit.
void run_way(WayRun& way, const Communicator& c, const Options& options, const MakeTrainer& make,
             const SeeStep& see, int n) {
    way.predicted = steps_peak(c.world, options, make, n);
    way.oom = way.predicted > room_of_each_rank(c);
    if (way.oom) { return; }

    auto run = [&] {
        Trainer trainer = make(c);
        reset_peak(context.device);
        way.ms =
            timed_steps(trainer, batches_of(options, trainer, n), options, way.name.c_str(), see);
        way.loss = mean_over_ranks(c, trainer.loss);
        way.use = memory_use(context.device);
    };
    if (c.world > 1) {
        run();  // where one rank finds no memory, the others cannot go on
    } else {
        // It fits, as was checked above. Here run_if_fits only catches OutOfMemory: its last
        // argument says that all is held already, so it refuses nothing.
        way.oom = run_if_fits(way.name, way.predicted, run, way.predicted) > 0;
    }
    if (fast_ways.free_shared) { fast_ways.free_shared(c); }
}

struct DdpRun : WayRun {
    Strategy strategy;
    double bucket_mb;
    int calls = 0;
    double mb = 0;  // all-reduced per step
    DdpRun(Strategy s, double cap_mb = 0)
        : WayRun{cap_mb > 0 ? strprintf("%g MB", cap_mb) : name_of(s)},
          strategy(s),
          bucket_mb(cap_mb) {}
};
using DdpRuns = vector<DdpRun>;

// With --trace, takes one more step behind the last timed one, and adds its trace.
void trace_step(Trainer& trainer, const char* name, const Options& options, Traces& traces) {
    if (options.trace.empty() || trainer.steps < options.warmup[0] + options.steps) { return; }
    const double last_loss = trainer.loss;
    start_tracing();
    {
        Range range(name);
        barrier(trainer.c);
        train_step(trainer, batches_of(options, trainer, 1));
    }
    traces.push_back(stop_tracing());
    trainer.loss = last_loss;  // the tables have the last timed step's
}

// Times the steps of one strategy, and counts its calls and their bytes. Every way starts from the
// same weights and moments, so that their losses compare.
static void run_strategy(const Communicator& c, const Options& options, const ModelConfig& config,
                         DdpRun& run, Traces& traces) {
    auto make = [&](const Communicator& c) {
        return data_parallel_trainer(c, random_model(config, options.seed), run.strategy,
                                     run.bucket_mb);
    };
    run_way(run, c, options, make, [&](Trainer& trainer) {
        run.calls = (int)trainer.d->works.size();
        run.mb = 0;
        for (const WorkPtr& work : trainer.d->works) { run.mb += (double)work->bytes / MB; }
        trace_step(trainer, name_of(run.strategy), options, traces);
    });
}

// Times one process with the whole batch and, on the CPU, all cores. It runs in rank 0; the other
// ranks wait, and their result is empty.
static WayRun single_process(const Communicator& c, Options options, const ModelConfig& config) {
    WayRun run{"one process"};
    if (c.rank == 0) {
        const int threads = omp_get_max_threads();
        omp_set_num_threads(omp_get_num_procs());
        options.batch_size *= c.world;
        run_way(run, Communicator(), options, [&](const Communicator&) {
            Trainer trainer;
            trainer.model = random_model(config, options.seed);
            return trainer;
        });
        omp_set_num_threads(threads);
    }
    // Here the other ranks wait for rank 0, which may take longer than barrier() allows.
    gather_text(c, "");
    return run;
}

Table step_table(const string& caption, const char* what) {
    return {caption + "; mean ± deviation over the steps, share of the step",
            {what, "Total Time (ms)", "Forward (ms)", "Backward (ms)", "Exposed Comm (ms)",
             "Optimizer (ms)"}};
}

static string time_cell(const Stats& ms) {  // "28.49 ± 0.05"; of one step "28.49"
    int digits = 0;
    if (ms.mean < 1000) { digits = 1; }
    if (ms.mean < 100) { digits = 2; }
    const string noise = ms.n > 1 ? strprintf(" ± %.*f", digits, ms.std) : "";
    return strprintf("%.*f%s", digits, ms.mean, noise.c_str());
}

// Adds a row for a way: a step's time and its parts, or the bytes that did not fit.
void add_step(Table& table, const WayRun& run) {
    if (run.oom) { return table.row(run.name, oom_cell(run.predicted), "", "", "", ""); }
    const StepStats& ms = run.ms;
    auto part = [&](const Stats& x) {  // "28.49 ± 0.05, 21%"
        return time_cell(x) + strprintf(", %.0f%%", 100 * x.mean / ms.total.mean);
    };
    table.row(run.name, time_cell(ms.total), part(ms.forward), part(ms.backward), part(ms.exposed),
              part(ms.optimizer));
}

// Prints two tables: the parts of a step in each way and in one process; and, if naive ran, what
// the steps communicate, how fast they are, and what they save. ranks: how many share a step.
static void print_steps(const string& caption, const DdpRuns& runs, const WayRun& single,
                        const Options& options, int ranks) {
    const double single_ms = single.ms.total.mean, naive_ms = runs[NAIVE].ms.total.mean;
    Table parts = step_table(caption, "Strategy");
    Table comparison{
        strprintf("The same steps; vs naive: step time saved; speed-up: over one process with the "
                  "whole batch and, on a CPU, all cores (%s)",
                  single.oom ? "out of memory" : strprintf("%.2f ms", single_ms).c_str()),
        {"Strategy", "Comm Time (ms)", "hidden", "calls", "MB per step", "Samples/s", "Tokens/s",
         "vs naive", "speed-up", "Loss"}};
    for (const DdpRun& run : runs) {
        add_step(parts, run);
        if (run.oom) { continue; }
        const double total = run.ms.total.mean, comm = run.ms.communication.mean;
        const double rate = 1e3 * options.batch_size * ranks / total;
        string hidden, saved, speedup;
        if (comm > 0) { hidden = strprintf("%.1f%%", 100 * run.ms.hidden.mean / comm); }
        if (run.strategy != NO_SYNC) { saved = strprintf("%+.1f%%", 100 * (1 - total / naive_ms)); }
        if (!single.oom) { speedup = strprintf("%.2fx", single_ms / total); }
        comparison.row(run.name, strprintf("%.2f", comm), hidden, run.calls,
                       strprintf("%.1f", run.mb), strprintf("%.2f", rate),
                       strprintf("%.0f", rate * options.context_length), saved, speedup,
                       strprintf("%.4f", run.loss));
    }
    add_step(parts, single);
    print(parts);
    if (!runs[NAIVE].oom) { print(comparison); }
}

// Says how our time stands to theirs, for example "12.1 % less than naive (133.12 ms)", "2.10 times
// as long as flat (116.98 ms)", "level with flat (116.98 ms) within twice the standard error", or
// "too noisy to compare with naive (133.12 ms)".
static string against(const Stats& ours, const Stats& theirs, const char* name) {
    const double times = ours.mean / theirs.mean, percent = 100 * fabs(times - 1);
    const string they = strprintf("%s (%.2f ms)", name, theirs.mean);
    const string verdict = level(ours, theirs, " with " + they);
    if (verdict != "") { return verdict; }
    if (times > 2) { return strprintf("%.2f times as long as %s", times, they.c_str()); }
    return strprintf("%.1f %% %s than %s", percent, times > 1 ? "more" : "less", they.c_str());
}

// -------------------------------------------------------------------------------------------------
// The answers of the benchmarking commands. The runs stand in the order of Strategy.

// Answers how long naive's step takes, and how much of it is exposed communication.
static void answer_naive_ddp_benchmarking(const DdpRuns& runs) {
    const DdpRun& naive = runs[NAIVE];
    const double total = naive.ms.total.mean, exposed = naive.ms.exposed.mean,
                 comm = naive.ms.communication.mean;
    answer("",
           "A step takes %.2f ms: %s. %.2f ms of it (%.1f %%) are exposed communication, after "
           "backward. The %d all-reduces, one per tensor, move %.1f MB in %.2f ms (%.3g GB/s).",
           total,
           against(naive.ms.total, runs[NO_SYNC].ms.total, "a step without communication").c_str(),
           exposed, 100 * exposed / total, naive.calls, naive.mb, comm, naive.mb / comm);
}

// Answers what one call instead of one per tensor changes.
static void answer_minimal_ddp_flat_benchmarking(const DdpRuns& runs) {
    const DdpRun &naive = runs[NAIVE], &flat = runs[FLAT];
    answer("",
           "With one all-reduce for all gradients a step takes %.2f ms: %s. The all-reduce of %.1f "
           "MB takes %.2f ms: %s.",
           flat.ms.total.mean, against(flat.ms.total, naive.ms.total, "naive").c_str(), flat.mb,
           flat.ms.communication.mean,
           against(flat.ms.communication, naive.ms.communication, "naive's calls").c_str());
}

// Answers what calls during backward change (a), and what the traces show (b).
static void answer_ddp_overlap_individual_parameters_benchmarking(const DdpRuns& runs) {
    const DdpRun &naive = runs[NAIVE], &over = runs[OVERLAPPED];
    const Stats& total = over.ms.total;
    answer("a", "Overlapped, a step takes %.2f ms: %s, and %s.", total.mean,
           against(total, naive.ms.total, "naive").c_str(),
           against(total, runs[FLAT].ms.total, "flat").c_str());

    const double calls = over.ms.communication.mean;
    const Stats& backward = over.ms.backward;
    answer("b",
           "Naive's all-reduces all lie after backward, and the step waits %.2f ms for them. "
           "Overlapped's take %.2f ms, %.1f %% of it under backward, and the step waits %.2f ms. "
           "Backward itself takes %.2f ms, %s. These are the timed steps' means; --trace FILE.json "
           "shows one more step of each.",
           naive.ms.exposed.mean, calls, 100 * over.ms.hidden.mean / calls, over.ms.exposed.mean,
           backward.mean,
           against(backward, runs[NO_SYNC].ms.backward, "a backward without calls").c_str());
}

// Answers (a) which bucket size is the fastest, and whether others are level with it.
static void answer_fastest_bucket(const DdpRuns& runs) {
    DdpRuns bucketed(runs.begin() + BUCKETED, runs.end());
    const DdpRun* fastest = &bucketed[0];
    for (const DdpRun& run : bucketed) {
        if (run.ms.total.mean < fastest->ms.total.mean) { fastest = &run; }
    }
    const Stats& best = fastest->ms.total;
    vector<string> others;
    for (const DdpRun& run : bucketed) {
        const Stats& total = run.ms.total;
        const string verdict = level(total, best);
        if (&run == fastest || verdict == "") { continue; }
        others.push_back(
            strprintf("%s (%.2f ms, %s)", run.name.c_str(), total.mean, verdict.c_str()));
    }

    answer(
        "a",
        others.empty()
            ? "The fastest cap on a bucket is %s: a step takes %.2f ms, %s and %s."
            : "This run does not show which cap on a bucket is the fastest. With %s a step takes "
              "%.2f ms, %s and %s.",
        fastest->name.c_str(), best.mean,
        against(best, runs[OVERLAPPED].ms.total, "a tensor per call").c_str(),
        against(best, runs[FLAT].ms.total, "flat").c_str());
    if (!others.empty()) { answer("a", "It is not told apart from %s.", list_of(others).c_str()); }
}

// Answers (a) what the largest buckets change against a tensor per call: one expects that fewer
// calls take less time in all, and that the last, larger one leaves more exposed.
static void answer_large_buckets(const DdpRuns& runs) {
    auto by_calls = [](auto& a, auto& b) { return a.calls < b.calls; };
    const DdpRun& few = *std::min_element(runs.begin() + BUCKETED, runs.end(), by_calls);
    const DdpRun& many = runs[OVERLAPPED];
    auto changes = [&](Stats StepStats::*part) {
        const Stats& ms = few.ms.*part;
        return strprintf("%.2f ms, %s", ms.mean,
                         against(ms, many.ms.*part, "a tensor per call").c_str());
    };
    answer("a", "With %s (%s) communication takes %s. The step waits for it %s; backward takes %s.",
           few.name.c_str(), counted(few.calls, "bucket").c_str(),
           changes(&StepStats::communication).c_str(), changes(&StepStats::exposed).c_str(),
           changes(&StepStats::backward).c_str());
}

// Answers (a), and (b): the overhead of n_b buckets of s bytes together, at w bytes/s and o
// seconds for each call, and the best size of a bucket.
static void answer_ddp_bucketed_benchmarking(const DdpRuns& runs) {
    const DdpRun &naive = runs[NAIVE], &flat = runs[FLAT];
    if (runs.size() > BUCKETED + 1) { answer_fastest_bucket(runs); }  // one cap is no fastest one
    answer_large_buckets(runs);

    // The exposed time, not that of the calls: it has the gaps between them, too.
    const double flat_ms = flat.ms.exposed.mean, naive_ms = naive.ms.exposed.mean;
    const double backward = runs[NO_SYNC].ms.backward.mean;
    answer("a",
           "The model in (b) assumes that backward takes as long as communication. Here what "
           "flat leaves exposed (%.2f ms) takes %.2f times as long as a backward without calls "
           "(%.2f ms).",
           flat_ms, flat_ms / backward, backward);
    answer("b",
           "Backward ends at s/w. Sending starts after the first bucket, at s/(n_b w), and then "
           "takes n_b (o + s/(n_b w)). The difference of the ends is overhead(s, w, o, n_b) = "
           "s/(n_b w) + n_b o. It is least, 2 sqrt(s o/w), for n_b = sqrt(s/(o w)), so the best "
           "bucket has s/n_b = sqrt(s o w) bytes.");

    // Naive's n calls take n o + s/w, in ms for s in MB, and flat's one takes o + s/w.
    const double s = flat.mb, n = naive.calls;
    const double o = (naive_ms - flat_ms) / (n - 1), w = s / (flat_ms - o);
    // level's "": the two differ.
    if (o > 0 && o < flat_ms && level(naive.ms.exposed, flat.ms.exposed) == "") {
        const double best = min(s, sqrt(s * o * w));  // at least one bucket
        answer("b",
               "From what naive (%.0f calls) and flat (one call) leave exposed, for s = %.5g MB, "
               "follow o = %.4g us per call and w = %.3g GB/s. The best bucket, of at most s, then "
               "has %.4g MB and an overhead of %.3g ms.",
               n, s, 1e3 * o, w, best, best / w + s / best * o);
    } else {
        answer("b",
               "Naive's %.0f calls (%.2f ms exposed) and flat's one (%.2f ms) do not give an o and "
               "a w here.",
               n, naive_ms, flat_ms);
    }
}

// -------------------------------------------------------------------------------------------------
// The commands that benchmark

// Neighbouring caps that cut the same buckets become one way, which has both names.
static void join_equal_caps(const ModelConfig& config, DdpRuns& runs) {
    const Model planned = lay_out_model(config);
    DdpRuns joined;
    vector<int64_t> last_ends;
    for (const DdpRun& run : runs) {
        vector<int64_t> ends;
        for (const Bucket& b :
             cut_into_buckets(planned.parameters, weight_dtype(), run.bucket_mb)) {
            ends.push_back(b.end);
        }
        // The ways before BUCKETED stand first and are never joined.
        if (joined.size() > BUCKETED && ends == last_ends) {
            joined.back().name += " = " + run.name;
        } else {
            joined.push_back(run);
        }
        last_ends = ends;
    }
    runs = joined;
}

// Times the runs one after the other, then one process, and prints the tables and, where all ways
// ran, the answer. Returns the exit code.
static int benchmark(const Options& asked, DdpRuns runs, void (*print_answer)(const DdpRuns&)) {
    return run_ranks(asked, [&](const Communicator& c) {
        Options options = asked;
        const ModelConfig config = choose_step(options, c);
        const string caption = caption_of(options, config, c);
        join_equal_caps(config, runs);
        Traces traces;
        for (DdpRun& run : runs) { run_strategy(c, options, config, run, traces); }
        write_trace(options.trace, traces, caption, c);

        const WayRun single = single_process(c, options, config);
        print_steps(caption, runs, single, options, c.world);
        if (can_compare(c, runs)) { print_answer(runs); }
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
    DdpRuns runs = {NO_SYNC, NAIVE, FLAT, OVERLAPPED};
    for (double mb : o.bucket_size_mb) { runs.push_back({BUCKETED, mb}); }
    return benchmark(o, runs, answer_ddp_bucketed_benchmarking);
}

// -------------------------------------------------------------------------------------------------
// optimizer_state_sharding_accounting: the peaks of memory up to three moments (after init, before
// and after the first optimizer step); the time of later steps

enum Moment { AFTER_INIT, BEFORE_STEP, AFTER_STEP };
struct ShardingRun : WayRun {
    Sharding sharding;
    // by Moment: its name, and the peak since the one before
    vector<pair<const char*, MemoryUse>> peaks{};
};

// Times an optimizer's steps and notes the peaks up to the three moments: note_peak runs in `make`,
// in the wrapped optimizer, and after the first step.
static void run_sharded(const Communicator& c, const Options& options, const ModelConfig& config,
                        ShardingRun& run) {
    MemoryUse before{};  // held already, as cuBLAS's workspace: no part of the peaks
    auto note_peak = [&](const char* moment) {
        synchronize();
        run.peaks.emplace_back(moment, memory_use(context.device));
        MemoryUse& use = run.peaks.back().second;
        use.peak -= before.now;
        for (int i = 0; i < CATEGORIES; i++) { use.peak_by[i] -= before.now_by[i]; }
        reset_peak(context.device);
    };
    // Not random_model: it may briefly hold a second copy (keep_weights in fast_ways.h), and
    // that would count as the peak after init.
    auto make = [&](const Communicator& c) {
        before = memory_use(context.device);
        reset_peak(context.device);
        Model model = make_model(config);
        init_weights(model, options.seed);
        if (c.links) { note_peak("after init"); }  // without links steps_peak plans, nothing runs
        return sharded_trainer(c, model, run.sharding);
    };
    // run_way calls this before the first step and after each one. Before the first it wraps
    // step_optimizer: "before step" is noted right before AdamW's first step allocates the moments.
    run_way(run, c, options, make, [&](Trainer& trainer) {
        if (trainer.steps == 1) { note_peak("after step"); }
        if (trainer.steps > 0) { return; }
        trainer.step_optimizer = [&, step = trainer.step_optimizer](Trainer& t) {
            if (t.steps == 0) { note_peak("before step"); }
            return step(t);
        };
    });
}

// Answers (a), the memory; (b), the time; (c), what ZeRO-1 does differently.
static void answer_optimizer_state_sharding_accounting(const vector<ShardingRun>& runs, int ranks,
                                                       const string& backend) {
    const ShardingRun &whole = runs[UNSHARDED], &ours = runs[BROADCAST], &zero = runs[ZERO1];
    const size_t* before_step = whole.peaks[BEFORE_STEP].second.peak_by;
    const size_t weights = before_step[PARAMETERS];  // bytes; in fp32 4 Psi and some padding
    auto peak = [](const ShardingRun& run, Moment moment) {
        return mib_of(run.peaks[moment].second.peak);
    };
    auto state = [](const ShardingRun& run) {
        return mib_of(run.peaks[AFTER_STEP].second.peak_by[OPTIMIZER]);
    };
    answer("a",
           "Unsharded, the peak is %.1f MiB after init, %.1f before the optimizer's step and %.1f "
           "after it. Sharded, it is %.1f, %.1f and %.1f MiB.",
           peak(whole, AFTER_INIT), peak(whole, BEFORE_STEP), peak(whole, AFTER_STEP),
           peak(ours, AFTER_INIT), peak(ours, BEFORE_STEP), peak(ours, AFTER_STEP));
    const bool as_expected = fabs(state(ours) / state(whole) - 1.0 / ranks) < 0.01;
    answer("a",
           "At the peak before the step weights take %.1f MiB, gradients %.1f, activations %.1f, "
           "the weights' 16-bit copies %.1f and workspace %.1f MiB.",
           mib_of(weights), mib_of(before_step[GRADIENTS]), mib_of(before_step[ACTIVATIONS]),
           mib_of(before_step[WEIGHT_COPIES]), mib_of(before_step[WORKSPACE]));
    if (state(whole) > 0) {  // else fp16's loss scaling skipped the step
        answer("a",
               "The step adds AdamW's moments: %.1f MiB unsharded, %.1f MiB sharded, which is %s "
               "1/%d.",
               state(whole), state(ours), as_expected ? "the expected" : "not the expected", ranks);
    }

    answer("b",
           "An iteration takes %.2f ms sharded, %s. A rank steps only its share and broadcasts it "
           "(fp16's loss scaling may skip that): the optimizer takes %.2f ms, %s.",
           ours.ms.total.mean, against(ours.ms.total, whole.ms.total, "unsharded").c_str(),
           ours.ms.optimizer.mean,
           against(ours.ms.optimizer, whole.ms.optimizer, "unsharded").c_str());

    // Psi (N-1)/N elements in MB: a rank sends two or three times as much
    const double part = 1e-6 * weights * (ranks - 1) / ranks;
    answer(
        "c",
        "ZeRO-1, too, shards only the optimizer's state, in step 1 %.1f MiB per rank, ours %.1f. "
        "It sends less: with a true reduce-scatter of gradients and an all-gather of weights, a "
        "rank sends 2 Psi (N-1)/N elements (with our buffer's padding %.1f MB) of Psi parameters. "
        "Ours all-reduces gradients and broadcasts weights: 3 Psi (N-1)/N (%.1f MB).%s The "
        "handout's ranks own whole tensors; ours, like ZeRO's, own equal parts of one flat buffer.",
        state(zero), state(ours), 2 * part, 3 * part,
        backend == "gloo" ? " But in this run it sends as much as ours: over Gloo our "
                            "reduce-scatter is an all-reduce."
                          : "");
}

// Runs the three optimizers and prints their times, the peaks of rank 0's memory, and the answers.
int cmd_optimizer_state_sharding_accounting(const Options& asked) {
    return run_ranks(asked, [&](const Communicator& c) {
        Options options = asked;
        const ModelConfig config = choose_step(options, c);
        // makes cuBLAS's workspace, which is no way's own
        matmul(zeros({1, 1}, F32), zeros({1, 1}, F32));

        Table time = step_table(
            caption_of(options, config, c) +
                "; optimizer: with its waits for new weights and ZeRO-1's gradients, which "
                "Exposed Comm leaves out",
            "Optimizer");
        Table memory{"Peaks of rank 0 in a first step, MiB",
                     {"Optimizer", "Moment", "parameters", "gradients", "optimizer state",
                      "the rest", "peak"}};
        vector<ShardingRun> runs = {
            {{"unsharded"}, UNSHARDED}, {{"broadcast"}, BROADCAST}, {{"ZeRO-1"}, ZERO1}};
        for (ShardingRun& run : runs) {
            run_sharded(c, options, config, run);
            add_step(time, run);
            for (const auto& [moment, use] : run.peaks) {
                const size_t* by = use.peak_by;
                const size_t known = by[PARAMETERS] + by[GRADIENTS] + by[OPTIMIZER];
                memory.row(run.name, moment, mib_cell(by[PARAMETERS]), mib_cell(by[GRADIENTS]),
                           mib_cell(by[OPTIMIZER]), mib_cell(use.peak - known), mib_cell(use.peak));
            }
        }

        print(time);
        if (!memory.rows.empty()) { print(memory); }
        if (can_compare(c, runs)) {
            answer_optimizer_state_sharding_accounting(runs, c.world, c.backend);
        }
    });
}
