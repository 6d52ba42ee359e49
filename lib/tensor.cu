// lib/tensor.cu: tensors, the tape that autograd replays, and one kernel per operation.
//
// This file is what "PyTorch eager" means: an operation is, mostly, one kernel that reads its
// operands from memory, writes its result back, and leaves on a tape what its backward needs.
// --mode eager runs the handout's model on these ops, --mode fused on hand-fused kernels that
// record themselves on the same tape.
//
// In this order: tensors and copies of them, random numbers, the tape, elementwise operations,
// views, reductions, lookups, and whether a run's memory fits. To read first: the tape, where one
// op is walked through forward and backward; then mul(), which is that op.
#include "gpu.h"

constexpr int MAX_DIMS = 5;

// -------------------------------------------------------------------------------------------------
// Tensors

// Returns the number of elements; fails if their bytes could not be counted in 64 bits.
int64_t count(const Shape& shape) {
    int64_t n = 1;
    for (int64_t d : shape) {
        if (__builtin_mul_overflow(n, d, &n) || n > INT64_MAX / 8) {
            fail("a tensor of shape %s is more than can be counted", to_string(shape).c_str());
        }
    }
    return n;
}
string to_string(const Shape& shape) {
    vector<string> sizes;
    for (int64_t d : shape) { sizes.push_back(to_string(d)); }
    return "[" + join(sizes, ", ") + "]";
}
int64_t size_of(DType t) {
    static const int64_t bytes[] = {4, 2, 2, 8, 4, 1};  // in DType's order
    return bytes[t];
}
// Returns the strides, in elements, of a row-major tensor: [4,8,16] has [128,16,1].
static Shape row_major(const Shape& shape) {
    Shape stride(shape.size());
    int64_t n = 1;
    for (int i = (int)shape.size() - 1; i >= 0; i--) {
        stride[i] = n;
        n *= shape[i];
    }
    return stride;
}
bool is_row_major(const Tensor& t) {
    Shape want = row_major(t.shape);  // the stride of a dimension of 1 does not matter
    for (size_t i = 0; i < t.shape.size(); i++) {
        if (t.shape[i] != 1 && t.stride[i] != want[i]) { return false; }
    }
    return true;
}

// Allocates a row-major tensor on the device; its values are undefined.
Tensor empty_on(Device device, const Shape& shape, DType dtype, Category category, Source at) {
    Tensor t;
    t.memory = allocate(device, count(shape) * size_of(dtype), category, at);
    t.data = (char*)t.memory->data;
    t.dtype = dtype;
    t.shape = shape;
    t.stride = row_major(shape);
    return t;
}
Tensor empty(const Shape& shape, DType dtype, Category category, Source at) {
    return empty_on(context.device, shape, dtype, category, at);
}
Tensor zeros(const Shape& shape, DType dtype, Category category, Source at) {
    Tensor t = empty(shape, dtype, category, at);
    fill_zero(t);
    return t;
}

// Returns a row-major tensor on t's elements from `offset` on, which shares t's memory.
Tensor view(const Tensor& t, int64_t offset, const Shape& shape) {
    if (!is_row_major(t) || offset < 0 || offset + count(shape) > t.size()) {
        fail("view %s at %ld of %s is out of range", to_string(shape).c_str(), (long)offset,
             to_string(t.shape).c_str());
    }
    Tensor v = detached(t);
    v.data = t.data + offset * size_of(t.dtype);
    v.shape = shape;
    v.stride = row_major(shape);
    return v;
}
Tensor detached(const Tensor& t) {
    Tensor d = t;
    d.gradient = nullptr;
    return d;
}

// Sets all bytes of a row-major t to 0, in the compute stream's order.
void fill_zero(const Tensor& t) {
    size_t bytes = t.bytes();
    if (bytes == 0 || t.device() == META) { return; }
#ifdef HAVE_CUDA
    if (t.device() == CUDA) {
        CUDA_CHECK(cudaMemsetAsync(t.data, 0, bytes, stream()));
        return;
    }
#endif
    memset(t.data, 0, bytes);
}
void copy(const Tensor& to, const Tensor& from) {
    if (to.dtype != from.dtype || to.size() != from.size()) {
        fail("copy %s to %s", to_string(from.shape).c_str(), to_string(to.shape).c_str());
    }
    copy_bytes(to.data, to.device(), from.data, from.device(), from.bytes());
}

// Returns a row-major copy of t on the device, or t itself if it is there already; no gradient.
Tensor to_device(const Tensor& t, Device device) {
    if (t.device() == device) { return detached(t); }
    NoGrad no_grad;
    Tensor source = contiguous(t);
    Tensor result = empty_on(device, t.shape, t.dtype, t.memory->category);
    copy(result, source);
    return result;
}

// Calls f with the elements at data, as a pointer to their C++ type.
template <class F>
HD auto with_elements(const char* data, DType t, const F& f) {
    switch (t) {
        case F32: return f((float*)data);
        case BF16: return f((bf16*)data);
        case F16: return f((fp16*)data);
        case F64: return f((double*)data);
        case I32: return f((int*)data);
        case U8: break;
    }
    return f((uint8_t*)data);
}
// Reads element i, whatever its dtype, as an A, the type that arithmetic runs in: float or double.
// A float holds all whole numbers up to 2^24.
template <class A>
HD A load(const char* data, DType t, int64_t i) {
    return with_elements(data, t, [&](auto* elements) { return (A)elements[i]; });
}
// Writes x as element i, rounded to the dtype.
template <class A>
HD void store(char* data, DType t, int64_t i, A x) {
    with_elements(data, t, [&](auto* elements) { elements[i] = x; });
}

vector<double> to_doubles(const Tensor& t) {
    NoGrad no_grad;
    Tensor c = to_device(contiguous(t), CPU);
    vector<double> values(c.size());
    for (size_t i = 0; i < values.size(); i++) { values[i] = load<double>(c.data, c.dtype, i); }
    return values;
}
vector<float> to_floats(const Tensor& t) {
    vector<double> values = to_doubles(t);
    return {values.begin(), values.end()};
}
// Makes a tensor on the CPU from the values, rounded to the dtype, and moves it to context.device.
template <class From>
static Tensor from_values(const vector<From>& values, const Shape& shape, DType dtype) {
    if ((int64_t)values.size() != count(shape)) {
        fail("%zu values for shape %s", values.size(), to_string(shape).c_str());
    }
    Tensor t = empty_on(CPU, shape, dtype, INPUTS);
    for (size_t i = 0; i < values.size(); i++) { store(t.data, dtype, i, values[i]); }
    return to_device(t, context.device);
}
Tensor from_floats(const vector<float>& values, const Shape& shape, DType dtype) {
    return from_values(values, shape, dtype);
}
Tensor from_ints(const vector<int>& values, const Shape& shape) {
    return from_values(values, shape, I32);
}

