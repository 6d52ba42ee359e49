// test_fsdp.cpp: FSDP's weights, how often it gathers, and what it holds.
#include "test.h"

static void check_fsdp(const std::vector<std::string>& more) {
    std::vector<std::string> words = {"fsdp", "--quick"};
    words.insert(words.end(), more.begin(), more.end());
    Run r = run_cs336(words);
    INFO(join(words, " ") << "\n" << r.out << r.err);
    CHECK(r.exit_code == 0);
    const bool flash = fastest_flash(more[1] == "cuda" ? CUDA : CPU, F32, 16);
    const std::vector<std::string> match(flash ? 16 : 15, "match");
    CHECK(column(r.out, "Parameters") == match);
    CHECK(column(r.out, "precision").back() == "pure_bf16");
    CHECK(has(r.out,
              " and of one process with the whole batch, after each of 3 steps, match: the largest difference is "));
}
TEST_CASE("fsdp: weights equal those of single-process training, 1 to 3 ranks") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (const char* n : {"1", "2", "3"}) { check_fsdp({"--device", "cpu", "--nproc", n}); }
}
TEST_CASE("fsdp: the same on GPUs") {
    if (lacks("nccl", CUDA, 2)) { return; }
    for (const char* n : {"1", "2"}) { check_fsdp({"--device", "cuda", "--backend", "nccl", "--nproc", n}); }
}

static Run accounting(const std::vector<std::string>& more) {
    std::vector<std::string> words = {"fsdp_accounting", "--quick", "--device",     "cpu", "--d_model",   "64",
                                      "--d_ff",          "128",     "--num_layers", "4",   "--num_heads", "2",
                                      "--vocab_size",    "200"};
    words.insert(words.end(), more.begin(), more.end());
    return run_cs336(words);
}
static std::vector<double> numbers(const Run& r, const char* name) {
    std::vector<double> all;
    for (const std::string& cell : column(r.out, name)) { all.push_back(std::stod(cell)); }
    return all;
}
static void check_predicted(const Run& r, size_t ways) {
    const std::vector<double> peaks = numbers(r, "peak"), predicted = numbers(r, "predicted");
    REQUIRE(peaks.size() == ways);
    for (size_t i = 0; i < ways; i++) { CHECK(std::fabs(peaks[i] / predicted[i] - 1) < 0.03); }
}
TEST_CASE("fsdp_accounting: memory as predicted, and a wait for each unit") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (const char* n : {"2", "3"}) {
        for (const auto& [checkpoint, precision] :
             {std::pair("0", "fp32"), {"1", "fp32"}, {"0", "fp16"}, {"0", "bf16"}}) {
            Run r = accounting({"--nproc", n, "--checkpoint", checkpoint, "--precision", precision});
            INFO(n << " ranks, checkpoint " << checkpoint << ", " << precision << "\n" << r.out << r.err);
            REQUIRE(r.exit_code == 0);
            check_predicted(r, std::string(precision) == "fp16" ? 3 : 4);  // fp16's steps need a norm first
            const std::vector<double> optimizer = numbers(r, "optimizer");
            CHECK(optimizer[2] < optimizer[0] / atof(n) + 0.2);
            CHECK(column(r.out, "unit") ==
                  std::vector<std::string>{"embedding", "layer 0", "layer 1", "layer 2", "layer 3", "lm_head", "all"});
            CHECK(numbers(r, "forward: gather").back() > 0);
            CHECK(has(r.out, "**(a)** FSDP should save "));
            CHECK(has(r.out, "**(b)** "));
        }
    }
    const Run none = accounting({"--batch_size", "1048576"});
    CHECK(none.exit_code == 1);
    for (const std::string& cell : column(none.out, "peak")) { CHECK(has(cell, "OOM (")); }
    CHECK(has(none.out, "**(a)** FSDP did not fit: OOM ("));
    const Run one = accounting({"--nproc", "1"});
    CHECK(one.exit_code == 0);
    CHECK(has(one.out, "One rank has no other"));
}
TEST_CASE("fsdp_accounting: pure bf16 holds half") {
    if (lacks("gloo", CPU, 2)) { return; }
    const Run whole = accounting({"--mode", "fused"}),
              pure = accounting({"--mode", "fused", "--precision", "pure_bf16"});
    REQUIRE_MESSAGE(pure.exit_code == 0, pure.err);
    check_predicted(pure, 4);
    for (const char* name : {"parameters", "copies", "optimizer"}) {
        CAPTURE(name);
        const std::vector<double> in_fp32 = numbers(whole, name), in_bf16 = numbers(pure, name);
        for (size_t i = 0; i < 4; i++) { CHECK(std::fabs(in_bf16[i] - in_fp32[i] / 2) <= 0.1); }  // as rounded
    }
    CHECK(has(pure.out, "8 Psi bytes with DDP"));
}

