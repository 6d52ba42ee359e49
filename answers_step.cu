// answers_step.cu: section 1.1 of the handout, answered from the commands' tables (see answers.cu):
// benchmarking_script, nsys_profile, benchmarking_mixed_precision, memory_profiling.
#include "answers.h"
#include "commands.h"

#include <algorithm>
#include <cmath>

// ---------------------------------------------------------------------------------------------------------------------
// What these tables have in common

using Rows = std::vector<TableRow>;

static std::string setting_of(const Table& table) {  // "fp32, mode eager"
    std::string setting = value_in(table, "precision ", ";");
    return setting.substr(0, setting.find(", each row"));
}
static bool on_gpu(const Table& table) { return table.caption.find("CUDA ") != std::string::npos; }
// Is there a number in the row's cell (an "OOM" is none), and is it larger than this?
static bool ran(const TableRow& row, const std::string& column, double than = -INFINITY) {
    return row.number(column) > than;
}
static Rows ran(const Rows& rows, const std::string& column, double than = -INFINITY) {
    Rows found;
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(found),
                 [&](const TableRow& row) { return ran(row, column, than); });
    return found;
}
static std::string where(const TableRow& row) {  // "large" or "large at context length 256"
    std::string T = row.text("context length");
    return row.text("size") + (T.empty() ? "" : " at context length " + T);
}
// "6.72 ms (small) to 145.16 ms (2.7B)", "6.72 ms (small)", or "" where no row has a number.
static std::string from_to(const Rows& rows, const std::string& column, const std::string& unit) {
    TableRow least = smallest_of(rows, column), most = largest_of(rows, column);
    auto cell = [&](const TableRow& row) { return row.text(column) + unit + " (" + where(row) + ")"; };
    if (!least) { return ""; }
    return least.index == most.index ? cell(least) : cell(least) + " to " + cell(most);
}
static std::string span_of(const std::vector<double>& values, const char* format) {
    if (values.empty()) { return ""; }
    return span(*std::min_element(values.begin(), values.end()), *std::max_element(values.begin(), values.end()),
                format);
}
static std::string cells_of(const Rows& rows, const std::string& column) {  // "5.0, 10.0 and 20.0"
    std::vector<std::string> cells;
    for (const TableRow& row : rows) { cells.push_back(row.text(column).empty() ? "-" : row.text(column)); }
    return list_of(cells);
}
static std::vector<std::string> values_of(const Rows& rows, const std::string& column) {  // each once, in their order
    std::vector<std::string> values;
    for (const TableRow& row : rows) {
        std::string value = row.text(column);
        if (std::find(values.begin(), values.end(), value) == values.end()) { values.push_back(value); }
    }
    return values;
}
// columns: of these the cells can be "OOM (61.2 GiB)"; names: what each of them stands for.
static std::string out_of_memory(const Rows& rows, const std::vector<Cell>& columns) {
    std::vector<std::string> missing;
    for (const TableRow& row : rows) {
        std::vector<std::string> phases;
        for (const Cell& column : columns) {
            if (row.text(column.column).compare(0, 3, "OOM") == 0) {
                phases.push_back(column.text.empty() ? row.text("phase") : column.text);
            }
        }
        if (!phases.empty()) { missing.push_back(where(row) + " (" + list_of(phases) + ")"); }
    }
    return missing.empty() ? "" : " Out of memory: " + list_of(missing) + ".";
}

// ---------------------------------------------------------------------------------------------------------------------
// 1.1.3 benchmarking_script

struct TimedPhase {
    const char *name, *mean, *deviation;
    bool told = true;  // its times, too, and not only how much they vary
};
static const TimedPhase timed_phases[] = {{"forward", "fw_mean_ms", "fw_std_ms"},
                                          {"backward", "bw_only_mean_ms", "bw_only_std_ms"},
                                          {"forward with backward", "fwbw_mean_ms", "fwbw_std_ms", false},
                                          {"a whole step", "step_mean_ms", "step_std_ms"}};
constexpr double SMALL_DEVIATION = 0.05;  // of the mean

struct StepRows {  // of one setting
    std::string setting;
    Rows rows;
};
// "10.52 ms (small) to 172.44 ms (2.7B) for forward, 20.43 to 343.25 ms for backward": the sizes only where they
// change.
static std::vector<std::string> times_by_phase(const Rows& all) {
    std::vector<std::string> times;
    std::string sizes;
    for (const TimedPhase& phase : timed_phases) {
        Rows rows = ran(all, phase.mean, 0);
        if (rows.empty() || !phase.told) { continue; }
        TableRow least = smallest_of(rows, phase.mean), most = largest_of(rows, phase.mean);
        std::string now = where(least) + " to " + where(most);
        std::string same = least.text(phase.mean) + (where(least) == where(most) ? "" : " to " + most.text(phase.mean));
        times.push_back(say("{} for {}", now == sizes ? same + " ms" : from_to(rows, phase.mean, " ms"), phase.name));
        sizes = now;
    }
    return times;
}
static std::string times_of_setting(const StepRows& of) {
    std::vector<std::string> times = times_by_phase(of.rows);
    bool eager = of.setting.find("mode eager") != std::string::npos;
    return say("{} ({}) {}.", eager ? "The handout's model" : "The model", of.setting,
               times.empty() ? "has no time at any size" : "takes " + list_of(times)) +
           out_of_memory(of.rows,
                         {{"fw_mean_ms", "forward"}, {"bw_only_mean_ms", "backward"}, {"step_mean_ms", "step"}});
}
static std::string ratio_of_backward(const std::vector<StepRows>& settings) {
    std::vector<double> ratios;
    for (const auto& [setting, all] : settings) {
        for (const TableRow& row : ran(ran(all, "fw_mean_ms", 0), "bw_only_mean_ms", 0)) {
            ratios.push_back(row.number("bw_only_mean_ms") / row.number("fw_mean_ms"));
        }
    }
    return ratios.empty()
               ? ""
               : say("Backward takes {} times as long as forward. By FLOPs it would be 2.", span_of(ratios, "%.2f"));
}
static std::string deviations_of(const std::vector<StepRows>& settings) {
    std::vector<std::string> of[2];  // the largest of each setting: small, high
    for (const auto& [setting, all] : settings) {
        std::string worst_of;
        double worst = -1;
        for (const TimedPhase& phase : timed_phases) {
            for (const TableRow& row : ran(all, phase.mean, 0)) {
                double share = row.number(phase.deviation) / row.number(phase.mean);
                if (share > worst) { worst = share, worst_of = say("{} of {}", phase.name, where(row)); }
            }
        }
        if (worst < 0) { continue; }
        of[worst > SMALL_DEVIATION].push_back(
            say("{} % of the mean in {} ({})", number(100 * worst, "%.1f"), setting, worst_of));
    }
    std::string text;
    if (!of[0].empty()) { text = say("The standard deviation is small: at most {}.", list_of(of[0])); }
    if (!of[1].empty()) {
        text +=
            say("{} high: up to {}.", text.empty() ? "The standard deviation is" : " Elsewhere it is", list_of(of[1]));
    }
    return text;
}
static Answers phase_times(const std::vector<StepRows>& settings, const std::string& at_end) {
    Answers answers;
    for (const StepRows& of : settings) {
        answers.push_back({answers.empty() ? "b" : "b, " + of.setting, times_of_setting(of)});
    }
    answers[0].text += at_end;
    std::string ratio = ratio_of_backward(settings), deviations = deviations_of(settings);
    if (!ratio.empty()) { answers.push_back({"b, ratio", ratio}); }
    if (!deviations.empty()) { answers.push_back({"b, deviation", deviations}); }
    return answers;
}