// Counts the elements of `got` with |got - want| > atol + rtol * |want|, and finds the one that is
// furthest beyond. A NaN on either side has an error that is not finite, so it counts as wrong, and
// so does a finite number where an infinite one is wanted.
Comparison compare(const Tensor& got, const Tensor& want, double rtol, double atol) {
    if (got.shape != want.shape) {
        fail("compare: got shape %s, want %s", to_string(got.shape).c_str(),
             to_string(want.shape).c_str());
    }

    vector<double> g = to_doubles(got), w = to_doubles(want);
    Comparison c;
    double worst = 0;
    for (size_t i = 0; i < g.size(); i++) {
        double error = g[i] == w[i] ? 0 : fabs(g[i] - w[i]);  // equal infinities have no error
        double excess = isfinite(error) ? error - rtol * min(fabs(w[i]), DBL_MAX) : INFINITY;
        c.wrong += excess > atol;
        if (error > c.max_abs || isnan(error)) { c.max_abs = error; }  // a NaN stays
        c.sum_abs += error;
        if (excess > worst || c.worst < 0) {
            worst = excess;
            c.worst = i;
            c.got = g[i];
            c.want = w[i];
        }
    }
    return c;
}
string to_string(const Comparison& c) {
    return strprintf("%ld wrong; worst at %ld: got %.9g, want %.9g; largest error %.3g",
                     (long)c.wrong, (long)c.worst, c.got, c.want, c.max_abs);
}

// -------------------------------------------------------------------------------------------------
// for_each(device, n, f) runs f(i) for i = 0 ... n-1 on that device; on META it does nothing. On
// the GPU a thread takes i, i + all threads, ...: neighbours in a warp have neighbours in memory.

#ifdef HAVE_CUDA
template <class F>
__global__ void for_each_kernel(F f, int64_t n) {
    for (int64_t i = thread_number(); i < n; i += (int64_t)gridDim.x * blockDim.x) { f(i); }
}
#endif
template <class F>
static void for_each_on_cpu(int64_t n, const F& f) {
#pragma omp parallel for if (n > 4096)
    for (int64_t i = 0; i < n; i++) { f(i); }
}
template <class F>
static void for_each(Device device, int64_t n, const F& f) {
    if (device == META || n == 0) { return; }
    if (device == CPU) { return for_each_on_cpu(n, f); }
    LAUNCH(for_each_kernel, min(ceil_div(n, 256), 64 * multiprocessors()), 256, f, n);
}

// -------------------------------------------------------------------------------------------------
// Random numbers: Philox 4x32 with 10 rounds (Salmon et al., 2011), a cipher of a counter, so that
// any element can be drawn by itself.

// Enciphers the counter (i, key) with the seed as the cipher's key, and returns four random words.
// Each round multiplies two of the four counter words and mixes in the two words of the cipher's
// key, which grow by the golden ratio and by sqrt(3)-1.
HD void philox(uint32_t out[4], uint64_t seed, uint64_t key, uint64_t i) {
    uint32_t c[4] = {(uint32_t)i, (uint32_t)(i >> 32), (uint32_t)key, (uint32_t)(key >> 32)};
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c[0], p1 = (uint64_t)0xCD9E8D57u * c[2];
        c[0] = (uint32_t)(p1 >> 32) ^ c[1] ^ k0;
        c[1] = (uint32_t)p1;
        c[2] = (uint32_t)(p0 >> 32) ^ c[3] ^ k1;
        c[3] = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int j = 0; j < 4; j++) { out[j] = c[j]; }
}

// Returns the i-th number of the stream: the sum of eight uniform 16-bit numbers, centred and
// scaled to this mean and deviation. The sum is an integer, and each of the two roundings after it
// is IEEE's, so every machine gets the same bits; a formula with log and cos would not give them.
HD inline float normal(uint64_t seed, uint64_t key, uint64_t i, float mean, float std) {
    uint32_t r[4];
    philox(r, seed, key, i);
    int sum = 0;
    for (int j = 0; j < 4; j++) { sum += (int)(r[j] & 0xffff) + (int)(r[j] >> 16); }
    const float inverse_std = 1.8688060e-05f;  // 1 / sqrt(8 * (65536^2 - 1) / 12)
    // fmaf, as the GPU's compiler might fuse a*b+c, and the CPU's might not
    return fmaf(std, (float)(2 * sum - 8 * 65535) * (0.5f * inverse_std), mean);
}

struct FillNormal {
    char* out;
    DType dtype;
    uint64_t seed, key;
    float mean, std;
    HD void operator()(int64_t i) const { store(out, dtype, i, normal(seed, key, i, mean, std)); }
};
void fill_normal(const Tensor& t, uint64_t seed, uint64_t key, float mean, float std) {
    for_each(t.device(), t.size(), FillNormal{t.data, t.dtype, seed, key, mean, std});
}
int random_int(int n, uint64_t seed, uint64_t key, uint64_t i) {
    uint32_t r[4];
    philox(r, seed, key, i);
    return (int)(((uint64_t)r[0] * (uint32_t)n) >> 32);  // bias below n / 2^32
}
uint64_t key_of(const string& name) {  // FNV-1a
    uint64_t h = 0xcbf29ce484222325u;
    for (unsigned char c : name) { h = (h ^ c) * 0x100000001b3u; }
    return h;
}

// -------------------------------------------------------------------------------------------------
// The tape: reverse-mode differentiation as a list of functions run backwards. A step owns (through
// its closure) the tensors that its backward reads, and frees them when it leaves the tape.
//
// One op walked through: y = mul(a, b), where a and b have gradients; later ops read y.
//
// Forward. mul() computes y and calls record(y, {a, b}, backward), where `backward` is its lambda.
// record() gives y a Gradient of its own, still without a value; counts a use of a's Gradient and
// of b's; and appends the step
//     {output: y.gradient, inputs: {a.gradient, b.gradient}, backward}.
//
// Backward. backward(loss) sets the loss's gradient to 1 and takes steps off the tape's
// end. The steps of all ops that read y stand behind ours, so when ours is the last, they have all
// added to y.gradient: its value dy is complete. It is moved out of y.gradient, and
// step.backward(dy) calls
//     add_gradient(a.gradient, mul(dy, b));    // da += dy * b
//     add_gradient(b.gradient, mul(dy, a));    // db += dy * a
// Then the uses of a.gradient and b.gradient fall by one. Where a parameter's reach 0, its gradient
// is complete, and ready() is called: data parallel training starts the all-reduce there. At last
// dy and the step are destroyed; with the step's closure go a and b, if nobody else keeps them.

struct TapeStep {
    GradientPtr output;
    vector<GradientPtr> inputs;
    function<void(const Tensor& dy)> backward;
    const char* range_name;  // of the range that was open when it was recorded ...
    int range_number;        // ... and its innermost_range_number(), for Range()
};
static vector<TapeStep> tape;

