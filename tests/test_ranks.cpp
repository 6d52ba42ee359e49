// Tests of lib/ranks.cu: every collective with 1 to 4 ranks against what it should give, and what
// the others do when a rank dies, stalls, never starts, or is not one of them. A test that needs
// ranks launches this program again as N ranks, each of which runs the same test case.
#include "test.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>

// Runs the four collectives at once, waits for them in another order, and compares each with what
// it has to give. Then gathers the scattered averages, which have to be the all-reduced ones.
static void check_collectives(const Communicator& c) {
    for (DType dtype : {F32, BF16}) {
        for (int64_t n : {12, 60, 996, 70008}) {  // of 1, 2, 3 or 4 equal parts
            auto value = [](int rank, int64_t i) { return (float)((i * 7 + rank * 3) % 13); };
            vector<float> mine(n), sum(n);
            for (int r = 0; r < c.world; r++) {
                for (int64_t i = 0; i < n; i++) { sum[i] += value(r, i); }
            }
            for (int64_t i = 0; i < n; i++) { mine[i] = value(c.rank, i); }
            INFO("rank " << c.rank << " of " << c.world << ", " << name_of(dtype) << ", n " << n);

            Tensor added = from_floats(mine, {n}, dtype);
            Tensor averaged = from_floats(mine, {n}, dtype);
            Tensor sent = from_floats(mine, {n}, dtype);
            Tensor scattered = from_floats(mine, {n}, dtype);
            WorkPtr works[] = {all_reduce(c, added, SUM), all_reduce(c, averaged, AVERAGE),
                               broadcast(c, sent, c.world - 1),
                               reduce_scatter(c, scattered, AVERAGE)};
            for (int k : {2, 0, 3, 1}) { wait(c, works[k]); }
            const vector<float> reduced = to_floats(added), means = to_floats(averaged);
            const vector<float> received = to_floats(sent), parts = to_floats(scattered);
            wait(c, all_gather(c, scattered));
            const vector<float> gathered = to_floats(scattered);

            int wrong = 0;
            for (int64_t i = 0; i < n; i++) {
                const double average = sum[i] / c.world;
                const double error = dtype == BF16 ? average / 128 : 1e-6 * average;
                const bool is_ours = i / (n / c.world) == c.rank;
                wrong += reduced[i] != sum[i];
                wrong += !(std::fabs(means[i] - average) <= error);
                wrong += received[i] != value(c.world - 1, i);
                wrong += is_ours && !(std::fabs(parts[i] - average) <= error);
                wrong += !(std::fabs(gathered[i] - average) <= error);
            }
            CHECK(wrong == 0);
        }
    }
    const Tensor odd = zeros({4 * c.world + 1}, F32);
    if (c.world > 1) {
        CHECK(has(failure_of([&] { all_gather(c, odd); }), "equal parts"));
    }
    vector<string> texts = gather_text(c, "from " + to_string(c.rank));
    REQUIRE((int)texts.size() == c.world);
    for (int r = 0; r < c.world; r++) { CHECK(texts[r] == "from " + to_string(r)); }
}
TEST_CASE("ranks: collectives over Gloo") {
    if (lacks("gloo", CPU, 4)) { return; }
    for (int n : {1, 2, 3, 4}) {
        in_ranks("ranks: collectives over Gloo", n, CPU, check_collectives);
    }
}
TEST_CASE("ranks: each has its share of the cores") {
    if (lacks("gloo", CPU, 2)) { return; }
    const char* typed = getenv("OMP_NUM_THREADS");  // would be every rank's
    if (typed && !is_rank()) { return skip_this_case("OMP_NUM_THREADS is set"); }
    in_ranks("ranks: each has its share of the cores", 2, CPU, [](const Communicator&) {
        CHECK(omp_get_max_threads() == max(1, omp_get_num_procs() / 2));
    });
}
TEST_CASE("NCCL: collectives") {
    if (lacks("nccl", CUDA, 2)) { return; }
    for (int n : {1, 2, 3, 4}) {
        if (why_not("nccl", CUDA, n).empty()) {
            in_ranks("NCCL: collectives", n, CUDA, check_collectives);
        }
    }
}

