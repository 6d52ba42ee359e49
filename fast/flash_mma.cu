// fast/flash_mma.cu: FlashAttention-2 on tensor cores, forward and backward, in bf16.
//
// What changed against flash_v1 (flash.cu), and why it is faster: mma.sync multiplies 16x16 by
// 16x8 matrices of 16-bit numbers with fp32 sums, ldmatrix hands them to the lanes of a warp in the
// layout that it wants, and cp.async copies tiles to shared memory while others are computed on.
// What it costs: S, P and dS are rounded to 16 bits where they enter a product, and the cards
// before the A100 (sm_80) cannot run it.
//
// The file has the instructions, the forward pass, the backward pass's main kernel, and their
// launches. Read ForwardTile and flash_forward_kernel first, then what that calls, in its order.
#include "flash.h"

#ifdef __CUDACC__
// Loads four 8x8 matrices of 16-bit elements: lane l gives the address of row l%8 of matrix l/8 and
// receives two neighbouring elements of row l/4 of each (of column l/4 with trans).
DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* smem) {
    uint32_t at = (uint32_t)__cvta_generic_to_shared(smem);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* smem) {
    uint32_t at = (uint32_t)__cvta_generic_to_shared(smem);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

// Both return where a lane points ldmatrix_x4 to in a 16x16 block of shared memory. The four 8x8
// matrices come in the order down, right, for an A operand [m][k], and transposed for a B operand
// [k][n]; or right, down, for a B operand [n][k], and transposed for an A operand [k][m].
DEVICE int down_right(int lane, int row) { return lane % 16 * row + lane / 16 * 8; }
DEVICE int right_down(int lane, int row) {
    return (lane % 8 + lane / 16 * 8) * row + lane / 8 % 2 * 8;
}

// Computes d[16x8] += a[16x16] b[16x8], with sums in fp32. Lane l holds d rows l/4 and l/4+8,
// columns 2(l%4) and +1.
DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// -------------------------------------------------------------------------------------------------
// Forward. A block owns Bq queries and streams tiles of Bk keys and values past them. S and P live
// in registers only: what a lane holds of S after step 1, the result of an mma, is laid out as the
// A operand that step 5 needs, so P takes no way through shared memory or other lanes.
//
// Tensor cores and the exponential unit are separate. To keep both busy, step 1 of tile j + 1 is
// mixed with steps 3 to 5 of tile j, in groups of keys. The exponentials of a group free its
// registers of S for the next tile's. K is therefore loaded one tile ahead of V.
//
// The hardware's exponential is exp2: with c = scale log2(e), exp(scale (s - m)) is exp2(c s - c
// m), one multiply-add and one ex2. m is kept times c.
//
// Step 2 is lazy: see SLACK. A vote over the warp asks whether it is due. Mostly it is not, which
// saves the exchange of maxima between lanes and the scaling of O.

// The fastest sizes measured that do not spill registers. A warp owns Bq/4 queries; rather 32 than
// 16, because every warp reads all of K and V from shared memory, and with 16 that takes longer
// than the products. flash_forward_mma says when tiles of 64 queries are better all the same.
struct ForwardSizes {
    int D, Bq;
    int Bk, group;  // keys of a tile, and of a group
    int blocks;     // that should share an SM: bounds the registers
    bool keep_q;    // in registers; else Q is read again for every group
};
constexpr ForwardSizes FORWARD_SIZES[] = {
    {16, 128, 64, 32, 3, true},    // D, Bq, Bk, group, blocks, keep_q
    {16, 64, 64, 16, 4, true},     //
    {32, 128, 32, 32, 3, true},    //
    {32, 64, 64, 16, 4, true},     //
    {64, 128, 64, 16, 2, true},    //
    {64, 64, 64, 16, 3, true},     //
    {80, 128, 32, 16, 2, true},    //
    {80, 64, 32, 16, 3, true},     //
    {128, 128, 32, 32, 2, false},  //
    {128, 64, 32, 16, 2, true},
};
// Returns the row of a table of sizes for this head size and these tiles of queries.
template <class Sizes, int N>
constexpr Sizes sizes_of(const Sizes (&table)[N], int D, int Bq) {
    int row = 0;
    while (table[row].D != D || table[row].Bq != Bq) { row++; }
    return table[row];
}

template <int HEAD, int QUERIES>
struct ForwardTile {
    static constexpr ForwardSizes sizes = sizes_of(FORWARD_SIZES, HEAD, QUERIES);
    static constexpr int D = HEAD, Bq = QUERIES, Bk = sizes.Bk, group = sizes.group;
    static constexpr int warps = 4, threads = warps * WARP, blocks = sizes.blocks;
    static constexpr bool keep_q = sizes.keep_q;
    static constexpr int fragments = Bq / warps / 16;  // of 16 queries, that a warp owns
    using Scores = float[fragments][Bk / 8][4];        // a warp's part of S
    // padded by 16 bytes: 8 rows at one column lie in 8 different bank groups
    static constexpr int row = D + 8;
    static constexpr int stage = 2 * Bk * row;  // elements; there are two
    static constexpr size_t bytes = (Bq * row + 2 * stage) * 2;
    static_assert(D % 16 == 0 && group % 16 == 0 && Bk % group == 0 && fragments >= 1);
    static_assert(Bq * row_threads(D) % threads == 0 && Bk * row_threads(D) % threads == 0);
    static_assert(bytes <= 99 << 10, "what a block can have on every device from sm_80 on");
};

// What a lane holds of its warp's queries: rows lane/4 + 8h of fragment f are at index [f][h].
template <class Tile>
struct ForwardRows {
    float o[Tile::fragments][Tile::D / 8][4];
    // the four lanes of a row: m is the same, l each one's share
    float m[Tile::fragments][2], l[Tile::fragments][2];
};

// Copies ROWS rows of D elements to shared memory, asynchronously; those from `valid` on become
// zeros, whatever lies there in memory. A thread stays in one column of 8 elements; at D = 80 the
// last 6 of 16 have nothing to do.
template <class Tile, int ROWS>
DEVICE void load_rows(bf16* to, const bf16* from, int stride, int valid) {
    constexpr int columns = row_threads(Tile::D), step = Tile::threads / columns;
    int r = threadIdx.x / columns, d = threadIdx.x % columns * 8;
    if (d >= Tile::D) { return; }

    from += (int64_t)r * stride + d;
    to += r * Tile::row + d;
    for (int i = 0; i < ROWS / step; i++) {
        copy_16(to + i * step * Tile::row, from, r + i * step < valid);
        from += (int64_t)step * stride;
    }
}

// Does step 1 for a warp's queries and the keys of group g of a tile. at_q and at_k are this lane's
// rows. q holds its queries already if Tile::keep_q, else it is read here, 16 columns at a time.
template <class Tile, int KEPT>
DEVICE void scores(typename Tile::Scores& s, uint32_t (&q)[KEPT][Tile::fragments][4],
                   const bf16* at_q, const bf16* at_k, int g) {
    constexpr int N = Tile::group / 16;
    for (int f = 0; f < Tile::fragments; f++) {
        for (int n = g * 2 * N; n < (g + 1) * 2 * N; n++) {
            for (int i = 0; i < 4; i++) { s[f][n][i] = 0; }
        }
    }

#pragma unroll
    for (int k = 0; k < Tile::D / 16; k++) {
        uint32_t(&own)[Tile::fragments][4] = q[Tile::keep_q ? k : 0];
        if (!Tile::keep_q) {
            for (int f = 0; f < Tile::fragments; f++) {
                ldmatrix_x4(own[f], at_q + f * 16 * Tile::row + k * 16);
            }
        }

        for (int n = g * N; n < (g + 1) * N; n++) {
            uint32_t b[4];
            ldmatrix_x4(b, at_k + n * 16 * Tile::row + k * 16);
            for (int f = 0; f < Tile::fragments; f++) {
                mma(s[f][2 * n], own[f], b[0], b[1]);
                mma(s[f][2 * n + 1], own[f], b[2], b[3]);
            }
        }
    }
}

// Gives the score -inf to keys that a query may not see, and to those beyond Tk. (The masks of this
// file are keys_seen(), written out: by its calls the forward has more instructions, and the
// backward spills registers.)
template <class Tile>
DEVICE void mask(typename Tile::Scores& s, const AttentionArgs& a, int query, int key) {
    for (int f = 0; f < Tile::fragments; f++) {
        for (int h = 0; h < 2; h++) {
            int end = (a.causal ? min(query + f * 16 + h * 8 + 1, a.Tk) : a.Tk) - key;
            for (int n = 0; n < Tile::Bk / 8; n++) {
                if (n * 8 >= end) { s[f][n][2 * h] = -INFINITY; }
                if (n * 8 + 1 >= end) { s[f][n][2 * h + 1] = -INFINITY; }
            }
        }
    }
}

// Does step 2 where it is due, and what of steps 3 to 5 multiplies by shrink. m starts from -inf,
// so the first tile always is due. That tile shows key 0 to every query, so m is finite from there
// on, and step 3 never subtracts infinities.
template <class Tile>
DEVICE void raise_maximum(ForwardRows<Tile>& rows, const typename Tile::Scores& s, float c) {
    float top[Tile::fragments][2];
    bool due = false;
    for (int f = 0; f < Tile::fragments; f++) {
        for (int h = 0; h < 2; h++) {
            float x = s[f][0][2 * h];
            for (int n = 0; n < Tile::Bk / 8; n++) {
                x = fmaxf(x, fmaxf(s[f][n][2 * h], s[f][n][2 * h + 1]));
            }
            top[f][h] = x * c;
            due |= top[f][h] > rows.m[f][h] + SLACK;
        }
    }
    if (!__any_sync(0xffffffff, due)) { return; }

    for (int f = 0; f < Tile::fragments; f++) {
        for (int h = 0; h < 2; h++) {
            float x = fmaxf(rows.m[f][h], top[f][h]);
            x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
            x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));

            float shrink = exp2_approx(rows.m[f][h] - x);
            rows.m[f][h] = x;
            rows.l[f][h] *= shrink;
            for (int n = 0; n < Tile::D / 8; n++) {
                rows.o[f][n][2 * h] *= shrink;
                rows.o[f][n][2 * h + 1] *= shrink;
            }
        }
    }
}