static std::string after_steps(const TableRow& row) {
    std::string n = row.text("warmup");
    return "after " + n + (n == "1" ? " warm-up step" : " warm-up steps");
}
static std::string warmup_effect(const Table& table) {
    Rows all = ran(rows_of(table), "fw_mean_ms", 0);
    if (all.empty()) { return "No forward has a time, so nothing shows what the warm-up steps change."; }
    Rows rows = ran(rows_of(table, {{"size", all[0].text("size")}}), "fw_mean_ms", 0);
    TableRow cold = smallest_of(rows, "warmup"), warm = largest_of(rows, "warmup"), enough = warm;
    double mean = warm.number("fw_mean_ms");
    std::vector<std::string> times;
    for (const TableRow& row : rows) {
        times.push_back(say("{} ms (standard deviation {} ms) {}", row.text("fw_mean_ms"), row.text("fw_std_ms"),
                            after_steps(row)));
    }
    for (size_t i = rows.size(); i-- > 0;) {  // back from the warm one, as long as nothing changes
        double now = rows[i].number("fw_mean_ms");
        if (std::abs(now / mean - 1) > 0.02 || rows[i].number("fw_std_ms") > SMALL_DEVIATION * now) { break; }
        enough = rows[i];
    }
    std::vector<double> ratios;
    for (const std::string& size : values_of(all, "size")) {
        Rows of_size = ran(rows_of(table, {{"size", size}}), "fw_mean_ms", 0);
        ratios.push_back(smallest_of(of_size, "warmup").number("fw_mean_ms") /
                         largest_of(of_size, "warmup").number("fw_mean_ms"));
    }
    double most = *std::max_element(ratios.begin(), ratios.end());
    std::string text = say("The mean time of forward ({}, {}) is {}.", where(cold), setting_of(table), list_of(times));
    if (cold.index == warm.index) { return text + " To compare, `--warmup 0,1,2,5` runs more than one number."; }
    text += say(" The mean {} is {} times the one {}{}", after_steps(cold), span_of(ratios, "%.2f"), after_steps(warm),
                ratios.size() > 1 ? " (all sizes)" : "");
    if (most < 1.05 || !(cold.number("fw_mean_ms") - mean > warm.number("fw_std_ms"))) {
        return text + ", which is no more than the times vary: this run shows no cost of the first steps.";
    }
    text += on_gpu(table)
                ? ", because the first step also loads the kernels' code, creates the cuBLAS handle and grows "
                  "the memory pool."
                : ", because the first step also touches its memory for the first time.";
    if (enough.index == cold.index) { return text; }
    if (enough.index == warm.index) {  // the last row is level with itself only
        return text + say(" No row before the one {} is level with it (within 2 %), so the times may still change: "
                          "more warm-up steps would show it.",
                          after_steps(warm));
    }
    bool graph = on_gpu(table) && table.caption.find("mode flash") != std::string::npos && enough.text("warmup") == "2";
    return text + say(" It is level (within 2 %) {}{}.", after_steps(enough),
                      graph ? ": mode flash records its CUDA graph in the second" : "");
}

static std::string share_of_peak(const Tables& tables) {  // "": of an unknown card
    TableRow best;
    for (const Table& table : tables) {
        TableRow row = largest_of(rows_of(table), "MFU %");
        if (row && ran(row, "MFU %", best ? best.number("MFU %") : 0)) { best = row; }
    }
    if (!best) { return ""; }
    return say("The largest share of the card's peak (MFU) is {} %: {} in {}, batch {}, {} TFLOP/s of {}.",
               best.text("MFU %"), best.text("size"), setting_of(*best.table), value_in(*best.table, "; batch ", ","),
               best.text("TFLOP/s"), value_in(*best.table, "MFU of ", " TFLOP/s"));
}
Answers answer_benchmarking_script(const Tables& tables) {
    std::vector<StepRows> settings;
    std::string warmup, seconds;
    auto is_sweep = [](const Table& table) { return table.columns[0] == "warmup"; };
    Tables all = tables_with(tables, {"benchmarking_script;"});
    if (all.empty()) { return {}; }
    auto accumulates = [](const Table& table) { return table.caption.find(" backward passes, ") != std::string::npos; };
    bool sweeps_only = std::all_of(all.begin(), all.end(), is_sweep);
    bool all_accumulate = std::all_of(all.begin(), all.end(), accumulates);
    for (const Table& table : all) {
        bool sweep = is_sweep(table);
        if (accumulates(table) && !all_accumulate) { continue; }  // its batch is another
        if (sweep && warmup.empty()) { warmup = warmup_effect(table); }
        if (sweep && !sweeps_only) { continue; }  // its times are one size's, and those of (c)
        std::string most = sweep ? largest_of(rows_of(table), "warmup").text("warmup") : "";
        if (table.columns[0].empty()) {
            seconds = "The answers need the table in ms: run it without `--table seconds`.";
        } else {
            settings.push_back({setting_of(table), sweep ? rows_of(table, {{"warmup", most}}) : rows_of(table)});
        }
    }
    bool eager = !tables_with(tables, {"benchmarking_script;", "mode eager"}).empty();
    std::string handouts = eager ? "" : " The handout's own model, one kernel per operation, is `--mode eager`.";
    if (warmup.empty()) {
        warmup =
            "This run had one number of warm-up steps. `--warmup 0,1,2,5` compares several, each in a fresh "
            "process.";
    }
    Answers answers = settings.empty() ? Answers{{"b", seconds}} : phase_times(settings, handouts);
    answers.back().text += scaled_down(all[0]);
    answers.push_back({"c", warmup});
    std::string share = share_of_peak(all);
    if (!share.empty()) { answers.push_back({"", share}); }
    return answers;
}

// ---------------------------------------------------------------------------------------------------------------------
// 1.1.4 nsys_profile. The answers are about one setting, fp32 and mode eager where the run has it, and, where one model
// has to stand for all, about the last whose step ran; (d) and (e) compare the other settings.

struct Profiled {
    const Table *times = nullptr, *top = nullptr, *shares = nullptr, *softmax = nullptr;  // (a), (b), (c) and (d), (e)
    const Table* overview = nullptr;  // of all models, where the run had several
    std::string setting, size, T;
    Cell of_size() const { return {"size", size}; }
    Cell of_length() const { return {"context length", T}; }
    std::string model() const { return size + " at context length " + T; }
    // The setting, and the model where it is another one than p's.
    std::string beside(const Profiled& p) const { return setting + (model() == p.model() ? "" : " (" + model() + ")"); }
};
static Profiled profile_in(const Tables& tables, const Table& times) {
    Profiled p;
    p.times = &times;
    p.setting = setting_of(times);
    std::string precision = "precision " + p.setting + ";";
    p.overview = table_with(tables, {"nsys_profile overview", precision});
    p.top = table_with(tables, {"nsys_profile (b)", precision});
    p.shares = table_with(tables, {"nsys_profile (c), (d)", precision});
    p.softmax = table_with(tables, {"nsys_profile (e)", precision});
    Rows rows = ran(rows_of(times, {{"phase", "step"}}), "untraced (ms)");
    if (rows.empty()) { rows = ran(rows_of(times, {{"phase", "forward"}}), "untraced (ms)"); }
    if (!rows.empty()) { p.size = rows.back().text("size"), p.T = rows.back().text("context length"); }
    return p;
}
static TableRow row_in(const Table* table, const Profiled& p, const std::string& phase) {
    return table ? row_of(*table, {p.of_size(), p.of_length(), {"phase", phase}}) : TableRow();
}

