// train.cu: the model on data that is not random. `model` runs your weights on your batch, `train` learns a real text.
#include "commands.h"
#include <algorithm>
#include <cerrno>
#include <cfloat>
#include <cinttypes>
#include <climits>
#include <csignal>
#include <cstdio>
#include <fstream>

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

// Other floats, names from torch.compile and DDP, and buffers.
static bool check_py_takes(const SafeTensors& weights) {
    auto only_there = [](const std::pair<const std::string, FileTensor>& entry) {
        const auto& [name, t] = entry;
        const bool is_weight = name.size() > 7 && name.compare(name.size() - 7, 7, ".weight") == 0;
        const bool is_wrapped = name.compare(0, 7, "module.") == 0 || name.find("_orig_mod.") != std::string::npos;
        return !is_weight || is_wrapped || t.dtype == "F16" || t.dtype == "F64";
    };
    return std::any_of(weights.tensors.begin(), weights.tensors.end(), only_there);
}

static int run_model(const Options& o, SafeTensors& weights, const SafeTensors& batch_file) {
    ModelConfig c = config_from_file(weights, o.num_heads, (float)o.rope_theta);
    if (c.d_model % c.num_heads != 0 || c.d_model / c.num_heads % 2 != 0) {
        fail("%s: tensor token_embeddings.weight: width %d does not make %d heads of an even size", o.weights.c_str(),
             c.d_model, c.num_heads);
    }
    context.mode = mode_for(o, o.mode[0], c, context.precision);
    Model model = make_model(c);
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
    LossScaler scaler;
    zero_gradients(model);
    Tensor logits = forward(model, batch.tokens), loss = cross_entropy(logits, batch.targets);
    backward(loss, loss_scale_of(scaler));
    drop_weight_copies(model.slots);
    out.add("logits", logits);
    out.add("loss", loss);
    for (const Parameter& p : model.parameters) {
        NoGrad no_grad;
        out.add("grad." + p.name, scale(view(model.gradients, p.offset, p.shape), 1 / loss_scale_of(scaler)));
    }
    double first_loss = to_doubles(loss)[0], last_loss = first_loss;
    AdamW adamw;
    adamw.lr = (float)o.lr;
    if (o.steps > 0) { make_optimizer_state(model); }
    for (int i = 0; i < o.steps; i++) {
        last_loss = to_doubles(forward_backward(model, batch, loss_scale_of(scaler)))[0];
        optimizer_step(model, adamw, scaler, 0);
    }
    for (const Parameter& p : model.parameters) {
        if (o.steps > 0) { out.add("param." + p.name, p.weight); }
    }
    save_safetensors(o.out, out.list, {{"format", "pt"}});
    std::string line = strprintf(
        "model %s: %d layers, d_model %d, d_ff %d, %d heads, vocabulary %d; tokens %s; loss %.6f", o.weights.c_str(),
        c.num_layers, c.d_model, c.d_ff, c.num_heads, c.vocab_size, to_string(shape).c_str(), first_loss);
    if (o.steps > 0) { line += strprintf("; before step %d: %.6f", o.steps, last_loss); }
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
    const bool others = check_py_takes(weights);
    try {
        return run_model(o, weights, batch_file);
    } catch (const Failure& failure) {
        if (!others || failure.exit_code != 1) { throw; }
        fail("%s; tests/check.py takes such files", failure.what());
    }
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

struct Trainer {
    Model model;
    LossScaler scaler;
    int step = 0;  // batches seen; the model's own steps are fewer where fp16 skipped some
};
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
    if (!bad.empty()) { fail("after step %d %s is not finite: nothing was saved", t.step, bad.c_str()); }
    std::map<std::string, std::string> metadata = {{"format", "pt"},
                                                   {"step", std::to_string(t.step)},
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
        t.step = (int)number_of(checkpoint, "step", 0, 1 << 20);
        t.model.step = (int)number_of(checkpoint, "updates", 0, 1 << 20);
        t.scaler.scale = (float)number_of(checkpoint, "loss_scale", FLT_MIN, FLT_MAX);
        t.scaler.good_steps = (int)number_of(checkpoint, "good_steps", 0, 1 << 20);
    }
    choose_form(t.model);
}

