// layers.cu: the ops of the handout's Transformer LM in the order of its forward pass (RMSNorm with
// the residual add, RoPE, SwiGLU, cross-entropy), then those of its optimizer.
//
// Each op comes as: formula; the eager form, a chain of lib/tensor.cu's one-kernel operations that
// autograd differentiates; the fused form with its backward by hand, as a plain loop for the CPU
// and as a kernel for the GPU, or, where nothing is summed, as one body for both. Read the formula
// and the CPU's loop first: the kernel is the same loop, shared by a block of threads per row, or
// per column where a column is summed. New to CUDA? Read notes/gpu-basics.md and attention.cu's
// weighted_sum_kernel before the kernels. fast/layers.cu has faster kernels for RMSNorm, RoPE and
// SwiGLU; a usual build takes those on a GPU (see ops()).
//
// What the ops use of lib/ (lib/tensor.cu walks one op through forward and backward):
//   record(y, {x}, f)         gives y a gradient and puts f on the tape; in backward f(dy) adds to
//                             x's gradient
//   add_gradient(g, dx)       adds dx to the gradient g
//   gradient_target(g, &add)  returns g's tensor, for a kernel that writes a gradient itself; where
//                             add becomes true, the kernel adds to what the tensor holds
//   write_gradient(g, f)      calls f with such a tensor and `add`, always in g's own dtype
//   detached(x)               returns x's data without its gradient
//   recompute_by(y, f)        with context.recompute: linear(y, w) calls f in backward to make y
//                             again, instead of keeping it
//   Range                     names the work of its scope in traces and in the memory log
//   META                      a device without data: a run on it only counts memory
//   HD                        marks a function for both CPU and GPU
//   LAUNCH(kernel, ...)       launches a kernel and checks that it started
//   block_sum(x)              in a kernel: the sum over the block, for each of its threads; all of
//                             them must call it. block_max(x) likewise
//
// T is the compute type (under autocast bf16 or fp16), X the type of the residual stream x and of
// the norms' weights: bf16 in pure_bf16, else Wide<T>. Arithmetic is in Wide<T>: fp32, or double
// where tests compute in float64. Sums are fp32 on the GPU and double on the CPU. linear() and the
// casts of its operands are in lib/matmul.cu.
#include "fast_ways.h"
#include "lib/gpu.h"

// -------------------------------------------------------------------------------------------------
// From a tensor's dtype to a kernel's types
//
// A tensor knows its type at run time, a kernel has to know it at compile time. Each fused op
// therefore calls with_types() with a function that is compiled for each pair that occurs, and
// with_types() runs the one that fits its tensors. RUN (lib/gpu.h), or for_each (below) where one
// body serves both, then chooses between CPU and GPU. Of zero and x_zero only the types matter:
// y.as(zero) is (T*)y.data. In fp32 the whole call, with N rows of C elements,
//   with_types(y, x, [&](auto zero, auto x_zero) {
//       RUN(op, x.device(), N, y.as(zero), x.as(x_zero), N, C);
//   });
// is on the CPU
//   op_cpu((float*)y.data, (float*)x.data, N, C);
// and on the GPU, with a block for each of N rows,
//   op_kernel<<<N, ROW_THREADS, 0, stream()>>>((float*)y.data, (float*)x.data, N, C);

// The threads of a block: ROW_THREADS where a block works on one row or one column, else THREADS.
// RUN launches the ROW_THREADS of its file: attention.cu has other ones.
constexpr int THREADS = 256, ROW_THREADS = 512;

// Runs f(zero, x_zero). zero has the type T of t's dtype, x_zero the type X of x's dtype. On META
// it does nothing. Five pairs of types occur:
//   T  float  bf16   bf16  fp16   double
//   X  float  float  bf16  float  double
// So X is bf16 where t and x both are. Else X is Wide<T>, the type of +zero (see with_gpu_type in
// lib/lib.h). An op without x passes t twice and uses T alone.
template <class Fn>
static void with_types(const Tensor& t, const Tensor& x, Fn f) {
    if (t.device() == META) { return; }

    with_type(t.dtype, [&](auto zero) {
        if constexpr (is_same_v<decltype(zero), bf16>) {
            if (x.dtype == BF16) { return f(zero, zero); }
        }
        f(zero, +zero);
    });
}

// The ops that fast/ may replace; the table stands before cross-entropy.
static const LayerOps& ops();

