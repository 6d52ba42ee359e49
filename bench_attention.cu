// bench_attention.cu: the experiments of sections 1.2 and 1.3. How long attention takes and what it keeps, every
// implementation against the reference, the leaderboard, and `attention`: your q, k, v in, our output out.
#include "commands.h"
#include <algorithm>
#include <climits>

struct Inputs {
    Tensor q, k, v, dO;
};
static Inputs random_inputs(const AttentionCase& c, DType dtype, uint64_t seed) {
    Inputs in;
    uint64_t key = 0;
    for (Tensor* t : {&in.q, &in.k, &in.v, &in.dO}) {
        *t = empty({c.B, c.H, key == 1 || key == 2 ? c.Tk : c.Tq, c.D}, dtype, INPUTS);
        fill_normal(*t, seed, key++, 0, 1);
    }
    return in;
}

struct Passes {  // of one implementation on given inputs
    const AttentionImpl& impl;
    bool causal;
    Inputs in;
    Tensor o{};
    Passes(const AttentionImpl& impl, const Inputs& x, bool causal)
        : impl(impl), causal(causal), in{require_gradient(x.q), require_gradient(x.k), require_gradient(x.v), x.dO} {}
    void forward(Tensor* L = nullptr) { o = run_attention(impl, in.q, in.k, in.v, causal, L); }
    void backward() { backward_from(o, in.dO); }
    void reset() {
        clear_tape();
        o = Tensor();
        for (const Tensor* t : {&in.q, &in.k, &in.v}) { t->gradient->value = Tensor(); }
    }
};
static std::vector<Tensor> outputs_of(const AttentionImpl& impl, const Inputs& in, bool causal, bool with_backward) {
    Passes p(impl, in, causal);
    Tensor L;
    p.forward(&L);
    if (with_backward) { p.backward(); }
    clear_tape();
    std::vector<Tensor> outputs = {detached(p.o), L};
    for (const Tensor* t : {&p.in.q, &p.in.k, &p.in.v}) {
        if (with_backward) { outputs.push_back(t->gradient->value); }
    }
    return outputs;  // O, L, dQ, dK, dV
}

static const AttentionImpl* impl_named(const std::string& name) {
    for (const AttentionImpl& impl : table_of<AttentionImpl>()) {
        if (impl.device == context.device && name == impl.name) { return &impl; }
    }
    usage_error("--impl: got '%s', takes one that runs on %s", name.c_str(), name_of(context.device));
}

// ---------------------------------------------------------------------------------------------------------------------
// Times: forward, backward and both

