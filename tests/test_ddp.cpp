// Tests of ddp.cu: the four ways of data parallel training and the sharded optimizer against plain training, how
// gradients are cut into buckets, when they go, and the numbers of communication_accounting.
#include "answers.h"
#include "test.h"

#include <nlohmann/json.hpp>

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>

// Four weights of one layer each, y = w3 * (w2 * (w1 * x)) + w0 * x, all [3]: w0 is not used where `skip` is set.
struct FourWeights {
    Tensor weights, gradients;
    std::vector<Parameter> parameters;
    std::vector<Tensor> slots;
};
static FourWeights four_weights(float value) {
    FourWeights f;
    f.weights = from_floats(std::vector<float>(12, value), {12});
    f.gradients = empty({12}, F32, GRADIENTS);
    copy(f.gradients, from_floats(std::vector<float>(12, NAN), {12}));
    for (int i = 0; i < 4; i++) {
        Tensor w = require_gradient(view(f.weights, 3 * i, {3}));
        w.gradient->is_parameter = true;
        w.gradient->value = view(f.gradients, 3 * i, {3});
        f.parameters.push_back({strprintf("w%d", 3 - i), {3}, 3 * i, w});
        f.slots.push_back(w);
    }
    return f;
}
static Tensor objective(FourWeights& f, const Tensor& x, bool skip) {
    for (Tensor& t : f.slots) { t.gradient->filled = false; }
    Tensor y = mul(f.slots[0], mul(f.slots[1], mul(f.slots[2], x)));
    if (!skip) { y = add(y, mul(f.slots[3], x)); }
    return mean_all(y);
}
static void check_data_parallel(const Communicator& c) {
    for (Strategy strategy : {NAIVE, FLAT, OVERLAPPED, BUCKETED}) {
        for (int steps = 0; steps < 2; steps++) {
            FourWeights f = four_weights(2.0f + c.rank);  // the broadcast makes it 2 everywhere
            auto d = data_parallel(c, strategy, 24e-6, f.weights, f.gradients, f.parameters, f.slots);
            Tensor x = from_floats({1, 1 + (float)c.rank, 3}, {3});
            begin_step(*d);
            backward(objective(f, x, c.rank == 1));  // rank 1's loss does not depend on w0
            INFO("rank " << c.rank << " of " << c.world << ", " << name_of(strategy));
            size_t early = strategy == OVERLAPPED ? 3 : strategy == BUCKETED ? 1 : 0;
            if (c.rank == 1) { CHECK(d->works.size() == early); }
            finish_gradient_synchronization(*d);
            CHECK(d->works.size() == (strategy == FLAT ? 1 : strategy == BUCKETED ? 2 : 4));
            double sum = 0, without = 0;  // of x1 over the ranks; of all but rank 1
            for (int r = 0; r < c.world; r++) { sum += 1 + r, without += r == 1 ? 0 : 1 + r; }
            std::vector<float> g = to_floats(f.gradients);
            int used = c.world - (c.world > 1);
            for (int i = 0; i < 9; i++) {
                double x_i = i % 3 == 0 ? 1 : i % 3 == 1 ? sum / c.world : 3;
                CHECK(g[i] == doctest::Approx(4 * x_i / 3));
            }
            for (int i = 0; i < 3; i++) {
                double x_i = i == 0 ? used : i == 1 ? without : 3.0 * used;
                CHECK(g[9 + i] == doctest::Approx(x_i / 3 / c.world));
            }
        }
    }
}
TEST_CASE("ddp: gradients are averages that go early and what a rank does not use counts as zero") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (int n : {1, 2, 3}) {
        in_ranks("ddp: gradients are averages that go early and what a rank does not use counts as zero", n, CPU,
                 check_data_parallel);
    }
}
TEST_CASE("ddp: gradients are averages over NCCL") {
    if (lacks("nccl", CUDA, 2)) { return; }
    in_ranks("ddp: gradients are averages over NCCL", 2, CUDA, check_data_parallel);
}