// Whether forward's time in the trace is its time by the clock, where the trace changes it by `column`'s percentages.
static std::string do_they_match(const Rows& rows, const std::string& column) {
    TableRow most = largest_of(rows, column);
    double low = smallest_of(rows, column).number(column), high = most.number(column);
    bool in_trace = column == "difference (%)", gpu = on_gpu(*most.table);
    std::string by =
        say("{} by {} %", in_trace ? "the trace differs" : "tracing changes the time", span(low, high, "%+.1f"));
    if (std::max(high, -low) <= 2) { return " The two match: " + by; }
    size_t within =
        std::count_if(rows.begin(), rows.end(), [&](const TableRow& row) { return std::abs(row.number(column)) <= 2; });
    if (10 * within >= 9 * rows.size()) {  // a slow pass of one setting does not decide for all
        return say(" The two match within 2 % in {} of {} settings; {} (most: {})", std::to_string(within),
                   std::to_string(rows.size()), by, where(high >= -low ? most : smallest_of(rows, column)));
    }
    if (high >= -low) {
        return say(" They do not match everywhere: {} (most: {}), because recording costs {}", by, where(most),
                   gpu ? "the CPU time at each launch" : "time, and a CPU's speed varies");
    }
    return say(" They do not match: {}{}", by,
               in_trace && gpu
                   ? "; the clock also counts the launch before the first kernel and the wait after the last"
                   : ", and as tracing cannot make a run faster, the machine's speed varies that much");
}
static std::string sums_of_kernels(const Rows& rows, const std::string& sum, const std::string& of) {
    std::vector<double> shares;
    Rows summed = ran(rows, sum, 0);
    for (const TableRow& row : summed) { shares.push_back(100 * row.number(sum) / row.number(of)); }
    if (shares.empty()) { return " No kernels were traced, so (b) to (e) have no answer."; }
    if (!on_gpu(*summed[0].table)) {
        return say(" Without a GPU there are no kernels: the clock times the operations, which sum up to {}.",
                   from_to(summed, sum, " ms"));
    }
    return say(" The kernels' own times sum up to {} % of the traced time{}.", span_of(shares, "%.0f"),
               *std::max_element(shares.begin(), shares.end()) < 100 ? "; the rest is gaps between them" : "");
}
// Which settings' steps fit, by the overview; with the largest peak where its column is there. "": of a single setting.
static std::string what_fits(const Table& overview) {
    const std::string clock = "step by the clock (ms)";
    Rows all = rows_of(overview), fit = ran(all, clock);
    if (all.size() < 2) { return ""; }
    std::string text = fit.size() == all.size() ? say("A step fits in all {} settings", std::to_string(all.size()))
                                                : say("A step fits in {} of {} settings", std::to_string(fit.size()),
                                                      std::to_string(all.size()));
    if (TableRow most = largest_of(fit, "step peak (MiB)")) {
        text += say("; its largest peak is {} GiB ({})", number(most.number("step peak (MiB)") / 1024, "%.1f"),
                    where(most));
    }
    return text + "." + out_of_memory(all, {{"forward by the clock (ms)", "forward"}, {clock, "step"}});
}
static std::string total_time(const std::vector<Profiled>& profiles, const Profiled& p) {
    const char *clock = p.overview ? "forward by the clock (ms)" : "untraced (ms)",
               *trace = p.overview ? "forward in the trace (ms)" : "traced (ms)",
               *change = p.overview ? "difference (%)" : "tracing adds (%)",
               *sum = p.overview ? "sum of its kernels (ms)" : "sum of kernels (ms)";
    auto forwards = [&](const Profiled& of) {
        if (of.overview) { return ran(rows_of(*of.overview), clock); }
        return ran(rows_of(*of.times, {{"phase", "forward"}}), clock);
    };
    Rows all = forwards(p), rows = ran(all, change);
    std::string memory = p.overview ? "" : out_of_memory(rows_of(*p.times), {{clock, ""}});
    if (all.empty()) { return "No forward has a time." + memory; }
    std::string text = say("In {}, forward takes {} by the clock", p.setting, from_to(all, clock, " ms"));
    if (rows.empty()) { return text + "." + sums_of_kernels(rows, sum, trace) + memory + scaled_down(*p.times); }
    text += say(", and {} {}.", from_to(rows, trace, " ms"), p.overview ? "in the trace" : "while it is traced");
    std::vector<std::string> others;
    std::set<std::string> named = {p.setting};  // a page may show one setting for several sizes: the first counts
    for (const Profiled& other : profiles) {
        TableRow row = largest_of(forwards(other), change);
        if (row && named.insert(other.setting).second) {
            others.push_back(say("{} % in {}", strprintf("%.1f", std::fabs(row.number(change))), other.setting));
        }
    }
    return text + do_they_match(rows, change) +
           (others.empty() ? "." : "; in other settings by at most " + list_of(others) + ".") +
           sums_of_kernels(rows, sum, trace) + memory + scaled_down(*p.times);
}