// Does steps 3 to 5 for the keys of group g: computes P, and adds what it gives to l and O.
template <class Tile>
DEVICE void add_values(ForwardRows<Tile>& rows, const typename Tile::Scores& s, const bf16* at_v,
                       float c, int g) {
    uint32_t p[Tile::group / 16][Tile::fragments][4];
    for (int k = 0; k < Tile::group / 16; k++) {
        for (int f = 0; f < Tile::fragments; f++) {
            // row lane/4 + 8h, keys 2(lane%4) + 8(e/2) and the next one
            for (int e = 0; e < 4; e++) {
                int h = e % 2;
                const float* x = &s[f][g * Tile::group / 8 + 2 * k + e / 2][2 * h];
                float low = exp2_approx(x[0] * c - rows.m[f][h]);
                float high = exp2_approx(x[1] * c - rows.m[f][h]);
                rows.l[f][h] += low + high;
                p[k][f][e] = pack(low, high);
            }
        }
    }

    for (int k = 0; k < Tile::group / 16; k++) {
#pragma unroll
        for (int n = 0; n < Tile::D / 16; n++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, at_v + (g * Tile::group + k * 16) * Tile::row + n * 16);
            for (int f = 0; f < Tile::fragments; f++) {
                mma(rows.o[f][2 * n], p[k][f], b[0], b[1]);
                mma(rows.o[f][2 * n + 1], p[k][f], b[2], b[3]);
            }
        }
    }
}

