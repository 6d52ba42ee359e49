// lib/device.cu: the instruments that every other file uses: errors, devices, memory, time,
// signals, files.
#include "gpu.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <random>
#include <sstream>

#include <fcntl.h>
#include <malloc.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#ifdef HAVE_OPENBLAS
extern "C" char* openblas_get_corename(void);
#endif
#ifndef CS336_COMMIT
#define CS336_COMMIT "unknown"
#endif

// f, while the variable has this value.
template <class T>
static void run_with(T& variable, T value, const std::function<void()>& f) {
    struct Guard {
        T &variable, before;
        ~Guard() { variable = before; }
    } guard{variable, variable};
    variable = value;
    f();
}

// -------------------------------------------------------------------------------------------------
// Errors

std::string vstrprintf(const char* format, va_list arguments) {
    va_list again;
    va_copy(again, arguments);
    std::string text(vsnprintf(nullptr, 0, format, again), '\0');
    va_end(again);
    vsnprintf(&text[0], text.size() + 1, format, arguments);
    return text;
}

// What `format` says of the arguments behind it, within a function that takes `...`.
#define FORMATTED(format)                                   \
    ({                                                      \
        va_list arguments_;                                 \
        va_start(arguments_, format);                       \
        std::string text_ = vstrprintf(format, arguments_); \
        va_end(arguments_);                                 \
        text_;                                              \
    })
std::string strprintf(const char* format, ...) { return FORMATTED(format); }
void fail(const char* format, ...) { throw Failure(1, FORMATTED(format)); }
void usage_error(const char* format, ...) { throw Failure(2, FORMATTED(format)); }

std::string counted(const std::string& n, const std::string& what) {
    return n + " " + what + (n == "1" ? "" : "s");
}
std::string list_of(const std::vector<std::string>& items) {
    std::string list;
    for (size_t i = 0; i < items.size(); i++) {
        list += (i == 0 ? "" : i + 1 == items.size() ? " and " : ", ") + items[i];
    }
    return list;
}
std::string join(const std::vector<std::string>& items, const char* between) {
    std::string all;
    for (const std::string& item : items) { all += (&item == &items[0] ? "" : between) + item; }
    return all;
}

std::string one_line(const std::string& text) {
    std::string line;
    for (unsigned char c : text) {
        line += c < 0x20 || c == 0x7f ? strprintf("\\x%02x", c) : std::string(1, c);
    }
    return line;
}

#ifdef __CUDACC__
static const cudaDeviceProp& card() {
    static const cudaDeviceProp properties = [] {
        int device;
        cudaDeviceProp p{};
        // an H100's, where META plans for a GPU and none is here
        p.multiProcessorCount = 132, p.major = 9;
        if (cuda_devices() > 0) {
            CUDA_CHECK(cudaGetDevice(&device));
            CUDA_CHECK(cudaGetDeviceProperties(&p, device));
        }
        return p;
    }();
    return properties;
}
int multiprocessors() { return card().multiProcessorCount; }
int compute_capability() { return 10 * card().major + card().minor; }

void cuda_check(cudaError_t error, const char* call, const char* file, int line) {
    if (error == cudaSuccess) { return; }
    cudaGetLastError();  // or the next LAUNCH_CHECK would report this error again, as its own
    std::string what = strprintf("%s:%d: %s: %s", file, line, call, cudaGetErrorString(error));
    if (error == cudaErrorMemoryAllocation) { throw OutOfMemory(0, what); }
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
        error == cudaErrorUnsupportedPtxVersion) {
        what +=
            strprintf("; run make where this %s is; the oldest that it takes is a T4", card().name);
    }
    throw Failure(1, what);
}
#endif

static const char* const DEVICES[] = {"cpu", "cuda", "meta"};
static const char* const DTYPES[] = {"float32", "float16", "bfloat16", "float64", "int32", "uint8"};
static const char* const MODES[] = {"eager", "fused", "flash"};
static const char* const PRECISIONS[] = {"fp32", "tf32", "bf16", "fp16", "pure_bf16"};
static const char* const CATEGORY_NAMES[] = {"parameters",    "gradients",   "optimizer state",
                                             "weight copies", "activations", "workspace",
                                             "inputs"};
