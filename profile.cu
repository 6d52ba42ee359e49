// profile.cu: where a step's time goes (section 1.1.4) and where its memory goes (1.1.6). It has,
// in this order: what a trace holds, and by which names of ranges it is sorted; nsys_profile; the
// trace files that --trace writes; memory_profiling, with the file for PyTorch's viewer.
// nsys_profile and memory_profiling each have their measurement, then tables and answers, then the
// command. A reader may begin with either of these two: at its struct (ProfileRun, MemoryRun), then
// at its command. lib/trace.cu says how a kernel finds its range.
#include "cs336.h"

#include <nlohmann/json.hpp>

using Json = nlohmann::json;

// -------------------------------------------------------------------------------------------------
// Kernels and their ranges

// This file sorts work by the names of the ranges around it. They are:
//   "matmul"                     lib/matmul.cu, around every matrix product but flash's
//   "attention"                  attention.cu and flash.cu, around all of it
//   "softmax"                    attention.cu, both by its definition and fused
//   "rope"                       layers.cu, in mode eager; else it is within "projections"
//   "swiglu", "rmsnorm"          layers.cu
//   "layer"                      model.cu, around a block
//   "optimizer"                  layers.cu, around AdamW
//   "gradient norm"              model.cu, before AdamW in fp16: has a gradient overflowed?
//   "step", "forward"            profile_phase below; model.cu. range_paths() leaves both out where
//                                it names the forward range that a backward step belongs to
// Whoever renames a range renames it here, too: else its cells are empty, and the answers leave it
// out or say 0 % or nan (a test of --trace finds that).

// Takes the prefixes off the text, in their order, each if it is there.
static string without(string text, std::initializer_list<const char*> prefixes) {
    for (const char* prefix : prefixes) {
        if (text.compare(0, strlen(prefix), prefix) == 0) { text.erase(0, strlen(prefix)); }
    }
    return text;
}

// Shortens a kernel's signature to its name: "void f<int>(float*)" becomes "f<int>".
static string short_kernel_name(string s) {
    const string anonymous = "(anonymous namespace)::";
    for (size_t at = s.find(anonymous); at != string::npos; at = s.find(anonymous)) {
        s.erase(at, anonymous.size());
    }
    s = without(s, {"void "});

    // Template arguments may hold parentheses, too: "f<(E)3>(float*)".
    const bool is_template = s.find('<') < s.find('(');
    return s.substr(0, is_template ? s.find(">(") + 1 : s.find('('));
}

// Returns the path of each range of the trace, from the outermost range to itself. A backward
// step's path is step/backward and then the path of the forward range that recorded it:
// step/backward/layer/attention/softmax. (Outer ranges of other names stay, as ddp.cu's naive in
// naive/backward/naive/forward/layer.)
static vector<string> range_paths(const Trace& trace) {
    vector<string> paths;
    for (const TracedRange& r : trace.ranges) {  // parents stand before their children
        const string above = r.parent < 0 ? "" : paths[r.parent];
        string own = r.name;
        if (r.recorded_in >= 0) { own = without(paths[r.recorded_in], {"step/", "forward/"}); }

        paths.push_back(above.empty() || own.empty() ? above + own : above + "/" + own);
    }
    return paths;
}
static bool is_inside(const string& path, const char* range) {
    return ("/" + path + "/").find(string("/") + range + "/") != string::npos;
}

// Makes work of the ranges themselves, for the CPU, which runs no kernels: each range lasts as long
// as the time that was not spent in the ranges inside it. Only this length is right: it stands at
// the range's start.
static vector<TracedWork> work_of_ranges(const Trace& trace) {
    vector<TracedWork> work;
    for (const TracedRange& r : trace.ranges) {
        work.push_back({r.name, (int)work.size(), r.start, r.end});
        if (r.parent >= 0) { work[r.parent].end -= r.end - r.start; }
    }
    return work;
}

// The launches of one kernel: kernels_of makes an entry of each launch, grouped() joins them.
struct Launches {
    string kernel;
    string path;        // of the range in which it was launched
    vector<double> ns;  // the time of each launch
};
using Kernels = vector<Launches>;

