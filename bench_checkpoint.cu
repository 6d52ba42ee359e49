// bench_checkpoint.cu: the 2026 handout's gradient_checkpointing. (a) The strategies, each run on a small model: what
// it keeps and what it runs again, by formula and counted. (b) How many blocks make the best checkpoint, without
// nesting, and what that costs.
#include "commands.h"
#include <algorithm>

static std::string mib(double bytes, int decimals = 1) { return strprintf("%.*f", decimals, bytes / 1048576); }
// So small that it runs at once, also on a CPU.
static ModelConfig tiny_model(int blocks) { return {"tiny", 64, 256, blocks, 4, 100}; }

// ---------------------------------------------------------------------------------------------------------------------
// (a) The strategies, of N blocks in all

struct CheckpointStrategy {
    std::string name;
    int checkpoint;  // as --checkpoint takes it
    // Inputs: tensors of the residual stream from between two blocks, the embedding's output among them, that are held
    // while a block runs. Blocks: those of which all residuals are held. Again: runs of a block in backward.
    std::string inputs_text, blocks_text, memory, again_text, compute;
    int inputs, again;
};
static int ceil_log2(int n) {
    int h = 0;
    while (1 << h < n) { h++; }
    return h;
}
static std::vector<CheckpointStrategy> strategies_for(int N) {
    int h = ceil_log2(N), root = (int)std::lround(std::sqrt(N));
    std::vector<CheckpointStrategy> all = {{"none", 0, "1", "N", "O(N)", "0", "O(N)", 1, 0}};
    for (int k : std::set<int>{1, root, N}) {
        const char* memory = k == 1 || k == N ? "O(N)" : "O(sqrt N)";
        all.push_back({strprintf("flat, k = %d", k), k, "ceil(N / k)", "k", memory, "N", "O(N)", (N + k - 1) / k, N});
    }
    all.push_back({"recursive halves", CHECKPOINT_HALVES, "1 + h", "1", "O(log N)", "N (h + 1) - 2^h", "O(N log N)",
                   1 + h, N * (h + 1) - (1 << h)});
    all.push_back({"linear nesting", CHECKPOINT_NESTED, "min(2, N)", "1", "O(1)", "N (N - 1) / 2", "O(N^2)",
                   std::min(2, N), N * (N - 1) / 2});
    return all;
}

// The most residual streams of `bytes` each that a log shows held while a block runs. Only they are allocated between
// two blocks.
static int count_inputs(const std::vector<MemoryEvent>& log, size_t bytes) {
    std::set<uint64_t> held;
    size_t most = 0;
    for (const MemoryEvent& e : log) {
        if (e.ms == 0 || e.ranges.empty()) { continue; }  // there before
        auto inside = [&](const char* name) {
            return std::any_of(e.ranges.begin(), e.ranges.end(), [&](const char* r) { return strcmp(r, name) == 0; });
        };
        std::string innermost = e.ranges.back();
        if (!e.is_alloc) {
            held.erase(e.address);
        } else if (inside("layer")) {
            most = std::max(most, held.size());
        } else if (e.bytes == bytes && (innermost == "embedding" || innermost == "forward")) {
            held.insert(e.address);
        }
    }
    return (int)most;
}
// Blocks that backward ran forward again. A range of a backward step says where its forward was recorded; a block that
// runs again has none.
static int count_blocks_again(const Trace& trace) {
    auto is = [&](int i, const char* name) { return strcmp(trace.ranges[i].name, name) == 0; };
    int blocks = 0;
    for (int i = 0; i < (int)trace.ranges.size(); i++) {
        if (!is(i, "layer") || trace.ranges[i].recorded_in >= 0) { continue; }
        int outer = trace.ranges[i].parent;
        while (outer >= 0 && !is(outer, "backward")) { outer = trace.ranges[outer].parent; }
        blocks += outer >= 0;
    }
    return blocks;
}

static Table strategy_table(const Options& o, const std::string& origin) {
    RestoreContext restore;
    context.deterministic = context.each_launch = true;  // the same bits each time; no block hides in a CUDA graph
    const int N = o.blocks, B = 2, T = 64;
    const ModelConfig c = tiny_model(N);
    const size_t stream = sizeof(float) * B * T * c.d_model;
    Table table{
        strprintf("gradient_checkpointing (a): N = %d blocks, d_model %d, d_ff %d, %d heads, vocabulary %d, batch %d, "
                  "context length %d, precision %s, mode %s; h = ceil(log2 N); inputs: residual streams between blocks "
                  "that are held, %s MiB each; blocks kept: with all residuals; peak: beyond weights and gradients; %s",
                  N, c.d_model, c.d_ff, c.num_heads, c.vocab_size, B, T, name_of(context.precision),
                  name_of(context.mode), mib(stream, 3).c_str(), origin.c_str()),
        {"strategy", "inputs kept", "inputs", "inputs counted", "blocks kept", "memory", "run again", "blocks again",
         "blocks again counted", "compute", "peak MiB", "gradients"},
        {}};
    Model model = random_model(c, o.seed);
    make_gradients(model);
    Batch batch = random_batch(B, T, c.vocab_size, o.seed);
    LossScaler scaler;
    run_phase(FORWARD_BACKWARD, model, batch, scaler);  // from here on the libraries' own memory is there
    std::vector<float> plain;
    for (const CheckpointStrategy& s : strategies_for(N)) {
        progress("%s", s.name.c_str());
        context.checkpoint = s.checkpoint;
        size_t before = memory_use(context.device).now;
        reset_peak(context.device);
        start_memory_log(context.device);
        start_tracing();
        run_phase(FORWARD_BACKWARD, model, batch, scaler);
        Trace trace = stop_tracing();
        int inputs = count_inputs(stop_memory_log(), stream);
        size_t peak = memory_use(context.device).peak - before;
        std::vector<float> gradients = to_floats(model.gradients);
        if (plain.empty()) { plain = gradients; }
        table.rows.push_back({s.name, s.inputs_text, std::to_string(s.inputs), std::to_string(inputs), s.blocks_text,
                              s.memory, s.again_text, std::to_string(s.again),
                              std::to_string(count_blocks_again(trace)), s.compute, mib(peak, 3),
                              gradients == plain ? "the same bits" : "differ"});
    }
    return table;
}

