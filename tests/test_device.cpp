// Tests of lib/device.cu and lib/table.cu. Cases marked skip are run as child processes, because
// what they check ends a process, or is read from the environment only once.
#include "test.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

// It is there with the address sanitizer, whose malloc does as it likes, and which takes terabytes
// of addresses.
extern "C" void __asan_init() __attribute__((weak));

// Runs one case of this program in a new process, and returns what that prints; fails if it fails.
static string run_case(const string& name) {
    return run_ourselves({"--no-skip", "--test-case=" + name});
}

struct OnMeta {
    static constexpr Device device = META;
};
TYPE_TO_STRING(OnMeta);

// -------------------------------------------------------------------------------------------------
// Errors and names

TEST_CASE("measure: texts, failures and names") {
    const string big(1 << 20, 'a');
    CHECK(strprintf("<%s> %d %.2f", big.c_str(), 7, 1.005) == "<" + big + "> 7 1.00");
    CHECK(failure_of([] { fail("got %d, expected %d", 3, 4); }) == "1: got 3, expected 4");
    CHECK(failure_of([] { usage_error("no such option %s", "--x"); }) == "2: no such option --x");
    CHECK(counted(1, "step") == "1 step");
    CHECK(counted(0, "step") == "0 steps");
    CHECK(list_of({}) == "");
    CHECK(list_of({"a"}) == "a");
    CHECK(list_of({"a", "b"}) == "a and b");
    CHECK(list_of({"a", "b", "c"}) == "a, b and c");
    CHECK(string(name_of(BF16)) == "bfloat16");
    CHECK(string(name_of(OPTIMIZER)) == "optimizer state");
    CHECK(string(name_of(INPUTS)) == "inputs");
    for (Mode m : {EAGER, FUSED, FLASH}) { CHECK(mode_from(name_of(m)) == m); }
    for (Precision p : {FP32, TF32, PREC_BF16, PREC_FP16, PREC_PURE_BF16}) {
        CHECK(precision_from(name_of(p)) == p);
    }
}

TEST_CASE("measure: choosing a device") {
    RestoreContext restore;
    auto chosen = [](const char* want) {
        choose_device(want);
        return context.device;
    };
    CHECK(chosen("cpu") == CPU);
    if (cuda_devices() == 0) {
        CHECK(chosen("auto") == CPU);
        CHECK(has(failure_of([] { choose_device("cuda"); }), "1: device cuda: there is none ("));
    } else {
        CHECK(chosen("auto") == CUDA);
        CHECK(chosen("cuda") == CUDA);
    }
}

// The driver would take microseconds each time that it is asked.
TEST_CASE("measure: launches may ask for the devices") {
    cuda_devices();
    double start = now_ms();
    for (int i = 0; i < 100000; i++) { cuda_devices(); }
    CHECK(now_ms() - start < 50);
}

TEST_CASE_TEMPLATE("measure: a device describes itself", D, OnCPU, OnMeta, OnCUDA) {
    if (!begin<D>()) { return; }
    CHECK(device_description() != "");
    if (D::device == CUDA) { CHECK(has(device_description(), ", driver ")); }
    if (D::device == CPU) {
        CHECK(has(device_description(), ", " + counted(omp_get_max_threads(), "thread")));
    }
    CHECK(available_memory(D::device) > 64 << 20);
    synchronize();
    CHECK(commit() != "");
}

// -------------------------------------------------------------------------------------------------
// Memory

