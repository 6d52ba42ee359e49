// Tests of calcs.cu and accounting.cu. A feed-forward layer runs forward and backward on simulated devices, with real
// numbers: products count their FLOPs, sends their bytes. The gradients have to be right, and the program's formulas
// have to give the counts.
#include "test.h"

#include <array>
#include <numeric>
#include <tuple>

// ---------------------------------------------------------------------------------------------------------------------
// The simulation

namespace {  // of this file alone: the program has structs of these names

struct Dense {
    int rows = 0, columns = 0;
    std::vector<double> x{};
    double& at(int i, int j) { return x[(size_t)i * columns + j]; }
    double at(int i, int j) const { return x[(size_t)i * columns + j]; }
};
Dense part_of(const Dense& m, int row, int rows, int column, int columns) {
    Dense part{rows, columns};
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < columns; j++) { part.x.push_back(m.at(row + i, column + j)); }
    }
    return part;
}
Dense transposed(const Dense& m) {
    Dense t{m.columns, m.rows, std::vector<double>(m.x.size())};
    for (int i = 0; i < m.rows; i++) {
        for (int j = 0; j < m.columns; j++) { t.at(j, i) = m.at(i, j); }
    }
    return t;
}
Dense product(const Dense& a, const Dense& b, double* flops) {
    REQUIRE(a.columns == b.rows);
    Dense c{a.rows, b.columns, std::vector<double>((size_t)a.rows * b.columns)};
    for (int i = 0; i < a.rows; i++) {
        for (int j = 0; j < b.columns; j++) {
            for (int k = 0; k < a.columns; k++) { c.at(i, j) += a.at(i, k) * b.at(k, j), *flops += 2; }
        }
    }
    return c;
}

struct Counts {  // of one device in one pass
    double flops = 0, fsdp_bytes = 0, tp_bytes = 0;
};
struct Member {  // of a ring: its copy of a vector, and what it has sent
    std::vector<double>* data;
    double* bytes;
};
size_t bound(size_t n, size_t part, size_t parts) { return n * part / parts; }
// N - 1 steps, in each of which every member sends 1/N of the vector to the next one, 2 bytes per element. adds: a
// reduce-scatter, which leaves member i the sum of part i; else an all-gather of what each has in its part.
void ring(const std::vector<Member>& members, bool adds) {
    size_t N = members.size(), n = members[0].data->size();
    for (size_t step = 0; step + 1 < N; step++) {
        std::vector<std::vector<double>> sent(N);
        auto part = [&](size_t i) { return (i + 2 * N - step - adds) % N; };
        for (size_t i = 0; i < N; i++) {
            const auto& data = *members[i].data;
            sent[i].assign(data.begin() + bound(n, part(i), N), data.begin() + bound(n, part(i) + 1, N));
            *members[i].bytes += 2.0 * sent[i].size();
        }
        for (size_t i = 0; i < N; i++) {
            double* to = members[(i + 1) % N].data->data() + bound(n, part(i), N);
            for (double value : sent[i]) { *to = adds ? *to + value : value, to++; }
        }
    }
}
void ring_all_reduce(const std::vector<Member>& members) { ring(members, true), ring(members, false); }

struct FeedForward {
    Dense x, dy, w[3];
};
struct Outcome {
    Dense y, dx, dw[3];
    std::vector<Counts> forward, backward;  // of each device
};
double f(double x) { return x / (1 + exp(-x)); }
double f_prime(double x) { return (1 + f(x) * exp(-x)) / (1 + exp(-x)); }
Dense by_element(const Dense& m, const std::function<double(size_t)>& value) {
    Dense result = m;
    for (size_t i = 0; i < m.x.size(); i++) { result.x[i] = value(i); }
    return result;
}

// A grid of devices. Device (i, j) has the rows i of x, and of the weights W(j) (columns of W1 and W2, rows of W3): all
// of them, or, with FSDP, part i of them in one flat vector.
struct Grid {
    const FeedForward& l;
    int fsdp, tp;
    bool data_parallel;  // whole weights, all-reduced gradients
    Outcome o{};
    struct Saved {
        Dense x, x1, x2, z, y;
    };
    std::vector<Saved> saved{};

