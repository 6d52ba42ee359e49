// commands.h: what the experiments share and a reader of the core can leave out: options, plans, charts, the commands.
#pragma once
#include "cs336.h"
#include <array>

// ---------------------------------------------------------------------------------------------------------------------
// bench_step.cu: this machine's ceilings

// TFLOP/s of an n x n x n product of random numbers, the median of `runs`: what the card really gives.
double matmul_rate(Precision precision, int64_t n, int runs);
double copy_bandwidth(int64_t bytes, int runs);                   // GB/s read plus written, likewise
double dense_peak(Precision precision);                           // TFLOP/s that the card's maker names; NAN: not known
std::string percent_of_peak(double tflops, Precision precision);  // a cell; "-": not known
// TFLOP/s of a step's products on one GPU, whose batch is B.
double step_tflops(const ModelConfig& c, int64_t B, int64_t T, double ms);

// One model's passes, timed: benchmarking_script, torch_compile (b), benchmarking_mixed_precision (c).
struct PhaseRun {
    size_t oom = 0, peak = 0;  // bytes: that it would have held, where it did not fit; that it held
    Stats all{}, backward{};   // ms; backward: of it, between two synchronisations
    bool ran() const { return all.n > 0; }
};
struct StepRun {
    ModelConfig config;
    Precision precision;
    Mode mode;
    PhaseRun phase[3] = {};  // FORWARD, FORWARD_BACKWARD, STEP
};
struct WarmupRun {
    int warmup;
    PhaseRun forward, both;
};
void answer_step_times(const std::vector<StepRun>& runs);  // benchmarking_script (b), of one precision and mode
void answer_warmup(const std::vector<WarmupRun>& runs);    // (c), by the number of warm-up steps
void answer_torch_compile(const std::vector<StepRun>& vanilla, const std::vector<StepRun>& compiled);  // by size
// By precision, the others compared with the first, and within it by size.
void answer_mixed_precision(const std::vector<std::vector<StepRun>>& runs);

// ---------------------------------------------------------------------------------------------------------------------
// bench_checkpoint.cu: gradient_checkpointing
struct CheckpointStrategy {  // of N blocks
    std::string name;
    int checkpoint;  // as --checkpoint takes it
    // Inputs: tensors of the residual stream from between two blocks, the embedding's output among them, that are held
    // while a block runs. Blocks: those of which all residuals are held. Again: runs of a block in backward.
    const char *inputs, *blocks, *memory, *runs_again, *compute;
    int again = 0;    // counted
    size_t peak = 0;  // bytes
};
struct CheckpointRun {  // a model's step
    std::string size;
    int checkpoint;                                            // blocks per checkpoint, as --checkpoint takes it
    size_t predicted = 0, activations = 0, peak = 0, oom = 0;  // bytes; peak: measured; oom: needed, and not there
    Stats ms{};                                                // forward and backward
};
// (a), on a small model of N blocks; fails if a gradient changes.
std::vector<CheckpointStrategy> run_strategies(int N, uint64_t seed, int B, int T);
// (b), of c's step. really: also run, and not only predicted on META.
std::vector<CheckpointRun> run_sizes(const ModelConfig& c, const Options& o, bool really);
void answer_strategies(const std::vector<CheckpointStrategy>& all);  // (a); the first: none, the second: each block
// (b): asked, the handout's size, perhaps only predicted; run, the one that was measured.
void answer_sizes(const std::vector<CheckpointRun>& asked, const std::vector<CheckpointRun>& run);

// ---------------------------------------------------------------------------------------------------------------------
// profile.cu: what a trace says

struct KernelClass {
    const char* name;  // "matmul", "softmax", "elementwise", ...; "other": no rule knows the name
    bool tensor_cores;
};
KernelClass kernel_class(const std::string& kernel);     // by rules about names, which also hold for PyTorch's kernels
std::string short_kernel_name(const std::string& name);  // "void f<int>(float*)" -> "f<int>"
std::vector<std::string> range_paths(const Trace& trace);  // of each, e.g. "step/backward/layer/attention/softmax"
// Without kernels (on the CPU): each range as work of its own, for the time that was not spent in ranges inside it.
std::vector<TracedWork> work_of_ranges(const Trace& trace);
struct KernelSummary {  // all launches of one kernel
    std::string name;
    Stats ns;
    double total_ns() const { return ns.mean * ns.n; }
};
// Of the work in `range` and below it ("": of all work), by total time, the largest first.
std::vector<KernelSummary> kernel_summary(const Trace& trace, const std::string& range);
// Chrome's trace format, which Perfetto opens; the caption goes into otherData. Rank 0 writes the traces of all ranks,
// one process a rank. Times count from the last midnight (UTC), the same for all ranks.
void write_trace(const std::string& path, const std::vector<Trace>& traces, const std::string& caption,
                 const Communicator& c = Communicator());

