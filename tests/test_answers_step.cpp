// Tests of answers_step.cu: tables that an H200 printed in, the sentences out; then the same tables with other numbers.
#include "answers.h"
#include "test.h"

#include <regex>

static const std::vector<std::string> recorded = {
    "benchmarking_script",          "benchmarking_script_warmup", "nsys_profile",        "nsys_profile_cpu",
    "benchmarking_mixed_precision", "memory_profiling",           "memory_profiling_cpu"};
static std::string fixture(const std::string& name) { return read_file("tests/fixtures/answers/" + name + ".md"); }
static std::string command_of(const std::string& fixture) {  // without what its name adds to the command's
    return fixture.substr(0, std::min(fixture.find("_warmup"), fixture.find("_cpu")));
}
static Answers answers_from(const std::string& name, const std::string& markdown) {
    return answers_of(command_of(name), tables_in(markdown));
}
static std::string said(const Answers& answers, const std::string& part) {
    for (const Answer& answer : answers) {
        if (answer.part == part) { return answer.text; }
    }
    return "no answer (" + part + ")";
}
static void check_says(const Answers& answers, const std::string& part, const std::vector<std::string>& phrases) {
    std::string text = said(answers, part);
    for (const std::string& phrase : phrases) { CHECK_MESSAGE(has(text, phrase), phrase, " in: ", text); }
}
static void check_clean(const Answers& answers) {
    static const std::regex dirt("\\b(nan|inf)\\b|  |\\( |\\(\\)| [,.;)]|^$|[{}]");
    for (const Answer& a : answers) { CHECK_MESSAGE(!std::regex_search(a.text, dirt), a.part, ": ", a.text); }
}
static Tables with_cell(Tables tables, const std::vector<std::string>& words, const std::vector<Cell>& row,
                        const std::string& column, const std::string& text) {
    bool found = false;
    for (Table& table : tables) {
        if (table_with({table}, words) == nullptr || found) { continue; }
        TableRow at = row_of(table, row);
        size_t i = std::find(table.columns.begin(), table.columns.end(), column) - table.columns.begin();
        found = at && i < table.columns.size();
        if (found) { table.rows[at.index][i] = text; }
    }
    REQUIRE_MESSAGE(found, words[0], ", ", column, ", ", text);
    return tables;
}

