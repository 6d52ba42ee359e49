// lib/matmul.cu: matrix products. [M,K] x [K,N] costs 2MNK FLOPs and at least (MK + KN + MN)
// elements of traffic. The GPU's products come from cuBLAS, the CPU's from OpenBLAS or,
// without it, from a plain loop.
//
// In this order: the product on the GPU, the product on the CPU, gemm(), what autocast does to a
// product's operands, the ops that are recorded (matmul, linear), and what cards can do at most. To
// read first: the table above autocast_operand(), then linear().
#include "gpu.h"

#ifdef HAVE_CUDA
#include <cublas_v2.h>
#endif
#ifdef HAVE_OPENBLAS
#include <cblas.h>
#endif

DType matmul_dtype(Precision precision) {
    if (precision == PREC_BF16 || precision == PREC_PURE_BF16) { return BF16; }
    return precision == PREC_FP16 ? F16 : F32;
}
DType weight_dtype(Precision precision) { return precision == PREC_PURE_BF16 ? BF16 : F32; }

// A tensor's last two dimensions are a row-major matrix, and the others count a batch of such.
struct Matrix {
    char* data;
    DType dtype;
    int64_t rows, cols, batch;
    int64_t ld, batch_stride;  // elements from one row to the next, from one matrix to the next
};
struct Product {  // C = alpha op(A) op(B) + beta C, where op transposes or does nothing
    Matrix C, A, B;
    bool transpose_a, transpose_b;
    int64_t K;  // the length of the sums
    double alpha, beta;
};

static Matrix matrix_of(const Tensor& t) {
    if (!is_row_major(t)) { fail("gemm: %s is not row-major", to_string(t.shape).c_str()); }
    int64_t rows = t.dim(-2), cols = t.dim(-1);
    int64_t batch = count(Shape(t.shape.begin(), t.shape.end() - 2));
    return {t.data, t.dtype, rows, cols, batch, cols, rows * cols};
}

#ifdef HAVE_CUDA
static void cublas_check(cublasStatus_t status, const char* call, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) { return; }
    string what = strprintf("lib/matmul.cu:%d: %s: %s", line, call, cublasGetStatusString(status));
    if (status == CUBLAS_STATUS_ALLOC_FAILED) { throw OutOfMemory(what + ": out of memory"); }
    throw Failure(1, what);
}
#define CUBLAS_CHECK(call) cublas_check(call, #call, __LINE__)

// Returns a new cuBLAS handle that works on the compute stream, in a workspace of ours.
static cublasHandle_t new_cublas() {
    cublasHandle_t h;
    CUBLAS_CHECK(cublasCreate(&h));
    CUBLAS_CHECK(cublasSetStream(h, stream()));
    // Without this cuBLAS may add up the parts of a long sum in 16 bits.
    CUBLAS_CHECK(cublasSetMathMode(h, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));

    // The workspace is ours (NVIDIA advises 32 MiB on Hopper): the memory log sees it, and a graph
    // may capture its use. cublasSetStream puts cuBLAS's own back, so this has to come after it.
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
    if (t == BF16) { return CUDA_R_16BF; }
    return t == F16 ? CUDA_R_16F : CUDA_R_32F;
}

// Multiplies by cuBLAS, which is column-major: it sees every matrix of ours transposed. So it is
// asked for C^T = op(B)^T op(A)^T: the operands change places, and nothing is moved.
static void cublas_product(const Product& p, cublasHandle_t handle = cublas()) {
    const Matrix &C = p.C, &A = p.A, &B = p.B;
    float alpha = (float)p.alpha, beta = (float)p.beta;
    // Only this line allows TF32: in precision fp32 no product of fp32 matrices uses tensor cores.
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
    // cuBLAS's first choice is not always its fastest (17 % longer for the 2.7B model's gradient of
    // w2). So it tries its kernels at the first product of a large 16-bit shape. That fails while a
    // graph is being recorded, or where there is no room; then its first choice has to do.
    const bool large = A.dtype != F32 && C.batch == 1 && 2.0 * C.rows * C.cols * p.K >= 1e9;
    if (large && multiply(CUBLAS_GEMM_AUTOTUNE) == CUBLAS_STATUS_SUCCESS) { return; }
#endif
    CUBLAS_CHECK(multiply(CUBLAS_GEMM_DEFAULT));
}

