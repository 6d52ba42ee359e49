// leaderboard.cu: the 2026 handout's leaderboard: one training step of an 8.1B model on 32,768 tokens, all in bf16. The
// model, its loss and AdamW are the other commands' own; here are the defaults, the timing and the tables.
#include "commands.h"
#include <algorithm>
#include <array>

// Without what runs again. Forward has a product for each weight and backward two; of attention's scores the causal
// half is needed, by two products in forward and five in backward.
static double step_flops(const ModelConfig& c, double B, double T) {
    return 6 * B * T * matmul_weights(c) + 7 * B * T * T * c.d_model * c.num_layers;
}

// EXPOSED: what the compute stream waits for other ranks, in any of the first three, which do not count it.
enum Part { BLOCKS, HEAD, BACKWARD, OPTIMIZER_STEP, EXPOSED, PARTS };
static const char* const part_names[PARTS] = {"forward, blocks", "head and loss", "backward", "optimizer",
                                              "exposed communication"};
struct Moment {
    Part part;
    Mark begin;
};

struct LeaderboardRun : Attempt {
    bool raised = false;  // the default batch is too small for the ranks
    int warmup = 0;       // steps that were not timed, and followed the first two
    size_t peak = 0;      // bytes, measured
    double first_loss = NAN, last_loss = NAN;
    Stats step{}, parts[PARTS]{};
    std::vector<Slice> last_step;  // for --plot
};
struct LeaderboardTrainer {
    Communicator c;
    Model model;
    std::unique_ptr<Fsdp> f;     // null: there is one rank
    std::vector<Batch> batches;  // its part of the whole one, cut for the backwards
    LossScaler scaler;
    std::vector<Moment> at;  // of the step before: its parts in order, for each backward again
    Mark end;
};
static std::unique_ptr<LeaderboardTrainer> make_trainer(const Communicator& c, const Plan& p) {
    const Options& o = p.o;
    const ModelConfig& config = p.configs[0];
    auto made = std::make_unique<LeaderboardTrainer>();
    LeaderboardTrainer& t = *made;
    t.c = c;
    if (c.world > 1) {
        t.f = fully_shard(c, lay_out_model(config).parameters, matmul_dtype(), F32);
        t.model = sharded_model(config, *t.f);
        init_weights(*t.f, o.seed);
    } else {
        t.model = random_model(config, o.seed);
        make_optimizer_state(t.model);
        if (o.grad_accumulation > 1) { make_gradients(t.model); }
    }
    Batch all = random_batch(o.batch_size, o.context_length, config.vocab_size, o.seed);
    int64_t parts = o.grad_accumulation, rows = o.batch_size / (c.world * parts), T = o.context_length;
    for (int64_t k = 0; k < parts; k++) {
        auto part = [&](const Tensor& x) { return view(x, (c.rank * parts + k) * rows * T, {rows, T}); };
        t.batches.push_back({part(all.tokens), part(all.targets)});
    }
    return made;
}
// Returns the mean loss over the sequences of each of this rank's backwards.
static std::vector<Tensor> run_step(LeaderboardTrainer& t) {
    t.at.clear();
    auto begin = [&](Part part) { t.at.push_back({part, mark()}); };
    auto hook = t.model.pre_forward;
    t.model.pre_forward = [&](int unit) {
        if (unit == t.model.config.num_layers + 1) { begin(HEAD); }
        if (hook) { hook(unit); }
    };
    const float scale = loss_scale_of(t.scaler) / t.batches.size();
    std::vector<Tensor> losses;
    for (const Batch& batch : t.batches) {
        begin(BLOCKS);
        const bool first = losses.empty();
        if (t.f && first) { begin_step(*t.f); }
        auto pass = first || t.f ? forward_backward : add_gradients;
        losses.push_back(pass(t.model, batch, scale, [&] { begin(BACKWARD); }));
        if (t.f) { finish_backward(*t.f); }
    }
    begin(OPTIMIZER_STEP);
    t.f ? optimizer_step(*t.f, t.scaler, 0) : optimizer_step(t.model, AdamW(), t.scaler, 0);
    t.end = mark();
    t.model.pre_forward = hook;
    synchronize();
    return losses;
}
static double whole_loss(const LeaderboardTrainer& t, const std::vector<Tensor>& losses) {
    double sum = 0;
    for (const Tensor& loss : losses) {
        if (t.f) { wait(t.c, all_reduce(t.c, loss, AVERAGE)); }
        sum += to_doubles(loss)[0];
    }
    return sum / losses.size();
}
static double step_ms(const LeaderboardTrainer& t) { return ms_of(t.end, t.at[0].begin); }
static std::array<double, PARTS> parts_of(const LeaderboardTrainer& t) {
    std::array<double, PARTS> ms{};
    for (size_t i = 0; i < t.at.size(); i++) {
        ms[t.at[i].part] += ms_of(i + 1 < t.at.size() ? t.at[i + 1].begin : t.end, t.at[i].begin);
    }
    auto move = [&](const FsdpWait& w) {
        size_t i = t.at.size() - 1;
        while (i > 0 && ms_of(w.asked, t.at[i].begin) < 0) { i--; }
        double waited = ms_of(w.got, w.asked);
        ms[t.at[i].part] -= waited, ms[EXPOSED] += waited;
    };
    if (!t.f) { return ms; }
    for (const FsdpWait& w : t.f->waits) { move(w); }
    for (const FsdpWait& w : t.f->reduce_waits) { move(w); }
    return ms;
}
static std::vector<Slice> slices_of(const LeaderboardTrainer& t) {
    FsdpStep step{{}, t.end};
    for (const Moment& m : t.at) {
        step.passes.push_back({m.part == OPTIMIZER_STEP ? OPTIMIZER_PART
                               : m.part == BACKWARD     ? BACKWARD_PART
                                                        : FORWARD_PART,
                               m.begin});
    }
    return step.slices(t.f.get());
}
static Prediction planned_peak(const Communicator& c, const Plan& p) {
    Communicator planned;
    planned.world = c.world;
    return planned_peak([&] {
        auto t = make_trainer(planned, p);
        reset_peak(META);
        for (int i = 0; i < 2; i++) { run_step(*t); }  // FSDP has its moments from the first one's end on
    });
}
// As do_bench counts: a step is timed for an estimate, after a first one, and then as many follow as fill the two
// times, on all ranks as many as on rank 0.
static void measure(LeaderboardRun& r, const Communicator& c, const Plan& p) {
    const Options& o = p.o;
    auto t = make_trainer(c, p);
    reset_peak(context.device);
    r.first_loss = whole_loss(*t, run_step(*t));
    run_step(*t);
    double estimate = step_ms(*t);
    if (t->f) { estimate = std::stod(gather_text(c, strprintf("%.17g", estimate))[0]); }
    auto that_fill = [&](double seconds) { return (int)std::min(1e6, seconds * 1e3 / estimate); };
    r.warmup = o.has("warmup") ? o.warmup[0] : that_fill(o.warmup_time);
    const int steps = o.has("steps") ? o.steps : std::max(1, that_fill(o.rep_time));
    std::vector<double> all, parts[PARTS];
    for (int i = -r.warmup; i < steps; i++) {
        std::vector<Tensor> losses = run_step(*t);
        if (c.rank == 0) {
            progress("%s: step %d of %d, %.0f ms", p.configs[0].name.c_str(), i + 1 + r.warmup, r.warmup + steps,
                     step_ms(*t));
        }
        if (i + 1 == steps) { r.last_loss = whole_loss(*t, losses); }
        if (i < 0) { continue; }
        all.push_back(step_ms(*t));
        std::array<double, PARTS> of_step = parts_of(*t);
        for (int k = 0; k < PARTS; k++) { parts[k].push_back(of_step[k]); }
    }
    r.last_step = slices_of(*t);
    r.step = stats_of(all);
    for (int k = 0; k < PARTS; k++) { r.parts[k] = stats_of(parts[k]); }
    r.peak = memory_use(context.device).peak;
    if (!t->f) { return; }
    for (const std::string& peak : gather_text(c, std::to_string(r.peak))) {
        r.peak = std::max<size_t>(r.peak, std::stoull(peak));
    }
}

