// communication.cu: what communication alone costs, before anything is trained. The problems that
// only communicate and do arithmetic, in this order:
//   2.1    distributed_communication_single_node: how the time of an all-reduce grows with the
//          tensor's size and with the ranks
//   2.4    communication_accounting: the memory that a model takes, and the least batch at which
//          computation takes longer than communication
//   2026's 8    alternate_ring_all_reduce and the calculations for a feed-forward layer
// Read time_all_reduce first, then fsdp_costs.
#include "ddp.h"

#include <sys/mman.h>

constexpr double GB = 1e9;  // bytes

// -------------------------------------------------------------------------------------------------
// What ranks tell each other. All ranks have to call these functions.

bool everywhere(const Communicator& c, bool mine) {
    return gather<char>(c, {mine}) == vector<char>(c.world, true);
}

double mean_over_ranks(const Communicator& c, double mine) {
    const vector<double> all = gather<double>(c, {mine});
    return std::accumulate(all.begin(), all.end(), 0.0) / c.world;  // NaN if one of them is
}

// Returns the bytes that each rank may take, the least of all ranks'. The ranks of a machine share
// its memory; a GPU has one rank.
size_t room_of_each_rank(const Communicator& c, Device device) {
    const size_t sharing = device == CUDA ? 1 : c.local_world;
    const vector<size_t> all = gather<size_t>(c, {available_memory(device) / sharing});
    return *std::min_element(all.begin(), all.end());
}

// -------------------------------------------------------------------------------------------------
// distributed_communication_single_node. With n ranks, an all-reduce of S bytes that takes t has,
// as nccl-tests define it, a busbw of S/t 2(n-1)/n: what each link of a ring carries, whatever n
// is.

struct AllReduceGroup {  // so many ranks with one backend, and what their all-reduces take
    bool nccl;           // on GPUs; else Gloo, on the CPU
    int ranks;
    double ms[4];  // by size: the median of all steps and ranks; NAN where it did not fit
};
static const double SIZES_MB[] = {1, 10, 100, 1000};
static int number_of_sizes(const Options& o) { return o.quick ? 2 : 4; }

// Returns the bytes that a rank needs on its device. On the CPU that is five times the tensor: the
// tensor, `values`, what to_floats returns, and the doubles within it, twice as large.
static size_t bytes_needed(const AllReduceGroup& group, int size) {
    return (size_t)(SIZES_MB[size] * MB) * (group.nccl ? 1 : 5);
}
// Returns how many bytes each rank of a ring sends in an all-reduce, per byte of the tensor.
static double ring(int n) { return 2.0 * (n - 1) / n; }

// Times an all-reduce of n fp32 numbers and returns the median of all ranks and steps, in ms.
// It checks the sums first. Rank r has i % 1000 + r at place i: all sums are whole numbers, exact
// in fp32.
static double time_all_reduce(const Communicator& c, int64_t n, int warmup, int steps) {
    vector<float> values(n);
    for (int64_t i = 0; i < n; i++) { values[i] = (float)(i % 1000 + c.rank); }
    const Tensor tensor = from_floats(values, {n});

    wait(c, all_reduce(c, tensor, SUM));
    for (float& value : values) {
        value = c.world * (value - c.rank) + c.world * (c.world - 1) / 2;
    }
    if (!everywhere(c, to_floats(tensor) == values)) {
        fail("all-reduce over %s: wrong sums", c.backend.c_str());
    }

    // Each further all-reduce multiplies all numbers by the number of ranks. So they are made
    // smaller first: then the default steps do not reach inf.
    scale_in_place(tensor, 1e-20f);
    vector<double> mine;
    for (int i = 0; i < warmup + steps; i++) {
        barrier(c);
        const double start = now_ms();
        wait(c, all_reduce(c, tensor, SUM));
        // NCCL's wait() holds the compute stream, not us: without this line only a launch is timed.
        synchronize();
        if (i >= warmup) { mine.push_back(now_ms() - start); }
    }
    return stats_of(gather(c, mine)).median;
}