static const ModelConfig small = {"small", 32, 48, 4, 2, 50};
static std::unique_ptr<Fsdp> shards_of(const Communicator& c) {
    return fully_shard(c, lay_out_model(small).parameters, F32);
}
static Tensor step_of(Model& model, Fsdp& f, int rank) {
    LossScaler scaler;
    begin_step(f);
    Tensor loss = forward_backward(model, random_batch(2, 8, 50, rank), 1);
    finish_backward(f);
    optimizer_step(f, scaler, 1.0);
    return loss;
}
static std::vector<int> units_of(const std::vector<FsdpWait>& waits) {
    std::vector<int> units;
    for (const FsdpWait& w : waits) { units.push_back(w.unit); }
    return units;
}
static int gathers_in(const std::vector<FsdpWait>& waits) {
    std::set<const Work*> gathers;
    for (const FsdpWait& w : waits) { gathers.insert(w.work.get()); }
    return (int)gathers.size();
}
// Of blocks 1 to 4, the last is still there when backward begins; so is the head.
static void check_gathers(const Communicator& c) {
    auto f = shards_of(c);
    Model model = sharded_model(small, *f);
    visit_whole(*f, f->shard.weights, true, [](const Parameter& p, const Tensor& w) { init_weight(w, p.name, 1); });
    for (int step = 0; step < 3; step++) {
        step_of(model, *f, c.rank);
        CHECK(units_of(f->waits) == std::vector<int>{0, 1, 2, 3, 4, 5, 4, 3, 2, 1});
        CHECK(gathers_in(f->waits) == 9);
        std::set<const Work*> seen = {f->waits[0].work.get()};
        for (size_t i = 1; step > 0 && i < f->waits.size(); i++) {
            const FsdpWait &before = f->waits[i - 1], &w = f->waits[i];
            if (!seen.insert(w.work.get()).second) { continue; }
            // Not before the unit two before it was finished, but while the unit before it was computed.
            if (context.device == CUDA) {
                CHECK(ms_of(w.work->begin, before.got) >= 0);
            } else {
                CHECK(w.work->started_ms >= before.asked.ms);
                CHECK(w.work->started_ms <= w.asked.ms - 1e-3);
            }
        }
    }
    context.checkpoint = 1;  // each block runs again, then backward
    step_of(model, *f, c.rank), step_of(model, *f, c.rank);
    CHECK(units_of(f->waits) == std::vector<int>{0, 1, 2, 3, 4, 5, 4, 4, 3, 3, 2, 2, 1, 1});
    for (int i : {8, 10, 12}) {  // beside the forward that runs again
        if (context.device == CPU) { CHECK(f->waits[i].work->started_ms <= f->waits[i - 1].asked.ms); }
    }
    context.checkpoint = 2;  // blocks 3 and 4 run again, then backward; then 1 and 2
    step_of(model, *f, c.rank), step_of(model, *f, c.rank);
    context.checkpoint = 0;
    CHECK(units_of(f->waits) == std::vector<int>{0, 1, 2, 3, 4, 5, 3, 4, 4, 3, 1, 2, 2, 1});
}
TEST_CASE("fsdp: each unit is gathered once per pass and one ahead; on GPUs") {
    if (lacks("nccl", CUDA, 2)) { return; }
    in_ranks("fsdp: each unit is gathered once per pass and one ahead; on GPUs", 2, CUDA, check_gathers);
}
TEST_CASE("fsdp: each unit is gathered once per pass and one ahead") {
    if (lacks("gloo", CPU, 2)) { return; }
    in_ranks("fsdp: each unit is gathered once per pass and one ahead", 2, CPU, check_gathers);
}