// A copy engine that reads a peer's buffer too early, or too late, is wrong only at unlucky times.
// So the ranks wait for random times, and nothing but the collectives holds them together.
static void check_shared_buffers(const Communicator& c) {
    NoGrad no_grad;
    const int64_t part = 1 << 22, n = part * c.world;  // large enough for two calls
    Tensor own, whole, sum, expected = empty({n}, F32), x = zeros({1024, 1024}, F32),
                            wrong = zeros({}, F32);
    for (int step = 0; step < 500; step++) {
        if (step % 250 == 0) {
            own = whole = sum = Tensor();
            fast_ways.free_shared(c);
            allocate_shared(c, [&] {
                own = empty({part}, F32);
                whole = empty({n}, F32);
                sum = empty({n}, F32);
            });
        }
        auto delay = [&](int place) {
            for (int k = random_int(8, step, c.rank, place); k > 0; k--) {
                gemm(x, x, false, x, false);
            }
        };
        delay(0);
        fill_normal(own, step, c.rank, 0, 1);
        fill_normal(sum, step, c.rank, 1, 1);
        delay(1);
        const vector<WorkPtr> works = {all_gather(c, whole, own),
                                       fast_ways.all_reduce_beside(c, sum, SUM)};
        delay(2);
        for (int r = 0; r < c.world; r++) {
            fill_normal(view(expected, r * part, {part}), step, r, 0, 1);
        }
        for (const WorkPtr& work : works) { wait(c, work); }
        copy_or_add(wrong, mean_all(square(sub(whole, expected))), true);
        for (int r = 0; r < c.world; r++) {  // of two numbers a sum is the same in each order
            Tensor one = empty({n}, F32);
            fill_normal(one, step, r, 1, 1);
            copy_or_add(expected, one, r > 0);
        }
        copy_or_add(wrong, mean_all(square(sub(sum, expected))), true);
    }
    CHECK(to_floats(wrong)[0] == 0);
}
TEST_CASE("NCCL: shared buffers at random times") {
    if (!fast_ways.allocate_shared || lacks("nccl", CUDA, 2)) { return; }
    in_ranks("NCCL: shared buffers at random times", 2, CUDA, check_shared_buffers);
}
// Copy engines would move what is in a window from card to card, whatever the user asked for.
TEST_CASE("NCCL: there are no windows where NCCL_P2P_DISABLE is set") {
    if (!fast_ways.allocate_shared || lacks("nccl", CUDA, 2)) { return; }
    const bool typed = getenv("NCCL_P2P_DISABLE");
    setenv("NCCL_P2P_DISABLE", "1", 1);
    in_ranks("NCCL: there are no windows where NCCL_P2P_DISABLE is set", 2, CUDA,
             [](const Communicator& c) {
                 Tensor t;
                 allocate_shared(c, [&] { t = empty({1 << 20}, F32); });
                 CHECK(!t.memory->places);
             });
    if (!typed) { unsetenv("NCCL_P2P_DISABLE"); }
}

// -------------------------------------------------------------------------------------------------
// Failures

