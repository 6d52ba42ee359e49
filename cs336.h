// cs336.h: what most files of this folder share; what lib/ offers is in lib/lib.h. Look things up
// here: first the letters, then the Options, then each file's offer, in the order of reading.
//   precision.cu  1.1.5: fp16 and bf16, sums, what autocast does, loss scaling
//   layers.cu     the Transformer's ops and AdamW: formula, loop and kernel, or one body for both
//   model.cu      the Transformer LM and a step; 1.1.3, 1.1.5 (c), 1.3 (b), checkpointing
//   attention.cu  1.2.1 to 1.3.1: attention by its definition, then with its softmax fused
//   flash.cu      1.3.2: FlashAttention by tiles
//   flash_commands.cu    1.3.2, 1.3.3: its checks and its speed
//   profile.cu    1.1.4 and 1.1.6: which kernels take a step's time, and where its memory goes
//   communication.cu     2.1, 2.4; 2026's 8: all-reduce; how many devices communication allows
//   ddp.cu        2.2, 2.3, 3: data parallel training in four ways, the sharded optimizer
//   fsdp.cu       the 2026 handout's 7 and 9: FSDP, the 8.1B step
//   train.cu      `train` on a text, `model` on your weights;  main.cu  the command line
// Fewer files share attention.h, ddp.h, and fast_ways.h: what fast/ does in place of plain ways.
//
// Letters, where a section does not define its own:
//   B batch, T positions (context length; the handout's S), C model width d_model, H heads,
//   D head size (C/H), F width of the feed-forward (d_ff), V vocabulary, L layers (in attention:
//   the logsumexp), N rows (usually B*T; or ranks). A template's T is an element's type.
//   dx is the gradient of the loss with respect to x. Shapes are row-major, the last index fastest.
#pragma once
#include "lib/lib.h"

// -------------------------------------------------------------------------------------------------
// What the command line asks for. main.cu says which command takes which options.

struct Options {
    string command;     // its whole name
    set<string> given;  // the options that were typed, without dashes
    bool has(const char* name) const { return given.count(name); }
    vector<string> command_line;  // argv[1..]
    // An option that is not taken stays empty, 0, false or "none"; an untyped one has its default.
    string edition, device, format;
    vector<string> size, precision, mode;
    int d_model = 0, d_ff = 0, num_layers = 0, num_heads = 0, vocab_size = 0;
    int context_length = 0, batch_size = 0, steps = 0;
    vector<int> warmup, context_lengths;  // context_length is the first of its list
    uint64_t seed = 0;
    bool quick = false, causal = false;
    string checkpoint = "none";
    string trace, out, weights, batch, data, inputs, impl;
    float rope_theta = 0, lr = 0;
    int sample = 0;
    string backend;
    int nproc = 0;
    double timeout = 0;  // seconds
    set<double> bucket_size_mb;
    vector<string> words;  // the problems that reproduce runs; empty: all
    // Of the calculations; bytes and FLOP by powers of ten.
    double bandwidth_gb = 0, tflops = 0, tensor_mb = 0;
    int tokens = 0, fsdp = 0, tp = 0, devices = 0;
};

// -------------------------------------------------------------------------------------------------
// precision.cu

void print_toy_models();  // prints the table and answers of benchmarking_mixed_precision (a), (b)

// fp16's loss scaling (PyTorch's GradScaler): if a step's gradients hold inf or NaN, the step is
// skipped and the scale halves; after `growth_interval` good steps in a row the scale doubles.
struct LossScaler {
    float scale = 65536;
    int good_steps = 0, growth_interval = 2000;
};
void update_scale(LossScaler& scaler, bool found_inf);
float loss_scale_of(const LossScaler& scaler);  // returns the scale in fp16, else 1

// -------------------------------------------------------------------------------------------------
// layers.cu: the model's ops, in the order of the forward pass. Each leaves its backward on the
// tape. All but chunked_loss, which has one form, run in context.mode. rope_table is no op.

