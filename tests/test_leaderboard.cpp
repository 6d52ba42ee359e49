// Tests of leaderboard.cu.
#include "test.h"

using Words = std::vector<std::string>;
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
static double number(const Run& r, const char* name) { return std::stod(column(r.out, name).at(0)); }
static void check_parts(const Run& r, size_t parts) {
    const std::vector<std::string> ms = column(r.out, "mean ms");  // of the step, and of its parts
    REQUIRE(ms.size() == 1 + parts);
    double sum = 0;
    for (size_t k = 1; k <= parts; k++) {
        CHECK(std::stod(ms[k]) > 0);
        sum += std::stod(ms[k]);
    }
    CHECK(sum == doctest::Approx(std::stod(ms[0])).epsilon(0.1));
}

TEST_CASE("leaderboard: a small step, its parts, its predicted peak") {
    const Run r = tiny_step({});
    CHECK(has(r.out, "vocabulary 5000, causal; "));
    CHECK(has(r.out, "custom (20 tokens per sequence, batch 2; pure_bf16, mode fused, head chunk 2048): 2 layers"));
    CHECK(has(r.out, "; one rank; 3 warmup, 3 steps; "));
    CHECK(number(r, "peak MiB") > 2);
    CHECK(number(r, "peak MiB") == number(r, "predicted MiB"));
    CHECK(number(r, "tokens/s") == doctest::Approx(40 / (number(r, "mean ms") / 1e3)).epsilon(0.1));
    CHECK(number(r, "first loss") == doctest::Approx(std::log(5000)).epsilon(0.3));
    CHECK(column(r.out, "MFU %").at(0) == "-");  // the peak rate is a GPU's
    check_parts(r, 4);
    CHECK(has(r.out, "on one rank takes "));
    // With a checkpoint the first step's loss is that of the same model.
    const Run whole = tiny_step({"--checkpoint", "ffn"});
    CHECK(has(whole.out, "mode fused, checkpoint ffn, head chunk 2048)"));
    CHECK(number(whole, "first loss") == doctest::Approx(number(r, "first loss")).epsilon(1e-4));
}
TEST_CASE("leaderboard: two ranks give one rank's losses") {
    if (lacks("gloo", CPU, 2)) { return; }
    const Run one = tiny_step({}), two = tiny_step({"--nproc", "2"});
    CHECK(has(two.out, "; 2 ranks, FSDP over gloo, "));
    // Measured with 6 seeds: 5e-5 at most, while the loss falls by 0.03 of itself.
    const double LOSS_NOISE = 3e-4;
    for (const char* name : {"first loss", "last loss"}) {
        CAPTURE(name);
        CHECK(number(two, name) == doctest::Approx(number(one, name)).epsilon(LOSS_NOISE));
    }
    CHECK(number(two, "last loss") < 0.98 * number(two, "first loss"));
    CHECK(number(two, "peak MiB") == doctest::Approx(number(two, "predicted MiB")).epsilon(0.02));
    check_parts(two, 5);
    CHECK(column(two.out, "part").at(4) == "exposed communication");
    CHECK(has(two.out, " on 2 ranks takes "));
    CHECK(has(two.out, " MiB per rank, predicted "));
}
TEST_CASE("leaderboard: several sequences per rank are a backward each") {
    if (lacks("gloo", CPU, 2)) { return; }
    const Run one = tiny_step({}, "4"), two = tiny_step({"--nproc", "2", "--checkpoint", "ffn:1"}, "4");
    for (const char* name : {"first loss", "last loss"}) {
        CHECK(number(two, name) == doctest::Approx(number(one, name)).epsilon(3e-4));
    }
    CHECK(number(one, "peak MiB") == number(one, "predicted MiB"));
    CHECK(number(two, "peak MiB") == doctest::Approx(number(two, "predicted MiB")).epsilon(0.02));
    CHECK(has(two.out, "mode fused, checkpoint ffn:1, head chunk 2048)"));
    check_parts(one, 4), check_parts(two, 5);
}
TEST_CASE("leaderboard: the handout's step is counted and predicted where it does not fit") {
    const Run r = leaderboard({"--size", "8B", "--context_length", "32768", "--batch_size", "2"});
    CHECK(r.exit_code == 1);  // no row ran
    CHECK(has(r.out, "): 34 layers, d_model 4096, d_ff 11008, 32 heads, vocabulary 151936, causal; "));
    CHECK(has(r.out, "; a sequence per backward; 5.044e+15 FLOP per step"));
    CHECK(has(column(r.out, "mean ms").at(0), "OOM ("));
    CHECK(has(r.out, " on one rank did not fit: it would hold "));
}
TEST_CASE("leaderboard: wrong options") {
    for (const auto& [words, line] : std::vector<std::pair<Words, std::string>>{
             {{"--nproc", "2", "--batch_size", "3"}, "--batch_size: got 3, takes a multiple of 2, the number of ranks"},
             {{"--mode", "eager"}, "--mode eager and --precision pure_bf16: the loss goes by chunks"},
             {{"--precision", "fp16"}, "--mode fused and --precision fp16: the loss goes by chunks"}}) {
        const Run r = leaderboard(words);
        CHECK(r.exit_code == 2);
        CHECK_MESSAGE(has(r.err, line), r.err);
    }
}
TEST_CASE("leaderboard: a default batch has a sequence for each rank") {
    if (lacks("gloo", CPU, 3)) { return; }
    const Run r = leaderboard({"--nproc", "3", "--context_length", "8", "--num_layers", "1", "--d_model", "16",
                               "--d_ff", "16", "--num_heads", "1", "--vocab_size", "30"});
    REQUIRE_MESSAGE(r.exit_code == 0, r.err);
    CHECK(has(r.out, "(8 tokens per sequence, batch 3; "));
}

