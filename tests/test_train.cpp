// Tests of train.cu: resuming, checkpoints, learning, and your own weights.
#include "test.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <fstream>

// A run that goes on until a signal comes, in a process group of its own.
struct Going {
    Folder folder;
    std::string save = folder / "save";
    pid_t pid = -1;
    int status = 0;
    // stdout_descriptor: -1: the file "out"
    explicit Going(const std::vector<std::string>& more, int stdout_descriptor = -1, const char* data = "LICENSE") {
        std::vector<std::string> words = {program(),  "train", "--data", data, "--quick",
                                          "--sample", "3",     "--save", save};
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
static int number_in(const std::string& checkpoint, const char* name) {
    return std::stoi(load_safetensors(checkpoint).metadata.at(name));
}

TEST_CASE_TEMPLATE("train: a run that a signal ends saves, and goes on bit for bit as if uninterrupted", D, OnCPU,
                   OnCUDA) {
    if (!begin<D>()) { return; }
    for (const char* precision : {"fp32", "bf16", "fp16", "pure_bf16"}) {
        CAPTURE(std::string(precision));
        Folder folder;
        const std::string whole = folder / "whole";
        const std::vector<std::string> words = {"--device", name_of(D::device), "--steps",
                                                "300",      "--precision",      precision};
        std::vector<std::string> all = {"train", "--data", "LICENSE", "--quick", "--sample", "0", "--save", whole};
        all.insert(all.end(), words.begin(), words.end());
        Run r = run_cs336(all);
        REQUIRE_MESSAGE(r.exit_code == 0, r.err);
        Going run(words);
        run.wait_for_rows(1);
        kill(-run.pid, SIGINT);  // as a terminal does
        REQUIRE(run.ended(60));
        CHECK(WIFSIGNALED(run.status));
        CHECK(WTERMSIG(run.status) == SIGINT);
        const int steps = number_in(run.save, "step");
        CHECK(steps < 300);
        CHECK_MESSAGE(has(run.err(), strprintf("ended by signal 2 (Interrupt) after step %d of 300: to go on", steps)),
                      run.err());
        CHECK(read_file(whole) != read_file(run.save));
        r = run_cs336({"train", "--data", "LICENSE", "--device", name_of(D::device), "--sample", "0", "--load",
                       run.save, "--save", run.save});
        REQUIRE_MESSAGE(r.exit_code == 0, r.err);
        CHECK(read_file(whole) == read_file(run.save));
        r = run_cs336({"train", "--data", "LICENSE", "--device", name_of(D::device), "--sample", "0", "--load", whole});
        CHECK(r.exit_code == 0);
        CHECK(has(r.err, "has all 300 steps behind it"));
    }
}
TEST_CASE("train: steps that fp16 skipped survive a checkpoint") {
    Folder folder;
    const std::string start = folder / "start", large = folder / "large", resumed = folder / "resumed";
    Run r = run_cs336({"train", "--data", "LICENSE", "--device", "cpu", "--quick", "--sample", "0", "--precision",
                       "fp16", "--save", start});
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    SafeTensors file = load_safetensors(start);
    file.metadata["loss_scale"] = "1e12";  // so large that gradients overflow until it has halved a few times
    save_safetensors(large, {file.tensors.begin(), file.tensors.end()}, file.metadata);
    r = run_cs336({"train", "--data", "LICENSE", "--device", "cpu", "--sample", "0", "--load", large, "--steps", "40",
                   "--save", resumed});
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    CHECK(has(r.out, "overflow, step skipped"));
    CHECK(number_in(resumed, "step") == 40);
    CHECK(number_in(resumed, "updates") < 40);
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
    const std::pair<const char*, const char*> wrong[] = {
        {"batch_size", "0"},  {"batch_size", "-1"}, {"batch_size", "1.5"},     {"batch_size", ""},

        {"steps", "1048577"}, {"steps", "nan"},     {"context_length", "1e7"}, {"num_heads", "0"}, {"d_model", "63"},
        {"lr", "0"},          {"lr", "inf"},        {"steps", "2 "},           {"mode", "warp"},   {"precision", "fp8"},
        {"step", "-1"},       {"loss_scale", "0"},  {"good_steps", "x"}};
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
TEST_CASE("train: a full disk is said, and leaves the old file") {
    Folder folder;
    const std::string path = folder / "full";
    write_file(path, "old");
    rlimit before, small;
    REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
    small = before;
    small.rlim_cur = 8192;  // bytes: enough for what it prints
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
    Run r = run_cs336({"train", "--data", "LICENSE", "--device", "cpu", "--quick", "--steps", "3", "--save", path});
    setrlimit(RLIMIT_FSIZE, &before);
    CHECK(r.exit_code == 1);
    CHECK_MESSAGE(has(r.err, path + ": cannot be written: File too large"), r.err);
    CHECK(read_file(path) == "old");
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
    const std::string good = folder / "good", bad = folder / "bad";
    auto train = [&](const std::vector<std::string>& more) {
        std::vector<std::string> words = {"train",   "--data",   "LICENSE", "--device", name_of(D::device),
                                          "--quick", "--sample", "0",       "--save",   good};
        words.insert(words.end(), more.begin(), more.end());
        return run_cs336(words);
    };
    Run first = train({"--steps", "1"});
    REQUIRE_MESSAGE(first.exit_code == 0, first.err);
    const std::string kept = read_file(good);
    auto ends = [&](const std::vector<std::string>& more, const std::string& says) {
        CAPTURE(join(more, " "));
        Run r = train(more);
        CHECK(r.exit_code == 1);
        CHECK_MESSAGE(has(r.err, says), r.err);
        CHECK(has(r.err, "nothing was saved"));
        CHECK(!has(r.out, "held-out loss after"));
        CHECK(read_file(good) == kept);
    };
    // 1e18: scores overflow, but no square in RMSNorm, whose result would then be 0, and the loss finite.
    for (const char* precision : {"fp32", "bf16", "fp16"}) {
        ends({"--lr", "1e18", "--mode", "fused", "--precision", precision, "--steps", "9"}, "the loss is not finite");
    }
    changed_checkpoint(good, bad, "1", [](const std::string& name, std::vector<float>& x) {
        if (name == "adamw.v.layers.1.ffn.w3.weight") { x[7] = INFINITY; }
    });
    ends({"--load", bad, "--steps", "2"}, "after step 2 adamw.v.layers.1.ffn.w3.weight is not finite");
    // The residual stream is 0, so no weight of a norm can change the logits, but ln_final's is a factor of gradients.
    changed_checkpoint(good, bad, "0.0003", [](const std::string& name, std::vector<float>& x) {
        bool huge = name == "ln_final.weight", zero = name == "token_embeddings.weight",
             large = name == "lm_head.weight";
        for (float& value : x) { value = huge ? 3e38f : zero ? 0 : large ? 1e3f * value : value; }
    });
    ends({"--load", bad, "--steps", "9"}, "step 2: the gradients' norm is not finite");
    ends({"--load", bad, "--steps", "9", "--precision", "fp16"}, "the gradients' norm is not finite");
}
TEST_CASE("train: a reader of the rows that goes away ends the run, which saves first") {
    Folder folder;
    const std::string save = folder / "piped";
    Run r = run_shell("timeout 100 " + program() + " train --data LICENSE --device cpu --quick --steps 2000 --save " +
                      save + " | head -3");
    CHECK(has(r.out, "cannot write to stdout: Broken pipe"));
    CHECK(number_in(save, "step") >= 1);
    CHECK(number_in(save, "step") < 2000);
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
        CHECK(b.exit_code == (value == "no/such/file" ? 2 : 1));
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
    refused(2, half, "found F16");
    changed = weights;
    changed.tensors["_orig_mod.lm_head.weight"] = changed.tensors.at("lm_head.weight");
    save_safetensors(compiled, {changed.tensors.begin(), changed.tensors.end()});
    refused(2, compiled, "_orig_mod.lm_head.weight");
    int ids[3] = {1, 2, 3};
    save_safetensors(flat, {{"tokens", {"I32", {3}, ids, 12}}, {"targets", {"I32", {3}, ids, 12}}});
    refused(4, flat, "tokens");
    write_file(zip, "PK\3\4 and what else a zip file has");
    refused(2, zip, "found a zip file, such as PyTorch's .pt; tests/check.py model --weights reads it");
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
    CHECK_MESSAGE(has(nowhere.err, "--out: no/such/folder/out: cannot be written"), nowhere.err);
}
