// Tests of the command line, most of them on the real program: the environment's CS336_BINARY, else
// ./cs336.
#include "test.h"
#define main program_main
#include "main.cu"
#undef main

#include <unistd.h>

#include <regex>
#include <sstream>
using Words = vector<string>;

static int lines(const string& text) { return (int)std::count(text.begin(), text.end(), '\n'); }

// The default that a command's --help tells. CLI11 2.1 prints `--steps INT=10`, 2.4 `--steps INT
// [10]`.
static string default_of(const string& option, const string& help) {
    std::smatch found;
    std::regex_search(
        help, found,
        std::regex("\n  --" + option + R"( [A-Z]+(?::\{[^}]*\})?(?:=| \[)([^\s\]]*))"));
    return found.size() == 2 ? found[1].str() : "none";
}

TEST_CASE("main: help and version") {
    Run help = run_cs336({"--help"}), nothing = run_cs336({}),
        train = run_cs336({"train", "--help"});
    CHECK(help.exit_code == 0);
    CHECK(run_cs336({"help"}).out == help.out);
    CHECK(has(help.out, "cs336 list"));
    CHECK(nothing.exit_code == 2);
    CHECK(nothing.out == "");
    CHECK(nothing.err == help.out);
    CHECK(train.exit_code == 0);
    CHECK(default_of("context_length", train.out) == "128");
    CHECK(lines(run_cs336({"--version"}).out) == 1);
}
// What the handouts set, and what we set where they do not.
TEST_CASE("main: the defaults are the handouts' settings") {
    const char* const table[] = {
        "benchmarking_script 2025 size=small,medium,large,xl,2.7B vocab_size=10000 "
        "context_length=256 batch_size=4 warmup=0,1,2,5 steps=10 precision=fp32 mode=eager,flash "
        "checkpoint=none seed=0 edition=2025 device=auto format=md",
        "benchmarking_script 2026 size=small,medium,large,xl,10B vocab_size=10000 "
        "context_length=512 batch_size=4 warmup=0,1,2,5 steps=10 precision=fp32",
        "nsys_profile 2025 size=small,medium,large,xl,2.7B context_length=128,256,512,1024 "
        "batch_size=4 warmup=2 steps=5 precision=fp32 mode=eager",
        "nsys_profile 2026 size=small,xl context_length=256,512 batch_size=4",
        "benchmarking_mixed_precision 2025 size=small,medium,large,xl,2.7B context_length=256 "
        "batch_size=4 warmup=5 steps=10 precision=fp32,tf32,bf16 mode=eager,flash",
        "benchmarking_mixed_precision 2026 size=small,medium,large,xl,10B context_length=512",
        "memory_profiling 2025 size=2.7B context_length=128,256,512 batch_size=4 "
        "precision=fp32,bf16 mode=eager",
        "memory_profiling 2026 size=xl context_length=128,2048 batch_size=4 precision=fp32,bf16",
        "gradient_checkpointing 2026 size=xl context_length=2048 batch_size=4 precision=fp32 "
        "mode=eager",
        "pytorch_attention 2025 steps=100",
        "torch_compile 2025 size=small,medium,large,xl,2.7B context_length=256 batch_size=4 "
        "warmup=5 steps=10",
        "torch_compile 2026 size=small,medium,large,xl,10B context_length=512",
        "flash_leaderboard 2025 d_model=1024 num_heads=16 context_length=16384 precision=bf16 "
        "impl=all",
        "distributed_communication_single_node 2025 warmup=5 steps=10 nproc=2 backend=auto "
        "timeout=60",
        "naive_ddp_benchmarking 2025 size=xl vocab_size=10000 context_length=512 batch_size=2 "
        "warmup=5 steps=10 precision=fp32 mode=flash nproc=2",
        "ddp_bucketed_benchmarking 2025 bucket_size_mb=1,10,100,1000 size=xl nproc=2",
        "communication_accounting 2025 d_model=16384 d_ff=53248 num_layers=126 tokens=2048 "
        "tflops=460 bandwidth_gb=180 fsdp=16 tp=4",
        "optimizer_state_sharding_accounting 2025 size=xl batch_size=2 nproc=2 precision=fp32",
        "fsdp_accounting 2026 size=xl batch_size=2 nproc=2 precision=fp32",
        "alternate_ring_all_reduce 2026 tensor_mb=1000 devices=8 bandwidth_gb=450",
        "data_parallel_calcs 2026 tokens=65536 d_model=4096 d_ff=11008 tflops=989 bandwidth_gb=450 "
        "devices=8",
        "fsdp_tp_calcs 2026 tokens=65536 d_model=4096 d_ff=11008 tflops=989 bandwidth_gb=450 "
        "fsdp=4 tp=2",
        "leaderboard 2026 size=8B context_length=32768 batch_size=2 precision=pure_bf16 mode=flash "
        "nproc=2 edition=2026",
        "train 2025 d_model=128 d_ff=512 num_layers=4 num_heads=4 context_length=128 batch_size=8 "
        "steps=200 lr=0.001 sample=200",
        "model 2025 steps=0 lr=0.001 rope_theta=10000",
    };
    for (const char* row : table) {
        std::istringstream words(row);
        string command, edition;
        words >> command >> edition;
        Run help = run_cs336({command, "--edition", edition, "--help"});
        REQUIRE_MESSAGE(help.exit_code == 0, help.err);
        for (string word; words >> word;) {
            const size_t equals = word.find('=');
            const string option = word.substr(0, equals), expected = word.substr(equals + 1);
            CHECK_MESSAGE(default_of(option, help.out) == expected, command, " ", edition, " --",
                          option);
        }
    }
}
TEST_CASE("main: --quick has its sizes in both editions, and what is typed wins") {
    auto parsed = [](const char* command, Words more) {
        more.insert(more.begin(), command);
        Options o;
        RestoreContext restore;
        CHECK(parse_options(find_command(command), more, o));
        return strprintf("%s %d %d", join(o.size, ",").c_str(), o.context_length, o.steps);
    };
    const Words quick = {"--quick", "--device", "cpu", "--edition"};
    for (const char* edition : {"2025", "2026"}) {
        Words words = quick;
        words.push_back(edition);
        CHECK(parsed("nsys_profile", words) == "small 64 2");
        CHECK(parsed("benchmarking_script", words) == "small 32 2");
        CHECK(parsed("memory_profiling", words) == "small 128 0");
        words.insert(words.end(), {"--size", "medium", "--context_length", "96"});
        CHECK(parsed("nsys_profile", words) == "medium 96 2");
    }
    CHECK(parsed("memory_profiling", {"--edition", "2026"}) == "xl 128 0");
}
TEST_CASE("main: a problem that times steps is small on a CPU") {
    for (const Command& command : COMMANDS) {
        if (!command.is_problem() || !command.takes("--steps")) { continue; }
        CAPTURE(command.id);
        CHECK(command.timed);
    }
}
TEST_CASE("main: large batches are numbers of tokens, too") {
    Options o;
    RestoreContext restore;
    CHECK(parse_options(find_command("fsdp_calcs"), {"fsdp_calcs", "--tokens", "2147483647"}, o));
    CHECK(o.tokens == 2147483647);
}
TEST_CASE("main: list has every problem, and the points add up to each edition's") {
    Run csv = run_cs336({"list", "--format", "csv"}), md = run_cs336({"list"});
    REQUIRE(csv.exit_code == 0);
    CHECK(lines(md.out) == lines(csv.out) + 2);  // an empty line and the rule
    int points[2] = {}, problems[2] = {};
    std::istringstream rows(csv.out.substr(csv.out.find("what\n") + 5));
    for (string line; std::getline(rows, line);) {
        Words cells;
        std::istringstream row(line);
        for (string cell; std::getline(row, cell, ',');) { cells.push_back(cell); }
        REQUIRE(cells.size() >= 5);
        for (int edition : {0, 1}) {
            bool has_it = cells[1 + edition] != "";
            points[edition] += has_it ? atoi(cells[3].c_str()) : 0, problems[edition] += has_it;
        }
    }
    CHECK(points[0] == 107);
    CHECK(points[1] == 137);
    CHECK(problems[0] == 23);
    CHECK(problems[1] == 28);
}
TEST_CASE("main: an edition has sizes and lengths of its own, and what is typed wins") {
    auto memory = [](Words more) {
        more.insert(more.begin(), {"memory_profiling", "--device", "cpu", "--precision", "fp32"});
        Run r = run_cs336(more);
        CHECK_MESSAGE(r.exit_code == 0, r.err);
        return r.out;
    };
    CHECK(has(memory({}), "2.7B"));
    CHECK(has(memory({"--edition", "2026"}), "xl (2026)"));
    const string typed = memory({"--edition", "2026", "--size", "small", "--context_length", "64"});
    CHECK(has(typed, "small"));
    CHECK(!has(typed, "2048"));
    Run none = run_cs336({"communication_accounting", "--edition", "2026"});
    CHECK(none.exit_code == 2);
    CHECK(has(none.err, "--edition: got 2026, whose handout has no such problem"));
}
TEST_CASE("main: a full disk under stdout is a failure") {
    for (const vector<string>& words :
         {vector<string>{"list"}, {"--version"}, {"--help"}, {"tp_calcs", "--help"}}) {
        Run r = run_cs336(words, "/dev/full");
        CHECK(r.exit_code == 1);
        CHECK(lines(r.err) == 1);
        CHECK(has(r.err, "stdout"));
    }
}
TEST_CASE("main: a closed pipe and a wrong rank are no crash") {
    Run r = run_shell("RANK= WORLD_SIZE=2 " + program() + " list | true");
    CHECK(!has(r.out, "terminate"));
    CHECK(has(r.out, "environment variable RANK: got '', takes a whole number"));
}
TEST_CASE("main: an output is no input") {
    Folder folder;
    const string same = folder / "same", link = folder / "link";
    write_file(same, read_file("LICENSE"));
    std::filesystem::create_symlink(same, link);
    const Words attention = {"attention", "--device", "cpu", "--inputs", same};
    for (const Words& more : {Words{"--out", same},
                              {"--out", link},
                              {"--out", folder.path},
                              {"--out", folder / "no/such"}}) {
        Words words = attention;
        words.insert(words.end(), more.begin(), more.end());
        Run wrong = run_cs336(words);
        CAPTURE(join(more, " "));
        CHECK(wrong.exit_code == 2);
        CHECK(lines(wrong.err) == 1);
        CHECK(has(wrong.err, "--out: "));
    }
    CHECK(read_file(same) == read_file("LICENSE"));
}
TEST_CASE("main: reproduce writes what a problem prints") {
    Folder folder;
    Run r = run_cs336(
        {"reproduce", "fsdp_calcs", "tp_calcs", "--edition", "2026", "--out", folder.path});
    CHECK_MESSAGE(r.exit_code == 0, r.err);
    CHECK(read_file(folder / "fsdp_calcs.md") == run_cs336({"fsdp_calcs"}).out);
    CHECK(folder.files().size() == 2);
    CHECK(run_cs336({"reproduce", "no_such", "--out", folder.path}).exit_code == 2);
    run_cs336({"reproduce", "fsdp_calcs", "--quick", "--format", "csv", "--out", folder.path});
    CHECK(read_file(folder / "fsdp_calcs.md") ==
          run_cs336({"fsdp_calcs", "--quick", "--format", "csv"}).out);
    // other sizes and formats are other outputs
    run_cs336({"reproduce", "fsdp_calcs", "--out", folder.path});
    CHECK(read_file(folder / "fsdp_calcs.md") == run_cs336({"fsdp_calcs"}).out);
}
TEST_CASE("main: reproduce names the edition where both have the problem, in other sizes") {
    Folder folder;
    Run r = run_cs336({"reproduce", "leaderboard", "memory_profiling", "--edition", "2026",
                       "--quick", "--device", "cpu", "--out", folder.path});
    CHECK_MESSAGE(r.exit_code == 0, r.err);
    CHECK(std::filesystem::exists(folder / "leaderboard.md"));  // in the 2026 handout alone
    CHECK(std::filesystem::exists(folder / "memory_profiling-2026.md"));
}
TEST_CASE("main: reproduce fails where a problem fails, and goes on") {
    Folder folder;
    if (cuda_devices() == 0) {
        Run r = run_cs336(
            {"reproduce", "flash_forward", "fsdp_calcs", "--device", "cuda", "--out", folder.path});
        CHECK(r.exit_code == 1);
        CHECK(has(r.err,
                  "cs336 flash_forward --device cuda --format md --edition 2025: exited with 1"));
        CHECK(has(read_file(folder / "fsdp_calcs.md"), "fsdp_calcs"));
        CHECK(folder.files().size() == 1);
    }
    Run wrong = run_cs336({"reproduce", "tp_calcs", "--device", "cpu"});
    CHECK(wrong.exit_code == 2);
    CHECK(has(wrong.err, "--out: is required on a CPU"));
    CHECK(has(run_cs336({"reproduce", "tp_calcs", "--quick"}).err,
              "--out: is required on a CPU and with --quick"));
}
TEST_CASE("main: reproduce tries to write a file before the work") {
    Run r = run_cs336({"reproduce", "naive_ddp", "--device", "cpu", "--out", "/proc"});
    CHECK(r.exit_code == 1);
    CHECK(has(r.err, "/proc/naive_ddp.md: cannot be written"));
    CHECK(!has(r.err, "ranks connected"));
    CHECK(!has(r.err, "gloo"));
}
TEST_CASE("main: reproduce names a folder where its file should be, and goes on") {
    Folder folder;
    std::filesystem::create_directory(folder.path + "/tp_calcs.md");
    Run r =
        run_cs336({"reproduce", "tp_calcs", "fsdp_calcs", "--device", "cpu", "--out", folder.path});
    CHECK(r.exit_code == 1);
    CHECK(has(r.err, "tp_calcs.md: cannot be written: expected a regular file"));
    CHECK(std::filesystem::is_regular_file(folder.path + "/fsdp_calcs.md"));
}
TEST_CASE("main: reproduce keeps a file of this commit, device, sizes and format only") {
    begin_on(CPU);
    const string device = device_description(), text = "fsdp; " + device + "; commit abc1234\n";
    CHECK(is_as_now(text, "abc1234", false));
    // A rank's caption: it has other threads.
    const string name = device.substr(0, device.find(','));
    CHECK(is_as_now("fsdp; " + name + ", 1 thread; commit abc1234\n", "abc1234", false));
    CHECK(!is_as_now(text, "abc1235", false));
    CHECK(!is_as_now(text, "abc1234", true));
    CHECK(is_as_now(text + "; sizes of --quick", "abc1234", true));
    CHECK(!is_as_now("fsdp; NVIDIA H100, driver 1, CUDA 13.0; commit abc1234\n", "abc1234", false));
    const string planned = "memory; meta (nothing is computed); commit abc1234\n";
    CHECK(is_as_now(planned, "abc1234", false));
#ifndef HAVE_CUDA  // else this asks for a card
    context.device = CUDA;
    CHECK(!is_as_now(planned, "abc1234", false));  // a GPU measures what a CPU predicts
    context.device = CPU;
#endif
    for (const char* none : {"unknown", "abc1234-dirty"}) {
        CHECK(!is_as_now("fsdp; " + device + "; commit " + none + "\n", none, false));
    }
    CHECK(!is_as_now("", "abc1234", false));
    context.csv = true;
    CHECK(!is_as_now(text, "abc1234", false));
    CHECK(is_as_now("# " + text, "abc1234", false));
    begin_on(CPU);
}
TEST_CASE("main: info's rates are FLOPs and bytes, read and written, per second") {
    begin_on(CPU);
    const int n = 256;
    const int64_t bytes = 2 << 20;
    Tensor a = zeros({n, n}, F32), b = zeros({n, n}, F32), c = zeros({n, n}, F32);
    Tensor from = zeros({bytes / 4}, F32), to = zeros({bytes / 4}, F32);
    double tflops = 0, gb_per_s = 0, product_ms = INFINITY, copy_ms = INFINITY;
    double product = 0, copied = 0;
    auto far_off = [](double ratio) {  // half or twice is
        return std::fabs(std::log(ratio)) > std::log(1.4);
    };
    // The best of each: other processes cannot make it better, but may keep it from coming soon.
    for (int i = 0; i < 20 || (i < 200 && (far_off(product) || far_off(copied))); i++) {
        tflops = max(tflops, matmul_tflops(FP32, n));
        gb_per_s = max(gb_per_s, copy_gb_per_s(bytes));
        product_ms =
            min(product_ms, stats_of(time_ms(2, 10, [&] { gemm(c, a, false, b, false); })).median);
        copy_ms =
            min(copy_ms, stats_of(time_ms(2, 10, [&] { copy_or_add(to, from, false); })).median);
        product = tflops * product_ms / (2e-9 * n * n * n);
        copied = gb_per_s * copy_ms / (2e-6 * bytes);
    }
    CAPTURE(product);
    CAPTURE(copied);
    CHECK(!far_off(product));
    CHECK(!far_off(copied));
    begin_on(CPU);
}
TEST_CASE("main: what runs on one GPU runs on the GPU that was asked for") {
    if (!begin<OnCUDA>()) { return; }
    for (const char* command :
         {"benchmarking_script", "nsys_profile", "benchmarking_mixed_precision", "memory_profiling",
          "gradient_checkpointing", "pytorch_attention", "torch_compile", "weighted_sum",
          "flash_forward", "flash_benchmarking", "flash_leaderboard"}) {
        Run r = run_cs336({command, "--device", "cuda", "--quick"});
        CHECK_MESSAGE(has(r.out.substr(0, r.out.find('\n')), device_description()), command, ": ",
                      r.err, r.out);
    }
}
TEST_CASE(
    "main: tests/vs_pytorch.py explains itself and refuses in one line, also without PyTorch") {
    // -S: no site-packages, so there is no torch
    auto run = [](const string& words) {
        return run_shell("python3 -S tests/vs_pytorch.py " + words);
    };
    Run help = run("--help");
    if (help.exit_code == 127) { return skip_this_case("no python3"); }
    CHECK(help.exit_code == 0);
    CHECK(has(help.out, "--max_ratio"));
    const pair<string, const char*> wrong[] = {
        {"--size small,tiny", "--size"},
        {"--max_ratio nan", "--max_ratio"},
        {"--rounds 0", "--rounds"},
        {"--no_model", "--no_model"},
        {"--speed 3", "--speed"},
        {"--program no/such", "no/such"},
        {"--context_length 256,0", "--context_length"},
        {"--program " + program() + " --quick", "PyTorch"},
    };
    for (const auto& [words, names] : wrong) {
        CAPTURE(words);
        Run r = run(words);
        CAPTURE(r.out);
        CHECK(r.exit_code == 2);
        CHECK(lines(r.out) == 1);
        CHECK(has(r.out, names));
    }
}

