// fast/flash_hopper.cu: FlashAttention in bf16 on the H100 and H200 (compute capability 9.0), with
// what only they have.
//
// What changed against flash_v2 (flash.cu), and why it is faster:
//   - wgmma: four warps, a warpgroup, multiply 64xK matrices, in shared memory or registers, by
//     KxN ones in shared memory, asynchronously. It reaches the card's full rate, mma.sync about
//     60 % of it.
//   - TMA, a copy unit of the multiprocessor: one thread asks for a whole tile, and TMA writes it
//     to shared memory, swizzled, with zeros where the tensor ends.
//   - mbarriers: counters in shared memory on which copies announce their bytes and warps their
//     arrival.
//   - setmaxnreg: a warpgroup that only loads gives its registers to those that compute.
// What it costs: the code runs on no other card, older or newer.
//
// The file has the instructions, how tiles lie in shared memory, the forward pass, the backward
// pass's three kernels, and their launches. Read the text above each pass first, then its consumer:
// forward_consumer and BackwardConsumer do the arithmetic, the loaders only feed them.
#include "flash.h"

#ifdef HAVE_CUDA
#include <cuda.h>
#include <dlfcn.h>

// -------------------------------------------------------------------------------------------------
// PTX, one instruction a function

constexpr int SLAB = 64;  // columns of a slab, a part of a tile (see "Tiles in shared memory")
constexpr int SLAB_ROW = 2 * SLAB;  // bytes

// An mbarrier passes from phase to phase: each time `count` arrivals were made and all announced
// bytes have come.
DEVICE void mbarrier_init(uint64_t* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(count)
                 : "memory");
}
// Makes the initialised mbarriers visible to TMA; __syncthreads() makes them visible to
// the block.
DEVICE void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier))
                 : "memory");
}
DEVICE void mbarrier_arrive_expecting(uint64_t* barrier, int bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
        "r"(bytes)
        : "memory");
}
// Waits until the phase of this parity is over. Phases count from 0, so their parities are 0, 1, 0,
// 1, ... In a fresh mbarrier phase 0 is running, and a phase of parity 1 counts as over.
//
// A ring of two tiles has two mbarriers for each of its places, the stages: the loader waits on
// `empty` before it writes, a consumer waits on `full` before it reads. At the ring's use n they
// name these parities:
//
//     use n         0  1  2  3  4  5
//     stage         0  1  0  1  0  1    n % 2
//     full waits    0  0  1  1  0  0    n / 2 % 2
//     empty waits   1  1  0  0  1  1    n / 2 % 2 ^ 1, which is (n / 2 % 2) ^ 1
//
// So the loader's waits at uses 0 and 1 pass at once, since nobody has to empty a place that was
// never filled. At use 2 it waits until use 0 has been read.
DEVICE void mbarrier_wait(uint64_t* barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(smem_address(barrier)),
        "r"(parity)
        : "memory");
}
// Starts a copy of box (d, row, h, batch) of the mapped tensor to shared memory; its bytes count
// towards the mbarrier.
DEVICE void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int d, int row, int h,
                     int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3,%4,%5,%6}], "
        "[%2];" ::"r"(smem_address(to)),
        "l"(map), "r"(smem_address(barrier)), "r"(d), "r"(row), "r"(h), "r"(batch)
        : "memory");
}
// Starts copies of a tile of so many slabs, from row `row` on. The mbarrier expects its bytes and
// `more`, which are to come beside it.
template <int SLABS>
DEVICE void tma_load_tile(char* to, int slab_bytes, const CUtensorMap* map, uint64_t* full, int row,
                          int h, int b, int more = 0) {
    mbarrier_arrive_expecting(full, SLABS * slab_bytes + more);
    for (int s = 0; s < SLABS; s++) {
        tma_load(to + s * slab_bytes, map, full, s * SLAB, row, h, b);
    }
}
// Starts a copy of `bytes` bytes from global to shared memory; they count towards the mbarrier.
// `bytes` and both addresses are multiples of 16.
DEVICE void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(smem_address(to)),
        "l"(from), "r"(bytes), "r"(smem_address(barrier))
        : "memory");
}
// Shared memory is reached in two ways, PTX's "proxies": ordinary loads and stores are the generic
// proxy, TMA and wgmma's reading are the async one. A barrier alone does not order the two. So
// before wgmma reads, or TMA overwrites, what ordinary stores wrote, each thread that stored calls
// this fence, and then all meet at a barrier. (The way back needs no fence: who has waited on TMA's
// mbarrier sees what TMA wrote, and who has waited for a wgmma may overwrite what it read.)
//
// The fence begins with a memory barrier. That waits for all that this thread has stored or added
// so far, in global memory, too. So what goes there is started behind the fence where it can be.
DEVICE void shared_to_async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Stores four 8x8 matrices of 16-bit elements to shared memory, transposed: lane l gives the
// address of row l%8 of matrix l/8, and holds of each matrix two neighbours of column l/4.
DEVICE void stmatrix_x4_transposed(void* smem, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                     smem_address(smem)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
// Stands before the first wgmma of a batch, whose registers ordinary instructions have written.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Keeps the compiler from reading a result before the wait that is written in front of this: for
// the compiler a result is there as soon as its wgmma is issued. Here each result gets a new value,
// by no instruction, so whatever reads it stays behind.
template <int N>
DEVICE void read_after_wait(float (&x)[N]) {
    for (int i = 0; i < N; i++) { asm volatile("" : "+f"(x[i])::"memory"); }
}
// Waits until at most the N newest batches are at work. `results` are the registers that the
// finished ones wrote.
template <int N, int... COUNTS>
DEVICE void wgmma_wait(float (&... results)[COUNTS]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
    (read_after_wait(results), ...);
}
// Is a wgmma_wait<0>() that stays behind the arithmetic before it. Arithmetic that does not need
// the results is written in front of a wait, to run while the products are at work. But ptxas,
// which makes the machine code, moves a plain wait up in front of that arithmetic, as far as the
// last branch: nothing runs beside the products then.
//
// So here is a branch, and the wait within it. All threads take it, since what belongs to wgmma has
// to be done by the whole warpgroup: `yes` is true, which ptxas cannot know. For ptxas there is
// therefore a way around the branch, where nobody has waited. The second wait is for that way, and
// finds nothing to wait for.
template <int COUNT>
DEVICE void wgmma_wait_in_place(bool yes, float (&results)[COUNT]) {
    if (yes) { wgmma_wait<0>(); }
    wgmma_wait<0>(results);
}
template <int N>
DEVICE void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
DEVICE void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
// These are barriers 1 and up among whole warps; n counts the threads of both sides. `arrive` does
// not wait.
// (Not bar.sync, which is .aligned: the compiler would have to know that a warp's lanes are
// together.)
DEVICE void barrier_sync(int id, int n) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(n) : "memory");
}
DEVICE void barrier_arrive(int id, int n) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(n) : "memory");
}

// Returns a tile's descriptor from its low word (see "Tiles in shared memory"). The high word is
// the same for all tiles: 128-byte swizzle, and SBO, 1024 bytes from 8 rows to the next 8.
DEVICE uint64_t full_descriptor(uint32_t low) {
    return (uint64_t)(1u << 30 | 1024 / 16) << 32 | low;
}

// wgmma's operand list has to be spelled out. Of d [64,N] thread t holds row 16 (t/32) + t%32/4 at
// d[4j], d[4j+1] in columns 8j + 2 (t%4) and one more, and row + 8 at d[4j+2], d[4j+3].
#define R8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define R16 R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define R32 R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define R36 R32 ",%32,%33,%34,%35"
#define R40 R36 ",%36,%37,%38,%39"
#define R64                                                                                      \
    R40 ",%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%" \
        "61,%62,%63"
#define R68 R64 ",%64,%65,%66,%67"
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)
#define D16 D8(0), D8(8)
#define D32 D16, D8(16), D8(24)
#define D36 D32, D4(32)
#define D40 D32, D8(32)
#define D64 D40, D8(40), D8(48), D8(56)
#define D68 D64, D4(64)
// d = a b + (add ? d : 0): a [64,16] in registers (packed as d is: a[0], a[1] rows and rows + 8 of
// 8 columns, a[2], a[3] of the next 8), b [16,N] in shared memory, its rows being the summed index.
#define WGMMA_RS(COUNT, N, R, A0, A1, A2, A3, B, P, ...)                                    \
    DEVICE void wgmma(float(&d)[COUNT], const uint32_t(&a)[4], uint32_t b, bool add) {      \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P                                \
                     ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" R   \
                     "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", p, 1, 1, 1;\n}"    \
                     : __VA_ARGS__                                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(full_descriptor(b)), \
                       "r"((int)add));                                                      \
    }