// Answers how the time depends on the tensor's size, on the number of ranks, and on the backend.
// The groups stand by backend, then by ranks.
static void answer_distributed_communication_single_node(const vector<AllReduceGroup>& groups,
                                                         int sizes) {
    int last = sizes - 1;  // becomes the largest that all groups had room for
    for (const AllReduceGroup& group : groups) {
        while (last > 0 && isnan(group.ms[last])) { last--; }
    }
    if (last < sizes - 1) {
        answer("size", "Not every group had room for %g MB.", SIZES_MB[sizes - 1]);
    }
    if (last == 0) { return; }
    const double mb = SIZES_MB[last];
    const AllReduceGroup *first_of_gloo = nullptr, *first_of_nccl = nullptr, *before = nullptr;
    for (const AllReduceGroup& group : groups) {
        const AllReduceGroup*& first = group.nccl ? first_of_nccl : first_of_gloo;
        const char* who = group.nccl ? "NCCL" : "Gloo";
        const double small = group.ms[0], large = group.ms[last];
        if (!first) {
            first = &group;
            // If bandwidth alone counted, it would take mb times as long.
            answer(
                "size",
                "%s: %s with %s takes %.4g ms for %g MB, %.1f times as long as for 1 MB (%.3g ms).",
                large / small < 0.8 * mb ? "Time grows less than the bytes do"
                                         : "Time grows about as the bytes do, or more",
                who, counted(group.ranks, "rank").c_str(), large, mb, large / small, small);
        } else {
            answer(
                "ranks",
                "From %d to %d ranks %s takes %.2f times as long for %g MB (a ring: %.2f times).",
                before->ranks, group.ranks, who, large / before->ms[last], mb,
                ring(group.ranks) / ring(before->ranks));
        }
        before = &group;
    }

    if (first_of_gloo && first_of_nccl) {
        auto times = [&](int size) { return first_of_gloo->ms[size] / first_of_nccl->ms[size]; };
        answer("backend",
               "With %d ranks Gloo takes %.1f times as long as NCCL for 1 MB, and %.1f times for "
               "%g MB.",
               first_of_gloo->ranks, times(0), times(last), mb);
    }
}

// Prints the table of all groups and sizes, then the answers.
static void print_all_reduces(const Options& options, const vector<AllReduceGroup>& groups) {
    Table table{strprintf("%s: all-reduce, float32, sums checked; median of all ranks and %s, a "
                          "barrier before each, after %s; busbw: algbw 2(n-1)/n",
                          options.command.c_str(), counted(options.steps, "step").c_str(),
                          counted(options.warmup[0], "warm-up").c_str()),
                {"Backend", "Device", "Ranks", "Tensor Size (MB)", "median ms", "algbw (GB/s)",
                 "busbw (GB/s)"}};
    for (const AllReduceGroup& group : groups) {
        for (int i = 0; i < number_of_sizes(options); i++) {
            const double rate = SIZES_MB[i] / group.ms[i];  // MB per ms are GB/s
            const string ms =
                isnan(rate) ? oom_cell(bytes_needed(group, i)) : strprintf("%.3f", group.ms[i]);
            table.row(group.nccl ? "nccl" : "gloo", group.nccl ? "cuda" : "cpu", group.ranks,
                      SIZES_MB[i], ms, rate, rate * ring(group.ranks));
        }
    }
    print(table);
    answer_distributed_communication_single_node(groups, number_of_sizes(options));
}

// Without --nproc and --backend the command runs the handout's groups one by one: it starts each
// rank as a copy of itself, with both options added. Such a group finds in the environment variable
// CS336_RESULTS the descriptor of an open file that it has inherited, and its rank 0 adds what it
// found to that file. Without the variable rank 0 prints: then somebody typed --nproc or --backend,
// or torchrun or the like started us.
static const char* const RESULTS = "CS336_RESULTS";