const char* name_of(Device d) { return DEVICES[d]; }
const char* name_of(DType t) { return DTYPES[t]; }
const char* name_of(Mode m) { return MODES[m]; }
const char* name_of(Precision p) { return PRECISIONS[p]; }
const char* name_of(Category c) { return CATEGORY_NAMES[c]; }

Mode mode_from(const std::string& name) {
    return (Mode)(std::find(MODES, std::end(MODES), name) - MODES);
}
Precision precision_from(const std::string& name) {
    return (Precision)(std::find(PRECISIONS, std::end(PRECISIONS), name) - PRECISIONS);
}

// What stands in folder/name behind `before`, which begins with a line's end, up to the next one;
// "": nothing. Without the heap, where its buffer could break up a large block that was freed and
// is about to come again.
static std::string text_in(const char* folder, const char* name, const char* before) {
    char path[512], text[1 << 14] = "\n";
    snprintf(path, sizeof path, "%s/%s", folder, name);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t n = file < 0 ? 0 : read(file, text + 1, sizeof text - 2);
    if (file >= 0) { close(file); }
    text[1 + std::max<ssize_t>(n, 0)] = 0;
    const char* found = strstr(text, before);
    return found ? std::string(found + strlen(before), strcspn(found + strlen(before), "\n")) : "";
}

// -------------------------------------------------------------------------------------------------
// Where things run

Context context;

int cuda_devices(std::string* why) {
    static std::string reason;
    static const int devices = [] {  // asked once: it takes microseconds, and launches want to know
        int n = 0;
#ifdef __CUDACC__
        cudaError_t error = cudaGetDeviceCount(&n);
        if (error != cudaSuccess) {
            cudaGetLastError();
            n = 0, reason = cudaGetErrorString(error);
        }
#else
        reason = "this build is for the CPU only";
        if (access("/dev/nvidia0", F_OK) == 0) { reason += "; there is a card: `make CUDA=1`"; }
#endif
        return n;
    }();
    if (why) { *why = reason; }
    return devices;
}

std::string gpu_ids() {
    std::string ids;
#ifdef __CUDACC__
    for (int i = 0; i < cuda_devices(); i++) {
        char id[32] = " ";
        CUDA_CHECK(cudaDeviceGetPCIBusId(id + 1, sizeof id - 1, i));
        ids += id;
    }
#endif
    return ids;
}

Device choose_device(const std::string& want, [[maybe_unused]] int gpu) {
    if (want == "cpu") { return CPU; }
    std::string why;
    const bool usable = cuda_devices(&why) > 0;
#ifdef __CUDACC__
    if (usable) { CUDA_CHECK(cudaSetDevice(gpu)); }
#endif
    if (!usable && want == "cuda") { fail("device cuda: there is none (%s)", why.c_str()); }
    if (want == "auto") {
        note("device auto: took %s", usable ? "cuda" : ("cpu (" + why + ")").c_str());
    }
    return usable ? CUDA : CPU;
}

#ifdef __CUDACC__
static thread_local cudaStream_t other = nullptr;
cudaStream_t stream() {
    static const cudaStream_t s = [] {
        cudaStream_t created;
        int least, greatest;  // collectives come first, then this stream, then what run_behind runs
        CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        CUDA_CHECK(
            cudaStreamCreateWithPriority(&created, cudaStreamNonBlocking, (least + greatest) / 2));
        return created;
    }();
    return other ? other : s;
}
void with_stream(cudaStream_t s, const std::function<void()>& f) { run_with(other, s, f); }
#endif

void synchronize() {
#ifdef __CUDACC__
    if (context.device == CUDA) { CUDA_CHECK(cudaDeviceSynchronize()); }
#endif
}

int cpu_threads() { return omp_get_max_threads(); }

