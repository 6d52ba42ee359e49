// bench_fsdp.cu: the 2026 handout's problems on FSDP. `fsdp` checks it, `fsdp_accounting` measures its memory and time.
#include "commands.h"

// ---------------------------------------------------------------------------------------------------------------------
// fsdp: N ranks against one process that sees the whole batch. The models are the public test's, Embedding - RMSNorm -
// Linear - ReLU - RMSNorm - Linear - Linear, and a Transformer. Weights are equal but for rounding: the sum over the
// batch is taken in another order.

constexpr int ROWS = 10, POSITIONS = 8, VOCABULARY = 100, STEPS = 3;  // rows: of each rank

static Model lay_out_toy() {
    Model toy;
    toy.parameters = {{"head", {VOCABULARY, 64}, 0, {}, 3},
                      {"fc2", {64, 128}, 0, {}, 2},
                      {"norm2", {128}, 0, {}},
                      {"fc1", {128, 64}, 0, {}, 1},
                      {"norm1", {64}, 0, {}},
                      {"token_embeddings.weight", {VOCABULARY, 64}, 0, {}, 0}};
    int64_t end = 0;
    for (Parameter& p : toy.parameters) { p.offset = end, end += count(p.shape); }
    return toy;
}
static Tensor toy_logits(const Model& toy, const Tensor& tokens) {
    auto weight = [&](int i) { return toy.parameters[i].weight; };
    auto product = [&](int unit, const Tensor& x, int i) {
        begin_unit(toy, unit);
        return end_unit(toy, unit, linear(x, weight(i)));
    };
    begin_unit(toy, 0);
    Tensor x = end_unit(toy, 0, gather_rows(weight(5), tokens));
    x = cast(relu(product(1, add_rmsnorm(&x, Tensor(), weight(4), 1e-5f), 3)), F32);  // RMSNorm takes fp32
    x = product(2, add_rmsnorm(&x, Tensor(), weight(2), 1e-5f), 1);
    return product(3, x, 0);
}

// Of each sequence's last position only, as the public test's.
static Tensor toy_loss(const Model& toy, const Batch& batch) {
    auto last = [](const Tensor& by_position) { return contiguous(slice_last(by_position, POSITIONS - 1, 1)); };
    return cross_entropy(transpose(last(transpose(toy_logits(toy, batch.tokens), 1, 2)), 1, 2), last(batch.targets));
}

struct FsdpCase {
    bool toy;
    Precision precision;
    Mode mode;
    int checkpoint = 0, batches = 1, head_chunk = 0;  // batches: backwards per step, whose gradients add up
};
static std::vector<FsdpCase> fsdp_cases() {
    std::vector<FsdpCase> cases = {{true, FP32, FUSED}, {true, PREC_FP16, FUSED}};
    for (Precision precision : {FP32, PREC_BF16, PREC_FP16}) {
        for (Mode mode : {EAGER, FUSED}) { cases.push_back({false, precision, mode}); }
    }
    for (int checkpoint : {1, 2, (int)CHECKPOINT_FFN, (int)CHECKPOINT_HALF, (int)CHECKPOINT_NESTED}) {
        cases.push_back({false, FP32, FUSED, checkpoint});
    }
    cases.push_back({false, FP32, FUSED, 1, 2});
    if (fastest_flash(context.device, F32, 16)) { cases.push_back({false, FP32, FLASH}); }
    for (auto [checkpoint, head_chunk] : {std::pair(0, 0), {1, 0}, {0, 48}}) {
        cases.push_back({false, PREC_PURE_BF16, FUSED, checkpoint, 1, head_chunk});
    }
    return cases;
}
static ParameterGroup optimizer_of(const FsdpCase& k) {
    ParameterGroup g;
    g.sgd = k.toy || k.precision != FP32;
    g.momentum = k.toy ? 0 : 0.9f, g.adamw.weight_decay = k.toy ? 0 : 0.01f;
    g.adamw.lr = k.precision == PREC_PURE_BF16 ? 1 : g.sgd ? 0.01f : 0.001f;  // 1: else rounding takes most steps away
    g.adamw.eps = 1e-5f;  // else a gradient that is rounding alone moves its weight by lr, either way
    return g;
}
static void place_all(Model& model, const Place& place) {
    if (!model.config.name.empty()) { return place_weights(model, place); }
    for (Parameter& p : model.parameters) { p.weight = place(p, p.shape), model.slots.push_back(p.weight); }
}
// In one process: weights and gradients in an arena each.
static Model whole_model(Model model, uint64_t seed) {
    const Parameter& last = model.parameters.back();
    Shape all = {last.offset + count(last.shape)};
    model.weights = zeros(all, weight_dtype(), PARAMETERS);
    model.gradients = zeros(all, weight_dtype(), GRADIENTS);
    place_all(model, [&](const Parameter& p, const Shape& shape) {
        Tensor t = require_gradient(view(model.weights, p.offset, shape));
        t.gradient->is_parameter = true;
        t.gradient->value = view(model.gradients, p.offset, shape);
        return t;
    });
    init_weights(model, seed);
    return model;
}
// The gradients of scale times the mean loss over rows [first, first + rows) of a batch.
static void loss_and_gradients(Model& model, const Batch& batch, int64_t first, int64_t rows, float scale) {
    zero_gradients(model);
    auto part = [&](const Tensor& t) { return view(t, first * POSITIONS, {rows, POSITIONS}); };
    Batch ours = {part(batch.tokens), part(batch.targets)};
    Tensor loss = model.layers.empty() ? toy_loss(model, ours) : forward_to_loss(model, ours);
    backward_from_loss(model, loss, scale);
}

