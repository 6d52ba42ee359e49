// flash_commands.cu: the commands of sections 1.3.2 and 1.3.3 of the handout: the reference in
// float64 and the checks against it, flash_forward and flash_backward; flash_benchmarking;
// flash_leaderboard; and `attention`, a command for your own tensors. What they run is flash.cu's
// table of implementations: read that file first.
#include "attention.h"

// -------------------------------------------------------------------------------------------------
// 1.3.2, the reference: one query at a time, by the definition, in fp64 on the CPU. Never
// optimised: all else is compared with it.
//   s_j = scale q_i k_j;  L_i = log sum_j exp s_j;  p_j = exp(s_j - L_i);  O_i = sum_j p_j v_j
//   dp_j = dO_i v_j;  D_i = sum_j p_j dp_j;  ds_j = p_j (dp_j - D_i)
//   dV_j += p_j dO_i;  dQ_i = scale sum_j ds_j k_j;  dK_j += scale ds_j q_i
// (handout, eq. 13-19)
//
// Beside each result stands its bound: what rounding may cost. Every number that an implementation
// may store (S, P, dP, dS and the results) is off by u of itself, where u is the type's unit
// roundoff plus that of fp32 times the root of the number of terms in the longest sum. The errors
// are independent, so their squares add up:
//   s_j   u max |s|
//   p_j   e p_j with e = u (1 + max |s|): an error of s_j is a relative one of exp(s_j)
//   L_i   e
//   dp_j  u dp_j
//   D_i   the root of sum_j (e p_j dp_j)^2 + sum_d (u O_id dO_id)^2: an implementation computes it
//         from P and dP, or from O and dO
//   ds_j  p_j times the root of (e (dp_j - D_i))^2 + (u dp_j)^2 + (D_i's error)^2
// A result is a sum of products such as p_j v_jd. A product's error is its first factor's error,
// above, times its second factor, which is an input and exact. With the root of the sum of these
// errors' squares the bound of a result is
//   SIGMAS (that root + u |result| + tiny)
// Tiny is what underflow may cost in fp16, of a result and of each first factor; else it is 0.

// Returns the inputs on context.device, in this dtype.
static AttentionTensors as_type(DType dtype, AttentionTensors in) {
    for (Tensor* t : {&in.q, &in.k, &in.v, &in.dO}) {
        if (*t) { *t = cast(to_device(*t, context.device), dtype); }
    }
    return in;
}
constexpr double SIGMAS = 6;
static double square(double x) { return x * x; }

// Returns half the distance from 1 to the next number of the type.
static double roundoff(DType t) {
    switch (t) {
        case BF16: return 0x1p-8;
        case F16: return 0x1p-11;
        case F32: return 0x1p-24;
        default: return 0x1p-53;
    }
}
enum { OF_O, OF_L, OF_DQ, OF_DK, OF_DV };
struct Reference {
    vector<Tensor> results, bounds;  // [OF_O] and [OF_L]; the others if there is a dO
};

