// lib/trace.cu: named ranges of work, and what the GPU ran in them, as CUPTI, NVIDIA's tracing
// library, records it. In this order: CUPTI's side, start_tracing() and stop_tracing(), ranges. To
// read first: the end of the file, Range, which all other code uses.
#include "lib.h"

#include <cxxabi.h>

#ifdef HAVE_CUDA
#include <nvtx3/nvToolsExt.h>
#ifdef HAVE_CUPTI
#include <cupti.h>
#endif
#endif

// -------------------------------------------------------------------------------------------------
// Tracing. Ranges keep a list with their times. CUPTI records what the GPU runs, in buffers that it
// fills and hands back on a thread of its own.
//
// How a kernel finds its range: CUPTI calls note_launch() at each launch, on the thread that
// launches, also where a library does. The launch has a number, which is noted with the range that
// is open on this thread. Later the kernel's record comes, and names the launch's number, too.

static atomic<bool> tracing{false};
static mutex trace_mutex;
static Trace trace;
// A range's number counts over all traces of the process, so that one of an earlier trace is known
// as such. first_number is the number of this trace's first range.
static int first_number = 0;
static thread_local int innermost_number = -1;  // the number of this thread's innermost; -1: none

// Returns ns since 1970. The clock never goes back: it is the monotonic one, set once to that time.
static int64_t epoch_ns() {
    using namespace std::chrono;
    static const auto start = system_clock::now() - steady_clock::now().time_since_epoch();
    return nanoseconds(start.time_since_epoch() + steady_clock::now().time_since_epoch()).count();
}
static int in_this_trace(int range) { return range >= first_number ? range - first_number : -1; }

#if defined(HAVE_CUDA) && defined(HAVE_CUPTI)
// CONCURRENT_KERNEL, because KERNEL would run one kernel at a time.
static const CUpti_ActivityKind traced_activities[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                                       CUPTI_ACTIVITY_KIND_MEMCPY,
                                                       CUPTI_ACTIVITY_KIND_MEMCPY2,
                                                       CUPTI_ACTIVITY_KIND_MEMSET};
// CUPTI's records have a mutex of their own, since its thread takes milliseconds to read a buffer,
// and ranges must not wait so long.
static mutex cupti_mutex;
static vector<TracedWork> cupti_work;
static size_t cupti_dropped;
static atomic<CUptiResult> first_error;  // on CUPTI's thread nothing may be thrown

static bool succeeded(CUptiResult result) {
    CUptiResult none = CUPTI_SUCCESS;
    if (result != CUPTI_SUCCESS) { first_error.compare_exchange_strong(none, result); }
    return result == CUPTI_SUCCESS;
}
static string error_text() {
    const char* text = nullptr;
    return cuptiGetResultString(first_error, &text) == CUPTI_SUCCESS && text
               ? text
               : "unknown CUPTI error";
}

// The range of each launch and copy. CUPTI's own way to know it, external ids, costs more than
// twice as much.
static CUpti_SubscriberHandle launch_subscriber;
static mutex launch_mutex;
static vector<pair<uint32_t, int>> launches;  // the launch's number, the range's

static void CUPTIAPI note_launch(void*, CUpti_CallbackDomain, CUpti_CallbackId, const void* call) {
    auto info = (const CUpti_CallbackData*)call;
    if (info->callbackSite != CUPTI_API_ENTER) { return; }
    lock_guard lock(launch_mutex);
    launches.emplace_back(info->correlationId, innermost_number);
}
// Asks CUPTI to call note_launch() at launches, copies and memsets; returns whether that succeeded.
// A call of the runtime ends in a call of the driver, so the driver's calls are enough.
static bool watch_launches() {
    bool ok = succeeded(cuptiSubscribe(&launch_subscriber, note_launch, nullptr));
    for (int id = 1; id < (int)CUPTI_DRIVER_TRACE_CBID_SIZE && ok; id++) {
        const char* name = nullptr;  // a number without a call has none
        if (cuptiGetCallbackName(CUPTI_CB_DOMAIN_DRIVER_API, id, &name) != CUPTI_SUCCESS || !name) {
            continue;
        }
        if (strstr(name, "Launch") || strstr(name, "Memcpy") || strstr(name, "Memset")) {
            ok = succeeded(
                cuptiEnableCallback(1, launch_subscriber, CUPTI_CB_DOMAIN_DRIVER_API, id));
        }
    }
    return ok;
}

// Appends a record to cupti_work. R: the record's type in CUDA 12.4; those of later versions begin
// alike.
template <class R>
static void take_work(const CUpti_Activity* record, const string& name) {
    auto r = (const R*)record;
    if (r->end <= r->start) {
        cupti_dropped++;  // no room on the device for its times
    } else {
        cupti_work.push_back(
            {name, -1, (int64_t)r->start, (int64_t)r->end, r->streamId, r->correlationId});
    }
}
static string demangled(const string& name) {
    const unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(name.c_str(), 0, 0, 0), free);
    return text ? text.get() : name;
}

static void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* max_records) {
    *size = 2 << 20;                              // bytes, some 10000 records
    *max_records = 0;                             // as many as fit
    *buffer = (uint8_t*)aligned_alloc(8, *size);  // if it is null, CUPTI drops records
}

