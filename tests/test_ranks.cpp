// Tests of ranks.cu: every collective with 1 to 4 ranks against what it should give, and what the others do when a rank
// dies, stalls, never starts, or is not one of them. A test that needs ranks launches this program again as N ranks,
// each of which runs the same test case.
#include "test.h"

#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>

static void check_collectives(const Communicator& c) {
    for (DType dtype : {F32, BF16}) {
        for (int64_t n : {1, 3, 17, 1000, 70001}) {
            auto value = [](int rank, int64_t i) { return (float)((i * 7 + rank * 3) % 13); };
            std::vector<float> mine(n), sum(n);
            std::vector<int64_t> bounds = {0};
            for (int r = 0; r < c.world; r++) {
                bounds.push_back(r + 1 == c.world ? n : std::min(n, bounds[r] + n / c.world + r));  // unequal parts
                for (int64_t i = 0; i < n; i++) { sum[i] += value(r, i); }
            }
            for (int64_t i = 0; i < n; i++) { mine[i] = value(c.rank, i); }
            INFO("rank " << c.rank << " of " << c.world << ", " << name_of(dtype) << ", n " << n);

            Tensor added = from_floats(mine, {n}, dtype), averaged = from_floats(mine, {n}, dtype),
                   sent = from_floats(mine, {n}, dtype), scattered = from_floats(mine, {n}, dtype);
            WorkPtr works[] = {all_reduce(c, added, SUM), all_reduce(c, averaged, AVERAGE),
                               broadcast(c, sent, c.world - 1), reduce_scatter(c, scattered, bounds, AVERAGE)};
            for (int k : {2, 0, 3, 1}) { wait(c, works[k]); }
            std::vector<float> a = to_floats(added), b = to_floats(averaged), s = to_floats(sent),
                               p = to_floats(scattered);
            wait(c, all_gather(c, scattered, bounds));
            std::vector<float> g = to_floats(scattered);
            int wrong = 0;
            for (int64_t i = 0; i < n; i++) {
                double average = sum[i] / c.world, error = dtype == BF16 ? average / 128 : 1e-6 * average;
                bool own = i >= bounds[c.rank] && i < bounds[c.rank + 1];
                wrong += a[i] != sum[i];
                wrong += !(std::fabs(b[i] - average) <= error);
                wrong += s[i] != value(c.world - 1, i);
                wrong += own && !(std::fabs(p[i] - average) <= error);
                wrong += !(std::fabs(g[i] - average) <= error);
            }
            CHECK(wrong == 0);
        }
    }
    std::vector<std::string> texts = gather_text(c, "from " + std::to_string(c.rank));
    REQUIRE((int)texts.size() == c.world);
    for (int r = 0; r < c.world; r++) { CHECK(texts[r] == "from " + std::to_string(r)); }
}
TEST_CASE("ranks: collectives over Gloo") {
    if (lacks("gloo", CPU, 4)) { return; }
    for (int n : {1, 2, 3, 4}) { in_ranks("ranks: collectives over Gloo", n, CPU, check_collectives); }
}
TEST_CASE("ranks: collectives over NCCL") {
    if (lacks("nccl", CUDA, 2)) { return; }
    for (int n : {1, 2, 3, 4}) {
        if (why_not("nccl", CUDA, n).empty()) { in_ranks("ranks: collectives over NCCL", n, CUDA, check_collectives); }
    }
}
TEST_CASE("ranks: GPU tensors over Gloo") {
    if (lacks("gloo", CUDA, 2)) { return; }
    in_ranks("ranks: GPU tensors over Gloo", 2, CUDA, check_collectives);
}

// ---------------------------------------------------------------------------------------------------------------------
// Failures

