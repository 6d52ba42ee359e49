// model.cu: the handout's Transformer LM and its training step, then what the handouts ask of
// them. It stands in this order:
//
//   the model        sizes, weights, a block, forward and loss
//   its training     AdamW, a step
//   the problems     benchmarking_script (1.1.3), torch_compile (b) (1.3),
//                    benchmarking_mixed_precision (c) (1.1.5), gradient_checkpointing (2026, 3.2.1)
//
// Read run_block and forward first, beside these formulas; the ops that they call are in layers.cu:
//
//   x = E[tokens]
//   each layer:  x += Wo attention(rope(Wq n), rope(Wk n), Wv n)        n = rmsnorm(x; ln1)
//                x += W2 (silu(W1 n) * W3 n)                            n = rmsnorm(x; ln2)
//   logits = lm_head rmsnorm(x; ln_final)
#include "fast_ways.h"

// -------------------------------------------------------------------------------------------------
// Sizes: d_model, d_ff, num_layers, num_heads. --size in main.cu has a list of the names, too.

const ModelConfigs model_sizes = {
    {"small", 768, 3072, 12, 12},        {"medium", 1024, 4096, 24, 16},
    {"large", 1280, 5120, 36, 20},       {"xl", 1600, 6400, 48, 25},
    {"2.7B", 2560, 10240, 32, 32},       {"xl (2026)", 2560, 10240, 32, 32},
    {"8B", 4096, 11008, 34, 32, 151936}, {"10B", 4608, 12288, 50, 36},
};

// Ends with a usage error if the heads' size is odd or no whole number.
void check_config(const ModelConfig& c) {
    if (c.d_model % (2 * c.num_heads) != 0) {
        usage_error(
            "--d_model %d is not divisible by --num_heads %d into heads of an even size; RoPE "
            "turns pairs",
            c.d_model, c.num_heads);
    }
}

// Returns the sizes, checked: those of --size, if it was typed; else a custom one where --d_model,
// --d_ff, --num_layers or --num_heads has a value, typed or by default, with small's numbers for
// the others; else those of --size's default. They come in the table's order.
ModelConfigs configs_of(const Options& o) {
    ModelConfigs configs;
    if (!o.has("size") && (o.d_model || o.d_ff || o.num_layers || o.num_heads)) {
        auto or_small = [](int typed, int small) { return typed ? typed : small; };
        const ModelConfig& s = model_sizes[0];
        configs = {{"custom", or_small(o.d_model, s.d_model), or_small(o.d_ff, s.d_ff),
                    or_small(o.num_layers, s.num_layers), or_small(o.num_heads, s.num_heads),
                    o.vocab_size}};
    } else {
        set<string> names;
        for (const string& size : o.size) {
            names.insert(size == "xl" && o.edition == "2026" ? "xl (2026)" : size);
        }
        for (const ModelConfig& c : model_sizes) {
            if (names.count(c.name)) { configs.push_back(c); }
        }
    }

    for (ModelConfig& c : configs) {
        if (o.has("vocab_size")) { c.vocab_size = o.vocab_size; }
        check_config(c);
    }
    return configs;
}

// -------------------------------------------------------------------------------------------------
// Weights. One buffer, an arena, holds all of them; the moments, and after make_gradients the
// gradients, have one each, laid out alike. The order is that in which backward finishes the
// gradients, so the gradients that are ready are always a prefix of their arena (in mode eager q, k
// and v are finished in another order among themselves, and so are w1 and w3). Matrices that read
// the same input stand side by side, so that one product can take them as a joined one.

int64_t aligned(int64_t elements) { return (elements + 63) / 64 * 64; }

// A row of the table of weights.
struct WeightRow {
    string name;  // the staff model's, without ".weight"
    Shape shape;
    int unit;
    Tensor* field;  // of the model, that the weight goes into
    // Set for q and w1 only: where the joined qkv or w13 goes, and its shape.
    Tensor* joined = nullptr;
    Shape joined_shape = {};
};

// Returns a row for each weight, in the order of the arena. The rows point into the model.
static vector<WeightRow> weight_rows(Model& model) {
    const int64_t C = model.config.d_model, F = model.config.d_ff, V = model.config.vocab_size;
    const int L = model.config.num_layers;
    vector<WeightRow> rows = {{"lm_head", {V, C}, L + 1, &model.lm_head},
                              {"ln_final", {C}, NORMS, &model.ln_final}};
    for (int l = L - 1; l >= 0; l--) {
        const string name = "layers." + to_string(l) + ".";
        Layer& layer = model.layers[l];
        rows.push_back({name + "ffn.w2", {C, F}, 1 + l, &layer.w2});
        rows.push_back({name + "ffn.w1", {F, C}, 1 + l, &layer.w1, &layer.w13, {2 * F, C}});
        rows.push_back({name + "ffn.w3", {F, C}, 1 + l, &layer.w3});
        rows.push_back({name + "ln2", {C}, NORMS, &layer.ln2});
        rows.push_back({name + "attn.output_proj", {C, C}, 1 + l, &layer.o});
        rows.push_back({name + "attn.q_proj", {C, C}, 1 + l, &layer.q, &layer.qkv, {3 * C, C}});
        rows.push_back({name + "attn.k_proj", {C, C}, 1 + l, &layer.k});
        rows.push_back({name + "attn.v_proj", {C, C}, 1 + l, &layer.v});
        rows.push_back({name + "ln1", {C}, NORMS, &layer.ln1});
    }
    rows.push_back({"token_embeddings", {V, C}, 0, &model.embedding});
    return rows;
}

// Returns a model that knows its parameters' names, shapes and offsets, but has no weights yet.
// Each weight begins at a multiple of 64 elements, but k, v and w3: within a joined weight there is
// no gap.
Model lay_out_model(const ModelConfig& c) {
    Model model;
    model.config = c;
    model.layers.resize(c.num_layers);

    int64_t end = 0, joined_end = 0;
    for (const WeightRow& row : weight_rows(model)) {
        model.parameters.push_back({row.name + ".weight", row.shape, end, Tensor(), row.unit});
        if (row.joined) { joined_end = end + count(row.joined_shape); }
        end += count(row.shape);
        if (end >= joined_end) { end = aligned(end); }
    }
    return model;
}

// Asks `place` for the tensor of every weight and of every joined one, and enters it in the model.
void place_weights(Model& model, const Place& place) {
    const vector<WeightRow> rows = weight_rows(model);
    for (size_t i = 0; i < rows.size(); i++) {
        Parameter& p = model.parameters[i];
        auto slot = [&](const Shape& shape) {
            model.slots.push_back(place(p, shape));
            return model.slots.back();
        };
        if (rows[i].joined) { *rows[i].joined = slot(rows[i].joined_shape); }
        p.weight = slot(p.shape);
        *rows[i].field = p.weight;
    }
}

