// fast/flash_fp32.cu: FlashAttention-2 in true fp32: no tensor cores, every product is FFMAs on
// register tiles.
//
// What changed against flash_v1 (flash.cu), and why it is faster: a thread holds a piece of S
// of 4x8 scores and not one, so a number that it reads from shared memory is multiplied four or
// eight times; reads are of 16 bytes; and tiles are copied (cp.async) while others are computed on.
// What it costs: most of a multiprocessor's registers and shared memory, so that one block fills
// it; and the cards before the A100 (sm_80) cannot run it.
//
// What bounds it: an SM issues 4 warp instructions per clock. With loads and the softmax 4 of 5 are
// FFMAs, and 70 % of the issue slots are used: about 40 of the H200's 67 TFLOP/s.
//
// Filling the chip: one head of 16384 positions has only 256 tiles of 64 rows for 132 SMs. So an SM
// gets one block of two or three groups of 128 threads. Each group takes every second (third)
// streamed tile, and their sums are merged.
//
// Backward: a block owns a tile of keys and does step 12 by atomic additions: 5 products where
// flash_v1 has 7, and sums in no fixed order.
//
// The file has the tile, copies, products of register tiles, then the two passes and their
// launches. Read the two rows_times_ functions first, then flash_forward_fp32_kernel.
#include "flash.h"

// The sizes of a kernel. streamed: rows of a streamed tile. groups: of threads, that share the
// block's own tile.
template <int HEAD, int STREAMED, int GROUPS>
struct Fp32Tile {
    static constexpr int D = HEAD, streamed = STREAMED, groups = GROUPS;
    static constexpr int own = 64;  // rows of the tile that the block owns
    // of a group, in a grid of tx x ty; the tx threads of a row are in one warp
    static constexpr int threads = 128;
    static constexpr int tx = D == 128 ? 16 : 8, ty = threads / tx;
    static constexpr int rows = own / ty;          // own rows of a thread: ty + Tile::ty r
    static constexpr int columns = streamed / tx;  // streamed rows of a thread: tx + Tile::tx n
    static constexpr int out_columns = D / tx;     // of O, dQ, dK or dV, of a thread
    using Scores = float[rows][columns];
    using Sums = float[rows][out_columns];
    // Floats of a row in shared memory, padded, so that what a warp reads is in different banks.
    static constexpr int row = D + 4, p_row = streamed + threads / ty;
    static constexpr int unroll = D % 64 ? 2 : 8;  // as far as the registers reach
    static constexpr int own_floats = own * row, streamed_floats = streamed * row;
    static constexpr int p_floats = own * p_row;
    static constexpr int group_floats = 2 * streamed_floats + p_floats;
    static constexpr size_t forward_bytes = (own_floats + groups * group_floats) * sizeof(float);
    static constexpr size_t backward_bytes =
        (2 * own_floats + groups * group_floats) * sizeof(float);
    static_assert(D % 16 == 0 && streamed % 16 == 0);
    static_assert(threads * rows * out_columns <= 2 * streamed_floats || groups == 1,
                  "the merge reuses these tiles");
};

#ifdef __CUDACC__

// A barrier for one group of 128 threads; barrier 0 is __syncthreads().
DEVICE void group_barrier(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}
// Copies rows [first, first + ROWS) of a matrix of so many `rows` to shared memory, asynchronously;
// zeros beyond.
template <int ROWS, int D, int THREADS>
DEVICE void load_rows(float* to, const float* from, int64_t stride, int first, int rows,
                      int thread) {
    for (int i = thread; i < ROWS * (D / 4); i += THREADS) {
        int r = i / (D / 4), c = i % (D / 4) * 4;
        bool valid = first + r < rows;
        copy_16(to + r * (D + 4) + c, from + (valid ? first + r : 0) * stride + c, valid);
    }
}

