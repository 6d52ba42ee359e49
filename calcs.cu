// calcs.cu: section 8 of the 2026 handout: how many devices work on one feed-forward layer before communication takes
// longer than the products. It is arithmetic alone; tests/test_calcs.cpp runs the layer on simulated devices and
// counts.
//
//   y = (f(x W1) * (x W2)) W3      x [B, D], W1 and W2 [D, D_FF], W3 [D_FF, D], 2 bytes per element
//
// Forward has three products of 2 B D D_FF FLOPs: x1 = x W1, x2 = x W2, z W3. Backward has two for each of them. A ring
// all-gather or reduce-scatter of S bytes sends (N - 1) / N S bytes out of each device, an all-reduce, being both,
// twice that.
#include "commands.h"

static PassCost cost(const LayerSizes& l, const char* what, double flops, double bytes, double most) {
    return {what, flops, bytes, bytes / l.W, flops / l.C, most};
}
std::vector<PassCost> data_parallel_costs(const LayerSizes& l, double N) {
    auto [B, D, F, C, W] = l;
    return {cost(l, "backward", 12 * B * D * F / N, 12 * D * F * (N - 1) / N, 1 + B * W / C)};
}
std::vector<PassCost> fsdp_costs(const LayerSizes& l, double N) {
    auto [B, D, F, C, W] = l;
    return {cost(l, "forward", 6 * B * D * F / N, 6 * D * F * (N - 1) / N, 1 + B * W / C),
            cost(l, "backward", 12 * B * D * F / N, 12 * D * F * (N - 1) / N, 1 + B * W / C)};
}
std::vector<PassCost> tp_costs(const LayerSizes& l, double N) {
    auto [B, D, F, C, W] = l;
    return {cost(l, "forward", 6 * B * D * F / N, 4 * B * D * (N - 1) / N, 1 + 3 * F * W / (2 * C)),
            cost(l, "backward", 12 * B * D * F / N, 4 * B * D * (N - 1) / N, 1 + 3 * F * W / C)};
}
// Forward: N devices along the FSDP axis, M along the TP axis. With a = B W / C and b = 3 D_FF W / (2 C) the axes'
// times are at most the products' up to 1 + a and 1 + b devices. In turn they add up: 3 D_FF N + 2 B M <= Q, and N M is
// largest where both terms are Q / 2; where that is less than one device along an axis, the axis goes.
std::vector<PassCost> fsdp_tp_costs(const LayerSizes& l, double N, double M) {
    auto [B, D, F, C, W] = l;
    double a = B * W / C, b = 3 * F * W / (2 * C), Q = 3 * B * F * W / C + 3 * F + 2 * B;
    double flops = 6 * B * D * F / (N * M);
    PassCost fsdp = cost(l, "FSDP axis", flops, 6 * D * F * (N - 1) / (N * M), 1 + a);
    PassCost tp = cost(l, "TP axis", flops, 4 * B * D * (M - 1) / (N * M), 1 + b);
    PassCost overlapped = cost(l, "both, overlapped", flops, fsdp.bytes + tp.bytes, (1 + a) * (1 + b));
    PassCost in_turn = cost(l, "both, in turn", flops, fsdp.bytes + tp.bytes, Q * Q / (24 * B * F));
    overlapped.communication = std::max(fsdp.communication, tp.communication);
    if (b < a / (a + 1)) { in_turn.most = 1 + a; }
    if (a < b / (b + 1)) { in_turn.most = 1 + b; }
    return {fsdp, tp, overlapped, in_turn};
}

static LayerSizes sizes_of(const Options& o) {
    return {(double)o.tokens, (double)o.d_model, (double)o.d_ff, o.tflops * 1e12, o.bandwidth_gb * 1e9};
}
static void print_costs(const Options& o, const std::string& devices, const std::vector<PassCost>& costs) {
    Table table{
        strprintf("%s: y = (f(x W1) * (x W2)) W3, products only, 2 bytes per element; B = %d tokens, D = %d, D_FF = "
                  "%d, C = %g TFLOP/s, W = %g GB/s out of each device, GB = 1e9 bytes; %s",
                  o.command.c_str(), o.tokens, o.d_model, o.d_ff, o.tflops, o.bandwidth_gb, devices.c_str()),
        {"", "FLOPs per device", "bytes sent per device", "communication ms", "computation ms", "most devices"}};
    for (const PassCost& c : costs) {
        table.row(c.what, strprintf("%.0f", c.flops), strprintf("%.0f", c.bytes),
                  strprintf("%.6g", 1e3 * c.communication), strprintf("%.6g", 1e3 * c.computation),
                  strprintf("%.6g", c.most));
    }
    print(table);
}
static std::string limit(const PassCost& c) {
    return strprintf("the products take %.4g ms and communication %.4g ms, so %s is the limit", 1e3 * c.computation,
                     1e3 * c.communication, c.computation >= c.communication ? "computation" : "communication");
}