// Does step 6: divides O by l and stores it, and L. O goes through the warp's own rows of Q's
// place, to be stored 16 bytes at a time.
template <class Tile>
DEVICE void store_output(ForwardRows<Tile>& rows, const AttentionArgs& a, bf16* smem, int query) {
    int lane = threadIdx.x % WARP, z = blockIdx.z;
    // so that the head is computed again: kept from the start it would be spilled
    asm volatile("" : "+r"(z));
    int bh = head_of_block(z);

    __syncwarp();  // the other lanes may still read Q
    for (int f = 0; f < Tile::fragments; f++) {
        for (int h = 0; h < 2; h++) {
            float l = rows.l[f][h];
            l += __shfl_xor_sync(0xffffffff, l, 1);
            l += __shfl_xor_sync(0xffffffff, l, 2);
            float inverse = 1 / l;

            int r = f * 16 + h * 8 + lane / 4;
            if (lane % 4 == 0 && query + r < a.Tq) {
                a.L[(int64_t)bh * a.Tq + query + r] = rows.m[f][h] / LOG2_E + logf(l);
            }
            for (int n = 0; n < Tile::D / 8; n++) {
                *(uint32_t*)(smem + r * Tile::row + n * 8 + lane % 4 * 2) =
                    pack(rows.o[f][n][2 * h] * inverse, rows.o[f][n][2 * h + 1] * inverse);
            }
        }
    }

    __syncwarp();  // what the other lanes wrote is read below
    bf16* o = head_of<bf16>(a.o, bh / a.H, bh % a.H);
    constexpr int chunks = Tile::D / 8;
    for (int c = lane; c < Tile::fragments * 16 * chunks; c += WARP) {
        int r = c / chunks, d = c % chunks * 8;
        if (query + r < a.Tq) {
            *(uint4*)(o + (query + r) * a.o.row + d) = *(const uint4*)(smem + r * Tile::row + d);
        }
    }
}

