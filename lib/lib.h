// lib.h: what lib/ offers, file by file, as they build on each other: device.cu (errors, devices,
// memory, time, files), trace.cu, table.cu, tensor.cu, matmul.cu, safetensors.cu, ranks.cu. nvcc
// compiles each .cu, or g++ does, as plain C++ (then the CPU path is all there is). Read Context,
// Memory and Mark first: most experiments use these three.
#pragma once
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cfloat>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include <fcntl.h>
#include <math.h>  // with the overloads for float
#include <omp.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

// Names of the standard library that stand on many pages. Of max and min CUDA has its own, too,
// which take mixed types: where types differ, name the one that is meant, as in max<float>.
using std::atomic;
using std::deque;
using std::function;
using std::ifstream;
using std::is_same_v;
using std::lock_guard;
using std::make_shared;
using std::map;
using std::max;
using std::min;
using std::move;
using std::mutex;
using std::pair;
using std::set;
using std::shared_ptr;
using std::sort;
using std::string;
using std::to_string;
using std::unique_ptr;
using std::vector;
using Job = function<void()>;  // work to run, now or later

// HAVE_CUDA: this is a build for GPUs. __CUDACC__: and this a file with kernels, for nvcc.
#ifdef HAVE_CUDA
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define HD __host__ __device__  // a function that both sides call
#else
#define HD
#endif
#include "formats.h"

// -------------------------------------------------------------------------------------------------
// device.cu: texts and errors. A command throws; main(), or in a rank join_ranks(), prints the one
// line on stderr and exits with the code.

struct Failure : std::runtime_error {
    int exit_code;  // 1: it ran and failed, 2: wrong usage, 128 + SIGPIPE: nobody reads stdout
    Failure(int exit_code, const string& what) : std::runtime_error(what), exit_code(exit_code) {}
};
struct OutOfMemory : Failure {
    OutOfMemory(const string& what) : Failure(1, what) {}
};
// The compiler checks the arguments from number `first` on against the format, argument number
// `at`.
#define PRINTF(at, first) __attribute__((format(printf, at, first)))
[[noreturn]] void fail(const char* format, ...) PRINTF(1, 2);         // exit 1
[[noreturn]] void usage_error(const char* format, ...) PRINTF(1, 2);  // exit 2
void note(const char* format, ...) PRINTF(1, 2);                      // prints one line on stderr
void progress(const char* format, ...) PRINTF(1, 2);  // the same, but at most one in 5 s
string strprintf(const char* format, ...) PRINTF(1, 2);
string vstrprintf(const char* format, va_list arguments);
// The text that the format and the arguments of a function with `...` make. It is a macro, since
// va_start has to stand in that function itself: a function that it called would start its own.
#define FORMATTED(format)                              \
    ({                                                 \
        va_list arguments_;                            \
        va_start(arguments_, format);                  \
        string text_ = vstrprintf(format, arguments_); \
        va_end(arguments_);                            \
        text_;                                         \
    })
string list_of(const vector<string>& items);          // "a", "a and b", "a, b and c"
string counted(const string& n, const string& what);  // "1 step", "2 steps"
inline string counted(int64_t n, const string& what) { return counted(to_string(n), what); }
string join(const vector<string>& items, const char* between);
string one_line(const string& text);  // writes control characters as \xNN

#ifdef HAVE_CUDA
void cuda_check(cudaError_t error, const char* call, const char* file, int line);
#define CUDA_CHECK(call) cuda_check(call, #call, __FILE__, __LINE__)
#define LAUNCH_CHECK() CUDA_CHECK(cudaGetLastError())  // follows every <<<>>>
#endif

// table_of<Impl>() is the table of all implementations of one thing, from the plainest to the
// fastest; Impl::rung says which is above which. A file adds its own one by a line
//   static const AddRow<AttentionImpl> row({...});
// that runs while the program loads. So a file can be left out, and nobody names it.
template <class Impl>
std::list<Impl>& table_of() {
    static std::list<Impl> rows;
    return rows;
}
template <class Impl>
struct AddRow {
    AddRow(const Impl& row) {
        auto& rows = table_of<Impl>();
        auto above = [&](const Impl& other) { return other.rung > row.rung; };
        rows.insert(std::find_if(rows.begin(), rows.end(), above), row);
    }
};

// -------------------------------------------------------------------------------------------------
// device.cu: where things run

