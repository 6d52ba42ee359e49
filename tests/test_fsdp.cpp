// Tests of fsdp.cu.
#include "fsdp.cu"

#include "test.h"

#include <tuple>
#include <utility>

void begin_unit(const Model& model, int unit);  // of model.cu
Tensor end_unit(const Model& model, int unit, const Tensor& y);
int cmd_communication_accounting(const Options& o);  // of ddp.cu

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
                            "--vocab_size",    "200"};
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
             {std::pair("none", "fp32"), {"1", "fp32"}, {"none", "fp16"}, {"none", "bf16"}}) {
            Run r =
                accounting({"--nproc", n, "--checkpoint", checkpoint, "--precision", precision});
            INFO(n << " ranks, checkpoint " << checkpoint << ", " << precision << "\n"
                   << r.out << r.err);
            REQUIRE(r.exit_code == 0);
            // fp16's steps need a norm first
            check_predicted(r, string(precision) == "fp16" ? 3 : 4);
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
    CHECK(has(one.out, "Nothing to compare: "));
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
static std::unique_ptr<Fsdp> shards_of(const Communicator& c) {
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
    std::set<const Work*> gathers;
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
        std::set<const Work*> seen = {waits[0].work.get()};
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
    vector<std::map<string, vector<float>>> trained;
    for (auto [precision, split] :
         {std::pair<Precision, bool>{FP32, false}, {PREC_BF16, false}, {PREC_BF16, true}}) {
        context.precision = precision;
        auto f = fully_shard(c, lay_out_model(small).parameters, matmul_dtype());
        Model model = sharded_model(small, *f);
        init_shards(*f, 1);
        auto read = [&] {
            std::map<string, vector<float>> all;
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
            init_shards(*f, 1);
            keep_parts(*f);
            LossScaler scaler;
            vector<float> all;
            for (int step = 0; step < 3; step++) {
                if (step == 1) { reset_peak(context.device); }
                begin_fsdp_step(*f, in_backward);
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
    std::map<string, vector<float>> before;
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
    vector<std::pair<const char*, function<Trainer()>>> ways = {
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
                worst = std::max<double>(worst, std::fabs(a[i] - b[i]));
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
                    copy(view(flat, u.offset, {u.part}), u.gradient);
                }
                copy(view(flat, f->replicated, f->replicated_sum.shape), f->replicated_sum);
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
// Section 8's arithmetic. A feed-forward layer runs forward and backward on simulated devices, with
// real numbers: products count their FLOPs, sends their bytes. The gradients have to be the tape's,
// and the program's formulas have to give the counts.

using Vector = vector<double>;
static Tensor columns_as_rows(const Tensor& t) { return contiguous(transpose(t, 0, 1)); }
// the i-th of n parts: rows or columns
static Tensor part_of(const Tensor& t, int axis, int i, int n) {
    if (axis == 1) { return columns_as_rows(part_of(columns_as_rows(t), 0, i, n)); }
    const int64_t rows = t.dim(0) / n;
    return view(t, i * rows * t.dim(1), {rows, t.dim(1)});
}
static Tensor product(const Tensor& a, const Tensor& b, double* flops) {
    *flops += 2.0 * a.dim(0) * a.dim(1) * b.dim(1);
    return matmul(a, b);
}
static double difference(const Vector& a, const Vector& b) {
    REQUIRE(a.size() == b.size());
    double most = 0;
    for (size_t i = 0; i < a.size(); i++) {
        most = std::fabs(a[i] - b[i]) <= most ? most : std::fabs(a[i] - b[i]);
    }
    return most;
}

struct Member {  // of a ring: its copy of a vector, and what it has sent
    Vector* data;
    double* bytes;
};
// N - 1 steps, in each of which every member sends 1/N of the vector to the next one, 2 bytes per
// element. adds: a reduce-scatter, which leaves member i the sum of part i; else an all-gather of
// what each has in its part.
static void ring(const vector<Member>& members, bool adds) {
    const size_t N = members.size(), n = members[0].data->size() / N;
    REQUIRE(n * N == members[0].data->size());
    for (size_t step = 0; step + 1 < N; step++) {
        vector<Vector> sent;
        auto part = [&](size_t i) { return (i + 2 * N - step - adds) % N * n; };
        for (size_t i = 0; i < N; i++) {
            const auto from = members[i].data->begin() + part(i);
            sent.emplace_back(from, from + n);
            *members[i].bytes += 2.0 * n;
        }
        for (size_t i = 0; i < N; i++) {
            double* to = members[(i + 1) % N].data->data() + part(i);
            for (double value : sent[i]) {
                *to = adds ? *to + value : value;
                to++;
            }
        }
    }
}
static void ring_all_reduce(const vector<Member>& members) {
    ring(members, true);
    ring(members, false);
}

struct FeedForward {
    Tensor x, dy, w[3];
};
struct Simulated {  // a device: rows i of x and dy; columns j of W1 and W2, rows j of W3
    FeedForward part;
    Vector y{}, dx{}, dw[3]{};
    double flops[2] = {}, fsdp_bytes[2] = {}, tp_bytes[2] = {};  // in forward, in backward
};
static FeedForward random_layer(int B, int D, int F) {
    begin_on(CPU);
    auto random = [i = 0](int rows, int columns) mutable {
        Tensor t = empty({rows, columns}, F64);
        fill_normal(t, 1, i++, 0, 1);
        return t;
    };
    return {random(B, D), random(B, D), {random(D, F), random(D, F), random(F, D)}};
}
// Both passes, by the equations that tp_calcs (a) prints. f(x) = x s(x), so f' = s + f (1 - s).
static void run_passes(Simulated& d) {
    NoGrad no_grad;
    const auto& [x, dy, w] = d.part;
    double *forward = &d.flops[0], *backward = &d.flops[1];
    const Tensor x1 = product(x, w[0], forward), x2 = product(x, w[1], forward), s = sigmoid(x1),
                 f = mul(x1, s);
    const Tensor f_prime = add(s, mul(f, add_scalar(scale(s, -1), 1))), z = mul(f, x2);
    d.y = to_doubles(product(z, w[2], forward));
    const Tensor dz = product(dy, columns_as_rows(w[2]), backward), dx2 = mul(dz, f),
                 dx1 = mul(mul(dz, f_prime), x2);
    d.dw[0] = to_doubles(product(columns_as_rows(x), dx1, backward));
    d.dw[1] = to_doubles(product(columns_as_rows(x), dx2, backward));
    d.dw[2] = to_doubles(product(columns_as_rows(z), dy, backward));
    d.dx = to_doubles(add(product(dx1, columns_as_rows(w[0]), backward),
                          product(dx2, columns_as_rows(w[1]), backward)));
}
// N devices along the FSDP axis, M along the TP axis: device (i, j) is number i M + j.
static vector<Simulated> simulate(const FeedForward& l, int N, int M) {
    vector<Simulated> devices;
    for (int k = 0; k < N * M; k++) {
        const int i = k / M, j = k % M;
        FeedForward& own = devices.emplace_back().part;
        own.x = part_of(l.x, 0, i, N);
        own.dy = part_of(l.dy, 0, i, N);
        for (int w = 0; w < 3; w++) { own.w[w] = part_of(l.w[w], w < 2 ? 1 : 0, j, M); }
        run_passes(devices.back());
    }
    for (int i = 0; i < N; i++) {
        vector<Member> y, dx;
        for (int j = 0; j < M; j++) {
            Simulated& d = devices[i * M + j];
            y.push_back({&d.y, &d.tp_bytes[0]});
            dx.push_back({&d.dx, &d.tp_bytes[1]});
        }
        ring_all_reduce(y);
        ring_all_reduce(dx);
    }
    for (int j = 0; j < M; j++) {
        for (int k = 0; k < 3; k++) {
            double not_counted = 0;  // to see the whole sums
            vector<Vector> weights(N, Vector(devices[j].dw[k].size()));
            vector<Member> gathers[2], sums, whole_sums;
            for (int i = 0; i < N; i++) {
                Simulated& d = devices[i * M + j];
                for (int pass : {0, 1}) {
                    gathers[pass].push_back({&weights[i], &d.fsdp_bytes[pass]});
                }
                sums.push_back({&d.dw[k], &d.fsdp_bytes[1]});
                whole_sums.push_back({&d.dw[k], &not_counted});
            }
            ring(gathers[0], false);
            ring(gathers[1], false);
            ring(sums, true);
            ring(whole_sums, false);
        }
    }
    return devices;
}

TEST_CASE("calcs: the simulated layer's gradients are the tape's, on any grid of devices") {
    const FeedForward l = random_layer(12, 4, 24);
    Tensor leaves[4];  // x, W1, W2, W3
    for (int k = 0; k < 4; k++) {
        leaves[k] = require_gradient(k == 0 ? l.x : l.w[k - 1]);
        leaves[k].gradient->is_parameter = true;
    }
    const Tensor x1 = matmul(leaves[0], leaves[1]), x2 = matmul(leaves[0], leaves[2]);
    const Tensor y = matmul(mul(mul(x1, sigmoid(x1)), x2), leaves[3]);
    backward_from(y, l.dy);
    for (auto [N, M] : {std::pair(1, 1), {3, 1}, {1, 4}, {2, 3}, {3, 4}, {4, 2}}) {
        INFO(N << " x " << M << " devices");
        const vector<Simulated> devices = simulate(l, N, M);
        for (int k = 0; k < N * M; k++) {
            CHECK(difference(devices[k].y, to_doubles(part_of(y, 0, k / M, N))) < 1e-12);
            CHECK(difference(devices[k].dx,
                             to_doubles(part_of(leaves[0].gradient->value, 0, k / M, N))) < 1e-12);
            for (int i = 0; i < 3; i++) {
                const Tensor want = part_of(leaves[i + 1].gradient->value, i < 2 ? 1 : 0, k % M, M);
                CHECK(difference(devices[k].dw[i], to_doubles(want)) < 1e-12);
            }
        }
    }
}
TEST_CASE("calcs: FLOPs and bytes are those that the simulated devices count") {
    const double C = 1e6, W = 1e3;
    for (auto [B, D, F, N, M] :
         {std::tuple(12, 8, 24, 4, 2), {12, 8, 24, 2, 4}, {12, 8, 24, 3, 1}, {12, 8, 24, 1, 3}}) {
        INFO("B " << B << ", D " << D << ", F " << F << ", " << N << " x " << M << " devices");
        const LayerSizes sizes = {(double)B, (double)D, (double)F, C, W};
        const vector<PassCost> both = fsdp_tp_costs(sizes, N, M), fsdp = fsdp_costs(sizes, N),
                               tp = tp_costs(sizes, M);
        for (const Simulated& d : simulate(random_layer(B, D, F), N, M)) {
            auto check = [&](const PassCost& cost, int pass, double bytes) {
                CHECK(cost.flops == d.flops[pass]);
                CHECK(cost.communication == doctest::Approx(bytes / W).epsilon(1e-12));
            };
            check(both[0], 0, d.fsdp_bytes[0]);
            check(both[1], 0, d.tp_bytes[0]);
            for (int pass : {0, 1}) {  // the costs begin with backward
                if (M == 1) { check(fsdp[1 - pass], pass, d.fsdp_bytes[pass]); }
                if (N == 1) { check(tp[1 - pass], pass, d.tp_bytes[pass]); }
            }
        }
        CHECK(both[2].communication == std::max(both[0].communication, both[1].communication));
        CHECK(both[3].communication ==
              doctest::Approx(both[0].communication + both[1].communication));
    }
}
TEST_CASE(
    "calcs: communication is the limit from the first whole number of devices above the bound on") {
    for (auto costs_of : {fsdp_costs, tp_costs}) {
        for (double GB_per_s : {450.0, 97.3, 50.0}) {
            const LayerSizes l = {65536, 4096, 11008, 989e12, GB_per_s * 1e9};
            for (size_t pass = 0; pass < 2; pass++) {
                const int most = (int)costs_of(l, 2)[pass].most;
                INFO(GB_per_s << " GB/s, " << costs_of(l, 2)[pass].what << ", " << most
                              << " devices");
                const PassCost fits = costs_of(l, most)[pass], beyond = costs_of(l, most + 1)[pass];
                CHECK(fits.communication <= fits.flops / l.C);
                CHECK(beyond.communication > beyond.flops / l.C);
            }
        }
    }
}
TEST_CASE("calcs: fsdp_tp_calcs's bounds are those of a search over all splits") {
    // both axes, no FSDP, no TP, and on either side of where TP stops to pay
    for (auto [B, F] : {std::pair(65536., 11008.),
                        {2048., 10240.},
                        {1024., 1048576.},
                        {65536., 64.},
                        {65536., 1600.},
                        {65536., 1300.}}) {
        const LayerSizes l = {B, 128, F, 989e12, 450e9};
        for (int way : {2, 3}) {  // overlapped, in turn: their costs are checked above
            auto fits = [&](double n, double m) {
                const PassCost c = fsdp_tp_costs(l, n, m)[way];
                return c.communication <= c.flops / l.C;
            };
            double best = 1;
            for (double n = 1; fits(n, 1); n += 0.0005) {
                double fitting = 1, beyond = 1e6;
                for (int i = 0; i < 60; i++) {
                    const double middle = (fitting + beyond) / 2;
                    double& bound = fits(n, middle) ? fitting : beyond;
                    bound = middle;
                }
                best = std::max(best, n * fitting);
            }
            INFO("B " << B << ", F " << F << ", way " << way);
            CHECK(fsdp_tp_costs(l, 4, 2)[way].most == doctest::Approx(best).epsilon(1e-3));
        }
    }
}

static Options handout() {  // main.cu's defaults
    Options o;
    o.tokens = 65536;
    o.d_model = 4096;
    o.d_ff = 11008;
    o.tflops = 989;
    o.bandwidth_gb = 450;
    o.devices = 8;
    o.fsdp = 4;
    o.tp = 2;
    o.tensor_mb = 1000;
    return o;
}
static string csv_of(int (*command)(const Options&), const Options& o) {
    RestoreContext restore;
    context.csv = true;
    return printed([&] { command(o); });
}
TEST_CASE("calcs: alternate_ring_all_reduce's bytes are those that a ring counts") {
    for (int N : {2, 5}) {
        vector<Vector> data(N, Vector(10 * N));
        Vector sent(N);
        vector<Member> members;
        for (int i = 0; i < N; i++) { members.push_back({&data[i], &sent[i]}); }
        ring_all_reduce(members);
        Options o = handout();
        o.tensor_mb = 10 * N * 2e-6;
        o.devices = N;
        o.bandwidth_gb = 1e-6;  // a byte takes 1 ms
        const string text = csv_of(cmd_alternate_ring_all_reduce, o);
        CHECK_MESSAGE(has(text, strprintf("= %g ms.\n", sent[0])), text);
    }
}

// -------------------------------------------------------------------------------------------------
// Answers and options

static void check_calcs_say(const string& text, const vector<string>& phrases) {
    for (const string& phrase : phrases) {
        CHECK_MESSAGE(has(text, phrase), phrase, " in: ", text);
    }
    for (const string never : {"nan", "inf ", " ,"}) {
        CHECK_MESSAGE(!has(text.substr(text.find("\n# (a)") + 1), never), text);
    }
}
TEST_CASE("calcs: answers") {
    Options o = handout();
    check_calcs_say(csv_of(cmd_alternate_ring_all_reduce, o),
                    {"takes (N - 1) S / W = (8 - 1) x 1e+09 / 4.5e+11 = 15.56 ms", " = 3.889 ms.\n",
                     "That is N / 2 = 4 times as long"});
    check_calcs_say(
        csv_of(cmd_data_parallel_calcs, o),
        {"(a) Backward: 12 B D D_FF / N = 12 x 65536 x 4096 x 11008 / 8 = 4.432e+12 FLOP, 6 "
         "products",
         "(b) Backward: 12 D D_FF (N - 1) / (N W) = 12 x 4096 x 11008 x (8 - 1) / (8 x 4.5e+11) = "
         "1.052 ms. ",
         "twice, to all-reduce the gradients.",
         "(c) N <= 1 + B W / C = 1 + 65536 x 4.5e+11 / 9.89e+14 = 30.82 devices, from 12 D D_FF"});
    check_calcs_say(
        csv_of(cmd_fsdp_calcs, o),
        {"Forward: 6 B D D_FF / N = 6 x 65536 x 4096 x 11008 / 8 = 2.216e+12 FLOP, 3 products",
         "Forward: 6 D D_FF (N - 1) / (N W) = 6 x 4096 x 11008 x (8 - 1) / (8 x 4.5e+11) = 0.526 "
         "ms",
         "once, to gather the weights.", "= 30.82 devices in both passes"});
    check_calcs_say(csv_of(cmd_tp_calcs, o),
                    {"dx1(i) = dz(i) * f'(x1(i)) * x2(i)",
                     "(c) Forward: 4 B D (N_TP - 1) / (N_TP W) = 4 x 65536 x "
                     "4096 x (8 - 1) / (8 x 4.5e+11) = 2.088 ms",
                     "N_TP <= 1 + 3 D_FF W / C = 16.03 devices",
                     "N_TP <= 1 + 3 D_FF W / (2 C) = 1 + 3 x 11008 x 4.5e+11 / "
                     "(2 x 9.89e+14) = 8.513 devices"});
    check_calcs_say(
        csv_of(cmd_fsdp_tp_calcs, o),
        {"max(6 x 4096 x 11008 x (4 - 1), 4 x 65536 x 4096 x (2 - 1)) / (4 x 2 x 4.5e+11) = "
         "0.2983 ms. FSDP's gather",
         "1 + 65536 x 4.5e+11 / 9.89e+14 = 30.82, where N_TP cancels.",
         "So N <= 30.82 x 8.513 = 262.4 devices.", "= 1148846. ",
         "N_FSDP = Q / (6 D_FF) = 17.39, N_TP = Q / (4 B) = 4.382. So N <= Q^2 / (24 B "
         "D_FF) = 1148846^2 / (24 x 65536 x 11008) = 76.23 devices."});
}
TEST_CASE("calcs: answers where communication is the limit, or an axis goes") {
    Options few = handout(), narrow = handout(), short_batch = handout();
    few.tokens = 2048;
    narrow.d_ff = 64;
    short_batch.tokens = 1024;
    check_calcs_say(csv_of(cmd_data_parallel_calcs, few), {"= 1.932 devices"});
    check_calcs_say(
        csv_of(cmd_fsdp_tp_calcs, narrow),
        {"The other axis then has less than one device. So there is only the FSDP axis, and "
         "N <= 30.82 devices"});
    check_calcs_say(
        csv_of(cmd_fsdp_tp_calcs, short_batch),
        {"The other axis then has less than one device. So there is only the TP axis, and N "
         "<= 8.513 devices"});
}
TEST_CASE("calcs: wrong options") {
    for (const auto& [option, value] : {std::pair("--devices", "1"),
                                        {"--devices", "1048577"},
                                        {"--devices", "2.5"},
                                        {"--tflops", "nan"},
                                        // a product could be beyond a double
                                        {"--tflops", "1e308"}}) {
        CHECK(run_cs336({"tp_calcs", option, value}).exit_code == 2);
    }
    for (const string value : {"3.4e38", "1.2e-38"}) {
        const Run r = run_cs336(
            {"fsdp_tp_calcs", "--tflops", value, "--tokens", "1048576", "--d_ff", "1048576"});
        CHECK(r.exit_code == 0);
        CHECK_MESSAGE(!(has(r.out, "inf ") || has(r.out, "nan")), r.out);
    }
}

// -------------------------------------------------------------------------------------------------
// communication_accounting

static Options xxl() {  // main.cu's defaults
    Options o;
    o.d_model = 16384;
    o.d_ff = 53248;
    o.num_layers = 126;
    o.tokens = 2048;
    o.tflops = 460;
    o.bandwidth_gb = 180;
    o.fsdp = 16;
    o.tp = 4;
    return o;
}
TEST_CASE("accounting: table and answers") {
    check_calcs_say(
        csv_of(cmd_communication_accounting, xxl()),
        {"(a) P = 2 D F L = 2 x 16384 x 53248 x 126 = 2.198e+11 parameters take 4 P = 879.4 GB in "
         "fp32.",
         "16 P = 3517.6 GB, the memory of 3517.6 / 80 = 43.97, so 44 GPUs.", "= 17.55 MB per token",
         "below 95 GB from N = 38 devices on; with 2048 tokens per device, from N = 46 on.",
         "= 10828 tokens per device on", "= 2555.6 FLOP per byte.",
         " Forward is compute bound from B = (alpha X / M_X) / (1 - alpha Y / (M_Y F)) = (2555.6 x "
         "16 / 2) / (1 - 2555.6 x 4 / (1 x 53248)) = 25302 tokens overall, 395.3 per chip",
         "20445 tokens (319.4 per chip)", "259.3 tokens per chip, with (X, Y) = (8, 8).",
         "= 245.3, if X could be 2 alpha N / (M_Y F) = 6.1.", "= 61.3."});
}
TEST_CASE("accounting: where nothing fits") {
    Options o = xxl();
    o.tp = 21;
    CHECK_THROWS_WITH(cmd_communication_accounting(o),
                      "--tp: got 21; no batch is compute bound from M_Y F W / C = 20.8 on");
    o = xxl();
    o.tokens = 10828;
    CHECK_THROWS_WITH(cmd_communication_accounting(o),
                      "--tokens: got 10828, takes fewer than 10828");
}

// -------------------------------------------------------------------------------------------------
// Tests of fsdp.cu.

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
    const Run r = leaderboard({"--size", "8B", "--context_length", "32768", "--batch_size", "2"});
    CHECK(r.exit_code == 1);  // no row ran
    CHECK(has(r.out,
              "size 8B (8126 million parameters, 16.3 GB; d_model 4096, d_ff 11008, 34 layers, 32 "
              "heads"));
    CHECK(has(r.out, "; a sequence per backward; 5.044e+15 FLOP per step"));
    CHECK(has(column(r.out, "Total Time (ms)").at(0), "OOM ("));
    CHECK(has(r.err, "no step ran: each rank needs "));
}
TEST_CASE("leaderboard: wrong options") {
    for (const auto& [words, line] : vector<std::pair<Words, string>>{
             {{"--nproc", "2", "--batch_size", "3"},
              "--batch_size: got 3, takes a multiple of 2, the number of ranks"},
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
    CHECK(chosen(139, 2) == "flash, recompute" + chunk);                       // two H200s: 4.15 s
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
    runs[2].gather = {0.3, 0.86, 26.13};
    runs[2].wait = {0.225, 0.801, 0.003};
    return runs;
}
TEST_CASE("answers: fsdp_accounting") {
    vector<FsdpRun> runs = runs_of(58510.1, 45514.1, 27671.2);  // xl in fp32
    check_calcs_say(
        said(runs),
        {"**(a)** FSDP should save 25991.9 MiB against DDP and 12995.9 MiB against a sharded "
         "optimizer. Weights, gradients and two moments take 16 Psi bytes with DDP, (8 + 8/N) Psi "
         "with the sharded optimizer and 16 Psi/N with FSDP (Psi = 3.407e+09, N = 2).\n",
         "FSDP takes 30838.9 MiB less than DDP. It takes 4847.0 MiB less than expected (MiB: ",
         "FSDP takes 17842.9 MiB less than the sharded optimizer. It takes 4847.0",
         "**(b)** The gathers come in time for forward: those after layer 0 take 26.130 ms, and "
         "forward waits 0.003 ms for them.",
         "it waits 0.225 and 0.801 ms.\n"});
    // Two whole units and their gradients are more than what sharding saves: a CPU run of a model
    // of 13.8 MiB.
    CHECK(has(said(runs_of(57.6, 43.9, 47.2), 2, 3609728),
              "FSDP takes 3.3 MiB more than the sharded optimizer. It takes 17.1 MiB more than "
              "expected (MiB: "));
    CHECK(has(said(runs, 2, 3406809600, 2), "8 Psi bytes with DDP, (4 + 4/N) Psi with"));
    runs[2].wait[2] = 12.4;
    CHECK(has(said(runs),
              "**(b)** Not all gathers come in time for forward: those after layer 0 take 26.130 "
              "ms, and forward waits 12.400 ms for them."));
    // bf16: the largest cause is the sharded optimizer's copies, then its activations.
    MemoryUse other{}, fsdp{};
    auto set = [](MemoryUse& use, vector<double> mib) {
        const Category all[] = {PARAMETERS, GRADIENTS, OPTIMIZER, WEIGHT_COPIES, ACTIVATIONS};
        for (int i = 0; i < 5; i++) { use.peak_by[all[i]] = (size_t)(mib[i] * 1048576); }
    };
    set(other, {1000, 1000, 1000, 6448.8, 4000});
    set(fsdp, {500, 1301.1, 1000, 400, 425.8});
    CHECK(causes(other, fsdp, 500 * 1048576.0, 0) ==
          "weight copies -6048.8, activations -3574.2 and gradients +801.1");
    runs[0].oom = (size_t)(192.5 * (1 << 30));  // 10B
    CHECK(has(said(runs), "**(a)** DDP did not fit.\n"));
    runs[2].oom = 1 << 30;
    runs[2].gather.clear();
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
    CHECK(text() ==
          "A step of 8B on 2 ranks takes 4157.9 ms (mean of 4 steps): 1213 TFLOP/s. The peak is "
          "127.9 GiB per rank.\n");
    r.world = 1;
    r.flops = 4.67e10;
    r.ms.total = {2912.9, 0, 2912.9, 2912.9, 2912.9, 1};
    CHECK(has(text(), " on 1 rank takes 2912.9 ms (mean of 1 step): 0.01603 TFLOP/s. "));
}
