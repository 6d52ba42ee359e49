// layers.cu: the ops of the handout's Transformer LM in the order of its forward pass (RMSNorm with
// the residual add, RoPE, SwiGLU, cross-entropy), then those of its optimizer.
//
// Each op comes as: formula; the eager form, a chain of lib/tensor.cu's one-kernel operations that
// autograd differentiates; the fused form with its backward by hand, as a plain loop for the CPU
// and as kernels for the GPU, or, where nothing is summed, as one body for both. Read the formula
// and the CPU's loop first: the kernels compute the same, with a block of threads per row.
//
// T is the compute type (under autocast bf16 or fp16), X the type of the residual stream x and of
// the weights: fp32, or in pure bf16 bf16. Arithmetic and sums are fp32: Wide<T>, which is double
// where tests compute in float64.
#include "cs336.h"
#include "lib/gpu.h"
#include <cfloat>

// -------------------------------------------------------------------------------------------------
// From a tensor's dtype to a kernel's types
//
// A tensor knows its type at run time, a kernel has to know it at compile time. Each fused op
// therefore calls with_types() with a function that is compiled for every combination, and
// with_types() runs the one that fits its tensors. In fp32 the whole call
//   with_types(y, x, C, {y.data, x.data}, [&](auto types) {
//       using T = typename decltype(types)::T;
//       if (x.device() == CPU) { return op_cpu(y.as<T>(), x.as<T>(), N, C); }
//       LAUNCH(op_kernel<types.W>, N, threads_for(C / types.W), y.as<T>(), x.as<T>(), (int)C);
//   });
// is on the CPU
//   op_cpu((float*)y.data, (float*)x.data, N, C);
// and on the GPU, where C is a multiple of 4 and both addresses are multiples of 16 bytes,
//   op_kernel<4><<<N, threads_for(C / 4), 0, stream()>>>((float*)y.data, (float*)x.data, C);
// Else it is op_kernel<1>: see Pack in lib/gpu.h.

template <class ComputeType, class ResidualType, int WIDTH>
struct Types {
    using T = ComputeType;
    using X = ResidualType;
    static constexpr int W = WIDTH;  // elements in a pack; on the CPU the least
};

// Runs f(Types<T, X, W>()) with t's type as T and x's as X; on META it does nothing. Rows have a
// multiple of n elements and begin at the addresses. An op without x passes t twice and uses T
// alone.
template <int least = 1, class Fn>
static void with_types(const Tensor& t, const Tensor& x, int64_t n,
                       const vector<const void*>& addresses, Fn f) {
    auto with_width = [&](auto zero, auto width) {
        using T = decltype(zero);
        if constexpr (std::is_same<T, bf16>::value) {
            if (x.dtype == BF16) { return f(Types<T, bf16, width>()); }
        }
        f(Types<T, Wide<T>, width>());
    };

    if (t.device() == CUDA) { with_packs<least>(t.dtype, n, addresses, with_width); }
    if (t.device() == CPU) {
        const std::integral_constant<int, least> width;
        with_type(t.dtype, [&](auto zero) { with_width(zero, width); });
    }
}

// The ops of this file that write into tensors, or fast ones for the GPU: see the end of the ops.
static const LayerOps& ops();

// -------------------------------------------------------------------------------------------------
// RMSNorm, with the residual add before it.
//   x += delta;  r = 1/sqrt(mean_c(x_c^2) + eps);  y_c = w_c x_c r
//   dx_c = r w_c dy_c - x_c r^3/C sum_j(w_j dy_j x_j);  dw_c = sum over rows of dy_c x_c r
// x, delta, y, dx [N,C]; r [N]; w [C]. The handout's model needs 7 kernels forward and about 20
// backward for it; fused it is 1 and 2, and x is read and written once.

// Adds delta to *x, if there is one, and returns y. Autograd knows the backward of each step.
static Tensor add_rmsnorm_eager(Tensor* x, const Tensor& delta, const Tensor& w, float eps) {
    if (delta) {
        Range r("residual");
        *x = add(*x, delta);
    }

    Range r("rmsnorm");
    Tensor wide = x->dtype == BF16 ? cast(*x, F32) : *x;
    Tensor normed = mul(wide, rsqrt(add_scalar(mean_last(square(wide)), eps)));
    return cast(mul(w, normed), x->dtype);
}