static bool is_small(const Options& o, const Communicator& c) {
    return context.device == CPU || c.backend == "gloo" || o.quick;
}
static Plan plan_of_step(const Options& o, const Communicator& c) {
    Plan p{o};
    bool cpu = context.device == CPU;
    for (auto [number, seconds] : {std::pair("warmup", "warmup_time"), {"steps", "rep_time"}}) {
        if (o.has(number) && o.has(seconds)) { usage_error("--%s: takes no --%s beside it", seconds, number); }
    }
    if (!o.has("checkpoint")) { context.checkpoint = 1; }
    if (!o.has("grad_accumulation")) { p.o.grad_accumulation = 1; }
    if (is_small(o, c)) {
        p.shrink_size();
        p.shrink("batch_size", &Options::batch_size, c.world * p.o.grad_accumulation);
        p.shrink("context_length", &Options::context_length, cpu ? 64 : 1024);
        p.shrink("head_chunk", &Options::head_chunk, cpu ? 48 : 512);
        if (!o.has("warmup")) { p.shrink("warmup_time", &Options::warmup_time, 0.0); }
        if (!o.has("steps")) { p.shrink("rep_time", &Options::rep_time, o.quick ? 0.1 : 5.0); }
    }
    if (!o.has("batch_size") && p.o.batch_size % c.world != 0) { p.o.batch_size = c.world; }
    if (p.o.batch_size % c.world != 0) {
        usage_error("--batch_size: got %d, takes a multiple of %d, the number of ranks", p.o.batch_size, c.world);
    }
    if (p.o.batch_size / c.world % p.o.grad_accumulation != 0) {
        usage_error("--grad_accumulation: got %d, takes what divides a rank's %d sequences", p.o.grad_accumulation,
                    p.o.batch_size / c.world);
    }
    context.head_chunk = p.o.head_chunk;
    p.choose_models();
    context.precision = p.precisions[0], context.mode = p.modes[0];
    context.each_launch = true;  // so that events can stand between the parts; a step's kernels hide the launches
    return p;
}

