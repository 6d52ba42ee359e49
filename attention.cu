// attention.cu: sections 1.2.1 to 1.3.1 of the handout, each with its experiment and answers.
//   1.2.1  naive: attention by its definition; pytorch_attention
//   1.3    fused: its softmax in one kernel; torch_compile (a)
//   1.3.1  weighted_sum, the warm-up kernel
// Last comes how these experiments, and those of 1.3.2 and 1.3.3, run and time an implementation's
// two passes, and what tables and answers say of the times: attention.h has a list.
// Read the equations below and attention_naive first. If you have never read a CUDA kernel, begin
// with weighted_sum_kernel. flash.cu goes on with 1.3.2.
//
//   S = Q K^T / sqrt(D)      S_ij = -inf where key j may not be seen by query i (causal: j > i)
//   P = softmax(S)           row by row, with m_i = max_j S_ij:
//                            P_ij = exp(S_ij - m_i) / sum_j exp(S_ij - m_i)
//   O = P V
// Q [B,H,Tq,D], K and V [B,H,Tk,D], O [B,H,Tq,D]; S and P are [B,H,Tq,Tk]. Only S and P, and
// backward's dP and dS, grow with T^2. The two products cost 4*B*H*Tq*Tk*D FLOPs, the softmax
// 5*B*H*Tq*Tk: 4D/5 times less, yet in eager mode it takes about as long as the products or longer,
// because each of its kernels moves all of S through memory.
//
// Backward, given dO (handout, eq. 13-19; D_i is not the head size):
//   dV = P^T dO,  dP = dO V^T,  dS_ij = P_ij (dP_ij - D_i) with D_i = sum_j P_ij dP_ij,
//   dQ = dS K / sqrt(D),  dK = dS^T Q / sqrt(D).
#include "attention.h"
#include "lib/gpu.h"

// -------------------------------------------------------------------------------------------------
// 1.2.1, naive: every operation of the handout's model is a kernel (mode eager), and every
// intermediate is an array in memory.

static Shape shape_of_L(const Tensor& q) { return {q.dim(0), q.dim(1), q.dim(2)}; }

// Returns O [B,H,Tq,D], and writes L [B,H,Tq] if it is not null. The tape does the backward.
static Tensor attention_naive(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                              Tensor* L) {
    Range range("attention");
    Tensor s, p;
    {
        Range r("scores");
        s = scale(matmul(q, k, true), 1 / sqrt((double)q.dim(-1)));
    }
    if (causal) {
        Range r("mask");
        Tensor i = reshape(arange(q.dim(-2)), {q.dim(-2), 1});
        Tensor j = arange(k.dim(-2));
        s = where(greater_equal(i, j), s, -INFINITY);
    }
    {
        Range r("softmax");
        Tensor m = max_last(s);
        s = sub(s, m);
        Tensor e = exp(s);  // under autocast in fp32, and so are sum and p. The tape keeps e and p
        Tensor sum = sum_last(e);
        p = div(e, sum);
        if (L) { *L = reshape(add(detached(m), log(detached(sum))), shape_of_L(q)); }
    }
    Range r("values");
    return matmul(p, v);
}

// -------------------------------------------------------------------------------------------------
// 1.2.1 pytorch_attention: naive's passes in batches of 8, without heads or a mask, in fp32, on a
// grid of head sizes and lengths. It prints times and memory, then (a): where memory runs out, what
// is saved for backward, and an account of it. 1.3's torch_compile (a) runs on the same grid.

constexpr int GRID_BATCH = 8;

// Returns the bytes that a forward and a backward hold at most, predicted. It is defined among the
// last functions of this file, with the others that run an implementation.
static size_t peak_of_passes(const AttentionImpl& impl, const AttentionCase& c, DType dtype);

// Returns a timer that takes n runs, after 3 others.
static PassTimer time_n_runs(int n) {
    return [=](const Job& prepare, const Job& f) {
        return stats_of(time_queued_ms(3, n, prepare, f));  // 3: grid_caption names it, too
    };
}

static AttentionRuns run_grid(const Options& o, const AttentionImpl* other) {
    vector<int> lengths = {256, 1024, 4096, 8192, 16384};
    if (o.quick) { lengths = {64, 128, 256}; }
    return time_all(other, GRID_BATCH, false, F32, lengths, {time_n_runs(o.steps), false});
}
static string grid_caption(const Options& o, const char* what) {
    return strprintf(
        "%s; batch %d, no heads, no mask, precision fp32, 3 warmup, medians; passes of each kind: "
        "%d",
        what, GRID_BATCH, o.steps);
}