// Multiplies on the GPU, by one product of cuBLAS or, around a fault of cuBLAS's, by two.
static void multiply_cuda(const Product& p) {
    auto add_summands = [&](int64_t first, int64_t n, double beta) {  // n of the K, from first on
        Product part = p;
        part.A.data += (p.transpose_a ? first * p.A.ld : first) * size_of(p.A.dtype);
        part.B.data += (p.transpose_b ? first : first * p.B.ld) * size_of(p.B.dtype);
        part.K = n;
        part.beta = beta;
        cublas_product(part);
    };

    // cuBLAS 13.1 leaves out the last K % 8 summands of some 16-bit products where A is transposed
    // and B is not, as in a weight's gradient ([4097,1000]^T times [4097,128] for one, on Hopper).
    // So they become a product of their own, at the price of one more rounding where C is 16-bit.
    int64_t apart = p.transpose_a && !p.transpose_b && p.A.dtype != F32 && p.K > 8 ? p.K % 8 : 0;
    add_summands(0, p.K - apart, p.beta);
    if (apart > 0) { add_summands(p.K - apart, apart, 1); }
}
#endif

// Computes C [M,N] = alpha op(A) op(B) + beta C on the calling thread. op(A) is [M,K]; if ta, A
// lies in memory as [K,M]. op(B) [K,N] and tb alike. lda: elements from one row of A to the next.
// Where beta is 0, C is not read.
template <class T>
void blas_product(T* C, int64_t ldc, const T* A, int64_t lda, bool ta, const T* B, int64_t ldb,
                  bool tb, int64_t M, int64_t N, int64_t K, double alpha, double beta) {
#ifdef HAVE_OPENBLAS
    CBLAS_TRANSPOSE op_a = ta ? CblasTrans : CblasNoTrans;
    CBLAS_TRANSPOSE op_b = tb ? CblasTrans : CblasNoTrans;
    if constexpr (is_same_v<T, float>) {
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

// Makes OpenBLAS compute on the calling thread alone. Its own threads and OpenMP's would spin
// against each other for the same cores (seen: 4 times slower).
void one_blas_thread() {
#ifdef HAVE_OPENBLAS
    static std::once_flag once;
    std::call_once(once, [] {
        openblas_set_num_threads(1);

        // Where `ulimit -v` leaves no room for the threads' buffers, OpenBLAS tries for ever; so we
        // fail here. system_memory() has taken them off. allocate_cpu() asks it once per 32 MiB
        // only, so that much has to be left, too.
        if (system_memory() < 32 << 20) { fail("out of memory: no room for OpenBLAS' buffers"); }
    });
#endif
}

// Multiplies on the CPU. The threads share the batch's products or, where there is only one, slices
// of C along its longer side.
template <class T>
static void multiply_cpu(const Product& p) {
    one_blas_thread();
    const Matrix &C = p.C, &A = p.A, &B = p.B;
    int64_t next_row = p.transpose_a ? 1 : A.ld;     // of op(A), in elements
    int64_t next_column = p.transpose_b ? B.ld : 1;  // of op(B)
    bool by_rows = C.rows >= C.cols;
    int64_t side = by_rows ? C.rows : C.cols;
    const int64_t least = 32;  // rows or columns in a slice
    int slices = min(omp_get_max_threads(), ceil_div(side, least));
    if (C.batch > 1) { slices = 1; }
    int64_t slice = ceil_div(side, slices);

#pragma omp parallel for collapse(2) schedule(dynamic) if (C.batch * slices > 1)
    for (int64_t i = 0; i < C.batch; i++) {
        for (int64_t start = 0; start < side; start += slice) {
            int64_t n = min(slice, side - start);
            int64_t row = by_rows ? start : 0, rows = by_rows ? n : C.rows;
            int64_t col = by_rows ? 0 : start, cols = by_rows ? C.cols : n;
            T* c = (T*)C.data + i * C.batch_stride + row * C.ld + col;
            T* a = (T*)A.data + i * A.batch_stride + row * next_row;
            T* b = (T*)B.data + i * B.batch_stride + col * next_column;
            blas_product(c, C.ld, a, A.ld, p.transpose_a, b, B.ld, p.transpose_b, rows, cols, p.K,
                         p.alpha, p.beta);
        }
    }
}

// Multiplies matrices whose dtypes the library takes as they are, on out's device; fails where the
// shapes do not fit. On META it only looks at the shapes.
static void multiply(const Tensor& out, const Tensor& a, bool ta, const Tensor& b, bool tb,
                     double alpha, double beta) {
    Matrix C = matrix_of(out), A = matrix_of(a), B = matrix_of(b);
    int64_t M = ta ? A.cols : A.rows, K = ta ? A.rows : A.cols;
    int64_t N = tb ? B.rows : B.cols, K_b = tb ? B.cols : B.rows;
    if (C.rows != M || C.cols != N || K != K_b || A.batch != C.batch || B.batch != C.batch) {
        fail("gemm: %s%s x %s%s -> %s do not fit", to_string(a.shape).c_str(), ta ? "^T" : "",
             to_string(b.shape).c_str(), tb ? "^T" : "", to_string(out.shape).c_str());
    }
    if (out.device() == META || out.size() == 0) { return; }

    Product p{C, A, B, ta, tb, K, alpha, beta};
#ifdef HAVE_CUDA
    if (out.device() == CUDA) { return multiply_cuda(p); }
#endif
    if (a.dtype == F64) { return multiply_cpu<double>(p); }
    multiply_cpu<float>(p);
}

bool multiplies_copies(Device device, DType dtype) {
#ifdef HAVE_CUDA
    if (device == CUDA) { return dtype == BF16 && compute_capability() < 80; }
#endif
    return device == CPU && dtype != F64;
}
static Tensor copy_as(const Tensor& t, DType dtype, Category category, Source at = here()) {
    Tensor c = empty_on(t.device(), t.shape, dtype, category, at);
    copy_or_add(c, t, false);
    return c;
}
static Tensor fp32_copy(const Tensor& t) { return t.dtype == F32 ? t : copy_as(t, F32, WORKSPACE); }
// Multiplies fp32 copies of a and b, which hold the same numbers; what was computed in fp32 is
// rounded once, to out's dtype.
static void multiply_copies(const Tensor& out, const Tensor& a, bool ta, const Tensor& b, bool tb,
                            double alpha, double beta) {
    Tensor wa = fp32_copy(a), wb = fp32_copy(b);
    if (out.dtype == F32) { return multiply(out, wa, ta, wb, tb, alpha, beta); }

    Tensor wide = empty_on(out.device(), out.shape, F32, WORKSPACE);
    if (beta != 0) { copy_or_add(wide, out, false); }
    multiply(wide, wa, ta, wb, tb, alpha, beta);
    copy_or_add(out, wide, false);
}

// out = alpha op(a) op(b) + beta out. On META it allocates what the planned device's product would.
void gemm(const Tensor& out, const Tensor& a, bool ta, const Tensor& b, bool tb, double alpha,
          double beta) {
    if (a.dtype != b.dtype) { fail("gemm: %s x %s", name_of(a.dtype), name_of(b.dtype)); }
    Range range("matmul");
    bool copies = out.device() == META ? context.widening && a.dtype != F64
                                       : multiplies_copies(out.device(), a.dtype);
    auto product = copies ? multiply_copies : multiply;
    product(out, a, ta, b, tb, alpha, beta);
}

// Adds a product to a gradient. Eager makes the product as a tensor, which a kernel of its own
// adds, as autograd does; the other modes, and a parameter's gradient, let the product accumulate.
void add_gemm(const GradientPtr& g, const Tensor& a, bool ta, const Tensor& b, bool tb,
              double alpha) {
    if (!g) { return; }
    if (context.mode == EAGER && !g->is_parameter) {
        Tensor d = empty(g->shape, g->dtype);
        gemm(d, a, ta, b, tb, alpha);
        return add_gradient(g, d);
    }
    bool accumulate;
    Tensor target = gradient_target(g, &accumulate);
    gemm(target, a, ta, b, tb, alpha, accumulate);
}

// -------------------------------------------------------------------------------------------------
// What autocast gives a product instead of its operand (notes/autocast.md):
//
//   operand                   what the product multiplies           whose gradient backward fills
//   -----------------------   -----------------------------------   ------------------------------
//   F64, or cast already      the operand                           the operand's
//   an activation             a copy that is cast, for this         the copy's, in 16 bits; the
//                             product only: cast_copy()             cast's step widens and adds it
//   a parameter, mode eager   the copy made at its first use:       the copy's, in 16 bits; the
//                             eager_weight_copy()                   cast's step widens and adds it
//   a parameter, other modes  a copy that stands for the            the parameter's: the product
//                             parameter: fused_weight_copy()        adds to it, with no cast

// Returns a copy of t with a step of its own on the tape, which casts the gradient back. at: who
// asked for it, for the memory log.
static Tensor cast_copy(const Tensor& t, DType dtype, Category category, Source at) {
    return passes_gradient(copy_as(t, dtype, category, at), t);
}

// Returns the parameter's 16-bit copy, as torch.autocast keeps it: made at the first use, with a
// step of its own on the tape, and shared by all later uses until drop_weight_copies(). A copy that
// was made under NoGrad has no gradient, so a use that is recorded makes a new one.
static Tensor eager_weight_copy(const Tensor& weight, DType dtype, Source at) {
    Tensor& kept = weight.gradient->low_precision;
    bool serves = kept && kept.dtype == dtype && (kept.gradient || !context.recording);
    if (!serves) { kept = cast_copy(weight, dtype, WEIGHT_COPIES, at); }
    return kept;
}

// Returns a 16-bit copy whose gradient is the parameter's own, so that the product of backward
// adds to that, and no step casts. Forward keeps the copy for backward, if there will be one. A
// copy that is there already serves, whoever has put it there.
static Tensor fused_weight_copy(const Tensor& weight, DType dtype, Source at) {
    Tensor low = weight.gradient->low_precision;
    if (!low || low.dtype != dtype) {
        low = copy_as(weight, dtype, WEIGHT_COPIES, at);
        if (context.recording) { weight.gradient->low_precision = low; }
    }
    low.gradient = context.recording ? weight.gradient : nullptr;
    return low;
}

static DType product_dtype(const Tensor& t) { return t.dtype == F64 ? F64 : matmul_dtype(); }

// Returns what the table says: t itself, or the copy that a product takes for it.
Tensor autocast_operand(const Tensor& t) {
    const DType dtype = product_dtype(t);
    bool is_parameter = t.gradient && t.gradient->is_parameter;
    Source at = here();  // so that the memory log names this function
    if (t.dtype == dtype) { return t; }
    if (!is_parameter) { return cast_copy(t, dtype, ACTIVATIONS, at); }
    if (context.mode == EAGER) { return eager_weight_copy(t, dtype, at); }
    return fused_weight_copy(t, dtype, at);
}
void drop_weight_copies(const vector<Tensor>& parameters) {
    for (const Tensor& p : parameters) { p.gradient->low_precision = Tensor(); }
}

// y = a b, so backward has da = dy b^T and db = a^T dy. With transpose_b, y = a b^T, da = dy b and
// db = dy^T a.
Tensor matmul(const Tensor& a_in, const Tensor& b_in, bool transpose_b) {
    Tensor a = contiguous(autocast_operand(a_in)), b = contiguous(autocast_operand(b_in));
    Shape shape = a.shape;
    shape.back() = transpose_b ? b.dim(-2) : b.dim(-1);
    Tensor y = empty(shape, a.dtype);
    gemm(y, a, false, b, transpose_b);
    record(y, {a, b}, [a, b, transpose_b](const Tensor& dy_in) {
        Tensor dy = contiguous(dy_in);
        add_gemm(a.gradient, dy, false, b, !transpose_b);
        add_gemm(b.gradient, transpose_b ? dy : a, true, transpose_b ? a : dy, false);
    });
    return y;
}

// Returns x weight^T and records it. Backward needs x for the weight's gradient. Where x's maker
// can compute it again (recompute_by), the tape keeps x's shape and gradient, but not its data.
Tensor linear(const Tensor& x_in, const Tensor& weight, const Tensor& known) {
    Tensor x = reshape(autocast_operand(x_in), {x_in.size() / x_in.dim(-1), x_in.dim(-1)});
    Tensor w = autocast_operand(weight);
    const Shape rows = {x.dim(0), weight.dim(0)};
    Tensor y = known ? view(known, 0, rows) : empty(rows, x.dtype);
    if (!known) { gemm(y, x, false, w, true); }

    auto recompute = x_in.gradient ? x_in.gradient->recompute : nullptr;
    Tensor kept = x;
    if (recompute) {
        kept.memory = nullptr;
        kept.data = nullptr;
    }
    record(y, {x, w}, [kept, w, recompute](const Tensor& dy_in) {
        Tensor dy = contiguous(dy_in);
        add_gemm(kept.gradient, dy, false, w, false);
        Tensor x = recompute ? view(recompute(), 0, kept.shape) : kept;
        add_gemm(w.gradient, dy, true, x, false);
    });

    Shape shape = x_in.shape;
    shape.back() = weight.dim(0);
    return reshape(y, shape);
}

// f runs twice. First run (in forward): nothing is recorded, and y is computed. Second run (inside
// backward): checkpoint() records it, so the tape is rebuilt; nobody reads y then, so linear()
// gets memory with undefined values as the known result, and skips the product.
Tensor checkpoint_linear(const function<UnaryOp>& f, const Tensor& x, const Tensor& weight) {
    auto linear_of_f = [f, weight](const Tensor& x) {
        const Tensor fx = f(x);
        Tensor unread;
        const bool second_run = context.recording;
        if (second_run) {
            Shape shape = fx.shape;
            shape.back() = weight.dim(0);
            unread = empty(shape, product_dtype(fx));
        }
        return linear(fx, weight, unread);
    };
    return checkpoint(linear_of_f, x);
}

// -------------------------------------------------------------------------------------------------
// What a card can do at most, by its maker's data sheet: TFLOP/s of dense products with fp32 sums.
// An H100's sheet prints 1979 large, for operands half of which are zeros; dense it is 989. bf16 is
// as fast as fp16, on a card that has bf16 (a T4 has not). fp32 is the CUDA cores' rate.
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

// Finds the card of this machine in the table; NAN if it is not there, or has no such precision.
double dense_peak(Precision precision) {
    string card = device_description();
    for (const CardPeak& peak : card_peaks) {
        if (card.rfind(peak.card, 0) != 0) { continue; }
        // A card without tf32 has no bf16 either: both came with the A100.
        if (matmul_dtype(precision) == BF16 && isnan(peak.tf32)) { return NAN; }
        if (precision == FP32) { return peak.fp32; }
        return precision == TF32 ? peak.tf32 : peak.fp16;
    }
    return NAN;
}
string percent_of_peak(double tflops, Precision precision) {
    double share = tflops / dense_peak(precision);
    return isnan(share) ? "-" : strprintf("%.1f", 100 * share);
}
