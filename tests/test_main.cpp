// Tests of the command line, on the real program: the environment's CS336_BINARY, else ./cs336.
#include "test.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include <algorithm>
using Words = std::vector<std::string>;

static int lines(const std::string& text) { return (int)std::count(text.begin(), text.end(), '\n'); }

TEST_CASE("main: help and version") {
    Run help = run_cs336({"--help"});
    CHECK(help.exit_code == 0);
    CHECK(help.err == "");
    CHECK(has(help.out, "benchmarking_script"));
    CHECK(has(help.out, "optimizer_state_sharding_accounting"));
    CHECK(has(help.out, "exit codes: 0"));

    Run nothing = run_cs336({});
    CHECK(nothing.exit_code == 2);
    CHECK(nothing.out == "");
    CHECK(nothing.err == help.out);

    Run train = run_cs336({"train", "--help"});
    CHECK(train.exit_code == 0);
    CHECK(train.err == "");
    CHECK(has(train.out, "--max_grad_norm"));

    Run version = run_cs336({"--version"});
    CHECK(version.exit_code == 0);
    CHECK(lines(version.out) == 1);
    CHECK(version.out.size() > 2);
}

// Splits one line of a table; no cell of `list` holds a quoted separator.
static Words cells(const std::string& line, char separator) {
    Words all = {""};
    for (char c : line) {
        if (c == separator) {
            all.push_back("");
        } else if (c != ' ') {
            all.back() += c;
        }
    }
    return all;
}

static Words lines_of(const std::string& text) {
    Words all;
    for (size_t start = 0, end; (end = text.find('\n', start)) != std::string::npos; start = end + 1) {
        all.push_back(text.substr(start, end - start));
    }
    return all;
}

TEST_CASE("main: list in md, csv and json says the same, and its points add up to each edition's") {
    auto list_as = [](const char* format) {  // a card's, whose speed nobody measures
        return run_cs336({"list", "--memory", "8GiB", "--format", format});
    };
    Run md = list_as("md"), csv = list_as("csv"), json = list_as("json");
    for (const Run& r : {md, csv, json}) {
        CHECK(r.exit_code == 0);
        CHECK(r.err == "");
    }
    Words markdown;
    for (const std::string& line : lines_of(md.out)) {
        if (line[0] == '|') { markdown.push_back(line); }
    }
    Words commas;
    for (const std::string& line : lines_of(csv.out)) {
        if (!line.empty() && line[0] != '#') { commas.push_back(line); }
    }
    nlohmann::json parsed = nlohmann::json::parse(json.out);
    REQUIRE(parsed.contains("rows"));
    size_t rows = parsed["rows"].size();
    REQUIRE(rows > 23);
    REQUIRE(markdown.size() == rows + 2);  // header and rule
    REQUIRE(commas.size() == rows + 1);

    int points[2] = {}, both = 0, tools = 0;  // of 2025 and 2026
    for (size_t i = 0; i < rows; i++) {
        Words in_md = cells(markdown[i + 2], '|'), in_csv = cells(commas[i + 1], ',');
        REQUIRE(in_md.size() == 12);  // a separator at either end
        REQUIRE(in_csv.size() == 10);
        for (int column = 0; column < 10; column++) { CHECK(in_md[column + 1] == in_csv[column]); }
        CHECK(has(parsed["rows"][i].dump(), "\"" + in_csv[0] + "\""));
        int worth = atoi(in_csv[3].c_str());
        bool tool = in_csv[1] == "tool";
        for (int edition : {0, 1}) { points[edition] += tool || in_csv[1 + edition].empty() ? 0 : worth; }
        both += !in_csv[1].empty() && !in_csv[2].empty() ? worth : 0;
        tools += tool ? worth : 0;
    }
    for (const auto& [id, worth] :
         {std::pair("gradient_checkpointing", 4), {"fsdp", 15}, {"fsdp_accounting", 5}, {"leaderboard", 10}}) {
        bool is_command = has(csv.out, std::string("\n") + id + ",");
        points[1] += is_command ? 0 : worth;
    }
    CHECK(points[0] == 107);
    CHECK(points[1] == 137);
    CHECK(both == 107 - 21);  // 2026 left out buckets and accounting
    CHECK(tools == 0);
    CHECK(has(csv.out, "\nmemory_profiling,1.1.6,2.1.6,4,"));
    CHECK(has(csv.out, "\nddp_bucketed_benchmarking,2.3.3,,3,"));
    CHECK(has(csv.out, "\ntp_calcs,,8.4,4,cs336 tp_calcs,calcs.cu,notes/2026-8.4-tp_calcs.md,"));
    if (cuda_devices() == 0) {  // a check is no smaller without a GPU, a measurement is
        CHECK(has(csv.out, "notes/1.3.2-flash_forward.md,yes,"));
        CHECK(has(csv.out, "notes/1.3.2-flash_benchmarking.md,scaled down,"));
    }
}

TEST_CASE("main: help is --help") {
    CHECK(run_cs336({"help"}).out == run_cs336({"--help"}).out);
    CHECK(run_cs336({"help", "train"}).out == run_cs336({"train", "--help"}).out);
    CHECK(has(run_cs336({"help", "nonsense"}).err, "no such command"));
}

// What --help calls an option's default.
static std::string default_of(const std::string& help, const std::string& option, const std::string& edition = "2025") {
    for (const std::string& line : lines_of(help)) {
        size_t at = line.find(" (default ");
        if (line.find("  --" + option + " ") == 0 && at != std::string::npos) {
            std::string both = line.substr(at + 10, line.size() - at - 11);
            size_t other = both.find("; 2026: ");
            bool newer = edition == "2026" && other != std::string::npos;
            return newer ? both.substr(other + 8) : both.substr(0, other);
        }
    }
    return "none";
}

