// commands.h: what the experiments share and a reader of the core can leave out: options, plans, charts, the commands.
#pragma once
#include "cs336.h"

// ---------------------------------------------------------------------------------------------------------------------
// bench_step.cu: this machine's ceilings

// TFLOP/s of an n x n x n product of random numbers, the median of `runs`: what the card really gives.
double matmul_rate(Precision precision, int64_t n, int runs);
double copy_bandwidth(int64_t bytes, int runs);                   // GB/s read plus written, likewise
double dense_peak(Precision precision);                           // TFLOP/s that the card's maker names; NAN: not known
std::string percent_of_peak(double tflops, Precision precision);  // a cell; "-": not known
// TFLOP/s of a step's products on one GPU, whose batch is B.
double step_tflops(const ModelConfig& c, int64_t B, int64_t T, double ms);

// ---------------------------------------------------------------------------------------------------------------------
// plot.cu: charts as SVG, 900 wide, light or dark as the reader's screen is. At most 8 series a chart.

struct Series {
    std::string name;
    std::vector<double> y;  // one for each x, or bar; NaN: not there
    bool dashed = false;
    int colour = -1;  // of 8; -1: by its position
};
struct Span {
    std::string name;
    double from, to;
};
struct Chart {
    enum Kind { LINES, BARS, AREAS } kind;
    std::string title, x_label, y_label;  // labels with their units
    std::vector<double> x;                // LINES, AREAS: ascending, shared by all series
    std::vector<std::string> bars;        // BARS: what stands under each
    std::vector<Series> series;           // BARS and AREAS are stacked, the first at the bottom
    bool log_x = false, log_y = false;    // LINES; without log_y, y starts at 0
    std::vector<Span> spans = {};         // AREAS: named stretches of x
    std::string peak = "";                // AREAS: written at the highest point
    std::string missing = "";             // LINES: written where a series has no value, as "OOM"
};
// Panels share a legend, the first one's, until one has a series that is not in it: a new legend stands above that one.
// LINES under one legend stand in two columns and share the y axis as well.
// AREAS: y[i] holds from x[i] to x[i+1]; more points than pixels are thinned out, and the highest of each pixel stays.
std::string draw(const std::string& title, const std::string& subtitle, const std::vector<Chart>& panels);
std::string with_commas(double value);  // 12345 -> "12,345", 0.25 -> "0.25"
// Each bar's parts in per cent of its sum: nsys_profile's share of the time by class of kernel.
Chart share_chart(const std::string& title, const std::vector<std::string>& bars, std::vector<Series> classes);

struct Slice {  // of a timeline's row
    double start, end;
    int colour;  // of 8
};
// Neighbours of one colour whose gap is below half a pixel become one, unless both can be seen: wider than a pixel.
std::vector<Slice> join_neighbours(const std::vector<Slice>& slices, double pixel);
struct Row {
    std::string name;
    std::vector<Slice> slices;  // by start, none before 0
    bool apart = false;         // from the row above
    std::string digits = "";    // one to write on each slice
};
struct Timeline {
    std::string title, remark;  // remark: at the right
    std::vector<Row> rows;
};
// Timelines one below the other, on one axis from 0. Of the legend's series only names and colours count.
std::string draw(const std::string& title, const std::string& subtitle, const std::vector<Timeline>& timelines,
                 const std::vector<Series>& legend, const std::string& x_label,
                 const std::function<std::string(double)>& tick = with_commas);

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
// Chrome's trace format, which Perfetto opens; the caption goes into otherData. One process a rank (environment RANK),
// times count from the last midnight (UTC), the same for all ranks.
void write_trace(const std::string& path, const std::vector<Trace>& traces, const std::string& caption);
void merge_traces(const std::string& path, const std::vector<std::string>& files_of_ranks);  // into one file

