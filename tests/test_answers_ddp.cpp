// Tests of answers_ddp.cu: tables that two and four H200s and 32 CPU threads gave, and the same with other numbers.
#include "answers.h"
#include "test.h"

// "(a) ...\n(b) ...\n", of a recorded run whose text was changed first: {from, to, from, to, ...}.
static std::string answers_to(const std::string& command, const std::vector<std::string>& changes = {},
                              const std::string& file = "") {
    std::string text = read_file("tests/fixtures/answers/" + (file.empty() ? command : file) + ".md");
    for (size_t i = 0; i + 1 < changes.size(); i += 2) {
        size_t at = text.find(changes[i]);
        REQUIRE_MESSAGE(at != std::string::npos, changes[i]);
        for (; at != std::string::npos; at = text.find(changes[i], at + changes[i + 1].size())) {
            text.replace(at, changes[i].size(), changes[i + 1]);
        }
    }
    std::string all;
    for (const Answer& a : answers_of(command, tables_in(text))) { all += "(" + a.part + ") " + a.text + "\n"; }
    return all;
}
static void check_says(const std::string& text, const std::vector<std::string>& phrases) {
    for (const std::string& phrase : phrases) { CHECK_MESSAGE(has(text, phrase), phrase, " in: ", text); }
    for (const std::string never : {"nan", "inf ", "{}", "  ", "()  ", " ,", "( "}) {
        CHECK_MESSAGE(!has(text, never), "'", never, "' in: ", text);
    }
}

