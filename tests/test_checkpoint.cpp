// Tests of bench_checkpoint.cu, and of its answers: tables in, sentences out; then the same tables with other numbers.
#include "answers.h"
#include "test.h"

#include <regex>

#include <nlohmann/json.hpp>

using Words = std::vector<std::string>;

// A size for (b), where only (a) matters.
static const Words small = {"--d_model",    "16", "--d_ff",       "16", "--num_layers",     "1", "--num_heads", "1",
                            "--vocab_size", "8",  "--batch_size", "1",  "--context_length", "8"};
static Tables tables_of(Words words) {
    words.insert(words.begin(), {"gradient_checkpointing", "--steps", "1", "--warmup", "0"});
    Run r = run_cs336(words);
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    return tables_in(r.out);
}

TEST_CASE_TEMPLATE("gradient_checkpointing (a): what is counted is what the formulas say, and no bit changes", D, OnCPU,
                   OnCUDA) {
    if (!begin<D>()) { return; }
    struct Expected {
        int N, root, root_inputs, halves_inputs, halves_again, nested_again;  // by hand
    };
    for (const Expected& e : {Expected{1, 1, 1, 1, 0, 0},
                              {2, 1, 2, 2, 2, 1},
                              {3, 2, 2, 3, 5, 3},
                              {7, 3, 3, 4, 20, 21},
                              {12, 3, 4, 5, 44, 66},
                              {16, 4, 4, 5, 64, 120}}) {
        std::string mode = e.N == 7 ? "flash" : e.N == 12 ? "fused" : "eager";
        std::string precision = e.N == 12 ? "bf16" : "fp32", N = std::to_string(e.N);
        Words words = {"--device", name_of(D::device), "--blocks", N, "--mode", mode, "--precision", precision};
        words.insert(words.end(), small.begin(), small.end());
        Tables all = tables_of(words);
        const Table* table = table_with(all, {"gradient_checkpointing (a): N = " + N + " blocks", "mode " + mode});
        REQUIRE(table);
        std::map<std::string, std::pair<int, int>> want = {// inputs, blocks again
                                                           {"none", {1, 0}},
                                                           {"flat, k = 1", {e.N, e.N}},
                                                           {"flat, k = " + N, {1, e.N}},
                                                           {strprintf("flat, k = %d", e.root), {e.root_inputs, e.N}},
                                                           {"recursive halves", {e.halves_inputs, e.halves_again}},
                                                           {"linear nesting", {std::min(2, e.N), e.nested_again}}};
        CHECK(table->rows.size() == want.size());
        for (const TableRow& row : rows_of(*table)) {
            CAPTURE(N + " " + row.text("strategy"));
            REQUIRE(want.count(row.text("strategy")) == 1);
            auto [inputs, again] = want[row.text("strategy")];
            for (const char* column : {"inputs", "inputs counted"}) { CHECK(row.number(column) == inputs); }
            for (const char* column : {"blocks again", "blocks again counted"}) { CHECK(row.number(column) == again); }
            CHECK(row.text("gradients") == "the same bits");
        }
        auto peak = [&](const std::string& strategy) {
            return row_of(*table, {{"strategy", strategy}}).number("peak MiB");
        };
        if (e.N < 7) { continue; }
        // Without another form of the weights bf16 copies of them all, and not the blocks, make the least peaks.
        bool copies = precision == "bf16" && table_of<WeightForm>().empty();
        auto less = [&](double a, double b) { return copies ? a == b : a < b; };
        CHECK(less(peak("linear nesting"), peak("recursive halves")));
        CHECK(less(peak("recursive halves"), peak("flat, k = 1")));
        CHECK(peak("flat, k = 1") < peak(strprintf("flat, k = %d", e.root)));
        CHECK(peak(strprintf("flat, k = %d", e.root)) < peak("none"));
        CHECK(peak("flat, k = " + N) == doctest::Approx(peak("none")).epsilon(0.01));
    }
}
// One checkpoint more holds one input more, one block more in a checkpoint that block's residuals.
TEST_CASE("gradient_checkpointing (a): a peak is the inputs held and the residuals of one checkpoint") {
    begin_on(CPU);
    const double stream = 2 * 64 * 64 * 4 / 1048576.0;
    std::map<std::string, double> peak;
    for (const char* N : {"9", "16"}) {
        Words words = {"--device", "cpu", "--blocks", N};
        words.insert(words.end(), small.begin(), small.end());
        Tables all = tables_of(words);
        for (const TableRow& row : rows_of(*table_with(all, {"gradient_checkpointing (a)"}))) {
            peak[N + (" " + row.text("strategy"))] = row.number("peak MiB");
        }
    }
    CHECK(peak["16 flat, k = 1"] - peak["9 flat, k = 1"] == doctest::Approx(7 * stream).epsilon(0.01));
    CHECK(peak["16 flat, k = 1"] - peak["16 linear nesting"] == doctest::Approx(14 * stream).epsilon(0.01));
    CHECK(peak["16 recursive halves"] - peak["16 linear nesting"] == doctest::Approx(3 * stream).epsilon(0.02));
    double block = (peak["16 none"] - peak["9 none"]) / 7;
    CHECK(peak["16 flat, k = 4"] - peak["16 flat, k = 1"] == doctest::Approx(3 * block - 12 * stream).epsilon(0.02));
}

