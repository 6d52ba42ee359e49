// lib/ranks.cu: several processes that work as one. Each is a rank with its own GPU, or its share
// of the CPU's cores. In this order:
//   the launcher      `--nproc N` starts N copies of this program and ends all when one fails;
//                     torchrun, mpirun and srun --kill-on-bad-exit do the same from outside
//   the rendezvous    a folder with a file for each thing that a rank tells the others
//   the communicator  what connects a rank with the others by Gloo or NCCL, and its watchdog
//   the collectives   all-reduce, broadcast, reduce-scatter, all-gather, barrier: start() one, do
//                     something else, wait() for it
// To read first: the collectives, from start() on.
#include "gpu.h"

#include <condition_variable>
#include <filesystem>
#include <thread>

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
#ifdef WITH_NCCL
constexpr bool HAS_NCCL = true;
#else
constexpr bool HAS_NCCL = false;
#endif

// -------------------------------------------------------------------------------------------------
// The launcher, and what a rank reads from the environment that a launcher has set for it.

struct Identity {
    int rank = -1, world = 1;  // -1: this process was started by hand, as the only one
    // The same for all ranks of a job: its run or step, and the attempt. "": the launcher names
    // none (ours, MPICH); then the folder tells jobs apart.
    string job;
};

struct LauncherVariables {
    const char *rank, *world;
    vector<const char*> job;   // what an identity's job is made of
    bool one_is_none = false;  // a world of one is an interactive shell, and no rank
};
static const LauncherVariables LAUNCHERS[] = {
    // torchrun, and our own launcher. A run's id may be "none", so the address counts, too.
    {"RANK",
     "WORLD_SIZE",
     {"TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"}},
    // mpirun
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", {"PMIX_NAMESPACE"}},
    // srun
    {"SLURM_PROCID",
     "SLURM_STEP_NUM_TASKS",
     {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"},
     true},
    // mpiexec of MPICH and Intel MPI
    {"PMI_RANK", "PMI_SIZE", {}, true},
};

// Returns the whole number that this environment variable holds; anything else is wrong usage.
static int whole_number(const char* variable) {
    int value;
    char behind;
    if (sscanf(getenv(variable), "%7d%c", &value, &behind) != 1 || value < 0) {
        usage_error("environment variable %s: got '%s', takes a whole number", variable,
                    getenv(variable));
    }
    return value;
}

// Returns who we are, by the variables of the first launcher in the table that has set its own.
static Identity identity() {
    Identity me;
    for (const LauncherVariables& its : LAUNCHERS) {
        if (!getenv(its.rank) || !getenv(its.world)) { continue; }
        const int world = whole_number(its.world);
        if (its.one_is_none && world == 1) { continue; }
        me.rank = whole_number(its.rank);
        me.world = world;
        if (me.rank >= world) {
            usage_error("rank %d: the world has only %d ranks", me.rank, world);
        }
        for (const char* name : its.job) {
            if (const char* value = getenv(name)) { me.job += string("-") + value; }
        }
        std::replace(me.job.begin(), me.job.end(), '/', '_');
        break;
    }
    return me;
}
bool is_rank() { return identity().rank >= 0; }

static const char* const RENDEZVOUS = "CS336_RENDEZVOUS";  // names the folder above the ranks' own

static string folder_of_ranks;  // of this process, launcher or rank
static double patience_s = 60;  // how long a rank waits for the others
static void remove_folder_of_ranks() {
    std::error_code ignored;
    if (!folder_of_ranks.empty()) { std::filesystem::remove_all(folder_of_ranks, ignored); }
}

static string temporary_folder() {
    const char* named = getenv("TMPDIR");
    return named && *named ? named : "/tmp";
}

// Starts rank r of n, which gets its share of the cores, and returns its process.
static pid_t start_rank(int r, int n, const vector<string>& arguments) {
    return start_ourselves(arguments, [&] {
        setenv("RANK", to_string(r).c_str(), true);
        setenv("WORLD_SIZE", to_string(n).c_str(), true);
        setenv(RENDEZVOUS, folder_of_ranks.c_str(), true);
        setenv("OMP_NUM_THREADS", to_string(max(1, omp_get_num_procs() / n)).c_str(), false);
    });
}

// Returns the ms since *last, and sets *last to now. More than 100 ms show that this process slept
// itself, as after Ctrl-Z and fg or with a laptop's lid closed: they count as 100.
static double tick_ms(double* last) {
    const double before = *last;
    *last = now_ms();
    return min(*last - before, 100.0);
}

struct LaunchedRank {
    pid_t pid;              // 0: it has ended
    bool stopped = false;   // by a signal, such as SIGSTOP
    double stopped_ms = 0;  // for how long, of the time in which the launcher ran
};

// Asks the system what has become of this rank since the last call, `tick` ms ago. Returns 0, or
// the exit code with which all have to end, and sets *why, unless the rank itself has said it.
static int look_at(LaunchedRank& rank, int r, double tick, double timeout_s, string* why) {
    if (!rank.pid) { return 0; }
    const string name = strprintf("rank %d (process %d)", r, (int)rank.pid);
    if (rank.stopped) { rank.stopped_ms += tick; }

    int status = 0;
    if (waitpid(rank.pid, &status, WNOHANG | WUNTRACED | WCONTINUED) > 0) {
        if (WIFSTOPPED(status)) {
            rank.stopped = true;
            rank.stopped_ms = 0;
        } else if (WIFCONTINUED(status)) {
            rank.stopped = false;
        } else {
            rank.pid = 0;
            // it has said why itself, in give_up
            if (!WIFSIGNALED(status)) { return WEXITSTATUS(status); }
            *why = strprintf("%s was killed by signal %d (%s)", name.c_str(), WTERMSIG(status),
                             strsignal(WTERMSIG(status)));
            return 1;
        }
    }

    // 0.8, so that all is over within the timeout
    if (!rank.stopped || rank.stopped_ms <= 0.8e3 * timeout_s) { return 0; }
    *why = strprintf("%s has been stopped for %.1f s", name.c_str(), rank.stopped_ms / 1e3);
    return 1;
}

// Starts n ranks in a new folder, and looks at each every 5 ms until all have ended. If one fails,
// it kills the rest, which would wait for that rank until --timeout. Returns 0, or the exit code of
// the first that failed.
int launch_ranks(int n, const vector<string>& arguments, double timeout_s) {
    folder_of_ranks = temporary_folder() + "/cs336-XXXXXX";
    if (!mkdtemp(folder_of_ranks.data())) {
        fail("%s: %s", folder_of_ranks.c_str(), strerror(errno));
    }
    atexit(remove_folder_of_ranks);  // also where a rank cannot be started

    fflush(nullptr);
    catch_end_signals(true);
    vector<LaunchedRank> ranks;
    for (int r = 0; r < n; r++) { ranks.push_back({start_rank(r, n, arguments)}); }

    int exit_code = 0;
    string first_why;  // the first reason counts
    auto end_all = [&](int code, const string& why) {
        if (exit_code == 0) {
            exit_code = code;
            first_why = why;
        }
        for (const LaunchedRank& rank : ranks) {
            if (rank.pid) { kill(rank.pid, SIGKILL); }  // which also ends a stopped one
        }
    };

    double last = now_ms();
    for (int left = n; left > 0; usleep(5000)) {
        // The code that counts is set below, from the signal.
        if (end_signal_seen()) { end_all(1, ""); }
        const double tick = tick_ms(&last);
        left = 0;
        for (int r = 0; r < n; r++) {
            string why;
            if (const int code = look_at(ranks[r], r, tick, timeout_s, &why)) {
                end_all(code, why);
            }
            if (ranks[r].pid) { left++; }
        }
    }
    remove_folder_of_ranks();
    // Only now, since a closed stderr ends us by SIGPIPE.
    if (!first_why.empty()) { note("cs336: %s", first_why.c_str()); }
    // The signal may have come after the loop. Or the ranks got it, too, and the loop saw their end
    // first. main() then ends by this signal itself.
    if (const int number = end_signal_seen()) { exit_code = 128 + number; }
    catch_end_signals(false);
    return exit_code;
}

// -------------------------------------------------------------------------------------------------
// The rendezvous: a folder that only its owner may enter. A file NAME.RANK there is what this rank
// tells the others. 0.RANK is the text of the first gather_text, 1.RANK that of the second;
// done.RANK says that it needs nobody any more. These appear whole, by save_file. life.RANK is a
// number that the rank's watchdog counts up. It does not appear whole: a rank that reads it while
// it is written can find it empty, and takes it for unchanged.

// Returns what tells this machine's jobs apart where no folder is named: the ranks' parent. Under
// torchrun a script may stand between the two, so there its own folder counts: the error file is
// FOLDER/attempt_0/RANK/error.json.
static string parent_of_ranks() {
    const char* file = getenv("TORCHELASTIC_ERROR_FILE");
    if (!file) { return to_string(getppid()); }
    const std::filesystem::path attempt = std::filesystem::path(file).parent_path().parent_path();
    return attempt.parent_path().filename().string();
}

// Makes the folder where all ranks of our job meet, or finds it made by another one of them, and
// sets folder_of_ranks. Fails if it is not ours alone, or holds what an earlier job has left.
static void make_folder_of_ranks(const Identity& me) {
    const char* named = getenv(RENDEZVOUS);
    string folder = named ? named : temporary_folder();
    folder += "/cs336-" + to_string(getuid());
    if (!named) { folder += "-" + parent_of_ranks(); }
    folder += me.job;

    if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
        fail("%s: %s; %s names the one above", folder.c_str(), strerror(errno), RENDEZVOUS);
    }
    struct stat s;
    if (lstat(folder.c_str(), &s) != 0 || !S_ISDIR(s.st_mode) || s.st_uid != getuid() ||
        (s.st_mode & 077) != 0) {
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

// Returns the path of a rank's file in our folder.
static string file_of(int rank, const string& what) {
    return folder_of_ranks + "/" + what + "." + to_string(rank);
}

// Writes our text to the folder, and returns the texts of all ranks, by rank. Waits for each text,
// but fails if its rank shows no life for 0.8 of our patience.
vector<string> gather_text(const Communicator& c, const string& text) {
    if (c.world == 1) { return {text}; }
    static int gathers = 0;
    const string round = to_string(gathers++);
    save_file(file_of(c.rank, round), text);

    const double limit_s = 0.8 * patience_s;
    vector<string> all;
    for (int r = 0; r < c.world; r++) {
        string life, life_before;
        double waited_ms = 0, last = now_ms();
        ifstream file(file_of(r, round), std::ios::binary);
        while (!file) {
            ifstream(file_of(r, "life")) >> life;
            waited_ms = life == life_before ? waited_ms + tick_ms(&last) : 0;
            life_before = life;
            if (waited_ms > 1e3 * limit_s) {
                fail("rank %d of %d %s %s within %g s (all ranks need one folder: %s)", r, c.world,
                     gathers == 1 ? "did not come to" : "shows no life in", folder_of_ranks.c_str(),
                     limit_s, RENDEZVOUS);
            }
            usleep(1000);
            file.open(file_of(r, round), std::ios::binary);
        }
        all.push_back({std::istreambuf_iterator<char>(file), {}});
    }
    return all;
}

// -------------------------------------------------------------------------------------------------
// The communicator: a rank's connections, and its watchdog. join_ranks, at the end of
// this section, makes one.

struct Links {
    int rank = 0, world = 1, gpu = 0;
    std::thread watchdog;
    Tensor barrier_token;
    uint32_t collectives = 0;  // that were started

    // What the threads share. Each holds the mutex while it reads or writes one of these, or a
    // Work's `finished`, `end` and `error` where Gloo's worker sets them. A Work's `begin` may be
    // read once `finished` is set.
    std::mutex mutex;
    std::condition_variable changed;
    bool stopping = false;
    deque<WorkPtr> under_way;  // the oldest first
#ifdef HAVE_GLOO
    deque<Job> jobs;  // that the worker has yet to begin

    shared_ptr<gloo::rendezvous::Context> gloo;
    std::thread worker;
#endif
};

// Ends this process with one line, half a second after the error and a little more for a higher
// rank. So the line is that of the rank which failed first, or of the lowest of several: its
// launcher sees it end, and ends the others before their lines.
[[noreturn]] static void give_up(int rank, int exit_code, const string& why) {
    usleep(500000 + 100000 * min(rank, 10));
    // who closed the pipe has read enough, as in main()
    if (exit_code != 128 + SIGPIPE) { note("cs336: rank %d: %s", rank, why.c_str()); }
    remove_folder_of_ranks();
    fflush(stdout);
    _exit(exit_code);
}

static bool has_ended(const Work& work) {
#ifdef HAVE_CUDA
    // An error ends it, too: the main thread meets the same error, and says which.
    if (work.end.event) { return cudaEventQuery(work.end.event.get()) != cudaErrorNotReady; }
#endif
    return work.finished;
}

// The watchdog, a thread: shows life to the others, and ends the process if a collective does not
// end within our patience, since the main thread may wait in it. That another rank is dead or
// stopped is its launcher's business.
static void watch(Links& links) {
#ifdef WITH_NCCL
    // A thread starts on GPU 0, and would make a context there.
    if (context.device == CUDA) { CUDA_CHECK(cudaSetDevice(links.gpu)); }
#endif
    const std::chrono::duration<double> turn(min(0.5, 0.1 * patience_s));
    WorkPtr oldest;
    // For the oldest, counted in turns, which stop while the job is paused; a clock would not.
    double waited_s = 0;
    std::unique_lock lock(links.mutex);
    int turns = 0;
    while (!links.changed.wait_for(lock, turn, [&] { return links.stopping; })) {
        std::ofstream(file_of(links.rank, "life")) << turns++;

        deque<WorkPtr>& under_way = links.under_way;
        while (!under_way.empty() && has_ended(*under_way.front())) { under_way.pop_front(); }
        const WorkPtr before = oldest;
        oldest = under_way.empty() ? nullptr : under_way[0];
        if (!oldest || oldest != before) {
            waited_s = 0;
            continue;
        }
        waited_s += turn.count();
        if (waited_s > patience_s) {
            give_up(links.rank, 1,
                    strprintf("%s number %u has not ended within %g s: a rank is gone, stopped or "
                              "slow, or calls another one",
                              oldest->what, oldest->number, patience_s));
        }
    }
}

#ifdef HAVE_GLOO
static string first_line(const std::exception& e) {  // Gloo's messages have several
    return string(e.what(), strcspn(e.what(), "\n"));
}

// Gloo's worker, a thread: runs the jobs one after the other, and ends when all are done and
// disconnect_ranks has said so.
static void run_jobs(Links& links) {
    while (true) {
        std::unique_lock lock(links.mutex);
        links.changed.wait(lock, [&] { return links.stopping || !links.jobs.empty(); });
        if (links.jobs.empty()) { return; }
        Job job = move(links.jobs.front());
        links.jobs.pop_front();
        lock.unlock();
        job();
    }
}

// Connects this rank with all others by TCP, and starts the worker. The addresses are told through
// Gloo's own files in the ranks' folder.
static void connect_gloo(Communicator& c) {
    Links& links = *c.links;
    gloo::transport::tcp::attr attributes;
    if (const char* interface = getenv("GLOO_SOCKET_IFNAME")) {
        attributes.iface = interface;
    } else if (c.local_world == c.world) {
        attributes.hostname = "127.0.0.1";
    } else {  // Gloo would take what the host's name resolves to, often 127.0.1.1 or nothing
        fail(
            "Gloo on several machines: set GLOO_SOCKET_IFNAME to the network's name, such as eth0");
    }
    // What Gloo writes to a rank that is gone then fails, and we stay to say so.
    signal(SIGPIPE, SIG_IGN);
    try {
        auto device = gloo::transport::tcp::CreateDevice(attributes);
        links.gloo = make_shared<gloo::rendezvous::Context>(c.rank, c.world);
        links.gloo->setTimeout(std::chrono::milliseconds((int64_t)(1e3 * patience_s)));
        gloo::rendezvous::FileStore store(folder_of_ranks);
        links.gloo->connectFullMesh(store, device);
        links.gloo->setTimeout(std::chrono::hours(1000));  // from here on the watchdog counts
    } catch (const std::exception& e) { fail("Gloo: %s", first_line(e).c_str()); }
    links.worker = std::thread([&links] { run_jobs(links); });
}
#else
static void connect_gloo(Communicator&) {}  // why_not() has refused it
#endif

#ifdef WITH_NCCL
// NCCL. Collectives are kernels in a stream apart from the compute stream; that stream and NCCL's
// communicator are a lane. The lane first waits for a mark that the compute stream reaches when the
// tensor is made. wait() does the reverse: the compute stream waits for a mark behind the
// collective. The host waits for neither.

void nccl_check(ncclResult_t result, const char* call) {
    if (result == ncclSuccess) { return; }
    fail("%s: %s (%s)", call, ncclGetErrorString(result), ncclGetLastError(nullptr));
}

// Makes NCCL's communicator, whose id rank 0 tells the others, and a stream for its collectives.
// Its priority is the highest, so collectives get multiprocessors first: other ranks wait for them.
Lane open_lane(const Communicator& c, ncclConfig_t* config) {
    Lane lane;
    int least, greatest;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&lane.stream, cudaStreamNonBlocking, greatest));

    // On one machine the loopback is enough, and nobody outside reaches NCCL's ports.
    if (c.local_world == c.world) { setenv("NCCL_SOCKET_IFNAME", "lo", false); }
    ncclUniqueId id{};
    if (c.rank == 0) { NCCL_CHECK(ncclGetUniqueId(&id)); }
    memcpy(&id, gather_text(c, string((const char*)&id, sizeof id))[0].data(), sizeof id);
    NCCL_CHECK(ncclCommInitRankConfig(&lane.nccl, c.world, id, c.rank, config));
    return lane;
}
void close_lane(Lane& lane) {
    if (lane.nccl) { NCCL_CHECK(ncclCommDestroy(lane.nccl)); }
    lane.nccl = nullptr;
}
#endif

