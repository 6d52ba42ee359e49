// attention.cu: sections 1.2.1 to 1.3.1 of the handout. Attention by its definition, then with a
// fused softmax, each timed; and weighted_sum, the warm-up kernel. flash.cu goes on.
//
//   S = Q K^T / sqrt(D)      S_ij = -inf where key j may not be seen by query i (causal: j > i)
//   P = softmax(S)           row by row, with m_i = max_j S_ij:
//                            P_ij = exp(S_ij - m_i) / sum_j exp(S_ij - m_i)
//   O = P V
// Q [B,H,Tq,D], K and V [B,H,Tk,D], O [B,H,Tq,D]; S and P are [B,H,Tq,Tk], the only arrays that
// grow with T^2. The two products cost 4*B*H*Tq*Tk*D FLOPs, the softmax 5*B*H*Tq*Tk: 4D/5 times
// less, yet in eager mode it takes as long as the products, because each of its five kernels moves
// all of S through memory.
//
// Backward, given dO (handout, eq. 13-19; D_i below is not the head size):
//   dV = P^T dO,  dP = dO V^T,  dS_ij = P_ij (dP_ij - D_i) with D_i = sum_j P_ij dP_ij,
//   dQ = dS K / sqrt(D),  dK = dS^T Q / sqrt(D).
#include "cs336.h"
#include <cfloat>
#include "lib/gpu.h"

// -------------------------------------------------------------------------------------------------
// Eager: every operation of the handout's model is a kernel and every intermediate an array in
// memory.

static Tensor attention_naive(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                              Tensor* L) {
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
        Tensor e = exp(s), sum = sum_last(e);  // in fp32 under autocast
        p = div(e, sum);
        if (L) {
            *L = reshape(add(detached(m), log(detached(sum))), {q.dim(0), q.dim(1), q.dim(2)});
        }
    }
    Range r("values");
    return matmul(p, v);
}

// -------------------------------------------------------------------------------------------------
// The experiments of sections 1.2 and 1.3: rows of the table on random inputs, and on a file's.

AttentionTensors random_inputs(const AttentionCase& c, DType dtype, uint64_t seed) {
    auto random = [&](int T, uint64_t key) {
        const Tensor t = empty({c.B, c.H, T, c.D}, dtype, INPUTS);
        fill_normal(t, seed, key, 0, 1);
        return t;
    };
    return {random(c.Tq, 0), random(c.Tk, 1), random(c.Tk, 2), c.causal, random(c.Tq, 3)};
}

static void autocast_to(DType dtype) {  // an operand that is bf16 or fp16 already stays so
    if (dtype == BF16) { context.precision = PREC_BF16; }
    if (dtype == F16) { context.precision = PREC_FP16; }
}
void run_pass(void (*pass)(const AttentionTensors&), const AttentionTensors& t) {
    if (t.q.device() != META) { pass(t); }
}
struct Passes {  // of one implementation on given inputs, row-major and of one type
    const AttentionImpl& impl;
    AttentionTensors t;
    Passes(const AttentionImpl& impl, const AttentionTensors& in) : impl(impl), t(in) {
        for (Tensor* x : {&t.q, &t.k, &t.v}) { *x = require_gradient(*x); }
    }
    void forward(bool with_L = false) {
        if (!impl.run) {
            t.o = empty(t.q.shape, t.q.dtype),
            t.L = empty({t.q.dim(0), t.q.dim(1), t.q.dim(2)}, F32);
            return run_pass(impl.forward, t);
        }
        RestoreContext restore;
        autocast_to(t.q.dtype);
        t.o = impl.run(t.q, t.k, t.v, t.causal, with_L ? &t.L : nullptr);
    }
    void backward() {
        if (!impl.run) {
            t.dq = empty(t.q.shape, t.q.dtype), t.dk = empty(t.k.shape, t.k.dtype),
            t.dv = empty(t.v.shape, t.v.dtype);
            return run_pass(impl.backward, t);
        }
        backward_from(t.o, t.dO);
        t.dq = t.q.gradient->value, t.dk = t.k.gradient->value, t.dv = t.v.gradient->value;
    }
    void reset() {
        clear_tape();
        for (Tensor* x : {&t.q, &t.k, &t.v}) { x->gradient->value = Tensor(); }
        t.o = t.L = t.dq = t.dk = t.dv = Tensor();
    }
};
// O, L and, if there is a dO, dQ, dK, dV.
std::vector<Tensor> outputs_of(const AttentionImpl& impl, const AttentionTensors& in) {
    Passes p(impl, in);
    p.forward(true);
    if (in.dO) { p.backward(); }
    clear_tape();
    std::vector<Tensor> outputs = {detached(p.t.o), p.t.L, p.t.dq, p.t.dk, p.t.dv};
    outputs.resize(in.dO ? 5 : 2);
    return outputs;
}

