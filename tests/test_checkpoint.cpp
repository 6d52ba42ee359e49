// Tests of bench_checkpoint.cu.
#include "test.h"

using Words = std::vector<std::string>;

static Options small_run() {
    Options o;
    o.seed = 1, o.batch_size = 2, o.context_length = 200, o.steps = 1, o.warmup = {0};
    return o;
}
static std::map<std::string, CheckpointStrategy> strategies(int blocks) {
    std::map<std::string, CheckpointStrategy> by_name;
    for (const CheckpointStrategy& s : run_strategies(blocks, 1, 2, 64)) { by_name.emplace(s.name, s); }
    return by_name;
}

// That no bit of a gradient changes run_strategies checks itself.
TEST_CASE_TEMPLATE("gradient_checkpointing (a): what runs again is what the formulas say, and peaks are in order", D,
                   OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    struct Expected {
        int N, root, halves_again, nested_again;  // by hand
    };
    for (const Expected& e :
         {Expected{1, 1, 0, 0}, {2, 1, 2, 1}, {3, 2, 5, 3}, {7, 3, 20, 21}, {12, 3, 44, 66}, {16, 4, 64, 120}}) {
        context.mode = e.N == 7 ? FLASH : e.N == 12 ? FUSED : EAGER;
        context.precision = e.N == 12 ? PREC_BF16 : FP32;
        const std::string all_blocks = "flat, k = " + std::to_string(e.N), root = "flat, k = " + std::to_string(e.root);
        auto s = strategies(e.N);
        std::map<std::string, int> again = {{"none", 0},
                                            {"flat, k = 1", e.N},
                                            {all_blocks, e.N},
                                            {root, e.N},
                                            {"recursive halves", e.halves_again},
                                            {"linear nesting", e.nested_again}};
        CHECK(s.size() == again.size());
        for (const auto& [name, blocks] : again) {
            CAPTURE(std::to_string(e.N) + " " + name);
            REQUIRE(s.count(name) == 1);
            CHECK(s.at(name).again == blocks);
        }
        if (e.N < 7) { continue; }
        auto peak = [&](const std::string& name) { return s.at(name).peak; };
        // Without another form of the weights bf16 copies of them all, and not the blocks, make the least peaks.
        const bool copies = context.precision == PREC_BF16 && table_of<WeightForm>().empty();
        auto less = [&](size_t a, size_t b) { return copies ? a == b : a < b; };
        CHECK(less(peak("linear nesting"), peak("recursive halves")));
        CHECK(less(peak("recursive halves"), peak("flat, k = 1")));
        CHECK(peak("flat, k = 1") < peak(root));
        CHECK(peak(root) < peak("none"));
        CHECK(peak(all_blocks) == doctest::Approx(peak("none")).epsilon(0.01));
    }
}
// One checkpoint more holds one input more, one block more in a checkpoint that block's residuals.
TEST_CASE("gradient_checkpointing (a): a peak is the inputs held and the residuals of one checkpoint") {
    begin_on(CPU);
    context.mode = EAGER;
    const double input = 2 * 64 * 64 * 4;
    auto s9 = strategies(9), s16 = strategies(16);
    auto peak = [](const auto& s, const char* name) { return (double)s.at(name).peak; };
    const double single = peak(s16, "flat, k = 1"), nested = peak(s16, "linear nesting");
    CHECK(single - peak(s9, "flat, k = 1") == doctest::Approx(7 * input).epsilon(0.01));
    CHECK(single - nested == doctest::Approx(14 * input).epsilon(0.01));
    CHECK(peak(s16, "recursive halves") - nested == doctest::Approx(3 * input).epsilon(0.02));
    const double block = (peak(s16, "none") - peak(s9, "none")) / 7;
    CHECK(peak(s16, "flat, k = 4") - single == doctest::Approx(3 * block - 12 * input).epsilon(0.02));
}

TEST_CASE_TEMPLATE("gradient_checkpointing (b): what is predicted is what happens", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    for (Mode mode : {EAGER, FUSED}) {
        context.mode = mode;
        const std::vector<CheckpointRun> runs = run_sizes({"custom", 48, 96, 5, 3, 50}, small_run(), true);
        REQUIRE(runs.size() == 5);  // half, 1, 2, 4, none; no 8 of 5 blocks
        for (const CheckpointRun& r : runs) {
            CAPTURE(r.checkpoint);
            CHECK(r.oom == 0);
            CHECK(r.ms.mean > 0);
            const double within = D::device == CPU ? 0.03 : 40.0 * (1 << 20) / r.predicted;
            CHECK(r.peak == doctest::Approx(r.predicted).epsilon(within));
        }
        for (int i : {1, 2, 3}) { CHECK(runs[i].peak < runs[i + 1].peak); }
    }
}
TEST_CASE("gradient_checkpointing (b): the handout's size is predicted anywhere; what does not fit is a row") {
    begin_on(CPU);
    context.mode = EAGER;
    Options o = small_run();
    o.batch_size = 4, o.context_length = 2048;
    const ModelConfig xl{"xl (2026)", 2560, 10240, 32, 32, 10000};
    const double peaks[] = {62618.8, 62618.8, 68720.9, 80925.0, 105333.1, 251782.2};
    const std::vector<CheckpointRun> runs = run_sizes(xl, o, false);
    REQUIRE(runs.size() == 6);
    for (int i = 0; i < 6; i++) {
        CHECK(std::abs(runs[i].predicted / 1048576.0 - peaks[i]) < 0.06);
        CHECK(runs[i].ms.n == 0);
    }
    for (const CheckpointRun& r : run_sizes({"custom", 16384, 65536, 64, 128, 100}, o, true)) {
        CHECK(r.oom == r.predicted);
        CHECK(r.ms.n == 0);
    }
}
TEST_CASE("gradient_checkpointing: both sizes without a GPU; exit 1 if no row ran") {
    Run quick = run_cs336({"gradient_checkpointing", "--device", "cpu", "--steps", "1", "--warmup", "0"});
    REQUIRE_MESSAGE(quick.exit_code == 0, quick.err);
    CHECK(has(quick.out, "(b): predicted, nothing ran; xl (2026), 32 blocks, batch 4, context length 2048"));
    CHECK(has(quick.out, "(b): really run; tiny, 8 blocks, batch 1, context length 256"));
    CHECK(has(quick.out, "**(b)** Measured in tiny with one block, the peak is 13.7 MiB (predicted: 13.7)"));
    Run large = run_cs336({"gradient_checkpointing", "--device", "cpu", "--d_model", "16384", "--d_ff", "65536",
                           "--num_layers", "64", "--num_heads", "128"});
    CHECK(large.exit_code == 1);
    CHECK(has(large.out, " | OOM ("));
    CHECK(has(large.err, "nothing fits"));
}
TEST_CASE("gradient_checkpointing: wrong options") {
    const std::pair<Words, const char*> cases[] = {
        {{"--size", "small,large"}, "--size: small,large not in {small,medium"},
        {{"--mode", "eager,fused"}, "--mode: eager,fused not in {eager,fused,flash}"},
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
