// bench_attention.cu: the experiments of sections 1.2 and 1.3. How long attention takes and what it keeps, every
// implementation against the reference, the leaderboard, and `attention`: your q, k, v in, our output out.
#include "commands.h"
#include <algorithm>
#include <cinttypes>
#include <cstdio>

// ---------------------------------------------------------------------------------------------------------------------
// The experiments of 1.2.1 and 1.3 (a): batch 8, no heads, no mask, head sizes and lengths on a grid

struct AttentionCost : Attempt {  // needs: of forward and backward
    double forward_ms = 0, backward_ms = 0;
    size_t before_backward = 0;  // bytes held when backward starts: inputs, and what the forward saved
};
using AttentionFunction = Tensor (*)(const Tensor&, const Tensor&, const Tensor&, bool, Tensor*);
constexpr int GRID_BATCH = 8;
static const std::vector<int> grid_head_sizes = {16, 32, 64, 128};

struct GridInputs {
    Tensor q, k, v, dO;
};
static GridInputs grid_inputs(int S, int D) {
    GridInputs in;
    uint64_t key = 0;
    for (Tensor* t : {&in.q, &in.k, &in.v, &in.dO}) {
        *t = empty({GRID_BATCH, 1, S, D}, F32, INPUTS);
        fill_normal(*t, 0, key++, 0, 1);
        *t = require_gradient(*t);
    }
    return in;
}
// A forward and a backward pass without data; afterwards META's books tell the peak. `saved` sees what is held between.
static Prediction grid_peak(
    AttentionFunction f, int S, int D, const std::function<void()>& saved = [] {}) {
    return planned_peak([&] {
        GridInputs in = grid_inputs(S, D);
        Tensor o = f(in.q, in.k, in.v, false, nullptr);
        saved();
        backward_from(o, in.dO);
    });
}
static void time_grid(AttentionCost& cost, AttentionFunction f, int S, int D, int passes) {
    GridInputs in = grid_inputs(S, D);
    Tensor o;
    auto forward = [&] { o = f(in.q, in.k, in.v, false, nullptr); };
    auto reset = [&] {
        clear_tape();
        o = Tensor();
        for (const Tensor* t : {&in.q, &in.k, &in.v}) { t->gradient->value = Tensor(); }
    };
    cost.forward_ms = stats_of(time_queued_ms(3, passes, reset, forward)).mean;
    cost.before_backward = memory_use(context.device).now;
    auto prepare = [&] {
        reset();
        forward();
    };
    cost.backward_ms = stats_of(time_queued_ms(3, passes, prepare, [&] { backward_from(o, in.dO); })).mean;
    reset();
}
static AttentionCost grid_cost(AttentionFunction f, int S, int D, int passes) {
    AttentionCost cost;
    cost.needs = grid_peak(f, S, D);
    std::string row = strprintf("S %d, D %d, %s", S, D, name_of(context.mode));
    cost.run(row, 2 * (3 + passes), [&] { time_grid(cost, f, S, D, passes); });
    return cost;
}

// The lengths are the plan's context_lengths, the passes its steps. --context_length is torch_compile's, for the model.
static Plan grid_plan(const Options& o) {
    Plan p{o};
    p.o.context_lengths = {256, 1024, 4096, 8192, 16384};
    bool cpu = context.device == CPU;
    if (cpu || o.quick) {
        p.o.context_lengths.resize(3 - cpu - (cpu && o.quick));
        p.note_smaller(strprintf("lengths up to %d instead of 16384", p.o.context_lengths.back()));
        int passes = o.quick ? 3 : 10;
        p.shrink("steps", &Options::steps, passes, strprintf("%d passes instead of %d", passes, o.steps));
    }
    return p;
}
static std::string grid_caption(const Plan& p, const char* what) {
    return strprintf("%s; batch %d, no heads, no mask, precision %s, 3 warmup, %d forward and %d backward passes; %s",
                     what, GRID_BATCH, name_of(context.precision), p.o.steps, p.o.steps, p.origin().c_str());
}

