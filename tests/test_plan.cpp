// Tests of plan.cu.
#include "test.h"

TEST_CASE("plan: a default is scaled down and named; what was typed stays") {
    begin_on(CPU);
    Options o;
    o.batch_size = 4, o.steps = 10, o.top = 3, o.warmup = {5}, o.context_lengths = {128, 256}, o.sizes_mb = {0.5, 1e5};
    o.size = {"small", "medium", "large", "xl", "2.7B"};
    o.given["steps"] = "10";
    Plan p{o};
    CHECK(p.scaled_down == "");
    p.shrink("batch_size", &Options::batch_size, 1);
    p.shrink("steps", &Options::steps, 2);
    p.shrink("top", &Options::top, 3);
    p.shrink("warmup", &Options::warmup, {1});
    p.shrink("context_length", &Options::context_lengths, {128, 256, 512});
    p.shrink("context_length", &Options::context_lengths, {128});
    p.shrink("sizes_mb", &Options::sizes_mb, {0.5}, "only half a MB");
    p.shrink_size();
    CHECK(p.scaled_down ==
          "; scaled down: batch_size 1 instead of 4, warmup 1 instead of 5, context_length 128 instead of 128,256, "
          "only half a MB, size small instead of small,medium,large,xl,2.7B");
    CHECK(p.o.steps == 10);
    CHECK(p.o.context_lengths == std::vector<int>{128});
    REQUIRE(configs_of(p.o).size() == 1);
    CHECK(configs_of(p.o)[0].name == "small");
    CHECK(has(p.origin(), "; commit " + commit() + p.scaled_down));

    o.d_model = 128, o.num_heads = 4;
    Plan custom{o};
    custom.shrink_size();
    CHECK(custom.scaled_down == "");
    CHECK(configs_of(custom.o)[0].name == "custom");
}

TEST_CASE("plan: xl is each edition's own, the other sizes are the same in both") {
    begin_on(CPU);
    auto width = [](const char* edition, const char* size) {
        Options o;
        o.edition = edition, o.size = {size}, o.vocab_size = 10000;
        std::vector<ModelConfig> configs = configs_of(o);
        REQUIRE(configs.size() == 1);
        CHECK(size_option(configs[0]) == size);
        return configs[0].name + strprintf(" %d", configs[0].d_model);
    };
    CHECK(width("2025", "xl") == "xl 1600");
    CHECK(width("2026", "xl") == "xl (2026) 2560");
    for (const char* edition : {"2025", "2026"}) {
        CHECK(width(edition, "small") == "small 768");
        CHECK(width(edition, "2.7B") == "2.7B 2560");
        CHECK(width(edition, "10B") == "10B 4608");
    }
    Options o;
    o.edition = "2026", o.size = {"small", "xl", "10B"}, o.vocab_size = 10000;
    Plan p{o};
    p.shrink_size();
    CHECK(p.scaled_down == "; scaled down: size small instead of small,xl (2026),10B");
}

TEST_CASE("plan: the default mode falls back to fused, a typed one is refused") {
    begin_on(CPU);
    Options o;
    o.d_model = 96, o.num_heads = 2, o.vocab_size = 10;  // no FlashAttention for head size 48
    o.precision = {"fp32", "bf16"}, o.mode = {"flash"};
    Plan p{o};
    p.choose_models();
    CHECK(p.precisions == std::vector<Precision>{FP32, PREC_BF16});
    CHECK(p.modes == std::vector<Mode>{FUSED});
    o.given["mode"] = "flash";
    Plan typed{o};
    CHECK_THROWS_AS(typed.choose_models(), Failure);
}

TEST_CASE("plan: what does not fit is not tried, and what runs out of memory is a row") {
    begin_on(CPU);
    int calls = 0;
    auto run = [&] { calls++; };
    Attempt too_large{false, SIZE_MAX}, held{false, SIZE_MAX}, small, breaks{false, size_t(3) << 29}, fails;
    too_large.run(run);
    CHECK(calls == 0);
    CHECK(!too_large.ran);
    held.run(run, SIZE_MAX);  // all of it is there already
    small.run(run);
    CHECK(calls == 2);
    CHECK((held.ran && small.ran));
    CHECK(small.cell("1.5") == "1.5");
    Tensor x = require_gradient(from_floats({1}, {1}));
    breaks.run([&] {
        square(x);
        throw OutOfMemory(1, "no room");
    });
    CHECK(!breaks.ran);
    CHECK(breaks.cell("1.5") == "OOM (1.5 GiB)");
    CHECK(x.gradient->uses == 0);  // the tape is empty
    CHECK_THROWS_AS(fails.run([] { fail("something else"); }), Failure);
}
