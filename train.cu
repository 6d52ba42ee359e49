// train.cu: two commands beside the problems. `train` trains the model on a text; `model` runs your
// own weights and batch through it.
#include "cs336.h"

#include <cinttypes>

// -------------------------------------------------------------------------------------------------
// train: a demo in one process. It trains on a real text, byte by byte, prints the loss of a part
// that it never trained on, and continues that part.

// The least loss scale that is tried, fp16's smallest normal number.
constexpr float LEAST_SCALE = 0x1p-14f;
static void require_scale(const LossScaler& scaler) {
    if (scaler.scale < LEAST_SCALE) {
        fail("fp16: the gradients are not finite at any loss scale");
    }
}

constexpr int BYTES = 256;  // the vocabulary
struct Text {
    vector<uint8_t> bytes;
    int64_t train;  // bytes [0, train) are trained on, the last tenth is held out
};
// Reads a text, or of a larger one its first INT_MAX bytes, since random_int draws windows. Fails
// if the tenth that is held out has no window of T bytes and their targets.
static Text read_text(const string& path, int T) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    const int64_t size = std::min<int64_t>(file.tellg(), INT_MAX);  // -1: there is no such file
    if (file.tellg() > size) {
        note("train: takes the first %" PRId64 " bytes of %s", size, path.c_str());
    }

    Text text;
    text.bytes.resize(std::max<int64_t>(size, 0));
    text.train = size - size / 10;
    file.seekg(0);
    if (!file.read((char*)text.bytes.data(), size)) {
        fail("%s: cannot be read: %s", path.c_str(), strerror(errno));
    }
    if (size / 10 < T + 1) {
        fail("%s: %" PRId64 " bytes are too few: a tenth has to be longer than a context of %d",
             path.c_str(), size, T);
    }
    return text;
}
// Returns the T bytes from each start on as tokens, and those one further on as targets.
static Batch windows(const Text& text, const vector<int64_t>& starts, int T) {
    auto bytes = [&](int further) {
        vector<int> x;
        for (int64_t start : starts) {
            const uint8_t* first = &text.bytes[start + further];
            x.insert(x.end(), first, first + T);
        }
        return from_ints(x, {(int64_t)starts.size(), T});
    };
    return {bytes(0), bytes(1)};
}
// Returns the batch of a step: windows of the training text at random, which depend on the seed and
// the step alone.
static Batch training_batch(const Text& text, const Options& o, int step) {
    vector<int64_t> starts;
    for (int b = 0; b < o.batch_size; b++) {
        starts.push_back(random_int((int)(text.train - o.context_length), o.seed, key_of("windows"),
                                    (uint64_t)step * o.batch_size + b));
    }
    return windows(text, starts, o.context_length);
}
// Returns the mean loss of the held-out windows, or of 100 that lie evenly among them.
static double held_out_loss(Model& model, const Text& text, int T) {
    NoGrad no_grad;
    const int64_t all = ((int64_t)text.bytes.size() - text.train - 1) / T;
    const int64_t n = std::min<int64_t>(all, 100);
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        const Batch window = windows(text, {text.train + i * all / n * T}, T);
        sum += to_doubles(forward_to_loss(model, window))[0];
    }
    drop_weight_copies(model.slots);
    return sum / n;
}

// Draws a token from softmax(logits). i numbers the draws.
static int draw_token(const vector<double>& logits, uint64_t seed, int i) {
    const double max = *std::max_element(logits.begin(), logits.end());
    vector<double> weights;
    for (double x : logits) { weights.push_back(exp(x - max)); }

    double at = random_int(1 << 30, seed, key_of("sample"), i) / (double)(1 << 30);
    at *= std::accumulate(weights.begin(), weights.end(), 0.0);
    const int last = (int)weights.size() - 1;
    for (int token = 0; token < last; token++) {
        at -= weights[token];
        if (at < 0) { return token; }
    }
    return last;
}
// Returns n bytes that continue the held-out text's first T; those that do not print as \xNN.
static string sample_text(Model& model, const Text& text, int T, int n, uint64_t seed) {
    NoGrad no_grad;
    const auto start = text.bytes.begin() + text.train;
    vector<int> tokens(start, start + T);
    string out;
    for (int i = 0; i < n; i++) {
        const Tensor logits = forward(model, from_ints({tokens.end() - T, tokens.end()}, {1, T}));
        const vector<double> all = to_doubles(logits);
        const int token = draw_token({all.end() - BYTES, all.end()}, seed, i);
        tokens.push_back(token);

        const bool printable = token < 127 && (token >= 32 || token == '\n');
        out += printable ? string(1, (char)token) : strprintf("\\x%02x", token);
    }
    return out;
}