static bool needs_gradient(const Tensor& t) { return context.recording && t.gradient; }

static GradientPtr new_gradient(const Tensor& t) {
    auto g = make_shared<Gradient>();
    g->dtype = t.dtype;
    g->shape = t.shape;
    return g;
}
Tensor require_gradient(const Tensor& t) {
    Tensor leaf = detached(t);
    leaf.gradient = new_gradient(leaf);
    return leaf;
}

// Appends a step to the tape and gives y a gradient, unless no input needs one (or NoGrad forbids
// it): then y has none.
void record(Tensor& y, const vector<Tensor>& inputs, function<void(const Tensor&)> backward) {
    TapeStep step;
    for (const Tensor& x : inputs) {
        if (needs_gradient(x)) {
            step.inputs.push_back(x.gradient);
            x.gradient->uses++;
        }
    }
    y.gradient = nullptr;
    if (step.inputs.empty()) { return; }

    y.gradient = new_gradient(y);
    step.output = y.gradient;
    step.backward = move(backward);
    step.range_name = innermost_range();
    step.range_number = innermost_range_number();
    tape.push_back(move(step));
}

// Sums dx over the dimensions in which `shape` is 1 or missing: the transpose of broadcasting. It
// can sum over the last dimension and the first ones. It fails where it would have to sum over
// another one, as from [4,5,8] to [4,1,8].
static Tensor sum_to(const Tensor& dx, const Shape& shape);

// Adds dx, summed to g's shape and cast to its dtype. The first dx is not copied: g shares its
// memory, and so may other gradients; gradient_target() knows.
void add_gradient(const GradientPtr& g, const Tensor& dx) {
    if (!g) { return; }
    if (g->is_parameter) {
        bool accumulate;
        Tensor target = gradient_target(g, &accumulate);
        copy_or_add(target, sum_to(dx, g->shape), accumulate);
        return;
    }
    Tensor d = detached(cast(sum_to(dx, g->shape), g->dtype));
    g->value = g->value ? detached(add(g->value, d)) : d;
}

// Returns the tensor that an op's own kernel shall write a gradient to, and whether to add to what
// it holds. It belongs to g alone, and is row-major.
Tensor gradient_target(const GradientPtr& g, bool* accumulate) {
    if (g->is_parameter) {
        *accumulate = g->filled;
        g->filled = true;
        // Where a 16-bit copy stands for the parameter, products give a 16-bit gradient, so its
        // value has 16 bits, too.
        bool low = context.mode != EAGER && g->low_precision;
        if (!g->value) {
            g->value = empty(g->shape, low ? g->low_precision.dtype : g->dtype, GRADIENTS);
        }
        return g->value;
    }

    *accumulate = (bool)g->value;
    if (!g->value) {
        g->value = empty(g->shape, g->dtype);
    } else if (g->value.memory.use_count() > 1 || !is_row_major(g->value)) {
        // It is shared with another gradient, which adding in place would change, too.
        Tensor own = empty(g->shape, g->dtype);
        copy_or_add(own, g->value, false);
        g->value = own;
    }
    return g->value;
}

// Lets `write` fill, or add to, a tensor of g's dtype. A parameter whose gradient is 16-bit gets it
// from a tensor beside its own.
void write_gradient(const GradientPtr& g,
                    const function<void(const Tensor& target, bool accumulate)>& write) {
    bool accumulate;
    Tensor target = gradient_target(g, &accumulate);
    if (target.dtype == g->dtype) { return write(target, accumulate); }

    Tensor beside = empty(g->shape, g->dtype);
    write(beside, false);
    copy_or_add(target, beside, accumulate);
}
void recompute_by(const Tensor& y, const function<Tensor()>& again) {
    if (context.recompute && y.gradient) { y.gradient->recompute = again; }
}
void backward(const Tensor& loss, float scale) {
    backward_from(loss, add_scalar(zeros(loss.shape, loss.dtype), scale));
}

// Sets y's gradient to dy and runs the tape's steps from its end. A checkpoint's step appends more
// while it runs. Whatever throws leaves its step on the tape.
void backward_from(const Tensor& y, const Tensor& dy) {
    if (!y.gradient) { fail("backward: nothing was recorded for this tensor"); }
    NoGrad no_grad;
    y.gradient->value = detached(dy);

    while (!tape.empty()) {
        TapeStep step = move(tape.back());
        tape.pop_back();
        Range range(step.range_name, step.range_number);
        Tensor d;
        std::swap(d, step.output->value);
        try {
            if (d) { step.backward(d); }  // null: its output did not lead to y
            for (const GradientPtr& g : step.inputs) {
                if (--g->uses == 0 && g->ready) { g->ready(); }
            }
        } catch (...) {  // clear_tape() has to take back this step's uses, too
            tape.push_back(move(step));
            throw;
        }
    }
}

// Returns f(x), recorded as one step that holds x alone. In backward the step runs f again, which
// records f's own steps on top of the tape, and gives dy to the last of them; backward_from() then
// goes on with these. An x without a gradient gets one, so that the step is recorded at all.
Tensor checkpoint(const function<UnaryOp>& f, const Tensor& x) {
    if (!context.recording) { return f(x); }

    Tensor in = x.gradient ? x : require_gradient(x), y;
    {
        NoGrad no_grad;
        y = detached(f(in));
    }

    record(y, {in}, [f, in](const Tensor& dy) {
        Tensor again;
        {
            RestoreContext restore;
            context.recording = true;
            again = f(in);
        }
        add_gradient(again.gradient, dy);
    });
    return y;
}
void clear_tape() {
    for (const TapeStep& step : tape) {
        for (const GradientPtr& g : step.inputs) { g->uses = 0; }
    }
    tape.clear();
}

// -------------------------------------------------------------------------------------------------
// Elementwise operations: out[i] = f(a[i], b[i], c[i]) with strides, so that broadcasting (stride
// 0), transposes and slices need no copies, as in PyTorch's TensorIterator. Such a kernel moves
// some 4 bytes or more per FLOP, so bandwidth alone bounds it, and a chain of k of them moves k
// times the bytes of one fused kernel.

// Declares a function object. A is the type of the arithmetic; s is the constant of Scale,
// AddScalar and Where.
#define FUNCTOR(NAME, ARGUMENTS, EXPRESSION) \
    struct NAME {                            \
        double s = 0;                        \
        template <class A>                   \
        HD A operator() ARGUMENTS const {    \
            return EXPRESSION;               \
        }                                    \
    };
