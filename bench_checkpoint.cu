// bench_checkpoint.cu: the 2026 handout's gradient_checkpointing. (a) The strategies, each run on a small model: what
// it keeps and what it runs again. (b) How many blocks make the best checkpoint, without nesting, and what that costs.
#include "commands.h"
#include <algorithm>

static std::string mib(size_t bytes, int decimals = 1) { return strprintf("%.*f", decimals, bytes / 1048576.0); }
// So small that it runs at once, also on a CPU.
static ModelConfig tiny_model(int blocks) { return {"tiny", 64, 256, blocks, 4, 100}; }

// ---------------------------------------------------------------------------------------------------------------------
// (a) The strategies, of N blocks in all

constexpr int BLOCKS = 16;  // N of the small model that runs

static std::vector<CheckpointStrategy> strategies_for(int N) {
    std::vector<CheckpointStrategy> all = {{"none", 0, "1", "N", "O(N)", "0", "O(N)"}};
    for (int k : std::set<int>{1, (int)std::lround(std::sqrt(N)), N}) {
        const char* memory = k == 1 || k == N ? "O(N)" : "O(sqrt N)";
        all.push_back({strprintf("flat, k = %d", k), k, "ceil(N / k)", "k", memory, "N", "O(N)"});
    }
    all.push_back({"recursive halves", CHECKPOINT_HALVES, "1 + h", "1", "O(log N)", "N (h + 1) - 2^h", "O(N log N)"});
    all.push_back({"linear nesting", CHECKPOINT_NESTED, "min(2, N)", "1", "O(1)", "N (N - 1) / 2", "O(N^2)"});
    return all;
}
// Blocks that ran. A range of a backward step says where its forward was recorded; a block that runs, first or again,
// has none.
static int count_blocks(const Trace& trace) {
    return std::count_if(trace.ranges.begin(), trace.ranges.end(),
                         [](const TracedRange& r) { return strcmp(r.name, "layer") == 0 && r.recorded_in < 0; });
}
std::vector<CheckpointStrategy> run_strategies(int N, uint64_t seed, int B, int T) {
    RestoreContext restore;
    context.deterministic = context.each_launch = true;  // the same bits each time; no block hides in a CUDA graph
    const ModelConfig c = tiny_model(N);
    Model model = random_model(c, seed);
    make_gradients(model);
    Batch batch = random_batch(B, T, c.vocab_size, seed);
    LossScaler scaler;
    run_phase(FORWARD_BACKWARD, model, batch, scaler);  // from here on the libraries' own memory is there
    std::vector<CheckpointStrategy> all = strategies_for(N);
    std::vector<float> plain;
    for (CheckpointStrategy& s : all) {
        context.checkpoint = s.checkpoint;
        size_t before = memory_use(context.device).now;
        reset_peak(context.device);
        start_tracing();
        run_phase(FORWARD_BACKWARD, model, batch, scaler);
        s.again = count_blocks(stop_tracing()) - N;
        s.peak = memory_use(context.device).peak - before;
        std::vector<float> gradients = to_floats(model.gradients);
        if (plain.empty()) { plain = gradients; }
        if (gradients != plain) { fail("%s: its gradients are not those without checkpoints", s.name.c_str()); }
    }
    return all;
}
void answer_strategies(const std::vector<CheckpointStrategy>& all) {
    auto less = [](const CheckpointStrategy& a, const CheckpointStrategy& b) { return a.peak < b.peak; };
    const CheckpointStrategy &best = *std::min_element(all.begin(), all.end(), less), &none = all[0], &single = all[1];
    answer("a",
           "With %s the peak is least: %s MiB, against %s with each block a checkpoint and %s without checkpoints.",
           best.name.c_str(), mib(best.peak, 3).c_str(), mib(single.peak, 3).c_str(), mib(none.peak, 3).c_str());
    answer("a",
           "It keeps the residuals of %s at a time and %s: %s memory. Backward runs %s = %d blocks again: %s compute.",
           counted(best.blocks, "block").c_str(), counted(best.inputs, "block input").c_str(), best.memory,
           best.runs_again, best.again, best.compute);
    if (best.checkpoint == CHECKPOINT_NESTED) {
        sketch(R"(def run(blocks, x):
    if len(blocks) > 1:
        x = checkpoint(run, blocks[:-1], x)  # keeps x, runs again in backward
    return blocks[-1](x)
)");
    }
    answer("a",
           "Nesting is worth its compute only where N inputs are large beside the residuals of one block: a checkpoint "
           "of each block keeps N inputs, O(N), and runs N blocks again, O(N).");
}
static void print_strategies(const Options& o) {
    const int B = 2, T = 64;
    const ModelConfig c = tiny_model(BLOCKS);
    const std::vector<CheckpointStrategy> all = run_strategies(BLOCKS, o.seed, B, T);
    Table table{
        strprintf("gradient_checkpointing (a): N = %d blocks, d_model %d, d_ff %d, %d heads, vocabulary %d, batch %d, "
                  "context length %d, precision %s, mode %s; h = ceil(log2 N); inputs: residual streams between "
                  "blocks, %s MiB each; blocks kept: with all residuals; peak: beyond weights and gradients, which "
                  "have the same bits in all rows",
                  BLOCKS, c.d_model, c.d_ff, c.num_heads, c.vocab_size, B, T, name_of(context.precision),
                  name_of(context.mode), mib(sizeof(float) * B * T * c.d_model, 3).c_str()),
        {"strategy", "inputs kept", "blocks kept", "memory", "run again", "blocks again", "compute", "peak MiB"}};
    for (const CheckpointStrategy& s : all) {
        table.row(s.name, s.inputs, s.blocks, s.memory, s.runs_again, s.again, s.compute, mib(s.peak, 3));
    }
    print(table);
    answer_strategies(all);
}