// The first copies the block's own tile of x, from row `first` on, by all its threads; the second a
// streamed tile by a group's.
template <class Tile>
DEVICE void load_own(float* to, const Heads& x, int b, int h, int first, int rows) {
    load_rows<Tile::own, Tile::D, Tile::threads * Tile::groups>(to, head_of<float>(x, b, h), x.row,
                                                                first, rows, threadIdx.x);
}
template <class Tile>
DEVICE void load_streamed(float* to, const float* from, int64_t stride, int first, int rows,
                          int thread) {
    load_rows<Tile::streamed, Tile::D, Tile::threads>(to, from, stride, first, rows, thread);
    cp_async_commit();
}

// ---- products of register tiles ----
// Both return where thread t sits in a grid of X columns. Shared memory serves a 16-byte load of a
// warp in 4 steps, or in 2 if each lane has the same address as its neighbour (lane ^ 1), or each
// as lane ^ 2. So lane bit 0 counts columns, bit 1 rows: what a row's threads read together
// satisfies the first, what a column's threads read together the second.
template <int X>
DEVICE int grid_x(int t) {
    constexpr int Y = WARP / X;  // rows of a warp
    return t % WARP / (2 * Y) * 2 + t % 2;
}
template <int X>
DEVICE int grid_y(int t) {
    constexpr int Y = WARP / X;
    return t / WARP * Y + t % WARP / 2 % Y;
}
// Returns what `combine` makes of the X threads of a row, to each of them.
template <int X, class Combine>
DEVICE float combine_row(float x, Combine combine) {
    x = combine(x, __shfl_xor_sync(0xffffffff, x, 1));
    for (int o = 2 * WARP / X; o < WARP; o *= 2) {
        x = combine(x, __shfl_xor_sync(0xffffffff, x, o));
    }
    return x;
}
// A thread's COUNT columns of a row are vectors of neighbouring floats, X threads side by side.
HD constexpr int vector_width(int count) {
    if (count % 4 == 0) { return 4; }
    return count % 2 == 0 ? 2 : 1;
}
template <int X, int COUNT>
DEVICE int column(int x, int c) {
    constexpr int W = vector_width(COUNT);
    return (c / W * X + x) * W + c % W;
}
template <int X, int COUNT>
DEVICE void load_columns(float (&v)[COUNT], const float* row, int x) {
    constexpr int W = vector_width(COUNT);
    for (int c = 0; c < COUNT; c += W) {
        Pack<float, W> in = load_pack<W>(row + column<X, COUNT>(x, c));
        for (int e = 0; e < W; e++) { v[c + e] = in.x[e]; }
    }
}
// Stores v times factor to the row's columns; with ADD it adds that to them.
template <int X, bool ADD = false, int COUNT>
DEVICE void store_columns(float* row, const float (&v)[COUNT], int x, float factor) {
    constexpr int W = vector_width(COUNT);
    for (int c = 0; c < COUNT; c += W) {
        float* at = row + column<X, COUNT>(x, c);
        Pack<float, W> out;
        for (int e = 0; e < W; e++) { out.x[e] = v[c + e] * factor; }
        if constexpr (!ADD) {
            store_pack(at, out);
#if __CUDA_ARCH__ >= 900  // one 16-byte addition in the L2 cache instead of four
        } else if constexpr (W == 4) {
            atomicAdd((float4*)at, {out.x[0], out.x[1], out.x[2], out.x[3]});
#endif
        } else {
            for (int e = 0; e < W; e++) { atomicAdd(at + e, out.x[e]); }
        }
    }
}
// Computes s += A B^T: own rows times streamed rows, both along d, so 16-byte loads take four d at
// once from each.
template <class Tile>
DEVICE void rows_times_rows(typename Tile::Scores& s, const float* A, const float* B, int tx,
                            int ty) {
#pragma unroll Tile::unroll
    for (int d = 0; d < Tile::D; d += 4) {
        float4 a[Tile::rows];
        for (int r = 0; r < Tile::rows; r++) {
            a[r] = *(const float4*)(A + (ty + r * Tile::ty) * Tile::row + d);
        }
        for (int n = 0; n < Tile::columns; n++) {
            float4 b = *(const float4*)(B + (tx + n * Tile::tx) * Tile::row + d);
            for (int r = 0; r < Tile::rows; r++) { s[r][n] = fmaf(a[r].x, b.x, s[r][n]); }
            for (int r = 0; r < Tile::rows; r++) { s[r][n] = fmaf(a[r].y, b.y, s[r][n]); }
            for (int r = 0; r < Tile::rows; r++) { s[r][n] = fmaf(a[r].z, b.z, s[r][n]); }
            for (int r = 0; r < Tile::rows; r++) { s[r][n] = fmaf(a[r].w, b.w, s[r][n]); }
        }
    }
}
// Computes out += P B: P [own,streamed] in shared memory, B a streamed tile.
template <class Tile>
DEVICE void rows_times_columns(typename Tile::Sums& out, const float* P, const float* B, int tx,
                               int ty) {
#pragma unroll Tile::unroll
    for (int n = 0; n < Tile::streamed; n += 4) {
        float p[Tile::rows][4];
        for (int r = 0; r < Tile::rows; r++) {
            load_columns<1>(p[r], P + (ty + r * Tile::ty) * Tile::p_row + n, 0);
        }
        for (int e = 0; e < 4; e++) {
            float b[Tile::out_columns];
            load_columns<Tile::tx>(b, B + (n + e) * Tile::row, tx);
            for (int r = 0; r < Tile::rows; r++) {
                for (int c = 0; c < Tile::out_columns; c++) {
                    out[r][c] = fmaf(p[r][e], b[c], out[r][c]);
                }
            }
        }
    }
}
// Stores the thread's P to shared memory, where the threads of its rows, all in its warp, read it.
template <class Tile>
DEVICE void store_p(float* P, const typename Tile::Scores& p, int tx, int ty) {
    for (int r = 0; r < Tile::rows; r++) {
        for (int n = 0; n < Tile::columns; n++) {
            P[(ty + r * Tile::ty) * Tile::p_row + tx + n * Tile::tx] = p[r][n];
        }
    }
}
// Adds the other groups' sums to group 0's, each thread's to its counterpart's. Every thread of the
// block calls it.
template <class Tile>
DEVICE void merge_groups(typename Tile::Sums& x, float* group_0, int group, int t) {
    if constexpr (Tile::groups == 1) { return; }
    // the streamed tiles, and what an earlier merge left there, are no longer read
    __syncthreads();
    if (group > 0) {
        for (int r = 0; r < Tile::rows * Tile::out_columns; r++) {
            group_0[group * Tile::group_floats + r * Tile::threads + t] =
                x[r / Tile::out_columns][r % Tile::out_columns];
        }
    }
    __syncthreads();
    for (int g = 1; group == 0 && g < Tile::groups; g++) {
        for (int r = 0; r < Tile::rows * Tile::out_columns; r++) {
            x[r / Tile::out_columns][r % Tile::out_columns] +=
                group_0[g * Tile::group_floats + r * Tile::threads + t];
        }
    }
}

