// fast/layers.cu: the fused ops of layers.cu on the GPU, but not the loss. Here a thread takes
// a pack, W neighbours, at a time, by accesses of up to 16 bytes, and RMSNorm reads x once, if a
// row has no more packs than its block has threads. Formulas, shapes and what each op means stand
// in layers.cu; read its plain kernels first, then with_types() here.
#include "fast_ways.h"
#include "lib/gpu.h"

#ifdef HAVE_CUDA
// -------------------------------------------------------------------------------------------------
// From a tensor's dtype to a kernel's types and width

// Runs f(zero, x_zero, width): zero has the C++ type of t's dtype, x_zero that of x's, and width
// says how many elements a pack has. That is 16 bytes' worth of t if that divides n (each row's
// length is a multiple of n) and all addresses are multiples of 16; else it is `least`. On META it
// does nothing.
//
// One call written out: y and x [N,C] are F32, C is a multiple of 4, and both addresses are
// multiples of 16. Then
//
//     with_types(y, x, C, {y.data, x.data}, [&](auto zero, auto x_zero, auto width) {
//         LAUNCH(kernel<width>, N, threads_for(C / width), y.as(zero), x.as(x_zero), (int)C);
//     });
//
// launches
//
//     kernel<4><<<N, threads_for(C / 4), 0, stream()>>>((float*)y.data, (float*)x.data, (int)C);
//
// width is a std::integral_constant<int, 4>, whose type holds the 4: so it can be a template
// argument. The compiler makes the lambda, and with it the kernel, for four pairs of types and two
// widths each; one of the eight runs.
template <int least = 1, class Fn>
static void with_types(const Tensor& t, const Tensor& x, int64_t n,
                       const vector<const void*>& addresses, Fn f) {
    if (t.device() != CUDA) { return; }

    with_gpu_type(t.dtype, [&](auto zero) {
        using T = decltype(zero);
        auto with_width = [&](auto width) {
            if constexpr (is_same_v<T, bf16>) {
                if (x.dtype == BF16) { return f(zero, zero, width); }
            }
            f(zero, +zero, width);
        };

        constexpr int W = 16 / sizeof(T);
        bool fits = n % W == 0;
        for (const void* address : addresses) { fits = fits && (uintptr_t)address % 16 == 0; }
        if (fits) {
            with_width(std::integral_constant<int, W>());
        } else {
            with_width(std::integral_constant<int, least>());
        }
    });
}
// The most threads of a block that shares a row: one of d_model 2560 in fp32 is a pack per thread.
constexpr int PACK_THREADS = 640;
// Returns the threads of a block that shares a row of so many packs: whole warps, each thread with
// the same number of packs, as far as that goes.
static int threads_for(int64_t packs) {
    return WARP * ceil_div(packs, WARP * ceil_div(packs, PACK_THREADS));
}

// -------------------------------------------------------------------------------------------------
// RMSNorm