std::string device_description() {
#ifdef __CUDACC__
    if (context.device == CUDA) {  // the runtime only knows which CUDA the driver is made for;
                                   // "580.95.05" stands here
        std::istringstream words(text_in("/proc/driver/nvidia", "version", "\nNVRM version:"));
        std::string version;
        while (words >> version && !isdigit(version[0])) {}
        return strprintf("%s, driver %s, CUDA %d.%d, %.0f GB", card().name,
                         words ? version.c_str() : "unknown", CUDART_VERSION / 1000,
                         CUDART_VERSION % 1000 / 10, 1e-9 * card().totalGlobalMem);
    }
#endif
    if (context.device == META) { return "meta (nothing is computed)"; }
    const std::string name = text_in("/proc", "cpuinfo", "\nmodel name\t: ");
    std::string text = (name.empty() ? "CPU" : name) + ", " + counted(cpu_threads(), "thread");
#ifdef HAVE_OPENBLAS
    text += strprintf(", OpenBLAS %s", openblas_get_corename());
#endif
    return text;
}

// -------------------------------------------------------------------------------------------------
// Strange machines

// Whether whoever started us ignores SIGHUP, as nohup does. It is asked before the shared libraries
// start, since one of them (UCX, behind some builds of Gloo) takes that signal.
static bool ignores_hangup;
static void see_hangup(int, char**, char**) {
    struct sigaction before {};
    sigaction(SIGHUP, nullptr, &before);
    ignores_hangup = before.sa_handler == SIG_IGN;
}
__attribute__((section(".preinit_array"), used)) static void (*const first)(int, char**,
                                                                            char**) = see_hangup;

// Two libraries read the environment only while the program loads, so we set what is unset and
// start once more. OpenBLAS gives a processor younger than itself the kernels of an old one
// (Prescott: SSE3), five times too slow. OpenMP's threads spin while they wait: where cores are
// shared (containers, CI, several ranks) a step was seen to take 4 times as long. OpenBLAS's
// threads, which we do not use, want 128 MiB each, and try for ever where `ulimit -v` leaves less.
void choose_cpu_settings(char** argv) {
    if (ignores_hangup) { signal(SIGHUP, SIG_IGN); }
    const char* core = nullptr;
#if defined(HAVE_OPENBLAS) && defined(__x86_64__)
    if (strcmp(openblas_get_corename(), "Prescott") == 0 && __builtin_cpu_supports("avx2")) {
        core = __builtin_cpu_supports("avx512bw") ? "SkylakeX" : "Haswell";
    }
#endif
    if (getenv("OMP_WAIT_POLICY") && getenv("OPENBLAS_NUM_THREADS") &&
        (!core || getenv("OPENBLAS_CORETYPE"))) {
        return;
    }
    setenv("OMP_WAIT_POLICY", "passive", 0);
    setenv("OPENBLAS_NUM_THREADS", "1", 0);
    if (core) { setenv("OPENBLAS_CORETYPE", core, 0); }
    execv("/proc/self/exe", argv);
}

static size_t number_in(const char* folder, const char* name, const char* before) {
    const std::string text = text_in(folder, name, before);
    return text.find_first_of("0123456789") == std::string::npos
               ? SIZE_MAX
               : strtoull(text.c_str(), nullptr, 10);
}
// Returns what the control group in this folder and those above it leave, in bytes; SIZE_MAX: they
// have no limit. Without the heap, as above.
static size_t group_memory(const std::string& path) {
    char group[512];
    snprintf(group, sizeof group, "%s", path.c_str());
    size_t left = SIZE_MAX;
    for (; *group; *strrchr(group, '/') = 0) {
        size_t limit = number_in(group, "memory.max", "\n");
        size_t used = number_in(group, "memory.current", "\n");
        // counts as used, but makes room
        size_t cached = number_in(group, "memory.stat", "\ninactive_file ");
        // the names of version 1
        if (limit == SIZE_MAX) {
            limit = number_in(group, "memory.limit_in_bytes", "\n");
            used = number_in(group, "memory.usage_in_bytes", "\n");
            cached = number_in(group, "memory.stat", "\ntotal_inactive_file ");
        }
        if (limit < SIZE_MAX) { left = std::min(left, std::max(limit + cached, used) - used); }
    }
    return left;
}
size_t system_memory(const char* group) {
    // In a container the folder may not be there, but one above it.
    static const std::string root = "/sys/fs/cgroup",
                             own = root + text_in("/proc/self", "cgroup", "\n0::");
    static const std::string own_v1 =
        root + "/memory" + text_in("/proc/self", "cgroup", ":memory:");
    size_t left = number_in("/proc", "meminfo", "\nMemAvailable:") * 1024;
    if (group) { return std::min(left, group_memory(group)); }
    left = std::min({left, group_memory(own), group_memory(own_v1)});
    rlimit space;
    if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) {
        const size_t used = number_in("/proc/self", "status", "\nVmSize:") * 1024;
        left = std::min(left, std::max<size_t>(space.rlim_cur, used) - used);
    }
    return left;
}

