// bench_fsdp.cu: the 2026 handout's problems on FSDP. `fsdp` checks it, `fsdp_accounting` measures its memory and time.
#include "commands.h"

// ---------------------------------------------------------------------------------------------------------------------
// fsdp: N ranks against one process that sees the whole batch, on a small Transformer. Weights are equal but for
// rounding: the sum over the batch is taken in another order.

constexpr int ROWS = 10, POSITIONS = 8, VOCABULARY = 100, STEPS = 3;  // rows: of each rank

struct FsdpCase {
    Precision precision;
    Mode mode;
    int checkpoint = 0, batches = 1, head_chunk = 0;  // batches: backwards per step, whose gradients add up
};
static std::vector<FsdpCase> fsdp_cases() {
    std::vector<FsdpCase> cases;
    for (Precision precision : {FP32, PREC_BF16, PREC_FP16}) {
        for (Mode mode : {EAGER, FUSED}) { cases.push_back({precision, mode}); }
    }
    for (int checkpoint : {1, 2, (int)CHECKPOINT_FFN, (int)CHECKPOINT_HALF, (int)CHECKPOINT_NESTED}) {
        cases.push_back({FP32, FUSED, checkpoint});
    }
    cases.push_back({FP32, FUSED, 1, 2});
    if (fastest_flash(context.device, F32, 16)) { cases.push_back({FP32, FLASH}); }
    for (auto [checkpoint, head_chunk] : {std::pair(0, 0), {1, 0}, {0, 48}}) {
        cases.push_back({PREC_PURE_BF16, FUSED, checkpoint, 1, head_chunk});
    }
    return cases;
}
static ParameterGroup optimizer_of(const FsdpCase& k) {
    ParameterGroup g;
    g.sgd = k.precision != FP32;
    g.adamw.lr = k.precision == PREC_PURE_BF16 ? 1 : g.sgd ? 0.01f : 0.001f;  // 1: else rounding takes most steps away
    g.adamw.eps = 1e-5f;  // else a gradient that is rounding alone moves its weight by lr, either way
    return g;
}
static void train_both(WeightsCheck& check, const Communicator& c, const FsdpCase& k, uint64_t seed) {
    context.precision = k.precision, context.mode = k.mode, context.checkpoint = k.checkpoint;
    context.head_chunk = k.head_chunk;
    const ModelConfig config = {"lm", 64, 96, 3, 4, VOCABULARY};
    Trainer ours, whole;
    ours.c = whole.c = c;
    ours.scaler.scale = whole.scaler.scale = 1024;  // a power of two: unscaling is exact
    ours.f = fully_shard(c, lay_out_model(config).parameters, matmul_dtype());
    ours.model = sharded_model(config, *ours.f), whole.model = make_model(config);
    init_weights(*ours.f, seed), init_weights(whole.model, seed), make_gradients(whole.model);
    ParameterGroup reference = optimizer_of(k), &shard = ours.f->shard;
    shard.sgd = reference.sgd, shard.momentum = reference.momentum, shard.adamw = reference.adamw;
    reference.weights = whole.model.weights, reference.gradients = whole.model.gradients;
    whole.sharded.c = c;
    add_parameter_group(whole.sharded, reference);
    // Pure bf16: rounding turns last bits (2^-7 of a weight or less) and goes on from there. In 12 runs with 2 and 3
    // ranks no weight differed by more than 2e-3 and 2^-7 of itself; they moved by 8e-3 in the mean.
    const bool pure = k.precision == PREC_PURE_BF16;
    const double atol = pure ? 2e-3 : k.precision == FP32 ? 1e-6 : 1e-4, rtol = pure ? 1.0 / 64 : 1e-4;
    auto check_gradients = [&](StepPart part) {
        if (part != OPTIMIZER_STEP) { return; }
        for (const FsdpUnit& u : ours.f->units) {
            check.match = check.match && u.gradient.size() == u.part && u.gradient.dtype == weight_dtype();
        }
        check.same_bits = check.same_bits && same_bits_everywhere(c, ours.f->replicated_sum);
    };
    for (int step = 0; step < STEPS; step++) {
        const Batch all = random_batch(ROWS * c.world, POSITIONS, VOCABULARY, seed + step);
        std::vector<Batch> batches;
        for (int b = 0; b < k.batches; b++) {
            const int64_t rows = ROWS / k.batches, at = (c.rank * ROWS + b * rows) * POSITIONS;
            batches.push_back({view(all.tokens, at, {rows, POSITIONS}), view(all.targets, at, {rows, POSITIONS})});
        }
        train_step(ours, batches, check_gradients);
        train_step(whole, {all});
        visit_whole(*ours.f, shard.weights, false, [&](const Parameter& p, const Tensor& got) {
            compare(check, got, view(whole.model.weights, p.offset, p.shape), atol, rtol);
        });
    }
}

