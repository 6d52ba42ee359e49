// Tests of bench_step.cu.
#include "answers.h"
#include "commands.h"
#include "test.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <sstream>

TEST_CASE_TEMPLATE("benchmark: the roofline's FLOPs are the model's, its floors add up, and its shares can be", D,
                   OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    Run r = run_cs336({"benchmarking_script",
                       "--device",
                       name_of(D::device),
                       "--quick",
                       "--roofline",
                       "--d_model",
                       "128",
                       "--d_ff",
                       "320",
                       "--num_layers",
                       "2",
                       "--num_heads",
                       "4",
                       "--vocab_size",
                       "1000",
                       "--context_length",
                       "48",
                       "--precision",
                       "fp32,bf16",
                       "--mode",
                       "fused",
                       "--format",
                       "json"});
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    std::istringstream lines(r.out);
    std::vector<nlohmann::json> tables;
    for (std::string line; std::getline(lines, line);) {
        if (!line.empty()) { tables.push_back(nlohmann::json::parse(line)); }
    }
    REQUIRE(tables.size() == 6);  // per precision the usual table, then the roofline; fewer warm-up steps; the answers
    const ModelConfig c{"custom", 128, 320, 2, 4, 1000};
    for (const nlohmann::json& t : {tables[1], tables[3]}) {
        std::string caption = t["caption"];
        CAPTURE(caption);
        CHECK(caption.find("roofline; precision ") == 0);
        REQUIRE(t["rows"].size() == 5);
        auto cell = [&](int row, const char* column) {
            size_t k = std::find(t["columns"].begin(), t["columns"].end(), column) - t["columns"].begin();
            REQUIRE_MESSAGE(k < t["columns"].size(), column);
            const nlohmann::json& x = t["rows"][row][k];
            return x.is_string() ? atof(x.get<std::string>().c_str()) : x.get<double>();
        };
        const char* phases[] = {"forward", "loss", "backward", "optimizer", "step"};
        double floors = 0;
        for (int i = 0; i < 5; i++) {
            CHECK(t["rows"][i][1] == phases[i]);
            double floor = cell(i, "matmul ms") + cell(i, "attention ms") + cell(i, "bytes ms");
            CHECK(std::abs(cell(i, "floor ms") - floor) < 2.1e-3);  // three decimals each
            CHECK(cell(i, "MB") > 0);
            CHECK(cell(i, "measured ms") > 0);
            CHECK(cell(i, "share") >= 0);
            CHECK(cell(i, "share") < 1000);
            floors += i < 4 ? cell(i, "floor ms") : 0;
        }
        CHECK(std::abs(cell(4, "floor ms") - floors) < 5e-3);
        CHECK(cell(4, "share") > 0);
        int B = D::device == CPU ? 1 : 4;
        double matmul = cell(0, "matmul GFLOP"), attention = cell(0, "attention GFLOP");  // causal: half of it
        CHECK(matmul + 2 * attention == doctest::Approx(forward_flops(c, B, 48) / 1e9).epsilon(1e-5));
        CHECK(cell(4, "matmul GFLOP") == doctest::Approx(3 * matmul).epsilon(1e-5));
        CHECK(cell(4, "attention GFLOP") == doctest::Approx(3.5 * attention).epsilon(1e-5));
        int64_t weights = 0;
        for (const Parameter& p : make_model(c).parameters) { weights += count(p.shape); }
        double less = caption.find("precision bf16") == std::string::npos ? 0 : 2.0 * matmul_weights(c);
        CHECK(cell(3, "MB") == doctest::Approx((28.0 * weights - less) / 1e6).epsilon(1e-5));
    }
}

