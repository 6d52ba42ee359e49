// fast/flash_fp32.cu: FlashAttention-2 in true fp32: no tensor cores, every product is FFMAs. Read
// flash_v2 in flash.cu first. Forward is like its forward, backward like its dK and dV; fp32_dot
// and fp32_add_rows stand where v2_dot and v2_add_rows stand.
//
// What changed against flash_v1 (flash.cu), and why it is faster: a thread computes 4x8 numbers of
// S up to D 64, and not one (2x8 where there are few blocks), so what it reads from shared memory
// is multiplied four or eight times; reads are of 16 bytes; and tiles are copied while others are
// computed on.
//
// What bounds it: for 4 numbers of d a warp reads 12 times 16 bytes a lane and issues 128 FFMAs.
// The reads keep a multiprocessor's shared memory busy for 24 clocks, the FFMAs all its units for
// 32. A block has one warp for each of the four schedulers. On an H100 two or three blocks share a
// multiprocessor: while one waits for copies or computes exponentials, another multiplies.
//
// Backward: a block owns a tile of keys and does step 12 by atomic additions: 5 products where
// flash_v1 and flash_v2 have 7, and sums in no fixed order.
#include "flash.h"

#ifdef HAVE_CUDA

// A block of a T4 has 64 KB, less than backward needs from D 64 on with R = 4. For it the kernels
// have no body.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define FP32_RUNS
#endif

constexpr int FP32_THREADS = 128;
constexpr int ACROSS = 8;                    // threads across a tile: see thread_x
constexpr int DOWN = FP32_THREADS / ACROSS;  // and down
// So many blocks should share a multiprocessor: the compiler takes no more registers than leave
// room for them.
constexpr int FORWARD_BLOCKS = 3;
constexpr int BACKWARD_BLOCKS = 2;

// How many rows has a tile that passes, of keys (in forward) or of queries (in backward)? 64, or
// from D 64 on as many as leave room for one block in 99 KB, and so for two in an H100's 227.
HD constexpr int fp32_keys(int D) { return D == 128 ? 32 : 64; }
HD constexpr int fp32_queries(int D) {
    if (D == 128) { return 16; }
    return D == 80 ? 32 : 64;
}

// A matrix in shared memory. Its rows are padded, so that what a warp accesses at once lies in
// different banks.
template <int N, int D, int PAD = 4>
struct Tile {
    float row[N][D + PAD];
};
template <int D, int R, int Bk = fp32_keys(D)>
struct ForwardTiles {
    Tile<R * DOWN, D> Q;
    Tile<Bk, D> K;
    Tile<Bk, D> V;
    Tile<R * DOWN, Bk, ACROSS> P;
};
template <int D, int R, int Bq = fp32_queries(D)>
struct BackwardTiles {
    Tile<R * DOWN, D> K;
    Tile<R * DOWN, D> V;
    Tile<Bq, D> Q;
    Tile<Bq, D> dO;
    Tile<R * DOWN, Bq, ACROSS> P;  // also for dS
};
// A thread's part, in registers, of a matrix with 16 R rows.
template <int R, int COLUMNS>
using Part = float[R][COLUMNS];

// ---- products ----
// Threads are a grid over a matrix, 8 across and 16 down. Thread (x, y) has the rows y, y + 16, ...
// Where columns are keys (in backward queries) it has the columns x, x + 8, ...; where they are d,
// see column_of. The lanes of warp 0:
//
//          x 0    1     2    3     4    5     6    7
//     y 0    0    1     8    9    16   17    24   25
//     y 1    2    3    10   11    18   19    26   27
//     y 2    4    5    12   13    20   21    28   29
//     y 3    6    7    14   15    22   23    30   31
//
// Why so: when each lane reads 16 bytes, shared memory serves the warp in 4 steps, 8 lanes in each.
// It serves 16 lanes in one, if each lane has the same address as lane ^ 1, or each as lane ^ 2. A
// row's lanes read the same numbers of A: 0 and 1 are such a pair, 2 and 3, ... A column's read the
// same of B: 0 and 2 are a pair, 1 and 3, ... So both take 2 steps.
DEVICE int thread_x() { return threadIdx.x % 2 + threadIdx.x % WARP / 8 * 2; }
DEVICE int thread_y() { return threadIdx.x / WARP * 4 + threadIdx.x % 8 / 2; }
DEVICE int thread_row(int r) { return thread_y() + r * DOWN; }

