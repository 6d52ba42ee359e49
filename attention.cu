// attention.cu: section 1.2 of the handout, attention by its definition.
//
//   S = Q K^T / sqrt(D)      S_ij = -inf where key j may not be seen by query i (causal: j > i)
//   P = softmax(S)           row by row: P_ij = exp(S_ij - m_i) / sum_j exp(S_ij - m_i), m_i = max_j S_ij
//   O = P V
// Q [B,H,Tq,D], K and V [B,H,Tk,D], O [B,H,Tq,D]; S and P are [B,H,Tq,Tk], the only arrays that grow with T^2.
// The two products cost 4*B*H*Tq*Tk*D FLOPs, the softmax 5*B*H*Tq*Tk: 4D/5 times less, yet in eager mode it takes as
// long as the products, because each of its five kernels moves all of S through memory.
//
// Backward, given dO (handout, eq. 13-19; D_i below is not the head size):
//   dV = P^T dO,  dP = dO V^T,  dS_ij = P_ij (dP_ij - D_i) with D_i = sum_j P_ij dP_ij,
//   dQ = dS K / sqrt(D),  dK = dS^T Q / sqrt(D).
#include "cs336.h"
#include <algorithm>

// ---------------------------------------------------------------------------------------------------------------------
// Eager: every operation of the handout's model is a kernel and every intermediate an array in memory.

Tensor attention_naive(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, Tensor* L) {
    Range range("attention");
    Tensor s, p;
    {
        Range r("scores");
        s = scale(matmul(q, k, true), 1 / std::sqrt((double)q.dim(-1)));
    }
    if (causal) {
        Range r("mask");
        Tensor i = reshape(arange(q.dim(-2)), {q.dim(-2), 1}), j = arange(k.dim(-2));
        s = where(greater_equal(i, j), s, -INFINITY);
    }
    {
        Range r("softmax");
        Tensor m = max_last(s);
        s = sub(s, m);
        Tensor e = exp(s), sum = sum_last(e);
        p = div(e, sum);
        if (L) { *L = reshape(add(detached(m), log(detached(sum))), {q.dim(0), q.dim(1), q.dim(2)}); }
    }
    Range r("values");
    return matmul(p, v);
}

// ---------------------------------------------------------------------------------------------------------------------
// softmax: S [R,Tk] becomes P in place, one pass to find each row's maximum and sum together (the sum is rescaled when
// the maximum grows: "online" softmax), one pass to write. Row r holds query r % Tq; causal rows stop at their own key.
// Moves 2 elements read and 1 written per entry instead of the eager version's 10.

template <class T>
static void softmax_cpu(T* S, Wide<T>* L, int64_t R, int Tq, int Tk, bool causal) {
#pragma omp parallel for if (R * Tk > 16384)
    for (int64_t r = 0; r < R; r++) {
        T* s = S + r * Tk;
        int n = causal ? std::min((int)(r % Tq) + 1, Tk) : Tk;
        using A = Wide<T>;
        A m = -INFINITY;
        double sum = 0;
        for (int j = 0; j < n; j++) { m = std::max(m, to_acc(s[j])); }
        for (int j = 0; j < n; j++) { sum += std::exp(to_acc(s[j]) - m); }
        for (int j = 0; j < Tk; j++) { from_acc(j < n ? A(std::exp(to_acc(s[j]) - m) / sum) : A(0), &s[j]); }
        if (L) { L[r] = A(m + std::log(sum)); }
    }
}
// dP becomes dS, in place.
template <class T>
static void softmax_backward_cpu(T* dP, const T* P, int64_t R, int Tq, int Tk, bool causal) {
#pragma omp parallel for if (R * Tk > 16384)
    for (int64_t r = 0; r < R; r++) {
        T* dp = dP + r * Tk;
        const T* p = P + r * Tk;
        int n = causal ? std::min((int)(r % Tq) + 1, Tk) : Tk;  // P is 0 beyond, and so is dS
        using A = Wide<T>;
        double D = 0;
        for (int j = 0; j < n; j++) { D += (double)to_acc(p[j]) * to_acc(dp[j]); }
        for (int j = 0; j < Tk; j++) { from_acc(j < n ? to_acc(p[j]) * (to_acc(dp[j]) - A(D)) : A(0), &dp[j]); }
    }
}

