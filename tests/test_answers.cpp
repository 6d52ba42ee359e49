// Tests of answers.cu and its neighbours: recorded tables in, the sentences out.
#include "answers.h"
#include "test.h"

#include <regex>

// The program's own tables, as they are printed and read back.
static Tables tables_of(const std::vector<std::string>& words) {
    Run r = run_cs336(words);
    REQUIRE(r.exit_code == 0);
    return tables_in(r.out);
}
static std::string said(const Answers& answers, const std::string& part) {
    for (const Answer& answer : answers) {
        if (answer.part == part) { return answer.text; }
    }
    return "no answer (" + part + ")";
}
static void check_says(const Answers& answers, const std::string& part, const std::vector<std::string>& phrases) {
    std::string text = said(answers, part);
    for (const std::string& phrase : phrases) { CHECK_MESSAGE(has(text, phrase), phrase, " in: ", text); }
}

TEST_CASE("answers: tables are read back as they were printed") {
    Table table{"a caption; scaled down: steps 2 instead of 5, S 1; commit 0", {"name", "ms"}, {}};
    table.rows = {{"a | b", "1.91x"}, {"", "OOM"}, {"c", "34.1%"}, {"d", "nan"}};
    Tables read = tables_in("text\n\n" + format_table(table, "md") + "\n" + format_table(table, "md") + "more\n");
    REQUIRE(read.size() == 2);
    CHECK(read[1].caption == table.caption);
    CHECK(read[1].columns == table.columns);
    CHECK(read[1].rows == table.rows);
    CHECK(row_of(read[0], {{"name", "a | b"}}).number("ms") == 1.91);
    CHECK(std::isnan(row_of(read[0], {{"name", ""}}).number("ms")));
    CHECK(std::isnan(row_of(read[0], {{"name", "d"}}).number("ms")));
    CHECK(std::isnan(row_of(read[0], {{"name", "e"}}).number("ms")));
    CHECK(largest_of(rows_of(read[0]), "ms").text("name") == "c");
    CHECK(smallest_of(rows_of(read[0]), "ms").text("name") == "a | b");
    CHECK(scaled_down(table) == " This run was scaled down: steps 2 instead of 5, S 1.");
    CHECK(list_of({"a", "b", "c"}) == "a, b and c");
    CHECK(say("{} of {}", "1", std::string("{}")) == "1 of {}");
}
TEST_CASE("answers: the last part of what a command prints, in every format") {
    const std::string begin = "P = 2 D F L = 219848638464 parameters take 4 P = 879.4 GB (819.0 GiB)";
    CHECK(has(run_cs336({"communication_accounting"}).out, "\n\n**(a)** " + begin));
    CHECK(has(run_cs336({"communication_accounting", "--format", "csv"}).out, "\n# (a) " + begin));
    CHECK(has(run_cs336({"communication_accounting", "--format", "json"}).out, "\n{\"answers\":{\"a\":\"" + begin));
}
TEST_CASE("answers: mixed_precision_accumulation") {
    check_says(answers_of("mixed_precision_accumulation", tables_of({"mixed_precision_accumulation"})), "",
               {"is 10.0001335, the fp16 sum 9.9531250,", "fp16 addends 10.0021362", "costs 0.0021362",
                "stops at 4 after 350 additions"});
}
TEST_CASE("answers: communication_accounting") {
    Answers answers = answers_of("communication_accounting", tables_of({"communication_accounting"}));
    check_says(answers, "a",
               {"16 P = 3517.6 GB (3276.0 GiB)", "= 17547264 bytes per token", "44 GPUs of 80 GB, or of 41"});
    check_says(answers, "b",
               {"below 95 GB from N = 38 devices on; with 2048 tokens per device, from N = 46",
                "from 10828 tokens per device on"});
    check_says(answers, "c", {"= 25302 tokens overall, 395.3 per chip", "20445 tokens (319.4 per chip)"});
    check_says(answers, "d", {"= 245.3 tokens per chip", "X = 8, Y = 8, needs 16594 tokens. ", "= 61.3."});
    Answers none = answers_of("communication_accounting", tables_of({"communication_accounting", "--tp", "21"}));
    check_says(none, "c", {"No batch is compute bound with X = 16 and Y = 21", "below M_Y F / alpha = 20.8"});
}
// A sentence ends in ".", "!" or "?" before a space or the end. That a run was scaled down is said beside the answer.
static void check_length(const std::string& where, const std::string& answer) {
    static const std::regex end("[.!?](?= |$)");
    std::string text = answer.substr(0, answer.find(" This run was scaled down: "));
    long sentences = std::distance(std::sregex_iterator(text.begin(), text.end(), end), std::sregex_iterator());
    CHECK_MESSAGE((sentences >= 1 && sentences <= 3), where, ": ", sentences, " sentences: ", text);
}
TEST_CASE("answers: three sentences at most, from recorded tables and on the pages") {
    size_t fixtures = 0, pages = 0;
    for (const auto& file : std::filesystem::directory_iterator("tests/fixtures/answers")) {
        Answers answers;
        std::string command = file.path().stem();  // a file's name may add to the command's: nsys_profile_cpu
        for (; answers.empty() && !command.empty(); command.resize(std::max<size_t>(command.rfind('_') + 1, 1) - 1)) {
            answers = answers_of(command, tables_in(read_file(file.path())));
        }
        for (const Answer& a : answers) { check_length(file.path().string() + " (" + a.part + ")", a.text); }
        fixtures += !answers.empty();
    }
    for (const auto& file : std::filesystem::directory_iterator("notes")) {
        if (file.path().extension() != ".md") { continue; }
        std::string page = read_file(file.path()), begin = "<!-- answers: ";
        for (size_t at = 0; (at = page.find(begin, at)) != std::string::npos; pages++) {
            at = page.find('\n', at) + 1;
            std::istringstream lines(page.substr(at, page.find("<!-- end -->", at) - at));
            bool code = false;  // which has no sentences
            for (std::string line; std::getline(lines, line);) {
                bool fence = line == "```";
                code = code != fence;
                if (!line.empty() && !code && !fence) { check_length(file.path(), line); }
            }
            CHECK(!code);
        }
    }
    CHECK(fixtures == 29);
    CHECK(pages >= 30);
}
