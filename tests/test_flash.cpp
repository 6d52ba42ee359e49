// Tests of flash.cu and flash_commands.cu, and of every implementation in the table of attention.
#include "flash.cu"
#include "flash_commands.cu"

#include "test.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

// -------------------------------------------------------------------------------------------------
// A problem, its truth by flash.cu's reference in float64, and how results are held to it.

struct Sizes {
    int B, H, Tq, Tk, D;
};
static const Sizes all_sizes[] = {{1, 1, 1, 1, 2},    {2, 3, 2, 2, 16},   {1, 2, 31, 31, 16},
                                  {2, 1, 64, 64, 2},  {1, 2, 65, 65, 80}, {1, 2, 1, 65, 16},
                                  {2, 2, 31, 64, 16}, {2, 1, 65, 2, 16},  {1, 1, 64, 31, 80},
                                  {1, 2, 2, 1, 2}};
static string to_string(const Sizes& s) {
    return strprintf("B=%d H=%d Tq=%d Tk=%d D=%d", s.B, s.H, s.Tq, s.Tk, s.D);
}
static Tensor normal(const Shape& shape, DType dtype, uint64_t key, float std = 1) {
    Tensor t = empty(shape, dtype);
    fill_normal(t, 1, key, 0, std);
    return t;
}
using Inputs = AttentionTensors;
struct Result {
    Tensor o, L, dq, dk, dv;
};
static const char* const names[] = {"O", "L", "dQ", "dK", "dV"};
static Result result_of(const vector<Tensor>& all) {
    return {all[0], all[1], all[2], all[3], all[4]};
}
static Result result_of(const AttentionImpl& impl, Inputs in, bool causal) {
    in.causal = causal;
    return result_of(outputs_of(impl, in));
}
struct Problem {
    Inputs in;     // plain, in the dtype under test, on the device
    Result truth;  // float64, on the CPU
};
static void find_truth(Problem& p, bool causal) {
    RestoreContext restore;
    context.device = CPU, context.precision = FP32;
    p.in.causal = causal;
    // The reference is slow; where it would take seconds, fused in float64 (which is held to it
    // below) stands in.
    const bool small = p.in.q.dim(2) * p.in.k.dim(2) < 40000;
    p.truth = result_of(small ? reference(p.in, F64).results
                              : outputs_of(impl_named("fused", F64), as_type(F64, p.in)));
}
// of a tensor [1,1,T,D]
static Tensor with_rows_times(const Tensor& t, int begin, int end, float factor) {
    vector<float> x = to_floats(t);
    for (int64_t i = begin * t.dim(3); i < end * t.dim(3); i++) { x[i] *= factor; }
    return from_floats(x, t.shape, t.dtype);
}
// q's rows have standard deviation q_std; if `few`, only rows 16 to 31 of B 1, H 1 have it, which
// are one warp's.
static Problem make_problem(const Sizes& s, DType dtype, bool causal, float q_std = 1,
                            bool few = false) {
    Problem p;
    p.in = random_inputs({s.B, s.H, s.Tq, s.Tk, s.D, causal}, dtype, 1);
    if (few) { p.in.q = with_rows_times(p.in.q, 16, 32, q_std); }
    if (!few && q_std != 1) { p.in.q = normal(p.in.q.shape, dtype, 0, q_std); }
    find_truth(p, causal);
    return p;
}
// atol: times the largest value of the tensor, because single elements cancel; at least 1, because
// one key alone has P = 1: its dQ and dK are exactly 0, and what remains is rounding.
static void check_close(const string& what, const Tensor& got, const Tensor& want, double rtol,
                        double atol) {
    Comparison c = compare(got, want, rtol, atol * max(1.0, largest(want)));
    CHECK_MESSAGE(c.ok(), what, ": ", to_string(c));
}
static void check_result(const Result& got, const Result& want, double rtol, double atol) {
    const Tensor* g[] = {&got.o, &got.L, &got.dq, &got.dk, &got.dv};
    const Tensor* w[] = {&want.o, &want.L, &want.dq, &want.dk, &want.dv};
    for (int i = 0; i < 5; i++) { check_close(names[i], *g[i], *w[i], rtol, atol); }
}
// By context.mode; without L.
static Result run(const Inputs& in, bool causal) {
    Inputs x{require_gradient(in.q), require_gradient(in.k), require_gradient(in.v), causal, in.dO};
    Tensor o = attention(x.q, x.k, x.v, causal);
    backward_from(o, cast(x.dO, o.dtype));
    return {detached(o), Tensor(), x.q.gradient->value, x.k.gradient->value, x.v.gradient->value};
}

// -------------------------------------------------------------------------------------------------
// naive and fused, by context.mode

TEST_CASE("attention and its backward are the handout's equations, in float64") {
    begin<OnCPU>();
    for (const Sizes& s : all_sizes) {
        for (bool causal : {false, true}) {
            INFO(to_string(s), causal ? " causal" : "");
            Problem p = make_problem(s, F64, causal);
            for (const char* name : {"naive", "fused"}) {
                check_result(result_of(impl_named(name, F64), p.in, causal), p.truth, 0, 1e-12);
            }
        }
    }
}

