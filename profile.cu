// profile.cu: section 1.1.4. What a trace says: which kernels, in which part of the model, on tensor cores or not; the
// trace as a file; nsys_profile.
#include "commands.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include <nlohmann/json.hpp>

using Json = nlohmann::ordered_json;

// ---------------------------------------------------------------------------------------------------------------------
// Kernel names. The first rule whose pattern occurs in the name holds.
//   cuBLAS: nvjet (Hopper's own), xmma, cutlass, gemv. `tensorop`, `s1688`, `s16816`, `hmma`, `wgmma` are names of
//   tensor core instructions; `simt` and `ffma` mean fp32 multiply-adds on the CUDA cores, and so does ampere_sgemm. On
//   the CPU the names are those of ranges.

struct KernelRule {
    const char* pattern;
    KernelClass is;
};
static const KernelRule kernel_rules[] = {
    {"nccl", {"communication", false}},
    {"[CUDA mem", {"copy", false}},
    {"hopper_", {"attention", true}},
    {"flash_forward_kernel", {"attention", true}},  // fast_flash_mma.cu
    {"backward_main", {"attention", true}},
    {"backward_dq", {"attention", true}},
    {"backward_before", {"attention", false}},
    {"backward_after", {"attention", false}},
    {"flash_v1_", {"attention", false}},        // attention.cu
    {"_fp32_kernel", {"attention", false}},     // fast_flash_fp32.cu
    {"flash_fwd_kernel", {"attention", true}},  // FlashAttention-2 in PyTorch
    {"flash_bwd", {"attention", true}},
    {"fmha_cutlass", {"attention", true}},
    {"simt", {"matmul", false}},
    {"ffma", {"matmul", false}},
    {"ampere_sgemm", {"matmul", false}},
    {"splitKreduce", {"matmul", false}},
    {"gemv", {"matmul", false}},
    {"nvjet", {"matmul", true}},
    {"tensorop", {"matmul", true}},
    {"s1688", {"matmul", true}},
    {"s16816", {"matmul", true}},
    {"hmma", {"matmul", true}},
    {"wgmma", {"matmul", true}},
    {"bf16bf16", {"matmul", true}},
    {"f16f16", {"matmul", true}},
    {"tf32", {"matmul", true}},
    {"gemm", {"matmul", false}},
    {"matmul", {"matmul", false}},
    {"softmax", {"softmax", false}},
    {"rmsnorm", {"norm", false}},
    {"layer_norm", {"norm", false}},
    {"split_heads_kernel", {"rope", false}},
    {"rope_kernel", {"rope", false}},
    {"rope", {"rope", false}},
    {"cross_entropy", {"loss", false}},
    {"pick_last_kernel", {"loss", false}},
    {"loss", {"loss", false}},
    {"adamw", {"optimizer", false}},
    {"multi_tensor_apply", {"optimizer", false}},
    {"optimizer", {"optimizer", false}},
    {"gather_rows", {"embedding", false}},
    {"embedding", {"embedding", false}},
    {"Copy>", {"copy", false}},
    {"direct_copy", {"copy", false}},
    {"square_sum_kernel", {"reduction", false}},
    {"sum_chunks_kernel", {"reduction", false}},
    {"sum_columns_kernel", {"reduction", false}},
    {"reduce", {"reduction", false}},
    {"argmax_rows_kernel", {"reduction", false}},
    {"weighted_sum", {"reduction", false}},
    {"elementwise", {"elementwise", false}},
    {"swiglu", {"elementwise", false}},
    {"normal_kernel", {"elementwise", false}},
    {"arange_kernel", {"elementwise", false}},
    {"residual", {"elementwise", false}},
    {"mask", {"elementwise", false}},
    {"scores", {"elementwise", false}},
};

KernelClass kernel_class(const std::string& kernel) {
    for (const KernelRule& rule : kernel_rules) {
        if (kernel.find(rule.pattern) != std::string::npos) { return rule.is; }
    }
    return {"other", false};
}

