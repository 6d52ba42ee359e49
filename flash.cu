// flash.cu: section 1.3.2 of the handout. Attention by tiles, FlashAttention-2: thirteen steps;
// `tiled`, the steps in plain C++; `flash_v1`, the steps as the simplest kernels; `flash_v2`, the
// same on tensor cores; and the table of implementations: which card takes which, fast/'s among
// them. Read the steps first, then tiled's forward, then flash_v1's and flash_v2's beside it. The
// section's commands are in flash_commands.cu.
#include "attention.h"
#include "fast_ways.h"
#include "lib/gpu.h"

// -------------------------------------------------------------------------------------------------
// 1.3.2, FlashAttention-2 (Dao, 2023). Every kernel, here and in fast/, cites the numbers of these
// steps.
//
// S = Q K^T / sqrt(D) and P = softmax(S) never exist as a whole. Queries are cut into tiles Q_i of
// Bq rows, keys and values into tiles K_j and V_j of Bk rows. (The handout's T_q and T_k count the
// tiles; here Tq and Tk are the numbers of queries and keys.) The first query and key of a tile are
// q0 and k0.
//
// m, m', l, shrink, L_i and D_i have one number per row; with +, -, * or / it acts on all of its
// row. * is element by element. Matrices side by side, as in P V_j, are multiplied. In these steps,
// and in kernels that count tiles, i counts tiles of queries and j tiles of keys. In attention.h,
// tiled and flash_v1 i and j count single rows.
//
// Forward (the handout's algorithm 1). A block of threads owns a tile Q_i, and all K_j and V_j
// pass. It keeps, for each row, the largest score so far m, the sum l of exp(S - m), and O so far,
// unnormalised. Before the first j, l and O are 0, and m is the lowest finite number:
//   1.  S = Q_i K_j^T / sqrt(D)         [Bq,Bk]; -inf where a query does not see a key
//   2.  m' = max(m, rowmax S)
//   3.  P = exp(S - m'), not normalised before step 6; shrink = exp(m - m')
//   4.  l = shrink * l + rowsum P
//   5.  O = shrink * O + P V_j, m = m'
//   6.  after the last j: O_i = O / l, L_i = m + log l
// That is exact: shrink rescales what was summed under a smaller maximum. Memory is O(T), traffic 2
// T^2 D / Bq elements (K and V once per tile of queries); eager's softmax alone moves 8 T^2.
//
// Backward (the handout's algorithm 2). Tiles of S are computed again. Now L is known, so no
// maximum is needed. (L has 24 bits, so even where S is exact P is off by a factor of up to
// exp(2^-24 |L|): a percent at scores of 170,000.)
//   7.  D_i = rowsum(dO_i * O_i)        [Bq]; for all i, once, before all else;
//                                       equals rowsum(P * dP)
//   8.  S = Q_i K_j^T / sqrt(D), P = exp(S - L_i)
//   9.  dV_j += P^T dO_i
//   10. dP = dO_i V_j^T
//   11. dS = P * (dP - D_i)
//   12. dQ_i += dS K_j / sqrt(D)
//   13. dK_j += dS^T Q_i / sqrt(D)
// dK_j and dV_j are sums over the queries, dQ_i is one over the keys: an owner of queries
// loops over the keys, an owner of keys over the queries.

static Heads heads_of(const Tensor& t) {
    if (!t) { return {}; }
    return {t.data, t.stride[0], t.stride[1], t.stride[2], (int)t.dim(2), (int)t.dim(3)};
}

// Returns what loops and kernels get of the tensors. The tensors must outlive it.
AttentionArgs args_of(const AttentionTensors& t) {
    return {heads_of(t.q),
            heads_of(t.k),
            heads_of(t.v),
            heads_of(t.o),
            heads_of(t.dO),
            heads_of(t.dq),
            heads_of(t.dk),
            heads_of(t.dv),
            t.L.as<float>(),
            (int)t.q.dim(0),               // B
            (int)t.q.dim(1),               // H
            (int)t.q.dim(2),               // Tq
            (int)t.k.dim(2),               // Tk
            1 / sqrtf((float)t.q.dim(3)),  // scale
            t.causal,
            nullptr,  // queries
            0};       // query_rows
}

// -------------------------------------------------------------------------------------------------
// 1.3.2 flash_forward (a), tiled: the steps on the CPU, in fp32. As on a GPU, a tile of S stays in
// fast memory, here a core's cache. Causal tiles above the diagonal are skipped: about half of all.
// naive and fused compute them.

constexpr int CPU_BQ = 64, CPU_BK = 128;  // with D = 64: Q, K, V, S and O tiles take 128 KiB

// A tile of S: M queries from q0 on and N keys from k0 on, of the head that `a` was moved to. It is
// stored as M rows of CPU_BK numbers.
struct TileOfS {
    const AttentionArgs& a;
    int q0, M, k0, N;
    // Return the rows of x [B,H,Tq,D] for these queries, and of x [B,H,Tk,D] for these keys.
    float* at_q0(const Heads& x) const { return row_at<float>(x, q0); }
    float* at_k0(const Heads& x) const { return row_at<float>(x, k0); }
};

// Writes S = Q_i K_j^T / sqrt(D), with -inf where a query does not see a key. The last two
// arguments of blas_product are a factor of the product and one of what the result held: 0
// overwrites, 1 adds.
static void scores_cpu(float* S, const TileOfS& t) {
    const AttentionArgs& a = t.a;
    blas_product(S, CPU_BK,                     // [M,N]
                 t.at_q0(a.q), a.q.row, false,  // [M,D]
                 t.at_k0(a.k), a.k.row, true,   // [N,D], transposed
                 t.M, t.N, a.q.D, a.scale, 0);
    for (int i = 0; i < t.M; i++) {
        const int seen = max(keys_seen(a.causal, t.q0 + i, a.Tk) - t.k0, 0);  // of this tile
        for (int j = seen; j < t.N; j++) { S[i * CPU_BK + j] = -INFINITY; }
    }
}

// Writes O and L of a head's queries from q0 to the end of their tile.
static void flash_forward_tile_cpu(AttentionArgs a, int head, int q0) {
    move_to_head<float>(a, head);
    const int D = a.q.D;
    const int M = min(CPU_BQ, a.Tq - q0);
    const int keys = keys_seen(a.causal, q0 + M - 1, a.Tk);
    vector<float> S(CPU_BQ * CPU_BK), O(M * D), m(M, -FLT_MAX), l(M);
    for (int k0 = 0; k0 < keys; k0 += CPU_BK) {
        const int N = min(CPU_BK, keys - k0);
        const TileOfS tile = {a, q0, M, k0, N};
        scores_cpu(S.data(), tile);  // step 1
        for (int i = 0; i < M; i++) {
            float* s = &S[i * CPU_BK];
            float larger = m[i];
            for (int j = 0; j < N; j++) {  // step 2
                larger = max(larger, s[j]);
            }
            float sum = 0;
            for (int j = 0; j < N; j++) {  // step 3
                s[j] = exp(s[j] - larger);
                sum += s[j];  // step 4's rowsum
            }
            const float shrink = exp(m[i] - larger);  // step 3
            l[i] = l[i] * shrink + sum;               // step 4
            for (int d = 0; d < D; d++) {             // step 5
                O[i * D + d] *= shrink;
            }
            m[i] = larger;
        }
        blas_product(O.data(), D,                      // step 5: [M,D] +=
                     S.data(), CPU_BK, false,          // P [M,N]
                     tile.at_k0(a.v), a.v.row, false,  // [N,D]
                     M, D, N, 1, 1);
    }

    for (int i = 0; i < M; i++) {  // step 6
        float* o = row_at<float>(a.o, q0 + i);
        for (int d = 0; d < D; d++) { o[d] = O[i * D + d] / l[i]; }
        a.L[q0 + i] = m[i] + log(l[i]);
    }
}