TEST_CASE("benchmark: a plain run answers (c) for its smallest size, and one with a typed warm-up does not") {
    std::vector<std::string> words = {"benchmarking_script",
                                      "--device",
                                      "cpu",
                                      "--steps",
                                      "2",
                                      "--context_length",
                                      "8",
                                      "--batch_size",
                                      "1",
                                      "--precision",
                                      "bf16,fp32",
                                      "--d_model",
                                      "16",
                                      "--d_ff",
                                      "16",
                                      "--num_layers",
                                      "1",
                                      "--num_heads",
                                      "1",
                                      "--vocab_size",
                                      "16"};
    auto warmups = [&](const std::vector<std::string>& more) {
        std::vector<std::string> all = words, found;
        all.insert(all.end(), more.begin(), more.end());
        Run r = run_cs336(all);
        REQUIRE_MESSAGE(r.exit_code == 0, r.err);
        const Tables sweeps = tables_with(tables_in(r.out), {"each row a fresh process"});
        REQUIRE(sweeps.size() <= 1);
        for (const Table& sweep : sweeps) {
            for (const TableRow& row : rows_of(sweep)) { found.push_back(row.text("warmup")); }
        }
        CHECK(
            has(r.out, sweeps.empty() ? "(c)** This run had one number" : "(c)** The mean time of forward (custom, "));
        if (!sweeps.empty()) { found.push_back(value_in(sweeps[0], "precision ", ",")); }
        if (!sweeps.empty()) { found.push_back(value_in(sweeps[0], "mode ", ",")); }
        return found;
    };
    CHECK(warmups({}) == std::vector<std::string>{"0", "1", "2", "5", "bf16", "eager"});
    CHECK(warmups({"--quick", "--mode", "fused"}) == std::vector<std::string>{"0", "1", "bf16", "fused"});
    CHECK(warmups({"--warmup", "1"}).empty());
    Run plan = run_cs336({"benchmarking_script", "--plan", "--memory", "80GiB", "--size", "medium,small", "--mode",
                          "eager", "--format", "csv"});
    const std::string row = "\"small, batch 4, context length 256, forward, fp32 eager\"";
    int rows = 0;
    for (size_t at = plan.out.find(row); at != std::string::npos; at = plan.out.find(row, at + 1)) { rows++; }
    CHECK(rows == 5);  // its own, and one per number of warm-up steps
}
TEST_CASE("benchmark: info prints the peaks of all known cards, also without a GPU") {
    Run r = run_cs336({"info", "--quick", "--device", "cpu"});
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    Tables tables = tables_in(r.out);
    REQUIRE(tables.size() == 2);
    TableRow h200 = row_of(tables[1], {{"card", "NVIDIA H200"}}), t4 = row_of(tables[1], {{"card", "Tesla T4"}});
    CHECK(h200.text("bf16") == "989");
    CHECK(h200.text("source") == "H200 data sheet");
    CHECK(t4.text("fp16") == "65");
    CHECK(t4.text("bf16") == "-");
}
TEST_CASE(
    "benchmark: a step's rate is (6 N + 12 L C S) FLOP per token, and tables of steps have its share of the peak") {
    const ModelConfig c{"custom", 64, 96, 3, 4, 50};
    const double N = 3 * (4 * 64 * 64 + 3 * 64 * 96) + 64 * 50, L = 3, C = 64, S = 16, tokens = 2 * S;
    CHECK(step_tflops(c, 2, 16, 5) == doctest::Approx(tokens * (6 * N + 12 * L * C * S) / 5e-3 / 1e12));
    Run train = run_cs336({"train", "--data", "LICENSE", "--quick", "--device", "cpu"});
    CHECK(has(train.out, " | tokens/s | MFU % | peak MiB |\n"));
    if (!why_not("gloo", CPU, 2).empty()) { return; }
    for (const char* command : {"naive_ddp_benchmarking", "fsdp_accounting"}) {
        Run r = run_cs336({command, "--quick", "--device", "cpu"});
        REQUIRE_MESSAGE(r.exit_code == 0, r.err);
        const Tables tables = tables_in(r.out);
        for (const TableRow& row : rows_of(tables.at(0))) { CHECK(row.text("MFU %") == "-"); }
    }
}

TEST_CASE("benchmark: flash_benchmarking's share of the card's peak") {
    Run r = run_cs336({"flash_benchmarking", "--quick", "--device", "cpu"});
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    const Tables tables = tables_in(r.out);
    for (const TableRow& row : rows_of(tables.at(0))) { CHECK(row.text("of peak %") == "-"); }
}