TEST_CASE("plan: xl is each edition's own, the other sizes are the same in both") {
    begin_on(CPU);
    auto width = [](const char* edition, const char* size) {
        Options o;
        o.edition = edition, o.size = {size}, o.vocab_size = 10000;
        ModelConfigs configs = configs_of(o);
        REQUIRE(configs.size() == 1);
        return configs[0].name + strprintf(" %d", configs[0].d_model);
    };
    CHECK(width("2025", "xl") == "xl 1600");
    CHECK(width("2026", "xl") == "xl (2026) 2560");
    for (const char* edition : {"2025", "2026"}) {
        CHECK(width(edition, "small") == "small 768");
        CHECK(width(edition, "10B") == "10B 4608");
    }
}
TEST_CASE("plan: the default mode falls back to fused, a typed one is refused") {
    begin_on(CPU);
    Options o;
    o.d_model = 96, o.num_heads = 2, o.vocab_size = 10;  // no FlashAttention for head size 48
    o.precision = {"fp32", "bf16"}, o.mode = {"flash"};
    CHECK(precisions_of(o) == vector<Precision>{FP32, PREC_BF16});
    CHECK(modes_of(o, configs_of(o)) == vector<Mode>{FUSED});
    o.given.insert("mode");
    CHECK_THROWS_AS(modes_of(o, configs_of(o)), Failure);
}
TEST_CASE(
    "plan: what does not fit is not tried, and what runs out of memory all the same has not fit") {
    begin_on(CPU);
    int calls = 0;
    auto run = [&] { calls++; };
    CHECK(run_if_fits("row", SIZE_MAX, run) == SIZE_MAX);
    CHECK(calls == 0);
    CHECK(run_if_fits("row", SIZE_MAX, run, SIZE_MAX) == 0);      // all of it is there already
    CHECK(run_if_fits("row", SIZE_MAX, run, SIZE_MAX - 1) == 0);  // all but one byte
    CHECK(run_if_fits("row", SIZE_MAX, run, 1) == SIZE_MAX);
    CHECK(run_if_fits("row", 0, run) == 0);
    CHECK(calls == 3);
    Tensor x = require_gradient(from_floats({1}, {1}));
    auto breaks = [&] {
        square(x);
        throw OutOfMemory("no room");
    };
    CHECK(oom_cell(run_if_fits("row", size_t(3) << 29, breaks)) == "OOM (1.5 GiB)");
    CHECK(x.gradient->uses == 0);  // the tape is empty
    CHECK_THROWS_AS(run_if_fits("row", 0, [] { fail("something else"); }), Failure);
}