// What attention keeps for its backward, and what it holds at the peak in backward: buffer by buffer, as the allocator
// saw it on META.
static Table saved_table(int S, int D, size_t available) {
    struct Buffers {
        int saved = 0, at_peak = 0;
    };
    std::map<std::pair<std::string, size_t>, Buffers> groups;
    size_t saved = 0, highest = 0;
    std::vector<const Memory*> before = live_memory(META);
    start_memory_log(META);
    const Prediction planned = grid_peak(attention_naive, S, D, [&] {
        for (const Memory* m : live_memory(META)) {
            if (std::count(before.begin(), before.end(), m)) { continue; }
            groups[{m->category == INPUTS ? "inputs and dO" : m->op, m->bytes}].saved++;
            saved += m->bytes;
        }
    });
    const size_t peak = planned.bytes;
    std::vector<MemoryEvent> log = stop_memory_log();
    peak_of(log, &highest);
    std::map<uint64_t, int*> held;
    for (size_t i = 0; i <= highest; i++) {
        const MemoryEvent& e = log[i];
        if (e.ms == 0) { continue; }  // held before
        if (e.is_alloc) {
            const char* range = e.ranges.empty() ? "" : e.ranges.back();
            held[e.address] = &groups[{e.category == INPUTS ? "inputs and dO" : range, e.bytes}].at_peak;
        }
        *held.at(e.address) += e.is_alloc ? 1 : -1;
    }
    Table table{
        strprintf("the smallest configuration that does not fit: batch %d, d %d, S %d needs %.2f GiB at its peak, "
                  "%.2f GiB are there. What is held when backward starts:",
                  GRID_BATCH, D, S, peak / 1073741824.0, available / 1073741824.0),
        {"what", "buffers", "bytes each", "bytes", "MiB", "buffers at the peak"},
        {}};
    for (const auto& [what, n] : groups) {
        if (n.saved + n.at_peak == 0) { continue; }
        size_t bytes = what.second * n.saved;
        table.rows.push_back({what.first, std::to_string(n.saved), std::to_string(what.second), std::to_string(bytes),
                              strprintf("%.2f", bytes / 1048576.0), std::to_string(n.at_peak)});
    }
    table.rows.push_back({"all", "", "", std::to_string(saved), strprintf("%.2f", saved / 1048576.0), ""});
    table.rows.push_back({"peak in backward", "", "", std::to_string(peak), strprintf("%.2f", peak / 1048576.0), ""});
    return table;
}

int cmd_pytorch_attention(const Options& o) {
    context.device = choose_device(o.device);
    context.mode = EAGER;
    Plan p = grid_plan(o);
    Table table{grid_caption(p, "pytorch_attention: one kernel per operation"),
                {"d_model", "seq_len", "forward_time", "backward_time", "memory_usage_mb", "status"},
                {}};
    for (int D : grid_head_sizes) {
        for (int S : p.o.context_lengths) {
            AttentionCost c = grid_cost(attention_naive, S, D, p.o.steps);
            std::vector<std::string> row = {std::to_string(D), std::to_string(S)};
            for (double ms : {c.forward_ms, c.backward_ms}) {
                row.push_back(c.ran ? strprintf("%.6f", ms / 1e3) : "N/A");
            }
            row.push_back(c.ran ? strprintf("%.2f", c.before_backward / 1048576.0) : "N/A");
            row.push_back(c.cell("OK"));
            table.rows.push_back(row);
        }
    }
    print(table, o.format);
    size_t available = available_memory(context.device);
    int S = 256;
    while (grid_peak(attention_naive, S, grid_head_sizes[0]).bytes <= available) { S *= 2; }
    print(saved_table(S, grid_head_sizes[0], available), o.format);
    return 0;
}