TEST_CASE("answers ddp: distributed_communication_single_node") {
    const char* command = "distributed_communication_single_node";
    check_says(
        answers_to(command),
        {"Gloo with 2 ranks takes 0.554 ms for 1 MB and 459.355 ms for 1000 MB, 829 times as long for 1000 times "
         "the bytes (busbw 1.81 and 2.18 GB/s): bandwidth limits nearly every size.",
         "(ranks) A ring's link carries 2(n-1)/n times the size for n ranks. From 2 to 6 ranks, Gloo takes 1.66 times "
         "as long for 1000 MB and 2.05 times for 1 MB, where a ring's link carries 1.67 times as much: that explains "
         "the "
         "large tensor, and the small one also pays for more steps.",
         "NCCL with 2 ranks takes 0.035 ms for 1 MB and 3.099 ms for 1000 MB, 89 times as long",
         "latency limits the small tensor, bandwidth the large one",
         "carries 1.50 times as much: that explains the large tensor.\n",
         "(backend) Gloo takes 16 times (1 MB), 60 times (10 MB), "
         "117 times (100 MB) and 148 times (1000 MB) as long as NCCL with 2 ranks.",
         "Not measured: NCCL with 6 ranks."});
    check_says(
        answers_to(command, {"459.355", "1459.355", "  760.968", "15760.968"}),
        {"2634 times as long for 1000 times the bytes", "the large tensor gets less bandwidth than the small one",
         "Gloo takes 11 times as long for 1000 MB", "the large tensor takes longer than that"});
    check_says(answers_to(command, {"760.968", "460.968"}), {"the large tensor takes less than that"});
    // without a GPU; and with one size
    const std::string gpus = "| nccl    | cuda   |     2 |                1 |     0.035 |";
    check_says(answers_to(command, {gpus, "| nccl | cuda | 2 | 1 | OOM |"}),
               {"NCCL with 2 ranks takes 0.071 ms for 10 MB", "Gloo takes 60 times (10 MB)"});
    check_says(answers_to(command, {" 28.32 |        28.32 ", " | "}), {"NCCL with 2 ranks takes 0.071 ms for 10 MB"});
    Table one{"distributed_communication_single_node: all-reduce; scaled down: 3 steps instead of 10",
              {"Backend", "Device", "Ranks", "Tensor Size (MB)", "median ms", "busbw (GB/s)", "sums"},
              {{"gloo", "cpu", "2", "1", "0.5", "2.00", "right"}, {"nccl", "cuda", "2", "all", "", "", "no GPU here"}}};
    Answers few = answers_of(command, {one});
    REQUIRE(few.size() == 2);
    CHECK(few[0].text ==
          "Gloo with 2 ranks takes 0.5 ms for 1 MB (2.00 GB/s busbw); there is no other size to compare with.");
    CHECK(few[1].text ==
          "Not measured: Gloo with 4 and 6 ranks and NCCL with 2, 4 and 6 ranks (no GPU here). This run was scaled "
          "down: 3 "
          "steps instead of 10.");
    one.rows.pop_back();  // --device cpu: NCCL was not asked for
    few = answers_of(command, {one});
    REQUIRE(few.size() == 2);
    CHECK(few[1].text == "Not measured: Gloo with 4 and 6 ranks. This run was scaled down: 3 steps instead of 10.");
    one.rows = {{"nccl", "cuda", "2", "all", "", "", "no GPU here"}};  // 2026's, without a GPU
    few = answers_of(command, {one});
    REQUIRE(few.size() == 1);
    CHECK(few[0].text ==
          "Not measured: NCCL with 2, 4 and 6 ranks (no GPU here). `--device cpu` measures Gloo on the CPU. This run "
          "was scaled down: 3 steps instead of 10.");
}
TEST_CASE("answers ddp: weights of data parallel and of one process") {
    check_says(answers_to("naive_ddp"),
               {"The weights of 2 ranks match those of one process that sees the whole batch of 20, after each of 5 "
                "steps; the largest difference, 1.19e-07 (Transformer, d_model 64, 2 layers, all 21), is rounding",
                "All ranks hold the same bits", "sent after backward."});
    check_says(answers_to("ddp_overlap_individual_parameters"), {"sent as soon as backward has finished it."});
    check_says(answers_to("ddp_overlap_bucketed"), {"finished its last gradient"});
    check_says(answers_to("naive_ddp", {"3.63e-09 | match      | identical", "3.63e-02 | DIFFER | DIFFER"}),
               {"are not those of one process: 1 of 9 rows differ, by up to 5.96e-08 (ToyModel, fc1.weight).",
                "The ranks hold different bits"});
    check_says(answers_to("naive_ddp", {"5.96e-08 |  3.63e-09 | match ", "nan | nan | DIFFER "}),
               {"1 of 9 rows differ. All ranks"});
}
TEST_CASE("answers ddp: naive_ddp_benchmarking") {
    const char* command = "naive_ddp_benchmarking";
    check_says(
        answers_to(command),
        {"Setup: 2 ranks over nccl on 2 x NVIDIA H200, size xl (d_model 1600, 48 layers), precision fp32, mode flash, "
         "per rank 2 x 128 tokens; a time is the mean of 6 steps, after 3 warm-ups, and of the ranks.",
         "A step takes 133.39 ms, 1.42 times as long as one without communication (94.16 ms), and 39.23 ms of it "
         "(29.4%) are exposed communication (from the end of backward to ",
         "The 435 all-reduces, one per tensor, move 7992.9 MB and take 36.95 ms (216.3 GB/s) themselves; the other "
         "2.28 "
         "ms are gaps between them."});
    check_says(answers_to(command, {" 0.12 |", " 50.12 |", "36.95", "39.95"}),
               {"take 39.95 ms (200.1 GB/s) themselves.\n",
                "(94.16 ms, within one standard deviation, 50.12 ms, so this run does not show which is faster), and"});
    CHECK(answers_to(command, {" 133.39 | 0.12", " OOM (61.2 GiB per rank) | "}) ==
          "() No step was measured: size xl (d_model 1600, 48 layers) does not fit into this machine's memory: OOM "
          "(61.2 GiB per "
          "rank).\n");
    for (const std::string one : {"; 1 ranks", "; 1 rank"}) {
        CHECK(answers_to(command, {"; 2 ranks", one}) ==
              "() One rank has no other to share with, so there is nothing to compare.\n");
    }
    check_says(answers_to(command, {", 3 warmup, 6 step", ", 1 warmup, 1 step"}),
               {"a time is the mean of 1 step, after 1 warm-up, and of the ranks."});
    CHECK(answers_to(command, {"| naive    |", "| other |"}) ==
          "() The table has no Total Time (ms) for \"naive\", so there is no answer.\n");
}
TEST_CASE("answers ddp: minimal_ddp_flat_benchmarking") {
    const char* command = "minimal_ddp_flat_benchmarking";
    check_says(
        answers_to(command),
        {"a step takes 116.98 ms, 16.14 ms (12.1%) less than with one per tensor (133.12 ms)",
         "The exposed communication (from the end of backward to the end of the last all-reduce) falls from 39.02 to "
         "22.90 ms.",
         "take 22.90 ms instead of 36.73, so bytes cost naive 22.90 ms, and 434 more calls 13.83 ms "
         "(31.9 us each)."});
    check_says(answers_to(command, {"116.98", "143.12", "36.73", "66.73"}),
               {"10.00 ms (7.5%) more than with",
                "so bytes cost naive 22.90 ms, and 434 more calls 43.83 ms (101.0 us each)."});
    check_says(answers_to(command), {"(setup) 2 ranks over nccl on 2 x NVIDIA H200, size xl"});
    std::string open = answers_to(command, {"116.98", "133.10"});
    check_says(open, {"within one standard deviation", "instead of 36.73.\n"});
    CHECK(!has(open, "so bytes cost"));
    check_says(answers_to(command, {"36.73", "20.73"}), {"so the number of calls is not what limits them"});
    check_says(answers_to(command, {"36.73", ""}), {"has no Comm Time (ms) for \"naive\""});
}
TEST_CASE("answers ddp: ddp_overlap_individual_parameters_benchmarking") {
    const char* command = "ddp_overlap_individual_parameters_benchmarking";
    check_says(
        answers_to(command),
        {"(a) Overlapped, a step takes 110.33 ms: 22.99 ms (17.2%) less than naive (133.32 ms) and 6.67 ms (5.7%) "
         "less than flat (117.00 ms); without communication it takes 94.15 ms. 0.54 ms are exposed communication "
         "(from the end of backward",
         "instead of 39.15 naive and 22.84 flat; 99.2% of the all-reduces' time lies under backward.",
         "backward takes 68.01 ms instead of 52.32, and the all-reduces 62.39 instead of 36.89,",
         "(b) The two traces are files: `--trace", "0.0% of naive's all-reduce time lies under backward, and 99.2%"});
    std::string slower = answers_to(command, {"110.33", "120.33", "68.01", "52.01", "0.21", "5.21"});
    check_says(slower, {"3.33 ms (2.8%) "
                        "more than flat (117.00 ms, within one standard deviation, 5.21 ms, so this"});
    CHECK(!has(slower, "Hiding is not free"));
    CHECK(!has(answers_to(command), "deviation"));
    check_says(answers_to(command, {"99.2%", ""}), {"22.84 flat. Hiding", "among them.\n"});
    check_says(answers_to(command, {"110.33", "OOM (61.2 GiB per rank)"}), {"(a) No step was measured"});
}
TEST_CASE("answers ddp: ddp_bucketed_benchmarking") {
    const char* command = "ddp_bucketed_benchmarking";
    check_says(
        answers_to(command),
        {"(a) With buckets a step takes 110.60 ms (1 MB), 110.78 ms (10 MB), 103.94 ms (100 MB) and 105.06 ms (1000 "
         "MB).",
         "110.65 ms overlapped, 117.25 flat, 133.32 naive and 94.17 without communication.",
         "(a, expected) Fewer calls should cost less, and they do: all-reduces take 62.10 ms in 435 calls and 25.66 ms "
         "in 9.",
         "and it does: 3.07 ms with 1000 MB, 0.55 to 0.56 ms with smaller buckets.",
         "(a, setup) The model in (b) takes backward to be as long as the all-reduces; here it takes 52.33 ms and "
         "flat's "
         "all-reduce 23.07 ms, so calls hide under backward, too: a matching setup has "
         "about "
         "0.44 times the tokens per rank or slower links.",
         "overhead(s, w, o, n_b) = s/(n_b w) + n_b o.", "the best bucket has s/n_b = sqrt(s o w) bytes.",
         "With s = 7992.9 MB, and o = 31.1 us and w = 283.24 GB/s fitted to all-reduces of 0.25 to 256 MB, the best "
         "bucket has 265.1 MB and the overhead is 1.87 ms."});
    check_says(answers_to(command, {"|          98 |", "|           9 |"}),
               {"0.56 ms with 100 MB, 0.55 ms with smaller buckets. 1000 MB is the same 9 buckets as 100 MB."});
    check_says(answers_to(command, {"|          98 |", "|           1 |", "|           9 |", "|           1 |"}),
               {" 1000 MB is the same single bucket as 100 MB."});
    std::string bf16 = answers_to(command, {}, "ddp_bucketed_benchmarking_bf16");
    check_says(bf16,
               {"and here it does not: 3.39 ms with 1000 MB, 5.51 to 17.99 ms with smaller buckets.",
                "so bytes stay exposed with any bucket: a matching setup has about 1.24 times the tokens per rank, "
                "16-bit gradients (--precision bf16 --reduce_dtype bf16) or faster links."});
    std::string halved =
        answers_to(command, {"mode flash;", "mode flash, gradients reduced in bf16;", "25.66", "65.66"},
                   "ddp_bucketed_benchmarking");
    check_says(halved, {"here they do not"});
}
TEST_CASE("answers ddp: ddp_bucketed_benchmarking, tables with holes") {
    const char* command = "ddp_bucketed_benchmarking";
    const std::string fit =
        "o = 31.1 us, w = 283.24 GB/s (algbw); least, 1.87 ms, with buckets of sqrt(s o w) = 265.1 MB";
    check_says(answers_to(command, {fit, "no w, they took no longer"}),
               {"sqrt(s o w) bytes. This run could not fit w"});
    check_says(answers_to(command, {"265.1 MB;", "9265.1 MB;"}), {"9265.1 MB (more than there is: one bucket)"});
    check_says(answers_to(command, {"DDP overhead", "something else"}), {"The table of the fitted model is missing"});
    check_says(answers_to(command, {"23.07", "52.07"}), {"so this setup matches."});
    check_says(
        answers_to(command, {"105.06 | 0.08", "103.99 | 0.18"}),
        {"The fastest has 100 MB, the next 1000 MB, within one standard deviation, 0.18 ms, so this run does not"});
    check_says(answers_to(command, {"103.94 | 0.15", "OOM (61.2 GiB per rank) | "}),
               {"(a) No step was measured", "(b) A bu"});
    check_says(answers_to(command, {"bucketed, ", "other, "}),
               {"(a) No step with buckets was measured.\n(b) A bucket"});
}
TEST_CASE("answers ddp: optimizer_state_sharding") {
    const char* command = "optimizer_state_sharding";
    CHECK(
        answers_to(command) ==
        "() On 2 ranks the sharded optimizers give the weights of the unsharded ones after each of 10 steps; no weight "
        "differs. All ranks hold the same bits. Of AdamW's 1700 elements of state for ToyModel the ranks keep 850 + "
        "850: a share is a range of the flat weights, whatever tensors it cuts.\n");
    check_says(answers_to(command, {"SGD, momentum | sharded, ZeRO-1    | 0.00e+00",
                                    "SGD, momentum | sharded, ZeRO-1 | 7.45e-09"}),
               {"the largest difference, 7.45e-09, is rounding"});
    check_says(answers_to(command, {"SGD, momentum | sharded, ZeRO-1    | 0.00e+00 |  0.00e+00 | match",
                                    "SGD, momentum | sharded, ZeRO-1 | 7.45e-01 | 7.45e-01 | DIFFER"}),
               {"do not give the weights of the unsharded ones: 2 of 8 rows differ, by up to 7.45e-01 (ToyModel, SGD, "
                "momentum, sharded, ZeRO-1)."});
}
TEST_CASE("answers ddp: optimizer_state_sharding_accounting") {
    const char* command = "optimizer_state_sharding_accounting";
    check_says(
        answers_to(command),
        {"are 7622.7, 21340.3 and 30522.8 MiB unsharded, and 7654.7, 21340.3 and 22900.1 MiB sharded.",
         "7622.7 MiB of weights, 7622.7 of gradients and 6095.0 of activations and the rest",
         "15245.3 MiB unsharded and 7622.7 sharded, which is the expected 1/2.",
         "it takes the peak from 36585.7 to 28963.0 MiB.",
         "(b) An iteration takes 354.61 ms sharded, 15.10 ms (4.4%) more than unsharded (339.51 ms).",
         "take 28.19 ms instead of 13.39",
         "it sends 11989.4 MB per step instead of 7992.9, and the broadcast "
         "costs more than the shorter step saves.",
         "(c) Like ours, ZeRO's stage 1 shards only the optimizer's state, and memory is the same, 7622.7 MiB of",
         "2 Psi (N-1)/N elements (7992.9 MB per step), while", "3 Psi (N-1)/N (11989.4 MB).",
         "ZeRO-1's iteration takes 335.83 ms, 18.78 ms (5.3%) less than ours."});
    check_says(
        answers_to(command, {"354.61", "334.61", "28.19", "12.19", "accounting; 2 ranks", "accounting; 4 ranks"}),
        {"which is not the expected 1/4.", "4.90 ms (1.4%) less than unsharded", "costs less than the shorter",
         "1.22 ms (0.4%) more than ours."});
    check_says(answers_to(command, {"354.61 | 0.13", "339.61 | 0.23"}),
               {"than unsharded (339.51 ms, within one standard deviation, 0.23 ms, so this run",
                "it sends 11989.4 MB per step instead of 7992.9.\n"});
    CHECK(answers_to(command, {"; 2 ranks", "; 1 ranks"}) ==
          "() One rank has no other to share with, so there is nothing to compare.\n");
    check_says(answers_to(command, {"335.83", "OOM"}),
               {"1/2.", "(b) The table of times is missing or has empty cells"});
    check_says(answers_to(command, {"22900.1", ""}),
               {"(a) The table has no peak for \"sharded, broadcast\" after step", "(b) An iter"});
    check_says(answers_to(command, {"time per iteration", "something else"}), {"(c) The table of times is missing"});
}
TEST_CASE("answers ddp: none without tables, once and from rank 0 alone, in every format") {
    for (const char* command : {"distributed_communication_single_node", "naive_ddp", "naive_ddp_benchmarking",
                                "ddp_bucketed_benchmarking", "optimizer_state_sharding_accounting"}) {
        CHECK(answers_of(command, {}).empty());
    }
    if (lacks("gloo", CPU, 2)) { return; }
    for (const std::string format : {"md", "csv", "json"}) {
        Run r = run_cs336({"naive_ddp", "--device", "cpu", "--nproc", "2", "--format", format});
        REQUIRE(r.exit_code == 0);
        size_t at = r.out.find("The weights of 2 ranks match");
        CHECK(at != std::string::npos);
        CHECK(r.out.find("The weights of", at + 1) == std::string::npos);
    }
    Run groups =
        run_cs336({"distributed_communication_single_node", "--quick", "--device", "cpu"});  // reads its ranks' csv
    CHECK(groups.exit_code == 0);
    CHECK(has(groups.out, "\n\n**(size)** Gloo with 2 ranks takes "));
}