// Writes O and L. A thread takes a tile of queries. The last tiles, which have the most keys if the
// mask is causal, go first.
static void flash_forward_cpu(const AttentionTensors& t) {
    const AttentionArgs a = args_of(t);
    one_blas_thread();
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int q0 = (a.Tq - 1) / CPU_BQ * CPU_BQ; q0 >= 0; q0 -= CPU_BQ) {
        for (int head = 0; head < a.B * a.H; head++) { flash_forward_tile_cpu(a, head, q0); }
    }
}

// Adds to dQ, dK and dV what a tile of S gives. P and dS have room for a tile. The last argument of
// steps 9, 12 and 13 is beta: false (0) for a sum's first product, which overwrites, and true (1)
// for the others, which add. dQ's first product is with the keys from 0 on. dK's and dV's is with
// the queries from `first` on, the first that flash_backward_cpu visits. Step 7 is done again for
// each tile of keys: its M D multiplications are few beside a product's M N D.
static void flash_backward_tile_cpu(float* P, float* dS, const TileOfS& t, int first) {
    const AttentionArgs& a = t.a;
    const int D = a.q.D, M = t.M, N = t.N;
    const float *o = t.at_q0(a.o), *dO = t.at_q0(a.dO);
    const float* L = a.L + t.q0;

    scores_cpu(P, t);                          // step 8: S
    blas_product(dS, CPU_BK,                   // step 10: dP [M,N]
                 dO, a.dO.row, false,          // [M,D]
                 t.at_k0(a.v), a.v.row, true,  // [N,D], transposed
                 M, N, D, 1, 0);
    for (int i = 0; i < M; i++) {
        float *p = P + i * CPU_BK, *ds = dS + i * CPU_BK;
        float D_i = 0;
        for (int d = 0; d < D; d++) {  // step 7
            D_i += o[i * a.o.row + d] * dO[i * a.dO.row + d];
        }
        for (int j = 0; j < N; j++) {
            p[j] = exp(p[j] - L[i]);                 // step 8
            ds[j] = p[j] * (ds[j] - D_i) * a.scale;  // step 11, and the scale of 12 and 13
        }
    }
    blas_product(t.at_k0(a.dv), a.dv.row,  // step 9: dV_j [N,D] +=
                 P, CPU_BK, true,          // [M,N], transposed
                 dO, a.dO.row, false,      // [M,D]
                 N, D, M, 1, t.q0 > first);
    blas_product(t.at_q0(a.dq), a.dq.row,       // step 12: dQ_i [M,D] +=
                 dS, CPU_BK, false,             // [M,N]
                 t.at_k0(a.k), a.k.row, false,  // [N,D]
                 M, D, N, 1, t.k0 > 0);
    blas_product(t.at_k0(a.dk), a.dk.row,       // step 13: dK_j [N,D] +=
                 dS, CPU_BK, true,              // [M,N], transposed
                 t.at_q0(a.q), a.q.row, false,  // [M,D]
                 N, D, M, 1, t.q0 > first);
}

