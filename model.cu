// model.cu: the handout's Transformer LM and its training step.
//
//   x = E[tokens]
//   each layer:  x += Wo attention(rope(Wq n), rope(Wk n), Wv n)        n = rmsnorm(x; ln1)
//                x += W2 (silu(W1 n) * W3 n)                            n = rmsnorm(x; ln2)
//   logits = lm_head rmsnorm(x; ln_final)
#include "cs336.h"
#include "lib/gpu.h"

#include <algorithm>
#include <cerrno>
#include <cfloat>
#include <cinttypes>
#include <climits>
#include <csignal>
#include <cstdio>
#include <fstream>

// ---------------------------------------------------------------------------------------------------------------------
// The model: one arena for the weights, one for each moment and, if make_gradients was called, one for the gradients,
// all laid out in the order in which backward finishes the gradients, so that "the gradients that are ready" is always
// a prefix of the arena (but for q, k and v, and w1 and w3, in mode eager). Matrices that one product can serve
// together stand side by side.

const std::vector<ModelConfig> model_sizes = {
    {"small", 768, 3072, 12, 12, 10000},  {"medium", 1024, 4096, 24, 16, 10000},
    {"large", 1280, 5120, 36, 20, 10000}, {"xl", 1600, 6400, 48, 25, 10000},
    {"2.7B", 2560, 10240, 32, 32, 10000}, {"xl (2026)", 2560, 10240, 32, 32, 10000},
    {"10B", 4608, 12288, 50, 36, 10000},  {"8B", 4096, 11008, 34, 32, 151936},
};
int64_t matmul_weights(const ModelConfig& c) {
    int64_t C = c.d_model, F = c.d_ff;
    return c.num_layers * (4 * C * C + 3 * C * F) + c.vocab_size * C;
}
int64_t forward_flops(const ModelConfig& c, int64_t B, int64_t T) {
    return 2 * B * T * matmul_weights(c) + 4 * B * T * T * c.d_model * c.num_layers;
}
void check_config(const ModelConfig& c) {
    if (c.d_model % c.num_heads != 0) {
        usage_error("--d_model %d is not divisible by --num_heads %d", c.d_model, c.num_heads);
    }
    if (c.d_model / c.num_heads % 2 != 0) {
        usage_error("--d_model %d / --num_heads %d = %d is odd; RoPE turns pairs, so the head size must be even",
                    c.d_model, c.num_heads, c.d_model / c.num_heads);
    }
}

int64_t aligned(int64_t elements) { return (elements + 63) / 64 * 64; }

static int64_t offset_of(const Model& model, const Tensor& slot) {  // in elements
    return (slot.data - model.weights.data) / (int64_t)size_of(slot.dtype);
}

Model lay_out_model(const ModelConfig& c) {
    check_config(c);
    Model model;
    model.config = c;
    int64_t C = c.d_model, F = c.d_ff, V = c.vocab_size, end = 0;
    int unit = c.num_layers + 1;
    auto add = [&](const std::string& name, const Shape& shape) {
        model.parameters.push_back({name + ".weight", shape, end, Tensor(), shape.size() == 1 ? -1 : unit});
        end += count(shape);
    };
    auto add_last = [&](const std::string& name, const Shape& shape) { add(name, shape), end = aligned(end); };
    add_last("lm_head", {V, C});
    add_last("ln_final", {C});
    for (int l = c.num_layers - 1; l >= 0; l--) {
        std::string layer = "layers." + std::to_string(l) + ".";
        unit = 1 + l;
        add_last(layer + "ffn.w2", {C, F});
        add(layer + "ffn.w1", {F, C});  // w1 and w3: one product
        add_last(layer + "ffn.w3", {F, C});
        add_last(layer + "ln2", {C});
        add_last(layer + "attn.output_proj", {C, C});
        add(layer + "attn.q_proj", {C, C});  // q, k and v: one product
        add(layer + "attn.k_proj", {C, C});
        add_last(layer + "attn.v_proj", {C, C});
        add_last(layer + "ln1", {C});
    }
    unit = 0;
    add_last("token_embeddings", {V, C});
    return model;
}
void place_weights(Model& model, const Place& place) {
    const ModelConfig& c = model.config;
    int64_t C = c.d_model, F = c.d_ff;
    auto slot = [&](const Parameter& p, const Shape& shape) {
        model.slots.push_back(place(p, shape));
        return model.slots.back();
    };
    std::map<std::string, Parameter*> by_name;
    for (Parameter& p : model.parameters) {
        p.weight = slot(p, p.shape);
        by_name[p.name] = &p;
    }
    auto weight = [&](const std::string& name) { return by_name.at(name + ".weight")->weight; };
    model.embedding = weight("token_embeddings"), model.ln_final = weight("ln_final"),
    model.lm_head = weight("lm_head");
    for (int l = 0; l < c.num_layers; l++) {
        std::string n = "layers." + std::to_string(l) + ".";
        Layer layer;
        layer.ln1 = weight(n + "ln1"), layer.ln2 = weight(n + "ln2"), layer.o = weight(n + "attn.output_proj");
        layer.q = weight(n + "attn.q_proj"), layer.k = weight(n + "attn.k_proj"), layer.v = weight(n + "attn.v_proj");
        layer.w1 = weight(n + "ffn.w1"), layer.w2 = weight(n + "ffn.w2"), layer.w3 = weight(n + "ffn.w3");
        layer.qkv = slot(*by_name.at(n + "attn.q_proj.weight"), {3 * C, C});
        layer.w13 = slot(*by_name.at(n + "ffn.w1.weight"), {2 * F, C});
        model.layers.push_back(layer);
    }
}
Model make_model(const ModelConfig& c, DType dtype) {
    Model model = lay_out_model(c);
    const Parameter& last = model.parameters.back();
    model.weights = zeros({aligned(last.offset + count(last.shape))}, dtype, PARAMETERS);  // the padding: not NaN
    place_weights(model, [&](const Parameter& p, const Shape& shape) {
        Tensor t = require_gradient(view(model.weights, p.offset, shape));
        t.gradient->is_parameter = true;
        return t;
    });
    return model;
}
void init_weight(const Tensor& weight, const std::string& name, uint64_t seed) {
    bool norm = weight.shape.size() == 1, embedding = name == "token_embeddings.weight";
    float std = norm ? 0 : embedding ? 1 : sqrtf(2.0f / (weight.dim(0) + weight.dim(1)));
    fill_normal(weight, seed, key_of(name), norm ? 1 : 0, std);
}
void init_weights(const Model& model, uint64_t seed) {
    for (const Parameter& p : model.parameters) { init_weight(p.weight, p.name, seed); }
}
Model random_model(const ModelConfig& c, uint64_t seed) {
    Model model = make_model(c);
    init_weights(model, seed);
    choose_form(model);
    return model;
}
void make_gradients(Model& model) {
    if (model.gradients) { return; }
    model.gradients = zeros(model.weights.shape, model.weights.dtype, GRADIENTS);
    for (const Tensor& t : model.slots) { t.gradient->value = view(model.gradients, offset_of(model, t), t.shape); }
}
void make_optimizer_state(Model& model) {
    if (model.m) { return; }
    model.m = zeros(model.weights.shape, model.weights.dtype, OPTIMIZER);
    model.v = zeros(model.weights.shape, model.weights.dtype, OPTIMIZER);
}
void zero_gradients(const Model& model) {
    for (const Tensor& t : model.slots) {
        t.gradient->filled = false;
        if (!model.gradients) { t.gradient->value = Tensor(); }
    }
}

static const WeightForm* best_form(const Model& model) {
    return context.mode == EAGER ? nullptr : form_for(model.weights.dtype, matmul_dtype());
}
static std::vector<Tensor> matrices_of(const Model& model) {  // as the products take them
    std::vector<Tensor> all = {model.lm_head};
    for (const Layer& l : model.layers) { all.insert(all.end(), {l.qkv, l.o, l.w13, l.w2}); }
    return all;
}
void make_ready(Model& model, int64_t T) {
    const ModelConfig& c = model.config;
    if (!model.rope || model.rope.dim(0) < T) {
        model.rope = rope_table(T, c.d_model / c.num_heads, c.rope_theta, model.weights.dtype == F64 ? F64 : F32);
    }
    if (model.form != best_form(model)) { plain_weights(model); }
    for (const Tensor& t : model.form ? matrices_of(model) : std::vector<Tensor>()) {
        t.gradient->low_precision = model.form->lend(detached(t));
    }
}
void begin_unit(const Model& model, int unit) {
    if (model.pre_forward) { model.pre_forward(unit); }
}
Tensor end_unit(const Model& model, int unit, const Tensor& y_in) {
    if (!model.pre_backward) { return y_in; }
    Tensor y = y_in;
    record(y, {y_in}, [&model, unit, g = y_in.gradient](const Tensor& dy) {
        model.pre_backward(unit);
        add_gradient(g, dy);
    });
    return y;
}
static int number_in(Checkpointing some) {  // n, where context.checkpoint is `some` plus n; else -1
    int n = context.checkpoint - some;
    return 0 <= n && n <= MAX_CHECKPOINT ? n : -1;
}
// How many blocks, from the first, are checkpoints as a whole; and up to which one of the others the feed-forward is.
static int checkpointed_wholes(const ModelConfig& c) {
    int k = context.checkpoint, some = number_in(CHECKPOINT_SOME_BLOCKS);
    bool all = k > 0 || k == CHECKPOINT_HALVES || k == CHECKPOINT_NESTED;
    return all ? c.num_layers : std::max(some, 0);
}
int checkpointed_ffns(const ModelConfig& c) {
    bool all = context.checkpoint == CHECKPOINT_FFN || number_in(CHECKPOINT_SOME_BLOCKS) >= 0;
    return all ? std::max(c.num_layers, checkpointed_wholes(c)) : std::max(number_in(CHECKPOINT_SOME_FFN), 0);
}
// Block l. The residual stream is *x + *delta, where *delta is what the block before adds to it (null: nothing).
static void block(const Model& model, int l, Tensor* x, Tensor* delta) {
    Range r("layer");
    const ModelConfig& c = model.config;
    const Layer& layer = model.layers[l];
    begin_unit(model, 1 + l);
    auto attention = [&model, &c, &layer](const Tensor& y) {
        Tensor a = self_attention(layer, y, model.rope, c.num_heads);
        Range output("projections");
        return linear(a, layer.o);
    };
    auto gated = [&layer](const Tensor& y) { return swiglu(layer, y); };
    auto feed_forward = [gated, l, &c, &layer](const Tensor& y) {  // backward may call it
        Range ffn("ffn");
        bool again = checkpointed_wholes(c) <= l && l < checkpointed_ffns(c);
        return again ? checkpoint_linear(gated, y, layer.w2) : linear(gated(y), layer.w2);
    };
    if (context.checkpoint == CHECKPOINT_HALF) {
        auto half = [&](auto f, const Tensor& ln) {
            return checkpoint([f, ln, &c](Tensor x) { return add(x, f(add_rmsnorm(&x, Tensor(), ln, c.eps))); }, *x);
        };
        *x = half(attention, layer.ln1);
        *x = end_unit(model, 1 + l, half(feed_forward, layer.ln2));
        return;
    }
    *delta = attention(add_rmsnorm(x, *delta, layer.ln1, c.eps));
    Tensor y = add_rmsnorm(x, *delta, layer.ln2, c.eps);
    *delta = end_unit(model, 1 + l, feed_forward(y));
}
static Tensor run_blocks(const Model& model, Tensor x, int first, int end) {
    Tensor delta;
    for (int l = first; l < end; l++) { block(model, l, &x, &delta); }
    return add(x, delta);
}
// Blocks [first, end) by gradient checkpoints. For n blocks: what is held at most, in tensors like x, and how many
// blocks backward runs again.
//   k blocks each  n/k, and the k blocks that are run again keep all they compute   n blocks
//   halves         1 + log2 n, and one block                                        n log2 n
//   nested         2, and one block                                                 n (n - 1) / 2
static Tensor checkpointed_blocks(const Model& model, Tensor x, int first, int end) {
    auto part = [&](int first, int end, auto blocks) {
        x = checkpoint([&model, first, end, blocks](const Tensor& x) { return blocks(model, x, first, end); }, x);
    };
    int k = number_in(CHECKPOINT_SOME_BLOCKS) >= 0 ? 1 : context.checkpoint, middle = (first + end) / 2;
    for (int l = first; k > 0 && l < end; l += k) { part(l, std::min(l + k, end), run_blocks); }
    if (k > 0) { return x; }
    if (end - first == 1) { return run_blocks(model, x, first, end); }
    if (k == CHECKPOINT_HALVES) {
        part(first, middle, checkpointed_blocks);
        part(middle, end, checkpointed_blocks);
        return x;
    }
    part(first, end - 1, checkpointed_blocks);
    return run_blocks(model, x, end - 1, end);
}
// All but the head: what it takes.
static Tensor forward_to_head(Model& model, const Tensor& tokens) {
    const ModelConfig& c = model.config;
    make_ready(model, tokens.dim(1));
    Tensor x, delta;
    {
        Range r("embedding");
        begin_unit(model, 0);
        x = end_unit(model, 0, gather_rows(model.embedding, tokens));
    }
    const int wholes = context.recording ? checkpointed_wholes(c) : 0;
    if (wholes > 0) { x = checkpointed_blocks(model, x, 0, wholes); }
    for (int l = wholes; l < c.num_layers; l++) { block(model, l, &x, &delta); }
    return add_rmsnorm(&x, delta, model.ln_final, c.eps);
}
Tensor forward(Model& model, const Tensor& tokens) {
    Range range("forward");
    Tensor y = forward_to_head(model, tokens);
    Range r("lm_head");
    begin_unit(model, model.config.num_layers + 1);
    return linear(y, model.lm_head);
}