// Returns the bytes that naive holds when backward starts, in fp32: exp(scores - m) and P; q, k, v,
// O and dO; of each row the maximum's index and the sum. S is the length.
static double saved_by_naive(double B, double S, double D) {
    return 4 * B * (2 * S * S + 5 * S * D + 2 * S);
}

struct TooLong {  // the smallest power of 2 whose passes do not fit, predicted
    int S;
    size_t peak, available;  // bytes: what they would hold at most, and what there is
};

// Prints (a): how many runs did not fit; how the memory saved for backward grows, by the two
// longest runs of the first head size that fit; an account of the smallest that does not; and how
// flash does without.
static void answer_pytorch_attention(const AttentionRuns& runs, const TooLong& t) {
    const int D = runs[0].D;
    AttentionRuns fit;  // of that head size
    size_t oom = 0;
    for (const AttentionRun& r : runs) {
        oom += r.naive.oom > 0;
        if (r.D == D && !r.naive.oom) { fit.push_back(r); }
    }
    answer("a", "Memory runs out in %zu of the %zu configurations.", oom, runs.size());

    if (fit.size() > 1) {
        const AttentionRun &last = fit.back(), &before = fit[fit.size() - 2];
        answer(
            "a",
            "The memory held when backward starts, at D %d, grows %.2f times from S %d to %d. It "
            "is then %.1f MiB, of which the formula below explains %.1f.",
            D, (double)last.naive.held / before.naive.held, before.S, last.S,
            mib_of(last.naive.held), mib_of(saved_by_naive(GRID_BATCH, last.S, D)));
    }

    const double square = 4.0 * GRID_BATCH * t.S * t.S;  // bytes of an array of B S^2
    answer(
        "a",
        "If S doubles on at D %d, the first that does not fit is S %d: it needs %.1f GiB of %.1f "
        "(predicted). When backward starts, it holds exp(scores - m) and P, 2 x 4 B S^2 = 2 x 4 x "
        "%d x %d^2 bytes = %.1f GiB; q, k, v, O and dO, 5 x 4 B S D = %.1f MiB; and two "
        "numbers per row, 2 x 4 B S = %.1f MiB. At backward's peak it holds %.0f arrays of B "
        "S^2, dP among them.",
        D, t.S, to_gib(t.peak), to_gib(t.available), GRID_BATCH, t.S, to_gib(2 * square),
        mib_of(20.0 * GRID_BATCH * t.S * D), mib_of(8.0 * GRID_BATCH * t.S),
        floor(t.peak / square));
    answer("a",
           "FlashAttention removes this cost: it keeps L, one number per query, and computes P "
           "again in backward. It would hold q, k, v, O, dO and L, %.1f MiB.",
           mib_of(4 * GRID_BATCH * t.S * (5.0 * D + 1)));
}

