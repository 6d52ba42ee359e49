// Tests of plan.cu.
#include "test.h"

using Words = std::vector<std::string>;

TEST_CASE("plan: a default is scaled down and named; what was typed stays") {
    begin_on(CPU);
    Options o;
    o.batch_size = 4, o.steps = 10, o.top = 3, o.warmup = {5}, o.context_lengths = {128, 256}, o.sizes_mb = {0.5, 1e5};
    o.size = {"small", "medium", "large", "xl", "2.7B"};
    o.given["steps"] = "10";
    Plan p{o};
    CHECK(p.scaled_down == "");
    p.shrink("batch_size", &Options::batch_size, 1);
    p.shrink("steps", &Options::steps, 2);
    p.shrink("top", &Options::top, 3);
    p.shrink("warmup", &Options::warmup, {1});
    p.shrink("context_length", &Options::context_lengths, {128, 256, 512});
    p.shrink("context_length", &Options::context_lengths, {128});
    p.shrink("sizes_mb", &Options::sizes_mb, {0.5}, "only half a MB");
    p.shrink_size();
    CHECK(p.scaled_down ==
          "; scaled down: batch_size 1 instead of 4, warmup 1 instead of 5, context_length 128 instead of 128,256, "
          "only half a MB, size small instead of small,medium,large,xl,2.7B");
    CHECK(p.o.steps == 10);
    CHECK(p.o.context_lengths == std::vector<int>{128});
    REQUIRE(configs_of(p.o).size() == 1);
    CHECK(configs_of(p.o)[0].name == "small");
    CHECK(has(p.origin(), "; commit " + commit() + p.scaled_down));

    o.d_model = 128, o.num_heads = 4;
    Plan custom{o};
    custom.shrink_size();
    CHECK(custom.scaled_down == "");
    CHECK(configs_of(custom.o)[0].name == "custom");
}

TEST_CASE("plan: xl is each edition's own, the other sizes are the same in both") {
    begin_on(CPU);
    auto width = [](const char* edition, const char* size) {
        Options o;
        o.edition = edition, o.size = {size}, o.vocab_size = 10000;
        std::vector<ModelConfig> configs = configs_of(o);
        REQUIRE(configs.size() == 1);
        CHECK(size_option(configs[0]) == size);
        return configs[0].name + strprintf(" %d", configs[0].d_model);
    };
    CHECK(width("2025", "xl") == "xl 1600");
    CHECK(width("2026", "xl") == "xl (2026) 2560");
    for (const char* edition : {"2025", "2026"}) {
        CHECK(width(edition, "small") == "small 768");
        CHECK(width(edition, "2.7B") == "2.7B 2560");
        CHECK(width(edition, "10B") == "10B 4608");
    }
    Options o;
    o.edition = "2026", o.size = {"small", "xl", "10B"}, o.vocab_size = 10000;
    Plan p{o};
    p.shrink_size();
    CHECK(p.scaled_down == "; scaled down: size small instead of small,xl (2026),10B");
}

TEST_CASE("plan: the default mode falls back to fused, a typed one is refused") {
    begin_on(CPU);
    Options o;
    o.d_model = 96, o.num_heads = 2, o.vocab_size = 10;  // no FlashAttention for head size 48
    o.precision = {"fp32", "bf16"}, o.mode = {"flash"};
    Plan p{o};
    p.choose_models();
    CHECK(p.precisions == std::vector<Precision>{FP32, PREC_BF16});
    CHECK(p.modes == std::vector<Mode>{FUSED});
    o.given["mode"] = "flash";
    Plan typed{o};
    CHECK_THROWS_AS(typed.choose_models(), Failure);
}

