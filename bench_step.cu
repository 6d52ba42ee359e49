// bench_step.cu: how long the whole model's passes take (sections 1.1.3, 1.1.5 and 1.3): benchmarking_script with its
// roofline, torch_compile, benchmarking_mixed_precision. And info: what this machine could do at most.
#include "commands.h"
#include <algorithm>

#include <unistd.h>
#ifdef HAVE_OPENBLAS
#include <cblas.h>
#endif
#ifdef __CUDACC__
#include <cublas_v2.h>
#endif

// ---------------------------------------------------------------------------------------------------------------------
// info: this machine's ceilings, measured. An operation takes at least the longer of two times: its bytes over the copy
// bandwidth, and its FLOPs over the matmul rate.

static const double GIB = 1 << 30;

static size_t total_memory() {
#ifdef __CUDACC__
    if (context.device == CUDA) {
        size_t free, total;
        CUDA_CHECK(cudaMemGetInfo(&free, &total));
        return total;
    }
#endif
    return (size_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
}

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

// What a card can do at most, by its maker's paper: dense products, sums in fp32, TFLOP/s. bf16 is as fast as fp16
// where there is bf16 (not on a T4). fp32 is the CUDA cores' rate.
struct CardPeak {
    const char* card;  // as its driver calls it
    double fp16, tf32, fp32;
    const char* source;
};
static const CardPeak card_peaks[] = {
    {"Tesla T4", 65, NAN, 8.1, "T4 data sheet"},
    {"NVIDIA GeForce RTX 3090", 71, 35.6, 35.6, "GA102 white paper"},
    {"NVIDIA A10", 125, 62.5, 31.2, "A10 data sheet"},
    {"NVIDIA A100-PCIE-40GB", 312, 156, 19.5, "A100 data sheet"},
    {"NVIDIA A100-SXM4-40GB", 312, 156, 19.5, "A100 data sheet"},
    {"NVIDIA A100 80GB PCIe", 312, 156, 19.5, "A100 data sheet"},
    {"NVIDIA A100-SXM4-80GB", 312, 156, 19.5, "A100 data sheet"},
    {"NVIDIA GeForce RTX 4090", 165.2, 82.6, 82.6, "Ada white paper"},
    {"NVIDIA L4", 121, 60, 30.3, "L4 data sheet"},
    {"NVIDIA L40S", 362, 183, 91.6, "L40S data sheet"},
    {"NVIDIA H100 PCIe", 756, 378, 51, "H100 data sheet"},
    {"NVIDIA H100 NVL", 835, 417.5, 60, "H100 data sheet"},
    {"NVIDIA H100 80GB HBM3", 989, 494.5, 67, "H100 data sheet"},
    {"NVIDIA H200", 989, 494.5, 67, "H200 data sheet"},
    {"NVIDIA GeForce RTX 5090", 209.5, 104.8, 104.8, "RTX Blackwell white paper"},
    {"NVIDIA B200", 2250, 1125, 75, "HGX B200 data sheet"},
};
static const CardPeak* peak_of_card() {
    std::string card = device_description();
    card.erase(std::min(card.find(", driver"), card.size()));
    for (const CardPeak& peak : card_peaks) {
        if (card == peak.card) { return &peak; }
    }
    return nullptr;
}
double dense_peak(Precision precision) {
    const CardPeak* card = peak_of_card();
    if (!card || (matmul_dtype(precision) == BF16 && std::isnan(card->tf32))) { return NAN; }
    return precision == FP32 ? card->fp32 : precision == TF32 ? card->tf32 : card->fp16;
}
std::string percent_of_peak(double tflops, Precision precision) {
    double peak = dense_peak(precision);
    return std::isnan(peak) ? "-" : strprintf("%.1f", 100 * tflops / peak);
}
double step_tflops(const ModelConfig& c, int64_t B, int64_t T, double ms) {
    return 3.0 * forward_flops(c, B, T) / ms / 1e9;  // backward has two products for each of the forward's
}

static std::string libraries() {
    std::string text;
#ifdef __CUDACC__
    int major, minor, patch;
    cublasGetProperty(MAJOR_VERSION, &major);
    cublasGetProperty(MINOR_VERSION, &minor);
    cublasGetProperty(PATCH_LEVEL, &patch);
    text += strprintf("cuBLAS %d.%d.%d, ", major, minor, patch);
#endif
#ifdef HAVE_OPENBLAS
    text += strprintf("OpenBLAS with kernels for %s", openblas_get_corename());
#else
    text += "no OpenBLAS";
#endif
    return text;
}

static Table peaks_table() {
    Table table{
        "info: the most that each known card can do, by its maker's paper: dense products, TFLOP/s; commit " + commit(),
        {"card", "bf16", "fp16", "tf32", "fp32", "source"},
        {}};
    auto cell = [](double tflops) { return std::isnan(tflops) ? "-" : strprintf("%g", tflops); };
    for (const CardPeak& peak : card_peaks) {
        const bool has_bf16 = !std::isnan(peak.tf32);
        table.rows.push_back({peak.card, has_bf16 ? cell(peak.fp16) : "-", cell(peak.fp16), cell(peak.tf32),
                              cell(peak.fp32), peak.source});
    }
    return table;
}

int cmd_info(const Options& o) {
    context.device = choose_device(o.device);
    bool gpu = context.device == CUDA;
    Table table;
    table.caption = strprintf("info: device %s, median of several runs%s, commit %s", name_of(context.device),
                              o.quick ? ", --quick: smaller sizes" : "", commit().c_str());
    table.columns = {"what", "value", "unit"};
    auto row = [&](const std::string& what, const std::string& value, const char* unit) {
        table.rows.push_back({what, value, unit});
    };
    auto measured = [&](const std::string& what, const char* unit, const std::function<double()>& f) {
        progress("%s", what.c_str());
        try {
            row(what, strprintf("%.4g", f()), unit);
        } catch (const OutOfMemory& e) { row(what, "OOM", strprintf("%.2f GiB did not fit", e.bytes / GIB).c_str()); }
    };

    row("device", device_description(), "");
    row("libraries", libraries(), "");
    row("GPUs", std::to_string(cuda_devices()), "");
    row("CPU threads", std::to_string(cpu_threads()), "");
    row("memory", strprintf("%.2f", total_memory() / GIB), "GiB");
    row("memory available", strprintf("%.2f", available_memory(context.device) / GIB), "GiB");

    int64_t mib = gpu ? (o.quick ? 256 : 1024) : (o.quick ? 64 : 256);
    measured(strprintf("copy of %d MiB, read + written", (int)mib), "GB/s",
             [&] { return copy_bandwidth(mib << 20, gpu ? 20 : 10); });
    if (gpu) {
        int n = o.quick ? 4096 : 8192;
        for (Precision p : {PREC_BF16, PREC_FP16, TF32, FP32}) {
            measured(strprintf("matmul %d^3 %s", n, name_of(p)), "TFLOP/s", [&] { return matmul_rate(p, n, 10); });
        }
        const CardPeak* peak = peak_of_card();
        for (Precision p : {PREC_BF16, PREC_FP16, TF32, FP32}) {
            double tflops = dense_peak(p);
            row(strprintf("peak %s, %s", name_of(p), peak ? peak->source : "not known"),
                std::isnan(tflops) ? "-" : strprintf("%g", tflops), "TFLOP/s");
        }
    }
    RestoreContext restore;
    context.device = CPU;
#ifdef HAVE_OPENBLAS
    int n = o.quick ? 1024 : 2048;
    const char* how = "";
#else
    int n = 512;
    const char* how = ", plain loops";
#endif
    measured(strprintf("matmul %d^3 fp32 on the CPU%s", n, how), "TFLOP/s", [&] { return matmul_rate(FP32, n, 10); });
    print(table, o.format);
    print(peaks_table(), o.format);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// What to run: the handout's settings, or what was asked for; without a GPU, or with --quick, less.

static Plan plan_of(const Options& o) {
    Plan p{o};
    bool cpu = context.device == CPU;
    if (cpu || o.quick) {
        p.shrink("batch_size", &Options::batch_size, cpu ? 1 : 4);
        p.shrink("context_length", &Options::context_length, cpu && o.quick ? 32 : 128);
        p.shrink("steps", &Options::steps, o.quick ? 2 : 3);
        p.shrink("warmup", &Options::warmup, {1});
        p.shrink_size();
    }
    p.choose_models();
    return p;
}
static std::string caption_of(const Plan& p, const std::string& what, const std::string& setting) {
    std::string backwards = p.o.grad_accumulation > 1 ? strprintf(" in %d backward passes", p.o.grad_accumulation) : "";
    return strprintf(
        "%s; %s; batch %d%s, context length: %d, vocabulary %s, %s warmup, %d step; %s", what.c_str(), setting.c_str(),
        p.o.batch_size, backwards.c_str(), p.o.context_length, vocabulary_of(p.configs).c_str(),
        p.o.warmup.size() == 1 ? std::to_string(p.o.warmup[0]).c_str() : "several", p.o.steps, p.origin().c_str());
}

// ---------------------------------------------------------------------------------------------------------------------
// Measuring one model. Each phase is warmed up and timed by itself, with a device synchronisation after every step;
// the backward pass is timed between its own two synchronisations, not as a difference of two averages.

struct PhaseTimes : Attempt {
    size_t peak = 0;  // bytes, measured
    Stats all{}, backward_only{};
};
struct Measurement {
    ModelConfig config;
    PhaseTimes phase[3];
};
static void measure_phase(PhaseTimes& t, Phase phase, Model& model, const std::vector<Batch>& parts, int warmup,
                          int steps) {
    LossScaler scaler;
    std::vector<double> all, backward_only;
    reset_peak(context.device);
    for (int i = 0; i < warmup + steps; i++) {
        synchronize();
        double start = now_ms(), middle = 0, end = 0, backward = 0;
        for (int k = 0; k < (int)parts.size(); k++) {
            auto between = [&] {
                synchronize();
                middle = now_ms();
            };
            run_phase(phase, model, parts[k], scaler, between, k, (int)parts.size());
            synchronize();
            end = now_ms(), backward += end - middle;
        }
        progress("%s %s: %d of %d", model.config.name.c_str(), name_of(phase), i + 1, warmup + steps);
        if (i < warmup) { continue; }
        all.push_back(end - start);
        backward_only.push_back(backward);
    }
    t.all = stats_of(all);
    t.backward_only = stats_of(backward_only);
    t.peak = memory_use(context.device).peak;
}
static Measurement measure_model(const ModelConfig& c, const Options& o, int warmup,
                                 std::vector<Phase> phases = {FORWARD, FORWARD_BACKWARD, STEP}) {
    Measurement r;
    r.config = c;
    // Of torch_compile and others, which have no --grad_accumulation, it is 0.
    const int parts = std::max(1, o.grad_accumulation), B = o.batch_size / parts, T = o.context_length;
    for (Phase phase : phases) { r.phase[phase].needs = predicted_peak(c, B, T, phase, parts); }
    Model model;
    std::vector<Batch> batches;
    for (Phase phase : phases) {
        PhaseTimes& t = r.phase[phase];
        auto measure = [&] {
            if (!model.weights) {
                model = random_model(c, o.seed);
                if (parts > 1) { make_gradients(model); }
                for (int k = 0; k < parts; k++) { batches.push_back(random_batch(B, T, c.vocab_size, o.seed + k)); }
            }
            measure_phase(t, phase, model, batches, warmup, o.steps);
        };
        t.run(row_of(c, o.batch_size, o.context_length, phase), warmup + o.steps, measure,
              memory_use(context.device).now);
        if (!t.ran && !context.plan_only) { break; }
    }
    return r;
}

static std::string ms(double x) { return strprintf("%.2f", x); }
static void add_stats(std::vector<std::string>& row, const PhaseTimes& t, const Stats& s) {
    row.push_back(t.cell(ms(s.mean)));
    row.push_back(t.ran ? ms(s.std) : "");
}
static std::vector<std::string> size_cells(const ModelConfig& c) {
    return {c.name, std::to_string(c.d_model), std::to_string(c.d_ff), std::to_string(c.num_layers),
            std::to_string(c.num_heads)};
}
static const std::vector<std::string> milliseconds_columns = {
    "size",        "d_model",         "d_ff",           "num_layers",   "num_heads",    "fw_mean_ms",
    "fw_std_ms",   "bw_only_mean_ms", "bw_only_std_ms", "fwbw_mean_ms", "fwbw_std_ms",  "step_mean_ms",
    "step_std_ms", "TFLOP/s",         "MFU %",          "peak fw MiB",  "peak step MiB"};
static std::vector<std::string> milliseconds_row(const Measurement& r, const Options& o) {
    std::vector<std::string> row = size_cells(r.config);
    const PhaseTimes &fw = r.phase[FORWARD], &fwbw = r.phase[FORWARD_BACKWARD], &step = r.phase[STEP];
    add_stats(row, fw, fw.all);
    add_stats(row, fwbw, fwbw.backward_only);
    add_stats(row, fwbw, fwbw.all);
    add_stats(row, step, step.all);
    double tflops = step_tflops(r.config, o.batch_size, o.context_length, step.all.mean);
    row.push_back(step.ran ? strprintf("%.2f", tflops) : "");
    row.push_back(step.ran ? percent_of_peak(tflops, context.precision) : "");
    row.push_back(fw.ran ? strprintf("%.0f", fw.peak / 1048576.0) : "");
    row.push_back(step.ran ? strprintf("%.0f", step.peak / 1048576.0) : "");
    return row;
}
static void add_seconds_rows(Table& table, const Measurement& r) {
    auto row = [&](const char* what, const PhaseTimes& t) {
        table.rows.push_back({std::to_string(table.rows.size()), r.config.name + what,
                              t.cell(strprintf("%.6g", t.all.mean / 1e3)),
                              t.ran ? strprintf("%.6g", t.all.std / 1e3) : ""});
    };
    row(" (forward, backward)", r.phase[FORWARD_BACKWARD]);
    row(" (forward only)", r.phase[FORWARD]);
}

// Part (c): each warm-up value and size in a process of its own. In one process the first row would warm up the others
// (context, cuBLAS handle, memory pool, page tables), and the sweep would hide what it is there to show.
static std::vector<std::string> measure_in_fresh_process(const Options& o, const ModelConfig& c, int warmup) {
    std::vector<std::string> arguments = {"benchmarking_script", "--device", name_of(context.device), "--format",
                                          "csv"};
    auto option = [&](const char* name, const std::string& value) {
        arguments.push_back(std::string("--") + name);
        arguments.push_back(value);
    };
    if (c.name == "custom") {
        option("d_model", std::to_string(c.d_model)), option("d_ff", std::to_string(c.d_ff));
        option("num_layers", std::to_string(c.num_layers)), option("num_heads", std::to_string(c.num_heads));
    } else {
        option("edition", o.edition), option("size", size_option(c));
    }
    option("vocab_size", std::to_string(c.vocab_size)), option("batch_size", std::to_string(o.batch_size));
    option("context_length", std::to_string(o.context_length)), option("steps", std::to_string(o.steps));
    option("warmup", std::to_string(warmup)), option("seed", std::to_string(o.seed));
    option("precision", name_of(context.precision)), option("mode", name_of(context.mode));
    if (context.recompute) { arguments.push_back("--recompute"); }
    option("checkpoint", name_of_checkpoint(context.checkpoint));
    option("grad_accumulation", std::to_string(o.grad_accumulation));
    option("head_chunk", std::to_string(context.head_chunk));
    Table table = read_csv(run_ourselves(arguments));
    if (table.columns != milliseconds_columns || table.rows.size() != 1) {
        fail("the measuring process printed '%s'", table.caption.c_str());
    }
    return table.rows[0];
}

// A bar per size and setting, made of the step's three phases.
struct StepBars {
    std::vector<std::string> bars;
    std::vector<Series> phases = {{"forward", {}}, {"backward", {}}, {"optimizer", {}}};
};
static void add_bar(StepBars& s, const Measurement& r, const std::string& setting) {
    const PhaseTimes &fwbw = r.phase[FORWARD_BACKWARD], &step = r.phase[STEP];
    double backward = fwbw.ran ? fwbw.backward_only.mean : NAN;
    s.bars.push_back(r.config.name + setting);
    s.phases[0].y.push_back(fwbw.ran ? fwbw.all.mean - backward : NAN);
    s.phases[1].y.push_back(backward);
    s.phases[2].y.push_back(step.ran ? std::max(0.0, step.all.mean - fwbw.all.mean) : NAN);
}

// ---------------------------------------------------------------------------------------------------------------------
// --roofline: how near each phase comes to the least time that this device needs, if products are the library's and
// what lies between two of them is one pass. N = B T rows; e bytes per element of a product and of its gradients (2 in
// bf16 and fp16, else 4); the residual stream, the weights and AdamW's moments take 4.
//   FLOPs of the products   forward 2N (L (4C^2 + 3CF) + CV); backward, with dx and dW, twice that
//   FLOPs of attention      forward 2 B T^2 C L, the causal half; backward 2.5 times that (five products, not two)
//   bytes of attention      forward reads q, k, v and writes o: 4e NC L; backward 8e NC L
//   bytes beside these:
//   forward    embedding 8NC; 2L+1 norms, (4 + e) NC for x and y, and all but the first as much again for the residual
//              add; RoPE turns q and k, 4e NC L; SwiGLU, from [a | b] to g, 3e NF L
//   loss       reads the logits, e NV
//   backward   logits to their gradient 2e NV; norms, dy and x to dx: (8 + e) NC each; 2L of them add it to one that
//              is there, 4NC, and write that for the next product if it wants low precision, e NC; RoPE 4e NC L;
//              SwiGLU, dg and [a | b] to [da | db], 5e NF L; embedding 4(N + V)C
//   optimizer  reads p, g, m, v and writes p, m, v: 28 per parameter, but the matrices' g is e
// In pure bf16 all of these 4 are s = 2.
// floor = the products' time, each measured alone at the model's own shape, operands and results included
//       + attention's, the larger of FLOPs / matmul rate of a large square and bytes / copy bandwidth
//       + bytes / copy bandwidth.  What the L2 cache still holds from the op before is faster than that.

struct Floor {
    double products = 0, attention = 0, bytes = 0;           // FLOPs, FLOPs, bytes beside these
    double products_ms = 0, attention_ms = 0, bytes_ms = 0;  // their times
    double ms() const { return products_ms + attention_ms + bytes_ms; }
};
struct Ceilings {
    double bytes_per_ms, flops_per_ms;
};
struct StepFloors {
    Floor forward, loss, backward, optimizer;
};

struct ProductTimes {
    double y, dx, dW;  // ms of y = x W^T, dx = dy W, dW = dy^T x
};
static ProductTimes time_product(int64_t N, int64_t in, int64_t out) {
    bool gpu = context.device == CUDA;
    DType dtype = matmul_dtype();
    Tensor x = empty({N, in}, dtype, WORKSPACE), W = empty({out, in}, dtype, WORKSPACE),
           y = empty({N, out}, dtype, WORKSPACE), dx = empty({N, in}, dtype, WORKSPACE),
           dW = empty({out, in}, dtype, WORKSPACE);
    fill_normal(x, 0, key_of("x"), 0, 1);
    fill_normal(W, 0, key_of("W"), 0, 0.02f);
    // Several products stand between two events: one is so short that the host's pace would count.
    int runs = gpu ? 10 : 3, repeat = gpu ? 10 : 1;
    auto ms = [&](const std::function<void()>& product) {
        auto repeated = [&] {
            for (int i = 0; i < repeat; i++) { product(); }
        };
        return stats_of(time_queued_ms(
                            1, runs, [] {}, repeated))
                   .median /
               repeat;
    };
    return {ms([&] { gemm(y, x, false, W, true); }), ms([&] { gemm(dx, y, false, W, false); }),
            ms([&] { gemm(dW, y, true, x, false); })};
}
static StepFloors floors_of(const ModelConfig& c, double B, double T, const Ceilings& ceilings) {
    double N = B * T, C = c.d_model, F = c.d_ff, V = c.vocab_size, L = c.num_layers, e = size_of(matmul_dtype());
    double s = size_of(weight_dtype()), low = e < s ? e : 0, weights = (double)matmul_weights(c);
    struct Product {
        double in, out, times;
    };
    StepFloors f;
    for (const Product& p : {Product{C, 3 * C, L}, {C, C, L}, {C, 2 * F, L}, {F, C, L}, {C, V, 1}}) {
        progress("%s roofline: product of %.0f x %.0f x %.0f", c.name.c_str(), N, p.in, p.out);
        ProductTimes t = time_product((int64_t)N, (int64_t)p.in, (int64_t)p.out);
        f.forward.products_ms += p.times * t.y;
        f.backward.products_ms += p.times * (t.dx + t.dW);
    }
    f.forward.products = 2 * N * weights;
    f.backward.products = 2 * f.forward.products;
    f.forward.attention = 2 * B * T * T * C * L;
    f.backward.attention = 2.5 * f.forward.attention;
    auto attention_ms = [&](double flops, double bytes) {
        return std::max(flops / ceilings.flops_per_ms, bytes / ceilings.bytes_per_ms);
    };
    f.forward.attention_ms = attention_ms(f.forward.attention, 4 * e * N * C * L);
    f.backward.attention_ms = attention_ms(f.backward.attention, 8 * e * N * C * L);
    f.forward.bytes = 2 * s * N * C + (4 * L + 1) * (s + e) * N * C + 4 * e * N * C * L + 3 * e * N * F * L;
    f.loss.bytes = e * N * V;
    f.backward.bytes = 2 * e * N * V + (2 * L + 1) * (2 * s + e) * N * C + 2 * L * (s + low) * N * C +
                       4 * e * N * C * L + 5 * e * N * F * L + s * (N + V) * C;
    f.optimizer.bytes = (6 * s + e) * weights + 7 * s * (V * C + (2 * L + 1) * C);
    for (Floor* phase : {&f.forward, &f.loss, &f.backward, &f.optimizer}) {
        phase->bytes_ms = phase->bytes / ceilings.bytes_per_ms;
    }
    return f;
}

// Means in ms of forward, loss, backward and optimizer, each between two synchronisations.
static std::vector<double> measure_parts(const ModelConfig& c, const Options& o) {
    Model model = random_model(c, o.seed);
    make_optimizer_state(model);
    Batch batch = random_batch(o.batch_size, o.context_length, c.vocab_size, o.seed);
    LossScaler scaler;
    std::vector<double> sums(4);
    for (int i = -o.warmup[0]; i < o.steps; i++) {
        Tensor logits, loss;
        const std::function<void()> parts[] = {
            [&] { logits = forward(model, batch.tokens); },
            [&] {
                loss = cross_entropy(logits, batch.targets);
                logits = Tensor();  // held by nobody else, they make room for their gradient
            },
            [&] {
                backward(loss, loss_scale_of(scaler));
                drop_weight_copies(model.slots);
            },
            [&] { optimizer_step(model, AdamW(), scaler, 0); },
        };
        zero_gradients(model);
        for (int k = 0; k < 4; k++) {
            synchronize();
            double start = now_ms();
            parts[k]();
            synchronize();
            if (i >= 0) { sums[k] += (now_ms() - start) / o.steps; }
        }
    }
    return sums;
}

static Table roofline_table(const Plan& p, const std::vector<Measurement>& measured) {
    bool gpu = context.device == CUDA;
    int n = gpu ? 8192 : p.o.quick ? 512 : 1024;
    int64_t mib = gpu ? 1024 : p.o.quick ? 64 : 256;
    progress("roofline: copy bandwidth and matmul rate");
    double bandwidth = copy_bandwidth(mib << 20, gpu ? 20 : 10), rate = matmul_rate(context.precision, n, 10);
    Ceilings ceilings{bandwidth * 1e6, rate * 1e9};
    std::string setting = strprintf(
        "precision %s, mode %s, copy %.4g GB/s, matmul %d^3 %.4g TFLOP/s; floor = matmul + attention + bytes, share = "
        "floor / measured",
        name_of(context.precision), caption_of(context.mode).c_str(), bandwidth, n, rate);
    Table table{caption_of(p, "roofline", setting),
                {"size", "phase", "matmul GFLOP", "attention GFLOP", "MB", "matmul ms", "matmul TFLOP/s",
                 "attention ms", "bytes ms", "floor ms", "measured ms", "share"},
                {}};
    for (const Measurement& m : measured) {
        auto row = [&](const char* phase, const Floor& f, double ms) {
            table.rows.push_back(
                {m.config.name, phase, strprintf("%.6g", f.products / 1e9), strprintf("%.6g", f.attention / 1e9),
                 strprintf("%.6g", f.bytes / 1e6), strprintf("%.3f", f.products_ms),
                 f.products > 0 ? strprintf("%.4g", f.products / f.products_ms / 1e9) : "",
                 strprintf("%.3f", f.attention_ms), strprintf("%.3f", f.bytes_ms), strprintf("%.3f", f.ms()),
                 strprintf("%.3f", ms), strprintf("%.1f %%", 100 * f.ms() / ms)});
        };
        const PhaseTimes& step = m.phase[STEP];
        Attempt parts{false, step.needs};
        auto measure = [&] {
            StepFloors f = floors_of(m.config, p.o.batch_size, p.o.context_length, ceilings);
            std::vector<double> ms = measure_parts(m.config, p.o);
            row("forward", f.forward, ms[0]);
            row("loss", f.loss, ms[1]);
            row("backward", f.backward, ms[2]);
            row("optimizer", f.optimizer, ms[3]);
            Floor all;
            for (const Floor& part : {f.forward, f.loss, f.backward, f.optimizer}) {
                for (double Floor::*x : {&Floor::products, &Floor::attention, &Floor::bytes, &Floor::products_ms,
                                         &Floor::attention_ms, &Floor::bytes_ms}) {
                    all.*x += part.*x;
                }
            }
            row("step", all, step.all.mean);  // as in the table before, without synchronisations inside
        };
        if (step.ran) { parts.run(m.config.name + ": roofline", p.o.warmup[0] + p.o.steps, measure); }
        if (!parts.ran) {
            table.rows.push_back(
                {m.config.name, "step", "", "", "", "", "", "", "", "", oom_cell(step.needs.bytes), ""});
        }
    }
    return table;
}

// All sizes in the precision and mode of the context; measured: those that ran in this process.
static Table table_of_setting(const Plan& p, std::vector<Measurement>& measured) {
    bool sweep = p.o.warmup.size() > 1, seconds = p.o.table == "seconds";
    double peak = dense_peak(context.precision);
    std::string setting =
        strprintf("precision %s, mode %s", name_of(context.precision), caption_of(context.mode).c_str());
    if (!std::isnan(peak)) { setting += strprintf("; MFU of %g TFLOP/s, attention in full", peak); }
    Table table;
    table.caption = caption_of(p, "benchmarking_script", setting + (sweep ? ", each row a fresh process" : ""));
    table.columns = seconds ? std::vector<std::string>{"", "model", "mean", "std"} : milliseconds_columns;
    if (sweep) { table.columns.insert(table.columns.begin(), "warmup"); }
    for (int warmup : p.o.warmup) {
        for (const ModelConfig& c : p.configs) {
            if (sweep && !context.plan_only) {
                std::vector<std::string> row = measure_in_fresh_process(p.o, c, warmup);
                row.insert(row.begin(), std::to_string(warmup));
                table.rows.push_back(row);
                continue;
            }
            Measurement r = measure_model(c, p.o, warmup);
            seconds ? add_seconds_rows(table, r) : table.rows.push_back(milliseconds_row(r, p.o));
            measured.push_back(r);
        }
    }
    return table;
}
// (c) of a run whose warm-up was not typed: the smallest of its sizes, as the handout's model runs where eager is among
// the modes.
static Table warmup_table(Plan p) {
    auto smaller = [](const ModelConfig& a, const ModelConfig& b) { return matmul_weights(a) < matmul_weights(b); };
    bool eager = std::count(p.modes.begin(), p.modes.end(), EAGER);
    p.configs = {*std::min_element(p.configs.begin(), p.configs.end(), smaller)};
    p.o.warmup = p.o.quick ? std::vector<int>{0, 1} : std::vector<int>{0, 1, 2, 5};
    context.precision = p.precisions[0], context.mode = eager ? EAGER : p.modes[0];
    give_back_cached_memory();  // the fresh processes need it
    std::vector<Measurement> measured;
    return table_of_setting(p, measured);
}

int cmd_benchmarking_script(const Options& o) {
    if (o.roofline && o.head_chunk > 0) { usage_error("--head_chunk: got %d, takes no --roofline", o.head_chunk); }
    if (o.roofline && o.grad_accumulation > 1) {
        usage_error("--grad_accumulation: got %d, takes no --roofline", o.grad_accumulation);
    }
    bool seconds = o.table == "seconds", sweep = o.warmup.size() > 1;
    bool handouts = !o.has("warmup") && !seconds;  // it asks for fewer warm-up steps
    if (seconds && sweep) { usage_error("--table seconds takes one --warmup value, got %zu", o.warmup.size()); }
    if (sweep && !o.plot.empty()) { usage_error("--plot takes one --warmup value, got %zu", o.warmup.size()); }
    if (sweep && !o.trace.empty()) { usage_error("--trace takes one --warmup value, got %zu", o.warmup.size()); }
    if (sweep && o.roofline) { usage_error("--roofline takes one --warmup value, got %zu", o.warmup.size()); }
    context.device = choose_device(o.device);
    Plan p = plan_of(o);
    if (p.o.batch_size % o.grad_accumulation != 0) {
        usage_error("--batch_size %d is not divisible by --grad_accumulation %d", p.o.batch_size, o.grad_accumulation);
    }
    StepBars bars;
    std::string caption;
    bool several = p.precisions.size() * p.modes.size() > 1;
    for (Precision precision : p.precisions) {
        for (Mode mode : p.modes) {
            context.precision = precision, context.mode = mode;
            std::vector<Measurement> measured;
            Table table = table_of_setting(p, measured);
            for (const Measurement& r : measured) {
                add_bar(bars, r, several ? strprintf(" %s %s", name_of(precision), name_of(mode)) : "");
            }
            print(table, o.format);
            caption = table.caption;
            if (o.roofline) { print(roofline_table(p, measured), o.format); }
        }
    }
    if (handouts) { print(warmup_table(p), o.format); }
    if (!o.plot.empty()) {
        if (several) { caption = caption_of(p, "benchmarking_script", "precision and mode under each bar"); }
        Chart chart{Chart::BARS, "", "", "time of a step (ms)", {}, bars.bars, bars.phases};
        save_file(o.plot, draw("A training step by phase", caption, {chart}));
    }
    return 0;
}

// torch_compile: (a) attention alone; (b) the whole model. Eager is one kernel per operation; fused is what a compiler,
// or here a person, makes of it.
int cmd_torch_compile(const Options& o) {
    context.device = choose_device(o.device);
    Options attention = o;
    if (!o.has("steps")) { attention.steps = 100; }  // the handout's passes of (a); the table's default is for (b)
    torch_compile_attention(attention);
    Plan p = plan_of(o);
    for (Precision precision : p.precisions) {
        context.precision = precision;
        Table table{caption_of(p, "torch_compile (b): whole model",
                               strprintf("precision %s, vanilla = mode eager, compiled = "
                                         "mode fused",
                                         name_of(precision))),
                    {"size", "run_type", "vanilla (ms)", "compiled (ms)", "speedup", "compiled MFU %"},
                    {}};
        for (const ModelConfig& c : p.configs) {
            Measurement r[2];
            for (Mode mode : {EAGER, FUSED}) {
                context.mode = mode;
                r[mode] = measure_model(c, p.o, p.o.warmup[0]);
            }
            const char* names[] = {"forward", "forward+backward", "forward+backward+optimizer"};
            for (Phase phase : {FORWARD, FORWARD_BACKWARD, STEP}) {
                const PhaseTimes &eager = r[EAGER].phase[phase], &fused = r[FUSED].phase[phase];
                double tflops = step_tflops(c, p.o.batch_size, p.o.context_length, fused.all.mean);
                table.rows.push_back(
                    {c.name, names[phase], eager.cell(ms(eager.all.mean)), fused.cell(ms(fused.all.mean)),
                     eager.ran && fused.ran ? strprintf("%.2fx", eager.all.mean / fused.all.mean) : "",
                     fused.ran ? percent_of_peak(tflops / (phase == FORWARD ? 3 : 1), precision) : ""});
            }
        }
        print(table, o.format);
    }
    return 0;
}

int cmd_benchmarking_mixed_precision(const Options& o) {
    context.device = choose_device(o.device);
    Plan p = plan_of(o);
    for (Precision precision : {PREC_FP16, PREC_BF16}) {
        if (!context.plan_only) { print(toy_model_dtypes(precision), o.format); }
    }
    context.mode = p.modes[0];
    Table table{caption_of(p, "benchmarking_mixed_precision (c)", strprintf("mode %s", name_of(context.mode))),
                {"size", "precision", "fw_mean_ms", "fw_std_ms", "bw_only_mean_ms", "bw_only_std_ms", "fwbw_mean_ms",
                 "fwbw_std_ms", "fwbw speedup"},
                {}};
    for (const ModelConfig& c : p.configs) {
        double first = 0;
        for (Precision precision : p.precisions) {
            context.precision = precision;
            Measurement r = measure_model(c, p.o, p.o.warmup[0], {FORWARD, FORWARD_BACKWARD});
            const PhaseTimes &fw = r.phase[FORWARD], &fwbw = r.phase[FORWARD_BACKWARD];
            std::vector<std::string> row = {c.name, name_of(precision)};
            add_stats(row, fw, fw.all);
            add_stats(row, fwbw, fwbw.backward_only);
            add_stats(row, fwbw, fwbw.all);
            if (first == 0 && fwbw.ran) { first = fwbw.all.mean; }
            row.push_back(fwbw.ran ? strprintf("%.2fx", first / fwbw.all.mean) : "");
            table.rows.push_back(row);
        }
    }
    print(table, o.format);
    return 0;
}
