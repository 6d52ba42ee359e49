// fast/flash.h: what the fast attention kernels share: how they are launched, arithmetic and
// copies, and the two small kernels before and after a backward on tensor cores. Steps are
// flash.cu's: read those first. In these files
//   - a block owns one tile of rows (queries, or keys and values) and streams the tiles of the
//     other side past them;
//   - where a kernel walks over tiles, i is a tile of queries and j one of keys; a single one is
//     `query` or `key`;
//   - m, n and k run along a product's M, N and K, as in mma's name m16n8k16;
//   - loops of constant length are unrolled, so that arrays are registers; a pragma says so where
//     nvcc would not do it.
#pragma once
#include "attention.h"
#include "lib/gpu.h"

#ifdef __CUDACC__

#define DEVICE __device__ __forceinline__  // a function that becomes part of its kernels

// What a kernel's body is made of may be missing in the architecture that it is compiled for. The
// body is then empty, and compiled_for() tells `takes` not to offer it.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define HAS_CP_ASYNC  // and mma.sync of 16x8x16
#endif
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA
#endif
// Returns the grid of attention's kernels: block (x, y, z) owns tile y of head z gridDim.x + x.
// Blocks start in the order x, y, z: of gridDim.x heads all first tiles, then all second ones. A
// head's blocks stream the same K and V past themselves (backward: Q and dO, and add to the same
// dQ): the fewer heads are at work, the more of that comes from the L2 cache. But causal, the first
// tile takes twice the mean, and until it is over, the others have to keep the device busy, which
// runs `blocks` blocks on an SM.
inline dim3 attention_grid(const AttentionArgs& a, int tiles, int blocks = 1) {
    constexpr int MOST = 65535;  // of y and z
    int heads = a.B * a.H;
    int together =
        std::max(a.causal ? 2 * multiprocessors() * blocks / tiles : 1, ceil_div(heads, MOST));
    while (together < heads && heads % together != 0) { together++; }
    together = std::min(together, heads);
    return dim3(together, tiles, heads / together);
}
DEVICE int head_of_block(int z = blockIdx.z) { return z * gridDim.x + blockIdx.x; }

// Programmatic dependent launch (EARLY): on compute capability 9.0 a kernel launched so may start
// when all blocks of the kernel before it in the stream have called let_next_kernel_start() or
// ended. What that kernel writes it may read, and what that kernel uses overwrite, only after
// await_previous_kernel(), which waits for that kernel's end. (Kernels further back have ended, if
// that one was not launched so itself, or called await_previous_kernel() first.)
DEVICE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Launches a kernel in the compute stream, checked, with so many bytes of dynamic shared memory.
template <bool EARLY = false, class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, int threads, size_t shared_bytes, const A&... args) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)shared_bytes));
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream();
    config.attrs = &early;
    config.numAttrs = EARLY && compiled_for(kernel) == 90;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
    LAUNCH_CHECK();
}

// -------------------------------------------------------------------------------------------------
// Arithmetic and copies

DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>  // waits until at most the N newest groups of this thread are pending
DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// Returns how many threads move one row, 8 elements each: a power of two, so for D = 80 6 of 16
// stand by.
HD constexpr int row_threads(int D) {
    int threads = 2;
    while (threads * 8 < D) { threads *= 2; }
    return threads;
}

// -------------------------------------------------------------------------------------------------
// Backward with tensor cores takes three kernels: `before`, the main one of fast/flash_mma.cu or of
// fast/flash_hopper.cu, and `after`. The lanes of a warp hold the results of mma and of wgmma in
// the same order.
//   before   step 7, and a zeroed fp32 dQ
//   main     a block owns Bk keys and streams tiles of Bq queries past them: steps 8 to 13, of
//            which step 12 adds to dQ by atomics, since the other blocks of this head add to the
//            same rows
//   after    dQ, times the scale, as bf16

// What lies between the kernels: dq in the order in which the main kernel's lanes hold it, and for
// each two queries L log2(e) of both, then D_i of both. Rows beyond Tq have L = inf, which makes
// their P 0.
struct BackwardWorkspace {
    float* dq;      // [B*H, rows/16, D/8, 128]
    float4* stats;  // [B*H, rows/2]
    int rows;       // Tq rounded up to a multiple of BACKWARD_PAD, which is one of every tile
};
constexpr int BACKWARD_PAD = 128;

// Returns where element i of a lane's four lies in a 16x8 block of dQ: row lane/4 + 8(i/2), column
// 2(lane%4) + i%2. One vector add of a warp, or one scalar add, touches neighbouring addresses
// only.
DEVICE int dq_index(int lane, int i) {
#if __CUDA_ARCH__ >= 900
    return lane * 4 + i;
#else
    return i * WARP + lane;
#endif
}
DEVICE void add_dq(float* block, int lane, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    atomicAdd((float4*)(block + dq_index(lane, 0)), make_float4(x[0], x[1], x[2], x[3]));
#else
    for (int i = 0; i < 4; i++) { atomicAdd(block + dq_index(lane, i), x[i]); }
#endif
}
// x[c] becomes what lane 4r + c holds of a block: in both orders four float4.
DEVICE void load_dq(float (&x)[4][4], const float4* block, int r) {
    for (int k = 0; k < 4; k++) {
#if __CUDA_ARCH__ >= 900
        float4 four = block[4 * r + k];  // one lane's
        x[k][0] = four.x;
        x[k][1] = four.y;
        x[k][2] = four.z;
        x[k][3] = four.w;
#else
        float4 four = block[k * (WARP / 4) + r];  // of each lane one
        x[0][k] = four.x;
        x[1][k] = four.y;
        x[2][k] = four.z;
        x[3][k] = four.w;
#endif
    }
}