// META, as in PyTorch, has shapes but no data. A step there computes nothing, but counts the memory
// that it would need.
enum Device { CPU, CUDA, META };
enum DType { F32, F16, BF16, F64, I32, U8 };  // F64: the truth of tests and checks
// EAGER: one kernel per operation. FUSED: kernels that we have fused by hand. FLASH: the same with
// FlashAttention.
enum Mode { EAGER, FUSED, FLASH };
// PREC_PURE_BF16: weights, gradients, AdamW's moments and the residual stream are bf16, too.
enum Precision { FP32, TF32, PREC_BF16, PREC_FP16, PREC_PURE_BF16 };
enum Category {
    PARAMETERS,
    GRADIENTS,
    OPTIMIZER,
    WEIGHT_COPIES,  // in 16 bits, for products; FSDP's gathered weights, too
    ACTIVATIONS,
    WORKSPACE,
    INPUTS,
    CATEGORIES  // how many there are
};

const char* name_of(Device d);
const char* name_of(DType t);
const char* name_of(Mode m);
const char* name_of(Precision p);
const char* name_of(Category c);
// The inverse of name_of. The command line's reader has refused all other names.
Mode mode_from(const string& name);
Precision precision_from(const string& name);

// Says what of a model's blocks backward runs again, instead of keeping its activations.
struct Checkpointing {
    enum Form {
        NONE,
        GROUPS,  // all blocks, in groups of n
        NESTED,  // all blocks but the last one as one group; within it the same again, and so on
        FFN,     // of the first n blocks the feed-forward
        BLOCKS,  // the first n blocks, and of all others the feed-forward
    } form = NONE;
    int n = 0;
    explicit operator bool() const { return form != NONE; }
};

struct Context {  // the process's settings; PyTorch keeps device, precision and recording so, too
    Device device = CPU;
    Device planned_for = CPU;  // the device that a run on META stands for
    Mode mode = FUSED;
    Precision precision = FP32;
    // On META: memory counts the fp32 copies that gemm makes of 16-bit operands where the device
    // cannot multiply these (see multiplies_copies). planned_peak sets it; Planning does not.
    bool widening = false;
    bool recording = true;  // ops write the tape; NoGrad switches it off
    // Backward computes the norms' outputs and SwiGLU's once more, instead of keeping them.
    bool recompute = false;
    Checkpointing checkpoint;
    int head_chunk = 0;  // rows of the logits that the loss makes at a time; 0: all
    // No CUDA graph may hide launches from a trace, buffers from the memory log, or a part's marks.
    bool each_launch = false;
    bool csv = false;        // print csv, not Markdown
    bool silent = false;     // print(), answer() and sketch() do nothing: rank 0 writes for all
    const char* sizes = "";  // "; sizes of --quick where none is typed", for origin()
};
extern Context context;
struct RestoreContext {  // gives the context back as it was, at the end of its scope
    Context before = context;
    ~RestoreContext() { context = before; }
};
struct Planning : RestoreContext {  // within its scope memory is counted, and nothing is computed
    Planning() {
        if (before.device != META) { context.planned_for = before.device; }
        context.device = META;
    }
};

// Returns the number of GPUs. If it is 0, *why says why.
int cuda_devices(string* why = nullptr);
// Sets context.device. want: auto, cpu or cuda. Auto takes a GPU if there is one, and says on
// stderr what it took. To be called once, before all else on a GPU: stream() and the memory pool
// stay with the GPU of their first use. Another thread starts on GPU 0.
void choose_device(const string& want, int gpu = 0);
void synchronize();  // waits for all that context.device has been given
// "NVIDIA H200, driver 580.159, CUDA 13.0, 150 GB" | "AMD EPYC, 2 threads, OpenBLAS Zen"
string device_description();
size_t available_memory(Device d);  // bytes that could be allocated now
// Returns how many bytes of the CPU's memory Linux, our control group and RLIMIT_AS leave, the last
// beside OpenBLAS' buffers. group: for tests, a control group's folder; then without RLIMIT_AS.
size_t system_memory(const char* group = nullptr);
// main() calls it before it reads its arguments: it may start the program anew, with other
// environment variables.
void choose_cpu_settings(char** argv);
#ifdef HAVE_CUDA
cudaStream_t stream();      // the compute stream
cudaStream_t new_stream();  // makes another one
#endif

// -------------------------------------------------------------------------------------------------
// device.cu: memory. Each buffer knows its category and the range in which it was allocated.