enum ProfiledPart { ALONE, AND_BACKWARD, WHOLE_STEP, PROFILED_PARTS };  // forward; with loss and backward; all of it
struct PartProfile {                                                    // by the trace
    double ms = NAN;      // its kernels' own times, per pass; NAN: did not run, or no kernels were traced
    double matmul = NAN;  // % of ms
    std::string kernel;   // the one with the most time
    KernelClass is{"", false};
    double share = NAN, launches = NAN;                         // its % of ms; per pass
    std::vector<std::pair<std::string, double>> launched_in{};  // part of the model, launches per pass; most time first
};
struct ProfileRun {  // nsys_profile: one size and length in one precision and mode
    ModelConfig config;
    int B, T;
    bool gpu;                                             // else operations stand for kernels
    size_t forward_oom = 0, step_oom = 0, step_peak = 0;  // bytes
    Stats forward{}, step{};                              // ms by the clock
    double in_trace = NAN, in_kernels = NAN;              // ms: a forward in the trace, and the sum of its kernels
    std::string no_kernels = "";                          // why none were traced
    PartProfile parts[PROFILED_PARTS] = {};
    double adamw = NAN;                                       // ms per step
    double softmax = NAN, products = NAN;                     // ms per forward; softmax NAN: one kernel does both
    double element = 4;                                       // bytes of what is multiplied
    std::vector<std::pair<std::string, double>> others = {};  // than products: % of forward, most first
    std::vector<KernelSummary> kernels = {}, kernels_of_step = {};
};
void answer_nsys_profile(const std::vector<ProfileRun>& runs);  // of one precision and mode

// ---------------------------------------------------------------------------------------------------------------------
// memory.cu: what PyTorch's pickle of a memory snapshot holds, for pytorch.org/memory_viz
std::string snapshot_pickle(const std::vector<MemoryEvent>& log);

struct Allocation {  // of the log; `times` alike
    size_t bytes;    // each
    int times;
    Category category;
    std::string range, op, line;  // range "held": it was there before the log began
};
struct PhaseMemory {  // bytes
    size_t oom = 0, peak = 0, peak_by[CATEGORIES] = {};
    size_t all_gradients = 0;  // the most that are there at a time
};
struct BlockMemory {  // what one block saves for backward, bytes
    size_t oom = 0;
    std::map<std::string, int64_t> by_op = {};
    int64_t bytes = 0, copies = 0;  // all of it; of it 16-bit copies of weights, which go when backward ends
    int64_t change = 0;             // of memory, while backward goes over the block
    int64_t formula = 0;            // of its parameters' gradients
};
struct MemoryRun {  // memory_profiling: one size and length in one precision
    ModelConfig config;
    Precision precision;
    int B, T;
    bool predicted;                          // on META
    PhaseMemory forward{}, taped{}, step{};  // taped: a forward that keeps what backward needs
    std::vector<Allocation> largest = {};    // of forward
    size_t stream = 0;                       // bytes of the embedding's output
    BlockMemory block{};
};
// On context.device; pickles into `folder`, if any.
MemoryRun profile_memory(const ModelConfig& c, Precision precision, int B, int T, uint64_t seed,
                         const std::string& folder);
void answer_memory_profiling(const std::vector<MemoryRun>& runs);  // of one size

// ---------------------------------------------------------------------------------------------------------------------
// bench_ddp.cu

struct AllReduceRun {  // of one size
    bool nccl;         // else Gloo
    Device device;
    int ranks;
    double mb;
    Stats ms{};      // over all steps and ranks
    size_t oom = 0;  // bytes, where it did not fit
};
void answer_distributed_communication_single_node(const std::vector<AllReduceRun>& runs,
                                                  const std::vector<std::string>& missing);
struct WeightsCheck {  // of several ranks' weights against those of a reference
    std::string model, what;
    double max = 0, sum = 0;  // of the differences
    int64_t n = 0;            // differences
    bool match = true, same_bits = true;
    int calls = 0;            // all-reduces per step
    std::string shares = "";  // of a sharded optimizer: elements of state by rank
    int64_t whole = 0;        // unsharded
};
void answer_weights(const std::vector<WeightsCheck>& checks, const std::string& what);
// Prints table and answer; fails if a row differs.
void print_checks(const Communicator& c, const Table& table, const std::vector<WeightsCheck>& checks,
                  const std::string& what);
