// Tests of `scaling`: its rows, its answers and its picture from a table as eight GPUs could give it.
#include "answers.h"
#include "commands.h"
#include "test.h"

static Table eight_gpus() {
    Table table{"scaling: size xl (d_model 1600, 48 layers), precision fp32",
                {"Scaling", "Ranks", "Way", "sequences per rank", "step (ms)", "Exposed Comm (ms)", "Tokens/second",
                 "speed-up", "efficiency (%)"},
                {}};
    auto add = [&](const char* kind, const char* n, const char* way, const char* ms, const char* exposed,
                   const char* times, const char* share) {
        table.rows.push_back({kind, n, way, "2", ms, exposed, "", times, share});
    };
    for (const char* kind : {"weak", "strong"}) {
        add(kind, "1", "no sync", "100.00", "0.00", "1.00", "100.0");
        add(kind, "1", "overlapped", "125.00", "0.10", "0.80", "80.0");
        add(kind, "1", "FSDP", "105.00", "", "0.95", "95.2");
        add(kind, "4", "no sync", "100.00", "0.00", "4.00", "100.0");
        add(kind, "4", "overlapped", "114.00", "9.12", "3.51", "87.7");
        add(kind, "4", "FSDP", "OOM (80.0 GiB per rank)", "", "", "");
        add(kind, "8", "no sync", "100.00", "0.00", "8.00", "100.0");
        add(kind, "8", "overlapped", "104.00", "2.00", "7.69", "96.2");
        add(kind, "8", "FSDP", "110.00", "3.00", "7.27", "90.9");
    }
    return table;
}

