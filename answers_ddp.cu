// answers_ddp.cu: the answers to sections 2.1 to 2.3 and 3, from the tables of bench_ddp.cu.
#include "answers.h"

#include <algorithm>
#include <cmath>

static std::string times(double factor) { return number(factor, factor < 9.995 ? "%.2f" : "%.0f"); }
static std::string per_cent(double share) { return number(100 * share, "%.1f%%"); }
static std::string title(const std::string& backend) { return backend == "gloo" ? "Gloo" : "NCCL"; }
static std::string ms(double value) { return number(value, "%.2f ms"); }
static std::string ranks(const std::string& n) { return counted(n, "rank"); }
// The first of these columns in which the row has no number; "": there is none such.
static std::string column_without_number(const TableRow& row, const std::vector<std::string>& columns) {
    for (const std::string& column : columns) {
        if (std::isnan(row.number(column))) { return column; }
    }
    return "";
}
static std::string against(double value, double other) {  // "16.14 ms (12.1%) less than"
    double more = value - other;
    return say("{} ({}) {} than", ms(std::fabs(more)), per_cent(std::fabs(more) / other), more > 0 ? "more" : "less");
}

// ---------------------------------------------------------------------------------------------------------------------
// 2.1 distributed_communication_single_node

// How the time of one group of ranks grows with the size.
static std::string growth_with_size(const std::vector<TableRow>& group) {
    TableRow small = smallest_of(group, "Tensor Size (MB)"), large = largest_of(group, "Tensor Size (MB)");
    std::string who = say("{} with {}", title(small.text("Backend")), ranks(small.text("Ranks")));
    std::string mb = small.text("Tensor Size (MB)"), many_mb = large.text("Tensor Size (MB)");
    if (mb == many_mb) {
        return say("{} takes {} ms for {} MB ({} GB/s busbw); there is no other size to compare with.", who,
                   small.text("median ms"), mb, small.text("busbw (GB/s)"));
    }
    double bytes = large.number("Tensor Size (MB)") / small.number("Tensor Size (MB)");
    double time = large.number("median ms") / small.number("median ms");
    const char* why = time < 0.8 * bytes    ? "latency limits the small tensor, bandwidth the large one"
                      : time > 1.25 * bytes ? "the large tensor gets less bandwidth than the small one"
                                            : "bandwidth limits nearly every size";
    return say(
        "{} takes {} ms for {} MB and {} ms for {} MB, {} times as long for {} times the bytes (busbw {} and {} "
        "GB/s): {}.",
        who, small.text("median ms"), mb, large.text("median ms"), many_mb, times(time), times(bytes),
        small.text("busbw (GB/s)"), large.text("busbw (GB/s)"), why);
}

// How the time of one backend grows with the number of ranks, at the smallest and at the largest size.
static std::string growth_with_ranks(const std::vector<TableRow>& all) {
    TableRow few = smallest_of(all, "Ranks"), many = largest_of(all, "Ranks");
    double n = few.number("Ranks"), m = many.number("Ranks");
    if (!(n >= 2 && m > n)) { return ""; }
    auto growth = [&](const TableRow& size) {  // NaN: one of the two was not measured
        double time[2] = {NAN, NAN};
        for (const TableRow& r : all) {
            if (r.text("Tensor Size (MB)") != size.text("Tensor Size (MB)")) { continue; }
            if (r.text("Ranks") == few.text("Ranks")) { time[0] = r.number("median ms"); }
            if (r.text("Ranks") == many.text("Ranks")) { time[1] = r.number("median ms"); }
        }
        return time[1] / time[0];
    };
    TableRow small = smallest_of(all, "Tensor Size (MB)"), large = largest_of(all, "Tensor Size (MB)");
    double of_small = growth(small), of_large = growth(large), ring = (2 * (m - 1) / m) / (2 * (n - 1) / n);
    if (std::isnan(of_small) || std::isnan(of_large)) { return ""; }
    return say(
        " From {} to {}, {} takes {} times as long for {} MB and {} times for {} MB, where a ring's link carries {} "
        "times as much: {}.",
        few.text("Ranks"), ranks(many.text("Ranks")), title(few.text("Backend")), times(of_large),
        large.text("Tensor Size (MB)"), times(of_small), small.text("Tensor Size (MB)"), times(ring),
        of_large > 1.25 * ring  ? "the large tensor takes longer than that"
        : of_large < 0.8 * ring ? "the large tensor takes less than that"
        : of_small > 1.1 * ring ? "that explains the large tensor, and the small one also pays for more steps"
                                : "that explains the large tensor");
}

// The handout's groups of 2, 4 and 6 ranks that have no times, with the reason where the table has one; "" for a
// backend that is not in the table: nobody asked for it.
static std::string not_measured(const std::vector<TableRow>& rows, const std::string& backend) {
    auto asked = [&](const TableRow& r) { return r.text("Backend") == backend; };
    if (std::none_of(rows.begin(), rows.end(), asked)) { return ""; }
    std::vector<std::string> missing;
    std::string why;
    for (const char* n : {"2", "4", "6"}) {
        bool measured = false;
        for (const TableRow& r : rows) {
            if (r.text("Backend") != backend || r.text("Ranks") != n) { continue; }
            measured = measured || !std::isnan(r.number("median ms"));
            if (!measured && why.empty()) { why = " (" + r.text("sums") + ")"; }
        }
        if (!measured) { missing.push_back(n); }
    }
    return missing.empty() ? "" : say("{} with {} ranks{}", title(backend), list_of(missing), why);
}

