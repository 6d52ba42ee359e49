// answers.h: what answers.cu and its neighbours share: reading a command's tables, saying numbers.
#pragma once
#include "cs336.h"

using Tables = std::vector<Table>;
using Answers = std::vector<Answer>;

Tables tables_in(const std::string& markdown);  // as the program prints them: caption, empty line, table
// Tables whose caption holds all of these words.
Tables tables_with(const Tables& tables, const std::vector<std::string>& words);
const Table* table_with(const Tables& tables, const std::vector<std::string>& words);  // null: there is none

struct TableRow {
    const Table* table = nullptr;  // null: there is no such row
    size_t index = 0;
    explicit operator bool() const { return table; }
    // The cell in this column; "" where the row or the column is missing.
    std::string text(const std::string& column) const;
    // The number that the cell begins with ("1.91x": 1.91, "34.1%": 34.1); NaN where there is none, as in "OOM".
    double number(const std::string& column) const;
};
struct Cell {
    std::string column, text;
};
std::vector<TableRow> rows_of(const Table& table, const std::vector<Cell>& with = {});
TableRow row_of(const Table& table, const std::vector<Cell>& with);  // the first such row
// The row with the largest or smallest number in this column; rows without a number do not take part.
TableRow largest_of(const std::vector<TableRow>& rows, const std::string& column);
TableRow smallest_of(const std::vector<TableRow>& rows, const std::string& column);

std::string value_in(const Table& table, const std::string& before, const std::string& after);  // of the caption
// "" or, for a run that was shrunk, a sentence that says so.
std::string scaled_down(const Table& table);
std::string list_of(const std::vector<std::string>& items);       // "a", "a and b", "a, b and c"
std::string number(double value, const char* format);             // number(3.366, "%.1f"): "3.4"
std::string span(double least, double most, const char* format);  // "3.4 to 58.3", or "3.4" where both print alike
// say("{} of {}", a, b): the parts take the places of the braces, in order.
std::string say_all(const std::string& sentence, const std::vector<std::string>& parts);
template <class... Part>
std::string say(const std::string& sentence, const Part&... part) {
    return say_all(sentence, {part...});
}

// One function per problem. Each gives the answers to the handout's questions, by its letters, from the tables that its
// command printed. An answer has 1 to 3 sentences, so a letter that asks several things has several: "a", "a, growth".
// What the tables do not hold, the answer says.
Answers answer_mixed_precision_accumulation(const Tables& tables);  // answers.cu
Answers answer_communication_accounting(const Tables& tables);
Answers answer_alternate_ring_all_reduce(const Tables& tables);  // answers_calcs.cu
Answers answer_data_parallel_calcs(const Tables& tables);
Answers answer_fsdp_calcs(const Tables& tables);
Answers answer_tp_calcs(const Tables& tables);
Answers answer_fsdp_tp_calcs(const Tables& tables);
Answers answer_gradient_checkpointing(const Tables& tables);
Answers answer_benchmarking_script(const Tables& tables);  // answers_step.cu
Answers answer_nsys_profile(const Tables& tables);
Answers answer_benchmarking_mixed_precision(const Tables& tables);
Answers answer_memory_profiling(const Tables& tables);
Answers answer_distributed_communication_single_node(const Tables& tables);  // answers_ddp.cu
Answers answer_naive_ddp(const Tables& tables);
Answers answer_naive_ddp_benchmarking(const Tables& tables);
Answers answer_minimal_ddp_flat_benchmarking(const Tables& tables);
Answers answer_ddp_overlap_individual_parameters(const Tables& tables);
Answers answer_ddp_overlap_individual_parameters_benchmarking(const Tables& tables);
Answers answer_ddp_overlap_bucketed(const Tables& tables);
Answers answer_ddp_bucketed_benchmarking(const Tables& tables);
Answers answer_optimizer_state_sharding(const Tables& tables);
Answers answer_optimizer_state_sharding_accounting(const Tables& tables);
Answers answer_fsdp(const Tables& tables);
Answers answer_fsdp_accounting(const Tables& tables);
Answers answer_scaling(const Tables& tables);
Answers answer_pytorch_attention(const Tables& tables);  // answers_attention.cu
Answers answer_torch_compile(const Tables& tables);
Answers answer_weighted_sum(const Tables& tables);
Answers answer_flash_forward(const Tables& tables);
Answers answer_flash_backward(const Tables& tables);
Answers answer_flash_benchmarking(const Tables& tables);
Answers answer_flash_leaderboard(const Tables& tables);
Answers answer_leaderboard(const Tables& tables);  // answers_leaderboard.cu
