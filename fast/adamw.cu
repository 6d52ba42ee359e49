// fast/adamw.cu: weights that bf16 products need not cast, and AdamW for many tensors in one
// launch. First come split weights: how they are converted, kept and restored. Then the kernel, its
// launch, and the CPU's loop.
//
// Split weights. bf16 is the upper half of fp32, so the weights that AdamW updates in fp32 and
// those that bf16 products take need 4 bytes together, not 6, and no cast: a part's place in the
// arena then holds first the upper halves of all its elements, which are the part in bf16, then
// their lower halves. A part is a matrix, as products take it, or FSDP's part of a unit. Each
// gradient is that of a part, or of weights that are whole.
//
// Why AdamW does not run during backward, on one card (tried on an H100, bf16, small to 2.7B):
//   - A stream of its own for it, of either priority, gains at most 1 % of a step. With 96 to 288
//     blocks only, or with cuBLAS held to 84 to 116 multiprocessors, the step takes longer.
//   - One kernel for it and for the product that makes the gradient (wgmma; two warpgroups multiply
//     a tile while seven warps step the one before) gains 5 to 8 % of medium's to 2.7B's steps at
//     context length 256, 3 to 6 % of large's to 2.7B's at 1024, and nothing of small's. It costs
//     3,000 tokens, which is more than README allows for that.
#include "fast_ways.h"
#include "lib/gpu.h"

constexpr int THREADS = 256;  // of a block

struct Halves {
    uint16_t upper, lower;
};
// Splits x. upper is rounded to nearest, ties away from zero (a cast's go to even, which could not
// be undone); lower is as it was, and its top bit says whether upper was rounded up. NaN stays
// NaN.
HD inline Halves halves_of(float x) {
    const uint32_t bits = x == x ? bits_of(x) : 0x7fc00000;
    return {(uint16_t)((bits + 0x8000) >> 16), (uint16_t)bits};
}
HD inline float whole_of(Halves h) {
    return float_of((uint32_t)(uint16_t)(h.upper - (h.lower >> 15)) << 16 | h.lower);
}
// Converts element i of n: `split` from whole to halves, else back.
HD inline void convert_halves(float* whole, uint16_t* halves, int64_t n, int64_t i, bool split) {
    if (split) {
        Halves h = halves_of(whole[i]);
        halves[i] = h.upper;
        halves[n + i] = h.lower;
    } else {
        whole[i] = whole_of({halves[i], halves[n + i]});
    }
}
#ifdef HAVE_CUDA
__global__ void convert_halves_kernel(float* whole, uint16_t* halves, int64_t n, bool split) {
    int64_t i = thread_number();
    if (i < n) { convert_halves(whole, halves, n, i, split); }
}
#endif
// Splits the weights of a part in place, or joins them, by way of a whole copy. The part's
// dtype has to be F32 both times, for copy_or_add, also while it holds halves.
static void convert_part(const Tensor& part, bool split) {
    int64_t n = part.size();
    Tensor whole = empty(part.shape, F32, WORKSPACE);
    auto* halves = (uint16_t*)part.data;
    if (split) { copy_or_add(whole, part, false); }

#ifdef HAVE_CUDA
    if (whole.device() == CUDA) {
        LAUNCH(convert_halves_kernel, ceil_div(n, THREADS), THREADS, whole.as<float>(), halves, n,
               split);
    }
#endif
    if (whole.device() == CPU) {
#pragma omp parallel for
        for (int64_t i = 0; i < n; i++) { convert_halves(whole.as<float>(), halves, n, i, split); }
    }

    if (!split) { copy_or_add(part, whole, false); }
}

// -------------------------------------------------------------------------------------------------
// What FastWays has of this. The weights do not show that they are split, so this file
// remembers it.

// The split parts by address, with their buffers. Where a buffer is gone, another may have its
// addresses: then the weak_ptr is empty, and the part does not count.
static map<char*, std::weak_ptr<Memory>> split_parts;

// Says whether a split part begins at element `first` of t.
static bool is_split(const Tensor& t, int64_t first = 0) {
    const auto found = split_parts.find(t.data + first * size_of(t.dtype));
    return found != split_parts.end() && found->second.lock() == t.memory;
}
// Splits a part, if it is whole fp32 and products take bf16. `part` then is its upper halves.
static void keep_part(Tensor& part, DType products) {
    if (part.dtype != F32 || products != BF16 || is_split(part)) { return; }
    convert_part(part, true);
    split_parts[part.data] = part.memory;
    part.dtype = BF16;
}
static bool restore_part(Tensor& part) {
    if (!is_split(part)) { return false; }
    part.dtype = F32;
    convert_part(part, false);
    split_parts.erase(part.data);
    return true;
}