// 1/N of weights, gradients and moments, and two buffers; what is planned is what is held.
static size_t peak_of_step(const Communicator& c) {
    auto f = shards_of(c);
    Model model = sharded_model(small, *f);
    step_of(model, *f, c.rank), step_of(model, *f, c.rank);
    return 0;
}
static void check_memory(const Communicator& c, Precision precision, int head_chunk) {
    context.precision = precision, context.head_chunk = head_chunk;
    size_t before = memory_use(CPU).now;
    reset_peak(CPU);
    peak_of_step(c);
    size_t measured = memory_use(CPU).peak - before;
    Communicator planned_ranks;
    planned_ranks.world = c.world;
    size_t planned = planned_peak([&] { peak_of_step(planned_ranks); });
    CHECK(std::abs((double)measured / planned - 1) < 0.03);
    int64_t all = make_model(small).weights.size(), norms = 9 * 64, padding = 6 * 64;  // 6 units, 9 norms
    CHECK(shards_of(c)->shard.weights.size() <= all / c.world + norms + padding);
}
TEST_CASE("fsdp: the memory of a step is the planned one") {
    if (lacks("gloo", CPU, 2)) { return; }
    for (int n : {2, 3}) {
        in_ranks("fsdp: the memory of a step is the planned one", n, CPU, [](const Communicator& c) {
            check_memory(c, FP32, 0), check_memory(c, PREC_PURE_BF16, 0), check_memory(c, PREC_PURE_BF16, 12);
        });
    }
}

static void check_norm(const Communicator& c) {
    auto f = shards_of(c);
    Model ours = sharded_model(small, *f), whole = make_model(small);
    visit_whole(*f, f->shard.weights, true, [](const Parameter& p, const Tensor& w) { init_weight(w, p.name, 1); });
    init_weights(whole, 1);
    Batch batch = random_batch(2 * c.world, 8, 50, 3);
    auto part = [&](const Tensor& t) { return view(t, c.rank * 16, {2, 8}); };
    LossScaler scaler;
    begin_step(*f);
    forward_backward(ours, {part(batch.tokens), part(batch.targets)}, 1);
    finish_backward(*f);
    forward_backward(whole, batch, 1);
    double want = gradient_norm(whole);
    CHECK(optimizer_step(*f, scaler, 1.0) == doctest::Approx(want).epsilon(1e-5));
    CHECK_THROWS_WITH(optimizer_step(*f, scaler, 1.0), "FSDP: the optimizer's step has no backward before it");
    std::vector<float> stepped = to_floats(infer(ours, batch.tokens));  // not with weights gathered before the step
    begin_step(*f);
    CHECK(to_floats(infer(ours, batch.tokens)) == stepped);
}
TEST_CASE("fsdp: the gradients' norm counts every weight once") {
    if (lacks("gloo", CPU, 2)) { return; }
    in_ranks("fsdp: the gradients' norm counts every weight once", 2, CPU, check_norm);
}

