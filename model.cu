// model.cu: the handout's Transformer LM and its training step.
//
//   x = E[tokens]
//   each layer:  x += Wo attention(rope(Wq n), rope(Wk n), Wv n)        n = rmsnorm(x; ln1)
//                x += W2 (silu(W1 n) * W3 n)                            n = rmsnorm(x; ln2)
//   logits = lm_head rmsnorm(x; ln_final)
//
// Each op below comes as: formula; the eager form, a chain of tensor.cu's one-kernel operations that autograd
// differentiates; the fused form with its backward by hand, as a plain loop for the CPU and as kernels for the GPU.
// Under autocast, T is the compute type (bf16, fp16), while the residual stream x, the weights and all sums are fp32.
#include "gpu.h"
#include <algorithm>
#include <cfloat>

#ifdef __CUDACC__
// Sum or maximum over a block of at most 32 warps, given to every thread. The first barrier closes the hazard that a
// slow warp still reads `shared` from the call before.
template <float (*over_warp)(float)>
__device__ inline float over_block(float x, float of_nothing) {
    __shared__ float shared[WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = (blockDim.x + WARP - 1) / WARP;
    x = over_warp(x);
    __syncthreads();
    if (lane == 0) { shared[warp] = x; }
    __syncthreads();
    return over_warp(lane < warps ? shared[lane] : of_nothing);
}
__device__ inline float block_sum(float x) { return over_block<warp_sum>(x, 0); }
__device__ inline float block_max(float x) { return over_block<warp_max>(x, -INFINITY); }
#endif

// ---------------------------------------------------------------------------------------------------------------------
// RMSNorm, with the residual add before it.
//   x += delta;  r = 1/sqrt(mean_c(x_c^2) + eps);  y_c = w_c x_c r
//   dx_c = r w_c dy_c - x_c r^3/C sum_j(w_j dy_j x_j);  dw_c = sum over rows of dy_c x_c r
// x, delta, y, dx [N,C]; r [N]; w [C]. The handout's model needs 7 kernels forward and about 20 backward for it; fused
// it is 1 and 2, and x is read and written once.

static Tensor add_rmsnorm_eager(Tensor* x, const Tensor& delta, const Tensor& w, float eps) {
    if (delta) {
        Range r("residual");
        *x = add(*x, delta);
    }
    Range r("rmsnorm");
    return mul(w, mul(*x, rsqrt(add_scalar(mean_last(square(*x)), eps))));
}

template <class T>
static void add_rmsnorm_cpu(T* y, Wide<T>* x_out, Wide<T>* r_out, const Wide<T>* x_in, const T* delta, const Wide<T>* w,
                            int64_t N, int64_t C, float eps) {
#pragma omp parallel for if (N > 64)
    for (int64_t n = 0; n < N; n++) {
        const Wide<T>* x = x_in + n * C;
        if (delta) {
            for (int64_t c = 0; c < C; c++) { x_out[n * C + c] = x[c] + to_acc(delta[n * C + c]); }
            x = x_out + n * C;
        }
        double sum = 0;
        for (int64_t c = 0; c < C; c++) { sum += (double)x[c] * x[c]; }
        Wide<T> r = (Wide<T>)(1 / std::sqrt(sum / C + eps));
        for (int64_t c = 0; c < C; c++) { from_acc(w[c] * (x[c] * r), &y[n * C + c]); }
        r_out[n] = r;
    }
}
template <class T>
static void rmsnorm_backward_cpu(Wide<T>* dx, bool add_dx, T* dx_low, Wide<T>* dw, bool add_dw, const T* dy,
                                 const Wide<T>* x, const Wide<T>* r, const Wide<T>* w, int64_t N, int64_t C) {
#pragma omp parallel for if (N > 64)
    for (int64_t n = 0; n < N; n++) {
        double dot = 0;
        for (int64_t i = n * C; i < (n + 1) * C; i++) { dot += (double)w[i - n * C] * to_acc(dy[i]) * x[i]; }
        Wide<T> k = (Wide<T>)(dot * r[n] * r[n] * r[n] / C);
        for (int64_t i = n * C; i < (n + 1) * C; i++) {
            Wide<T> d = r[n] * w[i - n * C] * to_acc(dy[i]) - x[i] * k;
            dx[i] = add_dx ? dx[i] + d : d;
            if (dx_low) { from_acc(dx[i], &dx_low[i]); }
        }
    }
#pragma omp parallel for if (N > 64)
    for (int64_t c = 0; c < C; c++) {
        double sum = 0;
        for (int64_t n = 0; n < N; n++) { sum += (double)to_acc(dy[n * C + c]) * x[n * C + c] * r[n]; }
        dw[c] = (Wide<T>)(add_dw ? dw[c] + sum : sum);
    }
}

#ifdef __CUDACC__
// A row's elements are needed twice, before and after the sum over the row. A row of one pack per thread stays in
// registers in between; a longer row is read again, by the thread that wrote it, from L1 or L2.
template <class T, int W>
__global__ void __launch_bounds__(PACK_THREADS)
    add_rmsnorm_kernel(T* y, float* x_out, float* r_out, const float* x, const T* delta, const float* w_in, int C,
                       float eps) {
    const int64_t row = blockIdx.x * (int64_t)C;
    const int step = W * blockDim.x;
    Pack<float, W> v = {}, w = {};
    float sum = 0;
    for (int c = W * threadIdx.x; c < C; c += step) {
        v = load_pack<W>(x + row + c), w = load_pack<W>(w_in + c);
        if (delta) {
            Pack<T, W> d = load_pack<W>(delta + row + c);
            for (int i = 0; i < W; i++) { v.x[i] += to_acc(d.x[i]); }
            store_pack(x_out + row + c, v);
        }
        for (float value : v.x) { sum += value * value; }
    }
    float r = 1 / sqrtf(block_sum(sum) / C + eps);
    for (int c = W * threadIdx.x; c < C; c += step) {
        if (C > step) { v = load_pack<W>((delta ? x_out : x) + row + c), w = load_pack<W>(w_in + c); }
        Pack<T, W> out;
        for (int i = 0; i < W; i++) { from_acc(w.x[i] * (v.x[i] * r), &out.x[i]); }
        store_pack(y + row + c, out);
    }
    if (threadIdx.x == 0) { r_out[blockIdx.x] = r; }
}
// Writes dx, a copy of it as T if wanted, and each block's share of dw: the sum over its rows, in partial
// [gridDim.x,C]. A thread has the same columns in all of its rows, so it adds them up in registers, or in `partial`
// where a row is several packs per thread.
template <class T, int W>
__global__ void __launch_bounds__(PACK_THREADS)
    rmsnorm_backward_kernel(float* dx, bool add_dx, T* dx_low, float* partial, const T* dy, const float* x,
                            const float* r_in, const float* w_in, int N, int C) {
    const int first = blockIdx.x, rows = gridDim.x, step = W * blockDim.x;
    Pack<float, W> v = {}, w = {}, out = {}, dw = {};
    Pack<T, W> d = {};
    for (int n = first; n < N; n += rows) {
        const int64_t row = n * (int64_t)C;
        auto read = [&](int c) {
            v = load_pack<W>(x + row + c), w = load_pack<W>(w_in + c), d = load_pack<W>(dy + row + c);
            if (add_dx) { out = load_pack<W>(dx + row + c); }
        };
        float dot = 0, r = r_in[n];
        for (int c = W * threadIdx.x; c < C; c += step) {
            read(c);
            for (int i = 0; i < W; i++) { dot += w.x[i] * to_acc(d.x[i]) * v.x[i]; }
        }
        float k = block_sum(dot) * r * r * r / C;
        for (int c = W * threadIdx.x; c < C; c += step) {
            float* sums = partial + first * (int64_t)C + c;
            if (C > step) {
                read(c);
                dw = n == first ? Pack<float, W>() : load_pack<W>(sums);
            }
            Pack<T, W> low;
            for (int i = 0; i < W; i++) {
                float g = to_acc(d.x[i]), change = r * w.x[i] * g - v.x[i] * k;
                out.x[i] = add_dx ? out.x[i] + change : change;
                dw.x[i] += g * v.x[i] * r;
                from_acc(out.x[i], &low.x[i]);
            }
            store_pack(dx + row + c, out);
            if (dx_low) { store_pack(dx_low + row + c, low); }
            if (C > step || n + rows >= N) { store_pack(sums, dw); }
        }
    }
}
// dw from the partial sums, always in the same order: 32 columns per block, and 32 threads per column.
constexpr int DW_SHARES = 32;
__global__ void rmsnorm_dw_kernel(float* dw, bool add_dw, const float* partial, int parts, int C) {
    __shared__ float shared[DW_SHARES][WARP];
    int c = blockIdx.x * WARP + threadIdx.x;
    float sum = 0;
    if (c < C) {
        for (int k = threadIdx.y; k < parts; k += DW_SHARES) { sum += partial[k * (int64_t)C + c]; }
    }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();  // all shares must be there
    if (threadIdx.y == 0 && c < C) {
        for (int k = 1; k < DW_SHARES; k++) { sum += shared[k][threadIdx.x]; }
        dw[c] = add_dw ? dw[c] + sum : sum;
    }
}
#endif

static void rmsnorm_backward(const Tensor& dx, bool add_dx, const Tensor& dx_low, const Tensor& dw, bool add_dw,
                             const Tensor& dy, const Tensor& x, const Tensor& r, const Tensor& w) {
    int64_t C = w.size(), N = x.size() / C;
#ifdef __CUDACC__
    // Four rows or more per block, so that the partial sums are few beside them; and no more blocks than run at a time.
    int parts = dx.device() == CPU ? 0 : std::min(ceil_div(N, 4), 4 * multiprocessors());
    Tensor partial = dx.device() == CPU ? Tensor() : empty({parts, C}, F32, WORKSPACE);
    if (dx.device() == CUDA) {
        with_packs(dy.dtype, C, {dx.data, dx_low.data, partial.data, dy.data, x.data, w.data},
                   [&](auto zero, auto width) {
                       using T = decltype(zero);
                       rmsnorm_backward_kernel<T, width><<<parts, threads_for(C / width), 0, stream()>>>(
                           dx.as<float>(), add_dx, dx_low.as<T>(), partial.as<float>(), dy.as<T>(), x.as<float>(),
                           r.as<float>(), w.as<float>(), (int)N, (int)C);
                       LAUNCH_CHECK();
                   });
        rmsnorm_dw_kernel<<<ceil_div(C, WARP), dim3(WARP, DW_SHARES), 0, stream()>>>(
            dw.as<float>(), add_dw, partial.as<float>(), parts, (int)C);
        LAUNCH_CHECK();
        return;
    }
#endif
    if (dx.device() == META) { return; }
    with_type(dy.dtype, [&](auto zero) {
        using T = decltype(zero);
        rmsnorm_backward_cpu(dx.as<Wide<T>>(), add_dx, dx_low.as<T>(), dw.as<Wide<T>>(), add_dw, dy.as<T>(),
                             x.as<Wide<T>>(), r.as<Wide<T>>(), w.as<Wide<T>>(), N, C);
    });
}

static Tensor add_rmsnorm_fused(Tensor* x_io, const Tensor& delta, const Tensor& w, float eps) {
    Range range("rmsnorm");
    Tensor x_in = *x_io, x = delta ? empty(x_in.shape, x_in.dtype) : x_in;
    int64_t C = w.size(), N = x.size() / C;
    // y is rounded once, here; autocast would cast it before the product.
    DType dtype = x.dtype == F64 ? F64 : matmul_dtype();
    Tensor y = empty(x.shape, dtype), r = empty({N}, x.dtype);
    if (delta && delta.dtype != dtype) { fail("add_rmsnorm: delta is %s", name_of(delta.dtype)); }
    if (x.device() == CPU) {
        with_type(dtype, [&](auto zero) {
            using T = decltype(zero);
            add_rmsnorm_cpu(y.as<T>(), x.as<Wide<T>>(), r.as<Wide<T>>(), x_in.as<Wide<T>>(), delta.as<T>(),
                            w.as<Wide<T>>(), N, C, eps);
        });
    }
#ifdef __CUDACC__
    if (x.device() == CUDA) {
        with_packs(dtype, C, {y.data, x.data, x_in.data, delta.data, w.data}, [&](auto zero, auto width) {
            using T = decltype(zero);
            add_rmsnorm_kernel<T, width><<<N, threads_for(C / width), 0, stream()>>>(
                y.as<T>(), x.as<float>(), r.as<float>(), x_in.as<float>(), delta.as<T>(), w.as<float>(), (int)C, eps);
            LAUNCH_CHECK();
        });
    }
#endif
    auto dx_low = std::make_shared<Tensor>();  // delta's gradient, written along with dx
    if (delta) {
        record(x, {x_in, delta}, [dx_low, gx = x_in.gradient, gd = delta.gradient](const Tensor& dx) {
            add_gradient(gx, dx);
            add_gradient(gd, *dx_low ? *dx_low : dx);
            *dx_low = Tensor();
        });
        *x_io = x;
    }
    bool low = delta && delta.gradient && delta.dtype != x.dtype;
    record(y, {x, w}, [x, r, w, dx_low, low](const Tensor& dy) {  // the last to add to x's gradient
        bool add_dx;
        Tensor dx = gradient_target(x.gradient, &add_dx);
        if (low) { *dx_low = empty(x.shape, dy.dtype); }
        write_gradient(w.gradient, [&](const Tensor& dw, bool add_dw) {
            rmsnorm_backward(dx, add_dx, *dx_low, dw, add_dw, contiguous(dy), x, r, w);
        });
    });
    if (context.recompute && y.gradient) {
        y.gradient->recompute = [x = detached(x), w, eps] {
            NoGrad no_grad;
            Tensor same = x;
            return add_rmsnorm_fused(&same, Tensor(), w, eps);
        };
    }
    return y;
}
Tensor add_rmsnorm(Tensor* x, const Tensor& delta, const Tensor& weight, float eps) {
    return context.mode == EAGER ? add_rmsnorm_eager(x, delta, weight, eps) : add_rmsnorm_fused(x, delta, weight, eps);
}

// ---------------------------------------------------------------------------------------------------------------------
// RoPE: each pair (x_2i, x_2i+1) of a query or key at position t is rotated by the angle t theta^(-2i/D):
//   y_2i = cos x_2i - sin x_2i+1,  y_2i+1 = sin x_2i + cos x_2i+1;  backward rotates by the opposite angle.
// Fused: one product gives q, k and v side by side, y [B,T,C] -> [B,T,3,H,D]. One kernel rotates q and k and lays all
// three out as [B,H,T,D] for attention: 3 elements read and 3 written, where eager needs some 16 kernels.

Tensor rope_table(int64_t T, int64_t D, float theta, DType dtype) {
    std::vector<float> values(T * D);
    for (int64_t t = 0; t < T; t++) {
        for (int64_t i = 0; i < D / 2; i++) {
            double angle = t * pow((double)theta, -2.0 * i / D);
            values[t * D + 2 * i] = (float)cos(angle);
            values[t * D + 2 * i + 1] = (float)sin(angle);
        }
    }
    return context.device == META ? empty({T, D}, dtype, INPUTS) : from_floats(values, {T, D}, dtype);
}

static Tensor rope_eager(const Tensor& x, const Tensor& rope) {
    Range r("rope");
    Tensor cos = slice_last(rope, 0, 2), sin = slice_last(rope, 1, 2), x1 = slice_last(x, 0, 2),
           x2 = slice_last(x, 1, 2);
    return interleave_last(sub(mul(cos, x1), mul(sin, x2)), add(mul(sin, x1), mul(cos, x2)));
}

struct HeadShape {
    int T, H, D;
};
// One pair, by the angle whose cosine and sine are cos_sin.
template <class T>
HD inline void rotate_pair(T* x, const Wide<T>* cos_sin, bool backward) {
    Wide<T> x1 = to_acc(x[0]), x2 = to_acc(x[1]), cos = cos_sin[0], sin = backward ? -cos_sin[1] : cos_sin[1];
    from_acc(cos * x1 - sin * x2, &x[0]);
    from_acc(sin * x1 + cos * x2, &x[1]);
}
// The place, in [B,H,T,D], of column c of row bt of q, k or v, which are [B,T] rows of [H,D].
HD inline int64_t in_heads(int bt, int c, HeadShape s) {
    int h = c / s.D;
    return (((int64_t)(bt / s.T) * s.H + h) * s.T + bt % s.T) * s.D + (c - h * s.D);
}
#ifdef __CUDACC__
template <class T, int W>
__device__ inline void rotate_pack(Pack<T, W>& pack, const float* rope, bool backward) {
    Pack<float, W> cos_sin = load_pack<W>(rope);
    for (int i = 0; i < W; i += 2) { rotate_pair(&pack.x[i], &cos_sin.x[i], backward); }
}
// From qkv to the heads, or with `backward` from the heads' gradients to qkv's.
template <class T, int W>
__global__ void __launch_bounds__(PACK_THREADS)
    split_heads_kernel(T* qkv, T* q, T* k, T* v, const float* rope, HeadShape s, bool backward) {
    const int C = s.H * s.D, bt = blockIdx.x, which = blockIdx.y;
    T *heads = which == 0 ? q : which == 1 ? k : v, *joined = qkv + (bt * (int64_t)3 + which) * C;
    for (int c = W * threadIdx.x; c < C; c += W * blockDim.x) {
        T* head = heads + in_heads(bt, c, s);
        Pack<T, W> pack = load_pack<W>(backward ? head : joined + c);
        if (which < 2) { rotate_pack(pack, rope + bt % s.T * s.D + c % s.D, backward); }
        store_pack(backward ? joined + c : head, pack);
    }
}
#endif
static void split_heads_run(const Tensor& qkv, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& rope,
                            bool backward) {
    HeadShape s{(int)q.dim(2), (int)q.dim(1), (int)q.dim(3)};
    int64_t n = qkv.size(), C = s.H * s.D, N = n / (3 * C);
    if (qkv.device() == META || n == 0) { return; }
#ifdef __CUDACC__
    if (qkv.device() == CUDA) {
        std::vector<const void*> addresses = {qkv.data, q.data, k.data, v.data, rope.data};
        return with_packs<2>(qkv.dtype, s.D, addresses, [&](auto zero, auto width) {
            using T = decltype(zero);
            split_heads_kernel<T, width><<<dim3(N, 3), threads_for(C / width), 0, stream()>>>(
                qkv.as<T>(), q.as<T>(), k.as<T>(), v.as<T>(), rope.as<float>(), s, backward);
            LAUNCH_CHECK();
        });
    }
#endif
    with_type(qkv.dtype, [&](auto zero) {
        using T = decltype(zero);
        T* heads[] = {q.as<T>(), k.as<T>(), v.as<T>()};
#pragma omp parallel for if (n > 32768)
        for (int bt = 0; bt < (int)N; bt++) {
            for (int64_t i = 0; i < 3 * C; i += 2) {
                int which = (int)(i / C), c = (int)(i % C);
                T *joined = qkv.as<T>() + bt * 3 * C + i, *head = heads[which] + in_heads(bt, c, s);
                T *from = backward ? head : joined, *to = backward ? joined : head;
                to[0] = from[0], to[1] = from[1];
                if (which < 2) { rotate_pair(to, rope.as<Wide<T>>() + bt % s.T * s.D + c % s.D, backward); }
            }
        }
    });
}

void split_heads(const Layer& layer, const Tensor& y, const Tensor& rope_all, int H, Tensor* q, Tensor* k, Tensor* v) {
    int64_t B = y.dim(0), T = y.dim(1), C = y.dim(2), D = C / H;
    Tensor rope = view(rope_all, 0, {T, D});
    if (context.mode == EAGER) {
        Range r("projections");
        auto heads = [&](const Tensor& w) { return transpose(reshape(linear(y, w), {B, T, H, D}), 1, 2); };
        *q = rope_eager(heads(layer.q), rope), *k = rope_eager(heads(layer.k), rope), *v = heads(layer.v);
        return;
    }
    Range r("projections");
    Tensor qkv = linear(y, layer.qkv);
    *q = empty({B, H, T, D}, qkv.dtype), *k = empty({B, H, T, D}, qkv.dtype), *v = empty({B, H, T, D}, qkv.dtype);
    split_heads_run(qkv, *q, *k, *v, rope, false);
    // Three outputs, one backward: v's step is recorded first, so it runs last, when all three gradients are there.
    auto dq = std::make_shared<Tensor>(), dk = std::make_shared<Tensor>();
    record(*v, {qkv}, [dq, dk, rope, g = qkv.gradient](const Tensor& dv) {
        Tensor dqkv = empty(g->shape, g->dtype);
        split_heads_run(dqkv, *dq, *dk, contiguous(dv), rope, true);
        add_gradient(g, dqkv);
    });
    record(*k, {qkv}, [dk](const Tensor& d) { *dk = contiguous(d); });
    record(*q, {qkv}, [dq](const Tensor& d) { *dq = contiguous(d); });
}

// Mode flash rotates q and k in place, side by side in qkv: attention reads them by strides.
#ifdef __CUDACC__
template <class T, int W>
__global__ void __launch_bounds__(PACK_THREADS) rope_kernel(T* qkv, const float* rope, HeadShape s, bool backward) {
    const int C = s.H * s.D, bt = blockIdx.x;
    for (int c = W * threadIdx.x; c < 2 * C; c += W * blockDim.x) {
        T* x = qkv + bt * (int64_t)3 * C + c;
        Pack<T, W> pack = load_pack<W>(x);
        rotate_pack(pack, rope + bt % s.T * s.D + c % s.D, backward);
        store_pack(x, pack);
    }
}
#endif
static void rotate(const Tensor& qkv, const Tensor& rope, int H, bool backward) {
    HeadShape s{(int)qkv.dim(1), H, (int)rope.dim(1)};
    int64_t n = qkv.size(), C = s.H * s.D, N = n / (3 * C);
    if (qkv.device() == META || n == 0) { return; }
#ifdef __CUDACC__
    if (qkv.device() == CUDA) {
        return with_packs<2>(qkv.dtype, s.D, {qkv.data, rope.data}, [&](auto zero, auto width) {
            using T = decltype(zero);
            rope_kernel<T, width>
                <<<N, threads_for(2 * C / width), 0, stream()>>>(qkv.as<T>(), rope.as<float>(), s, backward);
            LAUNCH_CHECK();
        });
    }
#endif
    with_type(qkv.dtype, [&](auto zero) {
        using T = decltype(zero);
#pragma omp parallel for if (n > 32768)
        for (int64_t bt = 0; bt < N; bt++) {
            for (int64_t c = 0; c < 2 * C; c += 2) {
                rotate_pair(qkv.as<T>() + bt * 3 * C + c, rope.as<Wide<T>>() + bt % s.T * s.D + c % s.D, backward);
            }
        }
    });
}
static Tensor rope_in_place(const Tensor& qkv, const Tensor& rope, int H) {
    rotate(qkv, rope, H, false);
    Tensor rotated = detached(qkv);
    record(rotated, {qkv}, [rope, H, g = qkv.gradient](const Tensor& d) {
        rotate(d, rope, H, true);  // in place again: attention's backward made d for us alone
        add_gradient(g, d);
    });
    return rotated;
}

Tensor self_attention(const Layer& layer, const Tensor& y, const Tensor& rope, int H) {
    if (context.mode == FLASH) {
        Tensor qkv;
        {
            Range r("projections");
            qkv = rope_in_place(linear(y, layer.qkv), view(rope, 0, {y.dim(1), y.dim(2) / H}), H);
        }
        return flash_self_attention(qkv, H);
    }
    Tensor q, k, v;
    split_heads(layer, y, rope, H, &q, &k, &v);
    return reshape(transpose(attention(q, k, v, true), 1, 2), y.shape);
}

// ---------------------------------------------------------------------------------------------------------------------
// SwiGLU: g = silu(a) * b with a = y w1^T, b = y w3^T, silu(a) = a s, s = 1/(1 + exp(-a)).
//   da = dg b s (1 + a (1 - s)),  db = dg a s.
// Fused: one product gives h = [a | b], [N,2F]; then 2 reads and 1 write.

template <class A>
HD inline A sigmoid_of(A a) {
    return 1 / (1 + std::exp(-a));
}
template <class T>
HD inline void swiglu_element(T* g, T a_in, T b_in) {
    Wide<T> a = to_acc(a_in), b = to_acc(b_in);
    from_acc(a * sigmoid_of(a) * b, g);
}
template <class T>
HD inline void swiglu_backward_element(T* da, T* db, T dg_in, T a_in, T b_in) {
    Wide<T> a = to_acc(a_in), b = to_acc(b_in), s = sigmoid_of(a), dg = to_acc(dg_in);
    from_acc(dg * b * s * (1 + a * (1 - s)), da);
    from_acc(dg * a * s, db);
}
#ifdef __CUDACC__
template <class T, int W>
__global__ void __launch_bounds__(PACK_THREADS) swiglu_kernel(T* g, const T* h, int F) {
    const int64_t row = blockIdx.x * (int64_t)F;
    for (int f = W * threadIdx.x; f < F; f += W * blockDim.x) {
        Pack<T, W> a = load_pack<W>(h + 2 * row + f), b = load_pack<W>(h + 2 * row + F + f), out;
        for (int i = 0; i < W; i++) { swiglu_element(&out.x[i], a.x[i], b.x[i]); }
        store_pack(g + row + f, out);
    }
}
template <class T, int W>
__global__ void __launch_bounds__(PACK_THREADS) swiglu_backward_kernel(T* dh, const T* dg, const T* h, int F) {
    const int64_t row = blockIdx.x * (int64_t)F;
    for (int f = W * threadIdx.x; f < F; f += W * blockDim.x) {
        const int64_t at = 2 * row + f;
        Pack<T, W> a = load_pack<W>(h + at), b = load_pack<W>(h + at + F), d = load_pack<W>(dg + row + f), da, db;
        for (int i = 0; i < W; i++) { swiglu_backward_element(&da.x[i], &db.x[i], d.x[i], a.x[i], b.x[i]); }
        store_pack(dh + at, da);
        store_pack(dh + at + F, db);
    }
}
#endif
static void swiglu_run(const Tensor& g, const Tensor& h) {
    int64_t n = g.size(), F = g.dim(-1);
    if (g.device() == META || n == 0) { return; }
#ifdef __CUDACC__
    if (g.device() == CUDA) {
        return with_packs(g.dtype, F, {g.data, h.data}, [&](auto zero, auto width) {
            using T = decltype(zero);
            swiglu_kernel<T, width><<<n / F, threads_for(F / width), 0, stream()>>>(g.as<T>(), h.as<T>(), (int)F);
            LAUNCH_CHECK();
        });
    }
#endif
    with_type(g.dtype, [&](auto zero) {
        using T = decltype(zero);
        const T* a = h.as<T>();
#pragma omp parallel for if (n > 16384)
        for (int64_t i = 0; i < n; i++) {
            int64_t at = i / F * 2 * F + i % F;
            swiglu_element(g.as<T>() + i, a[at], a[at + F]);
        }
    });
}
static void swiglu_backward_run(const Tensor& dh, const Tensor& dg, const Tensor& h) {
    int64_t n = dg.size(), F = dg.dim(-1);
    if (dg.device() == META || n == 0) { return; }
#ifdef __CUDACC__
    if (dg.device() == CUDA) {
        return with_packs(dg.dtype, F, {dh.data, dg.data, h.data}, [&](auto zero, auto width) {
            using T = decltype(zero);
            swiglu_backward_kernel<T, width>
                <<<n / F, threads_for(F / width), 0, stream()>>>(dh.as<T>(), dg.as<T>(), h.as<T>(), (int)F);
            LAUNCH_CHECK();
        });
    }
#endif
    with_type(dg.dtype, [&](auto zero) {
        using T = decltype(zero);
        const T* a = h.as<T>();
        T* da = dh.as<T>();
#pragma omp parallel for if (n > 16384)
        for (int64_t i = 0; i < n; i++) {
            int64_t at = i / F * 2 * F + i % F;
            swiglu_backward_element(&da[at], &da[at + F], dg.as<T>()[i], a[at], a[at + F]);
        }
    });
}
Tensor swiglu(const Layer& layer, const Tensor& y) {
    if (context.mode == EAGER) {
        Tensor a = linear(y, layer.w1), b = linear(y, layer.w3);
        Range r("swiglu");
        return mul(mul(a, sigmoid(a)), b);
    }
    Tensor h = linear(y, layer.w13);
    Range r("swiglu");
    Shape shape = y.shape;
    shape.back() = layer.w1.dim(0);
    auto compute = [shape, h = detached(h)] {
        Tensor g = empty(shape, h.dtype);
        swiglu_run(g, h);
        return g;
    };
    Tensor g = compute();
    record(g, {h}, [h](const Tensor& dg) {
        Tensor dh = empty(h.shape, h.dtype);
        swiglu_backward_run(dh, contiguous(dg), h);
        add_gradient(h.gradient, dh);
    });
    if (context.recompute && g.gradient) {
        g.gradient->recompute = [compute] {
            Range range("swiglu");
            return compute();
        };
    }
    return g;
}

// ---------------------------------------------------------------------------------------------------------------------
// Cross-entropy of logits l [N,V] with targets t [N]:  loss = mean_n( lse_n - l[n,t_n] ), lse_n = log sum_v exp(l[n,v])
//   dl[n,v] = (exp(l[n,v] - lse_n) - [v = t_n]) dloss / N.   In fp32 whatever the logits are.
// Fused: the logits are read once forward and once backward, and their gradient takes their place in memory.

static Tensor cross_entropy_eager(const Tensor& logits, const Tensor& targets) {
    Tensor l = cast(logits, logits.dtype == F64 ? F64 : F32);
    Tensor shifted = sub(l, max_last(l));
    return mean_all(sub(log(sum_last(exp(shifted))), pick_last(shifted, targets)));
}
template <class T>
static void cross_entropy_cpu(Wide<T>* loss, Wide<T>* lse, const T* logits, const int* targets, int64_t N, int64_t V) {
#pragma omp parallel for if (N > 64)
    for (int64_t n = 0; n < N; n++) {
        const T* l = logits + n * V;
        Wide<T> m = -INFINITY;
        double sum = 0;
        for (int64_t v = 0; v < V; v++) { m = std::max(m, to_acc(l[v])); }
        for (int64_t v = 0; v < V; v++) { sum += std::exp(to_acc(l[v]) - m); }
        lse[n] = (Wide<T>)(m + std::log(sum));
        loss[n] = lse[n] - to_acc(l[targets[n]]);
    }
}
template <class T>
static void cross_entropy_backward_cpu(T* dl, const T* l, const Wide<T>* lse, const int* targets, Wide<T> dloss,
                                       int64_t N, int64_t V) {
#pragma omp parallel for if (N > 64)
    for (int64_t n = 0; n < N; n++) {
        for (int64_t v = 0; v < V; v++) {
            Wide<T> p = std::exp(to_acc(l[n * V + v]) - lse[n]);
            from_acc((p - (v == targets[n])) * dloss / N, &dl[n * V + v]);
        }
    }
}
#ifdef __CUDACC__
// Maximum and sum in one pass, the sum rescaled when the maximum grows. The maximum starts from a finite number: logits
// of -inf then add exp(-inf) = 0, where -inf - -inf would be NaN.
template <class T, int W>
__global__ void __launch_bounds__(PACK_THREADS)
    cross_entropy_kernel(float* loss, float* lse, const T* logits, const int* targets, int V) {
    const T* l = logits + blockIdx.x * (int64_t)V;
    float m = -FLT_MAX, sum = 0;
    for (int v = W * threadIdx.x; v < V; v += W * blockDim.x) {
        Pack<T, W> pack = load_pack<W>(l + v);
        float larger = m;
        for (const T& x : pack.x) { larger = fmaxf(larger, to_acc(x)); }
        sum *= expf(m - larger);
        for (const T& x : pack.x) { sum += expf(to_acc(x) - larger); }
        m = larger;
    }
    float row_m = block_max(m), row_sum = block_sum(sum * expf(m - row_m));
    if (threadIdx.x == 0) {
        lse[blockIdx.x] = row_m + logf(row_sum);
        loss[blockIdx.x] = lse[blockIdx.x] - to_acc(l[targets[blockIdx.x]]);
    }
}
template <class T, int W>
__global__ void __launch_bounds__(PACK_THREADS)
    cross_entropy_backward_kernel(T* dl, const T* l, const float* lse_in, const int* targets, const float* dloss,
                                  int64_t N, int V) {
    const int64_t row = blockIdx.x * (int64_t)V;
    const float k = *dloss / N, lse = lse_in[blockIdx.x];
    const int target = targets[blockIdx.x];
    for (int v = W * threadIdx.x; v < V; v += W * blockDim.x) {
        Pack<T, W> pack = load_pack<W>(l + row + v);
        for (int i = 0; i < W; i++) { from_acc((expf(to_acc(pack.x[i]) - lse) - (v + i == target)) * k, &pack.x[i]); }
        store_pack(dl + row + v, pack);
    }
}
#endif
static void cross_entropy_run(const Tensor& loss, const Tensor& lse, const Tensor& l, const Tensor& targets) {
    int64_t N = l.dim(0), V = l.dim(1);
    if (l.device() == META) { return; }
#ifdef __CUDACC__
    if (l.device() == CUDA) {
        return with_packs(l.dtype, V, {l.data}, [&](auto zero, auto width) {
            using T = decltype(zero);
            cross_entropy_kernel<T, width><<<N, threads_for(V / width), 0, stream()>>>(
                loss.as<float>(), lse.as<float>(), l.as<T>(), targets.as<int>(), (int)V);
            LAUNCH_CHECK();
        });
    }
#endif
    with_type(l.dtype, [&](auto zero) {
        using T = decltype(zero);
        cross_entropy_cpu(loss.as<Wide<T>>(), lse.as<Wide<T>>(), l.as<T>(), targets.as<int>(), N, V);
    });
}
static void cross_entropy_backward_run(const Tensor& dl, const Tensor& l, const Tensor& lse, const Tensor& targets,
                                       const Tensor& dloss) {
    int64_t N = l.dim(0), V = l.dim(1);
    if (l.device() == META) { return; }
#ifdef __CUDACC__
    if (l.device() == CUDA) {
        return with_packs(l.dtype, V, {dl.data, l.data}, [&](auto zero, auto width) {
            using T = decltype(zero);
            cross_entropy_backward_kernel<T, width><<<N, threads_for(V / width), 0, stream()>>>(
                dl.as<T>(), l.as<T>(), lse.as<float>(), targets.as<int>(), dloss.as<float>(), N, (int)V);
            LAUNCH_CHECK();
        });
    }
#endif
    with_type(l.dtype, [&](auto zero) {
        using T = decltype(zero);
        cross_entropy_backward_cpu(dl.as<T>(), l.as<T>(), lse.as<Wide<T>>(), targets.as<int>(), *dloss.as<Wide<T>>(), N,
                                   V);
    });
}
Tensor cross_entropy(const Tensor& logits, const Tensor& targets) {
    Range range("loss");
    int64_t V = logits.dim(-1), N = logits.size() / V;
    Tensor l = reshape(logits, {N, V});
    if (context.mode == EAGER) { return cross_entropy_eager(l, targets); }
    DType wide = l.dtype == F64 ? F64 : F32;
    Tensor rows = empty({N}, wide), lse = empty({N}, wide);
    cross_entropy_run(rows, lse, l, targets);
    Tensor loss = detached(mean_all(detached(rows)));
    record(loss, {l}, [l, lse, targets](const Tensor& dloss) {
        bool ours_alone = l.memory.use_count() == 1;  // nobody else can still want to see the logits
        Tensor dl = ours_alone ? detached(l) : empty(l.shape, l.dtype);
        cross_entropy_backward_run(dl, l, lse, targets, dloss);
        add_gradient(l.gradient, dl);
    });
    return loss;
}

// ---------------------------------------------------------------------------------------------------------------------
// Where a model's gradients lie: in their arena, whose padding holds zeros, or one by one as backward left them.

static int64_t offset_of(const Model& model, const Tensor& slot) {  // in elements
    return (slot.data - model.weights.data) / (int64_t)size_of(slot.dtype);
}
static std::vector<FlatGradient> flat_gradients(const Model& model) {
    int64_t all = 0, filled = 0;  // fused mode fills the joined slots instead of the single ones that they cover
    std::vector<FlatGradient> gradients;
    for (const Parameter& p : model.parameters) { all += count(p.shape); }
    for (const Tensor& t : model.slots) {
        if (!t.gradient->filled) { continue; }
        filled += t.size();
        gradients.push_back({t.gradient->value, offset_of(model, t)});
    }
    if (filled != all) { fail("gradients of %ld of %ld elements are there", (long)filled, (long)all); }
    return model.gradients && !model.form ? std::vector<FlatGradient>{{model.gradients, 0}} : gradients;
}

Tensor gradient_of(const Model& model, const Parameter& p) {
    for (const Tensor& t : model.slots) {
        int64_t begin = p.offset - offset_of(model, t);
        if (t.gradient->filled && begin >= 0 && begin < t.size()) { return view(t.gradient->value, begin, p.shape); }
    }
    fail("%s has no gradient", p.name.c_str());
}

// The gradients' norm, sqrt(sum g^2) over all of them, is for clipping and shows fp16's overflows. The order of the sum
// is fixed, so the same gradients give the same bits.

#ifdef __CUDACC__
constexpr int NORM_BLOCKS = 1024;
template <class T>
__global__ void square_sum_kernel(double* partial, const T* g, int64_t n) {
    float sum = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        float x = to_acc(g[i]);
        sum += x * x;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { partial[blockIdx.x] = sum; }
}
#endif
double square_sum(const std::vector<FlatGradient>& gradients) {
    if (context.device == META) { return 1; }
    double sum = 0;
#ifdef __CUDACC__
    if (context.device == CUDA) {
        auto blocks_of = [](const Tensor& g) { return std::min(NORM_BLOCKS, ceil_div(g.size(), 1024)); };
        int64_t blocks = 0;
        for (const FlatGradient& one : gradients) { blocks += blocks_of(one.g); }
        Tensor partial = empty({blocks}, F64, WORKSPACE);
        double* next = partial.as<double>();
        for (const FlatGradient& one : gradients) {
            const Tensor& g = one.g;
            with_gpu_type(g.dtype, [&](auto zero) {
                square_sum_kernel<<<blocks_of(g), 256, 0, stream()>>>(next, g.as<decltype(zero)>(), g.size());
                LAUNCH_CHECK();
            });
            next += blocks_of(g);
        }
        for (double s : to_doubles(partial)) { sum += s; }
        return sum;
    }
#endif
    constexpr int64_t CHUNK = 1 << 16;  // fixed chunks: the result does not depend on the number of threads
    for (const FlatGradient& one : gradients) {
        int64_t n = one.g.size();
        std::vector<double> partial((n + CHUNK - 1) / CHUNK);
        with_type(one.g.dtype, [&](auto zero) {
            const auto* g = one.g.as<decltype(zero)>();
#pragma omp parallel for
            for (size_t k = 0; k < partial.size(); k++) {
                for (int64_t i = k * CHUNK; i < std::min<int64_t>(n, (k + 1) * CHUNK); i++) {
                    partial[k] += (double)to_acc(g[i]) * to_acc(g[i]);
                }
            }
        });
        for (double s : partial) { sum += s; }
    }
    return sum;
}
double gradient_norm(const Model& model) {
    Range range("gradient norm");
    return sqrt(square_sum(flat_gradients(model)));
}

// ---------------------------------------------------------------------------------------------------------------------
// AdamW (Loshchilov and Hutter, 2019; the handout's order), t = 1, 2, ...:
//   p *= 1 - lr wd;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
//   p -= lr sqrt(1 - b2^t)/(1 - b1^t) m / (sqrt(v) + eps)
// Op by op that is 13 kernels for every parameter tensor; fused it is one: of fp32 p, m and v each is read and written
// once, 24 bytes per parameter, and g read (2 or 4).

#ifdef __CUDACC__
template <class G>
__global__ void adamw_kernel(float* p, const G* g, float* m, float* v, int64_t n, AdamWScalars s) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) { adamw_element(p[i], to_acc(g[i]), m[i], v[i], s); }
}
static void adamw_cuda(const Tensor& p, const std::vector<FlatGradient>& gradients, const Tensor& m, const Tensor& v,
                       AdamWScalars s) {
    for (const FlatGradient& one : gradients) {
        int64_t n = one.g.size(), at = one.offset;
        if (n == 0) { continue; }
        with_gpu_type(one.g.dtype, [&](auto zero) {
            adamw_kernel<<<ceil_div(n, 256), 256, 0, stream()>>>(p.as<float>() + at, one.g.as<decltype(zero)>(),
                                                                 m.as<float>() + at, v.as<float>() + at, n, s);
            LAUNCH_CHECK();
        });
    }
}
static const AddRow<AdamWImpl> cuda_row({"a kernel per tensor", 10, [](Device d) { return d == CUDA; }, adamw_cuda});
#endif
static void adamw_cpu(const Tensor& p_all, const std::vector<FlatGradient>& gradients, const Tensor& m_all,
                      const Tensor& v_all, AdamWScalars s) {
    for (const FlatGradient& one : gradients) {
        with_type(one.g.dtype, [&](auto g_zero) {
            with_type(p_all.dtype, [&](auto p_zero) {
                using P = Wide<decltype(p_zero)>;
                const auto* g = one.g.as<decltype(g_zero)>();
                P *p = p_all.as<P>() + one.offset, *m = m_all.as<P>() + one.offset, *v = v_all.as<P>() + one.offset;
                int64_t n = one.g.size();
#pragma omp parallel for simd if (n > 16384)
                for (int64_t i = 0; i < n; i++) { adamw_element(p[i], (P)to_acc(g[i]), m[i], v[i], s); }
            });
        });
    }
}
static const AddRow<AdamWImpl> cpu_row({"loops", 10, [](Device d) { return d == CPU; }, adamw_cpu});

