// layers.cu: the ops of the handout's Transformer LM, and of its optimizer.
//
// Each op comes as: formula; the eager form, a chain of lib/tensor.cu's one-kernel operations that
// autograd differentiates; the fused form with its backward by hand, as a plain loop for the CPU
// and as kernels for the GPU, or, where nothing is summed, as one body for both. T is the compute
// type (under autocast bf16 or fp16), X that of the residual stream x and the weights: fp32, or in
// pure bf16 bf16. Arithmetic and sums are fp32: Wide<T>, which is double where tests compute in
// float64.
#include "cs336.h"
#include "lib/gpu.h"
#include <cfloat>

// -------------------------------------------------------------------------------------------------
// RMSNorm, with the residual add before it.
//   x += delta;  r = 1/sqrt(mean_c(x_c^2) + eps);  y_c = w_c x_c r
//   dx_c = r w_c dy_c - x_c r^3/C sum_j(w_j dy_j x_j);  dw_c = sum over rows of dy_c x_c r
// x, delta, y, dx [N,C]; r [N]; w [C]. The handout's model needs 7 kernels forward and about 20
// backward for it; fused it is 1 and 2, and x is read and written once.

static Tensor add_rmsnorm_eager(Tensor* x, const Tensor& delta, const Tensor& w, float eps) {
    if (delta) {
        Range r("residual");
        *x = add(*x, delta);
    }
    Range r("rmsnorm");
    Tensor wide = x->dtype == BF16 ? cast(*x, F32) : *x;
    return cast(mul(w, mul(wide, rsqrt(add_scalar(mean_last(square(wide)), eps)))), x->dtype);
}

// with_packs on the GPU; on the CPU any type, and the least packs. Nothing on META.
template <int least = 1, class Fn>
static void with_any_packs(const Tensor& t, int64_t n, const std::vector<const void*>& addresses,
                           Fn f) {
    if (t.device() == CUDA) { with_packs<least>(t.dtype, n, addresses, f); }
    if (t.device() == CPU) {
        with_type(t.dtype, [&](auto zero) { f(zero, std::integral_constant<int, least>()); });
    }
}
// Runs f(T(), X(), W), with the types of t and of the residual stream x.
template <class Fn>
static void with_types(const Tensor& t, const Tensor& x, int64_t C,
                       const std::vector<const void*>& addresses, Fn f) {
    with_any_packs(t, C, addresses, [&](auto zero, auto width) {
        if constexpr (std::is_same<decltype(zero), bf16>::value) {
            if (x.dtype == BF16) { return f(zero, bf16(), width); }
        }
        f(zero, +zero, width);
    });
}

template <class T, class X>
static void add_rmsnorm_cpu(T* y, X* x_out, Wide<T>* r_out, const X* x_in, const T* delta,
                            const X* w, int64_t N, int64_t C, float eps) {
#pragma omp parallel for if (N > 64)
    for (int64_t n = 0; n < N; n++) {
        const X* x = x_in + n * C;
        if (delta) {
            for (int64_t c = 0; c < C; c++) { x_out[n * C + c] = x[c] + delta[n * C + c]; }
            x = x_out + n * C;
        }
        double sum = 0;
        for (int64_t c = 0; c < C; c++) { sum += (double)x[c] * x[c]; }
        Wide<T> r = (Wide<T>)(1 / std::sqrt(sum / C + eps));
        for (int64_t c = 0; c < C; c++) { y[n * C + c] = w[c] * (x[c] * r); }
        r_out[n] = r;
    }
}
template <class T, class X>
static void rmsnorm_backward_cpu(X* dx, bool add_dx, T* dx_low, X* dw, bool add_dw, const T* dy,
                                 const X* x, const Wide<T>* r, const X* w, int64_t N, int64_t C) {
#pragma omp parallel for if (N > 64)
    for (int64_t n = 0; n < N; n++) {
        double dot = 0;
        for (int64_t i = n * C; i < (n + 1) * C; i++) {
            dot += (double)w[i - n * C] * dy[i] * x[i];
        }
        Wide<T> k = (Wide<T>)(dot * r[n] * r[n] * r[n] / C);
        for (int64_t i = n * C; i < (n + 1) * C; i++) {
            Wide<T> d = r[n] * w[i - n * C] * dy[i] - x[i] * k;
            dx[i] = add_dx ? dx[i] + d : d;
            if (dx_low) { dx_low[i] = +dx[i]; }
        }
    }
#pragma omp parallel for if (N > 64)
    for (int64_t c = 0; c < C; c++) {
        double sum = add_dw ? +dw[c] : 0;
        for (int64_t n = 0; n < N; n++) { sum += (double)dy[n * C + c] * x[n * C + c] * r[n]; }
        dw[c] = (Wide<T>)sum;
    }
}

