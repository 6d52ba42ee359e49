// Tests of fsdp.cu.
#include "fsdp.cu"

#include "attention.h"
#include "test.h"

#include <tuple>
#include <utility>

void begin_unit(const Model& model, int unit);  // of model.cu
Tensor end_unit(const Model& model, int unit, const Tensor& y);

#ifndef HAVE_CUDA
// Tests that plan for a GPU look for flash on it. A plan calls no row.
static const AddRow<AttentionImpl> planned({"flash_v1", CUDA, 30,
                                            [](DType, int64_t D) { return flash_head_size(D); },
                                            nullptr, [](const AttentionTensors&) {}, nullptr});
#endif

// -------------------------------------------------------------------------------------------------
// FSDP's weights, how often it gathers, and what it holds.

static void check_fsdp(const vector<string>& more) {
    vector<string> words = {"fsdp", "--quick"};
    words.insert(words.end(), more.begin(), more.end());
    Run r = run_cs336(words);
    INFO(join(words, " ") << "\n" << r.out << r.err);
    CHECK(r.exit_code == 0);
    const bool flash = fastest_flash(more[1] == "cuda" ? CUDA : CPU, F32, 16);
    const vector<string> match(flash ? 14 : 13, "match");
    CHECK(column(r.out, "Parameters") == match);
    CHECK(column(r.out, "Way").back() == "FSDP, pure_bf16");
    CHECK(has(r.out, " and of one process with the whole batch match: the largest difference is "));
}
TEST_CASE("fsdp: weights equal those of single-process training, 1 to 3 ranks") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (const char* n : {"1", "2", "3"}) { check_fsdp({"--device", "cpu", "--nproc", n}); }
}
TEST_CASE("fsdp: the same on GPUs") {
    if (lacks("nccl", CUDA, 2)) { return; }
    for (const char* n : {"1", "2"}) {
        check_fsdp({"--device", "cuda", "--backend", "nccl", "--nproc", n});
    }
}

static Run accounting(const vector<string>& more) {
    vector<string> words = {"fsdp_accounting", "--quick", "--device",    "cpu",
                            "--d_model",       "64",      "--d_ff",      "128",
                            "--num_layers",    "4",       "--num_heads", "2",
                            "--vocab_size",    "200",     "--warmup",    "1",
                            "--steps",         "1"};
    words.insert(words.end(), more.begin(), more.end());
    return run_cs336(words);
}
static vector<double> numbers(const Run& r, const char* name) {
    vector<double> all;
    for (const string& cell : column(r.out, name)) { all.push_back(std::stod(cell)); }
    return all;
}
static void check_predicted(const Run& r, size_t ways) {
    const vector<double> peaks = numbers(r, "peak"), predicted = numbers(r, "predicted");
    REQUIRE(peaks.size() == ways);
    for (size_t i = 0; i < ways; i++) { CHECK(std::fabs(peaks[i] / predicted[i] - 1) < 0.03); }
}
TEST_CASE("fsdp_accounting: memory as predicted, and a wait for each unit") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (const char* n : {"2", "3"}) {
        for (const auto& [checkpoint, precision] :
             {pair("none", "fp32"), {"1", "fp32"}, {"none", "fp16"}, {"none", "bf16"}}) {
            Run r =
                accounting({"--nproc", n, "--checkpoint", checkpoint, "--precision", precision});
            INFO(n << " ranks, checkpoint " << checkpoint << ", " << precision << "\n"
                   << r.out << r.err);
            REQUIRE(r.exit_code == 0);
            // fp16's steps need a norm first
            check_predicted(r, string(precision) == "fp16" ? 3 : 4);
            for (size_t way = 0; way < numbers(r, "peak").size(); way++) {
                double sum = 0;
                for (const char* part :
                     {"parameters", "copies", "gradients", "optimizer", "other"}) {
                    sum += numbers(r, part)[way];
                }
                CHECK(fabs(sum - numbers(r, "peak")[way]) < 0.31);  // six rounded cells
            }
            const vector<double> optimizer = numbers(r, "optimizer");
            CHECK(optimizer[2] < optimizer[0] / atof(n) + 0.2);
            CHECK(column(r.out, "unit") == vector<string>{"embedding", "layer 0", "layer 1",
                                                          "layer 2", "layer 3", "lm_head"});
            CHECK(numbers(r, "gather").back() > 0);
            CHECK(has(r.out, "**(a)** FSDP should save "));
            CHECK(has(r.out, "**(b)** "));
        }
    }
    const Run none = accounting({"--batch_size", "1048576"});
    CHECK(none.exit_code == 1);
    for (const string& cell : column(none.out, "peak")) { CHECK(has(cell, "OOM (")); }
    CHECK(has(none.err, "no step ran: each rank needs "));
    const Run one = accounting({"--nproc", "1"});
    CHECK(one.exit_code == 0);
    CHECK(has(one.out, "Not compared: it takes several ranks.\n"));
}
TEST_CASE("fsdp_accounting: pure bf16 holds half") {
    if (lacks("gloo", CPU, 2)) { return; }
    const Run whole = accounting({"--mode", "fused"}),
              pure = accounting({"--mode", "fused", "--precision", "pure_bf16"});
    REQUIRE_MESSAGE(pure.exit_code == 0, pure.err);
    check_predicted(pure, 4);
    for (const char* name : {"parameters", "copies", "optimizer"}) {
        CAPTURE(name);
        const vector<double> in_fp32 = numbers(whole, name), in_bf16 = numbers(pure, name);
        // as rounded
        for (size_t i = 0; i < 4; i++) { CHECK(std::fabs(in_bf16[i] - in_fp32[i] / 2) <= 0.1); }
    }
    CHECK(has(pure.out, "8 Psi bytes with DDP"));
}

