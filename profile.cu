// profile.cu: section 1.1.4, nsys_profile: which kernels a step spends its time in; and
// section 1.1.6, memory_profiling: where its memory goes. Each: what was recorded, its tables, its
// answers.
#include "cs336.h"

#include <nlohmann/json.hpp>

using Json = nlohmann::json;

static std::string short_kernel_name(std::string s) {  // "void f<int>(float*)" -> "f<int>"
    const std::string anonymous = "(anonymous namespace)::";
    for (size_t at; (at = s.find(anonymous)) != std::string::npos;) {
        s.erase(at, anonymous.size());
    }
    if (s.compare(0, 5, "void ") == 0) { s.erase(0, 5); }
    // Template arguments may have parentheses, too.
    return s.find('<') < s.find('(') ? s.substr(0, s.find(">(") + 1) : s.substr(0, s.find('('));
}

static std::string without(std::string path, std::initializer_list<const char*> outer) {
    for (const char* range : outer) {
        if (path.compare(0, strlen(range), range) == 0) { path.erase(0, strlen(range)); }
    }
    return path;
}
// Ranges as paths. A backward step stands below its own `backward`, and then where the forward
// recorded it: step/backward/layer/attention/softmax.
static std::vector<std::string> range_paths(const Trace& trace) {
    std::vector<std::string> paths;
    for (const TracedRange& r : trace.ranges) {  // parents stand before their children
        std::string above = r.parent < 0 ? "" : paths[r.parent], own = r.name;
        if (r.recorded_in >= 0) { own = without(paths[r.recorded_in], {"step/", "forward/"}); }
        paths.push_back(above.empty() || own.empty() ? above + own : above + "/" + own);
    }
    return paths;
}
static bool passes(const std::string& path, const char* range) {
    return ("/" + path + "/").find(std::string("/") + range + "/") != std::string::npos;
}

// Without kernels (on the CPU): each range as work of its own, for the time that was not spent in
// ranges inside it.
static std::vector<TracedWork> work_of_ranges(const Trace& trace) {
    std::vector<TracedWork> work;
    for (const TracedRange& r : trace.ranges) {
        work.push_back({r.name, (int)work.size(), r.start, r.end});
        if (r.parent >= 0) { work[r.parent].end -= r.end - r.start; }
    }
    return work;
}

struct Launches {  // of a kernel
    std::string kernel, path;
    std::vector<double> ns;
};
using Kernels = std::vector<Launches>;

static Kernels kernels_of(const Trace& trace) {
    const std::vector<std::string> paths = range_paths(trace);
    Kernels all;
    for (const TracedWork& w : trace.work) {
        if (w.range >= 0) {
            all.push_back({short_kernel_name(w.name), paths[w.range], {double(w.end - w.start)}});
        }
    }
    return all;
}
static double total(const Kernels& all) {  // ns
    double sum = 0;
    for (const Launches& l : all) {
        for (double ns : l.ns) { sum += ns; }
    }
    return sum;
}
// Those in a range, or outside of it. With a matrix product's are those that cuBLAS clears or
// copies with before it.
static Kernels in(const Kernels& all, const char* range, bool wanted = true) {
    Kernels some;
    std::copy_if(all.begin(), all.end(), std::back_inserter(some),
                 [&](auto& l) { return passes(l.path, range) == wanted; });
    return some;
}
// %
static double share(const Kernels& part, const Kernels& all) {
    return 100 * total(part) / total(all);
}

// Those to which `key` gives the same text as one, named by it; that with the most time first.
static Kernels grouped(const Kernels& all, const std::function<std::string(const Launches&)>& key) {
    std::map<std::string, std::vector<double>> groups;
    for (const Launches& l : all) {
        std::vector<double>& ns = groups[key(l)];
        ns.insert(ns.end(), l.ns.begin(), l.ns.end());
    }
    Kernels sorted;
    for (auto& [name, ns] : groups) { sorted.push_back({name, "", ns}); }
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](auto& a, auto& b) { return total({a}) > total({b}); });
    return sorted;
}
static Kernels by_name(const Kernels& all) {
    return grouped(all, [](auto& l) { return l.kernel; });
}

// -------------------------------------------------------------------------------------------------
// nsys_profile: forward alone and whole steps, each timed untraced and then traced

struct ProfiledPhase {
    size_t oom = 0;        // bytes
    Stats ms{};            // by the clock
    Kernels kernels = {};  // of all traced passes; empty: it did not run, or none were traced
};
struct ProfileRun {  // of one size and length
    ModelConfig config;
    int B, T, passes;  // passes: in a trace
    ProfiledPhase forward{}, step{};
    Stats in_trace = stats_of({NAN});  // ms of a forward; NAN: none was traced
    std::string no_kernels = "";       // why none were traced
};

