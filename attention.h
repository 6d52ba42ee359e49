// attention.h: what attention.cu, flash.cu, flash_commands.cu and the flash kernels of fast/ share:
// how they see tensors, the table of implementations, and how experiments time its rows. Read the
// equations at the head of attention.cu first.
//
// O = softmax(Q K^T / sqrt(D)) V; q [B,H,Tq,D], k and v [B,H,Tk,D] -> [B,H,Tq,D], any
// strides (for flash the last one is 1, and on a GPU the others are multiples of 8). Causal: query
// i sees keys j <= i, counted from the start, also where Tq != Tk. L [B,H,Tq] (if wanted): the
// logsumexp of each row, L_i = log sum_j exp(S_ij), in fp32 (in F64 if q is). In formulas S is the
// scores; in experiments it is the length of a sequence, as in the handout.
#pragma once
#include "cs336.h"

struct AttentionTensors {
    Tensor q, k, v;  // shapes as above; o and L, too
    bool causal;
    Tensor dO{};  // null: there is no backward, and dq, dk and dv stay null
    Tensor o{}, L{}, dq{}, dk{}, dv{};
};
// A loop or a kernel sees a [B,H,T,D] tensor as this: element (b,h,t,d) is at
// data[b*batch + h*head + t*row + d].
struct Heads {
    void* data;
    int64_t batch, head, row;  // strides, in elements
    int rows, D;               // of each head: how many rows, and their length
};
// Returns the address of the first row of head h of sequence b.
template <class T>
HD inline T* head_of(const Heads& x, int b, int h) {
    return (T*)x.data + b * x.batch + h * x.head;
}
// Returns the address of row i of the first head or, once move_to_head (below) has moved x, of that
// head.
template <class T>
HD inline T* row_at(const Heads& x, int i) {
    return (T*)x.data + i * x.row;
}
// The causal mask: query i sees keys 0 to keys_seen - 1. (Naive makes it a tensor. Kernels in tiles
// skip a tile that no query sees. Most of them test key by key only in a tile that is seen in
// part.)
HD inline int keys_seen(bool causal, int i, int Tk) { return causal && i + 1 < Tk ? i + 1 : Tk; }
// What backward's kernels (but Hopper's) read of a query. step_7 (below) makes it: D_i is that of
// step 7 (flash.cu), and L_log2e is L log2(e). The GPU has exp2, not exp, so they compute P =
// exp(S - L) as exp2(S log2(e) - L_log2e).
struct BackwardQuery {
    float L_log2e, D_i;
};
// The arguments of a kernel of flash.cu or fast/.
struct AttentionArgs {
    Heads q, k, v, o, dO, dq, dk, dv;
    float* L;  // [B,H,Tq]
    int B, H, Tq, Tk;
    float scale;  // 1/sqrt(D)
    bool causal;
    // For backward, made by step_7; null in forward, tiled and Hopper. A head's rows are padded to
    // query_rows: a row beyond Tq has L_log2e = inf, so its P is 0.
    const BackwardQuery* queries;  // [B*H,query_rows]
    int query_rows;
};
AttentionArgs args_of(const AttentionTensors& t);
// Moves the tensors' addresses, and those of L and the queries, to one of the B*H heads.
template <class T>
HD inline void move_to_head(AttentionArgs& a, int head) {
    for (Heads* x : {&a.q, &a.k, &a.v, &a.o, &a.dO, &a.dq, &a.dk, &a.dv}) {
        x->data = head_of<T>(*x, head / a.H, head % a.H);
    }
    a.L += (int64_t)head * a.Tq;
    a.queries += (int64_t)head * a.query_rows;
}
// A row of the table of implementations, table_of<AttentionImpl>(). `takes` says whether it can run
// tensors of this type and head size.
struct AttentionImpl {
    const char* name;
    Device device;
    int rung;  // the table stands in this order, from the plainest to the fastest
    bool (*takes)(DType dtype, int64_t D);
    // Either `run` does the forward and leaves the backward on the tape ...
    Tensor (*run)(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, Tensor* L);
    // ... or the row has both passes by hand: forward writes o and L, backward reads them and
    // writes dq, dk and dv.
    void (*forward)(const AttentionTensors& t) = nullptr;
    void (*backward)(const AttentionTensors& t) = nullptr;
};
// Returns whether flash's kernels on a GPU take this head size: 16, 32, 64, 80 or 128. `tiled`
// takes any.
bool flash_head_size(int64_t D);