TEST_CASE("plan: what does not fit is not tried, and what runs out of memory is a row") {
    begin_on(CPU);
    int calls = 0;
    auto run = [&] { calls++; };
    Attempt too_large{false, SIZE_MAX}, held{false, SIZE_MAX}, small, breaks{false, size_t(3) << 29}, fails;
    too_large.run("row", 1, run);
    CHECK(calls == 0);
    CHECK(!too_large.ran);
    held.run("row", 1, run, SIZE_MAX);  // all of it is there already
    small.run("row", 1, run);
    CHECK(calls == 2);
    CHECK((held.ran && small.ran));
    CHECK(small.cell("1.5") == "1.5");
    Tensor x = require_gradient(from_floats({1}, {1}));
    breaks.run("row", 1, [&] {
        square(x);
        throw OutOfMemory(1, "no room");
    });
    CHECK(!breaks.ran);
    CHECK(breaks.cell("1.5") == "OOM (1.5 GiB)");
    CHECK(x.gradient->uses == 0);  // the tape is empty
    CHECK_THROWS_AS(fails.run("row", 1, [] { fail("something else"); }), Failure);
}

TEST_CASE("plan: a default size that does not fit becomes the largest that does, then batch and length are halved") {
    begin_on(CPU);
    Options o;
    o.edition = "2026", o.size = {"8B"}, o.vocab_size = 10000, o.batch_size = 4, o.context_length = 1024;
    o.precision = {"fp32"}, o.mode = {"flash"};
    using Setting = std::vector<std::string>;
    auto shrunk = [](const Options& o, int least_batch, const std::function<bool(const Plan&)>& fits) {
        Plan p{o};
        p.choose_models();
        context.mode = p.modes[0];
        p.shrink_to_fit(least_batch, fits);
        CHECK(context.mode == p.modes[0]);
        return Setting{p.configs[0].name, std::to_string(p.o.batch_size), std::to_string(p.o.context_length),
                       p.scaled_down};
    };
    auto width_to = [](int width) { return [=](const Plan& p) { return p.configs[0].d_model <= width; }; };
    auto tokens_to = [](int tokens) {
        return [=](const Plan& p) { return p.o.batch_size * p.o.context_length <= tokens; };
    };
    const std::string down = "; scaled down: ", why = ", which does not fit";
    CHECK(shrunk(o, 1, width_to(4096)) == Setting{"8B", "4", "1024", ""});
    CHECK(shrunk(o, 1, width_to(3000)) ==
          Setting{"xl (2026)", "4", "1024", down + "size xl (2026) instead of 8B" + why});
    CHECK(shrunk(o, 1, width_to(1279)) == Setting{"medium", "4", "1024", down + "size medium instead of 8B" + why});
    CHECK(shrunk(o, 1, width_to(700)) == Setting{"8B", "4", "1024", ""});  // nothing fits: a row says so
    CHECK(shrunk(o, 1, tokens_to(512)) ==
          Setting{"small", "1", "512",
                  down + "size small instead of 8B" + why + ", batch_size 1 instead of 4" + why +
                      ", context_length 512 instead of 1024" + why});
    CHECK(shrunk(o, 2, tokens_to(512))[1] == "2");
    o.given["batch_size"] = "4";
    CHECK(shrunk(o, 1, tokens_to(512)) ==
          Setting{"small", "4", "128",
                  down + "size small instead of 8B" + why + ", context_length 128 instead of 1024" + why});
    o.given["checkpoint"] = "20";  // blocks of 8B
    CHECK(shrunk(o, 1, tokens_to(512))[0] == "8B");
    o.given.erase("checkpoint"), o.given["size"] = "8B", o.given["context_length"] = "1024";
    CHECK(shrunk(o, 1, tokens_to(512)) == Setting{"8B", "4", "1024", ""});
    o = Options();
    o.edition = "2025", o.size = {"2.7B"}, o.vocab_size = 10000, o.precision = {"fp32"}, o.mode = {"fused"};
    CHECK(shrunk(o, 1, width_to(2000))[0] == "xl");
}

TEST_CASE("plan: META counts the FLOPs of the products, and of flash attention's causal half") {
    begin_on(CPU);
    const int B = 2, T = 128;
    const ModelConfig& c = model_sizes[0];
    const double whole = (double)forward_flops(c, B, T), scores = 4.0 * B * T * T * c.d_model * c.num_layers;
    context.mode = EAGER;
    CHECK(predicted_peak(c, B, T, FORWARD).flops == whole);
    CHECK(predicted_peak(c, B, T, STEP).flops == 3 * whole);
    context.mode = FLASH;
    CHECK(predicted_peak(c, B, T, FORWARD).flops == whole - scores / 2);
    CHECK(predicted_peak(c, B, T, STEP).flops == 3 * (whole - scores) + 3.5 * scores / 2);
    context.checkpoint = 1;  // forward's products, without the head's, run again
    CHECK(predicted_peak(c, B, T, STEP).flops > 3.9 * (whole - scores));
}

