// fast/flash.h: what the fast attention kernels share. Steps are attention.cu's. In these files
//   - a block owns one tile of rows (queries, or keys and values) and streams the tiles of the other side past them;
//   - where a kernel walks over tiles, i is a tile of queries and j one of keys; a single one is `query` or `key`;
//   - m, n and k run along a product's M, N and K, as in mma's name m16n8k16.
#pragma once
#include "cs336.h"
#include "lib/gpu.h"

#ifdef __CUDACC__
#include <algorithm>

// What a kernel's body is made of may be missing in the architecture that it is compiled for. The body is then empty,
// and compiled_for() tells `takes` not to offer it.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define HAS_CP_ASYNC  // and mma.sync of 16x8x16
#endif
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA
#endif
// The compute capability (80, 90, ...) of the code that this card runs for a kernel; 0 without a card or code for it.
template <class... P>
int compiled_for(void (*kernel)(P...)) {
    if (cuda_devices() == 0) { return 0; }
    static std::map<void (*)(P...), int> known;  // each launch with EARLY asks
    auto found = known.find(kernel);
    if (found != known.end()) { return found->second; }
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
        cudaGetLastError();  // it would be reported as the next launch's
        return known[kernel] = 0;
    }
    CUDA_CHECK(error);
    return known[kernel] = attributes.ptxVersion;
}

// ---------------------------------------------------------------------------------------------------------------------
// Launching

// Attention's kernels: block (x, y, z) owns tile y of head z gridDim.x + x. Blocks start in the order x, y, z: of
// gridDim.x heads all first tiles, then all second ones. A head's blocks stream the same K and V past themselves
// (backward: Q and dO, and add to the same dQ): the fewer heads are at work, the more of that comes from the L2 cache.
// But causal, the first tile takes twice the mean, and until it is over, the others have to keep the device busy, which
// runs `blocks` blocks on an SM. Fails above 65,535 tiles (4.19 million queries or keys in tiles of 64).
inline dim3 attention_grid(const AttentionArgs& a, int tiles, int blocks = 1) {
    constexpr int MOST = 65535;  // of y and z
    if (tiles > MOST) { fail("attention: %d tiles of queries or keys, at most %d are possible", tiles, MOST); }
    int heads = a.B * a.H;
    int together = std::max(a.causal ? 2 * multiprocessors() * blocks / std::max(tiles, 1) : 1, ceil_div(heads, MOST));
    while (together < heads && heads % together != 0) { together++; }
    together = std::min(together, heads);
    return dim3(together, tiles, heads / together);
}
__device__ __forceinline__ int head_of_block(int z = blockIdx.z) { return z * gridDim.x + blockIdx.x; }

inline size_t shared_memory_per_block() {  // 99 KB on compute capability 8.6, 8.9 and 12.0, A100 163, H100 227
    int device, bytes;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return bytes;
}
// Programmatic dependent launch (EARLY): on compute capability 9.0 a kernel launched so may start when all blocks of
// the kernel before it in the stream have called let_next_kernel_start() or ended. What that kernel writes it may read,
// and what that kernel uses overwrite, only after await_previous_kernel(), which waits for that kernel's end. (Kernels
// further back have ended, if that one was not launched so itself, or called await_previous_kernel() first.)
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
template <bool EARLY = false, class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, int threads, size_t shared_bytes, const A&... args) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes));
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes;
    config.stream = stream(), config.attrs = &early, config.numAttrs = EARLY && compiled_for(kernel) == 90;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
    LAUNCH_CHECK();
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward with tensor cores: `before` and `after` are kernels of fast/flash_mma.cu; the main kernel between them is
// that file's own or another.

// What lies between the kernels: dq in the order in which the main kernel's lanes hold it, and for each two queries
// L log2(e) of both, then D_i of both. Rows beyond Tq have L = inf, which makes their P 0.
struct BackwardWorkspace {
    float* dq;      // [B*H, rows/16, D/8, 128]; null in a deterministic backward
    float4* stats;  // [B*H, rows/2]
    int rows;       // Tq rounded up to a multiple of 128
};
// Step 7 and the zeros that step 12 adds to. The workspace lies in `memory`.
BackwardWorkspace backward_begin(const AttentionTensors& t, Tensor& memory);
void backward_end(const AttentionTensors& t, const BackwardWorkspace& w);  // dq, scaled and rounded, to t.dq
void flash_mma_backward(const AttentionTensors& t);
bool dq_order_of_sm_90();  // whether `before` and `after` were compiled for it: its order of dq is another

// ---------------------------------------------------------------------------------------------------------------------
// Arithmetic and copies

constexpr float LOG2_E = 1.4426950408889634f;  // exp(x) = exp2(x log2 e), and exp2 is what the GPU has
// With tensor cores step 2 is lazy. Any m gives the same O and L as long as nothing overflows, so what is subtracted
// from a row's scores follows their maximum only when one exceeds it by more than SLACK powers of two. P <= 256 then:
// far from the limits of fp16 and of fp32 sums.
constexpr float SLACK = 8;
__device__ __forceinline__ float exp2_approx(float x) {  // 2 ulp; results below 2^-126 become 0; exp2(-inf) = 0
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
template <class T>  // bf16 or fp16: two floats rounded and packed, the first in the low half
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t r;
    if constexpr (std::is_same<T, bf16>::value) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    }
    return r;
}
// 16 bytes from global to shared memory without passing through registers; zeros if !valid. Asynchronous.
__device__ __forceinline__ void cp_async_16(void* smem, const void* global, bool valid) {
    uint32_t to = (uint32_t)__cvta_generic_to_shared(smem);
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>  // waits until at most the N newest groups of this thread are pending
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
#endif