// -------------------------------------------------------------------------------------------------
// How experiments run and time the rows of the table

struct AttentionCase {
    int B, H, Tq, Tk, D;
    bool causal;
};
enum AttentionPass { FORWARD_PASS, BACKWARD_PASS, BOTH_PASSES, ATTENTION_PASSES };
// The times of an implementation's passes in one case.
struct PassTimes {
    Stats ms[ATTENTION_PASSES]{};
    size_t held = 0;  // bytes when backward starts: inputs, what forward saved, cuBLAS's workspace
    size_t oom = 0;   // bytes that the passes need, where these do not fit; else 0
};
// A row of an experiment's table: one head, sequences of length S.
struct AttentionRun {
    int S, D;
    DType dtype;
    PassTimes naive{}, other{};  // other: fused in torch_compile, flash in flash_benchmarking
};
using AttentionRuns = vector<AttentionRun>;
// A timer returns the times of f in ms, run after run, each behind `prepare`, which is not timed.
// It decides how many runs there are.
using PassTimer = function<Stats(const Job& prepare, const Job& f)>;
struct Effort {
    PassTimer time;
    // Whether a forward with its backward is timed, too. 1.2.1 and 1.3 ask for the passes alone.
    bool both_passes;
};
// Returns normal inputs with a dO, on context.device.
AttentionTensors random_inputs(const AttentionCase& c, DType dtype, uint64_t seed);
// Calls `pass`, unless memory is only counted (META).
void run_pass(void (*pass)(const AttentionTensors&), const AttentionTensors& t);
// Runs the forward, and the backward if there is a dO. Returns O and L; and dQ, dK and dV.
vector<Tensor> outputs_of(const AttentionImpl& impl, const AttentionTensors& in);
// Returns the row with this name on context.device; "auto" is the fastest flash, or else fused. It
// is a usage error if the row does not take this.
const AttentionImpl& impl_named(const string& name, DType dtype = F32, int64_t D = 64);
// Times the passes of an implementation; where these do not fit, sets `oom`.
PassTimes pass_times(const AttentionImpl& impl, const AttentionCase& c, DType dtype,
                     const Effort& effort);
// Return the cells of a table: "1.234" or "OOM (61.2 GiB)"; and "2.34x", how many times as fast as
// naive the other implementation is, or "" if one of them did not fit.
string ms_cell(const PassTimes& t, AttentionPass pass);
string speedup_cell(const AttentionRun& r, AttentionPass pass);
// Returns how the other implementation compares with naive, as the end of a sentence: "faster in 17
// of the 20 configurations that fit (...) ...".
string compared(const AttentionRuns& runs, AttentionPass pass);
// Times naive and another implementation (null: naive alone) at each head size and length.
AttentionRuns time_all(const AttentionImpl* other, int B, bool causal, DType dtype,
                       const vector<int>& lengths, const Effort& effort);

// -------------------------------------------------------------------------------------------------
// What the GPU's kernels share

#ifdef HAVE_CUDA
// Constant<64> is a type that stands for the number 64; its objects hold nothing. So an argument
// `auto D` of that type may stand where C++ wants a number at compile time: kernel<T, D> is
// kernel<T, 64> then.
template <int N>
using Constant = std::integral_constant<int, N>;
// Calls f(D), D a Constant: so the compiler knows the head size of these tensors.
template <class F>
void with_head_size(const AttentionTensors& t, F f) {
    switch (t.q.dim(3)) {
        case 16: return f(Constant<16>());
        case 32: return f(Constant<32>());
        case 64: return f(Constant<64>());
        case 80: return f(Constant<80>());
        case 128: return f(Constant<128>());
        default: fail("attention: no kernel for head size %ld", (long)t.q.dim(3));
    }
}

// Does step 7 for tensors that have o, L and dO. Returns the arguments with `queries`, which lie in
// *memory: a multiple of QUERY_ROWS for each head, so that no tile reads beyond them. (Every tile's
// rows divide it.)
constexpr int QUERY_ROWS = 128;
AttentionArgs step_7(const AttentionTensors& t, Tensor* memory);

// With tensor cores step 2 is lazy: m follows the maximum only where a P = exp(S - m) would else
// exceed 2^SLACK. So P is at most 256, far from the limits of fp32 sums, and of fp16. (Not at
// scores above 10^8: rounding m to 24 bits may be off by more than SLACK there, and P may
// overflow.)
constexpr float SLACK = 8;
#endif