// Returns a model whose weights are one arena of zeros. The arena's length is a multiple of 6720 =
// 64 x 3 x 5 x 7: 1 to 8 ranks can own equal parts, of whole 16 bytes. The sharded optimizer also
// sums and steps the gaps between weights and what lies behind the last: no NaN may stand there.
Model make_model(const ModelConfig& c, DType dtype) {
    constexpr int64_t PARTS = 6720;
    Model model = lay_out_model(c);
    const Parameter& last = model.parameters.back();
    const int64_t end = last.offset + count(last.shape);
    model.weights = zeros({(end + PARTS - 1) / PARTS * PARTS}, dtype, PARAMETERS);

    place_weights(model, [&](const Parameter& p, const Shape& shape) {
        Tensor t = require_gradient(view(model.weights, p.offset, shape));
        t.gradient->is_parameter = true;
        return t;
    });
    return model;
}

// Fills a weight with numbers that depend on the seed, the name and the shape.
void init_weight(const Tensor& weight, const string& name, uint64_t seed) {
    float mean = 0, std = 1;
    if (weight.shape.size() == 1) {
        mean = 1;
        std = 0;
    } else if (name != "token_embeddings.weight") {
        std = sqrtf(2.0f / (weight.dim(0) + weight.dim(1)));
    }
    fill_normal(weight, seed, key_of(name), mean, std);
}
void init_weights(const Model& model, uint64_t seed) {
    for (const Parameter& p : model.parameters) { init_weight(p.weight, p.name, seed); }
}
Model random_model(const ModelConfig& c, uint64_t seed) {
    Model model = make_model(c);
    init_weights(model, seed);
    if (fast_ways.keep_weights) { fast_ways.keep_weights(model); }
    return model;
}

