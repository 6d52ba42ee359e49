// Tests of ddp.cu: the four ways of data parallel training and the sharded optimizer against plain training, how
// gradients are cut into buckets, when they go, and the commands.
#include "test.h"

#include <nlohmann/json.hpp>

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <sstream>

// Four weights of one layer each, y = w3 * (w2 * (w1 * x)) + w0 * x, all [3]: w0 is not used where `skip` is set.
struct FourWeights {
    Tensor weights, gradients;
    std::vector<Parameter> parameters;
    std::vector<Tensor> slots;
};
static FourWeights four_weights(float value) {
    FourWeights f;
    f.weights = from_floats(std::vector<float>(12, value), {12});
    f.gradients = empty({12}, F32, GRADIENTS);
    copy(f.gradients, from_floats(std::vector<float>(12, NAN), {12}));
    for (int i = 0; i < 4; i++) {
        Tensor w = require_gradient(view(f.weights, 3 * i, {3}));
        w.gradient->is_parameter = true;
        w.gradient->value = view(f.gradients, 3 * i, {3});
        f.parameters.push_back({strprintf("w%d", 3 - i), {3}, 3 * i, w});
        f.slots.push_back(w);
    }
    return f;
}
static Tensor objective(FourWeights& f, const Tensor& x, bool skip) {
    for (Tensor& t : f.slots) { t.gradient->filled = false; }
    Tensor y = mul(f.slots[0], mul(f.slots[1], mul(f.slots[2], x)));
    if (!skip) { y = add(y, mul(f.slots[3], x)); }
    return mean_all(y);
}
static void check_data_parallel(const Communicator& c) {
    for (Strategy strategy : {NAIVE, FLAT, OVERLAPPED, BUCKETED}) {
        for (int steps = 0; steps < 2; steps++) {
            FourWeights f = four_weights(2.0f + c.rank);  // the broadcast makes it 2 everywhere
            auto d = data_parallel(c, strategy, 24e-6, f.weights, f.gradients, f.parameters, f.slots);
            Tensor x = from_floats({1, 1 + (float)c.rank, 3}, {3});
            begin_step(*d);
            backward(objective(f, x, c.rank == 1));  // rank 1's loss does not depend on w0
            INFO("rank " << c.rank << " of " << c.world << ", " << name_of(strategy));
            size_t early = strategy == OVERLAPPED ? 3 : strategy == BUCKETED ? 1 : 0;
            if (c.rank == 1) { CHECK(d->works.size() == early); }
            finish_gradient_synchronization(*d);
            CHECK(d->works.size() == (strategy == FLAT ? 1 : strategy == BUCKETED ? 2 : 4));
            double sum = 0, without = 0;  // of x1 over the ranks; of all but rank 1
            for (int r = 0; r < c.world; r++) { sum += 1 + r, without += r == 1 ? 0 : 1 + r; }
            std::vector<float> g = to_floats(f.gradients);
            int used = c.world - (c.world > 1);
            for (int i = 0; i < 9; i++) {
                double x_i = i % 3 == 0 ? 1 : i % 3 == 1 ? sum / c.world : 3;
                CHECK(g[i] == doctest::Approx(4 * x_i / 3));
            }
            for (int i = 0; i < 3; i++) {
                double x_i = i == 0 ? used : i == 1 ? without : 3.0 * used;
                CHECK(g[9 + i] == doctest::Approx(x_i / 3 / c.world));
            }
        }
    }
}
TEST_CASE("ddp: gradients are averages that go early and what a rank does not use counts as zero") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (int n : {1, 2, 3}) {
        in_ranks("ddp: gradients are averages that go early and what a rank does not use counts as zero", n, CPU,
                 check_data_parallel);
    }
}
TEST_CASE("ddp: gradients are averages over NCCL") {
    if (lacks("nccl", CUDA, 2)) { return; }
    in_ranks("ddp: gradients are averages over NCCL", 2, CUDA, check_data_parallel);
}