// Times naive on the grid, and prints the table, in public write-ups' units and column names, and
// the answers. Returns 0.
int cmd_pytorch_attention(const Options& o) {
    choose_device(o.device);
    const AttentionRuns runs = run_grid(o, nullptr);
    Table table{
        grid_caption(o, "pytorch_attention: operation by operation; times in s, memory in MiB"),
        {"d_model", "seq_len", "forward_time", "backward_time", "memory_usage_mb", "status"}};
    for (const AttentionRun& r : runs) {
        const PassTimes& t = r.naive;
        if (t.oom) {
            table.row(r.D, r.S, "N/A", "N/A", "N/A", oom_cell(t.oom));
            continue;
        }
        table.row(r.D, r.S, strprintf("%.6f", t.ms[FORWARD_PASS].median / 1e3),
                  strprintf("%.6f", t.ms[BACKWARD_PASS].median / 1e3),
                  strprintf("%.2f", mib_of(t.held)), "OK");
    }
    print(table);

    TooLong t = {1, 0, available_memory(context.device)};
    while (t.peak <= t.available) {
        t.S *= 2;
        const AttentionCase c{GRID_BATCH, 1, t.S, t.S, runs[0].D, false};
        t.peak = peak_of_passes(impl_named("naive"), c, F32);
    }
    answer_pytorch_attention(runs, t);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// 1.3, the fused softmax: S [N,Tk] becomes P in place; row n holds query n % Tq, and causal rows
// stop at their own key.
//   P_nj = exp(S_nj - L_n),  L_n = log sum_j exp S_nj
//   dS_nj = P_nj (dP_nj - D_n),  D_n = sum_j P_nj dP_nj (D_i in the code)
// The loop passes three times over a row. The kernel finds maximum and sum in one pass (the sum is
// rescaled when the maximum grows: "online" softmax) and writes in a second; per score it reads at
// most twice and writes once. Eager's max, sub, exp, sum and div read five times and write three
// times (argmax, for the tape, reads once more). The kernel's maxima start from a finite number: a
// score of -inf then adds exp(-inf) = 0, where -inf - -inf would be NaN.

// Overwrites S [N,Tk] with P, and writes L [N] if it is not null. Sums are fp64. Small arrays stay
// on one core: to start the others would take longer.
template <class T>
static void softmax_cpu(T* S, Wide<T>* L, int64_t N, int Tq, int Tk, bool causal) {
    using Number = Wide<T>;
#pragma omp parallel for if (N * Tk > 16384)
    for (int64_t n = 0; n < N; n++) {
        T* s = S + n * Tk;
        const int keys = keys_seen(causal, (int)(n % Tq), Tk);
        Number m = -INFINITY;
        double sum = 0;
        for (int j = 0; j < keys; j++) { m = max<Number>(m, s[j]); }
        for (int j = 0; j < keys; j++) { sum += exp(s[j] - m); }
        for (int j = 0; j < Tk; j++) { s[j] = j < keys ? Number(exp(s[j] - m) / sum) : Number(0); }
        if (L) { L[n] = Number(m + log(sum)); }
    }
}

// Overwrites dP [N,Tk] with dS, given P [N,Tk].
template <class T>
static void softmax_backward_cpu(T* dP, const T* P, int64_t N, int Tq, int Tk, bool causal) {
    using Number = Wide<T>;
#pragma omp parallel for if (N * Tk > 16384)
    for (int64_t n = 0; n < N; n++) {
        T* dp = dP + n * Tk;
        const T* p = P + n * Tk;
        const int keys = keys_seen(causal, (int)(n % Tq), Tk);
        double D_i = 0;
        for (int j = 0; j < keys; j++) { D_i += (double)p[j] * dp[j]; }
        for (int j = 0; j < Tk; j++) {  // behind the keys P is 0, and so is dS
            dp[j] = j < keys ? p[j] * (dp[j] - Number(D_i)) : Number(0);
        }
    }
}

#ifdef HAVE_CUDA
constexpr int ROW_THREADS = 256;  // of a block that RUN launches; with a warp per row: 8 rows

// Does what softmax_cpu does, with a warp per row: neighbouring lanes read neighbouring columns,
// and a short row's second pass finds it in L1. softmax_in_place, below, has RUN(softmax, ...), a
// macro of lib/gpu.h. It calls softmax_cpu or, on a GPU,
//   softmax_kernel<<<ceil_div(N * WARP, ROW_THREADS), ROW_THREADS, 0, stream()>>>(S, L, N, Tq, Tk,
//                                                                                 causal);
// that is so many blocks of 256 threads, no dynamic shared memory, in the compute stream.
template <class T>
__global__ void softmax_kernel(T* S,        // [N,Tk]
                               Wide<T>* L,  // [N], or null
                               int64_t N, int Tq, int Tk, bool causal) {
    int64_t n = thread_number() / WARP;
    int lane = threadIdx.x % WARP;
    if (n >= N) { return; }  // a warp leaves as one, so the shuffles below stay legal
    T* s = S + n * Tk;
    int keys = keys_seen(causal, (int)(n % Tq), Tk);

    float m = -FLT_MAX;
    float sum = 0;
    for (int j = lane; j < keys; j += WARP) {
        float x = s[j];
        float larger = fmaxf(m, x);
        sum = sum * expf(m - larger) + expf(x - larger);
        m = larger;
    }
    float row_m = warp_max(m);
    // A lane without a column, or with scores of -inf alone, has a sum of 0.
    float row_sum = warp_sum(sum * expf(m - row_m));
    float inverse = 1 / row_sum;
    if (L && lane == 0) { L[n] = row_m + logf(row_sum); }

    for (int j = lane; j < Tk; j += WARP) {  // second pass
        s[j] = j < keys ? expf(s[j] - row_m) * inverse : 0.0f;
    }
}

// Does what softmax_backward_cpu does, with a warp per row.
template <class T>
__global__ void softmax_backward_kernel(T* dP,       // [N,Tk]
                                        const T* P,  // [N,Tk]
                                        int64_t N, int Tq, int Tk, bool causal) {
    int64_t n = thread_number() / WARP;
    int lane = threadIdx.x % WARP;
    if (n >= N) { return; }
    dP += n * Tk;
    P += n * Tk;
    int keys = keys_seen(causal, (int)(n % Tq), Tk);

    float D_i = 0;
    for (int j = lane; j < keys; j += WARP) { D_i += P[j] * dP[j]; }
    D_i = warp_sum(D_i);
    for (int j = lane; j < Tk; j += WARP) {  // second pass
        dP[j] = j < keys ? P[j] * (dP[j] - D_i) : 0.0f;
    }
}
#endif

// Overwrites x [B,H,Tq,Tk]. If P is null, x holds the scores S and becomes P, and L [B,H,Tq] is
// written if it is not null. Else x holds dP and becomes dS. (+zero has the type Wide<T> of L.)
static void softmax_in_place(const Tensor& x, const Tensor& L, const Tensor& P, bool causal) {
    Range range("softmax");
    const int Tq = (int)x.dim(-2), Tk = (int)x.dim(-1);
    const int64_t N = x.size() / Tk;
    if (x.device() == META) { return; }

    with_type(x.dtype, [&](auto zero) {
        if (P) {
            RUN(softmax_backward, x.device(), ceil_div(N * WARP, ROW_THREADS), x.as(zero),
                P.as(zero), N, Tq, Tk, causal);
        } else {
            RUN(softmax, x.device(), ceil_div(N * WARP, ROW_THREADS), x.as(zero), L.as(+zero), N,
                Tq, Tk, causal);
        }
    });
}

// -------------------------------------------------------------------------------------------------
// 1.3, fused: the products stay the library's, everything between them is one kernel, and S and P
// share one array.

// Returns O [B,H,Tq,D], and writes L [B,H,Tq] if it is not null. The backward is recorded as one
// step of the tape.
static Tensor attention_fused(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                              bool causal, Tensor* L) {
    Range range("attention");
    Tensor q = contiguous(autocast_operand(q_in));
    Tensor k = contiguous(autocast_operand(k_in));
    Tensor v = contiguous(autocast_operand(v_in));
    const double scale = 1 / sqrt((double)q.dim(-1));
    Tensor p = empty({q.dim(0), q.dim(1), q.dim(2), k.dim(2)}, q.dtype);
    Tensor o = empty(q.shape, q.dtype);

    gemm(p, q, false, k, true, scale);  // S
    if (L) { *L = empty(shape_of_L(q), q.dtype == F64 ? F64 : F32); }
    softmax_in_place(p, L ? *L : Tensor(), Tensor(), causal);  // S becomes P
    gemm(o, p, false, v, false);

    // p, the probabilities by now, is the only [Tq,Tk] that stays
    record(o, {q, k, v}, [q, k, v, p, scale, causal](const Tensor& dO_in) {
        Tensor dO = contiguous(dO_in);
        Tensor dS = empty(p.shape, p.dtype);
        add_gemm(v.gradient, p, true, dO, false);
        gemm(dS, dO, false, v, true);               // dP
        softmax_in_place(dS, Tensor(), p, causal);  // dP becomes dS
        add_gemm(q.gradient, dS, false, k, false, scale);
        add_gemm(k.gradient, dS, true, q, false, scale);
    });
    return o;
}

static bool any_float(DType, int64_t) { return true; }
static const AddRow<AttentionImpl> attention_impls[] = {
    {{"naive", CPU, 10, any_float, attention_naive}},
    {{"fused", CPU, 20, any_float, attention_fused}},
    // These need no #ifdef: a CPU build never asks for them.
    {{"naive", CUDA, 10, any_float, attention_naive}},
    {{"fused", CUDA, 20, any_float, attention_fused}},
};
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
    return (context.mode == EAGER ? attention_naive : attention_fused)(q, k, v, causal, nullptr);
}