WGMMA_RS(8, 16, R8, 8, 9, 10, 11, 12, 13, D8(0))
WGMMA_RS(16, 32, R16, 16, 17, 18, 19, 20, 21, D16)
WGMMA_RS(32, 64, R32, 32, 33, 34, 35, 36, 37, D32)
WGMMA_RS(36, 72, R36, 36, 37, 38, 39, 40, 41, D36)
WGMMA_RS(40, 80, R40, 40, 41, 42, 43, 44, 45, D40)
WGMMA_RS(64, 128, R64, 64, 65, 66, 67, 68, 69, D64)
WGMMA_RS(68, 136, R68, 68, 69, 70, 71, 72, 73, D68)
// The same with both operands in shared memory, a as [64,16]. B_ROWS: whether the summed index runs
// over that tile's rows (b is [16,N]) or along them (b is [N,16]).
#define WGMMA_SS(COUNT, N, R, A, B, P, TB, ...)                                                  \
    template <int B_ROWS>                                                                        \
    DEVICE void wgmma(float(&d)[COUNT], uint32_t a, uint32_t b, bool add) {                      \
        asm volatile(                                                                            \
            "{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
            "k16.f32.bf16.bf16 {" R "}, %" #A ", %" #B ", p, 1, 1, 0, %" #TB ";\n}"              \
            : __VA_ARGS__                                                                        \
            : "l"(full_descriptor(a)), "l"(full_descriptor(b)), "r"((int)add), "n"(B_ROWS));     \
    }
WGMMA_SS(8, 16, R8, 8, 9, 10, 11, D8(0))
WGMMA_SS(16, 32, R16, 16, 17, 18, 19, D16)
WGMMA_SS(32, 64, R32, 32, 33, 34, 35, D32)
WGMMA_SS(64, 128, R64, 64, 65, 66, 67, D64)

// -------------------------------------------------------------------------------------------------
// Tiles in shared memory
//
// A tile of R rows and D columns lies as ceil(D/64) slabs [R][64] of 128-byte rows. Within a slab,
// 16-byte chunk c of row r is stored at chunk c ^ (r % 8): "128-byte swizzle", so that a column of
// chunks touches all banks. TMA writes it so and wgmma reads it so.
//
// wgmma gets a tile as a descriptor, 64 bits. Addresses and distances count in units of 16 bytes:
//
//     bits       what
//      0 to 13   the address in shared memory
//     16 to 29   LBO: from 64 columns to the next 64, where the rows are the summed index and
//                N > 64; else unused
//     32 to 45   SBO: from 8 rows to the next 8, 1024 bytes
//     49 to 51   where within 1024 bytes the swizzle's pattern begins: 0, since slabs begin at
//                multiples of 1024
//     62 to 63   swizzle; 1 is the one of 128 bytes
//
// A product takes 16 columns, 32 bytes, at a time, so the address is moved by 32 bytes within a
// row. That is allowed because the swizzle is a rule about addresses. wgmma adds up a chunk's
// address as if the slab were not swizzled, and only then flips its bits 4 to 6 (the chunk) by its
// bits 7 to 9 (the row % 8). TMA has put the chunk where that leads.

// Returns the low word: address and LBO. full_descriptor() adds the high one. lbo, in bytes, is
// read only where the table says so; elsewhere callers pass 16.
DEVICE uint32_t descriptor(const void* at, int lbo) {
    return (uint32_t)(lbo / 16) << 16 | (smem_address(at) & 0x3FFFF) / 16;
}
DEVICE uint32_t advance(uint32_t descriptor, int bytes) { return descriptor + bytes / 16; }
// Returns the other stage's descriptor in a ring of two that starts at `first`, the one after
// `stage` and before it: the two add up to 2 first + bytes / 16.
DEVICE uint32_t other_stage(uint32_t first, uint32_t stage, int bytes) {
    return advance(2 * first - stage, bytes);
}

// -------------------------------------------------------------------------------------------------
// Forward. Roles in a block: one warpgroup loads (one thread of it), the others own 64 queries
// each. K and V go through rings of `stages` tiles. `full` tells that a tile has come, `empty` that
// every warpgroup has read it.
//
// A warpgroup takes the tiles of keys from the last to the first. When it has the turn, it issues
// step 1 for the next tile, then step 5's P V for this one, and hands the turn to the next
// warpgroup. So the tensor cores do one warpgroup's products while the exponential unit does the
// others' softmax. In time, with three warpgroups:
//
//     WG0:  | S PV |   softmax   | S PV |   softmax   |
//     WG1:         | S PV |   softmax   | S PV |   softmax   |
//     WG2:                | S PV |   softmax   | S PV |   softmax   |
//
// The wait for P V is written behind the row maxima and a quarter of the exponentials. ptxas moves
// it up to the maxima (see wgmma_wait_in_place), which here does no harm: with a branch it was no
// faster. O is then multiplied by `shrink`, and the other exponentials are packed in P's registers
// as they come.
//
// There are at most as many blocks as multiprocessors. Each takes one tile of queries after
// another, from a counter, and has two buffers for Q, so that the next tile's Q, K and V are loaded
// while this one's last products are at work. O leaves through its Q's buffer. Each warp gives its
// rows back, so q_empty counts warps.
//
// Step 4 is the tensor cores', too: at D 64 and 128 each tile of V has eight more columns, of ones,
// and what O has there is l. That spares an addition per element, and l is of the very weights that
// V is multiplied with, rounded as they are.

// Stores 16 rows of a result, times a factor for each thread's two: first to shared memory of the
// warp's own (16 rows in each slab, swizzled as everywhere), then 16 bytes a thread to global
// memory, from row `first` on, as far as there are `rows`. LOADED_AGAIN: TMA will write to this
// shared memory again, for which the two proxies have to be ordered (see shared_to_async_fence).
template <int D, int SLAB_BYTES, bool LOADED_AGAIN, int N>
DEVICE void store_rows(const Heads& to, int b, int h, int first, int rows, const float (&x)[N],
                       const float (&factor)[2], char* own, int lane) {
    auto chunk = [&](int r, int d) {
        return own + d / SLAB * SLAB_BYTES + r * SLAB_ROW + ((d % SLAB / 8) ^ (r % 8)) * 16;
    };
#pragma unroll
    for (int j = 0; j < D / 2; j += 2) {
        int r = lane / 4 + j % 4 / 2 * 8;
        *(uint32_t*)(chunk(r, j / 4 * 8) + lane % 4 * 4) =
            pack(x[j] * factor[j % 4 / 2], x[j + 1] * factor[j % 4 / 2]);
    }

    // before the stores to global memory: else the fence would wait for them, too
    if (LOADED_AGAIN) { shared_to_async_fence(); }
    __syncwarp();  // what the other lanes wrote is read below

    bf16* out = head_of<bf16>(to, b, h);
    for (int n = lane; n < 16 * (D / 8); n += WARP) {
        int r = n / (D / 8), d = n % (D / 8) * 8;
        uint4 eight = *(uint4*)chunk(r, d);
        if (first + r < rows) { *(uint4*)(out + (first + r) * to.row + d) = eight; }
    }
}