// Computes O and L of one tile of queries per block. A block's tile is counted from the END: causal
// tiles grow with their queries, and the longest come first.
template <class Tile>
__global__ void __launch_bounds__(Tile::threads, Tile::blocks)
    flash_forward_kernel(AttentionArgs a) {
#ifdef HAS_CP_ASYNC
    extern __shared__ __align__(16) char shared[];
    constexpr int Bq = Tile::Bq, Bk = Tile::Bk, row = Tile::row, groups = Bk / Tile::group;
    int bh = head_of_block(), b = bh / a.H, h = bh % a.H;
    int lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * Tile::fragments * 16;
    int q0 = (gridDim.y - 1 - blockIdx.y) * Bq;  // the block's first query
    int query = q0 + warp_row;                   // the warp's
    const bf16* q = head_of<const bf16>(a.q, b, h) + q0 * a.q.row;
    const bf16 *k = head_of<const bf16>(a.k, b, h), *v = head_of<const bf16>(a.v, b, h);
    bf16 *smem_q = (bf16*)shared, *smem_kv = smem_q + Bq * row;
    int at_row = down_right(lane, row);  // in Q, and in V, which is read transposed
    int at_key = right_down(lane, row);  // in K
    const bf16* at_q = smem_q + warp_row * row + at_row;
    float c = a.scale * LOG2_E;

    // Tiles of keys that some query of the block sees, and those that all see whole. The last one
    // does not count among these: it has no next.
    int k_tiles = ((a.causal ? min(q0 + Bq, a.Tk) : a.Tk) + Bk - 1) / Bk;
    int whole_tiles = min((a.causal ? min(q0 + 1, a.Tk) : a.Tk) / Bk, k_tiles - 1);

    // Stage j%2 holds K of tile j + 1 and V of tile j.
    auto load_keys = [&](int j) {
        bf16* to = smem_kv + (j + 1) % 2 * Tile::stage;
        load_rows<Tile, Bk>(to, k + j * Bk * a.k.row, (int)a.k.row, a.Tk - j * Bk);
    };
    auto load_stage = [&](int j) {
        bf16* to = smem_kv + j % 2 * Tile::stage + Bk * row;
        if (j + 1 < k_tiles) { load_keys(j + 1); }
        load_rows<Tile, Bk>(to, v + j * Bk * a.v.row, (int)a.v.row, a.Tk - j * Bk);
        cp_async_commit();
    };
    // Waits for stage j. Behind the barrier all warps' copies for it are there, and no warp still
    // reads stage j - 1, into whose place j + 1 is copied while j is computed.
    auto next_stage = [&](int j) {
        cp_async_wait<0>();
        __syncthreads();
        if (j + 1 < k_tiles) { load_stage(j + 1); }
        return smem_kv + j % 2 * Tile::stage;
    };

    load_rows<Tile, Bq>(smem_q, q, (int)a.q.row, a.Tq - q0);
    load_keys(0);
    cp_async_commit();
    load_stage(0);
    ForwardRows<Tile> rows = {};
    for (int f = 0; f < Tile::fragments; f++) {
        for (int h = 0; h < 2; h++) { rows.m[f][h] = -INFINITY; }
    }
    cp_async_wait<1>();
    __syncthreads();  // Q and the first K, copied by all warps

    uint32_t q_fragments[Tile::keep_q ? Tile::D / 16 : 1][Tile::fragments][4];
    if (Tile::keep_q) {
        for (int d = 0; d < Tile::D / 16; d++) {
            for (int f = 0; f < Tile::fragments; f++) {
                ldmatrix_x4(q_fragments[d][f], at_q + f * 16 * row + d * 16);
            }
        }
    }
    typename Tile::Scores s;
    for (int g = 0; g < groups; g++) {
        scores<Tile>(s, q_fragments, at_q, smem_kv + Tile::stage + at_key, g);
    }

    int j = 0;
#pragma unroll 1
    for (; j < whole_tiles; j++) {
        const bf16* kv = next_stage(j);
        raise_maximum(rows, s, c);
#pragma unroll
        for (int g = 0; g < groups; g++) {
            add_values(rows, s, kv + Bk * row + at_row, c, g);
            scores<Tile>(s, q_fragments, at_q, kv + at_key, g);
        }
    }
    // The diagonal and the end of the keys. Tiles that no query of this warp sees are skipped, but
    // not their barriers.
    int warp_tiles = k_tiles;
    if (a.causal) { warp_tiles = min(k_tiles, (query + Tile::fragments * 16 + Bk - 1) / Bk); }
#pragma unroll 1
    for (; j < k_tiles; j++) {
        const bf16* kv = next_stage(j);
        if (j >= warp_tiles) { continue; }

        mask<Tile>(s, a, query + lane / 4, j * Bk + lane % 4 * 2);
        raise_maximum(rows, s, c);
        for (int g = 0; g < groups; g++) { add_values(rows, s, kv + Bk * row + at_row, c, g); }
        if (j + 1 < warp_tiles) {
            for (int g = 0; g < groups; g++) { scores<Tile>(s, q_fragments, at_q, kv + at_key, g); }
        }
    }
    store_output(rows, a, smem_q + warp_row * row, query);
#endif
}

template <class Tile>
static void launch_forward(const AttentionArgs& a) {
    launch(flash_forward_kernel<Tile>, attention_grid(a, ceil_div(a.Tq, Tile::Bq), Tile::blocks),
           Tile::threads, Tile::bytes, a);
}

// Where tiles of 128 queries do not give every SM two blocks, all blocks run at once, and the
// longest alone decides when it is over. Smaller tiles then shorten it, though their 16 queries a
// warp cost more reads of shared memory.
template <int D>
static void forward_of(const AttentionArgs& a) {
    if ((int64_t)a.B * a.H * ceil_div(a.Tq, 128) <= 2 * multiprocessors()) {
        launch_forward<ForwardTile<D, 64>>(a);
    } else {
        launch_forward<ForwardTile<D, 128>>(a);
    }
}
static void flash_forward_mma(const AttentionTensors& t) {
    AttentionArgs a = args_of(t);
    switch (t.q.dim(3)) {
        case 16: return forward_of<16>(a);
        case 32: return forward_of<32>(a);
        case 64: return forward_of<64>(a);
        case 80: return forward_of<80>(a);
        case 128: return forward_of<128>(a);
        default: fail("%s: no kernel for this head size", __func__);
    }
}