std::string short_kernel_name(const std::string& name) {
    std::string s = name;
    const std::string anonymous = "(anonymous namespace)::";
    for (size_t at; (at = s.find(anonymous)) != std::string::npos;) { s.erase(at, anonymous.size()); }
    if (s.compare(0, 5, "void ") == 0) { s.erase(0, 5); }
    int depth = 0;  // of template arguments, where a parenthesis is no parameter list
    for (size_t i = 0; i < s.size(); i++) {
        depth += s[i] == '<' ? 1 : s[i] == '>' ? -1 : 0;
        if (s[i] == '(' && depth == 0 && i > 0) { return s.substr(0, i); }
    }
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// Ranges as paths. A backward step stands below its own `backward`, and then where the forward recorded it:
// step/backward/layer/attention/softmax.

std::vector<std::string> range_paths(const Trace& trace) {
    std::vector<std::string> paths;
    for (const TracedRange& r : trace.ranges) {  // parents stand before their children
        std::string above = r.parent < 0 ? "" : paths[r.parent], own = r.name;
        if (r.recorded_in >= 0) {
            own = paths[r.recorded_in];
            for (const char* outer : {"step/", "forward/"}) {
                if (own.compare(0, strlen(outer), outer) == 0) { own.erase(0, strlen(outer)); }
            }
        }
        paths.push_back(above.empty() || own.empty() ? above + own : above + "/" + own);
    }
    return paths;
}
static bool is_in(const std::string& path, const std::string& range) {
    if (range.empty()) { return true; }
    return path.compare(0, range.size(), range) == 0 && (path.size() == range.size() || path[range.size()] == '/');
}
static bool passes(const std::string& path, const char* range) {
    return ("/" + path + "/").find(std::string("/") + range + "/") != std::string::npos;
}

std::vector<TracedWork> work_of_ranges(const Trace& trace) {
    std::vector<TracedWork> work;
    for (const TracedRange& r : trace.ranges) {
        TracedWork w{};
        w.name = r.name, w.range = (int)work.size();
        w.start = r.start, w.end = r.end;
        work.push_back(w);
    }
    for (const TracedRange& r : trace.ranges) {
        if (r.parent >= 0) { work[r.parent].end -= r.end - r.start; }
    }
    return work;
}

// ---------------------------------------------------------------------------------------------------------------------
// Sums

struct NamedWork {
    std::string kernel, path;
    KernelClass is;
    double ns;
};
static std::vector<NamedWork> named_work(const Trace& trace, const std::vector<std::string>& ranges) {
    std::vector<std::string> paths = range_paths(trace);
    std::vector<NamedWork> found;
    for (const TracedWork& w : trace.work) {
        const std::string path = w.range < 0 ? "" : paths[w.range];
        bool wanted = std::any_of(ranges.begin(), ranges.end(), [&](auto& range) { return is_in(path, range); });
        if (!wanted) { continue; }
        std::string name = short_kernel_name(w.name);
        KernelClass is = kernel_class(name);
        if (passes(path, "matmul")) { is.name = "matmul"; }  // cuBLAS clears or copies something first, here and there
        found.push_back({name, path, is, (double)(w.end - w.start)});
    }
    return found;
}
static double sum_of(const std::vector<NamedWork>& work, const std::function<bool(const NamedWork&)>& wanted) {
    double ns = 0;
    for (const NamedWork& w : work) { ns += wanted(w) ? w.ns : 0; }
    return ns;
}
static double sum_of(const std::vector<NamedWork>& work) {
    return sum_of(work, [](const NamedWork&) { return true; });
}
static bool is_class(const NamedWork& w, const std::string& name) { return w.is.name == name; }

// Grouped by the text that `key` gives, the largest total time first.
static std::vector<KernelSummary> group(const std::vector<NamedWork>& work,
                                        const std::function<std::string(const NamedWork&)>& key) {
    std::map<std::string, std::vector<double>> times;
    for (const NamedWork& w : work) { times[key(w)].push_back(w.ns); }
    std::vector<KernelSummary> all;
    for (const auto& [name, ns] : times) { all.push_back({name, stats_of(ns)}); }
    std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.total_ns() > b.total_ns(); });
    return all;
}
static std::vector<KernelSummary> by_kernel(const std::vector<NamedWork>& work) {
    return group(work, [](const NamedWork& w) { return w.kernel; });
}
std::vector<KernelSummary> kernel_summary(const Trace& trace, const std::string& range) {
    return by_kernel(named_work(trace, {range}));
}

// ---------------------------------------------------------------------------------------------------------------------
// Trace files

constexpr size_t TRACE_FILE_BYTES = 95000000;  // viewers in a browser become slow with more
constexpr int64_t DAY = 86400LL * 1000000000;  // ns

static std::string text_of(const Json& json) { return json.dump(-1, ' ', true, Json::error_handler_t::replace); }
static double microseconds(int64_t ns) { return (double)ns / 1e3; }
static std::string slice(const char* category, const std::string& name, int pid, int tid, int64_t start, int64_t ns,
                         const Json& args) {
    return text_of({{"ph", "X"},
                    {"cat", category},
                    {"name", name},
                    {"pid", pid},
                    {"tid", tid},
                    {"ts", microseconds(start)},
                    {"dur", microseconds(ns)},
                    {"args", args}});
}
static std::string label(const char* what, int pid, int tid, const std::string& name) {
    return text_of({{"ph", "M"}, {"name", what}, {"pid", pid}, {"tid", tid}, {"args", {{"name", name}}}});
}
// The events are dumped one by one: as a single value a large file would take ten times its size.
static void save_trace(const std::string& path, const std::vector<std::string>& events, const Json& other) {
    save_file(path, "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n" + join(events, ",\n") +
                        "\n],\"otherData\":" + text_of(other) + "}\n");
}

// Rows of the timeline. A row's slices have to nest, so where work of one stream overlaps it gets another row.
struct Rows {
    std::map<std::pair<std::string, int>, std::pair<int, int64_t>> rows;  // (name, copy) -> (tid, end of the last)
    int row_of(const std::string& name, int64_t start, int64_t end, int first_tid) {
        for (int copy = 0;; copy++) {
            auto row = rows.emplace(std::make_pair(name, copy), std::make_pair(first_tid + (int)rows.size(), 0)).first;
            if (row->second.second > start) { continue; }
            row->second.second = end;
            return row->second.first;
        }
    }
};

