// answers_attention.cu: the handout's questions of sections 1.2 and 1.3, answered from the tables of bench_attention.cu
// and of torch_compile.
#include "answers.h"

#include <cmath>
#include <functional>

using Rows = std::vector<TableRow>;

static Rows rows_where(const Rows& rows, const std::function<bool(const TableRow&)>& good) {
    Rows found;
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(found), good);
    return found;
}
static Rows with_number(const Rows& rows, const std::string& column) {
    return rows_where(rows, [&](auto& row) { return !std::isnan(row.number(column)); });
}
// The column's different texts, in the order of the rows.
static std::vector<std::string> values_of(const Rows& rows, const std::string& column) {
    std::vector<std::string> values;
    for (const TableRow& row : rows) {
        if (std::find(values.begin(), values.end(), row.text(column)) == values.end()) {
            values.push_back(row.text(column));
        }
    }
    return values;
}
static std::string span_of(const Rows& rows, const std::string& column, const char* format, double factor = 1) {
    return span(factor * smallest_of(rows, column).number(column), factor * largest_of(rows, column).number(column),
                format);
}
static bool begins(const std::string& text, const std::string& with) { return text.compare(0, with.size(), with) == 0; }
static std::string falls_or_rises(double from, double to) {
    return to < from ? "falls" : to > from ? "rises" : "stays the same";
}

// ---------------------------------------------------------------------------------------------------------------------
// 1.2.1 pytorch_attention

static std::string what_fits(const Rows& all, const Rows& fit) {
    auto ran_out = [](const TableRow& row) { return begins(row.text("status"), "OOM"); };
    std::string text;
    if (TableRow oom = smallest_of(rows_where(all, ran_out), "seq_len")) {
        text = say("Memory runs out in {} of the {} configurations of the table, the smallest with D {} and S {}: {}.",
                   std::to_string(rows_where(all, ran_out).size()), std::to_string(all.size()), oom.text("d_model"),
                   oom.text("seq_len"), oom.text("status"));
    } else {
        text = say("None of the {} configurations of the table runs out of memory.", std::to_string(all.size()));
    }
    if (fit.empty()) { return text; }
    std::string S = largest_of(fit, "seq_len").text("seq_len");
    Rows longest = rows_where(fit, [&](auto& row) { return row.text("seq_len") == S; });
    return text + say(" At the longest length that ran, S {}, forward takes {} ms and backward {} ms, over D {}.", S,
                      span_of(longest, "forward_time", "%.2f", 1e3), span_of(longest, "backward_time", "%.2f", 1e3),
                      span_of(longest, "d_model", "%.0f"));
}
static std::string growth_of_saved(const Rows& fit) {
    if (fit.empty()) { return ""; }
    std::string D = largest_of(fit, "seq_len").text("d_model");
    const char* held = "memory_usage_mb";
    Rows rows = rows_where(fit, [&](auto& row) { return row.text("d_model") == D && row.number(held) > 0; });
    if (rows.empty()) { return ""; }
    TableRow b = largest_of(rows, "seq_len");
    TableRow a =
        largest_of(rows_where(rows, [&](auto& row) { return row.number("seq_len") < b.number("seq_len"); }), "seq_len");
    if (!a) {
        return say(
            "Only one length ran, S {}, so this table does not show how the memory grows; the S x S arrays "
            "grow with S^2.",
            b.text("seq_len"));
    }
    double times = b.number(held) / a.number(held);
    double power = std::log(times) / std::log(b.number("seq_len") / a.number("seq_len"));
    return say(
        "From S {} to S {} at D {}, the memory held when backward starts goes from {} to {} MiB, times {}, "
        "like S^{}: {}.",
        a.text("seq_len"), b.text("seq_len"), D, a.text(held), b.text(held), number(times, "%.2f"),
        number(power, "%.2f"),
        power > 1.5 ? "the S x S arrays decide, and they grow with S^2"
                    : "at these lengths the S x S arrays, which grow with S^2, do not decide yet");
}
// What the smallest configuration that does not fit holds, and what would hold less.
static Answers accounting_of_oom(const Table* table) {
    Answers missing = {{"a, accounting", "The table that accounts for the smallest OOM is missing."}};
    if (!table) { return missing; }
    double B = atof(value_in(*table, "batch ", ",").c_str()), D = atof(value_in(*table, ", d ", ",").c_str()),
           S = atof(value_in(*table, ", S ", " ").c_str()), MiB = 1048576;
    TableRow square = largest_of(rows_of(*table), "bytes each"), all = row_of(*table, {{"what", "all"}}),
             peak = row_of(*table, {{"what", "peak in backward"}});
    if (!square || !all || !peak || B * D * S == 0) { return missing; }
    double each = square.number("bytes each"), arrays = std::round(10 * peak.number("bytes") / each) / 10;
    std::string shape = say("{} x {}^2", number(B, "%.0f"), number(S, "%.0f"));
    return {{"a, accounting",
             say("The smallest configuration that does not fit has batch {}, D {} and S {}: its peak is {}, and {} are "
                 "there.",
                 number(B, "%.0f"), number(D, "%.0f"), number(S, "%.0f"), value_in(*table, "needs ", " at its peak"),
                 value_in(*table, "at its peak, ", " are there")) +
                 say(" When its backward starts, it holds {} MiB, and {} MiB of them are {} arrays of B S^2 = {} "
                     "numbers with {} bytes each: the exponentials and the probabilities P, which {} saves. At its "
                     "peak, in backward, it holds {} such arrays; the others are gradients, such as dP.",
                     all.text("MiB"), square.text("MiB"), square.text("buffers"), shape,
                     number(each / (B * S * S), "%.3g"), square.text("what"), number(arrays, "%g"))},
            {"a, remedy",
             say("FlashAttention removes this cost: it keeps L, one number per query, and computes P again in "
                 "backward, tile by tile. It would hold q, k, v, dO, O and L, which is 4 B S (5 D + 1) bytes = {} MiB.",
                 number(4 * B * S * (5 * D + 1) / MiB, "%.2f"))}};
}
Answers answer_pytorch_attention(const Tables& tables) {
    const Table* grid = table_with(tables, {"pytorch_attention"});
    if (!grid) { return {}; }
    Rows all = rows_of(*grid), fit = with_number(all, "forward_time");
    Answers answers = {{"a", what_fits(all, fit) + scaled_down(*grid)}};
    std::string growth = growth_of_saved(fit);
    if (!growth.empty()) { answers.push_back({"a, growth", growth}); }
    Answers accounting = accounting_of_oom(table_with(tables, {"the smallest configuration that does not fit"}));
    answers.insert(answers.end(), accounting.begin(), accounting.end());
    return answers;
}