FUNCTOR(Copy, (A a), a)
FUNCTOR(Scale, (A a), a*(A)s)
FUNCTOR(AddScalar, (A a), a + (A)s)
FUNCTOR(Exp, (A a), exp(a))
FUNCTOR(Log, (A a), log(a))
FUNCTOR(Square, (A a), a* a)
FUNCTOR(Sqrt, (A a), sqrt(a))
FUNCTOR(Rsqrt, (A a), (A)1 / sqrt(a))
FUNCTOR(Sigmoid, (A a), (A)1 / ((A)1 + exp(-a)))
FUNCTOR(Relu, (A a), a <= 0 ? (A)0 : a)  // NaN stays NaN, as in PyTorch
FUNCTOR(Add, (A a, A b), a + b)
FUNCTOR(Sub, (A a, A b), a - b)
FUNCTOR(Mul, (A a, A b), a* b)
FUNCTOR(Div, (A a, A b), a / b)
FUNCTOR(Larger, (A a, A b), a > b || a != a ? a : b)  // a NaN wins, as in PyTorch
FUNCTOR(Where, (A mask, A a), mask != 0 ? a : (A)s)
FUNCTOR(GreaterEqual, (A a, A b), (A)(a >= b))
FUNCTOR(LogBackward, (A x, A dy), dy / x)
FUNCTOR(SquareBackward, (A x, A dy), (A)2 * x * dy)
FUNCTOR(SqrtBackward, (A y, A dy), (A)0.5 * dy / y)
FUNCTOR(RsqrtBackward, (A y, A dy), (A)-0.5 * y * y * y * dy)  // dy/dx = -x^(-3/2)/2
FUNCTOR(SigmoidBackward, (A y, A dy), y*((A)1 - y) * dy)
// d(a/b)/db = -(a/b)/b
FUNCTOR(DivBackward, (A y, A b, A dy), -dy* y / b)
// puts dy into the one column of each row that `index` names, 0 elsewhere
FUNCTOR(SelectEqual, (A column, A index, A dy), column == index ? dy : (A)0)
#undef FUNCTOR

struct Operand {
    char* data;
    DType dtype;
    int64_t stride[MAX_DIMS];  // in elements; 0: broadcast along this dimension
};
struct Loop {
    int64_t n;                // elements of out
    int dims;                 // after joining; at least 1
    int64_t shape[MAX_DIMS];  // out's, joined
    Operand out, in[3];
};

// Returns t as an operand of `shape`: its strides are 0 where it is broadcast. Fails where t cannot
// be broadcast so.
static Operand operand(const Tensor& t, const Shape& shape) {
    Operand o{t.data, t.dtype, {}};
    const int missing = (int)shape.size() - (int)t.shape.size();
    for (int d = missing; d < (int)shape.size(); d++) {
        int64_t own = t.shape[d - missing];
        if (d < 0 || d >= MAX_DIMS || (own != 1 && own != shape[d])) {
            fail("cannot broadcast %s to %s (at most five dimensions)", to_string(t.shape).c_str(),
                 to_string(shape).c_str());
        }
        o.stride[d] = own == 1 ? 0 : t.stride[d - missing];
    }
    return o;
}
// Broadcasts the inputs to out's shape and returns the loop over its elements, with dimensions
// joined where all operands step through them alike, since a kernel divides once per dimension.
//
// Example: out, a and b [4,8,16], all row-major, have the strides (128, 16, 1). One step in a
// dimension is as far as all steps of the next one, 16 = 16 * 1 and 128 = 8 * 16, for all three
// operands: one dimension of 512 with the stride 1. If b is broadcast over the first dimension, it
// has (0, 16, 1): the last two still join, but 0 is not 8 * 16. So the loop is [4,128], b's strides
// are (0, 1), and those of the others (128, 1).
template <size_t N>
static Loop loop_over(const Tensor& out, const Tensor (&inputs)[N]) {
    Loop loop{};
    loop.n = out.size();
    loop.out = operand(out, out.shape);
    vector<Operand*> operands = {&loop.out};
    for (size_t k = 0; k < N; k++) {
        loop.in[k] = operand(inputs[k], out.shape);
        operands.push_back(&loop.in[k]);
    }

    loop.dims = 1;
    loop.shape[0] = 1;
    for (size_t d = 0; d < out.shape.size(); d++) {
        int64_t size = out.shape[d];
        if (size == 1) { continue; }  // nobody steps along it

        // `last` is the loop's last dimension so far. Dimension d joins it, or becomes the next;
        // strides move to the front, as last <= d.
        int last = loop.dims - 1;
        auto joins = [&](Operand* o) { return o->stride[last] == o->stride[d] * size; };
        bool is_first = loop.shape[last] == 1;
        if (!is_first && !std::all_of(operands.begin(), operands.end(), joins)) {
            last++;
            loop.dims++;
            loop.shape[last] = 1;
        }
        for (Operand* o : operands) { o->stride[last] = o->stride[d]; }
        loop.shape[last] *= size;
    }
    return loop;
}

// f of the w-th neighbours of its N inputs.
template <size_t N, int W, class F, class A>
HD A apply(const F& f, const A (&x)[N][W], int w) {
    if constexpr (N == 1) { return f(x[0][w]); }
    if constexpr (N == 2) { return f(x[0][w], x[1][w]); }
    if constexpr (N == 3) { return f(x[0][w], x[1][w], x[2][w]); }
}

// Reads W neighbours along the last dimension from element `at` on, by one access where they lie
// side by side (step 1); step 0 gives one value W times.
template <int W, class A>
HD inline void load_neighbours(A (&x)[W], const Operand& o, int64_t step, int64_t at) {
    with_elements(o.data, o.dtype, [&](auto* elements) {
        if (W > 1 && step == 1) {
            auto pack = load_pack<W>(elements + at);
            for (int w = 0; w < W; w++) { x[w] = pack.x[w]; }
            return;
        }
        for (int w = 0; w < W; w++) {
            x[w] = w > 0 && step == 0 ? x[0] : (A)elements[at + w * step];
        }
    });
}
// Writes W neighbours. If W > 1 they lie side by side: fits_packs() has looked.
template <int W, class A>
HD inline void store_neighbours(const Operand& o, int64_t at, const A (&x)[W]) {
    with_elements(o.data, o.dtype, [&](auto* elements) {
        Pack<std::decay_t<decltype(*elements)>, W> pack;
        for (int w = 0; w < W; w++) { pack.x[w] = x[w]; }
        store_pack(elements + at, pack);
    });
}