struct TraceEvent {
    int64_t time;
    std::string text;
};
static Json args_of(const TracedWork& w, const std::string& path) {
    Json args = {{"range", path}, {"correlation", w.correlation}};
    if (w.grid[0] == 0) {
        args["bytes"] = w.bytes;
        return args;
    }
    args["grid"] = strprintf("%d x %d x %d", w.grid[0], w.grid[1], w.grid[2]);
    args["block"] = strprintf("%d x %d x %d", w.block[0], w.block[1], w.block[2]);
    args["registers"] = w.registers;
    args["shared memory (bytes)"] = w.shared_bytes;
    args["class"] = kernel_class(w.name).name;
    return args;
}
static void add_events(const Trace& trace, int rank, int64_t midnight, std::map<int, int>& threads, Rows& rows,
                       std::vector<TraceEvent>& events) {
    std::vector<std::string> paths = range_paths(trace);
    for (size_t i = 0; i < trace.ranges.size(); i++) {
        const TracedRange& r = trace.ranges[i];
        int tid = threads.emplace(r.thread, (int)threads.size() + 1).first->second;
        events.push_back({r.start, slice("range", *r.name ? r.name : "(unnamed)", rank, tid, r.start - midnight,
                                         r.end - r.start, {{"path", paths[i]}})});
    }
    for (const TracedWork& w : trace.work) {
        int tid = rows.row_of(strprintf("stream %u", w.stream), w.start, w.end, 1000);
        events.push_back(
            {w.start, slice(w.grid[0] > 0 ? "kernel" : "copy", short_kernel_name(w.name), rank, tid, w.start - midnight,
                            w.end - w.start, args_of(w, w.range < 0 ? "" : paths[w.range]))});
    }
    for (const TracedMemory& m : trace.memory) {
        events.push_back({m.time, text_of({{"ph", "C"},
                                           {"name", "memory"},
                                           {"pid", rank},
                                           {"ts", microseconds(m.time - midnight)},
                                           {"args", {{"bytes held", m.bytes}}}})});
    }
}

void write_trace(const std::string& path, const std::vector<Trace>& traces, const std::string& caption) {
    const char* rank_text = getenv("RANK");
    int rank = rank_text ? atoi(rank_text) : 0;
    std::vector<TraceEvent> events;
    std::map<int, int> threads;  // the system's number -> ours
    Rows rows;
    size_t dropped = 0, left_out = 0, bytes = 0;
    std::string no_kernels;
    int64_t midnight = INT64_MAX;
    for (const Trace& trace : traces) {
        for (const TracedRange& r : trace.ranges) { midnight = std::min(midnight, r.start / DAY * DAY); }
        for (const TracedWork& w : trace.work) { midnight = std::min(midnight, w.start / DAY * DAY); }
        for (const TracedMemory& m : trace.memory) { midnight = std::min(midnight, m.time / DAY * DAY); }
    }
    for (const Trace& trace : traces) {
        dropped += trace.dropped, left_out += trace.left_out;
        no_kernels = trace.no_kernels;
        add_events(trace, rank, midnight, threads, rows, events);
    }
    std::stable_sort(events.begin(), events.end(),
                     [](const TraceEvent& a, const TraceEvent& b) { return a.time < b.time; });
    std::vector<std::string> texts = {label("process_name", rank, 0, strprintf("rank %d", rank))};
    for (const auto& [system, tid] : threads) {
        texts.push_back(label("thread_name", rank, tid, strprintf("CPU thread %d", system)));
    }
    for (const auto& [name, row] : rows.rows) {
        texts.push_back(label("thread_name", rank, row.first, name.first + (name.second ? ", overlapping" : "")));
    }
    for (TraceEvent& event : events) {
        bytes += event.text.size() + 2;
        if (bytes > TRACE_FILE_BYTES) {  // and all that comes later
            left_out++;
        } else {
            texts.push_back(std::move(event.text));
        }
    }
    save_trace(path, texts,
               {{"caption", caption},
                {"times", "microseconds since midnight, UTC"},
                {"kernels", no_kernels.empty() ? "traced" : no_kernels},
                {"records dropped by CUPTI", std::to_string(dropped)},
                {"events left out", std::to_string(left_out)}});
    if (left_out > 0) { note("%s: the last %zu events are left out, it would be too large", path.c_str(), left_out); }
}

void merge_traces(const std::string& path, const std::vector<std::string>& files_of_ranks) {
    std::vector<std::string> events;
    Json other;  // rank 0's
    for (size_t r = 0; r < files_of_ranks.size(); r++) {
        std::ifstream file(files_of_ranks[r]);
        const Json part = Json::parse(file, nullptr, false);
        if (!part.contains("traceEvents") || !part.contains("otherData")) {
            fail("%s: not there; are rank %zu's files elsewhere?", files_of_ranks[r].c_str(), r);
        }
        for (const Json& event : part["traceEvents"]) { events.push_back(text_of(event)); }
        if (r == 0) { other = part["otherData"]; }
    }
    save_trace(path, events, other);
}

// ---------------------------------------------------------------------------------------------------------------------
// nsys_profile: forward alone and whole steps, each timed untraced and traced. The answers need these parts of a model:

