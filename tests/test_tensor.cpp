// Tests of lib/tensor.cu and lib/matmul.cu. Backward is compared with central differences in
// float64, the GPU with the CPU, gemm with loops.
#include "lib/matmul.cu"
#include "lib/tensor.cu"

#include "gradients.h"

static bool same_bits(const Tensor& a, const Tensor& b) {
    return a.shape == b.shape && to_doubles(a) == to_doubles(b);
}
static void check_close(const Tensor& got, const Tensor& want, double rtol, double atol) {
    CHECK(got.dtype == want.dtype);
    Comparison c = compare(got, want, rtol, atol);
    CHECK_MESSAGE(c.ok(), to_string(c));
}

// -------------------------------------------------------------------------------------------------
// All differentiable ops, with inputs whose last dimension is n. `positive` inputs lie between 0.5
// and 3.5.

using X = const Tensors&;
using Unary = Tensor (*)(const Tensor&);
using Binary = Tensor (*)(const Tensor&, const Tensor&);
struct Case {
    string name;
    vector<Shape> shapes;
    function<Tensor(X x)> f;
    bool positive = false;
};

static Tensor some_mask(int64_t n) { return greater_equal(reshape(arange(3), {3, 1}), arange(n)); }
static Tensor some_indices(const Shape& shape, int64_t below) {  // repeating
    vector<int> v(count(shape));
    for (size_t i = 0; i < v.size(); i++) { v[i] = random_int((int)below, 2, 0, i / 2); }
    return from_ints(v, shape);
}

static vector<Case> elementwise_cases(int64_t n) {
    vector<Case> cases;
    auto put = [&](const string& name, const vector<Shape>& shapes, const function<Tensor(X x)>& f,
                   bool positive = false) {
        cases.push_back({name, shapes, f, positive});
    };
    Shape full = {2, 3, n};
    Binary binary[] = {add, sub, mul, div};
    for (int i = 0; i < 4; i++) {
        string name = vector<string>{"add ", "sub ", "mul ", "div "}[i];
        auto f = [op = binary[i]](X x) { return op(x[0], x[1]); };
        for (const Shape& other : {full, {n}, {2, 3, 1}, {1, 3, n}, {3, 1}, {1, 1, 1}, {}}) {
            put(name + to_string(full) + to_string(other), {full, other}, f, true);
            put(name + to_string(other) + to_string(full), {other, full}, f, true);
        }
        auto g = [op = binary[i]](X x) {
            return op(x[0], transpose(slice_last(x[1], 1, 2), 0, 1));
        };
        put(name + "with a view", {{3, n}, {n, 6}}, g, true);
    }
    Unary of_any[] = {exp,       square,   sigmoid,  relu,      sum_last,
                      mean_last, max_last, mean_all, contiguous};
    Unary of_positive[] = {log, sqrt, rsqrt};
    for (int i = 0; i < 12; i++) {
        Unary op = i < 9 ? of_any[i] : of_positive[i - 9];
        string name = "unary op " + to_string(i);
        put(
            name, {{2, 3, n}}, [op](X x) { return op(x[0]); }, i >= 9);
        put(
            name + " of a transpose", {{n, 3}}, [op](X x) { return op(transpose(x[0], 0, 1)); },
            i >= 9);
    }
    put("scale", {{2, n}}, [](X x) { return scale(x[0], -1.5f); });
    put("add_scalar", {{2, n}}, [](X x) { return add_scalar(x[0], 0.25f); });
    put("where", {{3, n}}, [=](X x) { return where(some_mask(n), x[0], -7); });
    put("where, mask broadcast", {{2, 3, n}}, [=](X x) { return where(some_mask(n), x[0], 0); });
    put("reshape", {{2, 3, n}}, [=](X x) { return reshape(x[0], Shape{n, 6}); });
    put("reshape a view", {{2, 3, n}}, [=](X x) {
        return reshape(transpose(x[0], 0, 2), Shape{2, n, 3});
    });
    put("transpose", {{2, 3, n, 2}}, [](X x) { return transpose(x[0], 1, 2); });
    put("slice_last", {{3, 2 * n + 1}}, [](X x) { return slice_last(x[0], 1, 2); });
    put("slice_last of a view", {{n + 3, 3}},
        [](X x) { return slice_last(transpose(x[0], 0, 1), 2, 3); });
    put("interleave_last", {{3, n}, {3, n}}, [](X x) { return interleave_last(x[0], x[1]); });
    put("gather_rows", {{5, n}}, [](X x) {
        return gather_rows(x[0], some_indices(Shape{3, 4}, 5));
    });
    put("gather_rows, many", {{2, 3}},
        [=](X x) { return gather_rows(x[0], some_indices(Shape{n}, 2)); });
    put("pick_last", {{7, n}}, [=](X x) { return pick_last(x[0], some_indices(Shape{7}, n)); });
    put("used twice by one op", {{3, n}}, [](X x) { return mul(x[0], x[0]); });
    put("a sum with itself", {{3, n}}, [](X x) { return add(x[0], x[0]); });
    put("used by three ops", {{3, n}},
        [](X x) { return add(add(exp(x[0]), sigmoid(x[0])), mean_last(x[0])); });
    put("rmsnorm", {{3, n}, {n}},
        [](X x) { return mul(mul(x[0], rsqrt(mean_last(square(x[0])))), x[1]); });
    return cases;
}
static vector<Case> product_cases(int64_t n) {
    auto product = [](X x) { return matmul(x[0], x[1]); };
    auto product_nt = [](X x) { return matmul(x[0], x[1], true); };
    auto of_views = [](X x) { return matmul(transpose(x[0], 0, 1), transpose(x[1], 0, 1)); };
    auto of_heads = [](X x) { return matmul(transpose(x[0], 1, 2), transpose(x[1], 1, 2), true); };
    // add() gives one array to both its inputs as their gradient; matmul's backward, later, must
    // not add to it in place.
    auto shared_gradient = [](X x) {
        Tensor product = matmul(x[0], x[2]);
        return add(add(x[0], x[1]), product);
    };
    auto one_linear = [](X x) { return linear(x[0], x[1]); };
    return {
        {"matmul [3,n] [n,5]", {{3, n}, {n, 5}}, product},
        {"matmul [n,3] [3,n]", {{n, 3}, {3, n}}, product},
        {"matmul [3,n] [5,n]^T", {{3, n}, {5, n}}, product_nt},
        {"matmul [2,n,3] [2,3,5]", {{2, n, 3}, {2, 3, 5}}, product},
        {"matmul [2,2,3,n] [2,2,5,n]^T", {{2, 2, 3, n}, {2, 2, 5, n}}, product_nt},
        {"matmul of views", {{n, 3}, {5, n}}, of_views},
        {"matmul of split heads", {{2, 3, 2, n}, {2, 5, 2, n}}, of_heads},
        {"matmul with itself", {{3, n}}, [](X x) { return matmul(x[0], x[0], true); }},
        {"a shared gradient", {{n, 3}, {n, 3}, {3, 3}}, shared_gradient},
        {"linear [2,3,n]", {{2, 3, n}, {5, n}}, one_linear},
        {"linear [n,3]", {{n, 3}, {n, 3}}, one_linear},
        {"two linears, one weight",
         {{2, n}, {n, n}},
         [](X x) { return linear(linear(x[0], x[1]), x[1]); }},
    };
}
static Op op_of(const Case& c) {
    return [f = c.f](X x) { return Tensors{f(x)}; };
}
static Tensors inputs_of(const Case& c, DType dtype) {
    Tensors inputs;
    for (const Shape& s : c.shapes) {
        inputs.push_back(
            normals(s, dtype, inputs.size(), c.positive ? 2 : 0, c.positive ? 0.3f : 1));
    }
    return inputs;
}