// What the launches of forward's first kernel say about which product it is. w1 and w3 are the only two products of one
// shape in a layer of mode eager: q, k, v and output are four, w2, scores and values have a shape of their own.
static std::string launches_say(const Tables& tables, const Profiled& p, const TableRow& forward) {
    auto model = std::find_if(model_sizes.begin(), model_sizes.end(), [&](auto& c) { return c.name == p.size; });
    double launches = forward.number("launches per pass");
    if (model == model_sizes.end() || std::isnan(launches)) { return ""; }
    int n = (int)launches, L = model->num_layers;
    if (n < L || n % L > 1) { return ""; }
    std::string text = say(" That is {} per layer{}", std::to_string(n / L), n % L ? " and one more" : "");
    const Table* summary = table_with(tables, {"kernel summary: " + p.size + ", context length " + p.T + ",",
                                               "range forward,", "precision " + p.setting + ";"});
    TableRow row = summary ? row_of(*summary, {{"Name", forward.text("kernel")}}) : TableRow();
    std::string min = row.text("Min"), max = row.text("Max");
    bool alike = row && row.number("Max") < 1.1 * row.number("Min") &&
                 min.substr(min.find(' ') + 1) == max.substr(max.find(' ') + 1);
    bool eager = p.setting.find("mode eager") != std::string::npos;
    if (n == 2 * L && alike && eager && forward.text("class") == "matmul") {
        text += say(", of {} to {} each: SwiGLU's w1 and w3, a layer's only pair of products of one shape", min, max);
    }
    return text;
}
static std::string class_name(const TableRow& row) {
    std::string name = row.text("class");
    if (name != "matmul") { return name == "elementwise" ? "an elementwise kernel" : "class " + name; }
    if (!on_gpu(*row.table)) { return "a matrix product"; }
    return std::string("a matrix product on ") +
           (row.text("tensor cores") == "yes" ? "tensor cores" : "the CUDA cores");
}
// In how many of the profiled settings of size and context length forward has a matrix product as forward's first
// kernel, too; "" for a single model.
static std::string models_alike(const Profiled& p) {
    int all = 0, matmul = 0;
    std::string name = p.overview ? "top kernel of forward" : "kernel";
    for (const TableRow& row : p.overview ? rows_of(*p.overview) : rows_of(*p.top, {{"phase", "forward"}})) {
        all += ran(row, "Time (%)");
        matmul += ran(row, "Time (%)") && std::string(kernel_class(row.text(name)).name) == "matmul";
    }
    return all > 1 ? say("; forward's first is a matrix product in {} of {} settings", std::to_string(matmul),
                         std::to_string(all))
                   : "";
}
static std::string top_kernel(const Tables& tables, const Profiled& p) {
    TableRow forward = row_in(p.top, p, "forward"), both = row_in(p.top, p, "forward+backward");
    if (!ran(forward, "Time (%)")) { return "No kernels of a forward were traced."; }
    std::string kernel = on_gpu(*p.top) ? "kernel" : "operation";
    std::string text =
        say("In forward of {} ({}) the {} with the most time is {}, {}: {} % of forward's time, launched {} times per "
            "forward.",
            p.model(), p.setting, kernel, forward.text("kernel"), class_name(forward), forward.text("Time (%)"),
            forward.text("launches per pass"));
    std::string launches = launches_say(tables, p, forward), range = forward.text("runs in");
    if (range.find("launches") != std::string::npos) {  // "ffn/matmul (91.9 %, 64 launches), ..."
        launches += say("{} {}", launches.empty() ? " They are in" : ":", range);
    } else if (!range.empty()) {  // of an older table: the first range alone
        launches += say("{} of its time is in the range {}", launches.empty() ? " Most" : "; most", range);
    }
    text += launches.empty() ? "" : launches + ".";
    bool same = both.text("the forward's, too") == "yes";
    bool products = forward.text("class") == "matmul" && both.text("class") == "matmul" && on_gpu(*p.top);
    if (!ran(both, "Time (%)")) {
        text += " Forward and backward together did not run (out of memory)";
    } else if (same) {
        text += say(" With backward it is the same one ({} %, {} launches per pass)", both.text("Time (%)"),
                    both.text("launches per pass"));
    } else {
        text +=
            say(" With backward it is another one, {}, {} ({} %, {} launches per pass){}", both.text("kernel"),
                class_name(both), both.text("Time (%)"), both.text("launches per pass"),
                products ? ": backward's products have other operands transposed, so other kernels compute them" : "");
    }
    return text + models_alike(p) + ".";
}

static std::string other_kernels(const Tables& tables, const Profiled& p) {
    const Table* table =
        table_with(tables, {"nsys_profile (c): what is not", "forward of " + p.size + ", context length " + p.T + ";",
                            "precision " + p.setting + ";"});
    TableRow shares = row_in(p.shares, p, "forward");
    if (!table || table->rows.empty() || !ran(shares, "all (ms)")) { return "No kernels of a forward were traced."; }
    std::vector<std::string> parts, classes;
    for (const TableRow& row : rows_of(*table)) {
        if (row.number("Time (%)") < 1 && !parts.empty()) { break; }  // they are sorted
        parts.push_back(say("{} {} %", row.text("part of the model"), row.text("Time (%)")));
    }
    for (const std::string& column : p.shares->columns) {
        bool is_class = column != "matmul" && column != "size" && column != "context length" && column != "phase" &&
                        column != "all (ms)" && column != "on tensor cores";
        if (is_class && shares.number(column) >= 1) { classes.push_back(say("{} {} %", column, shares.text(column))); }
    }
    std::string text =
        say("Matrix products take {} % of forward's time ({}, {}). The other parts of the model that take "
            "most are {}.",
            ran(shares, "matmul") ? shares.text("matmul") : "0.0", p.model(), p.setting, list_of(parts));
    if (on_gpu(*table) && !classes.empty()) { text += " By kind of kernel: " + list_of(classes) + "."; }
    return text;
}

static std::string change_of(double from, double to) {  // "falls from 82.6 to 70.7 %"
    std::string a = number(from, "%.1f"), b = number(to, "%.1f");
    return a == b ? say("stays at {} %", a) : say("{} from {} to {} %", to < from ? "falls" : "rises", a, b);
}
// A sentence per setting other than p's; one for all of them, if they are more than an answer takes.
static void add_other_settings(Answers& answers, const std::string& part, const std::vector<std::string>& others) {
    if (others.empty()) { return; }
    answers.push_back({part + ", other settings", join(others, others.size() > 3 ? "; " : ". ") + "."});
}
static Answers step_shares(const std::vector<Profiled>& profiles, const Profiled& p) {
    TableRow forward = row_in(p.shares, p, "forward"), step = row_in(p.shares, p, "step"),
             optimizer = row_in(p.shares, p, "step: optimizer");
    if (!ran(forward, "matmul") || !ran(step, "matmul") || !ran(step, "all (ms)", 0)) {
        return {
            {"d", "There is no trace of a whole step to compare with forward (out of memory, or nothing was traced)." +
                      (p.shares ? out_of_memory(rows_of(*p.shares), {{"all (ms)", ""}}) : "")}};
    }
    std::string grows, text = say("From forward to a whole step with AdamW the share of matrix products {} ({}, {}).",
                                  change_of(forward.number("matmul"), step.number("matmul")), p.model(), p.setting);
    int all = 0, falls = 0;
    for (const TableRow& row : ran(rows_of(*p.shares, {{"phase", "step"}}), "matmul")) {
        TableRow before =
            row_of(*p.shares,
                   {{"size", row.text("size")}, {"context length", row.text("context length")}, {"phase", "forward"}});
        all++, falls += row.number("matmul") < before.number("matmul");
    }
    if (all > 1) {
        text += say(" It falls in {} of {} settings of size and context length.", std::to_string(falls),
                    std::to_string(all));
    }
    std::vector<std::string> others;
    for (const Profiled& other : profiles) {
        TableRow a = row_in(other.shares, other, "forward"), b = row_in(other.shares, other, "step");
        if (other.setting == p.setting || !ran(a, "matmul") || !ran(b, "matmul")) { continue; }
        others.push_back(say("In {} the share {}", other.beside(p), change_of(a.number("matmul"), b.number("matmul"))));
    }
    double most = 0;
    for (size_t i = 5; i < p.shares->columns.size(); i++) {  // the classes come after "on tensor cores"
        const std::string& column = p.shares->columns[i];
        double growth = step.number(column) - forward.number(column);
        if (growth > most && column != "matmul") { most = growth, grows = column; }
    }
    if (!grows.empty()) {
        text += say(" The class that grows most is {}, from {} to {} %.", grows, forward.text(grows), step.text(grows));
    }
    Answers answers = {{"d", text}};
    if (ran(optimizer, "all (ms)")) {
        answers.push_back(
            {"d, AdamW",
             say("AdamW has no products and takes {} of the step's {} ms ({} %).", optimizer.text("all (ms)"),
                 step.text("all (ms)"), number(100 * optimizer.number("all (ms)") / step.number("all (ms)"), "%.1f"))});
    }
    add_other_settings(answers, "d", others);
    return answers;
}

