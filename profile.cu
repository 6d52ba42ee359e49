// profile.cu: section 1.1.4, nsys_profile. What a trace says: which kernels, in which part of the model, on tensor
// cores or not; the trace as a file; the tables and answers.
#include "cs336.h"

#include <cerrno>
#include <nlohmann/json.hpp>
#include <sys/stat.h>

using Json = nlohmann::ordered_json;

struct KernelClass {
    const char* name;  // "matmul", "softmax", "elementwise", ...; "other": no rule knows the name
    bool tensor_cores;
};
KernelClass kernel_class(const std::string& kernel);     // by rules about names, which also hold for PyTorch's kernels
std::string short_kernel_name(const std::string& name);  // "void f<int>(float*)" -> "f<int>"
std::vector<std::string> range_paths(const Trace& trace);  // of each, e.g. "step/backward/layer/attention/softmax"
// Without kernels (on the CPU): each range as work of its own, for the time that was not spent in ranges inside it.
std::vector<TracedWork> work_of_ranges(const Trace& trace);
struct KernelSummary {  // all launches of one kernel
    std::string name;
    Stats ns;
    double total_ns() const { return ns.mean * ns.n; }
};
// Of the work in `range` and below it ("": of all work), by total time, the largest first.
std::vector<KernelSummary> kernel_summary(const Trace& trace, const std::string& range);
enum ProfiledPart { ALONE, AND_BACKWARD, WHOLE_STEP, PROFILED_PARTS };  // forward; with loss and backward; all of it
struct PartProfile {                                                    // by the trace
    double ms = NAN;      // its kernels' own times, per pass; NAN: did not run, or no kernels were traced
    double matmul = NAN;  // % of ms
    std::string kernel;   // the one with the most time
    KernelClass is{"", false};
    double share = NAN, launches = NAN;                         // its % of ms; per pass
    std::vector<std::pair<std::string, double>> launched_in{};  // part of the model, launches per pass; most time first
};
struct ProfileRun {  // nsys_profile: one size and length in one precision and mode
    ModelConfig config;
    int B, T;
    bool gpu;                                             // else operations stand for kernels
    size_t forward_oom = 0, step_oom = 0, step_peak = 0;  // bytes
    Stats forward{}, step{};                              // ms by the clock
    double in_trace = NAN, in_kernels = NAN;              // ms: a forward in the trace, and the sum of its kernels
    std::string no_kernels = "";                          // why none were traced
    PartProfile parts[PROFILED_PARTS] = {};
    double adamw = NAN;                                       // ms per step
    double softmax = NAN, products = NAN;                     // ms per forward; softmax NAN: one kernel does both
    double element = 4;                                       // bytes of what is multiplied
    std::vector<std::pair<std::string, double>> others = {};  // than products: % of forward, most first
    std::vector<KernelSummary> kernels = {}, kernels_of_step = {};
};
void answer_nsys_profile(const std::vector<ProfileRun>& runs);  // of one precision and mode

// ---------------------------------------------------------------------------------------------------------------------
// Kernel names. The first rule with a pattern that occurs in the name holds.
//   cuBLAS: nvjet (Hopper's own), xmma, cutlass, gemv. `tensorop`, `s1688`, `s16816`, `hmma`, `wgmma` are names of
//   tensor core instructions; `simt` and `ffma` mean fp32 multiply-adds on the CUDA cores, and so does ampere_sgemm. On
//   the CPU the names are those of ranges.

struct KernelRule {
    KernelClass is;
    std::vector<const char*> patterns;
};
static const KernelRule kernel_rules[] = {
    {{"communication", false}, {"nccl"}},
    {{"copy", false}, {"[CUDA mem"}},
    {{"attention", true}, {"hopper_", "flash_forward_kernel", "backward_main", "backward_dq"}},
    {{"attention", false}, {"backward_before", "backward_after", "flash_v1_", "_fp32_kernel"}},
    {{"attention", true}, {"flash_fwd_kernel", "flash_bwd", "fmha_cutlass"}},
    {{"matmul", false}, {"simt", "ffma", "ampere_sgemm", "splitKreduce", "gemv"}},
    {{"matmul", true}, {"nvjet", "tensorop", "s1688", "s16816", "hmma", "wgmma", "bf16bf16", "f16f16", "tf32"}},
    {{"matmul", false}, {"gemm", "matmul"}},
    {{"softmax", false}, {"softmax"}},
    {{"norm", false}, {"rmsnorm", "layer_norm"}},
    {{"rope", false}, {"rope"}},
    {{"loss", false}, {"cross_entropy", "PickLast", "loss"}},
    {{"optimizer", false}, {"adamw", "multi_tensor_apply", "optimizer"}},
    {{"embedding", false}, {"gather_rows", "embedding"}},
    {{"copy", false}, {"Copy>", "direct_copy"}},
    {{"reduction", false},
     {"square_sum_kernel", "sum_chunks_kernel", "sum_columns_kernel", "reduce", "argmax_rows_kernel", "weighted_sum"}},
    {{"elementwise", false}, {"elementwise", "swiglu", "for_each_kernel", "residual", "mask", "scores"}},
};