// -------------------------------------------------------------------------------------------------
// Backward: the main kernel, between fast/flash.h's `before` and `after`.
//
// Scores are transposed, a row being a key: S^T = K Q^T, dP^T = V dO^T. The transposes are the
// point: what a warp holds of P^T and dS^T after their product (16 keys, 16 queries) is laid out as
// the A operand of steps 9 and 13, so P and dS reach dV and dK without leaving registers. Only step
// 12 sums over the keys of all warps, and takes dS through shared memory.
//
// A block's own rows, keys, stay; tiles of streamed rows of the other side pass, double-buffered,
// and are taken a step at a time. A warp owns 16 or 32 rows: with 32 each ldmatrix of the streamed
// side feeds twice as many products, and shared memory is what bounds these kernels. dV and dK of
// 32 rows are 128 floats a lane at D = 64; for D = 128, where that many do not fit into its
// registers, a warp owns 16.
struct BackwardSizes {
    int D, Bq;       // Bq: queries of a streamed tile
    int own, step;   // rows that a block owns; streamed rows of a step
    int blocks;      // that should share an SM: bounds the registers
    int dq_columns;  // step 12: the warps' grid over dQ has so many columns
};
constexpr BackwardSizes BACKWARD_SIZES[] = {
    {16, 64, 128, 32, 2, 1},  // D, Bq, own, step, blocks, dq_columns
    {32, 64, 128, 32, 2, 1},  //
    {64, 64, 128, 32, 2, 2},  //
    {80, 64, 128, 16, 2, 1},  //
    {80, 32, 128, 16, 1, 2},  //
    {128, 32, 64, 16, 1, 2},
};

template <int HEAD, int STREAMED>
struct BackwardTile {
    static constexpr BackwardSizes sizes = sizes_of(BACKWARD_SIZES, HEAD, STREAMED);
    static constexpr int D = HEAD, own = sizes.own, streamed = STREAMED, step = sizes.step;
    static constexpr int warps = 4, threads = warps * WARP, blocks = sizes.blocks;
    // A warp's part of S^T: own_fragments x step_fragments blocks of 16x8.
    static constexpr int own_fragments = own / warps / 16, step_fragments = step / 8;
    using Scores = float[own_fragments][step_fragments][4];
    using Sums = float[own_fragments][D / 8][4];  // of dV or dK
    using Operand = uint32_t[own_fragments][4];   // 16 columns of Scores as a product's A
    // padded by 16 bytes: 8 rows at one column lie in 8 different bank groups
    static constexpr int row = D + 8;
    static constexpr int ds_row = streamed + 8;  // dS^T: [key][query]
    // step 12: the warps' grid over dQ is dq_rows x dq_columns,
    static constexpr int dq_columns = sizes.dq_columns, dq_rows = warps / dq_columns;
    // and each has dq_row_blocks x dq_column_blocks blocks of 16x16
    static constexpr int dq_row_blocks = streamed / 16 / dq_rows;
    static constexpr int dq_column_blocks = (D / 16 + dq_columns - 1) / dq_columns;
    // How far sums are unrolled, of S and dP over D and of dQ over the keys: as far as registers
    // last, without spills.
    static constexpr int k_unroll = D >= 64 ? 1 : 2, dq_unroll = D > 64 ? 2 : 4;
    // shared memory: K and V; two tiles of Q and dO; dS; two tiles' L and D
    static constexpr size_t bytes =
        (2 * own + 4 * streamed) * row * 2 + own * ds_row * 2 + 2 * streamed * sizeof(float2);
    static_assert(D % 16 == 0 && own_fragments >= 1 && streamed % step == 0 && step % 16 == 0);
    static_assert(own % streamed == 0 && BACKWARD_PAD % streamed == 0 && dq_row_blocks >= 1);
};

