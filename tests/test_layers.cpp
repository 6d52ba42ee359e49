// Tests of layers.cu: each op by finite differences in float64, and the GPU against the CPU. What
// the ops do within a model is tests/test_model.cpp's.
#include "layers.cu"

#include "gradients.h"

static Layer layer_of(const Tensors& w, int64_t C, int64_t F) {  // w: qkv [3C,C], w13 [2F,C]
    Layer l;
    l.qkv = w[0], l.w13 = w[1];
    l.q = view(w[0], 0, {C, C}), l.k = view(w[0], C * C, {C, C}),
    l.v = view(w[0], 2 * C * C, {C, C});
    l.w1 = view(w[1], 0, {F, C}), l.w3 = view(w[1], F * C, {F, C});
    return l;
}

TEST_CASE("layers: every op's backward by finite differences") {
    begin_on(CPU);
    Tensor x = normals({2, 3, 5}, F64, 1), delta = normals({2, 3, 5}, F64, 2),
           weight = normals({5}, F64, 3, 1);
    Tensor targets = from_ints({3, 0, 6, 6}, {2, 2}), rope = rope_table(5, 4, 100, F64);
    for (Mode mode : {EAGER, FUSED}) {
        context.mode = mode;
        INFO(setting_now());
        check_gradients({x, delta, weight}, [](const Tensors& in) {
            Tensor x = in[0], y = add_rmsnorm(&x, in[1], in[2], 1e-5f);
            return Tensors{x, y};
        });
        check_gradients({x, weight}, [](const Tensors& in) {  // without a residual
            Tensor x = in[0];
            return Tensors{add_rmsnorm(&x, Tensor(), in[1], 1e-5f), x};
        });
        check_gradients({normals({2, 2, 7}, F64, 1)}, [&](const Tensors& in) {
            return Tensors{cross_entropy(mul(in[0], in[0]), targets)};
        });
    }
    // With single weights these two need leaves of their own, so here they are fused:
    // tests/test_model.cpp holds eager to that.
    check_gradients({normals({2, 3, 8}, F64, 1), normals({24, 8}, F64, 2)}, [&](const Tensors& in) {
        Tensor q, k, v;
        split_heads(layer_of({in[1], normals({2, 8}, F64, 9)}, 8, 1), in[0], rope, 2, &q, &k, &v);
        return Tensors{q, k, v};
    });
    check_gradients({normals({2, 3, 4}, F64, 1), normals({10, 4}, F64, 2)}, [](const Tensors& in) {
        return Tensors{swiglu(layer_of({normals({12, 4}, F64, 9), in[1]}, 4, 5), in[0])};
    });
}