Answers answer_distributed_communication_single_node(const Tables& tables) {
    Tables runs = tables_with(tables, {"distributed_communication_single_node: all-reduce"});
    if (runs.empty()) { return {}; }
    std::vector<TableRow> rows;
    for (const Table& run : runs) {
        for (const TableRow& r : rows_of(run)) { rows.push_back(r); }
    }
    std::vector<std::string> missing, ratios;
    std::string sizes, numbers;
    std::map<std::string, std::vector<TableRow>> fewest;  // of each backend, the group with the fewest ranks
    for (const char* backend : {"gloo", "nccl"}) {
        std::vector<TableRow> all;
        for (const TableRow& r : rows) {
            bool measured =
                column_without_number(r, {"Ranks", "Tensor Size (MB)", "median ms", "busbw (GB/s)"}).empty();
            if (measured && r.text("Backend") == backend) { all.push_back(r); }
        }
        std::string few = smallest_of(all, "Ranks").text("Ranks"), open = not_measured(rows, backend);
        for (const TableRow& r : all) {
            if (r.text("Ranks") == few) { fewest[backend].push_back(r); }
        }
        if (!all.empty()) { sizes += (sizes.empty() ? "" : " ") + growth_with_size(fewest[backend]); }
        numbers += growth_with_ranks(all);
        if (!open.empty()) { missing.push_back(open); }
    }
    for (const TableRow& nccl : fewest["nccl"]) {
        for (const TableRow& gloo : fewest["gloo"]) {
            bool same_size = gloo.text("Tensor Size (MB)") == nccl.text("Tensor Size (MB)");
            if (!same_size || gloo.text("Ranks") != nccl.text("Ranks")) { continue; }
            ratios.push_back(say("{} times ({} MB)", times(gloo.number("median ms") / nccl.number("median ms")),
                                 nccl.text("Tensor Size (MB)")));
        }
    }
    Answers answers;
    if (!sizes.empty()) { answers.push_back({"size", sizes}); }
    if (!numbers.empty()) {
        answers.push_back({"ranks", "A ring's link carries 2(n-1)/n times the size for n ranks." + numbers});
    }
    std::string compared = ratios.empty() ? ""
                                          : say("Gloo takes {} as long as NCCL with {}.", list_of(ratios),
                                                ranks(fewest["nccl"][0].text("Ranks")));
    if (!missing.empty()) { compared += say("{}Not measured: {}.", compared.empty() ? "" : " ", list_of(missing)); }
    if (answers.empty() && !missing.empty()) { compared += " `--device cpu` measures Gloo on the CPU."; }
    if (!compared.empty()) { answers.push_back({"backend", compared}); }
    if (!answers.empty()) { answers.back().text += scaled_down(runs[0]); }
    return answers;
}

// ---------------------------------------------------------------------------------------------------------------------
// 2.2 to 2.3.3: naive_ddp, ddp_overlap_individual_parameters, ddp_overlap_bucketed

// What a table says that compares weights, row by row.
struct Verdict {
    size_t rows = 0, wrong = 0;
    TableRow worst;  // the row with the largest difference, of the wrong ones if there are any
    std::string bits;
};
static Verdict verdict_of(const Table& table) {
    std::vector<TableRow> rows = rows_of(table), wrong;
    bool same_bits = true;
    for (const TableRow& r : rows) {
        if (r.text("Parameters") != "match") { wrong.push_back(r); }
        same_bits = same_bits && r.text("bits on all ranks") == "identical";
    }
    return {rows.size(), wrong.size(), largest_of(wrong.empty() ? rows : wrong, "max diff"),
            same_bits ? " All ranks hold the same bits" : " The ranks hold different bits"};
}
static std::string how_wrong(const Verdict& v, const std::string& where) {
    return say("{} of {} rows differ{}", std::to_string(v.wrong), std::to_string(v.rows),
               v.worst ? say(", by up to {} ({})", v.worst.text("max diff"), where) : "");
}

static Answers weights_of_one_process(const Tables& tables, const std::string& command, const char* when) {
    const Table* table = table_with(tables, {command + ": weights of data parallel"});
    if (!table || table->rows.empty()) { return {}; }
    Verdict v = verdict_of(*table);
    std::string where = v.worst.text("Model") + ", " + v.worst.text("Parameter");
    std::string n = ranks(value_in(*table, "World size: ", ","));
    std::string text =
        v.wrong ? say("The weights of {} are not those of one process: {}.", n, how_wrong(v, where))
                : say("The weights of {} match those of one process that sees the whole batch of {}, after each of {} "
                      "steps; the largest difference, {} ({}), is rounding, because the sum over the batch is taken in "
                      "another order.",
                      n, value_in(*table, "Batch size: ", ","), value_in(*table, "after each of ", " steps"),
                      v.worst.text("max diff"), where);
    return {{"", text + v.bits + say(", and each started from other weights. {}", when)}};
}
Answers answer_naive_ddp(const Tables& tables) {
    return weights_of_one_process(tables, "naive_ddp", "Each gradient tensor is sent after backward.");
}
Answers answer_ddp_overlap_individual_parameters(const Tables& tables) {
    return weights_of_one_process(tables, "ddp_overlap_individual_parameters",
                                  "Each gradient tensor is sent as soon as backward has finished it.");
}
Answers answer_ddp_overlap_bucketed(const Tables& tables) {
    return weights_of_one_process(tables, "ddp_overlap_bucketed",
                                  "A bucket is sent as soon as backward has finished its last gradient.");
}