// Returns how this program works with NCCL: the last row of the table. This file adds one_lane;
// another file may add a row behind it.
static const NcclWay& nccl_way() { return table_of<NcclWay>().back(); }

// Returns why this backend cannot connect n ranks of this machine on such devices; "": it can.
string why_not(const string& backend, Device device, int n, int gpus) {
    if (device == CUDA && cuda_devices() == 0) { return "no GPU here"; }
    if (backend == "gloo" && device == CUDA) { return "Gloo works on CPUs only"; }
    if (backend == "gloo") { return HAS_GLOO ? "" : "built without Gloo (libgloo-dev)"; }
    if (device != CUDA) { return "NCCL works on GPUs only"; }
    if (!HAS_NCCL) { return "built without NCCL (nccl.h, libnccl)"; }
    if (gpus < n) { return strprintf("NCCL wants one GPU per rank: %d for %d ranks", gpus, n); }
    return "";
}

// Returns the PCI addresses of the GPUs that we see, each behind a space.
static string gpu_ids() {
    string ids;
#ifdef HAVE_CUDA
    for (int i = 0; i < cuda_devices(); i++) {
        char id[32] = " ";
        CUDA_CHECK(cudaDeviceGetPCIBusId(id + 1, sizeof id - 1, i));
        ids += id;
    }
#endif
    return ids;
}