struct Part {
    const char* name;
    Phase phase;                      // in whose trace
    std::vector<std::string> ranges;  // of it
};
static const std::vector<Part> parts = {
    {"forward", FORWARD, {"forward"}},
    {"forward+backward", STEP, {"step/forward", "step/loss", "step/backward"}},
    {"step", STEP, {"step"}},
};

struct Profiled : Attempt {
    Stats untraced{}, traced{};
    size_t peak = 0;  // bytes
    Trace trace;
};
struct ModelProfile {
    ModelConfig config;
    int T;
    Profiled phase[STEP + 1];  // FORWARD and STEP
};

static Plan plan_of(const Options& o) {
    Plan p{o};
    bool cpu = context.device == CPU;
    if (cpu || o.quick) {
        p.shrink_size();
        p.shrink("context_length", &Options::context_lengths, {cpu && o.quick ? 32 : 128});
        p.shrink("batch_size", &Options::batch_size, cpu ? 1 : o.batch_size);
        p.shrink("warmup", &Options::warmup, {1});
        p.shrink("steps", &Options::steps, 2);
    }
    p.choose_models();
    return p;
}
static int passes_of(const Plan& p) { return p.o.steps + 1; }  // in a trace: one more, first, is not timed
static std::string profile_caption(const Plan& p, const std::string& setting, const std::string& what) {
    const char* how = context.device == CPU ? "no kernels on a CPU: ranges of operations, timed by the clock; " : "";
    return strprintf("nsys_profile %s; %s; batch %d, vocabulary %s, %d warmup, %d step; %s%s", what.c_str(),
                     setting.c_str(), p.o.batch_size, vocabulary_of(p.configs).c_str(), p.o.warmup[0], p.o.steps, how,
                     p.origin().c_str());
}
// For the tables of one precision and mode.
static std::string profile_caption(const Plan& p, const std::string& what) {
    return profile_caption(p, strprintf("precision %s, mode %s", name_of(context.precision), name_of(context.mode)),
                           what);
}

static void profile_phase(Profiled& r, Phase phase, Model& model, const Batch& batch, const Plan& p) {
    LossScaler scaler;
    auto pass = [&] {
        if (phase == FORWARD) { return run_phase(phase, model, batch, scaler); }
        Range range("step");
        run_phase(phase, model, batch, scaler);
    };
    int half = (p.o.steps + 1) / 2;  // untraced before, and as many after: a machine's speed wanders
    reset_peak(context.device);
    std::vector<double> untraced = time_ms(p.o.warmup[0], half, pass), traced;
    start_tracing();
    try {
        traced = time_ms(1, p.o.steps, pass);
    } catch (...) {
        stop_tracing();
        throw;
    }
    Trace trace = stop_tracing();
    std::vector<double> after = time_ms(1, half, pass);
    untraced.insert(untraced.end(), after.begin(), after.end());
    r.untraced = stats_of(untraced), r.traced = stats_of(traced);
    r.peak = memory_use(context.device).peak;
    r.trace = std::move(trace);
    if (context.device == CPU) { r.trace.work = work_of_ranges(r.trace); }
}
static ModelProfile profile_model(const ModelConfig& c, int T, const Plan& p) {
    ModelProfile r{c, T, {}};
    for (Phase phase : {FORWARD, STEP}) { r.phase[phase].needs = predicted_peak(c, p.o.batch_size, T, phase); }
    Model model;
    Batch batch;
    for (Phase phase : {FORWARD, STEP}) {
        auto profile = [&] {
            if (!model.weights) {
                model = random_model(c, p.o.seed);
                batch = random_batch(p.o.batch_size, T, c.vocab_size, p.o.seed);
            }
            profile_phase(r.phase[phase], phase, model, batch, p);
        };
        double passes = p.o.warmup[0] + 2 * p.o.steps + 3;  // see profile_phase
        r.phase[phase].run(row_of(c, p.o.batch_size, T, phase), passes, profile, memory_use(context.device).now);
        if (!r.phase[phase].ran && !context.plan_only) { break; }
    }
    return r;
}

// ---------------------------------------------------------------------------------------------------------------------
// Its tables

static std::string ms_of_ns(double ns) { return strprintf("%.3f", ns / 1e6); }
static std::string percent(double part, double whole) { return whole > 0 ? strprintf("%.1f", 100 * part / whole) : ""; }
static std::string with_unit(double ns) {  // as nsys prints times: a unit in each cell
    return ns >= 1e9   ? strprintf("%.3f s", ns / 1e9)
           : ns >= 1e6 ? strprintf("%.3f ms", ns / 1e6)
           : ns >= 1e3 ? strprintf("%.3f μs", ns / 1e3)
                       : strprintf("%.0f ns", ns);
}
static std::vector<std::string> model_cells(const ModelProfile& m) { return {m.config.name, std::to_string(m.T)}; }

// Adds a row. A row that is short, for want of memory, ends in empty cells.
static void add_row(Table& table, std::vector<std::string> cells, const std::vector<std::string>& more) {
    cells.insert(cells.end(), more.begin(), more.end());
    cells.resize(table.columns.size());
    table.rows.push_back(cells);
}