// ---------------------------------------------------------------------------------------------------------------------
// 1.3 torch_compile

static std::string how_fast(const Rows& rows, const std::string& column) {  // "1.61 to 3.04 times as fast"
    size_t slower = rows_where(rows, [&](auto& row) { return row.number(column) < 1; }).size();
    std::string text = span_of(rows, column, "%.2f") + " times as fast";
    return slower == 0 ? text
                       : say("{} (slower in {} of {} rows)", text, std::to_string(slower), std::to_string(rows.size()));
}
static std::string attention_compiled(const Table& table) {
    const std::string vanilla =
        " Nothing here ran torch.compile: \"vanilla\" is our attention with a softmax of five operations, \"compiled\" "
        "has a softmax that we fused by hand, so PyTorch's factors are others.";
    Rows both = with_number(rows_of(table), "speedup fw");
    if (both.empty()) { return "No configuration ran in both versions." + vanilla + scaled_down(table); }
    std::string text =
        say("Compiled attention is {} in forward and {} in backward, over {} of {} configurations{}.",
            how_fast(both, "speedup fw"), how_fast(both, "speedup bw"), std::to_string(both.size()),
            std::to_string(table.rows.size()), both.size() < table.rows.size() ? "; the others ran out of memory" : "");
    std::string S = largest_of(both, "seq_len").text("seq_len");
    Rows longest = rows_where(both, [&](auto& row) { return row.text("seq_len") == S; });
    TableRow narrow = smallest_of(longest, "d_model"), wide = largest_of(longest, "d_model");
    if (narrow.index != wide.index) {
        auto change = [&](const char* column) {
            return say("{} from {} to {}", falls_or_rises(narrow.number(column), wide.number(column)),
                       narrow.text(column), wide.text(column));
        };
        bool both_fall = wide.number("speedup fw") < narrow.number("speedup fw") &&
                         wide.number("speedup bw") < narrow.number("speedup bw");
        text +=
            say(" At S {}, from D {} to D {}, the forward's speedup {} and the backward's {}{}.", S,
                narrow.text("d_model"), wide.text("d_model"), change("speedup fw"), change("speedup bw"),
                both_fall ? ": the products with D columns are the same in both versions, and they grow with D" : "");
    }
    return text + vanilla + scaled_down(table);
}
static std::string model_compiled(const Table& table) {
    std::string text = "In " + value_in(table, "precision ", ",");
    auto rows_with = [&](const std::string& run_type) {
        return with_number(rows_of(table, {{"run_type", run_type}}), "speedup");
    };
    const std::string step_type = "forward+backward+optimizer";
    std::vector<std::string> parts;
    for (const std::string& run_type : {std::string("forward"), step_type}) {
        Rows rows = rows_with(run_type);
        if (rows.empty()) { continue; }
        TableRow low = smallest_of(rows, "speedup"), high = largest_of(rows, "speedup");
        std::string least = say("{} ({})", low.text("speedup"), low.text("size")),
                    most = say("{} ({})", high.text("speedup"), high.text("size"));
        parts.push_back(say("{} in {}{}", low.index == high.index ? least : least + " to " + most, run_type,
                            low.number("speedup") < 1 ? " (below 1x, fused is slower)" : ""));
    }
    text += parts.empty()
                ? ", no size ran in both modes."
                : ", mode fused, whose kernels we fused by hand, has a speedup over eager of " + list_of(parts) + ".";
    Rows forward = rows_with("forward"), steps = rows_with(step_type);
    if (forward.size() > 1) {
        TableRow first = forward.front(), last = forward.back();
        bool falls = last.number("speedup") < first.number("speedup");
        text += say(" The forward's speedup {} from {} for {} to {} for {}{}.",
                    falls_or_rises(first.number("speedup"), last.number("speedup")), first.text("speedup"),
                    first.text("size"), last.text("speedup"), last.text("size"),
                    falls ? ": the matrix products, which are the same in both modes, take more of the time" : "");
    }
    if (!steps.empty()) {
        std::string size = steps.back().text("size");
        TableRow before = row_of(table, {{"size", size}, {"run_type", "forward+backward"}});
        auto optimizer = [&](const char* column) { return steps.back().number(column) - before.number(column); };
        double eager = optimizer("vanilla (ms)"), fused = optimizer("compiled (ms)");
        if (eager > 0 && fused > 0) {
            text += say(" The optimizer, which is a step without forward+backward, goes from {} to {} ms for {}.",
                        number(eager, "%.1f"), number(fused, "%.1f"), size);
        }
    }
    Rows oom = rows_where(rows_of(table), [](auto& row) {
        return begins(row.text("vanilla (ms)"), "OOM") || begins(row.text("compiled (ms)"), "OOM");
    });
    if (!oom.empty()) {
        text += say(" Not compared, because one mode ran out of memory: {}.", list_of(values_of(oom, "size")));
    }
    return text;
}
Answers answer_torch_compile(const Tables& tables) {
    Answers answers;
    if (const Table* table = table_with(tables, {"torch_compile (a)"})) {
        answers.push_back({"a", attention_compiled(*table)});
    }
    Tables models = tables_with(tables, {"torch_compile (b)"});
    for (const Table& table : models) {
        std::string which = models.size() > 1 ? ", " + value_in(table, "precision ", ",") : "";
        answers.push_back({"b" + which, model_compiled(table) + scaled_down(table)});
    }
    return answers;
}