// On context.device. auto: the fastest with tiles, or else fused.
const AttentionImpl& impl_named(const std::string& name, DType dtype, int64_t D) {
    const AttentionImpl* fastest =
        name == "auto" ? fastest_flash(context.device, dtype, D) : nullptr;
    if (fastest) { return *fastest; }
    for (const AttentionImpl& impl : table_of<AttentionImpl>()) {
        const bool is_named = impl.name == (name == "auto" ? "fused" : name);
        if (is_named && impl.device == context.device && impl.takes(dtype, D)) { return impl; }
    }
    usage_error("--impl %s: takes no %s with head size %ld on %s", name.c_str(), name_of(dtype),
                (long)D, name_of(context.device));
}

static size_t peak_of_passes(const AttentionImpl& impl, const AttentionCase& c, DType dtype) {
    RestoreContext restore;
    autocast_to(dtype);
    return planned_peak([&] {
        Passes p(impl, random_inputs(c, dtype, 0));
        p.forward(), p.backward();
    });
}
PassTimes pass_times(const AttentionImpl& impl, const AttentionCase& c, DType dtype,
                     const Effort& e) {
    PassTimes t;
    const std::string row = strprintf("S %d, D %d, %s, %s", c.Tq, c.D, name_of(dtype), impl.name);
    t.oom = run_if_fits(row, peak_of_passes(impl, c, dtype), [&] {
        Passes p(impl, random_inputs(c, dtype, 0));
        t.forward = e.time([&] { p.reset(); }, [&] { p.forward(); });
        t.held = memory_use(context.device).now;
        t.backward = e.time([&] { p.reset(), p.forward(); }, [&] { p.backward(); });
        if (e.n == 0) {
            t.both = e.time([&] { p.reset(); }, [&] { p.forward(), p.backward(); });
        }
        p.reset();
    });
    return t;
}
std::string ms(const PassTimes& t, PassTime p) {
    return t.oom ? oom_cell(t.oom) : strprintf("%.3f", (t.*p).median);
}
static double times_as_fast(const AttentionRun& r, PassTime p) {
    return (r.naive.*p).median / (r.other.*p).median;
}
std::string speedup(const AttentionRun& r, PassTime p) {
    return r.naive.oom || r.other.oom ? "" : strprintf("%.2fx", times_as_fast(r, p));
}
// "faster in 17 of the 20 configurations that fit (0.58 to 5.76 times as fast), slower in 2, level
// in 1. In 4 memory runs out"
std::string compared(const std::vector<AttentionRun>& runs, PassTime p, DType dtype) {
    int fit = 0, oom = 0;
    std::vector<double> times;  // where they are not level, in order
    for (const AttentionRun& r : runs) {
        if (r.dtype != dtype) { continue; }
        const bool lacks_one = r.naive.oom || r.other.oom;
        fit += !lacks_one, oom += lacks_one;
        if (!lacks_one && !level(r.other.*p, r.naive.*p)) { times.push_back(times_as_fast(r, p)); }
    }
    std::sort(times.begin(), times.end());
    const int apart = (int)times.size(),
              slower = (int)(std::lower_bound(times.begin(), times.end(), 1) - times.begin());
    std::string text = fit > 0 && apart - slower == fit
                           ? "faster in all "
                           : strprintf("faster in %d of the ", apart - slower);
    text += counted(fit, "configuration") + " that fit";
    if (apart > 0) {
        text += strprintf(" (%.2f to %.2f times as fast)", times.front(), times.back());
    }
    if (slower > 0) { text += strprintf(", slower in %d", slower); }
    if (fit > apart) { text += strprintf(", level in %d", fit - apart); }
    return text + (oom > 0 ? strprintf(". In %d memory runs out", oom) : "");
}
// Naive and another implementation (null: naive alone) at each head size and length.
std::vector<AttentionRun> time_all(const AttentionImpl* other, int B, bool causal, DType dtype,
                                   const std::vector<int>& lengths, const Effort& effort) {
    std::vector<AttentionRun> runs;
    for (int D : {16, 32, 64, 128}) {
        for (int S : lengths) {
            const AttentionCase c{B, 1, S, S, D, causal};
            runs.push_back({S, D, dtype, pass_times(impl_named("naive"), c, dtype, effort)});
            if (other) { runs.back().other = pass_times(*other, c, dtype, effort); }
        }
    }
    return runs;
}