// Sets how many ranks this machine has, and how many GPUs these see together. Returns which of its
// ranks we are.
static int find_local_ranks(Communicator& c) {
    string here;
    ifstream("/proc/sys/kernel/random/boot_id") >> here;
    std::error_code ignored;  // a container with a network of its own is another machine
    here += std::filesystem::read_symlink("/proc/self/ns/net", ignored).string();

    const vector<string> machines = gather_text(c, here), ids = gather_text(c, gpu_ids());
    set<string> gpus;
    for (int r = 0; r < c.world; r++) {
        std::istringstream words(machines[r] == here ? ids[r] : "");
        for (string id; words >> id;) { gpus.insert(id); }
    }
    c.local_gpus = (int)gpus.size();
    c.local_world = (int)std::count(machines.begin(), machines.end(), here);
    return (int)std::count(machines.begin(), machines.begin() + c.rank, here);
}

// Sets c.backend and context.device by the two options; rank 0's backend is everyone's. Backend
// auto is NCCL for cuda and Gloo for cpu; for device auto it is NCCL where this build has it and
// every rank of rank 0's machine has a GPU, else Gloo, on the CPU.
static void choose_device_and_backend(Communicator& c, const string& device,
                                      const string& backend) {
    const string why = why_not("nccl", CUDA, c.local_world, c.local_gpus);
    const bool gpus_do = device == "cuda" || (device == "auto" && why.empty());
    const string by_default = gpus_do ? "nccl" : "gloo";
    c.backend = gather_text(c, backend == "auto" ? by_default : backend)[0];

    const bool nccl = c.backend == "nccl";
    if (c.rank == 0 && device == "auto" && backend == "auto" && !why.empty()) {
        note("took gloo, on the CPU (%s)", why.c_str());
    }
    const string backends_own = nccl ? "cuda" : "cpu";
    choose_device(device == "auto" ? backends_own : device, c.links->gpu);
    const string not_so = why_not(c.backend, context.device, c.local_world, c.local_gpus);
    if (!not_so.empty()) { fail("backend %s: %s", c.backend.c_str(), not_so.c_str()); }
}