// ---------------------------------------------------------------------------------------------------------------------
// Where a model's gradients lie: in their arena, whose padding holds zeros, or one by one as backward left them.

static std::vector<FlatGradient> flat_gradients(const Model& model) {
    int64_t all = 0, filled = 0;  // fused mode fills the joined slots instead of the single ones that they cover
    std::vector<FlatGradient> gradients;
    for (const Parameter& p : model.parameters) { all += count(p.shape); }
    for (const Tensor& t : model.slots) {
        if (!t.gradient->filled) { continue; }
        filled += t.size();
        gradients.push_back({t.gradient->value, offset_of(model, t)});
    }
    if (filled != all) { fail("gradients of %ld of %ld elements are there", (long)filled, (long)all); }
    return model.gradients && !model.form ? std::vector<FlatGradient>{{model.gradients, 0}} : gradients;
}

// The gradients' norm, sqrt(sum g^2) over all of them, is for clipping and shows fp16's overflows. The order of the sum
// is fixed, so the same gradients give the same bits.

#ifdef __CUDACC__
constexpr int NORM_BLOCKS = 1024;
template <class T>
__global__ void square_sum_kernel(double* partial, const T* g, int64_t n) {
    float sum = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        float x = to_acc(g[i]);
        sum += x * x;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { partial[blockIdx.x] = sum; }
}
#endif
double square_sum(const std::vector<FlatGradient>& gradients) {
    if (context.device == META) { return 1; }
    double sum = 0;
#ifdef __CUDACC__
    if (context.device == CUDA) {
        auto blocks_of = [](const Tensor& g) { return std::min(NORM_BLOCKS, ceil_div(g.size(), 1024)); };
        int64_t blocks = 0;
        for (const FlatGradient& one : gradients) { blocks += blocks_of(one.g); }
        Tensor partial = empty({blocks}, F64, WORKSPACE);
        double* next = partial.as<double>();
        for (const FlatGradient& one : gradients) {
            const Tensor& g = one.g;
            with_gpu_type(g.dtype, [&](auto zero) {
                LAUNCH(square_sum_kernel, blocks_of(g), 256, next, g.as<decltype(zero)>(), g.size());
            });
            next += blocks_of(g);
        }
        for (double s : to_doubles(partial)) { sum += s; }
        return sum;
    }
#endif
    constexpr int64_t CHUNK = 1 << 16;  // fixed chunks: the result does not depend on the number of threads
    for (const FlatGradient& one : gradients) {
        int64_t n = one.g.size();
        std::vector<double> partial((n + CHUNK - 1) / CHUNK);
        with_type(one.g.dtype, [&](auto zero) {
            const auto* g = one.g.as<decltype(zero)>();
#pragma omp parallel for
            for (size_t k = 0; k < partial.size(); k++) {
                for (int64_t i = k * CHUNK; i < std::min<int64_t>(n, (k + 1) * CHUNK); i++) {
                    partial[k] += (double)to_acc(g[i]) * to_acc(g[i]);
                }
            }
        });
        for (double s : partial) { sum += s; }
    }
    return sum;
}
double gradient_norm(const Model& model) {
    Range range("gradient norm");
    return sqrt(square_sum(flat_gradients(model)));
}

// ---------------------------------------------------------------------------------------------------------------------
// AdamW (Loshchilov and Hutter, 2019; the handout's order), t = 1, 2, ...:
//   p *= 1 - lr wd;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
//   p -= lr sqrt(1 - b2^t)/(1 - b1^t) m / (sqrt(v) + eps)
// Op by op that is 13 kernels for every parameter tensor. Fused it is one: p, m and v are each read and written once,
// 24 bytes per parameter in fp32, and g is read (2 or 4). In pure bf16 that is 14 in all.

#ifdef __CUDACC__
template <class P, class G>
__global__ void adamw_kernel(P* p, const G* g, P* m, P* v, int64_t n, AdamWScalars s) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) { adamw_element(p + i, g[i], m + i, v + i, s); }
}
static void adamw_cuda(const Tensor& p, const std::vector<FlatGradient>& gradients, const Tensor& m, const Tensor& v,
                       AdamWScalars s) {
    for (const FlatGradient& one : gradients) {
        int64_t n = one.g.size(), at = one.offset;
        if (n == 0) { continue; }
        with_gpu_type(one.g.dtype, [&](auto zero) {
            auto launch = [&](auto p_zero) {
                using P = decltype(p_zero);
                LAUNCH(adamw_kernel, ceil_div(n, 256), 256, p.as<P>() + at, one.g.as<decltype(zero)>(), m.as<P>() + at,
                       v.as<P>() + at, n, s);
            };
            p.dtype == BF16 ? launch(bf16()) : launch(float());
        });
    }
}
static const AddRow<AdamWImpl> cuda_row({"a kernel per tensor", 10, [](Device d) { return d == CUDA; }, adamw_cuda});
#endif
static void adamw_cpu(const Tensor& p_all, const std::vector<FlatGradient>& gradients, const Tensor& m_all,
                      const Tensor& v_all, AdamWScalars s) {
    for (const FlatGradient& one : gradients) {
        with_type(one.g.dtype, [&](auto g_zero) {
            with_type(p_all.dtype, [&](auto p_zero) {
                using P = decltype(p_zero);
                const auto* g = one.g.as<decltype(g_zero)>();
                P *p = p_all.as<P>() + one.offset, *m = m_all.as<P>() + one.offset, *v = v_all.as<P>() + one.offset;
                int64_t n = one.g.size();
#pragma omp parallel for simd if (n > 16384)
                for (int64_t i = 0; i < n; i++) { adamw_element(p + i, g[i], m + i, v + i, s); }
            });
        });
    }
}
static const AddRow<AdamWImpl> cpu_row({"loops", 10, [](Device d) { return d == CPU; }, adamw_cpu});

// By the fastest row.
static void adamw_flat(const Tensor& p, const std::vector<FlatGradient>& gradients, const Tensor& m, const Tensor& v,
                       AdamWScalars s) {
    const auto& rows = table_of<AdamWImpl>();
    auto row = std::find_if(rows.rbegin(), rows.rend(), [&](const AdamWImpl& r) { return r.takes(p.device()); });
    if (row != rows.rend()) { row->update(p, gradients, m, v, s); }  // META: none
}
static void adamw_eager(const Model& model, AdamWScalars s) {
    for (const Parameter& parameter : model.parameters) {
        Tensor p = parameter.weight, m = view(model.m, parameter.offset, p.shape),
               v = view(model.v, parameter.offset, p.shape);
        Tensor g = p.gradient->value;
        if (s.gradient_scale != 1) { g = scale(g, s.gradient_scale); }
        scale_in_place(p, s.decay);
        scale_in_place(m, s.beta1);
        copy_or_add(m, scale(g, 1 - s.beta1), true);
        scale_in_place(v, s.beta2);
        copy_or_add(v, scale(square(g), 1 - s.beta2), true);
        copy_or_add(p, scale(div(m, add_scalar(sqrt(v), s.eps)), -s.step_size), true);
    }
}
static AdamWScalars scalars_of(const AdamW& a, int t, float gradient_scale) {
    double step_size = a.lr * sqrt(1 - pow(a.beta2, t)) / (1 - pow(a.beta1, t));
    return {1 - a.lr * a.weight_decay, a.beta1, a.beta2, a.eps, (float)step_size, gradient_scale};
}
void adamw_update(const Tensor& p, const std::vector<FlatGradient>& gradients, const Tensor& m, const Tensor& v,
                  const AdamW& a, int t, float gradient_scale, const WeightForm* form) {
    Range range("optimizer");
    (form ? form->update : adamw_flat)(p, gradients, m, v, scalars_of(a, t, gradient_scale));
}
void adamw_step(Model& model, const AdamW& a, float gradient_scale) {
    Range range("optimizer");
    NoGrad no_grad;
    std::vector<FlatGradient> gradients = flat_gradients(model);
    AdamWScalars s = scalars_of(a, ++model.step, gradient_scale);
    if (context.mode == EAGER) {
        adamw_eager(model, s);
        return;
    }
    std::set<const char*> matrices;
    for (const Tensor& t : model.form ? matrices_of(model) : std::vector<Tensor>()) { matrices.insert(t.data); }
    auto plain = std::partition(gradients.begin(), gradients.end(), [&](const FlatGradient& one) {
        return matrices.count(model.weights.data + one.offset * size_of(model.weights.dtype)) > 0;
    });
    adamw_flat(model.weights, {plain, gradients.end()}, model.m, model.v, s);
    if (model.form) { model.form->update(model.weights, {gradients.begin(), plain}, model.m, model.v, s); }
}

const WeightForm* form_for(DType kept, DType products) {
    const auto& rows = table_of<WeightForm>();
    auto row = std::find_if(rows.rbegin(), rows.rend(), [&](const WeightForm& r) { return r.takes(kept, products); });
    return row == rows.rend() ? nullptr : &*row;
}
void choose_form(Model& model) {
    if (model.form || !best_form(model)) { return; }
    model.form = best_form(model);
    for (const Tensor& t : matrices_of(model)) { model.form->enter(detached(t)); }
    drop_weight_copies(model.slots);
}
void plain_weights(Model& model) {
    if (!model.form) { return; }
    for (const Tensor& t : matrices_of(model)) { model.form->leave(detached(t)); }
    drop_weight_copies(model.slots);
    model.form = nullptr;
}

// ---------------------------------------------------------------------------------------------------------------------
// One training step on random data. Its memory is predicted by the same step on META, where nothing is computed.