struct Started {
    pid_t pid;
    FILE *out, *err;
    double at_ms;
};
static Started start(std::vector<std::string> words, std::vector<std::string> variables = {}) {
    words.insert(words.begin(), program());
    std::vector<char*> argv;
    for (std::string& w : words) { argv.push_back(w.data()); }
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
        for (std::string& v : variables) { putenv(v.data()); }
        execv(argv[0], argv.data());
        _exit(127);
    }
    return s;
}
struct Ended {
    int exit_code;
    std::string err, out;
    int lines;
    double ms;   // since `since`
    int signal;  // that ended it; 0: none
};
static Ended finish(const Started& s, double since) {
    int status = 0;
    while (waitpid(s.pid, &status, WNOHANG) == 0) {
        if (now_ms() - since > 20000) { kill(s.pid, SIGKILL); }  // a hang
        usleep(2000);
    }
    Ended e{WIFEXITED(status) ? WEXITSTATUS(status) : -1, "", "", 0, now_ms() - since,
            WIFSIGNALED(status) ? WTERMSIG(status) : 0};
    rewind(s.out), rewind(s.err);
    for (int c; (c = fgetc(s.out)) != EOF;) { e.out += (char)c; }
    for (int c; (c = fgetc(s.err)) != EOF;) { e.err += (char)c; }
    e.lines = (int)std::count(e.err.begin(), e.err.end(), '\n');
    fclose(s.out);
    fclose(s.err);
    return e;
}
static std::vector<pid_t> children_of(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/task/" + std::to_string(pid) + "/children");
    std::vector<pid_t> all;
    for (pid_t child; file >> child;) { all.push_back(child); }
    return all;
}
static std::string variable_of(pid_t pid, const std::string& name) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/environ");
    for (std::string v; std::getline(file, v, '\0');) {
        if (v.compare(0, name.size() + 1, name + "=") == 0) { return v.substr(name.size() + 1); }
    }
    return "";
}
static pid_t rank_of_launcher(pid_t launcher, int rank) {
    for (int tries = 0; tries < 2000; tries++) {
        for (pid_t pid : children_of(launcher)) {
            if (variable_of(pid, "RANK") == std::to_string(rank)) { return pid; }
        }
        usleep(2000);
    }
    return 0;
}
static bool gone(pid_t pid) {  // or a zombie that nobody has fetched yet
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string text;
    std::getline(file, text);
    return text.empty() || text[text.rfind(')') + 2] == 'Z';
}
static std::vector<std::string> long_run(const char* device = "cpu", const char* backend = "gloo",
                                         const char* ranks = "3") {
    return {"distributed_communication_single_node",
            "--nproc",
            ranks,
            "--device",
            device,
            "--backend",
            backend,
            "--sizes_mb",
            "4",
            "--steps",
            "1000000",
            "--timeout",
            "3"};
}

// The signal that rank `victim` of this command gets ends all its ranks, in one line that names that rank.
static void check_failure(const std::vector<std::string>& command, int number, int victim, double seconds_before) {
    Started s = start(command);
    std::vector<pid_t> ranks;
    for (int r = 0; r < std::stoi(command[2]); r++) { ranks.push_back(rank_of_launcher(s.pid, r)); }
    for (pid_t pid : ranks) { REQUIRE(pid > 0); }
    usleep((unsigned)(seconds_before * 1e6));
    double since = now_ms();
    kill(ranks[victim], number);
    Ended e = finish(s, since);
    INFO("signal " << number << " to rank " << victim << ": " << e.ms << " ms: " << e.err);
    CHECK(e.exit_code == 1);
    CHECK(e.lines == 1);
    CHECK(has(e.err, "rank " + std::to_string(victim)));
    CHECK(has(e.err, number == SIGKILL ? "killed by signal 9" : "no sign of life"));
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
TEST_CASE("ranks: the same in FSDP's steps") {
    if (lacks("gloo", CPU, 3)) { return; }
    const std::vector<std::string> train = {
        "train",   "--nproc",     "3",       "--strategy",       "fsdp", "--data",       "LICENSE", "--device",
        "cpu",     "--backend",   "gloo",    "--context_length", "32",   "--batch_size", "6",       "--steps",
        "1000000", "--log_every", "1000000", "--sample",         "0",    "--timeout",    "3"};
    for (int number : {SIGKILL, SIGSTOP}) { check_failure(train, number, 1, 2); }
}
TEST_CASE("ranks: the same over NCCL") {
    if (lacks("nccl", CUDA, 2)) { return; }
    for (int number : {SIGKILL, SIGSTOP}) {
        const std::string n = std::to_string(std::min(4, cuda_devices()));
        for (int victim : {0, std::stoi(n) / 2}) {
            check_failure(long_run("cuda", "nccl", n.c_str()), number, victim, 4);
        }
    }
}
TEST_CASE("ranks: signals to the launcher reach all, and no rank outlives it") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (int number : {SIGTERM, SIGINT, SIGKILL}) {
        Started s = start(long_run());
        std::vector<pid_t> ranks;
        for (int r = 0; r < 3; r++) { ranks.push_back(rank_of_launcher(s.pid, r)); }
        usleep(300000);
        kill(s.pid, number);
        Ended e = finish(s, now_ms());
        CHECK(e.signal == number);
        usleep(100000);
        for (pid_t pid : ranks) { CHECK((pid > 0 && gone(pid))); }
    }
}

