// fast/flash.h: what the fast attention kernels share: how they are launched. Steps are flash.cu's:
// read those first. In these files
//   - a block owns one tile of rows (queries, or keys and values; in Hopper's forward one after the
//     other) and streams the tiles of the other side past them;
//   - where a kernel walks over tiles, i is a tile of queries and j one of keys; a single one is
//     `query` or `key` (or i and j, where no tiles are near);
//   - n and k run along a product's N and K, as in mma's name m16n8k16; m is step 2's maximum;
//   - loops of constant length are unrolled, so that arrays are registers; a pragma says so where
//     nvcc would not do it.
#pragma once
#include "attention.h"
#include "lib/gpu.h"

#ifdef HAVE_CUDA

#define DEVICE __device__ __forceinline__  // a function that becomes part of its kernels

// What a kernel's body is made of may be missing in the architecture that it is compiled for. The
// body is then empty, and compiled_for() tells `takes` not to offer it.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA
#endif
// Returns the grid of fast/'s attention kernels (Hopper's forward takes it as an order of tiles
// alone): block (x, y, z) owns tile y of head z gridDim.x + x, or
// counts y from the last tile. Blocks start in the order x, y, z: of gridDim.x heads all first
// tiles, then all second ones; then the next heads. With 4 heads, 2 of them together, and 3 tiles
// the grid is (2, 3, 2), and the blocks start in the order of these numbers:
//
//                 head 0  head 1                  head 2  head 3
//     tile y = 0     0       1        tile y = 0     6       7
//     tile y = 1     2       3        tile y = 1     8       9
//     tile y = 2     4       5        tile y = 2    10      11
//                    z = 0                           z = 1
//
// How many heads together? A head's blocks stream the same K and V past themselves (backward: Q and
// dO, and add to the same dQ): the fewer heads are at work, the more of that comes from the L2
// cache. So without a mask there is one. But causal, the first tile takes twice the mean time of a
// tile, and until it is over, the others have to keep the device busy. The device runs
// M = multiprocessors() * blocks blocks at a time, so `together` heads take together * tiles / M
// mean times: about 2, rounded down to whole heads. (`together` is then raised to a divisor of the
// heads, and to what the largest z asks for.)
inline dim3 attention_grid(const AttentionArgs& a, int tiles, int blocks = 1) {
    constexpr int MOST = 65535;  // of y and z; y, the tiles, has room for 4 million rows
    int heads = a.B * a.H;
    int together =
        max(a.causal ? 2 * multiprocessors() * blocks / tiles : 1, ceil_div(heads, MOST));
    while (together < heads && heads % together != 0) { together++; }
    together = min(together, heads);
    return dim3(together, tiles, heads / together);
}
DEVICE int head_of_block() { return blockIdx.z * gridDim.x + blockIdx.x; }

// Programmatic dependent launch (EARLY), from compute capability 9.0 on: a kernel launched so may
// start when all blocks of the kernel before it in the stream have called let_next_kernel_start()
// or ended. It may read what that kernel writes, and overwrite what that kernel uses, only after
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
    config.numAttrs = EARLY;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}
#endif