#ifdef __CUDACC__
// A row's elements are needed twice, before and after the sum over the row. A row of one pack per
// thread stays in registers in between; a longer row is read again, by the thread that wrote it,
// from L1 or L2.
template <int W, class T, class X>
__global__ void __launch_bounds__(PACK_THREADS)
    add_rmsnorm_kernel(T* y, X* x_out, float* r_out, const X* x, const T* delta, const X* w_in,
                       int C, float eps) {
    const int64_t row = blockIdx.x * (int64_t)C;
    const int step = W * blockDim.x;
    Pack<X, W> v = {}, w = {};
    float sum = 0;
    for (int c = W * threadIdx.x; c < C; c += step) {
        v = load_pack<W>(x + row + c), w = load_pack<W>(w_in + c);
        if (delta) {
            Pack<T, W> d = load_pack<W>(delta + row + c);
            for (int i = 0; i < W; i++) { v.x[i] = v.x[i] + d.x[i]; }
            store_pack(x_out + row + c, v);
        }
        for (const X& value : v.x) { sum += value * value; }
    }
    float r = 1 / sqrtf(block_sum(sum) / C + eps);
    for (int c = W * threadIdx.x; c < C; c += step) {
        if (C > step) {
            v = load_pack<W>((delta ? x_out : x) + row + c), w = load_pack<W>(w_in + c);
        }
        Pack<T, W> out;
        for (int i = 0; i < W; i++) { out.x[i] = w.x[i] * (v.x[i] * r); }
        store_pack(y + row + c, out);
    }
    if (threadIdx.x == 0) { r_out[blockIdx.x] = r; }
}
// Writes dx, a copy of it as T if wanted, and each block's share of dw: the sum over its rows, in
// partial [gridDim.x,C]. A thread has the same columns in all of its rows, so it adds them up in
// registers, or in `partial` where a row is several packs per thread.
template <int W, class T, class X>
__global__ void __launch_bounds__(PACK_THREADS)
    rmsnorm_backward_kernel(X* dx, bool add_dx, T* dx_low, float* partial, const T* dy, const X* x,
                            const float* r_in, const X* w_in, int N, int C) {
    const int first = blockIdx.x, rows = gridDim.x, step = W * blockDim.x;
    Pack<X, W> v = {}, w = {}, out = {};
    Pack<float, W> dw = {};
    Pack<T, W> d = {};
    for (int n = first; n < N; n += rows) {
        const int64_t row = n * (int64_t)C;
        auto read = [&](int c) {
            v = load_pack<W>(x + row + c), w = load_pack<W>(w_in + c),
            d = load_pack<W>(dy + row + c);
            if (add_dx) { out = load_pack<W>(dx + row + c); }
        };
        float dot = 0, r = r_in[n];
        for (int c = W * threadIdx.x; c < C; c += step) {
            read(c);
            for (int i = 0; i < W; i++) { dot += w.x[i] * d.x[i] * v.x[i]; }
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
                float g = d.x[i], change = r * w.x[i] * g - v.x[i] * k;
                out.x[i] = add_dx ? out.x[i] + change : change;
                dw.x[i] += g * v.x[i] * r;
                low.x[i] = +out.x[i];
            }
            store_pack(dx + row + c, out);
            if (dx_low) { store_pack(dx_low + row + c, low); }
            if (C > step || n + rows >= N) { store_pack(sums, dw); }
        }
    }
}
// dw from the partial sums, always in the same order: 32 columns per block, and 32 threads per
// column.
constexpr int DW_SHARES = 32;
template <class X>
__global__ void rmsnorm_dw_kernel(X* dw, bool add_dw, const float* partial, int parts, int C) {
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

static void rmsnorm_backward(const Tensor& dx, bool add_dx, const Tensor& dx_low, const Tensor& dw,
                             bool add_dw, const Tensor& dy, const Tensor& x, const Tensor& r,
                             const Tensor& w) {
    int64_t C = w.size(), N = x.size() / C, parts = 0;
#ifdef __CUDACC__
    // Four rows or more per block, so that the partial sums are few beside them; and no more blocks
    // than run at a time.
    if (dx.device() != CPU) { parts = std::min(ceil_div(N, 4), 4 * multiprocessors()); }
#endif
    Tensor partial = empty({parts, C}, F32, WORKSPACE);
    std::vector<const void*> addresses = {dx.data, dx_low.data, partial.data,
                                          dy.data, x.data,      w.data};
    with_types(dy, x, C, addresses, [&](auto zero, auto x_zero, [[maybe_unused]] auto width) {
        if (dx.device() == CPU) {
            return rmsnorm_backward_cpu(dx.as(x_zero), add_dx, dx_low.as(zero), dw.as(x_zero),
                                        add_dw, dy.as(zero), x.as(x_zero), r.as(+zero),
                                        w.as(x_zero), N, C);
        }
        LAUNCH(rmsnorm_backward_kernel<width>, parts, threads_for(C / width), dx.as(x_zero), add_dx,
               dx_low.as(zero), partial.as<float>(), dy.as(zero), x.as(x_zero), r.as<float>(),
               w.as(x_zero), (int)N, (int)C);
        LAUNCH(rmsnorm_dw_kernel, ceil_div(C, WARP), dim3(WARP, DW_SHARES), dw.as(x_zero), add_dw,
               partial.as<float>(), (int)parts, (int)C);
    });
}

static Tensor add_rmsnorm_fused(Tensor* x_io, const Tensor& delta, const Tensor& w, float eps) {
    Range range("rmsnorm");
    Tensor x_in = *x_io, x = delta ? empty(x_in.shape, x_in.dtype) : x_in;
    int64_t C = w.size(), N = x.size() / C;
    // y is rounded once, here; autocast would cast it before the product.
    Tensor y = empty(x.shape, x.dtype == F64 ? F64 : matmul_dtype()),
           r = empty({N}, x.dtype == F64 ? F64 : F32);
    std::vector<const void*> addresses = {y.data, x.data, x_in.data, delta.data, w.data};
    with_types(y, x, C, addresses, [&](auto zero, auto x_zero, [[maybe_unused]] auto width) {
        if (x.device() == CPU) {
            return add_rmsnorm_cpu(y.as(zero), x.as(x_zero), r.as(+zero), x_in.as(x_zero),
                                   delta.as(zero), w.as(x_zero), N, C, eps);
        }
        LAUNCH(add_rmsnorm_kernel<width>, N, threads_for(C / width), y.as(zero), x.as(x_zero),
               r.as<float>(), x_in.as(x_zero), delta.as(zero), w.as(x_zero), (int)C, eps);
    });
    // delta's gradient: y's step, which backward runs first, fills it for x's.
    auto dx_low = std::make_shared<Tensor>();
    if (delta) {
        record(x, {x_in, delta},
               [dx_low, gx = x_in.gradient, gd = delta.gradient](const Tensor& dx) {
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
    recompute_by(y, [x = detached(x), w, eps] {
        NoGrad no_grad;
        Tensor same = x;
        return add_rmsnorm_fused(&same, Tensor(), w, eps);
    });
    return y;
}
Tensor add_rmsnorm(Tensor* x, const Tensor& delta, const Tensor& weight, float eps) {
    return context.mode == EAGER ? add_rmsnorm_eager(x, delta, weight, eps)
                                 : add_rmsnorm_fused(x, delta, weight, eps);
}

// What has no sums is one body for CPU and GPU: f(n, part, c) does W neighbours from column c on,
// of a row's part.

#ifdef __CUDACC__
template <int W, class F>
__global__ void __launch_bounds__(PACK_THREADS) each_pack_kernel(F f, int C) {
    for (int c = W * threadIdx.x; c < C; c += W * blockDim.x) { f(blockIdx.x, blockIdx.y, c); }
}
#endif
// For N rows of `parts` times C elements. On the GPU a block takes a part.
template <int W, class F>
static void for_each_pack(Device device, int64_t N, int parts, int64_t C, const F& f) {
    if (N == 0) { return; }
    if (device == CUDA) {
        LAUNCH((each_pack_kernel<W, F>), dim3(N, parts), threads_for(C / W), f, (int)C);
    }
    if (device != CPU) { return; }
#pragma omp parallel for if (N * parts * C > 16384)
    for (int64_t i = 0; i < N * parts; i++) {
        for (int c = 0; c < C; c += W) { f((int)(i / parts), (int)(i % parts), c); }
    }
}

// -------------------------------------------------------------------------------------------------
// RoPE: each pair (x_2i, x_2i+1) of a query or key at position t is rotated by the angle t
// theta^(-2i/D):
//   y_2i = cos x_2i - sin x_2i+1,  y_2i+1 = sin x_2i + cos x_2i+1
// Backward rotates by the opposite angle.
// Fused: one product gives q, k and v side by side, y [B,T,C] -> [B,T,3,H,D]. One kernel rotates q
// and k and lays all three out as [B,H,T,D] for attention: 3 elements read and 3 written, where
// eager needs some 16 kernels. For mode flash the same kernel rotates q and k in place, side by
// side: its attention reads them by strides.

Tensor rope_table(int64_t T, int64_t D, float theta, DType dtype) {
    if (context.device == META) { return empty({T, D}, dtype, INPUTS); }
    std::vector<float> values(T * D);
    for (int64_t t = 0; t < T; t++) {
        for (int64_t i = 0; i < D / 2; i++) {
            double angle = t * pow((double)theta, -2.0 * i / D);
            values[t * D + 2 * i] = (float)cos(angle);
            values[t * D + 2 * i + 1] = (float)sin(angle);
        }
    }
    return from_floats(values, {T, D}, dtype);
}

static Tensor rope_eager(const Tensor& x, const Tensor& rope) {
    Range r("rope");
    Tensor cos = slice_last(rope, 0, 2), sin = slice_last(rope, 1, 2), x1 = slice_last(x, 0, 2),
           x2 = slice_last(x, 1, 2);
    return interleave_last(sub(mul(cos, x1), mul(sin, x2)), add(mul(sin, x1), mul(cos, x2)));
}

// From qkv to the heads, or with `backward` from the heads' gradients to qkv's. Without heads q and
// k stay in qkv.
template <int W, class T>
struct Rope {
    T *qkv, *q, *k, *v;
    const Wide<T>* rope;
    int positions, H, D;
    bool backward;
    // columns from c of the H heads, of size D, in row bt
    HD void operator()(int bt, int which, int c) const {
        const int t = bt % positions, h = c / D;
        T *heads = which == 0   ? q
                   : which == 1 ? k
                                : v,
          *joined = qkv + (bt * (int64_t)3 + which) * (H * D) + c;
        T* head =
            heads ? heads + (((int64_t)(bt / positions) * H + h) * positions + t) * D + (c - h * D)
                  : joined;
        Pack<T, W> pack = load_pack<W>(backward ? head : joined);
        if (which < 2) {
            Pack<Wide<T>, W> cos_sin = load_pack<W>(rope + t * D + c % D);
            for (int i = 0; i < W; i += 2) {
                Wide<T> x1 = pack.x[i], x2 = pack.x[i + 1], cos = cos_sin.x[i],
                        sin = cos_sin.x[i + 1];
                if (backward) { sin = -sin; }
                pack.x[i] = cos * x1 - sin * x2;
                pack.x[i + 1] = sin * x1 + cos * x2;
            }
        }
        store_pack(backward ? joined : head, pack);
    }
};
static void rotate(const Tensor& qkv, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& rope, bool backward) {
    const int64_t C = qkv.dim(-1) / 3, D = rope.dim(1), N = qkv.size() / (3 * C);
    with_any_packs<2>(
        qkv, D, {qkv.data, q.data, k.data, v.data, rope.data}, [&](auto zero, auto width) {
            using T = decltype(zero);
            for_each_pack<width>(qkv.device(), N, q ? 3 : 2, C,
                                 Rope<width, T>{qkv.as<T>(), q.as<T>(), k.as<T>(), v.as<T>(),
                                                rope.as<Wide<T>>(), (int)rope.dim(0), (int)(C / D),
                                                (int)D, backward});
        });
}

// y [B,T,C] to q, k, v [B,H,T,D]; q and k are rotated by rope.
static void split_heads(const Layer& layer, const Tensor& y, const Tensor& rope_all, int H,
                        Tensor* q, Tensor* k, Tensor* v) {
    Range r("projections");
    int64_t B = y.dim(0), T = y.dim(1), C = y.dim(2), D = C / H;
    Tensor rope = view(rope_all, 0, {T, D});
    if (context.mode == EAGER) {
        auto heads = [&](const Tensor& w) {
            return transpose(reshape(linear(y, w), {B, T, H, D}), 1, 2);
        };
        *q = rope_eager(heads(layer.q), rope), *k = rope_eager(heads(layer.k), rope),
        *v = heads(layer.v);
        return;
    }
    Tensor qkv = linear(y, layer.qkv);
    for (Tensor* heads : {q, k, v}) { *heads = empty({B, H, T, D}, qkv.dtype); }
    rotate(qkv, *q, *k, *v, rope, false);
    // Three outputs, one backward: v's step is recorded first, so it runs last, when all three
    // gradients are there.
    auto dq = std::make_shared<Tensor>(), dk = std::make_shared<Tensor>();
    record(*v, {qkv}, [dq, dk, rope, g = qkv.gradient](const Tensor& dv) {
        Tensor dqkv = empty(g->shape, g->dtype);
        rotate(dqkv, *dq, *dk, contiguous(dv), rope, true);
        add_gradient(g, dqkv);
    });
    record(*k, {qkv}, [dk](const Tensor& d) { *dk = contiguous(d); });
    record(*q, {qkv}, [dq](const Tensor& d) { *dq = contiguous(d); });
}
static Tensor rope_in_place(const Tensor& qkv, const Tensor& rope) {
    rotate(qkv, {}, {}, {}, rope, false);
    Tensor rotated = detached(qkv);
    record(rotated, {qkv}, [rope, g = qkv.gradient](const Tensor& d) {
        // in place again: attention's backward made d for us alone
        rotate(d, {}, {}, {}, rope, true);
        add_gradient(g, d);
    });
    return rotated;
}

Tensor self_attention(const Layer& layer, const Tensor& y, const Tensor& rope, int H) {
    if (context.mode == FLASH) {
        Tensor qkv;
        {
            Range r("projections");
            qkv = rope_in_place(linear(y, layer.qkv), view(rope, 0, {y.dim(1), y.dim(2) / H}));
        }
        return flash_self_attention(qkv, H);
    }
    Tensor q, k, v;
    split_heads(layer, y, rope, H, &q, &k, &v);
    return reshape(transpose(attention(q, k, v, true), 1, 2), y.shape);
}

// -------------------------------------------------------------------------------------------------
// SwiGLU: g = silu(a) * b with a = y w1^T, b = y w3^T, silu(a) = a s, s = 1/(1 + exp(-a)).
//   da = dg b s (1 + a (1 - s)),  db = dg a s.
// Fused: one product gives h = [a | b], [N,2F]; then 2 reads and 1 write.

template <class A>
HD inline A sigmoid_of(A a) {
    return 1 / (1 + std::exp(-a));
}
template <int W, class T>
struct Swiglu {
    T* g;
    const T* h;
    int F;
    HD void operator()(int n, int, int f) const {
        const int64_t row = n * (int64_t)F;
        Pack<T, W> a_pack = load_pack<W>(h + 2 * row + f), b = load_pack<W>(h + 2 * row + F + f),
                   out;
        for (int i = 0; i < W; i++) {
            Wide<T> a = a_pack.x[i];
            out.x[i] = a * sigmoid_of(a) * b.x[i];
        }
        store_pack(g + row + f, out);
    }
};
template <int W, class T>
struct SwigluBackward {
    T* dh;
    const T *dg_in, *h;
    int F;
    HD void operator()(int n, int, int f) const {
        const int64_t row = n * (int64_t)F, at = 2 * row + f;
        Pack<T, W> a_pack = load_pack<W>(h + at), b = load_pack<W>(h + at + F),
                   d = load_pack<W>(dg_in + row + f), da, db;
        for (int i = 0; i < W; i++) {
            Wide<T> a = a_pack.x[i], s = sigmoid_of(a), dg = d.x[i];
            da.x[i] = dg * b.x[i] * s * (1 + a * (1 - s));
            db.x[i] = dg * a * s;
        }
        store_pack(dh + at, da);
        store_pack(dh + at + F, db);
    }
};
Tensor swiglu(const Layer& layer, const Tensor& y) {
    if (context.mode == EAGER) {
        Tensor a = linear(y, layer.w1), b = linear(y, layer.w3);
        Range r("swiglu");
        return mul(mul(a, sigmoid(a)), b);
    }
    Tensor h = linear(y, layer.w13);
    Range r("swiglu");
    const int64_t F = layer.w1.dim(0);
    Shape shape = y.shape;
    shape.back() = F;
    auto compute = [shape, F, h = detached(h)] {
        Tensor g = empty(shape, h.dtype);
        with_any_packs(g, F, {g.data, h.data}, [&](auto zero, auto width) {
            for_each_pack<width>(g.device(), g.size() / F, 1, F,
                                 Swiglu<width, decltype(zero)>{g.as(zero), h.as(zero), (int)F});
        });
        return g;
    };
    Tensor g = compute();
    record(g, {h}, [h, F](const Tensor& dg_in) {
        Tensor dh = empty(h.shape, h.dtype), dg = contiguous(dg_in);
        with_any_packs(dg, F, {dh.data, dg.data, h.data}, [&](auto zero, auto width) {
            for_each_pack<width>(dg.device(), dg.size() / F, 1, F,
                                 SwigluBackward<width, decltype(zero)>{dh.as(zero), dg.as(zero),
                                                                       h.as(zero), (int)F});
        });
        add_gradient(h.gradient, dh);
    });
    recompute_by(g, [compute] {
        Range range("swiglu");
        return compute();
    });
    return g;
}

// -------------------------------------------------------------------------------------------------
// Cross-entropy of logits l [N,V] with targets t [N]:  loss = mean_n( lse_n - l[n,t_n] ), lse_n =
// log sum_v exp(l[n,v])
//   dl[n,v] = (exp(l[n,v] - lse_n) - [v = t_n]) dloss / N.   In fp32 whatever the logits are.
// Fused: the logits are read once forward and once backward, and their gradient takes their place
// in memory.

static Tensor cross_entropy_eager(const Tensor& logits, const Tensor& targets) {
    Tensor l = cast(logits, logits.dtype == F64 ? F64 : F32);
    Tensor shifted = sub(l, max_last(l));
    return mean_all(sub(log(sum_last(exp(shifted))), pick_last(shifted, targets)));
}
template <class T>
static void cross_entropy_cpu(Wide<T>* loss, Wide<T>* lse, const T* logits, const int* targets,
                              int64_t N, int64_t V) {
#pragma omp parallel for if (N > 64)
    for (int64_t n = 0; n < N; n++) {
        const T* l = logits + n * V;
        Wide<T> m = -INFINITY;
        double sum = 0;
        for (int64_t v = 0; v < V; v++) { m = std::max<Wide<T>>(m, l[v]); }
        for (int64_t v = 0; v < V; v++) { sum += std::exp(l[v] - m); }
        lse[n] = (Wide<T>)(m + std::log(sum));
        loss[n] = lse[n] - l[targets[n]];
    }
}
// For these rows; the loss is the mean over N.
template <class T>
static void cross_entropy_backward_cpu(T* dl, const T* l, const Wide<T>* lse, const int* targets,
                                       Wide<T> dloss, int64_t rows, int64_t N, int64_t V) {
#pragma omp parallel for if (rows > 64)
    for (int64_t n = 0; n < rows; n++) {
        for (int64_t v = 0; v < V; v++) {
            Wide<T> p = std::exp(l[n * V + v] - lse[n]);
            dl[n * V + v] = (p - (v == targets[n])) * dloss / N;
        }
    }
}
#ifdef __CUDACC__
// Maximum and sum in one pass, the sum rescaled when the maximum grows. The maximum starts from a
// finite number: logits of -inf then add exp(-inf) = 0, where -inf - -inf would be NaN.
template <int W, class T>
__global__ void __launch_bounds__(PACK_THREADS)
    cross_entropy_kernel(float* loss, float* lse, const T* logits, const int* targets, int V) {
    const T* l = logits + blockIdx.x * (int64_t)V;
    float m = -FLT_MAX, sum = 0;
    for (int v = W * threadIdx.x; v < V; v += W * blockDim.x) {
        Pack<T, W> pack = load_pack<W>(l + v);
        float larger = m;
        for (const T& x : pack.x) { larger = fmaxf(larger, x); }
        sum *= expf(m - larger);
        for (const T& x : pack.x) { sum += expf(x - larger); }
        m = larger;
    }
    float row_m = block_max(m), row_sum = block_sum(sum * expf(m - row_m));
    if (threadIdx.x == 0) {
        lse[blockIdx.x] = row_m + logf(row_sum);
        loss[blockIdx.x] = lse[blockIdx.x] - l[targets[blockIdx.x]];
    }
}
template <int W, class T>
__global__ void __launch_bounds__(PACK_THREADS)
    cross_entropy_backward_kernel(T* dl, const T* l, const float* lse_in, const int* targets,
                                  const float* dloss, int64_t N, int V) {
    const int64_t row = blockIdx.x * (int64_t)V;
    const float k = *dloss / N, lse = lse_in[blockIdx.x];
    const int target = targets[blockIdx.x];
    for (int v = W * threadIdx.x; v < V; v += W * blockDim.x) {
        Pack<T, W> pack = load_pack<W>(l + row + v);
        for (int i = 0; i < W; i++) { pack.x[i] = (expf(pack.x[i] - lse) - (v + i == target)) * k; }
        store_pack(dl + row + v, pack);
    }
}
#endif
static void cross_entropy_run(const Tensor& loss, const Tensor& lse, const Tensor& l,
                              const Tensor& targets) {
    int64_t N = l.dim(0), V = l.dim(1);
    with_any_packs(l, V, {l.data}, [&](auto zero, [[maybe_unused]] auto width) {
        if (l.device() == CPU) {
            return cross_entropy_cpu(loss.as(+zero), lse.as(+zero), l.as(zero), targets.as<int>(),
                                     N, V);
        }
        LAUNCH(cross_entropy_kernel<width>, N, threads_for(V / width), loss.as<float>(),
               lse.as<float>(), l.as(zero), targets.as<int>(), (int)V);
    });
}
static void cross_entropy_backward(const Tensor& dl, const Tensor& l, const Tensor& lse,
                                   const Tensor& targets, const Tensor& dloss, int64_t N) {
    int64_t rows = l.dim(0), V = l.dim(1);
    with_any_packs(l, V, {dl.data, l.data}, [&](auto zero, [[maybe_unused]] auto width) {
        if (l.device() == CPU) {
            return cross_entropy_backward_cpu(dl.as(zero), l.as(zero), lse.as(+zero),
                                              targets.as<int>(), *dloss.as(+zero), rows, N, V);
        }
        LAUNCH(cross_entropy_backward_kernel<width>, rows, threads_for(V / width), dl.as(zero),
               l.as(zero), lse.as<float>(), targets.as<int>(), dloss.as<float>(), N, (int)V);
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
        // nobody else can still want to see the logits
        bool ours_alone = l.memory.use_count() == 1;
        Tensor dl = ours_alone ? detached(l) : empty(l.shape, l.dtype);
        cross_entropy_backward(dl, l, lse, targets, dloss, l.dim(0));
        add_gradient(l.gradient, dl);
    });
    return loss;
}

// The same from x [N,C] (y, as products take it) and the head w [V,C]. Where V is large, the logits
// x w^T are most of a step's memory, so they are made a chunk of rows at a time. Forward computes
// the gradients of a chunk at once,
//   dx = dl w,  dW += dl^T x      with dl for dloss = 1,
// and backward scales them. dW adds up in fp32, so a 16-bit gradient is rounded once. fp16 would
// need the loss scale before: dl is mostly about 1/(N V), less than it can hold.
Tensor chunked_loss(const Tensor& y, const Tensor& head, const Tensor& targets, int64_t chunk) {
    Range range("head and loss");
    int64_t V = head.dim(0), C = head.dim(1), N = y.size() / C;
    Tensor x = reshape(autocast_operand(y), {N, C}), w = autocast_operand(head);
    DType wide = x.dtype == F64 ? F64 : F32;
    Tensor rows = empty({N}, wide), dx, dW;
    if (context.recording) { dx = empty(x.shape, x.dtype), dW = empty(w.shape, wide, WORKSPACE); }
    {
        NoGrad no_grad;
        Tensor logits = empty({std::min(chunk, N), V}, x.dtype),
               one = add_scalar(zeros({}, wide), 1);
        for (int64_t first = 0; first < N; first += chunk) {
            int64_t n = std::min(chunk, N - first);
            Tensor l = view(logits, 0, {n, V}), part = view(x, first * C, {n, C}),
                   t = view(targets, first, {n}), lse = empty({n}, wide);
            gemm(l, part, false, w, true);
            cross_entropy_run(view(rows, first, {n}), lse, l, t);
            if (!dx) { continue; }
            cross_entropy_backward(l, l, lse, t, one, N);
            gemm(view(dx, first * C, {n, C}), l, false, w, false);
            gemm(dW, l, true, part, false, 1, first > 0);
        }
    }
    Tensor loss = detached(mean_all(detached(rows)));
    record(loss, {x, w}, [dx, dW, gx = x.gradient, gw = w.gradient](const Tensor& dloss) {
        scale_in_place(dx, dloss), scale_in_place(dW, dloss);
        add_gradient(gx, dx);
        add_gradient(gw, dW);
    });
    return loss;
}

// -------------------------------------------------------------------------------------------------
// The optimizer: the sum of all gradients' squares, in a fixed order, for their norm; then
// AdamW (Loshchilov and Hutter, 2019; the handout's order), t = 1, 2, ...:
//   p *= 1 - lr wd;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
//   p -= lr sqrt(1 - b2^t)/(1 - b1^t) m / (sqrt(v) + eps)
// p, m and v are each read and written once, 24 bytes per parameter in fp32, and g is read (2 or
// 4). In pure bf16 that is 14 in all.

constexpr int NORM_BLOCKS = 1024;
#ifdef __CUDACC__
template <class T>
__global__ void square_sum_kernel(double* partial, const T* g, int64_t n) {
    float sum = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        float x = g[i];
        sum += x * x;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { partial[blockIdx.x] = sum; }
}
#endif
double square_sum(const std::vector<FlatGradient>& gradients) {
    if (context.device == META) { return 1; }
    double sum = 0;
    if (context.device == CUDA) {
        Tensor partial = empty({(int64_t)gradients.size(), NORM_BLOCKS}, F64, WORKSPACE);
        [[maybe_unused]] double* next = partial.as<double>();
        for (const FlatGradient& one : gradients) {
            with_gpu_type(one.g.dtype, [&]([[maybe_unused]] auto zero) {
                LAUNCH(square_sum_kernel, NORM_BLOCKS, 256, next, one.g.as(zero), one.g.size());
            });
            next += NORM_BLOCKS;
        }
        for (double s : to_doubles(partial)) { sum += s; }
        return sum;
    }
    for (const FlatGradient& one : gradients) {
        with_type(one.g.dtype, [&](auto zero) {
            const auto* g = one.g.as(zero);
            for (int64_t i = 0; i < one.g.size(); i++) { sum += (double)g[i] * g[i]; }
        });
    }
    return sum;
}

#ifdef __CUDACC__
template <class P, class G>
__global__ void adamw_kernel(P* p, const G* g, P* m, P* v, int64_t n, AdamWScalars s) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) { adamw_element(p + i, g[i], m + i, v + i, s); }
}
#endif
template <class P, class G>
static void adamw_range(P* p, const G* g, P* m, P* v, int64_t n, AdamWScalars s) {
    if (n == 0) { return; }
    if (context.device == CUDA) {
        LAUNCH(adamw_kernel, ceil_div(n, 256), 256, p, g, m, v, n, s);
        return;
    }
#pragma omp parallel for simd if (n > 16384)
    for (int64_t i = 0; i < n; i++) { adamw_element(p + i, g[i], m + i, v + i, s); }
}
static void adamw_plain(const Tensor& p, const std::vector<FlatGradient>& gradients,
                        const Tensor& m, const Tensor& v, AdamWScalars s) {
    for (const auto& [g, at] : gradients) {
        with_gpu_type(g.dtype, [&, &g = g, at = at](auto g_zero) {
            with_gpu_type(p.dtype, [&](auto zero) {
                adamw_range(p.as(zero) + at, g.as(g_zero), m.as(zero) + at, v.as(zero) + at,
                            g.size(), s);
            });
        });
    }
}
AdamWScalars scalars_of(const AdamW& a, int t, float gradient_scale) {
    double step_size = a.lr * sqrt(1 - pow(a.beta2, t)) / (1 - pow(a.beta1, t));
    return {1 - a.lr * a.weight_decay, a.beta1, a.beta2, a.eps, (float)step_size, gradient_scale};
}
void adamw_update(const Tensor& p, const std::vector<FlatGradient>& gradients, const Tensor& m,
                  const Tensor& v, const AdamW& a, int t, float gradient_scale, bool split) {
    Range range("optimizer");
    if (p.device() == META) { return; }
    auto* update = split                                   ? fast_ways.adamw_of_split
                   : p.device() == CUDA && fast_ways.adamw ? fast_ways.adamw
                                                           : adamw_plain;
    update(p, gradients, m, v, scalars_of(a, t, gradient_scale));
}
