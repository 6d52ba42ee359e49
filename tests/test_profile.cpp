// Tests of profile.cu.
#include "profile.cu"

#include "test.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <thread>
#include <unistd.h>

// ---------------------------------------------------------------------------------------------------------------------
// Tests of profile.cu, and of lib/trace.cu.

static int index_of(const Trace& trace, const std::string& path) {
    std::vector<std::string> paths = range_paths(trace);
    auto found = std::find(paths.begin(), paths.end(), path);
    return found == paths.end() ? -1 : (int)(found - paths.begin());
}

TEST_CASE("profile: ranges nest, each thread's by themselves") {
    begin_on(CPU);
    CHECK(innermost_traced_range() == -1);
    Trace trace;
    {
        Range before("before the trace");
        start_tracing();
        CHECK_THROWS_AS(start_tracing(), Failure);
        {
            Range step("step");
            Range inner("forward");
            std::vector<std::thread> threads;
            for (int i = 0; i < 4; i++) {
                threads.emplace_back([] {
                    for (int k = 0; k < 100; k++) {
                        Range outer("outer");
                        Range inner("inner");
                    }
                });
            }
            for (std::thread& t : threads) { t.join(); }
        }
        { Range again("again"); }
    }
    trace = stop_tracing();
    CHECK_THROWS_AS(stop_tracing(), Failure);
    REQUIRE(trace.ranges.size() == 3 + 4 * 200);
    std::vector<std::string> paths = range_paths(trace);
    CHECK(std::count(paths.begin(), paths.end(), "step") == 1);
    CHECK(std::count(paths.begin(), paths.end(), "step/forward") == 1);
    CHECK(std::count(paths.begin(), paths.end(), "again") == 1);
    CHECK(std::count(paths.begin(), paths.end(), "outer") == 400);
    CHECK(std::count(paths.begin(), paths.end(), "outer/inner") == 400);
    std::set<int> threads;
    for (const TracedRange& r : trace.ranges) {
        threads.insert(r.thread);
        CHECK(r.start <= r.end);
        if (r.parent < 0) { continue; }
        const TracedRange& parent = trace.ranges[r.parent];
        CHECK(parent.thread == r.thread);
        CHECK(parent.start <= r.start);
        CHECK(r.end <= parent.end);
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
    Trace second = stop_tracing();
    for (const std::string& path : range_paths(second)) { CHECK((path == "forward" || path == "new")); }
    CHECK(index_of(second, "new") >= 0);
}

TEST_CASE("profile: backward's work stands where the forward recorded it") {
    begin_on(CPU);
    Tensor x = require_gradient(from_floats({1, 2, 3, 4}, {2, 2})), y;
    start_tracing();
    {
        Range step("step");
        {
            Range forward("forward");
            Range layer("layer");
            Range attention("attention");
            y = matmul(x, x);
        }
        Range back("backward");
        backward_from(y, y);
    }
    Trace trace = stop_tracing();
    CHECK(index_of(trace, "step/forward/layer/attention/matmul") >= 0);
    CHECK(index_of(trace, "step/backward/layer/attention/matmul") >= 0);
    CHECK(!trace.memory.empty());
    CHECK(trace.memory.back().bytes == memory_use(CPU).now);
    CHECK(trace.work.empty());
    std::vector<TracedWork> work = work_of_ranges(trace);
    int64_t sum = 0;
    for (const TracedWork& w : work) { sum += w.end - w.start; }
    CHECK(sum == trace.ranges[0].end - trace.ranges[0].start);  // each moment counts once
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
        TracedWork w{name, range, t + start, t + start + ns, stream, 1, {2, 3, 4}, {128, 1, 1}, 40, 1024, 0};
        trace.work.push_back(w);
    };
    work("void softmax_kernel<float>(float*, int)", 2, 100, 30, 7);
    work("void softmax_kernel<float>(float*, int)", 2, 120, 50, 7);  // overlaps the one before
    work("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", 1, 200, 100, 7);
    work("void softmax_kernel<float>(float*, int)", 4, 500, 60, 7);
    work("[CUDA memset]", -1, 700, 10, 8);
    trace.work.back().grid[0] = 0;
    trace.memory = {{t, 100}, {t + 50, 200}};
    trace.dropped = 3;
    return trace;
}

