// test.h: what all tests share. A test of an op runs on both devices:
//
//   TEST_CASE_TEMPLATE("softmax", D, OnCPU, OnCUDA) {
//       if (!begin<D>()) { return; }
//       ...
//   }
//
// Without a GPU the OnCUDA half counts as skipped; with CS336_REQUIRE_GPU=1 in the environment it
// fails instead.
#pragma once
#ifndef HAVE_CUDA
#pragma GCC optimize("O0")  // of what follows: it takes longer to compile than to run
#endif
#include "attention.h"
#include "fast_ways.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <sstream>

struct OnCPU {
    static constexpr Device device = CPU;
};
struct OnCUDA {
    static constexpr Device device = CUDA;
};
TYPE_TO_STRING(OnCPU);
TYPE_TO_STRING(OnCUDA);

inline string program() {
    const char* path = getenv("CS336_BINARY");
    return path ? path : "./cs336";
}
// Runs program() to its end.
struct Run {
    int exit_code;  // -1: died of a signal
    string out, err;
};
Run run_cs336(const vector<string>& words, const char* stdout_path = nullptr);
Run run_shell(const string& line);  // both streams are in out

// A folder of this test's own in /tmp. It goes with all that is in it.
struct Folder {
    string path;
    Folder() {
        char name[] = "/tmp/cs336_test_XXXXXX";
        REQUIRE(mkdtemp(name));
        path = name;
    }
    Folder(const Folder&) = delete;
    ~Folder() {
        std::error_code ignored;
        std::filesystem::remove_all(path, ignored);
    }
    string operator/(const string& name) const { return path + "/" + name; }
    vector<string> files() const {
        vector<string> names;
        for (const auto& entry : std::filesystem::directory_iterator(path)) {
            names.push_back(entry.path().filename());
        }
        return names;
    }
};

string read_file(const string& path);
void write_file(const string& path, const string& text);

inline bool has(const string& text, const string& part) { return text.find(part) != string::npos; }

// What f throws: its message, after its exit code.
inline string failure_of(const Job& f) {
    try {
        f();
    } catch (const Failure& e) { return strprintf("%d: %s", e.exit_code, e.what()); }
    return "nothing thrown";
}
// What print() and answer() write while f runs.
inline string printed(const Job& f) {
    string text;
    printed_to = &text;
    f();
    printed_to = nullptr;
    return text;
}

// text has all these phrases, and nothing of what a sentence must not have.
inline void check_says(const string& text, const vector<string>& phrases,
                       const vector<string>& nowhere = {"nan", "inf ", "  ", "()", " .", " ,", "( ",
                                                        "1 calls", "1 ranks", "1 configurations"}) {
    for (const string& phrase : phrases) {
        CHECK_MESSAGE(has(text, phrase), phrase, " in: ", text);
    }
    for (const string& never : nowhere) {
        CHECK_MESSAGE(!has(text, never), "'", never, "' in: ", text);
    }
}
inline Stats times(double ms, double std = 0) { return {ms, std, ms, ms, ms, 100}; }
inline PassTimes passes(double forward, double backward, double both = NAN, double held_MiB = 0) {
    return {{times(forward), times(backward), times(both)}, (size_t)(held_MiB * 1048576), 0};
}
inline PassTimes oom() {
    PassTimes t;
    t.oom = (size_t)161 << 30;
    return t;
}

// The cells of the column `name`, from all Markdown tables of a program's output that have one.
inline vector<string> column(const string& output, const string& name) {
    vector<string> found;
    int wanted = -1, lines = 0;  // lines: of this table, so far
    std::istringstream text(output);
    for (string line; std::getline(text, line);) {
        lines = line.compare(0, 2, "| ") == 0 ? lines + 1 : 0;
        if (lines == 1) { wanted = -1; }
        size_t at = 2;
        for (int i = 0; lines > 0 && at < line.size(); i++) {
            const size_t end = line.find(" |", at), first = line.find_first_not_of(' ', at);
            string cell = first < end ? line.substr(first, end - first) : "";
            cell.erase(cell.find_last_not_of(' ') + 1);
            if (lines == 1 && cell == name) { wanted = i; }
            if (lines > 2 && i == wanted) { found.push_back(cell); }
            at = end + 3;
        }
    }
    return found;
}

// main.cpp: counts the running test case as skipped; return after it
void skip_this_case(const char* why);

inline bool gpu_required() {
    const char* value = getenv("CS336_REQUIRE_GPU");
    return value && strcmp(value, "1") == 0;
}

// While it lives, flash attention on a GPU is flash_v1, which gives the same bits in every run.
struct OnlyFlashV1 {
    std::list<AttentionImpl> all = table_of<AttentionImpl>();
    OnlyFlashV1() {
        table_of<AttentionImpl>().remove_if(
            [](const AttentionImpl& i) { return i.device == CUDA && i.rung > 30; });
    }
    ~OnlyFlashV1() { table_of<AttentionImpl>() = all; }
};

// Every test starts from the same context. False: there is no such device here; return.
inline bool begin_on(Device device) {
    clear_tape();
    context = Context();
    context.device = device;
    if (device != CUDA || cuda_devices() > 0) { return true; }
    context.device = CPU;
    if (gpu_required()) {
        FAIL("CS336_REQUIRE_GPU=1, but no GPU was found (or this is a CPU build)");
    }
    skip_this_case("no GPU");
    return false;
}

template <class D>
bool begin() {
    return begin_on(D::device);
}

inline string setting_now() {
    return strprintf("%s %s", name_of(context.mode), name_of(context.precision));
}
inline double largest(const Tensor& t) {  // NaN if it holds one
    double m = 0;
    for (double x : to_doubles(t)) { m = m >= fabs(x) || std::isnan(m) ? m : fabs(x); }
    return m;
}

// Models for tests.
// head size 4; nothing is a multiple of a tile
inline const ModelConfig tiny = {"tiny", 12, 10, 2, 3, 19};
inline const ModelConfig odd = {"odd", 66, 130, 2, 3, 257};   // head size 22
inline const ModelConfig even = {"even", 64, 72, 2, 2, 264};  // whole packs of 16 bytes in all rows
inline Tensor on_cpu(const Tensor& t) { return to_device(contiguous(detached(t)), CPU); }

// A test that needs ranks launches this program again as n ranks, each of which runs the same test
// case and, once connected, f.
inline void in_ranks(const char* test_case, int n, Device device,
                     const function<void(const Communicator&)>& f) {
    if (!is_rank()) {
        CHECK(launch_ranks(n, {string("-tc=") + test_case, "-nv", "-m"}) == 0);
        return;
    }
    if (getenv("WORLD_SIZE") != std::to_string(n)) { return; }
    CHECK(join_ranks(n, name_of(device), "auto", 20, f) == 0);
}
inline bool lacks(const char* backend, Device device, int n) {
    string why = why_not(backend, device, n);
    if (why.empty()) { return false; }
    skip_this_case(why.c_str());
    return true;
}

// test_model.cpp: a model of PyTorch's in tests/fixtures, and what three of its steps give in pure
// bf16.
struct Setup {
    Model model;
    Tensor tokens, targets;
};
Setup fixture_setup();
struct PureSetting {
    Mode mode;
    const char* checkpoint;
    int head_chunk;
    bool recompute;
};
extern const vector<PureSetting> pure_settings;
bool begin_pure(const PureSetting& s);  // false: this device has no such attention
using ByName = std::map<string, Tensor>;
Tensor copied(const Tensor& t);
void check_pure_bf16(double loss, const ByName& gradients, const ByName& after);