void adamw_flat(const Tensor& p, const std::vector<FlatGradient>& gradients, const Tensor& m, const Tensor& v,
                AdamWScalars s) {
    const auto& rows = table_of<AdamWImpl>();
    auto row = std::find_if(rows.rbegin(), rows.rend(), [&](const AdamWImpl& r) { return r.takes(p.device()); });
    if (row != rows.rend()) { row->update(p, gradients, m, v, s); }  // META: none
}
static void adamw_eager(const Model& model, AdamWScalars s) {
    for (const Parameter& parameter : model.parameters) {
        Tensor p = parameter.weight, m = view(model.m, parameter.offset, p.shape),
               v = view(model.v, parameter.offset, p.shape);
        Tensor g = p.gradient->value;
        if (s.gradient_scale != 1) { g = scale(g, s.gradient_scale); }
        scale_in_place(p, s.decay);
        scale_in_place(m, s.beta1);
        copy_or_add(m, scale(g, 1 - s.beta1), true);
        scale_in_place(v, s.beta2);
        copy_or_add(v, scale(square(g), 1 - s.beta2), true);
        copy_or_add(p, scale(div(m, add_scalar(sqrt(v), s.eps)), -s.step_size), true);
    }
}
static AdamWScalars scalars_of(const AdamW& a, int t, float gradient_scale) {
    double step_size = a.lr * sqrt(1 - pow(a.beta2, t)) / (1 - pow(a.beta1, t));
    return {1 - a.lr * a.weight_decay, a.beta1, a.beta2, a.eps, (float)step_size, gradient_scale};
}
void adamw_update(const Tensor& p, const std::vector<FlatGradient>& gradients, const Tensor& m, const Tensor& v,
                  const AdamW& a, int t, float gradient_scale) {
    Range range("optimizer");
    adamw_flat(p, gradients, m, v, scalars_of(a, t, gradient_scale));
}
void adamw_step(Model& model, const AdamW& a, float gradient_scale) {
    Range range("optimizer");
    NoGrad no_grad;
    std::vector<FlatGradient> gradients = flat_gradients(model);
    AdamWScalars s = scalars_of(a, ++model.step, gradient_scale);
    if (context.mode == EAGER) {
        adamw_eager(model, s);
    } else if (model.form) {
        model.form->update(model, gradients, s);
    } else {
        adamw_flat(model.weights, gradients, model.m, model.v, s);
    }
}

