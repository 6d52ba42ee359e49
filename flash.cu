// flash.cu: section 1.3 of the handout, FlashAttention-2 (Dao, 2023) from the plain formula to tensor cores.
//
// S = Q K^T / sqrt(D) and P = softmax(S) never exist as a whole. A block of Bq queries walks over the keys in blocks of
// Bk and keeps, a row, the largest score m so far, the sum l of exp(S_ij - m), and O so far, unnormalised:
//   1. S = Q K^T                        [Bq,Bk], of this block of keys only
//   2. m' = max(m, rowmax S)
//   3. P = exp(S - m'), a = exp(m - m')
//   4. l = a l + rowsum P
//   5. O = a O + P V
// and at the end O = O / l and L = m + log l. That is exact: a rescales what was summed under a smaller maximum.
// Memory is O(T), traffic (T/Bq) T D elements instead of T^2.
//
// Backward recomputes P = exp(S - L) block by block (no maximum is needed any more) and needs two sums, dK_j and dV_j
// over the queries and dQ_i over the keys:
//   6. D_i = sum_d dO_id O_id           [T]; equals sum_j P_ij dP_ij
//   7. dV = P^T dO      8. dP = dO V^T      9. dS = P (dP - D)      10. dQ = dS K / sqrt(D)
//   11. dK = dS^T Q / sqrt(D)
#include "cs336.h"
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#ifdef HAVE_OPENBLAS
#include <cblas.h>
#endif

// ---------------------------------------------------------------------------------------------------------------------
// weighted_sum (handout, 1.3.1): the warm-up kernel.
//   y_n = sum_d w_d x_nd                            x [N,D], w [D] -> y [N]
//   dx_nd = w_d dy_n,  dw_d = sum_n x_nd dy_n
// 2 FLOPs for each x that is read: memory decides. Forward moves 4 N D bytes; backward reads x and writes dx: 8 N D.

template <class T>
static void weighted_sum_cpu(T* y, const T* x, const T* w, int64_t N, int64_t D) {
#pragma omp parallel for if (N * D > 16384)
    for (int64_t n = 0; n < N; n++) {
        double sum = 0;
        for (int64_t d = 0; d < D; d++) { sum += (double)w[d] * x[n * D + d]; }
        y[n] = (T)sum;
    }
}
template <class T>
static void weighted_sum_backward_cpu(T* dx, T* dw, const T* dy, const T* x, const T* w, int64_t N, int64_t D) {
#pragma omp parallel if (N * D > 16384)
    {
#pragma omp for
        for (int64_t n = 0; n < N; n++) {
            for (int64_t d = 0; d < D; d++) { dx[n * D + d] = w[d] * dy[n]; }
        }
#pragma omp for
        for (int64_t strip = 0; strip < D; strip += 64) {  // 64 columns a thread: rows are still read in long pieces
            int64_t width = std::min<int64_t>(64, D - strip);
            double sum[64] = {};
            for (int64_t n = 0; n < N; n++) {
                for (int64_t d = 0; d < width; d++) { sum[d] += (double)dy[n] * x[n * D + strip + d]; }
            }
            for (int64_t d = 0; d < width; d++) { dw[strip + d] = (T)sum[d]; }
        }
    }
}

#ifdef __CUDACC__
// A warp takes a row: its lanes read neighbouring columns, so a load of the warp is one piece of 128 bytes.
__global__ void weighted_sum_kernel(float* y, const float* x, const float* w, int64_t N, int64_t D) {
    int64_t n = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (n >= N) { return; }
    float sum = 0;
#pragma unroll 8
    for (int64_t d = lane; d < D; d += WARP) { sum += w[d] * x[n * D + d]; }
    sum = warp_sum(sum);
    if (lane == 0) { y[n] = sum; }
}