TEST_CASE("fsdp: the ranks' equal parts hold all of a unit") {
    begin_on(CPU);
    for (int world : {1, 2, 3}) {
        for (int64_t n : {1, 64, 65, 129, 130, 193}) {
            CAPTURE(world);
            CAPTURE(n);
            Communicator c;
            c.world = world;
            const auto f = fully_shard(c, {{"w", {n}, 0, Tensor(), 0}}, F32);
            CHECK(f->units[0].part * world >= n);
            CHECK(f->units[0].part % 64 == 0);
        }
    }
}

static const ModelConfig small = {"small", 32, 48, 4, 2, 50};
static shared_ptr<Fsdp> shards_of(const Communicator& c) {
    return fully_shard(c, lay_out_model(small).parameters, F32);
}
static Tensor step_of(Model& model, Fsdp& f, int rank) {
    LossScaler scaler;
    begin_fsdp_step(f);
    Tensor loss = forward_backward(model, random_batch(2, 8, 50, rank), 1);
    finish_backward(f);
    fsdp_optimizer_step(f, scaler, 1.0);
    return loss;
}
static vector<FsdpWait> gathers_of(const Fsdp& f) {
    vector<FsdpWait> gathers;
    for (const FsdpWait& w : f.waits) {
        if (w.work->what == string("all-gather")) { gathers.push_back(w); }
    }
    return gathers;
}
static vector<int> units_of(const vector<FsdpWait>& waits) {
    vector<int> units;
    for (const FsdpWait& w : waits) { units.push_back(w.unit); }
    return units;
}
static int gathers_in(const vector<FsdpWait>& waits) {
    set<const Work*> gathers;
    for (const FsdpWait& w : waits) { gathers.insert(w.work.get()); }
    return (int)gathers.size();
}
// Of blocks 1 to 4, the last is still there when backward begins; so is the head.
static void check_gathers(const Communicator& c) {
    auto f = shards_of(c);
    Model model = sharded_model(small, *f);
    visit_whole(*f, true, [](const Parameter& p, const Tensor& w) { init_weight(w, p.name, 1); });
    for (int step = 0; step < 3; step++) {
        step_of(model, *f, c.rank);
        const vector<FsdpWait> waits = gathers_of(*f);
        CHECK(units_of(waits) == vector<int>{0, 1, 2, 3, 4, 5, 4, 3, 2, 1});
        CHECK(gathers_in(waits) == 9);
        set<const Work*> seen = {waits[0].work.get()};
        for (size_t i = 1; step > 0 && i < waits.size(); i++) {
            const FsdpWait &before = waits[i - 1], &w = waits[i];
            if (!seen.insert(w.work.get()).second) { continue; }
            // Not before the unit two before it was finished, but while the unit before it was
            // computed.
            if (context.device == CUDA) {
                CHECK(ms_of(w.work->begin, before.got) >= 0);
            } else {
                CHECK(w.work->started_ms >= before.asked.ms);
                CHECK(w.work->started_ms <= w.asked.ms - 1e-3);
            }
        }
    }
    context.checkpoint = {Checkpointing::GROUPS, 1};  // each block runs again, then backward
    step_of(model, *f, c.rank);
    step_of(model, *f, c.rank);
    const vector<FsdpWait> waits = gathers_of(*f);
    CHECK(units_of(waits) == vector<int>{0, 1, 2, 3, 4, 5, 4, 4, 3, 3, 2, 2, 1, 1});
    for (int i : {8, 10, 12}) {  // beside the forward that runs again
        if (context.device == CPU) { CHECK(waits[i].work->started_ms <= waits[i - 1].asked.ms); }
    }
    // blocks 3 and 4 run again, then backward; then 1 and 2
    context.checkpoint = {Checkpointing::GROUPS, 2};
    step_of(model, *f, c.rank);
    step_of(model, *f, c.rank);
    context.checkpoint = {};
    CHECK(units_of(gathers_of(*f)) == vector<int>{0, 1, 2, 3, 4, 5, 3, 4, 4, 3, 1, 2, 2, 1});
}
TEST_CASE("fsdp: each unit is gathered once per pass and one ahead; on GPUs") {
    if (lacks("nccl", CUDA, 2)) { return; }
    in_ranks("fsdp: each unit is gathered once per pass and one ahead; on GPUs", 2, CUDA,
             check_gathers);
}
TEST_CASE("fsdp: each unit is gathered once per pass and one ahead") {
    if (lacks("gloo", CPU, 2)) { return; }
    in_ranks("fsdp: each unit is gathered once per pass and one ahead", 2, CPU, check_gathers);
}

