// bench_step.cu: how long the whole model's passes take (sections 1.1.3, 1.1.5 and 1.3): benchmarking_script,
// benchmarking_mixed_precision and torch_compile. And info: what this machine could do at most.
#include "commands.h"
#include <algorithm>

// ---------------------------------------------------------------------------------------------------------------------
// info: this machine's ceilings, measured. An operation takes at least the longer of two times: its bytes over the copy
// bandwidth, and its FLOPs over the matmul rate.

double copy_bandwidth(int64_t bytes, int runs) {
    Tensor from = zeros({bytes}, U8, WORKSPACE), to = zeros({bytes}, U8, WORKSPACE);  // zeros: every page is touched
    int pieces = context.device == CPU ? cpu_threads() : 1;                           // one core cannot fill the bus
    int64_t piece = bytes / pieces;
    auto copy_all = [&] {
#pragma omp parallel for num_threads(pieces)
        for (int i = 0; i < pieces; i++) { copy(view(to, i * piece, {piece}), view(from, i * piece, {piece})); }
    };
    double ms = stats_of(time_ms(2, runs, copy_all)).median;
    return 2.0 * piece * pieces / ms / 1e6;
}

// Random operands: with zeros a GPU draws less power and clocks higher.
double matmul_rate(Precision precision, int64_t n, int runs) {
    RestoreContext restore;
    context.precision = precision;
    DType dtype = matmul_dtype();
    Tensor a = empty({n, n}, dtype, WORKSPACE), b = empty({n, n}, dtype, WORKSPACE),
           c = empty({n, n}, dtype, WORKSPACE);
    fill_normal(a, 0, key_of("a"), 0, 1);
    fill_normal(b, 0, key_of("b"), 0, 1);
    double ms = stats_of(time_ms(2, runs, [&] { gemm(c, a, false, b, false); })).median;
    return 2.0 * n * n * n / ms / 1e9;
}

// What a card can do at most, by its maker's data sheet: dense products, sums in fp32, TFLOP/s. The 1979 that an H100's
// sheet has in large print is with sparsity, where half of the operands are zeros; dense it is 989. bf16 is as fast as
// fp16 where there is bf16 (not on a T4). fp32 is the CUDA cores' rate.
struct CardPeak {
    const char* card;  // how the driver's name for it begins; the comma ends a name
    double fp16, tf32, fp32;
};
static const CardPeak card_peaks[] = {
    {"Tesla T4,", 65, NAN, 8.1},
    {"NVIDIA A100", 312, 156, 19.5},
    {"NVIDIA GeForce RTX 3090,", 71, 35.6, 35.6},
    {"NVIDIA GeForce RTX 4090,", 165.2, 82.6, 82.6},
    {"NVIDIA L4,", 121, 60, 30.3},
    {"NVIDIA H100 80GB HBM3,", 989, 494.5, 67},
    {"NVIDIA H200,", 989, 494.5, 67},
    {"NVIDIA B200,", 2250, 1125, 75},
};
double dense_peak(Precision precision) {
    const std::string card = device_description();
    for (const CardPeak& peak : card_peaks) {
        if (card.compare(0, strlen(peak.card), peak.card) != 0) { continue; }
        if (matmul_dtype(precision) == BF16 && std::isnan(peak.tf32)) { return NAN; }
        return precision == FP32 ? peak.fp32 : precision == TF32 ? peak.tf32 : peak.fp16;
    }
    return NAN;
}
std::string percent_of_peak(double tflops, Precision precision) {
    double peak = dense_peak(precision);
    return std::isnan(peak) ? "-" : strprintf("%.1f", 100 * tflops / peak);
}
double step_tflops(const ModelConfig& c, int64_t B, int64_t T, double ms) {
    return 3.0 * forward_flops(c, B, T) / ms / 1e9;  // backward has two products for each of the forward's
}

