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
// Each of a row's elements is needed twice, before and after the sum over the row. Where the row is one pack a thread
// it waits in registers; a longer one is read again, by the thread that wrote it, from L1 or L2.
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
// dx, where wanted once more as T, and of dw the sum over the rows that a block takes: into partial [gridDim.x,C]. A
// thread has the same columns in all of its rows, so it adds them up in registers; in rows of several packs a thread,
// in `partial`.
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
// dw from the partial sums, always in the same order: 32 columns a block, of each of which 32 threads add up a share.
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
    // Four rows or more a block, so that the partial sums are few beside them; and no more blocks than run at a time
    // on 132 multiprocessors, an H100's or H200's. Not asked of the card: META and the CPU come by here without one.
    int parts = std::min(ceil_div(N, 4), 4 * 132);
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
    // Rounded here once, where autocast would cast before the matmul.
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
        y.gradient->again = [x = detached(x), w, eps] {
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
// RoPE: each pair (x_2i, x_2i+1) of a query or key at position t is turned by the angle t theta^(-2i/D):
//   y_2i = cos x_2i - sin x_2i+1,  y_2i+1 = sin x_2i + cos x_2i+1;  backward turns by the opposite angle.
// Fused: one product gives q, k and v side by side, y [B,T,C] -> [B,T,3,H,D], and one kernel turns q and k and lays all
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
HD inline void turn_pair(T* x, const Wide<T>* cos_sin, bool backward) {
    Wide<T> x1 = to_acc(x[0]), x2 = to_acc(x[1]), cos = cos_sin[0], sin = backward ? -cos_sin[1] : cos_sin[1];
    from_acc(cos * x1 - sin * x2, &x[0]);
    from_acc(sin * x1 + cos * x2, &x[1]);
}
// Where column c of row bt of q, k or v, [B,T] rows of [H,D], is among its heads.
HD inline int64_t in_heads(int bt, int c, HeadShape s) {
    int h = c / s.D;
    return (((int64_t)(bt / s.T) * s.H + h) * s.T + bt % s.T) * s.D + (c - h * s.D);
}
#ifdef __CUDACC__
template <class T, int W>
__device__ inline void turn_pack(Pack<T, W>& pack, const float* rope, bool backward) {
    Pack<float, W> cos_sin = load_pack<W>(rope);
    for (int i = 0; i < W; i += 2) { turn_pair(&pack.x[i], &cos_sin.x[i], backward); }
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
        if (which < 2) { turn_pack(pack, rope + bt % s.T * s.D + c % s.D, backward); }
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
                if (which < 2) { turn_pair(to, rope.as<Wide<T>>() + bt % s.T * s.D + c % s.D, backward); }
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

// Mode flash turns q and k where they are, side by side in qkv: attention reads them by strides.
#ifdef __CUDACC__
template <class T, int W>
__global__ void __launch_bounds__(PACK_THREADS) turn_kernel(T* qkv, const float* rope, HeadShape s, bool backward) {
    const int C = s.H * s.D, bt = blockIdx.x;
    for (int c = W * threadIdx.x; c < 2 * C; c += W * blockDim.x) {
        T* x = qkv + bt * (int64_t)3 * C + c;
        Pack<T, W> pack = load_pack<W>(x);
        turn_pack(pack, rope + bt % s.T * s.D + c % s.D, backward);
        store_pack(x, pack);
    }
}
#endif
static void turn(const Tensor& qkv, const Tensor& rope, int H, bool backward) {
    HeadShape s{(int)qkv.dim(1), H, (int)rope.dim(1)};
    int64_t n = qkv.size(), C = s.H * s.D, N = n / (3 * C);
    if (qkv.device() == META || n == 0) { return; }
#ifdef __CUDACC__
    if (qkv.device() == CUDA) {
        return with_packs<2>(qkv.dtype, s.D, {qkv.data, rope.data}, [&](auto zero, auto width) {
            using T = decltype(zero);
            turn_kernel<T, width>
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
                turn_pair(qkv.as<T>() + bt * 3 * C + c, rope.as<Wide<T>>() + bt % s.T * s.D + c % s.D, backward);
            }
        }
    });
}
static Tensor rope_in_place(const Tensor& qkv, const Tensor& rope, int H) {
    turn(qkv, rope, H, false);
    Tensor turned = detached(qkv);
    record(turned, {qkv}, [rope, H, g = qkv.gradient](const Tensor& d) {
        turn(d, rope, H, true);  // in place again: attention's backward made d for us alone
        add_gradient(g, d);
    });
    return turned;
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
        g.gradient->again = [compute] {
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
// Split weights. bf16 is the upper half of fp32, so the weights that AdamW updates in fp32 and those that bf16 products
// take need 4 bytes together, not 6, and no cast: a matrix's place in the arena then holds first the upper halves of
// all its elements, which are the bf16 matrix, then their lower halves. Only forward, backward and adamw_step know.

struct Halves {
    uint16_t upper, lower;
};
// upper is rounded to nearest, ties away from zero (a cast's go to even, which could not be undone); lower is as it
// was, and its first bit says whether upper was rounded up. NaN stays NaN.
HD inline Halves halves_of(float x) {
    uint32_t bits = 0x7fc00000;
    if (x == x) { memcpy(&bits, &x, 4); }
    return {(uint16_t)((bits + 0x8000) >> 16), (uint16_t)bits};
}
HD inline float joined(Halves h) {
    uint32_t bits = (uint32_t)(uint16_t)(h.upper - (h.lower >> 15)) << 16 | h.lower;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
// Element i of n, either way.
HD inline void convert_halves(float* whole, uint16_t* halves, int64_t n, int64_t i, bool split) {
    if (split) {
        Halves h = halves_of(whole[i]);
        halves[i] = h.upper, halves[n + i] = h.lower;
    } else {
        whole[i] = joined({halves[i], halves[n + i]});
    }
}
#ifdef __CUDACC__
__global__ void convert_halves_kernel(float* whole, uint16_t* halves, int64_t n, bool split) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) { convert_halves(whole, halves, n, i, split); }
}
#endif
static void convert_halves_run(const Tensor& whole, const Tensor& place, bool split) {
    int64_t n = whole.size();
    auto* halves = (uint16_t*)place.data;
#ifdef __CUDACC__
    if (whole.device() == CUDA) {
        convert_halves_kernel<<<ceil_div(n, 256), 256, 0, stream()>>>(whole.as<float>(), halves, n, split);
        LAUNCH_CHECK();
    }
#endif
    if (whole.device() == CPU) {
#pragma omp parallel for
        for (int64_t i = 0; i < n; i++) { convert_halves(whole.as<float>(), halves, n, i, split); }
    }
}
static std::vector<Tensor> matrices_of(const Model& model) {  // as the products take them
    std::vector<Tensor> all = {model.lm_head};
    for (const Layer& l : model.layers) { all.insert(all.end(), {l.qkv, l.o, l.w13, l.w2}); }
    return all;
}
static bool takes_split_weights(const Model& model) {
    return context.mode != EAGER && matmul_dtype() == BF16 && model.weights.dtype == F32;
}
static void convert_weights(Model& model, bool split) {
    NoGrad no_grad;
    std::vector<Tensor> matrices = matrices_of(model);
    int64_t largest = 0;
    for (const Tensor& t : matrices) { largest = std::max(largest, t.size()); }
    Tensor scratch = empty({largest}, F32, WORKSPACE);
    for (const Tensor& t : matrices) {
        Tensor whole = view(scratch, 0, t.shape), place = detached(t);
        if (split) { copy_or_add(whole, place, false); }
        convert_halves_run(whole, place, split);
        if (!split) { copy_or_add(place, whole, false); }
    }
    drop_weight_copies(model.slots);
    model.split = split;
}
void split_weights(Model& model) {
    if (!model.split && takes_split_weights(model)) { convert_weights(model, true); }
}
void join_weights(Model& model) {
    if (model.split) { convert_weights(model, false); }
}
static void attach_upper_halves(const Model& model) {
    for (const Tensor& t : matrices_of(model)) {
        t.gradient->low_precision = detached(t);
        t.gradient->low_precision.dtype = BF16;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Where a model's gradients lie: in their arena, whose padding holds zeros, or one by one as backward left them.

static int64_t offset_of(const Model& model, const Tensor& slot) {  // in elements
    return (slot.data - model.weights.data) / (int64_t)size_of(slot.dtype);
}
struct Piece {
    Tensor g;
    int64_t offset;  // in the arenas of weights and moments
    bool split;      // its weights
};
static std::vector<Piece> gradient_pieces(const Model& model) {
    int64_t all = 0, filled = 0;  // fused mode fills the joined slots instead of the single ones that they cover
    std::vector<Piece> pieces;
    for (const Parameter& p : model.parameters) { all += count(p.shape); }
    for (const Tensor& t : model.slots) {
        if (!t.gradient->filled) { continue; }
        filled += t.size();
        bool matrix = t.shape.size() == 2 && t.data != model.embedding.data;  // split only where the joined are filled
        pieces.push_back({t.gradient->value, offset_of(model, t), model.split && matrix});
    }
    if (filled != all) { fail("gradients of %ld of %ld elements are there", (long)filled, (long)all); }
    return model.gradients && !model.split ? std::vector<Piece>{{model.gradients, 0, false}} : pieces;
}

Tensor gradient_of(const Model& model, const Parameter& p) {
    for (const Tensor& t : model.slots) {
        int64_t begin = p.offset - offset_of(model, t);
        if (t.gradient->filled && begin >= 0 && begin < t.size()) { return view(t.gradient->value, begin, p.shape); }
    }
    fail("%s has no gradient", p.name.c_str());
}

// The gradients' norm, for clipping and to notice fp16's overflows: sqrt(sum g^2) over all of them. Summed in a fixed
// order, so the same gradients give the same bits.

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
double gradient_norm(const Model& model) {
    Range range("gradient norm");
    std::vector<Piece> pieces = gradient_pieces(model);
    if (model.weights.device() == META) { return 1; }
    double sum = 0;
#ifdef __CUDACC__
    if (model.weights.device() == CUDA) {
        auto blocks_of = [](const Tensor& g) { return std::min(NORM_BLOCKS, ceil_div(g.size(), 1024)); };
        int64_t blocks = 0;
        for (const Piece& piece : pieces) { blocks += blocks_of(piece.g); }
        Tensor partial = empty({blocks}, F64, WORKSPACE);
        double* next = partial.as<double>();
        for (const Piece& piece : pieces) {
            const Tensor& g = piece.g;
            with_gpu_type(g.dtype, [&](auto zero) {
                square_sum_kernel<<<blocks_of(g), 256, 0, stream()>>>(next, g.as<decltype(zero)>(), g.size());
                LAUNCH_CHECK();
            });
            next += blocks_of(g);
        }
        for (double s : to_doubles(partial)) { sum += s; }
        return sqrt(sum);
    }
#endif
    constexpr int64_t CHUNK = 1 << 16;  // fixed chunks: the result does not depend on the number of threads
    for (const Piece& piece : pieces) {
        int64_t n = piece.g.size();
        std::vector<double> partial((n + CHUNK - 1) / CHUNK);
        with_type(piece.g.dtype, [&](auto zero) {
            const auto* g = piece.g.as<decltype(zero)>();
#pragma omp parallel for
            for (size_t k = 0; k < partial.size(); k++) {
                for (int64_t i = k * CHUNK; i < std::min<int64_t>(n, (k + 1) * CHUNK); i++) {
                    partial[k] += (double)to_acc(g[i]) * to_acc(g[i]);
                }
            }
        });
        for (double s : partial) { sum += s; }
    }
    return sqrt(sum);
}

// ---------------------------------------------------------------------------------------------------------------------
// AdamW (Loshchilov and Hutter, 2019; the handout's order), t = 1, 2, ...:
//   p *= 1 - lr wd;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
//   p -= lr sqrt(1 - b2^t)/(1 - b1^t) m / (sqrt(v) + eps)
// Op by op that is 13 kernels for every parameter tensor; fused it is one for 64 of them: of fp32 p, m and v each is
// read and written once, 24 bytes a parameter, whether p is split or not, and g read (2 or 4).

struct AdamWScalars {
    float decay, beta1, beta2, eps, step_size, gradient_scale;
};
template <class A>
HD inline void adamw_element(A& p, A g, A& m, A& v, AdamWScalars s) {
    g *= s.gradient_scale;
    m = s.beta1 * m + (1 - s.beta1) * g;
    v = s.beta2 * v + (1 - s.beta2) * g * g;
    p = p * s.decay - s.step_size * m / (std::sqrt(v) + s.eps);
}
#ifdef __CUDACC__
constexpr int ADAMW_PIECES = 64, ADAMW_CHUNK = 2048;  // elements a block
struct AdamWPieces {
    const void* g[ADAMW_PIECES];
    int64_t offset[ADAMW_PIECES], size[ADAMW_PIECES];
    int first_block[ADAMW_PIECES];
    int count;
};
// W: elements a thread takes at a time, in one access of each array.
template <int W, bool split, class G>
__global__ void adamw_kernel(AdamWPieces pieces, float* p_all, float* m_all, float* v_all, AdamWScalars s) {
    int k = 0;  // our piece: the last that begins at or before our block
    for (int end = pieces.count; end - k > 1;) {
        int middle = (k + end) / 2;
        (pieces.first_block[middle] <= (int)blockIdx.x ? k : end) = middle;
    }
    int64_t start = (int64_t)(blockIdx.x - pieces.first_block[k]) * ADAMW_CHUNK, offset = pieces.offset[k] + start;
    int n = (int)min((int64_t)ADAMW_CHUNK, pieces.size[k] - start);
    const G* g_in = (const G*)pieces.g[k] + start;
    uint16_t *upper = (uint16_t*)(p_all + pieces.offset[k]) + start, *lower = upper + pieces.size[k];
    for (int i = threadIdx.x * W; i < n; i += blockDim.x * W) {
        auto m = load_pack<W>(m_all + offset + i), v = load_pack<W>(v_all + offset + i);
        auto g = load_pack<W>(g_in + i);
        Pack<float, W> p;
        Pack<uint16_t, W> u, l;
        if (split) {
            u = load_pack<W>(upper + i), l = load_pack<W>(lower + i);
            for (int j = 0; j < W; j++) { p.x[j] = joined({u.x[j], l.x[j]}); }
        } else {
            p = load_pack<W>(p_all + offset + i);
        }
        for (int j = 0; j < W; j++) { adamw_element(p.x[j], to_acc(g.x[j]), m.x[j], v.x[j], s); }
        if (split) {
            for (int j = 0; j < W; j++) {
                Halves h = halves_of(p.x[j]);
                u.x[j] = h.upper, l.x[j] = h.lower;
            }
            store_pack(upper + i, u), store_pack(lower + i, l);
        } else {
            store_pack(p_all + offset + i, p);
        }
        store_pack(m_all + offset + i, m), store_pack(v_all + offset + i, v);
    }
}
// At most ADAMW_PIECES a launch; all have gradients of type G.
template <bool split, class G>
static void adamw_launch(const std::vector<Piece>& pieces, const Tensor& p, const Tensor& m, const Tensor& v,
                         AdamWScalars s) {
    for (size_t next = 0; next < pieces.size();) {
        AdamWPieces some;
        some.count = 0;
        int blocks = 0;
        bool by_fours = true;
        for (; next < pieces.size() && some.count < ADAMW_PIECES; next++) {
            const Piece& piece = pieces[next];
            int k = some.count++;
            some.g[k] = piece.g.data, some.offset[k] = piece.offset, some.size[k] = piece.g.size();
            some.first_block[k] = blocks;
            blocks += ceil_div(piece.g.size(), ADAMW_CHUNK);
            for (const Tensor* t : {&p, &m, &v}) {
                by_fours &= ((uintptr_t)t->data / sizeof(float) + piece.offset) % 4 == 0;
            }
            by_fours &= piece.g.size() % 4 == 0 && (uintptr_t)piece.g.data / sizeof(G) % 4 == 0;
        }
        auto kernel = by_fours ? adamw_kernel<4, split, G> : adamw_kernel<1, split, G>;
        kernel<<<blocks, 256, 0, stream()>>>(some, p.as<float>(), m.as<float>(), v.as<float>(), s);
        LAUNCH_CHECK();
    }
}
#endif
template <bool split, class G, class P>
static void adamw_cpu(const Piece& piece, P* p, P* m, P* v, AdamWScalars s) {
    const G* g = piece.g.as<G>();
    auto* halves = (uint16_t*)p;
    int64_t n = piece.g.size();
#pragma omp parallel for simd if (n > 16384)
    for (int64_t i = 0; i < n; i++) {
        P x = split ? joined({halves[i], halves[n + i]}) : p[i];
        adamw_element(x, (P)to_acc(g[i]), m[i], v[i], s);
        if (split) {
            Halves h = halves_of((float)x);
            halves[i] = h.upper, halves[n + i] = h.lower;
        } else {
            p[i] = x;
        }
    }
}
// p, m and v are flat; the pieces say where in them they belong.
static void adamw_fused(const Tensor& p, const std::vector<Piece>& all, const Tensor& m, const Tensor& v,
                        AdamWScalars s) {
    if (p.device() == META) { return; }
    for (DType dtype : {F32, BF16, F16, F64}) {
#ifdef __CUDACC__
        if (p.device() == CUDA && dtype != F64) {
            std::vector<Piece> pieces[2];  // [1]: those whose weights are split
            for (const Piece& piece : all) {
                if (piece.g.dtype == dtype && piece.g.size() > 0) { pieces[piece.split].push_back(piece); }
            }
            with_gpu_type(dtype, [&](auto zero) {
                adamw_launch<false, decltype(zero)>(pieces[0], p, m, v, s);
                adamw_launch<true, decltype(zero)>(pieces[1], p, m, v, s);
            });
            continue;
        }
#endif
        for (const Piece& piece : all) {
            if (piece.g.dtype != dtype) { continue; }
            with_type(dtype, [&](auto g_zero) {
                with_type(p.dtype, [&](auto p_zero) {
                    using P = Wide<decltype(p_zero)>;
                    int64_t at = piece.offset;
                    auto update =
                        piece.split ? adamw_cpu<true, decltype(g_zero), P> : adamw_cpu<false, decltype(g_zero), P>;
                    update(piece, p.as<P>() + at, m.as<P>() + at, v.as<P>() + at, s);
                });
            });
        }
    }
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
void adamw_update(const Tensor& p, const Tensor& g, const Tensor& m, const Tensor& v, const AdamW& a, int t) {
    Range range("optimizer");
    adamw_fused(p, {{g, 0, false}}, m, v, scalars_of(a, t, 1));
}
void adamw_step(Model& model, const AdamW& a, float gradient_scale) {
    Range range("optimizer");
    NoGrad no_grad;
    std::vector<Piece> gradients = gradient_pieces(model);
    AdamWScalars s = scalars_of(a, ++model.step, gradient_scale);
    context.mode == EAGER ? adamw_eager(model, s) : adamw_fused(model.weights, gradients, model.m, model.v, s);
}

// ---------------------------------------------------------------------------------------------------------------------
// The model: one arena for the weights, one for each moment and, if make_gradients was called, one for the gradients,
// all laid out in the order in which backward finishes the gradients, so that "the gradients that are ready" is always
// a prefix of the arena. Matrices that one product can serve together stand side by side.

const std::vector<ModelConfig> model_sizes = {
    {"small", 768, 3072, 12, 12, 10000}, {"medium", 1024, 4096, 24, 16, 10000}, {"large", 1280, 5120, 36, 20, 10000},
    {"xl", 1600, 6400, 48, 25, 10000},   {"2.7B", 2560, 10240, 32, 32, 10000},
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

static int64_t add_parameter(Model& model, int64_t offset, const std::string& name, const Shape& shape) {
    model.parameters.push_back({name, shape, offset, Tensor()});
    return offset + count(shape);
}
static int64_t aligned(int64_t offset) { return (offset + ARENA_ALIGNMENT - 1) / ARENA_ALIGNMENT * ARENA_ALIGNMENT; }

Model make_model(const ModelConfig& c, DType dtype) {
    check_config(c);
    Model model;
    model.config = c;
    int64_t C = c.d_model, F = c.d_ff, V = c.vocab_size, end = 0;
    end = aligned(add_parameter(model, end, "lm_head.weight", {V, C}));
    end = aligned(add_parameter(model, end, "ln_final.weight", {C}));
    for (int l = c.num_layers - 1; l >= 0; l--) {
        std::string layer = "layers." + std::to_string(l) + ".";
        end = aligned(add_parameter(model, end, layer + "ffn.w2.weight", {C, F}));
        end = add_parameter(model, end, layer + "ffn.w1.weight", {F, C});  // w1 and w3: one product
        end = aligned(add_parameter(model, end, layer + "ffn.w3.weight", {F, C}));
        end = aligned(add_parameter(model, end, layer + "ln2.weight", {C}));
        end = aligned(add_parameter(model, end, layer + "attn.output_proj.weight", {C, C}));
        end = add_parameter(model, end, layer + "attn.q_proj.weight", {C, C});  // q, k and v: one product
        end = add_parameter(model, end, layer + "attn.k_proj.weight", {C, C});
        end = aligned(add_parameter(model, end, layer + "attn.v_proj.weight", {C, C}));
        end = aligned(add_parameter(model, end, layer + "ln1.weight", {C}));
    }
    end = aligned(add_parameter(model, end, "token_embeddings.weight", {V, C}));

    model.weights = zeros({end}, dtype, PARAMETERS);  // zeros: the padding must not hold NaN
    auto slot = [&](int64_t offset, const Shape& shape) {
        Tensor t = require_gradient(view(model.weights, offset, shape));
        t.gradient->is_parameter = true;
        model.slots.push_back(t);
        return t;
    };
    std::map<std::string, Parameter*> by_name;
    for (Parameter& p : model.parameters) {
        p.weight = slot(p.offset, p.shape);
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
        layer.qkv = slot(by_name.at(n + "attn.q_proj.weight")->offset, {3 * C, C});
        layer.w13 = slot(by_name.at(n + "ffn.w1.weight")->offset, {2 * F, C});
        model.layers.push_back(layer);
    }
    return model;
}
void init_weights(const Model& model, uint64_t seed) {
    for (const Parameter& p : model.parameters) {
        bool norm = p.shape.size() == 1, embedding = p.name == "token_embeddings.weight";
        float std = norm ? 0 : embedding ? 1 : sqrtf(2.0f / (p.shape[0] + p.shape[1]));
        fill_normal(p.weight, seed, key_of(p.name), norm ? 1 : 0, std);
    }
}
Model random_model(const ModelConfig& c, uint64_t seed) {
    Model model = make_model(c);
    init_weights(model, seed);
    split_weights(model);
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

// What a forward needs besides the weights, and leaves for the next one.
static void make_ready(Model& model, int64_t T) {
    const ModelConfig& c = model.config;
    if (!model.rope || model.rope.dim(0) < T) {
        model.rope = rope_table(T, c.d_model / c.num_heads, c.rope_theta, model.weights.dtype);
    }
    if (!takes_split_weights(model)) { join_weights(model); }
    if (model.split) { attach_upper_halves(model); }
}
Tensor forward(Model& model, const Tensor& tokens) {
    const ModelConfig& c = model.config;
    Range range("forward");
    make_ready(model, tokens.dim(1));
    Tensor x, delta;  // the residual stream, and what the last block adds to it
    {
        Range r("embedding");
        x = gather_rows(model.embedding, tokens);
    }
    for (const Layer& layer : model.layers) {
        Range r("layer");
        Tensor a = self_attention(layer, add_rmsnorm(&x, delta, layer.ln1, c.eps), model.rope, c.num_heads);
        {
            Range output("projections");
            delta = linear(a, layer.o);
        }
        a = Tensor();  // not to be held while the next block runs
        Tensor y = add_rmsnorm(&x, delta, layer.ln2, c.eps);
        Range ffn("ffn");
        delta = linear(swiglu(layer, y), layer.w2);
    }
    Tensor y = add_rmsnorm(&x, delta, model.ln_final, c.eps);
    Range r("lm_head");
    return linear(y, model.lm_head);
}

// ---------------------------------------------------------------------------------------------------------------------
// One training step on random data, and the memory that it would take: the same step on META, where nothing is
// computed.

Batch random_batch(int B, int T, int V, uint64_t seed) {
    if (context.device == META) { return {empty({B, T}, I32, INPUTS), empty({B, T}, I32, INPUTS)}; }
    Tensor x = empty_on(CPU, {B, T}, I32, INPUTS), y = empty_on(CPU, {B, T}, I32, INPUTS);
    for (int64_t i = 0; i < x.size(); i++) {
        x.as<int>()[i] = random_int(V, seed, key_of("tokens"), i);
        y.as<int>()[i] = random_int(V, seed, key_of("targets"), i);
    }
    return {to_device(x, context.device), to_device(y, context.device)};
}
static Tensor forward_to_loss(Model& model, const Batch& batch) {
    return cross_entropy(forward(model, batch.tokens), batch.targets);
}
static void backward_from_loss(const Model& model, const Tensor& loss, float loss_scale) {
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

#ifdef __CUDACC__
// A step's two passes as CUDA graphs, or a forward alone as one. A launch costs the CPU some 2 us and what leads to it,
// the tape and the allocations, more; a small model's kernels take less than that each. A graph, captured once,
// launches all its kernels at once and leaves shorter gaps between them. The first step of a kind is a rehearsal (see
// Region), the second is captured, and from then on the same kernels run on the same buffers.
struct StepGraphs {
    std::shared_ptr<Region> region = std::make_shared<Region>();
    size_t bytes = 0;  // that its block has to have
    bool too_large = false;
    std::string kind;  // of step: what its kernels have built in
    Batch batch;
    Tensor loss, logits;  // logits: of a forward alone
    std::vector<std::pair<GradientPtr, Tensor>> gradients;
    cudaGraphExec_t forward = nullptr, backward = nullptr;
    StepGraphs() = default;
    StepGraphs(const StepGraphs&) = delete;
    ~StepGraphs() {  // errors have been reported by then, or the process ends
        if (forward) { cudaGraphExecDestroy(forward); }
        if (backward) { cudaGraphExecDestroy(backward); }
    }
};
static std::string kind_of_step(const Model& model, const char* what, const Tensor& tokens, float loss_scale) {
    return strprintf("%s %s %d %d %d %g %d %p", what, to_string(tokens.shape).c_str(), context.precision,
                     context.deterministic, context.recompute, loss_scale, model.split, (void*)model.rope.data);
}
static cudaGraphExec_t capture(const std::shared_ptr<Region>& region, const std::function<void()>& work) {
    cudaGraph_t graph = nullptr;
    CUDA_CHECK(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
    try {
        allocate_in(region, work);
    } catch (...) {
        if (cudaStreamEndCapture(stream(), &graph) == cudaSuccess) { cudaGraphDestroy(graph); }
        throw;
    }
    CUDA_CHECK(cudaStreamEndCapture(stream(), &graph));
    cudaGraphExec_t executable;
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    return executable;
}
static void copy_in_stream(const Tensor& to, const Tensor& from) {
    CUDA_CHECK(cudaMemcpyAsync(to.data, from.data, to.size() * size_of(to.dtype), cudaMemcpyDefault, stream()));
}
// The graphs of this kind of step, to be captured or launched. Null: `by_launches` has done the step, as the rehearsal
// or because there is no room for the graphs' block.
static StepGraphs* graphs_or(Model& model, const std::string& kind, const Shape& tokens,
                             const std::function<void()>& by_launches) {
    if (!model.graphs || model.graphs->kind != kind) {
        start_cublas();  // whose workspace is no part of the step
        model.graphs = std::make_shared<StepGraphs>();
        allocate_in(model.graphs->region, by_launches);
        model.graphs->bytes = plan_places(*model.graphs->region);
        model.graphs->kind = kind;  // now that the rehearsal is complete
        return nullptr;
    }
    StepGraphs& g = *model.graphs;
    if (!g.forward && !g.too_large) {
        give_back_cached_memory();  // the rehearsal's buffers
        g.too_large = g.bytes > available_memory(CUDA);
    }
    if (g.too_large) {
        by_launches();
        return nullptr;
    }
    if (!g.forward) {
        auto block = allocate(CUDA, g.bytes, ACTIVATIONS);
        g.region = std::make_shared<Region>(Region{block, g.region->places});
        g.batch = {empty(tokens, I32, INPUTS), empty(tokens, I32, INPUTS)};
    }
    return &g;
}
static Tensor forward_backward_by_graphs(Model& model, const Batch& batch, float loss_scale,
                                         const std::function<void()>& between) {
    zero_gradients(model);
    make_ready(model, batch.tokens.dim(1));
    Tensor result = empty({}, F32);
    std::string kind = kind_of_step(model, "step", batch.tokens, loss_scale);
    StepGraphs* g = graphs_or(model, kind, batch.tokens.shape, [&] {
        Tensor loss = forward_to_loss(model, batch);
        copy_in_stream(result, loss);
        between();
        backward_from_loss(model, loss, loss_scale);
    });
    if (!g) { return result; }
    if (!g->forward) {
        g->loss = empty({}, F32);
        Tensor loss;
        g->forward = capture(g->region, [&] {
            loss = forward_to_loss(model, g->batch);
            copy_in_stream(g->loss, loss);
        });
        g->backward = capture(g->region, [&] { backward_from_loss(model, loss, loss_scale); });
        for (const Tensor& t : model.slots) {
            if (t.gradient->filled) { g->gradients.push_back({t.gradient, t.gradient->value}); }
        }
    }
    copy_in_stream(g->batch.tokens, batch.tokens), copy_in_stream(g->batch.targets, batch.targets);
    {
        Range range("forward");
        CUDA_CHECK(cudaGraphLaunch(g->forward, stream()));
    }
    between();
    {
        Range range("backward");
        CUDA_CHECK(cudaGraphLaunch(g->backward, stream()));
    }
    drop_weight_copies(model.slots);
    for (const auto& gradient : g->gradients) {
        gradient.first->value = gradient.second, gradient.first->filled = true;
    }
    copy_in_stream(result, g->loss);
    return result;
}
static Tensor infer_by_graph(Model& model, const Tensor& tokens) {
    make_ready(model, tokens.dim(1));
    Tensor logits;
    StepGraphs* g = graphs_or(model, kind_of_step(model, "forward", tokens, 1), tokens.shape,
                              [&] { logits = forward(model, tokens); });
    if (!g) { return logits; }
    if (!g->forward) {
        g->forward = capture(g->region, [&] { g->logits = forward(model, g->batch.tokens); });
    }
    copy_in_stream(g->batch.tokens, tokens);
    Range range("forward");
    CUDA_CHECK(cudaGraphLaunch(g->forward, stream()));
    return g->logits;
}
// With an arena somebody may wait for single gradients, and whoever watches wants to see single kernels.
static bool by_graphs(const Model& model) {
    return context.mode == FLASH && context.device == CUDA && context.graphs && !model.gradients && !watched();
}
#endif

Tensor forward_backward(Model& model, const Batch& batch, float loss_scale, const std::function<void()>& between) {
#ifdef __CUDACC__
    if (by_graphs(model)) { return forward_backward_by_graphs(model, batch, loss_scale, between); }
#endif
    return forward_backward_by_launches(model, batch, loss_scale, between);
}
Tensor infer(Model& model, const Tensor& tokens) {
    NoGrad no_grad;
    Tensor logits;
#ifdef __CUDACC__
    if (by_graphs(model)) { logits = infer_by_graph(model, tokens); }
#endif
    if (!logits) { logits = forward(model, tokens); }
    drop_weight_copies(model.slots);
    return logits;
}
double optimizer_step(Model& model, const AdamW& adamw, LossScaler& scaler, double max_norm) {
    bool fp16 = context.precision == PREC_FP16;
    double scale = fp16 ? 1 / scaler.scale : 1, norm = 0;
    if (fp16 || max_norm > 0) { norm = gradient_norm(model) * scale; }
    if (fp16) { update_scale(scaler, !std::isfinite(norm)); }
    if (!std::isfinite(norm)) { return norm; }  // a step would spread it to all weights
    if (max_norm > 0 && norm > max_norm) { scale *= max_norm / (norm + 1e-6); }
    adamw_step(model, adamw, (float)scale);
    return norm;
}
float loss_scale_of(const LossScaler& scaler) { return context.precision == PREC_FP16 ? scaler.scale : 1; }

void run_phase(Phase phase, Model& model, const Batch& batch, LossScaler& scaler,
               const std::function<void()>& between) {
    if (phase == FORWARD) {
        infer(model, batch.tokens);
        return;
    }
    if (phase == STEP) { make_optimizer_state(model); }
    forward_backward(model, batch, loss_scale_of(scaler), between);
    if (phase == STEP) { optimizer_step(model, AdamW(), scaler, 0); }
}
size_t predicted_peak(const ModelConfig& c, int B, int T, Phase phase) {
    return planned_peak([&] {
        Model model = random_model(c, 0);
        LossScaler scaler;
        reset_peak(META);  // splitting is no part of the phase
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
}
std::string caption_of(Mode mode) { return name_of(mode) + std::string(context.recompute ? ", recompute" : ""); }
