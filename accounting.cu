// accounting.cu: section 2.4, when communication becomes the limit. It is arithmetic alone.
#include "commands.h"

// ---------------------------------------------------------------------------------------------------------------------
// communication_accounting: the handout's XXL model, L blocks of two Linear layers D x F and F x D.
// C: FLOP/s of a chip; W: bytes/s of a link; X chips share the FSDP axis with M_X links, Y the TP axis with M_Y.
//
// Memory: P parameters take 16 P bytes with their gradients and AdamW's moments, in fp32. A is all saved activations of
// a device's tokens; every second layer's are sharded, like the weights, the other half is not.
// Forward of one block: T_math = 4 B D F / (X Y C); gather of the weights T_FSDP = 4 D F / (Y W M_X); all-reduce of the
// activations T_TP = 4 B D / (X W M_Y). B: tokens overall.

static const double GB = 1e9, GIB = 1073741824.0;
static const double GPU_GB = 80, CHIP_GB = 95;  // the memory of a GPU in (a), of a chip in (b)
static const double M_X = 2, M_Y = 1;           // mesh axes, so links, of the FSDP and of the TP traffic

// The least N with (16 P + A/2) / N + A/2 < memory; 0: none.
static double least_devices(double P, double A, double memory) {
    return A / 2 < memory ? floor((16 * P + A / 2) / (memory - A / 2)) + 1 : 0;
}
// The least B, not rounded, with T_math >= T_FSDP + T_TP; 0: none. alpha = C / W.
static double least_batch(const Options& o, double alpha, double X, double Y) {
    double share = alpha * Y / (M_Y * o.d_ff);  // of T_math that TP takes
    return share < 1 ? alpha * X / M_X / (1 - share) : 0;
}
// A value of 0: there is none.
static void row(Table& t, const char* part, const std::string& quantity, const char* formula, double value,
                int decimals, const std::string& unit) {
    t.row(part, quantity, formula, value > 0 ? strprintf("%.*f", decimals, value) : "none", unit);
}

static void memory_accounting(const Options& o, Table& t, double P, double per_token) {
    auto gib = [](double bytes) { return strprintf("GB (%.1f GiB)", bytes / GIB); };
    row(t, "a", "parameters P", "2 D F L", P, 0, "");
    row(t, "a", "master weights, fp32", "4 P", 4 * P / GB, 1, gib(4 * P));
    row(t, "a", "with gradients and moments, fp32", "16 P", 16 * P / GB, 1, gib(16 * P));
    row(t, "a", "saved for backward per token", "2 L (D + F)", per_token, 0, "bytes");
    row(t, "a", "GPUs of 80 GB for 16 P", "16 P / memory", 16 * P / (GPU_GB * GB), 2, "");
    row(t, "a", "GPUs of 80 GiB for 16 P", "16 P / memory", 16 * P / (GPU_GB * GIB), 2, "");
    for (double tokens : {0.0, 1.0 * o.tokens, 4.0 * o.tokens}) {
        row(t, "b", strprintf("N for 95 GB, %g tokens each", tokens), "(16 P + A/2) / (memory - A/2)",
            least_devices(P, per_token * tokens, CHIP_GB * GB), 0, "devices");
    }
    row(t, "b", "N for 95 GiB, 0 tokens each", "the same, in GiB", least_devices(P, 0, CHIP_GB * GIB), 0, "devices");
    row(t, "b", "tokens from which no N is enough", "A/2 = memory", ceil(CHIP_GB * GB / (per_token / 2)), 0, "tokens");
}
static void answer_memory(const Options& o, double P, double per_token) {
    double at_tokens = least_devices(P, per_token * o.tokens, CHIP_GB * GB);
    answer("a",
           "P = 2 D F L = %.0f parameters take 4 P = %.1f GB (%.1f GiB) in fp32. With their gradients and AdamW's two "
           "moments they take 16 P = %.1f GB (%.1f GiB), the memory of %.0f GPUs of %g GB, or of %.0f if a GB is taken "
           "as 2^30 bytes. Backward saves 2 L (D + F) = %.0f bytes per token in bf16.",
           P, 4 * P / GB, 4 * P / GIB, 16 * P / GB, 16 * P / GIB, ceil(16 * P / GB / GPU_GB), GPU_GB,
           ceil(16 * P / GIB / GPU_GB), per_token);
    answer("b",
           "A device holds (16 P + A/2) / N + A/2 bytes, where A is what its tokens save for backward, and half of A "
           "is sharded over the N devices, like the weights. Without activations that is below %g GB from N = %.0f "
           "devices on; with %d tokens per device, %s. No N is enough from %.0f tokens per device on, because A/2 "
           "alone fills the memory.",
           CHIP_GB, least_devices(P, 0, CHIP_GB * GB), o.tokens,
           at_tokens > 0 ? strprintf("from N = %.0f on", at_tokens).c_str() : "for no N",
           ceil(CHIP_GB * GB / (per_token / 2)));
}

