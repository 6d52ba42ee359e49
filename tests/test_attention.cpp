// Tests of attention.cu, and of every implementation in its table.
#include "attention.cu"

#include "test.h"

#include <algorithm>
#include <array>
#include <cmath>

// ---------------------------------------------------------------------------------------------------------------------
// Tests of attention.cu, against attention written as loops in double precision.

struct Sizes {
    int B, H, Tq, Tk, D;
};
static const Sizes all_sizes[] = {{1, 1, 1, 1, 2},    {2, 3, 2, 2, 16},  {1, 2, 31, 31, 16}, {2, 1, 64, 64, 2},
                                  {1, 2, 65, 65, 80}, {1, 2, 1, 65, 16}, {2, 2, 31, 64, 16}, {2, 1, 65, 2, 16},
                                  {1, 1, 64, 31, 80}, {1, 2, 2, 1, 2}};
static std::string to_string(const Sizes& s) {
    return strprintf("B=%d H=%d Tq=%d Tk=%d D=%d", s.B, s.H, s.Tq, s.Tk, s.D);
}

static Tensor normal(const Shape& shape, DType dtype, uint64_t key, float std = 1) {
    Tensor t = empty(shape, dtype);
    fill_normal(t, 1, key, 0, std);
    return t;
}
struct Problem {
    Tensor q, k, v, dO;
};
static Problem make_problem(const Sizes& s, DType dtype = F32) {
    Shape queries = {s.B, s.H, s.Tq, s.D}, keys = {s.B, s.H, s.Tk, s.D};
    return {normal(queries, dtype, 0), normal(keys, dtype, 1), normal(keys, dtype, 2), normal(queries, dtype, 3)};
}

// The definition, in double: O and the gradients that the handout's equations 13-19 give for dO. On the CPU, F64.
struct Result {
    Tensor o, dq, dk, dv;
};
static Result reference(const Problem& p, const Sizes& s, bool causal) {
    std::vector<double> Q = to_doubles(p.q), K = to_doubles(p.k), V = to_doubles(p.v), dO = to_doubles(p.dO);
    Result r{empty_on(CPU, p.q.shape, F64), empty_on(CPU, p.q.shape, F64), empty_on(CPU, p.k.shape, F64),
             empty_on(CPU, p.k.shape, F64)};
    for (const Tensor& t : {r.o, r.dq, r.dk, r.dv}) { fill_zero(t); }
    double scale = 1 / sqrt((double)s.D);
    for (int64_t row = 0; row < (int64_t)s.B * s.H * s.Tq; row++) {
        int64_t head = row / s.Tq, i = row % s.Tq, n = causal ? std::min<int64_t>(i + 1, s.Tk) : s.Tk;
        const double *q = &Q[row * s.D], *k = &K[head * s.Tk * s.D], *v = &V[head * s.Tk * s.D], *dO_i = &dO[row * s.D];
        double *o = r.o.as<double>() + row * s.D, *dq = r.dq.as<double>() + row * s.D;
        double *dk = r.dk.as<double>() + head * s.Tk * s.D, *dv = r.dv.as<double>() + head * s.Tk * s.D;
        std::vector<double> P(n), dP(n);
        double m = -INFINITY, sum = 0, D = 0;
        for (int64_t j = 0; j < n; j++) {
            double dot = 0;
            for (int d = 0; d < s.D; d++) { dot += q[d] * k[j * s.D + d]; }
            P[j] = scale * dot;
            m = std::max(m, P[j]);
        }
        for (double& x : P) { sum += x = std::exp(x - m); }
        for (int64_t j = 0; j < n; j++) {
            P[j] /= sum;
            for (int d = 0; d < s.D; d++) {
                o[d] += P[j] * v[j * s.D + d];
                dv[j * s.D + d] += P[j] * dO_i[d];
                dP[j] += dO_i[d] * v[j * s.D + d];
            }
            D += P[j] * dP[j];
        }
        for (int64_t j = 0; j < n; j++) {
            double dS = P[j] * (dP[j] - D) * scale;
            for (int d = 0; d < s.D; d++) {
                dq[d] += dS * k[j * s.D + d];
                dk[j * s.D + d] += dS * q[d];
            }
        }
    }
    return r;
}
static Result run(const Problem& p, bool causal) {
    clear_tape();
    Tensor q = require_gradient(p.q), k = require_gradient(p.k), v = require_gradient(p.v);
    Tensor o = attention(q, k, v, causal), loss = zeros({}, F32);
    record(loss, {o}, [dO = p.dO, g = o.gradient](const Tensor&) { add_gradient(g, dO); });  // dloss/dO is dO
    backward(loss);
    REQUIRE((q.gradient->value && k.gradient->value && v.gradient->value));
    return {detached(o), q.gradient->value, k.gradient->value, v.gradient->value};
}
// Errors are measured by the largest value of each tensor: single elements cancel.
static void check_result(const Result& got, const Result& want, double tolerance) {
    const Tensor* g[] = {&got.o, &got.dq, &got.dk, &got.dv};
    const Tensor* w[] = {&want.o, &want.dq, &want.dk, &want.dv};
    for (int i = 0; i < 4; i++) {
        // One key alone has P = 1: its dQ and dK are exactly 0, and what remains is rounding; hence the 1.
        double largest = 1;
        for (double x : to_doubles(*w[i])) { largest = std::max(largest, fabs(x)); }
        Comparison c = compare(*g[i], *w[i], 0, tolerance * largest);
        INFO(std::string(i == 0 ? "O" : i == 1 ? "dQ" : i == 2 ? "dK" : "dV"));
        CHECK_MESSAGE(c.ok(), to_string(c));
    }
}

// ---------------------------------------------------------------------------------------------------------------------

TEST_CASE("attention and its backward are the handout's equations, in float64") {
    begin<OnCPU>();
    for (const Sizes& s : all_sizes) {
        for (bool causal : {false, true}) {
            INFO(to_string(s), causal ? " causal" : "");
            Problem p = make_problem(s, F64);
            context.mode = EAGER;
            Result eager = run(p, causal);
            context.mode = FUSED;
            Result fused = run(p, causal), want = reference(p, s, causal);
            check_result(eager, want, 1e-12);
            check_result(fused, want, 1e-12);
            check_result(fused, eager, 1e-12);
        }
    }
}

