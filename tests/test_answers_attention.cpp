// Tests of answers_attention.cu: tables recorded on an H200 in, the sentences out.
#include "answers.h"
#include "test.h"

static std::string recorded(const std::string& command) {
    return read_file("tests/fixtures/answers/" + command + ".md");
}
// The text with each first string replaced by the second, as often as it is there, which is at least once.
static std::string changed(std::string text, const std::vector<std::pair<std::string, std::string>>& replacements) {
    for (const auto& [from, to] : replacements) {
        size_t at = text.find(from);
        REQUIRE_MESSAGE(at != std::string::npos, from);
        for (; at != std::string::npos; at = text.find(from, at + to.size())) { text.replace(at, from.size(), to); }
    }
    return text;
}
// The lines of the text, without those that hold the word.
static std::string without(const std::string& text, const std::string& word) {
    std::string kept, line;
    for (std::istringstream lines(text); std::getline(lines, line);) {
        if (!has(line, word)) { kept += line + "\n"; }
    }
    return kept;
}
static std::string answer(const std::string& command, const std::string& tables, const std::string& part) {
    for (const Answer& a : answers_of(command, tables_in(tables))) {
        for (const char* never : {"nan", "inf,", "{}", "  ", " ."}) { CHECK_MESSAGE(!has(a.text, never), a.text); }
        if (a.part == part) { return a.text; }
    }
    return "no answer (" + part + ")";
}
static void check_says(const std::string& text, const std::vector<std::string>& phrases) {
    for (const std::string& phrase : phrases) { CHECK_MESSAGE(has(text, phrase), phrase, " in: ", text); }
}

TEST_CASE("answers: pytorch_attention") {
    const std::string command = "pytorch_attention", tables = recorded(command);
    check_says(answer(command, tables, "a"),
               {"None of the 20 configurations", "S 16384, forward takes 32.58 to 48.45 ms and backward 67.14 to 97.05",
                "over D 16 to 128."});
    check_says(answer(command, tables, "a, growth"),
               {"From S 8192 to S 16384 at D 16", "from 4148.50 to 16457.00 MiB, times 3.97, like S^1.99: the S x S"});
    check_says(answer(command, tables, "a, accounting"),
               {"D 16 and S 32768: its peak is 160.10 GiB, and 139.18 GiB are there",
                "holds 65618.00 MiB, and "
                "65536.00 MiB of them are 2 arrays of B S^2 = 8 x 32768^2 numbers with 4 bytes each",
                "in backward, it holds 5 such arrays"});
    check_says(answer(command, tables, "a, remedy"), {"(5 D + 1) bytes = 81.00 MiB"});

    const std::string longest = "0.032579 |      0.067138 |        16457.00 | OK     |";
    std::string oom = changed(tables, {{longest, "N/A | N/A | N/A | OOM (40.1 GiB) |"}});
    check_says(answer(command, oom, "a"),
               {"Memory runs out in 1 of the 20 configurations of the table, the smallest with D 16 and S 16384: OOM "
                "(40.1 GiB).",
                "forward takes 33.88 to 48.45 ms", "over D 32 to 128"});
    check_says(answer(command, oom, "a, growth"), {"S 16384 at D 32"});
    std::string flat = changed(tables, {{" 4148.50", "16450.00"}});
    check_says(answer(command, flat, "a, growth"), {"times 1.00, like S^0.00: at these lengths", "do not decide yet"});

    std::string one = tables;
    for (const char* S : {" 1024 ", " 4096 ", " 8192 ", " 16384 "}) {
        one = without(one, std::string("| ") + std::string(8 - strlen(S), ' ') + S + "|");
    }
    check_says(answer(command, one, "a"), {"None of the 4 configurations"});
    check_says(answer(command, one, "a, growth"), {"Only one length ran, S 256"});
    check_says(answer(command, tables.substr(0, tables.find("the smallest configuration")), "a, accounting"),
               {"The table that accounts for the smallest OOM is missing."});
    std::string nothing = changed(tables, {{" OK ", " OOM (1.0 GiB) "}, {" 0.0", " N/A"}});
    check_says(answer(command, nothing, "a"), {"Memory runs out in 20 of the 20", "the smallest with D 16 and S 256"});
}

