// Tests of profile.cu, of lib/trace.cu, and of the memory log in lib/device.cu.
#include "profile.cu"

#include "test.h"

#include <regex>
#include <set>
#include <sstream>
#include <thread>

#include <sys/syscall.h>

static Run run_words(const string& words) {  // of the program, parted by blanks
    std::istringstream text(words);
    return run_cs336({std::istream_iterator<string>(text), {}});
}
static bool has_python() {
    if (system("python3 -c 'import json, pickle' 2>/dev/null") == 0) { return true; }
    skip_this_case("no python3");
    return false;
}
// what the script prints
static string python(const string& script, const string& argument) {
    Folder folder;
    write_file(folder / "check.py", script);
    Run r = run_shell("python3 " + folder / "check.py" + " " + argument);
    CHECK_MESSAGE(r.exit_code == 0, r.out);
    return r.out;
}

// -------------------------------------------------------------------------------------------------
// Traces

TEST_CASE("profile: ranges nest, each thread's by themselves") {
    begin_on(CPU);
    CHECK(innermost_range_number() == -1);
    {
        Range before("before the trace");
        start_tracing();
        Range step("step"), inner("forward");
        vector<std::thread> threads;
        for (int i = 0; i < 4; i++) {
            threads.emplace_back([] {
                for (int k = 0; k < 100; k++) { Range outer("outer"), inner("inner"); }
            });
        }
        for (std::thread& t : threads) { t.join(); }
    }
    const Trace trace = stop_tracing();
    map<string, int> paths;
    for (const string& path : range_paths(trace)) { paths[path]++; }
    CHECK(paths ==
          map<string, int>{{"step", 1}, {"step/forward", 1}, {"outer", 400}, {"outer/inner", 400}});
    set<int> threads;
    for (const TracedRange& r : trace.ranges) {
        threads.insert(r.thread);
        const TracedRange& parent = r.parent < 0 ? r : trace.ranges[r.parent];
        CHECK(parent.thread == r.thread);
        CHECK((parent.start <= r.start && r.start <= r.end && r.end <= parent.end));
    }
    CHECK(threads.size() == 5);
}
TEST_CASE("profile: a trace knows nothing of the one before") {
    begin_on(CPU);
    Tensor x = require_gradient(from_floats({1, 2}, {2})), y;
    start_tracing();
    {
        Range range("forward");
        y = square(x);
    }
    auto open = std::make_unique<Range>("open at the end");
    Trace first = stop_tracing();
    REQUIRE(first.ranges.size() == 2);
    CHECK(first.ranges[1].end >= first.ranges[1].start);
    start_tracing();
    backward_from(y, y);
    { Range range("new"); }
    open.reset();
    CHECK(range_paths(stop_tracing()) == vector<string>{"forward", "new"});

    start_tracing();
    run_if_fits("", 0, [] { throw OutOfMemory("no memory"); });
    { Range range("after it"); }
    CHECK(stop_tracing().ranges.empty());  // memory ran out, which ended the trace
}
TEST_CASE("profile: backward's work stands where the forward recorded it") {
    begin_on(CPU);
    Tensor x = require_gradient(from_floats({1, 2, 3, 4}, {2, 2})), y;
    start_tracing();
    {
        Range step("step");
        {
            Range forward("forward"), layer("layer"), attention("attention");
            y = matmul(x, x);
        }
        Range back("backward");
        backward_from(y, y);
    }
    Trace trace = stop_tracing();
    const vector<string> paths = range_paths(trace);
    for (const char* path :
         {"step/forward/layer/attention/matmul", "step/backward/layer/attention/matmul"}) {
        CHECK(std::count(paths.begin(), paths.end(), path) >= 1);
    }
    trace.work = work_of_ranges(trace);
    // each moment counts once
    CHECK(total(kernels_of(trace)) == trace.ranges[0].end - trace.ranges[0].start);
}

// step (0..1000): forward/softmax, backward/softmax (recorded in 2), optimizer
static Trace made_up_trace() {
    int64_t day = 86400LL * 1000000000, t = 20000 * day + 5;
    Trace trace;
    trace.ranges = {{"step", -1, -1, 77, t, t + 1000},
                    {"forward", 0, -1, 77, t + 10, t + 400},
                    {"soft\"max\\\n", 1, -1, 77, t + 20, t + 90},
                    {"backward", 0, -1, 77, t + 400, t + 800},
                    {"soft\"max\\\n", 3, 2, 77, t + 420, t + 500},
                    {"optimizer", 0, -1, 78, t + 800, t + 990}};
    auto work = [&](const char* name, int range, int64_t start, int64_t ns, unsigned stream) {
        trace.work.push_back({name, range, t + start, t + start + ns, stream, 1});
    };
    work("void softmax_kernel<float>(float*, int)", 2, 100, 30, 7);
    work("void softmax_kernel<float>(float*, int)", 2, 120, 50, 7);  // overlaps the one before
    work("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", 1, 200, 100, 7);
    work("void softmax_kernel<float>(float*, int)", 4, 500, 60, 7);
    work("[CUDA memset]", -1, 700, 10, 8);
    return trace;
}
TEST_CASE("profile: kernels of made-up records") {
    begin_on(CUDA);
    context.device = CUDA;
    Trace trace = made_up_trace();
    const Kernels all = kernels_of(trace), kernels = by_name(all);
    REQUIRE(all.size() == 4);  // the copy is in no range
    REQUIRE(kernels.size() == 2);
    CHECK(kernels[0].kernel == "softmax_kernel<float>");
    CHECK(total({kernels[0]}) == 140);
    CHECK(stats_of(kernels[0].ns).std == doctest::Approx(15.2752523));
    CHECK(total(in(all, "forward")) == 180);
    CHECK(in(all, "forw").empty());  // whole names only
    CHECK(about_first(all, 1) == "`softmax_kernel<float>` (58.3 %, 3 times per pass)");

    trace.ranges = {
        {"forward", -1, -1, 1, 0, 9}, {"forward", -1, -1, 1, 10, 99}, {"x", 1, -1, 1, 11, 98}};
    trace.work.resize(3);
    for (int i : {0, 1, 2}) {
        trace.work[i].range = i;
        trace.work[i].start = 20 * i;
        trace.work[i].end = 20 * i + 5;
    }
    // the second, since the first is left out: from 20 to 45
    CHECK(forward_in_trace(trace).mean == 25e-6);
}

