// Tests of ddp.cu: the four ways of data parallel training and the sharded optimizer against plain
// training, how gradients are cut into buckets, when they go, the commands, and their answers.
#include "ddp.cu"

#include "test.h"

#include <map>
#include <nlohmann/json.hpp>

// These parameters, in backward order, in one buffer, and their gradients in another.
static Model flat_model(const vector<pair<const char*, Shape>>& parameters) {
    Model m;
    int64_t n = 0;
    for (const auto& [name, shape] : parameters) {
        m.parameters.push_back({name, shape, n, Tensor()});
        n += count(shape);
    }
    m.weights = zeros({n}, F32, PARAMETERS);
    m.gradients = zeros({n}, F32, GRADIENTS);
    for (Parameter& p : m.parameters) {
        p.weight = require_gradient(view(m.weights, p.offset, p.shape));
        p.weight.gradient->is_parameter = true;
        p.weight.gradient->value = view(m.gradients, p.offset, p.shape);
        m.slots.push_back(p.weight);
    }
    return m;
}

// Four weights of one layer each, y = w3 * (w2 * (w1 * x)) + w0 * x, all [3]: w0 is not used where
// `skip` is set.
static Tensor objective(const Model& m, const Tensor& x, bool skip) {
    zero_gradients(m);
    Tensor y = mul(m.slots[0], mul(m.slots[1], mul(m.slots[2], x)));
    if (!skip) { y = add(y, mul(m.slots[3], x)); }
    return mean_all(y);
}
static void check_data_parallel(const Communicator& c) {
    for (Strategy strategy : {NAIVE, FLAT, OVERLAPPED, BUCKETED}) {
        for (int steps = 0; steps < 2; steps++) {
            Model m = flat_model({{"w3", {3}}, {"w2", {3}}, {"w1", {3}}, {"w0", {3}}});
            copy(m.gradients, from_floats(vector<float>(12, NAN), {12}));
            // the broadcast makes it 2
            copy(m.weights, from_floats(vector<float>(12, 2.0f + c.rank), {12}));
            auto d = data_parallel(c, strategy, 24e-6, m);
            Tensor x = from_floats({1, 1 + (float)c.rank, 3}, {3});
            reset_buckets(*d);
            backward(objective(m, x, c.rank == 1));  // rank 1's loss does not depend on w0
            INFO("rank " << c.rank << " of " << c.world << ", " << name_of(strategy));
            size_t early = strategy == OVERLAPPED ? 3 : strategy == BUCKETED ? 1 : 0;
            if (c.rank == 1) { CHECK(d->works.size() == early); }
            finish_gradient_synchronization(*d);
            CHECK(d->works.size() == (strategy == FLAT ? 1 : strategy == BUCKETED ? 2 : 4));
            double sum = 0, without = 0;  // of x1 over the ranks; of all but rank 1
            for (int r = 0; r < c.world; r++) {
                sum += 1 + r;
                without += r == 1 ? 0 : 1 + r;
            }
            const int used = c.world - (c.world > 1);
            const double all[] = {1, sum / c.world, 3},
                         some[] = {(double)used, without, 3.0 * used};
            vector<float> g = to_floats(m.gradients);
            for (int i = 0; i < 12; i++) {
                CHECK(g[i] ==
                      doctest::Approx(i < 9 ? 4 * all[i % 3] / 3 : some[i % 3] / 3 / c.world));
            }
        }
    }
}
TEST_CASE("ddp: gradients are averages that go early and what a rank does not use counts as zero") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (int n : {1, 2, 3}) {
        in_ranks(
            "ddp: gradients are averages that go early and what a rank does not use counts as zero",
            n, CPU, check_data_parallel);
    }
}
TEST_CASE("ddp: gradients are averages over NCCL") {
    if (lacks("nccl", CUDA, 2)) { return; }
    in_ranks("ddp: gradients are averages over NCCL", 2, CUDA, check_data_parallel);
}