// -------------------------------------------------------------------------------------------------
// pytorch_attention, and torch_compile (a): batch 8, no heads, no mask, fp32, head sizes and
// lengths on a grid

constexpr int GRID_BATCH = 8;
static std::vector<AttentionRun> run_grid(const Options& o, const AttentionImpl* other) {
    const std::vector<int> quick = {64, 128, 256}, all = {256, 1024, 4096, 8192, 16384};
    return time_all(other, GRID_BATCH, false, F32, o.quick ? quick : all, {o.steps});
}
static std::string grid_caption(const Options& o, const char* what) {
    return strprintf(
        "%s; batch %d, no heads, no mask, precision fp32, 3 warmup, median of %d passes of each "
        "kind",
        what, GRID_BATCH, o.steps);
}

// Bytes that naive holds when backward starts, in fp32: exp(S - m) and P; q, k, v, O and dO;
// maximum and sum of a row.
static double saved_by_naive(double B, double S, double D) {
    return 4 * B * (2 * S * S + 5 * S * D + 2 * S);
}
// S: of the smallest power of 2 whose passes do not fit; peak: what they would hold at most; both
// predicted.
static void answer_pytorch_attention(const std::vector<AttentionRun>& runs, int S, size_t peak,
                                     size_t available) {
    const double MiB = 1048576, GiB = 1024 * MiB, square = 4.0 * GRID_BATCH * S * S;
    const int D = runs[0].D;
    std::vector<AttentionRun> fit;  // of that head size
    size_t oom = 0;
    for (const AttentionRun& r : runs) {
        oom += r.naive.oom > 0;
        if (r.D == D && !r.naive.oom) { fit.push_back(r); }
    }
    answer("a", "Memory runs out in %zu of the %zu configurations.", oom, runs.size());
    if (fit.size() > 1) {
        const AttentionRun &last = fit.back(), &before = fit[fit.size() - 2];
        answer("a",
               "The memory saved for backward grows %.2f times from S %d to %d, with S^2. It is "
               "then %.1f MiB, of which the formula below explains %.1f.",
               (double)last.naive.held / before.naive.held, before.S, last.S, last.naive.held / MiB,
               saved_by_naive(GRID_BATCH, last.S, D) / MiB);
    }
    answer("a",
           "The smallest configuration that does not fit (doubling S, predicted), S %d and D %d, "
           "needs %.1f GiB of %.1f. When backward starts, it holds exp(S - m) and P, 2 x 4 B S^2 = "
           "2 x 4 x %d x %d^2 bytes = %.1f GiB; q, k, v, O and dO, 5 x 4 B S D = %.1f MiB; and two "
           "numbers per row, 2 x 4 B S = %.1f MiB. At backward's peak it holds %.0f arrays of B "
           "S^2, dP among them.",
           S, D, peak / GiB, available / GiB, GRID_BATCH, S, 2 * square / GiB,
           20.0 * GRID_BATCH * S * D / MiB, 8.0 * GRID_BATCH * S / MiB, std::floor(peak / square));
    answer("a",
           "FlashAttention removes this cost: it keeps L, one number per query, and computes P "
           "again in backward. It would hold q, k, v, O, dO and L, %.1f MiB.",
           4 * GRID_BATCH * S * (5.0 * D + 1) / MiB);
}
int cmd_pytorch_attention(const Options& o) {
    context.device = choose_device(o.device);
    const std::vector<AttentionRun> runs = run_grid(o, nullptr);
    Table table{
        grid_caption(o, "pytorch_attention: one kernel per operation; times in s, memory in MiB"),
        {"d_model", "seq_len", "forward_time", "backward_time", "memory_usage_mb", "status"}};
    for (const AttentionRun& r : runs) {
        const PassTimes& t = r.naive;
        auto cell = [&](const char* format, double x) {
            return t.oom ? "N/A" : strprintf(format, x);
        };
        table.row(r.D, r.S, cell("%.6f", t.forward.median / 1e3),
                  cell("%.6f", t.backward.median / 1e3), cell("%.2f", t.held / 1048576.0),
                  t.oom ? oom_cell(t.oom) : "OK");
    }
    print(table);
    const size_t available = available_memory(context.device);
    size_t peak = 0;
    int S = 128;
    while (peak <= available) {
        S *= 2, peak = peak_of_passes(impl_named("naive"), {GRID_BATCH, 1, S, S, runs[0].D, false},
                                      F32);
    }
    answer_pytorch_attention(runs, S, peak, available);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// softmax: S [R,Tk] becomes P in place. The loop takes three passes per row. The kernel finds
// maximum and sum in one (the sum is rescaled when the maximum grows: "online" softmax) and writes
// in a second. Row r holds query r % Tq; causal rows stop at their own key. Maxima start from a
// finite number: a score of -inf then adds exp(-inf) = 0, where -inf - -inf would be NaN. The
// kernel moves at most 3 elements per entry, eager's five move 8.
//   P_rj = exp(S_rj - L_r),  L_r = log sum_j exp S_rj
//   dS_rj = P_rj (dP_rj - sum_k P_rk dP_rk)

template <class T>
static void softmax_cpu(T* S, Wide<T>* L, int64_t R, int Tq, int Tk, bool causal) {
#pragma omp parallel for if (R * Tk > 16384)
    for (int64_t r = 0; r < R; r++) {
        T* s = S + r * Tk;
        int n = keys_seen(causal, (int)(r % Tq), Tk);
        using A = Wide<T>;
        A m = -INFINITY;
        double sum = 0;
        for (int j = 0; j < n; j++) { m = std::max<A>(m, s[j]); }
        for (int j = 0; j < n; j++) { sum += std::exp(s[j] - m); }
        for (int j = 0; j < Tk; j++) { s[j] = j < n ? A(std::exp(s[j] - m) / sum) : A(0); }
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
        int n = keys_seen(causal, (int)(r % Tq), Tk);  // P is 0 beyond, and so is dS
        using A = Wide<T>;
        double D = 0;
        for (int j = 0; j < n; j++) { D += (double)p[j] * dp[j]; }
        for (int j = 0; j < Tk; j++) { dp[j] = j < n ? p[j] * (dp[j] - A(D)) : A(0); }
    }
}

#ifdef __CUDACC__
// One warp a row: neighbouring lanes read neighbouring columns, and a short row's second pass finds
// it in L1.
template <class T>
__global__ void softmax_kernel(T* S, float* L, int64_t R, int Tq, int Tk, bool causal) {
    int64_t r = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (r >= R) { return; }  // a warp leaves as one, so the shuffles below stay legal
    T* s = S + r * Tk;
    int n = keys_seen(causal, (int)(r % Tq), Tk);
    float m = -FLT_MAX, sum = 0;
    for (int j = lane; j < n; j += WARP) {
        float x = s[j], larger = fmaxf(m, x);
        sum = sum * expf(m - larger) + expf(x - larger);
        m = larger;
    }
    float row_m = warp_max(m);
    // A lane without a column, or with scores of -inf alone, has a sum of 0.
    float row_sum = warp_sum(sum * expf(m - row_m)), inverse = 1 / row_sum;
    if (L && lane == 0) { L[r] = row_m + logf(row_sum); }
    for (int j = lane; j < Tk; j += WARP) { s[j] = j < n ? expf(s[j] - row_m) * inverse : 0.0f; }
}
template <class T>
__global__ void softmax_backward_kernel(T* dP, const T* P, int64_t R, int Tq, int Tk, bool causal) {
    int64_t r = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (r >= R) { return; }
    dP += r * Tk, P += r * Tk;
    int n = keys_seen(causal, (int)(r % Tq), Tk);
    float D = 0;
    for (int j = lane; j < n; j += WARP) { D += P[j] * dP[j]; }
    D = warp_sum(D);
    for (int j = lane; j < Tk; j += WARP) { dP[j] = j < n ? P[j] * (dP[j] - D) : 0.0f; }
}
#endif

// S becomes P, and L (if wanted) is written; or, given P, dP becomes dS.
static void softmax_in_place(const Tensor& s, const Tensor& L, const Tensor& P, bool causal) {
    Range range("softmax");
    int Tq = (int)s.dim(-2), Tk = (int)s.dim(-1);
    int64_t R = s.size() / Tk;
    if (s.device() == META) { return; }
#ifdef __CUDACC__
    if (s.device() == CUDA) {
        return with_gpu_type(s.dtype, [&](auto zero) {
            using T = decltype(zero);
            const int64_t blocks = ceil_div(R * WARP, 256);
            if (P) {
                LAUNCH(softmax_backward_kernel, blocks, 256, s.as<T>(), P.as<T>(), R, Tq, Tk,
                       causal);
            } else {
                LAUNCH(softmax_kernel, blocks, 256, s.as<T>(), L.as<float>(), R, Tq, Tk, causal);
            }
        });
    }
#endif
    with_type(s.dtype, [&](auto zero) {
        using T = decltype(zero);
        P ? softmax_backward_cpu(s.as<T>(), P.as<T>(), R, Tq, Tk, causal)
          : softmax_cpu(s.as<T>(), L.as<Wide<T>>(), R, Tq, Tk, causal);
    });
}

// -------------------------------------------------------------------------------------------------
// Fused softmax: the products stay cuBLAS's, everything between them is one kernel, and S and P
// share one array.

static Tensor attention_fused(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                              bool causal, Tensor* L) {
    Range range("attention");
    Tensor q = contiguous(autocast_operand(q_in)), k = contiguous(autocast_operand(k_in)),
           v = contiguous(autocast_operand(v_in));
    double scale = 1 / std::sqrt((double)q.dim(-1));
    Tensor p = empty({q.dim(0), q.dim(1), q.dim(2), k.dim(2)}, q.dtype),
           o = empty(q.shape, q.dtype);
    gemm(p, q, false, k, true, scale);
    Tensor lse = L ? empty({q.dim(0), q.dim(1), q.dim(2)}, q.dtype == F64 ? F64 : F32) : Tensor();
    softmax_in_place(p, lse, Tensor(), causal);
    if (L) { *L = lse; }
    gemm(o, p, false, v, false);
    record(o, {q, k, v}, [q, k, v, p, scale, causal](const Tensor& dO_in) {
        Tensor dO = contiguous(dO_in), dS = empty(p.shape, p.dtype);
        add_gemm(v.gradient, p, true, dO, false);
        gemm(dS, dO, false, v, true);
        softmax_in_place(dS, Tensor(), p, causal);
        add_gemm(q.gradient, dS, false, k, false, scale);
        add_gemm(k.gradient, dS, true, q, false, scale);
    });
    return o;
}

static bool any_float(DType, int64_t) { return true; }
static const AddRow<AttentionImpl> attention_impls[] = {
    {{"naive", CPU, 10, any_float, attention_naive, nullptr, nullptr}},
    {{"fused", CPU, 20, any_float, attention_fused, nullptr, nullptr}},
    // A build for the CPU has these, too: memory is predicted for a GPU.
    {{"naive", CUDA, 10, any_float, attention_naive, nullptr, nullptr}},
    {{"fused", CUDA, 20, any_float, attention_fused, nullptr, nullptr}},
};
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
    return (context.mode == EAGER ? attention_naive : attention_fused)(q, k, v, causal, nullptr);
}