// Writes dQ, dK and dV. A thread takes all of a head, so no two add to one sum.
static void flash_backward_cpu(const AttentionTensors& t) {
    const AttentionArgs all = args_of(t);
    one_blas_thread();
#pragma omp parallel for schedule(dynamic)
    for (int head = 0; head < all.B * all.H; head++) {
        AttentionArgs a = all;
        move_to_head<float>(a, head);
        vector<float> P(CPU_BQ * CPU_BK), dS(CPU_BQ * CPU_BK);
        for (int k0 = 0; k0 < a.Tk; k0 += CPU_BK) {
            const int N = min(CPU_BK, a.Tk - k0);
            // At least the last tile of queries, though it may see none of these keys: their
            // gradients are then 0.
            const int first = a.causal ? min(k0, a.Tq - 1) / CPU_BQ * CPU_BQ : 0;
            for (int q0 = first; q0 < a.Tq; q0 += CPU_BQ) {
                const int M = min(CPU_BQ, a.Tq - q0);
                flash_backward_tile_cpu(P.data(), dS.data(), {a, q0, M, k0, N}, first);
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Step 7 on a GPU, for every backward but Hopper's, whose own kernel does more beside it.

#ifdef HAVE_CUDA
constexpr int STEP_7_THREADS = 128;
// Writes what backward's kernels read of the queries: a warp takes one, and its lanes share D.
// query_rows is a multiple of a block's warps, so no warp is left over, and nothing is checked.
template <class T>
__global__ void flash_step_7_kernel(AttentionArgs a,
                                    BackwardQuery* queries) {  // [B*H,a.query_rows]
    int64_t n = thread_number() / WARP;
    int i = (int)(n % a.query_rows), lane = threadIdx.x % WARP;
    move_to_head<T>(a, (int)(n / a.query_rows));
    BackwardQuery query = {INFINITY, 0};  // beyond Tq
    if (i < a.Tq) {
        const T *o = row_at<T>(a.o, i), *dO = row_at<T>(a.dO, i);
        float sum = 0;
        for (int d = lane; d < a.o.D; d += WARP) { sum += o[d] * dO[d]; }
        query = {a.L[i] * LOG2_E, warp_sum(sum)};
    }
    if (lane == 0) { queries[n] = query; }
}
// Does step 7, and returns the arguments with what it found: see attention.h.
AttentionArgs step_7(const AttentionTensors& t, Tensor* memory) {
    AttentionArgs a = args_of(t);
    a.query_rows = ceil_div(a.Tq, QUERY_ROWS) * QUERY_ROWS;
    *memory = empty({a.B, a.H, a.query_rows, 2}, F32, WORKSPACE);
    BackwardQuery* queries = (BackwardQuery*)memory->data;
    a.queries = queries;
    const int64_t threads = (int64_t)a.B * a.H * a.query_rows * WARP;
    with_gpu_type(t.q.dtype, [&](auto zero) {
        LAUNCH(flash_step_7_kernel<decltype(zero)>, ceil_div(threads, STEP_7_THREADS),
               STEP_7_THREADS, a, queries);
    });
    return a;
}
#endif

// -------------------------------------------------------------------------------------------------
// 1.3.2 flash_forward (b) and flash_backward, flash_v1: the same on a GPU, as simply as it goes. A
// block owns a tile of 32 rows (of Q; for dK and dV, of K and V) and has a warp for each:
// threadIdx.y is the warp, threadIdx.x the lane, blockIdx.x the head, blockIdx.y the tile. The
// warp's lanes hold that row's columns in registers: columns lane, lane + 32, ... Tiles of 32 rows
// of the other side pass through shared memory. In a dot product lane j takes the tile's row j.
// Where rows are added up, each lane takes its columns. All sums are fp32.
// __launch_bounds__(threads, blocks) tells the compiler that a block has at most so many threads,
// and that so many blocks must fit on an SM at once. This limits a thread's registers.
//
// It runs on every card since sm_75. What it leaves to faster kernels: a product reads one number
// from shared memory for each multiplication, and up to one from another lane; the tensor cores
// stand idle; no tile is copied while another is computed on.

#ifdef HAVE_CUDA
constexpr int V1_TILE = WARP, V1_THREADS = V1_TILE * WARP, V1_D = 128, V1_COLUMNS = V1_D / WARP;
// + 1: 32 lanes that read one column of 32 rows read 32 different banks
using V1Tile = float[V1_TILE][V1_D + 1];
using V1Row = float[V1_COLUMNS];  // a row, spread over a warp
// An array lies in registers only where each index is known to the compiler: hence #pragma unroll
// where nvcc would not unroll a loop by itself. 0xffffffff: all 32 lanes take part.

// Loads row i, the warp's. It is 0 beyond the last row, and so are columns beyond D.
template <class T>
__device__ void v1_load(V1Row& row, const Heads& x, int i) {
    const T* from = row_at<T>(x, i);
    for (int c = 0; c < V1_COLUMNS; c++) {
        int d = c * WARP + threadIdx.x;
        row[c] = i < x.rows && d < x.D ? from[d] : 0.0f;
    }
}
// Loads the rows from `first` on, each warp one.
template <class T>
__device__ void v1_load(V1Tile& tile, const Heads& x, int first) {
    V1Row row;
    v1_load<T>(row, x, first + threadIdx.y);
    for (int c = 0; c < V1_COLUMNS; c++) { tile[threadIdx.y][c * WARP + threadIdx.x] = row[c]; }
}
// Stores row i, the warp's, times a factor.
template <class T>
__device__ void v1_store(const V1Row& row, float factor, const Heads& x, int i) {
    T* to = row_at<T>(x, i);
    for (int c = 0; c < V1_COLUMNS; c++) {
        int d = c * WARP + threadIdx.x;
        if (i < x.rows && d < x.D) { to[d] = row[c] * factor; }
    }
}
// Returns the dot product of the warp's row and row `lane` of the tile.
__device__ inline float v1_dot(const V1Row& row, const V1Tile& tile, int D) {
    float sum = 0;
#pragma unroll
    for (int c = 0; c < V1_COLUMNS; c++) {
        for (int d = c * WARP; d < min(D, (c + 1) * WARP); d++) {
            sum += __shfl_sync(0xffffffff, row[c], d % WARP) * tile[threadIdx.x][d];
        }
    }
    return sum;
}
// Adds sum_j x_j tile_j to the warp's row; lane j holds x_j.
__device__ inline void v1_add_rows(V1Row& row, float x, const V1Tile& tile, int D) {
    for (int j = 0; j < V1_TILE; j++) {
        float x_j = __shfl_sync(0xffffffff, x, j);
#pragma unroll
        for (int c = 0; c < V1_COLUMNS; c++) {
            if (c * WARP < D) { row[c] += x_j * tile[j][c * WARP + threadIdx.x]; }
        }
    }
}

// Writes O and L: a block owns queries and loops over the keys that they see.
template <class T>
__global__ void __launch_bounds__(V1_THREADS, 1) flash_v1_forward_kernel(AttentionArgs a) {
    __shared__ V1Tile K, V;
    move_to_head<T>(a, blockIdx.x);
    int D = a.q.D;
    int q0 = blockIdx.y * V1_TILE;
    int i = q0 + threadIdx.y;
    V1Row q, O = {};
    v1_load<T>(q, a.q, i);
    // m does not begin with -inf: where all scores of the first tile are -inf, -inf - -inf would be
    // NaN. A mask does not do that, as every query sees key 0, but overflow can.
    float m = -FLT_MAX;
    float l = 0;

    int keys = keys_seen(a.causal, q0 + V1_TILE - 1, a.Tk);  // tiles above the diagonal stay out
    for (int k0 = 0; k0 < keys; k0 += V1_TILE) {
        __syncthreads();  // all warps have read the tiles of the turn before
        v1_load<T>(K, a.k, k0);
        v1_load<T>(V, a.v, k0);
        __syncthreads();  // the tiles are there

        bool seen = k0 + threadIdx.x < keys_seen(a.causal, i, a.Tk);
        float dot = v1_dot(q, K, D);
        float s = seen ? a.scale * dot : -INFINITY;  // step 1
        float larger = fmaxf(m, warp_max(s));        // step 2: m'
        float p = expf(s - larger);                  // step 3
        float shrink = expf(m - larger);             // step 3
        l = shrink * l + warp_sum(p);                // step 4
        for (float& o : O) { o *= shrink; }          // step 5
        v1_add_rows(O, p, V, D);                     // step 5
        m = larger;
    }

    v1_store<T>(O, 1 / l, a.o, i);  // step 6
    if (threadIdx.x == 0 && i < a.Tq) { a.L[i] = m + logf(l); }
}

// Writes dQ: a block owns queries and loops over the keys that they see.
template <class T>
__global__ void __launch_bounds__(V1_THREADS, 1) flash_v1_dq_kernel(AttentionArgs a) {
    __shared__ V1Tile K, V;
    move_to_head<T>(a, blockIdx.x);
    int D = a.q.D;
    int q0 = blockIdx.y * V1_TILE;
    int i = q0 + threadIdx.y;
    V1Row q, dO, dQ = {};
    v1_load<T>(q, a.q, i);
    v1_load<T>(dO, a.dO, i);
    BackwardQuery query = a.queries[i];
    float c = a.scale * LOG2_E;  // exp2(c dot - L_log2e) is exp(S - L)

    int keys = keys_seen(a.causal, q0 + V1_TILE - 1, a.Tk);
    for (int k0 = 0; k0 < keys; k0 += V1_TILE) {
        __syncthreads();  // all warps have read the tiles of the turn before
        v1_load<T>(K, a.k, k0);
        v1_load<T>(V, a.v, k0);
        __syncthreads();  // the tiles are there

        bool seen = k0 + threadIdx.x < keys_seen(a.causal, i, a.Tk);
        float dot = v1_dot(q, K, D);
        float p = seen ? exp2f(c * dot - query.L_log2e) : 0;  // step 8
        float dP = v1_dot(dO, V, D);                          // step 10
        float dS = seen ? p * (dP - query.D_i) : 0;           // step 11
        v1_add_rows(dQ, dS, K, D);                            // step 12, but for the scale
    }
    v1_store<T>(dQ, a.scale, a.dq, i);
}

// Writes dK and dV: a block owns keys and loops over the queries that see them. P and dS are
// computed a second time, so that no two blocks add to one sum: no atomics are needed, and every
// run gives the same bits.
template <class T>
__global__ void __launch_bounds__(V1_THREADS, 1) flash_v1_dkv_kernel(AttentionArgs a) {
    __shared__ V1Tile Q, dO;
    move_to_head<T>(a, blockIdx.x);
    int D = a.q.D;
    int k0 = blockIdx.y * V1_TILE;
    int j = k0 + threadIdx.y;
    V1Row k, v, dK = {}, dV = {};
    v1_load<T>(k, a.k, j);
    v1_load<T>(v, a.v, j);
    float c = a.scale * LOG2_E;  // exp2(c dot - L_log2e) is exp(S - L)

    // Tiles above the diagonal stay out: causal queries before k0 see none of these keys.
    for (int q0 = a.causal ? k0 : 0; q0 < a.Tq; q0 += V1_TILE) {
        __syncthreads();  // all warps have read the tiles of the turn before
        v1_load<T>(Q, a.q, q0);
        v1_load<T>(dO, a.dO, q0);
        __syncthreads();  // the tiles are there

        int i = q0 + threadIdx.x;
        bool seen = i < a.Tq && j < keys_seen(a.causal, i, a.Tk);
        BackwardQuery query = a.queries[i];
        float dot = v1_dot(k, Q, D);
        float p = seen ? exp2f(c * dot - query.L_log2e) : 0;  // step 8
        v1_add_rows(dV, p, dO, D);                            // step 9
        float dP = v1_dot(v, dO, D);                          // step 10
        float dS = seen ? p * (dP - query.D_i) : 0;           // step 11
        v1_add_rows(dK, dS, Q, D);                            // step 13, but for the scale
    }
    v1_store<T>(dK, a.scale, a.dk, j);
    v1_store<T>(dV, 1, a.dv, j);
}

static dim3 v1_grid(const AttentionArgs& a, int rows) {
    return dim3(a.B * a.H, ceil_div(rows, V1_TILE));
}
static void flash_v1_forward(const AttentionTensors& t) {
    AttentionArgs a = args_of(t);
    with_gpu_type(t.q.dtype, [&](auto zero) {
        using T = decltype(zero);
        LAUNCH(flash_v1_forward_kernel<T>, v1_grid(a, a.Tq), dim3(WARP, V1_TILE), a);
    });
}
// Writes dQ, then dK and dV.
static void flash_v1_backward(const AttentionTensors& t) {
    Tensor memory;
    AttentionArgs a = step_7(t, &memory);
    dim3 threads(WARP, V1_TILE);
    with_gpu_type(t.q.dtype, [&](auto zero) {
        using T = decltype(zero);
        LAUNCH(flash_v1_dq_kernel<T>, v1_grid(a, a.Tq), threads, a);
        LAUNCH(flash_v1_dkv_kernel<T>, v1_grid(a, a.Tk), threads, a);
    });
}
#endif

// -------------------------------------------------------------------------------------------------
// 1.3.2 flash_forward (b) and flash_backward, flash_v2: the same steps on tensor cores. Its kernels
// are flash_v1's, but find their head without move_to_head, which cost forward 5 %; v2_dot and
// v2_add_rows stand where v1_dot and v1_add_rows stood. What changes, and why it is faster:
//   - mma multiplies a 16x16 by a 16x8 matrix in one instruction of a warp (on a T4 in two), 2048
//     multiplications. All its matrices lie in the warp's registers.
//   - A warp owns 16 or 32 rows, where it owned one: R = 2 or 4 squares (below) of 8 rows; v2_with
//     chooses R. What it reads of a passing tile serves all of them.
//   - The next tile is copied while this one is computed on (not on a T4: see copy_16).
//   - Forward's exponential is exp2, too, which the GPU has. With c = log2(e) / sqrt(D), and m[r]
//     holding m log2(e), step 3's exp(S - m) is exp2(c x - m[r]), where x is the product without
//     the scale.
//   - Step 2 is lazy: see v2_raise_maximum.
// What it costs: P and dS are rounded to 16 bits where they enter a product, and fp32 cannot go
// this way. In fp16 dS may overflow, as in PyTorch; the loss scale is halved then.
//
// A matrix in registers (its name ends in _rmem) is cut into squares of 8x8. (They are not called
// blocks: a block is one of threads.) x[r][n] is square r down and n across. Each lane has two
// neighbours of each square, the numbers x[r][n][0] and x[r][n][1]:
//
//             columns 0, 1   2, 3      4, 5      6, 7
//     row 0   lane  0        lane  1   lane  2   lane  3
//     row 1   lane  4        lane  5   lane  6   lane  7
//       ...
//     row 7   lane 28        lane 29   lane 30   lane 31
//
// Sums are fp32, float x[R][N][2]. mma leaves S in this layout. It takes its left operand in this
// layout, too, but a lane's two numbers of a square have 16 bits each and share a register. So P is
// rounded where it lies, and no lane sends anything to another. ldmatrix loads four such squares at
// once.
//
// In shared memory (_smem) a matrix is T[rows][D + 8]. A row is then an odd number of 16-byte
// pieces, so the 8 rows of a square, of which ldmatrix reads 16 bytes each, lie in all 32 banks.
// Without the 8 more, at D = 64, all eight would begin in bank 0.

#ifdef HAVE_CUDA
constexpr int V2_WARPS = 4, V2_THREADS = V2_WARPS * WARP;  // threadIdx.x counts them
// v2_own: the rows that a block owns, 8 R for each warp. v2_keys, v2_queries: the rows of a passing
// tile of keys, and of queries. S and dP of such a tile have to fit into registers, beside sums of
// D columns.
HD constexpr int v2_own(int R) { return V2_WARPS * 8 * R; }
HD constexpr int v2_keys(int D) { return D > 64 ? 32 : 64; }
// At D = 16 v2_queries is 64, as v2_load copies 64 rows at a time. At D = 80 registers allow 16. At
// D = 128 they allow 32, since a warp owns only 16 rows there (flash_v2_backward).
HD constexpr int v2_queries(int D) {
    if (D == 16) { return 64; }
    return D == 80 ? 16 : 32;
}
HD constexpr int v2_stride(int D) { return D + 8; }

static_assert(QUERY_ROWS % v2_own(4) == 0);

// Returns the most bytes of shared memory that a block needs. It owns a tile of each of `matrices`
// matrices. Two other matrices pass (K and V, or Q and dO), and each has two places: a tile is read
// in one while the next is copied to the other. These four places have v2_keys rows at most, as
// v2_queries is never more. dK's and dV's kernel also has two places for a tile's BackwardQuery.
HD constexpr size_t v2_bytes(int matrices, int D, int R) {
    return (matrices * v2_own(R) + 4 * v2_keys(D)) * v2_stride(D) * sizeof(bf16) +
           2 * v2_keys(D) * sizeof(BackwardQuery);
}
// Returns whether the card that this code is compiled for can run such a kernel: a T4 (sm_75) has
// no bf16, and gives a block at most 64 KB. A kernel that it cannot run is compiled to nothing;
// flash_v2_takes and v2_with do not launch it.
template <class T>
__device__ constexpr bool v2_runs(size_t bytes) {
#if __CUDA_ARCH__ < 800
    return is_same_v<T, fp16> && bytes <= 64 << 10;
#else
    return true;
#endif
}

// This lane's number x[r][n][e] stands in row v2_row(r) and column v2_column(n, e) of the matrix.
__device__ inline int v2_row(int r) { return 8 * r + threadIdx.x % WARP / 4; }
__device__ inline int v2_column(int n, int e) { return 8 * n + threadIdx.x % 4 * 2 + e; }

// Calls f(x[r][n][e], r, n, e) for each number of the matrix that this lane holds.
template <int R, int N, class F>
__device__ void v2_each(float (&x)[R][N][2], F f) {
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            f(x[r][n][0], r, n, 0);
            f(x[r][n][1], r, n, 1);
        }
    }
}

// Starts to copy rows [first, first + ROWS) of head h to shared memory; those that do not exist
// become 0. A thread copies 16 bytes of each of its rows, in the same columns. At D = 80, 10 of 16
// threads copy.
template <int D, int ROWS, class T>
__device__ void v2_load(T* tile_smem,  // [ROWS,D + 8]
                        const Heads& x, int b, int h, int first) {
    constexpr int ACROSS = D == 80 ? 16 : D / 8, DOWN = V2_THREADS / ACROSS;
    static_assert(ROWS % DOWN == 0);  // why ACROSS is 16 at D = 80, and not 10
    int i = threadIdx.x / ACROSS, d = threadIdx.x % ACROSS * 8;
    if (d >= D) { return; }

    const T* from = head_of<const T>(x, b, h) + (first + i) * x.row + d;
    tile_smem += i * v2_stride(D) + d;
    int left = x.rows - first - i;
#pragma unroll
    for (int down = 0; down < ROWS; down += DOWN) {
        copy_16(tile_smem + down * v2_stride(D), from, down < left);
        from += DOWN * x.row;
    }
}
// Multiplies A's squares by B's, and adds to the sums' squares n and n + 1 across: b[0] and b[1]
// are those of n, b[2] and b[3] those of n + 1.
template <class T, int R, int N>
__device__ void v2_mma(float (&sums_rmem)[R][N][2], int n, const uint32_t (&a)[R / 2][4],
                       const uint32_t (&b)[4]) {
    for (int r = 0; r < R; r += 2) {
        mma<T>(sums_rmem[r][n], sums_rmem[r + 1][n], a[r / 2], b[0], b[1]);
        mma<T>(sums_rmem[r][n + 1], sums_rmem[r + 1][n + 1], a[r / 2], b[2], b[3]);
    }
}
// Adds A B^T to the sums: the dot products of a warp's rows with the rows of a tile.
template <int D, class T, int R, int N>
__device__ void v2_dot(float (&sums_rmem)[R][N][2],  // [8 R,8 N]
                       const T* A_smem,              // [8 R,D + 8]
                       const T* B_smem) {            // [8 N,D + 8]
    constexpr int ROW = v2_stride(D);
    int lane = threadIdx.x % WARP;
    // LDMATRIX loads four squares: lane l gives the address of row l % 8 of square l / 8. Of A's
    // and of B's 16 rows and columns d to d + 15 the squares are
    //     A: 0 2    B: 0 1
    //        1 3       2 3
    // mma wants A's in this order. B's rows are columns of mma's B, so squares 0 and 1 of B are one
    // mma's, 2 and 3 the next one's. Addresses count bytes; a number has 2.
    uint32_t a_smem = smem_address(A_smem + lane % 16 * ROW + lane / 16 * 8);
    uint32_t b_smem = smem_address(B_smem + (lane % 8 + lane / 16 * 8) * ROW + lane / 8 % 2 * 8);
#pragma unroll
    for (int d = 0; d < D; d += 16) {
        uint32_t a[R / 2][4];
        for (int r = 0; r < R; r += 2) { LDMATRIX("", a[r / 2], a_smem + 2 * (8 * r * ROW + d)); }
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            LDMATRIX("", b, b_smem + 2 * (8 * n * ROW + d));
            v2_mma<T>(sums_rmem, n, a, b);
        }
    }
}
// Adds A B to the sums: the rows of a tile, with A, rounded to T, as weights.
template <class T, int R, int K, int N>
__device__ void v2_add_rows(float (&sums_rmem)[R][N][2],     // [8 R,8 N]
                            const float (&A_rmem)[R][K][2],  // [8 R,8 K]
                            const T* B_smem) {               // [8 K,8 N + 8]
    constexpr int ROW = v2_stride(8 * N);
    int lane = threadIdx.x % WARP;
    // B's rows are rows of mma's B, of which a lane holds two neighbours of a column: so each
    // square is loaded transposed. Of B's rows 8 k to 8 k + 15 and columns 8 n to 8 n + 15 the
    // squares are
    //     0 2
    //     1 3
    // 0 and 1 are one mma's, 2 and 3 the next one's.
    uint32_t b_smem = smem_address(B_smem + lane % 16 * ROW + lane / 16 * 8);
#pragma unroll
    for (int k = 0; k < K; k += 2) {
        uint32_t a[R / 2][4];
        for (int r = 0; r < R; r++) {
            a[r / 2][r % 2] = pack<T>(A_rmem[r][k][0], A_rmem[r][k][1]);
            a[r / 2][r % 2 + 2] = pack<T>(A_rmem[r][k + 1][0], A_rmem[r][k + 1][1]);
        }
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            LDMATRIX(".trans", b, b_smem + 2 * (8 * k * ROW + 8 * n));
            v2_mma<T>(sums_rmem, n, a, b);
        }
    }
}
// Stores the matrix to those rows of head h, from `first` on, that exist.
template <class T, int R, int N>
__device__ void v2_store(const float (&x_rmem)[R][N][2], const Heads& x, int b, int h, int first) {
    for (int r = 0; r < R; r++) {
        int i = first + v2_row(r);
        if (i >= x.rows) { continue; }
        T* row = head_of<T>(x, b, h) + i * x.row;
        for (int n = 0; n < N; n++) {
            *(uint32_t*)(row + v2_column(n, 0)) = pack<T>(x_rmem[r][n][0], x_rmem[r][n][1]);
        }
    }
}
// Gives the score -inf to keys that a query does not see. Rows are queries from q0 on, columns keys
// from k0 on; TRANSPOSED, the other way round.
template <bool TRANSPOSED, int R, int N>
__device__ void v2_mask(float (&S_rmem)[R][N][2], const AttentionArgs& a, int q0, int k0) {
    int last_key = k0 + 8 * (TRANSPOSED ? R : N) - 1;
    // The first query sees the last key, so each query sees all.
    if (last_key < keys_seen(a.causal, q0, a.Tk)) { return; }

    v2_each(S_rmem, [&](float& s, int r, int n, int e) {
        int i = q0 + (TRANSPOSED ? v2_column(n, e) : v2_row(r));
        int j = k0 + (TRANSPOSED ? v2_row(r) : v2_column(n, e));
        if (j >= keys_seen(a.causal, i, a.Tk)) { s = -INFINITY; }
    });
}
// Does step 2, and multiplies l and O by shrink (steps 3 to 5). S_rmem holds products without the
// scale; c is log2(e) / sqrt(D), and m[r] holds m log2(e). It is lazy: m stays unless the warp has
// a P, exp2(c S_rmem - m[r]), above 2^SLACK; then all the warp's rows take max(m, that of this
// tile). That is exact, as m cancels in O / l and in m + log l, unless P overflows or vanishes.
// Mostly m stays, which saves the exchange between the four lanes of a row and the scaling of O. A
// lane looks at its own columns alone, and __any_sync tells all lanes whether one of them has such
// a P. The first tile with a finite score raises m, which begins with -FLT_MAX.
template <int R, int N, int K>
__device__ void v2_raise_maximum(float (&m)[R], float (&l)[R], float (&O_rmem)[R][N][2],
                                 float (&S_rmem)[R][K][2], float c) {
    float larger[R];
    bool due = false;
    for (float& x : larger) { x = -INFINITY; }
    v2_each(S_rmem, [&](float s, int r, int, int) { larger[r] = fmaxf(larger[r], s); });
    for (int r = 0; r < R; r++) {
        larger[r] = fmaxf(m[r], larger[r] * c);  // m' of this lane's columns, in m's unit
        due |= larger[r] > m[r] + SLACK;
    }
    if (!__any_sync(0xffffffff, due)) { return; }

    for (int r = 0; r < R; r++) {
        larger[r] = fmaxf(larger[r], __shfl_xor_sync(0xffffffff, larger[r], 1));
        larger[r] = fmaxf(larger[r], __shfl_xor_sync(0xffffffff, larger[r], 2));
        float shrink = exp2_approx(m[r] - larger[r]);
        l[r] *= shrink;
        for (auto& o : O_rmem[r]) {
            o[0] *= shrink;
            o[1] *= shrink;
        }
        m[r] = larger[r];
    }
}