// Adds what query i of a head gives to the results, and the squares of its errors to the bounds. t
// is in fp64; u is as above; tiny is what a factor may lose to underflow.
static void add_query(Reference& r, const AttentionTensors& t, double u, double tiny, int64_t head,
                      int64_t i) {
    const int64_t D = t.q.dim(3), query = head * t.q.dim(2) + i;
    const double scale = 1 / sqrt((double)D);
    auto row = [&](const Tensor& x, int64_t n) {
        return x.as<double>() + (head * x.dim(2) + n) * D;
    };
    // Adds factor x to row n of a result. The factor is known up to `error` and underflow.
    auto add = [&](int result, int64_t n, double factor, double error, const double* x) {
        double *to = row(r.results[result], n), *bound = row(r.bounds[result], n);
        for (int d = 0; d < D; d++) {
            to[d] += factor * x[d];
            bound[d] += square((error + tiny) * x[d]);
        }
    };

    const int n = keys_seen(t.causal, (int)i, (int)t.k.dim(2));
    const double* q = row(t.q, i);
    vector<double> s(n), p(n), dp(n);
    double m = -INFINITY, sum = 0, largest = 0;
    for (int j = 0; j < n; j++) {
        s[j] = scale * std::inner_product(q, q + D, row(t.k, j), 0.0);
        m = max(m, s[j]);
        largest = max(largest, fabs(s[j]));
    }
    for (int j = 0; j < n; j++) { sum += exp(s[j] - m); }
    const double L = m + log(sum);
    const double e = u * (1 + largest);
    r.results[OF_L].as<double>()[query] = L;
    r.bounds[OF_L].as<double>()[query] = e * e;
    for (int j = 0; j < n; j++) {
        p[j] = exp(s[j] - L);
        add(OF_O, i, p[j], e * p[j], row(t.v, j));
    }
    if (!t.dO) { return; }

    const double* dO = row(t.dO, i);
    const double* O = row(r.results[OF_O], i);
    double D_i = 0, D_i_error_squared = 0;
    for (int d = 0; d < D; d++) { D_i_error_squared += square(u * O[d] * dO[d]); }
    for (int j = 0; j < n; j++) {
        dp[j] = std::inner_product(dO, dO + D, row(t.v, j), 0.0);
        D_i += p[j] * dp[j];
        D_i_error_squared += square(e * p[j] * dp[j]);
        add(OF_DV, j, p[j], e * p[j], dO);
    }
    for (int j = 0; j < n; j++) {
        const double ds = scale * p[j] * (dp[j] - D_i);  // with the scale
        const double error =
            sqrt(square(e * (dp[j] - D_i)) + square(u * dp[j]) + D_i_error_squared);
        add(OF_DQ, i, ds, scale * p[j] * error, row(t.k, j));
        add(OF_DK, j, ds, scale * p[j] * error, q);
    }
}

// Returns the results of these inputs, and the bounds of an implementation that stores numbers of
// the type `stored`.
static Reference reference(const AttentionTensors& in, DType stored) {
    RestoreContext restore;
    context.device = CPU;
    const AttentionTensors t = as_type(F64, in);
    const int64_t heads = t.q.dim(0) * t.q.dim(1), Tq = t.q.dim(2);
    const double longest_sum = max({Tq, t.k.dim(2), t.q.dim(3)});
    const double u = roundoff(stored) + roundoff(stored == F64 ? F64 : F32) * sqrt(longest_sum);
    const double tiny = stored == F16 ? 0x1p-25 : 0;

    Reference r;
    for (vector<Tensor>* all : {&r.results, &r.bounds}) {
        *all = {zeros(t.q.shape, F64), zeros({t.q.dim(0), t.q.dim(1), Tq}, F64)};
        if (!t.dO) { continue; }
        for (const Tensor* x : {&t.q, &t.k, &t.v}) { all->push_back(zeros(x->shape, F64)); }
    }
#pragma omp parallel for
    for (int64_t head = 0; head < heads; head++) {
        for (int64_t i = 0; i < Tq; i++) { add_query(r, t, u, tiny, head, i); }
    }

    for (size_t k = 0; k < r.results.size(); k++) {
        const double* x = r.results[k].as<double>();
        double* bound = r.bounds[k].as<double>();
        for (int64_t i = 0; i < r.results[k].size(); i++) {
            bound[i] = SIGMAS * (sqrt(bound[i]) + u * fabs(x[i]) + tiny);
        }
    }
    return r;
}

// -------------------------------------------------------------------------------------------------
// 1.3.2 flash_forward, flash_backward: all that runs here against the reference, at the handout's
// test size and at odd ones. They print the largest error of each result, a verdict, and what the
// handout asks of the algorithm.

