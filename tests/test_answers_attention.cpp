// Tests of bench_attention.cu's answers: numbers measured on an H200 in, the sentences out.
#include "test.h"

static void check_says(const std::string& text, const std::vector<std::string>& phrases) {
    for (const std::string& phrase : phrases) { CHECK_MESSAGE(has(text, phrase), phrase, " in: ", text); }
    for (const char* never : {"nan", " inf", "  ", " .", "1 configurations"}) {
        CHECK_MESSAGE(!has(text, never), never, " in: ", text);
    }
}
static Stats times(double ms, double std = 0) { return {ms, std, ms, ms, ms, 100}; }
static PassTimes passes(double forward, double backward, double both = NAN, double held_MiB = 0) {
    return {times(forward), times(backward), times(both), (size_t)(held_MiB * 1048576), 0};
}
static PassTimes oom() {
    PassTimes t;
    t.oom = (size_t)161 << 30;
    return t;
}

TEST_CASE("answers: pytorch_attention") {
    const AttentionMemory memory{
        32768, 16, (size_t)149443414425, 171902500864, {{16777216, 5}, {1048576, 2}, {34359738368, 2}}};
    std::vector<AttentionRun> runs = {{4096, 16, F32, passes(2.071, 4.088, NAN, 1066.25)},
                                      {8192, 16, F32, passes(8.050, 15.972, NAN, 4148.5)},
                                      {16384, 16, F32, passes(32.579, 67.138, NAN, 16457)},
                                      {8192, 128, F32, passes(11.979, 23.39, NAN, 4288.5)},
                                      {16384, 128, F32, passes(48.454, 97.052, NAN, 16737)}};
    auto text = [&] { return printed([&] { answer_pytorch_attention(runs, memory); }); };
    check_says(text(), {"**(a)** Memory runs out in none of the 5 configurations.",
                        "At S 16384 with D 16 forward takes 32.58 ms and backward 67.14 ms.",
                        "grows with S^2: 4148.5 MiB at S 8192, 16457.0 MiB at S 16384.",
                        "has S 32768 and D 16: it needs 160.1 GiB, and 139.2 are there.",
                        "it holds 64.1 GiB: 2 buffers of 32768 MiB, 5 buffers of 16 MiB and 2 buffers of 1 MiB.",
                        "exp(S - m) and P, 8 x 32768^2 numbers of 4 bytes.", "5 of that size are held",
                        "keeps L, one number per query", "It would hold q, k, v, dO, O and L, 81.0 MiB."});
    runs[2].naive = oom();
    check_says(text(), {"Memory runs out in 1 of the 5 configurations.", "At S 8192 with D 16 forward takes 8.05 ms"});
    runs[0].naive.held = runs[1].naive.held;
    check_says(text(), {"grows more slowly than S^2 at these lengths: 4148.5 MiB at S 4096, 4148.5 MiB at S 8192."});
    runs[0].naive = runs[1].naive = oom();  // no length of the first D is left
    check_says(text(), {"Memory runs out in 3 of the 5 configurations.", "keeps L"});
    CHECK(!has(text(), "forward takes"));
}

TEST_CASE("answers: torch_compile's attention") {
    std::vector<AttentionRun> runs = {{256, 16, F32, passes(0.075, 0.125), passes(0.025, 0.046)},
                                      {16384, 128, F32, passes(48.665, 96.981), passes(29.653, 55.999)}};
    auto text = [&] { return printed([&] { answer_torch_compile_attention(runs); }); };
    check_says(text(), {"forward is faster in 2 of 2 configurations (1.64 to 3.00 times as fast, S 256 to 16384). Its "
                        "backward is faster in 2 of 2 configurations (1.73 to 2.72 times as fast",
                        "torch.compile itself did not run."});
    runs[0].other.forward = times(0.09), runs[0].other.backward = times(0.12, 0.02), runs[1].naive = oom();
    check_says(text(), {"forward is slower in 1 of 2 configurations (0.83 times as fast, S 256) and not compared, for "
                        "lack of memory, in 1 "
                        "(S 16384). Its backward is level within the noise in 1 of 2 configurations (S 256)"});
}