// ---------------------------------------------------------------------------------------------------------------------
// memory.cu: what PyTorch's pickle of a memory snapshot holds, for pytorch.org/memory_viz
std::string snapshot_pickle(const std::vector<MemoryEvent>& log);
// In bytes; *at: the first event at which so much is held. Fails unless allocations and frees pair up by address.
size_t peak_of(const std::vector<MemoryEvent>& log, size_t* at = nullptr);

// ---------------------------------------------------------------------------------------------------------------------
// bench_ddp.cu: the picture of a step

// What a step's trace shows, for --plot. The parts' numbers are their colours.
enum StepPart {
    FORWARD_PART = 0,
    BACKWARD_PART = 1,
    OPTIMIZER_PART = 2,
    GATHER_PART = 3,
    ALL_REDUCE_PART = 4,  // and reduce-scatters
    WAIT_PART = 7
};
// Each rank's slices, in ms from the earliest of all; collective. `mine` are in ns, by start.
std::vector<std::vector<Slice>> slices_of_ranks(const Communicator& c, const std::vector<Slice>& mine);
// Two rows per rank: what computes and what communicates.
std::vector<Row> rows_of_ranks(const std::vector<std::vector<Slice>>& ranks, bool communicate);
// In ns, by start, all-reduces among them. On GPUs kernels, and the compute stream's wait between backward and the
// optimizer; without kernels the threads' ranges. What ran before forward is left out.
std::vector<Slice> slices_of_step(const Trace& trace);
struct StepSums {                      // in the slices' unit
    double step, all_reduces, hidden;  // hidden: of all-reduces, between backward's beginning and its end
};
StepSums sums_of(const std::vector<Slice>& slices);

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

// bench_fsdp.cu: what FSDP's marks show of a step, without a trace. Moments, by the compute stream:
struct FsdpStep {
    std::vector<std::pair<int, Mark>> passes;  // StepPart, and where it begins: forward, backward, ..., optimizer
    Mark end;
    // In ns from the first, by start: the passes, cut where they wait; gathers, reduce-scatters and the norms'
    // all-reduce.
    std::vector<Slice> slices(const Fsdp* f) const;  // f null: one rank, no communication
};
void plot_fsdp_step(const Communicator& c, const std::string& path, const std::vector<Slice>& mine,
                    const std::string& title, const std::string& caption);  // collective

// ---------------------------------------------------------------------------------------------------------------------
// The command line. Options mean the same for every command; main.cu says which command takes which.

struct Options {
    std::string command;                       // its whole name
    std::map<std::string, std::string> given;  // the options that were typed: name without dashes, value
    bool has(const char* name) const { return given.count(name) > 0; }
    std::vector<std::string> command_line;  // argv[1..]
    // What a command does not take stays empty, 0 or false; the rest has main.cu's defaults.
    std::string edition, device, format, table;
    std::vector<std::string> size, precision, mode;
    int d_model = 0, d_ff = 0, num_layers = 0, num_heads = 0, head_size = 0, vocab_size = 0;
    int context_length = 0, batch_size = 0, steps = 0;
    std::vector<int> warmup, context_lengths, ranks;
    uint64_t seed = 0;
    bool quick = false;
    std::vector<std::string> range;
    int top = 0, checkpoint = 0, head_chunk = 0;
    std::string trace, out, plot, weights, batch, data, save, load, inputs, impl;
    bool causal = false, not_causal = false, deterministic = false, roofline = false, recompute = false;
    double rope_theta = 0, lr = 0;
    int grad_accumulation = 0;
    double warmup_time = 0, rep_time = 0;  // seconds
    int sample = 0;
    std::string reduce_dtype, backend;
    int nproc = 0;
    double timeout = 0;  // seconds
    std::vector<double> sizes_mb, bucket_size_mb;
    std::vector<std::string> words;  // of reproduce: problems; empty: all
    // communication_accounting
    double gpu_gb = 0, tpu_gb = 0, bandwidth_gb = 0, tflops = 0;  // bytes and FLOP by powers of ten, per second
    int tokens = 0, fsdp = 0, tp = 0, links_fsdp = 0, links_tp = 0;
    // calcs.cu, with some of those
    int devices = 0;
    double tensor_mb = 0;
    int blocks = 0;  // of gradient_checkpointing's small model
    bool plan = false;
    uint64_t memory = SIZE_MAX;  // bytes
};