TEST_CASE("profile: the report on made-up records") {
    Trace trace = made_up_trace();
    std::vector<std::string> paths = range_paths(trace);
    CHECK(paths[2] == "step/forward/soft\"max\\\n");
    CHECK(paths[4] == "step/backward/soft\"max\\\n");
    std::vector<KernelSummary> all = kernel_summary(trace, "");
    REQUIRE(all.size() == 3);
    CHECK(all[0].name == "softmax_kernel<float>");
    CHECK(all[0].ns.n == 3);
    CHECK(all[0].total_ns() == doctest::Approx(140));
    CHECK(all[0].ns.median == 50);
    CHECK(all[0].ns.min == 30);
    CHECK(all[0].ns.max == 60);
    CHECK(all[0].ns.std == doctest::Approx(15.2752523));
    CHECK(all[2].name == "[CUDA memset]");
    std::vector<KernelSummary> forward = kernel_summary(trace, "step/forward");
    REQUIRE(forward.size() == 2);
    CHECK(forward[0].name == "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT");
    CHECK(forward[1].total_ns() == doctest::Approx(80));
    CHECK(kernel_summary(trace, "step/forw").empty());  // whole names only
    CHECK(kernel_summary(trace, "forward").empty());    // from the outermost on
}

TEST_CASE("profile: kernel names") {
    struct Case {
        const char* name;
        const char* is;
        bool tensor_cores;
    };
    const Case cases[] = {
        {"ampere_sgemm_128x64_tn", "matmul", false},
        {"void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(T1::Params)", "matmul", false},
        {"void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x256_16x3_tn_align4>(T1::Params)", "matmul", true},
        {"void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(T1::Params)",
         "matmul", true},
        {"sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_"
         "kernel__5x_cublas",
         "matmul", false},
        {"sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__"
         "5x_cublas",
         "matmul", true},
        {"nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matmul", true},
        {"void hopper_backward_kernel<HopperBackward<64, 128, 24, 240>, bf16>(HopperArgs)", "attention", true},
        {"void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true, false, false>(x)", "matmul",
         false},
        {"void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false>(x)", "matmul",
         false},
        {"ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication", false},
        {"void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>, "
         "std::array<char *, (unsigned long)3>>(int, T2, T3)",
         "elementwise", false},
        {"void at::native::(anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>(x)",
         "softmax", false},
        {"void elementwise_kernel<1, 4, unsigned int, Copy>(Copy, Loop)", "copy", false},
        {"void elementwise_kernel<2, 4, unsigned int, Mul>(Mul, Loop)", "elementwise", false},
        {"void reduce_rows_kernel<Max>(Max, char*, DType, char const*, DType, long, float)", "reduction", false},
        {"adamw_kernel(long, float*, float const*, float*, float*, AdamWScalars)", "optimizer", false},
        {"void add_rmsnorm_kernel<float>(float*, float*)", "norm", false},
        {"void flash_forward_kernel<Tile, 64>(AttentionArgs)", "attention", true},
        {"void flash_forward_fp32_kernel<Tile>(AttentionArgs)", "attention", false},
        {"void flash_backward_kv_fp32_kernel<Tile>(AttentionArgs, float const*)", "attention", false},
        {"[CUDA memcpy DtoD]", "copy", false},
        {"void someone_elses_kernel(int)", "other", false},
    };
    for (const Case& c : cases) {
        CAPTURE(c.name);
        for (const std::string& name : {std::string(c.name), short_kernel_name(c.name)}) {
            CHECK(kernel_class(name).name == std::string(c.is));
            CHECK(kernel_class(name).tensor_cores == c.tensor_cores);
        }
    }
    CHECK(short_kernel_name("void f<int, (E)3>(float*)") == "f<int, (E)3>");
    CHECK(short_kernel_name("void (anonymous namespace)::g(int)") == "g");
    CHECK(short_kernel_name("adamw_kernel(long)") == "adamw_kernel");
    CHECK(short_kernel_name("nvjet_x") == "nvjet_x");
}