// Computes the v-th W neighbours of out: loads W of each input, applies f to each, stores W. One
// index calculation serves all W, and runs in 32 bits, since a division of 64 takes several times
// as long.
template <int N, int W, class A, class F>
struct Elementwise {
    F f;
    Loop loop;
    HD void operator()(int64_t v) const {
        // Take the index apart, from the last dimension to the first: offsets in elements.
        int last = loop.dims - 1;
        int64_t in_at[3] = {}, out_at = 0;
        uint32_t rest = (uint32_t)v * W;
        for (int d = last; d >= 0; d--) {
            uint32_t size = (uint32_t)loop.shape[d], next = d > 0 ? rest / size : 0;
            uint32_t index = rest - next * size;
            out_at += index * loop.out.stride[d];
            for (int k = 0; k < N; k++) { in_at[k] += index * loop.in[k].stride[d]; }
            rest = next;
        }

        A x[N][W], y[W];
        for (int k = 0; k < N; k++) {
            load_neighbours(x[k], loop.in[k], loop.in[k].stride[last], in_at[k]);
        }
        for (int w = 0; w < W; w++) { y[w] = apply(f, x, w); }
        store_neighbours(loop.out, out_at, y);
    }
};

// Says whether every operand has W aligned neighbours side by side (or one value for all of them).
static bool fits_packs(const Loop& loop, size_t inputs, int W) {
    int last = loop.dims - 1;
    auto fits = [&](const Operand& o) {
        bool ok =
            o.stride[last] == 1 && (uintptr_t)o.data % min<size_t>(16, W * size_of(o.dtype)) == 0;
        for (int d = 0; d < last; d++) { ok = ok && o.stride[d] % W == 0; }
        return ok;
    };
    bool ok = loop.shape[last] % W == 0 && fits(loop.out);
    for (size_t k = 0; k < inputs; k++) {
        ok = ok && (loop.in[k].stride[last] == 0 || fits(loop.in[k]));
    }
    return ok;
}

// out = f(inputs), broadcast and cast; fp64 on the CPU only. Fails above 2^32 elements.
template <class F, size_t N>
static void elementwise_into(const F& f, const Tensor& out, const Tensor (&inputs)[N]) {
    Loop loop = loop_over(out, inputs);
    if (loop.n == 0 || out.device() == META) { return; }
    if (loop.n > (int64_t)1 << 32) {
        fail("%s: more elements than 32 bits can index", to_string(out.shape).c_str());
    }

    bool f64 = out.dtype == F64;
    for (const Tensor& t : inputs) { f64 = f64 || t.dtype == F64; }
    if (f64) { return for_each_on_cpu(loop.n, Elementwise<N, 1, double, F>{f, loop}); }
    if (out.device() == CPU && fits_packs(loop, N, 16)) {  // 16: the compiler makes vectors of it
        return for_each_on_cpu(loop.n / 16, Elementwise<N, 16, float, F>{f, loop});
    }
    if (fits_packs(loop, N, 4)) {
        return for_each(out.device(), loop.n / 4, Elementwise<N, 4, float, F>{f, loop});
    }
    for_each(out.device(), loop.n, Elementwise<N, 1, float, F>{f, loop});
}

// Returns the shape to which PyTorch broadcasts both: the shorter one gets leading dimensions of 1,
// and of each pair of sizes one is 1, or they are equal. operand() finds a mismatch.
static Shape broadcast(const Shape& a, const Shape& b) {
    if (a.size() < b.size()) { return broadcast(b, a); }
    Shape shape = a;
    size_t missing = a.size() - b.size();
    for (size_t d = 0; d < b.size(); d++) {
        if (shape[missing + d] == 1) { shape[missing + d] = b[d]; }
    }
    return shape;
}

// Returns f(inputs) as a new tensor of their broadcast shape; records nothing.
template <class F, size_t N>
static Tensor elementwise(const F& f, DType dtype, const Tensor (&inputs)[N], Source at = here()) {
    Shape shape = inputs[0].shape;
    for (const Tensor& t : inputs) { shape = broadcast(shape, t.shape); }
    Tensor y = empty_on(inputs[0].device(), shape, dtype, ACTIVATIONS, at);
    elementwise_into(f, y, inputs);
    return y;
}

// PyTorch's promotion: the wider of two floating types; bf16 with fp16 gives fp32.
static DType promote(DType a, DType b) {
    if (a == b) { return a; }
    return a == F64 || b == F64 ? F64 : F32;
}
// Autocast's list of ops that run in fp32: exp, log, pow, rsqrt, sum, ... (mean and sigmoid are not
// on it).
static Tensor fp32_operand(const Tensor& a) {
    return a.dtype == BF16 || a.dtype == F16 ? cast(a, F32) : a;
}

void copy_or_add(const Tensor& to, const Tensor& from, bool accumulate) {
    if (accumulate) { return elementwise_into(Add(), to, {to, from}); }
    elementwise_into(Copy(), to, {from});
}

void scale_in_place(const Tensor& t, float s) { elementwise_into(Scale{s}, t, {t}); }
void scale_in_place(const Tensor& t, const Tensor& s) { elementwise_into(Mul(), t, {t, s}); }

Tensor passes_gradient(Tensor y, const Tensor& a) {
    record(y, {a}, [ga = a.gradient](const Tensor& dy) { add_gradient(ga, dy); });
    return y;
}
Tensor cast(const Tensor& a, DType dtype) {
    return a.dtype == dtype ? a : passes_gradient(elementwise(Copy(), dtype, {a}), a);
}

// da = dy, db = dy: each summed to its operand's shape, as all gradients are.
Tensor add(const Tensor& a, const Tensor& b) {
    Tensor y = elementwise(Add(), promote(a.dtype, b.dtype), {a, b});
    record(y, {a, b}, [ga = a.gradient, gb = b.gradient](const Tensor& dy) {
        add_gradient(ga, dy);
        add_gradient(gb, dy);
    });
    return y;
}
// da = dy, db = -dy.
Tensor sub(const Tensor& a, const Tensor& b) {
    Tensor y = elementwise(Sub(), promote(a.dtype, b.dtype), {a, b});
    record(y, {a, b}, [ga = a.gradient, gb = b.gradient](const Tensor& dy) {
        add_gradient(ga, dy);
        if (gb) { add_gradient(gb, scale(dy, -1)); }
    });
    return y;
}
// da = dy * b, db = dy * a. An operand is kept only for the other's gradient: a constant's partner
// is not. The tape's comment walks through this op.
Tensor mul(const Tensor& a, const Tensor& b) {
    Tensor y = elementwise(Mul(), promote(a.dtype, b.dtype), {a, b});
    Tensor keep_a = needs_gradient(b) ? a : Tensor(), keep_b = needs_gradient(a) ? b : Tensor();
    record(y, {a, b}, [keep_a, keep_b, ga = a.gradient, gb = b.gradient](const Tensor& dy) {
        if (ga) { add_gradient(ga, mul(dy, keep_b)); }
        if (gb) { add_gradient(gb, mul(dy, keep_a)); }
    });
    return y;
}
// da = dy / b, db = -dy * y / b.
Tensor div(const Tensor& a, const Tensor& b) {
    Tensor y = elementwise(Div(), promote(a.dtype, b.dtype), {a, b});
    Tensor keep_y = needs_gradient(b) ? detached(y) : Tensor();
    record(y, {a, b}, [keep_y, b, ga = a.gradient, gb = b.gradient](const Tensor& dy) {
        if (ga) { add_gradient(ga, div(dy, b)); }
        if (gb) { add_gradient(gb, elementwise(DivBackward(), dy.dtype, {keep_y, b, dy})); }
    });
    return y;
}
Tensor scale(const Tensor& a, double s) {
    Tensor y = elementwise(Scale{s}, a.dtype, {a});
    record(y, {a}, [s, ga = a.gradient](const Tensor& dy) { add_gradient(ga, scale(dy, s)); });
    return y;
}
Tensor add_scalar(const Tensor& a, double s) {
    return passes_gradient(elementwise(AddScalar{s}, a.dtype, {a}), a);
}

