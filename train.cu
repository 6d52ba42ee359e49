// train.cu: two commands beside the problems. `train` trains the model on a text; `model` runs your
// own weights and batch through it.
#include "cs336.h"

#include <random>

// -------------------------------------------------------------------------------------------------
// train: a demo in one process. It trains on a real text, byte by byte, prints the loss of a part
// that it never trained on, and continues that part.

// The least loss scale that is tried, fp16's smallest normal number.
constexpr float LEAST_SCALE = 0x1p-14f;

constexpr int BYTES = 256;  // the vocabulary
using Text = vector<uint8_t>;

// Returns the T bytes from each start on as tokens, and those one further on as targets.
static Batch windows(const Text& text, const vector<size_t>& starts, int T) {
    vector<int> tokens, targets;
    for (size_t start : starts) {
        for (size_t i = start; i < start + T; i++) {
            tokens.push_back(text[i]);
            targets.push_back(text[i + 1]);
        }
    }
    const Shape shape = {(int64_t)starts.size(), T};
    return {from_ints(tokens, shape), from_ints(targets, shape)};
}

// Returns the mean loss of the text's windows, or of at most 100 that lie evenly among them.
static double mean_loss(Model& model, const Text& text, int T) {
    const size_t apart = max<size_t>(T, text.size() / 100 + 1);
    double sum = 0;
    int n = 0;
    for (size_t start = 0; start + T < text.size(); start += apart) {
        const Batch window = windows(text, {start}, T);
        sum += to_doubles(cross_entropy(infer(model, window.tokens), window.targets))[0];
        n++;
    }
    return sum / n;
}

// Returns n bytes that continue the text's first T, each drawn from softmax(logits). Those that do
// not print stand as \xNN.
static string continue_text(Model& model, const Text& text, int T, int n, uint64_t seed) {
    std::mt19937_64 random(seed);
    vector<int> tokens(text.begin(), text.begin() + T);
    string out;
    for (int i = 0; i < n; i++) {
        const Tensor logits = infer(model, from_ints({tokens.end() - T, tokens.end()}, {1, T}));
        const vector<double> weights = to_doubles(exp(sub(logits, max_last(logits))));
        std::discrete_distribution<int> next(weights.end() - BYTES, weights.end());
        const int token = next(random);
        tokens.push_back(token);

        const bool printable = token < 127 && (token >= 32 || token == '\n');
        out += printable ? string(1, (char)token) : strprintf("\\x%02x", token);
    }
    return out;
}

// Trains for o.steps steps on random windows of the text, and adds 20 to 40 of the steps, or all of
// fewer, to `rows`. Returns false, and stops, where the loss or the norm of the gradients is not
// finite. In fp16 such a norm only skips the step and halves the loss scale, until that is below
// the least.
static bool take_steps(Trainer& t, const Text& text, const Options& o, Table& rows) {
    const int T = o.context_length, rows_apart = max(1, o.steps / 20);
    std::mt19937_64 random(o.seed);
    std::uniform_int_distribution<size_t> any_start(0, text.size() - T - 1);
    bool finite = true;
    while (finite && t.steps < o.steps) {
        vector<size_t> starts(o.batch_size);
        for (size_t& start : starts) { start = any_start(random); }
        const Batch batch = windows(text, starts, T);
        const double ms = time_ms(0, 1, [&] { train_step(t, {batch}); })[0];

        const bool may_skip = context.precision == PREC_FP16 && t.scaler.scale >= LEAST_SCALE;
        finite = isfinite(t.loss) && (isfinite(t.norm) || may_skip);
        progress("step %d of %d: loss %.4f", t.steps, o.steps, t.loss);
        const bool is_last = !finite || t.steps == o.steps;
        if (is_last || t.steps % rows_apart == 0 || t.steps == 1) {
            rows.row(t.steps, strprintf("%.7f", t.loss),
                     isfinite(t.norm) || !finite ? strprintf("%.3f", t.norm)
                                                 : "overflow, step skipped",
                     ms, strprintf("%.0f", 1e3 * o.batch_size * T / ms));
        }
    }
    return finite;
}

