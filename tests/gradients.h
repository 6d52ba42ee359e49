// gradients.h: what the tests of ops share: random inputs, an op's gradients, and central
// differences to hold them to.
#pragma once
#include "test.h"

using Tensors = vector<Tensor>;
using Op = function<Tensors(const Tensors& x)>;  // its outputs

inline Tensor normals(const Shape& shape, DType dtype, uint64_t key, float mean = 0,
                      float std = 1) {
    Tensor t = empty(shape, dtype);
    fill_normal(t, 1, key, mean, std);
    return t;
}
inline Tensor weights_for(const Tensor& y, size_t i) { return normals(y.shape, y.dtype, 99 + i); }

// The loss is sum(w * y) over all outputs y. Its gradient with respect to y is w itself, so that
// y's own backward gets an upstream gradient that differs at every element, and no other op's
// backward takes part. loss_of() has the value.
inline Tensor weighted_total(const Tensors& ys) {
    Tensor loss = zeros({}, ys[0].dtype);
    vector<GradientPtr> to;
    Tensors weights;
    for (const Tensor& y : ys) {
        weights.push_back(weights_for(y, to.size()));
        to.push_back(y.gradient);
    }
    record(loss, ys, [weights, to](const Tensor&) {
        for (size_t i = 0; i < to.size(); i++) { add_gradient(to[i], weights[i]); }
    });
    return loss;
}
inline double loss_of(const Tensors& ys) {
    double sum = 0;
    for (size_t i = 0; i < ys.size(); i++) {
        vector<double> y = to_doubles(ys[i]), w = to_doubles(weights_for(ys[i], i));
        for (size_t j = 0; j < y.size(); j++) { sum += w[j] * y[j]; }
    }
    return sum;
}
// Returns d loss / dx for each x, and in *output f's first output.
inline Tensors gradients(const Tensors& values, const Op& f, Tensor* output = nullptr) {
    clear_tape();
    Tensors leaves, result;
    for (const Tensor& v : values) { leaves.push_back(require_gradient(v)); }
    Tensors ys = f(leaves);
    backward(weighted_total(ys));
    for (const Tensor& x : leaves) {
        REQUIRE(x.gradient->value);
        result.push_back(x.gradient->value);
    }
    if (output) { *output = detached(ys[0]); }
    return result;
}
// Holds f's gradients to (loss(x + h) - loss(x - h)) / 2h, whose error is h^2 by the formula and
// 1e-16 / h by the arithmetic.
inline void check_gradients(const Tensors& values, const Op& f) {
    const double h = 1e-5;
    Tensors got = gradients(values, f);
    NoGrad no_grad;
    for (size_t k = 0; k < values.size(); k++) {
        CAPTURE(k);
        Tensor want = empty(values[k].shape, F64);
        for (int64_t i = 0; i < want.size(); i++) {
            double *x = values[k].as<double>() + i, before = *x;
            *x = before + h;
            double above = loss_of(f(values));
            *x = before - h;
            double below = loss_of(f(values));
            *x = before;
            want.as<double>()[i] = (above - below) / (2 * h);
        }
        Comparison c = compare(got[k], want, 1e-6, 1e-8);
        CHECK_MESSAGE((c.ok() && got[k].dtype == F64), to_string(c));
    }
}