TEST_CASE("main: each edition has the defaults that help shows, and what is typed wins") {
    struct Case {
        Words words;
        std::string option, in_2025, in_2026;  // and the defaults that help shows
        Words shown;                           // by the output with --edition 2026
    };
    const Words quick = {"--device", "cpu", "--quick", "--vocab_size", "50"};
    std::vector<Case> cases = {
        {{"benchmarking_script", "--plan", "--mode", "flash"},
         "size",
         "small,medium,large,xl,2.7B",
         "small,medium,large,xl,10B",
         {"size small instead of small,medium,large,xl (2026),10B\n", "context_length 32 instead of 512, "}},
        {{"benchmarking_script", "--mode", "flash", "--d_model", "16", "--d_ff", "16", "--num_layers", "1",
          "--num_heads", "2", "--context_length", "16"},
         "context_length",
         "256",
         "512",
         {"context length: 16, ", "; scaled down: batch_size 1 instead of 4, steps 2 instead of 10, warmup 1"}},
        {{"nsys_profile", "--plan"},
         "context_length",
         "128,256,512,1024",
         "256,512,1024",
         {"size small instead of small,xl (2026), context_length 32 instead of 256,512,1024, "}},
        {{"nsys_profile"}, "size", "small,medium,large,xl,2.7B", "small,xl", {}},
        {{"memory_profiling", "--mode", "fused", "--precision", "bf16"},
         "size",
         "2.7B",
         "xl",
         {"\n| xl (2026) |            128 |", "\n| xl (2026) |           2048 |",
          "4 x 2048 x 2560 x 4 = 83886080 bytes"}},
        {{"memory_profiling", "--size", "2.7B", "--context_length", "64", "--mode", "fused", "--precision", "bf16"},
         "context_length",
         "128,256,512",
         "128,2048",
         {"\n| 2.7B |             64 |"}},
        {{"torch_compile", "--help"}, "context_length", "256", "512", {}},
        {{"benchmarking_mixed_precision", "--help"},
         "size",
         "small,medium,large,xl,2.7B",
         "small,medium,large,xl,10B",
         {}},
        {{"distributed_communication_single_node", "--help"}, "device", "auto", "cuda", {}}};
    if (why_not("gloo", CPU, 2).empty()) {
        for (const char* command :
             {"naive_ddp_benchmarking", "minimal_ddp_flat_benchmarking",
              "ddp_overlap_individual_parameters_benchmarking", "optimizer_state_sharding_accounting"}) {
            cases.push_back({{command}, "size", "xl", "xl", {"4 layers of d_model 128 instead of size xl (2026), "}});
        }
    }
    for (Case& c : cases) {
        CAPTURE(c.words[0]);
        std::string help = run_cs336({c.words[0], "--help"}).out;
        CHECK(default_of(help, "edition") == "2025");
        CHECK(default_of(help, c.option) == c.in_2025);
        CHECK(default_of(help, c.option, "2026") == c.in_2026);
        if (c.shown.empty()) { continue; }
        c.words.insert(c.words.end(), quick.begin(), quick.end());
        c.words.insert(c.words.end(), {"--edition", "2026"});
        Run r = run_cs336(c.words);
        CAPTURE(r.err);
        CAPTURE(r.out);
        CHECK(r.exit_code == 0);
        for (const std::string& shown : c.shown) { CHECK_MESSAGE(has(r.out, shown), shown); }
    }
    if (cuda_devices() == 0) {
        std::string out =
            run_cs336({"distributed_communication_single_node", "--edition", "2026", "--format", "csv"}).out;
        CHECK(has(out, "\nnccl,cuda,6,all,"));
        CHECK(!has(out, "\ngloo,"));
        CHECK(!has(out, "the same, median ms"));  // an empty table
    }
}

TEST_CASE("main: every problem takes an edition of its own, and says where nothing hangs on it") {
    for (const auto& row : read_csv(run_cs336({"list", "--format", "csv"}).out).rows) {
        const std::string &id = row[0], &in_2025 = row[1], &in_2026 = row[2];
        CAPTURE(id);
        if (in_2025 == "tool") { continue; }
        std::string help = run_cs336({id, "--help"}).out;
        CHECK(default_of(help, "edition") == (in_2025.empty() ? "2026" : "2025"));
        for (const char* edition : {"2025", "2026"}) {
            bool is_there = !(in_2026.empty() && edition == std::string("2026"));
            CHECK(run_cs336({id, "--edition", edition, "--help"}).exit_code == (is_there ? 0 : 2));
        }
    }
    auto rows = [](const char* edition) {
        Run r = run_cs336({"fsdp_calcs", "--edition", edition, "--format", "csv"});
        CHECK(r.exit_code == 0);
        return read_csv(r.out).rows;
    };
    CHECK(rows("2025") == rows("2026"));
    std::string help = run_cs336({"flash_forward", "--help"}).out;
    CHECK(has(help, "without effect here: both handouts agree"));
}

