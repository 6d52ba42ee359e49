// Tests of bench_step.cu.
#include "test.h"

using Words = std::vector<std::string>;

static Run run_small(const char* command, Words words) {
    const Words model = {command,        "--device", "cpu",         "--d_model", "16",           "--d_ff", "16",
                         "--num_layers", "1",        "--num_heads", "1",         "--vocab_size", "16"};
    words.insert(words.begin(), model.begin(), model.end());
    return run_cs336(words);
}
// First cells of the rows of the table whose caption has these words, in csv; none without such a table.
static Words first_cells(const std::string& out, const std::string& caption) {
    size_t at = out.find(caption);
    Words cells;
    if (at == std::string::npos) { return cells; }
    at = out.find('\n', out.find('\n', at) + 1) + 1;  // behind the header
    while (at < out.size() && out[at] != '\n') {
        cells.push_back(out.substr(at, out.find(',', at) - at));
        at = out.find('\n', at) + 1;
    }
    return cells;
}

TEST_CASE("benchmark: benchmarking_script's tables have the columns of the write-ups") {
    Run r = run_small("benchmarking_script", {"--format", "csv", "--precision", "bf16,fp32"});
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    CHECK(
        has(r.out,
            "\nsize,d_model,d_ff,num_layers,num_heads,fw_mean_ms,fw_std_ms,bw_only_mean_ms,bw_only_std_ms,fwbw_mean_ms,"
            "fwbw_std_ms\ncustom,16,16,1,1,"));
    CHECK(has(r.out, "\nsize,precision,mode,step_mean_ms,step_std_ms,GFLOP/s,MFU %,peak fw MiB,peak step MiB\n"));
    CHECK(has(r.out, "\n,model,mean,std\n0,\"custom (forward, backward)\","));
    CHECK(has(r.out, "\n1,custom (forward only),"));
    CHECK(has(r.out, "in seconds; precision bf16, mode eager; batch 1, context length: 32, vocabulary 16, 1 warmup"));
    CHECK(first_cells(r.out, "whole steps") == Words{"custom", "custom", "custom", "custom"});  // bf16, fp32, two modes
    CHECK(has(r.out, "precision fp32, mode eager; batch 1, context length: 32, vocabulary 16, 1 warmup, 2 step\n"));
}
TEST_CASE("benchmark: (c) has its rows from fresh processes, unless one warm-up is typed or there is a trace") {
    Folder folder;
    auto warmups = [&](const Words& more) {
        Words words = {"--format", "csv", "--precision", "bf16,fp32"};
        words.insert(words.end(), more.begin(), more.end());
        Run r = run_small("benchmarking_script", words);
        REQUIRE_MESSAGE(r.exit_code == 0, r.err);
        const Words cells = first_cells(r.out, "(c): custom, each row a fresh process; precision bf16, mode eager;");
        CHECK(has(r.out, "# (c) ") == !cells.empty());
        return cells;
    };
    CHECK(warmups({}) == Words{"0", "1", "2", "5"});
    CHECK(warmups({"--warmup", "3,0"}) == Words{"0", "3"});
    CHECK(warmups({"--warmup", "1"}).empty());
    CHECK(warmups({"--trace", folder / "t.json"}).empty());
}
TEST_CASE("benchmark: what does not fit is a row; exit 1 if no row ran") {
    for (const char* command : {"benchmarking_script", "benchmarking_mixed_precision"}) {
        Run r = run_small(command, {"--batch_size", "4096", "--context_length", "65536", "--mode", "fused"});
        CHECK(r.exit_code == 1);
        CHECK(has(r.out, "OOM ("));
        CHECK(has(r.err, "nothing fits into the memory"));
        CHECK(!has(r.out, "nan"));
    }
}
TEST_CASE("benchmark: torch_compile and benchmarking_mixed_precision print all parts") {
    Run compile = run_small("torch_compile", {});
    REQUIRE_MESSAGE(compile.exit_code == 0, compile.err);
    for (const char* says : {"torch_compile (a)", "| size   | run_type  ", "| custom | forward+backward+optimizer |",
                             "**(b)** In fp32, compiled forward is ", "**(b)** A whole step, with AdamW, is "}) {
        CHECK_MESSAGE(has(compile.out, says), says, " in: ", compile.out);
    }
    Run mixed = run_small("benchmarking_mixed_precision", {});
    REQUIRE_MESSAGE(mixed.exit_code == 0, mixed.err);
    for (const char* says :
         {"autocast to float16", "autocast to bfloat16",
          "**(a)** Under autocast to float16 the "
          "parameters are float32, the first layer's output is float16, layer norm's output is float32, "
          "the logits are float16, the loss is float32 and the gradients are float32.",
          "its output is float32 under float16 and float32 under bfloat16", "| custom | tf32  ",
          "**(c)** Forward and backward in bf16 are ", "On a CPU low precision saves no arithmetic"}) {
        CHECK_MESSAGE(has(mixed.out, says), says, " in: ", mixed.out);
    }
}
TEST_CASE("benchmark: info") {
    Run r = run_cs336({"info", "--quick", "--device", "cpu", "--format", "csv"});
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    CHECK(has(r.out, "\nwhat,measured,peak by data sheet,unit\n"));
    CHECK(has(r.out, "\nmatmul 512^3 fp32 on the CPU,"));
}
TEST_CASE("benchmark: a step's rate is (6 N + 12 L C S) FLOP per token; no CPU has a known peak") {
    begin_on(CPU);
    const ModelConfig c{"custom", 64, 96, 3, 4, 50};
    const double N = 3 * (4 * 64 * 64 + 3 * 64 * 96) + 64 * 50, L = 3, C = 64, S = 16, tokens = 2 * S;
    CHECK(step_tflops(c, 2, 16, 5) == doctest::Approx(tokens * (6 * N + 12 * L * C * S) / 5e-3 / 1e12));
    CHECK(std::isnan(dense_peak(FP32)));
    CHECK(percent_of_peak(1, FP32) == "-");
}
TEST_CASE("benchmark: a single step has no deviation") {
    Run r = run_small("benchmarking_script", {"--steps", "1", "--warmup", "0"});
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    for (const std::string& cell : column(r.out, "fwbw_std_ms")) { CHECK(cell == ""); }
    CHECK(!has(r.out, "standard deviation is"));
}
extern "C" void __asan_init() __attribute__((weak));  // the address sanitizer takes terabytes of addresses
TEST_CASE("benchmark: without address space for OpenBLAS's buffers the program says so, and ends") {
    if (device_description().find("OpenBLAS") == std::string::npos || __asan_init) { return; }
    if (cuda_devices() > 0) { return skip_this_case("CUDA's libraries need more address space"); }
    const std::string program = getenv("CS336_BINARY") ? getenv("CS336_BINARY") : "./cs336";
    const std::string limited = "ulimit -v 150000; timeout 20 " + program;
    CHECK(system((limited + " list --device cpu >/dev/null").c_str()) == 0);
    CHECK(system((limited + " info --quick --device cpu 2>&1 | grep -q 'OpenBLAS needs'").c_str()) == 0);
}