static int64_t offset_of(const Model& model, const Tensor& slot) {  // in elements
    return (slot.data - model.weights.data) / size_of(slot.dtype);
}
void make_gradients(Model& model) {
    if (model.gradients) { return; }
    model.gradients = zeros(model.weights.shape, model.weights.dtype, GRADIENTS);
    for (const Tensor& t : model.slots) {
        t.gradient->value = view(model.gradients, offset_of(model, t), t.shape);
    }
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

// Makes RoPE's table for T positions, unless it is long enough already, and readies the weights.
void make_ready(Model& model, int64_t T) {
    const ModelConfig& c = model.config;
    if (!model.rope || model.rope.dim(0) < T) {
        model.rope = rope_table(T, c.d_model / c.num_heads, c.rope_theta,
                                model.weights.dtype == F64 ? F64 : F32);
    }
    if (fast_ways.ready_weights) { fast_ways.ready_weights(model); }
}

// -------------------------------------------------------------------------------------------------
// A block

// The residual stream x, [B,T,C], is sum + delta. += only stores its part in delta (null: none
// waits); the next norm adds that to sum. So between two += there has to be a norm. The reason:
// modes fused and flash have one op for both, add_rmsnorm. Mode eager adds there, too, by an op of
// its own.
struct Residual {
    Tensor sum;
    float eps;
    Tensor delta = {};
    void operator+=(const Tensor& part) { delta = part; }
    Tensor norm(const Tensor& weight) {
        const Tensor part = delta;
        delta = Tensor();
        return add_rmsnorm(&sum, part, weight, eps);
    }
};
// Wo attention(rope(Wq n), rope(Wk n), Wv n): [B,T,C] -> [B,T,C]
static Tensor attention_part(const Model& model, const Layer& layer, const Tensor& n) {
    Tensor heads = self_attention(layer, n, model.rope, model.config.num_heads);
    Range output("projections");
    return linear(heads, layer.o);
}
// W2 (silu(W1 n) * W3 n): [B,T,C] -> [B,T,C]
static Tensor feed_forward(const Layer& layer, const Tensor& n) {
    Range ffn("ffn");
    return linear(swiglu(layer, n), layer.w2);
}
using FeedForward = decltype(feed_forward);
// A block, [B,T,C]. ffn: feed_forward, or feed_forward_again, which gives the same and keeps less
// for backward. The block's last part is added by the next norm, the next block's ln1 or
// ln_final, or at the end of a checkpoint (run_blocks).
static void run_block(const Model& model, const Layer& layer, FeedForward* ffn, Residual& x) {
    // sum += delta;  delta = attention(norm(sum, ln1))
    x += attention_part(model, layer, x.norm(layer.ln1));
    // sum += delta;  delta = ffn(norm(sum, ln2))
    x += ffn(layer, x.norm(layer.ln2));
}

// -------------------------------------------------------------------------------------------------
// Units: the embedding, each block, the head. FSDP gathers the weights unit by unit before forward
// and, if their buffer was overwritten, before backward. begin_unit stands before a unit's ops and
// calls pre_forward. end_unit stands behind them: it returns y_in, the last op's result (a block's
// delta), with one more step on the tape, which calls pre_backward. Backward comes to this step
// before the unit's other steps, since the tape runs from its end. The head has no end_unit: its
// weights are still there when backward begins. The norms belong to no unit: every rank has them.
// The steps refer to the model, which stays at its address. Every forward to a loss runs through
// all units: so all ranks gather the same units in the same order.

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

// Both stand below, under "Gradient checkpointing".
static int run_checkpointed_blocks(const Model& model, Tensor* x);
static FeedForward* feed_forward_of(int l);

// Runs the embedding's unit; returns x, [B,T,C].
static Tensor run_embedding(const Model& model, const Tensor& tokens) {
    Range r("embedding");
    begin_unit(model, 0);
    return end_unit(model, 0, gather_rows(model.embedding, tokens));
}
// Runs the unit of block l on x.
static void run_unit(const Model& model, int l, Residual& x) {
    Range r("layer");
    begin_unit(model, 1 + l);
    run_block(model, model.layers[l], feed_forward_of(l), x);
    x.delta = end_unit(model, 1 + l, x.delta);
}

// -------------------------------------------------------------------------------------------------
// Forward and loss

// Runs all but the head on tokens [B,T]; returns the head's input, [B,T,C].
static Tensor forward_to_head(Model& model, const Tensor& tokens) {
    make_ready(model, tokens.dim(1));
    Residual x{run_embedding(model, tokens), model.config.eps};
    const int checkpointed = context.recording ? run_checkpointed_blocks(model, &x.sum) : 0;
    for (int l = checkpointed; l < model.config.num_layers; l++) { run_unit(model, l, x); }
    return x.norm(model.ln_final);
}
Tensor forward(Model& model, const Tensor& tokens) {
    Range range("forward");
    Tensor y = forward_to_head(model, tokens);
    Range r("lm_head");
    begin_unit(model, model.config.num_layers + 1);
    return linear(y, model.lm_head);
}
// Returns forward's loss, []. With context.head_chunk the logits exist for so many rows at a time.
Tensor forward_to_loss(Model& model, const Batch& batch) {
    if (context.head_chunk == 0) {
        return cross_entropy(forward(model, batch.tokens), batch.targets);
    }
    Range range("forward");
    Tensor y = forward_to_head(model, batch.tokens);
    begin_unit(model, model.config.num_layers + 1);
    return chunked_loss(y, model.lm_head, batch.targets, context.head_chunk);
}

// -------------------------------------------------------------------------------------------------
// AdamW's step. Its rule, the form of mode eager and the fused one stand at the end of layers.cu.

// Returns the gradients as backward left them. Outside mode eager q, k and v have one gradient,
// that of the slot qkv, and their own slots stay unfilled; so with w1 and w3 (w13).
static FlatGradients flat_gradients(const Model& model) {
    FlatGradients gradients;
    for (const Tensor& t : model.slots) {
        if (t.gradient->filled) { gradients.push_back({t.gradient->value, offset_of(model, t)}); }
    }
    return gradients;
}
// Returns sqrt(sum g^2), for clipping, and to see fp16's overflows.
double gradient_norm(const Model& model) {
    Range range("gradient norm");
    return sqrt(square_sum(flat_gradients(model)));
}

// Takes AdamW's next step with gradient_scale times the gradients.
static void adamw_step(Model& model, const AdamW& a, float gradient_scale) {
    NoGrad no_grad;
    AdamWUpdate* update = context.mode == EAGER ? adamw_eager : adamw_update;
    update(model.weights, flat_gradients(model), model.m, model.v,
           scalars_of(a, ++model.step, gradient_scale));
}

// -------------------------------------------------------------------------------------------------
// A training step: forward_backward, then optimizer_step.

// Returns B sequences of T random tokens, and random targets. Equal seeds give equal ones.
Batch random_batch(int B, int T, int V, uint64_t seed) {
    auto random = [&](const char* name) {
        if (context.device == META) { return empty({B, T}, I32, INPUTS); }
        vector<int> x((size_t)B * T);
        for (size_t i = 0; i < x.size(); i++) { x[i] = random_int(V, seed, key_of(name), i); }
        return from_ints(x, {B, T});
    };
    return {random("tokens"), random("targets")};
}
void backward_from_loss(const Model& model, const Tensor& loss, float loss_scale) {
    Range range("backward");
    backward(loss, loss_scale);
    // No 16-bit copy of a weight may serve the next step: AdamW changes the weight, and in mode
    // eager the copy's cast has left the tape.
    drop_weight_copies(model.slots);
}
// Does what forward_backward does, but without CUDA graphs, and adds to the gradients that are
// there.
static Tensor forward_backward_add(Model& model, const Batch& batch, float loss_scale,
                                   const Job& between) {
    Tensor loss = forward_to_loss(model, batch);
    between();
    backward_from_loss(model, loss, loss_scale);
    return detached(loss);
}
static bool by_graphs(const Model& model) {
    return fast_ways.graphs_take && fast_ways.graphs_take(model);
}

Tensor forward_backward(Model& model, const Batch& batch, float loss_scale, const Job& between) {
    if (by_graphs(model)) { return fast_ways.forward_backward(model, batch, loss_scale, between); }
    zero_gradients(model);
    return forward_backward_add(model, batch, loss_scale, between);
}
Tensor infer(Model& model, const Tensor& tokens) {
    NoGrad no_grad;
    Tensor logits = by_graphs(model) ? fast_ways.infer(model, tokens) : forward(model, tokens);
    drop_weight_copies(model.slots);
    return logits;
}

// Calls `step` with the factor by which it has to multiply the gradients: 1 / loss scale, times
// what clips their norm to max_norm. Does not call it where that norm is known and not finite:
// weights would become NaN. Returns the norm without the loss scale, or 0 if nobody asks for it.
double guarded_step(LossScaler& scaler, double max_norm,
                    const function<double()>& norm_of_gradients,
                    const function<void(float gradient_scale)>& step) {
    bool fp16 = context.precision == PREC_FP16;
    double scale = 1 / loss_scale_of(scaler), norm = 0;
    if (fp16 || max_norm > 0) { norm = norm_of_gradients() * scale; }

    if (fp16) { update_scale(scaler, !isfinite(norm)); }
    if (!isfinite(norm)) { return norm; }

    if (max_norm > 0 && norm > max_norm) { scale *= max_norm / (norm + 1e-6); }
    step((float)scale);
    return norm;
}
double optimizer_step(Model& model, const AdamW& adamw, LossScaler& scaler, double max_norm) {
    make_optimizer_state(model);
    return guarded_step(
        scaler, max_norm, [&] { return gradient_norm(model); },
        [&](float gradient_scale) { adamw_step(model, adamw, gradient_scale); });
}

// Runs what a phase is: forward alone, with backward, or with the optimizer's step, too. Calls
// `between` where one of its parts is done and another follows.
void run_phase(Phase phase, Model& model, const Batch& batch, LossScaler& scaler,
               const function<void(Phase done)>& between) {
    if (phase == FORWARD) {
        infer(model, batch.tokens);
        return;
    }
    // The moments are made before forward, so that the first step's peak is every step's.
    if (phase == STEP) { make_optimizer_state(model); }
    forward_backward(model, batch, loss_scale_of(scaler), [&] { between(FORWARD); });
    if (phase == STEP) {
        between(FORWARD_BACKWARD);
        optimizer_step(model, AdamW(), scaler, 0);
    }
}
// Returns the bytes that a phase holds at most, found by a run on META.
size_t predicted_peak(const ModelConfig& c, int B, int T, Phase phase) {
    return planned_peak([&] {
        Model model = random_model(c, 0);
        LossScaler scaler;
        reset_peak(META);  // what random_model copied on the way is no part of the phase
        run_phase(phase, model, random_batch(B, T, c.vocab_size, 0), scaler);
    });
}

// Takes a step: forward and backward on each of this rank's batches, then the optimizer, and calls
// between them what the ranks that share the step do besides. Leaves when each part began, and the
// loss, the mean over the batches.
void train_step(Trainer& t, const vector<Batch>& batches) {
    t.marks.clear();
    auto begin = [&](StepPart part) { t.marks.push_back({part, mark()}); };
    if (t.before_step) { t.before_step(); }

    vector<Tensor> losses;
    for (const Batch& batch : batches) {
        begin(&StepTimes::forward);
        // Later batches add to the first one's gradients, or, where after_backward has taken these
        // away, as FSDP's does, to nothing.
        auto pass = losses.empty() ? forward_backward : forward_backward_add;
        losses.push_back(pass(t.model, batch, loss_scale_of(t.scaler) / batches.size(),
                              [&] { begin(&StepTimes::backward); }));
        if (t.after_backward) { t.after_backward(); }
    }

    begin(&StepTimes::exposed);
    if (t.before_optimizer) { t.before_optimizer(); }
    begin(&StepTimes::optimizer);
    t.norm = t.step_optimizer ? t.step_optimizer(t)
                              : optimizer_step(t.model, t.adamw, t.scaler, t.max_norm);
    begin(nullptr);
    synchronize();

    t.steps++;
    t.loss = 0;
    if (context.device == META) { return; }
    for (const Tensor& loss : losses) { t.loss += to_doubles(loss)[0] / losses.size(); }
}

// -------------------------------------------------------------------------------------------------
// What experiments share: the settings that the options name, and the times of a model's passes,
// for benchmarking_script (1.1.3), torch_compile (b), benchmarking_mixed_precision (c) and 2026's
// gradient_checkpointing. Each phase is warmed up and timed by itself, by the host's clock,
// launches included. A step waits for the device at its end, and before the last of its parts.

vector<Precision> precisions_of(const Options& o) {
    vector<Precision> precisions;
    for (const string& name : o.precision) { precisions.push_back(precision_from(name)); }
    return precisions;
}

constexpr int MOST_NESTED = 1000;  // 12000 overflow the stack
// Refuses a context.checkpoint that a model of L blocks cannot have.
static void check_checkpoint(int L) {
    const Checkpointing& k = context.checkpoint;
    if (k.n > L) {
        usage_error("--checkpoint: got %s, takes at most the model's %d blocks", name_of(k).c_str(),
                    L);
    }
    if (k.form == Checkpointing::NESTED && L > MOST_NESTED) {
        usage_error(
            "nested checkpoints: at most %d blocks, got %d: each is a call within the one "
            "before",
            MOST_NESTED, L);
    }
}
// Returns the modes of --mode, checked with each model and each precision of --precision. If one of
// these has no flash, a flash that was typed is a usage_error, and the default flash becomes fused.
vector<Mode> modes_of(const Options& o, const ModelConfigs& configs) {
    vector<Mode> modes;
    for (const string& name : o.mode) { modes.push_back(mode_from(name)); }

    for (const ModelConfig& c : configs) {
        check_checkpoint(c.num_layers);
        for (Precision precision : precisions_of(o)) {
            const DType dtype = matmul_dtype(precision);
            const int64_t D = c.d_model / c.num_heads;
            for (Mode& mode : modes) {
                if (mode != FLASH) { continue; }
                if (o.has("mode")) {
                    require_flash(context.device, dtype, D);
                } else if (!fastest_flash(context.device, dtype, D)) {
                    mode = FUSED;
                }
            }
        }
    }
    return modes;
}

string caption_of(Mode mode) {
    string caption = name_of(mode);
    if (context.recompute) { caption += ", recompute"; }
    if (context.checkpoint) { caption += ", checkpoint " + name_of(context.checkpoint); }
    if (context.head_chunk) { caption += ", head chunk " + to_string(context.head_chunk); }
    return caption;
}
const char* name_of(Phase phase) {
    static const char* const names[] = {"forward", "forward+backward", "step"};
    return names[phase];
}
string row_of(const ModelConfig& c, int B, int T, Phase phase) {
    return strprintf("%s, batch %d, context length %d, %s, %s %s", c.name.c_str(), B, T,
                     name_of(phase), name_of(context.precision), caption_of(context.mode).c_str());
}

// A pass is what a table times: a phase, or the last part of one, which is timed within it.
enum Pass { FW = FORWARD, FWBW = FORWARD_BACKWARD, WHOLE_STEP = STEP, BW_ONLY, OPT_ONLY, PASSES };
static const char* const pass_names[] = {
    "forward", "forward+backward", "forward+backward+optimizer", "backward", "optimizer step"};

struct PassRun {
    size_t predicted = 0, peak = 0;  // bytes
    Stats ms{};                      // of no step (n is 0) if it did not fit
    vector<double> all{};            // ms of each step, the warm-up's too
    bool ran() const { return ms.n > 0; }
};
struct StepRun {
    ModelConfig config;
    Precision precision;
    Mode mode;
    PassRun pass[PASSES] = {};
};
// Returns r with the times of the n steps that follow the first `warmup`.
static StepRun after_warmup(StepRun r, int warmup, int n) {
    for (PassRun& p : r.pass) {
        if (!p.all.empty()) { p.ms = stats_of({&p.all[warmup], &p.all[warmup] + n}); }
    }
    return r;
}

struct Setting {  // the runs in one precision and mode; name: what a table calls these two
    string name;
    vector<StepRun> runs;  // by size
};

struct Sweep {  // what a command runs at one context length
    Options o;
    ModelConfigs configs;
    vector<Precision> precisions;
    vector<Mode> modes;

    // Returns a table's caption: `what`, and the settings that all runs of the sweep share.
    string caption(const string& what) const {
        set<string> vocabularies;
        for (const ModelConfig& c : configs) { vocabularies.insert(to_string(c.vocab_size)); }
        return strprintf("%s; batch %d, context length: %d, vocabulary %s, warmup %d, steps %d",
                         what.c_str(), o.batch_size, o.context_length,
                         join({vocabularies.begin(), vocabularies.end()}, ",").c_str(),
                         o.warmup.back(), o.steps);
    }
};
// Chooses the device, and returns a sweep for each context length.
static vector<Sweep> sweeps_of(Options o) {
    choose_device(o.device);
    sort(o.warmup.begin(), o.warmup.end());
    Sweep s{o, configs_of(o), precisions_of(o), {}};
    s.modes = modes_of(o, s.configs);

    vector<Sweep> sweeps;
    for (int T : o.context_lengths) {
        s.o.context_length = T;
        sweeps.push_back(s);
    }
    return sweeps;
}

// Runs a phase and returns the ms of its last part: forward, backward or the optimizer. run_phase
// calls between(FORWARD) before backward and between(FORWARD_BACKWARD) before the optimizer. Only
// the last call, done == phase - 1, starts the clock anew.
static double last_part_ms(Phase phase, Model& model, const Batch& batch, LossScaler& scaler) {
    double begin = now_ms();
    run_phase(phase, model, batch, scaler, [&](Phase done) {
        if (done + 1 < phase) { return; }
        synchronize();  // else what is left of the parts before would count to the last
        begin = now_ms();
    });
    synchronize();
    return now_ms() - begin;
}
static bool something_ran = false;  // true once measure_model has timed a phase

// Times phases of a model in context's precision and mode. Stores each phase's times and peak, and
// of a last part, backward or AdamW, the times alone (BW_ONLY, OPT_ONLY).
static StepRun measure_model(const ModelConfig& c, const Options& o, const vector<Phase>& phases) {
    StepRun r{c, context.precision, context.mode};
    const int B = o.batch_size, T = o.context_length;
    for (Phase phase : phases) {
        PassRun run{predicted_peak(c, B, T, phase)};
        PassRun last = run;  // of the phase's last part, which needs the whole phase's memory
        auto measure = [&] {
            // A new model for each phase: what the phase before keeps would take this one's room.
            Model model = random_model(c, o.seed);
            const Batch batch = random_batch(B, T, c.vocab_size, o.seed);
            reset_peak(context.device);
            LossScaler scaler{1024};  // at the default fp16's first steps overflow, and skip AdamW
            run.all = time_ms(0, o.warmup.back() + o.steps, [&] {
                last.all.push_back(last_part_ms(phase, model, batch, scaler));
            });
            run.peak = memory_use(context.device).peak;
        };
        const bool oom = run_if_fits(row_of(c, B, T, phase), run.predicted, measure);
        if (oom) { last.all.clear(); }  // the steps before memory ran out; run.all is still empty
        something_ran |= !oom;

        r.pass[phase] = run;
        if (phase != FORWARD) { r.pass[phase == STEP ? OPT_ONLY : BW_ONLY] = last; }
    }
    return after_warmup(r, o.warmup.back(), o.steps);
}
// Returns measure_model's runs of each size of a sweep.
static vector<StepRun> measure_sizes(const Sweep& s, Precision precision, Mode mode,
                                     const vector<Phase>& phases = {FORWARD, FORWARD_BACKWARD,
                                                                    STEP}) {
    context.precision = precision;
    context.mode = mode;
    vector<StepRun> runs;
    for (const ModelConfig& c : s.configs) { runs.push_back(measure_model(c, s.o, phases)); }
    return runs;
}
static void require_a_run() {
    if (!something_ran) { fail("nothing fits into the memory that is available"); }
}

static string mean_cell(const PassRun& run, const char* format = "%.2f", double factor = 1) {
    return run.ran() ? strprintf(format, run.ms.mean * factor) : oom_cell(run.predicted);
}
// Adds the cells of a pass, mean and deviation, to the last row of a table.
static void add_pass(Table& table, const PassRun& run) {
    table.rows.back().push_back(mean_cell(run));
    table.rows.back().push_back(deviation(run.ms, "%.2f"));
}
static Table times_table(const string& caption, vector<string> columns) {
    columns.insert(columns.end(), {"fw_mean_ms", "fw_std_ms", "bw_only_mean_ms", "bw_only_std_ms",
                                   "fwbw_mean_ms", "fwbw_std_ms"});
    return {caption, columns};
}
// Adds the cells of a times_table to its last row.
static void add_times(Table& table, const StepRun& r) {
    for (Pass pass : {FW, BW_ONLY, FWBW}) { add_pass(table, r.pass[pass]); }
}
// Returns a sentence that names the sizes in which a pass did not fit, or "" if it always did. in:
// words behind "Out of memory".
static string out_of_memory(const vector<StepRun>& runs, Pass pass, const string& in = "") {
    vector<string> sizes;
    for (const StepRun& r : runs) {
        if (!r.pass[pass].ran()) { sizes.push_back(r.config.name); }
    }
    if (sizes.empty()) { return ""; }
    return " Out of memory" + in + ": " + pass_names[pass] + " of " + list_of(sizes) + ".";
}

// -------------------------------------------------------------------------------------------------
// benchmarking_script (1.1.3): (b) the times; (c) the first setting's runs, counted after fewer
// warm-up steps.

constexpr double SMALL_DEVIATION = 0.05;  // of the mean; two texts below say 5 %

// Answers (b): how long each part of a step takes in the largest size where it ran, where it did
// not fit, and how large the standard deviation is.
static void answer_step_times(const vector<StepRun>& runs) {
    vector<string> times;
    string oom;
    for (Pass pass : {FW, BW_ONLY, OPT_ONLY}) {
        const StepRun* largest = nullptr;
        for (const StepRun& r : runs) {
            if (r.pass[pass].ran()) { largest = &r; }
        }
        if (largest) {
            times.push_back(strprintf("%.2f ms for %s of %s", largest->pass[pass].ms.mean,
                                      pass_names[pass], largest->config.name.c_str()));
        }
        oom += out_of_memory(runs, pass);
    }
    answer("b", "In %s, mode %s, the largest that ran takes %s.%s", name_of(runs[0].precision),
           caption_of(runs[0].mode).c_str(), list_of(times).c_str(), oom.c_str());

    double most = 0;  // standard deviation over mean
    string of;
    for (const StepRun& r : runs) {
        for (int pass = 0; pass < PASSES; pass++) {
            const Stats& ms = r.pass[pass].ms;
            if (ms.n == 0 || ms.std <= most * ms.mean) { continue; }
            most = ms.std / ms.mean;
            of = pass_names[pass] + (" of " + r.config.name);
        }
    }
    if (most > 0) {  // a single step has none
        answer("b", "The standard deviation is %s %.1f %% of the mean (%s).",
               most <= SMALL_DEVIATION ? "small: at most" : "above 5 % in places: up to",
               100 * most, of.c_str());
    }
}
// Prints a setting's mean times and deviations, with the handout's sizes, and answers (b).
static void print_pass_times(const Setting& setting, const Sweep& s) {
    Table table = times_table(s.caption("benchmarking_script; " + setting.name),
                              {"size", "d_model", "d_ff", "num_layers", "num_heads"});
    for (const StepRun& r : setting.runs) {
        const ModelConfig& c = r.config;
        table.row(c.name, c.d_model, c.d_ff, c.num_layers, c.num_heads);
        add_times(table, r);
    }
    print(table);
    if (setting.runs[0].pass[FW].ran()) { answer_step_times(setting.runs); }
}
// Prints forward, and forward with backward, in seconds: the form of a public write-up's table.
static void print_seconds(const Setting& first, const Sweep& s) {
    Table table{s.caption("benchmarking_script, in seconds; " + first.name),
                {"", "model", "mean", "std"}};
    for (const StepRun& r : first.runs) {
        for (Pass pass : {FWBW, FW}) {
            const Stats& ms = r.pass[pass].ms;
            table.row(table.rows.size(),
                      r.config.name + (pass == FW ? " (forward only)" : " (forward, backward)"),
                      mean_cell(r.pass[pass], "%.6g", 1e-3),
                      ms.n > 1 ? strprintf("%.6g", ms.std / 1e3) : "");
        }
    }
    print(table);
}
// Prints the optimizer's and the whole step's times of all settings, with the peak that was seen.
static void print_whole_steps(const vector<Setting>& settings, const Sweep& s) {
    Table table{s.caption("benchmarking_script: whole steps, with AdamW"),
                {"size", "precision", "mode", "opt_mean_ms", "opt_std_ms", "step_mean_ms",
                 "step_std_ms", "peak step MiB"}};
    for (const Setting& setting : settings) {
        for (const StepRun& r : setting.runs) {
            const PassRun& step = r.pass[WHOLE_STEP];
            table.row(r.config.name, r.precision, r.mode);
            add_pass(table, r.pass[OPT_ONLY]);
            add_pass(table, step);
            table.rows.back().push_back(step.ran() ? strprintf("%.0f", mib_of(step.peak)) : "");
        }
    }
    print(table);
}

// Answers (c): counts one run after the most warm-up steps (warm) and after each smaller number,
// and compares the means of `steps` steps each. A slow first step raises mean and deviation alike,
// so noise is the warm run's deviation, or 5 % of its mean if that is more.
static void answer_warmup(const StepRun& run, const vector<int>& warmup, int steps) {
    bool first_is_slow = false;
    for (Pass pass : {FW, BW_ONLY}) {
        const PassRun& warm = run.pass[pass];
        if (!warm.ran()) { continue; }
        const double noise = max(warm.ms.std, SMALL_DEVIATION * warm.ms.mean);

        vector<string> verdicts;
        for (size_t i = 0; i + 1 < warmup.size(); i++) {
            const double mean = after_warmup(run, warmup[i], steps).pass[pass].ms.mean;
            const double difference = mean - warm.ms.mean;
            if (fabs(difference) <= noise) {
                verdicts.push_back(strprintf("level with %d within %.3g %%", warmup[i],
                                             100 * noise / warm.ms.mean));
                continue;
            }
            string verdict =
                strprintf("%.2f times as long with %d", mean / warm.ms.mean, warmup[i]);
            if (difference > 0) {  // by a step that only this mean counts
                const auto slowest =
                    std::max_element(warm.all.begin() + warmup[i],
                                     warm.all.begin() + min(warmup[i] + steps, warmup.back()));
                const int step = (int)(slowest - warm.all.begin()) + 1;
                if (step == 1) { first_is_slow = true; }
                verdict += strprintf(" (step %d: %.2f ms)", step, *slowest);
            }
            verdicts.push_back(verdict);
        }
        answer("c", "Against %s, %s of %s is %s.", counted(warmup.back(), "warm-up step").c_str(),
               pass_names[pass], run.config.name.c_str(), list_of(verdicts).c_str());
    }

    if (!first_is_slow) { return; }
    const bool captures = fast_ways.graphs_take && run.mode == FLASH && context.device == CUDA;
    answer("c", "A first step also %s%s, which can raise the mean.",
           context.device == CUDA
               ? "loads the kernels' code, creates the cuBLAS handle and grows the memory pool"
               : "touches its memory for the first time",
           captures ? "; a second may capture CUDA graphs" : "");
}
// Prints the first setting's times as they are counted after fewer warm-up steps, and answers (c).
static void print_warmups(const Setting& first, const Sweep& s) {
    Table table = times_table(
        "benchmarking_script (c); " + first.name + "; the same runs, counted after fewer steps; " +
            "only " + first.runs[0].config.name +
            " began in a cold process (any other size: --size NAME --warmup 0); level: within a "
            "deviation, or 5 %",
        {"size", "warmup"});
    for (const StepRun& r : first.runs) {
        for (int warmup : s.o.warmup) {
            table.row(r.config.name, warmup);
            add_times(table, after_warmup(r, warmup, s.o.steps));
        }
    }
    print(table);
    answer_warmup(first.runs[0], s.o.warmup, s.o.steps);
}

// Prints the tables of times, one for each context length, precision and mode, and the answers.
int cmd_benchmarking_script(const Options& asked) {
    for (const Sweep& s : sweeps_of(asked)) {
        vector<Setting> settings;
        for (Precision precision : s.precisions) {
            for (Mode mode : s.modes) {
                const string name = strprintf("precision %s, mode %s", name_of(precision),
                                              caption_of(mode).c_str());
                settings.push_back({name, measure_sizes(s, precision, mode)});
                print_pass_times(settings.back(), s);
            }
        }
        print_whole_steps(settings, s);
        print_seconds(settings[0], s);
        // Only the first length began in a cold process.
        if (s.o.warmup.size() > 1 && s.o.context_length == asked.context_length) {
            print_warmups(settings[0], s);
        }
    }
    require_a_run();
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Settings side by side: torch_compile (1.3) (b) has the whole model in mode eager (vanilla) and in
// mode fused (compiled, here by hand); benchmarking_mixed_precision (1.1.5) (c) has precisions.

// Says how fast a pass is in `ours`, beside `theirs`, for the first and the last size that ran in
// both.
static string relative_speed(const Setting& ours, const Setting& theirs, Pass pass) {
    vector<string> verdicts;
    for (size_t i = 0; i < ours.runs.size(); i++) {
        const Stats &a = ours.runs[i].pass[pass].ms, &b = theirs.runs[i].pass[pass].ms;
        if (a.n == 0 || b.n == 0) { continue; }
        string verdict = level(a, b);
        if (verdict == "") { verdict = strprintf("%.2f times as fast", b.mean / a.mean); }
        verdicts.push_back(verdict + " for " + ours.runs[i].config.name);
    }
    if (verdicts.empty()) { return "unknown: no size ran in both"; }
    if (verdicts.size() == 1) { return verdicts[0]; }
    return verdicts[0] + " and " + verdicts.back();
}
// Returns a table of the mean times: a row for each size and pass, a column for each setting, and
// the speed-up of each but the first over the first.
static Table settings_table(const string& caption, const vector<Setting>& settings,
                            const vector<Pass>& passes) {
    const Setting& first = settings[0];
    Table table{caption, {"size", "run_type", first.name + " (ms)"}};
    for (size_t k = 1; k < settings.size(); k++) {
        const string& name = settings[k].name;
        table.columns.push_back(name + " (ms)");
        table.columns.push_back(settings.size() > 2 ? name + " speedup" : "speedup");
    }

    for (size_t i = 0; i < first.runs.size(); i++) {
        for (Pass pass : passes) {
            const PassRun& theirs = first.runs[i].pass[pass];
            table.row(first.runs[i].config.name, pass_names[pass], mean_cell(theirs));
            vector<string>& row = table.rows.back();
            for (size_t k = 1; k < settings.size(); k++) {
                const PassRun& ours = settings[k].runs[i].pass[pass];
                const bool both = ours.ran() && theirs.ran();
                row.push_back(mean_cell(ours));
                row.push_back(both ? strprintf("%.2fx", theirs.ms.mean / ours.ms.mean) : "");
            }
        }
    }
    return table;
}
// Prints the table, and an answer for each setting but the first, about the first and the last of
// the passes.
static void compare_settings(const string& caption, const char* part,
                             const vector<Setting>& settings, const vector<Pass>& passes) {
    print(settings_table(caption, settings, passes));
    const Setting& first = settings[0];
    for (size_t k = 1; k < settings.size(); k++) {
        const Setting& other = settings[k];
        string oom;
        for (const Setting& s : {first, other}) {
            oom += out_of_memory(s.runs, passes.back(), " in " + s.name);
        }
        answer(part, "Compared with %s, %s %s is %s. Its %s is %s.%s", first.name.c_str(),
               other.name.c_str(), pass_names[passes.front()],
               relative_speed(other, first, passes.front()).c_str(), pass_names[passes.back()],
               relative_speed(other, first, passes.back()).c_str(), oom.c_str());
    }
}

// Prints (a), which is attention's and stands in attention.cu, then (b) for each context length and
// precision.
int cmd_torch_compile(const Options& asked) {
    const vector<Sweep> sweeps = sweeps_of(asked);  // which chooses the device
    torch_compile_attention(asked);

    for (const Sweep& s : sweeps) {
        for (Precision precision : s.precisions) {
            const string caption =
                "torch_compile (b): whole model; vanilla = eager, compiled = fused by hand, AdamW, "
                "too; precision ";
            compare_settings(s.caption(caption + name_of(precision)), "b",
                             {{"vanilla", measure_sizes(s, precision, EAGER)},
                              {"compiled", measure_sizes(s, precision, FUSED)}},
                             {FW, FWBW, WHOLE_STEP});
        }
    }
    require_a_run();
    return 0;
}

// Says in which settings gradients differ from PyTorch's: see gradient_target in lib/tensor.cu.
static void answer_gradients(const vector<Setting>& settings) {
    for (const Setting& setting : settings) {
        const StepRun& r = setting.runs[0];
        const bool autocast = r.precision == PREC_BF16 || r.precision == PREC_FP16;
        if (!autocast || r.mode == EAGER || !r.pass[BW_ONLY].ran()) { continue; }
        answer("c",
               "In mode %s under %s the gradients of the products' weights are in 16 bits, where "
               "PyTorch's autocast has fp32.",
               name_of(r.mode), name_of(r.precision));
    }
}
// Prints (a) and (b), which stand in precision.cu, then (c): each mode's times in all precisions.
int cmd_benchmarking_mixed_precision(const Options& asked) {
    const vector<Sweep> sweeps = sweeps_of(asked);
    print_toy_models();

    for (const Sweep& s : sweeps) {
        for (Mode mode : s.modes) {
            vector<Setting> settings;
            for (Precision precision : s.precisions) {
                // On a CPU tf32 is fp32, so it runs only as the first setting.
                if (precision == TF32 && context.device == CPU && !settings.empty()) { continue; }
                settings.push_back(
                    {name_of(precision),
                     measure_sizes(s, precision, mode, {FORWARD, FORWARD_BACKWARD})});
            }
            compare_settings(
                s.caption(string("benchmarking_mixed_precision (c); mode ") + name_of(mode)), "c",
                settings, {FW, BW_ONLY});
            answer_gradients(settings);
        }
    }
    require_a_run();

    if (context.device == CPU) {
        answer("c",
               "On a CPU low precision saves no arithmetic: tf32 is fp32, and 16-bit products run "
               "in fp32.");
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Gradient checkpointing (2026, 3.2.1): what backward runs again instead of keeping it. lib/lib.h
// has its forms. What two of them cost in a model of L blocks; an input is a block's x, [B,T,C]:
//
//   Checkpointing    hold at most                                                blocks run again
//   GROUPS of n      L/n inputs, and all that one group of n blocks keeps        L
//   NESTED           2 inputs, and all that one block keeps                      L (L - 1) / 2

// Runs blocks [first, end) on x; returns what the last of them gives.
static Tensor run_blocks(const Model& model, const Tensor& x_in, int first, int end) {
    Residual x{x_in, model.config.eps};
    for (int l = first; l < end; l++) { run_unit(model, l, x); }
    return add(x.sum, x.delta);
}
// Runs blocks [0, end), `size` of them per checkpoint (lib/tensor.cu); returns the last one's x.
static Tensor run_in_groups(const Model& model, Tensor x, int end, int size) {
    for (int first = 0; first < end; first += size) {
        const int past = min(first + size, end);
        auto group = [&model, first, past](const Tensor& x) {
            return run_blocks(model, x, first, past);
        };
        x = checkpoint(keeping(group), x);  // keeping(f) gives what f gives: see fast_ways.h
    }
    return x;
}
// Runs blocks [0, end). All but the last are one checkpoint, which backward runs again in this same
// way; returns what the last one gives.
static Tensor run_nested(const Model& model, Tensor x, int end) {
    if (end > 1) {
        auto before = [&model, end](const Tensor& x) { return run_nested(model, x, end - 1); };
        x = checkpoint(before, x);
    }
    return run_blocks(model, x, end - 1, end);
}
// Runs the blocks that context.checkpoint puts into checkpoints, the first ones, and leaves in *x
// what the last of them gives. Returns how many they are.
static int run_checkpointed_blocks(const Model& model, Tensor* x) {
    const Checkpointing& k = context.checkpoint;
    const int L = model.config.num_layers;
    if (k.form == Checkpointing::NESTED) {
        *x = run_nested(model, *x, L);
        return L;
    }
    int end = 0, size = 1;
    if (k.form == Checkpointing::GROUPS) {
        end = L;
        size = k.n;
    } else if (k.form == Checkpointing::BLOCKS) {
        end = k.n;
    }
    *x = run_in_groups(model, *x, end, size);
    return end;
}

// Gives the same as feed_forward. Backward runs it again, but for the last product, whose result
// nobody reads then.
static Tensor feed_forward_again(const Layer& layer, const Tensor& n) {
    Range ffn("ffn");
    auto gated = [&layer](const Tensor& n) { return swiglu(layer, n); };
    return checkpoint_linear(keeping(gated), n, layer.w2);
}
// Returns block l's feed-forward. Backward runs again: in form FFN those of the first n blocks, in
// form BLOCKS those of all others, since there the first n blocks run again as a whole.
static FeedForward* feed_forward_of(int l) {
    const Checkpointing& k = context.checkpoint;
    const bool again =
        (k.form == Checkpointing::FFN && l < k.n) || (k.form == Checkpointing::BLOCKS && l >= k.n);
    return again ? feed_forward_again : feed_forward;
}

string name_of(const Checkpointing& k) {
    static const char* const by_form[] = {"none", "%d", "nested", "ffn:%d", "blocks:%d"};
    if (k.form == Checkpointing::BLOCKS && k.n == 0) { return "ffn"; }  // of all blocks
    return strprintf(by_form[k.form], k.n);
}
// Returns the checkpointing that name_of calls `name`. It tries every form, with the first number
// of the name, and compares whole names: this refuses 0, 007, 3x and all else without a parser.
Checkpointing checkpointing_from(const string& name) {
    const size_t digits = name.find_first_of("0123456789");
    const int n = digits == string::npos ? 1 : max(1, atoi(&name[digits]));
    for (const Checkpointing& k : {Checkpointing{},
                                   {Checkpointing::NESTED},
                                   {Checkpointing::BLOCKS, 0},
                                   {Checkpointing::GROUPS, n},
                                   {Checkpointing::FFN, n},
                                   {Checkpointing::BLOCKS, n}}) {
        if (name_of(k) == name) { return k; }
    }
    usage_error(
        "--checkpoint: got %s, takes a whole number from 1 on, nested, ffn, ffn:N, blocks:N or "
        "none",
        name.c_str());
}

// -------------------------------------------------------------------------------------------------
// gradient_checkpointing (2026, 3.2.1): (a) the strategy that holds least, found on META; (b)
// without nesting, how many blocks make the best checkpoint.

struct CheckpointRun {
    Checkpointing checkpoint;
    size_t beside;  // peak_beside_gradients
    PassRun step;
};
// Returns the bytes that forward and backward hold at most beside weights and gradients, found on
// META, in context's precision, mode and checkpoint.
static size_t peak_beside_gradients(const ModelConfig& c, int B, int T) {
    size_t held = 0;
    const size_t peak = planned_peak([&] {
        Model model = random_model(c, 0);
        make_gradients(model);
        const Batch batch = random_batch(B, T, c.vocab_size, 0);
        held = memory_use(META).now;
        forward_backward(model, batch, 1);
    });
    return peak - held;
}
// Times whole steps with 1, 2, 4 and 8 blocks per checkpoint, as far as the model has so many, and,
// as the last run, without checkpoints.
static vector<CheckpointRun> run_checkpoints(const ModelConfig& c, const Options& o) {
    RestoreContext restore;
    vector<CheckpointRun> runs;
    for (const char* name : {"1", "2", "4", "8", "none"}) {
        context.checkpoint = checkpointing_from(name);
        if (context.checkpoint.n > c.num_layers) { continue; }
        runs.push_back({context.checkpoint,
                        peak_beside_gradients(c, o.batch_size, o.context_length),
                        measure_model(c, o, {STEP}).pass[WHOLE_STEP]});
    }
    return runs;
}

// Answers (a) by predictions, since nesting runs so many of the N blocks again.
static void answer_strategy(const vector<CheckpointRun>& runs, const CheckpointRun& nested, int N) {
    const CheckpointRun &block = runs.front(), &without = runs.back();
    answer("a",
           "Beside weights and gradients linear nesting %s: %.1f MiB, against %.1f with a "
           "checkpoint per block and %.1f without. Of the blocks it holds two inputs at most and "
           "one's residuals, O(1) activations, and runs N (N - 1) / 2 = %d again, O(N^2) compute.",
           nested.beside < min(block.beside, without.beside) ? "holds less"
                                                             : "does not hold less than both",
           mib_of(nested.beside), mib_of(block.beside), mib_of(without.beside), N * (N - 1) / 2);

    answer("a",
           "A whole step is predicted to peak at %.1f MiB "
           "with nesting, and at %.1f with a checkpoint per block.",
           mib_of(nested.step.predicted), mib_of(block.step.predicted));

    sketch(R"(def run(blocks, x):
    if len(blocks) > 1:
        x = checkpoint(run, blocks[:-1], x)  # keeps x, runs again in backward
    return blocks[-1](x)
)");
}
// Answers (b): with which checkpoints, or none, a step's measured peak is least. Peaks within 0.1 %
// count as equal.
static void answer_sizes(const vector<CheckpointRun>& runs, const string& model) {
    const CheckpointRun* best = nullptr;
    for (const CheckpointRun& r : runs) {
        if (r.step.ran() && (!best || r.step.peak < best->step.peak)) { best = &r; }
    }
    if (!best) { return; }

    vector<string> least, others;
    for (const CheckpointRun& r : runs) {
        const string size =
            r.checkpoint ? "checkpoints of " + counted(r.checkpoint.n, "block") : "no checkpoints";
        if (r.step.ran() && r.step.peak < 1.001 * best->step.peak) {
            least.push_back(size);
        } else {
            others.push_back(strprintf("%.1f%s with %s",
                                       mib_of(r.step.ran() ? r.step.peak : r.step.predicted),
                                       r.step.ran() ? "" : " (out of memory)", size.c_str()));
        }
    }
    answer("b", "In %s a step's peak is least with %s: %.1f MiB%s.", model.c_str(),
           list_of(least).c_str(), mib_of(best->step.peak),
           least.size() > 1 ? " (within 0.1 %)" : "");
    if (!others.empty()) { answer("b", "Else the peak in MiB is %s.", list_of(others).c_str()); }
}

// Runs one size: nesting on META alone, groups of blocks as real steps. Prints their table and the
// answers.
int cmd_gradient_checkpointing(const Options& asked) {
    context.checkpoint = {Checkpointing::NESTED};  // so that sweeps_of refuses too many blocks
    const Sweep s = sweeps_of(asked)[0];
    const ModelConfig& c = s.configs[0];
    const int B = s.o.batch_size, T = s.o.context_length;
    context.precision = s.precisions[0];
    context.mode = s.modes[0];

    const CheckpointRun nested{
        context.checkpoint, peak_beside_gradients(c, B, T), {predicted_peak(c, B, T, STEP)}};
    const vector<CheckpointRun> runs = run_checkpoints(c, s.o);

    Table table{s.caption(strprintf(
                    "gradient_checkpointing: %s, blocks N = %d, precision %s, mode %s; beside: "
                    "held beside weights and gradients, predicted; step: with AdamW",
                    c.name.c_str(), c.num_layers, name_of(context.precision),
                    name_of(context.mode))),
                {"blocks per checkpoint", "beside MiB", "predicted step MiB", "peak step MiB",
                 "step_mean_ms"}};
    for (const auto& [checkpoint, beside, step] : runs) {
        table.row(name_of(checkpoint), mib_cell(beside), mib_cell(step.predicted),
                  step.ran() ? mib_cell(step.peak) : "", mean_cell(step));
    }
    table.row("nested", mib_cell(nested.beside), mib_cell(nested.step.predicted), "", "");
    print(table);

    answer_strategy(runs, nested, c.num_layers);
    answer_sizes(runs, c.name);
    require_a_run();
    return 0;
}
