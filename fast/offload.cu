// fast/offload.cu: a checkpoint's large results wait in host memory, and backward need not compute
// them again.
//
// A checkpoint runs twice: in forward, where nothing is recorded, and in backward. The copy of a
// result takes as long as the link to the host needs for its bytes, and runs beside the kernels. In
// the 8.1B step a block's forward takes 34 ms. SwiGLU's [a|b] has 1.44 GB, some 30 ms of the link,
// and costs 9 ms of products; attention's outputs have 0.27 GB, 6 ms, and cost 16 ms. With blocks:N
// all blocks keep [a|b]; those N that run again whole keep attention's outputs, too.
//
// All copies have one stream, in which they follow each other. So host memory that backward has
// read from may be filled again at once.
#include "fast_ways.h"

struct KeptResult {
    Shape shape;
    DType dtype;
    Tensor host = {};    // null: there was no room, and it is computed again
    Tensor here = {};    // null: it is on the host alone
    Mark is_there = {};  // the end of the copy to the host, or back
};
using KeptResults = deque<KeptResult>;  // of one checkpoint, in the order of its run

static size_t room = 0;  // of host memory, in bytes; 0: nothing is kept
static size_t in_use = 0;
static size_t most_in_use = 0;
// By the checkpoint's number; a later one has a larger number. The tape refers to it, and may go
// later than a static map would.
static auto& kept = *new map<int, KeptResults>;

static struct Run {
    int number = 0;  // of the checkpoint that runs; 0: none
    bool is_second = false;
} run;
struct RestoreRun {  // gives `run` back as it was, at the end of its scope
    Run before = run;
    ~RestoreRun() { run = before; }
};

#ifdef HAVE_CUDA
static cudaStream_t copies() {
    static const cudaStream_t stream = new_stream();
    return stream;
}
#endif

// Starts to copy, behind all that the compute stream was given; returns a mark of the end.
static Mark start_copy(const Tensor& to, const Tensor& from) {
#ifdef HAVE_CUDA
    if (context.device == CUDA) {
        await(copies(), mark());
        CUDA_CHECK(cudaMemcpyAsync(to.data, from.data, from.bytes(), cudaMemcpyDefault, copies()));
        return mark_on(copies());
    }
#endif
    copy_bytes(to.data, to.device(), from.data, from.device(), from.bytes());
    return mark();
}
// Lets the compute stream wait for a copy to or from k.here.
static void await_copy([[maybe_unused]] const KeptResult& k) {
#ifdef HAVE_CUDA
    if (k.here.device() == CUDA) { await(stream(), k.is_there); }
#endif
}

// Host memory, by its bytes, that no result uses. To get it from the system takes longer than a
// step, so it stays, until the process ends.
static auto& spare = *new std::multimap<size_t, Tensor>;

// Returns host memory for y, or null if the system gives none. On META it is only counted.
static Tensor take_host_memory(const Tensor& y) {
    Tensor host;
    auto found = spare.find(y.bytes());
    if (context.device == META) {
        host = empty_on(META, {1}, U8, WORKSPACE);
    } else if (found != spare.end()) {
        host = found->second;
        spare.erase(found);
    } else {
        try {
            host = empty_on(CPU, y.shape, y.dtype);
        } catch (const OutOfMemory&) { return {}; }
#ifdef HAVE_CUDA
        // A copy to memory that is not pinned would pass through a buffer of the driver's.
        if (context.device == CUDA && cudaHostRegister(host.data, host.bytes(), 0) != cudaSuccess) {
            cudaGetLastError();  // it would be reported as the next launch's
            return {};
        }
#endif
    }

    if (in_use == 0) { most_in_use = 0; }  // another forward begins
    in_use += y.bytes();
    most_in_use = max(most_in_use, in_use);
    return host;
}
static void give_host_memory(const KeptResult& k) {
    if (!k.host) { return; }
    const size_t bytes = count(k.shape) * size_of(k.dtype);
    in_use -= bytes;
    if (k.host.device() == CPU) { spare.insert({bytes, k.host}); }
}

