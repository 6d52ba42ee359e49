// Tests of the answers of bench_ddp.cu: numbers that two and four H200s and 32 CPU threads gave, and others.
#include "test.h"

static void check_says(const std::string& text, const std::vector<std::string>& phrases) {
    for (const std::string& phrase : phrases) { CHECK_MESSAGE(has(text, phrase), phrase, " in: ", text); }
    for (const std::string never : {"nan", "inf ", "  ", "()", " ,", "( ", "1 calls", "1 ranks"}) {
        CHECK_MESSAGE(!has(text, never), "'", never, "' in: ", text);
    }
}
static Stats of_six(double mean, double std) { return {mean, std, mean, mean - std, mean + std, 6}; }

static AllReduceRun all_reduce_run(bool nccl, int ranks, double mb, double ms, double std = 0.001) {
    return {nccl, nccl ? CUDA : CPU, ranks, mb, of_six(ms, std * ms)};
}
TEST_CASE("answers ddp: distributed_communication_single_node") {
    const std::vector<AllReduceRun> runs = {
        all_reduce_run(false, 2, 1, 0.554),     all_reduce_run(false, 2, 1000, 501.26),
        all_reduce_run(false, 4, 1, 0.785),     all_reduce_run(false, 4, 1000, 751.92),
        all_reduce_run(false, 6, 1000, 745.33), all_reduce_run(true, 2, 1, 0.035),
        all_reduce_run(true, 2, 1000, 3.099),   all_reduce_run(true, 4, 1000, 4.274)};
    auto answers = [&](const std::vector<AllReduceRun>& of, const std::vector<std::string>& missing) {
        return printed([&] { answer_distributed_communication_single_node(of, missing); });
    };
    check_says(answers(runs, {"nccl with 6 ranks (NCCL wants one GPU per rank: 4 for 6 ranks)"}),
               {"Gloo with 2 ranks takes 0.554 ms for 1 MB and 501.3 ms for 1000 MB, 905 times as long for 1000 times "
                "the bytes: bandwidth limits both.",
                "NCCL with 2 ranks takes 0.035 ms for 1 MB and 3.099 ms for 1000 MB, 88.5 times as long for 1000 "
                "times the bytes: latency limits the small tensor",
                // A step from 2 to 6 ranks would look like a ring's. The one from 4 to 6 does not.
                "From 2 to 4 ranks Gloo takes 1.50 times as long for 1000 MB, like a ring's 1.50 times.\n",
                "From 4 to 6 ranks Gloo takes 0.99 times as long for 1000 MB, less than a ring's 1.11 times.\n",
                "With 2 ranks Gloo takes 15.8 times as long as NCCL for 1 MB, and 162 times for 1000 MB.",
                "Not measured: nccl with 6 ranks (NCCL wants"});
    std::vector<AllReduceRun> noisy = {all_reduce_run(false, 2, 10, 10, 0.4), all_reduce_run(false, 4, 10, 12, 0.4)};
    check_says(answers(noisy, {}), {"takes 1.20 times as long for 10 MB, like a ring's 1.50 times.\n"});
    AllReduceRun oom = all_reduce_run(false, 2, 1000, 0);
    oom.oom = 1000000000;
    CHECK(answers({oom}, {}) == "");
}

TEST_CASE("answers ddp: weights") {
    std::vector<WeightsCheck> checks(2, {"ToyModel", "fc3.weight", 5.96e-08, 1e-6, 250});
    checks[1].max = 1.19e-07, checks[1].model = "Transformer", checks[1].what = "all 21";
    auto answers = [&] {
        return printed([&] { answer_weights(checks, "data parallel on 2 ranks and of one process"); });
    };
    CHECK(answers() ==
          "The weights of data parallel on 2 ranks and of one process match: the largest difference is 1.19e-07 "
          "(Transformer, all 21): sums are taken in another order. All ranks hold the same bits.\n");
    checks[0].match = false, checks[0].same_bits = false;
    check_says(answers(),
               {"DIFFER in 1 of 2 rows: the largest difference is 5.96e-08 (ToyModel, fc3.weight). All ranks "
                "hold DIFFERENT bits"});
    checks = {{"ToyModel", "AdamW, broadcast", 0, 0, 500}};
    check_says(answers(), {"match: there is no difference. All ranks hold"});
}

