// lib/gpu.h: what several files' kernels share.
#pragma once
#include "lib.h"

// For kernels that are bound by memory: a thread takes W neighbours at a time, by accesses of 16
// bytes instead of 2 or
// 4. To read such a kernel, take W = 1: then a pack is an element.
template <class T, int W>
struct alignas(W * sizeof(T) < 16 ? W * sizeof(T) : 16) Pack {
    T x[W];
};
template <int W, class T>
HD inline Pack<T, W> load_pack(const T* from) {
    return *(const Pack<T, W>*)from;
}
template <int W, class T>
HD inline void store_pack(T* to, const Pack<T, W>& pack) {
    *(Pack<T, W>*)to = pack;
}

#ifdef __CUDACC__
// lib/device.cu: of the current device; an H100's where META plans for a GPU and none is here
int multiprocessors();
int compute_capability();  // 75 for 7.5

void start_cublas();  // lib/matmul.cu: with its workspace; else the first product does

// kernel<<<grid, threads>>>(arguments) in the compute stream, checked. A kernel with a comma stands
// in parentheses.
#define LAUNCH(kernel, grid, threads, ...)                   \
    do {                                                     \
        kernel<<<grid, threads, 0, stream()>>>(__VA_ARGS__); \
        LAUNCH_CHECK();                                      \
    } while (0)

constexpr int WARP = 32;
inline int ceil_div(int64_t a, int64_t b) { return (int)((a + b - 1) / b); }
__device__ inline float warp_sum(float x) {
    for (int o = WARP / 2; o > 0; o /= 2) { x += __shfl_xor_sync(0xffffffff, x, o); }
    return x;
}
__device__ inline float warp_max(float x) {
    for (int o = WARP / 2; o > 0; o /= 2) { x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, o)); }
    return x;
}
// Over a block of at most 32 warps, given to every thread. The first barrier: a slow warp may still
// read `shared` from the call before.
template <float (*over_warp)(float)>
__device__ inline float over_block(float x, float of_nothing) {
    __shared__ float shared[WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP,
        warps = (blockDim.x + WARP - 1) / WARP;
    x = over_warp(x);
    __syncthreads();
    if (lane == 0) { shared[warp] = x; }
    __syncthreads();
    return over_warp(lane < warps ? shared[lane] : of_nothing);
}
__device__ inline float block_sum(float x) { return over_block<warp_sum>(x, 0); }
__device__ inline float block_max(float x) { return over_block<warp_max>(x, -INFINITY); }

// Runs f(T(), W): W elements of the dtype are 16 bytes where n, of which all rows' lengths are
// multiples, and the addresses allow that, else W is `least`.
template <int least = 1, class Fn>
void with_packs(DType dtype, int64_t n, const std::vector<const void*>& addresses, Fn f) {
    with_gpu_type(dtype, [&](auto zero) {
        constexpr int W = 16 / sizeof(zero);
        bool fits = n % W == 0;
        for (const void* address : addresses) { fits = fits && (uintptr_t)address % 16 == 0; }
        fits ? f(zero, std::integral_constant<int, W>())
             : f(zero, std::integral_constant<int, least>());
    });
}
constexpr int PACK_THREADS = 640;  // at most; a row of d_model 2560 in fp32 is one pack per thread
// For a row of so many packs: each thread takes the same number of them, as far as whole warps
// allow.
inline int threads_for(int64_t packs) {
    return WARP * ceil_div(packs, WARP * ceil_div(packs, PACK_THREADS));
}
#else
// Without nvcc nothing ever comes to a launch.
#define LAUNCH(...) fail("this build is for the CPU only")
template <int least = 1, class Fn>
void with_packs(DType, int64_t, const std::vector<const void*>&, Fn) {
    LAUNCH();
}
#endif