TEST_CASE("plan: --memory is what a run may use of its device, beside what it holds") {
    begin_on(CPU);
    const size_t held = memory_use(CPU).now;
    context.memory = held + (64 << 20);
    CHECK(available_memory(CPU) == 64 << 20);
    {
        Tensor x = empty({16 << 20}, U8);
        CHECK(available_memory(CPU) == 48 << 20);
    }
    Attempt fits, too_large;
    fits.needs.bytes = 64 << 20, too_large.needs.bytes = fits.needs.bytes + 1;
    int calls = 0;
    for (Attempt* a : {&fits, &too_large}) {
        a->run("row", 1, [&] { calls++; });
    }
    CHECK((calls == 1 && fits.ran && !too_large.ran));
    context.memory = 0;
    CHECK(available_memory(CPU) == 0);
    context.memory = SIZE_MAX;
    CHECK(available_memory(CPU) > 64 << 20);
}

static std::vector<std::vector<std::string>> plan_of(std::vector<std::string> words) {
    words.insert(words.end(), {"--plan", "--format", "csv"});
    Run r = run_cs336(words);
    CAPTURE(join(words, " "));
    CAPTURE(r.err);
    REQUIRE(r.exit_code == 0);
    CHECK(r.err == "");
    Table table = read_csv(r.out);
    bool on_card = std::find(words.begin(), words.end(), "--memory") != words.end();  // nobody knows how fast it is
    std::vector<std::string> columns = {"row", "predicted peak MiB", "fits"};
    const bool small = table.rows.at(0)[0] == "numbers and small tensors";
    if (small || (!on_card && table.columns.size() > 3)) { columns.push_back("rough seconds"); }
    bool none = has(table.caption, "no rough seconds: the speed of that card is not known here; ");
    CHECK(none == (on_card && !small));
    bool on_cpu = std::find(words.begin(), words.end(), "cpu") != words.end();
    if (on_card && !on_cpu) { CHECK(has(table.caption, "nothing ran: a GPU with ")); }
    const bool ranks =
        std::any_of(table.rows.begin(), table.rows.end(), [](const auto& row) { return has(row[0], " ranks, "); });
    CHECK(has(table.caption, "peaks are per rank") == ranks);
    CHECK(has(table.caption, "each rank is taken to have one such GPU") == (ranks && on_card));
    CHECK(table.columns == columns);
    REQUIRE(!table.rows.empty());
    return table.rows;
}
TEST_CASE("plan: every problem has a plan, here and for a GPU that is not here; list sums them up") {
    Table list = read_csv(run_cs336({"list", "--memory", "8GiB", "--format", "csv"}).out);
    int problems = 0, with_rows = 0;
    for (const std::vector<std::string>& row : list.rows) {
        CAPTURE(row[0]);
        bool problem = row[1] != "tool";
        CHECK((problem || row[0] == "scaling") == !row[8].empty());
        CHECK(row[8].empty() == row[9].empty());
        if (!problem) { continue; }
        problems++;
        plan_of({row[0]});
        auto card = plan_of({row[0], "--memory", "8GiB"});
        if (card[0][0] == "numbers and small tensors") { continue; }
        with_rows++;
        CHECK(row[8] == "-");  // nobody knows how fast it is
        const size_t n = card.size() == 1 ? 1 : card.size() - 1;
        CHECK((n == card.size() || card.back()[0] == "what fits: largest peak"));
        double largest = 0;
        for (size_t i = 0; i < n; i++) {
            CHECK((card[i][2] == "yes" || std::stod(card[i][1]) > 8192));
            if (card[i][2] == "yes") { largest = std::max(largest, std::stod(card[i][1])); }
        }
        CHECK((largest > 0 && largest <= 8192));
        CHECK(std::stod(card.back()[1]) == largest);
        CHECK(row[9] == strprintf("%.2g", largest / 1024));
    }
    CHECK(problems == 32);
    CHECK(with_rows >= 15);
    for (const std::vector<std::string>& row : read_csv(run_cs336({"list", "--format", "csv"}).out).rows) {
        if (row[0] == "fsdp_accounting") { CHECK(std::stod(row[8].substr(row[8].find_first_of("0123456789"))) > 0); }
    }
}