TEST_CASE("answers: torch_compile") {
    const std::string command = "torch_compile", tables = recorded(command);
    check_says(answer(command, tables, "a"),
               {"1.61 to 3.04 times as fast in forward and 1.67 to 2.85 times as fast in backward, over 20 of 20 "
                "configurations.",
                "At S 16384, from D 16 to D 128, the forward's speedup falls from 2.36x to 1.64x",
                "the backward's falls from 2.66x to 1.73x: the products", "Nothing here ran torch.compile"});
    check_says(answer(command, tables, "b"),
               {"In fp32, mode fused, whose kernels we fused by hand, has a speedup over eager of 1.16x (xl) to 1.43x "
                "(small) in forward and 1.33x (2.7B) to 1.71x "
                "(small) in forward+backward+optimizer.",
                "falls from 1.43x for small to 1.16x for 2.7B: the matrix products", "from 108.1 to 22.5 ms for 2.7B"});

    std::string other = changed(tables, {{"1.64x", "3.64x"},
                                         {"2.31x", "0.91x"},
                                         {"10.53 |          7.37 | 1.43x", "10.53 |         11.70 | 0.90x"},
                                         {"472.92", "430.00"}});
    check_says(answer(command, other, "a"),
               {"0.91 to 3.64 times as fast (slower in 1 of 20 rows) in forward", "rises from 2.36x to 3.64x"});
    CHECK(!has(answer(command, other, "a"), "the products with D columns"));
    check_says(answer(command, other, "b"),
               {"0.90x (small) to 1.29x (large) in forward (below 1x, fused is slower) and",
                "rises from 0.90x for small to 1.16x for 2.7B."});
    CHECK(!has(answer(command, other, "b"), "The optimizer"));
    std::string grid_oom = changed(tables, {{"3.04x", ""}, {"2.73x", ""}});
    check_says(answer(command, grid_oom, "a"),
               {"1.61 to 2.58 times", "19 of 20 configurations; the others ran out of"});

    std::string oom = changed(tables, {{"172.87 |        148.73 | 1.16x", "OOM (61.2 GiB) | 148.73 | "},
                                       {"518.89 |        450.41 | 1.15x", "OOM (61.2 GiB) | 450.41 | "},
                                       {"626.97 |        472.92 | 1.33x", "OOM (61.2 GiB) | 472.92 | "}});
    std::string bf16 = changed(oom.substr(oom.find("torch_compile (b)")), {{"precision fp32", "precision bf16"}});
    check_says(answer(command, tables + "\n" + bf16, "b, fp32"), {"In fp32, mode fused"});
    check_says(answer(command, tables + "\n" + bf16, "b, bf16"),
               {"In bf16, mode fused", "1.38x (xl) to 1.71x (small)", "ms for xl.",
                "Not compared, because one mode ran out of memory: 2.7B."});
    std::string none;
    for (const char* size : {"small", "medium", "large", "xl"}) { oom = without(oom, std::string("| ") + size); }
    check_says(answer(command, oom, "b"), {"In fp32, no size ran in both modes.", "ran out of memory: 2.7B."});
}

TEST_CASE("answers: weighted_sum") {
    const std::string command = "weighted_sum", tables = recorded(command);
    check_says(answer(command, tables, ""),
               {"On cpu, N 16384 with D 1024 takes 1.5074 ms forward, at 44.6 GB/s, and 3.6420 ms backward, at 36.9 "
                "GB/s, and the largest error of all sizes against fp64 is 1.5e-05.",
                "On cuda, N 65536 with D 4096 takes 0.2446 ms forward, at 4391.5 GB/s, and 0.5916 ms backward, at "
                "3630.5 GB/s, and the largest error of all sizes against fp64 is 3.7e-04."});
    check_says(answer(command, changed(tables, {{"2.3e-05", "2.3e-02"}}), ""), {"fp64 is 2.3e-02."});
    std::string cpu = without(tables, "| cuda");
    CHECK(!has(answer(command, cpu, ""), "On cuda"));
    CHECK(answer(command, without(cpu, "| cpu"), "") == "no answer ()");
}

