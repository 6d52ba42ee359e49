// lib/matmul.cu: matrix products. [M,K] x [K,N] costs 2MNK FLOPs and at least (MK + KN + MN)
// elements of traffic. The GPU's products come from cuBLAS, the CPU's from OpenBLAS.
#include "gpu.h"
#ifdef __CUDACC__
#include <cublas_v2.h>
#endif
#ifdef HAVE_OPENBLAS
#include <cblas.h>
#include <sys/resource.h>
#endif

DType matmul_dtype(Precision precision) {
    return precision == PREC_BF16 || precision == PREC_PURE_BF16 ? BF16
           : precision == PREC_FP16                              ? F16
                                                                 : F32;
}
DType weight_dtype(Precision precision) { return precision == PREC_PURE_BF16 ? BF16 : F32; }

struct Matrix {  // the last two dimensions of a tensor; the others are a batch
    char* data;
    DType dtype;
    // ld, batch_stride: elements from one row, one matrix, to the next
    int64_t rows, cols, ld, batch, batch_stride;
};
struct Product {  // C = alpha op(A) op(B) + beta C, row-major; K: the length of its sums
    Matrix C, A, B;
    bool transpose_a, transpose_b;
    int64_t K;
    double alpha, beta;
};

static Matrix matrix_of(const Tensor& t) {
    if (!is_row_major(t)) { fail("gemm: %s is not row-major", to_string(t.shape).c_str()); }
    int64_t rows = t.dim(-2), cols = t.dim(-1);
    return {t.data,     t.dtype, rows, cols, cols, count(Shape(t.shape.begin(), t.shape.end() - 2)),
            rows * cols};
}

#ifdef __CUDACC__
static void cublas_check(cublasStatus_t status, const char* call, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) { return; }
    std::string what =
        strprintf("lib/matmul.cu:%d: %s: %s", line, call, cublasGetStatusString(status));
    if (status == CUBLAS_STATUS_ALLOC_FAILED) { throw OutOfMemory(0, what + ": out of memory"); }
    throw Failure(1, what);
}
#define CUBLAS_CHECK(call) cublas_check(call, #call, __LINE__)