// Returns the matrices as products take them outside mode eager: without the embedding, which is
// only looked up.
static vector<Tensor> matrices_of(const Model& model) {
    vector<Tensor> all = {model.lm_head};
    for (const Layer& l : model.layers) { all.insert(all.end(), {l.qkv, l.o, l.w13, l.w2}); }
    return all;
}
static void keep_weights(Model& model) {
    if (context.mode == EAGER) { return; }
    // t is a copy of the model's tensor. keep_part makes t BF16, but the model's own stays F32, and
    // ready_weights gives products the halves.
    for (Tensor& t : matrices_of(model)) { keep_part(t, matmul_dtype()); }
}
static void restore_weights(Model& model) {
    if (!is_split(model.lm_head)) { return; }
    for (Tensor& t : matrices_of(model)) { restore_part(t); }
    drop_weight_copies(model.slots);
}
// Gives products the upper halves of split weights, or restores these where the context has changed
// since they were split.
static void ready_weights(Model& model) {
    if (context.mode == EAGER || matmul_dtype() != BF16) { restore_weights(model); }
    if (!is_split(model.lm_head)) { return; }
    for (const Tensor& t : matrices_of(model)) {
        Tensor& upper = t.gradient->low_precision;
        upper = detached(t);
        upper.dtype = BF16;
    }
}

// -------------------------------------------------------------------------------------------------
// AdamW: up to 64 tensors per launch, up to 16 bytes per access

#ifdef HAVE_CUDA
constexpr int MAX_TENSORS = 64;  // of a launch: 28 bytes each, of its arguments' 4 KB
constexpr int CHUNK = 2048;      // elements that a block updates
struct Updates {                 // what a launch updates; tensor k is element k of each array
    const void* g[MAX_TENSORS];
    int64_t offset[MAX_TENSORS];  // of its weights and moments, in their arenas
    int64_t size[MAX_TENSORS];
    int first_block[MAX_TENSORS];
    int count;
};

