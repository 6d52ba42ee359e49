// lib/gpu.h: what several files' kernels share: packs of neighbours, the launch of a kernel, sums
// and maxima over a warp or a block, and single instructions (LDMATRIX and mma are flash_v2's).
#pragma once
#include "lib.h"

// W neighbours that a thread loads or stores at once. A kernel that is bound by memory gains from
// it: its accesses have up to 16 bytes instead of 2 or 4. To read such a kernel, take W = 1: then a
// pack is an element.
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

#ifdef HAVE_CUDA
// lib/device.cu: of the current device, or of an H100 where META plans for a GPU and none is here.
int multiprocessors();
int compute_capability();  // 75 for 7.5
// The most that a block can have: 99 KB on 8.6, 8.9 and 12.0, A100 163, H100 227; 0 without a card
size_t shared_memory_per_block();
// Returns the compute capability (80, 90, ...) of the code that this card runs for a kernel; 0
// without a card or code for it.
template <class... P>
int compiled_for(void (*kernel)(P...)) {
    static map<void (*)(P...), int> known;  // each launch may ask
    if (known.count(kernel) > 0) { return known[kernel]; }
    if (cuda_devices() == 0) { return 0; }

    cudaFuncAttributes attributes = {};
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
        cudaGetLastError();  // it would be reported as the next launch's
        error = cudaSuccess;
    }
    CUDA_CHECK(error);
    return known[kernel] = attributes.ptxVersion;
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
// lib/ranks.cu: what NCCL's ways are made of. The Makefile defines HAVE_NCCL for lib/ranks.cu and
// fast/collectives.cu alone. WITH_NCCL: and this is a build for GPUs.
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
void nccl_check(ncclResult_t result, const char* call);
#define NCCL_CHECK(call) nccl_check(call, #call)
#endif
#else
// Without nvcc there is no CUDA tensor, so nothing ever comes to a launch.
#define LAUNCH(...) fail("this build is for the CPU only")
#endif

inline int ceil_div(int64_t a, int64_t b) { return (int)((a + b - 1) / b); }

#ifdef __CUDACC__  // a file with kernels
constexpr int WARP = 32;
// Returns the number of this thread among all of a grid of one dimension.
__device__ inline int64_t thread_number() { return blockIdx.x * (int64_t)blockDim.x + threadIdx.x; }
// 0xffffffff: all 32 lanes take part.
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

// -------------------------------------------------------------------------------------------------
// Instructions that C++ has no word for. PTX is the language of the lines in quotes.

// exp(x) = exp2(x log2 e), and exp2 is what the GPU has
constexpr float LOG2_E = 1.4426950408889634f;
__device__ inline float exp2_approx(float x) {  // 2 ulp; below 2^-126 it is 0; exp2(-inf) = 0
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// Returns two numbers rounded to bf16 or fp16, the first in the low half.
template <class T = bf16>
__device__ uint32_t pack(float low, float high) {
    if constexpr (is_same_v<T, bf16>) {
        __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
        return *(uint32_t*)&two;
    } else {
        __half2 two = __floats2half2_rn(low, high);
        return *(uint32_t*)&two;
    }
}
// Returns the address of something in shared memory, as instructions take it.
__device__ inline uint32_t smem_address(const void* smem) {
    return (uint32_t)__cvta_generic_to_shared(smem);
}
// Starts to copy 16 bytes from global to shared memory, without passing through registers; zeros if
// !valid. They are there for this thread after await_copies(), for others after a barrier. Both
// addresses are multiples of 16. (A T4 copies at once.)
__device__ inline void copy_16(void* smem, const void* global, bool valid) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(smem)),
                 "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
#else
    *(uint4*)smem = valid ? *(const uint4*)global : make_uint4(0, 0, 0, 0);
#endif
}
__device__ inline void await_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
// ldmatrix and mma cut matrices of 16-bit numbers into squares of 8x8. Lane l has two neighbours of
// a square, columns l % 4 * 2 and the next of row l / 4, in one register.

// Loads four squares from shared memory; with how = ".trans" each transposed, else "". Lane l
// points to row l % 8 of square l / 8.
#define LDMATRIX(how, square, row_smem)                                                 \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" how ".shared.b16 {%0,%1,%2,%3}, [%4];" \
                 : "=r"(square[0]), "=r"(square[1]), "=r"(square[2]), "=r"(square[3])   \
                 : "r"(row_smem)                                                        \
                 : "memory")
// One instruction of mma(), on its arguments. A_REGISTERS and B_REGISTERS: which of them it takes;
// %4 to %7 are a, %8 and %9 are b_upper and b_lower.
#define MMA(SHAPE_AND_TYPES, A_REGISTERS, B_REGISTERS)                                  \
    asm volatile("mma.sync.aligned." SHAPE_AND_TYPES ".f32 {%0,%1,%2,%3}, " A_REGISTERS \
                 ", " B_REGISTERS ", {%0,%1,%2,%3};"                                    \
                 : "+f"(upper[0]), "+f"(upper[1]), "+f"(lower[0]), "+f"(lower[1])       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_upper), "r"(b_lower))
// Adds A B, of bf16 or fp16, to 16x8 sums: upper has rows 0 to 7, lower rows 8 to 15. A is 16x16:
// a[0] is its upper left square, a[1] the lower left, a[2] the upper right, a[3] the lower right.
// B is 16x8: b_upper has rows 0 to 7, b_lower rows 8 to 15. A lane holds two neighbours of a column
// of B, so ldmatrix has to load squares of B^T.
template <class T>
__device__ void mma(float (&upper)[2], float (&lower)[2], const uint32_t (&a)[4], uint32_t b_upper,
                    uint32_t b_lower) {
#if __CUDA_ARCH__ >= 800
    if constexpr (is_same_v<T, bf16>) {
        MMA("m16n8k16.row.col.f32.bf16.bf16", "{%4,%5,%6,%7}", "{%8,%9}");
    } else {
        MMA("m16n8k16.row.col.f32.f16.f16", "{%4,%5,%6,%7}", "{%8,%9}");
    }
#else  // a T4 knows fp16 only, and takes half of A and B at once
    MMA("m16n8k8.row.col.f32.f16.f16", "{%4,%5}", "{%8}");
    MMA("m16n8k8.row.col.f32.f16.f16", "{%6,%7}", "{%9}");
#endif
}
#endif

// Runs op_cpu(arguments) on the CPU, else op_kernel(arguments) in so many blocks of the file's
// ROW_THREADS. The caller has returned on META.
#define RUN(op, device, blocks, ...)                               \
    do {                                                           \
        if (device == CPU) {                                       \
            op##_cpu(__VA_ARGS__);                                 \
        } else {                                                   \
            LAUNCH(op##_kernel, blocks, ROW_THREADS, __VA_ARGS__); \
        }                                                          \
    } while (0)