// A thread's COUNT columns of D are vectors of neighbours, the 8 threads' vectors side by side.
HD constexpr int vector_of(int count) { return count % 4 == 0 ? 4 : 2; }
template <int COUNT>
DEVICE int column_of(int c) {
    constexpr int W = vector_of(COUNT);
    return (c / W * ACROSS + thread_x()) * W + c % W;
}

// Starts to copy rows [first, first + N) of x to shared memory; those behind the last become 0. A
// thread copies 16 bytes of each of its rows, in the same columns. At D = 80 20 of 32 threads have
// columns.
template <int N, int D>
DEVICE void fp32_load(Tile<N, D>& to, const Heads& x, int first) {
    constexpr int THREADS = D == 80 ? 32 : D / 4;  // of a row
    constexpr int STEP = FP32_THREADS / THREADS;
    static_assert(N % STEP == 0);
    int i = threadIdx.x / THREADS;
    int d = threadIdx.x % THREADS * 4;
    if (d >= D) { return; }

    const float* from = row_at<float>(x, first + i) + d;
    int left = x.rows - first - i;
    for (int down = 0; down < N; down += STEP) {
        copy_16(&to.row[i + down][d], from, down < left);
        from += STEP * x.row;
    }
}
// Adds A B^T to the sums: the dot products of the own rows with the rows of a tile.
template <int R, int N, int D>
DEVICE void fp32_dot(Part<R, N>& sums, const Tile<R * DOWN, D>& A, const Tile<N * ACROSS, D>& B) {
#pragma unroll 4
    for (int d = 0; d < D; d += 4) {
        Pack<float, 4> a[R];
        for (int r = 0; r < R; r++) { a[r] = load_pack<4>(&A.row[thread_row(r)][d]); }
        for (int n = 0; n < N; n++) {
            auto b = load_pack<4>(&B.row[thread_x() + n * ACROSS][d]);
            for (int e = 0; e < 4; e++) {
                for (int r = 0; r < R; r++) {  // another sum each: none waits for the one before
                    sums[r][n] = fmaf(a[r].x[e], b.x[e], sums[r][n]);
                }
            }
        }
    }
}
// Adds a row of B to each row r of the sums, times a[r]. A thread has its columns of D.
template <int R, int COUNT>
DEVICE void add_row(float (&sums)[R][COUNT], const float (&a)[R], const float* B_row) {
    constexpr int W = vector_of(COUNT);
    float b[COUNT];
    for (int c = 0; c < COUNT; c += W) {
        auto in = load_pack<W>(B_row + column_of<COUNT>(c));
        for (int e = 0; e < W; e++) { b[c + e] = in.x[e]; }
    }
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < COUNT; c++) { sums[r][c] = fmaf(a[r], b[c], sums[r][c]); }
    }
}
// Adds A B to the sums: the rows of a tile, with A as weights. A goes through shared memory: a
// thread needs all columns of its rows, which its warp has.
template <int R, int COUNT, int N, int K, int D>
DEVICE void fp32_add_rows(Part<R, COUNT>& sums, const Part<R, N>& A,
                          Tile<R * DOWN, K, ACROSS>& A_smem, const Tile<K, D>& B) {
    __syncwarp();  // the warp has read what was there
    for (int r = 0; r < R; r++) {
        for (int n = 0; n < N; n++) {  // a warp's 32 lanes write to 32 banks
            A_smem.row[thread_row(r)][thread_x() + n * ACROSS] = A[r][n];
        }
    }
    __syncwarp();

#pragma unroll 4
    for (int k = 0; k < K; k += 4) {
        Pack<float, 4> a[R];
        for (int r = 0; r < R; r++) { a[r] = load_pack<4>(&A_smem.row[thread_row(r)][k]); }
        for (int e = 0; e < 4; e++) {
            float a_k[R];
            for (int r = 0; r < R; r++) { a_k[r] = a[r].x[e]; }
            add_row(sums, a_k, B.row[k + e]);
        }
    }
}
// Adds W neighbours to those in global memory, atomically.
template <int W>
DEVICE void atomic_add(float* to, const Pack<float, W>& x) {
#if __CUDA_ARCH__ >= 900  // all at once, in the L2 cache
    using Vector = std::conditional_t<W == 4, float4, float2>;
    atomicAdd((Vector*)to, *(const Vector*)&x);
#else
    for (int e = 0; e < W; e++) { atomicAdd(to + e, x.x[e]); }
#endif
}
// Stores R rows, times a factor, or adds them to what is there: every STEP-th row from `first` on,
// as far as there are some.
template <bool ADD, int STEP, int R, int COUNT>
DEVICE void fp32_store(const float (&x)[R][COUNT], float factor, const Heads& to, int first) {
    constexpr int W = vector_of(COUNT);
    for (int i = first, r = 0; r < R; i += STEP, r++) {
        if (i >= to.rows) { return; }
        float* row = row_at<float>(to, i);
        for (int c = 0; c < COUNT; c += W) {
            Pack<float, W> out;
            for (int e = 0; e < W; e++) { out.x[e] = x[r][c + e] * factor; }
            if constexpr (ADD) {
                atomic_add(row + column_of<COUNT>(c), out);
            } else {
                store_pack(row + column_of<COUNT>(c), out);
            }
        }
    }
}
// Gives the score -inf to keys that a query does not see. Rows are queries from q0 on, columns keys
// from k0 on; TRANSPOSED, the other way round.
template <bool TRANSPOSED, int R, int N>
DEVICE void fp32_mask(Part<R, N>& S, const AttentionArgs& a, int q0, int k0) {
    int last_key = k0 + (TRANSPOSED ? R * DOWN : N * ACROSS) - 1;
    if (last_key < keys_seen(a.causal, q0, a.Tk)) { return; }  // all see all

    for (int r = 0; r < R; r++) {
        for (int n = 0; n < N; n++) {
            int row = thread_row(r);
            int column = thread_x() + n * ACROSS;
            int i = q0 + (TRANSPOSED ? column : row);
            int j = k0 + (TRANSPOSED ? row : column);
            if (j >= keys_seen(a.causal, i, a.Tk)) { S[r][n] = -INFINITY; }
        }
    }
}