// The trace's forwards without the first, in ms: each from its first kernel's start to its last
// one's end.
static Stats forward_in_trace(const Trace& trace) {
    std::map<int, std::pair<int64_t, int64_t>> passes;  // by their outermost range: start, end
    for (const TracedWork& w : trace.work) {            // by start
        int outer = w.range;
        while (outer >= 0 && trace.ranges[outer].parent >= 0) {
            outer = trace.ranges[outer].parent;
        }
        auto& [start, end] = passes.emplace(outer, std::make_pair(w.start, w.end)).first->second;
        end = std::max(end, w.end);
    }
    passes.erase(-1);
    std::vector<double> ms;
    for (const auto& [range, p] : passes) { ms.push_back((p.second - p.first) / 1e6); }
    return ms.size() < 2 ? stats_of({NAN}) : stats_of({ms.begin() + 1, ms.end()});
}

static void profile_phase(ProfileRun& r, Phase phase, const Options& o,
                          std::vector<Trace>& traces) {
    ProfiledPhase& p = phase == FORWARD ? r.forward : r.step;
    p.oom = run_if_fits(row_of(r.config, r.B, r.T, phase),
                        predicted_peak(r.config, r.B, r.T, phase), [&] {
                            Model model = random_model(r.config, o.seed);
                            const Batch batch = random_batch(r.B, r.T, r.config.vocab_size, o.seed);
                            LossScaler scaler;
                            auto pass = [&] {
                                if (phase == FORWARD) {
                                    return run_phase(phase, model, batch, scaler);
                                }
                                Range range("step");
                                run_phase(phase, model, batch, scaler);
                            };
                            p.ms = stats_of(time_ms(o.warmup[0], o.steps, pass));
                            start_tracing();
                            time_ms(1, o.steps, pass);
                            Trace trace = stop_tracing();
                            if (!o.trace.empty()) { traces.push_back(trace); }
                            if (context.device == CPU) { trace.work = work_of_ranges(trace); }
                            p.kernels = kernels_of(trace);
                            if (phase == FORWARD) {
                                r.in_trace = forward_in_trace(trace);
                                r.no_kernels = trace.no_kernels;
                            }
                        });
}

static double ms_of(const ProfileRun& r, const Kernels& all) {  // per pass; NAN: there are none
    return all.empty() ? NAN : total(all) / 1e6 / r.passes;
}
static std::string where(const ProfileRun& r) {
    return strprintf("%s at context length %d", r.config.name.c_str(), r.T);
}

// A kernel's name as a cell: in csv all of it; else 25 characters, so that its table stays within
// 120 columns, from behind what many names begin with. They stand so in the whole name: a search
// for them finds it.
static std::string name_cell(std::string name) {
    constexpr size_t MOST = 25;
    if (context.csv) { return name; }
    for (const char* common :
         {"for_each_kernel<Elementwise<", "for_each_kernel<", "cutlass::Kernel2<cutlass_80_",
          "sm80_xmma_", "f32f32_f32f32_f32_", "bf16bf16_bf16f32_f32_"}) {
        const size_t at = name.find(common);
        if (at != std::string::npos) { name.erase(0, at + strlen(common)); }
    }
    return "`" + name.substr(0, MOST) + "`";
}

// How often a kernel runs in one of the passes.
static double per_pass(const Launches& l, int passes) { return (double)l.ns.size() / passes; }