// ---------------------------------------------------------------------------------------------------------------------
// (b) The size of a checkpoint

std::vector<CheckpointRun> run_sizes(const ModelConfig& c, const Options& o, bool really) {
    RestoreContext restore;
    Model model;
    std::vector<CheckpointRun> runs;
    for (int k : {(int)CHECKPOINT_HALF, 1, 2, 4, 8, 0}) {
        if (k > c.num_layers) { continue; }
        context.checkpoint = k;
        CheckpointRun r{c.name, k};
        r.predicted = predicted_peak(c, o.batch_size, o.context_length, STEP);
        r.activations = memory_use(META).peak_by[ACTIVATIONS];
        auto run = [&] {
            if (!model.weights) { model = random_model(c, o.seed); }
            Batch batch = random_batch(o.batch_size, o.context_length, c.vocab_size, o.seed);
            LossScaler scaler;
            zero_gradients(model);
            reset_peak(context.device);
            run_phase(STEP, model, batch, scaler);
            r.peak = memory_use(context.device).peak;
            auto passes = [&] { run_phase(FORWARD_BACKWARD, model, batch, scaler); };
            r.ms = stats_of(time_ms(o.warmup[0], o.steps, passes));
        };
        if (really) {
            const std::string row = row_of(c, o.batch_size, o.context_length, STEP);
            r.oom = run_if_fits(row, r.predicted, run, memory_use(context.device).now);
        }
        runs.push_back(r);
    }
    return runs;
}
static void print_sizes(const std::vector<CheckpointRun>& runs, const ModelConfig& c, const Options& o, bool really) {
    Table table{
        strprintf(
            "gradient_checkpointing (b): %s; %s, %d blocks, batch %d, context length %d, vocabulary %d, precision %s, "
            "mode %s; peak of a training step, with AdamW's moments; time of forward and backward, %d warmup, %d step",
            really ? "really run" : "predicted, nothing ran", c.name.c_str(), c.num_layers, o.batch_size,
            o.context_length, c.vocab_size, name_of(context.precision), name_of(context.mode), o.warmup[0], o.steps),
        {"blocks per checkpoint", "predicted peak MiB", "of it activations", "peak MiB", "fwbw_mean_ms", "of none"}};
    const Stats& none = runs.back().ms;
    if (!really) { table.columns.resize(3); }
    for (const CheckpointRun& r : runs) {
        const bool ran = r.ms.n > 0;
        table.row(r.checkpoint ? name_of_checkpoint(r.checkpoint) : "none", mib(r.predicted), mib(r.activations),
                  ran     ? mib(r.peak)
                  : r.oom ? oom_cell(r.oom)
                          : "",
                  ran ? strprintf("%.2f", r.ms.mean) : "",
                  ran && none.n > 0 ? strprintf("%.2fx", r.ms.mean / none.mean) : "");
        table.rows.back().resize(table.columns.size());
    }
    print(table);
}
static std::string blocks_of(const CheckpointRun& r) {
    return r.checkpoint == 0                 ? "without checkpoints"
           : r.checkpoint == CHECKPOINT_HALF ? "with half a block"
           : r.checkpoint == 1               ? "with one block"
                                             : strprintf("with %d blocks", r.checkpoint);
}
void answer_sizes(const std::vector<CheckpointRun>& asked, const std::vector<CheckpointRun>& run) {
    auto bytes = [](const CheckpointRun& r) { return r.peak ? r.peak : r.predicted; };
    auto least = [&](const CheckpointRun& a, const CheckpointRun& b) { return bytes(a) < bytes(b); };
    size_t best = std::min_element(asked.begin() + 1, asked.end() - 1, least) - asked.begin();
    if (bytes(asked[0]) < 0.999 * bytes(asked[best])) { best = 0; }  // half a block
    std::vector<std::string> others;
    for (size_t i = 0; i < asked.size(); i++) {
        if (i + 1 != best && i != best + 1 && i + 1 != asked.size()) { continue; }  // the next ones, and none
        others.push_back(mib(bytes(asked[i])) + (asked[i].oom ? " (out of memory) " : " ") + blocks_of(asked[i]));
    }
    answer("b", "In %s a step's peak is least %s per checkpoint: %s MiB%s. Beside it: %s.", asked[0].size.c_str(),
           blocks_of(asked[best]).c_str(), mib(bytes(asked[best])).c_str(), asked[best].peak ? "" : " (predicted)",
           list_of(others).c_str());
    if (asked.size() > 3) {
        const CheckpointRun &a = asked[asked.size() - 3], &b = asked[asked.size() - 2];  // the largest checkpoints
        const double block = 1048576.0 * (b.checkpoint - a.checkpoint), peak = (b.predicted - a.predicted) / block,
                     residuals = (b.activations - a.activations) / block;
        answer("b", "Each further block in a checkpoint adds %.0f MiB: %.0f of residuals%s.", peak, residuals,
               residuals > peak + 1
                   ? strprintf(", less %.0f of gradients that do not exist yet", residuals - peak).c_str()
                   : "");
    }
    const CheckpointRun &ours = run[std::min(best, run.size() - 2)], &none = run.back();
    if (ours.ms.n == 0) { return; }
    const std::string price =
        none.ms.n == 0 ? "without checkpoints the step does not fit, so the price is known in FLOPs only: a third more"
        : level(ours.ms, none.ms) ? "level with the time without checkpoints, within the noise"
                                  : strprintf("%.2f times the time without checkpoints", ours.ms.mean / none.ms.mean);
    answer("b", "Measured in %s %s, the peak is %s MiB (predicted: %s), and forward and backward take %.2f ms: %s.",
           ours.size.c_str(), blocks_of(ours).c_str(), mib(ours.peak).c_str(), mib(ours.predicted).c_str(),
           ours.ms.mean, price.c_str());
}