// y = w slow(w x): between the two uses of w backward takes long enough for an all-reduce that started too early.
static void check_tied(const Communicator& c) {
    Tensor weights = from_floats({3, 5}, {2}), gradients = empty({2}, F32, GRADIENTS);
    Tensor w = require_gradient(weights);
    w.gradient->is_parameter = true;
    w.gradient->value = gradients;
    auto d = data_parallel(c, OVERLAPPED, 0, weights, gradients, {{"w", {2}, 0, w}}, {w});
    Tensor x = from_floats({1, 2 + 2 * (float)c.rank}, {2}), inner = mul(w, x), slow = detached(inner);
    record(slow, {inner}, [g = inner.gradient](const Tensor& dy) {
        usleep(50000);
        add_gradient(g, dy);
    });
    begin_step(*d);
    backward(mean_all(mul(w, slow)));  // dw = 2 w x / 2
    finish_gradient_synchronization(*d);
    std::vector<float> g = to_floats(gradients);
    CHECK(g[0] == doctest::Approx(3 * 1));
    CHECK(g[1] == doctest::Approx(5 * (2 + c.world - 1)));
    CHECK(d->works.size() == 1);
}
TEST_CASE("ddp: a tied weight goes once and only after its last use") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (int n : {2, 3}) { in_ranks("ddp: a tied weight goes once and only after its last use", n, CPU, check_tied); }
}

static void check_buckets(const Communicator& c) {
    Model model = make_model({"tiny", 12, 10, 2, 3, 19});
    init_weights(model, 1);
    make_gradients(model);
    for (double mb : {1e-6, 5e-4, 1e-3, 1.0}) {
        auto d = data_parallel(c, BUCKETED, mb, model.weights, model.gradients, model.parameters, model.slots);
        size_t p = 0;
        for (const Bucket& b :
             d->buckets) {  // whole tensors, in order, none left out, and the cap holds except for one alone
            double bytes = 0;
            int n = 0;
            CHECK(b.begin == model.parameters[p].offset);
            for (; p < model.parameters.size() && model.parameters[p].offset < b.end; p++, n++) {
                bytes += 4.0 * count(model.parameters[p].shape);
            }
            CHECK(n == b.parameters);
            CHECK((bytes <= mb * 1e6 || n == 1));
        }
        CHECK(p == model.parameters.size());
        if (mb == 1.0) { CHECK(d->buckets.size() == 1); }
        if (mb == 1e-6) { CHECK(d->buckets.size() == model.parameters.size()); }
    }
}
TEST_CASE("ddp: buckets") {
    if (lacks("gloo", CPU, 1)) { return; }
    in_ranks("ddp: buckets", 1, CPU, check_buckets);
}