Batch random_batch(int B, int T, int V, uint64_t seed) {
    if (context.device == META) { return {empty({B, T}, I32, INPUTS), empty({B, T}, I32, INPUTS)}; }
    Tensor x = empty_on(CPU, {B, T}, I32, INPUTS), y = empty_on(CPU, {B, T}, I32, INPUTS);
    for (int64_t i = 0; i < x.size(); i++) {
        x.as<int>()[i] = random_int(V, seed, key_of("tokens"), i);
        y.as<int>()[i] = random_int(V, seed, key_of("targets"), i);
    }
    return {to_device(x, context.device), to_device(y, context.device)};
}
Tensor forward_to_loss(Model& model, const Batch& batch) {
    if (context.head_chunk == 0) { return cross_entropy(forward(model, batch.tokens), batch.targets); }
    Range range("forward");
    Tensor y = forward_to_head(model, batch.tokens);
    begin_unit(model, model.config.num_layers + 1);
    return chunked_loss(y, model.lm_head, batch.targets, context.head_chunk);
}
void backward_from_loss(const Model& model, const Tensor& loss, float loss_scale) {
    Range range("backward");
    backward(loss, loss_scale);
    drop_weight_copies(model.slots);  // the weights are about to change
}

Tensor add_gradients(Model& model, const Batch& batch, float loss_scale, const std::function<void()>& between) {
    Tensor loss = forward_to_loss(model, batch);
    between();
    backward_from_loss(model, loss, loss_scale);
    return detached(loss);
}
static Tensor forward_backward_by_launches(Model& model, const Batch& batch, float loss_scale,
                                           const std::function<void()>& between) {
    zero_gradients(model);
    return add_gradients(model, batch, loss_scale, between);
}

static const AddRow<StepImpl> launches_row({"launches", 10, [](const Model&) { return true; },
                                            forward_backward_by_launches, forward});

static const StepImpl& fastest_step(const Model& model) {
    const auto& rows = table_of<StepImpl>();
    return *std::find_if(rows.rbegin(), rows.rend(), [&](const StepImpl& r) { return r.takes(model); });
}
Tensor forward_backward(Model& model, const Batch& batch, float loss_scale, const std::function<void()>& between) {
    return fastest_step(model).forward_backward(model, batch, loss_scale, between);
}
Tensor infer(Model& model, const Tensor& tokens) {
    NoGrad no_grad;
    Tensor logits = fastest_step(model).infer(model, tokens);
    drop_weight_copies(model.slots);
    return logits;
}
double guarded_step(LossScaler& scaler, double max_norm, const std::function<double()>& norm_of_gradients,
                    const std::function<void(float gradient_scale)>& step) {
    bool fp16 = context.precision == PREC_FP16;
    double scale = fp16 ? 1 / scaler.scale : 1, norm = 0;
    if (fp16 || max_norm > 0) { norm = norm_of_gradients() * scale; }
    if (fp16) { update_scale(scaler, !std::isfinite(norm)); }
    if (!std::isfinite(norm)) { return norm; }  // a step would spread it to all weights
    if (max_norm > 0 && norm > max_norm) { scale *= max_norm / (norm + 1e-6); }
    step((float)scale);
    return norm;
}
double optimizer_step(Model& model, const AdamW& adamw, LossScaler& scaler, double max_norm) {
    return guarded_step(
        scaler, max_norm, [&] { return gradient_norm(model); },
        [&](float gradient_scale) { adamw_step(model, adamw, gradient_scale); });
}
float loss_scale_of(const LossScaler& scaler) { return context.precision == PREC_FP16 ? scaler.scale : 1; }

void run_phase(Phase phase, Model& model, const Batch& batch, LossScaler& scaler,
               const std::function<void()>& between) {
    if (phase == FORWARD) {
        infer(model, batch.tokens);
        return;
    }
    if (phase == TAPED_FORWARD) {
        forward(model, batch.tokens);
        clear_tape();
        return drop_weight_copies(model.slots);
    }
    if (phase == STEP) { make_optimizer_state(model); }
    forward_backward(model, batch, loss_scale_of(scaler), between);
    if (phase == STEP) { optimizer_step(model, AdamW(), scaler, 0); }
}
size_t predicted_peak(const ModelConfig& c, int B, int T, Phase phase) {
    return planned_peak([&] {
        Model model = random_model(c, 0);
        LossScaler scaler;
        reset_peak(META);  // another form of the weights is no part of the phase
        run_phase(phase, model, random_batch(B, T, c.vocab_size, 0), scaler);
    });
}

void train_step(Trainer& t, const std::vector<Batch>& batches, const std::function<void(StepPart)>& begins) {
    t.marks.clear();
    auto begin = [&](StepPart part) { t.marks.push_back({part, mark()}), begins(part); };
    if (t.before_step) { t.before_step(); }
    std::vector<Tensor> losses;
    for (const Batch& batch : batches) {
        begin(FORWARD_BLOCKS);
        auto pass = losses.empty() || t.sums_gradients ? forward_backward : add_gradients;
        losses.push_back(pass(t.model, batch, loss_scale_of(t.scaler) / batches.size(), [&] { begin(BACKWARD); }));
        if (t.after_backward) { t.after_backward(); }
    }
    begin(EXPOSED);
    if (t.before_optimizer) { t.before_optimizer(); }
    begin(OPTIMIZER_STEP);
    if (t.step_optimizer) {
        t.norm = t.step_optimizer(t);
    } else {
        make_optimizer_state(t.model);
        t.norm = optimizer_step(t.model, t.adamw, t.scaler, t.max_norm);
    }
    begin(STEP_PARTS);
    synchronize();
    t.steps++, t.loss = 0;
    if (context.device == META) { return; }
    for (const Tensor& loss : losses) { t.loss += to_doubles(loss)[0] / losses.size(); }
}

// ---------------------------------------------------------------------------------------------------------------------
// What an experiment runs: models, precisions, modes; and whether it fits.

static bool is_custom(const Options& o) { return o.d_model || o.d_ff || o.num_layers || o.num_heads; }

std::vector<ModelConfig> configs_of(const Options& o) {
    std::vector<ModelConfig> configs;
    if (is_custom(o)) {
        ModelConfig c = model_sizes[0];
        c.name = "custom";
        if (o.d_model) { c.d_model = o.d_model; }
        if (o.d_ff) { c.d_ff = o.d_ff; }
        if (o.num_layers) { c.num_layers = o.num_layers; }
        if (o.num_heads) { c.num_heads = o.num_heads; }
        configs = {c};
    } else {
        std::set<std::string> names;
        for (const std::string& size : o.size) {
            names.insert(size == "xl" && o.edition == "2026" ? "xl (2026)" : size);
        }
        for (const ModelConfig& c : model_sizes) {
            if (names.count(c.name) > 0) { configs.push_back(c); }
        }
    }
    for (ModelConfig& c : configs) {
        if (o.has("vocab_size") || is_custom(o)) { c.vocab_size = o.vocab_size; }
        check_config(c);
    }
    return configs;
}

std::string vocabulary_of(const std::vector<ModelConfig>& configs) {
    std::set<std::string> sizes;
    for (const ModelConfig& c : configs) { sizes.insert(std::to_string(c.vocab_size)); }
    return join({sizes.begin(), sizes.end()}, ",");
}

std::string size_option(const ModelConfig& c) { return c.name.substr(0, c.name.find(" (")); }

Mode fastest_mode(const ModelConfig& c, Precision precision) {
    return fastest_flash(context.device, matmul_dtype(precision), c.d_model / c.num_heads) ? FLASH : FUSED;
}
void check_mode(const ModelConfig& c, Mode mode, Precision precision) {
    if (mode == FLASH) { require_flash(context.device, matmul_dtype(precision), c.d_model / c.num_heads); }
    if (std::max(context.checkpoint, checkpointed_ffns(c)) > c.num_layers) {
        usage_error("--checkpoint: got %s, takes at most the model's %d blocks",
                    name_of_checkpoint(context.checkpoint).c_str(), c.num_layers);
    }
}
std::string name_of_checkpoint(int checkpoint) {
    int ffns = checkpoint - CHECKPOINT_SOME_FFN, blocks = checkpoint - CHECKPOINT_SOME_BLOCKS;
    return blocks <= MAX_CHECKPOINT          ? "blocks:" + std::to_string(blocks)
           : ffns <= MAX_CHECKPOINT          ? "ffn:" + std::to_string(ffns)
           : checkpoint == CHECKPOINT_FFN    ? "ffn"
           : checkpoint == CHECKPOINT_HALF   ? "half"
           : checkpoint == CHECKPOINT_HALVES ? "halves"
           : checkpoint == CHECKPOINT_NESTED ? "nested"
                                             : std::to_string(checkpoint);
}
std::string caption_of(Mode mode) {
    std::string checkpoint = context.checkpoint ? ", checkpoint " + name_of_checkpoint(context.checkpoint) : "";
    std::string head = context.head_chunk ? ", head chunk " + std::to_string(context.head_chunk) : "";
    return name_of(mode) + std::string(context.recompute ? ", recompute" : "") + checkpoint + head;
}

Mode mode_for(const Options& o, const std::string& name, const ModelConfig& c, Precision precision) {
    Mode mode = mode_from(name);
    if (!o.has("mode")) { mode = std::min(mode, fastest_mode(c, precision)); }
    check_mode(c, mode, precision);
    return mode;
}

std::vector<Precision> precisions_of(const Options& o) {
    std::vector<Precision> precisions;
    for (const std::string& name : o.precision) { precisions.push_back(precision_from(name)); }
    return precisions;
}
std::vector<Mode> modes_of(const Options& o, const std::vector<ModelConfig>& configs,
                           const std::vector<Precision>& precisions) {
    std::vector<Mode> modes;
    for (const std::string& name : o.mode) {
        modes.push_back(mode_from(name));
        for (Precision precision : precisions) {
            for (const ModelConfig& c : configs) {
                modes.back() = std::min(modes.back(), mode_for(o, name, c, precision));
            }
        }
    }
    return modes;
}

const char* name_of(Phase phase) {
    static const char* const names[] = {"forward", "forward+backward", "step", "forward with tape"};
    return names[phase];
}
std::string row_of(const ModelConfig& c, int B, int T, Phase phase) {
    return strprintf("%s, batch %d, context length %d, %s, %s %s", c.name.c_str(), B, T, name_of(phase),
                     name_of(context.precision), caption_of(context.mode).c_str());
}

// ---------------------------------------------------------------------------------------------------------------------
// How long the whole model's passes take (sections 1.1.3, 1.1.5 and 1.3): benchmarking_script,
// benchmarking_mixed_precision and torch_compile. And info: what this machine could do at most.

// TFLOP/s of a step's products on one GPU, whose batch is B.
double step_tflops(const ModelConfig& c, int64_t B, int64_t T, double ms);

// One model's passes, timed: benchmarking_script, torch_compile (b), benchmarking_mixed_precision (c).
struct PhaseRun {
    size_t oom = 0, peak = 0;  // bytes: that it would have held, where it did not fit; that it held
    Stats all{}, backward{};   // ms; backward: of it, between two synchronisations
    bool ran() const { return all.n > 0; }
};
struct StepRun {
    ModelConfig config;
    Precision precision;
    Mode mode;
    PhaseRun phase[3] = {};  // FORWARD, FORWARD_BACKWARD, STEP
};
struct WarmupRun {
    int warmup;
    PhaseRun forward, both;
};
void answer_step_times(const std::vector<StepRun>& runs);  // benchmarking_script (b), of one precision and mode
void answer_warmup(const std::vector<WarmupRun>& runs);    // (c), by the number of warm-up steps
void answer_torch_compile(const std::vector<StepRun>& vanilla, const std::vector<StepRun>& compiled);  // by size
// By precision, the others compared with the first, and within it by size.
void answer_mixed_precision(const std::vector<std::vector<StepRun>>& runs);

double step_tflops(const ModelConfig& c, int64_t B, int64_t T, double ms) {
    return 3.0 * forward_flops(c, B, T) / ms / 1e9;  // backward has two products for each of the forward's
}

// ---------------------------------------------------------------------------------------------------------------------
// Measuring one model, in context's precision and mode. Each phase is warmed up and timed by itself, with a device
// synchronisation after every step; the backward pass is timed between its own two synchronisations, not as a
// difference of two averages. What comes after a phase that does not fit needs more, and is not tried.