// -------------------------------------------------------------------------------------------------
// RMSNorm, with the residual add before it.
//   x += delta;  r = 1/sqrt(mean_c(x_c^2) + eps);  y_c = w_c x_c r
//   dx_c = r w_c dy_c - x_c r^3/C sum_j(w_j dy_j x_j);  dw_c = sum over rows of dy_c x_c r
// x, delta, y, dx [N,C]; r [N]; w [C]. Mode eager needs 7 kernels forward and 12 backward for
// it (with casts: under autocast 7 and 13, in pure bf16 9 and 14); fused it is 1 and 2.

// Adds delta to *x, if there is one, and returns y. Autograd knows the backward of each step.
static Tensor add_rmsnorm_eager(Tensor* x, const Tensor& delta, const Tensor& w, float eps) {
    if (delta) {
        Range range("residual");
        *x = add(*x, delta);
    }

    Range range("rmsnorm");
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
        Wide<T> r = (Wide<T>)(1 / sqrt(sum / C + eps));

        for (int64_t c = 0; c < C; c++) { y[n * C + c] = w[c] * (x[c] * r); }
        r_out[n] = r;
    }
}
// Computes dx and its copy dx_low on the CPU. add_dx says whether dx already holds a part of the
// gradient; then the result is added to it.
template <class T, class X>
static void rmsnorm_dx_cpu(X* dx_all,  // [N,C]
                           bool add_dx,
                           T* dx_low,         // [N,C] or null: dx, rounded to T
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
}
// Computes dw on the CPU, each column in the order of the rows. add_dw as add_dx.
template <class T, class X>
static void rmsnorm_dw_cpu(X* dw,  // [C]
                           bool add_dw,
                           const T* dy,       // [N,C]
                           const X* x,        // [N,C]
                           const Wide<T>* r,  // [N]
                           int64_t N, int64_t C) {
#pragma omp parallel for if (N > 64)
    for (int64_t c = 0; c < C; c++) {
        double sum = add_dw ? (Wide<T>)dw[c] : 0;
        for (int64_t n = 0; n < N; n++) { sum += (double)dy[n * C + c] * x[n * C + c] * r[n]; }
        dw[c] = (Wide<T>)sum;
    }
}

#ifdef HAVE_CUDA
// Computes a row per block, as add_rmsnorm_cpu. A thread has every blockDim.x-th element of it. The
// number without a name is N: RUN launches that many blocks, and gives both functions the same.
template <class T, class X>
__global__ void add_rmsnorm_kernel(T* y,            // [N,C]
                                   X* x_out,        // [N,C], written where there is a delta
                                   Wide<T>* r_out,  // [N]
                                   const X* x_in,   // [N,C]
                                   const T* delta,  // [N,C] or null
                                   const X* w,      // [C]
                                   int64_t, int64_t C, float eps) {
    const int64_t begin = blockIdx.x * C;
    const X* x = x_in + begin;
    if (delta) {
        for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
            x_out[begin + c] = x[c] + delta[begin + c];  // the residual's +=
        }
        x = x_out + begin;  // a thread reads what it wrote itself
    }

    float sum = 0;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x) { sum += x[c] * x[c]; }
    float r = 1 / sqrtf(block_sum(sum) / C + eps);

    for (int64_t c = threadIdx.x; c < C; c += blockDim.x) { y[begin + c] = w[c] * (x[c] * r); }
    if (threadIdx.x == 0) { r_out[blockIdx.x] = r; }
}
// Computes a row of dx and dx_low per block, as rmsnorm_dx_cpu.
template <class T, class X>
__global__ void rmsnorm_dx_kernel(X* dx_all,  // [N,C]
                                  bool add_dx,
                                  T* dx_low,            // [N,C] or null
                                  const T* dy_all,      // [N,C]
                                  const X* x_all,       // [N,C]
                                  const Wide<T>* r_in,  // [N]
                                  const X* w,           // [C]
                                  int64_t, int64_t C) {
    const int64_t begin = blockIdx.x * C;
    X* dx = dx_all + begin;
    const T* dy = dy_all + begin;
    const X* x = x_all + begin;
    const float r = r_in[blockIdx.x];

    float dot = 0;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x) { dot += w[c] * dy[c] * x[c]; }
    float along_x = block_sum(dot) * r * r * r / C;

    for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
        float change = r * w[c] * dy[c] - x[c] * along_x;
        dx[c] = add_dx ? dx[c] + change : change;
        if (dx_low) { dx_low[begin + c] = (float)dx[c]; }
    }
}
// Computes dw of a column per block, in the same order in every run.
template <class T, class X>
__global__ void rmsnorm_dw_kernel(X* dw,  // [C]
                                  bool add_dw,
                                  const T* dy,       // [N,C]
                                  const X* x,        // [N,C]
                                  const Wide<T>* r,  // [N]
                                  int64_t N, int64_t C) {
    const int64_t c = blockIdx.x;
    float sum = 0;
    for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
        sum += dy[n * C + c] * x[n * C + c] * r[n];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { dw[c] = add_dw ? dw[c] + sum : sum; }
}
#endif

