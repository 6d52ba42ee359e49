// lib/trace.cu: named ranges of work, and what ran in them. CUPTI, NVIDIA's tracing library, records what ran on the
// GPU.
#include "lib.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

#include <cxxabi.h>
#include <unistd.h>

#ifdef __CUDACC__
#include <nvtx3/nvToolsExt.h>
#ifdef HAVE_CUPTI
#include <cupti.h>
#endif
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Tracing. Ranges keep a list with their times. CUPTI records what the GPU runs, in buffers that it fills and hands
// back on a thread of its own. How a kernel finds its range: CUPTI calls us at each launch, on the thread that
// launches, also where a library does. The launch has a number, and the kernel's record names it, too.

static std::atomic<bool> tracing{false};
static std::mutex trace_mutex;
static Trace trace;
// The numbers of ranges go on from one trace to the next, so that a range of an earlier trace is known as such.
static int first_range = 0;
static thread_local int innermost_traced = -1;

// system_clock is CLOCK_REALTIME, which CUPTI uses, too.
static int64_t epoch_ns() {
    auto now = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}
static int in_this_trace(int range) { return range >= first_range ? range - first_range : -1; }

#if defined(__CUDACC__) && defined(HAVE_CUPTI)
#if CUPTI_API_VERSION >= 130000
using KernelActivity = CUpti_ActivityKernel10;
#else
using KernelActivity = CUpti_ActivityKernel9;
#endif
// CONCURRENT_KERNEL, because KERNEL would run one kernel at a time.
static const CUpti_ActivityKind traced_activities[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                                       CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET};
// What CUPTI's thread found has a mutex of its own: reading a buffer takes milliseconds, and ranges must not wait so
// long.
static std::mutex cupti_mutex;
static std::vector<TracedWork> cupti_work;
static size_t cupti_dropped;
static std::string cupti_error;  // the first one: on CUPTI's thread nothing may be thrown

static bool succeeded(CUptiResult result, const char* call) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    const char* text = nullptr;
    if (result != CUPTI_SUCCESS && cupti_error.empty()) {
        const bool known = cuptiGetResultString(result, &text) == CUPTI_SUCCESS && text;
        cupti_error = strprintf("%s: %s", call, known ? text : "unknown error");
    }
    return result == CUPTI_SUCCESS;
}
#define CUPTI_OK(call) succeeded(call, #call)

// In which range each launch and copy was made. CUPTI's own way, external ids, costs more than twice as much: these ids
// come in records of their own, beside a record for each API call.
static CUpti_SubscriberHandle launch_subscriber;
static std::mutex launch_mutex;
static std::vector<std::pair<uint32_t, int>> launches;  // correlation, range

static void CUPTIAPI note_launch(void*, CUpti_CallbackDomain, CUpti_CallbackId, const void* call) {
    auto info = (const CUpti_CallbackData*)call;
    if (info->callbackSite != CUPTI_API_ENTER) { return; }
    std::lock_guard<std::mutex> lock(launch_mutex);
    launches.emplace_back(info->correlationId, innermost_traced);
}
// A call of the runtime ends in a call of the driver, so the driver's are enough.
static bool watch_launches() {
    bool ok = CUPTI_OK(cuptiSubscribe(&launch_subscriber, (CUpti_CallbackFunc)note_launch, nullptr));
    for (int id = 1; id < (int)CUPTI_DRIVER_TRACE_CBID_SIZE && ok; id++) {
        const char* name = nullptr;  // a number without a call has none
        if (cuptiGetCallbackName(CUPTI_CB_DOMAIN_DRIVER_API, id, &name) != CUPTI_SUCCESS || !name) { continue; }
        if (strstr(name, "Launch") || strstr(name, "Memcpy") || strstr(name, "Memset")) {
            ok = CUPTI_OK(cuptiEnableCallback(1, launch_subscriber, CUPTI_CB_DOMAIN_DRIVER_API, id));
        }
    }
    return ok;
}

static const char* kernel_name(const char* mangled) {
    static std::unordered_map<std::string, std::string> names;  // nodes stay where they are
    auto found = names.find(mangled);
    if (found == names.end()) {
        int status = 0;
        char* text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
        found = names.emplace(mangled, status == 0 && text ? text : mangled).first;
        free(text);
    }
    return found->second.c_str();
}
static const char* copy_name(int kind) {
    return kind == CUPTI_ACTIVITY_MEMCPY_KIND_HTOD   ? "[CUDA memcpy HtoD]"
           : kind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOH ? "[CUDA memcpy DtoH]"
           : kind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOD ? "[CUDA memcpy DtoD]"
                                                     : "[CUDA memcpy]";
}
// What is read here lies alike in all three types of records. They are packed: nothing may refer to their fields.
template <class R>
static TracedWork work_of(const R* r, const char* name) {
    TracedWork w{};
    w.name = name, w.range = -1;
    w.start = r->start, w.end = r->end;
    w.stream = r->streamId, w.correlation = r->correlationId;
    return w;
}
static void take_record(const CUpti_Activity* record) {
    TracedWork w;
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
        auto r = (const KernelActivity*)record;
        w = work_of(r, kernel_name(r->name));
        w.grid[0] = r->gridX, w.grid[1] = r->gridY, w.grid[2] = r->gridZ;
        w.block[0] = r->blockX, w.block[1] = r->blockY, w.block[2] = r->blockZ;
        w.registers = r->registersPerThread, w.shared_bytes = r->staticSharedMemory + r->dynamicSharedMemory;
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
        auto r = (const CUpti_ActivityMemcpy5*)record;  // the later 6, which CUDA 12.4 lacks, begins alike
        w = work_of(r, copy_name(r->copyKind));
        w.bytes = r->bytes;
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
        auto r = (const CUpti_ActivityMemset4*)record;
        w = work_of(r, "[CUDA memset]");
        w.bytes = r->bytes;
    } else {
        return;
    }
    if (w.end <= w.start) {
        cupti_dropped++;  // no room on the device for its times
    } else {
        cupti_work.push_back(w);
    }
}

