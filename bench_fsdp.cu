// bench_fsdp.cu: the 2026 handout's problems on FSDP. `fsdp` checks it, `fsdp_accounting` measures its memory and time.
#include "cs336.h"

// ---------------------------------------------------------------------------------------------------------------------
// fsdp: N ranks against one process that sees the whole batch. The models are the public test's, Embedding - RMSNorm -
// Linear - ReLU - RMSNorm - Linear - Linear, and a Transformer. Weights are equal but for rounding: the sum over the
// batch is taken in another order.

constexpr int ROWS = 10, POSITIONS = 8, VOCABULARY = 100, STEPS = 3;  // rows: of each rank

static Model lay_out_toy() {
    Model toy;
    toy.parameters = {{"head", {VOCABULARY, 64}, 0, {}, 3},
                      {"fc2", {64, 128}, 0, {}, 2},
                      {"norm2", {128}, 0, {}},
                      {"fc1", {128, 64}, 0, {}, 1},
                      {"norm1", {64}, 0, {}},
                      {"token_embeddings.weight", {VOCABULARY, 64}, 0, {}, 0}};
    int64_t end = 0;
    for (Parameter& p : toy.parameters) { p.offset = end, end += count(p.shape); }
    return toy;
}
static Tensor toy_logits(const Model& toy, const Tensor& tokens) {
    auto weight = [&](int i) { return toy.parameters[i].weight; };
    auto product = [&](int unit, const Tensor& x, int i) {
        begin_unit(toy, unit);
        return end_unit(toy, unit, linear(x, weight(i)));
    };
    begin_unit(toy, 0);
    Tensor x = end_unit(toy, 0, gather_rows(weight(5), tokens));
    x = cast(relu(product(1, add_rmsnorm(&x, Tensor(), weight(4), 1e-5f), 3)), F32);  // RMSNorm takes fp32
    x = product(2, add_rmsnorm(&x, Tensor(), weight(2), 1e-5f), 1);
    return product(3, x, 0);
}

struct Case {
    bool toy;
    Precision precision;
    Mode mode;
    int checkpoint, batches;  // batches: of each step, whose gradients add up
};
static Model lay_out(const Case& k) { return k.toy ? lay_out_toy() : lay_out_model({"lm", 64, 96, 3, 4, VOCABULARY}); }
static void place_all(Model& model, const Place& place) {
    if (model.config.name.empty()) {  // the toy
        for (Parameter& p : model.parameters) { p.weight = place(p, p.shape), model.slots.push_back(p.weight); }
        return;
    }
    place_weights(model, place);
}
// In one process: weights and gradients in an arena each.
static Model whole_model(const Case& k, uint64_t seed) {
    Model model = lay_out(k);
    const Parameter& last = model.parameters.back();
    Shape all = {last.offset + count(last.shape)};
    model.weights = zeros(all, F32, PARAMETERS), model.gradients = zeros(all, F32, GRADIENTS);
    place_all(model, [&](const Parameter& p, const Shape& shape) {
        Tensor t = require_gradient(view(model.weights, p.offset, shape));
        t.gradient->is_parameter = true;
        t.gradient->value = view(model.gradients, p.offset, shape);
        return t;
    });
    init_weights(model, seed);
    return model;
}
// The gradients of scale times the mean loss over rows [first, first + rows) of a batch.
static void loss_and_gradients(Model& model, const Batch& batch, int64_t first, int64_t rows, float scale) {
    zero_gradients(model);
    auto part = [&](const Tensor& t) { return view(t, first * POSITIONS, {rows, POSITIONS}); };
    Tensor tokens = part(batch.tokens);
    Tensor logits = model.layers.empty() ? toy_logits(model, tokens) : forward(model, tokens);
    backward(cross_entropy(logits, part(batch.targets)), scale);
    drop_weight_copies(model.slots);
}