using Function = std::function<void()>;
using Measure = std::function<Stats(const Function& prepare, const Function& f)>;
static Measure for_passes(int n) {
    return [n](const Function& prepare, const Function& f) { return stats_of(time_queued_ms(3, n, prepare, f)); };
}
static Measure for_ms(double warmup, double budget) {  // at least 3 times
    return [=](const Function& prepare, const Function& f) {
        double once = stats_of(time_queued_ms(1, 1, prepare, f)).median;
        int n = std::clamp((int)(budget / once), 3, 5000), first = std::clamp((int)(warmup / once), 1, 5000);
        return stats_of(time_queued_ms(first, n, prepare, f));
    };
}
static PassTimes pass_times(const AttentionImpl& impl, const AttentionCase& c, DType dtype, const Measure& measure,
                            bool together) {
    size_t needs = planned_peak([&] {
        Passes p(impl, random_inputs(c, dtype, 0), c.causal);
        p.forward(), p.backward();
    });
    PassTimes t;
    t.oom = run_if_fits(strprintf("S %d, D %d, %s, %s", c.Tq, c.D, name_of(dtype), impl.name), needs, [&] {
        Passes p(impl, random_inputs(c, dtype, 0), c.causal);
        t.forward = measure([&] { p.reset(); }, [&] { p.forward(); });
        t.held = memory_use(context.device).now;
        t.backward = measure([&] { p.reset(), p.forward(); }, [&] { p.backward(); });
        if (together) {
            t.both = measure([&] { p.reset(); }, [&] { p.forward(), p.backward(); });
        }
        p.reset();
    });
    return t;
}
static std::string cell(const PassTimes& t, const Stats& s, double Stats::*by) {
    return t.oom ? oom_cell(t.oom) : strprintf("%.3f", s.*by);
}
static std::string speedup(const AttentionRun& r, Stats PassTimes::*pass, double Stats::*by) {
    return r.naive.oom || r.other.oom ? "" : strprintf("%.2fx", r.naive.*pass.*by / (r.other.*pass.*by));
}
// "faster in 17 of 20 configurations (1.47 to 5.76 times as fast, S 128 to 65536) and slower in 3 (...)"
static std::string compared(const std::vector<AttentionRun>& runs, Stats PassTimes::*pass, double Stats::*by) {
    struct Kind {
        const char* name;
        int rows = 0, first_S = INT_MAX, last_S = 0;
        double least = INFINITY, most = 0;
    } kinds[] = {{"faster"}, {"level within the noise"}, {"slower"}, {"not compared, for lack of memory,"}};
    for (const AttentionRun& r : runs) {
        const Stats &ours = r.other.*pass, &theirs = r.naive.*pass;
        const double times = theirs.*by / (ours.*by);
        Kind& k = kinds[r.naive.oom || r.other.oom ? 3 : level(ours, theirs) ? 1 : times > 1 ? 0 : 2];
        k.rows++, k.first_S = std::min(k.first_S, r.S), k.last_S = std::max(k.last_S, r.S);
        k.least = std::min(k.least, times), k.most = std::max(k.most, times);
    }
    std::vector<std::string> parts;
    for (const Kind& k : kinds) {
        if (k.rows == 0) { continue; }
        std::string of_all = parts.empty() ? " of " + counted(runs.size(), "configuration") : "";
        bool has_factor = &k == &kinds[0] || &k == &kinds[2];
        std::string times = has_factor ? span(k.least, k.most, "%.2f") + " times as fast, " : "";
        parts.push_back(strprintf("%s in %d%s (%sS %s)", k.name, k.rows, of_all.c_str(), times.c_str(),
                                  span(k.first_S, k.last_S, "%.0f").c_str()));
    }
    return list_of(parts);
}

// ---------------------------------------------------------------------------------------------------------------------
// The experiments of 1.2.1 and 1.3 (a): batch 8, no heads, no mask, fp32, head sizes and lengths on a grid

constexpr int GRID_BATCH = 8;
static AttentionCase grid_case(int S, int D) { return {GRID_BATCH, 1, S, S, D, false}; }
static int grid_passes(const Options& o) { return o.has("steps") ? o.steps : o.quick ? 3 : 100; }
static std::vector<AttentionRun> run_grid(const Options& o, bool with_fused) {
    std::vector<int> lengths = {256, 1024, 4096, 8192, 16384};
    if (o.quick) { lengths = {64, 128, 256}; }
    const Measure measure = for_passes(grid_passes(o));
    std::vector<AttentionRun> runs;
    for (int D : {16, 32, 64, 128}) {
        for (int S : lengths) {
            AttentionRun r{S, D, F32};
            context.mode = EAGER;
            r.naive = pass_times(*impl_named("naive"), grid_case(S, D), F32, measure, false);
            context.mode = FUSED;
            if (with_fused) { r.other = pass_times(*impl_named("fused"), grid_case(S, D), F32, measure, false); }
            runs.push_back(r);
        }
    }
    return runs;
}
static std::string grid_caption(const Options& o, const char* what) {
    return strprintf("%s; batch %d, no heads, no mask, precision fp32, 3 warmup, %d forward and %d backward passes",
                     what, GRID_BATCH, grid_passes(o), grid_passes(o));
}