// fp32, xl, two H200s, 2 x 128 tokens per rank
static std::vector<DdpRun> recorded() {
    auto run = [](Strategy strategy, double mb, double total, double std, double backward, double exposed, double comm,
                  double hidden, int calls) {
        DdpRun r{strategy, mb};
        r.total = of_six(total, std), r.forward = of_six(28.5, 0.05), r.backward = of_six(backward, 0.05);
        r.exposed = of_six(exposed, 0.05), r.optimizer = of_six(13.32, 0.01), r.communication = of_six(comm, 0.05);
        r.hidden = of_six(hidden * comm, 0.05), r.calls = calls, r.mb = calls ? 7992.9 : 0;
        return r;
    };
    return {run(NO_SYNC, 0, 94.17, 0.11, 52.33, 0, 0, 0, 0),
            run(NAIVE, 0, 133.32, 0.11, 52.31, 39.20, 36.93, 0, 435),
            run(FLAT, 0, 117.25, 0.13, 52.32, 23.08, 23.07, 0, 1),
            run(OVERLAPPED, 0, 110.65, 0.30, 68.24, 0.59, 62.10, 0.991, 435),
            run(BUCKETED, 1, 110.60, 0.20, 68.25, 0.55, 62.08, 0.991, 435),
            run(BUCKETED, 10, 110.78, 0.29, 68.40, 0.55, 62.36, 0.992, 435),
            run(BUCKETED, 100, 103.94, 0.15, 61.53, 0.56, 32.25, 0.983, 98),
            run(BUCKETED, 1000, 105.06, 0.08, 60.11, 3.07, 25.66, 0.881, 9)};
}
TEST_CASE("answers ddp: naive, flat and overlapped") {
    std::vector<DdpRun> runs = recorded();
    check_says(
        printed([&] { answer_naive_ddp_benchmarking(runs); }),
        {"A step takes 133.32 ms: 41.6 % more than without communication (94.17 ms). 39.20 ms of it (29.4 %) are "
         "exposed communication",
         "The 435 all-reduces, one per tensor, move 7992.9 MB in 36.93 ms (216.4 GB/s)."});
    auto flat = [&] { return printed([&] { answer_minimal_ddp_flat_benchmarking(runs); }); };
    check_says(flat(),
               {"a step takes 117.25 ms: 12.1 % less than naive (133.32 ms). Exposed communication takes 23.08 ms: "
                "41.1 % less than naive (39.20 ms).",
                "Both move 7992.9 MB; each call of naive's costs another 31.9 us."});
    runs[2].total = of_six(133.1, 0.3), runs[2].communication = of_six(36.9, 0.1);
    check_says(flat(), {"a step takes 133.10 ms: level with naive (133.32 ms) within the noise",
                        "the number of calls is not what limits them."});
    runs = recorded();
    auto overlapped = [&] { return printed([&] { answer_ddp_overlap_individual_parameters_benchmarking(runs); }); };
    check_says(overlapped(),
               {"**(a)** Overlapped, a step takes 110.65 ms: 17.0 % less than naive (133.32 ms), 5.6 % less than "
                "flat (117.25 ms), and 17.5 % more than without communication (94.17 ms).",
                "backward takes 68.24 ms instead of 52.33",
                "**(b)** In naive's trace (--trace FILE.json) all all-reduces lie after backward, and the compute "
                "stream waits 39.20 ms. In overlapped's 99.1 % of their time lies under backward, and it waits 0.59"});
    runs[3].total = of_six(420.33, 5.2), runs[3].backward = of_six(52.4, 1);
    std::string slower = overlapped();
    check_says(slower, {"3.15 times as long as naive (133.32 ms)"});
    CHECK(!has(slower, "Hiding is not free"));
}
TEST_CASE("answers ddp: ddp_bucketed_benchmarking") {
    std::vector<DdpRun> runs = recorded();
    BucketModel m{7992.9e6, 0.0311, 283.24e6};
    auto answers = [&] { return printed([&] { answer_ddp_bucketed_benchmarking(runs, m); }); };
    check_says(
        answers(),
        {"The fastest buckets have 100 MB: a step takes 103.94 ms, 6.1 % less than a tensor per call (110.65 ms) and "
         "11.4 % less than flat (117.25 ms).\n",
         "Fewer calls should take less time, and they do: 25.66 ms in 9 calls, 62.10 ms in 435.",
         "and it does: 3.07 ms with 1000 MB, 0.59 ms with a tensor per call.",
         "Here backward takes 52.33 ms and flat's all-reduce 23.07 ms, so even the calls hide. With 0.44 times the "
         "tokens per rank, or slower links, it would fit.",
         "overhead(s, w, o, n_b) = s/(n_b w) + n_b o.", "the best bucket has s/n_b = sqrt(s o w) bytes.",
         "have o = 31.1 us and w = 283.24 GB/s. With s = 7992.9 MB the best bucket has 265.3 MB and an overhead of "
         "1.87 ms."});
    runs[7].total = of_six(104.02, 0.2);  // level
    check_says(answers(), {"As fast, within the noise or with the same calls: 1000 MB."});
    // From a busy CPU: the next of 104.82 is 250.39, of the same single bucket.
    double totals[] = {489.21, 437.85, 250.39, 104.82};
    for (int i = 0; i < 4; i++) { runs[4 + i].total = of_six(totals[i], 9), runs[4 + i].calls = i < 2 ? 7 : 1; }
    std::string busy = answers();
    check_says(busy, {"The fastest buckets have 1000 MB: a step takes 104.82 ms",
                      "within the noise or with the same calls: 100 MB.", "32.25 ms in 1 call, 62.10"});
    CHECK(!has(busy, "10 MB."));
    // Communication is short enough to hide, but only 7 % of it hid.
    runs[3].hidden = of_six(0.07 * 62.10, 1);
    check_says(answers(), {"flat's all-reduce 23.07 ms, yet only 7 % of overlapped's calls hide."});
    runs[0].backward = of_six(18.55, 0.1);
    check_says(answers(),
               {"so bytes stay exposed with any bucket. With 1.24 times the tokens per rank, or faster links"});
    runs[0].backward = of_six(23.5, 0.1);
    check_says(answers(), {"so this setup fits."});
    m.w = -1;
    check_says(answers(), {"This run gives no w"});
    m = {7992.9e6, 50, 283.24e6};
    check_says(answers(), {"the best bucket has 7992.9 MB (all gradients) and an overhead of 78.22 ms"});
}