// -------------------------------------------------------------------------------------------------
// Memory: the raw blocks

#ifdef __CUDACC__
static cudaMemPool_t memory_pool() {
    static const cudaMemPool_t pool = [] {
        int device;
        cudaMemPool_t p;
        // by default each synchronize would give unused memory back
        uint64_t keep_everything = UINT64_MAX;
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaDeviceGetDefaultMemPool(&p, device));
        CUDA_CHECK(cudaMemPoolSetAttribute(p, cudaMemPoolAttrReleaseThreshold, &keep_everything));
        return p;
    }();
    return pool;
}
#endif

void give_back_cached_memory() {
#ifdef __CUDACC__
    if (cuda_devices() == 0) { return; }
    // what was freed in stream order is free when the stream gets there
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemPoolTrimTo(memory_pool(), 0));
#endif
}

size_t available_memory(Device d) {
    if (d == META) { return SIZE_MAX; }
#ifdef __CUDACC__
    if (d == CUDA) {
        size_t free, total;
        uint64_t reserved, used;
        CUDA_CHECK(cudaMemGetInfo(&free, &total));
        CUDA_CHECK(
            cudaMemPoolGetAttribute(memory_pool(), cudaMemPoolAttrReservedMemCurrent, &reserved));
        CUDA_CHECK(cudaMemPoolGetAttribute(memory_pool(), cudaMemPoolAttrUsedMemCurrent, &used));
        return free + (reserved - used);
    }
#endif
    malloc_trim(0);  // memory that we freed and malloc kept is available, too
    return system_memory();
}

// Returns null where there is not enough memory.
static void* allocate_cpu(size_t bytes) {
    // Left alone, malloc maps each large block afresh and unmaps it when freed; the kernel then
    // zeroes every page of every activation in every step. So: no mappings, and nothing goes back
    // before available_memory() asks for it.
    static const bool tuned = (mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1), true);
    (void)tuned;
    // Linux promises more memory than it has, and kills who touches it. To ask takes 0.2 ms, so we
    // do once per so many bytes, and want room for as many again.
    constexpr size_t unasked_bytes = 32 << 20;
    static std::atomic<size_t> unasked{0};
    size_t needs = std::max(bytes, bytes + unasked_bytes);  // of SIZE_MAX the sum wraps
    if (bytes > unasked_bytes || (unasked += bytes) > unasked_bytes) {
        if (needs > system_memory() && needs > available_memory(CPU)) { return nullptr; }
        unasked = 0;
    }
    // We align to 64 bytes (an AVX-512 register) ourselves: glibc 2.36's aligned_alloc gives the
    // slack before a block to small requests, and then the freed block is too short for the next
    // one of its size.
    char* block = (char*)malloc(bytes + 64);
    if (!block) { return nullptr; }
    char* data = (char*)(((uintptr_t)block + 64) & ~(uintptr_t)63);
    ((char**)data)[-1] = block;
    return data;
}

static void free_cpu(void* data) { free(((char**)data)[-1]); }

#ifdef __CUDACC__
// Where the pool holds enough, but in pieces, the driver remaps their pages into one block
// (measured), but for those that the GPU has yet to free: the second attempt first waits for it and
// gives unused pages back.
static void* allocate_cuda(size_t bytes) {
    void* data = nullptr;
    for (int attempt = 0; attempt < 2; attempt++) {
        if (attempt == 1) { give_back_cached_memory(); }
        cudaError_t error = cudaMallocFromPoolAsync(&data, bytes, memory_pool(), stream());
        if (error == cudaSuccess) { return data; }
        if (error != cudaErrorMemoryAllocation) { CUDA_CHECK(error); }
        cudaGetLastError();
    }
    return nullptr;
}