static void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* max_records) {
    *size = 2 << 20;                              // bytes, some 10000 records
    *max_records = 0;                             // as many as fit
    *buffer = (uint8_t*)aligned_alloc(8, *size);  // if it is null, CUPTI drops records
}
static void CUPTIAPI take_buffer(CUcontext cuda, uint32_t stream_id, uint8_t* buffer, size_t, size_t bytes) {
    std::lock_guard<std::mutex> lock(cupti_mutex);
    CUpti_Activity* record = nullptr;
    CUptiResult result = CUPTI_ERROR_MAX_LIMIT_REACHED;  // what the end of a buffer is called
    while (bytes > 0 && (result = cuptiActivityGetNextRecord(buffer, bytes, &record)) == CUPTI_SUCCESS) {
        take_record(record);
    }
    if (result != CUPTI_ERROR_MAX_LIMIT_REACHED) { succeeded(result, "cuptiActivityGetNextRecord"); }
    size_t dropped = 0;
    CUPTI_OK(cuptiActivityGetNumDroppedRecords(cuda, stream_id, &dropped));
    cupti_dropped += dropped;
    free(buffer);
}

static void end_cupti() {
    for (CUpti_ActivityKind kind : traced_activities) { CUPTI_OK(cuptiActivityDisable(kind)); }
    CUPTI_OK(cuptiUnsubscribe(launch_subscriber));
}
// Starts CUPTI, or says why not.
static std::string start_cupti() {
    std::string why;
    if (cuda_devices(&why) == 0) { return why; }
    if (getenv("NSYS_PROFILING_SESSION_ID")) { return "nsys is attached"; }
    cupti_error.clear(), cupti_work.clear(), launches.clear(), cupti_dropped = 0;
    bool ok = CUPTI_OK(cuptiActivityRegisterCallbacks(give_buffer, take_buffer)) && watch_launches();
    for (CUpti_ActivityKind kind : traced_activities) { ok = ok && CUPTI_OK(cuptiActivityEnable(kind)); }
    if (ok) { return ""; }
    end_cupti();
    return cupti_error;
}
static void stop_cupti() {
    CUDA_CHECK(cudaDeviceSynchronize());  // flushing does not wait for what still runs
    CUPTI_OK(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED));
    end_cupti();
    uint64_t cupti_now = 0;
    CUPTI_OK(cuptiGetTimestamp(&cupti_now));
    int64_t behind = epoch_ns() - (int64_t)cupti_now;
    std::scoped_lock lock(cupti_mutex, launch_mutex);
    if (!cupti_error.empty()) { fail("%s", cupti_error.c_str()); }
    const std::unordered_map<uint32_t, int> range_of(launches.begin(), launches.end());
    for (TracedWork& w : cupti_work) {
        auto launch = range_of.find(w.correlation);
        if (launch != range_of.end()) { w.range = in_this_trace(launch->second); }
        w.start += behind, w.end += behind;
    }
    std::sort(cupti_work.begin(), cupti_work.end(),
              [](const TracedWork& a, const TracedWork& b) { return a.start < b.start; });
    trace.work = std::move(cupti_work);
    trace.dropped = cupti_dropped;
}
#else
static std::string start_cupti() {
    std::string why;
    return cuda_devices(&why) > 0 ? "this build has no CUPTI" : why;
}
static void stop_cupti() {}
#endif

void start_tracing() {
    if (tracing) { fail("a trace is being made already"); }
    synchronize();  // what was queued before does not belong to it
    trace = Trace();
    trace.no_kernels = start_cupti();
    tracing = true;
}

Trace stop_tracing() {
    if (!tracing) { fail("no trace is being made"); }
    synchronize();
    tracing = false;
    if (trace.no_kernels.empty()) { stop_cupti(); }
    std::lock_guard<std::mutex> lock(trace_mutex);
    int64_t now = epoch_ns();
    for (TracedRange& r : trace.ranges) {
        if (r.end == 0) { r.end = now; }  // open still
    }
    first_range += (int)trace.ranges.size();
    return std::move(trace);
}

bool watched() { return tracing || memory_is_logged(); }
int innermost_traced_range() { return tracing ? innermost_traced : -1; }

// ---------------------------------------------------------------------------------------------------------------------
// Ranges

Range::Range(const char* name, int recorded_in) {
    static thread_local const int thread = (int)gettid();
    open_ranges().push_back(name);
#ifdef __CUDACC__
    nvtxRangePushA(name);
#endif
    if (!tracing) { return; }
    std::lock_guard<std::mutex> lock(trace_mutex);
    if (!tracing) { return; }  // it has ended meanwhile
    trace.ranges.push_back({name, in_this_trace(innermost_traced), in_this_trace(recorded_in), thread, epoch_ns(), 0});
    traced = innermost_traced = first_range + (int)trace.ranges.size() - 1;
}

Range::~Range() {
    open_ranges().pop_back();
#ifdef __CUDACC__
    nvtxRangePop();
#endif
    if (traced < 0) { return; }
    std::lock_guard<std::mutex> lock(trace_mutex);
    if (in_this_trace(traced) < 0) { return; }  // its trace ended while it was open
    TracedRange& r = trace.ranges[traced - first_range];
    r.end = epoch_ns();
    innermost_traced = r.parent < 0 ? -1 : first_range + r.parent;
}
