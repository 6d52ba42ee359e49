// Tests of `reproduce`, on the real program and on pages made here, with commands that take no time.
#include "test.h"
#include "writeup.h"

#include <nlohmann/json.hpp>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <regex>

using Words = std::vector<std::string>;

// A folder with notes/README.md, which links to a.md and b.md. The test works in it.
struct Repository {
    Folder folder;
    std::string before = std::filesystem::current_path(), binary = program();
    Repository() {
        setenv("CS336_BINARY", std::filesystem::canonical(binary).c_str(), 1);
        REQUIRE(chdir(folder.path.c_str()) == 0);
        REQUIRE(mkdir("notes", 0777) == 0);
        write_file("notes/README.md", "[a](a.md), then [b](b.md); [elsewhere](../a.md)\n");
        write_file("notes/a.md", "nothing\n"), write_file("notes/b.md", "nothing\n");
    }
    ~Repository() {
        if (chdir(before.c_str()) != 0) { perror(before.c_str()); }
        setenv("CS336_BINARY", binary.c_str(), 1);
    }
};

static std::string block(const std::string& line, const std::string& content) {
    return "<!-- begin: ./cs336 " + line + " -->\n" + content + "<!-- end -->\n";
}
static nlohmann::json rows_of(const std::string& out) { return nlohmann::json::parse(out)["rows"]; }

TEST_CASE("reproduce: blocks get what their commands print, everything else stays, and twice is the same") {
    Repository repository;
    std::string accounting = run_cs336({"communication_accounting"}).out;
    std::string other = run_cs336({"communication_accounting", "--tokens", "4096"}).out;
    std::string sums = run_cs336({"mixed_precision_accumulation"}).out;
    REQUIRE(accounting != other);
    auto page = [&](const std::string& a, const std::string& b, const std::string& c) {
        return "# Page\n<!-- a comment -->\n" + block("communication_accounting", a) + "between\n" +
               block("communication_accounting --tokens 4096", b) + block("mixed_precision_accumulation", c) + "after";
    };
    // Only the table of mixed_precision_accumulation's output, without the text around it.
    size_t from = sums.find("mixed_precision_accumulation: "), to = sums.find("\n\nThe fp32 sum");
    REQUIRE(from != std::string::npos);
    REQUIRE(to != std::string::npos);
    std::string table = sums.substr(from, to + 1 - from);
    auto selection = [&](const std::string& a) {
        return block("mixed_precision_accumulation; tables: nowhere or 0.01 added, device cpu", a);
    };
    write_file("notes/a.md", page("old\n", "", "older\n\nold\n"));
    write_file("notes/b.md", selection("old\n"));
    write_file("README.md", "Front\n" + block("communication_accounting", "old\n"));
    for (int i = 0; i < 2; i++) {
        Run r = run_cs336({"reproduce", "--format", "json"});
        CAPTURE(r.err);
        CHECK(r.exit_code == 0);
        CHECK(read_file("notes/a.md") == page(accounting, other, sums));
        CHECK(read_file("notes/b.md") == selection(table));
        CHECK(read_file("README.md") == "Front\n" + block("communication_accounting", accounting));
        nlohmann::json rows = rows_of(r.out);
        REQUIRE(rows.size() == 3);  // the same command line is run once
        CHECK(rows[0][0] == "communication_accounting");
        CHECK(rows[0][1] == 2.4);
        CHECK(rows[1][2] == "./cs336 communication_accounting --tokens 4096");
        for (const auto& row : rows) { CHECK(row[3] == "ran"); }
    }
    CHECK(read_file("notes/README.md") == "[a](a.md), then [b](b.md); [elsewhere](../a.md)\n");
}

TEST_CASE("reproduce: a block leaves out the columns that it names, and a column that is nowhere fails") {
    Repository repository;
    const std::string command = "mixed_precision_accumulation; tables: 0.01 added; without: ";
    write_file("notes/a.md", block(command + "PyTorch prints or sum or stops after", ""));
    write_file("notes/b.md", block(command + "nothing", "old\n"));
    write_file("README.md", "Front\n");
    Run r = run_cs336({"reproduce"});
    CHECK(r.exit_code == 1);
    CHECK(has(r.out, "no table has the column nothing"));
    CHECK(read_file("notes/b.md") == block(command + "nothing", "old\n"));
    write_file("notes/b.md", "nothing\n");
    CHECK(run_cs336({"reproduce"}).exit_code == 0);
    std::string text = read_file("notes/a.md");
    for (const char* kept : {"| what ", "| error against 10 |", "| of it: rounding the sum |\n", " -0.0490112 |\n"}) {
        CHECK(has(text, kept));
    }
    for (const char* left_out : {"| PyTorch prints", "  sum |", "| stops after |", "tensor("}) {
        CHECK(!has(text, left_out));
    }
}

