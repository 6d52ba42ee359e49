// ranks.cu: several processes that work as one. Each is a rank with its own GPU, or its share of the CPU's cores.
//   the launcher     `--nproc N` starts N copies of this program; torchrun, mpirun and srun do the same from outside
//   the watchdog     ends a rank when another one is gone, dead or stuck
//   the communicator all-reduce, broadcast, reduce-scatter, all-gather and barrier on NCCL or Gloo, asynchronous
#include "commands.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <omp.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef HAVE_GLOO
constexpr bool HAS_GLOO = true;
#include <gloo/allgatherv.h>
#include <gloo/allreduce.h>
#include <gloo/broadcast.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#else
constexpr bool HAS_GLOO = false;
#endif
#if defined(__CUDACC__) && defined(HAVE_NCCL)
#define WITH_NCCL
constexpr bool HAS_NCCL = true;
#include <nccl.h>
#else
constexpr bool HAS_NCCL = false;
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Who am I? The launcher says so in the environment.

static bool environment_int(const char* name, int* value) {
    const char* text = getenv(name);
    if (!text || !*text) { return false; }
    char* end;
    long number = strtol(text, &end, 10);
    if (*end || number < 0 || number > 1 << 20) {
        usage_error("environment variable %s: got '%s', takes a whole number", name, text);
    }
    *value = (int)number;
    return true;
}

static const char* const STORE_FD = "CS336_STORE_FD";  // the launcher tells rank 0 its listening socket

struct Identity {
    int rank = 0, world = 1, local_rank = 0, local_world = 1;  // local: among the ranks of this machine
    std::string address = "127.0.0.1";                         // of rank 0's store
    int port = 29500;
    std::string token;   // of the job
    int listening = -1;  // rank 0 of our own launcher: the store's socket, which the launcher has opened
};

static bool port_from_environment(int* port) {
    bool chosen = environment_int("MASTER_PORT", port);
    if (chosen && (*port < 1 || *port > 65535)) { usage_error("MASTER_PORT: got %d, takes 1 to 65535", *port); }
    return chosen;
}

static std::string environment_text(const char* name) {
    const char* text = getenv(name);
    return text ? text : "";
}

// False means that this process was started by hand, as the only one.
static bool identity_from_environment(Identity* me) {
    int tasks = 1;
    std::string job;                               // a name that keeps two jobs on one port apart, but is no secret
    if (getenv("RANK") && getenv("WORLD_SIZE")) {  // torchrun, and our own launcher
        environment_int("RANK", &me->rank), environment_int("WORLD_SIZE", &me->world);
        me->local_rank = me->rank, me->local_world = me->world;
        environment_int("LOCAL_RANK", &me->local_rank), environment_int("LOCAL_WORLD_SIZE", &me->local_world);
        job = environment_text("TORCHELASTIC_RUN_ID");
    } else if (environment_int("OMPI_COMM_WORLD_RANK", &me->rank)) {  // mpirun
        environment_int("OMPI_COMM_WORLD_SIZE", &me->world);
        environment_int("OMPI_COMM_WORLD_LOCAL_RANK", &me->local_rank);
        environment_int("OMPI_COMM_WORLD_LOCAL_SIZE", &me->local_world);
        job = environment_text("PMIX_NAMESPACE");
    } else if (getenv("SLURM_STEP_ID") && environment_int("SLURM_NTASKS", &tasks) && tasks > 1) {
        me->world = me->local_world = tasks;  // srun; an interactive shell is a step of one task, and no rank
        environment_int("SLURM_PROCID", &me->rank), environment_int("SLURM_LOCALID", &me->local_rank);
        environment_int("SLURM_NTASKS_PER_NODE", &me->local_world);
        job = environment_text("SLURM_JOB_ID") + "." + environment_text("SLURM_STEP_ID");
    } else {
        return false;
    }
    if (const char* address = getenv("MASTER_ADDR")) { me->address = address; }
    port_from_environment(&me->port);
    if (!environment_text("TORCHELASTIC_RUN_ID").empty() && ++me->port > 65535) {  // torchrun's own store has the first
        usage_error("MASTER_PORT: got 65535, takes less under torchrun: ours is the next port");
    }
    environment_int(STORE_FD, &me->listening);
    me->token = environment_text("CS336_TOKEN") + "/" + job;
    if (me->rank >= me->world) { usage_error("rank %d: the world has only %d ranks", me->rank, me->world); }
    if (me->local_rank >= me->local_world) {
        usage_error("local rank %d: this machine has only %d ranks", me->local_rank, me->local_world);
    }
    return true;
}

bool is_rank() {
    Identity me;
    return identity_from_environment(&me);
}

// ---------------------------------------------------------------------------------------------------------------------
// The launcher. It waits for its ranks. If one fails, it kills the rest, which would wait for that rank for ever.

static volatile sig_atomic_t signal_to_forward = 0;

static std::string random_token() {
    unsigned char bytes[16];
    if (getentropy(bytes, sizeof bytes) != 0) { fail("getentropy: %s", strerror(errno)); }
    std::string token;
    for (unsigned char byte : bytes) { token += strprintf("%02x", byte); }
    return token;
}

