// memory.cu: section 1.1.6, memory_profiling. Where a step's memory goes: the log of our allocations as tables and
// answers, and as the pickle that pytorch.org/memory_viz draws.
#include "commands.h"

#include <cerrno>

#include <nlohmann/json.hpp>
#include <sys/stat.h>

using Json = nlohmann::ordered_json;

static std::string mib(double bytes) { return strprintf("%.1f", bytes / 1048576); }
static std::string gib(double bytes) { return strprintf("%.1f", bytes / 1073741824); }

static std::string path_of(const MemoryEvent& e) {  // "forward/layer/ffn"
    return e.ms == 0 ? "held" : join({e.ranges.begin(), e.ranges.end()}, "/");
}
static const char* op_of(const MemoryEvent& e) {  // a lambda has no name: its range says what it does
    return strcmp(e.at.function, "operator()") == 0 && !e.ranges.empty() ? e.ranges.back() : e.at.function;
}

// ---------------------------------------------------------------------------------------------------------------------
// snapshot.pickle, with what the viewer reads

// Python's pickle protocol 2: a program for a stack machine, whose last value is the object. The viewer knows few of
// its instructions; these are enough.
static void pickle(std::string& to, const Json& value) {
    auto little_endian = [&](uint64_t number, int bytes) {
        for (int i = 0; i < bytes; i++) { to += (char)(number >> (8 * i)); }
    };
    if (value.is_object()) {
        to += "}(";
        for (const auto& [key, x] : value.items()) { pickle(to, key), pickle(to, x); }
        to += 'u';
    } else if (value.is_array()) {
        // APPENDS a thousand at a time, as Python does: the viewer passes each batch as arguments of one call, and more
        // than some 100,000 of them overflow its stack.
        to += ']';
        for (size_t i = 0; i < value.size(); i++) {
            if (i % 1000 == 0) { to += '('; }
            pickle(to, value[i]);
            if (i % 1000 == 999 || i + 1 == value.size()) { to += 'e'; }
        }
    } else if (value.is_string()) {
        const auto& text = value.get_ref<const std::string&>();
        to += 'X', little_endian(text.size(), 4), to += text;
    } else {
        to += "\x8a\x08", little_endian(value.get<int64_t>(), 8);
    }
}

// The stack that the viewer shows: the line that allocated, then the ranges around it, innermost first.
static Json frames_of(const MemoryEvent& e) {
    Json frames = Json::array({{{"filename", basename(e.at.file)}, {"line", e.at.line}, {"name", e.at.function}}});
    for (size_t i = e.ranges.size(); i > 0; i--) {
        frames.push_back({{"filename", "range"}, {"line", i}, {"name", e.ranges[i - 1]}});
    }
    return frames;
}
static Json action(const char* name, const MemoryEvent& e, const char* category) {
    return {{"action", name},
            {"addr", e.address},
            {"size", e.bytes},
            {"stream", 0},
            {"time_us", (int64_t)(e.ms * 1e3)},
            {"category", category},
            {"frames", frames_of(e)}};
}
// Each of our buffers becomes a segment of its own: the pool below is the driver's, and its segments are not known.
static Json segment(const MemoryEvent& e) {
    const Json block = {
        {"size", e.bytes}, {"requested_size", e.bytes}, {"state", "active_allocated"}, {"frames", frames_of(e)}};
    return {{"device", 0}, {"address", e.address},      {"total_size", e.bytes},
            {"stream", 0}, {"frames", block["frames"]}, {"blocks", Json::array({block})}};
}

std::string snapshot_pickle(const std::vector<MemoryEvent>& log) {
    std::map<uint64_t, const MemoryEvent*> held;  // at the end
    Json trace = Json::array(), segments = Json::array();
    for (const MemoryEvent& e : log) {
        if (e.is_alloc) {
            held[e.address] = &e;
        } else {
            held.erase(e.address);
        }
        // An event of ours is two or three of PyTorch's.
        static const std::vector<const char*> alloc = {"segment_alloc", "alloc"},
                                              free = {"free_requested", "free_completed", "segment_free"};
        for (const char* name : e.is_alloc ? alloc : free) { trace.push_back(action(name, e, name_of(e.category))); }
    }
    // Where events have categories and none is called 'unknown', the viewer fails.
    trace.push_back(
        action("snapshot", {log.empty() ? 0 : log.back().ms, false, 0, 0, ACTIVATIONS, {}, here()}, "unknown"));
    for (const auto& [address, e] : held) { segments.push_back(segment(*e)); }
    std::string bytes = "\x80\x02";
    pickle(bytes, {{"segments", segments}, {"device_traces", Json::array({trace})}});
    return bytes + '.';
}