// Copies rows [first, first + ROWS) of x to shared memory, asynchronously; zeros for those from
// `rows` on.
// (With one load_rows for both passes, of this form the forward spills registers, of its form the
// backward has more instructions.)
template <class Tile, int ROWS>
DEVICE void load_rows(bf16* to, const bf16* x, int64_t stride, int first, int rows) {
    constexpr int across = row_threads(Tile::D), down = Tile::threads / across;
    int r = threadIdx.x / across, d = threadIdx.x % across * 8, left = rows - first - r;
    if (d >= Tile::D) { return; }

    const bf16* from = x + (first + r) * stride + d;
    to += r * Tile::row + d;
    // Addresses advance by constants: this runs before each tile's first product.
    for (int i = 0; i < ROWS; i += down) {
        // of a row that does not exist nothing is read
        copy_16(to + i * Tile::row, from, i < left);
        from += down * stride;
    }
}
// Computes c[owned rows, step] += own rows^T, for the streamed rows of one step.
template <class Tile>
DEVICE void multiply(typename Tile::Scores& c, const bf16* own, const bf16* rows, int lane) {
#pragma unroll(Tile::k_unroll)
    for (int k = 0; k < Tile::D; k += 16) {
        typename Tile::Operand f;
        for (int m = 0; m < Tile::own_fragments; m++) {
            ldmatrix_x4(f[m], own + 16 * m * Tile::row + k + down_right(lane, Tile::row));
        }
        for (int n = 0; n < Tile::step_fragments; n += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, rows + 8 * n * Tile::row + k + right_down(lane, Tile::row));
            for (int m = 0; m < Tile::own_fragments; m++) {
                mma(c[m][n], f[m], b[0], b[1]);
                mma(c[m][n + 1], f[m], b[2], b[3]);
            }
        }
    }
}
// Computes sum[owned rows, D] += p[owned rows, 16] rows, for 16 streamed rows.
template <class Tile>
DEVICE void accumulate(typename Tile::Sums& sum, const typename Tile::Operand& p, const bf16* rows,
                       int lane) {
#pragma unroll
    for (int n = 0; n < Tile::D / 8; n += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, rows + 8 * n + down_right(lane, Tile::row));
        for (int m = 0; m < Tile::own_fragments; m++) {
            mma(sum[m][n], p[m], b[0], b[1]);
            mma(sum[m][n + 1], p[m], b[2], b[3]);
        }
    }
}
// Rounds the accumulators n and n+1, which then are the A operand of a product that sums over their
// 16 columns. Its register i holds two neighbours, 8 (i%2) rows down and 8 (i/2) columns right.
template <class Tile>
DEVICE void pack_operand(typename Tile::Operand& p, const typename Tile::Scores& c, int n) {
    for (int m = 0; m < Tile::own_fragments; m++) {
        for (int i = 0; i < 4; i++) {
            p[m][i] = pack(c[m][n + i / 2][i % 2 * 2], c[m][n + i / 2][i % 2 * 2 + 1]);
        }
    }
}
// Stores the warp's sums, times factor, to the rows of x from `first` on that exist.
template <class Tile>
DEVICE void store_rows(bf16* x, int64_t stride, int first, int rows, typename Tile::Sums& sum,
                       float factor, int lane) {
    for (int m = 0; m < Tile::own_fragments; m++) {
        for (int half = 0; half < 2; half++) {
            int r = first + 16 * m + 8 * half + lane / 4;
            if (r >= rows) { continue; }

            for (int n = 0; n < Tile::D / 8; n++) {
                *(uint32_t*)(x + r * stride + 8 * n + lane % 4 * 2) =
                    pack(sum[m][n][2 * half] * factor, sum[m][n][2 * half + 1] * factor);
            }
        }
    }
}

