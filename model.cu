// model.cu: the handout's Transformer LM and its training step.
//
//   x = E[tokens]
//   each layer:  x += Wo attention(rope(Wq n), rope(Wk n), Wv n)        n = rmsnorm(x; ln1)
//                x += W2 (silu(W1 n) * W3 n)                            n = rmsnorm(x; ln2)
//   logits = lm_head rmsnorm(x; ln_final)
#include "lib/gpu.h"
#include <algorithm>

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
