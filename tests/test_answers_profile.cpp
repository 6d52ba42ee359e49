// Tests of the answers to nsys_profile and memory_profiling: numbers of an H200 in, sentences out.
#include "test.h"

static const char* const XMMA =
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_"
    "kernel__5x_cublas";
static const char* const CUTLASS = "cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>";

static Stats ms(double median) { return {median, 0.1, median, median, median, 10}; }
static const ModelConfig& size_of_2025(const char* name) {
    return *std::find_if(model_sizes.begin(), model_sizes.end(), [&](auto& c) { return c.name == name; });
}
struct Recorded {
    const char* size;
    int T;
    double clock, in_trace, in_kernels, step, matmul, step_matmul, adamw, step_kernels, softmax, products;
};
static ProfileRun profile_of(const Recorded& n) {
    ProfileRun r{size_of_2025(n.size), 4, n.T, true};
    r.forward = ms(n.clock), r.step = ms(n.step), r.in_trace = n.in_trace, r.in_kernels = n.in_kernels;
    const KernelClass cuda_cores = kernel_class(XMMA);
    r.parts[ALONE] = {
        n.in_kernels, n.matmul, XMMA, cuda_cores, 40.2, 97, {{"ffn", 64}, {"attention/scores", 32}, {"lm_head", 1}}};
    r.parts[AND_BACKWARD] = {n.step_kernels - n.adamw, 86.8, CUTLASS, cuda_cores, 26.2, 225, {{"ffn", 96}}};
    r.parts[WHOLE_STEP] = {n.step_kernels, n.step_matmul, CUTLASS, cuda_cores, 24.9, 225, {{"ffn", 96}}};
    r.adamw = n.adamw, r.softmax = n.softmax, r.products = n.products;
    r.others = {{"softmax", 5.3}, {"rope", 2.4}, {"swiglu", 1.4}, {"mask", 1.4}, {"scores", 1.2}, {"rmsnorm", 0.7}};
    return r;
}
// NVIDIA H200, fp32, mode eager, batch 4, commit c844bce.
static std::vector<ProfileRun> recorded() {
    return {
        profile_of({"2.7B", 128, 87.024, 87.757, 84.379, 377.653, 90.9, 66.1, 101.895, 363.474, 1.312, 0.883}),
        profile_of({"2.7B", 512, 333.329, 335.406, 333.208, 1127.601, 89.2, 81.6, 101.930, 1115.286, 12.090, 11.032}),
        profile_of({"2.7B", 1024, 731.688, 731.049, 727.914, 2244.641, 87.2, 82.8, 101.947, 2232.399, 38.320, 41.611})};
}
static std::string said(const std::vector<ProfileRun>& runs) {
    return printed([&] { answer_nsys_profile(runs); });
}