// ---- forward ----
// Does steps 2 to 4 of one tile, and step 5's shrink O. m: largest score yet, l: this thread's
// share of the sum; c = scale * log2(e).
template <class Tile>
DEVICE void softmax_step(typename Tile::Scores& s, typename Tile::Sums& O, float (&m)[Tile::rows],
                         float (&l)[Tile::rows], float c) {
    for (int r = 0; r < Tile::rows; r++) {
        float larger = m[r];
        for (int n = 0; n < Tile::columns; n++) { larger = fmaxf(larger, s[r][n]); }
        larger = combine_row<Tile::tx>(larger, [](float x, float y) { return fmaxf(x, y); });
        // no key seen yet: -inf - -inf would be NaN
        float base = larger == -INFINITY ? 0 : larger * c;
        float shrink = exp2_approx(m[r] * c - base);

        m[r] = larger;
        l[r] *= shrink;
        for (int n = 0; n < Tile::columns; n++) {
            s[r][n] = exp2_approx(fmaf(s[r][n], c, -base));
            l[r] += s[r][n];
        }
        for (int k = 0; k < Tile::out_columns; k++) { O[r][k] *= shrink; }
    }
}

// Computes O and L of one tile of queries per block.
template <class Tile>
__global__ __launch_bounds__(Tile::threads* Tile::groups,
                             1) void flash_forward_fp32_kernel(AttentionArgs a) {
#ifdef HAS_CP_ASYNC
    extern __shared__ float4 fp32_memory[];
    int group = threadIdx.x / Tile::threads, t = threadIdx.x % Tile::threads,
        tx = grid_x<Tile::tx>(t), ty = grid_y<Tile::tx>(t);
    float* Q = (float*)fp32_memory;
    float* group_0 = Q + Tile::own_floats;
    float* K = group_0 + group * Tile::group_floats;
    float *V = K + Tile::streamed_floats, *P = V + Tile::streamed_floats;

    int head = head_of_block(), b = head / a.H, h = head % a.H;
    // the last queries see the most keys: they start first
    int q0 = (int)(gridDim.y - 1 - blockIdx.y) * Tile::own;
    int keys = a.causal ? min(a.Tk, q0 + Tile::own) : a.Tk;
    int end = (keys + Tile::streamed - 1) / Tile::streamed;
    // tiles before this one are seen by every query
    int whole = min(a.Tk, a.causal ? q0 + 1 : a.Tk) / Tile::streamed;
    const float *k = head_of<float>(a.k, b, h), *v = head_of<float>(a.v, b, h);

    load_own<Tile>(Q, a.q, b, h, q0, a.Tq);
    load_streamed<Tile>(K, k, a.k.row, group * Tile::streamed, a.Tk, t);
    cp_async_wait<0>();
    __syncthreads();  // Q, loaded by all groups

    typename Tile::Sums O = {};
    float m[Tile::rows], l[Tile::rows] = {}, c = a.scale * LOG2_E;
    for (int r = 0; r < Tile::rows; r++) { m[r] = -INFINITY; }
    for (int j = group; j < end; j += Tile::groups) {
        cp_async_wait<0>();
        group_barrier(group);  // everybody's part of K has arrived, and V has been read
        load_streamed<Tile>(V, v, a.v.row, j * Tile::streamed, a.Tk, t);
        typename Tile::Scores s = {};
        rows_times_rows<Tile>(s, Q, K, tx, ty);  // step 1
        cp_async_wait<0>();
        group_barrier(group);  // V has arrived, and K has been read
        if (j + Tile::groups < end) {
            load_streamed<Tile>(K, k, a.k.row, (j + Tile::groups) * Tile::streamed, a.Tk, t);
        }

        if (j >= whole) {
            for (int r = 0; r < Tile::rows; r++) {
                for (int n = 0; n < Tile::columns; n++) {
                    int query = q0 + ty + r * Tile::ty;
                    int key = j * Tile::streamed + tx + n * Tile::tx;
                    if (key >= a.Tk || (a.causal && key > query)) { s[r][n] = -INFINITY; }
                }
            }
        }

        softmax_step<Tile>(s, O, m, l, c);
        __syncwarp();  // P of the tile before has been read
        store_p<Tile>(P, s, tx, ty);
        __syncwarp();
        rows_times_columns<Tile>(O, P, V, tx, ty);  // step 5
    }

    for (int r = 0; r < Tile::rows; r++) {
        l[r] = combine_row<Tile::tx>(l[r], [](float x, float y) { return x + y; });
    }
    // bring the groups to the largest m of each row; then l and O can be added
    if constexpr (Tile::groups > 1) {
        float* ms = P;
        __syncthreads();  // P is no longer read
        for (int r = 0; r < Tile::rows; r++) {
            if (tx == 0) {
                ms[(ty + r * Tile::ty) * 2] = m[r];
                ms[(ty + r * Tile::ty) * 2 + 1] = l[r];
            }
        }
        __syncthreads();
        for (int r = 0; r < Tile::rows; r++) {
            float larger = m[r], sum = 0, mine = m[r];
            const float* row = group_0 + 2 * Tile::streamed_floats + (ty + r * Tile::ty) * 2;
            for (int g = 0; g < Tile::groups; g++) {
                larger = fmaxf(larger, row[g * Tile::group_floats]);
            }
            for (int g = 0; g < Tile::groups; g++) {
                sum += row[g * Tile::group_floats + 1] *
                       exp2_approx((row[g * Tile::group_floats] - larger) * c);
            }
            m[r] = larger;
            l[r] = sum;
            for (int n = 0; n < Tile::out_columns; n++) {
                O[r][n] *= exp2_approx((mine - larger) * c);
            }
        }
        merge_groups<Tile>(O, group_0, group, t);
    }
    if (group > 0) { return; }

#pragma unroll
    for (int r = 0; r < Tile::rows; r++) {  // step 6
        int query = q0 + ty + r * Tile::ty;
        if (query >= a.Tq) { continue; }
        store_columns<Tile::tx>(head_of<float>(a.o, b, h) + query * a.o.row, O[r], tx, 1 / l[r]);
        if (tx == 0) { a.L[(int64_t)head * a.Tq + query] = m[r] * a.scale + logf(l[r]); }
    }
#endif
}

