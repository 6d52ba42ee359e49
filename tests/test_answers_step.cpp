// Answers of bench_step.cu and bench_checkpoint.cu: numbers in, sentences out. The times were measured on an H200 where
// nothing else is said.
#include "test.h"

static PhaseRun took(double mean, double std, double backward_mean = 0, double backward_std = 0, int n = 10) {
    PhaseRun run;
    run.all = {mean, std, mean, mean, mean, n}, run.backward = {backward_mean, backward_std, 0, 0, 0, n};
    return run;
}
static PhaseRun no_room(double gib) {
    PhaseRun run;
    run.oom = (size_t)(gib * (1 << 30));
    return run;
}
static StepRun step_run(const char* size, Precision precision, Mode mode, PhaseRun forward, PhaseRun both,
                        PhaseRun step = {}) {
    return {{size, 64, 64, 1, 1, 64}, precision, mode, {forward, both, step}};
}
static void check_says(const std::string& text, const std::vector<std::string>& phrases) {
    for (const std::string& phrase : phrases) { CHECK_MESSAGE(has(text, phrase), phrase, " in: ", text); }
    for (const char* dirt : {"nan", "inf ", "  ", "()", " ."}) { CHECK_MESSAGE(!has(text, dirt), dirt, " in: ", text); }
}

static std::string times(std::vector<StepRun> runs) {
    return printed([&] { answer_step_times(runs); });
}
static std::vector<StepRun> recorded_steps() {
    return {step_run("small", FP32, FLASH, took(6.72, 0.01), took(20.33, 0.01, 13.51, 0.01), took(21.25, 0.04)),
            step_run("xl", FP32, FLASH, took(104.88, 0.04), took(297.64, 0.04, 192.70, 0.02), took(310.92, 0.05)),
            step_run("2.7B", FP32, FLASH, took(145.16, 1.55), took(443.72, 0.04, 299.56, 0.03), took(466.31, 0.04))};
}
TEST_CASE("answers step: benchmarking_script (b)") {
    std::vector<StepRun> runs = recorded_steps();
    check_says(
        times(runs),
        {"**(b)** In fp32, mode flash, forward takes 6.72 ms (small) to 145.16 ms (2.7B), backward takes 13.51 ms "
         "(small) to 299.56 ms (2.7B) and a whole step takes 21.25 ms (small) to 466.31 ms (2.7B).",
         "The standard deviation is small: at most 1.1 % of the mean (forward of 2.7B)."});
    runs[2].phase[FORWARD] = took(145.16, 31.55);
    runs[2].phase[STEP] = no_room(50.8);
    check_says(times(runs), {"21.25 ms (small) to 310.92 ms (xl). Out of memory: step of 2.7B.",
                             "is large: up to 21.7 % of the mean (forward of 2.7B)."});
    check_says(times({step_run("xl", FP32, EAGER, no_room(7), no_room(9), no_room(30))}),
               {"In fp32, mode eager, nothing ran. Out of memory: forward of xl."});
    CHECK(!has(times({step_run("xl", FP32, EAGER, took(3, 0, 0, 0, 1), {})}), "deviation"));  // of one step
}

static std::string warmups(std::vector<WarmupRun> runs) {
    return printed([&] { answer_warmup(runs); });
}
TEST_CASE("answers step: benchmarking_script (c)") {
    RestoreContext restore;
    context.device = CUDA;
    std::vector<WarmupRun> runs = {{0, took(19.52, 39.43), took(22.93, 5.82)},
                                   {1, took(6.99, 0.88), took(21.14, 2.74)},
                                   {2, took(6.72, 0.01), took(20.27, 0.03)},
                                   {5, took(6.68, 0.00), took(20.19, 0.02)}};
    check_says(warmups(runs),
               {"**(c)** The first steps are slower: they also load the kernels' code, create the cuBLAS "
                "handle and grow the pool. Forward takes 19.52 ms (standard deviation 39.43) after 0 warm-up "
                "steps, and 6.68 ms (0.00) after 5 warm-up steps.",
                "After 1 and 2 warm-up steps it takes 6.99 and 6.72 ms.",
                "The mean is within 2 % of the last from 2 warm-up steps on."});
    runs[1].forward = took(6.75, 0.02);
    check_says(warmups(runs), {"of the last from 1 warm-up step on."});
    runs[2].forward = took(7.72, 0.02);
    check_says(warmups(runs),
               {"No smaller number comes within 2 % of 5 warm-up steps: clocks, caches and the memory pool "
                "settle only over several steps."});
    runs[0] = {0, took(6.71, 0.03), took(20.2, 0.1)};
    CHECK(!has(warmups(runs), "of the last"));
    check_says(warmups(runs), {"**(c)** The first steps cost no more than the noise. Forward"});
    context.device = CPU;  // where forward finds its memory touched, and backward does not
    check_says(warmups({{0, took(100.9, 0.2), took(358.7, 97.3)}, {5, took(102.8, 2.1), took(295.4, 0.5)}}),
               {"touch their memory for the first time. Forward with backward takes 358.70 ms"});
    // Of a busy CPU: the cold run was the faster one by far.
    const std::string busy =
        warmups({{0, took(174.81, 12.17, 0, 0, 2), took(500, 9)}, {1, took(555.27, 161.01, 0, 0, 2), took(1600, 9)}});
    check_says(busy,
               {"The machine's speed changed during this run, so it does not show what the first steps cost. ",
                " takes 174.81 ms (standard deviation 12.17) after 0 warm-up steps, and 555.27 ms (161.01) after 1 "
                "warm-up step."});
    CHECK(!has(busy, "noise"));
    CHECK(warmups({{0, no_room(1), {}}, {5, no_room(1), {}}}) == "");
}