TEST_CASE_TEMPLATE("measure: memory is counted by category, and the peak keeps its shares", D,
                   OnCPU, OnMeta, OnCUDA) {
    if (!begin<D>()) { return; }
    Device d = D::device;
    reset_peak(d);
    MemoryUse base = memory_use(d);
    CHECK(base.peak == base.now);
    auto weights = allocate(d, 1000, PARAMETERS);
    auto x = allocate(d, 300, ACTIVATIONS);
    auto y = allocate(d, 500, ACTIVATIONS);
    x = nullptr;
    auto g = allocate(d, 100, GRADIENTS);  // 1600 in use, below the peak of 1800
    const MemoryUse& use = memory_use(d);
    CHECK(use.now - base.now == 1600);
    CHECK(use.peak - base.now == 1800);
    CHECK(use.now_by[ACTIVATIONS] - base.now_by[ACTIVATIONS] == 500);
    CHECK(use.now_by[GRADIENTS] - base.now_by[GRADIENTS] == 100);
    CHECK(use.peak_by[PARAMETERS] - base.now_by[PARAMETERS] == 1000);
    CHECK(use.peak_by[ACTIVATIONS] - base.now_by[ACTIVATIONS] == 800);
    CHECK(use.peak_by[GRADIENTS] - base.now_by[GRADIENTS] == 0);
    reset_peak(d);
    CHECK(use.peak - base.now == 1600);
    CHECK(use.peak_by[GRADIENTS] - base.now_by[GRADIENTS] == 100);
    auto second_owner = y;
    y = nullptr;
    CHECK(use.now - base.now == 1600);
    weights = second_owner = g = nullptr;
    CHECK(use.now == base.now);
    CHECK(use.now_by[ACTIVATIONS] == base.now_by[ACTIVATIONS]);
}

TEST_CASE_TEMPLATE("measure: zero bytes are allowed, and META counts what no machine has", D, OnCPU,
                   OnMeta, OnCUDA) {
    if (!begin<D>()) { return; }
    CHECK(allocate(D::device, 0, INPUTS)->bytes == 0);
    auto huge = allocate(META, size_t(1) << 46, WORKSPACE);
    CHECK(huge->bytes == size_t(1) << 46);
    CHECK(memory_use(META).now >= size_t(1) << 46);
}

TEST_CASE_TEMPLATE("measure: an absurd size is OutOfMemory, and leaves no trace", D, OnCPU,
                   OnCUDA) {
    if (!begin<D>()) { return; }
    Device d = D::device;
    MemoryUse before = memory_use(d);
    for (size_t bytes : {size_t(1) << 46, SIZE_MAX - 8}) {
        string what;
        try {
            allocate(d, bytes, ACTIVATIONS);
        } catch (const OutOfMemory& e) { what = e.what(); }
        CHECK(has(what, strprintf("out of memory on %s: %.2f GiB for activations", name_of(d),
                                  bytes / 1073741824.0)));
    }
    CHECK(memory_use(d).now == before.now);
    CHECK(allocate(d, 1 << 20, ACTIVATIONS)->data != nullptr);  // and the device still works
}

TEST_CASE("measure: memory is what the control group leaves") {
    Folder group;
    auto mib_left = [&](const char* max, size_t used, size_t cached) {
        write_file(group / "memory.max", string(max) + "\n");
        write_file(group / "memory.current", to_string(used << 20) + "\n");
        write_file(group / "memory.stat",
                   "anon 5\ninactive_file " + to_string(cached << 20) + "\n");
        return system_memory(group.path.c_str()) / 1048576.0;
    };
    CHECK(mib_left("67108864", 30, 0) == 34);
    CHECK(mib_left("67108864", 30, 5) == 39);  // cached files make room
    CHECK(mib_left("67108864", 70, 0) == 0);
    CHECK(mib_left("max", 30, 0) > 64);
    CHECK(system_memory("/none") > 64 << 20);

    // What lies above it has its own limit, which all below it share.
    std::filesystem::create_directories(group / "job/step");
    auto left_in = [&](const char* folder) {
        return system_memory((group / folder).c_str()) / 1048576.0;
    };
    CHECK(mib_left("67108864", 30, 0) == 34);
    CHECK(left_in("job/step") == 34);
    write_file(group / "job/memory.max", "max\n");
    CHECK(left_in("job/step") == 34);
    write_file(group / "job/step/memory.limit_in_bytes", "41943040\n");  // version 1's names
    write_file(group / "job/step/memory.usage_in_bytes", "31457280\n");
    write_file(group / "job/step/memory.stat", "inactive_file 0\ntotal_inactive_file 1048576\n");
    CHECK(left_in("job/step") == 11);
    CHECK(left_in("job") == 34);
    write_file(group / "job/step/memory.limit_in_bytes", "9223372036854771712\n");  // none
    CHECK(left_in("job/step") == 34);
}
TEST_CASE("measure: child: may take 1 GiB of addresses more" * doctest::skip()) {
    context.device = CPU;
    rlimit limit = {};
    std::ifstream statm("/proc/self/statm");
    available_memory(CPU);  // gives back what malloc keeps
    statm >> limit.rlim_cur;
    limit.rlim_cur = limit.rlim_max = limit.rlim_cur * sysconf(_SC_PAGESIZE) + (1 << 30) +
                                      ((size_t)omp_get_max_threads() * 200 << 20);
    REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
    CHECK(available_memory(CPU) <= 1 << 30);
    CHECK(available_memory(CPU) > 800 << 20);
}
TEST_CASE("measure: memory is what RLIMIT_AS leaves") {
    if (__asan_init) {
        return skip_this_case("the address sanitizer takes terabytes of addresses");
    }
    CHECK(failure_of([] { run_case("measure: child: may take 1 GiB*"); }) == "nothing thrown");
}