void choose_form(Model& model) {
    const auto& rows = table_of<WeightForm>();
    auto row = std::find_if(rows.rbegin(), rows.rend(), [&](const WeightForm& r) { return r.takes(model); });
    if (!model.form && row != rows.rend()) { row->enter(model), model.form = &*row; }
}
void plain_weights(Model& model) {
    if (model.form) { model.form->leave(model), model.form = nullptr; }
}

// ---------------------------------------------------------------------------------------------------------------------
// The model: one arena for the weights, one for each moment and, if make_gradients was called, one for the gradients,
// all laid out in the order in which backward finishes the gradients, so that "the gradients that are ready" is always
// a prefix of the arena. Matrices that one product can serve together stand side by side.

const std::vector<ModelConfig> model_sizes = {
    {"small", 768, 3072, 12, 12, 10000},  {"medium", 1024, 4096, 24, 16, 10000},
    {"large", 1280, 5120, 36, 20, 10000}, {"xl", 1600, 6400, 48, 25, 10000},
    {"2.7B", 2560, 10240, 32, 32, 10000}, {"xl (2026)", 2560, 10240, 32, 32, 10000},
    {"10B", 4608, 12288, 50, 36, 10000},
};
int64_t matmul_weights(const ModelConfig& c) {
    int64_t C = c.d_model, F = c.d_ff;
    return c.num_layers * (4 * C * C + 3 * C * F) + c.vocab_size * C;
}
int64_t forward_flops(const ModelConfig& c, int64_t B, int64_t T) {
    return 2 * B * T * matmul_weights(c) + 4 * B * T * T * c.d_model * c.num_layers;
}
void check_config(const ModelConfig& c) {
    if (c.d_model % c.num_heads != 0) {
        usage_error("--d_model %d is not divisible by --num_heads %d", c.d_model, c.num_heads);
    }
    if (c.d_model / c.num_heads % 2 != 0) {
        usage_error("--d_model %d / --num_heads %d = %d is odd; RoPE turns pairs, so the head size must be even",
                    c.d_model, c.num_heads, c.d_model / c.num_heads);
    }
}