static void print_times(const std::vector<ProfileRun>& runs, const std::string& caption) {
    Table t{
        "nsys_profile (a): means; 'trace': forward from its first start to its last end there; " +
            caption,
        {"size", "S", "forward ms", "std", "trace ms", "difference %", "step ms", "std"}};
    for (const ProfileRun& r : runs) {
        auto mean = [](const ProfiledPhase& p) {
            return p.oom ? oom_cell(p.oom) : strprintf("%.3f", p.ms.mean);
        };
        auto std = [](const ProfiledPhase& p) { return p.oom ? "" : deviation(p.ms, "%.3f"); };

        t.row(r.config.name, r.T, mean(r.forward), std(r.forward), r.in_trace.mean,
              100 * (r.in_trace.mean / r.forward.ms.mean - 1), mean(r.step), std(r.step));
    }
    print(t);
}
static void print_top_kernels(const std::vector<ProfileRun>& runs, const std::string& caption) {
    Table t{"nsys_profile (b): what takes the most time; " + caption,
            {"size", "S", "phase", "%", "times per pass", "name"}};
    for (const ProfileRun& r : runs) {
        for (auto& [phase, all] : {std::make_pair("forward", r.forward.kernels),
                                   {"forward+backward", in(r.step.kernels, "optimizer", false)}}) {
            if (all.empty()) { continue; }
            const Launches top = by_name(all)[0];
            t.row(r.config.name, r.T, phase, strprintf("%.1f", share({top}, all)),
                  per_pass(top, r.passes), name_cell(top.kernel));
        }
    }
    print(t);
}
static void print_shares(const std::vector<ProfileRun>& runs, const std::string& caption) {
    Table t{"nsys_profile (c), (d), (e): matrix products and other parts, % of forward's time; " +
                caption,
            {"size", "S", "matmul", "softmax", "rope", "swiglu", "rmsnorm", "step: matmul",
             "AdamW ms", "softmax ms", "products ms"}};
    for (const ProfileRun& r : runs) {
        const Kernels &all = r.forward.kernels, &step = r.step.kernels;
        if (all.empty()) { continue; }
        const Kernels others = in(all, "matmul", false), attention = in(all, "attention");
        auto percent = [](double x) { return strprintf("%.1f", x); };
        auto part = [&](const char* range) { return percent(share(in(others, range), all)); };
        t.row(r.config.name, r.T, percent(share(in(all, "matmul"), all)), part("softmax"),
              part("rope"), part("swiglu"), part("rmsnorm"),
              step.empty() ? "" : percent(share(in(step, "matmul"), step)),
              ms_of(r, in(step, "optimizer")), ms_of(r, in(attention, "softmax")),
              ms_of(r, in(attention, "matmul")));
    }
    print(t);
}
static std::string with_unit(double ns) {  // as nsys prints times: a unit in each cell
    return ns >= 1e6 ? strprintf("%.2f ms", ns / 1e6) : strprintf("%.2f μs", ns / 1e3);
}
// Time of all passes, but totals and instances of one.
static void print_summary(const Kernels& all, int passes, const std::string& caption) {
    const Kernels kernels = by_name(all);
    const size_t rows = std::min<size_t>(10, kernels.size());
    Table t{strprintf("summary: the first %zu of %zu names; %s", rows, kernels.size(),
                      caption.c_str()),
            {"Time", "Total Time", "Instances", "Avg", "Med", "Min", "Max", "StdDev", "Name"}};
    for (size_t i = 0; i < rows; i++) {
        const Stats ns = stats_of(kernels[i].ns);
        t.row(strprintf("%.1f%%", share({kernels[i]}, all)),
              with_unit(total({kernels[i]}) / passes),
              strprintf("%g", per_pass(kernels[i], passes)), with_unit(ns.mean),
              with_unit(ns.median), with_unit(ns.min), with_unit(ns.max), with_unit(ns.std),
              name_cell(kernels[i].kernel));
    }
    print(t);
}

static void answer_times(const ProfileRun& r) {
    const double clock = r.forward.ms.mean, traced = r.in_trace.mean;
    if (std::isnan(traced)) {
        return answer("a", "Forward takes %.1f ms by the clock; no kernels were traced: %s (%s).",
                      clock, r.no_kernels.c_str(), where(r).c_str());
    }
    const char* within = level(r.forward.ms, r.in_trace);
    answer("a",
           "Forward takes %.1f ms by the clock and %.1f ms in the trace (%s). They %s (%+.1f %%).",
           clock, traced, where(r).c_str(),
           within ? strprintf("match %s", within).c_str() : "differ", 100 * (traced / clock - 1));
}

// Of the kernel with the most time: "`gemm` (40.2 %, 97 times per pass)"
static std::string about_first(const Kernels& all, int passes) {
    const Launches top = by_name(all)[0];
    return strprintf("`%s` (%.1f %%, %s per pass)", top.kernel.c_str(), share({top}, all),
                     counted(strprintf("%g", per_pass(top, passes)), "time").c_str());
}
static void answer_top_kernel(const ProfileRun& r) {
    const Kernels &forward = r.forward.kernels, both = in(r.step.kernels, "optimizer", false);
    answer("b", "In forward %s takes the most time; %s.", about_first(forward, r.passes).c_str(),
           where(r).c_str());
    if (both.empty()) { return; }
    answer("b", "With backward it is %s, %s.",
           by_name(both)[0].kernel == by_name(forward)[0].kernel ? "the same" : "another one",
           about_first(both, r.passes).c_str());
}