// A forward's time in its trace: from its first kernel's start to the end of its last (on a CPU: of its ranges), the
// median of all passes.
static double forward_ms_of(const Trace& trace) {
    std::vector<int> outermost;
    std::map<int, std::pair<int64_t, int64_t>> passes;
    auto widen = [&](int range, int64_t start, int64_t end) {
        if (range < 0 || strcmp(trace.ranges[outermost[range]].name, "forward") != 0) { return; }
        auto& pass = passes.emplace(outermost[range], std::make_pair(start, end)).first->second;
        pass = {std::min(pass.first, start), std::max(pass.second, end)};
    };
    for (size_t i = 0; i < trace.ranges.size(); i++) {  // parents stand before their children
        const TracedRange& r = trace.ranges[i];
        outermost.push_back(r.parent < 0 ? (int)i : outermost[r.parent]);
        if (context.device == CPU) { widen((int)i, r.start, r.end); }
    }
    for (const TracedWork& w : trace.work) { widen(w.range, w.start, w.end); }
    std::vector<double> ns;
    for (const auto& [range, pass] : passes) { ns.push_back((double)(pass.second - pass.first)); }
    return stats_of(ns).median / 1e6;
}

// A vector per size, with all its lengths. A row per model: does the trace's time match the clock's, what takes most of
// it, and does a step fit.
using Sizes = std::vector<std::vector<ModelProfile>>;
static Table overview_table(const Sizes& sizes, const Plan& p) {
    Table table{profile_caption(p,
                                "overview: forward by the clock and in the trace, medians; the kernel with the most "
                                "time; whether a step fits"),
                {"size", "context length", "forward by the clock (ms)", "forward in the trace (ms)", "difference (%)",
                 "sum of its kernels (ms)", "step by the clock (ms)", "step peak (MiB)", "Time (%)",
                 "launches per forward", "top kernel of forward"},
                {}};
    for (const std::vector<ModelProfile>& lengths : sizes) {
        for (const ModelProfile& m : lengths) {
            const Profiled &forward = m.phase[FORWARD], &step = m.phase[STEP];
            std::vector<NamedWork> work = named_work(forward.trace, {"forward"});
            std::vector<std::string> cells = model_cells(m), of_trace(3), of_kernel(3);
            if (!work.empty()) {
                double in_trace = forward_ms_of(forward.trace), clock = forward.untraced.median;
                KernelSummary k = by_kernel(work)[0];
                of_trace = {strprintf("%.3f", in_trace), strprintf("%.1f", 100 * (in_trace / clock - 1)),
                            ms_of_ns(sum_of(work) / passes_of(p))};
                of_kernel = {percent(k.total_ns(), sum_of(work)), strprintf("%g", (double)k.ns.n / passes_of(p)),
                             "`" + k.name + "`"};
            }
            cells.push_back(forward.cell(strprintf("%.3f", forward.untraced.median)));
            cells.insert(cells.end(), of_trace.begin(), of_trace.end());
            cells.push_back(step.cell(strprintf("%.3f", step.untraced.median)));
            cells.push_back(step.ran ? strprintf("%.1f", step.peak / 1048576.0) : "");
            add_row(table, cells, of_kernel);
        }
    }
    return table;
}
// The largest size of which a step ran, or a forward, or the first.
static const std::vector<ModelProfile>& largest_that_fitted(const Sizes& sizes) {
    for (Phase phase : {STEP, FORWARD}) {
        for (size_t i = sizes.size(); i-- > 0;) {
            for (const ModelProfile& m : sizes[i]) {
                if (m.phase[phase].ran) { return sizes[i]; }
            }
        }
    }
    return sizes[0];
}
// Its longest context length of which a step ran, or a forward; null: none ran.
static const ModelProfile* longest_that_fitted(const std::vector<ModelProfile>& lengths) {
    const ModelProfile* longest = nullptr;
    for (Phase phase : {FORWARD, STEP}) {
        for (const ModelProfile& m : lengths) {
            if (m.phase[phase].ran) { longest = &m; }
        }
    }
    return longest;
}

static Table time_table(const std::vector<ModelProfile>& models, const Plan& p) {
    size_t dropped = 0, left_out = 0;
    Table table{"",
                {"size", "context length", "phase", "untraced (ms)", "std", "traced (ms)", "std", "tracing adds (%)",
                 "sum of kernels (ms)", "kernels"},
                {}};
    for (const ModelProfile& m : models) {
        for (Phase phase : {FORWARD, STEP}) {
            const Profiled& r = m.phase[phase];
            std::vector<std::string> cells = model_cells(m);
            cells.push_back(phase == FORWARD ? "forward" : "step");
            if (!r.ran) {
                add_row(table, cells, {oom_cell(r.needs.bytes)});
                continue;
            }
            dropped += r.trace.dropped, left_out += r.trace.left_out;
            std::vector<NamedWork> work = named_work(r.trace, {""});
            bool traced = !work.empty();
            add_row(table, cells,
                    {strprintf("%.3f", r.untraced.median), strprintf("%.3f", r.untraced.std),
                     strprintf("%.3f", r.traced.median), strprintf("%.3f", r.traced.std),
                     strprintf("%.1f", 100 * (r.traced.median / r.untraced.median - 1)),
                     traced ? ms_of_ns(sum_of(work) / passes_of(p)) : "",
                     traced ? strprintf("%.0f", (double)work.size() / passes_of(p)) : ""});
        }
    }
    table.caption = profile_caption(
        p, strprintf("(a): medians by the clock, and sums of the trace; %zu records dropped, %zu left out", dropped,
                     left_out));
    return table;
}