// What was freed has to come back as one piece: 80% of the memory in eighths, then in quarters,
// then at once.
TEST_CASE("measure: freed GPU memory is not lost in pieces") {
    if (!begin_on(CUDA)) { return; }
    size_t bytes = available_memory(CUDA) / 10 * 8;
    for (int pieces : {8, 4, 1}) {
        vector<shared_ptr<Memory>> held;
        for (int i = 0; i < pieces; i++) {
            held.push_back(allocate(CUDA, bytes / pieces, ACTIVATIONS));
        }
        CHECK(available_memory(CUDA) < bytes / 2);
    }
    CHECK(available_memory(CUDA) >= bytes);
}

TEST_CASE("measure: CPU blocks are aligned, and their pages are kept") {
    vector<shared_ptr<Memory>> small;
    for (int i = 0; i < 10; i++) {
        rusage before, after;
        getrusage(RUSAGE_SELF, &before);
        auto block = allocate(CPU, 100 << 20, ACTIVATIONS);
        memset(block->data, i, block->bytes);
        getrusage(RUSAGE_SELF, &after);
        CHECK((uintptr_t)block->data % 64 == 0);
        if (i > 0 && !__asan_init) { CHECK(after.ru_minflt - before.ru_minflt < 100); }
        for (int j = 0; j < 50; j++) { small.push_back(allocate(CPU, 1 + 7 * j, ACTIVATIONS)); }
    }
    for (const auto& block : small) { CHECK((uintptr_t)block->data % 64 == 0); }
}

TEST_CASE_TEMPLATE("measure: copies between devices", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    vector<int> values(100003), back(values.size());
    size_t bytes = values.size() * sizeof(int);
    for (size_t i = 0; i < values.size(); i++) { values[i] = i * 2654435761u; }
    auto a = allocate(D::device, bytes, INPUTS), b = allocate(D::device, bytes, INPUTS);
    auto nowhere = allocate(META, bytes, INPUTS);
    copy_bytes(a->data, D::device, values.data(), CPU, bytes);
    copy_bytes(b->data, D::device, a->data, D::device, bytes);
    copy_bytes(nowhere->data, META, b->data, D::device, bytes);
    copy_bytes(b->data, D::device, nowhere->data, META, bytes);
    copy_bytes(back.data(), CPU, b->data, D::device, bytes);
    CHECK(back == values);
}

TEST_CASE("measure: ranges name allocations") {
    CHECK(string(innermost_range()) == "");
    Range outer("outer");
    {
        Range inner("inner");
        CHECK(string(allocate(CPU, 4, WORKSPACE)->range_name) == "inner");
        string elsewhere = "?";
        std::thread([&] { elsewhere = innermost_range(); }).join();
        CHECK(elsewhere == "");  // each thread has its own
    }
    CHECK(string(allocate(META, 4, WORKSPACE)->range_name) == "outer");
}

// -------------------------------------------------------------------------------------------------
// Time

