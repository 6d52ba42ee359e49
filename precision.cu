// precision.cu: section 1.1.5, what a number costs when it has fewer bits. It shows what rounding
// to 16 bits does to a long sum, which operations autocast therefore leaves in fp32, and how fp16
// is kept from underflowing, in this order. lib/formats.h has the formats, and how a float is
// rounded to them, bit by bit.
#include "cs336.h"

// -------------------------------------------------------------------------------------------------
// mixed_precision_accumulation: s = 0; a thousand times s = round(s + x), with x = round(0.01).
// Both roundings err. x is rounded once, but its error is added a thousand times. Every step rounds
// s, by at most half of its last bit. Between two powers of two s is a multiple of the same last
// bit, so there each step errs alike. The rounding of s can stop the sum: when x is less than half
// of the last bit of s, s no longer moves.

constexpr int ADDITIONS = 1000;  // 0.01 stands in the lines below; the texts say 1000 times 0.01

static float rounded(float x, DType format) {
    if (format == F16) { return fp16_to_float(float_to_fp16(x)); }
    return format == BF16 ? bf16_to_float(float_to_bf16(x)) : x;
}

struct Accumulation {
    float sum;
    int last_moved;  // the last addition that moved the sum
};
// Runs the sum in `format` with x in `addend_format`; returns it, and when it last moved. A 16-bit
// sum is rounded twice: to fp32's 24 significant bits, then to the p of `format`, the leading 1
// included (fp16: 11, bf16: 8). Since 24 >= 2 p + 2, that gives the same as one rounding of the
// exact sum.
static Accumulation accumulate(DType format, DType addend_format) {
    float x = rounded(0.01f, addend_format), s = 0;
    int last_moved = 0;

    for (int i = 1; i <= ADDITIONS; i++) {
        float t = rounded(s + x, format);
        if (t != s) { last_moved = i; }
        s = t;
    }

    return {s, last_moved};
}