TEST_CASE("answers ddp: optimizer_state_sharding_accounting") {
    constexpr double MIB = 1048576;
    auto run = [](Sharding sharding, double after_init, double after_step, double state, double total, double optimizer,
                  double sent) {
        ShardingRun r{sharding};
        for (double peak : {after_init, 21340.3, after_step}) {
            MemoryUse use{};
            use.peak = (size_t)(peak * MIB), use.peak_by[PARAMETERS] = use.peak_by[GRADIENTS] = (size_t)(7622.7 * MIB);
            use.peak_by[OPTIMIZER] = (size_t)(state * MIB);
            r.peaks.emplace_back("", use);
        }
        r.total = of_six(total, 0.2), r.optimizer = of_six(optimizer, 0.1), r.mb_sent = sent;
        return r;
    };
    std::vector<ShardingRun> runs = {run(UNSHARDED, 7622.7, 30522.8, 15245.3, 339.51, 13.39, 7992.9),
                                     run(BROADCAST, 7654.7, 22900.1, 7622.7, 354.61, 28.19, 11989.4),
                                     run(ZERO1, 7654.7, 22900.1, 7622.7, 335.83, 32.52, 7992.9)};
    auto answers = [&](int ranks) { return printed([&] { answer_optimizer_state_sharding_accounting(runs, ranks); }); };
    check_says(
        answers(2),
        {"7622.7, 21340.3 and 30522.8 MiB unsharded, 7654.7, 21340.3 and 22900.1 MiB sharded.",
         "weights and gradients take 7622.7 MiB each",
         "15245.3 MiB unsharded, 7622.7 MiB sharded, which is the "
         "expected 1/2.",
         "**(b)** An iteration takes 354.61 ms sharded, 4.4 % more than unsharded (339.51 ms).",
         "it sends 11989.4 MB per step instead of 7992.9, and its optimizer takes 28.19 ms, 2.11 times as long as "
         "unsharded (13.39 ms).",
         "**(c)** ZeRO-1, too, shards only the optimizer's state: 7622.7 MiB per rank, where ours takes 7622.7 MiB.",
         "2 Psi (N-1)/N elements (7992.9 MB)", "3 Psi (N-1)/N (11989.4 MB)."});
    check_says(answers(4), {"which is not the expected 1/4."});
    runs[1].total = of_six(339.61, 0.23);
    check_says(answers(2), {"sharded, level with unsharded (339.51 ms) within the noise."});
    runs[0].oom = 1;
    CHECK(answers(2) == "A way does not fit, so there is no comparison.\n");
}