TEST_CASE("measure: statistics") {
    Stats s = stats_of({9, 2, 4, 4, 5, 4, 5, 7});
    CHECK(s.n == 8);
    CHECK(s.mean == doctest::Approx(5));
    CHECK(s.std == doctest::Approx(std::sqrt(32.0 / 7)));
    CHECK(s.median == doctest::Approx(4.5));
    CHECK(s.min == 2);
    CHECK(s.max == 9);
    CHECK(stats_of({3, 1, 2}).median == 2);
    CHECK(stats_of({3}).std == 0);
    CHECK(stats_of({3}).median == 3);

    auto why = [](double mean, double std, int n, double other = 10, double other_std = 0.3) {
        return level({mean, std, mean, mean, mean, n}, {other, other_std, other, other, other, n});
    };
    CHECK(why(10.05, 0, 100) == "level within 0.5 %");
    CHECK(why(10.06, 0, 100, 10, 0) == "");
    // 2 hypot(0.3, 0.3) / sqrt(10) = 0.268
    CHECK(why(10.26, 0.3, 10) == "level within twice the standard error");
    CHECK(why(10.28, 0.3, 10) == "");
    // 2 hypot(0.3, 0.3) / sqrt(2) = 0.6, with the factor for two runs, 2.2, 1.32
    CHECK(why(10.59, 0.3, 2) == "too briefly timed to compare");
    CHECK(why(11.31, 0.3, 2) == "too noisy to compare");
    CHECK(why(11.33, 0.3, 2) == "");
    // 2 hypot(0.3, 0.3) / sqrt(4) = 0.424, with the factor for four runs, 1.4, 0.594
    CHECK(why(10.59, 0.3, 4) == "too briefly timed to compare");
    CHECK(why(10.60, 0.3, 4) == "");
    // From 5 runs on the standard error counts alone: 2 hypot(0.3, 0.3) / sqrt(5) = 0.379
    CHECK(why(10.42, 0.3, 5) == "");
    CHECK(why(11.1, 0, 1, 10, 0) == "too briefly timed to compare");
    CHECK(why(19.9, 0, 1, 10, 0) == "too briefly timed to compare");  // one run each: no deviation
    CHECK(why(20.1, 0, 1, 10, 0) == "");
    // within the noise, but 9.1, 10.7 and 12 % apart
    CHECK(why(11, 2, 3) == "too briefly timed to compare");
    CHECK(why(11.2, 2, 3) == "too noisy to compare");
    CHECK(why(8.8, 3, 10) == "too noisy to compare");
}

TEST_CASE("measure: time_ms warms up, then times") {
    int calls = 0;
    vector<double> times = time_ms(2, 3, [&] {
        calls++;
        std::this_thread::sleep_for(std::chrono::milliseconds(calls <= 2 ? 60 : 5));
    });
    CHECK(calls == 5);
    CHECK(times.size() == 3);
    for (double t : times) {
        CHECK(t >= 5);
        CHECK(t < 60);  // the warm-up is not among them
    }
}

// -------------------------------------------------------------------------------------------------
// Tables

static string text_of(const Table& t, bool csv) {
    RestoreContext restore;
    context.csv = csv;
    return printed([&] { print(t); });
}
static const Table example = {"two sizes, \"quoted\"",
                              {"size", "ms", "a|b", "note"},
                              {{"small", "1.5", "", "µ, ±"},
                               {"2.7B", "OOM", "-12e3", "say \"hi\"\n"}}};

TEST_CASE("measure: table as markdown") {
    Table t = {"caption, fp32", {"size", "step_ms", "GiB", "a|b", "±"}, {}};
    t.rows = {{"small", "1.5", "", "x|y", "1 ± 2"}, {"2.7B", "OOM", "-12e3", "µ", ""}};
    CHECK(text_of(t, false) ==
          "caption, fp32\n"
          "\n"
          "| size  | step_ms |   GiB | a\\|b | ±     |\n"
          "| ----- | ------: | ----: | ---- | ----- |\n"
          "| small |     1.5 |       | x\\|y | 1 ± 2 |\n"
          "| 2.7B  |     OOM | -12e3 | µ    |       |\n");
}

