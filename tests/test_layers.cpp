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
TEST_CASE("layers: fused ops on rows of any length, the GPU against the CPU") {
    if (!begin_on(CUDA)) { return; }
    // C: a pack or none, more than one element per thread, more than one pack per thread. N: more
    // rows than RMSNorm's backward has blocks.
    for (auto [N, C] :
         vector<std::pair<int, int>>{{1, 1}, {3, 8}, {5, 643}, {9, 2562}, {9, 5128}, {2200, 16}}) {
        for (auto [precision, tolerance] : {std::pair<Precision, double>{FP32, 2e-5},
                                            {PREC_BF16, 1e-2},
                                            {PREC_FP16, 2e-3},
                                            {PREC_PURE_BF16, 1e-2}}) {
            const string what = strprintf("N %d, C %d, %s", N, C, name_of(precision));
            CAPTURE(what);
            context.precision = precision;
            Tensors results[2];
            for (Device device : {CPU, CUDA}) {
                context.device = device;
                results[device] = fused_ops_on_rows(N, C);
            }
            context.device = CPU;
            for (size_t k = 0; k < results[CPU].size(); k++) {
                CAPTURE(k);
                // one element per row: dx is all rounding
                double atol = 1e-8 + tolerance * largest(results[CPU][k]);
                Comparison c = compare(results[CUDA][k], results[CPU][k], tolerance, atol);
                CHECK_MESSAGE(c.ok(), to_string(c));
            }
        }
    }
}

// 70 tensors of odd and even sizes, each at a place of its own; what lies between the places stays.
TEST_CASE_TEMPLATE("layers: AdamW over many tensors, plain and fast, by the formula", D, OnCPU,
                   OnCUDA) {
    if (!begin<D>()) { return; }
    const AdamWScalars s{0.99f, 0.9f, 0.999f, 1e-8f, 0.01f, 0.5f};
    for (AdamWUpdate* update : {adamw_plain, fast_ways.adamw}) {
        if (!update || (update != adamw_plain && D::device == CPU)) { continue; }
        for (DType dtype : {F32, BF16, F16}) {
            // unit: of sizes and offsets; a row may take four or eight elements at a time
            for (auto [unit, stored] :
                 {std::pair<int, DType>{1, F32}, {4, F32}, {1, BF16}, {8, BF16}}) {
                vector<FlatGradient> gradients;
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