// Where no --checkpoint was typed: what runs least again, of what fits. What --recompute runs again is short kernels,
// so it comes before any feed-forward; one sequence per backward costs only that the gradients add up. A block that
// runs again as a whole (1) costs most, and needs least. A 30th more than it needs is asked for, for NCCL, cuBLAS and
// the gaps between buffers. most: bytes that it may need.
struct Setting {
    bool recompute;
    int checkpoint, parts;
};
static void choose_setting(Plan& p, const Communicator& c, size_t most) {
    auto take = [&](const Setting& s) {
        context.recompute = s.recompute || p.o.recompute, context.checkpoint = s.checkpoint;
        if (!p.o.has("grad_accumulation")) { p.o.grad_accumulation = s.parts; }
    };
    auto fits = [&](const Setting& s) {
        take(s);
        const size_t needs = planned_peak(c, p).bytes;
        return needs <= most && fits_everywhere(c, needs + needs / 30);
    };
    const int rows = p.o.batch_size / c.world, layers = p.configs[0].num_layers;
    for (const Setting& s : {Setting{false, 0, 1}, {true, 0, 1}, {false, 0, rows}, {true, 0, rows}}) {
        if (fits(s)) { return; }
    }
    auto some = [&](int ffns) {
        return Setting{true, ffns < layers ? CHECKPOINT_SOME_FFN + ffns : CHECKPOINT_FFN, rows};
    };
    int low = 1, high = layers + 1;  // the peak falls with the number of feed-forwards that run again
    while (low < high) {
        int middle = (low + high) / 2;
        fits(some(middle)) ? high = middle : low = middle + 1;
    }
    take(low <= layers ? some(low) : Setting{false, 1, 1});
}