// ---------------------------------------------------------------------------------------------------------------------
// memory_profiling: one forward pass, or one step, of a model that has run before, with the log on

// Allocations of the same size, ranges and line are one. The largest first.
static std::vector<Allocation> largest_allocations(const std::vector<MemoryEvent>& log) {
    std::map<std::pair<size_t, std::string>, size_t> found;
    std::vector<Allocation> all;
    for (const MemoryEvent& e : log) {
        if (!e.is_alloc) { continue; }
        const std::string line = strprintf("%s:%d", basename(e.at.file), e.at.line);
        auto [it, is_new] = found.emplace(std::make_pair(e.bytes, path_of(e) + op_of(e) + line), all.size());
        if (is_new) { all.push_back({e.bytes, 0, e.category, path_of(e), op_of(e), line}); }
        all[it->second].times++;
    }
    std::stable_sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.bytes > b.bytes; });
    all.resize(std::min<size_t>(all.size(), 8));
    return all;
}

static void read_log(MemoryRun& r, PhaseMemory& m, const std::vector<MemoryEvent>& log) {
    const MemoryUse& use = memory_use(context.device);
    m.peak = use.peak;
    std::copy_n(use.peak_by, CATEGORIES, m.peak_by);
    size_t gradients = 0;
    for (const MemoryEvent& e : log) {
        if (e.category == GRADIENTS) { gradients += e.is_alloc ? e.bytes : -e.bytes; }
        m.all_gradients = std::max(m.all_gradients, gradients);
        const bool embedding = e.ms > 0 && !e.ranges.empty() && strcmp(e.ranges.back(), "embedding") == 0;
        if (embedding && r.stream == 0) { r.stream = e.bytes; }
    }
    if (&m == &r.forward) { r.largest = largest_allocations(log); }
}

// (f) What one block saves for backward: a model of 3 blocks saves just that more than one of 2. Adds what the model's
// blocks save, `sign` times.
static void add_saved(BlockMemory& m, const MemoryRun& r, int blocks, uint64_t seed, int sign) {
    ModelConfig c = r.config;
    c.num_layers = blocks;
    Device device = context.device;
    Model model = random_model(c, seed);
    std::vector<int64_t> left;  // bytes held when backward leaves a block, from the last block to the first
    for (const Layer& layer : model.layers) {
        layer.ln1.gradient->ready = [&] { left.push_back((int64_t)memory_use(device).now); };
    }
    std::map<uint64_t, MemoryEvent> held;  // after forward
    start_memory_log(device);
    forward_backward(model, random_batch(r.B, r.T, c.vocab_size, seed), 1, [&] {
        for (const MemoryEvent& e : stop_memory_log()) {
            bool ours = e.category == ACTIVATIONS || e.category == WEIGHT_COPIES;
            bool in_block = e.ranges.size() > 1 && strcmp(e.ranges[1], "layer") == 0;
            if (!e.is_alloc) {
                held.erase(e.address);
            } else if (ours && in_block) {
                held[e.address] = e;
            }
        }
    });
    for (const auto& [address, e] : held) {
        m.by_op[path_of(e) + " " + op_of(e)] += sign * (int64_t)e.bytes;
        m.bytes += sign * (int64_t)e.bytes;
        m.copies += e.category == WEIGHT_COPIES ? sign * (int64_t)e.bytes : 0;
    }
    m.change = left[1] - left[0];
}
static void profile_block(MemoryRun& r, uint64_t seed) {
    ModelConfig largest = r.config;
    largest.num_layers = 3;
    r.block.oom = run_if_fits(row_of(largest, r.B, r.T, FORWARD_BACKWARD) + ", 3 blocks",
                              predicted_peak(largest, r.B, r.T, FORWARD_BACKWARD),
                              [&] { add_saved(r.block, r, 2, seed, -1), add_saved(r.block, r, 3, seed, 1); });
    const int64_t C = r.config.d_model, F = r.config.d_ff;
    const int64_t stream = size_of(weight_dtype(r.precision));
    const bool halved = stream == 2 || (context.mode != EAGER && size_of(matmul_dtype(r.precision)) == 2);
    r.block.formula = (4 * C * C + 3 * C * F) * (halved ? 2 : 4) + 2 * C * stream;
}