struct Source {  // a line of our sources; here(), as a default argument, is the caller's
    const char* file;
    int line;
    const char* function;
};
constexpr Source here(const char* file = __builtin_FILE(), int line = __builtin_LINE(),
                      const char* function = __builtin_FUNCTION()) {
    return {file, line, function};
}
// Gives buffers their memory in place of our pools.
struct Places {
    // Whether each buffer counts by itself. If not, all lie in one buffer, which counts already.
    bool counted = false;
    virtual ~Places() = default;
    // Sets *at to the memory of a new buffer, or leaves it null: then the pool has to give it.
    // Returns a number for the buffer, of its own choice; give() gets it when the buffer is freed.
    virtual size_t take(size_t bytes, void** at) = 0;
    virtual void give(size_t number) = 0;
};
struct Memory {  // a buffer; freed when its last shared_ptr goes, a GPU's in the stream's order
    void* data;
    size_t bytes;
    Device device;
    Category category;
    const char* range_name;     // the innermost range that was open
    Source at;                  // the line that allocated it
    shared_ptr<Places> places;  // the places that were asked for its memory; null: none
    size_t number;              // what their take() returned for it
    bool placed = false;        // true: they gave its memory, so only they free it
    ~Memory();
};
// Returns a new buffer, or throws OutOfMemory.
shared_ptr<Memory> allocate(Device device, size_t bytes, Category category, Source at = here());
// Runs f. For what f allocates, but on the CPU, allocate() asks these places first.
void allocate_in(const shared_ptr<Places>& places, const Job& f);
// Copies, and waits for the end.
void copy_bytes(void* to, Device to_device, const void* from, Device from_device, size_t bytes);
void give_back_cached_memory();  // gives the driver what our pool keeps but does not use

struct MemoryUse {  // bytes
    size_t now, peak;
    // By category. peak_by is each one's share when the total was at its peak.
    size_t now_by[CATEGORIES], peak_by[CATEGORIES];
};
// A live view: each buffer changes it, without a lock. Read it only after wait(), and copy it.
const MemoryUse& memory_use(Device device);
void reset_peak(Device device);  // to what is in use now

// An entry in the log of a device's memory. While the log is on, each allocation waits for the GPU,
// so its time is the GPU's own; a free's may be early.
struct MemoryEvent {
    double ms;      // since start_memory_log
    bool is_alloc;  // false: a free
    uint64_t address;
    size_t bytes;
    Category category;
    vector<const char*> ranges;  // the ranges that were open, the outermost first
    Source at;                   // the line that allocated it
};
// The log begins with an allocation, at 0 ms, of each buffer that is there.
void start_memory_log(Device device);
vector<MemoryEvent> stop_memory_log();

// -------------------------------------------------------------------------------------------------
// device.cu: time, ends by a signal, files, this program started anew

double now_ms();    // by the monotonic clock, which nobody adjusts
struct Mark {       // a moment in a GPU's stream; on the CPU, and for Gloo, one of the host's clock
    double ms = 0;  // the host's clock; of a GPU's mark: when it was queued
    shared_ptr<struct CUevent_st> event;  // a cudaEvent_t; null: on the CPU
};
Mark mark();                                      // in the compute stream
double ms_of(const Mark& m, const Mark& origin);  // ms from origin to m, after synchronize()
#ifdef HAVE_CUDA
Mark mark_on(cudaStream_t s);
void await(cudaStream_t s, const Mark& m);  // the stream waits until the mark is reached
#endif
struct Stats {
    double mean, std, median, min, max;  // std: the sample's (by n - 1); 0 for n = 1
    int n;
};
Stats stats_of(vector<double> values);
string deviation(const Stats& s, const char* format);  // a cell with s.std; "" for n = 1
// Compares two mean times. The first line that applies is returned:
//   difference <= 0.5 % of the larger         "level within 0.5 %": clocks drift by so much
//   difference > noise                        "": they differ
//   difference > 10 % of the larger, n > 1    "too noisy to compare"
//   n < 5                                     "too briefly timed to compare"
//   else                                      "level within twice the standard error"
// n: the smaller number of runs. noise: twice the standard error of the difference, for n < 5
// raised about as by Student's t; for n = 1 half of the larger. `with` follows the first word or
// words (" with naive").
string level(const Stats& a, const Stats& b, const string& with = "");
// Both run f warmup + n times, and return the ms of each of the last n. time_ms waits for the end
// of each run, and counts that. time_queued_ms does not: the device's own events time f, which
// follows `prepare`. So the latency of launches does not count where the device is slower.
vector<double> time_ms(int warmup, int n, const Job& f);
vector<double> time_queued_ms(int warmup, int n, const Job& prepare, const Job& f);
double median_ms(const Job& f);  // by time_ms, of 10 runs after 2 others

