// precision.cu: section 1.1.5, what a number costs when it has fewer bits. How floats are rounded to 16 bits, what that
// does to a long sum, which operations autocast therefore leaves in fp32, and how fp16 is kept from underflowing.
//
//              sign  exponent  mantissa   largest   smallest normal   relative rounding error at most
//   fp32         1        8       23      3.4e38        1.2e-38              6.0e-8  (2^-24)
//   tf32         1        8       10      3.4e38        1.2e-38              4.9e-4  (2^-11)
//   fp16         1        5       10      65504         6.1e-5               4.9e-4  (2^-11)
//   bf16         1        8        7      3.4e38        1.2e-38              3.9e-3  (2^-8)
#include "cs336.h"

// ---------------------------------------------------------------------------------------------------------------------
// Conversions. A format with m mantissa bits holds, between 2^e and 2^(e+1), the multiples of 2^(e-m). A float is
// rounded to the nearest of them, and from halfway to the one whose last bit is 0, so that errors do not pile up on one
// side. Because floats of one sign are ordered as their bits are, rounding is integer arithmetic: add just under half
// of the last kept bit (exactly half where that bit is 1), and drop the rest. A carry out of the mantissa raises the
// exponent, which is right, up to infinity. No branches: the compiler turns loops over these into vector code.

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
constexpr uint32_t SIGN = 0x80000000, INFINITE = 0x7f800000, QUIET = 0x00400000;  // QUIET: a NaN that does not trap

// bf16 is the upper half of a float.
float bf16_to_float(uint16_t bits) { return float_of((uint32_t)bits << 16); }
uint16_t float_to_bf16(float x) {
    uint32_t u = bits_of(x), rounded = u + 0x7fff + (u >> 16 & 1);
    bool is_nan = (u & ~SIGN) > INFINITE;  // rounding could carry a NaN into infinity
    return (uint16_t)((is_nan ? u | QUIET : rounded) >> 16);
}

// fp16's exponent bias is 15, fp32's is 127: shifted into place, an fp16 is 2^112 times too small, subnormals included.
float fp16_to_float(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, magnitude = (uint32_t)(bits & 0x7fff) << 13;
    uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
    bool is_special = (bits & 0x7c00) == 0x7c00;
    return float_of(sign | (is_special ? magnitude | INFINITE : finite));
}
uint16_t float_to_fp16(float x) {
    uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, magnitude = u & ~SIGN;
    uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    // Below 2^-14 fp16 is a fixed-point number in units of 2^-24. That is the last bit of floats from 0.5 to 1, so the
    // processor rounds for us when 0.5 is added.
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t nan = 0x7e00 | (magnitude >> 13 & 0x1ff);
    uint32_t result = magnitude < bits_of(0x1p-14f) ? subnormal : normal;
    result = magnitude >= bits_of(65520.0f) ? 0x7c00 : result;  // halfway between 65504 and the next, 65536
    result = magnitude > INFINITE ? nan : result;
    return (uint16_t)(sign | result);
}

// tf32 lives in a float whose last 13 bits are 0. Ties go to even here, too. The GPU's own instruction (cvt.rna) sends
// them away from zero, and a tensor core that is handed a plain float ignores the 13 bits: any two of the three ways
// differ by at most one unit in the last place.
float round_to_tf32(float x) {
    uint32_t u = bits_of(x), rounded = (u + 0xfff + (u >> 13 & 1)) & ~0x1fffu;
    bool is_nan = (u & ~SIGN) > INFINITE;
    return float_of(is_nan ? u | QUIET : rounded);
}

// Whole arrays, in the file where the functions above can be inlined into the loop.
void convert(void* to_data, DType to_type, const void* from_data, DType from_type, int64_t n) {
    with_type(to_type, [&](auto to_zero) {
        with_type(from_type, [&](auto from_zero) {
            auto* to = (decltype(to_zero)*)to_data;
            auto* from = (const decltype(from_zero)*)from_data;
#pragma omp parallel for if (n > 16384)
            for (int64_t i = 0; i < n; i++) { from_acc((Wide<decltype(to_zero)>)to_acc(from[i]), &to[i]); }
        });
    });
}
void round_all_to_tf32(float* to, const float* from, int64_t n) {
#pragma omp parallel for if (n > 16384)
    for (int64_t i = 0; i < n; i++) { to[i] = round_to_tf32(from[i]); }
}