TEST_CASE("answers step: torch_compile (b)") {
    std::vector<StepRun> vanilla = {
        step_run("small", FP32, EAGER, took(10.53, 0.02), took(31.51, 0.05), took(38.73, 0.06)),
        step_run("2.7B", FP32, EAGER, took(172.87, 0.4), took(518.89, 0.6), took(626.97, 0.7))};
    std::vector<StepRun> compiled = {
        step_run("small", FP32, FUSED, took(7.37, 0.01), took(21.79, 0.02), took(22.59, 0.04)),
        step_run("2.7B", FP32, FUSED, took(148.73, 0.2), took(450.41, 0.3), took(472.92, 0.4))};
    auto said = [&] { return printed([&] { answer_torch_compile(vanilla, compiled); }); };
    check_says(said(),
               {"**(b)** In fp32, compiled forward is 1.43 times as fast as vanilla for small and 1.16 times as "
                "fast as vanilla for 2.7B.",
                "A whole step, with AdamW, is 1.71 times as fast as vanilla for small and 1.33 times"});
    compiled[0].phase[FORWARD] = took(9.9, 1.5);  // within the noise
    compiled[1].phase[FORWARD] = took(200, 1);
    vanilla[1].phase[STEP] = no_room(61.2);
    check_says(said(),
               {"level with vanilla within the noise for small and slower than vanilla (0.86 times as fast) for "
                "2.7B. Out of memory: step of 2.7B.",
                "is 1.71 times as fast as vanilla for small."});
    for (auto* runs : {&vanilla, &compiled}) { runs->resize(1), (*runs)[0].phase[FORWARD] = no_room(1); }
    vanilla[0].phase[STEP] = {};
    check_says(said(), {"In fp32, compiled forward is not to be compared. Out of memory: forward of small."});
    CHECK(!has(said(), "whole step"));
}

TEST_CASE("answers step: benchmarking_mixed_precision (c)") {
    RestoreContext restore;
    context.device = CUDA;
    auto run = [](const char* size, Precision p, double both, double std) {
        return step_run(size, p, FLASH, took(both / 3, std), took(both, std, both / 1.5, std));
    };
    std::vector<std::vector<StepRun>> runs = {
        {run("small", FP32, 20.29, 0.02), run("2.7B", FP32, 443.65, 0.04)},
        {run("small", TF32, 6.24, 0.01), run("2.7B", TF32, 92.25, 2.84)},
        {run("small", PREC_BF16, 2.50, 0.01), run("2.7B", PREC_BF16, 37.08, 0.16)}};
    auto said = [&] { return printed([&] { answer_mixed_precision(runs); }); };
    check_says(said(),
               {"Forward and backward in tf32 are 3.25 times as fast as fp32 for small and 4.81 times",
                "Forward and backward in bf16 are 8.12 times as fast as fp32 for small and 11.96 times as fast as "
                "fp32 for 2.7B.",
                "The larger model gains more in bf16: products take more of its time"});
    runs[2][1] = run("2.7B", PREC_BF16, 60, 0.1);
    CHECK(!has(said(), "gains more in bf16"));
    CHECK(!has(said(), "CPU"));
    context.device = CPU;  // and busy: no verdict that the noise does not bear
    runs = {{run("small", FP32, 245.67, 60)}, {run("small", TF32, 793.39, 900)}};
    check_says(said(), {"Forward and backward in tf32 are level with fp32 within the noise for small.",
                        "On a CPU low precision saves no arithmetic"});
    runs[0][0].phase[FORWARD_BACKWARD] = no_room(9);
    check_says(said(),
               {"Forward and backward in tf32 are not to be compared.", "Out of memory: forward+backward of small."});
}