#ifdef __CUDACC__
// One warp a row: neighbouring lanes read neighbouring columns, and a row's second pass finds it in L1.
template <class T>
__global__ void softmax_kernel(T* S, float* L, int64_t R, int Tq, int Tk, bool causal) {
    int64_t r = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (r >= R) { return; }  // a warp leaves as one, so the shuffles below stay legal
    T* s = S + r * Tk;
    int n = causal ? min((int)(r % Tq) + 1, Tk) : Tk;
    float m = -INFINITY, sum = 0;
    for (int j = lane; j < n; j += WARP) {
        float x = to_acc(s[j]), larger = fmaxf(m, x);
        sum = sum * expf(m - larger) + expf(x - larger);
        m = larger;
    }
    float row_m = warp_max(m);
    // A lane without a column has m = -inf, and exp(-inf - row_m) = 0 takes it out of the sum.
    float row_sum = warp_sum(sum * expf(m - row_m)), inverse = 1 / row_sum;
    if (L && lane == 0) { L[r] = row_m + logf(row_sum); }
    for (int j = lane; j < Tk; j += WARP) { from_acc(j < n ? expf(to_acc(s[j]) - row_m) * inverse : 0.0f, &s[j]); }
}
template <class T>
__global__ void softmax_backward_kernel(T* dP, const T* P, int64_t R, int Tq, int Tk, bool causal) {
    int64_t r = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (r >= R) { return; }
    dP += r * Tk, P += r * Tk;
    int n = causal ? min((int)(r % Tq) + 1, Tk) : Tk;
    float D = 0;
    for (int j = lane; j < n; j += WARP) { D += to_acc(P[j]) * to_acc(dP[j]); }
    D = warp_sum(D);
    for (int j = lane; j < Tk; j += WARP) { from_acc(j < n ? to_acc(P[j]) * (to_acc(dP[j]) - D) : 0.0f, &dP[j]); }
}
#endif