// ---------------------------------------------------------------------------------------------------------------------
// 1.3.1 weighted_sum

Answers answer_weighted_sum(const Tables& tables) {
    const Table* table = table_with(tables, {"weighted_sum"});
    if (!table) { return {}; }
    std::string text;
    for (const std::string& device : values_of(rows_of(*table), "device")) {
        Rows rows = with_number(rows_of(*table, {{"device", device}}), "backward ms");
        TableRow most, wrong = largest_of(rows, "max error");
        for (const TableRow& row : rows) {
            auto numbers = [](const TableRow& r) { return r.number("N") * r.number("D"); };
            if (!most || numbers(row) > numbers(most)) { most = row; }
        }
        if (!most || !wrong) { continue; }
        auto rate = [&](const char* ms) {  // in the column after the time: two columns are named GB/s
            size_t at = std::find(table->columns.begin(), table->columns.end(), ms) - table->columns.begin();
            const std::vector<std::string>& cells = table->rows[most.index];
            return at + 1 < cells.size() ? cells[at + 1] : "unknown";
        };
        text +=
            say("{}On {}, N {} with D {} takes {} ms forward, at {} GB/s, and {} ms backward, at {} GB/s, and the "
                "largest error of all sizes against fp64 is {}.",
                text.empty() ? "" : " ", device, most.text("N"), most.text("D"), most.text("forward ms"),
                rate("forward ms"), most.text("backward ms"), rate("backward ms"), wrong.text("max error"));
    }
    if (text.empty()) { return {}; }
    return {{"", text +
                     " Per number of x, forward does two FLOPs and reads 4 bytes; backward does three, reads 4 bytes "
                     "and writes 4: memory bounds both, and so GB/s is the rate to look at." +
                     scaled_down(*table)}};
}

