// bench_scaling.cu: how a data parallel step scales with the number of ranks, in each way. A group of ranks is a run of
// its own of the commands that measure one group; here the work is divided and the tables are put together.
//
// Weak scaling: a rank has --batch_size sequences, whatever the number of ranks. Strong scaling: all ranks together
// have as many sequences as the largest group has in weak scaling. Speed-up: tokens per second over those of the
// fastest way on one rank, in the same kind of scaling; N ranks could reach N. Where no step on one rank fits, a rank's
// share of the smallest group that ran takes its place. Efficiency: speed-up / N.
#include "answers.h"
#include "commands.h"

#include <algorithm>
#include <cstdlib>

// The groups are processes, and so are their ranks: the environment reaches all of them.
static const char* const PART_OF_SCALING = "CS336_PART_OF_SCALING";
PartOfScaling::PartOfScaling() { setenv(PART_OF_SCALING, "1", 1); }
PartOfScaling::~PartOfScaling() { unsetenv(PART_OF_SCALING); }
bool PartOfScaling::is_it() { return getenv(PART_OF_SCALING) != nullptr; }

struct Group {
    int ranks, batch_size;  // sequences per rank
    Tables ddp, fsdp;       // what the two commands printed
};
// As words_of types them, for a plan: the commands then scale nothing down.
static Options options_of(const Plan& p, const Group& g) {
    Options o = p.o;
    o.nproc = g.ranks, o.batch_size = g.batch_size, o.bucket_size_mb = {1, 10, 100, 1000};
    for (const char* name : {"size", "batch_size", "context_length", "warmup", "steps"}) { o.given[name] = ""; }
    return o;
}
static std::vector<std::string> words_of(const Plan& p, const Group& g) {
    const ModelConfig& c = p.configs[0];
    const Options& o = p.o;
    std::vector<std::string> words;
    auto option = [&](const char* name, const std::string& value) {
        words.push_back(std::string("--") + name), words.push_back(value);
    };
    option("d_model", std::to_string(c.d_model)), option("d_ff", std::to_string(c.d_ff));
    option("num_layers", std::to_string(c.num_layers)), option("num_heads", std::to_string(c.num_heads));
    option("vocab_size", std::to_string(c.vocab_size)), option("context_length", std::to_string(o.context_length));
    option("batch_size", std::to_string(g.batch_size)), option("nproc", std::to_string(g.ranks));
    option("warmup", std::to_string(o.warmup[0])), option("steps", std::to_string(o.steps));
    option("precision", name_of(context.precision)), option("mode", name_of(context.mode));
    option("checkpoint", name_of_checkpoint(context.checkpoint)), option("reduce_dtype", o.reduce_dtype);
    option("device", name_of(context.device)), option("backend", o.backend);
    option("timeout", strprintf("%g", o.timeout)), option("seed", std::to_string(o.seed));
    if (o.quick) { words.push_back("--quick"); }
    return words;
}
static Tables run_group(const char* command, std::vector<std::string> words, const Group& g, bool* failed) {
    progress("scaling: %s, %d ranks, %d sequences per rank", command, g.ranks, g.batch_size);
    words.insert(words.begin(), command);
    try {
        return tables_in(run_ourselves(words));
    } catch (const Failure& failure) {  // the other tables are worth printing
        note("scaling: %s", failure.what());
        *failed = true;
        return {};
    }
}