TEST_CASE("reproduce: answers follow from the tables of their command line's blocks, also from recorded ones") {
    Repository repository;
    std::string output = run_cs336({"communication_accounting"}).out;
    std::string table = output.substr(0, output.find("\n**(a)**")), answers = output.substr(table.size() + 1);
    std::string other = table;
    for (size_t at; (at = other.find("879.4")) != std::string::npos;) { other.replace(at, 5, "123.4"); }
    auto page = [&](const std::string& first, const std::string& second, const std::string& shown) {
        return "# Page\n<!-- answers: ./cs336 communication_accounting -->\n" + first + "<!-- end -->\n" +
               "<!-- answers: ./cs336 communication_accounting --fsdp 16 -->\n" + second + "<!-- end -->\n" +
               block("communication_accounting", shown);  // without the answers, which stand above
    };
    write_file("notes/a.md", page("old\n", "", "old\n"));
    write_file("notes/b.md", "<!-- answers: ./cs336 naive_ddp -->\n<!-- end -->\n" +
                                 page("", "", other));  // --only leaves its table as it is
    write_file("README.md", "Front\n");
    Run r = run_cs336({"reproduce", "--format", "json", "--only", "communication_accounting"});
    CAPTURE(r.err);
    CHECK(r.exit_code == 0);
    const std::string none = "(Not measured yet. The command prints the answer for your machine.)\n";
    CHECK(read_file("notes/a.md") == page(answers, none, table));
    write_file("notes/a.md", "nothing\n");
    write_file("notes/b.md", page("", "", other) + block("mixed_precision_accumulation", ""));
    r = run_cs336({"reproduce", "--only", "mixed_precision_accumulation"});
    CHECK(r.exit_code == 0);
    CHECK(has(read_file("notes/b.md"), "take 4 P = 123.4 GB"));
    CHECK(has(read_file("notes/b.md"), "end -->\n" + block("communication_accounting", other)));
}

static std::map<std::string, std::string> our_pages() {
    std::map<std::string, std::string> pages;
    for (const auto& entry : std::filesystem::directory_iterator("notes")) {
        if (entry.path().extension() == ".md") { pages[entry.path()] = read_file(entry.path()); }
    }
    return pages;
}

TEST_CASE("reproduce: the answers on our pages are those of the tables beside them") {
    const std::map<std::string, std::string> pages = our_pages();
    REQUIRE(pages.size() > 20);
    Repository repository;
    for (const auto& [path, text] : pages) { write_file(path, text); }
    Run r = run_cs336({"reproduce", "--only", "communication_accounting"});
    CAPTURE(r.err);
    CHECK(r.exit_code == 0);
    for (const auto& [path, text] : pages) {
        bool same = path == "notes/2.4-communication_accounting.md" || read_file(path) == text;  // its commit differs
        CHECK_MESSAGE(same, path,
                      ": its answers are old; ./cs336 reproduce --only communication_accounting mends them");
    }
}
TEST_CASE("reproduce: markers that it cannot read are named by file and line, before anything runs") {
    Repository repository;
    struct Bad {
        std::string page;
        const char* says;
    };
    const std::string begin = "<!-- begin: ./cs336 communication_accounting -->\n", end = "<!-- end -->\n";
    const Bad cases[] = {
        {"x\n<!-- begin: train -->\n" + end, "notes/b.md:2: got '<!-- begin: train -->'"},
        {"<!-- begin: ./cs336 -->\n" + end, "notes/b.md:1: got"},
        {"<!-- begin: ./cs336 list\n" + end, "notes/b.md:1: got"},
        {"<!-- begin: ./cs336    -->\n" + end, "notes/b.md:1: got"},
        {"<!-- begin: ./cs336 list; tables:  -->\n" + end, "notes/b.md:1: got"},
        {"<!-- begin: ./cs336 list; without:  -->\n" + end, "notes/b.md:1: got"},
        {"<!-- begin: ./cs336 list; without: a; tables: b -->\n" + end, "notes/b.md:1: got"},
        {"<!-- answers: ./cs336 list; without: a -->\n" + end, "notes/b.md:1: got"},
        {"<!-- begin: NCCL_DEBUG=INFO ./cs336 naive_ddp -->\n" + end, "notes/b.md:1: got"},
        {"<!-- answers: ./cs336 list; tables: a -->\n" + end, "notes/b.md:1: got"},
        {"<!-- answers: ./cs336 nonsense -->\n" + end, "notes/b.md:1: nonsense: no such command"},
        {begin + "1\n", "notes/b.md:1: this block has no '<!-- end -->'"},
        {begin + "1\n" + begin + end, "notes/b.md:3: the block above has no '<!-- end -->'"},
        {"1\n" + end, "notes/b.md:2: '<!-- end -->' ends no block"},
        {begin + "<!-- end: -->\n", "notes/b.md:2: '<!-- end: -->' ends no block"},
        {"<!-- begin: ./cs336 nonsense -->\n" + end, "notes/b.md:1: nonsense: no such command"},
        {"\n<!-- begin: ./cs336 naive_ddp --sped 3 -->\n" + end, "notes/b.md:2: --sped: no such option"},
        {"<!-- begin: ./cs336 naive_ddp --nproc 0 -->\n" + end, "notes/b.md:1: --nproc: got '0'"},
        {"<!-- begin: ./cs336 naive_ddp --help -->\n" + end, "notes/b.md:1: --help"},
        {"<!-- begin: ./cs336 pytorch_attention --plot x.svg -->\n" + end, "notes/b.md:1: a block's command writes no"},
        {"<!-- begin: ./cs336 reproduce -->\n" + end, "notes/b.md:1: a block's command"},
    };
    for (const Bad& bad : cases) {
        write_file("notes/a.md", block("communication_accounting", "old\n")), write_file("notes/b.md", bad.page);
        Run r = run_cs336({"reproduce"});
        CAPTURE(bad.page);
        CAPTURE(r.err);
        CHECK(r.exit_code == 1);
        CHECK(r.out == "");
        CHECK(has(r.err, std::string("cs336 reproduce: ") + bad.says));
        CHECK(std::count(r.err.begin(), r.err.end(), '\n') == 1);
        CHECK(read_file("notes/a.md") == block("communication_accounting", "old\n"));
    }
}