// The weights of a block, in the order of the forward pass; o is output_proj. The fused op takes q,
// k and v as one product, and w1 and w3 as one: qkv [3C,C] and w13 [2F,C] are these joined weights,
// on the same memory as their parts, which lie side by side.
struct Layer {
    Tensor ln1, q, k, v, qkv, o, ln2, w1, w3, w13, w2;
};
// Adds delta to *x unless it is null, and returns rmsnorm(*x). x, delta and the result are [B,T,C],
// weight is [C]. In the fused form both *x and weight have gradients, or neither has.
Tensor add_rmsnorm(Tensor* x, const Tensor& delta, const Tensor& weight, float eps);
// Returns [T,D]: cos and sin of each pair's angle, interleaved, at positions 0 to T - 1.
Tensor rope_table(int64_t T, int64_t D, float theta, DType dtype);
// Returns the heads' outputs side by side, [B,T,C], before output_proj.
Tensor self_attention(const Layer& layer, const Tensor& y, const Tensor& rope, int H);
// Returns silu(y w1^T) * (y w3^T): [B,T,C] -> [B,T,F].
Tensor swiglu(const Layer& layer, const Tensor& y);
// Returns the mean over all positions, []; targets are I32 [B,T].
Tensor cross_entropy(const Tensor& logits, const Tensor& targets);
// Returns cross_entropy(linear(y, head), targets), and makes `chunk` rows of the logits at a time.
Tensor chunked_loss(const Tensor& y, const Tensor& head, const Tensor& targets, int64_t chunk);

// -------------------------------------------------------------------------------------------------
// model.cu: the handout's Transformer LM (pre-norm, RMSNorm, RoPE, SwiGLU, no biases, untied head).
// Layouts: activations [B,T,C]; Linear weights [out,in].

struct ModelConfig {
    string name;  // "small" ... "xl (2026)", "10B", "8B", "custom", or "lm" in checks
    int d_model, d_ff, num_layers, num_heads, vocab_size = 10000;
    float rope_theta = 10000, eps = 1e-5f;
};
using ModelConfigs = vector<ModelConfig>;
// The sizes of both handouts' tables 1, with vocabulary 10,000, and the 2026 leaderboard's 8B.
extern const ModelConfigs model_sizes;
// Returns the typed sizes, else the one that --d_model, --d_ff, ... make, else --size's default.
ModelConfigs configs_of(const Options& o);
void check_config(const ModelConfig& c);  // refuses heads that RoPE cannot turn