TEST_CASE("answers: flash_benchmarking calls nothing faster that is slower or within the noise") {
    std::vector<AttentionRun> runs = {
        {65536, 16, BF16, passes(88.671, 127.485, 216.051), passes(0.862, 1.441, 2.3)},
        {65536, 128, BF16, passes(89.335, 128.089, 217.153), passes(1.568, 4.386, 5.895)},
        {1024, 128, F32, passes(0.095, 0.133, 0.222), passes(0.112, 0.275, 0.385)},
        {65536, 128, F32, passes(125.522, 207.935, 332.953), passes(26.253, 66.962, 93.164)}};
    auto text = [&] { return printed([&] { answer_flash_benchmarking(runs); }); };
    check_says(text(), {"In bfloat16 flash, timed against naive over forward and backward, is faster in 2 of 2 "
                        "configurations (36.84 to 93.94 times as fast, S 65536).",
                        "float32 flash, timed against naive over forward and backward, is faster in 1 of 2 "
                        "configurations (3.57 times as fast, S 65536) and slower in 1 (0.58 times as fast, S 1024)."});
    // A factor of 0.74, once clear, once within a busy machine's noise; and naive without memory.
    runs = {{512, 64, F32, passes(1, 1, 7.4), passes(1, 1, 10)}, {512, 64, BF16, oom(), passes(1, 1, 10)}};
    check_says(text(), {"slower in 1 of 1 configuration (0.74 times as fast, S 512).",
                        "is not compared, for lack of memory, in 1 of 1 configuration (S 512)"});
    CHECK(!has(text(), "faster"));
    runs[0].other.both.std = 3;
    check_says(text(), {"level within the noise in 1 of 1 configuration (S 512)."});
    CHECK(!has(text(), "0.74"));
}

TEST_CASE("answers: flash_forward and flash_backward name the handout's test, not the odd sizes") {
    context = Context();
    context.device = CUDA;
    const AttentionCase handouts = {4, 1, 128, 128, 64, true}, odd = {2, 3, 65, 65, 32, true};
    std::vector<AttentionCheck> checks = {{true, F32, handouts, {5.5e-7, 4.8e-7, 8.5e-7, 1.8e-6, 1.6e-6}},
                                          {true, BF16, handouts, {7.0e-3, 1.1e-3, 9.1e-3, 1.1e-2, 1.0e-2}},
                                          {false, BF16, handouts, {1.3e-2, 4.2e-3, 8.4e-3, 1.3e-2, 1.2e-2}},
                                          {true, F32, odd, {6.2e-4, 4.8e-4, 1e-3, 1e-3, 1e-3}}};
    check_says(printed([&] { answer_flash_backward(checks); }),
               {"from L, and takes D = rowsum(O dO)", "dQ, dK and dV is 1.8e-06 in float32 and 1.1e-02 in bfloat16."});
    for (AttentionCheck& check : checks) { check.errors.resize(2); }  // flash_forward has O and L alone
    check_says(printed([&] { answer_flash_forward(checks); }),
               {"**(a)** `tiled` is the plain version", "over the tiles of keys.\n", "-inf where the handout adds -1e6",
                "All 4 checks pass", "largest error in FlashAttention's O and L is 5.5e-07 in float32 and 7.0e-03 in"});
    context.device = CPU;
    check_says(printed([&] { answer_flash_forward(checks); }), {"None ran: they need a GPU."});
}

TEST_CASE("answers: flash_leaderboard") {
    auto text = [](double tflops, double rate, bool is_handouts) {
        const PassTimes t = passes(1.054, 2.476, 3.575);
        return printed([&] { answer_flash_leaderboard("hopper", t, tflops, rate, is_handouts); });
    };
    check_says(text(538, 797, true),
               {"fastest, hopper, takes 3.575 ms for forward and backward, 1.054 ms for forward alone. That is 538 "
                "TFLOP/s, 68 % of the rate of matrix products on this device.",
                "led with 5.364 ms, in Triton on an H100"});
    check_says(text(0.0138, 0.0364, false), {"That is 13.8 GFLOP/s, 38 % of"});
    CHECK(!has(text(0.0138, 0.0364, false), "5.364"));
}

TEST_CASE("answers: the commands of sections 1.2 and 1.3, --quick") {
    const std::map<std::string, std::string> phrases = {
        {"pytorch_attention", " MiB, 5 buffers of "},   {"weighted_sum", "memory bounds both"},
        {"flash_forward", "All 80 checks pass"},        {"flash_backward", "All 80 checks pass"},
        {"flash_benchmarking", "of 12 configurations"}, {"flash_leaderboard", "\n| tiled "},
    };
    for (const auto& [command, phrase] : phrases) {
        Run r = run_cs336({command, "--device", "cpu", "--quick"});
        REQUIRE_MESSAGE(r.exit_code == 0, r.err);
        for (const std::string& words : {phrase, std::string("; sizes of --quick\n")}) {
            CHECK_MESSAGE(has(r.out, words), words, " in: ", r.out);
        }
        for (size_t at = 0; (at = r.out.find("\n|", at)) != std::string::npos; at++) {
            CHECK(r.out.find('\n', at + 1) - at <= 121);
        }
    }
}

TEST_CASE("answers: flash_leaderboard times those with tiles, and any other by its name") {
    auto out = [](const char* impl) {
        return run_cs336({"flash_leaderboard", "--device", "cpu", "--context_length", "64", "--impl", impl}).out;
    };
    CHECK(has(out("all"), "\n| tiled "));
    CHECK(!has(out("all"), "\n| naive "));
    CHECK(has(out("naive"), "\n| naive "));
    CHECK(!has(out("naive"), "\n| tiled "));
    CHECK(has(out("auto"), "batch 1, 2 heads, D 64, S 64, fp32, causal;"));
}
