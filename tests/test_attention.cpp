// Tests of attention.cu, against attention written as loops in double precision.
#include "test.h"

#include <algorithm>
#include <cmath>

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
                INFO(to_string(s), " ", setting(), causal ? " causal" : "");
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
                    INFO(to_string(s), " ", setting(), causal ? " causal" : "");
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
                INFO(setting(), causal ? " causal" : "");
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
        INFO(setting());
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
        INFO(setting());
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