static void free_cuda(void* data) {
    cudaError_t error = cudaFreeAsync(data, stream());
    // Static tensors die after the driver has shut down, and after a fault every call fails: one
    // line is enough.
    static bool said = false;
    if (error != cudaSuccess && error != cudaErrorCudartUnloading && !said) {
        said = true;
        note("cudaFreeAsync: %s", cudaGetErrorString(error));
    }
}
#else
static void* allocate_cuda(size_t) { return nullptr; }
static void free_cuda(void*) {}
#endif

// -------------------------------------------------------------------------------------------------
// Memory: the books

static MemoryUse uses[3];       // one per device
static std::mutex books_mutex;  // the last owner of a buffer may be another thread
static std::set<const Memory*> live[3];

static std::atomic<bool> logging{false};
static Device logged_device;
static double log_start;
static std::vector<MemoryEvent> memory_log;

std::vector<const char*>& open_ranges() {
    static thread_local std::vector<const char*> ranges;
    return ranges;
}
const char* innermost_range() { return open_ranges().empty() ? "" : open_ranges().back(); }

static void log_event(const Memory* m, double ms, bool is_alloc, std::vector<const char*> ranges) {
    if (m->bytes == 0 || m->device != logged_device) { return; }
    memory_log.push_back(
        {ms, is_alloc, (uint64_t)m->data, m->bytes, m->category, std::move(ranges), m->at});
}
void start_memory_log(Device device) {
    std::lock_guard<std::mutex> lock(books_mutex);
    memory_log.clear();
    logged_device = device, log_start = now_ms();
    for (const Memory* m : live[device]) {
        log_event(m, 0, true,
                  *m->op ? std::vector<const char*>{m->op} : std::vector<const char*>());
    }
    logging = true;
}
std::vector<MemoryEvent> stop_memory_log() {
    std::lock_guard<std::mutex> lock(books_mutex);
    logging = false;
    return std::move(memory_log);
}

static void peak_is_now(MemoryUse& use) {
    use.peak = use.now;
    std::copy_n(use.now_by, CATEGORIES, use.peak_by);
}
void reset_peak(Device device) {
    std::lock_guard<std::mutex> lock(books_mutex);
    peak_is_now(uses[device]);
}
const MemoryUse& memory_use(Device device) { return uses[device]; }

static void book(const Memory* m, bool comes) {
    std::lock_guard<std::mutex> lock(books_mutex);
    if (logging) { log_event(m, now_ms() - log_start, comes, open_ranges()); }
    if (comes) {
        live[m->device].insert(m);
    } else {
        live[m->device].erase(m);
    }
    MemoryUse& use = uses[m->device];
    use.now += comes ? m->bytes : -m->bytes;
    use.now_by[m->category] += comes ? m->bytes : -m->bytes;
    if (use.now > use.peak) { peak_is_now(use); }
}

static std::shared_ptr<Places> places;  // in use

void allocate_in(const std::shared_ptr<Places>& use, const std::function<void()>& f) {
    run_with(places, use, f);
}

std::shared_ptr<Memory> allocate(Device device, size_t bytes, Category category, Source at) {
    auto memory = std::make_shared<Memory>();
    memory->device = device;
    memory->category = category;
    memory->op = innermost_range();
    memory->at = at;
    void* place = nullptr;
    if (places && device != CPU && bytes > 0) {
        // where it throws, there is nothing to give back
        memory->number = places->take(bytes, &place);
        memory->places = places;
        memory->placed = place, memory->counted = !place || places->counted;
    }
    if (device == META) {
        // An address to count offsets from, and for a log to tell buffers apart.
        static std::atomic<uint64_t> next{1 << 20};
        memory->data = (void*)next.fetch_add((bytes + 511) / 512 * 512);
    } else if (bytes > 0) {
        memory->data = place ? place : device == CUDA ? allocate_cuda(bytes) : allocate_cpu(bytes);
        if (!memory->data) {
            throw OutOfMemory(
                bytes,
                strprintf(
                    "out of memory on %s: %.2f GiB for %s, beside %.2f in use, with %.2f available",
                    name_of(device), to_gib(bytes), name_of(category), to_gib(uses[device].now),
                    to_gib(available_memory(device))));
        }
    }
#ifdef __CUDACC__
    // A free does not wait: it is a destructor and must not throw. Its time is early by one
    // operation at most.
    if (logging && device == CUDA) { CUDA_CHECK(cudaStreamSynchronize(stream())); }
#endif
    memory->bytes = bytes;
    if (memory->counted) { book(memory.get(), true); }
    return memory;
}