// Up to D 64 three groups have registers enough. See hopper_forward(), which asks for two where
// there are few queries.
template <int HEAD, int GROUPS = HEAD <= 64 ? 3 : 2>
struct HopperForward {
    static constexpr int D = HEAD, groups = GROUPS;
    static constexpr int Bq = 64 * groups, Bk = 128, stages = 2;
    static constexpr int threads = 128 * (groups + 1);
    // of a thread
    static constexpr int loader_registers = groups == 3 ? 32 : 40;
    static constexpr int registers = groups == 3 ? 160 : 232;
    static constexpr int slabs = (D + SLAB - 1) / SLAB;
    static constexpr int q_slab = Bq * SLAB_ROW, k_slab = Bk * SLAB_ROW;  // bytes
    static constexpr int q_bytes = slabs * q_slab, k_bytes = slabs * k_slab;
    static constexpr bool sums = D % SLAB == 0;  // V has another slab, of ones
    static constexpr int v_bytes = k_bytes + (sums ? k_slab : 0), o_columns = D + (sums ? 8 : 0);
    // Where the rings begin, in bytes: two tiles of queries lie before K's, K's lies before V's.
    // `bytes` has 1024 more, so that all can begin at a multiple of 1024, as the swizzle needs.
    static constexpr int k_ring = 2 * q_bytes, v_ring = k_ring + stages * k_bytes;
    static constexpr size_t bytes = v_ring + stages * v_bytes + 1024;
    static_assert(D % 16 == 0 && D <= 128 && stages == 2);
};
template <class Tile>
struct ForwardBarriers {
    uint64_t q_full[2], q_empty[2];
    uint64_t k_full[Tile::stages], k_empty[Tile::stages], v_full[Tile::stages],
        v_empty[Tile::stages];
    int tile[2];  // whose Q that is; none is left if it is not below `all`
};
// How often the forward's blocks have asked for another tile of queries, and how many have found
// none left; 0 between launches. A device has one pair, so two forwards must not run at a time:
// they have one stream.
__device__ int tiles_taken, blocks_done;

struct QueryTile {
    int b, h, q0, k_tiles;  // q0: its first query; k_tiles: how many tiles of keys its queries see
};
// Returns the tile of queries with this number. `order` is attention_grid()'s, and its drawing has
// the numbers. There blocks start in this order; here tiles are taken in it, from a counter. Number
// n is
//     x = n % order.x,  y = n / order.x % order.y,  z = n / (order.x * order.y)
// and its head is z * order.x + x.
template <class Tile>
DEVICE QueryTile query_tile(const AttentionArgs& a, dim3 order, int tile) {
    int head = tile / (order.x * order.y) * order.x + tile % order.x;
    // the last queries see the most keys: they come first
    int i = order.y - 1 - tile / order.x % order.y;
    int q0 = i * Tile::Bq;
    return {head / a.H, head % a.H, q0,
            (keys_seen(a.causal, q0 + Tile::Bq - 1, a.Tk) + Tile::Bk - 1) / Tile::Bk};
}

// Loads Q of one tile of queries after another, and K and V of the tiles of keys that it sees, each
// into its ring as soon as all warpgroups have read what was there.
template <class Tile>
DEVICE void forward_loader(const AttentionArgs& a, dim3 order, int all, const CUtensorMap* q_map,
                           const CUtensorMap* k_map, const CUtensorMap* v_map,
                           ForwardBarriers<Tile>& bars, char* q_tiles, char* k_ring, char* v_ring) {
    constexpr int Bk = Tile::Bk, stages = Tile::stages;
    int n = 0;  // tiles of K and V so far
    for (int tile = blockIdx.x, served = 0;; served++) {
        int buffer = served % 2;
        mbarrier_wait(&bars.q_empty[buffer], served / 2 % 2 ^ 1);  // see mbarrier_wait's table
        bars.tile[buffer] = tile;
        if (tile >= all) {
            mbarrier_arrive(&bars.q_full[buffer]);
            break;
        }

        QueryTile q = query_tile<Tile>(a, order, tile);
        tma_load_tile<Tile::slabs>(q_tiles + buffer * Tile::q_bytes, Tile::q_slab, q_map,
                                   &bars.q_full[buffer], q.q0, q.h, q.b);
        auto load = [&](char* ring, int bytes, const CUtensorMap* map, uint64_t* full,
                        uint64_t* empty, int key) {
            int stage = n % stages, phase = n / stages % 2;
            mbarrier_wait(&empty[stage], phase ^ 1);
            tma_load_tile<Tile::slabs>(ring + stage * bytes, Tile::k_slab, map, &full[stage], key,
                                       q.h, q.b);
        };
        for (int j = q.k_tiles - 1; j >= 0; j--, n++) {
            load(k_ring, Tile::k_bytes, k_map, bars.k_full, bars.k_empty, j * Bk);
            load(v_ring, Tile::v_bytes, v_map, bars.v_full, bars.v_empty, j * Bk);
        }
        // Not before: work would be taken too early to even out.
        tile = gridDim.x + atomicAdd(&tiles_taken, 1);
    }
    if (atomicAdd(&blocks_done, 1) == (int)gridDim.x - 1) { tiles_taken = blocks_done = 0; }
}

// Does step 2 and step 3's shrink, for this thread's queries `row` and row + 8. key: this thread's
// first column of the tile. MASKED: some query may not see all keys of the tile.
// - m is kept times c = scale log2(e), so it counts in powers of two: exp(scale (s - m)) is
//   exp2(c s - c m), and exp2 is what the GPU has.
// - m need not be the maximum. Whatever m is, P, l and O have the same factor exp2(-m): it goes out
//   of O / l, and L = m / log2(e) + ln l puts it back. P must not overflow, that is all. So m rises
//   only when a score exceeds it by more than SLACK = 8 powers of two. Else m stays, P is at most
//   2^8, shrink is 1, and O need not be multiplied.
// - m begins with -FLT_MAX, not -inf. A row's first scores may all be -inf: it does not see these
//   keys, or products overflowed. Then -inf - -inf would be NaN. With -FLT_MAX P is exp2(-inf) = 0.
template <class Tile, bool MASKED>
DEVICE void row_maxima(float (&s)[Tile::Bk / 2], float (&m)[2], float (&l)[2], float (&shrink)[2],
                       float c, const AttentionArgs& a, int row, int key) {
    if constexpr (MASKED) {
        for (int n = 0; n < Tile::Bk / 2; n++) {
            int column = key + n / 4 * 8 + n % 2, query = row + n % 4 / 2 * 8;
            if (column >= keys_seen(a.causal, query, a.Tk)) { s[n] = -INFINITY; }
        }
    }

    for (int r = 0; r < 2; r++) {
        float larger = s[2 * r];
        for (int n = 0; n < Tile::Bk / 2; n += 4) {
            larger = fmaxf(larger, fmaxf(s[n + 2 * r], s[n + 2 * r + 1]));
        }
        larger = fmaxf(larger, __shfl_xor_sync(0xffffffff, larger, 1));
        larger = fmaxf(larger, __shfl_xor_sync(0xffffffff, larger, 2));

        float before = m[r];
        m[r] = larger * c > before + SLACK ? larger * c : before;
        shrink[r] = exp2_approx(before - m[r]);
        l[r] *= shrink[r];
    }
}
// Does step 3 for the columns [from, to) of S, which become P, unpacked; and step 4 where the
// tensor cores do not do it.
template <class Tile>
DEVICE void exponentials(float (&s)[Tile::Bk / 2], float (&l)[2], const float (&m)[2], float c,
                         int from, int to) {
    for (int r = 0; r < 2; r++) {
        for (int n = from / 2; n < to / 2; n += 4) {
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                s[n + e] = exp2_approx(fmaf(s[n + e], c, -m[r]));
                if constexpr (!Tile::sums) { l[r] += s[n + e]; }
            }
        }
    }
}
template <int N>
DEVICE void pack_all(uint32_t (&p)[N / 8][4], const float (&s)[N]) {
    for (int k = 0; k < N / 8; k++) {
        for (int e = 0; e < 4; e++) { p[k][e] = pack(s[8 * k + 2 * e], s[8 * k + 2 * e + 1]); }
    }
}

// Does step 6 but for the division of O: makes l the whole row's, and stores L.
template <class Tile>
DEVICE void store_L(const AttentionArgs& a, int b, int h, int first,
                    const float (&o)[Tile::o_columns / 2], const float (&m)[2], float (&l)[2],
                    int lane) {
    for (int r = 0; r < 2; r++) {
        if constexpr (Tile::sums) {
            l[r] = o[Tile::D / 2 + 2 * r];
        } else {
            l[r] += __shfl_xor_sync(0xffffffff, l[r], 1);
            l[r] += __shfl_xor_sync(0xffffffff, l[r], 2);
        }
        int query = first + lane / 4 + 8 * r;
        if (lane % 4 == 0 && query < a.Tq) {
            a.L[((int64_t)b * a.H + h) * a.Tq + query] = m[r] / LOG2_E + logf(l[r]);
        }
    }
}

