// ddp.h: what communication.cu, ddp.cu and fsdp.cu share: what ranks tell each other, trainers of
// several ranks, the check of N ranks against one process, and how their steps are timed. Read
// Trainer and StepParts in cs336.h first. Most functions that take a Communicator send: then all of
// its ranks have to call them.
#pragma once
#include "cs336.h"

// Starts o.nproc ranks with the same command line, and waits for them. In a rank: joins the others,
// and calls f. Returns the exit code. If a rank dies, or is stopped (Ctrl-Z) for 0.8 of
// --timeout, the launcher kills the rest and says which. If a collective takes longer than
// --timeout, a rank that waits for it ends the run.
inline int run_ranks(const Options& o, const function<void(const Communicator&)>& f) {
    if (!is_rank()) { return launch_ranks(o.nproc, o.command_line, o.timeout); }
    return join_ranks(o.has("nproc") ? o.nproc : 0, o.device, o.backend, o.timeout, f);
}

// -------------------------------------------------------------------------------------------------
// communication.cu: what ranks tell each other

constexpr double MB = 1e6;  // bytes
// Returns the values of all ranks, rank by rank. T is a plain type.
template <class T>
vector<T> gather(const Communicator& c, const vector<T>& mine) {
    const string bytes =
        join(gather_text(c, {(const char*)mine.data(), mine.size() * sizeof(T)}), "");
    vector<T> all(bytes.size() / sizeof(T));
    memcpy((void*)all.data(), bytes.data(), bytes.size());
    return all;
}
bool everywhere(const Communicator& c, bool mine);  // whether it is true on all ranks
// Returns the mean of what the ranks pass.
double mean_over_ranks(const Communicator& c, double mine);
// Returns how many bytes of a device's memory each rank may take: what the rank with the least has.
size_t room_of_each_rank(const Communicator& c, Device device = context.device);

// -------------------------------------------------------------------------------------------------
// ddp.cu: data parallel training. Every rank has the same weights and its own part of the batch;
// gradients are averaged over the ranks.

// The benchmarks find their runs by these numbers: runs[NAIVE]. So each list of ways is in this
// order, without a gap. BUCKETED is last: it has a run for each cap.
enum Strategy { NO_SYNC, NAIVE, FLAT, OVERLAPPED, BUCKETED };
const char* name_of(Strategy s);
// Returns a trainer whose gradients are averages before its optimizer steps (NO_SYNC: are this
// rank's own). All ranks get rank 0's weights. bucket_mb: how large a bucket of BUCKETED may be.
Trainer data_parallel_trainer(const Communicator& c, Model model, Strategy strategy,
                              double bucket_mb = 0);

// A shard is the range of the weights that one rank steps.
enum Sharding {
    UNSHARDED,  // every rank steps all weights
    // The handout's: gradients are averaged before; each rank steps its shard and broadcasts it.
    BROADCAST,
    // The gradients are reduce-scattered, each rank steps its shard, the weights are all-gathered.
    ZERO1,
};
// Weights that one AdamW steps. AdamW steps each element by itself, so any range can be a shard.
struct ParameterGroup {
    Tensor weights, gradients;  // flat
    AdamW adamw{};
    Tensor m{}, v{};  // the moments of this rank's shard, allocated at its first step
    int step = 0;
};
// Counts a step, and before the first one allocates the moments. own: the weights of the shard.
void begin_adamw_step(ParameterGroup& group, const Tensor& own);
// Returns the root of the sum of all ranks' square_sum: the norm of all gradients, if each rank
// holds a part of them. All ranks get the same, so all of them step, or none. It is infinite from
// 1.8e19 on.
double norm_over_ranks(const Communicator& c, double square_sum);
// Returns a data parallel trainer whose optimizer is sharded over the ranks.
Trainer sharded_trainer(const Communicator& c, Model model, Sharding sharding,
                        const AdamW& adamw = {});

// -------------------------------------------------------------------------------------------------
// ddp.cu: the check of N ranks against one process