// y = w slow(w x): between the two uses of w backward takes long enough for an all-reduce that started too early.
static void check_tied(const Communicator& c) {
    Tensor weights = from_floats({3, 5}, {2}), gradients = empty({2}, F32, GRADIENTS);
    Tensor w = require_gradient(weights);
    w.gradient->is_parameter = true;
    w.gradient->value = gradients;
    auto d = data_parallel(c, OVERLAPPED, 0, weights, gradients, {{"w", {2}, 0, w}}, {w});
    Tensor x = from_floats({1, 2 + 2 * (float)c.rank}, {2}), inner = mul(w, x), slow = detached(inner);
    record(slow, {inner}, [g = inner.gradient](const Tensor& dy) {
        usleep(50000);
        add_gradient(g, dy);
    });
    begin_step(*d);
    backward(mean_all(mul(w, slow)));  // dw = 2 w x / 2
    finish_gradient_synchronization(*d);
    std::vector<float> g = to_floats(gradients);
    CHECK(g[0] == doctest::Approx(3 * 1));
    CHECK(g[1] == doctest::Approx(5 * (2 + c.world - 1)));
    CHECK(d->works.size() == 1);
}
TEST_CASE("ddp: a tied weight goes once and only after its last use") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (int n : {2, 3}) { in_ranks("ddp: a tied weight goes once and only after its last use", n, CPU, check_tied); }
}

// A Transformer: each way's steps on the ranks' parts of a batch against one process's on all of it.
static void check_trainers(const Communicator& c) {
    const ModelConfig config = {"lm", 64, 96, 2, 4, 100};
    const int ROWS = 4, T = 16;
    auto plain = [&] { return random_model(config, c.rank); };  // rank 0's weights reach all
    std::vector<std::pair<const char*, std::function<Trainer()>>> ways = {
        {"sharded, broadcast", [&] { return sharded_trainer(c, plain(), BROADCAST); }},
        {"sharded, ZeRO-1", [&] { return sharded_trainer(c, plain(), ZERO1); }},
        {"FSDP", [&] { return fsdp_trainer(c, config, 0); }},
        {"FSDP, early AdamW", [&] { return fsdp_trainer(c, config, 0, true); }}};
    for (Strategy s : {NAIVE, FLAT, OVERLAPPED, BUCKETED}) {
        ways.push_back({name_of(s), [&, s] { return data_parallel_trainer(c, plain(), s, 0.05); }});
    }
    for (const auto& [name, make] : ways) {
        CAPTURE(std::string(name));
        Trainer ours = make(), whole;
        whole.model = random_model(config, 0);
        // Else a gradient that is rounding alone moves its weight by lr, either way.
        std::vector<AdamW*> optimizers = {&whole.adamw, &ours.adamw};
        for (ParameterGroup& g : ours.sharded.groups) { optimizers.push_back(&g.adamw); }
        if (ours.f) { optimizers.push_back(&ours.f->shard.adamw); }
        for (AdamW* adamw : optimizers) { adamw->eps = 1e-5f; }
        std::vector<StepPart> parts;
        for (int step = 0; step < 3; step++) {
            const Batch all = random_batch(ROWS * c.world, T, 100, step);
            auto part = [&](const Tensor& t) { return view(t, c.rank * ROWS * T, {ROWS, T}); };
            train_step(whole, {all});
            train_step(ours, {{part(all.tokens), part(all.targets)}}, [&](StepPart part) { parts.push_back(part); });
            double loss = 0;
            for (const std::vector<double>& of_rank : gather<double>(c, {ours.loss})) { loss += of_rank[0] / c.world; }
            CHECK(loss == doctest::Approx(whole.loss).epsilon(1e-5));
        }
        CHECK(parts.size() == 3 * 5);
        CHECK(parts[3] == OPTIMIZER_STEP);
        double worst = 0;
        auto see = [&](const Parameter& p, const Tensor& got) {
            const std::vector<float> a = to_floats(got), b = to_floats(view(whole.model.weights, p.offset, p.shape));
            for (size_t i = 0; i < a.size(); i++) { worst = std::max<double>(worst, std::fabs(a[i] - b[i])); }
        };
        if (ours.f) { visit_whole(*ours.f, ours.f->shard.weights, false, see); }
        for (const Parameter& p : ours.f ? std::vector<Parameter>() : ours.model.parameters) { see(p, p.weight); }
        CHECK(worst < 3e-6);  // three steps of AdamW move a weight by 3e-3
    }
}
TEST_CASE("ddp: every trainer's steps are one process's") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (int n : {1, 2, 3}) { in_ranks("ddp: every trainer's steps are one process's", n, CPU, check_trainers); }
}
TEST_CASE("ddp: every trainer's steps are one process's; on GPUs") {
    if (lacks("nccl", CUDA, 2)) { return; }
    in_ranks("ddp: every trainer's steps are one process's; on GPUs", 2, CUDA, check_trainers);
}