// -------------------------------------------------------------------------------------------------

TEST_CASE("backward agrees with central differences") {
    begin<OnCPU>();
    for (Mode mode : {EAGER, FUSED}) {
        context.mode = mode;
        for (int64_t n : {1, 4}) {
            for (const auto& cases : {elementwise_cases(n), product_cases(n)}) {
                for (const Case& c : cases) {
                    INFO(c.name, ", n=", n, ", ", setting_now());
                    check_gradients(inputs_of(c, F64), op_of(c));
                }
            }
        }
    }
}

TEST_CASE_TEMPLATE("ops give the values of their formulas", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    Tensor a = from_floats({1, 2, 3, 4, 5, 6}, {2, 3}), b = from_floats({10, 20, 30}, {3});
    CHECK(to_floats(add(a, b)) == vector<float>{11, 22, 33, 14, 25, 36});
    CHECK(to_floats(sub(b, a)) == vector<float>{9, 18, 27, 6, 15, 24});
    CHECK(to_floats(mul(a, from_floats({2, 3}, {2, 1}))) == vector<float>{2, 4, 6, 12, 15, 18});
    CHECK(to_floats(div(b, from_floats({4}, {}))) == vector<float>{2.5, 5, 7.5});
    CHECK(to_floats(scale(b, -0.5f)) == vector<float>{-5, -10, -15});
    CHECK(to_floats(add_scalar(b, 1)) == vector<float>{11, 21, 31});
    CHECK(to_floats(square(b)) == vector<float>{100, 400, 900});
    CHECK(to_floats(relu(sub(a, from_floats({3}, {})))) == vector<float>{0, 0, 0, 1, 2, 3});
    CHECK(to_floats(transpose(a, 0, 1)) == vector<float>{1, 4, 2, 5, 3, 6});
    CHECK(to_floats(reshape(transpose(a, 0, 1), {6})) == vector<float>{1, 4, 2, 5, 3, 6});
    CHECK(to_floats(slice_last(a, 1, 2)) == vector<float>{2, 5});
    CHECK(to_floats(slice_last(a, 0, 2)) == vector<float>{1, 3, 4, 6});
    CHECK(to_floats(interleave_last(b, scale(b, 2))) == vector<float>{10, 20, 20, 40, 30, 60});
    CHECK(to_floats(gather_rows(a, from_ints({1, 0, 1}, {3}))) ==
          vector<float>{4, 5, 6, 1, 2, 3, 4, 5, 6});
    CHECK(to_floats(pick_last(a, from_ints({2, 0}, {2}))) == vector<float>{3, 4});
    CHECK(to_floats(sum_last(a)) == vector<float>{6, 15});
    CHECK(to_floats(mean_last(a)) == vector<float>{2, 5});
    CHECK(to_floats(mean_all(a)) == vector<float>{3.5});
    CHECK(to_floats(max_last(scale(a, -1))) == vector<float>{-1, -4});
    CHECK(to_floats(greater_equal(arange(3), from_ints({1}, {}))) == vector<float>{0, 1, 1});
    CHECK(to_floats(where(greater_equal(arange(3), from_ints({1}, {})), a, -1)) ==
          vector<float>{-1, 2, 3, -1, 5, 6});
    CHECK(std::isnan(to_floats(max_last(from_floats({1, NAN, 2}, {3})))[0]));
    Tensor not_a_number = require_gradient(from_floats({NAN}, {1})), y = relu(not_a_number);
    backward(y);
    CHECK(std::isnan(to_floats(y)[0]));
    // dy: 0 would hide dy's NaN, too
    CHECK(to_floats(not_a_number.gradient->value) == vector<float>{1});
    for (float x : {0.1f, 1.0f, 2.5f}) {
        Tensor t = from_floats({x}, {1});
        CHECK(to_floats(exp(t))[0] == doctest::Approx(std::exp(x)).epsilon(1e-6));
        CHECK(to_floats(log(t))[0] == doctest::Approx(std::log(x)).epsilon(1e-6));
        CHECK(to_floats(sqrt(t))[0] == doctest::Approx(std::sqrt(x)).epsilon(1e-6));
        CHECK(to_floats(rsqrt(t))[0] == doctest::Approx(1 / std::sqrt(x)).epsilon(1e-6));
        CHECK(to_floats(sigmoid(t))[0] == doctest::Approx(1 / (1 + std::exp(-x))).epsilon(1e-6));
    }
}