static std::vector<TableRow> buckets_of(const Table& ddp) {
    std::vector<TableRow> buckets;
    for (const TableRow& row : rows_of(ddp)) {
        if (row.text("Strategy").compare(0, 8, "bucketed") == 0) { buckets.push_back(row); }
    }
    return buckets;
}
struct MeasuredWay {
    std::string name, time, exposed;  // cells, ms
};
static std::vector<MeasuredWay> ways_of(const Group& g) {
    std::vector<MeasuredWay> ways;
    const Table *ddp = table_with(g.ddp, {"ddp_bucketed_benchmarking; "}),
                *fsdp = table_with(g.fsdp, {"fsdp_accounting (a)"}),
                *waits = table_with(g.fsdp, {"fsdp_accounting (b)"});
    if (!ddp) { ways.push_back({"data parallel", "failed", ""}); }
    if (!fsdp) { ways.push_back({"sharded optimizer and FSDP", "failed", ""}); }
    auto add = [&](const TableRow& row, const std::string& name) {
        ways.push_back({name, row.text("Total Time (ms)"), row.text("Exposed Comm (ms)")});
    };
    for (const TableRow& row : ddp ? rows_of(*ddp) : std::vector<TableRow>()) {
        if (row.text("Strategy").compare(0, 8, "bucketed") != 0) { add(row, row.text("Strategy")); }
    }
    std::vector<TableRow> buckets = ddp ? buckets_of(*ddp) : std::vector<TableRow>();
    TableRow fastest = smallest_of(buckets, "Total Time (ms)");
    if (!buckets.empty()) { add(fastest ? fastest : buckets[0], "fastest buckets"); }
    for (const TableRow& row : fsdp ? rows_of(*fsdp) : std::vector<TableRow>()) {
        const std::string name = row.text("Way"), memory = row.text("parameters");
        TableRow all = waits && name == "FSDP" ? row_of(*waits, {{"unit", "all"}}) : TableRow();
        double exposed =
            all.number("wait (ms)") + all.number("wait in backward (ms)") + all.number("wait for gradients (ms)");
        ways.push_back({name, memory.compare(0, 3, "OOM") == 0 ? memory : row.text("step (ms)"),
                        std::isnan(exposed) ? "" : strprintf("%.2f", exposed)});
    }
    return ways;
}

// Returns the number of ranks whose share the speed-ups are over.
static int scaling_rows(Table& table, const char* kind, const Plan& p, const std::vector<Group>& groups) {
    auto rate_of = [&](const Group& g, const MeasuredWay& way) {  // tokens per second; NAN: it did not run
        double ms = strtod(way.time.c_str(), nullptr);
        return ms > 0 ? 1e3 * g.ranks * g.batch_size * p.o.context_length / ms : NAN;
    };
    double one = NAN;  // a rank's share of the fastest way in the smallest group that ran
    int base = 1;
    for (const Group& g : groups) {
        if (g.ranks > 1 && (!std::isnan(one) || g.ranks == groups.back().ranks)) { break; }
        base = g.ranks;
        for (const MeasuredWay& way : ways_of(g)) {
            const bool apart = g.ranks > 1 && way.name == "no sync";          // its ranks learn apart
            if (!apart) { one = std::fmax(one, rate_of(g, way) / g.ranks); }  // a NAN gives way to a number
        }
    }
    auto cell = [](const char* format, double x) { return std::isnan(x) ? "" : strprintf(format, x); };
    for (const Group& g : groups) {
        for (const MeasuredWay& way : ways_of(g)) {
            double rate = rate_of(g, way), times = rate / one;
            double tflops =
                step_tflops(p.configs[0], g.batch_size, p.o.context_length, strtod(way.time.c_str(), nullptr));
            table.rows.push_back({kind, std::to_string(g.ranks), way.name, std::to_string(g.batch_size), way.time,
                                  way.exposed, cell("%.0f", rate), cell(times < 0.1 ? "%.2g" : "%.2f", times),
                                  cell("%.1f", 100 * times / g.ranks),
                                  std::isnan(rate) ? "" : percent_of_peak(tflops, context.precision)});
        }
    }
    return std::isnan(one) ? 1 : base;
}
// What DDP's model of buckets, fitted to each group's all-reduces, says beside what was fastest.
static Table bucket_table(const std::vector<Group>& groups) {
    Table table{"scaling: the fastest of the buckets, and the best by s/(n w) + n o, weak scaling",
                {"Ranks", "fastest, measured", "best by the model (MB)", "o (us)", "w (GB/s)"},
                {}};
    for (const Group& g : groups) {
        const Table *ddp = table_with(g.ddp, {"ddp_bucketed_benchmarking; "}),
                    *fit = table_with(g.ddp, {"DDP overhead"});
        if (!ddp || !fit) { continue; }
        TableRow fastest = smallest_of(buckets_of(*ddp), "Total Time (ms)");
        table.rows.push_back({std::to_string(g.ranks), fastest.text("Strategy"),
                              value_in(*fit, "sqrt(s o w) = ", " MB"), value_in(*fit, "o = ", " us"),
                              value_in(*fit, "w = ", " GB/s")});
    }
    return table;
}