int cmd_gradient_checkpointing(const Options& asked) {
    Options o = asked;
    context.device = choose_device(o.device);
    ModelConfig c = configs_of(o)[0];
    context.precision = precisions_of(o)[0];
    context.mode = modes_of(o, {c}, {context.precision})[0];
    print_strategies(o);
    std::vector<CheckpointRun> handouts;
    if (o.quick && !o.has("size") && c.name != "custom") {
        handouts = run_sizes(c, o, false);
        print_sizes(handouts, c, o, false);
        // At this length a block's scores, residuals and gradients are to each other about as those of xl.
        c = tiny_model(8);
        by_quick(o, "batch_size", &Options::batch_size, 1);
        by_quick(o, "context_length", &Options::context_length, 256);
        by_quick(o, "steps", &Options::steps, 2);
        by_quick(o, "warmup", &Options::warmup, std::vector<int>{1});
    }
    const std::vector<CheckpointRun> runs = run_sizes(c, o, true);
    print_sizes(runs, c, o, true);
    answer_sizes(handouts.empty() ? runs : handouts, runs);
    if (std::none_of(runs.begin(), runs.end(), [](const CheckpointRun& r) { return r.ms.n > 0; })) {
        fail("nothing fits into the memory that is available");
    }
    return 0;
}