static Table summary_table(const ModelProfile& m, const std::string& range, int top, const Plan& p) {
    Table table{"", {"Time (%)", "Total Time", "Instances", "Avg", "Med", "Min", "Max", "StdDev", "Name"}, {}};
    const Profiled& r = m.phase[is_in(range, "step") ? STEP : FORWARD];
    std::vector<KernelSummary> all = kernel_summary(r.trace, range);
    if (r.ran && all.empty()) { fail("--range %s: nothing ran there", range.c_str()); }
    double total = 0;
    for (const KernelSummary& k : all) { total += k.total_ns(); }
    for (const KernelSummary& k : all) {
        if ((int)table.rows.size() == top) { break; }
        table.rows.push_back({percent(k.total_ns(), total) + "%", with_unit(k.total_ns()), std::to_string(k.ns.n),
                              with_unit(k.ns.mean), with_unit(k.ns.median), with_unit(k.ns.min), with_unit(k.ns.max),
                              with_unit(k.ns.std), "`" + k.name + "`"});
    }
    table.caption = profile_caption(
        p, strprintf("kernel summary: %s, context length %d, range %s, %d passes, the first %zu of %zu kernels%s",
                     m.config.name.c_str(), m.T, range.c_str(), passes_of(p), table.rows.size(), all.size(),
                     r.ran ? "" : ", OOM"));
    return table;
}

static std::string part_of_model(const NamedWork& w) {  // "ffn" of step/forward/layer/ffn
    size_t layer = w.path.find("layer/"), at = layer == std::string::npos ? w.path.find('/') + 1 : layer + 6;
    return at == 0 ? w.path : w.path.substr(at);
}
// The parts of the model that the kernel's launches are for: its time in each and the launches per pass, most time
// first.
static std::string runs_in(const std::vector<NamedWork>& work, const KernelSummary& kernel, int passes) {
    std::vector<NamedWork> same;
    std::copy_if(work.begin(), work.end(), std::back_inserter(same),
                 [&](const NamedWork& w) { return w.kernel == kernel.name; });
    std::vector<std::string> all;
    for (const KernelSummary& part : group(same, part_of_model)) {
        all.push_back(strprintf("%s (%s %%, %g launches)", part.name.c_str(),
                                percent(part.total_ns(), kernel.total_ns()).c_str(), (double)part.ns.n / passes));
    }
    return join(all, ", ");
}
static Table top_kernel_table(const std::vector<ModelProfile>& models, const Plan& p) {
    Table table{profile_caption(p, "(b): the kernel with the most time"),
                {"size", "context length", "phase", "Time (%)", "launches per pass", "class", "tensor cores",
                 "the forward's, too", "runs in", "kernel"},
                {}};
    for (const ModelProfile& m : models) {
        std::string forward_top;
        for (const Part& part : parts) {
            std::vector<std::string> cells = model_cells(m);
            cells.push_back(part.name);
            std::vector<NamedWork> work = named_work(m.phase[part.phase].trace, part.ranges);
            if (work.empty()) {
                add_row(table, cells, {oom_cell(m.phase[part.phase].needs.bytes)});
                continue;
            }
            KernelSummary k = by_kernel(work)[0];
            KernelClass is = kernel_class(k.name);
            if (part.phase == FORWARD) { forward_top = k.name; }
            add_row(table, cells,
                    {percent(k.total_ns(), sum_of(work)), strprintf("%g", (double)k.ns.n / passes_of(p)), is.name,
                     is.tensor_cores ? "yes" : "no", k.name == forward_top ? "yes" : "no",
                     runs_in(work, k, passes_of(p)), "`" + k.name + "`"});
        }
    }
    return table;
}

// The work that is no matrix product, by the part of the model that it is for.
static Table other_parts_table(const ModelProfile& m, int top, const Plan& p) {
    Table table{profile_caption(p, strprintf("(c): what is not a matrix product, forward of %s, context length %d",
                                             m.config.name.c_str(), m.T)),
                {"part of the model", "Time (%)", "ms per forward", "kernels per forward"},
                {}};
    std::vector<NamedWork> work = named_work(m.phase[FORWARD].trace, {"forward"}), rest;
    for (const NamedWork& w : work) {
        if (!is_class(w, "matmul")) { rest.push_back(w); }
    }
    for (const KernelSummary& k : group(rest, part_of_model)) {
        if ((int)table.rows.size() == top) { break; }
        table.rows.push_back({k.name, percent(k.total_ns(), sum_of(work)), ms_of_ns(k.total_ns() / passes_of(p)),
                              strprintf("%g", (double)k.ns.n / passes_of(p))});
    }
    return table;
}