// -------------------------------------------------------------------------------------------------
// torch_compile (a): attention with the fused softmax against eager

static void answer_torch_compile_attention(const std::vector<AttentionRun>& runs) {
    answer("a",
           "Compiled attention's forward is %s. Its backward is %s. \"Compiled\" is our softmax, "
           "fused into one kernel by hand; torch.compile itself did not run.",
           compared(runs, &PassTimes::forward).c_str(),
           compared(runs, &PassTimes::backward).c_str());
}
void torch_compile_attention(const Options& o) {
    const std::vector<AttentionRun> runs = run_grid(o, &impl_named("fused"));
    Table table{grid_caption(o,
                             "torch_compile (a): attention, vanilla = one kernel per operation, "
                             "compiled = fused softmax"),
                {"d_model", "seq_len", "vanilla fw ms", "compiled fw ms", "speedup fw",
                 "vanilla bw ms", "compiled bw ms", "speedup bw"}};
    for (const AttentionRun& r : runs) {
        table.row(r.D, r.S, ms(r.naive, &PassTimes::forward), ms(r.other, &PassTimes::forward),
                  speedup(r, &PassTimes::forward), ms(r.naive, &PassTimes::backward),
                  ms(r.other, &PassTimes::backward), speedup(r, &PassTimes::backward));
    }
    print(table);
    answer_torch_compile_attention(runs);
}