static const vector<AttentionCase> check_cases = {
    {4, 1, 128, 128, 64, false},   // the handout's
    {4, 1, 128, 128, 64, true},    // the same, causal
    {1, 2, 1, 1, 16, true},        // one query and one key
    {2, 3, 65, 65, 32, true},      // one more than tiles have
    {1, 2, 127, 200, 80, false},   // more keys than queries; the last tiles are not full
    {1, 2, 200, 127, 80, true},    // more queries than keys
    {2, 1, 257, 129, 128, true},   // one more than tiles have, of the largest head
    {1, 1, 63, 300, 128, true},    // no query sees the last keys
    {1, 2, 700, 500, 64, false},   // many tiles
    {1, 2, 500, 300, 128, false},  // many tiles of the largest head
    {1, 1, 500, 300, 80, false},   // and of one that is no power of 2
};
constexpr int QUICK_CHECK = 70000;  // B Tq Tk, at most, with --quick

struct ResultError {
    double largest = 0, of_bound = 0;  // of_bound: the largest share of an element's bound
};
// Returns how far `got` is from `want`. A number that is not finite is infinitely far.
static ResultError error_of(const Tensor& got, const Tensor& want, const Tensor& bound) {
    const vector<double> x = to_doubles(got), y = to_doubles(want), b = to_doubles(bound);
    ResultError e;
    for (size_t i = 0; i < y.size(); i++) {
        const double difference = fabs(x[i] - y[i]);
        const double error = isfinite(difference) ? difference : INFINITY;
        e.largest = max(e.largest, error);
        e.of_bound = max(e.of_bound, error / (b[i] + DBL_MIN));
    }
    return e;
}

// Checks all implementations on the device, and tiled, which needs no GPU. Prints the table and the
// verdict. Returns the exit code: 1 if a row is WRONG.
static int check_attention(const Options& o, const char* name, bool with_backward) {
    choose_device(o.device);
    const Device device = context.device;
    Table table{strprintf("%s: largest error against the reference in float64; WRONG: above what "
                          "rounding to the dtype may cost",
                          name),
                {"implementation", "dtype", "B, H, Tq, Tk, D", "causal", "O", "L"}};
    if (with_backward) { table.columns.insert(table.columns.end(), {"dQ", "dK", "dV"}); }
    table.columns.push_back("status");

    size_t wrong = 0;
    double worst = 0;
    for (const AttentionCase& c : check_cases) {
        if (o.quick && c.B * c.Tq * c.Tk > QUICK_CHECK) { continue; }
        for (DType dtype : {F32, BF16, F16}) {
            context.device = CPU;
            AttentionTensors in = random_inputs(c, dtype, o.seed);
            if (!with_backward) { in.dO = Tensor(); }
            const Reference want = reference(in, dtype);
            for (const AttentionImpl& impl : table_of<AttentionImpl>()) {
                const bool is_tiled = impl.device == CPU && impl.forward;
                if (!(impl.device == device || is_tiled) || !impl.takes(dtype, c.D)) { continue; }

                context.device = impl.device;
                const vector<Tensor> got = outputs_of(impl, as_type(dtype, in));
                table.row(impl.name, dtype,
                          strprintf("%d, %d, %d, %d, %d", c.B, c.H, c.Tq, c.Tk, c.D),
                          c.causal ? "yes" : "no");
                double of_bound = 0;
                for (size_t i = 0; i < got.size(); i++) {
                    const ResultError error = error_of(got[i], want.results[i], want.bounds[i]);
                    table.rows.back().push_back(strprintf("%.1e", error.largest));
                    of_bound = max(of_bound, error.of_bound);
                }
                table.rows.back().push_back(of_bound <= 1 ? "ok" : "WRONG");
                wrong += of_bound > 1;
                worst = max(worst, of_bound);
            }
        }
    }
    context.device = device;
    print(table);
    if (wrong > 0) {
        answer("", "WRONG: %zu of %zu checks.", wrong, table.rows.size());
        return 1;
    }
    answer("", "All %zu checks pass: the largest error is %.2f of its bound.", table.rows.size(),
           worst);
    return 0;
}