// What is neither matrix product nor AdamW; and the four parts of the model, each by its innermost
// range, to which most of that goes: "softmax (4.2 %), rope (2.9 %) and swiglu (2.2 %)".
static Kernels others_in(const Kernels& all) {
    return in(in(all, "matmul", false), "optimizer", false);
}
static std::string largest_others(const Kernels& all) {
    std::vector<std::string> parts;
    for (const Launches& l :
         grouped(others_in(all), [](auto& l) { return l.path.substr(l.path.rfind('/') + 1); })) {
        if (parts.size() == 4) { break; }
        parts.push_back(strprintf("%s (%.1f %%)", l.kernel.c_str(), share({l}, all)));
    }
    return list_of(parts);
}
static void answer_shares(const ProfileRun& r) {
    const Kernels &forward = r.forward.kernels, &step = r.step.kernels;
    const double in_forward = share(in(forward, "matmul"), forward);
    answer("c",
           "Of forward's time %.1f %% goes to matrix products (%s). Of the rest most goes to %s.",
           in_forward, where(r).c_str(), largest_others(forward).c_str());
    if (step.empty()) { return; }
    const double in_step = share(in(step, "matmul"), step);
    answer(
        "d",
        "From forward to a whole step the share of matrix products %s from %.1f to %.1f %% (%s).",
        in_step < in_forward ? "falls" : "rises", in_forward, in_step, where(r).c_str());
    const Kernels adamw = in(step, "optimizer");
    answer("d",
           "AdamW has no matrix products and takes %.1f of the traced step's %.1f ms (%.1f %%).",
           ms_of(r, adamw), ms_of(r, step), share(adamw, step));
    answer(
        "d",
        "The other parts have %.1f %% of forward and %.1f %% of the step; there most goes to %s.",
        share(others_in(forward), forward), share(others_in(step), step),
        largest_others(step).c_str());
}

// FLOPs as the handout counts them: softmax 5 per entry of S (maximum, subtract, exp, sum, divide),
// the two products 2 D each.
static void answer_softmax(const ProfileRun& r) {
    const Kernels attention = in(r.forward.kernels, "attention");
    const double softmax = ms_of(r, in(attention, "softmax")),
                 products = ms_of(r, in(attention, "matmul"));
    const double D = (double)r.config.d_model / r.config.num_heads, flops = 4 * D / 5,
                 times = softmax / products;

    if (std::isnan(times)) {
        return answer("e",
                      "Softmax and both products are not apart here (%.2f ms per forward); mode "
                      "eager parts them.",
                      ms_of(r, attention));
    }
    answer("e",
           "Softmax takes %.2f ms per forward and attention's two products %.2f ms (%s). It has %g "
           "times fewer FLOPs (5 per score against 4 x %g), and each takes %.3g times as long.",
           softmax, products, where(r).c_str(), flops, D, flops * times);
}

// Whose numbers the answers give: of each size, or of the last one, the longest length whose step
// ran, or else whose forward.
static std::vector<const ProfileRun*> answered(const std::vector<ProfileRun>& runs,
                                               bool each_size) {
    std::vector<const ProfileRun*> found;
    for (const ProfileRun& r : runs) {
        if (r.forward.oom) { continue; }
        if (found.empty() || (each_size && found.back()->config.name != r.config.name)) {
            found.push_back(&r);
        } else if (!r.step.oom || found.back()->step.oom) {
            found.back() = &r;
        }
    }
    return found;
}
static void answer_nsys_profile(const ProfileRun& r) {
    answer_times(r);
    if (!r.forward.kernels.empty()) { answer_top_kernel(r), answer_shares(r), answer_softmax(r); }
}
static void print_profile(const std::vector<ProfileRun>& runs, const Options& o) {
    const std::string setting =
        strprintf("%s; precision %s, mode %s",
                  context.device == CPU ? "ranges of operations by the CPU's clock" : "kernels",
                  name_of(context.precision), name_of(context.mode));
    print_times(runs, setting + strprintf(", batch %d, warmup %d, steps %d; S: context length",
                                          o.batch_size, o.warmup[0], o.steps));
    // which wants each profile
    const std::vector<const ProfileRun*> all = answered(runs, o.edition == "2026");
    if (all.empty()) { fail("nsys_profile: no forward fits into memory"); }
    const ProfileRun& last = *all.back();
    if (!last.forward.kernels.empty()) {
        print_top_kernels(runs, setting);
        print_shares(runs, setting);
        const std::string what =
            strprintf(" of %s; Total Time and Instances: of one pass, the mean of %d; %s",
                      where(last).c_str(), last.passes, setting.c_str());
        print_summary(last.forward.kernels, last.passes, "forward" + what);
        if (!last.step.kernels.empty()) {
            print_summary(last.step.kernels, last.passes, "a step" + what);
        }
    }
    for (const ProfileRun* r : all) { answer_nsys_profile(*r); }
}

// The handout's "longest that fits": the longest power of two above 512 whose step is predicted to
// need no more bytes than `room`; where there is none, whose forward does; where there is none
// either, 512.
static int longest_that_fits(const ModelConfig& c, int B, size_t room) {
    int T = 512;
    for (Phase phase : {STEP, FORWARD}) {
        while (predicted_peak(c, B, 2 * T, phase) <= room) { T *= 2; }
        if (T > 512) { break; }
    }
    return T;
}