// Updates a chunk of one tensor per block. A thread takes W elements at a time, in one access of
// each array. P is the type of weights and moments, G that of the gradients; with `split` the
// weights are halves.
template <int W, bool split, class P, class G>
__global__ void adamw_kernel(Updates all, P* p_all, P* m_all, P* v_all, AdamWScalars s) {
    int k = 0;  // our tensor: the last that begins at or before our block
    for (int end = all.count; end - k > 1;) {
        int middle = (k + end) / 2;
        if (all.first_block[middle] <= (int)blockIdx.x) {
            k = middle;
        } else {
            end = middle;
        }
    }

    int64_t start = (int64_t)(blockIdx.x - all.first_block[k]) * CHUNK;
    int64_t offset = all.offset[k] + start;
    int n = (int)min((int64_t)CHUNK, all.size[k] - start);
    const G* g_in = (const G*)all.g[k] + start;
    uint16_t* upper = (uint16_t*)(p_all + all.offset[k]) + start;
    uint16_t* lower = upper + all.size[k];
    for (int i = threadIdx.x * W; i < n; i += blockDim.x * W) {
        auto m = load_pack<W>(m_all + offset + i);
        auto v = load_pack<W>(v_all + offset + i);
        auto g = load_pack<W>(g_in + i);
        Pack<P, W> p;
        Pack<uint16_t, W> u, l;
        if (split) {
            u = load_pack<W>(upper + i);
            l = load_pack<W>(lower + i);
            for (int j = 0; j < W; j++) { p.x[j] = whole_of({u.x[j], l.x[j]}); }
        } else {
            p = load_pack<W>(p_all + offset + i);
        }

        for (int j = 0; j < W; j++) { adamw_element(&p.x[j], g.x[j], &m.x[j], &v.x[j], s); }

        if (split) {
            for (int j = 0; j < W; j++) {
                Halves h = halves_of(p.x[j]);
                u.x[j] = h.upper;
                l.x[j] = h.lower;
            }
            store_pack(upper + i, u);
            store_pack(lower + i, l);
        } else {
            store_pack(p_all + offset + i, p);
        }
        store_pack(m_all + offset + i, m);
        store_pack(v_all + offset + i, v);
    }
}
// Updates the weights of all gradients, whose type is G, by as few launches as their number allows.
// A launch takes W elements at a time, if every tensor in it begins and ends at a multiple of W.
template <bool split, class P, class G>
static void launch_updates(const FlatGradients& gradients, const Tensor& p, const Tensor& m,
                           const Tensor& v, AdamWScalars s) {
    constexpr int W = 16 / sizeof(P);
    for (size_t next = 0; next < gradients.size();) {
        Updates some;
        some.count = 0;
        int blocks = 0;
        bool fits = true;
        for (; next < gradients.size() && some.count < MAX_TENSORS; next++) {
            const FlatGradient& one = gradients[next];
            int k = some.count++;
            some.g[k] = one.g.data;
            some.offset[k] = one.offset;
            some.size[k] = one.g.size();
            some.first_block[k] = blocks;
            blocks += ceil_div(one.g.size(), CHUNK);

            // Does each array's part begin at a multiple of W, counted in elements?
            for (const Tensor* t : {&p, &m, &v}) {
                fits &= ((uintptr_t)t->data / sizeof(P) + one.offset) % W == 0;
            }
            fits &= one.g.size() % W == 0 && (uintptr_t)one.g.data / sizeof(G) % W == 0;
        }

        auto kernel = fits ? adamw_kernel<W, split, P, G> : adamw_kernel<1, split, P, G>;
        LAUNCH(kernel, blocks, THREADS, some, p.as<P>(), m.as<P>(), v.as<P>(), s);
    }
}
// Updates the weights that are split, or those that are not, on the GPU: those of each gradient
// type by themselves.
template <bool split>
static void update_cuda(const Tensor& p, const FlatGradients& gradients, const Tensor& m,
                        const Tensor& v, AdamWScalars s) {
    for (DType dtype : {F32, BF16, F16}) {
        FlatGradients some;
        for (const FlatGradient& one : gradients) {
            const bool belongs = one.g.dtype == dtype && is_split(p, one.offset) == split;
            if (belongs && one.g.size() > 0) { some.push_back(one); }
        }

        with_gpu_type(dtype, [&](auto zero) {
            if constexpr (!split) {
                if (p.dtype == BF16) {
                    return launch_updates<split, bf16, decltype(zero)>(some, p, m, v, s);
                }
            }
            launch_updates<split, float, decltype(zero)>(some, p, m, v, s);
        });
    }
}
#endif
// Updates split weights on the CPU.
static void update_split_cpu(const Tensor& p, const FlatGradients& gradients, const Tensor& m,
                             const Tensor& v, AdamWScalars s) {
    for (const FlatGradient& one : gradients) {
        with_type(one.g.dtype, [&](auto zero) {
            const auto* g = one.g.as(zero);
            const int64_t n = one.g.size(), first = one.offset;
            uint16_t* upper = (uint16_t*)(p.as<float>() + first);
            uint16_t* lower = upper + n;
#pragma omp parallel for simd if (n > 16384)
            for (int64_t i = 0; i < n; i++) {
                float x = whole_of({upper[i], lower[i]});
                adamw_element(&x, g[i], m.as<float>() + first + i, v.as<float>() + first + i, s);
                Halves h = halves_of(x);
                upper[i] = h.upper;
                lower[i] = h.lower;
            }
        });
    }
}
// Updates all weights. On the CPU those that are whole get the plain loop.
static void update(const Tensor& p, const FlatGradients& gradients, const Tensor& m,
                   const Tensor& v, AdamWScalars s) {
#ifdef HAVE_CUDA
    if (p.device() == CUDA) {
        update_cuda<false>(p, gradients, m, v, s);
        update_cuda<true>(p, gradients, m, v, s);
        return;
    }
#endif
    for (const FlatGradient& one : gradients) {
        auto* update_one = is_split(p, one.offset) ? update_split_cpu : adamw_plain;
        update_one(p, {one}, m, v, s);
    }
}
static const EnterWays entered([] {
    fast_ways.adamw = update;
    fast_ways.keep_weights = keep_weights;
    fast_ways.ready_weights = ready_weights;
    fast_ways.restore_weights = restore_weights;
    fast_ways.keep_part = keep_part;
    fast_ways.restore_part = restore_part;
});