TEST_CASE("answers: flash_forward and flash_backward") {
    const std::string forward = recorded("flash_forward"), backward = recorded("flash_backward");
    check_says(answer("flash_forward", forward, "a"), {"`tiled`", "this table has no row of it: --device cpu"});
    check_says(answer("flash_forward", forward, "b"),
               {"float32 (flash_fp32): 4.0e-07 in O and 4.8e-07 in L",
                "bfloat16 (flash_mma and hopper): 2.5e-03 in O and 6.0e-04 in L"});
    check_says(answer("flash_forward", forward, "c"),
               {"64, causal): float32 (flash_fp32): 5.5e-07 in O", "7.0e-03 in O and 1.1e-03 in L",
                "adds -1e6 to a masked score, ours becomes -inf", "All 33 checks of the table pass"});
    check_says(answer("flash_backward", backward, ""),
               {"causal and not): float32 (flash_fp32): 8.5e-07 in dQ, 1.8e-06 in dK and 1.8e-06 in dV",
                "9.1e-03 in dQ, 1.1e-02 in dK", "D = rowsum(O dO)", "All 33 checks"});

    const std::string hopper = "2.0e-03 | 6.0e-04 | ", row = hopper + "ok";
    check_says(answer("flash_forward", changed(forward, {{row, hopper + "WRONG"}}), "c"),
               {"Checks of the table that fail: 1 of 33, first hopper in bfloat16 at Tq 128, Tk 128, D 64"});
    std::string tiled = without(without(without(forward, "flash_mma"), "hopper"), "naive");
    tiled = changed(tiled, {{"flash_fp32", "tiled     "}});
    check_says(answer("flash_forward", tiled, "a"), {"float32 (tiled): 4.0e-07 in O"});
    check_says(answer("flash_forward", tiled, "b"), {"no kernel's row, because kernels need a GPU"});
    check_says(answer("flash_forward", tiled, "c"), {"causal): float32 (tiled): 5.5e-07 in O"});
    std::string odd_only = without(forward, " 128 |  64 |");
    check_says(answer("flash_forward", odd_only, "c"), {"no row of the handout's test with a causal", "All 11 checks"});
    check_says(answer("flash_backward", without(backward, " 128 |  64 |"), ""), {"no row of the handout's test"});
}

TEST_CASE("answers: flash_benchmarking") {
    const std::string command = "flash_benchmarking", tables = recorded(command);
    check_says(
        answer(command, tables, "a"),
        {"At S 65536, flash runs forward and backward faster than naive, our attention with one kernel per operation, "
         "by these factors: 93.93 (D 16) and 36.84 (D 128) times in bfloat16 (forward alone 56.98 to 102.89, backward "
         "alone 29.21 to 88.47)",
         "5.76 (D 64) and 3.57 (D 128) times in float32",
         "Naive is as fast or faster in float32 at S 2048 with D 64 and S 1024, 2048 and 4096 with D 128 (flash is "
         "faster from S 4096 on with D 64 and from S 8192 on with D 128)."});
    CHECK(answer(command, tables, "a, why") ==
          "Flash is slower there because one head of S positions gives it only S / 64 blocks, which leave "
          "multiprocessors idle; naive spreads S^2 numbers over the whole card.");
    std::string fast = changed(
        tables,
        {{"  0.95 |", "  1.95 |"}, {"  0.58 |", "  1.58 |"}, {"  0.59 |", "  1.59 |"}, {"  0.98 |", "  1.98 |"}});
    check_says(answer(command, fast, "a"), {"Flash is faster in every row."});
    CHECK(answer(command, fast, "a, why") == "no answer (a, why)");

    std::string slow = changed(tables, {{" 93.93 |", "  0.50 |"}, {"  0.95 |", "  1.95 |"}, {"  0.58 |", "  1.58 |"}});
    check_says(answer(command, slow, "a"),
               {"0.50 (D 16)",
                "in bfloat16 at S 65536 with D 16 (flash is faster at no longer S of this table with D 16) and in "
                "float32 at S 2048 and 4096 with D 128 (flash"});
    std::string oom = changed(
        tables, {{"|   125.522 |   207.935 |   332.953 |    26.253 |    66.962 |    93.164 |   4.78 |  3.11 |  3.57 |",
                  "| OOM (161.0 GiB) | OOM (161.0 GiB) | OOM (161.0 GiB) | 26.253 | 66.962 | 93.164 | | | |"}});
    check_says(answer(command, oom, "a"),
               {"At S 65536, or where given at the longest S at which both ran, flash", "3.64 (D 128, at S 32768)",
                "Rows where naive runs out of memory: 1, first at S 65536, where flash takes 93.164 ms."});
    size_t rows = oom.find("| 16384 "), row = oom.rfind("| 65536 ");
    std::string none = oom.substr(0, rows) + oom.substr(row);
    check_says(answer(command, none, "a"),
               {"No row has times of both naive and flash. Rows where naive runs out of memory: 1"});
    CHECK(answer(command, oom.substr(0, rows), "a") == "no answer (a)");
}