// Times all sizes as a rank of one group. Rank 0 prints the table, or adds the numbers to RESULTS.
static void run_as_rank(const Communicator& c, const Options& options) {
    if (c.world == 1) {
        usage_error("one rank sends nothing: the command takes 2 or more (--nproc)");
    }
    AllReduceGroup group{c.backend == "nccl", c.world, {}};
    for (int i = 0; i < number_of_sizes(options); i++) {
        const bool fits = bytes_needed(group, i) <= room_of_each_rank(c);
        const int64_t n = (int64_t)(SIZES_MB[i] * MB / sizeof(float));
        group.ms[i] = fits ? time_all_reduce(c, n, options.warmup[0], options.steps) : NAN;
    }

    if (c.rank > 0) { return; }
    if (!getenv(RESULTS)) { return print_all_reduces(options, {group}); }
    if (write(atoi(getenv(RESULTS)), &group, sizeof group) != sizeof group) {
        fail("%s: %s", RESULTS, strerror(errno));
    }
}

// Starts 2, 4 and 6 ranks with Gloo and with NCCL, one group after the other, and adds to `missing`
// what this machine cannot run. Returns the exit code of the first group that failed, or 0.
static int run_groups(const Options& options, vector<string>& missing) {
    for (auto [backend, device] : {pair("gloo", CPU), {"nccl", CUDA}}) {
        // --device names the other one; `auto` takes both
        if (options.device == (device == CPU ? "cuda" : "cpu")) { continue; }
        for (int n : {2, 4, 6}) {
            const string why = why_not(backend, device, n);
            if (!why.empty()) {
                missing.push_back(strprintf("%s from %d ranks on (%s)", backend, n, why.c_str()));
                break;
            }
            progress("all-reduce: %s, %d ranks", backend, n);
            vector<string> words = options.command_line;
            words.insert(words.end(), {"--nproc", to_string(n), "--backend", backend});
            if (const int code = launch_ranks(n, words, options.timeout)) { return code; }
        }
    }
    return 0;
}

// Runs the one group that the options name or, without them, the handout's groups, and prints the
// table and the answers. Returns the exit code: 1 if no group ran.
int cmd_distributed_communication_single_node(const Options& options) {
    if (is_rank() || options.has("nproc") || options.has("backend")) {  // one group
        return run_ranks(options, [&](const Communicator& c) { run_as_rank(c, options); });
    }

    FILE* results = fdopen(memfd_create(RESULTS, 0), "w+");  // in memory: no disk has to take it
    if (!results) { fail("%s: %s", RESULTS, strerror(errno)); }
    setenv(RESULTS, to_string(fileno(results)).c_str(), true);
    vector<string> missing;
    if (const int code = run_groups(options, missing)) { return code; }

    vector<AllReduceGroup> groups;
    AllReduceGroup group;
    rewind(results);
    while (fread(&group, sizeof group, 1, results) == 1) { groups.push_back(group); }
    // The caption names the card, if NCCL ran on it. NCCL's groups are the last.
    context.device = !groups.empty() && groups.back().nccl ? CUDA : CPU;
    print_all_reduces(options, groups);
    if (!missing.empty()) { answer("", "Not measured: %s.", list_of(missing).c_str()); }
    return groups.empty();
}

// -------------------------------------------------------------------------------------------------
// Section 2.4, communication_accounting: the handout's XXL model, L blocks of two Linear layers D x
// F and F x D, whose 2 D F L = P parameters take 16 P bytes with their gradients and AdamW's
// moments, in fp32.
//
//   A           bytes that a device's tokens save for backward; the handout shards half of them,
//               every second layer's, like the weights
//   C           FLOP/s of a chip
//   W           bytes/s of a link
//   X, Y        chips that share the weights by FSDP, and by TP; N = X Y (in (b): X alone)
//   M_X, M_Y    links of a chip that carry FSDP's traffic, and TP's
//
// One block's forward on B tokens, over all chips, with 2 bytes per element (an all-reduce sends
// each twice):
//
//   products                         T_math = 4 B D F / (X Y C)
//   gather of the weights            T_FSDP = 4 D F / (Y W M_X)
//   all-reduce of the activations    T_TP   = 4 B D / (X W M_Y)

