// leaderboard.cu: the 2026 handout's leaderboard: one training step of an 8.1B model on 32,768 tokens, all in bf16. The
// model, its loss and AdamW are the other commands' own; here are what runs again, the timing and the tables.
#include "commands.h"
#include <algorithm>

// Without what runs again. Forward has a product for each weight and backward two; of attention's scores the causal
// half is needed, by two products in forward and five in backward.
static double step_flops(const ModelConfig& c, double B, double T) {
    return 6 * B * T * matmul_weights(c) + 7 * B * T * T * c.d_model * c.num_layers;
}

constexpr int HEAD_CHUNK = 2048;  // rows of the logits that the loss makes at a time
static const char* const part_names[STEP_PARTS] = {"forward, blocks", "head and loss", "backward", "optimizer",
                                                   "exposed communication"};
// A step takes its sequences one by one, a backward each.
static Trainer make_trainer(const Communicator& c, const Options& o) {
    const ModelConfig config = configs_of(o)[0];
    if (c.world > 1) { return fsdp_trainer(c, config, o.seed); }
    Trainer t;
    t.model = random_model(config, o.seed);
    make_optimizer_state(t.model);
    if (o.batch_size > 1) { make_gradients(t.model); }  // in which they add up
    return t;
}
static std::vector<Batch> batches_of(const Communicator& c, const Options& o, const ModelConfig& config) {
    const Batch all = random_batch(o.batch_size, o.context_length, config.vocab_size, o.seed);
    const int64_t rows = o.batch_size / c.world, T = o.context_length;
    std::vector<Batch> batches;
    for (int64_t k = c.rank * rows; k < (c.rank + 1) * rows; k++) {
        batches.push_back({view(all.tokens, k * T, {1, T}), view(all.targets, k * T, {1, T})});
    }
    return batches;
}
size_t leaderboard_peak(const Options& o, int world) {
    auto make = [&](const Communicator& planned) { return make_trainer(planned, o); };
    return steps_peak(world, o, make, 1, o.batch_size / world);
}

// What costs least comes first; in brackets per block and sequence of 8B on an H200. The norms and SwiGLU run again
// (0.8 ms); then feed-forwards (9 ms each); then whole blocks (24 ms more). The peak falls in a straight line with the
// number of those, so the ends of the line tell how many.
void choose_what_runs_again(const Options& o, int world, double room) {
    auto peak = [&](bool recompute, int checkpoint) {
        context.recompute = recompute, context.checkpoint = checkpoint;
        return (double)leaderboard_peak(o, world);
    };
    if (peak(false, 0) <= room) { return; }
    const double nothing = peak(true, 0);
    if (nothing <= room) { return; }
    const double ffns = peak(true, CHECKPOINT_FFN), blocks = peak(true, 1);
    const int L = configs_of(o)[0].num_layers;
    auto enough = [&](double from, double to) { return (int)std::ceil(L * (from - room) / (from - to)); };
    if (ffns <= room) {
        context.checkpoint = CHECKPOINT_SOME_FFN + enough(nothing, ffns);
    } else if (blocks <= room) {
        context.checkpoint = CHECKPOINT_SOME_BLOCKS + enough(ffns, blocks);
    }
}

static void measure(LeaderboardRun& r, const Communicator& c, const Options& o) {
    Trainer t = make_trainer(c, o);
    const ModelConfig& config = t.model.config;
    t.model.pre_forward = [&t, head = config.num_layers + 1, gather = t.model.pre_forward](int unit) {
        if (unit == head) { t.marks.push_back({HEAD_AND_LOSS, mark()}); }
        if (gather) { gather(unit); }
    };
    reset_peak(context.device);
    const auto steps = timed_steps(t, batches_of(c, o, config), o, "leaderboard", [&] {
        if (t.steps == 1) { r.first_loss = t.loss; }
    });
    r.step = stats_of(steps, TOTAL);
    for (int k = 0; k < STEP_PARTS; k++) { r.parts[k] = stats_of(steps, k).mean; }
    const double first_loss = r.first_loss, peak = (double)memory_use(context.device).peak;
    r.first_loss = r.last_loss = 0;
    for (const std::vector<double>& of_rank : gather<double>(c, {first_loss, t.loss, peak})) {
        r.first_loss += of_rank[0] / c.world, r.last_loss += of_rank[1] / c.world;
        r.peak = std::max(r.peak, (size_t)of_rank[2]);
    }
}