// The smallest power of 2 whose passes do not fit, by passes without data.
static AttentionMemory smallest_that_does_not_fit() {
    AttentionMemory m{128, 16, available_memory(context.device)};
    const AttentionImpl& naive = *impl_named("naive");
    context.mode = EAGER;
    while (m.peak <= m.available) {
        m.S *= 2, m.saved.clear();
        m.peak = planned_peak([&] {
            Passes p(naive, random_inputs(grid_case(m.S, m.D), F32, 0), false);
            p.forward();
            for (const Memory* buffer : live_memory(META)) { m.saved[buffer->bytes]++; }
            p.backward();
        });
    }
    return m;
}

void answer_pytorch_attention(const std::vector<AttentionRun>& runs, const AttentionMemory& m) {
    const double MiB = 1048576, GiB = 1024 * MiB;
    const AttentionRun *last = nullptr, *before = nullptr;  // the longest two of the first D
    int ooms = 0;
    for (const AttentionRun& r : runs) {
        ooms += r.naive.oom > 0;
        if (!r.naive.oom && r.D == runs[0].D) { before = last, last = &r; }
    }
    answer("a", "Memory runs out in %s of the %zu configurations.", ooms ? std::to_string(ooms).c_str() : "none",
           runs.size());
    if (before) {
        answer("a", "At S %d with D %d forward takes %.4g ms and backward %.4g ms.", last->S, last->D,
               last->naive.forward.mean, last->naive.backward.mean);
        const bool square =
            std::log((double)last->naive.held / before->naive.held) > 1.5 * std::log((double)last->S / before->S);
        answer("a", "The memory saved for backward grows %s: %.1f MiB at S %d, %.1f MiB at S %d.",
               square ? "with S^2" : "more slowly than S^2 at these lengths", before->naive.held / MiB, before->S,
               last->naive.held / MiB, last->S);
    }
    std::vector<std::string> buffers;
    size_t saved = 0, square = m.saved.rbegin()->first;
    for (auto b = m.saved.rbegin(); b != m.saved.rend(); b++) {
        buffers.push_back(strprintf("%s of %g MiB", counted(b->second, "buffer").c_str(), b->first / MiB));
        saved += b->first * b->second;
    }
    answer("a",
           "The smallest configuration that does not fit (doubling S, predicted) has S %d and D %d: it needs %.1f GiB, "
           "and %.1f are there. When backward starts, it holds %.1f GiB: %s. The largest are exp(S - m) and P, %d x "
           "%d^2 numbers of %zu bytes. At the peak, in backward, %zu of that size are held, because gradients such as "
           "dP come on top.",
           m.S, m.D, m.peak / GiB, m.available / GiB, saved / GiB, list_of(buffers).c_str(), GRID_BATCH, m.S,
           square / GRID_BATCH / m.S / m.S, m.peak / square);
    answer("a",
           "FlashAttention removes this cost: it keeps L, one number per query, and computes P again in backward, tile "
           "by tile. It would hold q, k, v, dO, O and L, %.1f MiB.",
           sizeof(float) * GRID_BATCH * m.S * (5.0 * m.D + 1) / MiB);
}
int cmd_pytorch_attention(const Options& o) {
    context.device = choose_device(o.device);
    const std::vector<AttentionRun> runs = run_grid(o, false);
    Table table{grid_caption(o, "pytorch_attention: one kernel per operation; times in s, memory in MiB"),
                {"d_model", "seq_len", "forward_time", "backward_time", "memory_usage_mb", "status"}};
    for (const AttentionRun& r : runs) {
        if (r.naive.oom) {
            table.row(r.D, r.S, "N/A", "N/A", "N/A", oom_cell(r.naive.oom));
        } else {
            table.row(r.D, r.S, strprintf("%.6f", r.naive.forward.mean / 1e3),
                      strprintf("%.6f", r.naive.backward.mean / 1e3), strprintf("%.2f", r.naive.held / 1048576.0),
                      "OK");
        }
    }
    print(table);
    answer_pytorch_attention(runs, smallest_that_does_not_fit());
    return 0;
}