// ---------------------------------------------------------------------------------------------------------------------
// plan.cu: what an experiment runs, how large, and whether that fits into memory; --plan

std::vector<ModelConfig> configs_of(const Options& o);  // what --d_model, --d_ff, ... name, else --size; checked
std::string vocabulary_of(const std::vector<ModelConfig>& configs);  // theirs, for a caption
std::string size_option(const ModelConfig& c);  // what --size calls it in its edition: "xl" of "xl (2026)"
Mode fastest_mode(const ModelConfig& c, Precision precision);  // flash, where there is one for this head size and type
void check_mode(const ModelConfig& c, Mode mode, Precision precision);  // usage_error if context.device cannot run it
// "flash"; with --recompute, --checkpoint and --head_chunk "flash, recompute, checkpoint 4, head chunk 2048"
std::string caption_of(Mode mode);
std::string name_of_checkpoint(int checkpoint);  // "4", "ffn", "ffn:4", "half", "halves", "nested"
// The mode `name`, checked. The default, flash, becomes fused where this head size and precision have none.
Mode mode_for(const Options& o, const std::string& name, const ModelConfig& c, Precision precision);

struct Plan {
    Options o;  // as given, or scaled down by what follows
    std::vector<ModelConfig> configs{};
    std::vector<Precision> precisions{};
    std::vector<Mode> modes{};
    std::string scaled_down = "";  // "; scaled down: " and what is smaller than by default, or ""
    void note_smaller(const std::string& words);
    // Sets a default to `to` where it is larger; what was typed stays. words: instead of "NAME TO instead of DEFAULT".
    template <class T>
    void shrink(const char* name, T Options::*field, const T& to, const std::string& words = "");
    void shrink_size();  // to small
    // A default size that does not fit becomes the largest that does; then the batch, down to `least_batch`, and the
    // context length are halved, too. All of it stays where nothing fits. configs and context.mode follow.
    void shrink_to_fit(int least_batch, const std::function<bool(const Plan&)>& fits);
    void choose_models();        // configs, precisions and modes, checked against each other
    std::string origin() const;  // the end of a caption: the device, the commit, and what was scaled down
};

// bench_ddp.cu, for what several ranks run: one model, precision and mode.
Plan plan_of(const Options& o, const Communicator& c);
Plan fitting_plan(const Options& o, const Communicator& c, bool split);  // see there
std::string caption_of(const Plan& p, const Communicator& c, const char* command);
DType reduced_as(const Options& o);                         // gradients, by --reduce_dtype
bool fits_everywhere(const Communicator& c, size_t bytes);  // that each rank needs
double passes_of(const Communicator& c, double n);          // of one rank, as long as n of all that share its device

// A default of --quick's: sets the field, unless its option was typed.
template <class T>
void by_quick(Options& o, const char* name, T Options::*field, const T& to) {
    if (!o.has(name)) { o.*field = to; }
}
std::string origin(const Options& o);  // the end of a caption: device, commit, and whether --quick chose the sizes
std::vector<Precision> precisions_of(const Options& o);
// Those of --mode, checked; the default, flash, becomes fused where one of the models and precisions has no flash.
std::vector<Mode> modes_of(const Options& o, const std::vector<ModelConfig>& configs,
                           const std::vector<Precision>& precisions);
// Runs f, unless its predicted peak, `needs` bytes, does not fit beside what is held already (of which `held` is part
// of needs), or an allocation fails all the same. Returns 0 if f ran, else `needs`, for oom_cell. row: for stderr.
size_t run_if_fits(const std::string& row, size_t needs, const std::function<void()>& f, size_t held = 0);

