// cs336.h: the map. What crosses the files of this folder; what lib/ offers is in lib/lib.h.
//   precision.cu  section 1.1.5: fp16 and bf16, sums, what autocast does, loss scaling
//   layers.cu     the Transformer's ops, each as formula, loop and kernel
//   attention.cu  1.2.1, 1.3 and 1.3.1: attention by its definition, with a fused softmax, and how
//                 both are timed; weighted_sum
//   flash.cu      1.3.2 and 1.3.3: FlashAttention by tiles, its checks and its speed
//   model.cu      the Transformer LM, AdamW, a training step; 1.1.3, 1.3 (b), gradient
//                 checkpointing
//   train.cu      `train` on a text, `model` on your weights
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

// Starts o.nproc ranks with the same command line; in a rank: joins them, and calls f.
inline int run_ranks(const Options& o, const function<void(const Communicator&)>& f) {
    if (!is_rank()) { return launch_ranks(o.nproc, o.command_line, o.timeout); }
    return join_ranks(o.has("nproc") ? o.nproc : 0, o.device, o.backend, o.timeout, f);
}

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
float loss_scale_of(const LossScaler& scaler);  // by which a backward begins: 1 but in fp16

// -------------------------------------------------------------------------------------------------
// attention.cu: O = softmax(Q K^T / sqrt(D)) V; q [B,H,Tq,D], k and v [B,H,Tk,D] -> [B,H,Tq,D], any
// strides. Causal: query i sees keys j <= i, counted from the start, also where Tq != Tk. L
// [B,H,Tq] fp32 (if wanted): the logsumexp of each row, L_i = log sum_j exp(S_ij).
// In formulas S is the scores; in experiments it is the length of a sequence, as in the handout.

struct AttentionTensors {
    Tensor q, k, v;  // shapes as above; o and L, too
    bool causal;
    Tensor dO{};  // null: forward only, and dq, dk and dv stay null
    Tensor o{}, L{}, dq{}, dk{}, dv{};
};
// A loop or a kernel sees a [B,H,T,D] tensor as this: element (b,h,t,d) is at
// data[b*batch + h*head + t*row + d].
struct Heads {
    void* data;
    int64_t batch, head, row;  // in elements
};
// Returns the address of the first row of head h of sequence b.
template <class T>
HD inline T* head_of(const Heads& x, int b, int h) {
    return (T*)x.data + b * x.batch + h * x.head;
}
// The causal mask: query i sees keys 0 to keys_seen - 1. (Naive makes it a tensor; kernels in tiles
// know it by tile.)
HD inline int keys_seen(bool causal, int i, int Tk) { return causal && i + 1 < Tk ? i + 1 : Tk; }
// The arguments of a kernel of flash.cu or fast/.
struct AttentionArgs {
    Heads q, k, v, o, dO, dq, dk, dv;
    float* L;  // [B,H,Tq]
    int B, H, Tq, Tk;
    float scale;  // 1/sqrt(D)
    bool causal;
};
AttentionArgs args_of(const AttentionTensors& t);
// A row of the table of implementations.
struct AttentionImpl {
    const char* name;
    Device device;
    int rung;  // of the ladder from the plainest to the fastest
    bool (*takes)(DType dtype, int64_t D);
    // Either `run` does the forward and leaves the backward on the tape ...
    Tensor (*run)(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, Tensor* L);
    // ... or the row has both passes by hand: forward writes o and L, backward reads them and
    // writes dq, dk and dv.
    void (*forward)(const AttentionTensors& t);
    void (*backward)(const AttentionTensors& t);
};
// Returns whether flash has kernels for this head size: 16, 32, 64, 80 and 128.
bool flash_head_size(int64_t D);
// Returns the fastest row with both passes by hand, or null if none takes this.
const AttentionImpl* fastest_flash(Device device, DType dtype, int64_t D);
// Returns the same; it is a usage error if no row takes this.
const AttentionImpl& require_flash(Device device, DType dtype, int64_t D);
// Returns O by modes eager and fused, and leaves the backward on the tape.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal);
// Returns O [B,T,C] of causal attention, for the model in mode flash. q, k and v lie side by side
// in qkv [B,T,3C]; strides read and write them in place of transposes.
Tensor flash_self_attention(const Tensor& qkv, int H);