// Until the last step, or a signal, or a stdout that takes no more rows. Fails where the loss or the gradients' norm is
// not finite; in fp16 that norm halves the loss scale, until it is below 2^-14, fp16's smallest normal number.
static void take_steps(Trainer& t, const Text& text, const Options& o, RunningTable& rows) {
    const int rows_apart = std::max(1, o.steps / 20);
    while (t.step < o.steps && !EndSignals::seen() && rows.failure.empty()) {
        AdamW adamw;
        adamw.lr = (float)learning_rate(o, t.step);
        Batch batch = training_batch(text, o.batch_size, o.context_length, o.seed, t.step);
        synchronize();
        const double start = now_ms();
        const double loss = to_doubles(forward_backward(t.model, batch, loss_scale_of(t.scaler)))[0];
        const double norm = optimizer_step(t.model, adamw, t.scaler, 1);
        synchronize();
        const double ms = now_ms() - start;
        t.step++;
        const bool skipped = !std::isfinite(norm) && context.precision == PREC_FP16 && t.scaler.scale >= 0x1p-14f;
        if (!std::isfinite(loss) || (!std::isfinite(norm) && !skipped)) {
            fail("step %d: the %s is not finite, and nothing was saved; a smaller --lr may help", t.step,
                 std::isfinite(loss) ? "gradients' norm" : "loss");
        }
        progress("step %d of %d: loss %.4f", t.step, o.steps, loss);
        if (t.step % rows_apart == 0 || t.step == o.steps || t.step == 1) {
            rows.add({std::to_string(t.step), strprintf("%.7f", loss), strprintf("%.3g", adamw.lr),
                      skipped ? "overflow, step skipped" : strprintf("%.3f", norm), strprintf("%.2f", ms),
                      strprintf("%.0f", 1e3 * o.batch_size * o.context_length / ms)});
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
    if (t.step >= o.steps) {
        note("train: %s has all %d steps behind it; --steps asks for more", o.load.c_str(), t.step);
    }
    const double before = held_out_loss(t.model, text, o.batch_size, T);
    RunningTable rows{
        {strprintf("train %s: %zu bytes, a tenth held out; %d layers, d_model %d, d_ff %d, %d heads, "
                   "precision %s, mode %s; batch %d, context length %d, seed %" PRIu64 "; %s",
                   o.data.c_str(), text.bytes.size(), c.num_layers, c.d_model, c.d_ff, c.num_heads,
                   name_of(context.precision), name_of(context.mode), o.batch_size, T, o.seed, origin(o).c_str()),
         {"step", "loss", "lr", "gradient norm", "ms", "tokens/s"}},
        {7, 9, 8, 13, 8, 9}};
    int signal = 0;
    {
        EndSignals first_is_a_wish(true);
        take_steps(t, text, o, rows);
        zero_gradients(t.model), t.model.kept = nullptr;  // room, on a GPU that the run has filled
        if (!o.save.empty()) { save_checkpoint(t, o); }   // before all that takes time
        signal = EndSignals::seen();
    }
    rows.end();
    if (signal) {
        note("ended by signal %d (%s) after step %d of %d: %s", signal, strsignal(signal), t.step, o.steps,
             o.save.empty() ? "nothing was saved, since --save was not given"
                            : ("to go on: the same command line with --load " + o.save).c_str());
        return 128 + signal;
    }
    const double after = held_out_loss(t.model, text, o.batch_size, T);
    Table summary{"train: loss in nats per byte", {"held-out loss before", "held-out loss after", "steps", "peak MiB"}};
    summary.row(strprintf("%.4f", before), strprintf("%.4f", after), t.step,
                strprintf("%.0f", memory_use(context.device).peak / 1048576.0));
    print(summary);
    if (o.sample > 0) {
        answer("", "The held-out text's first %d bytes continued (temperature 0.8):", T);
        sketch(sample_text(t.model, text, T, o.sample, o.seed) + "\n");
    }
    return 0;
}
