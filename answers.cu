// answers.cu: the handout's questions, answered from the tables that a command has printed.
//
// An answer is a function of the tables alone, so a recorded table gives the same answer as the run that made it: pages
// are answered without the machine that they were measured on, and tests pin the sentences on recorded tables.
#include "answers.h"

#include <cmath>
#include <cstdlib>
#include <sstream>

// ---------------------------------------------------------------------------------------------------------------------
// Reading tables

static std::vector<std::string> cells_of(const std::string& line) {  // "| a | b \\| c |"
    std::vector<std::string> cells;
    std::string cell;
    for (size_t i = 1; i < line.size(); i++) {
        if (line[i] == '\\' && line[i + 1] == '|') {
            cell += line[++i];
        } else if (line[i] != '|') {
            cell += line[i];
        } else {
            size_t first = cell.find_first_not_of(' '), last = cell.find_last_not_of(' ');
            cells.push_back(first == std::string::npos ? "" : cell.substr(first, last + 1 - first));
            cell.clear();
        }
    }
    return cells;
}
Tables tables_in(const std::string& markdown) {
    Tables tables;
    std::istringstream lines(markdown);
    std::string caption;
    bool inside = false;
    for (std::string line; std::getline(lines, line);) {
        bool row = line.compare(0, 1, "|") == 0;
        if (row && !inside) {
            tables.push_back({caption, cells_of(line), {}});
        } else if (row && line.compare(0, 3, "| -") != 0) {
            tables.back().rows.push_back(cells_of(line));
        } else if (!row && !line.empty()) {
            caption = line;
        }
        inside = row;
    }
    return tables;
}
static bool holds_all(const std::string& caption, const std::vector<std::string>& words) {
    return std::all_of(words.begin(), words.end(), [&](auto& word) { return caption.find(word) != std::string::npos; });
}
Tables tables_with(const Tables& tables, const std::vector<std::string>& words) {
    Tables found;
    for (const Table& table : tables) {
        if (holds_all(table.caption, words)) { found.push_back(table); }
    }
    return found;
}
const Table* table_with(const Tables& tables, const std::vector<std::string>& words) {
    for (const Table& table : tables) {
        if (holds_all(table.caption, words)) { return &table; }
    }
    return nullptr;
}
std::string TableRow::text(const std::string& column) const {
    // Tables that were recorded earlier have these columns under another name.
    static const std::map<std::string, std::string> earlier = {
        {"launches per pass", "launches a pass"},
        {"MB per step", "MB a step"},
        {"MB sent per step", "MB sent a step"},
        {"2 bytes per matmul weight", "2 bytes a matmul weight"}};
    if (!table) { return ""; }
    size_t at = std::find(table->columns.begin(), table->columns.end(), column) - table->columns.begin();
    auto renamed = earlier.find(column);
    if (at == table->columns.size() && renamed != earlier.end()) { return text(renamed->second); }
    return at < table->rows[index].size() ? table->rows[index][at] : "";
}
double TableRow::number(const std::string& column) const {
    std::string cell = text(column);
    char* end = nullptr;
    double value = strtod(cell.c_str(), &end);
    return end == cell.c_str() || !std::isfinite(value) ? NAN : value;
}
std::vector<TableRow> rows_of(const Table& table, const std::vector<Cell>& with) {
    std::vector<TableRow> rows;
    for (size_t i = 0; i < table.rows.size(); i++) {
        TableRow row{&table, i};
        if (std::all_of(with.begin(), with.end(), [&](auto& cell) { return row.text(cell.column) == cell.text; })) {
            rows.push_back(row);
        }
    }
    return rows;
}
TableRow row_of(const Table& table, const std::vector<Cell>& with) {
    std::vector<TableRow> rows = rows_of(table, with);
    return rows.empty() ? TableRow() : rows[0];
}
static TableRow extreme_of(const std::vector<TableRow>& rows, const std::string& column, double sign) {
    TableRow best;
    for (const TableRow& row : rows) {
        double value = sign * row.number(column);
        if (!std::isnan(value) && (!best || value > sign * best.number(column))) { best = row; }
    }
    return best;
}
TableRow largest_of(const std::vector<TableRow>& rows, const std::string& column) {
    return extreme_of(rows, column, 1);
}
TableRow smallest_of(const std::vector<TableRow>& rows, const std::string& column) {
    return extreme_of(rows, column, -1);
}
std::string value_in(const Table& table, const std::string& before, const std::string& after) {
    size_t from = table.caption.find(before);
    if (from == std::string::npos) { return ""; }
    from += before.size();
    return table.caption.substr(from, table.caption.find(after, from) - from);
}
std::string scaled_down(const Table& table) {
    std::string what = value_in(table, "scaled down: ", ";");
    return what.empty() ? "" : " This run was scaled down: " + what + ".";
}
std::string list_of(const std::vector<std::string>& items) {
    std::string list;
    for (size_t i = 0; i < items.size(); i++) {
        list += (i == 0 ? "" : i + 1 == items.size() ? " and " : ", ") + items[i];
    }
    return list;
}
std::string number(double value, const char* format) {
    char text[64];
    snprintf(text, sizeof text, format, value);
    return text;
}
std::string span(double least, double most, const char* format) {
    std::string a = number(least, format), b = number(most, format);
    return a == b ? a : a + " to " + b;
}
std::string say_all(const std::string& sentence, const std::vector<std::string>& parts) {
    std::string text;
    size_t next = 0, from = 0, at;
    for (; (at = sentence.find("{}", from)) != std::string::npos; from = at + 2) {
        text += sentence.substr(from, at - from) + parts.at(next++);
    }
    return text + sentence.substr(from);
}