// While they are caught, SIGINT, SIGTERM, SIGHUP and SIGQUIT do not end the program: the work looks
// at end_signal_seen() now and then, and ends in order. A second SIGINT ends it at once; a second
// SIGTERM does not, since `timeout` sends two.
void catch_end_signals(bool caught);
int end_signal_seen();  // the signal's number; 0: none came
// Replaces a file as a whole: `write` fills a temporary one beside it, which then takes its name.
// If that fails, or we are killed, the old file stays. `write` returns false, with errno, if it
// failed. Null only finds out whether the file could be written.
void replace_file(const string& path, const function<bool(FILE*)>& write);
void save_file(const string& path, const string& bytes);
// Starts this program once more; the new process runs `prepare` first, and does not outlive us.
pid_t start_ourselves(const vector<string>& arguments, const Job& prepare);
// Runs this program once more and returns its stdout; fails if it fails.
string run_ourselves(const vector<string>& arguments);
string commit();  // that the program was built from

// -------------------------------------------------------------------------------------------------
// trace.cu: named ranges of work, and what the GPU ran in each, as CUPTI sees it: also the kernels
// of cuBLAS and NCCL. Times are in ns since 1970, on one clock for all processes of a machine. A
// range is named by its index in Trace::ranges; -1: none.

// A range lasts from here to the end of its scope; tools that read NVTX (nsys) show it, too. `name`
// has to live as long as the program.
struct Range {
    // recorded_in: innermost_range_number() when the tape recorded what runs now; -1: none
    explicit Range(const char* name, int recorded_in = -1);
    ~Range();
    Range(const Range&) = delete;

  private:
    int number = -1;  // see innermost_range_number()
};
vector<const char*>& open_ranges();  // this thread's, outermost first; in device.cu
const char* innermost_range();       // this thread's; "" outside all of them
// Returns the number of this thread's innermost range, which counts over all traces, so it is no
// index of Trace::ranges; -1: none, or nothing is traced.
int innermost_range_number();

struct TracedRange {
    const char* name;
    int parent;       // the index of the range that was open around it
    int recorded_in;  // where backward runs a step of the tape: of the range that recorded the step
    int thread;       // the system's number for it
    int64_t start, end;
};
struct TracedWork {  // a kernel, a copy or a memset
    string name;     // a copy's and a memset's in [brackets]
    int range;       // the innermost range that was open at the launch
    int64_t start, end;
    unsigned stream = 0, correlation = 0;  // correlation: CUPTI's number for the launch
};
struct Trace {
    vector<TracedRange> ranges;  // in the order of their starts
    vector<TracedWork> work;     // in the order of their starts
    string no_kernels;           // says why `work` is empty; "" if kernels were traced
};
using Traces = vector<Trace>;
void start_tracing();
Trace stop_tracing();  // waits for the device, and returns what ran since start_tracing()

// -------------------------------------------------------------------------------------------------
// table.cu: tables and answers on stdout

inline double to_gib(double bytes) { return bytes / (1 << 30); }
string oom_cell(size_t bytes);  // "OOM (61.2 GiB)": what did not fit

// Returns a table's cell: a float with four digits ("" for NAN), an integer or a text as it is, or
// a name. A column that needs other digits hands over text.
template <class T>
string to_cell(const T& x) {
    if constexpr (std::is_enum_v<T>) {
        return name_of(x);
    } else if constexpr (std::is_integral_v<T>) {
        return to_string(x);
    } else if constexpr (std::is_floating_point_v<T>) {
        return isnan(x) ? "" : strprintf("%.4g", x);
    } else {
        return x;
    }
}

struct Table {
    string caption;  // one line: precision, sizes, warm-up, steps
    vector<string> columns;
    vector<vector<string>> rows = {};
    template <class... C>
    void row(const C&... cells) {
        rows.push_back({to_cell(cells)...});
    }
};
// Returns what the first caption ends with: "NVIDIA H200, driver 580.159, CUDA 13.0, 150 GB; commit
// 1a2b3c4", and context.sizes.
string origin();
void print(const Table& table);  // prints it as Markdown, or as csv if context.csv
// Prints "**(a)** text", or "(a) text" on a terminal and in csv. part: the handout's letter, or a
// word; "" if the text answers it all.
void answer(const char* part, const char* format, ...) PRINTF(2, 3);
void sketch(const string& lines);  // prints a block of code or of text
extern string* printed_to;         // tests: a text that collects all this instead of stdout

// -------------------------------------------------------------------------------------------------
// formats.h: bf16 and fp16