// y = w slow(w x): between the two uses of w backward takes long enough for an all-reduce that
// started too early.
static void check_tied(const Communicator& c) {
    Model m = flat_model({{"w", {2}}});
    copy(m.weights, from_floats({3, 5}, {2}));
    const Tensor w = m.slots[0];
    auto d = data_parallel(c, OVERLAPPED, 0, m);
    Tensor x = from_floats({1, 2 + 2 * (float)c.rank}, {2}), inner = mul(w, x),
           slow = detached(inner);
    record(slow, {inner}, [g = inner.gradient](const Tensor& dy) {
        usleep(50000);
        add_gradient(g, dy);
    });
    reset_buckets(*d);
    backward(mean_all(mul(w, slow)));  // dw = 2 w x / 2
    finish_gradient_synchronization(*d);
    vector<float> g = to_floats(m.gradients);
    CHECK(g[0] == doctest::Approx(3 * 1));
    CHECK(g[1] == doctest::Approx(5 * (2 + c.world - 1)));
    CHECK(d->works.size() == 1);
}
TEST_CASE("ddp: a tied weight goes once and only after its last use") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (int n : {2, 3}) {
        in_ranks("ddp: a tied weight goes once and only after its last use", n, CPU, check_tied);
    }
}

static void check_buckets(const Communicator& c) {
    Model model = make_model({"tiny", 12, 10, 2, 3, 19});
    init_weights(model, 1);
    make_gradients(model);
    for (double mb : {1e-6, 5e-4, 1e-3, 1.0}) {
        auto d = data_parallel(c, BUCKETED, mb, model);
        // whole tensors, in order, none left out, and the cap holds except for one alone
        size_t p = 0;
        for (const Bucket& b : d->buckets) {
            double bytes = 0;
            int n = 0;
            CHECK(b.begin == model.parameters[p].offset);
            for (; p < model.parameters.size() && model.parameters[p].offset < b.end; p++) {
                bytes += 4.0 * count(model.parameters[p].shape);
                n++;
            }
            CHECK(b.end == model.parameters[p - 1].offset + count(model.parameters[p - 1].shape));
            CHECK((bytes <= mb * 1e6 || n == 1));
        }
        CHECK(p == model.parameters.size());
        if (mb == 1.0) { CHECK(d->buckets.size() == 1); }
        if (mb == 1e-6) { CHECK(d->buckets.size() == model.parameters.size()); }
    }
}
TEST_CASE("ddp: a bucket's MB are millions of bytes, and caps that cut alike are one way") {
    // 510,000 bytes each
    const vector<Parameter> two = {{"a", {127500}, 0, Tensor()}, {"b", {127500}, 127500, Tensor()}};
    CHECK(cut_into_buckets(two, F32, 1).size() == 2);

    vector<DdpRun> runs = {NO_SYNC, NAIVE, FLAT, OVERLAPPED};
    for (double mb : {0.5, 100.0, 1000.0}) { runs.push_back({BUCKETED, mb}); }
    join_equal_caps({"lm", 128, 512, 4, 4, 10000}, runs);  // 14.4 MB
    REQUIRE(runs.size() == 6);
    CHECK(runs[4].name == "0.5 MB");
    CHECK(runs[5].name == "100 MB = 1000 MB");
}
TEST_CASE("ddp: only a sharded optimizer wants equal shards, and each group counts its own steps") {
    Communicator nine;
    nine.world = 9;
    const Tensor w = from_floats({1, 1, 1, 1}, {4}), g = from_floats({0.5, 0.5, 0.5, 0.5}, {4});
    Optimizer whole, sharded{nine, ZERO1};
    add_parameter_group(whole, {w, g});
    CHECK(failure_of([&] {
              add_parameter_group(sharded, {w, g});
          }) == "1: 4 weights are not 9 equal shards; with 1 to 8 ranks they always are");

    Optimizer o;
    AdamW adamw;
    adamw.lr = 0.1f;
    adamw.weight_decay = 0;
    adamw.eps = 0;
    add_parameter_group(o, {view(w, 0, {2}), view(g, 0, {2}), adamw});
    for (int i = 0; i < 5; i++) { step_parameter_groups(o, 1); }
    add_parameter_group(o, {view(w, 2, {2}), view(g, 2, {2}), adamw});
    copy(g, from_floats({0.5, 0.5, 0.5, -2}, {4}));
    step_parameter_groups(o, 1);
    // a first step is lr, whatever the gradient's size
    CHECK(to_floats(w)[2] == doctest::Approx(0.9));
    CHECK(to_floats(w)[3] == doctest::Approx(1.1));
}
static void check_what_ranks_tell(const Communicator& c) {
    CHECK(same_everywhere(c, key_of_bits(from_floats({1, 2}, {2}))));
    CHECK(!same_everywhere(c, key_of_bits(from_floats({1, (float)c.rank}, {2}))));
    CHECK(mean_over_ranks(c, 3.0 + c.rank) == 3.5);
    CHECK(room_of_each_rank(c) < 0.75 * available_memory(CPU));  // two ranks share it

    // One process has the whole batch, so its first loss is the ranks' mean.
    const ModelConfig config = {"lm", 16, 16, 1, 1, 20};
    Options o;
    o.warmup = {0};
    o.steps = 1;
    o.batch_size = 1;
    o.context_length = 8;
    Traces traces;
    DdpRun naive = NAIVE;
    run_strategy(c, o, config, naive, traces);
    const WayRun alone = single_process(c, o, config);
    if (c.rank == 0) { CHECK(alone.loss == doctest::Approx(naive.loss).epsilon(1e-5)); }

    // What was held before a run is no part of its peaks, nor of any category.
    const Tensor held = empty_on(CPU, {1 << 20}, U8, WORKSPACE);
    ShardingRun unsharded{{"unsharded"}, UNSHARDED};
    run_sharded(c, o, config, unsharded);
    CHECK(unsharded.peaks.size() == 3);
    for (const auto& [moment, use] : unsharded.peaks) {
        INFO(moment);
        CHECK(std::accumulate(use.peak_by, use.peak_by + CATEGORIES, (size_t)0) == use.peak);
        CHECK(use.peak_by[WORKSPACE] < 1 << 20);
    }

    // The times are means over the ranks. A busy machine may add to them, but not as much as lies
    // between their mean, 220 ms, and rank 0's 400.
    o.warmup = {1};
    o.steps = 2;
    WayRun r{"sleeps"};
    run_way(r, c, o, [&](const Communicator& c) {
        Trainer t;
        t.c = c;
        t.model = random_model(config, 0);
        t.step_optimizer = [&c](Trainer&) {
            if (context.device != META) { usleep(c.rank == 0 ? 400000 : 40000); }
            return 0.0;
        };
        return t;
    });
    CHECK(r.ms.optimizer.mean > 219);
    CHECK(r.ms.optimizer.mean < 400);
}
TEST_CASE("ddp: ranks see that their bits differ and steps are means over them") {
    if (lacks("gloo", CPU, 2)) { return; }
    in_ranks("ddp: ranks see that their bits differ and steps are means over them", 2, CPU,
             check_what_ranks_tell);
}
TEST_CASE("ddp: memory that is not there after all is a row of one process, not its end") {
    Options o;
    o.warmup = {0};
    o.steps = 1;
    o.batch_size = 1;
    o.context_length = 8;
    WayRun r{"one process"};
    run_way(r, Communicator(), o, [&](const Communicator&) {
        if (context.device != META) { throw OutOfMemory("none left"); }
        Trainer t;
        t.model = random_model({"lm", 16, 16, 1, 1, 20}, 0);
        return t;
    });
    CHECK(r.oom);
    CHECK(r.predicted > 0);
}
TEST_CASE("ddp: buckets") {
    if (lacks("gloo", CPU, 1)) { return; }
    in_ranks("ddp: buckets", 1, CPU, check_buckets);
}

