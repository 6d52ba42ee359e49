// train.cu: the model on data that is not random. `model` runs your weights on your batch, `train` learns a real text.
#include "commands.h"
#include <algorithm>
#include <cerrno>
#include <cfloat>
#include <cinttypes>
#include <climits>
#include <csignal>
#include <cstdio>

#include <sys/stat.h>

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

// Other floats, names from torch.compile and DDP, buffers, and a batch of one dimension.
static bool check_py_takes(const SafeTensors& weights, const SafeTensors& batch) {
    auto only_there = [](const std::pair<const std::string, FileTensor>& entry) {
        const auto& [name, t] = entry;
        const bool is_weight = name.size() > 7 && name.compare(name.size() - 7, 7, ".weight") == 0;
        const bool is_wrapped = name.compare(0, 7, "module.") == 0 || name.find("_orig_mod.") != std::string::npos;
        return !is_weight || is_wrapped || t.dtype == "F16" || t.dtype == "F64";
    };
    auto tokens = batch.tensors.find("tokens");
    return std::any_of(weights.tensors.begin(), weights.tensors.end(), only_there) ||
           (tokens != batch.tensors.end() && tokens->second.shape.size() == 1);
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
    const bool others = check_py_takes(weights, batch_file);
    try {
        return run_model(o, weights, batch_file);
    } catch (const Failure& failure) {
        if (!others || failure.exit_code != 1) { throw; }
        fail("%s; tests/check.py takes such files", failure.what());
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// train: a real text, byte by byte.

struct Text {
    std::vector<uint8_t> bytes;
    int64_t train;  // bytes [0, train) are trained on, the rest is held out
};
static Text read_text(const std::string& path, double val_fraction, int T) {
    Text text;
    FILE* f = fopen(path.c_str(), "rb");
    struct stat status;
    if (!f || fstat(fileno(f), &status) != 0) { fail("%s: %s", path.c_str(), strerror(errno)); }
    if (!S_ISREG(status.st_mode) && !S_ISFIFO(status.st_mode)) { fail("%s: expected a file", path.c_str()); }
    constexpr size_t LIMIT = INT_MAX;  // of random_int, which draws where a window starts
    uint8_t buffer[1 << 16];
    bool too_long = status.st_size > (int64_t)LIMIT;
    for (size_t n; !too_long && (n = fread(buffer, 1, sizeof buffer, f)) > 0;) {
        if (text.bytes.size() + n > text.bytes.capacity()) {
            size_t room = std::max({(size_t)status.st_size, 2 * text.bytes.size(), n});  // a FIFO's size is 0
            require_memory(room, path);
            text.bytes.reserve(room);
        }
        text.bytes.insert(text.bytes.end(), buffer, buffer + n);
        too_long = text.bytes.size() > LIMIT;
    }
    bool failed = ferror(f);
    fclose(f);
    if (failed) { fail("%s: could not be read", path.c_str()); }
    if (too_long) { fail("%s: expected at most %zu bytes", path.c_str(), LIMIT); }
    int64_t size = (int64_t)text.bytes.size(), held_out = (int64_t)(size * val_fraction);
    text.train = size - held_out;
    if (text.train < T + 1 || held_out < T + 1) {
        fail("%s: %" PRId64 " bytes, %" PRId64 " of them held out, are too few for a context of %d: each part needs %d",
             path.c_str(), size, held_out, T, T + 1);
    }
    return text;
}
static Batch windows(const Text& text, const std::vector<int64_t>& starts, int T) {
    std::vector<int> x, y;
    x.reserve(starts.size() * T), y.reserve(starts.size() * T);
    for (int64_t start : starts) {
        for (int t = 0; t < T; t++) {
            x.push_back(text.bytes[start + t]);
            y.push_back(text.bytes[start + t + 1]);
        }
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
// B windows at a time, as a step's backwards take them: more would need memory that a step does not.
static double held_out_loss(Model& model, const Text& text, int B, int T) {
    NoGrad no_grad;
    double sum = 0;
    int64_t n = 0, size = (int64_t)text.bytes.size();
    for (int64_t at = text.train; at + T < size;) {
        std::vector<int64_t> starts;
        for (; (int)starts.size() < B && at + T < size; at += T) { starts.push_back(at); }
        Batch batch = windows(text, starts, T);
        sum += to_doubles(forward_to_loss(model, batch))[0] * starts.size();
        n += starts.size();
    }
    drop_weight_copies(model.slots);
    return sum / n;
}
// Continues the held-out text's first bytes, one byte at a time, each drawn from softmax(logits / temperature).
static std::string sample_text(Model& model, const Text& text, int T, int n, double temperature, uint64_t seed) {
    NoGrad no_grad;
    std::vector<int> tokens(text.bytes.begin() + text.train, text.bytes.begin() + text.train + T);
    std::string out;
    for (int i = 0; i < n; i++) {
        std::vector<int> window(tokens.end() - T, tokens.end());
        Tensor logits = forward(model, from_ints(window, {1, T}));
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
// Linear warm-up, then a cosine from lr down to min_lr at the last step.
static double learning_rate(const Options& o, int step) {
    if (step < o.warmup_steps) { return o.lr * (step + 1) / o.warmup_steps; }
    double progress = (step - o.warmup_steps) / std::max(1.0, (double)(o.steps - o.warmup_steps));
    return o.min_lr + 0.5 * (o.lr - o.min_lr) * (1 + cos(M_PI * std::min(1.0, progress)));
}

// A checkpoint's metadata holds the options that shape the run, under their own names.
using IntOption = int Options::*;
using RealOption = double Options::*;
struct RunOption {
    const char* name;
    IntOption integer;
    RealOption real;
    double low, high;  // as on the command line
};
static const RunOption run_options[] = {
    {"d_model", &Options::d_model, nullptr, 1, 1 << 20},
    {"d_ff", &Options::d_ff, nullptr, 1, 1 << 20},
    {"num_layers", &Options::num_layers, nullptr, 1, 1 << 20},
    {"num_heads", &Options::num_heads, nullptr, 1, 1 << 20},
    {"context_length", &Options::context_length, nullptr, 1, 1 << 20},
    {"batch_size", &Options::batch_size, nullptr, 1, 1 << 20},
    {"steps", &Options::steps, nullptr, 1, 1 << 20},
    {"warmup_steps", &Options::warmup_steps, nullptr, 0, 1 << 20},
    {"lr", nullptr, &Options::lr, FLT_TRUE_MIN, FLT_MAX},
    {"min_lr", nullptr, &Options::min_lr, 0, FLT_MAX},
    {"weight_decay", nullptr, &Options::weight_decay, 0, FLT_MAX},
    {"max_grad_norm", nullptr, &Options::max_grad_norm, DBL_TRUE_MIN, DBL_MAX},
    {"val_fraction", nullptr, &Options::val_fraction, DBL_TRUE_MIN, 1 - DBL_EPSILON / 2},
};

// ---------------------------------------------------------------------------------------------------------------------
// A way to train: in one process, or with several ranks (ddp.cu). A step's batch is --batch_size windows whatever the
// number of ranks and of backwards.

struct Trainer {
    Communicator c;  // of one rank, without connections, where no ranks were asked for
    Model model;
    LossScaler scaler;
    std::unique_ptr<DataParallel> d;  // ddp, sharded
    Optimizer sharded;                // else without groups
    std::unique_ptr<Fsdp> f;
    bool is_first() const { return c.rank == 0; }
    int& updates() { return f ? f->shard.step : sharded.groups.empty() ? model.step : sharded.groups[0].step; }
};
// The sharded optimizer's moment, each parameter's in turn: the whole of all would not fit beside the model.
static void visit_parts(Trainer& t, const ParameterGroup& group, Tensor& part,
                        const std::function<void(const Parameter&, const Tensor&)>& see) {
    const int64_t begin = group.bounds[t.c.rank], end = group.bounds[t.c.rank + 1];
    if (!part && end > begin) { part = zeros({end - begin}, F32, OPTIMIZER); }
    for (const Parameter& p : t.model.parameters) {
        Tensor whole = empty({count(p.shape)}, F32, WORKSPACE), own, kept;
        std::vector<int64_t> bounds;
        for (int64_t bound : group.bounds) { bounds.push_back(std::clamp<int64_t>(bound - p.offset, 0, whole.size())); }
        const int64_t first = bounds[t.c.rank], n = bounds[t.c.rank + 1] - first;
        if (n > 0) { own = view(whole, first, {n}), kept = view(part, p.offset + first - begin, {n}), copy(own, kept); }
        wait(t.c, all_gather(t.c, whole, bounds));
        see(p, view(whole, 0, p.shape));
        if (n > 0) { copy(kept, own); }
    }
}
// Every parameter in turn, or its moment, whole and in fp32; what `see` leaves there stays. prefix: of the name in a
// checkpoint: "", "adamw.m." or "adamw.v.". All ranks have to call it.
static void visit(Trainer& t, const std::string& prefix,
                  const std::function<void(const Parameter&, const Tensor&)>& see) {
    bool weights = prefix.empty(), first = prefix == "adamw.m.";
    ParameterGroup* group = t.f ? &t.f->shard : t.sharded.groups.empty() ? nullptr : &t.sharded.groups[0];
    if (t.f) {
        for (Tensor* moment : {&group->m, &group->v}) {
            if (!*moment) { *moment = zeros(group->weights.shape, group->weights.dtype, OPTIMIZER); }
        }
        return visit_whole(*t.f, weights ? group->weights : first ? group->m : group->v, true, see);
    }
    if (!weights && group) { return visit_parts(t, *group, first ? group->m : group->v, see); }
    Tensor whole = weights ? t.model.weights : first ? t.model.m : t.model.v;
    for (const Parameter& p : t.model.parameters) { see(p, view(whole, p.offset, p.shape)); }
}
// On rank 0: the tensors of a checkpoint, if they are to be kept, and the first that holds NaN or an infinity. Leaves
// the weights plain, but FSDP's in their form.
struct State {
    NamedTensors tensors;
    std::string not_finite;
};
static State state_of(Trainer& t, bool keep) {
    plain_weights(t.model);
    State state;
    for (const char* prefix : {"", "adamw.m.", "adamw.v."}) {
        visit(t, prefix, [&](const Parameter& p, const Tensor& whole) {
            if (!t.is_first() || context.device == META) { return; }
            NamedTensors one;
            one.add(prefix + p.name, whole);
            if (state.not_finite.empty()) { state.not_finite = first_not_finite(one); }
            if (keep) { state.tensors.add(prefix + p.name, one.kept[0]); }
        });
    }
    return state;
}
// step: batches seen; the model's own are fewer where fp16 skipped some.
static void save_checkpoint(const std::string& path, const NamedTensors& tensors, Trainer& t, int step,
                            const Options& o) {
    std::map<std::string, std::string> metadata = {{"format", "pt"},
                                                   {"step", std::to_string(step)},
                                                   {"updates", std::to_string(t.updates())},
                                                   {"seed", std::to_string(o.seed)},
                                                   {"precision", name_of(context.precision)},
                                                   {"mode", name_of(context.mode)},
                                                   {"loss_scale", strprintf("%.9g", t.scaler.scale)},
                                                   {"good_steps", std::to_string(t.scaler.good_steps)}};
    for (const RunOption& r : run_options) {
        metadata[r.name] = r.integer ? std::to_string(o.*r.integer) : strprintf("%.17g", o.*r.real);
    }
    save_safetensors(path, tensors.list, metadata);
}
static const std::string& metadata_of(const SafeTensors& file, const char* name) {
    auto it = file.metadata.find(name);
    if (it == file.metadata.end()) {
        fail("%s: metadata %s is missing: not a checkpoint of train", file.path.c_str(), name);
    }
    return it->second;
}
static double real_of(const SafeTensors& file, const char* name, double low, double high) {
    const std::string& text = metadata_of(file, name);
    char* end;
    double value = strtod(text.c_str(), &end);
    if (text.find_first_not_of("0123456789.eE+-") != std::string::npos || text.c_str() + text.size() != end ||
        !(value >= low && value <= high)) {
        fail("%s: metadata %s: expected a number from %g to %g, found '%s'", file.path.c_str(), name, low, high,
             text.c_str());
    }
    return value;
}
static int whole_of(const SafeTensors& file, const char* name, double low, double high) {
    double value = real_of(file, name, low, high);
    if (value != floor(value)) {
        fail("%s: metadata %s: expected a whole number, found '%s'", file.path.c_str(), name,
             metadata_of(file, name).c_str());
    }
    return (int)value;
}
static std::string name_in(const SafeTensors& file, const char* name, const std::set<std::string>& names) {
    const std::string& text = metadata_of(file, name);
    if (!names.count(text)) { fail("%s: metadata %s: found '%s'", file.path.c_str(), name, text.c_str()); }
    return text;
}
// Options that were not typed are the saved run's.
static void options_from_checkpoint(const SafeTensors& file, Options& o) {
    for (const RunOption& r : run_options) {
        double value = r.integer ? whole_of(file, r.name, r.low, r.high) : real_of(file, r.name, r.low, r.high);
        bool architecture = r.integer == &Options::d_model || r.integer == &Options::d_ff ||
                            r.integer == &Options::num_layers || r.integer == &Options::num_heads;
        if (architecture && o.has(r.name) && o.*r.integer != (int)value) {
            fail("--%s %d contradicts %s, whose model has %d", r.name, o.*r.integer, file.path.c_str(), (int)value);
        }
        if (o.has(r.name)) { continue; }
        if (r.integer) {
            o.*r.integer = (int)value;
        } else {
            o.*r.real = value;
        }
    }
    const std::string& seed = metadata_of(file, "seed");
    errno = 0;
    uint64_t value = strtoull(seed.c_str(), nullptr, 10);
    if (seed.empty() || seed.find_first_not_of("0123456789") != std::string::npos || errno != 0) {
        fail("%s: metadata seed: expected a whole number, found '%s'", file.path.c_str(), seed.c_str());
    }
    if (!o.has("seed")) { o.seed = value; }
    std::string precision = name_in(file, "precision", {"fp32", "tf32", "bf16", "fp16", "pure_bf16"});
    std::string mode = name_in(file, "mode", {"eager", "fused", "flash"});
    if (!o.has("precision")) { o.precision = {precision}; }
    if (!o.has("mode")) { o.mode = {mode}; }
    if (o.d_model % (2 * o.num_heads) != 0) {
        fail("%s: metadata: d_model %d does not make %d heads of an even size", file.path.c_str(), o.d_model,
             o.num_heads);
    }
}

static Plan plan_of(const Options& o) {
    Plan p{o};
    if (!o.quick) { return p; }
    p.shrink("d_model", &Options::d_model, 64), p.shrink("d_ff", &Options::d_ff, 128);
    p.shrink("num_layers", &Options::num_layers, 2), p.shrink("context_length", &Options::context_length, 32);
    p.shrink("batch_size", &Options::batch_size, 4), p.shrink("steps", &Options::steps, 20);
    p.scaled_down = "; scaled down: --quick";  // a checkpoint's sizes may take the place of ours
    return p;
}

// A plan has no connections.
static bool has_ranks(const Options& o, const Communicator& c) { return c.links || c.world > 1 || o.has("strategy"); }

// Random weights and moments of zero, or the checkpoint's weights, moments, step and loss scale.
static std::unique_ptr<Trainer> make_trainer(const Communicator& c, const ModelConfig& config, const Options& o,
                                             const SafeTensors& checkpoint) {
    auto made = std::make_unique<Trainer>();
    Trainer& t = *made;
    t.c = c;
    bool ranks = has_ranks(o, c), fsdp = ranks && o.strategy == "fsdp", sharded = ranks && o.strategy == "sharded";
    if (fsdp) { t.f = fully_shard(c, lay_out_model(config).parameters, matmul_dtype(), F32); }
    t.model = fsdp ? sharded_model(config, *t.f) : make_model(config);
    if (!fsdp && (ranks || o.grad_accumulation > 1)) { make_gradients(t.model); }
    if (sharded) {
        t.sharded = {c, BROADCAST, {}};
        add_parameter_group(t.sharded, {t.model.weights, t.model.gradients});
    } else if (!fsdp) {
        make_optimizer_state(t.model);
    }
    if (checkpoint.path.empty()) {
        visit(t, "", [&](const Parameter& p, const Tensor& whole) { init_weight(whole, p.name, o.seed); });
    } else {
        std::set<std::string> known;
        for (const char* prefix : {"", "adamw.m.", "adamw.v."}) {
            visit(t, prefix, [&](const Parameter& p, const Tensor& whole) {
                set_weight(whole, weight_from_file(checkpoint, prefix + p.name, p.shape));
                known.insert(prefix + p.name);
            });
        }
        require_no_others(checkpoint, known, model_of(config));
        t.updates() = whole_of(checkpoint, "updates", 0, 1 << 20);
        t.scaler.scale = (float)real_of(checkpoint, "loss_scale", FLT_MIN, FLT_MAX);
        t.scaler.good_steps = whole_of(checkpoint, "good_steps", 0, 1 << 20);
    }
    if (fsdp) { choose_form(*t.f); }
    if (!fsdp && !sharded) { choose_form(t.model); }
    if (ranks && !fsdp) {
        t.d = data_parallel(c, OVERLAPPED, 0, t.model.weights, t.model.gradients, t.model.parameters, t.model.slots);
    }
    return made;
}
// The mean loss over the batch of all ranks; its gradients, averaged, where the optimizer expects them.
// *stop: some rank asks for an end after this step; in and out, the same on all ranks.
static double loss_and_gradients(Trainer& t, const Batch& all, int accumulation, bool* stop) {
    int64_t T = all.tokens.dim(1), rows = all.tokens.dim(0) / (accumulation * t.c.world);
    float loss_scale = loss_scale_of(t.scaler) / accumulation;
    double sum = 0;
    if (t.f) { begin_step(*t.f); }
    for (int k = 0; k < accumulation; k++) {
        int64_t first = (k * t.c.world + t.c.rank) * rows;
        auto part = [&](const Tensor& whole) { return view(whole, first * T, {rows, T}); };
        Batch batch{part(all.tokens), part(all.targets)};
        if (t.d) {  // gradients add up, and are sent with the last backward
            t.d->strategy = k + 1 < accumulation ? NO_SYNC : OVERLAPPED;
            begin_step(*t.d);
        }
        Tensor loss = (k == 0 || t.f ? forward_backward : add_gradients)(t.model, batch, loss_scale, [] {});
        if (t.f) { finish_backward(*t.f); }
        sum += to_doubles(loss)[0] / accumulation;
    }
    if (t.d) { finish_gradient_synchronization(*t.d); }
    if (t.c.world == 1) { return sum; }
    Tensor mean = from_floats({(float)sum, *stop ? 1.0f : 0.0f}, {2});
    wait(t.c, all_reduce(t.c, mean, AVERAGE));
    *stop = to_doubles(mean)[1] > 0;
    return to_doubles(mean)[0];
}
static double update(Trainer& t, const AdamW& adamw, double max_norm) {  // see optimizer_step
    if (t.f) {
        t.f->shard.adamw = adamw;
        return optimizer_step(*t.f, t.scaler, max_norm);
    }
    if (t.sharded.groups.empty()) { return optimizer_step(t.model, adamw, t.scaler, max_norm); }
    t.sharded.groups[0].adamw = adamw;
    return guarded_step(
        t.scaler, max_norm, [&] { return gradient_norm(t.model); },
        [&](float gradient_scale) { optimizer_step(t.sharded, gradient_scale); });
}

// Why the run ends after a step: the loss or the gradients' norm is not finite. In fp16 that norm halves the loss
// scale, until it is below 2^-14, fp16's smallest normal number: then even a gradient of 1 has lost bits.
static std::string why_to_end(double loss, double norm, const LossScaler& scaler) {
    if (!std::isfinite(loss)) { return "the loss"; }
    if (std::isfinite(norm)) { return ""; }
    if (context.precision != PREC_FP16) { return "the gradient norm"; }
    return scaler.scale < 0x1p-14f ? strprintf("at a loss scale of %.2g the gradient norm", 2 * scaler.scale) : "";
}
static void make_room(Model& model) {  // on a GPU that the run has filled
    zero_gradients(model);
    model.kept = nullptr;
}
// The end of the line about what is not finite.
static const char* what_is_saved(const Options& o) {
    return o.save_every > 0 ? "--save holds an earlier step, if any; a smaller --lr may help"
                            : "nothing was saved; a smaller --lr may help";
}
[[noreturn]] static void fail_at(int step, const std::string& what, Trainer& t, const Options& o) {
    NamedTensors gradients;
    for (const Parameter& p : t.model.parameters) {  // FSDP's are gone
        if (!t.f) { gradients.add(p.name + "'s gradient", gradient_of(t.model, p)); }
    }
    make_room(t.model);
    std::string name = state_of(t, false).not_finite;  // it was there before the gradients
    if (name.empty()) { name = first_not_finite(gradients); }
    fail("step %d: %s is not finite; first tensor that is not finite: %s; %s", step, what.c_str(),
         name.empty() ? "none" : name.c_str(), what_is_saved(o));
}
static std::string how_split(const Options& o, const Communicator& c) {
    std::string text;
    if (c.links) { text += strprintf(" over %d ranks (%s, %s)", c.world, o.strategy.c_str(), c.backend.c_str()); }
    if (o.grad_accumulation > 1) { text += strprintf(" in %d backward passes", o.grad_accumulation); }
    return text;
}
static void check_split(const Options& o, const Communicator& c) {
    const bool replicated = has_ranks(o, c) && o.strategy != "fsdp";
    const char* takes = c.world > 1 ? "one rank, or --strategy fsdp" : "no --strategy, or fsdp";
    if (replicated && precision_from(o.precision[0]) == PREC_PURE_BF16) {
        usage_error("--precision: got 'pure_bf16' and --strategy %s, takes %s", o.strategy.c_str(), takes);
    }
    if (replicated && o.head_chunk > 0) {
        usage_error("--head_chunk: got %d and --strategy %s, takes %s", o.head_chunk, o.strategy.c_str(), takes);
    }
    if (o.batch_size % (c.world * o.grad_accumulation) != 0) {
        usage_error("--batch_size %d is not divisible by %d (%d ranks, --grad_accumulation %d)", o.batch_size,
                    c.world * o.grad_accumulation, c.world, o.grad_accumulation);
    }
}
static void check_same_text(const Text& text, const Options& o, const Communicator& c) {
    if (!c.links) { return; }
    std::string mine = std::to_string(key_of({text.bytes.begin(), text.bytes.end()}));
    for (const std::string& other : gather_text(c, mine)) {  // a pipe gives each of its readers another part
        if (other != mine) { fail("%s: the ranks have read different texts", o.data.c_str()); }
    }
}
// What the steps were; they end early by a signal, a stdout that takes nothing more, or what is not finite.
struct Steps {
    int done, last;
    RunningTable rows;
    int signal = 0;
    bool stopped = false;  // all ranks agree
    std::string not_finite = "";
    double tokens = 0, busy_ms = 0;
};
// What a checkpoint holds after this step. No good file may give way to one with NaN. All ranks have to call it.
static NamedTensors finite_state(Trainer& t, const Options& o, int step, double loss = 0) {
    make_room(t.model);
    State state = state_of(t, !o.save.empty());
    std::string name = state.not_finite;
    if (name.empty() && !std::isfinite(loss)) { name = "the held-out loss"; }
    if (!name.empty()) { fail("after step %d %s is not finite; %s", step, name.c_str(), what_is_saved(o)); }
    return state.tensors;
}
static void save_state(const NamedTensors& state, Trainer& t, int step, const Options& o) {
    try {
        if (!o.save.empty() && t.is_first()) { save_checkpoint(o.save, state, t, step, o); }
    } catch (const Failure&) {
        gather_text(t.c, "");
        throw;
    }
    gather_text(t.c, "");  // a collective, unlike this, would not wait as long as a slow disk takes
    if (!t.f && t.sharded.groups.empty()) { choose_form(t.model); }
}
static int signal_of_all(const Trainer& t) {  // a signal may reach one rank only
    int signal = 0;
    for (const std::string& of_one : gather_text(t.c, std::to_string(EndSignals::seen()))) {
        signal = std::max(signal, atoi(of_one.c_str()));
    }
    return signal;
}
static void take_steps(Trainer& t, const Text& text, const Options& o, Steps& run) {
    int first = run.done;
    while (run.done < run.last && !run.stopped && run.not_finite.empty()) {
        synchronize();
        double start = now_ms();
        AdamW adamw;
        adamw.lr = (float)learning_rate(o, run.done), adamw.weight_decay = (float)o.weight_decay;
        Batch batch = training_batch(text, o.batch_size, o.context_length, o.seed, run.done);
        run.stopped = EndSignals::seen() != 0 || !run.rows.failure.empty();
        double l = loss_and_gradients(t, batch, o.grad_accumulation, &run.stopped);
        double norm = update(t, adamw, o.max_grad_norm);
        synchronize();
        double elapsed = now_ms() - start, rate = 1000.0 * o.batch_size * o.context_length / elapsed;
        run.tokens += (double)o.batch_size * o.context_length, run.busy_ms += elapsed, run.done++;
        if (t.is_first()) {
            double left = run.busy_ms / (run.done - first) * (run.last - run.done) / 1000;
            progress("step %d of %d: loss %.4f, %.0f tokens/s, %.0f s left", run.done, o.steps, l, rate, left);
        }
        run.not_finite = why_to_end(l, norm, t.scaler);
        bool ends = run.done == run.last || run.stopped || !run.not_finite.empty();
        if (t.is_first() && (run.done % o.log_every == 0 || ends)) {
            run.rows.add(
                {std::to_string(run.done), strprintf(o.format == "md" ? "%.4f" : "%.7f", l),
                 strprintf("%.3g", adamw.lr),
                 std::isfinite(norm) || !run.not_finite.empty() ? strprintf("%.3f", norm) : "overflow, step skipped",
                 strprintf("%.2f", elapsed), strprintf("%.0f", rate)});
        }
        if (o.save_every > 0 && run.done % o.save_every == 0 && !ends) {
            save_state(finite_state(t, o, run.done), t, run.done, o);
        }
    }
    if (run.stopped) { run.signal = signal_of_all(t); }
}
static std::string quoted(const std::string& word) {  // for a shell
    const char* const plain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-+=:,./@%";
    if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) { return word; }
    std::string text = "'";
    for (char c : word) { text += c == '\'' ? "'\\''" : std::string(1, c); }
    return text + "'";
}
// The command line that goes on from --save: as it was typed, but for where it begins and ends.
static std::string line_to_resume(const Options& o) {
    std::string line = quoted(program_invocation_name);
    for (size_t i = 0; i < o.command_line.size(); i++) {
        const std::string& word = o.command_line[i];
        const std::string name = word.substr(0, word.find('='));
        if (name != "--load" && name != "--stop_at") {
            line += " " + quoted(word);
        } else if (name == word) {
            i++;  // its value
        }
    }
    return line + " --load " + quoted(o.save);
}
// The line after the tables, of a run that ended early.
static void say_how_to_go_on(const Options& o, const Steps& run) {
    std::string text =
        strprintf("ended %s after step %d of %d: ",
                  run.signal ? strprintf("by signal %d (%s)", run.signal, strsignal(run.signal)).c_str() : "early",
                  run.done, o.steps);
    if (o.save.empty()) {
        note("%snothing was saved, since --save was not given", text.c_str());
    } else {
        note("%s%s holds it; to go on: %s", text.c_str(), o.save.c_str(), line_to_resume(o).c_str());
    }
}
static void print_sample(Trainer& t, const Text& text, const Options& o) {
    std::string caption =
        strprintf("The held-out text's first %d bytes continued (temperature %.2g)", o.context_length, o.temperature);
    std::string sample = sample_text(t.model, text, o.context_length, o.sample, o.temperature, o.seed);
    if (!t.is_first()) { return; }
    if (o.format == "md") {
        printf("\n%s:\n\n```\n%s\n```\n", caption.c_str(), sample.c_str());
    } else {
        print({caption, {"sample"}, {{sample}}}, o.format);
    }
}
static Prediction peak_of_ranks(const ModelConfig& c, const Options& o, const Communicator& ranks) {
    constexpr int STEPS = 2;  // some strategies have their moments from the first one on
    Prediction needs = planned_peak([&] {
        Communicator planned;
        planned.world = ranks.world;
        auto t = make_trainer(planned, c, o, {});
        Batch batch = random_batch(o.batch_size, o.context_length, c.vocab_size, 0);
        for (int i = 0; i < STEPS; i++) {
            bool stop = false;
            loss_and_gradients(*t, batch, o.grad_accumulation, &stop);
            update(*t, AdamW(), 0);
        }
        make_room(t->model);
        state_of(*t, false);  // as at the run's end, and for --save
    });
    needs.flops /= STEPS;
    return needs;
}
static int train(const Options& typed, const Communicator& ranks) {
    Plan plan = plan_of(typed);
    Options& o = plan.o;
    SafeTensors checkpoint;
    if (!o.load.empty()) {
        checkpoint = load_safetensors(o.load);
        options_from_checkpoint(checkpoint, o);
    }
    ModelConfig c{"custom", o.d_model, o.d_ff, o.num_layers, o.num_heads, 256};
    check_config(c);
    if (o.stop_at > o.steps) { usage_error("--stop_at %d lies beyond --steps %d", o.stop_at, o.steps); }
    check_split(o, ranks);
    Text text = read_text(o.data, o.val_fraction, o.context_length);
    check_same_text(text, o, ranks);
    require_memory((size_t)4 * sizeof(int) * o.batch_size * o.context_length, "a batch");  // as windows() makes it
    if (!ranks.links) { context.device = choose_device(o.device); }
    context.precision = precision_from(o.precision[0]);
    // A checkpoint's flash may have been another device's, or another precision's.
    context.mode = mode_for(o, o.mode[0], c, context.precision);

    const int rows = o.batch_size / (ranks.world * o.grad_accumulation);  // of a rank's backward
    if (context.plan_only) {
        const Prediction needs = has_ranks(o, ranks)
                                     ? peak_of_ranks(c, o, ranks)
                                     : predicted_peak(c, rows, o.context_length, STEP, o.grad_accumulation);
        only_planned(ranks_of(ranks) + row_of(c, o.batch_size / ranks.world, o.context_length, STEP), needs,
                     fits_everywhere(ranks, needs.bytes), passes_of(ranks, o.steps));
        return 0;
    }
    std::unique_ptr<Trainer> trainer = make_trainer(ranks, c, o, checkpoint);
    Trainer& t = *trainer;
    checkpoint.content = nullptr, checkpoint.tensors.clear();
    if (t.is_first()) { progress("train: held-out loss before step 1"); }
    double before = held_out_loss(t.model, text, rows, o.context_length), after = NAN;
    Table table{
        strprintf("train %s: %zu bytes, %" PRId64 " held out; %d layers, d_model %d, d_ff %d, %d heads, precision %s, "
                  "mode %s; batch %d%s, context length %d, seed %" PRIu64 "; %s",
                  o.data.c_str(), text.bytes.size(), (int64_t)text.bytes.size() - text.train, o.num_layers, o.d_model,
                  o.d_ff, o.num_heads, name_of(context.precision), caption_of(context.mode).c_str(), o.batch_size,
                  how_split(o, ranks).c_str(), o.context_length, o.seed, plan.origin().c_str()),
        {"step", "loss", "lr", "gradient norm", "ms", "tokens/s"},
        {}};
    Steps run{checkpoint.path.empty() ? 0 : whole_of(checkpoint, "step", 0, 1 << 20),
              o.stop_at > 0 ? o.stop_at : o.steps,
              {table, {7, 7, 8, 13, 8, 9}}};
    auto end_signals = std::make_unique<EndSignals>(t.is_first());  // before, nothing would be lost
    std::exception_ptr failure;                                     // then the tables are all that is left of the run
    try {
        take_steps(t, text, o, run);
        if (!run.not_finite.empty()) { fail_at(run.done, run.not_finite, t, o); }
        make_room(t.model);
        double loss = run.stopped ? 0 : held_out_loss(t.model, text, rows, o.context_length);
        NamedTensors state = finite_state(t, o, run.done, loss);
        after = loss;
        save_state(state, t, run.done, o);
    } catch (const Failure&) { failure = std::current_exception(); }
    if (t.is_first() && !run.rows.failure.empty() && !failure) { say_how_to_go_on(o, run); }
    if (t.is_first()) { run.rows.end(); }
    if (!std::isfinite(after)) { std::rethrow_exception(failure); }
    Table summary{"", {"held-out loss before", "held-out loss after", "steps", "tokens/s", "MFU %", "peak MiB"}, {}};
    const double steps_taken = run.tokens / o.batch_size / o.context_length;
    const double tflops = step_tflops(c, o.batch_size, o.context_length, run.busy_ms / steps_taken);
    summary.rows.push_back({strprintf("%.4f", before), run.stopped ? "" : strprintf("%.4f", after),
                            std::to_string(run.done),
                            run.busy_ms > 0 ? strprintf("%.0f", 1000 * run.tokens / run.busy_ms) : "",
                            run.busy_ms > 0 ? percent_of_peak(tflops / ranks.world, context.precision) : "",
                            strprintf("%.0f", memory_use(context.device).peak / 1048576.0)});
    summary.caption = "train: loss in nats per byte";
    if (t.is_first()) { print(summary, o.format); }
    const int late = run.stopped ? 0 : signal_of_all(t);
    end_signals = nullptr;
    if (late) {  // all is done but the sample
        if (failure) { std::rethrow_exception(failure); }
        return 128 + late;
    }
    if (o.sample > 0 && !run.stopped) { print_sample(t, text, o); }
    if (failure) { std::rethrow_exception(failure); }
    if (run.stopped && t.is_first()) { say_how_to_go_on(o, run); }
    return run.signal ? 128 + run.signal : run.stopped;
}
int cmd_train(const Options& o) {
    if (o.save_every > 0 && !o.has("save")) { usage_error("--save_every: got %d, takes --save, too", o.save_every); }
    if (!is_rank() && o.nproc == 1 && !o.has("strategy")) { return train(o, Communicator()); }
    if (o.has("trace")) { usage_error("--trace takes one rank without --strategy"); }
    int exit_code = 0;
    int ranks = run_ranks(
        o, [&](const Communicator& c) { exit_code = train(o, c); }, true);
    return ranks != 0 ? ranks : exit_code;
}
