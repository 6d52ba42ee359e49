// Tests of memory.cu and of the log in measure.cu.
#include "answers.h"
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

TEST_CASE_TEMPLATE("memory log: an operation's allocation names its own line in tensor.cu", D, OnCPU, OnCUDA,
                   OnMetaToo) {
    if (!begin<D>()) { return; }
    Tensor a = empty({8}, F32);
    start_memory_log(D::device);
    mul(a, a);
    std::vector<MemoryEvent> log = stop_memory_log();
    REQUIRE(log.size() >= 2);
    const Source& at = log[log.size() - 2].at;
    CHECK(std::string(at.function) == "mul");
    CHECK(std::string(at.file).find("tensor.cu") != std::string::npos);
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

TEST_CASE("memory log: peak_of refuses what does not pair up") {
    MemoryEvent alloc{0, true, 64, 10, ACTIVATIONS, {}, here()}, free = alloc;
    free.is_alloc = false;
    CHECK(peak_of({}) == 0);
    size_t at = 9;
    MemoryEvent other{0, true, 128, 10, ACTIVATIONS, {}, here()};
    CHECK(peak_of({alloc, free, alloc}, &at) == 10);
    CHECK(at == 0);
    CHECK(peak_of({alloc, other, free}, &at) == 20);
    CHECK(at == 1);
    CHECK_THROWS_AS(peak_of({alloc, alloc}), Failure);
    CHECK_THROWS_AS(peak_of({alloc, free, free}), Failure);
    free.bytes = 9;
    CHECK_THROWS_AS(peak_of({alloc, free}), Failure);
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
    elif op.name == 'TUPLE2': counts[-1] -= 1
    elif op.name not in ('PROTO', 'LONG_BINPUT', 'STOP'): counts[-1] += 1
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

TEST_CASE("memory_profiling: tables and files; what is predicted is what happens") {
    Folder folder;
    std::string out = folder / "new";
    Run r = run_cs336({"memory_profiling", "--device", "cpu", "--size", "small", "--context_length", "32",
                       "--precision", "fp32", "--format", "csv", "--out", out});
    CHECK(r.exit_code == 0);
    // B*T*C*4 = 4*32*768*4
    CHECK(r.out.find("small,32,fp32,393216,0.4,393216,gather_rows tensor.cu:") != std::string::npos);
    CHECK(r.out.find("parameters,held,make_model,model.cu:") != std::string::npos);
    size_t tiny = r.out.find("\ntiny,64,");
    REQUIRE(tiny != std::string::npos);
    double peak[3], predicted[3];  // forward, forward with tape, step
    REQUIRE(sscanf(r.out.c_str() + tiny, "\ntiny,64,%lf,%lf,%lf,%lf,%lf,%lf", &peak[0], &peak[1], &peak[2],
                   &predicted[0], &predicted[1], &predicted[2]) == 6);
    for (int i = 0; i < 3; i++) { CHECK(peak[i] == predicted[i]); }
    CHECK(peak[0] < peak[1]);
    CHECK(peak[1] < peak[2]);
    for (const char* which : {"", "_tiny_64_fp32"}) {  // the predicted ones, and those of what really ran
        for (const char* phase : {"forward", "step"}) {
            CHECK(unlink((out + "/timeline_" + phase + which + ".svg").c_str()) == 0);
            CHECK(unlink((out + "/snapshot_" + phase + which + ".pickle").c_str()) == 0);
        }
    }
    CHECK(rmdir(out.c_str()) == 0);

    r = run_cs336({"memory_profiling", "--context_length", "128,x"});
    CHECK(r.exit_code == 2);
    CHECK(r.err.find("--context_length: got '128,x', takes whole numbers") != std::string::npos);
    r = run_cs336({"memory_profiling", "--out", "/nonexistent/folder"});
    CHECK(r.exit_code == 2);
    CHECK(r.err.find("--out: got '/nonexistent/folder', takes a folder") != std::string::npos);
}

// B*H*T numbers of 4 bytes less than PyTorch, whose max keeps its int64 indices where ours keeps the fp32 maximum.
constexpr int64_t XL_IN_PYTORCH = 6818955264, XL_OURS = XL_IN_PYTORCH - 4 * 32 * 2048 * 4;

TEST_CASE("memory_profiling (f): planned is measured, gradients are the formula's, the large block is PyTorch's") {
    for (const std::string mode : {"eager", "fused", "flash"}) {
        CAPTURE(mode);
        bool flash = mode == "flash";  // on the CPU it runs in fp32 only
        Run r = run_cs336({"memory_profiling", "--device", "cpu", "--context_length", "2048", "--mode", mode,
                           "--precision", "fp32,bf16,pure_bf16"});
        REQUIRE(r.exit_code == 0);
        Tables tables = tables_in(r.out), operations = tables_with(tables, {"(f): what"}),
               blocks = tables_with(tables, {"(f): memory"});
        REQUIRE(blocks.size() == 2);  // the planned one, and what really ran
        for (int k = 0; k < 2; k++) {
            std::vector<TableRow> rows = rows_of(blocks[k]);
            REQUIRE(rows.size() == (flash && k == 1 ? 1 : 3));
            for (const TableRow& row : rows) {
                CAPTURE(row.text("precision"));
                CHECK(row.text("size") == (k == 0 ? "2.7B" : "tiny"));
                CHECK(row.number("saved") > 0);
                CHECK(row.text("saved") == row.text("predicted"));
                CHECK(row.text("gradients: change + saved - copies") == row.text("by formula"));
                double sum = 0, last = INFINITY;
                for (const TableRow& op : rows_of(operations[k], {{"precision", row.text("precision")}})) {
                    sum += op.number("bytes");
                    if (op.text("op") != "the rest") {
                        CHECK(op.number("bytes") <= last);
                        last = op.number("bytes");
                    }
                    CHECK(op.number("%") ==
                          doctest::Approx(100 * op.number("bytes") / row.number("saved")).epsilon(.1));
                }
                CHECK(sum == row.number("saved"));
            }
        }
        TableRow xl = rows_of(blocks[0])[0];
        CHECK(xl.text("by formula") == "419450880");
        CHECK(xl.text("input's gradient") == "83886080");
        if (mode == "eager") { CHECK(xl.text("saved") == std::to_string(XL_OURS)); }
    }
}

TEST_CASE("memory_profiling: mode flash is predicted in precisions that the CPU's FlashAttention lacks") {
    std::vector<std::string> words = {"memory_profiling", "--device", "cpu",    "--size", "small",
                                      "--context_length", "64",       "--mode", "flash"};
    Run r = run_cs336(words);
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    Tables tables = tables_in(r.out);
    auto peak = [&](const char* precision, const char* phase) {
        Tables found = tables_with(tables, {"(b): precision " + std::string(precision), "; predicted: "});
        REQUIRE(found.size() == 1);
        return rows_of(found[0])[0].number(std::string(phase) + " peak MiB");
    };
    const bool copies = table_of<WeightForm>().empty();  // 16-bit weights beside those in fp32; else these are split
    for (const char* phase : {"forward", "full step"}) {
        CHECK((copies ? peak("bf16", phase) >= peak("fp32", phase) : peak("bf16", phase) < peak("fp32", phase)));
    }
    CHECK(rows_of(*table_with(tables, {"(f): memory", "; predicted: "})).size() == 2);
    Tables run = tables_with(tables, {"(b)", "; really run, "});  // in fp32 alone, and its caption says so
    REQUIRE(run.size() == 1);
    CHECK(has(run[0].caption, "(b): precision fp32; "));
    CHECK(has(run[0].caption, ", precision fp32 instead of fp32,bf16"));

    words.insert(words.end(), {"--precision", "bf16"});
    r = run_cs336(words);
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    CHECK(!has(r.out, "really run"));
    CHECK(has(r.err, "no small model ran: the CPU's FlashAttention has no bf16\n"));
}
TEST_CASE("memory_profiling: a small card measures a smaller size, unless the size was typed") {
    auto plan = [](const std::vector<std::string>& more) {
        std::vector<std::string> words = {"memory_profiling", "--plan", "--format", "csv", "--memory"};
        words.insert(words.end(), more.begin(), more.end());
        Run r = run_cs336(words);
        REQUIRE_MESSAGE(r.exit_code == 0, r.err);
        return read_csv(r.out);
    };
    Table small = plan({"8GiB"});
    CHECK(has(small.caption, "; scaled down: size small instead of 2.7B, which does not fit"));
    for (size_t i = 0; i + 1 < small.rows.size(); i++) {  // the last one is the sum
        CHECK(has(small.rows[i][0], "small"));
        CHECK(small.rows[i][2] == "yes");
    }
    for (const Table& whole : {plan({"130GiB"}), plan({"8GiB", "--size", "2.7B"})}) {
        CHECK(!has(whole.caption, "scaled down"));
        CHECK(has(whole.rows[0][0], "2.7B, batch 4"));
    }
}
TEST_CASE("memory_profiling (f): left out with gradient checkpoints") {
    Run r = run_cs336({"memory_profiling", "--device", "cpu", "--size", "small", "--context_length", "32",
                       "--precision", "fp32", "--checkpoint", "2"});
    CHECK(r.exit_code == 0);
    CHECK(has(r.out, "memory_profiling (e)"));
    CHECK(!has(r.out, "memory_profiling (f)"));
    CHECK(has(r.out, "\n**(f)** Left out: (f) needs a run without `--checkpoint`"));
}
TEST_CASE(
    "memory_profiling: each caption says on which device and commit, each allocation the function that it names") {
    Run r = run_cs336({"memory_profiling", "--device", "cpu", "--size", "small", "--context_length", "32",
                       "--precision", "fp32,bf16"});
    REQUIRE(r.exit_code == 0);
    Tables tables = tables_in(r.out);
    for (const char* words : {"(c): what bf16 adds", "(d)", "(e)"}) {
        const Table* table = table_with(tables, {words});
        REQUIRE(table);
        CHECK_MESSAGE(has(table->caption, "; meta (nothing is computed); commit "), table->caption);
    }
    CHECK(row_of(*table_with(tables, {"(e)"}), {{"op", "linear"}}));
    CHECK(!has(r.out, "linear_of"));
}

TEST_CASE("pytorch_attention: the buffers at the peak add up to it") {
    Run r = run_cs336({"pytorch_attention", "--device", "cpu", "--quick", "--steps", "1"});
    REQUIRE(r.exit_code == 0);
    Tables tables = tables_in(r.out);
    const Table* table = table_with(tables, {"the smallest configuration that does not fit"});
    REQUIRE(table);
    double saved = 0, peak = 0;
    for (const TableRow& row : rows_of(*table)) {
        if (!(row.number("bytes each") > 0)) { continue; }
        saved += row.number("bytes each") * row.number("buffers");
        peak += row.number("bytes each") * row.number("buffers at the peak");
    }
    CHECK(saved == row_of(*table, {{"what", "all"}}).number("bytes"));
    CHECK(peak == row_of(*table, {{"what", "peak in backward"}}).number("bytes"));
    CHECK(has(r.out, "are 2 arrays of B S^2"));
}