// Backward runs from 8 to 18 ms, and two collectives from 0 to 10 and from 5 to 20.
static void check_times(const Communicator& c) {
    Trainer t = data_parallel_trainer(c, random_model({"lm", 16, 16, 1, 1, 20}, 0), NAIVE);
    t.marks = {{&StepTimes::forward, Mark{100, nullptr}}};
    for (auto [begin, end] : {pair{100, 110}, {105, 120}}) {
        auto work = make_shared<Work>();
        work->begin.ms = begin;
        work->end.ms = end;
        t.d->works.push_back(work);
    }
    StepTimes times;
    times.forward = 8;
    times.backward = 10;
    t.add_communication(t, times);
    CHECK(times.communication == 20);
    CHECK(times.hidden == 10);
}
TEST_CASE("ddp: time that two collectives share counts once") {
    if (lacks("gloo", CPU, 1)) { return; }
    in_ranks("ddp: time that two collectives share counts once", 1, CPU, check_times);
}

static Run check_command(const vector<string>& words, const char* expected) {
    Run r = run_cs336(words);
    string line;
    for (const string& w : words) { line += w + " "; }
    INFO(line << "\n" << r.out << r.err);
    CHECK(r.exit_code == 0);
    CHECK(has(r.out, expected));
    CHECK(r.out.find(expected) == r.out.rfind(expected));  // only rank 0 prints
    CHECK(!has(r.out, "DIFFER"));
    return r;
}
TEST_CASE("ddp: weights equal those of single-process training, 1 to 4 ranks, all ways") {
    if (lacks("gloo", CPU, 4)) { return; }
    for (const char* n : {"1", "2", "3", "4"}) {
        for (const char* command :
             {"naive_ddp", "ddp_overlap_individual_parameters", "ddp_overlap_bucketed"}) {
            check_command({command, "--device", "cpu", "--nproc", n},
                          "All ranks hold the same bits.");
            if (n == string("4")) { break; }  // more ranks than cores take their time
        }
        check_command({"optimizer_state_sharding", "--device", "cpu", "--nproc", n},
                      "All ranks hold the same bits.");
    }
}
// for a race
static void check_often(const char* device, const char* backend, const char* most_ranks) {
    for (int i = 0; i < 20; i++) {
        vector<string> words = {"ddp_overlap_individual_parameters"};
        if (i % 2) {
            const char* const caps[] = {"0.0001", "0.0016", "0.01"};
            words = {"ddp_overlap_bucketed", "--bucket_size_mb", caps[i / 2 % 3]};
        }
        for (const char* word : {"--device", device, "--backend", backend, "--nproc"}) {
            words.push_back(word);
        }
        words.push_back(i % 4 < 2 ? "2" : most_ranks);
        words.push_back("--seed");
        words.push_back(to_string(i));
        check_command(words, "All ranks hold the same bits.");
    }
}
TEST_CASE("ddp: overlapped, 20 times") {
    if (lacks("gloo", CPU, 2)) { return; }
    check_often("cpu", "gloo", "3");
}
TEST_CASE("ddp: overlapped over NCCL, 20 times") {
    if (lacks("nccl", CUDA, 2)) { return; }
    check_often("cuda", "nccl", "2");
}
// The head's and the embedding's buckets are large enough to be scattered and gathered, by copy
// engines.
static void check_large_buckets(const Communicator& c) {
    Table losses{"", {"Way", "Step", "ours", "whole"}};
    vector<WeightsCheck> checks;
    const ModelConfig config = {"wide", 256, 64, 1, 2, 32000};
    train_and_compare(c, config, {"overlapped", OVERLAPPED}, 0, checks, losses);
    for (const WeightsCheck& x : checks) {
        INFO(x.what << " " << x.max);
        CHECK(x.match);
    }
}
TEST_CASE("ddp: large buckets over NCCL") {
    if (lacks("nccl", CUDA, 2)) { return; }
    in_ranks("ddp: large buckets over NCCL", 2, CUDA, check_large_buckets);
}
TEST_CASE("ddp: the same commands on GPUs") {
    if (lacks("nccl", CUDA, 2)) { return; }
    for (const char* command : {"naive_ddp", "ddp_overlap_individual_parameters",
                                "ddp_overlap_bucketed", "optimizer_state_sharding"}) {
        check_command({command, "--device", "cuda", "--nproc", cuda_devices() >= 4 ? "4" : "2"},
                      "All ranks hold the same bits.");
    }
}
// With as many tensors as --quick's model, 39, but less to compute.
static vector<string> of_small_model(vector<string> words) {
    words.insert(words.end(), {"--d_model", "64", "--d_ff", "128", "--num_layers", "4",
                               "--num_heads", "4", "--vocab_size", "1000"});
    return words;
}
TEST_CASE("ddp: benchmarking commands") {
    if (lacks("gloo", CPU, 2)) { return; }
    // --quick has 4 heads, so a width need not be divisible by small's 12.
    Run r = run_cs336({"ddp_bucketed_benchmarking", "--device", "cpu", "--vocab_size", "1000",
                       "--bucket_size_mb", "0.5,100", "--d_model", "128"});
    INFO(r.out << r.err);
    CHECK(r.exit_code == 0);
    CHECK(has(r.out, "sizes of --quick where none is typed"));
    CHECK(
        has(r.out,
            "size custom (1.306 million parameters, 0.00522 GB; d_model 128, d_ff 512, 4 layers, 4 "
            "heads, "));
    CHECK(has(r.out, "\n**(b)** "));
    CHECK(has(r.out, "| one process "));
    CHECK(has(r.err, "\nnaive, rank 0: Step 3/3: "));
    CHECK(!has(r.err, ": Step 4/3"));
    CHECK(column(r.out, "hidden").at(1) == "0.0%");
    const vector<string> ways = {"no sync", "naive", "flat", "overlapped", "0.5 MB", "100 MB"};
    const vector<string> calls = column(r.out, "calls"), losses = column(r.out, "Loss");
    REQUIRE(losses.size() == ways.size());
    // 9 tensors per layer and 3
    for (auto [way, n] : {pair(1, "39"), {2, "1"}, {3, "39"}, {5, "1"}}) {
        INFO(ways[way]);
        CHECK(calls[way] == n);
        // all from the same weights
        CHECK(std::abs(std::stod(losses[way]) - std::stod(losses[1])) < 2e-4);
    }
    CHECK(std::abs(std::stod(losses[0]) - std::stod(losses[1])) > 1e-3);
    Run memory = run_cs336(
        of_small_model({"optimizer_state_sharding_accounting", "--quick", "--device", "cpu"}));
    CHECK(memory.exit_code == 0);
    CHECK(has(memory.out, "| ZeRO-1 "));
    CHECK(has(memory.out, "which is the expected 1/2"));
    Run alone =
        run_cs336(of_small_model({"naive_ddp_benchmarking", "--device", "cpu", "--nproc", "1"}));
    CHECK(alone.exit_code == 0);
    CHECK(has(alone.out, "Not compared: "));
    CHECK(run_cs336({"naive_ddp_benchmarking", "--size", "tiny"}).exit_code == 2);
    CHECK(run_cs336({"ddp_bucketed_benchmarking", "--bucket_size_mb", "0"}).exit_code == 2);
}
TEST_CASE("ddp: steps that do not fit are rows that say so, and the run has failed") {
    if (lacks("gloo", CPU, 2)) { return; }
    for (const char* command : {"naive_ddp_benchmarking", "optimizer_state_sharding_accounting"}) {
        Run r = run_cs336({command, "--device", "cpu", "--d_model", "65536", "--d_ff", "262144",
                           "--num_layers", "96", "--num_heads", "512"});
        INFO(r.out << r.err);
        CHECK(r.exit_code == 1);
        CHECK(has(r.out, "| OOM ("));
        CHECK(has(r.err, "no step ran: each rank needs "));
    }
}
TEST_CASE("ddp: --trace puts all ranks into one file") {
    if (lacks("gloo", CPU, 2)) { return; }
    Folder folder;
    string path = folder / "trace.json";
    vector<string> words = of_small_model(
        {"ddp_overlap_individual_parameters_benchmarking", "--quick", "--device", "cpu"});
    const Run untraced = run_cs336(words);
    words.insert(words.end(), {"--trace", path});
    Run r = run_cs336(words);
    INFO(r.err);
    CHECK(r.exit_code == 0);
    CHECK(column(r.out, "Loss") == column(untraced.out, "Loss"));
    nlohmann::json trace = nlohmann::json::parse(read_file(path), nullptr, false);
    REQUIRE(!trace.is_discarded());
    map<pair<int, string>, int> seen;  // process and name of a range
    for (const auto& event : trace["traceEvents"]) {
        if (event["ph"] == "X") { seen[{event["pid"].get<int>(), event["name"].get<string>()}]++; }
    }
    for (int rank : {0, 1}) {
        for (const char* name :
             {"naive", "flat", "overlapped", "forward", "backward", "optimizer"}) {
            INFO("rank " << rank << ", " << name);
            CHECK(seen[{rank, name}] > 0);
        }
        CHECK(seen[{rank, "naive"}] == 1);  // only the step behind the timed ones
        CHECK(seen[{rank, "all-reduce"}] >= 39 + 1 + 39);
    }
    CHECK(folder.files() == vector<string>{"trace.json"});  // no rank's own
}