int cmd_communication_accounting(const Options& o) {
    const double D = o.d_model, F = o.d_ff, L = o.num_layers, X = o.fsdp, Y = o.tp;
    const double P = 2 * D * F * L, per_token = 2 * L * (D + F), N = X * Y;
    const double alpha = o.tflops * 1e12 / (o.bandwidth_gb * GB), most_Y = M_Y * F / alpha;
    const double in_turn = least_batch(o, alpha, X, Y), overlapped = Y <= most_Y ? alpha * X / M_X : 0;
    const double per_chip = 4 * alpha * alpha / (M_X * M_Y * F);
    Table t{
        strprintf("communication_accounting: D = d_model %g, F = d_ff %g, L = %g blocks of two Linear layers; GB = 1e9 "
                  "bytes, GiB = 2^30; C = %g TFLOP/s, W = %g GB/s, X = %g (FSDP), Y = %g (TP), M_X = %g, M_Y = %g",
                  D, F, L, o.tflops, o.bandwidth_gb, X, Y, M_X, M_Y),
        {"part", "quantity", "formula", "value", "unit"}};
    memory_accounting(o, t, P, per_token);
    row(t, "c", "alpha", "C / W", alpha, 1, "FLOP/byte");
    for (bool turns : {true, false}) {
        const std::string how = turns ? "axes in turn" : "axes overlapped";
        const double B = turns ? in_turn : overlapped;
        row(t, "c", "least batch B, " + how,
            turns ? "(alpha X / M_X) / (1 - alpha Y / (M_Y F))" : "alpha X / M_X, if TP's condition holds", ceil(B), 0,
            "tokens");
        row(t, "c", "per chip, " + how, "B / (X Y)", B / N, 1, "tokens");
        row(t, "c", "per FSDP shard, " + how, "B / X", B / X, 1, "tokens");
    }
    row(t, "c", "TP is compute bound for Y below", "M_Y F / alpha", most_Y, 1, "chips");
    // In turn, B(X) = (alpha X / M_X) / (1 - alpha N / (X M_Y F)) is least where TP takes half of the time.
    row(t, "d", "best X, axes in turn", "2 alpha N / (M_Y F)", 2 * N / most_Y, 1, "chips");
    row(t, "d", "per chip, X free, in turn", "4 alpha^2 / (M_X M_Y F)", per_chip, 1, "tokens");
    row(t, "d", "least batch, X free, in turn", "N times that", ceil(per_chip * N), 0, "tokens");
    row(t, "d", "per chip, X free, overlapped", "alpha^2 / (M_X M_Y F)", per_chip / 4, 1, "tokens");
    row(t, "d", "least batch, X free, overlapped", "N times that", ceil(per_chip / 4 * N), 0, "tokens");
    double best_X = 0, best = INFINITY;
    for (double x = 1; x <= N; x *= 2) {
        const double B = least_batch(o, alpha, x, N / x);
        if (B == 0 || fmod(N, x) != 0) { continue; }
        if (B < best) { best = B, best_X = x; }
        row(t, "d", strprintf("least B, X = %g, Y = %g, in turn", x, N / x), "as in c", ceil(B), 0, "tokens");
    }
    print(t);

    answer_memory(o, P, per_token);
    if (in_turn > 0) {
        answer("c",
               "Forward is compute bound from B = (alpha X / M_X) / (1 - alpha Y / (M_Y F)) = %.0f tokens overall, "
               "%.1f per chip; alpha = C / W = %.1f FLOP per byte. This holds for every schedule: FSDP's gathers and "
               "TP's all-reduces take turns. Where both axes communicate at once, each over its own links, alpha X / "
               "M_X = %.0f tokens (%.1f per chip) are enough.",
               ceil(in_turn), in_turn / N, alpha, ceil(overlapped), overlapped / N);
    } else {
        answer("c",
               "No batch is compute bound with X = %g and Y = %g: the all-reduces of tensor parallelism take longer "
               "than the products, at any batch. Y has to be below M_Y F / alpha = %.1f.",
               X, Y, most_Y);
    }
    answer(
        "d",
        "The split can be chosen: the least batch is 4 alpha^2 / (M_X M_Y F) = %.1f tokens per chip, at X = 2 alpha N "
        "/ (M_Y F) = %.1f%s. Communication on both axes at once divides it by 4: alpha^2 / (M_X M_Y F) = %.1f. Fewer "
        "bytes (8-bit weights halve alpha X / M_X), more links per axis and pipeline stages lower it further.",
        per_chip, 2 * N / most_Y,
        best_X > 0
            ? strprintf("; in whole numbers X = %g, Y = %g needs %.0f tokens", best_X, N / best_X, ceil(best)).c_str()
            : "",
        per_chip / 4);
    answer("d",
           "Gradient accumulation does not, because each micro-batch gathers the weights again. Activation "
           "checkpointing does not, because it leaves the forward's FLOPs and bytes as they are.");
    return 0;
}
