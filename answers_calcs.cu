// answers_calcs.cu: the answers of what only the 2026 handout asks: its section 8, and gradient checkpointing.
// Equations, numbers and results are the tables' own.
#include "answers.h"

#include <cmath>

static TableRow quantity(const Table& table, const std::string& name) { return row_of(table, {{"quantity", name}}); }
static std::string result(const TableRow& row) {
    return number(row.number("value"), "%.4g") + (row.text("unit").empty() ? "" : " " + row.text("unit"));
}
// "N - 1 = 8 - 1 = 7 devices"
static std::string equation(const Table& table, const std::string& name) {
    TableRow row = quantity(table, name);
    return row.text("formula") + " = " + row.text("with numbers") + " = " + result(row);
}
// Of two rows in ms, which is longer.
static std::string limit(const Table& table, const std::string& computation, const std::string& communication) {
    TableRow compute = quantity(table, computation), communicate = quantity(table, communication);
    bool compute_bound = compute.number("value") >= communicate.number("value");
    return say("the products take {} and communication {}, so {} is the limit", result(compute), result(communicate),
               compute_bound ? "computation" : "communication");
}
static std::string devices(const Table& table) { return value_in(table, "TFLOP/s, ", ";"); }  // "N_FSDP = 4, N_TP = 2"

Answers answer_alternate_ring_all_reduce(const Tables& tables) {
    const Table* table = table_with(tables, {"alternate_ring_all_reduce"});
    if (!table) { return {}; }
    return {{"", say("It takes {}: in each of N - 1 steps each device sends a whole tensor of S bytes. That is a ring "
                     "all-gather of all N tensors. Reduce-scatter and all-gather send parts of S / N bytes instead, in "
                     "2 (N - 1) steps, and take {}; the alternative takes {} times as long.",
                     equation(*table, "time"), equation(*table, "time, reduce-scatter and all-gather"),
                     equation(*table, "times as long"))}};
}

Answers answer_data_parallel_calcs(const Tables& tables) {
    const Table* table = table_with(tables, {"data_parallel_calcs"});
    if (!table) { return {}; }
    return {
        {"a", say("{}. Backward has six products, two for each product of forward: dz, two terms of dx, dW1, dW2 and "
                  "dW3. Each takes 2 (B / N_DP) D D_FF on a device's B / N_DP rows.",
                  equation(*table, "FLOPs per device, backward"))},
        {"b", say("{}. The three gradients have 3 D D_FF elements of 2 bytes, and a ring all-reduce sends 2 (N_DP - 1) "
                  "/ N_DP of these 6 D D_FF bytes out of each device.",
                  equation(*table, "communication time, backward"))},
        {"c", say("{}. The products take 12 B D D_FF / (N_DP C); that is at least the time in (b) as long as "
                  "(N_DP - 1) / W <= B / C, where D and D_FF cancel. With {}, {}.",
                  equation(*table, "most devices, backward"), devices(*table),
                  limit(*table, "computation time, backward", "communication time, backward"))}};
}

Answers answer_fsdp_calcs(const Tables& tables) {
    const Table* table = table_with(tables, {"fsdp_calcs"});
    if (!table) { return {}; }
    return {
        {"a",
         say("Backward: {}, in six products. Forward: {}, in three. A gathered weight is whole, so each product is "
             "that of data parallelism: 2 (B / N_FSDP) D D_FF.",
             equation(*table, "FLOPs per device, backward"), equation(*table, "FLOPs per device, forward"))},
        {"b", say("Backward: {}; it gathers the three weights, 6 D D_FF bytes, and reduce-scatters as many bytes of "
                  "gradients. Forward: {}; it gathers the weights only. Each collective sends (N_FSDP - 1) / N_FSDP of "
                  "its bytes out of each device.",
                  equation(*table, "communication time, backward"), equation(*table, "communication time, forward"))},
        {"c", say("Backward: {}, from (N_FSDP - 1) / W <= B / C. Forward: the same, because it has half of backward's "
                  "products and half of its bytes. With {}, in backward {}; in forward {}.",
                  equation(*table, "most devices, backward"), devices(*table),
                  limit(*table, "computation time, backward", "communication time, backward"),
                  limit(*table, "computation time, forward", "communication time, forward"))}};
}