static void check_buckets(const Communicator& c) {
    Model model = make_model({"tiny", 12, 10, 2, 3, 19});
    init_weights(model, 1);
    make_gradients(model);
    for (double mb : {1e-6, 5e-4, 1e-3, 1.0}) {
        auto d = data_parallel(c, BUCKETED, mb, model.weights, model.gradients, model.parameters, model.slots);
        size_t p = 0;
        for (const Bucket& b :
             d->buckets) {  // whole tensors, in order, none left out, and the cap holds except for one alone
            double bytes = 0;
            int n = 0;
            CHECK(b.begin == model.parameters[p].offset);
            for (; p < model.parameters.size() && model.parameters[p].offset < b.end; p++, n++) {
                bytes += 4.0 * count(model.parameters[p].shape);
            }
            CHECK(n == b.parameters);
            CHECK((bytes <= mb * 1e6 || n == 1));
        }
        CHECK(p == model.parameters.size());
        if (mb == 1.0) { CHECK(d->buckets.size() == 1); }
        if (mb == 1e-6) { CHECK(d->buckets.size() == model.parameters.size()); }
    }
}
TEST_CASE("ddp: buckets") {
    if (lacks("gloo", CPU, 1)) { return; }
    in_ranks("ddp: buckets", 1, CPU, check_buckets);
}