Table attention_compile_table(const Options& o) {
    Plan p = grid_plan(o);
    Table table{
        grid_caption(p, "torch_compile (a): attention, vanilla = one kernel per operation, compiled = fused softmax"),
        {"d_model", "seq_len", "vanilla fw (ms)", "compiled fw (ms)", "speedup fw", "vanilla bw (ms)",
         "compiled bw (ms)", "speedup bw"},
        {}};
    for (int D : grid_head_sizes) {
        for (int S : p.o.context_lengths) {
            context.mode = EAGER;
            AttentionCost naive = grid_cost(attention_naive, S, D, p.o.steps);
            context.mode = FUSED;
            AttentionCost fused = grid_cost(attention_fused, S, D, p.o.steps);
            std::vector<std::string> row = {std::to_string(D), std::to_string(S)};
            for (double AttentionCost::*pass : {&AttentionCost::forward_ms, &AttentionCost::backward_ms}) {
                for (const AttentionCost* c : {&naive, &fused}) { row.push_back(c->cell(strprintf("%.3f", c->*pass))); }
                row.push_back(naive.ran && fused.ran ? strprintf("%.2fx", naive.*pass / fused.*pass) : "");
            }
            table.rows.push_back(row);
        }
    }
    return table;
}

// ---------------------------------------------------------------------------------------------------------------------
// weighted_sum