// ---------------------------------------------------------------------------------------------------------------------
// What the four benchmarks share: the table of steps, a row per strategy

static const char *const TOTAL = "Total Time (ms)", *const EXPOSED = "Exposed Comm (ms)",
                         *const REDUCES = "Comm Time (ms)", *const BACKWARD = "Backward (ms)",
                         *const CALLS = "all-reduces",
                         *const WHAT_IS_EXPOSED =
                             "exposed communication (from the end of backward to the end of the last all-reduce)";

static const char* const ONE_RANK = "One rank has no other to share with, so there is nothing to compare.";

static TableRow step_of(const Table& table, const std::string& strategy) {
    return row_of(table, {{"Strategy", strategy}});
}
// No answers, or one that says why there is none: a step to compare has no time.
static Answers why_open(const Table& table, const std::string& part, const std::vector<std::string>& strategies) {
    if (value_in(table, "; ", " rank") == "1") { return {{part, ONE_RANK}}; }
    for (const std::string& s : strategies) {
        TableRow step = step_of(table, s);
        if (step.text(TOTAL).compare(0, 3, "OOM") == 0) {
            return {{part, say("No step was measured: size {} does not fit into this machine's memory: {}.",
                               value_in(table, "size ", ", precision"), step.text(TOTAL))}};
        }
        std::string column =
            column_without_number(step, {TOTAL, EXPOSED, REDUCES, BACKWARD, CALLS, "Comm Prop.", "MB per step"});
        if (!column.empty()) {
            return {{part, say("The table has no {} for \"{}\", so there is no answer.", column, s)}};
        }
    }
    return {};
}
static std::string setup_of(const Table& table) {
    std::string mode = value_in(table, "mode ", ";"), length = value_in(table, "context length: ", ","),
                warmups = value_in(table, "context length: " + length + ", ", " warmup");
    return say(
        "{} over {} on {}, size {}, precision {}, mode {}, per rank {} x {} tokens; a time is the mean of {}, "
        "after {}, and of the ranks.",
        ranks(value_in(table, "; ", " rank")), value_in(table, "backend ", ";"), value_in(table, " step; ", ","),
        value_in(table, "size ", ", precision"), value_in(table, "precision ", ","), mode,
        value_in(table, mode + "; ", " sequence"), length, counted(value_in(table, "warmup, ", " step"), "step"),
        counted(value_in(table, "context length: " + length + ", ", " warmup"), "warm-up"));
}
// Follows a comparison of two means.
static std::string undecided(const TableRow& a, const TableRow& b) {
    double spread = std::max(a.number("std"), b.number("std"));
    if (!(std::fabs(a.number(TOTAL) - b.number(TOTAL)) <= spread)) { return ""; }
    return say(", within one standard deviation, {}, so this run does not show which is faster", ms(spread));
}
// What hiding costs: backward and the all-reduces share the device.
static std::string price_of_hiding(const TableRow& none, const TableRow& naive, const TableRow& hidden) {
    if (!(hidden.number(BACKWARD) > 1.02 * none.number(BACKWARD))) { return ""; }
    bool longer = hidden.number(REDUCES) > 1.02 * naive.number(REDUCES);
    return say(" Hiding is not free: backward takes {} ms instead of {}{}, because both share the device.",
               hidden.text(BACKWARD), none.text(BACKWARD),
               longer ? say(", and the all-reduces {} instead of {}", hidden.text(REDUCES), naive.text(REDUCES)) : "");
}

// ---------------------------------------------------------------------------------------------------------------------
// 2.2 naive_ddp_benchmarking

Answers answer_naive_ddp_benchmarking(const Tables& tables) {
    const Table* table = table_with(tables, {"naive_ddp_benchmarking;"});
    if (!table) { return {}; }
    Answers open = why_open(*table, "", {"no sync", "naive"});
    if (!open.empty()) { return open; }
    TableRow none = step_of(*table, "no sync"), naive = step_of(*table, "naive");
    double all = naive.number(REDUCES), gaps = naive.number(EXPOSED) - all, mb = naive.number("MB per step");
    std::string rate = all > 0 && mb > 0 ? number(mb / all, " (%.1f GB/s)") : "";  // MB per ms
    return {{"", say("Setup: {} A step takes {} ms, {} times as long as one without communication ({} ms{}), and {} ms "
                     "of it ({}) are "
                     "{}. The {} all-reduces, one per tensor, move {} MB and take {} ms{} themselves{}.",
                     setup_of(*table), naive.text(TOTAL), times(naive.number(TOTAL) / none.number(TOTAL)),
                     none.text(TOTAL), undecided(none, naive), naive.text(EXPOSED), naive.text("Comm Prop."),
                     WHAT_IS_EXPOSED, naive.text(CALLS), naive.text("MB per step"), naive.text(REDUCES), rate,
                     gaps > 0 ? say("; the other {} are gaps between them", ms(gaps)) : "") +
                     scaled_down(*table)}};
}

// ---------------------------------------------------------------------------------------------------------------------
// 2.3.1 minimal_ddp_flat_benchmarking

