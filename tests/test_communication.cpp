// Tests of communication.cu: the times of all-reduces, the arithmetic of sections 2.4 and 2026's 8,
// and their answers.
#include "communication.cu"

#include "test.h"

#include <tuple>
#include <utility>

// -------------------------------------------------------------------------------------------------
// distributed_communication_single_node

static void check_median(const Communicator& c) {
    // The median is that of both ranks' steps, and no rank's own.
    const vector<double> medians = gather<double>(c, {time_all_reduce(c, 1000, 0, 2)});
    CHECK(medians[0] == medians[1]);
}
TEST_CASE("communication: an all-reduce's median is that of both ranks' steps") {
    if (lacks("gloo", CPU, 2)) { return; }
    in_ranks("communication: an all-reduce's median is that of both ranks' steps", 2, CPU,
             check_median);
}
TEST_CASE("communication: Gloo's all-reduces have all sizes beside NCCL's") {
    if (lacks("nccl", CUDA, 2)) { return; }
    Run r = run_cs336({"distributed_communication_single_node", "--warmup", "1", "--steps", "1"});
    INFO(r.out << r.err);
    CHECK(r.exit_code == 0);
    CHECK(has(r.out, "| gloo "));
    CHECK(has(r.out, " 1000 "));
    CHECK(!has(r.out, "inf"));
    CHECK(!has(r.out, "nan"));
}
TEST_CASE("communication: all-reduces of groups of ranks come back as numbers") {
    if (lacks("gloo", CPU, 6)) { return; }
    Run r = run_cs336({"distributed_communication_single_node", "--device", "cpu", "--steps", "2"});
    INFO(r.out << r.err);
    CHECK(r.exit_code == 0);
    for (const char* row : {"|     2 |                1 |", "|     4 |                1 |",
                            "|     6 |               10 |"}) {
        CHECK_MESSAGE(has(r.out, string("| gloo    | cpu    ") + row), row);
    }
    CHECK(has(r.out, ": Gloo with 2 ranks takes "));
    CHECK(has(r.out, "**(ranks)** From 4 to 6 ranks Gloo takes "));
    Run group =
        run_cs336({"distributed_communication_single_node", "--device", "cpu", "--nproc", "3"});
    CHECK(group.exit_code == 0);
    CHECK(has(group.out, "| gloo    | cpu    |     3 |                1 |"));
    Run one =
        run_cs336({"distributed_communication_single_node", "--device", "cpu", "--nproc", "1"});
    CHECK(one.exit_code == 2);
    CHECK(has(one.err, "one rank sends nothing: the command takes 2 or more (--nproc)"));
    if (cuda_devices() > 0) { return; }
    Run none = run_cs336({"distributed_communication_single_node", "--device", "cuda"});
    CHECK(none.exit_code == 1);
    CHECK(has(none.out, "Not measured: nccl from 2 ranks on (no GPU here)."));
}
TEST_CASE("answers communication: distributed_communication_single_node") {
    auto answers = [](const vector<AllReduceGroup>& groups) {
        return printed([&] { answer_distributed_communication_single_node(groups, 4); });
    };
    check_says(answers({{false, 2, {0.554, 5, 50, 501.26}},
                        {false, 4, {0.785, 5, 64, 751.92}},
                        {false, 6, {1.2, 6, 79, 745.33}},
                        {true, 2, {0.035, 0.07, 0.37, 3.099}},
                        {true, 4, {0.04, 0.1, 0.5, 4.274}}}),
               {"Time grows about as the bytes do, or more: Gloo with 2 ranks takes 501.3 ms for "
                "1000 MB, 904.8 times as "
                "long as for 1 MB (0.554 ms).",
                "Time grows less than the bytes do: NCCL with 2 ranks takes "
                "3.099 ms for 1000 MB, 88.5 times as long",
                "From 4 to 6 ranks Gloo takes 0.99 times as long for 1000 MB (a ring: 1.11 times).",
                "From 2 to 4 ranks NCCL takes 1.38 times as long for 1000 MB (",
                "With 2 ranks Gloo takes 15.8 times as long as NCCL for 1 MB, and 161.7 times for "
                "1000 MB."});
    CHECK(has(answers({{false, 2, {0.5, 5, 50, 527.5}}}), "1055.0 times as long as for 1 MB"));
    // The answers are about the largest size that all groups have room for.
    const string smaller = answers({{false, 2, {0.5, 5, 50, 501}}, {false, 4, {0.8, 5, 64, NAN}}});
    CHECK(
        has(smaller, "Gloo with 2 ranks takes 50 ms for 100 MB, 100.0 times as long as for 1 MB"));
    CHECK(has(smaller, "From 2 to 4 ranks Gloo takes 1.28 times as long for 100 MB"));
    CHECK(answers({{false, 2, {0.554, NAN, NAN, NAN}}}) ==
          "**(size)** Not every group had room for 1000 MB.\n");
    Options o;
    o.warmup = {1};
    o.steps = 1;
    const string table = printed([&] { print_all_reduces(o, {{true, 4, {0.04, 0.1, 0.5, 4.0}}}); });
    CHECK(std::stod(column(table, "algbw (GB/s)").at(3)) == doctest::Approx(250));
    CHECK(std::stod(column(table, "busbw (GB/s)").at(3)) == doctest::Approx(375));  // 2 (4 - 1) / 4
    CHECK(bytes_needed({false, 2, {}}, 0) == 5000000);
}