static void softmax_in_place(const Tensor& s, const Tensor& L, bool causal) {
    Range range("softmax");
    int Tq = (int)s.dim(-2), Tk = (int)s.dim(-1);
    int64_t R = s.size() / Tk;
    if (s.device() == META || R == 0) { return; }
#ifdef __CUDACC__
    if (s.device() == CUDA) {
        return with_gpu_type(s.dtype, [&](auto zero) {
            softmax_kernel<<<ceil_div(R * WARP, 256), 256, 0, stream()>>>(s.as<decltype(zero)>(), L.as<float>(), R, Tq,
                                                                          Tk, causal);
            LAUNCH_CHECK();
        });
    }
#endif
    with_type(s.dtype, [&](auto zero) {
        using T = decltype(zero);
        softmax_cpu(s.as<T>(), L.as<Wide<T>>(), R, Tq, Tk, causal);
    });
}
static void softmax_backward_in_place(const Tensor& dp, const Tensor& p, bool causal) {
    Range range("softmax");
    int Tq = (int)p.dim(-2), Tk = (int)p.dim(-1);
    int64_t R = p.size() / Tk;
    if (p.device() == META || R == 0) { return; }
#ifdef __CUDACC__
    if (p.device() == CUDA) {
        return with_gpu_type(p.dtype, [&](auto zero) {
            using T = decltype(zero);
            softmax_backward_kernel<<<ceil_div(R * WARP, 256), 256, 0, stream()>>>(dp.as<T>(), p.as<T>(), R, Tq, Tk,
                                                                                   causal);
            LAUNCH_CHECK();
        });
    }
#endif
    with_type(p.dtype, [&](auto zero) {
        using T = decltype(zero);
        softmax_backward_cpu(dp.as<T>(), p.as<T>(), R, Tq, Tk, causal);
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Fused softmax: the products stay cuBLAS's, everything between them is one kernel, and S and P share one array.

Tensor attention_fused(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, bool causal, Tensor* L) {
    Range range("attention");
    Tensor q = contiguous(autocast_operand(q_in)), k = contiguous(autocast_operand(k_in)),
           v = contiguous(autocast_operand(v_in));
    double scale = 1 / std::sqrt((double)q.dim(-1));
    Tensor p = empty({q.dim(0), q.dim(1), q.dim(2), k.dim(2)}, q.dtype), o = empty(q.shape, q.dtype);
    gemm(p, q, false, k, true, scale);
    Tensor lse = L ? empty({q.dim(0), q.dim(1), q.dim(2)}, q.dtype == F64 ? F64 : F32) : Tensor();
    softmax_in_place(p, lse, causal);
    if (L) { *L = lse; }
    gemm(o, p, false, v, false);
    record(o, {q, k, v}, [q, k, v, p, scale, causal](const Tensor& dO_in) {
        Tensor dO = contiguous(dO_in), dS = empty(p.shape, p.dtype);
        bool accumulate;
        if (v.gradient) {
            Tensor dV = gradient_target(v.gradient, &accumulate);
            gemm(dV, p, true, dO, false, 1, accumulate);
        }
        gemm(dS, dO, false, v, true);
        softmax_backward_in_place(dS, p, causal);
        if (q.gradient) {
            Tensor dQ = gradient_target(q.gradient, &accumulate);
            gemm(dQ, dS, false, k, false, scale, accumulate);
        }
        if (k.gradient) {
            Tensor dK = gradient_target(k.gradient, &accumulate);
            gemm(dK, dS, true, q, false, scale, accumulate);
        }
    });
    return o;
}

// ---------------------------------------------------------------------------------------------------------------------
// The experiments of 1.2.1 and 1.3 (a): batch 8, no heads, no mask, head sizes and lengths on a grid

struct AttentionCost {
    bool ran = false;
    double forward_ms = 0, backward_ms = 0;
    size_t before_backward = 0;  // bytes held when backward starts: inputs, and what the forward saved
    size_t needs = 0;            // bytes at the peak of forward and backward, predicted
};
using AttentionFunction = Tensor (*)(const Tensor&, const Tensor&, const Tensor&, bool, Tensor*);
constexpr int GRID_BATCH = 8;
static const std::vector<int> grid_head_sizes = {16, 32, 64, 128}, grid_lengths = {256, 1024, 4096, 8192, 16384};

struct GridInputs {
    Tensor q, k, v, dO;
};
static GridInputs grid_inputs(int S, int D) {
    GridInputs in;
    uint64_t key = 0;
    for (Tensor* t : {&in.q, &in.k, &in.v, &in.dO}) {
        *t = empty({GRID_BATCH, 1, S, D}, F32, INPUTS);
        fill_normal(*t, 0, key++, 0, 1);
        *t = require_gradient(*t);
    }
    return in;
}
// A forward and a backward pass without data; afterwards META's books tell the peak. `saved` sees what is held between.
static size_t grid_peak(
    AttentionFunction f, int S, int D, const std::function<void()>& saved = [] {}) {
    return planned_peak([&] {
        GridInputs in = grid_inputs(S, D);
        Tensor o = f(in.q, in.k, in.v, false, nullptr);
        saved();
        backward_from(o, in.dO);
    });
}
static AttentionCost grid_cost(AttentionFunction f, int S, int D, int passes) {
    AttentionCost cost;
    cost.needs = grid_peak(f, S, D);
    if (cost.needs > available_memory(context.device)) { return cost; }
    GridInputs in = grid_inputs(S, D);
    Tensor o;
    auto forward = [&] { o = f(in.q, in.k, in.v, false, nullptr); };
    auto reset = [&] {
        clear_tape();
        o = Tensor();
        for (const Tensor* t : {&in.q, &in.k, &in.v}) { t->gradient->value = Tensor(); }
    };
    progress("S %d, D %d", S, D);
    cost.forward_ms = stats_of(time_queued_ms(3, passes, reset, forward)).mean;
    cost.before_backward = memory_use(context.device).now;
    auto prepare = [&] {
        reset();
        forward();
    };
    cost.backward_ms = stats_of(time_queued_ms(3, passes, prepare, [&] { backward_from(o, in.dO); })).mean;
    reset();
    cost.ran = true;
    return cost;
}

struct Grid {
    std::vector<int> lengths;
    int passes;
    std::string caption;
};
static Grid grid_of(const Options& o, const char* what) {
    bool cpu = context.device == CPU;
    Grid g{grid_lengths, o.has("steps") ? o.steps : 100, ""};
    std::string scaled_down;
    if (cpu || o.quick) {
        g.lengths = cpu ? std::vector<int>{256, 1024} : std::vector<int>{256, 1024, 4096};
        if (o.quick && cpu) { g.lengths.pop_back(); }
        scaled_down = strprintf("; scaled down: lengths up to %d instead of 16384", g.lengths.back());
        if (!o.has("steps")) {
            g.passes = o.quick ? 3 : 10;
            scaled_down += strprintf(", %d passes instead of 100", g.passes);
        }
    }
    g.caption = strprintf(
        "%s; batch %d, no heads, no mask, precision %s, 3 warmup, %d forward and %d backward passes; %s; commit %s%s",
        what, GRID_BATCH, name_of(context.precision), g.passes, g.passes, device_description().c_str(),
        commit().c_str(), scaled_down.c_str());
    return g;
}

// What attention keeps for its backward, buffer by buffer, as the allocator saw it on META.
static Table saved_table(int S, int D, size_t available) {
    std::map<std::pair<std::string, size_t>, int> groups;
    size_t saved = 0;
    std::vector<const Memory*> before = live_memory(META);
    size_t peak = grid_peak(attention_naive, S, D, [&] {
        for (const Memory* m : live_memory(META)) {
            if (std::count(before.begin(), before.end(), m)) { continue; }
            groups[{m->category == INPUTS ? "inputs and dO" : m->op, m->bytes}]++;
            saved += m->bytes;
        }
    });
    Table table{
        strprintf("the smallest configuration that does not fit: batch %d, d %d, S %d needs %.2f GiB at its peak, "
                  "%.2f GiB are there. What is held when backward starts:",
                  GRID_BATCH, D, S, peak / 1073741824.0, available / 1073741824.0),
        {"what", "buffers", "bytes each", "bytes", "MiB"},
        {}};
    for (const auto& g : groups) {
        size_t bytes = g.first.second * g.second;
        table.rows.push_back({g.first.first, std::to_string(g.second), std::to_string(g.first.second),
                              std::to_string(bytes), strprintf("%.2f", bytes / 1048576.0)});
    }
    table.rows.push_back({"all", "", "", std::to_string(saved), strprintf("%.2f", saved / 1048576.0)});
    table.rows.push_back({"peak in backward", "", "", std::to_string(peak), strprintf("%.2f", peak / 1048576.0)});
    return table;
}

// Milliseconds against S, a panel for each D: `times` holds a row of series' values for each D and length, D outermost.
static void plot_grid(const std::string& path, const Grid& g, const std::string& title,
                      const std::vector<std::string>& names, const std::vector<std::vector<double>>& times) {
    std::vector<Chart> panels;
    size_t lengths = g.lengths.size();
    for (size_t d = 0; d < grid_head_sizes.size(); d++) {
        Chart chart{
            Chart::LINES, strprintf("d_model %d", grid_head_sizes[d]), "sequence length", "time (ms)", {}, {}, {}};
        chart.x.assign(g.lengths.begin(), g.lengths.end());
        chart.log_axes = true;
        for (size_t k = 0; k < names.size(); k++) {
            Series s{names[k], {}, k % 2 == 1, (int)k / 2};
            for (size_t i = 0; i < lengths; i++) { s.y.push_back(times[d * lengths + i][k]); }
            chart.series.push_back(s);
        }
        panels.push_back(chart);
    }
    save_file(path, draw(title, g.caption, panels));
}

int cmd_pytorch_attention(const Options& o) {
    context.device = choose_device(o.device);
    context.mode = EAGER;
    Grid g = grid_of(o, "pytorch_attention: one kernel an operation");
    Table table{g.caption, {"d_model", "seq_len", "forward_time", "backward_time", "memory_usage_mb", "status"}, {}};
    std::vector<std::vector<double>> times;
    for (int D : grid_head_sizes) {
        for (int S : g.lengths) {
            AttentionCost c = grid_cost(attention_naive, S, D, g.passes);
            std::vector<std::string> row = {std::to_string(D), std::to_string(S)};
            for (double ms : {c.forward_ms, c.backward_ms}) {
                row.push_back(c.ran ? strprintf("%.6f", ms / 1e3) : "N/A");
            }
            row.push_back(c.ran ? strprintf("%.2f", c.before_backward / 1048576.0) : "N/A");
            row.push_back(c.ran ? "OK" : oom_cell(c.needs));
            table.rows.push_back(row);
            times.push_back({c.ran ? c.forward_ms : NAN, c.ran ? c.backward_ms : NAN});
        }
    }
    print(table, o.format);
    if (!o.plot.empty()) { plot_grid(o.plot, g, "Attention, one kernel an operation", {"forward", "backward"}, times); }
    size_t available = available_memory(context.device);
    int S = 256;
    while (grid_peak(attention_naive, S, grid_head_sizes[0]) <= available) { S *= 2; }
    print(saved_table(S, grid_head_sizes[0], available), o.format);
    return 0;
}

Table attention_compile_table(const Options& o) {
    Grid g = grid_of(o, "torch_compile (a): attention, vanilla = one kernel an operation, compiled = fused softmax");
    Table table{g.caption,
                {"d_model", "seq_len", "vanilla fw (ms)", "compiled fw (ms)", "speedup fw", "vanilla bw (ms)",
                 "compiled bw (ms)", "speedup bw"},
                {}};
    std::vector<std::vector<double>> times;
    for (int D : grid_head_sizes) {
        for (int S : g.lengths) {
            context.mode = EAGER;
            AttentionCost naive = grid_cost(attention_naive, S, D, g.passes);
            context.mode = FUSED;
            AttentionCost fused = grid_cost(attention_fused, S, D, g.passes);
            std::vector<std::string> row = {std::to_string(D), std::to_string(S)};
            for (double AttentionCost::*pass : {&AttentionCost::forward_ms, &AttentionCost::backward_ms}) {
                for (const AttentionCost* c : {&naive, &fused}) {
                    row.push_back(c->ran ? strprintf("%.3f", c->*pass) : oom_cell(c->needs));
                }
                row.push_back(naive.ran && fused.ran ? strprintf("%.2fx", naive.*pass / fused.*pass) : "");
            }
            table.rows.push_back(row);
            times.push_back({naive.ran ? naive.forward_ms : NAN, naive.ran ? naive.backward_ms : NAN,
                             fused.ran ? fused.forward_ms : NAN, fused.ran ? fused.backward_ms : NAN});
        }
    }
    if (!o.plot.empty()) {
        plot_grid(o.plot, g, "Attention, one kernel an operation and with a fused softmax",
                  {"eager forward", "eager backward", "fused forward", "fused backward"}, times);
    }
    return table;
}