// ---------------------------------------------------------------------------------------------------------------------
// 1.3.2 flash_forward and flash_backward

static bool is_kernel(const TableRow& row) {  // a flash kernel on a GPU
    std::string name = row.text("implementation");
    return name != "reference" && name != "naive" && name != "fused" && name != "tiled";
}
// The rows of the handout's test.
static Rows handouts_test(const Rows& rows, const std::string& causal) {
    return rows_where(rows, [&](const TableRow& row) {
        return row.text("B") == "4" && row.text("Tq") == "128" && row.text("Tk") == "128" && row.text("D") == "64" &&
               (causal.empty() || row.text("causal") == causal);
    });
}
// "float32 (flash_fp32): 4.0e-07 in O and 4.8e-07 in L; bfloat16 (...): ...": the largest of each dtype's rows.
static std::string errors_of(const Rows& rows, const std::vector<std::string>& outputs) {
    std::string text;
    for (const std::string& dtype : values_of(rows, "dtype")) {
        Rows same = rows_where(rows, [&](auto& row) { return row.text("dtype") == dtype; });
        std::vector<std::string> errors;
        for (const std::string& output : outputs) {
            if (TableRow worst = largest_of(same, output)) { errors.push_back(worst.text(output) + " in " + output); }
        }
        if (errors.empty()) { continue; }
        text += say("{}{} ({}): {}", text.empty() ? "" : "; ", dtype, list_of(values_of(same, "implementation")),
                    list_of(errors));
    }
    return text;
}
static std::string checks_passed(const Table& table) {
    Rows all = rows_of(table), wrong = rows_where(all, [](auto&row) { return row.text("status") != "ok"; });
    std::string text;
    if (wrong.empty()) {
        text = say("All {} checks of the table pass", std::to_string(all.size()));
    } else {
        const TableRow& first = wrong.front();
        text = say("Checks of the table that fail: {} of {}, first {} in {} at Tq {}, Tk {}, D {}",
                   std::to_string(wrong.size()), std::to_string(all.size()), first.text("implementation"),
                   first.text("dtype"), first.text("Tq"), first.text("Tk"), first.text("D"));
    }
    return text +
           "; a check passes if |error| <= 1e-2 + 1e-2 |reference| for each number, so an error above 1e-2 can pass." +
           scaled_down(table);
}
Answers answer_flash_forward(const Tables& tables) {
    const Table* table = table_with(tables, {"flash_forward"});
    if (!table) { return {}; }
    Rows all = rows_of(*table), tiled = rows_of(*table, {{"implementation", "tiled"}}),
         kernels = rows_where(all, is_kernel);
    auto tested = [&](const std::string& causal) {  // of both, the plain version and the kernels: one of them is here
        return handouts_test(kernels.empty() ? tiled : kernels, causal);
    };
    auto found = [](const Rows& rows, const char* test, const char* missing) {
        std::string errors = errors_of(rows, {"O", "L"});
        return errors.empty()
                   ? std::string(missing)
                   : say("The largest errors in the handout's test (batch 4, S 128, D 64, {}): {}.", test, errors);
    };
    return {
        {"a", "The plain tiled forward is `tiled` here, FlashAttention-2 in C++ without a kernel. " +
                  found(handouts_test(tiled, "no"), "not causal",
                        "It runs on the CPU, and this table has no row of it: --device cpu checks it.")},
        {"b", "A block of a kernel works on one tile of queries of one head and loops over the tiles of keys. " +
                  found(handouts_test(kernels, "no"), "not causal",
                        "This table has no kernel's row, because kernels need a GPU.")},
        {"c", found(tested("yes"), "causal", "This table has no row of the handout's test with a causal mask.") +
                  " The handout adds -1e6 to a masked score, ours becomes -inf: both give the probability 0, because "
                  "each query sees at least key 0. " +
                  checks_passed(*table)},
    };
}
Answers answer_flash_backward(const Tables& tables) {
    const Table* table = table_with(tables, {"flash_backward"});
    if (!table) { return {}; }
    const std::vector<std::string> gradients = {"dQ", "dK", "dV"};
    auto flash = [](auto& row) { return is_kernel(row) || row.text("implementation") == "tiled"; };
    std::string errors = errors_of(rows_where(handouts_test(rows_of(*table), ""), flash), gradients);
    std::string text =
        errors.empty()
            ? "This table has no row of the handout's test for a flash backward."
            : say("The largest errors in the handout's test (batch 4, S 128, D 64, causal and not): {}.", errors);
    return {{"", text + " Backward computes P again, from L, and takes D = rowsum(O dO) in place of rowsum(P dP). " +
                     checks_passed(*table)}};
}