// Connects this rank, which knows its number and its folder only, with the others.
static void connect_ranks(Communicator& c, const string& device, const string& backend) {
    Links& links = *c.links;
    const int local_rank = find_local_ranks(c), gpus = cuda_devices();
    links.gpu = gpus > 0 ? local_rank % gpus : 0;
    choose_device_and_backend(c, device, backend);
    links.watchdog = std::thread([&links] { watch(links); });
    if (c.backend == "nccl") {
        nccl_way().connect(c);
    } else {
        connect_gloo(c);
    }
    links.barrier_token = zeros({1}, F32, WORKSPACE);
    barrier(c);
}

// Ends the threads and connections of this rank when no other one needs them any more. The last
// rank removes the folder, since the others have yet to read from it.
static void disconnect_ranks(Communicator& c) {
    Links& links = *c.links;
    gather_text(c, "");  // nobody still waits for a part of ours
    {
        lock_guard lock(links.mutex);
        links.stopping = true;
        links.changed.notify_all();
    }
    links.watchdog.join();
#ifdef HAVE_GLOO
    if (links.worker.joinable()) { links.worker.join(); }
    links.gloo.reset();
#endif
    if (c.backend == "nccl") { nccl_way().disconnect(c); }
    links.under_way.clear();
    links.barrier_token = Tensor();

    save_file(file_of(c.rank, "done"), "");
    for (int r = 0; r < c.world; r++) {
        if (access(file_of(r, "done").c_str(), F_OK) != 0) { return; }
    }
    remove_folder_of_ranks();
}