// ---------------------------------------------------------------------------------------------------------------------
// mixed_precision_accumulation: s = 0; a thousand times s = round(s + x), with x = round(0.01). Both roundings err.
// x is rounded once, but its error is added a thousand times. s is rounded in every step, by up to half of its last
// bit, and with a bias as long as s stays between the same powers of two. The rounding of s can stop the sum: when x is
// less than half of the last bit of s, s no longer moves.
//
// Kahan's summation keeps in c how much too much the last step added, and takes it off the next addend:
//   y = x - c;  t = s + y;  c = (t - s) - y;  s = t      (each operation rounded)

constexpr int ADDITIONS = 1000;

float rounded(float x, DType t) {
    switch (t) {
        case F32: return x;
        case F16: return fp16_to_float(float_to_fp16(x));
        case BF16: return bf16_to_float(float_to_bf16(x));
        default: fail("rounded: %s is not a format of this experiment", name_of(t));
    }
}

// Operations run in fp32 and are then rounded to `format`. For fp16 and bf16 this is what one correctly rounded
// operation gives: fp32's 24 bits are at least 2 p + 2 (p = 11 and 8 bits).
struct Accumulation {
    float sum;
    int stalled;  // after so many additions the sum did not move any more
};
Accumulation accumulate(DType format, DType addend_format, bool kahan) {
    float x = rounded(0.01f, addend_format), s = 0, c = 0;
    int stalled = 0;
    for (int i = 1; i <= ADDITIONS; i++) {
        float y = kahan ? rounded(x - c, format) : x;
        float t = rounded(s + y, format);
        if (kahan) { c = rounded(rounded(t - s, format) - y, format); }
        if (t != s) { stalled = i; }
        s = t;
    }
    return {s, stalled};
}