int cmd_alternate_ring_all_reduce(const Options& o) {
    double S = o.tensor_mb * 1e6, W = o.bandwidth_gb * 1e9, N = o.devices;
    double ms = 1e3 * (N - 1) * S / W, usual_ms = 1e3 * 2 * (N - 1) * S / (N * W);
    Table table{
        strprintf(
            "alternate_ring_all_reduce: S = %g MB per device, N = %g, W = %g GB/s out of each device, GB = 1e9 bytes",
            o.tensor_mb, N, o.bandwidth_gb),
        {"all-reduce", "steps", "bytes sent per device", "ms"}};
    table.row("alternative", N - 1, strprintf("%.0f", (N - 1) * S), strprintf("%.6g", ms));
    table.row("reduce-scatter, all-gather", 2 * (N - 1), strprintf("%.0f", 2 * (N - 1) * S / N),
              strprintf("%.6g", usual_ms));
    print(table);
    answer("",
           "The alternative takes (N - 1) S / W = (%g - 1) x %g / %g = %.4g ms: in each of N - 1 steps each device "
           "sends a whole tensor of S bytes. Reduce-scatter and all-gather send parts of S / N bytes in 2 (N - 1) "
           "steps, and take 2 (N - 1) S / (N W) = 2 x (%g - 1) x %g / (%g x %g) = %.4g ms. So the alternative takes N "
           "/ 2 = %g times as long.",
           N, S, W, ms, N, S, N, W, usual_ms, N / 2);
    return 0;
}

int cmd_data_parallel_calcs(const Options& o) {
    const LayerSizes l = sizes_of(o);
    const auto [B, D, F, C, W] = l;
    const double N = o.devices;
    const PassCost c = data_parallel_costs(l, N)[0];
    print_costs(o, strprintf("N_DP = %g", N), {c});
    answer("a",
           "12 B D D_FF / N_DP = 12 x %.7g x %.7g x %.7g / %g = %.4g FLOP. Backward has six products, two for each "
           "product of forward: dz, two terms of dx, dW1, dW2 and dW3. Each takes 2 (B / N_DP) D D_FF on a device's B "
           "/ N_DP rows.",
           B, D, F, N, c.flops);
    answer("b",
           "12 D D_FF (N_DP - 1) / (N_DP W) = 12 x %.7g x %.7g x (%g - 1) / (%g x %g) = %.4g ms. The three gradients "
           "have 3 D D_FF elements of 2 bytes, and a ring all-reduce sends 2 (N_DP - 1) / N_DP of these 6 D D_FF bytes "
           "out of each device.",
           D, F, N, N, W, 1e3 * c.communication);
    answer("c",
           "N_DP <= 1 + B W / C = 1 + %.7g x %g / %g = %.4g devices. The products take 12 B D D_FF / (N_DP C); that is "
           "at least the time in (b) as long as (N_DP - 1) / W <= B / C, where D and D_FF cancel. With N_DP = %g, %s.",
           B, W, C, c.most, N, limit(c).c_str());
    return 0;
}