// Writes O and L: a block owns queries and loops over the keys that they see.
template <class T, int D, int R>
__global__ void __launch_bounds__(V2_THREADS, 2) flash_v2_forward_kernel(AttentionArgs a) {
    if (!v2_runs<T>(v2_bytes(1, D, R))) { return; }
    constexpr int Bq = v2_own(R), Bk = v2_keys(D), ROW = v2_stride(D);
    extern __shared__ uint4 shared[];
    T* Q_smem = (T*)shared;             // [Bq,ROW]
    T* K_smem = Q_smem + Bq * ROW;      // [2,Bk,ROW]: tiles of even and of odd j
    T* V_smem = K_smem + 2 * Bk * ROW;  // [2,Bk,ROW]
    int head = blockIdx.x, b = head / a.H, h = head % a.H;
    int q0 = (gridDim.y - 1 - blockIdx.y) * Bq;  // those that see most keys start first
    int warp_row = threadIdx.x / WARP * 8 * R;   // the warp's first row of the tile
    auto load = [&](int j) {
        v2_load<D, Bk>(K_smem + j % 2 * Bk * ROW, a.k, b, h, j * Bk);
        v2_load<D, Bk>(V_smem + j % 2 * Bk * ROW, a.v, b, h, j * Bk);
    };
    v2_load<D, Bq>(Q_smem, a.q, b, h, q0);
    load(0);

    float c = a.scale * LOG2_E;
    float O_rmem[R][D / 8][2] = {}, m[R], l[R] = {};  // l: this lane's share of the row's
    for (float& x : m) { x = -FLT_MAX; }
    int keys = keys_seen(a.causal, q0 + Bq - 1, a.Tk);
    for (int j = 0; j * Bk < keys; j++) {
        await_copies();
        // All threads' copies are there. And all warps have read tile j - 1, in whose place j + 1
        // is copied: so one barrier does what flash_v1's two do.
        __syncthreads();
        if ((j + 1) * Bk < keys) { load(j + 1); }
        // No query of the warp sees a key of tile j. The warp still comes to the next barrier.
        if (a.causal && j * Bk > q0 + warp_row + 8 * R - 1) { continue; }

        const T *K_j = K_smem + j % 2 * Bk * ROW, *V_j = V_smem + j % 2 * Bk * ROW;
        float S_rmem[R][Bk / 8][2] = {};
        v2_dot<D>(S_rmem, Q_smem + warp_row * ROW, K_j);  // step 1, but for the scale
        v2_mask<false>(S_rmem, a, q0 + warp_row, j * Bk);
        v2_raise_maximum(m, l, O_rmem, S_rmem, c);  // step 2
        v2_each(S_rmem, [&](float& s, int r, int, int) {
            s = exp2_approx(s * c - m[r]);  // step 3: S becomes P
            l[r] += s;                      // step 4
        });
        v2_add_rows(O_rmem, S_rmem, V_j);  // step 5
    }

    for (int r = 0; r < R; r++) {  // step 6
        l[r] += __shfl_xor_sync(0xffffffff, l[r], 1);
        l[r] += __shfl_xor_sync(0xffffffff, l[r], 2);
        int query = q0 + warp_row + v2_row(r);
        if (threadIdx.x % 4 == 0 && query < a.Tq) {
            a.L[(int64_t)head * a.Tq + query] = m[r] / LOG2_E + logf(l[r]);
        }
        l[r] = 1 / l[r];
    }
    v2_each(O_rmem, [&](float& o, int r, int, int) { o *= l[r]; });
    v2_store<T>(O_rmem, a.o, b, h, q0 + warp_row);
}