MemoryRun profile_memory(const ModelConfig& c, Precision precision, int B, int T, uint64_t seed,
                         const std::string& folder) {
    MemoryRun r{c, precision, B, T, context.device == META};
    context.precision = precision;
    for (auto [phase, m] : {std::make_pair(FORWARD, &r.forward), {TAPED_FORWARD, &r.taped}, {STEP, &r.step}}) {
        std::vector<MemoryEvent> log;
        m->oom = run_if_fits(row_of(c, B, T, phase), predicted_peak(c, B, T, phase), [&, phase = phase, m = m] {
            Model model = random_model(c, seed);
            Batch batch = random_batch(B, T, c.vocab_size, seed);
            LossScaler scaler;
            run_phase(phase, model, batch, scaler);  // from here on gradients, moments and the libraries' own are there
            synchronize();
            reset_peak(context.device);
            start_memory_log(context.device);
            run_phase(phase, model, batch, scaler);
            log = stop_memory_log();
            read_log(r, *m, log);
        });
        if (folder.empty() || m->oom || phase == TAPED_FORWARD) { continue; }
        save_file(strprintf("%s/snapshot_%s_%s_%d_%s.pickle", folder.c_str(), name_of(phase), size_option(c).c_str(), T,
                            name_of(precision)),
                  snapshot_pickle(log));
    }
    if (!context.checkpoint) { profile_block(r, seed); }  // a checkpoint saves its input, and may be several blocks
    stop_memory_log();                                    // of what ran out of memory
    return r;
}

// ---------------------------------------------------------------------------------------------------------------------
// Its tables, (b) to (f) as the handout counts

static void print_peaks(const std::vector<MemoryRun>& runs, const std::string& caption) {
    auto peak = [](const PhaseMemory& m) { return m.oom ? oom_cell(m.oom) : mib(m.peak); };
    Table t{"", {"context length", "forward peak MiB", "forward with tape peak MiB", "full step peak MiB"}};
    for (size_t i = 0; i < runs.size(); i++) {
        const MemoryRun& r = runs[i];
        t.row(r.T, peak(r.forward), peak(r.taped), peak(r.step));
        if (i + 1 < runs.size() && runs[i + 1].precision == r.precision) { continue; }
        t.caption = strprintf("memory_profiling (b): precision %s; %s", name_of(r.precision), caption.c_str());
        print(t);
        t.rows.clear();
    }
}
static void print_categories(const std::vector<MemoryRun>& runs, const std::string& caption) {
    Table t{"memory_profiling (c): MiB by category at the peak; S: context length; " + caption,
            {"S", "phase", "precision", "parameters", "gradients", "optimizer", "weight copies", "activations", "other",
             "all"}};
    for (const MemoryRun& r : runs) {
        for (auto [phase, m] : {std::make_pair("forward", &r.forward), {"with tape", &r.taped}, {"step", &r.step}}) {
            const size_t* by = m->peak_by;
            if (m->oom) { continue; }
            t.row(r.T, phase, r.precision, mib(by[PARAMETERS]), mib(by[GRADIENTS]), mib(by[OPTIMIZER]),
                  mib(by[WEIGHT_COPIES]), mib(by[ACTIVATIONS]), mib(by[WORKSPACE] + by[INPUTS]), mib(m->peak));
        }
    }
    print(t);
}
static void print_largest(const std::vector<MemoryRun>& runs, const std::string& caption) {
    Table t{
        "memory_profiling (e): the largest allocations of a forward; 'held': before it; S: context length; " + caption,
        {"S", "precision", "MiB each", "times", "category", "range", "op", "line"}};
    for (const MemoryRun& r : runs) {
        for (const Allocation& a : r.largest) {
            const std::string range = a.range.substr(a.range.find('/') + 1);  // without "forward/"
            t.row(r.T, r.precision, mib(a.bytes), a.times, name_of(a.category), range, a.op, a.line);
        }
    }
    print(t);
}
// Operations, those that save most first.
static std::vector<std::pair<std::string, int64_t>> saved_most(const BlockMemory& m) {
    std::vector<std::pair<std::string, int64_t>> all(m.by_op.begin(), m.by_op.end());
    std::stable_sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.second > b.second; });
    all.resize(std::min<size_t>(all.size(), 5));
    return all;
}
// Backward frees what a block saved and leaves the gradients of its parameters; the gradient of its input takes the
// place of that of its output.
static void print_blocks(const std::vector<MemoryRun>& runs, const std::string& caption) {
    Table saved{
        "memory_profiling (f): what one block saves for backward, the five operations that save most; S: context "
        "length; " +
            caption,
        {"S", "precision", "range and op", "bytes", "%"}};
    Table change{"memory_profiling (f): memory over one block in backward, bytes; S: context length; " + caption,
                 {"S", "precision", "saved", "of it weight copies", "change", "change + saved - copies",
                  "gradients by formula"}};
    for (const MemoryRun& r : runs) {
        const BlockMemory& m = r.block;
        for (const auto& [op, bytes] : saved_most(m)) {
            saved.row(r.T, r.precision, op, bytes, strprintf("%.1f", 100.0 * bytes / m.bytes));
        }
        change.row(r.T, r.precision, m.oom ? oom_cell(m.oom) : to_cell(m.bytes), m.copies, m.change,
                   m.change + m.bytes - m.copies, m.formula);
    }
    print(saved);
    print(change);
}