// Checks O and L, and answers (a) to (c). Returns 1 if a row is WRONG.
int cmd_flash_forward(const Options& o) {
    const int exit_code = check_attention(o, "flash_forward", false);
    answer("a", "`tiled` is the plain version: FlashAttention-2 in C++, without a kernel.");
    answer("b",
           "A block of a kernel works on one tile of queries of one head at a time, and loops over "
           "the tiles of keys.%s",
           context.device == CPU ? " None ran: they need a GPU." : "");
    answer("c",
           "A masked score becomes -inf where the handout adds -1e6. Both give the probability 0, "
           "because each query sees at least key 0.");
    return exit_code;
}
// Checks all results, and says what backward does. Returns 1 if a row is WRONG.
int cmd_flash_backward(const Options& o) {
    const int exit_code = check_attention(o, "flash_backward", true);
    answer("",
           "Flash's backward computes P again, from L, and takes rowsum(O dO) in place of "
           "rowsum(P dP).");
    return exit_code;
}

// -------------------------------------------------------------------------------------------------
// 1.3.2 flash_benchmarking: flash against naive in batch 1, one head, causal, in bf16 and fp32, at
// each power of 2 from 128 to 65536 (--quick: 512) and head sizes 16 to 128. It prints the times of
// the passes, and on how many sizes flash is faster.

// Returns a timer of as many runs as fill ms (3 to 5000), after as many as fill warmup_ms (1 to
// 5000). One run says how many these are: a pass takes from some microseconds to seconds.
static PassTimer time_for_ms(double warmup_ms, double ms) {
    return [=](const Job& prepare, const Job& f) {
        const double once = time_queued_ms(1, 1, prepare, f)[0];
        const int warmup = std::clamp((int)(warmup_ms / once), 1, 5000);
        const int n = std::clamp((int)(ms / once), 3, 5000);
        return stats_of(time_queued_ms(warmup, n, prepare, f));
    };
}

// Prints up to which length naive's time grows by less than a fifth, at the first head size: there
// launches may bound it. It prints nothing on a CPU. The runs are of one dtype.
static void answer_launches(const AttentionRuns& runs) {
    auto ms_of = [](const AttentionRun& r) { return r.naive.ms[BOTH_PASSES].median; };
    const AttentionRun *first = nullptr, *last = nullptr;
    for (const AttentionRun& r : runs) {
        if (r.D != runs[0].D || r.naive.oom) { continue; }
        if (!first) { first = &r; }
        if (ms_of(r) >= 1.2 * ms_of(*first)) { break; }
        last = &r;
    }
    if (context.device != CUDA || !last || last->S < 4 * first->S) { return; }
    answer(
        "a",
        "At D %d naive takes %.3f ms at S %d and %.3f at S %d: launching its kernels can explain "
        "that.",
        first->D, ms_of(*first), first->S, ms_of(*last), last->S);
}
// Prints, for each dtype, on how many sizes flash is faster.
static void answer_flash_benchmarking(const AttentionRuns& all) {
    for (DType dtype : {BF16, F32}) {
        AttentionRuns runs;
        for (const AttentionRun& r : all) {
            if (r.dtype == dtype) { runs.push_back(r); }
        }
        if (runs.empty()) {
            answer("a", "No implementation of flash on this device takes %s.", name_of(dtype));
            continue;
        }
        answer("a", "Compared with naive, flash (forward and backward) in %s is %s.",
               name_of(dtype), compared(runs, BOTH_PASSES).c_str());
        answer_launches(runs);
    }
}