// ---- backward ----
// Does step 7, D_i in delta [B,H,Tq], one warp per row; and sets dQ = 0, to which the main kernel's
// atomics add.
__global__ void flash_delta_fp32_kernel(AttentionArgs a, int D, float* delta) {
    int64_t r = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (r >= (int64_t)a.B * a.H * a.Tq) { return; }

    int64_t query = r % a.Tq;
    int b = (int)(r / a.Tq) / a.H, h = (int)(r / a.Tq) % a.H;
    const float *o = head_of<float>(a.o, b, h) + query * a.o.row,
                *dO = head_of<float>(a.dO, b, h) + query * a.dO.row;
    float sum = 0;
    for (int d = lane; d < D; d += WARP) {
        sum += o[d] * dO[d];
        head_of<float>(a.dq, b, h)[query * a.dq.row + d] = 0;
    }
    sum = warp_sum(sum);
    if (lane == 0) { delta[r] = sum; }
}

// Does step 12 from dS^T [own keys, streamed queries], by a group's threads. One has 4 neighbouring
// queries.
template <class Tile>
DEVICE void add_dq(const AttentionArgs& a, int b, int h, int q0, const float* dS, const float* K,
                   int t) {
    constexpr int X = Tile::threads / (Tile::streamed / 4), OUT = Tile::D / X;
    static_assert(Tile::D % X == 0 && X <= WARP);
    int x = grid_x<X>(t), y = grid_y<X>(t);
    float dQ[4][OUT] = {};
#pragma unroll 8
    for (int key = 0; key < Tile::own; key++) {
        float ds[4], k[OUT];
        load_columns<1>(ds, dS + key * Tile::p_row + 4 * y, 0);
        load_columns<X>(k, K + key * Tile::row, x);
        for (int r = 0; r < 4; r++) {
            for (int c = 0; c < OUT; c++) { dQ[r][c] = fmaf(ds[r], k[c], dQ[r][c]); }
        }
    }

    for (int r = 0; r < 4; r++) {
        int query = q0 + 4 * y + r;
        if (query < a.Tq) {
            store_columns<X, true>(head_of<float>(a.dq, b, h) + query * a.dq.row, dQ[r], x,
                                   a.scale);
        }
    }
}