// ---------------------------------------------------------------------------------------------------------------------
// Its answers, of one size; of the first precision, and what the others change

using Runs = std::vector<MemoryRun>;
static std::string each(const Runs& runs, const std::function<std::string(const MemoryRun&)>& text) {
    std::vector<std::string> texts;
    for (const MemoryRun& r : runs) { texts.push_back(text(r)); }
    return list_of(texts);
}
static std::string peak_text(const PhaseMemory& m) { return m.oom ? oom_cell(m.oom) : gib(m.peak) + " GiB"; }
static std::string lengths(const Runs& runs) {
    return each(runs, [](auto& r) { return std::to_string(r.T); });
}
static std::string moment_of(const MemoryRun& r) {  // of the step's peak
    const double there = (double)r.step.peak_by[GRADIENTS] / r.step.all_gradients;
    return r.step.oom     ? "unknown, for lack of memory,"
           : there > 0.99 ? "in the optimizer, beside all gradients,"
           : there < 0.05 ? "just after the loss, beside all activations,"
                          : "in backward, beside a part of the gradients,";
}

static void answer_peaks(const Runs& runs) {
    const MemoryRun& r = runs.back();
    const PhaseMemory& forward = r.forward;
    answer("a",
           "Forward alone is flat: above the weights (%s GiB%s) it has one equal peak per layer, %s GiB at context "
           "length %d, because nothing is kept for backward.",
           gib(forward.peak_by[PARAMETERS]).c_str(),
           forward.peak_by[WEIGHT_COPIES] ? ", and their growing 16-bit copies" : "",
           gib(forward.peak_by[ACTIVATIONS]).c_str(), r.T);
    std::vector<std::string> moments;
    for (size_t i = 0, next; i < runs.size(); i = next) {
        for (next = i; next < runs.size() && moment_of(runs[next]) == moment_of(runs[i]);) { next++; }
        const Runs alike(runs.begin() + i, runs.begin() + next);
        moments.push_back(moment_of(runs[i]) + " at context length " + lengths(alike));
    }
    answer("a",
           "The stages of a step can be told apart: memory climbs through forward, falls layer by layer in backward "
           "while the gradients grow, and is nearly flat in the optimizer. Its peak is %s.",
           list_of(moments).c_str());
    answer("b", "At context length %s forward's peak is %s, a step's %s (%s, %s%s).", lengths(runs).c_str(),
           each(runs, [](auto& r) { return peak_text(r.forward); }).c_str(),
           each(runs, [](auto& r) { return peak_text(r.step); }).c_str(), r.config.name.c_str(), name_of(r.precision),
           r.predicted ? "; predicted" : "");
    if (r.precision == FP32) {
        answer("b",
               "Weights and AdamW's two moments are 3 x %s MiB of a step's peak at any length. The gradients are a "
               "fourth where the peak is after backward.",
               mib(forward.peak_by[PARAMETERS]).c_str());
    }
    if (!r.taped.oom) {
        answer("b", "At context length %d a forward that keeps what backward needs takes %s GiB more.", r.T,
               gib((double)r.taped.peak - forward.peak).c_str());
    }
    if (r.predicted && r.step.peak / 1073741824.0 > 139) {
        answer("b", "A step at context length %d needs more than an H200's 139 GiB.", r.T);
    }
}

