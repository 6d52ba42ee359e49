// Tests of attention.cu's experiments and answers: numbers measured on an H200 in, the sentences
// out.
#include "attention.cu"

#include "test.h"

#include <cmath>
#include <cstdio>

TEST_CASE_TEMPLATE("a fused softmax takes scores of -inf, first in a row or all but its last", D,
                   OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    const int T = 100;  // a warp's lanes have three or four columns each
    vector<float> x(2 * T, -INFINITY), want(2 * T);
    for (int j = 1; j < T; j++) { x[j] = 0, want[j] = 1.0f / (T - 1); }
    x.back() = 2, want.back() = 1;
    const Tensor s = from_floats(x, {1, 1, 2, T}), L = empty({1, 1, 2}, F32);
    softmax_in_place(s, L, Tensor(), false);
    CHECK(compare(s, from_floats(want, s.shape), 1e-6, 0).ok());
    CHECK(compare(L, from_floats({std::log(T - 1.0f), 2}, L.shape), 1e-6, 0).ok());
}

TEST_CASE("answers: pytorch_attention") {
    AttentionRuns runs = {{4096, 16, F32, passes(2.071, 4.088, NAN, 1066.25)},
                          {8192, 16, F32, passes(8.050, 15.972, NAN, 4148.5)},
                          {16384, 16, F32, passes(32.579, 67.138, NAN, 16457)},
                          {8192, 128, F32, passes(11.979, 23.39, NAN, 4288.5)},
                          {16384, 128, F32, passes(48.454, 97.052, NAN, 16737)}};
    auto text = [&] {
        return printed([&] {
            answer_pytorch_attention(runs, {32768, 171902500864, 149443414425});
        });
    };
    check_says(text(),
               {"**(a)** Memory runs out in 0 of the 5 configurations.",
                "grows 3.97 times from S 8192 to 16384. It is then 16457.0 MiB, of which "
                "the formula below explains 16425.0.",
                "S 32768: it needs 160.1 GiB of 139.2 (predicted).",
                "exp(scores - m) and P, 2 x 4 B S^2 = 2 x 4 x 8 x 32768^2 bytes = 64.0 GiB;",
                "5 x 4 B S D = 80.0 MiB;", "2 x 4 B S = 2.0 MiB.", "it holds 5 arrays of",
                "keeps L, one number per query", "It would hold q, k, v, O, dO and L, 81.0 MiB."});
    runs[2].naive = oom();
    check_says(text(), {"Memory runs out in 1 of the 5 configurations.",
                        "from S 4096 to 8192. It is then 4148.5 MiB"});
    runs[0].naive = runs[1].naive = oom();  // no length of the first D is left
    check_says(text(), {"Memory runs out in 3 of the 5 configurations.", "keeps L"});
    CHECK(!has(text(), "saved for backward"));
}

TEST_CASE("naive attention saves for its backward what pytorch_attention's formula says") {
    begin<OnCPU>();
    const AttentionCase c = {8, 1, 256, 256, 32, false};
    const size_t before = memory_use(CPU).now;
    Passes p(impl_named("naive"), random_inputs(c, F32, 0));
    p.forward();
    CHECK(memory_use(CPU).now - before == saved_by_naive(c.B, c.Tq, c.D));
    p.reset();
}

TEST_CASE("pass_times holds what naive attention saves, and not its peak") {
    begin<OnCPU>();
    const size_t before = memory_use(CPU).now;
    const PassTimes t =
        pass_times(impl_named("naive"), {8, 1, 256, 256, 32, false}, F32, {time_n_runs(3), false});
    CHECK(t.held == before + saved_by_naive(8, 256, 32));
}

string check_quick(vector<string> words, vector<string> says);  // of test_flash.cpp