Memory::~Memory() {
    if (places) { places->give(number); }
    if (counted) { book(this, false); }
    if (data && !placed && device != META) { device == CUDA ? free_cuda(data) : free_cpu(data); }
}

void copy_bytes(void* to, Device to_device, const void* from, Device from_device, size_t bytes) {
    if (bytes == 0 || to_device == META || from_device == META) { return; }
#ifdef __CUDACC__
    if (to_device == CUDA || from_device == CUDA) {
        CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream()));
        CUDA_CHECK(cudaStreamSynchronize(stream()));
        return;
    }
#endif
    memcpy(to, from, bytes);
}

// -------------------------------------------------------------------------------------------------
// Time

double now_ms() {
    return std::chrono::duration<double, std::milli>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

#ifdef __CUDACC__
static std::mutex events_mutex;
static std::vector<cudaEvent_t> spare_events;  // creating one costs as much as a launch
static std::shared_ptr<void> new_event() {
    std::lock_guard<std::mutex> lock(events_mutex);
    cudaEvent_t event;
    if (spare_events.empty()) {
        CUDA_CHECK(cudaEventCreate(&event));
    } else {
        event = spare_events.back();
        spare_events.pop_back();
    }
    return std::shared_ptr<void>(event, [](void* e) {
        std::lock_guard<std::mutex> lock(events_mutex);
        spare_events.push_back((cudaEvent_t)e);
    });
}
Mark mark_on(cudaStream_t s) {
    Mark m{now_ms(), new_event()};
    CUDA_CHECK(cudaEventRecord((cudaEvent_t)m.event.get(), s));
    return m;
}
#endif

Mark mark() {
#ifdef __CUDACC__
    if (context.device == CUDA) { return mark_on(stream()); }
#endif
    return {now_ms(), nullptr};
}

double ms_of(const Mark& m, const Mark& origin) {
#ifdef __CUDACC__
    if (m.event && origin.event) {
        float ms;
        CUDA_CHECK(
            cudaEventElapsedTime(&ms, (cudaEvent_t)origin.event.get(), (cudaEvent_t)m.event.get()));
        return ms;
    }
#endif
    return m.ms - origin.ms;
}

Stats stats_of(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    int n = values.size();
    double mean = std::accumulate(values.begin(), values.end(), 0.0) / n;
    double squares = 0;
    for (double v : values) { squares += (v - mean) * (v - mean); }
    double std = n > 1 ? std::sqrt(squares / (n - 1)) : 0;
    double median = (values[(n - 1) / 2] + values[n / 2]) / 2;
    return {mean, std, median, values.front(), values.back(), n};
}

std::string deviation(const Stats& s, const char* format) {
    return s.n > 1 ? strprintf(format, s.std) : "";
}
const char* level(const Stats& a, const Stats& b) {
    const double difference = std::fabs(a.mean - b.mean), larger = std::max(a.mean, b.mean);
    if (difference <= 0.005 * larger) { return "within 0.5 %, a clock's drift"; }

    const int n = std::min(a.n, b.n);
    const double error = 2 * std::hypot(a.std / std::sqrt(a.n), b.std / std::sqrt(b.n));
    if (n >= 5) { return difference <= error ? "within twice the standard error" : nullptr; }

    const double noise = n == 1 ? 0.1 * larger : std::hypot(a.std, b.std);
    return difference <= std::max(noise, error) ? "within the deviations: too few steps to compare"
                                                : nullptr;
}

std::vector<double> time_queued_ms(int warmup, int n, const std::function<void()>& prepare,
                                   const std::function<void()>& f) {
    std::vector<Mark> spare(2 * n);
    for (Mark& m : spare) { m = mark(); }  // to make an event takes as long as a launch
    spare.clear();
    std::vector<std::pair<Mark, Mark>> marks;
    for (int i = -warmup; i < n; i++) {
        prepare();
        const Mark begin = mark();
        f();
        if (i >= 0) { marks.emplace_back(begin, mark()); }
    }
    synchronize();
    std::vector<double> times;
    for (const auto& [begin, end] : marks) { times.push_back(ms_of(end, begin)); }
    return times;
}
std::vector<double> time_ms(int warmup, int n, const std::function<void()>& f) {
    std::vector<double> times;
    synchronize();  // what was queued before is not ours to count
    for (int i = -warmup; i < n; i++) {
        double start = now_ms();
        f();
        synchronize();
        if (i >= 0) { times.push_back(now_ms() - start); }
    }
    return times;
}

// -------------------------------------------------------------------------------------------------
// Lines on stderr; ends by a signal

void note(const char* format, ...) { fprintf(stderr, "%s\n", one_line(FORMATTED(format)).c_str()); }

void progress(const char* format, ...) {
    static double next_ms = 0;  // the first line at once, then one in five seconds
    if (now_ms() < next_ms) { return; }
    next_ms = now_ms() + 5000;
    note("%s", FORMATTED(format).c_str());
}

static std::atomic<int> end_signal{0};

static void take_end_signal(int number) {
    end_signal = number;
    signal(number, SIG_DFL);  // the second one ends us at once
}
static void on_end_signals(sighandler_t answer) {
    for (int number : {SIGINT, SIGTERM, SIGHUP}) {
        if (signal(number, answer) == SIG_IGN) { signal(number, SIG_IGN); }  // as under nohup
    }
}
EndSignals::EndSignals() { end_signal = 0, on_end_signals(take_end_signal); }
EndSignals::~EndSignals() { on_end_signals(SIG_DFL); }
int EndSignals::seen() { return end_signal; }

// -------------------------------------------------------------------------------------------------
// Files

void replace_file(const std::string& path, const std::function<bool(FILE*)>& write) {
    const std::string temporary = path + strprintf(".tmp.%08x", std::random_device()());
    const char* name = temporary.c_str();
    const std::unique_ptr<const char, int (*)(const char*)> removed_at_the_end(name, remove);
    struct stat before;
    if (stat(path.c_str(), &before) == 0 && !S_ISREG(before.st_mode)) {
        // or we would replace /dev/null
        fail("%s: cannot be written: expected a regular file", path.c_str());
    }
    const int descriptor = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    const std::unique_ptr<FILE, int (*)(FILE*)> file(
        descriptor < 0 ? nullptr : fdopen(descriptor, "wb"), fclose);
    const bool done =
        file && (!write || (write(file.get()) && fflush(file.get()) == 0 &&
                            fsync(descriptor) == 0 && rename(name, path.c_str()) == 0));
    if (!done) { fail("%s: cannot be written: %s", path.c_str(), strerror(errno)); }
}

void save_file(const std::string& path, const std::string& bytes) {
    replace_file(path, [&](FILE* file) {
        return fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size();
    });
}

// -------------------------------------------------------------------------------------------------
// Ourselves

pid_t start_ourselves(const std::vector<std::string>& arguments,
                      const std::function<void()>& prepare) {
    std::vector<char*> argv = {program_invocation_name};  // as it was typed
    for (const std::string& a : arguments) { argv.push_back((char*)a.c_str()); }
    argv.push_back(nullptr);

    const pid_t parent = getpid(), child = fork();
    if (child < 0) { fail("fork: %s", strerror(errno)); }
    if (child > 0) { return child; }
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent) { _exit(1); }
    prepare();
    execv("/proc/self/exe", argv.data());
    _exit(127);
}

std::string run_ourselves(const std::vector<std::string>& arguments) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) { fail("pipe: %s", strerror(errno)); }
    fflush(nullptr);
    const pid_t child = start_ourselves(arguments, [&] { dup2(ends[1], STDOUT_FILENO); });
    close(ends[1]);

    FILE* output = fdopen(ends[0], "r");
    std::string text;
    for (int c; (c = fgetc(output)) != EOF;) { text += (char)c; }
    fclose(output);

    int status = 0;
    waitpid(child, &status, 0);
    if (status == 0) { return text; }
    fail("cs336 %s: %s %d", join(arguments, " ").c_str(),
         WIFSIGNALED(status) ? "killed by signal" : "exited with",
         WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
}

std::string commit() { return CS336_COMMIT; }