TEST_CASE("reproduce: --only") {
    Repository repository;
    std::string page = block("communication_accounting", "old\n") + block("mixed_precision_accumulation", "old\n") +
                       block("optimizer_state_sharding --nproc 64", "old\n") +
                       block("optimizer_state_sharding_accounting --nproc 64", "old\n");
    write_file("notes/a.md", page);
    Run r = run_cs336({"reproduce", "--format", "json", "--only", "comm,optimizer_state_sharding"});
    CHECK(r.exit_code == 0);
    REQUIRE(rows_of(r.out).size() == 2);
    CHECK(rows_of(r.out)[1][0] == "optimizer_state_sharding");  // a whole name is never ambiguous
    CHECK(has(read_file("notes/a.md"), block("communication_accounting", run_cs336({"communication_accounting"}).out)));
    CHECK(has(read_file("notes/a.md"), block("mixed_precision_accumulation", "old\n")));

    write_file("notes/b.md", block("mixed_precision_accumulation", "old\n"));
    for (const char* id : {"communication_accounting", "mixed_precision_accumulation"}) {
        CHECK(run_cs336({"reproduce", "--only", id, "--out", "out"}).exit_code == 0);
    }
    CHECK(has(read_file("out/b.md"),
              block("mixed_precision_accumulation", run_cs336({"mixed_precision_accumulation"}).out)));
    CHECK(run_cs336({"reproduce", "--only", "communication_accounting", "--out", "out"}).exit_code == 0);
    CHECK(!has(read_file("out/b.md"), "old"));  // of another problem: left as it was

    Run ambiguous = run_cs336({"reproduce", "--only", "optimizer"});
    CHECK(ambiguous.exit_code == 2);
    CHECK(has(ambiguous.err, "more than one problem"));
    CHECK(has(ambiguous.err, "optimizer_state_sharding, optimizer_state_sharding_accounting"));
    for (const char* unknown : {"nonsense", "communication_accounting,nsys", "list"}) {
        Run none = run_cs336({"reproduce", "--only", unknown});
        CAPTURE(none.err);
        CHECK(none.exit_code == 2);
        CHECK(has(none.err, "no such problem for --only; candidates: "));
    }
}

TEST_CASE("reproduce: a command that fails leaves its block as it was, and the others go on") {
    Repository repository;
    write_file("notes/a.md", block("train --data no/such/file", "old\n") +
                                 block("mixed_precision_accumulation; tables: no such caption", "old\n") +
                                 block("communication_accounting", "old\n"));
    Run r = run_cs336({"reproduce", "--format", "json"});
    CAPTURE(r.err);
    CHECK(r.exit_code == 1);
    CHECK(has(r.err, "2 of 3 commands failed"));
    nlohmann::json rows = rows_of(r.out);
    CHECK(rows[0][3] == "failed");
    CHECK(has(rows[0][4], "no/such/file"));
    CHECK(rows[1][3] == "failed");
    CHECK(has(rows[1][4], "notes/a.md:4: none of its captions has 'no such caption'"));
    CHECK(rows[2][3] == "ran");
    std::string page = read_file("notes/a.md");
    CHECK(has(page, block("train --data no/such/file", "old\n")));
    CHECK(has(page, block("mixed_precision_accumulation; tables: no such caption", "old\n")));
    CHECK(has(page, block("communication_accounting", run_cs336({"communication_accounting"}).out)));
}

TEST_CASE("reproduce: a prediction in full goes into its page, whatever small model the command runs beside it") {
    Repository repository;
    const std::string small =
        "memory_profiling --device cpu --size small --context_length 32 --precision fp32; tables: ";
    write_file("notes/a.md", block(small + "(d)", "old\n") + block("list", "old\n"));
    write_file("README.md", "Front\n");
    Run r = run_cs336({"reproduce", "--only", "memory_profiling", "--format", "json"});
    CAPTURE(r.err);
    CHECK(r.exit_code == 0);
    CHECK(rows_of(r.out)[0][3] == "ran");
    CHECK(has(read_file("notes/a.md"), "B*T*C*4 bytes; meta (nothing is computed)"));
    write_file("notes/b.md", block(small + "really run", "old\n"));
    r = run_cs336({"reproduce", "--only", "memory_profiling", "--format", "json"});
    CHECK(rows_of(r.out)[0][3] == "scaled down");
    CHECK(read_file("notes/b.md") == block(small + "really run", "old\n"));
}
TEST_CASE("reproduce: what was scaled down goes to --out only; what cannot run goes nowhere") {
    Repository repository;
    const std::string quick = "flash_forward --device cpu --quick", many = "naive_ddp --nproc 64";
    std::string page =
        "![p](p.svg)\n" + block(quick, "old\n") + block(quick + "; tables: no such", "old\n") + block(many, "old\n");
    write_file("notes/a.md", page), write_file("notes/p.svg", "<svg/>"),
        write_file("README.md", block("list", "old\n"));

    Run r = run_cs336({"reproduce", "--format", "json", "--only", "flash_forward,naive_ddp"});
    CAPTURE(r.err);
    CHECK(r.exit_code == 0);
    nlohmann::json rows = rows_of(r.out);
    REQUIRE(rows.size() == 2);
    CHECK(rows[0][3] == "scaled down");
    CHECK(rows[0][4] == "without the largest sizes");
    CHECK(rows[1][2] == "./cs336 " + many);
    CHECK(rows[1][3] == "could not run");
    CHECK(rows[1][4] == "needs 64 GPUs");
    CHECK(has(r.err, "--out DIR"));
    CHECK(read_file("notes/a.md") == page);

    r = run_cs336({"reproduce", "--out", "copies"});
    CHECK(r.exit_code == 0);
    CHECK(read_file("notes/a.md") == page);
    std::string copy = read_file("copies/a.md");
    CHECK(has(copy, "flash_forward: largest error"));
    CHECK(has(copy, block(quick + "; tables: no such", "(no such table in this run, which was scaled down)\n")));
    CHECK(has(copy, block(many, "old\n")));
    CHECK(read_file("copies/b.md") == "nothing\n");
    CHECK(read_file("copies/p.svg") == "<svg/>");
    CHECK(read_file("copies/README.md") == read_file("notes/README.md"));
    CHECK(read_file("README.md") == block("list", "old\n"));  // the front page has no copy
}