static Run check_command(const std::vector<std::string>& words, const char* expected) {
    Run r = run_cs336(words);
    std::string line;
    for (const std::string& w : words) { line += w + " "; }
    INFO(line << "\n" << r.out << r.err);
    CHECK(r.exit_code == 0);
    CHECK(has(r.out, expected));
    CHECK(!has(r.out, "DIFFER"));
    return r;
}
TEST_CASE("ddp: weights equal those of single-process training, 1 to 4 ranks, all ways") {
    if (lacks("gloo", CPU, 4)) { return; }
    for (const char* n : {"1", "2", "3", "4"}) {
        for (const char* command : {"naive_ddp", "ddp_overlap_individual_parameters", "ddp_overlap_bucketed"}) {
            check_command({command, "--device", "cpu", "--nproc", n}, "identical");
            if (n == std::string("4")) { break; }  // more ranks than cores take their time
        }
        check_command({"optimizer_state_sharding", "--device", "cpu", "--nproc", n}, "identical");
    }
}
TEST_CASE("ddp: the toy models are the edition's") {
    if (lacks("gloo", CPU, 2)) { return; }
    for (const char* command : {"naive_ddp", "ddp_overlap_individual_parameters", "optimizer_state_sharding"}) {
        for (const char* edition : {"2025", "2026"}) {
            const bool old = edition == std::string("2025");
            INFO(command << " " << edition);
            Run r = check_command({command, "--device", "cpu", "--nproc", "2", "--edition", edition}, "identical");
            CHECK(has(r.out, old ? "toy models with 5 outputs" : "toy models with 10 outputs"));
            // AdamW's two moments of 50 x 5 or 50 x 10, 50 x 10 and 10 x 10 weights
            if (has(r.out, "Scheme")) {
                CHECK(rows_of(tables_in(r.out)[0])[0].text("unsharded") == (old ? "1700" : "2200"));
            }
        }
    }
}
TEST_CASE("ddp: overlapped, 20 times") {  // a race does not show every time
    if (lacks("gloo", CPU, 2)) { return; }
    for (int i = 0; i < 20; i++) {
        const char* command = i % 2 ? "ddp_overlap_bucketed" : "ddp_overlap_individual_parameters";
        check_command({command, "--device", "cpu", "--nproc", i % 4 < 2 ? "2" : "3", "--seed", std::to_string(i)},
                      "identical");
    }
}
TEST_CASE("ddp: overlapped over NCCL, 20 times") {
    if (lacks("nccl", CUDA, 2)) { return; }
    for (int i = 0; i < 20; i++) {
        const char* command = i % 2 ? "ddp_overlap_bucketed" : "ddp_overlap_individual_parameters";
        check_command({command, "--device", "cuda", "--nproc", "2", "--backend", "nccl", "--seed", std::to_string(i)},
                      "identical");
    }
}
TEST_CASE("ddp: the same commands on GPUs") {
    if (cuda_devices() == 0) { return skip_this_case("no GPU"); }
    int gpus = cuda_devices();
    for (const char* command :
         {"naive_ddp", "ddp_overlap_individual_parameters", "ddp_overlap_bucketed", "optimizer_state_sharding"}) {
        if (gpus >= 2) {
            check_command({command, "--device", "cuda", "--nproc", "2", "--backend", "nccl"}, "identical");
        }
        if (gpus >= 4) {
            check_command({command, "--device", "cuda", "--nproc", "4", "--backend", "nccl"}, "identical");
        }
        if (why_not("gloo", CUDA, 2).empty()) {
            check_command({command, "--device", "cuda", "--nproc", "2", "--backend", "gloo"}, "identical");
        }
    }
}
TEST_CASE("ddp: benchmarking commands") {
    if (lacks("gloo", CPU, 2)) { return; }
    Run r = run_cs336({"ddp_bucketed_benchmarking", "--quick", "--device", "cpu", "--bucket_size_mb", "0.5,100"});
    INFO(r.out << r.err);
    CHECK(r.exit_code == 0);
    CHECK(has(r.out, "scaled down: "));
    CHECK(has(r.out, "Calls: 39, Loss: "));  // 9 tensors per layer and 3
    CHECK(has(r.out, "Communication calls reduced:  39 → "));
    CHECK(has(r.out, "bucketed, 0.5 MB"));
    CHECK(has(r.out, "w = "));
    CHECK(has(r.out, "Speedup ratio"));
    CHECK(has(r.out, "mode flash; 1 sequence per rank, "));
    Run scaling = run_shell("CS336_PART_OF_SCALING=1 " + program() +
                            " ddp_bucketed_benchmarking --quick --device cpu --bucket_size_mb 100 --checkpoint 1");
    CHECK(has(scaling.out, "mode flash, checkpoint 1; 1 sequence per rank, "));
    CHECK(!has(scaling.out, "one process with the whole batch"));
    CHECK(has(scaling.out, "bucketed, 100 MB"));
    Run memory = run_cs336({"optimizer_state_sharding_accounting", "--quick", "--device", "cpu"});
    CHECK(memory.exit_code == 0);
    CHECK(has(memory.out, "sharded, ZeRO-1"));
    CHECK(run_cs336({"naive_ddp_benchmarking", "--size", "tiny"}).exit_code == 2);
    CHECK(run_cs336({"ddp_bucketed_benchmarking", "--bucket_size_mb", "0"}).exit_code == 2);
}
TEST_CASE("ddp: --trace puts all ranks into one file") {
    if (lacks("gloo", CPU, 2)) { return; }
    Folder folder;
    std::string path = folder / "trace.json";
    Run r =
        run_cs336({"ddp_overlap_individual_parameters_benchmarking", "--quick", "--device", "cpu", "--trace", path});
    INFO(r.err);
    CHECK(r.exit_code == 0);
    nlohmann::json trace = nlohmann::json::parse(read_file(path), nullptr, false);
    REQUIRE(!trace.is_discarded());
    std::map<std::pair<int, std::string>, int> seen;  // process and name of a range
    for (const auto& event : trace["traceEvents"]) {
        if (event["ph"] == "X") { seen[{event["pid"].get<int>(), event["name"].get<std::string>()}]++; }
    }
    for (int rank : {0, 1}) {
        for (const char* name : {"naive", "flat", "overlapped", "forward", "backward", "optimizer"}) {
            INFO("rank " << rank << ", " << name);
            CHECK(seen[{rank, name}] > 0);
        }
        CHECK(seen[{rank, "all-reduce"}] >= 39 + 1 + 39);
    }
    CHECK(folder.files() == std::vector<std::string>{"trace.json"});  // no rank's own
}