// ---- forward ----
// Does steps 2 to 4, which make S P, and what step 5 does before its product. m is the largest
// score yet, l this thread's part of the sum. exp(scale (s - m)) is exp2(c s - c m), with c = scale
// log2(e).
template <int R, int N, int COUNT>
DEVICE void fp32_softmax(Part<R, N>& S, Part<R, COUNT>& O, float (&m)[R], float (&l)[R], float c) {
    for (int r = 0; r < R; r++) {
        float larger = m[r];
        for (float s : S[r]) {  // step 2, in this thread
            larger = fmaxf(larger, s);
        }
        for (int apart : {1, 8, 16}) {  // and in the row: lane ^ apart
            larger = fmaxf(larger, __shfl_xor_sync(0xffffffff, larger, apart));
        }
        float shrink = exp2_approx((m[r] - larger) * c);
        m[r] = larger;

        l[r] *= shrink;
        for (float& s : S[r]) {  // steps 3 and 4
            s = exp2_approx(fmaf(s, c, -larger * c));
            l[r] += s;
        }
        for (float& o : O[r]) {  // step 5
            o *= shrink;
        }
    }
}

// Writes O and L: a block owns queries and loops over the keys that they see. V is copied while
// step 1 runs, the next K while the others do.
template <int D, int R>
__global__ void __launch_bounds__(FP32_THREADS, FORWARD_BLOCKS)
    flash_fp32_forward_kernel(AttentionArgs a) {
#ifdef FP32_RUNS
    constexpr int OWN = R * DOWN;
    constexpr int Bk = fp32_keys(D);
    extern __shared__ float4 shared[];
    auto& [Q, K, V, P_smem] = *(ForwardTiles<D, R>*)shared;
    move_to_head<float>(a, head_of_block());
    int q0 = (gridDim.y - 1 - blockIdx.y) * OWN;  // those that see most keys start first
    fp32_load(Q, a.q, q0);
    fp32_load(K, a.k, 0);

    float c = a.scale * LOG2_E;
    Part<R, D / ACROSS> O = {};
    float l[R] = {};
    float m[R];
    for (float& x : m) {  // not -inf: if first scores overflow to -inf, -inf - -inf is NaN
        x = -FLT_MAX;
    }

    int keys = keys_seen(a.causal, q0 + OWN - 1, a.Tk);
    for (int k0 = 0; k0 < keys; k0 += Bk) {
        await_copies();
        __syncthreads();  // K is there, and all warps have read V
        fp32_load(V, a.v, k0);
        Part<R, Bk / ACROSS> S = {};
        fp32_dot(S, Q, K);  // step 1, but for the scale

        await_copies();
        __syncthreads();  // V is there, and all warps have read K
        if (k0 + Bk < keys) { fp32_load(K, a.k, k0 + Bk); }
        fp32_mask<false>(S, a, q0, k0);
        fp32_softmax(S, O, m, l, c);     // steps 2 to 4: S becomes P
        fp32_add_rows(O, S, P_smem, V);  // step 5
    }

    for (int r = 0; r < R; r++) {       // step 6
        for (int apart : {1, 8, 16}) {  // as in step 2
            l[r] += __shfl_xor_sync(0xffffffff, l[r], apart);
        }
        for (float& o : O[r]) { o /= l[r]; }
        int i = q0 + thread_row(r);
        if (thread_x() == 0 && i < a.Tq) { a.L[i] = m[r] * a.scale + logf(l[r]); }
    }
    fp32_store<false, DOWN>(O, 1, a.o, q0 + thread_y());
#endif
}