// The batch has ROWS rows for each rank, of POSITIONS tokens below VOCABULARY.
constexpr int ROWS = 10, POSITIONS = 8, VOCABULARY = 100;
// Returns this rank's rows of a batch, cut into n batches of equal size.
vector<Batch> part_of(const Batch& all, const Communicator& c, int n);
// Takes a step of `ours` on this rank's part of a random batch, cut into so many batches. Rank 0
// takes a step of `whole` on all of it.
void train_both(const Communicator& c, Trainer& ours, Trainer& whole, uint64_t seed,
                int batches = 1);
// How the weights of several ranks differ from those of one process.
struct WeightsCheck {
    string way, what;
    double max = 0, sum = 0;  // of the differences
    int64_t n = 0;            // how many elements were compared
    bool match = true;        // they are within the bounds, and all ranks hold the same bits
};
// Prints a row for each check, and the answer. Fails if a row does not match. setting: the model
// and its optimizer.
void print_checks(const Communicator& c, const Options& o, int steps, const char* setting,
                  const vector<WeightsCheck>& checks);
// Adds the differences of two tensors to a check. lib.h's compare says whether they match.
void compare(WeightsCheck& check, const Tensor& got, const Tensor& want, double rtol = 1e-5,
             double atol = 1e-6);
// Returns a hash of t's bits.
uint64_t key_of_bits(const Tensor& t);
// Returns whether all ranks pass the same number.
bool same_everywhere(const Communicator& c, uint64_t mine);

// -------------------------------------------------------------------------------------------------
// ddp.cu: timed steps of several ranks

// Returns the model that the ranks run, and sets the context's precision and mode. With
// --quick, or over Gloo, options that were not typed get --quick's defaults.
ModelConfig choose_step(Options& o, const Communicator& c);
// Returns the caption of a table of steps: the command, the ranks, the model and the setting.
string caption_of(const Options& o, const ModelConfig& m, const Communicator& c);
double parameters_of(const ModelConfig& m);  // how many it has
using MakeTrainer = function<Trainer(const Communicator& c)>;
// Returns how many bytes a rank holds at most in two steps of n batches, found by a run on META.
size_t steps_peak(int world, const Options& o, const MakeTrainer& make, int n);

using StepStats = StepParts<Stats>;  // ms, of several steps
// A way to train, and what its steps take.
struct WayRun {
    string name;
    size_t predicted = 0;  // a rank's peak, in bytes
    bool oom = false;      // that does not fit, or memory ran out
    StepStats ms{};        // the mean over the ranks
    double loss = 0;       // of the last step; the mean over the ranks
    MemoryUse use{};       // of this rank, in these steps
};
using SeeStep = function<void(Trainer& t)>;
// If it fits, makes a trainer, warms up, and times steps of n batches; fills r. Calls `see` before
// the first step and after each one, also in the warm-up.
void run_way(
    WayRun& r, const Communicator& c, const Options& o, const MakeTrainer& make,
    const SeeStep& see = [](Trainer&) {}, int n = 1);
// With --trace, takes one more step behind the last timed one, and adds its trace. A SeeStep calls
// this after each step; before the last timed one it does nothing. The step's range has the name,
// which has to be a literal.
void trace_step(Trainer& t, const char* name, const Options& o, Traces& traces);
[[noreturn]] inline void fail_without_step(const WayRun& r) {
    fail("no step ran: each rank needs %.1f GiB", to_gib(r.predicted));
}
// Returns whether the ways can be compared: there are several ranks, and all ways ran (`all` false:
// at least one). If not, prints why. Fails if no way ran.
template <class Run>
bool can_compare(const Communicator& c, const vector<Run>& runs, bool all = true) {
    size_t fit = 0;
    for (const Run& run : runs) {
        if (!run.oom) { fit++; }
    }
    if (fit == 0) { fail_without_step(runs.back()); }
    const bool can = c.world > 1 && (!all || fit == runs.size());
    if (!can) {
        answer("", "Not compared: %s.",
               c.world > 1 ? "not all ways fit" : "it takes several ranks");
    }
    return can;
}
// Returns a table of steps without rows. add_step adds a way's row: its step's time and parts, or
// the bytes that did not fit.
Table step_table(const string& caption, const char* what);
void add_step(Table& table, const WayRun& r);
