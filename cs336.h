// cs336.h: the map. What crosses the files of this folder; what lib/ offers is in lib/lib.h.
//   precision.cu  section 1.1.5: fp16 and bf16, sums, what autocast does, loss scaling
//   layers.cu     the Transformer's ops, each as formula, loop and kernel
//   attention.cu  1.2.1, 1.3 and 1.3.1: attention by its definition, with a fused softmax, and how
//                 both are timed; weighted_sum
//   flash.cu      1.3.2 and 1.3.3: FlashAttention by tiles, its checks and its speed
//   model.cu      the Transformer LM, AdamW, a training step; 1.1.3, 1.3 (b), gradient
//                 checkpointing, `train`, `model`
//   profile.cu    sections 1.1.4 and 1.1.6: which kernels a step spends its time in, where its
//                 memory goes
//   ddp.cu        sections 2 and 3: all-reduce, data parallel training in four ways, the sharded
//                 optimizer
//   fsdp.cu       the 2026 handout's sections 7 to 9: FSDP, the calculations, the 8.1B step
//   main.cu       the command line
//
// Letters, where a section does not define its own:
//   B batch, T positions (context length; the handout's S), C model width d_model, H heads,
//   D head size (C/H), F width of the feed-forward (d_ff), V vocabulary, L layers (in attention:
//   the logsumexp), N rows (usually B*T; in ddp.cu: ranks). A template's T is an element's
//   type.
//   dx is the gradient of the loss with respect to x. Shapes are row-major, the last index runs
//   fastest.
#pragma once
#include "lib/lib.h"

// -------------------------------------------------------------------------------------------------
// The command line; main.cu says which command takes which options.

struct Options {
    string command;     // its whole name
    set<string> given;  // the options that were typed, without dashes
    bool has(const char* name) const { return given.count(name) > 0; }
    vector<string> command_line;  // argv[1..]
    // What a command does not take stays empty, 0 or false; the rest has main.cu's defaults.
    string edition, device, format;
    vector<string> size, precision, mode;
    int d_model = 0, d_ff = 0, num_layers = 0, num_heads = 0, vocab_size = 0;
    int context_length = 0, batch_size = 0, steps = 0;
    vector<int> warmup, context_lengths;  // context_length: the first
    uint64_t seed = 0;
    bool quick = false;
    string checkpoint = "none";
    string trace, out, weights, batch, data, inputs, impl;
    bool causal = false;
    double rope_theta = 0, lr = 0;
    int sample = 0;
    string backend;
    int nproc = 0;
    double timeout = 0;  // seconds
    vector<double> bucket_size_mb;
    vector<string> words;  // of reproduce: problems; empty: all
    // The calculations'; bytes and FLOP by powers of ten
    double bandwidth_gb = 0, tflops = 0, tensor_mb = 0;
    int tokens = 0, fsdp = 0, tp = 0, devices = 0;
};

// -------------------------------------------------------------------------------------------------
// precision.cu: what autocast does

void print_toy_models();  // benchmarking_mixed_precision (a) and (b): their tables and answers

// fp16's loss scaling (PyTorch's GradScaler): a step whose gradients hold inf or NaN is skipped and
// the scale halved; after `growth_interval` good steps in a row it doubles.
struct LossScaler {
    float scale = 65536;
    int good_steps = 0, growth_interval = 2000;
};
void update_scale(LossScaler& scaler, bool found_inf);

// -------------------------------------------------------------------------------------------------
// layers.cu: the ops of the model, in the order of the forward pass; each runs in context.mode.

struct Layer {  // weights, as in the forward pass; o: output_proj; qkv and w13: the joined ones
    Tensor ln1, q, k, v, qkv, o, ln2, w1, w3, w13, w2;
};
// *x += delta (if any); returns rmsnorm(*x). x, delta and the result [B,T,C], weight [C].
Tensor add_rmsnorm(Tensor* x, const Tensor& delta, const Tensor& weight, float eps);
Tensor rope_table(int64_t T, int64_t D, float theta, DType dtype);
// [B,T,C], before output_proj
Tensor self_attention(const Layer& layer, const Tensor& y, const Tensor& rope, int H);
// silu(y w1^T) * (y w3^T): [B,T,C] -> [B,T,F]
Tensor swiglu(const Layer& layer, const Tensor& y);
// mean over all positions, []; targets I32 [B,T]
Tensor cross_entropy(const Tensor& logits, const Tensor& targets);
// cross_entropy(linear(y, head), targets), `chunk` rows of the logits at a time.
Tensor chunked_loss(const Tensor& y, const Tensor& head, const Tensor& targets, int64_t chunk);