// ---- backward ----
// Does step 12 for a tile of Bq queries from q0 on. A thread has Bq / 16 neighbouring ones.
template <int KEYS, int D, int Bq>
DEVICE void fp32_add_dq(const AttentionArgs& a, int q0,
                        const Tile<KEYS, Bq, ACROSS>& dS,  // transposed
                        const Tile<KEYS, D>& K) {
    constexpr int QUERIES = Bq / DOWN;
    int first = thread_y() * QUERIES;
    Part<QUERIES, D / ACROSS> dQ = {};
#pragma unroll 4
    for (int key = 0; key < KEYS; key++) {
        auto ds = load_pack<QUERIES>(&dS.row[key][first]);
        add_row(dQ, ds.x, K.row[key]);
    }
    fp32_store<true, 1>(dQ, a.scale, a.dq, q0 + first);
}

// Writes dK and dV, and adds to dQ: a block owns keys and loops over the queries that see them. S
// and dP are transposed, a row being a key. The next Q and dO are copied while step 12 runs.
template <int D, int R>
__global__ void __launch_bounds__(FP32_THREADS, BACKWARD_BLOCKS)
    flash_fp32_backward_kernel(AttentionArgs a) {
#ifdef FP32_RUNS
    constexpr int OWN = R * DOWN;
    constexpr int Bq = fp32_queries(D);
    constexpr int N = Bq / ACROSS;
    extern __shared__ float4 shared[];
    auto& [K, V, Q, dO, P_smem] = *(BackwardTiles<D, R>*)shared;
    move_to_head<float>(a, head_of_block());
    int k0 = blockIdx.y * OWN;
    fp32_load(K, a.k, k0);
    fp32_load(V, a.v, k0);
    int first = a.causal ? k0 / Bq * Bq : 0;
    fp32_load(Q, a.q, first);
    fp32_load(dO, a.dO, first);

    float c = a.scale * LOG2_E;
    Part<R, D / ACROSS> dK = {};
    Part<R, D / ACROSS> dV = {};
    for (int q0 = first; q0 < a.Tq; q0 += Bq) {
        Part<R, N> S = {};
        Part<R, N> dP;
        BackwardQuery query[N];
        for (int n = 0; n < N; n++) {
            query[n] = a.queries[q0 + thread_x() + n * ACROSS];
            for (int r = 0; r < R; r++) { dP[r][n] = -query[n].D_i; }
        }

        await_copies();
        __syncthreads();      // Q and dO are there, and all warps have read dS
        fp32_dot(dP, V, dO);  // step 10, and step 11's - D_i
        fp32_dot(S, K, Q);    // step 8
        fp32_mask<true>(S, a, q0, k0);
        for (int r = 0; r < R; r++) {
            for (int n = 0; n < N; n++) {
                S[r][n] = exp2_approx(fmaf(S[r][n], c, -query[n].L_log2e));  // S becomes P
                dP[r][n] *= S[r][n];  // step 11: dP becomes dS
            }
        }
        fp32_add_rows(dV, S, P_smem, dO);  // step 9
        fp32_add_rows(dK, dP, P_smem, Q);  // step 13, but for the scale

        __syncthreads();  // all of dS is there, and all warps have read Q and dO
        if (q0 + Bq < a.Tq) {
            fp32_load(Q, a.q, q0 + Bq);
            fp32_load(dO, a.dO, q0 + Bq);
        }
        fp32_add_dq(a, q0, P_smem, K);  // step 12
    }
    await_copies();  // where no query sees these keys, the first copies are still on their way
    fp32_store<false, DOWN>(dK, a.scale, a.dk, k0 + thread_y());
    fp32_store<false, DOWN>(dV, 1, a.dv, k0 + thread_y());
#endif
}