static double softmax_to_products(const TableRow& row) {  // of the times; NaN: they are one kernel, or did not run
    return ran(row, "softmax (ms)", 0) && ran(row, "products (ms)", 0)
               ? row.number("softmax (ms)") / row.number("products (ms)")
               : NAN;
}
static Answers softmax_and_products(const std::vector<Profiled>& profiles, const Profiled& p) {
    TableRow row = p.softmax ? row_of(*p.softmax, {p.of_size(), p.of_length()}) : TableRow();
    if (!ran(row, "products (ms)", 0)) { return {{"e", "No attention of a forward was traced."}}; }
    double times = softmax_to_products(row);
    std::string flops = row.text("ratio of FLOPs (5 : 4 D)");  // "1 : 51.2"
    std::string counts = say("In FLOPs they are {} ({} and {} GFLOP; 5 : 4 D per entry of S)", flops,
                             row.text("softmax (GFLOP)"), row.text("products (GFLOP)"));
    if (std::isnan(times)) {
        return {{"e", say("In {} ({}) softmax and both products are one kernel of {} ms per forward, so the trace "
                          "cannot tell their times apart. That of mode eager can. {}.",
                          p.setting, p.model(), row.text("products (ms)"), counts)}};
    }
    std::vector<std::string> lengths, others;
    for (const TableRow& other : rows_of(*p.softmax, {p.of_size()})) {
        if (std::isnan(softmax_to_products(other))) { continue; }
        lengths.push_back(say("{} at {}", number(softmax_to_products(other), "%.2f"), other.text("context length")));
    }
    for (const Profiled& other : profiles) {
        TableRow o = other.softmax ? row_of(*other.softmax, {other.of_size(), other.of_length()}) : TableRow();
        if (other.setting == p.setting || !ran(o, "products (ms)", 0)) { continue; }
        others.push_back(std::isnan(softmax_to_products(o))
                             ? say("In {} both are one kernel of {} ms", other.beside(p), o.text("products (ms)"))
                             : say("In {} softmax takes {} times as long as the products", other.beside(p),
                                   number(softmax_to_products(o), "%.2f")));
    }
    double per_flop = times * strtod(flops.substr(flops.find(':') + 1).c_str(), nullptr);
    std::string text =
        say("In {} ({}) softmax takes {} ms per forward, {} times as long as attention's two products ({} ms).",
            p.setting, p.model(), row.text("softmax (ms)"), number(times, "%.2f"), row.text("products (ms)"));
    if (lengths.size() > 1) { text += say(" By context length the factor is {}.", list_of(lengths)); }
    std::string by_flops = say("{}. So a FLOP of softmax takes {} times as long.", counts, number(per_flop, "%.1f"));
    if (on_gpu(*p.softmax) && per_flop > 2) {
        by_flops += say(" Bytes explain it: even at best softmax moves {} MiB and the products {} MiB.",
                        row.text("softmax (MiB, at least)"), row.text("products (MiB, at least)"));
    }
    Answers answers = {{"e", text}, {"e, FLOPs", by_flops}};
    add_other_settings(answers, "e", others);
    return answers;
}

Answers answer_nsys_profile(const Tables& tables) {
    Tables times = tables_with(tables, {"nsys_profile (a)"});
    std::vector<Profiled> profiles;
    for (const Table& table : times) { profiles.push_back(profile_in(tables, table)); }
    if (profiles.empty()) { return {}; }
    auto main = std::find_if(profiles.begin(), profiles.end(), [](auto& p) { return p.setting == "fp32, mode eager"; });
    const Profiled& p = main == profiles.end() ? profiles[0] : *main;
    Answers answers = {{"a", total_time(profiles, p)}};
    std::string fits = p.overview ? what_fits(*p.overview) : "";
    if (!fits.empty()) { answers.push_back({"a, memory", fits}); }
    if (!p.top) { return answers; }
    answers.push_back({"b", top_kernel(tables, p)});
    answers.push_back({"c", other_kernels(tables, p)});
    for (const Answers& more : {step_shares(profiles, p), softmax_and_products(profiles, p)}) {
        answers.insert(answers.end(), more.begin(), more.end());
    }
    return answers;
}

// ---------------------------------------------------------------------------------------------------------------------
// 1.1.5 benchmarking_mixed_precision