constexpr int64_t ARENA_ALIGNMENT = 64;  // elements; 256 bytes of fp32

static int64_t aligned(int64_t offset) { return (offset + ARENA_ALIGNMENT - 1) / ARENA_ALIGNMENT * ARENA_ALIGNMENT; }

Model lay_out_model(const ModelConfig& c) {
    check_config(c);
    Model model;
    model.config = c;
    int64_t C = c.d_model, F = c.d_ff, V = c.vocab_size, end = 0;
    int unit = c.num_layers + 1;
    auto add = [&](const std::string& name, const Shape& shape) {
        model.parameters.push_back({name + ".weight", shape, end, Tensor(), shape.size() == 1 ? -1 : unit});
        end += count(shape);
    };
    auto add_last = [&](const std::string& name, const Shape& shape) { add(name, shape), end = aligned(end); };
    add_last("lm_head", {V, C});
    add_last("ln_final", {C});
    for (int l = c.num_layers - 1; l >= 0; l--) {
        std::string layer = "layers." + std::to_string(l) + ".";
        unit = 1 + l;
        add_last(layer + "ffn.w2", {C, F});
        add(layer + "ffn.w1", {F, C});  // w1 and w3: one product
        add_last(layer + "ffn.w3", {F, C});
        add_last(layer + "ln2", {C});
        add_last(layer + "attn.output_proj", {C, C});
        add(layer + "attn.q_proj", {C, C});  // q, k and v: one product
        add(layer + "attn.k_proj", {C, C});
        add_last(layer + "attn.v_proj", {C, C});
        add_last(layer + "ln1", {C});
    }
    unit = 0;
    add_last("token_embeddings", {V, C});
    return model;
}
void place_weights(Model& model, const Place& place) {
    const ModelConfig& c = model.config;
    int64_t C = c.d_model, F = c.d_ff;
    auto slot = [&](const Parameter& p, const Shape& shape) {
        model.slots.push_back(place(p, shape));
        return model.slots.back();
    };
    std::map<std::string, Parameter*> by_name;
    for (Parameter& p : model.parameters) {
        p.weight = slot(p, p.shape);
        by_name[p.name] = &p;
    }
    auto weight = [&](const std::string& name) { return by_name.at(name + ".weight")->weight; };
    model.embedding = weight("token_embeddings"), model.ln_final = weight("ln_final"),
    model.lm_head = weight("lm_head");
    for (int l = 0; l < c.num_layers; l++) {
        std::string n = "layers." + std::to_string(l) + ".";
        Layer layer{weight(n + "ln1"),
                    weight(n + "attn.q_proj"),
                    weight(n + "attn.k_proj"),
                    weight(n + "attn.v_proj"),
                    Tensor(),
                    weight(n + "attn.output_proj"),
                    weight(n + "ln2"),
                    weight(n + "ffn.w1"),
                    weight(n + "ffn.w3"),
                    Tensor(),
                    weight(n + "ffn.w2")};
        layer.qkv = slot(*by_name.at(n + "attn.q_proj.weight"), {3 * C, C});
        layer.w13 = slot(*by_name.at(n + "ffn.w1.weight"), {2 * F, C});
        model.layers.push_back(layer);
    }
}
Model make_model(const ModelConfig& c, DType dtype) {
    Model model = lay_out_model(c);
    const Parameter& last = model.parameters.back();
    model.weights = zeros({aligned(last.offset + count(last.shape))}, dtype, PARAMETERS);  // the padding: not NaN
    place_weights(model, [&](const Parameter& p, const Shape& shape) {
        Tensor t = require_gradient(view(model.weights, p.offset, shape));
        t.gradient->is_parameter = true;
        return t;
    });
    return model;
}
void init_weight(const Tensor& weight, const std::string& name, uint64_t seed) {
    bool norm = weight.shape.size() == 1, embedding = name == "token_embeddings.weight";
    float std = norm ? 0 : embedding ? 1 : sqrtf(2.0f / (weight.dim(0) + weight.dim(1)));
    fill_normal(weight, seed, key_of(name), norm ? 1 : 0, std);
}
void init_weights(const Model& model, uint64_t seed) {
    for (const Parameter& p : model.parameters) { init_weight(p.weight, p.name, seed); }
}
Model random_model(const ModelConfig& c, uint64_t seed) {
    Model model = make_model(c);
    init_weights(model, seed);
    choose_form(model);
    return model;
}
void make_gradients(Model& model, DType dtype) {
    if (model.gradients) { return; }
    model.gradients = zeros(model.weights.shape, model.weights.dtype == F64 ? F64 : dtype, GRADIENTS);
    for (const Tensor& t : model.slots) { t.gradient->value = view(model.gradients, offset_of(model, t), t.shape); }
}
void make_optimizer_state(Model& model) {
    if (model.m) { return; }
    model.m = zeros(model.weights.shape, model.weights.dtype, OPTIMIZER);
    model.v = zeros(model.weights.shape, model.weights.dtype, OPTIMIZER);
}
void zero_gradients(const Model& model) {
    for (const Tensor& t : model.slots) {
        t.gradient->filled = false;
        if (!model.gradients) { t.gradient->value = Tensor(); }
    }
}