// Computes y, r and, where there is a delta, x_out = x_in + delta: forward on the CPU.
template <class T, class X>
static void add_rmsnorm_cpu(T* y,            // [N,C]
                            X* x_out,        // [N,C], written where there is a delta
                            Wide<T>* r_out,  // [N], for backward
                            const X* x_in,   // [N,C]
                            const T* delta,  // [N,C] or null
                            const X* w,      // [C]
                            int64_t N, int64_t C, float eps) {
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
// Computes dx, its copy dx_low, and dw, the last by columns, each in the order of the rows. add_dx
// and add_dw say whether dx and dw already hold a part of the gradient, which then stays in it.
template <class T, class X>
static void rmsnorm_backward_cpu(X* dx_all,  // [N,C]
                                 bool add_dx,
                                 T* dx_low,  // [N,C] or null: dx, rounded to T
                                 X* dw,      // [C]
                                 bool add_dw,
                                 const T* dy_all,   // [N,C]
                                 const X* x_all,    // [N,C]
                                 const Wide<T>* r,  // [N]
                                 const X* w,        // [C]
                                 int64_t N, int64_t C) {
#pragma omp parallel for if (N > 64)
    for (int64_t n = 0; n < N; n++) {
        X* dx = dx_all + n * C;
        const T* dy = dy_all + n * C;
        const X* x = x_all + n * C;

        double dot = 0;
        for (int64_t c = 0; c < C; c++) { dot += (double)w[c] * dy[c] * x[c]; }
        Wide<T> along_x = (Wide<T>)(dot * r[n] * r[n] * r[n] / C);

        for (int64_t c = 0; c < C; c++) {
            Wide<T> change = r[n] * w[c] * dy[c] - x[c] * along_x;
            dx[c] = add_dx ? dx[c] + change : change;
            if (dx_low) { dx_low[n * C + c] = (Wide<T>)dx[c]; }
        }
    }

#pragma omp parallel for if (N > 64)
    for (int64_t c = 0; c < C; c++) {
        double sum = add_dw ? (Wide<T>)dw[c] : 0;
        for (int64_t n = 0; n < N; n++) {
            sum += (double)dy_all[n * C + c] * x_all[n * C + c] * r[n];
        }
        dw[c] = (Wide<T>)sum;
    }
}

#ifdef __CUDACC__
// Forward on the GPU, as add_rmsnorm_cpu; a block has a row. A row's elements are needed twice,
// before and after the sum over the row. A row of one pack per thread stays in registers in
// between; a longer row is read again, by the thread that wrote it, from L1 or L2.
template <int W, class T, class X>
__global__ void __launch_bounds__(PACK_THREADS)
    add_rmsnorm_kernel(T* y,            // [N,C]
                       X* x_out,        // [N,C], written where there is a delta
                       float* r_out,    // [N]
                       const X* x,      // [N,C]
                       const T* delta,  // [N,C] or null
                       const X* w_in,   // [C]
                       int C, float eps) {
    const int64_t row = blockIdx.x * (int64_t)C;
    const int step = W * blockDim.x;
    Pack<X, W> v = {}, w = {};
    float sum = 0;
    for (int c = W * threadIdx.x; c < C; c += step) {
        v = load_pack<W>(x + row + c);
        w = load_pack<W>(w_in + c);
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
            v = load_pack<W>((delta ? x_out : x) + row + c);
            w = load_pack<W>(w_in + c);
        }
        Pack<T, W> out;
        for (int i = 0; i < W; i++) { out.x[i] = w.x[i] * (v.x[i] * r); }
        store_pack(y + row + c, out);
    }
    if (threadIdx.x == 0) { r_out[blockIdx.x] = r; }
}
// Writes dx, a copy of it as T if wanted, and each block's share of dw: the sum over its rows. A
// block takes every gridDim.x-th row. A thread has the same columns in all of them, so it adds
// their dw up in registers, or in `partial` where a row is several packs per thread.
template <int W, class T, class X>
__global__ void __launch_bounds__(PACK_THREADS)
    rmsnorm_backward_kernel(X* dx,              // [N,C]
                            bool add_dx,        // else dx is overwritten
                            T* dx_low,          // [N,C] or null
                            float* partial,     // [gridDim.x,C], the shares of dw
                            const T* dy,        // [N,C]
                            const X* x,         // [N,C]
                            const float* r_in,  // [N]
                            const X* w_in,      // [C]
                            int N, int C) {
    const int first = blockIdx.x, blocks = gridDim.x, step = W * blockDim.x;
    Pack<X, W> v = {}, w = {}, out = {};
    Pack<float, W> dw = {};
    Pack<T, W> d = {};
    for (int n = first; n < N; n += blocks) {
        const int64_t row = n * (int64_t)C;
        auto read = [&](int c) {
            v = load_pack<W>(x + row + c);
            w = load_pack<W>(w_in + c);
            d = load_pack<W>(dy + row + c);
            if (add_dx) { out = load_pack<W>(dx + row + c); }
        };

        float dot = 0, r = r_in[n];
        for (int c = W * threadIdx.x; c < C; c += step) {
            read(c);
            for (int i = 0; i < W; i++) { dot += w.x[i] * d.x[i] * v.x[i]; }
        }
        float along_x = block_sum(dot) * r * r * r / C;

        for (int c = W * threadIdx.x; c < C; c += step) {
            float* sums = partial + first * (int64_t)C + c;
            if (C > step) {
                read(c);
                dw = n == first ? Pack<float, W>() : load_pack<W>(sums);
            }
            Pack<T, W> low;
            for (int i = 0; i < W; i++) {
                float g = d.x[i], change = r * w.x[i] * g - v.x[i] * along_x;
                out.x[i] = add_dx ? out.x[i] + change : change;
                dw.x[i] += g * v.x[i] * r;
                low.x[i] = (Wide<T>)out.x[i];
            }
            store_pack(dx + row + c, out);
            if (dx_low) { store_pack(dx_low + row + c, low); }
            if (C > step || n + blocks >= N) { store_pack(sums, dw); }
        }
    }
}
// Computes dw from the blocks' shares, always in the same order: a block of threads has 32 columns,
// and 32 threads per column.
constexpr int DW_SHARES = 32;
template <class X>
__global__ void rmsnorm_dw_kernel(X* dw,                 // [C]
                                  bool add_dw,           // else dw is overwritten
                                  const float* partial,  // [parts,C]
                                  int parts, int C) {
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

// Runs the forward where y is. x is x_in itself where delta is null.
static void add_rmsnorm_run(const Tensor& y, const Tensor& x, const Tensor& r, const Tensor& x_in,
                            const Tensor& delta, const Tensor& w, float eps) {
    int64_t C = w.size(), N = x.size() / C;
    with_types(y, x, C, {y.data, x.data, x_in.data, delta.data, w.data}, [&](auto types) {
        using T = typename decltype(types)::T;
        using X = typename decltype(types)::X;
        if (x.device() == CPU) {
            return add_rmsnorm_cpu(y.as<T>(), x.as<X>(), r.as<Wide<T>>(), x_in.as<X>(),
                                   delta.as<T>(), w.as<X>(), N, C, eps);
        }
        LAUNCH(add_rmsnorm_kernel<types.W>, N, threads_for(C / types.W), y.as<T>(), x.as<X>(),
               r.as<float>(), x_in.as<X>(), delta.as<T>(), w.as<X>(), (int)C, eps);
    });
}
// Runs the backward where dx is. dx_low is null where nobody wants the rounded copy.
static void rmsnorm_backward(const Tensor& dx, bool add_dx, const Tensor& dx_low, const Tensor& dw,
                             bool add_dw, const Tensor& dy, const Tensor& x, const Tensor& r,
                             const Tensor& w) {
    int64_t C = w.size(), N = x.size() / C, parts = 0;
#ifdef __CUDACC__
    // Each block has four rows or more, so that the shares of dw are few beside them; and there are
    // no more blocks than run at a time.
    if (dx.device() != CPU) { parts = std::min(ceil_div(N, 4), 4 * multiprocessors()); }
#endif
    Tensor partial = empty({parts, C}, F32, WORKSPACE);

    vector<const void*> addresses = {dx.data, dx_low.data, partial.data, dy.data, x.data, w.data};
    with_types(dy, x, C, addresses, [&](auto types) {
        using T = typename decltype(types)::T;
        using X = typename decltype(types)::X;
        if (dx.device() == CPU) {
            return rmsnorm_backward_cpu(dx.as<X>(), add_dx, dx_low.as<T>(), dw.as<X>(), add_dw,
                                        dy.as<T>(), x.as<X>(), r.as<Wide<T>>(), w.as<X>(), N, C);
        }
        LAUNCH(rmsnorm_backward_kernel<types.W>, parts, threads_for(C / types.W), dx.as<X>(),
               add_dx, dx_low.as<T>(), partial.as<float>(), dy.as<T>(), x.as<X>(), r.as<float>(),
               w.as<X>(), (int)N, (int)C);
        LAUNCH(rmsnorm_dw_kernel, ceil_div(C, WARP), dim3(WARP, DW_SHARES), dw.as<X>(), add_dw,
               partial.as<float>(), (int)parts, (int)C);
    });
}

// Adds delta to *x_io, which becomes a new tensor, and returns y. The tape then has two steps (or
// without a delta only the second, and x is x_in):
//
//   x_in  --+--> x = x_in + delta --+--> y = norm(x)  --> attention, or the feed-forward
//   delta --+                       +-------------------> the next *x_io
//
// Backward runs y's step first. By then the next *x_io has left its part in dx: y's step adds its
// own, and where delta is 16-bit and x is not, it leaves the sum in dx_low, too, rounded. x's step
// then hands dx to x_in and dx_low to delta, which needs no cast of its own.
static Tensor add_rmsnorm_fused(Tensor* x_io, const Tensor& delta, const Tensor& w, float eps) {
    Range range("rmsnorm");
    Tensor x_in = *x_io;
    Tensor x = delta ? empty(x_in.shape, x_in.dtype) : x_in;
    const bool is_double = x.dtype == F64;
    // y is rounded once, here; autocast would cast it before the product.
    Tensor y = empty(x.shape, is_double ? F64 : matmul_dtype());
    Tensor r = empty({x.size() / w.size()}, is_double ? F64 : F32);
    ops().add_rmsnorm(y, x, r, x_in, delta, w, eps);

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

    bool wants_low = delta && delta.gradient && delta.dtype != x.dtype;
    record(y, {x, w}, [x, r, w, dx_low, wants_low](const Tensor& dy) {
        bool add_dx;
        Tensor dx = gradient_target(x.gradient, &add_dx);
        if (wants_low) { *dx_low = empty(x.shape, dy.dtype); }
        write_gradient(w.gradient, [&](const Tensor& dw, bool add_dw) {
            ops().rmsnorm_backward(dx, add_dx, *dx_low, dw, add_dw, contiguous(dy), x, r, w);
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
    auto* op = context.mode == EAGER ? add_rmsnorm_eager : add_rmsnorm_fused;
    return op(x, delta, weight, eps);
}

// -------------------------------------------------------------------------------------------------
// RoPE and SwiGLU sum nothing, so each is one body for CPU and GPU: f(n, part, c) computes W
// neighbours from column c on, of a part of row n.

#ifdef __CUDACC__
template <int W, class F>
__global__ void __launch_bounds__(PACK_THREADS) each_pack_kernel(F f, int C) {
    for (int c = W * threadIdx.x; c < C; c += W * blockDim.x) { f(blockIdx.x, blockIdx.y, c); }
}
#endif
// Calls f for N rows of `parts` times C elements. On the GPU a block takes a part.
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

// Returns [T,D]: for each position and pair the cos, then the sin of its angle.
Tensor rope_table(int64_t T, int64_t D, float theta, DType dtype) {
    if (context.device == META) { return empty({T, D}, dtype, INPUTS); }

    vector<float> values(T * D);
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
    Tensor cos = slice_last(rope, 0, 2), sin = slice_last(rope, 1, 2);
    Tensor x1 = slice_last(x, 0, 2), x2 = slice_last(x, 1, 2);
    Tensor y1 = sub(mul(cos, x1), mul(sin, x2));
    Tensor y2 = add(mul(sin, x1), mul(cos, x2));
    return interleave_last(y1, y2);
}

// y[0] and y[1] become the rotated pair (x1, x2).
template <class A, class T>
HD inline void rope_pair(A x1, A x2, A cos, A sin, T* y) {
    y[0] = cos * x1 - sin * x2;
    y[1] = sin * x1 + cos * x2;
}

// Forward moves from qkv to the heads and rotates; with `backward` it moves the heads' gradients to
// qkv's and rotates back. Where q, k and v are null it rotates q and k within qkv.
template <int W, class T>
struct Rope {
    T* qkv;               // [B,T,3,H,D]
    T *q, *k, *v;         // [B,H,T,D] each, or null
    const Wide<T>* rope;  // [T,D]
    int positions, H, D;  // positions: T
    bool backward;

    // in q, k or v
    HD int64_t offset_in_heads(int b, int h, int t, int d) const {
        return (((int64_t)b * H + h) * positions + t) * D + d;
    }
    // Does the pack from column c of a row's H D columns on. row: of B T; which: 0 q, 1 k, 2 v.
    HD void operator()(int row, int which, int c) const {
        T* heads = v;
        if (which == 0) { heads = q; }
        if (which == 1) { heads = k; }
        T* joined = qkv + (row * (int64_t)3 + which) * (H * D) + c;
        const int b = row / positions, t = row % positions, h = c / D, d = c % D;
        T* apart = heads ? heads + offset_in_heads(b, h, t, d) : joined;

        Pack<T, W> pack = load_pack<W>(backward ? apart : joined);
        if (which < 2) {
            Pack<Wide<T>, W> cos_sin = load_pack<W>(rope + t * D + d);
            for (int i = 0; i < W; i += 2) {
                Wide<T> x1 = pack.x[i], x2 = pack.x[i + 1];
                Wide<T> cos = cos_sin.x[i], sin = cos_sin.x[i + 1];
                if (backward) { sin = -sin; }
                rope_pair(x1, x2, cos, sin, pack.x + i);
            }
        }
        store_pack(backward ? joined : apart, pack);
    }
};
// Runs Rope on all packs. W is at least 2, since a pack holds whole pairs. In place v has nothing
// to do, and only 2 parts of a row are visited.
static void rotate(const Tensor& qkv, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& rope, bool backward) {
    const int64_t C = qkv.dim(-1) / 3, D = rope.dim(1), N = qkv.size() / (3 * C);
    with_types<2>(qkv, qkv, D, {qkv.data, q.data, k.data, v.data, rope.data}, [&](auto types) {
        using T = typename decltype(types)::T;
        Rope<types.W, T> f;
        f.qkv = qkv.as<T>();
        f.q = q.as<T>();
        f.k = k.as<T>();
        f.v = v.as<T>();
        f.rope = rope.as<Wide<T>>();
        f.positions = (int)rope.dim(0);
        f.H = (int)(C / D);
        f.D = (int)D;
        f.backward = backward;
        for_each_pack<types.W>(qkv.device(), N, q ? 3 : 2, C, f);
    });
}

// Computes q, k and v [B,H,T,D] from y [B,T,C], q and k rotated by rope_all's first T rows.
static void split_heads(const Layer& layer, const Tensor& y, const Tensor& rope_all, int H,
                        Tensor* q, Tensor* k, Tensor* v) {
    Range r("projections");
    int64_t B = y.dim(0), T = y.dim(1), C = y.dim(2), D = C / H;
    Tensor rope = view(rope_all, 0, {T, D});
    if (context.mode == EAGER) {
        auto heads = [&](const Tensor& w) {
            return transpose(reshape(linear(y, w), {B, T, H, D}), 1, 2);
        };
        *q = rope_eager(heads(layer.q), rope);
        *k = rope_eager(heads(layer.k), rope);
        *v = heads(layer.v);
        return;
    }

    Tensor qkv = linear(y, layer.qkv);
    for (Tensor* heads : {q, k, v}) { *heads = empty({B, H, T, D}, qkv.dtype); }
    ops().rotate(qkv, *q, *k, *v, rope, false);

    // Three outputs have one backward: v's step is recorded first, so it runs last, when all three
    // gradients are there.
    auto dq = std::make_shared<Tensor>(), dk = std::make_shared<Tensor>();
    record(*v, {qkv}, [dq, dk, rope, g = qkv.gradient](const Tensor& dv) {
        Tensor dqkv = empty(g->shape, g->dtype);
        ops().rotate(dqkv, *dq, *dk, contiguous(dv), rope, true);
        add_gradient(g, dqkv);
    });
    record(*k, {qkv}, [dk](const Tensor& d) { *dk = contiguous(d); });
    record(*q, {qkv}, [dq](const Tensor& d) { *dq = contiguous(d); });
}
// Rotates q and k within qkv [B,T,3C] and returns it as a new tensor of the tape, on the same
// memory.
static Tensor rope_in_place(const Tensor& qkv, const Tensor& rope) {
    ops().rotate(qkv, {}, {}, {}, rope, false);
    Tensor rotated = detached(qkv);
    record(rotated, {qkv}, [rope, g = qkv.gradient](const Tensor& d) {
        // in place again: attention's backward made d for us alone
        ops().rotate(d, {}, {}, {}, rope, true);
        add_gradient(g, d);
    });
    return rotated;
}

// Returns causal attention of y's heads, [B,T,C] as y is: projections, RoPE, attention().
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
    T* g;        // [N,F]
    const T* h;  // [N,2F]
    int F;
    HD void operator()(int n, int, int f) const {
        const int64_t row = n * (int64_t)F;
        Pack<T, W> a_pack = load_pack<W>(h + 2 * row + f);
        Pack<T, W> b = load_pack<W>(h + 2 * row + F + f);

        Pack<T, W> out;
        for (int i = 0; i < W; i++) {
            Wide<T> a = a_pack.x[i];
            out.x[i] = a * sigmoid_of(a) * b.x[i];
        }
        store_pack(g + row + f, out);
    }
};
template <int W, class T>
struct SwigluBackward {
    T* dh;           // [N,2F]
    const T* dg_in;  // [N,F]
    const T* h;      // [N,2F]
    int F;
    HD void operator()(int n, int, int f) const {
        const int64_t row = n * (int64_t)F, at = 2 * row + f;
        Pack<T, W> a_pack = load_pack<W>(h + at);
        Pack<T, W> b = load_pack<W>(h + at + F);
        Pack<T, W> d = load_pack<W>(dg_in + row + f);

        Pack<T, W> da, db;
        for (int i = 0; i < W; i++) {
            Wide<T> a = a_pack.x[i], s = sigmoid_of(a), dg = d.x[i];
            da.x[i] = dg * b.x[i] * s * (1 + a * (1 - s));
            db.x[i] = dg * a * s;
        }
        store_pack(dh + at, da);
        store_pack(dh + at + F, db);
    }
};

// Computes g [..,F] from h [..,2F].
static void swiglu_run(const Tensor& g, const Tensor& h) {
    const int64_t F = g.dim(-1);
    with_types(g, g, F, {g.data, h.data}, [&](auto types) {
        using T = typename decltype(types)::T;
        Swiglu<types.W, T> f = {g.as<T>(), h.as<T>(), (int)F};
        for_each_pack<types.W>(g.device(), g.size() / F, 1, F, f);
    });
}
// Computes dh [..,2F] from dg [..,F] and h [..,2F].
static void swiglu_backward(const Tensor& dh, const Tensor& dg, const Tensor& h) {
    const int64_t F = dg.dim(-1);
    with_types(dg, dg, F, {dh.data, dg.data, h.data}, [&](auto types) {
        using T = typename decltype(types)::T;
        SwigluBackward<types.W, T> f = {dh.as<T>(), dg.as<T>(), h.as<T>(), (int)F};
        for_each_pack<types.W>(dg.device(), dg.size() / F, 1, F, f);
    });
}
// Returns g, of `shape`, from h [..,2F].
static Tensor swiglu_forward(const Tensor& h, const Shape& shape) {
    Tensor g = empty(shape, h.dtype);
    ops().swiglu(g, h);
    return g;
}
// Returns g, on the tape. With context.recompute nobody keeps it: backward makes it again from h,
// which backward needs anyway.
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
    Tensor g = swiglu_forward(h, shape);
    record(g, {h}, [h](const Tensor& dg) {
        Tensor dh = empty(h.shape, h.dtype);
        ops().swiglu_backward(dh, contiguous(dg), h);
        add_gradient(h.gradient, dh);
    });
    recompute_by(g, [shape, h = detached(h)] {
        Range range("swiglu");
        return swiglu_forward(h, shape);
    });
    return g;
}

// -------------------------------------------------------------------------------------------------
// Cross-entropy of logits l [N,V] with targets t [N]:
//   loss = mean_n( lse_n - l[n,t_n] ),  lse_n = log sum_v exp(l[n,v])
//   dl[n,v] = (exp(l[n,v] - lse_n) - [v = t_n]) dloss / N
// All of it is in fp32, whatever the logits are.
// Fused: the logits are read once forward and once backward, and their gradient takes their place
// in memory.

static Tensor cross_entropy_eager(const Tensor& logits, const Tensor& targets) {
    Tensor l = cast(logits, logits.dtype == F64 ? F64 : F32);
    Tensor shifted = sub(l, max_last(l));
    return mean_all(sub(log(sum_last(exp(shifted))), pick_last(shifted, targets)));
}

// Computes each row's loss and lse on the CPU.
template <class T>
static void cross_entropy_cpu(Wide<T>* loss,       // [N]
                              Wide<T>* lse,        // [N], for backward
                              const T* logits,     // [N,V]
                              const int* targets,  // [N]
                              int64_t N, int64_t V) {
#pragma omp parallel for if (N > 64)
    for (int64_t n = 0; n < N; n++) {
        const T* l = logits + n * V;
        Wide<T> largest = -INFINITY;
        for (int64_t v = 0; v < V; v++) { largest = std::max<Wide<T>>(largest, l[v]); }

        double sum = 0;
        for (int64_t v = 0; v < V; v++) { sum += std::exp(l[v] - largest); }
        lse[n] = (Wide<T>)(largest + std::log(sum));
        loss[n] = lse[n] - l[targets[n]];
    }
}
// Computes dl of these rows on the CPU; dl may be l. The loss is the mean over N rows, of which
// these may be a part.
template <class T>
static void cross_entropy_backward_cpu(T* dl,               // [rows,V]
                                       const T* l,          // [rows,V]
                                       const Wide<T>* lse,  // [rows]
                                       const int* targets,  // [rows]
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
// Computes loss and lse of a row per block, maximum and sum in one pass: the sum is rescaled when
// the maximum grows. The maximum starts from a finite number: logits of -inf then add exp(-inf) =
// 0, where -inf - -inf would be NaN.
template <int W, class T>
__global__ void __launch_bounds__(PACK_THREADS) cross_entropy_kernel(float* loss,         // [N]
                                                                     float* lse,          // [N]
                                                                     const T* logits,     // [N,V]
                                                                     const int* targets,  // [N]
                                                                     int V) {
    const T* l = logits + blockIdx.x * (int64_t)V;
    float largest = -FLT_MAX, sum = 0;
    for (int v = W * threadIdx.x; v < V; v += W * blockDim.x) {
        Pack<T, W> pack = load_pack<W>(l + v);
        float larger = largest;
        for (const T& x : pack.x) { larger = fmaxf(larger, x); }
        sum *= expf(largest - larger);
        for (const T& x : pack.x) { sum += expf(x - larger); }
        largest = larger;
    }

    float row_largest = block_max(largest);
    float row_sum = block_sum(sum * expf(largest - row_largest));
    if (threadIdx.x == 0) {
        lse[blockIdx.x] = row_largest + logf(row_sum);
        loss[blockIdx.x] = lse[blockIdx.x] - l[targets[blockIdx.x]];
    }
}
// Computes dl of a row per block, as cross_entropy_backward_cpu.
template <int W, class T>
__global__ void __launch_bounds__(PACK_THREADS)
    cross_entropy_backward_kernel(T* dl,                // [rows,V]
                                  const T* l,           // [rows,V]
                                  const float* lse_in,  // [rows]
                                  const int* targets,   // [rows]
                                  const float* dloss,   // []
                                  int64_t N, int V) {
    const int64_t row = blockIdx.x * (int64_t)V;
    const float factor = *dloss / N, lse = lse_in[blockIdx.x];
    const int target = targets[blockIdx.x];
    for (int v = W * threadIdx.x; v < V; v += W * blockDim.x) {
        Pack<T, W> pack = load_pack<W>(l + row + v);
        for (int i = 0; i < W; i++) {
            float p = expf(pack.x[i] - lse);
            pack.x[i] = (p - (v + i == target)) * factor;
        }
        store_pack(dl + row + v, pack);
    }
}
#endif

// Runs the forward where the logits l [N,V] are.
static void cross_entropy_run(const Tensor& loss, const Tensor& lse, const Tensor& l,
                              const Tensor& targets) {
    int64_t N = l.dim(0), V = l.dim(1);
    with_types(l, l, V, {l.data}, [&](auto types) {
        using T = typename decltype(types)::T;
        if (l.device() == CPU) {
            return cross_entropy_cpu(loss.as<Wide<T>>(), lse.as<Wide<T>>(), l.as<T>(),
                                     targets.as<int>(), N, V);
        }
        LAUNCH(cross_entropy_kernel<types.W>, N, threads_for(V / types.W), loss.as<float>(),
               lse.as<float>(), l.as<T>(), targets.as<int>(), (int)V);
    });
}
// Runs the backward where the logits l [rows,V] are, for a loss that is the mean over N rows.
static void cross_entropy_backward(const Tensor& dl, const Tensor& l, const Tensor& lse,
                                   const Tensor& targets, const Tensor& dloss, int64_t N) {
    int64_t rows = l.dim(0), V = l.dim(1);
    with_types(l, l, V, {dl.data, l.data}, [&](auto types) {
        using T = typename decltype(types)::T;
        if (l.device() == CPU) {
            return cross_entropy_backward_cpu(dl.as<T>(), l.as<T>(), lse.as<Wide<T>>(),
                                              targets.as<int>(), *dloss.as<Wide<T>>(), rows, N, V);
        }
        LAUNCH(cross_entropy_backward_kernel<types.W>, rows, threads_for(V / types.W), dl.as<T>(),
               l.as<T>(), lse.as<float>(), targets.as<int>(), dloss.as<float>(), N, (int)V);
    });
}

// Returns the mean loss over all rows, [], on the tape.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets) {
    Range range("loss");
    int64_t V = logits.dim(-1), N = logits.size() / V;
    Tensor l = reshape(logits, {N, V});
    if (context.mode == EAGER) { return cross_entropy_eager(l, targets); }

    DType wide = l.dtype == F64 ? F64 : F32;
    Tensor rows = empty({N}, wide), lse = empty({N}, wide);
    ops().cross_entropy(rows, lse, l, targets);
    Tensor loss = detached(mean_all(detached(rows)));

    record(loss, {l}, [l, lse, targets](const Tensor& dloss) {
        // nobody else can still want to see the logits
        bool ours_alone = l.memory.use_count() == 1;
        Tensor dl = ours_alone ? detached(l) : empty(l.shape, l.dtype);
        ops().cross_entropy_backward(dl, l, lse, targets, dloss, l.dim(0));
        add_gradient(l.gradient, dl);
    });
    return loss;
}

// Returns the same loss from x [N,C] (y, as products take it) and the head w [V,C]. Where V is
// large, the logits x w^T are most of a step's memory, so they are made a chunk of rows at a time.
// Forward computes the gradients of a chunk at once,
//   dx = dl w,  dW += dl^T x      with dl for dloss = 1,
// and backward scales them. dW adds up in fp32, so a 16-bit gradient is rounded once. fp16 would
// need the loss scale before: dl is mostly about 1/(N V), less than it can hold.
Tensor chunked_loss(const Tensor& y, const Tensor& head, const Tensor& targets, int64_t chunk) {
    Range range("head and loss");
    int64_t V = head.dim(0), C = head.dim(1), N = y.size() / C;
    Tensor x = reshape(autocast_operand(y), {N, C}), w = autocast_operand(head);
    DType wide = x.dtype == F64 ? F64 : F32;
    Tensor rows = empty({N}, wide), dx, dW;
    if (context.recording) {
        dx = empty(x.shape, x.dtype);
        dW = empty(w.shape, wide, WORKSPACE);
    }

    {
        NoGrad no_grad;
        Tensor logits = empty({std::min(chunk, N), V}, x.dtype);
        Tensor one = add_scalar(zeros({}, wide), 1);
        for (int64_t first = 0; first < N; first += chunk) {
            int64_t n = std::min(chunk, N - first);
            Tensor l = view(logits, 0, {n, V});
            Tensor part = view(x, first * C, {n, C});
            Tensor t = view(targets, first, {n});
            Tensor lse = empty({n}, wide);
            gemm(l, part, false, w, true);
            ops().cross_entropy(view(rows, first, {n}), lse, l, t);

            if (!dx) { continue; }
            ops().cross_entropy_backward(l, l, lse, t, one, N);
            gemm(view(dx, first * C, {n, C}), l, false, w, false);
            gemm(dW, l, true, part, false, 1, first > 0);
        }
    }

    Tensor loss = detached(mean_all(detached(rows)));
    record(loss, {x, w}, [dx, dW, gx = x.gradient, gw = w.gradient](const Tensor& dloss) {
        scale_in_place(dx, dloss);
        scale_in_place(dW, dloss);
        add_gradient(gx, dx);
        add_gradient(gw, dW);
    });
    return loss;
}

static const LayerOps plain_ops = {
    add_rmsnorm_run,   rmsnorm_backward,       rotate, swiglu_run, swiglu_backward,
    cross_entropy_run, cross_entropy_backward,
};
// Returns the ops above, or in their place fast ones where there are some. A plan made on META has
// the ops of the device that it is for.
static const LayerOps& ops() {
    const Device device = context.device == META ? context.planned_for : context.device;
    return device == CUDA && fast_ways.layers ? *fast_ways.layers : plain_ops;
}

// -------------------------------------------------------------------------------------------------
// The optimizer: the sum of all gradients' squares, in a fixed order, for their norm; then
// AdamW (Loshchilov and Hutter, 2019; the handout's order), t = 1, 2, ...:
//   p *= 1 - lr wd;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
//   p -= lr sqrt(1 - b2^t)/(1 - b1^t) m / (sqrt(v) + eps)
// p, m and v are each read and written once, 24 bytes per parameter in fp32, and g is read (2 or
// 4). In pure bf16 that is 14 in all.

#ifdef __CUDACC__
constexpr int NORM_BLOCKS = 1024;
constexpr int FLAT_THREADS = 256;  // of a block, where a thread takes single elements

// Writes to partial[b] the sum of squares of the elements that block b takes, in fp32.
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
// Returns the sum of all gradients' squares; on META, where there are no numbers, 1. On the GPU
// each block writes a sum of its own, and the CPU adds these up.
double square_sum(const vector<FlatGradient>& gradients) {
    if (context.device == META) { return 1; }

    double sum = 0;
#ifdef __CUDACC__
    if (context.device == CUDA) {
        Tensor partial = empty({(int64_t)gradients.size(), NORM_BLOCKS}, F64, WORKSPACE);
        double* next = partial.as<double>();
        for (const FlatGradient& one : gradients) {
            with_gpu_type(one.g.dtype, [&](auto zero) {
                LAUNCH(square_sum_kernel, NORM_BLOCKS, FLAT_THREADS, next, one.g.as(zero),
                       one.g.size());
            });
            next += NORM_BLOCKS;
        }
        for (double s : to_doubles(partial)) { sum += s; }
        return sum;
    }
#endif
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
// Updates n neighbouring weights and their moments, where they are.
template <class P, class G>
static void adamw_range(P* p, const G* g, P* m, P* v, int64_t n, AdamWScalars s) {
    if (n == 0) { return; }
#ifdef __CUDACC__
    if (context.device == CUDA) {
        LAUNCH(adamw_kernel, ceil_div(n, FLAT_THREADS), FLAT_THREADS, p, g, m, v, n, s);
        return;
    }
#endif
#pragma omp parallel for simd if (n > 16384)
    for (int64_t i = 0; i < n; i++) { adamw_element(p + i, g[i], m + i, v + i, s); }
}
// Updates the weights of each gradient: of flat p, m and v the elements from its offset on.
static void adamw_plain(const Tensor& p, const vector<FlatGradient>& gradients, const Tensor& m,
                        const Tensor& v, AdamWScalars s) {
    for (const FlatGradient& one : gradients) {
        with_gpu_type(one.g.dtype, [&](auto g_zero) {
            with_gpu_type(p.dtype, [&](auto zero) {
                int64_t at = one.offset;
                adamw_range(p.as(zero) + at, one.g.as(g_zero), m.as(zero) + at, v.as(zero) + at,
                            one.g.size(), s);
            });
        });
    }
}
AdamWScalars scalars_of(const AdamW& a, int t, float gradient_scale) {
    double step_size = a.lr * sqrt(1 - pow(a.beta2, t)) / (1 - pow(a.beta1, t));
    return {1 - a.lr * a.weight_decay, a.beta1, a.beta2, a.eps, (float)step_size, gradient_scale};
}
// Takes AdamW's step t on flat p, m and v by the fastest way that is there for p.
void adamw_update(const Tensor& p, const vector<FlatGradient>& gradients, const Tensor& m,
                  const Tensor& v, const AdamW& a, int t, float gradient_scale, bool split) {
    Range range("optimizer");
    if (p.device() == META) { return; }

    AdamWUpdate* update = adamw_plain;
    if (split) {
        update = fast_ways.adamw_of_split;
    } else if (p.device() == CUDA && fast_ways.adamw) {
        update = fast_ways.adamw;
    }
    update(p, gradients, m, v, scalars_of(a, t, gradient_scale));
}
