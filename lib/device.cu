// lib/device.cu: the instruments that every other file uses. lib.h says what each one is for. Here
// are, in this order: texts and errors; where things run; strange machines (containers, limits, a
// library's whims), which a first reader skips; memory, as raw blocks and then as books; time;
// lines on stderr; files; this program, started anew. Read the books of memory and the time first:
// all times and bytes in tables come from them.
#include "gpu.h"

#include <random>

#include <malloc.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#ifdef HAVE_OPENBLAS
extern "C" char* openblas_get_corename(void);
#endif
#ifndef CS336_COMMIT
#define CS336_COMMIT "unknown"
#endif

// -------------------------------------------------------------------------------------------------
// Texts and errors

// Returns the text that vsnprintf makes, after asking for its length.
string vstrprintf(const char* format, va_list arguments) {
    va_list again;
    va_copy(again, arguments);
    string text(vsnprintf(nullptr, 0, format, again), '\0');
    va_end(again);
    vsnprintf(&text[0], text.size() + 1, format, arguments);
    return text;
}

string strprintf(const char* format, ...) { return FORMATTED(format); }
void fail(const char* format, ...) { throw Failure(1, FORMATTED(format)); }
void usage_error(const char* format, ...) { throw Failure(2, FORMATTED(format)); }

string counted(const string& n, const string& what) {
    return n + " " + what + (n == "1" ? "" : "s");
}
string list_of(const vector<string>& items) {
    if (items.size() < 2) { return join(items, ""); }
    return join({items.begin(), items.end() - 1}, ", ") + " and " + items.back();
}
string join(const vector<string>& items, const char* between) {
    string all;
    for (size_t i = 0; i < items.size(); i++) { all += (i == 0 ? "" : between) + items[i]; }
    return all;
}

string one_line(const string& text) {
    string line;
    for (unsigned char c : text) {
        line += c < 0x20 || c == 0x7f ? strprintf("\\x%02x", c) : string(1, c);
    }
    return line;
}