TEST_CASE("measure: table as csv") {
    CHECK(text_of(example, true) ==
          "# two sizes, \"quoted\"\n"
          "size,ms,a|b,note\n"
          "small,1.5,,\"µ, ±\"\n"
          "2.7B,OOM,-12e3,\"say \"\"hi\"\"\\x0a\"\n");
}

TEST_CASE("measure: cells, answers and a block of code") {
    Table t{"", {"a"}};
    t.row("x", 1, (int64_t)-2, (size_t)3, 0.123456, NAN, BF16, FLASH, TF32);
    CHECK(t.rows[0] ==
          vector<string>{"x", "1", "-2", "3", "0.1235", "", "bfloat16", "flash", "tf32"});
    CHECK(oom_cell(3 << 29) == "OOM (1.5 GiB)");
    auto both = [] { answer("a", "It takes %d ms.", 3), answer("", "So."), sketch("x\ny\n"); };
    CHECK(printed(both) == "**(a)** It takes 3 ms.\nSo.\n```\nx\ny\n```\n");
    RestoreContext restore;
    context.csv = true;
    CHECK(has(printed(both), "# (a) It takes 3 ms.\n# So.\n# x\n# y\n"));
}

TEST_CASE("measure: text of any kind stays on its line") {
    const string text = "\n\x1b[31m\x7f|\xc2\xb5";
    CHECK(one_line(text) == "\\x0a\\x1b[31m\\x7f|\xc2\xb5");
    Table t = {text, {text}, {{text}}};
    for (bool csv : {false, true}) {
        const string out = text_of(t, csv);
        CHECK(std::count(out.begin(), out.end(), '\n') == (csv ? 3 : 5));
        CHECK(!has(out, "\x1b"));
    }
}
TEST_CASE("measure: a row that has not the table's columns") {
    Table ragged = {"ragged", {"a", "b"}, {{"1"}}};
    CHECK(failure_of([&] { printed([&] { print(ragged); }); }) ==
          "1: table 'ragged': a row of 1 cells");
    printed_to = nullptr;
}

// -------------------------------------------------------------------------------------------------
// Output and child processes

TEST_CASE("measure: child: prints" * doctest::skip()) {
    context.csv = true;
    print(example);
    print(example);
}

TEST_CASE("measure: print writes tables to stdout, an empty line between two") {
    const string printed = run_case("measure: child: prints"), caption = "# " + example.caption;
    CHECK(has(printed, caption + "; "));  // once, device and commit
    CHECK(has(printed, "; commit " + commit()));
    CHECK(has(printed, "\n\n" + text_of(example, true)));
}

TEST_CASE("measure: child: stdout is full and then closed" * doctest::skip()) {
    REQUIRE(freopen("/dev/full", "w", stdout));
    CHECK(failure_of([] { print(example); }) ==
          "1: cannot write to stdout: No space left on device");
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    REQUIRE(dup2(ends[1], STDOUT_FILENO) >= 0);
    close(ends[0]);
    // 141 is 128 + SIGPIPE.
    CHECK(failure_of([] { print(example); }) == "141: cannot write to stdout: Broken pipe");
}

TEST_CASE("measure: a stdout that takes nothing is a failure, not silence") {
    CHECK(failure_of([] { run_case("measure: child: stdout is full and then closed"); }) ==
          "nothing thrown");
}

TEST_CASE("measure: child: exits with 3" * doctest::skip()) { _exit(3); }
TEST_CASE("measure: child: is killed" * doctest::skip()) { raise(SIGKILL); }
TEST_CASE("measure: child: prints a lot" * doctest::skip()) {
    for (int i = 0; i < 100000; i++) {  // more than a pipe holds
        printf("line %d\n", i);
    }
    fflush(stdout);
}