struct Result {
    double max = 0, sum = 0;
    int64_t wrong = 0, n = 0;
};
static Result train_both(const Communicator& c, const Case& k, uint64_t seed) {
    context.precision = k.precision, context.mode = k.mode, context.checkpoint = k.checkpoint;
    Model laid_out = lay_out(k);
    auto f = fully_shard(c, laid_out.parameters, matmul_dtype(), F32);
    place_all(laid_out, [&](const Parameter& p, const Shape& shape) { return place(*f, p, shape); });
    add_hooks(laid_out, *f);
    Model ours = std::move(laid_out), whole = whole_model(k, seed);
    visit_whole(*f, f->shard.weights, true, [&](const Parameter& p, const Tensor& w) { init_weight(w, p.name, seed); });
    LossScaler scaler;
    scaler.scale = 1024;  // a power of two: unscaling is exact
    ParameterGroup reference{whole.weights, whole.gradients};
    reference.sgd = f->shard.sgd = k.toy || k.precision != FP32;
    reference.adamw.lr = reference.sgd ? 0.01f : 0.001f;
    reference.adamw.eps = 1e-5f;  // else a gradient that is rounding alone moves its weight by lr, either way
    f->shard.adamw = reference.adamw;
    Optimizer optimizer{c, UNSHARDED, {}};
    add_parameter_group(optimizer, reference);
    float scale = loss_scale_of(scaler);
    Result result;
    for (int step = 0; step < STEPS; step++) {
        begin_step(*f);
        int64_t rows = (int64_t)ROWS * c.world, of_rank = (int64_t)c.rank * ROWS, each = ROWS / k.batches;
        Batch batch = random_batch((int)rows, POSITIONS, VOCABULARY, seed + step);
        for (int b = 0; b < k.batches; b++) {
            loss_and_gradients(ours, batch, of_rank + b * each, each, scale / k.batches);
            finish_backward(*f);
        }
        for (const FsdpUnit& u : f->units) {
            result.wrong += !u.gradient || u.gradient.size() != u.part || u.gradient.dtype != F32;
        }
        optimizer_step(*f, scaler, 0);
        loss_and_gradients(whole, batch, 0, rows, scale);
        scale_in_place(whole.gradients, 1 / scale);
        optimizer_step(optimizer);
        visit_whole(*f, f->shard.weights, false, [&](const Parameter& p, const Tensor& got) {
            std::vector<double> a = to_doubles(got), b = to_doubles(view(whole.weights, p.offset, p.shape));
            double atol = k.precision == FP32 ? 1e-6 : 1e-4;
            for (size_t i = 0; i < a.size(); i++) {
                double difference = std::fabs(a[i] - b[i]);
                result.wrong += !(difference <= atol + 1e-4 * std::fabs(b[i]));  // NaN is wrong
                result.max = difference > result.max || std::isnan(difference) ? difference : result.max;
                result.sum += difference, result.n++;
            }
        });
    }
    return result;
}

int cmd_fsdp(const Options& o) {
    return run_ranks(o, [&](const Communicator& c) {
        Table table{strprintf("fsdp: weights of FSDP against single-process training after each of %d steps; World "
                              "size: %d, Batch size: %d, context length: %d; backend %s; %s; commit %s",
                              STEPS, c.world, ROWS * c.world, POSITIONS, c.backend.c_str(),
                              device_description().c_str(), commit().c_str()),
                    {"Model", "Optimizer", "precision", "mode", "checkpoint", "backwards per step", "repetitions",
                     "max diff", "mean diff", "Parameters"},
                    {}};
        std::vector<Case> cases = {{true, FP32, FUSED, 0, 1}, {true, PREC_FP16, FUSED, 0, 1}};
        for (Precision precision : {FP32, PREC_BF16, PREC_FP16}) {
            for (Mode mode : {EAGER, FUSED}) { cases.push_back({false, precision, mode, 0, 1}); }
        }
        for (int checkpoint : {1, 2, (int)CHECKPOINT_FFN, (int)CHECKPOINT_HALF, (int)CHECKPOINT_NESTED}) {
            cases.push_back({false, FP32, FUSED, checkpoint, 1});
        }
        cases.push_back({false, FP32, FUSED, 1, 2});
        const int repetitions = o.quick ? 1 : 5;
        bool ok = true;
        for (const Case& k : cases) {
            Result all;
            for (int i = 0; i < repetitions; i++) {
                Result r = train_both(c, k, o.seed + i);
                all.max = std::max(all.max, r.max), all.sum += r.sum, all.n += r.n, all.wrong += r.wrong;
            }
            bool sgd = k.toy || k.precision != FP32;
            table.rows.push_back({k.toy ? "the public test's" : "Transformer, d_model 64, 3 layers",
                                  sgd ? "SGD, lr 0.01" : "AdamW, lr 0.001", name_of(k.precision), name_of(k.mode),
                                  k.checkpoint ? name_of_checkpoint(k.checkpoint) : "none", std::to_string(k.batches),
                                  std::to_string(repetitions), strprintf("%.2e", all.max),
                                  strprintf("%.2e", all.sum / all.n), all.wrong ? "DIFFER" : "match"});
            ok = ok && all.wrong == 0;
        }
        if (c.rank == 0) { print(table, o.format); }
        if (!ok) { fail("FSDP does not give the weights of single-process training"); }
    });
}