static void answer_precision(const Runs& high, const Runs& low) {
    std::vector<std::string> forward, step;
    int more = 0, less = 0;
    size_t copies = 0;
    for (size_t i = 0; i < std::min(high.size(), low.size()); i++) {
        const MemoryRun &a = high[i], &b = low[i];
        forward.push_back(strprintf("%+.1f", 100 * ((double)b.forward.peak / a.forward.peak - 1)));
        (b.forward.peak > a.forward.peak ? more : less)++;
        copies = std::max(copies, b.forward.peak_by[WEIGHT_COPIES]);
        if (a.step.oom || b.step.oom) { continue; }
        step.push_back(strprintf("%+.1f", 100 * ((double)b.step.peak / a.step.peak - 1)));
        (b.step.peak > a.step.peak ? more : less)++;
    }
    answer("c", "%s takes %s memory than %s: forward %s %% at context length %s.", name_of(low[0].precision),
           less == 0   ? "more"
           : more == 0 ? "less"
                       : "in some rows more, in others less",
           name_of(high[0].precision), list_of(forward).c_str(), lengths(low).c_str());
    if (!step.empty()) { answer("c", "A step's peak changes by %s %%.", list_of(step).c_str()); }
    if (copies == 0) { return answer("c", "This mode keeps no 16-bit copies of weights beside those in fp32."); }
    answer("c", "Weights, gradients and moments stay in fp32, and a 16-bit copy of each matrix is added: %s GiB.",
           gib(copies).c_str());
    const PhaseMemory &a = high.back().step, &b = low.back().step;
    if (!a.oom && !b.oom && a.peak_by[GRADIENTS] < a.all_gradients / 2) {
        const double less = (double)a.peak_by[ACTIVATIONS] - b.peak_by[ACTIVATIONS];
        answer("c", "At context length %d, where activations make the step's peak, they %s by %s GiB.", high.back().T,
               less > 0 ? "shrink" : "grow", gib(std::fabs(less)).c_str());
    }
}

// What the largest arrays of a forward are.
static std::string largest_of(const MemoryRun& r) {
    std::vector<std::string> ops;
    int times = 0;
    const Allocation* first = nullptr;
    for (const Allocation& a : r.largest) {
        if (a.range == "held" || (first && a.bytes != first->bytes)) { continue; }
        if (!first) { first = &a; }
        times += a.times;
        ops.push_back(a.op);
    }
    if (!first) { return ""; }
    const ModelConfig& c = r.config;
    auto in = [&](const char* part) { return first->range.find(part) != std::string::npos; };
    const std::string what =
        first->category == WEIGHT_COPIES ? "16-bit copies of matrices,"
        : in("attention") ? strprintf("attention's scores, %d x %d x %d x %d numbers,", r.B, c.num_heads, r.T, r.T)
        : in("ffn")       ? strprintf("the feed-forward's, %d x %d x %d numbers,", r.B, r.T, c.d_ff)
                          : "in " + first->range + ",";
    return strprintf("At %d tokens the largest are %s %s MiB each, %g per layer (%s). ", r.T, what.c_str(),
                     mib(first->bytes).c_str(), (double)times / c.num_layers, list_of(ops).c_str());
}

static void answer_block(const MemoryRun& r, const Runs& low) {
    const BlockMemory& m = r.block;
    std::vector<std::string> ops;
    for (const auto& [op, bytes] : saved_most(m)) {
        ops.push_back(strprintf("%s %.1f %%", op.substr(op.rfind('/') + 1).c_str(), 100.0 * bytes / m.bytes));
    }
    answer("f", "One block saves %lld bytes (%s MiB) for backward in %s%s (%s at context length %d).",
           (long long)m.bytes, mib(m.bytes).c_str(), name_of(r.precision),
           low.empty()
               ? ""
               : strprintf(", %lld in %s", (long long)low.back().block.bytes, name_of(low[0].precision)).c_str(),
           r.config.name.c_str(), r.T);
    answer("f", "Most of it is saved by %s.", list_of(ops).c_str());
    const int64_t gradients = m.change + m.bytes - m.copies;
    answer("f",
           "Backward over the block frees that, but memory %s by only %s MiB: the difference, %s MiB, is the gradients "
           "of its parameters, %s.",
           m.change < 0 ? "falls" : "grows", mib(std::fabs(m.change)).c_str(), mib(gradients).c_str(),
           gradients == m.formula ? "as the formula says" : ("by the formula " + mib(m.formula) + " MiB").c_str());
}