// ---- launchers ----
// Calls f(D, R, grid): the compiler knows the head size D, and R. A block owns 16 R of the rows: 64
// where that is more than two blocks per multiprocessor; else 32, which are twice as many blocks
// and finish sooner, although a number from shared memory is multiplied less often.
template <class F>
static void with_tiles(const AttentionTensors& t, int rows, int blocks, F f) {
    AttentionArgs a = args_of(t);
    with_head_size(t, [&](auto D) {
        int large = ceil_div(rows, 4 * DOWN);
        if (a.B * a.H * large > 2 * multiprocessors()) {
            f(D, Constant<4>(), attention_grid(a, large, blocks));
        } else {
            f(D, Constant<2>(), attention_grid(a, ceil_div(rows, 2 * DOWN), blocks));
        }
    });
}
static void flash_fp32_forward(const AttentionTensors& t) {
    AttentionArgs a = args_of(t);
    with_tiles(t, a.Tq, FORWARD_BLOCKS, [&](auto D, auto R, dim3 grid) {
        launch(flash_fp32_forward_kernel<D, R>, grid, FP32_THREADS, sizeof(ForwardTiles<D, R>), a);
    });
}
// Does step 7, sets dQ to 0, and launches the one kernel that writes dK and dV and adds to dQ.
static void flash_fp32_backward(const AttentionTensors& t) {
    Tensor memory;
    AttentionArgs a = step_7(t, &memory);
    copy_or_add(t.dq, zeros({1}, F32, WORKSPACE), false);  // dQ = 0, to which atomics add

    with_tiles(t, a.Tk, BACKWARD_BLOCKS, [&](auto D, auto R, dim3 grid) {
        constexpr size_t bytes = sizeof(BackwardTiles<D, R>);
        static_assert(bytes <= 99 * 1024, "8.6, 8.9 and 12.0 have no more");
        launch(flash_fp32_backward_kernel<D, R>, grid, FP32_THREADS, bytes, a);
    });
}
static bool takes(DType t, int64_t D) {
    return t == F32 && flash_head_size(D) && compiled_for(flash_fp32_forward_kernel<64, 4>) >= 80;
}
static const AddRow<AttentionImpl> row({"flash_fp32", CUDA, 50, takes, nullptr, flash_fp32_forward,
                                        flash_fp32_backward});
#endif