// Rounding to the upper half and casting differ in ties only, so a step moves both alike. What is read is whole fp32.
static void check_form(const Communicator& c) {
    context.precision = PREC_BF16, context.mode = FUSED;
    std::vector<std::map<std::string, std::vector<float>>> trained;
    for (bool split : {false, true}) {
        auto f = fully_shard(c, lay_out_model(small).parameters, matmul_dtype());
        Model model = sharded_model(small, *f);
        init_weights(*f, 1);
        auto read = [&] {
            std::map<std::string, std::vector<float>> all;
            visit_whole(*f, f->shard.weights, false,
                        [&](const Parameter& p, const Tensor& w) { all[p.name] = to_floats(w); });
            return all;
        };
        const auto initial = read();
        f->shard.adamw.eps = 1e-5f;  // else a gradient that is rounding alone moves its weight by lr, either way
        if (split) { choose_form(*f); }
        CHECK((f->form != nullptr) == (split && !table_of<WeightForm>().empty()));
        CHECK(read() == initial);
        std::vector<float> losses;
        for (int step = 0; step < 3; step++) { losses.push_back(to_floats(step_of(model, *f, c.rank))[0]); }
        trained.push_back(read());
        visit_whole(*f, f->shard.weights, true, [](const Parameter&, const Tensor&) {});  // as a checkpoint does
        CHECK(read() == trained.back());
        trained.back()["losses"] = losses;
        CHECK(trained.back()["lm_head.weight"] != initial.at("lm_head.weight"));
    }
    for (const auto& [name, plain] : trained[0]) {
        const std::vector<float>& split = trained[1][name];
        double worst = 0;
        for (size_t i = 0; i < plain.size(); i++) { worst = std::max<double>(worst, std::fabs(plain[i] - split[i])); }
        CAPTURE(name);
        // Weights: a tenth of how far three steps of 1e-3 move. Losses: half a bf16 unit of logits from 2 to 4.
        CHECK(worst <= (name == "losses" ? 1.0 / 128 : 3e-4));
    }
}
TEST_CASE("fsdp: weights that are split into bf16 and the rest train as whole ones") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (int n : {1, 2, 3}) {
        in_ranks("fsdp: weights that are split into bf16 and the rest train as whole ones", n, CPU, check_form);
    }
}
TEST_CASE("fsdp: the same split weights on GPUs") {
    if (lacks("nccl", CUDA, 2)) { return; }
    in_ranks("fsdp: the same split weights on GPUs", 2, CUDA, check_form);
}

// The same kernels see the same numbers, so bits are equal; only what is kept, and when, differs.
static void check_steps_in_backward(const Communicator& c) {
    for (Precision precision : {FP32, PREC_BF16, PREC_PURE_BF16}) {
        context.precision = precision, context.mode = FUSED, context.checkpoint = precision == FP32 ? 2 : 0;
        std::vector<std::vector<float>> trained;
        size_t peaks[2];
        for (bool in_backward : {false, true}) {
            auto f = fully_shard(c, lay_out_model(small).parameters, matmul_dtype());
            Model model = sharded_model(small, *f);
            init_weights(*f, 1);
            choose_form(*f);
            LossScaler scaler;
            std::vector<float> all;
            for (int step = 0; step < 3; step++) {
                if (step == 1) { reset_peak(context.device); }
                begin_step(*f, in_backward);
                all.push_back(to_floats(forward_backward(model, random_batch(2, 8, 50, c.rank), 1))[0]);
                finish_backward(*f);
                optimizer_step(*f, scaler, 0);
            }
            peaks[in_backward] = memory_use(context.device).peak_by[GRADIENTS];
            visit_whole(*f, f->shard.weights, false, [&](const Parameter&, const Tensor& w) {
                for (float x : to_floats(w)) { all.push_back(x); }
            });
            trained.push_back(all);
            if (!in_backward) { continue; }
            begin_step(*f, true);
            forward_backward(model, random_batch(2, 8, 50, c.rank), 1);
            finish_backward(*f);
            CHECK_THROWS_WITH(optimizer_step(*f, scaler, 1), "FSDP: a step in backward does not clip");
            CHECK_THROWS_WITH(forward_backward(model, random_batch(2, 8, 50, c.rank), 1),
                              "FSDP: steps in backward take one backward each");
            clear_tape();
            f->shard.sgd = true;
            CHECK_THROWS_WITH(begin_step(*f, true), "FSDP: a step in backward is AdamW's, and not in fp16");
        }
        CAPTURE(name_of(precision));
        CHECK(trained[0] == trained[1]);
        CHECK(peaks[1] < peaks[0]);
    }
}
TEST_CASE("fsdp: AdamW in backward gives the same weights and keeps no gradients") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (int n : {1, 2, 3}) {
        in_ranks("fsdp: AdamW in backward gives the same weights and keeps no gradients", n, CPU,
                 check_steps_in_backward);
    }
}
TEST_CASE("fsdp: AdamW in backward; on GPUs") {
    if (lacks("nccl", CUDA, 2)) { return; }
    in_ranks("fsdp: AdamW in backward; on GPUs", 2, CUDA, check_steps_in_backward);
}