// -------------------------------------------------------------------------------------------------
// 1.3 torch_compile (a): attention with the fused softmax against naive, on pytorch_attention's
// grid. It prints the times of both passes, and on how many sizes each is faster.

static void answer_torch_compile_attention(const AttentionRuns& runs) {
    answer("a",
           "Compiled attention's forward is %s. Its backward is %s. \"Compiled\" is our softmax, "
           "fused by hand; torch.compile itself did not run.",
           compared(runs, FORWARD_PASS).c_str(), compared(runs, BACKWARD_PASS).c_str());
}

// Times naive and fused on the grid, and prints the table and the answer.
void torch_compile_attention(const Options& o) {
    const AttentionRuns runs = run_grid(o, &impl_named("fused"));
    Table table{grid_caption(o,
                             "torch_compile (a): attention, vanilla = operation by operation, "
                             "compiled = fused softmax"),
                {"d_model", "seq_len", "vanilla fw ms", "compiled fw ms", "speedup fw",
                 "vanilla bw ms", "compiled bw ms", "speedup bw"}};
    for (const AttentionRun& r : runs) {
        table.row(r.D, r.S,  // forward's cells follow
                  ms_cell(r.naive, FORWARD_PASS), ms_cell(r.other, FORWARD_PASS),
                  speedup_cell(r, FORWARD_PASS),  // backward's follow
                  ms_cell(r.naive, BACKWARD_PASS), ms_cell(r.other, BACKWARD_PASS),
                  speedup_cell(r, BACKWARD_PASS));
    }
    print(table);
    answer_torch_compile_attention(runs);
}