// What experiments measure of the rows of the table.
struct AttentionCase {
    int B, H, Tq, Tk, D;
    bool causal;
};
enum AttentionPass { FORWARD_PASS, BACKWARD_PASS, BOTH_PASSES, ATTENTION_PASSES };
struct PassTimes {
    Stats ms[ATTENTION_PASSES]{};
    size_t held = 0;  // bytes when backward starts: the inputs, and what forward saved
    size_t oom = 0;   // bytes that the passes need, where these do not fit; else 0
};
struct AttentionRun {
    int S, D;
    DType dtype;
    PassTimes naive{}, other{};  // other: fused in torch_compile, flash in flash_benchmarking
};
using AttentionRuns = vector<AttentionRun>;
// A timer returns the times of f in ms, run after run, each behind `prepare`, which is not timed.
// It decides how many runs there are.
using Job = function<void()>;
using PassTimer = function<Stats(const Job& prepare, const Job& f)>;
struct Effort {
    PassTimer time;
    // Times a forward with its backward, too. 1.2.1 and 1.3 ask for the passes alone, so there it
    // would only take time.
    bool both_passes;
};
// Returns normal inputs with a dO, on context.device.
AttentionTensors random_inputs(const AttentionCase& c, DType dtype, uint64_t seed);
// Calls `pass`, unless memory is only counted (META).
void run_pass(void (*pass)(const AttentionTensors&), const AttentionTensors& t);
// Returns O and L; and dQ, dK and dV if there is a dO.
vector<Tensor> outputs_of(const AttentionImpl& impl, const AttentionTensors& in);
// Returns the row with this name on context.device; "auto" is the fastest flash, or else fused. It
// is a usage error if the row does not take this.
const AttentionImpl& impl_named(const string& name, DType dtype = F32, int64_t D = 64);
PassTimes pass_times(const AttentionImpl& impl, const AttentionCase& c, DType dtype,
                     const Effort& effort);
// Return cells of a table: "1.234" or "OOM (61.2 GiB)", and "2.34x".
string ms_cell(const PassTimes& t, AttentionPass pass);
string speedup_cell(const AttentionRun& r, AttentionPass pass);
// Returns the end of a sentence, "faster in 17 of the 20 configurations that fit (...) ...".
string compared(const AttentionRuns& runs, AttentionPass pass);
// Times naive and another implementation (null: naive alone) at each head size and length.
AttentionRuns time_all(const AttentionImpl* other, int B, bool causal, DType dtype,
                       const vector<int>& lengths, const Effort& effort);

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
void check_config(const ModelConfig& c);  // refuses heads that RoPE cannot turn