// Outputs and gradients of the fused ops, whose rows are all C elements long.
static Tensors fused_ops_on_rows(int64_t N, int64_t C) {
    DType dtype = matmul_dtype();
    auto leaf = [](const Shape& shape, uint64_t key, DType t) {
        return require_gradient(normals(shape, t, key));
    };
    Tensors results;
    auto run = [&](const Tensor& y, const Tensors& leaves) {
        backward_from(y, normals(y.shape, y.dtype, 50));
        results.push_back(y);
        for (const Tensor& t : leaves) { results.push_back(t.gradient->value); }
    };
    Tensor x = leaf({N, C}, 1, weight_dtype()), delta = leaf({N, C}, 2, dtype),
           w = leaf({C}, 3, weight_dtype()), sum = x;
    Tensor normed = add_rmsnorm(&sum, delta, w, 1e-5f);
    // sum's gradient is there when RMSNorm adds to it
    run(add(sum, normed), {x, delta, w});
    run(add_rmsnorm(&x, Tensor(), w, 1e-5f), {x, w});  // adds to the gradients of both

    Tensor y = leaf({N, 4}, 4, weight_dtype()), w13 = leaf({2 * C, 4}, 5, weight_dtype());
    Layer layer;
    layer.w13 = w13, layer.w1 = view(w13, 0, {C, 4});
    run(swiglu(layer, y), {y, w13});

    vector<float> values = to_floats(normals({N, C}, F32, 6));
    vector<int> targets(N);
    for (int64_t i = 0; i < N * C; i++) {
        if (i % C % 3 == 1) { values[i] = -INFINITY; }
    }
    for (int64_t n = 0; n < N; n++) { targets[n] = 3 * random_int((int)(C + 2) / 3, 11, 7, n); }
    Tensor logits = require_gradient(from_floats(values, {N, C}, dtype));
    Tensor loss = cross_entropy(logits, from_ints(targets, {N}));
    backward(loss, (float)N);
    results.push_back(loss), results.push_back(logits.gradient->value);
    return results;
}
// While it lives, fast/ has no part in the fused ops.
struct OnlyPlainOps {
    FastWays before = fast_ways;
    OnlyPlainOps() { fast_ways.layers = nullptr; }
    ~OnlyPlainOps() { fast_ways = before; }
};
TEST_CASE("layers: fused ops on rows of any length, the GPU against the CPU") {
    if (!begin_on(CUDA)) { return; }
    // C: a pack or none, more than one element per thread, more than one pack per thread. N: more
    // rows than RMSNorm's backward has blocks.
    for (auto [N, C] :
         vector<pair<int, int>>{{1, 1}, {3, 8}, {5, 643}, {9, 2562}, {9, 5128}, {2200, 16}}) {
        for (auto [precision, tolerance] : {pair<Precision, double>{FP32, 2e-5},
                                            {PREC_BF16, 1e-2},
                                            {PREC_FP16, 2e-3},
                                            {PREC_PURE_BF16, 1e-2}}) {
            const string what = strprintf("N %d, C %d, %s", N, C, name_of(precision));
            CAPTURE(what);
            context.precision = precision;
            context.device = CPU;
            const Tensors want = fused_ops_on_rows(N, C);
            context.device = CUDA;
            const Tensors fast = fused_ops_on_rows(N, C);
            const OnlyPlainOps only_plain;
            const Tensors plain = fused_ops_on_rows(N, C);
            context.device = CPU;
            for (size_t k = 0; k < want.size(); k++) {
                CAPTURE(k);
                // one element per row: dx is all rounding
                double atol = 1e-8 + tolerance * largest(want[k]);
                for (const Tensors* got : {&fast, &plain}) {
                    CAPTURE(got == &plain);
                    Comparison c = compare((*got)[k], want[k], tolerance, atol);
                    CHECK_MESSAGE(c.ok(), to_string(c));
                }
            }
        }
    }
}