TEST_CASE("answers profile: nsys_profile on an H200") {
    const std::string text = said(recorded());
    for (const char* words :
         {"**(a)** Forward takes 731.7 ms by the clock and 731.0 ms in the trace (2.7B at context length 1024).",
          "**(a)** The two match within 0.8 % in all 3 settings.",
          "8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas`, a matrix product on the CUDA cores: "
          "40.2 % (2.7B at context length 1024).",
          "**(b)** A forward has 97 launches of it: 64 in ffn, 32 in attention/scores and 1 in lm_head.",
          "(26.2 %, 225 launches): backward's products have other operands transposed.",
          "**(b)** In all 3 settings forward's most expensive kernel is a matrix product.",
          "**(c)** Of forward's time 87.2 % goes to matrix products (2.7B at context length 1024). Of the rest most "
          "goes "
          "to softmax (5.3 %), rope (2.4 %), swiglu (1.4 %), mask (1.4 %) and scores (1.2 %).",
          "**(d)** From forward to a whole step the share of matrix products falls from 87.2 to 82.8 %",
          "**(d)** It falls in 3 of 3 settings, most in 2.7B at context length 128: from 90.9 to 66.1 %.",
          "**(d)** AdamW has no matrix products and takes 101.9 of the traced step's 2232.4 ms (4.6 %).",
          "**(e)** Softmax takes 38.32 ms per forward and attention's two products 41.61 ms",
          "It has 64.0 times fewer FLOPs (5 per score against 4 x 80), but takes 0.92 times as long, so each of its "
          "FLOPs is 59 times as slow.",
          "softmax has to move 32 GiB and the products 37 GiB, nearly the same.",
          "1.49 at 128, 1.10 at 512 and 0.92 at 1024."}) {
        CHECK_MESSAGE(has(text, words), (std::string(words) + "\n" + text));
    }
    CHECK(!has(text, "Out of memory"));
    CHECK(!has(text, "nan"));
}
TEST_CASE("answers profile: nsys_profile, whether clock and trace match") {
    std::vector<ProfileRun> runs = recorded();
    runs[0].in_trace = 1.024 * runs[0].forward.median;  // as small at 256 did: a match
    CHECK(has(said(runs), "The two match within 2.4 % in all 3 settings."));
    runs[0].in_trace = 1.074 * runs[0].forward.median;
    CHECK(has(said(runs),
              "The two match within 5 % in 2 of 3 settings; the trace of 2.7B at context length 128 differs "
              "by +7.4 %, because recording costs CPU time at each launch."));
    runs.resize(1);
    CHECK(has(said(runs), "The two do not match: the trace of 2.7B at context length 128 differs by +7.4 %"));
}
TEST_CASE("answers profile: nsys_profile where a part is missing") {
    std::vector<ProfileRun> runs = recorded();
    runs[2].step_oom = 1, runs[2].parts[AND_BACKWARD] = runs[2].parts[WHOLE_STEP] = PartProfile();
    std::string text = said(runs);  // 512 stands for all
    CHECK(has(text, "Forward takes 333.3 ms by the clock and 335.4 ms in the trace (2.7B at context length 512)."));
    CHECK(has(text, "**(a)** Out of memory: a step of 2.7B at context length 1024."));
    CHECK(has(text, "It falls in 2 of 2 settings, most in 2.7B at context length 128"));
    runs = {runs[2]};
    text = said(runs);
    CHECK(has(text, "**(d)** No whole step ran"));
    CHECK(!has(text, "nan"));

    runs = recorded();
    for (ProfileRun& r : runs) { r.softmax = NAN; }
    CHECK(has(said(runs), "Softmax and both products are one kernel here (41.61 ms per forward)"));
    for (ProfileRun& r : runs) {
        r.no_kernels = "nsys is attached", r.in_trace = NAN;
        for (PartProfile& p : r.parts) { p = PartProfile(); }
    }
    text = said(runs);
    CHECK(has(text, "by the clock; no kernels were traced: nsys is attached (2.7B at context length 1024)."));
    CHECK(!has(text, "(b)"));
    for (ProfileRun& r : runs) { r.forward_oom = r.step_oom = 1; }
    CHECK(said(runs).empty());
}
TEST_CASE("answers profile: nsys_profile with one launch, and the same kernel with backward") {
    std::vector<ProfileRun> runs = {recorded()[2]};
    ProfileRun& r = runs[0];
    r.parts[ALONE].launches = 1, r.parts[ALONE].launched_in = {{"lm_head", 1}};
    r.parts[AND_BACKWARD] = r.parts[ALONE];
    r.parts[ALONE].is.tensor_cores = true;
    r.parts[WHOLE_STEP].matmul = 90;
    const std::string text = said(runs);
    CHECK(has(text, "A forward has 1 launch of it: 1 in lm_head."));
    CHECK(has(text, "With backward it is the same one (40.2 %, 1 launch)."));
    CHECK(has(text, "a matrix product on tensor cores"));
    CHECK(has(text, "rises from 87.2 to 90.0 %"));
    CHECK(!has(text, "1 launches"));
    CHECK(!has(text, "settings"));
}

// ---------------------------------------------------------------------------------------------------------------------
// memory_profiling