// Runs the forward on y's device. If delta is null, x is x_in itself.
static void add_rmsnorm_run(const Tensor& y, const Tensor& x, const Tensor& r, const Tensor& x_in,
                            const Tensor& delta, const Tensor& w, float eps) {
    const int64_t C = w.size();
    const int64_t N = x.size() / C;
    with_types(y, x, [&](auto zero, auto x_zero) {
        RUN(add_rmsnorm, x.device(), N, y.as(zero), x.as(x_zero), r.as(+zero), x_in.as(x_zero),
            delta.as(zero), w.as(x_zero), N, C, eps);
    });
}
// Runs the backward on dx's device. dx_low is null if nobody wants the rounded copy.
static void rmsnorm_backward(const Tensor& dx, bool add_dx, const Tensor& dx_low, const Tensor& dw,
                             bool add_dw, const Tensor& dy, const Tensor& x, const Tensor& r,
                             const Tensor& w) {
    const int64_t C = w.size();
    const int64_t N = x.size() / C;
    with_types(dy, x, [&](auto zero, auto x_zero) {
        RUN(rmsnorm_dx, x.device(), N, dx.as(x_zero), add_dx, dx_low.as(zero), dy.as(zero),
            x.as(x_zero), r.as(+zero), w.as(x_zero), N, C);
        RUN(rmsnorm_dw, x.device(), C, dw.as(x_zero), add_dw, dy.as(zero), x.as(x_zero),
            r.as(+zero), N, C);
    });
}

