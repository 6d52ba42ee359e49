// leaderboard.cu: the 2026 handout's leaderboard: one training step of an 8.1B model on 32,768 tokens, all in bf16. The
// model, its loss and AdamW are the other commands' own; here are what runs again, the timing and the tables.
#include "commands.h"
#include <algorithm>

// Without what runs again. Forward has a product for each weight and backward two; of attention's scores the causal
// half is needed, by two products in forward and five in backward.
static double step_flops(const ModelConfig& c, double B, double T) {
    return 6 * B * T * matmul_weights(c) + 7 * B * T * T * c.d_model * c.num_layers;
}

static const char* const part_names[LEADERBOARD_PARTS] = {"forward, blocks", "head and loss", "backward", "optimizer",
                                                          "exposed communication"};
struct LeaderboardTrainer {
    Model model;
    std::unique_ptr<Fsdp> f;     // null: there is one rank
    std::vector<Batch> batches;  // its part of the whole one, cut for the backwards
    LossScaler scaler;
    std::vector<std::pair<int, Mark>> at;  // of the step before: where its parts begin, for each backward again
    Mark end;
};
static std::unique_ptr<LeaderboardTrainer> make_trainer(const Communicator& c, const Options& o) {
    auto made = std::make_unique<LeaderboardTrainer>();
    LeaderboardTrainer& t = *made;
    const ModelConfig config = configs_of(o)[0];
    if (c.world > 1) {
        t.f = fully_shard(c, lay_out_model(config).parameters, matmul_dtype());
        t.model = sharded_model(config, *t.f);
        init_weights(*t.f, o.seed);
    } else {
        t.model = random_model(config, o.seed);
        make_optimizer_state(t.model);
        if (o.grad_accumulation > 1) { make_gradients(t.model); }
    }
    t.model.pre_forward = [&t, head = config.num_layers + 1, gather = t.model.pre_forward](int unit) {
        if (unit == head) { t.at.push_back({HEAD_AND_LOSS, mark()}); }
        if (gather) { gather(unit); }
    };
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
    auto begin = [&](int part) { t.at.push_back({part, mark()}); };
    const float scale = loss_scale_of(t.scaler) / t.batches.size();
    std::vector<Tensor> losses;
    for (const Batch& batch : t.batches) {
        begin(FORWARD_BLOCKS);
        const bool first = losses.empty();
        if (t.f && first) { begin_step(*t.f); }
        auto pass = first || t.f ? forward_backward : add_gradients;
        losses.push_back(pass(t.model, batch, scale, [&] { begin(BACKWARD); }));
        if (t.f) { finish_backward(*t.f); }
    }
    begin(OPTIMIZER_STEP);
    t.f ? optimizer_step(*t.f, t.scaler, 0) : optimizer_step(t.model, AdamW(), t.scaler, 0);
    t.end = mark();
    synchronize();
    return losses;
}
static double whole_loss(const LeaderboardTrainer& t, const std::vector<Tensor>& losses) {
    double sum = 0;
    for (const Tensor& loss : losses) {
        if (t.f) { wait(t.f->c, all_reduce(t.f->c, loss, AVERAGE)); }
        sum += to_doubles(loss)[0];
    }
    return sum / losses.size();
}
// In ms. What the compute stream waits for other ranks, in any of the first three parts, is exposed communication
// instead.
static std::array<double, LEADERBOARD_PARTS> parts_of(const LeaderboardTrainer& t) {
    std::array<double, LEADERBOARD_PARTS> ms{};
    for (size_t i = 0; i < t.at.size(); i++) {
        ms[t.at[i].first] += ms_of(i + 1 < t.at.size() ? t.at[i + 1].second : t.end, t.at[i].second);
    }
    if (!t.f) { return ms; }
    for (const auto* waits : {&t.f->waits, &t.f->reduce_waits}) {
        for (const FsdpWait& w : *waits) {
            size_t i = t.at.size() - 1;
            while (i > 0 && ms_of(w.asked, t.at[i].second) < 0) { i--; }
            const double waited = ms_of(w.got, w.asked);
            ms[t.at[i].first] -= waited, ms[EXPOSED] += waited;
        }
    }
    return ms;
}
size_t predicted_peak(const Options& o, int world) {
    Communicator planned;
    planned.world = world;
    return planned_peak([&] {
        auto t = make_trainer(planned, o);
        reset_peak(META);
        run_step(*t), run_step(*t);  // FSDP has its moments from the first one's end on
    });
}