// parent: its index, or -1; work: the range of the launch
static TracedRange a_range(const char* name, int parent, int64_t start, int64_t end) {
    return {name, parent, -1, parent < 0 ? 2 : 1, start, end};
}
static TracedWork a_kernel(const char* name, int range, int64_t start, int64_t end) {
    return {name, range, start, end, 0, 0, {1, 1, 1}, {1, 1, 1}, 0, 0, 0};
}
static std::string text_of(const std::vector<Slice>& slices) {
    std::string text;
    for (const Slice& s : slices) { text += strprintf("%g-%g:%d ", s.start, s.end, s.colour); }
    return text;
}
TEST_CASE("ddp: what --plot shows of a step over Gloo") {
    Trace trace;
    trace.ranges = {a_range("overlapped", -1, 1000, 2000), a_range("all-reduce", -1, 1001, 1009),  // the barrier
                    a_range("forward", 0, 1010, 1200),     a_range("layer", 2, 1020, 1100),
                    a_range("loss", 0, 1200, 1300),        a_range("backward", 0, 1300, 1700),
                    a_range("loss", 5, 1310, 1400),        a_range("all-reduce", -1, 1500, 1600),
                    a_range("all-reduce", -1, 1650, 1750), a_range("synchronize gradients", 0, 1700, 1750),
                    a_range("optimizer", 0, 1750, 1900)};
    std::vector<Slice> slices = slices_of_step(trace);
    CHECK(text_of(slices) == "1010-1200:0 1200-1300:0 1300-1700:1 1500-1600:4 1650-1750:4 1700-1750:7 1750-1900:2 ");
    StepSums sums = sums_of(slices);
    CHECK(sums.step == 890);
    CHECK(sums.all_reduces == 200);
    CHECK(sums.hidden == 150);  // 100 and 50
    CHECK(slices_of_step(Trace()).empty());
    CHECK(sums_of({}).step == 0);
}
TEST_CASE("ddp: what --plot shows of a step's kernels") {
    Trace trace;
    trace.ranges = {a_range("overlapped", -1, 0, 500), a_range("all-reduce", 0, 1, 2),  // the barrier
                    a_range("forward", 0, 10, 20),     a_range("matmul", 2, 11, 12),
                    a_range("backward", 0, 20, 40),    a_range("layer", 4, 21, 30),
                    a_range("all-reduce", 5, 25, 26),  a_range("synchronize gradients", 0, 40, 50),
                    a_range("all-reduce", 7, 41, 42),  a_range("optimizer", 0, 50, 60)};
    const char* nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)";
    trace.work = {a_kernel(nccl, 1, 2, 4),
                  a_kernel("gemm", 3, 100, 200),
                  a_kernel("gemm", 5, 200, 300),
                  a_kernel(nccl, 6, 250, 350),
                  a_kernel("gemm", 4, 300, 400),
                  a_kernel(nccl, 8, 380, 420),
                  a_kernel("[CUDA memset]", 7, 405, 406),
                  a_kernel("adamw", 9, 430, 480),
                  a_kernel("[CUDA memcpy Device-to-Host]", 0, 490, 491)};
    std::vector<Slice> slices = slices_of_step(trace);
    CHECK(text_of(slices) == "100-200:0 200-300:1 250-350:4 300-400:1 380-420:4 400-430:7 430-480:2 ");
    StepSums sums = sums_of(slices);
    CHECK(sums.step == 380);
    CHECK(sums.all_reduces == 140);
    CHECK(sums.hidden == 120);  // 100 and 20
    // Gloo's copies lie within its thread's range, which is what is shown.
    trace.ranges.push_back(a_range("all-reduce", -1, 240, 360));
    trace.work[3] = a_kernel("[CUDA memcpy Device-to-Host]", 10, 250, 350);
    CHECK(text_of(slices_of_step(trace)) == "100-200:0 200-300:1 240-360:4 300-400:1 380-420:4 400-430:7 430-480:2 ");
}
TEST_CASE("ddp: --plot draws all ranks, with --trace and without") {
    if (lacks("gloo", CPU, 2)) { return; }
    Folder folder;
    std::string svg_path = folder / "steps.svg", json_path = folder / "steps.json";
    for (bool with_trace : {false, true}) {
        std::vector<std::string> words = {
            "naive_ddp_benchmarking", "--quick", "--device", "cpu", "--nproc", "2", "--plot", svg_path};
        if (with_trace) { words.insert(words.end(), {"--trace", json_path}); }
        Run r = run_cs336(words);
        INFO(r.err);
        CHECK(r.exit_code == 0);
        std::string svg = read_file(svg_path);
        for (const char* part :
             {">no sync<", ">naive: 39 all-reduces after backward<", ">rank 0 computes<", ">rank 1 computes<",
              ">communicates<", "hidden 0.0%", "backend gloo", "precision fp32"}) {
            INFO(part);
            CHECK(has(svg, part));
        }
        size_t rows = 0;  // with all-reduces: naive's, a rank each
        for (size_t at = 0; (at = svg.find("class=\"slices s4\"", at)) != std::string::npos; at++) { rows++; }
        CHECK(rows == 2);
        CHECK(svg.size() < 20000);
        CHECK(std::ifstream(json_path).good() == with_trace);
    }
    Run wrong = run_cs336({"naive_ddp_benchmarking", "--quick", "--plot", "/nonexistent/x.svg"});
    CHECK(wrong.exit_code == 2);
    CHECK(wrong.out == "");
    CHECK(has(wrong.err, "--plot: got '/nonexistent/x.svg', takes a file name that ends in .svg"));
}
// The same options may make different models, where a machine has no GPU and scales down.
static void check_other_model(const Communicator& c) {
    if (c.rank == 0) {  // what data_parallel would tell the others
        gather_text(c, "w [2]\n");
        return;
    }
    Tensor weights = from_floats({1, 2, 3}, {3}), w = require_gradient(weights);
    CHECK_THROWS_WITH(data_parallel(c, NAIVE, 0, weights, empty({3}, F32, GRADIENTS), {{"w", {3}, 0, w}}, {w}),
                      "the models differ: where rank 0 has w [2], rank 1 has w [3]");
}
TEST_CASE("ddp: a rank with another model") {
    if (lacks("gloo", CPU, 2)) { return; }
    in_ranks("ddp: a rank with another model", 2, CPU, check_other_model);
}
TEST_CASE("ddp: ranks with different models stop before the first collective") {
    if (lacks("gloo", CPU, 2)) { return; }
    double before = now_ms();
    const char* ranks =
        "for r in 0 1; do RANK=$r WORLD_SIZE=2 MASTER_PORT=%d timeout 20 %s naive_ddp_benchmarking --quick "
        "--device cpu --timeout 3 --d_model $((32 + 32 * r)) --num_heads 4 & done; wait";
    std::string all = run_shell(strprintf(ranks, 20000 + (int)(getpid() % 10000), program().c_str())).out;
    INFO(all);
    CHECK(has(all, "rank 1 has --d_model 64, but rank 0 has --d_model 32"));
    CHECK(has(all, "rank 1 of 2 did not start"));
    CHECK(now_ms() - before < 5000);
    MESSAGE("different models: over after " << (int)(now_ms() - before) << " ms");
}
TEST_CASE("ddp: communication_accounting") {
    Run r = run_cs336({"communication_accounting", "--format", "csv"});
    CHECK(r.exit_code == 0);
    for (const char* row : {"2 D F L,219848638464",
                            ",879.4,GB",
                            ",819.0,GiB",
                            ",3517.6,GB",
                            ",3276.0,GiB",
                            ",17547264,bytes",
                            ",0.016342,GiB",
                            "in GB\",43.97",
                            "in GiB\",40.95",
                            "0 tokens per device\",(16 P + A/2) / (memory - A/2),38",
                            "2048 tokens per device\",(16 P + A/2) / (memory - A/2),46",
                            "8192 tokens per device\",(16 P + A/2) / (memory - A/2),156",
                            "A/2 = memory,10828",
                            ",2555.6,",
                            ",25302,tokens",
                            ",395.3,tokens",
                            ",1581.4,tokens",
                            ",20445,tokens",
                            ",319.4,tokens",
                            ",1277.8,tokens",
                            ",20.8,chips",
                            ",245.3,tokens",
                            ",15700,tokens",
                            ",61.3,tokens",
                            ",3925,tokens",
                            "\"least batch, X = 8, Y = 8, not overlapped\",as in c,16594",
                            "\"least batch, X = 4, Y = 16, not overlapped\",as in c,22021"}) {
        INFO(row << " in\n" << r.out);
        CHECK(has(r.out, row));
    }
    Run beyond = run_cs336({"communication_accounting", "--tflops", "1e308", "--bandwidth_gb", "1e-308"});
    CHECK(beyond.exit_code == 1);
    CHECK_MESSAGE(has(beyond.err, "alpha is inf: --tflops, --bandwidth_gb"), beyond.err);
    CHECK(beyond.out == "");
    Run none = run_cs336({"communication_accounting", "--tokens", "10828", "--tp", "21", "--format", "csv"});
    CHECK(has(none.out, "10828 tokens per device\",(16 P + A/2) / (memory - A/2),none"));
    CHECK(has(none.out, "(alpha X / M_X) / (1 - alpha Y / (M_Y F)),none"));
}