int cmd_fsdp(const Options& o) {
    return run_ranks(o, [&](const Communicator& c) {
        const int repetitions = o.quick ? 1 : 5;
        Table table{
            strprintf("fsdp: weights of FSDP against single-process training after each of %d steps, %s; World size: "
                      "%d, Batch size: %d, context length: %d; Transformer: d_model 64, 3 layers, decay 0.01, AdamW "
                      "with lr 0.001, SGD with momentum 0.9 and lr 0.01, in pure_bf16 1; backend %s",
                      STEPS, counted(repetitions, "repetition").c_str(), c.world, ROWS * c.world, POSITIONS,
                      c.backend.c_str()),
            {"Optimizer", "precision", "mode", "checkpoint", "head chunk", "passes", "max diff", "mean diff",
             "Parameters"}};
        std::vector<WeightsCheck> checks;
        for (const FsdpCase& k : fsdp_cases()) {
            WeightsCheck x{"Transformer", strprintf("%s, mode %s", name_of(k.precision), name_of(k.mode))};
            for (int i = 0; i < repetitions; i++) { train_both(x, c, k, o.seed + i); }
            checks.push_back(x);
            table.row(optimizer_of(k).sgd ? "SGD" : "AdamW", k.precision, k.mode,
                      k.checkpoint ? name_of_checkpoint(k.checkpoint) : "none",
                      k.head_chunk ? std::to_string(k.head_chunk) : "none", k.batches, strprintf("%.2e", x.max),
                      strprintf("%.2e", x.sum / x.n), x.match && x.same_bits ? "match" : "DIFFER");
        }
        print_checks(c, table, checks,
                     strprintf("FSDP on %s and of one process with the whole batch, after each of %d steps,",
                               counted(c.world, "rank").c_str(), STEPS));
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// fsdp_accounting: (a) what a rank holds at its peak with plain data parallel training, with the optimizer sharded, and
// with FSDP; (b) how long each unit's gather took, and how long the compute stream waited for it.

enum Way { PLAIN_DDP, SHARDED_OPTIMIZER, FULLY_SHARDED, EARLY_ADAMW };  // early: see begin_step's steps_in_backward
static const char* const way_names[] = {"DDP", "sharded optimizer", "FSDP", "FSDP, early AdamW"};

static Trainer make_trainer(Way way, const Communicator& c, const Options& o) {
    const ModelConfig config = configs_of(o)[0];
    if (way >= FULLY_SHARDED) { return fsdp_trainer(c, config, o.seed, way == EARLY_ADAMW); }
    Model model = random_model(config, o.seed);
    return way == PLAIN_DDP ? data_parallel_trainer(c, model, OVERLAPPED, 0) : sharded_trainer(c, model, ZERO1);
}

// Of the last step.
static std::vector<FsdpUnitTimes> unit_times(const Fsdp& f) {
    std::vector<FsdpUnitTimes> units(f.units.size());
    std::set<const Work*> seen;
    for (size_t k = 0; k < f.waits.size(); k++) {
        const FsdpWait& w = f.waits[k];
        FsdpUnitTimes& u = units[w.unit];
        const bool backward = k >= units.size();  // forward asks for each unit once
        u[backward ? WAIT_AGAIN : WAIT] += ms_of(w.got, w.asked);
        if (!seen.insert(w.work.get()).second) { continue; }
        u[backward ? GATHER_AGAIN : GATHER] += ms_of(w.work->end, w.work->begin);
    }
    for (const FsdpWait& w : f.reduce_waits) {  // the norms' unit is -1: theirs comes last, with the embedding's
        units[std::max(w.unit, 0)][REDUCE] += ms_of(w.got, w.asked);
    }
    return units;
}
static FsdpRun run_way(Way way, const Options& o, const Communicator& c) {
    FsdpRun r{way_names[way]};
    auto make = [&](const Communicator& planned) { return make_trainer(way, planned, o); };
    r.predicted = steps_peak(c.world, o, make, o.batch_size);
    if (r.predicted > room_of_each_rank(c)) {
        r.oom = r.predicted;
        return r;
    }
    Trainer t = make_trainer(way, c, o);
    reset_peak(context.device);
    r.units.resize(t.f ? t.f->units.size() : 0);
    std::vector<double> gathers, hidden;
    auto look_at_gathers = [&] {
        if (t.steps <= o.warmup[0]) { return; }
        const std::vector<FsdpUnitTimes> units = t.f ? unit_times(*t.f) : r.units;
        gathers.push_back(0), hidden.push_back(0);
        for (size_t u = 0; u < units.size(); u++) {
            for (int k = 0; k < UNIT_TIMES; k++) { r.units[u][k] += units[u][k] / o.steps; }
            if (u < 2) { continue; }
            gathers.back() += units[u][GATHER], hidden.back() += units[u][GATHER] - units[u][WAIT];
        }
    };
    r.step = stats_of(timed_steps(t, {batch_of(o, t.model.config, c.rank)}, o, r.way, look_at_gathers), TOTAL);
    r.gathers = stats_of(gathers), r.hidden = stats_of(hidden);
    r.use = memory_use(context.device);
    return r;
}

static double mib(double bytes) { return bytes / 1048576; }
static double activations_of(const MemoryUse& use) {  // and the rest
    const size_t* by = use.peak_by;
    return (double)(use.peak - by[PARAMETERS] - by[WEIGHT_COPIES] - by[GRADIENTS] - by[OPTIMIZER]);
}
static void print_tables(const std::string& caption, const std::vector<FsdpRun>& runs) {
    Table memory{
        caption + "; (a): rank 0 at its peak, MiB; early AdamW: each unit's step in backward",
        {"Way", "peak", "predicted", "parameters", "copies", "gradients", "optimizer", "activations", "step (ms)"}};
    for (const FsdpRun& r : runs) {
        auto cell = [&](double bytes) { return r.oom ? "" : strprintf("%.1f", mib(bytes)); };
        const size_t* by = r.use.peak_by;
        memory.row(r.way, r.oom ? oom_cell(r.oom) : cell(r.use.peak), strprintf("%.1f", mib(r.predicted)),
                   cell(by[PARAMETERS]), cell(by[WEIGHT_COPIES]), cell(by[GRADIENTS]), cell(by[OPTIMIZER]),
                   cell(activations_of(r.use)), r.oom ? "" : strprintf("%.2f", r.step.mean));
    }
    print(memory);
    const std::vector<FsdpUnitTimes>& units = runs[FULLY_SHARDED].units;
    Table times{
        "(b): each unit's all-gather, and how long the compute stream waited for it, ms; the same run, rank 0, mean of "
        "all steps",
        {"unit", "forward: gather", "wait", "backward: gather", "wait in backward", "wait for gradients"}};
    FsdpUnitTimes all{};
    auto row = [&](const std::string& name, const FsdpUnitTimes& u) {
        times.row(name);
        for (double ms : u) { times.rows.back().push_back(strprintf("%.3f", ms)); }
    };
    for (size_t i = 0; i < units.size(); i++) {
        row(i == 0 ? "embedding" : i + 1 == units.size() ? "lm_head" : strprintf("layer %zu", i - 1), units[i]);
        for (size_t k = 0; k < all.size(); k++) { all[k] += units[i][k]; }
    }
    row("all", all);
    if (!units.empty()) { print(times); }
}

// What FSDP saves against another way. `expected` and `gradients`: bytes that it saves, in all and of gradients alone,
// where a rank holds 1/N of everything at all times.
static void answer_saved(const char* name, const FsdpRun& other, const FsdpRun& fsdp, double expected,
                         double gradients) {
    const MemoryUse &a = other.use, &b = fsdp.use;
    auto saved_of = [&](Category k) { return (double)a.peak_by[k] - (double)b.peak_by[k]; };
    auto taken = [](double bytes) {
        return strprintf("%.1f MiB %s", mib(std::fabs(bytes)), bytes < 0 ? "less" : "more");
    };
    const double saved = (double)a.peak - (double)b.peak, more = saved - expected;
    answer("a",
           "FSDP takes %.1f MiB %s than %s. That is %.1f MiB %s than expected: it takes %s of gradients, %s of "
           "gathered units and weight copies, and %s of activations.",
           mib(std::fabs(saved)), saved < 0 ? "more" : "less", name, mib(std::fabs(more)), more < 0 ? "more" : "less",
           taken(gradients - saved_of(GRADIENTS)).c_str(), taken(-saved_of(WEIGHT_COPIES)).c_str(),
           taken(activations_of(b) - activations_of(a)).c_str());
}
void answer_fsdp_accounting(const std::vector<FsdpRun>& runs, int world, double psi, int bytes) {
    if (world == 1) { return answer("", "One rank has no other to share with, so there is nothing to compare."); }
    const double N = world, full = 4 * bytes * psi, split = (full + full / N) / 2, part = full / N;
    answer("a",
           "FSDP should save %.1f MiB against DDP and %.1f MiB against a sharded optimizer. Weights, gradients and two "
           "moments take %d Psi bytes with DDP, (%d + %d/N) Psi with the sharded optimizer and %d Psi/N with FSDP; Psi "
           "is %.0f, N %d.",
           mib(full - part), mib(split - part), 4 * bytes, 2 * bytes, 2 * bytes, 4 * bytes, psi, world);
    const FsdpRun& fsdp = runs[FULLY_SHARDED];
    for (int way : {PLAIN_DDP, SHARDED_OPTIMIZER}) {
        if (runs[way].oom || fsdp.oom) { continue; }
        const bool ddp = way == PLAIN_DDP;
        answer_saved(ddp ? "DDP" : "the sharded optimizer", runs[way], fsdp, (ddp ? full : split) - part,
                     bytes * (psi - psi / N));
    }
    for (int way : {PLAIN_DDP, SHARDED_OPTIMIZER, FULLY_SHARDED}) {
        if (runs[way].oom) { answer("a", "%s did not fit: %s.", runs[way].way, oom_cell(runs[way].oom).c_str()); }
    }
    if (fsdp.oom) { return; }
    answer("a",
           "FSDP holds two whole units and their gradients in buffers. Its own shards of all gradients are there only "
           "at backward's end, when activations are gone.");
    const bool in_time = level(fsdp.gathers, fsdp.hidden);
    const double waits = fsdp.gathers.mean - fsdp.hidden.mean;
    answer("b",
           "%s in time for forward: from layer 1 on they take %.3f ms, and the compute stream waits %.3f ms for them "
           "(%.1f %%). The gathers of the embedding and of layer 0 have no block to hide under: it waits %.3f and %.3f "
           "ms for them.",
           in_time ? "The gathers come" : "Not all gathers come", fsdp.gathers.mean, waits,
           100 * waits / fsdp.gathers.mean, fsdp.units[0][WAIT], fsdp.units[1][WAIT]);
}

int cmd_fsdp_accounting(const Options& typed) {
    return run_ranks(typed, [&](const Communicator& c) {
        Options o = typed;
        const ModelConfig config = choose_step(o, c);
        std::vector<FsdpRun> runs;
        for (Way way : {PLAIN_DDP, SHARDED_OPTIMIZER, FULLY_SHARDED, EARLY_ADAMW}) {
            if (way == EARLY_ADAMW && context.precision == PREC_FP16) { continue; }  // its step needs a norm first
            runs.push_back(run_way(way, o, c));
        }
        double psi = 0;
        for (const Parameter& p : lay_out_model(config).parameters) { psi += (double)count(p.shape); }
        if (c.rank == 0) {
            print_tables(caption_of(o, config, c), runs);
            answer_fsdp_accounting(runs, c.world, psi, (int)size_of(weight_dtype()));
        }
        auto ran = [](const FsdpRun& r) { return r.oom == 0; };
        if (std::none_of(runs.begin(), runs.end(), ran)) { fail("no way fits into a rank's memory"); }
    });
}