TEST_CASE("the examples of loop_over and SameIndex are what they do") {
    begin<OnCPU>();
    Tensor out = zeros({4, 8, 16}, F32), row = zeros({8, 16}, F32);
    Loop loop = loop_over(out, {out, out});
    CHECK(loop.dims == 1);
    CHECK(loop.shape[0] == 512);
    CHECK(loop.in[1].stride[0] == 1);
    loop = loop_over(out, {out, row});
    CHECK(loop.dims == 2);
    CHECK((loop.shape[0] == 4 && loop.shape[1] == 128));
    CHECK((loop.in[1].stride[0] == 0 && loop.in[1].stride[1] == 1));
    CHECK((loop.out.stride[0] == 128 && loop.out.stride[1] == 1));

    const vector<int> tokens = {7, 3, 7};
    vector<int> next(3), earlier(3);
    for_each_on_cpu(3, SameIndex{next.data(), earlier.data(), tokens.data(), 3});
    CHECK(next == vector<int>{2, 3, 3});
    CHECK(earlier == vector<int>{0, 0, 1});
}

// Forward and backward of one case on the CPU and on the GPU. Sums cancel, so errors are measured
// by the largest value.
static void check_cuda(const Case& c, DType dtype, double tolerance) {
    INFO(c.name, ", ", string(name_of(dtype)), ", ", setting_now());
    Tensor y[2];
    Tensors dx[2];
    for (Device device : {CPU, CUDA}) {
        context.device = device;
        dx[device] = gradients(inputs_of(c, dtype), op_of(c), &y[device]);
    }
    check_close(y[CUDA], y[CPU], tolerance, tolerance * largest(y[CPU]));
    for (size_t k = 0; k < dx[CPU].size(); k++) {
        check_close(dx[CUDA][k], dx[CPU][k], tolerance, tolerance * largest(dx[CPU][k]));
    }
}
TEST_CASE("the GPU agrees with the CPU") {
    if (!begin<OnCUDA>()) { return; }
    for (int64_t n : {1, 3, 4, 31, 32, 33, 257}) {
        CAPTURE(n);
        for (const Case& c : elementwise_cases(n)) {
            check_cuda(c, F32, 1e-5);
            check_cuda(c, BF16, 1e-2);
            check_cuda(c, F16, 2e-3);
        }
        const double tolerance[] = {1e-5, 2e-3, 1e-2, 2e-3};  // FP32, TF32, PREC_BF16, PREC_FP16
        for (Mode mode : {EAGER, FUSED}) {
            for (Precision p : {FP32, TF32, PREC_BF16, PREC_FP16}) {
                context.mode = mode;
                context.precision = p;
                for (const Case& c : product_cases(n)) { check_cuda(c, F32, tolerance[p]); }
            }
        }
        context.precision = FP32;
        // More positions than the backward looks through at a time, and tokens that come first in
        // the second thousand.
        auto lookup = [](X x) { return gather_rows(x[0], some_indices(Shape{2500}, 900)); };
        for (DType dtype : {F32, BF16}) {
            check_cuda({"gather_rows, long", {{900, n}}, lookup}, dtype,
                       dtype == F32 ? 1e-5 : 1e-2);
        }
    }
}

// -------------------------------------------------------------------------------------------------