// Replaces *x_io, x_in below, by x = x_in + delta, and returns y. The tape then has two steps (or
// without a delta only the second, and x is x_in):
//
//   x_in  --+--> x = x_in + delta --+--> y = norm(x)  --> attention, or the feed-forward
//   delta --+                       +-------------------> the next *x_io
//
// Backward runs from the end: all later readers of x, like the next add, have added to x's gradient
// when it comes to y's step. gradient_target returns that gradient, add_dx is true, and the kernel
// adds y's part. (ln_final's x has no later reader: there add_dx is false.) Then x's step passes
// the whole dx to x_in and to delta.
//
// Where delta has 16 bits and x has not, delta's gradient has to be a 16-bit copy of dx. The kernel
// of y's step writes this copy, too, so no kernel of its own has to cast. Both steps share the
// pointer dx_low: y's step puts the copy there, and x's step takes it away.
//
// With context.recompute linear() does not keep y: its backward makes y again from x, which y's
// step keeps anyway. The call below has no delta, so it does not change `same`, which stays x.
static Tensor add_rmsnorm_fused(Tensor* x_io, const Tensor& delta, const Tensor& w, float eps) {
    Range range("rmsnorm");
    Tensor x_in = *x_io;
    Tensor x = delta ? empty(x_in.shape, x_in.dtype) : x_in;
    const bool is_double = x.dtype == F64;
    // y is rounded once, here; autocast would cast it before the product.
    Tensor y = empty(x.shape, is_double ? F64 : matmul_dtype());
    Tensor r = empty({x.size() / w.size()}, is_double ? F64 : F32);
    ops().add_rmsnorm(y, x, r, x_in, delta, w, eps);

    auto dx_low = make_shared<Tensor>();
    if (delta) {
        // Backward's second step of the two: x's gradient is complete.
        record(x, {x_in, delta},
               [dx_low, gx = x_in.gradient, gd = delta.gradient](const Tensor& dx) {
                   add_gradient(gx, dx);
                   add_gradient(gd, *dx_low ? *dx_low : dx);
                   *dx_low = Tensor();
               });
        *x_io = x;
    }

    bool wants_low = delta && delta.gradient && delta.dtype != x.dtype;
    // Backward's first step of the two: it fills dx_low.
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
// RoPE and SwiGLU sum nothing, so each is one body for CPU and GPU.

#ifdef HAVE_CUDA
template <class F>
__global__ void each_kernel(F f, int columns) {
    int c = blockIdx.y * blockDim.x + threadIdx.x;
    if (c < columns) { f(blockIdx.x, c); }
}
#endif
// Calls f(n, c) for each of N rows and each column; on the GPU a thread does it for one.
template <class F>
static void for_each(Device device, int64_t N, int64_t columns, const F& f) {
    if (device == CUDA) {
        LAUNCH(each_kernel, dim3(N, ceil_div(columns, THREADS)), THREADS, f, (int)columns);
        return;
    }
#pragma omp parallel for if (N * columns > 16384)
    for (int64_t n = 0; n < N; n++) {
        for (int c = 0; c < columns; c++) { f(n, c); }
    }
}

// -------------------------------------------------------------------------------------------------
// RoPE: each pair (x_2i, x_2i+1) of a query or key at position t is rotated by the angle
//   t theta^(-2i/D):
//   y_2i = cos x_2i - sin x_2i+1,  y_2i+1 = sin x_2i + cos x_2i+1
// Backward rotates by the opposite angle.
// Fused: one product of the norm's output [B,T,C] gives q, k and v side by side, [B,T,3,H,D]. One
// kernel rotates q and k and lays all three out as [B,H,T,D] for attention: each element is read
// and written once, where eager needs some 16 kernels. For mode flash the same kernel rotates q and
// k in place, side by side: FlashAttention's kernels address the heads by strides.

// Returns [T,D]: for each position and pair the cos, then the sin of its angle.
Tensor rope_table(int64_t T, int64_t D, float theta, DType dtype) {
    if (context.device == META) { return empty({T, D}, dtype, INPUTS); }

    vector<float> values;
    for (int64_t t = 0; t < T; t++) {
        for (int64_t i = 0; i < D / 2; i++) {
            double angle = t * pow((double)theta, -2.0 * i / D);
            values.push_back((float)cos(angle));
            values.push_back((float)sin(angle));
        }
    }
    return from_floats(values, {T, D}, dtype);
}

// Rotates x [B,H,T,D] by rope [T,D], whose even columns are cosines and odd ones sines.
static Tensor rope_eager(const Tensor& x, const Tensor& rope) {
    Range r("rope");
    Tensor cos = slice_last(rope, 0, 2);
    Tensor sin = slice_last(rope, 1, 2);
    Tensor x1 = slice_last(x, 0, 2);
    Tensor x2 = slice_last(x, 1, 2);
    Tensor y1 = sub(mul(cos, x1), mul(sin, x2));
    Tensor y2 = add(mul(sin, x1), mul(cos, x2));
    return interleave_last(y1, y2);
}

// Forward moves from qkv to the heads and rotates; with `backward` it moves the heads' gradients to
// qkv's and rotates back. Where q, k and v are null it rotates q and k within qkv.
template <class T>
struct Rope {
    T* qkv;  // [B,T,3,H,D]
    T* q;    // [B,H,T,D], as k and v; or all three are null
    T* k;
    T* v;
    const Wide<T>* rope;  // [T,D]
    int positions;        // T
    int H;
    int D;
    bool backward;

    // Moves pair i of a row. A row is q, k or v of one position: C elements, which are C/2 pairs.
    // The rows [B,T,3] are counted by one number, row = (b positions + t) 3 + which; and pair i is
    // the elements d and d + 1 of head h. `joined` is where the pair lies in qkv, `apart` where it
    // lies in q, k or v. Where these are null both are the same place, and v stays as it is.
    HD void operator()(int64_t row, int i) const {
        const int64_t which = row % 3;
        const int64_t t = row / 3 % positions;
        const int64_t b = row / 3 / positions;
        const int h = 2 * i / D;
        const int d = 2 * i % D;

        T* heads = v;
        if (which == 0) { heads = q; }
        if (which == 1) { heads = k; }
        T* joined = qkv + (row * H + h) * D + d;
        T* apart = heads ? heads + ((b * H + h) * positions + t) * D + d : joined;
        const T* from = backward ? apart : joined;
        T* to = backward ? joined : apart;

        if (which == 2) {
            to[0] = from[0];
            to[1] = from[1];
            return;
        }

        Wide<T> x1 = from[0];
        Wide<T> x2 = from[1];
        Wide<T> cos = rope[t * D + d];
        Wide<T> sin = rope[t * D + d + 1];
        if (backward) { sin = -sin; }
        to[0] = cos * x1 - sin * x2;
        to[1] = sin * x1 + cos * x2;
    }
};
// Runs Rope on all pairs.
static void rotate(const Tensor& qkv, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& rope, bool backward) {
    const int64_t C = qkv.dim(-1) / 3;
    const int64_t D = rope.dim(1);
    with_types(qkv, qkv, [&](auto zero, auto) {
        const Rope<decltype(zero)> f = {qkv.as(zero), q.as(zero),     k.as(zero),
                                        v.as(zero),   rope.as(+zero), (int)rope.dim(0),
                                        (int)(C / D), (int)D,         backward};
        for_each(qkv.device(), qkv.size() / C, C / 2, f);
    });
}

// Computes q, k and v [B,H,T,D] from y [B,T,C], q and k rotated by rope_all's first T rows.
static void split_heads(const Layer& layer, const Tensor& y, const Tensor& rope_all, int H,
                        Tensor* q, Tensor* k, Tensor* v) {
    Range r("projections");
    const int64_t B = y.dim(0), T = y.dim(1), C = y.dim(2);
    const int64_t D = C / H;
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
    auto dq = make_shared<Tensor>(), dk = make_shared<Tensor>();
    record(*v, {qkv}, [dq, dk, rope, g = qkv.gradient](const Tensor& dv) {
        Tensor dqkv = empty(g->shape, g->dtype);
        ops().rotate(dqkv, *dq, *dk, contiguous(dv), rope, true);
        add_gradient(g, dqkv);
    });
    record(*k, {qkv}, [dk](const Tensor& d) { *dk = contiguous(d); });
    record(*q, {qkv}, [dq](const Tensor& d) { *dq = contiguous(d); });
}
// Rotates q and k within qkv [B,T,3C] and returns it as a new tensor of the tape, on the same
// memory. It may write there, because linear()'s backward does not read its result.
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

// Returns causal attention of y's heads, [B,T,C] as y is: projections, RoPE, attention.
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
// Fused: one product gives h = [a | b], [N,2F]; then 2 reads and 1 write. Another gate changes the
// formula in Swiglu, SwigluBackward, the eager form and fast/layers.cu's two kernels.

// Computes g's element n, f.
template <class T>
struct Swiglu {
    T* g;        // [N,F]
    const T* h;  // [N,2F]
    int64_t F;
    HD void operator()(int64_t n, int f) const {
        const T* row = h + 2 * n * F;
        Wide<T> a = row[f];
        g[n * F + f] = a * sigmoid_of(a) * row[F + f];
    }
};
// Computes da and db of element n, f.
template <class T>
struct SwigluBackward {
    T* dh;           // [N,2F]
    const T* dg_in;  // [N,F]
    const T* h;      // [N,2F]
    int64_t F;
    HD void operator()(int64_t n, int f) const {
        const T* row = h + 2 * n * F;
        Wide<T> a = row[f];
        Wide<T> b = row[F + f];
        Wide<T> dg = dg_in[n * F + f];
        Wide<T> s = sigmoid_of(a);
        dh[2 * n * F + f] = dg * b * s * (1 + a * (1 - s));
        dh[2 * n * F + F + f] = dg * a * s;
    }
};

// Computes g [..,F] from h [..,2F].
static void swiglu_run(const Tensor& g, const Tensor& h) {
    const int64_t F = g.dim(-1);
    with_types(g, g, [&](auto zero, auto) {
        Swiglu<decltype(zero)> f = {g.as(zero), h.as(zero), F};
        for_each(g.device(), g.size() / F, F, f);
    });
}
// Computes dh [..,2F] from dg [..,F] and h [..,2F].
static void swiglu_backward(const Tensor& dh, const Tensor& dg, const Tensor& h) {
    const int64_t F = dg.dim(-1);
    with_types(dg, dg, [&](auto zero, auto) {
        SwigluBackward<decltype(zero)> f = {dh.as(zero), dg.as(zero), h.as(zero), F};
        for_each(dg.device(), dg.size() / F, F, f);
    });
}
// Returns g [..,F] from h [..,2F].
static Tensor swiglu_forward(const Tensor& h) {
    Shape shape = h.shape;
    shape.back() /= 2;
    Tensor g = empty(shape, h.dtype);
    ops().swiglu(g, h);
    return g;
}
// Returns g, on the tape. With context.recompute nobody keeps it: backward makes it again from h,
// which backward needs anyway.
Tensor swiglu(const Layer& layer, const Tensor& y) {
    if (context.mode == EAGER) {
        Tensor a = linear(y, layer.w1);
        Tensor b = linear(y, layer.w3);
        Range r("swiglu");
        return mul(mul(a, sigmoid(a)), b);
    }

    // fast_ways.linear gives what linear() gives: see fast_ways.h.
    Tensor h = fast_ways.linear ? fast_ways.linear(y, layer.w13) : linear(y, layer.w13);
    Range r("swiglu");
    Tensor g = swiglu_forward(h);
    record(g, {h}, [h](const Tensor& dg) {
        Tensor dh = empty(h.shape, h.dtype);
        ops().swiglu_backward(dh, contiguous(dg), h);
        add_gradient(h.gradient, dh);
    });
    recompute_by(g, [h = detached(h)] {
        Range range("swiglu");
        return swiglu_forward(h);
    });
    return g;
}

// -------------------------------------------------------------------------------------------------
// The ops above in one table; fast/ fills its own. A new op needs no row here: its function calls
// the _run itself, as cross_entropy calls cross_entropy_run.

static const LayerOps plain_ops = {
    add_rmsnorm_run, rmsnorm_backward, rotate, swiglu_run, swiglu_backward,
};
// Returns the ops above, or in their place fast ones where there are some. On META, where nothing
// runs, those of the device that is planned for: they allocate the same.
static const LayerOps& ops() {
    const Device device = context.device == META ? context.planned_for : context.device;
    return device == CUDA && fast_ways.layers ? *fast_ways.layers : plain_ops;
}

// -------------------------------------------------------------------------------------------------
// Cross-entropy of logits l [N,V] with targets t [N]:
//   loss = mean_n( lse_n - l[n,t_n] ),  lse_n = log sum_v exp(l[n,v])
//   dl[n,v] = (exp(l[n,v] - lse_n) - [v = t_n]) dloss / N
// On the GPU all is computed in fp32, whatever the logits are. Fused: one kernel for the rows, one
// for their mean and one backward. The logits' gradient takes their place in memory, if nobody else
// holds them.

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
        for (int64_t v = 0; v < V; v++) { largest = max<Wide<T>>(largest, l[v]); }

        double sum = 0;
        for (int64_t v = 0; v < V; v++) { sum += exp(l[v] - largest); }
        lse[n] = (Wide<T>)(largest + log(sum));
        loss[n] = lse[n] - l[targets[n]];
    }
}
// Computes dl of `rows` rows on the CPU; dl may be l. The loss is the mean over N rows: more than
// `rows` where chunked_loss calls it chunk by chunk.
template <class T>
static void cross_entropy_backward_cpu(T* dl,                    // [rows,V]
                                       const T* l,               // [rows,V]
                                       const Wide<T>* lse,       // [rows]
                                       const int* targets,       // [rows]
                                       const Wide<T>* dloss_in,  // []
                                       int64_t rows, int64_t N, int64_t V) {
    const Wide<T> dloss = *dloss_in;
#pragma omp parallel for if (rows > 64)
    for (int64_t n = 0; n < rows; n++) {
        for (int64_t v = 0; v < V; v++) {
            Wide<T> p = exp(l[n * V + v] - lse[n]);
            dl[n * V + v] = (p - (v == targets[n])) * dloss / N;
        }
    }
}

