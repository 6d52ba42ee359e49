// fast_flash.h: what the fast attention kernels share.
#pragma once
#include "gpu.h"

#ifdef __CUDACC__
constexpr float LOG2_E = 1.4426950408889634f;  // exp(x) = exp2(x log2 e), and exp2 is what the GPU has
// Attention's kernels: block (x, y, z) owns tile y of head z gridDim.x + x. Blocks start in the order x, y, z: of
// gridDim.x heads all first tiles, then all second ones. A head's blocks stream the same K and V past themselves
// (backward: Q and dO, and add to the same dQ): the fewer heads are at work, the more of that comes from the L2 cache.
// But causal, the first tile takes twice the mean, and until it is over, the others have to keep the device busy, which
// runs `blocks` blocks on an SM. Fails above 65,535 tiles (4.19 million queries or keys in tiles of 64).
dim3 attention_grid(const AttentionArgs& a, int tiles, int blocks = 1);
__device__ __forceinline__ int head_of_block(int z = blockIdx.z) { return z * gridDim.x + blockIdx.x; }
// What lies between the backward's kernels: dq in the order in which the main kernel's lanes hold it, and for each
// two queries L log2(e) of both, then D_i of both. Rows beyond Tq have L = inf, which makes their P 0.
struct BackwardWorkspace {
    float* dq;      // [B*H, rows/16, D/8, 128]
    float4* stats;  // [B*H, rows/2]
    int rows;       // Tq rounded up to a multiple of 128
};
// fast_flash_mma.cu: the backward with another main kernel between `before` and `after`; null: its own.
void flash_mma_backward_around(const AttentionTensors& t,
                               void (*main)(const AttentionArgs& a, const BackwardWorkspace& w, int D, DType dtype));
bool is_hopper();  // fast_flash_hopper.cu: compute capability 9.0
// Programmatic dependent launch: on compute capability 9.0 a kernel launched so may start when all blocks of the kernel
// before it in the stream have called let_next_kernel_start() or ended. What that kernel writes it may read, and what
// that kernel uses overwrite, only after await_previous_kernel(), which waits for that kernel's end. (Kernels further
// back have ended, if that one was not launched so itself, or called await_previous_kernel() first.)
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
template <class... P, class... A>
void launch_early(void (*kernel)(P...), dim3 grid, int threads, size_t bytes, const A&... args) {
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = bytes, config.stream = stream();
    config.attrs = &early, config.numAttrs = is_hopper();
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
    LAUNCH_CHECK();
}
// What several attention kernels share. Step 2 of fast_flash_mma.cu is lazy: what is subtracted from a row's scores
// follows their maximum only when one exceeds it by more than SLACK powers of two. So P <= 256: far from the limits of
// fp16 and of fp32 sums.
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