// What an op writes in a run, and by how much that may differ between two ways to compute it.
struct Output {
    const char* name;
    Tensor t;
    double relative, absolute;
};
// Runs every op of `ops` once, on the same inputs whenever it is called: N rows of C elements, or
// heads of D.
//
// Bounds: e is two roundings of fp32, one in each way. An output that is stored in 16 bits may fall
// on either side of a rounding, which is its last bit: u of itself (and in fp16 at least 2^-24, see
// below). An op that sums is off by e of its largest term for each addition of the longest chain
// that a term goes through, at most 128 in either way: a thread has 21 of 5128 terms, then come 10
// additions over its block; dw of 2200 rows is summed by at most 55, then by 32 shares.
static vector<Output> outputs_of_ops(const LayerOps& ops, int N, int C, int D, DType type,
                                     DType residual) {
    const double e = 0x1p-23, sums = 128 * e;
    auto unit = [&](DType t) {
        if (t == BF16) { return 0x1p-7; }
        return t == F16 ? 0x1p-10 : e;
    };
    const double u = unit(type), ux = unit(residual);
    vector<Output> all;

    Tensor x_in = normals({N, C}, residual, 1), w = normals({C}, residual, 2, 1);
    Tensor delta = normals({N, C}, type, 3), dy = normals({N, C}, type, 4);
    Tensor x = empty({N, C}, residual), y = empty({N, C}, type), r = empty({N}, F32);
    ops.add_rmsnorm(y, x, r, x_in, delta, w, 1e-5f);
    all.push_back({"x", x, 0, 0});
    all.push_back({"r", r, sums, 0});
    all.push_back({"y", y, u + sums, 0});
    Tensor y_alone = empty({N, C}, type), r_alone = empty({N}, F32);
    ops.add_rmsnorm(y_alone, x_in, r_alone, x_in, {}, w, 1e-5f);
    all.push_back({"y without delta", y_alone, u + sums, 0});

    // the same r in both ways: of the inputs' own size
    Tensor fixed_r = normals({N}, F32, 5, 1, 0.1f);
    const double r_most = largest(fixed_r), w_most = largest(w), x_most = largest(x),
                 dy_most = largest(dy);
    const double dx_term = r_most * w_most * dy_most * (1 + pow(x_most * r_most, 2));
    const double dw_term = N * dy_most * x_most * r_most;
    for (bool add : {false, true}) {
        Tensor dx = normals({N, C}, residual, 6), dw = normals({C}, residual, 7);
        Tensor low = empty({N, C}, type);
        ops.rmsnorm_backward(dx, add, add ? low : Tensor(), dw, add, dy, x, fixed_r, w);
        all.push_back({"dx", dx, ux, sums * dx_term});
        if (add) { all.push_back({"dx_low", low, u + ux, sums * dx_term}); }
        all.push_back({"dw", dw, ux, sums * dw_term});
    }

    // 2 sequences of N positions, 3 heads of D
    Tensor rope = rope_table(N, D, 100, F32);
    Tensor qkv = normals({2, N, 9 * D}, type, 8);
    const double pair = 8 * e * largest(qkv);
    Tensor q = empty({2, 3, N, D}, type), k = empty(q.shape, type), v = empty(q.shape, type);
    ops.rotate(qkv, q, k, v, rope, false);
    all.push_back({"q", q, u, pair});
    all.push_back({"k", k, u, pair});
    all.push_back({"v", v, 0, 0});
    Tensor dqkv = empty(qkv.shape, type);
    Tensor dq = normals(q.shape, type, 9), dk = normals(q.shape, type, 10);
    ops.rotate(dqkv, dq, dk, normals(q.shape, type, 11), rope, true);
    all.push_back({"dqkv", dqkv, u, 8 * e * max(largest(dq), largest(dk))});
    for (bool backward : {false, true}) {
        Tensor in_place = normals(qkv.shape, type, 8);
        ops.rotate(in_place, {}, {}, {}, rope, backward);
        all.push_back({"qkv in place", in_place, u, pair});
    }

    // exp's two roundings, a division, and at most six products and sums
    Tensor h = normals({N, 2 * C}, type, 12), dg = normals({N, C}, type, 13);
    Tensor g = empty({N, C}, type), dh = empty({N, 2 * C}, type);
    const double h_most = largest(h);
    ops.swiglu(g, h);
    all.push_back({"g", g, u + 16 * e, 0});
    ops.swiglu_backward(dh, dg, h);
    all.push_back({"dh", dh, u, 16 * e * largest(dg) * h_most * (1 + h_most)});
    return all;
}
// By plain kernels, by fast/'s, and by plain ones once more: then the bits are the same.
TEST_CASE("layers: the fused ops by plain kernels and by those of fast/") {
    if (!begin_on(CUDA)) { return; }
    const LayerOps& ops = fast_ways.layers ? *fast_ways.layers : plain_ops;
    // Rows of whole packs, or not; of one element, where a row has but one.
    for (auto [N, C, D] : vector<std::array<int, 3>>{
             {1, 1, 2}, {3, 8, 8}, {5, 643, 6}, {9, 2562, 22}, {9, 5128, 64}, {2200, 16, 32}}) {
        for (auto [type, residual] :
             {pair<DType, DType>{F32, F32}, {BF16, F32}, {F16, F32}, {BF16, BF16}}) {
            const string what = strprintf("N %d, C %d, D %d, %s, residual stream %s", N, C, D,
                                          name_of(type), name_of(residual));
            CAPTURE(what);
            const auto plain = outputs_of_ops(plain_ops, N, C, D, type, residual);
            const auto again = outputs_of_ops(plain_ops, N, C, D, type, residual);
            const auto fast = outputs_of_ops(ops, N, C, D, type, residual);
            REQUIRE(plain.size() == fast.size());
            for (size_t i = 0; i < plain.size(); i++) {
                const Output& one = plain[i];
                CAPTURE(one.name);
                CHECK(to_floats(again[i].t) == to_floats(one.t));
                // fp16 has steps of 2^-24 near 0
                const double absolute = one.absolute + (one.t.dtype == F16 ? 0x1p-24 : 0);
                Comparison c = compare(fast[i].t, one.t, one.relative, absolute);
                CHECK_MESSAGE(c.ok(), to_string(c));
            }
        }
    }
}