TEST_CASE("profile: kernel names") {
    CHECK(short_kernel_name("void f<int, (E)3>(float*)") == "f<int, (E)3>");
    CHECK(short_kernel_name("void (anonymous namespace)::g(int)") == "g");
    CHECK(short_kernel_name("adamw_kernel(long)") == "adamw_kernel");
    CHECK(short_kernel_name("nvjet_x") == "nvjet_x");
    for (const string& name :
         {string("for_each_kernel<Elementwise<2, 4, float, Mul> >"),
          string("cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>"),
          string("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1"),
          string("reduce_rows_kernel<Sum>")}) {
        begin_on(CPU);
        const string cell = name_cell(name);
        CAPTURE(cell);
        CHECK((cell.size() > 2 && cell.size() <= 27 && cell.front() == '`' && cell.back() == '`'));
        CHECK(has(name, cell.substr(1, cell.size() - 2)));  // a search for it finds the name
        context.csv = true;
        CHECK(name_cell(name) == name);
    }
    begin_on(CPU);
    CHECK(name_cell("for_each_kernel<Elementwise<2, 4, float, Mul> >") == "`2, 4, float, Mul> >`");
    CHECK(name_cell("cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>") ==
          "`simt_sgemm_256x128_8x4_nn`");
}

static const char* const check_trace = R"(
import json, sys
trace = json.load(open(sys.argv[1]))
rows, names = {}, set()
for e in trace['traceEvents']:
    if e['ph'] != 'X': continue
    names.add(e['name'])
    assert e['ts'] >= 0 and e['dur'] >= 0, e
    rows.setdefault((e['pid'], e['tid']), []).append((round(e['ts'] * 1000), -round(e['dur'] * 1000)))
named = {(e['pid'], e['tid']) for e in trace['traceEvents'] if e['ph'] == 'M' and e['name'] == 'thread_name'}
assert set(rows) <= named, 'a row without a name'
for row in rows.values():
    open_until = []
    for start, minus_length in sorted(row):
        end = start - minus_length
        while open_until and open_until[-1] <= start: open_until.pop()
        assert not open_until or end <= open_until[-1], 'slices overlap without nesting'
        open_until.append(end)
print(len(rows), sum(map(len, rows.values())), json.dumps(sorted(names)), json.dumps(trace['otherData']))
)";

TEST_CASE("profile: a trace file is JSON whose slices nest") {
    if (!has_python()) { return; }
    Folder folder;
    const string file = folder / "trace.json";
    write_trace(file, {made_up_trace()}, "a \"caption\"");
    const string text = python(check_trace, file);
    // Two threads, stream 7 with its overlapping slice on a row of its own, stream 8; 6 ranges and
    // 5 pieces of work.
    for (const char* part : {"5 11 ", R"("soft\"max\\\n")", R"("softmax_kernel<float>")",
                             R"("caption": "a \"caption\"; )"}) {
        CHECK_MESSAGE(has(text, part), text);
    }
    CHECK(has(text, "; commit " + commit()));
    CHECK_THROWS_AS(write_trace("/no/such/folder/trace.json", {}, ""), Failure);

    Trace trace = made_up_trace();
    trace.ranges[0].name = "not \xe4 UTF-8";
    write_trace(file, {trace}, "--trace a\xff.json");
    CHECK(has(python(check_trace, file), "--trace a\\ufffd.json"));
}

// The clock of the system, set back by so many seconds; the monotonic one as it is.
static int64_t set_back = 0;
extern "C" int clock_gettime(clockid_t clock, timespec* now) noexcept {
    const long result = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME) { now->tv_sec -= set_back; }
    return (int)result;
}
TEST_CASE("profile: ranges go forward where the system's clock is set back") {
    begin_on(CPU);
    start_tracing();
    {
        Range range("forward");
        set_back = 100;
    }
    const Trace trace = stop_tracing();
    set_back = 0;
    REQUIRE(trace.ranges.size() == 1);
    CHECK(trace.ranges[0].end >= trace.ranges[0].start);
    CHECK(trace.ranges[0].end - trace.ranges[0].start < 1000000000);
}
static const string TINY =
    " --device cpu --d_model 32 --num_layers 2 --num_heads 2 --d_ff 64 --vocab_size 50 ";
TEST_CASE("profile: --trace of a command") {
    if (!has_python()) { return; }
    Folder folder;
    Run r = run_words("nsys_profile --quick --trace " + folder / "command.json" + TINY);
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    const string text = python(check_trace, folder / "command.json");
    for (const char* range : {"forward", "layer", "attention", "ffn", "matmul", "softmax", "rope",
                              "swiglu", "rmsnorm", "loss", "backward", "optimizer"}) {
        CHECK(has(text, strprintf("\"%s\"", range)));
    }
    CHECK(has(text, "cs336 nsys_profile --quick"));

    r = run_shell("(" + program() + " nsys_profile --quick --trace " + folder / "piped.json" +
                  TINY + "; echo exit $? >&2) | true");
    // written before the tables
    CHECK(has(python(check_trace, folder / "piped.json"), "\"forward\""));
    CHECK(!has(r.out, "Broken pipe"));
    CHECK(has(r.out, "exit 141"));
}