// Writes dQ: a block owns queries and loops over the keys that they see.
template <class T, int D, int R>
__global__ void __launch_bounds__(V2_THREADS, 2) flash_v2_dq_kernel(AttentionArgs a) {
    if (!v2_runs<T>(v2_bytes(2, D, R))) { return; }
    constexpr int Bq = v2_own(R), Bk = v2_keys(D), ROW = v2_stride(D);
    extern __shared__ uint4 shared[];
    T* Q_smem = (T*)shared;             // [Bq,ROW]
    T* dO_smem = Q_smem + Bq * ROW;     // [Bq,ROW]
    T* K_smem = dO_smem + Bq * ROW;     // [2,Bk,ROW]: tiles of even and of odd j
    T* V_smem = K_smem + 2 * Bk * ROW;  // [2,Bk,ROW]
    int head = blockIdx.x, b = head / a.H, h = head % a.H;
    int q0 = (gridDim.y - 1 - blockIdx.y) * Bq;  // those that see most keys start first
    int warp_row = threadIdx.x / WARP * 8 * R;   // the warp's first row of the tile
    auto load = [&](int j) {
        v2_load<D, Bk>(K_smem + j % 2 * Bk * ROW, a.k, b, h, j * Bk);
        v2_load<D, Bk>(V_smem + j % 2 * Bk * ROW, a.v, b, h, j * Bk);
    };
    v2_load<D, Bq>(Q_smem, a.q, b, h, q0);
    v2_load<D, Bq>(dO_smem, a.dO, b, h, q0);
    load(0);
    BackwardQuery query[R];
    for (int r = 0; r < R; r++) {
        query[r] = a.queries[(int64_t)head * a.query_rows + q0 + warp_row + v2_row(r)];
    }

    float c = a.scale * LOG2_E;
    float dQ_rmem[R][D / 8][2] = {};
    int keys = keys_seen(a.causal, q0 + Bq - 1, a.Tk);
    for (int j = 0; j * Bk < keys; j++) {
        await_copies();
        __syncthreads();  // tile j is there, and all warps have read tile j - 1
        if ((j + 1) * Bk < keys) { load(j + 1); }
        // No query of the warp sees a key of tile j. The warp still comes to the next barrier.
        if (a.causal && j * Bk > q0 + warp_row + 8 * R - 1) { continue; }

        const T *K_j = K_smem + j % 2 * Bk * ROW, *V_j = V_smem + j % 2 * Bk * ROW;
        float S_rmem[R][Bk / 8][2] = {}, dP_rmem[R][Bk / 8][2];
        v2_dot<D>(S_rmem, Q_smem + warp_row * ROW, K_j);  // step 8's S, but for the scale
        v2_mask<false>(S_rmem, a, q0 + warp_row, j * Bk);
        v2_each(dP_rmem, [&](float& dp, int r, int, int) { dp = -query[r].D_i; });
        v2_dot<D>(dP_rmem, dO_smem + warp_row * ROW, V_j);  // step 10, and step 11's - D_i
        v2_each(dP_rmem, [&](float& dp, int r, int n, int e) {
            // steps 8 and 11: dP becomes dS
            dp *= exp2_approx(S_rmem[r][n][e] * c - query[r].L_log2e);
        });
        v2_add_rows(dQ_rmem, dP_rmem, K_j);  // step 12, but for the scale
    }
    v2_each(dQ_rmem, [&](float& dq, int, int, int) { dq *= a.scale; });
    v2_store<T>(dQ_rmem, a.dq, b, h, q0 + warp_row);
}