#ifdef HAVE_CUDA
// Computes loss and lse of a row per block, as cross_entropy_cpu.
template <class T>
__global__ void cross_entropy_kernel(Wide<T>* loss,       // [N]
                                     Wide<T>* lse,        // [N]
                                     const T* logits,     // [N,V]
                                     const int* targets,  // [N]
                                     int64_t, int64_t V) {
    const int64_t n = blockIdx.x;
    const T* l = logits + n * V;
    float largest = -INFINITY;
    for (int64_t v = threadIdx.x; v < V; v += blockDim.x) { largest = fmaxf(largest, l[v]); }
    largest = block_max(largest);

    float sum = 0;
    for (int64_t v = threadIdx.x; v < V; v += blockDim.x) { sum += expf(l[v] - largest); }
    sum = block_sum(sum);

    if (threadIdx.x == 0) {
        lse[n] = largest + logf(sum);
        loss[n] = lse[n] - l[targets[n]];
    }
}
// Computes dl of a row per block, as cross_entropy_backward_cpu.
template <class T>
__global__ void cross_entropy_backward_kernel(T* dl,                 // [rows,V]
                                              const T* l,            // [rows,V]
                                              const Wide<T>* lse,    // [rows]
                                              const int* targets,    // [rows]
                                              const Wide<T>* dloss,  // []
                                              int64_t, int64_t N, int64_t V) {
    const int64_t n = blockIdx.x;
    const float factor = *dloss / N;
    for (int64_t v = threadIdx.x; v < V; v += blockDim.x) {
        float p = expf(l[n * V + v] - lse[n]);
        dl[n * V + v] = (p - (v == targets[n])) * factor;
    }
}
#endif