TEST_CASE("attention's backward agrees with central differences") {
    begin<OnCPU>();
    const double h = 1e-5;
    for (const Sizes& s : {Sizes{1, 2, 5, 5, 2}, {1, 1, 3, 6, 3}, {2, 1, 6, 3, 2}}) {
        for (Mode mode : {EAGER, FUSED}) {
            for (bool causal : {false, true}) {
                context.mode = mode;
                INFO(to_string(s), " ", setting_now(), causal ? " causal" : "");
                Problem p = make_problem(s, F64);
                Result got = run(p, causal), want = got;
                std::vector<double> dO = to_doubles(p.dO);
                auto loss = [&] {
                    NoGrad no_grad;
                    std::vector<double> o = to_doubles(attention(p.q, p.k, p.v, causal));
                    double sum = 0;
                    for (size_t i = 0; i < o.size(); i++) { sum += o[i] * dO[i]; }
                    return sum;
                };
                const Tensor* inputs[] = {&p.q, &p.k, &p.v};
                Tensor* wanted[] = {&want.dq, &want.dk, &want.dv};
                for (int j = 0; j < 3; j++) {
                    *wanted[j] = empty(inputs[j]->shape, F64);
                    for (int64_t i = 0; i < inputs[j]->size(); i++) {
                        double *x = inputs[j]->as<double>() + i, before = *x;
                        *x = before + h;
                        double above = loss();
                        *x = before - h;
                        double below = loss();
                        *x = before;
                        wanted[j]->as<double>()[i] = (above - below) / (2 * h);
                    }
                }
                check_result(got, want, 1e-8);
            }
        }
    }
}

TEST_CASE_TEMPLATE("attention in every precision", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    // In bf16 and fp16 S and P are rounded, too; in eager mode twice or more.
    const double tolerance[] = {2e-6, 3e-3, 3e-2, 4e-3};  // FP32, TF32, PREC_BF16, PREC_FP16
    for (Precision precision : {FP32, TF32, PREC_BF16, PREC_FP16}) {
        for (Mode mode : {EAGER, FUSED}) {
            for (const Sizes& s : all_sizes) {
                for (bool causal : {false, true}) {
                    context.precision = precision, context.mode = mode;
                    INFO(to_string(s), " ", setting_now(), causal ? " causal" : "");
                    Problem p = make_problem(s);
                    Result got = run(p, causal);
                    // Autocast's eager output takes P's type, which exp and div make fp32 and the product low again.
                    CHECK(got.o.dtype == matmul_dtype());
                    CHECK(got.dq.dtype == F32);
                    check_result(got, reference(p, s, causal), tolerance[precision]);
                }
            }
        }
    }
}

TEST_CASE_TEMPLATE("large scores stay finite", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    const Sizes s = {1, 2, 33, 33, 16};
    for (Precision precision : {FP32, TF32, PREC_BF16, PREC_FP16}) {
        for (Mode mode : {EAGER, FUSED}) {
            for (bool causal : {false, true}) {
                context.precision = precision, context.mode = mode;
                INFO(setting_now(), causal ? " causal" : "");
                Problem p = make_problem(s);
                // Every product of a query and a key is 16 * 50^2 with either sign: scores of 1e4 and -1e4.
                for (const Tensor* t : {&p.q, &p.k}) {
                    std::vector<float> x(t->size());
                    for (size_t i = 0; i < x.size(); i++) { x[i] = i / s.D % 3 == 0 ? 50.0f : -50.0f; }
                    copy(*t, from_floats(x, t->shape));
                }
                Result r = run(p, causal);
                for (const Tensor& t : {r.o, r.dq, r.dk, r.dv}) {
                    std::vector<float> values = to_floats(t);
                    CHECK(std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); }));
                }
            }
        }
    }
}

TEST_CASE_TEMPLATE("causal attention does not see later keys", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    const Sizes s = {1, 1, 8, 8, 16};
    for (Mode mode : {EAGER, FUSED}) {
        context.mode = mode;
        INFO(setting_now());
        Problem p = make_problem(s);
        NoGrad no_grad;
        std::vector<float> before = to_floats(attention(p.q, p.k, p.v, true));
        for (const Tensor* t : {&p.k, &p.v}) { copy(view(*t, 5 * s.D, {s.D}), normal({s.D}, F32, 9, 100)); }  // key 5
        std::vector<float> after = to_floats(attention(p.q, p.k, p.v, true));
        CHECK(std::equal(before.begin(), before.begin() + 5 * s.D, after.begin()));
        for (int i = 5; i < 8; i++) { CHECK(before[i * s.D] != after[i * s.D]); }
    }
}

TEST_CASE_TEMPLATE("attention takes the views that split heads, and gives the same bits in every run", D, OnCPU,
                   OnCUDA) {
    if (!begin<D>()) { return; }
    const Sizes s = {2, 3, 33, 33, 16};
    for (Mode mode : {EAGER, FUSED}) {
        context.mode = mode;
        INFO(setting_now());
        Problem p = make_problem(s), split = p;
        for (Tensor* t : {&split.q, &split.k, &split.v}) {  // stored [B,T,H,D], seen as [B,H,T,D]
            *t = transpose(contiguous(transpose(*t, 1, 2)), 1, 2);
        }
        Result want = run(p, true), got = run(split, true), again = run(split, true);
        check_result(got, want, 1e-6);
        CHECK(to_floats(got.dk) == to_floats(again.dk));
        CHECK(to_floats(got.dv) == to_floats(again.dv));
    }
}