TEST_CASE_TEMPLATE("gradient_checkpointing (b): what is predicted is what happens", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    for (const char* mode : {"eager", "fused"}) {
        Tables all = tables_of({"--device",         name_of(D::device),
                                "--mode",           mode,
                                "--d_model",        "48",
                                "--d_ff",           "96",
                                "--num_layers",     "5",
                                "--num_heads",      "3",
                                "--vocab_size",     "50",
                                "--batch_size",     "2",
                                "--context_length", "200",
                                "--blocks",         "1"});
        const Table* table = table_with(all, {"(b): really run; custom, 5 blocks, batch 2", "context length 200"});
        REQUIRE(table);
        CHECK(scaled_down(*table) == "");
        REQUIRE(table->rows.size() == 5);  // no 8 of 5 blocks
        for (const TableRow& row : rows_of(*table)) {
            CAPTURE(mode + (" " + row.text("blocks per checkpoint")));
            double predicted = row.number("predicted peak MiB");
            CHECK(row.number("peak MiB") ==
                  doctest::Approx(predicted).epsilon(D::device == CPU ? 0.03 : 40 / predicted));
            CHECK(row.number("fwbw_mean_ms") > 0);
            CHECK(row.number("of none") > 0);
        }
        auto peak = [&](const char* k) { return row_of(*table, {{"blocks per checkpoint", k}}).number("peak MiB"); };
        CHECK(peak("1") < peak("2"));
        CHECK(peak("2") < peak("4"));
        CHECK(peak("4") < peak("none"));
    }
}
TEST_CASE("gradient_checkpointing (b): the handout's size is predicted anywhere; what does not fit is a row") {
    begin_on(CPU);
    Tables all = tables_of({"--device", "cpu", "--blocks", "1"});
    const Table* xl = table_with(all, {"(b): predicted, ", "xl (2026), 32 blocks, batch 4, context length 2048"});
    REQUIRE(xl);
    REQUIRE(xl->rows.size() == 6);
    const std::pair<const char*, const char*> peaks[] = {{"half", "62618.8"}, {"1", "62618.8"},  {"2", "68720.9"},
                                                         {"4", "80925.0"},    {"8", "105333.1"}, {"none", "251782.2"}};
    for (auto [k, mib] : peaks) {
        TableRow row = row_of(*xl, {{"blocks per checkpoint", k}});
        CHECK(row.text("predicted peak MiB") == mib);
        CHECK(row.text("peak MiB") == "");
    }
    CHECK(has(scaled_down(*table_with(all, {"(b): really run; tiny, "})), "8 layers, d_model 64"));

    all = tables_of({"--device", "cpu", "--blocks", "1", "--d_model", "16384", "--d_ff", "65536", "--num_layers", "64",
                     "--num_heads", "128"});
    const Table* large = table_with(all, {"(b): really run; custom"});
    REQUIRE(large);
    for (const TableRow& row : rows_of(*large)) {
        CHECK(has(row.text("peak MiB"), "OOM ("));
        CHECK(row.text("fwbw_mean_ms") == "");
    }
    CHECK(has(answers_of("gradient_checkpointing", all)[1].text, "It was not run here: its peak is a prediction."));
}

// ---------------------------------------------------------------------------------------------------------------------
// Answers

