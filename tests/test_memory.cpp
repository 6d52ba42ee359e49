// Tests of memory.cu and of the log in lib/device.cu.
#include "test.h"

#include <cstdio>
#include <set>
#include <thread>

#include <unistd.h>

struct OnMetaToo {
    static constexpr Device device = META;
};
TYPE_TO_STRING(OnMetaToo);

static bool python_is_there() {
    if (system("python3 -c 'import pickle' 2>/dev/null") == 0) { return true; }
    skip_this_case("no python3");
    return false;
}

TEST_CASE_TEMPLATE("memory log: off it holds nothing; on, every event with its bytes, category, ranges and line", D,
                   OnCPU, OnCUDA, OnMetaToo) {
    if (!begin<D>()) { return; }
    CHECK(stop_memory_log().empty());
    Tensor before = empty({100}, F32, INPUTS);
    empty({7}, F32);
    CHECK(stop_memory_log().empty());

    start_memory_log(D::device);
    size_t held = memory_use(D::device).now;
    int line = 0;
    {
        Range outer("outer"), inner("inner");
        line = __LINE__ + 1;
        Tensor t = empty({256}, F32, GRADIENTS);
    }
    before = Tensor();
    empty({0}, F32);  // nothing comes or goes
    std::vector<MemoryEvent> log = stop_memory_log();
    empty({7}, F32);

    size_t first = 0, held_in_log = 0;  // what was there already comes first
    while (first < log.size() && log[first].ms == 0) {
        CHECK(log[first].is_alloc);
        held_in_log += log[first++].bytes;
    }
    CHECK(held_in_log == held);
    REQUIRE(log.size() == first + 3);
    const MemoryEvent &alloc = log[first], &free = log[first + 1], &last = log[first + 2];
    CHECK(alloc.is_alloc);
    CHECK(alloc.bytes == 1024);
    CHECK(alloc.category == GRADIENTS);
    CHECK(alloc.ranges == std::vector<const char*>{"outer", "inner"});
    CHECK(alloc.at.line == line);
    CHECK(std::string(alloc.at.file).find("test_memory.cpp") != std::string::npos);
    CHECK(!free.is_alloc);
    CHECK(free.address == alloc.address);
    CHECK(free.bytes == 1024);
    CHECK(free.ms >= alloc.ms);
    CHECK(!last.is_alloc);
    CHECK(last.bytes == 400);
    CHECK(last.category == INPUTS);
}

TEST_CASE_TEMPLATE("memory log: an operation's allocation names its own line in lib/tensor.cu", D, OnCPU, OnCUDA,
                   OnMetaToo) {
    if (!begin<D>()) { return; }
    Tensor a = empty({8}, F32);
    start_memory_log(D::device);
    mul(a, a);
    std::vector<MemoryEvent> log = stop_memory_log();
    REQUIRE(log.size() >= 2);
    const Source& at = log[log.size() - 2].at;
    CHECK(std::string(at.function) == "mul");
    CHECK(std::string(at.file).find("lib/tensor.cu") != std::string::npos);
}

static size_t peak_of(const std::vector<MemoryEvent>& log) {  // fails unless allocations and frees pair up by address
    std::map<uint64_t, size_t> held;
    size_t now = 0, peak = 0;
    for (const MemoryEvent& e : log) {
        if (e.is_alloc) {
            REQUIRE(held.emplace(e.address, e.bytes).second);
        } else {
            REQUIRE(held[e.address] == e.bytes);
            held.erase(e.address);
        }
        now += e.is_alloc ? e.bytes : -e.bytes;
        peak = std::max(peak, now);
    }
    return peak;
}
static std::vector<MemoryEvent> log_of_step(Device device) {
    ModelConfig c = {"tiny", 64, 128, 2, 4, 100};
    Model model = random_model(c, 0);
    Batch batch = random_batch(2, 16, c.vocab_size, 0);
    LossScaler scaler;
    run_phase(STEP, model, batch, scaler);
    reset_peak(device);
    start_memory_log(device);
    run_phase(STEP, model, batch, scaler);
    return stop_memory_log();
}

TEST_CASE_TEMPLATE("memory log: its peak is the allocator's, in every mode and precision", D, OnCPU, OnCUDA,
                   OnMetaToo) {
    if (!begin<D>()) { return; }
    for (Mode mode : {EAGER, FUSED}) {
        for (Precision precision : {FP32, PREC_BF16}) {
            context.mode = mode, context.precision = precision;
            std::vector<MemoryEvent> log = log_of_step(D::device);
            CHECK(peak_of(log) == memory_use(D::device).peak);
            std::set<Category> seen;
            std::set<std::string> phases, in_backward;
            for (const MemoryEvent& e : log) {
                seen.insert(e.category);
                if (e.ranges.empty() || e.ms <= 0) { continue; }
                phases.insert(e.ranges[0]);
                if (phases.count("backward")) { in_backward.insert(e.ranges.back()); }
            }
            for (Category c : {PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, INPUTS}) { CHECK(seen.count(c) == 1); }
            bool copies = mode == EAGER || table_of<WeightForm>().empty();  // else the weights are split
            CHECK(seen.count(WEIGHT_COPIES) == (precision == PREC_BF16 && copies));
            for (const char* phase : {"forward", "loss", "backward"}) { CHECK(phases.count(phase) == 1); }
            for (const char* op : {"swiglu", "projections", "lm_head"}) { CHECK(in_backward.count(op) == 1); }
        }
    }
}