Answers answer_minimal_ddp_flat_benchmarking(const Tables& tables) {
    const Table* table = table_with(tables, {"minimal_ddp_flat_benchmarking;"});
    if (!table) { return {}; }
    Answers open = why_open(*table, "", {"naive", "flat"});
    if (!open.empty()) { return open; }
    TableRow naive = step_of(*table, "naive"), flat = step_of(*table, "flat");
    double saved = naive.number(REDUCES) - flat.number(REDUCES), calls = naive.number(CALLS) - flat.number(CALLS);
    std::string unsure = undecided(naive, flat), split;
    if (!(saved > 0 && calls > 0)) {
        split = ", so the number of calls is not what limits them";
    } else if (unsure.empty()) {
        split = say(", so bytes cost naive {} ms, and {} more calls {} ({} us each)", flat.text(REDUCES),
                    number(calls, "%.0f"), ms(saved), number(1e3 * saved / calls, "%.1f"));
    }
    return {
        {"", say("With one all-reduce for all gradients a step takes {} ms, {} with one per tensor ({} ms{}). "
                 "The {} {} from {} to {} ms. Both move {} MB; the all-reduces take {} ms instead of {}{}.",
                 flat.text(TOTAL), against(flat.number(TOTAL), naive.number(TOTAL)), naive.text(TOTAL), unsure,
                 WHAT_IS_EXPOSED, flat.number(EXPOSED) < naive.number(EXPOSED) ? "falls" : "rises", naive.text(EXPOSED),
                 flat.text(EXPOSED), flat.text("MB per step"), flat.text(REDUCES), naive.text(REDUCES), split) +
                 scaled_down(*table)},
        {"setup", setup_of(*table)}};
}

// ---------------------------------------------------------------------------------------------------------------------
// 2.3.2 ddp_overlap_individual_parameters_benchmarking

Answers answer_ddp_overlap_individual_parameters_benchmarking(const Tables& tables) {
    const Table* table = table_with(tables, {"ddp_overlap_individual_parameters_benchmarking;"});
    if (!table) { return {}; }
    Answers open = why_open(*table, "a", {"no sync", "naive", "flat", "overlapped"});
    if (!open.empty()) { return open; }
    TableRow none = step_of(*table, "no sync"), naive = step_of(*table, "naive"), flat = step_of(*table, "flat"),
             overlapped = step_of(*table, "overlapped");
    double step = overlapped.number(TOTAL);
    std::string hidden = overlapped.text("hidden"), hidden_naive = naive.text("hidden");
    return {
        {"a",
         say("Overlapped, a step takes {} ms: {} naive ({} ms{}) and {} flat ({} ms{}); without communication it takes "
             "{} ms. {} ms are {}, instead of {} naive and {} flat{}.",
             overlapped.text(TOTAL), against(step, naive.number(TOTAL)), naive.text(TOTAL),
             undecided(overlapped, naive), against(step, flat.number(TOTAL)), flat.text(TOTAL),
             undecided(overlapped, flat), none.text(TOTAL), overlapped.text(EXPOSED), WHAT_IS_EXPOSED,
             naive.text(EXPOSED), flat.text(EXPOSED),
             std::isnan(overlapped.number("hidden"))
                 ? ""
                 : say("; {} of the all-reduces' time lies under backward", hidden)) +
             price_of_hiding(none, naive, overlapped) + scaled_down(*table)},
        {"b",
         "The two traces are files: `--trace FILE.json` (for Perfetto) and `--plot FILE.svg` show one more step of "
         "each way, naive and overlapped among them." +
             (std::isnan(overlapped.number("hidden") + naive.number("hidden"))
                  ? ""
                  : say(" In the steps timed here {} of naive's all-reduce time lies under backward, and {} of "
                        "overlapped's.",
                        hidden_naive, hidden))}};
}

// ---------------------------------------------------------------------------------------------------------------------
// 2.3.3 ddp_bucketed_benchmarking

