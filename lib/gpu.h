// lib/gpu.h: what several files' kernels share: packs of neighbours, the launch of a kernel, sums
// and maxima over a warp or a block.
#pragma once
#include "lib.h"

// W neighbours that a thread loads or stores at once. A kernel that is bound by memory gains from
// it: its accesses have 16 bytes instead of 2 or 4. To read such a kernel, take W = 1: then a pack
// is an element.
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
// lib/device.cu: of the current device, or of an H100 where META plans for a GPU and none is here.
int multiprocessors();
int compute_capability();  // 75 for 7.5

// The most that a block can have: 99 KB on compute capability 8.6, 8.9 and 12.0, A100 163, H100 227
inline size_t shared_memory_per_block() {
    int device, bytes;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return bytes;
}
// Returns the compute capability (80, 90, ...) of the code that this card runs for a kernel; 0
// without a card or code for it.
template <class... P>
int compiled_for(void (*kernel)(P...)) {
    static map<void (*)(P...), int> known;  // each launch may ask
    auto [found, is_new] = known.insert({kernel, 0});
    if (!is_new || cuda_devices() == 0) { return found->second; }

    cudaFuncAttributes attributes = {};
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
        cudaGetLastError();  // it would be reported as the next launch's
        error = cudaSuccess;
    }
    CUDA_CHECK(error);
    return found->second = attributes.ptxVersion;
}

// lib/matmul.cu: starts cuBLAS and allocates its workspace; without this the first product does.
void start_cublas();

// Runs kernel<<<grid, threads>>>(arguments) in the compute stream and checks that it was launched.
// A kernel whose name has a comma, as in kernel<T, 4>, stands in parentheses.
#define LAUNCH(kernel, grid, threads, ...)                   \
    do {                                                     \
        kernel<<<grid, threads, 0, stream()>>>(__VA_ARGS__); \
        LAUNCH_CHECK();                                      \
    } while (0)

#ifdef HAVE_NCCL
// lib/ranks.cu: what NCCL's ways are made of.
#define WITH_NCCL
#include <nccl.h>
struct Lane {  // a communicator of NCCL's, and the stream where its collectives run in order
    ncclComm_t nccl = nullptr;
    cudaStream_t stream = nullptr;
};
Lane open_lane(const Communicator& c, ncclConfig_t* config);  // collective
void close_lane(Lane& lane);
// Queues a collective in a lane, behind `ready`, a mark of any stream, and sets its work's marks.
void enqueue(const Communicator& c, const Lane& lane, Work& work, const Collective& x,
             const Mark& ready);
void await(cudaStream_t s, const Mark& m);  // the stream waits until the mark is reached
void nccl_check(ncclResult_t result, const char* call);
#define NCCL_CHECK(call) nccl_check(call, #call)
#endif

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
// Reduces x over a block of at most 32 warps and returns the result to every thread. of_nothing:
// the result of no x at all (0 for a sum).
template <float (*over_warp)(float)>
__device__ inline float over_block(float x, float of_nothing) {
    __shared__ float shared[WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int warps = (blockDim.x + WARP - 1) / WARP;
    x = over_warp(x);
    __syncthreads();  // a slow warp may still read `shared` from the call before
    if (lane == 0) { shared[warp] = x; }
    __syncthreads();  // every warp's part must be there
    return over_warp(lane < warps ? shared[lane] : of_nothing);
}
__device__ inline float block_sum(float x) { return over_block<warp_sum>(x, 0); }
__device__ inline float block_max(float x) { return over_block<warp_max>(x, -INFINITY); }
#else
// Without nvcc there is no CUDA tensor, so nothing ever comes to a launch.
#define LAUNCH(...) fail("this build is for the CPU only")
#endif