// Runs the forward on the device of the logits l [N,V].
static void cross_entropy_run(const Tensor& loss, const Tensor& lse, const Tensor& l,
                              const Tensor& targets) {
    const int64_t N = l.dim(0);
    with_types(l, l, [&](auto zero, auto) {
        RUN(cross_entropy, l.device(), N, loss.as(+zero), lse.as(+zero), l.as(zero),
            targets.as<int>(), N, l.dim(1));
    });
}
// Runs the backward on the device of the logits l [rows,V]. The loss is the mean over N rows.
static void cross_entropy_backward(const Tensor& dl, const Tensor& l, const Tensor& lse,
                                   const Tensor& targets, const Tensor& dloss, int64_t N) {
    const int64_t rows = l.dim(0);
    with_types(l, l, [&](auto zero, auto) {
        RUN(cross_entropy_backward, l.device(), rows, dl.as(zero), l.as(zero), lse.as(+zero),
            targets.as<int>(), dloss.as(+zero), rows, N, l.dim(1));
    });
}

// Returns the mean loss over all rows, [], on the tape.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets) {
    Range range("loss");
    int64_t V = logits.dim(-1), N = logits.size() / V;
    Tensor l = reshape(logits, {N, V});
    if (context.mode == EAGER) { return cross_entropy_eager(l, targets); }

    DType wide = l.dtype == F64 ? F64 : F32;
    Tensor row_losses = empty({N}, wide);
    Tensor lse = empty({N}, wide);
    cross_entropy_run(row_losses, lse, l, targets);
    Tensor loss = mean_all(row_losses);

    record(loss, {l}, [l, lse, targets](const Tensor& dloss) {
        // If we hold the only reference to the logits, dl overwrites them. forward_to_loss gives
        // them away; `cs336 model` still writes them to a file.
        bool ours_alone = l.memory.use_count() == 1;
        Tensor dl = ours_alone ? detached(l) : empty(l.shape, l.dtype);
        cross_entropy_backward(dl, l, lse, targets, dloss, l.dim(0));
        add_gradient(l.gradient, dl);
    });
    return loss;
}