static std::string limit_of(const TableRow& step) {  // "bucketed, 100 MB": "100"
    return value_in({step.text("Strategy"), {}, {}}, "bucketed, ", " MB");
}
static std::string range_of(const TableRow& least, const TableRow& most, const char* column) {
    std::string a = least.text(column), b = most.text(column);
    return a == b ? a : a + " to " + b;
}
// Whether the run shows what one expects of small and of large buckets.
static std::string expected_of_buckets(const Table& table, const std::vector<TableRow>& steps) {
    TableRow most = step_of(table, "overlapped"), fewest = smallest_of(steps, CALLS);
    std::vector<TableRow> smaller;
    for (const TableRow& r : steps) {
        if (r.number(CALLS) > fewest.number(CALLS)) { smaller.push_back(r); }
    }
    std::string text;
    if (most.number(CALLS) > fewest.number(CALLS)) {
        text = say("Fewer calls should cost less, and {}: all-reduces take {} ms in {} calls and {} ms in {}.",
                   fewest.number(REDUCES) < most.number(REDUCES) ? "they do" : "here they do not", most.text(REDUCES),
                   most.text(CALLS), fewest.text(REDUCES), fewest.text(CALLS));
    }
    if (TableRow least = smallest_of(smaller, EXPOSED)) {
        text += say("{}A large last bucket should leave more {}, and {}: {} ms with {} MB, {} ms with smaller buckets.",
                    text.empty() ? "" : " ", WHAT_IS_EXPOSED,
                    fewest.number(EXPOSED) > least.number(EXPOSED) ? "it does" : "here it does not",
                    fewest.text(EXPOSED), limit_of(fewest), range_of(least, largest_of(smaller, EXPOSED), EXPOSED));
    }
    std::vector<std::string> same;  // as the fewest calls: the bucket is as large as they need
    for (const TableRow& r : steps) {
        if (r.number(CALLS) == fewest.number(CALLS) && r.index != fewest.index) { same.push_back(limit_of(r) + " MB"); }
    }
    if (!same.empty()) {
        std::string n = fewest.text(CALLS);
        text += say("{}{} {} the same {} as {} MB.", text.empty() ? "" : " ", list_of(same),
                    same.size() == 1 ? "is" : "are", n == "1" ? "single bucket" : n + " buckets", limit_of(fewest));
    }
    return text;
}
// The model of (b) takes backward to be as long as the all-reduces.
static std::string matching_setup(const Table& table) {
    double backward = step_of(table, "no sync").number(BACKWARD), reduces = step_of(table, "flat").number(REDUCES);
    if (!(backward > 0 && reduces > 0)) { return ""; }
    double ratio = reduces / backward;
    bool halved = table.caption.find("gradients reduced in bf16") != std::string::npos;
    std::string tokens = say("a matching setup has about {} times the tokens per rank", times(ratio));
    return say(
        "The model in (b) takes backward to be as long as the all-reduces; here it takes {} and flat's all-reduce "
        "{}, so {}.",
        ms(backward), ms(reduces),
        ratio < 0.9 ? "calls hide under backward, too: " + tokens + " or slower links"
        : ratio > 1.1
            ? "bytes stay exposed with any bucket: " + tokens +
                  (halved ? "" : ", 16-bit gradients (--precision bf16 --reduce_dtype bf16)") + " or faster links"
            : "this setup matches");
}
static Answer bucket_model_answer(const Table* model) {
    std::string text =
        "A bucket takes s/(n_b w) to compute and o + s/(n_b w) to send, and sending goes on back to back once the "
        "first "
        "is computed: overhead(s, w, o, n_b) = s/(n_b w) + n_b o. It is least, 2 sqrt(s o/w), for n_b = sqrt(s/(o w)): "
        "the best bucket has s/n_b = sqrt(s o w) bytes.";
    if (!model) { return {"b", text + " The table of the fitted model is missing, so o and w have no numbers here."}; }
    std::string o = value_in(*model, "o = ", " us"), best = value_in(*model, "sqrt(s o w) = ", " MB"),
                s = value_in(*model, "with s = ", " MB");
    if (o.empty() || best.empty()) {
        return {"b", text + " This run could not fit w: its larger all-reduces took no longer than its smaller ones."};
    }
    return {"b", text + say(" With s = {} MB, and o = {} us and w = {} GB/s fitted to all-reduces of {} MB, the best "
                            "bucket has {} MB{} and the overhead is {} ms.",
                            s, o, value_in(*model, "w = ", " GB/s"), value_in(*model, "all-reduces of ", " MB"), best,
                            atof(best.c_str()) > atof(s.c_str()) ? " (more than there is: one bucket)" : "",
                            value_in(*model, "least, ", " ms"))};
}
Answers answer_ddp_bucketed_benchmarking(const Tables& tables) {
    const Table* table = table_with(tables, {"ddp_bucketed_benchmarking;"});
    if (!table) { return {}; }
    Answer b = bucket_model_answer(table_with(tables, {"DDP overhead"}));
    std::vector<TableRow> steps;
    std::vector<std::string> strategies = {"no sync", "naive", "flat", "overlapped"}, list;
    for (const TableRow& r : rows_of(*table)) {
        if (limit_of(r).empty()) { continue; }
        strategies.push_back(r.text("Strategy"));
        steps.push_back(r);
        list.push_back(say("{} ms ({} MB)", r.text(TOTAL), limit_of(r)));
    }
    Answers open = why_open(*table, "a", strategies);
    if (steps.empty()) { open = {{"a", "No step with buckets was measured."}}; }
    if (!open.empty()) { return {open[0], b}; }
    TableRow fastest = smallest_of(steps, TOTAL);
    TableRow second;  // of those that differ from it in more than their name
    for (const TableRow& r : steps) {
        bool other = r.text(CALLS) != fastest.text(CALLS);
        if (other && (!second || r.number(TOTAL) < second.number(TOTAL))) { second = r; }
    }
    auto total = [&](const char* strategy) { return step_of(*table, strategy).text(TOTAL); };
    Answers answers = {
        {"a", say("With buckets a step takes {}. Without buckets it takes {} ms overlapped, {} flat, {} naive "
                  "and {} without communication.",
                  list_of(list), total("overlapped"), total("flat"), total("naive"), total("no sync")) +
                  (second ? say(" The fastest has {} MB, the next {} MB{}.", limit_of(fastest), limit_of(second),
                                undecided(fastest, second))
                          : "") +
                  scaled_down(*table)}};
    std::string expected = expected_of_buckets(*table, steps), setup = matching_setup(*table);
    if (!expected.empty()) { answers.push_back({"a, expected", expected}); }
    if (!setup.empty()) { answers.push_back({"a, setup", setup}); }
    answers.push_back(b);
    return answers;
}

// ---------------------------------------------------------------------------------------------------------------------
// 3 optimizer_state_sharding

