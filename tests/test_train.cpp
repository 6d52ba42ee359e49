// Tests of train.cu: resuming, checkpoints, learning, and your own weights.
#include "answers.h"
#include "test.h"

#include <nlohmann/json.hpp>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <sstream>

TEST_CASE_TEMPLATE("train: a resumed run equals the uninterrupted one bit for bit", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    for (const char* precision : {"fp32", "bf16", "fp16", "pure_bf16"}) {
        std::vector<std::string> common = {"train",    "--data", "LICENSE", "--device", name_of(D::device), "--quick",
                                           "--sample", "0",      "--steps", "12",       "--precision",      precision};
        auto train = [&](std::vector<std::string> more) {
            more.insert(more.begin(), common.begin(), common.end());
            Run r = run_cs336(more);
            CHECK_MESSAGE(r.exit_code == 0, r.err);
        };
        Folder folder;
        std::string half = folder / "half", resumed = folder / "resumed", whole = folder / "whole";
        train({"--save", whole});
        train({"--stop_at", "5", "--save", half});
        train({"--load", half, "--save", resumed});
        CHECK(read_file(whole).size() > 10000);
        CHECK(read_file(whole) == read_file(resumed));
        CHECK(read_file(whole) != read_file(half));
        common.back() = strcmp(precision, "fp32") == 0 ? "bf16" : "fp32";  // which may not have the saved mode
        train({"--load", half});
    }
}
// The largest difference between two checkpoints' tensors, weights and moments.
static double difference(const std::string& path, const std::string& other) {
    SafeTensors a = load_safetensors(path), b = load_safetensors(other);
    CHECK(a.tensors.size() == b.tensors.size());
    double largest = 0;
    for (const auto& [name, t] : a.tensors) {
        REQUIRE(b.tensors.count(name));
        const float *x = (const float*)t.data, *y = (const float*)b.tensors.at(name).data;
        for (int64_t i = 0; i < count(t.shape); i++) { largest = std::max(largest, std::fabs((double)x[i] - y[i])); }
    }
    return largest;
}
static std::vector<double> losses_in(const std::string& csv) {
    std::vector<double> losses;
    std::istringstream lines(csv.substr(csv.find("step,loss,")));
    std::string line;
    std::getline(lines, line);
    while (std::getline(lines, line) && isdigit(line[0])) {
        losses.push_back(std::stod(line.substr(line.find(',') + 1)));
    }
    return losses;
}
TEST_CASE(
    "train: ranks and backwards per step change nothing but the rounding; a checkpoint fits any number of ranks") {
    if (lacks("gloo", CPU, 3)) { return; }
    Folder folder;
    auto train = [&](const std::string& save, std::vector<std::string> more) {
        more.insert(more.begin(), {"train",        "--data", "LICENSE",         "--device", "cpu",    "--quick",
                                   "--sample",     "0",      "--steps",         "6",        "--lr",   "0.001",
                                   "--batch_size", "12",     "--max_grad_norm", "0.5",      "--save", folder / save,
                                   "--format",     "csv"});
        Run r = run_cs336(more);
        CHECK_MESSAGE(r.exit_code == 0, r.err);
        return r.out;
    };
    const std::vector<double> losses = losses_in(train("one", {}));
    REQUIRE(losses.size() == 6);
    train("three backwards", {"--grad_accumulation", "3"});
    CHECK(difference(folder / "one", folder / "three backwards") < 1e-5);
    for (const char* strategy : {"ddp", "sharded", "fsdp"}) {
        for (const char* n : {"1", "2", "3"}) {
            INFO(n << " ranks, " << strategy);
            std::string out = train("ranks", {"--nproc", n, "--strategy", strategy, "--grad_accumulation", "2"});
            CHECK(has(out, std::string(n) + " ranks (" + strategy + ", gloo) in 2 backward passes"));
            CHECK(difference(folder / "one", folder / "ranks") < 1e-5);
            const std::vector<double> of_ranks = losses_in(out);
            REQUIRE(of_ranks.size() == losses.size());
            for (size_t i = 0; i < losses.size(); i++) { CHECK(std::fabs(of_ranks[i] - losses[i]) < 1e-5); }
        }
    }
    train("half", {"--nproc", "2", "--strategy", "fsdp", "--stop_at", "3"});
    CHECK(difference(folder / "one", folder / "half") > 1e-4);
    train("rest", {"--nproc", "3", "--strategy", "sharded", "--load", folder / "half"});
    CHECK(difference(folder / "one", folder / "rest") < 1e-5);
    train("half", {"--stop_at", "3"});
    train("rest", {"--nproc", "3", "--strategy", "fsdp", "--checkpoint", "1", "--load", folder / "half"});
    CHECK(difference(folder / "one", folder / "rest") < 1e-5);
    Run odd =
        run_cs336({"train", "--data", "LICENSE", "--device", "cpu", "--quick", "--nproc", "3", "--batch_size", "4"});
    CHECK(odd.exit_code == 2);
    CHECK(run_cs336({"train", "--data", "LICENSE", "--nproc", "2", "--trace", folder / "x.json"}).exit_code == 2);
    Run pure = run_cs336({"train", "--data", "LICENSE", "--device", "cpu", "--nproc", "2", "--precision", "pure_bf16"});
    CHECK(pure.exit_code == 2);
    CHECK(has(pure.err, "--precision: got 'pure_bf16' and --strategy ddp, takes one rank, or --strategy fsdp"));
    Run one =
        run_cs336({"train", "--data", "README.md", "--plan", "--nproc", "1", "--strategy", "ddp", "--head_chunk", "8"});
    CHECK(has(one.err, "--head_chunk: got 8 and --strategy ddp, takes no --strategy, or fsdp"));
    std::string fifo = folder / "fifo";  // each rank gets another part of it, or nothing
    REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
    REQUIRE(system(("for i in 1 2 3 4 5 6 7 8 9; do cat LICENSE; done > " + fifo + " &").c_str()) == 0);
    Run pipe = run_cs336({"train", "--data", fifo, "--device", "cpu", "--quick", "--nproc", "2"});
    CHECK(pipe.exit_code == 1);
    CHECK(has(odd.err, "--batch_size 4 is not divisible by 3 (3 ranks, --grad_accumulation 1)"));
}
using Words = std::vector<std::string>;
TEST_CASE("train: FSDP in pure bf16 and with a head chunk") {
    if (lacks("gloo", CPU, 3)) { return; }
    Folder folder;
    auto train = [&](const std::string& save, std::vector<std::string> more) {
        more.insert(more.begin(), {"train", "--data", "LICENSE", "--device", "cpu", "--quick", "--sample", "0",
                                   "--steps", "6", "--batch_size", "12", "--mode", "fused", "--save", folder / save});
        Run r = run_cs336(more);
        CHECK_MESSAGE(r.exit_code == 0, r.err);
        return tables_in(r.out);
    };
    const Words two = {"--nproc", "2", "--strategy", "fsdp"}, three = {"--nproc", "3", "--strategy", "fsdp"};
    auto with = [](Words words, const Words& more) {
        words.insert(words.end(), more.begin(), more.end());
        return words;
    };
    train("one", {});
    train("chunks", with(two, {"--head_chunk", "50"}));
    CHECK(difference(folder / "one", folder / "chunks") < 1e-5);

    const double LOSS_NOISE = 3e-4;  // measured with 6 seeds: 5e-5 at most; a step changes the loss by 1e-2
    const Words pure = {"--precision", "pure_bf16", "--head_chunk", "50"};
    Tables one = train("one", pure), of_two = train("two", with(two, pure)),
           of_three = train("three", with(three, pure));
    for (size_t step = 0; step < 6; step++) {
        double loss = rows_of(one.at(0)).at(step).number("loss");
        CHECK(rows_of(of_two.at(0)).at(step).number("loss") == doctest::Approx(loss).epsilon(LOSS_NOISE));
        CHECK(rows_of(of_three.at(0)).at(step).number("loss") == doctest::Approx(loss).epsilon(LOSS_NOISE));
    }
    train("half", with(with(two, pure), {"--stop_at", "3"}));
    Tables rest = train("rest", with(with(two, pure), {"--load", folder / "half"}));
    CHECK(read_file(folder / "rest") == read_file(folder / "two"));
    train("rest", with(with(three, pure), {"--load", folder / "half"}));  // another number of ranks
}
TEST_CASE("train: steps that fp16 skipped survive a checkpoint") {
    Folder folder;
    std::string start = folder / "start", large = folder / "large", half = folder / "half";
    auto train = [&](std::vector<std::string> more) {
        more.insert(more.begin(), {"train", "--data", "LICENSE", "--device", "cpu", "--quick", "--sample", "0"});
        Run r = run_cs336(more);
        REQUIRE_MESSAGE(r.exit_code == 0, r.err);
        return r.out;
    };
    train({"--precision", "fp16", "--steps", "12", "--stop_at", "2", "--save", start});
    SafeTensors file = load_safetensors(start);
    auto metadata = file.metadata;
    metadata["loss_scale"] = "1e12";  // so large that gradients overflow until it has halved a few times
    save_safetensors(large, {file.tensors.begin(), file.tensors.end()}, metadata);
    std::string whole = folder / "whole", resumed = folder / "resumed";
    CHECK(train({"--load", large, "--log_every", "1", "--save", whole}).find("overflow") != std::string::npos);
    train({"--load", large, "--stop_at", "6", "--save", half});
    train({"--load", half, "--save", resumed});
    CHECK(read_file(whole) == read_file(resumed));
}
TEST_CASE("train: a checkpoint whose metadata cannot be is refused, in a line that names it") {
    Folder folder;
    std::string good = folder / "good", bad = folder / "bad";
    Run r = run_cs336({"train", "--data", "LICENSE", "--device", "cpu", "--quick", "--steps", "1", "--save", good});
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    SafeTensors file = load_safetensors(good);
    auto loaded = [&](const std::string& name, const std::string& value) {
        auto metadata = file.metadata;
        REQUIRE(metadata.count(name));
        metadata[name] = value;
        save_safetensors(bad, {file.tensors.begin(), file.tensors.end()}, metadata);
        return run_cs336({"train", "--data", "LICENSE", "--device", "cpu", "--sample", "0", "--load", bad});
    };
    r = loaded("batch_size", "3");
    CHECK_MESSAGE(r.exit_code == 0, r.err);
    CHECK(r.out.find("; batch 3, ") != std::string::npos);
    const std::pair<const char*, const char*> wrong[] = {{"batch_size", "0"},
                                                         {"batch_size", "-1"},
                                                         {"batch_size", "1.5"},
                                                         {"batch_size", ""},
                                                         {"batch_size", "0x2"},
                                                         {"steps", "1048577"},
                                                         {"steps", "nan"},
                                                         {"context_length", "1e7"},
                                                         {"num_heads", "0"},
                                                         {"d_model", "63"},
                                                         {"lr", "0"},
                                                         {"lr", "inf"},
                                                         {"val_fraction", "1"},
                                                         {"min_lr", "-1e-9"},
                                                         {"warmup_steps", "2 "},
                                                         {"seed", "-1"},
                                                         {"seed", "1e3"},
                                                         {"mode", "warp"},
                                                         {"precision", "fp8"},
                                                         {"step", "-1"},
                                                         {"loss_scale", "0"},
                                                         {"good_steps", "x"},
                                                         {"seed", "18446744073709551616"}};
    for (const auto& [name, value] : wrong) {
        CAPTURE(std::string(name) + " = " + value);
        r = loaded(name, value);
        CAPTURE(r.err);
        CHECK(r.exit_code == 1);
        CHECK(r.out == "");
        CHECK(std::count(r.err.begin(), r.err.end(), '\n') == 1);
        CHECK(r.err.find(bad + ": metadata") != std::string::npos);
        CHECK(r.err.find(name) != std::string::npos);
    }
}
TEST_CASE("train: a checkpoint with more in it than its metadata says is refused") {
    Folder folder;
    std::string good = folder / "good", bad = folder / "bad";
    Run r = run_cs336({"train", "--data", "LICENSE", "--device", "cpu", "--quick", "--steps", "1", "--save", good});
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    SafeTensors file = load_safetensors(good);
    REQUIRE(file.metadata["num_layers"] == "2");
    file.metadata["num_layers"] = "1";
    save_safetensors(bad, {file.tensors.begin(), file.tensors.end()}, file.metadata);
    r = run_cs336({"train", "--data", "LICENSE", "--device", "cpu", "--load", bad});
    CHECK(r.exit_code == 1);
    CHECK_MESSAGE(has(r.err, bad + ": tensor \"adamw.m.layers.1.attn.k_proj.weight\": not one of a model of 1 layers"),
                  r.err);
}
TEST_CASE("train: the sample is in every format") {
    for (const char* format : {"md", "csv", "json"}) {
        Run r = run_cs336({"train", "--data", "LICENSE", "--device", "cpu", "--quick", "--steps", "1", "--sample", "9",
                           "--format", format});
        CHECK(r.exit_code == 0);
        CHECK(has(r.out, "The held-out text's first 32 bytes continued (temperature 0.8)"));
        std::string last = r.out.substr(r.out.rfind('\n', r.out.size() - 2) + 1);
        if (format == std::string("json")) {
            CHECK(nlohmann::json::parse(last)["rows"][0][0].get<std::string>().size() >= 9);
        }
        if (format == std::string("csv")) { CHECK(last.size() > 9); }
    }
}
TEST_CASE_TEMPLATE("train: learns", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    Run r = run_cs336({"train", "--data", "LICENSE", "--device", name_of(D::device), "--quick", "--steps", "100",
                       "--sample", "0", "--format", "csv"});
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    double before = 0, after = 0;
    size_t last = r.out.rfind('\n', r.out.size() - 2) + 1;
    REQUIRE(sscanf(r.out.c_str() + last, "%lf,%lf", &before, &after) == 2);
    CHECK(before > 5.0);  // about log 256 = 5.5 plus what random logits add
    CHECK(after < 3.6);
}
TEST_CASE_TEMPLATE("train: a full disk takes the checkpoint, not the tables", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    for (const char* precision : {"fp32", "bf16"}) {
        std::vector<std::string> words = {"train",    "--data",  "LICENSE",     "--device", name_of(D::device),
                                          "--quick",  "--steps", "3",           "--sample", "0",
                                          "--format", "csv",     "--precision", precision};
        auto losses = [](const Run& r) {  // before and after, on the last line
            std::string last = r.out.substr(r.out.rfind('\n', r.out.size() - 2) + 1);
            return last.substr(0, last.find(",3,"));
        };
        Run whole = run_cs336(words);
        REQUIRE_MESSAGE(whole.exit_code == 0, whole.err);
        Folder folder;
        std::string path = folder / "full";
        words.insert(words.end(), {"--save", path});
        rlimit before, small;
        REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
        small = before;
        small.rlim_cur = 8192;  // bytes: enough for what it prints
        REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
        Run r = run_cs336(words);
        setrlimit(RLIMIT_FSIZE, &before);
        CHECK(r.exit_code == 1);
        CHECK_MESSAGE(has(r.err, path + ": cannot be written: File too large"), r.err);
        CHECK(losses(r) == losses(whole));
        CHECK(losses(r).find(',') != std::string::npos);
        CHECK(!std::ifstream(path).good());
    }
}
// A checkpoint of one step, with `change` done to each tensor.
static void changed_checkpoint(const std::string& good, const std::string& path, const std::string& loss_scale,
                               const std::function<void(const std::string& name, std::vector<float>& x)>& change) {
    SafeTensors file = load_safetensors(good);
    std::map<std::string, std::vector<float>> data;
    std::vector<std::pair<std::string, FileTensor>> tensors;
    for (const auto& [name, t] : file.tensors) {
        std::vector<float>& x = data[name];
        x.assign((const float*)t.data, (const float*)t.data + t.bytes / 4);
        change(name, x);
        tensors.push_back({name, {"F32", t.shape, x.data(), t.bytes}});
    }
    auto metadata = file.metadata;
    metadata["loss_scale"] = loss_scale;
    save_safetensors(path, tensors, metadata);
}
TEST_CASE_TEMPLATE("train: what is not finite ends the run, is named, and is not saved", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    Folder folder;
    std::string good = folder / "good", bad = folder / "bad", kept;
    auto train = [&](const std::vector<std::string>& more) {
        std::vector<std::string> words = {
            "train",          "--data", "LICENSE",  "--device", name_of(D::device), "--quick", "--steps", "9",
            "--warmup_steps", "0",      "--sample", "0",        "--log_every",      "1",       "--save",  good};
        words.insert(words.end(), more.begin(), more.end());
        return run_cs336(words);
    };
    auto ends = [&](const std::vector<std::string>& more, int rows, const std::string& says) {
        CAPTURE(join(more, " "));
        Run r = train(more);
        CHECK(r.exit_code == 1);
        CHECK_MESSAGE(has(r.err, says), r.err);
        CHECK(has(r.err, "nothing was saved"));
        CHECK(std::count(r.err.begin(), r.err.end(), '\n') == 1);
        CHECK(std::count(r.out.begin(), r.out.end(), '\n') == 4 + rows);  // of the one table
        CHECK(!has(r.out, "held-out loss after"));
        CHECK(read_file(good) == kept);
        return r;
    };
    Run first = train({"--stop_at", "1"});
    REQUIRE_MESSAGE(first.exit_code == 0, first.err);
    kept = read_file(good);
    // 1e18: scores overflow, but no square in RMSNorm, whose result would then be 0, and the loss finite.
    for (const char* precision : {"fp32", "bf16", "fp16"}) {
        std::vector<std::string> words = {"--lr",   "1e18",  "--min_lr",    "1e18",
                                          "--mode", "fused", "--precision", precision};
        // The second step's forward pass meets what the first one's update made; a single step's, the evaluation.
        Run r =
            ends(words, 2, "step 2: the loss is not finite; first tensor that is not finite: lm_head.weight's grad");
        CHECK(!has(r.out, "skipped"));
        words.insert(words.end(), {"--stop_at", "1"});
        ends(words, 1, "after step 1 the held-out loss is not finite");
    }
    // An embedding that neither text has grows with each step until it is infinite, and no loss shows it.
    changed_checkpoint(good, bad, "1", [](const std::string& name, std::vector<float>& x) {
        if (name == "token_embeddings.weight") { x[0] = 3e38f; }
    });
    ends({"--load", bad, "--weight_decay", "1e4", "--lr", "0.001", "--stop_at", "2"}, 1,
         "after step 2 token_embeddings.weight is not finite");
    changed_checkpoint(good, bad, "1", [](const std::string& name, std::vector<float>& x) {
        if (name == "adamw.v.layers.1.ffn.w3.weight") { x[7] = INFINITY; }
    });
    ends({"--load", bad, "--stop_at", "2"}, 1, "after step 2 adamw.v.layers.1.ffn.w3.weight is not finite");
    changed_checkpoint(good, bad, "1", [](const std::string& name, std::vector<float>& x) {
        if (name == "layers.0.attn.k_proj.weight") { x[7] = NAN; }
    });
    ends({"--load", bad}, 1, "step 2: the loss is not finite; first tensor that is not finite: layers.0.attn.k_proj.w");
    // The residual stream is 0, so no weight of a norm can change the logits, but ln_final's is a factor of gradients.
    changed_checkpoint(good, bad, "0.0003", [](const std::string& name, std::vector<float>& x) {
        bool huge = name == "ln_final.weight", zero = name == "token_embeddings.weight",
             large = name == "lm_head.weight";
        for (float& value : x) { value = huge ? 3e38f : zero ? 0 : large ? 1e3f * value : value; }
    });
    for (const char* mode : {"eager", "fused"}) {
        ends({"--load", bad, "--mode", mode}, 1,
             "step 2: the gradient norm is not finite; first tensor that is not finite: layers.1.ffn.w2.weight's grad");
    }
    Run r = ends({"--load", bad, "--precision", "fp16"}, 3,
                 "step 4: at a loss scale of 7.5e-05 the gradient norm is not finite; first tensor that is not finite: "
                 "layers.1.ffn.w2.weight's gradient");
    CHECK(has(r.out, "overflow, step skipped"));
}
TEST_CASE_TEMPLATE("model command: reproduces the fixtures and refuses bad files", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    Folder folder;
    std::string out = folder / "out", dir = "tests/fixtures/";
    std::vector<std::string> good = {"model",
                                     "--weights",
                                     dir + "model_weights.safetensors",
                                     "--batch",
                                     dir + "model_batch.safetensors",
                                     "--num_heads",
                                     "2",
                                     "--steps",
                                     "3",
                                     "--lr",
                                     "0.01",
                                     "--device",
                                     name_of(D::device),
                                     "--out",
                                     out};
    Run r = run_cs336(good);
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    SafeTensors got = load_safetensors(out), want = load_safetensors(dir + "model_expected.safetensors");
    CHECK(got.tensors.size() == want.tensors.size());
    for (const auto& t : want.tensors) {
        FileTensor g = require_tensor(got, t.first, t.second.shape, {"F32"});
        double worst = 0;
        for (size_t i = 0; i < g.bytes / 4; i++) {
            double error = fabs(((const float*)g.data)[i] - ((const float*)t.second.data)[i]);
            if (!(error <= worst)) { worst = error; }
        }
        CHECK_MESSAGE(worst < 5e-4, t.first, " ", worst);
    }
    remove(out.c_str());

    CHECK(!has(r.out, "not finite"));
    good[10] = "1e30";
    r = run_cs336(good);
    good[10] = "0.01";
    CHECK(r.exit_code == 0);  // the file holds what came of it
    CHECK_MESSAGE(has(r.out, "; the first tensor that is not finite: param."), r.out);
    CHECK(load_safetensors(out).tensors.size() == want.tensors.size());
    remove(out.c_str());

    auto refused = [&](size_t which, const std::string& value, const char* says) {
        std::vector<std::string> bad = good;
        bad[which] = value;
        Run b = run_cs336(bad);
        CHECK(b.exit_code == 1);
        CHECK_MESSAGE(b.err.find(says) != std::string::npos, b.err);
        CHECK(std::count(b.err.begin(), b.err.end(), '\n') == 1);
        CHECK(!std::ifstream(out).good());
    };
    refused(2, dir + "model_batch.safetensors", "token_embeddings.weight");
    refused(4, dir + "model_weights.safetensors", "tokens");
    refused(6, "3", "does not make 3 heads");
    for (int token : {-1, 31}) {  // the vocabulary is 31
        int tokens[2] = {0, token}, targets[2] = {1, 2};
        std::string batch = folder / "batch";
        save_safetensors(batch, {{"tokens", {"I32", {1, 2}, tokens, 8}}, {"targets", {"I32", {1, 2}, targets, 8}}});
        refused(4, batch, "tokens: element 1 is not a token of a vocabulary of 31");
    }
    refused(2, "no/such/file", "no/such/file");
    SafeTensors weights = load_safetensors(good[2]), batch = load_safetensors(good[4]);
    std::string bad = folder / "bad";
    const std::string half = folder / "half", compiled = folder / "compiled", flat = folder / "flat",
                      zip = folder / "x.pt";
    std::vector<char> zeros(1 << 20);
    SafeTensors changed = weights;
    FileTensor& embedding = changed.tensors.at("token_embeddings.weight");
    embedding = {"F16", embedding.shape, zeros.data(), (size_t)count(embedding.shape) * 2};
    save_safetensors(half, {changed.tensors.begin(), changed.tensors.end()});
    refused(2, half, "found F16; tests/check.py takes such files");
    changed = weights;
    changed.tensors["_orig_mod.lm_head.weight"] = changed.tensors.at("lm_head.weight");
    save_safetensors(compiled, {changed.tensors.begin(), changed.tensors.end()});
    refused(2, compiled, "tests/check.py takes such files");
    int ids[3] = {1, 2, 3};
    save_safetensors(flat, {{"tokens", {"I32", {3}, ids, 12}}, {"targets", {"I32", {3}, ids, 12}}});
    refused(4, flat, "tests/check.py takes such files");
    write_file(zip, "PK\3\4 and what else a zip file has");
    refused(2, zip, "found a zip file, such as PyTorch's .pt; tests/check.py --weights reads it");
    batch.tensors["mask"] = batch.tensors["tokens"];
    save_safetensors(bad, {batch.tensors.begin(), batch.tensors.end()});
    refused(4, bad, "tensor \"mask\": not tokens or targets");
    for (const char* width : {"d_model", "d_ff"}) {  // a file in order, except for its width of 0
        auto tensors = weights.tensors;
        for (auto& [name, t] : tensors) {
            for (int64_t& n : t.shape) { n = n == (width == std::string("d_ff") ? 24 : 16) ? 0 : n; }
            t.bytes = count(t.shape) * 4;
        }
        save_safetensors(bad, {tensors.begin(), tensors.end()});
        refused(2, bad, "expected a shape of whole numbers from 1 to 2147483647");
    }
    good.back() = folder / "own";
    std::filesystem::create_symlink(std::filesystem::absolute(good[2]), good.back());  // the weights by another name
    Run own = run_cs336(good);
    CHECK(own.exit_code == 2);
    CHECK_MESSAGE(has(own.err, "--out: got '" + good.back() + "', takes another file than --weights"), own.err);
    good.back() = "no/such/folder/out";  // asked before the work
    Run nowhere = run_cs336(good);
    CHECK(nowhere.exit_code == 2);
    CHECK_MESSAGE(nowhere.err.find("--out: got 'no/such/folder/out'") != std::string::npos, nowhere.err);
}