TEST_CASE("reproduce: --quick shrinks all commands, each once, and writes to build/reproduce") {
    Repository repository;
    write_file("notes/a.md",
               block("flash_forward --device cpu", "old\n") + block("flash_forward --device=cpu", "old\n"));
    write_file(
        "notes/b.md",
        block("naive_ddp_benchmarking --device cpu --size xl --steps 50 --nproc 2", "old\n") +
            block("naive_ddp_benchmarking --device cpu --precision=bf16 --reduce_dtype bf16 --nproc 2", "old\n"));
    Run r = run_cs336({"reproduce", "--quick", "--format", "json", "--only", "flash_forward"});
    CAPTURE(r.err);
    CHECK(r.exit_code == 0);
    CHECK(has(read_file("notes/a.md"), "old\n"));
    CHECK(has(read_file("build/reproduce/a.md"), "scaled down: without the largest sizes"));
    CHECK(has(read_file("build/reproduce/b.md"), "old\n"));
    if (lacks("gloo", CPU, 2)) { return; }
    r = run_cs336({"reproduce", "--quick", "--format", "json", "--only", "naive"});
    CAPTURE(r.err);
    CHECK(r.exit_code == 0);
    nlohmann::json rows = rows_of(r.out);
    REQUIRE(rows.size() == 1);
    CHECK(rows[0][2] == "./cs336 naive_ddp_benchmarking --device cpu --nproc 2 --quick");
    CHECK(rows[0][3] == "scaled down");
    CHECK(!has(read_file("build/reproduce/b.md"), "old\n"));
    CHECK(has(read_file("build/reproduce/b.md"), "Run as `" + rows[0][2].get<std::string>() + "`:\n"));
}

// Starts reproduce and interrupts it as soon as its state file names `done`.
static Run interrupt(const std::string& done) {
    fflush(nullptr);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        dup2(open("out", O_WRONLY | O_CREAT | O_TRUNC, 0666), 1),
            dup2(open("err", O_WRONLY | O_CREAT | O_TRUNC, 0666), 2);
        execl(getenv("CS336_BINARY"), "cs336", "reproduce", "--writeup", "w.md", (char*)nullptr);
        _exit(127);
    }
    const char* state = "build/.reproduce.json";
    auto is_done = [&] { return access(state, R_OK) == 0 && has(read_file(state), "\"" + done + "\": \""); };
    for (int i = 0; i < 3000 && !is_done(); i++) { usleep(10000); }
    usleep(300000);  // by now the next command runs
    kill(child, SIGINT);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file("out"), read_file("err")};
}

TEST_CASE("reproduce: an interrupted run goes on where it was, a complete one starts afresh") {
    Repository repository;
    const std::string quick = "# 2.4 communication_accounting\n" + block("communication_accounting", "old\n");
    const std::string slow = "train --data notes/README.md --device cpu --context_length 8 --steps 1000000";
    write_file("notes/README.md",
               "[a](a.md) and [b](b.md), with some more text, so that there are enough bytes to train on: "
               "a model needs a sequence to learn from, and another one that is held out of it for the loss "
               "before and after; these are some two hundred and fifty bytes, a tenth of which is that.\n");
    write_file("notes/a.md", quick), write_file("notes/b.md", block(slow, "old\n"));
    Run r = interrupt("communication_accounting");
    CAPTURE(r.err);
    CHECK(r.exit_code == -1);  // of the signal, as its caller may want to know
    CHECK(r.out == "");
    CHECK(has(r.err, "interrupted; 1 of 2 are done"));
    CHECK(read_file("notes/a.md") == quick);
    CHECK(access("w.md", F_OK) != 0);

    // What has been done is taken from the state: a word changed there comes out in the page.
    std::string state = read_file("build/.reproduce.json");
    size_t word = state.find("master weights");
    REQUIRE(word != std::string::npos);
    state.replace(word, 14, "MASTER WEIGHTS");
    write_file("notes/b.md", "nothing\n");
    write_file("build/.reproduce.json", state);
    r = run_cs336({"reproduce", "--writeup", "w.md"});
    CHECK(r.exit_code == 0);
    CHECK(has(r.err, "1 of 1 were done before the interruption"));
    CHECK(has(read_file("notes/a.md"), "MASTER WEIGHTS"));
    CHECK(has(read_file("w.md"), "\n## 2.4 communication_accounting\n"));
    CHECK(has(read_file("w.md"), "MASTER WEIGHTS"));

    r = run_cs336({"reproduce"});  // that was complete
    CHECK(r.exit_code == 0);
    CHECK(!has(read_file("notes/a.md"), "MASTER WEIGHTS"));

    write_file("build/.reproduce.json", state);
    CHECK(run_cs336({"reproduce", "--fresh"}).exit_code == 0);
    CHECK(!has(read_file("notes/a.md"), "MASTER WEIGHTS"));

    // Another commit's outputs are not taken.
    size_t commit = state.find("\"commit\": \"");
    REQUIRE(commit != std::string::npos);
    write_file("build/.reproduce.json", state.insert(commit + 11, "another-"));
    CHECK(run_cs336({"reproduce"}).exit_code == 0);
    CHECK(!has(read_file("notes/a.md"), "MASTER WEIGHTS"));

    write_file("build/.reproduce.json", "{ no json");
    CHECK(run_cs336({"reproduce"}).exit_code == 0);
}

