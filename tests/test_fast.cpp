// Tests of what the files in fast/ do otherwise than those that they speed up. (The implementations
// of attention and of AdamW are tested where their tables are.)
#include "fast/graphs.cu"

#include "test.h"

static bool is_split(const Model& model) {
    Tensor part = detached(model.lm_head);
    const bool split = fast_ways.restore_part(part);
    if (split) { fast_ways.keep_part(part, BF16); }
    CHECK(part.dtype == (split ? BF16 : model.weights.dtype));
    return split;
}

// A step as graphs and launch by launch, also where something changes in between: the same bits, or
// where blocks add up dQ in no fixed order the same but for rounding.
struct GraphCase {
    Precision precision;
    bool recompute;
    const char* checkpoint;
};
static vector<double> losses_and_weights(const GraphCase& c, bool graphs) {
    const ModelConfig config = {"graphs", 64, 96, 2, 4, 101};
    context.mode = FLASH, context.each_launch = !graphs, context.precision = c.precision;
    context.recompute = c.recompute, context.checkpoint = checkpointing_from(c.checkpoint);
    context.head_chunk = c.precision == PREC_PURE_BF16 ? 25 : 0;
    Model model = make_model(config);
    init_weights(model, 7);
    fast_ways.keep_weights(model);
    make_optimizer_state(model);
    LossScaler scaler;
    vector<double> numbers;
    for (int step = 0; step < 12; step++) {
        Batch batch = random_batch(2, step < 8 ? 33 : 64, config.vocab_size, step);
        bool after_forward = false;
        Tensor loss =
            forward_backward(model, batch, step < 4 ? 1 : 2, [&] { after_forward = true; });
        CHECK(after_forward);
        numbers.push_back(to_doubles(loss)[0]);
        numbers.push_back(optimizer_step(model, AdamW(), scaler, 0.5));
        if (step == 3) {
            run_phase(FORWARD, model, random_batch(3, 65, config.vocab_size, 1), scaler);
        }
        if (step == 5) {  // somebody else writes the weights
            fast_ways.restore_weights(model);
            scale_in_place(model.weights, 0.5);
            fast_ways.keep_weights(model);
        }
    }
    CHECK((bool)model.fast == graphs);
    fast_ways.restore_weights(model);
    for (double w : to_doubles(model.weights)) { numbers.push_back(w); }
    return numbers;
}
TEST_CASE("model: steps by CUDA graphs") {
    if (!begin<OnCUDA>()) { return; }
    for (const GraphCase& c : {GraphCase{FP32, false, "none"},
                               {PREC_BF16, false, "none"},
                               {PREC_BF16, true, "none"},
                               {PREC_BF16, true, "1"},
                               {FP32, false, "ffn"},
                               {PREC_BF16, false, "nested"},
                               {PREC_PURE_BF16, false, "1"}}) {
        CAPTURE(name_of(c.precision) + (" " + string(c.checkpoint)));
        const vector<double> fast[] = {losses_and_weights(c, false), losses_and_weights(c, true)};
        for (int i = 0; i < 24; i++) {
            CHECK(fast[0][i] == doctest::Approx(fast[1][i]).epsilon(0.02));
        }
        const OnlyFlashV1 same_bits;
        CHECK(losses_and_weights(c, false) == losses_and_weights(c, true));
    }
}
// A step that falls back to single launches gives the same numbers, later, and nobody would hear of
// it. So the steps that benchmarking_script times are counted: of each kind the first is the
// rehearsal.
TEST_CASE("model: a step in mode flash is launched as graphs, in each precision") {
    if (!begin<OnCUDA>()) { return; }
    for (Precision precision : {FP32, TF32, PREC_BF16, PREC_PURE_BF16}) {
        context.precision = precision;
        CAPTURE(name_of(precision));
        for (Mode mode : {FLASH, FUSED}) {
            context.mode = mode;
            const ModelConfig& small = model_sizes[0];
            Model model = make_model(small);
            init_weights(model, 7);
            fast_ways.keep_weights(model);
            LossScaler scaler;
            Batch batch = random_batch(4, 256, small.vocab_size, 7);
            for (auto [phase, launches] :
                 {pair<Phase, int>{FORWARD, 1}, {FORWARD_BACKWARD, 2}, {STEP, 2}}) {
                run_phase(phase, model, batch, scaler);
                const int before = graph_launches;
                for (int step = 0; step < 3; step++) { run_phase(phase, model, batch, scaler); }
                CAPTURE(phase);
                CHECK(graph_launches - before == (mode == FLASH ? 3 * launches : 0));
            }
        }
    }
}
TEST_CASE("model: inference by a CUDA graph") {
    if (!begin<OnCUDA>()) { return; }
    for (Precision precision : {FP32, PREC_BF16}) {
        context.mode = FLASH, context.precision = precision;
        Model model = make_model({"graphs", 64, 96, 2, 4, 101});
        init_weights(model, 7);
        fast_ways.keep_weights(model);
        // of each shape the first is the rehearsal, the second is captured
        for (int call = 0; call < 7; call++) {
            Tensor tokens = random_batch(2, call < 4 ? 33 : 64, 101, call).tokens;
            if (call == 3) { scale_in_place(model.ln_final, 0.5); }
            vector<float> by_graph = to_floats(infer(model, tokens));
            CHECK((bool)model.fast);
            context.each_launch = true;
            CHECK(to_floats(infer(model, tokens)) == by_graph);
            context.each_launch = false;
        }
    }
}
#ifdef HAVE_CUDA
// A capture that fails, as where a buffer is another than in its rehearsal, costs that one call:
// the next is a rehearsal again, and no launch reports an error of the capture's.
TEST_CASE("model: after a capture that failed steps go by graphs again") {
    if (!begin<OnCUDA>()) { return; }
    context.mode = FLASH;
    Model model = make_model({"graphs", 64, 96, 2, 4, 101});
    init_weights(model, 7);
    fast_ways.keep_weights(model);
    LossScaler scaler;
    Batch batch = random_batch(2, 33, 101, 7);
    for (Phase phase : {FORWARD, FORWARD_BACKWARD}) {
        for (bool last_place : {false, true}) {  // the last of a step is one of its backward
            CAPTURE(phase);
            CAPTURE(last_place);
            model.fast = nullptr;
            run_phase(phase, model, batch, scaler);
            auto& places = ((StepGraphs*)model.fast.get())->places->places;
            (last_place ? places.back() : places[0]).bytes += 512;
            CHECK_THROWS_WITH(run_phase(phase, model, batch, scaler),
                              doctest::Contains("allocates otherwise than its rehearsal"));

            const int before = graph_launches;
            run_phase(phase, model, batch, scaler);  // a rehearsal
            CHECK(graph_launches == before);
            run_phase(phase, model, batch, scaler);
            CHECK(graph_launches > before);
        }
    }
}
#endif
// A graph's block need not be much larger than what a step holds at most, gaps between its buffers
// included.
TEST_CASE("model: a step packs well") {
    begin<OnCPU>();
    for (auto [mode, precision] : vector<pair<Mode, Precision>>{
             {FUSED, FP32}, {FUSED, PREC_BF16}, {FLASH, FP32}, {FLASH, PREC_BF16}}) {
        context.mode = mode, context.precision = precision;
        // only planned for, so no GPU is needed; but a build for GPUs is
        context.device = mode == FLASH ? CUDA : CPU;
        if (mode == FLASH && !fastest_flash(CUDA, matmul_dtype(), 64)) { continue; }
        for (auto [size, recompute] : {pair<int, bool>{0, false}, {3, false}, {3, true}}) {
            const ModelConfig& config = model_sizes[size];
            context.recompute = recompute;
            Planning planning;
            Model model = make_model(config);
            fast_ways.keep_weights(model);
            LossScaler scaler;
            Batch batch = random_batch(4, 256, config.vocab_size, 0);
            run_phase(FORWARD, model, batch, scaler);  // rope is there
            size_t before = memory_use(META).now;
            reset_peak(META);
            auto first = make_shared<StepPlaces>(), again = make_shared<StepPlaces>();
            auto step = [&] {
                backward(cross_entropy(forward(model, batch.tokens), batch.targets));
            };
            allocate_in(first, step);
            double held = memory_use(META).peak - before, planned = first->plan();
            zero_gradients(model);
            allocate_in(again, step);
            REQUIRE(again->places.size() == first->places.size());
            for (size_t i = 0; i < again->places.size(); i++) {
                CHECK(again->places[i].bytes == first->places[i].bytes);
            }
            CAPTURE(held);
            CHECK(planned >= held);
            CHECK(planned < 1.05 * held);
            for (const StepPlaces::Place& p : first->places) {  // no two lie on each other
                for (const StepPlaces::Place& q : first->places) {
                    if (&p <= &q || p.to < q.from || q.to < p.from) { continue; }
                    if (p.offset < q.offset + q.bytes && q.offset < p.offset + p.bytes) {
                        FAIL("two at one place");
                    }
                }
            }
        }
    }
}
TEST_CASE_TEMPLATE("model: split weights are the fp32 weights, and their upper halves bf16", D,
                   OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    context.mode = FUSED, context.precision = PREC_BF16;
    for (const ModelConfig& config : {tiny, odd}) {
        Model model = make_model(config);
        init_weights(model, 7);
        // Ties to an even and to an odd neighbour, the largest number, the smallest, 0, -0,
        // infinity, NaN.
        vector<uint32_t> bits = {0x3f808000, 0xbf818000, 0x7f7fffff, 1,
                                 0,          0x80000000, 0xff800000, 0x7fffffff};
        vector<float> special(bits.size());
        memcpy(special.data(), bits.data(), 4 * bits.size());
        copy(view(model.lm_head, 0, {8}), to_device(from_floats(special, {8}), D::device));
        vector<float> weights = to_floats(model.weights);
        size_t held = memory_use(D::device).now;
        fast_ways.keep_weights(model);
        CHECK(is_split(model));
        CHECK(memory_use(D::device).now == held);
        Tensor upper = detached(model.lm_head);
        upper.dtype = BF16;
        vector<float> rounded = to_floats(upper);
        for (size_t i = 0; i < rounded.size(); i++) {  // lm_head is the arena's first
            uint32_t exact;
            memcpy(&exact, &weights[i], 4);
            CAPTURE(exact);
            if (weights[i] != weights[i]) {
                CHECK(rounded[i] != rounded[i]);
            } else if ((exact & 0xffff) == 0x8000) {
                CHECK(std::abs(rounded[i]) > std::abs(weights[i]));
            } else {
                CHECK(rounded[i] == bf16_to_float(float_to_bf16(weights[i])));
            }
        }
        context.precision = FP32;
        LossScaler scaler;
        run_phase(FORWARD, model, random_batch(2, 9, config.vocab_size, 7), scaler);
        CHECK(!is_split(model));
        vector<float> again = to_floats(model.weights);
        CHECK(again[7] != again[7]);
        again[7] = weights[7] = 0;
        CHECK(memcmp(again.data(), weights.data(), 4 * weights.size()) == 0);
        for (Precision precision : {FP32, PREC_FP16}) {
            context.precision = precision;
            fast_ways.keep_weights(model);
            CHECK(!is_split(model));
        }
        context.precision = PREC_BF16;
    }
}
TEST_CASE_TEMPLATE("model: weights are whole where split ones lay that are gone", D, OnCPU,
                   OnCUDA) {
    if (!begin<D>()) { return; }
    context.mode = FUSED, context.precision = PREC_BF16;
    set<char*> places;
    bool is_old_place = false;
    for (int i = 0; i < 50 && !is_old_place; i++) {
        Model model = make_model(tiny);
        CHECK(!is_split(model));
        init_weights(model, 7);
        fast_ways.keep_weights(model);
        CHECK(is_split(model));
        is_old_place = !places.insert(model.weights.data).second;
    }
#ifndef __SANITIZE_ADDRESS__  // which gives no address twice
    CHECK(is_old_place);      // else this tests nothing
#endif
}
TEST_CASE_TEMPLATE("model: split weights learn what whole ones do", D, OnCPU, OnCUDA) {
    if (!begin<D>()) { return; }
    context.mode = FUSED, context.precision = PREC_BF16;
    for (bool arena : {false, true}) {
        for (const ModelConfig& config : {tiny, odd, even}) {
            vector<double> weights[2], start;
            for (bool split : {false, true}) {
                Model model = make_model(config);
                init_weights(model, 7);
                start = to_doubles(model.weights);
                make_optimizer_state(model);
                if (arena) { make_gradients(model); }
                if (split) { fast_ways.keep_weights(model); }
                AdamW adamw;
                adamw.lr = 0.03f;
                LossScaler scaler;
                for (int step = 0; step < 3; step++) {
                    forward_backward(model, random_batch(2, 9, config.vocab_size, step), 1);
                    CHECK(model.lm_head.gradient->value.dtype == (arena ? F32 : BF16));
                    CHECK(model.ln_final.gradient->value.dtype == F32);
                    CHECK(model.embedding.gradient->value.dtype == F32);
                    optimizer_step(model, adamw, scaler, 0.5);
                }
                CHECK(is_split(model) == split);
                fast_ways.restore_weights(model);
                weights[split] = to_doubles(model.weights);
            }
            CAPTURE(config.name);
            double apart = 0, way = 0;
            for (size_t i = 0; i < start.size(); i++) {
                apart += pow(weights[1][i] - weights[0][i], 2),
                    way += pow(weights[0][i] - start[i], 2);
            }
            // not 0: a cast rounds one weight in 131072, a tie, to the other side
            CHECK(sqrt(apart / way) < 0.02);
        }
    }
}