void make_ready(Model& model, int64_t T) {
    const ModelConfig& c = model.config;
    if (!model.rope || model.rope.dim(0) < T) {
        model.rope = rope_table(T, c.d_model / c.num_heads, c.rope_theta, model.weights.dtype);
    }
    if (model.form && !model.form->takes(model)) { plain_weights(model); }
    if (model.form) { model.form->lend(model); }
}
void begin_unit(const Model& model, int unit) {
    if (model.pre_forward) { model.pre_forward(unit); }
}
Tensor end_unit(const Model& model, int unit, const Tensor& y) {
    return model.pre_backward ? before_backward(y, [&model, unit] { model.pre_backward(unit); }) : y;
}
// Block l. The residual stream is *x + *delta, where *delta is what the block before adds to it (null: nothing).
static void block(const Model& model, int l, Tensor* x, Tensor* delta) {
    Range r("layer");
    const ModelConfig& c = model.config;
    const Layer& layer = model.layers[l];
    begin_unit(model, 1 + l);
    auto attention = [&model, &c, &layer](const Tensor& y) {
        Tensor a = self_attention(layer, y, model.rope, c.num_heads);
        Range output("projections");
        return linear(a, layer.o);
    };
    auto feed_forward = [&layer](const Tensor& y) {
        Range ffn("ffn");
        return linear(swiglu(layer, y), layer.w2);
    };
    if (context.checkpoint == CHECKPOINT_HALF) {
        auto half = [&](auto f, const Tensor& ln) {
            return checkpoint([f, ln, &c](Tensor x) { return add(x, f(add_rmsnorm(&x, Tensor(), ln, c.eps))); }, *x);
        };
        *x = half(attention, layer.ln1);
        *x = end_unit(model, 1 + l, half(feed_forward, layer.ln2));
        return;
    }
    *delta = attention(add_rmsnorm(x, *delta, layer.ln1, c.eps));
    Tensor y = add_rmsnorm(x, *delta, layer.ln2, c.eps);
    *delta =
        end_unit(model, 1 + l, context.checkpoint == CHECKPOINT_FFN ? checkpoint(feed_forward, y) : feed_forward(y));
}
static Tensor run_blocks(const Model& model, Tensor x, int first, int end) {
    Tensor delta;
    for (int l = first; l < end; l++) { block(model, l, &x, &delta); }
    return add(x, delta);
}
// Blocks [first, end) by gradient checkpoints. Of N blocks forward keeps, of tensors like x, and backward runs again
//   k blocks each  N/k, and the k blocks that are run again keep all they compute   N blocks
//   halves         log2 N, and one block                                            N log2 N
//   nested         1, and one block                                                 N^2 / 2
static Tensor checkpointed_blocks(const Model& model, Tensor x, int first, int end) {
    auto part = [&](int first, int end, auto blocks) {
        x = checkpoint([&model, first, end, blocks](const Tensor& x) { return blocks(model, x, first, end); }, x);
    };
    int k = context.checkpoint, middle = (first + end) / 2;
    for (int l = first; k > 0 && l < end; l += k) { part(l, std::min(l + k, end), run_blocks); }
    if (k > 0) { return x; }
    if (end - first == 1) { return run_blocks(model, x, first, end); }
    if (k == CHECKPOINT_HALVES) {
        part(first, middle, checkpointed_blocks);
        part(middle, end, checkpointed_blocks);
        return x;
    }
    part(first, end - 1, checkpointed_blocks);
    return run_blocks(model, x, end - 1, end);
}
Tensor forward(Model& model, const Tensor& tokens) {
    const ModelConfig& c = model.config;
    Range range("forward");
    make_ready(model, tokens.dim(1));
    Tensor x, delta;
    {
        Range r("embedding");
        begin_unit(model, 0);
        x = end_unit(model, 0, gather_rows(model.embedding, tokens));
    }
    bool within_blocks = context.checkpoint == CHECKPOINT_FFN || context.checkpoint == CHECKPOINT_HALF;
    bool whole_blocks = context.checkpoint != 0 && !within_blocks && context.recording;
    if (whole_blocks) { x = checkpointed_blocks(model, x, 0, c.num_layers); }
    for (int l = 0; l < c.num_layers && !whole_blocks; l++) { block(model, l, &x, &delta); }
    Tensor y = add_rmsnorm(&x, delta, model.ln_final, c.eps);
    Range r("lm_head");
    begin_unit(model, c.num_layers + 1);
    return linear(y, model.lm_head);
}