// ---- before: row_threads(D) threads take two neighbouring rows ----
template <int D>
static __global__ void backward_before(AttentionArgs a, BackwardWorkspace w) {
#ifdef HAS_CP_ASYNC
    constexpr int GROUP = row_threads(D);
    let_next_kernel_start();
    int64_t index = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, pair = index / GROUP;
    int bh = (int)(2 * pair / w.rows), i = (int)(2 * pair % w.rows), n = (int)(index % GROUP);
    uint4 o[2] = {}, dO[2] = {};
    auto load = [&](const Heads& x, int row) {
        return *(const uint4*)(head_of<const bf16>(x, bh / a.H, bh % a.H) + row * x.row + n * 8);
    };
    if (n < D / 8) {
        for (int r = 0; r < 2; r++) {
            if (i + r >= a.Tq) { continue; }
            o[r] = load(a.o, i + r);
            dO[r] = load(a.dO, i + r);
        }
        // a warp's stores lie side by side; a row's order in dq is another
        for (int k = 0; k < 4; k++) {
            ((float4*)(w.dq + 2 * pair * D))[k * (D / 8) + n] = make_float4(0, 0, 0, 0);
        }
    }
    float sum[2] = {};
    for (int r = 0; r < 2; r++) {
        for (int e = 0; e < 8; e++) {
            sum[r] += ((const bf16*)&o[r])[e] * ((const bf16*)&dO[r])[e];
        }
        // The grid ends with a whole block: w.rows is a multiple of 128. So all lanes are here.
        for (int s = GROUP / 2; s > 0; s /= 2) { sum[r] += __shfl_xor_sync(0xffffffff, sum[r], s); }
    }
    if (n == 0) {
        auto L = [&](int row) {
            return row < a.Tq ? a.L[(int64_t)bh * a.Tq + row] * LOG2_E : INFINITY;
        };
        w.stats[pair] = make_float4(L(i), L(i + 1), sum[0], sum[1]);
    }
#endif
}

// ---- after: a thread writes 8 elements of two rows, r and r + 8 of a block: what four lanes hold
// of it ----
template <int D>
static __global__ void backward_after(AttentionArgs a, BackwardWorkspace w) {
#ifdef HAS_CP_ASYNC
    await_previous_kernel();
    int64_t index = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, tile = index / D;  // of 16 rows
    int n = (int)(index % (D / 8)), r = (int)(index / (D / 8) % 8);
    int bh = (int)(tile / (w.rows / 16)), i = (int)(tile % (w.rows / 16)) * 16 + r;
    if (bh >= a.B * a.H) { return; }
    const float4* block = (const float4*)w.dq + (tile * (D / 8) + n) * WARP;
    float x[4][4];
    load_dq(x, block, r);
    for (int half = 0; half < 2; half++) {
        uint32_t out[4];
        for (int c = 0; c < 4; c++) {
            out[c] = pack(x[c][2 * half] * a.scale, x[c][2 * half + 1] * a.scale);
        }
        int row = i + 8 * half;
        bf16* dq = head_of<bf16>(a.dq, bh / a.H, bh % a.H) + row * a.dq.row + n * 8;
        if (row < a.Tq) { *(uint4*)dq = make_uint4(out[0], out[1], out[2], out[3]); }
    }
#endif
}

// Returns the workspace, which lies in `memory`, after `before` was launched to fill it.
template <int D>
static BackwardWorkspace backward_begin(const AttentionArgs& a, Tensor& memory) {
    BackwardWorkspace w;
    w.rows = ceil_div(a.Tq, BACKWARD_PAD) * BACKWARD_PAD;
    int64_t rows = (int64_t)a.B * a.H * w.rows;
    memory = empty_on(CUDA, {rows * D + 2 * rows}, F32, WORKSPACE);
    w.dq = memory.as<float>();
    w.stats = (float4*)(w.dq + rows * D);
    launch(backward_before<D>, ceil_div(rows / 2 * row_threads(D), 128), 128, 0, a, w);
    return w;
}
// Launches `after`, which stores dq, scaled and rounded, to a.dq.
template <int D>
static void backward_end(const AttentionArgs& a, const BackwardWorkspace& w) {
    int64_t threads = (int64_t)a.B * a.H * w.rows / 2 * (D / 8);
    launch<true>(backward_after<D>, ceil_div(threads, 256), 256, 0, a, w);
}
#endif