void compare(WeightsCheck& d, const Tensor& got, const Tensor& want, double atol = 1e-6, double rtol = 1e-5);
bool same_bits_everywhere(const Communicator& c, const Tensor& t);  // collective
struct DdpRun {  // steps of one way. Times in ms, over the steps; communication: of the all-reduces themselves
    Strategy strategy;
    double bucket_mb = 0;
    Stats total{}, forward{}, backward{}, exposed{}, optimizer{}, communication{}, hidden{};
    int calls = 0;
    double mb = 0, loss = 0;  // mb: all-reduced per step; loss: of the last step
    size_t oom = 0;
};
struct BucketModel {  // overhead = s/(n w) + n o with n buckets: bytes, ms, bytes per ms
    double s, o, w;
};
void answer_naive_ddp_benchmarking(const std::vector<DdpRun>& runs);
void answer_minimal_ddp_flat_benchmarking(const std::vector<DdpRun>& runs);
void answer_ddp_overlap_individual_parameters_benchmarking(const std::vector<DdpRun>& runs);
void answer_ddp_bucketed_benchmarking(const std::vector<DdpRun>& runs, const BucketModel& m);
struct ShardingRun {
    Sharding sharding;
    std::vector<std::pair<const char*, MemoryUse>> peaks{};  // moment, peak since the one before
    Stats total{}, gradients{}, optimizer{};                 // ms
    double mb_sent = 0;
    size_t oom = 0;
};
void answer_optimizer_state_sharding_accounting(const std::vector<ShardingRun>& runs, int ranks);

// ---------------------------------------------------------------------------------------------------------------------
// bench_fsdp.cu

enum { GATHER, WAIT, GATHER_AGAIN, WAIT_AGAIN, REDUCE, UNIT_TIMES };  // again: in backward; the last: waited for
using FsdpUnitTimes = std::array<double, UNIT_TIMES>;                 // of gradients; ms, of the mean step
struct FsdpRun {
    const char* way;
    size_t oom = 0, predicted = 0;  // bytes
    MemoryUse use{};
    Stats step{};  // ms
    std::vector<FsdpUnitTimes> units{};
    // Of the gathers in forward that have a block to hide under, all but the first two: their ms per step, and those of
    // them for which nobody waited.
    Stats gathers{}, hidden{};
};
// runs: DDP, sharded optimizer, FSDP, ...; bytes: of a weight.
void answer_fsdp_accounting(const std::vector<FsdpRun>& runs, int world, double psi, int bytes);

// ---------------------------------------------------------------------------------------------------------------------
// leaderboard.cu

struct LeaderboardRun {
    std::string what;  // model, tokens and setting
    int world = 1;
    double tokens = 0, flops = 0, peak_rate = NAN;  // of a step; TFLOP/s of one card, NAN: not known
    size_t oom = 0, predicted = 0, peak = 0;        // bytes
    double first_loss = NAN, last_loss = NAN;
    Stats step{};                                              // ms
    double parts[STEP_PARTS] = {};                             // ms, of the mean step
    double tflops() const { return flops / step.mean / 1e9; }  // per second, of all ranks
};
void answer_leaderboard(const LeaderboardRun& r);
// Sets what runs again in backward, context's recompute and checkpoint: the least that leaves each of `world` ranks a
// predicted peak of at most `room` bytes.
void choose_what_runs_again(const Options& o, int world, double room);
size_t leaderboard_peak(const Options& o, int world);  // of a rank, predicted, in bytes

// ---------------------------------------------------------------------------------------------------------------------
// bench_attention.cu: what its experiments measure, and the answers

struct AttentionCase {
    int B, H, Tq, Tk, D;
    bool causal;
};
struct PassTimes {  // ms
    Stats forward{}, backward{}, both{};
    size_t held = 0;  // bytes when backward starts: inputs, and what the forward saved
    size_t oom = 0;   // bytes, where it did not fit
};
struct AttentionRun {
    int S, D;
    DType dtype;
    PassTimes naive{}, other{};  // other: fused in torch_compile, flash in flash_benchmarking
};
struct AttentionMemory {  // of pytorch_attention's smallest configuration that does not fit
    int S, D;
    size_t available, peak = 0;
    std::map<size_t, int> saved{};  // when backward starts: bytes of a buffer, number of such buffers
};
void answer_pytorch_attention(const std::vector<AttentionRun>& runs, const AttentionMemory& memory);
void answer_torch_compile_attention(const std::vector<AttentionRun>& runs);
void answer_flash_benchmarking(const std::vector<AttentionRun>& runs);