// ---------------------------------------------------------------------------------------------------------------------
// One training step on random data. Its memory is predicted by the same step on META, where nothing is computed.

Batch random_batch(int B, int T, int V, uint64_t seed) {
    if (context.device == META) { return {empty({B, T}, I32, INPUTS), empty({B, T}, I32, INPUTS)}; }
    Tensor x = empty_on(CPU, {B, T}, I32, INPUTS), y = empty_on(CPU, {B, T}, I32, INPUTS);
    for (int64_t i = 0; i < x.size(); i++) {
        x.as<int>()[i] = random_int(V, seed, key_of("tokens"), i);
        y.as<int>()[i] = random_int(V, seed, key_of("targets"), i);
    }
    return {to_device(x, context.device), to_device(y, context.device)};
}
Tensor forward_to_loss(Model& model, const Batch& batch) {
    return cross_entropy(forward(model, batch.tokens), batch.targets);
}
void backward_from_loss(const Model& model, const Tensor& loss, float loss_scale) {
    Range range("backward");
    backward(loss, loss_scale);
    drop_weight_copies(model.slots);  // the weights are about to change
}

static Tensor forward_backward_by_launches(Model& model, const Batch& batch, float loss_scale,
                                           const std::function<void()>& between) {
    zero_gradients(model);
    Tensor loss = forward_to_loss(model, batch);
    between();
    backward_from_loss(model, loss, loss_scale);
    return detached(loss);
}