// What costs least comes first; in brackets per block and sequence of 8B on an H200. The norms and SwiGLU run again
// (0.8 ms); one sequence per backward, so that gradients add up; then feed-forwards (9 ms each); then whole blocks (24
// ms more). The peak falls in a straight line with the number of those, so the ends of the line tell how many.
void choose_what_runs_again(Options& o, int world, double room) {
    auto peak = [&](bool recompute, int checkpoint) {
        context.recompute = recompute || o.recompute, context.checkpoint = checkpoint;
        return (double)predicted_peak(o, world);
    };
    const int rows = o.batch_size / world, L = configs_of(o)[0].num_layers;
    for (int parts : {1, rows}) {
        if (!o.has("grad_accumulation")) { o.grad_accumulation = parts; }
        for (bool recompute : {false, true}) {
            if (peak(recompute, 0) <= room) { return; }
        }
    }
    const double nothing = peak(true, 0), ffns = peak(true, CHECKPOINT_FFN), blocks = peak(true, 1);
    auto enough = [&](double from, double to) { return (int)std::ceil(L * (from - room) / (from - to)); };
    if (ffns <= room) {
        context.checkpoint = CHECKPOINT_SOME_FFN + enough(nothing, ffns);
    } else if (blocks <= room) {
        context.checkpoint = CHECKPOINT_SOME_BLOCKS + enough(ffns, blocks);
    }
}
// Bytes that each rank has for a step. A thirtieth of what a step needs is left for NCCL, cuBLAS and the gaps between
// buffers.
static double room_of(const Communicator& c) {
    const int sharing = context.device == CUDA ? (c.local_world - 1) / std::max(1, cuda_devices()) + 1 : c.local_world;
    double least = INFINITY;
    for (const std::string& bytes : gather_text(c, std::to_string(available_memory(context.device) / sharing))) {
        least = std::min(least, std::stod(bytes));
    }
    return least * 30 / 31;
}

static void measure(LeaderboardRun& r, const Communicator& c, const Options& o) {
    auto t = make_trainer(c, o);
    reset_peak(context.device);
    std::vector<double> all, parts[LEADERBOARD_PARTS];
    for (int i = -o.warmup[0]; i < o.steps; i++) {
        std::vector<Tensor> losses = run_step(*t);
        const double ms = ms_of(t->end, t->at[0].second);
        if (c.rank == 0) { progress("leaderboard: step %d of %d, %.0f ms", i + 1, o.steps, ms); }
        if (i == -o.warmup[0]) { r.first_loss = whole_loss(*t, losses); }
        if (i + 1 == o.steps) { r.last_loss = whole_loss(*t, losses); }
        if (i < 0) { continue; }
        all.push_back(ms);
        const auto of_step = parts_of(*t);
        for (int k = 0; k < LEADERBOARD_PARTS; k++) { parts[k].push_back(of_step[k]); }
    }
    r.step = stats_of(all);
    for (int k = 0; k < LEADERBOARD_PARTS; k++) { r.parts[k] = stats_of(parts[k]).mean; }
    for (const std::string& peak : gather_text(c, std::to_string(memory_use(context.device).peak))) {
        r.peak = std::max<size_t>(r.peak, std::stoull(peak));
    }
}

static void print_tables(const LeaderboardRun& r, const std::string& caption) {
    auto cell = [&](const char* format, double value) { return r.oom ? "" : strprintf(format, value); };
    const double rate = r.tflops();
    Table table{"leaderboard: " + caption,
                {"mean ms", "std ms", "median ms", "tokens/s", "TFLOP/s", "MFU %", "predicted MiB", "peak MiB",
                 "first loss", "last loss"}};
    table.row(r.oom ? oom_cell(r.oom) : cell("%.1f", r.step.mean), cell("%.1f", r.step.std),
              cell("%.1f", r.step.median), cell("%.0f", r.tokens / r.step.mean * 1e3), cell("%.4g", rate),
              r.oom ? "" : percent_of_peak(rate / r.world, context.precision),
              strprintf("%.1f", r.predicted / 1048576.0), cell("%.1f", r.peak / 1048576.0), cell("%.5f", r.first_loss),
              cell("%.5f", r.last_loss));
    print(table);
    if (r.oom) { return; }
    Table parts{"leaderboard, the parts of a step; with a head chunk its gradients are made in head and loss",
                {"part", "mean ms", "share %"}};
    for (int k = 0; k < (r.world == 1 ? EXPOSED : LEADERBOARD_PARTS); k++) {
        parts.row(part_names[k], strprintf("%.2f", r.parts[k]), strprintf("%.1f", 100 * r.parts[k] / r.step.mean));
    }
    print(parts);
}
void answer_leaderboard(const LeaderboardRun& r) {
    const std::string ranks = r.world == 1 ? "one rank" : strprintf("%d ranks", r.world);
    const char* each = r.world == 1 ? "" : " per rank";
    const double rate = r.tflops();
    auto size = [](size_t bytes) {
        return strprintf(bytes < 1 << 30 ? "%.1f MiB" : "%.1f GiB",
                         bytes / (bytes < 1 << 30 ? 1048576.0 : 1073741824.0));
    };
    if (r.oom) {
        return answer("", "A step of %s on %s did not fit: it would hold %s%s.", r.what.c_str(), ranks.c_str(),
                      size(r.oom).c_str(), each);
    }
    const int most = (int)(std::max_element(r.parts, r.parts + LEADERBOARD_PARTS) - r.parts);
    answer("", "A step of %s on %s takes %.1f ms, in the mean of %s. That is %.0f tokens per second and %s%s.",
           r.what.c_str(), ranks.c_str(), r.step.mean, counted(std::to_string(r.step.n), "step").c_str(),
           r.tokens / r.step.mean * 1e3,
           rate < 1 ? strprintf("%.4g GFLOP/s", rate * 1e3).c_str() : strprintf("%.4g TFLOP/s", rate).c_str(),
           std::isnan(r.peak_rate) ? "" : strprintf(", an MFU of %.1f %%", 100 * rate / r.world / r.peak_rate).c_str());
    answer("", "The peak is %s%s, predicted %s. The largest part of the step is %s: %.1f ms, %.1f %%.",
           size(r.peak).c_str(), each, size(r.predicted).c_str(), part_names[most], r.parts[most],
           100 * r.parts[most] / r.step.mean);
}

