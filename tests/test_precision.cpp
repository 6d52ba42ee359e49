// Tests of precision.cu. The conversions are held against the definition of the formats, in double
// arithmetic.
#include "precision.cu"

#include "test.h"

#include <cmath>

struct Format {
    const char* name;
    int exponent_bits, mantissa_bits;
    float (*to_float)(uint16_t);
    uint16_t (*from_float)(float);
    // its bits; above are the NaNs
    int infinity() const { return ((1 << exponent_bits) - 1) << mantissa_bits; }
};
static const Format FORMATS[] = {{"fp16", 5, 10, fp16_to_float, float_to_fp16},
                                 {"bf16", 8, 7, bf16_to_float, float_to_bf16}};

// What the bits of a finite number, without its sign, stand for. Infinity's bits give the power of
// two after the largest number, which is where rounding puts it.
static double meaning(const Format& f, int bits) {
    int bias = (1 << (f.exponent_bits - 1)) - 1, exponent = bits >> f.mantissa_bits;
    int mantissa = bits & ((1 << f.mantissa_bits) - 1);
    if (exponent == 0) { return std::ldexp(mantissa, 1 - bias - f.mantissa_bits); }
    return std::ldexp(mantissa + (1 << f.mantissa_bits), exponent - bias - f.mantissa_bits);
}

TEST_CASE(
    "precision: all 65,536 patterns of fp16 and bf16 mean what the format says, and survive a "
    "round trip") {
    for (const Format& f : FORMATS) {
        CAPTURE(string(f.name));
        int wrong = 0, nans = 0;
        for (int bits = 0; bits < 65536; bits++) {
            int magnitude = bits & 0x7fff;
            bool negative = bits >> 15;
            float x = f.to_float((uint16_t)bits);
            uint16_t back = f.from_float(x);
            bool ok = std::signbit(x) == negative;
            if (magnitude > f.infinity()) {
                // NaN comes back as a quiet NaN of the same sign; the payload may stay, the quiet
                // bit has to be set.
                ok = ok && std::isnan(x) && back == (bits | 1 << (f.mantissa_bits - 1));
                nans++;
            } else if (magnitude == f.infinity()) {
                ok = ok && std::isinf(x) && back == bits;
            } else {
                ok = ok && std::fabs((double)x) == meaning(f, magnitude) && back == bits;
            }
            wrong += !ok;
        }
        CHECK(wrong == 0);
        CHECK(nans == 2 * ((1 << f.mantissa_bits) - 1));
    }
}

TEST_CASE("precision: rounding goes to the nearest number, and from halfway to the even one") {
    for (const Format& f : FORMATS) {
        CAPTURE(string(f.name));
        int wrong = 0, halfway = 0;
        // the upper neighbour of the last one is infinity
        for (int low = 0; low < f.infinity(); low++) {
            int even = low % 2 == 0 ? low : low + 1;
            double middle = (meaning(f, low) + meaning(f, low + 1)) / 2;
            float x = (float)middle;  // exact: fp32 has the bits to spare
            REQUIRE((double)x == middle);
            for (int sign : {0, 0x8000}) {
                float s = sign ? -1.0f : 1.0f;
                wrong += f.from_float(s * x) != (sign | even);
                wrong += f.from_float(s * std::nextafterf(x, 0)) != (sign | low);
                wrong += f.from_float(s * std::nextafterf(x, INFINITY)) != (sign | (low + 1));
            }
            halfway++;
        }
        CHECK(wrong == 0);
        CHECK(halfway == f.infinity());
    }
}

TEST_CASE("precision: the ends of fp16") {
    CHECK(float_to_fp16(65504) == 0x7bff);
    CHECK(float_to_fp16(std::nextafterf(65520, 0)) == 0x7bff);
    CHECK(float_to_fp16(65520) == 0x7c00);
    CHECK(float_to_fp16(-65520) == 0xfc00);
    CHECK(float_to_fp16(3.4e38f) == 0x7c00);
    CHECK(float_to_fp16(INFINITY) == 0x7c00);
    CHECK(float_to_fp16(0x1p-24f) == 1);
    CHECK(float_to_fp16(0x1p-25f) == 0);  // a tie, and 0 is even
    CHECK(float_to_fp16(0x1.000002p-25f) == 1);
    CHECK(float_to_fp16(-1e-30f) == 0x8000);
    CHECK(float_to_fp16(float_of(1)) == 0);  // fp32's own subnormals
    // a NaN whose payload does not fit is still a NaN
    CHECK(float_to_fp16(float_of(0x7f800001)) == 0x7e00);
    CHECK(float_to_fp16(float_of(0xffffffff)) == 0xffff);
    CHECK(float_to_bf16(float_of(0x7f800001)) == 0x7fc0);
    CHECK(float_to_bf16(float_of(0xffffffff)) == 0xffff);
    CHECK(float_to_bf16(3.4e38f) == 0x7f80);
}

TEST_CASE("precision: 0.01 a thousand times") {
    CHECK(accumulate(F32, F32).sum == 10.0001335f);
    CHECK(accumulate(F16, F16).sum == 9.953125f);
    CHECK(accumulate(F32, F16).sum == 10.0021362f);
    Accumulation stuck = accumulate(BF16, BF16);
    CHECK(stuck.sum == 4.0f);
    CHECK(stuck.last_moved < 1000);
    CHECK(accumulate(F16, F16).last_moved == 1000);
}

TEST_CASE("precision: mixed_precision_accumulation's table and answer") {
    const string text = printed([] { cmd_mixed_precision_accumulation({}); });
    for (const char* phrase :
         {"| fp32 += fp32(fp16) | 10.0021362 |", "| bf16 += bf16       |  4.0000000 |",
          "1000 times 0.01 is 10.0001 in fp32 and 9.9531 in fp16. With fp16 addends the fp32 sum "
          "is 10.0021: ",
          "the 0.0021 that ", "stops at 4 after 350 additions, "}) {
        CHECK_MESSAGE(has(text, phrase), phrase, " in: ", text);
    }
}

TEST_CASE_TEMPLATE("precision: ToyModel's dtypes under autocast", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    const map<Precision, string> lows = {
        {PREC_FP16, "float16"}, {PREC_BF16, "bfloat16"}, {FP32, "float32"}};
    for (Precision precision : {PREC_FP16, PREC_BF16, FP32}) {
        const string low = lows.at(precision);
        CAPTURE(low);
        context.recording = false;  // it records by itself, and leaves the context as it was
        const vector<DType> t = toy_model_dtypes(precision);
        CHECK(context.precision == FP32);
        CHECK(!context.recording);
        for (int i : {1, 3}) { CHECK(name_of(t[i]) == low); }  // the first layer's output, logits
        for (int i : {0, 2, 4, 5}) { CHECK(t[i] == F32); }
    }
}

TEST_CASE("precision: loss scaling halves at once and doubles slowly") {
    LossScaler s;
    s.growth_interval = 3;
    update_scale(s, true);
    CHECK(s.scale == 32768);
    update_scale(s, false);
    update_scale(s, false);
    update_scale(s, true);  // two good steps are forgotten
    CHECK(s.scale == 16384);
    for (int i = 0; i < 2; i++) { update_scale(s, false); }
    CHECK(s.scale == 16384);
    update_scale(s, false);
    CHECK(s.scale == 32768);
    CHECK(s.good_steps == 0);
    s.scale = 0x1p127f;
    for (int i = 0; i < 3; i++) { update_scale(s, false); }
    CHECK(s.scale == 0x1p127f);  // PyTorch's scaler, too, stops before infinity
}