TEST_CASE("scaling: answers name the best way, its efficiency and where it waits") {
    Table table = eight_gpus();
    Answers answers = answers_of("scaling", {table});
    REQUIRE(answers.size() == 2);
    CHECK(answers[0].part == "weak");
    CHECK(
        answers[0].text ==
        "With 2 sequences per rank, the fastest way on 8 ranks is overlapped: 7.69 times the tokens per second of one "
        "rank, which is 96.2 % of linear. The other ways: FSDP 7.27 times. Its efficiency falls below 90 % at 4 ranks, "
        "where it waits 9.12 of 114.00 ms for "
        "communication (8.0 %).");
    for (auto& row : table.rows) {
        if (row[0] == "strong" && row[2] == "overlapped" && row[1] == "8") { row[7] = "7.00"; }
    }
    CHECK(answers_of("scaling", {table})[1].text ==
          "With 16 sequences in all, the fastest way on 8 ranks is FSDP: 7.27 times the tokens per second of one rank, "
          "which is 90.9 % of linear. The other ways: overlapped 7.00 times. Its efficiency stays at 90 % or more, "
          "where it waits 3.00 of 110.00 ms for communication "
          "(2.7 %).");
    Table close = table;  // as rounded, FSDP is as fast
    for (auto& row : close.rows) {
        if (row[1] == "8" && row[2] == "FSDP") { row[4] = "103.90", row[7] = "7.69"; }
    }
    CHECK(has(answers_of("scaling", {close})[0].text, "the fastest way on 8 ranks is FSDP: 7.69 times"));
    Table shared = table;
    shared.caption += "; strong: over a rank's share of the fastest way on 2 ranks; 1 warmup";
    CHECK(has(answers_of("scaling", {shared})[0].text, "per second of one rank, which"));
    CHECK(has(answers_of("scaling", {shared})[1].text, "per second of one of 2 ranks, which"));
    for (auto& row : shared.rows) {
        row[4] = row[2] == "overlapped" ? "failed" : row[4], row[7] = row[4] == "failed" ? "" : row[7];
    }
    CHECK(has(answers_of("scaling", {shared})[0].text, "is FSDP: 7.27 times"));
    CHECK(has(answers_of("scaling", {shared})[0].text, "The other ways: overlapped failed. Its"));
    CHECK(!has(picture_of("scaling", {shared}), "overlapped"));
    table.rows.erase(table.rows.begin() + 3, table.rows.begin() + 9);
    CHECK(has(answers_of("scaling", {table})[0].text, "nothing to compare"));
}
TEST_CASE("scaling: its picture has a line for each way, and the linear one") {
    Table none = eight_gpus();  // no step on one rank
    for (auto& row : none.rows) { row[7] = ""; }
    CHECK(picture_of("scaling", {none}) == "");
    std::string svg = picture_of("scaling", {eight_gpus()});
    for (const char* text : {"weak scaling", "strong scaling", "linear", "overlapped", "FSDP", "OOM"}) {
        CHECK_MESSAGE(has(svg, text), text);
    }
}
TEST_CASE("scaling: each group is measured, and a speed-up is over the fastest way on one rank") {
    CHECK(run_cs336({"scaling", "--nproc", "0"}).exit_code == 2);
    CHECK(run_cs336({"scaling", "--nproc", "1,65"}).exit_code == 2);
    CHECK(run_cs336({"scaling", "--precision", "fp16"}).exit_code == 2);
    Run plan = run_cs336({"scaling", "--plan", "--memory", "80GiB", "--format", "csv"});
    CHECK(read_csv(plan.out).rows.size() == 7 * 4 + 1);  // strong scaling shares the largest group, and DDP runs once
    if (!why_not("gloo", CPU, 2).empty()) { return; }
    Run r = run_cs336({"scaling", "--device", "cpu", "--quick", "--nproc", "2,1,2", "--format", "csv"});
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    Table table = read_csv(r.out);
    CHECK(table.rows.size() == 2 * 2 * 8);
    CHECK(has(picture_of("scaling", {table}), "AdamW in backward"));  // all ways at once
    Run small_card = run_cs336({"scaling", "--plan", "--memory", "24GiB"});
    CHECK(has(small_card.out, "size large instead of xl, which does not fit"));
    CHECK(!has(small_card.out, ", xl, "));
    double best = 0;
    for (const auto& row : table.rows) {
        if (row[0] == "strong" && row[1] == "1") { best = std::max(best, std::stod(row[6])); }
    }
    for (const auto& row : table.rows) {
        int n = std::stoi(row[1]), per_rank = std::stoi(row[3]);
        CHECK(n * per_rank == (row[0] == "weak" ? n : 2));
        CHECK(std::abs(std::stod(row[6]) * std::stod(row[4]) / (1e3 * n * per_rank * 32) - 1) < 0.01);
        if (row[0] == "strong") { CHECK(std::abs(std::stod(row[7]) - std::stod(row[6]) / best) < 0.011); }
        CHECK(std::abs(std::stod(row[8]) - 100 * std::stod(row[7]) / n) < 1);
    }
}
TEST_CASE("scaling: without a step on one rank, the smallest group's share is the measure") {
    if (lacks("gloo", CPU, 3)) { return; }
    Run r = run_cs336({"scaling", "--device", "cpu", "--quick", "--nproc", "2,3"});
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    Table table = tables_in(r.out)[0];
    CHECK(has(table.caption, "; weak: over a rank's share of the fastest way on 2 ranks; "));
    CHECK(!has(table.caption, "strong: over"));  // 2 ranks do not divide 3 sequences
    double best = 0;
    for (const TableRow& row : rows_of(table, {{"Scaling", "weak"}, {"Ranks", "2"}})) {
        if (row.text("Way") != "no sync") { best = std::max(best, row.number("speed-up")); }
    }
    CHECK(best == 2);
    CHECK(has(r.out, "**(weak)** With 1 sequence per rank, the fastest way on 3 ranks is "));
    CHECK(has(r.out, "**(strong)** The table lacks a step on 3 ranks, or one on fewer to compare with."));
}
TEST_CASE("scaling: where groups fail, the table and its answers are printed, and a missing picture is named") {
    if (lacks("gloo", CPU, 2)) { return; }
    Folder folder;
    const std::string svg = folder / "s.svg";
    Run r =
        run_shell("GLOO_SOCKET_IFNAME=none " + program() + " scaling --device cpu --quick --nproc 1,2 --plot " + svg);
    CHECK(r.exit_code == 1);
    CHECK(has(r.out, "| data parallel              |                  1 | failed "));
    CHECK(has(r.out, "| sharded optimizer and FSDP |                  1 | failed "));
    CHECK(has(r.out, "**(weak)** The table lacks a step on 2 ranks"));
    CHECK(has(r.out, "--plot " + svg + ": left out: no step to compare with"));
    CHECK(folder.files().empty());
}