// TODO(transition): Plan, Attempt and --plan go when no experiment uses them any more.
struct Attempt {  // a run that may not fit into memory
    bool ran = false;
    Prediction needs{};  // of one pass
    double seconds = 0;  // that it takes at least, where it runs for a given time
    // Calls f if so much is available, beside the `held` bytes of it that are held already. ran: it came to its end.
    // row: what it is, for the progress line and --plan's table; there it is written down instead, see only_planned.
    void run(const std::string& row, double passes, const std::function<void()>& f, size_t held = 0);
    std::string cell(const std::string& result) const;  // of a table: the result, or that it did not fit
};

const char* name_of(Phase phase);
// "4 ranks, ", or "" for one: before a row's model.
std::string ranks_of(const Communicator& c);
std::string row_of(const ModelConfig& c, int B, int T,
                   Phase phase);  // with context's precision, mode and checkpoint; B: sequences per rank

struct PlannedRow {  // of a command: what it would run
    std::string row;
    size_t bytes;
    bool fits;
    double seconds;  // rough; NAN: nobody knows
};
struct Planned {
    std::vector<PlannedRow> rows;
    std::string device, scaled_down;
    size_t available;
    double seconds;  // of the rows that fit, all together
    size_t bytes;    // of the largest of them
};
// With --plan: notes the row for the table, and returns true: its caller runs nothing. It takes `passes` passes, or
// `seconds` if that is longer.
bool only_planned(const std::string& row, const Prediction& pass, bool fits, double passes, double seconds = 0);
Planned plan_of_run(const Options& o, int (*run)(const Options&));  // null: of one that needs next to nothing
Table plan_table(const Options& o, const Planned& planned);

// ---------------------------------------------------------------------------------------------------------------------
// The commands, by file

int cmd_mixed_precision_accumulation(const Options& o);  // precision.cu
int cmd_pytorch_attention(const Options& o);             // bench_attention.cu
Table attention_compile_table(const Options& o);         // torch_compile (a)
int cmd_weighted_sum(const Options& o);
int cmd_flash_forward(const Options& o);
int cmd_flash_backward(const Options& o);
int cmd_flash_benchmarking(const Options& o);
int cmd_flash_leaderboard(const Options& o);
int cmd_attention(const Options& o);
int cmd_info(const Options& o);  // bench_step.cu
int cmd_benchmarking_script(const Options& o);
int cmd_benchmarking_mixed_precision(const Options& o);
int cmd_torch_compile(const Options& o);
int cmd_nsys_profile(const Options& o);            // profile.cu
int cmd_memory_profiling(const Options& o);        // memory.cu
int cmd_gradient_checkpointing(const Options& o);  // bench_checkpoint.cu
int cmd_model(const Options& o);                   // train.cu
int cmd_train(const Options& o);
int cmd_distributed_communication_single_node(const Options& o);  // bench_ddp.cu
int cmd_naive_ddp(const Options& o);
int cmd_ddp_overlap_individual_parameters(const Options& o);
int cmd_ddp_overlap_bucketed(const Options& o);
int cmd_naive_ddp_benchmarking(const Options& o);
int cmd_minimal_ddp_flat_benchmarking(const Options& o);
int cmd_ddp_overlap_individual_parameters_benchmarking(const Options& o);
int cmd_ddp_bucketed_benchmarking(const Options& o);
int cmd_optimizer_state_sharding(const Options& o);
int cmd_optimizer_state_sharding_accounting(const Options& o);
int cmd_fsdp(const Options& o);  // bench_fsdp.cu
int cmd_fsdp_accounting(const Options& o);
int cmd_leaderboard(const Options& o);                // leaderboard.cu
int cmd_communication_accounting(const Options& o);   // accounting.cu
int cmd_alternate_ring_all_reduce(const Options& o);  // calcs.cu
int cmd_data_parallel_calcs(const Options& o);
int cmd_fsdp_calcs(const Options& o);
int cmd_tp_calcs(const Options& o);
int cmd_fsdp_tp_calcs(const Options& o);