    int rows(int i) const { return bound(l.x.rows, i + 1, fsdp) - bound(l.x.rows, i, fsdp); }
    int columns(int j) const { return bound(l.w[0].columns, j + 1, tp) - bound(l.w[0].columns, j, tp); }
    Dense rows_of_device(const Dense& m, int i) const {
        return part_of(m, bound(m.rows, i, fsdp), rows(i), 0, m.columns);
    }
    // What each device has in data, as rings along one axis.
    void along(bool tp_axis, std::vector<std::vector<double>*> data, std::vector<Counts>& counts,
               const std::function<void(const std::vector<Member>&)>& collective) {
        for (int group = 0; group < (tp_axis ? fsdp : tp); group++) {
            std::vector<Member> members;
            for (int k = 0; k < (tp_axis ? tp : fsdp); k++) {
                int device = tp_axis ? group * tp + k : k * tp + group;
                members.push_back({data[device], tp_axis ? &counts[device].tp_bytes : &counts[device].fsdp_bytes});
            }
            collective(members);
        }
    }
    // Each device's W1(j), W2(j), W3(j).
    std::vector<std::array<Dense, 3>> weights(std::vector<Counts>& counts) {
        std::vector<std::vector<double>> flat(fsdp * tp);
        std::vector<std::vector<double>*> data;
        for (int d = 0; d < fsdp * tp; d++) {
            int j = d % tp, from = bound(l.w[0].columns, j, tp), width = columns(j);
            for (const Dense& w : l.w) {
                bool wide = &w != &l.w[2];
                Dense own = wide ? part_of(w, 0, w.rows, from, width) : part_of(w, from, width, 0, w.columns);
                flat[d].insert(flat[d].end(), own.x.begin(), own.x.end());
            }
            size_t n = flat[d].size(), begin = bound(n, d / tp, fsdp), end = bound(n, d / tp + 1, fsdp);
            for (size_t k = 0; k < n && !data_parallel; k++) {
                if (k < begin || k >= end) { flat[d][k] = NAN; }  // another device's part
            }
            data.push_back(&flat[d]);
        }
        if (!data_parallel) {
            along(false, data, counts, [](const auto& members) { ring(members, false); });
        }
        std::vector<std::array<Dense, 3>> all;
        for (int d = 0; d < fsdp * tp; d++) {
            int D = l.x.columns, width = columns(d % tp);
            auto third = [&](int k) {
                return std::vector<double>(flat[d].begin() + k * D * width, flat[d].begin() + (k + 1) * D * width);
            };
            all.push_back({Dense{D, width, third(0)}, Dense{D, width, third(1)}, Dense{width, D, third(2)}});
        }
        return all;
    }
    void forward() {
        o.forward.resize(fsdp * tp);
        auto w = weights(o.forward);
        std::vector<std::vector<double>*> ys;
        saved.resize(fsdp * tp);
        for (int d = 0; d < fsdp * tp; d++) {
            Saved& s = saved[d];
            double* flops = &o.forward[d].flops;
            s.x = rows_of_device(l.x, d / tp);
            s.x1 = product(s.x, w[d][0], flops), s.x2 = product(s.x, w[d][1], flops);
            s.z = by_element(s.x1, [&](size_t i) { return f(s.x1.x[i]) * s.x2.x[i]; });
            s.y = product(s.z, w[d][2], flops);
            ys.push_back(&s.y.x);
        }
        along(true, ys, o.forward, ring_all_reduce);
        o.y = {l.x.rows, l.x.columns};
        for (int i = 0; i < fsdp; i++) {
            o.y.x.insert(o.y.x.end(), saved[i * tp].y.x.begin(), saved[i * tp].y.x.end());
        }
    }
    // The equations that tp_calcs (a) prints, then FSDP's or data parallelism's collective.
    void backward() {
        o.backward.resize(fsdp * tp);
        auto w = weights(o.backward);
        std::vector<Dense> dx;
        std::vector<std::vector<double>> dw(fsdp * tp);
        for (int d = 0; d < fsdp * tp; d++) {
            const Saved& s = saved[d];
            double* flops = &o.backward[d].flops;
            Dense dy = rows_of_device(l.dy, d / tp), dz = product(dy, transposed(w[d][2]), flops);
            Dense dx2 = by_element(dz, [&](size_t i) { return dz.x[i] * f(s.x1.x[i]); });
            Dense dx1 = by_element(dz, [&](size_t i) { return dz.x[i] * f_prime(s.x1.x[i]) * s.x2.x[i]; });
            for (const Dense& m : {product(transposed(s.x), dx1, flops), product(transposed(s.x), dx2, flops),
                                   product(transposed(s.z), dy, flops)}) {
                dw[d].insert(dw[d].end(), m.x.begin(), m.x.end());
            }
            Dense one = product(dx1, transposed(w[d][0]), flops), other = product(dx2, transposed(w[d][1]), flops);
            dx.push_back(by_element(one, [&](size_t i) { return one.x[i] + other.x[i]; }));
        }
        std::vector<std::vector<double>*> dxs, dws;
        for (int d = 0; d < fsdp * tp; d++) { dxs.push_back(&dx[d].x), dws.push_back(&dw[d]); }
        along(true, dxs, o.backward, ring_all_reduce);
        along(false, dws, o.backward, [&](const auto& members) {
            if (data_parallel) { return ring_all_reduce(members); }
            ring(members, true);
        });
        o.dx = {l.x.rows, l.x.columns};
        for (int i = 0; i < fsdp; i++) { o.dx.x.insert(o.dx.x.end(), dx[i * tp].x.begin(), dx[i * tp].x.end()); }
        collect_gradients(dw);
    }
    void collect_gradients(const std::vector<std::vector<double>>& dw) {
        for (int k = 0; k < 3; k++) { o.dw[k] = {l.w[k].rows, l.w[k].columns, std::vector<double>(l.w[k].x.size())}; }
        for (int j = 0; j < tp; j++) {
            int from = bound(l.w[0].columns, j, tp), width = columns(j), D = l.x.columns;
            size_t n = dw[j].size(), i = 0;
            for (size_t k = 0; k < n; k++) {
                while (k >= bound(n, i + 1, fsdp)) { i++; }  // the device that has element k
                int third = k / (D * width), at = k % (D * width);
                Dense& m = o.dw[third];
                size_t device = (data_parallel ? fsdp - 1 : i) * tp + j;  // with data parallelism all have all
                (third < 2 ? m.at(at / width, from + at % width) : m.at(from + at / D, at % D)) = dw[device][k];
            }
        }
    }
};
Outcome simulate(const FeedForward& l, int fsdp, int tp, bool data_parallel = false) {
    Grid grid{l, fsdp, tp, data_parallel};
    grid.forward();
    grid.backward();
    return grid.o;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// The tests

static FeedForward random_layer(int B, int D, int F) {
    uint64_t state = 1;
    auto random = [&](int rows, int columns) {
        Dense m{rows, columns};
        for (int i = 0; i < rows * columns; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            m.x.push_back((double)(state >> 33) / (1u << 30) - 1);
        }
        return m;
    };
    return {random(B, D), random(B, D), {random(D, F), random(D, F), random(F, D)}};
}
static double dot(const Dense& a, const Dense& b) {
    REQUIRE(a.x.size() == b.x.size());
    return std::inner_product(a.x.begin(), a.x.end(), b.x.begin(), 0.0);
}
static double difference(const Dense& a, const Dense& b) {
    REQUIRE(a.x.size() == b.x.size());
    double most = 0;
    for (size_t i = 0; i < a.x.size(); i++) { most = std::max(most, fabs(a.x[i] - b.x[i])); }
    return std::isfinite(dot(a, a)) ? most : NAN;
}

TEST_CASE("calcs: the simulated layer's gradients are right, on any grid of devices") {
    const FeedForward l = random_layer(7, 4, 10), direction = random_layer(7, 4, 10);
    const Outcome whole = simulate(l, 1, 1);
    auto loss = [&](double step) {
        FeedForward moved = l;
        moved.x = by_element(l.x, [&](size_t i) { return l.x.x[i] + step * direction.dy.x[i]; });
        for (int k = 0; k < 3; k++) {
            moved.w[k] = by_element(l.w[k], [&](size_t i) { return l.w[k].x[i] + step * direction.w[k].x[i]; });
        }
        return dot(l.dy, simulate(moved, 1, 1).y);
    };
    double slope = dot(whole.dx, direction.dy);
    for (int k = 0; k < 3; k++) { slope += dot(whole.dw[k], direction.w[k]); }
    CHECK((loss(1e-5) - loss(-1e-5)) / 2e-5 == doctest::Approx(slope).epsilon(1e-7));

    for (auto [fsdp, tp, data_parallel] : {std::tuple(2, 1, true),
                                           {5, 1, true},
                                           {3, 1, false},
                                           {7, 1, false},
                                           {1, 2, false},
                                           {1, 4, false},
                                           {2, 5, false},
                                           {3, 4, false}}) {
        INFO(fsdp << " x " << tp << " devices, data parallel " << data_parallel);
        Outcome o = simulate(l, fsdp, tp, data_parallel);
        CHECK(difference(o.y, whole.y) < 1e-12);
        CHECK(difference(o.dx, whole.dx) < 1e-12);
        for (int k = 0; k < 3; k++) { CHECK(difference(o.dw[k], whole.dw[k]) < 1e-12); }
    }
}

// The devices' mean has to be what the formula says; where all sizes divide evenly, each device's count.
static void check_count(double formula, const std::vector<Counts>& counts, double Counts::*field, bool even) {
    double sum = 0;
    CHECK(formula > 0);
    for (const Counts& device : counts) {
        sum += device.*field;
        if (even) { CHECK(device.*field == formula); }
    }
    CHECK(sum / counts.size() == doctest::Approx(formula).epsilon(1e-12));
}

TEST_CASE("calcs: FLOPs and bytes are those that the simulated devices count") {
    const double C = 1e6, W = 1e3;
    for (auto [B, D, F, N, M] : {std::tuple(12, 8, 24, 4, 2),
                                 {12, 8, 24, 2, 4},
                                 {12, 8, 24, 3, 1},
                                 {12, 8, 24, 1, 3},
                                 {7, 5, 11, 2, 3},
                                 {9, 3, 14, 4, 5},
                                 {16, 1, 16, 8, 2}}) {
        INFO("B " << B << ", D " << D << ", F " << F << ", " << N << " x " << M << " devices");
        const FeedForward l = random_layer(B, D, F);
        const LayerSizes sizes = {(double)B, (double)D, (double)F, C, W};
        auto check = [&](const PassCost& cost, const std::vector<Counts>& counts, double Counts::*bytes, bool even) {
            CAPTURE(std::string(cost.what));
            check_count(cost.flops, counts, &Counts::flops, even);
            check_count(cost.bytes, counts, bytes, even);
            CHECK(cost.computation == cost.flops / C);
            CHECK(cost.communication == cost.bytes / W);
        };
        if (N > 1) {
            bool even = B % N == 0 && 3 * D * F % N == 0;
            check(data_parallel_costs(sizes, N)[0], simulate(l, N, 1, true).backward, &Counts::fsdp_bytes, even);
            std::vector<PassCost> fsdp = fsdp_costs(sizes, N);
            Outcome o = simulate(l, N, 1);
            check(fsdp[0], o.forward, &Counts::fsdp_bytes, even);
            check(fsdp[1], o.backward, &Counts::fsdp_bytes, even);
        }
        if (M > 1) {
            bool even = F % M == 0 && B * D % M == 0;
            std::vector<PassCost> tp = tp_costs(sizes, M);
            Outcome o = simulate(l, 1, M);
            check(tp[0], o.forward, &Counts::tp_bytes, even);
            check(tp[1], o.backward, &Counts::tp_bytes, even);
        }
        if (N > 1 && M > 1) {
            bool even = B % N == 0 && F % M == 0 && 3 * D * (F / M) % N == 0 && B / N * D % M == 0;
            std::vector<PassCost> both = fsdp_tp_costs(sizes, N, M);
            Outcome o = simulate(l, N, M);
            check(both[0], o.forward, &Counts::fsdp_bytes, even);
            check(both[1], o.forward, &Counts::tp_bytes, even);
            CHECK(both[2].communication == std::max(both[0].communication, both[1].communication));
            CHECK(both[3].communication == doctest::Approx(both[0].communication + both[1].communication));
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Bounds

TEST_CASE("calcs: communication is the limit from the first whole number of devices above the bound on") {
    for (auto costs_of : {data_parallel_costs, fsdp_costs, tp_costs}) {
        for (double GB_per_s : {450.0, 97.3, 50.0}) {
            const LayerSizes l = {65536, 4096, 11008, 989e12, GB_per_s * 1e9};
            for (size_t pass = 0; pass < costs_of(l, 2).size(); pass++) {
                const int most = (int)costs_of(l, 2)[pass].most;
                INFO(GB_per_s << " GB/s, " << costs_of(l, 2)[pass].what << ", " << most << " devices");
                auto communicates_longer = [&](int devices) {
                    PassCost c = costs_of(l, devices)[pass];
                    return c.communication > c.computation;
                };
                REQUIRE(most >= 1);
                CHECK(!communicates_longer(most));
                CHECK(communicates_longer(most + 1));
            }
        }
    }
}

TEST_CASE("calcs: fsdp_tp_calcs's bounds are those of a search over all splits") {
    // both axes, no FSDP, no TP, and on either side of where TP stops to pay
    for (auto [B, F] : {std::pair(65536., 11008.),
                        {2048., 10240.},
                        {1024., 1048576.},
                        {65536., 64.},
                        {65536., 1600.},
                        {65536., 1300.}}) {
        const double D = 128, C = 989e12, W = 450e9, b = B, f = F;
        const std::vector<PassCost> costs = fsdp_tp_costs({B, D, F, C, W}, 4, 2);
        auto fsdp = [&](double n, double m) { return 6 * D * f / m * (n - 1) / n / W; };    // weights' gather
        auto tp = [&](double n, double m) { return 2 * 2 * b / n * D * (m - 1) / m / W; };  // y's all-reduce
        auto computation = [&](double n, double m) { return 6 * b / n * D * f / m / C; };
        auto most = [&](const std::function<bool(double n, double m)>& fits) {
            double best = 1;
            for (double n = 1; fits(n, 1); n += 0.0005) {
                double fitting = 1, beyond = 1e6;
                for (int i = 0; i < 60; i++) {
                    double m = (fitting + beyond) / 2;
                    (fits(n, m) ? fitting : beyond) = m;
                }
                best = std::max(best, n * fitting);
            }
            return best;
        };
        INFO("B " << B << ", F " << F);
        auto overlapped = [&](double n, double m) { return std::max(fsdp(n, m), tp(n, m)) <= computation(n, m); };
        auto in_turn = [&](double n, double m) { return fsdp(n, m) + tp(n, m) <= computation(n, m); };
        CHECK(costs[2].most == doctest::Approx(most(overlapped)).epsilon(1e-3));
        CHECK(costs[3].most == doctest::Approx(most(in_turn)).epsilon(1e-3));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// alternate_ring_all_reduce

static Options handout() {  // main.cu's defaults
    Options o;
    o.tokens = 65536, o.d_model = 4096, o.d_ff = 11008, o.tflops = 989, o.bandwidth_gb = 450;
    o.devices = 8, o.fsdp = 4, o.tp = 2, o.tensor_mb = 1000;
    return o;
}
static std::string csv_of(int (*command)(const Options&), const Options& o) {
    RestoreContext restore;
    context.csv = true;
    return printed([&] { command(o); });
}

// Each device's result. In step t device i sends tensor i - t + 1, which it received in the step before, or is its own.
static std::vector<std::vector<float>> alternate_ring(const std::vector<std::vector<float>>& x, double* bytes_of_one) {
    int N = x.size();
    std::vector<std::vector<float>> sums = x, travelling = x;
    for (int t = 1; t < N; t++) {
        std::vector<std::vector<float>> received(N);
        for (int i = 0; i < N; i++) { received[(i + 1) % N] = travelling[i]; }
        *bytes_of_one += 2.0 * travelling[0].size();
        for (int i = 0; i < N; i++) {
            CHECK(received[i] == x[(i - t + N) % N]);
            for (size_t k = 0; k < sums[i].size(); k++) { sums[i][k] += received[i][k]; }
        }
        travelling = received;
    }
    return sums;
}
TEST_CASE("calcs: alternate_ring_all_reduce's sums, bytes and times") {
    for (int N : {2, 3, 5, 8}) {
        CAPTURE(N);
        std::vector<std::vector<float>> x(N);
        std::vector<float> sum(10);
        for (int i = 0; i < N; i++) {
            for (int k = 0; k < 10; k++) { x[i].push_back(3 * i + k), sum[k] += 3 * i + k; }
        }
        double bytes = 0, ring_bytes = 0;
        for (const auto& result : alternate_ring(x, &bytes)) { CHECK(result == sum); }
        std::vector<std::vector<double>> y;
        std::vector<double> sent(N);
        std::vector<Member> members;
        for (const auto& one : x) { y.push_back({one.begin(), one.end()}); }
        for (int i = 0; i < N; i++) { members.push_back({&y[i], &sent[i]}); }
        ring_all_reduce(members);
        for (int i = 0; i < N; i++) {
            CHECK(y[i] == std::vector<double>(sum.begin(), sum.end()));
            ring_bytes += sent[i] / N;
        }
        // 10 elements of 2 bytes, 1e3 bytes/s: a byte takes 1 ms
        Options o = handout();
        o.tensor_mb = 2e-5, o.devices = N, o.bandwidth_gb = 1e-6;
        const std::string text = csv_of(cmd_alternate_ring_all_reduce, o);
        CHECK_MESSAGE(has(text, strprintf("alternative,%d,%.0f,%g\n", N - 1, bytes, bytes)), text);
        CHECK_MESSAGE(has(text, strprintf("\",%d,%.0f,%g\n", 2 * (N - 1), ring_bytes, ring_bytes)), text);
        CHECK_MESSAGE(has(text, strprintf("takes N / 2 = %g times as long.", bytes / ring_bytes)), text);
    }
    // The devices add in different orders, so they may differ in rounding.
    double bytes = 0;
    auto sums = alternate_ring({{1e8f}, {1}, {-1e8f}}, &bytes);
    CHECK(sums[0][0] == 1);
    CHECK(sums[1][0] == 0);
}
TEST_CASE("calcs: the alternative all-reduce over Gloo is an all-gather of all tensors and a sum") {
    if (lacks("gloo", CPU, 3)) { return; }
    in_ranks("calcs: the alternative all-reduce over Gloo is*", 3, CPU, [](const Communicator& c) {
        const int n = 1001;
        std::vector<float> all(c.world * n, NAN), mine(n);
        std::vector<int64_t> bounds = {0};
        for (int k = 0; k < n; k++) { all[c.rank * n + k] = mine[k] = k % 17 + 5 * c.rank; }
        for (int r = 0; r < c.world; r++) { bounds.push_back(bounds[r] + n); }
        Tensor gathered = from_floats(all, {c.world * n}, F32), reduced = from_floats(mine, {n}, F32);
        WorkPtr work = all_gather(c, gathered, bounds);
        wait(c, work);
        wait(c, all_reduce(c, reduced, SUM));
        CHECK(work->bytes * (c.world - 1) / c.world == (c.world - 1) * n * sizeof(float));
        std::vector<float> parts = to_floats(gathered), sum = to_floats(reduced);
        int wrong = 0;
        for (int k = 0; k < n; k++) {
            float y = mine[k];
            for (int t = 1; t < c.world; t++) { y += parts[(c.rank - t + c.world) % c.world * n + k]; }
            wrong += !(y == sum[k]);
        }
        CHECK(wrong == 0);
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Answers and options

static void check_says(const std::string& text, const std::vector<std::string>& phrases) {
    for (const std::string& phrase : phrases) { CHECK_MESSAGE(has(text, phrase), phrase, " in: ", text); }
    for (const std::string never : {"nan", "inf ", " ,"}) {
        CHECK_MESSAGE(!has(text.substr(text.find("\n# (a)") + 1), never), text);
    }
}
TEST_CASE("calcs: answers") {
    Options o = handout();
    check_says(csv_of(cmd_alternate_ring_all_reduce, o),
               {"takes (N - 1) S / W = (8 - 1) x 1e+09 / 4.5e+11 = 15.56 ms", " = 3.889 ms. ",
                "takes N / 2 = 4 times as long", "alternative,7,7000000000,15.5556\n", ",14,1750000000,3.88889\n"});
    check_says(csv_of(cmd_data_parallel_calcs, o),
               {"backward,4432406249472,473432064,1.05207,4.48171,30.8192\n",
                "(a) 12 B D D_FF / N_DP = 12 x 65536 x 4096 x 11008 / 8 = 4.432e+12 FLOP.",
                "(b) 12 D D_FF (N_DP - 1) / (N_DP W) = 12 x 4096 x 11008 x (8 - 1) / (8 x 4.5e+11) = 1.052 ms.",
                "(c) N_DP <= 1 + B W / C = 1 + 65536 x 4.5e+11 / 9.89e+14 = 30.82 devices.",
                "With N_DP = 8, the products take 4.482 ms and communication 1.052 ms, so computation is the limit."});
    check_says(
        csv_of(cmd_fsdp_calcs, o),
        {"forward,2216203124736,236716032,0.526036,2.24085,30.8192\n",
         "backward,4432406249472,473432064,1.05207,4.48171,30.8192\n", "Forward: 6 B D D_FF / N_FSDP = 2.216e+12",
         "(b) Backward: 12 D D_FF (N_FSDP - 1) / (N_FSDP W) = 12 x 4096 x 11008 x (8 - 1) / (8 x 4.5e+11) = 1.052",
         "Forward: 6 D D_FF (N_FSDP - 1) / (N_FSDP W) = 0.526 ms", "(c) N_FSDP <= 1 + B W / C = "});
    check_says(csv_of(cmd_tp_calcs, o),
               {"forward,2216203124736,939524096,2.08783,2.24085,8.51304\n",
                "backward,4432406249472,939524096,2.08783,4.48171,16.0261\n", "dx1(i) = dz(i) * f'(x1(i)) * x2(i)",
                "(c) Forward: 4 B D (N_TP - 1) / (N_TP W) = 4 x 65536 x 4096 x (8 - 1) / (8 x 4.5e+11) = 2.088 ms",
                "N_TP <= 1 + 3 D_FF W / C = 1 + 3 x 11008 x 4.5e+11 / 9.89e+14 = 16.03 devices",
                "N_TP <= 1 + 3 D_FF W / (2 C) = 8.513 devices"});
    check_says(
        csv_of(cmd_fsdp_tp_calcs, o),
        {"FSDP axis,2216203124736,101449728,0.225444,2.24085,30.8192\n", ",134217728,0.298262,2.24085,8.51304\n",
         ",0.298262,2.24085,262.365\n", ",0.523705,2.24085,76.2296\n",
         "max(6 x 4096 x 11008 x (4 - 1), 4 x 65536 x 4096 x (2 - 1)) / (4 x 2 x 4.5e+11) = 0.2983 ms. FSDP gathers",
         "x (1 + 3 x 11008 x 4.5e+11 / (2 x 9.89e+14)) = 262.4 devices.", "1 + B W / C = 30.82 ",
         "1 + 3 D_FF W / (2 C) = 8.513 ", "3 B D_FF (W / C)^2 / 2 = 224 devices", "= 1148846, ",
         "N_FSDP = Q / (6 D_FF) = 17.39 and N_TP = Q / (4 B) = 4.382.",
         "N <= Q^2 / (24 B D_FF) = 1148846^2 / (24 x 65536 x 11008) = 76.23 devices.", "(W / C)^2 / 8, here 56.01"});
}
TEST_CASE("calcs: answers where communication is the limit, or an axis goes") {
    Options few = handout(), narrow = handout(), short_batch = handout();
    few.tokens = 2048, narrow.d_ff = 64, short_batch.tokens = 1024;
    check_says(csv_of(cmd_data_parallel_calcs, few),
               {"= 1.932 devices", "communication 1.052 ms, so communication is the limit."});
    check_says(csv_of(cmd_fsdp_tp_calcs, narrow), {"less than one device on the TP axis",
                                                   "b is below a / (a + 1). So there is no TP, and N <= 1 + B W / C = "
                                                   "30.82 devices"});
    check_says(csv_of(cmd_fsdp_tp_calcs, short_batch),
               {"less than one device on the FSDP axis",
                "a is below b / (b + 1). So there is no FSDP, and N <= 1 + 3 D_FF W / (2 C) = 8.513 devices"});
    CHECK(has(run_cs336({"fsdp_tp_calcs", "--d_ff", "64"}).out, "So there is no TP, and N <= 1 + B W / C = 30.82"));
}
TEST_CASE("calcs: wrong options") {
    for (const std::string value : {"0", "1", "-2", "1048577", "99999999999999999999", "2.5", "x", ""}) {
        Run r = run_cs336({"tp_calcs", "--devices", value});
        CHECK(r.exit_code == 2);
        CHECK(r.err == "cs336 tp_calcs: --devices: Value " + value + " not in range 2 to 1048576\n");
        CHECK(r.out == "");
    }
    for (const std::string option : {"--tflops", "--bandwidth_gb"}) {
        for (const std::string value : {"0", "-1", "nan", "inf"}) {
            CHECK(run_cs336({"data_parallel_calcs", option, value}).exit_code == 2);
        }
        for (const std::string value : {"1e308", "1e-308"}) {  // beyond a float: a product could be beyond a double
            Run r = run_cs336({"fsdp_tp_calcs", option, value});
            CHECK(r.exit_code == 2);
            CHECK_MESSAGE(has(r.err, option + ": Value " + value + " not in range"), r.err);
            CHECK(r.out == "");
        }
        for (const std::string value : {"3.4e38", "1.2e-38"}) {
            const std::string out =
                run_cs336({"fsdp_tp_calcs", option, value, "--tokens", "1048576", "--d_ff", "1048576"}).out;
            CHECK(out != "");
            CHECK_MESSAGE(!has(out, "inf "), out);
            CHECK_MESSAGE(!has(out, "nan"), out);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// communication_accounting

static Options xxl() {  // main.cu's defaults
    Options o;
    o.d_model = 16384, o.d_ff = 53248, o.num_layers = 126, o.tokens = 2048;
    o.tflops = 460, o.bandwidth_gb = 180, o.fsdp = 16, o.tp = 4;
    return o;
}
TEST_CASE("accounting: table and answers") {
    check_says(
        csv_of(cmd_communication_accounting, xxl()),
        {"2 D F L,219848638464",
         "4 P,879.4,GB (819.0 GiB)",
         "16 P,3517.6,GB (3276.0 GiB)",
         ",17547264,bytes",
         "GPUs of 80 GB for 16 P,16 P / memory,43.97",
         "GPUs of 80 GiB for 16 P,16 P / memory,40.95",
         "\"N for 95 GB, 0 tokens each\",(16 P + A/2) / (memory - A/2),38",
         "2048 tokens each\",(16 P + A/2) / (memory - A/2),46",
         "8192 tokens each\",(16 P + A/2) / (memory - A/2),156",
         "\"the same, in GiB\",35,",
         "A/2 = memory,10828",
         ",2555.6,",
         ",25302,tokens",
         ",395.3,tokens",
         ",1581.4,tokens",
         ",20445,tokens",
         ",319.4,tokens",
         ",1277.8,tokens",
         ",20.8,chips",
         ",6.1,chips",
         ",245.3,tokens",
         ",15700,tokens",
         ",61.3,tokens",
         ",3925,tokens",
         "\"least B, X = 8, Y = 8, in turn\",as in c,16594",
         "\"least B, X = 4, Y = 16, in turn\",as in c,22021",
         "(a) P = 2 D F L = 219848638464 parameters take 4 P = 879.4 GB (819.0 GiB) in fp32.",
         "16 P = 3517.6 GB (3276.0 GiB), the memory of 44 GPUs of 80 GB, or of 41 if",
         "= 17547264 bytes per token",
         "below 95 GB from N = 38 devices on; with 2048 tokens per device, from N = 46",
         "from 10828 tokens per device on",
         "(c) Forward is compute bound from B = (alpha X / M_X) / (1 - alpha Y / (M_Y F)) = 25302 tokens overall, "
         "395.3 per chip",
         "20445 tokens (319.4 per chip)",
         "= 245.3 tokens per chip",
         "X = 8, Y = 8 needs 16594 tokens.",
         "= 61.3.",
         "Gradient accumulation does not, because each micro-batch gathers the weights again. Activation "
         "checkpointing does not, because it leaves the forward's FLOPs and bytes as they are."});
}
TEST_CASE("accounting: where nothing fits") {
    Options o = xxl();
    o.tokens = 10828, o.tp = 21;
    check_says(csv_of(cmd_communication_accounting, o),
               {"10828 tokens each\",(16 P + A/2) / (memory - A/2),none", "with 10828 tokens per device, for no N.",
                "(alpha X / M_X) / (1 - alpha Y / (M_Y F)),none", "No batch is compute bound with X = 16 and Y = 21",
                "below M_Y F / alpha = 20.8"});
    CHECK(run_cs336({"communication_accounting", "--fsdp", "1048576", "--tp", "1048576"}).exit_code == 0);
}