// -------------------------------------------------------------------------------------------------
// 1.3.1 weighted_sum: the warm-up kernel.
//   y_n = sum_d w_d x_nd                            x [N,D], w [D] -> y [N]
//   dx_nd = w_d dy_n,  dw_d = sum_n x_nd dy_n
// On a GPU memory decides: forward moves 4 N D bytes; backward reads x and writes dx, 8 N D.

// Writes y [N], from x [N,D] and w [D]. Sums are fp64, rounded once.
static void weighted_sum_cpu(float* y, const float* x, const float* w, int64_t N, int64_t D) {
#pragma omp parallel for if (N * D > 16384)
    for (int64_t n = 0; n < N; n++) {
        double sum = 0;
        for (int64_t d = 0; d < D; d++) { sum += (double)w[d] * x[n * D + d]; }
        y[n] = (float)sum;
    }
}

// Writes dx [N,D] and dw [D], from dy [N], x [N,D] and w [D].
static void weighted_sum_backward_cpu(float* dx, float* dw, const float* dy, const float* x,
                                      const float* w, int64_t N, int64_t D) {
    vector<double> sum(D);
    for (int64_t n = 0; n < N; n++) {
        for (int64_t d = 0; d < D; d++) {
            dx[n * D + d] = w[d] * dy[n];
            sum[d] += (double)dy[n] * x[n * D + d];
        }
    }
    for (int64_t d = 0; d < D; d++) { dw[d] = (float)sum[d]; }
}

#ifdef HAVE_CUDA
// Writes y. A warp takes a row: its lanes read neighbouring columns, so a load of the warp is one
// piece of 128 bytes.
__global__ void weighted_sum_kernel(float* y,        // [N]
                                    const float* x,  // [N,D]
                                    const float* w,  // [D]
                                    int64_t N, int64_t D) {
    int64_t n = thread_number() / WARP;
    int lane = threadIdx.x % WARP;
    if (n >= N) { return; }
    float sum = 0;
    // Unrolled, several loads are under way at once.
#pragma unroll 8
    for (int64_t d = lane; d < D; d += WARP) { sum += w[d] * x[n * D + d]; }
    sum = warp_sum(sum);
    if (lane == 0) { y[n] = sum; }
}

constexpr int SUM_ROWS = 8;