// ---------------------------------------------------------------------------------------------------------------------
// Trace files, as Python reads them

static const char* const check_trace = R"(
import json, sys
trace = json.load(open(sys.argv[1]))
rows, counters, names = {}, 0, set()
for e in trace['traceEvents']:
    assert e['ph'] in 'XMC', e
    if e['ph'] == 'C': counters += 1; assert e['ts'] >= 0
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
print(len(rows), sum(map(len, rows.values())), counters, json.dumps(sorted(names)), json.dumps(trace['otherData']))
)";

// What the script prints; "" if it failed.
static std::string python(const std::string& script, const std::string& argument) {
    Folder folder;
    write_file(folder / "check.py", script);
    Run r = run_shell("python3 " + folder / "check.py" + " " + argument);
    CAPTURE(r.out);
    CHECK(r.exit_code == 0);
    return r.exit_code == 0 ? r.out : "";
}
static bool have_python() {
    if (system("python3 -c 'import json' >/dev/null 2>&1") == 0) { return true; }
    skip_this_case("no python3");
    return false;
}

TEST_CASE("profile: a trace file is JSON whose slices nest") {
    if (!have_python()) { return; }
    Folder folder;
    std::string file = folder / "trace.json";
    Trace trace = made_up_trace();
    trace.no_kernels = "";
    write_trace(file, {trace}, "a \"caption\"");
    std::string text = python(check_trace, file);
    // Two threads, stream 7 with its overlapping slice on a row of its own, stream 8; 6 ranges and 5 pieces of work.
    CHECK(has(text, "5 11 2 "));
    CHECK(has(text, R"("soft\"max\\\n")"));
    CHECK(has(text, R"("softmax_kernel<float>")"));
    CHECK(has(text, R"("caption": "a \"caption\"")"));
    CHECK(has(text, R"("records dropped by CUPTI": "3")"));

    CHECK_THROWS_AS(write_trace("/no/such/folder/trace.json", {trace}, ""), Failure);
}

TEST_CASE("profile: --trace of a command") {
    if (!have_python()) { return; }
    Folder folder;
    std::string file = folder / "command.json";
    Run r = run_cs336({"benchmarking_script", "--device", "cpu", "--quick", "--d_model", "32", "--num_layers", "2",
                       "--num_heads", "2", "--d_ff", "64", "--vocab_size", "50", "--trace", file});
    CAPTURE(r.err);
    REQUIRE(r.exit_code == 0);
    std::string text = python(check_trace, file);
    for (const char* range : {"forward", "layer", "attention", "ffn", "matmul", "loss", "backward", "optimizer"}) {
        CHECK(has(text, strprintf("\"%s\"", range)));
    }
    CHECK(has(text, "cs336 benchmarking_script --device cpu"));

    for (const char* path : {"/no/such/folder/t.json", "/tmp"}) {
        Run wrong = run_cs336({"benchmarking_script", "--trace", path});
        CHECK(wrong.exit_code == 2);
        CHECK(has(wrong.err, "--trace"));
    }
}

TEST_CASE("profile: nsys_profile on a tiny model") {
    Run r = run_cs336({"nsys_profile",
                       "--device",
                       "cpu",
                       "--d_model",
                       "32",
                       "--num_layers",
                       "2",
                       "--num_heads",
                       "2",
                       "--d_ff",
                       "64",
                       "--vocab_size",
                       "50",
                       "--batch_size",
                       "2",
                       "--steps",
                       "2",
                       "--mode",
                       "eager,fused",
                       "--context_length",
                       "8,16"});
    CAPTURE(r.err);
    REQUIRE(r.exit_code == 0);
    CHECK(has(r.out, "|  Time | Total Time | Instances | Avg "));
    for (const char* mode : {"mode eager", "mode fused"}) { CHECK(has(r.out, mode)); }
    CHECK(has(r.out, "of custom at context length 16, 3 passes; "));
    CHECK(has(r.out, "It has 12.8 times fewer FLOPs (5 per score against 4 x 16)"));
    for (const char* part : {"(a)", "(b)", "(c)", "(d)", "(e)"}) { CHECK(has(r.out, std::string("**") + part + "**")); }
    double in_trace = 0, parts = -1;  // its parts add up to the same forward, exactly
    size_t row = r.out.find("| custom |");
    REQUIRE(row != std::string::npos);
    CHECK(sscanf(r.out.c_str() + row, "| custom | %*d | %*f | %*f | %lf | %*f | %lf |", &in_trace, &parts) == 2);
    CHECK(in_trace == parts);
    CHECK(run_cs336({"nsys_profile", "--warmup", "1,2", "--device", "cpu"}).exit_code == 2);
    Run late =
        run_cs336({"nsys_profile", "--device", "cpu", "--quick", "--mode", "eager,flash", "--precision", "fp32,bf16"});
    CHECK(late.exit_code == 2);  // although it would be the last setting to run
    CHECK(late.out.empty());
    CHECK(has(late.err, "mode flash: no FlashAttention on cpu for bfloat16 and head size 64"));

    r = run_cs336({"nsys_profile", "--device", "cpu", "--d_model", "65536", "--d_ff", "262144", "--num_layers", "100",
                   "--num_heads", "64", "--context_length", "8"});
    CHECK(r.exit_code == 1);  // no row ran
    CHECK(has(r.out, "| OOM ("));
    CHECK(has(r.err, "no forward fits into memory"));
}

// ---------------------------------------------------------------------------------------------------------------------
// With a GPU

TEST_CASE("profile: kernels add up to the step's time, and each has its range") {
    if (!begin_on(CUDA)) { return; }
    context.each_launch = true;  // the untraced steps, too: their memory then serves the traced ones
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
        std::vector<double> times = time_queued_ms(
            0, 5, [] {}, step);
        Trace trace = stop_tracing();
        if (!trace.no_kernels.empty()) { return skip_this_case(trace.no_kernels.c_str()); }
        CHECK(trace.dropped == 0);
        double events = stats_of(times).mean * 5e6, kernels = 0;
        std::vector<std::string> paths = range_paths(trace);
        int outside = 0, in_backward = 0;
        for (const TracedWork& w : trace.work) {
            kernels += w.end - w.start;
            outside += w.range < 0 || paths[w.range].compare(0, 5, "step/") != 0;
            in_backward += w.range >= 0 && paths[w.range].find("step/backward/layer/") == 0;
        }
        MESSAGE(name_of(mode), ": kernels ", kernels / 5e6, " ms a step, events ", events / 5e6, " ms");
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
    CHECK(has(short_kernel_name(w.name), "elementwise_kernel<1, "));
    CHECK(has(short_kernel_name(w.name), "Scale>"));
    CHECK(w.range == 0);
    CHECK(w.grid[0] > 0);
    CHECK(w.block[0] == 256);
    CHECK(w.registers > 0);
    CHECK(w.start > trace.ranges[0].start);
    CHECK(w.start - trace.ranges[0].start < 1000000000);  // the same clock
    CHECK(kernel_class(trace.work[1].name).name == std::string("copy"));
    CHECK(trace.work[1].bytes == 4000);
    CHECK(trace.work[1].range == 0);
    CHECK(trace.work[2].range == -1);
}

TEST_CASE("profile: beside another profiler ours is off, and says so") {
    if (!begin_on(CUDA)) { return; }
    setenv("NSYS_PROFILING_SESSION_ID", "1", 1);
    start_tracing();
    Trace trace = stop_tracing();
    Run r = run_cs336({"nsys_profile", "--d_model", "64", "--num_heads", "2", "--num_layers", "1", "--d_ff", "64",
                       "--context_length", "16", "--steps", "1"});
    unsetenv("NSYS_PROFILING_SESSION_ID");
    CHECK(!trace.no_kernels.empty());
    CHECK(r.exit_code == 0);
    CHECK(has(r.out, "no kernels were traced: nsys is attached"));
    CHECK(!has(r.out, "kernel summary"));
}

// ---------------------------------------------------------------------------------------------------------------------
// Tests of profile.cu and of the log in lib/device.cu.

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
    CHECK(std::string(alloc.at.file).find("test_profile.cpp") != std::string::npos);
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
            bool copies = mode == EAGER || !fast_ways.split;  // else the weights are split
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
            CAPTURE(setting_now());
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
            CAPTURE(setting_now());
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

// ---------------------------------------------------------------------------------------------------------------------
// Tests of the answers to nsys_profile and memory_profiling: numbers of an H200 in, sentences out.

static const char* const XMMA =
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_"
    "kernel__5x_cublas";
static const char* const CUTLASS = "cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>";

static Stats ms(double median) { return {median, 0.1, median, median, median, 10}; }
static const ModelConfig& size_of_2025(const char* name) {
    return *std::find_if(model_sizes.begin(), model_sizes.end(), [&](auto& c) { return c.name == name; });
}
struct Recorded {
    const char* size;
    int T;
    double clock, in_trace, in_kernels, step, matmul, step_matmul, adamw, step_kernels, softmax, products;
};
static ProfileRun profile_of(const Recorded& n) {
    ProfileRun r{size_of_2025(n.size), 4, n.T, true};
    r.forward = ms(n.clock), r.step = ms(n.step), r.in_trace = n.in_trace, r.in_kernels = n.in_kernels;
    const KernelClass cuda_cores = kernel_class(XMMA);
    r.parts[ALONE] = {
        n.in_kernels, n.matmul, XMMA, cuda_cores, 40.2, 97, {{"ffn", 64}, {"attention/scores", 32}, {"lm_head", 1}}};
    r.parts[AND_BACKWARD] = {n.step_kernels - n.adamw, 86.8, CUTLASS, cuda_cores, 26.2, 225, {{"ffn", 96}}};
    r.parts[WHOLE_STEP] = {n.step_kernels, n.step_matmul, CUTLASS, cuda_cores, 24.9, 225, {{"ffn", 96}}};
    r.adamw = n.adamw, r.softmax = n.softmax, r.products = n.products;
    r.others = {{"softmax", 5.3}, {"rope", 2.4}, {"swiglu", 1.4}, {"mask", 1.4}, {"scores", 1.2}, {"rmsnorm", 0.7}};
    return r;
}
// NVIDIA H200, fp32, mode eager, batch 4, commit c844bce.
static std::vector<ProfileRun> recorded() {
    return {
        profile_of({"2.7B", 128, 87.024, 87.757, 84.379, 377.653, 90.9, 66.1, 101.895, 363.474, 1.312, 0.883}),
        profile_of({"2.7B", 512, 333.329, 335.406, 333.208, 1127.601, 89.2, 81.6, 101.930, 1115.286, 12.090, 11.032}),
        profile_of({"2.7B", 1024, 731.688, 731.049, 727.914, 2244.641, 87.2, 82.8, 101.947, 2232.399, 38.320, 41.611})};
}
static std::string said(const std::vector<ProfileRun>& runs) {
    return printed([&] { answer_nsys_profile(runs); });
}

TEST_CASE("answers profile: nsys_profile on an H200") {
    const std::string text = said(recorded());
    for (const char* words :
         {"**(a)** Forward takes 731.7 ms by the clock and 731.0 ms in the trace (2.7B at context length 1024).",
          "**(a)** The two match within 0.8 % in all 3 settings.",
          "8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas`, a matrix product on the CUDA cores: "
          "40.2 % (2.7B at context length 1024).",
          "**(b)** A forward has 97 launches of it: 64 in ffn, 32 in attention/scores and 1 in lm_head.",
          "(26.2 %, 225 launches): backward's products have other operands transposed.",
          "**(b)** In all 3 settings forward's most expensive kernel is a matrix product.",
          "**(c)** Of forward's time 87.2 % goes to matrix products (2.7B at context length 1024). Of the rest most "
          "goes "
          "to softmax (5.3 %), rope (2.4 %), swiglu (1.4 %), mask (1.4 %) and scores (1.2 %).",
          "**(d)** From forward to a whole step the share of matrix products falls from 87.2 to 82.8 %",
          "**(d)** It falls in 3 of 3 settings, most in 2.7B at context length 128: from 90.9 to 66.1 %.",
          "**(d)** AdamW has no matrix products and takes 101.9 of the traced step's 2232.4 ms (4.6 %).",
          "**(e)** Softmax takes 38.32 ms per forward and attention's two products 41.61 ms",
          "It has 64.0 times fewer FLOPs (5 per score against 4 x 80), but takes 0.92 times as long, so each of its "
          "FLOPs is 59 times as slow.",
          "softmax has to move 32 GiB and the products 37 GiB, nearly the same.",
          "1.49 at 128, 1.10 at 512 and 0.92 at 1024."}) {
        CHECK_MESSAGE(has(text, words), (std::string(words) + "\n" + text));
    }
    CHECK(!has(text, "Out of memory"));
    CHECK(!has(text, "nan"));
}
TEST_CASE("answers profile: nsys_profile, whether clock and trace match") {
    std::vector<ProfileRun> runs = recorded();
    runs[0].in_trace = 1.024 * runs[0].forward.median;  // as small at 256 did: a match
    CHECK(has(said(runs), "The two match within 2.4 % in all 3 settings."));
    runs[0].in_trace = 1.074 * runs[0].forward.median;
    CHECK(has(said(runs),
              "The two match within 5 % in 2 of 3 settings; the trace of 2.7B at context length 128 differs "
              "by +7.4 %, because recording costs CPU time at each launch."));
    runs.resize(1);
    CHECK(has(said(runs), "The two do not match: the trace of 2.7B at context length 128 differs by +7.4 %"));
}
TEST_CASE("answers profile: nsys_profile where a part is missing") {
    std::vector<ProfileRun> runs = recorded();
    runs[2].step_oom = 1, runs[2].parts[AND_BACKWARD] = runs[2].parts[WHOLE_STEP] = PartProfile();
    std::string text = said(runs);  // 512 stands for all
    CHECK(has(text, "Forward takes 333.3 ms by the clock and 335.4 ms in the trace (2.7B at context length 512)."));
    CHECK(has(text, "**(a)** Out of memory: a step of 2.7B at context length 1024."));
    CHECK(has(text, "It falls in 2 of 2 settings, most in 2.7B at context length 128"));
    runs = {runs[2]};
    text = said(runs);
    CHECK(has(text, "**(d)** No whole step ran"));
    CHECK(!has(text, "nan"));

    runs = recorded();
    for (ProfileRun& r : runs) { r.softmax = NAN; }
    CHECK(has(said(runs), "Softmax and both products are one kernel here (41.61 ms per forward)"));
    for (ProfileRun& r : runs) {
        r.no_kernels = "nsys is attached", r.in_trace = NAN;
        for (PartProfile& p : r.parts) { p = PartProfile(); }
    }
    text = said(runs);
    CHECK(has(text, "by the clock; no kernels were traced: nsys is attached (2.7B at context length 1024)."));
    CHECK(!has(text, "(b)"));
    for (ProfileRun& r : runs) { r.forward_oom = r.step_oom = 1; }
    CHECK(said(runs).empty());
}
TEST_CASE("answers profile: nsys_profile with one launch, and the same kernel with backward") {
    std::vector<ProfileRun> runs = {recorded()[2]};
    ProfileRun& r = runs[0];
    r.parts[ALONE].launches = 1, r.parts[ALONE].launched_in = {{"lm_head", 1}};
    r.parts[AND_BACKWARD] = r.parts[ALONE];
    r.parts[ALONE].is.tensor_cores = true;
    r.parts[WHOLE_STEP].matmul = 90;
    const std::string text = said(runs);
    CHECK(has(text, "A forward has 1 launch of it: 1 in lm_head."));
    CHECK(has(text, "With backward it is the same one (40.2 %, 1 launch)."));
    CHECK(has(text, "a matrix product on tensor cores"));
    CHECK(has(text, "rises from 87.2 to 90.0 %"));
    CHECK(!has(text, "1 launches"));
    CHECK(!has(text, "settings"));
}

// ---------------------------------------------------------------------------------------------------------------------
// memory_profiling

static size_t bytes(double mib) { return (size_t)(mib * 1048576); }
static PhaseMemory peaks(double parameters, double gradients, double copies, double activations, double all) {
    PhaseMemory m;
    m.peak = bytes(all), m.all_gradients = bytes(parameters);
    m.peak_by[PARAMETERS] = bytes(parameters), m.peak_by[GRADIENTS] = bytes(gradients);
    m.peak_by[WEIGHT_COPIES] = bytes(copies), m.peak_by[ACTIVATIONS] = bytes(activations);
    return m;
}
static MemoryRun memory_of(Precision precision, int T, const PhaseMemory& forward, double taped,
                           const PhaseMemory& step, const std::vector<Allocation>& largest) {
    MemoryRun r{size_of_2025("2.7B"), precision, 4, T, false};
    r.forward = forward, r.step = step, r.taped.peak = bytes(taped), r.largest = largest;
    r.stream = (size_t)4 * T * 2560 * 4;
    return r;
}
// NVIDIA H200, mode eager, batch 4, commit c844bce; blocks as predicted.
static std::vector<MemoryRun> recorded_memory() {
    constexpr double P = 12995.9, C = 6448.8;
    const std::string layer = "forward/layer/";
    std::vector<Allocation> scores = {{bytes(12995.9), 1, PARAMETERS, "held", "make_model", "model.cu:113"}};
    for (auto [range, op] : {std::make_pair("scores", "matmul"),
                             {"scores", "scale"},
                             {"mask", "where"},
                             {"softmax", "sub"},
                             {"softmax", "exp"},
                             {"softmax", "div"}}) {
        scores.push_back({bytes(128), 32, ACTIVATIONS, layer + "attention/" + range, op, "lib/tensor.cu:1"});
    }
    scores.push_back({bytes(80), 64, ACTIVATIONS, layer + "ffn", "linear", "lib/matmul.cu:279"});
    const std::vector<Allocation> ffn = {
        {bytes(12995.9), 1, PARAMETERS, "held", "make_model", "model.cu:113"},
        {bytes(20), 64, ACTIVATIONS, layer + "ffn", "linear", "lib/matmul.cu:279"},
        {bytes(20), 32, ACTIVATIONS, layer + "ffn/swiglu", "sigmoid", "lib/tensor.cu:1"},
        {bytes(20), 64, ACTIVATIONS, layer + "ffn/swiglu", "mul", "lib/tensor.cu:2"}};
    std::vector<MemoryRun> runs = {
        memory_of(FP32, 128, peaks(P, 0, 0, 115.0, 13143.0), 18379.1, peaks(P, P, 0, 400.0, 52415.8), ffn),
        memory_of(FP32, 256, peaks(P, 0, 0, 230.0, 13258.0), 24755.3, peaks(P, P, 0, 400.0, 52415.9), ffn),
        memory_of(FP32, 512, peaks(P, 0, 0, 504.5, 13532.6), 40582.8, peaks(P, 197.7, 0, 27596.5, 66814.2), scores),
        memory_of(PREC_BF16, 128, peaks(P, 0, C, 17.3, 19494.1), 23108.7, peaks(P, P, C, 5.0, 58469.7), ffn),
        memory_of(PREC_BF16, 256, peaks(P, 0, C, 34.5, 19511.4), 28021.6, peaks(P, 12823.3, C, 220.4, 58512.5), ffn),
        memory_of(PREC_BF16, 512, peaks(P, 0, 6237.5, 420.4, 19686.0), 41690.5, peaks(P, 422.7, C, 22174.7, 68066.3),
                  scores)};
    BlockMemory& block = runs[2].block;  // of 2048 tokens
    block.by_op = {{layer + "attention/softmax div", 2147483648},
                   {layer + "attention/softmax exp", 2147483648},
                   {layer + "ffn linear", 671088640},
                   {layer + "ffn/swiglu mul", 671088640},
                   {layer + "ffn/swiglu sigmoid", 335544320},
                   {layer + "rmsnorm mul", 83886080}};
    block.bytes = 6817906688, block.change = -6398455808, block.formula = 419450880;
    runs[5].block.bytes = 7136673792;
    return runs;
}
static std::string said(const std::vector<MemoryRun>& runs) {
    return printed([&] { answer_memory_profiling(runs); });
}

TEST_CASE("answers profile: memory_profiling on an H200") {
    const std::string text = said(recorded_memory());
    for (const char* words :
         {"above the weights (12.7 GiB) it has one equal peak per layer, 0.5 GiB at context length 512",
          "Its peak is in the optimizer, beside all gradients, at context length 128 and 256 and just after the loss, "
          "beside all activations, at context length 512.",
          "**(b)** At context length 128, 256 and 512 forward's peak is 12.8 GiB, 12.9 GiB and 13.2 GiB, a step's 51.2 "
          "GiB, 51.2 GiB and 65.2 GiB (2.7B, fp32).",
          "moments are 3 x 12995.9 MiB", "a forward that keeps what backward needs takes 26.4 GiB more.",
          "**(c)** bf16 takes more memory than fp32: forward +48.3, +47.2 and +45.5 % at context length 128, 256 and "
          "512.",
          "**(c)** A step's peak changes by +11.5, +11.6 and +1.9 %.",
          "a 16-bit copy of each matrix is added: 6.3 GiB.",
          "**(c)** At context length 512, where activations make the step's peak, they shrink by 5.3 GiB.",
          "4 x 512 x 2560 x 4 / 1024^2 = 20.0 MiB; at context length 128, 256 and 512: 5.0, 10.0 and 20.0 MiB. The run "
          "allocated exactly that",
          "**(e)** At 512 tokens the largest are attention's scores, 4 x 32 x 512 x 512 numbers, 128.0 MiB each, 6 per "
          "layer (matmul, scale, where, sub, exp and div).",
          "At 128 tokens the largest are the feed-forward's, 4 x 128 x 10240 numbers, 20.0 MiB each, 5 per layer "
          "(linear, sigmoid and mul).",
          "the optimizer allocates nothing in forward.",
          "**(f)** One block saves 6817906688 bytes (6502.1 MiB) for backward in fp32, 7136673792 in bf16 (2.7B at",
          "softmax div 31.5 %, softmax exp 31.5 %, ffn linear 9.8 %, swiglu mul 9.8 % and swiglu sigmoid 4.9 %.",
          "memory falls by only 6102.0 MiB: the difference, 400.0 MiB, is the gradients of its parameters, as the "
          "formula says."}) {
        CHECK_MESSAGE(has(text, words), (std::string(words) + "\n" + text));
    }
    CHECK(!has(text, "H200"));
    CHECK(!has(text, "predicted"));
}
TEST_CASE("answers profile: memory_profiling with other numbers") {
    std::vector<MemoryRun> runs = recorded_memory();
    runs[2].step = PhaseMemory();
    runs[2].step.oom = bytes(251782.2), runs[2].stream = 8, runs[1].step.peak_by[GRADIENTS] = bytes(6000);
    runs[2].block.formula++;
    std::string text = said(runs);
    CHECK(has(text, "a step's 51.2 GiB, 51.2 GiB and OOM (245.9 GiB) (2.7B, fp32)."));
    CHECK(has(text,
              "in backward, beside a part of the gradients, at context length 256 and unknown, for lack of memory, at "
              "context length 512."));
    CHECK(has(text, "A step's peak changes by +11.5 and +11.6 %."));
    CHECK(has(text, "But the run allocated another number of bytes"));
    CHECK(has(text, "by the formula 400.0 MiB."));

    runs = recorded_memory();
    for (MemoryRun& r : runs) {
        r.predicted = true;
        if (r.precision != FP32) {
            r.forward.peak = r.step.peak = 1;
            r.forward.peak_by[WEIGHT_COPIES] = 0;
        }
    }
    runs[2].step.peak = bytes(251782.2);
    text = said(runs);
    CHECK(has(text, "(2.7B, fp32; predicted)."));
    CHECK(has(text, "A step at context length 512 needs more than an H200's 139 GiB."));
    CHECK(has(text, "bf16 takes less memory than fp32"));
    CHECK(has(text, "This mode keeps no 16-bit copies"));
    runs[3].step.peak = bytes(60000);
    CHECK(has(said(runs), "bf16 takes in some rows more, in others less memory than fp32"));
    for (MemoryRun& r : runs) { r.forward.oom = 1; }
    CHECK(said(runs).empty());
}