// Makes this process a rank, calls f and returns 0. If something fails, it ends the process.
int join_ranks(int world, const string& device, const string& backend, double timeout_s,
               const function<void(const Communicator&)>& f) {
    Communicator c;  // outside, since a failure ends the process while its threads still run
    try {
        const Identity me = identity();
        c.rank = me.rank;
        c.world = me.world;
        context.silent = c.rank > 0;
        if (world && world != c.world) {
            usage_error("--nproc: got %d, but the launcher has started %d ranks", world, c.world);
        }
        c.links = make_shared<Links>();
        c.links->rank = c.rank;
        c.links->world = c.world;
        patience_s = timeout_s;
        make_folder_of_ranks(me);
        connect_ranks(c, device, backend);
        if (c.rank == 0) {
            progress("%s connected, getting ready", counted(c.world, "rank").c_str());
        }
        f(c);
        disconnect_ranks(c);
        return 0;
    } catch (const Failure& failure) {
        give_up(c.rank, failure.exit_code, failure.what());
    } catch (const std::exception& e) { give_up(c.rank, 1, e.what()); }
}

// -------------------------------------------------------------------------------------------------
// The collectives. start() hands one to Gloo or NCCL and returns at once; what follows wait() may
// use its result. All ranks start the same ones in the same order.