// A rank whose loss does not depend on a weight has a zero gradient for it, as the others' average says.
static void check_missing(const Communicator& c) {
    std::vector<Parameter> parameters = {
        {"head", {4, 8}, 0, {}, 2}, {"fc", {8, 8}, 32, {}, 1}, {"table", {6, 8}, 96, {}, 0}};
    auto f = fully_shard(c, parameters, F32);
    Model model;
    model.parameters = parameters;
    for (Parameter& p : model.parameters) { p.weight = place(*f, p, p.shape), model.slots.push_back(p.weight); }
    add_hooks(model, *f);
    visit_whole(*f, f->shard.weights, true,
                [](const Parameter& p, const Tensor& w) { fill_normal(w, 1, key_of(p.name), 0, 1); });
    f->shard.sgd = true, f->shard.momentum = 0, f->shard.adamw.weight_decay = 0, f->shard.adamw.lr = 1;
    std::map<std::string, std::vector<float>> before;
    visit_whole(*f, f->shard.weights, false,
                [&](const Parameter& p, const Tensor& w) { before[p.name] = to_floats(w); });
    auto after = before, once = before;
    for (int step = 0; step < 2; step++) {  // in the second, buffers hold the first's gradients
        begin_step(*f);
        zero_gradients(model);
        begin_unit(model, 0);
        Tensor x = end_unit(model, 0, gather_rows(model.parameters[2].weight, from_ints({1, 2}, {2})));
        begin_unit(model, 1);
        if (step == 0 && c.rank == 0) { x = linear(x, model.parameters[1].weight); }
        x = end_unit(model, 1, x);
        begin_unit(model, 2);
        backward(mean_all(square(linear(x, model.parameters[0].weight))));
        finish_backward(*f);
        LossScaler scaler;
        optimizer_step(*f, scaler, 0);
        std::swap(once, after);
        visit_whole(*f, f->shard.weights, false,
                    [&](const Parameter& p, const Tensor& w) { after[p.name] = to_floats(w); });
    }
    CHECK(once["fc"] != before["fc"]);  // by rank 0's first step
    CHECK(after["fc"] == once["fc"]);
    for (float x : after["table"]) { CHECK(std::isfinite(x)); }
    for (int i = 0; i < 48; i++) {  // only rows 1 and 2 were looked up
        if (i < 8 || i >= 24) { CHECK(after["table"][i] == before["table"][i]); }
    }
}
TEST_CASE("fsdp: a weight that one rank's loss does not depend on") {
    if (lacks("gloo", CPU, 2)) { return; }
    in_ranks("fsdp: a weight that one rank's loss does not depend on", 2, CPU, check_missing);
}