struct AdamW {
    float lr = 1e-3f, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, weight_decay = 0.01f;
};

// -------------------------------------------------------------------------------------------------
// model.cu: the handout's Transformer LM (pre-norm, RMSNorm, RoPE, SwiGLU, no biases, untied head).
// Layouts: activations [B,T,C]; Linear weights [out,in]; the fused mode's joined weights are ranges
// of the same arena: qkv [3C,C], w13 [2F,C].

struct ModelConfig {
    string name;  // "small" ... "xl (2026)", "10B", "8B", or "custom"
    int d_model, d_ff, num_layers, num_heads, vocab_size;
    float rope_theta = 10000, eps = 1e-5f;
};
// The handouts' table 1, vocabulary 10,000; and 8B, the 2026 leaderboard's.
extern const vector<ModelConfig> model_sizes;
// what --d_model, --d_ff, ... name, else --size; checked
vector<ModelConfig> configs_of(const Options& o);

struct Parameter {
    string name;  // the staff model's state_dict key
    Shape shape;
    int64_t offset;  // in elements, the same in each arena
    Tensor weight;   // a view into Model::weights, with its gradient slot
    // FSDP gathers those of a unit together: 0 the embedding, 1 + l block l, L + 1 the head; -1:
    // norms
    int unit = -1;
};
struct Model {
    ModelConfig config;
    // in backward order: the first is the first whose gradient is ready
    vector<Parameter> parameters;
    // Arenas, all laid out alike: gradients after make_gradients, m and v after
    // make_optimizer_state, else null.
    Tensor weights, gradients, m, v;
    Tensor embedding, ln_final, lm_head;
    vector<Layer> layers;
    // every tensor with a Gradient: each parameter's, and the joined qkv and w13
    vector<Tensor> slots;
    Tensor rope;   // [T,D]: cos and sin of each pair's angle, interleaved
    int step = 0;  // optimizer steps taken
    // FSDP's hooks, else null: called before the ops of a unit, in forward and again in backward.
    function<void(int unit)> pre_forward, pre_backward;
    shared_ptr<void> fast;  // what fast/ keeps with the model
};
int64_t aligned(int64_t elements);  // up to the next multiple of 64: 256 bytes of fp32
// weights allocated on context.device, not set
Model make_model(const ModelConfig& c, DType dtype = weight_dtype());
// The same in two steps, for those who put the weights elsewhere.
Model lay_out_model(const ModelConfig& c);
// Gives the tensor, with a gradient slot, for parameter p, or for p and those after it that are one
// product with it.
using Place = function<Tensor(const Parameter& p, const Shape& shape)>;
void place_weights(Model& model, const Place& place);
// normal; Linear std sqrt(2/(in+out)), embedding 1
void init_weights(const Model& model, uint64_t seed);
void init_weight(const Tensor& weight, const string& name, uint64_t seed);
// for timed runs: fast/ may keep its weights in a form of its own
Model random_model(const ModelConfig& c, uint64_t seed);
// An arena for the gradients. Without it each lives from its first use to zero_gradients, as
// backward gave it.
void make_gradients(Model& model);
void make_optimizer_state(Model& model);  // m and v, zero, once
void zero_gradients(const Model& model);  // from here on the first writer overwrites
// what a forward needs besides the weights; forward calls it
void make_ready(Model& model, int64_t T);
// tokens I32 [B,T] -> logits [B,T,V]. With context.checkpoint backward needs the model as it was,
// at its address.
Tensor forward(Model& model, const Tensor& tokens);
// without a tape; the next call may overwrite them
Tensor infer(Model& model, const Tensor& tokens);
Checkpointing checkpointing_from(const string& name);  // usage_error if there is none

// -------------------------------------------------------------------------------------------------
// model.cu: a training step

struct Batch {
    Tensor tokens, targets;  // I32 [B,T]
};
Batch random_batch(int B, int T, int V, uint64_t seed);  // uniform in [0, V)
Tensor forward_to_loss(Model& model, const Batch& batch);
void backward_from_loss(const Model& model, const Tensor& loss, float loss_scale);
// Leaves the gradients, multiplied by loss_scale; returns the loss, [], without it. `between`: when
// forward is done.
Tensor forward_backward(
    Model& model, const Batch& batch, float loss_scale, const function<void()>& between = [] {});
// over all gradients; inf or NaN if one of them is; waits for the device
double gradient_norm(const Model& model);
// Clips to max_norm (0: does not), unscales, and returns the gradients' true norm (0 without
// clipping, unless in fp16). Steps unless that is not finite; in fp16 the loss scale then halves.
double optimizer_step(Model& model, const AdamW& adamw, LossScaler& scaler, double max_norm);
// The same for gradients that lie elsewhere.
double guarded_step(LossScaler& scaler, double max_norm,
                    const function<double()>& norm_of_gradients,
                    const function<void(float gradient_scale)>& step);