TEST_CASE("profile: nsys_profile on a tiny model") {
    Run r = run_words("nsys_profile --batch_size 2 --steps 2 --context_length 8,16" + TINY);
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    for (const char* words :
         {"|  Time | Total Time | Instances | Avg ", "mode eager",
          "summary: the first 10 of 16 names; forward of custom at context length 16; Total Time "
          "and Instances: of one pass, the mean of 3; ranges of operations by the CPU's clock; ",
          "It has 12.8 times fewer FLOPs (5 per score against 4 x 16)", "**(a)**", "**(b)**",
          "**(c)**", "**(d)**", "**(e)**"}) {
        CHECK_MESSAGE(has(r.out, words), words);
    }
    CHECK(!has(r.out, "kernel"));  // a CPU runs none
    CHECK(!has(r.out, "launches"));
    CHECK(run_words("nsys_profile --warmup 1,2 --device cpu").exit_code == 2);
    Run late = run_words("nsys_profile --device cpu --quick --mode flash --precision bf16");
    CHECK(late.exit_code == 2);
    CHECK(late.out.empty());
    CHECK(has(late.err, "mode flash: no FlashAttention on cpu for bfloat16 and head size 64"));
    r = run_words(
        "nsys_profile --device cpu --d_model 65536 --d_ff 262144 --num_layers 100 --num_heads 64 "
        "--context_length 8");
    CHECK(r.exit_code == 1);  // no row ran
    CHECK(has(r.out, "| OOM ("));
    CHECK(has(r.err, "no forward fits into memory"));
}
TEST_CASE("profile: in fp16 no traced step goes without AdamW") {
    Run r = run_words(
        "nsys_profile --device cpu --num_layers 1 --num_heads 2 --batch_size 1 --d_model 512 "
        "--d_ff 1 --vocab_size 100 --context_length 1 --precision fp16 --mode fused --warmup 0 "
        "--steps 1");
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    std::smatch instances;
    REQUIRE(
        std::regex_search(r.out, instances, std::regex("ms +\\| +([0-9.]+) \\|[^\n]*`optimizer`")));
    CHECK(instances[1] == "1");
}

// -------------------------------------------------------------------------------------------------
// With a GPU

TEST_CASE("measure: kernels add up to the step's time, and each has its range") {
    if (!begin_on(CUDA)) { return; }
    // the untraced steps, too: their memory then serves the traced ones
    context.each_launch = true;
    for (Mode mode : {FUSED, FLASH}) {
        context.mode = mode;
        ModelConfig c{"custom", 2560, 10240, 2, 32, 1000};
        Model model = make_model(c);
        init_weights(model, 0);
        Batch batch = random_batch(4, 512, c.vocab_size, 0);
        LossScaler scaler;
        auto step = [&] {
            Range range("step");
            run_phase(STEP, model, batch, scaler);
        };
        time_queued_ms(
            2, 1, [] {}, step);
        start_tracing();
        vector<double> times = time_queued_ms(
            0, 5, [] {}, step);
        Trace trace = stop_tracing();
        if (!trace.no_kernels.empty()) { return skip_this_case(trace.no_kernels.c_str()); }
        double events = stats_of(times).mean * 5e6, kernels = 0;
        vector<string> paths = range_paths(trace);
        int outside = 0, in_backward = 0;
        for (const TracedWork& w : trace.work) {
            kernels += w.end - w.start;
            outside += w.range < 0 || paths[w.range].compare(0, 5, "step/") != 0;
            in_backward += w.range >= 0 && paths[w.range].find("step/backward/layer/") == 0;
        }
        MESSAGE(name_of(mode), ": kernels ", kernels / 5e6, " ms a step, events ", events / 5e6,
                " ms");
        CHECK(outside == 0);
        CHECK(in_backward > 5 * 2 * 10);
        CHECK(kernels == doctest::Approx(events).epsilon(0.03));
    }
}

TEST_CASE("profile: kernel records of a launch") {
    if (!begin_on(CUDA)) { return; }
    Tensor x = zeros({1000}, F32);
    synchronize();
    start_tracing();
    {
        Range range("here");
        x = scale(x, 2);
        fill_zero(x);
    }
    x = add_scalar(x, 1);  // outside
    Trace trace = stop_tracing();
    if (!trace.no_kernels.empty()) { return skip_this_case(trace.no_kernels.c_str()); }
    REQUIRE(trace.work.size() == 3);
    const TracedWork& w = trace.work[0];
    CHECK(has(short_kernel_name(w.name), "Elementwise<1"));
    CHECK(has(short_kernel_name(w.name), "Scale>"));
    CHECK(w.range == 0);
    CHECK(w.start > trace.ranges[0].start);
    CHECK(w.start - trace.ranges[0].start < 1000000000);  // the same clock
    CHECK(trace.work[1].name == "[CUDA memset]");
    CHECK(trace.work[1].range == 0);
    CHECK(trace.work[2].range == -1);
}
TEST_CASE("profile: beside another profiler ours is off, and says so") {
    if (!begin_on(CUDA)) { return; }
    setenv("NSYS_PROFILING_SESSION_ID", "1", 1);
    Run r = run_words(
        "nsys_profile --d_model 64 --num_heads 2 --num_layers 1 --d_ff 64 --context_length 16 "
        "--steps 1");
    unsetenv("NSYS_PROFILING_SESSION_ID");
    CHECK(r.exit_code == 0);
    CHECK(has(r.out, "no kernels were traced: nsys is attached"));
    CHECK(!has(r.out, "summary: "));
}

