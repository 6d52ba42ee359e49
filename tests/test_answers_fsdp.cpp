// test_answers_fsdp.cpp: the sentences of fsdp_accounting and leaderboard, from filled structs. Numbers without
// another word were measured on two H200s.
#include "test.h"

static FsdpRun way(const char* name, double parameters, double copies, double gradients, double optimizer, double rest,
                   double step) {
    FsdpRun r{name};
    auto bytes = [](double mib) { return (size_t)(mib * 1048576); };
    r.use.peak_by[PARAMETERS] = bytes(parameters), r.use.peak_by[WEIGHT_COPIES] = bytes(copies);
    r.use.peak_by[GRADIENTS] = bytes(gradients), r.use.peak_by[OPTIMIZER] = bytes(optimizer);
    r.use.peak = bytes(parameters + copies + gradients + optimizer + rest);
    r.step = {step, 0.5, step, step - 1, step + 1, 5};
    return r;
}
static std::string said(const std::vector<FsdpRun>& runs, int world = 2, double psi = 3406809600, int bytes = 4) {
    return printed([&] { answer_fsdp_accounting(runs, world, psi, bytes); });
}
static std::vector<FsdpRun> xl_fp32() {
    std::vector<FsdpRun> runs = {way("DDP", 12995.9, 0, 12995.9, 25991.9, 6526.4, 492.83),
                                 way("sharded optimizer", 12995.9, 0, 12995.9, 12995.9, 6526.4, 504.13),
                                 way("FSDP", 6498.4, 800, 849.5, 12996.9, 6526.4, 479.91)};
    runs[2].units = {{0.3, 0.225, 0, 0, 0.4}, {0.86, 0.801, 0.89, 0.003, 0.4}, {0.83, 0.003, 0.9, 0.003, 0}};
    runs[2].gathers = {26.13, 0.2, 26.1, 26, 26.3, 5}, runs[2].hidden = {26.127, 0.2, 26.1, 26, 26.3, 5};
    return runs;
}
TEST_CASE("answers: fsdp_accounting, xl in fp32") {
    const std::string text = said(xl_fp32());
    CHECK(has(text,
              "**(a)** FSDP should save 25991.9 MiB against DDP and 12995.9 MiB against a sharded optimizer. Weights, "
              "gradients and two moments take 16 Psi bytes with DDP, (8 + 8/N) Psi with the sharded optimizer and "
              "16 Psi/N with FSDP; Psi is 3406809600, N 2.\n"));
    CHECK(
        has(text,
            "FSDP takes 30838.9 MiB less than DDP. That is 4847.0 MiB less than expected: it takes 5648.4 MiB less of "
            "gradients, 800.0 MiB more of gathered units and weight copies, and 0.0 MiB more of activations.\n"));
    CHECK(has(text, "FSDP takes 17842.9 MiB less than the sharded optimizer. That is 4847.0 MiB less than expected: "));
    CHECK(has(text, "FSDP holds two whole units and their gradients in buffers."));
    CHECK(has(text,
              "**(b)** The gathers come in time for forward: from layer 1 on they take 26.130 ms, and the compute "
              "stream waits 0.003 ms for them (0.0 %). The gathers of the embedding and of layer 0 have no block "
              "to hide under: it waits 0.225 and 0.801 ms for them.\n"));
    CHECK(has(said(xl_fp32(), 2, 3406809600, 2), "8 Psi bytes with DDP, (4 + 4/N) Psi with"));
    CHECK(said(xl_fp32(), 1) == "One rank has no other to share with, so there is nothing to compare.\n");
}
// bf16: FSDP's peak is at backward's end, the others' at its beginning, with autocast's copies of the weights.
TEST_CASE("answers: fsdp_accounting, xl in bf16") {
    std::vector<FsdpRun> runs = xl_fp32();
    runs[1] = way("sharded optimizer", 12995.9, 6448.8, 12995.9, 12995.9, 3606.4, 97.84);
    runs[2].use = way("FSDP", 6498.4, 400, 7299.1, 12996.9, 32.2, 79.28).use;
    CHECK(has(said(runs),
              " MiB less than expected: it takes 801.2 MiB more of gradients, 6048.8 MiB less of gathered units and "
              "weight copies, and 3574.2 MiB less of activations.\n"));
}
TEST_CASE("answers: fsdp_accounting, gathers that come late") {
    std::vector<FsdpRun> runs = xl_fp32();
    runs[2].hidden.mean = 13.73;
    CHECK(has(said(runs),
              "**(b)** Not all gathers come in time for forward: from layer 1 on they take 26.130 ms, and the "
              "compute stream waits 12.400 ms for them (47.5 %)."));
    // A CPU's steps differ much; but nearly all is waited for.
    runs[2].gathers = {14.46, 5, 14, 9, 20, 3}, runs[2].hidden = {0.33, 0.4, 0.3, 0, 0.8, 3};
    CHECK(has(said(runs), "**(b)** Not all gathers come in time"));
    runs[2].hidden = {13.86, 5, 13, 9, 19, 3};  // 0.6 of 14.5 +- 5 ms is noise
    CHECK(has(said(runs), "**(b)** The gathers come in time"));
}
// Two whole units and their gradients are more than what sharding saves: a CPU run of a model of 13.8 MiB.
TEST_CASE("answers: fsdp_accounting, a model of few units") {
    std::vector<FsdpRun> runs = {way("DDP", 13.8, 0, 13.8, 27.5, 2.5, 189),
                                 way("sharded optimizer", 13.8, 0, 13.8, 13.8, 2.5, 97),
                                 way("FSDP", 6.9, 9.8, 16.7, 13.8, 0, 88)};
    runs[2].units.resize(6);
    const std::string text = said(runs, 2, 3609728);
    CHECK(
        has(text, "FSDP takes 10.4 MiB less than DDP. That is 17.1 MiB more than expected: it takes 9.8 MiB more of "));
    CHECK(has(text,
              "FSDP takes 3.3 MiB more than the sharded optimizer. That is 17.1 MiB more than expected: it takes 9.8 "
              "MiB more "
              "of gradients, 9.8 MiB more of gathered units and weight copies, and 2.5 MiB less of activations.\n"));
}
TEST_CASE("answers: fsdp_accounting, what did not fit") {  // 10B
    std::vector<FsdpRun> runs = xl_fp32();
    runs[0].oom = (size_t)(192.5 * (1 << 30)), runs[1].oom = (size_t)(144.7 * (1 << 30));
    std::string text = said(runs);
    CHECK(has(text, "**(a)** DDP did not fit: OOM (192.5 GiB).\n"));
    CHECK(has(text, "**(a)** sharded optimizer did not fit: OOM (144.7 GiB).\n"));
    CHECK(!has(text, "than expected"));
    CHECK(has(text, "**(b)** The gathers"));
    runs[2].oom = 1 << 30, runs[2].units.clear();
    CHECK(has(said(runs), "**(a)** FSDP did not fit: OOM (1.0 GiB).\n"));
    CHECK(!has(said(runs), "(b)"));
}