// Writes dK and dV: a block owns keys and loops over the queries that see them. S and dP are
// transposed, a row being a key: so P^T and dS^T lie as steps 9 and 13 take them.
template <class T, int D, int R>
__global__ void __launch_bounds__(V2_THREADS, 2) flash_v2_dkv_kernel(AttentionArgs a) {
    if (!v2_runs<T>(v2_bytes(2, D, R))) { return; }
    constexpr int Bk = v2_own(R), Bq = v2_queries(D), ROW = v2_stride(D);
    extern __shared__ uint4 shared[];
    T* K_smem = (T*)shared;              // [Bk,ROW]
    T* V_smem = K_smem + Bk * ROW;       // [Bk,ROW]
    T* Q_smem = V_smem + Bk * ROW;       // [2,Bq,ROW]: tiles of even and of odd i
    T* dO_smem = Q_smem + 2 * Bq * ROW;  // [2,Bq,ROW]
    BackwardQuery* query_smem = (BackwardQuery*)(dO_smem + 2 * Bq * ROW);  // [2,Bq]
    int head = blockIdx.x, b = head / a.H, h = head % a.H;
    int k0 = blockIdx.y * Bk;
    int warp_row = threadIdx.x / WARP * 8 * R;  // the warp's first row of the tile
    auto load = [&](int i) {
        v2_load<D, Bq>(Q_smem + i % 2 * Bq * ROW, a.q, b, h, i * Bq);
        v2_load<D, Bq>(dO_smem + i % 2 * Bq * ROW, a.dO, b, h, i * Bq);
        int two = 2 * threadIdx.x;  // copy_16 copies two: a BackwardQuery has 8 bytes
        if (two < Bq) {
            copy_16(query_smem + i % 2 * Bq + two,
                    a.queries + (int64_t)head * a.query_rows + i * Bq + two, true);
        }
    };
    v2_load<D, Bk>(K_smem, a.k, b, h, k0);
    v2_load<D, Bk>(V_smem, a.v, b, h, k0);
    int first = a.causal ? k0 / Bq : 0;  // tiles above the diagonal stay out
    if (first * Bq < a.Tq) { load(first); }

    float c = a.scale * LOG2_E;
    float dK_rmem[R][D / 8][2] = {}, dV_rmem[R][D / 8][2] = {};
    for (int i = first; i * Bq < a.Tq; i++) {
        await_copies();
        __syncthreads();  // tile i is there, and all warps have read tile i - 1

        const T *Q_i = Q_smem + i % 2 * Bq * ROW, *dO_i = dO_smem + i % 2 * Bq * ROW;
        const BackwardQuery* query = query_smem + i % 2 * Bq;
        float S_rmem[R][Bq / 8][2] = {}, dP_rmem[R][Bq / 8][2];
        v2_dot<D>(S_rmem, K_smem + warp_row * ROW, Q_i);  // step 8's S, but for the scale
        v2_mask<true>(S_rmem, a, i * Bq, k0 + warp_row);
        v2_each(S_rmem, [&](float& s, int r, int n, int e) {
            s = exp2_approx(s * c - query[v2_column(n, e)].L_log2e);  // step 8: S becomes P
        });
        v2_add_rows(dV_rmem, S_rmem, dO_i);  // step 9
        v2_each(dP_rmem, [&](float& dp, int, int n, int e) { dp = -query[v2_column(n, e)].D_i; });
        if ((i + 1) * Bq < a.Tq) { load(i + 1); }  // at the loop's head registers would spill
        v2_dot<D>(dP_rmem, V_smem + warp_row * ROW, dO_i);  // step 10, and step 11's - D_i
        v2_each(dP_rmem, [&](float& dp, int r, int n, int e) {
            dp *= S_rmem[r][n][e];  // step 11: dP becomes dS
        });
        v2_add_rows(dK_rmem, dP_rmem, Q_i);  // step 13, but for the scale
    }
    // Where no query sees these keys the loop did not wait, and K and V are still on their way: a
    // block must not end before its copies.
    await_copies();
    v2_each(dK_rmem, [&](float& dk, int, int, int) { dk *= a.scale; });
    v2_store<T>(dK_rmem, a.dk, b, h, k0 + warp_row);
    v2_store<T>(dV_rmem, a.dv, b, h, k0 + warp_row);
}