#ifdef HAVE_GLOO
// Gloo: the worker runs the collectives in the order of their starts. A collective's number is its
// tag, so that no rank takes one's messages for another's.

template <class T>
static void add_into(void* to, const void* a, const void* b, size_t n) {
    for (size_t i = 0; i < n; i++) { ((T*)to)[i] = ((const T*)a)[i] + ((const T*)b)[i]; }
}

// Replaces t on every rank by the sum, or the average, over ranks. In a ring each of `world` parts
// goes round twice: once it is summed up, once it is handed out.
static void gloo_all_reduce(Links& links, const Tensor& t, uint32_t tag, Reduction how) {
    gloo::AllreduceOptions options(links.gloo);
    options.setTag(tag);
    options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
    with_type(t.dtype, [&](auto zero) {
        using T = decltype(zero);
        T* data = t.as<T>();
        options.setOutput(data, (size_t)t.size());
        options.setReduceFunction(add_into<T>);
        gloo::allreduce(options);
        const Wide<T> scale = how == AVERAGE ? Wide<T>(1) / links.world : 1;
        for (int64_t i = 0; i < t.size(); i++) { data[i] = data[i] * scale; }
    });
}

// Runs a collective to its end, in the worker.
static void run_on_gloo(Links& links, const Collective& x, uint32_t tag) {
    const Tensor& t = x.tensor;
    size_t bytes = t.bytes(), part = bytes / links.world;
    if (x.kind == Collective::BROADCAST) {
        gloo::BroadcastOptions options(links.gloo);
        options.setTag(tag);
        options.setRoot(x.root);
        options.setOutput(t.data, bytes);
        gloo::broadcast(options);
    } else if (x.kind == Collective::ALL_GATHER) {
        if (x.own) { memcpy(t.data + links.rank * part, x.own.data, part); }
        gloo::AllgatherOptions options(links.gloo);
        options.setTag(tag);
        options.setOutput(t.data, bytes);  // in place: no input
        gloo::allgather(options);
    } else {
        // Gloo's own reduce-scatter spoils its connections for what comes after.
        gloo_all_reduce(links, t, tag, x.how);
        if (x.own) { memcpy(x.own.data, t.data + links.rank * part, part); }
    }
}