static size_t bytes(double mib) { return (size_t)(mib * 1048576); }
static PhaseMemory peaks(double parameters, double gradients, double copies, double activations, double all) {
    PhaseMemory m;
    m.peak = bytes(all), m.all_gradients = bytes(parameters);
    m.peak_by[PARAMETERS] = bytes(parameters), m.peak_by[GRADIENTS] = bytes(gradients);
    m.peak_by[WEIGHT_COPIES] = bytes(copies), m.peak_by[ACTIVATIONS] = bytes(activations);
    return m;
}
static MemoryRun memory_of(Precision precision, int T, const PhaseMemory& forward, double taped,
                           const PhaseMemory& step, const std::vector<Allocation>& largest) {
    MemoryRun r{size_of_2025("2.7B"), precision, 4, T, false};
    r.forward = forward, r.step = step, r.taped.peak = bytes(taped), r.largest = largest;
    r.stream = (size_t)4 * T * 2560 * 4;
    return r;
}
// NVIDIA H200, mode eager, batch 4, commit c844bce; blocks as predicted.
static std::vector<MemoryRun> recorded_memory() {
    constexpr double P = 12995.9, C = 6448.8;
    const std::string layer = "forward/layer/";
    std::vector<Allocation> scores = {{bytes(12995.9), 1, PARAMETERS, "held", "make_model", "model.cu:113"}};
    for (auto [range, op] : {std::make_pair("scores", "matmul"),
                             {"scores", "scale"},
                             {"mask", "where"},
                             {"softmax", "sub"},
                             {"softmax", "exp"},
                             {"softmax", "div"}}) {
        scores.push_back({bytes(128), 32, ACTIVATIONS, layer + "attention/" + range, op, "lib/tensor.cu:1"});
    }
    scores.push_back({bytes(80), 64, ACTIVATIONS, layer + "ffn", "linear", "lib/matmul.cu:279"});
    const std::vector<Allocation> ffn = {
        {bytes(12995.9), 1, PARAMETERS, "held", "make_model", "model.cu:113"},
        {bytes(20), 64, ACTIVATIONS, layer + "ffn", "linear", "lib/matmul.cu:279"},
        {bytes(20), 32, ACTIVATIONS, layer + "ffn/swiglu", "sigmoid", "lib/tensor.cu:1"},
        {bytes(20), 64, ACTIVATIONS, layer + "ffn/swiglu", "mul", "lib/tensor.cu:2"}};
    std::vector<MemoryRun> runs = {
        memory_of(FP32, 128, peaks(P, 0, 0, 115.0, 13143.0), 18379.1, peaks(P, P, 0, 400.0, 52415.8), ffn),
        memory_of(FP32, 256, peaks(P, 0, 0, 230.0, 13258.0), 24755.3, peaks(P, P, 0, 400.0, 52415.9), ffn),
        memory_of(FP32, 512, peaks(P, 0, 0, 504.5, 13532.6), 40582.8, peaks(P, 197.7, 0, 27596.5, 66814.2), scores),
        memory_of(PREC_BF16, 128, peaks(P, 0, C, 17.3, 19494.1), 23108.7, peaks(P, P, C, 5.0, 58469.7), ffn),
        memory_of(PREC_BF16, 256, peaks(P, 0, C, 34.5, 19511.4), 28021.6, peaks(P, 12823.3, C, 220.4, 58512.5), ffn),
        memory_of(PREC_BF16, 512, peaks(P, 0, 6237.5, 420.4, 19686.0), 41690.5, peaks(P, 422.7, C, 22174.7, 68066.3),
                  scores)};
    BlockMemory& block = runs[2].block;  // of 2048 tokens
    block.by_op = {{layer + "attention/softmax div", 2147483648},
                   {layer + "attention/softmax exp", 2147483648},
                   {layer + "ffn linear", 671088640},
                   {layer + "ffn/swiglu mul", 671088640},
                   {layer + "ffn/swiglu sigmoid", 335544320},
                   {layer + "rmsnorm mul", 83886080}};
    block.bytes = 6817906688, block.change = -6398455808, block.formula = 419450880;
    runs[5].block.bytes = 7136673792;
    return runs;
}
static std::string said(const std::vector<MemoryRun>& runs) {
    return printed([&] { answer_memory_profiling(runs); });
}