struct AttentionCheck {  // of an implementation against the reference
    bool is_flash;
    DType dtype;
    AttentionCase c;
    std::vector<double> errors{};  // the largest of O, L and, with a backward, dQ, dK, dV
};
void answer_flash_forward(const std::vector<AttentionCheck>& checks);
void answer_flash_backward(const std::vector<AttentionCheck>& checks);

void answer_flash_leaderboard(const std::string& impl, const PassTimes& t, double tflops, double matmul_tflops,
                              bool is_handouts);

// ---------------------------------------------------------------------------------------------------------------------
// The command line. Options mean the same for every command; main.cu says which command takes which.

struct Options {
    std::string command;          // its whole name
    std::set<std::string> given;  // the options that were typed, without dashes
    bool has(const char* name) const { return given.count(name) > 0; }
    std::vector<std::string> command_line;  // argv[1..]
    // What a command does not take stays empty, 0 or false; the rest has main.cu's defaults.
    std::string edition, device, format;
    std::vector<std::string> size, precision, mode;
    int d_model = 0, d_ff = 0, num_layers = 0, num_heads = 0, vocab_size = 0;
    int context_length = 0, batch_size = 0, steps = 0;
    std::vector<int> warmup, context_lengths;  // context_length: the first
    uint64_t seed = 0;
    bool quick = false;
    int checkpoint = 0;
    std::string trace, out, weights, batch, data, save, load, inputs, impl;
    bool causal = false;
    double rope_theta = 0, lr = 0;
    int sample = 0;
    std::string backend;
    int nproc = 0;
    double timeout = 0;  // seconds
    std::vector<double> bucket_size_mb;
    std::vector<std::string> words;  // of reproduce: problems; empty: all
    // communication_accounting
    double bandwidth_gb = 0, tflops = 0;  // bytes and FLOP by powers of ten, per second
    int tokens = 0, fsdp = 0, tp = 0;
    // calcs.cu, with some of those
    int devices = 0;
    double tensor_mb = 0;
};

// In a process that is no rank: starts o.nproc ranks with the same command line. In a rank: joins them, and calls f.
inline int run_ranks(const Options& o, const std::function<void(const Communicator&)>& f) {
    if (!is_rank()) { return launch_ranks(o.nproc, o.command_line, o.timeout); }
    return join_ranks(o.has("nproc") ? o.nproc : 0, o.device, o.backend, o.timeout, f);
}

// ---------------------------------------------------------------------------------------------------------------------
// plan.cu: what an experiment runs, and whether that fits into memory

std::vector<ModelConfig> configs_of(const Options& o);  // what --d_model, --d_ff, ... name, else --size; checked
std::string vocabulary_of(const std::vector<ModelConfig>& configs);  // theirs, for a caption
std::string size_option(const ModelConfig& c);  // what --size calls it in its edition: "xl" of "xl (2026)"
Mode fastest_mode(const ModelConfig& c, Precision precision);  // flash, where there is one for this head size and type
void check_mode(const ModelConfig& c, Mode mode, Precision precision);  // usage_error if context.device cannot run it
// "flash"; with all that the context may ask for "flash, recompute, checkpoint 4, head chunk 2048"
std::string caption_of(Mode mode);
std::string name_of_checkpoint(int checkpoint);  // "4", "ffn", "ffn:4", "half", "halves", "nested"
// The mode `name`, checked. The default, flash, becomes fused where this head size and precision have none.
Mode mode_for(const Options& o, const std::string& name, const ModelConfig& c, Precision precision);

// For what several ranks run: one model, in one precision and mode, which the context gets; --quick's defaults.
ModelConfig choose_step(Options& o, const Communicator& c);
std::string caption_of(const Options& o, const ModelConfig& m, const Communicator& c);
size_t room_of_each_rank(const Communicator& c);  // bytes, the least of all ranks'
// What a rank holds at most in two steps, each of `batches` batches of B sequences, predicted on META.
size_t steps_peak(int world, const Options& o, const std::function<Trainer(const Communicator& planned)>& make, int B,
                  int batches = 1);
// A rank's step, in ms but for LOSS: first the parts; then all of it; the all-reduces, and what of them is beside
// backward. With FSDP what the compute stream waits for other ranks, in any part, is EXPOSED instead.
enum { TOTAL = STEP_PARTS, COMMUNICATION, HIDDEN, LOSS, STEP_NUMBERS };
using StepNumbers = std::array<double, STEP_NUMBERS>;
// Warms up, then takes timed steps. `after` is called after each, also of the warm-up.
std::vector<StepNumbers> timed_steps(
    Trainer& t, const std::vector<Batch>& batches, const Options& o, const char* name,
    const std::function<void()>& after = [] {});