// Trains for o.steps steps, and adds some 20 of them to `rows`. Fails where the loss or the norm of
// the gradients is not finite; in fp16 such a norm only halves the loss scale, until that is below
// the least.
static void take_steps(Trainer& t, const Text& text, const Options& o, Table& rows) {
    const int rows_apart = std::max(1, o.steps / 20);
    while (t.steps < o.steps) {
        const Batch batch = training_batch(text, o, t.steps);
        const double ms = time_ms(0, 1, [&] { train_step(t, {batch}); })[0];

        const bool finite = isfinite(t.norm);
        const bool skipped =
            !finite && context.precision == PREC_FP16 && t.scaler.scale >= LEAST_SCALE;
        if (!isfinite(t.loss) || (!finite && !skipped)) {
            print(rows);
            fail("step %d: the %s is not finite; a smaller --lr may help", t.steps,
                 isfinite(t.loss) ? "gradients' norm" : "loss");
        }

        progress("step %d of %d: loss %.4f", t.steps, o.steps, t.loss);
        if (t.steps % rows_apart == 0 || t.steps == o.steps || t.steps == 1) {
            rows.row(t.steps, strprintf("%.7f", t.loss),
                     skipped ? "overflow, step skipped" : strprintf("%.3f", t.norm),
                     strprintf("%.2f", ms),
                     strprintf("%.0f", 1e3 * o.batch_size * o.context_length / ms));
        }
    }
}