// Appends a collective to the worker's jobs.
static void start_on_gloo(Links& links, const WorkPtr& work, Collective x) {
    auto job = [&links, work, x]() mutable {
        Range range(work->what);
        work->begin = {now_ms(), nullptr};
        string error;
        try {
            run_on_gloo(links, x, work->number);
        } catch (const std::exception& e) { error = first_line(e); }
        // Whoever waits may count on it that this thread holds none of its memory any more.
        x.tensor = x.own = Tensor();

        lock_guard lock(links.mutex);
        work->end = {now_ms(), nullptr};
        work->error = error;
        work->finished = true;
        links.changed.notify_all();
    };
    lock_guard lock(links.mutex);
    links.under_way.push_back(work);
    links.jobs.push_back(job);
    links.changed.notify_all();
}
#else
static void start_on_gloo(Links&, const WorkPtr&, const Collective&) {}
#endif

#ifdef WITH_NCCL
// NCCL's collectives.

static ncclDataType_t nccl_type(DType t) {
    if (t == F32) { return ncclFloat32; }
    if (t == BF16) { return ncclBfloat16; }
    fail("NCCL: %s tensors are not for collectives here", name_of(t));
}

// Queues a collective in a lane, where it first waits for `ready`, and sets its work's marks.
void enqueue(const Communicator& c, const Lane& lane, Work& work, const Collective& x,
             const Mark& ready) {
    const auto [nccl, stream] = lane;
    const Tensor& t = x.tensor;
    size_t n = t.size(), bytes = t.bytes(), part = bytes / c.world;
    char* data = t.data;
    char* own = x.own ? x.own.data : data + c.rank * part;
    const ncclRedOp_t op = x.how == AVERAGE ? ncclAvg : ncclSum;

    await(stream, ready);
    work.begin = mark_on(stream);
    if (x.kind == Collective::ALL_REDUCE) {
        NCCL_CHECK(ncclAllReduce(data, data, n, nccl_type(t.dtype), op, nccl, stream));
    } else if (x.kind == Collective::BROADCAST) {
        NCCL_CHECK(ncclBroadcast(data, data, bytes, ncclInt8, x.root, nccl, stream));
    } else if (x.kind == Collective::REDUCE_SCATTER) {
        const size_t part_n = n / c.world;
        NCCL_CHECK(ncclReduceScatter(data, own, part_n, nccl_type(t.dtype), op, nccl, stream));
    } else {
        NCCL_CHECK(ncclAllGather(own, data, part, ncclInt8, nccl, stream));
    }
    work.end = mark_on(stream);
}