static Tables recorded() { return tables_in(read_file("tests/fixtures/answers/gradient_checkpointing.md")); }
static Tables with_cell(Tables tables, size_t table, const std::string& first, const std::string& column,
                        const std::string& text) {
    Table& t = tables.at(table);
    auto row = std::find_if(t.rows.begin(), t.rows.end(), [&](auto& cells) { return cells[0] == first; });
    size_t i = std::find(t.columns.begin(), t.columns.end(), column) - t.columns.begin();
    REQUIRE((row != t.rows.end() && i < t.columns.size()));
    (*row)[i] = text;
    return tables;
}
static std::string said(const Tables& tables, const std::string& part) {
    static const std::regex dirt("\\b(nan|inf)\\b|  |\\( |\\(\\)| [,.;)]|^$|[{}]");
    for (const Answer& a : answers_of("gradient_checkpointing", tables)) {
        CHECK_MESSAGE(!std::regex_search(a.text, dirt), a.part, ": ", a.text);
        if (a.part == part) { return a.text; }
    }
    return "no answer (" + part + ")";
}
static void check_says(const std::string& text, const std::vector<std::string>& phrases) {
    for (const std::string& phrase : phrases) { CHECK_MESSAGE(has(text, phrase), phrase, " in: ", text); }
}
TEST_CASE("gradient_checkpointing: answers") {
    Tables t = recorded();
    REQUIRE(t.size() == 3);
    check_says(
        said(t, "a"),
        {"The strategy with the least peak for N = 16 small blocks is linear nesting, 1.509 MiB (without checkpoints: "
         "19.422): the "
         "first N - 1 blocks form a checkpoint; inside it the first N - 2 form another, and so on.",
         "residuals of one block at a time and min(2, N) = 2 inputs, O(1) memory; backward runs N (N - 1) / 2 = 120 "
         "blocks again, O(N^2) compute.",
         "Nesting takes 22.5 % off the peak of k = 1 (1.946 MiB), and is worth"});
    check_says(
        said(t, "b"),
        {"The best checkpoint is one block: a step's peak is 62618.8 MiB (predicted); it is 62618.8 with half a "
         "block, 68720.9 with 2 blocks and 251782.2 without checkpoints. ",
         "Each further block in a checkpoint adds 6102 MiB: 6502 of residuals, minus 400 of gradients that do "
         "not exist yet. Measured",
         "Measured with tiny, a checkpoint of one block takes 13.7 MiB (predictions were at most 0.00 % off), and ",
         " times the time without checkpoints. This run was scaled down: "});
}
TEST_CASE("gradient_checkpointing: answers from other numbers") {
    const Tables t = recorded();
    check_says(said(with_cell(t, 0, "recursive halves", "peak MiB", "1.500"), "a"),
               {"least peak for N = 16 small blocks is recursive halves, 1.500 MiB",
                "): each half of the blocks is a checkpoint", "22.9 % off"});
    check_says(said(with_cell(t, 0, "flat, k = 1", "peak MiB", "1.5"), "a"),
               {"least peak for N = 16 small blocks is flat, k = 1, 1.5 MiB", "every k blocks are a checkpoint",
                "Nesting gains nothing here."});
    check_says(said(with_cell(t, 0, "none", "peak MiB", "1.5"), "a"),
               {"is none, 1.5 MiB", "N blocks at a time and 1 inputs, O(N) memory; backward runs 0 blocks again"});
    check_says(said(with_cell(t, 0, "linear nesting", "blocks again counted", "121"), "a"),
               {"N (N - 1) / 2 = 120 (but counted: 121) blocks again"});
    check_says(said(with_cell(t, 0, "none", "gradients", "differ"), "a"), {"The gradients differ with none."});
    Tables narrow = t;  // a page may leave out what was counted
    for (std::string& column : narrow[0].columns) {
        if (has(column, "counted")) { column = "left out"; }
    }
    CHECK(said(narrow, "a") == said(t, "a"));

    check_says(
        said(with_cell(t, 1, "half", "predicted peak MiB", "62000.0"), "b"),
        {"The best checkpoint is half a block: a step's peak is 62000.0 MiB (predicted); it is 62618.8 with one b"});
    check_says(said(with_cell(t, 1, "2", "predicted peak MiB", "60000.0"), "b"),
               {"The best checkpoint is 2 blocks", "it is 62618.8 with one block, 80925.0 with 4 blocks and 251782.2"});
    check_says(said(with_cell(t, 2, "4", "difference %", "-3.51"), "b"), {"at most 3.51 % off"});
    check_says(said(with_cell(t, 2, "1", "of none", "1.25x"), "b"), {"1.25 times the time"});

    Tables gpu = {t[0], t[1]};  // one table of the asked size, as a GPU that has room prints it
    const std::string predicted = "predicted, every allocation counted, nothing computed";
    gpu[1].caption.replace(gpu[1].caption.find(predicted), predicted.size(), "really run");
    for (const char* k : {"half", "1", "2", "4", "8"}) {
        gpu = with_cell(gpu, 1, k, "peak MiB", k == std::string("2") ? "62000.1" : "62651.0");
        gpu = with_cell(with_cell(gpu, 1, k, "fwbw_mean_ms", "4000.00"), 1, k, "difference %", "0.05");
    }
    gpu = with_cell(gpu, 1, "none", "peak MiB", "OOM (245.9 GiB)");
    check_says(
        said(gpu, "b"),
        {"The best checkpoint is 2 blocks: a step's peak is 62000.1 MiB; it is 62651.0 with one block, 62651.0 with 4 "
         "blocks and OOM (245.9 GiB) without checkpoints.",
         "Measured with xl (2026), a checkpoint of 2 blocks takes 62000.1 MiB (predictions were at most 0.05 % off), "
         "and 4000.00 ms",
         "so we know the price only in FLOPs"});
}
TEST_CASE("gradient_checkpointing: answer (a) has the code of the strategy that won") {
    const Tables t = recorded();
    auto code = [](const Tables& tables) { return answers_of("gradient_checkpointing", tables)[0].code; };
    const std::string nested = code(t);
    CHECK(std::count(nested.begin(), nested.end(), '\n') == 4);
    CHECK(has(nested, "x = checkpoint(run, blocks[:-1], x)"));
    CHECK(
        has(code(with_cell(t, 0, "recursive halves", "peak MiB", "1.5")), "checkpoint(run, blocks[len(blocks) // 2:]"));
    CHECK(has(code(with_cell(t, 0, "flat, k = 1", "peak MiB", "1.5")), "for i in range(0, len(blocks), k):"));
    CHECK(!has(code(with_cell(t, 0, "none", "peak MiB", "1.5")), "checkpoint"));
    CHECK(code(with_cell(t, 0, "none", "gradients", "differ")) == "");

    Answers answers = answers_of("gradient_checkpointing", t);
    CHECK(has(format_answers(answers, "md"), "\n\n```\n" + nested + "```\n\n**(b)** "));
    CHECK(has(format_answers(answers, "csv"), "\n# def run(blocks, x):\n#     if len(blocks) > 1:\n"));
    const auto json = nlohmann::json::parse(format_answers(answers, "json"));
    CHECK(json["code"] == nlohmann::json{{"a", nested}});
    CHECK(json["answers"]["a"] == answers[0].text);
}
// Whatever a table lacks: rows, columns, numbers, or itself. No crash, and no hole in a sentence.
TEST_CASE("gradient_checkpointing: answers from tables with holes") {
    const Tables t = recorded();
    CHECK(answers_of("gradient_checkpointing", {}).empty());
    for (size_t i = 0; i < t.size(); i++) {
        Tables without_rows = t, one_row = t, no_numbers = t;
        without_rows[i].rows.clear();
        one_row[i].rows.resize(1);
        for (auto& row : no_numbers[i].rows) { std::fill(row.begin() + 1, row.end(), ""); }
        for (const Tables& tables : {without_rows, one_row, no_numbers}) { said(tables, ""); }
    }
}
TEST_CASE("gradient_checkpointing: wrong options") {
    const std::pair<Words, const char*> cases[] = {
        {{"--blocks", "0"}, "--blocks: got '0', takes a whole number from 1 to 64"},
        {{"--blocks", "65"}, "--blocks: got '65', takes"},
        {{"--blocks", "x"}, "--blocks: got 'x', takes"},
        {{"--size", "small,large"}, "--size: got 'small,large', takes one of"},
        {{"--mode", "eager,fused"}, "--mode: got 'eager,fused', takes one of"},
        {{"--size", "small", "--num_layers", "3"}, "--size: got 'small' and --num_layers too"},
        {{"--checkpoint", "2"}, "--checkpoint: no such option"}};
    for (const auto& [words, says] : cases) {
        Words all = words;
        all.insert(all.begin(), "gradient_checkpointing");
        Run r = run_cs336(all);
        CHECK(r.exit_code == 2);
        CHECK(r.out == "");
        CHECK_MESSAGE(has(r.err, says), r.err);
        CHECK(std::count(r.err.begin(), r.err.end(), '\n') == 1);
    }
}