enum Keeps { KEEPS_Y, KEEPS_X };
// Returns y = f(x) and records it: dx = backward(y, dy), or backward(x, dy). The tape keeps the one
// that f's derivative needs. at: the op, for the memory log.
template <class F, class Backward>
static Tensor recorded(const F& f, const Backward& backward, Keeps which, const Tensor& x,
                       Source at = here()) {
    Tensor y = elementwise(f, x.dtype, {x}, at), keep = which == KEEPS_Y ? y : detached(x);
    record(y, {x}, [keep, backward, gx = x.gradient](const Tensor& dy) {
        add_gradient(gx, elementwise(backward, keep.dtype, {keep, dy}));
    });
    return y;
}
Tensor exp(const Tensor& a) { return recorded(Exp(), Mul(), KEEPS_Y, fp32_operand(a)); }
Tensor rsqrt(const Tensor& a) {
    return recorded(Rsqrt(), RsqrtBackward(), KEEPS_Y, fp32_operand(a));
}
Tensor sqrt(const Tensor& a) { return recorded(Sqrt(), SqrtBackward(), KEEPS_Y, a); }
Tensor sigmoid(const Tensor& a) { return recorded(Sigmoid(), SigmoidBackward(), KEEPS_Y, a); }
// Backward: dy where y is not 0.
Tensor relu(const Tensor& a) { return recorded(Relu(), Where{0}, KEEPS_Y, a); }
Tensor log(const Tensor& a) { return recorded(Log(), LogBackward(), KEEPS_X, fp32_operand(a)); }
Tensor square(const Tensor& a) {
    return recorded(Square(), SquareBackward(), KEEPS_X, fp32_operand(a));
}

// y = a where the mask is not 0, else `otherwise`; da = dy where the mask is not 0, else 0.
Tensor where(const Tensor& mask, const Tensor& a, float otherwise) {
    Tensor y = elementwise(Where{otherwise}, a.dtype, {mask, a});
    record(y, {a}, [mask, ga = a.gradient](const Tensor& dy) {
        add_gradient(ga, elementwise(Where{0}, dy.dtype, {mask, dy}));
    });
    return y;
}
Tensor greater_equal(const Tensor& a, const Tensor& b) {
    return elementwise(GreaterEqual(), U8, {a, b});
}
struct Arange {
    int* out;
    HD void operator()(int64_t i) const { out[i] = (int)i; }
};
Tensor arange(int64_t n) {
    Tensor t = empty({n}, I32);
    for_each(t.device(), n, Arange{t.as<int>()});
    return t;
}

// -------------------------------------------------------------------------------------------------
// Views: another shape and other strides on the same memory. reshape and contiguous copy what is
// not row-major; interleave_last always copies.

Tensor contiguous(const Tensor& a) {
    return is_row_major(a) ? a : passes_gradient(elementwise(Copy(), a.dtype, {a}), a);
}

// Returns a's elements in another shape: a view, or a view of a row-major copy.
Tensor reshape(const Tensor& a, const Shape& shape) {
    Tensor source = contiguous(a), y = view(source, 0, shape);
    if (count(shape) != a.size()) {
        fail("reshape %s to %s", to_string(a.shape).c_str(), to_string(shape).c_str());
    }
    record(y, {source}, [from = source.shape, g = source.gradient](const Tensor& dy) {
        add_gradient(g, reshape(dy, from));
    });
    return y;
}
// Returns a view with the dimensions i and j exchanged; so is its gradient.
Tensor transpose(const Tensor& a, int i, int j) {
    Tensor y = a;
    std::swap(y.shape[i], y.shape[j]);
    std::swap(y.stride[i], y.stride[j]);
    record(y, {a},
           [i, j, ga = a.gradient](const Tensor& dy) { add_gradient(ga, transpose(dy, i, j)); });
    return y;
}

// Returns the view a[..., start::step]. Backward does as autograd does: it makes zeros of a's shape
// and copies dy into their slice.
Tensor slice_last(const Tensor& a, int64_t start, int64_t step) {
    Tensor y = a;
    y.data += start * a.stride.back() * size_of(a.dtype);
    y.shape.back() = (a.shape.back() - start + step - 1) / step;
    y.stride.back() *= step;
    record(y, {a}, [start, step, shape = a.shape, ga = a.gradient](const Tensor& dy) {
        Tensor da = zeros(shape, dy.dtype);
        elementwise_into(Copy(), slice_last(da, start, step), {dy});
        add_gradient(ga, da);
    });
    return y;
}

// Returns a0 b0 a1 b1 ... along the last dimension, in two copies; the gradients are slices of dy.
Tensor interleave_last(const Tensor& a, const Tensor& b) {
    Shape shape = a.shape;
    shape.back() *= 2;
    Tensor y = empty(shape, promote(a.dtype, b.dtype));
    elementwise_into(Copy(), slice_last(y, 0, 2), {a});
    elementwise_into(Copy(), slice_last(y, 1, 2), {b});
    record(y, {a, b}, [ga = a.gradient, gb = b.gradient](const Tensor& dy) {
        add_gradient(ga, slice_last(dy, 0, 2));
        add_gradient(gb, slice_last(dy, 1, 2));
    });
    return y;
}

// -------------------------------------------------------------------------------------------------
// Reductions: x [R,C] -> [R] along rows, or -> [C] down columns. On the GPU sums are fp32.

struct Sum : Add {
    HD float start() const { return 0; }
};
struct Max : Larger {
    HD float start() const { return -INFINITY; }
};