Answers answer_optimizer_state_sharding(const Tables& tables) {
    const Table* table = table_with(tables, {"optimizer_state_sharding: weights"});
    if (!table || table->rows.empty()) { return {}; }
    Verdict v = verdict_of(*table);
    TableRow first = rows_of(*table)[0];
    std::string n = ranks(value_in(*table, "unsharded; ", " rank"));
    std::string text =
        v.wrong ? say("On {} the sharded optimizers do not give the weights of the unsharded ones: {}.", n,
                      how_wrong(
                          v, v.worst.text("Model") + ", " + v.worst.text("Optimizer") + ", " + v.worst.text("Scheme")))
                : say("On {} the sharded optimizers give the weights of the unsharded ones after each of {} steps; {}.",
                      n, value_in(*table, "each of ", " steps"),
                      v.worst.number("max diff") > 0
                          ? say("the largest difference, {}, is rounding: sums are taken in another order",
                                v.worst.text("max diff"))
                          : "no weight differs");
    return {{"", text + v.bits +
                     say(". Of {}'s {} elements of state for {} the ranks keep {}: a share is a range of the "
                         "flat weights, whatever tensors it cuts.",
                         first.text("Optimizer"), first.text("unsharded"), first.text("Model"),
                         first.text("state elements, by rank"))}};
}

// ---------------------------------------------------------------------------------------------------------------------
// 3 optimizer_state_sharding_accounting

static const char *const WHOLE = "unsharded", *const BROADCAST_WAY = "sharded, broadcast",
                         *const ZERO1_WAY = "sharded, ZeRO-1";

static TableRow memory_at(const Table& table, const std::string& optimizer, const std::string& moment) {
    return row_of(table, {{"Optimizer", optimizer}, {"Moment", moment}});
}
static Answer peaks(const Table& table, const std::string& n) {
    std::vector<std::string> three[2];
    for (int sharded : {0, 1}) {
        for (const char* moment : {"after init", "before step", "after step", "later steps"}) {
            const char* optimizer = sharded ? BROADCAST_WAY : WHOLE;
            TableRow r = memory_at(table, optimizer, moment);
            std::string column = column_without_number(
                r, {"peak", "parameters", "gradients", "optimizer state", "activations and the rest"});
            if (!column.empty()) {
                return {"a", say("The table has no {} for \"{}\" {}, so there is no comparison.", column, optimizer,
                                 moment)};
            }
            if (three[sharded].size() < 3) { three[sharded].push_back(r.text("peak")); }
        }
    }
    TableRow before = memory_at(table, WHOLE, "before step"), after = memory_at(table, WHOLE, "after step"),
             sharded = memory_at(table, BROADCAST_WAY, "after step");
    double share = sharded.number("optimizer state") / after.number("optimizer state");
    bool as_expected = std::fabs(share - 1 / atof(n.c_str())) < 0.01;
    return {"a",
            say("Rank 0's peaks after init, before the optimizer's step and after it are {} MiB unsharded, and {} "
                "MiB sharded. Before the step there are {} MiB of weights, {} of gradients and {} of activations and "
                "the rest; the step adds AdamW's moments, {} MiB unsharded and {} sharded, which is {}the expected "
                "1/{}. Sharding leaves weights and gradients whole; in later steps, where moments and activations "
                "meet, it takes the peak from {} to {} MiB.",
                list_of(three[0]), list_of(three[1]), before.text("parameters"), before.text("gradients"),
                before.text("activations and the rest"), after.text("optimizer state"), sharded.text("optimizer state"),
                as_expected ? "" : "not ", n, memory_at(table, WHOLE, "later steps").text("peak"),
                memory_at(table, BROADCAST_WAY, "later steps").text("peak")) +
                scaled_down(table)};
}
static Answers speed_and_zero(const Table* time, const Table& memory) {
    const std::string open = "The table of times is missing or has empty cells, so there is no comparison.";
    const char *step = "optimizer and weights (ms)", *sent = "MB sent per step";
    if (!time) { return {{"b", open}, {"c", open}}; }
    auto of = [&](const char* optimizer) { return row_of(*time, {{"Optimizer", optimizer}}); };
    TableRow whole = of(WHOLE), ours = of(BROADCAST_WAY), zero = of(ZERO1_WAY);
    for (const TableRow& r : {whole, ours, zero}) {
        if (!column_without_number(r, {TOTAL, step, sent}).empty()) { return {{"b", open}, {"c", open}}; }
    }
    TableRow a = memory_at(memory, BROADCAST_WAY, "after step"), b = memory_at(memory, ZERO1_WAY, "after step");
    std::string x = a.text("optimizer state"), y = b.text("optimizer state"),
                kept = std::isnan(a.number("optimizer state") + b.number("optimizer state")) ? ""
                       : x == y ? say(", and memory is the same, {} MiB of moments per rank in both", x)
                                : say(", and the moments take {} MiB per rank in our way and {} MiB in ZeRO-1", x, y);
    return {
        {"b", say("An iteration takes {} ms sharded, {} unsharded ({} ms{}). The optimizer's step and the sending of "
                  "weights take {} ms instead of {}: a rank steps only its share but then broadcasts it, so it sends "
                  "{} MB per step instead of {}{}.",
                  ours.text(TOTAL), against(ours.number(TOTAL), whole.number(TOTAL)), whole.text(TOTAL),
                  undecided(whole, ours), ours.text(step), whole.text(step), ours.text(sent), whole.text(sent),
                  undecided(whole, ours).empty() ? say(", and the broadcast costs {} than the shorter step saves",
                                                       ours.number(step) > whole.number(step) ? "more" : "less")
                                                 : "")},
        {"c", say("Like ours, ZeRO's stage 1 shards only the optimizer's state{}. ZeRO-1 reduce-scatters gradients and "
                  "all-gathers weights, so each rank sends 2 Psi (N-1)/N elements ({} MB per step), while ours, the "
                  "handout's way, all-reduces gradients and broadcasts weights: 3 Psi (N-1)/N ({} MB). ZeRO-1's "
                  "iteration takes {} ms, {} ours{}.",
                  kept, zero.text(sent), ours.text(sent), zero.text(TOTAL),
                  against(zero.number(TOTAL), ours.number(TOTAL)), undecided(ours, zero))}};
}
Answers answer_optimizer_state_sharding_accounting(const Tables& tables) {
    const Table* memory = table_with(tables, {"optimizer_state_sharding_accounting;"});
    if (!memory) { return {}; }
    std::string n = value_in(*memory, "; ", " rank");
    if (n == "1") { return {{"", ONE_RANK}}; }
    Answers answers = speed_and_zero(table_with(tables, {"time per iteration"}), *memory);
    answers.insert(answers.begin(), peaks(*memory, n));
    return answers;
}

