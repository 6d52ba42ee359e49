// Tests of layers.cu: each op by finite differences in float64, and the GPU against the CPU. What the ops do within a
// model is tests/test_model.cpp's.
#include "layers.cu"

#include "test.h"

// f's outputs, weighted with fixed random numbers and summed, against central differences in each input.
static void check_gradients(std::vector<Tensor> inputs,
                            const std::function<std::vector<Tensor>(const std::vector<Tensor>&)>& f) {
    auto objective = [&](const std::vector<Tensor>& leaves) {
        Tensor sum;
        uint64_t key = 100;
        for (const Tensor& y : f(leaves)) {
            Tensor weights = empty(y.shape, F64);
            fill_normal(weights, 3, key++, 0, 1);
            Tensor part = mean_all(mul(y, weights));
            sum = sum ? add(sum, part) : part;
        }
        return sum;
    };
    std::vector<Tensor> leaves;
    for (const Tensor& t : inputs) { leaves.push_back(require_gradient(t)); }
    backward(objective(leaves));
    NoGrad no_grad;
    for (size_t k = 0; k < inputs.size(); k++) {
        Tensor want = empty(inputs[k].shape, F64);
        for (int64_t i = 0; i < want.size(); i++) {
            double *x = inputs[k].as<double>() + i, before = *x, h = 1e-5;
            *x = before + h;
            double up = to_doubles(objective(inputs))[0];
            *x = before - h;
            double down = to_doubles(objective(inputs))[0];
            *x = before;
            want.as<double>()[i] = (up - down) / (2 * h);
        }
        Comparison c = compare(leaves[k].gradient->value, want, 1e-6, 1e-8);
        CAPTURE(k);
        CHECK_MESSAGE(c.ok(), to_string(c));
    }
}
static Tensor random_tensor(const Shape& shape, uint64_t key, DType dtype = F64, float mean = 0) {
    Tensor t = empty(shape, dtype);
    fill_normal(t, 11, key, mean, 1);
    return t;
}
static Layer layer_of(const std::vector<Tensor>& w, int64_t C, int64_t F) {  // w: qkv [3C,C], w13 [2F,C]
    Layer l;
    l.qkv = w[0], l.w13 = w[1];
    l.q = view(w[0], 0, {C, C}), l.k = view(w[0], C * C, {C, C}), l.v = view(w[0], 2 * C * C, {C, C});
    l.w1 = view(w[1], 0, {F, C}), l.w3 = view(w[1], F * C, {F, C});
    return l;
}

TEST_CASE("layers: every op's backward by finite differences") {
    begin_on(CPU);
    for (Mode mode : {EAGER, FUSED}) {
        context.mode = mode;
        CAPTURE(std::string(name_of(mode)));
        SUBCASE("add_rmsnorm") {
            check_gradients({random_tensor({2, 3, 5}, 1), random_tensor({2, 3, 5}, 2), random_tensor({5}, 3, F64, 1)},
                            [](const std::vector<Tensor>& in) {
                                Tensor x = in[0], y = add_rmsnorm(&x, in[1], in[2], 1e-5f);
                                return std::vector<Tensor>{x, y};
                            });
        }
        SUBCASE("rmsnorm without a residual") {
            check_gradients({random_tensor({4, 7}, 1), random_tensor({7}, 3, F64, 1)},
                            [](const std::vector<Tensor>& in) {
                                Tensor x = in[0];
                                return std::vector<Tensor>{add_rmsnorm(&x, Tensor(), in[1], 1e-5f), x};
                            });
        }
        SUBCASE("cross_entropy") {
            Tensor targets = from_ints({3, 0, 6, 6}, {2, 2});
            check_gradients({random_tensor({2, 2, 7}, 1)}, [&](const std::vector<Tensor>& in) {
                return std::vector<Tensor>{cross_entropy(mul(in[0], in[0]), targets)};
            });
        }
    }
    context.mode = FUSED;  // with single weights these two need leaves of their own: eager is held to fused below
    SUBCASE("split_heads") {
        Tensor rope = rope_table(5, 4, 100, F64);
        check_gradients({random_tensor({2, 3, 8}, 1), random_tensor({24, 8}, 2)}, [&](const std::vector<Tensor>& in) {
            Tensor q, k, v;
            split_heads(layer_of({in[1], random_tensor({2, 8}, 9)}, 8, 1), in[0], rope, 2, &q, &k, &v);
            return std::vector<Tensor>{q, k, v};
        });
    }
    SUBCASE("swiglu") {
        check_gradients({random_tensor({2, 3, 4}, 1), random_tensor({10, 4}, 2)}, [](const std::vector<Tensor>& in) {
            return std::vector<Tensor>{swiglu(layer_of({random_tensor({12, 4}, 9), in[1]}, 4, 5), in[0])};
        });
    }
}

// Outputs and gradients of the fused ops, whose rows are all C elements long.
static std::vector<Tensor> fused_ops_on_rows(int64_t N, int64_t C) {
    DType dtype = matmul_dtype();
    auto leaf = [](const Shape& shape, uint64_t key, DType t) {
        return require_gradient(random_tensor(shape, key, t));
    };
    std::vector<Tensor> results;
    auto run = [&](const Tensor& y, const std::vector<Tensor>& leaves) {
        backward_from(y, random_tensor(y.shape, 50, y.dtype));
        results.push_back(y);
        for (const Tensor& t : leaves) { results.push_back(t.gradient->value); }
    };
    Tensor x = leaf({N, C}, 1, weight_dtype()), delta = leaf({N, C}, 2, dtype), w = leaf({C}, 3, weight_dtype()),
           sum = x;
    Tensor normed = add_rmsnorm(&sum, delta, w, 1e-5f);
    run(add(sum, normed), {x, delta, w});              // sum's gradient is there when RMSNorm adds to it
    run(add_rmsnorm(&x, Tensor(), w, 1e-5f), {x, w});  // adds to the gradients of both

    Tensor y = leaf({N, 4}, 4, weight_dtype()), w13 = leaf({2 * C, 4}, 5, weight_dtype());
    Layer layer;
    layer.w13 = w13, layer.w1 = view(w13, 0, {C, 4});
    run(swiglu(layer, y), {y, w13});

    std::vector<float> values = to_floats(random_tensor({N, C}, 6, F32));
    std::vector<int> targets(N);
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
    // C: a pack or none, more than one element per thread, more than one pack per thread. N: more rows than RMSNorm's
    // backward has blocks.
    for (auto [N, C] : std::vector<std::pair<int, int>>{{1, 1}, {3, 8}, {5, 643}, {9, 2562}, {9, 5128}, {2200, 16}}) {
        for (auto [precision, tolerance] :
             {std::pair<Precision, double>{FP32, 2e-5}, {PREC_BF16, 1e-2}, {PREC_FP16, 2e-3}, {PREC_PURE_BF16, 1e-2}}) {
            CAPTURE(N);
            CAPTURE(C);
            CAPTURE(std::string(name_of(precision)));
            context.precision = precision;
            std::vector<Tensor> results[2];
            for (Device device : {CPU, CUDA}) {
                context.device = device;
                results[device] = fused_ops_on_rows(N, C);
            }
            context.device = CPU;
            for (size_t k = 0; k < results[CPU].size(); k++) {
                CAPTURE(k);
                double atol = 1e-8 + tolerance * largest(results[CPU][k]);  // one element per row: dx is all rounding
                Comparison c = compare(results[CUDA][k], results[CPU][k], tolerance, atol);
                CHECK_MESSAGE(c.ok(), to_string(c));
            }
        }
    }
}