// A kernel is a template over its elements' C++ type, while a tensor's dtype is known at run time.
// with_gpu_type leads from the one to the other: it runs f(zero), and f takes nothing but zero's
// type. One call written out: t is a tensor of F32, and
//
//     with_gpu_type(t.dtype, [&](auto zero) { LAUNCH(kernel, grid, 256, t.as(zero), n); });
//
// runs f(float()), so t.as(zero) is (float*)t.data, and that launches
//
//     kernel<float><<<grid, 256, 0, stream()>>>((float*)t.data, n);
//
// In f, decltype(zero) names the type. Arithmetic on it runs in Wide<decltype(zero)>, of which
// +zero is a zero: C++'s unary plus makes a float of a bf16 or fp16, and leaves a float or double.
template <class Fn>
void with_gpu_type(DType t, Fn f) {
    switch (t) {
        case F32: return f(float());
        case BF16: return f(bf16());
        case F16: return f(fp16());
        default: fail("%s tensors are not for this", name_of(t));
    }
}
// The same with F64, too, for code of both devices. Operations on F64 are the CPU's.
template <class Fn>
void with_type(DType t, Fn f) {
    if (t == F64) { return f(double()); }
    with_gpu_type(t, f);
}

// -------------------------------------------------------------------------------------------------
// tensor.cu: tensors

using Shape = vector<int64_t>;
int64_t count(const Shape& shape);
string to_string(const Shape& shape);  // "[4, 256, 768]"
int64_t size_of(DType t);              // in bytes

// A handle: copying it shares the data.
struct Tensor {
    shared_ptr<Memory> memory;  // null: there is no tensor (false as a bool)
    char* data = nullptr;       // its first element, within the memory
    DType dtype = F32;
    // Strides are in elements. All tensors are row-major but for views (transpose, slices).
    Shape shape, stride;
    shared_ptr<struct Gradient> gradient;  // null: nobody asks for one
    explicit operator bool() const { return memory != nullptr; }
    int64_t size() const { return count(shape); }
    size_t bytes() const { return size() * size_of(dtype); }
    int64_t dim(int i) const { return shape[i < 0 ? i + shape.size() : i]; }  // -1: the last
    Device device() const { return memory->device; }
    template <class T>
    T* as(T = T()) const {  // as<float>(), or as(zero) within with_type
        return (T*)data;
    }
};

// These return a new, row-major tensor; empty() and zeros() make it on context.device. at: the line
// that asks for it, for the memory log.
Tensor empty(const Shape& shape, DType dtype, Category category = ACTIVATIONS, Source at = here());
Tensor zeros(const Shape& shape, DType dtype, Category category = ACTIVATIONS, Source at = here());
Tensor empty_on(Device device, const Shape& shape, DType dtype, Category category = ACTIVATIONS,
                Source at = here());
bool is_row_major(const Tensor& t);
// Returns elements [offset, offset + count(shape)) of a row-major t, without its gradient.
Tensor view(const Tensor& t, int64_t offset, const Shape& shape);
void fill_zero(const Tensor& t);
// Copies between any devices; both are row-major and have the same count and dtype.
void copy(const Tensor& to, const Tensor& from);
// Returns a copy on the device (t itself if it is there already), without its gradient.
Tensor to_device(const Tensor& t, Device device);
Tensor detached(const Tensor& t);          // the same data, no gradient
Tensor require_gradient(const Tensor& t);  // the same data, a leaf of its own
// Both return a tensor on context.device.
Tensor from_floats(const vector<float>& values, const Shape& shape, DType dtype = F32);
Tensor from_ints(const vector<int>& values, const Shape& shape);
// Both take any dtype, strides and device. I32 is exact up to 2^24.
vector<float> to_floats(const Tensor& t);
vector<double> to_doubles(const Tensor& t);

// Random numbers: element i of stream `key` is a function of (seed, key, i), so the CPU and the GPU
// draw the same bits. fill_normal's are nearly normal, none further than 4.9 std from the mean.
void fill_normal(const Tensor& t, uint64_t seed, uint64_t key, float mean = 0, float std = 1);
// Returns an integer of [0, n); all are about equally likely.
int random_int(int n, uint64_t seed, uint64_t key, uint64_t i);
uint64_t key_of(const string& name);  // a stream for each parameter name

// An element passes where |got - want| <= atol + rtol * |want|, or both are the same infinity. A
// NaN never does, nor a finite number where an infinite one is wanted.
struct Comparison {
    int64_t wrong = 0;         // the number of wrong elements
    int64_t worst = -1;        // the index of the one furthest beyond its bound ...
    double got = 0, want = 0;  // ... and both values there
    double max_abs = 0;        // the largest |got - want|
    double sum_abs = 0;        // their sum
    bool ok() const { return wrong == 0; }
};
Comparison compare(const Tensor& got, const Tensor& want, double rtol, double atol);
string to_string(const Comparison& c);

// -------------------------------------------------------------------------------------------------
// tensor.cu: the tape. Each op appends the function that computes its inputs' gradients; backward()
// runs them from the last to the first and drops each after its run, with the activations that only
// it still held.