static cublasHandle_t new_cublas() {
    cublasHandle_t h;
    CUBLAS_CHECK(cublasCreate(&h));
    CUBLAS_CHECK(cublasSetStream(h, stream()));
    // Or cuBLAS may add up the parts of a long sum in fp16.
    CUBLAS_CHECK(cublasSetMathMode(h, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
    // The workspace is ours (NVIDIA advises 32 MiB on Hopper): seen by the memory log, and fit for
    // graph capture.
    static const Tensor workspace = empty_on(CUDA, {32 << 20}, U8, WORKSPACE);
    CUBLAS_CHECK(cublasSetWorkspace(h, workspace.data, workspace.size()));
    return h;
}
static cublasHandle_t cublas() {
    static const cublasHandle_t handle = new_cublas();
    return handle;
}
void start_cublas() { cublas(); }
static cudaDataType_t cuda_type(DType t) {
    return t == BF16 ? CUDA_R_16BF : t == F16 ? CUDA_R_16F : CUDA_R_32F;
}

// By cuBLAS. It is column-major: what it sees in our memory is every matrix transposed, and C^T =
// op(B)^T op(A)^T.
static void cublas_product(const Product& p, cublasHandle_t handle = cublas()) {
    const Matrix &C = p.C, &A = p.A, &B = p.B;
    const float alpha = (float)p.alpha, beta = (float)p.beta;
    cublasComputeType_t compute = context.precision == TF32 && A.dtype == F32
                                      ? CUBLAS_COMPUTE_32F_FAST_TF32
                                      : CUBLAS_COMPUTE_32F;
    auto multiply = [&](cublasGemmAlgo_t kernel) {
        return cublasGemmStridedBatchedEx(handle, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                                          p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, (int)C.cols,
                                          (int)C.rows, (int)p.K, &alpha, B.data, cuda_type(B.dtype),
                                          (int)B.ld, B.batch_stride, A.data, cuda_type(A.dtype),
                                          (int)A.ld, A.batch_stride, &beta, C.data,
                                          cuda_type(C.dtype), (int)C.ld, C.batch_stride,
                                          (int)C.batch, compute, kernel);
    };
#if CUBLAS_VERSION >= 130100
    // Its first choice is not always its fastest (17 % longer for the 2.7B model's gradient of w2).
    // So it tries what it has at the first product of a large 16-bit shape, unless a graph is being
    // recorded, or there is no room.
    const bool large = A.dtype != F32 && C.batch == 1 && 2.0 * C.rows * C.cols * p.K >= 1e9;
    if (large && multiply(CUBLAS_GEMM_AUTOTUNE) == CUBLAS_STATUS_SUCCESS) { return; }
#endif
    CUBLAS_CHECK(multiply(CUBLAS_GEMM_DEFAULT));
}

static void multiply_cuda(const Product& p) {
    auto run = [&](int64_t first, int64_t n, double beta) {  // n of the K summands
        Product part = p;
        part.A.data += (p.transpose_a ? first * p.A.ld : first) * (int64_t)size_of(p.A.dtype);
        part.B.data += (p.transpose_b ? first : first * p.B.ld) * (int64_t)size_of(p.B.dtype);
        part.K = n, part.beta = beta;
        cublas_product(part);
    };
    // cuBLAS 13.1 leaves out the last K % 8 summands of some 16-bit products where A is transposed
    // and B is not, as in a weight's gradient ([4097,1000]^T times [4097,128] for one, on Hopper):
    // they become a product of their own, at the price of one rounding more where C is 16-bit.
    int64_t apart = p.transpose_a && !p.transpose_b && p.A.dtype != F32 && p.K > 8 ? p.K % 8 : 0;
    run(0, p.K - apart, p.beta);
    if (apart > 0) { run(p.K - apart, apart, 1); }
}
#endif

template <class T>
void blas_product(T* C, int64_t ldc, const T* A, int64_t lda, bool ta, const T* B, int64_t ldb,
                  bool tb, int64_t M, int64_t N, int64_t K, double alpha, double beta) {
#ifdef HAVE_OPENBLAS
    CBLAS_TRANSPOSE op_a = ta ? CblasTrans : CblasNoTrans, op_b = tb ? CblasTrans : CblasNoTrans;
    if constexpr (std::is_same<T, float>::value) {
        cblas_sgemm(CblasRowMajor, op_a, op_b, M, N, K, (float)alpha, A, lda, B, ldb, (float)beta,
                    C, ldc);
    } else {
        cblas_dgemm(CblasRowMajor, op_a, op_b, M, N, K, alpha, A, lda, B, ldb, beta, C, ldc);
    }
#else
    for (int64_t i = 0; i < M; i++) {
        T* row = C + i * ldc;
        for (int64_t j = 0; j < N; j++) { row[j] = beta == 0 ? 0 : row[j] * (T)beta; }
        for (int64_t k = 0; k < K; k++) {
            T x = (T)alpha * (ta ? A[k * lda + i] : A[i * lda + k]);
            for (int64_t j = 0; j < N; j++) {
                row[j] += x * (tb ? B[j * ldb + k] : B[k * ldb + j]);
            }
        }
    }
#endif
}
template void blas_product(float*, int64_t, const float*, int64_t, bool, const float*, int64_t,
                           bool, int64_t, int64_t, int64_t, double, double);

// OpenBLAS's own threads and OpenMP's would spin against each other for the same cores (seen: 4
// times slower).
void one_blas_thread() {
#ifdef HAVE_OPENBLAS
    static const bool once = [] {
        openblas_set_num_threads(1);
        // Each of our threads needs a buffer, for which OpenBLAS tries for ever where `ulimit -v`
        // forbids it.
        rlimit space;
        const size_t needs = (size_t)cpu_threads() * 129 << 20;
        if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY &&
            needs > system_memory()) {
            fail("out of memory: OpenBLAS needs %zu MiB, %zu are there", needs >> 20,
                 system_memory() >> 20);
        }
        return true;
    }();
    (void)once;
#endif
}
// Over the batch, or over slices of the output's longer side.
template <class T>
static void multiply_cpu(const Product& p) {
    one_blas_thread();
    const Matrix &C = p.C, &A = p.A, &B = p.B;
    bool by_rows = C.rows >= C.cols;
    int64_t side = by_rows ? C.rows : C.cols,
            slices = C.batch > 1 ? 1 : std::min<int64_t>(cpu_threads(), (side + 31) / 32);
    int64_t slice = (side + slices - 1) / slices;
#pragma omp parallel for schedule(dynamic) if (C.batch * slices > 1)
    for (int64_t task = 0; task < C.batch * slices; task++) {
        int64_t i = task / slices, start = task % slices * slice, n = std::min(slice, side - start);
        if (n <= 0) { continue; }
        int64_t row = by_rows ? start : 0, col = by_rows ? 0 : start;
        blas_product((T*)C.data + i * C.batch_stride + row * C.ld + col, C.ld,
                     (T*)A.data + i * A.batch_stride + (p.transpose_a ? row : row * A.ld), A.ld,
                     p.transpose_a,
                     (T*)B.data + i * B.batch_stride + (p.transpose_b ? col * B.ld : col), B.ld,
                     p.transpose_b, by_rows ? n : C.rows, by_rows ? C.cols : n, p.K, p.alpha,
                     p.beta);
    }
}
static void multiply(const Tensor& out, const Tensor& a, bool ta, const Tensor& b, bool tb,
                     double alpha, double beta) {
    Matrix C = matrix_of(out), A = matrix_of(a), B = matrix_of(b);
    int64_t M = ta ? A.cols : A.rows, K = ta ? A.rows : A.cols, N = tb ? B.rows : B.cols,
            K_b = tb ? B.cols : B.rows;
    if (C.rows != M || C.cols != N || K != K_b || A.batch != C.batch || B.batch != C.batch) {
        fail("gemm: %s%s x %s%s -> %s do not fit", to_string(a.shape).c_str(), ta ? "^T" : "",
             to_string(b.shape).c_str(), tb ? "^T" : "", to_string(out.shape).c_str());
    }
    if (out.device() == META || out.size() == 0) { return; }
    Product p{C, A, B, ta, tb, K, alpha, beta};
#ifdef __CUDACC__
    if (out.device() == CUDA) { return multiply_cuda(p); }
#endif
    a.dtype == F64 ? multiply_cpu<double>(p) : multiply_cpu<float>(p);
}

bool multiplies_copies(Device device, DType dtype) {
#ifdef __CUDACC__
    if (device == CUDA) { return dtype == BF16 && compute_capability() < 80; }
#endif
    return device == CPU && dtype != F64;
}
size_t planned_peak(const std::function<void()>& run) {
    RestoreContext restore;
    context.widening = multiplies_copies(context.device, matmul_dtype());
    Planning planning;
    size_t before = memory_use(META).now;
    reset_peak(META);
    run();
    return memory_use(META).peak - before;
}
static Tensor fp32_copy(const Tensor& t) {  // exact
    if (t.dtype == F32) { return t; }
    Tensor w = empty_on(t.device(), t.shape, F32, WORKSPACE);
    copy_or_add(w, t, false);
    return w;
}
static void multiply_copies(const Tensor& out, const Tensor& a, bool ta, const Tensor& b, bool tb,
                            double alpha, double beta) {
    NoGrad no_grad;
    Tensor wa = fp32_copy(a), wb = fp32_copy(b), wide = out;
    bool rounds = out.dtype != F32;  // once, what was computed in fp32
    if (rounds) { wide = empty_on(out.device(), out.shape, F32, WORKSPACE); }
    if (rounds && beta != 0) { copy_or_add(wide, out, false); }
    multiply(wide, wa, ta, wb, tb, alpha, beta);
    if (rounds) { copy_or_add(out, wide, false); }
}
void gemm(const Tensor& out, const Tensor& a, bool ta, const Tensor& b, bool tb, double alpha,
          double beta) {
    if (a.dtype != b.dtype) { fail("gemm: %s x %s", name_of(a.dtype), name_of(b.dtype)); }
    Range range("matmul");
    bool copies = out.device() == META ? context.widening && a.dtype != F64
                                       : multiplies_copies(out.device(), a.dtype);
    (copies ? multiply_copies : multiply)(out, a, ta, b, tb, alpha, beta);
}

void add_gemm(const GradientPtr& g, const Tensor& a, bool ta, const Tensor& b, bool tb,
              double alpha) {
    if (!g) { return; }
    if (context.mode == EAGER && !g->is_parameter) {
        Tensor d = empty(g->shape, g->dtype);
        gemm(d, a, ta, b, tb, alpha);
        add_gradient(g, d);
        return;
    }
    bool accumulate;
    Tensor target = gradient_target(g, &accumulate);
    gemm(target, a, ta, b, tb, alpha, accumulate);
}

Tensor autocast_operand(const Tensor& t) {
    DType dtype = t.dtype == F64 ? F64 : matmul_dtype();
    if (t.dtype == dtype) { return t; }
    bool parameter = t.gradient && t.gradient->is_parameter, eager = context.mode == EAGER;
    Tensor low = parameter ? t.gradient->low_precision : Tensor();
    // Eager's copy has a gradient of its own, to be cast back; one made under NoGrad has none.
    if (!low || low.dtype != dtype || (eager && context.recording && !low.gradient)) {
        low = empty(t.shape, dtype, parameter ? WEIGHT_COPIES : ACTIVATIONS);
        copy_or_add(low, t, false);
        if (eager || !parameter) {
            record(low, {t}, [g = t.gradient](const Tensor& dy) { add_gradient(g, dy); });
        }
        if (parameter && (eager || context.recording)) { t.gradient->low_precision = low; }
    }
    // stands for the parameter
    if (parameter && !eager) { low.gradient = context.recording ? t.gradient : nullptr; }
    return low;
}
void drop_weight_copies(const std::vector<Tensor>& parameters) {
    for (const Tensor& p : parameters) { p.gradient->low_precision = Tensor(); }
}

Tensor matmul(const Tensor& a_in, const Tensor& b_in, bool transpose_b) {
    Tensor a = contiguous(autocast_operand(a_in)), b = contiguous(autocast_operand(b_in));
    Shape shape = a.shape;
    shape.back() = transpose_b ? b.dim(-2) : b.dim(-1);
    Tensor y = empty(shape, a.dtype);
    gemm(y, a, false, b, transpose_b);
    record(y, {a, b}, [a, b, transpose_b](const Tensor& dy_in) {
        Tensor dy = contiguous(dy_in);
        add_gemm(a.gradient, dy, false, b, !transpose_b);
        transpose_b ? add_gemm(b.gradient, dy, true, a, false)
                    : add_gemm(b.gradient, a, true, dy, false);
    });
    return y;
}
static Tensor linear(const Tensor& x_in, const Tensor& weight, bool compute) {
    Tensor x = reshape(autocast_operand(x_in), {x_in.size() / x_in.dim(-1), x_in.dim(-1)}),
           w = autocast_operand(weight);
    Shape shape = x_in.shape;
    shape.back() = weight.dim(0);
    Tensor y = empty({x.dim(0), weight.dim(0)}, x.dtype);
    if (compute) { gemm(y, x, false, w, true); }
    auto recompute = x_in.gradient ? x_in.gradient->recompute : nullptr;
    Tensor kept = x;
    if (recompute) { kept.memory = nullptr, kept.data = nullptr; }
    record(y, {x, w}, [x = kept, w, recompute](const Tensor& dy_in) {
        Tensor dy = contiguous(dy_in);
        add_gemm(x.gradient, dy, false, w, false);
        add_gemm(w.gradient, dy, true, recompute ? view(recompute(), 0, x.shape) : x, false);
    });
    return reshape(y, shape);
}
Tensor linear(const Tensor& x, const Tensor& weight) { return linear(x, weight, true); }
Tensor checkpoint_linear(const std::function<Tensor(const Tensor& x)>& f, const Tensor& x,
                         const Tensor& weight) {
    // Run again, checkpoint()'s function records, and what it returns is never read.
    return checkpoint(
        [f, weight](const Tensor& x) { return linear(f(x), weight, !context.recording); }, x);
}

// -------------------------------------------------------------------------------------------------
// What a card can do at most, by its maker's data sheet: dense products, sums in fp32, TFLOP/s. The
// 1979 that an H100's sheet has in large print is with sparsity, where half of the operands are
// zeros; dense it is 989. bf16 is as fast as fp16 where there is bf16 (not on a T4). fp32 is the
// CUDA cores' rate.
struct CardPeak {
    const char* card;  // how the driver's name for it begins; the comma ends a name
    double fp16, tf32, fp32;
};
static const CardPeak card_peaks[] = {
    {"Tesla T4,", 65, NAN, 8.1},
    {"NVIDIA A100", 312, 156, 19.5},
    {"NVIDIA GeForce RTX 3090,", 71, 35.6, 35.6},
    {"NVIDIA GeForce RTX 4090,", 165.2, 82.6, 82.6},
    {"NVIDIA L4,", 121, 60, 30.3},
    {"NVIDIA H100 80GB HBM3,", 989, 494.5, 67},
    {"NVIDIA H200,", 989, 494.5, 67},
    {"NVIDIA B200,", 2250, 1125, 75},
};
double dense_peak(Precision precision) {
    const std::string card = device_description();
    for (const CardPeak& peak : card_peaks) {
        if (card.compare(0, strlen(peak.card), peak.card) != 0) { continue; }
        if (matmul_dtype(precision) == BF16 && std::isnan(peak.tf32)) { return NAN; }
        return precision == FP32 ? peak.fp32 : precision == TF32 ? peak.tf32 : peak.fp16;
    }
    return NAN;
}
std::string percent_of_peak(double tflops, Precision precision) {
    const double share = tflops / dense_peak(precision);
    return std::isnan(share) ? "-" : strprintf("%.1f", 100 * share);
}