// ---------------------------------------------------------------------------------------------------------------------
// fsdp, fsdp_accounting

Answers answer_fsdp(const Tables& tables) {
    const Table* table = table_with(tables, {"fsdp: weights of FSDP"});
    if (!table || table->rows.empty()) { return {}; }
    TableRow worst = largest_of(rows_of(*table), "max diff");
    std::string n = ranks(value_in(*table, "World size: ", ",")), wrong;
    for (const TableRow& r : rows_of(*table)) {
        if (r.text("Parameters") == "match") { continue; }
        wrong += say("{}{}, {}, mode {}, checkpoint {}", wrong.empty() ? "" : "; ", r.text("Model"),
                     r.text("precision"), r.text("mode"), r.text("checkpoint"));
    }
    if (!wrong.empty()) {
        return {{"", say("The weights of FSDP with {} are not those of one process: {}.", n, wrong)}};
    }
    return {
        {"", say("The weights of FSDP with {} match those of one process that sees the whole batch, in all {} rows, "
                 "after each of {} steps; the largest difference is {} ({}, {}, mode {}). The ranks sum over the "
                 "batch in another order, so the sums round differently; a format of 16 bits has fewer digits.",
                 n, std::to_string(table->rows.size()), value_in(*table, "after each of ", " steps"),
                 worst ? worst.text("max diff") : "unknown", worst.text("Model"), worst.text("precision"),
                 worst.text("mode"))}};
}

static const char* const FSDP_WAYS[] = {"overlapped DDP", "sharded optimizer (ZeRO-1)", "FSDP"};
static Answer saved_by_fsdp(const Table& table, double n) {
    double psi = atof(value_in(table, "Psi = ", " parameters").c_str()), peaks[3];
    const bool pure = table.caption.find("precision pure_bf16") != std::string::npos;
    const double s = pure ? 2 : 4;  // bytes per element of weights, gradients and two moments
    double expected[3] = {4 * s * psi, (2 * s + 2 * s / n) * psi, 4 * s * psi / n};
    std::vector<std::string> measured;
    for (int way : {0, 1, 2}) {
        TableRow r = row_of(table, {{"Way", FSDP_WAYS[way]}});
        peaks[way] = r.number("peak");
        std::string cell = r.text(std::isnan(peaks[way]) ? "parameters" : "peak");
        measured.push_back(
            say("{} {}{}", FSDP_WAYS[way], cell.empty() ? "nothing" : cell, std::isnan(peaks[way]) ? "" : " MiB"));
    }
    auto mib = [](double bytes) { return number(bytes / 1048576, "%.1f"); };
    std::string half = number(2 * s, "%.0f");
    std::string text =
        say("Expected without activations and gathered units: {} Psi = {} MiB with DDP, ({} + {}/N) Psi = {} with a "
            "sharded optimizer and {} Psi/N = {} with FSDP, so FSDP saves {} and {} MiB. Peaks: {}",
            number(4 * s, "%.0f"), mib(expected[0]), half, half, mib(expected[1]), number(4 * s, "%.0f"),
            mib(expected[2]), mib(expected[0] - expected[2]), mib(expected[1] - expected[2]), list_of(measured));
    if (!std::isnan(peaks[0] + peaks[1] + peaks[2])) {
        auto against = [&](int way) {
            double saved = peaks[way] - peaks[2];
            return say("{} MiB {} than {}", number(std::fabs(saved), "%.1f"), saved >= 0 ? "less" : "more",
                       FSDP_WAYS[way]);
        };
        text += say(", so FSDP takes {} and {}", against(0), against(1));
    }
    text += ".";
    TableRow at_once = row_of(table, {{"Way", "FSDP, AdamW in backward"}});
    const std::string usual = row_of(table, {{"Way", FSDP_WAYS[2]}}).text("step (ms)");
    if (!std::isnan(at_once.number("peak"))) {
        text += say(
            " Where each unit takes its AdamW step in backward, no gradient is kept: {} MiB, and {} ms per "
            "step{}.",
            at_once.text("peak"), at_once.text("step (ms)"), usual.empty() ? "" : say(" where FSDP takes {}", usual));
    }
    return {"a", text + scaled_down(table)};
}
static Answer gathers_in_time(const Table* waits) {
    TableRow all = waits ? row_of(*waits, {{"unit", "all"}}) : TableRow();
    double gather = all.number("forward: gather (ms)"), wait = all.number("wait (ms)");
    if (!(gather > 0) || std::isnan(wait)) { return {"b", "No gather was measured, so this run does not answer it."}; }
    std::vector<TableRow> units;  // that have a block before them to hide under
    double gathers = 0, waited = 0;
    for (const TableRow& r : rows_of(*waits)) {
        if (r.text("unit") == "all" || r.text("unit") == "embedding" || r.text("unit") == "layer 0") { continue; }
        units.push_back(r);
        gathers += r.number("forward: gather (ms)"), waited += r.number("wait (ms)");
    }
    TableRow slowest = largest_of(units, "wait (ms)");
    auto wait_of = [&](const char* unit) { return row_of(*waits, {{"unit", unit}}).text("wait (ms)"); };
    double hidden = 100 * std::max(0.0, 1 - wait / gather);
    const std::string gradients = all.text("wait for gradients (ms)");
    return {"b",
            say("In forward the gathers take {} ms in all, and the compute stream waits {} ms for them, so {} % are "
                "hidden. The first two, of the embedding and layer 0, have no block to hide under ({} and {} ms); the "
                "others {} in time: the longest wait is {} ms, for {}. In backward the gathers take {} ms and the "
                "waits for them {} ms{}.",
                all.text("forward: gather (ms)"), all.text("wait (ms)"), number(hidden, "%.1f"), wait_of("embedding"),
                wait_of("layer 0"), waited <= gathers / 10 ? "come" : "do not all come", slowest.text("wait (ms)"),
                slowest.text("unit"), all.text("backward: gather (ms)"), all.text("wait in backward (ms)"),
                gradients.empty() ? "" : say(", and the wait for gradients {} ms", gradients))};
}
Answers answer_fsdp_accounting(const Tables& tables) {
    const Table* table = table_with(tables, {"fsdp_accounting (a)"});
    if (!table) { return {}; }
    std::string n = value_in(*table, "; ", " rank");
    if (n == "1") { return {{"", ONE_RANK}}; }
    return {saved_by_fsdp(*table, atof(n.c_str())), gathers_in_time(table_with(tables, {"fsdp_accounting (b)"}))};
}