TEST_CASE("main: what does not fit says how much it takes, also in a sweep, whose processes are of the same edition") {
    const std::string words = "benchmarking_script --device cpu --mode flash --edition 2026 ";
    Run sweep =
        run_shell(program() + " " + words + "--size xl,10B --batch_size 4096 --context_length 4096 --warmup 0,1");
    CAPTURE(sweep.out);
    CHECK(sweep.exit_code == 0);
    CHECK(has(sweep.out, "\n|      1 | xl (2026) |    2560 | 10240 |         32 |        32 | OOM ("));
    CHECK(has(sweep.out, "\n|      1 | 10B       |    4608 | 12288 |         50 |        36 | OOM ("));
    if (available_memory(CPU) > size_t(48) << 30) { return; }  // so large is a forward pass of 10B
    Run one = run_shell(program() + " " + words + "--size 10B");
    CAPTURE(one.out);
    CHECK(has(one.out, "\n| 10B  |    4608 | 12288 |         50 |        36 | OOM (47.8 GiB)"));
    CHECK(has(one.out, "| OOM (191.2 GiB)"));
}

TEST_CASE("main: every command runs with the defaults that its help shows") {
    struct Case {
        Words words;
        std::vector<std::pair<const char*, const char*>> shown;  // option, and how the command's output shows it
    };
    const Words tiny = {"--device", "cpu", "--d_model", "32", "--d_ff", "64", "--num_layers", "1", "--num_heads", "2"};
    const Words timed = {"--quick", "--vocab_size", "50"};
    std::vector<Case> cases = {
        {{"benchmarking_script"},
         {{"batch_size", "batch_size 1 instead of %s, "},
          {"context_length", "context_length 32 instead of %s, "},
          {"steps", "steps 2 instead of %s, "},
          {"warmup", "warmup 1 instead of %s\n"},
          {"precision", "precision %s, "},
          {"mode", "mode %s;"}}},
        {{"nsys_profile"},
         {{"context_length", "context_length 32 instead of %s, "},
          {"batch_size", "batch_size 1 instead of %s, "},
          {"warmup", "warmup 1 instead of %s, "},
          {"steps", "steps 2 instead of %s\n"},
          {"precision", "precision %s, "},
          {"mode", "mode %s;"}}},
        {{"torch_compile", "--context_length", "8"},  // the model's: attention's lengths are scaled down all the same
         {{"steps", "steps 2 instead of %s, "}, {"precision", "precision %s, "}, {"", "lengths up to 256 instead of"}}},
        {{"memory_profiling"},
         {{"batch_size", "batch %s, "}, {"vocab_size", "vocabulary %s; "}, {"mode", "mode %s, "}}}};
    if (why_not("gloo", CPU, 2).empty()) {
        cases.push_back({{"naive_ddp_benchmarking"},
                         {{"nproc", "; %s ranks"},
                          {"batch_size", "batch_size 1 instead of %s, "},
                          {"context_length", "context_length 32 instead of %s, "},
                          {"steps", "steps 3 instead of %s, "},
                          {"warmup", "warmup 1 instead of %s\n"},
                          {"precision", "precision %s, "}}});
    }
    for (Case& c : cases) {
        c.words.insert(c.words.end(), tiny.begin(), tiny.end());
        if (c.words[0] != "memory_profiling") { c.words.insert(c.words.end(), timed.begin(), timed.end()); }
    }
    cases.push_back({{"pytorch_attention", "--device", "cpu", "--quick"}, {{"steps", "3 passes instead of %s\n"}}});
    cases.push_back({{"flash_leaderboard", "--device", "cpu", "--quick"},
                     {{"num_heads", "2 heads instead of %s, "}, {"head_size", "D %s, S 512"}}});
    cases.push_back({{"communication_accounting"},
                     {{"d_model", "d_model %s, "},
                      {"d_ff", "d_ff %s, "},
                      {"num_layers", "L = %s "},
                      {"tflops", "C = %s TFLOP/s"},
                      {"bandwidth_gb", "W = %s GB/s"},
                      {"fsdp", "X = %s (FSDP)"},
                      {"tp", "Y = %s (TP)"},
                      {"links_fsdp", "M_X = %s, "},
                      {"links_tp", "M_Y = %s; "},
                      {"gpu_gb", "GPUs of %s GB "},
                      {"tpu_gb", "below %s GB, "},
                      {"tokens", "GB, %s tokens"}}});
    cases.push_back({{"alternate_ring_all_reduce"},
                     {{"tensor_mb", "S = %s MB"}, {"devices", "N = %s; "}, {"bandwidth_gb", "W = %s GB/s"}}});
    cases.push_back({{"data_parallel_calcs"}, {{"devices", "N_DP = %s; "}}});
    cases.push_back({{"fsdp_tp_calcs"},
                     {{"batch_tokens", "B = %s tokens"},
                      {"d_model", " D = %s, "},
                      {"d_ff", "D_FF = %s, "},
                      {"tflops", "C = %s TFLOP/s"},
                      {"fsdp", "N_FSDP = %s, "},
                      {"tp", "N_TP = %s; "}}});
    cases.push_back({{"train", "--data", "README.md", "--device", "cpu", "--steps", "1", "--sample", "1"},
                     {{"d_model", "d_model %s, "},
                      {"d_ff", "d_ff %s, "},
                      {"num_layers", "; %s layers"},
                      {"num_heads", " %s heads, "},
                      {"batch_size", "batch %s, "},
                      {"context_length", "context length %s, "},
                      {"temperature", "(temperature %s)"}}});
    for (const Case& c : cases) {
        CAPTURE(c.words[0]);
        std::string help = run_cs336({c.words[0], "--help"}).out;
        Run r = run_cs336(c.words);
        CAPTURE(r.err);
        CHECK(r.exit_code == 0);
        for (const auto& [option, pattern] : c.shown) {
            CAPTURE(std::string(option));
            CAPTURE(r.out);
            std::istringstream value(*option ? default_of(help, option) : "-");
            char end = std::string(option) == "mode" ? ',' : '\n';  // each mode has a table of its own
            for (std::string item; std::getline(value, item, end);) {
                std::string text = pattern;
                if (*option) { text.replace(text.find("%s"), 2, item); }
                CHECK_MESSAGE(has(r.out, text), text);
            }
        }
    }
}

