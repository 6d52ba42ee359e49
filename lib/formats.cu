// formats.cu: how floats are rounded to 16 bits, bit by bit.
//
//              sign  exponent  mantissa   largest   smallest normal   relative rounding error at most
//   fp32         1        8       23      3.4e38        1.2e-38              6.0e-8  (2^-24)
//   tf32         1        8       10      3.4e38        1.2e-38              4.9e-4  (2^-11)
//   fp16         1        5       10      65504         6.1e-5               4.9e-4  (2^-11)
//   bf16         1        8        7      3.4e38        1.2e-38              3.9e-3  (2^-8)
//
// A format with m mantissa bits holds, between 2^e and 2^(e+1), the multiples of 2^(e-m). A float is
// rounded to the nearest of them, and from halfway to the one whose last bit is 0, so that errors do not pile up on one
// side. Because floats of one sign are ordered as their bits are, rounding is integer arithmetic: add just under half
// of the last kept bit (exactly half where that bit is 1), and drop the rest. A carry out of the mantissa raises the
// exponent, which is right, up to infinity. No branches: the compiler turns loops over these into vector code.
#include "lib.h"

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
            for (int64_t i = 0; i < n; i++) { to[i] = (Wide<decltype(to_zero)>)from[i]; }
        });
    });
}
void round_all_to_tf32(float* to, const float* from, int64_t n) {
#pragma omp parallel for if (n > 16384)
    for (int64_t i = 0; i < n; i++) { to[i] = round_to_tf32(from[i]); }
}