TEST_CASE("memory log: threads may free what others allocated") {
    begin_on(CPU);
    start_memory_log(CPU);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++) {
        threads.emplace_back([] {
            for (int k = 0; k < 500; k++) { allocate(CPU, 64 + k, WORKSPACE); }
        });
    }
    Tensor t = empty({1000}, F32);
    threads.emplace_back([taken = std::move(t)]() mutable { taken = Tensor(); });
    for (std::thread& thread : threads) { thread.join(); }
    std::vector<MemoryEvent> log = stop_memory_log();
    CHECK(log.size() >= 4002);
    CHECK(peak_of(log) >= 4000);
}

// Python checks the pickle: alloc and free pair up by address, no two segments overlap, what is left is what `segments`
// says, the category 'unknown' is there, and so are our peak and end.
static const char* const check_pickle = R"(
import pickle, pickletools, sys
data = open(sys.argv[1], 'rb').read()
snapshot = pickle.loads(data)
assert data[:2] == b'\x80\x02' and data[-1:] == b'.'
[trace] = snapshot['device_traces']
live, mapped, now, peak, pending = {}, {}, 0, 0, None
for e in trace:
    assert all(type(e[k]) is t for k, t in dict(action=str, addr=int, size=int, stream=int, time_us=int, frames=list).items())
    assert all(sorted(f) == ['filename', 'line', 'name'] for f in e['frames'])
    a, n = e['addr'], e['size']
    if e['action'] == 'segment_alloc':
        assert a not in mapped; mapped[a] = n
    elif e['action'] == 'alloc':
        assert mapped[a] == n and a not in live; live[a] = n; now += n; peak = max(peak, now)
    elif e['action'] == 'free_requested':
        assert live[a] == n; pending = a
    elif e['action'] == 'free_completed':
        assert pending == a; now -= live.pop(a)
    elif e['action'] == 'segment_free':
        assert mapped.pop(a) == n
    else:
        assert e['action'] == 'snapshot' and e is trace[-1]
assert 'unknown' in {e['category'] for e in trace}
segments = snapshot['segments']
assert {s['address']: s['total_size'] for s in segments} == live == mapped
assert all(sum(b['size'] for b in s['blocks']) == s['total_size'] for s in segments)
# The most items between a MARK and its APPENDS.
counts, longest = [0], 0
for op, _, _ in pickletools.genops(data):
    if op.name == 'MARK': counts.append(0)
    elif op.name == 'APPENDS': longest = max(longest, counts.pop())
    elif op.name == 'SETITEMS': counts.pop()
    elif op.name not in ('PROTO', 'STOP'): counts[-1] += 1
assert longest == min(len(trace), 1000)
print(len(trace), peak, now)
)";

TEST_CASE("snapshot: Python reads the pickle, and finds our log in it") {
    if (!begin_on(CPU) || !python_is_there()) { return; }
    context.mode = EAGER;
    std::vector<MemoryEvent> log = log_of_step(CPU);
    size_t now = 0, events = 1;
    REQUIRE(log.size() > 500);  // more than a batch of events
    for (const MemoryEvent& e : log) {
        now += e.is_alloc ? e.bytes : -e.bytes;
        events += e.is_alloc ? 2 : 3;
    }
    Folder folder;
    std::string pickle = folder / "snapshot.pickle", script = folder / "check.py";
    save_file(script, check_pickle);
    save_file(pickle, snapshot_pickle(log));
    Run python = run_shell("python3 " + script + " " + pickle);
    CHECK(python.exit_code == 0);
    CHECK(python.out == strprintf("%zu %zu %zu\n", events, peak_of(log), now));
    save_file(pickle, snapshot_pickle({}));
    CHECK(system(("python3 " + script + " " + pickle + " >/dev/null").c_str()) == 0);
}