int cmd_mixed_precision_accumulation(const Options&) {
    struct Row {
        const char* what;
        DType format, addend;
        bool kahan;
    };
    // The first four are the handout's. Widening an addend to fp32 changes nothing, so rows 3 and 4 are one
    // computation.
    const Row rows[] = {{"fp32 += fp32", F32, F32, false},        {"fp16 += fp16", F16, F16, false},
                        {"fp32 += fp16", F32, F16, false},        {"fp32 += fp32(fp16)", F32, F16, false},
                        {"bf16 += bf16", BF16, BF16, false},      {"fp16 += fp16, Kahan", F16, F16, true},
                        {"bf16 += bf16, Kahan", BF16, BF16, true}};
    Table table{strprintf("mixed_precision_accumulation: 0.01 added %d times, device cpu", ADDITIONS),
                {"what", "sum", "error against 10", "rounding the addend", "rounding the sum", "stops after"}};
    for (const Row& row : rows) {
        Accumulation a = accumulate(row.format, row.addend, row.kahan);
        double exact_sum = ADDITIONS * (double)rounded(0.01f, row.addend);  // of the rounded addends
        table.row(row.what, strprintf("%.7f", a.sum), strprintf("%.7f", a.sum - 10.0),
                  strprintf("%.7f", exact_sum - 10), strprintf("%.7f", a.sum - exact_sum),
                  a.stalled < ADDITIONS && !row.kahan ? std::to_string(a.stalled) : "");
    }
    print(table);

    const Accumulation bf16_sum = accumulate(BF16, BF16, false);
    answer("",
           "The fp32 sum of 1000 times 0.01 is %.4f, the fp16 sum %.4f, and the fp32 sum of fp16 addends %.4f. fp16 "
           "has no 0.01: rounding the addend costs %.4f, which widening it before the addition does not bring back, "
           "and an fp16 sum is rounded again at each addition. A bf16 sum stops at %g after %d additions, where 0.01 "
           "is less than half of its last bit: so factors may have 16 bits, but sums are kept in fp32.",
           accumulate(F32, F32, false).sum, accumulate(F16, F16, false).sum, accumulate(F32, F16, false).sum,
           ADDITIONS * (double)rounded(0.01f, F16) - 10, bf16_sum.sum, bf16_sum.stalled);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// benchmarking_mixed_precision (a): autocast does not convert a model, it chooses a dtype for each operation. Matrix
// products take 16-bit copies of their operands, because tensor cores run those at several times fp32's rate and sum in
// fp32 anyway; exp, log, powers, sums, norms and losses run in fp32; the rest takes what it is given. Parameters stay
// in fp32, and so do their gradients (in mode eager): the gradient of a cast casts back.

// y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimension, var = mean((x - mean)^2). PyTorch's
// layer_norm is one operation on autocast's fp32 list, so its input is widened first. In fp16 the squares overflow from
// |x - mean| = 256 on, and lose all their bits below 2e-4; bf16 has the range, but 8 bits are few for a difference of
// near neighbours and for a sum.
static Tensor layer_norm(const Tensor& x16, const Tensor& weight, const Tensor& bias, float eps) {
    Tensor x = cast(x16, F32);
    Tensor centred = sub(x, mean_last(x));
    Tensor variance = mean_last(square(centred));
    return add(mul(mul(centred, rsqrt(add_scalar(variance, eps))), weight), bias);
}

// mean over n of log(sum_v exp(logits[n,v])) - logits[n, targets[n]], with the largest logit taken off first so that
// exp cannot overflow. On autocast's fp32 list, like layer_norm. logits [N,V], targets I32 [N] -> [].
static Tensor toy_cross_entropy(const Tensor& logits16, const Tensor& targets) {
    Tensor logits = cast(logits16, F32);
    // Any constant will do, so none of the gradient goes through it.
    Tensor z = sub(logits, max_last(detached(logits)));
    return mean_all(sub(log(sum_last(exp(z))), pick_last(z, targets)));
}

ToyDtypes toy_model_dtypes(Precision precision) {
    RestoreContext restore;
    context.precision = precision;
    context.recording = true;
    const int64_t N = 8, in = 5, hidden = 10, out = 3;
    auto leaf = [](const Shape& shape, const char* name, float mean, float std) {
        Tensor t = empty(shape, F32, PARAMETERS);
        fill_normal(t, 0, key_of(name), mean, std);
        return require_gradient(t);
    };
    Tensor fc1 = leaf({hidden, in}, "fc1.weight", 0, 0.4f), fc2 = leaf({out, hidden}, "fc2.weight", 0, 0.4f);
    Tensor ln_weight = leaf({hidden}, "ln.weight", 1, 0.1f), ln_bias = leaf({hidden}, "ln.bias", 0, 0.1f);
    Tensor x = empty({N, in}, F32, INPUTS);
    fill_normal(x, 0, key_of("x"), 0, 1);
    Tensor targets = from_ints({0, 1, 2, 0, 1, 2, 0, 1}, {N});

    Tensor after_fc1 = linear(x, fc1);
    Tensor after_ln = layer_norm(relu(after_fc1), ln_weight, ln_bias, 1e-5f);
    Tensor logits = linear(after_ln, fc2);
    Tensor loss = toy_cross_entropy(logits, targets);
    backward(loss);
    for (const Tensor& p : {fc1, fc2, ln_weight, ln_bias}) {
        const Tensor& gradient = p.gradient->value;
        if (!gradient || gradient.dtype != fc1.gradient->value.dtype) {
            fail("ToyModel: a parameter's gradient differs");
        }
    }
    return {fc1.dtype, after_fc1.dtype, after_ln.dtype, logits.dtype, loss.dtype, fc1.gradient->value.dtype};
}

// --precision pure_bf16 is no autocast: the model itself is bf16. It needs 8 bytes per parameter for weight, gradient
// and moments, not 16, and no copies. The price is AdamW's update: a step that is less than a 256th of its weight can
// be rounded away. Arithmetic stays fp32, and every result is rounded to nearest as it is stored.

// ---------------------------------------------------------------------------------------------------------------------
// Loss scaling. fp16's smallest number is 6e-8, and gradients are often smaller; bf16, with fp32's exponents, needs
// none of this. A factor on the loss is a factor on all gradients. The largest one that works is not known beforehand
// and changes during training, so it is searched for: up now and then, and down when something overflows.

bool update_scale(LossScaler& scaler, bool found_inf) {
    if (found_inf) {
        scaler.scale /= 2;
        scaler.good_steps = 0;
        return false;
    }
    scaler.good_steps++;
    if (scaler.good_steps >= scaler.growth_interval) {
        if (std::isfinite(scaler.scale * 2)) { scaler.scale *= 2; }
        scaler.good_steps = 0;
    }
    return true;
}