static pid_t start_rank(const std::vector<std::string>& variables, const std::vector<std::string>& arguments) {
    std::vector<char*> environment;
    for (const std::string& v : variables) { environment.push_back((char*)v.c_str()); }
    for (char** v = environ; *v; v++) {
        std::string name(*v, strcspn(*v, "=") + 1);
        auto same = [&](const std::string& ours) { return ours.compare(0, name.size(), name) == 0; };
        if (std::none_of(variables.begin(), variables.end(), same)) { environment.push_back(*v); }
    }
    environment.push_back(nullptr);
    return start_ourselves(arguments, environment.data(), STDOUT_FILENO);
}

int launch_ranks(int n, const std::vector<std::string>& arguments, bool finish) {
    // The socket is opened here, so that the system can choose the port and nobody can take it before rank 0.
    int port = 0;
    bool only_this_machine;
    port_from_environment(&port);
    int listening = listen_for_ranks("127.0.0.1", port, INFINITY, &only_this_machine);
    port = port_of(listening);
    std::string token = random_token();
    std::string threads = std::to_string(std::max(1, omp_get_num_procs() / n));
    fflush(nullptr);
    signal_to_forward = 0;
    const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction forward = {}, before[3] = {};
    forward.sa_handler = [](int number) { signal_to_forward = number; };
    for (int i = 0; i < 3; i++) {
        if (sigaction(signals[i], &forward, &before[i]) != 0) { fail("sigaction: %s", strerror(errno)); }
        if (before[i].sa_handler == SIG_IGN) { sigaction(signals[i], &before[i], nullptr); }  // as under nohup
    }
    auto send_to_all = [](const std::vector<pid_t>& pids, int number) {
        for (pid_t pid : pids) {
            if (pid) { kill(pid, number); }  // one that has just ended is no failure
        }
    };

    std::vector<pid_t> alive;
    for (int r = 0; r < n; r++) {
        std::vector<std::string> variables = {"RANK=" + std::to_string(r),
                                              "WORLD_SIZE=" + std::to_string(n),
                                              "LOCAL_RANK=" + std::to_string(r),
                                              "LOCAL_WORLD_SIZE=" + std::to_string(n),
                                              "MASTER_ADDR=127.0.0.1",
                                              "MASTER_PORT=" + std::to_string(port),
                                              "CS336_TOKEN=" + token,
                                              "TORCHELASTIC_RUN_ID="};
        if (r == 0) {
            variables.push_back(std::string(STORE_FD) + "=" + std::to_string(listening));
            if (fcntl(listening, F_SETFD, 0) != 0) { fail("fcntl: %s", strerror(errno)); }  // it stays open in rank 0
        }
        if (!getenv("OMP_NUM_THREADS")) { variables.push_back("OMP_NUM_THREADS=" + threads); }
        if (!getenv("OPENBLAS_NUM_THREADS")) { variables.push_back("OPENBLAS_NUM_THREADS=" + threads); }
        alive.push_back(start_rank(variables, arguments));
        if (r == 0) { close(listening); }
    }
    int code = 0, left = n;
    bool interrupted = false;
    double kill_at = INFINITY, same_until = INFINITY;  // so long a signal is the first one again: see EndSignals
    while (left > 0) {
        for (int r = 0; r < n; r++) {
            int status = 0;
            pid_t pid = alive[r] ? waitpid(alive[r], &status, WNOHANG) : 0;
            if (pid == 0) { continue; }
            if (pid < 0) { status = W_EXITCODE(1, 0); }  // somebody else has waited for this rank
            int ended_with = WIFSIGNALED(status) ? 1 : WEXITSTATUS(status);
            bool failed = ended_with != 0 && ended_with <= 128;  // above: all ranks have agreed to end so
            bool first = failed && !interrupted && (code == 0 || code > 128);
            if (WIFSIGNALED(status) && first) {
                note("cs336: rank %d (process %d) was killed by signal %d (%s)", r, (int)alive[r], WTERMSIG(status),
                     strsignal(WTERMSIG(status)));
            }
            alive[r] = 0, left--;
            if (first || code == 0) { code = ended_with; }
            if (first) {
                // A rank removes what it has half written, also a stopped rank; no EndSignals takes this for a wish.
                send_to_all(alive, SIGUSR1);
                send_to_all(alive, SIGCONT);
                kill_at = std::min(kill_at, now_ms() + 100);
            }
        }
        int number = signal_to_forward;
        if (number && finish && now_ms() < same_until) {
            if (std::isinf(same_until)) { same_until = now_ms() + 1000, send_to_all(alive, number); }
            signal_to_forward = 0;
        } else if (number) {
            if (code == 0) { note("cs336: signal %d (%s): ending %d ranks", number, strsignal(number), left); }
            signal_to_forward = 0, interrupted = true, kill_at = std::min(kill_at, now_ms() + 2000);
            if (code == 0 || code > 128) { code = 128 + number; }  // main() ends by this signal
            send_to_all(alive, number);
        }
        if (now_ms() > kill_at) { send_to_all(alive, SIGKILL); }  // which also ends a stopped process
        usleep(5000);
    }
    for (int i = 0; i < 3; i++) { sigaction(signals[i], &before[i], nullptr); }
    return code;
}

// ---------------------------------------------------------------------------------------------------------------------
// A rank's connections, and its watchdog: a thread that shows that we live and asks whether all others do. The watchdog
// ends the process, since the main thread may wait in a collective that will never finish.