TEST_CASE("reproduce: a state of any shape is taken as none") {
    Repository repository;
    write_file("notes/a.md", block("communication_accounting", "old\n"));
    REQUIRE(run_cs336({"reproduce"}).exit_code == 0);
    const nlohmann::json good = nlohmann::json::parse(read_file("build/.reproduce.json"));
    auto with = [&](const char* key, const std::string& value) {
        nlohmann::json others = good;
        others.erase(key);
        return strprintf("{\"%s\": %s, ", key, value.c_str()) + others.dump().substr(1);
    };
    const std::string deep = std::string(100000, '[') + std::string(100000, ']');
    for (const std::string& state :
         {with("machine", "3"), with("commit", "{}"), with("seconds", "[]"), with("seconds", "{\"x\": \"y\"}"),
          with("seconds", "{\"communication_accounting\": \"y\"}"),
          with("seconds", "{\"communication_accounting\": null}"), with("outputs", "[]"),
          with("outputs", "{\"communication_accounting\": 5}"), with("outputs", deep), with("more", deep),
          std::string("[]"), std::string("null"), std::string(), std::string("\xff\x00", 2), deep}) {
        CAPTURE(state.substr(0, 200));
        write_file("build/.reproduce.json", state);
        Run r = run_cs336({"reproduce"});
        CAPTURE(r.err);
        CHECK(r.exit_code == 0);
        CHECK(nlohmann::json::parse(read_file("build/.reproduce.json"))["outputs"].empty());
    }
    REQUIRE(remove("build/.reproduce.json") == 0);
    REQUIRE(mkfifo("build/.reproduce.json", 0600) == 0);
    Run r = run_cs336({"reproduce"});
    CHECK(r.exit_code == 1);
    CHECK_MESSAGE(has(r.err, "build/.reproduce.json: cannot be written: expected a regular file"), r.err);
    CHECK(r.out == "");
}

TEST_CASE("reproduce: folders that are not there or take nothing") {
    Repository repository;
    write_file("notes/a.md", block("communication_accounting", "old\n")), write_file("file", "");
    for (const char* bad : {"/proc/copies", "file", "no/such/folder", "notes", "./notes/", "."}) {
        Run r = run_cs336({"reproduce", "--out", bad});
        CAPTURE(bad);
        CAPTURE(r.err);
        CHECK(r.exit_code == 2);
        CHECK(r.out == "");
        CHECK(std::count(r.err.begin(), r.err.end(), '\n') == 1);
    }
    REQUIRE(chdir("notes") == 0);
    Run r = run_cs336({"reproduce"});
    CHECK(r.exit_code == 2);
    CHECK(has(r.err, "notes/README.md: not found"));
}

// ---------------------------------------------------------------------------------------------------------------------
// --writeup

static size_t count(const std::string& text, const std::string& part) {
    size_t n = 0;
    for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) { n++; }
    return n;
}
// Whether the text has these parts, one after the other.
static bool in_order(const std::string& text, const Words& parts) {
    size_t at = 0;
    for (const std::string& part : parts) {
        at = text.find(part, at);
        CHECK_MESSAGE(at != std::string::npos, part);
        if (at == std::string::npos) { return false; }
        at += part.size();
    }
    return true;
}
// Without what escaping and alignment change.
static std::string squeezed(std::string text) {
    auto left_out = [](char c) { return strchr("\\ -", c); };
    text.erase(std::remove_if(text.begin(), text.end(), left_out), text.end());
    return text;
}
static const char* const TINY =
    "benchmarking_script --device cpu --mode eager --num_layers 1 --d_model 16 --d_ff 16 --num_heads 1 --vocab_size 16 "
    "--context_length 4 --steps 1 --warmup ";
static const char* const SVG_BASE64 = "](data:image/svg+xml;base64,PHN2Zy";  // of "<svg"