TEST_CASE("answers step: benchmarking_script") {
    Answers answers = answers_from("benchmarking_script", fixture("benchmarking_script"));
    check_clean(answers);
    check_says(answers, "b",
               {"The model (fp32, mode flash) takes 6.72 ms (small) to 145.16 ms (2.7B) for forward, 13.51 to ",
                " ms for a whole step. The handout's own model, one kernel per operation, is `--mode eager`."});
    check_says(answers, "b, bf16, mode flash", {"The model (bf16, mode flash) takes 0.80 ms (small) to "});
    check_says(answers, "b, ratio", {"Backward takes 1.84 to 2.09 times as long as forward. By FLOPs it would be 2."});
    check_says(answers, "b, deviation",
               {"The standard deviation is small: at most ", " % of the mean in fp32, mode flash (",
                "and 1.9 % of the mean in bf16, mode flash (a whole step of xl)."});
    check_says(answers, "c", {"one number of warm-up steps"});
    Tables t = tables_in(fixture("benchmarking_script"));
    Tables both = with_cell(t, {"precision fp32"}, {{"size", "small"}}, "fwbw_std_ms", "9.99");
    check_says(answers_of("benchmarking_script", both), "b, deviation",
               {"mode flash (forward with backward of small)."});
    t = with_cell(t, {"precision fp32"}, {{"size", "2.7B"}}, "fw_std_ms", "31.55");
    t = with_cell(t, {"precision fp32"}, {{"size", "small"}}, "bw_only_mean_ms", "3.36");
    t = with_cell(t, {"precision fp32"}, {{"size", "2.7B"}}, "step_mean_ms", "OOM (50.8 GiB)");
    answers = answers_of("benchmarking_script", t);
    check_clean(answers);
    check_says(answers, "b", {"21.25 ms (small) to 310.92 ms (xl) for a whole step", "Out of memory: 2.7B (step)."});
    check_says(answers, "b, ratio", {"takes 0.50 to 2.09 times"});
    check_says(answers, "b, deviation",
               {"is small: at most 1.9 % of the mean in bf16, mode flash (a whole step of xl). Elsewhere it is high: "
                "up to 21.7 % of the mean in fp32, mode flash (forward of 2.7B)."});
    CHECK(answers.size() == 5);  // the card's peak is in no caption
}
TEST_CASE("answers step: benchmarking_script's share of the peak, and a batch in several backwards") {
    Tables t = tables_in(fixture("benchmarking_script"));
    Table& bf16 = t.at(1);
    const std::string setting = "precision bf16, mode flash; ", batch = "batch 4,";
    bf16.caption.replace(bf16.caption.find(setting), setting.size(),
                         setting + "MFU of 989 TFLOP/s, attention in full; ");
    bf16.caption.replace(bf16.caption.find(batch), batch.size(), "batch 64 in 4 backward passes,");
    bf16.columns.push_back("MFU %");
    for (auto& row : bf16.rows) { row.push_back(row[0] == "xl" ? "57.6" : row[0] == "2.7B" ? "" : "46.9"); }
    const std::string tflops = rows_of(bf16, {{"size", "xl"}})[0].text("TFLOP/s");
    Answers answers = answers_of("benchmarking_script", t);
    REQUIRE(answers.size() == 5);
    CHECK(answers[4].text ==
          "The largest share of the card's peak (MFU) is 57.6 %: xl in bf16, mode flash, batch 64 "
          "in 4 backward passes, " +
              tflops + " TFLOP/s of 989.");
    for (int i : {0, 1, 2}) { CHECK(!has(answers[i].text, "bf16")); }  // (b) is about the handout's batch
}
TEST_CASE("answers step: benchmarking_script with several numbers of warm-up steps") {
    std::string text = fixture("benchmarking_script_warmup");
    Answers answers = answers_from("benchmarking_script", text);
    check_clean(answers);
    check_says(answers, "b", {"takes 6.68 ms (small) for forward, "});  // only the warm row
    check_says(
        answers, "c",
        {"is 19.52 ms (standard deviation 39.43 ms) after 0 warm-up steps, 6.99", "is 2.92 times the one after 5",
         "because the first step", "level (within 2 %) after 2 warm-up steps", "CUDA graph in the second"});
    Tables t = with_cell(tables_in(text), {"fresh process"}, {{"warmup", "0"}}, "fw_mean_ms", "6.71");
    t = with_cell(t, {"fresh process"}, {{"warmup", "0"}}, "fw_std_ms", "0.03");
    answers = answers_of("benchmarking_script", t);
    check_says(answers, "c", {"is 1.00 times the one after 5 warm-up steps, which is no more than the times vary"});
    CHECK(!has(said(answers, "c"), "because"));
    t = with_cell(tables_in(text), {"fresh process"}, {{"warmup", "1"}}, "fw_std_ms", "0.01");  // but 6.99 ms
    check_says(answers_of("benchmarking_script", t), "c", {"level (within 2 %) after 2 warm-up steps"});
    t = tables_in(text);
    t[0].rows.pop_back();  // after 0, 1 and 2 steps: 19.52, 6.99 and 6.72 ms
    check_says(answers_of("benchmarking_script", t), "c",
               {"memory pool. No row before the one after 2 warm-up steps is level with it (within 2 %), so the times "
                "may still change"});
    CHECK(!has(said(answers_of("benchmarking_script", t), "c"), "It is level"));
    t = with_cell(t, {"fresh process"}, {{"warmup", "1"}}, "fw_mean_ms", "6.75");
    t = with_cell(t, {"fresh process"}, {{"warmup", "1"}}, "fw_std_ms", "0.02");
    check_says(answers_of("benchmarking_script", t), "c", {"It is level (within 2 %) after 1 warm-up step."});
    t = tables_in(text);
    t[0].caption = t[0].caption.substr(0, t[0].caption.find("NVIDIA")) + "AMD EPYC, 2 threads";
    CHECK(has(said(answers_of("benchmarking_script", t), "c"), "because the first step also touches"));
}
TEST_CASE("answers step: a sweep of warm-ups reads its children's tables, not their answers") {
    Run r = run_cs336({"benchmarking_script", "--quick", "--warmup", "0,1", "--device", "cpu", "--d_model", "64",
                       "--d_ff", "64", "--num_layers", "1", "--num_heads", "4", "--vocab_size", "100"});
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    Tables tables = tables_in(r.out);
    REQUIRE(tables.size() == 2);  // modes eager and flash
    for (const Table& table : tables) { CHECK(table.rows.size() == 2); }
    CHECK(has(r.out, "\n\n**(c)** The mean time of forward (custom, fp32, mode "));
}
TEST_CASE("answers step: nsys_profile") {
    Answers answers = answers_from("nsys_profile", fixture("nsys_profile"));
    check_clean(answers);
    check_says(
        answers, "a",
        {"In fp32, mode eager, forward takes 63.403 ms (large at context length 256) by the clock, and 63.757 ms",
         "The two match: tracing changes the time by +0.6 %;", "95 % of the traced time",
         "24.8 % in bf16, mode eager"});
    check_says(
        answers, "b",
        {"tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas`, a matrix product "
         "on the CUDA cores: 41.5 % of forward's time, launched 72 times per forward. That is 2 per layer",
         "w1 and w3", "With backward it is another one", "(18.4 %, 217 launches per pass)"});
    check_says(answers, "c",
               {"take 82.6 % of forward", "projections/rope 5.3 %, attention/softmax 4.7 %", "elementwise 13.0 %"});
    check_says(answers, "d", {"falls from 82.6 to 70.7 % (large", "is elementwise, from 13.0 to 25.7 %"});
    check_says(answers, "d, AdamW", {"AdamW has no products and takes ", "(15.1 %)"});
    check_says(answers, "d, other settings", {"In bf16, mode flash the share falls from 70.2 to 47.6 %."});
    check_says(answers, "e", {"2.821 ms per forward, 1.43 times as long as attention's two products ("});
    check_says(answers, "e, FLOPs", {"1 : 51.2", "73.3 times as long", "Bytes explain it"});
    check_says(
        answers, "e, other settings",
        {"In fp32, mode flash both are one kernel of 1.330 ms. In bf16, mode eager softmax takes 6.82 times as"});
}
TEST_CASE("answers step: nsys_profile with other numbers") {
    Tables t = tables_in(fixture("nsys_profile"));
    const std::vector<std::string> share = {"(c), (d)"}, softmax = {"nsys_profile (e)"};
    t = with_cell(t, {"nsys_profile (a)"}, {{"phase", "forward"}}, "tracing adds (%)", "12.6");
    t = with_cell(t, {"nsys_profile (b)"}, {{"phase", "forward+backward"}}, "the forward's, too", "yes");
    t = with_cell(t, {"nsys_profile (b)"}, {{"phase", "forward"}}, "tensor cores", "yes");
    t = with_cell(t, share, {{"phase", "step"}}, "matmul", "90.7");
    t = with_cell(t, softmax, {{"size", "large"}}, "softmax (ms)", "0.985");
    Answers answers = answers_of("nsys_profile", t);
    check_clean(answers);
    check_says(answers, "a", {"They do not match everywhere: tracing changes the time by +12.6 % (most: large"});
    check_says(answers, "b", {"product on tensor cores: 41.5 %", "With backward it is the same one (18.4 %"});
    check_says(answers, "d", {"rises from 82.6 to 90.7 %"});
    check_says(answers, "e", {"0.50 times as long as attention's two products"});
    check_says(answers, "e, FLOPs", {"takes 25.6 times as long"});

    for (Table& table : t) {  // a second length, and a step that does not fit
        if (!has(table.caption, "fp32, mode eager")) { continue; }
        if (has(table.caption, "nsys_profile (a)")) {
            table.rows.insert(table.rows.begin() + 1,
                              {{"large", "512", "forward", "130.0", "0.1", "131.3", "0.1", "-19.7", "128.0", "2132"},
                               {"2.7B", "512", "step", "OOM (65.2 GiB)", "", "", "", "", "", ""}});
        }
        if (has(table.caption, "nsys_profile (e)")) {
            table.rows.push_back({"large", "512", "3.0", "2.0", "", "2", "102.4", "1 : 51.2", "1", "1", ""});
        }
    }
    answers = answers_of("nsys_profile", t);
    check_clean(answers);
    check_says(answers, "a",
               {"63.403 ms (large at context length 256) to 130.0 ms (large at context length 512)",
                "time by -19.7 to +12.6 %, and as tracing cannot make a run faster, the machine's",
                "Out of memory: 2.7B at context length 512 (step)."});
    check_says(answers, "e", {"By context length the factor is 0.50 at 256 and 1.50 at 512."});

    Tables times = tables_with(t, {"nsys_profile (a)"});  // as without CUPTI
    for (Table& table : times) {
        for (auto& row : table.rows) { row[8] = row[9] = ""; }
    }
    answers = answers_of("nsys_profile", times);
    CHECK(answers.size() == 1);
    check_says(answers, "a", {"No kernels were traced, so (b) to (e) have no answer."});
}
// What a CPU printed for two sizes at two lengths; then with an H200's name, other numbers and a step that does not
// fit.
TEST_CASE("answers step: nsys_profile of several sizes and lengths") {
    Tables t = tables_in(fixture("nsys_profile_cpu"));
    Answers answers = answers_of("nsys_profile", t);
    check_clean(answers);
    check_says(answers, "a",
               {"forward takes 264.113 ms (small at context length 32) to 1324.406 ms (medium at context length 64) by "
                "the clock, and 295.795 ms (small at context length 32) to 1286.605 ms (medium at context length 64) "
                "in the trace. They do not match everywhere: the trace differs by -2.9 to +12.0 % (most: small at",
                "Without a GPU there are no kernels"});
    check_says(answers, "a, memory",
               {"A step fits in all 4 settings; its largest peak is 6.5 GiB (medium at context length 32)."});
    check_says(answers, "d", {"It falls in 2 of 2 settings of size and context length."});
    Tables ranges = with_cell(t, {"nsys_profile (b)"}, {{"context length", "64"}, {"phase", "forward"}}, "runs in",
                              "ffn/matmul (71.9 %, 72 launches), projections/matmul (26.0 %, 96 launches)");
    check_says(answers_of("nsys_profile", ranges), "b",
               {"That is 9 per layer and one more: ffn/matmul (71.9 %, 72 launches), projections/matmul (26.0 %, 96 "
                "launches). With backward"});
    for (Table& table : ranges) {  // a page may leave the column out
        std::replace(table.columns.begin(), table.columns.end(), std::string("step peak (MiB)"), std::string("x"));
    }
    check_says(answers_of("nsys_profile", ranges), "a, memory", {"A step fits in all 4 settings."});
    check_says(answers, "b",
               {"medium at context length 64", "most of its time is in the range ffn/matmul (71.9 %).",
                "forward's first is a matrix product in 4 of 4 settings."});
    check_says(answers, "e", {"By context length the factor is 4.58 at 32 and 4.92 at 64."});

    for (Table& table : t) {
        size_t at = table.caption.find("AMD EPYC");
        if (at != std::string::npos) { table.caption.replace(at, 8, "NVIDIA H200, CUDA 13.0"); }
    }
    const std::vector<std::string> overview = {"nsys_profile overview"};
    const std::vector<Cell> small = {{"size", "small"}, {"context length", "32"}}, medium = {{"size", "medium"}};
    t = with_cell(t, overview, small, "difference (%)", "-0.9");
    t = with_cell(t, overview, {{"size", "small"}, {"context length", "64"}}, "difference (%)", "0.2");
    t = with_cell(t, overview, medium, "step by the clock (ms)", "OOM (161.2 GiB)");
    t = with_cell(t, overview, medium, "top kernel of forward", "`softmax_kernel`");
    answers = answers_of("nsys_profile", t);
    check_clean(answers);
    check_says(answers, "a",
               {"They do not match: the trace differs by -2.9 to +1.6 %; the clock also counts the launch"});
    check_says(
        answers, "a, memory",
        {"A step fits in 3 of 4 settings; its largest peak is 6.5 GiB (medium at context length 64). Out of memory: "
         "medium at context length 32 (step)."});
    check_says(answers, "b", {"a matrix product in 3 of 4 settings."});
    t = with_cell(t, overview, {{"size", "medium"}, {"context length", "64"}}, "difference (%)", "-1.0");
    check_says(answers_of("nsys_profile", t), "a", {"The two match: the trace differs by -1.0 to +1.6 %."});
    for (Table& table : t) {  // nine more settings that match, and one that does not
        if (!has(table.caption, "nsys_profile overview")) { continue; }
        for (int i = 0; i < 9; ++i) { table.rows.push_back(table.rows.back()); }
    }
    t = with_cell(t, overview, small, "difference (%)", "7.4");
    check_says(answers_of("nsys_profile", t), "a",
               {"The two match within 2 % in 12 of 13 settings; the trace differs by -1.0 to +7.4 % (most: small at "
                "context length 32)."});
}
TEST_CASE("answers step: benchmarking_mixed_precision") {
    std::string text = fixture("benchmarking_mixed_precision");
    Answers answers = answers_from("benchmarking_mixed_precision", text);
    check_clean(answers);
    check_says(
        answers, "a",
        {"model parameters within the autocast context: float32", "first feed-forward layer: float16",
         "layer norm: float32", "logits: float16", "loss: float32", "gradients: float32.", "same, with bfloat16"});
    check_says(answers, "b",
               {"65504", "treats layer norm alike: its output is float32 under float16 and float32 under"});
    check_says(answers, "c",
               {"Forward and backward of 2.7B take 145.55 and 299.50 ms in fp32, 25.89",
                "8.10 times (small) to 11.97 times (2.7B): the larger the model, the larger the factor"});
    Tables t = tables_in(text);
    t = with_cell(t, {"to bfloat16"}, {{"component", "output of the layer norm"}}, "dtype", "bfloat16");
    const char *sizes[] = {"small", "medium", "large", "xl"}, *factors[] = {"18.10x", "15.45x", "12.67x", "11.98x"};
    for (int i = 0; i < 4; i++) {
        t = with_cell(t, {"(c)"}, {{"size", sizes[i]}, {"precision", "bf16"}}, "fwbw speedup", factors[i]);
    }
    t = with_cell(t, {"(c)"}, {{"size", "2.7B"}, {"precision", "fp32"}}, "fw_mean_ms", "6.07");
    answers = answers_of("benchmarking_mixed_precision", t);
    check_clean(answers);
    check_says(answers, "a", {"With bfloat16 these differ: output of the layer norm (bfloat16)."});
    check_says(answers, "b", {"differently: its output is float32 under float16 and bfloat16 under bfloat16"});
    check_says(answers, "c", {"bf16 is 0.50 to 12.37 times as fast", "the larger the model, the smaller the factor"});
    CHECK(!has(said(answers, "c"), "tensor cores"));
    t = with_cell(t, {"(c)"}, {{"size", "medium"}, {"precision", "bf16"}}, "fwbw speedup", "19.45x");
    check_says(answers_of("benchmarking_mixed_precision", t), "c", {"19.45 times): the factor does not grow with"});
    for (Table& table : t) {  // without bf16: the last precision
        table.rows.erase(std::remove_if(table.rows.begin(), table.rows.end(),
                                        [](auto& row) { return row.size() > 1 && row[1] == "bf16"; }),
                         table.rows.end());
    }
    check_says(answers_of("benchmarking_mixed_precision", t), "c", {"tf32 is 0.23 to 6.13 times as fast as fp32 in"});
}
TEST_CASE("answers step: memory_profiling") {
    std::string text = fixture("memory_profiling");
    Answers answers = answers_from("memory_profiling", text);
    check_clean(answers);
    check_says(answers, "a",
               {"keeps nothing for backward: above the weights (12995.9 MiB), its timeline has one peak per layer, all "
                "equal: 115.0, 230.0 and 504.5 MiB of activations",
                "At context length 128 and 256 the step's peak is after backward",
                "gradients are there, and at context length 512 it is just after the loss"});
    check_says(answers, "b",
               {"2.7B in fp32 at context length 128, 256 and 512, in MiB: forward 13143.0, 13258.0 and 13532.6; a full "
                "step 52415.8, 52415.9 and 66814.2.",
                "4 x 12995.9 = 51984 MiB"});
    check_says(answers, "c",
               {"bf16 takes more memory than fp32",
                "a forward at context length 128, 256 and 512 takes 19501.6, 19526.4 and 19686.0 MiB "
                "(+48.4, +47.3 and +45.5 %), and a step",
                "16-bit copy of each matrix that a product reads: 6448.8 MiB (2 bytes per weight: 6448.8)",
                "At the peak of a step the activations change by -395.0, -179.6 and -5421.8 MiB, and the rest by +0.0, "
                "-172.7 and +225.0."});
    check_says(answers, "d",
               {"4 x 512 x 2560 x 4 = 20971520 bytes", "= 20.0 MiB (2.7B; a single sequence has 5.00 MiB).",
                "it is 5.0, 10.0 and 20.0 MiB", "allocated exactly that"});
    check_says(answers, "e",
               {"fp32 at context length 512: 128.0 MiB each (attention's scores",
                "32 arrays by matmul and 32 by scale in forward",
                "fp32 at context length 128: 20.0 MiB each (the feed-forward block",
                "64 arrays by linear in forward/layer/ffn;", "The weights (12995.9 MiB) were there before"});
}
TEST_CASE("answers step: memory_profiling with other numbers") {
    Tables t = tables_in(fixture("memory_profiling")), low = t;
    for (Table& table : low) {  // bf16 alone
        if (!has(table.caption, "memory_profiling (e)")) { continue; }
        size_t i = std::find(table.columns.begin(), table.columns.end(), "precision") - table.columns.begin();
        table.rows.erase(
            std::remove_if(table.rows.begin(), table.rows.end(), [&](auto& row) { return row[i] == "fp32"; }),
            table.rows.end());
    }
    check_says(answers_of("memory_profiling", low), "e", {"bf16 at context length 128: 50.0 MiB each (16-bit copies"});
    for (Table& table : t) {
        if (!has(table.caption, "what bf16 adds")) { continue; }
        for (auto& row : table.rows) { row[3] = "-" + row[3]; }
    }
    const std::vector<Cell> longest = {{"context length", "512"}, {"phase", "step"}};
    t = with_cell(t, {"MiB by category"}, longest, "gradients", "6000.0");
    t = with_cell(t, {"memory_profiling (b)"}, {{"context length", "512"}}, "full step peak MiB", "OOM (65.2 GiB)");
    t = with_cell(t, {"memory_profiling (d)"}, {{"context length", "256"}}, "allocated bytes", "8");
    t = with_cell(t, {"memory_profiling (e)"}, {{"MiB each", "19.5"}}, "MiB each", "21.0");
    Answers answers = answers_of("memory_profiling", t);
    check_clean(answers);
    CHECK(has(said(answers, "c"), "Autocast leaves weights, gradients and moments in fp32, and keeps a 16-bit"));
    check_says(answers, "a", {"at context length 512 it is in backward, when a part"});
    check_says(answers, "b", {"a full step 52415.8, 52415.9 and OOM (65.2 GiB)."});
    check_says(answers, "c", {"bf16 takes less memory than fp32", "19686.0 MiB (-48.4, -47.3 and -45.5 %)"});
    check_says(answers, "d", {"allocated another number of bytes"});
    check_says(answers, "e",
               {"length 128: 21.0 MiB each (the logits: batch x length x vocabulary numbers): 1 array by linear in "
                "forward/lm_head."});

    for (Table& table : t) {
        size_t at = table.caption.find("mode eager");
        if (at != std::string::npos) { table.caption.replace(at, 10, "mode fused"); }
    }
    check_says(answers_of("memory_profiling", t), "c", {"This mode keeps a 16-bit copy"});
    for (Table& table : t) {
        if (!has(table.caption, "what bf16 adds")) { continue; }
        for (auto& row : table.rows) { row[4] = "0.0"; }
        table.rows[0][3] = "1.0";
    }
    check_says(answers_of("memory_profiling", t), "c",
               {"bf16 takes in some rows more memory, in others not more than fp32", "keeps no 16-bit copies"});
}
// Recorded without a GPU: what the tape costs, where the peak is, and what one block saves. Older tables lack all
// three.
TEST_CASE("answers step: memory_profiling's tape, place of the peak and saved block") {
    Answers older = answers_from("memory_profiling", fixture("memory_profiling"));
    CHECK(said(older, "f") == "no answer (f)");
    CHECK(!has(said(older, "a"), " (in "));
    CHECK(!has(said(older, "b"), "tape"));

    Tables t = tables_in(fixture("memory_profiling_cpu"));
    Answers answers = answers_of("memory_profiling", t);
    check_clean(answers);
    check_says(answers, "a",
               {"(in forward/layer/ffn/swiglu and forward/layer/attention/softmax).",
                "after backward, when all gradients are there (in optimizer)",
                "just after the loss, when all activations are there (in backward/softmax)"});
    check_says(answers, "b",
               {"forward 13111.0 and 19622.6; a forward that keeps its tape for a backward 18352.1 and 221695.2, so "
                "the tape adds 5241.1 and 202072.6 MiB; a full step",
                "as predicted in fp32, but not as predicted in bf16; a step at context length 2048 takes 245.9 GiB, "
                "more than an H200's 141 GB."});
    std::string f = said(answers, "f");
    check_says(answers, "f",
               {"One block (2.7B at context length 2048, mode eager; predicted) saves for backward 6,817,906,688 bytes "
                "in fp32 "
                "and 7,136,673,792 bytes in bf16.",
                "In fp32 the 5 operations that save most have 87.6 % of it: div in "
                "forward/layer/attention/softmax 2,147,483,648 (31.5 %), exp",
                "frees 6,817,906,688 bytes, but memory falls by 6,398,455,808: the rest is its parameters' gradients, "
                "419,450,880 bytes, as the formula has it, beside 83,886,080 of its input's gradient."});
    static const std::regex sentence("\\. [A-Z]|\\.$");
    CHECK(std::distance(std::sregex_iterator(f.begin(), f.end(), sentence), std::sregex_iterator()) == 3);

    for (Table& table : t) {  // as if it had run
        size_t at = table.caption.find("predicted: ");
        if (at != std::string::npos && has(table.caption, "(f)")) { table.caption.replace(at, 11, ""); }
    }
    check_says(answers_of("memory_profiling", t), "f", {"mode eager) saves for backward 6,817"});
    const std::vector<Cell> longest = {{"context length", "2048"}, {"precision", "fp32"}};
    const std::vector<std::string> block = {"(f): memory over"}, large = {"precision fp32", "predicted: "};
    t = with_cell(t, {"MiB by category"}, {{"context length", "2048"}, {"phase", "step"}}, "range at the peak", "loss");
    t = with_cell(t, large, {{"context length", "2048"}}, "forward with tape peak MiB", "19000.0");
    t = with_cell(t, large, {{"context length", "128"}}, "forward with tape peak MiB", "OOM (18.0 GiB)");
    t = with_cell(t, block, longest, "predicted", "6817906687");
    t = with_cell(t, block, longest, "change", "1000000");
    t = with_cell(t, block, longest, "gradients: change + saved - copies", "419450881");
    t = with_cell(t, {"(f): what"}, longest, "%", "1.5");  // the sum is that of the bytes
    t = with_cell(t, {"(f): what"}, longest, "bytes", "1483483648");
    answers = answers_of("memory_profiling", t);
    check_clean(answers);
    check_says(answers, "a", {"when all activations are there (in loss)"});
    check_says(answers, "b", {"backward 19000.0, so the tape changes it by -622.6 MiB (context length 2048); a full"});
    check_says(answers, "f",
               {"6,817,906,688 bytes in fp32 (predicted: 6,817,906,687) and", "have 77.9 % of it: div in",
                "but memory grows by 1,000,000: the rest is its parameters' gradients, 419,450,881 bytes (by the "
                "formula 419,450,880), beside"});
}
// Whatever a table lacks: rows, numbers, memory, or itself. No crash, and no hole in a sentence.
TEST_CASE("answers step: tables with holes") {
    const std::vector<std::function<void(Table&)>> holes = {
        [](Table& t) { t.rows.clear(); },
        [](Table& t) { t.rows.resize(std::min<size_t>(t.rows.size(), 1)); },
        [](Table& t) {
            for (auto& row : t.rows) {
                for (size_t i = 3; i < row.size(); i++) { row[i] = i == 3 ? "OOM (1.0 GiB)" : ""; }
            }
        },
        [](Table& t) {  // the last row has run out of memory
            for (size_t i = 3; !t.rows.empty() && i < t.rows.back().size(); i++) { t.rows.back()[i] = "OOM (1.0 GiB)"; }
        },
        [](Table& t) {
            for (auto& row : t.rows) {
                for (size_t i = 3; i < row.size(); i++) { row[i] = atof(row[i].c_str()) > 0 ? "0.00" : row[i]; }
            }
        },
    };
    for (const std::string& name : recorded) {
        Tables tables = tables_in(fixture(name));
        std::string command = command_of(name);
        for (size_t i = 0; i < tables.size(); i++) {
            CAPTURE(name);
            CAPTURE(tables[i].caption);
            Tables fewer = tables;
            fewer.erase(fewer.begin() + i);
            check_clean(answers_of(command, fewer));
            for (const auto& hole : holes) {
                Tables other = tables;
                hole(other[i]);
                check_clean(answers_of(command, other));
            }
        }
        for (const auto& hole : holes) {
            Tables other = tables;
            for (Table& table : other) { hole(table); }
            check_clean(answers_of(command, other));
        }
    }
}