// Logits of which a third is -inf, but no target's.
TEST_CASE_TEMPLATE("layers: cross-entropy's gradient may take the place of the logits", D, OnCPU,
                   OnCUDA) {
    if (!begin<D>()) { return; }
    constexpr int N = 9, C = 643;
    for (DType type : {F32, BF16, F16}) {
        CAPTURE(name_of(type));
        vector<float> values = to_floats(normals({N, C}, F32, 14));
        vector<int> targets(N);
        for (size_t i = 0; i < values.size(); i++) {
            if (i % C % 3 == 1) { values[i] = -INFINITY; }
        }
        for (int n = 0; n < N; n++) { targets[n] = n / 3 * 3; }
        const Tensor l = from_floats(values, {N, C}, type), t = from_ints(targets, {N});
        const Tensor loss = empty({N}, F32), lse = empty({N}, F32), dl = empty({N, C}, type);
        const Tensor dloss = add_scalar(zeros({}, F32), 3);
        cross_entropy_run(loss, lse, l, t);
        cross_entropy_backward(dl, l, lse, t, dloss, N + 1);
        cross_entropy_backward(l, l, lse, t, dloss, N + 1);

        const vector<float> apart = to_floats(dl);
        CHECK(to_floats(l) == apart);
        CHECK(apart[1] == 0);  // of a logit of -inf
        CHECK(apart[0] < 0);   // of the first row's target
        for (float x : to_floats(loss)) { CHECK(std::isfinite(x)); }
    }
}

// 70 tensors of odd and even sizes, each at a place of its own; what lies between the places stays.
TEST_CASE_TEMPLATE("layers: AdamW over many tensors, plain and fast, by the formula", D, OnCPU,
                   OnCUDA) {
    if (!begin<D>()) { return; }
    const AdamWScalars s{0.99f, 0.9f, 0.999f, 1e-8f, 0.01f, 0.5f};
    for (AdamWUpdate* update : {adamw_plain, fast_ways.adamw}) {
        if (!update) { continue; }
        for (DType dtype : {F32, BF16, F16}) {
            // unit: of sizes and offsets; a row may take four or eight elements at a time
            for (auto [unit, stored] : {pair<int, DType>{1, F32}, {4, F32}, {1, BF16}, {8, BF16}}) {
                FlatGradients gradients;
                int64_t end = 0;
                for (int i = 0; i < 70; i++) {
                    Tensor g = empty({unit * (i == 33 ? 5000 : 1 + i)}, dtype);
                    fill_normal(g, 3, i, 0, 1);
                    gradients.push_back({g, end});
                    end += g.size() + (i % 3 == 0 ? unit : 0);
                }
                Tensor p = empty({end}, stored), m = empty({end}, stored), v = empty({end}, stored);
                fill_normal(p, 3, 100, 0, 1), fill_normal(m, 3, 101, 0, 1),
                    fill_normal(v, 3, 102, 4, 0.5);
                vector<double> want[3] = {to_doubles(p), to_doubles(m), to_doubles(v)};
                for (const FlatGradient& one : gradients) {
                    vector<double> g = to_doubles(one.g);
                    for (size_t i = 0; i < g.size(); i++) {
                        size_t at = one.offset + i;
                        adamw_element(&want[0][at], g[i], &want[1][at], &want[2][at], s);
                    }
                }
                update(p, gradients, m, v, s);
                int wrong = 0;
                const Tensor* got[3] = {&p, &m, &v};
                for (int k = 0; k < 3; k++) {
                    vector<double> x = to_doubles(*got[k]);
                    double rounding = stored == BF16 ? 0x1p-8 : 0;  // to nearest
                    for (size_t i = 0; i < x.size(); i++) {
                        wrong += !(std::abs(x[i] - want[k][i]) <=
                                   2e-6 + rounding * std::abs(want[k][i]));
                    }
                }
                CAPTURE(update == adamw_plain);
                CAPTURE(unit);
                CHECK(wrong == 0);
            }
        }
    }
}
// No test has memory for so many rows: the addresses of the first are counted back from the last's.
TEST_CASE("layers: RoPE and SwiGLU reach rows beyond 2^31 numbers") {
    auto back = [](float* last, int64_t n) {
        return (float*)((uintptr_t)last - n * sizeof(float));
    };
    const int64_t n = (int64_t)1 << 31;
    float g = 0, h[] = {1, 2};
    Swiglu<float>{back(&g, n), back(h, 2 * n), 1}(n, 0);
    CHECK(g == doctest::Approx(2 / (1 + exp(-1.0))));

    const int64_t t = ((int64_t)1 << 30) + 1, row = 3 * t;  // its q
    float qkv[] = {3, 4}, rope[] = {0, 1};                  // a quarter turn
    const Rope<float> rotate_one = {
        back(qkv, 2 * row), nullptr, nullptr, nullptr, back(rope, 2 * t), INT_MAX, 1, 2, false};
    rotate_one(row, 0);
    CHECK(qkv[0] == -4);
    CHECK(qkv[1] == 3);
}