// Warpgroup g waits for its turn at barrier TURN + g. 256 threads meet there: its own 128, which
// wait, and those of the warpgroup before it, which hand the turn on and do not wait. The last
// warpgroup hands it on once at the start, so that warpgroup 0 begins, and once more at the end,
// where warpgroup 0 takes it: a barrier must not be left half full.
constexpr int TURN = 1;
// Computes O and L of a warpgroup's 64 queries in one tile of queries after another. One step takes
// a tile of keys: `scores` and `add_values` only start their products, the waits follow. m is kept
// times c, so in powers of 2. shrink is the newest tile's: by what step 5 multiplies O. q_tiles is
// computed here, because a parameter for it is slower.
template <class Tile>
DEVICE void forward_consumer(const AttentionArgs& a, dim3 order, int all,
                             ForwardBarriers<Tile>& bars, char* dynamic, int warpgroup) {
    constexpr int D = Tile::D, Bk = Tile::Bk, stages = Tile::stages;
    char* q_tiles = dynamic + (1024 - smem_address(dynamic) % 1024) % 1024;
    int t = threadIdx.x % 128, warp = t / WARP, lane = t % WARP;
    float c = a.scale * LOG2_E;
    uint32_t k_at = descriptor(q_tiles + Tile::k_ring, 16);
    uint32_t v_at = descriptor(q_tiles + Tile::v_ring, Tile::k_slab);
    uint32_t k_next = k_at, v_next = v_at;  // of the tile to be read next
    uint32_t k_read = 0, v_read = 0;        // how many tiles have been read
    if (warpgroup == Tile::groups - 1) { barrier_arrive(TURN, 256); }
    for (int served = 0;; served++) {
        int buffer = served % 2;
        mbarrier_wait(&bars.q_full[buffer], served / 2 % 2);
        int tile = __shfl_sync(0xffffffff, bars.tile[buffer], 0);  // uniform, for the compiler
        if (tile >= all) { break; }

        QueryTile q = query_tile<Tile>(a, order, tile);
        int first = q.q0 + warpgroup * 64;
        int row = first + warp * 16 + lane / 4;  // this thread's queries: row and row + 8
        float s[Bk / 2], o[Tile::o_columns / 2] = {}, m[2] = {-FLT_MAX, -FLT_MAX};
        float l[2] = {0, 0}, shrink[2];
        uint32_t p[Bk / 16][4];
        char* q_tile = q_tiles + buffer * Tile::q_bytes;
        uint32_t q_at = descriptor(q_tile + warpgroup * 64 * SLAB_ROW, 16);

        auto scores = [&] {  // step 1, of the next tile
            mbarrier_wait(&bars.k_full[k_read % stages], k_read / stages % 2);
            wgmma_fence();
            for (int d = 0; d < D; d += 16) {
                int slab = d / SLAB, in_slab = d % SLAB * 2;
                wgmma<0>(s, advance(q_at, slab * Tile::q_slab + in_slab),
                         advance(k_next, slab * Tile::k_slab + in_slab), d > 0);
            }
            wgmma_commit();
            k_read++;
            k_next = other_stage(k_at, k_next, Tile::k_bytes);
        };
        auto add_values = [&] {  // step 5's O += P V, of this tile
            mbarrier_wait(&bars.v_full[v_read % stages], v_read / stages % 2);
            wgmma_fence();
            for (int k = 0; k < Bk / 16; k++) {
                wgmma(o, p[k], advance(v_next, k * 16 * SLAB_ROW), true);
            }
            wgmma_commit();
            v_read++;
            v_next = other_stage(v_at, v_next, Tile::v_bytes);
        };
        auto release = [&](uint64_t* empty, uint32_t read) {  // the last of so many tiles
            if (t == 0) { mbarrier_arrive(&empty[(read - 1) % stages]); }
        };

        // Tiles that all the warpgroup's queries see whole, and the first step that takes one.
        int whole = keys_seen(a.causal, first, a.Tk) / Bk;
        int masked_end = max(q.k_tiles - whole, 1);
        auto key = [&](int from_end) { return (q.k_tiles - 1 - from_end) * Bk + lane % 4 * 2; };
        scores();
        wgmma_wait<0>(s);
        release(bars.k_empty, k_read);
        row_maxima<Tile, true>(s, m, l, shrink, c, a, row, key(0));
        exponentials<Tile>(s, l, m, c, 0, Bk);
        pack_all(p, s);

        auto step = [&](int from_end, auto masked) {
            barrier_sync(TURN + warpgroup, 256);
            scores();
            add_values();
            barrier_arrive(TURN + (warpgroup + 1) % Tile::groups, 256);
            wgmma_wait<1>(s);
            release(bars.k_empty, k_read);
            row_maxima<Tile, decltype(masked)::value>(s, m, l, shrink, c, a, row, key(from_end));
            exponentials<Tile>(s, l, m, c, 0, Bk / 4);
            wgmma_wait<0>(o);
            release(bars.v_empty, v_read);
            if (__any_sync(0xffffffff, shrink[0] != 1 || shrink[1] != 1)) {  // step 5's shrink O
                for (int n = 0; n < Tile::o_columns / 2; n++) { o[n] *= shrink[n % 4 / 2]; }
            }
            exponentials<Tile>(s, l, m, c, Bk / 4, Bk);
            pack_all(p, s);
        };

        int from_end = 1;
        for (; from_end < masked_end; from_end++) { step(from_end, std::true_type()); }
        for (; from_end < q.k_tiles; from_end++) { step(from_end, std::false_type()); }

        add_values();
        wgmma_wait<0>(o);
        release(bars.v_empty, v_read);
        store_L<Tile>(a, q.b, q.h, first + warp * 16, o, m, l, lane);
        float inverse[2] = {1 / l[0], 1 / l[1]};
        store_rows<D, Tile::q_slab, true>(a.o, q.b, q.h, first + warp * 16, a.Tq, o, inverse,
                                          q_tile + (warpgroup * 64 + warp * 16) * SLAB_ROW, lane);
        __syncwarp();  // all lanes have read
        if (lane == 0) { mbarrier_arrive(&bars.q_empty[buffer]); }
    }
    if (warpgroup == 0) { barrier_sync(TURN, 256); }
}

// Runs the forward: sets up the barriers and V's columns of ones, then gives each warpgroup its
// role.
template <class Tile>
__global__ void __launch_bounds__(Tile::threads, 1)
    hopper_forward_kernel(AttentionArgs a, dim3 order, const __grid_constant__ CUtensorMap q_map,
                          const __grid_constant__ CUtensorMap k_map,
                          const __grid_constant__ CUtensorMap v_map) {
#ifdef HAS_WGMMA
    extern __shared__ char dynamic[];
    __shared__ ForwardBarriers<Tile> bars;
    char* q_tiles = dynamic + (1024 - smem_address(dynamic) % 1024) % 1024;
    char *k_ring = q_tiles + Tile::k_ring, *v_ring = q_tiles + Tile::v_ring;
    const int all = order.x * order.y * order.z;

    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            mbarrier_init(&bars.q_full[i], 1);
            mbarrier_init(&bars.q_empty[i], 4 * Tile::groups);
        }
        for (int i = 0; i < Tile::stages; i++) {
            mbarrier_init(&bars.k_full[i], 1);
            mbarrier_init(&bars.v_full[i], 1);
            mbarrier_init(&bars.k_empty[i], Tile::groups);
            mbarrier_init(&bars.v_empty[i], Tile::groups);
        }
        mbarrier_init_fence();
    }
    if (Tile::sums && threadIdx.x < Tile::Bk) {  // of the ones only the first 8 columns are read
        uint32_t one = pack(1, 1);
        for (int i = 0; i < Tile::stages; i++) {
            char* ones = v_ring + i * Tile::v_bytes + Tile::k_bytes + threadIdx.x * SLAB_ROW;
            *(uint4*)(ones + threadIdx.x % 8 * 16) = make_uint4(one, one, one, one);
        }
        shared_to_async_fence();
    }
    __syncthreads();

    // so the compiler knows that it is uniform
    int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (warpgroup == Tile::groups) {
        fewer_registers<Tile::loader_registers>();
        if (threadIdx.x % 128 == 0) {
            forward_loader(a, order, all, &q_map, &k_map, &v_map, bars, q_tiles, k_ring, v_ring);
        }
        return;
    }
    more_registers<Tile::registers>();
    forward_consumer(a, order, all, bars, dynamic, warpgroup);
