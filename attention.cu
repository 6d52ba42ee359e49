// attention.cu: sections 1.2-1.3 of the handout.
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

// ---------------------------------------------------------------------------------------------------------------------
// Eager: every operation of the handout's model is a kernel and every intermediate an array in memory.

static Tensor attention_eager(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
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
        s = sub(s, max_last(s));
        Tensor e = exp(s);
        p = div(e, sum_last(e));
    }
    Range r("values");
    return matmul(p, v);
}

// ---------------------------------------------------------------------------------------------------------------------
// softmax: S [R,Tk] becomes P in place, one pass to find each row's maximum and sum together (the sum is rescaled when
// the maximum grows: "online" softmax), one pass to write. Row r holds query r % Tq; causal rows stop at their own key.
// Moves 2 elements read and 1 written per entry instead of the eager version's 10.

template <class T>
static void softmax_cpu(T* S, int64_t R, int Tq, int Tk, bool causal) {
#pragma omp parallel for if (R * Tk > 16384)
    for (int64_t r = 0; r < R; r++) {
        T* s = S + r * Tk;
        int n = causal ? std::min((int)(r % Tq) + 1, Tk) : Tk;
        using A = decltype(to_acc(T()));
        A m = -INFINITY;
        double sum = 0;
        for (int j = 0; j < n; j++) { m = std::max(m, to_acc(s[j])); }
        for (int j = 0; j < n; j++) { sum += std::exp(to_acc(s[j]) - m); }
        for (int j = 0; j < Tk; j++) { from_acc(j < n ? A(std::exp(to_acc(s[j]) - m) / sum) : A(0), &s[j]); }
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
        using A = decltype(to_acc(T()));
        double D = 0;
        for (int j = 0; j < n; j++) { D += (double)to_acc(p[j]) * to_acc(dp[j]); }
        for (int j = 0; j < Tk; j++) { from_acc(j < n ? to_acc(p[j]) * (to_acc(dp[j]) - A(D)) : A(0), &dp[j]); }
    }
}

#ifdef __CUDACC__
// One warp a row: neighbouring lanes read neighbouring columns, and a row's second pass finds it in L1.
template <class T>
__global__ void softmax_kernel(T* S, int64_t R, int Tq, int Tk, bool causal) {
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
    float inverse = 1 / warp_sum(sum * expf(m - row_m));
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

static void softmax_in_place(const Tensor& s, bool causal) {
    int Tq = (int)s.dim(-2), Tk = (int)s.dim(-1);
    int64_t R = s.size() / Tk;
    if (s.device() == META || R == 0) { return; }
#ifdef __CUDACC__
    if (s.device() == CUDA) {
        return with_gpu_type(s.dtype, [&](auto zero) {
            softmax_kernel<<<ceil_div(R * WARP, 256), 256, 0, stream()>>>(s.as<decltype(zero)>(), R, Tq, Tk, causal);
            LAUNCH_CHECK();
        });
    }
#endif
    with_type(s.dtype, [&](auto zero) { softmax_cpu(s.as<decltype(zero)>(), R, Tq, Tk, causal); });
}
static void softmax_backward_in_place(const Tensor& dp, const Tensor& p, bool causal) {
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

static Tensor attention_fused(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, bool causal) {
    Range range("attention");
    Tensor q = contiguous(autocast_operand(q_in)), k = contiguous(autocast_operand(k_in)),
           v = contiguous(autocast_operand(v_in));
    double scale = 1 / std::sqrt((double)q.dim(-1));
    Tensor p = empty({q.dim(0), q.dim(1), q.dim(2), k.dim(2)}, q.dtype), o = empty(q.shape, q.dtype);
    gemm(p, q, false, k, true, scale);
    softmax_in_place(p, causal);
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

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
    return context.mode == EAGER ? attention_eager(q, k, v, causal) : attention_fused(q, k, v, causal);
}