// Trains on o.data, and prints a table of steps, the held-out loss before and after, and a sample.
int cmd_train(const Options& o) {
    const ModelConfig c{"custom", o.d_model, o.d_ff, o.num_layers, o.num_heads, BYTES};
    check_config(c);
    const int T = o.context_length;
    const Text text = read_text(o.data, T);
    context.device = choose_device(o.device);
    context.precision = precisions_of(o)[0];
    context.mode = modes_of(o, {c}, {context.precision})[0];

    Trainer t;
    t.max_norm = 1;
    t.adamw.lr = (float)o.lr;
    t.model = random_model(c, o.seed);
    const double before = held_out_loss(t.model, text, T);
    note("train: held-out loss %.4f before the first step", before);

    Table rows{strprintf("train %s: %zu bytes, a tenth held out; d_model %d, d_ff %d, %d layers, "
                         "%d heads; batch %d, context length: %d, seed %" PRIu64
                         ", lr %g; precision %s, mode %s",
                         o.data.c_str(), text.bytes.size(), c.d_model, c.d_ff, c.num_layers,
                         c.num_heads, o.batch_size, T, o.seed, o.lr, name_of(context.precision),
                         name_of(context.mode)),
               {"step", "loss", "gradient norm", "ms", "tokens/s"}};
    take_steps(t, text, o, rows);
    print(rows);

    const double after = held_out_loss(t.model, text, T);
    if (!isfinite(after)) {
        fail("after step %d the held-out loss is not finite; a smaller --lr may help", t.steps);
    }
    Table summary{"train: loss in nats per byte",
                  {"held-out loss before", "held-out loss after", "steps", "peak MiB"}};
    summary.row(strprintf("%.4f", before), strprintf("%.4f", after), t.steps,
                strprintf("%.0f", mib_of(memory_use(context.device).peak)));
    print(summary);

    if (o.sample > 0) {
        answer("", "The held-out text's first %d bytes continued:", T);
        sketch(sample_text(t.model, text, T, o.sample, o.seed) + "\n");
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// model: your weights and batch in, our logits, loss, gradients and (after N AdamW steps)
// parameters out.

// Returns element i of a file's tensor, which may lie at any address.
template <class T>
static T element(const FileTensor& f, int64_t i) {
    T x;
    memcpy(&x, (const char*)f.data + i * sizeof(T), sizeof(T));
    return x;
}
// Returns a file's tensor on the CPU: F32 and BF16 as F32, I64 and I32 as I32. An integer that is
// too large for I32 becomes -1, which read_batch refuses as a token.
static Tensor tensor_from_file(const FileTensor& f) {
    Tensor t = empty_on(CPU, f.shape, f.dtype[0] == 'I' ? I32 : F32, INPUTS);
    if (f.dtype == "F32") {
        memcpy(t.data, f.data, f.bytes);
    } else if (f.dtype == "BF16") {
        for (int64_t i = 0; i < t.size(); i++) { t.as<float>()[i] = element<bf16>(f, i); }
    } else {
        for (int64_t i = 0; i < t.size(); i++) {
            const int64_t value = f.dtype == "I64" ? element<int64_t>(f, i) : element<int>(f, i);
            t.as<int>()[i] = value == (int)value ? (int)value : -1;
        }
    }
    return t;
}
// Reads tokens and targets, [B,T] both, of a vocabulary of V.
static Batch read_batch(const string& path, int V) {
    const SafeTensors file = load_safetensors(path);
    require_no_others(file, {"tokens", "targets"}, "tokens or targets");
    const Shape shape = require_tensor(file, "tokens", {-1, -1}, {"I32", "I64"}).shape;
    if (count(shape) == 0) {
        fail("%s: tensor tokens: is empty, %s", path.c_str(), to_string(shape).c_str());
    }

    auto read = [&](const char* name) {
        Tensor t = tensor_from_file(require_tensor(file, name, shape, {"I32", "I64"}));
        for (int64_t i = 0; i < t.size(); i++) {
            if (t.as<int>()[i] >= 0 && t.as<int>()[i] < V) { continue; }
            fail("%s: tensor %s: element %" PRId64 " is not a token of a vocabulary of %d",
                 path.c_str(), name, i, V);
        }
        return to_device(t, context.device);
    };
    return {read("tokens"), read("targets")};
}

using NamedTensors = vector<pair<string, Tensor>>;
// Adds each parameter's part of an arena of weights, gradients or moments, with the prefix before
// its name.
static void add_parts(NamedTensors& list, const string& prefix, const Model& model,
                      const Tensor& arena) {
    for (const Parameter& p : model.parameters) {
        list.push_back({prefix + p.name, view(arena, p.offset, p.shape)});
    }
}
// Writes tensors as F32.
static void save_tensors(const string& path, const NamedTensors& list) {
    NoGrad no_grad;
    vector<Tensor> kept;
    vector<pair<string, FileTensor>> described;
    for (const auto& [name, t] : list) {
        kept.push_back(to_device(contiguous(t.dtype == F32 ? t : cast(t, F32)), CPU));
        described.push_back({name, describe(kept.back())});
    }
    save_safetensors(path, described, {{"format", "pt"}});
}
// Reads the weights of a model, whose sizes it finds in their shapes. Fails, and names the tensor,
// where one is missing, superfluous or of a wrong shape.
static Model read_model(const Options& o) {
    const SafeTensors file = load_safetensors(o.weights);
    const set<string> floats = {"F32", "BF16"};
    const Shape embedding = require_tensor(file, "token_embeddings.weight", {-1, -1}, floats).shape;
    const Shape w1 = require_tensor(file, "layers.0.ffn.w1.weight", {-1, -1}, floats).shape;
    // a tensor that is empty may claim any length
    for (int64_t n : {embedding[0], embedding[1], w1[0]}) {
        if (n < 1 || n > INT_MAX) {
            fail("%s: expected sizes from 1 to %d, found %" PRId64, o.weights.c_str(), INT_MAX, n);
        }
    }

    ModelConfig c{"custom",    (int)embedding[1], (int)w1[0],         1,
                  o.num_heads, (int)embedding[0], (float)o.rope_theta};
    while (file.tensors.count("layers." + to_string(c.num_layers) + ".ln1.weight")) {
        c.num_layers++;
    }
    check_config(c);
    context.mode = modes_of(o, {c}, {context.precision})[0];

    Model model = make_model(c);
    set<string> known;
    for (const Parameter& p : model.parameters) {
        const Tensor from = tensor_from_file(require_tensor(file, p.name, p.shape, floats));
        copy_or_add(detached(p.weight), to_device(from, context.device), false);
        known.insert(p.name);
    }
    require_no_others(file, known, strprintf("one of a model of %d layers", c.num_layers));
    return model;
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
            return {{"logits", logits}, {"loss", loss}};
        }
        update_scale(t.scaler, true);
        require_scale(t.scaler);
    }
}
// Runs your batch through your weights, and writes to o.out what a solution can be compared with:
// logits, loss, each parameter's gradient as grad.NAME and, after o.steps steps, each parameter as
// param.NAME.
int cmd_model(const Options& o) {
    context.device = choose_device(o.device);
    context.precision = precisions_of(o)[0];
    Trainer t;
    t.model = read_model(o);
    t.adamw.lr = (float)o.lr;
    Model& model = t.model;
    const Batch batch = read_batch(o.batch, model.config.vocab_size);

    make_gradients(model);
    NamedTensors out = logits_and_loss(t, batch);
    const double loss = to_doubles(out[1].second)[0];
    add_parts(out, "grad.", model, scale(model.gradients, 1 / loss_scale_of(t.scaler)));

    while (model.step < o.steps) {  // in fp16 a step that is skipped is no step
        train_step(t, {batch});
        require_scale(t.scaler);
    }
    if (o.steps > 0) { add_parts(out, "param.", model, model.weights); }

    save_tensors(o.out, out);
    printf("model %s: %d layers, tokens %s; loss %.6f; wrote %zu tensors to %s\n",
           o.weights.c_str(), model.config.num_layers, to_string(batch.tokens.shape).c_str(), loss,
           out.size(), o.out.c_str());
    return 0;
}