static void leaderboard(Options o, const Communicator& c) {
    const ModelConfig config = configs_of(o)[0];
    if (!o.has("batch_size") && o.batch_size < c.world) { o.batch_size = c.world; }
    if (o.batch_size % c.world != 0) {
        usage_error("--batch_size: got %d, takes a multiple of %d, the number of ranks", o.batch_size, c.world);
    }
    if (o.batch_size / c.world % o.grad_accumulation != 0) {
        usage_error("--grad_accumulation: got %d, takes what divides a rank's %d sequences", o.grad_accumulation,
                    o.batch_size / c.world);
    }
    context.head_chunk = o.head_chunk;
    context.precision = precisions_of(o)[0], context.mode = modes_of(o, {config}, {context.precision})[0];
    context.each_launch = true;  // so that events can stand between the parts; a step's kernels hide the launches
    if (!o.has("checkpoint")) { choose_what_runs_again(o, c.world, room_of(c)); }
    LeaderboardRun r;
    r.what = strprintf(
        "%s (%d tokens per sequence, batch %d%s; %s, mode %s)", config.name.c_str(), o.context_length, o.batch_size,
        o.grad_accumulation > 1 ? strprintf(" in %d backward passes", o.grad_accumulation * c.world).c_str() : "",
        name_of(context.precision), caption_of(context.mode).c_str());
    r.world = c.world, r.predicted = predicted_peak(o, c.world), r.peak_rate = dense_peak(context.precision);
    r.tokens = (double)o.batch_size * o.context_length;
    r.flops = step_flops(config, o.batch_size, o.context_length);
    if (c.world == 1) {
        r.oom = run_if_fits("leaderboard", r.predicted, [&] { measure(r, c, o); });
    } else if (fits_everywhere(c, r.predicted)) {
        measure(r, c, o);  // a rank without the room ends: the others would wait for it
    } else {
        r.oom = r.predicted;
    }
    if (c.rank == 0) {
        print_tables(
            r, strprintf("%s: %d layers, d_model %d, d_ff %d, %d heads, vocabulary %d, causal; %.4g FLOP per step "
                         "without what runs again; %s; %d warmup, %s; %s",
                         r.what.c_str(), config.num_layers, config.d_model, config.d_ff, config.num_heads,
                         config.vocab_size, r.flops,
                         c.world == 1 ? "one rank"
                                      : strprintf("%d ranks, FSDP over %s, times of rank 0, the "
                                                  "largest peak",
                                                  c.world, c.backend.c_str())
                                            .c_str(),
                         o.warmup[0], counted(std::to_string(o.steps), "step").c_str(), origin(o).c_str()));
        answer_leaderboard(r);
    }
    if (r.oom) { fail("leaderboard: the step does not fit"); }
}
int cmd_leaderboard(const Options& typed) {
    Options o = typed;
    by_quick_model(o);
    if (o.quick) {
        by_quick(o, "context_length", &Options::context_length, 64),
            by_quick(o, "head_chunk", &Options::head_chunk, 48);
        by_quick(o, "warmup", &Options::warmup, {1}), by_quick(o, "steps", &Options::steps, 2);
    }
    if (!o.has("nproc")) { o.nproc = o.device != "cpu" && why_not("nccl", CUDA, 2).empty() ? 2 : 1; }
    if (is_rank() || o.nproc > 1) {
        return run_ranks(o, [&](const Communicator& c) { leaderboard(o, c); });
    }
    context.device = choose_device(o.device);
    leaderboard(o, Communicator());
    return 0;
}