// Turns S^T of one step into P^T. stats: of the step's queries.
template <class Tile, bool MASKED>
DEVICE void exponentiate(typename Tile::Scores& s, const AttentionArgs& a, int key, int query,
                         const float2* stats, int lane) {
    float factor = a.scale * LOG2_E;
    // a lane's columns: the queries 8n + 2(lane%4) and the next one
    for (int n = 0; n < Tile::step_fragments; n++) {
        float4 two = *(const float4*)(stats + 8 * n + lane % 4 * 2);
        for (int m = 0; m < Tile::own_fragments; m++) {
            for (int i = 0; i < 4; i++) {
                int at_key = key + 16 * m + 8 * (i / 2) + lane / 4;
                int at_query = query + 8 * n + lane % 4 * 2 + i % 2;
                float x = s[m][n][i] * factor - (i % 2 ? two.y : two.x);
                // Keys beyond Tk have S = 0, and exp(-L) may be inf: zero rows of K alone do not
                // take them out.
                if (MASKED && (at_key >= a.Tk || (a.causal && at_key > at_query))) {
                    x = -INFINITY;
                }
                s[m][n][i] = exp2_approx(x);
            }
        }
    }
}
// Computes dP^T - D of one step: the sums start from -D of their column, which is a query.
template <class Tile>
DEVICE void multiply_dp(typename Tile::Scores& dp, const bf16* v, const bf16* dO,
                        const float2* stats, int lane) {
    for (int n = 0; n < Tile::step_fragments; n++) {
        float4 two = *(const float4*)(stats + 8 * n + lane % 4 * 2);
        for (int m = 0; m < Tile::own_fragments; m++) {
            for (int i = 0; i < 4; i++) { dp[m][n][i] = i % 2 ? -two.w : -two.z; }
        }
    }
    multiply<Tile>(dp, v, dO, lane);
}
// Stores the operand of keys [16 m, +16) and 16 queries to dS^T, [key][query], in shared memory.
template <class Tile>
DEVICE void store_ds(bf16* ds, const typename Tile::Operand& p, int lane) {
    for (int m = 0; m < Tile::own_fragments; m++) {
        for (int i = 0; i < 4; i++) {
            bf16* to =
                ds + (16 * m + i % 2 * 8 + lane / 4) * Tile::ds_row + i / 2 * 8 + lane % 4 * 2;
            *(uint32_t*)to = p[m][i];
        }
    }
}
// Does steps 8 to 11 and 13 for Tile::step queries, by one warp. key: the warp's first; k, v: its
// rows of K and V; q, dO, stats: the queries'; ds: where dS^T goes.
template <class Tile, bool MASKED>
DEVICE void step_queries(const AttentionArgs& a, int key, int query, const bf16* k, const bf16* v,
                         const bf16* q, const bf16* dO, const float2* stats, bf16* ds, int lane,
                         typename Tile::Sums& dk, typename Tile::Sums& dv) {
    typename Tile::Scores s = {}, dp;
    multiply<Tile>(s, k, q, lane);  // step 8
    exponentiate<Tile, MASKED>(s, a, key, query, stats, lane);
    multiply_dp<Tile>(dp, v, dO, stats, lane);  // step 10, and step 11's - D

    typename Tile::Operand p;
    for (int n = 0; n < Tile::step_fragments; n += 2) {
        pack_operand<Tile>(p, s, n);
        accumulate<Tile>(dv, p, dO + 8 * n * Tile::row, lane);  // step 9
    }
    for (int n = 0; n < Tile::step_fragments; n += 2) {
        for (int m = 0; m < Tile::own_fragments; m++) {  // step 11
            for (int right = 0; right < 2; right++) {
                for (int i = 0; i < 4; i++) { dp[m][n + right][i] *= s[m][n + right][i]; }
            }
        }
        pack_operand<Tile>(p, dp, n);
        store_ds<Tile>(ds + 8 * n, p, lane);
        accumulate<Tile>(dk, p, q + 8 * n * Tile::row, lane);  // step 13
    }
}

// Does step 12 for one tile of queries: adds dS K [Bq,D] to the workspace at `row` of all heads'
// rows.
template <class Tile>
DEVICE void backward_add_dq(float* dq, int row, const bf16* ds, const bf16* k, int warp, int lane) {
    int row_block = warp / Tile::dq_columns * Tile::dq_row_blocks;
    int column_block = warp % Tile::dq_columns;
    float sum[Tile::dq_row_blocks][Tile::dq_column_blocks][2][4] = {};
#pragma unroll(Tile::dq_unroll)
    for (int key = 0; key < Tile::own; key += 16) {
        uint32_t f[Tile::dq_row_blocks][4];
        for (int m = 0; m < Tile::dq_row_blocks; m++) {
            ldmatrix_x4_trans(f[m], ds + key * Tile::ds_row + 16 * (row_block + m) +
                                        right_down(lane, Tile::ds_row));
        }
        for (int n = 0; n < Tile::dq_column_blocks; n++) {
            int column = column_block + n * Tile::dq_columns;
            if (column >= Tile::D / 16) { continue; }  // D = 80 has 5 blocks, shared by 2 warps
            uint32_t b[4];
            ldmatrix_x4_trans(b, k + key * Tile::row + 16 * column + down_right(lane, Tile::row));
            for (int m = 0; m < Tile::dq_row_blocks; m++) {
                mma(sum[m][n][0], f[m], b[0], b[1]);
                mma(sum[m][n][1], f[m], b[2], b[3]);
            }
        }
    }

    for (int m = 0; m < Tile::dq_row_blocks; m++) {
        for (int n = 0; n < Tile::dq_column_blocks; n++) {
            int column = column_block + n * Tile::dq_columns;
            if (column >= Tile::D / 16) { continue; }
            float* block =
                dq + ((int64_t)(row / 16 + row_block + m) * (Tile::D / 8) + 2 * column) * 128;
            add_dq(block, lane, sum[m][n][0]);
            add_dq(block + 128, lane, sum[m][n][1]);
        }
    }
}