static const std::vector<Part> shared_parts = {
    parts[0],
    parts[1],
    parts[2],
    {"step: backward", STEP, {"step/backward"}},
    {"step: optimizer", STEP, {"step/optimizer"}},
};
// Classes by the time that they take in all models, the largest first.
static std::vector<std::string> classes_of(const std::vector<ModelProfile>& models) {
    std::vector<NamedWork> all;
    for (const ModelProfile& m : models) {
        for (Phase phase : {FORWARD, STEP}) {
            std::vector<NamedWork> work = named_work(m.phase[phase].trace, {""});
            all.insert(all.end(), work.begin(), work.end());
        }
    }
    std::vector<std::string> names;
    for (const KernelSummary& k : group(all, [](const NamedWork& w) { return w.is.name; })) { names.push_back(k.name); }
    return names;
}
static Table share_table(const std::vector<ModelProfile>& models, const Plan& p) {
    Table table{profile_caption(p, "(c), (d): share of each class of kernels in the time of all (%)"),
                {"size", "context length", "phase", "all (ms)", "on tensor cores"},
                {}};
    std::vector<std::string> classes = classes_of(models);
    table.columns.insert(table.columns.end(), classes.begin(), classes.end());
    for (const ModelProfile& m : models) {
        for (const Part& part : shared_parts) {
            std::vector<NamedWork> work = named_work(m.phase[part.phase].trace, part.ranges);
            std::vector<std::string> cells = model_cells(m);
            cells.push_back(part.name);
            if (work.empty()) {
                add_row(table, cells, {oom_cell(m.phase[part.phase].needs.bytes)});
                continue;
            }
            double all = sum_of(work), cores = sum_of(work, [](const NamedWork&w) { return w.is.tensor_cores; });
            std::vector<std::string> more = {ms_of_ns(all / passes_of(p)), percent(cores, all)};
            for (const std::string& name : classes) {
                more.push_back(percent(sum_of(work, [&](const NamedWork& w) { return is_class(w, name); }), all));
            }
            add_row(table, cells, more);
        }
    }
    return table;
}

// FLOPs of one forward, as the handout counts them: softmax 5 per entry of S (maximum, subtract, exp, sum, divide),
// the two products 2 D each. Bytes at least: each operand read once, each result written once.
static Table softmax_table(const std::vector<ModelProfile>& models, const Plan& p) {
    Table table{profile_caption(p, "(e): softmax beside the attention's two matrix products, per forward"),
                {"size", "context length", "softmax (ms)", "products (ms)", "ratio of times", "softmax (GFLOP)",
                 "products (GFLOP)", "ratio of FLOPs (5 : 4 D)", "softmax (MiB, at least)", "products (MiB, at least)",
                 "ratio of bytes"},
                {}};
    for (const ModelProfile& m : models) {
        if (!m.phase[FORWARD].ran) {
            add_row(table, model_cells(m), {oom_cell(m.phase[FORWARD].needs.bytes)});
            continue;
        }
        const ModelConfig& c = m.config;
        double B = p.o.batch_size, BTC = B * m.T * c.d_model, S = B * c.num_heads * m.T * m.T, L = c.num_layers;
        double element = size_of(matmul_dtype());
        double softmax_flops = 5 * S * L, product_flops = 4.0 * S * L * c.d_model / c.num_heads;
        double softmax_bytes = 2 * S * L * element, product_bytes = (4 * BTC + 2 * S) * L * element;
        std::vector<NamedWork> work = named_work(m.phase[FORWARD].trace, {"forward"});
        double softmax = sum_of(work, [](const NamedWork& w) { return passes(w.path, "softmax"); });
        double products =
            sum_of(work, [](const NamedWork& w) { return passes(w.path, "attention") && is_class(w, "matmul"); });
        double one = sum_of(work, [](const NamedWork& w) { return passes(w.path, "attention"); });  // mode flash
        bool both = softmax > 0 && products > 0;
        auto mib = [](double bytes) { return strprintf("%.1f", bytes / 1048576); };
        add_row(table, model_cells(m),
                {both ? ms_of_ns(softmax / passes_of(p)) : "in one kernel",
                 ms_of_ns((both ? products : one) / passes_of(p)),
                 both ? strprintf("1 : %.2f", products / softmax) : "", strprintf("%.3f", softmax_flops / 1e9),
                 strprintf("%.3f", product_flops / 1e9), strprintf("1 : %.1f", product_flops / softmax_flops),
                 mib(softmax_bytes), mib(product_bytes), strprintf("1 : %.2f", product_bytes / softmax_bytes)});
    }
    return table;
}

// A bar's label names what differs from bar to bar.
static void add_bars(const std::vector<ModelProfile>& models, const Plan& p, const std::string& setting,
                     std::vector<std::string>& bars, std::map<std::string, std::vector<double>>& classes) {
    for (const ModelProfile& m : models) {
        for (const Part& part : parts) {
            std::vector<NamedWork> work = named_work(m.phase[part.phase].trace, part.ranges);
            if (work.empty()) { continue; }
            std::string label = setting.empty() ? "" : setting + " ";
            if (p.configs.size() > 1) { label += m.config.name + " "; }
            if (p.o.context_lengths.size() > 1) { label += std::to_string(m.T) + " "; }
            bars.push_back(label + (part.ranges.size() > 1 ? "fw+bw" : part.name));
            for (const NamedWork& w : work) { classes[w.is.name].resize(bars.size()); }
            for (const NamedWork& w : work) { classes[w.is.name].back() += w.ns; }
        }
    }
}
static void plot_shares(const std::string& path, const std::vector<std::string>& bars,
                        std::map<std::string, std::vector<double>>& classes, const std::string& caption) {
    std::vector<Series> series;
    for (auto& [name, ns] : classes) {
        ns.resize(bars.size());
        series.push_back({name, ns});
    }
    auto total = [](const Series& s) {
        double sum = 0;
        for (double y : s.y) { sum += y; }
        return sum;
    };
    std::sort(series.begin(), series.end(), [&](const Series& a, const Series& b) { return total(a) > total(b); });
    constexpr size_t MOST = 8;  // that a chart takes
    for (; series.size() > MOST; series.pop_back()) {
        for (size_t i = 0; i < bars.size(); i++) { series[MOST - 1].y[i] += series.back().y[i]; }
        series[MOST - 1].name = "the rest";
    }
    save_file(path, draw("Where the time goes: kernels by class", caption,
                         {share_chart("all kernels, by class", bars, series)}));
}