// MiB, of 16 small blocks, on a CPU.
static std::vector<CheckpointStrategy> recorded_strategies() {
    auto bytes = [](double mib) { return (size_t)(mib * (1 << 20)); };
    return {
        {"none", 0, "1", "N", "O(N)", "0", "O(N)", 0, bytes(19.422)},
        {"flat, k = 1", 1, "ceil(N / k)", "k", "O(N)", "N", "O(N)", 16, bytes(1.946)},
        {"recursive halves", CHECKPOINT_HALVES, "1 + h", "1", "O(log N)", "N (h + 1) - 2^h", "O(N log N)", 64,
         bytes(1.603)},
        {"linear nesting", CHECKPOINT_NESTED, "min(2, N)", "1", "O(1)", "N (N - 1) / 2", "O(N^2)", 120, bytes(1.509)}};
}
TEST_CASE("answers step: gradient_checkpointing (a)") {
    std::vector<CheckpointStrategy> all = recorded_strategies();
    auto said = [&] { return printed([&] { answer_strategies(all); }); };
    check_says(
        said().substr(0, said().find("```")),
        {"**(a)** With linear nesting the peak is least: 1.509 MiB, against 1.946 with each block a checkpoint and "
         "19.422 without checkpoints.",
         "It keeps the residuals of 1 block at a time and min(2, N) block inputs: O(1) memory. Backward runs N (N - "
         "1) / 2 = 120 blocks again: O(N^2) compute."});
    CHECK(has(said(), "        x = checkpoint(run, blocks[:-1], x)"));
    CHECK(has(said(), "Nesting is worth its compute only where N inputs are large"));
    all[2].peak = 1 << 20;
    check_says(said(), {"With recursive halves the peak is least: 1.000 MiB", "1 + h block inputs: O(log N) memory",
                        "N (h + 1) - 2^h = 64 blocks again: O(N log N) compute."});
}

static std::vector<CheckpointRun> recorded_sizes(bool measured) {
    struct {
        int k;
        double predicted, activations, peak, ms;
    } rows[] = {{CHECKPOINT_HALF, 62618.8, 10807.0, 62650.8, 6201.38},
                {1, 62618.8, 10807.0, 62650.8, 6199.34},
                {2, 68720.9, 17309.1, 68752.9, 6194.77},
                {4, 80925.0, 30313.2, 80957.0, 6203.53},
                {8, 105333.1, 56321.5, 105365.1, 6201.07},
                {0, 251782.2, 212371.0, 0, 0}};
    std::vector<CheckpointRun> runs;
    for (const auto& row : rows) {
        auto bytes = [](double mib) { return (size_t)(mib * 1048576 + 0.5); };
        CheckpointRun r{"xl (2026)", row.k, bytes(row.predicted), bytes(row.activations)};
        if (measured && row.peak > 0) {
            r.peak = bytes(row.peak), r.ms = {row.ms, 1, row.ms, row.ms, row.ms, 5};
        } else if (measured) {
            r.oom = r.predicted;
        }
        runs.push_back(r);
    }
    return runs;
}
TEST_CASE("answers step: gradient_checkpointing (b)") {
    auto said = [](const std::vector<CheckpointRun>& asked, const std::vector<CheckpointRun>& run) {
        return printed([&] { answer_sizes(asked, run); });
    };
    std::vector<CheckpointRun> runs = recorded_sizes(true);
    check_says(
        said(runs, runs),
        {"**(b)** In xl (2026) a step's peak is least with one block per checkpoint: 62650.8 MiB. Beside it: 62650.8 "
         "with "
         "half a block, 68752.9 with 2 blocks and 251782.2 (out of memory) without checkpoints.",
         "Each further block in a checkpoint adds 6102 MiB: 6502 of residuals, less 400 of gradients that do not "
         "exist yet.",
         "Measured in xl (2026) with one block, the peak is 62650.8 MiB (predicted: 62618.8), and forward and "
         "backward take 6199.34 ms: without checkpoints the step does not fit, so the price is known in FLOPs only"});
    runs[2].peak = 62000ull << 20;
    check_says(said(runs, runs),
               {"least with 2 blocks per checkpoint: 62000.0 MiB. Beside it: 62650.8 with one block, 80957.0 "
                "with 4 blocks and 251782.2"});
    const std::vector<CheckpointRun> predicted = recorded_sizes(false);
    std::vector<CheckpointRun> tiny = recorded_sizes(true);
    for (CheckpointRun& r : tiny) { r.size = "tiny"; }
    tiny.back() = {"tiny", 0, 39 << 20, 33 << 20, 39 << 20, 0, {5000, 3, 5000, 5000, 5000, 5}};
    check_says(said(predicted, tiny), {"62618.8 MiB (predicted). Beside it:", "Measured in tiny with one block",
                                       "6199.34 ms: 1.24 times the time without checkpoints."});
    tiny.back().ms.std = 2000;
    check_says(said(predicted, tiny), {"level with the time without checkpoints, within the noise."});
    CHECK(!has(said(predicted, predicted), "Measured"));
    std::vector<CheckpointRun> half = predicted;
    half[0].predicted = 62000ull << 20;
    check_says(said(half, predicted),
               {"least with half a block per checkpoint: 62000.0 MiB (predicted). Beside it: 62618.8 with "
                "one block and 251782.2 without"});
}