TEST_CASE("ranks: a file that is being written goes, too, when another rank stalls") {
    if (lacks("gloo", CPU, 2)) { return; }
    if (!is_rank()) {
        Folder folder;
        setenv("CS336_TEST_FOLDER", folder.path.c_str(), 1);
        CHECK(launch_ranks(2, {"-tc=ranks: a file that is being written*", "-nv", "-m"}) == 1);
        CHECK(folder.files().empty());
        return;
    }
    Options o;
    o.device = "cpu", o.backend = "auto", o.timeout = 2;
    run_ranks(o, [](const Communicator& c) {
        std::string path = std::string(getenv("CS336_TEST_FOLDER")) + "/part" + std::to_string(c.rank);
        EndSignals first_is_a_wish(false);  // as train has: the launcher's must not be one
        Unfinished part(path);
        write_file(path, "half");
        gather_text(c, "");
        if (c.rank == 1) { raise(SIGSTOP); }
        pause();
    });
}

static int some_free_port() {  // and the next one; below the ports of outgoing connections
    static int port = 20000 + (int)(getpid() * 7 % 9000);
    while (true) {
        port += 2;
        int free = 0;
        for (int i : {0, 1}) {
            int fd = socket(AF_INET, SOCK_STREAM, 0);
            sockaddr_in a{};
            a.sin_family = AF_INET, a.sin_port = htons((uint16_t)(port + i));
            free += bind(fd, (sockaddr*)&a, sizeof a) == 0;
            close(fd);
        }
        if (free == 2) { return port; }
    }
}
static std::vector<std::string> as_rank(int rank, int world, int port) {
    return {"RANK=" + std::to_string(rank), "WORLD_SIZE=" + std::to_string(world), "LOCAL_RANK=" + std::to_string(rank),
            "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + std::to_string(port)};
}
static const std::vector<std::string> short_run = {
    "distributed_communication_single_node", "--device", "cpu", "--backend", "gloo", "--quick", "--timeout", "3"};
TEST_CASE("ranks: one that never starts, another world size, the same rank twice, a taken port, a foreign server") {
    if (lacks("gloo", CPU, 3)) { return; }
    int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    sockaddr_in a{};
    a.sin_family = AF_INET, a.sin_addr.s_addr = htonl(INADDR_ANY), a.sin_port = htons((uint16_t)some_free_port());
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    REQUIRE(bind(fd, (sockaddr*)&a, sizeof a) == 0);
    REQUIRE(listen(fd, 5) == 0);
    int taken = ntohs(a.sin_port), ports[] = {some_free_port(), some_free_port(), some_free_port()};
    struct Case {
        int rank, world, port;
        std::string says;
    };
    std::vector<Case> cases = {
        {0, 2, ports[0], "rank 1 of 2 did not start within 2.4 s"},
        {1, 2, ports[1], "rank 0 did not start: nothing listens on 127.0.0.1:"},
        {0, 2, ports[2], "rank 1 "},
        {1, 3, ports[2], "rank 1 says that there are 3 ranks, but rank 0 says 2"},
        {0, 2, taken, strprintf("MASTER_PORT %d: rank 0 cannot listen there: Address already in use", taken)},
        {1, 2, taken, "is not the store of rank 0"},
    };
    // Most of them wait for the timeout, so they run together; but six that load at once are slow to start.
    std::vector<Started> started;
    for (const Case& one : cases) {
        started.push_back(start(short_run, as_rank(one.rank, one.world, one.port)));
        usleep(300000);
    }
    for (size_t i = 0; i < cases.size(); i++) {
        Ended e = finish(started[i], started[i].at_ms);
        INFO("case " << i << ": " << e.ms << " ms: " << e.err);
        CHECK(e.exit_code == 1);
        CHECK(e.lines == 1);
        CHECK(has(e.err, cases[i].says));
        CHECK(e.ms < 3500);
        MESSAGE(cases[i].says << ": over after " << (int)e.ms << " ms");
    }
    close(fd);
}
static int connected_to(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(fd >= 0);
    sockaddr_in a{};
    a.sin_family = AF_INET, a.sin_addr.s_addr = htonl(INADDR_LOOPBACK), a.sin_port = htons((uint16_t)port);
    for (int tries = 0; connect(fd, (sockaddr*)&a, sizeof a) != 0; tries++) {
        REQUIRE(tries < 1000);
        usleep(10000);
    }
    return fd;
}
static void say(int fd, const std::string& bytes, uint32_t announced = 0) {
    uint32_t n = announced ? announced : (uint32_t)bytes.size();
    (void)!send(fd, &n, 4, MSG_NOSIGNAL);
    (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
}
static long resident_kib(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/status");
    for (std::string line; std::getline(file, line);) {
        if (line.compare(0, 6, "VmRSS:") == 0) { return std::stol(line.substr(6)); }
    }
    return 0;
}
static long descriptors(pid_t pid) {
    auto all = std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd");
    return std::distance(begin(all), end(all));
}
TEST_CASE("ranks: strangers at rank 0's port neither enter, nor end the job, nor take its memory and descriptors") {
    if (lacks("gloo", CPU, 2)) { return; }
    int port = some_free_port();
    std::vector<std::string> words = short_run;
    words.back() = "20";
    Started zero = start(words, as_rank(0, 2, port));
    std::vector<int> held = {connected_to(port)};  // once this is there, rank 0 is
    long before_kib = resident_kib(zero.pid);
    for (int i = 0; i < 1100; i++) { close(connected_to(port)); }
    for (int i = 0; i < 30; i++) {
        held.push_back(connected_to(port));
        say(held.back(), std::string(1 << 16, 'x'), 1 << 26);
    }
    std::string zero_byte(1, '\0');
    for (const std::string& request :
         {"Hmain" + zero_byte + "100 2 0", "Hmain" + zero_byte + "1 2 1", "B" + zero_byte, "Q" + zero_byte,
          "Sgather/0/1" + zero_byte + "1 1e-6 1e-6 1e-6", "Sstarted/1" + zero_byte, std::string("Gstarted/0")}) {
        int fd = connected_to(port);
        say(fd, request);
        say(fd, "B" + zero_byte);
        close(fd);
    }
    int http = connected_to(port);
    (void)!send(http, "GET / HTTP/1.0\r\n\r\n", 18, MSG_NOSIGNAL);
    close(http);
    for (int i = 0; i < 200; i++) { held.push_back(connected_to(port)); }  // these say nothing
    usleep(200000);
    MESSAGE(descriptors(zero.pid) << " descriptors, " << resident_kib(zero.pid) - before_kib << " KiB more");
    CHECK(descriptors(zero.pid) < 100);
    CHECK(resident_kib(zero.pid) - before_kib < 16 << 10);
    usleep(2500000);
    char byte;
    for (int fd : held) { CHECK(recv(fd, &byte, 1, MSG_DONTWAIT) <= 0); }  // nobody was told anything
    int closed = 0;
    for (int fd : held) { closed += recv(fd, &byte, 1, MSG_DONTWAIT) == 0 || errno == ECONNRESET; }
    CHECK(closed == (int)held.size());
    for (int i = 0; i < 200; i++) { held.push_back(connected_to(port)); }
    Started one = start(words, as_rank(1, 2, port));  // comes in all the same
    for (const Started& rank : {zero, one}) {
        Ended e = finish(rank, rank.at_ms);
        INFO(e.err);
        CHECK(e.exit_code == 0);
        CHECK(has(e.out, "right") == (rank.pid == zero.pid));
        CHECK(!has(e.out, "00000.00"));
    }
    for (int fd : held) { close(fd); }
}
// The local addresses, as the kernel writes them, of what listens on this port.
static std::vector<std::string> listening_addresses(int port) {
    std::vector<std::string> found;
    for (const char* name : {"/proc/net/tcp", "/proc/net/tcp6"}) {
        std::ifstream file(name);
        for (std::string number, local, remote, state, line; file >> number >> local >> remote >> state;) {
            std::getline(file, line);
            size_t colon = local.find(':');
            bool here = colon != std::string::npos && std::stoi(local.substr(colon + 1), nullptr, 16) == port;
            if (state == "0A" && here) { found.push_back(local.substr(0, colon)); }
        }
    }
    return found;
}
TEST_CASE("ranks: --nproc listens on loopback only, on a port and with a token of its own") {
    if (lacks("gloo", CPU, 3)) { return; }
    std::set<std::string> tokens, ports;
    std::vector<Started> jobs = {start(long_run()), start(long_run())};
    for (const Started& job : jobs) {
        pid_t zero = rank_of_launcher(job.pid, 0);
        REQUIRE(zero > 0);
        std::string port = variable_of(zero, "MASTER_PORT");
        CHECK(listening_addresses(std::stoi(port)) == std::vector<std::string>{"0100007F"});
        ports.insert(port), tokens.insert(variable_of(zero, "CS336_TOKEN"));
    }
    CHECK(ports.size() == 2);
    CHECK(tokens.size() == 2);
    for (const std::string& token : tokens) { CHECK(token.size() == 32); }
    for (const Started& job : jobs) {
        kill(job.pid, SIGTERM);
        finish(job, now_ms());
    }
}
TEST_CASE("ranks: another job, another program, other options are refused by what differs first") {
    if (lacks("gloo", CPU, 2)) { return; }
    int port = some_free_port();
    auto words = [](std::vector<std::string> more) {
        std::vector<std::string> all = {"naive_ddp_benchmarking", "--quick", "--device", "cpu", "--timeout", "5"};
        all.insert(all.end(), more.begin(), more.end());
        return all;
    };
    Started zero = start(words({"--seed", "1"}), as_rank(0, 2, port));
    close(connected_to(port));
    struct Case {
        std::vector<std::string> words;
        std::string token, says;
    };
    for (const Case& one :
         {Case{words({"--seed", "1"}), "x", "the store of rank 0 belongs to another job"},
          {words({}), "", "rank 1 has no --seed, but rank 0 has --seed 1"},
          {words({"--seed", "2"}), "", "rank 1 has --seed 2, but rank 0 has --seed 1"},
          {words({"--seed", "1", "--precision", "bf16"}), "",
           "rank 1 has --precision bf16, but rank 0 has no --precision"},
          {words({"--seed", "1", "--batch_size", "4"}), "", "rank 1 has --batch_size 4, but"},
          {words({"--seed", "1", "--num_heads", "2"}), "", "rank 1 has --num_heads 2, but"},
          {{"naive_ddp", "--quick"}, "", "rank 1 runs naive_ddp, but rank 0 runs naive_ddp_benchmarking"}}) {
        std::vector<std::string> variables = as_rank(1, 2, port);
        if (!one.token.empty()) { variables.push_back("CS336_TOKEN=" + one.token); }
        Started s = start(one.words, variables);
        Ended e = finish(s, s.at_ms);
        INFO(e.err);
        CHECK(e.exit_code == 1);
        CHECK(e.lines == 1);
        CHECK(has(e.err, one.says));
    }
    Ended e = finish(zero, zero.at_ms);
    CHECK(has(e.err, "rank 1 of 2 did not start"));
}
TEST_CASE("ranks: --timeout bounds connecting to an address that does not answer") {
    if (lacks("gloo", CPU, 2)) { return; }
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in a{};
    a.sin_family = AF_INET, a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t n = sizeof a;
    REQUIRE(bind(fd, (sockaddr*)&a, n) == 0);
    REQUIRE(listen(fd, 0) == 0);
    REQUIRE(getsockname(fd, (sockaddr*)&a, &n) == 0);
    std::vector<int> queue;  // when it is full, the kernel drops what else asks to connect
    for (int i = 0; i < 8; i++) {
        queue.push_back(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
        (void)connect(queue.back(), (sockaddr*)&a, sizeof a);
    }
    Started s = start(short_run, as_rank(1, 2, ntohs(a.sin_port)));
    Ended e = finish(s, s.at_ms);
    INFO(e.ms << " ms: " << e.err);
    CHECK(e.exit_code == 1);
    CHECK(e.lines == 1);
    CHECK(has(e.err, "rank 0 did not start: Connection timed out on 127.0.0.1:"));
    CHECK(e.ms < 3500);
    for (int q : queue) { close(q); }
    close(fd);
}
TEST_CASE("ranks: too few descriptors are named; an inherited nohup holds") {
    if (lacks("gloo", CPU, 2)) { return; }
    for (const char* limit : {"5", "6", "8"}) {
        Run r = run_shell(std::string("ulimit -n ") + limit + "; exec " + program() +
                          " naive_ddp --nproc 2 --device cpu --timeout 3");
        INFO(r.out);
        CHECK(r.exit_code == 1);
        CHECK(has(r.out, "Too many open files"));
    }
    signal(SIGHUP, SIG_IGN);
    Started s = start(long_run());
    signal(SIGHUP, SIG_DFL);
    std::vector<pid_t> all = {rank_of_launcher(s.pid, 0), rank_of_launcher(s.pid, 1), s.pid};
    usleep(500000);
    for (pid_t pid : all) { CHECK(kill(pid, SIGHUP) == 0); }
    usleep(500000);
    for (pid_t pid : all) { CHECK(!gone(pid)); }
    kill(s.pid, SIGTERM);
    finish(s, now_ms());
}
TEST_CASE("ranks: children are waited for, also where SIGCHLD was ignored") {
    if (lacks("gloo", CPU, 2)) { return; }
    signal(SIGCHLD, SIG_IGN);
    Started s = start({"naive_ddp", "--quick", "--nproc", "2", "--device", "cpu"});
    signal(SIGCHLD, SIG_DFL);
    Ended e = finish(s, s.at_ms);
    CHECK(e.exit_code == 0);
}
TEST_CASE("ranks: a rank that stalls after its goodbye is not waited for without end") {
    bool only_this_machine;
    int listening = listen_for_ranks("127.0.0.1", 0, INFINITY, &only_this_machine), port = port_of(listening);
    CHECK(only_this_machine);
    Hello hello{0, false, 2, "x/", "c", "t", {}};
    auto server = start_store(listening, hello, 300, nullptr);
    std::vector<int> ranks;
    for (hello.rank = 0; hello.rank < 2; hello.rank++) {
        ranks.push_back(connect_to_store("127.0.0.1", port, hello, now_ms() + 5000));
        CHECK(ask_store(ranks.back(), 'Q', "", "", now_ms() + 5000, "no reply") == "");
    }
    close(ranks[0]);
    stop_store_soon(*server);
    double since = now_ms();
    CHECK_THROWS_WITH(wait_for_store(*server), "rank 1 has shown no sign of life since its goodbye");
    CHECK(now_ms() - since > 200);
    CHECK(now_ms() - since < 2000);
    close(ranks[1]);
}
TEST_CASE("ranks: what the environment says is checked") {
    if (lacks("gloo", CPU, 2)) { return; }
    struct Case {
        std::vector<std::string> variables;
        int exit_code;
        std::string says;
    };
    std::string port = "MASTER_PORT=" + std::to_string(some_free_port());
    for (const Case& one : {
             Case{{"SLURM_STEP_ID=4294967290", "SLURM_NTASKS=1", "SLURM_PROCID=0"}, 0, ""},
             {{"RANK=0", "WORLD_SIZE=1", "MASTER_PORT=65535", "TORCHELASTIC_RUN_ID=x"}, 2, "MASTER_PORT: got 65535"},
             {{"RANK=0", "WORLD_SIZE=1", port, "LOCAL_WORLD_SIZE=0"}, 2, "this machine has only 0 ranks"},
             {{"RANK=0", "WORLD_SIZE=1", port, "MASTER_ADDR=0.0.0.0", "CS336_TOKEN="}, 0, "can join this job"},
             {{"RANK=0", "WORLD_SIZE=1", port, "MASTER_ADDR=0.0.0.0", "CS336_TOKEN=x"}, 0, ""},
             {{"RANK=0", "WORLD_SIZE=1", port, "CS336_STORE_FD=0"}, 2, "is no listening socket"},
         }) {
        Started s = start(short_run, one.variables);
        Ended e = finish(s, s.at_ms);
        INFO(one.variables.back() << ": " << e.err);
        CHECK(e.exit_code == one.exit_code);
        CHECK(has(e.err, one.says));
        CHECK(has(e.err, "warning: whoever") == has(one.says, "join"));
    }
}
TEST_CASE("ranks: what torchrun and mpirun and srun say is understood") {
    if (lacks("gloo", CPU, 2)) { return; }
    auto variables = [](const char* launcher, int rank, int port) -> std::vector<std::string> {
        std::string r = std::to_string(rank), at = "MASTER_PORT=" + std::to_string(port);
        if (std::string(launcher) == "mpirun") {
            return {"OMPI_COMM_WORLD_RANK=" + r, "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_LOCAL_RANK=" + r,
                    "OMPI_COMM_WORLD_LOCAL_SIZE=2", at};
        }
        if (std::string(launcher) == "srun") {
            return {"SLURM_STEP_ID=0", "SLURM_NTASKS=2", "SLURM_PROCID=" + r, "SLURM_LOCALID=" + r, at};
        }
        std::vector<std::string> all = as_rank(rank, 2, port);
        all.push_back("TORCHELASTIC_RUN_ID=x");  // torchrun's own store holds the port: ours takes the next
        return all;
    };
    for (const char* launcher : {"mpirun", "srun", "torchrun"}) {
        int port = some_free_port(), fd = socket(AF_INET, SOCK_STREAM, 0);
        sockaddr_in a{};
        a.sin_family = AF_INET, a.sin_addr.s_addr = htonl(INADDR_ANY), a.sin_port = htons((uint16_t)port);
        if (std::string(launcher) == "torchrun") {
            REQUIRE(bind(fd, (sockaddr*)&a, sizeof a) == 0);
            REQUIRE(listen(fd, 5) == 0);
        }
        Started both[] = {start(short_run, variables(launcher, 0, port)),
                          start(short_run, variables(launcher, 1, port))};
        for (const Started& one : both) {
            Ended e = finish(one, one.at_ms);
            INFO(launcher << ": " << e.err);
            CHECK(e.exit_code == 0);
        }
        close(fd);
    }
}
TEST_CASE("ranks: wrong usage of the launcher") {
    if (lacks("gloo", CPU, 3)) { return; }
    std::vector<std::string> words = short_run;
    words.insert(words.end(), {"--nproc", "3"});
    Started s = start(words, as_rank(0, 2, some_free_port()));
    Ended e = finish(s, s.at_ms);
    CHECK(e.exit_code == 2);
    CHECK(has(e.err, "--nproc: got 3, but the launcher has started 2 ranks"));
    Run nccl = run_cs336({"distributed_communication_single_node", "--device", "cpu", "--backend", "nccl"});
    CHECK(nccl.exit_code == 1);
    CHECK(has(nccl.err, "NCCL"));
    CHECK(run_cs336({"distributed_communication_single_node", "--nproc", "0"}).exit_code == 2);
    CHECK(run_cs336({"distributed_communication_single_node", "--sizes_mb", "1,x"}).exit_code == 2);
    CHECK(run_cs336({"distributed_communication_single_node", "--sizes_mb", "1,1e-6"}).exit_code == 2);
}
TEST_CASE("ranks: distributed_communication_single_node") {
    if (lacks("gloo", CPU, 2)) { return; }
    Folder folder;
    std::string plot = folder / "all_reduce.svg";
    Run r = run_cs336(
        {"distributed_communication_single_node", "--quick", "--device", "cpu", "--format", "csv", "--plot", plot});
    CHECK(r.exit_code == 0);
    CHECK(has(read_file(plot), "gloo cpu, 2 ranks"));
    CHECK(has(r.out, "gloo,cpu,2,1,"));
    CHECK(has(r.out, ",right\n"));
    CHECK(!has(r.out, "WRONG"));
}