TEST_CASE("main: numbers are decimal, also with zeros in front") {
    CHECK(has(run_cs336({"communication_accounting", "--tokens", "010"}).out, "GB, 10 tokens per device"));
}

TEST_CASE("main: any unambiguous beginning of a command will do") {
    CHECK(run_cs336({"li", "--memory", "8GiB"}).out == run_cs336({"list", "--memory", "8GiB"}).out);
    // A whole name is never ambiguous, even where it begins another one.
    CHECK(has(run_cs336({"optimizer_state_sharding", "--nproc", "0"}).err, "cs336 optimizer_state_sharding: --nproc"));
}

TEST_CASE("main: what can mean one thing only is understood") {
    CHECK(run_cs336({"WHERE", "RoPE", "--FORMAT", "CSV"}).out == run_cs336({"where", "RoPE", "--format", "csv"}).out);
    CHECK(run_cs336({"version"}).out == run_cs336({"--version"}).out);
    std::string by_name = run_cs336({"flash_forward", "--help"}).out;
    for (const char* word : {"FLASH_FORWARD", "flash-forward", "Flash_Fo"}) {
        CHECK(run_cs336({word, "--help"}).out == by_name);
    }
    std::string leaderboard = run_cs336({"leaderboard", "--help"}).out;
    Run section = run_cs336({"9", "--help"});  // of 2026 only
    CHECK(section.out == leaderboard);
    CHECK(section.err == "section 9 of the 2026 handout: took leaderboard\n");
    const Words tiny = {"--plan", "--device", "cpu", "--mode", "eager", "--d_model", "64", "--num_heads", "2"};
    auto plan_of = [&](Words words) {
        words.insert(words.end(), tiny.begin(), tiny.end());
        return run_cs336(words);
    };
    Run of_2026 = plan_of({"2.1.3"});  // 2025's 2.1 is another problem
    CHECK(of_2026.err == "section 2.1.3 of the 2026 handout: took benchmarking_script --edition 2026\n");
    CHECK(has(of_2026.out, " instead of 512"));
    CHECK(has(plan_of({"1.1.3"}).out, " instead of 256"));
    CHECK(plan_of({"1.1.3", "--edition", "2026"}).err ==
          "section 1.1.3 of the 2025 handout: took benchmarking_script\n");
    Run typed = plan_of({"2.1.3", "--edition=2025"});
    CHECK(typed.err == "section 2.1.3 of the 2026 handout: took benchmarking_script\n");
    CHECK(has(typed.out, " instead of 256"));
    CHECK(has(run_cs336({"2.1", "--help"}).err, "of the 2025 handout: took distributed_communication_single_node\n"));
    CHECK(has(run_cs336({"3", "--Edition", "2026"}).err,
              "no problem has this section; candidates: gradient_checkpointing\n"));
    const std::string plan_8gib = run_cs336({"leaderboard", "--plan", "--memory", "8GiB"}).out;
    for (const char* memory : {"8gib", "8G", "8192MiB", "8g"}) {
        CHECK(run_cs336({"leaderboard", "--plan", "--memory", memory}).out == plan_8gib);
    }
    CHECK(run_cs336({"help", "1.1.3"}).out == run_cs336({"benchmarking_script", "--help"}).out);
    Run dashes = run_cs336({"train", "--data", "x", "--context-length", "0", "--Quick"});
    CHECK(has(dashes.err, "--context_length: got '0'"));
    CHECK(has(run_cs336({"benchmarking_script", "--size", "2.7b", "--d_model", "8"}).err, "--size: got '2.7B' and"));
}

