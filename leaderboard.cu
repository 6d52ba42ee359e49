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

constexpr int PARTS = 4;
static const char* const part_names[PARTS] = {"forward, blocks", "head and loss", "backward", "optimizer"};
using Moments = std::array<Mark, PARTS + 1>;  // where the parts begin; the last: where the step ends

struct LeaderboardRun : Attempt {
    int warmup = 0;     // steps that were not timed, and followed the first two
    size_t peak = 0;    // bytes, measured
    double loss = NAN;  // of the first step
    Stats step{}, parts[PARTS]{};
};
static double run_step(Model& model, const Batch& batch, LossScaler& scaler, Moments& at) {
    model.pre_forward = [&](int unit) {
        if (unit == model.config.num_layers + 1) { at[1] = mark(); }
    };
    at[0] = mark();
    Tensor loss = forward_backward(model, batch, loss_scale_of(scaler), [&] { at[2] = mark(); });
    at[3] = mark();
    optimizer_step(model, AdamW(), scaler, 0);
    at[4] = mark();
    model.pre_forward = nullptr;
    synchronize();
    return to_doubles(loss)[0];
}
// As do_bench counts: a step is timed for an estimate, after a first one, and then as many follow as fill the two
// times.
static void measure(LeaderboardRun& r, const ModelConfig& c, const Options& o) {
    Model model = random_model(c, o.seed);
    make_optimizer_state(model);
    Batch batch = random_batch(o.batch_size, o.context_length, c.vocab_size, o.seed);
    LossScaler scaler;
    Moments at;
    reset_peak(context.device);
    r.loss = run_step(model, batch, scaler, at);
    run_step(model, batch, scaler, at);
    const double estimate = ms_of(at[PARTS], at[0]);
    auto that_fill = [&](double seconds) { return (int)std::min(1e6, seconds * 1e3 / estimate); };
    r.warmup = o.has("warmup") ? o.warmup[0] : that_fill(o.warmup_time);
    const int steps = o.has("steps") ? o.steps : std::max(1, that_fill(o.rep_time));
    std::vector<double> all, parts[PARTS];
    for (int i = -r.warmup; i < steps; i++) {
        run_step(model, batch, scaler, at);
        progress("%s: step %d of %d, %.0f ms", c.name.c_str(), i + 1 + r.warmup, r.warmup + steps,
                 ms_of(at[PARTS], at[0]));
        if (i < 0) { continue; }
        all.push_back(ms_of(at[PARTS], at[0]));
        for (int k = 0; k < PARTS; k++) { parts[k].push_back(ms_of(at[k + 1], at[k])); }
    }
    r.step = stats_of(all);
    for (int k = 0; k < PARTS; k++) { r.parts[k] = stats_of(parts[k]); }
    r.peak = memory_use(context.device).peak;
}

static Plan plan_of(const Options& o) {
    Plan p{o};
    bool cpu = context.device == CPU;
    if (cpu || o.quick) {
        p.shrink_size();
        p.shrink("batch_size", &Options::batch_size, 1);
        p.shrink("context_length", &Options::context_length, cpu ? 64 : 1024);
        p.shrink("head_chunk", &Options::head_chunk, cpu ? 48 : 512);
        p.shrink("warmup_time", &Options::warmup_time, 0.0);
        p.shrink("rep_time", &Options::rep_time, o.quick ? 0.1 : 5.0);
    }
    context.head_chunk = p.o.head_chunk;
    p.choose_models();
    context.precision = p.precisions[0], context.mode = p.modes[0];
    context.each_launch = true;  // so that events can stand between the parts; a step's kernels hide the launches
    return p;
}

static void print_tables(const Plan& p, const ModelConfig& c, const LeaderboardRun& r) {
    const Options& o = p.o;
    const bool gpu = context.device == CUDA;
    const double flops = step_flops(c, o.batch_size, o.context_length), rate = flops / r.step.mean / 1e9;
    const double tokens = (double)o.batch_size * o.context_length, mib = 1 << 20;
    auto if_ran = [&](const char* format, double value) { return r.ran ? strprintf(format, value) : ""; };
    std::string counted = r.ran ? strprintf("%d + 2 warmup, %d step", r.warmup, r.step.n) : "not run";
    Table table{
        strprintf("leaderboard: %s, %d layers, d_model %d, d_ff %d, %d heads, vocabulary %d, batch %d, context length "
                  "%d, causal; precision %s, mode %s; %.4g FLOP per step without what runs again, MFU of %g TFLOP/s; "
                  "one rank; %s; %s",
                  c.name.c_str(), c.num_layers, c.d_model, c.d_ff, c.num_heads, c.vocab_size, o.batch_size,
                  o.context_length, name_of(context.precision), caption_of(context.mode).c_str(), flops, o.tflops,
                  counted.c_str(), p.origin().c_str()),
        {"size", "mean ms", "median ms", "min ms", "max ms", "tokens/s", "TFLOP/s", "MFU %", "predicted peak MiB",
         "peak MiB", "first loss"},
        {{c.name, r.cell(strprintf("%.1f", r.step.mean)), if_ran("%.1f", r.step.median), if_ran("%.1f", r.step.min),
          if_ran("%.1f", r.step.max), if_ran("%.0f", tokens / r.step.mean * 1e3), if_ran("%.4g", rate),
          gpu ? if_ran("%.1f", 100 * rate / o.tflops) : "", strprintf("%.1f", r.needs / mib),
          if_ran("%.1f", r.peak / mib), if_ran("%.5f", r.loss)}}};
    print(table, o.format);
    if (!r.ran) { return; }
    Table parts{
        strprintf("leaderboard, the parts of a step: %s, by %s; with a head chunk its gradients are made in head "
                  "and loss; %s",
                  c.name.c_str(), gpu ? "events between them" : "the clock", p.origin().c_str()),
        {"part", "mean ms", "share %"},
        {}};
    for (int k = 0; k < PARTS; k++) {
        parts.rows.push_back({part_names[k], strprintf("%.2f", r.parts[k].mean),
                              strprintf("%.1f", 100 * r.parts[k].mean / r.step.mean)});
    }
    print(parts, o.format);
}

int cmd_leaderboard(const Options& o) {
    if (o.nproc > 1 || is_rank()) { usage_error("--nproc: got %d, takes 1 so far: one rank", o.nproc); }
    context.device = choose_device(o.device);
    Plan p = plan_of(o);
    const ModelConfig& c = p.configs[0];
    LeaderboardRun r;
    r.needs = predicted_peak(c, p.o.batch_size, p.o.context_length, STEP);
    r.run([&] { measure(r, c, p.o); });
    print_tables(p, c, r);
    return 0;
}