static void print_tables(const Plan& p, const Communicator& ranks, const LeaderboardRun& r) {
    const Options& o = p.o;
    const ModelConfig& c = p.configs[0];
    const bool gpu = context.device == CUDA;
    const double flops = step_flops(c, o.batch_size, o.context_length), rate = flops / r.step.mean / 1e9;
    const double tokens = (double)o.batch_size * o.context_length, mib = 1 << 20;
    auto if_ran = [&](const char* format, double value) { return r.ran ? strprintf(format, value) : ""; };
    std::string who = ranks.world == 1
                          ? "one rank"
                          : strprintf("%d ranks; FSDP over %s, times of rank 0, the largest peak of a rank",
                                      ranks.world, ranks.backend.c_str());
    if (r.raised) { who += strprintf("; batch raised to %d, so that each rank has a sequence", o.batch_size); }
    const double peak = dense_peak(context.precision);
    if (!std::isnan(peak)) {
        who += "; MFU of " + (ranks.world == 1 ? "" : strprintf("%d x ", ranks.world)) + strprintf("%g TFLOP/s", peak);
    }
    std::string counted = r.ran ? strprintf("%d + 2 warmup, %d step", r.warmup, r.step.n) : "not run";
    if (r.ran && !o.has("warmup")) { counted += strprintf("; warmup_time %g s", o.warmup_time); }
    if (r.ran && !o.has("steps")) { counted += strprintf("; rep_time %g s", o.rep_time); }
    const std::string backwards =
        o.grad_accumulation > 1 ? strprintf(" in %d backward passes", o.grad_accumulation * ranks.world) : "";
    Table table{
        strprintf(
            "leaderboard: %s, %d layers, d_model %d, d_ff %d, %d heads, vocabulary %d, batch %d%s, context length "
            "%d, causal; precision %s, mode %s; %.4g FLOP per step without what runs again; "
            "%s; %s; %s",
            c.name.c_str(), c.num_layers, c.d_model, c.d_ff, c.num_heads, c.vocab_size, o.batch_size, backwards.c_str(),
            o.context_length, name_of(context.precision), caption_of(context.mode).c_str(), flops, who.c_str(),
            counted.c_str(), p.origin().c_str()),
        {"size", "mean ms", "median ms", "min ms", "max ms", "tokens/s", "TFLOP/s", "MFU %", "predicted peak MiB",
         "peak MiB", "first loss", "last loss"},
        {{c.name, r.cell(strprintf("%.1f", r.step.mean)), if_ran("%.1f", r.step.median), if_ran("%.1f", r.step.min),
          if_ran("%.1f", r.step.max), if_ran("%.0f", tokens / r.step.mean * 1e3), if_ran("%.4g", rate),
          r.ran ? percent_of_peak(rate / ranks.world, context.precision) : "", strprintf("%.1f", r.needs.bytes / mib),
          if_ran("%.1f", r.peak / mib), if_ran("%.5f", r.first_loss), if_ran("%.5f", r.last_loss)}}};
    print(table, o.format);
    if (!r.ran) { return; }
    Table parts{
        strprintf("leaderboard, the parts of a step: %s, by %s; with a head chunk its gradients are made in head "
                  "and loss; %s",
                  c.name.c_str(), gpu ? "events between them" : "the clock", p.origin().c_str()),
        {"part", "mean ms", "share %"},
        {}};
    for (int k = 0; k < (ranks.world == 1 ? EXPOSED : PARTS); k++) {
        parts.rows.push_back({part_names[k], strprintf("%.2f", r.parts[k].mean),
                              strprintf("%.1f", 100 * r.parts[k].mean / r.step.mean)});
    }
    print(parts, o.format);
}

static void leaderboard(const Options& o, const Communicator& c) {
    Plan p = plan_of_step(o, c);
    LeaderboardRun r;
    r.raised = p.o.batch_size > o.batch_size;
    p.shrink_to_fit(c.world * p.o.grad_accumulation,
                    [&](const Plan& smaller) { return fits_everywhere(c, planned_peak(c, smaller).bytes); });
    const bool chooses = !o.has("checkpoint") && !is_small(o, c);
    double seconds = (p.o.has("warmup") ? 0 : p.o.warmup_time) + (p.o.has("steps") ? 0 : p.o.rep_time);
    double steps = 2 + (p.o.has("warmup") ? p.o.warmup[0] : 0) + (p.o.has("steps") ? p.o.steps : 1);
    // On one rank a setting that does not fit after all, because of the gaps, gives way to one that needs less.
    for (size_t most = SIZE_MAX; !r.ran; most = r.needs.bytes / 30 * 29) {
        if (chooses) { choose_setting(p, c, most); }
        const Prediction needs = planned_peak(c, p);
        if (needs.bytes > most) { break; }  // the one that needs least has run out of memory
        r.needs = needs;
        std::string row = ranks_of(c) + row_of(p.configs[0], p.o.batch_size / c.world, p.o.context_length, STEP);
        if (p.o.grad_accumulation > 1) { row += strprintf(", in %d backward passes", p.o.grad_accumulation); }
        const bool fits = fits_everywhere(c, r.needs.bytes);
        if (only_planned(row, r.needs, fits, passes_of(c, steps / 2), seconds)) { return; }  // two steps were planned
        if (c.world == 1) {
            r.run(row, steps, [&] { measure(r, c, p); });
        } else if (fits) {
            measure(r, c, p);  // a rank without the room ends: the others would wait for it
            r.ran = true;
        }
        if (!chooses || c.world > 1 || !fits) { break; }
    }
    if (!o.plot.empty() && r.ran) {
        plot_fsdp_step(c, o.plot, r.last_step, "a step of " + p.configs[0].name, "leaderboard; " + p.origin());
    } else if (!o.plot.empty() && c.rank == 0) {
        note("--plot %s: left out: no step ran", o.plot.c_str());
    }
    if (c.rank == 0) { print_tables(p, c, r); }
}
int cmd_leaderboard(const Options& typed) {
    Options o = typed;
    if (!o.has("nproc")) { o.nproc = o.device != "cpu" && why_not("nccl", CUDA, 2).empty() ? 2 : 1; }
    if (is_rank() || o.nproc > 1) {
        return run_ranks(o, [&](const Communicator& c) { leaderboard(o, c); });
    }
    context.device = choose_device(o.device);
    leaderboard(o, Communicator());
    return 0;
}