static void train_both(WeightsCheck& check, const Communicator& c, const FsdpCase& k, uint64_t seed) {
    context.precision = k.precision, context.mode = k.mode, context.checkpoint = k.checkpoint;
    context.head_chunk = k.head_chunk;
    Model ours = k.toy ? lay_out_toy() : lay_out_model({"lm", 64, 96, 3, 4, VOCABULARY});
    Model whole = whole_model(ours, seed);
    auto f = fully_shard(c, ours.parameters, matmul_dtype());
    place_all(ours, [&](const Parameter& p, const Shape& shape) { return place(*f, p, shape); });
    add_hooks(ours, *f);
    init_weights(*f, seed);
    ParameterGroup reference = optimizer_of(k);
    f->shard.sgd = reference.sgd, f->shard.momentum = reference.momentum, f->shard.adamw = reference.adamw;
    reference.weights = whole.weights, reference.gradients = whole.gradients;
    Optimizer optimizer{c, UNSHARDED, {}};
    add_parameter_group(optimizer, reference);
    LossScaler scaler;
    scaler.scale = 1024;  // a power of two: unscaling is exact
    const float scale = loss_scale_of(scaler);
    // Pure bf16: rounding turns last bits (2^-7 of a weight or less) and goes on from there. In 12 runs with 2 and 3
    // ranks no weight differed by more than 2e-3 and 2^-7 of itself; they moved by 8e-3 in the mean.
    const bool pure = k.precision == PREC_PURE_BF16;
    const double atol = pure ? 2e-3 : k.precision == FP32 ? 1e-6 : 1e-4, rtol = pure ? 1.0 / 64 : 1e-4;
    for (int step = 0; step < STEPS; step++) {
        begin_step(*f);
        int64_t rows = (int64_t)ROWS * c.world, of_rank = (int64_t)c.rank * ROWS, each = ROWS / k.batches;
        Batch batch = random_batch((int)rows, POSITIONS, VOCABULARY, seed + step);
        for (int b = 0; b < k.batches; b++) {
            loss_and_gradients(ours, batch, of_rank + b * each, each, scale / k.batches);
            finish_backward(*f);
        }
        for (const FsdpUnit& u : f->units) {
            check.match = check.match && u.gradient.size() == u.part && u.gradient.dtype == weight_dtype();
        }
        check.same_bits = check.same_bits && same_bits_everywhere(c, f->replicated_sum);
        optimizer_step(*f, scaler, 0);
        loss_and_gradients(whole, batch, 0, rows, scale);
        scale_in_place(whole.gradients, 1 / scale);
        optimizer_step(optimizer);
        visit_whole(*f, f->shard.weights, false, [&](const Parameter& p, const Tensor& got) {
            compare(check, got, view(whole.weights, p.offset, p.shape), atol, rtol);
        });
    }
}