// -------------------------------------------------------------------------------------------------
// Section 8's arithmetic. A feed-forward layer runs forward and backward on simulated devices, with
// real numbers: products count their FLOPs, sends their bytes. The gradients have to be the tape's,
// and the program's formulas have to give the counts.

using Vector = vector<double>;
static Tensor columns_as_rows(const Tensor& t) { return contiguous(transpose(t, 0, 1)); }
// the i-th of n parts: rows or columns
static Tensor part_of(const Tensor& t, int axis, int i, int n) {
    if (axis == 1) { return columns_as_rows(part_of(columns_as_rows(t), 0, i, n)); }
    const int64_t rows = t.dim(0) / n;
    return view(t, i * rows * t.dim(1), {rows, t.dim(1)});
}
static Tensor product(const Tensor& a, const Tensor& b, double* flops) {
    *flops += 2.0 * a.dim(0) * a.dim(1) * b.dim(1);
    return matmul(a, b);
}
static double difference(const Vector& a, const Vector& b) {
    REQUIRE(a.size() == b.size());
    double most = 0;
    for (size_t i = 0; i < a.size(); i++) {
        most = std::fabs(a[i] - b[i]) <= most ? most : std::fabs(a[i] - b[i]);
    }
    return most;
}

struct Member {  // of a ring: its copy of a vector, and what it has sent
    Vector* data;
    double* bytes;
};
// N - 1 steps, in each of which every member sends 1/N of the vector to the next one, 2 bytes per
// element. adds: a reduce-scatter, which leaves member i the sum of part i; else an all-gather of
// what each has in its part.
static void ring(const vector<Member>& members, bool adds) {
    const size_t N = members.size(), n = members[0].data->size() / N;
    REQUIRE(n * N == members[0].data->size());
    for (size_t step = 0; step + 1 < N; step++) {
        vector<Vector> sent;
        auto part = [&](size_t i) { return (i + 2 * N - step - adds) % N * n; };
        for (size_t i = 0; i < N; i++) {
            const auto from = members[i].data->begin() + part(i);
            sent.emplace_back(from, from + n);
            *members[i].bytes += 2.0 * n;
        }
        for (size_t i = 0; i < N; i++) {
            double* to = members[(i + 1) % N].data->data() + part(i);
            for (double value : sent[i]) {
                *to = adds ? *to + value : value;
                to++;
            }
        }
    }
}
static void ring_all_reduce(const vector<Member>& members) {
    ring(members, true);
    ring(members, false);
}