// -------------------------------------------------------------------------------------------------
// Tests of the answers of ddp.cu: numbers that two and four H200s and 32 CPU threads gave, and
// others.

static Stats of_six(double mean, double std) {
    return {mean, std, mean, mean - std, mean + std, 6};
}

TEST_CASE("ddp: the differences of weights add up to their mean") {
    begin<OnCPU>();
    WeightsCheck check{"naive", "w"};
    compare(check, from_floats({1, 2, 3}, {3}), from_floats({1, 3, 6}, {3}), 0, 4);
    CHECK(check.sum == 4);
    CHECK(check.n == 3);
    CHECK(check.max == 3);
    CHECK(check.match);
}
TEST_CASE("answers ddp: weights") {
    vector<WeightsCheck> checks(2, {"naive", "lm_head.weight", 5.96e-08, 1e-6, 250});
    checks[1].max = 1.19e-07;
    auto answers = [&] {
        return printed([&] { print_checks(Communicator(), Options(), 10, "a model", checks); });
    };
    CHECK(has(answers(),
              "The weights of 1 rank and of one process with the whole batch match: the largest "
              "difference is 1.19e-07 (naive, lm_head.weight). Rounding differs. All ranks hold "
              "the same bits.\n"));
    for (WeightsCheck& x : checks) { x.max = 0; }
    CHECK(has(answers(),
              "match: the largest difference is 0.00e+00 (naive, lm_head.weight). All ranks hold "
              "the same"));
    checks.push_back({"flat", "ln_final.weight", NAN, NAN, 250});
    CHECK(has(answers(), "the largest difference is nan (flat, ln_final.weight)"));
    checks[0].match = false;
    CHECK_THROWS_WITH(answers(), "the weights differ");
}