void answer_memory_profiling(const Runs& runs) {
    std::map<Precision, Runs> by;
    for (const MemoryRun& r : runs) {
        if (!r.forward.oom) { by[r.precision].push_back(r); }
    }
    if (by.empty()) { return; }
    const Runs first = by.begin()->second;
    const MemoryRun& r = first.back();
    answer_peaks(first);
    for (auto it = std::next(by.begin()); it != by.end(); it++) { answer_precision(first, it->second); }
    auto stream = [](const MemoryRun& r) { return (double)r.B * r.T * r.config.d_model * 4; };
    const bool equal = std::all_of(first.begin(), first.end(), [&](auto& r) { return (double)r.stream == stream(r); });
    answer("d",
           "batch x context length x d_model x 4 bytes = %d x %d x %d x 4 / 1024^2 = %s MiB; at context length %s: %s "
           "MiB. %s for the embedding's output.",
           r.B, r.T, r.config.d_model, mib(stream(r)).c_str(), lengths(first).c_str(),
           each(first, [&](auto& r) { return mib(stream(r)); }).c_str(),
           equal ? (r.predicted ? "The prediction counts exactly that" : "The run allocated exactly that")
                 : "But the run allocated another number of bytes");
    answer("e", "%s%sThe weights were there before, and the optimizer allocates nothing in forward.",
           largest_of(r).c_str(), first.size() > 1 ? largest_of(first[0]).c_str() : "");
    if (r.block.bytes > 0) {
        answer_block(r, by.size() > 1 ? std::next(by.begin())->second : Runs());
    } else {
        answer("f", "%s", r.block.oom ? "Three blocks do not fit." : "Left out: a checkpoint keeps only its input.");
    }
}

// Without a GPU nothing is computed, and the handout's sizes are predicted.
int cmd_memory_profiling(const Options& asked) {
    Options o = asked;
    context.device = choose_device(o.device);
    context.each_launch = true;
    if (!o.out.empty() && mkdir(o.out.c_str(), 0777) != 0 && errno != EEXIST) {
        usage_error("--out %s: %s", o.out.c_str(), strerror(errno));
    }
    const bool predicted = context.device == CPU;
    if (predicted) { context.sizes = ""; }  // they are the handout's
    if (o.quick && !predicted) {
        by_quick(o, "size", &Options::size, {"small"});
        by_quick(o, "context_length", &Options::context_lengths, {128});
    }
    std::unique_ptr<Planning> planning(predicted ? new Planning : nullptr);
    const std::vector<ModelConfig> configs = configs_of(o);
    const std::vector<Precision> precisions = precisions_of(o);
    context.mode = modes_of(o, configs, precisions)[0];
    bool ran = false;
    for (const ModelConfig& c : configs) {
        Runs runs;
        for (Precision precision : precisions) {
            for (int T : o.context_lengths) {
                give_back_cached_memory();
                runs.push_back(profile_memory(c, precision, o.batch_size, T, o.seed, o.out));
                ran = ran || runs.back().forward.oom == 0;
            }
        }
        const std::string setting = strprintf("size %s, mode %s%s", c.name.c_str(), caption_of(context.mode).c_str(),
                                              predicted ? ", predicted" : "");
        print_peaks(runs, setting + strprintf(", batch %d, vocabulary %d; %s", o.batch_size, c.vocab_size,
                                              predicted ? "every allocation counted" : "the second run of each phase"));
        print_categories(runs, setting);
        print_largest(runs, setting);
        if (!context.checkpoint) { print_blocks(runs, setting); }
        answer_memory_profiling(runs);
    }
    if (!ran) { fail("memory_profiling: no forward fits into memory"); }
    return 0;
}