TEST_CASE("measure: run_ourselves returns the output, or fails with the child") {
    CHECK(has(run_case("measure: child: prints a lot"), "line 0\nline 1\n"));
    CHECK(has(run_case("measure: child: prints a lot"), "line 99998\nline 99999\n"));
    CHECK(has(failure_of([] { run_case("measure: child: exits with 3"); }),
              "child: exits with 3: exited with 3"));
    CHECK(has(failure_of([] { run_case("measure: child: is killed"); }), "killed by signal 9"));
    CHECK(waitpid(-1, nullptr, WNOHANG) == -1);  // no child is left
}

TEST_CASE("measure: child: is killed while it writes" * doctest::skip()) {
    replace_file(getenv("CS336_TEST_FILE"), [&](FILE* file) {
        REQUIRE(fputs("new", file) >= 0);
        REQUIRE(fflush(file) == 0);
        raise(SIGKILL);
        return true;
    });
}

TEST_CASE("measure: a signal, or a failure, in the middle of a file leaves the old one") {
    Folder folder;
    string path = folder / "file";
    save_file(path, "old");
    CHECK(failure_of([&] {
              replace_file(path, [](FILE*) {
                  errno = ENOSPC;
                  return false;
              });
          }) == "1: " + path + ": cannot be written: No space left on device");
    CHECK(failure_of([&] { replace_file(path, [](FILE*) -> bool { fail("no"); }); }) == "1: no");
    CHECK(folder.files() == vector<string>{"file"});
    CHECK(read_file(path) == "old");
    setenv("CS336_TEST_FILE", path.c_str(), 1);
    CHECK(has(failure_of([] { run_case("measure: child: is killed while it writes"); }),
              "killed by signal 9"));
    CHECK(read_file(path) == "old");
    save_file(path, "new");  // beside what the killed one has left
    CHECK(read_file(path) == "new");
    CHECK(folder.files().size() == 2);
}

TEST_CASE("measure: what cannot be written is said, and trying leaves nothing") {
    Folder folder;
    string path = folder / "file";
    replace_file(path, nullptr);
    CHECK(folder.files().empty());
    CHECK(failure_of([&] { replace_file(folder / string(250, 'x'), nullptr); }) ==
          "1: " + (folder / string(250, 'x')) + ": cannot be written: File name too long");
    CHECK(failure_of([&] { save_file(folder / "none/file", ""); }) ==
          "1: " + (folder / "none/file") + ": cannot be written: No such file or directory");
    REQUIRE(mkfifo((folder / "fifo").c_str(), 0600) == 0);
    CHECK(has(failure_of([&] { save_file(folder / "fifo", ""); }), "expected a regular file"));
}

TEST_CASE("measure: child: makes progress" * doctest::skip()) {
    REQUIRE(dup2(STDOUT_FILENO, STDERR_FILENO) >= 0);
    note("%s", "a\nb, \xc2\xb5");
    progress("the first at once");
    progress("right after it");
    usleep(5100000);
    progress("%d s later", 5);
    progress("right after it");
}
TEST_CASE("measure: notes are lines, and progress is one at most every five seconds") {
    string text = run_case("measure: child: makes progress");
    CHECK(has(text, "a\\x0ab, \xc2\xb5\n"));
    CHECK(has(text, "the first at once\n"));
    CHECK(has(text, "5 s later\n"));
    CHECK(!has(text, "right after it"));
}
TEST_CASE("measure: without address space for OpenBLAS's buffers the program says so, and ends") {
    if (device_description().find("OpenBLAS") == string::npos || __asan_init) { return; }
    if (cuda_devices() > 0) { return skip_this_case("CUDA's libraries need more address space"); }
    // OpenBLAS 0.3.29 takes a buffer while it is loaded, and tries for ever below some 300 MB,
    // before our program begins. So the test looks for the least limit under which it does begin.
    string limited;
    for (int kb = 150000; kb <= 500000; kb += 50000) {
        limited = strprintf("ulimit -v %d; timeout 5 ", kb) + program();
        if (system((limited + " list --device cpu >/dev/null").c_str()) == 0) { break; }
        CHECK_MESSAGE(kb < 500000, "list --device cpu within 500 MB of addresses");
    }
    CHECK(system((limited + " info --quick --device cpu 2>&1 | grep -q 'no room for OpenBLAS'")
                     .c_str()) == 0);
}