// -------------------------------------------------------------------------------------------------
// The memory log

struct OnMetaToo {
    static constexpr Device device = META;
};
TYPE_TO_STRING(OnMetaToo);

TEST_CASE_TEMPLATE("memory log: every event with its bytes, category, ranges and line", D, OnCPU,
                   OnCUDA, OnMetaToo) {
    if (!begin<D>()) { return; }
    Tensor before = empty({100}, F32, INPUTS);
    CHECK(stop_memory_log().empty());  // it was off
    start_memory_log(D::device);
    const size_t held = memory_use(D::device).now;
    int line = 0;
    {
        Range outer("outer"), inner("inner");
        line = __LINE__ + 1;
        Tensor t = empty({256}, F32, GRADIENTS);
    }
    mul(before, before);
    before = Tensor();
    empty({0}, F32);  // nothing comes or goes
    vector<MemoryEvent> log = stop_memory_log();

    size_t first = 0, held_in_log = 0;  // what was there already comes first
    while (first < log.size() && log[first].ms == 0) { held_in_log += log[first++].bytes; }
    CHECK(held_in_log == held);
    REQUIRE(log.size() == first + 5);
    const MemoryEvent &alloc = log[first], &free = log[first + 1], &product = log[first + 2],
                      &last = log[first + 4];
    CHECK((alloc.is_alloc && alloc.bytes == 1024 && alloc.category == GRADIENTS));
    CHECK(alloc.ranges == vector<const char*>{"outer", "inner"});
    CHECK(alloc.at.line == line);
    CHECK(has(alloc.at.file, "test_profile.cpp"));
    CHECK((!free.is_alloc && free.address == alloc.address && free.bytes == 1024 &&
           free.ms >= alloc.ms));
    CHECK(string(product.at.function) == "mul");  // an operation's own line
    CHECK(has(product.at.file, "lib/tensor.cu"));
    CHECK((!last.is_alloc && last.bytes == 400 && last.category == INPUTS));
}

// fails unless allocations and frees pair up by address
static size_t peak_of(const vector<MemoryEvent>& log) {
    map<uint64_t, size_t> held;
    size_t now = 0, peak = 0;
    for (const MemoryEvent& e : log) {
        if (e.is_alloc) {
            REQUIRE(held.emplace(e.address, e.bytes).second);
        } else {
            REQUIRE(held[e.address] == e.bytes);
            held.erase(e.address);
        }
        now += e.is_alloc ? e.bytes : -e.bytes;
        peak = max(peak, now);
    }
    return peak;
}
static vector<MemoryEvent> log_of_step(Device device) {
    ModelConfig c = {"tiny", 64, 128, 3, 4, 100};
    Model model = random_model(c, 0);
    Batch batch = random_batch(2, 16, c.vocab_size, 0);
    LossScaler scaler;
    run_phase(STEP, model, batch, scaler);
    reset_peak(device);
    start_memory_log(device);
    run_phase(STEP, model, batch, scaler);
    return stop_memory_log();
}

TEST_CASE_TEMPLATE("memory log: its peak is the allocator's, in every mode and precision", D, OnCPU,
                   OnCUDA, OnMetaToo) {
    if (!begin<D>()) { return; }
    for (Mode mode : {EAGER, FUSED}) {
        for (Precision precision : {FP32, PREC_BF16}) {
            context.mode = mode;
            context.precision = precision;
            vector<MemoryEvent> log = log_of_step(D::device);
            CHECK(peak_of(log) == memory_use(D::device).peak);
            set<Category> seen;
            set<string> paths;
            for (const MemoryEvent& e : log) {
                seen.insert(e.category);
                paths.insert(path_of(e));
            }
            for (Category c : {PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, INPUTS}) {
                CHECK(seen.count(c) == 1);
            }
            bool copies = mode == EAGER || !fast_ways.keep_weights;  // else fast/ needs none
            CHECK(seen.count(WEIGHT_COPIES) == (precision == PREC_BF16 && copies));
            for (const char* path : {"held", "forward/layer/ffn", "backward/lm_head"}) {
                CHECK(paths.count(path) == 1);
            }
        }
    }
}
TEST_CASE("memory log: threads may free what others allocated") {
    begin_on(CPU);
    start_memory_log(CPU);
    vector<std::thread> threads;
    for (int i = 0; i < 4; i++) {
        threads.emplace_back([] {
            for (int k = 0; k < 500; k++) { allocate(CPU, 64 + k, WORKSPACE); }
        });
    }
    Tensor t = empty({1000}, F32);
    threads.emplace_back([taken = std::move(t)]() mutable { taken = Tensor(); });
    for (std::thread& thread : threads) { thread.join(); }
    vector<MemoryEvent> log = stop_memory_log();
    CHECK(log.size() >= 4002);
    CHECK(peak_of(log) >= 4000);
}