struct Gradient {
    DType dtype;  // of the tensor that it belongs to ...
    Shape shape;  // ... and that tensor's shape
    // The sum of what ops have added. A view into a flat buffer is there from the start, with the
    // buffer's dtype. Any other value is null until the first op adds. Then it has the dtype above,
    // or, for a parameter outside mode eager, that of low_precision if this is set.
    Tensor value;
    bool is_parameter = false;  // a model's weight: its `value` may be there, but hold nothing yet
    bool filled = false;        // a parameter's: whether `value` holds something
    int uses = 0;               // ops on the tape that have yet to add to it
    // A parameter's: backward calls it when the last of these ops has added.
    Job ready;
    // Computes the tensor again as products take it, so that linear() need not keep it.
    function<Tensor()> recompute;
    // A parameter's: what 16-bit products take for it. In mode eager it is autocast's cached copy,
    // with a gradient of its own; in the other modes a copy that stands for the parameter, and
    // whose gradient is the parameter's (lib/matmul.cu has a table).
    Tensor low_precision;
};
using GradientPtr = shared_ptr<Gradient>;

struct NoGrad : RestoreContext {  // within its scope nothing is recorded; then all is as before
    NoGrad() { context.recording = false; }
};
// Gives y a gradient and appends `backward` to the tape, if an input has a gradient. backward(dy)
// adds to the inputs' gradients.
void record(Tensor& y, const vector<Tensor>& inputs, function<void(const Tensor& dy)> backward);
// Records y as made of `a` alone, with da = dy, and returns it. add_gradient casts dy to a's dtype
// and sums it to a's shape.
Tensor passes_gradient(Tensor y, const Tensor& a);
// Adds dx to g; a null g: does nothing. A parameter's gradient copies dx. Any other one keeps the
// first dx itself, so nobody may write to dx's memory afterwards.
void add_gradient(const GradientPtr& g, const Tensor& dx);
// Returns the tensor to which an op's own kernel writes a gradient. *accumulate says whether the
// kernel has to add to what the tensor holds.
Tensor gradient_target(const GradientPtr& g, bool* accumulate);
// Does the same for a kernel that can only write g's own dtype: calls `write` with that tensor, or
// with another one that is added afterwards.
void write_gradient(const GradientPtr& g,
                    const function<void(const Tensor& target, bool accumulate)>& write);
// If context.recompute is set, linear() does not keep y, and its backward calls again() for it.
void recompute_by(const Tensor& y, const function<Tensor()>& again);
// Adds to the gradients of all that led to the loss, whose own gradient is `scale`; empties the
// tape.
void backward(const Tensor& loss, float scale = 1);
void backward_from(const Tensor& y, const Tensor& dy);  // the same, from any y with gradient dy
void clear_tape();
using UnaryOp = Tensor(const Tensor& a);  // exp, log, ...; function<UnaryOp> also holds a lambda
// Gradient checkpointing (Chen et al., 2016): returns f(x), and keeps nothing but x for backward,
// which runs f again and records it then. f may use no tensor with a gradient but x, and parameters
// that only f uses. It may itself call checkpoint().
Tensor checkpoint(const function<UnaryOp>& f, const Tensor& x);

// These work in place and record nothing.
void scale_in_place(const Tensor& t, float s);
void scale_in_place(const Tensor& t, const Tensor& s);  // s: []
// to = from, or to += from if `accumulate`; casts.
void copy_or_add(const Tensor& to, const Tensor& from, bool accumulate);

// -------------------------------------------------------------------------------------------------
// tensor.cu: ops, mostly one kernel each, that record themselves on the tape. Broadcasting is
// PyTorch's. Dtypes are those of its autocast (see precision.cu), in pure_bf16, too.

using BinaryOp = Tensor(const Tensor& a, const Tensor& b);
BinaryOp add, sub, mul, div;
UnaryOp exp, log, square, rsqrt;          // of 16-bit numbers fp32, as are the sums
UnaryOp sqrt, sigmoid, relu;              // keep their dtype
UnaryOp sum_last, mean_last, max_last;    // over the last dimension, which becomes 1
UnaryOp mean_all;                         // []
UnaryOp contiguous;                       // a copy, unless it is row-major
BinaryOp greater_equal;                   // U8
BinaryOp interleave_last;                 // stack(a, b, dim=-1).flatten(-2)
BinaryOp gather_rows;                     // table [V,C], index I32 [...] -> [..., C]
BinaryOp pick_last;                       // a [N,V], index I32 [N] -> [N,1]: a[n, index[n]]
Tensor scale(const Tensor& a, double s);  // a * s
Tensor add_scalar(const Tensor& a, double s);
Tensor where(const Tensor& mask, const Tensor& a, float otherwise);  // mask U8
Tensor cast(const Tensor& a, DType dtype);
Tensor reshape(const Tensor& a, const Shape& shape);              // a view, or a copy
Tensor transpose(const Tensor& a, int i, int j);                  // a view
Tensor slice_last(const Tensor& a, int64_t start, int64_t step);  // a[..., start::step], a view
Tensor arange(int64_t n);                                         // I32 [n]