struct Links {
    Identity me;
    double timeout_s = 60;
    int store = -1, beats = -1;
    std::shared_ptr<StoreServer> server;  // rank 0 only
    std::mutex store_mutex, mutex;        // of the store's connection; of what follows
    std::condition_variable changed;
    bool stopping = false;
    std::thread watchdog;
    uint32_t collectives = 0, barriers = 0;
    std::deque<WorkPtr> under_way;
    Tensor barrier_token;

#ifdef HAVE_GLOO
    std::shared_ptr<gloo::rendezvous::Context> gloo;
    std::thread worker;
    std::deque<std::function<void()>> jobs;
#endif
#ifdef WITH_NCCL
    ncclComm_t nccl = nullptr;
#endif
#ifdef __CUDACC__
    cudaStream_t stream = nullptr;  // where collectives run, beside the compute stream
    cudaStream_t behind = nullptr;  // see run_behind
    int device = 0;
    void* pinned = nullptr;  // Gloo cannot read GPU memory: tensors pass through this
    size_t pinned_bytes = 0;
#endif
};

static size_t bytes_of(const Tensor& t) { return t.size() * size_of(t.dtype); }

// The ranks see a failure at the same time. The lower rank speaks first; its end makes the launcher end the others
// before they repeat it.
[[noreturn]] static void give_up(int rank, int exit_code, const std::string& why) {
    usleep(100000 * std::min(rank, 10));
    note("cs336: rank %d: %s", rank, why.c_str());
    remove_unfinished_files();
    fflush(stdout);
    _exit(exit_code);
}

static std::string stuck_collective(Links& l) {
    std::lock_guard<std::mutex> lock(l.mutex);
#ifdef WITH_NCCL
    ncclResult_t state = ncclSuccess;
    // A thread starts on GPU 0, and would make a context there.
    if (l.nccl && cudaSetDevice(l.device) != cudaSuccess) { return "the watchdog cannot use the GPU"; }
    if (l.nccl &&
        (ncclCommGetAsyncError(l.nccl, &state) != ncclSuccess || (state != ncclSuccess && state != ncclInProgress))) {
        return strprintf("NCCL: %s (%s)", ncclGetErrorString(state), ncclGetLastError(l.nccl));
    }
    while (!l.under_way.empty() && cudaEventQuery((cudaEvent_t)l.under_way.front()->end.event.get()) == cudaSuccess) {
        l.under_way.pop_front();
    }
#endif
    if (l.under_way.empty() || now_ms() - l.under_way.front()->started_ms < 1e3 * l.timeout_s) { return ""; }
    return strprintf("%s number %u has not finished for %g s, though all ranks live: do all call the same?",
                     l.under_way.front()->what, l.under_way.front()->number, l.timeout_s);
}

static void watch(Links& l, double interval_ms, double patience_ms) {
    while (true) {
        std::string why;
        try {
            why = ask_store(l.beats, 'B', "", "", now_ms() + patience_ms,
                            strprintf("rank 0 has shown no sign of life for %.1f s", patience_ms / 1e3));
        } catch (const Failure& failure) { why = failure.what(); }
        if (why.empty()) {
            why = stuck_collective(l);
        } else {
            usleep(200000);  // a launcher that saw that rank's end says more and ends us
        }
        if (!why.empty()) { give_up(l.me.rank, 1, why); }
        std::unique_lock<std::mutex> lock(l.mutex);
        if (l.changed.wait_for(lock, std::chrono::duration<double, std::milli>(interval_ms),
                               [&] { return l.stopping; })) {
            return;
        }
    }
}

static void store_set(const Communicator& c, const std::string& key, const std::string& value) {
    std::lock_guard<std::mutex> lock(c.links->store_mutex);
    ask_store(c.links->store, 'S', key, value, now_ms() + 1e3 * c.links->timeout_s, "rank 0's store does not answer");
}
static std::string store_get(const Communicator& c, const std::string& key, double deadline,
                             const std::string& waiting_for) {
    std::lock_guard<std::mutex> lock(c.links->store_mutex);
    return ask_store(c.links->store, 'G', key, "", deadline, waiting_for);
}
static std::string store_get(const Communicator& c, const std::string& key) { return store_get(c, key, INFINITY, ""); }

std::vector<std::string> gather_text(const Communicator& c, const std::string& text) {
    if (c.world == 1) { return {text}; }
    std::string round = "gather/" + std::to_string(c.links->barriers++) + "/";
    store_set(c, round + std::to_string(c.rank), text);
    std::vector<std::string> all;
    for (int r = 0; r < c.world; r++) { all.push_back(store_get(c, round + std::to_string(r))); }
    return all;
}

// ---------------------------------------------------------------------------------------------------------------------
// Moments on the device's time line

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
static Mark mark_on(cudaStream_t s) {
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
        CUDA_CHECK(cudaEventElapsedTime(&ms, (cudaEvent_t)origin.event.get(), (cudaEvent_t)m.event.get()));
        return ms;
    }
#endif
    return m.ms - origin.ms;
}

// ---------------------------------------------------------------------------------------------------------------------
// Gloo: one worker thread takes the collectives in order, which is the same on every rank; each has its own tag.