int cmd_fsdp(const Options& o) {
    return run_ranks(o, [&](const Communicator& c) {
        const int repetitions = o.quick ? 1 : 5;
        Table table{strprintf("fsdp: weights of FSDP against single-process training after each of %d steps, %s; World "
                              "size: %d, Batch size: %d, context length: %d; toy: the public test's model, SGD, lr "
                              "0.01; Transformer: d_model 64, 3 layers, decay 0.01, AdamW with lr 0.001, SGD with "
                              "momentum 0.9 and lr 0.01, in pure_bf16 1; backend %s; %s",
                              STEPS, counted(std::to_string(repetitions), "repetition").c_str(), c.world,
                              ROWS * c.world, POSITIONS, c.backend.c_str(), origin(o).c_str()),
                    {"Model", "Optimizer", "precision", "mode", "checkpoint", "head chunk", "passes", "max diff",
                     "mean diff", "Parameters"}};
        std::vector<WeightsCheck> checks;
        for (const FsdpCase& k : fsdp_cases()) {
            WeightsCheck x{k.toy ? "toy" : "Transformer",
                           strprintf("%s, mode %s", name_of(k.precision), name_of(k.mode))};
            for (int i = 0; i < repetitions; i++) { train_both(x, c, k, o.seed + i); }
            checks.push_back(x);
            table.row(x.model, optimizer_of(k).sgd ? "SGD" : "AdamW", k.precision, k.mode,
                      k.checkpoint ? name_of_checkpoint(k.checkpoint) : "none",
                      k.head_chunk ? std::to_string(k.head_chunk) : "none", k.batches, strprintf("%.2e", x.max),
                      strprintf("%.2e", x.sum / x.n), x.match && x.same_bits ? "match" : "DIFFER");
        }
        print_checks(c, table, checks,
                     strprintf("FSDP on %s and of one process with the whole batch, after each of %d steps,",
                               counted(std::to_string(c.world), "rank").c_str(), STEPS));
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// fsdp_accounting: (a) what a rank holds at its peak with plain data parallel training, with the optimizer sharded, and
// with FSDP; (b) how long each unit's gather took, and how long the compute stream waited for it.

enum Way { PLAIN_DDP, SHARDED_OPTIMIZER, FULLY_SHARDED, EARLY_ADAMW };  // early: see begin_step's steps_in_backward
static const char* const way_names[] = {"DDP", "sharded optimizer", "FSDP", "FSDP, early AdamW"};

struct WayTrainer {  // one way, with all that it holds
    Way way;
    Model model;
    std::unique_ptr<DataParallel> d;
    Optimizer optimizer;
    std::unique_ptr<Fsdp> f;
    Batch batch;
    LossScaler scaler;
};
static std::unique_ptr<WayTrainer> make_trainer(Way way, const Communicator& c, const Options& o) {
    auto made = std::make_unique<WayTrainer>();
    WayTrainer& t = *made;
    const ModelConfig config = configs_of(o)[0];
    t.way = way;
    t.batch = random_batch(o.batch_size, o.context_length, config.vocab_size, o.seed + 1 + c.rank);
    if (way >= FULLY_SHARDED) {
        t.f = fully_shard(c, lay_out_model(config).parameters, matmul_dtype());
        t.model = sharded_model(config, *t.f);
        init_weights(*t.f, o.seed);
        choose_form(*t.f);
        return made;
    }
    const bool plain = way == PLAIN_DDP;
    t.model = make_model(config);
    init_weights(t.model, o.seed);
    if (plain) { choose_form(t.model), make_optimizer_state(t.model); }
    make_gradients(t.model);
    t.d = data_parallel(c, plain ? OVERLAPPED : NO_SYNC, 0, t.model.weights, t.model.gradients, t.model.parameters,
                        t.model.slots);
    t.optimizer = {c, ZERO1, {}};
    if (!plain) { add_parameter_group(t.optimizer, {t.model.weights, t.model.gradients}); }
    return made;
}
static void train_step(WayTrainer& t) {
    if (t.f) {
        begin_step(*t.f, t.way == EARLY_ADAMW);
        forward_backward(t.model, t.batch, loss_scale_of(t.scaler));
        finish_backward(*t.f);
        optimizer_step(*t.f, t.scaler, 0);
        return;
    }
    begin_step(*t.d);
    forward_backward(t.model, t.batch, loss_scale_of(t.scaler));
    finish_gradient_synchronization(*t.d);
    if (t.way == PLAIN_DDP) {
        optimizer_step(t.model, AdamW(), t.scaler, 0);
        return;
    }
    auto norm = [&] {  // of sums that are not averaged yet: only the ranks together know whether one is finite
        double own = gradient_norm(t.model);
        return context.device == META ? own : norm_over_ranks(t.optimizer.c, own * own);
    };
    guarded_step(t.scaler, 0, norm, [&](float gradient_scale) { optimizer_step(t.optimizer, gradient_scale); });
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
    r.predicted = planned_peak([&] {
        Communicator planned;
        planned.world = c.world;
        auto t = make_trainer(way, planned, o);
        train_step(*t), train_step(*t);
    });
    if (!fits_everywhere(c, r.predicted)) {
        r.oom = r.predicted;
        return r;
    }
    reset_peak(context.device);
    auto t = make_trainer(way, c, o);
    r.units.resize(t->f ? t->f->units.size() : 0);
    std::vector<double> times, gathers, hidden;
    for (int i = -o.warmup[0]; i < o.steps; i++) {
        barrier(c);
        double start = now_ms();
        train_step(*t);
        synchronize();
        if (c.rank == 0) { progress("%s: %d of %d", r.way, i + 1, o.steps); }
        if (i < 0) { continue; }
        times.push_back(now_ms() - start);
        const std::vector<FsdpUnitTimes> units = t->f ? unit_times(*t->f) : r.units;
        gathers.push_back(0), hidden.push_back(0);
        for (size_t u = 0; u < units.size(); u++) {
            for (int k = 0; k < UNIT_TIMES; k++) { r.units[u][k] += units[u][k] / o.steps; }
            if (u < 2) { continue; }
            gathers.back() += units[u][GATHER], hidden.back() += units[u][GATHER] - units[u][WAIT];
        }
    }
    r.step = stats_of(times), r.gathers = stats_of(gathers), r.hidden = stats_of(hidden);
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
        "(b): each unit's all-gather, and how long the compute stream waited for it; the same "
        "run, rank 0, mean of all steps",
        {"unit", "forward: gather (ms)", "wait (ms)", "backward: gather (ms)", "wait in backward (ms)",
         "wait for gradients (ms)"}};
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
    const double saved = (double)a.peak - (double)b.peak, more = saved - expected;
    answer("a",
           "FSDP takes %.1f MiB %s than %s. It saves %.1f MiB %s than expected: %+.1f of gradients, %+.1f of gathered "
           "units and weight copies, %+.1f of activations.",
           mib(std::fabs(saved)), saved < 0 ? "more" : "less", name, mib(std::fabs(more)), more < 0 ? "less" : "more",
           mib(saved_of(GRADIENTS) - gradients), mib(saved_of(WEIGHT_COPIES)),
           mib(activations_of(a) - activations_of(b)));
}
void answer_fsdp_accounting(const std::vector<FsdpRun>& runs, int world, double psi, int bytes) {
    if (world == 1) { return answer("", "One rank has no other to share with, so there is nothing to compare."); }
    const double N = world, full = 4 * bytes * psi, split = (full + full / N) / 2, part = full / N;
    answer("a",
           "FSDP should save %.1f MiB against DDP and %.1f MiB against a sharded optimizer. Weights, gradients and two "
           "moments take %d Psi bytes with DDP, (%d + %d/N) Psi with the sharded optimizer and %d Psi/N with FSDP; "
           "Psi is %.0f, N %d.",
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
           "FSDP holds two whole units and their gradients in buffers. All of its parts of gradients are there at "
           "backward's end only, when activations are gone.");
    const bool in_time = level(fsdp.gathers, fsdp.hidden);
    const double waits = fsdp.gathers.mean - fsdp.hidden.mean;
    answer("b",
           "%s in time for forward: from layer 1 on they take %.3f ms, and the compute stream waits %.3f ms for them "
           "(%.1f %%). The gathers of the embedding and of layer 0 have no block to hide under: it waits %.3f and "
           "%.3f ms for them.",
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