static StepRun measure_model(const ModelConfig& c, const Options& o, int warmup,
                             const std::vector<Phase>& phases = {FORWARD, FORWARD_BACKWARD, STEP}) {
    StepRun r{c, context.precision, context.mode};
    const int B = o.batch_size, T = o.context_length;
    for (Phase phase : phases) { r.phase[phase].oom = predicted_peak(c, B, T, phase); }
    Model model;
    Batch batch;
    for (Phase phase : phases) {
        PhaseRun& run = r.phase[phase];
        auto measure = [&] {
            if (!model.weights) {
                model = random_model(c, o.seed);
                batch = random_batch(B, T, c.vocab_size, o.seed);
            }
            reset_peak(context.device);
            LossScaler scaler;
            std::vector<double> forward;  // until backward begins
            std::vector<double> all = time_ms(warmup, o.steps, [&] {
                const double start = now_ms();
                run_phase(phase, model, batch, scaler, [&] {
                    synchronize();
                    forward.push_back(now_ms() - start);
                });
            });
            run.all = stats_of(all);
            for (size_t i = 0; i < all.size() && phase != FORWARD; i++) { all[i] -= forward[warmup + i]; }
            run.backward = stats_of(all);
            run.peak = memory_use(context.device).peak;
        };
        run.oom = run_if_fits(row_of(c, B, T, phase), run.oom, measure, memory_use(context.device).now);
        if (run.oom > 0) { break; }
    }
    return r;
}

static void choose_quick_sizes(Options& o) {
    if (!o.quick) { return; }
    by_quick(o, "size", &Options::size, std::vector<std::string>{"small"});
    by_quick(o, "batch_size", &Options::batch_size, 1);
    by_quick(o, "context_length", &Options::context_length, 32);
    by_quick(o, "steps", &Options::steps, 2);
    by_quick(o, "warmup", &Options::warmup, std::vector<int>{1});
}
static std::string caption_of(const Options& o, const std::vector<ModelConfig>& configs, const std::string& what) {
    const std::string warmup = o.warmup.size() > 1 ? "several" : to_cell(o.warmup[0]);
    return strprintf("%s; batch %d, context length: %d, vocabulary %s, %s warmup, %d step", what.c_str(), o.batch_size,
                     o.context_length, vocabulary_of(configs).c_str(), warmup.c_str(), o.steps);
}
static std::string setting() {
    return strprintf("precision %s, mode %s", name_of(context.precision), caption_of(context.mode).c_str());
}
static void require_a_run(const std::vector<std::vector<StepRun>>& runs) {
    for (const auto& some : runs) {
        for (const StepRun& r : some) {
            if (r.phase[FORWARD].ran()) { return; }
        }
    }
    fail("nothing fits into the memory that is available");
}

// Mean, or that it did not fit, and standard deviation.
static std::vector<std::string> cells_of(const PhaseRun& run, const Stats& ms) {
    if (!run.ran()) { return {oom_cell(run.oom), ""}; }
    return {strprintf("%.2f", ms.mean), deviation(ms, "%.2f")};
}
// A table of forward, backward and both, after columns of its own.
static Table times_table(const std::string& caption, std::vector<std::string> columns) {
    for (const char* pass : {"fw", "bw_only", "fwbw"}) {
        for (const char* what : {"_mean_ms", "_std_ms"}) { columns.push_back(std::string(pass) + what); }
    }
    return {caption, columns};
}
static void add_times(Table& table, std::vector<std::string> row, const PhaseRun& forward, const PhaseRun& both) {
    for (const auto& cells :
         {cells_of(forward, forward.all), cells_of(both, both.backward), cells_of(both, both.all)}) {
        row.insert(row.end(), cells.begin(), cells.end());
    }
    table.rows.push_back(row);
}
// " Out of memory: step of xl and forward of 2.7B.": each model's first phase that did not fit.
static std::string out_of_memory(const std::vector<StepRun>& runs) {
    std::vector<std::string> missing;
    for (const StepRun& r : runs) {
        auto run = std::find_if(r.phase, std::end(r.phase), [](const PhaseRun& p) { return p.oom > 0; });
        if (run == std::end(r.phase)) { continue; }
        missing.push_back(name_of(Phase(run - r.phase)) + (" of " + r.config.name));
    }
    return missing.empty() ? "" : " Out of memory: " + list_of(missing) + ".";
}

// ---------------------------------------------------------------------------------------------------------------------
// benchmarking_script (b): the times

constexpr double SMALL_DEVIATION = 0.05;  // of the mean

void answer_step_times(const std::vector<StepRun>& runs) {
    struct {
        Phase phase;
        Stats PhaseRun::*what;
        const char* name;
    } asked[] = {{FORWARD, &PhaseRun::all, "forward"},
                 {FORWARD_BACKWARD, &PhaseRun::backward, "backward"},
                 {STEP, &PhaseRun::all, "a whole step"}};
    std::vector<std::string> times;
    double most = 0;  // standard deviation over mean
    std::string of;
    for (const auto& [phase, what, name] : asked) {
        std::vector<std::string> ms;
        for (const StepRun& r : runs) {
            const Stats& s = r.phase[phase].*what;
            if (s.n == 0) { continue; }
            ms.push_back(strprintf("%.2f ms (%s)", s.mean, r.config.name.c_str()));
            if (s.std > most * s.mean) { most = s.std / s.mean, of = name + (" of " + r.config.name); }
        }
        if (ms.empty()) { continue; }
        times.push_back(name + (" takes " + ms[0]) + (ms.size() == 1 ? "" : " to " + ms.back()));
    }
    answer("b", "In %s, mode %s, %s.%s", name_of(runs[0].precision), name_of(runs[0].mode),
           times.empty() ? "nothing ran" : list_of(times).c_str(), out_of_memory(runs).c_str());
    if (of.empty()) { return; }  // a single step has no deviation
    answer("b", "The standard deviation is %s %.1f %% of the mean (%s).",
           most <= SMALL_DEVIATION ? "small: at most" : "large: up to", 100 * most, of.c_str());
}
static void print_times(const std::vector<StepRun>& runs, const std::string& caption) {
    Table table = times_table(caption, {"size", "d_model", "d_ff", "num_layers", "num_heads"});
    for (const StepRun& r : runs) {
        const ModelConfig& c = r.config;
        add_times(table, {c.name, to_cell(c.d_model), to_cell(c.d_ff), to_cell(c.num_layers), to_cell(c.num_heads)},
                  r.phase[FORWARD], r.phase[FORWARD_BACKWARD]);
    }
    print(table);
    answer_step_times(runs);
}
static void print_seconds(const std::vector<StepRun>& runs, const std::string& caption) {
    Table table{caption, {"", "model", "mean", "std"}};
    for (const StepRun& r : runs) {
        for (Phase phase : {FORWARD_BACKWARD, FORWARD}) {
            const PhaseRun& run = r.phase[phase];
            const std::string passes = phase == FORWARD ? " (forward only)" : " (forward, backward)";
            table.row(table.rows.size(), r.config.name + passes,
                      run.ran() ? strprintf("%.6g", run.all.mean / 1e3) : oom_cell(run.oom),
                      run.ran() && run.all.n > 1 ? strprintf("%.6g", run.all.std / 1e3) : "");
        }
    }
    print(table);
}
static void print_steps(const std::vector<StepRun>& runs, const Options& o, const std::string& caption) {
    std::vector<double> tflops;
    double most = 0;
    for (const StepRun& r : runs) {
        const PhaseRun& step = r.phase[STEP];
        tflops.push_back(step.ran() ? step_tflops(r.config, o.batch_size, o.context_length, step.all.mean) : NAN);
        most = std::fmax(most, tflops.back());
    }
    const FlopUnit unit = unit_of(most);
    Table table{caption,
                {"size", "precision", "mode", "step_mean_ms", "step_std_ms", unit.name, "MFU %", "peak fw MiB",
                 "peak step MiB"}};
    auto mib = [](const PhaseRun& run) { return run.ran() ? strprintf("%.0f", run.peak / 1048576.0) : ""; };
    for (size_t i = 0; i < runs.size(); i++) {
        const StepRun& r = runs[i];
        const auto ms = cells_of(r.phase[STEP], r.phase[STEP].all);
        table.row(r.config.name, r.precision, r.mode, ms[0], ms[1], tflops[i] * unit.per_tera,
                  percent_of_peak(tflops[i], r.precision), mib(r.phase[FORWARD]), mib(r.phase[STEP]));
    }
    print(table);
}
// ---------------------------------------------------------------------------------------------------------------------
// benchmarking_script (c): fewer warm-up steps. This needs processes that have done nothing yet: context, kernels'
// code, library handles, memory pool and page tables are cold only once. So the program starts itself with the same
// command line and with COLD in its environment; the child measures one number of warm-up steps and writes its numbers,
// as they lie in memory, into the file that is its stdout.

static const char* const COLD = "CS336_COLD_WARMUP";

static WarmupRun in_fresh_process(const Options& o, int warmup) {
    static_assert(std::is_trivially_copyable<WarmupRun>::value, "it goes through a file");
    setenv(COLD, std::to_string(warmup).c_str(), 1);
    const std::string bytes = run_ourselves(o.command_line);
    unsetenv(COLD);
    WarmupRun run;
    if (bytes.size() != sizeof run) { fail("a fresh process sent %zu bytes, not %zu", bytes.size(), sizeof run); }
    memcpy(&run, bytes.data(), sizeof run);
    return run;
}
static int send_to_parent(const ModelConfig& c, const Options& o, int warmup) {
    const StepRun r = measure_model(c, o, warmup, {FORWARD, FORWARD_BACKWARD});
    const WarmupRun run{warmup, r.phase[FORWARD], r.phase[FORWARD_BACKWARD]};
    return fwrite(&run, sizeof run, 1, stdout) == 1 ? 0 : 1;
}
void answer_warmup(const std::vector<WarmupRun>& runs) {
    if (!runs.front().forward.ran() || !runs.back().forward.ran()) { return; }
    auto change = [&](PhaseRun WarmupRun::*pass) {
        return (runs.front().*pass).all.mean / (runs.back().*pass).all.mean;
    };
    const bool is_both = change(&WarmupRun::both) > change(&WarmupRun::forward);  // where the first steps show most
    auto ms = [&](const WarmupRun& r) { return (is_both ? r.both : r.forward).all; };
    auto after = [](const WarmupRun& r) { return counted(r.warmup, "warm-up step"); };
    const Stats cold = ms(runs.front()), warm = ms(runs.back());
    // One slow step among many raises the cold mean and its deviation alike: only the warm run's deviation is noise.
    const double more = cold.mean - warm.mean, noise = std::max(warm.std, SMALL_DEVIATION * warm.mean);
    const char* verdict =
        more < -noise   ? "The machine's speed changed during this run, so it does not show what the first steps cost"
        : more <= noise ? "The first steps cost no more than the noise"
        : context.device == CUDA
            ? "The first steps are slower: they also load the kernels' code, create the cuBLAS handle and grow the pool"
            : "The first steps are slower: they also touch their memory for the first time";
    answer("c", "%s. %s takes %.2f ms (standard deviation %.2f) after %s, and %.2f ms (%.2f) after %s.", verdict,
           is_both ? "Forward with backward" : "Forward", cold.mean, cold.std, after(runs.front()).c_str(), warm.mean,
           warm.std, after(runs.back()).c_str());
    if (more <= noise) { return; }
    size_t enough = runs.size() - 1;  // the runs from here on are alike
    const double alike = std::max(0.02, warm.std / warm.mean);
    while (enough > 0 && std::abs(ms(runs[enough - 1]).mean / warm.mean - 1) <= alike) { enough--; }
    std::vector<std::string> steps, means;  // of the runs between
    for (size_t i = 1; i + 1 < runs.size(); i++) {
        steps.push_back(to_cell(runs[i].warmup)), means.push_back(strprintf("%.2f", ms(runs[i]).mean));
    }
    if (!steps.empty()) {
        answer("c", "After %s warm-up steps it takes %s ms.", list_of(steps).c_str(), list_of(means).c_str());
    }
    answer("c",
           enough + 1 == runs.size() ? "No smaller number comes within %.0f %% of %s: clocks, caches and the memory "
                                       "pool settle only over several steps."
                                     : "The mean is within %.0f %% of the last from %s on.",
           100 * alike, after(runs[enough]).c_str());
}
static void print_warmups(const ModelConfig& c, const Options& o) {
    give_back_cached_memory();  // the fresh processes need it
    Table table = times_table(
        caption_of(o, {c}, "benchmarking_script (c): " + c.name + ", each row a fresh process; " + setting()),
        {"warmup"});
    std::vector<WarmupRun> runs;
    for (int warmup : o.warmup) {
        runs.push_back(in_fresh_process(o, warmup));
        add_times(table, {to_cell(warmup)}, runs.back().forward, runs.back().both);
    }
    print(table);
    answer_warmup(runs);
}