// An arena is one flat tensor with a value for each weight: the weights, their gradients, or one of
// AdamW's two moments. All arenas are laid out alike. A unit is what FSDP gathers at once: unit 0
// is the embedding, 1 + l is block l, and L + 1 is the head.
constexpr int NORMS = -1;  // no unit's number: an RMSNorm's weights, which every rank keeps
struct Parameter {
    string name;  // the staff model's state_dict key
    Shape shape;
    int64_t offset;  // where it begins in each arena, in elements
    Tensor weight;   // a view of the arena, or of its unit's buffer under FSDP; has a Gradient
    int unit = NORMS;
};
struct Model {
    ModelConfig config;
    vector<Parameter> parameters;  // about in the order in which backward finishes their gradients
    Tensor weights;                // an arena; under FSDP this rank's shard
    Tensor gradients, m, v;  // null until they are made; FSDP: the norms' gradients, m and v null
    Tensor embedding, ln_final, lm_head;
    vector<Layer> layers;
    // A slot is a tensor that has a Gradient: each parameter's weight, and each joined one.
    vector<Tensor> slots;
    Tensor rope;   // rope_table's
    int step = 0;  // steps of its own optimizer
    // Hooks of FSDP and leaderboard, else null: before a unit's ops; pre_backward not for the head.
    function<void(int unit)> pre_forward, pre_backward;
    shared_ptr<void> fast;  // what fast/ keeps with the model
};
int64_t aligned(int64_t elements);  // rounds up to a multiple of 64: 256 bytes of fp32
// Returns a model whose weights are zeros, on context.device.
Model make_model(const ModelConfig& c, DType dtype = weight_dtype());
// The same in two steps, for weights that lie elsewhere. lay_out_model returns a model without
// weights. place_weights calls `place` for each slot and enters what it returns. For q and w1 it
// calls twice, first with the shape of the joined weight, qkv or w13, then with p's own.
Model lay_out_model(const ModelConfig& c);
using Place = function<Tensor(const Parameter& p, const Shape& shape)>;
void place_weights(Model& model, const Place& place);
// Fill all weights, or one, with the staff model's deviations, not truncated: a Linear is normal
// with sqrt(2/(in+out)), the embedding with 1, and a norm is 1.
void init_weights(const Model& model, uint64_t seed);
void init_weight(const Tensor& weight, const string& name, uint64_t seed);
// Returns a model with such weights; fast/ may keep them in a form of its own.
Model random_model(const ModelConfig& c, uint64_t seed);
// Allocate, once, the gradients' arena and the moments'. Without an arena backward allocates each
// gradient by itself, and zero_gradients frees it.
void make_gradients(Model& model);
void make_optimizer_state(Model& model);
// Lets the next op that adds to a gradient overwrite it.
void zero_gradients(const Model& model);
// Makes RoPE's table long enough for T positions, and readies the weights. forward calls it.
void make_ready(Model& model, int64_t T);
// Returns the logits [B,T,V] of tokens I32 [B,T]. With context.checkpoint backward runs parts of
// forward again: until then the model may be neither changed nor moved.
Tensor forward(Model& model, const Tensor& tokens);
// Returns the same without a tape. The next call may overwrite these logits.
Tensor infer(Model& model, const Tensor& tokens);
// Convert to and from the words of --checkpoint; an unknown word is a usage error.
string name_of(const Checkpointing& k);
Checkpointing checkpointing_from(const string& name);

// -------------------------------------------------------------------------------------------------
// model.cu: a training step

struct AdamW {  // the defaults are PyTorch's; layers.cu says what differs
    float lr = 1e-3f, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, weight_decay = 0.01f;
};
struct Batch {
    Tensor tokens, targets;  // I32 [B,T]
};
Batch random_batch(int B, int T, int V, uint64_t seed);  // uniform in [0, V)
// forward_to_loss returns the loss, []. backward_from_loss adds loss_scale times its gradients.
Tensor forward_to_loss(Model& model, const Batch& batch);
void backward_from_loss(const Model& model, const Tensor& loss, float loss_scale);
// Leaves the gradients, multiplied by loss_scale, and returns the loss, [], without that factor.
// Calls `between` when forward is done.
Tensor forward_backward(
    Model& model, const Batch& batch, float loss_scale, const Job& between = [] {});
// Returns the norm of all gradients, inf or NaN if one of them is. Waits for the device.
double gradient_norm(const Model& model);
// Unscales the gradients, clips their norm to max_norm (0: does not), and steps. If clipping or
// fp16 needs the norm and it is not finite, no weight changes; in fp16 the loss scale then halves.
// Returns the norm before it was clipped, or 0 if nothing needs it.
double optimizer_step(Model& model, const AdamW& adamw, LossScaler& scaler, double max_norm);
// Does the same by the caller's norm and step, for gradients that lie elsewhere.
double guarded_step(LossScaler& scaler, double max_norm,
                    const function<double()>& norm_of_gradients,
                    const function<void(float gradient_scale)>& step);

// FORWARD runs without a tape; STEP is forward, backward and the optimizer.
enum Phase { FORWARD, FORWARD_BACKWARD, STEP };
const char* name_of(Phase phase);
// Runs a phase. Calls `between` when a part of it is done and another follows.
void run_phase(
    Phase phase, Model& model, const Batch& batch, LossScaler& scaler,
    const function<void(Phase done)>& between = [](Phase) {});
// Returns how many bytes a phase holds at most, in context's mode and precision.
size_t predicted_peak(const ModelConfig& c, int B, int T, Phase phase);