// Python checks the pickle: alloc and free pair up by address, the category 'unknown' is there, and
// so are our peak and end.
static const char* const check_pickle = R"(
import pickle, pickletools, sys
data = open(sys.argv[1], 'rb').read()
snapshot = pickle.loads(data)
[trace] = snapshot['device_traces']
assert snapshot['segments'] == []
live, now, peak = {}, 0, 0
for e in trace:
    types = dict(action=str, addr=int, size=int, stream=int, time_us=int, frames=list)
    assert all(type(e[key]) is t for key, t in types.items())
    assert all(sorted(f) == ['filename', 'line', 'name'] for f in e['frames'])
    a, n = e['addr'], e['size']
    if e['action'] == 'alloc': assert a not in live; live[a] = n; now += n; peak = max(peak, now)
    elif e['action'] == 'free_completed': assert live[a] == n; now -= live.pop(a)
    else: assert e['action'] == 'snapshot' and e is trace[-1]
assert 'unknown' in {e['category'] for e in trace}
counts, longest = [0], 0  # the most items between a MARK and its APPENDS
for op, _, _ in pickletools.genops(data):
    if op.name == 'MARK': counts.append(0)
    elif op.name == 'APPENDS': longest = max(longest, counts.pop())
    elif op.name == 'SETITEMS': counts.pop()
    elif op.name not in ('PROTO', 'STOP'): counts[-1] += 1
assert longest == min(len(trace), 1000)
print(len(trace), peak, now)
)";

TEST_CASE("snapshot: Python reads the pickle, and finds our log in it") {
    if (!begin_on(CPU) || !has_python()) { return; }
    context.mode = EAGER;
    vector<MemoryEvent> log = log_of_step(CPU);
    size_t now = 0;
    REQUIRE(log.size() > 1000);  // more than a batch of events
    for (const MemoryEvent& e : log) { now += e.is_alloc ? e.bytes : -e.bytes; }
    Folder folder;
    const string file = folder / "snapshot.pickle";
    save_file(file, snapshot_pickle(log));
    CHECK(python(check_pickle, file) ==
          strprintf("%zu %zu %zu\n", log.size() + 1, peak_of(log), now));
    save_file(file, snapshot_pickle({}));
    python(check_pickle, file);
}

TEST_CASE("memory_profiling: tables and files") {
    Folder folder;
    const string call = "memory_profiling --device cpu --size small --context_length 32 ";
    Run r = run_words(call + "--precision fp32 --format csv --out " + folder / "new");
    CHECK(r.exit_code == 0);
    CHECK(has(r.out, "4 x 32 x 768 x 4 / 1024^2 = 0.4 MiB"));
    CHECK(has(r.out, "1 by lm_head linear (matmul.cu:"));
    CHECK(has(r.out,
              "batch 4, vocabulary 10000; predicted as on a GPU, every allocation counted; meta "
              "(nothing is "
              "computed); commit "));
    for (const char* phase : {"forward", "step"}) {
        CHECK(std::filesystem::exists(folder / "new/snapshot_" + phase + "_small_32_fp32.pickle"));
    }
    r = run_words(call + "--mode flash");  // also in bf16, which the CPU's FlashAttention lacks
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    CHECK(has(r.out, "(b), (c): size small, mode flash, "));
    CHECK(run_words("memory_profiling --context_length 128,x").exit_code == 2);
    r = run_words("memory_profiling --out LICENSE/folder");
    CHECK(r.exit_code == 2);
    CHECK(has(r.err, "--out"));
}