Answers answer_tp_calcs(const Tables& tables) {
    const Table *steps = table_with(tables, {"tp_calcs (a)"}), *table = table_with(tables, {"tp_calcs: "});
    if (!steps || !table) { return {}; }
    std::vector<std::string> equations;
    for (const TableRow& row : rows_of(*steps)) {
        equations.push_back(row.text("equation") + ", " + row.text("shape"));
    }
    return {
        {"a", say("{}. y is a sum over the devices, so dY is the gradient of each device's part, and nothing is sent "
                  "before the end. The devices hold different columns of W1 and W2, so their dx(i) are parts of a sum: "
                  "one all-reduce of (B, D).",
                  join(equations, "; "))},
        {"b", say("Forward: {}, in three products of 2 B D (D_FF / N_TP). Backward: {}, in six.",
                  equation(*table, "FLOPs per device, forward"), equation(*table, "FLOPs per device, backward"))},
        {"c", say("Forward: {}, an all-reduce of y, 2 B D bytes. Backward: the same, an all-reduce of dx. Each sends "
                  "2 (N_TP - 1) / N_TP of its bytes out of each device.",
                  equation(*table, "communication time, forward"))},
        {"d", say("Backward: {}, from 4 (N_TP - 1) / W <= 12 D_FF / C, where B and D cancel. Forward: {}: half as many "
                  "products for the same bytes. With {}, in backward {}; in forward {}.",
                  equation(*table, "most devices, backward"), equation(*table, "most devices, forward"),
                  devices(*table), limit(*table, "computation time, backward", "communication time, backward"),
                  limit(*table, "computation time, forward", "communication time, forward"))}};
}

// What (d) says after "The times add": the best split, or why one axis goes.
static std::string best_split(const Table& table) {
    const std::string ab = say("with a = {} and b = {}", equation(table, "a"), equation(table, "b"));
    if (TableRow no_tp = quantity(table, "most devices, no TP")) {
        return say(
            "But {}, b is below {} and the best split has less than one device on the TP axis, so there is no TP, and "
            "{}.",
            ab, equation(table, "least b for TP to pay"), equation(table, "most devices, no TP"));
    }
    if (TableRow no_fsdp = quantity(table, "most devices, no FSDP")) {
        return say(
            "But {}, a is below {} and the best split has less than one device on the FSDP axis, so there is no FSDP, "
            "and {}.",
            ab, equation(table, "least a for FSDP to pay"), equation(table, "most devices, no FSDP"));
    }
    return say("Here Q = {}, N_FSDP = {} and N_TP = {}, so {}.", result(quantity(table, "Q")),
               equation(table, "best split, FSDP axis"), equation(table, "best split, TP axis"),
               equation(table, "most devices, not overlapped"));
}

Answers answer_fsdp_tp_calcs(const Tables& tables) {
    const Table* table = table_with(tables, {"fsdp_tp_calcs"});
    if (!table) { return {}; }
    return {
        {"a", say("{}: three products of 2 (B / N_FSDP) D (D_FF / N_TP). FSDP splits the rows of x, TP the columns of "
                  "W1 and W2 and the rows of W3.",
                  equation(*table, "FLOPs per device, forward"))},
        {"b", say("{}. FSDP gathers a TP shard of the weights, 6 D D_FF / N_TP bytes, in {}; TP all-reduces y of "
                  "B / N_FSDP rows, 2 B D / N_FSDP bytes, in {}.",
                  equation(*table, "communication time, overlapped"),
                  result(quantity(*table, "communication time, FSDP axis")),
                  result(quantity(*table, "communication time, TP axis")))},
        {"c", say("The FSDP axis has a bound in which TP does not occur: {}. The TP axis has one in which FSDP does "
                  "not occur: {}. N is at most their product: {}.",
                  equation(*table, "most devices, FSDP axis"), equation(*table, "most devices, TP axis"),
                  equation(*table, "most devices, overlapped"))},
        {"c, numbers",
         say("Without each 1 the product is {}. With {}, {}.", equation(*table, "the same without each 1"),
             devices(*table), limit(*table, "computation time, forward", "communication time, overlapped"))},
        {"d",
         say("The times add, so 3 D_FF N_FSDP + 2 B N_TP <= Q with Q = 3 B D_FF W / C + 3 D_FF + 2 B, and N_FSDP N_TP "
             "is largest where both terms are Q / 2. {} With {}, {}.",
             best_split(*table), devices(*table),
             limit(*table, "computation time, forward", "communication time, not overlapped"))}};
}

