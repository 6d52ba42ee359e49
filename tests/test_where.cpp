// Tests of where.cu: each line that it prints is the one that has the name; and what it says where there is nothing.
#include "test.h"

#include <nlohmann/json.hpp>

#include <sstream>

using Words = std::vector<std::string>;

static Words lines_of(const std::string& text) {
    Words lines;
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);) { lines.push_back(line); }
    return lines;
}
static std::vector<Words> rows_of_where(const Words& words) {
    Words all = {"where", "--format", "json"};
    all.insert(all.end(), words.begin(), words.end());
    Run r = run_cs336(all);
    INFO(r.err);
    REQUIRE(r.exit_code == 0);
    return nlohmann::json::parse(r.out)["rows"].get<std::vector<Words>>();
}

TEST_CASE("where: every line that it prints has the name, or the text of the formula") {
    std::vector<Words> rows = rows_of_where({});
    CHECK(rows.size() > 100);
    std::set<std::string> what;
    for (const Words& row : rows) {
        CAPTURE(row[2]);
        CAPTURE(row[3]);
        size_t colon = row[3].find(':');
        Words source = lines_of(read_file(row[3].substr(0, colon)));
        size_t line = std::stoul(row[3].substr(colon + 1));
        REQUIRE(line <= source.size());
        size_t end =
            row[2].size() > 4 && row[2].substr(row[2].size() - 4) == " ..." ? row[2].size() - 4 : row[2].size();
        CHECK(has(source[line - 1], row[2].substr(0, end)));
        CHECK(row[2].size() <= 60);
        what.insert(row[1]);
    }
    CHECK(what == std::set<std::string>{"formula", "section", "loop", "kernel", "fast"});
}

TEST_CASE("where: words find topics and names, in any case and order") {
    std::vector<Words> rows = rows_of_where({"Softmax", "online"});
    REQUIRE(rows.size() == 6);
    CHECK(rows[0][1] == "formula");
    CHECK(rows[0][2] == "S = Q_i K_j^T / sqrt(D)");
    CHECK(rows_of_where({"adamw"})[0][2] == "p *= 1 - lr wd;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - ...");
    CHECK(rows[1][2] == "flash_forward_tile_cpu");
    CHECK(rows[2][2] == "flash_v1_forward_kernel");
    CHECK(rows_of_where({"bucket"})[1][2] == "cut_into_buckets");
    CHECK(rows_of_where({"adamw"})[1][2] == "adamw_cpu");
    CHECK(rows_of_where({"rmsnorm", "backward"})[1][2] == "rmsnorm_backward_cpu");
    CHECK(rows_of_where({"raise_maximum"}).size() == 6);
}

TEST_CASE("where: a backward's formula is a gradient") {
    auto formula = [](const Words& words) {
        Words row = rows_of_where(words).at(0);
        CHECK(row[1] == "formula");
        return row[2];
    };
    CHECK(has(formula({"rmsnorm", "backward"}), "dx_c = r w_c dy_c - "));
    CHECK(formula({"flash", "attention", "backward"}) == "D_i = rowsum(dO_i O_i)");
    CHECK(has(formula({"swiglu", "backward"}), "da = dg b s"));
    CHECK(has(formula({"cross-entropy", "backward"}), "dl[n,v] = "));
    CHECK(has(formula({"softmax", "backward"}), "dS_rj = P_rj (dP_rj - "));
    CHECK(has(formula({"softmax_cpu"}), "P_rj = exp(S_rj - L_r)"));
    CHECK(has(formula({"swiglu", "silu", "forward"}), "g = silu(a) * b"));
    CHECK(has(formula({"cross-entropy", "forward"}), "loss = mean_n("));  // without the words before it
}

TEST_CASE("where: what it does not find is one line") {
    for (const auto& [words, names] : {std::pair<Words, const char*>{{"where", "softmax", "bogus"}, "'softmax bogus'"},
                                       {{"where", "softmx"}, "got 'softmx'; did you mean softmax? It takes words of"},
                                       {{"where", "allreduce"}, "; did you mean all-reduce? It takes words of"},
                                       {{"where", "adamw", "--foo"}, "--foo"}}) {
        Run r = run_cs336(words);
        CHECK(r.exit_code == 2);
        CHECK(r.out == "");
        CHECK(lines_of(r.err).size() == 1);
        CHECK(has(r.err, names));
    }
    Folder folder;
    std::filesystem::copy_file(program(), folder / "cs336");
    auto alone = [&] { return run_shell("cd " + folder.path + " && ./cs336 where adamw"); };
    Run r = alone();
    CHECK(r.exit_code == 1);
    CHECK(lines_of(r.out).size() == 1);
    CHECK(has(r.out, "no notes/where.md"));
    std::filesystem::create_directory(folder / "notes");
    write_file(folder / "notes/where.md", "| topic | loop |\n|---|---|\n| adamw | [`x`](../none.cu#L3) |\n");
    r = alone();
    CHECK(r.exit_code == 1);
    CHECK(lines_of(r.out).size() == 1);
    CHECK(has(r.out, "none.cu:3"));
}