// Starts to copy results back that a checkpoint's second run will ask for.
static void call_back(KeptResults& results) {
    for (KeptResult& k : results) {
        if (k.here || !k.host) { continue; }
        k.here = empty(k.shape, k.dtype);
        k.is_there = start_copy(k.here, k.host);
    }
}

// Keeps y, if this is a checkpoint's first run. Older results of its size leave the device: the
// compute stream waits until they are on the host. So forward has one of each size there, and
// two while the next is computed.
static void keep(const Tensor& y) {
    if (room == 0 || run.number == 0 || run.is_second) { return; }
    for (auto& [number, results] : kept) {
        for (KeptResult& k : results) {
            if (!k.here || k.here.bytes() != y.bytes()) { continue; }
            await_copy(k);
            k.here = {};
        }
    }

    KeptResult k{y.shape, y.dtype};
    if (in_use + y.bytes() <= room) { k.host = take_host_memory(y); }
    if (k.host) {
        k.here = detached(y);
        k.is_there = start_copy(k.host, y);
    }
    kept[run.number].push_back(k);
}
// In a checkpoint's second run: returns the next of the results that its first run kept.
static Tensor take_back() {
    if (!run.is_second || kept.count(run.number) == 0) { return {}; }
    KeptResults& results = kept[run.number];
    const KeptResult k = results.front();
    results.pop_front();
    if (results.empty()) { kept.erase(run.number); }
    if (!k.host) { return {}; }

    await_copy(k);
    give_host_memory(k);
    return k.here;
}

// The ops whose results a checkpoint keeps. Both runs call them in the same order.
static Tensor linear_kept(const Tensor& x, const Tensor& weight) {
    const Tensor known = take_back();
    Tensor y = linear(x, weight, known);
    keep(y);
    return y;
}
static FlashOutputs flash_outputs_kept(const Tensor& qkv, int H) {
    FlashOutputs out{take_back(), take_back()};
    if (!out.o || !out.L) { out = flash_outputs(qkv, H); }
    keep(out.o);
    keep(out.L);
    return out;
}

// A checkpoint's number, held by the f that numbered() returns. When the last copy of that f is
// gone, its second run can no longer come. So the destructor gives up what no second run has taken.
struct Number {
    int number;
    explicit Number(int number) : number(number) {}
    Number(const Number&) = delete;
    ~Number() {
        auto found = kept.find(number);
        if (found == kept.end()) { return; }
        for (const KeptResult& k : found->second) {
#ifdef HAVE_CUDA
            // k.here is freed in the compute stream's order, but a copy in the other stream may
            // still use it: so the compute stream waits. Unchecked: a destructor must not throw.
            if (k.here && k.is_there.event) {
                cudaStreamWaitEvent(stream(), k.is_there.event.get());
            }
#endif
            give_host_memory(k);
        }
        kept.erase(found);
    }
};
// Returns f for a checkpoint; without a tape nothing is kept, since no second run comes. Before a
// second run results are called back, its own and those of the checkpoint that backward comes to
// next: in groups of several blocks these are many at a time.
static function<UnaryOp> numbered(const function<UnaryOp>& f) {
    if (!context.recording) { return f; }
    static int checkpoints = 0;
    return [f, own = make_shared<Number>(++checkpoints)](const Tensor& x) {
        RestoreRun restore;
        run = {own->number, context.recording};  // checkpoint() records in the second run only
        if (run.is_second) {
            auto next = kept.upper_bound(own->number);
            for (int i = 0; i < 2 && next != kept.begin(); i++) { call_back((--next)->second); }
        }
        return f(x);
    };
}

static const EnterWays entered([] {
    fast_ways.keep_on_host = [](size_t bytes) {
        room = bytes;
        most_in_use = 0;
    };
    fast_ways.kept_on_host = [] { return most_in_use; };
    fast_ways.keeping = numbered;
    fast_ways.linear = linear_kept;
    fast_ways.flash_outputs = flash_outputs_kept;
});
