// accounting.cu: section 2.4, when communication becomes the limit. It is arithmetic alone.
#include "commands.h"

#include <cinttypes>
#include <cmath>

// ---------------------------------------------------------------------------------------------------------------------
// communication_accounting: the handout's XXL model, L blocks of two Linear layers D x F and F x D.
// C: FLOP/s of a chip; W: bytes/s of a link; X chips share the FSDP axis with M_X links, Y the TP axis with M_Y.

int cmd_communication_accounting(const Options& o) {
    double D = o.d_model, F = o.d_ff, L = o.num_layers;
    double C = o.tflops * 1e12, W = o.bandwidth_gb * 1e9, X = o.fsdp, Y = o.tp, MX = o.links_fsdp, MY = o.links_tp;
    double P = 2 * D * F * L, tokens = o.tokens, GB = 1e9, GIB = 1073741824.0;
    Table table{
        strprintf("communication_accounting: D = d_model %g, F = d_ff %g, L = %g blocks of two Linear layers; GB = 1e9 "
                  "bytes, GiB = 2^30; C = %g TFLOP/s, W = %g GB/s, X = %g (FSDP), Y = %g (TP), M_X = %g, M_Y = %g; "
                  "commit %s",
                  D, F, L, o.tflops, o.bandwidth_gb, X, Y, MX, MY, commit().c_str()),
        {"part", "quantity", "formula", "value", "unit"},
        {}};
    auto row = [&](const char* part, const std::string& quantity, const char* formula, const std::string& value,
                   const char* unit) {
        if (!std::isfinite(strtod(value.c_str(), nullptr))) {
            fail("%s is %s: --tflops, --bandwidth_gb, --gpu_gb or --tpu_gb is too large or too small", quantity.c_str(),
                 value.c_str());
        }
        table.rows.push_back({part, quantity, formula, value, unit});
    };
    auto bytes = [&](const char* part, const std::string& quantity, const char* formula, double value) {
        row(part, quantity, formula, strprintf("%.1f", value / GB), "GB");
        row(part, quantity, formula, strprintf("%.1f", value / GIB), "GiB");
    };
    row("a", "parameters P", "2 D F L", strprintf("%.0f", P), "");
    bytes("a", "master weights, fp32", "4 P", 4 * P);
    bytes("a", "weights, gradients, two moments, fp32", "16 P", 16 * P);
    double per_token = 2 * L * (D + F);
    row("a", "saved for backward, bf16, per token", "2 L (D + F)", strprintf("%.0f", per_token), "bytes");
    row("a", "saved for backward, bf16, per token", "2 L (D + F)", strprintf("%.6f", per_token / GIB), "GiB");
    row("a", strprintf("GPUs of %g GB for 16 P", o.gpu_gb), "16 P / memory, in GB",
        strprintf("%.2f", 16 * P / GB / o.gpu_gb), "");
    row("a", strprintf("GPUs of %g GiB for 16 P", o.gpu_gb), "16 P / memory, in GiB",
        strprintf("%.2f", 16 * P / GIB / o.gpu_gb), "");

    // A is all saved activations of a device's tokens. Every second layer's are sharded, the other half is not.
    auto devices = [&](double tokens_here, double unit) {
        double half = per_token * tokens_here / 2, left = o.tpu_gb * unit - half;
        if (left <= 0) { return std::string("none"); }
        return strprintf("%.0f", floor((16 * P + half) / left) + 1);  // strictly less than the memory
    };
    row("b", "memory per device", "(16 P + A/2) / N + A/2", "", "bytes");
    for (double t : {0.0, tokens, 4 * tokens}) {
        row("b", strprintf("least N below %g GB, %g tokens per device", o.tpu_gb, t), "(16 P + A/2) / (memory - A/2)",
            devices(t, GB), "devices");
    }
    row("b", strprintf("least N below %g GiB, 0 tokens per device", o.tpu_gb), "the same, in GiB", devices(0, GIB),
        "devices");
    row("b", "tokens per device from which no N is enough", "A/2 = memory",
        strprintf("%.0f", ceil(o.tpu_gb * GB / (per_token / 2))), "tokens");

    // Forward of one block: T_math = 4 B D F / (X Y C); gather of the weights T_FSDP = 4 D F / (Y W M_X); all-reduce of
    // the activations T_TP = 4 B D / (X W M_Y). B: tokens overall.
    double alpha = C / W;
    row("c", "alpha", "C / W", strprintf("%.1f", alpha), "FLOP/byte");
    double tp_share = alpha * Y / (MY * F), fsdp_batch = alpha * X / MX;
    auto batch = [&](const char* how, const char* formula, double B) {
        std::string quantity = std::string("least batch, axes ") + how;
        bool possible = std::isfinite(B) && B > 0;
        row("c", quantity, formula, possible ? strprintf("%.0f", ceil(B)) : "none", "tokens");
        row("c", quantity + ", per chip", "B / (X Y)", possible ? strprintf("%.1f", B / (X * Y)) : "none", "tokens");
        row("c", quantity + ", per FSDP shard", "B / X", possible ? strprintf("%.1f", B / X) : "none", "tokens");
    };
    batch("not overlapped", "(alpha X / M_X) / (1 - alpha Y / (M_Y F))",
          tp_share < 1 ? fsdp_batch / (1 - tp_share) : -1);
    batch("overlapped", "alpha X / M_X, if TP's condition holds", tp_share <= 1 ? fsdp_batch : -1);
    row("c", "TP is compute bound for Y below", "M_Y F / alpha", strprintf("%.1f", MY * F / alpha), "chips");

    double N = X * Y, least_sum = 4 * alpha * alpha / (MX * MY * F), best_x = 2 * alpha * N / (MY * F);
    // Without overlap B(X) = (alpha X / M_X) / (1 - alpha N / (X M_Y F)) is least where TP takes half: X = 2 alpha N /
    // (M_Y F).
    row("d", "least batch per chip, split free, not overlapped", "4 alpha^2 / (M_X M_Y F)",
        strprintf("%.1f", least_sum), "tokens");
    row("d", strprintf("the same for %g chips, X = 2 alpha N / (M_Y F) = %.1f", N, best_x), "N times that",
        strprintf("%.0f", ceil(least_sum * N)), "tokens");
    row("d", "least batch per chip, split free, overlapped", "alpha^2 / (M_X M_Y F)", strprintf("%.1f", least_sum / 4),
        "tokens");
    row("d", strprintf("the same for %g chips", N), "N times that", strprintf("%.0f", ceil(least_sum / 4 * N)),
        "tokens");
    std::set<double> divisors;
    for (double x = 1; x * x <= N; x++) {
        if (fmod(N, x) == 0) { divisors.insert({x, N / x}); }
    }
    for (double x : divisors) {
        double share = alpha * (N / x) / (MY * F);
        if (share < 1) {
            row("d", strprintf("least batch, X = %g, Y = %g, not overlapped", x, N / x), "as in c",
                strprintf("%.0f", ceil(alpha * x / MX / (1 - share))), "tokens");
        }
    }
    print(table, o.format);
    return 0;
}