constexpr double GPU_GB = 80, CHIP_GB = 95;  // the memory of a GPU in (a), of a chip in (b)
// The mesh has three axes, a link each: FSDP has two of them, TP one.
constexpr double M_X = 2, M_Y = 1;

// Answers (c), the least batch at which forward is compute bound, and (d), how to lower it.
// alpha = C / W, in FLOP per byte; from most_Y chips along the TP axis on there is no such batch.
static void answer_least_batch(const Options& options, double alpha, double most_Y) {
    const double F = options.d_ff, X = options.fsdp, Y = options.tp, N = X * Y;
    // T_math = T_FSDP + T_TP, solved for B; T_math = T_FSDP alone gives `overlapped`
    const double overlapped = alpha * X / M_X, B = overlapped / (1 - Y / most_Y);
    answer("c",
           "alpha = C / W = %g TFLOP/s / %g GB/s = %.1f FLOP per byte. With many chips per axis "
           "forward is compute bound from B = (alpha X / M_X) / (1 - alpha Y / (M_Y F)) = (%.1f x "
           "%g / %g) / (1 - %.1f x %g / (%g x %.7g)) = %.1f tokens overall, %.1f per chip. There "
           "FSDP's gathers and TP's all-reduces take turns. If both axes communicate at once, "
           "alpha X / M_X = %.1f tokens "
           "(%.1f per chip) are enough, with Y below M_Y F / alpha = %.1f.",
           options.tflops, options.bandwidth_gb, alpha, alpha, X, M_X, alpha, Y, M_Y, F, B, B / N,
           overlapped, overlapped / N, most_Y);

    double least = INFINITY, best_X = 0;  // tokens per chip, of the splits into whole numbers
    for (double x = 1; x <= N; x++) {
        const double y = N / x, tokens = alpha * x / M_X / (1 - y / most_Y) / N;
        if (y == floor(y) && y < most_Y && tokens < least) {
            least = tokens;
            best_X = x;
        }
    }
    // If the axes take turns, B(X) = (alpha X / M_X) / (1 - alpha N / (X M_Y F)) is least at Y =
    // most_Y / 2, where TP takes half of the time. If both communicate at once, the least is at Y =
    // most_Y. These bounds are printed only if both Y, and their X = N / Y, lie between 1 and N.
    string best;
    if (N >= most_Y && most_Y >= 2) {
        const double per_chip = 4 * alpha * alpha / (M_X * M_Y * F);
        best = strprintf(
            " It would be 4 alpha^2 / (M_X M_Y F) = 4 x %.1f^2 / (%g x %g x %.7g) = %.1f, if X "
            "could be 2 alpha N / (M_Y F) = %.1f. Communication on both axes at once would divide "
            "this by 4: alpha^2 / (M_X M_Y F) = %.1f.",
            alpha, M_X, M_Y, F, per_chip, 2 * N / most_Y, per_chip / 4);
    }
    answer(
        "d",
        "Choose the split: by (c)'s formula the least batch with X Y = %.8g is %.1f tokens per "
        "chip, with (X, Y) = (%.8g, %.8g).%s Fewer bytes (8-bit weights halve alpha X / M_X), more "
        "links per axis and pipeline stages lower it further. Gradient accumulation does not: "
        "each micro-batch gathers the weights.",
        N, least, best_X, N / best_X, best.c_str());
}