// Times naive and the fastest flash at all sizes, and prints the table and the answers. Returns 0.
int cmd_flash_benchmarking(const Options& o) {
    choose_device(o.device);
    const int longest = o.quick ? 512 : 65536;
    vector<int> lengths;
    for (int S = 128; S <= longest; S *= 2) { lengths.push_back(S); }
    const double ms = o.quick ? 20 : 100;  // for each time
    AttentionRuns runs;
    for (DType dtype : {BF16, F32}) {
        // In bf16 and fp32 a row that takes head size 64 takes all four of time_all's.
        const AttentionImpl* flash = fastest_flash(context.device, dtype, 64);
        if (!flash) { continue; }  // the CPU has none in bf16
        const Effort effort = {time_for_ms(ms / 4, ms), true};
        for (const AttentionRun& r : time_all(flash, 1, true, dtype, lengths, effort)) {
            runs.push_back(r);
        }
    }

    Table table{strprintf("flash_benchmarking: batch 1, one head, causal, ms (median of %.0f ms of "
                          "runs, 3 to 5000)",
                          ms),
                {"Seq", "D", "dtype", "Naive Fwd", "Naive Bwd", "Naive Tot", "Flash Fwd",
                 "Flash Bwd", "Flash Tot", "x Tot"}};
    for (const AttentionRun& r : runs) {
        table.row(r.S, r.D, r.dtype,  // the shape, naive, flash
                  ms_cell(r.naive, FORWARD_PASS), ms_cell(r.naive, BACKWARD_PASS),
                  ms_cell(r.naive, BOTH_PASSES),  //
                  ms_cell(r.other, FORWARD_PASS), ms_cell(r.other, BACKWARD_PASS),
                  ms_cell(r.other, BOTH_PASSES),  //
                  speedup_cell(r, BOTH_PASSES));
    }
    print(table);
    answer_flash_benchmarking(runs);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// 1.3.3 flash_leaderboard: forward and backward of one long causal sequence, by --impl, by
// default every flash that runs here. It prints times and TFLOP/s, and which is fastest.

// Returns the TFLOP/s of both passes, NAN if these did not fit. Causal attention counts as half of
// S^2: forward's two products take 2 S^2 D FLOPs per head, backward's five 2.5 times as many.
static double tflops_of(const AttentionCase& c, const PassTimes& t) {
    return t.oom ? NAN : 3.5 * 2 * c.H * c.Tq * (double)c.Tk * c.D / t.ms[BOTH_PASSES].median / 1e9;
}
// Prints how fast the fastest is and, at the course's sizes, what led the class.
static void answer_flash_leaderboard(const string& impl, const AttentionCase& c,
                                     const PassTimes& t) {
    answer("",
           "The fastest that ran here, %s, takes %.3f ms for forward and backward (%.3g TFLOP/s), "
           "%.3f ms for forward alone.",
           impl.c_str(), t.ms[BOTH_PASSES].median, tflops_of(c, t), t.ms[FORWARD_PASS].median);
    if (c.H == 16 && c.D == 64 && c.Tq == 16384 && matmul_dtype() == BF16) {
        answer("",
               "The class leaderboard of 2025 was led with 5.364 ms at these sizes, in Triton on "
               "an H100.");
    }
}

// Times the implementations, and prints the table and the answer. Returns 0; fails if none fits
// into memory.
int cmd_flash_leaderboard(const Options& o) {
    const int D = o.d_model / o.num_heads;
    if (D * o.num_heads != o.d_model || !flash_head_size(D)) {
        usage_error("--d_model %d: takes 16, 32, 64, 80 or 128 times --num_heads %d", o.d_model,
                    o.num_heads);
    }
    choose_device(o.device);
    context.precision = precisions_of(o)[0];
    // The CPU's flash takes fp32 alone.
    if (context.device == CPU && !o.has("precision")) { context.precision = FP32; }
    const AttentionCase c{1, o.num_heads, o.context_length, o.context_length, D, true};
    const DType dtype = matmul_dtype();
    vector<const AttentionImpl*> asked;
    for (const AttentionImpl& impl : table_of<AttentionImpl>()) {
        const bool is_here = impl.device == context.device && impl.takes(dtype, D);
        if (o.impl == "all" && is_here && impl.forward) { asked.push_back(&impl); }
    }
    if (asked.empty()) { asked = {&impl_named(o.impl, dtype, D)}; }

    const double warmup_ms = o.quick ? 100 : 1000, ms = o.quick ? 500 : 10000;
    const Effort effort = {time_for_ms(warmup_ms, ms), true};

    Table table{strprintf("flash_leaderboard: batch 1, %s, D %d, S %d, %s, causal; %.2g s of "
                          "warm-up and %.2g s of runs, 3 to 5000 runs, median",
                          counted(c.H, "head").c_str(), c.D, c.Tq, name_of(context.precision),
                          warmup_ms / 1e3, ms / 1e3),
                {"implementation", "forward ms", "backward ms", "forward+backward ms", "TFLOP/s",
                 "% of peak"}};
    string best;
    PassTimes best_times;
    for (const AttentionImpl* impl : asked) {
        const PassTimes t = pass_times(*impl, c, dtype, effort);
        const double tflops = tflops_of(c, t);
        // The peak: under tf32 our own kernels still compute in fp32, and cuBLAS does not.
        table.row(impl->name, ms_cell(t, FORWARD_PASS), ms_cell(t, BACKWARD_PASS),
                  ms_cell(t, BOTH_PASSES), tflops,
                  percent_of_peak(tflops,
                                  impl->forward && dtype == F32 ? FP32 : context.precision));
        if (t.oom) { continue; }
        if (best.empty() || t.ms[BOTH_PASSES].median < best_times.ms[BOTH_PASSES].median) {
            best = impl->name;
            best_times = t;
        }
    }
    print(table);
    if (best.empty()) { fail("no row fits into memory"); }
    answer_flash_leaderboard(best, c, best_times);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// attention: your q, k, v (and do) in, our o, lse (and dq, dk, dv) out. Tensors are [B,H,T,D], or
// [B,T,D] for one head.

// Returns a tensor of the file on context.device, as [B,H,T,D]. Fails if it is empty.
static Tensor from_file(const FileTensor& f, const string& path) {
    Shape shape = f.shape;
    if (shape.size() == 3) { shape.insert(shape.begin() + 1, 1); }
    if (count(shape) == 0) {
        fail("%s: a tensor is empty, %s", path.c_str(), to_string(f.shape).c_str());
    }
    return view(tensor_from_file(f), 0, shape);
}

// Reads --inputs, runs --impl, writes --out. Returns 0; fails if tensors are missing, are too many
// or do not fit each other.
int cmd_attention(const Options& o) {
    choose_device(o.device);
    SafeTensors file = load_safetensors(o.inputs);
    const bool no_heads = file.tensors.count("q") && file.tensors["q"].shape.size() == 3;
    const FileTensor fq = require_tensor(file, "q", Shape(no_heads ? 3 : 4, -1), {"F32", "BF16"});
    const Shape shape = fq.shape;
    Shape keys = shape;
    keys[keys.size() - 2] = -1;  // any number of keys
    const FileTensor fk = require_tensor(file, "k", keys, {fq.dtype}),
                     fv = require_tensor(file, "v", fk.shape, {fq.dtype});
    require_no_others(file, {"q", "k", "v", "do"}, "q, k, v or do");
    AttentionTensors in{from_file(fq, o.inputs), from_file(fk, o.inputs), from_file(fv, o.inputs),
                        o.causal};
    if (file.tensors.count("do")) {
        in.dO = from_file(require_tensor(file, "do", shape, {fq.dtype}), o.inputs);
    }

    const AttentionImpl& impl = impl_named(o.impl, in.q.dtype, shape.back());
    const vector<Tensor> outputs = outputs_of(impl, in);

    const char* names[] = {"o", "lse", "dq", "dk", "dv"};
    NamedTensors out;
    for (size_t i = 0; i < outputs.size(); i++) {
        Shape own = outputs[i].shape;
        if (no_heads) { own.erase(own.begin() + 1); }
        out.push_back({names[i], view(contiguous(outputs[i]), 0, own)});
    }
    save_tensors(o.out, out);
    answer("", "attention: implementation %s on %s; wrote %zu tensors to %s", impl.name,
           name_of(context.device), out.size(), o.out.c_str());
    return 0;
}