TEST_CASE("reproduce --writeup: question, answers, tables, pictures, and what could not run") {
    Repository repository;
    const std::string many = "naive_ddp --nproc 64", one = TINY + std::string("1"), two = TINY + std::string("1,2");
    write_file("notes/README.md", "[a](a.md), [b](b.md), [c](c.md), [d](d.md)\n");
    write_file("notes/a.md",
               "# 2.4 communication_accounting\n\n* (a) Which [layer](b.md#x)?\n* (b) How many?\n\nAside.\n\n"
               "<!-- answers: ./cs336 communication_accounting -->\n<!-- end -->\n" +
                   block("communication_accounting; tables: communication_accounting", "old\n") + "The mechanism.\n" +
                   block("communication_accounting", "old\n"));
    write_file("notes/b.md", "# 1.1.3 benchmarking_script\n\nThe model:\n\n* How long?\n\n" + block(one, "old\n") +
                                 block(two, "old\n"));
    write_file("notes/c.md", "# 2026, 2.2 naive_ddp\n\nThe same weights?\n\n" + block(many, "old\n"));
    write_file("notes/d.md", "# No problem\n\n" + block("communication_accounting --tokens 4096", "old\n"));
    Run r = run_cs336({"reproduce", "--writeup", "w.md"});
    CAPTURE(r.err);
    CHECK(r.exit_code == 0);
    std::string text = read_file("w.md"), printed = run_cs336({"communication_accounting"}).out;
    CHECK(in_order(
        text, {"# CS336", "Of its 5 commands", " 1 could not run", "\n* [2.4 communication_accounting](#24-",
               "* [2026, 2.2 naive_ddp](#2026-22-naive_ddp)\n* [What ran](#what-ran)\n",
               "\n## 2.4 communication_accounting\n\n> * (a) Which layer?\n> * (b) How many?\n\n**(a)**", "\n\n**(b)**",
               "\n### `./cs336 communication_accounting`\n\ncommunication", "\n| part",
               "\n## 1.1.3 benchmarking_script\n\n> The model:\n> \n> * How long?\n", "\n### `./cs336 " + one + "`\n",
               SVG_BASE64, "\n### `./cs336 " + two + "`\n", "\n## 2026, 2.2 naive_ddp\n\n> The same weights?\n",
               "\n### `./cs336 " + many + "`\n\n**could not run: needs 64 GPUs**\n", "\n## What ran\n",
               "communication_accounting --tokens 4096"}));
    for (const char* absent : {"Aside.", "The mechanism.", "\nold\n", "No problem", "b.md", "<!--"}) {
        CHECK_MESSAGE(!has(text, absent), std::string(absent));
    }
    CHECK(count(text, SVG_BASE64) == 1);
    CHECK(has(r.err, "--plot takes one --warmup value, got 2; once more, without a picture"));
    size_t answers = printed.find("**(a)**");
    REQUIRE(answers != std::string::npos);
    CHECK(count(squeezed(text), squeezed(printed.substr(answers))) == 1);
    CHECK(count(squeezed(text), squeezed(printed.substr(0, answers))) == 1);  // two blocks show it

    // A run without --writeup has drawn nothing, so its output is not enough; pictures that are no text are none.
    nlohmann::json state = nlohmann::json::parse(read_file("build/.reproduce.json"));
    for (const char* pictures : {"{}", "[]", "{\"LINE\": 5}", "{\"LINE\": [5]}", "{\"LINE\": [\"<svg kept/>\"]}"}) {
        CAPTURE(std::string(pictures));
        state["outputs"][one] = "kept from earlier\n\n| a |\n| - |\n| 1 |\n";
        state["pictures"] = nlohmann::json::parse(std::regex_replace(std::string(pictures), std::regex("LINE"), one));
        write_file("build/.reproduce.json", state.dump());
        r = run_cs336({"reproduce", "--only", "benchmarking_script", "--writeup", "w.md"});
        CHECK(r.exit_code == 0);
        bool kept = has(pictures, "[5]") || has(pictures, "svg");
        CHECK(has(read_file("w.md"), "kept from earlier") == kept);
        CHECK(count(read_file("w.md"), SVG_BASE64) == (has(pictures, "[5]") ? 0 : 1));
        CHECK(count(read_file("w.md"), "\n## ") == 2);  // --only: this problem, and what ran
    }
}

TEST_CASE("reproduce --writeup: every problem of our pages, in order, with its question") {
    const std::map<std::string, std::string> pages = our_pages();
    nlohmann::json problems = rows_of(run_cs336({"list", "--format", "json"}).out);
    Repository repository;
    REQUIRE(run_cs336({"reproduce"}).exit_code == 0);
    nlohmann::json state = nlohmann::json::parse(read_file("build/.reproduce.json"));
    // Nothing has to run: each block gets its command without options, and the state has its output.
    const std::regex options("(<!-- begin: ./cs336 [^ ;]+)[^\n]*");
    for (const auto& [path, text] : pages) { write_file(path, std::regex_replace(text, options, "$1 -->")); }
    for (const char* id : {"train", "list"}) { state["outputs"][id] = ""; }
    write_file("notes/train.md", "nothing\n");  // its command needs an option
    Words expected, only_2026;                  // those come last
    for (const auto& row : problems) {
        if (row[1] == "tool") { continue; }
        auto text = [&](int column) {
            return row[column].is_string() ? row[column].get<std::string>() : row[column].dump();
        };
        std::string id = text(0), section = text(1) == "" ? "2026, " + text(2) : text(1);
        state["outputs"][id] = "caption\n\n| a |\n| - |\n| 1 |\n", state["pictures"][id] = nlohmann::json::array();
        (text(1) == "" ? only_2026 : expected).push_back("\n## " + section + " " + id + "\n\n> ");
    }
    expected.insert(expected.end(), only_2026.begin(), only_2026.end());
    write_file("build/.reproduce.json", state.dump());
    Run r = run_cs336({"reproduce", "--writeup", "w.md"});
    CAPTURE(r.err);
    CHECK(r.exit_code == 0);
    CHECK(in_order(read_file("w.md"), expected));
    CHECK(count(read_file("w.md"), "\n## ") == 35 + 1);  // memory_profiling has a page per edition; and what ran
}