int cmd_info(const Options& o) {
    context.device = choose_device(o.device);
    const bool gpu = context.device == CUDA;
    Table table{"info: medians of several runs", {"what", "measured", "peak by data sheet", "unit"}};
    table.row("GPUs", cuda_devices(), "", "");
    table.row("CPU threads", cpu_threads(), "", "");
    table.row("memory available", available_memory(context.device) / 1073741824.0, "", "GiB");
    const int mib = gpu ? (o.quick ? 256 : 1024) : (o.quick ? 64 : 256);
    const std::string copy = strprintf("copy of %d MiB, read + written", mib);
    run_if_fits(copy, 0, [&] { table.row(copy, copy_bandwidth((int64_t)mib << 20, gpu ? 20 : 10), "", "GB/s"); });
    auto multiply = [&](Precision p, int n) {
        const bool on_gpu = context.device == CUDA;
        const std::string what = strprintf("matmul %d^3 %s on the %s", n, name_of(p), on_gpu ? "GPU" : "CPU");
        run_if_fits(what, 0, [&] {
            const double rate = matmul_rate(p, n, 10);
            const FlopUnit unit = unit_of(rate);
            table.row(what, rate * unit.per_tera, on_gpu ? dense_peak(p) * unit.per_tera : NAN, unit.name);
        });
    };
    for (Precision p : {PREC_BF16, PREC_FP16, TF32, FP32}) {
        if (gpu) { multiply(p, o.quick ? 4096 : 8192); }
    }
    {
        RestoreContext restore;
        context.device = CPU;
        multiply(FP32, o.quick ? 512 : 2048);
    }
    print(table);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Measuring one model, in context's precision and mode. Each phase is warmed up and timed by itself, with a device
// synchronisation after every step; the backward pass is timed between its own two synchronisations, not as a
// difference of two averages. What comes after a phase that does not fit needs more, and is not tried.

static StepRun measure_model(const ModelConfig& c, const Options& o, int warmup,
                             const std::vector<Phase>& phases = {FORWARD, FORWARD_BACKWARD, STEP}) {
    StepRun r{c, context.precision, context.mode};
    const int B = o.batch_size, T = o.context_length;
    for (Phase phase : phases) { r.phase[phase].oom = predicted_peak(c, B, T, phase); }
    Model model;
    Batch batch;
    for (Phase phase : phases) {
        PhaseRun& run = r.phase[phase];
        auto measure = [&] {
            if (!model.weights) {
                model = random_model(c, o.seed);
                batch = random_batch(B, T, c.vocab_size, o.seed);
            }
            reset_peak(context.device);
            LossScaler scaler;
            std::vector<double> forward;  // until backward begins
            std::vector<double> all = time_ms(warmup, o.steps, [&] {
                const double start = now_ms();
                run_phase(phase, model, batch, scaler, [&] {
                    synchronize();
                    forward.push_back(now_ms() - start);
                });
            });
            run.all = stats_of(all);
            for (size_t i = 0; i < all.size() && phase != FORWARD; i++) { all[i] -= forward[warmup + i]; }
            run.backward = stats_of(all);
            run.peak = memory_use(context.device).peak;
        };
        run.oom = run_if_fits(row_of(c, B, T, phase), run.oom, measure, memory_use(context.device).now);
        if (run.oom > 0) { break; }
    }
    return r;
}

static void choose_quick_sizes(Options& o) {
    if (!o.quick) { return; }
    by_quick(o, "size", &Options::size, std::vector<std::string>{"small"});
    by_quick(o, "batch_size", &Options::batch_size, 1);
    by_quick(o, "context_length", &Options::context_length, 32);
    by_quick(o, "steps", &Options::steps, 2);
    by_quick(o, "warmup", &Options::warmup, std::vector<int>{1});
}
static std::string caption_of(const Options& o, const std::vector<ModelConfig>& configs, const std::string& what) {
    const std::string warmup = o.warmup.size() > 1 ? "several" : to_cell(o.warmup[0]);
    return strprintf("%s; batch %d, context length: %d, vocabulary %s, %s warmup, %d step", what.c_str(), o.batch_size,
                     o.context_length, vocabulary_of(configs).c_str(), warmup.c_str(), o.steps);
}
static std::string setting() {
    return strprintf("precision %s, mode %s", name_of(context.precision), caption_of(context.mode).c_str());
}
static void require_a_run(const std::vector<std::vector<StepRun>>& runs) {
    for (const auto& some : runs) {
        for (const StepRun& r : some) {
            if (r.phase[FORWARD].ran()) { return; }
        }
    }
    fail("nothing fits into the memory that is available");
}

// Mean, or that it did not fit, and standard deviation.
static std::vector<std::string> cells_of(const PhaseRun& run, const Stats& ms) {
    if (!run.ran()) { return {oom_cell(run.oom), ""}; }
    return {strprintf("%.2f", ms.mean), deviation(ms, "%.2f")};
}
// A table of forward, backward and both, after columns of its own.
static Table times_table(const std::string& caption, std::vector<std::string> columns) {
    for (const char* pass : {"fw", "bw_only", "fwbw"}) {
        for (const char* what : {"_mean_ms", "_std_ms"}) { columns.push_back(std::string(pass) + what); }
    }
    return {caption, columns};
}
static void add_times(Table& table, std::vector<std::string> row, const PhaseRun& forward, const PhaseRun& both) {
    for (const auto& cells :
         {cells_of(forward, forward.all), cells_of(both, both.backward), cells_of(both, both.all)}) {
        row.insert(row.end(), cells.begin(), cells.end());
    }
    table.rows.push_back(row);
}
// " Out of memory: step of xl and forward of 2.7B.": each model's first phase that did not fit.
static std::string out_of_memory(const std::vector<StepRun>& runs) {
    std::vector<std::string> missing;
    for (const StepRun& r : runs) {
        auto run = std::find_if(r.phase, std::end(r.phase), [](const PhaseRun& p) { return p.oom > 0; });
        if (run == std::end(r.phase)) { continue; }
        missing.push_back(name_of(Phase(run - r.phase)) + (" of " + r.config.name));
    }
    return missing.empty() ? "" : " Out of memory: " + list_of(missing) + ".";
}

// ---------------------------------------------------------------------------------------------------------------------
// benchmarking_script (b): the times

constexpr double SMALL_DEVIATION = 0.05;  // of the mean

void answer_step_times(const std::vector<StepRun>& runs) {
    struct {
        Phase phase;
        Stats PhaseRun::*what;
        const char* name;
    } asked[] = {{FORWARD, &PhaseRun::all, "forward"},
                 {FORWARD_BACKWARD, &PhaseRun::backward, "backward"},
                 {STEP, &PhaseRun::all, "a whole step"}};
    std::vector<std::string> times;
    double most = 0;  // standard deviation over mean
    std::string of;
    for (const auto& [phase, what, name] : asked) {
        std::vector<std::string> ms;
        for (const StepRun& r : runs) {
            const Stats& s = r.phase[phase].*what;
            if (s.n == 0) { continue; }
            ms.push_back(strprintf("%.2f ms (%s)", s.mean, r.config.name.c_str()));
            if (s.std > most * s.mean) { most = s.std / s.mean, of = name + (" of " + r.config.name); }
        }
        if (ms.empty()) { continue; }
        times.push_back(name + (" takes " + ms[0]) + (ms.size() == 1 ? "" : " to " + ms.back()));
    }
    answer("b", "In %s, mode %s, %s.%s", name_of(runs[0].precision), name_of(runs[0].mode),
           times.empty() ? "nothing ran" : list_of(times).c_str(), out_of_memory(runs).c_str());
    if (of.empty()) { return; }  // a single step has no deviation
    answer("b", "The standard deviation is %s %.1f %% of the mean (%s).",
           most <= SMALL_DEVIATION ? "small: at most" : "large: up to", 100 * most, of.c_str());
}
static void print_times(const std::vector<StepRun>& runs, const std::string& caption) {
    Table table = times_table(caption, {"size", "d_model", "d_ff", "num_layers", "num_heads"});
    for (const StepRun& r : runs) {
        const ModelConfig& c = r.config;
        add_times(table, {c.name, to_cell(c.d_model), to_cell(c.d_ff), to_cell(c.num_layers), to_cell(c.num_heads)},
                  r.phase[FORWARD], r.phase[FORWARD_BACKWARD]);
    }
    print(table);
    answer_step_times(runs);
}
static void print_seconds(const std::vector<StepRun>& runs, const std::string& caption) {
    Table table{caption, {"", "model", "mean", "std"}};
    for (const StepRun& r : runs) {
        for (Phase phase : {FORWARD_BACKWARD, FORWARD}) {
            const PhaseRun& run = r.phase[phase];
            const std::string passes = phase == FORWARD ? " (forward only)" : " (forward, backward)";
            table.row(table.rows.size(), r.config.name + passes,
                      run.ran() ? strprintf("%.6g", run.all.mean / 1e3) : oom_cell(run.oom),
                      run.ran() && run.all.n > 1 ? strprintf("%.6g", run.all.std / 1e3) : "");
        }
    }
    print(table);
}
static void print_steps(const std::vector<StepRun>& runs, const Options& o, const std::string& caption) {
    std::vector<double> tflops;
    double most = 0;
    for (const StepRun& r : runs) {
        const PhaseRun& step = r.phase[STEP];
        tflops.push_back(step.ran() ? step_tflops(r.config, o.batch_size, o.context_length, step.all.mean) : NAN);
        most = std::fmax(most, tflops.back());
    }
    const FlopUnit unit = unit_of(most);
    Table table{caption,
                {"size", "precision", "mode", "step_mean_ms", "step_std_ms", unit.name, "MFU %", "peak fw MiB",
                 "peak step MiB"}};
    auto mib = [](const PhaseRun& run) { return run.ran() ? strprintf("%.0f", run.peak / 1048576.0) : ""; };
    for (size_t i = 0; i < runs.size(); i++) {
        const StepRun& r = runs[i];
        const auto ms = cells_of(r.phase[STEP], r.phase[STEP].all);
        table.row(r.config.name, r.precision, r.mode, ms[0], ms[1], tflops[i] * unit.per_tera,
                  percent_of_peak(tflops[i], r.precision), mib(r.phase[FORWARD]), mib(r.phase[STEP]));
    }
    print(table);
}
// ---------------------------------------------------------------------------------------------------------------------
// benchmarking_script (c): fewer warm-up steps. This needs processes that have done nothing yet: context, kernels'
// code, library handles, memory pool and page tables are cold only once. So the program starts itself with the same
// command line and with COLD in its environment; the child measures one number of warm-up steps and writes its numbers,
// as they lie in memory, into the file that is its stdout.

static const char* const COLD = "CS336_COLD_WARMUP";

static WarmupRun in_fresh_process(const Options& o, int warmup) {
    static_assert(std::is_trivially_copyable<WarmupRun>::value, "it goes through a file");
    setenv(COLD, std::to_string(warmup).c_str(), 1);
    const std::string bytes = run_ourselves(o.command_line);
    unsetenv(COLD);
    WarmupRun run;
    if (bytes.size() != sizeof run) { fail("a fresh process sent %zu bytes, not %zu", bytes.size(), sizeof run); }
    memcpy(&run, bytes.data(), sizeof run);
    return run;
}
static int send_to_parent(const ModelConfig& c, const Options& o, int warmup) {
    const StepRun r = measure_model(c, o, warmup, {FORWARD, FORWARD_BACKWARD});
    const WarmupRun run{warmup, r.phase[FORWARD], r.phase[FORWARD_BACKWARD]};
    return fwrite(&run, sizeof run, 1, stdout) == 1 ? 0 : 1;
}
void answer_warmup(const std::vector<WarmupRun>& runs) {
    if (!runs.front().forward.ran() || !runs.back().forward.ran()) { return; }
    auto change = [&](PhaseRun WarmupRun::*pass) {
        return (runs.front().*pass).all.mean / (runs.back().*pass).all.mean;
    };
    const bool is_both = change(&WarmupRun::both) > change(&WarmupRun::forward);  // where the first steps show most
    auto ms = [&](const WarmupRun& r) { return (is_both ? r.both : r.forward).all; };
    auto after = [](const WarmupRun& r) { return counted(r.warmup, "warm-up step"); };
    const Stats cold = ms(runs.front()), warm = ms(runs.back());
    // One slow step among many raises the cold mean and its deviation alike: only the warm run's deviation is noise.
    const double more = cold.mean - warm.mean, noise = std::max(warm.std, SMALL_DEVIATION * warm.mean);
    const char* verdict =
        more < -noise   ? "The machine's speed changed during this run, so it does not show what the first steps cost"
        : more <= noise ? "The first steps cost no more than the noise"
        : context.device == CUDA
            ? "The first steps are slower: they also load the kernels' code, create the cuBLAS handle and grow the pool"
            : "The first steps are slower: they also touch their memory for the first time";
    answer("c", "%s. %s takes %.2f ms (standard deviation %.2f) after %s, and %.2f ms (%.2f) after %s.", verdict,
           is_both ? "Forward with backward" : "Forward", cold.mean, cold.std, after(runs.front()).c_str(), warm.mean,
           warm.std, after(runs.back()).c_str());
    if (more <= noise) { return; }
    size_t enough = runs.size() - 1;  // the runs from here on are alike
    const double alike = std::max(0.02, warm.std / warm.mean);
    while (enough > 0 && std::abs(ms(runs[enough - 1]).mean / warm.mean - 1) <= alike) { enough--; }
    std::vector<std::string> steps, means;  // of the runs between
    for (size_t i = 1; i + 1 < runs.size(); i++) {
        steps.push_back(to_cell(runs[i].warmup)), means.push_back(strprintf("%.2f", ms(runs[i]).mean));
    }
    if (!steps.empty()) {
        answer("c", "After %s warm-up steps it takes %s ms.", list_of(steps).c_str(), list_of(means).c_str());
    }
    answer("c",
           enough + 1 == runs.size() ? "No smaller number comes within %.0f %% of %s: clocks, caches and the memory "
                                       "pool settle only over several steps."
                                     : "The mean is within %.0f %% of the last from %s on.",
           100 * alike, after(runs[enough]).c_str());
}
static void print_warmups(const ModelConfig& c, const Options& o) {
    give_back_cached_memory();  // the fresh processes need it
    Table table = times_table(
        caption_of(o, {c}, "benchmarking_script (c): " + c.name + ", each row a fresh process; " + setting()),
        {"warmup"});
    std::vector<WarmupRun> runs;
    for (int warmup : o.warmup) {
        runs.push_back(in_fresh_process(o, warmup));
        add_times(table, {to_cell(warmup)}, runs.back().forward, runs.back().both);
    }
    print(table);
    answer_warmup(runs);
}

int cmd_benchmarking_script(const Options& asked) {
    Options o = asked;
    context.device = choose_device(o.device);
    choose_quick_sizes(o);
    const std::vector<ModelConfig> configs = configs_of(o);
    const std::vector<Precision> precisions = precisions_of(o);
    const std::vector<Mode> modes = modes_of(o, configs, precisions);
    context.precision = precisions[0], context.mode = modes[0];
    if (const char* warmup = getenv(COLD)) { return send_to_parent(configs[0], o, atoi(warmup)); }
    Options sweep = o;
    if (!o.has("warmup")) { sweep.warmup = {0, 1, 2, 5}; }
    std::sort(sweep.warmup.begin(), sweep.warmup.end());
    if (o.has("warmup")) { o.warmup = {sweep.warmup.back()}; }

    std::vector<StepRun> all, first;  // first: in the first precision and mode
    for (Precision precision : precisions) {
        for (Mode mode : modes) {
            context.precision = precision, context.mode = mode;
            std::vector<StepRun> runs;
            for (const ModelConfig& c : configs) { runs.push_back(measure_model(c, o, o.warmup[0])); }
            print_times(runs, caption_of(o, configs, "benchmarking_script; " + setting()));
            if (first.empty()) { first = runs; }
            all.insert(all.end(), runs.begin(), runs.end());
        }
    }
    require_a_run({all});
    print_steps(all, o, caption_of(o, configs, "benchmarking_script: whole steps, with AdamW; MFU: attention in full"));
    context.precision = precisions[0], context.mode = modes[0];
    print_seconds(first, caption_of(o, configs, "benchmarking_script, in seconds; " + setting()));
    if (sweep.warmup.size() > 1 && o.trace.empty()) { print_warmups(configs[0], sweep); }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Two versions of one model

// "1.71 times as fast as vanilla for small and 1.33 times as fast as vanilla for 2.7B": of the first and the last size
// that ran in both. "" if none did. growth: how many times the first one's factor the last one's is.
static std::string compared(const std::vector<StepRun>& ours, const std::vector<StepRun>& theirs, Phase phase,
                            const char* they, double* growth = nullptr) {
    std::vector<std::string> verdicts;
    std::vector<double> factors;
    for (size_t i = 0; i < ours.size(); i++) {
        const PhaseRun &a = ours[i].phase[phase], &b = theirs[i].phase[phase];
        if (!a.ran() || !b.ran()) { continue; }
        verdicts.push_back(how_fast(a.all, b.all, they) + " for " + ours[i].config.name);
        factors.push_back(b.all.mean / a.all.mean);
    }
    if (verdicts.empty()) { return ""; }
    if (growth) { *growth = factors.back() / factors.front(); }
    return verdicts.size() == 1 ? verdicts[0] : verdicts[0] + " and " + verdicts.back();
}
static std::string factor_cell(const PhaseRun& ours, const PhaseRun& theirs) {
    return ours.ran() && theirs.ran() ? strprintf("%.2fx", theirs.all.mean / ours.all.mean) : "";
}

// torch_compile: (a) attention alone; (b) the whole model. Vanilla is mode eager, one kernel per operation; compiled is
// mode fused, what a compiler, or here a person, makes of it.
void answer_torch_compile(const std::vector<StepRun>& vanilla, const std::vector<StepRun>& compiled) {
    const std::string forward = compared(compiled, vanilla, FORWARD, "vanilla"),
                      both = compared(compiled, vanilla, FORWARD_BACKWARD, "vanilla"),
                      step = compared(compiled, vanilla, STEP, "vanilla");
    answer("b", "In %s, compiled forward is %s.%s", name_of(vanilla[0].precision),
           forward.empty() ? "not to be compared" : forward.c_str(), out_of_memory(vanilla).c_str());
    if (!both.empty()) { answer("b", "Forward and backward together are %s.", both.c_str()); }
    if (!step.empty()) { answer("b", "A whole step, with AdamW, is %s.", step.c_str()); }
}
int cmd_torch_compile(const Options& asked) {
    Options o = asked;
    context.device = choose_device(o.device);
    torch_compile_attention(o);
    choose_quick_sizes(o);
    const std::vector<ModelConfig> configs = configs_of(o);
    std::vector<StepRun> all;
    for (Precision precision : precisions_of(o)) {
        context.precision = precision;
        Table table{caption_of(o, configs,
                               std::string("torch_compile (b): whole model; vanilla = mode eager, compiled = mode "
                                           "fused, fused by hand; precision ") +
                                   name_of(precision)),
                    {"size", "run_type", "vanilla (ms)", "compiled (ms)", "speedup", "compiled MFU %"}};
        std::vector<StepRun> runs[2];
        for (const ModelConfig& c : configs) {
            for (Mode mode : {EAGER, FUSED}) {
                context.mode = mode;
                runs[mode].push_back(measure_model(c, o, o.warmup[0]));
            }
            for (Phase phase : {FORWARD, FORWARD_BACKWARD, STEP}) {
                const PhaseRun &eager = runs[EAGER].back().phase[phase], &fused = runs[FUSED].back().phase[phase];
                const double whole = step_tflops(c, o.batch_size, o.context_length, fused.all.mean);
                table.row(c.name, phase == STEP ? "forward+backward+optimizer" : name_of(phase),
                          cells_of(eager, eager.all)[0], cells_of(fused, fused.all)[0], factor_cell(fused, eager),
                          fused.ran() ? percent_of_peak(whole / (phase == FORWARD ? 3 : 1), precision) : "");
            }
        }
        print(table);
        answer_torch_compile(runs[EAGER], runs[FUSED]);
        all.insert(all.end(), runs[FUSED].begin(), runs[FUSED].end());
    }
    require_a_run({all});
    return 0;
}

// benchmarking_mixed_precision: (a), (b) the toy model, see precision.cu; (c) times
static void print_toy_model(const ToyDtypes& t, Precision precision) {
    Table table{strprintf("ToyModel under autocast to %s: dtypes as seen, device %s, batch 8, 5 -> 10 -> 3",
                          name_of(matmul_dtype(precision)), name_of(context.device)),
                {"component", "dtype"},
                {{"model parameters within the autocast context", name_of(t.parameters)},
                 {"output of the first feed-forward layer", name_of(t.fc1)},
                 {"output of the layer norm", name_of(t.layer_norm)},
                 {"predicted logits", name_of(t.logits)},
                 {"loss", name_of(t.loss)},
                 {"gradients", name_of(t.gradients)}}};
    print(table);
}
static void answer_toy_model(const ToyDtypes& half, const ToyDtypes& bf16) {
    answer("a",
           "Under autocast to %s the parameters are %s, the first layer's output is %s, layer norm's output is %s, the "
           "logits are %s, the loss is %s and the gradients are %s.",
           name_of(half.fc1), name_of(half.parameters), name_of(half.fc1), name_of(half.layer_norm),
           name_of(half.logits), name_of(half.loss), name_of(half.gradients));
    answer("b",
           "Layer norm's mean and variance are sensitive: they are sums, of numbers and of squares. In fp16 a square "
           "overflows from 256 on (256 x 256 = 65536, the largest number is 65504), and a small variance vanishes.");
    answer("b",
           "bf16 has fp32's range, which removes that danger, but with 8 significant bits a long sum still loses its "
           "small terms. So autocast treats layer norm alike: its output is %s under float16 and %s under bfloat16.",
           name_of(half.layer_norm), name_of(bf16.layer_norm));
}
void answer_mixed_precision(const std::vector<std::vector<StepRun>>& runs) {
    for (size_t p = 1; p < runs.size(); p++) {
        const char* precision = name_of(runs[p][0].precision);
        double growth = 1;
        const std::string verdict =
            compared(runs[p], runs[0], FORWARD_BACKWARD, name_of(runs[0][0].precision), &growth);
        answer("c", "Forward and backward in %s are %s.", precision,
               verdict.empty() ? "not to be compared" : verdict.c_str());
        if (context.device != CUDA || runs[p].size() < 2) { continue; }
        answer("c",
               growth > 1 + SMALL_DEVIATION
                   ? "The larger model gains more in %s: products take more of its time, and tensor cores do these."
                   : "The larger model gains no more in %s than the smaller.",
               precision);
    }
    const std::string oom = out_of_memory(runs[0]);
    if (!oom.empty()) { answer("c", "%s", oom.c_str() + 1); }
    if (context.device == CPU) {
        answer("c", "On a CPU low precision saves no arithmetic: operands are rounded, and products run in fp32.");
    }
}
int cmd_benchmarking_mixed_precision(const Options& asked) {
    Options o = asked;
    context.device = choose_device(o.device);
    choose_quick_sizes(o);
    const std::vector<ModelConfig> configs = configs_of(o);
    const std::vector<Precision> precisions = precisions_of(o);
    context.mode = modes_of(o, configs, precisions)[0];
    const ToyDtypes half = toy_model_dtypes(PREC_FP16), bf16 = toy_model_dtypes(PREC_BF16);
    print_toy_model(half, PREC_FP16);
    print_toy_model(bf16, PREC_BF16);
    answer_toy_model(half, bf16);

    Table table = times_table(
        caption_of(o, configs, std::string("benchmarking_mixed_precision (c); mode ") + name_of(context.mode)),
        {"size", "precision"});
    table.columns.push_back("speedup");
    std::vector<std::vector<StepRun>> runs(precisions.size());
    for (const ModelConfig& c : configs) {
        for (size_t p = 0; p < precisions.size(); p++) {
            context.precision = precisions[p];
            runs[p].push_back(measure_model(c, o, o.warmup[0], {FORWARD, FORWARD_BACKWARD}));
            const PhaseRun *now = runs[p].back().phase, *base = runs[0].back().phase;
            add_times(table, {c.name, name_of(precisions[p])}, now[FORWARD], now[FORWARD_BACKWARD]);
            table.rows.back().push_back(factor_cell(now[FORWARD_BACKWARD], base[FORWARD_BACKWARD]));
        }
    }
    print(table);
    answer_mixed_precision(runs);
    require_a_run(runs);
    return 0;
}