TEST_CASE("plan: a smaller card gets a smaller default, and a plan says what the run then predicts") {
    // The leaderboard's plans are those of one rank. Where there are two GPUs its default is two.
    const Words one_rank = cuda_devices() > 1 ? Words{"--nproc", "1"} : Words{};
    auto card = [&](const char* memory, const char* command) {
        Words words = {command, "--plan", "--memory", memory};
        if (words[0] == "leaderboard") { words.insert(words.end(), one_rank.begin(), one_rank.end()); }
        Run r = run_cs336(words);
        CHECK(r.exit_code == 0);
        return r.out;
    };
    CHECK(has(card("80GiB", "naive_ddp_benchmarking"),
              "| no sync + naive, 2 ranks, xl, batch 2, context length 512, step, fp32 flash"));
    CHECK(!has(card("80GiB", "naive_ddp_benchmarking"), "scaled down"));
    CHECK(has(card("24GiB", "naive_ddp_benchmarking"), "; scaled down: size large instead of xl, which does not fit"));
    CHECK(has(card("8GiB", "leaderboard"),
              "| small, batch 2, context length 32768, step, pure_bf16 flash, recompute, checkpoint ffn:6, head chunk "
              "2048, in 2 backward passes"));
    CHECK(!has(card("100GiB", "leaderboard"), "scaled down"));
    Words with_size = {"leaderboard", "--size", "8B", "--plan", "--memory", "8GiB"};
    with_size.insert(with_size.end(), one_rank.begin(), one_rank.end());
    const std::string typed = run_cs336(with_size).out;
    CHECK(has(typed, "| 8B, batch 2, context length 32768, step, pure_bf16 flash"));
    CHECK(has(typed, " | no   |"));
    CHECK(!has(typed, "scaled down"));

    std::vector<std::string> words = {"leaderboard", "--device", "cpu", "--nproc",      "1", "--quick",     "--d_model",
                                      "64",          "--d_ff",   "64",  "--num_layers", "2", "--num_heads", "2"};
    const std::string planned = plan_of(words)[0][1];
    std::vector<std::string> run = words;
    run.insert(run.end(), {"--format", "csv"});
    Table table = read_csv(run_cs336(run).out);
    REQUIRE(table.rows.size() == 1);
    CHECK(table.rows[0][8] == planned);
    const Words large = {"--batch_size", "1048576", "--head_chunk", "1048576", "--context_length", "1024"};
    run.insert(run.end(), large.begin(), large.end()), words.insert(words.end(), large.begin(), large.end());
    CHECK(has(run_cs336(run).out, strprintf("OOM (%.1f GiB)", std::stod(plan_of(words)[0][1]) / 1024)));
}

TEST_CASE("plan: where nothing fits, the last row says what the smallest needs") {
    auto rows = plan_of({"benchmarking_script", "--memory", "100MiB"});
    REQUIRE(rows.size() > 2);
    double least = INFINITY;
    for (size_t i = 0; i + 1 < rows.size(); i++) {
        CHECK(rows[i][2] == "no");
        least = std::min(least, std::stod(rows[i][1]));
    }
    CHECK(rows.back() == std::vector<std::string>{"nothing fits: smallest peak", strprintf("%.1f", least), "no"});
}

TEST_CASE("plan: nothing is written, and a table of small problems says so") {
    Folder folder;
    const std::string trace = folder / "t.json", plot = folder / "p.svg", out = folder / "out";
    plan_of({"benchmarking_script", "--quick", "--trace", trace, "--plot", plot, "--roofline"});
    plan_of({"memory_profiling", "--quick", "--out", out});
    CHECK(folder.files().empty());
    const std::vector<std::vector<std::string>> small = {{"numbers and small tensors", "< 102.4", "yes", "< 60"}};
    for (const char* command : {"fsdp_calcs", "naive_ddp"}) {
        CHECK(plan_of({command}) == small);
        CHECK(plan_of({command, "--memory", "8GiB"}) == small);
    }
    auto rows = plan_of({"train", "--data", "README.md", "--device", "cpu"});
    REQUIRE(rows.size() == 1);
    CHECK(rows[0].size() == 4);  // with seconds
    CHECK(rows[0][0] == "custom, batch 8, context length 128, step, fp32 flash");
}