// Reads the records of a buffer that CUPTI has filled, on CUPTI's thread.
static void CUPTIAPI take_buffer(CUcontext cuda, uint32_t stream_id, uint8_t* buffer, size_t,
                                 size_t bytes) {
    lock_guard lock(cupti_mutex);
    CUpti_Activity* record = nullptr;
    CUptiResult result = CUPTI_ERROR_MAX_LIMIT_REACHED;  // what the end of a buffer is called
    while (bytes > 0 &&
           (result = cuptiActivityGetNextRecord(buffer, bytes, &record)) == CUPTI_SUCCESS) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            take_work<CUpti_ActivityKernel9>(record, ((const CUpti_ActivityKernel9*)record)->name);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            take_work<CUpti_ActivityMemcpy5>(record, "[CUDA memcpy]");
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY2) {
            take_work<CUpti_ActivityMemcpyPtoP4>(record, "[CUDA memcpy, peer to peer]");
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
            take_work<CUpti_ActivityMemset4>(record, "[CUDA memset]");
        }
    }
    if (result != CUPTI_ERROR_MAX_LIMIT_REACHED) { succeeded(result); }

    size_t dropped = 0;
    succeeded(cuptiActivityGetNumDroppedRecords(cuda, stream_id, &dropped));
    cupti_dropped += dropped;
    free(buffer);
}

static void end_cupti() {
    for (CUpti_ActivityKind kind : traced_activities) { succeeded(cuptiActivityDisable(kind)); }
    succeeded(cuptiUnsubscribe(launch_subscriber));
}

// Starts CUPTI. Returns why it cannot, "" where it runs.
static string start_cupti() {
    string why;
    if (cuda_devices(&why) == 0) { return why; }
    if (getenv("NSYS_PROFILING_SESSION_ID")) { return "nsys is attached"; }

    cupti_work.clear();
    launches.clear();
    cupti_dropped = 0;
    first_error = CUPTI_SUCCESS;
    bool ok =
        succeeded(cuptiActivityRegisterCallbacks(give_buffer, take_buffer)) && watch_launches();
    for (CUpti_ActivityKind kind : traced_activities) {
        ok = ok && succeeded(cuptiActivityEnable(kind));
    }
    if (ok) { return ""; }
    end_cupti();
    return error_text();
}

// Ends CUPTI and moves what it recorded to trace.work: with the ranges of the launches, on our
// clock, with legible names, in the order of the starts.
static void stop_cupti() {
    CUDA_CHECK(cudaDeviceSynchronize());  // flushing does not wait for what still runs
    succeeded(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED));
    end_cupti();

    uint64_t cupti_now = 0;
    succeeded(cuptiGetTimestamp(&cupti_now));
    int64_t behind = epoch_ns() - (int64_t)cupti_now;
    std::scoped_lock lock(cupti_mutex, launch_mutex);
    if (first_error != CUPTI_SUCCESS) { fail("%s", error_text().c_str()); }

    const map<uint32_t, int> range_of(launches.begin(), launches.end());
    for (TracedWork& w : cupti_work) {
        auto launch = range_of.find(w.correlation);
        if (launch != range_of.end()) { w.range = in_this_trace(launch->second); }
        w.start += behind;
        w.end += behind;
        w.name = demangled(w.name);
    }
    sort(cupti_work.begin(), cupti_work.end(),
         [](const TracedWork& a, const TracedWork& b) { return a.start < b.start; });
    trace.work = move(cupti_work);
    if (cupti_dropped > 0) {
        note("trace: CUPTI had no room for %zu kernels, copies or fills", cupti_dropped);
    }
}
#else
static string start_cupti() {
    string why;
    return cuda_devices(&why) > 0 ? "this build has no CUPTI" : why;
}
static void stop_cupti() {}
#endif

void start_tracing() {
    synchronize();  // what was queued before does not belong to the trace
    trace = Trace();
    trace.no_kernels = start_cupti();
    tracing = true;
}

// Ends the trace and returns it, empty if there is none. A range that is still open ends now.
Trace stop_tracing() {
    if (!tracing) { return {}; }
    synchronize();
    tracing = false;
    if (trace.no_kernels.empty()) { stop_cupti(); }

    lock_guard lock(trace_mutex);
    int64_t now = epoch_ns();
    for (TracedRange& r : trace.ranges) {
        if (r.end == 0) { r.end = now; }
    }
    first_number += (int)trace.ranges.size();
    return move(trace);
}

// May return the number of an earlier trace's range, which in_this_trace() knows.
int innermost_range_number() { return tracing ? innermost_number : -1; }

// -------------------------------------------------------------------------------------------------
// Ranges

// Opens a range on this thread, for tools that read NVTX and, while a trace is made, for the trace.
Range::Range(const char* name, int recorded_in) {
    static thread_local const int thread = (int)gettid();
    open_ranges().push_back(name);
#ifdef HAVE_CUDA
    nvtxRangePushA(name);
#endif
    if (!tracing) { return; }

    lock_guard lock(trace_mutex);
    if (!tracing) { return; }  // the trace has ended meanwhile
    trace.ranges.push_back(
        {name, in_this_trace(innermost_number), in_this_trace(recorded_in), thread, epoch_ns(), 0});
    number = first_number + (int)trace.ranges.size() - 1;
    innermost_number = number;
}

// Closes the range: the one around it is this thread's innermost again.
Range::~Range() {
    open_ranges().pop_back();
#ifdef HAVE_CUDA
    nvtxRangePop();
#endif
    if (number < 0) { return; }

    lock_guard lock(trace_mutex);
    if (in_this_trace(number) < 0) { return; }  // its trace has ended while it was open
    TracedRange& r = trace.ranges[number - first_number];
    r.end = epoch_ns();
    innermost_number = r.parent < 0 ? -1 : first_number + r.parent;
}