// Prints the sums of the handout's four ways and of bf16, each with the two parts of its error, and
// what they show.
int cmd_mixed_precision_accumulation(const Options& o) {
    if (o.device == "cuda") { note("device cuda: these sums are the CPU's on every machine"); }
    struct Row {
        const char* what;
        DType format, addend;
    };

    // The first four are the handout's. Widening an addend to fp32 changes nothing, so rows 3 and 4
    // are one computation.
    const Row rows[] = {{"fp32 += fp32", F32, F32},
                        {"fp16 += fp16", F16, F16},
                        {"fp32 += fp16", F32, F16},
                        {"fp32 += fp32(fp16)", F32, F16},
                        {"bf16 += bf16", BF16, BF16}};

    Table table{strprintf("mixed_precision_accumulation: 0.01 added %d times, device cpu",
                          ADDITIONS),
                {"what", "sum", "error against 10", "rounding the addend", "rounding the sum",
                 "stops after"}};

    for (const Row& row : rows) {
        Accumulation a = accumulate(row.format, row.addend);
        // The exact sum of the rounded addends parts the two errors.
        double exact_sum = ADDITIONS * (double)rounded(0.01f, row.addend);
        table.row(row.what, strprintf("%.7f", a.sum), strprintf("%.7f", a.sum - 10.0),
                  strprintf("%.7f", exact_sum - 10), strprintf("%.7f", a.sum - exact_sum),
                  a.last_moved < ADDITIONS ? to_string(a.last_moved) : "");
    }
    print(table);

    const Accumulation bf16_sum = accumulate(BF16, BF16);
    answer("",
           "Sums are kept in fp32, while factors may have 16 bits: 1000 times 0.01 is %.4f in fp32 "
           "and %.4f in fp16. With fp16 addends the fp32 sum is %.4f: widening the addend does not "
           "bring back the %.4f that its rounding costs. A bf16 sum stops at %g after %d "
           "additions, where 0.01 is less than half of its last bit.",
           accumulate(F32, F32).sum, accumulate(F16, F16).sum, accumulate(F32, F16).sum,
           ADDITIONS * (double)rounded(0.01f, F16) - 10, bf16_sum.sum, bf16_sum.last_moved);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// benchmarking_mixed_precision (a): autocast does not convert a model, it chooses a dtype for each
// operation. Matrix products take 16-bit copies of their operands, because tensor cores run those
// at several times fp32's rate and sum in fp32 anyway; exp, log, powers, sums, norms and losses run
// in fp32; the rest takes what it is given. Parameters stay in fp32, and so do the gradients of
// this toy model: the gradient of a cast casts back. (The Transformer's may be 16-bit outside mode
// eager: see Gradient in lib/lib.h.)

// Returns y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimension, with var =
// mean((x - mean)^2). PyTorch's layer_norm is one operation on autocast's fp32 list, so its input
// is widened first.
static Tensor layer_norm(const Tensor& x16, const Tensor& weight, const Tensor& bias, float eps) {
    Tensor x = cast(x16, F32);
    Tensor centred = sub(x, mean_last(x));
    Tensor variance = mean_last(square(centred));
    return add(mul(mul(centred, rsqrt(add_scalar(variance, eps))), weight), bias);
}

static const char* const toy_components[] = {"model parameters within the autocast context",
                                             "output of the first feed-forward layer",
                                             "output of the layer norm",
                                             "predicted logits",
                                             "loss",
                                             "gradients"};
constexpr int LAYER_NORM = 2;

// Runs the handout's ToyModel (fc1 - ReLU - LayerNorm - fc2, cross-entropy) forward and backward on
// context.device under autocast to bf16 or fp16, and returns the dtypes of its components.
static vector<DType> toy_model_dtypes(Precision precision) {
    RestoreContext restore;
    context.precision = precision;
    context.recording = true;

    const int64_t N = 8, in = 5, hidden = 10, out = 3;
    // These leaves are no parameters (Gradient::is_parameter is false), so no mode matters here:
    // autocast casts them for each product, as it casts activations, and their gradients are fp32.
    auto leaf = [](const Shape& shape, const char* name, float mean, float std) {
        Tensor t = empty(shape, F32, PARAMETERS);
        fill_normal(t, 0, key_of(name), mean, std);
        return require_gradient(t);
    };

    Tensor fc1 = leaf({hidden, in}, "fc1.weight", 0, 0.4f),
           fc2 = leaf({out, hidden}, "fc2.weight", 0, 0.4f);
    Tensor ln_weight = leaf({hidden}, "ln.weight", 1, 0.1f),
           ln_bias = leaf({hidden}, "ln.bias", 0, 0.1f);

    Tensor x = empty({N, in}, F32, INPUTS);
    fill_normal(x, 0, key_of("x"));
    Tensor targets = from_ints({0, 1, 2, 0, 1, 2, 0, 1}, {N});

    Tensor after_fc1 = linear(x, fc1);  // casts both: autocast_operand, lib/matmul.cu
    Tensor after_ln = layer_norm(relu(after_fc1), ln_weight, ln_bias, 1e-5f);
    Tensor logits = linear(after_ln, fc2);
    Tensor loss = cross_entropy(logits, targets);  // on the fp32 list, as layer_norm: it widens
    backward(loss);

    return {fc1.dtype,    after_fc1.dtype, after_ln.dtype,
            logits.dtype, loss.dtype,      fc1.gradient->value.dtype};
}

// Prints the dtypes of the toy model's components under both autocasts, and the answers to (a) and
// (b).
void print_toy_models() {
    const vector<DType> under_fp16 = toy_model_dtypes(PREC_FP16),
                        under_bf16 = toy_model_dtypes(PREC_BF16);
    Table table{strprintf("ToyModel: dtypes as seen, device %s, batch 8, 5 -> 10 -> 3",
                          name_of(context.device)),
                {"component", "under autocast to fp16", "to bf16"}};

    vector<string> seen;
    for (size_t i = 0; i < under_fp16.size(); i++) {
        table.row(toy_components[i], under_fp16[i], under_bf16[i]);
        seen.push_back(string(toy_components[i]) + " " + name_of(under_fp16[i]));
    }
    print(table);

    answer("a", "Under autocast to fp16: %s.", list_of(seen).c_str());
    answer(
        "b",
        "Layer norm's mean and variance are sensitive: in fp16 a square overflows from 256 on (256 "
        "x 256 = 65536, the largest number is 65504), and a small variance vanishes. bf16 has "
        "fp32's range, but with 8 significant bits a long sum loses its small terms. So autocast "
        "treats both alike: layer norm's output is %s under float16 and %s under bfloat16.",
        name_of(under_fp16[LAYER_NORM]), name_of(under_bf16[LAYER_NORM]));
}

// --precision pure_bf16 is no autocast: the model itself is bf16. It needs 8 bytes per parameter
// for weight, gradient and moments, not 16, and no copies. The price is AdamW's update: a step that
// is less than a 256th of its weight can be rounded away.

// -------------------------------------------------------------------------------------------------
// Loss scaling. fp16's smallest positive number is 6e-8, and gradients are often smaller; bf16,
// with fp32's exponents, needs none of this. A factor on the loss is a factor on all gradients. The
// largest one that works is not known beforehand and changes during training, so it is searched
// for: up now and then, and down when something overflows.

// Halves the scale after a step that found inf or NaN, and doubles it after growth_interval good
// steps in a row, unless it would become infinite.
void update_scale(LossScaler& scaler, bool found_inf) {
    if (found_inf) {
        scaler.scale /= 2;
        scaler.good_steps = 0;
    } else if (++scaler.good_steps >= scaler.growth_interval) {
        if (isfinite(scaler.scale * 2)) { scaler.scale *= 2; }
        scaler.good_steps = 0;
    }
}
// Returns the factor on the loss, with which backward begins. guarded_step (model.cu) has the step
// divide by it again, skips a step whose norm is not finite, and calls update_scale.
float loss_scale_of(const LossScaler& scaler) {
    return context.precision == PREC_FP16 ? scaler.scale : 1;
}