static void check_norm(const Communicator& c) {
    auto f = shards_of(c);
    Model ours = sharded_model(small, *f), whole = make_model(small);
    visit_whole(*f, true, [](const Parameter& p, const Tensor& w) { init_weight(w, p.name, 1); });
    init_weights(whole, 1);
    Batch batch = random_batch(2 * c.world, 8, 50, 3);
    LossScaler scaler;
    begin_fsdp_step(*f);
    forward_backward(ours, part_of(batch, c, 1)[0], 1);
    finish_backward(*f);
    forward_backward(whole, batch, 1);
    double want = gradient_norm(whole);
    CHECK(fsdp_optimizer_step(*f, scaler, 1.0) == doctest::Approx(want).epsilon(1e-5));
    // not with weights gathered before the step
    vector<float> stepped = to_floats(infer(ours, batch.tokens));
    begin_fsdp_step(*f);
    CHECK(to_floats(infer(ours, batch.tokens)) == stepped);
}
TEST_CASE("fsdp: the gradients' norm counts every weight once") {
    if (lacks("gloo", CPU, 2)) { return; }
    in_ranks("fsdp: the gradients' norm counts every weight once", 2, CPU, check_norm);
}

// Returns how far b is from a, all elements together.
static double distance(const vector<float>& a, const vector<float>& b) {
    REQUIRE(a.size() == b.size());
    double squares = 0;
    for (size_t i = 0; i < a.size(); i++) { squares += std::pow((double)b[i] - a[i], 2); }
    return std::sqrt(squares);
}
// Rounding to the upper half and casting differ in ties only, but one tie turns roundings in all
// that follows. So split and plain weights are as far from fp32's as each other, and at most twice
// that far from each other. What is read is whole fp32.
static void check_form(const Communicator& c) {
    context.mode = FUSED;
    vector<map<string, vector<float>>> trained;
    for (auto [precision, split] :
         {pair<Precision, bool>{FP32, false}, {PREC_BF16, false}, {PREC_BF16, true}}) {
        context.precision = precision;
        auto f = fully_shard(c, lay_out_model(small).parameters, matmul_dtype());
        Model model = sharded_model(small, *f);
        visit_whole(*f, true,
                    [](const Parameter& p, const Tensor& w) { init_weight(w, p.name, 1); });
        auto read = [&] {
            map<string, vector<float>> all;
            visit_whole(*f, false,
                        [&](const Parameter& p, const Tensor& w) { all[p.name] = to_floats(w); });
            return all;
        };
        const auto initial = read();
        // else a gradient that is rounding alone moves its weight by lr
        f->shard.adamw.eps = 1e-3f;
        if (split) { keep_parts(*f); }
        for (const FsdpUnit& unit : f->units) {  // the embedding is looked up, in fp32
            const bool in_bf16 = split && fast_ways.keep_part && unit.offset > 0;
            CHECK(unit.own.dtype == (in_bf16 ? BF16 : F32));
        }
        CHECK(read() == initial);
        vector<float> losses;
        for (int step = 0; step < 3; step++) {
            losses.push_back(to_floats(step_of(model, *f, c.rank))[0]);
        }
        trained.push_back(read());
        visit_whole(*f, true, [](const Parameter&, const Tensor&) {});  // as a checkpoint does
        CHECK(read() == trained.back());
        trained.back()["losses"] = losses;
        CHECK(trained.back()["lm_head.weight"] != initial.at("lm_head.weight"));
    }
    for (const auto& [name, exact] : trained[0]) {
        CAPTURE(name);
        const vector<float>&plain = trained[1][name], &split = trained[2][name];
        if (name != "losses") {
            CHECK(distance(plain, split) <= 2 * distance(exact, plain));
            continue;
        }
        // half a bf16 unit of logits from 2 to 4
        for (size_t i = 0; i < plain.size(); i++) {
            CHECK(std::fabs(plain[i] - split[i]) <= 1.0 / 128);
        }
    }
}
TEST_CASE("fsdp: weights that are split into bf16 and the rest train as whole ones") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (int n : {1, 2, 3}) {
        in_ranks("fsdp: weights that are split into bf16 and the rest train as whole ones", n, CPU,
                 check_form);
    }
}
TEST_CASE("fsdp: the same split weights on GPUs") {
    if (lacks("nccl", CUDA, 2)) { return; }
    in_ranks("fsdp: the same split weights on GPUs", 2, CUDA, check_form);
}