#ifdef HAVE_CUDA
template <class F>
__device__ float over_warp(float x) {
    for (int o = WARP / 2; o > 0; o /= 2) { x = F()(__shfl_xor_sync(0xffffffff, x, o), x); }
    return x;
}
// out [R] = factor * (f over the C columns of each row of x [R,C]): one block per row, which reads
// four columns at a time where the addresses allow it.
template <class F>
__global__ void reduce_rows_kernel(F f, char* out, DType out_type, const char* x, DType type,
                                   int64_t C, float factor) {
    float r = f.start();
    if (C % 4 == 0 && (uintptr_t)x % 16 == 0) {
        for (int64_t c = 4 * threadIdx.x; c < C; c += 4 * blockDim.x) {
            float four[4];
            load_neighbours(four, {(char*)x, type, {}}, 1, blockIdx.x * C + c);
            for (float v : four) { r = f(v, r); }
        }
    } else {
        for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
            r = f(load<float>(x, type, blockIdx.x * C + c), r);
        }
    }
    r = over_block<over_warp<F>>(r, f.start());
    if (threadIdx.x == 0) { store(out, out_type, blockIdx.x, r * factor); }
}
constexpr int ROWS_AT_A_TIME = 8;
// out [C] = the sums of the columns of x [R,C]. A block is 32 threads wide, so that a warp reads 32
// neighbours of one row, and takes 8 rows at a time: thread (x, y) sums rows y, y + 8, ...
__global__ void sum_columns_kernel(char* out, DType out_type, const char* x, DType type, int64_t R,
                                   int64_t C) {
    __shared__ float shared[ROWS_AT_A_TIME][WARP];
    int64_t c = blockIdx.x * (int64_t)WARP + threadIdx.x;
    float sum = 0;
    if (c < C) {
        for (int64_t r = threadIdx.y; r < R; r += ROWS_AT_A_TIME) {
            sum += load<float>(x, type, r * C + c);
        }
    }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();  // all eight partial sums must be there
    if (threadIdx.y == 0 && c < C) {
        for (int k = 1; k < ROWS_AT_A_TIME; k++) { sum += shared[k][threadIdx.x]; }
        store(out, out_type, c, sum);
    }
}
// out [R] = the first column of each row of x [R,C] that holds the row's maximum; C if it is NaN.
__global__ void argmax_rows_kernel(int* out, const char* x, DType type, const char* max,
                                   int64_t C) {
    __shared__ int first;
    if (threadIdx.x == 0) { first = (int)C; }
    __syncthreads();  // `first` must be set before anyone lowers it
    float m = load<float>(max, type, blockIdx.x);
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
        if (load<float>(x, type, blockIdx.x * C + c) == m) {
            atomicMin(&first, (int)c);
            break;
        }
    }
    __syncthreads();  // all candidates must have been offered
    if (threadIdx.x == 0) { out[blockIdx.x] = first; }
}
// Threads of a block that shares a row of C columns: whole warps, at most 256.
static int threads_of_row(int64_t C) { return min(256, WARP * ceil_div(C, WARP)); }
#endif

// y[i] = factor * (f over k of x[i * step + k * k_step]).
template <class F>
static void reduce_cpu(const F& f, const Tensor& y, const Tensor& x, int64_t step, int64_t k_step,
                       double factor) {
    int64_t n = y.size(), K = x.size() / n;
#pragma omp parallel for if (n * K > 16384)
    for (int64_t i = 0; i < n; i++) {
        double value = f.start();
        for (int64_t k = 0; k < K; k++) {
            value = f(load<double>(x.data, x.dtype, i * step + k * k_step), value);
        }
        store(y.data, y.dtype, i, value * factor);
    }
}
// Returns factor * (f over a's last dimension), which becomes 1.
template <class F>
static Tensor reduce_last(const F& f, const Tensor& a, double factor) {
    Shape shape = a.shape;
    shape.back() = 1;
    Tensor x = contiguous(a), y = empty_on(a.device(), shape, a.dtype);
    int64_t R = y.size(), C = a.dim(-1);
    if (R == 0) { return y; }
    if (y.device() == CUDA) {
        LAUNCH(reduce_rows_kernel, R, threads_of_row(C), f, y.data, y.dtype, x.data, x.dtype, C,
               factor);
    }
    if (y.device() == CPU) { reduce_cpu(f, y, x, C, 1, factor); }
    return y;
}
// Returns a, of [..., shape], summed over the dimensions that `shape` does not have.
static Tensor sum_columns(const Tensor& a, const Shape& shape) {
    Tensor x = contiguous(a), y = empty_on(a.device(), shape, a.dtype);
    int64_t C = y.size();
    if (C == 0) { return y; }
    if (y.device() == CUDA) {
        LAUNCH(sum_columns_kernel, ceil_div(C, WARP), dim3(WARP, ROWS_AT_A_TIME), y.data, y.dtype,
               x.data, x.dtype, x.size() / C, C);
    }
    if (y.device() == CPU) { reduce_cpu(Sum(), y, x, 1, C, 1); }
    return y;
}
static Tensor sum_to(const Tensor& dx, const Shape& shape) {  // told above add_gradient()
    if (dx.shape == shape) { return dx; }
    Tensor d = dx;
    if (!shape.empty() && shape.back() == 1 && d.shape.back() != 1) {
        d = reduce_last(Sum(), d, 1);
    }
    if (d.size() == count(shape)) { return reshape(d, shape); }

    auto first = shape.begin();
    while (first != shape.end() && *first == 1) { first++; }
    if (!std::equal(first, shape.end(), d.shape.end() - (shape.end() - first))) {
        fail("backward: cannot sum a gradient to %s", to_string(shape).c_str());
    }
    return sum_columns(d, shape);
}

// Returns factor * (the sum over a's last dimension), recorded: da = factor * dy in all its
// columns.
static Tensor sum_times(const Tensor& a, double factor) {
    Tensor y = reduce_last(Sum(), a, factor);
    record(y, {a}, [factor, ga = a.gradient](const Tensor& dy) {
        Tensor da = empty(ga->shape, dy.dtype);
        elementwise_into(Scale{factor}, da, {dy});
        add_gradient(ga, da);
    });
    return y;
}
Tensor sum_last(const Tensor& a) { return sum_times(fp32_operand(a), 1); }
Tensor mean_last(const Tensor& a) { return sum_times(a, 1.0 / a.dim(-1)); }
Tensor mean_all(const Tensor& a) { return reshape(mean_last(reshape(a, {a.size()})), {}); }

// index = the first column of each row of x [...,C] that holds the row's maximum y. Where y is NaN:
// C on the GPU, C - 1 on the CPU.
static void argmax_last(const Tensor& index, const Tensor& x, const Tensor& y) {
    int64_t R = y.size(), C = x.dim(-1);
    if (y.device() == CUDA && R > 0) {
        LAUNCH(argmax_rows_kernel, R, threads_of_row(C), index.as<int>(), x.data, x.dtype, y.data,
               C);
    }
    if (y.device() == CPU) {
        for (int64_t r = 0; r < R; r++) {
            double max = load<double>(y.data, y.dtype, r);
            int64_t c = 0;
            while (c < C - 1 && load<double>(x.data, x.dtype, r * C + c) != max) { c++; }
            index.as<int>()[r] = (int)c;
        }
    }
}
// y = the maximum over the last dimension. Its gradient goes to the first column that holds it.
Tensor max_last(const Tensor& a) {
    Tensor y = reduce_last(Max(), a, 1);
    if (!needs_gradient(a)) { return y; }
    Tensor index = empty(y.shape, I32);
    argmax_last(index, contiguous(a), y);
    record(y, {a}, [index, C = a.dim(-1), ga = a.gradient](const Tensor& dy) {
        add_gradient(ga, elementwise(SelectEqual(), dy.dtype, {arange(C), index, dy}));
    });
    return y;
}

