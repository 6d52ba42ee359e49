// The test runner. Its last line is `N passed, N failed, N skipped`, in test cases. doctest's
// options work: -tc="softmax*" runs some, -ltc lists all.
#define DOCTEST_CONFIG_IMPLEMENT
#include "test.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>

static bool skipped_now = false;
static map<string, int> skipped_why;
static int passed = 0, failed = 0, skipped = 0;

void skip_this_case(const char* why) {
    skipped_now = true;
    skipped_why[why]++;
}

// Counts what doctest's own summary does not: skipped cases are not passed ones.
struct Counter : doctest::IReporter {
    explicit Counter(const doctest::ContextOptions&) {}
    void test_case_start(const doctest::TestCaseData&) override { skipped_now = false; }
    void test_case_reenter(const doctest::TestCaseData&) override {}
    void test_case_end(const doctest::CurrentTestCaseStats& stats) override {
        if (!stats.testCaseSuccess) {
            failed++;
        } else if (skipped_now) {
            skipped++;
        } else {
            passed++;
        }
    }
    void report_query(const doctest::QueryData&) override {}
    void test_run_start() override {}
    void test_run_end(const doctest::TestRunStats&) override {}
    void test_case_exception(const doctest::TestCaseException&) override {}
    void subcase_start(const doctest::SubcaseSignature&) override {}
    void subcase_end() override {}
    void log_assert(const doctest::AssertData&) override {}
    void log_message(const doctest::MessageData&) override {}
    void test_case_skipped(const doctest::TestCaseData&) override {}
};
REGISTER_LISTENER("counter", 1, Counter);

static string rest_of(FILE* file) {
    string text;
    for (int c = fgetc(file); c != EOF; c = fgetc(file)) { text += (char)c; }
    return text;
}
static int exit_code_of(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : -1; }

// Files take the two streams: no pipe can fill up and block the program.
Run run_cs336(const vector<string>& words, const char* stdout_path) {
    vector<string> all = {program()};
    all.insert(all.end(), words.begin(), words.end());
    vector<char*> argv;
    for (string& word : all) { argv.push_back(word.data()); }
    argv.push_back(nullptr);
    FILE *out = tmpfile(), *err = tmpfile();
    REQUIRE(out);
    REQUIRE(err);
    fflush(nullptr);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        dup2(stdout_path ? open(stdout_path, O_WRONLY) : fileno(out), 1);
        dup2(fileno(err), 2);
        execv(argv[0], argv.data());
        _exit(127);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    rewind(out), rewind(err);
    Run result{exit_code_of(status), rest_of(out), rest_of(err)};
    fclose(out), fclose(err);
    return result;
}

Run run_shell(const string& line) {
    FILE* pipe = popen(("exec 2>&1; " + line).c_str(), "r");
    REQUIRE(pipe);
    string out = rest_of(pipe);
    return {exit_code_of(pclose(pipe)), out, ""};
}

string read_file(const string& path) {
    std::ifstream file(path, std::ios::binary);
    REQUIRE_MESSAGE(file.is_open(), path);
    return {std::istreambuf_iterator<char>(file), {}};
}
void write_file(const string& path, const string& text) {
    std::ofstream file(path, std::ios::binary);
    file << text;
    file.close();
    REQUIRE(file.good());
}

#ifdef __SANITIZE_ADDRESS__
int program_main(int argc, char** argv);  // main.cu's
#endif

int main(int argc, char** argv) {
#ifdef __SANITIZE_ADDRESS__
    if (std::filesystem::path(argv[0]).filename() == "cs336") { return program_main(argc, argv); }
#endif
    choose_cpu_settings(argv);
    if (access(program().c_str(), X_OK) != 0) {
        fprintf(stderr, "no program %s: tests that run it fail. Type `make`, or set CS336_BINARY\n",
                program().c_str());
    }
    doctest::Context runner(argc, argv);
    int exit_code = runner.run();
    if (exit_code == 0 && passed + skipped == 0 && !runner.shouldExit()) {
        fprintf(stderr, "no test case ran\n");
        exit_code = 1;
    }
    for (const auto& [why, cases] : skipped_why) { printf("skipped %d: %s\n", cases, why.c_str()); }
    if (!runner.shouldExit()) {
        printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    }
    return exit_code;
}