// fp32, xl, two H200s, 2 x 128 tokens per rank
static vector<DdpRun> recorded() {
    auto run = [](Strategy strategy, double mb, double total, double std, double backward,
                  double exposed, double comm, double hidden, int calls) {
        DdpRun r(strategy, mb);
        r.ms.total = of_six(total, std);
        r.ms.backward = of_six(backward, 0.05);
        r.ms.exposed = of_six(exposed, 0.05);
        r.ms.communication = of_six(comm, 0.05);
        r.ms.hidden = of_six(hidden * comm, 0.05);
        r.calls = calls;
        r.mb = calls ? 7992.9 : 0;
        return r;
    };
    return {run(NO_SYNC, 0, 94.17, 0.11, 52.33, 0, 0, 0, 0),
            run(NAIVE, 0, 133.32, 0.11, 52.31, 39.20, 36.93, 0, 435),
            run(FLAT, 0, 117.25, 0.13, 52.32, 23.08, 23.07, 0, 1),
            run(OVERLAPPED, 0, 110.65, 0.30, 68.24, 0.59, 62.10, 0.991, 435),
            run(BUCKETED, 1, 110.60, 0.20, 68.25, 0.55, 62.08, 0.991, 435),
            run(BUCKETED, 10, 110.78, 0.29, 68.40, 0.55, 62.36, 0.992, 435),
            run(BUCKETED, 100, 103.94, 0.15, 61.53, 0.56, 32.25, 0.983, 98),
            run(BUCKETED, 1000, 105.06, 0.08, 60.11, 3.07, 25.66, 0.881, 9)};
}
TEST_CASE("answers ddp: naive, flat and overlapped") {
    vector<DdpRun> runs = recorded();
    check_says(
        printed([&] { answer_naive_ddp_benchmarking(runs); }),
        {"A step takes 133.32 ms: 41.6 % more than a step without communication (94.17 ms). 39.20 "
         "ms of it (29.4 %) are exposed communication",
         "The 435 all-reduces, one per tensor, move 7992.9 MB in 36.93 ms (216 GB/s)."});
    auto flat = [&] { return printed([&] { answer_minimal_ddp_flat_benchmarking(runs); }); };
    check_says(
        flat(),
        {"a step takes 117.25 ms: 12.1 % less than naive (133.32 ms).",
         "The all-reduce of 7992.9 MB takes 23.07 ms: 37.5 % less than naive's calls (36.93 ms)."});
    runs[2].ms.total = of_six(133.1, 0.3);
    check_says(flat(), {"a step takes 133.10 ms: level with naive (133.32 ms) within 0.5 %."});
    runs = recorded();
    auto overlapped = [&] {
        return printed([&] { answer_ddp_overlap_individual_parameters_benchmarking(runs); });
    };
    check_says(
        overlapped(),
        {"**(a)** Overlapped, a step takes 110.65 ms: 17.0 % less than naive (133.32 ms), "
         "and 5.6 % less than flat (117.25 ms).",
         "**(b)** Naive's all-reduces all lie after backward, and the step waits 39.20 ms "
         "for them. Overlapped's take 62.10 ms, 99.1 % of it under backward, and the step waits "
         "0.59 ms. Backward itself takes 68.24 ms, 30.4 % more than a backward without calls "
         "(52.33 ms). "
         "These are"});
    runs[3].ms.total = of_six(420.33, 5.2);
    check_says(overlapped(), {"3.15 times as long as naive (133.32 ms)"});
    runs[3].ms.total = {298.86, 400, 298.86, 100, 800, 3};
    check_says(
        overlapped(),
        {"a step takes 298.86 ms: too noisy to compare with naive (133.32 ms), and too noisy"});
}
TEST_CASE("ddp: the caption says where NCCL must not use NVLink") {
    begin_on(CPU);
    Options o;
    o.warmup = {5};
    auto caption = [&] {
        return caption_of(o, {"", 32, 48, 2, 2, 40}, {0, 2, 1, "nccl", nullptr});
    };
    const char* name = "NCCL_P2P_DISABLE";
    const char* typed = getenv(name);
    const string before = typed ? typed : "";
    unsetenv(name);
    CHECK(has(caption(), "2 ranks, backend nccl; size "));
    setenv(name, "1", 1);
    CHECK(has(caption(), "2 ranks, backend nccl, NCCL_P2P_DISABLE is set; size "));
    if (typed) {
        setenv(name, before.c_str(), 1);
    } else {
        unsetenv(name);
    }
}
TEST_CASE("ddp: the cells of a table of steps") {
    vector<DdpRun> runs = recorded();
    runs[FLAT].oom = true;
    runs[FLAT].predicted = (size_t)5 << 30;
    runs[FLAT].ms = {};
    WayRun single{"one process"};
    single.ms.total = of_six(266.64, 1);
    single.ms.forward = of_six(66.66, 1);
    Options o;
    o.batch_size = 2;
    o.context_length = 128;
    auto table = [&] { return printed([&] { print_steps("caption", runs, single, o, 2); }); };
    CHECK(column(table(), "Samples/s").at(1) == "30.00");  // 2 ranks of 2 sequences in 133.32 ms
    CHECK(column(table(), "Tokens/s").at(1) == "3840");
    // overlapped: flat, which did not fit, has no row here
    CHECK(column(table(), "vs naive").at(2) == "+17.0%");
    CHECK(column(table(), "speed-up").at(1) == "2.00x");
    CHECK(column(table(), "Forward (ms)").back() == "66.66 ± 1.00, 25%");
    CHECK(has(table(), "OOM (5.0"));
    CHECK(!has(table(), "inf"));
}
TEST_CASE("answers ddp: ddp_bucketed_benchmarking") {
    vector<DdpRun> runs = recorded();
    auto answers = [&] { return printed([&] { answer_ddp_bucketed_benchmarking(runs); }); };
    check_says(
        answers(),
        {"The fastest cap on a bucket is 100 MB: a step takes 103.94 ms, 6.1 % less than a tensor "
         "per "
         "call (110.65 ms) and 11.4 % less than flat (117.25 ms).\n",
         "**(a)** With 1000 MB (9 buckets) communication takes 25.66 ms, 58.7 % less than a tensor "
         "per call "
         "(62.10 ms). The step waits for it 3.07 ms, 5.20 times as long as a tensor per call "
         "(0.59 ms); backward takes 60.11 ms, 11.9 % less than a tensor per call (68.24 ms).",
         "Here what flat leaves exposed (23.08 ms) takes 0.44 times as long as a backward "
         "without calls (52.33 ms).",
         "From what naive (435 calls) and flat (one call) leave exposed, for s = 7992.9 MB, follow "
         "o = 37.14 us per call and w = 347 GB/s. The best bucket, of at most s, then has 320.9 MB "
         "and an overhead of 1.85 ms."});
    runs[7].ms.total = of_six(104.02, 0.2);  // level
    check_says(
        answers(),
        {"This run does not show which cap on a bucket is the fastest. With 100 MB a step takes "
         "103.94 ms, ",
         "It is not told apart from 1000 MB (104.02 ms, level within 0.5 %)."});
    CHECK(!has(answers(), "The fastest cap"));
    runs[1].ms.exposed = of_six(7992.9, 0.05);  // a call takes 18 ms
    check_says(answers(), {"The best bucket, of at most s, then has 7993 MB"});
    runs[1].ms.exposed = of_six(38.5, 40);  // too noisy for digits
    check_says(answers(), {"Naive's 435 calls (38.50 ms exposed) and flat's one"});
    runs[1].ms.exposed = of_six(22.1, 0.05);
    check_says(answers(), {"Naive's 435 calls (22.10 ms exposed) and flat's one (23.08 ms) do not "
                           "give an o and a w"});
    runs.erase(runs.begin() + 5, runs.end());
    CHECK(!has(answers(), "fastest"));  // of one cap
    check_says(answers(), {"With 1 MB ("});
}

