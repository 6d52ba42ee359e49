// profile.cu: section 1.1.4, nsys_profile. What a trace says: which kernels, in which part of the model, on tensor
// cores or not; the trace as a file; the tables and answers.
#include "commands.h"

#include <nlohmann/json.hpp>

using Json = nlohmann::ordered_json;

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
    {{"rope", false}, {"split_heads_kernel", "rope"}},
    {{"loss", false}, {"cross_entropy", "pick_last_kernel", "loss"}},
    {{"optimizer", false}, {"adamw", "multi_tensor_apply", "optimizer"}},
    {{"embedding", false}, {"gather_rows", "embedding"}},
    {{"copy", false}, {"Copy>", "direct_copy"}},
    {{"reduction", false},
     {"square_sum_kernel", "sum_chunks_kernel", "sum_columns_kernel", "reduce", "argmax_rows_kernel", "weighted_sum"}},
    {{"elementwise", false}, {"elementwise", "swiglu", "normal_kernel", "arange_kernel", "residual", "mask", "scores"}},
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