TEST_CASE("answers: leaderboard") {
    LeaderboardRun r;
    r.what = "8B (32768 tokens per sequence, batch 2; pure_bf16, mode flash, recompute, head chunk 2048)";
    r.world = 2, r.tokens = 65536, r.flops = 5.044e15, r.peak_rate = 989;
    r.predicted = (size_t)(130902.3 * 1048576), r.peak = (size_t)(130934.3 * 1048576);
    r.step = {4157.9, 9.2, 4157.1, 4147.7, 4169.8, 4};
    for (auto [part, ms] : {std::pair(FORWARD_BLOCKS, 1165.13),
                            {HEAD_AND_LOSS, 193.3},
                            {BACKWARD, 2779.14},
                            {OPTIMIZER_STEP, 14.27},
                            {EXPOSED, 6.08}}) {
        r.parts[part] = ms;
    }
    auto text = [&] { return printed([&] { answer_leaderboard(r); }); };
    CHECK(has(text(),
              "A step of 8B (32768 tokens per sequence, batch 2; pure_bf16, mode flash, recompute, head chunk 2048) "
              "on 2 ranks takes 4157.9 ms, in the mean of 4 steps. That is 15762 tokens per second and 1213 "
              "TFLOP/s, an MFU of 61.3 %.\n"));
    CHECK(has(text(),
              "The peak is 127.9 GiB per rank, predicted 127.8 GiB. The largest part of the step is backward: 2779.1 "
              "ms, 66.8 %.\n"));
    // A CPU's: below 1 TFLOP/s, without a known peak rate.
    r.world = 1, r.flops = 4.67e10, r.tokens = 64, r.peak_rate = NAN, r.step = {2912.9, 0, 2912.9, 2912.9, 2912.9, 1};
    CHECK(
        has(text(),
            " on one rank takes 2912.9 ms, in the mean of 1 step. That is 22 tokens per second and 16.03 GFLOP/s.\n"));
    r.oom = (size_t)(83.2 * (1 << 30));
    CHECK(has(text(), "head chunk 2048) on one rank did not fit: it would hold 83.2 GiB.\n"));
}