// What a program writes to a terminal that is so wide. Both streams are the terminal.
static Run run_on_terminal(const Words& words, int columns) {
    int ours = posix_openpt(O_RDWR | O_NOCTTY);
    REQUIRE(ours >= 0);
    REQUIRE(grantpt(ours) == 0);
    REQUIRE(unlockpt(ours) == 0);
    winsize size = {50, (unsigned short)columns, 0, 0};
    int theirs = open(ptsname(ours), O_RDWR | O_NOCTTY);
    REQUIRE(theirs >= 0);
    REQUIRE(ioctl(theirs, TIOCSWINSZ, &size) == 0);
    Words all = {program()};
    all.insert(all.end(), words.begin(), words.end());
    std::vector<char*> argv;
    for (std::string& word : all) { argv.push_back(word.data()); }
    argv.push_back(nullptr);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        for (int fd : {0, 1, 2}) { dup2(theirs, fd); }
        execv(argv[0], argv.data());
        _exit(127);
    }
    close(theirs);
    std::string out;
    char buffer[4096];
    for (ssize_t n; (n = read(ours, buffer, sizeof buffer)) > 0;) { out.append(buffer, n); }  // fails after the last
    close(ours);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    out.erase(std::remove(out.begin(), out.end(), '\r'), out.end());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, out, ""};
}
static size_t widest(const std::string& text) {
    size_t most = 0;
    for (const std::string& line : lines_of(text)) {
        bool progress = has(line, "\033");
        auto starts = [](char c) { return (c & 0xC0) != 0x80; };  // a character
        most = std::max(most, progress ? 0 : (size_t)std::count_if(line.begin(), line.end(), starts));
    }
    return most;
}
TEST_CASE("main: on a terminal tables and help fit its width, and --wide shows all") {
    const Words bench = {"benchmarking_script", "--device", "cpu",          "--quick", "--mode",       "fused",
                         "--d_model",           "16",       "--d_ff",       "16",      "--num_layers", "1",
                         "--num_heads",         "2",        "--vocab_size", "50"};
    for (int columns : {60, 80, 100, 200}) {
        CAPTURE(columns);
        for (const Words& words : std::vector<Words>{{"list"}, {"train", "--help"}, {"data_parallel_calcs"}, bench}) {
            if (columns < 80 && words == bench) { continue; }
            CAPTURE(words[0]);
            Run r = run_on_terminal(words, columns);
            CHECK(r.exit_code == 0);
            CHECK_MESSAGE((int)widest(r.out) <= columns, r.out);
        }
    }
    // Of a card that is not here: the minutes on this machine differ from run to run.
    const Words list = {"list", "--memory", "8GiB"}, wide = {"list", "--memory", "8GiB", "--wide"},
                csv = {"list", "--memory", "8GiB", "--format", "csv"};
    std::string all = run_cs336(list).out, at_100 = run_on_terminal(list, 100).out;
    CHECK(widest(all) > 200);
    CHECK(run_on_terminal(wide, 80).out == all);
    CHECK(run_on_terminal(list, 400).out == all);
    // With two GPUs all problems run, and what is the same in all rows is said once, above the table.
    const bool all_run = cuda_devices() > 0 && why_not("nccl", CUDA, 2).empty();
    const std::string flash = "\n| flash_forward                                  | 1.3.2 | 4.2.2 | ";
    if (all_run) {
        CHECK(has(at_100, "\nIn all rows: runs here yes\n"));
        CHECK(has(at_100, "\nNot shown: notes page, command, file"));
        CHECK(has(run_on_terminal(list, 80).out, flash));
    } else {
        CHECK(has(at_100, "\nNot shown: notes page, command, file, points; --wide shows all columns\n"));
        CHECK(has(at_100, flash + "yes "));
        CHECK(has(run_on_terminal(list, 80).out, flash + "yes "));
    }
    CHECK(run_on_terminal(csv, 80).out == run_cs336(csv).out);
    std::string turned = run_on_terminal(bench, 80).out;
    CHECK(has(turned, "\n| size            | custom |\n| --------------- | -----: |\n| d_model         |     16 |\n"));
    CHECK(has(turned, "\n| peak step MiB   | "));
}
TEST_CASE("main: on a terminal `where` prints a topic once, and what each line is") {
    const std::string out = run_on_terminal({"where", "softmax"}, 80).out;
    CHECK(has(out, "\nonline softmax\n\n| what    | name                    | where  "));
    CHECK(has(out, "\n| kernel  | flash_v1_forward_kernel | attention.cu:"));
    CHECK(!has(out, "Not shown"));
    CHECK(has(run_cs336({"where", "softmax"}).out, "\n| online softmax   | kernel "));
}

TEST_CASE("main: on a narrow terminal a table keeps its results") {
    const std::vector<std::pair<Words, Words>> results = {
        {{"communication_accounting"}, {" value | unit ", " 219848638464 | "}},
        {{"fsdp_tp_calcs"}, {" value | unit ", " ms "}},
        {{"benchmarking_script", "--plan", "--memory", "80GiB"}, {" predicted peak MiB | fits |", " | yes  |\n"}},
        {{"mixed_precision_accumulation"}, {" sum | error against 10 |", "10.0001335"}},
        {{"where", "softmax"}, {"softmax_backward_kernel", "| name "}}};
    for (int columns : {80, 100, 120}) {
        for (const auto& [words, shown] : results) {
            Run r = run_on_terminal(words, columns);
            CHECK(r.exit_code == 0);
            CHECK_MESSAGE((int)widest(r.out) <= columns, r.out);
            for (const std::string& text : shown) { CHECK_MESSAGE(has(r.out, text), columns, ": ", r.out); }
        }
    }
    // Text in several lines, and nothing of it lost
    std::string at_80 = run_on_terminal({"communication_accounting"}, 80).out;
    CHECK(has(at_80,
              "\n| a    | saved for backward, | 2 L (D + F)          |     17547264 | bytes     |\n"
              "|      | bf16, per token     |                      |              |           |\n"));
    CHECK(!has(at_80, "Not shown"));
}
TEST_CASE("main: a table on a terminal: columns of one value, rows side by side, numbers in the middle") {
    // 60 rows, wider than any terminal: what is the same in all rows goes first, then numbers that are no results
    Run r = run_on_terminal({"flash_forward", "--device", "cpu"}, 60);
    CHECK(r.exit_code == 0);
    CHECK(has(r.out, "\nIn all rows: status ok\n\nNot shown: "));
    CHECK_MESSAGE(has(r.out, "\n| implementation | dtype    | causal |       O |       L |"), r.out);
    CHECK(widest(r.out) <= 60);
}