static const AddRow<StepImpl> launches_row({"launches", 10, [](const Model&) { return true; },
                                            forward_backward_by_launches, forward});

static const StepImpl& fastest_step(const Model& model) {
    const auto& rows = table_of<StepImpl>();
    return *std::find_if(rows.rbegin(), rows.rend(), [&](const StepImpl& r) { return r.takes(model); });
}
Tensor forward_backward(Model& model, const Batch& batch, float loss_scale, const std::function<void()>& between) {
    return fastest_step(model).forward_backward(model, batch, loss_scale, between);
}
Tensor infer(Model& model, const Tensor& tokens) {
    NoGrad no_grad;
    Tensor logits = fastest_step(model).infer(model, tokens);
    drop_weight_copies(model.slots);
    return logits;
}
double guarded_step(LossScaler& scaler, double max_norm, const std::function<double()>& norm_of_gradients,
                    const std::function<void(float gradient_scale)>& step) {
    bool fp16 = context.precision == PREC_FP16;
    double scale = fp16 ? 1 / scaler.scale : 1, norm = 0;
    if (fp16 || max_norm > 0) { norm = norm_of_gradients() * scale; }
    if (fp16) { update_scale(scaler, !std::isfinite(norm)); }
    if (!std::isfinite(norm)) { return norm; }  // a step would spread it to all weights
    if (max_norm > 0 && norm > max_norm) { scale *= max_norm / (norm + 1e-6); }
    step((float)scale);
    return norm;
}
double optimizer_step(Model& model, const AdamW& adamw, LossScaler& scaler, double max_norm) {
    return guarded_step(
        scaler, max_norm, [&] { return gradient_norm(model); },
        [&](float gradient_scale) { adamw_step(model, adamw, gradient_scale); });
}
float loss_scale_of(const LossScaler& scaler) { return context.precision == PREC_FP16 ? scaler.scale : 1; }