static std::string dtypes_seen(const Tables& tables) {
    const Table *half = table_with(tables, {"autocast to float16"}),
                *bf16 = table_with(tables, {"autocast to bfloat16"});
    if (!half) { return "The run printed no dtypes under autocast to float16."; }
    std::vector<std::string> seen, differ;
    for (const TableRow& row : rows_of(*half)) {
        std::string component = row.text("component"), dtype = row.text("dtype");
        std::string wanted = dtype == "float16" ? "bfloat16" : dtype;
        std::string other = bf16 ? row_of(*bf16, {{"component", component}}).text("dtype") : wanted;
        if (!other.empty() && other != wanted) { differ.push_back(component + " (" + other + ")"); }
        bool one_of_many = component.find("weight") != std::string::npos || component.find("bias") != std::string::npos;
        if (!one_of_many) { seen.push_back(component + ": " + dtype); }  // else "model parameters" has it
    }
    if (seen.empty()) { return "The table of dtypes under autocast to float16 is empty."; }
    std::string text = "Under autocast to float16: " + list_of(seen) + ".";
    if (!bf16) { return text; }
    return text + (differ.empty() ? " With bfloat16 everything is the same, with bfloat16 in float16's place."
                                  : " With bfloat16 these differ: " + list_of(differ) + ".");
}
static std::string layer_norm(const Tables& tables) {
    auto dtype = [&](const char* format) {
        const Table* table = table_with(tables, {std::string("autocast to ") + format});
        TableRow row = table ? row_of(*table, {{"component", "output of the layer norm"}}) : TableRow();
        return row.text("dtype");
    };
    std::string text =
        "Layer norm's mean and variance are sums, of numbers and of squares: in fp16 a square overflows from 256 on "
        "(256 x 256 = 65536, the largest number is 65504), and a small variance vanishes. bf16 has fp32's range, so "
        "it takes that danger away, but with 8 significant bits a long sum still loses its small terms.";
    std::string half = dtype("float16"), bf16 = dtype("bfloat16");
    if (half.empty() || bf16.empty()) { return text; }
    return text + say(" So autocast treats layer norm {}: its output is {} under float16 and {} under bfloat16.",
                      half == bf16 ? "alike" : "differently", half, bf16);
}
// How many times as fast as in the first precision, by size.
struct Speedups {
    std::vector<double> forward, backward, both;
    std::vector<std::string> sizes;
};
static Speedups speedups_of(const Table& table, const std::string& from, const std::string& to) {
    Speedups s;
    for (const TableRow& b : ran(rows_of(table, {{"precision", to}}), "fwbw_mean_ms", 0)) {
        TableRow a = row_of(table, {{"size", b.text("size")}, {"precision", from}});
        if (!ran(a, "fwbw_mean_ms")) { continue; }  // the row's speedup is then one over another precision
        s.sizes.push_back(b.text("size"));
        s.forward.push_back(a.number("fw_mean_ms") / b.number("fw_mean_ms"));
        s.backward.push_back(a.number("bw_only_mean_ms") / b.number("bw_only_mean_ms"));
        s.both.push_back(b.number("fwbw speedup"));
    }
    return s;
}
static std::string trend_of(const Speedups& s, const std::string& from, const std::string& to) {
    if (s.sizes.empty()) { return say(" No size ran in both {} and {}.", from, to); }
    std::string text = say(" {} is {} times as fast as {} in forward and {} times in backward", to,
                           span_of(s.forward, "%.2f"), from, span_of(s.backward, "%.2f"));
    if (s.sizes.size() == 1) { return text + " (one size, so this shows no trend)."; }
    size_t best = std::max_element(s.both.begin(), s.both.end()) - s.both.begin();
    text += say("; in both together {} times ({}) to {} times ({})", number(s.both.front(), "%.2f"), s.sizes.front(),
                number(s.both.back(), "%.2f"), s.sizes.back());
    if (std::is_sorted(s.both.begin(), s.both.end())) {
        return text + ": the larger the model, the larger the factor.";
    }
    if (std::is_sorted(s.both.rbegin(), s.both.rend())) {
        return text + ": the larger the model, the smaller the factor.";
    }
    return text + say(", and most at {} ({} times): the factor does not grow with each size.", s.sizes[best],
                      number(s.both[best], "%.2f"));
}
static std::string low_precision_times(const Table& table) {
    Rows all = rows_of(table), rows = ran(all, "fwbw_mean_ms", 0);
    std::string memory = out_of_memory(all, {{"fw_mean_ms", "forward"}, {"bw_only_mean_ms", "backward"}});
    if (rows.empty()) { return "No size has a time." + memory; }
    std::string size = rows.back().text("size");
    std::vector<std::string> times, precisions = values_of(all, "precision");
    for (const TableRow& row : ran(rows_of(table, {{"size", size}}), "fwbw_mean_ms")) {
        times.push_back(
            say("{} and {} ms in {}", row.text("fw_mean_ms"), row.text("bw_only_mean_ms"), row.text("precision")));
    }
    std::string text =
        say("Forward and backward of {} take {} (mode {}).", size, list_of(times), value_in(table, "mode ", ";"));
    if (precisions.size() == 1) {
        text += " This run had one precision, so there is nothing to compare it with.";
    } else {
        bool has_bf16 = std::find(precisions.begin(), precisions.end(), "bf16") != precisions.end();
        const std::string &from = precisions[0], &to = has_bf16 && from != "bf16" ? "bf16" : precisions.back();
        Speedups s = speedups_of(table, from, to);
        text += trend_of(s, from, to);
        if (on_gpu(table) && !s.both.empty() && s.both.back() > std::max(1.0, s.both.front())) {
            text += " In larger models products take more of the time, and products are what tensor cores make faster.";
        }
    }
    if (!on_gpu(table)) {
        text +=
            " On a CPU low precision saves no arithmetic: operands are rounded or widened, and products run in "
            "fp32.";
    }
    return text + memory + scaled_down(table);
}

Answers answer_benchmarking_mixed_precision(const Tables& tables) {
    const Table* table = table_with(tables, {"benchmarking_mixed_precision (c)"});
    if (!table) { return {}; }
    return {{"a", dtypes_seen(tables)}, {"b", layer_norm(tables)}, {"c", low_precision_times(*table)}};
}

// ---------------------------------------------------------------------------------------------------------------------
// 1.1.6 memory_profiling. Where one model has to stand for all, it is the first of the table.

// At which moment of a step the peak is, from the gradients that are there.
static std::string moment_of(const TableRow& row, const std::string& mode) {
    double whole = row.number("parameters"), gradients = row.number("gradients");
    bool halved = mode != "eager" && row.text("precision") != "fp32" && row.text("precision") != "tf32";
    return gradients >= (halved ? 0.49 : 0.995) * whole ? "after backward, when all gradients are there"
           : gradients <= 0.05 * whole                  ? "just after the loss, when all activations are there"
                                                        : "in backward, when a part of the gradients is there";
}
// Where memory is highest. Older tables lack the column.
static std::string ranges_at_peak(const Rows& rows) {
    std::string ranges = list_of(values_of(rows, "range at the peak"));
    return ranges.empty() ? "" : " (in " + ranges + ")";
}
static std::string timelines(const Table& categories) {
    Rows all = ran(rows_of(categories), "parameters", 0), same;
    if (all.empty()) { return "Nothing ran, so there is no timeline."; }
    std::string size = all[0].text("size"), precision = all[0].text("precision"),
                mode = value_in(categories, "mode ", ",");
    auto rows = [&](const char* phase) {
        return ran(rows_of(categories, {{"size", size}, {"precision", precision}, {"phase", phase}}), "parameters", 0);
    };
    Rows forward = rows("forward"), step = rows("step");
    bool copies = largest_of(forward, "weight copies").number("weight copies") > 0;
    std::string text =
        say("The forward pass ({}, {}, mode {}) keeps nothing for backward: above the weights ({} MiB{}), its timeline "
            "has one peak per layer, all equal: {} MiB of activations at context length {}{}.",
            size, precision, mode, all[0].text("parameters"), copies ? ", and their growing 16-bit copies" : "",
            cells_of(forward, "activations"), cells_of(forward, "context length"), ranges_at_peak(forward));
    text +=
        " In a step the stages can be told apart: activations climb in forward and come down layer by layer in "
        "backward, while the gradients grow; the optimizer is flat.";
    std::vector<std::string> moments;
    for (const TableRow& row : step) { moments.push_back(moment_of(row, mode)); }
    for (size_t i = 0; i < step.size(); i++) {
        same.push_back(step[i]);
        if (i + 1 < step.size() && moments[i + 1] == moments[i]) { continue; }
        bool first = same.size() == i + 1;
        text += say(first ? " At context length {} the step's peak is {}{}" : ", and at context length {} it is {}{}",
                    cells_of(same, "context length"), moments[i], ranges_at_peak(same));
        same.clear();
    }
    return text + (step.empty() ? " No step ran." : ".");
}