void answer_torch_compile_attention(const std::vector<AttentionRun>& runs) {
    const std::string forward = compared(runs, &PassTimes::forward, &Stats::mean),
                      backward = compared(runs, &PassTimes::backward, &Stats::mean);
    answer("a",
           "Compiled attention's forward is %s. Its backward is %s. \"Compiled\" is our softmax, fused into one kernel "
           "by hand; torch.compile itself did not run.",
           forward.c_str(), backward.c_str());
}
void torch_compile_attention(const Options& o) {
    const std::vector<AttentionRun> runs = run_grid(o, true);
    Table table{
        grid_caption(o, "torch_compile (a): attention, vanilla = one kernel per operation, compiled = fused softmax"),
        {"d_model", "seq_len", "vanilla fw ms", "compiled fw ms", "speedup fw", "vanilla bw ms", "compiled bw ms",
         "speedup bw"}};
    for (const AttentionRun& r : runs) {
        auto ms = [](const PassTimes& t, const Stats& s) { return cell(t, s, &Stats::mean); };
        table.row(r.D, r.S, ms(r.naive, r.naive.forward), ms(r.other, r.other.forward),
                  speedup(r, &PassTimes::forward, &Stats::mean), ms(r.naive, r.naive.backward),
                  ms(r.other, r.other.backward), speedup(r, &PassTimes::backward, &Stats::mean));
    }
    print(table);
    answer_torch_compile_attention(runs);
}

// ---------------------------------------------------------------------------------------------------------------------
// weighted_sum