struct FeedForward {
    Tensor x, dy, w[3];
};
struct Simulated {  // a device: rows i of x and dy; columns j of W1 and W2, rows j of W3
    FeedForward part;
    Vector y{}, dx{}, dw[3]{};
    double flops[2] = {}, fsdp_bytes[2] = {}, tp_bytes[2] = {};  // in forward, in backward
};
static FeedForward random_layer(int B, int D, int F) {
    begin_on(CPU);
    auto random = [i = 0](int rows, int columns) mutable {
        Tensor t = empty({rows, columns}, F64);
        fill_normal(t, 1, i++, 0, 1);
        return t;
    };
    return {random(B, D), random(B, D), {random(D, F), random(D, F), random(F, D)}};
}
// Both passes, by the equations that tp_calcs (a) prints. f(x) = x s(x), so f' = s + f (1 - s).
static void run_passes(Simulated& d) {
    NoGrad no_grad;
    const auto& [x, dy, w] = d.part;
    double *forward = &d.flops[0], *backward = &d.flops[1];
    const Tensor x1 = product(x, w[0], forward), x2 = product(x, w[1], forward), s = sigmoid(x1),
                 f = mul(x1, s);
    const Tensor f_prime = add(s, mul(f, add_scalar(scale(s, -1), 1))), z = mul(f, x2);
    d.y = to_doubles(product(z, w[2], forward));
    const Tensor dz = product(dy, columns_as_rows(w[2]), backward), dx2 = mul(dz, f),
                 dx1 = mul(mul(dz, f_prime), x2);
    d.dw[0] = to_doubles(product(columns_as_rows(x), dx1, backward));
    d.dw[1] = to_doubles(product(columns_as_rows(x), dx2, backward));
    d.dw[2] = to_doubles(product(columns_as_rows(z), dy, backward));
    d.dx = to_doubles(add(product(dx1, columns_as_rows(w[0]), backward),
                          product(dx2, columns_as_rows(w[1]), backward)));
}
// N devices along the FSDP axis, M along the TP axis: device (i, j) is number i M + j.
static vector<Simulated> simulate(const FeedForward& l, int N, int M) {
    vector<Simulated> devices;
    for (int k = 0; k < N * M; k++) {
        const int i = k / M, j = k % M;
        FeedForward& own = devices.emplace_back().part;
        own.x = part_of(l.x, 0, i, N);
        own.dy = part_of(l.dy, 0, i, N);
        for (int w = 0; w < 3; w++) { own.w[w] = part_of(l.w[w], w < 2 ? 1 : 0, j, M); }
        run_passes(devices.back());
    }
    for (int i = 0; i < N; i++) {
        vector<Member> y, dx;
        for (int j = 0; j < M; j++) {
            Simulated& d = devices[i * M + j];
            y.push_back({&d.y, &d.tp_bytes[0]});
            dx.push_back({&d.dx, &d.tp_bytes[1]});
        }
        ring_all_reduce(y);
        ring_all_reduce(dx);
    }
    for (int j = 0; j < M; j++) {
        for (int k = 0; k < 3; k++) {
            double not_counted = 0;  // to see the whole sums
            vector<Vector> weights(N, Vector(devices[j].dw[k].size()));
            vector<Member> gathers[2], sums, whole_sums;
            for (int i = 0; i < N; i++) {
                Simulated& d = devices[i * M + j];
                for (int pass : {0, 1}) {
                    gathers[pass].push_back({&weights[i], &d.fsdp_bytes[pass]});
                }
                sums.push_back({&d.dw[k], &d.fsdp_bytes[1]});
                whole_sums.push_back({&d.dw[k], &not_counted});
            }
            ring(gathers[0], false);
            ring(gathers[1], false);
            ring(sums, true);
            ring(whole_sums, false);
        }
    }
    return devices;
}