#endif
}

// Returns how many threads move one row, 8 elements each: a power of two, so for D = 80 6 of 16
// stand by.
HD constexpr int row_threads(int D) {
    int threads = 2;
    while (threads * 8 < D) { threads *= 2; }
    return threads;
}

// -------------------------------------------------------------------------------------------------
// Backward takes three kernels.
//   before   step 7, and a zeroed fp32 dQ
//   main     a block owns Bk keys and streams tiles of Bq queries past them: steps 8 to 13, of
//            which step 12 adds to dQ by atomics, since the other blocks of this head add to the
//            same rows
//   after    dQ, times the scale, as bf16

// What lies between the kernels: dq in the order in which the main kernel's lanes hold it, and for
// each two queries L log2(e) of both, then D_i of both. Rows beyond Tq have L = inf, which makes
// their P 0. Of a 16x8 piece of dQ a lane holds four neighbours in memory, so that a warp adds to
// 128 neighbours: of row lane/4 the columns 2(lane%4) and the next one, then the same of row
// lane/4 + 8.
struct BackwardWorkspace {
    float* dq;      // [B*H, rows/16, D/8, 128]
    float4* stats;  // [B*H, rows/2]
    int rows;       // Tq rounded up to a multiple of QUERY_ROWS, which every Bq divides
};

// Does step 7 and zeroes dQ: row_threads(D) threads take two neighbouring rows.
template <int D>
__global__ void backward_before(AttentionArgs a, BackwardWorkspace w) {
#ifdef HAS_WGMMA
    constexpr int GROUP = row_threads(D);
    let_next_kernel_start();  // the main kernel, which loads K and Q while this one is at work
    int64_t index = thread_number(), pair = index / GROUP;
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
        for (int apart = GROUP / 2; apart > 0; apart /= 2) {
            sum[r] += __shfl_xor_sync(0xffffffff, sum[r], apart);
        }
    }
    if (n == 0) {
        auto L = [&](int row) {
            return row < a.Tq ? a.L[(int64_t)bh * a.Tq + row] * LOG2_E : INFINITY;
        };
        w.stats[pair] = make_float4(L(i), L(i + 1), sum[0], sum[1]);
    }
#endif
}

// Writes dQ as bf16, times the scale. A thread writes 8 elements of two rows, r and r + 8 of a
// piece: what the lanes 4r to 4r + 3 held of it.
template <int D>
__global__ void backward_after(AttentionArgs a, BackwardWorkspace w) {
#ifdef HAS_WGMMA
    await_previous_kernel();  // all that is read here comes from it; only the launch was early
    int64_t index = thread_number(), tile = index / D;  // of 16 rows
    int n = (int)(index % (D / 8)), r = (int)(index / (D / 8) % 8);
    int bh = (int)(tile / (w.rows / 16)), i = (int)(tile % (w.rows / 16)) * 16 + r;
    if (bh >= a.B * a.H) { return; }
    const float4* piece = (const float4*)w.dq + (tile * (D / 8) + n) * WARP;
    uint32_t upper[4], lower[4];
    for (int c = 0; c < 4; c++) {
        float4 x = piece[4 * r + c];
        upper[c] = pack(x.x * a.scale, x.y * a.scale);
        lower[c] = pack(x.z * a.scale, x.w * a.scale);
    }
    bf16* dq = head_of<bf16>(a.dq, bh / a.H, bh % a.H) + i * a.dq.row + n * 8;
    if (i < a.Tq) { *(uint4*)dq = make_uint4(upper[0], upper[1], upper[2], upper[3]); }
    dq += 8 * a.dq.row;
    if (i + 8 < a.Tq) { *(uint4*)dq = make_uint4(lower[0], lower[1], lower[2], lower[3]); }
#endif
}

// Returns the workspace, which lies in `memory`, after `before` was launched to fill it.
template <int D>
static BackwardWorkspace backward_begin(const AttentionArgs& a, Tensor& memory) {
    BackwardWorkspace w;
    w.rows = ceil_div(a.Tq, QUERY_ROWS) * QUERY_ROWS;
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

// -------------------------------------------------------------------------------------------------
// Backward: the main kernel, between `before` and `after`.
//
// A block owns Bk = 128 keys, 64 for each of two warpgroups, and streams tiles of Bq queries past
// them. Scores are transposed, a row being a key, as in flash_v2:
//   - steps 8 and 10, S^T = K Q^T and dP^T = V dO^T, have both operands in shared memory;
//   - steps 9 and 13, dV += P^T dO and dK += dS^T Q, take P^T and dS^T straight from the registers
//     in which 8 and 10 left S^T and dP^T;
//   - step 12, dQ += dS K, sums over all keys of the block, so dS goes through shared memory. A
//     warpgroup takes half of the tile's queries, or where there are only 64, 64 columns (at D 80
//     the second's last 48 are zeros, computed and not added).
// Step 12 lags one tile behind the others, so that nobody waits for the other warpgroup's half of
// dS: it has long been written (see give_ds). The two need not be at the same point, and one's
// exponentials run under the other's products.
template <int HEAD>
struct HopperBackward {
    static constexpr int D = HEAD, Bq = D <= 64 ? 128 : 64, Bk = 128;
    static constexpr int stages = 2, threads = 3 * 128;
    static constexpr int loader_registers = 24, registers = 240;  // of a thread
    static constexpr int slabs = (D + SLAB - 1) / SLAB;
    static constexpr int k_slab = Bk * SLAB_ROW, q_slab = Bq * SLAB_ROW;  // bytes
    static constexpr int k_bytes = slabs * k_slab, q_bytes = slabs * q_slab;
    static constexpr int ds_bytes = Bk / SLAB * q_slab;
    static constexpr int stats_bytes = Bq * sizeof(float2), dq_columns = D < 64 ? D : 64;
    // dS is doubled: while one tile's is read, the next is written.
    static constexpr size_t bytes =
        2 * k_bytes + 2 * stages * q_bytes + 2 * ds_bytes + stages * stats_bytes + 1024;
    static_assert(D % 16 == 0 && D <= 128);
};
// Returns p's two numbers times x and y, packed. x and y are rounded first: two elements are then
// two instructions, not five.
DEVICE uint32_t multiply_packed(uint32_t p, float x, float y) {
    uint32_t xy = pack(x, y), product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(p), "r"(xy));
    return product;
}

template <class Tile>
struct BackwardBarriers {
    uint64_t k_full, v_full, q_full[Tile::stages], q_empty[Tile::stages], dO_full[Tile::stages],
        dO_empty[Tile::stages];
};
struct BackwardMemory {  // shared
    char *k_tile, *v_tile, *q_ring, *dO_ring, *ds_tiles, *stats_ring;
};
struct KeyTile {
    int head, b, h, k0;  // k0: its first key
    int begin, q_tiles;  // the first tile of queries that see some of its keys, and how many do
};