struct WeightedSum {
    Tensor x, w, dy, y, dx, dw;
    WeightedSum(const Tensor& x, const Tensor& w, const Tensor& dy)
        : x(x), w(w), dy(dy), y(empty(dy.shape, x.dtype)), dx(empty(x.shape, x.dtype)), dw(empty(w.shape, x.dtype)) {}
    void forward() { weighted_sum_forward(y, x, w); }
    void backward() { weighted_sum_backward(dx, dw, dy, x, w); }
};
// Times one size, and compares y, dx and dw with the fp64 reference on the CPU.
static void weighted_sum_row(Table& table, int64_t N, int64_t D) {
    WeightedSum s(empty({N, D}, F32), empty({D}, F32), empty({N}, F32));
    fill_normal(s.x, 0, 1, 0, 1), fill_normal(s.w, 0, 2, 0, 1), fill_normal(s.dy, 0, 3, 0, 1);
    const double forward = stats_of(time_ms(2, 10, [&] { s.forward(); })).median;
    const double backward = stats_of(time_ms(2, 10, [&] { s.backward(); })).median;
    const double GB = 1e-9 * sizeof(float), second = 1e-3;

    RestoreContext restore;
    context.device = CPU;
    auto fp64 = [](const Tensor& t) { return cast(to_device(t, CPU), F64); };
    WeightedSum truth(fp64(s.x), fp64(s.w), fp64(s.dy));
    truth.forward(), truth.backward();
    double error = 0;
    auto check = [&](const Tensor& got, const Tensor& want, int64_t terms) {
        double tolerance = 1e-6 * std::sqrt((double)terms) + 1e-6;  // rounding errors of a sum grow like a random walk
        Comparison c = compare(got, want, tolerance, 4 * tolerance);
        if (!c.ok()) { fail("weighted_sum of %s: %s", to_string(s.x.shape).c_str(), to_string(c).c_str()); }
        error = std::max(error, c.max_abs);
    };
    check(s.y, truth.y, D), check(s.dx, truth.dx, 1), check(s.dw, truth.dw, N);
    table.row(N, D, forward, GB * (N * D + D + N) / (second * forward), backward,
              GB * (2 * N * D + 2 * D + N) / (second * backward), strprintf("%.1e", error));
}
int cmd_weighted_sum(const Options& o) {
    context.device = choose_device(o.device);
    Table table{strprintf("weighted_sum: forward and backward, fp32, median of 10 runs after 2, errors against fp64"),
                {"N", "D", "forward ms", "GB/s", "backward ms", "GB/s", "max error"}};
    for (auto [N, D] : {std::pair{1, 1}, {1, 7}, {3, 1}, {31, 33}, {257, 129}, {1000, 1023}, {5, 4097}}) {
        weighted_sum_row(table, N, D);
    }
    o.quick ? weighted_sum_row(table, 2048, 512) : weighted_sum_row(table, 65536, 4096);
    print(table);
    answer("",
           "For a large x memory bounds both passes: per number of x, forward does two FLOPs and reads 4 bytes, "
           "backward does three, reads 4 bytes and writes 4.");
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// flash_forward, flash_backward: every implementation that runs here against the reference in float64, at the handout's
// test size and at odd ones, with the handout's tolerance.

static const std::vector<AttentionCase> check_cases = {
    {4, 1, 128, 128, 64, false}, {4, 1, 128, 128, 64, true},   {1, 2, 1, 1, 16, true},      {2, 3, 65, 65, 32, true},
    {1, 2, 127, 200, 80, false}, {1, 2, 200, 127, 80, true},   {2, 1, 257, 129, 128, true}, {1, 1, 63, 300, 128, true},
    {1, 2, 700, 500, 64, false}, {1, 2, 500, 300, 128, false}, {1, 1, 500, 300, 80, false},
};
static Inputs on(Device device, DType dtype, Inputs in) {
    RestoreContext restore;
    context.device = device;
    for (Tensor* t : {&in.q, &in.k, &in.v, &in.dO}) { *t = cast(to_device(*t, device), dtype); }
    return in;
}
static std::vector<AttentionCheck> check_attention(const Options& o, const char* name, bool with_backward) {
    const Device device = context.device = choose_device(o.device);
    Table table{strprintf("%s: largest error against the reference in float64, rtol = atol = 1e-2", name),
                {"implementation", "dtype", "B, H, Tq, Tk, D", "causal", "O", "L"}};
    if (with_backward) { table.columns.insert(table.columns.end(), {"dQ", "dK", "dV"}); }
    table.columns.push_back("status");
    std::vector<AttentionCheck> checks;
    int wrong = 0;
    for (const AttentionCase& c : check_cases) {
        if (o.quick && (int64_t)c.B * c.Tq * c.Tk > 70000) { continue; }
        for (DType dtype : {F32, BF16, F16}) {
            context.device = CPU;
            progress("%s: S %d, D %d, %s", name, c.Tq, c.D, name_of(dtype));
            const Inputs in = random_inputs(c, dtype, o.seed), wide = on(CPU, F64, in);
            const std::vector<Tensor> want =
                outputs_of(table_of<AttentionImpl>().front(), wide, c.causal, with_backward);
            for (const AttentionImpl& impl : table_of<AttentionImpl>()) {
                const bool is_tiled = impl.device == CPU && is_flash(impl);  // (a)'s, which needs no GPU
                if ((impl.device != device && !is_tiled) || !impl.takes(dtype, c.D)) { continue; }
                context.device = impl.device;
                const std::vector<Tensor> got = outputs_of(impl, on(impl.device, dtype, in), c.causal, with_backward);
                checks.push_back({is_flash(impl), dtype, c});
                table.row(impl.name, dtype, strprintf("%d, %d, %d, %d, %d", c.B, c.H, c.Tq, c.Tk, c.D),
                          c.causal ? "yes" : "no");
                bool ok = true;
                for (size_t i = 0; i < want.size(); i++) {
                    Comparison difference = compare(got[i], want[i], 1e-2, 1e-2);
                    checks.back().errors.push_back(difference.max_abs);
                    table.rows.back().push_back(strprintf("%.1e", difference.max_abs));
                    ok = ok && difference.ok();
                }
                table.rows.back().push_back(ok ? "ok" : "WRONG");
                wrong += !ok;
            }
        }
    }
    context.device = device;
    print(table);
    if (wrong > 0) { fail("%d of %zu checks are off", wrong, checks.size()); }
    return checks;
}

// outputs: from which on, 0: O, 2: dQ
static void answer_errors(const std::vector<AttentionCheck>& checks, size_t outputs, const char* names) {
    std::vector<std::string> worst;
    for (DType dtype : {F32, BF16, F16}) {
        double error = -1;
        for (const AttentionCheck& r : checks) {
            if (r.dtype != dtype || !r.is_flash || r.c.B != 4) { continue; }
            error = std::max(error, *std::max_element(r.errors.begin() + outputs, r.errors.end()));
        }
        if (error >= 0) { worst.push_back(strprintf("%.1e in %s", error, name_of(dtype))); }
    }
    answer("",
           "All %zu checks pass: |error| <= 1e-2 + 1e-2 |reference|. In the handout's test (batch 4, S 128, D 64) the "
           "largest error in FlashAttention's %s is %s.",
           checks.size(), names, list_of(worst).c_str());
}
void answer_flash_forward(const std::vector<AttentionCheck>& checks) {
    answer("a", "`tiled` is the plain version: FlashAttention-2 in C++, without a kernel.");
    answer("b", "A block of a kernel works on one tile of queries of one head and loops over the tiles of keys.%s",
           context.device == CPU ? " None ran: they need a GPU." : "");
    answer("c",
           "A masked score becomes -inf where the handout adds -1e6. Both give the probability 0, because each query "
           "sees at least key 0.");
    answer_errors(checks, 0, "O and L");
}
void answer_flash_backward(const std::vector<AttentionCheck>& checks) {
    answer("", "Backward computes P again, from L, and takes D = rowsum(O dO) in place of rowsum(P dP).");
    answer_errors(checks, 2, "dQ, dK and dV");
}
int cmd_flash_forward(const Options& o) {
    answer_flash_forward(check_attention(o, "flash_forward", false));
    return 0;
}
int cmd_flash_backward(const Options& o) {
    answer_flash_backward(check_attention(o, "flash_backward", true));
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// flash_benchmarking: FlashAttention against naive, batch 1, one head, causal

void answer_flash_benchmarking(const std::vector<AttentionRun>& runs) {
    for (DType dtype : {BF16, F32}) {
        std::vector<AttentionRun> same;
        for (const AttentionRun& r : runs) {
            if (r.dtype == dtype) { same.push_back(r); }
        }
        if (same.empty()) {
            answer("a", "No implementation of flash on this device takes %s.", name_of(dtype));
            continue;
        }
        answer("a", "In %s flash, timed against naive over forward and backward, is %s.", name_of(dtype),
               compared(same, &PassTimes::both, &Stats::median).c_str());
    }
}
int cmd_flash_benchmarking(const Options& o) {
    context.device = choose_device(o.device);
    const int longest = o.quick ? 512 : 65536;
    const double budget = o.quick ? 20 : 100;
    const Measure measure = for_ms(budget / 4, budget);
    const AttentionImpl& naive = *impl_named("naive");
    std::vector<AttentionRun> runs;
    for (DType dtype : {BF16, F32}) {
        for (int D : {16, 32, 64, 128}) {
            const AttentionImpl* flash = fastest_flash(context.device, dtype, D);  // none: bf16 on the CPU
            for (int S = 128; flash && S <= longest; S *= 2) {
                const AttentionCase c{1, 1, S, S, D, true};
                runs.push_back({S, D, dtype, pass_times(naive, c, dtype, measure, true),
                                pass_times(*flash, c, dtype, measure, true)});
            }
        }
    }
    Table table{
        strprintf("flash_benchmarking: batch 1, one head, causal, ms (median of %.0f ms of runs)", budget),
        {"Seq", "D", "dtype", "Naive Fwd", "Naive Bwd", "Naive Tot", "Flash Fwd", "Flash Bwd", "Flash Tot", "x Tot"}};
    for (const AttentionRun& r : runs) {
        auto ms = [](const PassTimes& t, const Stats& s) { return cell(t, s, &Stats::median); };
        const PassTimes &n = r.naive, &f = r.other;
        table.row(r.S, r.D, r.dtype, ms(n, n.forward), ms(n, n.backward), ms(n, n.both), ms(f, f.forward),
                  ms(f, f.backward), ms(f, f.both), speedup(r, &PassTimes::both, &Stats::median));
    }
    print(table);
    answer_flash_benchmarking(runs);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// flash_leaderboard: forward and backward of one long causal sequence

void answer_flash_leaderboard(const std::string& impl, const PassTimes& t, double tflops, double matmul_tflops,
                              bool is_handouts) {
    answer("",
           "Our fastest, %s, takes %.3f ms for forward and backward, %.3f ms for forward alone. That is %.3g %s, %.0f "
           "%% of the rate of matrix products on this device.",
           impl.c_str(), t.both.median, t.forward.median, tflops * unit_of(tflops).per_tera, unit_of(tflops).name,
           100 * tflops / matmul_tflops);
    if (is_handouts) {
        answer("", "The class leaderboard of 2025 was led with 5.364 ms, in Triton on an H100; ours is CUDA.");
    }
}
int cmd_flash_leaderboard(const Options& options) {
    Options o = options;
    if (o.quick) {
        by_quick(o, "d_model", &Options::d_model, 128), by_quick(o, "num_heads", &Options::num_heads, 2);
        by_quick(o, "context_length", &Options::context_length, 512);
    }
    const int D = o.d_model / o.num_heads;
    if (o.d_model % o.num_heads != 0 || !flash_head_size(D)) {
        usage_error("--d_model %d over --num_heads %d: takes a head size of 16, 32, 64, 80 or 128", o.d_model,
                    o.num_heads);
    }
    context.device = choose_device(o.device);
    if (o.quick && context.device == CPU) { by_quick(o, "precision", &Options::precision, {"fp32"}); }  // its only one
    const double warmup = o.quick ? 100 : 1000, budget = o.quick ? 500 : 10000;                         // ms
    const AttentionCase c{1, o.num_heads, o.context_length, o.context_length, D, true};
    const Precision precision = context.precision = precision_from(o.precision[0]);
    const DType dtype = matmul_dtype();
    const AttentionImpl& fastest = require_flash(context.device, dtype, c.D);
    const Measure measure = for_ms(warmup, budget);
    const double rate = matmul_rate(precision, o.quick ? 1024 : 8192, 20);
    const FlopUnit unit = unit_of(rate);
    Table table{
        strprintf("flash_leaderboard: batch 1, %s, D %d, S %d, %s, causal; %.2g s of warm-up, %.2g s of runs, median; "
                  "this device multiplies matrices at %.3g %s",
                  counted(c.H, "head").c_str(), c.D, c.Tq, name_of(precision), warmup / 1e3, budget / 1e3,
                  rate * unit.per_tera, unit.name),
        {"implementation", "forward ms", "backward ms", "forward+backward ms", unit.name, "% of the matmul rate"}};
    std::string best;
    PassTimes best_times;
    const double flop = 3.5 * 2 * c.H * c.Tq * (double)c.Tk * c.D;  // of half of S^2
    for (const AttentionImpl& impl : table_of<AttentionImpl>()) {
        const bool asked = o.impl == "all"    ? is_flash(impl)
                           : o.impl == "auto" ? &impl == &fastest
                                              : o.impl == impl.name;
        if (impl.device != context.device || !impl.takes(dtype, c.D) || !asked) { continue; }
        const PassTimes t = pass_times(impl, c, dtype, measure, true);
        auto ms = [&](const Stats& s) { return cell(t, s, &Stats::median); };
        const double tflops = t.oom ? NAN : flop / t.both.median / 1e9;
        table.row(impl.name, ms(t.forward), ms(t.backward), ms(t.both), tflops * unit.per_tera, 100 * tflops / rate);
        if (!t.oom && (best.empty() || t.both.median < best_times.both.median)) { best = impl.name, best_times = t; }
    }
    if (table.rows.empty()) {
        usage_error("--impl: %s does not take %s on %s", o.impl.c_str(), name_of(dtype), name_of(context.device));
    }
    print(table);
    if (best.empty()) { fail("flash_leaderboard: no row fits into memory"); }
    answer_flash_leaderboard(best, best_times, flop / best_times.both.median / 1e9, rate,
                             c.H == 16 && c.D == 64 && c.Tq == 16384 && precision == PREC_BF16);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// attention: your q, k, v (and do) in, our o, lse (and dq, dk, dv) out

static Tensor from_file(const FileTensor& f, const std::string& path) {
    Shape shape = f.shape;
    if (shape.size() == 3) { shape.insert(shape.begin() + 1, 1); }
    if (count(shape) == 0) { fail("%s: a tensor is empty, %s", path.c_str(), to_string(f.shape).c_str()); }
    Tensor t = empty_on(CPU, shape, f.dtype == "BF16" ? BF16 : F32, INPUTS);
    memcpy(t.data, f.data, f.bytes);
    return to_device(t, context.device);
}
int cmd_attention(const Options& o) {
    context.device = choose_device(o.device);
    const AttentionImpl* impl = o.impl == "auto" ? nullptr : impl_named(o.impl);
    const char* path = o.inputs.c_str();
    SafeTensors file = load_safetensors(o.inputs);
    const auto q = file.tensors.find("q");
    const bool has_heads = q == file.tensors.end() || q->second.shape.size() != 3;
    FileTensor fq = require_tensor(file, "q", Shape(has_heads ? 4 : 3, -1), {"F32", "BF16"});
    const Shape shape = fq.shape;
    Shape keys = shape;
    keys[keys.size() - 2] = -1;
    FileTensor fk = require_tensor(file, "k", keys, {fq.dtype}), fv = require_tensor(file, "v", fk.shape, {fq.dtype});
    require_no_others(file, {"q", "k", "v", "do"}, "q, k, v or do");
    const bool with_backward = file.tensors.count("do") > 0;
    const int64_t D = shape.back();
    if (!flash_head_size(D)) {
        fail("%s: tensor q: expected a head size of 16, 32, 64, 80 or 128, found %ld", path, (long)D);
    }
    Inputs in{from_file(fq, o.inputs), from_file(fk, o.inputs), from_file(fv, o.inputs), Tensor()};
    if (with_backward) { in.dO = from_file(require_tensor(file, "do", shape, {fq.dtype}), o.inputs); }
    if (!impl) { impl = fastest_flash(context.device, in.q.dtype, D); }
    if (!impl) { impl = impl_named("fused"); }
    if (!impl->takes(in.q.dtype, D)) {
        fail("%s: holds %s, and --impl %s does not take it", path, name_of(in.q.dtype), impl->name);
    }
    const std::vector<Tensor> outputs = outputs_of(*impl, in, o.causal, with_backward);
    const char* names[] = {"o", "lse", "dq", "dk", "dv"};
    const Shape shapes[] = {shape, Shape(shape.begin(), shape.end() - 1), shape, fk.shape, fk.shape};
    std::vector<Tensor> kept;
    std::vector<std::pair<std::string, FileTensor>> out;
    for (size_t i = 0; i < outputs.size(); i++) {
        kept.push_back(view(to_device(contiguous(outputs[i]), CPU), 0, shapes[i]));
        out.push_back({names[i], describe(kept.back())});
    }
    save_safetensors(o.out, out, {{"format", "pt"}});
    std::string line =
        strprintf("attention %s: q %s, k %s, %s, %s, implementation %s on %s; wrote %zu tensors to %s", path,
                  to_string(shape).c_str(), to_string(fk.shape).c_str(), name_of(in.q.dtype),
                  o.causal ? "causal" : "not causal", impl->name, name_of(context.device), out.size(), o.out.c_str());
    printf("%s\n", one_line(line).c_str());
    return 0;
}