#ifdef HAVE_CUDA
// Returns the current card's properties; without a card those of an H100 that META needs to plan.
static const cudaDeviceProp& card() {
    static const cudaDeviceProp properties = [] {
        int device;
        cudaDeviceProp p{};
        p.multiProcessorCount = 132;
        p.major = 9;
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
size_t shared_memory_per_block() { return card().sharedMemPerBlockOptin; }

// Throws what went wrong with this call; a build for other cards gets a hint.
void cuda_check(cudaError_t error, const char* call, const char* file, int line) {
    if (error == cudaSuccess) { return; }
    cudaGetLastError();  // takes the error away: the next LAUNCH_CHECK would report it as its own
    string what = strprintf("%s:%d: %s: %s", file, line, call, cudaGetErrorString(error));
    if (error == cudaErrorMemoryAllocation) { throw OutOfMemory(what); }
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

Mode mode_from(const string& name) {
    return (Mode)(std::find(MODES, std::end(MODES), name) - MODES);
}
Precision precision_from(const string& name) {
    return (Precision)(std::find(PRECISIONS, std::end(PRECISIONS), name) - PRECISIONS);
}

// Returns what follows `before` in the file folder/name, up to the line's end; "": nothing.
// A line's beginning is "\n" in `before`. The file is not read into the heap: allocate() comes
// here, and a buffer there could break up a large block that was freed and is about to be asked for
// again.
static string text_in(const char* folder, const char* name, const char* before) {
    char path[512], text[1 << 14] = "\n";
    snprintf(path, sizeof path, "%s/%s", folder, name);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) { return ""; }
    const ssize_t n = read(file, text + 1, sizeof text - 2);
    close(file);

    text[1 + max<ssize_t>(n, 0)] = 0;
    const char* found = strstr(text, before);
    if (!found) { return ""; }
    found += strlen(before);
    return string(found, strcspn(found, "\n"));
}

// -------------------------------------------------------------------------------------------------
// Where things run

Context context;

// Returns how many GPUs we see, and why there is none. The driver is asked once: that takes
// microseconds, and launches want to know.
int cuda_devices(string* why) {
    static string reason;
    static const int devices = [] {
        int n = 0;
#ifdef HAVE_CUDA
        cudaError_t error = cudaGetDeviceCount(&n);
        if (error != cudaSuccess) {
            cudaGetLastError();
            n = 0;
            reason = cudaGetErrorString(error);
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

// Sets the device that the option asks for. `gpu` becomes the process's card, if it is usable.
void choose_device(const string& want, [[maybe_unused]] int gpu) {
    string why;
    const bool usable = want != "cpu" && cuda_devices(&why) > 0;
#ifdef HAVE_CUDA
    if (usable) { CUDA_CHECK(cudaSetDevice(gpu)); }
#endif
    if (!usable && want == "cuda") { fail("device cuda: there is none (%s)", why.c_str()); }
    if (want == "auto") {
        note("device auto: took %s", usable ? "cuda" : ("cpu (" + why + ")").c_str());
    }
    context.device = usable ? CUDA : CPU;
}

#ifdef HAVE_CUDA
// Returns the stream in which we launch. Its priority, the default, is the lowest: collectives come
// before it (open_lane).
cudaStream_t stream() {
    static const cudaStream_t compute = new_stream();
    return compute;
}
cudaStream_t new_stream() {
    cudaStream_t created;
    CUDA_CHECK(cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking));
    return created;
}
#endif

void synchronize() {
#ifdef HAVE_CUDA
    if (context.device == CUDA) { CUDA_CHECK(cudaDeviceSynchronize()); }
#endif
}

// Returns what a caption says of context.device: the card with its driver, or the CPU.
string device_description() {
#ifdef HAVE_CUDA
    if (context.device == CUDA) {
        // The runtime only knows which CUDA the driver is made for. The driver's own version, as
        // 580.95.05, is this line's first word that begins with a digit (x86_64 stands before it).
        std::istringstream words(text_in("/proc/driver/nvidia", "version", "\nNVRM version:"));
        string version;
        while (words >> version && !isdigit(version[0])) {}
        return strprintf("%s, driver %s, CUDA %d.%d, %.0f GB", card().name,
                         words ? version.c_str() : "unknown", CUDART_VERSION / 1000,
                         CUDART_VERSION % 1000 / 10, 1e-9 * card().totalGlobalMem);
    }
#endif
    if (context.device == META) { return "meta (nothing is computed)"; }
    const string name = text_in("/proc", "cpuinfo", "\nmodel name\t: ");
    string text = (name.empty() ? "CPU" : name) + ", " + counted(omp_get_max_threads(), "thread");
#ifdef HAVE_OPENBLAS
    text += strprintf(", OpenBLAS %s", openblas_get_corename());
#endif
    return text;
}

// -------------------------------------------------------------------------------------------------
// Strange machines: containers and limits that leave less memory than the machine has, libraries
// that have to be told what this CPU is, nohup.

// Returns the number that text_in finds there; SIZE_MAX: there is none, so no limit.
static size_t number_in(const char* folder, const char* name, const char* before) {
    size_t number = SIZE_MAX;
    sscanf(text_in(folder, name, before).c_str(), "%zu", &number);
    return number;
}

// Returns the bytes that the control group in this folder and those in the folders above leave to
// us; SIZE_MAX: they have no limit. A container's limit is that of such a group. Like text_in it
// takes nothing from the heap.
static size_t group_memory(const string& path) {
    char group[512];
    snprintf(group, sizeof group, "%s", path.c_str());
    size_t left = SIZE_MAX;
    while (*group) {
        size_t limit = number_in(group, "memory.max", "\n");
        size_t used = number_in(group, "memory.current", "\n");
        // Cached files count as used, but make room.
        size_t cached = number_in(group, "memory.stat", "\ninactive_file ");
        if (limit == SIZE_MAX) {  // version 1 has other names
            limit = number_in(group, "memory.limit_in_bytes", "\n");
            used = number_in(group, "memory.usage_in_bytes", "\n");
            cached = number_in(group, "memory.stat", "\ntotal_inactive_file ");
        }
        if (limit < SIZE_MAX) { left = min(left, max(limit + cached, used) - used); }
        *strrchr(group, '/') = '\0';  // on to the folder above
    }
    return left;
}

// Returns the least of what Linux has available, what our control groups leave, and what `ulimit
// -v` leaves. `group`: for tests, this group's folder instead of ours; then without `ulimit -v`.
size_t system_memory(const char* group) {
    // In a container the folder may not be there, but one above it.
    static const string own = "/sys/fs/cgroup" + text_in("/proc/self", "cgroup", "\n0::");
    static const string own_v1 =
        "/sys/fs/cgroup/memory" + text_in("/proc/self", "cgroup", ":memory:");
    size_t left = number_in("/proc", "meminfo", "\nMemAvailable:") * 1024;
    if (group) { return min(left, group_memory(group)); }
    left = min({left, group_memory(own), group_memory(own_v1)});

    rlimit space;
    if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) {
        // OpenBLAS takes a buffer of 128 MiB for each thread when the thread first multiplies, and
        // tries for ever where it gets none; malloc takes 64 MiB of addresses for each. So the
        // tensors leave each thread 192 MiB, rounded up to 200.
        const size_t for_threads = (size_t)omp_get_max_threads() * 200 << 20;
        const size_t used = number_in("/proc/self", "status", "\nVmSize:") * 1024 + for_threads;
        left = min(left, max<size_t>(space.rlim_cur, used) - used);
    }
    return left;
}

// Whether whoever started us ignores SIGHUP, as nohup does. We ask before the shared libraries
// start, from .preinit_array, since one of them (UCX, behind some builds of Gloo) takes that
// signal.
static bool ignores_hangup;
static void see_hangup() {
    struct sigaction before {};
    sigaction(SIGHUP, nullptr, &before);
    ignores_hangup = before.sa_handler == SIG_IGN;
}
__attribute__((section(".preinit_array"), used)) static void (*const first)() = see_hangup;

// Sets the variables that two libraries read only while the program loads, and starts the program
// once more, if one was unset. OpenBLAS gives a processor younger than itself the kernels of an old
// one (Prescott: SSE3), five times too slow. OpenMP's threads spin while they wait: where cores are
// shared (containers, CI, several ranks) a step was seen to take 4 times as long. OpenBLAS's own
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

// -------------------------------------------------------------------------------------------------
// Memory: the raw blocks

#ifdef HAVE_CUDA
// Returns the card's pool, told to keep what was freed: by default each synchronize would give
// unused memory back to the driver.
static cudaMemPool_t memory_pool() {
    static const cudaMemPool_t pool = [] {
        int device;
        cudaMemPool_t p;
        uint64_t keep_everything = UINT64_MAX;
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaDeviceGetDefaultMemPool(&p, device));
        CUDA_CHECK(cudaMemPoolSetAttribute(p, cudaMemPoolAttrReleaseThreshold, &keep_everything));
        return p;
    }();
    return pool;
}
#endif

// Gives the driver what our pool keeps, but does not use.
void give_back_cached_memory() {
#ifdef HAVE_CUDA
    if (cuda_devices() == 0) { return; }
    // What was freed in stream order is free when the stream gets there.
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemPoolTrimTo(memory_pool(), 0));
#endif
}

// Returns the bytes that could be allocated now. What our pool, or malloc, keeps counts, too.
size_t available_memory(Device d) {
    if (d == META) { return SIZE_MAX; }
#ifdef HAVE_CUDA
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
    malloc_trim(0);  // gives back what malloc keeps
    return system_memory();
}

// Returns a block of the CPU's memory; null: there is not enough.
static void* allocate_cpu(size_t bytes) {
    // Left alone, malloc maps each large block afresh and unmaps it when freed; the kernel then
    // zeroes every page of every activation in every step. So: no mappings, and nothing goes back
    // to the system before available_memory() asks for it.
    static std::once_flag once;
    std::call_once(once, [] {
        mallopt(M_MMAP_MAX, 0);
        mallopt(M_TRIM_THRESHOLD, -1);
    });

    // Linux promises more memory than it has, and kills who touches it. To ask takes 0.2 ms, so we
    // do once per 32 MiB, and want room for as many again. available_memory() first makes malloc
    // give back what it keeps, so it comes second.
    constexpr size_t slack = 32 << 20;
    static atomic<size_t> unasked{0};  // bytes that were allocated since we asked
    if (bytes > SIZE_MAX - slack) { return nullptr; }
    if (bytes > slack || (unasked += bytes) > slack) {
        const size_t needs = bytes + slack;
        if (needs > system_memory() && needs > available_memory(CPU)) { return nullptr; }
        unasked = 0;
    }

    // We align to 64 bytes (an AVX-512 register) ourselves: glibc 2.36's aligned_alloc gives the
    // slack before a block to small requests, and then the freed block is too short for the next
    // one of its size. Where malloc's block begins stands right before ours, for free_cpu.
    constexpr uintptr_t alignment = 64;
    char* block = (char*)malloc(bytes + alignment);
    if (!block) { return nullptr; }
    char* data = (char*)(((uintptr_t)block + alignment) & ~(alignment - 1));
    ((char**)data)[-1] = block;
    return data;
}

static void free_cpu(void* data) { free(((char**)data)[-1]); }

#ifdef HAVE_CUDA
// Returns a block of the card's pool; null: there is not enough. If the pool holds enough, but in
// pieces, the driver remaps their pages into one block (measured). It leaves out the pages that the
// GPU has yet to free: so the second attempt first waits for the GPU and gives unused pages back.
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

// Frees a block when the stream gets here. A destructor calls it, so it must not throw: after a
// fault, where every call fails, it says so once. Static tensors may die after the driver has shut
// down, which is no error.
static void free_cuda(void* data) {
    cudaError_t error = cudaFreeAsync(data, stream());
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
// Memory: the books. Each buffer is entered when it comes and when it goes; the peak is kept with
// each category's share of it.

static MemoryUse uses[META + 1];  // by device, as what follows
// Never destroyed: a static Tensor of another file may go after the statics of this one.
static auto live = new set<const Memory*>[META + 1];
static mutex books_mutex;  // the last owner of a buffer may be another thread

static atomic<bool> logging{false};
static Device logged_device;
static double log_start;
static vector<MemoryEvent> memory_log;

vector<const char*>& open_ranges() {
    static thread_local vector<const char*> ranges;
    return ranges;
}
const char* innermost_range() { return open_ranges().empty() ? "" : open_ranges().back(); }

static void log_event(const Memory* m, double ms, bool is_alloc, vector<const char*> ranges) {
    if (m->bytes == 0 || m->device != logged_device) { return; }
    memory_log.push_back(
        {ms, is_alloc, (uint64_t)m->data, m->bytes, m->category, move(ranges), m->at});
}

// Begins a log with the buffers that are there, at 0 ms; of their ranges only the innermost is
// known by now.
void start_memory_log(Device device) {
    lock_guard lock(books_mutex);
    memory_log.clear();
    logged_device = device;
    log_start = now_ms();
    for (const Memory* m : live[device]) {
        vector<const char*> ranges;
        if (*m->range_name) { ranges.push_back(m->range_name); }
        log_event(m, 0, true, ranges);
    }
    logging = true;
}
vector<MemoryEvent> stop_memory_log() {
    lock_guard lock(books_mutex);
    logging = false;
    return move(memory_log);
}

static void peak_is_now(MemoryUse& use) {
    use.peak = use.now;
    std::copy_n(use.now_by, CATEGORIES, use.peak_by);
}
void reset_peak(Device device) {
    lock_guard lock(books_mutex);
    peak_is_now(uses[device]);
}
const MemoryUse& memory_use(Device device) { return uses[device]; }

// Enters a buffer that comes, or one that goes.
static void book(const Memory* m, bool comes) {
    lock_guard lock(books_mutex);
    if (logging) { log_event(m, now_ms() - log_start, comes, open_ranges()); }
    MemoryUse& use = uses[m->device];
    if (comes) {
        live[m->device].insert(m);
        use.now += m->bytes;
        use.now_by[m->category] += m->bytes;
    } else {
        live[m->device].erase(m);
        use.now -= m->bytes;
        use.now_by[m->category] -= m->bytes;
    }
    if (use.now > use.peak) { peak_is_now(use); }
}

// The places that allocate() asks first; null: none. allocate_in sets them, for all threads and
// without a lock, so the main thread calls it.
static shared_ptr<Places> asked_first;

// Runs f, and gives back the places that were in use before, also where f throws.
void allocate_in(const shared_ptr<Places>& use, const Job& f) {
    struct RestorePlaces {
        shared_ptr<Places> before = asked_first;
        ~RestorePlaces() { asked_first = before; }
    } restore;
    asked_first = use;
    f();
}

// Returns a new buffer, at one of the places in use or else in memory of its own. Books it, unless
// it lies within a buffer that is booked already (see Places::counted).
shared_ptr<Memory> allocate(Device device, size_t bytes, Category category, Source at) {
    auto memory = make_shared<Memory>();
    memory->device = device;
    memory->category = category;
    memory->range_name = innermost_range();
    memory->at = at;
    void* place = nullptr;
    if (asked_first && device != CPU && bytes > 0) {
        memory->number = asked_first->take(bytes, &place);
        // After take(): where that throws, there is nothing to give back.
        memory->places = asked_first;
        memory->placed = place;
    }

    if (device == META) {
        // An address to count offsets from, and for a log to tell buffers apart.
        static atomic<uint64_t> next{1 << 20};
        memory->data = (void*)next.fetch_add((bytes + 511) / 512 * 512);
    } else if (place) {
        memory->data = place;
    } else if (bytes > 0) {
        memory->data = device == CUDA ? allocate_cuda(bytes) : allocate_cpu(bytes);
        if (!memory->data) {
            throw OutOfMemory(strprintf(
                "out of memory on %s: %.2f GiB for %s, beside %.2f in use, with %.2f available",
                name_of(device), to_gib(bytes), name_of(category), to_gib(uses[device].now),
                to_gib(available_memory(device))));
        }
    }

#ifdef HAVE_CUDA
    // The log's times are the GPU's own, so we wait for it. A free does not: it is a destructor and
    // must not throw. Its time is early by what was queued since the last allocation: by one
    // operation, or by several that allocate nothing, as adamw_plain's kernels.
    if (logging && device == CUDA) { CUDA_CHECK(cudaStreamSynchronize(stream())); }
#endif
    memory->bytes = bytes;  // here: where the above throws, ~Memory takes 0 from the books
    if (!place || asked_first->counted) { book(memory.get(), true); }
    return memory;
}

Memory::~Memory() {
    if (places) { places->give(number); }
    if (!placed || places->counted) { book(this, false); }
    if (!data || placed) { return; }
    if (device == CUDA) { free_cuda(data); }
    if (device == CPU) { free_cpu(data); }
}

// Copies bytes from one device to another, or on one, and waits for the end; META has none.
void copy_bytes(void* to, Device to_device, const void* from, Device from_device, size_t bytes) {
    if (bytes == 0 || to_device == META || from_device == META) { return; }
#ifdef HAVE_CUDA
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

#ifdef HAVE_CUDA
static mutex events_mutex;
static vector<cudaEvent_t> spare_events;

// Returns an event that goes back to the spare ones: creating one costs as much as a launch.
static shared_ptr<CUevent_st> new_event() {
    lock_guard lock(events_mutex);
    cudaEvent_t event;
    if (spare_events.empty()) {
        CUDA_CHECK(cudaEventCreate(&event));
    } else {
        event = spare_events.back();
        spare_events.pop_back();
    }
    return {event, [](cudaEvent_t e) {
                lock_guard lock(events_mutex);
                spare_events.push_back(e);
            }};
}
Mark mark_on(cudaStream_t s) {
    Mark m{now_ms(), new_event()};
    CUDA_CHECK(cudaEventRecord(m.event.get(), s));
    return m;
}
void await(cudaStream_t s, const Mark& m) { CUDA_CHECK(cudaStreamWaitEvent(s, m.event.get())); }
#endif

Mark mark() {
#ifdef HAVE_CUDA
    if (context.device == CUDA) { return mark_on(stream()); }
#endif
    return {now_ms(), nullptr};
}

// Returns the ms from origin to m: between two of the GPU's marks by its clock, else by the host's.
double ms_of(const Mark& m, const Mark& origin) {
#ifdef HAVE_CUDA
    if (m.event && origin.event) {
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, origin.event.get(), m.event.get()));
        return ms;
    }
#endif
    return m.ms - origin.ms;
}

// Returns mean, standard deviation (of the sample: n - 1), median, least and largest.
Stats stats_of(vector<double> values) {
    sort(values.begin(), values.end());
    int n = values.size();
    double mean = std::accumulate(values.begin(), values.end(), 0.0) / n;
    double squares = 0;
    for (double v : values) { squares += (v - mean) * (v - mean); }
    double std = n > 1 ? sqrt(squares / (n - 1)) : 0;
    double median = (values[(n - 1) / 2] + values[n / 2]) / 2;
    return {mean, std, median, values.front(), values.back(), n};
}

string deviation(const Stats& s, const char* format) {
    return s.n > 1 ? strprintf(format, s.std) : "";
}

// Returns within what two means are level, or why they cannot be told apart; "" if they differ.
string level(const Stats& a, const Stats& b, const string& with) {
    const double difference = fabs(a.mean - b.mean), larger = max(a.mean, b.mean);
    if (difference <= 0.005 * larger) { return "level" + with + " within 0.5 %"; }

    const int n = min(a.n, b.n);
    double noise = 2 * std::hypot(a.std / sqrt(a.n), b.std / sqrt(b.n));  // of the means
    // Few runs estimate their deviation badly: about Student's t for 2 n - 2 degrees of freedom.
    if (n < 5) { noise = n == 1 ? 0.5 * larger : noise * (1 + 1.2 / (n - 1)); }
    if (difference > noise) { return ""; }

    if (n > 1 && difference > 0.1 * larger) { return "too noisy to compare" + with; }
    if (n < 5) { return "too briefly timed to compare" + with; }
    return "level" + with + " within twice the standard error";
}

// Returns the ms of f in the last n of warmup + n runs by the device's own events. The host waits
// only after the last run.
vector<double> time_queued_ms(int warmup, int n, const Job& prepare, const Job& f) {
    // To create an event takes as long as a launch. So 2 n are created before the first run, and
    // clear() hands them to spare_events, where mark() finds them during the runs.
    vector<Mark> spare(2 * n);
    for (Mark& m : spare) { m = mark(); }
    spare.clear();

    vector<pair<Mark, Mark>> marks;
    for (int i = -warmup; i < n; i++) {
        prepare();
        const Mark begin = mark();
        f();
        if (i >= 0) { marks.emplace_back(begin, mark()); }
    }

    synchronize();
    vector<double> times;
    for (const auto& [begin, end] : marks) { times.push_back(ms_of(end, begin)); }
    return times;
}

// Returns the ms of the last n of warmup + n runs of f by the host's clock, each until its end.
vector<double> time_ms(int warmup, int n, const Job& f) {
    vector<double> times;
    synchronize();  // what was queued before is not ours to count
    for (int i = -warmup; i < n; i++) {
        double start = now_ms();
        f();
        synchronize();
        if (i >= 0) { times.push_back(now_ms() - start); }
    }
    return times;
}
double median_ms(const Job& f) { return stats_of(time_ms(2, 10, f)).median; }

// -------------------------------------------------------------------------------------------------
// Lines on stderr; ends by a signal

void note(const char* format, ...) { fprintf(stderr, "%s\n", one_line(FORMATTED(format)).c_str()); }

void progress(const char* format, ...) {
    static double next_ms = 0;  // so the first line comes at once
    if (now_ms() < next_ms) { return; }
    next_ms = now_ms() + 5000;
    note("%s", FORMATTED(format).c_str());
}

static atomic<int> end_signal{0};

static void take_end_signal(int number) {
    end_signal = number;
    if (number == SIGINT) { signal(number, SIG_DFL); }  // a second Ctrl-C ends us at once
}
// Catches the signals that end a process, or no longer catches them.
void catch_end_signals(bool caught) {
    end_signal = 0;
    for (int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
        // A signal that was ignored stays so: nohup wants it.
        const sighandler_t before = signal(number, caught ? take_end_signal : SIG_DFL);
        if (before == SIG_IGN) { signal(number, SIG_IGN); }
    }
}
int end_signal_seen() { return end_signal; }

// -------------------------------------------------------------------------------------------------
// Files

// Lets `write` fill a temporary file beside path, and renames it to path when all is on the disk.
// Without `write` it only finds out whether such a file can be made.
void replace_file(const string& path, const function<bool(FILE*)>& write) {
    const string temporary = path + strprintf(".tmp.%08x", std::random_device()());
    const char* name = temporary.c_str();
    const unique_ptr<const char, int (*)(const char*)> removed_at_the_end(name, remove);
    struct stat before;
    if (stat(path.c_str(), &before) == 0 && !S_ISREG(before.st_mode)) {  // such as /dev/null
        fail("%s: cannot be written: expected a regular file", path.c_str());
    }

    // x: a file of that name must not be there; e: children do not inherit it.
    const unique_ptr<FILE, int (*)(FILE*)> file(fopen(name, "wbxe"), fclose);
    const bool done =
        file && (!write || (write(file.get()) && fflush(file.get()) == 0 &&
                            fsync(fileno(file.get())) == 0 && rename(name, path.c_str()) == 0));
    if (!done) { fail("%s: cannot be written: %s", path.c_str(), strerror(errno)); }
}

void save_file(const string& path, const string& bytes) {
    replace_file(path, [&](FILE* file) {
        return fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size();
    });
}

// -------------------------------------------------------------------------------------------------
// This program, started anew

// Starts this program with these arguments, calls `prepare` in the child before that, and returns
// the child's number. The system kills the child when we end: to be exact, when the thread that
// called this ends, so that has to be the main one.
pid_t start_ourselves(const vector<string>& arguments, const Job& prepare) {
    vector<char*> argv = {program_invocation_name};  // as it was typed
    for (const string& a : arguments) { argv.push_back((char*)a.c_str()); }
    argv.push_back(nullptr);

    const pid_t parent = getpid();
    const pid_t child = fork();
    if (child < 0) { fail("fork: %s", strerror(errno)); }
    if (child > 0) { return child; }

    // The second condition: we have ended before the child could ask for that.
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent) { _exit(1); }
    prepare();
    execv("/proc/self/exe", argv.data());
    perror("cs336: execv");
    _exit(1);
}

// Runs this program with these arguments to its end, and returns its stdout; fails if it fails.
string run_ourselves(const vector<string>& arguments) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) { fail("pipe: %s", strerror(errno)); }
    fflush(nullptr);
    const pid_t child = start_ourselves(arguments, [&] {
        // Not SIGKILL: where the child launches ranks it still has to remove their folder.
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        if (dup2(ends[1], STDOUT_FILENO) < 0) { _exit(127); }
    });
    close(ends[1]);

    string text;
    for (char c; read(ends[0], &c, 1) == 1;) { text += c; }
    close(ends[0]);

    int status = -1;  // where waitpid fails
    waitpid(child, &status, 0);
    if (status == 0) { return text; }
    fail("cs336 %s: %s %d", join(arguments, " ").c_str(),
         WIFSIGNALED(status) ? "killed by signal" : "exited with",
         WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
}

string commit() { return CS336_COMMIT; }