static void check_gemm(int64_t batch, int64_t M, int64_t N, int64_t K, bool ta, bool tb,
                       float alpha, float beta, DType type, DType out_type, double tolerance,
                       bool copies = false) {
    INFO(setting_now(), ", ", string(name_of(type)), " -> ", string(name_of(out_type)), ", batch ",
         batch, ", M ", M, ", N ", N, ", K ", K, ta ? ", a^T" : "", tb ? ", b^T" : "", ", alpha ",
         alpha, ", beta ", beta);
    Tensor a = normals(ta ? Shape{batch, K, M} : Shape{batch, M, K}, type, 0);
    Tensor b = normals(tb ? Shape{batch, N, K} : Shape{batch, K, N}, type, 1);
    Tensor c = normals({batch, M, N}, out_type, 2);
    // must not be read
    if (beta == 0) { c = from_floats(vector<float>(c.size(), NAN), c.shape, out_type); }
    vector<double> A = to_doubles(a), B = to_doubles(b), C = to_doubles(c);
    if (context.precision == TF32 && context.device == CUDA) {  // it sees ten bits of the mantissa
        auto rounded = [](double x) { return float_of((bits_of((float)x) + 0x1000) & ~0x1fffu); };
        std::transform(A.begin(), A.end(), A.begin(), rounded);
        std::transform(B.begin(), B.end(), B.begin(), rounded);
    }
    Tensor want = empty_on(CPU, c.shape, F64);
    for (int64_t i = 0; i < want.size(); i++) {
        int64_t at = i / (M * N), m = i / N % M, n = i % N;
        double sum = 0;
        for (int64_t k = 0; k < K; k++) {
            sum += A[at * M * K + (ta ? k * M + m : m * K + k)] *
                   B[at * K * N + (tb ? n * K + k : k * N + n)];
        }
        want.as<double>()[i] = alpha * sum + (beta == 0 ? 0 : beta * C[i]);
    }
    (copies ? multiply_copies : gemm)(c, a, ta, b, tb, alpha, beta);
    Comparison difference = compare(c, want, 0, tolerance * largest(want));
    CHECK_MESSAGE(difference.ok(), to_string(difference));
}
TEST_CASE_TEMPLATE("gemm agrees with three loops", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    struct Format {
        Precision precision;
        DType type, out_type;
        double tolerance;
    };
    vector<Format> formats = {
        {FP32, F32, F32, 1e-5},        {TF32, F32, F32, D::device == CPU ? 1e-5 : 2e-3},
        {PREC_BF16, BF16, BF16, 1e-2}, {PREC_BF16, BF16, F32, 1e-5},
        {PREC_FP16, F16, F16, 2e-3},   {PREC_FP16, F16, F32, 1e-5}};
    if (D::device == CPU) { formats.push_back({FP32, F64, F64, 1e-14}); }
    for (const Format& f : formats) {
        context.precision = f.precision;
        for (int bits = 0; bits < 4; bits++) {
            bool ta = bits & 1, tb = bits & 2;
            for (const Shape& s : {Shape{1, 1, 1, 1},
                                   {1, 3, 31, 5},
                                   {3, 33, 1, 31},
                                   {2, 31, 33, 257},
                                   {1, 1, 65, 7}}) {
                check_gemm(s[0], s[1], s[2], s[3], ta, tb, 1, 0, f.type, f.out_type, f.tolerance);
                check_gemm(s[0], s[1], s[2], s[3], ta, tb, -0.5f, 2, f.type, f.out_type,
                           f.tolerance);
                check_gemm(s[0], s[1], s[2], s[3], ta, tb, 1, 1, f.type, f.out_type, f.tolerance);
                if (f.type == BF16) {  // as on a card without bf16, also on one that has it
                    check_gemm(s[0], s[1], s[2], s[3], ta, tb, -0.5f, 2, f.type, f.out_type,
                               f.tolerance, true);
                }
            }
        }
    }
}

// cuBLAS 13.1 leaves out the last summands of these (see multiply_cuda). A^T is 0 except for its
// last column, so that C has to be the last row of B.
TEST_CASE("gemm adds up all of a long odd K") {
    if (!begin<OnCUDA>()) { return; }
    for (DType type : {BF16, F16}) {
        for (int64_t K : {4097, 4099, 16387}) {
            CAPTURE(K);
            int64_t M = 1000, N = 128;
            vector<float> last(K * M, 0);
            std::fill(last.end() - M, last.end(), 1.0f);
            Tensor a = from_floats(last, {K, M}, type), b = normals({K, N}, type, 1),
                   c = zeros({M, N}, F32);
            gemm(c, a, true, b, false, 1, 0);
            vector<float> got = to_floats(c), want = to_floats(view(b, (K - 1) * N, {N}));
            CHECK(vector<float>(got.end() - N, got.end()) == want);
        }
    }
}
TEST_CASE_TEMPLATE("ops of views that start anywhere", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    for (DType type : {F32, BF16, F16}) {
        Tensor all = normals({4 * 8 + 3}, type, 0), row = normals({8}, type, 1);
        vector<float> x = to_floats(all), r = to_floats(row);
        for (int offset = 0; offset < 4; offset++) {
            Tensor part = view(all, offset, {4, 8});
            vector<float> want(32), largest_of(4, -INFINITY);
            for (int i = 0; i < 32; i++) {
                want[i] = x[offset + i] >= r[i % 8] ? x[offset + i] : 0;
                largest_of[i / 8] = max(largest_of[i / 8], x[offset + i]);
            }
            CHECK(to_floats(where(greater_equal(part, row), part, 0)) == want);
            CHECK(to_floats(max_last(part)) == largest_of);
        }
    }
}
TEST_CASE_TEMPLATE("what does not fit fails", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    Tensor a = zeros({2, 3}, F32), b = zeros({3, 4}, F32), c = zeros({2, 4}, F32),
           low = zeros({3, 4}, BF16);
    CHECK_THROWS_AS(gemm(c, a, true, b, false), Failure);
    CHECK_THROWS_AS(gemm(c, a, false, b, true), Failure);
    CHECK_THROWS_AS(gemm(a, a, false, b, false), Failure);
    CHECK_THROWS_AS(gemm(c, a, false, low, false), Failure);
    CHECK_THROWS_AS(gemm(zeros({2, 2, 4}, F32), zeros({2, 2, 3}, F32), false, zeros({3, 3, 4}, F32),
                         false),
                    Failure);
    CHECK_THROWS_AS(matmul(a, a), Failure);
    CHECK_THROWS_AS(add(a, b), Failure);
    // A gradient is summed over the last dimension, and over the first ones.
    for (const Shape& shape : {Shape{2, 1, 4}, {1, 1, 4}, {3, 1}, {1}, {2, 1, 1}}) {
        Tensor x = require_gradient(normals(shape, F32, 1));
        auto run = [&] { backward(mean_all(mul(x, normals({2, 2, 3, 4}, F32, 2)))); };
        if (shape.size() < 3 || shape[0] == 1) {
            run();
            CHECK(x.gradient->value.shape == shape);
        } else {
            CHECK_THROWS_AS(run(), Failure);
            clear_tape();
        }
    }
    CHECK_THROWS_AS(reshape(a, {5}), Failure);
    CHECK_THROWS_AS(reshape(a, {7}), Failure);
    CHECK_THROWS_AS(view(a, 4, {3}), Failure);
    CHECK_THROWS_AS(view(a, -1, {3}), Failure);
    CHECK_THROWS_AS(from_floats({1, 2}, {3}), Failure);
    CHECK_THROWS_AS(copy(a, b), Failure);
    CHECK_THROWS_AS(backward(a), Failure);
}