static Run check_command(const std::vector<std::string>& words, const char* expected) {
    Run r = run_cs336(words);
    std::string line;
    for (const std::string& w : words) { line += w + " "; }
    INFO(line << "\n" << r.out << r.err);
    CHECK(r.exit_code == 0);
    CHECK(has(r.out, expected));
    CHECK(!has(r.out, "DIFFER"));
    return r;
}
TEST_CASE("ddp: weights equal those of single-process training, 1 to 4 ranks, all ways") {
    if (lacks("gloo", CPU, 4)) { return; }
    for (const char* n : {"1", "2", "3", "4"}) {
        for (const char* command : {"naive_ddp", "ddp_overlap_individual_parameters", "ddp_overlap_bucketed"}) {
            check_command({command, "--device", "cpu", "--nproc", n}, "identical");
            if (n == std::string("4")) { break; }  // more ranks than cores take their time
        }
        check_command({"optimizer_state_sharding", "--device", "cpu", "--nproc", n}, "identical");
    }
}
TEST_CASE("ddp: the toy models are the edition's") {
    if (lacks("gloo", CPU, 2)) { return; }
    for (const char* command : {"naive_ddp", "ddp_overlap_individual_parameters", "optimizer_state_sharding"}) {
        for (const char* edition : {"2025", "2026"}) {
            const bool old = edition == std::string("2025");
            INFO(command << " " << edition);
            Run r = check_command({command, "--device", "cpu", "--nproc", "2", "--edition", edition}, "identical");
            CHECK(has(r.out, old ? "toy models with 5 outputs" : "toy models with 10 outputs"));
            // AdamW's two moments of 50 x 5 or 50 x 10, 50 x 10 and 10 x 10 weights
            if (has(r.out, "| states ")) {
                CHECK(has(r.out, old ? "850 + 850 |      1700" : "1100 + 1100 |      2200"));
            }
        }
    }
}
TEST_CASE("ddp: overlapped, 20 times") {  // a race does not show every time
    if (lacks("gloo", CPU, 2)) { return; }
    for (int i = 0; i < 20; i++) {
        const char* command = i % 2 ? "ddp_overlap_bucketed" : "ddp_overlap_individual_parameters";
        check_command({command, "--device", "cpu", "--nproc", i % 4 < 2 ? "2" : "3", "--seed", std::to_string(i)},
                      "identical");
    }
}
TEST_CASE("ddp: overlapped over NCCL, 20 times") {
    if (lacks("nccl", CUDA, 2)) { return; }
    for (int i = 0; i < 20; i++) {
        const char* command = i % 2 ? "ddp_overlap_bucketed" : "ddp_overlap_individual_parameters";
        check_command({command, "--device", "cuda", "--nproc", "2", "--backend", "nccl", "--seed", std::to_string(i)},
                      "identical");
    }
}
TEST_CASE("ddp: the same commands on GPUs") {
    if (cuda_devices() == 0) { return skip_this_case("no GPU"); }
    int gpus = cuda_devices();
    for (const char* command :
         {"naive_ddp", "ddp_overlap_individual_parameters", "ddp_overlap_bucketed", "optimizer_state_sharding"}) {
        if (gpus >= 2) {
            check_command({command, "--device", "cuda", "--nproc", "2", "--backend", "nccl"}, "identical");
        }
        if (gpus >= 4) {
            check_command({command, "--device", "cuda", "--nproc", "4", "--backend", "nccl"}, "identical");
        }
    }
}
TEST_CASE("ddp: benchmarking commands") {
    if (lacks("gloo", CPU, 2)) { return; }
    Run r =
        run_cs336({"ddp_bucketed_benchmarking", "--device", "cpu", "--bucket_size_mb", "0.5,100", "--format", "csv"});
    INFO(r.out << r.err);
    CHECK(r.exit_code == 0);
    CHECK(has(r.out, "sizes of --quick"));
    CHECK(has(r.out, "\n# (b) "));
    std::map<std::string, std::vector<std::string>> rows;  // of the second table: 39 is 9 tensors per layer and 3
    std::istringstream lines(r.out.substr(r.out.find("Strategy,Comm Time (ms)")));
    for (std::string line; std::getline(lines, line) && !line.empty();) {
        std::istringstream cells(line);
        std::string way, cell;
        std::getline(cells, way, ',');
        while (std::getline(cells, cell, ',')) { rows[way].push_back(cell); }
    }
    REQUIRE(rows.size() == 7);
    for (auto [way, calls] : {std::pair("naive", "39"), {"flat", "1"}, {"overlapped", "39"}, {"100 MB", "1"}}) {
        INFO(way);
        REQUIRE(rows[way].size() == 9);
        CHECK(rows[way][2] == calls);
        CHECK(std::abs(std::stod(rows[way][8]) - std::stod(rows["naive"][8])) < 2e-4);  // all from the same weights
    }
    CHECK(std::abs(std::stod(rows["no sync"][8]) - std::stod(rows["naive"][8])) > 1e-3);
    Run memory = run_cs336({"optimizer_state_sharding_accounting", "--quick", "--device", "cpu"});
    CHECK(memory.exit_code == 0);
    CHECK(has(memory.out, "sharded, ZeRO-1"));
    CHECK(has(memory.out, "the expected 1/2"));
    Run alone = run_cs336({"naive_ddp_benchmarking", "--device", "cpu", "--nproc", "1"});
    CHECK(alone.exit_code == 0);
    CHECK(has(alone.out, "One rank has no other to share with"));
    CHECK(run_cs336({"naive_ddp_benchmarking", "--size", "tiny"}).exit_code == 2);
    CHECK(run_cs336({"ddp_bucketed_benchmarking", "--bucket_size_mb", "0"}).exit_code == 2);
}
TEST_CASE("ddp: steps that do not fit are rows that say so, and the run has failed") {
    if (lacks("gloo", CPU, 2)) { return; }
    for (const char* command : {"naive_ddp_benchmarking", "optimizer_state_sharding_accounting"}) {
        Run r = run_cs336({command, "--device", "cpu", "--d_model", "65536", "--d_ff", "262144", "--num_layers", "96",
                           "--num_heads", "512"});
        INFO(r.out << r.err);
        CHECK(r.exit_code == 1);
        CHECK(has(r.out, "| OOM ("));
        CHECK(has(r.err, "no step ran: each rank needs "));
    }
}
TEST_CASE("ddp: all-reduces of groups of ranks come back as numbers") {
    if (lacks("gloo", CPU, 6)) { return; }
    Run r = run_cs336({"distributed_communication_single_node", "--device", "cpu", "--steps", "2"});
    INFO(r.out << r.err);
    CHECK(r.exit_code == 0);
    for (const char* row :
         {"|     2 |                1 |", "|     4 |                1 |", "|     6 |               10 |"}) {
        CHECK_MESSAGE(has(r.out, std::string("| gloo    | cpu    ") + row), row);
    }
    CHECK(has(r.out, "**(size)** Gloo with 2 ranks takes "));
    CHECK(has(r.out, "**(ranks)** From 4 to 6 ranks Gloo takes "));
    Run group = run_cs336({"distributed_communication_single_node", "--device", "cpu", "--nproc", "3"});
    CHECK(group.exit_code == 0);
    CHECK(has(group.out, "| gloo    | cpu    |     3 |                1 |"));
    if (cuda_devices() > 0) { return; }
    Run none = run_cs336({"distributed_communication_single_node", "--device", "cuda"});
    CHECK(none.exit_code == 1);
    CHECK(has(none.out, "Not measured: nccl from 2 ranks on (no GPU here)."));
}
TEST_CASE("ddp: --trace puts all ranks into one file") {
    if (lacks("gloo", CPU, 2)) { return; }
    Folder folder;
    std::string path = folder / "trace.json";
    Run r =
        run_cs336({"ddp_overlap_individual_parameters_benchmarking", "--quick", "--device", "cpu", "--trace", path});
    INFO(r.err);
    CHECK(r.exit_code == 0);
    nlohmann::json trace = nlohmann::json::parse(read_file(path), nullptr, false);
    REQUIRE(!trace.is_discarded());
    std::map<std::pair<int, std::string>, int> seen;  // process and name of a range
    for (const auto& event : trace["traceEvents"]) {
        if (event["ph"] == "X") { seen[{event["pid"].get<int>(), event["name"].get<std::string>()}]++; }
    }
    for (int rank : {0, 1}) {
        for (const char* name : {"naive", "flat", "overlapped", "forward", "backward", "optimizer"}) {
            INFO("rank " << rank << ", " << name);
            CHECK(seen[{rank, name}] > 0);
        }
        CHECK(seen[{rank, "all-reduce"}] >= 39 + 1 + 39);
    }
    CHECK(folder.files() == std::vector<std::string>{"trace.json"});  // no rank's own
}