struct Started {  // a process of the program, and the files that take its output
    pid_t pid;
    FILE *out, *err;
    double at_ms;
};
// Starts the program with these words and, beside ours, these environment variables.
static Started start(vector<string> words, vector<string> variables = {}) {
    words.insert(words.begin(), program());
    vector<char*> argv;
    for (string& w : words) { argv.push_back(w.data()); }
    argv.push_back(nullptr);
    Started s{0, tmpfile(), tmpfile(), now_ms()};
    REQUIRE(s.out);
    REQUIRE(s.err);
    fflush(nullptr);
    s.pid = fork();
    REQUIRE(s.pid >= 0);
    if (s.pid == 0) {
        dup2(fileno(s.out), 1);
        dup2(fileno(s.err), 2);
        for (string& v : variables) { putenv(v.data()); }
        execv(argv[0], argv.data());
        _exit(127);
    }
    return s;
}
struct Ended {
    int exit_code;
    string err, out;
    int lines;
    double ms;   // since `since`
    int signal;  // that ended it; 0: none
};
// Waits for the end of a process, and kills it 20 s after `since`. Returns what became of it.
static Ended finish(const Started& s, double since) {
    int status = 0;
    while (waitpid(s.pid, &status, WNOHANG) == 0) {
        if (now_ms() - since > 20000) { kill(s.pid, SIGKILL); }  // a hang
        usleep(2000);
    }
    Ended e{};
    e.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    e.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    e.ms = now_ms() - since;
    rewind(s.out);
    rewind(s.err);
    for (int c; (c = fgetc(s.out)) != EOF;) { e.out += (char)c; }
    for (int c; (c = fgetc(s.err)) != EOF;) { e.err += (char)c; }
    e.lines = (int)std::count(e.err.begin(), e.err.end(), '\n');
    fclose(s.out);
    fclose(s.err);
    return e;
}
static vector<pid_t> children_of(pid_t pid) {
    std::ifstream file("/proc/" + to_string(pid) + "/task/" + to_string(pid) + "/children");
    vector<pid_t> all;
    for (pid_t child; file >> child;) { all.push_back(child); }
    return all;
}
static string variable_of(pid_t pid, const string& name) {
    std::ifstream file("/proc/" + to_string(pid) + "/environ");
    for (string v; std::getline(file, v, '\0');) {
        if (v.compare(0, name.size() + 1, name + "=") == 0) { return v.substr(name.size() + 1); }
    }
    return "";
}
// Returns the process of a rank, and waits up to 4 s until the launcher has started it.
static pid_t rank_of_launcher(pid_t launcher, int rank) {
    for (int tries = 0; tries < 2000; tries++) {
        for (pid_t pid : children_of(launcher)) {
            if (variable_of(pid, "RANK") == to_string(rank)) { return pid; }
        }
        usleep(2000);
    }
    // A test that went on with 0 would signal our own group of processes.
    FAIL("the launcher started no rank " << rank);
    return 0;
}
static bool gone(pid_t pid) {  // or a zombie that nobody has fetched yet
    std::ifstream file("/proc/" + to_string(pid) + "/stat");
    string text;
    std::getline(file, text);
    return text.empty() || text[text.rfind(')') + 2] == 'Z';
}
static vector<string> long_run(const char* device = "cpu", const char* backend = "gloo",
                               const char* ranks = "3") {
    return {"distributed_communication_single_node",
            "--nproc",
            ranks,
            "--device",
            device,
            "--backend",
            backend,
            "--steps",
            "1000000",
            "--timeout",
            "3"};
}