#ifdef HAVE_GLOO
static std::string first_line(const std::exception& e) {  // Gloo's messages have several
    return std::string(e.what(), strcspn(e.what(), "\n"));
}

struct GlooStore : gloo::rendezvous::Store {
    const Communicator& c;
    double deadline;
    GlooStore(const Communicator& c, double deadline) : c(c), deadline(deadline) {}
    void set(const std::string& key, const std::vector<char>& value) override {
        store_set(c, "gloo/" + key, std::string(value.begin(), value.end()));
    }
    std::vector<char> get(const std::string& key) override {
        std::string value = store_get(c, "gloo/" + key, deadline, "another rank did not connect to Gloo in time");
        return std::vector<char>(value.begin(), value.end());
    }
    void wait(const std::vector<std::string>& keys) override {
        for (const std::string& key : keys) { get(key); }
    }
    void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) override { wait(keys); }
};

static void connect_gloo(Communicator& c) {
    Links& l = *c.links;
    // An empty one would be what the host's name resolves to, in containers often nothing.
    bool one_machine = c.local_world == c.world;
    const char* interface = getenv("GLOO_SOCKET_IFNAME");
    gloo::transport::tcp::attr attributes;
    if (interface) {
        attributes.iface = interface;
    } else if (one_machine) {
        attributes.hostname = "127.0.0.1";
    }
    try {
        auto device = gloo::transport::tcp::CreateDevice(attributes);
        l.gloo = std::make_shared<gloo::rendezvous::Context>(c.rank, c.world);
        l.gloo->setTimeout(std::chrono::milliseconds((int64_t)(1e3 * l.timeout_s)));
        GlooStore store(c, now_ms() + 1e3 * l.timeout_s);
        l.gloo->connectFullMesh(store, device);
    } catch (const Failure&) { throw; } catch (const std::exception& e) {
        throw LostTouch("Gloo: " + first_line(e));
    }
    // Gloo's own threads throw where a peer sends what they do not expect.
    static const int rank = c.rank;
    std::set_terminate([] {
        try {
            if (std::exception_ptr thrown = std::current_exception()) { std::rethrow_exception(thrown); }
        } catch (const std::exception& e) { give_up(rank, 1, "Gloo: " + first_line(e)); } catch (...) {
        }
        abort();
    });
    l.worker = std::thread([&l] {
        while (true) {
            std::unique_lock<std::mutex> lock(l.mutex);
            l.changed.wait(lock, [&] { return l.stopping || !l.jobs.empty(); });
            if (l.jobs.empty()) { return; }
            std::function<void()> job = std::move(l.jobs.front());
            l.jobs.pop_front();
            lock.unlock();
            job();
        }
    });
}

template <class T>
static void add_into(void* to, const void* a, const void* b, size_t n) {
    for (size_t i = 0; i < n; i++) { from_acc(to_acc(((const T*)a)[i]) + to_acc(((const T*)b)[i]), (T*)to + i); }
}
static void gloo_all_reduce(Links& l, const Tensor& t, uint32_t tag, float scale) {
    gloo::AllreduceOptions options(l.gloo);
    options.setTag(tag);
    options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
    with_type(t.dtype, [&](auto zero) {
        using T = decltype(zero);
        T* data = t.as<T>();
        options.setOutput(data, (size_t)t.size());
        options.setReduceFunction(add_into<T>);
        gloo::allreduce(options);
        if (scale == 1) { return; }
        for (int64_t i = 0; i < t.size(); i++) { from_acc(to_acc(data[i]) * (Wide<T>)scale, &data[i]); }
    });
}
static void gloo_broadcast(Links& l, const Tensor& t, uint32_t tag, int root) {
    gloo::BroadcastOptions options(l.gloo);
    options.setTag(tag);
    options.setRoot(root);
    options.setOutput((char*)t.data, (size_t)t.size() * size_of(t.dtype));
    gloo::broadcast(options);
}
// A ring, since Gloo's own reduce-scatter spoils its connections for what comes after. In W - 1 turns the sum of each
// chunk travels once around. Each rank adds its part, and the chunk's owner gets the sum last.
static void gloo_reduce_scatter(Links& l, const Tensor& t, const std::vector<int64_t>& bounds, uint32_t tag,
                                float scale) {
    int world = l.me.world, rank = l.me.rank, next = (rank + 1) % world, before = (rank + world - 1) % world;
    int64_t longest = 0;
    for (int r = 0; r < world; r++) { longest = std::max(longest, bounds[r + 1] - bounds[r]); }
    with_type(t.dtype, [&](auto zero) {
        using T = decltype(zero);
        T* data = t.as<T>();
        std::vector<T> arriving(longest), leaving(longest);
        auto in = l.gloo->createUnboundBuffer(arriving.data(), longest * sizeof(T));
        auto out = l.gloo->createUnboundBuffer(leaving.data(), longest * sizeof(T));
        for (int turn = 0; turn < world; turn++) {
            int chunk = (rank + 2 * world - 1 - turn) % world;
            int64_t n = bounds[chunk + 1] - bounds[chunk];
            T* mine = data + bounds[chunk];
            bool last = turn + 1 == world;
            for (int64_t i = 0; i < n; i++) {
                Wide<T> sum = to_acc(mine[i]) + (turn > 0 ? to_acc(arriving[i]) : 0);
                from_acc(last ? sum * (Wide<T>)scale : sum, last ? &mine[i] : &leaving[i]);
            }
            if (last) { break; }
            uint64_t slot = ((uint64_t)1 << 63) + ((uint64_t)tag << 16) + turn;  // outside Gloo's own range
            int64_t coming = (chunk + world - 1) % world;
            in->recv(before, slot, 0, (bounds[coming + 1] - bounds[coming]) * sizeof(T));
            out->send(next, slot, 0, n * sizeof(T));
            in->waitRecv();
            out->waitSend();
        }
    });
}
static void gloo_all_gather(Links& l, const Tensor& t, const std::vector<int64_t>& bounds, uint32_t tag) {
    gloo::AllgathervOptions options(l.gloo);
    options.setTag(tag);
    std::vector<size_t> bytes;
    for (int r = 0; r < l.me.world; r++) { bytes.push_back((bounds[r + 1] - bounds[r]) * size_of(t.dtype)); }
    options.setOutput((char*)t.data, bytes);  // in place: no input
    gloo::allgatherv(options);
}

