// Tests of the command line and of model.cu, on the real program: the environment's CS336_BINARY, else ./cs336.
#include "test.h"

#include <unistd.h>

#include <sstream>
using Words = std::vector<std::string>;

static int lines(const std::string& text) { return (int)std::count(text.begin(), text.end(), '\n'); }

TEST_CASE("main: help and version") {
    Run help = run_cs336({"--help"}), nothing = run_cs336({}), train = run_cs336({"train", "--help"});
    CHECK(help.exit_code == 0);
    CHECK(has(help.out, "cs336 list"));
    CHECK(nothing.exit_code == 2);
    CHECK(nothing.out == "");
    CHECK(nothing.err == help.out);
    CHECK(train.exit_code == 0);
    CHECK(has(train.out, "--context_length INT=128"));
    CHECK(lines(run_cs336({"--version"}).out) == 1);
}
TEST_CASE("main: list has every problem, and the points add up to each edition's") {
    Run csv = run_cs336({"list", "--format", "csv"}), md = run_cs336({"list"});
    REQUIRE(csv.exit_code == 0);
    CHECK(lines(md.out) == lines(csv.out) + 2);  // an empty line and the rule
    int points[2] = {}, problems[2] = {};
    std::istringstream rows(csv.out.substr(csv.out.find("what\n") + 5));
    for (std::string line; std::getline(rows, line);) {
        Words cells;
        std::istringstream row(line);
        for (std::string cell; std::getline(row, cell, ',');) { cells.push_back(cell); }
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
    const std::string typed = memory({"--edition", "2026", "--size", "small", "--context_length", "64"});
    CHECK(has(typed, "small"));
    CHECK(!has(typed, "2048"));
    Run none = run_cs336({"communication_accounting", "--edition", "2026"});
    CHECK(none.exit_code == 2);
    CHECK(has(none.err, "--edition: got 2026, whose handout has no such problem"));
}
TEST_CASE("main: a full disk under stdout is a failure") {
    Run r = run_cs336({"list"}, "/dev/full");
    CHECK(r.exit_code == 1);
    CHECK(lines(r.err) == 1);
    CHECK(has(r.err, "stdout"));
}
TEST_CASE("main: an output is no input") {
    Folder folder;
    const std::string same = folder / "same", link = folder / "link";
    write_file(same, read_file("LICENSE"));
    std::filesystem::create_symlink(same, link);
    const Words attention = {"attention", "--device", "cpu", "--inputs", same};
    for (const Words& more :
         {Words{"--out", same}, {"--out", link}, {"--out", folder.path}, {"--out", folder / "no/such"}}) {
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
    Run r = run_cs336({"reproduce", "fsdp_calcs", "tp_calcs", "--edition", "2026", "--out", folder.path});
    CHECK_MESSAGE(r.exit_code == 0, r.err);
    CHECK(read_file(folder / "fsdp_calcs.md") == run_cs336({"fsdp_calcs"}).out);
    CHECK(folder.files().size() == 2);
    CHECK(run_cs336({"reproduce", "no_such", "--out", folder.path}).exit_code == 2);
    run_cs336({"reproduce", "fsdp_calcs", "--quick", "--format", "csv", "--out", folder.path});
    CHECK(read_file(folder / "fsdp_calcs.md") == run_cs336({"fsdp_calcs", "--quick", "--format", "csv"}).out);
    run_cs336({"reproduce", "fsdp_calcs", "--out", folder.path});  // other sizes and formats are other outputs
    CHECK(read_file(folder / "fsdp_calcs.md") == run_cs336({"fsdp_calcs"}).out);
}
TEST_CASE("main: what runs on one GPU runs on the GPU that was asked for") {
    if (!begin<OnCUDA>()) { return; }
    for (const char* command : {"benchmarking_script", "nsys_profile", "benchmarking_mixed_precision",
                                "memory_profiling", "gradient_checkpointing", "pytorch_attention", "torch_compile",
                                "weighted_sum", "flash_forward", "flash_benchmarking", "flash_leaderboard"}) {
        Run r = run_cs336({command, "--device", "cuda", "--quick"});
        CHECK_MESSAGE(has(r.out.substr(0, r.out.find('\n')), device_description()), command, ": ", r.err, r.out);
    }
}
TEST_CASE("main: tests/vs_pytorch.py explains itself and refuses in one line, also without PyTorch") {
    // -S: no site-packages, so there is no torch
    auto run = [](const std::string& words) { return run_shell("python3 -S tests/vs_pytorch.py " + words); };
    Run help = run("--help");
    if (help.exit_code == 127) { return skip_this_case("no python3"); }
    CHECK(help.exit_code == 0);
    CHECK(has(help.out, "--max_ratio"));
    const std::pair<std::string, const char*> wrong[] = {
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
        std::vector<ModelConfig> configs = configs_of(o);
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
    CHECK(precisions_of(o) == std::vector<Precision>{FP32, PREC_BF16});
    CHECK(modes_of(o, configs_of(o), precisions_of(o)) == std::vector<Mode>{FUSED});
    o.given.insert("mode");
    CHECK_THROWS_AS(modes_of(o, configs_of(o), precisions_of(o)), Failure);
}
TEST_CASE("plan: what does not fit is not tried, and what runs out of memory all the same has not fit") {
    begin_on(CPU);
    int calls = 0;
    auto run = [&] { calls++; };
    CHECK(run_if_fits("row", SIZE_MAX, run) == SIZE_MAX);
    CHECK(calls == 0);
    CHECK(run_if_fits("row", SIZE_MAX, run, SIZE_MAX) == 0);  // all of it is there already
    CHECK(run_if_fits("row", 0, run) == 0);
    CHECK(calls == 2);
    Tensor x = require_gradient(from_floats({1}, {1}));
    auto breaks = [&] {
        square(x);
        throw OutOfMemory(1, "no room");
    };
    CHECK(oom_cell(run_if_fits("row", size_t(3) << 29, breaks)) == "OOM (1.5 GiB)");
    CHECK(x.gradient->uses == 0);  // the tape is empty
    CHECK_THROWS_AS(run_if_fits("row", 0, [] { fail("something else"); }), Failure);
}