TEST_CASE("calcs: the simulated layer's gradients are the tape's, on any grid of devices") {
    const FeedForward l = random_layer(12, 4, 24);
    Tensor leaves[4];  // x, W1, W2, W3
    for (int k = 0; k < 4; k++) {
        leaves[k] = require_gradient(k == 0 ? l.x : l.w[k - 1]);
        leaves[k].gradient->is_parameter = true;
    }
    const Tensor x1 = matmul(leaves[0], leaves[1]), x2 = matmul(leaves[0], leaves[2]);
    const Tensor y = matmul(mul(mul(x1, sigmoid(x1)), x2), leaves[3]);
    backward_from(y, l.dy);
    for (auto [N, M] : {pair(1, 1), {3, 1}, {1, 4}, {2, 3}, {3, 4}, {4, 2}}) {
        INFO(N << " x " << M << " devices");
        const vector<Simulated> devices = simulate(l, N, M);
        for (int k = 0; k < N * M; k++) {
            CHECK(difference(devices[k].y, to_doubles(part_of(y, 0, k / M, N))) < 1e-12);
            CHECK(difference(devices[k].dx,
                             to_doubles(part_of(leaves[0].gradient->value, 0, k / M, N))) < 1e-12);
            for (int i = 0; i < 3; i++) {
                const Tensor want = part_of(leaves[i + 1].gradient->value, i < 2 ? 1 : 0, k % M, M);
                CHECK(difference(devices[k].dw[i], to_doubles(want)) < 1e-12);
            }
        }
    }
}
TEST_CASE("calcs: FLOPs and bytes are those that the simulated devices count") {
    const double C = 1e6, W = 1e3;
    for (auto [B, D, F, N, M] :
         {std::tuple(12, 8, 24, 4, 2), {12, 8, 24, 2, 4}, {12, 8, 24, 3, 1}, {12, 8, 24, 1, 3}}) {
        INFO("B " << B << ", D " << D << ", F " << F << ", " << N << " x " << M << " devices");
        const LayerSizes sizes = {(double)B, (double)D, (double)F, C, W};
        const vector<PassCost> both = fsdp_tp_costs(sizes, N, M), fsdp = fsdp_costs(sizes, N),
                               tp = tp_costs(sizes, M);
        for (const Simulated& d : simulate(random_layer(B, D, F), N, M)) {
            auto check = [&](const PassCost& cost, int pass, double bytes) {
                CHECK(cost.flops == d.flops[pass]);
                CHECK(cost.communication == doctest::Approx(bytes / W).epsilon(1e-12));
            };
            check(both[0], 0, d.fsdp_bytes[0]);
            check(both[1], 0, d.tp_bytes[0]);
            for (int pass : {0, 1}) {  // the costs begin with backward
                if (M == 1) { check(fsdp[1 - pass], pass, d.fsdp_bytes[pass]); }
                if (N == 1) { check(tp[1 - pass], pass, d.tp_bytes[pass]); }
            }
        }
        CHECK(both[2].communication == max(both[0].communication, both[1].communication));
    }
}
TEST_CASE(
    "calcs: communication is the limit from the first whole number of devices above the bound on") {
    for (auto costs_of : {fsdp_costs, tp_costs}) {
        for (double GB_per_s : {450.0, 97.3, 50.0}) {
            const LayerSizes l = {65536, 4096, 11008, 989e12, GB_per_s * 1e9};
            for (size_t pass = 0; pass < 2; pass++) {
                const int most = (int)costs_of(l, 2)[pass].most;
                INFO(GB_per_s << " GB/s, " << costs_of(l, 2)[pass].what << ", " << most
                              << " devices");
                const PassCost fits = costs_of(l, most)[pass], beyond = costs_of(l, most + 1)[pass];
                CHECK(fits.communication <= fits.flops / l.C);
                CHECK(beyond.communication > beyond.flops / l.C);
            }
        }
    }
}
static Options handout() {  // main.cu's defaults
    Options o;
    o.tokens = 65536;
    o.d_model = 4096;
    o.d_ff = 11008;
    o.tflops = 989;
    o.bandwidth_gb = 450;
    o.devices = 8;
    o.fsdp = 4;
    o.tp = 2;
    o.tensor_mb = 1000;
    return o;
}
static string csv_of(int (*command)(const Options&), const Options& o) {
    RestoreContext restore;
    context.csv = true;
    return printed([&] { command(o); });
}
TEST_CASE("calcs: fsdp_tp_calcs's bounds are those of a search over all splits") {
    // both axes, no FSDP, no TP, and on either side of where TP stops to pay
    for (auto [B, F] : {pair(65536, 11008),
                        {2048, 10240},
                        {1024, 1048576},
                        {65536, 64},
                        {65536, 1600},
                        {65536, 1300}}) {
        Options o = handout();
        o.tokens = B;
        o.d_model = 128;
        o.d_ff = F;
        const LayerSizes l = sizes_of(o);
        for (bool overlapped : {true, false}) {
            auto fits = [&](double n, double m) {
                const vector<PassCost> c = fsdp_tp_costs(l, n, m);
                const double in_turn = c[0].communication + c[1].communication;
                return (overlapped ? c[2].communication : in_turn) <= c[0].flops / l.C;
            };
            double best = 1;
            for (double n = 1; fits(n, 1); n *= 1.0005) {
                double fitting = 1, beyond = 1e6;
                for (int i = 0; i < 40; i++) {
                    const double middle = (fitting + beyond) / 2;
                    double& bound = fits(n, middle) ? fitting : beyond;
                    bound = middle;
                }
                best = max(best, n * fitting);
            }
            // (c) and (d) end in it: "... = 262.4 devices."
            const string text = csv_of(cmd_fsdp_tp_calcs, o);
            const size_t end =
                text.rfind(" devices.", overlapped ? text.find("# (d)") : text.size());
            const double most = stod(text.substr(text.rfind(' ', end - 1), end));
            INFO("B " << B << ", F " << F << ", overlapped " << overlapped << ": " << text);
            CHECK(most == doctest::Approx(best).epsilon(1e-3));
        }
    }
}
TEST_CASE("calcs: alternate_ring_all_reduce's bytes are those that a ring counts") {
    for (int N : {2, 5}) {
        vector<Vector> data(N, Vector(10 * N));
        Vector sent(N);
        vector<Member> members;
        for (int i = 0; i < N; i++) { members.push_back({&data[i], &sent[i]}); }
        ring_all_reduce(members);
        Options o = handout();
        o.tensor_mb = 10 * N * 2e-6;
        o.devices = N;
        o.bandwidth_gb = 1e-6;  // a byte takes 1 ms
        const string text = csv_of(cmd_alternate_ring_all_reduce, o);
        CHECK_MESSAGE(has(text, strprintf("= %g ms.\n", sent[0])), text);
    }
}