int cmd_benchmarking_script(const Options& asked) {
    Options o = asked;
    context.device = choose_device(o.device);
    choose_quick_sizes(o);
    const std::vector<ModelConfig> configs = configs_of(o);
    const std::vector<Precision> precisions = precisions_of(o);
    const std::vector<Mode> modes = modes_of(o, configs, precisions);
    context.precision = precisions[0], context.mode = modes[0];
    if (const char* warmup = getenv(COLD)) { return send_to_parent(configs[0], o, atoi(warmup)); }
    Options sweep = o;
    if (!o.has("warmup")) { sweep.warmup = {0, 1, 2, 5}; }
    std::sort(sweep.warmup.begin(), sweep.warmup.end());
    if (o.has("warmup")) { o.warmup = {sweep.warmup.back()}; }

    std::vector<StepRun> all, first;  // first: in the first precision and mode
    for (Precision precision : precisions) {
        for (Mode mode : modes) {
            context.precision = precision, context.mode = mode;
            std::vector<StepRun> runs;
            for (const ModelConfig& c : configs) { runs.push_back(measure_model(c, o, o.warmup[0])); }
            print_times(runs, caption_of(o, configs, "benchmarking_script; " + setting()));
            if (first.empty()) { first = runs; }
            all.insert(all.end(), runs.begin(), runs.end());
        }
    }
    require_a_run({all});
    print_steps(all, o, caption_of(o, configs, "benchmarking_script: whole steps, with AdamW; MFU: attention in full"));
    context.precision = precisions[0], context.mode = modes[0];
    print_seconds(first, caption_of(o, configs, "benchmarking_script, in seconds; " + setting()));
    if (sweep.warmup.size() > 1 && o.trace.empty()) { print_warmups(configs[0], sweep); }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Two versions of one model

// "1.71 times as fast as vanilla for small and 1.33 times as fast as vanilla for 2.7B": of the first and the last size
// that ran in both. "" if none did. growth: how many times the first one's factor the last one's is.
static std::string compared(const std::vector<StepRun>& ours, const std::vector<StepRun>& theirs, Phase phase,
                            const char* they, double* growth = nullptr) {
    std::vector<std::string> verdicts;
    std::vector<double> factors;
    for (size_t i = 0; i < ours.size(); i++) {
        const PhaseRun &a = ours[i].phase[phase], &b = theirs[i].phase[phase];
        if (!a.ran() || !b.ran()) { continue; }
        verdicts.push_back(how_fast(a.all, b.all, they) + " for " + ours[i].config.name);
        factors.push_back(b.all.mean / a.all.mean);
    }
    if (verdicts.empty()) { return ""; }
    if (growth) { *growth = factors.back() / factors.front(); }
    return verdicts.size() == 1 ? verdicts[0] : verdicts[0] + " and " + verdicts.back();
}
static std::string factor_cell(const PhaseRun& ours, const PhaseRun& theirs) {
    return ours.ran() && theirs.ran() ? strprintf("%.2fx", theirs.all.mean / ours.all.mean) : "";
}

// torch_compile: (a) attention alone; (b) the whole model. Vanilla is mode eager, one kernel per operation; compiled is
// mode fused, what a compiler, or here a person, makes of it.
void answer_torch_compile(const std::vector<StepRun>& vanilla, const std::vector<StepRun>& compiled) {
    const std::string forward = compared(compiled, vanilla, FORWARD, "vanilla"),
                      both = compared(compiled, vanilla, FORWARD_BACKWARD, "vanilla"),
                      step = compared(compiled, vanilla, STEP, "vanilla");
    answer("b", "In %s, compiled forward is %s.%s", name_of(vanilla[0].precision),
           forward.empty() ? "not to be compared" : forward.c_str(), out_of_memory(vanilla).c_str());
    if (!both.empty()) { answer("b", "Forward and backward together are %s.", both.c_str()); }
    if (!step.empty()) { answer("b", "A whole step, with AdamW, is %s.", step.c_str()); }
}
int cmd_torch_compile(const Options& asked) {
    Options o = asked;
    context.device = choose_device(o.device);
    torch_compile_attention(o);
    choose_quick_sizes(o);
    const std::vector<ModelConfig> configs = configs_of(o);
    std::vector<StepRun> all;
    for (Precision precision : precisions_of(o)) {
        context.precision = precision;
        Table table{caption_of(o, configs,
                               std::string("torch_compile (b): whole model; vanilla = mode eager, compiled = mode "
                                           "fused, fused by hand; precision ") +
                                   name_of(precision)),
                    {"size", "run_type", "vanilla (ms)", "compiled (ms)", "speedup", "compiled MFU %"}};
        std::vector<StepRun> runs[2];
        for (const ModelConfig& c : configs) {
            for (Mode mode : {EAGER, FUSED}) {
                context.mode = mode;
                runs[mode].push_back(measure_model(c, o, o.warmup[0]));
            }
            for (Phase phase : {FORWARD, FORWARD_BACKWARD, STEP}) {
                const PhaseRun &eager = runs[EAGER].back().phase[phase], &fused = runs[FUSED].back().phase[phase];
                const double whole = step_tflops(c, o.batch_size, o.context_length, fused.all.mean);
                table.row(c.name, phase == STEP ? "forward+backward+optimizer" : name_of(phase),
                          cells_of(eager, eager.all)[0], cells_of(fused, fused.all)[0], factor_cell(fused, eager),
                          fused.ran() ? percent_of_peak(whole / (phase == FORWARD ? 3 : 1), precision) : "");
            }
        }
        print(table);
        answer_torch_compile(runs[EAGER], runs[FUSED]);
        all.insert(all.end(), runs[FUSED].begin(), runs[FUSED].end());
    }
    require_a_run({all});
    return 0;
}

// benchmarking_mixed_precision: (a), (b) the toy model, see precision.cu; (c) times
static void print_toy_model(const ToyDtypes& t, Precision precision) {
    Table table{strprintf("ToyModel under autocast to %s: dtypes as seen, device %s, batch 8, 5 -> 10 -> 3",
                          name_of(matmul_dtype(precision)), name_of(context.device)),
                {"component", "dtype"},
                {{"model parameters within the autocast context", name_of(t.parameters)},
                 {"output of the first feed-forward layer", name_of(t.fc1)},
                 {"output of the layer norm", name_of(t.layer_norm)},
                 {"predicted logits", name_of(t.logits)},
                 {"loss", name_of(t.loss)},
                 {"gradients", name_of(t.gradients)}}};
    print(table);
}
static void answer_toy_model(const ToyDtypes& half, const ToyDtypes& bf16) {
    answer("a",
           "Under autocast to %s the parameters are %s, the first layer's output is %s, layer norm's output is %s, the "
           "logits are %s, the loss is %s and the gradients are %s.",
           name_of(half.fc1), name_of(half.parameters), name_of(half.fc1), name_of(half.layer_norm),
           name_of(half.logits), name_of(half.loss), name_of(half.gradients));
    answer("b",
           "Layer norm's mean and variance are sensitive: they are sums, of numbers and of squares. In fp16 a square "
           "overflows from 256 on (256 x 256 = 65536, the largest number is 65504), and a small variance vanishes.");
    answer("b",
           "bf16 has fp32's range, which removes that danger, but with 8 significant bits a long sum still loses its "
           "small terms. So autocast treats layer norm alike: its output is %s under float16 and %s under bfloat16.",
           name_of(half.layer_norm), name_of(bf16.layer_norm));
}
void answer_mixed_precision(const std::vector<std::vector<StepRun>>& runs) {
    for (size_t p = 1; p < runs.size(); p++) {
        const char* precision = name_of(runs[p][0].precision);
        double growth = 1;
        const std::string verdict =
            compared(runs[p], runs[0], FORWARD_BACKWARD, name_of(runs[0][0].precision), &growth);
        answer("c", "Forward and backward in %s are %s.", precision,
               verdict.empty() ? "not to be compared" : verdict.c_str());
        if (context.device != CUDA || runs[p].size() < 2) { continue; }
        answer("c",
               growth > 1 + SMALL_DEVIATION
                   ? "The larger model gains more in %s: products take more of its time, and tensor cores do these."
                   : "The larger model gains no more in %s than the smaller.",
               precision);
    }
    const std::string oom = out_of_memory(runs[0]);
    if (!oom.empty()) { answer("c", "%s", oom.c_str() + 1); }
    if (context.device == CPU) {
        answer("c", "On a CPU low precision saves no arithmetic: operands are rounded, and products run in fp32.");
    }
}
int cmd_benchmarking_mixed_precision(const Options& asked) {
    Options o = asked;
    context.device = choose_device(o.device);
    choose_quick_sizes(o);
    const std::vector<ModelConfig> configs = configs_of(o);
    const std::vector<Precision> precisions = precisions_of(o);
    context.mode = modes_of(o, configs, precisions)[0];
    const ToyDtypes half = toy_model_dtypes(PREC_FP16), bf16 = toy_model_dtypes(PREC_BF16);
    print_toy_model(half, PREC_FP16);
    print_toy_model(bf16, PREC_BF16);
    answer_toy_model(half, bf16);

    Table table = times_table(
        caption_of(o, configs, std::string("benchmarking_mixed_precision (c); mode ") + name_of(context.mode)),
        {"size", "precision"});
    table.columns.push_back("speedup");
    std::vector<std::vector<StepRun>> runs(precisions.size());
    for (const ModelConfig& c : configs) {
        for (size_t p = 0; p < precisions.size(); p++) {
            context.precision = precisions[p];
            runs[p].push_back(measure_model(c, o, o.warmup[0], {FORWARD, FORWARD_BACKWARD}));
            const PhaseRun *now = runs[p].back().phase, *base = runs[0].back().phase;
            add_times(table, {c.name, name_of(precisions[p])}, now[FORWARD], now[FORWARD_BACKWARD]);
            table.rows.back().push_back(factor_cell(now[FORWARD_BACKWARD], base[FORWARD_BACKWARD]));
        }
    }
    print(table);
    answer_mixed_precision(runs);
    require_a_run(runs);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// The 2026 handout's gradient_checkpointing. (a) The strategies, each run on a small model: what
// it keeps and what it runs again. (b) How many blocks make the best checkpoint, without nesting, and what that costs.

struct CheckpointStrategy {  // of N blocks
    std::string name;
    int checkpoint;  // as --checkpoint takes it
    // Inputs: tensors of the residual stream from between two blocks, the embedding's output among them, that are held
    // while a block runs. Blocks: those of which all residuals are held. Again: runs of a block in backward.
    const char *inputs, *blocks, *memory, *runs_again, *compute;
    int again = 0;    // counted
    size_t peak = 0;  // bytes
};
struct CheckpointRun {  // a model's step
    std::string size;
    int checkpoint;                                            // blocks per checkpoint, as --checkpoint takes it
    size_t predicted = 0, activations = 0, peak = 0, oom = 0;  // bytes; peak: measured; oom: needed, and not there
    Stats ms{};                                                // forward and backward
};
// (a), on a small model of N blocks; fails if a gradient changes.
std::vector<CheckpointStrategy> run_strategies(int N, uint64_t seed, int B, int T);
// (b), of c's step. really: also run, and not only predicted on META.
std::vector<CheckpointRun> run_sizes(const ModelConfig& c, const Options& o, bool really);
void answer_strategies(const std::vector<CheckpointStrategy>& all);  // (a); the first: none, the second: each block
// (b): asked, the handout's size, perhaps only predicted; run, the one that was measured.
void answer_sizes(const std::vector<CheckpointRun>& asked, const std::vector<CheckpointRun>& run);

static std::string mib(size_t bytes, int decimals = 1) { return strprintf("%.*f", decimals, bytes / 1048576.0); }
// So small that it runs at once, also on a CPU.
static ModelConfig tiny_model(int blocks) { return {"tiny", 64, 256, blocks, 4, 100}; }

// ---------------------------------------------------------------------------------------------------------------------
// (a) The strategies, of N blocks in all

constexpr int BLOCKS = 16;  // N of the small model that runs

static std::vector<CheckpointStrategy> strategies_for(int N) {
    std::vector<CheckpointStrategy> all = {{"none", 0, "1", "N", "O(N)", "0", "O(N)"}};
    for (int k : std::set<int>{1, (int)std::lround(std::sqrt(N)), N}) {
        const char* memory = k == 1 || k == N ? "O(N)" : "O(sqrt N)";
        all.push_back({strprintf("flat, k = %d", k), k, "ceil(N / k)", "k", memory, "N", "O(N)"});
    }
    all.push_back({"recursive halves", CHECKPOINT_HALVES, "1 + h", "1", "O(log N)", "N (h + 1) - 2^h", "O(N log N)"});
    all.push_back({"linear nesting", CHECKPOINT_NESTED, "min(2, N)", "1", "O(1)", "N (N - 1) / 2", "O(N^2)"});
    return all;
}
// Blocks that ran. A range of a backward step says where its forward was recorded; a block that runs, first or again,
// has none.
static int count_blocks(const Trace& trace) {
    return std::count_if(trace.ranges.begin(), trace.ranges.end(),
                         [](const TracedRange& r) { return strcmp(r.name, "layer") == 0 && r.recorded_in < 0; });
}
std::vector<CheckpointStrategy> run_strategies(int N, uint64_t seed, int B, int T) {
    RestoreContext restore;
    const ModelConfig c = tiny_model(N);
    Model model = random_model(c, seed);
    make_gradients(model);
    Batch batch = random_batch(B, T, c.vocab_size, seed);
    LossScaler scaler;
    run_phase(FORWARD_BACKWARD, model, batch, scaler);  // from here on the libraries' own memory is there
    std::vector<CheckpointStrategy> all = strategies_for(N);
    std::vector<float> plain;
    for (CheckpointStrategy& s : all) {
        context.checkpoint = s.checkpoint;
        size_t before = memory_use(context.device).now;
        reset_peak(context.device);
        start_tracing();
        run_phase(FORWARD_BACKWARD, model, batch, scaler);
        s.again = count_blocks(stop_tracing()) - N;
        s.peak = memory_use(context.device).peak - before;
        std::vector<float> gradients = to_floats(model.gradients);
        if (plain.empty()) { plain = gradients; }
        if (gradients != plain) { fail("%s: its gradients are not those without checkpoints", s.name.c_str()); }
    }
    return all;
}
void answer_strategies(const std::vector<CheckpointStrategy>& all) {
    auto less = [](const CheckpointStrategy& a, const CheckpointStrategy& b) { return a.peak < b.peak; };
    const CheckpointStrategy &best = *std::min_element(all.begin(), all.end(), less), &none = all[0], &single = all[1];
    answer("a",
           "With %s the peak is least: %s MiB, against %s with each block a checkpoint and %s without checkpoints.",
           best.name.c_str(), mib(best.peak, 3).c_str(), mib(single.peak, 3).c_str(), mib(none.peak, 3).c_str());
    answer("a",
           "It keeps the residuals of %s at a time and %s: %s memory. Backward runs %s = %d blocks again: %s compute.",
           counted(best.blocks, "block").c_str(), counted(best.inputs, "block input").c_str(), best.memory,
           best.runs_again, best.again, best.compute);
    if (best.checkpoint == CHECKPOINT_NESTED) {
        sketch(R"(def run(blocks, x):
    if len(blocks) > 1:
        x = checkpoint(run, blocks[:-1], x)  # keeps x, runs again in backward
    return blocks[-1](x)
)");
    }
    answer("a",
           "Nesting is worth its compute only where N inputs are large beside the residuals of one block: a checkpoint "
           "of each block keeps N inputs, O(N), and runs N blocks again, O(N).");
}
static void print_strategies(const Options& o) {
    RestoreContext restore;
    context.mode = std::min(context.mode, FUSED);  // the same bits each time; and no block hides in a CUDA graph
    const int B = 2, T = 64;
    const ModelConfig c = tiny_model(BLOCKS);
    const std::vector<CheckpointStrategy> all = run_strategies(BLOCKS, o.seed, B, T);
    Table table{
        strprintf("gradient_checkpointing (a): N = %d blocks, d_model %d, d_ff %d, %d heads, vocabulary %d, batch %d, "
                  "context length %d, precision %s, mode %s; h = ceil(log2 N); inputs: residual streams between "
                  "blocks, %s MiB each; blocks kept: with all residuals; peak: beyond weights and gradients, which "
                  "have the same bits in all rows",
                  BLOCKS, c.d_model, c.d_ff, c.num_heads, c.vocab_size, B, T, name_of(context.precision),
                  name_of(context.mode), mib(sizeof(float) * B * T * c.d_model, 3).c_str()),
        {"strategy", "inputs kept", "blocks kept", "memory", "run again", "blocks again", "compute", "peak MiB"}};
    for (const CheckpointStrategy& s : all) {
        table.row(s.name, s.inputs, s.blocks, s.memory, s.runs_again, s.again, s.compute, mib(s.peak, 3));
    }
    print(table);
    answer_strategies(all);
}

// ---------------------------------------------------------------------------------------------------------------------
// (b) The size of a checkpoint

std::vector<CheckpointRun> run_sizes(const ModelConfig& c, const Options& o, bool really) {
    RestoreContext restore;
    Model model;
    std::vector<CheckpointRun> runs;
    for (int k : {(int)CHECKPOINT_HALF, 1, 2, 4, 8, 0}) {
        if (k > c.num_layers) { continue; }
        context.checkpoint = k;
        CheckpointRun r{c.name, k};
        r.predicted = predicted_peak(c, o.batch_size, o.context_length, STEP);
        r.activations = memory_use(META).peak_by[ACTIVATIONS];
        auto run = [&] {
            if (!model.weights) { model = random_model(c, o.seed); }
            Batch batch = random_batch(o.batch_size, o.context_length, c.vocab_size, o.seed);
            LossScaler scaler;
            zero_gradients(model);
            reset_peak(context.device);
            run_phase(STEP, model, batch, scaler);
            r.peak = memory_use(context.device).peak;
            auto passes = [&] { run_phase(FORWARD_BACKWARD, model, batch, scaler); };
            r.ms = stats_of(time_ms(o.warmup[0], o.steps, passes));
        };
        if (really) {
            const std::string row = row_of(c, o.batch_size, o.context_length, STEP);
            r.oom = run_if_fits(row, r.predicted, run, memory_use(context.device).now);
        }
        runs.push_back(r);
    }
    return runs;
}
static void print_sizes(const std::vector<CheckpointRun>& runs, const ModelConfig& c, const Options& o, bool really) {
    Table table{
        strprintf(
            "gradient_checkpointing (b): %s; %s, %d blocks, batch %d, context length %d, vocabulary %d, precision %s, "
            "mode %s; peak of a training step, with AdamW's moments; time of forward and backward, %d warmup, %d step",
            really ? "really run" : "predicted, nothing ran", c.name.c_str(), c.num_layers, o.batch_size,
            o.context_length, c.vocab_size, name_of(context.precision), name_of(context.mode), o.warmup[0], o.steps),
        {"blocks per checkpoint", "predicted peak MiB", "of it activations", "peak MiB", "fwbw_mean_ms", "of none"}};
    const Stats& none = runs.back().ms;
    if (!really) { table.columns.resize(3); }
    for (const CheckpointRun& r : runs) {
        const bool ran = r.ms.n > 0;
        table.row(r.checkpoint ? name_of_checkpoint(r.checkpoint) : "none", mib(r.predicted), mib(r.activations),
                  ran     ? mib(r.peak)
                  : r.oom ? oom_cell(r.oom)
                          : "",
                  ran ? strprintf("%.2f", r.ms.mean) : "",
                  ran && none.n > 0 ? strprintf("%.2fx", r.ms.mean / none.mean) : "");
        table.rows.back().resize(table.columns.size());
    }
    print(table);
}
static std::string blocks_of(const CheckpointRun& r) {
    return r.checkpoint == 0                 ? "without checkpoints"
           : r.checkpoint == CHECKPOINT_HALF ? "with half a block"
           : r.checkpoint == 1               ? "with one block"
                                             : strprintf("with %d blocks", r.checkpoint);
}
void answer_sizes(const std::vector<CheckpointRun>& asked, const std::vector<CheckpointRun>& run) {
    auto bytes = [](const CheckpointRun& r) { return r.peak ? r.peak : r.predicted; };
    auto least = [&](const CheckpointRun& a, const CheckpointRun& b) { return bytes(a) < bytes(b); };
    size_t best = std::min_element(asked.begin() + 1, asked.end() - 1, least) - asked.begin();
    if (bytes(asked[0]) < 0.999 * bytes(asked[best])) { best = 0; }  // half a block
    std::vector<std::string> others;
    for (size_t i = 0; i < asked.size(); i++) {
        if (i + 1 != best && i != best + 1 && i + 1 != asked.size()) { continue; }  // the next ones, and none
        others.push_back(mib(bytes(asked[i])) + (asked[i].oom ? " (out of memory) " : " ") + blocks_of(asked[i]));
    }
    answer("b", "In %s a step's peak is least %s per checkpoint: %s MiB%s. Beside it: %s.", asked[0].size.c_str(),
           blocks_of(asked[best]).c_str(), mib(bytes(asked[best])).c_str(), asked[best].peak ? "" : " (predicted)",
           list_of(others).c_str());
    if (asked.size() > 3) {
        const CheckpointRun &a = asked[asked.size() - 3], &b = asked[asked.size() - 2];  // the largest checkpoints
        const double block = 1048576.0 * (b.checkpoint - a.checkpoint), peak = (b.predicted - a.predicted) / block,
                     residuals = (b.activations - a.activations) / block;
        answer("b", "Each further block in a checkpoint adds %.0f MiB: %.0f of residuals%s.", peak, residuals,
               residuals > peak + 1
                   ? strprintf(", less %.0f of gradients that do not exist yet", residuals - peak).c_str()
                   : "");
    }
    const CheckpointRun &ours = run[std::min(best, run.size() - 2)], &none = run.back();
    if (ours.ms.n == 0) { return; }
    const std::string price =
        none.ms.n == 0 ? "without checkpoints the step does not fit, so the price is known in FLOPs only: a third more"
        : level(ours.ms, none.ms) ? "level with the time without checkpoints, within the noise"
                                  : strprintf("%.2f times the time without checkpoints", ours.ms.mean / none.ms.mean);
    answer("b", "Measured in %s %s, the peak is %s MiB (predicted: %s), and forward and backward take %.2f ms: %s.",
           ours.size.c_str(), blocks_of(ours).c_str(), mib(ours.peak).c_str(), mib(ours.predicted).c_str(),
           ours.ms.mean, price.c_str());
}

int cmd_gradient_checkpointing(const Options& asked) {
    Options o = asked;
    context.device = choose_device(o.device);
    ModelConfig c = configs_of(o)[0];
    context.precision = precisions_of(o)[0];
    context.mode = modes_of(o, {c}, {context.precision})[0];
    print_strategies(o);
    std::vector<CheckpointRun> handouts;
    if (o.quick && !o.has("size") && c.name != "custom") {
        handouts = run_sizes(c, o, false);
        print_sizes(handouts, c, o, false);
        // At this length a block's scores, residuals and gradients are to each other about as those of xl.
        c = tiny_model(8);
        by_quick(o, "batch_size", &Options::batch_size, 1);
        by_quick(o, "context_length", &Options::context_length, 256);
        by_quick(o, "steps", &Options::steps, 2);
        by_quick(o, "warmup", &Options::warmup, std::vector<int>{1});
    }
    const std::vector<CheckpointRun> runs = run_sizes(c, o, true);
    print_sizes(runs, c, o, true);
    answer_sizes(handouts.empty() ? runs : handouts, runs);
    if (std::none_of(runs.begin(), runs.end(), [](const CheckpointRun& r) { return r.ms.n > 0; })) {
        fail("nothing fits into the memory that is available");
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// The model on data that is not random. `model` runs your weights on your batch, `train` learns a real text.

// ---------------------------------------------------------------------------------------------------------------------
// model: your weights and batch in, our logits, loss, gradients and (after N AdamW steps) parameters out.

static Tensor tensor_from_file(const FileTensor& f) {  // F32 or BF16 -> F32, I64 or I32 -> I32, on the CPU
    bool integer = f.dtype[0] == 'I';
    Tensor t = empty_on(CPU, f.shape, integer ? I32 : F32, INPUTS);
    for (int64_t i = 0; i < t.size(); i++) {
        const char* at = (const char*)f.data;
        if (f.dtype == "F32") { memcpy(t.as<float>() + i, at + 4 * i, 4); }
        if (f.dtype == "I32") { memcpy(t.as<int>() + i, at + 4 * i, 4); }
        if (f.dtype == "BF16") {
            uint16_t bits;
            memcpy(&bits, at + 2 * i, 2);
            t.as<float>()[i] = bf16_to_float(bits);
        }
        if (f.dtype == "I64") {
            int64_t value;
            memcpy(&value, at + 8 * i, 8);
            t.as<int>()[i] = value < INT32_MIN || value > INT32_MAX ? -1 : (int)value;  // -1: refused as a token below
        }
    }
    return t;
}
static Tensor load_tokens(const SafeTensors& file, const char* name, const Shape& shape, int V) {
    FileTensor f = require_tensor(file, name, shape, {"I32", "I64"});
    Tensor t = tensor_from_file(f);
    for (int64_t i = 0; i < t.size(); i++) {
        int token = t.as<int>()[i];
        if (token < 0 || token >= V) {
            fail("%s: tensor %s: element %" PRId64 " is not a token of a vocabulary of %d", file.path.c_str(), name, i,
                 V);
        }
    }
    return to_device(t, context.device);
}
// The model whose weights a file holds; every tensor that is missing, superfluous or wrong-shaped is refused by name.
static ModelConfig config_from_file(const SafeTensors& file, int num_heads, float rope_theta) {
    FileTensor embedding = require_tensor(file, "token_embeddings.weight", {-1, -1}, {"F32", "BF16"});
    FileTensor w1 = require_tensor(file, "layers.0.ffn.w1.weight", {-1, -1}, {"F32", "BF16"});
    for (const FileTensor* t : {&embedding, &w1}) {
        for (int64_t n : t->shape) {  // one that is empty may claim any length
            if (n < 1 || n > INT_MAX) {
                fail("%s: tensor %s: expected a shape of whole numbers from 1 to %d, found %s", file.path.c_str(),
                     t == &w1 ? "layers.0.ffn.w1.weight" : "token_embeddings.weight", INT_MAX,
                     to_string(t->shape).c_str());
            }
        }
    }
    ModelConfig c{"custom", (int)embedding.shape[1], (int)w1.shape[0], 1, num_heads, (int)embedding.shape[0]};
    c.rope_theta = rope_theta;
    while (file.tensors.count("layers." + std::to_string(c.num_layers) + ".ln1.weight")) { c.num_layers++; }
    return c;
}
static Tensor weight_from_file(const SafeTensors& file, const std::string& name, const Shape& shape) {
    return tensor_from_file(require_tensor(file, name, shape, {"F32", "BF16"}));
}
// Sets a weight, or a moment, which may be bf16.
static void set_weight(const Tensor& to, const Tensor& from_cpu) {
    NoGrad no_grad;
    copy_or_add(detached(to), to_device(from_cpu, context.device), false);
}
static std::string model_of(const ModelConfig& c) { return strprintf("one of a model of %d layers", c.num_layers); }
struct NamedTensors {  // what goes into a file; keeps the CPU copies alive
    std::vector<Tensor> kept;
    std::vector<std::pair<std::string, FileTensor>> list;
    void add(const std::string& name, const Tensor& t) {
        NoGrad no_grad;
        Tensor wide = t.dtype == I32 || t.dtype == F32 ? t : cast(t, F32);
        kept.push_back(to_device(contiguous(wide), CPU));
        list.push_back({name, describe(kept.back())});
    }
};
// The name of the first that holds NaN or an infinity; "": none does.
static std::string first_not_finite(const NamedTensors& tensors) {
    for (const auto& [name, t] : tensors.list) {
        const float* x = (const float*)t.data;
        auto finite = [](float value) { return std::isfinite(value); };
        if (t.dtype == "F32" && !std::all_of(x, x + count(t.shape), finite)) { return name; }
    }
    return "";
}

static int run_model(const Options& o, SafeTensors& weights, const SafeTensors& batch_file) {
    ModelConfig c = config_from_file(weights, o.num_heads, (float)o.rope_theta);
    if (c.d_model % c.num_heads != 0 || c.d_model / c.num_heads % 2 != 0) {
        fail("%s: tensor token_embeddings.weight: width %d does not make %d heads of an even size", o.weights.c_str(),
             c.d_model, c.num_heads);
    }
    context.mode = mode_for(o, o.mode[0], c, context.precision);
    Trainer t;
    t.model = make_model(c);
    Model& model = t.model;
    std::set<std::string> known;
    for (const Parameter& p : model.parameters) {
        set_weight(p.weight, weight_from_file(weights, p.name, p.shape));
        known.insert(p.name);
    }
    require_no_others(weights, known, model_of(c));
    weights.content = nullptr, weights.tensors.clear();
    require_no_others(batch_file, {"tokens", "targets"}, "tokens or targets");
    Shape shape = require_tensor(batch_file, "tokens", {-1, -1}, {"I32", "I64"}).shape;
    if (count(shape) == 0) { fail("%s: tensor tokens: is empty, %s", o.batch.c_str(), to_string(shape).c_str()); }
    Batch batch{load_tokens(batch_file, "tokens", shape, c.vocab_size),
                load_tokens(batch_file, "targets", shape, c.vocab_size)};

    make_gradients(model);
    NamedTensors out;
    zero_gradients(model);
    Tensor logits = forward(model, batch.tokens), loss = cross_entropy(logits, batch.targets);
    backward(loss, loss_scale_of(t.scaler));
    drop_weight_copies(model.slots);
    out.add("logits", logits);
    out.add("loss", loss);
    for (const Parameter& p : model.parameters) {
        NoGrad no_grad;
        out.add("grad." + p.name, scale(view(model.gradients, p.offset, p.shape), 1 / loss_scale_of(t.scaler)));
    }
    const double first_loss = to_doubles(loss)[0];
    t.adamw.lr = (float)o.lr;
    for (int i = 0; i < o.steps; i++) { train_step(t, {batch}); }
    for (const Parameter& p : model.parameters) {
        if (o.steps > 0) { out.add("param." + p.name, p.weight); }
    }
    save_safetensors(o.out, out.list, {{"format", "pt"}});
    std::string line = strprintf(
        "model %s: %d layers, d_model %d, d_ff %d, %d heads, vocabulary %d; tokens %s; loss %.6f", o.weights.c_str(),
        c.num_layers, c.d_model, c.d_ff, c.num_heads, c.vocab_size, to_string(shape).c_str(), first_loss);
    if (o.steps > 0) { line += strprintf("; before step %d: %.6f", o.steps, t.loss); }
    std::string bad = first_not_finite(out);  // your weights may ask for it
    if (!bad.empty()) { line += "; the first tensor that is not finite: " + bad; }
    line += strprintf("; wrote %zu tensors to %s", out.list.size(), o.out.c_str());
    printf("%s\n", one_line(line).c_str());
    return 0;
}
int cmd_model(const Options& o) {
    context.device = choose_device(o.device);
    context.precision = precision_from(o.precision[0]);
    SafeTensors weights = load_safetensors(o.weights), batch_file = load_safetensors(o.batch);
    return run_model(o, weights, batch_file);
}

// ---------------------------------------------------------------------------------------------------------------------
// train: a real text, byte by byte, in one process.

struct Text {
    std::vector<uint8_t> bytes;
    int64_t train;  // bytes [0, train) are trained on, the last tenth is held out
};
static Text read_text(const std::string& path, int T) {
    std::ifstream file(path, std::ios::binary);
    Text text;
    text.bytes.assign(std::istreambuf_iterator<char>(file), {});
    const int64_t size = (int64_t)text.bytes.size(), held_out = size / 10;
    if (!file.is_open() || file.bad()) { fail("%s: cannot be read: %s", path.c_str(), strerror(errno)); }
    if (size > INT_MAX) { fail("%s: expected at most %d bytes", path.c_str(), INT_MAX); }  // random_int draws windows
    text.train = size - held_out;
    if (held_out < T + 1) {
        fail("%s: %" PRId64 " bytes are too few: the tenth that is held out has to be longer than a context of %d",
             path.c_str(), size, T);
    }
    return text;
}
static Batch windows(const Text& text, const std::vector<int64_t>& starts, int T) {
    std::vector<int> x, y;
    for (int64_t start : starts) {
        x.insert(x.end(), &text.bytes[start], &text.bytes[start] + T);
        y.insert(y.end(), &text.bytes[start] + 1, &text.bytes[start] + T + 1);
    }
    return {from_ints(x, {(int64_t)starts.size(), T}), from_ints(y, {(int64_t)starts.size(), T})};
}
// The windows that step `step` sees are a function of (seed, step) alone. That makes a resumed run equal to an
// uninterrupted one.
static Batch training_batch(const Text& text, int B, int T, uint64_t seed, int step) {
    std::vector<int64_t> starts;
    for (int b = 0; b < B; b++) {
        starts.push_back(random_int((int)(text.train - T), seed, key_of("windows"), (uint64_t)step * B + b));
    }
    return windows(text, starts, T);
}
// B windows at a time, as a step takes them: more would need memory that a step does not.
static double held_out_loss(Model& model, const Text& text, int B, int T) {
    NoGrad no_grad;
    double sum = 0;
    int64_t n = 0, size = (int64_t)text.bytes.size();
    for (int64_t at = text.train; at + T < size;) {
        std::vector<int64_t> starts;
        for (; (int)starts.size() < B && at + T < size; at += T) { starts.push_back(at); }
        sum += to_doubles(forward_to_loss(model, windows(text, starts, T)))[0] * starts.size();
        n += starts.size();
        progress("held-out loss: %.0f %%", 100.0 * (at - text.train) / (size - text.train));
    }
    drop_weight_copies(model.slots);
    return sum / n;
}
// Continues the held-out text's first T bytes by n, each drawn from softmax(logits / temperature).
static std::string sample_text(Model& model, const Text& text, int T, int n, uint64_t seed) {
    constexpr double temperature = 0.8;
    NoGrad no_grad;
    std::vector<int> tokens(text.bytes.begin() + text.train, text.bytes.begin() + text.train + T);
    std::string out;
    for (int i = 0; i < n; i++) {
        Tensor logits = forward(model, from_ints({tokens.end() - T, tokens.end()}, {1, T}));
        int V = (int)logits.dim(-1);
        std::vector<double> l = to_doubles(view(contiguous(logits), (int64_t)(T - 1) * V, {V}));
        double max = *std::max_element(l.begin(), l.end()), sum = 0;
        for (double& x : l) { sum += x = exp((x - max) / temperature); }
        double at = random_int(1 << 30, seed, key_of("sample"), i) / (double)(1 << 30) * sum;
        int token = 0;
        while (token < V - 1 && (at -= l[token]) >= 0) { token++; }
        tokens.push_back(token);
        bool printable = (token >= 32 && token < 127) || token == '\n';
        out += printable ? std::string(1, (char)token) : strprintf("\\x%02x", token);
    }
    return out;
}
// Linear warm-up over a tenth of the steps, then a cosine down to a tenth of lr.
static double learning_rate(const Options& o, int step) {
    const int warmup = std::max(1, o.steps / 10);
    if (step < warmup) { return o.lr * (step + 1) / warmup; }
    return o.lr * (0.1 + 0.45 * (1 + cos(M_PI * (step - warmup) / std::max(1, o.steps - warmup))));
}

// A checkpoint: weights, AdamW's moments, and in its metadata the options that shape the run, under their own names.
static const std::pair<const char*, int Options::*> shaping[] = {{"d_model", &Options::d_model},
                                                                 {"d_ff", &Options::d_ff},
                                                                 {"num_layers", &Options::num_layers},
                                                                 {"num_heads", &Options::num_heads},
                                                                 {"batch_size", &Options::batch_size},
                                                                 {"context_length", &Options::context_length},
                                                                 {"steps", &Options::steps}};

static void visit(const Trainer& t, const std::function<void(const std::string& name, const Tensor& values)>& see) {
    for (const auto& [prefix, arena] :
         {std::make_pair("", t.model.weights), {"adamw.m.", t.model.m}, {"adamw.v.", t.model.v}}) {
        for (const Parameter& p : t.model.parameters) { see(prefix + p.name, view(arena, p.offset, p.shape)); }
    }
}
// Nothing that is not finite is saved over a good file.
static void save_checkpoint(Trainer& t, const Options& o) {
    plain_weights(t.model);
    NamedTensors tensors;
    visit(t, [&](const std::string& name, const Tensor& values) { tensors.add(name, values); });
    const std::string bad = first_not_finite(tensors);
    if (!bad.empty()) { fail("after step %d %s is not finite: nothing was saved", t.steps, bad.c_str()); }
    std::map<std::string, std::string> metadata = {{"format", "pt"},
                                                   {"step", std::to_string(t.steps)},
                                                   {"updates", std::to_string(t.model.step)},
                                                   {"seed", std::to_string(o.seed)},
                                                   {"lr", strprintf("%.17g", o.lr)},
                                                   {"precision", name_of(context.precision)},
                                                   {"mode", name_of(context.mode)},
                                                   {"loss_scale", strprintf("%.9g", t.scaler.scale)},
                                                   {"good_steps", std::to_string(t.scaler.good_steps)}};
    for (const auto& [name, field] : shaping) { metadata[name] = std::to_string(o.*field); }
    save_safetensors(o.save, tensors.list, metadata);
    choose_form(t.model);
}
static std::string metadata_of(const SafeTensors& file, const std::string& name,
                               const std::set<std::string>& names = {}) {
    auto found = file.metadata.find(name);
    if (found == file.metadata.end()) {
        fail("%s: metadata %s is missing: not a checkpoint of train", file.path.c_str(), name.c_str());
    }
    if (!names.empty() && names.count(found->second) == 0) {
        fail("%s: metadata %s: found '%s'", file.path.c_str(), name.c_str(), found->second.c_str());
    }
    return found->second;
}
static double number_of(const SafeTensors& file, const std::string& name, double low, double high, bool whole = false) {
    const std::string text = metadata_of(file, name);
    char* end;
    const double value = strtod(text.c_str(), &end);
    if (text.empty() || *end || !(value >= low && value <= high) || (whole && value != std::floor(value))) {
        fail("%s: metadata %s: expected a number from %g to %g, found '%s'", file.path.c_str(), name.c_str(), low, high,
             text.c_str());
    }
    return value;
}
// Options that were not typed are the saved run's.
static void options_from_checkpoint(const SafeTensors& file, Options& o) {
    for (const auto& [name, field] : shaping) {
        const int value = (int)number_of(file, name, 1, 1 << 20, true);
        const bool of_model =
            field != &Options::batch_size && field != &Options::context_length && field != &Options::steps;
        if (of_model && o.has(name) && o.*field != value) {
            fail("--%s %d contradicts %s, whose model has %d", name, o.*field, file.path.c_str(), value);
        }
        if (!o.has(name)) { o.*field = value; }
    }
    if (!o.has("seed")) { o.seed = strtoull(metadata_of(file, "seed").c_str(), nullptr, 10); }
    if (!o.has("lr")) { o.lr = number_of(file, "lr", FLT_TRUE_MIN, FLT_MAX); }
    const std::string precision = metadata_of(file, "precision", {"fp32", "tf32", "bf16", "fp16", "pure_bf16"}),
                      mode = metadata_of(file, "mode", {"eager", "fused", "flash"});
    if (!o.has("precision")) { o.precision = {precision}; }
    if (!o.has("mode")) { o.mode = {mode}; }
    if (o.d_model % (2 * o.num_heads) != 0) {
        fail("%s: metadata: d_model %d does not make %d heads of an even size", file.path.c_str(), o.d_model,
             o.num_heads);
    }
}
// Random weights and moments of zero, or the checkpoint's weights, moments, step and loss scale.
static void make_trainer(Trainer& t, const ModelConfig& config, const Options& o, const SafeTensors& checkpoint) {
    t.max_norm = 1;
    t.model = make_model(config);
    make_optimizer_state(t.model);
    if (checkpoint.path.empty()) {
        init_weights(t.model, o.seed);
    } else {
        std::set<std::string> known;
        visit(t, [&](const std::string& name, const Tensor& values) {
            set_weight(values, weight_from_file(checkpoint, name, values.shape));
            known.insert(name);
        });
        require_no_others(checkpoint, known, model_of(config));
        t.steps = (int)number_of(checkpoint, "step", 0, 1 << 20);
        t.model.step = (int)number_of(checkpoint, "updates", 0, 1 << 20);
        t.scaler.scale = (float)number_of(checkpoint, "loss_scale", FLT_MIN, FLT_MAX);
        t.scaler.good_steps = (int)number_of(checkpoint, "good_steps", 0, 1 << 20);
    }
    choose_form(t.model);
}

// Until the last step, or a signal, or a stdout that takes no more rows. Fails where the loss or the gradients' norm is
// not finite; in fp16 that norm halves the loss scale, until it is below 2^-14, fp16's smallest normal number.
static void take_steps(Trainer& t, const Text& text, const Options& o, Table& rows) {
    const int rows_apart = std::max(1, o.steps / 20);
    while (t.steps < o.steps && !EndSignals::seen()) {
        t.adamw.lr = (float)learning_rate(o, t.steps);
        Batch batch = training_batch(text, o.batch_size, o.context_length, o.seed, t.steps);
        synchronize();
        const double start = now_ms();
        train_step(t, {batch});
        const double ms = now_ms() - start, loss = t.loss, norm = t.norm;
        const bool skipped = !std::isfinite(norm) && context.precision == PREC_FP16 && t.scaler.scale >= 0x1p-14f;
        if (!std::isfinite(loss) || (!std::isfinite(norm) && !skipped)) {
            fail("step %d: the %s is not finite, and nothing was saved; a smaller --lr may help", t.steps,
                 std::isfinite(loss) ? "gradients' norm" : "loss");
        }
        progress("step %d of %d: loss %.4f", t.steps, o.steps, loss);
        if (t.steps % rows_apart == 0 || t.steps == o.steps || t.steps == 1) {
            rows.row(t.steps, strprintf("%.7f", loss), strprintf("%.3g", t.adamw.lr),
                     skipped ? "overflow, step skipped" : strprintf("%.3f", norm), strprintf("%.2f", ms),
                     strprintf("%.0f", 1e3 * o.batch_size * o.context_length / ms));
            if (!print_last_row(rows, {7, 9, 8, 13, 8, 9})) { return; }
        }
    }
}
int cmd_train(const Options& typed) {
    Options o = typed;
    SafeTensors checkpoint;
    if (o.quick) {
        by_quick(o, "d_model", &Options::d_model, 64), by_quick(o, "d_ff", &Options::d_ff, 128);
        by_quick(o, "num_layers", &Options::num_layers, 2), by_quick(o, "context_length", &Options::context_length, 32);
        by_quick(o, "batch_size", &Options::batch_size, 4), by_quick(o, "steps", &Options::steps, 20);
    }
    if (!o.load.empty()) {
        checkpoint = load_safetensors(o.load);
        options_from_checkpoint(checkpoint, o);
    }
    const ModelConfig c{"custom", o.d_model, o.d_ff, o.num_layers, o.num_heads, 256};
    check_config(c);
    const int T = o.context_length;
    const Text text = read_text(o.data, T);
    context.device = choose_device(o.device);
    context.precision = precision_from(o.precision[0]);
    context.mode = mode_for(o, o.mode[0], c, context.precision);
    Trainer t;
    make_trainer(t, c, o, checkpoint);
    checkpoint.content = nullptr, checkpoint.tensors.clear();
    if (t.steps >= o.steps) {
        note("train: %s has all %d steps behind it; --steps asks for more", o.load.c_str(), t.steps);
    }
    const double before = held_out_loss(t.model, text, o.batch_size, T);
    Table rows{strprintf("train %s: %zu bytes, a tenth held out; %d layers, d_model %d, d_ff %d, %d heads, "
                         "precision %s, mode %s; batch %d, context length %d, seed %" PRIu64 "",
                         o.data.c_str(), text.bytes.size(), c.num_layers, c.d_model, c.d_ff, c.num_heads,
                         name_of(context.precision), name_of(context.mode), o.batch_size, T, o.seed),
               {"step", "loss", "lr", "gradient norm", "ms", "tokens/s"}};
    int signal = 0;
    {
        EndSignals first_is_a_wish;
        take_steps(t, text, o, rows);
        zero_gradients(t.model), t.model.kept = nullptr;  // room, on a GPU that the run has filled
        if (!o.save.empty()) { save_checkpoint(t, o); }   // before all that takes time
        signal = EndSignals::seen();
    }
    if (rows.rows.empty()) { print(rows); }
    if (signal) {
        note("ended by signal %d (%s) after step %d of %d: %s", signal, strsignal(signal), t.steps, o.steps,
             o.save.empty() ? "nothing was saved, since --save was not given"
                            : ("to go on: the same command line with --load " + o.save).c_str());
        return 128 + signal;
    }
    const double after = held_out_loss(t.model, text, o.batch_size, T);
    Table summary{"train: loss in nats per byte", {"held-out loss before", "held-out loss after", "steps", "peak MiB"}};
    summary.row(strprintf("%.4f", before), strprintf("%.4f", after), t.steps,
                strprintf("%.0f", memory_use(context.device).peak / 1048576.0));
    print(summary);
    if (o.sample > 0) {
        answer("", "The held-out text's first %d bytes continued (temperature 0.8):", T);
        sketch(sample_text(t.model, text, T, o.sample, o.seed) + "\n");
    }
    return 0;
}