// What runs again of the 8.1B step, for a card with so many GiB free, on META.
static std::string chosen(
    double gib, int world, const std::function<void(Options&)>& typed = [](Options&) {}) {
    RestoreContext restore;
    context = Context();
    context.device = CUDA;  // only planned for
    context.precision = PREC_PURE_BF16, context.mode = FLASH, context.head_chunk = 2048;
    Options o;
    o.edition = "2026", o.size = {"8B"}, o.context_length = 32768, o.batch_size = std::max(2, world),
    o.vocab_size = 10000;
    typed(o);
    const double room = gib * (1 << 30) * 30 / 31;
    choose_what_runs_again(o, world, room);
    const int n = context.checkpoint;
    std::string text = caption_of(FLASH);
    const size_t needs = leaderboard_peak(o, world);
    if (n == 1) { return text + (needs > room ? ", too large" : ""); }
    CHECK(needs <= room);
    if (n < 0) {  // and it fills the card: two fewer do not fit
        CHECK(needs > room - 4.1 * (1 << 30));
        context.checkpoint = n - 2;
        CHECK(leaderboard_peak(o, world) > room);
    }
    return text;
}
TEST_CASE("leaderboard: by default as little runs again as fits") {
    const std::string chunk = ", head chunk 2048";
    CHECK(chosen(139, 2) == "flash, recompute" + chunk);  // two H200s: 4.15 s
    CHECK(chosen(137, 2) == "flash, recompute" + chunk);  // the driver takes some
    CHECK(chosen(139, 6) == "flash, recompute" + chunk);
    CHECK(chosen(78, 2) == "flash, recompute, checkpoint blocks:11" + chunk);  // two H100s
    CHECK(chosen(101, 2) == "flash, recompute, checkpoint ffn:28" + chunk);
    CHECK(chosen(44, 2) == "flash, recompute, checkpoint blocks:34" + chunk);
    CHECK(chosen(40, 2) == "flash, recompute, checkpoint 1" + chunk + ", too large");
    CHECK(chosen(300, 2) == "flash" + chunk);
    CHECK(chosen(220, 1) == "flash" + chunk);
    CHECK(chosen(178, 1) == "flash, recompute" + chunk);
    CHECK(chosen(139, 1) == "flash, recompute, checkpoint ffn:25" + chunk);  // one H200
    CHECK(chosen(139, 2, [](Options& o) { o.num_layers = 2, o.d_model = 128, o.num_heads = 2; }) == "flash" + chunk);
}