// -------------------------------------------------------------------------------------------------
// Answers and options

static void check_calcs_say(const string& text, const vector<string>& phrases) {
    for (const string& phrase : phrases) {
        CHECK_MESSAGE(has(text, phrase), phrase, " in: ", text);
    }
    for (const string never : {"nan", "inf ", " ,"}) {
        CHECK_MESSAGE(!has(text.substr(text.find("\n# (a)") + 1), never), text);
    }
}
TEST_CASE("calcs: answers") {
    Options o = handout();
    check_calcs_say(csv_of(cmd_alternate_ring_all_reduce, o),
                    {"takes (N - 1) S / W = (8 - 1) x 1e+09 / 4.5e+11 = 15.56 ms", " = 3.889 ms.\n",
                     "That is N / 2 = 4 times as long"});
    check_calcs_say(
        csv_of(cmd_data_parallel_calcs, o),
        {"(a) Backward: 12 B D D_FF / N = 12 x 65536 x 4096 x 11008 / 8 = 4.432e+12 FLOP, 6 "
         "products",
         "(b) Backward: 12 D D_FF (N - 1) / (N W) = 12 x 4096 x 11008 x (8 - 1) / (8 x 4.5e+11) = "
         "1.052 ms. ",
         "twice, to all-reduce the gradients.",
         "(c) N <= 1 + B W / C = 1 + 65536 x 4.5e+11 / 9.89e+14 = 30.82 devices, from 12 D D_FF"});
    check_calcs_say(
        csv_of(cmd_fsdp_calcs, o),
        {"Forward: 6 B D D_FF / N = 6 x 65536 x 4096 x 11008 / 8 = 2.216e+12 FLOP, 3 products",
         "Forward: 6 D D_FF (N - 1) / (N W) = 6 x 4096 x 11008 x (8 - 1) / (8 x 4.5e+11) = 0.526 "
         "ms",
         "once, to gather the weights.", "= 30.82 devices in both passes"});
    check_calcs_say(csv_of(cmd_tp_calcs, o),
                    {"dx1(i) = dz(i) * f'(x1(i)) * x2(i)",
                     "(c) Forward: 4 B D (N_TP - 1) / (N_TP W) = 4 x 65536 x "
                     "4096 x (8 - 1) / (8 x 4.5e+11) = 2.088 ms",
                     "N_TP <= 1 + 3 D_FF W / C = 16.03 devices",
                     "N_TP <= 1 + 3 D_FF W / (2 C) = 1 + 3 x 11008 x 4.5e+11 / "
                     "(2 x 9.89e+14) = 8.513 devices"});
    check_calcs_say(
        csv_of(cmd_fsdp_tp_calcs, o),
        {"max(6 x 4096 x 11008 x (4 - 1), 4 x 65536 x 4096 x (2 - 1)) / (4 x 2 x 4.5e+11) = "
         "0.2983 ms. FSDP's gather",
         "1 + 65536 x 4.5e+11 / 9.89e+14 = 30.82, where N_TP cancels.",
         "So N = N_FSDP N_TP <= 262.4 devices.", "= 1148846. ",
         "N_FSDP = Q / (6 D_FF) = 17.39, N_TP = Q / (4 B) = 4.382. There N = Q^2 / (24 B "
         "D_FF) = 1148846^2 / (24 x 65536 x 11008) = 76.23 devices."});
}
TEST_CASE("calcs: answers where communication is the limit, or an axis goes") {
    Options few = handout(), narrow = handout(), short_batch = handout();
    few.tokens = 2048;
    narrow.d_ff = 64;
    short_batch.tokens = 1024;
    check_calcs_say(csv_of(cmd_data_parallel_calcs, few), {"= 1.932 devices"});
    check_calcs_say(
        csv_of(cmd_fsdp_tp_calcs, narrow),
        {"But an axis has at least one device. So there is only the FSDP axis here, and "
         "N <= 30.82 devices"});
    check_calcs_say(
        csv_of(cmd_fsdp_tp_calcs, short_batch),
        {"But an axis has at least one device. So there is only the TP axis here, and N "
         "<= 8.513 devices"});
}
TEST_CASE("calcs: a number in a formula has all of its digits") {
    Options many = handout();
    many.devices = 1000001;
    many.d_ff = 1000003;
    for (auto* command : {cmd_data_parallel_calcs, cmd_fsdp_calcs, cmd_tp_calcs}) {
        const string text = csv_of(command, many);
        CHECK_MESSAGE(!has(text, "e+06"), text);
    }
    CHECK(has(csv_of(cmd_alternate_ring_all_reduce, many), "N / 2 = 500000.5 times"));
    many.tokens = 700;
    CHECK(!has(csv_of(cmd_communication_accounting, many), "e+06"));
}
TEST_CASE("calcs: wrong options") {
    for (const auto& [option, value] : {pair("--devices", "1"),
                                        {"--devices", "1048577"},
                                        {"--devices", "2.5"},
                                        {"--tflops", "nan"},
                                        // a product could be beyond a double
                                        {"--tflops", "1e308"}}) {
        CHECK(run_cs336({"tp_calcs", option, value}).exit_code == 2);
    }
    for (const string value : {"3.4e38", "1.2e-38"}) {
        const Run r = run_cs336(
            {"fsdp_tp_calcs", "--tflops", value, "--tokens", "1048576", "--d_ff", "1048576"});
        CHECK(r.exit_code == 0);
        CHECK_MESSAGE(!(has(r.out, "inf ") || has(r.out, "nan")), r.out);
    }
}