// Returns the work of the trace that lies in some range, one entry for each launch.
static Kernels kernels_of(const Trace& trace) {
    const auto paths = range_paths(trace);
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
static double share(const Kernels& part, const Kernels& all) {  // % of the time
    return 100 * total(part) / total(all);
}

// Selects the kernels that ran in a range. cuBLAS clears and copies before some products: what it
// launches for that is inside "matmul", too.
static Kernels in(const Kernels& all, const char* range, bool wanted = true) {
    Kernels some;
    for (const Launches& l : all) {
        if (is_inside(l.path, range) == wanted) { some.push_back(l); }
    }
    return some;
}
static Kernels outside(const Kernels& all, const char* range) { return in(all, range, false); }

// Joins all launches to which `key` gives the same text into one entry with that text as its name.
// Returns the entries, the one with the most time first.
static Kernels grouped(const Kernels& all, const function<string(const Launches&)>& key) {
    map<string, vector<double>> groups;
    for (const Launches& l : all) {
        vector<double>& ns = groups[key(l)];
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
    int B, T, passes;  // passes: in a trace, o.steps + 1
    ProfiledPhase forward{}, step{};
    Stats in_trace = stats_of({NAN});  // ms of a forward; NAN: fewer than two were traced
    string no_kernels = "";            // why none were traced
};
using ProfileRuns = vector<ProfileRun>;

// Returns the time of the trace's forwards in ms, without the first: each lasts from its first
// kernel's start to its last one's end. NAN: fewer than two were traced.
static Stats forward_in_trace(const Trace& trace) {
    // A forward's outermost range, and a slice from its first work's start to its last work's end.
    map<int, TracedWork> forwards;
    for (const TracedWork& w : trace.work) {  // by start
        if (w.range < 0) { continue; }
        int outermost = w.range;
        while (trace.ranges[outermost].parent >= 0) { outermost = trace.ranges[outermost].parent; }

        TracedWork& whole = forwards.emplace(outermost, w).first->second;
        whole.end = max(whole.end, w.end);
    }

    vector<double> ms;
    for (const auto& [range, whole] : forwards) { ms.push_back((whole.end - whole.start) / 1e6); }
    if (ms.size() < 2) { return stats_of({NAN}); }
    return stats_of({ms.begin() + 1, ms.end()});
}

// Times a phase by the clock, then traces it, and leaves both in r. If --trace asks for it, the
// trace is kept in `traces`, too.
static void profile_phase(ProfileRun& r, Phase phase, const Options& o, Traces& traces) {
    ProfiledPhase& p = phase == FORWARD ? r.forward : r.step;
    auto measure = [&] {
        Model model = random_model(r.config, o.seed);
        const Batch batch = random_batch(r.B, r.T, r.config.vocab_size, o.seed);
        LossScaler scaler{1024};  // as in model.cu's measure_model
        auto pass = [&] {
            if (phase == FORWARD) { return run_phase(phase, model, batch, scaler); }
            Range range("step");
            run_phase(phase, model, batch, scaler);
        };
        p.ms = stats_of(time_ms(o.warmup[0], o.steps, pass));

        start_tracing();
        // These are o.steps + 1 passes, as r.passes says. What time_ms returns is not used.
        time_ms(1, o.steps, pass);
        Trace trace = stop_tracing();
        if (!o.trace.empty()) { traces.push_back(trace); }

        if (context.device == CPU) { trace.work = work_of_ranges(trace); }
        p.kernels = kernels_of(trace);
        if (phase == FORWARD) {
            r.in_trace = forward_in_trace(trace);
            r.no_kernels = trace.no_kernels;
        }
    };
    p.oom = run_if_fits(row_of(r.config, r.B, r.T, phase),
                        predicted_peak(r.config, r.B, r.T, phase), measure);
}

static double ms_per_pass(const ProfileRun& r, const Kernels& all) {  // NAN: there are none
    return all.empty() ? NAN : total(all) / 1e6 / r.passes;
}
static double per_pass(const Launches& l, int passes) {  // how often the kernel runs in a pass
    return (double)l.ns.size() / passes;
}
static string size_and_length(const ProfileRun& r) {
    return strprintf("%s at context length %d", r.config.name.c_str(), r.T);
}

// Shortens a kernel's name to a cell. In csv it is the whole name. In Markdown it is 25 characters,
// so that the table stays near 120 columns, and what many names begin with is left out. These
// characters stand together in the whole name, so a search for them finds it.
static string name_cell(string name) {
    if (context.csv) { return name; }
    for (const char* common :
         {"for_each_kernel<Elementwise<", "for_each_kernel<", "cutlass::Kernel2<cutlass_80_",
          "sm80_xmma_", "f32f32_f32f32_f32_", "bf16bf16_bf16f32_f32_"}) {
        const size_t at = name.find(common);
        if (at != string::npos) { name.erase(0, at + strlen(common)); }
    }
    return "`" + name.substr(0, 25) + "`";
}

// (a) Prints each run's times: forward by the clock and in the trace, and a whole step.
static void print_clock_and_trace(const ProfileRuns& runs, const string& caption) {
    Table t{
        "nsys_profile (a): means; 'trace': forward from its first start to its last end there; " +
            caption,
        {"size", "S", "forward ms", "std", "trace ms", "difference %", "step ms", "std"}};
    auto mean_cell = [](const ProfiledPhase& p) {
        return p.oom ? oom_cell(p.oom) : strprintf("%.3f", p.ms.mean);
    };
    auto std_cell = [](const ProfiledPhase& p) { return p.oom ? "" : deviation(p.ms, "%.3f"); };

    for (const ProfileRun& r : runs) {
        t.row(r.config.name, r.T, mean_cell(r.forward), std_cell(r.forward), r.in_trace.mean,
              100 * (r.in_trace.mean / r.forward.ms.mean - 1), mean_cell(r.step), std_cell(r.step));
    }
    print(t);
}

// Returns a step's forward and backward, without what optimizer_step runs.
static Kernels before_optimizer(const Kernels& step) {
    return outside(outside(step, "optimizer"), "gradient norm");
}
// (b) Prints the kernel that takes the most time, in forward, and in forward and backward.
static void print_top_kernels(const ProfileRuns& runs, const string& caption) {
    Table t{"nsys_profile (b): what takes the most time; " + caption,
            {"size", "S", "phase", "%", "times per pass", "name"}};
    auto add = [&](const ProfileRun& r, const char* phase, const Kernels& all) {
        if (all.empty()) { return; }
        const Launches top = by_name(all)[0];
        t.row(r.config.name, r.T, phase, strprintf("%.1f", share({top}, all)),
              per_pass(top, r.passes), name_cell(top.kernel));
    };
    for (const ProfileRun& r : runs) {
        add(r, "forward", r.forward.kernels);
        add(r, "forward+backward", before_optimizer(r.step.kernels));
    }
    print(t);
}

// (c), (d), (e) Prints the shares of matrix products and of other parts, AdamW's time, and how
// attention's time divides into softmax and products.
static void print_shares(const ProfileRuns& runs, const string& caption) {
    Table t{
        "nsys_profile (c), (d), (e): parts in % of forward's traced time, without the gaps "
        "(step: of the step's); " +
            caption,
        {"size", "S", "matmul", "softmax", "rope", "swiglu", "rmsnorm", "step: matmul", "AdamW ms",
         "softmax ms", "products ms"}};
    auto percent = [](const Kernels& part, const Kernels& all) {
        return part.empty() ? "" : strprintf("%.1f", share(part, all));
    };
    for (const ProfileRun& r : runs) {
        const Kernels& all = r.forward.kernels;
        const Kernels& step = r.step.kernels;
        if (all.empty()) { continue; }
        const Kernels others = outside(all, "matmul"), attention = in(all, "attention");
        // the rest of a range, without its products; "" if that is nothing
        auto other = [&](const char* range) { return percent(in(others, range), all); };
        t.row(r.config.name, r.T, percent(in(all, "matmul"), all), other("softmax"), other("rope"),
              other("swiglu"), other("rmsnorm"), percent(in(step, "matmul"), step),
              ms_per_pass(r, in(step, "optimizer")), ms_per_pass(r, in(attention, "softmax")),
              ms_per_pass(r, in(attention, "matmul")));
    }
    print(t);
}

static string with_unit(double ns) {  // as nsys prints times: a unit in each cell
    return ns >= 1e6 ? strprintf("%.2f ms", ns / 1e6) : strprintf("%.2f μs", ns / 1e3);
}
// Prints the ten kernels with the most time as nsys' summary does. Total time and instances are
// those of one pass; the other columns are over the launches of all passes.
static void print_summary(const Kernels& all, int passes, const string& caption) {
    const Kernels kernels = by_name(all);
    const size_t rows = min<size_t>(10, kernels.size());
    Table t{strprintf("summary: the first %zu of %zu names; %s", rows, kernels.size(),
                      caption.c_str()),
            {"Time", "Total Time", "Instances", "Avg", "Med", "Min", "Max", "StdDev", "Name"}};
    for (size_t i = 0; i < rows; i++) {
        const Launches& l = kernels[i];
        const Stats ns = stats_of(l.ns);
        t.row(strprintf("%.1f%%", share({l}, all)), with_unit(total({l}) / passes),
              strprintf("%g", per_pass(l, passes)), with_unit(ns.mean), with_unit(ns.median),
              with_unit(ns.min), with_unit(ns.max), with_unit(ns.std), name_cell(l.kernel));
    }
    print(t);
}

// (a) Compares forward's time by the clock with its time in the trace.
static void answer_times(const ProfileRun& r) {
    const double clock = r.forward.ms.mean, traced = r.in_trace.mean;
    if (isnan(traced)) {
        return answer("a", "Forward takes %.1f ms by the clock; no kernels were traced: %s (%s).",
                      clock, r.no_kernels.c_str(), size_and_length(r).c_str());
    }
    const string verdict = level(r.forward.ms, r.in_trace);
    answer("a", "Forward takes %.3f ms by the clock and %.3f ms in the trace (%s): %s (%+.1f %%).",
           clock, traced, size_and_length(r).c_str(),
           verdict == "" ? "they differ" : verdict.c_str(), 100 * (traced / clock - 1));
}

// Describes the kernel with the most time: "`gemm` (40.2 %, 97 times per pass)".
static string about_first(const Kernels& all, int passes) {
    const Launches top = by_name(all)[0];
    return strprintf("`%s` (%.1f %%, %s per pass)", top.kernel.c_str(), share({top}, all),
                     counted(strprintf("%g", per_pass(top, passes)), "time").c_str());
}
// (b) Names the kernel that takes the most time in forward, and whether backward changes that.
static void answer_top_kernel(const ProfileRun& r) {
    const Kernels& forward = r.forward.kernels;
    answer("b", "In forward %s takes the most time; %s.", about_first(forward, r.passes).c_str(),
           size_and_length(r).c_str());

    const Kernels both = before_optimizer(r.step.kernels);
    if (both.empty()) { return; }
    answer("b", "With backward it is %s, %s.",
           by_name(both)[0].kernel == by_name(forward)[0].kernel ? "the same" : "another one",
           about_first(both, r.passes).c_str());
}

// What is neither matrix product nor AdamW.
static Kernels others_in(const Kernels& all) {
    return outside(outside(all, "matmul"), "optimizer");
}
// Lists the four parts of the model, each named by its innermost range, in which others_in() has
// the most time: "softmax (4.2 %), rope (2.9 %), swiglu (2.2 %) and rmsnorm (2.0 %)".
static string largest_others(const Kernels& all) {
    vector<string> parts;
    for (const Launches& l :
         grouped(others_in(all), [](auto& l) { return l.path.substr(l.path.rfind('/') + 1); })) {
        if (parts.size() == 4) { break; }
        parts.push_back(strprintf("%s (%.1f %%)", l.kernel.c_str(), share({l}, all)));
    }
    return list_of(parts);
}
// (c) Tells forward's share of matrix products and what else takes time. (d) Tells how both change
// from forward to a whole step.
static void answer_shares(const ProfileRun& r) {
    const Kernels& forward = r.forward.kernels;
    const double in_forward = share(in(forward, "matmul"), forward);
    // flash does attention's products within kernels of its own, which count as attention
    const char* which = in(in(forward, "attention"), "matmul").empty() ? " outside attention" : "";
    answer("c",
           "Of forward's traced time %.1f %% goes to matrix products%s (%s). Of the rest most goes "
           "to %s.",
           in_forward, which, size_and_length(r).c_str(), largest_others(forward).c_str());

    const Kernels& step = r.step.kernels;
    if (step.empty()) { return; }
    const double in_step = share(in(step, "matmul"), step);
    answer("d",
           "From forward to a whole step the share of matrix products%s goes from %.1f to "
           "%.1f %% (%s).",
           which, in_forward, in_step, size_and_length(r).c_str());

    const Kernels adamw = in(step, "optimizer");
    answer("d",
           "AdamW has no matrix products. It takes %.4g of the %.4g ms that are traced in a step "
           "(%.1f %%).",
           ms_per_pass(r, adamw), ms_per_pass(r, step), share(adamw, step));
    answer("d",
           "The other parts have %.1f %% of forward's traced time and %.1f %% of the step's; there "
           "most goes to %s.",
           share(others_in(forward), forward), share(others_in(step), step),
           largest_others(step).c_str());
}

// (e) Compares softmax with attention's two products, in time and in FLOPs. We count 5 FLOPs per
// score for softmax (maximum, subtract, exp, sum, divide) and 2 D for each product.
static void answer_softmax(const ProfileRun& r) {
    const Kernels attention = in(r.forward.kernels, "attention");
    const double softmax_ms = ms_per_pass(r, in(attention, "softmax")),
                 products_ms = ms_per_pass(r, in(attention, "matmul"));
    const double times_as_long = softmax_ms / products_ms;
    if (isnan(times_as_long)) {
        return answer("e",
                      "Softmax and both products are not apart here (%.2f ms per forward); mode "
                      "eager parts them.",
                      ms_per_pass(r, attention));
    }

    // eager's softmax has all scores, the fused one T (T + 1) / 2 of T^2
    const bool unmasked = context.mode == EAGER;
    const double D = (double)r.config.d_model / r.config.num_heads;
    const double fewer_flops = 4 * D / 5 * (unmasked ? 1 : 2.0 * r.T / (r.T + 1));
    answer(
        "e",
        "Softmax takes %.4g ms per forward and attention's two products %.4g ms (%s). It has %.4g "
        "times fewer FLOPs (5 per score%s against 4 x %g), and each takes %.3g times as long.",
        softmax_ms, products_ms, size_and_length(r).c_str(), fewer_flops,
        unmasked ? "" : " that is not masked", D, fewer_flops * times_as_long);
}

// Chooses the runs whose numbers the answers give. With each_size it is one of each size: the
// longest whose step ran, or else the longest whose forward did. Without, it is one in all: the
// last run whose step ran, or else the last whose forward did. So where no step of the largest size
// fits, a smaller size is answered. Answers that need a step are left out where none ran.
static vector<const ProfileRun*> answered(const ProfileRuns& runs, bool each_size) {
    vector<const ProfileRun*> found;
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
    if (r.forward.kernels.empty()) { return; }
    answer_top_kernel(r);
    answer_shares(r);
    answer_softmax(r);
}

// Returns the handout's "longest that fits": the longest power of two above 512 whose step is
// predicted to need no more bytes than `room`. Where there is none, it is the longest whose forward
// does; where there is none either, it is 512.
static int longest_that_fits(const ModelConfig& config, int B, size_t room) {
    int T = 512;
    for (Phase phase : {STEP, FORWARD}) {
        while (predicted_peak(config, B, 2 * T, phase) <= room) { T *= 2; }
        if (T > 512) { break; }
    }
    return T;
}

// Profiles each size at each length, writes the trace if --trace asks for it, and prints the tables
// of all runs, the summaries of the last run that is answered, and the answers.
int cmd_nsys_profile(const Options& o) {
    choose_device(o.device);
    context.each_launch = true;
    const auto configs = configs_of(o);
    context.precision = precisions_of(o)[0];
    context.mode = modes_of(o, configs)[0];

    Traces traces;
    ProfileRuns runs;
    for (const ModelConfig& config : configs) {
        set<int> lengths(o.context_lengths.begin(), o.context_lengths.end());
        if (o.edition == "2026" && !o.quick && !o.has("context_length")) {
            lengths.insert(
                longest_that_fits(config, o.batch_size, available_memory(context.device)));
        }
        for (int T : lengths) {
            runs.push_back({config, o.batch_size, T, o.steps + 1});
            for (Phase phase : {FORWARD, STEP}) { profile_phase(runs.back(), phase, o, traces); }
        }
    }

    // first: whoever reads the tables may close the pipe
    write_trace(o.trace, traces, "cs336 " + join(o.command_line, " "));

    const string setting =
        strprintf("%s; precision %s, mode %s",
                  context.device == CPU ? "ranges of operations by the CPU's clock" : "kernels",
                  name_of(context.precision), name_of(context.mode));
    print_clock_and_trace(runs,
                          setting + strprintf(", batch %d, warmup %d, steps %d; S: context length",
                                              o.batch_size, o.warmup[0], o.steps));

    // The 2026 handout wants each size's profile answered.
    const auto all = answered(runs, o.edition == "2026");
    if (all.empty()) { fail("no forward fits into memory"); }
    const ProfileRun& last = *all.back();
    if (!last.forward.kernels.empty()) {
        print_top_kernels(runs, setting);
        print_shares(runs, setting);
        const string what =
            strprintf(" of %s; Total Time and Instances: of one pass, the mean of %d; %s",
                      size_and_length(last).c_str(), last.passes, setting.c_str());
        print_summary(last.forward.kernels, last.passes, "forward" + what);
        if (!last.step.kernels.empty()) {
            print_summary(last.step.kernels, last.passes, "a step" + what);
        }
    }
    for (const ProfileRun* r : all) { answer_nsys_profile(*r); }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Trace files, in Chrome's format: an event per line

static string quoted(const string& text) {  // a byte that is no UTF-8 becomes U+FFFD
    return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}
// Writes the ranges as slices in their thread's row, and all work as slices in its stream's. The
// slices of a row have to nest: work that overlaps other work of its stream goes to a further row.
void write_trace(const string& path, const Traces& traces, const string& caption,
                 const Communicator& c) {
    if (path.empty()) { return; }
    vector<string> events;
    auto name = [&](const char* what, int row, const string& text) {
        events.push_back(strprintf(R"({"ph":"M","name":"%s","pid":%d,"tid":%d,"args":{"name":%s}})",
                                   what, c.rank, row, quoted(text).c_str()));
    };
    name("process_name", 0, strprintf("rank %d", c.rank));

    // Times are µs in a double, which has no room for ns since 1970: they count from midnight.
    constexpr int64_t DAY = 86400LL * 1000000000;  // ns
    const int64_t midnight =
        traces.empty() || traces[0].ranges.empty() ? 0 : traces[0].ranges[0].start / DAY * DAY;

    // Streams have the rows from STREAMS on, which is more than any thread's number.
    constexpr int STREAMS = 1 << 24, ROWS_OF_STREAM = 16;
    set<int> named_rows;
    map<pair<unsigned, int>, int64_t> last_end;  // of the slices in (stream, row)
    for (const Trace& trace : traces) {
        const auto paths = range_paths(trace);
        auto slice = [&](int row, const string& row_name, const char* category,
                         const TracedWork& w) {
            if (named_rows.insert(row).second) { name("thread_name", row, row_name); }
            const string path = w.range < 0 ? "" : paths[w.range];
            events.push_back(strprintf(
                R"({"ph":"X","cat":"%s","name":%s,"pid":%d,"tid":%d,"ts":%.3f,"dur":%.3f,"args":{"path":%s}})",
                category, quoted(w.name).c_str(), c.rank, row, (w.start - midnight) / 1e3,
                (w.end - w.start) / 1e3, quoted(path).c_str()));
        };

        for (size_t i = 0; i < trace.ranges.size(); i++) {
            const TracedRange& r = trace.ranges[i];
            slice(r.thread, strprintf("CPU thread %d", r.thread), "range",
                  {r.name, (int)i, r.start, r.end});
        }
        for (const TracedWork& w : trace.work) {
            int row = 0;
            while (last_end[{w.stream, row}] > w.start) { row++; }
            last_end[{w.stream, row}] = w.end;

            slice(STREAMS + ROWS_OF_STREAM * (int)w.stream + row,
                  strprintf("stream %u%s", w.stream, row ? ", overlapping" : ""),
                  w.name[0] == '[' ? "copy" : "kernel",
                  {short_kernel_name(w.name), w.range, w.start, w.end});
        }
    }

    const auto of_ranks = gather_text(c, join(events, ",\n"));
    if (c.rank > 0) { return; }
    const string whole = quoted(caption + "; " + origin());
    save_file(path, "{\"otherData\":{\"caption\":" + whole + "},\"traceEvents\":[\n" +
                        join(of_ranks, ",\n") + "\n]}\n");
}

// -------------------------------------------------------------------------------------------------
// memory_profiling: the log of our allocations as a file, as a table and as answers

// Returns the ranges around an allocation: "forward/layer/ffn". "held": it was there before the log
// began.
static string path_of(const MemoryEvent& e) {
    return e.ms == 0 ? "held" : join({e.ranges.begin(), e.ranges.end()}, "/");
}
// Returns which operation allocated: "attention/softmax exp". A lambda has no name, but its range
// says what it does.
static string op_of(const MemoryEvent& e) {
    const string path = without(path_of(e), {"forward/", "layer/"});
    const bool is_lambda = strcmp(e.at.function, "operator()") == 0;
    return is_lambda ? path : path + " " + e.at.function;
}

// The file is what pytorch.org/memory_viz draws: a Python object, pickled by protocol 2. A pickle
// is a program for a stack machine, whose last value is the object. The viewer knows few of the
// instructions; these are enough. They have the names of Python's pickletools.
enum Opcode : char {
    PROTO = '\x80',  // the protocol's number follows
    STOP = '.',      // the stack's last value is the object
    MARK = '(',      // the next SETITEMS or APPENDS takes all values from here on
    EMPTY_DICT = '}',
    SETITEMS = 'u',  // keys and values by turns, into the dict below the mark
    EMPTY_LIST = ']',
    APPENDS = 'e',     // to the list below the mark
    BINUNICODE = 'X',  // a text: 4 bytes of length, then the text
    LONG1 = '\x8a'     // a number: 1 byte of length, then the number
};
// Appends to `to` the instructions that push the value.
static void pickle(string& to, const Json& value) {
    auto little_endian = [&](uint64_t number, int bytes) {
        for (int i = 0; i < bytes; i++) { to += (char)(number >> (8 * i)); }
    };
    if (value.is_object()) {
        to += EMPTY_DICT;
        to += MARK;
        for (const auto& [key, x] : value.items()) {
            pickle(to, key);
            pickle(to, x);
        }
        to += SETITEMS;
    } else if (value.is_array()) {
        // A thousand at a time, as Python does: the viewer passes each batch as arguments of one
        // call, and more than some 100,000 of them overflow its stack.
        constexpr size_t BATCH = 1000;
        to += EMPTY_LIST;
        for (size_t begin = 0; begin < value.size(); begin += BATCH) {
            const size_t end = min(begin + BATCH, value.size());
            to += MARK;
            for (size_t i = begin; i < end; i++) { pickle(to, value[i]); }
            to += APPENDS;
        }
    } else if (value.is_string()) {
        const auto& text = value.get_ref<const string&>();
        to += BINUNICODE;
        little_endian(text.size(), 4);
        to += text;
    } else {
        to += {LONG1, 8};
        little_endian(value.get<int64_t>(), 8);
    }
}

// Returns an event as the viewer takes it. The stack that it shows for it is the line that
// allocated, then the ranges around that, innermost first.
static Json snapshot_event(const MemoryEvent& e, const char* action, const char* category) {
    Json frames = {
        {{"filename", basename(e.at.file)}, {"line", e.at.line}, {"name", e.at.function}}};
    for (size_t i = e.ranges.size(); i > 0; i--) {
        frames.push_back({{"filename", "range"}, {"line", i}, {"name", e.ranges[i - 1]}});
    }
    return {{"action", action}, {"addr", e.address},    {"size", e.bytes},
            {"stream", 0},      {"category", category}, {"time_us", (int64_t)(e.ms * 1e3)},
            {"frames", frames}};
}
// Returns the log as such a file. It serves the viewer's "Active Memory Timeline"; the other views
// need PyTorch's segments, of which our buffers have none.
static string snapshot_pickle(const vector<MemoryEvent>& log) {
    Json trace = Json::array();
    for (const MemoryEvent& e : log) {
        trace.push_back(
            snapshot_event(e, e.is_alloc ? "alloc" : "free_completed", name_of(e.category)));
    }
    // Where events have categories and none is called 'unknown', the viewer fails.
    MemoryEvent end{};
    end.ms = log.empty() ? 0 : log.back().ms;
    end.at = here();
    trace.push_back(snapshot_event(end, "snapshot", "unknown"));

    string bytes = {PROTO, 2};
    pickle(bytes, {{"segments", Json::array()}, {"device_traces", Json::array({trace})}});
    return bytes + (char)STOP;
}

struct PhaseMemory {
    size_t oom = 0;  // bytes
    MemoryUse use{};
};
struct BlockMemory {  // what one block saves for backward, bytes
    size_t oom = 0;
    map<string, int64_t> by_op = {};
    // in all; and of it the 16-bit copies of weights, which go when backward ends
    int64_t bytes = 0, copies = 0;
    int64_t change = 0;   // of the bytes held, while backward goes over a block
    int64_t formula = 0;  // bytes of its parameters' gradients, by their shapes
    // Backward frees what a block saved and leaves the gradients of its parameters; the gradient of
    // its input takes the place of that of its output.
    int64_t gradients() const { return change + bytes - copies; }
};
struct MemoryRun {  // one size and length, in one precision
    ModelConfig config;
    Precision precision;
    int B, T;
    PhaseMemory forward{}, step{};
    string peak_in = "";               // the range of forward's peak
    size_t largest = 0;                // allocation of forward, bytes
    map<string, int> largest_by = {};  // whose they are, and how many
    BlockMemory block{};
    const PhaseMemory& of(Phase phase) const { return phase == FORWARD ? forward : step; }
};
using MemoryRuns = vector<MemoryRun>;

// Finds in forward's log where its peak was and what its largest allocations are. Buffers that were
// there before the log began (at 0 ms) count to the peak, but are no allocation of forward.
static void read_forward(MemoryRun& r, const vector<MemoryEvent>& log) {
    size_t now = 0, peak = 0;
    for (const MemoryEvent& e : log) {
        now += e.is_alloc ? e.bytes : -e.bytes;
        if (now > peak) {
            peak = now;
            r.peak_in = path_of(e);
        }

        if (!e.is_alloc || e.ms == 0 || e.bytes < r.largest) { continue; }
        if (e.bytes > r.largest) {
            r.largest = e.bytes;
            r.largest_by.clear();
        }
        r.largest_by[strprintf("%s (%s:%d)", op_of(e).c_str(), basename(e.at.file), e.at.line)]++;
    }
}

// Runs forward and backward of a model like r's with so many blocks. Returns what all its blocks
// save for backward, and how memory changes while backward goes over one of them.
static BlockMemory saved_by(const MemoryRun& r, int blocks, uint64_t seed) {
    ModelConfig config = r.config;
    config.num_layers = blocks;
    Model model = random_model(config, seed);
    // The bytes held when backward leaves a block, from the last block to the first: the gradient
    // of its ln1 comes last.
    vector<int64_t> left;
    for (const Layer& layer : model.layers) {
        layer.ln1.gradient->ready = [&] { left.push_back(memory_use(context.device).now); };
    }

    map<uint64_t, MemoryEvent> saved;  // by address: what blocks still hold after forward
    start_memory_log(context.device);
    forward_backward(model, random_batch(r.B, r.T, config.vocab_size, seed), 1, [&] {
        for (const MemoryEvent& e : stop_memory_log()) {
            const bool counts = e.category == ACTIVATIONS || e.category == WEIGHT_COPIES;
            saved.erase(e.address);
            if (e.is_alloc && counts && is_inside(path_of(e), "layer")) { saved[e.address] = e; }
        }
    });

    BlockMemory m;
    for (const auto& [address, e] : saved) {
        m.by_op[op_of(e)] += e.bytes;
        m.bytes += e.bytes;
        if (e.category == WEIGHT_COPIES) { m.copies += e.bytes; }
    }
    // Backward left the last block at left[0] and the block before it at left[1].
    m.change = left[1] - left[0];
    return m;
}
// (f) Finds what one block saves for backward: what three blocks save beyond two. `change` is that
// of the middle one of three. By the formula a block's gradients are those of four matrices C x C,
// three C x F, and two norms.
static void profile_block(MemoryRun& r, uint64_t seed) {
    ModelConfig largest = r.config;
    largest.num_layers = 3;
    auto measure = [&] {
        const BlockMemory two = saved_by(r, 2, seed);
        r.block = saved_by(r, 3, seed);
        for (const auto& [op, bytes] : two.by_op) { r.block.by_op[op] -= bytes; }
        r.block.bytes -= two.bytes;
        r.block.copies -= two.copies;
    };
    r.block.oom = run_if_fits(row_of(largest, r.B, r.T, FORWARD_BACKWARD) + ", 3 blocks",
                              predicted_peak(largest, r.B, r.T, FORWARD_BACKWARD), measure);

    const int64_t C = r.config.d_model, F = r.config.d_ff;
    const int64_t of_norm = size_of(weight_dtype(r.precision));
    // Matrices have 16-bit gradients in pure_bf16 and, outside mode eager, where products take
    // 16-bit copies of them (Gradient::value in lib/lib.h).
    const bool halved =
        of_norm == 2 || (context.mode != EAGER && size_of(matmul_dtype(r.precision)) == 2);
    r.block.formula = (4 * C * C + 3 * C * F) * (halved ? 2 : 4) + 2 * C * of_norm;
}

// Measures one size and length in one precision, on context.device. Runs each phase twice and logs
// the second run: its peak and, of forward, what the log tells; the log is saved in `folder`,
// unless that is "". Then measures a block.
static MemoryRun profile_memory(const ModelConfig& config, Precision precision, int B, int T,
                                uint64_t seed, const string& folder) {
    MemoryRun r{config, precision, B, T};
    context.precision = precision;
    for (Phase phase : {FORWARD, STEP}) {
        PhaseMemory& m = phase == FORWARD ? r.forward : r.step;
        auto measure = [&] {
            Model model = random_model(config, seed);
            const Batch batch = random_batch(B, T, config.vocab_size, seed);
            LossScaler scaler{1024};  // as in model.cu's measure_model
            // AdamW's moments and the libraries' own memory come with the first run and stay.
            run_phase(phase, model, batch, scaler);

            synchronize();
            reset_peak(context.device);
            start_memory_log(context.device);
            run_phase(phase, model, batch, scaler);
            const auto log = stop_memory_log();
            m.use = memory_use(context.device);
            if (phase == FORWARD) { read_forward(r, log); }

            if (folder.empty()) { return; }
            save_file(strprintf("%s/snapshot_%s_%s_%d_%s.pickle", folder.c_str(), name_of(phase),
                                config.name.substr(0, config.name.find(" (")).c_str(), T,
                                name_of(precision)),
                      snapshot_pickle(log));
        };
        m.oom =
            run_if_fits(row_of(config, B, T, phase), predicted_peak(config, B, T, phase), measure);
    }

    profile_block(r, seed);
    stop_memory_log();  // after OutOfMemory it is still on
    return r;
}

// (b), (c) Prints the peaks of both phases.
static void print_peaks(const MemoryRuns& runs, const string& caption) {
    Table t{"memory_profiling (b), (c): " + caption,
            {"context length", "precision", "forward peak MiB", "full step peak MiB"}};
    auto peak = [](const PhaseMemory& m) { return m.oom ? oom_cell(m.oom) : mib_cell(m.use.peak); };
    for (const MemoryRun& r : runs) { t.row(r.T, r.precision, peak(r.forward), peak(r.step)); }
    print(t);
}

// Finds the run that the answers are about: the first precision's last length, in the order typed,
// whose phase fits. Null: none fits.
static const MemoryRun* last_that_fits(const MemoryRuns& runs, Phase phase) {
    const MemoryRun* found = nullptr;
    for (const MemoryRun& r : runs) {
        if (r.precision == runs[0].precision && !r.of(phase).oom) { found = &r; }
    }
    return found;
}

// (a) Tells what forward alone has above the weights, and where its peak is.
static void answer_forward(const MemoryRun& r) {
    const size_t* by = r.forward.use.peak_by;
    const string peak = is_inside(r.peak_in, "layer") ? "a layer" : r.peak_in;
    answer("a",
           "Forward alone keeps nothing for backward: above the weights (%.1f MiB%s) it has its "
           "peak in %s, %.1f MiB of activations at context length %d.",
           mib_of(by[PARAMETERS]), by[WEIGHT_COPIES] ? " and 16-bit copies of them" : "",
           peak.c_str(), mib_of(by[ACTIVATIONS]), r.T);
}
// (a) Tells how each block changes memory in a step, at each length.
static void answer_stages(const MemoryRuns& runs) {
    vector<string> changes;
    for (const MemoryRun& r : runs) {
        if (r.precision != runs[0].precision || r.block.oom) { continue; }
        changes.push_back(strprintf("%+.1f MiB in forward, %+.1f in backward (context length %d)",
                                    mib_of(r.block.bytes), mib_of(r.block.change), r.T));
    }
    if (changes.empty()) { return; }
    answer("a",
           "A step changes memory per block, as seen in models of two and three blocks, by %s. In "
           "backward a block's activations go and its gradients come.",
           list_of(changes).c_str());
}
static void answer_peaks(const MemoryRun& r) {  // (b)
    const size_t step = r.step.oom ? r.step.oom : r.step.use.peak;
    answer("b", "At context length %d forward's peak is %.1f GiB; a step's %s %.1f GiB (%s, %s).",
           r.T, to_gib(r.forward.use.peak), r.step.oom ? "does not fit with" : "is", to_gib(step),
           r.config.name.c_str(), name_of(r.precision));
}

// (c) Tells how a phase's peak changes from the first precision to each other one, at the last
// length that fits in the first.
static void answer_precision(const MemoryRuns& runs, Phase phase) {
    const MemoryRun* high = last_that_fits(runs, phase);
    if (!high) { return; }
    for (const MemoryRun& low : runs) {
        if (low.T != high->T || low.precision == high->precision || low.of(phase).oom) { continue; }
        const MemoryUse& from = high->of(phase).use;
        const MemoryUse& to = low.of(phase).use;
        const double all = (double)to.peak - from.peak;
        const double copies = (double)to.peak_by[WEIGHT_COPIES] - from.peak_by[WEIGHT_COPIES];
        answer("c",
               "%s's peak changes by %+.1f %% from %s to %s (context length %d): 16-bit copies of "
               "weights by %+.1f MiB, and all else by %+.1f MiB.",
               phase == FORWARD ? "Forward" : "A step", 100 * all / from.peak,
               name_of(high->precision), name_of(low.precision), low.T, mib_of(copies),
               mib_of(all - copies));
    }
}

// (d) Tells the size of one activation of the residual stream at each length, and at 512, which the
// 2026 handout means where it names none.
static void answer_residual(const MemoryRuns& runs) {
    set<int> lengths = {512};
    for (const MemoryRun& r : runs) { lengths.insert(r.T); }

    const int B = runs[0].B, C = runs[0].config.d_model;
    vector<string> each;
    for (int T : lengths) {
        each.push_back(
            strprintf("%d x %d x %d x 4 / 1024^2 = %.1f MiB", B, T, C, mib_of(4.0 * B * T * C)));
    }
    answer("d", "batch x context length x d_model x 4 bytes (fp32) = %s.", list_of(each).c_str());
}

// (e) Tells how large forward's largest allocations are, and who makes them.
static void answer_largest(const MemoryRun& r) {
    vector<string> all;
    for (const auto& [by, times] : r.largest_by) {
        all.push_back(strprintf("%d by %s", times, by.c_str()));
    }
    answer("e",
           "The largest allocation in forward has %.1f MiB (context length %d). Of that size: %s.",
           mib_of(r.largest), r.T, list_of(all).c_str());
}

// (f) Tells what one block saves for backward, most by which operations (from 4 % on),
// and what backward leaves in its place.
static void answer_block(const MemoryRun& r) {
    const BlockMemory& m = r.block;
    if (m.oom) { return answer("f", "Three blocks do not fit."); }
    vector<pair<int64_t, string>> most;
    for (const auto& [op, bytes] : m.by_op) { most.push_back({bytes, op}); }
    sort(most.rbegin(), most.rend());

    vector<string> largest;
    for (const auto& [bytes, op] : most) {
        if (25 * bytes < m.bytes) { break; }
        largest.push_back(strprintf("%s %.1f %%", op.c_str(), 100.0 * bytes / m.bytes));
    }
    answer("f", "One block saves %.1f MiB for backward (%s at context length %d, %s), most by %s.",
           mib_of(m.bytes), r.config.name.c_str(), r.T, name_of(r.precision),
           list_of(largest).c_str());
    answer(
        "f",
        "Backward over the block frees that%s, but memory changes by %+.1f MiB. The difference is "
        "the gradients of its parameters: %.1f MiB, and %.1f by the formula.",
        m.copies ? " except the 16-bit copies of weights" : "", mib_of(m.change),
        mib_of(m.gradients()), mib_of(m.formula));
}

// Prints all answers; fails where no forward fits.
static void answer_memory_profiling(const MemoryRuns& runs) {
    const MemoryRun* r = last_that_fits(runs, FORWARD);
    if (!r) { fail("no forward fits into memory"); }
    answer_forward(*r);
    answer_stages(runs);
    answer_peaks(*r);
    answer_precision(runs, FORWARD);
    answer_precision(runs, STEP);
    answer_residual(runs);
    answer_largest(*r);
    answer_block(*r);
}

// Profiles the size in each precision at each length, and prints. On the CPU nothing is
// computed: what the sizes need is predicted.
int cmd_memory_profiling(const Options& o) {
    choose_device(o.device);
    context.each_launch = true;
    const bool predicted = context.device == CPU;
    unique_ptr<Planning> planning(predicted ? new Planning : nullptr);
    const ModelConfig config = configs_of(o)[0];
    context.mode = modes_of(o, {config})[0];

    MemoryRuns runs;
    for (Precision precision : precisions_of(o)) {
        for (int T : o.context_lengths) {
            give_back_cached_memory();
            runs.push_back(profile_memory(config, precision, o.batch_size, T, o.seed, o.out));
        }
    }

    print_peaks(runs,
                strprintf("size %s, mode %s, batch %d, vocabulary %d; %s", config.name.c_str(),
                          caption_of(context.mode).c_str(), o.batch_size, config.vocab_size,
                          predicted ? "predicted as on a GPU, every allocation counted"
                                    : "the second run of each phase"));
    answer_memory_profiling(runs);
    return 0;
}