TEST_CASE("memory_profiling: tables and files") {
    Folder folder;
    std::string out = folder / "new";
    Run r = run_cs336({"memory_profiling", "--device", "cpu", "--size", "small", "--context_length", "32",
                       "--precision", "fp32", "--format", "csv", "--out", out});
    CHECK(r.exit_code == 0);
    CHECK(has(r.out, "4 x 32 x 768 x 4 / 1024^2 = 0.4 MiB"));
    CHECK(has(r.out, ",parameters,held,make_model,model.cu:"));
    CHECK(has(r.out,
              "predicted, batch 4, vocabulary 10000; every allocation counted; meta (nothing is computed); commit "));
    for (const char* phase : {"forward", "step"}) {
        CHECK(unlink((out + "/snapshot_" + phase + "_small_32_fp32.pickle").c_str()) == 0);
    }
    CHECK(rmdir(out.c_str()) == 0);
    r = run_cs336({"memory_profiling", "--context_length", "128,x"});
    CHECK(r.exit_code == 2);
    CHECK(has(r.err, "--context_length"));
    r = run_cs336({"memory_profiling", "--out", "/nonexistent/folder"});
    CHECK(r.exit_code == 2);
    CHECK(has(r.err, "--out"));
}

static void check_as_planned(const MemoryRun& planned, const MemoryRun& run) {
    const bool copies = multiplies_copies(CPU, matmul_dtype(run.precision));  // in fp32, which a GPU's plan lacks
    for (PhaseMemory MemoryRun::*phase : {&MemoryRun::forward, &MemoryRun::taped, &MemoryRun::step}) {
        CHECK(((run.*phase).peak == (planned.*phase).peak || copies));
    }
    CHECK(run.forward.peak < run.taped.peak);
    CHECK(run.taped.peak < run.step.peak);
    CHECK(run.block.bytes > 0);
    CHECK(run.block.bytes == planned.block.bytes);
    CHECK(run.block.copies == planned.block.copies);
    CHECK(run.block.change == planned.block.change);
    CHECK(run.block.change + run.block.bytes - run.block.copies == run.block.formula);
    CHECK(run.stream == (size_t)run.B * run.T * run.config.d_model * size_of(weight_dtype(run.precision)));
}
TEST_CASE("memory_profiling: what is predicted is what happens, and gradients are the formula's") {
    if (!begin_on(CPU)) { return; }
    const ModelConfig c = {"tiny", 256, 1024, 2, 4, 1000};
    for (Mode mode : {EAGER, FUSED, FLASH}) {
        for (Precision precision : {FP32, PREC_BF16, PREC_PURE_BF16}) {
            context.mode = mode, context.device = CPU, context.precision = precision;
            if (mode == FLASH && fastest_mode(c, precision) != FLASH) { continue; }
            CAPTURE(setting());
            const MemoryRun run = profile_memory(c, precision, 2, 64, 0, "");
            Planning planning;
            check_as_planned(profile_memory(c, precision, 2, 64, 0, ""), run);
        }
    }
}
// B*H*T numbers of 4 bytes less than PyTorch, whose max keeps its int64 indices where ours keeps the fp32 maximum.
constexpr int64_t XL_IN_PYTORCH = 6818955264, XL_OURS = XL_IN_PYTORCH - 4 * 32 * 2048 * 4;

TEST_CASE(
    "memory_profiling (f): the large block is PyTorch's, in every mode and precision its gradients the formula's") {
    if (!begin_on(CPU)) { return; }
    Planning planning;
    for (Mode mode : {EAGER, FUSED, FLASH}) {
        for (Precision precision : {FP32, PREC_BF16, PREC_PURE_BF16}) {
            context.mode = mode, context.precision = precision;
            CAPTURE(setting());
            const ModelConfig c = {"xl (2026)", 2560, 10240, 32, 32, 10000};
            const BlockMemory m = profile_memory(c, precision, 4, 2048, 0, "").block;
            CHECK(m.change + m.bytes - m.copies == m.formula);
            if (precision != FP32) { continue; }
            CHECK(m.formula == 419450880);
            if (mode == EAGER) { CHECK(m.bytes == XL_OURS); }
        }
    }
}
TEST_CASE("memory_profiling: mode flash is predicted in precisions that the CPU's FlashAttention lacks") {
    Run r = run_cs336(
        {"memory_profiling", "--device", "cpu", "--size", "small", "--context_length", "64", "--mode", "flash"});
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    for (const char* precision : {"fp32", "bf16"}) {
        CHECK(has(r.out, strprintf("(b): precision %s; size small, mode flash, ", precision)));
    }
}
TEST_CASE("memory_profiling (f): left out with gradient checkpoints") {
    Run r = run_cs336({"memory_profiling", "--device", "cpu", "--size", "small", "--context_length", "32",
                       "--precision", "fp32", "--checkpoint", "2"});
    CHECK(r.exit_code == 0);
    CHECK(has(r.out, "memory_profiling (e)"));
    CHECK(!has(r.out, "memory_profiling (f)"));
    CHECK(has(r.out, "\n**(f)** Left out"));
}