KernelClass kernel_class(const std::string& kernel) {
    for (const KernelRule& rule : kernel_rules) {
        for (const char* pattern : rule.patterns) {
            if (kernel.find(pattern) != std::string::npos) { return rule.is; }
        }
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
static double sum_of(
    const std::vector<NamedWork>& work,
    const std::function<bool(const NamedWork&)>& wanted = [](const NamedWork&) { return true; }) {
    double ns = 0;
    for (const NamedWork& w : work) { ns += wanted(w) ? w.ns : 0; }
    return ns;
}
static bool is_matmul(const NamedWork& w) { return w.is.name == std::string("matmul"); }

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
// Trace files: Chrome's format, an event per line

constexpr int64_t DAY = 86400LL * 1000000000;  // ns

static std::string text_of(const Json& json) { return json.dump(-1, ' ', true, Json::error_handler_t::replace); }
static std::string slice(const char* category, const std::string& name, int pid, int tid, int64_t start, int64_t ns,
                         const Json& args) {
    return strprintf(R"({"ph":"X","cat":"%s","name":%s,"pid":%d,"tid":%d,"ts":%.3f,"dur":%.3f,"args":%s})", category,
                     text_of(name).c_str(), pid, tid, start / 1e3, ns / 1e3, text_of(args).c_str());
}
static std::string label(const char* what, int pid, int tid, const std::string& name) {
    return strprintf(R"({"ph":"M","name":"%s","pid":%d,"tid":%d,"args":{"name":"%s"}})", what, pid, tid, name.c_str());
}
static Json args_of(const TracedWork& w, const std::string& path) {
    Json args = {{"range", path}};
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

void write_trace(const std::string& path, const std::vector<Trace>& traces, const std::string& caption,
                 const Communicator& c) {
    const int rank = c.rank;
    std::vector<std::string> events = {label("process_name", rank, 0, strprintf("rank %d", rank))};
    std::map<int, int> threads;                           // the system's number -> ours
    std::map<std::pair<unsigned, int>, int64_t> streams;  // (stream, row) -> end of its last slice: slices have to nest
    // Times count from midnight, the same one for all ranks: a double has no room for ns since 1970.
    const int64_t midnight = traces.empty() || traces[0].ranges.empty() ? 0 : traces[0].ranges[0].start / DAY * DAY;
    size_t dropped = 0;
    for (const Trace& trace : traces) {
        const std::vector<std::string> paths = range_paths(trace);
        for (size_t i = 0; i < trace.ranges.size(); i++) {
            const TracedRange& r = trace.ranges[i];
            int tid = threads.emplace(r.thread, (int)threads.size() + 1).first->second;
            events.push_back(slice("range", *r.name ? r.name : "(unnamed)", rank, tid, r.start - midnight,
                                   r.end - r.start, {{"path", paths[i]}}));
        }
        for (const TracedWork& w : trace.work) {
            int row = 0;
            while (streams[{w.stream, row}] > w.start) { row++; }
            streams[{w.stream, row}] = w.end;
            events.push_back(slice(w.grid[0] > 0 ? "kernel" : "copy", short_kernel_name(w.name), rank,
                                   1000 + 16 * (int)w.stream + row, w.start - midnight, w.end - w.start,
                                   args_of(w, w.range < 0 ? "" : paths[w.range])));
        }
        for (const TracedMemory& m : trace.memory) {
            events.push_back(strprintf(R"({"ph":"C","name":"memory","pid":%d,"ts":%.3f,"args":{"bytes held":%zu}})",
                                       rank, (m.time - midnight) / 1e3, m.bytes));
        }
        dropped += trace.dropped;
    }
    for (const auto& [system, tid] : threads) {
        events.push_back(label("thread_name", rank, tid, strprintf("CPU thread %d", system)));
    }
    for (const auto& [row, end] : streams) {
        events.push_back(label("thread_name", rank, 1000 + 16 * (int)row.first + row.second,
                               strprintf("stream %u%s", row.first, row.second ? ", overlapping" : "")));
    }
    const std::vector<std::string> of_ranks = gather_text(c, join(events, ",\n"));
    if (rank > 0) { return; }
    const std::string no_kernels = traces.empty() ? "" : traces.back().no_kernels;
    const Json other = {{"caption", caption},
                        {"times", "microseconds since midnight, UTC"},
                        {"kernels", no_kernels.empty() ? "traced" : no_kernels},
                        {"records dropped by CUPTI", std::to_string(dropped)}};
    save_file(path, "{\"displayTimeUnit\":\"ns\",\"otherData\":" + text_of(other) + ",\"traceEvents\":[\n" +
                        join(of_ranks, ",\n") + "\n]}\n");
}

// ---------------------------------------------------------------------------------------------------------------------
// nsys_profile: forward alone and whole steps, each timed untraced and then traced

static std::string part_of_model(const NamedWork& w) {  // "ffn" of step/forward/layer/ffn/matmul
    size_t layer = w.path.find("layer/"), at = layer == std::string::npos ? w.path.find('/') + 1 : layer + 6;
    size_t matmul = w.path.rfind("/matmul");
    return w.path.substr(at, matmul == std::string::npos || matmul < at ? matmul : matmul - at);
}
static PartProfile profile_part(const std::vector<NamedWork>& work, int n) {  // n passes
    PartProfile p;
    if (work.empty()) { return p; }
    const double all = sum_of(work);
    const KernelSummary top = by_kernel(work)[0];
    p.ms = all / 1e6 / n;
    p.matmul = 100 * sum_of(work, is_matmul) / all;
    p.kernel = top.name;
    p.share = 100 * top.total_ns() / all;
    p.launches = (double)top.ns.n / n;
    std::vector<NamedWork> same;
    std::copy_if(work.begin(), work.end(), std::back_inserter(same),
                 [&](const NamedWork& w) { return w.kernel == top.name; });
    p.is = same[0].is;
    for (const KernelSummary& part : group(same, part_of_model)) {
        p.launched_in.push_back({part.name, (double)part.ns.n / n});
    }
    return p;
}

// The trace's forward of median length, without the first: from its first kernel's start to its last one's end (on a
// CPU: its range), and the sum of its kernels.
static void find_forward(ProfileRun& r, const Trace& trace) {
    struct Pass {
        int64_t start = INT64_MAX, end = 0, sum = 0;
    };
    std::vector<int> outermost;
    std::map<int, Pass> passes;
    for (size_t i = 0; i < trace.ranges.size(); i++) {  // parents stand before their children
        const TracedRange& range = trace.ranges[i];
        outermost.push_back(range.parent < 0 ? (int)i : outermost[range.parent]);
        if (!r.gpu && range.parent < 0) { passes[i] = {range.start, range.end, 0}; }
    }
    for (const TracedWork& w : trace.work) {
        if (w.range < 0 || strcmp(trace.ranges[outermost[w.range]].name, "forward") != 0) { continue; }
        Pass& p = passes[outermost[w.range]];
        p = {std::min(p.start, w.start), std::max(p.end, w.end), p.sum + w.end - w.start};
    }
    if (passes.size() < 2) { return; }
    std::vector<Pass> timed;
    for (auto pass = std::next(passes.begin()); pass != passes.end(); pass++) { timed.push_back(pass->second); }
    std::sort(timed.begin(), timed.end(), [](auto& a, auto& b) { return a.end - a.start < b.end - b.start; });
    const Pass& median = timed[(timed.size() - 1) / 2];
    r.in_trace = (median.end - median.start) / 1e6, r.in_kernels = median.sum / 1e6;
}

static void read_trace(ProfileRun& r, Phase phase, const Trace& trace, int n) {  // of n passes
    if (phase == STEP) {
        r.parts[WHOLE_STEP] = profile_part(named_work(trace, {"step"}), n);
        r.parts[AND_BACKWARD] = profile_part(named_work(trace, {"step/forward", "step/loss", "step/backward"}), n);
        r.adamw = sum_of(named_work(trace, {"step/optimizer"})) / 1e6 / n;
        r.kernels_of_step = kernel_summary(trace, "step");
        return;
    }
    r.no_kernels = r.gpu ? trace.no_kernels : "";
    r.element = (double)size_of(matmul_dtype());
    const std::vector<NamedWork> forward = named_work(trace, {"forward"});
    r.parts[ALONE] = profile_part(forward, n);
    r.kernels = kernel_summary(trace, "forward");
    find_forward(r, trace);
    std::vector<NamedWork> rest, attention;
    for (const NamedWork& w : forward) {
        if (!is_matmul(w)) { rest.push_back(w); }
        if (passes(w.path, "attention")) { attention.push_back(w); }
    }
    for (const KernelSummary& part : group(rest, [](auto& w) { return w.path.substr(w.path.rfind('/') + 1); })) {
        r.others.push_back({part.name, 100 * part.total_ns() / sum_of(forward)});
    }
    r.products = sum_of(attention, is_matmul) / 1e6 / n;
    r.softmax = sum_of(attention, [](const NamedWork& w) { return passes(w.path, "softmax"); }) / 1e6 / n;
    if (r.products == 0) { r.softmax = NAN, r.products = sum_of(attention) / 1e6 / n; }  // one kernel does both
}

static void profile_phase(ProfileRun& r, Phase phase, Model& model, const Batch& batch, const Options& o,
                          std::vector<Trace>& traces) {
    LossScaler scaler;
    auto pass = [&] {
        if (phase == FORWARD) { return run_phase(phase, model, batch, scaler); }
        Range range("step");
        run_phase(phase, model, batch, scaler);
    };
    int half = (o.steps + 1) / 2;  // untraced before, and as many after: a machine's speed wanders
    reset_peak(context.device);
    std::vector<double> clock = time_ms(o.warmup[0], half, pass);
    start_tracing();
    time_ms(1, o.steps, pass);
    Trace trace = stop_tracing();
    for (double ms : time_ms(1, half, pass)) { clock.push_back(ms); }
    (phase == FORWARD ? r.forward : r.step) = stats_of(clock);
    if (phase == STEP) { r.step_peak = memory_use(context.device).peak; }
    if (!o.trace.empty()) { traces.push_back(trace); }
    if (!r.gpu) { trace.work = work_of_ranges(trace); }
    read_trace(r, phase, trace, o.steps + 1);
}
static ProfileRun profile_model(const ModelConfig& c, int T, const Options& o, std::vector<Trace>& traces) {
    ProfileRun r{c, o.batch_size, T, context.device == CUDA};
    Model model;
    Batch batch;
    for (Phase phase : {FORWARD, STEP}) {
        auto profile = [&] {
            if (!model.weights) {
                model = random_model(c, o.seed);
                batch = random_batch(o.batch_size, T, c.vocab_size, o.seed);
            }
            profile_phase(r, phase, model, batch, o, traces);
        };
        (phase == FORWARD ? r.forward_oom : r.step_oom) =
            run_if_fits(row_of(c, o.batch_size, T, phase), predicted_peak(c, o.batch_size, T, phase), profile,
                        memory_use(context.device).now);
    }
    return r;
}

// Which stands for all: the last whose step ran, or at least its forward. Null: none ran.
static const ProfileRun* largest(const std::vector<ProfileRun>& runs) {
    const ProfileRun* found = nullptr;
    for (bool step : {false, true}) {
        for (const ProfileRun& r : runs) {
            if (step ? !r.step_oom : !r.forward_oom) { found = &r; }
        }
    }
    return found;
}
static bool has_step(const ProfileRun& r) { return !std::isnan(r.parts[WHOLE_STEP].ms); }
static std::string where(const ProfileRun& r) {
    return strprintf("%s at context length %d", r.config.name.c_str(), r.T);
}

// ---------------------------------------------------------------------------------------------------------------------
// Its tables

static std::string with_unit(double ns) {  // as nsys prints times: a unit in each cell
    return ns >= 1e9   ? strprintf("%.2f s", ns / 1e9)
           : ns >= 1e6 ? strprintf("%.2f ms", ns / 1e6)
           : ns >= 1e3 ? strprintf("%.2f μs", ns / 1e3)
                       : strprintf("%.0f ns", ns);
}
static std::string digits(double x, const char* format) { return std::isnan(x) ? "" : strprintf(format, x); }
// A kernel's name without what many share, cut so that its table stays within 120 columns.
static std::string brief(std::string name) {
    constexpr size_t MOST = 25;
    for (const char* common :
         {"cutlass::Kernel2<", "cutlass_80_simt_", "sm80_xmma_", "f32f32_f32f32_f32_", "bf16bf16_bf16f32_f32_",
          "tilesize", "_align1", "_aligna4_alignc4", "_aligna8_alignc8", "_execute", "_kernel__5x_cublas", "_stage3",
          "_warpsize1x4x1", "_warpsize2x2x1", "_warpsize4x2x1", ", unsigned int", "_kernel"}) {
        size_t at = name.find(common);
        if (at != std::string::npos) { name.erase(at, strlen(common)); }
    }
    if (name.find('<') == std::string::npos && name.back() == '>') { name.pop_back(); }  // of cutlass::Kernel2
    return "`" + (name.size() > MOST ? name.substr(0, MOST - 2) + ".." : name) + "`";
}

static void print_times(const std::vector<ProfileRun>& runs, const std::string& caption) {
    Table t{
        "nsys_profile (a): medians; 'trace': forward from its first kernel to its last; " + caption,
        {"size", "S", "forward ms", "std", "trace ms", "difference %", "its kernels ms", "step ms", "std", "step MiB"}};
    for (const ProfileRun& r : runs) {
        t.row(r.config.name, r.T, r.forward_oom ? oom_cell(r.forward_oom) : digits(r.forward.median, "%.3f"),
              r.forward_oom ? "" : deviation(r.forward, "%.3f"), digits(r.in_trace, "%.3f"),
              digits(100 * (r.in_trace / r.forward.median - 1), "%.1f"), digits(r.in_kernels, "%.3f"),
              r.step_oom ? oom_cell(r.step_oom) : digits(r.step.median, "%.3f"),
              r.step_oom ? "" : deviation(r.step, "%.3f"),
              r.step_oom ? "" : strprintf("%.0f", r.step_peak / 1048576.0));
    }
    print(t);
}
static void print_top_kernels(const std::vector<ProfileRun>& runs, const std::string& caption) {
    Table t{"nsys_profile (b): the kernel with the most time, and its launches per pass; " + caption,
            {"size", "S", "phase", "%", "launches", "tensor cores", "kernel"}};
    for (const ProfileRun& r : runs) {
        for (int part : {ALONE, AND_BACKWARD, WHOLE_STEP}) {
            static const char* const names[] = {"forward", "forward+backward", "step"};
            const PartProfile& p = r.parts[part];
            if (p.kernel.empty()) { continue; }
            t.row(r.config.name, r.T, names[part], strprintf("%.1f", p.share), strprintf("%g", p.launches),
                  p.is.tensor_cores ? "yes" : "no", brief(p.kernel));
        }
    }
    print(t);
}
static void print_shares(const std::vector<ProfileRun>& runs, const std::string& caption) {
    static const char* const parts[] = {"softmax", "rope", "swiglu", "rmsnorm"};
    Table t{"nsys_profile (c), (d), (e): matrix products and other parts, % of forward's kernels; " + caption,
            {"size", "S", "matmul", "softmax", "rope", "swiglu", "rmsnorm", "step: matmul", "AdamW ms", "softmax ms",
             "products ms"}};
    for (const ProfileRun& r : runs) {
        if (std::isnan(r.parts[ALONE].ms)) { continue; }
        std::map<std::string, double> share(r.others.begin(), r.others.end());
        std::vector<std::string> row = {r.config.name, to_cell(r.T), digits(r.parts[ALONE].matmul, "%.1f")};
        for (const char* part : parts) { row.push_back(strprintf("%.1f", share[part])); }
        row.insert(row.end(),
                   {digits(r.parts[WHOLE_STEP].matmul, "%.1f"), digits(r.adamw, "%.3f"),
                    std::isnan(r.softmax) ? "one kernel" : digits(r.softmax, "%.3f"), digits(r.products, "%.3f")});
        t.rows.push_back(row);
    }
    print(t);
}
// As nsys prints it.
static void print_summary(const std::vector<KernelSummary>& kernels, const std::string& caption) {
    constexpr size_t ROWS = 10;
    Table t{
        strprintf("kernel summary: the first %zu of %zu kernels; ", std::min(ROWS, kernels.size()), kernels.size()) +
            caption,
        {"Time", "Total Time", "Instances", "Avg", "Med", "Min", "Max", "StdDev", "Name"}};
    double all = 0;
    for (const KernelSummary& k : kernels) { all += k.total_ns(); }
    for (size_t i = 0; i < std::min(ROWS, kernels.size()); i++) {
        const KernelSummary& k = kernels[i];
        t.row(strprintf("%.1f%%", 100 * k.total_ns() / all), with_unit(k.total_ns()), k.ns.n, with_unit(k.ns.mean),
              with_unit(k.ns.median), with_unit(k.ns.min), with_unit(k.ns.max), with_unit(k.ns.std), brief(k.name));
    }
    print(t);
}

// ---------------------------------------------------------------------------------------------------------------------
// Its answers

constexpr double MATCH = 5;  // %: times that differ by no more match
static void answer_times(const std::vector<ProfileRun>& runs, const ProfileRun& r) {
    int traced = 0, match = 0;
    double most = 0;  // the largest difference, %
    const ProfileRun* worst = &r;
    std::vector<std::string> oom;
    for (const ProfileRun& x : runs) {
        if (x.step_oom) { oom.push_back((x.forward_oom ? "a forward of " : "a step of ") + where(x)); }
        if (x.forward_oom || std::isnan(x.in_trace)) { continue; }
        const double difference = 100 * (x.in_trace / x.forward.median - 1);
        traced++, match += std::fabs(difference) <= MATCH;
        if (std::fabs(difference) > std::fabs(most)) { most = difference, worst = &x; }
    }
    const std::string in_trace =
        traced ? strprintf(" and %.1f ms in the trace", r.in_trace) : "; no kernels were traced: " + r.no_kernels;
    answer("a", "Forward takes %.1f ms by the clock%s (%s).", r.forward.median, in_trace.c_str(), where(r).c_str());
    const std::string differs = strprintf("the trace of %s differs by %+.1f %%%s", where(*worst).c_str(), most,
                                          r.gpu && most > 0 ? ", because recording costs CPU time at each launch" : "");
    if (traced && match == traced) {
        answer("a", "The two match within %.1f %%%s.", std::fabs(most),
               traced > 1 ? strprintf(" in all %d settings", traced).c_str() : "");
    } else if (match) {
        answer("a", "The two match within %g %% in %d of %d settings; %s.", MATCH, match, traced, differs.c_str());
    } else if (traced) {
        answer("a", "The two do not match: %s.", differs.c_str());
    }
    if (!r.gpu) { answer("a", "Without a GPU there are no kernels, so operations are timed by the clock."); }
    if (!oom.empty()) { answer("a", "Out of memory: %s.", list_of(oom).c_str()); }
}

static std::string class_of(const ProfileRun& r, const PartProfile& p) {
    if (p.is.name != std::string("matmul")) { return std::string("of class ") + p.is.name; }
    return !r.gpu              ? "a matrix product"
           : p.is.tensor_cores ? "a matrix product on tensor cores"
                               : "a matrix product on the CUDA cores";
}
static std::string launches(bool gpu, double n) {
    return strprintf("%g %s%s", n, gpu ? "launch" : "call", n == 1 ? "" : gpu ? "es" : "s");
}
static void answer_top_kernel(const std::vector<ProfileRun>& runs, const ProfileRun& r) {
    const PartProfile &forward = r.parts[ALONE], &both = r.parts[AND_BACKWARD];
    const char* kernel = r.gpu ? "kernel" : "operation";
    std::vector<std::string> places;
    for (const auto& [part, n] : forward.launched_in) { places.push_back(strprintf("%g in %s", n, part.c_str())); }
    answer("b", "The %s with the most time in forward is `%s`, %s: %.1f %% (%s).", kernel, forward.kernel.c_str(),
           class_of(r, forward).c_str(), forward.share, where(r).c_str());
    answer("b", "A forward has %s of it: %s.", launches(r.gpu, forward.launches).c_str(), list_of(places).c_str());
    if (both.kernel == forward.kernel) {
        answer("b", "With backward it is the same one (%.1f %%, %s).", both.share,
               launches(r.gpu, both.launches).c_str());
    } else if (!both.kernel.empty()) {
        const bool products = r.gpu && std::string(both.is.name) + forward.is.name == "matmulmatmul";
        answer("b", "With backward it is another one, `%s`, %s (%.1f %%, %s)%s.", both.kernel.c_str(),
               class_of(r, both).c_str(), both.share, launches(r.gpu, both.launches).c_str(),
               products ? ": backward's products have other operands transposed" : "");
    }
    int traced = 0, products = 0;
    for (const ProfileRun& x : runs) {
        traced += !x.parts[ALONE].kernel.empty();
        products += x.parts[ALONE].is.name == std::string("matmul");
    }
    if (traced > 1) {
        answer("b", "In %s forward's most expensive %s is a matrix product.",
               products == traced ? strprintf("all %d settings", traced).c_str()
                                  : strprintf("%d of %d settings", products, traced).c_str(),
               kernel);
    }
}

static void answer_shares(const std::vector<ProfileRun>& runs, const ProfileRun& r) {
    std::vector<std::string> others;
    for (const auto& [part, share] : r.others) {
        if (share >= 1 || others.empty()) { others.push_back(strprintf("%s (%.1f %%)", part.c_str(), share)); }
    }
    const double in_forward = r.parts[ALONE].matmul, in_step = r.parts[WHOLE_STEP].matmul;
    answer("c", "Of forward's time %.1f %% goes to matrix products (%s). Of the rest most goes to %s.", in_forward,
           where(r).c_str(), list_of(others).c_str());
    if (!has_step(r)) { return answer("d", "No whole step ran, so there is none to compare with forward."); }
    int steps = 0, falls = 0;
    const ProfileRun* most = &r;
    auto fall = [](const ProfileRun& x) { return x.parts[ALONE].matmul - x.parts[WHOLE_STEP].matmul; };
    for (const ProfileRun& x : runs) {
        if (!has_step(x)) { continue; }
        steps++, falls += fall(x) > 0;
        if (fall(x) > fall(*most)) { most = &x; }
    }
    answer("d", "From forward to a whole step the share of matrix products %s from %.1f to %.1f %% (%s).",
           in_step < in_forward ? "falls" : "rises", in_forward, in_step, where(r).c_str());
    if (steps > 1) {
        answer("d", "It falls in %d of %d settings, most in %s: from %.1f to %.1f %%.", falls, steps,
               where(*most).c_str(), most->parts[ALONE].matmul, most->parts[WHOLE_STEP].matmul);
    }
    answer("d", "AdamW has no matrix products and takes %.1f of the traced step's %.1f ms (%.1f %%).", r.adamw,
           r.parts[WHOLE_STEP].ms, 100 * r.adamw / r.parts[WHOLE_STEP].ms);
}

// FLOPs as the handout counts them: softmax 5 per entry of S (maximum, subtract, exp, sum, divide), the two products 2
// D each. Bytes at least: each operand read once, each result written once.
static void answer_softmax(const std::vector<ProfileRun>& runs, const ProfileRun& r) {
    const ModelConfig& c = r.config;
    const double D = (double)c.d_model / c.num_heads, flops = 4 * D / 5, times = r.softmax / r.products;
    if (std::isnan(times)) {
        answer("e",
               "Softmax and both products are one kernel here (%.2f ms per forward), which hides their times. Mode "
               "eager shows them.",
               r.products);
        return answer("e", "Softmax has %.1f times fewer FLOPs (5 per score against 4 x %g).", flops, D);
    }
    answer("e", "Softmax takes %.2f ms per forward and attention's two products %.2f ms (%s).", r.softmax, r.products,
           where(r).c_str());
    answer("e",
           "It has %.1f times fewer FLOPs (5 per score against 4 x %g), but takes %.2f times as long, so each of its "
           "FLOPs is %.0f times as slow.",
           flops, D, times, flops * times);
    const double scores = (double)r.B * c.num_heads * r.T * r.T, GiB = c.num_layers * r.element / 1073741824.0;
    const double softmax = 2 * scores * GiB, products = (2 * scores + 4.0 * r.B * r.T * c.d_model) * GiB;
    if (r.gpu && flops * times > 2 && products < 2 * softmax) {
        answer("e", "Bytes explain it: softmax has to move %.3g GiB and the products %.3g GiB%s.", softmax, products,
               products < 1.25 * softmax ? ", nearly the same" : "");
    }
    std::vector<std::string> lengths;
    for (const ProfileRun& x : runs) {
        if (x.config.name != c.name || !(x.softmax > 0)) { continue; }
        lengths.push_back(strprintf("%.2f at %d", x.softmax / x.products, x.T));
    }
    if (lengths.size() > 1) {
        answer("e", "By context length softmax's time is this multiple of the products': %s.",
               list_of(lengths).c_str());
    }
}

// Of the runs of one precision and mode.
void answer_nsys_profile(const std::vector<ProfileRun>& runs) {
    const ProfileRun* r = largest(runs);
    if (!r) { return; }
    answer_times(runs, *r);
    if (r->parts[ALONE].kernel.empty()) { return; }
    answer_top_kernel(runs, *r);
    answer_shares(runs, *r);
    answer_softmax(runs, *r);
}

// The tables and answers of one precision and mode.
static void print_profile(const std::vector<ProfileRun>& runs, const Options& o) {
    const char* how = context.device == CPU ? "; no kernels on a CPU: ranges of operations, timed by the clock" : "";
    const std::string setting = strprintf("precision %s, mode %s", name_of(context.precision), name_of(context.mode));
    print_times(runs, setting + strprintf(", batch %d, %d warmup, %d step; S: context length%s", o.batch_size,
                                          o.warmup[0], o.steps, how));
    const ProfileRun* r = largest(runs);
    if (r && !r->parts[ALONE].kernel.empty()) {
        print_top_kernels(runs, setting);
        print_shares(runs, setting);
        const std::string what = strprintf(" of %s, %d passes; %s", where(*r).c_str(), o.steps + 1, setting.c_str());
        print_summary(r->kernels, "forward" + what);
        if (has_step(*r)) { print_summary(r->kernels_of_step, "a step" + what); }
    }
    answer_nsys_profile(runs);
}

int cmd_nsys_profile(const Options& asked) {
    Options o = asked;
    context.device = choose_device(o.device);
    context.each_launch = true;
    if (o.quick) {
        by_quick(o, "size", &Options::size, {"small"});
        by_quick(o, "context_length", &Options::context_lengths, {64});
        by_quick(o, "batch_size", &Options::batch_size, 1);
        by_quick(o, "warmup", &Options::warmup, {1});
        by_quick(o, "steps", &Options::steps, 2);
    }
    const std::vector<ModelConfig> configs = configs_of(o);
    const std::vector<Precision> precisions = precisions_of(o);
    const std::vector<Mode> modes = modes_of(o, configs, precisions);
    std::vector<Trace> traces;
    bool ran = false;
    for (Precision precision : precisions) {
        for (Mode mode : modes) {
            context.precision = precision, context.mode = mode;
            std::vector<ProfileRun> runs;
            for (const ModelConfig& c : configs) {
                for (int T : o.context_lengths) { runs.push_back(profile_model(c, T, o, traces)); }
            }
            print_profile(runs, o);
            ran = ran || largest(runs);
        }
    }
    if (!ran) { fail("nsys_profile: no forward fits into memory"); }
    if (!o.trace.empty()) {
        write_trace(o.trace, traces, strprintf("cs336 %s; %s", join(o.command_line, " ").c_str(), origin().c_str()));
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Section 1.1.6, memory_profiling. Where a step's memory goes: the log of our allocations as tables and
// answers, and as the pickle that pytorch.org/memory_viz draws.

std::string snapshot_pickle(const std::vector<MemoryEvent>& log);

struct Allocation {  // of the log; `times` alike
    size_t bytes;    // each
    int times;
    Category category;
    std::string range, op, line;  // range "held": it was there before the log began
};
struct PhaseMemory {  // bytes
    size_t oom = 0, peak = 0, peak_by[CATEGORIES] = {};
    size_t all_gradients = 0;  // the most that are there at a time
};
struct BlockMemory {  // what one block saves for backward, bytes
    size_t oom = 0;
    std::map<std::string, int64_t> by_op = {};
    int64_t bytes = 0, copies = 0;  // all of it; of it 16-bit copies of weights, which go when backward ends
    int64_t change = 0;             // of memory, while backward goes over the block
    int64_t formula = 0;            // of its parameters' gradients
};
struct MemoryRun {  // memory_profiling: one size and length in one precision
    ModelConfig config;
    Precision precision;
    int B, T;
    bool predicted;                          // on META
    PhaseMemory forward{}, taped{}, step{};  // taped: a forward that keeps what backward needs
    std::vector<Allocation> largest = {};    // of forward
    size_t stream = 0;                       // bytes of the embedding's output
    BlockMemory block{};
};
// On context.device; pickles into `folder`, if any.
MemoryRun profile_memory(const ModelConfig& c, Precision precision, int B, int T, uint64_t seed,
                         const std::string& folder);
void answer_memory_profiling(const std::vector<MemoryRun>& runs);  // of one size

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