TEST_CASE("answers profile: memory_profiling on an H200") {
    const std::string text = said(recorded_memory());
    for (const char* words :
         {"above the weights (12.7 GiB) it has one equal peak per layer, 0.5 GiB at context length 512",
          "Its peak is in the optimizer, beside all gradients, at context length 128 and 256 and just after the loss, "
          "beside all activations, at context length 512.",
          "**(b)** At context length 128, 256 and 512 forward's peak is 12.8 GiB, 12.9 GiB and 13.2 GiB, a step's 51.2 "
          "GiB, 51.2 GiB and 65.2 GiB (2.7B, fp32).",
          "moments are 3 x 12995.9 MiB", "a forward that keeps what backward needs takes 26.4 GiB more.",
          "**(c)** bf16 takes more memory than fp32: forward +48.3, +47.2 and +45.5 % at context length 128, 256 and "
          "512.",
          "**(c)** A step's peak changes by +11.5, +11.6 and +1.9 %.",
          "a 16-bit copy of each matrix is added: 6.3 GiB.",
          "**(c)** At context length 512, where activations make the step's peak, they shrink by 5.3 GiB.",
          "4 x 512 x 2560 x 4 / 1024^2 = 20.0 MiB; at context length 128, 256 and 512: 5.0, 10.0 and 20.0 MiB. The run "
          "allocated exactly that",
          "**(e)** At 512 tokens the largest are attention's scores, 4 x 32 x 512 x 512 numbers, 128.0 MiB each, 6 per "
          "layer (matmul, scale, where, sub, exp and div).",
          "At 128 tokens the largest are the feed-forward's, 4 x 128 x 10240 numbers, 20.0 MiB each, 5 per layer "
          "(linear, sigmoid and mul).",
          "the optimizer allocates nothing in forward.",
          "**(f)** One block saves 6817906688 bytes (6502.1 MiB) for backward in fp32, 7136673792 in bf16 (2.7B at",
          "softmax div 31.5 %, softmax exp 31.5 %, ffn linear 9.8 %, swiglu mul 9.8 % and swiglu sigmoid 4.9 %.",
          "memory falls by only 6102.0 MiB: the difference, 400.0 MiB, is the gradients of its parameters, as the "
          "formula says."}) {
        CHECK_MESSAGE(has(text, words), (std::string(words) + "\n" + text));
    }
    CHECK(!has(text, "H200"));
    CHECK(!has(text, "predicted"));
}
TEST_CASE("answers profile: memory_profiling with other numbers") {
    std::vector<MemoryRun> runs = recorded_memory();
    runs[2].step = PhaseMemory();
    runs[2].step.oom = bytes(251782.2), runs[2].stream = 8, runs[1].step.peak_by[GRADIENTS] = bytes(6000);
    runs[2].block.formula++;
    std::string text = said(runs);
    CHECK(has(text, "a step's 51.2 GiB, 51.2 GiB and OOM (245.9 GiB) (2.7B, fp32)."));
    CHECK(has(text,
              "in backward, beside a part of the gradients, at context length 256 and unknown, for lack of memory, at "
              "context length 512."));
    CHECK(has(text, "A step's peak changes by +11.5 and +11.6 %."));
    CHECK(has(text, "But the run allocated another number of bytes"));
    CHECK(has(text, "by the formula 400.0 MiB."));

    runs = recorded_memory();
    for (MemoryRun& r : runs) {
        r.predicted = true;
        if (r.precision != FP32) {
            r.forward.peak = r.step.peak = 1;
            r.forward.peak_by[WEIGHT_COPIES] = 0;
        }
    }
    runs[2].step.peak = bytes(251782.2);
    text = said(runs);
    CHECK(has(text, "(2.7B, fp32; predicted)."));
    CHECK(has(text, "A step at context length 512 needs more than an H200's 139 GiB."));
    CHECK(has(text, "bf16 takes less memory than fp32"));
    CHECK(has(text, "This mode keeps no 16-bit copies"));
    runs[3].step.peak = bytes(60000);
    CHECK(has(said(runs), "bf16 takes in some rows more, in others less memory than fp32"));
    for (MemoryRun& r : runs) { r.forward.oom = 1; }
    CHECK(said(runs).empty());
}