int cmd_fsdp_calcs(const Options& o) {
    const LayerSizes l = sizes_of(o);
    const auto [B, D, F, C, W] = l;
    const double N = o.devices;
    const std::vector<PassCost> costs = fsdp_costs(l, N);
    const PassCost &forward = costs[0], &backward = costs[1];
    print_costs(o, strprintf("N_FSDP = %g", N), costs);
    answer("a",
           "Backward: 12 B D D_FF / N_FSDP = 12 x %.7g x %.7g x %.7g / %g = %.4g FLOP, in six products. Forward: 6 B D "
           "D_FF / N_FSDP = %.4g FLOP, in three. A gathered weight is whole, so each product is that of data "
           "parallelism: 2 (B / N_FSDP) D D_FF.",
           B, D, F, N, backward.flops, forward.flops);
    answer("b",
           "Backward: 12 D D_FF (N_FSDP - 1) / (N_FSDP W) = 12 x %.7g x %.7g x (%g - 1) / (%g x %g) = %.4g ms; it "
           "gathers the three weights, 6 D D_FF bytes, and reduce-scatters as many bytes of gradients. Forward: 6 D "
           "D_FF (N_FSDP - 1) / (N_FSDP W) = %.4g ms; it gathers the weights only. Each collective sends (N_FSDP - 1) "
           "/ N_FSDP of its bytes out of each device.",
           D, F, N, N, W, 1e3 * backward.communication, 1e3 * forward.communication);
    answer("c",
           "N_FSDP <= 1 + B W / C = 1 + %.7g x %g / %g = %.4g devices in both passes, from (N_FSDP - 1) / W <= B / C: "
           "forward has half of backward's products and half of its bytes. With N_FSDP = %g, in backward %s; in "
           "forward %s.",
           B, W, C, backward.most, N, limit(backward).c_str(), limit(forward).c_str());
    return 0;
}

int cmd_tp_calcs(const Options& o) {
    const LayerSizes l = sizes_of(o);
    const auto [B, D, F, C, W] = l;
    const double N = o.devices;
    const std::vector<PassCost> costs = tp_costs(l, N);
    const PassCost &forward = costs[0], &backward = costs[1];
    print_costs(o, strprintf("N_TP = %g", N), costs);
    answer("a",
           "Device i holds W1(i), W2(i), W3(i) and saved x, x1(i), x2(i), z(i). Each device has all of dY, because y "
           "was all-reduced, so nothing is sent before the end. The devices hold different columns of W1 and W2, so "
           "their dx(i) are parts of a sum: one all-reduce of (B, D).");
    sketch(
        "dz(i)  = dY W3(i)^T                          (B, D_FF / N_TP)\n"
        "dx2(i) = dz(i) * f(x1(i))                    (B, D_FF / N_TP)   * is element by element\n"
        "dx1(i) = dz(i) * f'(x1(i)) * x2(i)           (B, D_FF / N_TP)\n"
        "dW3(i) = z(i)^T dY                           (D_FF / N_TP, D)   the device's own rows\n"
        "dW2(i) = x^T dx2(i)                          (D, D_FF / N_TP)   the device's own columns\n"
        "dW1(i) = x^T dx1(i)                          (D, D_FF / N_TP)\n"
        "dx(i)  = dx1(i) W1(i)^T + dx2(i) W2(i)^T     (B, D)             a partial sum\n"
        "dx     = all-reduce(dx(i))                   (B, D)\n");
    answer("b",
           "Forward: 6 B D D_FF / N_TP = 6 x %.7g x %.7g x %.7g / %g = %.4g FLOP, in three products of 2 B D (D_FF / "
           "N_TP). Backward: 12 B D D_FF / N_TP = %.4g FLOP, in six.",
           B, D, F, N, forward.flops, backward.flops);
    answer("c",
           "Forward: 4 B D (N_TP - 1) / (N_TP W) = 4 x %.7g x %.7g x (%g - 1) / (%g x %g) = %.4g ms, an all-reduce of "
           "y, 2 B D bytes. Backward: the same, an all-reduce of dx. Each sends 2 (N_TP - 1) / N_TP of its bytes out "
           "of each device.",
           B, D, N, N, W, 1e3 * forward.communication);
    answer("d",
           "Backward: N_TP <= 1 + 3 D_FF W / C = 1 + 3 x %.7g x %g / %g = %.4g devices, from 4 (N_TP - 1) / W <= 12 "
           "D_FF / C, where B and D cancel. Forward: N_TP <= 1 + 3 D_FF W / (2 C) = %.4g devices: half as many "
           "products for the same bytes. With N_TP = %g, in backward %s; in forward %s.",
           F, W, C, backward.most, forward.most, N, limit(backward).c_str(), limit(forward).c_str());
    return 0;
}