// ---------------------------------------------------------------------------------------------------------------------
// 1.1.5 mixed_precision_accumulation

Answers answer_mixed_precision_accumulation(const Tables& tables) {
    const Table* table = table_with(tables, {"mixed_precision_accumulation"});
    if (!table) { return {}; }
    auto sum = [&](const char* what) { return row_of(*table, {{"what", what}}); };
    TableRow fp32 = sum("fp32 += fp32"), fp16 = sum("fp16 += fp16"), mixed = sum("fp32 += fp16"),
             bf16 = sum("bf16 += bf16");
    return {
        {"", say("The fp32 sum of 1000 times 0.01 is {}, the fp16 sum {}, and the fp32 sum of fp16 addends {}. fp16 "
                 "has no 0.01: rounding the addend alone costs {}, and widening it to fp32 before the addition does "
                 "not bring that back. An fp16 sum also rounds at each addition (its error is {}), and a bf16 sum "
                 "stops at {} after {} additions, where 0.01 is less than half of its last bit: so factors may have 16 "
                 "bits, but sums "
                 "are kept in fp32.",
                 fp32.text("sum"), fp16.text("sum"), mixed.text("sum"), mixed.text("of it: rounding the addend"),
                 fp16.text("error against 10"), number(bf16.number("sum"), "%g"), bf16.text("stops after"))}};
}

// ---------------------------------------------------------------------------------------------------------------------
// 2.4 communication_accounting

Answers answer_communication_accounting(const Tables& tables) {
    const Table* table = table_with(tables, {"communication_accounting"});
    if (!table) { return {}; }
    auto row = [&](const std::string& quantity, const std::string& unit = "") {  // the first that begins like that
        for (const TableRow& r : rows_of(*table)) {
            bool begins = r.text("quantity").compare(0, quantity.size(), quantity) == 0;
            if (begins && (unit.empty() || r.text("unit") == unit)) { return r; }
        }
        return TableRow();
    };
    auto value = [&](const std::string& quantity, const std::string& unit = "") {
        return row(quantity, unit).text("value");
    };
    auto between = [](const std::string& text, const std::string& before, const std::string& after) {
        size_t from = text.find(before) + before.size();
        return text.substr(from, text.find(after, from) - from);
    };
    auto whole_cards = [&](const TableRow& r) { return number(std::ceil(r.number("value")), "%.0f"); };
    auto named = [&](const TableRow& r) { return r.text("quantity"); };
    std::vector<TableRow> gpus, devices;
    for (const TableRow& r : rows_of(*table)) {
        if (named(r).find("GPUs of") == 0) { gpus.push_back(r); }
        if (named(r).find("least N") == 0) { devices.push_back(r); }
    }
    Answers answers = {
        {"a", say("P = 2 D F L = {} parameters take 4 P = {} GB ({} GiB) in fp32; with their gradients and AdamW's two "
                  "moments they take 16 P = {} GB ({} GiB). Backward saves 2 L (D + F) = {} bytes per token in bf16. "
                  "16 P is the memory of {} GPUs of {}, or of {} if a GB is taken as 2^30 bytes.",
                  value("parameters P"), value("master weights", "GB"), value("master weights", "GiB"),
                  value("weights, gradients", "GB"), value("weights, gradients", "GiB"),
                  value("saved for backward", "bytes"), whole_cards(gpus[0]), between(named(gpus[0]), "of ", " for"),
                  whole_cards(gpus[1]))},
        {"b",
         say("A device holds (16 P + A/2) / N + A/2 bytes, where A is what its tokens save for backward, and half of "
             "A is sharded over the N devices, like the weights. Without activations that is below {} from N = {} "
             "devices on; with {}, from N = {}. No N is enough from {} tokens per device on, because A/2 alone "
             "fills the memory.",
             between(named(devices[0]), "below ", ","), devices[0].text("value"), between(named(devices[1]), ", ", "!"),
             devices[1].text("value"), value("tokens per device from which"))},
    };
    std::string sum = value("least batch, axes not overlapped"), limit = value("TP is compute bound"),
                X = value_in(*table, "X = ", " "), Y = value_in(*table, "Y = ", " ");
    if (sum == "none") {
        answers.push_back({"c", say("No batch is compute bound with X = {} and Y = {}: the all-reduces of tensor "
                                    "parallelism take longer than the products, at any batch. Y has to be below "
                                    "M_Y F / alpha = {}.",
                                    X, Y, limit)});
    } else {
        answers.push_back(
            {"c", say("The forward is compute bound from B = (alpha X / M_X) / (1 - alpha Y / (M_Y F)) = {} tokens "
                      "overall, {} per chip; alpha = C / W = {} FLOP per byte. We recommend this reading, in which "
                      "FSDP's gathers and tensor parallelism's all-reduces take turns, because it holds for every "
                      "schedule. Where both axes communicate at once, each over its own links, the slower one decides, "
                      "and alpha X / M_X = {} tokens ({} per chip) are enough.",
                      sum, value("least batch, axes not overlapped, per chip"), value("alpha"),
                      value("least batch, axes overlapped"), value("least batch, axes overlapped, per chip"))});
    }
    TableRow best = smallest_of(rows_of(*table, {{"part", "d"}, {"formula", "as in c"}}), "value");
    std::string whole = best ? say("; the best split of these chips into whole numbers, {}, needs {} tokens",
                                   between(named(best), "least batch, ", ", not"), best.text("value"))
                             : "";
    answers.push_back(
        {"d",
         say("The split can be chosen: the least batch is 4 alpha^2 / (M_X M_Y F) = {} tokens per chip, at X = 2 "
             "alpha N / (M_Y F){}. Communication on both axes at once divides it by 4: alpha^2 / (M_X M_Y F) = {}. "
             "Fewer bytes (8-bit weights halve alpha X / M_X), more links per axis and pipeline stages lower it "
             "further; gradient accumulation and activation checkpointing do not, because each micro-batch gathers "
             "the weights again.",
             value("least batch per chip, split free, not overlapped"), whole,
             value("least batch per chip, split free, overlapped"))});
    return answers;
}