// -------------------------------------------------------------------------------------------------
// tensor.cu: whether a run's memory fits

// Returns how many bytes `run` would hold at its peak, beyond those held now: it runs on META.
size_t planned_peak(const Job& run);
// Runs f, unless its predicted peak does not fit: `needs` bytes, of which `held` are held already.
// Returns 0 if f ran, else `needs`, for oom_cell(). row: what stderr names it.
size_t run_if_fits(const string& row, size_t needs, const Job& f, size_t held = 0);

// -------------------------------------------------------------------------------------------------
// matmul.cu: matrix products, in context.precision: fp32 and tf32 multiply fp32 operands, bf16 and
// fp16 those that autocast casts. Sums are always fp32 (fp64 for F64). On the CPU tf32 is fp32, as
// in PyTorch.

// [...,M,K] x [...,K,N] (transpose_b: [...,N,K]) -> [...,M,N]
Tensor matmul(const Tensor& a, const Tensor& b, bool transpose_b = false);
// x [...,K], weight [N,K] -> x weight^T [...,N]. A result that is known already is only recorded.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& known = {});
// Returns linear(f(x), weight) as a checkpoint: backward runs f again, but not this product, since
// nobody reads its result there.
Tensor checkpoint_linear(const function<UnaryOp>& f, const Tensor& x, const Tensor& weight);
// out = alpha op(a) op(b) + beta out, row-major; leading dimensions are a batch. It records
// nothing and does not autocast.
void gemm(const Tensor& out, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b,
          double alpha = 1, double beta = 0);
// Says whether gemm multiplies 16-bit operands as fp32 copies: on the CPU always, on a card before
// the A100 those of bf16. (True for F32 on the CPU, too, which needs no copy.)
bool multiplies_copies(Device device, DType dtype);
// g += alpha op(a) op(b); without g it does nothing.
void add_gemm(const GradientPtr& g, const Tensor& a, bool transpose_a, const Tensor& b,
              bool transpose_b, double alpha = 1);
// Returns what autocast casts operands to (but F64 stays F64).
DType matmul_dtype(Precision precision = context.precision);
// Returns the dtype of a model's weights and moments, and of gradients that lie in a flat buffer.
// Others may have 16 bits (see Gradient::value).
DType weight_dtype(Precision precision = context.precision);
// Returns t in matmul_dtype(); lib/matmul.cu has a table of what that is.
Tensor autocast_operand(const Tensor& t);
// Has to be called where autocast ends, or the weights change.
void drop_weight_copies(const vector<Tensor>& parameters);
// Has to be called before products inside an OpenMP loop of ours.
void one_blas_thread();
// C = alpha op(A) op(B) + beta C, row-major, C [M,N], on the calling thread; T: float or double.
template <class T>
void blas_product(T* C, int64_t ldc, const T* A, int64_t lda, bool ta, const T* B, int64_t ldb,
                  bool tb, int64_t M, int64_t N, int64_t K, double alpha, double beta);

double dense_peak(Precision precision);  // TFLOP/s by the maker's data sheet; NAN: not known
string percent_of_peak(double tflops, Precision precision);  // a cell; "-": not known

// -------------------------------------------------------------------------------------------------
// safetensors.cu: u64 header length | JSON header | little-endian data

struct FileTensor {
    string dtype;  // as in the file: "F32", "BF16", "I64", ...
    Shape shape;
    const void* data;  // in SafeTensors::content, at any address; describe()'s: in the tensor
    size_t bytes;
};
struct SafeTensors {
    string path;
    map<string, FileTensor> tensors;
    shared_ptr<Memory> content;
};
// Reads a whole file, or fails; the file may be hostile.
SafeTensors load_safetensors(const string& path);
// Writes all tensors, or leaves the file as it was.
void save_safetensors(const string& path, const vector<pair<string, FileTensor>>& tensors);
// Returns the file's tensor of this name; fails unless it has one of the dtypes and this shape, in
// which -1 is any size.
const FileTensor& require_tensor(const SafeTensors& file, const string& name, const Shape& shape,
                                 const set<string>& dtypes);
// Fails if the file has a tensor that is not in `names`; `what` says what they are.
void require_no_others(const SafeTensors& file, const set<string>& names, const string& what);
FileTensor describe(const Tensor& cpu_tensor);  // for save_safetensors; points into the tensor
// Copies a tensor of a file to context.device, in its dtype, but I64 as I32: a number that is too
// large for that becomes -1.
Tensor tensor_from_file(const FileTensor& f);
// Writes tensors of any device and strides, each in its dtype.
using NamedTensors = vector<pair<string, Tensor>>;
void save_tensors(const string& path, const NamedTensors& list);