TEST_CASE("main: what an option wrote is said on stderr, and only if it did") {
    Folder folder;
    const std::string svg = folder / "x.svg", trace = folder / "x.json", save = folder / "save";
    Run plot = run_cs336({"mixed_precision_accumulation", "--plot", svg});
    CHECK(has(plot.err, "--plot: wrote " + svg + " ("));
    Words train = {"train", "--data", "LICENSE", "--device", "cpu", "--quick", "--sample", "0", "--steps", "1"};
    train.insert(train.end(), {"--trace", trace, "--save", save});
    Run r = run_cs336(train);
    CHECK(has(r.err, "--trace: wrote " + trace + " ("));
    CHECK(has(r.err, "--save: wrote " + save + " ("));
    CHECK(has(run_cs336({"memory_profiling", "--device", "cpu", "--quick", "--out", folder / "out"}).err,
              "--out: wrote timelines and snapshots to " + (folder / "out") + "\n"));
    std::string before = read_file(save);
    train.insert(train.end(), {"--lr", "1e18", "--min_lr", "1e18", "--warmup_steps", "0", "--steps", "2"});
    train.erase(train.begin() + 8, train.begin() + 10);  // the first --steps
    r = run_cs336(train);
    CHECK(r.exit_code == 1);
    CHECK(!has(r.err, "--save: wrote"));
    CHECK(read_file(save) == before);
    if (why_not("gloo", CPU, 2).empty()) {  // the launcher says it, once
        r = run_cs336({"train", "--data", "LICENSE", "--device", "cpu", "--quick", "--sample", "0", "--steps", "1",
                       "--nproc", "2", "--save", save});
        size_t first = r.err.find("--save: wrote");
        CHECK(first != std::string::npos);
        CHECK(r.err.find("--save: wrote", first + 1) == std::string::npos);
        std::string drawn = read_file(svg);
        r = run_cs336({"naive_ddp_benchmarking", "--quick", "--device", "cpu", "--d_model", "1048576", "--d_ff",
                       "1048576", "--num_heads", "1", "--plot", svg});  // OOM: there is nothing to draw
        CHECK(r.exit_code == 0);
        CHECK(!has(r.err, "--plot: wrote"));
        CHECK(read_file(svg) == drawn);
    }
}