// The signal that rank `victim` of this command gets ends all its ranks, in one line that names
// that rank.
static void check_failure(const vector<string>& command, int number, int victim,
                          double seconds_before) {
    Started s = start(command);
    vector<pid_t> ranks;
    for (int r = 0; r < std::stoi(command[2]); r++) { ranks.push_back(rank_of_launcher(s.pid, r)); }
    // From their first line on all are connected. A busy machine may need longer.
    struct stat progress {};
    for (int tries = 0; tries < 10000 && progress.st_size == 0; tries++) {
        usleep(1000);
        fstat(fileno(s.err), &progress);
    }
    usleep((unsigned)(seconds_before * 1e6));
    double since = now_ms();
    kill(ranks[victim], number);
    Ended e = finish(s, since);
    INFO("signal " << number << " to rank " << victim << ": " << e.ms << " ms: " << e.err);
    CHECK(e.exit_code == 1);
    CHECK(e.lines == 2);  // the first of progress, and the cause
    CHECK(has(e.err, "rank " + to_string(victim)));
    CHECK(has(e.err, number == SIGKILL ? "killed by signal 9" : "has been stopped for"));
    CHECK(e.ms < 3500);
    for (pid_t pid : ranks) { CHECK(gone(pid)); }
    MESSAGE("signal " << number << " to rank " << victim << ": over after " << (int)e.ms << " ms");
}
TEST_CASE("ranks: one that is killed, or stalls, ends all within the timeout and is named") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (int number : {SIGKILL, SIGSTOP}) {
        for (int victim : {0, 1}) { check_failure(long_run(), number, victim, 0.7); }
    }
}
TEST_CASE("NCCL: a rank that is killed, or stalls, ends all, too") {
    if (lacks("nccl", CUDA, 2)) { return; }
    for (int number : {SIGKILL, SIGSTOP}) {
        const string n = to_string(min(4, cuda_devices()));
        for (int victim : {0, std::stoi(n) / 2}) {
            check_failure(long_run("cuda", "nccl", n.c_str()), number, victim, 4);
        }
    }
}
TEST_CASE("ranks: signals to the launcher reach all, and no rank outlives it") {
    if (lacks("gloo", CPU, 3)) { return; }
    const rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    signal(SIGQUIT, SIG_DFL);  // a shell's background job ignores it, and so do its children
    for (int number : {SIGTERM, SIGINT, SIGQUIT, SIGKILL}) {
        CAPTURE(number);
        Folder temporary;  // a launcher that is killed cannot remove its folder
        Started s = start(long_run(), {"TMPDIR=" + temporary.path});
        vector<pid_t> ranks;
        for (int r = 0; r < 3; r++) { ranks.push_back(rank_of_launcher(s.pid, r)); }
        usleep(300000);
        kill(s.pid, number);
        if (number == SIGTERM) {  // `timeout` sends two
            usleep(1000);
            kill(s.pid, number);
        }
        Ended e = finish(s, now_ms());
        CHECK(e.signal == number);
        usleep(100000);
        for (pid_t pid : ranks) { CHECK(gone(pid)); }
        CHECK(temporary.files().size() == (number == SIGKILL ? 1 : 0));
    }
}

TEST_CASE("ranks: who closes the pipe gets no complaint") {
    if (lacks("gloo", CPU, 2)) { return; }
    const Run r = run_shell("(" + program() + " naive_ddp --device cpu --nproc 2 | true)");
    INFO(r.out);
    CHECK(!has(r.out, "Broken pipe"));
    CHECK(has(r.out, "2 ranks connected"));

    // Without a GPU rank 0 tells that it took gloo, and dies of that. The folder goes all the same.
    Folder temporary;
    run_shell("(sleep 0.2; TMPDIR=" + temporary.path + " " + program() + " naive_ddp) 2>&1 | true");
    CHECK(temporary.files().empty());
}
// Root has no limit on its processes. So where root runs the tests, another user runs the launcher.
TEST_CASE("ranks: where a rank cannot be started, nothing stays") {
    if (lacks("gloo", CPU, 2)) { return; }
    Folder temporary;
    const string copy = temporary / "cs336";
    const Run r = run_shell(
        "chmod 777 " + temporary.path + "; cp " + program() + " " + copy + "; " +
        "if [ $(id -u) = 0 ]; then other='setpriv --reuid=12345 --clear-groups'; fi; " +
        "$other bash -c 'ulimit -u 4; exec env OPENBLAS_NUM_THREADS=1 TMPDIR=" + temporary.path +
        " " + copy + " naive_ddp --device cpu --nproc 12'");
    CHECK_MESSAGE(has(r.out, "naive_ddp: fork: "), r.out);
    CHECK(temporary.files() == vector<string>{"cs336"});
}