TEST_CASE("attention's backward agrees with central differences") {
    begin<OnCPU>();
    const double h = 1e-5;
    for (const Sizes& s : {Sizes{1, 2, 5, 5, 2}, {1, 1, 3, 6, 3}, {2, 1, 6, 3, 2}}) {
        for (bool causal : {false, true}) {
            INFO(to_string(s), causal ? " causal" : "");
            Inputs in = random_inputs({s.B, s.H, s.Tq, s.Tk, s.D, causal}, F64, 1);
            const vector<double> dO = to_doubles(in.dO);
            for (string name : {"reference", "naive", "fused"}) {
                auto outputs = [&](const Inputs& x) {
                    return name == "reference" ? reference(x, F64).results
                                               : outputs_of(impl_named(name, F64), x);
                };
                const Result got = result_of(outputs(in));
                auto loss = [&] {
                    NoGrad no_grad;
                    const vector<double> o = to_doubles(outputs({in.q, in.k, in.v, causal})[0]);
                    return std::inner_product(o.begin(), o.end(), dO.begin(), 0.0);
                };
                const Tensor *inputs[] = {&in.q, &in.k, &in.v},
                             *gradients[] = {&got.dq, &got.dk, &got.dv};
                for (int j = 0; j < 3; j++) {
                    Tensor want = empty(inputs[j]->shape, F64);
                    for (int64_t i = 0; i < want.size(); i++) {
                        double *x = inputs[j]->as<double>() + i, before = *x;
                        *x = before + h;
                        const double above = loss();
                        *x = before - h;
                        want.as<double>()[i] = (above - loss()) / (2 * h);
                        *x = before;
                    }
                    check_close(name, *gradients[j], want, 0, 1e-8);
                }
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
                    Problem p = make_problem(s, F32, causal);
                    Result got = run(p.in, causal);
                    // Autocast's eager output takes P's type, which exp and div make fp32 and the
                    // product low again.
                    CHECK(got.o.dtype == matmul_dtype());
                    CHECK(got.dq.dtype == F32);
                    got.L = p.truth.L;
                    check_result(got, p.truth, 0, tolerance[precision]);
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
                Inputs in = random_inputs({s.B, s.H, s.Tq, s.Tk, s.D, causal}, F32, 1);
                // Every product of a query and a key is 16 * 50^2 with either sign: scores of 1e4
                // and -1e4.
                for (Tensor* t : {&in.q, &in.k}) {
                    vector<float> x(t->size());
                    for (size_t i = 0; i < x.size(); i++) {
                        x[i] = i / s.D % 3 == 0 ? 50.0f : -50.0f;
                    }
                    *t = from_floats(x, t->shape);
                }
                Result r = run(in, causal);
                for (const Tensor& t : {r.o, r.dq, r.dk, r.dv}) {
                    vector<float> values = to_floats(t);
                    CHECK(std::all_of(values.begin(), values.end(),
                                      [](float x) { return std::isfinite(x); }));
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
        const Inputs p = random_inputs({1, 1, 8, 8, 16, true}, F32, 1);
        NoGrad no_grad;
        vector<float> before = to_floats(attention(p.q, p.k, p.v, true));
        // key 5
        for (const Tensor* t : {&p.k, &p.v}) {
            copy(view(*t, 5 * s.D, {s.D}), normal({s.D}, F32, 9, 100));
        }
        vector<float> after = to_floats(attention(p.q, p.k, p.v, true));
        CHECK(std::equal(before.begin(), before.begin() + 5 * s.D, after.begin()));
        for (int i = 5; i < 8; i++) { CHECK(before[i * s.D] != after[i * s.D]); }
    }
}

TEST_CASE_TEMPLATE(
    "attention takes the views that split heads, and gives the same bits in every run", D, OnCPU,
    OnCUDA) {
    if (!begin<D>()) { return; }
    const Sizes s = {2, 3, 33, 33, 16};
    for (Mode mode : {EAGER, FUSED}) {
        context.mode = mode;
        INFO(setting_now());
        const Inputs in = random_inputs({s.B, s.H, s.Tq, s.Tk, s.D, true}, F32, 1);
        Inputs split = in;
        for (Tensor* t : {&split.q, &split.k, &split.v}) {  // stored [B,T,H,D], seen as [B,H,T,D]
            *t = transpose(contiguous(transpose(*t, 1, 2)), 1, 2);
        }
        Result want = run(in, true), got = run(split, true), again = run(split, true);
        want.L = got.L = from_floats({0}, {1});
        check_result(got, want, 0, 1e-6);
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

// -------------------------------------------------------------------------------------------------
// Tests of flash.cu and the fast kernels: every row of the table of implementations, on the
// devices that are here, against the reference in float64, on strided tensors that lie in memory
// full of NaN, with outputs that nothing may be written around.

static const DType low_types[] = {F32, BF16, F16};

// A [B,H,T,D] tensor as the model has it, a view of [B,T,H,D] rows, with `guard` more rows before
// and behind, all of it filled with `fill` first.
struct Guarded {
    Tensor all, t;
};
static Guarded guarded(int64_t B, int64_t H, int64_t T, int64_t D, DType dtype, float fill) {
    constexpr int64_t GUARD = 3;
    int64_t rows = B * T + 2 * GUARD, row = H * D;
    Guarded g;
    g.all = from_floats(vector<float>(rows * row, fill), {rows, row}, dtype);
    g.t = view(g.all, GUARD * row, {B, T, H, D});
    std::swap(g.t.shape[1], g.t.shape[2]);
    std::swap(g.t.stride[1], g.t.stride[2]);
    return g;
}
static void fill_with(const Guarded& g, const Tensor& values) { copy_or_add(g.t, values, false); }
static bool guards_hold(const Guarded& g, float fill) {
    vector<float> v = to_floats(g.all);
    int64_t edge = (g.t.data - g.all.data) / size_of(g.all.dtype), end = edge + g.t.size();
    for (int64_t i = 0; i < (int64_t)v.size(); i++) {
        if ((i < edge || i >= end) && v[i] != fill) { return false; }
    }
    return true;
}

static double tolerance_of(DType t) { return t == F32 ? 1e-4 : t == F16 ? 4e-3 : 2.5e-2; }

// Implementations with passes of their own run on guarded, strided tensors; naive and fused run
// through the tape.
static void check_impl(const AttentionImpl& impl, const Problem& p, bool causal) {
    const Inputs& x = p.in;
    const DType dtype = x.q.dtype;
    const int B = (int)x.q.dim(0), H = (int)x.q.dim(1), Tq = (int)x.q.dim(2), Tk = (int)x.k.dim(2),
              D = (int)x.q.dim(3);
    CAPTURE(strprintf("%s %s B %d H %d Tq %d Tk %d D %d %s", impl.name, name_of(dtype), B, H, Tq,
                      Tk, D, causal ? "causal" : "full"));
    const double tolerance = tolerance_of(dtype);
    if (!impl.forward) {
        return check_result(result_of(impl, x, causal), p.truth, tolerance, tolerance);
    }
    Guarded in[4], out[4];  // q k v dO | o dq dk dv
    const Tensor* values[] = {&x.q, &x.k, &x.v, &x.dO};
    for (int i = 0; i < 4; i++) {
        in[i] = guarded(B, H, i == 1 || i == 2 ? Tk : Tq, D, dtype, NAN);
        fill_with(in[i], *values[i]);
        out[i] = guarded(B, H, i >= 2 ? Tk : Tq, D, dtype, 7);
        fill_with(out[i], normal(out[i].t.shape, dtype, 9, NAN));  // what is not written stays NaN
    }
    Tensor L = from_floats(vector<float>(B * H * Tq, NAN), {B, H, Tq});
    AttentionTensors t{in[0].t,  in[1].t, in[2].t,  causal,   in[3].t,
                       out[0].t, L,       out[1].t, out[2].t, out[3].t};
    impl.forward(t);
    impl.backward(t);
    check_result({t.o, L, t.dq, t.dk, t.dv}, p.truth, tolerance, tolerance);
    for (const Guarded& g : out) { CHECK(guards_hold(g, 7)); }
}
static vector<const AttentionImpl*> impls_for(DType dtype, int64_t D) {  // on context.device
    vector<const AttentionImpl*> all;
    for (const AttentionImpl& impl : table_of<AttentionImpl>()) {
        if (impl.device == context.device && impl.takes(dtype, D)) { all.push_back(&impl); }
    }
    return all;
}
// With q_std > 1 the scores are large; rows that keep S in 16 bits are then off by S's rounding,
// and are left out.
static void check_all(const Sizes& s, bool causal, float q_std = 1, bool few = false) {
    for (DType dtype : low_types) {
        const auto impls = impls_for(dtype, s.D);
        if (impls.empty()) { continue; }
        const Problem p = make_problem(s, dtype, causal, q_std, few);
        for (const AttentionImpl* impl : impls) {
            if (impl->forward || dtype == F32 || q_std == 1) { check_impl(*impl, p, causal); }
        }
    }
}

TEST_CASE_TEMPLATE("flash: every implementation at every length and head size", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    const pair<int, int> lengths[] = {{1, 1},   {2, 2},     {31, 31},   {63, 63},  {64, 64},
                                      {65, 65}, {127, 127}, {129, 129}, {65, 129}, {129, 65},
                                      {1, 200}, {200, 1},   {200, 200}};
    for (int head : {16, 32, 64, 80, 128}) {
        for (auto [Tq, Tk] : lengths) {
            for (bool causal : {false, true}) {
                // the CPU checks these at one head size
                bool most = head != 64 && Tq * Tk > 5000 && D::device == CPU;
                if (!most) { check_all({head == 16 ? 2 : 1, 2, Tq, Tk, head}, causal); }
            }
        }
    }
}
// The largest share of its bound that a result of one of the rows takes, for each type and result.
using Shares = map<DType, std::array<double, 5>>;
static void add_shares(Shares& all, const AttentionCase& c, DType dtype, uint64_t seed) {
    const AttentionTensors in = random_inputs(c, dtype, seed);
    const Reference want = reference(in, dtype);
    for (const AttentionImpl* impl : impls_for(dtype, c.D)) {
        const vector<Tensor> got = outputs_of(*impl, as_type(dtype, in));
        for (int i = 0; i < 5; i++) {
            double& share = all[dtype][i];
            share = max(share, error_of(got[i], want.results[i], want.bounds[i]).of_bound);
        }
    }
}
static void check_shares(const vector<AttentionCase>& cases, int seeds) {
    Shares all;
    for (int seed = 0; seed < seeds; seed++) {
        for (const AttentionCase& c : cases) {
            for (DType dtype : low_types) { add_shares(all, c, dtype, seed); }
        }
    }
    for (const auto& [dtype, shares] : all) {
        string text = strprintf("%s, %d seeds, worst share of the bound:", name_of(dtype), seeds);
        for (int i = 0; i < 5; i++) {
            text += strprintf(" %s %.3f", names[i], shares[i]);
            CHECK_MESSAGE(shares[i] <= 1, name_of(dtype), " ", names[i]);
        }
        MESSAGE(text);
    }
}
static const vector<AttentionCase> seed_cases = {
    {1, 2, 1, 1, 16, true},     {1, 2, 33, 33, 16, true},  {2, 1, 65, 65, 32, true},
    {1, 1, 31, 100, 80, false}, {1, 1, 100, 31, 80, true}, {1, 1, 130, 130, 16, false},
    {1, 1, 40, 140, 128, true}};
TEST_CASE_TEMPLATE("flash: the bounds hold for 32 seeds", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    check_shares(seed_cases, 32);
}
TEST_CASE_TEMPLATE("flash: the bounds hold for 1000 seeds" * doctest::skip(), D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    check_shares(seed_cases, 1000);
    check_shares(check_cases, 20);
}

// A row of the table with one mistake of a usual kind, by its name; the rest is exact.
static string mistake;
static bool is(const char* name) { return mistake == name; }
static void mistaken(const AttentionTensors& t, bool backward) {
    const int64_t H = t.q.dim(1), heads = t.q.dim(0) * H, Tq = t.q.dim(2), Tk = t.k.dim(2),
                  D = t.q.dim(3);
    const vector<double> Q = to_doubles(t.q), K = to_doubles(t.k), V = to_doubles(t.v);
    const vector<double> dO = backward ? to_doubles(t.dO) : vector<double>(Q.size());
    vector<float> o(Q.size()), L(heads * Tq), dq(Q.size()), dk(K.size()), dv(K.size());
    const double scale = is("no scale")          ? 1
                         : is("the scale twice") ? 1.0 / D
                                                 : 1 / std::sqrt((double)D);
    for (int64_t head = 0; head < heads; head++) {
        if (is("only the first batch") && head >= H) { continue; }
        for (int64_t i = 0; i < Tq; i++) {
            if (is("only the first tile of queries") && i >= 64) { continue; }
            int n = keys_seen(t.causal && !is("no mask"), (int)i, (int)Tk);
            if (is("a query does not see its own key") && t.causal) { n = max(1, n - 1); }
            if (is("a query sees one key more") && t.causal) { n = min((int)Tk, n + 1); }
            if (is("the last tile of keys is skipped") && n > 32) { n = (n - 1) / 32 * 32; }
            const double *q = &Q[(head * Tq + i) * D], *k = &K[head * Tk * D],
                         *v = &V[head * Tk * D];
            const double* g = &dO[(head * Tq + i) * D];
            vector<double> s(n), p(n), dp(n);
            double m = -INFINITY, l = 0, tile_m = -INFINITY;
            for (int j = 0; j < n; j++) {
                s[j] = scale * std::inner_product(q, q + D, k + j * D, 0.0);
                m = max(m, s[j]);
            }
            for (int j = 0; j < n; j++) {
                if (j % 32 == 0) {
                    tile_m = max(tile_m, *std::max_element(&s[j], &s[0] + min(n, j + 32)));
                }
                p[j] = std::exp(s[j] - (is("old tiles are not rescaled") ? tile_m : m));
                l += p[j];
            }
            const double log_l = is("L without log") ? l : is("L is the maximum") ? 0 : std::log(l);
            L[head * Tq + i] = (float)((is("L is log l") ? 0 : m) + log_l);
            const double of_O = is("O is not divided by l") ? 1 : l;
            for (int j = 0; j < n; j++) {
                for (int d = 0; d < D; d++) {
                    o[(head * Tq + i) * D + d] += (float)(p[j] / of_O * v[j * D + d]);
                }
            }
            double Di = 0;
            for (int j = 0; j < n; j++) {
                dp[j] = std::inner_product(g, g + D, v + j * D, 0.0);
                Di += is("D is the sum of dP") ? dp[j] : is("no D") ? 0 : p[j] / l * dp[j];
            }
            for (int j = 0; j < n; j++) {
                const double ds = (is("dS without P") ? 1 : p[j] / l) * (dp[j] - Di);
                for (int d = 0; d < D; d++) {
                    const int64_t key = (head * Tk + j) * D + d, query = (head * Tq + i) * D + d;
                    dv[key] +=
                        (float)(p[j] / (is("dV from P that is not divided by l") ? 1 : l) * g[d]);
                    dq[query] +=
                        (float)((is("dQ without the scale") ? 1 : scale) * ds * k[j * D + d]);
                    dk[key] += (float)((is("dK without the scale") ? 1 : scale) * ds * q[d]);
                }
            }
        }
    }
    if (is("dQ and dK change places") && Tq == Tk) { std::swap(dq, dk); }
    if (is("O is 10 % off")) {
        for (float& x : o) { x *= 1.1f; }
    }
    auto write = [](const Tensor& to, const vector<float>& x) {
        copy(to, from_floats(x, to.shape, to.dtype));
    };
    if (!backward) { return write(t.o, o), write(t.L, L); }
    write(t.dq, dq), write(t.dk, dk), write(t.dv, dv);
}
static const AttentionImpl mistaken_impl = {"mistaken",
                                            CPU,
                                            99,
                                            [](DType, int64_t) { return true; },
                                            nullptr,
                                            [](const AttentionTensors& t) { mistaken(t, false); },
                                            [](const AttentionTensors& t) { mistaken(t, true); }};

TEST_CASE("flash: the bounds tell each usual mistake from rounding, in every type") {
    begin<OnCPU>();
    const char* mistakes[] = {"no scale",
                              "the scale twice",
                              "no mask",
                              "a query does not see its own key",
                              "a query sees one key more",
                              "the last tile of keys is skipped",
                              "only the first tile of queries",
                              "only the first batch",
                              "old tiles are not rescaled",
                              "L without log",
                              "L is the maximum",
                              "L is log l",
                              "O is not divided by l",
                              "O is 10 % off",
                              "no D",
                              "D is the sum of dP",
                              "dS without P",
                              "dV from P that is not divided by l",
                              "dQ without the scale",
                              "dK without the scale",
                              "dQ and dK change places"};
    for (DType dtype : low_types) {
        const AttentionTensors in = random_inputs({2, 1, 65, 65, 16, true}, dtype, 0);
        const Reference want = reference(in, dtype);
        auto worst = [&](const char* name) {
            mistake = name;
            const vector<Tensor> got = outputs_of(mistaken_impl, in);
            double share = 0;
            for (int i = 0; i < 5; i++) {
                share = max(share, error_of(got[i], want.results[i], want.bounds[i]).of_bound);
            }
            return share;
        };
        CHECK(worst("none") <= 1);
        for (const char* name : mistakes) {
            const double share = worst(name);
            CHECK_MESSAGE(share > 1.5, name_of(dtype), ", ", name, ": ", share);
        }
    }
}
TEST_CASE("flash: a number that is not finite is infinitely far, and stays the largest") {
    begin_on(CPU);
    const Tensor want = from_floats({0, 1}, {2});
    const ResultError e = error_of(from_floats({NAN, 1.5f}, {2}), want, want);
    CHECK(e.largest == INFINITY);
    CHECK(e.of_bound == INFINITY);
}
TEST_CASE("flash: a WRONG row fails flash_forward and flash_backward, and leaves their answers") {
    begin<OnCPU>();
    const std::list<AttentionImpl> all = table_of<AttentionImpl>();
    Options o;
    o.device = "cpu", o.quick = true;
    table_of<AttentionImpl>().push_back(
        {"10 % off", CPU, 99, [](DType, int64_t) { return true; },
         [](const Tensor& q, const Tensor& k, const Tensor& v, bool causal, Tensor* L) {
             return scale(impl_named("fused").run(q, k, v, causal, L), 1.1);
         },
         nullptr, nullptr});
    for (bool with_backward : {false, true}) {
        int exit_code = -1;
        const string text = printed(
            [&] { exit_code = with_backward ? cmd_flash_backward(o) : cmd_flash_forward(o); });
        INFO(text);
        CHECK(exit_code == 1);
        CHECK(has(text,
                  with_backward ? "Flash's backward computes P again" : "**(c)** A masked score"));
        CHECK(has(text, "WRONG: 24 of 80 checks."));
        CHECK(!has(text, "checks pass"));
        const vector<string> rows = column(text, "implementation"), status = column(text, "status");
        for (size_t i = 0; i < rows.size(); i++) {
            CHECK((status[i] == "WRONG") == (rows[i] == "10 % off"));
        }
    }
    table_of<AttentionImpl>() = all;
}

TEST_CASE_TEMPLATE("flash: long sequences", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    check_all({1, 1, 1000, 1000, 64}, true);
    check_all({1, 1, 700, 1000, 32}, false);
    if (D::device == CUDA) {
        check_all({1, 1, 4097, 4097, 64}, true);
        check_all({1, 1, 4097, 1000, 128}, true);
        // Hopper has larger tiles from here on
        for (int head : {16, 32}) {
            for (bool causal : {false, true}) { check_all({1, 2, 1090, 300, head}, causal); }
        }
        // more blocks than the card holds at once: the kernels' large tiles
        check_all({3, 100, 129, 129, 64}, true);
        check_all({3, 100, 129, 65, 128}, false);
        // more heads than attention_grid() lets start together
        check_all({1, 300, 400, 400, 16}, true);
    }
}
TEST_CASE_TEMPLATE(
    "flash: large scores do not overflow, and a lone visible key is returned as it is", D, OnCPU,
    OnCUDA) {
    if (!begin<D>()) { return; }
    for (bool causal : {false, true}) { check_all({1, 2, 130, 130, 64}, causal, 60); }
    // One warp's maxima rise from tile to tile, its neighbours' stay.
    for (int head : {64, 80, 128}) { check_all({1, 1, 192, 300, head}, false, 30, true); }
    if (D::device == CUDA) { check_all({1, 1, 1090, 300, 64}, false, 30, true); }
    for (DType dtype : low_types) {
        for (const AttentionImpl* impl : impls_for(dtype, 32)) {
            const Inputs in = random_inputs({1, 1, 5, 5, 32, true}, dtype, 1);
            vector<float> o = to_floats(outputs_of(*impl, in)[0]), want = to_floats(in.v);
            for (int d = 0; d < 32; d++) { CHECK(o[d] == doctest::Approx(want[d]).epsilon(1e-6)); }
        }
    }
}
// One number of the second of two heads is not finite: then no implementation may give a finite
// result where the reference does not. Tiles may spread it further (0 times NaN is NaN), but not
// into the first head.
static void check_spread(const char* what, const Tensor& got_in, const Tensor& want_in) {
    vector<double> got = to_doubles(got_in), want = to_doubles(want_in);
    int hidden = 0, strayed = 0;
    for (size_t i = 0; i < got.size(); i++) {
        hidden += !std::isfinite(want[i]) && std::isfinite(got[i]);
        strayed += i < got.size() / 2 && !std::isfinite(got[i]);
    }
    CHECK_MESSAGE(hidden == 0, string(what));
    CHECK_MESSAGE(strayed == 0, string(what));
}
static void check_not_finite(const Inputs& clean, float value, const string& what) {
    int T = (int)clean.q.dim(2), C = (int)clean.q.dim(3);
    for (Tensor Inputs::*input : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::dO}) {
        for (int at : {0, T / 2 * C + C / 2, T * C - 1}) {
            Problem p{clean, {}};
            vector<float> x = to_floats(clean.*input);
            x[T * C + at] = value;
            p.in.*input = from_floats(x, clean.q.shape, clean.q.dtype);
            for (bool causal : {false, true}) {
                find_truth(p, causal);
                CHECK(!std::isfinite(largest(p.truth.dq) + largest(p.truth.dk) +
                                     largest(p.truth.dv)));
                for (const AttentionImpl* impl : impls_for(clean.q.dtype, C)) {
                    CAPTURE(strprintf("%s, %s, %s, element %d", impl->name, what.c_str(),
                                      causal ? "causal" : "full", at));
                    const Result got = result_of(*impl, p.in, causal), want = p.truth;
                    check_spread("O", got.o, want.o), check_spread("L", got.L, want.L);
                    check_spread("dQ", got.dq, want.dq), check_spread("dK", got.dk, want.dk);
                    check_spread("dV", got.dv, want.dv);
                }
            }
        }
    }
}
// The scores of the keys [from, to) are all -inf: what takes them first may not count them.
static void check_hidden_keys(const AttentionCase& c, int from, int to) {
    Inputs in = random_inputs(c, F32, 1);
    vector<float> q(c.Tq * c.D), k = to_floats(in.k);
    for (int i = 0; i < c.Tq; i++) { q[i * c.D] = 1; }
    for (int j = from; j < to; j++) { k[j * c.D] = -INFINITY; }
    in.q = from_floats(q, in.q.shape), in.k = from_floats(k, in.k.shape), in.dO = Tensor();
    for (DType dtype : low_types) {
        const Inputs low = as_type(dtype, in);
        const vector<Tensor> want = reference(low, F32).results;
        const double tolerance = dtype == F32 ? 1e-6 : tolerance_of(dtype);
        for (const AttentionImpl* impl : impls_for(dtype, c.D)) {
            const vector<Tensor> got = outputs_of(*impl, low);
            for (int i : {0, 1}) {
                check_close(strprintf("%s %s %s", impl->name, name_of(dtype), names[i]), got[i],
                            want[i], 10 * tolerance, tolerance);
            }
        }
    }
}
TEST_CASE_TEMPLATE("flash: first tiles whose scores are all -inf count nothing", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    check_hidden_keys({1, 1, 3, 200, 16, false}, 0, 128);
    // hopper's first tiles are the last: one not full, two full
    check_hidden_keys({1, 1, 3, 400, 16, false}, 128, 400);
    // two warpgroups and more; at head size 64 tensor cores add up l
    check_hidden_keys({1, 1, 130, 400, 64, false}, 128, 400);
    check_hidden_keys({1, 1, 400, 400, 64, true}, 128, 400);
}

TEST_CASE_TEMPLATE("flash: what is not finite in the reference is so in every implementation", D,
                   OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    for (DType dtype : low_types) {
        for (int head : {16, 32, 64, 80, 128}) {
            if (D::device == CPU && head != 16 && !(head == 80 && dtype == F32)) { continue; }
            // 140: more than one tile of queries, and of keys; the last ones are not full. In 16
            // bits the CPU has no tiles.
            const int T = D::device == CPU && dtype != F32 ? 40 : 140;
            const Inputs clean = random_inputs({1, 2, T, T, head, false}, dtype, 1);
            for (float value : {NAN, INFINITY}) {
                check_not_finite(clean, value,
                                 strprintf("%s, D %d, %f", name_of(dtype), head, value));
            }
        }
    }
}
// A race shows itself by repetition. Only the kernels of fast/ add to dQ in an order that may
// change.
TEST_CASE_TEMPLATE(
    "flash: many runs give the same O, L, dK and dV, and the same dQ but for rounding", D, OnCPU,
    OnCUDA) {
    if (!begin<D>()) { return; }
    DType dtype = D::device == CUDA ? BF16 : F32;
    for (const AttentionImpl* impl : impls_for(dtype, 64)) {
        if (!impl->forward) { continue; }
        for (auto [head_size, many, causal] : {std::tuple(64, false, true),
                                               {64, false, false},  // Hopper's larger tiles
                                               {128, false, true},
                                               {64, true, true},
                                               {64, true, false},
                                               {128, true, true}}) {
            if ((many || !causal) && D::device == CPU) { continue; }
            // many: over four tiles of queries per multiprocessor, so that blocks take one after
            // another
            const int H = many ? 200 : 3, T = many ? 400 : 777;
            const Inputs in = random_inputs({1, H, T, T, head_size, causal}, dtype, 1);
            vector<Tensor> first;
            int different = 0, far = 0;
            for (int run = 0; run < (D::device == CPU ? 3 : many ? 50 : 200); run++) {
                vector<Tensor> all = outputs_of(*impl, in);
                for (Tensor& t : all) { t = to_device(t, CPU); }
                if (run == 0) { first = all; }
                bool same = true;
                for (int i : {0, 1, 2, 3, 4}) {
                    bool one = memcmp(first[i].data, all[i].data, describe(all[i]).bytes) == 0;
                    same = same && (one || (i == 2 && impl->rung > 40));
                }
                different += !same;
                far += !compare(all[2], first[2], 1e-2, 1e-2).ok();
            }
            CHECK_MESSAGE(different == 0, impl->name, " ", head_size, " ", many);
            CHECK_MESSAGE(far == 0, impl->name, " ", head_size, " ", many);
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
        Tensor q = normal({1, 1, T, 64}, F32, 1, 1);
        size_t before = memory_use(D::device).now;
        reset_peak(D::device);
        outputs_of(*impl, {q, q, q, true, q});
        peak[i] = memory_use(D::device).peak - before;
    }
    CHECK(peak[1] < 2.5 * peak[0]);
}
TEST_CASE_TEMPLATE("flash: the attention command", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    Folder folder;
    string in = folder / "in.safetensors", out = folder / "out.safetensors";
    const Problem p = make_problem({2, 3, 33, 65, 32}, F32, true);
    vector<Tensor> host;
    for (const Tensor* t : {&p.in.q, &p.in.k, &p.in.v, &p.in.dO}) {
        host.push_back(to_device(*t, CPU));
    }
    auto attention_on = [&](vector<string> more) {
        more.insert(more.begin(), {"attention", "--out", out, "--device", name_of(D::device)});
        return run_cs336(more);
    };
    save_safetensors(in, {{"q", describe(host[0])},
                          {"k", describe(host[1])},
                          {"v", describe(host[2])},
                          {"do", describe(host[3])}});
    auto check_output = [&](const char* name, const Tensor& want, const Shape& shape) {
        SafeTensors file = load_safetensors(out);
        FileTensor f = require_tensor(file, name, shape, {"F32"});
        Tensor got = empty_on(CPU, want.shape, F32);
        memcpy(got.data, f.data, f.bytes);
        check_close(name, got, want, 1e-4, 1e-4);
        return file.tensors.size();
    };
    for (const char* impl : {"auto", "naive", "fused"}) {
        Run r = attention_on({"--inputs", in, "--causal", "--impl", impl});
        REQUIRE_MESSAGE(r.exit_code == 0, r.err);
        const pair<const char*, const Tensor*> expected[] = {{"o", &p.truth.o},
                                                             {"lse", &p.truth.L},
                                                             {"dq", &p.truth.dq},
                                                             {"dk", &p.truth.dk},
                                                             {"dv", &p.truth.dv}};
        for (const auto& e : expected) {
            CHECK(check_output(e.first, *e.second, e.second->shape) == 5);
        }
        remove(out.c_str());  // so that the next one has to be written
    }
    auto without_heads = [](const Tensor& t) {
        return describe(view(t, 0, {t.dim(0) * t.dim(1), t.dim(2), t.dim(3)}));
    };
    save_safetensors(in, {{"q", without_heads(host[0])},
                          {"k", without_heads(host[1])},
                          {"v", without_heads(host[2])}});
    Run three = attention_on({"--inputs", in, "--causal"});
    REQUIRE_MESSAGE(three.exit_code == 0, three.err);
    CHECK(check_output("o", p.truth.o, {6, 33, 32}) == 2);
    check_output("lse", p.truth.L, {6, 33});
    CHECK(run_cs336({"attention", "--inputs", in, "--out", out, "--device", name_of(D::device)},
                    "/dev/full")
              .exit_code == 1);
    save_safetensors(in, {{"q", describe(host[0])},
                          {"k", describe(host[1])},
                          {"v", describe(host[2])},
                          {"dO", describe(host[3])}});
    Run misspelt = attention_on({"--inputs", in});
    CHECK(misspelt.exit_code == 1);
    CHECK_MESSAGE(has(misspelt.err, "tensor \"dO\": not q, k, v or do"), misspelt.err);
    Run wrong = attention_on({"--inputs", in, "--impl", "nonsense"});
    CHECK(wrong.exit_code == 2);
    CHECK(wrong.err.find("--impl") != string::npos);
    Run missing = attention_on({"--inputs", "tests/fixtures/model_batch.safetensors"});
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
    const Inputs inputs{tensor(in, "q"), tensor(in, "k"), tensor(in, "v"), true, tensor(in, "do")};
    const Result want{tensor(expected, "o"), tensor(expected, "lse"), tensor(expected, "dq"),
                      tensor(expected, "dk"), tensor(expected, "dv")};
    for (const AttentionImpl* impl : impls_for(F32, 16)) {
        INFO(string(impl->name));
        check_result(result_of(*impl, inputs, true), want, 1e-5, 1e-5);
    }
}
TEST_CASE_TEMPLATE("flash: the leaderboard says OOM where there is not the memory", D, OnCPU,
                   OnCUDA) {
    if (!begin<D>()) { return; }
    Run r = run_cs336({"flash_leaderboard", "--quick", "--d_model", "1048576", "--num_heads",
                       "65536", "--context_length", "1048576", "--format", "csv", "--device",
                       name_of(D::device)});
    CHECK(r.exit_code == 1);
    CHECK_MESSAGE(has(r.err, "no row fits into memory"), r.err);
    string row = r.out.substr(r.out.find("\ntiled,") + 1), oom = row.substr(row.find("OOM ("));
    oom.resize(oom.find(')') + 1);
    // and no rate
    if (D::device == CPU) { CHECK(row == "tiled," + oom + "," + oom + "," + oom + ",,-\n"); }
}
TEST_CASE("flash: v1 on the GPU, tiles' borders, all types") {  // small: for the sanitizers
    if (!begin_on(CUDA)) { return; }
    for (DType dtype : low_types) {
        for (const Sizes& s : {Sizes{1, 2, 33, 65, 80}, {1, 2, 64, 31, 16}}) {
            for (bool causal : {false, true}) {
                check_impl(impl_named("flash_v1"), make_problem(s, dtype, causal), causal);
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Tests of flash.cu's answers: numbers measured on an H200 in, the sentences out.

TEST_CASE("answers: flash_benchmarking calls nothing faster that is slower or within the noise") {
    AttentionRuns runs = {
        {65536, 16, BF16, passes(88.671, 127.485, 216.051), passes(0.862, 1.441, 2.3)},
        {65536, 128, BF16, passes(89.335, 128.089, 217.153), passes(1.568, 4.386, 5.895)},
        {1024, 128, F32, passes(0.095, 0.133, 0.222), passes(0.112, 0.275, 0.385)},
        {65536, 128, F32, passes(125.522, 207.935, 332.953), passes(26.253, 66.962, 93.164)}};
    auto text = [&] { return printed([&] { answer_flash_benchmarking(runs); }); };
    check_says(text(), {"Compared with naive, flash (forward and backward) in bfloat16 is faster "
                        "in all 2 configurations that fit (36.84 to 93.94 times as fast).",
                        "flash (forward and backward) in float32 is faster in 1 of the 2 "
                        "configurations that fit (0.58 to 3.57 times as fast), slower in 1."});
    // A factor of 0.74, once clear, once within a busy machine's noise; and naive without memory.
    runs = {{512, 64, F32, passes(1, 1, 7.4), passes(1, 1, 10)},
            {512, 64, BF16, oom(), passes(1, 1, 10)}};
    check_says(
        text(),
        {"faster in 0 of the 1 configuration that fit (0.74 to 0.74 times as fast), slower in 1.",
         "in 0 of the 0 configurations that fit. In 1 memory runs out."});
    CHECK(!has(text(), "faster in 1"));
    runs[0].other.ms[BOTH_PASSES].std = 15;  // of 100 runs: the standard error of the mean is 1.5
    check_says(text(), {"faster in 0 of the 1 configuration that fit, not told apart in 1."});
    CHECK(!has(text(), "0.74"));
    // Of 100 runs 60 take 5 ms and 40 take 15: by its median of 5 ms it is faster than 7.4, by its
    // mean of 9, which is clear of noise, slower.
    runs[0].other.ms[BOTH_PASSES] = {9, 4.9, 5, 5, 15, 100};
    check_says(text(), {"faster in 0 of the 1 configuration that fit, not told apart in 1."});
}

TEST_CASE(
    "answers: flash_benchmarking names the launches only where naive's time does not change, on a "
    "GPU") {
    begin<OnCPU>();
    AttentionRuns runs;
    for (auto [S, ms] :
         {pair{128, 0.344}, {256, 0.337}, {512, 0.354}, {1024, 1.113}, {2048, 4.078}}) {
        runs.push_back({S, 16, BF16, passes(1, 1, ms), passes(1, 1, 0.03)});
    }
    runs.push_back({4096, 16, BF16, oom(), passes(1, 1, 0.1)});
    // of another head size
    runs.push_back({65536, 32, BF16, passes(1, 1, 0.344), passes(1, 1, 0.03)});
    auto text = [&] { return printed([&] { answer_flash_benchmarking(runs); }); };
    CHECK(!has(text(), "launching"));
    context.device = CUDA;  // nothing runs on it
    check_says(text(), {"At D 16 naive takes 0.344 ms at S 128 and 0.354 at S 512: launching its "
                        "kernels can explain that."});
    runs[1].naive.ms[BOTH_PASSES].median = 0.42;  // a length before 512 takes longer
    CHECK(!has(text(), "launching"));
    runs[2].naive.ms[BOTH_PASSES] = times(0.5);  // only up to S 256
    CHECK(!has(text(), "launching"));
    context.device = CPU;
}

TEST_CASE("answers: flash_leaderboard") {
    const AttentionCase c{1, 16, 16384, 16384, 64, true};
    auto text = [](const AttentionCase& c) {
        return printed([&] { answer_flash_leaderboard("hopper", c, passes(1.054, 2.476, 3.575)); });
    };
    begin<OnCPU>();
    check_says(
        text(c),
        {"fastest that ran here, hopper, takes 3.575 ms for forward and backward (538 TFLOP/s), "
         "1.054 ms for forward alone."});
    CHECK(!has(text(c), "class"));  // in fp32
    context.precision = PREC_BF16;
    check_says(text(c), {"The class leaderboard of 2025 was led with 5.364 ms at these sizes, in "
                         "Triton on an H100."});
    for (const AttentionCase& other : {AttentionCase{1, 2, 16384, 16384, 64, true},
                                       {1, 16, 512, 512, 64, true},
                                       {1, 16, 16384, 16384, 32, true}}) {
        CHECK(!has(text(other), "class"));
    }
}

// Runs the command with --quick on the CPU, checks what it says and how wide its tables are, and
// returns what it prints.
string check_quick(vector<string> words, vector<string> says) {
    words.insert(words.end(), {"--device", "cpu", "--quick"});
    const Run r = run_cs336(words);
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    says.push_back("; sizes of --quick where none is typed\n");
    for (const string& phrase : says) { CHECK_MESSAGE(has(r.out, phrase), phrase, " in: ", r.out); }
    for (const string& status : column(r.out, "status")) { CHECK(status != "WRONG"); }
    for (size_t at = 0; (at = r.out.find("\n|", at)) != string::npos; at++) {
        CHECK(r.out.find('\n', at + 1) - at <= 121);
    }
    return r.out;
}
TEST_CASE("answers: the commands of sections 1.2 and 1.3, --quick") {
    const string pass = "All 56 checks pass: the largest error is 0.";
    const map<string, vector<string>> phrases = {
        {"weighted_sum", {"of the largest x: it moves"}},
        {"flash_forward", {pass, "**(c)** A masked score"}},
        {"flash_backward", {pass, "Flash's backward computes P again"}},
        {"flash_benchmarking", {"12 configurations that fit"}},
        {"flash_leaderboard", {"\n| tiled "}},
    };
    for (const auto& [command, says] : phrases) { check_quick({command}, says); }
}

TEST_CASE("answers: flash_leaderboard times those with tiles, and any other by its name") {
    auto out = [](const char* impl) {
        return run_cs336({"flash_leaderboard", "--device", "cpu", "--context_length", "64",
                          "--impl", impl})
            .out;
    };
    const string all = out("all"), naive = out("naive");
    CHECK(has(all, "\n| tiled "));
    CHECK(!has(all, "\n| naive "));
    CHECK(has(naive, "\n| naive "));
    CHECK(!has(naive, "\n| tiled "));
    CHECK(has(out("auto"), "batch 1, 2 heads, D 64, S 64, fp32, causal;"));
}