// -------------------------------------------------------------------------------------------------
// ranks.cu: several processes, each of which is a rank. If one fails or dies, its launcher ends all
// at once. If one stalls, all end after about the timeout. One line names the rank or the
// collective.

struct Links;  // a rank's connections and threads
struct Communicator {
    int rank = 0, world = 1, local_world = 1;  // local_world: how many ranks this machine has
    string backend;                            // nccl or gloo; without links a word for captions
    // null: this is no rank, or only plans. Then collectives take tensors on META only, and
    // barrier() must not be called.
    shared_ptr<Links> links;
    int local_gpus = 0;  // how many GPUs this machine's ranks see together
};
bool is_rank();  // whether `--nproc`, torchrun, mpirun or srun has started us, by the environment
// Starts n copies of this program with these arguments, and waits for all. Returns 0, or the exit
// code of the first that failed. A rank that is stopped for 0.8 of the timeout has failed. A signal
// to us ends all.
int launch_ranks(int n, const vector<string>& arguments, double timeout_s = 60);
// Runs in each rank: sets context.device, connects the rank with the others, and calls f. Returns
// 0, or ends the process with the exit code. world: how many ranks there have to be, 0: any number.
// device, backend: as their options take them.
int join_ranks(int world, const string& device, const string& backend, double timeout_s,
               const function<void(const Communicator&)>& f);
// Says why this machine cannot connect so many ranks in this way; "": it can.
string why_not(const string& backend, Device device, int ranks, int gpus = cuda_devices());

struct Work {  // a collective that was started
    const char* what;
    uint32_t number;  // counts the collectives: the same on all ranks
    size_t bytes;     // of the whole tensor
    double started_ms;
    Mark begin, end;  // when it ran; known after wait() and synchronize()
    // NCCL's stays false and "". Gloo's worker sets both, and `end`, under Links::mutex: read them
    // after wait().
    bool finished = false;
    string error;  // "": none
};
using WorkPtr = shared_ptr<Work>;
enum Reduction { SUM, AVERAGE };
struct Collective {
    enum Kind { ALL_REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER } kind;
    Tensor tensor;
    Reduction how = SUM;
    int root = 0;     // of a broadcast
    Tensor own = {};  // reduce_scatter's and all_gather's
};
// A row of the table of ways to work with NCCL. A process has one Communicator, so a way may keep
// in static variables what it opens.
struct NcclWay {
    int rung;
    void (*connect)(const Communicator& c);
    // Queues a collective behind what the compute stream has been given; sets its work's marks.
    void (*start)(const Communicator& c, Work& work, const Collective& x);
    void (*disconnect)(const Communicator& c);
};
// Each call starts a collective; what follows wait() may use its result. The caller keeps t and
// `own` until wait(): with NCCL nothing else holds them, and the compute stream would use freed
// memory again while the collective runs. All ranks call the same ones in the same order. A
// collective begins when what is queued on the compute stream is done, and runs beside what
// follows. t is row-major, and both input and output; its dtype is fp32 or bf16 (broadcast and
// all_gather: any). Rank r owns the r-th of `world` equal parts of t.
//   all_reduce      t becomes the sum, or the average, over ranks.
//   broadcast       t becomes root's.
//   reduce_scatter  Each rank's part becomes the sum or the average of all ranks' tensors there.
//                   Other parts are undefined afterwards.
//   all_gather      Each part becomes its owner's.
// own: a tensor that holds this rank's part instead of t (null: the part lies in t): reduce_scatter
// writes the part there, and all_gather reads it from there.
WorkPtr all_reduce(const Communicator& c, const Tensor& t, Reduction reduction);
WorkPtr broadcast(const Communicator& c, const Tensor& t, int root);
WorkPtr reduce_scatter(const Communicator& c, const Tensor& t, Reduction reduction,
                       const Tensor& own = Tensor());
WorkPtr all_gather(const Communicator& c, const Tensor& t, const Tensor& own = Tensor());
// NCCL: the compute stream waits, the host goes on. Gloo: the host waits.
void wait(const Communicator& c, const WorkPtr& work);
void barrier(const Communicator& c);  // the host waits for all ranks and their devices
// Returns what every rank has passed as its text. It goes through the ranks' folder, not through
// the backend. It returns when all have called it, so it is a barrier, too. It waits for a rank as
// long as that shows life; barrier() gives up after the timeout.
vector<string> gather_text(const Communicator& c, const string& text);