TEST_CASE("plan: train's is its run's, also with several backwards and ranks") {
    Folder folder;
    std::vector<std::string> words = {
        "train", "--data", "README.md",      "--device",     "cpu", "--batch_size", "16", "--grad_accumulation",
        "4",     "--save", folder / "saved", "--save_every", "1"};
    const double planned = std::stod(plan_of(words)[0][1]);
    CHECK(folder.files().empty());
    words.insert(words.end(), {"--steps", "2", "--sample", "0"});
    Run run = run_cs336(words);
    REQUIRE(run.exit_code == 0);
    const std::string row = run.out.substr(run.out.rfind("\n| ") + 1);
    const double peak = std::stod(row.substr(row.rfind("|", row.size() - 3) + 1));
    CHECK(std::abs(peak / planned - 1) < 0.03);
    const std::vector<std::string> as_10B = {
        "train", "--data",       "README.md", "--nproc",      "2",  "--strategy",  "fsdp",  "--d_model",
        "4608",  "--d_ff",       "12288",     "--num_layers", "50", "--num_heads", "36",    "--context_length",
        "512",   "--batch_size", "4",         "--checkpoint", "1",  "--memory",    "139GiB"};
    CHECK(std::abs(std::stod(plan_of(as_10B)[0][1]) / 101130.9 - 1) < 0.01);
    CHECK(plan_of(as_10B)[0][2] == "yes");
    if (why_not("gloo", CPU, 2).empty()) {
        // With few tokens the peak is at the end, where each whole tensor is seen; --save would keep them here.
        const std::vector<std::string> few = {"train", "--data",           "README.md", "--device",
                                              "cpu",   "--context_length", "4",         "--steps",
                                              "2",     "--sample",         "0",         "--grad_accumulation",
                                              "4",     "--d_model",        "256",       "--d_ff",
                                              "2048",  "--num_layers",     "1"};
        for (const auto& [run_words, strategy] :
             {std::pair(words, "ddp"), {words, "sharded"}, {words, "fsdp"}, {few, "sharded"}, {few, "fsdp"}}) {
            std::vector<std::string> ranks = run_words;
            ranks.insert(ranks.end(), {"--nproc", "2", "--strategy", strategy});
            const double of_rank = std::stod(plan_of(ranks)[0][1]);
            Run r = run_cs336(ranks);
            INFO(join(ranks, " ") << "\n" << r.out << r.err);
            REQUIRE(r.exit_code == 0);
            const std::string last = r.out.substr(r.out.rfind("\n| ") + 1);
            CHECK(std::abs(std::stod(last.substr(last.rfind("|", last.size() - 3) + 1)) / of_rank - 1) < 0.03);
        }
    }
    CHECK(run_cs336({"train", "--data", "README.md", "--plan", "--nproc", "2", "--precision", "pure_bf16"}).exit_code ==
          2);
    CHECK(run_cs336({"train", "--data", "README.md", "--plan", "--nproc", "2", "--trace", folder / "t"}).exit_code ==
          2);
    CHECK(run_cs336({"train", "--data", "README.md", "--plan", "--save_every", "2"}).exit_code == 2);
}
TEST_CASE("plan: ranks that share the optimizer's state hold less of it") {
    auto rows = plan_of({"optimizer_state_sharding_accounting", "--device", "cpu", "--size", "small"});
    REQUIRE(rows.size() == 3);
    double whole = std::stod(rows[0][1]), shared = std::stod(rows[1][1]);
    ModelConfig small = model_sizes[0];
    double state = 0;
    for (const Parameter& p : lay_out_model(small).parameters) { state += 8.0 * count(p.shape) / (1 << 20); }
    CHECK(std::abs(whole - shared - state / 2) < 0.2);
}