Stats stats_of(const std::vector<StepNumbers>& steps, int number);  // of one of the numbers
Batch batch_of(const Options& o, const ModelConfig& m, int rank);   // random
// Every rank's values, of plain types.
template <class T>
std::vector<std::vector<T>> gather(const Communicator& c, const std::vector<T>& mine) {
    std::vector<std::vector<T>> all;
    for (const std::string& bytes : gather_text(c, {(const char*)mine.data(), mine.size() * sizeof(T)})) {
        all.emplace_back(bytes.size() / sizeof(T));
        memcpy((void*)all.back().data(), bytes.data(), bytes.size());
    }
    return all;
}

// A default of --quick's: sets the field, unless its option was typed.
template <class T>
void by_quick(Options& o, const char* name, T Options::*field, const T& to) {
    if (!o.has(name)) { o.*field = to; }
}
std::vector<Precision> precisions_of(const Options& o);
// Those of --mode, checked; the default, flash, becomes fused where one of the models and precisions has no flash.
std::vector<Mode> modes_of(const Options& o, const std::vector<ModelConfig>& configs,
                           const std::vector<Precision>& precisions);
// Runs f, unless its predicted peak, `needs` bytes, does not fit beside what is held already (of which `held` is part
// of needs), or an allocation fails all the same. Returns 0 if f ran, else `needs`, for oom_cell. row: for stderr.
size_t run_if_fits(const std::string& row, size_t needs, const std::function<void()>& f, size_t held = 0);

const char* name_of(Phase phase);
std::string row_of(const ModelConfig& c, int B, int T,
                   Phase phase);  // with context's precision, mode and checkpoint; B: sequences per rank

// ---------------------------------------------------------------------------------------------------------------------
// calcs.cu

struct LayerSizes {
    double B, D, F, C, W;  // tokens, d_model, d_ff, FLOP/s of a device, bytes/s out of it
};
struct PassCost {  // of one device
    const char* what;
    double flops, bytes, communication, computation;  // bytes sent; seconds
    double most;                                      // devices, up to which computation takes as long
};
std::vector<PassCost> data_parallel_costs(const LayerSizes& l, double N);  // backward
std::vector<PassCost> fsdp_costs(const LayerSizes& l, double N);           // forward, backward
std::vector<PassCost> tp_costs(const LayerSizes& l, double N);
std::vector<PassCost> fsdp_tp_costs(const LayerSizes& l, double N, double M);  // FSDP, TP, both overlapped, in turn

// ---------------------------------------------------------------------------------------------------------------------
// The commands, by file

using RunCommand = int(const Options& o);
RunCommand cmd_mixed_precision_accumulation;                                                        // precision.cu
RunCommand cmd_info, cmd_benchmarking_script, cmd_benchmarking_mixed_precision, cmd_torch_compile;  // bench_step.cu
RunCommand cmd_nsys_profile;                                                                        // profile.cu
RunCommand cmd_memory_profiling;                                                                    // memory.cu
RunCommand cmd_gradient_checkpointing;                                                      // bench_checkpoint.cu
RunCommand cmd_pytorch_attention, cmd_weighted_sum, cmd_flash_forward, cmd_flash_backward;  // bench_attention.cu
RunCommand cmd_flash_benchmarking, cmd_flash_leaderboard, cmd_attention;
void torch_compile_attention(const Options& o);  // torch_compile (a): its table and its answer
RunCommand cmd_model, cmd_train;                 // train.cu
RunCommand cmd_distributed_communication_single_node, cmd_naive_ddp, cmd_naive_ddp_benchmarking;  // bench_ddp.cu
RunCommand cmd_minimal_ddp_flat_benchmarking, cmd_ddp_overlap_individual_parameters;
RunCommand cmd_ddp_overlap_individual_parameters_benchmarking, cmd_ddp_overlap_bucketed, cmd_ddp_bucketed_benchmarking;
RunCommand cmd_optimizer_state_sharding, cmd_optimizer_state_sharding_accounting;
RunCommand cmd_fsdp, cmd_fsdp_accounting;  // bench_fsdp.cu
RunCommand cmd_leaderboard;                // leaderboard.cu
RunCommand cmd_communication_accounting;   // accounting.cu
RunCommand cmd_alternate_ring_all_reduce, cmd_data_parallel_calcs, cmd_fsdp_calcs, cmd_tp_calcs,
    cmd_fsdp_tp_calcs;  // calcs.cu