// -------------------------------------------------------------------------------------------------

TEST_CASE("philox gives the published vectors") {  // Random123's kat_vectors
    struct Vector {
        uint64_t seed, key, i;
        uint32_t want[4];
    };
    for (const Vector& v : {Vector{0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
                            {~0ull, ~0ull, ~0ull, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
                            {0x299f31d0a4093822,
                             0x0370734413198a2e,
                             0x85a308d3243f6a88,
                             {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}}) {
        uint32_t got[4];
        philox(got, v.seed, v.key, v.i);
        for (int j = 0; j < 4; j++) { CHECK(got[j] == v.want[j]); }
    }
}
TEST_CASE_TEMPLATE("fill_normal", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    const int n = 200000;
    Tensor t = normals({n}, F32, 7, 3, 0.5f);
    double sum = 0, squares = 0, fourth = 0, furthest = 0;
    for (double x : to_doubles(t)) {
        double z = (x - 3) / 0.5;
        sum += z;
        squares += z * z;
        fourth += z * z * z * z;
        furthest = max(furthest, fabs(z));
    }
    CHECK(fabs(sum / n) < 5 / sqrt((double)n));  // five standard errors
    CHECK(squares / n == doctest::Approx(1).epsilon(5 * sqrt(2.0 / n)));
    // 3 - 6/5/8: eight uniform numbers are not quite normal
    CHECK(fourth / n == doctest::Approx(2.85).epsilon(0.02));
    CHECK(furthest > 3.5);
    CHECK(furthest <= 4.9);
    // An element depends on its index alone; other streams and seeds are other numbers.
    CHECK(same_bits(normals({33}, F32, 7, 3, 0.5f), view(t, 0, {33})));
    CHECK_FALSE(same_bits(normals({n}, F32, 8, 3, 0.5f), t));
    Tensor other = empty({n}, F32);
    fill_normal(other, 2, 7, 3, 0.5f);
    CHECK_FALSE(same_bits(other, t));
    Tensor first_rows = normals({2, 100}, BF16, 7), all_rows = normals({4, 100}, BF16, 7);
    CHECK(same_bits(first_rows, view(all_rows, 0, {2, 100})));
    context.device = CPU;
    CHECK(same_bits(normals({n}, F32, 7, 3, 0.5f), t));
    CHECK(key_of("a") != key_of("b"));
}
TEST_CASE("random_int is uniform") {
    const int n = 10, draws = 100000;
    int hits[n] = {};
    for (int i = 0; i < draws; i++) {
        int x = random_int(n, 3, 4, i);
        REQUIRE((x >= 0 && x < n));
        hits[x]++;
    }
    double chi2 = 0;
    for (int h : hits) { chi2 += pow(h - draws / n, 2) / (draws / n); }
    CHECK(chi2 < 27.9);  // 9 degrees of freedom: exceeded once in 1000 sequences, and ours is fixed
    CHECK(random_int(1, 3, 4, 5) == 0);
}

// -------------------------------------------------------------------------------------------------

// Three layers x = relu(linear(x)) * x of [64,64], 16 KiB per activation.
static Tensor three_layers(const Tensor& x, const Tensor& weight) {
    Tensor y = x;
    for (int i = 0; i < 3; i++) { y = mul(relu(linear(y, weight)), y); }
    return mean_all(y);
}
TEST_CASE_TEMPLATE("backward frees the activations", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    clear_tape();
    const size_t one = 64 * 64 * sizeof(float);
    Tensor x = normals({64, 64}, F32, 0),
           weight = require_gradient(normals({64, 64}, F32, 1, 0, 0.1f));
    three_layers(x, detached(weight));  // the first product allocates cuBLAS's workspace
    size_t before = memory_use(D::device).now;
    {
        NoGrad no_grad;
        reset_peak(D::device);
        three_layers(x, weight);
        CHECK(memory_use(D::device).now == before);
        CHECK(memory_use(D::device).peak - before <= 4 * one);  // y and what makes the next y
    }
    size_t recorded;
    {
        Tensor loss = three_layers(x, weight);
        recorded = memory_use(D::device).now - before;
        // three relus, two products that the next layer reads, loss
        CHECK(recorded == 5 * one + sizeof(float));
        backward(loss);
    }
    weight.gradient->value = Tensor();
    CHECK(memory_use(D::device).now == before);
    {
        Tensor loss = three_layers(x, weight);
        clear_tape();
    }
    CHECK(memory_use(D::device).now == before);
}
TEST_CASE("what fails in the middle of backward leaves no tape and no uses") {
    begin_on(CPU);
    Tensor x = require_gradient(from_floats({2}, {1})), w = require_gradient(from_floats({3}, {1}));
    int ready = 0;
    w.gradient->ready = [&] { ready++; };
    Tensor y = from_floats({6}, {1});
    record(y, {x, w}, [](const Tensor&) { throw OutOfMemory("no room"); });
    CHECK_THROWS_AS(backward(square(y)), OutOfMemory);
    clear_tape();
    CHECK(x.gradient->uses == 0);
    CHECK(w.gradient->uses == 0);
    CHECK(ready == 0);
    backward(square(w));
    CHECK(ready == 1);
}
TEST_CASE("a checkpoint keeps its input alone, and runs again in backward") {
    begin_on(CPU);
    Tensor p = require_gradient(from_floats({0.5, -1, 2}, {3}, F64)),
           x0 = from_floats({1, -2, 0.25}, {3}, F64);
    int outer_calls = 0, inner_calls = 0;
    auto inner = [&](const Tensor& x) {
        inner_calls++;
        return exp(mul(x, p));
    };
    auto outer = [&](const Tensor& x, bool kept) {
        outer_calls++;
        return mul(kept ? inner(square(x)) : checkpoint(inner, square(x)), add(p, x));
    };
    vector<double> wanted_dx, wanted_dp;
    for (bool kept : {true, false}) {
        Tensor x = require_gradient(x0);
        p.gradient->value = Tensor();
        Tensor y =
            kept ? outer(x, true) : checkpoint([&](const Tensor& x) { return outer(x, false); }, x);
        backward_from(mul(y, p), from_floats({1, 2, -1}, {3}, F64));  // p's third use is outside
        if (kept) {
            wanted_dx = to_doubles(x.gradient->value);
            wanted_dp = to_doubles(p.gradient->value);
            outer_calls = 0;
            inner_calls = 0;
        } else {
            CHECK(to_doubles(x.gradient->value) == wanted_dx);
            for (int i = 0; i < 3; i++) {  // added up in another order
                CHECK(to_doubles(p.gradient->value)[i] ==
                      doctest::Approx(wanted_dp[i]).epsilon(1e-14));
            }
            CHECK(outer_calls == 2);
            // forward, backward's second run of the outer one, and its own
            CHECK(inner_calls == 3);
        }
    }
    Tensor same = require_gradient(x0);  // what a function returns may be what it was given
    backward_from(checkpoint([](const Tensor& x) { return x; }, same), x0);
    CHECK(to_doubles(same.gradient->value) == to_doubles(x0));
    outer_calls = 0;
    NoGrad no_grad;
    checkpoint([&](const Tensor& x) { return outer(x, false); }, x0);
    clear_tape();
    CHECK(outer_calls == 1);
}
TEST_CASE("gemm: cuBLAS against the CPU") {
    if (!begin<OnCUDA>()) { return; }
    for (auto [type, out] : {pair<DType, DType>{F32, F32}, {BF16, BF16}, {BF16, F32}, {F16, F16}}) {
        for (auto [M, N, K] : {std::array<int64_t, 3>{65, 31, 136}, {768, 1000, 1024}}) {
            for (int order = 0; order < 3; order++) {
                bool ta = order == 1, tb = order == 2;
                Tensor a = empty(ta ? Shape{K, M} : Shape{M, K}, type),
                       b = empty(tb ? Shape{N, K} : Shape{K, N}, type);
                fill_normal(a, 0, 1, 0, 1);
                fill_normal(b, 0, 2, 0, 1);
                Tensor want = empty_on(CPU, {M, N}, F32), c = empty({M, N}, out);
                gemm(want, to_device(a, CPU), ta, to_device(b, CPU), tb);
                gemm(c, a, ta, b, tb);
                double rtol = 1e-3;
                if (out == F32) { rtol = 1e-4; }
                if (out == BF16) { rtol = 8e-3; }
                Comparison result = compare(c, want, rtol, 2e-3);
                CHECK_MESSAGE(result.ok(), to_string(result));
            }
        }
    }
}
#ifdef HAVE_CUDA
// A new handle of cuBLAS tries its kernels anew, and another one may win.
TEST_CASE(
    "gemm: whichever kernel cuBLAS finds the fastest, the bits are the same, and beta counts") {
    if (!begin<OnCUDA>()) { return; }
    for (auto [type, out] : {pair<DType, DType>{BF16, BF16}, {BF16, F32}, {F16, F16}}) {
        for (auto [M, N, K] : {std::array<int64_t, 3>{1024, 2304, 768},
                               {2560, 10240, 1024},
                               {1600, 520, 1024},
                               {1024, 768, 10000},
                               {256, 512, 50000}}) {
            for (int order = 0; order < 3; order++) {
                bool ta = order == 1, tb = order == 2;
                Tensor a = empty(ta ? Shape{K, M} : Shape{M, K}, type),
                       b = empty(tb ? Shape{N, K} : Shape{K, N}, type);
                fill_normal(a, 0, 1, 0, 1);
                fill_normal(b, 0, 2, 0, 1);
                Tensor first = empty({M, N}, out), again = empty({M, N}, out);
                for (int i = 0; i < 4; i++) {
                    const Product p{
                        matrix_of(i ? again : first), matrix_of(a), matrix_of(b), ta, tb, K, 1, 0};
                    const cublasHandle_t handle = new_cublas();
                    cublas_product(p, handle);
                    CUBLAS_CHECK(cublasDestroy(handle));
                    if (i > 0) { CHECK(compare(again, first, 0, 0).ok()); }
                }
                const Product p{matrix_of(again), matrix_of(a), matrix_of(b), ta, tb, K, 1, 1};
                cublas_product(p, new_cublas());
                copy_or_add(first, first, true);
                CHECK(compare(again, first, 2e-2, 2e-1).ok());
            }
        }
    }
}
#endif
TEST_CASE("META counts what the CPU uses") {
    size_t peak[2], activations[2];
    for (Device device : {CPU, META}) {
        begin<OnCPU>();
        clear_tape();
        context.device = device;
        context.mode = EAGER;
        Tensor x = empty({64, 64}, F32), weight = require_gradient(empty({64, 64}, F32));
        if (device == CPU) {
            fill_zero(x);
            fill_zero(weight);
        }
        size_t before = memory_use(device).now;
        reset_peak(device);
        Tensor y = three_layers(x, weight);
        Tensor p = div(exp(y), sum_last(exp(mul(x, max_last(linear(x, weight))))));
        backward(mean_all(transpose(slice_last(p, 0, 1), 0, 1)));
        peak[device == META] = memory_use(device).peak - before;
        activations[device == META] = memory_use(device).peak_by[ACTIVATIONS];
    }
    CHECK(peak[0] > 100000);
    CHECK(peak[1] == peak[0]);
    CHECK(activations[1] == activations[0]);
}

TEST_CASE_TEMPLATE("ops have autocast's dtypes", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    for (Precision precision : {PREC_BF16, PREC_FP16}) {
        context.precision = precision;
        DType low = precision == PREC_BF16 ? BF16 : F16,
              other = precision == PREC_BF16 ? F16 : BF16;
        Tensor a = normals({4, 4}, low, 0, 2, 0.3f), wide = normals({4, 4}, F32, 1);
        for (const Tensor& y : {exp(a), log(a), square(a), rsqrt(a), sum_last(a)}) {
            CHECK(y.dtype == F32);
        }
        for (const Tensor& y : {mean_last(a), mean_all(a), max_last(a), sigmoid(a), sqrt(a),
                                relu(a), scale(a, 2), add_scalar(a, 1), reshape(a, {16}),
                                transpose(a, 0, 1), slice_last(a, 0, 2), interleave_last(a, a),
                                gather_rows(a, arange(2)), pick_last(a, arange(4)), add(a, a)}) {
            CHECK(y.dtype == low);
        }
        for (auto f : {add, sub, mul, div}) {
            CHECK(f(a, wide).dtype == F32);
            CHECK(f(wide, a).dtype == F32);
            CHECK(f(a, cast(wide, other)).dtype == F32);  // neither of the two holds the other
        }
        for (const Tensor& y :
             {matmul(wide, wide), matmul(a, wide), linear(wide, wide), linear(a, a)}) {
            CHECK(y.dtype == low);
        }
        CHECK(greater_equal(a, a).dtype == U8);
        CHECK(gradients({a}, [](X x) { return Tensors{exp(x[0])}; })[0].dtype == low);
        CHECK(gradients({wide}, [](X x) { return Tensors{linear(x[0], x[0])}; })[0].dtype == F32);
    }
}
TEST_CASE_TEMPLATE("autocast copies a parameter once", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    for (Mode mode : {EAGER, FUSED}) {
        clear_tape();
        context.mode = mode;
        context.precision = FP32;
        INFO(setting_now());
        Tensor x = normals({3, 8}, F32, 0), weight = require_gradient(normals({8, 8}, F32, 1));
        auto run = [&] {
            weight.gradient->filled = false;
            Tensor y = linear(linear(x, weight), weight);
            backward(weighted_total({y}));
        };
        weight.gradient->is_parameter = true;
        weight.gradient->value = empty({8, 8}, F32, GRADIENTS);
        run();
        Tensor want = empty({8, 8}, F32);
        copy(want, weight.gradient->value);
        context.precision = PREC_BF16;
        size_t before = memory_use(D::device).now_by[WEIGHT_COPIES];
        run();
        CHECK(memory_use(D::device).now_by[WEIGHT_COPIES] - before == 64 * 2);
        CHECK(autocast_operand(weight).data == autocast_operand(weight).data);
        check_close(weight.gradient->value, want, 0, 0.03 * largest(want));
        drop_weight_copies({weight});
        clear_tape();
        CHECK(memory_use(D::device).now_by[WEIGHT_COPIES] == before);
        {
            // eager keeps the copy until it is dropped, as torch.autocast does; fused does not
            NoGrad no_grad;
            linear(x, weight);
            CHECK(memory_use(D::device).now_by[WEIGHT_COPIES] - before ==
                  (mode == EAGER ? 64 * 2 : 0));
        }
        run();  // and a copy made without gradient does not serve a pass with one
        check_close(weight.gradient->value, want, 0, 0.03 * largest(want));
        drop_weight_copies({weight});
    }
}

TEST_CASE_TEMPLATE("autocast: a parameter's 16-bit gradient takes an fp32 one, too", D, OnCPU,
                   OnCUDA) {
    if (!begin<D>()) { return; }
    context.mode = FUSED;
    const Tensor x = normals({3, 8}, F32, 0), index = from_ints({1, 1, 5}, {3});
    auto gradient = [&](Precision precision) {
        context.precision = precision;
        Tensor weight = require_gradient(normals({8, 8}, F32, 1));
        weight.gradient->is_parameter = true;
        Tensor y = linear(x, weight), row = gather_rows(weight, index);
        backward(weighted_total({y, row}));
        drop_weight_copies({weight});
        return weight.gradient->value;
    };
    const Tensor want = gradient(FP32), got = gradient(PREC_BF16);
    CHECK(got.dtype == BF16);
    check_close(cast(got, F32), want, 0, 0.03 * largest(want));
}

TEST_CASE("a tensor of more dimensions is not broadcast to fewer, nor one of six at all") {
    begin<OnCPU>();
    const Tensor to = empty({3}, F32);
    for (const Shape& shape : {Shape{1, 3}, Shape{2, 3}}) {
        const Tensor from = empty(shape, F32);
        CHECK(has(failure_of([&] { copy_or_add(to, from, false); }), "cannot broadcast"));
    }
    const Tensor six = empty({2, 3, 2, 3, 2, 2}, F32);
    CHECK(has(failure_of([&] { contiguous(transpose(six, 0, 5)); }), "cannot broadcast"));
}
TEST_CASE("compare is safe against NaN and infinities") {
    begin<OnCPU>();
    auto wrong = [](float got, float want, double rtol, double atol) {
        return compare(from_floats({0, got}, {2}), from_floats({0, want}, {2}), rtol, atol).wrong;
    };
    CHECK(wrong(1, 1, 0, 0) == 0);
    CHECK(wrong(1.01f, 1, 0.02, 0) == 0);
    CHECK(wrong(1.03f, 1, 0.02, 0) == 1);
    CHECK(wrong(1.01f, 1, 0, 0.02) == 0);
    CHECK(wrong(1.03f, 1, 0, 0.02) == 1);
    for (double tolerance : {0.0, 1.0, 1e30}) {
        CHECK(wrong(NAN, 1, tolerance, tolerance) == 1);
        CHECK(wrong(1, NAN, tolerance, tolerance) == 1);
        CHECK(wrong(NAN, NAN, tolerance, tolerance) == 1);
    }
    for (double rtol : {0.0, 0.1}) {
        CHECK(wrong(INFINITY, INFINITY, rtol, 0) == 0);
        CHECK(wrong(-INFINITY, INFINITY, rtol, 0) == 1);
        CHECK(wrong(1, INFINITY, rtol, 0) == 1);
        CHECK(wrong(INFINITY, 1, rtol, 0) == 1);
    }
    Comparison c = compare(from_floats({1, 2, NAN}, {3}), from_floats({1, 5, 3}, {3}), 0, 0);
    CHECK((c.wrong == 2 && c.worst == 2));
    CHECK(std::isnan(c.max_abs));
    CHECK(std::isnan(compare(from_floats({NAN, 2}, {2}), from_floats({1, 5}, {2}), 0, 0).max_abs));
    c = compare(from_floats({INFINITY, 5}, {2}), from_floats({INFINITY, 2}, {2}), 0, 0);
    CHECK((c.wrong == 1 && c.worst == 1));
    c = compare(from_floats({7, 2}, {2}), from_floats({7, 2}, {2}), 0, 0);
    CHECK((c.worst == 0 && c.got == 7 && c.want == 7));
    CHECK_THROWS_AS(compare(zeros({6}, F32), zeros({2, 3}, F32), 0, 0), Failure);
}

TEST_CASE_TEMPLATE("five runs give the same bits", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    Tensor table = normals({7, 65}, F32, 0), row = normals({65}, F32, 1),
           weight = normals({65, 65}, F32, 2);
    auto run = [&](Tensor* y) {
        return gradients(
            {table, row, weight},
            [](X x) {
                // backward: rows, column sums
                Tensor h = add(gather_rows(x[0], some_indices({2000}, 7)), x[1]);
                return Tensors{add(sum_last(linear(h, x[2])), mean_all(h))};
            },
            y);
    };
    Tensor y0, y;
    Tensors first = run(&y0);
    for (int i = 1; i < 5; i++) {
        Tensors again = run(&y);
        CHECK(same_bits(y, y0));
        for (size_t k = 0; k < first.size(); k++) { CHECK(same_bits(again[k], first[k])); }
    }
}