// Between any two memories, by Gloo's thread.
static void transfer(Links& l, void* to, const void* from, size_t bytes) {
#ifdef __CUDACC__
    if (l.stream) {
        CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, l.stream));
        CUDA_CHECK(cudaStreamSynchronize(l.stream));
        return;
    }
#endif
    (void)l;
    memcpy(to, from, bytes);
}
// Runs f on t, or on a copy of it in pinned host memory where t lies on the GPU.
static void staged(Links& l, const Tensor& t, const Mark& ready, const std::function<void(const Tensor&)>& f) {
    (void)l, (void)ready;
#ifdef __CUDACC__
    if (t.device() == CUDA) {
        size_t bytes = bytes_of(t);
        CUDA_CHECK(cudaSetDevice(l.device));  // of this thread
        if (bytes > l.pinned_bytes) {
            if (l.pinned) { CUDA_CHECK(cudaFreeHost(l.pinned)); }
            l.pinned_bytes = 0;
            CUDA_CHECK(cudaMallocHost(&l.pinned, bytes));
            l.pinned_bytes = bytes;
        }
        Tensor host = t;
        host.data = (char*)l.pinned;
        CUDA_CHECK(cudaStreamWaitEvent(l.stream, (cudaEvent_t)ready.event.get()));
        transfer(l, host.data, t.data, bytes);
        f(host);
        transfer(l, t.data, host.data, bytes);
        return;
    }
#endif
    f(t);
}
static void start_on_gloo(Links& l, const WorkPtr& work, Tensor t, std::function<void(const Tensor&)> f) {
    Mark ready = mark();
    auto job = [&l, work, t, f, ready]() mutable {
        Range range(work->what);
        work->begin = {now_ms(), nullptr};
        std::string error;
        try {
            staged(l, t, ready, f);
        } catch (const std::exception& e) { error = first_line(e); }
        t = Tensor(), f = nullptr;  // who waits may count on their memory
        std::lock_guard<std::mutex> lock(l.mutex);
        work->end = {now_ms(), nullptr};
        work->error = error;
        work->finished = true;
        l.changed.notify_all();
    };
    std::lock_guard<std::mutex> lock(l.mutex);
    l.jobs.push_back(job);
    l.changed.notify_all();
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// NCCL has a stream of its own. It waits by an event for the compute stream before each collective, and the compute
// stream waits for it afterwards. The host waits for neither.

#ifdef WITH_NCCL
static void nccl_check(Links& l, ncclResult_t result, const char* call) {
    if (result == ncclSuccess) { return; }
    throw LostTouch(strprintf("%s: %s (%s)", call, ncclGetErrorString(result), ncclGetLastError(l.nccl)));
}
#define NCCL_CHECK(l, call) nccl_check(l, call, #call)

static void connect_nccl(Communicator& c) {
    Links& l = *c.links;
    ncclUniqueId id;
    if (c.rank == 0) {
        NCCL_CHECK(l, ncclGetUniqueId(&id));
        store_set(c, "nccl", std::string(id.internal, sizeof id.internal));
    }
    std::string bytes = store_get(c, "nccl", now_ms() + 1e3 * l.timeout_s, "rank 0 did not set up NCCL in time");
    memcpy(id.internal, bytes.data(), sizeof id.internal);
    // Blocking, since a non-blocking communicator starts a thread for every collective. A peer that dies meanwhile is
    // the watchdog's business.
    ncclComm_t made;
    NCCL_CHECK(l, ncclCommInitRank(&made, c.world, id, c.rank));
    std::lock_guard<std::mutex> lock(l.mutex);
    l.nccl = made;
}
static ncclDataType_t nccl_type(DType t) {
    switch (t) {
        case F32: return ncclFloat32;
        case BF16: return ncclBfloat16;
        default: fail("NCCL: %s tensors are not for collectives here", name_of(t));
    }
}
static void start_on_nccl(Links& l, const WorkPtr& work, const std::function<void()>& enqueue) {
    Range range(work->what);
    Mark ready = mark();
    CUDA_CHECK(cudaStreamWaitEvent(l.stream, (cudaEvent_t)ready.event.get()));
    work->begin = mark_on(l.stream);
    enqueue();
    work->end = mark_on(l.stream);
    std::lock_guard<std::mutex> lock(l.mutex);
    l.under_way.push_back(work);
}
static bool equal_parts(const std::vector<int64_t>& bounds) {
    for (size_t r = 1; r < bounds.size(); r++) {
        if (bounds[r] - bounds[r - 1] != bounds[1] - bounds[0]) { return false; }
    }
    return true;
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// The collectives. Each is started, and finished by wait().

static WorkPtr new_work(const Communicator& c, const char* what, size_t bytes) {
    auto work = std::make_shared<Work>();
    work->what = what, work->number = c.links->collectives++, work->bytes = bytes, work->started_ms = now_ms();
    return work;
}

WorkPtr all_reduce(const Communicator& c, const Tensor& t, Reduction reduction) {
    if (t.device() == META) { return nullptr; }
    Links& l = *c.links;
    WorkPtr work = new_work(c, "all-reduce", bytes_of(t));
#ifdef WITH_NCCL
    if (l.nccl) {
        start_on_nccl(l, work, [&] {
            NCCL_CHECK(l, ncclAllReduce(t.data, t.data, t.size(), nccl_type(t.dtype),
                                        reduction == AVERAGE ? ncclAvg : ncclSum, l.nccl, l.stream));
        });
        return work;
    }
#endif
#ifdef HAVE_GLOO
    float scale = reduction == AVERAGE ? 1.0f / c.world : 1;
    start_on_gloo(l, work, t, [&l, work, scale](const Tensor& x) { gloo_all_reduce(l, x, work->number, scale); });
#endif
    (void)l, (void)reduction;
    return work;
}

WorkPtr broadcast(const Communicator& c, const Tensor& t, int root) {
    if (t.device() == META) { return nullptr; }
    Links& l = *c.links;
    WorkPtr work = new_work(c, "broadcast", bytes_of(t));
#ifdef WITH_NCCL
    if (l.nccl) {
        start_on_nccl(l, work, [&] {
            NCCL_CHECK(l, ncclBroadcast(t.data, t.data, bytes_of(t), ncclInt8, root, l.nccl, l.stream));
        });
        return work;
    }
#endif
#ifdef HAVE_GLOO
    start_on_gloo(l, work, t, [&l, work, root](const Tensor& x) { gloo_broadcast(l, x, work->number, root); });
#endif
    (void)l, (void)root;
    return work;
}

WorkPtr reduce_scatter(const Communicator& c, const Tensor& t, const std::vector<int64_t>& bounds, Reduction reduction,
                       const Tensor& own) {
    if (t.device() == META) { return nullptr; }
    Links& l = *c.links;
    WorkPtr work = new_work(c, "reduce-scatter", bytes_of(t));
#ifdef WITH_NCCL
    if (l.nccl) {
        start_on_nccl(l, work, [&] {
            ncclRedOp_t op = reduction == AVERAGE ? ncclAvg : ncclSum;
            auto part = [&](int r) { return t.data + bounds[r] * size_of(t.dtype); };
            if (equal_parts(bounds)) {
                NCCL_CHECK(l, ncclReduceScatter(t.data, own ? own.data : part(c.rank), bounds[1], nccl_type(t.dtype),
                                                op, l.nccl, l.stream));
                return;
            }
            NCCL_CHECK(l, ncclGroupStart());
            for (int r = 0; r < c.world; r++) {
                NCCL_CHECK(l, ncclReduce(part(r), part(r), bounds[r + 1] - bounds[r], nccl_type(t.dtype), op, r, l.nccl,
                                         l.stream));
            }
            NCCL_CHECK(l, ncclGroupEnd());
        });
        return work;
    }
#endif
#ifdef HAVE_GLOO
    float scale = reduction == AVERAGE ? 1.0f / c.world : 1;
    start_on_gloo(l, work, t, [&l, work, bounds, scale, own, rank = c.rank](const Tensor& x) {
        gloo_reduce_scatter(l, x, bounds, work->number, scale);
        if (own) { transfer(l, own.data, x.data + bounds[rank] * size_of(x.dtype), bytes_of(own)); }
    });
#endif
    (void)l, (void)reduction, (void)bounds;
    return work;
}

WorkPtr all_gather(const Communicator& c, const Tensor& t, const std::vector<int64_t>& bounds, const Tensor& own) {
    if (t.device() == META) { return nullptr; }
    Links& l = *c.links;
    WorkPtr work = new_work(c, "all-gather", bytes_of(t));
#ifdef WITH_NCCL
    if (l.nccl) {
        start_on_nccl(l, work, [&] {
            auto part = [&](int r) { return t.data + bounds[r] * size_of(t.dtype); };
            if (equal_parts(bounds)) {
                NCCL_CHECK(l, ncclAllGather(own ? own.data : part(c.rank), t.data, bounds[1] * size_of(t.dtype),
                                            ncclInt8, l.nccl, l.stream));
                return;
            }
            NCCL_CHECK(l, ncclGroupStart());
            for (int r = 0; r < c.world; r++) {
                NCCL_CHECK(l, ncclBroadcast(part(r), part(r), (bounds[r + 1] - bounds[r]) * size_of(t.dtype), ncclInt8,
                                            r, l.nccl, l.stream));
            }
            NCCL_CHECK(l, ncclGroupEnd());
        });
        return work;
    }
#endif
#ifdef HAVE_GLOO
    start_on_gloo(l, work, t, [&l, work, bounds, own, rank = c.rank](const Tensor& x) {
        if (own) { transfer(l, x.data + bounds[rank] * size_of(x.dtype), own.data, bytes_of(own)); }
        gloo_all_gather(l, x, bounds, work->number);
    });
#endif
    (void)l, (void)bounds;
    return work;
}

void wait(const Communicator& c, const WorkPtr& work) {
    if (!work) { return; }
    Links& l = *c.links;
#ifdef WITH_NCCL
    if (l.nccl) {
        const Mark& last = work->done.event ? work->done : work->end;
        CUDA_CHECK(cudaStreamWaitEvent(stream(), (cudaEvent_t)last.event.get()));
        return;
    }
#endif
    std::unique_lock<std::mutex> lock(l.mutex);
    l.changed.wait(lock, [&] { return work->finished; });
    if (!work->error.empty()) { throw LostTouch(strprintf("%s: Gloo: %s", work->what, work->error.c_str())); }
    lock.unlock();
    if (auto f = std::exchange(work->behind, nullptr)) { f(); }
}
void run_behind(const Communicator& c, const WorkPtr& work, const std::function<void()>& f) {
    if (!work) { return f(); }  // META
#ifdef WITH_NCCL
    if (Links& l = *c.links; l.nccl) {
        CUDA_CHECK(cudaStreamWaitEvent(l.behind, (cudaEvent_t)work->end.event.get()));
        with_stream(l.behind, f);
        work->done = mark_on(l.behind);
        return;
    }
#endif
    (void)c;
    work->behind = f;
}

void barrier(const Communicator& c) {
    synchronize();
    wait(c, all_reduce(c, c.links->barrier_token, SUM));
    synchronize();
}

// ---------------------------------------------------------------------------------------------------------------------
// From the environment to a communicator, and back

std::string why_not(const std::string& backend, Device device, int n) {
    int gpus = cuda_devices();
    if (device == CUDA && gpus == 0) { return "no GPU here"; }
    if (backend == "gloo") { return HAS_GLOO ? "" : "built without Gloo (libgloo-dev)"; }
    if (device != CUDA) { return "NCCL works on GPUs only"; }
    if (!HAS_NCCL) { return "built without NCCL (nccl.h, libnccl)"; }
    if (gpus < n) { return strprintf("NCCL wants one GPU per rank: %d for %d ranks", gpus, n); }
    return "";
}

static std::string choose_backend(const std::string& want, Device device, const Identity& me) {
    std::string why = why_not("nccl", device, me.local_world);
    std::string backend = want == "auto" ? (why.empty() ? "nccl" : "gloo") : want;
    std::string not_this = why_not(backend, device, me.local_world);
    if (!not_this.empty()) { fail("backend %s: %s", backend.c_str(), not_this.c_str()); }
    if (me.rank == 0 && want == "auto" && backend == "gloo") { note("backend auto: took gloo (%s)", why.c_str()); }
    if (me.rank == 0 && backend == "gloo" && device == CUDA) {
        note("backend gloo: what is on the GPU passes through pinned host memory");
    }
    return backend;
}

// Rank 0's socket: the launcher's, or its own on MASTER_ADDR.
static int listening_socket(const Identity& me, double deadline) {
    if (me.listening >= 0) {
        int listens = 0;
        socklen_t n = sizeof listens;
        bool ours = getsockopt(me.listening, SOL_SOCKET, SO_ACCEPTCONN, &listens, &n) == 0 && listens;
        if (!ours || fcntl(me.listening, F_SETFD, FD_CLOEXEC) != 0) {
            usage_error("environment variable %s: got %d, which is no listening socket", STORE_FD, me.listening);
        }
        unsetenv(STORE_FD);  // a process that we start has no such socket
        return me.listening;
    }
    bool only_this_machine;
    int fd = listen_for_ranks(me.address, me.port, deadline, &only_this_machine);
    if (!only_this_machine && environment_text("CS336_TOKEN").empty()) {
        note(
            "warning: whoever reaches %s:%d can join this job; CS336_TOKEN, one secret for all ranks, keeps others out",
            me.address.c_str(), me.port);
    }
    return fd;
}

static void connect_ranks(Communicator& c, const Identity& me, const Options& o) {
    c.rank = me.rank, c.world = me.world, c.local_rank = me.local_rank, c.local_world = me.local_world;
    c.links = std::make_shared<Links>();
    Links& l = *c.links;
    l.me = me, l.timeout_s = o.timeout;
    // 0.8, so that all is over within the timeout.
    double patience_ms = 0.8e3 * o.timeout, deadline = now_ms() + patience_ms;
    Hello hello{me.rank, false, me.world, me.token, commit(), o.command, o.given};
    if (me.rank == 0) {
        l.server = start_store(listening_socket(me, deadline), hello, patience_ms,
                               [](const std::string& why) { give_up(0, 1, "the ranks cannot connect: " + why); });
    }
    l.store = connect_to_store(me.address, me.port, hello, deadline);
    hello.for_heartbeats = true;
    l.beats = connect_to_store(me.address, me.port, hello, deadline);
    l.watchdog = std::thread([&l, patience_ms] { watch(l, std::min(patience_ms / 8, 500.0), patience_ms); });
    store_set(c, "started/" + std::to_string(c.rank), "");
    for (int r = 0; r < c.world; r++) {
        std::string missing = strprintf("rank %d of %d did not start within %g s", r, c.world, patience_ms / 1e3);
        store_get(c, "started/" + std::to_string(r), deadline, missing);
    }

    int gpus = cuda_devices(), gpu = gpus > 0 ? me.local_rank % gpus : 0;
    std::string device = c.rank == 0 ? name_of(choose_device(o.device, gpu)) : "";
    context.device = choose_device(gather_text(c, device)[0], gpu);
    c.backend = choose_backend(o.backend, context.device, me);
    std::vector<std::string> works =
        gather_text(c, strprintf("%s over %s", name_of(context.device), c.backend.c_str()));
    for (int r = 0; r < c.world; r++) {
        if (works[r] == works[0]) { continue; }
        fail("rank %d works on %s, but rank 0 on %s", r, works[r].c_str(), works[0].c_str());
    }
#ifdef __CUDACC__
    if (context.device == CUDA) {
        int least, greatest;  // collectives first: the others wait for them
        l.device = gpu;
        CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        CUDA_CHECK(cudaStreamCreateWithPriority(&l.stream, cudaStreamNonBlocking, greatest));
        CUDA_CHECK(cudaStreamCreateWithPriority(&l.behind, cudaStreamNonBlocking, least));
    }
#endif
#ifdef WITH_NCCL
    if (c.backend == "nccl") { connect_nccl(c); }
#endif
#ifdef HAVE_GLOO
    if (c.backend == "gloo") { connect_gloo(c); }
#endif
    l.barrier_token = zeros({1}, F32, WORKSPACE);
    barrier(c);
}

static void disconnect_ranks(Communicator& c) {
    Links& l = *c.links;
    gather_text(c, "");  // nobody still waits for a part of ours
    {
        std::lock_guard<std::mutex> lock(l.mutex);
        l.stopping = true;
        l.changed.notify_all();
    }
    l.watchdog.join();
#ifdef HAVE_GLOO
    if (l.worker.joinable()) { l.worker.join(); }
    l.gloo.reset();
#endif
#ifdef WITH_NCCL
    l.under_way.clear();
    if (l.nccl) { NCCL_CHECK(l, ncclCommDestroy(l.nccl)); }
#endif
    l.barrier_token = Tensor();
#ifdef __CUDACC__
    for (cudaStream_t s : {l.stream, l.behind}) {
        if (s) { CUDA_CHECK(cudaStreamDestroy(s)); }
    }
    if (l.pinned) { CUDA_CHECK(cudaFreeHost(l.pinned)); }
#endif
    ask_store(l.store, 'Q', "", "", now_ms() + 1e3 * l.timeout_s, "rank 0's store does not answer");
    if (l.server) { stop_store_soon(*l.server); }
    close(l.store);
    close(l.beats);
    if (l.server) { wait_for_store(*l.server); }
}

int run_ranks(const Options& o, const std::function<void(const Communicator&)>& body, bool finish) {
    if (context.plan_only) {  // what rank 0 would do, without the others
        Communicator c;
        c.world = c.local_world = o.nproc;
        context.device = choose_device(o.device);
        bool nccl = gpu_is_imagined() || why_not("nccl", context.device, o.nproc).empty();
        c.backend = o.backend != "auto" ? o.backend : nccl ? "nccl" : "gloo";
        body(c);
        return 0;
    }
    if (!is_rank()) {
        int n = o.nproc;
        Device device = o.device == "cuda" || (o.device == "auto" && cuda_devices() > 0) ? CUDA : CPU;
        std::string why = why_not(o.backend == "auto" ? "gloo" : o.backend, device, n);
        if (o.backend == "auto" && why_not("nccl", device, n).empty()) { why = ""; }
        if (!why.empty()) {
            fail("%d ranks, device %s, backend %s: %s", n, o.device.c_str(), o.backend.c_str(), why.c_str());
        }
        return launch_ranks(n, o.command_line, finish);
    }
    Identity me;
    Communicator c;  // outside, since a failure ends the process while its threads still run
    try {
        identity_from_environment(&me);
        if (o.has("nproc") && o.nproc != me.world) {
            usage_error("--nproc: got %d, but the launcher has started %d ranks", o.nproc, me.world);
        }
        connect_ranks(c, me, o);
        if (me.rank == 0) { progress("%s: %d ranks connected, getting ready", o.command.c_str(), me.world); }
        body(c);
        disconnect_ranks(c);
        return 0;
    } catch (const LostTouch& lost) {
        // If another rank is gone, the watchdog (once there is one) knows which, and ends us here.
        if (c.links->watchdog.joinable()) { usleep((useconds_t)(1e6 * std::min(1.0, 0.2 * o.timeout))); }
        give_up(me.rank, 1, lost.what());
    } catch (const Failure& failure) {
        give_up(me.rank, failure.exit_code, failure.what());
    } catch (const std::exception& e) { give_up(me.rank, 1, e.what()); }
}