// The same options may make different models, where a machine has no GPU and scales down.
static void check_other_model(const Communicator& c) {
    if (c.rank == 0) {  // what data_parallel would tell the others
        gather_text(c, "w [2]\n");
        return;
    }
    Tensor weights = from_floats({1, 2, 3}, {3}), w = require_gradient(weights);
    CHECK_THROWS_WITH(data_parallel(c, NAIVE, 0, weights, empty({3}, F32, GRADIENTS), {{"w", {3}, 0, w}}, {w}),
                      "the models differ: where rank 0 has w [2], rank 1 has w [3]");
}
TEST_CASE("ddp: a rank with another model") {
    if (lacks("gloo", CPU, 2)) { return; }
    in_ranks("ddp: a rank with another model", 2, CPU, check_other_model);
}
TEST_CASE("ddp: ranks with different models stop before the first collective") {
    if (lacks("gloo", CPU, 2)) { return; }
    double before = now_ms();
    const char* ranks =
        "for r in 0 1; do RANK=$r WORLD_SIZE=2 CS336_RENDEZVOUS=%s timeout 20 %s naive_ddp_benchmarking --quick "
        "--device cpu --timeout 3 --d_model $((32 + 32 * r)) --num_heads 4 & done; wait";
    Folder folder;
    std::string all = run_shell(strprintf(ranks, folder.path.c_str(), program().c_str())).out;
    INFO(all);
    CHECK(
        has(all, "rank 1: the models differ: where rank 0 has lm_head.weight [10000, 32], rank 1 has lm_head.weight"));
    CHECK(now_ms() - before < 5000);
    MESSAGE("different models: over after " << (int)(now_ms() - before) << " ms");
}