// -------------------------------------------------------------------------------------------------
// weighted_sum (handout, 1.3.1): the warm-up kernel.
//   y_n = sum_d w_d x_nd                            x [N,D], w [D] -> y [N]
//   dx_nd = w_d dy_n,  dw_d = sum_n x_nd dy_n
// Memory decides: forward moves 4 N D bytes; backward reads x and writes dx, 8 N D.

static void weighted_sum_cpu(float* y, const float* x, const float* w, int64_t N, int64_t D) {
#pragma omp parallel for if (N * D > 16384)
    for (int64_t n = 0; n < N; n++) {
        double sum = 0;
        for (int64_t d = 0; d < D; d++) { sum += (double)w[d] * x[n * D + d]; }
        y[n] = (float)sum;
    }
}
static void weighted_sum_backward_cpu(float* dx, float* dw, const float* dy, const float* x,
                                      const float* w, int64_t N, int64_t D) {
    std::vector<double> sum(D);
    for (int64_t n = 0; n < N; n++) {
        for (int64_t d = 0; d < D; d++) {
            dx[n * D + d] = w[d] * dy[n];
            sum[d] += (double)dy[n] * x[n * D + d];
        }
    }
    for (int64_t d = 0; d < D; d++) { dw[d] = (float)sum[d]; }
}