// The same kernels see the same numbers, so bits are equal; only what is kept, and when, differs.
static void check_steps_in_backward(const Communicator& c) {
    for (Precision precision : {FP32, PREC_BF16, PREC_PURE_BF16}) {
        context.precision = precision;
        context.mode = FUSED;
        context.checkpoint = checkpointing_from(precision == FP32 ? "2" : "none");
        vector<vector<float>> trained;
        size_t peaks[2];
        for (bool in_backward : {false, true}) {
            auto f = fully_shard(c, lay_out_model(small).parameters, matmul_dtype());
            Model model = sharded_model(small, *f);
            visit_whole(*f, true,
                        [](const Parameter& p, const Tensor& w) { init_weight(w, p.name, 1); });
            keep_parts(*f);
            f->steps_in_backward = in_backward;
            LossScaler scaler;
            vector<float> all;
            for (int step = 0; step < 3; step++) {
                if (step == 1) { reset_peak(context.device); }
                begin_fsdp_step(*f);
                all.push_back(
                    to_floats(forward_backward(model, random_batch(2, 8, 50, c.rank), 1))[0]);
                finish_backward(*f);
                fsdp_optimizer_step(*f, scaler, 0);
            }
            peaks[in_backward] = memory_use(context.device).peak_by[GRADIENTS];
            visit_whole(*f, false, [&](const Parameter&, const Tensor& w) {
                for (float x : to_floats(w)) { all.push_back(x); }
            });
            trained.push_back(all);
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

// A rank whose loss does not depend on a weight has a zero gradient for it, as the others' average
// says.
static void check_missing(const Communicator& c) {
    vector<Parameter> parameters = {{"head", {4, 8}, 0, {}, 2},
                                    {"fc", {8, 8}, 32, {}, 1},
                                    {"table", {6, 8}, 96, {}, 0},
                                    {"norm", {8}, 144, {}, NORMS}};
    auto f = fully_shard(c, parameters, F32);
    Model model;
    model.parameters = parameters;
    for (Parameter& p : model.parameters) {
        p.weight = place(*f, p, p.shape);
        model.slots.push_back(p.weight);
    }
    add_hooks(model, *f);
    visit_whole(*f, true, [](const Parameter& p, const Tensor& w) {
        fill_normal(w, 1, key_of(p.name), 0, 1);
    });
    f->shard.adamw = {1, 0, 0, 1, 0};  // without momentum and decay: no gradient, no step
    map<string, vector<float>> before;
    visit_whole(*f, false,
                [&](const Parameter& p, const Tensor& w) { before[p.name] = to_floats(w); });
    auto after = before, once = before;
    for (int step = 0; step < 2; step++) {  // in the second, buffers hold the first's gradients
        begin_fsdp_step(*f);
        zero_gradients(model);
        begin_unit(model, 0);
        Tensor x =
            end_unit(model, 0, gather_rows(model.parameters[2].weight, from_ints({1, 2}, {2})));
        begin_unit(model, 1);
        if (step == 0 && c.rank == 0) {
            x = mul(linear(x, model.parameters[1].weight), model.parameters[3].weight);
        }
        x = end_unit(model, 1, x);
        begin_unit(model, 2);
        backward(mean_all(square(linear(x, model.parameters[0].weight))));
        finish_backward(*f);
        LossScaler scaler;
        fsdp_optimizer_step(*f, scaler, 0);
        std::swap(once, after);
        visit_whole(*f, false,
                    [&](const Parameter& p, const Tensor& w) { after[p.name] = to_floats(w); });
    }
    for (const char* name : {"fc", "norm"}) {
        CHECK(once[name] != before[name]);  // by rank 0's first step
        CHECK(after[name] == once[name]);
    }
    for (float x : after["table"]) { CHECK(std::isfinite(x)); }
    for (int i = 0; i < 48; i++) {  // only rows 1 and 2 were looked up
        if (i < 8 || i >= 24) { CHECK(after["table"][i] == before["table"][i]); }
    }
}
TEST_CASE("fsdp: a weight that one rank's loss does not depend on") {
    if (lacks("gloo", CPU, 2)) { return; }
    in_ranks("fsdp: a weight that one rank's loss does not depend on", 2, CPU, check_missing);
}

// A Transformer: each way's steps on the ranks' parts of a batch against one process's on all of
// it.
static void check_trainers(const Communicator& c) {
    const ModelConfig config = {"lm", 64, 96, 2, 4, 100};
    const int rows = 4, T = 16;
    auto plain = [&] { return random_model(config, c.rank); };  // rank 0's weights reach all
    AdamW adamw;
    adamw.eps = 1e-5f;  // else a gradient that is rounding alone moves its weight by lr, either way
    vector<pair<const char*, function<Trainer()>>> ways = {
        {"sharded, broadcast", [&] { return sharded_trainer(c, plain(), BROADCAST, adamw); }},
        {"sharded, ZeRO-1", [&] { return sharded_trainer(c, plain(), ZERO1, adamw); }},
        {"FSDP", [&] { return fsdp_trainer(c, config, 0, false, adamw); }},
        {"FSDP, early AdamW", [&] { return fsdp_trainer(c, config, 0, true, adamw); }}};
    for (Strategy s : {NAIVE, FLAT, OVERLAPPED, BUCKETED}) {
        ways.push_back({name_of(s), [&, s] { return data_parallel_trainer(c, plain(), s, 0.05); }});
    }
    for (const auto& [name, make] : ways) {
        CAPTURE(string(name));
        Trainer ours = make(), whole;
        whole.model = random_model(config, 0);
        whole.adamw = ours.adamw = adamw;
        vector<StepPart> parts;
        for (int step = 0; step < 3; step++) {
            const Batch all = random_batch(rows * c.world, T, 100, step);
            train_step(whole, {all});
            train_step(ours, part_of(all, c, 1));
            for (const StepMark& mark : ours.marks) { parts.push_back(mark.part); }
            CHECK(mean_over_ranks(c, ours.loss) == doctest::Approx(whole.loss).epsilon(1e-5));
        }
        CHECK(parts.size() == 3 * 5);
        CHECK(parts[3] == &StepTimes::optimizer);
        double worst = 0;
        auto see = [&](const Parameter& p, const Tensor& got) {
            const vector<float> a = to_floats(got),
                                b = to_floats(view(whole.model.weights, p.offset, p.shape));
            for (size_t i = 0; i < a.size(); i++) {
                worst = max<double>(worst, std::fabs(a[i] - b[i]));
            }
        };
        if (ours.f) { visit_whole(*ours.f, false, see); }
        for (const Parameter& p : ours.f ? vector<Parameter>() : ours.model.parameters) {
            see(p, p.weight);
        }
        CHECK(worst < 3e-6);  // three steps of AdamW move a weight by 3e-3
    }
}
TEST_CASE("fsdp: every trainer's steps are one process's") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (int n : {1, 2, 3}) {
        in_ranks("fsdp: every trainer's steps are one process's", n, CPU, check_trainers);
    }
}
TEST_CASE("fsdp: every trainer's steps are one process's; on GPUs") {
    if (lacks("nccl", CUDA, 2)) { return; }
    in_ranks("fsdp: every trainer's steps are one process's; on GPUs", 2, CUDA, check_trainers);
}

// The fixture's batch has three sequences: each of three ranks has one, and so has each of one
// rank's three backwards.
static void check_pure_bf16_sharded(const Communicator& c) {
    for (const PureSetting& setting : pure_settings) {
        if (!begin_pure(setting)) { continue; }
        CAPTURE(caption_of(setting.mode));
        const Setup whole = fixture_setup();
        auto f = fully_shard(c, whole.model.parameters, BF16);
        Model model = sharded_model(whole.model.config, *f);
        visit_whole(*f, true, [&](const Parameter& p, const Tensor& w) {
            auto same = [&](const Parameter& other) { return other.name == p.name; };
            const auto& all = whole.model.parameters;
            copy(w, view(std::find_if(all.begin(), all.end(), same)->weight, 0, p.shape));
        });
        f->shard.adamw.lr = 1e-2f;
        auto by_name = [&](Tensor flat) {  // laid out as the shard
            const Tensor weights = f->shard.weights;
            auto put = [&](const Tensor& t) {
                f->shard.weights = t;
                f->norms = view(t, f->norms_begin, f->norms.shape);
                for (FsdpUnit& u : f->units) { u.own = view(t, u.offset, {u.part}); }
            };
            put(flat);
            ByName all;
            visit_whole(*f, false,
                        [&](const Parameter& p, const Tensor& t) { all[p.name] = copied(t); });
            put(weights);
            return all;
        };
        ByName gradients;
        LossScaler scaler;
        double loss = 0;
        for (int step = 0; step < 3; step++) {
            begin_fsdp_step(*f);
            for (int row = c.rank; row < 3; row += c.world) {
                auto part = [&](const Tensor& t) { return view(t, row * 7, {1, 7}); };
                Batch batch = {part(whole.tokens), part(whole.targets)};
                Tensor mean = forward_backward(model, batch, (float)c.world / 3);
                finish_backward(*f);
                wait(c, all_reduce(c, mean, AVERAGE));
                if (step == 0) { loss += to_doubles(mean)[0] * c.world / 3; }
            }
            if (step == 0) {
                Tensor flat = zeros(f->shard.weights.shape, BF16, GRADIENTS);
                for (const FsdpUnit& u : f->units) {
                    copy(view(flat, u.offset, {u.part}), u.own_gradient);
                }
                copy(view(flat, f->norms_begin, f->norms_sum.shape), f->norms_sum);
                gradients = by_name(flat);
            }
            fsdp_optimizer_step(*f, scaler, 0);
        }
        check_pure_bf16(loss, gradients, by_name(f->shard.weights));
    }
}
TEST_CASE("fsdp: sharded pure bf16 against PyTorch's") {
    if (lacks("gloo", CPU, 3)) { return; }
    for (int n : {1, 3}) {
        in_ranks("fsdp: sharded pure bf16 against PyTorch's", n, CPU, check_pure_bf16_sharded);
    }
}

// -------------------------------------------------------------------------------------------------
// leaderboard

using Words = vector<string>;
static Run leaderboard(const Words& more) {
    Words words = {"leaderboard", "--device", "cpu"};
    words.insert(words.end(), more.begin(), more.end());
    return run_cs336(words);
}
static Run tiny_step(const Words& more, const char* batch_size = "2") {
    Words words = {"--d_model",    "32",       "--d_ff",       "48",   "--num_layers",     "2",
                   "--num_heads",  "2",        "--vocab_size", "5000", "--context_length", "20",
                   "--batch_size", batch_size, "--warmup",     "3",    "--steps",          "3"};
    words.insert(words.end(), more.begin(), more.end());
    Run r = leaderboard(words);
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    return r;
}
static double number(const Run& r, const char* name) {
    return std::stod(column(r.out, name).at(0));
}
TEST_CASE("leaderboard: a small step, its predicted peak") {
    const Run r = tiny_step({});
    CHECK(has(r.out, "vocabulary 5000), precision pure_bf16, "));
    CHECK(has(r.out, "precision pure_bf16, mode fused, head chunk 2048; 2 sequences per rank"));
    CHECK(number(r, "peak MiB") > 2);
    CHECK(number(r, "peak MiB") == number(r, "predicted MiB"));
    CHECK(number(r, "tokens/s") ==
          doctest::Approx(40 / (number(r, "Total Time (ms)") / 1e3)).epsilon(0.1));
    CHECK(number(r, "head and loss ms") > 0);
    CHECK(number(r, "first loss") == doctest::Approx(std::log(5000)).epsilon(0.3));
    CHECK(column(r.out, "MFU %").at(0) == "-");  // the peak rate is a GPU's
    // With a checkpoint the first step's loss is that of the same model.
    const Run whole = tiny_step({"--checkpoint", "ffn"});
    CHECK(has(whole.out, "mode fused, checkpoint ffn, head chunk 2048;"));
    CHECK(number(whole, "first loss") == doctest::Approx(number(r, "first loss")).epsilon(1e-4));
}
TEST_CASE("leaderboard: two ranks give one rank's losses, with a backward per sequence") {
    if (lacks("gloo", CPU, 2)) { return; }
    CHECK(leaderboard({"--nproc", "2"}).exit_code == 0);
    for (const char* batch_size : {"2", "4"}) {
        const Run one = tiny_step({}, batch_size),
                  two = tiny_step({"--nproc", "2", "--checkpoint", "ffn:1"}, batch_size);
        CHECK(has(two.out, "2 ranks, backend gloo; "));
        // with 25 seeds 4e-5 at most, while the loss falls by 0.03 of itself
        const double LOSS_NOISE = 3e-4;
        for (const char* name : {"first loss", "last loss"}) {
            CAPTURE(name);
            CHECK(number(two, name) == doctest::Approx(number(one, name)).epsilon(LOSS_NOISE));
        }
        CHECK(number(two, "last loss") < 0.98 * number(two, "first loss"));
        CHECK(number(one, "peak MiB") == number(one, "predicted MiB"));
        const double tokens = 20 * std::stod(batch_size);  // of both ranks
        CHECK(number(two, "tokens/s") ==
              doctest::Approx(tokens / (number(two, "Total Time (ms)") / 1e3)).epsilon(0.1));
        double parts = number(two, "head and loss ms");  // the waits count once
        for (const char* part :
             {"Forward (ms)", "Backward (ms)", "Exposed Comm (ms)", "Optimizer (ms)"}) {
            parts += number(two, part);
        }
        CHECK(parts == doctest::Approx(number(two, "Total Time (ms)")).epsilon(0.02));
        CHECK(number(two, "peak MiB") ==
              doctest::Approx(number(two, "predicted MiB")).epsilon(0.02));
    }
}
TEST_CASE("leaderboard: the handout's step is counted and predicted where it does not fit") {
    // Without checkpoints the CPU keeps every block's scores: no host has the memory.
    const Run r = leaderboard(
        {"--size", "8B", "--context_length", "32768", "--batch_size", "2", "--checkpoint", "none"});
    CHECK(r.exit_code == 1);  // no row ran
    CHECK(has(r.out,
              "size 8B (8126 million parameters, 16.3 GB; d_model 4096, d_ff 11008, 34 layers, 32 "
              "heads"));
    CHECK(has(r.out, "; a sequence per backward; 5.044e+15 FLOP per step"));
    CHECK(has(column(r.out, "Total Time (ms)").at(0), "OOM ("));
    CHECK(has(r.err, "no step ran: each rank needs "));
}
TEST_CASE("leaderboard: wrong options") {
    for (const auto& [words, line] : vector<pair<Words, string>>{
             {{"--nproc", "2", "--batch_size", "3"},
              "--batch_size: got 3, takes a multiple of 2, the number of ranks"},
             {{"--num_heads", "3"}, "is not divisible by --num_heads 3"},
             {{"--precision", "fp16"},
              "--mode fused, --precision fp16: takes mode fused or flash, and not fp16"}}) {
        const Run r = leaderboard(words);
        CHECK(r.exit_code == 2);
        CHECK_MESSAGE(has(r.err, line), r.err);
    }
}

// What runs again of the 8.1B step, for a card with so many GiB free, on META.
static string chosen(double gib, int world) {
    RestoreContext restore;
    context = Context();
    context.device = CUDA;  // only planned for
    context.precision = PREC_PURE_BF16;
    context.mode = FLASH;
    context.head_chunk = 2048;
    Options o;
    o.edition = "2026";
    o.size = {"8B"};
    o.context_length = 32768;
    o.batch_size = world == 1 ? 2 : 1;
    o.vocab_size = 10000;
    const double room = gib * (1 << 30) * 30 / 31;
    choose_what_runs_again(o, world, room);
    const Checkpointing k = context.checkpoint;
    string text = caption_of(FLASH);
    auto peak = [&] { return steps_peak(world, o, trainer_of(o), o.batch_size); };
    const size_t needs = peak();
    if (k.form == Checkpointing::GROUPS) { return text + (needs > room ? ", too large" : ""); }
    CHECK(needs <= room);
    if (k) {  // and it fills the card: two fewer do not fit
        CHECK(needs > room - 4.1 * (1 << 30));
        context.checkpoint.n = k.n - 2;
        CHECK(peak() > room);
    }
    return text;
}
TEST_CASE("leaderboard: by default as little runs again as fits") {
    const string chunk = ", head chunk 2048";
    CHECK(chosen(139, 2) == "flash, recompute" + chunk);                       // two H200s
    CHECK(chosen(78, 2) == "flash, recompute, checkpoint blocks:11" + chunk);  // two H100s
    CHECK(chosen(101, 2) == "flash, recompute, checkpoint ffn:28" + chunk);
    CHECK(chosen(40, 2) == "flash, recompute, checkpoint 1" + chunk + ", too large");
    CHECK(chosen(300, 2) == "flash" + chunk);
    CHECK(chosen(178, 1) == "flash, recompute" + chunk);
    CHECK(chosen(139, 1) == "flash, recompute, checkpoint ffn:25" + chunk);  // one H200
}

// -------------------------------------------------------------------------------------------------
// The sentences of fsdp_accounting and leaderboard, from filled structs. Numbers without another
// word were measured on two H200s.

static string said(const vector<FsdpRun>& runs, int world = 2, double psi = 3406809600,
                   int bytes = 4) {
    return printed([&] { answer_fsdp_accounting(runs, world, psi, bytes); });
}
static vector<FsdpRun> runs_of(double ddp, double sharded, double fsdp) {  // peaks in MiB
    vector<FsdpRun> runs = {{"DDP"}, {"sharded optimizer"}, {"FSDP"}};
    runs[0].use.peak = ddp * 1048576;
    runs[1].use.peak = sharded * 1048576;
    runs[2].use.peak = fsdp * 1048576;
    runs[2].gather_ms = {0.3, 0.86, 26.13};
    runs[2].wait_ms = {0.225, 0.801, 0.003};
    return runs;
}
TEST_CASE("answers: fsdp_accounting") {
    vector<FsdpRun> runs = runs_of(58510.1, 45514.1, 27671.2);  // xl in fp32
    check_says(
        said(runs),
        {"**(a)** FSDP should save 25991.9 MiB against DDP and 12995.9 MiB against a sharded "
         "optimizer. Weights, gradients and two moments take 16 Psi bytes with DDP, (8 + 8/N) Psi "
         "with the sharded optimizer and 16 Psi/N with FSDP (Psi = 3.407e+09, N = 2).\n",
         "FSDP takes 30838.9 MiB less than DDP. It takes 4847.0 MiB less than expected (MiB: ",
         "FSDP takes 17842.9 MiB less than the sharded optimizer. It takes 4847.0",
         "**(b)** Gathers after layer 0 (1) take 26.130 ms, and forward waits 0.003 ms for them. "
         "Late, by over 5 % of a gather's time: 0. ",
         "forward waits 0.225 and 0.801 ms for them.\n"});
    // Two whole units and their gradients are more than what sharding saves: a CPU run of a model
    // of 13.8 MiB.
    CHECK(has(said(runs_of(57.6, 43.9, 47.2), 2, 3609728),
              "FSDP takes 3.3 MiB more than the sharded optimizer. It takes 17.1 MiB more than "
              "expected (MiB: "));
    CHECK(has(said(runs, 2, 3406809600, 2), "8 Psi bytes with DDP, (4 + 4/N) Psi with"));
    runs[2].wait_ms[2] = 12.4;
    CHECK(
        has(said(runs),
            "take 26.130 ms, and forward waits 12.400 ms for them. Late, by over 5 % of a gather's "
            "time: 1. "));
    // bf16: the largest cause is the sharded optimizer's copies, then its activations.
    MemoryUse other{}, fsdp{};
    auto set = [](MemoryUse& use, vector<double> mib) {
        const Category all[] = {PARAMETERS, GRADIENTS, OPTIMIZER, WEIGHT_COPIES, ACTIVATIONS};
        for (int i = 0; i < 5; i++) { use.peak_by[all[i]] = (size_t)(mib[i] * 1048576); }
    };
    set(other, {1000, 1000, 1000, 6448.8, 4000});
    set(fsdp, {500, 1301.1, 1000, 400, 425.8});
    CHECK(causes(other, fsdp, 500 * 1048576.0, 0) ==
          " (MiB: weight copies -6048.8, activations -3574.2 and gradients +801.1)");
    CHECK(causes(fsdp, fsdp, 0, 0) == "");
    fsdp.peak_by[WORKSPACE] = 1 << 14;  // 0.0 MiB as it is printed
    CHECK(!has(causes(other, fsdp, 500 * 1048576.0, 0), "workspace"));
    fsdp.peak_by[WORKSPACE] = 32 << 20;
    CHECK(has(causes(other, fsdp, 500 * 1048576.0, 0), "gradients +801.1 and workspace +32.0"));
    runs[0].oom = true;  // 10B
    CHECK(has(said(runs), "**(a)** There was no room for DDP.\n"));
    runs[2].oom = true;
    runs[2].gather_ms.clear();
    CHECK(has(said(runs), "**(a)** There was no room for FSDP.\n"));
    CHECK(!has(said(runs), "(b)"));
}
TEST_CASE("answers: leaderboard") {
    LeaderboardRun r{{"8B"}};
    r.world = 2;
    r.tokens = 65536;
    r.flops = 5.044e15;
    r.predicted = (size_t)(130902.3 * 1048576);
    r.use.peak = (size_t)(130934.3 * 1048576);
    r.ms.total = {4157.9, 9.2, 4157.1, 4147.7, 4169.8, 4};
    auto text = [&] { return printed([&] { answer_leaderboard(r); }); };
    CHECK(
        text() ==
        "A step of 8B on 2 ranks takes 4157.9 ms (mean of 4 steps): 1213 TFLOP/s in all. The peak "
        "is 127.9 GiB per rank.\n");
    r.world = 1;
    r.flops = 4.67e10;
    r.ms.total = {2912.9, 0, 2912.9, 2912.9, 2912.9, 1};
    CHECK(has(text(), " on 1 rank takes 2912.9 ms (mean of 1 step): 0.01603 TFLOP/s in all. "));
}