// -------------------------------------------------------------------------------------------------
// communication_accounting

static Options xxl() {  // main.cu's defaults
    Options o;
    o.d_model = 16384;
    o.d_ff = 53248;
    o.num_layers = 126;
    o.tokens = 2048;
    o.tflops = 460;
    o.bandwidth_gb = 180;
    o.fsdp = 16;
    o.tp = 4;
    return o;
}
TEST_CASE("accounting: table and answers") {
    check_calcs_say(
        csv_of(cmd_communication_accounting, xxl()),
        {"(a) P = 2 D F L = 2 x 16384 x 53248 x 126 = 2.198e+11 parameters take 4 P = 879.4 GB in "
         "fp32.",
         "16 P = 3517.6 GB, the memory of 3517.6 / 80 = 43.97 GPUs, rounded up 44.",
         "= 17.55 MB per token",
         "below 95 GB from N = 38 on; with --tokens 2048 per device, from N = 46 on.",
         "= 10828 tokens per device on", "= 2555.6 FLOP per byte.",
         " forward is compute bound from B = (alpha X / M_X) / (1 - alpha Y / (M_Y F)) = (2555.6 x "
         "16 / 2) / (1 - 2555.6 x 4 / (1 x 53248)) = 25301.7 tokens overall, 395.3 per chip",
         "20444.4 tokens (319.4 per chip)", "259.3 tokens per chip, with (X, Y) = (8, 8).",
         "= 245.3, if X could be 2 alpha N / (M_Y F) = 6.1.", "= 61.3."});
}
TEST_CASE("accounting: where nothing fits") {
    Options o = xxl();
    o.tp = 21;
    CHECK_THROWS_WITH(cmd_communication_accounting(o),
                      "--tp: got 21; no batch is compute bound from M_Y F W / C = 20.8 on");
    o = xxl();
    o.tokens = 10828;
    CHECK_THROWS_WITH(cmd_communication_accounting(o),
                      "--tokens: got 10828, takes fewer than 10828");
}
// With 8 chips (d)'s bound would need 10.4 along one axis and 0.8 of a chip along the other.
TEST_CASE("accounting: a bound that no split reaches is not told") {
    Options o = xxl();
    o.fsdp = 2;
    const string answers = csv_of(cmd_communication_accounting, o);
    check_calcs_say(answers,
                    {"the least batch with X Y = 8 is 259.3 tokens per chip, with (X, Y) = "
                     "(1, 8). Fewer bytes"});
    CHECK(!has(answers, "It would be"));

    // Here it would need 0.6 of a chip along the TP axis.
    o = xxl();
    o.d_ff = 3000;
    o.tp = 1;
    CHECK(!has(csv_of(cmd_communication_accounting, o), "It would be"));
}