TEST_CASE("reproduce --writeup: HTML loads nothing, and hostile text reads as printed") {
    if (!why_no_html().empty()) { return skip_this_case(why_no_html().c_str()); }
    Repository repository;
    const std::string hostile =
        "<script>alert(1)</script> & &lt; [x](http://a.b/) ![y](http://a.b/c.png) <http://a.b> `<b>` *z* "
        "_u_ a_b ~~s~~ \\* $m$ ``two``";
    const std::string shown =
        "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &amp;lt; [x](http://a.b/) ![y](http://a.b/c.png) "
        "&lt;http://a.b&gt; <code>&lt;b&gt;</code> *z* _u_ a_b ~~s~~ \\* $m$ ``two``";
    write_file("notes/a.md", "# 1.1.3 benchmarking_script\n\nIs a < b?\n\n" + block(TINY + std::string("1"), "old\n"));
    REQUIRE(run_cs336({"reproduce"}).exit_code == 0);
    nlohmann::json state = nlohmann::json::parse(read_file("build/.reproduce.json"));
    state["outputs"][TINY + std::string("1")] =
        "caption " + hostile + "\n\n| a <i> | b |\n| --- | --- |\n| cell " + hostile + " | c\\|d |\n";
    state["pictures"][TINY + std::string("1")] = {"<svg><script>alert(2)</script></svg>"};
    write_file("build/.reproduce.json", state.dump());
    Run r = run_cs336({"reproduce", "--writeup", "w.html"});
    CAPTURE(r.err);
    CHECK(r.exit_code == 0);
    std::string html = read_file("w.html");
    CHECK(in_order(html, {"<!doctype html>\n", "<meta charset=\"utf-8\">", "<a href=\"#113-benchmarking_script\">",
                          "<h2 id=\"113-benchmarking_script\">1.1.3 benchmarking_script</h2>",
                          "<blockquote>\n<p>Is a &lt; b?</p>", "<p>caption " + shown + "</p>", "<table>",
                          "<th>a &lt;i&gt;</th>", "<td>cell " + shown + "</td>", "<td>c|d</td>", "</table>",
                          "<img src=\"data:image/svg+xml;base64,", "<h2 id=\"what-ran\">", "</html>\n"}));
    CHECK(!has(html, "<script"));
    std::smatch link;
    int links = 0;
    for (std::string rest = html; std::regex_search(rest, link, std::regex("(src|href|url)[=(]\"?([^\" )]{1,40})"));
         links++) {
        std::string to = link[2];
        CHECK_MESSAGE((to.compare(0, 5, "data:") == 0 || has(html, "id=\"" + to.substr(1) + "\"")), to);
        rest = link.suffix();
    }
    CHECK(links == 3);
}

TEST_CASE("reproduce --writeup: names that it does not take, before anything runs") {
    Repository repository;
    write_file("notes/a.md", block("communication_accounting", "old\n"));
    REQUIRE(mkdir("w.html", 0777) == 0);
    Words names = {
        "w.txt", "w", ".md", "w.md/", "no/such/folder/w.md", "w.html", "notes/a.md", "./notes/../notes/b.md"};
    if (!why_no_html().empty()) { names.push_back("x.html"); }
    for (const std::string& name : names) {
        Run r = run_cs336({"reproduce", "--writeup", name});
        CAPTURE(r.err);
        CHECK(r.exit_code == 2);
        CHECK(r.out == "");
        CHECK(count(r.err, "\n") == 1);
        CHECK(has(r.err, "--writeup: got "));
        CHECK(has(r.err, name));
        CHECK(has(r.err, "takes a"));
        CHECK(read_file("notes/a.md") == block("communication_accounting", "old\n"));
    }
    REQUIRE(mkdir("copies", 0777) == 0);
    for (const char* name : {"copies/a.md", "notes/a.md"}) {
        Run r = run_cs336({"reproduce", "--out", "copies", "--writeup", name});
        CAPTURE(r.err);
        CHECK(r.exit_code == 2);
        CHECK(has(r.err, "where a page of notes/ stands or goes"));
    }
}

TEST_CASE("reproduce --edition 2026: the problems of our pages that 2026 has, in its order, and no page is written") {
    const std::map<std::string, std::string> pages = our_pages();
    nlohmann::json problems = rows_of(run_cs336({"list", "--format", "json"}).out);
    Repository repository;
    REQUIRE(run_cs336({"reproduce"}).exit_code == 0);
    nlohmann::json state = nlohmann::json::parse(read_file("build/.reproduce.json"));
    for (const auto& [path, text] : pages) { write_file(path, text); }
    write_file("notes/train.md", "nothing\n");  // its data may not be here
    Run r = run_cs336({"reproduce", "--edition", "2026", "--writeup", "w.md", "--only", "?"});
    CAPTURE(r.err);
    CHECK(r.exit_code == 2);  // the command lines are read before --only is, so all of them are valid
    CHECK(has(r.err, "no such problem for --only; candidates: benchmarking_script, nsys_profile, "));
    CHECK(!has(r.err, "communication_accounting"));

    // Nothing has to run: each block gets its command without options, and the state has its output.
    const std::regex options("(<!-- begin: ./cs336 [^ ;]+)[^\n]*");
    std::map<std::string, std::string> bare;
    for (const auto& [path, text] : our_pages()) {
        write_file(path, bare[path] = std::regex_replace(text, options, "$1 -->"));
    }
    Words headings, lines;
    for (const auto& row : problems) {
        std::string section = row[2].is_string() ? row[2].get<std::string>() : row[2].dump(), id = row[0];
        if (section.empty() || section == "tool") { continue; }
        state["outputs"][id + " --edition 2026"] = "caption\n\n| a |\n| - |\n| 1 |\n";
        state["pictures"][id + " --edition 2026"] = nlohmann::json::array();
        headings.push_back("\n## " + section + " " + id + "\n\n> ");
        lines.push_back(section + " ./cs336 " + id + " --edition 2026");
    }
    REQUIRE(mkdir("build/reproduce", 0777) == 0);
    write_file("build/reproduce/.reproduce.json", state.dump());
    r = run_cs336({"reproduce", "--edition", "2026", "--writeup", "w.md", "--format", "json"});
    CAPTURE(r.err);
    CHECK(r.exit_code == 0);
    const std::string text = read_file("w.md");
    CHECK(in_order(text, headings));
    CHECK(headings.size() == 28);
    CHECK(count(text, "\n## ") == headings.size() + 1);  // and what ran
    CHECK(has(text, "run of `./cs336 reproduce --edition 2026` on"));
    CHECK(has(text, "> At 2026's xl"));  // memory_profiling's own page, not 2025's
    Words ran;
    for (const auto& row : rows_of(r.out)) {
        std::string section = row[1].is_string() ? row[1].get<std::string>() : row[1].dump();
        ran.push_back(section + " " + row[2].get<std::string>());
    }
    CHECK(ran == lines);
    CHECK(!has(r.err, "blocks written"));
    for (const auto& [path, page] : bare) { CHECK_MESSAGE(read_file(path) == page, path); }
    for (const auto& entry : std::filesystem::directory_iterator("build/reproduce")) {
        CHECK(entry.path().filename() == ".reproduce.json");  // no copies
    }
}