TEST_CASE_TEMPLATE("attention fails on shapes that do not fit", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    for (Mode mode : {EAGER, FUSED}) {
        context.mode = mode;
        Tensor q = zeros({1, 2, 3, 4}, F32), k = zeros({1, 2, 5, 4}, F32);
        CHECK_THROWS_AS(attention(q, zeros({1, 2, 5, 8}, F32), k, false), Failure);
        CHECK_THROWS_AS(attention(q, k, zeros({1, 2, 6, 4}, F32), false), Failure);
        CHECK_THROWS_AS(attention(q, zeros({1, 3, 5, 4}, F32), k, false), Failure);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Tests of attention.cu and the fast kernels: every row of the table of implementations, on the devices that are here,
// against the reference in float64, on strided tensors that lie in memory full of NaN, with outputs that nothing may be
// written around.

static const DType low_types[] = {F32, BF16, F16};

// A [B,H,T,D] tensor as the model has it, a view of [B,T,H,D] rows, with `guard` more rows before and behind, all of it
// filled with `fill` first.
struct Guarded {
    Tensor all, t;
};
static Guarded guarded(int64_t B, int64_t H, int64_t T, int64_t D, DType dtype, float fill) {
    constexpr int64_t GUARD = 3;
    int64_t rows = B * T + 2 * GUARD, row = H * D;
    Guarded g;
    g.all = from_floats(std::vector<float>(rows * row, fill), {rows, row}, dtype);
    g.t = view(g.all, GUARD * row, {B, T, H, D});
    std::swap(g.t.shape[1], g.t.shape[2]);
    std::swap(g.t.stride[1], g.t.stride[2]);
    return g;
}
static void fill_with(const Guarded& g, const Tensor& values) { copy_or_add(g.t, values, false); }
static bool guards_hold(const Guarded& g, float fill) {
    std::vector<float> v = to_floats(g.all);
    int64_t edge = (g.t.data - g.all.data) / (int64_t)size_of(g.all.dtype), end = edge + g.t.size();
    for (int64_t i = 0; i < (int64_t)v.size(); i++) {
        if ((i < edge || i >= end) && v[i] != fill) { return false; }
    }
    return true;
}

struct FlashSizes {
    int B, H, Tq, Tk, D;
};
struct FlashProblem {
    Tensor q, k, v, dO;       // plain, in the dtype under test, on the device
    Tensor o, L, dq, dk, dv;  // the truth, float64, on the CPU
};
static void find_truth(FlashProblem& p, bool causal) {
    Device device = context.device;
    auto wide = [&](const Tensor& t) {
        Tensor c = to_device(t, CPU);
        context.device = CPU;
        c = detached(cast(c, F64));
        context.device = device;
        return c;
    };
    Tensor q = require_gradient(wide(p.q)), k = require_gradient(wide(p.k)), v = require_gradient(wide(p.v)),
           dO = wide(p.dO);
    context.device = CPU;
    // The reference is slow; where it would take seconds, fused in float64 (which is held to it below) stands in.
    bool small = q.dim(2) * k.dim(2) < 40000;
    p.o = small ? run_attention(table_of<AttentionImpl>().front(), q, k, v, causal, &p.L)
                : attention_fused(q, k, v, causal, &p.L);
    backward_from(p.o, dO);
    p.o = detached(p.o), p.dq = q.gradient->value, p.dk = k.gradient->value, p.dv = v.gradient->value;
    context.device = device;
}
static Tensor with_rows_times(const Tensor& t, int begin, int end, float factor) {  // of a tensor [1,1,T,D]
    std::vector<float> x = to_floats(t);
    for (int64_t i = begin * t.dim(3); i < end * t.dim(3); i++) { x[i] *= factor; }
    return from_floats(x, t.shape, t.dtype);
}
// q's rows have standard deviation q_std; if `few`, only rows 16 to 31 of B 1, H 1 have it, which are one warp's.
static FlashProblem make_problem(const FlashSizes& s, DType dtype, bool causal, float q_std = 1, bool few = false) {
    FlashProblem p;
    p.q = normal({s.B, s.H, s.Tq, s.D}, dtype, 1, few ? 1 : q_std);
    if (few) { p.q = with_rows_times(p.q, 16, 32, q_std); }
    p.k = normal({s.B, s.H, s.Tk, s.D}, dtype, 2, 1);
    p.v = normal({s.B, s.H, s.Tk, s.D}, dtype, 3, 1), p.dO = normal({s.B, s.H, s.Tq, s.D}, dtype, 4, 1);
    find_truth(p, causal);
    return p;
}
static void check_close(const char* what, const Tensor& got, const Tensor& want, double tolerance) {
    Comparison c = compare(got, want, tolerance, tolerance * std::max(1.0, largest(want)));
    CHECK_MESSAGE(c.ok(), std::string(what), ": ", to_string(c));
}
static double tolerance_of(DType t) { return t == F32 ? 1e-4 : t == F16 ? 4e-3 : 2.5e-2; }

// Implementations with passes of their own run on guarded, strided tensors; naive and fused run through the tape.
static void check_impl(const AttentionImpl& impl, const FlashSizes& s, DType dtype, bool causal,
                       const FlashProblem& p) {
    std::string what = strprintf("%s %s B %d H %d Tq %d Tk %d D %d %s", impl.name, name_of(dtype), s.B, s.H, s.Tq, s.Tk,
                                 s.D, causal ? "causal" : "full");
    CAPTURE(what);
    double tolerance = tolerance_of(dtype);
    if (!impl.forward) {
        Tensor q = require_gradient(p.q), k = require_gradient(p.k), v = require_gradient(p.v), L;
        Tensor o = run_attention(impl, q, k, v, causal, &L);
        backward_from(o, p.dO);
        check_close("O", o, p.o, tolerance);
        check_close("L", L, p.L, tolerance);
        check_close("dQ", q.gradient->value, p.dq, tolerance);
        check_close("dK", k.gradient->value, p.dk, tolerance);
        check_close("dV", v.gradient->value, p.dv, tolerance);
        return;
    }
    Guarded in[4], out[4];  // q k v dO | o dq dk dv
    const Tensor* values[] = {&p.q, &p.k, &p.v, &p.dO};
    for (int i = 0; i < 4; i++) {
        in[i] = guarded(s.B, s.H, i == 1 || i == 2 ? s.Tk : s.Tq, s.D, dtype, NAN);
        fill_with(in[i], *values[i]);
        out[i] = guarded(s.B, s.H, i >= 2 ? s.Tk : s.Tq, s.D, dtype, 7);
        fill_with(out[i], normal(out[i].t.shape, dtype, 9, NAN));  // what is not written stays NaN
    }
    Tensor L = from_floats(std::vector<float>(s.B * s.H * s.Tq, NAN), {s.B, s.H, s.Tq});
    AttentionTensors t{in[0].t, in[1].t, in[2].t, out[0].t, L, causal, in[3].t, out[1].t, out[2].t, out[3].t};
    impl.forward(t);
    impl.backward(t);
    check_close("O", out[0].t, p.o, tolerance);
    check_close("L", L, p.L, tolerance);
    check_close("dQ", out[1].t, p.dq, tolerance);
    check_close("dK", out[2].t, p.dk, tolerance);
    check_close("dV", out[3].t, p.dv, tolerance);
    for (const Guarded& g : out) { CHECK(guards_hold(g, 7)); }
}
// With q_std > 1 the scores are large; rows that keep S in 16 bits are then off by S's rounding, and are left out.
static void check_all(const FlashSizes& s, bool causal, float q_std = 1, bool few = false) {
    for (DType dtype : low_types) {
        bool taken = false;
        for (const AttentionImpl& impl : table_of<AttentionImpl>()) {
            taken = taken || (impl.device == context.device && impl.takes(dtype, s.D));
        }
        if (!taken) { continue; }
        FlashProblem p = make_problem(s, dtype, causal, q_std, few);
        for (const AttentionImpl& impl : table_of<AttentionImpl>()) {
            bool exact = impl.forward || dtype == F32 || q_std == 1;
            if (impl.device == context.device && impl.takes(dtype, s.D) && exact) {
                check_impl(impl, s, dtype, causal, p);
            }
        }
    }
}

TEST_CASE_TEMPLATE("flash: every implementation at every length and head size", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    const std::pair<int, int> lengths[] = {{1, 1},     {2, 2},    {31, 31},  {63, 63}, {64, 64}, {65, 65},  {127, 127},
                                           {129, 129}, {65, 129}, {129, 65}, {1, 200}, {200, 1}, {200, 200}};
    for (int head : {16, 32, 64, 80, 128}) {
        for (auto [Tq, Tk] : lengths) {
            for (bool causal : {false, true}) {
                bool most = head != 64 && Tq * Tk > 10000 && D::device == CPU;  // the CPU checks these at one head size
                if (!most) { check_all({head == 16 ? 2 : 1, 2, Tq, Tk, head}, causal); }
            }
        }
    }
}
TEST_CASE_TEMPLATE("flash: long sequences", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    check_all({1, 2, 1000, 1000, 64}, true);
    check_all({1, 1, 700, 1000, 32}, false);
    if (D::device == CUDA) {
        check_all({1, 1, 4097, 4097, 64}, true);
        check_all({1, 1, 4097, 1000, 128}, true);
        check_all({3, 100, 129, 129, 64}, true);  // more blocks than the card holds at once: the kernels' large tiles
        check_all({3, 100, 129, 65, 128}, false);
        check_all({1, 300, 400, 400, 16}, true);  // more heads than attention_grid() lets start together
    }
}
TEST_CASE_TEMPLATE("flash: large scores do not overflow, and a lone visible key is returned as it is", D, OnCPU,
                   OnCUDA) {
    if (!begin<D>()) { return; }
    for (bool causal : {false, true}) { check_all({1, 2, 130, 130, 64}, causal, 60); }
    // One warp's maxima rise from tile to tile, its neighbours' stay.
    for (int head : {64, 80, 128}) { check_all({1, 1, 192, 300, head}, false, 30, true); }
    for (const AttentionImpl& impl : table_of<AttentionImpl>()) {
        for (DType dtype : low_types) {
            if (impl.device != D::device || !impl.takes(dtype, 32)) { continue; }
            Tensor q = normal({1, 1, 5, 32}, dtype, 1, 1), k = normal({1, 1, 5, 32}, dtype, 2, 1),
                   v = normal({1, 1, 5, 32}, dtype, 3, 1);
            std::vector<float> o = to_floats(run_attention(impl, q, k, v, true)), want = to_floats(v);
            for (int d = 0; d < 32; d++) { CHECK(o[d] == doctest::Approx(want[d]).epsilon(1e-6)); }
        }
    }
}
// Only the last query sees the last key. For the others dP is in the hundreds of thousands there, far beyond fp16's
// largest 65504, at a weight of 0. (naive and fused would keep it in 16 bits.)
TEST_CASE("flash: fp16 takes a dP beyond its range where P is 0") {
    if (!begin_on(CUDA)) { return; }
    constexpr int T = 127;
    for (int head : {64, 80, 128}) {
        FlashProblem p;
        p.q = normal({1, 1, T, head}, F16, 1, 1), p.k = normal({1, 1, T, head}, F16, 2, 1);
        p.v = with_rows_times(normal({1, 1, T, head}, F16, 3, 1), T - 1, T, 2000);
        p.dO = with_rows_times(normal({1, 1, T, head}, F16, 4, 30), T - 1, T, 1e-4f);
        find_truth(p, true);
        for (const AttentionImpl& impl : table_of<AttentionImpl>()) {
            if (impl.device == CUDA && impl.takes(F16, head) && impl.forward) {
                check_impl(impl, {1, 1, T, T, head}, F16, true, p);
            }
        }
    }
}
// One number of the second of two heads is not finite: then no implementation may give a finite result where the
// reference does not. Tiles may spread it further (0 times NaN is NaN), but not into the first head.
static void check_spread(const char* what, const Tensor& got_in, const Tensor& want_in) {
    std::vector<double> got = to_doubles(got_in), want = to_doubles(want_in);
    int hidden = 0, strayed = 0;
    for (size_t i = 0; i < got.size(); i++) {
        hidden += !std::isfinite(want[i]) && std::isfinite(got[i]);
        strayed += i < got.size() / 2 && !std::isfinite(got[i]);
    }
    CHECK_MESSAGE(hidden == 0, std::string(what));
    CHECK_MESSAGE(strayed == 0, std::string(what));
}
static void check_not_finite(const FlashProblem& clean, float value, const std::string& what) {
    int T = (int)clean.q.dim(2), C = (int)clean.q.dim(3);
    for (Tensor FlashProblem::*input : {&FlashProblem::q, &FlashProblem::k, &FlashProblem::v, &FlashProblem::dO}) {
        for (int at : {0, T / 2 * C + C / 2, T * C - 1}) {
            FlashProblem p = clean;
            std::vector<float> x = to_floats(p.*input);
            x[T * C + at] = value;
            p.*input = from_floats(x, clean.q.shape, clean.q.dtype);
            for (bool causal : {false, true}) {
                find_truth(p, causal);
                CHECK(!std::isfinite(largest(p.dq) + largest(p.dk) + largest(p.dv)));
                for (const AttentionImpl& impl : table_of<AttentionImpl>()) {
                    if (impl.device != context.device || !impl.takes(clean.q.dtype, C)) { continue; }
                    CAPTURE(strprintf("%s, %s, %s in input %ld, element %d", impl.name, what.c_str(),
                                      causal ? "causal" : "full", (long)(&(p.*input) - &p.q), at));
                    Tensor q = require_gradient(p.q), k = require_gradient(p.k), v = require_gradient(p.v), L;
                    Tensor o = run_attention(impl, q, k, v, causal, &L);
                    backward_from(o, p.dO);
                    check_spread("O", o, p.o);
                    check_spread("L", L, p.L);
                    check_spread("dQ", q.gradient->value, p.dq);
                    check_spread("dK", k.gradient->value, p.dk);
                    check_spread("dV", v.gradient->value, p.dv);
                }
            }
        }
    }
}
TEST_CASE_TEMPLATE("flash: what is not finite in the reference is so in every implementation", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    for (DType dtype : low_types) {
        for (int head : {16, 32, 64, 80, 128}) {
            if (D::device == CPU && head != 16 && !(head == 80 && dtype == F32)) { continue; }
            // 140: more than one tile of queries, and of keys; the last ones are not full.
            FlashProblem clean = make_problem({1, 2, 140, 140, head}, dtype, false);
            for (float value : {NAN, INFINITY}) {
                check_not_finite(clean, value, strprintf("%s, D %d, %f", name_of(dtype), head, value));
            }
        }
    }
}
TEST_CASE("flash: the reference and fused agree in float64") {
    begin_on(CPU);
    for (bool causal : {false, true}) {
        FlashSizes s{2, 2, 37, 50, 16};
        Tensor q = normal({2, 2, 37, 16}, F64, 1, 1), k = normal({2, 2, 50, 16}, F64, 2, 1),
               v = normal({2, 2, 50, 16}, F64, 3, 1);
        Tensor dO = normal({2, 2, 37, 16}, F64, 4, 1), results[2][5];
        for (int i = 0; i < 2; i++) {
            Tensor a = require_gradient(q), b = require_gradient(k), c = require_gradient(v);
            Tensor o = i == 0 ? run_attention(table_of<AttentionImpl>().front(), a, b, c, causal, &results[i][1])
                              : attention_fused(a, b, c, causal, &results[i][1]);
            backward_from(o, dO);
            results[i][0] = detached(o), results[i][2] = a.gradient->value, results[i][3] = b.gradient->value;
            results[i][4] = c.gradient->value;
        }
        for (int j = 0; j < 5; j++) {
            CHECK(strcmp(table_of<AttentionImpl>().front().name, "reference") == 0);
            Comparison c = compare(results[0][j], results[1][j], j == 1 ? 1e-6 : 1e-6, 1e-7);
            CHECK_MESSAGE(c.ok(), j, " ", to_string(c));
        }
        (void)s;
    }
}
// A race shows itself by repetition. Only the fast kernels' dQ is a sum whose order may change.
TEST_CASE_TEMPLATE("flash: many runs give the same O, L, dK and dV, and the same dQ but for rounding", D, OnCPU,
                   OnCUDA) {
    if (!begin<D>()) { return; }
    DType dtype = D::device == CUDA ? BF16 : F32;
    for (const AttentionImpl& impl : table_of<AttentionImpl>()) {
        if (impl.device != D::device || !impl.forward || !impl.takes(dtype, 64)) { continue; }
        for (auto [head_size, many] : {std::pair(64, false), {128, false}, {64, true}, {128, true}}) {
            if (many && D::device == CPU) { continue; }
            Tensor in[4];  // many: over four tiles of queries per multiprocessor, so that blocks take one after another
            for (int i = 0; i < 4; i++) {
                in[i] = normal({1, many ? 200 : 3, many ? 400 : 777, head_size}, dtype, 1 + i, 1);
            }
            std::vector<Tensor> first;
            Tensor first_dq;
            int different = 0, far = 0;
            for (int run = 0; run < (D::device == CPU ? 3 : many ? 50 : 200); run++) {
                Tensor q = require_gradient(in[0]), k = require_gradient(in[1]), v = require_gradient(in[2]), L;
                Tensor o = run_attention(impl, q, k, v, true, &L);
                backward_from(o, in[3]);
                std::vector<Tensor> all;
                for (const Tensor& t : {o, L, k.gradient->value, v.gradient->value}) {
                    all.push_back(to_device(t, CPU));
                }
                if (impl.rung <= 30) { all.push_back(to_device(q.gradient->value, CPU)); }
                if (run == 0) { first = all, first_dq = q.gradient->value; }
                bool same = true;
                for (size_t i = 0; i < all.size(); i++) {
                    same = same && memcmp(first[i].data, all[i].data, describe(all[i]).bytes) == 0;
                }
                different += !same;
                far += !compare(q.gradient->value, first_dq, 1e-2, 1e-2).ok();
            }
            CHECK_MESSAGE(different == 0, impl.name, " ", head_size, " ", many);
            CHECK_MESSAGE(far == 0, impl.name, " ", head_size, " ", many);
        }
    }
}
TEST_CASE_TEMPLATE("flash: memory grows with T, not with its square", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    const AttentionImpl* impl = fastest_flash(D::device, F32, 64);
    REQUIRE(impl);
    size_t peak[2];
    for (int i = 0; i < 2; i++) {
        int T = 512 << i;
        Tensor q = require_gradient(normal({1, 1, T, 64}, F32, 1, 1));
        size_t before = memory_use(D::device).now;
        reset_peak(D::device);
        backward_from(run_attention(*impl, q, q, q, true), q);
        peak[i] = memory_use(D::device).peak - before;
    }
    CHECK(peak[1] < 2.5 * peak[0]);
}
TEST_CASE_TEMPLATE("flash: the attention command", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    Folder folder;
    std::string in = folder / "in.safetensors", out = folder / "out.safetensors";
    FlashProblem p = make_problem({2, 3, 33, 65, 32}, F32, true);
    std::vector<Tensor> host;
    for (const Tensor* t : {&p.q, &p.k, &p.v, &p.dO}) { host.push_back(to_device(*t, CPU)); }
    save_safetensors(
        in, {{"q", describe(host[0])}, {"k", describe(host[1])}, {"v", describe(host[2])}, {"do", describe(host[3])}});
    for (const char* impl : {"auto", "naive", "fused"}) {
        Run r = run_cs336(
            {"attention", "--inputs", in, "--out", out, "--causal", "--impl", impl, "--device", name_of(D::device)});
        REQUIRE_MESSAGE(r.exit_code == 0, r.err);
        SafeTensors file = load_safetensors(out);
        const std::pair<const char*, const Tensor*> expected[] = {
            {"o", &p.o}, {"lse", &p.L}, {"dq", &p.dq}, {"dk", &p.dk}, {"dv", &p.dv}};
        CHECK(file.tensors.size() == 5);
        context.device = CPU;
        for (const auto& e : expected) {
            FileTensor f = require_tensor(file, e.first, e.second->shape, {"F32"});
            Tensor got = empty(f.shape, F32);
            memcpy(got.data, f.data, f.bytes);
            check_close(e.first, got, *e.second, 1e-4);
        }
        context.device = D::device;
        remove(out.c_str());  // so that the next one has to be written
    }
    auto without_heads = [](const Tensor& t) {
        return describe(view(t, 0, {t.dim(0) * t.dim(1), t.dim(2), t.dim(3)}));
    };
    save_safetensors(in, {{"q", without_heads(host[0])}, {"k", without_heads(host[1])}, {"v", without_heads(host[2])}});
    Run three = run_cs336({"attention", "--inputs", in, "--out", out, "--causal", "--device", name_of(D::device)});
    REQUIRE_MESSAGE(three.exit_code == 0, three.err);
    SafeTensors file = load_safetensors(out);
    FileTensor f = require_tensor(file, "o", {6, 33, 32}, {"F32"});
    require_tensor(file, "lse", {6, 33}, {"F32"});
    context.device = CPU;
    Tensor got = empty(p.o.shape, F32);
    memcpy(got.data, f.data, f.bytes);
    check_close("o of [B, S, D]", got, p.o, 1e-4);
    context.device = D::device;
    save_safetensors(
        in, {{"q", describe(host[0])}, {"k", describe(host[1])}, {"v", describe(host[2])}, {"dO", describe(host[3])}});
    Run misspelt = run_cs336({"attention", "--inputs", in, "--out", out, "--device", name_of(D::device)});
    CHECK(misspelt.exit_code == 1);
    CHECK_MESSAGE(has(misspelt.err, "tensor \"dO\": not q, k, v or do"), misspelt.err);
    Run wrong =
        run_cs336({"attention", "--inputs", in, "--out", out, "--impl", "nonsense", "--device", name_of(D::device)});
    CHECK(wrong.exit_code == 2);
    CHECK(wrong.err.find("--impl") != std::string::npos);
    Run missing = run_cs336({"attention", "--inputs", "tests/fixtures/model_batch.safetensors", "--out", out,
                             "--device", name_of(D::device)});
    CHECK(missing.exit_code == 1);
    CHECK(has(missing.err, "tensor \"q\": not found among"));
}
TEST_CASE_TEMPLATE("flash: PyTorch's fixture", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    SafeTensors in = load_safetensors("tests/fixtures/attention_inputs.safetensors");
    SafeTensors expected = load_safetensors("tests/fixtures/attention_expected.safetensors");
    auto tensor = [](const SafeTensors& file, const char* name) {
        FileTensor f = file.tensors.at(name);
        Tensor t = empty_on(CPU, f.shape, F32);
        memcpy(t.data, f.data, f.bytes);
        return to_device(t, context.device);
    };
    for (const AttentionImpl& impl : table_of<AttentionImpl>()) {
        if (impl.device != D::device || !impl.takes(F32, 16)) { continue; }
        INFO(std::string(impl.name));
        Tensor q = require_gradient(tensor(in, "q")), k = require_gradient(tensor(in, "k"));
        Tensor v = require_gradient(tensor(in, "v")), L, o = run_attention(impl, q, k, v, true, &L);
        backward_from(o, tensor(in, "do"));
        const std::pair<const char*, Tensor> got[] = {
            {"o", o}, {"lse", L}, {"dq", q.gradient->value}, {"dk", k.gradient->value}, {"dv", v.gradient->value}};
        for (const auto& g : got) { check_close(g.first, g.second, tensor(expected, g.first), 1e-5); }
    }
}
TEST_CASE_TEMPLATE("flash: the leaderboard says OOM where there is not the memory", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    Run r = run_cs336({"flash_leaderboard", "--quick", "--d_model", "1048576", "--num_heads", "65536",
                       "--context_length", "1048576", "--format", "csv", "--device", name_of(D::device)});
    CHECK(r.exit_code == 1);
    CHECK_MESSAGE(has(r.err, "flash_leaderboard: no row fits into memory"), r.err);
    std::string row = r.out.substr(r.out.find("\ntiled,") + 1), oom = row.substr(row.find("OOM ("));
    oom.resize(oom.find(')') + 1);
    if (D::device == CPU) { CHECK(row == "tiled," + oom + "," + oom + "," + oom + ",,\n"); }  // and no rates
}
TEST_CASE_TEMPLATE("flash: weighted_sum's table has no time and no rate of 0", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    Run r = run_cs336({"weighted_sum", "--quick", "--format", "csv", "--device", name_of(D::device)});
    CHECK(has(r.out, "errors against fp64; " + device_description() + "; commit "));
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    CHECK(has(r.out, "\n1,1,"));  // 12 bytes in less than a microsecond
    for (const char* zero : {",0.0,", ",0.0000,", ",0,"}) { CHECK_MESSAGE(!has(r.out, zero), r.out); }
}
TEST_CASE_TEMPLATE("flash: weighted_sum and its backward are mul and sum_last", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    for (auto [N, C] : {std::pair<int, int>{1, 1}, {3, 7}, {31, 33}, {257, 129}, {1000, 1023}}) {
        CAPTURE(N);
        Tensor x = normal({N, C}, F32, 1, 1), w = normal({C}, F32, 2, 1), dy = normal({N}, F32, 3, 1);
        Tensor results[2][3];
        for (int i = 0; i < 2; i++) {
            Tensor a = require_gradient(x), b = require_gradient(w);
            Tensor y = i == 0 ? weighted_sum(a, b) : reshape(sum_last(mul(a, b)), {N});
            backward_from(y, dy);
            results[i][0] = detached(y), results[i][1] = a.gradient->value, results[i][2] = b.gradient->value;
        }
        for (int j = 0; j < 3; j++) { check_close("weighted_sum", results[0][j], results[1][j], 2e-6); }
    }
}
TEST_CASE("flash: v1 on the GPU, tiles' borders, all types") {  // small: for the sanitizers
    if (!begin_on(CUDA)) { return; }
    const AttentionImpl* plain = nullptr;
    for (const AttentionImpl& impl : table_of<AttentionImpl>()) {
        if (impl.device == CUDA && strcmp(impl.name, "naive") == 0) { plain = &impl; }
        if (strcmp(impl.name, "flash_v1") != 0) { continue; }
        REQUIRE(plain);
        for (DType dtype : {F32, BF16, F16}) {
            for (auto [Tq, Tk, D] : {std::array<int, 3>{33, 65, 80}, {64, 31, 16}}) {
                for (bool causal : {false, true}) {
                    INFO(name_of(dtype) << " " << Tq << " " << Tk << " " << D << " " << causal);
                    Tensor q = empty({1, 2, Tq, D}, dtype), k = empty({1, 2, Tk, D}, dtype), v = empty(k.shape, dtype);
                    fill_normal(q, 0, 1, 0, 1), fill_normal(k, 0, 2, 0, 1), fill_normal(v, 0, 3, 0, 1);
                    Tensor results[2][4];
                    for (int i : {0, 1}) {
                        Tensor a = require_gradient(q), b = require_gradient(k), c = require_gradient(v);
                        Tensor o = run_attention(i == 0 ? impl : *plain, a, b, c, causal);
                        backward_from(o, q);
                        results[i][0] = detached(o), results[i][1] = a.gradient->value;
                        results[i][2] = b.gradient->value, results[i][3] = c.gradient->value;
                        clear_tape();
                    }
                    for (int part = 0; part < 4; part++) {
                        CHECK(compare(results[0][part], results[1][part], 2e-2, 2e-2).ok());
                    }
                }
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Tests of attention.cu's answers: numbers measured on an H200 in, the sentences out.

static void check_says(const std::string& text, const std::vector<std::string>& phrases) {
    for (const std::string& phrase : phrases) { CHECK_MESSAGE(has(text, phrase), phrase, " in: ", text); }
    for (const char* never : {"nan", " inf", "  ", " .", "1 configurations"}) {
        CHECK_MESSAGE(!has(text, never), never, " in: ", text);
    }
}
static Stats times(double ms, double std = 0) { return {ms, std, ms, ms, ms, 100}; }
static PassTimes passes(double forward, double backward, double both = NAN, double held_MiB = 0) {
    return {times(forward), times(backward), times(both), (size_t)(held_MiB * 1048576), 0};
}
static PassTimes oom() {
    PassTimes t;
    t.oom = (size_t)161 << 30;
    return t;
}

TEST_CASE("answers: pytorch_attention") {
    const AttentionMemory memory{
        32768, 16, (size_t)149443414425, 171902500864, {{16777216, 5}, {1048576, 2}, {34359738368, 2}}};
    std::vector<AttentionRun> runs = {{4096, 16, F32, passes(2.071, 4.088, NAN, 1066.25)},
                                      {8192, 16, F32, passes(8.050, 15.972, NAN, 4148.5)},
                                      {16384, 16, F32, passes(32.579, 67.138, NAN, 16457)},
                                      {8192, 128, F32, passes(11.979, 23.39, NAN, 4288.5)},
                                      {16384, 128, F32, passes(48.454, 97.052, NAN, 16737)}};
    auto text = [&] { return printed([&] { answer_pytorch_attention(runs, memory); }); };
    check_says(text(), {"**(a)** Memory runs out in none of the 5 configurations.",
                        "At S 16384 with D 16 forward takes 32.58 ms and backward 67.14 ms.",
                        "grows with S^2: 4148.5 MiB at S 8192, 16457.0 MiB at S 16384.",
                        "has S 32768 and D 16: it needs 160.1 GiB, and 139.2 are there.",
                        "it holds 64.1 GiB: 2 buffers of 32768 MiB, 5 buffers of 16 MiB and 2 buffers of 1 MiB.",
                        "exp(S - m) and P, 8 x 32768^2 numbers of 4 bytes.", "5 of that size are held",
                        "keeps L, one number per query", "It would hold q, k, v, dO, O and L, 81.0 MiB."});
    runs[2].naive = oom();
    check_says(text(), {"Memory runs out in 1 of the 5 configurations.", "At S 8192 with D 16 forward takes 8.05 ms"});
    runs[0].naive.held = runs[1].naive.held;
    check_says(text(), {"grows more slowly than S^2 at these lengths: 4148.5 MiB at S 4096, 4148.5 MiB at S 8192."});
    runs[0].naive = runs[1].naive = oom();  // no length of the first D is left
    check_says(text(), {"Memory runs out in 3 of the 5 configurations.", "keeps L"});
    CHECK(!has(text(), "forward takes"));
}

TEST_CASE("answers: torch_compile's attention") {
    std::vector<AttentionRun> runs = {{256, 16, F32, passes(0.075, 0.125), passes(0.025, 0.046)},
                                      {16384, 128, F32, passes(48.665, 96.981), passes(29.653, 55.999)}};
    auto text = [&] { return printed([&] { answer_torch_compile_attention(runs); }); };
    check_says(text(), {"forward is faster in 2 of 2 configurations (1.64 to 3.00 times as fast, S 256 to 16384). Its "
                        "backward is faster in 2 of 2 configurations (1.73 to 2.72 times as fast",
                        "torch.compile itself did not run."});
    runs[0].other.forward = times(0.09), runs[0].other.backward = times(0.12, 0.02), runs[1].naive = oom();
    check_says(text(), {"forward is slower in 1 of 2 configurations (0.83 times as fast, S 256) and not compared, for "
                        "lack of memory, in 1 "
                        "(S 16384). Its backward is level within the noise in 1 of 2 configurations (S 256)"});
}

TEST_CASE("answers: flash_benchmarking calls nothing faster that is slower or within the noise") {
    std::vector<AttentionRun> runs = {
        {65536, 16, BF16, passes(88.671, 127.485, 216.051), passes(0.862, 1.441, 2.3)},
        {65536, 128, BF16, passes(89.335, 128.089, 217.153), passes(1.568, 4.386, 5.895)},
        {1024, 128, F32, passes(0.095, 0.133, 0.222), passes(0.112, 0.275, 0.385)},
        {65536, 128, F32, passes(125.522, 207.935, 332.953), passes(26.253, 66.962, 93.164)}};
    auto text = [&] { return printed([&] { answer_flash_benchmarking(runs); }); };
    check_says(text(), {"In bfloat16 flash, timed against naive over forward and backward, is faster in 2 of 2 "
                        "configurations (36.84 to 93.94 times as fast, S 65536).",
                        "float32 flash, timed against naive over forward and backward, is faster in 1 of 2 "
                        "configurations (3.57 times as fast, S 65536) and slower in 1 (0.58 times as fast, S 1024)."});
    // A factor of 0.74, once clear, once within a busy machine's noise; and naive without memory.
    runs = {{512, 64, F32, passes(1, 1, 7.4), passes(1, 1, 10)}, {512, 64, BF16, oom(), passes(1, 1, 10)}};
    check_says(text(), {"slower in 1 of 1 configuration (0.74 times as fast, S 512).",
                        "is not compared, for lack of memory, in 1 of 1 configuration (S 512)"});
    CHECK(!has(text(), "faster"));
    runs[0].other.both.std = 3;
    check_says(text(), {"level within the noise in 1 of 1 configuration (S 512)."});
    CHECK(!has(text(), "0.74"));
}

TEST_CASE("answers: flash_forward and flash_backward name the handout's test, not the odd sizes") {
    context = Context();
    context.device = CUDA;
    const AttentionCase handouts = {4, 1, 128, 128, 64, true}, odd = {2, 3, 65, 65, 32, true};
    std::vector<AttentionCheck> checks = {{true, F32, handouts, {5.5e-7, 4.8e-7, 8.5e-7, 1.8e-6, 1.6e-6}},
                                          {true, BF16, handouts, {7.0e-3, 1.1e-3, 9.1e-3, 1.1e-2, 1.0e-2}},
                                          {false, BF16, handouts, {1.3e-2, 4.2e-3, 8.4e-3, 1.3e-2, 1.2e-2}},
                                          {true, F32, odd, {6.2e-4, 4.8e-4, 1e-3, 1e-3, 1e-3}}};
    check_says(printed([&] { answer_flash_backward(checks); }),
               {"from L, and takes D = rowsum(O dO)", "dQ, dK and dV is 1.8e-06 in float32 and 1.1e-02 in bfloat16."});
    for (AttentionCheck& check : checks) { check.errors.resize(2); }  // flash_forward has O and L alone
    check_says(printed([&] { answer_flash_forward(checks); }),
               {"**(a)** `tiled` is the plain version", "over the tiles of keys.\n", "-inf where the handout adds -1e6",
                "All 4 checks pass", "largest error in FlashAttention's O and L is 5.5e-07 in float32 and 7.0e-03 in"});
    context.device = CPU;
    check_says(printed([&] { answer_flash_forward(checks); }), {"None ran: they need a GPU."});
}

TEST_CASE("answers: flash_leaderboard") {
    auto text = [](double tflops, double rate, bool is_handouts) {
        const PassTimes t = passes(1.054, 2.476, 3.575);
        return printed([&] { answer_flash_leaderboard("hopper", t, tflops, rate, is_handouts); });
    };
    check_says(text(538, 797, true),
               {"fastest, hopper, takes 3.575 ms for forward and backward, 1.054 ms for forward alone. That is 538 "
                "TFLOP/s, 68 % of the rate of matrix products on this device.",
                "led with 5.364 ms, in Triton on an H100"});
    check_says(text(0.0138, 0.0364, false), {"That is 13.8 GFLOP/s, 38 % of"});
    CHECK(!has(text(0.0138, 0.0364, false), "5.364"));
}

TEST_CASE("answers: the commands of sections 1.2 and 1.3, --quick") {
    const std::map<std::string, std::string> phrases = {
        {"pytorch_attention", " MiB, 5 buffers of "},   {"weighted_sum", "memory bounds both"},
        {"flash_forward", "All 80 checks pass"},        {"flash_backward", "All 80 checks pass"},
        {"flash_benchmarking", "of 12 configurations"}, {"flash_leaderboard", "\n| tiled "},
    };
    for (const auto& [command, phrase] : phrases) {
        Run r = run_cs336({command, "--device", "cpu", "--quick"});
        REQUIRE_MESSAGE(r.exit_code == 0, r.err);
        for (const std::string& words : {phrase, std::string("; sizes of --quick\n")}) {
            CHECK_MESSAGE(has(r.out, words), words, " in: ", r.out);
        }
        for (size_t at = 0; (at = r.out.find("\n|", at)) != std::string::npos; at++) {
            CHECK(r.out.find('\n', at + 1) - at <= 121);
        }
    }
}

TEST_CASE("answers: flash_leaderboard times those with tiles, and any other by its name") {
    auto out = [](const char* impl) {
        return run_cs336({"flash_leaderboard", "--device", "cpu", "--context_length", "64", "--impl", impl}).out;
    };
    CHECK(has(out("all"), "\n| tiled "));
    CHECK(!has(out("all"), "\n| naive "));
    CHECK(has(out("naive"), "\n| naive "));
    CHECK(!has(out("naive"), "\n| tiled "));
    CHECK(has(out("auto"), "batch 1, 2 heads, D 64, S 64, fp32, causal;"));
}