// Launches a kernel on `rows` rows; each block owns OWN of them.
template <int OWN>
static void v2_launch(void (*kernel)(AttentionArgs), int rows, size_t bytes,
                      const AttentionArgs& a) {
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    kernel<<<dim3(a.B * a.H, ceil_div(rows, OWN)), V2_THREADS, bytes, stream()>>>(a);
    LAUNCH_CHECK();
}
// Returns how much shared memory a block may have: 64 KB at most where this card runs code that was
// compiled for a T4 (see v2_runs). compiled_for wants a kernel: all of this file's are compiled for
// the same cards, and step 7's has the fewest template arguments.
static size_t v2_memory() {
    const size_t most = shared_memory_per_block();
    return compiled_for(flash_step_7_kernel<fp16>) < 80 ? min<size_t>(most, 64 << 10) : most;
}
// Calls f(zero, D, R): zero has the tensors' type, and the compiler knows their head size D and R.
// A warp owns 8 R rows. R is 4 where a block has the memory and there are more than two blocks for
// each SM (multiprocessor), so that none is idle; else 2.
template <class F>
static void v2_with(const AttentionTensors& t, int matrices, F f) {
    with_head_size(t, [&](auto D) {
        auto with_zero = [&](auto zero) {
            int64_t blocks = t.q.dim(0) * t.q.dim(1) * ceil_div(t.q.dim(2), v2_own(4));
            size_t bytes = v2_bytes(matrices, D, 4);
            if (blocks > 2 * multiprocessors() && bytes <= v2_memory()) {
                f(zero, D, Constant<4>());
            } else {
                f(zero, D, Constant<2>());
            }
        };
        if (t.q.dtype == BF16) { return with_zero(bf16()); }
        with_zero(fp16());
    });
}
static void flash_v2_forward(const AttentionTensors& t) {
    AttentionArgs a = args_of(t);
    v2_with(t, 1, [&](auto zero, auto D, auto R) {
        using T = decltype(zero);
        v2_launch<v2_own(R)>(flash_v2_forward_kernel<T, D, R>, a.Tq, v2_bytes(1, D, R), a);
    });
}
// Writes dQ, then dK and dV. At D = 128 a warp has registers for the sums of 16 rows only.
static void flash_v2_backward(const AttentionTensors& t) {
    Tensor memory;
    AttentionArgs a = step_7(t, &memory);
    v2_with(t, 2, [&](auto zero, auto D, auto chosen) {
        using T = decltype(zero);
        constexpr int R = D == 128 ? 2 : chosen, OWN = v2_own(R);
        size_t bytes = v2_bytes(2, D, R);
        v2_launch<OWN>(flash_v2_dq_kernel<T, D, R>, a.Tq, bytes, a);
        v2_launch<OWN>(flash_v2_dkv_kernel<T, D, R>, a.Tk, bytes, a);
    });
}
// Returns whether this card runs code for tensor cores of this type, and a block may have what
// backward needs with R = 2, the smaller R. (Forward needs less.)
static bool flash_v2_takes(DType t, int64_t D) {
    const int compiled = compiled_for(flash_step_7_kernel<bf16>);
    const bool multiplies = (t == BF16 && compiled >= 80) || (t == F16 && compiled >= 75);
    return multiplies && flash_head_size(D) && v2_bytes(2, (int)D, 2) <= v2_memory();
}
static bool flash_v1_takes(DType, int64_t D) { return flash_head_size(D); }
#endif