// Loads K and V of this tile, and one tile of Q, L, D_i and dO after another, each into its ring as
// soon as both warpgroups have read what was there.
template <class Tile>
DEVICE void backward_loader(const BackwardWorkspace& w, const CUtensorMap* q_map,
                            const CUtensorMap* k_map, const CUtensorMap* v_map,
                            const CUtensorMap* dO_map, BackwardBarriers<Tile>& bars,
                            const BackwardMemory& memory, const KeyTile& tile) {
    constexpr int Bq = Tile::Bq, stages = Tile::stages;
    auto load_own = [&](char* to, const CUtensorMap* map, uint64_t* full) {
        tma_load_tile<Tile::slabs>(to, Tile::k_slab, map, full, tile.k0, tile.h, tile.b);
    };
    auto load = [&](char* ring, const CUtensorMap* map, uint64_t* full, int i, int more) {
        tma_load_tile<Tile::slabs>(ring + i % stages * Tile::q_bytes, Tile::q_slab, map,
                                   &full[i % stages], (tile.begin + i) * Bq, tile.h, tile.b, more);
    };

    load_own(memory.k_tile, k_map, &bars.k_full);
    for (int i = 0; i < tile.q_tiles; i++) {
        int stage = i % stages, phase = i / stages % 2;
        mbarrier_wait(&bars.q_empty[stage], phase ^ 1);
        load(memory.q_ring, q_map, bars.q_full, i, Tile::stats_bytes);
        // This kernel was launched early: `before` may still be at work. K and Q are older. They
        // were complete when `before` started, which was not launched early, so they could be read
        // above. L and D_i come from `before`, and so do dQ's zeros, to which nobody adds before
        // this copy of L and D_i has come.
        if (i == 0) { await_previous_kernel(); }
        bulk_load(memory.stats_ring + stage * Tile::stats_bytes,
                  w.stats + ((int64_t)tile.head * w.rows + (int64_t)(tile.begin + i) * Bq) / 2,
                  Tile::stats_bytes, &bars.q_full[stage]);
        if (i == 0) { load_own(memory.v_tile, v_map, &bars.v_full); }
        mbarrier_wait(&bars.dO_empty[stage], phase ^ 1);
        load(memory.dO_ring, dO_map, bars.dO_full, i, 0);
    }
}

// A consumer's thread, and the parts of a step. i is a tile of queries, counted from tile.begin.
template <class Tile>
struct BackwardConsumer {
    static constexpr int D = Tile::D, Bk = Tile::Bk, Bq = Tile::Bq, stages = Tile::stages;
    // From here on a thread's part of L is loaded before dP is issued: a quarter, with which the
    // exponentials begin. More would hold dP back.
    static constexpr int EARLY_FROM = Bq / 2 - Bq / 8;
    using EarlyL = float2[Bq / 32];
    using Scores = float[Bq / 2];         // of S^T, P^T, dP^T
    using Packed = uint32_t[Bq / 16][4];  // of P^T, dS^T
    using DqPart = float[Tile::dq_columns / 2];

    const AttentionArgs& a;
    const BackwardWorkspace& w;
    BackwardBarriers<Tile>& bars;
    const BackwardMemory& memory;
    const KeyTile& tile;
    int warpgroup;
    Scores& s;
    float (&dk)[D / 2], (&dv)[D / 2];
    int t = threadIdx.x % 128, warp = t / WARP, lane = t % WARP;
    // this thread's keys: row and row + 8
    int first = tile.k0 + warpgroup * 64, row = first + warp * 16 + lane / 4;
    float c = a.scale * LOG2_E;
    uint32_t k_at = descriptor(memory.k_tile + warpgroup * 64 * SLAB_ROW, 16);
    uint32_t v_at = descriptor(memory.v_tile + warpgroup * 64 * SLAB_ROW, 16);
    uint32_t q_at = descriptor(memory.q_ring, Tile::q_slab);
    uint32_t dO_at = descriptor(memory.dO_ring, Tile::q_slab);
    // Each warpgroup computes 64 queries of dQ, or where a tile has no more, 64 columns of all.
    int dq_query = Bq == 64 ? 0 : warpgroup * 64, dq_column = Bq == 64 ? warpgroup * 64 : 0;
    uint32_t ds_at = descriptor(memory.ds_tiles + dq_query * SLAB_ROW, 16);
    uint32_t k_all = descriptor(memory.k_tile + dq_column / SLAB * Tile::k_slab, 16);
    int dq_pieces = min(Tile::dq_columns, D - dq_column) / 8;  // of 8 columns
    int64_t piece =
        (((int64_t)tile.head * w.rows + tile.begin * Bq + dq_query) / 16 + warp) * (D / 8) +
        dq_column / 8;
    float4* first_dq = (float4*)w.dq + piece * WARP + lane;