// Computes dK and dV of one tile of keys per block, and adds its part of dQ. It streams Q and dO.
// All matrices are transposed: rows are keys, columns queries.
template <class Tile>
__global__ __launch_bounds__(Tile::threads* Tile::groups,
                             1) void flash_backward_kv_fp32_kernel(AttentionArgs a,
                                                                   const float* delta) {
#ifdef HAS_CP_ASYNC
    extern __shared__ float4 fp32_memory[];
    int group = threadIdx.x / Tile::threads, t = threadIdx.x % Tile::threads,
        tx = grid_x<Tile::tx>(t), ty = grid_y<Tile::tx>(t);
    float *K = (float*)fp32_memory, *V = K + Tile::own_floats, *group_0 = V + Tile::own_floats;
    float* Q = group_0 + group * Tile::group_floats;
    float *dO = Q + Tile::streamed_floats, *P = dO + Tile::streamed_floats;

    int head = head_of_block(), b = head / a.H, h = head % a.H;
    // the first keys are seen by the most queries: they start first
    int k0 = (int)blockIdx.y * Tile::own;
    int first = a.causal ? k0 / Tile::streamed : 0,
        end = (a.Tq + Tile::streamed - 1) / Tile::streamed;
    const float *q = head_of<float>(a.q, b, h), *from_dO = head_of<float>(a.dO, b, h);
    const float *L = a.L + (int64_t)head * a.Tq, *D_i = delta + (int64_t)head * a.Tq;

    load_own<Tile>(K, a.k, b, h, k0, a.Tk);
    load_own<Tile>(V, a.v, b, h, k0, a.Tk);
    cp_async_commit();
    load_streamed<Tile>(dO, from_dO, a.dO.row, (first + group) * Tile::streamed, a.Tq, t);
    load_streamed<Tile>(Q, q, a.q.row, (first + group) * Tile::streamed, a.Tq, t);
    cp_async_wait<2>();
    __syncthreads();  // K and V, loaded by all groups

    typename Tile::Sums dK = {}, dV = {};
    float c = a.scale * LOG2_E;
    for (int i = first + group; i < end; i += Tile::groups) {
        int q0 = i * Tile::streamed, next = (i + Tile::groups) * Tile::streamed;
        float l[Tile::columns], d[Tile::columns];
        typename Tile::Scores s = {}, ds = {};
        for (int n = 0; n < Tile::columns; n++) {  // beyond Tq: L = inf makes P = 0
            int query = q0 + tx + n * Tile::tx;
            l[n] = query < a.Tq ? L[query] * LOG2_E : INFINITY;
            d[n] = query < a.Tq ? D_i[query] : 0;
        }

        cp_async_wait<1>();
        group_barrier(group);                      // dO has arrived; Q may be on its way
        rows_times_rows<Tile>(ds, V, dO, tx, ty);  // step 10
        cp_async_wait<0>();
        group_barrier(group);                    // Q has arrived
        rows_times_rows<Tile>(s, K, Q, tx, ty);  // step 8's S
        bool masked = (a.causal && q0 < k0 + Tile::own - 1) || k0 + Tile::own > a.Tk;
#pragma unroll
        for (int r = 0; r < Tile::rows; r++) {
            for (int n = 0; n < Tile::columns; n++) {
                s[r][n] = exp2_approx(fmaf(s[r][n], c, -l[n]));  // step 8's P
                int query = q0 + tx + n * Tile::tx, key = k0 + ty + r * Tile::ty;
                if (masked && (key >= a.Tk || (a.causal && key > query))) { s[r][n] = 0; }
                ds[r][n] = s[r][n] * (ds[r][n] - d[n]);  // step 11
            }
        }

        store_p<Tile>(P, s, tx, ty);
        __syncwarp();
        rows_times_columns<Tile>(dV, P, dO, tx, ty);  // step 9
        group_barrier(group);                         // dO has been read, and P
        if (i + Tile::groups < end) { load_streamed<Tile>(dO, from_dO, a.dO.row, next, a.Tq, t); }

        store_p<Tile>(P, ds, tx, ty);
        __syncwarp();
        rows_times_columns<Tile>(dK, P, Q, tx, ty);  // step 13
        group_barrier(group);                        // all of dS is there
        add_dq<Tile>(a, b, h, q0, P, K, t);
        group_barrier(group);  // Q has been read, and dS
        if (i + Tile::groups < end) { load_streamed<Tile>(Q, q, a.q.row, next, a.Tq, t); }
    }

    cp_async_wait<0>();  // a group without a tile still has its first loads under way
    merge_groups<Tile>(dK, group_0, group, t);
    merge_groups<Tile>(dV, group_0, group, t);
    if (group > 0) { return; }

#pragma unroll
    for (int r = 0; r < Tile::rows; r++) {
        int key = k0 + ty + r * Tile::ty;
        if (key >= a.Tk) { continue; }
        store_columns<Tile::tx>(head_of<float>(a.dk, b, h) + key * a.dk.row, dK[r], tx, a.scale);
        store_columns<Tile::tx>(head_of<float>(a.dv, b, h) + key * a.dv.row, dV[r], tx, 1);
    }
#endif
}