// ---------------------------------------------------------------------------------------------------------------------
// (b) The size of a checkpoint

struct SizeRun : Attempt {
    size_t planned_activations, peak = 0;  // bytes; of the predicted peak, and the measured one
    double ms = 0;
};
static SizeRun measure_size(Model& model, const ModelConfig& c, const Plan& p) {
    SizeRun r;
    r.needs = predicted_peak(c, p.o.batch_size, p.o.context_length, STEP);
    r.planned_activations = memory_use(META).peak_by[ACTIVATIONS];
    if (context.device == META) { return r; }
    auto run = [&] {
        if (!model.weights) { model = random_model(c, p.o.seed); }
        Batch batch = random_batch(p.o.batch_size, p.o.context_length, c.vocab_size, p.o.seed);
        LossScaler scaler;
        zero_gradients(model);
        reset_peak(context.device);
        run_phase(STEP, model, batch, scaler);
        r.peak = memory_use(context.device).peak;
        auto passes = [&] { run_phase(FORWARD_BACKWARD, model, batch, scaler); };
        r.ms = stats_of(time_ms(p.o.warmup[0], p.o.steps, passes)).mean;
    };
    std::string row = row_of(c, p.o.batch_size, p.o.context_length, STEP);
    r.run(row, 1 + p.o.warmup[0] + p.o.steps, run, memory_use(context.device).now);
    return r;
}
static Table size_table(const Plan& p, const ModelConfig& c) {
    RestoreContext restore;
    bool planned = context.device == META;
    std::string what = planned ? "predicted, every allocation counted, nothing computed" : "really run";
    Table table{
        strprintf("gradient_checkpointing (b): %s; %s, %d blocks, batch %d, context length %d, vocabulary "
                  "%d, precision %s, mode %s; peak of a training step, with AdamW's "
                  "moments; time of forward and backward, %d warmup, %d step; %s",
                  what.c_str(), c.name.c_str(), c.num_layers, p.o.batch_size, p.o.context_length, c.vocab_size,
                  name_of(context.precision), name_of(context.mode), p.o.warmup[0], p.o.steps, p.origin().c_str()),
        {"blocks per checkpoint", "predicted peak MiB", "of it activations", "peak MiB", "difference %", "fwbw_mean_ms",
         "of none"},
        {}};
    Model model;
    double none_ms = 0;
    for (int k : {(int)CHECKPOINT_HALF, 1, 2, 4, 8, 0}) {
        if (k > c.num_layers) { continue; }
        context.checkpoint = k;
        std::string name = k == 0 ? "none" : name_of_checkpoint(k);
        const SizeRun r = measure_size(model, c, p);
        if (k == 0) { none_ms = r.ms; }
        double predicted = (double)r.needs.bytes;
        table.rows.push_back(
            {name, mib(predicted), mib((double)r.planned_activations), planned ? "" : r.cell(mib(r.peak)),
             r.ran ? strprintf("%.2f", 100 * (r.peak / predicted - 1)) : "", r.ran ? strprintf("%.2f", r.ms) : "", ""});
    }
    for (auto& row : table.rows) {
        if (none_ms > 0 && !row[5].empty()) { row.back() = strprintf("%.2fx", std::stod(row[5]) / none_ms); }
    }
    return table;
}

int cmd_gradient_checkpointing(const Options& o) {
    Device device = context.device = choose_device(o.device);
    Plan p{o};
    p.choose_models();
    context.precision = p.precisions[0], context.mode = p.modes[0];
    if (!context.plan_only) { print(strategy_table(o, p.origin()), o.format); }  // a model so small that it always fits
    if (device == CUDA && !o.quick) {
        p.shrink_to_fit(1, [](const Plan& smaller) {
            RestoreContext restore;
            context.checkpoint = 1;
            return predicted_peak(smaller.configs[0], smaller.o.batch_size, smaller.o.context_length, STEP).bytes <=
                   available_memory(context.device);
        });
    }
    const ModelConfig asked = p.configs[0];
    if (device == CUDA && !o.quick) {
        print(size_table(p, asked), o.format);
        return 0;
    }
    {
        Planning planning;
        print(size_table(p, asked), o.format);
    }
    // At this length a block's scores, residuals and gradients are to each other about as those of the large model.
    if (!o.has("size") && asked.name != "custom") {
        p.configs = {tiny_model(8)};
        if (o.has("vocab_size")) { p.configs[0].vocab_size = o.vocab_size; }
        p.note_smaller("8 layers, d_model 64, d_ff 256, 4 heads, vocabulary " +
                       std::to_string(p.configs[0].vocab_size));
    }
    p.shrink("batch_size", &Options::batch_size, 1);
    p.shrink("context_length", &Options::context_length, 256);
    p.shrink("steps", &Options::steps, 3);
    p.shrink("warmup", &Options::warmup, {1});
    print(size_table(p, p.configs[0]), o.format);
    return 0;
}