// Returns the same loss from x [N,C] (y in the dtype that products take) and the head w [V,C].
// Where V is large, so are the logits x w^T (10 GB on a rank of the 8.1B step). So they are made a
// chunk of rows at a time. Forward computes the gradients of a chunk at once,
//   dx = dl w,  dW += dl^T x      with dl for dloss = 1,
// and backward scales them. dW adds up in fp32, so a 16-bit gradient is rounded once. It is not for
// fp16: dl, mostly about 1/(N V), would vanish before the loss scale multiplies it. leaderboard
// refuses fp16.
Tensor chunked_loss(const Tensor& y, const Tensor& head, const Tensor& targets, int64_t chunk) {
    Range range("head and loss");
    const int64_t V = head.dim(0), C = head.dim(1);
    const int64_t N = y.size() / C;
    Tensor x = reshape(autocast_operand(y), {N, C});
    Tensor w = autocast_operand(head);
    DType wide = x.dtype == F64 ? F64 : F32;
    Tensor row_losses = empty({N}, wide), dx, dW;
    if (context.recording) {
        dx = empty(x.shape, x.dtype);
        dW = empty(w.shape, wide, WORKSPACE);
    }

    {
        NoGrad no_grad;
        Tensor logits = empty({min(chunk, N), V}, x.dtype);
        Tensor one = add_scalar(zeros({}, wide), 1);
        for (int64_t first = 0; first < N; first += chunk) {
            int64_t n = min(chunk, N - first);
            Tensor l = view(logits, 0, {n, V});
            Tensor part = view(x, first * C, {n, C});
            Tensor t = view(targets, first, {n});
            Tensor lse = empty({n}, wide);
            gemm(l, part, false, w, true);
            cross_entropy_run(view(row_losses, first, {n}), lse, l, t);

            if (!dx) { continue; }
            cross_entropy_backward(l, l, lse, t, one, N);  // l becomes dl
            gemm(view(dx, first * C, {n, C}), l, false, w, false);
            // The last argument is beta: 0 for the first rows, which overwrite dW.
            gemm(dW, l, true, part, false, 1, first > 0);
        }
    }

    Tensor loss = mean_all(row_losses);
    record(loss, {x, w}, [dx, dW, gx = x.gradient, gw = w.gradient](const Tensor& dloss) {
        scale_in_place(dx, dloss);
        scale_in_place(dW, dloss);
        add_gradient(gx, dx);
        add_gradient(gw, dW);
    });
    return loss;
}

// -------------------------------------------------------------------------------------------------
// The optimizer: the sum of all gradients' squares, in a fixed order, for their norm; then AdamW
// (Loshchilov and Hutter, 2019), t = 1, 2, ... The weights decay first, as in PyTorch and in
// 2026's course; in 2025's they decay after the step. eps is added before v's bias correction, as
// in the course's first assignment; PyTorch adds it after, to sqrt(v / (1 - b2^t)). The code of
// these lines is adamw_element in fast_ways.h:
//   p *= 1 - lr wd;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
//   p -= lr sqrt(1 - b2^t)/(1 - b1^t) m / (sqrt(v) + eps)
// Mode eager writes it op by op: 13 kernels for every parameter tensor, one more where it clips or
// unscales, and one more in pure bf16, a cast. Fused it is one, and fast/ steps up to 64 tensors in
// one: p, m and v are each read and written once, 24 bytes per parameter in fp32, and g is read (2
// or 4). In pure bf16 that is 14 bytes in all.