// What a tape costs a forward, from rows of one model and precision; "" where the table does not say it.
static std::string cost_of_tape(const Rows& rows) {
    Rows both;
    std::vector<double> costs;
    for (const TableRow& row : rows) {
        double without = row.number("forward peak MiB"), with = row.number("forward with tape peak MiB");
        if (without > 0 && with > 0) { both.push_back(row), costs.push_back(with - without); }
    }
    if (both.empty()) { return ""; }
    bool adds = *std::min_element(costs.begin(), costs.end()) >= 0;
    std::vector<std::string> texts;
    for (double cost : costs) { texts.push_back(number(cost, adds ? "%.1f" : "%+.1f")); }
    return say("; a forward that keeps its tape for a backward {}, so the tape {} {} MiB",
               cells_of(both, "forward with tape peak MiB"), adds ? "adds" : "changes it by", list_of(texts)) +
           (both.size() < rows.size() ? " (context length " + cells_of(both, "context length") + ")" : "");
}
// Of the first size and precision, and what a run of another kind adds.
static std::string peaks_of(const Tables& tables, const Table& categories) {
    std::string text;
    std::vector<std::string> as_predicted, otherwise;
    std::string longest;
    double largest = NAN;  // MiB of a step, at this context length
    const Table* first = table_with(tables, {"memory_profiling (b)"});
    std::string mode = "mode " + value_in(*first, "mode ", ",") + ",";  // a page may show several
    for (const Table& table : tables_with(tables, {"memory_profiling (b)", mode})) {
        std::string precision = value_in(table, "precision ", ";");
        if (table.caption.find("really run") != std::string::npos) {
            bool same = true;
            for (const TableRow& row : rows_of(table)) {
                same = same && row.text("forward peak MiB") == row.text("forward predicted MiB") &&
                       row.text("full step peak MiB") == row.text("full step predicted MiB");
            }
            (same ? as_predicted : otherwise).push_back(precision);
            continue;
        }
        Rows all = rows_of(table);
        if (!text.empty() || all.empty()) { continue; }
        std::string size = all[0].text("size");
        Rows rows = rows_of(table, {{"size", size}});
        text = say("{} in {} at context length {}, in MiB: forward {}{}; a full step {}. ", size, precision,
                   cells_of(rows, "context length"), cells_of(rows, "forward peak MiB"), cost_of_tape(rows),
                   cells_of(rows, "full step peak MiB"));
        largest = largest_of(rows, "full step peak MiB").number("full step peak MiB");
        longest = largest_of(rows, "full step peak MiB").text("context length");
    }
    TableRow fp32 = row_of(categories, {{"precision", "fp32"}, {"phase", "step"}});
    if (ran(fp32, "parameters")) {
        text += say("Weights, gradients and AdamW's two moments take 4 x {} = {} MiB at any length ({}, fp32). ",
                    fp32.text("parameters"), number(4 * fp32.number("parameters"), "%.5g"), fp32.text("size"));
    }
    if (first->caption.find("predicted: ") != std::string::npos) {
        text += "Without a GPU these are predictions: each allocation was counted, nothing was computed";
        if (!as_predicted.empty() || !otherwise.empty()) {
            text += ", and the peaks of a tiny model that really ran are ";
            if (!as_predicted.empty()) { text += "as predicted in " + list_of(as_predicted); }
            if (!otherwise.empty()) {
                text += (as_predicted.empty() ? "" : ", but ") + ("not as predicted in " + list_of(otherwise));
            }
        }
        double bytes = largest * 1048576, h200 = 141e9;
        text += bytes > h200 ? say("; a step at context length {} takes {} GiB, more than an H200's 141 GB. ", longest,
                                   number(bytes / (1 << 30), "%.1f"))
                             : ". ";
    }
    return (text.empty() ? "No peak was recorded." : text.substr(0, text.size() - 1)) + scaled_down(*first);
}

// Of one table of differences: what one precision adds to another, for the first size.
static std::string difference(const Table& table, const Table& categories) {
    std::string to = value_in(table, "what ", " adds"), from = value_in(table, "adds to ", "'s peak");
    Rows all = ran(rows_of(table), "all");
    std::string size = all.empty() ? "" : all[0].text("size"), phases, copies = "of it weight copies";
    Rows both;  // the rows that the answer is about
    for (const char* phase : {"forward", "step"}) {
        std::vector<std::string> lengths, peaks, shares;
        for (const TableRow& row : ran(rows_of(table, {{"size", size}, {"phase", phase}}), "all")) {
            auto peak = [&](const std::string& precision) {
                return row_of(categories, {{"size", size},
                                           {"context length", row.text("context length")},
                                           {"phase", phase},
                                           {"precision", precision}});
            };
            if (!ran(peak(from), "all", 0) || !ran(peak(to), "all", 0)) { continue; }
            lengths.push_back(row.text("context length")), peaks.push_back(peak(to).text("all"));
            shares.push_back(number(100 * row.number("all") / peak(from).number("all"), "%+.1f"));
            both.push_back(row);
        }
        if (!lengths.empty()) {
            phases += say("{} a {} at context length {} takes {} MiB ({} %)", phases.empty() ? "" : ", and", phase,
                          list_of(lengths), list_of(peaks), list_of(shares));
        }
    }
    if (both.empty()) { return say("Nothing ran in both {} and {}.", from, to); }
    bool more = smallest_of(both, "all").number("all") > 0, less = largest_of(both, "all").number("all") < 0;
    std::string text = say("{} takes {} than {} ({}):{}.", to,
                           more   ? "more memory"
                           : less ? "less memory"
                                  : "in some rows more memory, in others not more",
                           from, size, phases);
    TableRow most = largest_of(both, copies);
    bool eager = categories.caption.find("mode eager") != std::string::npos;
    text += ran(most, copies, 0)
                ? say(" {} a 16-bit copy of each matrix that a product reads: {} MiB (2 bytes per weight: {}).",
                      eager ? "Autocast leaves weights, gradients and moments in fp32, and keeps" : "This mode keeps",
                      most.text(copies), most.text("2 bytes per matmul weight"))
                : " This mode keeps no 16-bit copies of weights beside the fp32 ones.";
    Rows last;  // of the last phase, by context length
    std::copy_if(both.begin(), both.end(), std::back_inserter(last),
                 [&](const TableRow& row) { return row.text("phase") == both.back().text("phase"); });
    std::vector<std::string> activations, rest;
    bool any = false;
    for (const TableRow& row : last) {
        activations.push_back(number(row.number("activations"), "%+.1f"));
        rest.push_back(number(row.number("the rest"), "%+.1f"));
        any = any || row.number("the rest") != 0;
    }
    return text + say(" At the peak of a {} the activations change by {} MiB{}.", both.back().text("phase"),
                      list_of(activations), any ? say(", and the rest by {}", list_of(rest)) : "");
}

static std::string residual_stream(const Table& table) {
    Rows all = ran(rows_of(table), "B*T*C*4", 0);
    if (all.empty()) { return "No forward ran, so no tensor was seen."; }
    Rows rows =
        ran(rows_of(table, {{"size", all[0].text("size")}, {"precision", all[0].text("precision")}}), "B*T*C*4", 0);
    std::string B = value_in(table, "batch ", ":");
    const TableRow& last = rows.back();
    double bytes = last.number("B*T*C*4"), sequence = bytes / strtod(B.c_str(), nullptr);
    std::string text =
        say("One tensor has batch x context length x d_model numbers of 4 bytes: {} x {} x {} x 4 = {} bytes, "
            "divided by 1024^2 = {} MiB ({}; a single sequence has {} MiB).",
            B, last.text("context length"), number(sequence / 4 / last.number("context length"), "%.0f"),
            last.text("B*T*C*4"), last.text("MiB"), last.text("size"), number(sequence / 1048576, "%.2f"));
    if (rows.size() > 1) {
        text += say(" At context length {} it is {} MiB.", cells_of(rows, "context length"), cells_of(rows, "MiB"));
    }
    bool equal = std::all_of(all.begin(), all.end(),
                             [](auto& row) { return row.text("B*T*C*4") == row.text("allocated bytes"); });
    return text + say(equal ? " The run allocated exactly that for the embedding's output, in {}."
                            : " But the run allocated another number of bytes for the embedding's output, in {}.",
                      list_of(values_of(all, "precision")));
}