int cmd_nsys_profile(const Options& o) {
    context.device = choose_device(o.device);
    context.each_launch = true;
    const std::vector<ModelConfig> configs = configs_of(o);
    context.precision = precisions_of(o)[0];
    context.mode = modes_of(o, configs, {context.precision})[0];
    std::vector<Trace> traces;
    std::vector<ProfileRun> runs;
    for (const ModelConfig& c : configs) {
        std::set<int> lengths(o.context_lengths.begin(), o.context_lengths.end());
        if (o.edition == "2026" && !o.quick && !o.has("context_length")) {
            lengths.insert(longest_that_fits(c, o.batch_size, available_memory(context.device)));
        }
        for (int T : lengths) {
            runs.push_back({c, o.batch_size, T, o.steps + 1});
            for (Phase phase : {FORWARD, STEP}) { profile_phase(runs.back(), phase, o, traces); }
        }
    }
    if (!o.trace.empty()) {  // first: whoever reads the tables may close the pipe
        write_trace(o.trace, traces, "cs336 " + join(o.command_line, " ") + "; " + origin());
    }
    print_profile(runs, o);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Trace files: Chrome's format, an event per line

void write_trace(const std::string& path, const std::vector<Trace>& traces,
                 const std::string& caption, const Communicator& c) {
    std::vector<std::string> events;
    auto quoted = [](const std::string& text) {  // a byte that is no UTF-8 becomes U+FFFD
        return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
    };
    auto name = [&](const char* what, int row, const std::string& text) {
        events.push_back(strprintf(R"({"ph":"M","name":"%s","pid":%d,"tid":%d,"args":{"name":%s}})",
                                   what, c.rank, row, quoted(text).c_str()));
    };
    name("process_name", 0, strprintf("rank %d", c.rank));
    // Times count from midnight, the same one for all ranks: a double has no room for ns since
    // 1970.
    constexpr int64_t DAY = 86400LL * 1000000000;  // ns
    const int64_t midnight =
        traces.empty() || traces[0].ranges.empty() ? 0 : traces[0].ranges[0].start / DAY * DAY;
    std::set<int> rows;  // that have a name
    auto slice = [&](int row, const std::string& row_name, const char* category,
                     const std::string& what, int64_t start, int64_t end,
                     const std::string& ranges) {
        if (rows.insert(row).second) { name("thread_name", row, row_name); }
        events.push_back(strprintf(
            R"({"ph":"X","cat":"%s","name":%s,"pid":%d,"tid":%d,"ts":%.3f,"dur":%.3f,"args":{"path":%s}})",
            category, quoted(what).c_str(), c.rank, row, (start - midnight) / 1e3,
            (end - start) / 1e3, quoted(ranges).c_str()));
    };
    // (stream, row) -> end of its last slice: slices have to nest
    std::map<std::pair<unsigned, int>, int64_t> streams;
    for (const Trace& trace : traces) {
        const std::vector<std::string> paths = range_paths(trace);
        for (size_t i = 0; i < trace.ranges.size(); i++) {
            const TracedRange& r = trace.ranges[i];
            slice(r.thread, strprintf("CPU thread %d", r.thread), "range", r.name, r.start, r.end,
                  paths[i]);
        }
        for (const TracedWork& w : trace.work) {
            int row = 0;
            while (streams[{w.stream, row}] > w.start) { row++; }
            streams[{w.stream, row}] = w.end;
            slice((1 << 24) + 16 * (int)w.stream + row,  // more than any thread's number
                  strprintf("stream %u%s", w.stream, row ? ", overlapping" : ""),
                  w.name[0] == '[' ? "copy" : "kernel", short_kernel_name(w.name), w.start, w.end,
                  w.range < 0 ? "" : paths[w.range]);
        }
    }
    const std::vector<std::string> of_ranks = gather_text(c, join(events, ",\n"));
    if (c.rank > 0) { return; }
    save_file(path, "{\"otherData\":{\"caption\":" + quoted(caption) + "},\"traceEvents\":[\n" +
                        join(of_ranks, ",\n") + "\n]}\n");
}

// -------------------------------------------------------------------------------------------------
// memory_profiling: the log of our allocations as tables, as answers, and as the pickle that
// pytorch.org/memory_viz draws

static std::string path_of(
    const MemoryEvent& e) {  // "forward/layer/ffn"; "held": there before the log began
    return e.ms == 0 ? "held" : join({e.ranges.begin(), e.ranges.end()}, "/");
}
static std::string op_of(const MemoryEvent& e) {  // "attention/softmax exp"
    // it has no name: its range says what it does
    const bool is_lambda = strcmp(e.at.function, "operator()") == 0;
    return without(path_of(e), {"forward/", "layer/"}) +
           (is_lambda ? "" : strprintf(" %s", e.at.function));
}

// Python's pickle protocol 2: a program for a stack machine, whose last value is the object. The
// viewer knows few of its instructions; these are enough.
static void pickle(std::string& to, const Json& value) {
    auto little_endian = [&](uint64_t number, int bytes) {
        for (int i = 0; i < bytes; i++) { to += (char)(number >> (8 * i)); }
    };
    if (value.is_object()) {
        to += "}(";
        for (const auto& [key, x] : value.items()) { pickle(to, key), pickle(to, x); }
        to += 'u';
    } else if (value.is_array()) {
        // APPENDS a thousand at a time, as Python does: the viewer passes each batch as arguments
        // of one call, and more than some 100,000 of them overflow its stack.
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

// All but the viewer's "Active Memory Timeline" would need PyTorch's segments, which our buffers
// have none of.
static std::string snapshot_pickle(const std::vector<MemoryEvent>& log) {
    Json trace = Json::array();
    auto add = [&](const char* action, const MemoryEvent& e, const char* category) {
        // The stack that the viewer shows: the line that allocated, then the ranges around it,
        // innermost first.
        Json frames = {
            {{"filename", basename(e.at.file)}, {"line", e.at.line}, {"name", e.at.function}}};
        for (size_t i = e.ranges.size(); i > 0; i--) {
            frames.push_back({{"filename", "range"}, {"line", i}, {"name", e.ranges[i - 1]}});
        }
        const Json event = {{"action", action},     {"addr", e.address},
                            {"size", e.bytes},      {"stream", 0},
                            {"category", category}, {"time_us", (int64_t)(e.ms * 1e3)},
                            {"frames", frames}};
        trace.push_back(event);
    };
    for (const MemoryEvent& e : log) {
        add(e.is_alloc ? "alloc" : "free_completed", e, name_of(e.category));
    }
    // Where events have categories and none is called 'unknown', the viewer fails.
    add("snapshot", {log.empty() ? 0 : log.back().ms, false, 0, 0, ACTIVATIONS, {}, here()},
        "unknown");
    std::string bytes = "\x80\x02";
    pickle(bytes, {{"segments", Json::array()}, {"device_traces", Json::array({trace})}});
    return bytes + '.';
}

struct PhaseMemory {
    size_t oom = 0;  // bytes
    MemoryUse use{};
};
struct BlockMemory {  // what one block saves for backward, bytes
    size_t oom = 0;
    std::map<std::string, int64_t> by_op = {};
    // all of it; of it 16-bit copies of weights, which go when backward ends
    int64_t bytes = 0, copies = 0;
    int64_t change = 0;   // of memory, while backward goes over the block
    int64_t formula = 0;  // of its parameters' gradients
    // Backward frees what a block saved and leaves the gradients of its parameters; the gradient of
    // its input takes the place of that of its output.
    int64_t gradients() const { return change + bytes - copies; }
};
struct MemoryRun {  // one size and length, in one precision
    ModelConfig config;
    Precision precision;
    int B, T;
    PhaseMemory forward{}, step{};
    std::string peak_in = "";                    // the range of forward's peak
    size_t largest = 0;                          // allocation of forward, bytes
    std::map<std::string, int> largest_by = {};  // whose they are, and how many
    BlockMemory block{};
};
using MemoryRuns = std::vector<MemoryRun>;

// Forward's peak and its largest allocation, without what was there before.
static void read_forward(MemoryRun& r, const std::vector<MemoryEvent>& log) {
    size_t now = 0, peak = 0;
    for (const MemoryEvent& e : log) {
        now += e.is_alloc ? e.bytes : -e.bytes;
        if (now > peak) {
            peak = now;
            r.peak_in = path_of(e);
        }
        if (!e.is_alloc || e.ms == 0 || e.bytes < r.largest) { continue; }
        if (e.bytes > r.largest) { r.largest = e.bytes, r.largest_by.clear(); }
        r.largest_by[strprintf("%s (%s:%d)", op_of(e).c_str(), basename(e.at.file), e.at.line)]++;
    }
}
// (f) What one block saves for backward: a model of 3 blocks saves just that more than one of 2.
// Adds what the model's blocks save, `sign` times.
static void add_saved(BlockMemory& m, const MemoryRun& r, int blocks, uint64_t seed, int sign) {
    ModelConfig c = r.config;
    c.num_layers = blocks;
    const Device device = context.device;
    Model model = random_model(c, seed);
    // bytes held when backward leaves a block, from the last block to the first
    std::vector<int64_t> left;
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
        m.by_op[op_of(e)] += bytes, m.bytes += bytes;
        m.copies += e.category == WEIGHT_COPIES ? bytes : 0;
    }
    m.change = left[1] - left[0];
}
static void profile_block(MemoryRun& r, uint64_t seed) {
    ModelConfig largest = r.config;
    largest.num_layers = 3;
    r.block.oom =
        run_if_fits(row_of(largest, r.B, r.T, FORWARD_BACKWARD) + ", 3 blocks",
                    predicted_peak(largest, r.B, r.T, FORWARD_BACKWARD),
                    [&] { add_saved(r.block, r, 2, seed, -1), add_saved(r.block, r, 3, seed, 1); });
    const int64_t C = r.config.d_model, F = r.config.d_ff;
    const int64_t stream = size_of(weight_dtype(r.precision));
    const bool halved =
        stream == 2 || (context.mode != EAGER && size_of(matmul_dtype(r.precision)) == 2);
    r.block.formula = (4 * C * C + 3 * C * F) * (halved ? 2 : 4) + 2 * C * stream;
}

// On context.device; pickles into `folder`, if any.
static MemoryRun profile_memory(const ModelConfig& c, Precision precision, int B, int T,
                                uint64_t seed, const std::string& folder) {
    MemoryRun r{c, precision, B, T};
    context.precision = precision;
    for (Phase phase : {FORWARD, STEP}) {
        PhaseMemory& m = phase == FORWARD ? r.forward : r.step;
        m.oom = run_if_fits(row_of(c, B, T, phase), predicted_peak(c, B, T, phase), [&] {
            Model model = random_model(c, seed);
            Batch batch = random_batch(B, T, c.vocab_size, seed);
            LossScaler scaler;
            // from here on gradients, moments and the libraries' own are there
            run_phase(phase, model, batch, scaler);
            synchronize();
            reset_peak(context.device);
            start_memory_log(context.device);
            run_phase(phase, model, batch, scaler);
            const std::vector<MemoryEvent> log = stop_memory_log();
            m.use = memory_use(context.device);
            if (phase == FORWARD) { read_forward(r, log); }
            if (folder.empty()) { return; }
            save_file(strprintf("%s/snapshot_%s_%s_%d_%s.pickle", folder.c_str(), name_of(phase),
                                c.name.substr(0, c.name.find(" (")).c_str(), T, name_of(precision)),
                      snapshot_pickle(log));
        });
    }
    profile_block(r, seed);
    stop_memory_log();  // of what ran out of memory
    return r;
}

static void print_peaks(const MemoryRuns& runs, const std::string& caption) {
    Table t{"memory_profiling (b), (c): " + caption,
            {"context length", "precision", "forward peak MiB", "full step peak MiB"}};
    auto peak = [](const PhaseMemory& m) {
        return m.oom ? oom_cell(m.oom) : strprintf("%.1f", mib_of(m.use.peak));
    };
    for (const MemoryRun& r : runs) { t.row(r.T, r.precision, peak(r.forward), peak(r.step)); }
    print(t);
}

// The answers' run: the first precision's longest whose phase fits. Null: none fits.
static const MemoryRun* longest(const MemoryRuns& runs, PhaseMemory MemoryRun::*phase) {
    const MemoryRun* found = nullptr;
    for (const MemoryRun& r : runs) {
        if (r.precision == runs[0].precision && !(r.*phase).oom) { found = &r; }
    }
    return found;
}
static void answer_forward(const MemoryRun& r) {
    const size_t* by = r.forward.use.peak_by;
    answer("a",
           "Forward alone keeps nothing for backward: above the weights (%.1f MiB%s) it has %s, "
           "%.1f MiB at context length %d.",
           mib_of(by[PARAMETERS]), by[WEIGHT_COPIES] ? " and their growing 16-bit copies" : "",
           passes(r.peak_in, "layer") ? "one equal peak per layer"
                                      : ("one peak, in " + r.peak_in).c_str(),
           mib_of(by[ACTIVATIONS]), r.T);
}
static void answer_stages(const MemoryRuns& runs) {
    std::vector<std::string> changes;
    for (const MemoryRun& r : runs) {
        if (r.precision != runs[0].precision || r.block.oom) { continue; }
        changes.push_back(strprintf("%+.1f MiB in forward, %+.1f in backward (%d tokens)",
                                    mib_of(r.block.bytes), mib_of(r.block.change), r.T));
    }
    if (!changes.empty()) {
        answer("a",
               "A step changes memory per block by %s. In backward a block's activations go and "
               "its gradients come.",
               list_of(changes).c_str());
    }
}
static void answer_peaks(const MemoryRun& r) {
    const size_t step = r.step.oom ? r.step.oom : r.step.use.peak;
    answer("b", "At context length %d forward's peak is %.1f GiB; a step's %s %.1f GiB (%s, %s).",
           r.T, mib_of(r.forward.use.peak) / 1024, r.step.oom ? "does not fit with" : "is",
           mib_of(step) / 1024, r.config.name.c_str(), name_of(r.precision));
}
static void answer_precision(const MemoryRuns& runs, const char* what,
                             PhaseMemory MemoryRun::*phase) {
    const MemoryRun* high = longest(runs, phase);
    for (const MemoryRun& low : runs) {
        if (!high || low.T != high->T || low.precision == high->precision || (low.*phase).oom) {
            continue;
        }
        const MemoryUse &from = (high->*phase).use, &to = (low.*phase).use;
        const double all = (double)to.peak - from.peak;
        const double copies = (double)to.peak_by[WEIGHT_COPIES] - from.peak_by[WEIGHT_COPIES];
        answer("c",
               "%s's peak changes by %+.1f %% from %s to %s (context length %d): 16-bit copies of "
               "weights by %+.1f MiB, and all else by %+.1f MiB.",
               what, 100 * all / from.peak, name_of(high->precision), name_of(low.precision), low.T,
               mib_of(copies), mib_of(all - copies));
    }
}
// (d) Of each length, and of 512, which 2026's handout means where it names none.
static void answer_residual(const MemoryRuns& runs) {
    std::set<int> lengths = {512};
    for (const MemoryRun& r : runs) { lengths.insert(r.T); }

    const int B = runs[0].B, C = runs[0].config.d_model;
    std::vector<std::string> each;
    for (int T : lengths) {
        each.push_back(
            strprintf("%d x %d x %d x 4 / 1024^2 = %.1f MiB", B, T, C, mib_of(4.0 * B * T * C)));
    }
    answer("d", "batch x context length x d_model x 4 bytes = %s.", list_of(each).c_str());
}
static void answer_block(const MemoryRun& r) {
    const BlockMemory& m = r.block;
    if (m.oom) { return answer("f", "Three blocks do not fit."); }
    std::vector<std::pair<int64_t, std::string>> most;
    for (const auto& [op, bytes] : m.by_op) { most.push_back({bytes, op}); }
    std::sort(most.rbegin(), most.rend());
    std::vector<std::string> five;
    for (size_t i = 0; i < most.size() && i < 5; i++) {
        five.push_back(
            strprintf("%s %.1f %%", most[i].second.c_str(), 100.0 * most[i].first / m.bytes));
    }
    answer("f", "One block saves %.1f MiB for backward (%s at context length %d, %s), most by %s.",
           mib_of(m.bytes), r.config.name.c_str(), r.T, name_of(r.precision),
           list_of(five).c_str());
    answer("f",
           "Backward over the block frees that, but memory changes by %+.1f MiB. The difference is "
           "the gradients of its parameters: %.1f MiB, and %.1f by the formula.",
           mib_of(m.change), mib_of(m.gradients()), mib_of(m.formula));
}
static void answer_memory_profiling(const MemoryRuns& runs) {
    const MemoryRun* r = longest(runs, &MemoryRun::forward);
    if (!r) { fail("memory_profiling: no forward fits into memory"); }
    answer_forward(*r);
    answer_stages(runs);
    answer_peaks(*r);
    answer_precision(runs, "Forward", &MemoryRun::forward);
    answer_precision(runs, "A step", &MemoryRun::step);
    answer_residual(runs);
    std::vector<std::string> all;
    for (const auto& [by, times] : r->largest_by) {
        all.push_back(strprintf("%d by %s", times, by.c_str()));
    }
    answer("e", "Forward's largest allocations have %.1f MiB each (context length %d): %s.",
           mib_of(r->largest), r->T, list_of(all).c_str());
    answer_block(*r);
}

// Without a GPU nothing is computed: what the sizes need is predicted.
int cmd_memory_profiling(const Options& o) {
    context.device = choose_device(o.device);
    context.each_launch = true;
    const bool predicted = context.device == CPU;
    std::unique_ptr<Planning> planning(predicted ? new Planning : nullptr);
    const ModelConfig c = configs_of(o)[0];
    const std::vector<Precision> precisions = precisions_of(o);
    context.mode = modes_of(o, {c}, precisions)[0];
    MemoryRuns runs;
    for (Precision precision : precisions) {
        for (int T : o.context_lengths) {
            give_back_cached_memory();
            runs.push_back(profile_memory(c, precision, o.batch_size, T, o.seed, o.out));
        }
    }
    print_peaks(runs, strprintf("size %s, mode %s, batch %d, vocabulary %d; %s", c.name.c_str(),
                                caption_of(context.mode).c_str(), o.batch_size, c.vocab_size,
                                predicted ? "predicted, every allocation counted"
                                          : "the second run of each phase"));
    answer_memory_profiling(runs);
    return 0;
}