// Trains on o.data but for its last tenth. Prints a table of steps, the loss of that tenth before
// and after, and a sample that continues it.
int cmd_train(const Options& o) {
    ModelConfig c = configs_of(o)[0];
    c.vocab_size = BYTES;
    const int T = o.context_length;
    ifstream file(o.data, std::ios::binary);
    if (!file) { fail("%s: cannot be read: %s", o.data.c_str(), strerror(errno)); }
    const Text all{std::istreambuf_iterator<char>(file), {}};
    const size_t tenth = all.size() / 10;
    if (tenth <= (size_t)T) {
        fail("%s: %zu bytes are too few: a tenth has to be longer than a context of %d",
             o.data.c_str(), all.size(), T);
    }
    const Text text(all.begin(), all.end() - tenth), held_out(all.end() - tenth, all.end());

    choose_device(o.device);
    context.precision = precisions_of(o)[0];
    context.mode = modes_of(o, {c})[0];

    Trainer t;
    t.max_norm = 1;
    t.adamw.lr = o.lr;
    t.model = random_model(c, o.seed);
    const double before = mean_loss(t.model, held_out, T);

    Table rows{strprintf("train %s: %zu bytes, a tenth held out; d_model %d, d_ff %d, layers: %d, "
                         "heads: %d; batch %d, context length: %d, seed %zu, lr %g; precision %s, "
                         "mode %s; held-out loss before: %.4f",
                         o.data.c_str(), all.size(), c.d_model, c.d_ff, c.num_layers, c.num_heads,
                         o.batch_size, T, o.seed, o.lr, name_of(context.precision),
                         name_of(context.mode), before),
               {"step", "loss", "gradient norm", "ms", "tokens/s"}};
    const bool finite = take_steps(t, text, o, rows);
    print(rows);

    const double after = mean_loss(t.model, held_out, T);
    if (!finite || !isfinite(after)) {
        fail("step %d: a loss or a gradient is not finite; a smaller --lr may help", t.steps);
    }
    answer("",
           "By step %d the held-out loss goes from %.4f to %.4f nats per byte; at most %.1f MiB "
           "are held.",
           t.steps, before, after, mib_of(memory_use(context.device).peak));
    if (o.sample > 0) {
        answer("", "What the model writes after the held-out text's first bytes (%d):", T);
        sketch(continue_text(t.model, held_out, T, o.sample, o.seed) + "\n");
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// model: your weights and batch in, our logits, loss, gradients and (after N AdamW steps)
// parameters out.

// Reads tokens and targets, [B,T] both, of a vocabulary of V.
static Batch read_batch(const string& path, int V) {
    const SafeTensors file = load_safetensors(path);
    require_no_others(file, {"tokens", "targets"}, "tokens or targets");
    const Shape shape = require_tensor(file, "tokens", {-1, -1}, {"I32", "I64"}).shape;
    if (count(shape) == 0) {
        fail("%s: tensor tokens: is empty, %s", path.c_str(), to_string(shape).c_str());
    }

    auto read = [&](const char* name) {
        const Tensor t = tensor_from_file(require_tensor(file, name, shape, {"I32", "I64"}));
        const vector<double> tokens = to_doubles(t);
        for (size_t i = 0; i < tokens.size(); i++) {
            if (tokens[i] >= 0 && tokens[i] < V) { continue; }
            fail("%s: tensor %s: element %zu is not a token of a vocabulary of %d", path.c_str(),
                 name, i, V);
        }
        return t;
    };
    return {read("tokens"), read("targets")};
}

// Adds each parameter's part of an arena of weights or gradients, in fp32 and times a factor, with
// the prefix before its name.
static void add_parts(NamedTensors& list, const string& prefix, const Model& model,
                      const Tensor& arena, float factor) {
    for (const Parameter& p : model.parameters) {
        list.push_back({prefix + p.name, scale(cast(view(arena, p.offset, p.shape), F32), factor)});
    }
}
// Reads the weights of a model, whose sizes it finds in their shapes. Fails, and names the tensor,
// where one is missing, superfluous or of a wrong shape. Sets context.mode, which depends on the
// sizes.
static Model read_model(const Options& o) {
    const SafeTensors file = load_safetensors(o.weights);
    const set<string> floats = {"F32", "BF16"};
    const Shape embedding = require_tensor(file, "token_embeddings.weight", {-1, -1}, floats).shape;
    const Shape w1 =
        require_tensor(file, "layers.0.ffn.w1.weight", {-1, embedding[1]}, floats).shape;
    // A tensor that is empty may claim any length. And eager's loss finds a target's logit by
    // numbers in fp32, which are exact up to 2^24.
    for (int64_t n : {embedding[0], embedding[1], w1[0]}) {
        if (n < 1 || n > 1 << 24) {
            fail("%s: expected sizes from 1 to 16777216, found %ld", o.weights.c_str(), (long)n);
        }
    }

    ModelConfig c{"custom",    (int)embedding[1], (int)w1[0],  1,
                  o.num_heads, (int)embedding[0], o.rope_theta};
    while (file.tensors.count("layers." + to_string(c.num_layers) + ".ln1.weight")) {
        c.num_layers++;
    }
    check_config(c);
    context.mode = modes_of(o, {c})[0];

    Model model = make_model(c);
    set<string> known;
    for (const Parameter& p : model.parameters) {
        const FileTensor& from = require_tensor(file, p.name, p.shape, floats);
        copy_or_add(detached(p.weight), tensor_from_file(from), false);
        known.insert(p.name);
    }
    require_no_others(file, known, strprintf("one of a model with num_layers %d", c.num_layers));
    return model;
}

static void require_scale(const LossScaler& scaler) {
    if (scaler.scale < LEAST_SCALE) {
        fail("fp16: the gradients are not finite at any loss scale");
    }
}
// Returns logits and loss, and leaves the gradients, multiplied by the loss scale. In fp16 the
// scale halves until all gradients are finite.
static NamedTensors logits_and_loss(Trainer& t, const Batch& batch) {
    for (;;) {
        zero_gradients(t.model);
        const Tensor logits = forward(t.model, batch.tokens);
        const Tensor loss = cross_entropy(logits, batch.targets);
        backward_from_loss(t.model, loss, loss_scale_of(t.scaler));
        if (context.precision != PREC_FP16 || isfinite(gradient_norm(t.model))) {
            return {{"logits", cast(detached(logits), F32)}, {"loss", detached(loss)}};
        }
        update_scale(t.scaler, true);
        require_scale(t.scaler);
    }
}
// Runs your batch through your weights, and writes to o.out what a solution can be compared with:
// logits, loss, each parameter's gradient as grad.NAME and, after o.steps steps, each parameter as
// param.NAME.
int cmd_model(const Options& o) {
    choose_device(o.device);
    context.precision = precisions_of(o)[0];
    Trainer t;
    t.model = read_model(o);
    t.adamw.lr = o.lr;
    Model& model = t.model;
    const Batch batch = read_batch(o.batch, model.config.vocab_size);

    make_gradients(model);
    NamedTensors out = logits_and_loss(t, batch);
    const double loss = to_doubles(out[1].second)[0];
    add_parts(out, "grad.", model, model.gradients, 1 / loss_scale_of(t.scaler));

    while (model.step < o.steps) {  // in fp16 a step that is skipped is no step
        train_step(t, {batch});
        require_scale(t.scaler);
    }
    if (o.steps > 0) { add_parts(out, "param.", model, model.weights, 1); }

    save_tensors(o.out, out);
    answer("", "model %s: num_layers %d, tokens %s; loss %.6f; wrote %zu tensors to %s",
           o.weights.c_str(), model.config.num_layers, to_string(batch.tokens.shape).c_str(), loss,
           out.size(), o.out.c_str());
    return 0;
}