// ---------------------------------------------------------------------------------------------------------------------
// All problems

Answers answers_of(const std::string& command, const Tables& tables) {
    static const std::map<std::string, Answers (*)(const Tables&)> functions = {
        {"mixed_precision_accumulation", answer_mixed_precision_accumulation},
        {"distributed_communication_single_node", answer_distributed_communication_single_node},
        {"naive_ddp", answer_naive_ddp},
        {"naive_ddp_benchmarking", answer_naive_ddp_benchmarking},
        {"minimal_ddp_flat_benchmarking", answer_minimal_ddp_flat_benchmarking},
        {"ddp_overlap_individual_parameters", answer_ddp_overlap_individual_parameters},
        {"ddp_overlap_individual_parameters_benchmarking", answer_ddp_overlap_individual_parameters_benchmarking},
        {"ddp_overlap_bucketed", answer_ddp_overlap_bucketed},
        {"ddp_bucketed_benchmarking", answer_ddp_bucketed_benchmarking},
        {"communication_accounting", answer_communication_accounting},
        {"alternate_ring_all_reduce", answer_alternate_ring_all_reduce},
        {"data_parallel_calcs", answer_data_parallel_calcs},
        {"fsdp_calcs", answer_fsdp_calcs},
        {"tp_calcs", answer_tp_calcs},
        {"fsdp_tp_calcs", answer_fsdp_tp_calcs},
        {"gradient_checkpointing", answer_gradient_checkpointing},
        {"benchmarking_script", answer_benchmarking_script},
        {"nsys_profile", answer_nsys_profile},
        {"benchmarking_mixed_precision", answer_benchmarking_mixed_precision},
        {"memory_profiling", answer_memory_profiling},
        {"optimizer_state_sharding", answer_optimizer_state_sharding},
        {"optimizer_state_sharding_accounting", answer_optimizer_state_sharding_accounting},
        {"fsdp", answer_fsdp},
        {"fsdp_accounting", answer_fsdp_accounting},
        {"scaling", answer_scaling},
        {"pytorch_attention", answer_pytorch_attention},
        {"torch_compile", answer_torch_compile},
        {"weighted_sum", answer_weighted_sum},
        {"flash_forward", answer_flash_forward},
        {"flash_backward", answer_flash_backward},
        {"flash_benchmarking", answer_flash_benchmarking},
        {"flash_leaderboard", answer_flash_leaderboard},
        {"leaderboard", answer_leaderboard},
    };
    auto at = functions.find(command);
    return at == functions.end() ? Answers() : at->second(tables);
}
