// ddp.h: what ddp.cu and fsdp.cu share.
#pragma once
#include "cs336.h"

// Starts o.nproc ranks with the same command line; in a rank: joins them, and calls f.
inline int run_ranks(const Options& o, const function<void(const Communicator&)>& f) {
    if (!is_rank()) { return launch_ranks(o.nproc, o.command_line, o.timeout); }
    return join_ranks(o.has("nproc") ? o.nproc : 0, o.device, o.backend, o.timeout, f);
}

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

using StepStats = StepParts<Stats>;  // ms, of several
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