static void answer_in_turn(const LayerSizes& l, double N, double M, const PassCost& in_turn) {
    const auto [B, D, F, C, W] = l;
    const double a = B * W / C, b = 3 * F * W / (2 * C), Q = 3 * B * F * W / C + 3 * F + 2 * B;
    const bool no_tp = b < a / (a + 1), no_fsdp = a < b / (b + 1);
    answer("d",
           "The times add, so 3 D_FF N_FSDP + 2 B N_TP <= Q with Q = 3 B D_FF W / C + 3 D_FF + 2 B = %.7g, and N_FSDP "
           "N_TP is largest where both terms are Q / 2: N_FSDP = Q / (6 D_FF) = %.4g and N_TP = Q / (4 B) = %.4g.",
           Q, Q / (6 * F), Q / (4 * B));
    if (no_tp || no_fsdp) {
        answer("d",
               "That is less than one device on the %s axis, because with a = B W / C = %.4g and b = 3 D_FF W / (2 C) "
               "= %.4g, %s. So there is no %s, and N <= 1 + %s = %.4g devices.",
               no_tp ? "TP" : "FSDP", a, b, no_tp ? "b is below a / (a + 1)" : "a is below b / (b + 1)",
               no_tp ? "TP" : "FSDP", no_tp ? "B W / C" : "3 D_FF W / (2 C)", in_turn.most);
    } else {
        answer("d",
               "So N <= Q^2 / (24 B D_FF) = %.7g^2 / (24 x %.7g x %.7g) = %.4g devices. Where a = B W / C and b = 3 "
               "D_FF W / (2 C) are large, that is near 3 B D_FF (W / C)^2 / 8, here %.4g.",
               Q, B, F, in_turn.most, a * b / 4);
    }
    answer("d", "With N_FSDP = %g and N_TP = %g, %s.", N, M, limit(in_turn).c_str());
}
int cmd_fsdp_tp_calcs(const Options& o) {
    const LayerSizes l = sizes_of(o);
    const auto [B, D, F, C, W] = l;
    const double N = o.fsdp, M = o.tp;
    const std::vector<PassCost> costs = fsdp_tp_costs(l, N, M);
    const PassCost &fsdp = costs[0], &tp = costs[1], &overlapped = costs[2];
    print_costs(o, strprintf("forward, N_FSDP = %g, N_TP = %g", N, M), costs);
    answer("a",
           "6 B D D_FF / (N_FSDP N_TP) = 6 x %.7g x %.7g x %.7g / (%g x %g) = %.4g FLOP: three products of 2 (B / "
           "N_FSDP) D (D_FF / N_TP). FSDP splits the rows of x, TP the columns of W1 and W2 and the rows of W3.",
           B, D, F, N, M, fsdp.flops);
    answer("b",
           "max(6 D D_FF (N_FSDP - 1), 4 B D (N_TP - 1)) / (N_FSDP N_TP W) = max(6 x %.7g x %.7g x (%g - 1), 4 x %.7g "
           "x %.7g x (%g - 1)) / (%g x %g x %g) = %.4g ms. FSDP gathers a TP shard of the weights, 6 D D_FF / N_TP "
           "bytes, in %.4g ms. TP all-reduces y of B / N_FSDP rows, 2 B D / N_FSDP bytes, in %.4g ms.",
           D, F, N, B, D, M, N, M, W, 1e3 * overlapped.communication, 1e3 * fsdp.communication, 1e3 * tp.communication);
    answer("c",
           "N <= (1 + B W / C) (1 + 3 D_FF W / (2 C)) = (1 + %.7g x %g / %g) x (1 + 3 x %.7g x %g / (2 x %g)) = %.4g "
           "devices. The FSDP axis takes at most 1 + B W / C = %.4g for any N_TP, and the TP axis at most 1 + 3 D_FF W "
           "/ (2 C) = %.4g for any N_FSDP.",
           B, W, C, F, W, C, overlapped.most, fsdp.most, tp.most);
    answer("c",
           "Without each 1 the product is 3 B D_FF (W / C)^2 / 2 = %.4g devices. With N_FSDP = %g and N_TP = %g, %s.",
           (fsdp.most - 1) * (tp.most - 1), N, M, limit(overlapped).c_str());
    answer_in_turn(l, N, M, costs[3]);
    return 0;
}