void run_phase(Phase phase, Model& model, const Batch& batch, LossScaler& scaler,
               const std::function<void()>& between) {
    if (phase == FORWARD) {
        infer(model, batch.tokens);
        return;
    }
    if (phase == TAPED_FORWARD) {
        forward(model, batch.tokens);
        clear_tape();
        return drop_weight_copies(model.slots);
    }
    if (phase == STEP) { make_optimizer_state(model); }
    forward_backward(model, batch, loss_scale_of(scaler), between);
    if (phase == STEP) { optimizer_step(model, AdamW(), scaler, 0); }
}
size_t predicted_peak(const ModelConfig& c, int B, int T, Phase phase) {
    return planned_peak([&] {
        Model model = random_model(c, 0);
        LossScaler scaler;
        reset_peak(META);  // another form of the weights is no part of the phase
        run_phase(phase, model, random_batch(B, T, c.vocab_size, 0), scaler);
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Which models and which mode a command runs.

Mode fastest_mode(const ModelConfig& c, Precision precision) {
    return fastest_flash(context.device, matmul_dtype(precision), c.d_model / c.num_heads) ? FLASH : FUSED;
}
void check_mode(const ModelConfig& c, Mode mode, Precision precision) {
    if (mode == FLASH) { require_flash(context.device, matmul_dtype(precision), c.d_model / c.num_heads); }
    if (mode == EAGER && context.recompute) { usage_error("--recompute: takes mode fused or flash; eager keeps all"); }
    if (context.checkpoint > c.num_layers) {
        usage_error("--checkpoint: got %d, takes at most the model's %d blocks", context.checkpoint, c.num_layers);
    }
}
std::string name_of_checkpoint(int checkpoint) {
    return checkpoint == CHECKPOINT_FFN      ? "ffn"
           : checkpoint == CHECKPOINT_HALF   ? "half"
           : checkpoint == CHECKPOINT_HALVES ? "halves"
           : checkpoint == CHECKPOINT_NESTED ? "nested"
                                             : std::to_string(checkpoint);
}
std::string caption_of(Mode mode) {
    std::string checkpoint = context.checkpoint ? ", checkpoint " + name_of_checkpoint(context.checkpoint) : "";
    return name_of(mode) + std::string(context.recompute ? ", recompute" : "") + checkpoint;
}