// ---------------------------------------------------------------------------------------------------------------------
// gradient_checkpointing

static std::string arrangement(const std::string& strategy) {
    return strategy == "linear nesting"
               ? "the first N - 1 blocks form a checkpoint; inside it the first N - 2 form another, and so on"
           : strategy == "recursive halves" ? "each half of the blocks is a checkpoint, and within it each half of that"
           : strategy == "none"             ? "no block is in a checkpoint"
                                            : "every k blocks are a checkpoint";
}
// The arrangement as code: x goes through `blocks`, of which checkpoint() keeps x alone and runs them again in
// backward.
static std::string sketch_of(const std::string& strategy) {
    return strategy == "linear nesting"
               ? "def run(blocks, x):\n"
                 "    if len(blocks) > 1:\n"
                 "        x = checkpoint(run, blocks[:-1], x)  # keeps x, runs again in backward\n"
                 "    return blocks[-1](x)\n"
           : strategy == "recursive halves" ? "def run(blocks, x):\n"
                                              "    if len(blocks) == 1: return blocks[0](x)\n"
                                              "    x = checkpoint(run, blocks[:len(blocks) // 2], x)\n"
                                              "    return checkpoint(run, blocks[len(blocks) // 2:], x)\n"
           : strategy == "none"             ? "def run(blocks, x):\n"
                                              "    for block in blocks:\n"
                                              "        x = block(x)\n"
                                              "    return x\n"
                                            : "def run(blocks, x):\n"
                                              "    for i in range(0, len(blocks), k):\n"
                                              "        x = checkpoint(run_all, blocks[i:i + k], x)\n"
                                              "    return x\n";
}
// "1 + h = 5 inputs, O(log N) memory; backward runs N (h + 1) - 2^h = 64 blocks again, O(N log N) compute". A count
// that is another number follows.
static std::string price(const TableRow& row) {
    auto with_count = [&](const char* formula, const char* value, const char* counted) {
        std::string text = row.text(formula), number = row.text(value), count = row.text(counted);
        return text + (text == number ? "" : " = " + number) +
               (count.empty() || count == number ? "" : " (but counted: " + count + ")");
    };
    return say("{} inputs, {} memory; backward runs {} blocks again, {} compute",
               with_count("inputs kept", "inputs", "inputs counted"), row.text("memory"),
               with_count("run again", "blocks again", "blocks again counted"), row.text("compute"));
}
static Answer best_strategy(const Table& table) {
    const char* peak = "peak MiB";
    TableRow best = smallest_of(rows_of(table), peak), none = row_of(table, {{"strategy", "none"}}),
             flat = row_of(table, {{"strategy", "flat, k = 1"}});
    if (!best || !none || !flat) { return {"a", "The table lacks a strategy or its peak."}; }
    std::string name = best.text("strategy"), kept = best.text("blocks kept");
    std::vector<std::string> different;
    for (const TableRow& row : rows_of(table)) {
        if (row.text("gradients") != "the same bits") { different.push_back(row.text("strategy")); }
    }
    if (!different.empty()) { return {"a", say("The gradients differ with {}.", list_of(different))}; }
    double gain = 100 * (1 - best.number(peak) / flat.number(peak));
    std::string text =
        say("The strategy with the least peak for {} small blocks is {}, {} MiB (without checkpoints: {}): {}. It "
            "keeps all residuals of {} at a time and {}. ",
            value_in(table, "(a): ", " blocks"), name, best.text(peak), none.text(peak), arrangement(name),
            kept == "1" ? "one block" : kept + " blocks", price(best)) +
        (gain > 0 ? say("Nesting takes {} % off the peak of k = 1 ({} MiB), and is worth its compute only where N "
                        "inputs are large beside a block's residuals.",
                        number(gain, "%.1f"), flat.text(peak))
                  : "Nesting gains nothing here.");
    return {"a", text, sketch_of(name)};
}

