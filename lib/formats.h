// lib/formats.h: how floats are rounded to 16 bits, bit by bit.
//
//              sign  exponent  mantissa   largest   smallest normal   largest relative error
//   fp32         1        8       23      3.4e38        1.2e-38              6.0e-8  (2^-24)
//   tf32         1        8       10      3.4e38        1.2e-38              4.9e-4  (2^-11)
//   fp16         1        5       10      65504         6.1e-5               4.9e-4  (2^-11)
//   bf16         1        8        7      3.4e38        1.2e-38              3.9e-3  (2^-8)
//
// A format with m mantissa bits holds, between 2^e and 2^(e+1), the multiples of 2^(e-m). A float
// is rounded to the nearest of them, and from halfway to the one whose last bit is 0, so that
// errors do not pile up on one side. Because floats of one sign are ordered as their bits are,
// rounding is integer arithmetic: add just under half of the last kept bit (exactly half where that
// bit is 1), and drop the rest. A carry out of the mantissa raises the exponent, which is right, up
// to infinity. No branches: the compiler turns loops over these into vector code.
#pragma once
#include <cstdint>
#include <cstring>

HD inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
HD inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
// QUIET: a NaN that does not trap
constexpr uint32_t SIGN = 0x80000000, INFINITE = 0x7f800000, QUIET = 0x00400000;

// bf16 is the upper half of a float.
inline float bf16_to_float(uint16_t bits) { return float_of((uint32_t)bits << 16); }
inline uint16_t float_to_bf16(float x) {
    uint32_t u = bits_of(x), rounded = u + 0x7fff + (u >> 16 & 1);
    bool is_nan = (u & ~SIGN) > INFINITE;  // rounding could make infinity or -0 of a NaN
    return (uint16_t)((is_nan ? u | QUIET : rounded) >> 16);
}

// fp16's exponent bias is 15, fp32's is 127: shifted into place, an fp16 is 2^112 times too small,
// subnormals included.
inline float fp16_to_float(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, magnitude = (uint32_t)(bits & 0x7fff) << 13;
    uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
    bool is_special = (bits & 0x7c00) == 0x7c00;
    return float_of(sign | (is_special ? magnitude | INFINITE : finite));
}
// Rounds a float to fp16 by one of four formulas: normal, subnormal, infinite, NaN.
inline uint16_t float_to_fp16(float x) {
    uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, magnitude = u & ~SIGN;
    uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    // Below 2^-14 fp16 is a fixed-point number in units of 2^-24. That is the last bit of floats
    // from 0.5 to 1, so the processor rounds for us when 0.5 is added.
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t nan = 0x7e00 | (magnitude >> 13 & 0x1ff);
    uint32_t result = magnitude < bits_of(0x1p-14f) ? subnormal : normal;
    // halfway between 65504 and the next, 65536
    result = magnitude >= bits_of(65520.0f) ? 0x7c00 : result;
    result = magnitude > INFINITE ? nan : result;
    return (uint16_t)(sign | result);
}

// Arithmetic on a bf16 or an fp16 is arithmetic on floats: it widens as it is read, and is rounded
// as it is written. The GPU has instructions for that.
#ifdef __CUDA_ARCH__
#define ON_GPU_OR_CPU(gpu, cpu) gpu
#else
#define ON_GPU_OR_CPU(gpu, cpu) cpu
#endif
struct bf16 {
    uint16_t bits;
    HD operator float() const {
        return ON_GPU_OR_CPU(__bfloat162float(__ushort_as_bfloat16(bits)), bf16_to_float(bits));
    }
    HD void operator=(float x) {
        bits = ON_GPU_OR_CPU(__bfloat16_as_ushort(__float2bfloat16_rn(x)), float_to_bf16(x));
    }
};
struct fp16 {
    uint16_t bits;
    HD operator float() const {
        return ON_GPU_OR_CPU(__half2float(__ushort_as_half(bits)), fp16_to_float(bits));
    }
    HD void operator=(float x) {
        bits = ON_GPU_OR_CPU(__half_as_ushort(__float2half_rn(x)), float_to_fp16(x));
    }
};
template <class T>
using Wide = decltype(+T());  // the type that arithmetic on T runs in: float, or double for F64