// dw sums over all rows, which belong to different blocks, so it takes two steps: each block writes the sum over its
// own rows to partial [chunks,D], and a second kernel adds the chunks up. Atomics would take one step, but add in no
// fixed order. A block has 32 columns (a warp reads 32 neighbours) and 8 rows at a time.
constexpr int SUM_ROWS = 8;
__global__ void weighted_sum_backward_kernel(float* dx, float* partial, const float* dy, const float* x, const float* w,
                                             int64_t N, int64_t D, int64_t chunk) {
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
__global__ void sum_chunks_kernel(float* dw, const float* partial, int64_t chunks, int64_t D) {
    int64_t d = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (d >= D) { return; }
    float sum = 0;
#pragma unroll 8
    for (int64_t c = 0; c < chunks; c++) { sum += partial[c * D + d]; }
    dw[d] = sum;
}
#endif

static void weighted_sum_forward(const Tensor& y, const Tensor& x, const Tensor& w) {
    int64_t D = w.size(), N = y.size();
    if (y.device() == META || N == 0) { return; }
#ifdef __CUDACC__
    if (y.device() == CUDA) {
        weighted_sum_kernel<<<ceil_div(N * WARP, 256), 256, 0, stream()>>>(y.as<float>(), x.as<float>(), w.as<float>(),
                                                                           N, D);
        LAUNCH_CHECK();
        return;
    }
#endif
    if (x.dtype == F64) { return weighted_sum_cpu(y.as<double>(), x.as<double>(), w.as<double>(), N, D); }
    weighted_sum_cpu(y.as<float>(), x.as<float>(), w.as<float>(), N, D);
}
static void weighted_sum_backward(const Tensor& dx, const Tensor& dw, const Tensor& dy, const Tensor& x,
                                  const Tensor& w) {
    int64_t D = w.size(), N = dy.size();
    if (N == 0) { fill_zero(dw); }
    if (dx.device() == META || dx.size() == 0) { return; }
#ifdef __CUDACC__
    if (dx.device() == CUDA) {
        int64_t strips = ceil_div(D, WARP);  // as many chunks as keep the chip busy, but no more to add up than needed
        int64_t chunk = std::max<int64_t>(64, ceil_div(N * strips, 132 * 16)), chunks = ceil_div(N, chunk);
        Tensor partial = empty({chunks, D}, F32, WORKSPACE);
        weighted_sum_backward_kernel<<<dim3((unsigned)strips, (unsigned)chunks), dim3(WARP, SUM_ROWS), 0, stream()>>>(
            dx.as<float>(), partial.as<float>(), dy.as<float>(), x.as<float>(), w.as<float>(), N, D, chunk);
        LAUNCH_CHECK();
        sum_chunks_kernel<<<ceil_div(D, 128), 128, 0, stream()>>>(dw.as<float>(), partial.as<float>(), chunks, D);
        LAUNCH_CHECK();
        return;
    }
#endif
    if (x.dtype == F64) {
        return weighted_sum_backward_cpu(dx.as<double>(), dw.as<double>(), dy.as<double>(), x.as<double>(),
                                         w.as<double>(), N, D);
    }
    weighted_sum_backward_cpu(dx.as<float>(), dw.as<float>(), dy.as<float>(), x.as<float>(), w.as<float>(), N, D);
}

Tensor weighted_sum(const Tensor& x_in, const Tensor& w_in) {
    Range range("weighted_sum");
    Tensor x = contiguous(x_in), w = contiguous(w_in);
    bool known = x.dtype == F32 || (x.dtype == F64 && x.device() != CUDA);
    if (x.shape.empty() || w.shape != Shape{x.dim(-1)} || !known || w.dtype != x.dtype) {
        fail("weighted_sum: got x %s %s and w %s %s, expected fp32 x [...,D] and w [D]", name_of(x.dtype),
             to_string(x.shape).c_str(), name_of(w.dtype), to_string(w.shape).c_str());
    }
    Tensor y = empty(Shape(x.shape.begin(), x.shape.end() - 1), x.dtype);
    weighted_sum_forward(y, x, w);
    record(y, {x, w}, [x, w](const Tensor& dy) {
        Tensor dx = empty(x.shape, x.dtype), dw = empty(w.shape, w.dtype);
        weighted_sum_backward(dx, dw, contiguous(dy), x, w);
        add_gradient(x.gradient, dx);
        add_gradient(w.gradient, dw);
    });
    return y;
}

// Times one size, and compares y, dx and dw with the fp64 reference on the CPU; *ok becomes false if one is off.
static void weighted_sum_row(Table* table, int64_t N, int64_t D, int steps, uint64_t seed, bool* ok) {
    Tensor x = empty({N, D}, F32), w = empty({D}, F32), dy = empty({N}, F32), y = empty({N}, F32);
    Tensor dx = empty({N, D}, F32), dw = empty({D}, F32);
    fill_normal(x, seed, 1, 0, 1), fill_normal(w, seed, 2, 0, 1), fill_normal(dy, seed, 3, 0, 1);
    Stats forward = stats_of(time_ms(2, steps, [&] { weighted_sum_forward(y, x, w); }));
    Stats backward = stats_of(time_ms(2, steps, [&] { weighted_sum_backward(dx, dw, dy, x, w); }));

    Device device = context.device;
    context.device = CPU;
    auto fp64 = [](const Tensor& t) { return cast(to_device(t, CPU), F64); };
    Tensor x64 = fp64(x), w64 = fp64(w), dy64 = fp64(dy), y64 = empty({N}, F64);
    Tensor dx64 = empty({N, D}, F64), dw64 = empty({D}, F64);
    weighted_sum_forward(y64, x64, w64);
    weighted_sum_backward(dx64, dw64, dy64, x64, w64);
    double error = 0;
    auto check = [&](const Tensor& got, const Tensor& want, int64_t terms) {
        double tolerance = 1e-6 * std::sqrt((double)terms) + 1e-6;  // rounding errors of a sum grow like a random walk
        Comparison c = compare(got, want, tolerance, 4 * tolerance);
        error = std::max(error, c.max_abs);
        *ok = *ok && c.ok();
    };
    check(y, y64, D), check(dx, dx64, 1), check(dw, dw64, N);
    context.device = device;
    double GB = 1e9, ms = 1e-3;
    double forward_bytes = 4.0 * (N * D + D + N), backward_bytes = 4.0 * (2 * N * D + 2 * D + N);
    table->rows.push_back({name_of(device), std::to_string(N), std::to_string(D), strprintf("%.4g", forward.median),
                           strprintf("%.4g", forward_bytes / (forward.median * ms) / GB),
                           strprintf("%.4g", backward.median),
                           strprintf("%.4g", backward_bytes / (backward.median * ms) / GB), strprintf("%.1e", error)});
}
int cmd_weighted_sum(const Options& o) {
    Device chosen = choose_device(o.device);
    Table table;
    table.caption = strprintf(
        "weighted_sum: forward and backward, fp32, median of %d runs after 2, errors against fp64, commit %s%s",
        o.steps, commit().c_str(),
        o.quick          ? "; scaled down: --quick, smaller sizes"
        : chosen == CUDA ? ""
                         : "; scaled down: no GPU, smaller sizes");
    table.columns = {"device", "N", "D", "forward ms", "GB/s", "backward ms", "GB/s", "max error"};
    bool ok = true;
    std::vector<Shape> sizes = {{1, 1}, {1, 7}, {3, 1}, {31, 33}, {257, 129}, {1000, 1023}, {5, 4097}};
    for (Device device : {CPU, CUDA}) {
        if (device == CUDA && chosen != CUDA) { continue; }
        context.device = device;
        std::vector<Shape> all = sizes;
        all.push_back(o.quick ? Shape{2048, 512} : device == CUDA ? Shape{65536, 4096} : Shape{16384, 1024});
        for (const Shape& s : all) {
            progress("weighted_sum %s %s", name_of(device), to_string(s).c_str());
            weighted_sum_row(&table, s[0], s[1], o.steps, o.seed, &ok);
        }
    }
    context.device = chosen;
    print(table, o.format);
    if (!ok) { fail("weighted_sum: a result is off by more than rounding explains"); }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// The reference: one query at a time, by the definition, in fp64. Never optimised: all else is compared with it.
//   s_j = scale q_i k_j;  L_i = log sum_j exp s_j;  p_j = exp(s_j - L_i);  O_i = sum_j p_j v_j
//   dp_j = dO_i v_j;  D_i = sum_j p_j dp_j;  ds_j = p_j (dp_j - D_i)
//   dV_j += p_j dO_i;  dQ_i = scale sum_j ds_j k_j;  dK_j += scale ds_j q_i            (handout, eq. 13-19)
// q, k, v and dO are of type T, the results of type Out. The backward is computed where a.dO has data.

template <class T>
static T* head_on_cpu(const Heads& x, int b, int h) {
    return (T*)x.data + b * x.batch + h * x.head;
}
template <class T, class Out = T>
static void attention_reference_cpu(const AttentionArgs& a, int D) {
    using A = Wide<Out>;
#pragma omp parallel for
    for (int head = 0; head < a.B * a.H; head++) {
        int b = head / a.H, h = head % a.H;
        const T *q = head_on_cpu<T>(a.q, b, h), *k = head_on_cpu<T>(a.k, b, h), *v = head_on_cpu<T>(a.v, b, h);
        std::vector<double> s(a.Tk), dp(a.Tk), o(D), dQ(D), dK, dV;
        const T* dO = a.dO.data ? head_on_cpu<T>(a.dO, b, h) : nullptr;
        if (dO) { dK.resize((size_t)a.Tk * D), dV.resize((size_t)a.Tk * D); }
        for (int i = 0; i < a.Tq; i++) {
            int n = a.causal ? std::min(i + 1, a.Tk) : a.Tk;
            double m = -INFINITY, sum = 0, Di = 0;
            for (int j = 0; j < n; j++) {
                s[j] = 0;
                for (int d = 0; d < D; d++) { s[j] += (double)to_acc(q[i * a.q.row + d]) * to_acc(k[j * a.k.row + d]); }
                s[j] *= a.scale;
                m = std::max(m, s[j]);
            }
            for (int j = 0; j < n; j++) { sum += std::exp(s[j] - m); }
            double L = m + std::log(sum);
            a.L[(int64_t)head * a.Tq + i] = (float)L;
            std::fill(o.begin(), o.end(), 0.0);
            for (int j = 0; j < n; j++) {
                s[j] = std::exp(s[j] - L);  // from here on p_j
                for (int d = 0; d < D; d++) { o[d] += s[j] * to_acc(v[j * a.v.row + d]); }
            }
            for (int d = 0; d < D; d++) { from_acc((A)o[d], head_on_cpu<Out>(a.o, b, h) + i * a.o.row + d); }
            if (!dO) { continue; }
            for (int j = 0; j < n; j++) {
                dp[j] = 0;
                for (int d = 0; d < D; d++) {
                    dp[j] += (double)to_acc(dO[i * a.dO.row + d]) * to_acc(v[j * a.v.row + d]);
                    dV[(size_t)j * D + d] += s[j] * to_acc(dO[i * a.dO.row + d]);
                }
                Di += s[j] * dp[j];
            }
            std::fill(dQ.begin(), dQ.end(), 0.0);
            for (int j = 0; j < n; j++) {
                double ds = s[j] * (dp[j] - Di) * a.scale;
                for (int d = 0; d < D; d++) {
                    dQ[d] += ds * to_acc(k[j * a.k.row + d]);
                    dK[(size_t)j * D + d] += ds * to_acc(q[i * a.q.row + d]);
                }
            }
            for (int d = 0; d < D; d++) { from_acc((A)dQ[d], head_on_cpu<Out>(a.dq, b, h) + i * a.dq.row + d); }
        }
        for (int j = 0; dO && j < a.Tk; j++) {
            for (int d = 0; d < D; d++) {
                from_acc((A)dK[(size_t)j * D + d], head_on_cpu<Out>(a.dk, b, h) + j * a.dk.row + d);
                from_acc((A)dV[(size_t)j * D + d], head_on_cpu<Out>(a.dv, b, h) + j * a.dv.row + d);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// FlashAttention on the CPU: the handout's flash_forward (a), FlashAttention-2's algorithms 1 and 2, in fp32. The
// reason is the GPU's: a tile of S fits into a core's cache, all of S does not fit anywhere. Causal tiles above the
// diagonal are skipped, so half of the products disappear too, which the materialised version cannot do.

constexpr int CPU_BQ = 64, CPU_BK = 128;  // with D = 64: Q, K, V, S and O tiles take 128 KiB

// C = alpha op(A) op(B) + beta C; C is [M,N]. By one thread: the loops around it are the parallel ones.
static void tile_product(float* C, int64_t ldc, const float* A, int64_t lda, bool ta, const float* B, int64_t ldb,
                         bool tb, int M, int N, int K, float alpha, float beta) {
#ifdef HAVE_OPENBLAS
    cblas_sgemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, M, N, K, alpha, A,
                (int)lda, B, (int)ldb, beta, C, (int)ldc);
#else
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < N; j++) { C[i * ldc + j] = beta == 0 ? 0 : C[i * ldc + j] * beta; }
        for (int k = 0; k < K; k++) {
            float x = alpha * (ta ? A[k * lda + i] : A[i * lda + k]);
            if (tb) {
                for (int j = 0; j < N; j++) { C[i * ldc + j] += x * B[j * ldb + k]; }
            } else {
                for (int j = 0; j < N; j++) { C[i * ldc + j] += x * B[k * ldb + j]; }
            }
        }
    }
#endif
}
// e^x for x <= 0 within 2 ulp, without a branch or a call, so that the compiler makes vector code of loops over it:
// x log2(e) = n + f with |f| <= 1/2; 2^f is a polynomial (Taylor's, of degree 6, in f ln 2), 2^n goes into the
// exponent. NaN stays NaN: it compares as false.
static inline float exp_negative(float x) {
    x = x < -87.0f ? -87.0f : x;              // e^-87 = 1.6e-38: the last before the numbers lose bits
    float n = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 leaves no bits for a fraction: rounds to an integer
    uint32_t bits;
    memcpy(&bits, &n, 4);
    n -= 12582912.0f;
    float r = x - n * 0.693145752f - n * 1.42860677e-6f;  // ln 2 in two pieces: the first product is exact
    float p = 1 + r * (1 + r * (1 / 2.0f + r * (1 / 6.0f + r * (1 / 24.0f + r * (1 / 120.0f + r / 720)))));
    bits = (bits + 127) << 23;  // n's low bits, as the exponent
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

// Queries [q0, q0 + M) of one head: O and L. S is a tile of scratch.
static void flash_forward_tile_cpu(const AttentionArgs& a, int D, int head, int q0, float* S, float* O) {
    int b = head / a.H, h = head % a.H, M = std::min(CPU_BQ, a.Tq - q0);
    const float* q = head_on_cpu<float>(a.q, b, h) + q0 * a.q.row;
    int keys = a.causal ? std::min(a.Tk, q0 + M) : a.Tk;
    float m[CPU_BQ], l[CPU_BQ];
    for (int i = 0; i < M; i++) { m[i] = -INFINITY, l[i] = 0; }
    for (int k0 = 0; k0 < keys; k0 += CPU_BK) {
        int N = std::min(CPU_BK, keys - k0);
        tile_product(S, CPU_BK, q, a.q.row, false, head_on_cpu<float>(a.k, b, h) + k0 * a.k.row, a.k.row, true, M, N, D,
                     a.scale, 0);
        for (int i = 0; i < M; i++) {
            float *s = S + i * CPU_BK, larger = m[i], sum = 0;
            int seen = a.causal ? std::max(0, std::min(N, q0 + i + 1 - k0)) : N;
#pragma omp simd reduction(max : larger)
            for (int j = 0; j < seen; j++) { larger = s[j] > larger ? s[j] : larger; }
#pragma omp simd reduction(+ : sum)
            for (int j = 0; j < seen; j++) {
                s[j] = exp_negative(s[j] - larger);
                sum += s[j];
            }
            for (int j = seen; j < N; j++) { s[j] = 0; }
            float shrink = m[i] == larger ? 1 : std::exp(m[i] - larger);  // 0 in the first tile
            m[i] = larger, l[i] = l[i] * shrink + sum;
            for (int d = 0; k0 > 0 && d < D; d++) { O[i * D + d] *= shrink; }
        }
        tile_product(O, D, S, CPU_BK, false, head_on_cpu<float>(a.v, b, h) + k0 * a.v.row, a.v.row, false, M, D, N, 1,
                     k0 > 0);
    }
    for (int i = 0; i < M; i++) {
        float* o = head_on_cpu<float>(a.o, b, h) + (q0 + i) * a.o.row;
        for (int d = 0; d < D; d++) { o[d] = O[i * D + d] / l[i]; }
        a.L[(int64_t)head * a.Tq + q0 + i] = m[i] + std::log(l[i]);
    }
}
static void flash_forward_cpu(const AttentionArgs& a, int D) {
    one_blas_thread();
    int64_t heads = (int64_t)a.B * a.H, tiles = (a.Tq + CPU_BQ - 1) / CPU_BQ;
#pragma omp parallel
    {
        std::vector<float> S(CPU_BQ * CPU_BK), O(CPU_BQ * D);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < heads * tiles; i++) {  // the last tiles have the most keys, and go first
            int tile = (int)(tiles - 1 - i / heads);
            flash_forward_tile_cpu(a, D, (int)(i % heads), tile * CPU_BQ, S.data(), O.data());
        }
    }
}

// Keys [k0, k0 + N) of one head: dK and dV, and their share of dQ, added to dQ [Tq,D].
static void flash_backward_tile_cpu(const AttentionArgs& a, int D, int head, int k0, const float* delta, float* dQ,
                                    float* P, float* dS) {
    int b = head / a.H, h = head % a.H, N = std::min(CPU_BK, a.Tk - k0);
    const float *k = head_on_cpu<float>(a.k, b, h) + k0 * a.k.row, *v = head_on_cpu<float>(a.v, b, h) + k0 * a.v.row;
    float *dk = head_on_cpu<float>(a.dk, b, h) + k0 * a.dk.row, *dv = head_on_cpu<float>(a.dv, b, h) + k0 * a.dv.row;
    for (int j = 0; j < N; j++) {
        for (int d = 0; d < D; d++) { dk[j * a.dk.row + d] = dv[j * a.dv.row + d] = 0; }
    }
    for (int q0 = a.causal ? k0 / CPU_BQ * CPU_BQ : 0; q0 < a.Tq; q0 += CPU_BQ) {
        int M = std::min(CPU_BQ, a.Tq - q0);
        const float *q = head_on_cpu<float>(a.q, b, h) + q0 * a.q.row,
                    *dO = head_on_cpu<float>(a.dO, b, h) + q0 * a.dO.row;
        tile_product(P, CPU_BK, q, a.q.row, false, k, a.k.row, true, M, N, D, a.scale, 0);
        tile_product(dS, CPU_BK, dO, a.dO.row, false, v, a.v.row, true, M, N, D, 1, 0);
        for (int i = 0; i < M; i++) {
            float *p = P + i * CPU_BK, *ds = dS + i * CPU_BK;
            float L = a.L[(int64_t)head * a.Tq + q0 + i], Di = delta[(int64_t)head * a.Tq + q0 + i];
            int seen = a.causal ? std::max(0, std::min(N, q0 + i + 1 - k0)) : N;
#pragma omp simd
            for (int j = 0; j < seen; j++) {
                float x = p[j] - L;
                p[j] = exp_negative(x > 0 ? 0 : x);  // P <= 1, whatever L was rounded to
                ds[j] = p[j] * (ds[j] - Di) * a.scale;
            }
            for (int j = seen; j < N; j++) { p[j] = ds[j] = 0; }
        }
        tile_product(dv, a.dv.row, P, CPU_BK, true, dO, a.dO.row, false, N, D, M, 1, 1);
        tile_product(dk, a.dk.row, dS, CPU_BK, true, q, a.q.row, false, N, D, M, 1, 1);
        tile_product(dQ + (int64_t)q0 * D, D, dS, CPU_BK, false, k, a.k.row, false, M, D, N, 1, 1);
    }
}
// A thread works on a slice of a head: every `slices`-th key tile of it, which also evens out the causal triangle. dQ
// crosses key tiles, so each slice has a dQ of its own and they are added up at the end: deterministic, and O(S).
static void flash_backward_cpu(const AttentionArgs& a, int D) {
    one_blas_thread();
    int64_t heads = (int64_t)a.B * a.H, rows = heads * a.Tq, tiles = (a.Tk + CPU_BK - 1) / CPU_BK;
    int64_t slices = std::min((cpu_threads() + heads - 1) / heads, tiles);
    std::vector<float> delta(rows), dQ(slices * rows * D);
#pragma omp parallel
    {
#pragma omp for
        for (int64_t r = 0; r < rows; r++) {
            int b = (int)(r / a.Tq / a.H), h = (int)(r / a.Tq % a.H);
            const float *o = head_on_cpu<float>(a.o, b, h) + r % a.Tq * a.o.row,
                        *dO = head_on_cpu<float>(a.dO, b, h) + r % a.Tq * a.dO.row;
            for (int d = 0; d < D; d++) { delta[r] += o[d] * dO[d]; }
        }
        std::vector<float> P(CPU_BQ * CPU_BK), dS(CPU_BQ * CPU_BK);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < heads * slices; i++) {
            int head = (int)(i % heads), slice = (int)(i / heads);
            for (int64_t tile = slice; tile < tiles; tile += slices) {
                flash_backward_tile_cpu(a, D, head, (int)tile * CPU_BK, delta.data(),
                                        dQ.data() + (slice * heads + head) * a.Tq * D, P.data(), dS.data());
            }
        }
#pragma omp for
        for (int64_t r = 0; r < rows; r++) {
            int b = (int)(r / a.Tq / a.H), h = (int)(r / a.Tq % a.H);
            float* dq = head_on_cpu<float>(a.dq, b, h) + r % a.Tq * a.dq.row;
            for (int d = 0; d < D; d++) {
                dq[d] = 0;
                for (int64_t slice = 0; slice < slices; slice++) { dq[d] += dQ[(slice * rows + r) * D + d]; }
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// FlashAttention-2 in fp32, without tensor cores: every product is FFMAs on register tiles.
//
// Forward (FlashAttention-2, algorithm 1): a block owns a tile of Bq = 64 queries and streams K and V past it:
//   S = Q_i K_j^T;  m' = max(m, rowmax S);  P = exp(S - m');  l = e^(m-m') l + rowsum P;  O = e^(m-m') O + P V_j
//   and at the end O = O / l, L = m + log l.
// Backward (algorithm 2; handout, eq. 13-19), with D_i = rowsum(dO o O) computed first and P recomputed from L:
//   P = exp(S - L);  dV_j += P^T dO_i;  dP = dO_i V_j^T;  dS = P o (dP - D);  dK_j += dS^T Q_i;  dQ_i += dS K_j.
// dK and dV belong to a key tile, dQ to a query tile, so one of them crosses blocks. Two ways out:
//   - a block owns a key tile and adds its share of dQ with atomics: 5 products, sums in no fixed order;
//   - a second kernel, whose blocks own query tiles, recomputes S and dP for dQ: 7 products, the same bits every time.
//
// What bounds it: an SM issues 4 warp instructions a clock, and each FFMA is one, so everything else takes time away
// from the FFMAs. A thread's 4x8 piece of S costs (4 + 8) 16-byte loads from shared memory per 128 FFMAs: 9 %. With the
// softmax, 4 of 5 instructions are FFMAs; 70 % of the issue slots are used, so about 40 of the H200's 67 TFLOP/s.
//
// Filling the chip: one head of 16384 positions has only 256 tiles of 64 rows for 132 SMs. So an SM gets one block of
// two or three groups of 128 threads; each group takes every second (third) streamed tile, and their sums are merged.
// Causal tiles differ in length: the longest start first, and whichever SM is done takes the next longest.

// D: head size. N: rows of a streamed tile. GROUPS: groups of threads that share the block's own tile. SHARED: in the
// backward pass the (two) groups also share the streamed tile.
template <int D_, int N_, int GROUPS_, bool SHARED_ = false>
struct Fp32Tile {
    static constexpr int D = D_, N = N_, GROUPS = GROUPS_;
    static constexpr bool SHARED = SHARED_;
    static constexpr int OWN = 64;       // rows of the tile that the block owns
    static constexpr int THREADS = 128;  // of a group, in a grid of TX x TY; the TX threads of a row are in one warp
    static constexpr int TX = D == 128 ? 16 : 8, TY = THREADS / TX;
    static constexpr int ROWS = OWN / TY;                     // own rows of a thread: ty + TY i
    static constexpr int COLS = N / TX;                       // streamed rows of a thread: tx + TX j
    static constexpr int OUT = D / TX;                        // output columns of a thread
    static constexpr int LD = D + 4, LDP = N + THREADS / TY;  // padded, so that what a warp reads is in different banks
    static constexpr int UNROLL = D % 64 ? 2 : 8;             // as far as the registers reach
    static constexpr int OWN_FLOATS = OWN * LD, STREAM_FLOATS = N * LD, P_FLOATS = OWN * LDP;
    static constexpr int GROUP_FLOATS = 2 * STREAM_FLOATS + P_FLOATS;
    static constexpr size_t forward_bytes = (OWN_FLOATS + GROUPS * GROUP_FLOATS) * sizeof(float);
    static constexpr size_t backward_bytes =
        (2 * OWN_FLOATS + (SHARED ? 2 * STREAM_FLOATS + 2 * P_FLOATS : GROUPS * GROUP_FLOATS)) * sizeof(float);
    static_assert(D % 16 == 0 && N % 16 == 0);
    static_assert(THREADS * ROWS * OUT <= 2 * STREAM_FLOATS || GROUPS == 1, "the merge reuses the streamed tiles");
};

#ifdef __CUDACC__

// A barrier for one group of 128 threads; barrier 0 is __syncthreads().
__device__ __forceinline__ void group_barrier(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}
// Of `tiles` dealt to the groups in turn, the last groups may have got one less; they pass its n barriers all the same.
// The program does not need it, but compute-sanitizer's racecheck does, to see what __syncthreads() separates later.
template <class T>
__device__ __forceinline__ void pass_barriers(int group, int tiles, int n) {
    int dealt_last = tiles % T::GROUPS;
    for (int i = 0; dealt_last > 0 && group >= dealt_last && i < n; i++) { group_barrier(group); }
}
// Rows [first, first + R) of a matrix with T rows to shared memory, zeros beyond T. Asynchronous.
template <int R, int D, int THREADS>
__device__ __forceinline__ void load_rows(float* to, const float* from, int64_t stride, int first, int T, int thread) {
    for (int i = thread; i < R * (D / 4); i += THREADS) {
        int r = i / (D / 4), c = i % (D / 4) * 4;
        bool valid = first + r < T;
        cp_async_16(to + r * (D + 4) + c, from + (valid ? first + r : 0) * stride + c, valid);
    }
}
__device__ __forceinline__ float* head_of(const Heads& x, int b, int h) {
    return (float*)x.data + b * x.batch + h * x.head;
}

// ---- products of register tiles ----
// Where thread t sits in a grid of X columns. Shared memory serves a 16-byte load of a warp in 4 steps, or in 2 if each
// lane has the same address as its neighbour (lane ^ 1), or each as lane ^ 2. So lane bit 0 counts columns, bit 1 rows:
// what a row's threads read together satisfies the first, what a column's threads read together the second.
template <int X>
__device__ __forceinline__ int grid_x(int t) {
    constexpr int Y = WARP / X;  // rows of a warp
    return t % WARP / (2 * Y) * 2 + t % 2;
}
template <int X>
__device__ __forceinline__ int grid_y(int t) {
    constexpr int Y = WARP / X;
    return t / WARP * Y + t % WARP / 2 % Y;
}
template <int X, class Combine>  // over the X threads of a row
__device__ __forceinline__ float combine_row(float x, Combine combine) {
    x = combine(x, __shfl_xor_sync(0xffffffff, x, 1));
#pragma unroll
    for (int o = 2 * WARP / X; o < WARP; o *= 2) { x = combine(x, __shfl_xor_sync(0xffffffff, x, o)); }
    return x;
}
// A thread's COUNT columns of a row: pieces of `width` neighbouring floats, X threads side by side.
HD constexpr int piece_width(int count) { return count % 4 == 0 ? 4 : count % 2 == 0 ? 2 : 1; }
template <int X, int COUNT>
__device__ __forceinline__ int column(int x, int c) {
    constexpr int W = piece_width(COUNT);
    return (c / W * X + x) * W + c % W;
}
template <int X, int COUNT>
__device__ __forceinline__ void load_columns(float (&v)[COUNT], const float* row, int x) {
    constexpr int W = piece_width(COUNT);
#pragma unroll
    for (int c = 0; c < COUNT; c += W) {
        const float* at = row + column<X, COUNT>(x, c);
        if constexpr (W == 4) {
            float4 f = *(const float4*)at;
            v[c] = f.x, v[c + 1] = f.y, v[c + 2] = f.z, v[c + 3] = f.w;
        } else if constexpr (W == 2) {
            float2 f = *(const float2*)at;
            v[c] = f.x, v[c + 1] = f.y;
        } else {
            v[c] = *at;
        }
    }
}
template <int X, int COUNT>
__device__ __forceinline__ void store_columns(float* row, const float (&v)[COUNT], int x, float factor) {
    constexpr int W = piece_width(COUNT);
#pragma unroll
    for (int c = 0; c < COUNT; c += W) {
        float* at = row + column<X, COUNT>(x, c);
        if constexpr (W == 4) {
            *(float4*)at = {v[c] * factor, v[c + 1] * factor, v[c + 2] * factor, v[c + 3] * factor};
        } else {
            for (int e = 0; e < W; e++) { at[e] = v[c + e] * factor; }
        }
    }
}
template <int X, int COUNT>
__device__ __forceinline__ void add_columns(float* row, const float (&v)[COUNT], int x, float factor) {
    constexpr int W = piece_width(COUNT);
#pragma unroll
    for (int c = 0; c < COUNT; c += W) {
        float* at = row + column<X, COUNT>(x, c);
#if __CUDA_ARCH__ >= 900  // one 16-byte addition in the L2 cache instead of four
        if constexpr (W == 4) {
            atomicAdd((float4*)at, {v[c] * factor, v[c + 1] * factor, v[c + 2] * factor, v[c + 3] * factor});
        } else
#endif
        {
            for (int e = 0; e < W; e++) { atomicAdd(at + e, v[c + e] * factor); }
        }
    }
}
template <int R, int C>
__device__ __forceinline__ void set_zero(float (&x)[R][C]) {
#pragma unroll
    for (int i = 0; i < R; i++) {
#pragma unroll
        for (int j = 0; j < C; j++) { x[i][j] = 0; }
    }
}
// s = A B^T: own rows times streamed rows, both along d, so 16-byte loads take four d at once from each.
template <class T>
__device__ __forceinline__ void rows_times_rows(float (&s)[T::ROWS][T::COLS], const float* A, const float* B, int tx,
                                                int ty) {
    set_zero(s);
#pragma unroll T::UNROLL
    for (int d = 0; d < T::D; d += 4) {
        float4 a[T::ROWS];
#pragma unroll
        for (int i = 0; i < T::ROWS; i++) { a[i] = *(const float4*)(A + (ty + i * T::TY) * T::LD + d); }
#pragma unroll
        for (int j = 0; j < T::COLS; j++) {
            float4 b = *(const float4*)(B + (tx + j * T::TX) * T::LD + d);
#pragma unroll
            for (int i = 0; i < T::ROWS; i++) { s[i][j] = fmaf(a[i].x, b.x, s[i][j]); }
#pragma unroll
            for (int i = 0; i < T::ROWS; i++) { s[i][j] = fmaf(a[i].y, b.y, s[i][j]); }
#pragma unroll
            for (int i = 0; i < T::ROWS; i++) { s[i][j] = fmaf(a[i].z, b.z, s[i][j]); }
#pragma unroll
            for (int i = 0; i < T::ROWS; i++) { s[i][j] = fmaf(a[i].w, b.w, s[i][j]); }
        }
    }
}
// out += P B: P [OWN,N] in shared memory, B a streamed tile.
template <class T>
__device__ __forceinline__ void rows_times_columns(float (&out)[T::ROWS][T::OUT], const float* P, const float* B,
                                                   int tx, int ty) {
#pragma unroll T::UNROLL
    for (int j = 0; j < T::N; j += 4) {
        float p[T::ROWS][4];
#pragma unroll
        for (int i = 0; i < T::ROWS; i++) { load_columns<1>(p[i], P + (ty + i * T::TY) * T::LDP + j, 0); }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float b[T::OUT];
            load_columns<T::TX>(b, B + (j + e) * T::LD, tx);
#pragma unroll
            for (int i = 0; i < T::ROWS; i++) {
#pragma unroll
                for (int c = 0; c < T::OUT; c++) { out[i][c] = fmaf(p[i][e], b[c], out[i][c]); }
            }
        }
    }
}
// The P of the thread to shared memory, where the TX threads of its rows, all in its warp, will read it.
template <class T>
__device__ __forceinline__ void store_p(float* P, const float (&p)[T::ROWS][T::COLS], int tx, int ty) {
#pragma unroll
    for (int i = 0; i < T::ROWS; i++) {
#pragma unroll
        for (int j = 0; j < T::COLS; j++) { P[(ty + i * T::TY) * T::LDP + tx + j * T::TX] = p[i][j]; }
    }
}
// Adds the other groups' sums to group 0's, each thread's to its counterpart's. Every thread of the block calls it.
template <class T>
__device__ __forceinline__ void merge_groups(float (&x)[T::ROWS][T::OUT], float* group_0, int group, int t) {
    if constexpr (T::GROUPS == 1) { return; }
    __syncthreads();  // the streamed tiles, and what an earlier merge left there, are no longer read
    if (group > 0) {
        for (int i = 0; i < T::ROWS * T::OUT; i++) {
            group_0[group * T::GROUP_FLOATS + i * T::THREADS + t] = x[i / T::OUT][i % T::OUT];
        }
    }
    __syncthreads();
    for (int g = 1; group == 0 && g < T::GROUPS; g++) {
#pragma unroll
        for (int i = 0; i < T::ROWS * T::OUT; i++) {
            x[i / T::OUT][i % T::OUT] += group_0[g * T::GROUP_FLOATS + i * T::THREADS + t];
        }
    }
}

// ---- forward ----
// One tile's softmax. m: largest score yet, l: this thread's share of the sum; c = scale * log2(e).
template <class T>
__device__ __forceinline__ void softmax_step(float (&s)[T::ROWS][T::COLS], float (&O)[T::ROWS][T::OUT],
                                             float (&m)[T::ROWS], float (&l)[T::ROWS], float c) {
#pragma unroll
    for (int i = 0; i < T::ROWS; i++) {
        float larger = m[i];
#pragma unroll
        for (int j = 0; j < T::COLS; j++) { larger = fmaxf(larger, s[i][j]); }
        larger = combine_row<T::TX>(larger, [](float x, float y) { return fmaxf(x, y); });
        float base = larger == -INFINITY ? 0 : larger * c;  // no key seen yet: -inf - -inf would be NaN
        float shrink = exp2_approx(m[i] * c - base);
        m[i] = larger;
        l[i] *= shrink;
#pragma unroll
        for (int j = 0; j < T::COLS; j++) {
            s[i][j] = exp2_approx(fmaf(s[i][j], c, -base));
            l[i] += s[i][j];
        }
#pragma unroll
        for (int k = 0; k < T::OUT; k++) { O[i][k] *= shrink; }
    }
}

template <class T>
__global__ __launch_bounds__(T::THREADS* T::GROUPS, 1) void flash_forward_fp32_kernel(AttentionArgs a) {
    extern __shared__ float4 fp32_memory[];
    int group = threadIdx.x / T::THREADS, t = threadIdx.x % T::THREADS, tx = grid_x<T::TX>(t), ty = grid_y<T::TX>(t);
    float* Q = (float*)fp32_memory;
    float* group_0 = Q + T::OWN_FLOATS;
    float *K = group_0 + group * T::GROUP_FLOATS, *V = K + T::STREAM_FLOATS, *P = V + T::STREAM_FLOATS;

    int head = head_of_block(), b = head / a.H, h = head % a.H;
    int q0 = (int)(gridDim.y - 1 - blockIdx.y) * T::OWN;  // the last queries see the most keys: they start first
    int keys = a.causal ? min(a.Tk, q0 + T::OWN) : a.Tk;
    int end = (keys + T::N - 1) / T::N;
    int whole = min(a.Tk, a.causal ? q0 + 1 : a.Tk) / T::N;  // tiles before this one are seen by every query
    const float *k = head_of(a.k, b, h), *v = head_of(a.v, b, h);

    load_rows<T::OWN, T::D, T::THREADS * T::GROUPS>(Q, head_of(a.q, b, h), a.q.row, q0, a.Tq, threadIdx.x);
    load_rows<T::N, T::D, T::THREADS>(K, k, a.k.row, group * T::N, a.Tk, t);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // Q, loaded by all groups

    float O[T::ROWS][T::OUT], m[T::ROWS], l[T::ROWS], c = a.scale * LOG2_E;
    set_zero(O);
#pragma unroll
    for (int i = 0; i < T::ROWS; i++) { m[i] = -INFINITY, l[i] = 0; }
    for (int tile = group; tile < end; tile += T::GROUPS) {
        cp_async_wait<0>();
        group_barrier(group);  // everybody's part of K has arrived, and V has been read
        load_rows<T::N, T::D, T::THREADS>(V, v, a.v.row, tile * T::N, a.Tk, t);
        cp_async_commit();
        float s[T::ROWS][T::COLS];
        rows_times_rows<T>(s, Q, K, tx, ty);
        cp_async_wait<0>();
        group_barrier(group);  // V has arrived, and K has been read
        if (tile + T::GROUPS < end) {
            load_rows<T::N, T::D, T::THREADS>(K, k, a.k.row, (tile + T::GROUPS) * T::N, a.Tk, t);
            cp_async_commit();
        }
        if (tile >= whole) {
#pragma unroll
            for (int i = 0; i < T::ROWS; i++) {
#pragma unroll
                for (int j = 0; j < T::COLS; j++) {
                    int query = q0 + ty + i * T::TY, key = tile * T::N + tx + j * T::TX;
                    if (key >= a.Tk || (a.causal && key > query)) { s[i][j] = -INFINITY; }
                }
            }
        }
        softmax_step<T>(s, O, m, l, c);
        __syncwarp();  // P of the tile before has been read
        store_p<T>(P, s, tx, ty);
        __syncwarp();
        rows_times_columns<T>(O, P, V, tx, ty);
    }
    pass_barriers<T>(group, end, 2);

#pragma unroll
    for (int i = 0; i < T::ROWS; i++) {
        l[i] = combine_row<T::TX>(l[i], [](float x, float y) { return x + y; });
    }
    if constexpr (T::GROUPS > 1) {  // bring the groups to the largest m of each row; then l and O can be added
        float* ms = P;
        __syncthreads();  // P is no longer read
#pragma unroll
        for (int i = 0; i < T::ROWS; i++) {
            if (tx == 0) { ms[(ty + i * T::TY) * 2] = m[i], ms[(ty + i * T::TY) * 2 + 1] = l[i]; }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < T::ROWS; i++) {
            float larger = m[i], sum = 0, mine = m[i];
            const float* row = group_0 + 2 * T::STREAM_FLOATS + (ty + i * T::TY) * 2;
            for (int g = 0; g < T::GROUPS; g++) { larger = fmaxf(larger, row[g * T::GROUP_FLOATS]); }
            for (int g = 0; g < T::GROUPS; g++) {
                sum += row[g * T::GROUP_FLOATS + 1] * exp2_approx((row[g * T::GROUP_FLOATS] - larger) * c);
            }
            m[i] = larger, l[i] = sum;
#pragma unroll
            for (int n = 0; n < T::OUT; n++) { O[i][n] *= exp2_approx((mine - larger) * c); }
        }
        merge_groups<T>(O, group_0, group, t);
    }
    if (group > 0) { return; }
#pragma unroll
    for (int i = 0; i < T::ROWS; i++) {
        int query = q0 + ty + i * T::TY;
        if (query >= a.Tq) { continue; }
        store_columns<T::TX>(head_of(a.o, b, h) + query * a.o.row, O[i], tx, 1 / l[i]);
        if (tx == 0) { a.L[(int64_t)head * a.Tq + query] = m[i] * a.scale + logf(l[i]); }
    }
}

// ---- backward ----
// delta [B,H,Tq]: D_i = sum_d dO_id O_id, one warp a row; and dQ = 0 where the atomics will add to it.
__global__ void flash_delta_fp32_kernel(AttentionArgs a, int D, float* delta, bool zero_dq) {
    int64_t r = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (r >= (int64_t)a.B * a.H * a.Tq) { return; }
    int64_t i = r % a.Tq;
    int b = (int)(r / a.Tq) / a.H, h = (int)(r / a.Tq) % a.H;
    const float *o = head_of(a.o, b, h) + i * a.o.row, *dO = head_of(a.dO, b, h) + i * a.dO.row;
    float sum = 0;
    for (int d = lane; d < D; d += WARP) {
        sum += o[d] * dO[d];
        if (zero_dq) { head_of(a.dq, b, h)[i * a.dq.row + d] = 0; }
    }
    sum = warp_sum(sum);
    if (lane == 0) { delta[r] = sum; }
}

// dQ_i += dS^T's transpose times K: dS^T [OWN keys, N queries], by THREADS threads. One has 4 neighbouring queries.
template <class T, int THREADS>
__device__ __forceinline__ void add_dq(const AttentionArgs& a, int b, int h, int q0, const float* dS, const float* K,
                                       int t) {
    constexpr int X = THREADS / (T::N / 4), OUT = T::D / X;
    static_assert(T::D % X == 0 && X <= WARP);
    int x = grid_x<X>(t), y = grid_y<X>(t);
    float dQ[4][OUT];
    set_zero(dQ);
#pragma unroll 8
    for (int key = 0; key < T::OWN; key++) {
        float ds[4], k[OUT];
        load_columns<1>(ds, dS + key * T::LDP + 4 * y, 0);
        load_columns<X>(k, K + key * T::LD, x);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int c = 0; c < OUT; c++) { dQ[i][c] = fmaf(ds[i], k[c], dQ[i][c]); }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int query = q0 + 4 * y + i;
        if (query < a.Tq) { add_columns<X>(head_of(a.dq, b, h) + query * a.dq.row, dQ[i], x, a.scale); }
    }
}

// A block owns a tile of keys and streams Q and dO. All matrices are transposed: rows are keys, columns queries.
template <class T, bool WITH_DQ>
__global__ __launch_bounds__(T::THREADS* T::GROUPS, 1) void flash_backward_kv_fp32_kernel(AttentionArgs a,
                                                                                          const float* delta) {
    extern __shared__ float4 fp32_memory[];
    int group = threadIdx.x / T::THREADS, t = threadIdx.x % T::THREADS, tx = grid_x<T::TX>(t), ty = grid_y<T::TX>(t);
    float *K = (float*)fp32_memory, *V = K + T::OWN_FLOATS, *group_0 = V + T::OWN_FLOATS;
    float *Q = group_0 + group * T::GROUP_FLOATS, *dO = Q + T::STREAM_FLOATS, *P = dO + T::STREAM_FLOATS;

    int head = head_of_block(), b = head / a.H, h = head % a.H;
    int k0 = (int)blockIdx.y * T::OWN;  // the first keys are seen by the most queries: they start first
    int first = a.causal ? k0 / T::N : 0, end = (a.Tq + T::N - 1) / T::N;
    const float *q = head_of(a.q, b, h), *dO_ = head_of(a.dO, b, h);
    const float *L = a.L + (int64_t)head * a.Tq, *D = delta + (int64_t)head * a.Tq;

    load_rows<T::OWN, T::D, T::THREADS * T::GROUPS>(K, head_of(a.k, b, h), a.k.row, k0, a.Tk, threadIdx.x);
    load_rows<T::OWN, T::D, T::THREADS * T::GROUPS>(V, head_of(a.v, b, h), a.v.row, k0, a.Tk, threadIdx.x);
    cp_async_commit();
    load_rows<T::N, T::D, T::THREADS>(dO, dO_, a.dO.row, (first + group) * T::N, a.Tq, t);
    cp_async_commit();
    load_rows<T::N, T::D, T::THREADS>(Q, q, a.q.row, (first + group) * T::N, a.Tq, t);
    cp_async_commit();
    cp_async_wait<2>();
    __syncthreads();  // K and V, loaded by all groups

    float dK[T::ROWS][T::OUT], dV[T::ROWS][T::OUT], c = a.scale * LOG2_E;
    set_zero(dK);
    set_zero(dV);
    for (int tile = first + group; tile < end; tile += T::GROUPS) {
        int q0 = tile * T::N, next = (tile + T::GROUPS) * T::N;
        float l[T::COLS], d[T::COLS], s[T::ROWS][T::COLS], ds[T::ROWS][T::COLS];
#pragma unroll
        for (int j = 0; j < T::COLS; j++) {  // beyond Tq: L = inf makes P = 0
            int query = q0 + tx + j * T::TX;
            l[j] = query < a.Tq ? L[query] * LOG2_E : INFINITY;
            d[j] = query < a.Tq ? D[query] : 0;
        }
        cp_async_wait<1>();
        group_barrier(group);  // dO has arrived; Q may be on its way
        rows_times_rows<T>(ds, V, dO, tx, ty);
        cp_async_wait<0>();
        group_barrier(group);  // Q has arrived
        rows_times_rows<T>(s, K, Q, tx, ty);
        bool masked = (a.causal && q0 < k0 + T::OWN - 1) || k0 + T::OWN > a.Tk;
#pragma unroll
        for (int i = 0; i < T::ROWS; i++) {
#pragma unroll
            for (int j = 0; j < T::COLS; j++) {
                s[i][j] = exp2_approx(fmaf(s[i][j], c, -l[j]));
                int query = q0 + tx + j * T::TX, key = k0 + ty + i * T::TY;
                if (masked && (key >= a.Tk || (a.causal && key > query))) { s[i][j] = 0; }
                ds[i][j] = s[i][j] * (ds[i][j] - d[j]);
            }
        }
        store_p<T>(P, s, tx, ty);
        __syncwarp();
        rows_times_columns<T>(dV, P, dO, tx, ty);
        group_barrier(group);  // dO has been read, and P
        if (tile + T::GROUPS < end) {
            load_rows<T::N, T::D, T::THREADS>(dO, dO_, a.dO.row, next, a.Tq, t);
            cp_async_commit();
        }
        store_p<T>(P, ds, tx, ty);
        __syncwarp();
        rows_times_columns<T>(dK, P, Q, tx, ty);
        if (WITH_DQ) {
            group_barrier(group);  // all of dS is there
            add_dq<T, T::THREADS>(a, b, h, q0, P, K, t);
        }
        group_barrier(group);  // Q has been read, and dS
        if (tile + T::GROUPS < end) {
            load_rows<T::N, T::D, T::THREADS>(Q, q, a.q.row, next, a.Tq, t);
            cp_async_commit();
        }
    }

    pass_barriers<T>(group, end - first, WITH_DQ ? 5 : 4);
    cp_async_wait<0>();  // a group without a tile still has its first loads under way
    merge_groups<T>(dK, group_0, group, t);
    merge_groups<T>(dV, group_0, group, t);
    if (group > 0) { return; }
#pragma unroll
    for (int i = 0; i < T::ROWS; i++) {
        int key = k0 + ty + i * T::TY;
        if (key >= a.Tk) { continue; }
        store_columns<T::TX>(head_of(a.dk, b, h) + key * a.dk.row, dK[i], tx, a.scale);
        store_columns<T::TX>(head_of(a.dv, b, h) + key * a.dv.row, dV[i], tx, 1);
    }
}

// The same for large head sizes: the two groups share one tile of queries, and the products. Group 0 computes S and dV,
// group 1 dP and dK; P passes through shared memory, and dQ is split. A thread holds one accumulator tile instead of
// two, and S in 4x8 pieces instead of the 2x8 that two separate tiles of Q and dO would leave room for.
template <class T, bool WITH_DQ>
__global__ __launch_bounds__(T::THREADS * 2, 1) void flash_backward_shared_fp32_kernel(AttentionArgs a,
                                                                                       const float* delta) {
    extern __shared__ float4 fp32_memory[];
    int group = threadIdx.x / T::THREADS, t = threadIdx.x % T::THREADS, tx = grid_x<T::TX>(t), ty = grid_y<T::TX>(t);
    float *K = (float*)fp32_memory, *V = K + T::OWN_FLOATS, *Q = V + T::OWN_FLOATS, *dO = Q + T::STREAM_FLOATS;
    float *P = dO + T::STREAM_FLOATS, *dS = P + T::P_FLOATS;

    int head = head_of_block(), b = head / a.H, h = head % a.H;
    int k0 = (int)blockIdx.y * T::OWN;  // the first keys are seen by the most queries: they start first
    int first = a.causal ? k0 / T::N : 0, end = (a.Tq + T::N - 1) / T::N;
    const float *q = head_of(a.q, b, h), *dO_ = head_of(a.dO, b, h);
    const float *L = a.L + (int64_t)head * a.Tq, *D = delta + (int64_t)head * a.Tq;
    // What a group multiplies: its product of rows, then its product of columns.
    const float *own = group == 0 ? K : V, *streamed = group == 0 ? Q : dO;
    float* mine = group == 0 ? P : dS;

    load_rows<T::OWN, T::D, T::THREADS>(group == 0 ? K : V, group == 0 ? head_of(a.k, b, h) : head_of(a.v, b, h),
                                        group == 0 ? a.k.row : a.v.row, k0, a.Tk, t);
    auto load_tile = [&](int tile) {
        load_rows<T::N, T::D, T::THREADS>(group == 0 ? Q : dO, group == 0 ? q : dO_, group == 0 ? a.q.row : a.dO.row,
                                          tile * T::N, a.Tq, t);
        cp_async_commit();
    };
    load_tile(first);

    float sum[T::ROWS][T::OUT], c = a.scale * LOG2_E;  // dV or dK
    set_zero(sum);
    for (int tile = first; tile < end; tile++) {
        int q0 = tile * T::N;
        float l[T::COLS], s[T::ROWS][T::COLS];  // L or D, S or dP
#pragma unroll
        for (int j = 0; j < T::COLS; j++) {  // beyond Tq: L = inf makes P = 0
            int query = q0 + tx + j * T::TX;
            l[j] = group == 0 ? (query < a.Tq ? L[query] * LOG2_E : INFINITY) : (query < a.Tq ? D[query] : 0);
        }
        cp_async_wait<0>();
        __syncthreads();  // Q and dO have arrived, and dS has been read
        rows_times_rows<T>(s, own, streamed, tx, ty);
        if (group == 0) {
            bool masked = (a.causal && q0 < k0 + T::OWN - 1) || k0 + T::OWN > a.Tk;
#pragma unroll
            for (int i = 0; i < T::ROWS; i++) {
#pragma unroll
                for (int j = 0; j < T::COLS; j++) {
                    s[i][j] = exp2_approx(fmaf(s[i][j], c, -l[j]));
                    int query = q0 + tx + j * T::TX, key = k0 + ty + i * T::TY;
                    if (masked && (key >= a.Tk || (a.causal && key > query))) { s[i][j] = 0; }
                }
            }
            store_p<T>(P, s, tx, ty);
        }
        __syncthreads();  // P is there
        if (group == 1) {
#pragma unroll
            for (int i = 0; i < T::ROWS; i++) {
#pragma unroll
                for (int j = 0; j < T::COLS; j++) {
                    s[i][j] = P[(ty + i * T::TY) * T::LDP + tx + j * T::TX] * (s[i][j] - l[j]);
                }
            }
            store_p<T>(dS, s, tx, ty);
            __syncwarp();
        }
        rows_times_columns<T>(sum, mine, group == 0 ? dO : Q, tx, ty);
        __syncthreads();  // Q, dO and P have been read, and all of dS is there
        if (tile + 1 < end) { load_tile(tile + 1); }
        if (WITH_DQ) { add_dq<T, 2 * T::THREADS>(a, b, h, q0, dS, K, threadIdx.x); }
    }

    cp_async_wait<0>();  // without a tile the first loads are still under way
    const Heads& out = group == 0 ? a.dv : a.dk;
#pragma unroll
    for (int i = 0; i < T::ROWS; i++) {
        int key = k0 + ty + i * T::TY;
        if (key < a.Tk) {
            store_columns<T::TX>(head_of(out, b, h) + key * out.row, sum[i], tx, group == 0 ? 1 : a.scale);
        }
    }
}

// A block owns a tile of queries and streams K and V: the deterministic dQ.
template <class T>
__global__ __launch_bounds__(T::THREADS* T::GROUPS, 1) void flash_backward_q_fp32_kernel(AttentionArgs a,
                                                                                         const float* delta) {
    extern __shared__ float4 fp32_memory[];
    int group = threadIdx.x / T::THREADS, t = threadIdx.x % T::THREADS, tx = grid_x<T::TX>(t), ty = grid_y<T::TX>(t);
    float *Q = (float*)fp32_memory, *dO = Q + T::OWN_FLOATS, *group_0 = dO + T::OWN_FLOATS;
    float *K = group_0 + group * T::GROUP_FLOATS, *V = K + T::STREAM_FLOATS, *P = V + T::STREAM_FLOATS;

    int head = head_of_block(), b = head / a.H, h = head % a.H;
    int q0 = (int)(gridDim.y - 1 - blockIdx.y) * T::OWN;
    int end = ((a.causal ? min(a.Tk, q0 + T::OWN) : a.Tk) + T::N - 1) / T::N;
    const float *k = head_of(a.k, b, h), *v = head_of(a.v, b, h);

    load_rows<T::OWN, T::D, T::THREADS * T::GROUPS>(Q, head_of(a.q, b, h), a.q.row, q0, a.Tq, threadIdx.x);
    load_rows<T::OWN, T::D, T::THREADS * T::GROUPS>(dO, head_of(a.dO, b, h), a.dO.row, q0, a.Tq, threadIdx.x);
    cp_async_commit();
    load_rows<T::N, T::D, T::THREADS>(V, v, a.v.row, group * T::N, a.Tk, t);
    cp_async_commit();
    load_rows<T::N, T::D, T::THREADS>(K, k, a.k.row, group * T::N, a.Tk, t);
    cp_async_commit();
    cp_async_wait<2>();
    __syncthreads();  // Q and dO, loaded by all groups

    float dQ[T::ROWS][T::OUT], l[T::ROWS], d[T::ROWS], c = a.scale * LOG2_E;
    set_zero(dQ);
#pragma unroll
    for (int i = 0; i < T::ROWS; i++) {
        int query = q0 + ty + i * T::TY;
        l[i] = query < a.Tq ? a.L[(int64_t)head * a.Tq + query] * LOG2_E : INFINITY;
        d[i] = query < a.Tq ? delta[(int64_t)head * a.Tq + query] : 0;
    }
    for (int tile = group; tile < end; tile += T::GROUPS) {
        int k0 = tile * T::N, next = (tile + T::GROUPS) * T::N;
        float s[T::ROWS][T::COLS], ds[T::ROWS][T::COLS];
        cp_async_wait<1>();
        group_barrier(group);  // V has arrived; K may be on its way
        rows_times_rows<T>(ds, dO, V, tx, ty);
        cp_async_wait<0>();
        group_barrier(group);  // K has arrived, and V has been read
        if (tile + T::GROUPS < end) {
            load_rows<T::N, T::D, T::THREADS>(V, v, a.v.row, next, a.Tk, t);
            cp_async_commit();
        }
        rows_times_rows<T>(s, Q, K, tx, ty);
        bool masked = (a.causal && k0 + T::N - 1 > q0) || k0 + T::N > a.Tk;
#pragma unroll
        for (int i = 0; i < T::ROWS; i++) {
#pragma unroll
            for (int j = 0; j < T::COLS; j++) {
                int query = q0 + ty + i * T::TY, key = k0 + tx + j * T::TX;
                s[i][j] = exp2_approx(fmaf(s[i][j], c, -l[i]));
                if (masked && (key >= a.Tk || (a.causal && key > query))) { s[i][j] = 0; }
                ds[i][j] = s[i][j] * (ds[i][j] - d[i]);
            }
        }
        store_p<T>(P, ds, tx, ty);
        __syncwarp();
        rows_times_columns<T>(dQ, P, K, tx, ty);
        group_barrier(group);  // K has been read, and P
        if (tile + T::GROUPS < end) {
            load_rows<T::N, T::D, T::THREADS>(K, k, a.k.row, next, a.Tk, t);
            cp_async_commit();
        }
    }

    pass_barriers<T>(group, end, 3);
    cp_async_wait<0>();
    merge_groups<T>(dQ, group_0, group, t);
    if (group > 0) { return; }
#pragma unroll
    for (int i = 0; i < T::ROWS; i++) {
        int query = q0 + ty + i * T::TY;
        if (query < a.Tq) { store_columns<T::TX>(head_of(a.dq, b, h) + query * a.dq.row, dQ[i], tx, a.scale); }
    }
}

// ---- launchers ----
int multiprocessors() {
    int device, count;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
}
dim3 attention_grid(const AttentionArgs& a, int tiles, int blocks) {
    constexpr int MOST = 65535;  // of y and z
    if (tiles > MOST) { fail("attention: %d tiles of queries or keys, at most %d are possible", tiles, MOST); }
    int heads = a.B * a.H;
    int together = std::max(a.causal ? 2 * multiprocessors() * blocks / std::max(tiles, 1) : 1, ceil_div(heads, MOST));
    while (together < heads && heads % together != 0) { together++; }
    together = std::min(together, heads);
    return dim3(together, tiles, heads / together);
}
// Large tiles where the device has the shared memory (A100: 163 KB a block, H100: 227), small ones (at most 99 KB)
// where it does not (A10, RTX 30, 40 and 50).
template <class T, class Kernel, class... Arguments>
static void launch_fp32(Kernel kernel, size_t bytes, int tiles, const AttentionArgs& a, Arguments... more) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    kernel<<<attention_grid(a, tiles), T::THREADS * T::GROUPS, bytes, stream()>>>(a, more...);
    LAUNCH_CHECK();
}
static size_t shared_memory_per_block() {
    int device, bytes;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return bytes;
}
template <class T>
static void forward_fp32(const AttentionArgs& a) {
    launch_fp32<T>(flash_forward_fp32_kernel<T>, T::forward_bytes, ceil_div(a.Tq, T::OWN), a);
}
template <class T, class QueryTile = T>
static void backward_fp32(const AttentionArgs& a, const float* delta, bool deterministic) {
    auto launch_kv = [&](auto with_dq) {
        constexpr bool WITH_DQ = decltype(with_dq)::value;
        auto kernel = [] {
            if constexpr (T::SHARED) { return flash_backward_shared_fp32_kernel<T, WITH_DQ>; }
            if constexpr (!T::SHARED) { return flash_backward_kv_fp32_kernel<T, WITH_DQ>; }
        };
        launch_fp32<T>(kernel(), T::backward_bytes, ceil_div(a.Tk, T::OWN), a, delta);
    };
    if (!deterministic) { return launch_kv(std::true_type()); }
    launch_kv(std::false_type());
    launch_fp32<QueryTile>(flash_backward_q_fp32_kernel<QueryTile>, QueryTile::backward_bytes,
                           ceil_div(a.Tq, QueryTile::OWN), a, delta);
}

static void flash_forward_fp32(const AttentionArgs& a, int D) {
    bool large = shared_memory_per_block() >= Fp32Tile<128, 64, 2>::forward_bytes;
    switch (D) {
        case 16: return large ? forward_fp32<Fp32Tile<16, 64, 2>>(a) : forward_fp32<Fp32Tile<16, 64, 1>>(a);
        case 32: return large ? forward_fp32<Fp32Tile<32, 64, 2>>(a) : forward_fp32<Fp32Tile<32, 64, 1>>(a);
        case 64: return large ? forward_fp32<Fp32Tile<64, 64, 3>>(a) : forward_fp32<Fp32Tile<64, 64, 1>>(a);
        case 80: return large ? forward_fp32<Fp32Tile<80, 64, 2>>(a) : forward_fp32<Fp32Tile<80, 64, 1>>(a);
        case 128: return large ? forward_fp32<Fp32Tile<128, 64, 2>>(a) : forward_fp32<Fp32Tile<128, 32, 1>>(a);
    }
    fail("flash attention in fp32: head size %d, expected 16, 32, 64, 80 or 128", D);
}
static void flash_backward_fp32(const AttentionArgs& a, int D, bool deterministic) {
    Tensor workspace = empty({a.B, a.H, a.Tq}, F32, WORKSPACE);
    float* delta = workspace.as<float>();
    int64_t rows = (int64_t)a.B * a.H * a.Tq;
    flash_delta_fp32_kernel<<<ceil_div(rows * WARP, 256), 256, 0, stream()>>>(a, D, delta, !deterministic);
    LAUNCH_CHECK();
    bool large = shared_memory_per_block() >= Fp32Tile<80, 64, 2>::backward_bytes;
    auto run = [&](auto large_tile, auto small_tile) {
        if (large) { return backward_fp32<decltype(large_tile)>(a, delta, deterministic); }
        backward_fp32<decltype(small_tile)>(a, delta, deterministic);
    };
    switch (D) {
        case 16: return run(Fp32Tile<16, 64, 2>(), Fp32Tile<16, 64, 1>());
        case 32: return run(Fp32Tile<32, 64, 2>(), Fp32Tile<32, 64, 1>());
        case 64: return run(Fp32Tile<64, 64, 2>(), Fp32Tile<64, 64, 1>());
        case 80: return run(Fp32Tile<80, 64, 2>(), Fp32Tile<80, 32, 1>());
        case 128:
            if (!large) { return backward_fp32<Fp32Tile<128, 16, 1>>(a, delta, deterministic); }
            return backward_fp32<Fp32Tile<128, 64, 2, true>, Fp32Tile<128, 32, 2>>(a, delta, deterministic);
    }
    fail("flash attention in fp32: head size %d, expected 16, 32, 64, 80 or 128", D);
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// The table of implementations: dispatch, commands, benchmarks and tests walk it.

static Heads heads_of(const Tensor& t) {
    return t ? Heads{t.data, t.stride[0], t.stride[1], t.stride[2]} : Heads{nullptr, 0, 0, 0};
}
AttentionArgs args_of(const AttentionTensors& t) {
    AttentionArgs a{heads_of(t.q),   heads_of(t.k),
                    heads_of(t.v),   heads_of(t.o),
                    heads_of(t.dO),  heads_of(t.dq),
                    heads_of(t.dk),  heads_of(t.dv),
                    t.L.as<float>(), (int)t.q.dim(0),
                    (int)t.q.dim(1), (int)t.q.dim(2),
                    (int)t.k.dim(2), 1 / sqrtf((float)t.q.dim(3)),
                    t.causal};
    return a;
}
static int head_size(const AttentionTensors& t) { return (int)t.q.dim(3); }

static bool any_float(DType t, int64_t) { return t == F32 || t == BF16 || t == F16 || t == F64; }
#ifdef __CUDACC__
static bool gpu_float(DType t, int64_t) { return t == F32 || t == BF16 || t == F16; }
#endif
static bool only_fp32(DType t, int64_t) { return t == F32; }
bool flash_head_size(int64_t D) { return D == 16 || D == 32 || D == 64 || D == 80 || D == 128; }

static void reference(const AttentionTensors& t) {  // both passes: the second one too if there is a dO
    with_type(t.q.dtype, [&](auto zero) { attention_reference_cpu<decltype(zero)>(args_of(t), head_size(t)); });
}
static void tiled_forward(const AttentionTensors& t) { flash_forward_cpu(args_of(t), head_size(t)); }
static void tiled_backward(const AttentionTensors& t) { flash_backward_cpu(args_of(t), head_size(t)); }
#ifdef __CUDACC__
static bool fp32_on_gpu(DType t, int64_t D) { return t == F32 && flash_head_size(D); }
static bool low_on_gpu(DType t, int64_t D) { return (t == BF16 || t == F16) && flash_head_size(D); }
static bool low_on_hopper(DType t, int64_t D) { return low_on_gpu(t, D) && is_hopper(); }
static void fp32_forward(const AttentionTensors& t) { flash_forward_fp32(args_of(t), head_size(t)); }
static void fp32_backward(const AttentionTensors& t) {
    flash_backward_fp32(args_of(t), head_size(t), context.deterministic);
}
#endif

const std::vector<AttentionImpl> attention_impls = {
    {"reference", CPU, any_float, nullptr, reference, reference, "the formula in plain loops: the truth"},
    {"naive", CPU, any_float, attention_naive, nullptr, nullptr, "one operation at a time, S and P in memory"},
    {"fused", CPU, any_float, attention_fused, nullptr, nullptr, "softmax as one loop, P in the place of S"},
    {"tiled", CPU, only_fp32, nullptr, tiled_forward, tiled_backward, "FlashAttention-2 in plain C++: O(T) memory"},
#ifdef __CUDACC__
    {"naive", CUDA, gpu_float, attention_naive, nullptr, nullptr, "one kernel an operation, S and P in memory"},
    {"fused", CUDA, gpu_float, attention_fused, nullptr, nullptr, "softmax as one kernel, P in the place of S"},
    {"flash_fp32", CUDA, fp32_on_gpu, nullptr, fp32_forward, fp32_backward, "FlashAttention-2 in true fp32"},
    {"flash_mma", CUDA, low_on_gpu, nullptr, flash_mma_forward, flash_mma_backward,
     "FlashAttention-2 on tensor cores (mma.sync)"},
    {"hopper", CUDA, low_on_hopper, nullptr, hopper_forward, hopper_backward, "the same with wgmma and TMA (H100)"},
#endif
};

bool is_flash(const AttentionImpl& impl) { return impl.forward && impl.forward != reference; }
const AttentionImpl* fastest_flash(Device device, DType dtype, int64_t D) {
    const AttentionImpl* best = nullptr;
    for (const AttentionImpl& impl : attention_impls) {
        if (is_flash(impl) && impl.device == device && impl.takes(dtype, D)) { best = &impl; }
    }
    return best;
}
const AttentionImpl& require_flash(Device device, DType dtype, int64_t D) {
    if (device == META) { device = context.planned_for; }
    const AttentionImpl* impl = fastest_flash(device, dtype, D);
    if (!impl) {
        usage_error(
            "mode flash: no FlashAttention on %s for %s and head size %ld (on the CPU: float32; on a GPU: "
            "float32, bfloat16 and float16, head sizes 16, 32, 64, 80 and 128); --mode fused takes them all",
            name_of(device), name_of(dtype), (long)D);
    }
    return *impl;
}

// The kernels read rows of D neighbours in 16-byte pieces; anything else is copied first.
static Tensor readable(const Tensor& t) {
    bool ok = t.stride[3] == 1 && (uintptr_t)t.data % 16 == 0;
    for (int d = 0; d < 3; d++) { ok = ok && (t.shape[d] == 1 || t.stride[d] * size_of(t.dtype) % 16 == 0); }
    return ok ? t : contiguous(t);
}
static void run_forward(const AttentionImpl& impl, const AttentionTensors& t) {
    if (t.q.device() != META && t.o.size() > 0) { impl.forward(t); }
}
static void run_backward(const AttentionImpl& impl, const AttentionTensors& t) {
    if (t.q.device() != META && t.o.size() > 0) { impl.backward(t); }
}
static Tensor flash(const AttentionImpl& impl, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, bool causal,
                    Tensor* L) {
    Range range("attention");
    Tensor q = readable(autocast_operand(q_in)), k = readable(autocast_operand(k_in)),
           v = readable(autocast_operand(v_in));
    AttentionTensors t{q,
                       k,
                       v,
                       empty(q.shape, q.dtype),
                       empty({q.dim(0), q.dim(1), q.dim(2)}, F32),
                       Tensor(),
                       Tensor(),
                       Tensor(),
                       Tensor(),
                       causal};
    run_forward(impl, t);
    if (L) { *L = t.L; }
    Tensor o = t.o;
    record(o, {q, k, v}, [t, &impl](const Tensor& dO) {
        AttentionTensors b = t;
        b.dO = readable(dO);
        b.dq = empty(t.q.shape, t.q.dtype), b.dk = empty(t.k.shape, t.k.dtype), b.dv = empty(t.v.shape, t.v.dtype);
        run_backward(impl, b);
        add_gradient(t.q.gradient, b.dq);
        add_gradient(t.k.gradient, b.dk);
        add_gradient(t.v.gradient, b.dv);
    });
    return o;
}
Tensor run_attention(const AttentionImpl& impl, const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                     Tensor* L) {
    RestoreContext restore;  // an operand that is bf16 or fp16 already stays so
    if (q.dtype == BF16) { context.precision = PREC_BF16; }
    if (q.dtype == F16) { context.precision = PREC_FP16; }
    return impl.run ? impl.run(q, k, v, causal, L) : flash(impl, q, k, v, causal, L);
}
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
    if (context.mode == EAGER) { return attention_naive(q, k, v, causal); }
    if (context.mode == FUSED) { return attention_fused(q, k, v, causal); }
    DType dtype = q.dtype == F64 ? F64 : matmul_dtype();
    return flash(require_flash(q.device(), dtype, q.dim(-1)), q, k, v, causal, nullptr);
}

// Part `which` of x [B,T,parts*C] as [B,H,T,D].
static Tensor heads_view(const Tensor& x, int which, int parts, int H) {
    int64_t B = x.dim(0), T = x.dim(1), C = x.dim(2) / parts, D = C / H;
    Tensor t = detached(x);
    t.data += which * C * (int64_t)size_of(x.dtype);
    t.shape = {B, H, T, D};
    t.stride = {T * parts * C, D, parts * C, 1};
    return t;
}
Tensor flash_self_attention(const Tensor& qkv, int H) {
    Range range("attention");
    int64_t B = qkv.dim(0), T = qkv.dim(1), C = qkv.dim(2) / 3;
    const AttentionImpl& impl = require_flash(qkv.device(), qkv.dtype, C / H);
    Tensor o = empty({B, T, C}, qkv.dtype), L = empty({B, H, T}, F32);
    AttentionTensors t{heads_view(qkv, 0, 3, H),
                       heads_view(qkv, 1, 3, H),
                       heads_view(qkv, 2, 3, H),
                       heads_view(o, 0, 1, H),
                       L,
                       Tensor(),
                       Tensor(),
                       Tensor(),
                       Tensor(),
                       true};
    run_forward(impl, t);
    record(o, {qkv}, [t, H, &impl, g = qkv.gradient](const Tensor& dO) {
        AttentionTensors b = t;
        Tensor dqkv = empty(g->shape, g->dtype), dO_rows = contiguous(dO);
        b.dO = heads_view(dO_rows, 0, 1, H);
        b.dq = heads_view(dqkv, 0, 3, H), b.dk = heads_view(dqkv, 1, 3, H), b.dv = heads_view(dqkv, 2, 3, H);
        run_backward(impl, b);
        add_gradient(g, dqkv);
    });
    return o;
}

// ---------------------------------------------------------------------------------------------------------------------
// flash_forward, flash_backward: every implementation that runs here against the reference in float64, at the handout's
// test size and at odd ones, with the handout's tolerance.

struct AttentionCase {
    int B, H, Tq, Tk, D;
    bool causal;
};
static const std::vector<AttentionCase> check_cases = {
    {4, 1, 128, 128, 64, false}, {4, 1, 128, 128, 64, true},   {1, 2, 1, 1, 16, true},      {2, 3, 65, 65, 32, true},
    {1, 2, 127, 200, 80, false}, {1, 2, 200, 127, 80, true},   {2, 1, 257, 129, 128, true}, {1, 1, 63, 300, 128, true},
    {1, 2, 700, 500, 64, false}, {1, 2, 500, 300, 128, false}, {1, 1, 500, 300, 80, false},
};
struct CaseTensors {
    Tensor q, k, v, dO;
};
static CaseTensors random_case(const AttentionCase& c, DType dtype, uint64_t seed) {
    CaseTensors in;
    uint64_t key = 0;
    for (Tensor* t : {&in.q, &in.k, &in.v, &in.dO}) {
        *t = empty({c.B, c.H, key == 1 || key == 2 ? c.Tk : c.Tq, c.D}, dtype, INPUTS);
        fill_normal(*t, seed, key++, 0, 1);
    }
    return in;
}
struct CaseResult {
    Tensor o, L, dq, dk, dv;
};
using PartOf = Tensor CaseResult::*;
static CaseResult run_case(const AttentionImpl& impl, const CaseTensors& in, bool causal, bool with_backward) {
    CaseResult r;
    Tensor q = require_gradient(in.q), k = require_gradient(in.k), v = require_gradient(in.v);
    r.o = run_attention(impl, q, k, v, causal, &r.L);
    if (with_backward) {
        backward_from(r.o, in.dO);
        r.dq = q.gradient->value, r.dk = k.gradient->value, r.dv = v.gradient->value;
    }
    clear_tape();
    r.o = detached(r.o);
    return r;
}
static CaseResult reference_of(const CaseTensors& in, bool causal, bool with_backward) {
    RestoreContext restore;
    CaseTensors wide{to_device(in.q, CPU), to_device(in.k, CPU), to_device(in.v, CPU), to_device(in.dO, CPU)};
    context.device = CPU;
    for (Tensor* t : {&wide.q, &wide.k, &wide.v, &wide.dO}) { *t = cast(*t, F64); }
    return run_case(attention_impls[0], wide, causal, with_backward);
}
static int check_attention(const Options& o, const char* name, bool with_backward) {
    context.device = choose_device(o.device);
    context.mode = FUSED;
    Table table{strprintf("%s: largest error against the reference in float64, rtol = atol = 1e-2; %s; commit %s", name,
                          device_description().c_str(), commit().c_str()),
                {"implementation", "dtype", "B", "H", "Tq", "Tk", "D", "causal", "O", "L"},
                {}};
    if (with_backward) { table.columns.insert(table.columns.end(), {"dQ", "dK", "dV"}); }
    table.columns.push_back("status");
    int wrong = 0;
    for (const AttentionCase& c : check_cases) {
        if (o.quick && (int64_t)c.B * c.Tq * c.Tk > 70000) { continue; }
        for (DType dtype : {F32, BF16, F16}) {
            CaseTensors in = random_case(c, dtype, o.seed);
            CaseResult want = reference_of(in, c.causal, with_backward);
            for (const AttentionImpl& impl : attention_impls) {
                if (impl.device != context.device || !impl.takes(dtype, c.D)) { continue; }
                CaseResult got = run_case(impl, in, c.causal, with_backward);
                std::vector<std::string> row = {impl.name,           name_of(dtype),         std::to_string(c.B),
                                                std::to_string(c.H), std::to_string(c.Tq),   std::to_string(c.Tk),
                                                std::to_string(c.D), c.causal ? "yes" : "no"};
                bool ok = true;
                for (PartOf part :
                     {&CaseResult::o, &CaseResult::L, &CaseResult::dq, &CaseResult::dk, &CaseResult::dv}) {
                    if (!(want.*part)) { continue; }
                    Comparison difference = compare(got.*part, want.*part, 1e-2, 1e-2);
                    row.push_back(strprintf("%.1e", difference.max_abs));
                    ok = ok && difference.ok();
                }
                row.push_back(ok ? "ok" : "WRONG");
                wrong += !ok;
                table.rows.push_back(row);
            }
        }
    }
    if (o.quick) { table.caption += "; scaled down: without the largest sizes"; }
    print(table, o.format);
    if (wrong > 0) { fail("%d of %zu checks are off", wrong, table.rows.size()); }
    return 0;
}
int cmd_flash_forward(const Options& o) { return check_attention(o, "flash_forward", false); }
int cmd_flash_backward(const Options& o) { return check_attention(o, "flash_backward", true); }

// ---------------------------------------------------------------------------------------------------------------------
// flash_benchmarking and flash_leaderboard

struct PassTimes {
    bool ran = false;
    double forward = 0, backward = 0, both = 0;  // ms, medians
    size_t needs = 0;
};
static std::string ms_cell(const PassTimes& t, double ms) { return t.ran ? strprintf("%.3f", ms) : oom_cell(t.needs); }
// Each pass for about `budget` ms, at least 3 times.
static PassTimes time_passes(const AttentionImpl& impl, const AttentionCase& c, DType dtype, double warmup,
                             double budget) {
    PassTimes t;
    t.needs = planned_peak([&] { run_case(impl, random_case(c, dtype, 0), c.causal, true); });
    if (t.needs > available_memory(context.device)) { return t; }
    CaseTensors in = random_case(c, dtype, 0);
    Tensor q = require_gradient(in.q), k = require_gradient(in.k), v = require_gradient(in.v), y;
    auto reset = [&] {
        clear_tape();
        y = Tensor();
        for (const Tensor* x : {&q, &k, &v}) { x->gradient->value = Tensor(); }
    };
    auto forward = [&] { y = run_attention(impl, q, k, v, c.causal); };
    auto backward = [&] { backward_from(y, in.dO); };
    auto measure = [&](const std::function<void()>& prepare, const std::function<void()>& f) {
        double once = stats_of(time_queued_ms(1, 1, prepare, f)).median;
        int n = std::clamp((int)(budget / once), 3, 5000), first = std::clamp((int)(warmup / once), 1, 5000);
        return stats_of(time_queued_ms(first, n, prepare, f)).median;
    };
    t.forward = measure(reset, forward);
    t.backward = measure([&] { reset(), forward(); }, backward);
    t.both = measure(reset, [&] { forward(), backward(); });
    reset();
    t.ran = true;
    return t;
}
static const AttentionImpl& impl_named(const char* name, Device device) {
    for (const AttentionImpl& impl : attention_impls) {
        if (impl.device == device && strcmp(impl.name, name) == 0) { return impl; }
    }
    fail("no implementation %s on %s", name, name_of(device));
}

int cmd_flash_benchmarking(const Options& o) {
    context.device = choose_device(o.device);
    context.mode = FUSED;
    bool cpu = context.device == CPU;
    int longest = cpu ? (o.quick ? 512 : 2048) : (o.quick ? 4096 : 65536);
    double budget = cpu || o.quick ? 20 : 100;
    std::string scaled_down =
        longest < 65536 ? strprintf("; scaled down: lengths up to %d instead of 65536", longest) : "";
    if (cpu) { scaled_down += ", no bf16 (the CPU's tiled version is fp32)"; }
    Table table{
        strprintf("flash_benchmarking: batch 1, one head, causal, ms (median of %.0f ms of runs); %s; commit %s%s",
                  budget, device_description().c_str(), commit().c_str(), scaled_down.c_str()),
        {"Seq", "D", "dtype", "Naive Fwd", "Naive Bwd", "Naive Tot", "Flash Fwd", "Flash Bwd", "Flash Tot", "x Fwd",
         "x Bwd", "x Tot"},
        {}};
    const AttentionImpl& naive = impl_named("naive", context.device);
    std::vector<Chart> panels;
    for (DType dtype : {BF16, F32}) {
        for (int D : {16, 32, 64, 128}) {
            const AttentionImpl* flash = fastest_flash(context.device, dtype, D);
            Chart chart{
                Chart::LINES, strprintf("%s, D %d", name_of(dtype), D), "sequence length", "time (ms)", {}, {}, {}};
            chart.log_axes = true;
            chart.series = {{"naive forward", {}, false, 0},
                            {"naive backward", {}, true, 0},
                            {"flash forward", {}, false, 1},
                            {"flash backward", {}, true, 1}};
            for (int S = 128; flash && S <= longest; S *= 2) {
                AttentionCase c{1, 1, S, S, D, true};
                progress("S %d, D %d, %s", S, D, name_of(dtype));
                PassTimes n = time_passes(naive, c, dtype, budget / 4, budget),
                          f = time_passes(*flash, c, dtype, budget / 4, budget);
                std::vector<std::string> row = {std::to_string(S), std::to_string(D), name_of(dtype)};
                for (const PassTimes* t : {&n, &f}) {
                    for (double ms : {t->forward, t->backward, t->both}) { row.push_back(ms_cell(*t, ms)); }
                }
                for (double x : {n.forward / f.forward, n.backward / f.backward, n.both / f.both}) {
                    row.push_back(n.ran && f.ran ? strprintf("%.2f", x) : "");
                }
                table.rows.push_back(row);
                chart.x.push_back(S);
                size_t k = 0;
                for (const PassTimes* t : {&n, &f}) {
                    for (double ms : {t->forward, t->backward}) { chart.series[k++].y.push_back(t->ran ? ms : NAN); }
                }
            }
            if (!chart.x.empty()) { panels.push_back(chart); }
        }
    }
    print(table, o.format);
    if (!o.plot.empty()) { save_file(o.plot, draw("FlashAttention-2 against plain attention", table.caption, panels)); }
    return 0;
}

// The times of others at the same shape: batch 1, 16 heads, D 64, S 16384, bf16, causal, forward and backward.
struct Published {
    const char* who;
    const char* card;
    double ms;
};
static const Published published[] = {
    {"FlashAttention-3", "H200", 3.66},
    {"cuDNN through PyTorch SDPA", "H200", 4.46},
    {"class leaderboard 2025, first", "H100", 5.364},
    {"FlexAttention (Triton)", "H200", 6.22},
    {"class leaderboard 2025, second", "H100", 6.778},
    {"FlashAttention-2 through PyTorch SDPA", "H200", 6.98},
    {"class leaderboard 2025, third", "H100", 11.07},
    {"class leaderboard 2025, baseline", "H100", 80.0},
};
int cmd_flash_leaderboard(const Options& o) {
    context.device = choose_device(o.device);
    context.mode = FUSED;
    bool cpu = context.device == CPU, handout = true;
    AttentionCase c{1, 16, 16384, 16384, 64, true};
    Precision precision = cpu ? FP32 : PREC_BF16;
    double warmup = o.quick ? 100 : 1000, budget = o.quick ? 500 : 10000;
    std::string scaled_down;
    if (cpu) {
        c.H = 2, c.Tq = o.quick ? 512 : 1024;
        warmup = 10, budget = 200, handout = false;
        scaled_down = std::string("; scaled down: ") + (o.num_heads ? "" : "2 heads instead of 16, ") +
                      (o.has("context_length") ? "" : "a shorter sequence, ") + (o.precision.empty() ? "fp32, " : "") +
                      "less time";
    } else if (o.quick) {
        scaled_down = "; scaled down: 0.1 s of warm-up and 0.5 s of runs instead of 1 s and 10 s";
    }
    if (o.num_heads) { c.H = o.num_heads, handout = false; }
    if (o.head_size) { c.D = o.head_size, handout = false; }
    if (o.has("context_length")) { c.Tq = o.context_length, handout = false; }
    if (!o.precision.empty()) { precision = precision_from(o.precision[0]), handout = false; }
    if (o.not_causal) { c.causal = false, handout = false; }
    c.Tk = c.Tq;
    context.precision = precision;
    DType dtype = matmul_dtype();
    const AttentionImpl& fastest = require_flash(context.device, dtype, c.D);
    std::vector<const AttentionImpl*> impls;
    std::string here, which = o.has("impl") ? o.impl : "all";
    for (const AttentionImpl& impl : attention_impls) {
        if (!is_flash(impl) || impl.device != context.device || !impl.takes(dtype, c.D)) { continue; }
        here += std::string(", ") + impl.name;
        if (which == "all" || which == impl.name || (which == "auto" && &impl == &fastest)) { impls.push_back(&impl); }
    }
    if (impls.empty()) { usage_error("--impl: got '%s', takes all, auto%s here", which.c_str(), here.c_str()); }
    double rate = matmul_rate(precision, cpu ? 1024 : 8192, 20);
    double forward_flops = (c.causal ? 2.0 : 4.0) * c.H * c.Tq * (double)c.Tk * c.D;
    Table table{
        strprintf("flash_leaderboard: batch 1, %d heads, D %d, S %d, %s, %s%s; %.2g s of warm-up, %.2g s of runs, "
                  "median; this "
                  "device multiplies matrices at %.3g TFLOP/s; %s; commit %s%s",
                  c.H, c.D, c.Tq, name_of(precision), c.causal ? "causal" : "not causal",
                  context.deterministic ? ", deterministic" : "", warmup / 1e3, budget / 1e3, rate,
                  device_description().c_str(), commit().c_str(), scaled_down.c_str()),
        {"implementation", "card", "forward ms", "backward ms", "forward+backward ms", "TFLOP/s", "of the matmul rate"},
        {}};
    for (const AttentionImpl* impl : impls) {
        PassTimes t = time_passes(*impl, c, dtype, warmup, budget);
        double tflops = 3.5 * forward_flops / t.both / 1e9;
        table.rows.push_back({std::string("ours: ") + impl->name, "this one", ms_cell(t, t.forward),
                              ms_cell(t, t.backward), ms_cell(t, t.both), t.ran ? strprintf("%.3g", tflops) : "",
                              t.ran ? strprintf("%.0f %%", 100 * tflops / rate) : ""});
    }
    for (const Published& p : published) {
        if (!handout) { break; }
        table.rows.push_back(
            {p.who, p.card, "", "", strprintf("%.3f", p.ms), strprintf("%.3g", 3.5 * forward_flops / p.ms / 1e9), ""});
    }
    print(table, o.format);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// attention: your q, k, v (and do) in, our o, lse (and dq, dk, dv) out

static Tensor from_file(const FileTensor& f, const std::string& path) {
    Shape shape = f.shape;
    if (shape.size() == 3) { shape.insert(shape.begin() + 1, 1); }
    if (count(shape) == 0) { fail("%s: a tensor is empty, %s", path.c_str(), to_string(f.shape).c_str()); }
    Tensor t = empty_on(CPU, shape, f.dtype == "BF16" ? BF16 : F32, INPUTS);
    memcpy(t.data, f.data, f.bytes);
    return to_device(t, context.device);
}
int cmd_attention(const Options& o) {
    context.device = choose_device(o.device);
    context.mode = FUSED;
    std::vector<std::string> here, known;
    bool is_here = o.impl == "auto";
    for (const AttentionImpl& row : attention_impls) {
        if (row.device != context.device) { continue; }
        here.push_back(row.name);
        is_here = is_here || o.impl == row.name;
    }
    if (!is_here) {
        usage_error("--impl: got '%s', takes auto or, on %s, one of %s", o.impl.c_str(), name_of(context.device),
                    join(here, ", ").c_str());
    }
    SafeTensors file = load_safetensors(o.inputs);
    auto q_it = file.tensors.find("q");
    if (q_it == file.tensors.end()) { fail("%s: tensor q is missing", o.inputs.c_str()); }
    Shape shape = q_it->second.shape;
    if (shape.size() != 3 && shape.size() != 4) {
        fail("%s: tensor q: expected shape [B,H,S,D] or [B,S,D], found %s", o.inputs.c_str(), to_string(shape).c_str());
    }
    FileTensor fq = require_tensor(file, "q", shape, {"F32", "BF16"});
    Shape keys = shape;
    keys[keys.size() - 2] = -1;
    FileTensor fk = require_tensor(file, "k", keys, {fq.dtype}), fv = require_tensor(file, "v", fk.shape, {fq.dtype});
    require_no_others(file, {"q", "k", "v", "do"}, "q, k, v or do");
    bool with_backward = file.tensors.count("do") > 0;
    int64_t D = shape.back();
    if (!flash_head_size(D)) {
        fail("%s: tensor q: expected a head size of 16, 32, 64, 80 or 128, found %ld", o.inputs.c_str(), (long)D);
    }
    CaseTensors in{from_file(fq, o.inputs), from_file(fk, o.inputs), from_file(fv, o.inputs), Tensor()};
    if (with_backward) { in.dO = from_file(require_tensor(file, "do", shape, {fq.dtype}), o.inputs); }

    const AttentionImpl* impl = nullptr;
    for (const AttentionImpl& row : attention_impls) {
        if (row.device != context.device || !row.takes(in.q.dtype, D)) { continue; }
        known.push_back(row.name);
        if (o.impl == row.name) { impl = &row; }
    }
    if (o.impl == "auto") {
        impl = fastest_flash(context.device, in.q.dtype, D);
        if (!impl) { impl = &impl_named("fused", context.device); }
    }
    if (!impl) {
        fail("%s: holds %s, and --impl %s does not take it; %s do", o.inputs.c_str(), name_of(in.q.dtype),
             o.impl.c_str(), join(known, ", ").c_str());
    }
    CaseResult r = run_case(*impl, in, o.causal, with_backward);
    std::vector<Tensor> kept;
    std::vector<std::pair<std::string, FileTensor>> out;
    auto put = [&](const char* name, const Tensor& t, const Shape& as) {
        kept.push_back(view(to_device(contiguous(t), CPU), 0, as));
        out.push_back({name, describe(kept.back())});
    };
    put("o", r.o, shape);
    put("lse", r.L, Shape(shape.begin(), shape.end() - 1));
    if (with_backward) { put("dq", r.dq, shape), put("dk", r.dk, fk.shape), put("dv", r.dv, fk.shape); }
    save_safetensors(o.out, out, {{"format", "pt"}});
    std::string line =
        strprintf("attention %s: q %s, k %s, %s, %s, implementation %s on %s; wrote %zu tensors to %s",
                  o.inputs.c_str(), to_string(shape).c_str(), to_string(fk.shape).c_str(), name_of(in.q.dtype),
                  o.causal ? "causal" : "not causal", impl->name, name_of(context.device), out.size(), o.out.c_str());
    printf("%s\n", one_line(line).c_str());
    return 0;
}