struct Parameter {
    string name;  // the staff model's state_dict key
    Shape shape;
    int64_t offset;  // in elements, the same in each arena
    Tensor weight;   // a view into Model::weights, with its gradient slot
    // FSDP gathers those of a unit together: 0 the embedding, 1 + l block l, L + 1 the head; -1:
    // norms
    int unit = -1;
};
struct Layer {  // weights, as in the forward pass; o: output_proj; qkv and w13: the joined ones
    Tensor ln1, q, k, v, qkv, o, ln2, w1, w3, w13, w2;
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
string name_of(const Checkpointing& k);                // as --checkpoint takes it
Checkpointing checkpointing_from(const string& name);  // usage_error if there is none

// The ops of layers.cu, in the order of the forward pass; each runs in context.mode.
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

// -------------------------------------------------------------------------------------------------
// model.cu: AdamW, a training step

struct AdamW {
    float lr = 1e-3f, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, weight_decay = 0.01f;
};
struct AdamWScalars {  // of one step
    float decay, beta1, beta2, eps, step_size, gradient_scale;
};
AdamWScalars scalars_of(const AdamW& a, int t, float gradient_scale);  // t: the step, from 1
// Of one element. bf16 is rounded once, as it is stored: what PyTorch's fused AdamW does.
template <class P, class G>
HD inline void adamw_element(P* p_io, G g_in, P* m_io, P* v_io, AdamWScalars s) {
    Wide<P> p = *p_io, m = *m_io, v = *v_io, g = (Wide<P>)g_in * s.gradient_scale;
    m = s.beta1 * m + (1 - s.beta1) * g;
    v = s.beta2 * v + (1 - s.beta2) * g * g;
    p = p * s.decay - s.step_size * m / (std::sqrt(v) + s.eps);
    *p_io = p, *m_io = m, *v_io = v;
}
struct FlatGradient {
    Tensor g;
    int64_t offset;  // of its weights and moments, in their arenas
};
double square_sum(const vector<FlatGradient>& gradients);  // waits for the device
// over all gradients; inf or NaN if one of them is; waits for the device
double gradient_norm(const Model& model);
// For flat p, m and v; t: the step, from 1.
void adamw_update(const Tensor& p, const vector<FlatGradient>& gradients, const Tensor& m,
                  const Tensor& v, const AdamW& a, int t, float gradient_scale = 1);
using AdamWUpdate = void(const Tensor& p, const vector<FlatGradient>& gradients, const Tensor& m,
                         const Tensor& v, AdamWScalars s);
AdamWUpdate adamw_plain;  // the plain way of the same

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
// Clips to max_norm (0: does not), unscales, and returns the gradients' true norm (0 without
// clipping, unless in fp16). Steps unless that is not finite; in fp16 the loss scale then halves.
double optimizer_step(Model& model, const AdamW& adamw, LossScaler& scaler, double max_norm);
// The same for gradients that lie elsewhere.
double guarded_step(LossScaler& scaler, double max_norm,
                    const function<double()>& norm_of_gradients,
                    const function<void(float gradient_scale)>& step);

// The fused ops of layers.cu, below the tape: each reads its last tensors and writes its first.
struct LayerOps {
    // A null delta: x is x_in.
    void (*add_rmsnorm)(const Tensor& y, const Tensor& x, const Tensor& r, const Tensor& x_in,
                        const Tensor& delta, const Tensor& w, float eps);
    // A null dx_low: nobody wants this copy of dx. `add`: to what the gradient holds.
    void (*rmsnorm_backward)(const Tensor& dx, bool add_dx, const Tensor& dx_low, const Tensor& dw,
                             bool add_dw, const Tensor& dy, const Tensor& x, const Tensor& r,
                             const Tensor& w);
    // Moves from qkv to q, k and v, and rotates; `backward`: the other way round. Null q, k and v:
    // rotates within qkv.
    void (*rotate)(const Tensor& qkv, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& rope, bool backward);
    void (*swiglu)(const Tensor& g, const Tensor& h);
    void (*swiglu_backward)(const Tensor& dh, const Tensor& dg, const Tensor& h);
};
// What fast/ does in place of the plain ways, or besides; null without it.
struct FastWays {
    const LayerOps* layers;  // on the GPU
    AdamWUpdate* adamw;
    // It may keep a model's weights, in their place, in a form that only forward, backward and
    // AdamW can read. Whoever else reads or writes them restores them first.
    void (*keep_weights)(Model& model);
    void (*ready_weights)(Model& model);  // for a forward in this context
    void (*restore_weights)(Model& model);
    // The same for FSDP's part of a unit. Where it is kept so, `part` becomes a view in the dtype
    // that products take, while AdamW goes on with the shard's.
    void (*keep_part)(Tensor& part, DType products);
    bool (*restore_part)(Tensor& part);  // false: it was plain
    // CUDA graphs.
    bool (*graphs_take)(const Model& model);  // in this context
    Tensor (*forward_backward)(Model& model, const Batch& batch, float loss_scale,
                               const function<void()>& between);
    Tensor (*infer)(Model& model, const Tensor& tokens);
    // NCCL beside products; both of the first are collective.
    void (*allocate_shared)(const Communicator& c, const function<void()>& f);
    void (*free_shared)(const Communicator& c);
    WorkPtr (*all_reduce_beside)(const Communicator& c, const Tensor& t, Reduction how);
    WorkPtr (*run_behind)(const WorkPtr& work, const function<void()>& f);
};
inline FastWays fast_ways;
// Runs f, in which all ranks allocate what collectives move.
inline void allocate_shared(const Communicator& c, const function<void()>& f) {
    if (fast_ways.allocate_shared) {
        fast_ways.allocate_shared(c, f);
    } else {
        f();
    }
}

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
using StepStats = StepParts<Stats>;    // ms, of several
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

// -------------------------------------------------------------------------------------------------
// ddp.cu: data parallel training. Every rank has the same weights and its own part of the batch;
// gradients are averaged.

enum Strategy { NO_SYNC, NAIVE, FLAT, OVERLAPPED, BUCKETED };
const char* name_of(Strategy s);
Trainer data_parallel_trainer(const Communicator& c, Model model, Strategy strategy,
                              double bucket_mb);

enum Sharding {
    UNSHARDED,  // every rank steps all weights
    // the handout's: gradients are averaged before; each rank steps its shard, then sends it to all
    BROADCAST,
    // reduce-scatter of the gradients, each rank steps its shard, all-gather of the weights
    ZERO1,
};
// of an optimizer that steps each element by itself, so that any range can be a shard
struct ParameterGroup {
    Tensor weights, gradients;  // flat
    AdamW adamw{};
    Tensor m{}, v{};  // AdamW's, of the own shard, allocated at its first step
    int step = 0;
};
// Counts a step of the weights `own`, and allocates their moments before the first one.
void begin_adamw_step(ParameterGroup& group, const Tensor& own);
// The root of all ranks' sums: the same on all, so all of them step, or none. It is infinite
// from 1.8e19 on.
double norm_over_ranks(const Communicator& c, double square_sum);
Trainer sharded_trainer(const Communicator& c, Model model, Sharding sharding,
                        const AdamW& adamw = {});

// N ranks against one process
constexpr int ROWS = 10, POSITIONS = 8, VOCABULARY = 100;  // rows: of each rank
// a rank's part of it, as n batches
vector<Batch> part_of(const Batch& all, const Communicator& c, int n);
// A step of `ours` on the ranks' parts of a random batch, cut into so many, and of `whole` on all
// of it.
void train_both(const Communicator& c, Trainer& ours, Trainer& whole, uint64_t seed,
                int batches = 1);
struct WeightsCheck {  // of several ranks' weights against those of one process
    string way, what;
    double max = 0, sum = 0;  // of the differences
    int64_t n = 0;            // differences
    bool match = true;        // they are within the bounds, and all ranks hold the same bits
};
// Prints table and answer; fails if a row differs.
void print_checks(const Communicator& c, const string& caption, const vector<WeightsCheck>& checks,
                  const string& what);
void compare(WeightsCheck& d, const Tensor& got, const Tensor& want, double atol = 1e-6,
             double rtol = 1e-5);
bool same_bits_everywhere(const Communicator& c, const Tensor& t);  // collective

// -------------------------------------------------------------------------------------------------
// ddp.cu: what several ranks run

// For what several ranks run: one model, in one precision and mode, which the context gets;
// --quick's defaults.
ModelConfig choose_step(Options& o, const Communicator& c);
string caption_of(const Options& o, const ModelConfig& m, const Communicator& c);
double parameters_of(const ModelConfig& m);
size_t room_of_each_rank(const Communicator& c);  // bytes, the least of all ranks'
// What a rank holds at most in two steps, each of n batches, predicted on META.
using MakeTrainer = function<Trainer(const Communicator& c)>;
size_t steps_peak(int world, const Options& o, const MakeTrainer& make, int n);

// A way to train: what its steps take.
struct WayRun {
    string name;
    // peak of a rank, in bytes; oom: the same where it does not fit, else 0
    size_t predicted = 0, oom = 0;
    StepStats ms{};   // the mean over the ranks
    double loss = 0;  // of the last step, likewise
    MemoryUse use{};  // of this rank, in these steps
};
// Where it fits, makes a trainer, warms up, and times steps of n batches. `see` is called before
// the first step and after each, also of the warm-up.
void run_way(
    WayRun& r, const Communicator& c, const Options& o, const MakeTrainer& make, int n = 1,
    const function<void(Trainer& t)>& see = [](Trainer&) {});
// With --trace, behind a way's last timed step: one more. name: a literal, for its range.
void trace_step(Trainer& t, const char* name, const Options& o, const ModelConfig& config,
                vector<Trace>& traces);
// True in rank 0 of several, where one way ran, or all did; else it says why not. Fails where none
// did.
bool can_compare(const Communicator& c, const vector<WayRun>& runs, bool all = true);
// A row for each way: a step's time and its parts, or the bytes that it did not find.
Table step_table(const string& caption, const char* what);
void add_step(Table& table, const WayRun& r);
inline double mib_of(double bytes) { return bytes / 1048576; }
inline string mib_cell(double bytes) { return strprintf("%.1f", mib_of(bytes)); }
// Every rank's values, of plain types, rank by rank.
template <class T>
vector<T> gather(const Communicator& c, const vector<T>& mine) {
    const string bytes =
        join(gather_text(c, {(const char*)mine.data(), mine.size() * sizeof(T)}), "");
    vector<T> all(bytes.size() / sizeof(T));
    memcpy((void*)all.data(), bytes.data(), bytes.size());
    return all;
}
double mean_over_ranks(const Communicator& c, double mine);

// -------------------------------------------------------------------------------------------------
// profile.cu

// Chrome's trace format, which Perfetto opens; the caption goes into otherData. Rank 0 writes the
// traces of all ranks, one process a rank. Times count from the last midnight (UTC), the same for
// all ranks.
void write_trace(const string& path, const vector<Trace>& traces, const string& caption,
                 const Communicator& c = Communicator());

// -------------------------------------------------------------------------------------------------
// The commands

using RunCommand = int(const Options& o);
// precision.cu
RunCommand cmd_mixed_precision_accumulation;
// model.cu
RunCommand cmd_benchmarking_script, cmd_benchmarking_mixed_precision, cmd_torch_compile;
RunCommand cmd_gradient_checkpointing;
// train.cu
RunCommand cmd_model, cmd_train;
// profile.cu
RunCommand cmd_nsys_profile, cmd_memory_profiling;
// attention.cu
RunCommand cmd_pytorch_attention, cmd_weighted_sum;
void torch_compile_attention(const Options& o);  // torch_compile (a): its table and its answer
// flash.cu
RunCommand cmd_flash_forward, cmd_flash_backward, cmd_flash_benchmarking;
RunCommand cmd_flash_leaderboard, cmd_attention;
// ddp.cu
RunCommand cmd_distributed_communication_single_node, cmd_naive_ddp, cmd_naive_ddp_benchmarking;
RunCommand cmd_minimal_ddp_flat_benchmarking, cmd_ddp_overlap_individual_parameters;
RunCommand cmd_ddp_overlap_individual_parameters_benchmarking, cmd_ddp_overlap_bucketed,
    cmd_ddp_bucketed_benchmarking;
RunCommand cmd_optimizer_state_sharding, cmd_optimizer_state_sharding_accounting,
    cmd_communication_accounting;
// fsdp.cu
RunCommand cmd_fsdp, cmd_fsdp_accounting, cmd_leaderboard, cmd_alternate_ring_all_reduce;
RunCommand cmd_data_parallel_calcs, cmd_fsdp_calcs, cmd_tp_calcs, cmd_fsdp_tp_calcs;