// Writes dx, and dw in parts. dw sums over all rows, so it takes two steps: each block sums up its
// own `chunk` rows, and lib/tensor.cu's sum adds the chunks up. Atomics would add in no fixed
// order. A block has 32 columns, and SUM_ROWS rows at a time.
__global__ void weighted_sum_backward_kernel(float* dx,        // [N,D]
                                             float* partial,   // [chunks,D]
                                             const float* dy,  // [N]
                                             const float* x,   // [N,D]
                                             const float* w,   // [D]
                                             int64_t N, int64_t D, int64_t chunk) {
    __shared__ float sums[SUM_ROWS][WARP];
    int64_t d = blockIdx.x * (int64_t)WARP + threadIdx.x;
    int64_t first = blockIdx.y * chunk;
    int64_t end = min(first + chunk, N);

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

struct WeightedSum {
    int64_t N, D;
    Tensor x = empty({N, D}, F32), dx = empty({N, D}, F32);
    Tensor w = empty({D}, F32), dw = empty({D}, F32);
    Tensor y = empty({N}, F32), dy = empty({N}, F32);
};

// Writes y, on the device of the tensors.
static void weighted_sum_forward(const WeightedSum& t) {
    RUN(weighted_sum, t.x.device(), ceil_div(t.N * WARP, ROW_THREADS), t.y.as<float>(),
        t.x.as<float>(), t.w.as<float>(), t.N, t.D);
}

// Writes dx and dw, likewise. On a GPU it cuts the rows into as many chunks as keep the chip busy
// (16 blocks for each multiprocessor). A chunk has at least 64 rows: with more chunks it would cost
// more to add up their sums, by a copy that transposes them, a sum, and a copy to dw.
static void weighted_sum_backward(const WeightedSum& t) {
    const int64_t N = t.N, D = t.D;
#ifdef HAVE_CUDA
    if (t.x.device() == CUDA) {
        const int strips = ceil_div(D, WARP);
        const int chunk = max(64, ceil_div(N * strips, multiprocessors() * 16));
        const int chunks = ceil_div(N, chunk);
        Tensor partial = empty({chunks, D}, F32, WORKSPACE);
        LAUNCH(weighted_sum_backward_kernel, dim3(strips, chunks), dim3(WARP, SUM_ROWS),
               t.dx.as<float>(), partial.as<float>(), t.dy.as<float>(), t.x.as<float>(),
               t.w.as<float>(), N, D, chunk);
        return copy_or_add(t.dw, reshape(sum_last(transpose(partial, 0, 1)), {D}), false);
    }
#endif
    weighted_sum_backward_cpu(t.dx.as<float>(), t.dw.as<float>(),  // written
                              t.dy.as<float>(), t.x.as<float>(), t.w.as<float>(), N, D);
}

// -------------------------------------------------------------------------------------------------
// 1.3.1, its experiment: both passes at odd sizes and at a large one, timed. Where x has at most
// 2^20 numbers, they are compared with what the tape makes of sum(w x) in fp64. It prints times,
// rates and errors, then whether memory bounds each pass.

// Returns the largest error of y, dx and dw against fp64; fails where one is above its tolerance.
static double weighted_sum_error(const WeightedSum& t) {
    RestoreContext restore;
    context.device = CPU;
    auto wide = [](const Tensor& x) { return require_gradient(cast(to_device(x, CPU), F64)); };
    const Tensor x = wide(t.x), w = wide(t.w), y = sum_last(mul(x, w));
    backward_from(y, reshape(wide(t.dy), y.shape));

    double error = 0;
    auto check = [&](const Tensor& got, const Tensor& want, int64_t terms) {
        // Rounding errors add up like a random walk, so the bound grows with the root of the number
        // of terms.
        const double tolerance = 1e-6 * sqrt((double)terms) + 1e-6;
        const Comparison c = compare(got, want, tolerance, 4 * tolerance);
        if (!c.ok()) {
            fail("weighted_sum of %s: %s", to_string(t.x.shape).c_str(), to_string(c).c_str());
        }
        error = max(error, c.max_abs);
    };
    check(t.y, reshape(detached(y), t.y.shape), t.D);
    check(t.dx, x.gradient->value, 1);
    check(t.dw, w.gradient->value, t.N);
    return error;
}

struct MemoryRates {
    double forward, backward, copy;  // GB/s; copy: of x
};
// Adds the row of x [N,D] to the table, and returns its rates.
static MemoryRates weighted_sum_row(Table& table, int64_t N, int64_t D) {
    const WeightedSum t = {N, D};
    fill_normal(t.x, 0, 1);
    fill_normal(t.w, 0, 2);
    fill_normal(t.dy, 0, 3);

    const double copied = median_ms([&] { copy(t.dx, t.x); });
    const double forward = median_ms([&] { weighted_sum_forward(t); });
    const double backward = median_ms([&] { weighted_sum_backward(t); });

    const double GB_per_s = 1e-6 * sizeof(float);  // of one number per ms
    const MemoryRates rates = {GB_per_s * (N * D + D + N) / forward,
                               GB_per_s * (2 * N * D + 2 * D + N) / backward,
                               GB_per_s * 2 * N * D / copied};
    table.row(N, D, forward, rates.forward, backward, rates.backward, rates.copy,
              // a large one's truth would take 9 GB
              N * D <= 1 << 20 ? strprintf("%.1e", weighted_sum_error(t)) : "");
    return rates;
}

// Prints for each pass whether it moves at least 0.8 of the bytes per second that a copy moves.
static void answer_weighted_sum(const MemoryRates& r) {
    for (auto [pass, rate] : {pair{"forward", r.forward}, {"backward", r.backward}}) {
        answer(
            "",
            "Memory %s %s of the largest x: it moves %.1f GB/s, a copy of x %.1f. (Memory bounds "
            "what moves at least 0.8 of a copy's rate.)",
            rate >= 0.8 * r.copy ? "bounds" : "does not bound", pass, rate, r.copy);
    }
    answer("",
           "Per number of x, forward does two FLOPs and reads 4 bytes, backward does three, reads "
           "4 bytes and writes 4.");
}

// Times all sizes, checks those of at most 2^20 numbers, and prints the table and the answer.
// Returns 0.
int cmd_weighted_sum(const Options& o) {
    choose_device(o.device);
    Table table{
        "weighted_sum: forward and backward, fp32, median of 10 runs after 2, errors against fp64",
        {"N", "D", "forward ms", "GB/s", "backward ms", "GB/s", "copy GB/s", "max error"}};
    for (auto [N, D] :
         {pair{1, 1}, {1, 7}, {3, 1}, {31, 33}, {257, 129}, {1000, 1023}, {5, 4097}}) {
        weighted_sum_row(table, N, D);
    }
    const MemoryRates largest =
        o.quick ? weighted_sum_row(table, 2048, 512) : weighted_sum_row(table, 65536, 4096);
    print(table);
    answer_weighted_sum(largest);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// 1.2.1 to 1.3.3: how experiments run and time the two passes of an implementation.

// Returns normal inputs with a dO, on context.device. Equal seeds give equal inputs.
AttentionTensors random_inputs(const AttentionCase& c, DType dtype, uint64_t seed) {
    auto random = [&](int T, uint64_t key) {
        const Tensor t = empty({c.B, c.H, T, c.D}, dtype, INPUTS);
        fill_normal(t, seed, key);
        return t;
    };
    return {random(c.Tq, 0), random(c.Tk, 1), random(c.Tk, 2), c.causal, random(c.Tq, 3)};
}

// Sets autocast for operands of this dtype, so that products leave bf16 and fp16 as they are.
static void autocast_to(DType dtype) {
    if (dtype == BF16) { context.precision = PREC_BF16; }
    if (dtype == F16) { context.precision = PREC_FP16; }
}

void run_pass(void (*pass)(const AttentionTensors&), const AttentionTensors& t) {
    if (t.q.device() != META) { pass(t); }
}

// Runs the passes of one implementation on inputs that are row-major and of one type. Results
// appear in t.
struct Passes {
    const AttentionImpl& impl;
    AttentionTensors t;

    Passes(const AttentionImpl& impl, const AttentionTensors& in) : impl(impl), t(in) {
        for (Tensor* x : {&t.q, &t.k, &t.v}) { *x = require_gradient(*x); }
    }

    // Computes o. An implementation with `run` computes L only if with_L; one with passes by
    // hand always does, since its backward reads L.
    void forward(bool with_L = false) {
        if (impl.forward) {
            t.o = empty(t.q.shape, t.q.dtype);
            t.L = empty(shape_of_L(t.q), F32);
            return run_pass(impl.forward, t);
        }
        RestoreContext restore;
        autocast_to(t.q.dtype);
        t.o = impl.run(t.q, t.k, t.v, t.causal, with_L ? &t.L : nullptr);
    }

    // Computes dq, dk and dv from dO and what forward left.
    void backward() {
        if (impl.backward) {
            t.dq = empty(t.q.shape, t.q.dtype);
            t.dk = empty(t.k.shape, t.k.dtype);
            t.dv = empty(t.v.shape, t.v.dtype);
            return run_pass(impl.backward, t);
        }
        backward_from(t.o, t.dO);
        t.dq = t.q.gradient->value;
        t.dk = t.k.gradient->value;
        t.dv = t.v.gradient->value;
    }

    // Frees everything but the inputs.
    void reset() {
        clear_tape();
        for (Tensor* x : {&t.q, &t.k, &t.v}) { x->gradient->value = Tensor(); }
        t.o = t.L = t.dq = t.dk = t.dv = Tensor();
    }
};

// Runs the forward, and the backward if there is a dO. Returns O and L; and dQ, dK and dV.
vector<Tensor> outputs_of(const AttentionImpl& impl, const AttentionTensors& in) {
    Passes p(impl, in);
    p.forward(true);
    if (in.dO) { p.backward(); }
    clear_tape();

    vector<Tensor> outputs = {detached(p.t.o), p.t.L, p.t.dq, p.t.dk, p.t.dv};
    outputs.resize(in.dO ? 5 : 2);
    return outputs;
}

// Returns the implementation with this name on context.device. "auto" is the fastest flash, or
// fused where no flash takes this. It is a usage error if it does not take dtype and D.
const AttentionImpl& impl_named(const string& name, DType dtype, int64_t D) {
    string row = name;
    if (name == "auto") {
        const AttentionImpl* fastest = fastest_flash(context.device, dtype, D);
        if (fastest) { return *fastest; }
        row = "fused";
    }
    for (const AttentionImpl& impl : table_of<AttentionImpl>()) {
        if (impl.name == row && impl.device == context.device && impl.takes(dtype, D)) {
            return impl;
        }
    }
    usage_error("--impl %s: takes no %s with head size %ld on %s", name.c_str(), name_of(dtype),
                (long)D, name_of(context.device));
}

// Returns the bytes that a forward and a backward hold at most, predicted.
static size_t peak_of_passes(const AttentionImpl& impl, const AttentionCase& c, DType dtype) {
    RestoreContext restore;
    autocast_to(dtype);
    return planned_peak([&] {
        Passes p(impl, random_inputs(c, dtype, 0));
        p.forward();
        p.backward();
    });
}

// Returns the times of an implementation's passes, and the bytes held when backward starts; or,
// where the passes do not fit into memory, the bytes that they need.
PassTimes pass_times(const AttentionImpl& impl, const AttentionCase& c, DType dtype,
                     const Effort& effort) {
    PassTimes t;
    const string row = strprintf("S %d, D %d, %s, %s", c.Tq, c.D, name_of(dtype), impl.name);
    t.oom = run_if_fits(row, peak_of_passes(impl, c, dtype), [&] {
        Passes p(impl, random_inputs(c, dtype, 0));
        auto reset = [&] { p.reset(); };
        auto reset_and_forward = [&] {
            p.reset();
            p.forward();
        };
        auto both = [&] {
            p.forward();
            p.backward();
        };
        t.ms[FORWARD_PASS] = effort.time(reset, [&] { p.forward(); });
        t.held = memory_use(context.device).now;  // by the last run, which nothing has reset
        t.ms[BACKWARD_PASS] = effort.time(reset_and_forward, [&] { p.backward(); });
        if (effort.both_passes) { t.ms[BOTH_PASSES] = effort.time(reset, both); }
        p.reset();
    });
    return t;
}

// Times naive and another implementation (null: naive alone) at each head size and length. Add
// only head sizes that flash_head_size knows: with another one the flash kernels fail.
AttentionRuns time_all(const AttentionImpl* other, int B, bool causal, DType dtype,
                       const vector<int>& lengths, const Effort& effort) {
    AttentionRuns runs;
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
// 1.2.1 to 1.3.2: what tables and answers say of such runs.

string ms_cell(const PassTimes& t, AttentionPass pass) {
    return t.oom ? oom_cell(t.oom) : strprintf("%.3f", t.ms[pass].median);
}
static bool both_fit(const AttentionRun& r) { return !r.naive.oom && !r.other.oom; }
string speedup_cell(const AttentionRun& r, AttentionPass pass) {
    return both_fit(r) ? strprintf("%.2fx", r.naive.ms[pass].median / r.other.ms[pass].median) : "";
}

// Returns the end of a sentence that compares the other implementation with naive:
// "faster in 17 of the 20 configurations that fit (0.58 to 5.76 times as fast), slower in 2, not
// told apart in 1. In 4 memory runs out"
string compared(const AttentionRuns& runs, AttentionPass pass) {
    int fit = 0, oom = 0, faster = 0, slower = 0;
    vector<double> factors;  // of those that are told apart
    for (const AttentionRun& r : runs) {
        if (!both_fit(r)) {
            oom++;
            continue;
        }
        fit++;
        const Stats &other = r.other.ms[pass], &naive = r.naive.ms[pass];
        const double factor = naive.median / other.median;
        // level() compares means, the table shows medians. A few late passes can turn the means
        // round: then the run counts as not told apart.
        const bool agree = (factor > 1) == (other.mean < naive.mean);
        if (!agree || level(other, naive) != "") { continue; }
        factors.push_back(factor);
        slower += factor < 1;
        faster += factor > 1;
    }

    string text = "faster in all ";
    if (fit == 0 || faster < fit) { text = strprintf("faster in %d of the ", faster); }
    text += counted(fit, "configuration") + " that fit";
    if (!factors.empty()) {
        const auto [least, most] = std::minmax_element(factors.begin(), factors.end());
        text += strprintf(" (%.2f to %.2f times as fast)", *least, *most);
    }
    if (slower > 0) { text += strprintf(", slower in %d", slower); }
    if (fit > faster + slower) {
        text += strprintf(", not told apart in %d", fit - faster - slower);
    }
    if (oom > 0) { text += strprintf(". In %d memory runs out", oom); }
    return text;
}