// A rank's step on the device's time line, cut by marks that a GPU records without waiting:
//   | forward | head and loss | backward          | exposed | optimizer |   compute stream
//                             |   [all-reduce][all-reduce]  |               communication stream
template <class Number>
struct StepParts {
    Number forward{};        // with the head and the loss, unless these have a mark of their own
    Number head_and_loss{};  // has one in the 8.1B step only
    Number backward{};
    Number exposed{};  // until gradients are averages; FSDP: the sum of the waits in all parts
    Number optimizer{};
    Number total{};
    Number communication{};  // of the gradients' all-reduces; FSDP leaves this and the next 0
    Number hidden{};         // what of it lies under backward
};
using StepTimes = StepParts<double>;   // ms, of one step
using StepPart = double StepTimes::*;  // names a part: &StepTimes::backward
struct StepMark {
    StepPart part;  // begins here; null: the step ends
    Mark at;
};

// A model in training: in one process, or on one of the ranks that share its steps.
struct Trainer {
    Communicator c;
    Model model;
    LossScaler scaler;
    AdamW adamw;                // of the model's own optimizer; FSDP and `sharded` have theirs
    double max_norm = 0;        // clips gradients; 0: not. Not read by `sharded`
    int steps = 0;              // taken; model.step has fewer where fp16 skipped some
    double loss = 0, norm = 0;  // of the last step; `sharded`'s norm only says whether it is finite
    vector<StepMark> marks;     // of the last step
    // What ranks that share the step do besides: ddp.cu and fsdp.cu set it. Null: nothing.
    Job before_step, after_backward, before_optimizer;
    function<double(Trainer& t)> step_optimizer;  // in place of the model's own
    function<void(const Trainer& t, StepTimes& times)> add_communication;
    shared_ptr<struct DataParallel> d;
    shared_ptr<struct Optimizer> sharded;
    shared_ptr<struct Fsdp> f;
};
// Takes a step on this rank's batches, all of one size, with a backward for each; t.loss is the
// mean of their losses. OVERLAPPED and BUCKETED (ddp.h) send during backward, so they take one
// batch only. Without make_gradients several batches may add up in 16 bits. Waits for the device.
void train_step(Trainer& t, const vector<Batch>& batches);

// Return the precisions of --precision, and the modes of --mode, checked. A flash that nobody typed
// becomes fused if flash cannot run one of the models in one of the precisions.
vector<Precision> precisions_of(const Options& o);
vector<Mode> modes_of(const Options& o, const ModelConfigs& configs);
// Returns "flash", or with what context adds "flash, recompute, checkpoint 4, head chunk 2048".
string caption_of(Mode mode);
// Returns how stderr calls a run, with context's precision, mode and checkpoint.
string row_of(const ModelConfig& c, int B, int T, Phase phase);
inline double mib_of(double bytes) { return bytes / 1048576; }
inline string mib_cell(double bytes) { return strprintf("%.1f", mib_of(bytes)); }

// -------------------------------------------------------------------------------------------------
// attention.cu and flash.cu. Shapes are those of attention.h.

void torch_compile_attention(const Options& o);  // prints torch_compile (a): table and answer
// Returns O by modes eager and fused, and leaves the backward on the tape.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal);
// Returns O [B,T,C] of causal attention, for the model in mode flash. q, k and v lie side by side
// in qkv [B,T,3C]; kernels address heads by strides, so nothing is transposed.
Tensor flash_self_attention(const Tensor& qkv, int H);
// Return the fastest FlashAttention for such tensors. If there is none, or for fp16 only
// flash_v1, fastest_flash returns null, and require_flash is a usage error.
const struct AttentionImpl* fastest_flash(Device device, DType dtype, int64_t D);
const AttentionImpl& require_flash(Device device, DType dtype, int64_t D);

// -------------------------------------------------------------------------------------------------
// profile.cu

// Writes Chrome's trace format, which Perfetto opens, unless path is empty; the caption and
// origin() go into otherData. Rank 0 writes the traces of all ranks, one process a rank. Times
// count from the midnight (UTC) before the rank's first range.
void write_trace(const string& path, const Traces& traces, const string& caption,
                 const Communicator& c = Communicator());