// Computes y, r and, where there is a delta, x_out = x + delta; a block has a row. A row's elements
// are needed twice, before and after the sum over the row. A row of one pack per thread stays in
// registers in between; a longer row is read again, by the same thread, from L1 or L2.
template <int W, class T, class X>
__global__ void __launch_bounds__(PACK_THREADS)
    add_rmsnorm_kernel(T* y,            // [N,C]
                       X* x_out,        // [N,C], written where there is a delta
                       float* r_out,    // [N]
                       const X* x,      // [N,C]
                       const T* delta,  // [N,C] or null
                       const X* w_in,   // [C]
                       int C, float eps) {
    const int64_t begin = blockIdx.x * (int64_t)C;
    const int step = W * blockDim.x;
    Pack<X, W> v = {}, w = {};
    float sum = 0;
    for (int c = W * threadIdx.x; c < C; c += step) {
        v = load_pack<W>(x + begin + c);
        w = load_pack<W>(w_in + c);
        if (delta) {
            auto d = load_pack<W>(delta + begin + c);
            for (int i = 0; i < W; i++) { v.x[i] = v.x[i] + d.x[i]; }
            store_pack(x_out + begin + c, v);
        }
        for (const X& value : v.x) { sum += value * value; }
    }
    float r = 1 / sqrtf(block_sum(sum) / C + eps);

    for (int c = W * threadIdx.x; c < C; c += step) {
        if (C > step) {
            v = load_pack<W>((delta ? x_out : x) + begin + c);
            w = load_pack<W>(w_in + c);
        }
        Pack<T, W> out;
        for (int i = 0; i < W; i++) { out.x[i] = w.x[i] * (v.x[i] * r); }
        store_pack(y + begin + c, out);
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
        const int64_t begin = n * (int64_t)C;
        auto read = [&](int c) {
            v = load_pack<W>(x + begin + c);
            w = load_pack<W>(w_in + c);
            d = load_pack<W>(dy + begin + c);
            if (add_dx) { out = load_pack<W>(dx + begin + c); }
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
            store_pack(dx + begin + c, out);
            if (dx_low) { store_pack(dx_low + begin + c, low); }
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

// Launches the forward, as add_rmsnorm_run in layers.cu.
static void add_rmsnorm_packed(const Tensor& y, const Tensor& x, const Tensor& r,
                               const Tensor& x_in, const Tensor& delta, const Tensor& w,
                               float eps) {
    const int64_t C = w.size(), N = x.size() / C;
    vector<const void*> addresses = {y.data, x.data, x_in.data, delta.data, w.data};
    with_types(y, x, C, addresses, [&](auto zero, auto x_zero, auto width) {
        LAUNCH(add_rmsnorm_kernel<width>, N, threads_for(C / width), y.as(zero), x.as(x_zero),
               r.as<float>(), x_in.as(x_zero), delta.as(zero), w.as(x_zero), (int)C, eps);
    });
}
// Launches the backward, as rmsnorm_backward in layers.cu, with room for the shares of dw.
static void rmsnorm_backward_packed(const Tensor& dx, bool add_dx, const Tensor& dx_low,
                                    const Tensor& dw, bool add_dw, const Tensor& dy,
                                    const Tensor& x, const Tensor& r, const Tensor& w) {
    const int64_t C = w.size(), N = x.size() / C;
    // A block has some four rows or more, so that the shares of dw are few beside them; and there
    // are at most four blocks for each multiprocessor. These need not all run at once: a row of
    // 2560 in fp32 takes 640 threads, and an H100's multiprocessor has room for 2048.
    const int64_t parts = min(ceil_div(N, 4), 4 * multiprocessors());
    Tensor partial = empty({parts, C}, F32, WORKSPACE);

    vector<const void*> addresses = {dx.data, dx_low.data, partial.data, dy.data, x.data, w.data};
    with_types(dy, x, C, addresses, [&](auto zero, auto x_zero, auto width) {
        LAUNCH(rmsnorm_backward_kernel<width>, parts, threads_for(C / width), dx.as(x_zero), add_dx,
               dx_low.as(zero), partial.as<float>(), dy.as(zero), x.as(x_zero), r.as<float>(),
               w.as(x_zero), (int)N, (int)C);
        LAUNCH(rmsnorm_dw_kernel, ceil_div(C, WARP), dim3(WARP, DW_SHARES), dw.as(x_zero), add_dw,
               partial.as<float>(), (int)parts, (int)C);
    });
}

// -------------------------------------------------------------------------------------------------
// RoPE

// Moves the packs of a row of q, k or v per block, and rotates q's and k's. W is at least 2, since
// a pack holds whole pairs.
template <int W, class T>
__global__ void __launch_bounds__(PACK_THREADS)
    rope_kernel(T* qkv,             // [B,T,3,H,D]
                T* q,               // [B,H,T,D], or null, as are k and v then: in place
                T* k,               // [B,H,T,D]
                T* v,               // [B,H,T,D]
                const float* rope,  // [T,D]
                int positions, int H, int D, bool backward) {
    const int row = blockIdx.x, which = blockIdx.y;  // row: of B T; which: 0 q, 1 k, 2 v
    const int64_t b = row / positions, t = row % positions;
    T* heads = v;
    if (which == 0) { heads = q; }
    if (which == 1) { heads = k; }

    for (int c = W * threadIdx.x; c < H * D; c += W * blockDim.x) {
        const int h = c / D, d = c % D;
        T* joined = qkv + (row * (int64_t)3 + which) * (H * D) + c;
        T* apart = heads ? heads + ((b * H + h) * positions + t) * D + d : joined;

        auto pack = load_pack<W>(backward ? apart : joined);
        if (which < 2) {
            auto cos_sin = load_pack<W>(rope + t * D + d);
            for (int i = 0; i < W; i += 2) {
                float x1 = pack.x[i], x2 = pack.x[i + 1];
                float cos = cos_sin.x[i], sin = cos_sin.x[i + 1];
                if (backward) { sin = -sin; }
                pack.x[i] = cos * x1 - sin * x2;
                pack.x[i + 1] = sin * x1 + cos * x2;
            }
        }
        store_pack(backward ? joined : apart, pack);
    }
}

// Launches forward or backward, as rotate in layers.cu.
static void rotate_packed(const Tensor& qkv, const Tensor& q, const Tensor& k, const Tensor& v,
                          const Tensor& rope, bool backward) {
    const int64_t C = qkv.dim(-1) / 3, D = rope.dim(1), N = qkv.size() / (3 * C);
    vector<const void*> addresses = {qkv.data, q.data, k.data, v.data, rope.data};
    with_types<2>(qkv, qkv, D, addresses, [&](auto zero, auto, auto width) {
        dim3 grid(N, q ? 3 : 2);  // in place v stays as it is
        LAUNCH(rope_kernel<width>, grid, threads_for(C / width), qkv.as(zero), q.as(zero),
               k.as(zero), v.as(zero), rope.as<float>(), (int)rope.dim(0), (int)(C / D), (int)D,
               backward);
    });
}

// -------------------------------------------------------------------------------------------------
// SwiGLU

// Computes a row of g per block.
template <int W, class T>
__global__ void __launch_bounds__(PACK_THREADS) swiglu_kernel(T* g,        // [N,F]
                                                              const T* h,  // [N,2F]
                                                              int F) {
    const int64_t begin = blockIdx.x * (int64_t)F;
    for (int f = W * threadIdx.x; f < F; f += W * blockDim.x) {
        auto a_pack = load_pack<W>(h + 2 * begin + f);
        auto b = load_pack<W>(h + 2 * begin + F + f);

        Pack<T, W> out;
        for (int i = 0; i < W; i++) {
            float a = a_pack.x[i];
            out.x[i] = a * sigmoid_of(a) * b.x[i];
        }
        store_pack(g + begin + f, out);
    }
}
// Computes a row of dh per block.
template <int W, class T>
__global__ void __launch_bounds__(PACK_THREADS) swiglu_backward_kernel(T* dh,           // [N,2F]
                                                                       const T* dg_in,  // [N,F]
                                                                       const T* h,      // [N,2F]
                                                                       int F) {
    const int64_t begin = blockIdx.x * (int64_t)F;
    for (int f = W * threadIdx.x; f < F; f += W * blockDim.x) {
        int64_t at = 2 * begin + f;
        auto a_pack = load_pack<W>(h + at);
        auto b = load_pack<W>(h + at + F);
        auto d = load_pack<W>(dg_in + begin + f);

        Pack<T, W> da, db;
        for (int i = 0; i < W; i++) {
            float a = a_pack.x[i], s = sigmoid_of(a), dg = d.x[i];
            da.x[i] = dg * b.x[i] * s * (1 + a * (1 - s));
            db.x[i] = dg * a * s;
        }
        store_pack(dh + at, da);
        store_pack(dh + at + F, db);
    }
}

static void swiglu_packed(const Tensor& g, const Tensor& h) {
    const int64_t F = g.dim(-1), N = g.size() / F;
    with_types(g, g, F, {g.data, h.data}, [&](auto zero, auto, auto width) {
        LAUNCH(swiglu_kernel<width>, N, threads_for(F / width), g.as(zero), h.as(zero), (int)F);
    });
}
static void swiglu_backward_packed(const Tensor& dh, const Tensor& dg, const Tensor& h) {
    const int64_t F = dg.dim(-1), N = dg.size() / F;
    with_types(dg, dg, F, {dh.data, dg.data, h.data}, [&](auto zero, auto, auto width) {
        LAUNCH(swiglu_backward_kernel<width>, N, threads_for(F / width), dh.as(zero), dg.as(zero),
               h.as(zero), (int)F);
    });
}

static const LayerOps packed_ops = {
    add_rmsnorm_packed, rmsnorm_backward_packed, rotate_packed,
    swiglu_packed,      swiglu_backward_packed,
};
static const EnterWays entered([] { fast_ways.layers = &packed_ops; });
#endif
