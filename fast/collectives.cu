// fast/collectives.cu: NCCL beside products. Results stay the same but for rounding: from three
// ranks on an all-reduce in two calls may add up in another order. It has two parts:
//   two lanes   reduce-scatters have a communicator and a stream of their own, so that FSDP's
//               gathers run beside them. From NCCL 2.30 on all-reduces of means go there, too.
//   windows     memory that all ranks have registered with NCCL: copy engines then move what is
//               gathered, and the multiprocessors are left to products. An all-reduce that is a
//               scatter and a gather gains by that for its second half.
// Two communicators that work at once can hang: a kernel of NCCL's holds its multiprocessors until
// the same collective runs on all ranks. So all ranks start the same ones in the same order, and
// the kernels of both lanes have to fit on a GPU side by side.
#include "fast_ways.h"
#include "lib/gpu.h"

#ifdef WITH_NCCL
static Lane lane;                 // of all collectives but the other lane's
static Lane reduce_scatter_lane;  // of these, and from NCCL 2.30 on of means
static int version;               // of the NCCL that is loaded: 22809 is 2.28.9
static shared_ptr<Places> windows;

#ifdef NCCL_CTA_POLICY_ZERO  // from NCCL 2.28 on there are windows
// NCCL's symmetric windows, as places for buffers. All ranks open one together, or close it.
struct Windows : Places {
    struct Window {
        void* data;
        ncclWindow_t handle;
        bool unused;  // its buffer is gone
    };
    vector<Window> opened;
    Windows() { counted = true; }

    // Opens a window of so many bytes for a new buffer.
    size_t take(size_t bytes, void** at) override {
        Window w{};
        give_back_cached_memory();  // our pool's is not NCCL's
        NCCL_CHECK(ncclMemAlloc(&w.data, bytes));
        NCCL_CHECK(
            ncclCommWindowRegister(lane.nccl, w.data, bytes, &w.handle, NCCL_WIN_COLL_SYMMETRIC));
        opened.push_back(w);
        *at = w.data;
        return opened.size() - 1;
    }
    void give(size_t number) override { opened[number].unused = true; }

    // Closes the windows whose buffers are gone, and frees their memory.
    void close_unused() {
        for (Window& w : opened) {
            if (!w.unused || !w.data) { continue; }
            NCCL_CHECK(ncclCommWindowDeregister(lane.nccl, w.handle));
            NCCL_CHECK(ncclMemFree(w.data));
            w.data = nullptr;
        }
    }
};
#endif

// Makes both lanes, and the windows' list.
static void connect(const Communicator& c) {
    // Blocking, since a non-blocking communicator starts a thread for every collective.
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
#ifdef NCCL_CTA_POLICY_ZERO
    config.CTAPolicy = NCCL_CTA_POLICY_ZERO;  // copy engines, wherever they can do it
    // With this variable a user asks that no bytes go from card to card. From NCCL 2.28.7 on copies
    // between windows would go that way all the same.
    if (!getenv("NCCL_P2P_DISABLE")) { windows = make_shared<Windows>(); }
#endif
    NCCL_CHECK(ncclGetVersion(&version));
    lane = open_lane(c, &config);
    reduce_scatter_lane = open_lane(c, &config);
}

// Above this an all-reduce beside backward is two calls, a reduce-scatter and an all-gather. With
// a smaller bucket two calls cost more than they gain.
constexpr int64_t BESIDE_ABOVE = 8000000;  // elements
static bool is_beside = false;             // in all_reduce_beside

// Starts a collective; in two calls, if it is an all-reduce in a window beside products.
static void start(const Communicator& c, Work& work, const Collective& x) {
    const int64_t n = x.tensor.size();
    if (is_beside && n > BESIDE_ABOVE && n % c.world == 0 && windows &&
        x.tensor.memory->places == windows) {
        enqueue(c, reduce_scatter_lane, work, {Collective::REDUCE_SCATTER, x.tensor, x.how},
                mark());
        const Mark begin = work.begin, scattered = work.end;
        enqueue(c, lane, work, {Collective::ALL_GATHER, x.tensor}, scattered);
        work.begin = begin;
        return;
    }
    // From NCCL 2.30 on an all-reduce of a mean in a window fails ("invalid device function"): NCCL
    // takes a kernel for it that does not exist. The other lane's communicator knows no windows.
    const bool other =
        x.kind == Collective::REDUCE_SCATTER || (x.how == AVERAGE && version >= 23000);
    enqueue(c, other ? reduce_scatter_lane : lane, work, x, mark());
}
static WorkPtr all_reduce_beside(const Communicator& c, const Tensor& t, Reduction how) {
    is_beside = true;
    WorkPtr work = all_reduce(c, t, how);
    is_beside = false;
    return work;
}

// Runs f, on all ranks, and puts what it allocates on a GPU into windows. Other ranks read such a
// buffer, so its memory stays until close_windows.
static void allocate_in_windows(const Communicator& c, const Job& f) {
    if (context.device == CUDA && c.links && windows) {
        allocate_in(windows, f);
    } else {
        f();
    }
}
// Frees, on all ranks, the memory of shared buffers that are gone.
static void close_windows(const Communicator& c) {
    if (!c.links || !windows) { return; }
    barrier(c);
#ifdef NCCL_CTA_POLICY_ZERO
    ((Windows&)*windows).close_unused();
#endif
}
static void disconnect(const Communicator& c) {
    close_windows(c);
    close_lane(reduce_scatter_lane);
    close_lane(lane);
}

static const AddRow<NcclWay> two_lanes({2, connect, start, disconnect});
static const EnterWays entered([] {
    fast_ways.allocate_shared = allocate_in_windows;
    fast_ways.free_shared = close_windows;
    fast_ways.all_reduce_beside = all_reduce_beside;
});
#endif