// Refuses a --range that one of the settings does not have. A small run on META tells at once which ranges there are.
static void check_ranges(const Options& o) {
    if (!o.has("range")) { return; }
    ModelConfig c = configs_of(o)[0];
    c.num_layers = 1;
    Planning planning;
    for (const std::string& precision : o.precision) {
        for (const std::string& mode : o.mode) {
            context.precision = precision_from(precision), context.mode = mode_from(mode);
            start_tracing();
            predicted_peak(c, 1, 16, FORWARD);
            {
                Range step("step");
                predicted_peak(c, 1, 16, STEP);
            }
            std::set<std::string> paths;
            for (const std::string& path : range_paths(stop_tracing())) { paths.insert(path); }
            for (const std::string& range : o.range) {
                if (std::any_of(paths.begin(), paths.end(), [&](auto& path) { return is_in(path, range); })) {
                    continue;
                }
                std::string known = join({paths.begin(), paths.end()}, ", ");
                usage_error("--range: got '%s', takes, for precision %s and mode %s, some of %s", range.c_str(),
                            precision.c_str(), mode.c_str(), known.c_str());
            }
        }
    }
}

// The tables of one precision and mode. False: tracing shows no kernels, so those about kernels are left out.
static bool print_tables(const Sizes& sizes, const Plan& p) {
    if (sizes.size() * sizes[0].size() > 1) { print(overview_table(sizes, p), p.o.format); }
    const std::vector<ModelProfile>& models = largest_that_fitted(sizes);
    const ModelProfile* longest = longest_that_fitted(models);
    print(time_table(models, p), p.o.format);
    std::string why = longest && context.device == CUDA ? longest->phase[FORWARD].trace.no_kernels : "";
    if (!why.empty()) {
        note("tracing off: %s; the tables about kernels are left out", why.c_str());
        return false;
    }
    if (longest) {
        for (const std::string& range : p.o.range) { print(summary_table(*longest, range, p.o.top, p), p.o.format); }
        print(other_parts_table(*longest, p.o.top, p), p.o.format);
    }
    print(top_kernel_table(models, p), p.o.format);
    print(share_table(models, p), p.o.format);
    print(softmax_table(models, p), p.o.format);
    return true;
}

static void take_traces(std::vector<ModelProfile>& models, std::vector<Trace>& traces) {
    for (ModelProfile& m : models) {
        for (Phase phase : {FORWARD, STEP}) {
            if (!m.phase[phase].ran) { continue; }
            if (context.device == CPU) { m.phase[phase].trace.work.clear(); }  // its ranges are in the file
            traces.push_back(std::move(m.phase[phase].trace));
        }
    }
}

int cmd_nsys_profile(const Options& o) {
    std::vector<Trace> traces;
    std::vector<std::string> bars, settings, sizes, lengths;
    std::map<std::string, std::vector<double>> bar_classes;
    context.device = choose_device(o.device);
    context.each_launch = true;
    check_ranges(o);
    Plan p = plan_of(o);
    bool several = p.precisions.size() * p.modes.size() > 1;
    for (Precision precision : p.precisions) {
        for (Mode mode : p.modes) {
            context.precision = precision, context.mode = mode;
            settings.push_back(name_of(precision) + std::string(" ") + name_of(mode));
            Sizes models;
            for (const ModelConfig& c : p.configs) {
                models.emplace_back();
                for (int T : p.o.context_lengths) { models.back().push_back(profile_model(c, T, p)); }
            }
            if (!print_tables(models, p)) { continue; }
            for (std::vector<ModelProfile>& lengths : models) {
                add_bars(lengths, p, several ? settings.back() : "", bars, bar_classes);
                if (!o.trace.empty()) { take_traces(lengths, traces); }
            }
        }
    }
    for (const ModelConfig& c : p.configs) { sizes.push_back(c.name); }
    for (int T : p.o.context_lengths) { lengths.push_back(std::to_string(T)); }
    std::string what = "of size " + join(sizes, ", ") + ", context length " + join(lengths, ", ");
    std::string caption = several ? profile_caption(p, join(settings, ", "), what) : profile_caption(p, what);
    if (!o.trace.empty()) { write_trace(o.trace, traces, caption); }
    if (!o.plot.empty() && bars.empty()) {
        fail("--plot %s: nothing ran, so there is nothing to draw", o.plot.c_str());
    }
    if (!o.plot.empty()) { plot_shares(o.plot, bars, bar_classes, caption); }
    return 0;
}