TEST_CASE("answers ddp: optimizer_state_sharding_accounting") {
    constexpr double MIB = 1048576;
    auto run = [](Sharding sharding, double after_init, double after_step, double state,
                  double total, double optimizer) {
        ShardingRun r{{""}, sharding};
        for (double peak : {after_init, 21340.3, after_step}) {
            const bool has_stepped = peak == after_step;
            MemoryUse use{};
            use.peak = (size_t)(peak * MIB);
            use.peak_by[PARAMETERS] = use.peak_by[GRADIENTS] = (size_t)(7622.7 * MIB);
            use.peak_by[ACTIVATIONS] = (size_t)(6062.9 * MIB);
            use.peak_by[WEIGHT_COPIES] = (size_t)(12.5 * MIB);
            use.peak_by[WORKSPACE] = (size_t)(3.5 * MIB);
            use.peak_by[OPTIMIZER] = (size_t)(has_stepped * state * MIB);
            r.peaks.emplace_back("", use);
        }
        r.ms.total = of_six(total, 0.2);
        r.ms.optimizer = of_six(optimizer, 0.1);
        return r;
    };
    vector<ShardingRun> runs = {run(UNSHARDED, 7622.7, 30522.8, 15245.3, 339.51, 13.39),
                                run(BROADCAST, 7654.7, 22900.1, 7622.7, 354.61, 28.19),
                                run(ZERO1, 7654.7, 22900.1, 7622.7, 335.83, 32.52)};
    auto answers = [&](int ranks, const string& backend = "nccl") {
        return printed([&] { answer_optimizer_state_sharding_accounting(runs, ranks, backend); });
    };
    check_says(
        answers(2),
        {"At the peak before the step weights take 7622.7 MiB, gradients 7622.7, activations "
         "6062.9, the weights' 16-bit copies 12.5 and workspace 3.5 MiB.",
         "ours, like ZeRO's, own equal parts of one flat buffer.",
         "Unsharded, the peak is 7622.7 MiB after init, 21340.3 before the optimizer's step and "
         "30522.8 after it. Sharded, it is 7654.7, 21340.3 and 22900.1 MiB.",
         "15245.3 MiB unsharded, 7622.7 MiB sharded, which is the expected 1/2.",
         "**(b)** An iteration takes 354.61 ms sharded, 4.4 % more than unsharded (339.51 ms).",
         "may skip that): the optimizer takes 28.19 ms, 2.11 times as long as",
         "2 Psi (N-1)/N elements (with our buffer's padding 7993.0 MB)",
         "3 Psi (N-1)/N (11989.5 MB)."});
    check_says(answers(4), {"which is not the expected 1/4."});
    check_says(answers(2, "gloo"), {"over Gloo our reduce-scatter is an all-reduce."});
    CHECK(!has(answers(2), "Gloo"));
    runs[1].ms.total = of_six(339.61, 0.23);
    check_says(answers(2), {"sharded, level with unsharded (339.51 ms) within 0.5 %."});
    for (ShardingRun& r : runs) { r.peaks[AFTER_STEP].second.peak_by[OPTIMIZER] = 0; }
    CHECK(!has(answers(2), "moments"));  // fp16's loss scaling skipped the step
    Communicator two;
    two.world = 2;
    auto can = [&](bool all) { return can_compare(two, runs, all); };
    CHECK(can(true));
    runs[0].oom = true;
    CHECK(can(false));
    CHECK(printed([&] { CHECK(!can(true)); }) == "Not compared: not all ways fit.\n");
    runs[1].oom = runs[2].oom = true;
    runs[2].predicted = (size_t)5 << 30;
    CHECK_THROWS_WITH(can(true), "no step ran: each rank needs 5.0 GiB");
}