// A run that goes on until a signal comes, in a process group of its own.
struct Going {
    Folder folder;
    std::string save = folder / "save";
    pid_t pid = -1;
    int status = 0;
    // stdout_descriptor: -1: the file "out"
    explicit Going(const std::vector<std::string>& more, int stdout_descriptor = -1, const char* data = "LICENSE") {
        std::vector<std::string> words = {program(), "train",    "--data", data,     "--device", "cpu",
                                          "--quick", "--sample", "3",      "--save", save};
        words.insert(words.end(), more.begin(), more.end());
        std::vector<char*> argv;
        for (std::string& word : words) { argv.push_back(word.data()); }
        argv.push_back(nullptr);
        int out = open((folder / "out").c_str(), O_WRONLY | O_CREAT, 0600);
        int err = open((folder / "err").c_str(), O_WRONLY | O_CREAT, 0600);
        REQUIRE(out >= 0);
        REQUIRE(err >= 0);
        pid = fork();
        REQUIRE(pid >= 0);
        if (pid == 0) {
            setpgid(0, 0);
            signal(SIGINT, SIG_DFL);  // a shell's background job ignores it
            dup2(stdout_descriptor < 0 ? out : stdout_descriptor, 1);
            dup2(err, 2);
            execv(argv[0], argv.data());
            _exit(127);
        }
        close(out), close(err);
    }
    ~Going() {
        kill(-pid, SIGKILL);
        waitpid(pid, &status, 0);  // fails where it has been waited for
    }
    std::string out() const { return read_file(folder / "out"); }
    std::string err() const { return read_file(folder / "err"); }
    int rows() const {
        int n = 0;
        std::string text = out();
        text.resize(std::min(text.find("\n\ntrain: loss"), text.size()));
        for (size_t at = 0; (at = text.find("\n| ", at)) != std::string::npos; at++) { n++; }
        return std::max(0, n - 2);  // header and rule
    }
    bool ended(double seconds) {
        for (int i = 0; i < 100 * seconds; i++) {
            if (waitpid(pid, &status, WNOHANG) == pid) { return true; }
            usleep(10000);
        }
        return false;
    }
    void wait_for_rows(int n) {
        for (int i = 0; i < 6000 && rows() < n && waitpid(pid, &status, WNOHANG) == 0; i++) { usleep(5000); }
        REQUIRE_MESSAGE(rows() >= n, err());
    }
};
static int step_of(const std::string& checkpoint) {
    return std::stoi(load_safetensors(checkpoint).metadata.at("step"));
}