// One lane for all collectives. Each begins when what the compute stream has been given so far is
// done: mark() stands behind that. Callers that use a buffer again need that.
static Lane only_lane;
static void connect_nccl(const Communicator& c) {
    // The default is blocking. A non-blocking communicator starts a thread for every collective.
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    only_lane = open_lane(c, &config);
}
static void start_on_nccl(const Communicator& c, Work& work, const Collective& x) {
    enqueue(c, only_lane, work, x, mark());
}
static const AddRow<NcclWay> one_lane({1, connect_nccl, start_on_nccl,
                                       [](const Communicator&) { close_lane(only_lane); }});
#endif

// Starts a collective. Returns what wait() takes; null on META, where nothing runs. With NCCL the
// caller has to keep x's tensors until wait(): nothing holds them here, and memory is freed in the
// compute stream's order, which does not wait for the collective before that.
static WorkPtr start(const Communicator& c, const Collective& x) {
    static const char* const names[] = {"all-reduce", "broadcast", "reduce-scatter", "all-gather"};
    if (x.kind >= Collective::REDUCE_SCATTER && x.tensor.size() % c.world != 0) {
        fail("%s: %ld elements are not %d equal parts", names[x.kind], (long)x.tensor.size(),
             c.world);
    }
    if (x.tensor.device() == META) { return nullptr; }

    Links& links = *c.links;
    auto work = make_shared<Work>();
    work->what = names[x.kind];
    work->number = links.collectives++;
    work->bytes = x.tensor.bytes();
    work->started_ms = now_ms();
    if (c.backend == "nccl") {
        Range range(work->what);
        nccl_way().start(c, *work, x);
        lock_guard lock(links.mutex);
        links.under_way.push_back(work);
    } else {
        start_on_gloo(links, work, x);
    }
    return work;
}
WorkPtr all_reduce(const Communicator& c, const Tensor& t, Reduction how) {
    return start(c, {Collective::ALL_REDUCE, t, how});
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

// Waits until a collective is done. NCCL: the compute stream waits. Gloo: the host does, and a
// collective's error is thrown here.
void wait(const Communicator& c, const WorkPtr& work) {
    if (!work) { return; }
    Links& links = *c.links;
#ifdef WITH_NCCL
    if (c.backend == "nccl") {
        await(stream(), work->end);
        return;
    }
#endif
    std::unique_lock lock(links.mutex);
    links.changed.wait(lock, [&] { return work->finished; });
    if (!work->error.empty()) { fail("%s: Gloo: %s", work->what, work->error.c_str()); }
}

// An all-reduce ends nowhere before it has begun everywhere.
void barrier(const Communicator& c) {
    synchronize();
    wait(c, all_reduce(c, c.links->barrier_token, SUM));
    synchronize();
}