// ---------------------------------------------------------------------------------------------------------------------
// 1.3.2 flash_benchmarking

// "93.93 times (D 16), 80.44 times (D 32)": each D at the longest length at which both ran.
static std::string gains_at_the_end(const Rows& rows, const std::string& longest) {
    std::vector<std::string> items;
    for (const std::string& D : values_of(rows, "D")) {
        TableRow last =
            largest_of(with_number(rows_where(rows, [&](auto& row) { return row.text("D") == D; }), "x Tot"), "Seq");
        if (!last) { continue; }
        items.push_back(
            say("{} (D {}{})", last.text("x Tot"), D, last.text("Seq") == longest ? "" : ", at S " + last.text("Seq")));
    }
    return list_of(items);
}
// "in float32 at S 2048 with D 64; flash is faster from S 4096 on with D 64": where flash is not faster, D by D.
static std::string losses_of(const Rows& rows, const std::string& dtype) {
    std::vector<std::string> where, after;
    for (const std::string& D : values_of(rows, "D")) {
        Rows both = with_number(rows_where(rows, [&](auto& row) { return row.text("D") == D; }), "x Tot");
        Rows lost = rows_where(both, [](auto& row) { return row.number("x Tot") <= 1; });
        if (lost.empty()) { continue; }
        double S = largest_of(lost, "Seq").number("Seq");
        where.push_back(say("S {} with D {}", list_of(values_of(lost, "Seq")), D));
        TableRow next = smallest_of(rows_where(both, [&](auto& row) { return row.number("Seq") > S; }), "Seq");
        after.push_back(next ? say("from S {} on with D {}", next.text("Seq"), D)
                             : say("at no longer S of this table with D {}", D));
    }
    return where.empty() ? "" : say("in {} at {} (flash is faster {})", dtype, list_of(where), list_of(after));
}
Answers answer_flash_benchmarking(const Tables& tables) {
    const Table* table = table_with(tables, {"flash_benchmarking"});
    if (!table || table->rows.empty()) { return {}; }
    Rows all = rows_of(*table);
    std::string longest = largest_of(all, "Seq").text("Seq"), memory;
    std::vector<std::string> gains, losses;
    for (const std::string& dtype : values_of(all, "dtype")) {
        Rows rows = rows_of(*table, {{"dtype", dtype}});
        if (with_number(rows, "x Tot").empty()) { continue; }
        Rows last = with_number(rows_of(*table, {{"dtype", dtype}, {"Seq", longest}}), "x Tot");
        std::string alone = last.empty() ? ""
                                         : say(" (forward alone {}, backward alone {})", span_of(last, "x Fwd", "%.2f"),
                                               span_of(last, "x Bwd", "%.2f"));
        gains.push_back(say("{} times in {}{}", gains_at_the_end(rows, longest), dtype, alone));
        std::string lost = losses_of(rows, dtype);
        if (!lost.empty()) { losses.push_back(lost); }
    }
    Rows oom = rows_where(all, [](auto& row) { return begins(row.text("Naive Tot"), "OOM"); });
    if (TableRow first = smallest_of(oom, "Seq")) {
        memory = say(" Rows where naive runs out of memory: {}, first at S {}, where flash takes {}{}.",
                     std::to_string(oom.size()), first.text("Seq"), first.text("Flash Tot"),
                     std::isnan(first.number("Flash Tot")) ? "" : " ms");
    }
    if (gains.empty()) { return {{"a", "No row has times of both naive and flash." + memory + scaled_down(*table)}}; }
    bool at_others = list_of(gains).find(", at S ") != std::string::npos;
    Answers answers = {
        {"a", say("At S {}{}, flash runs forward and backward faster than naive, our attention with one kernel per "
                  "operation, by these factors: {}. {}.",
                  longest, at_others ? ", or where given at the longest S at which both ran" : "", list_of(gains),
                  losses.empty() ? "Flash is faster in every row" : "Naive is as fast or faster " + list_of(losses)) +
                  memory + scaled_down(*table)}};
    if (!losses.empty() && table->caption.find("CUDA ") != std::string::npos) {
        answers.push_back({"a, why",
                           "Flash is slower there because one head of S positions gives it only S / 64 blocks, which "
                           "leave multiprocessors idle; naive spreads S^2 numbers over the whole card."});
    }
    return answers;
}