// The class's public test: Embedding - RMSNorm - Linear - ReLU - RMSNorm - Linear - Linear, SGD, a loss of each
// sequence's last position only; here against one process with the whole batch.
static Model lay_out_toy() {
    Model toy;
    toy.parameters = {{"head", {100, 64}, 0, {}, 3}, {"fc2", {64, 128}, 0, {}, 2},
                      {"norm2", {128}, 0, {}},       {"fc1", {128, 64}, 0, {}, 1},
                      {"norm1", {64}, 0, {}},        {"token_embeddings.weight", {100, 64}, 0, {}, 0}};
    int64_t end = 0;
    for (Parameter& p : toy.parameters) { p.offset = end, end += count(p.shape); }
    return toy;
}
static Tensor toy_loss(const Model& toy, const Batch& batch) {
    auto weight = [&](int i) { return toy.parameters[i].weight; };
    auto product = [&](int unit, const Tensor& x, int i) {
        begin_unit(toy, unit);
        return end_unit(toy, unit, linear(x, weight(i)));
    };
    begin_unit(toy, 0);
    Tensor x = end_unit(toy, 0, gather_rows(weight(5), batch.tokens));
    x = cast(relu(product(1, add_rmsnorm(&x, Tensor(), weight(4), 1e-5f), 3)), F32);  // RMSNorm takes fp32
    x = product(3, product(2, add_rmsnorm(&x, Tensor(), weight(2), 1e-5f), 1), 0);
    auto last = [](const Tensor& by_position) { return contiguous(slice_last(by_position, 7, 1)); };
    return cross_entropy(transpose(last(transpose(x, 1, 2)), 1, 2), last(batch.targets));
}
static void check_public_test(const Communicator& c) {
    for (Precision precision : {FP32, PREC_FP16}) {
        context.precision = precision, context.mode = FUSED;
        Model ours = lay_out_toy(), whole = lay_out_toy();
        auto f = fully_shard(c, ours.parameters, matmul_dtype());
        for (Parameter& p : ours.parameters) { p.weight = place(*f, p, p.shape), ours.slots.push_back(p.weight); }
        add_hooks(ours, *f);
        init_weights(*f, 1);
        f->shard.sgd = true, f->shard.momentum = 0, f->shard.adamw.weight_decay = 0, f->shard.adamw.lr = 0.01f;
        for (Parameter& p : whole.parameters) {
            p.weight = require_gradient(zeros(p.shape, F32, PARAMETERS)), whole.slots.push_back(p.weight);
            p.weight.gradient->is_parameter = true;
        }
        init_weights(whole, 1);
        LossScaler scaler;
        scaler.scale = 1024;  // a power of two: unscaling is exact
        const float scale_of_loss = loss_scale_of(scaler);
        for (int step = 0; step < 3; step++) {
            const Batch all = random_batch(10 * c.world, 8, 100, step);
            auto part = [&](const Tensor& t) { return view(t, c.rank * 80, {10, 8}); };
            begin_step(*f);
            zero_gradients(ours), zero_gradients(whole);
            backward_from_loss(ours, toy_loss(ours, {part(all.tokens), part(all.targets)}), scale_of_loss);
            finish_backward(*f);
            optimizer_step(*f, scaler, 0);
            backward_from_loss(whole, toy_loss(whole, all), scale_of_loss);
            for (const Parameter& p : whole.parameters) {
                NoGrad no_grad;
                copy_or_add(detached(p.weight), scale(p.weight.gradient->value, -0.01f / scale_of_loss), true);
            }
            drop_weight_copies(whole.slots);
            visit_whole(*f, f->shard.weights, false, [&](const Parameter& p, const Tensor& got) {
                const Parameter& same = whole.parameters[&p - f->parameters.data()];
                CAPTURE(p.name);
                CHECK(compare(got, same.weight, 1e-4, precision == FP32 ? 1e-6 : 1e-4).ok());
            });
        }
    }
}
TEST_CASE("fsdp: the class's public test") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (int n : {1, 2, 3}) { in_ranks("fsdp: the class's public test", n, CPU, check_public_test); }
}
TEST_CASE("fsdp: the class's public test; on GPUs") {
    if (lacks("nccl", CUDA, 2)) { return; }
    in_ranks("fsdp: the class's public test; on GPUs", 2, CUDA, check_public_test);
}