TEST_CASE("main: wrong usage exits with 2, nothing on stdout and one line that names the option") {
    struct Wrong {
        Words words;
        const char* names;  // what the line has to name ...
        const char* and_;   // ... and say
    };
    const std::string bench = "benchmarking_script";
    const Wrong cases[] = {
        {{"nonsense"}, "nonsense", "naive_ddp"},
        {{"benchmarking"}, "benchmarking", "benchmarking_script, benchmarking_mixed_precision"},
        {{""}, "''", "no such command"},
        {{"--format", "md", "list"}, "--format", "no such command"},
        {{"list", "--speed", "3"}, "--speed", "no such option; it takes --help, --memory, --format"},
        {{"list", "--quack", "3"},
         "--quack",
         "no such option; did you mean --quick? It takes --help, --memory, --format"},
        {{"list", "--fromat=md"}, "--fromat=md", "did you mean --format? It takes"},
        {{"train", "--dta", "x"}, "--dta", "did you mean --data? It takes"},  // not: --data is missing
        {{bench, "--sise", "small"}, "--sise", "did you mean --size? It takes"},
        {{bench, "--szie", "small"}, "--szie", "did you mean --size? It takes"},
        {{"traim"}, "traim", "no such command; did you mean train?"},
        {{"benchmarking-scirpt"}, "benchmarking-scirpt", "did you mean benchmarking_script?"},
        {{"2.2"}, "2.2", "candidates: naive_ddp, naive_ddp_benchmarking"},
        {{"6"}, "6", "candidates: optimizer_state_sharding, optimizer_state_sharding_accounting"},
        {{"2.3"}, "2.3", "no problem has this section; candidates: minimal_ddp_flat_benchmarking, ddp_overlap"},
        {{"1.1.30"}, "1.1.30", "no problem has this section; `cs336 list` shows them"},
        {{"reproduce", "--only", "2.2"}, "2.2", "candidates: naive_ddp, naive_ddp_benchmarking"},
        {{"reproduce", "--only", "flash_farward"}, "flash_farward", "did you mean flash_forward?"},
        {{"list", "more"}, "more", "no such option; it takes --help, --memory, --format"},
        {{"list", "format", "md"}, "format", "no such option; did you mean --format? It takes"},
        {{"list", "--form", "md"}, "--form", "--format"},
        {{"list", "--format", "xml"}, "--format", "'xml'"},
        {{"list", "--format", ""}, "--format", "md, csv, json"},
        {{"list", "--format"}, "--format", "got nothing"},
        {{"list", "--format", "md", "--format", "md"}, "--format", "more than once"},
        {{"list", "--quick=3"}, "--quick", "takes none"},
        {{"list", "--quick=true"}, "--quick", "takes none"},
        {{"list", "--quick="}, "--quick", "takes none"},
        {{"list", "--causal=true"}, "--causal", "no such option"},
        {{bench, "--steps", "ten"}, "--steps", "'ten'"},
        {{bench, "--steps", "2.5"}, "--steps", "'2.5'"},
        {{bench, "--steps", " 2"}, "--steps", "' 2'"},
        {{bench, "--steps", "0"}, "--steps", "from 1 to 1048576"},
        {{bench, "--steps", "-3"}, "--steps", "'-3'"},
        {{bench, "--steps", "1048577"}, "--steps", "from 1 to 1048576"},
        {{bench, "--steps", "99999999999999999999"}, "--steps", "99999999999999999999"},
        {{bench, "--steps", "4294967297"}, "--steps", "4294967297"},
        {{bench, "--seed", "18446744073709551616"}, "--seed", "18446744073709551615"},
        {{bench, "--warmup", "1,,2"}, "--warmup", "'1,,2'"},
        {{bench, "--warmup", "1,2,"}, "--warmup", "'1,2,'"},
        {{bench, "--size", "small,tiny"}, "--size", "2.7B"},
        {{bench, "--size", "small,2.7"}, "--size", "8B; did you mean 2.7B?"},
        {{bench, "--size", "small,,xl"}, "--size", "'small,,xl'"},
        {{bench, "--size", "xl (2026)"}, "--size", "'xl (2026)'"},
        {{bench, "--edition", "2024"}, "--edition", "got '2024', takes one of 2025, 2026"},
        {{bench, "--edition", "2025,2026"}, "--edition", "takes one of 2025, 2026"},
        {{"memory_profiling", "--edition", ""}, "--edition", "takes one of 2025, 2026"},
        {{"ddp_bucketed_benchmarking", "--edition", "2026"},
         "--edition",
         "got '2026', takes 2025: 2026's handout has no such problem"},
        {{"communication_accounting", "--edition", "2026"},
         "--edition",
         "takes 2025: 2026's handout has no such problem"},
        {{"pytorch_attention", "--edition", "2024"}, "--edition", "takes one of 2025, 2026"},
        {{"fsdp_calcs", "--edition", "2024"}, "--edition", "takes one of 2025, 2026"},
        {{"info", "--edition", "2026"}, "--edition", "no such option"},
        {{bench, "--size"}, "--size", "got nothing"},
        {{bench, "--size", "small", "--d_model", "64"}, "--size", "--d_model"},
        {{bench, "--size", "small", "--num_heads", "4"}, "--size", "--num_heads"},
        {{bench, "--d_model", "63", "--num_heads", "2"}, "--d_model 63", "not divisible by --num_heads 2"},
        {{"nsys_profile", "--d_model", "62", "--num_heads", "2"}, "--num_heads 2", "= 31 is odd"},
        {{"naive_ddp_benchmarking", "--d_model", "63", "--num_heads", "2"}, "--d_model 63", "not divisible"},
        {{"naive_ddp_benchmarking", "--warmup", "1,2"}, "--warmup", "'1,2'"},
        {{"torch_compile", "--warmup", "1,2"}, "--warmup", "'1,2'"},
        {{bench, "--warmup", "1,2", "--table", "seconds"}, "--warmup", "--table seconds takes one"},
        {{bench, "--warmup", "1,2", "--roofline"}, "--roofline", "takes one --warmup value"},
        {{bench, "--mode", "warp"}, "--mode", "eager, fused, flash"},
        {{bench, "--memory", "8"}, "--memory", "'8', takes a number and its unit, MiB, GiB, MB or GB"},
        {{bench, "--memory", "0GiB"}, "--memory", "'0GiB'"},
        {{bench, "--memory", "1e2GiB"}, "--memory", "'1e2GiB'"},
        {{bench, "--memory", "-1GiB"}, "--memory", "'-1GiB'"},
        {{bench, "--memory", "GiB"}, "--memory", "'GiB'"},
        {{bench, "--memory", "8GiB"}, "--memory", "got '8GiB', takes --plan with it"},
        {{"scaling", "--memory", "8GiB", "--quick"}, "--memory", "got '8GiB', takes --plan with it"},
        {{bench, "--plan=yes"}, "--plan", "takes none"},
        {{"info", "--plan"}, "--plan", "--device"},
        {{bench, "--precision", "fp8"}, "--precision", "bf16"},
        {{bench, "--table", "minutes"}, "--table", "seconds"},
        {{bench, "--device", "tpu"}, "--device", "cuda"},
        {{bench, "--device", "GPU"}, "--device", "; did you mean cuda?"},
        {{bench, "--precision", "bfloat16"}, "--precision", "; did you mean bf16?"},
        {{bench, "--precision", "fp32,float16"}, "--precision", "; did you mean fp16?"},
        {{"torch_compile", "--precision", "float32"}, "--precision", "; did you mean fp32?"},
        {{"attention", "--inputs", "no/such/file", "--out", "o", "--impl", "none"}, "--impl", "'none'"},
        {{"attention", "--inputs", "i", "--out", "no/such/folder/o"}, "--out", "in a folder that can be written to"},
        {{"attention", "--inputs", "i", "--out", "/dev/null"}, "--out", "regular file"},
        {{"train", "--data", "LICENSE", "--save", "no/such/folder/o"},
         "--save",
         "; there is no folder no/such/folder\n"},
        {{"memory_profiling", "--out", "no/such/folder"}, "--out", "; there is no folder no/such\n"},
        {{"train", "--data", "LICENSE", "--save", "tests/"}, "--save", "'tests/'"},
        {{"train", "--data", "LICENSE", "--save", "tests"}, "--save", "'tests'"},
        {{"memory_profiling", "--out", "tests/main.cpp"}, "--out", "a folder that can be written to"},
        {{"flash_leaderboard", "--head_size", "17"}, "--head_size", "16, 32, 64, 80, 128"},
        {{"flash_leaderboard", "--device", "cpu", "--impl", "flash_mma"}, "--impl", "all, auto, reference, naive"},
        {{"train"}, "--data", "got nothing"},
        {{"train", "--data", ""}, "--data", "a file name"},
        {{"train", "--data", "x", "--lr", "nan"}, "--lr", "'nan'"},
        {{"train", "--data", "x", "--lr", "inf"}, "--lr", "'inf'"},
        {{"train", "--data", "x", "--lr", "1e999"}, "--lr", "'1e999'"},
        {{"train", "--data", "x", "--lr", "0x10"}, "--lr", "'0x10'"},
        {{"train", "--data", "x", "--lr", "1e-3x"}, "--lr", "'1e-3x'"},
        {{"train", "--data", "x", "--lr", "0"}, "--lr", "greater than 0"},
        {{"train", "--data", "x", "--lr", "1e300"}, "--lr", "range of float"},
        {{"train", "--data", "x", "--min_lr", "1e-300"}, "--min_lr", "range of float"},
        {{"train", "--data", "x", "--weight_decay", "1e39"}, "--weight_decay", "range of float"},
        {{"model", "--weights", "w", "--batch", "b", "--num_heads", "2", "--out", "o", "--rope_theta", "1e-300"},
         "--rope_theta",
         "range of float"},
        {{"train", "--data", "x", "--weight_decay", "-1"}, "--weight_decay", "'-1'"},
        {{"train", "--data", "x", "--val_fraction", "1"}, "--val_fraction", "less than 1"},
        {{"train", "--data", "x", "--precision", "fp32,bf16"}, "--precision", "'fp32,bf16'"},
        {{"model", "--weights", "w", "--batch", "b", "--out", "o"}, "--num_heads", "got nothing"},
    };
    for (const Wrong& wrong : cases) {
        std::string line = "cs336";
        for (const std::string& word : wrong.words) { line += " '" + word + "'"; }
        CAPTURE(line);
        Run r = run_cs336(wrong.words);
        CHECK(r.exit_code == 2);
        CHECK(r.out == "");
        CAPTURE(r.err);
        CHECK(lines(r.err) == 1);
        CHECK(has(r.err, wrong.names));
        CHECK(has(r.err, wrong.and_));
        CHECK(has(r.err, "cs336"));
    }
}