static void print_tables(const LeaderboardRun& r, const std::string& caption) {
    auto cell = [&](const char* format, double value) { return r.oom ? "" : strprintf(format, value); };
    const double rate = r.tflops();
    const FlopUnit unit = unit_of(rate);
    Table table{"leaderboard: " + caption,
                {"mean ms", "std ms", "median ms", "tokens/s", unit.name, "MFU %", "predicted MiB", "peak MiB",
                 "first loss", "last loss"}};
    table.row(r.oom ? oom_cell(r.oom) : cell("%.1f", r.step.mean), r.oom ? "" : deviation(r.step, "%.1f"),
              cell("%.1f", r.step.median), cell("%.0f", r.tokens / r.step.mean * 1e3),
              cell("%.4g", rate * unit.per_tera), r.oom ? "" : percent_of_peak(rate / r.world, context.precision),
              strprintf("%.1f", r.predicted / 1048576.0), cell("%.1f", r.peak / 1048576.0), cell("%.5f", r.first_loss),
              cell("%.5f", r.last_loss));
    print(table);
    if (r.oom) { return; }
    Table parts{"leaderboard, the parts of a step; with a head chunk its gradients are made in head and loss",
                {"part", "mean ms", "share %"}};
    for (int k = 0; k < (r.world == 1 ? EXPOSED : STEP_PARTS); k++) {
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
    const int most = (int)(std::max_element(r.parts, r.parts + STEP_PARTS) - r.parts);
    answer("", "A step of %s on %s takes %.1f ms, in the mean of %s. That is %.0f tokens per second and %.4g %s%s.",
           r.what.c_str(), ranks.c_str(), r.step.mean, counted(r.step.n, "step").c_str(), r.tokens / r.step.mean * 1e3,
           rate * unit_of(rate).per_tera, unit_of(rate).name,
           std::isnan(r.peak_rate) ? "" : strprintf(", an MFU of %.1f %%", 100 * rate / r.world / r.peak_rate).c_str());
    answer("", "The peak is %s%s, predicted %s. The largest part of the step is %s: %.1f ms, %.1f %%.",
           size(r.peak).c_str(), each, size(r.predicted).c_str(), part_names[most], r.parts[most],
           100 * r.parts[most] / r.step.mean);
}

static void leaderboard(Options o, const Communicator& c) {
    const ModelConfig config = choose_step(o, c);
    if (!o.has("batch_size") && o.batch_size < c.world) { o.batch_size = c.world; }
    if (o.batch_size % c.world != 0) {
        usage_error("--batch_size: got %d, takes a multiple of %d, the number of ranks", o.batch_size, c.world);
    }
    if (context.mode == EAGER || context.precision == PREC_FP16) {
        usage_error(
            "--mode %s and --precision %s: the loss goes by chunks, which takes mode fused or flash, and not fp16",
            name_of(context.mode), name_of(context.precision));
    }
    context.head_chunk = HEAD_CHUNK;
    context.each_launch = true;  // so that events can stand between the parts; a step's kernels hide the launches
    // A thirtieth of what a step needs is left for NCCL, cuBLAS and the gaps between buffers.
    if (!o.has("checkpoint")) { choose_what_runs_again(o, c.world, room_of_each_rank(c) * 30.0 / 31); }
    LeaderboardRun r;
    r.what = strprintf("%s (%d tokens per sequence, batch %d; %s, mode %s)", config.name.c_str(), o.context_length,
                       o.batch_size, name_of(context.precision), caption_of(context.mode).c_str());
    r.world = c.world, r.predicted = leaderboard_peak(o, c.world), r.peak_rate = dense_peak(context.precision);
    r.tokens = (double)o.batch_size * o.context_length;
    r.flops = step_flops(config, o.batch_size, o.context_length);
    r.oom = r.predicted <= room_of_each_rank(c) ? 0 : r.predicted;
    if (!r.oom) { measure(r, c, o); }
    if (c.rank == 0) {
        print_tables(r, strprintf("%s: %d layers, d_model %d, d_ff %d, %d heads, vocabulary %d, causal; a sequence per "
                                  "backward; %.4g FLOP per step without what runs again; %s; %d warmup, %s",
                                  r.what.c_str(), config.num_layers, config.d_model, config.d_ff, config.num_heads,
                                  config.vocab_size, r.flops,
                                  c.world == 1 ? "one rank"
                                               : strprintf("%d ranks, FSDP over %s, times of rank 0, the largest peak",
                                                           c.world, c.backend.c_str())
                                                     .c_str(),
                                  o.warmup[0], counted(o.steps, "step").c_str()));
        answer_leaderboard(r);
    }
    if (r.oom) { fail("leaderboard: the step does not fit"); }
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