// ---------------------------------------------------------------------------------------------------------------------
// scaling

static Answer scaling_of(const Table& table, const std::string& kind) {
    std::vector<TableRow> rows;
    for (const TableRow& row : rows_of(table, {{"Scaling", kind}})) {
        if (row.text("Way") != "no sync") { rows.push_back(row); }  // its ranks learn apart
    }
    const std::string N = largest_of(rows, "Ranks").text("Ranks");
    if (N == "1") { return {kind, ONE_RANK}; }
    std::vector<TableRow> last, of_best;
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(last), [&](auto& row) { return row.text("Ranks") == N; });
    TableRow best = largest_of(last, "speed-up");
    for (const TableRow& row : last) {  // speed-ups are rounded
        bool equal = row.number("speed-up") == best.number("speed-up");
        if (equal && row.number("step (ms)") < best.number("step (ms)")) { best = row; }
    }
    if (!best) { return {kind, say("The table lacks a step on {}, or one on fewer to compare with.", ranks(N))}; }
    std::vector<std::string> others;
    for (const TableRow& row : last) {
        std::string times = row.text("speed-up");
        std::string cell = times.empty() ? (row.text("step (ms)") == "failed" ? "failed" : "-") : times + " times";
        if (row.index != best.index) { others.push_back(row.text("Way") + " " + cell); }
    }
    for (const TableRow& row : rows) {
        bool less = row.text("Ranks") != "1" && row.number("efficiency (%)") < 90;
        if (less && row.text("Way") == best.text("Way")) { of_best.push_back(row); }
    }
    const TableRow below = of_best.empty() ? TableRow() : of_best[0], told = below ? below : best;
    const bool strong = kind == "strong";
    const std::string n = number(best.number("sequences per rank") * (strong ? best.number("Ranks") : 1), "%.0f"),
                      waits = told.text("Exposed Comm (ms)"),
                      base = value_in(table, kind + ": over a rank's share of the fastest way on ", " ranks");
    std::string text = say(
        "With {} {}, the fastest way on {} is {}: {} times the tokens per second of {}, which is {} % of linear.",
        n + (n == "1" ? " sequence" : " sequences"), strong ? "in all" : "per rank", ranks(N), best.text("Way"),
        best.text("speed-up"), base.empty() ? "one rank" : say("one of {}", ranks(base)), best.text("efficiency (%)"));
    if (!others.empty()) { text += say(" The other ways: {}.", list_of(others)); }
    text += below ? say(" Its efficiency falls below 90 % at {}", ranks(below.text("Ranks")))
                  : " Its efficiency stays at 90 % or more";
    text += waits.empty() ? "."
                          : say(", where it waits {} of {} ms for communication ({} %).", waits, told.text("step (ms)"),
                                number(100 * told.number("Exposed Comm (ms)") / told.number("step (ms)"), "%.1f"));
    return {kind, text};
}
Answers answer_scaling(const Tables& tables) {
    const Table* table = table_with(tables, {"scaling: size"});
    if (!table) { return {}; }
    Answers answers = {scaling_of(*table, "weak"), scaling_of(*table, "strong")};
    answers.back().text += scaled_down(*table);
    return answers;
}