// -------------------------------------------------------------------------------------------------
// Lookups. gather_rows: y[n,:] = table[index[n],:]. Its backward adds up the rows of dy that share
// an index. It does so in the order of n, without atomics, to give the same bits in every run: the
// first n with an index sums all its rows.

template <class T>
struct GatherRows {
    T* y;            // [N,C]
    const T* table;  // [V,C]
    const int* index;
    int64_t C;
    HD void operator()(int64_t i) const {
        int64_t n = i / C, c = i % C;
        y[i] = table[index[n] * C + c];
    }
};

// Links the places of each index into a list, for the first of them to walk.
//
// Example: the tokens 7 3 7 (N = 3) give
//     next     2 N N    the next place with the same token; N: there is none
//     earlier  0 0 1    whether an earlier place has the same token
// Places 0 and 1 have no earlier one, so they sum: place 0 the rows 0 and 2, place 1 row 1. Place 2
// leaves its row to place 0.
struct SameIndex {
    int *next, *earlier;  // [N] each
    const int* index;     // [N]
    int64_t N;
    HD void operator()(int64_t n) const {
        int nearest = (int)N, before = 0;
#ifdef __CUDA_ARCH__
#pragma unroll 16  // or it waits for each load: 0.16 ms for 4096 tokens
#endif
        for (int m = (int)N - 1; m >= 0; m--) {
            bool same = index[m] == index[n];
            nearest = same && m > n ? m : nearest;
            before = before || (same && m < n);
        }
        next[n] = nearest;
        earlier[n] = before;
    }
};
// dtable[index[n],:] += the sum of dy's rows that share this index, if n is its first place. One
// call does one column of one n.
template <class T>
struct GatherRowsBackward {
    T* dtable;    // [V,C]
    const T* dy;  // [N,C]
    const int *index, *next, *earlier;
    int64_t N, C;
    HD void operator()(int64_t i) const {
        int64_t first = i / C, c = i % C;
        if (earlier[first]) { return; }
        T* to = dtable + index[first] * C + c;
        Wide<T> sum = *to;
        for (int64_t n = first; n < N; n = next[n]) { sum += dy[n * C + c]; }
        *to = sum;
    }
};

// Adds dy's rows to those of dtable. SameIndex says which rows of dy share an index.
static void gather_rows_backward(const Tensor& dtable, const Tensor& dy, const Tensor& index) {
    int64_t N = index.size(), C = dtable.dim(1);
    Tensor links = empty({2, N}, I32, WORKSPACE);
    const int* tokens = index.as<int>();
    int *next = links.as<int>(), *earlier = next + N;
    for_each(links.device(), N, SameIndex{next, earlier, tokens, N});
    with_type(dy.dtype, [&](auto zero) {
        using F = GatherRowsBackward<decltype(zero)>;
        F f{dtable.as(zero), dy.as(zero), tokens, next, earlier, N, C};
        for_each(dtable.device(), dy.size(), f);
    });
}

// y[n,:] = table[index[n],:]; dtable[v,:] is the sum of dy[n,:] over all n with index[n] = v.
Tensor gather_rows(const Tensor& table, const Tensor& index) {
    int64_t C = table.dim(1);
    Shape shape = index.shape;
    shape.push_back(C);
    Tensor y = empty(shape, table.dtype);
    with_type(y.dtype, [&](auto zero) {
        using F = GatherRows<decltype(zero)>;
        for_each(y.device(), y.size(), F{y.as(zero), table.as(zero), index.as<int>(), C});
    });
    record(y, {table}, [index, g = table.gradient](const Tensor& dy_in) {
        Tensor dy = contiguous(cast(dy_in, g->dtype));
        write_gradient(g, [&](const Tensor& dtable, bool accumulate) {
            if (!accumulate) { fill_zero(dtable); }
            gather_rows_backward(dtable, dy, index);
        });
    });
    return y;
}

struct PickLast {
    char* y;
    const char* x;
    DType dtype;
    const int* index;
    int64_t V;
    HD void operator()(int64_t i) const {
        store(y, dtype, i, load<double>(x, dtype, i * V + index[i]));
    }
};
// y[n] = a[n, index[n]]; backward scatters dy to these columns of zeros.
Tensor pick_last(const Tensor& a, const Tensor& index) {
    int64_t n = index.size(), V = a.dim(-1);
    Tensor x = contiguous(a), y = empty({n, 1}, a.dtype);
    for_each(y.device(), n, PickLast{y.data, x.data, x.dtype, index.as<int>(), V});
    record(y, {a}, [index, n, V, ga = a.gradient](const Tensor& dy) {
        add_gradient(ga,
                     elementwise(SelectEqual(), dy.dtype, {arange(V), reshape(index, {n, 1}), dy}));
    });
    return y;
}

// -------------------------------------------------------------------------------------------------
// Whether a run's memory fits

// Returns how many bytes `run` would hold at its peak, beyond what is held before. It runs on META,
// where nothing is computed, but every tensor is counted as the device would have it. Not counted
// are cuBLAS's workspace of 32 MiB, what it takes while it tries its kernels (a copy of a product's
// result), NCCL's buffers and the workspace of flash's backward.
size_t planned_peak(const Job& run) {
    Planning planning;
    // before.device, not planned_for: within another Planning (memory_profiling on a CPU) it is
    // META, so no fp32 copies are counted, as on a GPU.
    context.widening = multiplies_copies(planning.before.device, matmul_dtype());
    size_t before = memory_use(META).now;
    reset_peak(META);
    run();
    return memory_use(META).peak - before;
}

// Runs f if it should fit. Returns 0 if it ran, else the bytes it needs: `needs` if they exceed
// what is free by more than `held`, or if memory ran out on the way, in which case the tape is
// cleared and a trace ends.
size_t run_if_fits(const string& row, size_t needs, const Job& f, size_t held) {
    if (needs > held && needs - held > available_memory(context.device)) { return needs; }
    progress("%s", row.c_str());
    try {
        f();
    } catch (const OutOfMemory& e) {
        clear_tape();
        stop_tracing();
        note("%s: %s", row.c_str(), e.what());
        return max<size_t>(needs, 1);
    }
    return 0;
}