TEST_CASE("main: the files that a run will write are tried, and compared with each other, before the work") {
    Folder folder;
    std::filesystem::create_directory(folder / "a");
    std::filesystem::create_symlink("a", folder / "b");
    std::filesystem::create_symlink("a/x.json", folder / "link");
    const Words train = {"train", "--data", "LICENSE", "--device", "cpu", "--quick", "--sample", "0", "--steps", "1"};
    auto run = [&](const Words& more) {
        Words words = train;
        words.insert(words.end(), more.begin(), more.end());
        return run_cs336(words);
    };
    const std::string trace = folder / "a/x.json";
    for (const std::string& save : {trace, folder / "a/./x.json", folder / "b/x.json", folder / "link"}) {
        Run r = run({"--save", save, "--trace", trace});
        CAPTURE(save);
        CHECK(r.exit_code == 2);
        CHECK(has(r.err, "--trace: got '" + trace + "', takes another file than --save"));
    }
    for (size_t n : {240, 300}) {  // of bytes: too many for the temporary file, and for any
        Run r = run({"--save", folder / std::string(n, 'x')});
        CHECK(r.exit_code == 2);
        CHECK(has(r.err, "--save: "));
        CHECK(has(r.err, "File name too long"));
    }
    CHECK(folder.files().size() == 3);
    CHECK(run({"--save", folder / "link"}).exit_code == 0);
    CHECK(run({"--load", trace, "--save", trace}).exit_code == 0);
    Run lost = run({"--load", trace, "--trace", trace});
    CHECK(lost.exit_code == 2);
    CHECK(has(lost.err, "takes another file than --load"));
}

TEST_CASE("main: a full disk under stdout is a failure") {
    for (const char* word : {"list", "--help", "--version"}) {
        Run r = run_cs336({word}, "/dev/full");
        CHECK(r.exit_code == 1);
        CHECK(lines(r.err) == 1);
        CHECK(has(r.err, "stdout"));
    }
}

TEST_CASE("main: a file that is not there is a failure, not wrong usage") {
    Run r = run_cs336({"train", "--data", "no/such/file", "--device", "cpu", "--quick"});
    CHECK(r.exit_code == 1);
    CHECK(r.out == "");
    CHECK(has(r.err, "--data: got 'no/such/file': No such file or directory; there is no folder no/such\n"));
    for (const char* option : {"--weights", "--batch"}) {
        Words words = {"model", "--weights", "LICENSE", "--batch", "LICENSE", "--num_heads", "2", "--out", "o"};
        *(std::find(words.begin(), words.end(), option) + 1) = "none";
        Run model = run_cs336(words);
        CHECK(model.exit_code == 1);
        CHECK(model.err == std::string("cs336 model: ") + option + ": got 'none': No such file or directory\n");
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
        {"--train no/such", "--train"},
        {"--plot bars.png", "--plot"},
        {"--plot no/such/bars.svg", "--plot"},
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
TEST_CASE("main: no output goes where another file, our own input or our own lines are") {
    Folder folder;
    std::string same = folder / "same", file = folder / "file", a = folder / "a", b = folder / "b";
    std::string train = program() + " train --device cpu --quick --sample 0 --data LICENSE ";
    CHECK(run_shell(train + "--steps 1 --save " + same).exit_code == 0);
    std::string before = read_file(same);
    Run r = run_shell(program() + " train --device cpu --quick --sample 0 --steps 2 --data " + same + " --load " +
                      same + " --save " + same);
    CHECK(r.exit_code == 2);
    CHECK(has(r.out, "takes another file than --data"));
    CHECK(read_file(same) == before);
    CHECK(run_shell(train + "--load " + same + " --steps 2 --save " + same).exit_code == 0);  // goes on
    for (const std::string& name : {file, std::string("/dev/stdout")}) {
        r = run_shell("(" + train + "--save " + name + " > " + file + ")");
        INFO(r.out);
        CHECK(r.exit_code == 2);
        CHECK(has(r.out, "which is where our own lines go"));
    }
    REQUIRE(symlink(a.c_str(), b.c_str()) == 0);
    REQUIRE(symlink(b.c_str(), a.c_str()) == 0);
    r = run_shell(train + "--save " + a);
    CHECK(r.exit_code == 2);
    CHECK(std::filesystem::is_symlink(a));
    CHECK(std::filesystem::is_symlink(b));
}