    // Starts x = (add ? x : 0) + own rows times a streamed tile, transposed.
    DEVICE void rows_times_rows(Scores& x, uint32_t own, uint32_t streamed, bool add) {
        wgmma_fence();
        for (int d = 0; d < D; d += 16) {
            int slab = d / SLAB, in_slab = d % SLAB * 2;
            wgmma<0>(x, advance(own, slab * Tile::k_slab + in_slab),
                     advance(streamed, slab * Tile::q_slab + in_slab), d > 0 || add);
        }
        wgmma_commit();
    }
    // Starts step 8's S of tile i.
    DEVICE void scores(int i) {
        mbarrier_wait(&bars.q_full[i % stages], i / stages % 2);
        rows_times_rows(s, k_at, advance(q_at, i % stages * Tile::q_bytes), false);
    }
    // Starts sum += x times a streamed tile.
    DEVICE void add_product(float (&sum)[D / 2], const Packed& x, uint32_t streamed) {
        wgmma_fence();
        for (int k = 0; k < Bq / 16; k++) {
            wgmma(sum, x[k], advance(streamed, k * 16 * SLAB_ROW), true);
        }
        wgmma_commit();
    }
    // Starts step 12's product for tile i.
    DEVICE void start_dq(DqPart& dq, int i) {
        wgmma_fence();
        for (int k = 0; k < Bk / 16; k++) {
            int slab = k * 16 / SLAB, in_slab = k * 16 % SLAB * 2;
            wgmma<1>(dq, advance(ds_at, (i & 1) * Tile::ds_bytes + slab * Tile::q_slab + in_slab),
                     advance(k_all, k * 16 * SLAB_ROW), k > 0);
        }
        wgmma_commit();
    }
    // Does step 12's sum, in global memory, where a warp's 16 rows and 8 columns are 128
    // neighbours.
    DEVICE void add_dq(const DqPart& dq, int i) {
        float4* to = first_dq + (int64_t)i * (Bq / 16 * (D / 8) * WARP);
        for (int n = 0; n < Tile::dq_columns / 8; n++) {
            if (D % Tile::dq_columns == 0 || n < dq_pieces) {  // the first is known to the compiler
                atomicAdd(to + n * WARP,
                          make_float4(dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]));
            }
        }
    }

    // There is room for two tiles of dS, so dS(i) is written over dS(i-2). Each warpgroup writes
    // its keys' half of a tile, and reads both halves for its part of dQ. So it has two things to
    // tell the other: that its half of dS(i) is there (give_ds), and that its dQ(i) has been
    // computed, after which dS(i) may be overwritten (give_back_ds).
    //
    // Tiles of 64 queries: dQ(i-1) ends before give_ds(i), so give_ds tells both. Who has awaited
    // dS(i-1) knows that the other's dQ(i-2) has ended, and may write dS(i).
    //
    //     WG0:  dQ(i-2) ends  give_ds(i-1) -+
    //     WG1:                              +-> await_ds(i-1)  start dQ(i-1)  write dS(i)
    //
    // Tiles of 128 queries: dQ(i-1) has registers only when dS(i) has been made, so it starts
    // behind give_ds(i), which tells nothing of it. give_back_ds(i-1) does, when it has ended.
    //
    //     WG0:  give_ds(i-1)  dQ(i-2) ends  give_back_ds(i-2) -+
    //     WG1:                                                 +-> await_ds_back(i-2)  write dS(i)
    //
    // Step 0 awaits dS(-1), and with 128 queries that dS(-2) is given back. There are no such
    // tiles, so each warpgroup gives both before step 0. The dQ(-1) of step 0 comes from whatever
    // lies there, and is not added.
    //
    // Each of these has two barriers, for even and odd tiles, since one warpgroup may be a tile
    // ahead of the other. 256 threads meet at each: 128 that give and 128 that wait.
    DEVICE void give_ds(int i) { barrier_arrive(1 + 2 * warpgroup + (i & 1), 256); }
    DEVICE void await_ds(int i) { barrier_sync(1 + 2 * (warpgroup ^ 1) + (i & 1), 256); }
    DEVICE void give_back_ds(int i) { barrier_arrive(6 + 2 * warpgroup + (i & 1), 256); }
    DEVICE void await_ds_back(int i) { barrier_sync(6 + 2 * (warpgroup ^ 1) + (i & 1), 256); }

    // These return L log2(e) and D_i of two queries. stats is the tile's, n counts this thread's
    // scores, whose columns are 2 n + lane % 4 * 2 and the next.
    DEVICE float2 L_of(const float4* stats, int n) {
        return *(const float2*)&stats[n + lane % 4].x;
    }
    DEVICE float2 D_of(const float4* stats, int n) {
        return *(const float2*)&stats[n + lane % 4].z;
    }
    DEVICE void load_early_L(EarlyL& early_L, const float4* stats) {
        for (int n = EARLY_FROM; n < Bq / 2; n += 4) {
            early_L[(n - EARLY_FROM) / 4] = L_of(stats, n);
        }
    }
    // Does step 8's P for the queries [from, to) of the tile that starts at q0, packed, from the
    // last.
    template <bool MASKED>
    DEVICE void exponentials(Packed& p, int q0, const float4* stats, const EarlyL& early_L,
                             int from, int to) {
#pragma unroll
        for (int n = to / 2 - 4; n >= from / 2; n -= 4) {
            float2 L = n < EARLY_FROM ? L_of(stats, n) : early_L[(n - EARLY_FROM) / 4];
            for (int e = 0; e < 4; e++) {
                s[n + e] = exp2_approx(fmaf(s[n + e], c, -(e % 2 ? L.y : L.x)));
                if constexpr (MASKED) {
                    int key = row + e / 2 * 8, query = q0 + 2 * n + lane % 4 * 2 + e % 2;
                    if (key >= keys_seen(a.causal, query, a.Tk)) { s[n + e] = 0; }
                }
            }
            if (n % 8 == 0) {
                for (int e = 0; e < 4; e++) { p[n / 8][e] = pack(s[n + 2 * e], s[n + 2 * e + 1]); }
            }
        }
    }
    // Does step 11 from P and dP - D_i: dS goes to registers for dK and to shared memory for dQ.
    DEVICE void make_ds(Packed& ds, const Packed& p, const Scores& dp, int i) {
        char* ds_tile = memory.ds_tiles + (i & 1) * Tile::ds_bytes + warpgroup * Tile::q_slab;
        for (int k = 0; k < Bq / 16; k++) {
            for (int half = 0; half < 2; half++) {
                int n = 8 * k + 4 * half;
                // P is taken packed: unpacked it would need Bq / 2 registers
                for (int r = 0; r < 2; r++) {
                    ds[k][2 * half + r] =
                        multiply_packed(p[k][2 * half + r], dp[n + 2 * r], dp[n + 2 * r + 1]);
                }
            }
            int query = 16 * k + lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
            stmatrix_x4_transposed(ds_tile + query * SLAB_ROW + (chunk ^ lane % 8) * 16, ds[k]);
        }
    }
    // One thread gives a stage back for its warpgroup. The four warps' products have ended
    // together. Their reads of L and D_i, which q_empty gives back, ended before the barrier_sync
    // in await_ds() or await_ds_back(), where all 128 threads met.
    DEVICE void release(int stage) {
        if (t == 0) {
            mbarrier_arrive(&bars.dO_empty[stage]);
            mbarrier_arrive(&bars.q_empty[stage]);
        }
    }

    // A step has S of tile i when it begins, and issues, in the tensor cores' order:
    // at D 80 and 128 (tiles of 64 queries) dP; dQ of the tile before; dV; dK; S of the next tile.
    // dQ takes the registers of S, which are free by then, and dP starts at -D_i.
    template <bool MASKED>
    DEVICE void step_of_64_queries(int i) {
        int stage = i % stages, q0 = (tile.begin + i) * Bq;
        const float4* stats = (const float4*)(memory.stats_ring + stage * Tile::stats_bytes);
        EarlyL early_L;
        load_early_L(early_L, stats);
        Scores dp;
        for (int n = 0; n < Bq / 2; n += 4) {
            float2 Di = D_of(stats, n);
            dp[n] = dp[n + 2] = -Di.x;
            dp[n + 1] = dp[n + 3] = -Di.y;
        }

        mbarrier_wait(&bars.dO_full[stage], i / stages % 2);
        // step 10, and step 11's - D_i
        rows_times_rows(dp, v_at, advance(dO_at, stage * Tile::q_bytes), true);

        Packed p, ds;
        exponentials<MASKED>(p, q0, stats, early_L, Bq / 4, Bq);
        // for dP. It stands in front of the last quarter of the exponentials, because ptxas moves
        // these behind the first wgmma of dQ, where they run under that product.
        wgmma_wait<0>();
        read_after_wait(dp);
        exponentials<MASKED>(p, q0, stats, early_L, 0, Bq / 4);

        await_ds(i - 1);
        start_dq(s, i - 1);
        add_product(dv, p, advance(dO_at, stage * Tile::q_bytes));  // step 9
        make_ds(ds, p, dp, i);
        wgmma_wait<1>(s);  // dQ has ended, so that give_ds() gives the tile before back, too
        // The additions to dQ come behind the fence, which would wait for them.
        shared_to_async_fence();
        give_ds(i);
        if (i > 0) { add_dq(s, i - 1); }

        add_product(dk, ds, advance(q_at, stage * Tile::q_bytes));  // step 13
        // at the end the last tile's again, unused: a branch costs more
        scores(min(i + 1, tile.q_tiles - 1));
        wgmma_wait<0>(dv, dk, s);
        release(stage);
    }
    // Does the same at D 16, 32 and 64 (tiles of 128 queries), in this order: dP; dV; dQ of the
    // tile before; dK; S of the next tile. dQ fits only into the registers of dP, which are free
    // when dS is made; and loading D_i first would hold dP back.
    template <bool MASKED>
    DEVICE void step_of_128_queries(int i) {
        int stage = i % stages, q0 = (tile.begin + i) * Bq;
        const float4* stats = (const float4*)(memory.stats_ring + stage * Tile::stats_bytes);
        EarlyL early_L;
        load_early_L(early_L, stats);
        Scores dp;
        mbarrier_wait(&bars.dO_full[stage], i / stages % 2);
        rows_times_rows(dp, v_at, advance(dO_at, stage * Tile::q_bytes), false);  // step 10

        Packed p, ds;
        exponentials<MASKED>(p, q0, stats, early_L, 0, Bq);
        // loaded all at once: between the stores of dS each load would be waited for
        float2 all_D[Bq / 8];
        for (int n = 0; n < Bq / 2; n += 4) { all_D[n / 4] = D_of(stats, n); }
        wgmma_wait_in_place(a.Tk > 0, dp);  // behind the exponentials, which run under dP
        for (int n = 0; n < Bq / 2; n++) { dp[n] -= n % 2 ? all_D[n / 4].y : all_D[n / 4].x; }

        add_product(dv, p, advance(dO_at, stage * Tile::q_bytes));  // step 9
        await_ds_back(i - 2);
        make_ds(ds, p, dp, i);
        // The additions to dQ come behind the fence, which would wait for them.
        shared_to_async_fence();
        give_ds(i);

        DqPart dq;
        await_ds(i - 1);
        start_dq(dq, i - 1);
        add_product(dk, ds, advance(q_at, stage * Tile::q_bytes));  // step 13
        wgmma_wait<2>(dv);                                          // P's registers are free
        // at the end the last tile's again, unused: a branch costs more
        scores(min(i + 1, tile.q_tiles - 1));

        wgmma_wait<2>(dq);
        give_back_ds(i - 1);
        if (i > 0) { add_dq(dq, i - 1); }
        wgmma_wait<0>(dv, dk, s);
        release(stage);
    }
    template <bool MASKED>
    DEVICE void step(int i) {
        if constexpr (Bq == 64) {
            step_of_64_queries<MASKED>(i);
        } else {
            step_of_128_queries<MASKED>(i);
        }
    }
};

