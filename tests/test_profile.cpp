// Tests of profile.cu, and of lib/trace.cu.
#include "test.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <thread>

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