// -------------------------------------------------------------------------------------------------
// 1.3.2, the table of implementations: dispatch, commands, benchmarks and tests walk it. Its first
// rows are attention.cu's, naive (rung 10) and fused (20). Those of flash, fast/'s among them, are:
//   rung  name        takes                                               file
//   30    tiled       the CPU, fp32                                       flash.cu
//   30    flash_v1    every card, every type; in mode flash not fp16      flash.cu
//   40    flash_v2    bf16 from sm_80, fp16 from sm_75 (there not D 128)  flash.cu
//   50    flash_fp32  fp32 from sm_80                                     fast/flash_fp32.cu
//   60    hopper      bf16 on sm_90                                       fast/flash_hopper.cu

static bool only_fp32(DType t, int64_t) { return t == F32; }
// A new head size, a multiple of 16 up to 128, goes here and into with_head_size (attention.h),
// into ACROSS of v2_load, into flash_leaderboard's error, and, by the registers that v2_keys speaks
// of, into v2_keys, v2_queries and R of flash_v2_backward. In fast/ static_asserts tell the rest.
bool flash_head_size(int64_t D) { return D == 16 || D == 32 || D == 64 || D == 80 || D == 128; }

static const AddRow<AttentionImpl> flash_impls[] = {
    {{"tiled", CPU, 30, only_fp32, nullptr, flash_forward_cpu, flash_backward_cpu}},
#ifdef HAVE_CUDA
    {{"flash_v1", CUDA, 30, flash_v1_takes, nullptr, flash_v1_forward, flash_v1_backward}},
    {{"flash_v2", CUDA, 40, flash_v2_takes, nullptr, flash_v2_forward, flash_v2_backward}},
#endif
};

// Returns the last row that takes this and has both passes by hand; null if there is none. In fp16
// flash_v1 is no choice on the GPU: fused, on tensor cores, is faster.
const AttentionImpl* fastest_flash(Device device, DType dtype, int64_t D) {
    const AttentionImpl* best = nullptr;
    for (const AttentionImpl& impl : table_of<AttentionImpl>()) {
        if (impl.forward && impl.device == device && impl.takes(dtype, D)) { best = &impl; }
    }
    if (best && best->name == string("flash_v1") && dtype == F16) { return nullptr; }
    return best;
}

// Returns fastest_flash's row; it is a usage error if there is none. On META it looks for the
// device that is planned for. The CPU's row takes fp32 alone, but a plan, which calls no row, may
// count any dtype.
const AttentionImpl& require_flash(Device device, DType dtype, int64_t D) {
    DType taken = dtype;
    if (device == META) {
        device = context.planned_for;
        if (device == CPU) { taken = F32; }
    }
    const AttentionImpl* impl = fastest_flash(device, taken, D);
    if (!impl) {
        usage_error(
            "mode flash: no FlashAttention on %s for %s and head size %ld; --mode fused takes them "
            "all",
            name_of(device), name_of(dtype), (long)D);
    }
    return *impl;
}

// Returns part `which` of x [B,T,parts*C] as [B,H,T,D], by strides.
static Tensor heads_view(const Tensor& x, int which, int parts, int H) {
    const int64_t B = x.dim(0), T = x.dim(1), C = x.dim(2) / parts, D = C / H;
    Tensor t = detached(x);
    t.data += which * C * size_of(x.dtype);
    t.shape = {B, H, T, D};
    t.stride = {T * parts * C, D, parts * C, 1};
    return t;
}

// Returns the heads of qkv [B,T,3C], o [B,T,C] and L, for causal attention.
static AttentionTensors tensors_of(const Tensor& qkv, int H, const FlashOutputs& out) {
    AttentionTensors t{heads_view(qkv, 0, 3, H), heads_view(qkv, 1, 3, H), heads_view(qkv, 2, 3, H),
                       true};
    t.o = heads_view(out.o, 0, 1, H);
    t.L = out.L;
    return t;
}
FlashOutputs flash_outputs(const Tensor& qkv, int H) {
    const int64_t B = qkv.dim(0), T = qkv.dim(1), C = qkv.dim(2) / 3;
    const AttentionImpl& impl = require_flash(qkv.device(), qkv.dtype, C / H);
    const FlashOutputs out{empty({B, T, C}, qkv.dtype), empty({B, H, T}, F32)};
    run_pass(impl.forward, tensors_of(qkv, H, out));
    return out;
}
// Returns O [B,T,C] of causal attention on qkv [B,T,3C], for the model. The backward is recorded as
// one step of the tape.
Tensor flash_self_attention(const Tensor& qkv, int H) {
    Range range("attention");
    // fast_ways.flash_outputs gives what flash_outputs() gives: see fast_ways.h.
    const FlashOutputs out =
        fast_ways.flash_outputs ? fast_ways.flash_outputs(qkv, H) : flash_outputs(qkv, H);

    Tensor o = out.o;
    const AttentionTensors t = tensors_of(qkv, H, out);
    const AttentionImpl& impl = require_flash(qkv.device(), qkv.dtype, t.q.dim(3));
    record(o, {qkv}, [t, H, &impl, g = qkv.gradient](const Tensor& dO) {
        AttentionTensors backward = t;
        Tensor dqkv = empty(g->shape, g->dtype);
        backward.dO = heads_view(contiguous(dO), 0, 1, H);
        backward.dq = heads_view(dqkv, 0, 3, H);
        backward.dk = heads_view(dqkv, 1, 3, H);
        backward.dv = heads_view(dqkv, 2, 3, H);
        run_pass(impl.backward, backward);
        add_gradient(g, dqkv);
    });
    return o;
}
