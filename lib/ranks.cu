// lib/ranks.cu: several processes that work as one. Each is a rank with its own GPU, or its share
// of the CPU's cores.
//   the launcher      `--nproc N` starts N copies of this program; torchrun, mpirun and srun do
//                     the same from outside
//   the rendezvous    a folder with a file for each thing that a rank tells the others
//   the communicator  all-reduce, broadcast, reduce-scatter, all-gather and barrier on NCCL or
//                     Gloo, asynchronous
#include "lib.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include <sys/stat.h>
#include <sys/wait.h>

#ifdef HAVE_GLOO
constexpr bool HAS_GLOO = true;
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/broadcast.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#else
constexpr bool HAS_GLOO = false;
#endif
#if defined(__CUDACC__) && defined(HAVE_NCCL)
#define WITH_NCCL
constexpr bool HAS_NCCL = true;
#include <nccl.h>
#ifdef NCCL_CTA_POLICY_ZERO  // NCCL 2.28
#define WITH_WINDOWS
#endif
#else
constexpr bool HAS_NCCL = false;
#endif

// -------------------------------------------------------------------------------------------------
// Who am I? The launcher says so in the environment.

struct Identity {
    int rank = -1, world = 1;  // -1: this process was started by hand, as the only one
    // the same for all ranks of a job and for no other one: run or step, attempt
    std::string job;
};
static int number_in(const char* variable) {
    int value;
    char behind;
    if (sscanf(getenv(variable), "%7d%c", &value, &behind) != 1 || value < 0) {
        usage_error("environment variable %s: got '%s', takes a whole number", variable,
                    getenv(variable));
    }
    return value;
}
static Identity identity() {
    Identity me;
    auto ask = [&](const char* rank, const char* world, std::initializer_list<const char*> job) {
        if (me.rank >= 0 || !getenv(rank) || !getenv(world)) { return; }
        me.rank = number_in(rank), me.world = number_in(world);
        if (me.rank >= me.world) {
            usage_error("rank %d: the world has only %d ranks", me.rank, me.world);
        }
        for (const char* name : job) {
            if (const char* value = getenv(name)) { me.job += std::string("-") + value; }
        }
        std::replace(me.job.begin(), me.job.end(), '/', '_');
    };
    // torchrun, and our own launcher. By default a run's id may be "none".
    ask("RANK", "WORLD_SIZE",
        {"TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"});
    ask("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", {"PMIX_NAMESPACE"});  // mpirun
    // An interactive shell is a step of one task, and no rank.
    auto several = [](const char* world) {
        return getenv(world) && strcmp(getenv(world), "1") != 0;
    };
    if (several("SLURM_STEP_NUM_TASKS")) {  // srun
        ask("SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
            {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"});
    }
    if (several("PMI_SIZE")) { ask("PMI_RANK", "PMI_SIZE", {}); }  // mpiexec of MPICH and Intel MPI
    return me;
}
bool is_rank() { return identity().rank >= 0; }

// -------------------------------------------------------------------------------------------------
// The launcher. It waits for its ranks. If one fails, it kills the rest, which would wait for that
// rank for ever.

static const char* const RENDEZVOUS = "CS336_RENDEZVOUS";  // names the folder above the ranks' own

static std::string folder_of_ranks;  // of this process, launcher or rank
static double patience_s = 60;       // how long a rank waits for the others
static void remove_folder_of_ranks() {
    std::error_code ignored;
    if (!folder_of_ranks.empty()) { std::filesystem::remove_all(folder_of_ranks, ignored); }
}

static pid_t start_rank(int r, int n, const std::vector<std::string>& arguments) {
    return start_ourselves(arguments, [&] {
        setenv("RANK", std::to_string(r).c_str(), true);
        setenv("WORLD_SIZE", std::to_string(n).c_str(), true);
        setenv(RENDEZVOUS, folder_of_ranks.c_str(), true);
        setenv("OMP_NUM_THREADS", std::to_string(std::max(1, omp_get_num_procs() / n)).c_str(),
               false);
    });
}

struct LaunchedRank {
    pid_t pid;  // 0: it has ended
    // how long it has been stopped, of the time in which we ran; below 0: it runs
    double stopped_ms = -INFINITY;
};
// In ms since `last`, but at most 100: what is more we have slept ourselves, as after Ctrl-Z and
// fg.
static double tick_ms(double* last) {
    const double before = std::exchange(*last, now_ms());
    return std::min(*last - before, 100.0);
}

int launch_ranks(int n, const std::vector<std::string>& arguments, double timeout_s) {
    folder_of_ranks = (std::filesystem::temp_directory_path() / "cs336-XXXXXX").string();
    if (!mkdtemp(folder_of_ranks.data())) {
        fail("%s: %s", folder_of_ranks.c_str(), strerror(errno));
    }
    fflush(nullptr);
    EndSignals noted;
    std::vector<LaunchedRank> ranks;
    for (int r = 0; r < n; r++) { ranks.push_back({start_rank(r, n, arguments)}); }
    int code = 0, left = n;
    auto end_all = [&](int exit_code, const std::string& why) {
        if (code == 0 && !why.empty()) { note("cs336: %s", why.c_str()); }
        if (code == 0) { code = exit_code; }  // the first reason counts
        for (const LaunchedRank& rank : ranks) {
            if (rank.pid) { kill(rank.pid, SIGKILL); }  // which also ends a stopped one
        }
    };
    for (double last = now_ms(); left > 0; usleep(5000)) {
        // main() ends by this signal
        if (const int number = EndSignals::seen()) { end_all(128 + number, ""); }
        const double tick = tick_ms(&last);
        for (int r = 0; r < n; r++) {
            LaunchedRank& rank = ranks[r];
            const std::string name = strprintf("rank %d (process %d)", r, (int)rank.pid);
            int status = 0;
            const pid_t pid =
                rank.pid ? waitpid(rank.pid, &status, WNOHANG | WUNTRACED | WCONTINUED) : 0;
            rank.stopped_ms += tick;
            if (pid > 0 && WIFSTOPPED(status)) {
                rank.stopped_ms = 0;
            } else if (pid > 0 && WIFCONTINUED(status)) {
                rank.stopped_ms = -INFINITY;
            } else if (pid > 0) {
                rank = {0}, left--;
                const int number = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
                if (number) {
                    end_all(1, strprintf("%s was killed by signal %d (%s)", name.c_str(), number,
                                         strsignal(number)));
                } else if (WEXITSTATUS(status) != 0) {
                    end_all(WEXITSTATUS(status), "");  // it has said why
                }
            }
            // 0.8, so that all is over within the timeout
            if (rank.stopped_ms > 0.8e3 * timeout_s) {
                end_all(1, strprintf("%s has been stopped for %.1f s", name.c_str(),
                                     rank.stopped_ms / 1e3));
            }
        }
    }
    remove_folder_of_ranks();
    return code;
}

// -------------------------------------------------------------------------------------------------
// The rendezvous: a folder with a file for each thing that a rank tells the others.

static void make_folder_of_ranks(const Identity& me) {
    const char *where = getenv(RENDEZVOUS), *file = getenv("TORCHELASTIC_ERROR_FILE");
    // In a machine's own folder the ranks' parent tells jobs apart, too, or torchrun's folder,
    // since a script may stand between: the error file is FOLDER/attempt_0/RANK/error.json.
    const std::filesystem::path job =
        std::filesystem::path(file ? file : "").parent_path().parent_path().parent_path();
    const std::string above = where ? where : std::filesystem::temp_directory_path().string(),
                      parent = where ? ""
                                     : "-" + (file ? job.filename().string()
                                                   : std::to_string(getppid())),
                      folder = above + "/cs336-" + std::to_string(getuid()) + parent + me.job;
    struct stat s;
    if ((mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) || lstat(folder.c_str(), &s) != 0 ||
        !S_ISDIR(s.st_mode) || s.st_uid != getuid() || (s.st_mode & 077) != 0) {
        fail(
            "%s: cannot be the ranks' folder, which only its owner may enter; %s names the one "
            "above",
            folder.c_str(), RENDEZVOUS);
    }
    if (access(strprintf("%s/0.%d", folder.c_str(), me.rank).c_str(), F_OK) == 0) {
        fail("%s: holds an earlier job's files (remove it), or two ranks have one number",
             folder.c_str());
    }
    folder_of_ranks = folder;
}

static std::string life_of(int rank) {
    return strprintf("%s/life.%d", folder_of_ranks.c_str(), rank);
}

std::vector<std::string> gather_text(const Communicator& c, const std::string& text) {
    if (c.world == 1) { return {text}; }
    static uint32_t gathers = 0;
    const double limit_s = 0.8 * patience_s;
    const std::string round = strprintf("%s/%u.", folder_of_ranks.c_str(), gathers++);
    save_file(round + std::to_string(c.rank), text);
    std::vector<std::string> all;
    for (int r = 0; r < c.world; r++) {
        std::ifstream file;
        std::string life, before;  // what it wrote last
        double waited_ms = 0, last = now_ms();
        while (file.open(round + std::to_string(r), std::ios::binary), !file) {
            std::ifstream(life_of(r)) >> life;
            waited_ms = life == before ? waited_ms + tick_ms(&last) : 0;
            before = life;
            if (waited_ms > 1e3 * limit_s) {
                fail("rank %d of %d %s %s within %g s (all ranks need one folder: %s)", r, c.world,
                     life.empty() ? "did not come to" : "shows no life in", folder_of_ranks.c_str(),
                     limit_s, RENDEZVOUS);
            }
            usleep(1000);
        }
        all.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    return all;
}

// -------------------------------------------------------------------------------------------------
// A rank's connections, and its watchdog: a thread that ends the process where a collective does
// not end, since the main thread may wait in it. That another rank is dead or stopped is its
// launcher's business.

struct Links {
    std::mutex mutex;  // of what follows
    std::condition_variable changed;
    bool stopping = false;
    std::thread watchdog;
    int rank = 0, world = 1;
    uint32_t collectives = 0;
    std::deque<WorkPtr> under_way;
    Tensor barrier_token;

#ifdef HAVE_GLOO
    std::shared_ptr<gloo::rendezvous::Context> gloo;
    std::thread worker;
    std::deque<std::function<void()>> jobs;
#endif
#ifdef WITH_NCCL
    struct Lane {
        ncclComm_t nccl = nullptr;
        cudaStream_t stream = nullptr;
    } lanes[2];                     // of reduce-scatters; of all else
    cudaStream_t behind = nullptr;  // see run_behind
    int device = 0;
#endif
#ifdef WITH_WINDOWS
    std::shared_ptr<struct Windows> windows;  // of allocate_shared; null with Gloo
#endif
};

// A rank's end ends the others. So those who only notice it wait, and one line tells the cause;
// where all see the cause, the lowest rank tells it.
[[noreturn]] static void give_up(int rank, int exit_code, const std::string& why) {
    usleep(500000 + 100000 * std::min(rank, 10));
    note("cs336: rank %d: %s", rank, why.c_str());
    remove_folder_of_ranks();
    fflush(stdout);
    _exit(exit_code);
}

static bool has_ended(const Work& work) {
#ifdef __CUDACC__
    if (work.end.event) { return cudaEventQuery((cudaEvent_t)work.end.event.get()) == cudaSuccess; }
#endif
    return work.finished;
}
static void watch(Links& l) {
#ifdef WITH_NCCL
    if (context.device == CUDA) {
        CUDA_CHECK(cudaSetDevice(l.device));
    }  // a thread starts on GPU 0, and would make a context there
#endif
    const std::chrono::duration<double> turn(std::min(0.5, 0.1 * patience_s));
    WorkPtr oldest;
    // for it; turns are counted, since a clock also runs while the whole job is paused
    double waited_s = 0;
    std::unique_lock<std::mutex> lock(l.mutex);
    for (int turns = 0; !l.changed.wait_for(lock, turn, [&] { return l.stopping; }); turns++) {
        std::ofstream(life_of(l.rank)) << turns;
        while (!l.under_way.empty() && has_ended(*l.under_way.front())) { l.under_way.pop_front(); }
        const WorkPtr before =
            std::exchange(oldest, l.under_way.empty() ? nullptr : l.under_way.front());
        waited_s = oldest && oldest == before ? waited_s + turn.count() : 0;
        if (waited_s > patience_s) {
            give_up(
                l.rank, 1,
                strprintf(
                    "%s number %u has not ended within %g s: a rank is gone, or calls another one",
                    oldest->what, oldest->number, patience_s));
        }
    }
}

#ifdef HAVE_GLOO
static std::string first_line(const std::exception& e) {  // Gloo's messages have several
    return std::string(e.what(), strcspn(e.what(), "\n"));
}

static void connect_gloo(Communicator& c) {
    Links& l = *c.links;
    gloo::transport::tcp::attr attributes;
    if (const char* interface = getenv("GLOO_SOCKET_IFNAME")) {
        attributes.iface = interface;
    } else if (c.local_world == c.world) {
        attributes.hostname = "127.0.0.1";
    } else {  // Gloo would take what the host's name resolves to, often 127.0.1.1 or nothing
        fail(
            "Gloo on several machines: set GLOO_SOCKET_IFNAME to the network's name, such as eth0");
    }
    // what Gloo writes to a rank that is gone fails, and the rank stays to say so
    signal(SIGPIPE, SIG_IGN);
    try {
        auto device = gloo::transport::tcp::CreateDevice(attributes);
        l.gloo = std::make_shared<gloo::rendezvous::Context>(c.rank, c.world);
        l.gloo->setTimeout(std::chrono::milliseconds((int64_t)(1e3 * patience_s)));
        gloo::rendezvous::FileStore store(folder_of_ranks);
        l.gloo->connectFullMesh(store, device);
        l.gloo->setTimeout(std::chrono::hours(1000));  // from here on the watchdog counts
    } catch (const std::exception& e) { fail("Gloo: %s", first_line(e).c_str()); }
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

#endif

#ifdef WITH_NCCL
static void await(cudaStream_t s, const Mark& m) {
    CUDA_CHECK(cudaStreamWaitEvent(s, (cudaEvent_t)m.event.get()));
}
static void nccl_check(ncclResult_t result, const char* call) {
    if (result == ncclSuccess) { return; }
    fail("%s: %s (%s)", call, ncclGetErrorString(result), ncclGetLastError(nullptr));
}
#define NCCL_CHECK(call) nccl_check(call, #call)

#ifdef WITH_WINDOWS
static void open_windows(Links& l);
static bool lies_in_window(const Links& l, const Tensor& t);
#endif
static void connect_nccl(Communicator& c) {
    Links& l = *c.links;
    int least, greatest;  // collectives first: the others wait for them
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    for (auto& lane : l.lanes) {
        CUDA_CHECK(cudaStreamCreateWithPriority(&lane.stream, cudaStreamNonBlocking, greatest));
    }
    CUDA_CHECK(cudaStreamCreateWithPriority(&l.behind, cudaStreamNonBlocking, least));
    // nobody else reaches its ports
    if (c.local_world == c.world) { setenv("NCCL_SOCKET_IFNAME", "lo", false); }
    ncclUniqueId id{};
    if (c.rank == 0) { NCCL_CHECK(ncclGetUniqueId(&id)); }
    memcpy(&id, gather_text(c, std::string((const char*)&id, sizeof id))[0].data(), sizeof id);
    // Blocking, since a non-blocking communicator starts a thread for every collective.
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t& nccl = l.lanes[1].nccl;
#ifdef WITH_WINDOWS
    config.CTAPolicy = NCCL_CTA_POLICY_ZERO;  // copy engines, wherever they can do it
    open_windows(l);
#endif
    NCCL_CHECK(ncclCommInitRankConfig(&nccl, c.world, id, c.rank, &config));
    NCCL_CHECK(ncclCommSplit(nccl, 0, c.rank, &l.lanes[0].nccl, nullptr));
}
#endif

std::string why_not(const std::string& backend, Device device, int n, int gpus) {
    if (device == CUDA && cuda_devices() == 0) { return "no GPU here"; }
    if (backend == "gloo" && device == CUDA) { return "Gloo works on CPUs only"; }
    if (backend == "gloo") { return HAS_GLOO ? "" : "built without Gloo (libgloo-dev)"; }
    if (device != CUDA) { return "NCCL works on GPUs only"; }
    if (!HAS_NCCL) { return "built without NCCL (nccl.h, libnccl)"; }
    if (gpus < n) { return strprintf("NCCL wants one GPU per rank: %d for %d ranks", gpus, n); }
    return "";
}

// How many ranks this machine has, and which of them we are.
static int find_local_ranks(Communicator& c) {
    std::string here;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> here;
    std::error_code ignored;  // a container with a network of its own is another machine
    here += std::filesystem::read_symlink("/proc/self/ns/net", ignored).string();
    const std::vector<std::string> machines = gather_text(c, here), ids = gather_text(c, gpu_ids());
    std::set<std::string> gpus;
    for (int r = 0; r < c.world; r++) {
        std::istringstream words(machines[r] == here ? ids[r] : "");
        for (std::string id; words >> id;) { gpus.insert(id); }
    }
    c.local_gpus = (int)gpus.size();
    c.local_world = (int)std::count(machines.begin(), machines.end(), here);
    return (int)std::count(machines.begin(), machines.begin() + c.rank, here);
}

// By default NCCL where every rank of rank 0's machine has a GPU; else Gloo, on the CPU.
static void choose_device_and_backend(Communicator& c, const std::string& device,
                                      const std::string& backend, int gpu) {
    const std::string why = why_not("nccl", CUDA, c.local_world, c.local_gpus);
    const bool by_default = device == "cuda" || (device == "auto" && why.empty());
    c.backend = gather_text(c, backend != "auto" ? backend : by_default ? "nccl" : "gloo")[0];
    const bool nccl = c.backend == "nccl";
    if (c.rank == 0 && device == "auto" && !nccl && !why.empty()) {
        note("took gloo, on the CPU, where steps have the sizes of --quick (%s)", why.c_str());
    }
    context.device = choose_device(device != "auto" ? device : nccl ? "cuda" : "cpu", gpu);
    const std::string not_so = why_not(c.backend, context.device, c.local_world, c.local_gpus);
    if (!not_so.empty()) { fail("backend %s: %s", c.backend.c_str(), not_so.c_str()); }
}

static void connect_ranks(Communicator& c, const std::string& device, const std::string& backend) {
    Links& l = *c.links;
    const int local_rank = find_local_ranks(c), gpus = cuda_devices();
    const int gpu = gpus > 0 ? local_rank % gpus : 0;
    choose_device_and_backend(c, device, backend, gpu);
#ifdef WITH_NCCL
    l.device = gpu;
#endif
    l.watchdog = std::thread([&l] { watch(l); });
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
    free_shared(c);
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
    for (auto& lane : l.lanes) {
        if (lane.nccl) { NCCL_CHECK(ncclCommDestroy(lane.nccl)); }
    }
#endif
    l.barrier_token = Tensor();
    // The last one removes the folder, since the others have yet to read from it.
    save_file(strprintf("%s/done.%d", folder_of_ranks.c_str(), c.rank), "");
    for (int r = 0; r < c.world; r++) {
        if (access(strprintf("%s/done.%d", folder_of_ranks.c_str(), r).c_str(), F_OK) != 0) {
            return;
        }
    }
    remove_folder_of_ranks();
}

int join_ranks(int world, const std::string& device, const std::string& backend, double timeout_s,
               const std::function<void(const Communicator&)>& f) {
    Communicator c;  // outside, since a failure ends the process while its threads still run
    try {
        const Identity me = identity();
        c.rank = me.rank, c.world = me.world;
        if (world && world != c.world) {
            usage_error("--nproc: got %d, but the launcher has started %d ranks", world, c.world);
        }
        c.links = std::make_shared<Links>();
        c.links->rank = c.rank, c.links->world = c.world;
        patience_s = timeout_s;
        make_folder_of_ranks(me);
        connect_ranks(c, device, backend);
        if (c.rank == 0) { progress("%d ranks connected, getting ready", c.world); }
        f(c);
        disconnect_ranks(c);
        return 0;
    } catch (const Failure& failure) {
        give_up(c.rank, failure.exit_code, failure.what());
    } catch (const std::exception& e) { give_up(c.rank, 1, e.what()); }
}

// -------------------------------------------------------------------------------------------------
// The collectives. Each is started, and finished by wait().

struct Collective {
    enum Kind { ALL_REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER } kind;
    Tensor t;
    Reduction how = SUM;
    int root = 0;     // of a broadcast
    Tensor own = {};  // see reduce_scatter
    bool beside = false;
};

static size_t bytes_of(const Tensor& t) { return t.size() * size_of(t.dtype); }

// -------------------------------------------------------------------------------------------------
// Gloo: one worker thread takes the collectives in order, which is the same on every rank; each has
// its own tag.

#ifdef HAVE_GLOO
template <class T>
static void add_into(void* to, const void* a, const void* b, size_t n) {
    for (size_t i = 0; i < n; i++) { ((T*)to)[i] = ((const T*)a)[i] + ((const T*)b)[i]; }
}
static void gloo_all_reduce(Links& l, const Tensor& t, uint32_t tag, Reduction how) {
    gloo::AllreduceOptions options(l.gloo);
    options.setTag(tag);
    options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
    with_type(t.dtype, [&](auto zero) {
        using T = decltype(zero);
        T* data = t.as<T>();
        options.setOutput(data, (size_t)t.size());
        options.setReduceFunction(add_into<T>);
        gloo::allreduce(options);
        const Wide<T> scale = how == AVERAGE ? 1.0f / l.world : 1;
        for (int64_t i = 0; i < t.size(); i++) { data[i] = data[i] * scale; }
    });
}
static void run_on_gloo(Links& l, const Collective& x, uint32_t tag) {
    const size_t bytes = bytes_of(x.t), part = bytes / l.world;
    if (x.kind == Collective::BROADCAST) {
        gloo::BroadcastOptions options(l.gloo);
        options.setTag(tag);
        options.setRoot(x.root);
        options.setOutput(x.t.data, bytes);
        gloo::broadcast(options);
    } else if (x.kind == Collective::ALL_GATHER) {
        if (x.own) { memcpy(x.t.data + l.rank * part, x.own.data, part); }
        gloo::AllgatherOptions options(l.gloo);
        options.setTag(tag);
        options.setOutput(x.t.data, bytes);  // in place: no input
        gloo::allgather(options);
    } else {
        // Gloo's own reduce-scatter spoils its connections for what comes after
        gloo_all_reduce(l, x.t, tag, x.how);
        if (x.own) { memcpy(x.own.data, x.t.data + l.rank * part, part); }
    }
}

static void start_on_gloo(Links& l, const WorkPtr& work, Collective x) {
    auto job = [&l, work, x]() mutable {
        Range range(work->what);
        work->begin = {now_ms(), nullptr};
        std::string error;
        try {
            run_on_gloo(l, x, work->number);
        } catch (const std::exception& e) { error = first_line(e); }
        x.t = x.own = Tensor();  // who waits may count on their memory
        std::lock_guard<std::mutex> lock(l.mutex);
        work->end = {now_ms(), nullptr};
        work->error = error;
        work->finished = true;
        l.changed.notify_all();
    };
    std::lock_guard<std::mutex> lock(l.mutex);
    l.under_way.push_back(work);
    l.jobs.push_back(job);
    l.changed.notify_all();
}
#else
static void start_on_gloo(Links&, const WorkPtr&, const Collective&) {}
#endif

// -------------------------------------------------------------------------------------------------
// NCCL runs on streams of its own. They wait by an event for the compute stream before each
// collective, and it waits for them afterwards. The host waits for neither. Gathers run beside
// reduce-scatters: these have their own communicator.

#ifdef WITH_NCCL
static ncclDataType_t nccl_type(DType t) {
    if (t != F32 && t != BF16) {
        fail("NCCL: %s tensors are not for collectives here", name_of(t));
    }
    return t == F32 ? ncclFloat32 : ncclBfloat16;
}
// When `ready` is reached. Returns begin and end.
static std::pair<Mark, Mark> enqueue(Links& l, const Collective& x, const Mark& ready) {
    const auto [nccl, stream] = l.lanes[x.kind != Collective::REDUCE_SCATTER];
    const size_t n = x.t.size(), bytes = bytes_of(x.t), part = bytes / l.world;
    char *data = x.t.data, *own = x.own ? x.own.data : data + l.rank * part;
    const ncclRedOp_t op = x.how == AVERAGE ? ncclAvg : ncclSum;
    await(stream, ready);
    const Mark begin = mark_on(stream);
    if (x.kind == Collective::ALL_REDUCE) {
        NCCL_CHECK(ncclAllReduce(data, data, n, nccl_type(x.t.dtype), op, nccl, stream));
    } else if (x.kind == Collective::BROADCAST) {
        NCCL_CHECK(ncclBroadcast(data, data, bytes, ncclInt8, x.root, nccl, stream));
    } else if (x.kind == Collective::REDUCE_SCATTER) {
        NCCL_CHECK(
            ncclReduceScatter(data, own, n / l.world, nccl_type(x.t.dtype), op, nccl, stream));
    } else {
        NCCL_CHECK(ncclAllGather(own, data, part, ncclInt8, nccl, stream));
    }
    return {begin, mark_on(stream)};
}
static void start_on_nccl(Links& l, const WorkPtr& work, const Collective& x) {
    Range range(work->what);
    bool apart = false;
#ifdef WITH_WINDOWS
    apart = x.beside && x.t.size() % l.world == 0 && lies_in_window(l, x.t);
#endif
    if (apart) {
        const auto [begin, scattered] =
            enqueue(l, {Collective::REDUCE_SCATTER, x.t, x.how}, mark());
        work->begin = begin,
        work->end = enqueue(l, {Collective::ALL_GATHER, x.t}, scattered).second;
    } else {
        std::tie(work->begin, work->end) = enqueue(l, x, mark());
    }
    std::lock_guard<std::mutex> lock(l.mutex);
    l.under_way.push_back(work);
}
#else
static void start_on_nccl(Links&, const WorkPtr&, const Collective&) {}
#endif

static WorkPtr start(const Communicator& c, const Collective& x) {
    static const char* const names[] = {"all-reduce", "broadcast", "reduce-scatter", "all-gather"};
    if (x.kind >= Collective::REDUCE_SCATTER && x.t.size() % c.world != 0) {
        fail("%s: %ld elements are not %d equal parts", names[x.kind], (long)x.t.size(), c.world);
    }
    if (x.t.device() == META) { return nullptr; }
    Links& l = *c.links;
    auto work = std::make_shared<Work>();
    work->what = names[x.kind], work->number = l.collectives++, work->bytes = bytes_of(x.t),
    work->started_ms = now_ms();
    c.backend == "nccl" ? start_on_nccl(l, work, x) : start_on_gloo(l, work, x);
    return work;
}
WorkPtr all_reduce(const Communicator& c, const Tensor& t, Reduction how, bool beside) {
    return start(c, {Collective::ALL_REDUCE, t, how, 0, {}, beside});
}
WorkPtr broadcast(const Communicator& c, const Tensor& t, int root) {
    return start(c, {Collective::BROADCAST, t, SUM, root});
}
WorkPtr reduce_scatter(const Communicator& c, const Tensor& t, Reduction how, const Tensor& own) {
    return start(c, {Collective::REDUCE_SCATTER, t, how, 0, own});
}
WorkPtr all_gather(const Communicator& c, const Tensor& t, const Tensor& own) {
    return start(c, {Collective::ALL_GATHER, t, SUM, 0, own});
}

void wait(const Communicator& c, const WorkPtr& work) {
    if (!work) { return; }
    Links& l = *c.links;
#ifdef WITH_NCCL
    if (c.backend == "nccl") { return await(stream(), work->done.event ? work->done : work->end); }
#endif
    std::unique_lock<std::mutex> lock(l.mutex);
    l.changed.wait(lock, [&] { return work->finished; });
    if (!work->error.empty()) { fail("%s: Gloo: %s", work->what, work->error.c_str()); }
    lock.unlock();
    if (auto f = std::exchange(work->behind, nullptr)) { f(); }
}
void barrier(const Communicator& c) {
    synchronize();
    wait(c, all_reduce(c, c.links->barrier_token, SUM));
    synchronize();
}

// -------------------------------------------------------------------------------------------------
// What only serves speed.

#ifdef WITH_WINDOWS
// NCCL's symmetric windows. All ranks open one together, or close it.
struct Windows : Places {
    struct Window {
        void* data;
        ncclWindow_t handle;
        bool in_use;
    };
    const ncclComm_t& nccl;
    std::vector<Window> windows;
    explicit Windows(const ncclComm_t& nccl) : nccl(nccl) { counted = true; }
    size_t take(size_t bytes, void** at) override {
        Window w{nullptr, nullptr, true};
        give_back_cached_memory();  // our pool's is not NCCL's
        NCCL_CHECK(ncclMemAlloc(&w.data, bytes));
        NCCL_CHECK(ncclCommWindowRegister(nccl, w.data, bytes, &w.handle, NCCL_WIN_COLL_SYMMETRIC));
        windows.push_back(w);
        *at = w.data;
        return windows.size() - 1;
    }
    void give(size_t number) override { windows[number].in_use = false; }
    void close_unused() {
        for (Window& w : windows) {
            if (w.in_use || !w.data) { continue; }
            NCCL_CHECK(ncclCommWindowDeregister(nccl, w.handle));
            NCCL_CHECK(ncclMemFree(w.data));
            w.data = nullptr;
        }
    }
};
static void open_windows(Links& l) { l.windows = std::make_shared<Windows>(l.lanes[1].nccl); }
static bool lies_in_window(const Links& l, const Tensor& t) {
    return t.memory->places == l.windows;
}
#endif
void allocate_shared([[maybe_unused]] const Communicator& c, const std::function<void()>& f) {
#ifdef WITH_WINDOWS
    if (context.device == CUDA && c.links && c.links->windows) {
        return allocate_in(c.links->windows, f);
    }
#endif
    f();
}
void free_shared([[maybe_unused]] const Communicator& c) {
#ifdef WITH_WINDOWS
    if (!c.links || !c.links->windows) { return; }
    barrier(c);
    c.links->windows->close_unused();
#endif
}

void run_behind([[maybe_unused]] const Communicator& c, const WorkPtr& work,
                const std::function<void()>& f) {
    if (!work) { return f(); }  // META
#ifdef WITH_NCCL
    if (Links& l = *c.links; c.backend == "nccl") {
        await(l.behind, work->end);
        with_stream(l.behind, f);
        work->done = mark_on(l.behind);
        return;
    }
#endif
    work->behind = f;
}