int cmd_scaling(const Options& asked) {
    if (is_rank()) { usage_error("scaling: takes no launcher, it starts ranks itself"); }
    if (asked.precision[0] == "fp16") { usage_error("--precision: got fp16, takes fp32, tf32 or bf16 here"); }
    context.device = choose_device(asked.device);
    Options o = asked;
    std::sort(o.ranks.begin(), o.ranks.end());
    o.ranks.erase(std::unique(o.ranks.begin(), o.ranks.end()), o.ranks.end());
    Communicator largest;
    largest.world = largest.local_world = o.ranks.back();
    const bool nccl = gpu_is_imagined() || why_not("nccl", context.device, 1).empty();
    largest.backend = o.backend != "auto" ? o.backend : nccl ? "nccl" : "gloo";
    std::vector<std::string> left_out;
    for (int n : std::vector<int>(o.ranks)) {
        std::string why = gpu_is_imagined() ? "" : why_not(largest.backend, context.device, n);
        if (why.empty() && context.device == CPU && n > 2 && !o.has("nproc")) { why = "they would share the cores"; }
        if (why.empty()) { continue; }
        left_out.push_back(strprintf("%d ranks: %s", n, why.c_str()));
        o.ranks.erase(std::find(o.ranks.begin(), o.ranks.end(), n));
    }
    if (o.ranks.empty()) { fail("scaling: %s", join(left_out, "; ").c_str()); }
    largest.world = o.ranks.back();
    Plan p = fitting_plan(o, largest, true);
    if (!left_out.empty()) { p.note_smaller("without " + join(left_out, ", ")); }
    p.o.backend = largest.backend;

    const int whole_batch = p.o.batch_size * o.ranks.back();
    std::vector<Group> weak, strong;
    for (int n : o.ranks) {
        weak.push_back({n, p.o.batch_size, {}, {}});
        if (whole_batch % n == 0) {
            strong.push_back({n, whole_batch / n, {}, {}});
        } else {
            p.note_smaller(
                strprintf("no strong scaling on %d ranks, which do not divide %d sequences", n, whole_batch));
        }
    }
    bool failed = false;
    PartOfScaling part;
    for (auto* groups : {&weak, &strong}) {
        for (Group& g : *groups) {
            if (groups == &strong && g.ranks == weak.back().ranks) {
                g = weak.back();  // the same run
            } else if (context.plan_only) {
                cmd_ddp_bucketed_benchmarking(options_of(p, g)), cmd_fsdp_accounting(options_of(p, g));
            } else {
                g.ddp = run_group("ddp_bucketed_benchmarking", words_of(p, g), g, &failed);
                g.fsdp = run_group("fsdp_accounting", words_of(p, g), g, &failed);
            }
        }
    }
    if (context.plan_only) { return 0; }
    const ModelConfig& c = p.configs[0];
    Table table{
        strprintf(
            "scaling: size %s (d_model %d, %s), precision %s, mode %s, context length %d, %s; weak: %d "
            "sequence%s per rank, strong: %d in all; speed-up: tokens per second over the fastest way on one rank; "
            "%d warmup, %d step; %s",
            c.name.c_str(), c.d_model, counted(std::to_string(c.num_layers), "layer").c_str(),
            name_of(context.precision), caption_of(context.mode).c_str(), p.o.context_length, largest.backend.c_str(),
            p.o.batch_size, p.o.batch_size == 1 ? "" : "s", whole_batch, p.o.warmup[0], p.o.steps, p.origin().c_str()),
        {"Scaling", "Ranks", "Way", "sequences per rank", "step (ms)", "Exposed Comm (ms)", "Tokens/second", "speed-up",
         "efficiency (%)", "MFU %"},
        {}};
    for (const auto& [kind, groups] : {std::pair("weak", &weak), {"strong", &strong}}) {
        const int base = scaling_rows(table, kind, p, *groups);
        if (base == 1) { continue; }
        const size_t at = table.caption.find("; ", table.caption.find("speed-up: "));
        table.caption.insert(at, strprintf("; %s: over a rank's share of the fastest way on %d ranks", kind, base));
    }
    print(table, o.format);
    print(bucket_table(weak), o.format);
    return failed;
}