static std::string blocks_in(const TableRow& row) {
    std::string k = row.text("blocks per checkpoint");
    return k == "half" ? "half a block" : k == "1" ? "one block" : k + " blocks";
}
// What a step of this table took: peaks where it ran, and the time.
static std::string as_run(const Table& table, const TableRow& best) {
    TableRow row = row_of(table, {{"blocks per checkpoint", best.text("blocks per checkpoint")}}),
             none = row_of(table, {{"blocks per checkpoint", "none"}});
    double apart = 0;
    for (const TableRow& r : rows_of(table)) { apart = std::fmax(apart, std::fabs(r.number("difference %"))); }
    if (!row || std::isnan(row.number("fwbw_mean_ms"))) { return "It was not run here: its peak is a prediction."; }
    std::string price = none && none.number("fwbw_mean_ms") > 0
                            ? say("{} times the time without checkpoints", number(row.number("of none"), "%.2f"))
                            : std::string(
                                  "without checkpoints the step does not run, so we know the price only in FLOPs: one "
                                  "more forward, a third more");
    return say(
        "Measured with {}, a checkpoint of {} takes {} MiB (predictions were at most {} % off), and {} ms for forward "
        "and backward: {}.",
        value_in(table, "really run; ", ","), blocks_in(row), row.text("peak MiB"), number(apart, "%.2f"),
        row.text("fwbw_mean_ms"), price);
}
static std::string best_size(const Table& asked, const Table& run) {
    std::vector<TableRow> rows = rows_of(asked), whole;
    for (const TableRow& row : rows) {
        if (row.number("blocks per checkpoint") > 0) { whole.push_back(row); }
    }
    bool measured = (bool)smallest_of(whole, "peak MiB");
    const char* column = measured ? "peak MiB" : "predicted peak MiB";
    TableRow best = smallest_of(whole, column), half = row_of(asked, {{"blocks per checkpoint", "half"}});
    if (!best || rows.size() < 2) { return "The table has no sizes to compare."; }
    if (half && half.number(column) < best.number(column)) { best = half; }
    std::vector<std::string> others;
    for (const TableRow& row : rows) {
        bool near = row.index + 1 == best.index || row.index == best.index + 1;
        bool none = row.text("blocks per checkpoint") == "none";
        if (near || none) {
            others.push_back(row.text(column) + (none ? " without checkpoints" : " with " + blocks_in(row)));
        }
    }
    std::string text = say("The best checkpoint is {}: a step's peak is {} MiB{}; it is {}. ", blocks_in(best),
                           best.text(column), measured ? "" : " (predicted)", list_of(others));
    if (whole.size() > 1) {
        const TableRow &a = whole[whole.size() - 2], &b = whole.back();
        const char* k = "blocks per checkpoint";
        double more = (b.number("predicted peak MiB") - a.number("predicted peak MiB")) / (b.number(k) - a.number(k));
        double kept = (b.number("of it activations") - a.number("of it activations")) / (b.number(k) - a.number(k));
        text += say("Each further block in a checkpoint adds {} MiB", number(more, "%.0f"));
        text += kept > more ? say(": {} of residuals, minus {} of gradients that do not exist yet. ",
                                  number(kept, "%.0f"), number(kept - more, "%.0f"))
                            : ". ";
    }
    return text + as_run(run, best) + scaled_down(run);
}

Answers answer_gradient_checkpointing(const Tables& tables) {
    Answers answers;
    if (const Table* table = table_with(tables, {"gradient_checkpointing (a)"})) {
        answers.push_back(best_strategy(*table));
    }
    Tables sizes = tables_with(tables, {"gradient_checkpointing (b)"});  // the asked size, then perhaps a smaller one
    if (!sizes.empty()) { answers.push_back({"b", best_size(sizes[0], sizes.back())}); }
    return answers;
}