// Computes dK and dV of one tile of keys per block, and adds its part of dQ to the workspace.
template <class Tile>
__global__ __launch_bounds__(Tile::threads, Tile::blocks) void backward_main(AttentionArgs a,
                                                                             BackwardWorkspace w) {
#ifdef HAS_CP_ASYNC
    constexpr int Bk = Tile::own, Bq = Tile::streamed, tile_size = Bq * Tile::row;
    extern __shared__ __align__(16) char shared[];
    bf16 *k = (bf16*)shared, *v = k + Bk * Tile::row;
    bf16 *q = v + Bk * Tile::row, *dO = q + 2 * tile_size;  // two tiles each
    bf16* ds = dO + 2 * tile_size;
    float2* stats = (float2*)(ds + Bk * Tile::ds_row);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, own = warp * Tile::own_fragments * 16;
    // Causal: the first keys are seen by the most queries, so they start first.
    int bh = head_of_block(), b = bh / a.H, h = bh % a.H, k0 = blockIdx.y * Bk;
    int begin = a.causal ? k0 / Bq : 0, end = (a.Tq + Bq - 1) / Bq;  // query tiles
    // Masked are those that the diagonal crosses; all, if some keys are beyond Tk.
    int masked_end = end;
    if (k0 + Bk <= a.Tk) { masked_end = a.causal ? min(end, (k0 + Bk) / Bq) : begin; }
    int row = bh * w.rows;  // of all heads' rows
    const bf16 *from_q = head_of<const bf16>(a.q, b, h), *from_dO = head_of<const bf16>(a.dO, b, h);

    auto load_tile = [&](int i) {
        load_rows<Tile, Bq>(q + i % 2 * tile_size, from_q, a.q.row, i * Bq, a.Tq);
        load_rows<Tile, Bq>(dO + i % 2 * tile_size, from_dO, a.dO.row, i * Bq, a.Tq);
        if (threadIdx.x < Bq / 2) {  // two queries are 16 bytes
            int two = threadIdx.x * 2;
            copy_16(stats + i % 2 * Bq + two, (const float2*)w.stats + (row + i * Bq + two), true);
        }
        cp_async_commit();
    };
    load_rows<Tile, Bk>(k, head_of<const bf16>(a.k, b, h), a.k.row, k0, a.Tk);
    load_rows<Tile, Bk>(v, head_of<const bf16>(a.v, b, h), a.v.row, k0, a.Tk);
    if (begin < end) { load_tile(begin); }  // the loop waits for all three
    const bf16 *my_k = k + own * Tile::row, *my_v = v + own * Tile::row;
    typename Tile::Sums dk = {}, dv = {};

    auto step_tile = [&](int i, auto masked) {
        constexpr bool MASKED = decltype(masked)::value;
        cp_async_wait<0>();
        // this tile is there, from every thread; and nobody reads the other buffers any more
        __syncthreads();
        if (i + 1 < end) { load_tile(i + 1); }
        const bf16 *q_tile = q + i % 2 * tile_size, *dO_tile = dO + i % 2 * tile_size;
        const float2* stats_tile = stats + i % 2 * Bq;
#pragma unroll 1
        for (int at = 0; at < Bq; at += Tile::step) {
            step_queries<Tile, MASKED>(a, k0 + own, i * Bq + at, my_k, my_v,
                                       q_tile + at * Tile::row, dO_tile + at * Tile::row,
                                       stats_tile + at, ds + own * Tile::ds_row + at, lane, dk, dv);
        }
        __syncthreads();  // dS is there, from every warp
        backward_add_dq<Tile>(w.dq, row + i * Bq, ds, k, warp, lane);
    };

    int i = begin;
#pragma unroll 1
    for (; i < masked_end; i++) { step_tile(i, std::true_type()); }
#pragma unroll 1
    for (; i < end; i++) { step_tile(i, std::false_type()); }

    cp_async_wait<0>();  // causal keys that no query sees: K and V may still be on their way
    store_rows<Tile>(head_of<bf16>(a.dv, b, h), a.dv.row, k0 + own, a.Tk, dv, 1, lane);
    store_rows<Tile>(head_of<bf16>(a.dk, b, h), a.dk.row, k0 + own, a.Tk, dk, a.scale, lane);
#endif
}

// ---- launch ----
// Runs the backward by Tile where a block can have that much shared memory, else by Small.
template <class Tile, class Small = Tile>
static void launch_backward(const AttentionTensors& t) {
    if constexpr (!std::is_same<Tile, Small>::value) {
        if (shared_memory_per_block() < Tile::bytes) { return launch_backward<Small>(t); }
    }

    AttentionArgs a = args_of(t);
    Tensor memory;
    BackwardWorkspace w = backward_begin<Tile::D>(a, memory);
    launch(backward_main<Tile>, attention_grid(a, ceil_div(a.Tk, Tile::own), Tile::blocks),
           Tile::threads, Tile::bytes, a, w);
    backward_end<Tile::D>(a, w);
}
static void backward(const AttentionTensors& t) {
    switch (t.q.dim(3)) {
        case 16: return launch_backward<BackwardTile<16, 64>>(t);
        case 32: return launch_backward<BackwardTile<32, 64>>(t);
        case 64: return launch_backward<BackwardTile<64, 64>>(t);
        case 80: return launch_backward<BackwardTile<80, 64>, BackwardTile<80, 32>>(t);
        case 128: return launch_backward<BackwardTile<128, 32>>(t);
        default: fail("%s: no kernel for this head size", __func__);
    }
}
static bool takes(DType t, int64_t D) {
    static const bool runs_here = compiled_for(backward_after<64>) >= 80;
    return t == BF16 && flash_head_size(D) && runs_here;
}
static const AddRow<AttentionImpl> row({"flash_mma", CUDA, 50, takes, nullptr, flash_forward_mma,
                                        backward});
#endif