TEST_CASE("memory_profiling: forward's peak is each layer's, or the logits'") {
    begin_on(CPU);
    Planning planning;
    context.mode = EAGER;
    ModelConfig c = {"tiny", 256, 1024, 2, 4, 1000};
    CHECK(is_inside(profile_memory(c, FP32, 2, 64, 0, "").peak_in, "layer"));
    c.vocab_size = 50257;
    CHECK(profile_memory(c, FP32, 2, 64, 0, "").peak_in == "forward/lm_head");
}
TEST_CASE("memory_profiling: the largest allocations are those of one size, and forward's own") {
    MemoryRun r;
    auto event = [](double ms, size_t bytes, const char* range) {
        return MemoryEvent{ms, true, 0, bytes, ACTIVATIONS, {"forward", range}, {"a/b.cu", 7, "f"}};
    };
    read_forward(r, {event(0, 900, "held"), event(1, 10, "small"), event(2, 30, "large"),
                     event(3, 20, "medium"), event(4, 30, "large"), event(5, 30, "other")});
    CHECK(r.largest == 30);
    CHECK(r.largest_by == map<string, int>{{"large f (b.cu:7)", 2}, {"other f (b.cu:7)", 1}});
}
static void check_as_planned(const MemoryRun& planned, const MemoryRun& run) {
    // in fp32, which a GPU's plan lacks
    const bool copies = multiplies_copies(CPU, matmul_dtype(run.precision));
    CHECK((run.forward.use.peak == planned.forward.use.peak || copies));
    CHECK((run.step.use.peak == planned.step.use.peak || copies));
    CHECK(run.forward.use.peak < run.step.use.peak);
    CHECK(run.block.bytes > 0);
    CHECK(run.block.bytes == planned.block.bytes);
    CHECK(run.block.copies == planned.block.copies);
    CHECK(run.block.change == planned.block.change);
    CHECK(run.block.gradients() == run.block.formula);
}
TEST_CASE("memory_profiling: what is predicted is what happens, and gradients are the formula's") {
    begin_on(CPU);
    const ModelConfig c = {"tiny", 64, 256, 2, 4, 250};
    for (Mode mode : {EAGER, FUSED, FLASH}) {
        for (Precision precision : {FP32, PREC_BF16, PREC_PURE_BF16}) {
            context.mode = mode;
            context.device = CPU;
            context.precision = precision;
            if (mode == FLASH &&
                !fastest_flash(CPU, matmul_dtype(precision), c.d_model / c.num_heads)) {
                continue;
            }
            CAPTURE(setting_now());
            const MemoryRun run = profile_memory(c, precision, 2, 64, 0, "");
            Planning planning;
            check_as_planned(profile_memory(c, precision, 2, 64, 0, ""), run);
        }
    }
}
TEST_CASE(
    "memory_profiling (f): the large block is PyTorch's, in every mode and precision its gradients "
    "the formula's") {
    begin_on(CPU);
    Planning planning;
    // B*H*T numbers of 4 bytes less than PyTorch, whose max keeps its int64 indices where ours
    // keeps the fp32 maximum.
    constexpr int64_t XL_IN_PYTORCH = 6818955264, XL_OURS = XL_IN_PYTORCH - 4 * 32 * 2048 * 4;
    for (Mode mode : {EAGER, FUSED, FLASH}) {
        for (Precision precision : {FP32, PREC_BF16, PREC_PURE_BF16}) {
            context.mode = mode;
            context.precision = precision;
            CAPTURE(setting_now());
            const ModelConfig c = {"xl (2026)", 2560, 10240, 32, 32, 10000};
            const BlockMemory m = profile_memory(c, precision, 4, 2048, 0, "").block;
            CHECK(m.gradients() == m.formula);
            if (precision == FP32) { CHECK(m.formula == 419450880); }
            if (precision == FP32 && mode == EAGER) { CHECK(m.bytes == XL_OURS); }
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Answers: numbers of an H200 in, sentences out

static const ModelConfig& size_of_2025(const char* name) {
    return *std::find_if(model_sizes.begin(), model_sizes.end(),
                         [&](auto& c) { return c.name == name; });
}
// NVIDIA H200, fp32, mode eager, batch 4, 2.7B at 1024, commit c844bce; one pass, kernels joined.
static ProfileRun recorded() {
    ProfileRun r{size_of_2025("2.7B"), 4, 1024, 1};
    auto ms = [](double ms) { return vector<double>{ms * 1e6}; };
    const string xmma =
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_"
        "alignc4_execute_kernel__5x_cublas";
    r.forward.ms = stats_of({731.688});
    r.step.ms = stats_of({2244.641});
    r.in_trace = stats_of({731.049});
    r.forward.kernels = {{xmma, "forward/layer/ffn/matmul", vector<double>(64, 292.5e6 / 64)},
                         {xmma, "forward/lm_head/matmul", ms(5)},
                         {"other", "forward/layer/projections/matmul", ms(295.9)},
                         {"qk", "forward/layer/attention/scores/matmul", ms(41.611)},
                         {"softmax", "forward/layer/attention/softmax", ms(38.32)},
                         {"rope", "forward/layer/projections/rope", ms(17.6)}};
    r.step.kernels = {{"nt", "step/forward/layer/ffn/matmul", ms(1850)},
                      {"softmax", "step/forward/layer/attention/softmax", ms(280)},
                      {"adamw", "step/optimizer", ms(101.947)}};
    return r;
}
static string said(const ProfileRun& r) {
    return printed([&] { answer_nsys_profile(r); });
}
static void check_said(const string& text, const vector<const char*>& all) {
    for (const char* words : all) {
        CHECK_MESSAGE(has(text, words), (string(words) + "\n" + text));
    }
    CHECK(!has(text, "nan"));
}
TEST_CASE("answers profile: nsys_profile on an H200") {
    begin_on(CPU);
    context.device = CUDA;
    context.mode = EAGER;
    ProfileRun r = recorded();
    check_said(
        said(r),
        {"**(a)** Forward takes 731.688 ms by the clock and 731.049 ms in the trace (2.7B at "
         "context length 1024): level within 0.5 % (-0.1 %).",
         "**(b)** In forward `sm80_xmma_gemm",
         "kernel__5x_cublas` (43.1 %, 65 times per pass) takes the most time; 2.7B at",
         "**(b)** With backward it is another one, `nt` (86.9 %, 1 time per pass",
         "**(c)** Of forward's traced time 91.9 % goes to matrix products (2.7B at context length "
         "1024). Of the rest most goes to softmax (5.5 %) and rope (2.5 %).",
         "**(d)** From forward to a whole step the share of matrix products goes from 91.9 "
         "to 82.9 %",
         "**(d)** AdamW has no matrix products. It takes 101.9 of the 2232 ms that are traced in "
         "a step (4.6 %).",
         "**(d)** The other parts have 8.1 % of forward's traced time and 12.5 % of the step's; "
         "there most goes to softmax (12.5 %).",
         "**(e)** Softmax takes 38.32 ms per forward and attention's two products 41.61 ms "
         "(2.7B at context length 1024). It has 64 times fewer FLOPs (5 per score against 4 "
         "x 80), and each takes 58.9 times as long."});
    ProfileRun fp16 = r;  // its step first looks for overflows: no part of backward either
    fp16.step.kernels.push_back({"norm", "step/gradient norm", {3e9}});
    CHECK(has(said(fp16), "With backward it is another one, `nt` (86.9 %"));
    context.mode = FUSED;  // whose softmax has T (T + 1) / 2 scores
    check_said(said(r), {"127.9 times fewer FLOPs (5 per score that is not masked against 4 x 80), "
                         "and each takes 118 times as long."});
    context.mode = EAGER;
    // The answers' runs are one size's longest whose step ran, or whose forward did.
    ProfileRuns runs = {r, r, r, r};
    runs[0].config.name = "small";
    runs[1].config.name = "small";
    runs[1].step.oom = 1;
    runs[3].forward.oom = 1;
    runs[3].step.oom = 1;
    using Answered = vector<const ProfileRun*>;
    CHECK(answered(runs, true) == Answered{&runs[0], &runs[2]});
    CHECK(answered(runs, false) == Answered{&runs[2]});
    CHECK(answered({runs[3]}, true).empty());
    runs[0].step.oom = 1;
    CHECK(answered(runs, true) == Answered{&runs[1], &runs[2]});

    r.in_trace = stats_of({2.174 * r.forward.ms.mean});
    r.step.kernels[0].kernel = r.forward.kernels[0].kernel;
    r.forward.kernels.erase(r.forward.kernels.begin() + 3);  // one kernel for all of attention
    check_said(said(r), {"): they differ (+117.4 %).", "With backward it is the same, `sm80",
                         "Softmax and both products are not apart here (38.32 ms per forward)",
                         " % goes to matrix products outside attention (2.7B at",
                         "the share of matrix products outside attention goes from "});
    r.step.kernels.clear();
    r.step.oom = 1;
    CHECK(!has(said(r), "(d)"));
    r.forward.kernels.clear();
    r.no_kernels = "nsys is attached";
    r.in_trace = stats_of({NAN});
    const string text = said(r);
    check_said(
        text,
        {"by the clock; no kernels were traced: nsys is attached (2.7B at context length 1024)."});
    CHECK(!has(text, "(b)"));
}

TEST_CASE("answers profile: clock and trace match within their noise only") {
    begin_on(CPU);
    ProfileRun r = recorded();
    auto times = [&](const vector<double>& clock, const vector<double>& trace) {
        r.forward.ms = stats_of(clock);
        r.in_trace = stats_of(trace);
        return said(r);
    };
    CHECK(has(times({100, 101, 102, 103, 104}, {101, 102, 103, 104, 105}),
              "): level within twice the standard error (+1.0 %)."));
    CHECK(has(times({100, 100, 100, 100, 100}, {101, 101, 101, 101, 101}),
              "): they differ (+1.0 %)."));
    CHECK(has(times({100, 101, 100, 101, 100}, {55, 56, 55, 56, 55}), "): they differ (-44.8 %)."));
    CHECK(has(times({100, 120}, {105, 125}), "): too briefly timed to compare (+4.5 %)."));
    CHECK(has(times({100, 120}, {30, 300}), "): too noisy to compare (+50.0 %)."));
}
TEST_CASE("profile: the cells of nsys_profile's tables") {
    begin_on(CPU);
    ProfileRun r = recorded();
    const double ns = 1e6;
    r.forward.ms = stats_of({700, 710, 750});
    r.in_trace = stats_of({756});
    r.step.oom = (size_t)100 << 30;
    string text = printed([&] { print_clock_and_trace({r}, ""); });
    auto cell = [&](const char* name) { return column(text, name).at(0); };
    CHECK(cell("forward ms") == "720.000");
    CHECK(has(text, " 720.000 | 26.458 | "));
    CHECK(cell("trace ms") == "756");
    CHECK(cell("difference %") == "5");
    CHECK(cell("step ms") == "OOM (100.0 GiB)");

    r.step.oom = 0;
    r.passes = 2;
    text = printed([&] { print_shares({r}, ""); });
    CHECK(cell("matmul") == "91.9");
    CHECK(cell("softmax") == "5.5");
    CHECK(cell("rope") == "2.5");
    CHECK(cell("step: matmul") == "82.9");
    CHECK(cell("AdamW ms") == "50.97");
    CHECK(cell("softmax ms") == "19.16");
    CHECK(cell("products ms") == "20.81");
    r.step.kernels.clear();
    text = printed([&] { print_shares({r}, ""); });
    CHECK(cell("step: matmul") == "");
    CHECK(cell("AdamW ms") == "");

    r.step.kernels = {{"adamw", "step/optimizer", {800 * ns}},
                      {"norm", "step/gradient norm", {800 * ns}},
                      {"a", "step/backward", {10 * ns, 20 * ns}}};
    text = printed([&] { print_top_kernels({r}, ""); });
    // the optimizer is no part of backward, nor is the norm of the gradients
    CHECK(column(text, "%") == vector<string>{"43.1", "100.0"});
    CHECK(column(text, "times per pass") == vector<string>{"32.5", "1"});
    CHECK(column(text, "name").at(1) == "`a`");

    const Kernels three = {
        {"a", "", {1 * ns, 2 * ns}}, {"a", "", {9 * ns}}, {"b", "", {3e5}}, {"b", "", {3e5}}};
    text = printed([&] { print_summary(three, 2, ""); });
    const map<string, string> first = {{"Time", "95.2%"},    {"Total Time", "6.00 ms"},
                                       {"Instances", "1.5"}, {"Avg", "4.00 ms"},
                                       {"Med", "2.00 ms"},   {"Min", "1.00 ms"},
                                       {"Max", "9.00 ms"},   {"StdDev", "4.36 ms"},
                                       {"Name", "`a`"}};
    for (const auto& [name, is] : first) { CHECK_MESSAGE(cell(name.c_str()) == is, name); }
    CHECK(column(text, "Total Time").at(1) == "300.00 μs");
    CHECK(column(text, "Instances").at(1) == "1");
}
TEST_CASE("nsys_profile: the longest context that fits is a step's, or else a forward's") {
    begin_on(CPU);
    context.mode = EAGER;
    const ModelConfig c = {"tiny", 64, 128, 2, 2, 100};
    const size_t step = predicted_peak(c, 4, 2048, STEP),
                 forward = predicted_peak(c, 4, 1024, FORWARD);
    CHECK(longest_that_fits(c, 4, step) == 2048);
    CHECK(longest_that_fits(c, 4, step - 1) == 1024);
    REQUIRE(predicted_peak(c, 4, 1024, STEP) > forward);
    CHECK(longest_that_fits(c, 4, forward) == 1024);
    CHECK(longest_that_fits(c, 4, forward - 1) == 512);
}

static size_t bytes(double mib) { return (size_t)(mib / mib_of(1)); }
static PhaseMemory peaks(double gradients, double copies, double activations, double all) {
    PhaseMemory m;
    m.use.peak = bytes(all);
    m.use.peak_by[PARAMETERS] = bytes(12995.9);
    m.use.peak_by[GRADIENTS] = bytes(gradients);
    m.use.peak_by[WEIGHT_COPIES] = bytes(copies);
    m.use.peak_by[ACTIVATIONS] = bytes(activations);
    return m;
}
// NVIDIA H200, mode eager, batch 4, commit c844bce; the block as predicted.
static MemoryRuns recorded_memory() {
    const ModelConfig& c = size_of_2025("2.7B");
    MemoryRuns runs = {
        {c, FP32, 4, 128, peaks(0, 0, 115.0, 13143.0), peaks(12995.9, 0, 400.0, 52415.8)},
        {c, FP32, 4, 512, peaks(0, 0, 504.5, 13532.6), peaks(197.7, 0, 27596.5, 66814.2)},
        {c, PREC_BF16, 4, 128, peaks(0, 6448.8, 17.3, 19494.1),
         peaks(12995.9, 6448.8, 5.0, 58469.7)},
        {c, PREC_BF16, 4, 512, peaks(0, 6237.5, 420.4, 19686.0),
         peaks(422.7, 6448.8, 22174.7, 68066.3)}};
    runs[1].peak_in = "forward/layer/attention/softmax";
    runs[0].block.bytes = bytes(166.1);
    runs[0].block.change = (int64_t)bytes(233.9);
    runs[2].block.change = 1;
    runs[1].largest = bytes(128);
    runs[1].largest_by = {{"attention/scores matmul (matmul.cu:1)", 32}};
    BlockMemory& block = runs[1].block;  // of 2048 tokens
    block.by_op = {{"attention/softmax div", 2147483648},
                   {"ffn linear", 671088640},
                   {"rmsnorm mul", 250000000}};  // less than 4 %
    block.bytes = 6817906688;
    block.change = -6398455808;
    block.formula = 419450880;
    return runs;
}
static string said(const MemoryRuns& runs) {
    return printed([&] { answer_memory_profiling(runs); });
}
TEST_CASE("answers profile: memory_profiling on an H200") {
    begin_on(CPU);
    MemoryRuns runs = recorded_memory();
    check_said(
        said(runs),
        {"above the weights (12995.9 MiB) it has its peak in a layer, "
         "504.5 MiB of activations at context length 512",
         "**(a)** A step changes memory per block, as seen in models of two and three blocks, by "
         "+166.1 MiB in forward, +233.9 in backward "
         "(context length 128) and +6502.1 MiB in forward, -6102.0 in backward (context length "
         "512).",
         "**(b)** At context length 512 forward's peak is 13.2 GiB; a step's is 65.2 GiB (2.7B, "
         "fp32).",
         "**(c)** Forward's peak changes by +45.5 % from fp32 to bf16 (context length 512): 16-bit "
         "copies of weights by +6237.5 MiB, and all else by -84.1 MiB.",
         "**(c)** A step's peak changes by +1.9 % from fp32 to bf16 (context length 512): 16-bit "
         "copies of weights by +6448.8 MiB, and all else by -5196.7 MiB.",
         "4 x 128 x 2560 x 4 / 1024^2 = 5.0 MiB and 4 x 512 x 2560 x 4 / 1024^2 = 20.0 MiB.",
         "**(e)** The largest allocation in forward has 128.0 MiB (context length 512). Of that "
         "size: 32 by "
         "attention/scores matmul (matmul.cu:1).",
         "**(f)** One block saves 6502.1 MiB for backward (2.7B at context length 512, fp32), most "
         "by attention/softmax div 31.5 % and ffn linear 9.8 %.",
         "**(f)** Backward over the block frees that, but memory changes by -6102.0 MiB. The "
         "difference is the gradients of its parameters: 400.0 MiB, and 400.0 by the formula."});
    runs[1].block.copies = 1 << 20;
    check_said(said(runs), {"frees that except the 16-bit copies of weights, but memory changes"});
    runs[1].block.copies = 0;
    runs[1].step.oom = bytes(251782.2);  // a shorter one stands for the steps
    check_said(said(runs),
               {"a step's does not fit with 245.9 GiB (2.7B, fp32).",
                "A step's peak changes by +11.5 % from fp32 to bf16 (context length 128):"});
    runs[0].step.oom = 1;
    CHECK(!has(said(runs), "A step's "));

    // the logits', once; no block of 128 tokens
    runs[1].peak_in = "forward/lm_head";
    runs[0].block.oom = 1;
    const string text = said(runs);
    check_said(
        text,
        {"it has its peak in forward/lm_head, 504.5 MiB of activations at context length 512.",
         "**(a)** A step changes memory per block, as seen in models of two and three blocks, by "
         "+6502.1 MiB in forward, -6102.0 "
         "in backward (context length 512)."});
    CHECK(!has(text, "in a layer"));
    runs[1].block.oom = 1;
    CHECK(!has(said(runs), "per block"));
    for (MemoryRun& r : runs) { r.forward.oom = 1; }
    CHECK_THROWS_AS(answer_memory_profiling(runs), Failure);
}