#ifdef HAVE_CUDA
constexpr int NORM_BLOCKS = 1024;

// Writes to partial[b] the sum of squares of the elements that block b takes, in fp32.
template <class T>
__global__ void square_sum_kernel(double* partial,  // [gridDim.x]
                                  const T* g,       // [n]
                                  int64_t n) {
    float sum = 0;
    for (int64_t i = thread_number(); i < n; i += (int64_t)gridDim.x * blockDim.x) {
        float x = g[i];
        sum += x * x;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { partial[blockIdx.x] = sum; }
}
#endif
// Returns the sum of all gradients' squares; on META, where there are no numbers, 1. On the GPU
// each block writes a sum of its own, and the CPU adds these up.
double square_sum(const FlatGradients& gradients) {
    if (context.device == META) { return 1; }

    double sum = 0;
#ifdef HAVE_CUDA
    if (context.device == CUDA) {
        Tensor partial = empty({(int64_t)gradients.size(), NORM_BLOCKS}, F64, WORKSPACE);
        double* next = partial.as<double>();
        for (const FlatGradient& one : gradients) {
            with_gpu_type(one.g.dtype, [&](auto zero) {
                LAUNCH(square_sum_kernel, NORM_BLOCKS, THREADS, next, one.g.as(zero), one.g.size());
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

// Mode eager's AdamW, op by op: steps, for each gradient, the elements of p, m and v from the
// gradient's offset on.
void adamw_eager(const Tensor& p_all, const FlatGradients& gradients, const Tensor& m_all,
                 const Tensor& v_all, AdamWScalars s) {
    Range range("optimizer");
    for (const FlatGradient& one : gradients) {
        Tensor g = one.g;
        Tensor p = view(p_all, one.offset, g.shape);
        Tensor m = view(m_all, one.offset, g.shape);
        Tensor v = view(v_all, one.offset, g.shape);
        if (s.gradient_scale != 1) { g = scale(g, s.gradient_scale); }

        scale_in_place(p, s.decay);
        scale_in_place(m, s.beta1);
        copy_or_add(m, scale(g, 1 - s.beta1), true);
        scale_in_place(v, s.beta2);
        copy_or_add(v, scale(square(g), 1 - s.beta2), true);
        copy_or_add(p, scale(div(m, add_scalar(sqrt(v), s.eps)), -s.step_size), true);
    }
}

#ifdef HAVE_CUDA
// Steps element i, a thread each.
template <class P, class G>
__global__ void adamw_kernel(P* p,        // [n]
                             const G* g,  // [n]
                             P* m,        // [n]
                             P* v,        // [n]
                             int64_t n, AdamWScalars s) {
    int64_t i = thread_number();
    if (i < n) { adamw_element(p + i, g[i], m + i, v + i, s); }
}
#endif
// Steps n neighbouring weights and their moments, in place, on context.device.
template <class P, class G>
static void adamw_range(P* p,        // [n]
                        const G* g,  // [n]
                        P* m,        // [n]
                        P* v,        // [n]
                        int64_t n, AdamWScalars s) {
    if (n == 0) { return; }
    if (context.device == CUDA) {
        LAUNCH(adamw_kernel, ceil_div(n, THREADS), THREADS, p, g, m, v, n, s);
        return;
    }
#pragma omp parallel for simd if (n > 16384)
    for (int64_t i = 0; i < n; i++) { adamw_element(p + i, g[i], m + i, v + i, s); }
}
// Steps the same elements as adamw_eager, by one loop, or one kernel, per gradient.
void adamw_plain(const Tensor& p, const FlatGradients& gradients, const Tensor& m, const Tensor& v,
                 AdamWScalars s) {
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
// Returns the numbers of step t = 1, 2, ...
AdamWScalars scalars_of(const AdamW& a, int t, float gradient_scale) {
    double step_size = a.lr * sqrt(1 - pow(a.beta2, t)) / (1 - pow(a.beta1, t));
    return {1 - a.lr * a.weight_decay, a.beta1, a.beta2, a.eps, (float)step_size, gradient_scale};
}
// Steps the same elements as adamw_plain, by fast/'s way if there is one.
void adamw_update(const Tensor& p, const FlatGradients& gradients, const Tensor& m, const Tensor& v,
                  AdamWScalars s) {
    Range range("optimizer");
    if (p.device() == META) { return; }

    AdamWUpdate* update = fast_ways.adamw ? fast_ways.adamw : adamw_plain;
    update(p, gradients, m, v, s);
}