// What these arrays are; "": none of forward's largest.
static std::string array_of(const TableRow& row) {
    std::string range = row.text("range");
    auto in = [&](const char* part) { return range.find(part) != std::string::npos; };
    return row.text("category") == "weight copies" ? " (16-bit copies of matrices)"
           : in("attention/scores") || in("attention/mask") || in("attention/softmax")
               ? " (attention's scores: batch x heads x length^2 numbers)"
           : in("layer/ffn") ? " (the feed-forward block: batch x length x d_ff numbers)"
           : in("lm_head")   ? " (the logits: batch x length x vocabulary numbers)"
                             : "";
}
static std::string largest_allocations(const Rows& rows) {
    Rows own;  // not what was held before the pass began
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(own),
                 [](const TableRow& row) { return row.text("range") != "held"; });
    TableRow first = largest_of(own, "MiB each");
    if (!first) { return "the table lists none of the pass itself"; }
    std::vector<std::string> places;
    for (const std::string& range : values_of(own, "range")) {
        std::vector<std::string> ops;
        for (const TableRow& row : own) {
            bool wanted = row.text("range") == range && row.text("MiB each") == first.text("MiB each");
            if (!wanted) { continue; }
            std::string times = row.text("times");
            ops.push_back((ops.empty() ? counted(times, "array") : times) + " by " + row.text("op"));
        }
        if (!ops.empty()) { places.push_back(list_of(ops) + " in " + range); }
    }
    std::string text = first.text("MiB each") + " MiB each" + array_of(first) + ": ";
    for (size_t i = 0; i < places.size(); i++) { text += (i ? "; " : "") + places[i]; }
    return text;
}
// Of the first size and precision, at the longest and the shortest context length.
static std::string largest_of_forward(const Table& table) {
    Rows all = rows_of(table);
    if (all.empty()) { return "No forward ran, so nothing was allocated."; }
    std::string size = all[0].text("size"), precision = all[0].text("precision"), text;
    std::vector<std::string> lengths =
        values_of(rows_of(table, {{"size", size}, {"precision", precision}}), "context length");
    std::vector<std::string> asked = {lengths.back()};
    if (lengths.size() > 1) { asked.push_back(lengths.front()); }
    for (const std::string& T : asked) {
        Rows rows = rows_of(table, {{"size", size}, {"precision", precision}, {"context length", T}});
        text += say("{}{} in {} at context length {}: {}.", text.empty() ? "" : " ", size, precision, T,
                    largest_allocations(rows));
    }
    TableRow held =
        largest_of(rows_of(table, {{"size", size}, {"range", "held"}, {"category", "parameters"}}), "MiB each");
    return text + (held ? say(" The weights ({} MiB) were there before the pass began.", held.text("MiB each")) : "");
}

static std::string bytes_of(const TableRow& row, const std::string& column) {  // "6,817,906,688"
    return with_commas(row.number(column));
}
// Of the first model, at its longest context length.
static std::string saved_by_block(const Table& operations, const Table& blocks) {
    Rows all = ran(rows_of(blocks), "saved", 0), same;
    if (all.empty()) { return "No block ran."; }
    for (const TableRow& row : all) {
        if (row.text("size") != all[0].text("size")) { continue; }
        if (!same.empty() && row.number("context length") > same[0].number("context length")) { same.clear(); }
        if (same.empty() || row.number("context length") == same[0].number("context length")) { same.push_back(row); }
    }
    const TableRow& first = same[0];
    std::vector<std::string> saved, largest;
    for (const TableRow& row : same) {
        bool as_predicted = row.text("saved") == row.text("predicted");
        saved.push_back(say("{} bytes in {}{}", bytes_of(row, "saved"), row.text("precision"),
                            as_predicted ? "" : " (predicted: " + bytes_of(row, "predicted") + ")"));
    }
    double sum = 0;  // bytes: rounded percentages can add up to more than 100
    std::vector<Cell> setting;
    for (const char* column : {"size", "context length", "precision"}) {
        setting.push_back({column, first.text(column)});
    }
    for (const TableRow& row : ran(rows_of(operations, setting), "bytes", 0)) {
        if (row.text("op") == "the rest") { continue; }
        largest.push_back(
            say("{} in {} {} ({} %)", row.text("op"), row.text("range"), bytes_of(row, "bytes"), row.text("%")));
        sum += row.number("bytes");
    }
    const char* gradients = "gradients: change + saved - copies";
    std::string formula = bytes_of(first, "by formula");
    double change = first.number("change");
    bool planned = blocks.caption.find("predicted: ") != std::string::npos;
    return say("One block ({}, mode {}{}) saves for backward {}.", where(first),
               value_in(operations, "mode ", ", batch"), planned ? "; predicted" : "", list_of(saved)) +
           (largest.empty() ? ""
                            : say(" In {} the {} operations that save most have {} % of it: {}.",
                                  first.text("precision"), std::to_string(largest.size()),
                                  number(100 * sum / first.number("saved"), "%.1f"), list_of(largest))) +
           say(" Backward over this block frees {} bytes, but memory {} by {}: the rest is its parameters' gradients, "
               "{} bytes{}, beside {} of its input's gradient.",
               with_commas(first.number("saved") - first.number("of it weight copies")), change < 0 ? "falls" : "grows",
               with_commas(std::abs(change)), bytes_of(first, gradients),
               first.text(gradients) == first.text("by formula") ? ", as the formula has it"
                                                                 : " (by the formula " + formula + ")",
               bytes_of(first, "input's gradient"));
}

Answers answer_memory_profiling(const Tables& tables) {
    const Table *peaks = table_with(tables, {"memory_profiling (b)"}),
                *categories = table_with(tables, {"memory_profiling (c): MiB by category"}),
                *residual = table_with(tables, {"memory_profiling (d)"}),
                *largest = table_with(tables, {"memory_profiling (e)"}),
                *operations = table_with(tables, {"memory_profiling (f): what"}),
                *blocks = table_with(tables, {"memory_profiling (f): memory"});
    if (!peaks || !categories || !residual || !largest) { return {}; }
    Answers answers = {{"a", timelines(*categories)}, {"b", peaks_of(tables, *categories)}};
    Tables added = tables_with(tables, {"memory_profiling (c): what"});
    for (const Table& table : added) {
        std::string which = added.size() > 1 ? ", " + value_in(table, "what ", " adds") : "";
        answers.push_back({"c" + which, difference(table, *categories)});
    }
    if (added.empty()) {
        answers.push_back({"c", "This run had one precision; `--precision fp32,bf16` compares two."});
    }
    answers.push_back({"d", residual_stream(*residual)});
    answers.push_back({"e", largest_of_forward(*largest)});
    if (operations && blocks) {
        answers.push_back({"f", saved_by_block(*operations, *blocks)});
    } else if (peaks->caption.find(", checkpoint ") != std::string::npos) {
        answers.push_back(
            {"f", "Left out: (f) needs a run without `--checkpoint`, because a checkpoint keeps only its input."});
    }
    return answers;
}