#ifdef __CUDACC__
// A warp takes a row: its lanes read neighbouring columns, so a load of the warp is one piece of
// 128 bytes.
__global__ void weighted_sum_kernel(float* y, const float* x, const float* w, int64_t N,
                                    int64_t D) {
    int64_t n = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (n >= N) { return; }
    float sum = 0;
#pragma unroll 8
    for (int64_t d = lane; d < D; d += WARP) { sum += w[d] * x[n * D + d]; }
    sum = warp_sum(sum);
    if (lane == 0) { y[n] = sum; }
}

// dw sums over all rows, so it takes two steps: each block writes the sum over its own rows to
// partial [chunks,D], and lib/tensor.cu's sum adds the chunks up. Atomics would add in no fixed
// order. A block has 32 columns and 8 rows at a time.
constexpr int SUM_ROWS = 8;
__global__ void weighted_sum_backward_kernel(float* dx, float* partial, const float* dy,
                                             const float* x, const float* w, int64_t N, int64_t D,
                                             int64_t chunk) {
    __shared__ float sums[SUM_ROWS][WARP];
    int64_t d = blockIdx.x * (int64_t)WARP + threadIdx.x;
    int64_t first = blockIdx.y * chunk, end = min(first + chunk, N);
    float sum = 0;
    if (d < D) {
        float weight = w[d];
#pragma unroll 4
        for (int64_t n = first + threadIdx.y; n < end; n += SUM_ROWS) {
            sum += x[n * D + d] * dy[n];
            dx[n * D + d] = weight * dy[n];
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();  // all rows' sums are there
    if (threadIdx.y > 0 || d >= D) { return; }
    for (int r = 1; r < SUM_ROWS; r++) { sum += sums[r][threadIdx.x]; }
    partial[blockIdx.y * D + d] = sum;
}
#endif

static void weighted_sum_forward(const Tensor& y, const Tensor& x, const Tensor& w) {
    int64_t D = w.size(), N = y.size();
#ifdef __CUDACC__
    if (y.device() == CUDA) {
        LAUNCH(weighted_sum_kernel, ceil_div(N * WARP, 256), 256, y.as<float>(), x.as<float>(),
               w.as<float>(), N, D);
        return;
    }
#endif
    weighted_sum_cpu(y.as<float>(), x.as<float>(), w.as<float>(), N, D);
}
static void weighted_sum_backward(const Tensor& dx, const Tensor& dw, const Tensor& dy,
                                  const Tensor& x, const Tensor& w) {
    int64_t D = w.size(), N = dy.size();
#ifdef __CUDACC__
    if (dx.device() == CUDA) {
        // as many chunks as keep the chip busy, but no more to add up than needed
        int64_t strips = ceil_div(D, WARP);
        int64_t chunk = std::max<int64_t>(64, ceil_div(N * strips, multiprocessors() * 16)),
                chunks = ceil_div(N, chunk);
        Tensor partial = empty({chunks, D}, F32, WORKSPACE);
        LAUNCH(weighted_sum_backward_kernel, dim3((unsigned)strips, (unsigned)chunks),
               dim3(WARP, SUM_ROWS), dx.as<float>(), partial.as<float>(), dy.as<float>(),
               x.as<float>(), w.as<float>(), N, D, chunk);
        return copy_or_add(dw, reshape(sum_last(transpose(partial, 0, 1)), {D}), false);
    }
#endif
    weighted_sum_backward_cpu(dx.as<float>(), dw.as<float>(), dy.as<float>(), x.as<float>(),
                              w.as<float>(), N, D);
}

// -------------------------------------------------------------------------------------------------
// weighted_sum: both passes timed, and held to what the tape makes of sum(w x) in fp64

struct MemoryRates {
    double forward, backward, copy;  // GB/s; copy: of x
};
static MemoryRates weighted_sum_row(Table& table, int64_t N, int64_t D) {
    const Tensor x = empty({N, D}, F32), w = empty({D}, F32), dy = empty({N}, F32);
    fill_normal(x, 0, 1, 0, 1), fill_normal(w, 0, 2, 0, 1), fill_normal(dy, 0, 3, 0, 1);
    const Tensor y = empty({N}, F32), dx = empty({N, D}, F32), dw = empty({D}, F32);
    auto ms_of = [](const std::function<void()>& f) { return stats_of(time_ms(2, 10, f)).median; };
    const double copied = ms_of([&] { copy(dx, x); });
    const double forward = ms_of([&] { weighted_sum_forward(y, x, w); });
    const double backward = ms_of([&] { weighted_sum_backward(dx, dw, dy, x, w); });
    double error = 0;
    auto check = [&](const Tensor& got, const Tensor& want, int64_t terms) {
        // rounding errors of a sum: a random walk
        const double tolerance = 1e-6 * std::sqrt((double)terms) + 1e-6;
        const Comparison c = compare(got, want, tolerance, 4 * tolerance);
        if (!c.ok()) {
            fail("weighted_sum of %s: %s", to_string(x.shape).c_str(), to_string(c).c_str());
        }
        error = std::max(error, c.max_abs);
    };
    const bool small = N * D <= 1 << 20;  // a large one's truth would take 9 GB
    if (small) {
        RestoreContext restore;
        context.device = CPU;
        auto wide = [](const Tensor& t) { return require_gradient(cast(to_device(t, CPU), F64)); };
        const Tensor x64 = wide(x), w64 = wide(w), y64 = sum_last(mul(x64, w64));
        backward_from(y64, reshape(wide(dy), y64.shape));
        check(y, reshape(detached(y64), y.shape), D);
        check(dx, x64.gradient->value, 1), check(dw, w64.gradient->value, N);
    }
    const double GB_ms = 1e-6 * sizeof(float);  // of one number in one ms, in GB/s
    const MemoryRates rates = {GB_ms * (N * D + D + N) / forward,
                               GB_ms * (2 * N * D + 2 * D + N) / backward,
                               GB_ms * 2 * N * D / copied};
    table.row(N, D, forward, rates.forward, backward, rates.backward, rates.copy,
              small ? strprintf("%.1e", error) : "");
    return rates;
}
static void answer_weighted_sum(const MemoryRates& r) {
    for (auto [pass, rate] : {std::pair{"forward", r.forward}, {"backward", r.backward}}) {
        answer("", "Memory %s %s of the largest x: it moves %.1f GB/s, a copy of x %.1f.",
               rate >= 0.8 * r.copy ? "bounds" : "does not bound", pass, rate, r.copy);
    }
    answer("",
           "Per number of x, forward does two FLOPs and reads 4 bytes, backward does three, reads "
           "4 bytes and writes 4.");
}
int cmd_weighted_sum(const Options& o) {
    context.device = choose_device(o.device);
    Table table{
        "weighted_sum: forward and backward, fp32, median of 10 runs after 2, errors against fp64",
        {"N", "D", "forward ms", "GB/s", "backward ms", "GB/s", "copy GB/s", "max error"}};
    for (auto [N, D] :
         {std::pair{1, 1}, {1, 7}, {3, 1}, {31, 33}, {257, 129}, {1000, 1023}, {5, 4097}}) {
        weighted_sum_row(table, N, D);
    }
    const MemoryRates largest =
        o.quick ? weighted_sum_row(table, 2048, 512) : weighted_sum_row(table, 65536, 4096);
    print(table);
    answer_weighted_sum(largest);
    return 0;
}
