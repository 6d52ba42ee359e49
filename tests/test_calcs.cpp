// Tests of calcs.cu. A feed-forward layer runs forward and backward on simulated devices, with real numbers: products
// count their FLOPs, sends their bytes. The gradients have to be right, and the program's formulas have to give the
// counts.
#include "answers.h"
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

static double value(const Table& table, const std::string& quantity) {
    TableRow row = row_of(table, {{"quantity", quantity}});
    REQUIRE_MESSAGE(row, quantity);
    return row.number("value");
}
static Table table_of(const std::vector<std::string>& words) {
    Run r = run_cs336(words);
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    return tables_in(r.out).back();
}
// The devices' mean has to be what the formula says, which is cut to one decimal; where all sizes divide evenly, each
// device's count.
static void check_count(const Table& table, const std::string& quantity, const std::vector<Counts>& counts,
                        double Counts::*field, bool even) {
    CAPTURE(quantity);
    double formula = value(table, quantity), sum = 0;
    CHECK(formula > 0);
    for (const Counts& device : counts) {
        sum += device.*field;
        if (even) { CHECK(device.*field == formula); }
    }
    CHECK(fabs(sum / counts.size() - formula) <= 0.05 + 1e-9);
}
static void check_times(const Table& table, double flops_per_s, double bytes_per_s) {
    int checked = 0;
    for (const TableRow& row : rows_of(table)) {
        std::string name = row.text("quantity");
        for (auto [time, count, rate] : {std::tuple("computation time", "FLOPs per device", flops_per_s),
                                         {"communication time", "bytes sent per device", bytes_per_s}}) {
            size_t comma = name.find(", "), n = strlen(time);
            if (name.compare(0, n, time) != 0 || comma != n) { continue; }
            TableRow counted = row_of(table, {{"quantity", count + name.substr(comma)}});
            if (!counted) { continue; }
            CAPTURE(name);
            checked++;
            double ms = 1e3 * counted.number("value") / rate;
            CHECK(fabs(row.number("value") - ms) <= 1e-5 * ms + 1e3 * 0.05 / rate);
        }
    }
    CHECK(checked >= 2);
}