// Answers (a), what the model takes; (b), how many devices hold it with its activations; then (c)
// and (d). Options for which no answer exists are wrong usage.
int cmd_communication_accounting(const Options& options) {
    const double D = options.d_model, F = options.d_ff, L = options.num_layers, P = 2 * D * F * L;
    const double alpha = options.tflops * 1e12 / (options.bandwidth_gb * GB);
    const double most_Y = M_Y * F / alpha;
    if (options.tp >= most_Y) {
        usage_error("--tp: got %d; no batch is compute bound from M_Y F W / C = %.1f on",
                    options.tp, most_Y);
    }
    const double per_token = 2 * L * (D + F);                      // bytes saved for backward
    const double too_many = ceil(CHIP_GB * GB / (per_token / 2));  // tokens
    if (options.tokens >= too_many) {
        usage_error("--tokens: got %d, takes fewer than %.0f", options.tokens, too_many);
    }

    const double state_gb = 16 * P / GB;  // with gradients and moments
    answer("", "communication_accounting; %s", origin().c_str());
    answer("a",
           "P = 2 D F L = 2 x %.7g x %.7g x %g = %.4g parameters take 4 P = %.1f GB in fp32. With "
           "gradients and AdamW's two moments they take 16 P = %.1f GB, the memory of %.1f / %g = "
           "%.2f GPUs, rounded up %.0f. Backward saves 2 L (D + F) = 2 x %g x (%.7g + %.7g) = %.4g "
           "MB per token in bf16.",
           D, F, L, P, 4 * P / GB, state_gb, state_gb, GPU_GB, state_gb / GPU_GB,
           ceil(state_gb / GPU_GB), L, D, F, per_token / MB);

    // the least N with (16 P + A/2) / N + A/2 < a chip's memory
    auto least_devices = [&](double A) {
        return floor((16 * P + A / 2) / (CHIP_GB * GB - A / 2)) + 1;
    };
    answer(
        "b",
        "A device holds (16 P + A/2) / N + A/2 bytes, where A is what its tokens save for "
        "backward, half of it sharded. Without activations that is below %g GB from N = %.0f on; "
        "with --tokens %d per device, from N = %.0f on. No N is enough from %g GB / (%.4g MB / 2) "
        "= %.0f tokens per device on, because A/2 alone fills the memory.",
        CHIP_GB, least_devices(0), options.tokens, least_devices(per_token * options.tokens),
        CHIP_GB, per_token / MB, too_many);
    answer_least_batch(options, alpha, most_Y);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Section 8 of the 2026 handout: how many devices work on one feed-forward layer before
// communication takes longer than the products. It is arithmetic alone;
// tests/test_communication.cpp runs the layer on simulated devices and counts.
//
//   y = (f(x W1) * (x W2)) W3      x [B, D], W1 and W2 [D, D_FF], W3 [D_FF, D], 2 bytes per element
//
// D_FF is F in the code. Forward has three products of 2 B D D_FF FLOPs: x1 = x W1, x2 = x W2, and
// z W3 with z = f(x1) * x2. Backward has two for each of them. A ring all-gather or reduce-scatter
// of S bytes sends S (N - 1) / N bytes out of each device. An all-reduce is both, so it sends twice
// that.

struct LayerSizes {
    double B, D, F, C, W;  // tokens, d_model, d_ff, FLOP/s of a device, bytes/s out of it
};
constexpr int FORWARD_PRODUCTS = 3, BACKWARD_PRODUCTS = 6;
struct PassCost {  // of one device
    const char* what;
    double flops, communication;  // communication: seconds
    double most;  // devices; with more, communication takes longer than the products
    int products = FORWARD_PRODUCTS;
};
// Returns FSDP's costs on N devices, of backward and of forward. All weights have 6 D D_FF bytes,
// and so do their gradients. Forward gathers the weights; backward gathers them again and
// reduce-scatters the gradients, so it sends twice as much. Backward's row is data parallelism's,
// too: an all-reduce of the gradients sends as many bytes. most follows from communication <= flops
// / C, where D, D_FF and the division by N cancel: N - 1 <= B W / C.
static vector<PassCost> fsdp_costs(const LayerSizes& l, double N) {
    auto [B, D, F, C, W] = l;
    const double most = 1 + B * W / C;
    return {{"Backward", 12 * B * D * F / N, 12 * D * F * (N - 1) / N / W, most, BACKWARD_PRODUCTS},
            {"Forward", 6 * B * D * F / N, 6 * D * F * (N - 1) / N / W, most}};
}
// Returns tensor parallelism's costs on N devices, of backward and of forward. Each ends with an
// all-reduce of [B, D], 2 B D bytes: of dx, and of y.
static vector<PassCost> tp_costs(const LayerSizes& l, double N) {
    auto [B, D, F, C, W] = l;
    const double seconds = 4 * B * D * (N - 1) / N / W;
    return {{"Backward", 12 * B * D * F / N, seconds, 1 + 3 * F * W / C, BACKWARD_PRODUCTS},
            {"Forward", 6 * B * D * F / N, seconds, 1 + 3 * F * W / (2 * C)}};
}

// Returns forward's costs on N devices along the FSDP axis and M along the TP axis (in what is
// printed N_FSDP and N_TP, and N is their product): those of each axis, and those of both if they
// communicate at the same time. With a = B W / C and b = 3 D_FF W / (2 C) FSDP's time is at most
// the products' up to N = 1 + a, and TP's up to M = 1 + b.
static vector<PassCost> fsdp_tp_costs(const LayerSizes& l, double N, double M) {
    auto [B, D, F, C, W] = l;
    const double a = B * W / C, b = 3 * F * W / (2 * C);
    const double flops = 6 * B * D * F / (N * M);
    const double fsdp = 6 * D * F * (N - 1) / (N * M) / W, tp = 4 * B * D * (M - 1) / (N * M) / W;
    return {{"FSDP axis", flops, fsdp, 1 + a},
            {"TP axis", flops, tp, 1 + b},
            {"both, overlapped", flops, max(fsdp, tp), (1 + a) * (1 + b)}};
}

static LayerSizes sizes_of(const Options& o) {
    return {(double)o.tokens, (double)o.d_model, (double)o.d_ff, o.tflops * 1e12,
            o.bandwidth_gb * GB};
}
static void print_setting(const Options& o, const string& devices) {
    answer("",
           "%s: y = (f(x W1) * (x W2)) W3, products only, 2 bytes per element; B = %d tokens, D = "
           "%d, D_FF = %d, C = %g TFLOP/s, W = %g GB/s out of each device; %s; %s",
           o.command.c_str(), o.tokens, o.d_model, o.d_ff, o.tflops, o.bandwidth_gb,
           devices.c_str(), origin().c_str());
}
// Answers how long an all-reduce takes in which each device sends whole tensors around the ring.
int cmd_alternate_ring_all_reduce(const Options& options) {
    double S = options.tensor_mb * MB, W = options.bandwidth_gb * GB, N = options.devices;
    double ms = 1e3 * (N - 1) * S / W, usual_ms = 1e3 * 2 * (N - 1) * S / (N * W);
    answer("",
           "alternate_ring_all_reduce: S = %g MB per device, N = %.7g, W = %g GB/s out of each "
           "device; %s",
           options.tensor_mb, N, options.bandwidth_gb, origin().c_str());
    answer(
        "",
        "The alternative takes (N - 1) S / W = (%.7g - 1) x %g / %g = %.4g ms: in each of N - 1 "
        "steps each device sends a whole tensor of S bytes. That is N / 2 = %.7g times as long as "
        "reduce-scatter and all-gather: these send S / N bytes in each of 2 (N - 1) steps, 2 (N "
        "- 1) S / (N W) = 2 x (%.7g - 1) x %g / (%.7g x %g) = %.4g ms.",
        N, S, W, ms, N / 2, N, S, N, W, usual_ms);
    return 0;
}

// Prints the answers of data_parallel_calcs and fsdp_calcs. name: what the handout calls the number
// of devices; sends: how often backward sends the ring's bytes, and why, the end of a sentence.
static int split_of_batch(const Options& options, const char* name, const vector<PassCost>& costs,
                          const char* sends) {
    const auto [B, D, F, C, W] = sizes_of(options);
    const double N = options.devices;
    print_setting(options, strprintf("N = %s = %.7g", name, N));
    for (const PassCost& pass : costs) {
        const int k = 2 * pass.products;
        answer("a",
               "%s: %d B D D_FF / N = %d x %.7g x %.7g x %.7g / %.7g = %.4g FLOP, %d products of 2 "
               "(B / N) D D_FF.",
               pass.what, k, k, B, D, F, N, pass.flops, pass.products);
    }
    for (const PassCost& pass : costs) {
        // Equal to (a)'s factor only by chance: here it is 6 D D_FF bytes, which backward sends
        // twice.
        const int k = 2 * pass.products;
        answer("b",
               "%s: %d D D_FF (N - 1) / (N W) = %d x %.7g x %.7g x (%.7g - 1) / (%.7g x %g) = %.4g "
               "ms. A ring sends (N - 1) / N of 6 D D_FF bytes out of each device %s.",
               pass.what, k, k, D, F, N, N, W, 1e3 * pass.communication,
               pass.products == BACKWARD_PRODUCTS ? sends : "once, to gather the weights");
    }
    answer("c",
           "N <= 1 + B W / C = 1 + %.7g x %g / %g = %.4g devices%s, from 12 D D_FF (N - 1) / W <= "
           "12 B D D_FF / C.",
           B, W, C, costs[0].most, costs.size() > 1 ? " in both passes" : "");
    return 0;
}
int cmd_data_parallel_calcs(const Options& o) {
    return split_of_batch(o, "N_DP", {fsdp_costs(sizes_of(o), o.devices)[0]},
                          "twice, to all-reduce the gradients");
}
int cmd_fsdp_calcs(const Options& o) {
    return split_of_batch(o, "N_FSDP", fsdp_costs(sizes_of(o), o.devices),
                          "twice, to gather the weights and to reduce-scatter the gradients");
}

// Answers (a) to (d) for tensor parallelism: backward's steps, FLOPs, communication, devices.
int cmd_tp_calcs(const Options& options) {
    const auto [B, D, F, C, W] = sizes_of(options);
    const double N = options.devices;
    const vector<PassCost> costs = tp_costs(sizes_of(options), N);
    const PassCost &backward = costs[0], &forward = costs[1];
    print_setting(options, strprintf("N_TP = %.7g", N));
    answer("a",
           "Device i holds W1(i), W2(i), W3(i) and saved x, x1(i), x2(i), z(i). Each device has "
           "all of dY, because y was all-reduced, so nothing is sent before the end: there one "
           "all-reduce adds up the dx(i).");
    sketch(
        "dz(i)  = dY W3(i)^T                          (B, D_FF / N_TP)\n"
        "dx2(i) = dz(i) * f(x1(i))                    (B, D_FF / N_TP)   * is element by element\n"
        "dx1(i) = dz(i) * f'(x1(i)) * x2(i)           (B, D_FF / N_TP)\n"
        "dW3(i) = z(i)^T dY                           (D_FF / N_TP, D)   the device's own rows\n"
        "dW2(i) = x^T dx2(i)                          (D, D_FF / N_TP)   the device's own columns\n"
        "dW1(i) = x^T dx1(i)                          (D, D_FF / N_TP)\n"
        "dx(i)  = dx1(i) W1(i)^T + dx2(i) W2(i)^T     (B, D)             a partial sum\n"
        "dx     = all-reduce(dx(i))                   (B, D)\n");
    answer("b",
           "Forward: 6 B D D_FF / N_TP = 6 x %.7g x %.7g x %.7g / %.7g = %.4g FLOP, three products "
           "of 2 B D (D_FF / N_TP). Backward: 12 B D D_FF / N_TP = %.4g FLOP, six products.",
           B, D, F, N, forward.flops, backward.flops);
    answer(
        "c",
        "Forward: 4 B D (N_TP - 1) / (N_TP W) = 4 x %.7g x %.7g x (%.7g - 1) / (%.7g x %g) = %.4g "
        "ms, an all-reduce of y, 2 B D bytes. Backward: the same, an all-reduce of dx.",
        B, D, N, N, W, 1e3 * forward.communication);
    answer("d",
           "Forward: N_TP <= 1 + 3 D_FF W / (2 C) = 1 + 3 x %.7g x %g / (2 x %g) = %.4g devices, "
           "from 4 (N_TP - 1) / W <= 6 D_FF / C, where B and D cancel. Backward: N_TP <= 1 + 3 "
           "D_FF W / C = %.4g devices, with twice the products for the same bytes.",
           F, W, C, forward.most, backward.most);
    return 0;
}

// Answers (a) to (d) for forward on a grid of FSDP and TP: FLOPs, communication, and how many
// devices if the axes' communication overlaps (c) or takes turns (d).
int cmd_fsdp_tp_calcs(const Options& options) {
    const auto [B, D, F, C, W] = sizes_of(options);
    const double N = options.fsdp, M = options.tp;
    const vector<PassCost> costs = fsdp_tp_costs(sizes_of(options), N, M);
    const PassCost &fsdp = costs[0], &tp = costs[1], &overlapped = costs[2];
    print_setting(options, strprintf("forward, N_FSDP = %g, N_TP = %g", N, M));
    answer("a",
           "6 B D D_FF / (N_FSDP N_TP) = 6 x %.7g x %.7g x %.7g / (%g x %g) = %.4g FLOP, three "
           "products of 2 (B / N_FSDP) D (D_FF / N_TP).",
           B, D, F, N, M, fsdp.flops);
    answer("b",
           "max(6 D D_FF (N_FSDP - 1), 4 B D (N_TP - 1)) / (N_FSDP N_TP W) = max(6 x %.7g x %.7g x "
           "(%g - 1), 4 x %.7g x %.7g x (%g - 1)) / (%g x %g x %g) = %.4g ms. FSDP's gather of a "
           "TP shard of the weights takes %.4g ms, TP's all-reduce of y %.4g ms.",
           D, F, N, B, D, M, N, M, W, 1e3 * overlapped.communication, 1e3 * fsdp.communication,
           1e3 * tp.communication);
    answer("c",
           "N_FSDP <= 1 + B W / C = 1 + %.7g x %g / %g = %.4g, where N_TP cancels. N_TP <= 1 + 3 "
           "D_FF W / (2 C) = 1 + 3 x %.7g x %g / (2 x %g) = %.4g, where N_FSDP cancels. So N = "
           "N_FSDP N_TP <= %.4g devices.",
           B, W, C, fsdp.most, F, W, C, tp.most, overlapped.most);

    // (d) N M is at most Q^2 / (24 B D_FF). If N or M is below 1 at that split, the best split has
    // only the other axis.
    const double Q = 3 * B * F * W / C + 3 * F + 2 * B;
    answer(
        "d",
        "The times add: 3 D_FF N_FSDP + 2 B N_TP <= Q = 3 B D_FF W / C + 3 D_FF + 2 B = %.7g. "
        "N_FSDP N_TP is largest where both terms are Q / 2: N_FSDP = Q / (6 D_FF) = %.4g, N_TP = Q "
        "/ (4 B) = %.4g. There N = Q^2 / (24 B D_FF) = %.7g^2 / (24 x %.7g x %.7g) = %.4g devices.",
        Q, Q / (6 * F), Q / (4 * B), Q, B, F, Q * Q / (24 * B * F));
    if (Q < 6 * F || Q < 4 * B) {
        const PassCost& only = Q < 6 * F ? tp : fsdp;
        answer("d",
               "But an axis has at least one device. So there is only the %s here, and N <= "
               "%.4g devices.",
               only.what, only.most);
    }
    return 0;
}