// Computes dK and dV of a warpgroup's 64 keys, tile of queries by tile, and its part of each tile's
// dQ.
template <class Tile>
DEVICE void backward_consumer(const AttentionArgs& a, const BackwardWorkspace& w,
                              BackwardBarriers<Tile>& bars, const BackwardMemory& memory,
                              const KeyTile& tile, int warpgroup) {
    constexpr int D = Tile::D, Bq = Tile::Bq;
    float s[Bq / 2], dk[D / 2] = {}, dv[D / 2] = {};
    BackwardConsumer<Tile> consumer{a, w, bars, memory, tile, warpgroup, s, dk, dv};
    const int first = consumer.first, end = tile.q_tiles;

    if (end > 0) {
        mbarrier_wait(&bars.k_full, 0);
        consumer.scores(0);
        wgmma_wait<0>(s);
        mbarrier_wait(&bars.v_full, 0);
        consumer.give_ds(-1);  // of no tile (see give_ds)
        if (Bq == 128) { consumer.give_back_ds(-2); }
    }

    // Masked: all tiles if these keys pass Tk; causal, the first, whose queries do not see all
    // keys.
    int masked_end = end;
    if (first + 64 <= a.Tk) {
        masked_end = a.causal ? min(end, (first + 63 + Bq - 1) / Bq - tile.begin) : 0;
    }
    int i = 0;
    for (; i < masked_end; i++) { consumer.template step<true>(i); }
    for (; i < end; i++) { consumer.template step<false>(i); }

    if (end > 0) {
        // the last that was given: a barrier must not be left half full
        if (Bq == 128) { consumer.await_ds_back(end - 2); }
        float dq[Tile::dq_columns / 2];
        consumer.await_ds(end - 1);
        consumer.start_dq(dq, end - 1);
        wgmma_wait<0>(dq);
        consumer.add_dq(dq, end - 1);
    }

    barrier_sync(5, 256);  // K is no longer read by the other warpgroup
    const int warp_row = first + consumer.warp * 16;
    const int rows = (warpgroup * 64 + consumer.warp * 16) * SLAB_ROW;
    float scale[2] = {a.scale, a.scale}, one[2] = {1, 1};
    store_rows<D, Tile::k_slab, false>(a.dk, tile.b, tile.h, warp_row, a.Tk, dk, scale,
                                       memory.k_tile + rows, consumer.lane);
    store_rows<D, Tile::k_slab, false>(a.dv, tile.b, tile.h, warp_row, a.Tk, dv, one,
                                       memory.v_tile + rows, consumer.lane);
}

// Runs the backward for one tile of keys per block: sets up shared memory and the barriers, then
// gives each warpgroup its role.
template <class Tile>
__global__ void __launch_bounds__(Tile::threads, 1)
    hopper_backward_kernel(AttentionArgs a, BackwardWorkspace w,
                           const __grid_constant__ CUtensorMap q_map,
                           const __grid_constant__ CUtensorMap k_map,
                           const __grid_constant__ CUtensorMap v_map,
                           const __grid_constant__ CUtensorMap dO_map) {
#ifdef HAS_WGMMA
    constexpr int Bk = Tile::Bk, Bq = Tile::Bq, stages = Tile::stages;
    extern __shared__ char dynamic[];
    __shared__ BackwardBarriers<Tile> bars;
    BackwardMemory memory;
    memory.k_tile = dynamic + (1024 - smem_address(dynamic) % 1024) % 1024;
    memory.v_tile = memory.k_tile + Tile::k_bytes;
    memory.q_ring = memory.v_tile + Tile::k_bytes;
    memory.dO_ring = memory.q_ring + stages * Tile::q_bytes;
    memory.ds_tiles = memory.dO_ring + stages * Tile::q_bytes;
    memory.stats_ring = memory.ds_tiles + 2 * Tile::ds_bytes;

    int head = head_of_block(), b = head / a.H, h = head % a.H;
    int k0 = (int)blockIdx.y * Bk;  // the first keys are seen by the most queries: they start first
    int begin = a.causal ? k0 / Bq : 0, q_tiles = max((a.Tq + Bq - 1) / Bq - begin, 0);
    KeyTile tile = {head, b, h, k0, begin, q_tiles};
    let_next_kernel_start();  // `after`, which waits for this kernel's end in its first line

    if (threadIdx.x == 0) {
        mbarrier_init(&bars.k_full, 1);
        mbarrier_init(&bars.v_full, 1);
        for (int i = 0; i < stages; i++) {
            mbarrier_init(&bars.q_full[i], 1);
            mbarrier_init(&bars.dO_full[i], 1);
            mbarrier_init(&bars.q_empty[i], 2);
            mbarrier_init(&bars.dO_empty[i], 2);
        }
        mbarrier_init_fence();
    }
    __syncthreads();

    // so the compiler knows that it is uniform
    int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (warpgroup == 2) {
        fewer_registers<Tile::loader_registers>();
        if (threadIdx.x % 128 == 0 && tile.q_tiles > 0) {
            backward_loader(w, &q_map, &k_map, &v_map, &dO_map, bars, memory, tile);
        }
        return;
    }
    more_registers<Tile::registers>();
    backward_consumer(a, w, bars, memory, tile, warpgroup);
#endif
}

// Returns how TMA is to see x [B,H,T,D]: boxes of `rows` rows and 64 columns; beyond T and D it
// reads zeros.
static CUtensorMap tensor_map(const Tensor& x, int rows) {
    // the driver's, which we do not link
    static const auto encode = (decltype(&cuTensorMapEncodeTiled))dlsym(
        dlopen("libcuda.so.1", RTLD_LAZY), "cuTensorMapEncodeTiled");
    if (!encode) { fail("the driver has no cuTensorMapEncodeTiled"); }

    CUtensorMap map;
    cuuint64_t size[4], stride[3];  // from the last dimension to the first
    for (int i = 0; i < 4; i++) { size[i] = x.dim(3 - i); }
    for (int i = 0; i < 3; i++) { stride[i] = size[i + 1] > 1 ? x.stride[2 - i] * 2 : 16; }
    cuuint32_t box[] = {SLAB, (cuuint32_t)rows, 1, 1}, step[] = {1, 1, 1, 1};
    CUresult error = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, x.data, size, stride, box,
                            step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (error != CUDA_SUCCESS) { fail("cuTensorMapEncodeTiled: error %d", (int)error); }
    return map;
}

// Launches the forward with these tiles of queries, in at most a block per multiprocessor.
template <class Tile>
static void launch_forward(const AttentionTensors& t) {
    AttentionArgs a = args_of(t);
    dim3 order = attention_grid(a, ceil_div(a.Tq, Tile::Bq));
    int blocks = min<int64_t>(multiprocessors(), (int64_t)order.x * order.y * order.z);
    launch(hopper_forward_kernel<Tile>, blocks, Tile::threads, Tile::bytes, a, order,
           tensor_map(t.q, Tile::Bq), tensor_map(t.k, Tile::Bk), tensor_map(t.v, Tile::Bk));
}
// Launches the forward. Up to D 64 it takes tiles of 128 queries, not 192, where queries are few:
// 256 fill two of 128, but of two of 192 a third stays empty. On an H200 at D 64, causal, 16 to 100
// heads, it takes 0.58 to 0.77 of the time at 256 queries, 0.81 to 0.92 at 1024 and 1.05 to 1.14 at
// 4096; without a mask 0.81 at 256, 0.83 to 1.17 at 512. (At 192 it loses with many heads.) Above D
// 64 both branches are the same.
static void hopper_forward(const AttentionTensors& t) {
    with_head_size(t, [&](auto D) {
        if (t.q.dim(2) <= (t.causal ? 1024 : 256)) {
            launch_forward<HopperForward<D, 2>>(t);
        } else {
            launch_forward<HopperForward<D>>(t);
        }
    });
}

// Launches the three kernels, which write dQ, dK and dV; main and after may start early.
static void hopper_backward(const AttentionTensors& t) {
    with_head_size(t, [&](auto D) {
        using Tile = HopperBackward<D>;
        AttentionArgs a = args_of(t);
        Tensor memory;
        BackwardWorkspace w = backward_begin<D>(a, memory);
        launch<true>(hopper_backward_kernel<Tile>, attention_grid(a, ceil_div(a.Tk, Tile::Bk)),
                     Tile::threads, Tile::bytes, a, w, tensor_map(t.q, Tile::Bq),
                     tensor_map(t.k, Tile::Bk), tensor_map(t.v, Tile::Bk),
                     tensor_map(t.dO, Tile::Bq));
        backward_end<D>(a, w);
    });
}
static bool takes(DType t, int64_t D) {
    return t == BF16 && flash_head_size(D) &&
           compiled_for(hopper_forward_kernel<HopperForward<64>>) == 90;
}
static const AddRow<AttentionImpl> row({"hopper", CUDA, 60, takes, nullptr, hopper_forward,
                                        hopper_backward});
#endif
