// profile.cu: section 1.1.4, nsys_profile: which kernels a step spends its time in; and section 1.1.6,
// memory_profiling: where its memory goes.
#include "cs336.h"

#include <cerrno>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sys/stat.h>

using Json = nlohmann::ordered_json;

// ---------------------------------------------------------------------------------------------------------------------
// Kernels by name

// cuBLAS names its kernels after the instructions of tensor cores. `simt`, `ffma` and `sgemm` are multiply-adds on the
// CUDA cores. The first three are of our own flash attention.
static bool on_tensor_cores(const std::string& kernel) {
    for (const char* pattern : {"hopper_", "flash_forward_kernel", "backward_main", "nvjet", "tensorop", "s1688",
                                "s16816", "hmma", "wgmma", "bf16bf16", "f16f16", "tf32"}) {
        if (kernel.find(pattern) != std::string::npos) { return kernel.find("ffma") == std::string::npos; }
    }
    return false;
}
static std::string short_kernel_name(std::string s) {  // "void f<int>(float*)" -> "f<int>"
    const std::string anonymous = "(anonymous namespace)::";
    for (size_t at; (at = s.find(anonymous)) != std::string::npos;) { s.erase(at, anonymous.size()); }
    if (s.compare(0, 5, "void ") == 0) { s.erase(0, 5); }
    // Template arguments may have parentheses, too.
    return s.find('<') < s.find('(') ? s.substr(0, s.find(">(") + 1) : s.substr(0, s.find('('));
}

// ---------------------------------------------------------------------------------------------------------------------
// Ranges as paths. A backward step stands below its own `backward`, and then where the forward recorded it:
// step/backward/layer/attention/softmax.