// FORWARD: without a tape; STEP: with the optimizer's
enum Phase { FORWARD, FORWARD_BACKWARD, STEP };
const char* name_of(Phase phase);
// `between` is called when a part is done and another follows.
void run_phase(
    Phase phase, Model& model, const Batch& batch, LossScaler& scaler,
    const function<void(Phase done)>& between = [](Phase) {});
// in context's mode and precision
size_t predicted_peak(const ModelConfig& c, int B, int T, Phase phase);

// A rank's step on the device's time line; marks part it, so that nothing waits in between:
//   | forward | head and loss | backward          | exposed | optimizer |   compute stream
//                             |   [all-reduce][all-reduce]  |               communication stream
template <class Number>
struct StepParts {
    Number forward{};        // with the head and the loss, unless these have a mark of their own
    Number head_and_loss{};  // has one in the 8.1B step only
    Number backward{};
    Number exposed{};  // until gradients are averages; FSDP: the waits for other ranks, in any part
    Number optimizer{};
    Number total{};
    Number communication{};  // of all collectives
    Number hidden{};         // the share of it that lies under backward
};
using StepTimes = StepParts<double>;   // ms, of one step
using StepPart = double StepTimes::*;  // names a part: &StepTimes::backward
struct StepMark {
    StepPart part;  // that begins here; null: the step ends
    Mark at;
};

// A model in training. A step is train_step, for one process and for ranks that share it.
struct Trainer {
    Communicator c;
    Model model;
    LossScaler scaler;
    AdamW adamw;          // of the model's own optimizer
    double max_norm = 0;  // gradients are clipped to it; 0: they are not
    int steps = 0;        // taken; the model's own are fewer where fp16 skipped some
    // Of the last step. norm: as optimizer_step returns it.
    double loss = 0, norm = 0;
    vector<StepMark> marks;
    // What ranks that share the step do besides: ddp.cu and fsdp.cu attach it. Null in one process.
    function<void()> before_step, after_backward, before_optimizer;
    function<double(Trainer& t)> step_optimizer;  // in place of the model's own
    function<void(const Trainer& t, StepTimes& times)> add_communication;
    bool sums_gradients = false;  // after_backward does, over the batches of a step
    shared_ptr<struct DataParallel> d;
    shared_ptr<struct Optimizer> sharded;
    shared_ptr<struct Fsdp> f;
};
// A step on this rank's batches, one backward each, of equal sizes; one batch only if `d` averages,
// or without an arena for the gradients. The loss is the mean over them. Waits for the device.
void train_step(Trainer& t, const vector<Batch>& batches);

// What an experiment runs.
vector<Precision> precisions_of(const Options& o);
// Those of --mode, checked; the default, flash, becomes fused where one of the models and
// precisions has no flash.
vector<Mode> modes_of(const Options& o, const vector<ModelConfig>& configs,
                      const vector<Precision>& precisions);
// "flash"; with all that the context may ask for "flash, recompute, checkpoint 4, head chunk 2048"
string caption_of(Mode mode);
// With context's precision, mode and checkpoint; B: sequences per rank.
string row_of(const ModelConfig& c, int B, int T, Phase phase);
inline double mib_of(double bytes) { return bytes / 1048576; }

// -------------------------------------------------------------------------------------------------
// attention.cu and flash.cu

void torch_compile_attention(const Options& o);  // torch_compile (a): its table and its answer
// Returns O by modes eager and fused, and leaves the backward on the tape.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal);
// Returns O [B,T,C] of causal attention, for the model in mode flash. q, k and v lie side by side
// in qkv [B,T,3C]; strides read and write them in place of transposes.
Tensor flash_self_attention(const Tensor& qkv, int H);
// Returns the fastest row with both passes by hand, or null if none takes this.
const struct AttentionImpl* fastest_flash(Device device, DType dtype, int64_t D);
// Returns the same; it is a usage error if no row takes this.
const AttentionImpl& require_flash(Device device, DType dtype, int64_t D);

// -------------------------------------------------------------------------------------------------
// profile.cu

// Chrome's trace format, which Perfetto opens; the caption goes into otherData. Rank 0 writes the
// traces of all ranks, one process a rank. Times count from the last midnight (UTC), the same for
// all ranks.
void write_trace(const string& path, const vector<Trace>& traces, const string& caption,
                 const Communicator& c = Communicator());