// ---- launchers ----
template <class Tile>
static void forward_fp32(const AttentionArgs& a) {
    launch(flash_forward_fp32_kernel<Tile>, attention_grid(a, ceil_div(a.Tq, Tile::own)),
           Tile::threads * Tile::groups, Tile::forward_bytes, a);
}
template <class Tile>
static void backward_fp32(const AttentionArgs& a, const float* delta) {
    launch(flash_backward_kv_fp32_kernel<Tile>, attention_grid(a, ceil_div(a.Tk, Tile::own)),
           Tile::threads * Tile::groups, Tile::backward_bytes, a, delta);
}

// Both run by large tiles where a block can have the shared memory, else by small ones (at most
// 99 KB).
static void forward(const AttentionTensors& t) {
    AttentionArgs a = args_of(t);
    auto run = [&](auto large, auto small) {
        if (shared_memory_per_block() >= Fp32Tile<128, 64, 2>::forward_bytes) {
            forward_fp32<decltype(large)>(a);
        } else {
            forward_fp32<decltype(small)>(a);
        }
    };
    switch (t.q.dim(3)) {
        case 16: return run(Fp32Tile<16, 64, 2>(), Fp32Tile<16, 64, 1>());
        case 32: return run(Fp32Tile<32, 64, 2>(), Fp32Tile<32, 64, 1>());
        case 64: return run(Fp32Tile<64, 64, 3>(), Fp32Tile<64, 64, 1>());
        case 80: return run(Fp32Tile<80, 64, 2>(), Fp32Tile<80, 64, 1>());
        case 128: return run(Fp32Tile<128, 64, 2>(), Fp32Tile<128, 32, 1>());
        default: fail("%s: no kernel for this head size", __func__);
    }
}
static void backward(const AttentionTensors& t) {
    AttentionArgs a = args_of(t);
    const int D = (int)t.q.dim(3);
    Tensor workspace = empty({a.B, a.H, a.Tq}, F32, WORKSPACE);
    float* delta = workspace.as<float>();
    int64_t rows = (int64_t)a.B * a.H * a.Tq;
    LAUNCH(flash_delta_fp32_kernel, ceil_div(rows * WARP, 256), 256, a, D, delta);

    auto run = [&](auto large, auto small) {
        static_assert(decltype(small)::backward_bytes <= 99 * 1024,
                      "8.6, 8.9 and 12.0 have no more");
        if (shared_memory_per_block() >= decltype(large)::backward_bytes) {
            backward_fp32<decltype(large)>(a, delta);
        } else {
            backward_fp32<decltype(small)>(a, delta);
        }
    };
    switch (D) {
        case 16: return run(Fp32Tile<16, 64, 2>(), Fp32Tile<16, 64, 1>());
        case 32: return run(Fp32Tile<32, 64, 2>(), Fp32Tile<32, 64, 1>());
        case 64: return run(Fp32Tile<64, 64, 2>(), Fp32Tile<64, 64, 1>());
        case 80: return run(Fp32Tile<80, 64, 2>(), Fp32Tile<80, 32, 1>());
        case 128: return run(Fp32Tile<128, 32, 2>(), Fp32Tile<128, 16, 1>());
        default: fail("%s: no kernel for this head size", __func__);
    }
}
static bool takes(DType t, int64_t D) {
    static const bool runs_here = compiled_for(flash_delta_fp32_kernel) >= 80;
    return t == F32 && flash_head_size(D) && runs_here;
}
static const AddRow<AttentionImpl> row({"flash_fp32", CUDA, 50, takes, nullptr, forward, backward});
#endif