TEST_CASE("answers: flash_leaderboard") {
    const std::string command = "flash_leaderboard", tables = recorded(command);
    check_says(
        answer(command, tables, ""),
        {"Our fastest implementation, hopper, takes 3.575 ms for forward and backward (1.054 and 2.476 ms alone): 538 "
         "TFLOP/s, 68 % of this device's rate for matrix products (797 TFLOP/s).",
         "same kind of card, H200, is FlashAttention-3 with 3.660 ms in an earlier run, 1.02 times ours",
         "(class leaderboard 2025, first) has 5.364 ms in an earlier run, 1.50 times ours, on another card, H100"});
    std::string slow = changed(tables, {{"3.575", "7.320"}, {"NVIDIA H200", "NVIDIA H100"}});
    check_says(answer(command, slow, ""),
               {"flash_mma, takes 6.005 ms",
                "card, H100, is class leaderboard 2025, first with 5.364 ms in an earlier run, 0.89",
                "on the same card, H100"});
    check_says(answer(command, changed(tables, {{"NVIDIA H200", "NVIDIA L4"}}), ""),
               {"No other entry is from this kind of card."});
    check_says(answer(command, changed(tables, {{" 6.005", "OOM (9.0 GiB)"}, {" 3.575", "OOM (9.0 GiB)"}}), ""),
               {"None of our implementations ran: OOM (9.0 GiB)."});
    std::string ours = without(without(without(tables, " H200 "), " H100 "), "flash_mma");
    check_says(answer(command, ours, ""),
               {"Our only implementation here, hopper, takes 3.575 ms", "This is not the handout's shape"});
}

TEST_CASE("answers: a run of sections 1.2 and 1.3 that was scaled down says so") {
    const std::map<std::string, std::vector<std::string>> parts = {
        {"pytorch_attention", {"a"}}, {"torch_compile", {"a", "b"}}, {"weighted_sum", {""}},
        {"flash_forward", {"c"}},     {"flash_backward", {""}},      {"flash_benchmarking", {"a"}},
        {"flash_leaderboard", {""}}};
    for (const auto& [command, letters] : parts) {
        std::string small = recorded(command);
        for (size_t at = 0; (at = small.find("; commit ", at)) != std::string::npos; at += 20) {
            small.insert(at, "; scaled down: this and that");
            at += strlen("; scaled down: this and that");
        }
        if (command == "weighted_sum") { small = changed(small, {{", commit ", "; scaled down: this and that; ,"}}); }
        for (const std::string& letter : letters) {
            check_says(answer(command, small, letter), {" This run was scaled down: this and that."});
        }
    }
}