static std::vector<std::string> range_paths(const Trace& trace) {
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
static bool passes(const std::string& path, const char* range) {
    return ("/" + path + "/").find(std::string("/") + range + "/") != std::string::npos;
}

// Without kernels (on the CPU): each range as work of its own, for the time that was not spent in ranges inside it.
static std::vector<TracedWork> work_of_ranges(const Trace& trace) {
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

struct Launches {  // of a kernel, in a range
    std::string kernel, path;
    std::vector<double> ns;
};
using Kernels = std::vector<Launches>;

static Kernels kernels_of(const Trace& trace) {
    const std::vector<std::string> paths = range_paths(trace);
    std::map<std::pair<std::string, std::string>, Launches> found;
    for (const TracedWork& w : trace.work) {
        if (w.range < 0) { continue; }
        const std::string kernel = short_kernel_name(w.name), path = paths[w.range];
        found.emplace(std::make_pair(kernel, path), Launches{kernel, path, {}})
            .first->second.ns.push_back((double)(w.end - w.start));
    }
    Kernels all;
    for (auto& [key, launches] : found) { all.push_back(launches); }
    return all;
}
static double total(const Launches& l) { return std::accumulate(l.ns.begin(), l.ns.end(), 0.0); }
static double total(const Kernels& all) {
    return std::accumulate(all.begin(), all.end(), 0.0, [](double ns, auto& l) { return ns + total(l); });
}
static Kernels only(const Kernels& all, const std::function<bool(const Launches&)>& wanted) {
    Kernels some;
    std::copy_if(all.begin(), all.end(), std::back_inserter(some), wanted);
    return some;
}
// With what cuBLAS clears or copies before, here and there.
static bool is_matmul(const Launches& l) { return passes(l.path, "matmul"); }

// Those to which `key` gives the same text as one, named by it; that with the most time first.
static Kernels grouped(const Kernels& all, const std::function<std::string(const Launches&)>& key) {
    std::map<std::string, Launches> groups;
    for (const Launches& l : all) {
        Launches& group = groups.emplace(key(l), Launches{key(l), "", {}}).first->second;
        group.ns.insert(group.ns.end(), l.ns.begin(), l.ns.end());
    }
    Kernels sorted;
    for (auto& [name, group] : groups) { sorted.push_back(group); }
    std::stable_sort(sorted.begin(), sorted.end(), [](auto& a, auto& b) { return total(a) > total(b); });
    return sorted;
}
static Kernels by_name(const Kernels& all) {
    return grouped(all, [](auto& l) { return l.kernel; });
}

// ---------------------------------------------------------------------------------------------------------------------
// Trace files: Chrome's format, an event per line

constexpr int64_t DAY = 86400LL * 1000000000;  // ns

void write_trace(const std::string& path, const std::vector<Trace>& traces, const std::string& caption,
                 const Communicator& c) {
    std::vector<std::string> events;
    auto add = [&](const Json& event) { events.push_back(event.dump()); };
    auto name = [&](const char* what, int row, const std::string& text) {
        add({{"ph", "M"}, {"name", what}, {"pid", c.rank}, {"tid", row}, {"args", {{"name", text}}}});
    };
    name("process_name", 0, strprintf("rank %d", c.rank));
    // Times count from midnight, the same one for all ranks: a double has no room for ns since 1970.
    const int64_t midnight = traces.empty() || traces[0].ranges.empty() ? 0 : traces[0].ranges[0].start / DAY * DAY;
    std::set<int> rows;  // that have a name
    auto slice = [&](int row, const std::string& row_name, const char* category, const std::string& what, int64_t start,
                     int64_t end, const Json& args) {
        if (rows.insert(row).second) { name("thread_name", row, row_name); }
        const Json times = {{"ts", (start - midnight) / 1e3}, {"dur", (end - start) / 1e3}};
        Json event = {{"ph", "X"}, {"cat", category}, {"name", what}, {"pid", c.rank}, {"tid", row}, {"args", args}};
        event.update(times);
        add(event);
    };
    std::map<std::pair<unsigned, int>, int64_t> streams;  // (stream, row) -> end of its last slice: slices have to nest
    size_t dropped = 0;
    for (const Trace& trace : traces) {
        const std::vector<std::string> paths = range_paths(trace);
        for (size_t i = 0; i < trace.ranges.size(); i++) {
            const TracedRange& r = trace.ranges[i];
            slice(r.thread, strprintf("CPU thread %d", r.thread), "range", r.name, r.start, r.end,
                  {{"path", paths[i]}});
        }
        for (const TracedWork& w : trace.work) {
            int row = 0;
            while (streams[{w.stream, row}] > w.start) { row++; }
            streams[{w.stream, row}] = w.end;
            const Json args = {{"path", w.range < 0 ? "" : paths[w.range]}, {"grid", w.grid}, {"block", w.block}};
            slice((1 << 24) + 16 * (int)w.stream + row,  // more than any thread's number
                  strprintf("stream %u%s", w.stream, row ? ", overlapping" : ""), w.grid[0] > 0 ? "kernel" : "copy",
                  short_kernel_name(w.name), w.start, w.end, args);
        }
        dropped += trace.dropped;
    }
    const std::vector<std::string> of_ranks = gather_text(c, join(events, ",\n"));
    if (c.rank > 0) { return; }
    const Json other = {{"caption", one_line(caption)},
                        {"no kernels", traces.empty() ? "" : traces.back().no_kernels},
                        {"records dropped by CUPTI", dropped}};
    save_file(path, "{\"otherData\":" + other.dump() + ",\"traceEvents\":[\n" + join(of_ranks, ",\n") + "\n]}\n");
}

// ---------------------------------------------------------------------------------------------------------------------
// nsys_profile: forward alone and whole steps, each timed untraced and then traced

struct ProfileRun {  // one size and length, in one precision and mode
    ModelConfig config;
    int B, T, passes;                                     // passes: in a trace
    size_t forward_oom = 0, step_oom = 0, step_peak = 0;  // bytes
    Stats forward{}, step{};                              // ms by the clock
    double in_trace = NAN, in_kernels = NAN;              // ms: a forward in the trace, and the sum of its kernels
    std::string no_kernels = "";                          // why none were traced
    double element = 4;                                   // bytes of what is multiplied
    Kernels of_forward = {}, of_step = {};                // of all passes; empty: did not run, or none were traced
};

// The trace's forward of median length, without the first: from its first kernel's start to its last one's end (on a
// CPU: its range), and the sum of its kernels.
static void find_forward(ProfileRun& r, const Trace& trace) {
    const bool gpu = context.device == CUDA;
    std::map<int, std::array<int64_t, 3>> passes;  // by their outermost range: start, end, sum
    for (const TracedWork& w : trace.work) {       // by start
        int outer = w.range;
        while (outer >= 0 && trace.ranges[outer].parent >= 0) { outer = trace.ranges[outer].parent; }
        if (outer < 0) { continue; }
        const TracedRange& range = trace.ranges[outer];
        auto& [start, end, sum] = passes[outer];
        if (sum == 0) { start = gpu ? w.start : range.start; }
        end = gpu ? std::max(end, w.end) : range.end;
        sum += w.end - w.start;
    }
    if (passes.size() < 2) { return; }
    std::vector<std::pair<int64_t, int64_t>> timed;  // length, and sum
    for (const auto& [range, p] : passes) { timed.push_back({p[1] - p[0], p[2]}); }
    std::sort(timed.begin() + 1, timed.end());
    const auto [length, sum] = timed[timed.size() / 2];
    r.in_trace = length / 1e6, r.in_kernels = sum / 1e6;
}

static void profile_phase(ProfileRun& r, Phase phase, Model& model, const Batch& batch, const Options& o,
                          std::vector<Trace>& traces) {
    LossScaler scaler;
    auto pass = [&] {
        if (phase == FORWARD) { return run_phase(phase, model, batch, scaler); }
        Range range("step");
        run_phase(phase, model, batch, scaler);
    };
    const int half = (o.steps + 1) / 2;  // untraced before, and as many after: a machine's speed wanders
    reset_peak(context.device);
    std::vector<double> clock = time_ms(o.warmup[0], half, pass);
    start_tracing();
    time_ms(1, o.steps, pass);
    Trace trace = stop_tracing();
    for (double ms : time_ms(1, half, pass)) { clock.push_back(ms); }
    if (!o.trace.empty()) { traces.push_back(trace); }
    if (context.device == CPU) { trace.work = work_of_ranges(trace); }
    if (phase == STEP) {
        r.step = stats_of(clock), r.step_peak = memory_use(context.device).peak;
        r.of_step = kernels_of(trace);
        return;
    }
    r.forward = stats_of(clock), r.element = (double)size_of(matmul_dtype());
    r.of_forward = kernels_of(trace), r.no_kernels = trace.no_kernels;
    find_forward(r, trace);
}
static ProfileRun profile_model(const ModelConfig& c, int T, const Options& o, std::vector<Trace>& traces) {
    ProfileRun r{c, o.batch_size, T, o.steps + 1};
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

// ---------------------------------------------------------------------------------------------------------------------
// What tables and answers say of a run

struct TopKernel {           // the one with the most time
    std::string name, is;    // "a matrix product on tensor cores"
    double share, launches;  // % of all; per pass
    std::string places;      // "64 in ffn and 32 in attention/scores": launches per pass, those with most time first
};
static TopKernel top_kernel(const Kernels& all, int passes) {
    const Launches top = by_name(all)[0];
    const Kernels its = only(all, [&](auto& l) { return l.kernel == top.kernel; });
    auto part_of_model = [](const Launches& l) {  // "ffn" of step/forward/layer/ffn/matmul
        const size_t layer = l.path.find("layer/"), matmul = l.path.rfind("/matmul");
        const size_t at = layer == std::string::npos ? l.path.find('/') + 1 : layer + 6;
        return l.path.substr(at, matmul == std::string::npos || matmul < at ? matmul : matmul - at);
    };
    std::vector<std::string> places;
    for (const Launches& l : grouped(its, part_of_model)) {
        places.push_back(strprintf("%g in %s", (double)l.ns.size() / passes, l.kernel.c_str()));
    }
    const char* cores = context.device == CPU         ? ""
                        : on_tensor_cores(top.kernel) ? " on tensor cores"
                                                      : " on the CUDA cores";
    return {top.kernel, (is_matmul(its[0]) ? "a matrix product" : "no matrix product") + std::string(cores),
            100 * total(top) / total(all), (double)top.ns.size() / passes, list_of(places)};
}
static Kernels of_adamw(const ProfileRun& r) {
    return only(r.of_step, [](auto& l) { return passes(l.path, "optimizer"); });
}
static Kernels with_backward(const ProfileRun& r) {
    return only(r.of_step, [](auto& l) { return !passes(l.path, "optimizer"); });
}
static double matmul_share(const Kernels& all) { return 100 * total(only(all, is_matmul)) / total(all); }  // %
static double ms_of(const ProfileRun& r, const Kernels& all) { return total(all) / 1e6 / r.passes; }       // per pass
// Of softmax and of the two products, per forward. Softmax NAN: one kernel does all.
static std::pair<double, double> attention_ms(const ProfileRun& r) {
    const Kernels attention = only(r.of_forward, [](auto& l) { return passes(l.path, "attention"); });
    const Kernels softmax = only(attention, [](auto& l) { return passes(l.path, "softmax"); });
    const Kernels products = only(attention, is_matmul);
    return products.empty() ? std::make_pair((double)NAN, ms_of(r, attention))
                            : std::make_pair(ms_of(r, softmax), ms_of(r, products));
}
static Kernels besides_products(const ProfileRun& r) {  // by the part of the model
    return grouped(only(r.of_forward, [](auto& l) { return !is_matmul(l); }),
                   [](auto& l) { return l.path.substr(l.path.rfind('/') + 1); });
}
static std::string where(const ProfileRun& r) {
    return strprintf("%s at context length %d", r.config.name.c_str(), r.T);
}

// ---------------------------------------------------------------------------------------------------------------------
// Its tables

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
        auto median = [](size_t oom, const Stats& s) { return oom ? oom_cell(oom) : strprintf("%.3f", s.median); };
        auto std = [](size_t oom, const Stats& s) { return oom ? "" : deviation(s, "%.3f"); };
        t.row(r.config.name, r.T, median(r.forward_oom, r.forward), std(r.forward_oom, r.forward),
              digits(r.in_trace, "%.3f"), digits(100 * (r.in_trace / r.forward.median - 1), "%.1f"),
              digits(r.in_kernels, "%.3f"), median(r.step_oom, r.step), std(r.step_oom, r.step),
              r.step_oom ? "" : strprintf("%.0f", r.step_peak / 1048576.0));
    }
    print(t);
}
static void print_top_kernels(const std::vector<ProfileRun>& runs, const std::string& caption) {
    Table t{"nsys_profile (b): the kernel with the most time, and its launches per pass; " + caption,
            {"size", "S", "phase", "%", "launches", "tensor cores", "kernel"}};
    for (const ProfileRun& r : runs) {
        for (auto& [phase, all] :
             {std::make_pair("forward", r.of_forward), {"forward+backward", with_backward(r)}, {"step", r.of_step}}) {
            if (all.empty()) { continue; }
            const TopKernel top = top_kernel(all, r.passes);
            t.row(r.config.name, r.T, phase, strprintf("%.1f", top.share), strprintf("%g", top.launches),
                  on_tensor_cores(top.name) ? "yes" : "no", brief(top.name));
        }
    }
    print(t);
}
static void print_shares(const std::vector<ProfileRun>& runs, const std::string& caption) {
    Table t{"nsys_profile (c), (d), (e): matrix products and other parts, % of forward's kernels; " + caption,
            {"size", "S", "matmul", "softmax", "rope", "swiglu", "rmsnorm", "step: matmul", "AdamW ms", "softmax ms",
             "products ms"}};
    for (const ProfileRun& r : runs) {
        if (r.of_forward.empty()) { continue; }
        std::map<std::string, double> share;
        for (const Launches& l : besides_products(r)) { share[l.kernel] = 100 * total(l) / total(r.of_forward); }
        auto percent = [](double x) { return digits(x, "%.1f"); };
        const auto [softmax, products] = attention_ms(r);
        t.row(r.config.name, r.T, percent(matmul_share(r.of_forward)), percent(share["softmax"]),
              percent(share["rope"]), percent(share["swiglu"]), percent(share["rmsnorm"]),
              percent(matmul_share(r.of_step)), r.of_step.empty() ? "" : strprintf("%.3f", ms_of(r, of_adamw(r))),
              std::isnan(softmax) ? "one kernel" : strprintf("%.3f", softmax), strprintf("%.3f", products));
    }
    print(t);
}
static std::string with_unit(double ns) {  // as nsys prints times: a unit in each cell
    return ns >= 1e9   ? strprintf("%.2f s", ns / 1e9)
           : ns >= 1e6 ? strprintf("%.2f ms", ns / 1e6)
           : ns >= 1e3 ? strprintf("%.2f μs", ns / 1e3)
                       : strprintf("%.0f ns", ns);
}
static void print_summary(const Kernels& all, const std::string& caption) {  // as nsys prints it
    const Kernels kernels = by_name(all);
    const size_t rows = std::min<size_t>(10, kernels.size());
    Table t{strprintf("kernel summary: the first %zu of %zu kernels; %s", rows, kernels.size(), caption.c_str()),
            {"Time", "Total Time", "Instances", "Avg", "Med", "Min", "Max", "StdDev", "Name"}};
    for (size_t i = 0; i < rows; i++) {
        const Stats ns = stats_of(kernels[i].ns);
        t.row(strprintf("%.1f%%", 100 * total(kernels[i]) / total(all)), with_unit(total(kernels[i])), ns.n,
              with_unit(ns.mean), with_unit(ns.median), with_unit(ns.min), with_unit(ns.max), with_unit(ns.std),
              brief(kernels[i].kernel));
    }
    print(t);
}

// ---------------------------------------------------------------------------------------------------------------------
// Its answers

static void answer_times(const ProfileRun& r) {
    const double difference = 100 * (r.in_trace / r.forward.median - 1);
    answer("a", "Forward takes %.1f ms by the clock%s (%s).", r.forward.median,
           std::isnan(difference) ? ("; no kernels were traced: " + r.no_kernels).c_str()
                                  : strprintf(" and %.1f ms in the trace", r.in_trace).c_str(),
           where(r).c_str());
    if (std::isnan(difference)) { return; }
    answer("a", "The two %s: they differ by %+.1f %%.", std::fabs(difference) <= 5 ? "match" : "do not match",
           difference);
}
static std::string times(double n) { return counted(strprintf("%g", n), "time"); }
static void answer_top_kernel(const ProfileRun& r) {
    const TopKernel forward = top_kernel(r.of_forward, r.passes);
    answer("b", "The kernel with the most time in forward is `%s`, %s: %.1f %% (%s).", forward.name.c_str(),
           forward.is.c_str(), forward.share, where(r).c_str());
    answer("b", "A forward launches it %s: %s.", times(forward.launches).c_str(), forward.places.c_str());
    if (r.of_step.empty()) { return; }
    const TopKernel both = top_kernel(with_backward(r), r.passes);
    const std::string how_much = strprintf("(%.1f %%, %s)", both.share, times(both.launches).c_str());
    if (both.name == forward.name) { return answer("b", "With backward it is the same one %s.", how_much.c_str()); }
    answer("b", "With backward it is another one, `%s`, %s %s.", both.name.c_str(), both.is.c_str(), how_much.c_str());
}

static void answer_shares(const ProfileRun& r) {
    std::vector<std::string> others;
    for (const Launches& l : besides_products(r)) {
        const double share = 100 * total(l) / total(r.of_forward);
        if (share >= 1 || others.empty()) { others.push_back(strprintf("%s (%.1f %%)", l.kernel.c_str(), share)); }
    }
    const double in_forward = matmul_share(r.of_forward), in_step = matmul_share(r.of_step);
    answer("c", "Of forward's time %.1f %% goes to matrix products (%s). Of the rest most goes to %s.", in_forward,
           where(r).c_str(), list_of(others).c_str());
    if (r.of_step.empty()) { return answer("d", "No whole step ran, so there is none to compare with forward."); }
    answer("d", "From forward to a whole step the share of matrix products %s from %.1f to %.1f %% (%s).",
           in_step < in_forward ? "falls" : "rises", in_forward, in_step, where(r).c_str());
    const double adamw = ms_of(r, of_adamw(r)), all = ms_of(r, r.of_step);
    answer("d", "AdamW has no matrix products and takes %.1f of the traced step's %.1f ms (%.1f %%).", adamw, all,
           100 * adamw / all);
}

// FLOPs as the handout counts them: softmax 5 per entry of S (maximum, subtract, exp, sum, divide), the two products 2
// D each. Bytes at least: each operand read once, each result written once.
static void answer_softmax(const ProfileRun& r) {
    const ModelConfig& c = r.config;
    const auto [softmax, products] = attention_ms(r);
    const double D = (double)c.d_model / c.num_heads, flops = 4 * D / 5, times = softmax / products;
    if (std::isnan(times)) {
        answer("e",
               "Softmax and both products are one kernel here (%.2f ms per forward), which hides their times. Mode "
               "eager shows them. Softmax has %.1f times fewer FLOPs (5 per score against 4 x %g).",
               products, flops, D);
        return;
    }
    answer("e", "Softmax takes %.2f ms per forward and attention's two products %.2f ms (%s).", softmax, products,
           where(r).c_str());
    answer("e",
           "It has %.1f times fewer FLOPs (5 per score against 4 x %g), but takes %.2f times as long, so each of its "
           "FLOPs is %.0f times as slow.",
           flops, D, times, flops * times);
    const double scores = (double)r.B * c.num_heads * r.T * r.T, GiB = c.num_layers * r.element / 1073741824.0;
    const double by_softmax = 2 * scores * GiB, by_products = (2 * scores + 4.0 * r.B * r.T * c.d_model) * GiB;
    if (context.device == CUDA && flops * times > 2 && by_products < 2 * by_softmax) {
        answer("e", "Bytes explain it: softmax has to move %.3g GiB and the products %.3g GiB%s.", by_softmax,
               by_products, by_products < 1.25 * by_softmax ? ", nearly the same" : "");
    }
}

// Which stands for all: the last whose step ran, or else a forward. Null: none ran.
static const ProfileRun* largest(const std::vector<ProfileRun>& runs) {
    const ProfileRun* found = nullptr;
    for (const ProfileRun& r : runs) {
        if (!r.step_oom || (!found && !r.forward_oom)) { found = &r; }
    }
    return found;
}
// Of the runs of one precision and mode.
static void answer_nsys_profile(const std::vector<ProfileRun>& runs) {
    std::vector<std::string> oom;
    for (const ProfileRun& r : runs) {
        if (r.step_oom) { oom.push_back((r.forward_oom ? "all of " : "the step of ") + where(r)); }
    }
    if (!oom.empty()) { answer("a", "Out of memory: %s.", list_of(oom).c_str()); }
    const ProfileRun* r = largest(runs);
    if (!r) { return; }
    answer_times(*r);
    if (r->of_forward.empty()) { return; }
    answer_top_kernel(*r);
    answer_shares(*r);
    answer_softmax(*r);
}
static void print_profile(const std::vector<ProfileRun>& runs, const Options& o) {
    const char* how = context.device == CPU ? "; no kernels on a CPU: ranges of operations, timed by the clock" : "";
    const std::string setting = strprintf("precision %s, mode %s", name_of(context.precision), name_of(context.mode));
    print_times(runs, setting + strprintf(", batch %d, %d warmup, %d step; S: context length%s", o.batch_size,
                                          o.warmup[0], o.steps, how));
    const ProfileRun* r = largest(runs);
    if (r && !r->of_forward.empty()) {
        print_top_kernels(runs, setting);
        print_shares(runs, setting);
        const std::string what = strprintf(" of %s, %d passes; %s", where(*r).c_str(), r->passes, setting.c_str());
        print_summary(r->of_forward, "forward" + what);
        if (!r->of_step.empty()) { print_summary(r->of_step, "a step" + what); }
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
// memory_profiling: the log of our allocations as tables, as answers, and as the pickle that pytorch.org/memory_viz
// draws

static std::string path_of(const MemoryEvent& e) {  // "forward/layer/ffn"; "held": there before the log began
    return e.ms == 0 ? "held" : join({e.ranges.begin(), e.ranges.end()}, "/");
}
static std::string line_of(const MemoryEvent& e) { return strprintf("%s:%d", basename(e.at.file), e.at.line); }
static const char* op_of(const MemoryEvent& e) {  // a lambda has no name: its range says what it does
    return strcmp(e.at.function, "operator()") == 0 && !e.ranges.empty() ? e.ranges.back() : e.at.function;
}

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

static std::string snapshot_pickle(const std::vector<MemoryEvent>& log) {
    Json trace = Json::array(), segments = Json::array();
    auto add = [&](const char* action, const MemoryEvent& e, const char* category) {
        // The stack that the viewer shows: the line that allocated, then the ranges around it, innermost first.
        Json frames = {{{"filename", basename(e.at.file)}, {"line", e.at.line}, {"name", e.at.function}}};
        for (size_t i = e.ranges.size(); i > 0; i--) {
            frames.push_back({{"filename", "range"}, {"line", i}, {"name", e.ranges[i - 1]}});
        }
        const Json event = {{"action", action}, {"addr", e.address},    {"size", e.bytes},
                            {"stream", 0},      {"category", category}, {"time_us", (int64_t)(e.ms * 1e3)},
                            {"frames", frames}};
        trace.push_back(event);
    };
    std::map<uint64_t, Json> held;  // at the end
    for (const MemoryEvent& e : log) {
        // An event of ours is two or three of PyTorch's.
        static const std::vector<const char*> alloc = {"segment_alloc", "alloc"},
                                              free = {"free_requested", "free_completed", "segment_free"};
        for (const char* action : e.is_alloc ? alloc : free) { add(action, e, name_of(e.category)); }
        held.erase(e.address);
        if (e.is_alloc) { held[e.address] = trace.back(); }
    }
    // Where events have categories and none is called 'unknown', the viewer fails.
    add("snapshot", {log.empty() ? 0 : log.back().ms, false, 0, 0, ACTIVATIONS, {}, here()}, "unknown");
    // Each of our buffers becomes a segment of its own: the pool below is the driver's, and its segments are not known.
    for (auto& [address, e] : held) {
        const Json size = e["size"], frames = e["frames"];
        const Json block = {
            {"size", size}, {"requested_size", size}, {"state", "active_allocated"}, {"frames", frames}};
        const Json segment = {{"device", 0}, {"address", address}, {"total_size", size},
                              {"stream", 0}, {"frames", frames},   {"blocks", Json::array({block})}};
        segments.push_back(segment);
    }
    std::string bytes = "\x80\x02";
    pickle(bytes, {{"segments", segments}, {"device_traces", Json::array({trace})}});
    return bytes + '.';
}

// ---------------------------------------------------------------------------------------------------------------------
// Its runs: one forward pass, or one step, of a model that has run before, with the log on

struct Allocation {  // of the log; `times` alike
    MemoryEvent event;
    int times;
};
struct PhaseMemory {  // bytes
    size_t oom = 0, peak = 0, peak_by[CATEGORIES] = {};
    std::string at = "";  // in which range the peak is
};
struct BlockMemory {  // what one block saves for backward, bytes
    size_t oom = 0;
    std::map<std::string, int64_t> by_op = {};
    int64_t bytes = 0, copies = 0;  // all of it; of it 16-bit copies of weights, which go when backward ends
    int64_t change = 0;             // of memory, while backward goes over the block
    int64_t formula = 0;            // of its parameters' gradients
    // Backward frees what a block saved and leaves the gradients of its parameters; the gradient of its input takes
    // the place of that of its output.
    int64_t gradients() const { return change + bytes - copies; }
};
struct MemoryRun {  // one size and length, in one precision
    ModelConfig config;
    Precision precision;
    int B, T;
    bool predicted;                          // on META
    PhaseMemory forward{}, taped{}, step{};  // taped: a forward that keeps what backward needs
    std::vector<Allocation> largest = {};    // of forward
    size_t stream = 0;                       // bytes of the embedding's output
    BlockMemory block{};
};
using MemoryRuns = std::vector<MemoryRun>;

// Allocations of the same size, ranges and line are one. The largest first.
static std::vector<Allocation> largest_allocations(const std::vector<MemoryEvent>& log) {
    std::map<std::pair<size_t, std::string>, size_t> found;
    std::vector<Allocation> all;
    for (const MemoryEvent& e : log) {
        if (!e.is_alloc) { continue; }
        auto [it, is_new] = found.emplace(std::make_pair(e.bytes, path_of(e) + op_of(e) + line_of(e)), all.size());
        if (is_new) { all.push_back({e, 0}); }
        all[it->second].times++;
    }
    std::stable_sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.event.bytes > b.event.bytes; });
    all.resize(std::min<size_t>(all.size(), 8), Allocation{});
    return all;
}

static void read_log(MemoryRun& r, PhaseMemory& m, const std::vector<MemoryEvent>& log) {
    const MemoryUse& use = memory_use(context.device);
    m.peak = use.peak;
    std::copy_n(use.peak_by, CATEGORIES, m.peak_by);
    size_t held = 0, most = 0;
    for (const MemoryEvent& e : log) {
        held += e.is_alloc ? e.bytes : -e.bytes;
        if (held > most) { most = held, m.at = path_of(e); }
        if (r.stream == 0 && path_of(e) == "forward/embedding") { r.stream = e.bytes; }
    }
    if (&m == &r.forward) { r.largest = largest_allocations(log); }
}

// (f) What one block saves for backward: a model of 3 blocks saves just that more than one of 2. Adds what the model's
// blocks save, `sign` times.
static void add_saved(BlockMemory& m, const MemoryRun& r, int blocks, uint64_t seed, int sign) {
    ModelConfig c = r.config;
    c.num_layers = blocks;
    const Device device = context.device;
    Model model = random_model(c, seed);
    std::vector<int64_t> left;  // bytes held when backward leaves a block, from the last block to the first
    for (const Layer& layer : model.layers) {
        layer.ln1.gradient->ready = [&] { left.push_back((int64_t)memory_use(device).now); };
    }
    std::map<uint64_t, MemoryEvent> held;  // after forward
    start_memory_log(device);
    forward_backward(model, random_batch(r.B, r.T, c.vocab_size, seed), 1, [&] {
        for (const MemoryEvent& e : stop_memory_log()) {
            const bool ours = e.category == ACTIVATIONS || e.category == WEIGHT_COPIES;
            held.erase(e.address);
            if (e.is_alloc && ours && passes(path_of(e), "layer")) { held[e.address] = e; }
        }
    });
    for (const auto& [address, e] : held) {
        const int64_t bytes = sign * (int64_t)e.bytes;
        m.by_op[path_of(e) + " " + op_of(e)] += bytes, m.bytes += bytes;
        m.copies += e.category == WEIGHT_COPIES ? bytes : 0;
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

// On context.device; pickles into `folder`, if any.
static MemoryRun profile_memory(const ModelConfig& c, Precision precision, int B, int T, uint64_t seed,
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

static std::string mib(double bytes) { return strprintf("%.1f", bytes / 1048576); }
static std::string gib(double bytes) { return strprintf("%.1f", bytes / 1073741824); }

// Operations, those that save most first.
static std::vector<std::pair<std::string, int64_t>> saved_most(const BlockMemory& m) {
    std::vector<std::pair<std::string, int64_t>> all(m.by_op.begin(), m.by_op.end());
    std::stable_sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.second > b.second; });
    all.resize(std::min<size_t>(all.size(), 5));
    return all;
}
static void print_peaks(const MemoryRuns& runs, const std::string& caption) {
    Table peaks{
        "memory_profiling (b): " + caption,
        {"context length", "precision", "forward peak MiB", "forward with tape peak MiB", "full step peak MiB"}};
    Table categories{"memory_profiling (c): MiB by category at the peak; S: context length",
                     {"S", "phase", "precision", "parameters", "gradients", "optimizer", "weight copies", "activations",
                      "other", "all"}};
    for (const MemoryRun& r : runs) {
        auto peak = [](const PhaseMemory& m) { return m.oom ? oom_cell(m.oom) : mib(m.peak); };
        peaks.row(r.T, r.precision, peak(r.forward), peak(r.taped), peak(r.step));
        for (auto [phase, m] : {std::make_pair("forward", &r.forward), {"with tape", &r.taped}, {"step", &r.step}}) {
            const size_t* by = m->peak_by;
            if (m->oom) { continue; }
            categories.row(r.T, phase, r.precision, mib(by[PARAMETERS]), mib(by[GRADIENTS]), mib(by[OPTIMIZER]),
                           mib(by[WEIGHT_COPIES]), mib(by[ACTIVATIONS]), mib(by[WORKSPACE] + by[INPUTS]), mib(m->peak));
        }
    }
    print(peaks);
    print(categories);
}
static void print_allocations(const MemoryRuns& runs) {
    Table largest{"memory_profiling (e): the largest allocations of a forward; 'held': before it; S: context length",
                  {"S", "precision", "MiB each", "times", "category", "range", "op", "line"}};
    Table saved{"memory_profiling (f): what one block saves for backward, the five operations that save most",
                {"S", "precision", "range and op", "bytes", "%"}};
    Table change{"memory_profiling (f): memory over one block in backward, bytes",
                 {"S", "precision", "saved", "of it weight copies", "change", "change + saved - copies",
                  "gradients by formula"}};
    for (const MemoryRun& r : runs) {
        const BlockMemory& m = r.block;
        for (const auto& [e, times] : r.largest) {
            const std::string path = path_of(e), range = path.substr(path.find('/') + 1);  // without "forward/"
            largest.row(r.T, r.precision, mib(e.bytes), times, name_of(e.category), range, op_of(e), line_of(e));
        }
        for (const auto& [op, bytes] : saved_most(m)) {
            saved.row(r.T, r.precision, op, bytes, strprintf("%.1f", 100.0 * bytes / m.bytes));
        }
        change.row(r.T, r.precision, m.oom ? oom_cell(m.oom) : to_cell(m.bytes), m.copies, m.change, m.gradients(),
                   m.formula);
    }
    print(largest);
    if (context.checkpoint) { return; }
    print(saved);
    print(change);
}

// ---------------------------------------------------------------------------------------------------------------------
// Its answers, of one size; of the first precision, and what the last one changes

static std::string each(const MemoryRuns& runs, const std::function<std::string(const MemoryRun&)>& text) {
    std::vector<std::string> texts;
    for (const MemoryRun& r : runs) { texts.push_back(text(r)); }
    return list_of(texts);
}
static std::string lengths(const MemoryRuns& runs) {
    return each(runs, [](auto& r) { return std::to_string(r.T); });
}
static void answer_peaks(const MemoryRuns& runs) {
    const MemoryRun& r = runs.back();
    answer("a",
           "Forward alone is flat: above the weights (%s GiB%s) it has one equal peak per layer, %s GiB at context "
           "length %d, because nothing is kept for backward.",
           gib(r.forward.peak_by[PARAMETERS]).c_str(),
           r.forward.peak_by[WEIGHT_COPIES] ? ", and their growing 16-bit copies" : "",
           gib(r.forward.peak_by[ACTIVATIONS]).c_str(), r.T);
    answer(
        "a",
        "The stages of a step can be told apart: memory climbs through forward, falls layer by layer in backward "
        "while the gradients grow, and is nearly flat in the optimizer. A step's peak is %s.",
        each(runs, [](auto& r) { return strprintf("in `%s` at context length %d", r.step.at.c_str(), r.T); }).c_str());
    auto peak = [](const PhaseMemory& m) { return m.oom ? oom_cell(m.oom) : gib(m.peak) + " GiB"; };
    answer("b", "At context length %s forward's peak is %s, a step's %s (%s, %s%s).", lengths(runs).c_str(),
           each(runs, [&](auto& r) { return peak(r.forward); }).c_str(),
           each(runs, [&](auto& r) { return peak(r.step); }).c_str(), r.config.name.c_str(), name_of(r.precision),
           r.predicted ? "; predicted" : "");
    if (!r.taped.oom) {
        answer("b", "At context length %d a forward that keeps what backward needs takes %s GiB more.", r.T,
               gib((double)r.taped.peak - r.forward.peak).c_str());
    }
}

static void answer_precision(const MemoryRuns& high, const MemoryRuns& low) {
    auto changes = [&](PhaseMemory MemoryRun::*phase) {
        return each(low, [&](auto& r) {
            const PhaseMemory &a = high[&r - &low[0]].*phase, &b = r.*phase;
            return a.oom || b.oom ? "unknown" : strprintf("%+.1f", 100 * ((double)b.peak / a.peak - 1));
        });
    };
    answer("c", "%s takes %s memory than %s: forward %s %% at context length %s, a step %s %%.",
           name_of(low[0].precision), low.back().forward.peak > high.back().forward.peak ? "more" : "less",
           name_of(high[0].precision), changes(&MemoryRun::forward).c_str(), lengths(low).c_str(),
           changes(&MemoryRun::step).c_str());
    const PhaseMemory &a = high.back().step, &b = low.back().step;
    if (const size_t copies = low.back().taped.peak_by[WEIGHT_COPIES]) {
        answer("c", "Weights, gradients and moments stay in fp32, and a 16-bit copy of each matrix is added: %s GiB.",
               gib(copies).c_str());
    }
    if (a.oom || b.oom) { return; }
    answer("c", "At context length %d the activations at the step's peak change by %s GiB.", low.back().T,
           gib((double)b.peak_by[ACTIVATIONS] - a.peak_by[ACTIVATIONS]).c_str());
}

// What the largest arrays of a forward are.
static std::string largest_of(const MemoryRun& r) {
    std::vector<std::string> ops;
    int times = 0;
    MemoryEvent first{};
    for (const auto& [e, n] : r.largest) {
        if (e.ms == 0 || (!ops.empty() && e.bytes != first.bytes)) { continue; }
        if (ops.empty()) { first = e; }
        times += n;
        ops.push_back(op_of(e));
    }
    const ModelConfig& c = r.config;
    const std::string path = path_of(first);
    const std::string what =
        first.category == WEIGHT_COPIES ? "16-bit copies of matrices,"
        : passes(path, "attention")
            ? strprintf("attention's scores, %d x %d x %d x %d numbers,", r.B, c.num_heads, r.T, r.T)
        : passes(path, "ffn") ? strprintf("the feed-forward's, %d x %d x %d numbers,", r.B, r.T, c.d_ff)
                              : "in " + path + ",";
    return strprintf("At %d tokens the largest are %s %s MiB each, %g per layer (%s). ", r.T, what.c_str(),
                     mib(first.bytes).c_str(), (double)times / c.num_layers, list_of(ops).c_str());
}

static void answer_block(const MemoryRun& r, const MemoryRuns& low) {
    const BlockMemory& m = r.block;
    if (context.checkpoint) { return answer("f", "Left out: a checkpoint keeps only its input."); }
    if (m.oom) { return answer("f", "Three blocks do not fit."); }
    std::vector<std::string> ops;
    for (const auto& [op, bytes] : saved_most(m)) {
        ops.push_back(strprintf("%s %.1f %%", op.substr(op.rfind('/') + 1).c_str(), 100.0 * bytes / m.bytes));
    }
    const std::string in_low =
        low.empty() ? "" : strprintf(", %lld in %s", (long long)low.back().block.bytes, name_of(low.back().precision));
    answer("f", "One block saves %lld bytes (%s MiB) for backward in %s%s (%s at context length %d).",
           (long long)m.bytes, mib(m.bytes).c_str(), name_of(r.precision), in_low.c_str(), r.config.name.c_str(), r.T);
    answer("f", "Most of it is saved by %s.", list_of(ops).c_str());
    answer("f",
           "Backward over the block frees that, but memory %s by only %s MiB: the difference, %s MiB, is the gradients "
           "of its parameters; by the formula they have %s MiB.",
           m.change < 0 ? "falls" : "grows", mib(std::fabs(m.change)).c_str(), mib(m.gradients()).c_str(),
           mib(m.formula).c_str());
}

static void answer_memory_profiling(const MemoryRuns& runs) {
    MemoryRuns high, low;
    for (const MemoryRun& r : runs) {
        if (r.precision != runs[0].precision && r.precision != runs.back().precision) { continue; }
        if (!r.forward.oom) { (r.precision == runs[0].precision ? high : low).push_back(r); }
    }
    if (high.empty()) { return; }
    const MemoryRun& r = high.back();
    answer_peaks(high);
    if (low.size() == high.size()) { answer_precision(high, low); }
    answer("d",
           "batch x context length x d_model x 4 bytes = %d x %d x %d x 4 / 1024^2 = %s MiB; at context length %s "
           "the embedding's output takes %s MiB.",
           r.B, r.T, r.config.d_model, mib((double)r.B * r.T * r.config.d_model * 4).c_str(), lengths(high).c_str(),
           each(high, [&](auto& r) { return mib(r.stream); }).c_str());
    answer("e", "%s%sThe weights were there before, and the optimizer allocates nothing in forward.",
           largest_of(r).c_str(), high.size() > 1 ? largest_of(high[0]).c_str() : "");
    answer_block(r, low);
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
        MemoryRuns runs;
        for (Precision precision : precisions) {
            for (int T : o.context_lengths) {
                give_back_cached_memory();
                runs.push_back(profile_memory(c, precision, o.batch_size, T, o.seed, o.out));
                ran = ran || runs.back().forward.oom == 0;
            }
        }
        print_peaks(runs,
                    strprintf("size %s, mode %s, batch %d, vocabulary %d; %s", c.name.c_str(),
                              caption_of(context.mode).c_str(), o.batch_size, c.vocab_size,
                              predicted ? "predicted, every allocation counted" : "the second run of each phase"));
        print_allocations(runs);
        answer_memory_profiling(runs);
    }
    if (!ran) { fail("memory_profiling: no forward fits into memory"); }
    return 0;
}