// ---------------------------------------------------------------------------------------------------------------------
// 1.3.3 flash_leaderboard

Answers answer_flash_leaderboard(const Tables& tables) {
    const Table* table = table_with(tables, {"flash_leaderboard"});
    if (!table) { return {}; }
    const char *both = "forward+backward ms", *name = "implementation";
    auto is_ours = [&](const TableRow& row) { return begins(row.text(name), "ours: "); };
    Rows here = rows_where(rows_of(*table), is_ours);
    TableRow ours = smallest_of(here, both);
    if (here.empty()) { return {}; }
    if (!ours) {
        return {{"", say("None of our implementations ran: {}.", here.front().text(both)) + scaled_down(*table)}};
    }
    std::string text =
        say("Our {}, {}, takes {} ms for forward and backward ({} and {} ms alone): {} "
            "TFLOP/s, {} of this device's rate for matrix products ({} TFLOP/s).",
            here.size() > 1 ? "fastest implementation" : "only implementation here", ours.text(name).substr(6),
            ours.text(both), ours.text("forward ms"), ours.text("backward ms"), ours.text("TFLOP/s"),
            ours.text("of the matmul rate"), value_in(*table, "multiplies matrices at ", " TFLOP/s"));
    auto compared = [&](const TableRow& other) {
        return say("{} ms in an earlier run, {} times ours", other.text(both),
                   number(other.number(both) / ours.number(both), "%.2f"));
    };
    Rows others = rows_where(rows_of(*table), [&](auto& row) { return !is_ours(row); });
    if (others.empty()) {
        return {{"", text +
                         " This is not the handout's shape (16 heads, D 64, S 16384, bf16, causal), so no published "
                         "time belongs beside it." +
                         scaled_down(*table)}};
    }
    auto same_card = [&](const TableRow& row) {
        return !row.text("card").empty() && table->caption.find(row.text("card")) != std::string::npos;
    };
    auto of_class = [&](const TableRow& row) { return begins(row.text(name), "class leaderboard"); };
    TableRow beside = smallest_of(rows_where(others, same_card), both),
             first = smallest_of(rows_where(others, of_class), both);
    text += beside ? say(" The fastest other entry from the same kind of card, {}, is {} with {}.", beside.text("card"),
                         beside.text(name), compared(beside))
                   : " No other entry is from this kind of card.";
    if (first) {
        text +=
            say(" The fastest class entry ({}) has {}, on {} card, {}, and by another rule: the handout asks for "
                "Triton, ours is CUDA.",
                first.text(name), compared(first), same_card(first) ? "the same" : "another", first.text("card"));
    }
    return {{"", text + scaled_down(*table)}};
}