// The ranks' results go through a file in memory, which would be opened as number 2.
TEST_CASE("ranks: what would go to a closed stderr is in no file") {
    if (lacks("gloo", CPU, 2)) { return; }
    const string command =
        program() + " distributed_communication_single_node --device cpu --quick --steps 1";
    const Run closed = run_shell(command + " 2>&-");
    CHECK(closed.exit_code == 0);
    CHECK(has(closed.out, "| gloo    | cpu    |     2 |"));
    CHECK(!has(closed.out, "nccl"));
    CHECK(run_shell(command + " >&-").exit_code == 1);
}

static vector<string> as_rank(int rank, int world, const Folder& folder) {
    return {"RANK=" + to_string(rank), "WORLD_SIZE=" + to_string(world),
            "CS336_RENDEZVOUS=" + folder.path};
}
// In the next tests there is no launcher of ours: a rank notices by itself that another one is
// gone.
static string text_so_far(FILE* file) {
    string text(1 << 16, 0);
    text.resize(max<ssize_t>(0, pread(fileno(file), text.data(), text.size(), 0)));
    return text;
}
TEST_CASE("ranks: without a launcher, one that dies while the others wait for its text is named") {
    if (lacks("gloo", CPU, 2)) { return; }
    Folder folder;
    const vector<string> words = {"naive_ddp_benchmarking",
                                  "--device",
                                  "cpu",
                                  "--d_model",
                                  "16",
                                  "--d_ff",
                                  "32",
                                  "--num_layers",
                                  "1",
                                  "--num_heads",
                                  "1",
                                  "--steps",
                                  "60",
                                  "--timeout",
                                  "2",
                                  "--context_length",
                                  "64"};
    Started zero = start(words, as_rank(0, 2, folder)), one = start(words, as_rank(1, 2, folder));
    for (int tries = 0;
         tries < 15000 && !has(text_so_far(zero.err), "one process, rank 0: Step 1/"); tries++) {
        usleep(2000);
    }
    kill(zero.pid, SIGKILL);
    const double since = now_ms();
    finish(zero, since);
    Ended e = finish(one, since);
    INFO(e.err);
    CHECK(e.exit_code == 1);
    CHECK(has(e.err, "rank 0 of 2 shows no life in "));
    CHECK(e.ms < 3500);
}
TEST_CASE("ranks: without a launcher, a collective has a deadline") {
    if (lacks("gloo", CPU, 2)) { return; }
    Folder folder;
    vector<string> words = long_run();
    words.erase(words.begin() + 1, words.begin() + 3);  // --nproc
    Started zero = start(words, as_rank(0, 2, folder)), one = start(words, as_rank(1, 2, folder));
    usleep(1500000);
    kill(zero.pid, SIGSTOP);
    const double since = now_ms();
    Ended e = finish(one, since);
    kill(zero.pid, SIGKILL);
    finish(zero, since);
    INFO(e.err);
    CHECK(e.exit_code == 1);
    CHECK(has(e.err, "has not ended within 3 s"));
    CHECK(e.ms > 2500);
    CHECK(e.ms < 5500);
}
static const vector<string> short_run = {"naive_ddp", "--device", "cpu",       "--backend",
                                         "gloo",      "--quick",  "--timeout", "3"};