TEST_CASE("reproduce --edition 2026: 2025's command lines get its sizes and context lengths, its own stay") {
    Repository repository;
    const std::string accumulation = "mixed_precision_accumulation; tables: no such caption";
    const std::string meta = "memory_profiling --device cpu --mode fused --precision fp32", shown = "; tables: (d)";
    const std::string typed = meta + " --context_length 64";
    write_file("notes/a.md", "# 1.1.6 memory_profiling\n\nHow much?\n\n" + block(typed + shown, "old\n") +
                                 block(accumulation, "old\n"));
    write_file("notes/b.md", "# 2026, 7 fsdp_accounting\n\nHow?\n\n" + block(typed + shown, "old\n") +
                                 block("fsdp_accounting --nproc 64", "old\n"));
    auto run = [&](const Words& more) {
        Words words = {"reproduce", "--writeup", "w.md", "--format", "json", "--edition"};
        words.insert(words.end(), more.begin(), more.end());
        return run_cs336(words);
    };
    Run r = run({"2026", "--out", "out"});
    CAPTURE(r.err);
    CHECK(r.exit_code == 0);
    nlohmann::json rows = rows_of(r.out);
    REQUIRE(rows.size() == 4);
    CHECK(rows[0][2] == "./cs336 " + meta + " --edition 2026");
    CHECK(rows[1][2] == "./cs336 mixed_precision_accumulation --edition 2026");
    CHECK(rows[1][3] == "ran");  // although the block does not find its table
    CHECK(rows[2][2] == "./cs336 " + typed + " --edition 2026");
    CHECK(rows[3][2] == "./cs336 fsdp_accounting --nproc 64 --edition 2026");
    CHECK(in_order(squeezed(read_file("w.md")), {"\n##2.1.6memory_profiling\n\n>Howmuch?\n", "|xl(2026)|128|",
                                                 "|xl(2026)|2048|", "\n##7fsdp_accounting\n", "|xl(2026)|64|"}));
    CHECK(has(read_file("notes/a.md"), "old\n"));
    CHECK(access("out/a.md", F_OK) != 0);

    r = run({"2026", "--only", "2.1.6"});
    CHECK(r.exit_code == 0);
    CHECK(has(r.err, "section 2.1.6 of the 2026 handout: took memory_profiling"));

    r = run({"2025", "--only", "memory_profiling"});
    CHECK(r.exit_code == 0);
    CHECK(rows_of(r.out)[0][2] == "./cs336 " + typed);
    CHECK(in_order(squeezed(read_file("w.md")), {"\n##1.1.6memory_profiling\n\n>Howmuch?\n", "|2.7B|64|"}));
    CHECK(has(squeezed(read_file("notes/a.md")), "|2.7B|64|"));
}

TEST_CASE("reproduce --edition: what it refuses, before anything runs") {
    Repository repository;
    write_file("notes/a.md", "# 2.4 communication_accounting\n" + block("communication_accounting", "old\n"));
    write_file("notes/b.md", "# 2.2 naive_ddp\n" + block("naive_ddp --nproc 64", "old\n"));
    write_file("README.md", "Front\n");
    const std::vector<std::pair<Words, std::string>> cases = {
        {{"2026"}, "--edition: got 2026, takes --writeup with it"},
        {{"2026", "--quick", "--out", "out"}, "--edition: got 2026, takes --writeup with it"},
        {{"2027", "--writeup", "w.md"}, "--edition: got '2027', takes one of 2025, 2026"},
        {{"2026", "--writeup", "notes/a.md"}, "--writeup: got notes/a.md, where a page"},
        {{"2026", "--writeup", "notes/b.md"}, "--writeup: got notes/b.md, where a page"},
        {{"2026", "--writeup", "README.md"}, "--writeup: got README.md, where a page"},
        {{"2026", "--writeup", "w.md", "--only", "communication_accounting"}, "candidates: naive_ddp"},
    };
    for (const auto& [options, says] : cases) {
        Words words = {"reproduce", "--edition"};
        words.insert(words.end(), options.begin(), options.end());
        Run r = run_cs336(words);
        CAPTURE(r.err);
        CHECK(r.exit_code == 2);
        CHECK(r.out == "");
        CHECK(count(r.err, "\n") == 1);
        CHECK(has(r.err, says));
        CHECK(access("w.md", F_OK) != 0);
    }
    CHECK(has(read_file("notes/a.md"), "old\n"));
}

// In the repository itself: every marker is read before --only is, so this checks them all.
TEST_CASE("reproduce: the committed pages have a block for every problem, and their command lines are valid") {
    Run r = run_cs336({"reproduce", "--only", "?"});
    CAPTURE(r.err);
    REQUIRE(r.exit_code == 2);
    int problems = 0;
    nlohmann::json rows = rows_of(run_cs336({"list", "--format", "json"}).out);
    for (const auto& row : rows) {
        if (row[1] == "tool") { continue; }
        std::string id = row[0], page = row[6];
        CAPTURE(page);
        CHECK((has(r.err, " " + id + ",") || has(r.err, " " + id + "\n")));
        std::string begin = "<!-- begin: ./cs336 " + id;
        CHECK((has(read_file(page), begin + " ") || has(read_file(page), begin + ";")));
        problems++;
    }
    CHECK(problems == 32);
}