TEST_CASE("train: after a signal the step is finished and saved, and the line that it prints goes on from there") {
    struct Case {
        std::vector<std::string> more;
        int number;
        enum { PROCESS, GROUP, RANK } to;  // group: as a terminal does; rank: the second one only
    };
    std::vector<Case> cases = {{{}, SIGINT, Case::GROUP}, {{"--stop_at", "299"}, SIGTERM, Case::PROCESS}};
    if (why_not("gloo", CPU, 2).empty()) {
        cases.push_back({{"--nproc", "2"}, SIGINT, Case::GROUP});
        cases.push_back({{"--nproc", "2", "--strategy", "sharded"}, SIGINT, Case::RANK});
        cases.push_back({{"--nproc", "2", "--strategy", "fsdp"}, SIGTERM, Case::PROCESS});
    }
    Folder folder;
    const std::string whole = folder / "whole";
    CHECK(run_cs336({"train", "--data", "LICENSE", "--device", "cpu", "--quick", "--sample", "0", "--steps", "300",
                     "--save", whole})
              .exit_code == 0);
    for (const Case& c : cases) {
        CAPTURE(join(c.more, " "));
        std::vector<std::string> more = c.more;
        more.insert(more.end(), {"--steps", "300"});
        Going run(more);
        run.wait_for_rows(3);  // as they are measured, into a file
        pid_t ranks[2] = {0, 0};
        std::istringstream(c.to == Case::RANK ? read_file(strprintf("/proc/%d/task/%d/children", run.pid, run.pid))
                                              : "") >>
            ranks[0] >> ranks[1];
        REQUIRE((c.to != Case::RANK || ranks[1] > 0));
        kill(c.to == Case::GROUP ? -run.pid : c.to == Case::RANK ? ranks[1] : run.pid, c.number);
        REQUIRE(run.ended(30));
        CHECK(WIFSIGNALED(run.status));
        CHECK(WTERMSIG(run.status) == c.number);
        std::string err = run.err(), out = run.out();
        int steps = run.rows();
        CHECK(step_of(run.save) == steps);
        CHECK(steps < 300);
        CHECK(has(out, "| held-out loss before |"));
        CHECK(!has(out, "continued (temperature"));
        CHECK_MESSAGE(has(err, strprintf("ended by signal %d (%s) after step %d of 300: %s holds it; to go on: ",
                                         c.number, strsignal(c.number), steps, run.save.c_str())),
                      err);
        CHECK(run.folder.files().size() == 3);
        if (!c.more.empty() && c.more[0] == "--nproc") { continue; }
        size_t line = err.find("to go on: ") + 10;
        CHECK(run_shell(err.substr(line, err.find('\n', line) - line) + " --log_every 100").exit_code == 0);
        CHECK(read_file(run.save) == read_file(whole));
    }
}
TEST_CASE("train: a signal after the last step ends all ranks by it, when all is saved") {
    if (!why_not("gloo", CPU, 2).empty()) { return; }
    Going run({"--nproc", "2", "--steps", "3", "--val_fraction", "0.99"}, -1, "measure.cu");
    run.wait_for_rows(3);  // the held-out loss takes seconds
    kill(run.pid, SIGTERM);
    REQUIRE(run.ended(60));
    CHECK(WIFSIGNALED(run.status));
    CHECK(WTERMSIG(run.status) == SIGTERM);
    CHECK(!has(run.err(), "killed by"));
    CHECK(step_of(run.save) == 3);
}
TEST_CASE("train: a signal after the last step does not hide that --save failed") {
    Going run({"--steps", "3", "--val_fraction", "0.99", "--log_every", "1"}, -1, "measure.cu");
    run.wait_for_rows(3);
    const std::string elsewhere = run.folder.path + ".moved";
    std::filesystem::rename(run.folder.path, elsewhere);
    kill(run.pid, SIGTERM);
    CHECK(run.ended(60));
    std::filesystem::rename(elsewhere, run.folder.path);
    CHECK(WIFEXITED(run.status));
    CHECK(WEXITSTATUS(run.status) == 1);
    CHECK_MESSAGE(has(run.err(), "cannot be written"), run.err());
}
TEST_CASE("train: a second signal ends it at once, a repeated first one does not") {
    int ends[2];  // a pipe that nobody reads: the run waits in a row, for ever
    REQUIRE(pipe(ends) == 0);
    REQUIRE(fcntl(ends[1], F_SETPIPE_SZ, 4096) > 0);
    {
        Going run({"--steps", "100000"}, ends[1]);
        for (int before = -1, now = 0; now == 0 || now != before;) {
            before = now;
            usleep(700000);
            REQUIRE(ioctl(ends[0], FIONREAD, &now) == 0);
        }
        kill(run.pid, SIGTERM);
        usleep(100000);
        kill(run.pid, SIGTERM);
        CHECK(!run.ended(1.2));
        kill(run.pid, SIGTERM);
        REQUIRE(run.ended(5));
        CHECK(WIFSIGNALED(run.status));
        CHECK(WTERMSIG(run.status) == SIGTERM);
        CHECK(run.folder.files().size() == 2);  // nothing saved, nothing half written
    }
    close(ends[0]), close(ends[1]);
}
TEST_CASE("train: a reader of the rows that goes away ends the run, which saves first") {
    Folder folder;
    const std::string save = folder / "piped";
    Run r = run_shell("timeout 100 " + program() + " train --data LICENSE --device cpu --quick --steps 100000 --save " +
                      save + " | head -6");
    CHECK(has(r.out, strprintf("ended early after step %d of 100000: ", step_of(save))));
    CHECK(has(r.out, "cannot write to stdout: Broken pipe"));
    CHECK(step_of(save) >= 1);
    CHECK(step_of(save) < 100000);
}
TEST_CASE_TEMPLATE("train: --save_every leaves the last multiple behind, and changes nothing", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    for (const char* precision : {"fp32", "bf16", "fp16", "pure_bf16"}) {
        CAPTURE(std::string(precision));
        Folder folder;
        auto train = [&](const std::string& save, const std::vector<std::string>& more) {
            std::vector<std::string> words = {"train",       "--data",   "LICENSE", "--device", name_of(D::device),
                                              "--quick",     "--sample", "0",       "--steps",  "7",
                                              "--precision", precision};
            words.insert(words.end(), {"--save", folder / save});
            words.insert(words.end(), more.begin(), more.end());
            return run_cs336(words);
        };
        CHECK(train("whole", {}).exit_code == 0);
        CHECK(train("often", {"--save_every", "2"}).exit_code == 0);
        CHECK(read_file(folder / "whole") == read_file(folder / "often"));
        Run nan = train("nan", {"--save_every", "1", "--lr", "1e18", "--min_lr", "1e18", "--warmup_steps", "1"});
        CHECK(nan.exit_code == 1);
        CHECK(has(nan.err, "--save holds an earlier step, if any"));
    }
    Run none = run_cs336({"train", "--data", "LICENSE", "--save_every", "2"});
    CHECK(none.exit_code == 2);
    CHECK(has(none.err, "--save_every: got 2, takes --save, too"));
}
TEST_CASE("train: after a kill, --save holds the last multiple of --save_every, also of several ranks") {
    std::vector<std::vector<std::string>> ways = {{}};
    if (why_not("gloo", CPU, 2).empty()) {
        for (const char* strategy : {"ddp", "sharded", "fsdp"}) {
            ways.push_back({"--nproc", "2", "--strategy", strategy});
        }
    }
    for (std::vector<std::string> more : ways) {
        CAPTURE(join(more, " "));
        more.insert(more.end(), {"--steps", "100000", "--save_every", "3"});
        Going run(more);
        run.wait_for_rows(8);
        kill(run.pid, SIGKILL);
        REQUIRE(run.ended(5));
        CHECK(step_of(run.save) >= 6);
        CHECK(step_of(run.save) % 3 == 0);
        Run r = run_cs336({"train", "--data", "LICENSE", "--device", "cpu", "--load", run.save, "--sample", "0",
                           "--steps", std::to_string(step_of(run.save) + 1)});
        CHECK_MESSAGE(r.exit_code == 0, r.err);
    }
}