// Times one size, and compares y, dx and dw with the fp64 reference on the CPU; *ok becomes false if one is off.
static void weighted_sum_row(Table* table, int64_t N, int64_t D, int runs, bool* ok) {
    Tensor x = empty({N, D}, F32), w = empty({D}, F32), dy = empty({N}, F32), y = empty({N}, F32);
    Tensor dx = empty({N, D}, F32), dw = empty({D}, F32);
    fill_normal(x, 0, 1, 0, 1), fill_normal(w, 0, 2, 0, 1), fill_normal(dy, 0, 3, 0, 1);
    Stats forward = stats_of(time_ms(2, runs, [&] { weighted_sum_forward(y, x, w); }));
    Stats backward = stats_of(time_ms(2, runs, [&] { weighted_sum_backward(dx, dw, dy, x, w); }));

    Device device = context.device;
    context.device = CPU;
    auto fp64 = [](const Tensor& t) { return cast(to_device(t, CPU), F64); };
    Tensor x64 = fp64(x), w64 = fp64(w), dy64 = fp64(dy), y64 = empty({N}, F64);
    Tensor dx64 = empty({N, D}, F64), dw64 = empty({D}, F64);
    weighted_sum_forward(y64, x64, w64);
    weighted_sum_backward(dx64, dw64, dy64, x64, w64);
    double error = 0;
    auto check = [&](const Tensor& got, const Tensor& want, int64_t terms) {
        double tolerance = 1e-6 * std::sqrt((double)terms) + 1e-6;  // rounding errors of a sum grow like a random walk
        Comparison c = compare(got, want, tolerance, 4 * tolerance);
        error = std::max(error, c.max_abs);
        *ok = *ok && c.ok();
    };
    check(y, y64, D), check(dx, dx64, 1), check(dw, dw64, N);
    context.device = device;
    double GB = 1e9, ms = 1e-3;
    double forward_bytes = 4.0 * (N * D + D + N), backward_bytes = 4.0 * (2 * N * D + 2 * D + N);
    table->rows.push_back({name_of(device), std::to_string(N), std::to_string(D), strprintf("%.4g", forward.median),
                           strprintf("%.4g", forward_bytes / (forward.median * ms) / GB),
                           strprintf("%.4g", backward.median),
                           strprintf("%.4g", backward_bytes / (backward.median * ms) / GB), strprintf("%.1e", error)});
}
int cmd_weighted_sum(const Options& o) {
    constexpr int RUNS = 10;
    Device chosen = choose_device(o.device);
    Plan p{o};
    if (o.quick || chosen == CPU) { p.note_smaller(o.quick ? "--quick, smaller sizes" : "no GPU, smaller sizes"); }
    context.device = chosen;
    Table table;
    table.caption =
        strprintf("weighted_sum: forward and backward, fp32, median of %d runs after 2, errors against fp64; %s", RUNS,
                  p.origin().c_str());
    table.columns = {"device", "N", "D", "forward ms", "GB/s", "backward ms", "GB/s", "max error"};
    bool ok = true;
    std::vector<Shape> sizes = {{1, 1}, {1, 7}, {3, 1}, {31, 33}, {257, 129}, {1000, 1023}, {5, 4097}};
    for (Device device : {CPU, CUDA}) {
        if (device == CUDA && chosen != CUDA) { continue; }
        context.device = device;
        std::vector<Shape> all = sizes;
        all.push_back(o.quick ? Shape{2048, 512} : device == CUDA ? Shape{65536, 4096} : Shape{16384, 1024});
        for (const Shape& s : all) {
            Attempt attempt;
            attempt.needs.bytes = sizeof(float) * (2 * s[0] * s[1] + 2 * s[0] + 2 * s[1]);
            attempt.run(strprintf("weighted_sum %s %s", name_of(device), to_string(s).c_str()), 1,
                        [&] { weighted_sum_row(&table, s[0], s[1], RUNS, &ok); });
            if (attempt.ran) { continue; }
            table.rows.push_back({name_of(device), std::to_string(s[0]), std::to_string(s[1]), attempt.cell("")});
            table.rows.back().resize(table.columns.size());
        }
    }
    context.device = chosen;
    print(table, o.format);
    if (!ok) { fail("weighted_sum: a result is off by more than rounding explains"); }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// flash_forward, flash_backward: every implementation that runs here against the reference in float64, at the handout's
// test size and at odd ones, with the handout's tolerance.

struct AttentionCase {
    int B, H, Tq, Tk, D;
    bool causal;
};
static const std::vector<AttentionCase> check_cases = {
    {4, 1, 128, 128, 64, false}, {4, 1, 128, 128, 64, true},   {1, 2, 1, 1, 16, true},      {2, 3, 65, 65, 32, true},
    {1, 2, 127, 200, 80, false}, {1, 2, 200, 127, 80, true},   {2, 1, 257, 129, 128, true}, {1, 1, 63, 300, 128, true},
    {1, 2, 700, 500, 64, false}, {1, 2, 500, 300, 128, false}, {1, 1, 500, 300, 80, false},
};
struct CaseTensors {
    Tensor q, k, v, dO;
};
static CaseTensors random_case(const AttentionCase& c, DType dtype, uint64_t seed) {
    CaseTensors in;
    uint64_t key = 0;
    for (Tensor* t : {&in.q, &in.k, &in.v, &in.dO}) {
        *t = empty({c.B, c.H, key == 1 || key == 2 ? c.Tk : c.Tq, c.D}, dtype, INPUTS);
        fill_normal(*t, seed, key++, 0, 1);
    }
    return in;
}
struct CaseResult {
    Tensor o, L, dq, dk, dv;
};
using PartOf = Tensor CaseResult::*;
static CaseResult run_case(const AttentionImpl& impl, const CaseTensors& in, bool causal, bool with_backward) {
    CaseResult r;
    Tensor q = require_gradient(in.q), k = require_gradient(in.k), v = require_gradient(in.v);
    r.o = run_attention(impl, q, k, v, causal, &r.L);
    if (with_backward) {
        backward_from(r.o, in.dO);
        r.dq = q.gradient->value, r.dk = k.gradient->value, r.dv = v.gradient->value;
    }
    clear_tape();
    r.o = detached(r.o);
    return r;
}
static CaseResult reference_of(const CaseTensors& in, bool causal, bool with_backward) {
    RestoreContext restore;
    CaseTensors wide{to_device(in.q, CPU), to_device(in.k, CPU), to_device(in.v, CPU), to_device(in.dO, CPU)};
    context.device = CPU;
    for (Tensor* t : {&wide.q, &wide.k, &wide.v, &wide.dO}) { *t = cast(*t, F64); }
    return run_case(attention_impls().front(), wide, causal, with_backward);
}
static int check_attention(const Options& o, const char* name, bool with_backward) {
    context.device = choose_device(o.device);
    context.mode = FUSED;
    Plan p{o};
    if (o.quick) { p.note_smaller("without the largest sizes"); }
    Table table{strprintf("%s: largest error against the reference in float64, rtol = atol = 1e-2; %s", name,
                          p.origin().c_str()),
                {"implementation", "dtype", "B", "H", "Tq", "Tk", "D", "causal", "O", "L"},
                {}};
    if (with_backward) { table.columns.insert(table.columns.end(), {"dQ", "dK", "dV"}); }
    table.columns.push_back("status");
    int wrong = 0;
    for (const AttentionCase& c : check_cases) {
        if (o.quick && (int64_t)c.B * c.Tq * c.Tk > 70000) { continue; }
        for (DType dtype : {F32, BF16, F16}) {
            CaseTensors in = random_case(c, dtype, o.seed);
            CaseResult want = reference_of(in, c.causal, with_backward);
            for (const AttentionImpl& impl : attention_impls()) {
                if (impl.device != context.device || !impl.takes(dtype, c.D)) { continue; }
                CaseResult got = run_case(impl, in, c.causal, with_backward);
                std::vector<std::string> row = {impl.name,           name_of(dtype),         std::to_string(c.B),
                                                std::to_string(c.H), std::to_string(c.Tq),   std::to_string(c.Tk),
                                                std::to_string(c.D), c.causal ? "yes" : "no"};
                bool ok = true;
                for (PartOf part :
                     {&CaseResult::o, &CaseResult::L, &CaseResult::dq, &CaseResult::dk, &CaseResult::dv}) {
                    if (!(want.*part)) { continue; }
                    Comparison difference = compare(got.*part, want.*part, 1e-2, 1e-2);
                    row.push_back(strprintf("%.1e", difference.max_abs));
                    ok = ok && difference.ok();
                }
                row.push_back(ok ? "ok" : "WRONG");
                wrong += !ok;
                table.rows.push_back(row);
            }
        }
    }
    print(table, o.format);
    if (wrong > 0) { fail("%d of %zu checks are off", wrong, table.rows.size()); }
    return 0;
}
int cmd_flash_forward(const Options& o) { return check_attention(o, "flash_forward", false); }
int cmd_flash_backward(const Options& o) { return check_attention(o, "flash_backward", true); }

// ---------------------------------------------------------------------------------------------------------------------
// flash_benchmarking and flash_leaderboard

struct PassTimes : Attempt {
    double forward = 0, backward = 0, both = 0;  // ms, medians
};
static std::string ms_cell(const PassTimes& t, double ms) { return t.cell(strprintf("%.3f", ms)); }
// Each pass for about `budget` ms, at least 3 times.
static void time_passes(PassTimes& t, const AttentionImpl& impl, const AttentionCase& c, DType dtype, double warmup,
                        double budget) {
    CaseTensors in = random_case(c, dtype, 0);
    Tensor q = require_gradient(in.q), k = require_gradient(in.k), v = require_gradient(in.v), y;
    auto reset = [&] {
        clear_tape();
        y = Tensor();
        for (const Tensor* x : {&q, &k, &v}) { x->gradient->value = Tensor(); }
    };
    auto forward = [&] { y = run_attention(impl, q, k, v, c.causal); };
    auto backward = [&] { backward_from(y, in.dO); };
    auto measure = [&](const std::function<void()>& prepare, const std::function<void()>& f) {
        double once = stats_of(time_queued_ms(1, 1, prepare, f)).median;
        int n = std::clamp((int)(budget / once), 3, 5000), first = std::clamp((int)(warmup / once), 1, 5000);
        return stats_of(time_queued_ms(first, n, prepare, f)).median;
    };
    t.forward = measure(reset, forward);
    t.backward = measure([&] { reset(), forward(); }, backward);
    t.both = measure(reset, [&] { forward(), backward(); });
    reset();
}
static PassTimes pass_times(const AttentionImpl& impl, const AttentionCase& c, DType dtype, double warmup,
                            double budget) {
    PassTimes t;
    t.needs = planned_peak([&] { run_case(impl, random_case(c, dtype, 0), c.causal, true); });
    t.seconds = 3 * (warmup + budget) / 1e3;
    std::string row = strprintf("S %d, D %d, %s, %s", c.Tq, c.D, name_of(dtype), impl.name);
    t.run(row, 12, [&] { time_passes(t, impl, c, dtype, warmup, budget); });
    return t;
}
static const AttentionImpl& impl_named(const char* name, Device device) {
    for (const AttentionImpl& impl : attention_impls()) {
        if (impl.device == device && strcmp(impl.name, name) == 0) { return impl; }
    }
    fail("no implementation %s on %s", name, name_of(device));
}

int cmd_flash_benchmarking(const Options& o) {
    context.device = choose_device(o.device);
    context.mode = FUSED;
    bool cpu = context.device == CPU;
    int longest = cpu ? (o.quick ? 512 : 2048) : (o.quick ? 4096 : 65536);
    double budget = cpu || o.quick ? 20 : 100;
    Plan p{o};
    if (longest < 65536) { p.note_smaller(strprintf("lengths up to %d instead of 65536", longest)); }
    if (cpu) { p.note_smaller("no bf16 (the CPU's tiled version is fp32)"); }
    Table table{strprintf("flash_benchmarking: batch 1, one head, causal, ms (median of %.0f ms of runs); %s", budget,
                          p.origin().c_str()),
                {"Seq", "D", "dtype", "Naive Fwd", "Naive Bwd", "Naive Tot", "Flash Fwd", "Flash Bwd", "Flash Tot",
                 "x Fwd", "x Bwd", "x Tot", "of peak %"},
                {}};
    const AttentionImpl& naive = impl_named("naive", context.device);
    for (DType dtype : {BF16, F32}) {
        for (int D : {16, 32, 64, 128}) {
            const AttentionImpl* flash = fastest_flash(context.device, dtype, D);
            for (int S = 128; flash && S <= longest; S *= 2) {
                AttentionCase c{1, 1, S, S, D, true};
                PassTimes n = pass_times(naive, c, dtype, budget / 4, budget),
                          f = pass_times(*flash, c, dtype, budget / 4, budget);
                std::vector<std::string> row = {std::to_string(S), std::to_string(D), name_of(dtype)};
                for (const PassTimes* t : {&n, &f}) {
                    for (double ms : {t->forward, t->backward, t->both}) { row.push_back(ms_cell(*t, ms)); }
                }
                for (double x : {n.forward / f.forward, n.backward / f.backward, n.both / f.both}) {
                    row.push_back(n.ran && f.ran ? strprintf("%.2f", x) : "");
                }
                const double tflops = 3.5 * 2.0 * S * (double)S * D / f.both / 1e9;  // half of S^2: causal
                row.push_back(f.ran ? percent_of_peak(tflops, dtype == BF16 ? PREC_BF16 : FP32) : "");
                table.rows.push_back(row);
            }
        }
    }
    print(table, o.format);
    return 0;
}

// Published times at the same shape: batch 1, 16 heads, D 64, S 16384, bf16, causal, forward and backward.
struct Published {
    const char* who;
    const char* card;
    double ms;
};
static const Published published[] = {
    {"FlashAttention-3", "H200", 3.66},
    {"cuDNN through PyTorch SDPA", "H200", 4.46},
    {"class leaderboard 2025, first", "H100", 5.364},
    {"FlexAttention (Triton)", "H200", 6.22},
    {"class leaderboard 2025, second", "H100", 6.778},
    {"FlashAttention-2 through PyTorch SDPA", "H200", 6.98},
    {"class leaderboard 2025, third", "H100", 11.07},
    {"class leaderboard 2025, baseline", "H100", 80.0},
};
// "needs sm_80", where this card has no code of it; else "".
static std::string lacking(const AttentionImpl& impl) {
    for (DType dtype : {F32, BF16, F16}) {
        if (impl.takes(dtype, 64)) { return ""; }
    }
    std::string note = impl.note;
    return note.substr(std::min(note.find("needs "), note.size()));
}
int cmd_flash_leaderboard(const Options& o) {
    context.device = choose_device(o.device);
    context.mode = FUSED;
    bool cpu = context.device == CPU, handout = !cpu && !o.not_causal;
    for (const char* name : {"num_heads", "head_size", "context_length", "precision"}) {
        handout = handout && !o.has(name);
    }
    double warmup = o.quick ? 100 : 1000, budget = o.quick ? 500 : 10000;  // ms
    Plan p{o};
    if (cpu) {
        p.shrink("num_heads", &Options::num_heads, 2, strprintf("2 heads instead of %d", o.num_heads));
        p.shrink("context_length", &Options::context_length, o.quick ? 512 : 1024, "a shorter sequence");
        if (!o.has("precision")) { p.o.precision = {"fp32"}, p.note_smaller("fp32"); }
        p.note_smaller("less time");
        warmup = 10, budget = 200;
    } else if (o.quick) {
        p.note_smaller("0.1 s of warm-up and 0.5 s of runs instead of 1 s and 10 s");
    }
    const int S = p.o.context_length;
    const AttentionCase c{1, p.o.num_heads, S, S, o.head_size, !o.not_causal};
    const Precision precision = precision_from(p.o.precision[0]);
    context.precision = precision;
    DType dtype = matmul_dtype();
    const AttentionImpl& fastest = require_flash(context.device, dtype, c.D);
    std::vector<const AttentionImpl*> impls;
    std::vector<std::vector<std::string>> lack;
    std::string here;
    for (const AttentionImpl& impl : attention_impls()) {
        if (impl.device != context.device) { continue; }
        std::string needs = lacking(impl);
        if (!needs.empty() && o.impl == impl.name) { usage_error("--impl: %s %s", impl.name, needs.c_str()); }
        if (!needs.empty() && o.impl == "all") { lack.push_back({std::string("ours: ") + impl.name, needs}); }
        if (!impl.takes(dtype, c.D)) { continue; }
        here += std::string(", ") + impl.name;
        if (o.impl == impl.name || (o.impl == "all" && is_flash(impl)) || (o.impl == "auto" && &impl == &fastest)) {
            impls.push_back(&impl);
        }
    }
    if (impls.empty()) { usage_error("--impl: got '%s', takes all, auto%s here", o.impl.c_str(), here.c_str()); }
    double rate = context.plan_only ? NAN : matmul_rate(precision, cpu ? 1024 : 8192, 20);
    double forward_flops = (c.causal ? 2.0 : 4.0) * c.H * c.Tq * (double)c.Tk * c.D;
    Table table{strprintf("flash_leaderboard: batch 1, %s, D %d, S %d, %s, %s%s; %.2g s of warm-up, %.2g s of runs, "
                          "median; this "
                          "device multiplies matrices at %.3g TFLOP/s; %s",
                          counted(std::to_string(c.H), "head").c_str(), c.D, c.Tq, name_of(precision),
                          c.causal ? "causal" : "not causal", context.deterministic ? ", deterministic" : "",
                          warmup / 1e3, budget / 1e3, rate, p.origin().c_str()),
                {"implementation", "card", "forward ms", "backward ms", "forward+backward ms", "TFLOP/s",
                 "of the matmul rate", "of peak %"},
                {}};
    for (const AttentionImpl* impl : impls) {
        PassTimes t = pass_times(*impl, c, dtype, warmup, budget);
        double tflops = 3.5 * forward_flops / t.both / 1e9;
        table.rows.push_back({std::string("ours: ") + impl->name, "this one", ms_cell(t, t.forward),
                              ms_cell(t, t.backward), ms_cell(t, t.both), t.ran ? strprintf("%.3g", tflops) : "",
                              t.ran ? strprintf("%.0f %%", 100 * tflops / rate) : "",
                              t.ran ? percent_of_peak(tflops, precision) : ""});
    }
    for (std::vector<std::string>& row : lack) {
        row.resize(table.columns.size());
        table.rows.push_back(row);
    }
    for (const Published& other : published) {
        if (!handout) { break; }
        table.rows.push_back({other.who, other.card, "", "", strprintf("%.3f", other.ms),
                              strprintf("%.3g", 3.5 * forward_flops / other.ms / 1e9), "", ""});
    }
    print(table, o.format);
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
    context.mode = FUSED;
    std::vector<std::string> here, known;
    bool is_here = o.impl == "auto";
    for (const AttentionImpl& row : attention_impls()) {
        if (row.device != context.device) { continue; }
        here.push_back(row.name);
        is_here = is_here || o.impl == row.name;
    }
    if (!is_here) {
        usage_error("--impl: got '%s', takes auto or, on %s, one of %s", o.impl.c_str(), name_of(context.device),
                    join(here, ", ").c_str());
    }
    SafeTensors file = load_safetensors(o.inputs);
    auto q_it = file.tensors.find("q");
    if (q_it == file.tensors.end()) { fail("%s: tensor q is missing", o.inputs.c_str()); }
    Shape shape = q_it->second.shape;
    if (shape.size() != 3 && shape.size() != 4) {
        fail("%s: tensor q: expected shape [B,H,S,D] or [B,S,D], found %s", o.inputs.c_str(), to_string(shape).c_str());
    }
    FileTensor fq = require_tensor(file, "q", shape, {"F32", "BF16"});
    Shape keys = shape;
    keys[keys.size() - 2] = -1;
    FileTensor fk = require_tensor(file, "k", keys, {fq.dtype}), fv = require_tensor(file, "v", fk.shape, {fq.dtype});
    require_no_others(file, {"q", "k", "v", "do"}, "q, k, v or do");
    bool with_backward = file.tensors.count("do") > 0;
    int64_t D = shape.back();
    if (!flash_head_size(D)) {
        fail("%s: tensor q: expected a head size of 16, 32, 64, 80 or 128, found %ld", o.inputs.c_str(), (long)D);
    }
    CaseTensors in{from_file(fq, o.inputs), from_file(fk, o.inputs), from_file(fv, o.inputs), Tensor()};
    if (with_backward) { in.dO = from_file(require_tensor(file, "do", shape, {fq.dtype}), o.inputs); }

    const AttentionImpl* impl = nullptr;
    for (const AttentionImpl& row : attention_impls()) {
        if (row.device != context.device || !row.takes(in.q.dtype, D)) { continue; }
        known.push_back(row.name);
        if (o.impl == row.name) { impl = &row; }
    }
    if (o.impl == "auto") {
        impl = fastest_flash(context.device, in.q.dtype, D);
        if (!impl) { impl = &impl_named("fused", context.device); }
    }
    if (!impl) {
        fail("%s: holds %s, and --impl %s does not take it; %s do", o.inputs.c_str(), name_of(in.q.dtype),
             o.impl.c_str(), join(known, ", ").c_str());
    }
    CaseResult r = run_case(*impl, in, o.causal, with_backward);
    std::vector<Tensor> kept;
    std::vector<std::pair<std::string, FileTensor>> out;
    auto put = [&](const char* name, const Tensor& t, const Shape& as) {
        kept.push_back(view(to_device(contiguous(t), CPU), 0, as));
        out.push_back({name, describe(kept.back())});
    };
    put("o", r.o, shape);
    put("lse", r.L, Shape(shape.begin(), shape.end() - 1));
    if (with_backward) { put("dq", r.dq, shape), put("dk", r.dk, fk.shape), put("dv", r.dv, fk.shape); }
    save_safetensors(o.out, out, {{"format", "pt"}});
    std::string line =
        strprintf("attention %s: q %s, k %s, %s, %s, implementation %s on %s; wrote %zu tensors to %s",
                  o.inputs.c_str(), to_string(shape).c_str(), to_string(fk.shape).c_str(), name_of(in.q.dtype),
                  o.causal ? "causal" : "not causal", impl->name, name_of(context.device), out.size(), o.out.c_str());
    printf("%s\n", one_line(line).c_str());
    return 0;
}