TEST_CASE("pytorch_attention names the smallest power of 2 that does not fit") {
    begin<OnCPU>();
    const string text = check_quick({"pytorch_attention", "--steps", "1"}, {"At backward's peak"});
    int S = 0;
    double needs = 0, has_GiB = 0;
    const size_t at = text.find("the first that does not fit is S ");
    REQUIRE(at != string::npos);
    REQUIRE(sscanf(&text[at], "the first that does not fit is S %d: it needs %lf GiB of %lf", &S,
                   &needs, &has_GiB) == 3);
    auto peak = [](int S) {
        return mib_of(peak_of_passes(impl_named("naive"), {8, 1, S, S, 16, false}, F32)) / 1024;
    };
    CHECK(peak(S) == doctest::Approx(needs).epsilon(0.01));
    CHECK(peak(S) > has_GiB - 0.05);
    CHECK(peak(S / 2) <= has_GiB + 0.05);
}

TEST_CASE("weighted_sum's rates count what each pass and the copy read and write") {
    begin<OnCPU>();
    Table table{"",
                {"N", "D", "forward ms", "forward GB/s", "backward ms", "backward GB/s",
                 "copy GB/s", "max error"}};
    const double N = 3000, D = 400;
    const MemoryRates r = weighted_sum_row(table, 3000, 400);
    const string text = printed([&] { print(table); });
    auto cell = [&](const char* name) { return std::stod(column(text, name).at(0)); };
    CHECK(cell("forward ms") * r.forward == doctest::Approx(4e-6 * (N * D + D + N)).epsilon(0.02));
    CHECK(cell("backward ms") * r.backward ==
          doctest::Approx(4e-6 * (2 * N * D + 2 * D + N)).epsilon(0.02));
    CHECK(cell("forward GB/s") == doctest::Approx(r.forward).epsilon(0.02));
    CHECK(cell("backward GB/s") == doctest::Approx(r.backward).epsilon(0.02));
    CHECK(cell("copy GB/s") == doctest::Approx(r.copy).epsilon(0.02));
}

TEST_CASE("answers: torch_compile's attention") {
    AttentionRuns runs = {{256, 16, F32, passes(0.075, 0.125), passes(0.025, 0.046)},
                          {16384, 128, F32, passes(48.665, 96.981), passes(29.653, 55.999)}};
    auto text = [&] { return printed([&] { answer_torch_compile_attention(runs); }); };
    check_says(
        text(),
        {"forward is faster in all 2 configurations that fit (1.64 to 3.00 times as fast). Its "
         "backward is faster in all 2 configurations that fit (1.73 to 2.72 times as fast). ",
         "torch.compile itself did not run."});
    runs[0].other.ms[FORWARD_PASS] = times(0.09);
    runs[0].other.ms[BACKWARD_PASS] = times(0.12, 0.03);
    runs[1].naive = oom();
    check_says(text(),
               {"forward is faster in 0 of the 1 configuration that fit (0.83 to 0.83 times as "
                "fast), slower in 1. In 1 memory runs out. Its backward is faster in 0 of the 1 "
                "configuration that fit, not told apart in 1. In 1 memory runs out. "});
}

TEST_CASE_TEMPLATE("weighted_sum's table has no time and no rate of 0", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    Run r =
        run_cs336({"weighted_sum", "--quick", "--format", "csv", "--device", name_of(D::device)});
    CHECK(has(r.out, "errors against fp64; " + device_description() + "; commit "));
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    CHECK(has(r.out, "\n1,1,"));  // 12 bytes in less than a microsecond
    for (const char* zero : {",0.0,", ",0.0000,", ",0,"}) {
        CHECK_MESSAGE(!has(r.out, zero), r.out);
    }
}

TEST_CASE(
    "answers: weighted_sum's passes are bound by memory only where they move bytes as fast as a "
    "copy") {
    auto text = [](MemoryRates rates) { return printed([&] { answer_weighted_sum(rates); }); };
    check_says(
        text({2993, 2728, 2900}),
        {"Memory bounds forward of the largest x: it moves 2993.0 GB/s, a copy of x 2900.0. "
         "(Memory bounds what moves at least 0.8 of a copy's rate.)",
         "Memory bounds backward of the largest x: it moves 2728.0 GB/s, a copy of x 2900.0."});
    check_says(
        text({2.1, 12, 14}),
        {"Memory does not bound forward of the largest x: it moves 2.1 GB/s, a copy of x 14.0.",
         "Memory bounds backward"});
}