TEST_CASE(
    "ranks: one that never comes, the same number twice, a folder that is none are named within "
    "the timeout") {
    if (lacks("gloo", CPU, 2)) { return; }
    Folder alone, twice;
    Started first = start(short_run, as_rank(0, 2, alone)),
            second = start(short_run, as_rank(1, 2, twice));
    usleep(500000);
    Started same = start(short_run, as_rank(1, 2, twice));
    const pair<const Started*, const char*> cases[] = {{&first, "rank 1 of 2 did not come to "},
                                                       {&same, "or two ranks have one number"},
                                                       {&second, "rank 0 of 2 did not come to "}};
    for (const auto& [started, says] : cases) {
        Ended e = finish(*started, started->at_ms);
        INFO(e.err);
        CHECK(e.exit_code == 1);
        CHECK(e.lines == 1);
        CHECK(has(e.err, says));
        CHECK(e.ms < 3500);
    }
    CHECK(alone.files().empty());  // what is left of a job would be taken for the next one's
    Started none = start(short_run, {"RANK=0", "WORLD_SIZE=2", "CS336_RENDEZVOUS=/no/such"});
    Ended e = finish(none, none.at_ms);
    CHECK(e.exit_code == 1);
    CHECK(has(e.err, "/no/such/cs336-"));
    CHECK(has(e.err, "No such file or directory"));
    CHECK(has(e.err, "CS336_RENDEZVOUS names the one above"));

    Started no_folder = start({"naive_ddp", "--device", "cpu"}, {"TMPDIR=/no/such"});
    e = finish(no_folder, no_folder.at_ms);
    CHECK(e.exit_code == 1);
    CHECK(has(e.err, "/no/such/cs336-"));
    Started empty = start({"naive_ddp", "--quick", "--device", "cpu"}, {"TMPDIR="});
    CHECK(finish(empty, empty.at_ms).exit_code == 0);
}
TEST_CASE("ranks: the folder is its owner's alone, and gone when the job is") {
    if (lacks("gloo", CPU, 2)) { return; }
    Folder folder;
    const string name = folder / ("cs336-" + to_string(getuid()));
    const vector<string> variables = as_rank(0, 1, folder);
    std::filesystem::create_directory(name);
    chmod(name.c_str(), 0755);
    Started open_to_all = start(short_run, variables);
    Ended e = finish(open_to_all, open_to_all.at_ms);
    CHECK(e.exit_code == 1);
    CHECK(has(e.err, "which only its owner may enter"));
    chmod(name.c_str(), 0700);
    Started good = start(short_run, variables);
    CHECK(finish(good, good.at_ms).exit_code == 0);
    CHECK(folder.files().empty());
}
TEST_CASE(
    "ranks: a job that is paused as a whole goes on, and so does a rank that is continued in "
    "time") {
    if (lacks("gloo", CPU, 2)) { return; }
    for (bool whole : {true, false}) {
        Started s = start(long_run("cpu", "gloo", "2"));
        vector<pid_t> ranks = {rank_of_launcher(s.pid, 0), rank_of_launcher(s.pid, 1)},
                      all = {ranks[1]};
        if (whole) { all = {s.pid, ranks[0], ranks[1]}; }
        usleep(500000);
        for (int pauses = whole ? 1 : 3; pauses > 0; pauses--) {
            for (pid_t pid : all) { kill(pid, SIGSTOP); }
            usleep(whole ? 4000000 : 1000000);  // the timeout is 3 s, of each pause
            for (pid_t pid : all) { kill(pid, SIGCONT); }
            usleep(300000);
        }
        usleep(3200000);
        for (pid_t pid : {s.pid, ranks[0], ranks[1]}) { CHECK(!gone(pid)); }
        kill(s.pid, SIGTERM);
        Ended e = finish(s, now_ms());
        INFO(e.err);
        CHECK(e.signal == SIGTERM);
    }
}
// Runs ranks under a launcher that inherits an ignored SIGHUP, sends that to each, and checks that
// all go on.
static void check_nohup(const vector<string>& variables) {
    signal(SIGHUP, SIG_IGN);
    Started s = start(long_run(), variables);
    signal(SIGHUP, SIG_DFL);
    vector<pid_t> all = {rank_of_launcher(s.pid, 0), rank_of_launcher(s.pid, 1), s.pid};
    usleep(500000);
    for (pid_t pid : all) { CHECK(kill(pid, SIGHUP) == 0); }
    usleep(500000);
    for (pid_t pid : all) { CHECK(!gone(pid)); }
    kill(s.pid, SIGTERM);
    finish(s, now_ms());
}
TEST_CASE("ranks: an inherited nohup holds") {
    if (lacks("gloo", CPU, 2)) { return; }
    check_nohup({});
}
TEST_CASE(
    "ranks: an inherited nohup holds where a shared library takes the signal first, as UCX does") {
    if (lacks("gloo", CPU, 2)) { return; }
    Folder folder;
    write_file(folder / "take.c",
               "#include <signal.h>\nstatic void f(int n) { (void)n; }\n"
               "__attribute__((constructor)) static void take(void) { signal(SIGHUP, f); }\n");
    const string library = folder / "take.so";
    const Run built = run_shell("cc -shared -fPIC -o " + library + " " + folder / "take.c");
    if (built.exit_code != 0) { return skip_this_case("no C compiler"); }
    // The address sanitizer would want to be the first library itself.
    check_nohup({"LD_PRELOAD=" + library, "ASAN_OPTIONS=verify_asan_link_order=0"});
}
TEST_CASE("ranks: the second Ctrl-C ends at once") {
    const pid_t pid = fork();
    if (pid == 0) {
        catch_end_signals(true);
        while (true) { pause(); }
    }
    usleep(100000);
    kill(pid, SIGINT);
    usleep(100000);
    CHECK(!gone(pid));
    kill(pid, SIGINT);
    int status = 0;
    for (int tries = 0; tries < 100 && waitpid(pid, &status, WNOHANG) == 0; tries++) {
        usleep(10000);
    }
    CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGINT));
    if (!WIFSIGNALED(status)) { kill(pid, SIGKILL); }
}
TEST_CASE("ranks: what reproduce runs does not outlive it, nor does its folder") {
    if (lacks("gloo", CPU, 2)) { return; }
    Folder folder, temporary;
    Started s =
        start({"reproduce", "naive_ddp_benchmarking", "--device", "cpu", "--out", folder.path},
              {"TMPDIR=" + temporary.path});
    vector<pid_t> children;
    for (int tries = 0; tries < 1000 && children.empty(); tries++) {
        usleep(2000);
        children = children_of(s.pid);
    }
    REQUIRE(!children.empty());
    const pid_t rank = rank_of_launcher(children[0], 1);
    kill(s.pid, SIGTERM);
    finish(s, now_ms());
    for (int tries = 0; tries < 1000 && !gone(children[0]); tries++) { usleep(2000); }
    CHECK(gone(children[0]));
    CHECK(gone(rank));
    CHECK(temporary.files().empty());
}
TEST_CASE("ranks: a place that cannot be taken is not given back") {
    struct None : Places {
        int given = 0;
        size_t take(size_t, void**) override { throw OutOfMemory("no place"); }
        void give(size_t) override { given++; }
    };
    auto none = make_shared<None>();
    CHECK_THROWS_AS(allocate_in(none, [] { allocate(META, 64, WORKSPACE); }), OutOfMemory);
    CHECK(none->given == 0);
}
TEST_CASE("ranks: children are waited for, also where SIGCHLD was ignored") {
    if (lacks("gloo", CPU, 2)) { return; }
    signal(SIGCHLD, SIG_IGN);
    Started s = start({"naive_ddp", "--quick", "--nproc", "2", "--device", "cpu"});
    signal(SIGCHLD, SIG_DFL);
    Ended e = finish(s, s.at_ms);
    CHECK(e.exit_code == 0);
}
TEST_CASE(
    "ranks: what torchrun, mpirun and srun say is understood, and what is no number is refused") {
    if (lacks("gloo", CPU, 2)) { return; }
    Folder shared;
    auto variables = [&](const string& launcher, bool in_shared, int job,
                         int rank) -> vector<string> {
        const string r = to_string(rank), j = to_string(job);
        vector<string> all = {"RANK=" + r, "WORLD_SIZE=2", "TORCHELASTIC_RUN_ID=a/b",
                              "TORCHELASTIC_RESTART_COUNT=" + j};
        if (launcher == "mpirun") {
            all = {"OMPI_COMM_WORLD_RANK=" + r, "OMPI_COMM_WORLD_SIZE=2", "PMIX_NAMESPACE=" + j};
        }
        if (launcher == "srun") {
            all = {"SLURM_PROCID=" + r, "SLURM_STEP_NUM_TASKS=2", "SLURM_JOB_ID=5",
                   "SLURM_STEP_ID=" + j};
        }
        if (in_shared) { all.push_back("CS336_RENDEZVOUS=" + shared.path); }
        return all;
    };
    for (const char* launcher : {"mpirun", "srun", "torchrun"}) {
        for (bool in_shared : {false, true}) {  // two jobs at the same time
            vector<Started> all;
            for (int i = 0; i < 4; i++) {
                all.push_back(start(short_run, variables(launcher, in_shared, i / 2, i % 2)));
            }
            for (const Started& one : all) {
                Ended e = finish(one, one.at_ms);
                INFO(launcher << ": " << e.err);
                CHECK(e.exit_code == 0);
            }
        }
    }
    CHECK(shared.files().empty());
    Started hydra[] = {start(short_run, {"PMI_RANK=0", "PMI_SIZE=2"}),
                       start(short_run, {"PMI_RANK=1", "PMI_SIZE=2"})};
    for (int rank : {0, 1}) {
        Ended e = finish(hydra[rank], hydra[rank].at_ms);
        INFO("mpiexec.hydra: " << e.err);
        CHECK(e.exit_code == 0);
        if (rank == 0) { CHECK(has(e.out, "World size: 2")); }
    }
    // torchrun --no-python ./script.sh: each rank has a parent of its own.
    string both;
    for (const char* rank : {"0", "1"}) {
        both += string("RANK=") + rank + " WORLD_SIZE=2 TORCHELASTIC_ERROR_FILE=/tmp/x/none_" +
                to_string(getpid()) + "/attempt_0/" + rank + "/error.json sh -c '" + program() +
                " naive_ddp --device cpu --timeout 3; true' & ";
    }
    CHECK(has(run_shell(both + "wait").out, "World size: 2"));
    Started shell =
        start(short_run, {"SLURM_STEP_ID=4294967290", "SLURM_STEP_NUM_TASKS=1", "SLURM_PROCID=0"});
    Ended ranks_of_its_own = finish(shell, shell.at_ms);
    CHECK(ranks_of_its_own.exit_code == 0);
    CHECK(has(ranks_of_its_own.out, "World size: 2"));
    Started wrong = start(short_run, {"RANK=x", "WORLD_SIZE=1"});
    Ended e = finish(wrong, wrong.at_ms);
    CHECK(e.exit_code == 2);
    CHECK(has(e.err, "environment variable RANK: got 'x', takes a whole number"));
    Started beyond = start(short_run, {"RANK=2", "WORLD_SIZE=2"});
    e = finish(beyond, beyond.at_ms);
    CHECK(e.exit_code == 2);
    CHECK(has(e.err, "rank 2: the world has only 2 ranks"));
}
TEST_CASE("ranks: wrong usage of the launcher") {
    if (lacks("gloo", CPU, 3)) { return; }
    Folder folder;
    vector<string> words = short_run;
    words.insert(words.end(), {"--nproc", "3"});
    Started s = start(words, as_rank(0, 2, folder));
    Ended e = finish(s, s.at_ms);
    CHECK(e.exit_code == 2);
    CHECK(has(e.err, "--nproc: got 3, but the launcher has started 2 ranks"));
    Run nccl = run_cs336(
        {"distributed_communication_single_node", "--device", "cpu", "--backend", "nccl"});
    CHECK(nccl.exit_code == 1);
    CHECK(has(nccl.err, "NCCL"));
}