TEST_CASE("calcs: FLOPs and bytes are those that the simulated devices count") {
    // C = 1e6 FLOP/s and W = 1e3 bytes/s
    for (auto [B, D, F, N, M] : {std::tuple(12, 8, 24, 4, 2),
                                 {12, 8, 24, 2, 4},
                                 {12, 8, 24, 3, 1},
                                 {12, 8, 24, 1, 3},
                                 {7, 5, 11, 2, 3},
                                 {9, 3, 14, 4, 5},
                                 {16, 1, 16, 8, 2}}) {
        INFO("B " << B << ", D " << D << ", F " << F << ", " << N << " x " << M << " devices");
        const FeedForward l = random_layer(B, D, F);
        const bool even = B % N == 0 && F % M == 0 && 3 * D * (F / M) % N == 0 && B / N * D % M == 0;
        std::vector<std::string> sizes = {
            "--batch_tokens",  std::to_string(B), "--d_model", std::to_string(D), "--d_ff",
            std::to_string(F), "--tflops",        "1e-6",      "--bandwidth_gb",  "1e-6"};
        auto run = [&](const std::string& command, const std::vector<std::string>& devices) {
            std::vector<std::string> words = {command};
            words.insert(words.end(), sizes.begin(), sizes.end());
            words.insert(words.end(), devices.begin(), devices.end());
            Table table = table_of(words);
            check_times(table, 1e6, 1e3);
            return table;
        };
        if (N > 1) {
            bool divides = B % N == 0 && 3 * D * F % N == 0;
            Table dp = run("data_parallel_calcs", {"--devices", std::to_string(N)});
            Outcome o = simulate(l, N, 1, true);
            check_count(dp, "FLOPs per device, backward", o.backward, &Counts::flops, divides);
            check_count(dp, "bytes sent per device, backward", o.backward, &Counts::fsdp_bytes, divides);
            Table fsdp = run("fsdp_calcs", {"--devices", std::to_string(N)});
            o = simulate(l, N, 1);
            for (bool forward : {true, false}) {
                std::string pass = forward ? "forward" : "backward";
                const auto& counts = forward ? o.forward : o.backward;
                check_count(fsdp, "FLOPs per device, " + pass, counts, &Counts::flops, divides);
                check_count(fsdp, "bytes sent per device, " + pass, counts, &Counts::fsdp_bytes, divides);
            }
        }
        if (M > 1) {
            bool divides = F % M == 0 && B * D % M == 0;
            Table tp = run("tp_calcs", {"--devices", std::to_string(M)});
            Outcome o = simulate(l, 1, M);
            for (bool forward : {true, false}) {
                std::string pass = forward ? "forward" : "backward";
                const auto& counts = forward ? o.forward : o.backward;
                check_count(tp, "FLOPs per device, " + pass, counts, &Counts::flops, divides);
                check_count(tp, "bytes sent per device, " + pass, counts, &Counts::tp_bytes, divides);
            }
        }
        if (N > 1 && M > 1) {
            Table both = run("fsdp_tp_calcs", {"--fsdp", std::to_string(N), "--tp", std::to_string(M)});
            Outcome o = simulate(l, N, M);
            check_count(both, "FLOPs per device, forward", o.forward, &Counts::flops, even);
            check_count(both, "bytes sent per device, FSDP axis", o.forward, &Counts::fsdp_bytes, even);
            check_count(both, "bytes sent per device, TP axis", o.forward, &Counts::tp_bytes, even);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Bounds

TEST_CASE("calcs: communication is the limit from the first whole number of devices above the bound on") {
    for (const std::string command : {"data_parallel_calcs", "fsdp_calcs", "tp_calcs"}) {
        for (const std::string bandwidth : {"450", "97.3", "50"}) {
            for (const std::string pass : {"backward", "forward"}) {
                if (command == "data_parallel_calcs" && pass == "forward") { continue; }  // it sends nothing
                INFO(command << " --bandwidth_gb " << bandwidth << ", " << pass);
                auto run = [&](int devices) {
                    return table_of({command, "--bandwidth_gb", bandwidth, "--devices", std::to_string(devices)});
                };
                auto communicates_longer = [&](const Table& table) {
                    return value(table, "communication time, " + pass) > value(table, "computation time, " + pass);
                };
                int most = (int)value(run(2), "most devices, " + pass);
                REQUIRE(most >= 1);
                if (most > 1) { CHECK(!communicates_longer(run(most))); }
                CHECK(communicates_longer(run(most + 1)));
            }
        }
    }
}

TEST_CASE("calcs: fsdp_tp_calcs's bounds are those of a search over all splits") {
    struct Case {
        double B, F, gb;
        const char* quantity;  // of (d)
    };
    for (const Case& c : {Case{65536, 11008, 450, "most devices, not overlapped"},
                          {2048, 10240, 450, "most devices, not overlapped"},
                          {1024, 1048576, 450, "most devices, no FSDP"},
                          {65536, 64, 450, "most devices, no TP"},
                          {65536, 1600, 450, "most devices, not overlapped"},
                          {65536, 1300, 450, "most devices, no TP"}}) {
        const double D = 128, C = 989e12, W = c.gb * 1e9;
        Table table = table_of({"fsdp_tp_calcs", "--batch_tokens", number(c.B, "%.0f"), "--d_ff", number(c.F, "%.0f"),
                                "--d_model", "128", "--bandwidth_gb", number(c.gb, "%g")});
        auto fsdp = [&](double n, double m) { return 6 * D * c.F / m * (n - 1) / n / W; };    // weights' gather
        auto tp = [&](double n, double m) { return 2 * 2 * c.B / n * D * (m - 1) / m / W; };  // y's all-reduce
        auto computation = [&](double n, double m) { return 6 * c.B / n * D * c.F / m / C; };
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
        INFO("B " << c.B << ", F " << c.F << ", " << c.quantity);
        CHECK(value(table, "most devices, overlapped") == doctest::Approx(most([&](double n, double m) {
                                                              return std::max(fsdp(n, m), tp(n, m)) <=
                                                                     computation(n, m);
                                                          })).epsilon(1e-3));
        CHECK(value(table, c.quantity) == doctest::Approx(most([&](double n, double m) {
                                              return fsdp(n, m) + tp(n, m) <= computation(n, m);
                                          })).epsilon(1e-3));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// alternate_ring_all_reduce

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
        Table table = table_of({"alternate_ring_all_reduce", "--tensor_mb", "2e-5", "--devices", std::to_string(N),
                                "--bandwidth_gb", "1e-6"});
        CHECK(fabs(value(table, "bytes sent per device") - bytes) < 1e-6);
        CHECK(fabs(value(table, "bytes sent per device, reduce-scatter and all-gather") - ring_bytes) <= 0.05);
        CHECK(fabs(value(table, "time") - bytes) < 1e-3);
        CHECK(fabs(value(table, "time, reduce-scatter and all-gather") - ring_bytes) < 1e-3);
        CHECK(fabs(value(table, "times as long") - bytes / ring_bytes) < 1e-6);
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

static std::string answers_to(const std::vector<std::string>& words) {
    Run r = run_cs336(words);
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    std::string all;
    for (const Answer& a : answers_of(words[0], tables_in(r.out))) { all += "(" + a.part + ") " + a.text + "\n"; }
    for (const std::string never : {"nan", "inf ", "{}", "  ", " ,"}) { CHECK_MESSAGE(!has(all, never), all); }
    return all;
}
static void check_says(const std::string& text, const std::vector<std::string>& phrases) {
    for (const std::string& phrase : phrases) { CHECK_MESSAGE(has(text, phrase), phrase, " in: ", text); }
}
TEST_CASE("calcs: answers") {
    check_says(
        answers_to({"alternate_ring_all_reduce"}),
        {"It takes (N - 1) S / W = (8 - 1) x 1e+09 / 4.5e+11 = 15.56 ms", "takes N / 2 = 8 / 2 = 4 times as long"});
    check_says(answers_to({"data_parallel_calcs"}),
               {"(a) 12 B D D_FF / N_DP = 12 x 65536 x 4096 x 11008 / 8 = 4.432e+12 FLOP.",
                "(b) 12 D D_FF (N_DP - 1) / (N_DP W) = 12 x 4096 x 11008 x (8 - 1) / (8 x 4.5e+11) = 1.052 ms.",
                "(c) N_DP <= 1 + B W / C = 1 + 65536 x 4.5e+11 / 9.89e+14 = 30.82 devices.",
                "With N_DP = 8, the products take 4.482 ms and communication 1.052 ms, so computation is the limit."});
    check_says(answers_to({"data_parallel_calcs", "--batch_tokens", "2048"}),
               {"= 1.932 devices", "communication 1.052 ms, so communication is the limit."});
    check_says(answers_to({"fsdp_calcs"}),
               {"(b) Backward: 12 D D_FF (N_FSDP - 1) / (N_FSDP W)", "Forward: 6 D D_FF (N_FSDP - 1) / (N_FSDP W)",
                "(c) Backward: N_FSDP <= 1 + B W / C"});
    check_says(answers_to({"tp_calcs"}),
               {"dx1(i) = dz(i) * f'(x1(i)) * x2(i), (B, D_FF / N_TP); ", "dx = all-reduce(dx(i)), (B, D).",
                "(c) Forward: 4 B D (N_TP - 1) / (N_TP W) = ", "N_TP <= 1 + 3 D_FF W / C = 1 + 3 x 11008 x",
                "N_TP <= 1 + 3 D_FF W / (2 C) = 1 + 3 x 11008 x 4.5e+11 / (2 x 9.89e+14) = 8.513 devices"});
    check_says(
        answers_to({"fsdp_tp_calcs"}),
        {"max(6 x 4096 x 11008 x (4 - 1), 4 x 65536 x 4096 x (2 - 1)) / (4 x 2 x 4.5e+11) = 0.2983 ms. FSDP gathers",
         "at most their product: N <= (1 + B W / C) (1 + 3 D_FF W / (2 C)) = ",
         "= 262.4 devices.\n(c, numbers) Without each 1",
         "(c) The FSDP axis has a bound in which TP does not occur: N_FSDP <= 1 + B W / C = ", "= 30.82 devices.",
         "in which FSDP does not occur: N_TP <= 1 + 3 D_FF W / (2 C) = ", "= 8.513 devices.",
         "N <= Q^2 / (24 B D_FF) = 1148846^2 / (24 x 65536 x 11008) = 76.23 devices."});
    check_says(answers_to({"fsdp_tp_calcs", "--d_ff", "64"}),
               {"b is below a / (a + 1) = ",
                "less than one device on the TP axis, so there is no TP, and N <= 1 + B W / C = "});
    check_says(answers_to({"fsdp_tp_calcs", "--batch_tokens", "1024"}),
               {"a is below b / (b + 1) = ",
                "less than one device on the FSDP axis, so there is no FSDP, and N <= 1 + 3 D_FF W / (2 C) = "});
    CHECK(has(run_cs336({"tp_calcs", "--format", "csv"}).out,
              "d,\"most devices, forward\",N_TP <= 1 + 3 D_FF W / (2 C),"));
    CHECK(has(run_cs336({"tp_calcs", "--format", "json"}).out, "{\"answers\":{\"a\":\"dz(i) = dY W3(i)^T, "));
}
TEST_CASE("calcs: wrong options") {
    for (const std::string value : {"0", "1", "-2", "1048577", "99999999999999999999", "2.5", "x", ""}) {
        Run r = run_cs336({"tp_calcs", "--devices", value});
        CHECK(r.exit_code == 2);
        CHECK(r.err == "cs336 tp_calcs: --devices: got '" + value + "', takes a whole number from 2 to 1048576\n");
        CHECK(r.out == "");
    }
    for (const std::string option : {"--tflops", "--bandwidth_gb"}) {
        for (const std::string value : {"0", "-1", "nan", "inf"}) {
            CHECK(run_cs336({"data_parallel_calcs", option, value}).exit_code == 2);
        }
        for (const std::string value : {"1e308", "1e-308"}) {
            Run r = run_cs336({"fsdp_tp_calcs", option, value, "--batch_tokens", "1048576", "--d_ff", "1048576"});
            CHECK(r.exit_code == 1);
            CHECK_MESSAGE(has(r.err, ": --tflops, --bandwidth_gb or --tensor_mb is too large or too small\n"), r.err);
            CHECK(r.out == "");
        }
    }
    Run beyond = run_cs336({"data_parallel_calcs", "--tflops", "1e308"});
    CHECK(beyond.exit_code == 1);
    CHECK_MESSAGE(has(beyond.err, "W / C is 0: --tflops, "), beyond.err);
    beyond = run_cs336({"alternate_ring_all_reduce", "--tensor_mb", "1e308"});
    CHECK(beyond.exit_code == 1);
    CHECK_MESSAGE(has(beyond.err, "bytes sent per device is inf: "), beyond.err);
}
