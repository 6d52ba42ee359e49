// fast_flash_fp32.cu: FlashAttention-2 in true fp32 on the GPU.
#include "fast_flash.h"
#include <algorithm>

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
    const float *k = head_of<float>(a.k, b, h), *v = head_of<float>(a.v, b, h);

    load_rows<T::OWN, T::D, T::THREADS * T::GROUPS>(Q, head_of<float>(a.q, b, h), a.q.row, q0, a.Tq, threadIdx.x);
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
        store_columns<T::TX>(head_of<float>(a.o, b, h) + query * a.o.row, O[i], tx, 1 / l[i]);
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
    const float *o = head_of<float>(a.o, b, h) + i * a.o.row, *dO = head_of<float>(a.dO, b, h) + i * a.dO.row;
    float sum = 0;
    for (int d = lane; d < D; d += WARP) {
        sum += o[d] * dO[d];
        if (zero_dq) { head_of<float>(a.dq, b, h)[i * a.dq.row + d] = 0; }
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
        if (query < a.Tq) { add_columns<X>(head_of<float>(a.dq, b, h) + query * a.dq.row, dQ[i], x, a.scale); }
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
    const float *q = head_of<float>(a.q, b, h), *dO_ = head_of<float>(a.dO, b, h);
    const float *L = a.L + (int64_t)head * a.Tq, *D = delta + (int64_t)head * a.Tq;

    load_rows<T::OWN, T::D, T::THREADS * T::GROUPS>(K, head_of<float>(a.k, b, h), a.k.row, k0, a.Tk, threadIdx.x);
    load_rows<T::OWN, T::D, T::THREADS * T::GROUPS>(V, head_of<float>(a.v, b, h), a.v.row, k0, a.Tk, threadIdx.x);
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
        store_columns<T::TX>(head_of<float>(a.dk, b, h) + key * a.dk.row, dK[i], tx, a.scale);
        store_columns<T::TX>(head_of<float>(a.dv, b, h) + key * a.dv.row, dV[i], tx, 1);
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
    const float *q = head_of<float>(a.q, b, h), *dO_ = head_of<float>(a.dO, b, h);
    const float *L = a.L + (int64_t)head * a.Tq, *D = delta + (int64_t)head * a.Tq;
    // What a group multiplies: its product of rows, then its product of columns.
    const float *own = group == 0 ? K : V, *streamed = group == 0 ? Q : dO;
    float* mine = group == 0 ? P : dS;

    load_rows<T::OWN, T::D, T::THREADS>(group == 0 ? K : V,
                                        group == 0 ? head_of<float>(a.k, b, h) : head_of<float>(a.v, b, h),
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
            store_columns<T::TX>(head_of<float>(out, b, h) + key * out.row, sum[i], tx, group == 0 ? 1 : a.scale);
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
    const float *k = head_of<float>(a.k, b, h), *v = head_of<float>(a.v, b, h);

    load_rows<T::OWN, T::D, T::THREADS * T::GROUPS>(Q, head_of<float>(a.q, b, h), a.q.row, q0, a.Tq, threadIdx.x);
    load_rows<T::OWN, T::D, T::THREADS * T::GROUPS>(dO, head_of<float>(a.dO, b, h), a.dO.row, q0, a.Tq, threadIdx.x);
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
        if (query < a.Tq) { store_columns<T::TX>(head_of<float>(a.dq, b, h) + query * a.dq.row, dQ[i], tx, a.scale); }
    }
}

// ---- launchers ----
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

static void forward(const AttentionTensors& t) { flash_forward_fp32(args_of(t), (int)t.q.dim(3)); }
static void backward(const AttentionTensors& t) {
    flash_backward_fp32(args_of(t), (int)t.q.dim(3), context.deterministic);
}
static bool takes(DType t, int64_t D) { return t == F32 && flash_head_size(D); }
static const AddAttention row({"flash_fp32", CUDA, 40, takes, nullptr, forward, backward,
                               "FlashAttention-2 in true fp32"});
#endif
