// main.cu: the commands and their options, help, `list`, `info`, `reproduce`.
#include "cs336.h"

#include <CLI/CLI.hpp>

#include <cfloat>
#include <filesystem>
#include <sstream>

static RunCommand cmd_list, cmd_info, cmd_reproduce;

// -------------------------------------------------------------------------------------------------
// The commands, in the handout's order. `options` are keys of add_options() below: `key=text` has
// another default than there, `key!` has to be given, `key*` takes a list, since the experiment
// runs all of it. Of two words with one key the last counts.

struct Command {
    const char* id;
    RunCommand* run;
    const char *section_2025, *section_2026;  // "": that handout has no such problem; both: a tool
    int points;                               // the same in both; 0: none
    bool timed;                               // so without a GPU it is as small as with --quick
    const char* what;
    // the last two: what edition 2026 and --quick set otherwise
    string options, in_2026 = "", quick = "";
    bool is_in(const string& edition) const {
        return *(edition == "2025" ? section_2025 : section_2026);
    }
    bool is_problem() const { return is_in("2025") || is_in("2026"); }
};

static const string MODEL = "d_model d_ff num_layers num_heads vocab_size ";
static const string TIMED =
    "size*=small,medium,large,xl,2.7B " + MODEL + "context_length*=256 batch_size steps seed ";
static const string TIMED_2026 = "size=small,medium,large,xl,10B context_length=512";
static const string TIMED_QUICK = "size=small context_length=32 batch_size=1 warmup=2 steps=2";
static const string RANKS = "nproc backend timeout ";
static const string CHECK = "seed " + RANKS;
static const string DDP =
    "size=xl " + MODEL +
    "context_length=512 batch_size=2 warmup steps precision=fp32 mode=flash checkpoint seed " +
    RANKS;
// The defaults are the 2026 leaderboard's layer and batch, and a device of an H200 node.
static const string CALCS = "tokens=65536 d_model=4096 d_ff=11008 tflops=989 bandwidth_gb=450 ";

#define COMMAND(name) #name, cmd_##name
static const Command COMMANDS[] = {
    {COMMAND(benchmarking_script), "1.1.3", "2.1.3", 4, true,
     "a step's time: forward, backward, optimizer",
     TIMED + "warmup*=0,1,2,5 precision*=fp32 mode*=eager,flash checkpoint", TIMED_2026,
     TIMED_QUICK + " warmup=0,1,2"},
    {COMMAND(nsys_profile), "1.1.4", "2.1.4", 5, true, "which kernels a step spends its time in",
     TIMED + "context_length*=128,256,512,1024 warmup=2 steps=5 precision=fp32 mode=eager trace",
     "size=small,xl context_length=256,512", TIMED_QUICK + " context_length=64"},
    {COMMAND(mixed_precision_accumulation), "1.1.5", "2.1.5", 1, false,
     "0.01 added a thousand times", ""},
    {COMMAND(benchmarking_mixed_precision), "1.1.5", "2.1.5", 2, true,
     "autocast's dtypes; fp32 against tf32, bf16",
     TIMED + "warmup precision*=fp32,tf32,bf16 mode*=eager,flash", TIMED_2026, TIMED_QUICK},
    {COMMAND(memory_profiling), "1.1.6", "2.1.6", 4, false, "where a step's memory goes",
     "size=2.7B " + MODEL +
         "context_length*=128,256,512 batch_size seed precision*=fp32,bf16 mode=eager out.folder",
     "size=xl context_length=128,2048", "size=small context_length=128"},
    {COMMAND(gradient_checkpointing), "", "3.2.1", 4, true,
     "what backward runs again, to keep less",
     "size=xl " + MODEL +
         "context_length=2048 batch_size warmup=1 steps=2 precision=fp32 mode=eager seed",
     "",
     // At this length a block's scores, residuals and gradients are to each other about as those of
     // xl.
     "d_model=64 d_ff=256 num_layers=8 num_heads=4 vocab_size=100 context_length=256 batch_size=1 "
     "warmup=1 steps=2"},
    {COMMAND(pytorch_attention), "1.2.1", "4.1.1", 2, true, "time and memory of plain attention",
     "steps=100", "", "steps=3"},
    {COMMAND(torch_compile), "1.3", "4.2", 2, true, "eager against fused kernels",
     TIMED + "warmup precision*=fp32", TIMED_2026, TIMED_QUICK},
    {COMMAND(weighted_sum), "1.3.1", "4.2.1", 0, true, "the first kernel: a weighted sum", ""},
    {COMMAND(flash_forward), "1.3.2", "4.2.2", 15, false, "FlashAttention-2, forward", "seed"},
    {COMMAND(flash_backward), "1.3.2", "4.2.2", 5, false, "FlashAttention-2, backward", "seed"},
    {COMMAND(flash_benchmarking), "1.3.2", "4.2.2", 5, true,
     "FlashAttention-2 against plain attention", ""},
    {COMMAND(flash_leaderboard), "1.3.3", "", 0, true, "one long sequence, as fast as it goes",
     "d_model=1024 num_heads=16 context_length=16384 precision=bf16 impl=all", "",
     "d_model=128 num_heads=2 context_length=512"},
    {COMMAND(distributed_communication_single_node), "2.1", "5.1", 5, true,
     "all-reduce: sizes, ranks, backends", "warmup steps " + RANKS, "", "warmup=1 steps=3"},
    {COMMAND(naive_ddp), "2.2", "5.2", 5, false, "an all-reduce for each parameter", CHECK},
    {COMMAND(naive_ddp_benchmarking), "2.2", "5.2", 3, true, "what it costs", DDP + "trace"},
    {COMMAND(minimal_ddp_flat_benchmarking), "2.3.1", "5.3.1", 2, true,
     "one all-reduce for all gradients", DDP + "trace"},
    {COMMAND(ddp_overlap_individual_parameters), "2.3.2", "5.3.2", 5, false,
     "communicate while backward runs", CHECK},
    {COMMAND(ddp_overlap_individual_parameters_benchmarking), "2.3.2", "5.3.2", 1, true,
     "what it saves", DDP + "trace"},
    {COMMAND(ddp_overlap_bucketed), "2.3.3", "", 8, false, "the same, in buckets",
     "bucket_size_mb*=0.0001,0.0016,0.01 " + CHECK},
    {COMMAND(ddp_bucketed_benchmarking), "2.3.3", "", 3, true, "which size of buckets",
     DDP + "bucket_size_mb* trace"},
    {COMMAND(communication_accounting), "2.4", "", 10, false,
     "when communication becomes the limit",
     "d_model=16384 d_ff=53248 num_layers=126 tokens=2048 tflops bandwidth_gb fsdp tp"},
    {COMMAND(optimizer_state_sharding), "3", "6", 15, false, "AdamW's state split over the ranks",
     CHECK},
    {COMMAND(optimizer_state_sharding_accounting), "3", "6", 5, true, "its memory and time", DDP},
    {COMMAND(fsdp), "", "7", 15, false, "the weights sharded, too", CHECK},
    {COMMAND(fsdp_accounting), "", "7", 5, true, "its memory; do its gathers come in time?",
     DDP + "trace"},
    {COMMAND(alternate_ring_all_reduce), "", "8.1", 1, false, "a ring that sends whole tensors",
     "tensor_mb devices bandwidth_gb=450"},
    {COMMAND(data_parallel_calcs), "", "8.2", 3, false, "how many devices data parallelism can use",
     CALCS + "devices"},
    {COMMAND(fsdp_calcs), "", "8.3", 3, false, "how many devices FSDP can use", CALCS + "devices"},
    {COMMAND(tp_calcs), "", "8.4", 4, false, "how many devices tensor parallelism can use",
     CALCS + "devices"},
    {COMMAND(fsdp_tp_calcs), "", "8.5", 6, false, "how many devices both together can use",
     CALCS + "fsdp=4 tp=2"},
    {COMMAND(leaderboard), "", "9", 10, true, "an 8.1B model's step, as fast as it goes",
     "size=8B " + MODEL +
         "context_length=32768 batch_size=2 warmup=3 steps=8 precision=pure_bf16 mode=flash "
         "checkpoint seed " +
         RANKS},
    {COMMAND(list), "", "", 0, false, "every command, its sections and points", ""},
    {COMMAND(info), "", "", 0, false, "the device and its measured rates", ""},
    {COMMAND(train), "", "", 0, false, "train on a text's bytes, then continue it",
     "data! d_model=128 d_ff=512 num_layers=4 num_heads=4 context_length=128 batch_size=8 "
     "steps=200 lr precision=fp32 mode=flash seed sample",
     "", "d_model=64 d_ff=128 num_layers=2 context_length=32 batch_size=4 steps=20"},
    {COMMAND(model), "", "", 0, false, "your weights and batch in, gradients out",
     "weights! batch! num_heads! out! rope_theta steps=0 lr precision=fp32 mode=flash"},
    {COMMAND(attention), "", "", 0, false, "your q, k, v in, output and gradients out",
     "inputs! out! causal impl"},
    {COMMAND(reproduce), "", "", 0, false,
     "all problems of an edition, or the named, each into a file", "out.folder=notes/output"},
};

// -------------------------------------------------------------------------------------------------
// The options: a field of Options, what it takes, and what it is for.

// CLI11's own ranges take NaN.
template <class T>
static CLI::Validator between(T least, T most, const char* what) {
    auto check = [=](string& text) {
        T value = 0;
        const bool fits = CLI::detail::lexical_cast(text, value) && value >= least && value <= most;
        return fits ? ""
                    : strprintf("got %s, takes %s from %.10g to %.10g", text.c_str(), what,
                                (double)least, (double)most);
    };
    return CLI::Validator(check, "");
}
static CLI::Validator whole(int least, int most = 1 << 20) {
    return between(least, most, "a whole number");
}
static CLI::Validator number(double most = FLT_MAX) {
    return between<double>(FLT_MIN, most, "a number");
}
static CLI::Validator one_of(const vector<string>& names) {
    return CLI::IsMember(names, CLI::ignore_case);
}
static const CLI::Validator OUTPUT(
    [](string& path) -> string {  // tried before the work
        if (path.empty()) { return "takes a file's name, got ''"; }
        try {
            return replace_file(path, nullptr), "";
        } catch (const Failure& failure) { return failure.what(); }
    },
    "");

// Adds those options that the command takes, with its defaults.
struct Adder {
    CLI::App& app;
    string group;
    // a key, and what Command::options says behind it
    std::map<string, string> words = {};
    // The name on the command line is the key up to a dot.
    template <class Field>
    void option(const string& key, Field& field, const CLI::Validator& takes, string by_default,
                const string& help) {
        const auto found = words.find(key);
        if (found == words.end()) { return; }
        const string word = found->second;
        words.erase(found);
        CLI::Option* added =
            app.add_option("--" + key.substr(0, key.find('.')), field, help)->transform(takes);
        added->run_callback_for_default()->allow_extra_args(false);  // one word each time
        added->required(word[0] == '!')->group(group);
        word[0] == '*' ? added->delimiter(',') : added->expected(1);
        if (word.find('=') < word.size()) { by_default = word.substr(word.find('=') + 1); }
        if (!by_default.empty()) { added->default_val(by_default); }
    }
    void flag(const string& key, bool& field, const string& help) {
        if (words.erase(key) > 0) { app.add_flag("--" + key, field, help)->group(group); }
    }
};
static void add_common_options(Adder& add, Options& o, int least_steps) {
    add.option("edition", o.edition, one_of({"2025", "2026"}), "2025",
               "the handout whose sizes are the defaults");
    add.option("device", o.device, one_of({"auto", "cpu", "cuda"}), "auto",
               "auto takes a GPU if there is one");
    add.option("size", o.size, one_of({"small", "medium", "large", "xl", "2.7B", "10B", "8B"}), "",
               "a model of the handout; xl is 1600 wide in 2025's, 2560 in 2026's");
    add.option("d_model", o.d_model, whole(1), "", "width of the model");
    add.option("d_ff", o.d_ff, whole(1), "", "width of the feed-forward layer");
    add.option("num_layers", o.num_layers, whole(1), "", "number of blocks");
    add.option("num_heads", o.num_heads, whole(1), "", "number of attention heads");
    add.option("vocab_size", o.vocab_size, whole(1), "10000",
               "number of different tokens; 8B has 151936");
    add.option("context_length", o.context_lengths, whole(1), "", "tokens in a sequence");
    add.option("batch_size", o.batch_size, whole(1), "4", "sequences in a batch, of each rank");
    add.option("warmup", o.warmup, whole(0), "5", "untimed steps before the timed ones");
    add.option("steps", o.steps, whole(least_steps), "10", "steps that are timed, or trained");
    add.option("precision", o.precision, one_of({"fp32", "tf32", "bf16", "fp16", "pure_bf16"}),
               "fp32", "bf16 and fp16: autocast; pure_bf16: weights, gradients and moments, too");
    add.option("mode", o.mode, one_of({"eager", "fused", "flash"}), "flash",
               "eager: a kernel per operation; flash: fused, with FlashAttention (not in fp16)");
    add.option("seed", o.seed, whole(0, INT_MAX), "0", "seed of all random numbers");
    add.option("format", o.format, one_of({"md", "csv"}), "md", "format of the tables");
    add.flag("quick", o.quick,
             "shrink the run to some seconds on two CPU cores; also the default without a GPU");
}
static void add_own_options(Adder& add, Options& o) {
    // Of a step
    add.option(
        "checkpoint", o.checkpoint, CLI::Validator(), "none",
        "what backward runs again instead of keeping it: groups of N blocks, nested, the "
        "feed-forward layers (ffn) or N of them (ffn:N); those, and N blocks whole (blocks:N)");
    add.option("trace", o.trace, OUTPUT, "",
               "the file for what ran when, for Perfetto or chrome://tracing");
    add.option("out", o.out, OUTPUT, "", "the file to write");
    add.option("out.folder", o.out, CLI::Validator(), "", "the folder to write to");
    // Attention, and what comes from files
    add.flag("causal", o.causal, "query i sees keys j <= i only");
    set<string> impls = {"all", "auto"};
    for (const AttentionImpl& impl : table_of<AttentionImpl>()) { impls.insert(impl.name); }
    add.option("impl", o.impl, one_of({impls.begin(), impls.end()}), "auto",
               "which implementation of attention runs");
    add.option("inputs", o.inputs, CLI::ExistingFile, "",
               "safetensors file of q, k, v and perhaps do, [B, H, S, D]");
    add.option("weights", o.weights, CLI::ExistingFile, "", "the state_dict, a safetensors file");
    add.option("batch", o.batch, CLI::ExistingFile, "",
               "tokens and targets of [B, T], a safetensors file");
    add.option("rope_theta", o.rope_theta, number(), "10000", "base of the rotary embedding");
    // Training
    add.option("data", o.data, CLI::ExistingFile, "",
               "the text to train on; its bytes are the tokens");
    add.option("lr", o.lr, number(), "0.001", "learning rate");
    add.option("sample", o.sample, whole(0), "200", "bytes to write as a continuation");
    // Ranks
    add.option("nproc", o.nproc, whole(1, 64), "2",
               "ranks to start; under torchrun and the like theirs are taken");
    add.option("backend", o.backend, one_of({"auto", "nccl", "gloo"}), "auto",
               "library of the collectives; auto: nccl if each rank has a GPU");
    add.option("timeout", o.timeout, number(1e5), "60", "seconds that a rank waits for the others");
    add.option("bucket_size_mb", o.bucket_size_mb, number(1e5), "1,10,100,1000",
               "bucket sizes in MB (1e6 bytes)");
    // The calculations' letters
    add.option("tokens", o.tokens, whole(1, INT_MAX), "",
               "B, tokens of the batch (2.4 (b): on a device)");
    add.option("devices", o.devices, whole(2), "8", "N, how many devices share the work");
    add.option("tensor_mb", o.tensor_mb, number(), "1000",
               "S, the tensor that is reduced, in 1e6 bytes");
    add.option("tflops", o.tflops, number(), "460", "C, rate of a chip, in 1e12 FLOP/s");
    add.option("bandwidth_gb", o.bandwidth_gb, number(), "180",
               "W, of a link, or out of a device, in 1e9 bytes/s");
    add.option("fsdp", o.fsdp, whole(1), "16", "X or N_FSDP, chips along the FSDP axis");
    add.option("tp", o.tp, whole(1), "4", "Y or N_TP, chips along the tensor-parallel axis");
}
static void add_options(CLI::App& app, const Command& command, Options& o) {
    Adder add{app, "Common options"};
    std::istringstream all("edition device format quick " + command.options);
    for (string word; all >> word;) {
        const size_t end = std::min(word.find_first_of("!*="), word.size());
        add.words[word.substr(0, end)] = word.substr(end);
    }
    add_common_options(add, o, command.run == cmd_model ? 0 : 1);
    add.group = "Its own options";
    add_own_options(add, o);
    if (CLI::Option* size = app.get_option_no_throw("--size")) {
        for (const char* other : {"--d_model", "--d_ff", "--num_layers", "--num_heads"}) {
            size->excludes(other);
        }
    }
    if (!add.words.empty()) {
        fail("the command table names no option: %s", add.words.begin()->first.c_str());
    }
}

// -------------------------------------------------------------------------------------------------
// From the words on the command line to Options

static const Command& find_command(const string& word) {
    for (const Command& c : COMMANDS) {
        if (word == c.id) { return c; }
    }
    usage_error("%s: no such command; `cs336 list` names them", word.empty() ? "''" : word.c_str());
}

// Those that were not typed.
static void set_defaults(CLI::App& app, const string& words) {
    std::istringstream all(words);
    for (string word; all >> word;) {
        CLI::Option* option = app.get_option("--" + word.substr(0, word.find('=')));
        if (option->count() == 0) { option->default_val(word.substr(word.find('=') + 1)); }
    }
}

static bool is_quick(const Command& c, const Options& o) {
    return o.quick || (c.timed && (o.device == "cpu" || cuda_devices() == 0));
}
// words: the command's id and what follows. Sets the context, too. False: they ask for help, which
// is printed.
static bool parse_options(const Command& command, const vector<string>& words, Options& o) {
    o.command = command.id, o.command_line = words;
    CLI::App app(command.what, string("cs336 ") + command.id);
    app.set_help_flag("--help,-h", "this text");
    app.get_formatter()->column_width(32);
    add_options(app, command, o);
    if (command.run == cmd_reproduce) {
        app.add_option("problem", o.words, "which to run; none: all");
    }
    if (command.is_problem() && !command.is_in("2025")) { o.edition = "2026"; }
    for (const string& word : words) {  // CLI11 takes 1,,2 for 1,2
        const string list = "," + word.substr(word.find('=') + 1) + ",";
        if (list != ",," && list.find(",,") != string::npos) {
            usage_error("%s: a word of the list is empty", word.c_str());
        }
    }
    try {
        // CLI11 takes them from the end
        app.parse(vector<string>(words.rbegin(), words.rend() - 1));
    } catch (const CLI::CallForHelp&) {
        if (o.edition == "2026") { set_defaults(app, command.in_2026); }
        return printf("%s", app.help().c_str()), false;
    } catch (const CLI::ExtrasError&) {
        const string word = app.remaining()[0];
        const char* hint = word[0] == '-' ? "" : ", and a list takes commas";
        usage_error("%s: no such option; --help lists them%s", word.c_str(), hint);
    } catch (const CLI::ParseError& e) { usage_error("%s", e.what()); }
    for (const CLI::Option* option : app.get_options()) {
        if (option->count() > 0) { o.given.insert(option->get_single_name()); }
    }
    if (command.is_problem() && !command.is_in(o.edition)) {
        usage_error("--edition: got %s, whose handout has no such problem", o.edition.c_str());
    }
    o.quick = is_quick(command, o);
    if (o.edition == "2026") { set_defaults(app, command.in_2026); }
    if (o.quick) { set_defaults(app, command.quick); }
    if (!o.context_lengths.empty()) { o.context_length = o.context_lengths[0]; }
    // the sizes have to fit each other
    if (command.options.find(MODEL) != string::npos) { configs_of(o); }
    for (const string& input : {o.weights, o.batch, o.inputs}) {
        std::error_code ignored;
        if (std::filesystem::equivalent(input, o.out, ignored)) {
            usage_error("--out: takes another file than the input");
        }
    }
    if (std::error_code failed;
        command.options.find("out.folder") != string::npos && (o.has("out") || !o.out.empty())) {
        std::filesystem::create_directories(o.out, failed);
        if (failed) { usage_error("--out '%s': %s", o.out.c_str(), failed.message().c_str()); }
    }
    context.checkpoint = checkpointing_from(o.checkpoint), context.csv = o.format == "csv";
    if (o.quick) {
        context.sizes = o.has("quick") ? "; sizes of --quick"
                                       : "; on the CPU: sizes of --quick where none is typed";
    }
    return true;
}

// -------------------------------------------------------------------------------------------------
// list, reproduce, info

static int cmd_list(const Options&) {
    Table table{
        "2025, 2026: that handout's section; `cs336 <command> --help` shows a command's options",
        {"command", "2025", "2026", "points", "what"}};
    for (const Command& c : COMMANDS) {
        table.row(c.id, c.section_2025, c.section_2026, c.points ? std::to_string(c.points) : "",
                  c.what);
    }
    print(table);
    return 0;
}

// Whether the text is what a program of this commit prints on this device, at these sizes, in this
// format. A program that knows no commit, or has changes of its own, says of no text that it is.
static bool is_as_now(const string& text, const string& of_commit, bool quick) {
    if (of_commit == "unknown" || of_commit.find("dirty") != string::npos) { return false; }
    auto has = [&](const string& part) { return text.find(part) != string::npos; };
    const bool device = has(device_description()) || has("meta (nothing is computed)");
    return device && has("commit " + of_commit) && quick == has("sizes of --quick") &&
           context.csv == (text[0] == '#');
}
// Runs each problem in a process of its own and writes what it prints into a file. Returns 1 where
// one failed.
static int cmd_reproduce(const Options& o) {
    vector<const Command*> problems;
    for (const string& id : o.words) { problems.push_back(&find_command(id)); }
    for (const Command& c : COMMANDS) {
        if (o.words.empty() && c.is_in(o.edition)) { problems.push_back(&c); }
    }
    context.device = o.device == "cpu" || cuda_devices() == 0 ? CPU : CUDA;  // the children open it
    if (!o.has("out") && (o.quick || context.device == CPU)) {
        usage_error(
            "--out: is required on a CPU and with --quick; notes/output is of GPUs, at the "
            "handout's sizes");
    }
    int exit_code = 0;
    for (const Command* c : problems) {
        vector<string> words = {c->id, "--device", o.device, "--format", o.format};
        if (c->is_in(o.edition)) { words.insert(words.end(), {"--edition", o.edition}); }
        if (o.quick) { words.push_back("--quick"); }
        // Both handouts have it, but not with the same defaults.
        const bool differs = c->is_in("2025") && c->is_in("2026") && c->options.find("size") == 0;
        const string path =
            o.out + "/" + c->id + (o.edition == "2026" && differs ? "-2026" : "") + ".md";
        std::ifstream file(path);
        const string before{std::istreambuf_iterator<char>(file), {}};
        const bool done = is_as_now(before, commit(), is_quick(*c, o));
        note("%s%s", path.c_str(), done ? ": of this commit and device already" : "");
        if (done) { continue; }
        try {
            save_file(path, run_ourselves(words));
        } catch (const Failure& failure) { note("%s", failure.what()), exit_code = 1; }
    }
    return exit_code;
}

// This machine's ceilings: an operation takes at least its FLOPs over the rate of products, and its
// bytes over that of copies.
static double matmul_tflops(Precision precision, int64_t n) {
    context.precision = precision;
    Tensor a = empty({n, n}, matmul_dtype()), b = empty({n, n}, matmul_dtype()),
           c = empty({n, n}, matmul_dtype());
    // with zeros a GPU draws less power and clocks higher
    fill_normal(a, 0, 1, 0, 1), fill_normal(b, 0, 2, 0, 1);
    return 2.0 * n * n * n / stats_of(time_ms(2, 10, [&] { gemm(c, a, false, b, false); })).median /
           1e9;
}
static double copy_gb_per_s(int64_t bytes) {
    Tensor from = zeros({bytes / 4}, F32), to = zeros({bytes / 4}, F32);
    return 2.0 * bytes / stats_of(time_ms(2, 10, [&] { copy_or_add(to, from, false); })).median /
           1e6;
}
static int cmd_info(const Options& o) {
    context.device = choose_device(o.device);
    const bool gpu = context.device == CUDA;
    Table table{"info: medians of 10 runs", {"what", "measured", "peak by data sheet", "unit"}};
    table.row("GPUs", cuda_devices(), "", "");
    table.row("memory available", available_memory(context.device) / 1073741824.0, "", "GiB");
    const int n = gpu ? 8192 : 1024, mib = gpu ? 1024 : 256;
    for (Precision p :
         gpu ? vector<Precision>{PREC_BF16, PREC_FP16, TF32, FP32} : vector<Precision>{FP32}) {
        table.row(strprintf("matmul %d^3 %s", n, name_of(p)), matmul_tflops(p, n), dense_peak(p),
                  "TFLOP/s");
    }
    table.row(strprintf("copy of %d MiB, read + written", mib), copy_gb_per_s((int64_t)mib << 20),
              "", "GB/s");
    print(table);
    return 0;
}

static void print_usage(FILE* to) {
    fprintf(to,
            "cs336: every problem of the CS336 systems assignment in C++ and CUDA\n\n"
            "usage: cs336 <command> [options]\n"
            "       cs336 <command> --help         its options and their defaults\n"
            "       cs336 list                     every command\n"
            "       cs336 --version                the commit that this was built from\n\n"
            "exit codes: 0 done, 1 it ran and failed, 2 wrong usage\n");
}

int main(int argc, char** argv) {
    // whoever started us may ignore it; waitpid() would then find no children
    signal(SIGCHLD, SIG_DFL);
    signal(SIGXFSZ, SIG_IGN);  // a file that grows over `ulimit -f`: the write fails, and says so
    choose_cpu_settings(argv);
    const vector<string> words = {argv + 1, argv + argc};
    const string word = argc > 1 ? words[0] : "";
    if (argc < 2) { return print_usage(stderr), 2; }
    if (word == "--help" || word == "-h" || word == "help") { return print_usage(stdout), 0; }
    if (word == "--version") { return printf("%s\n", commit().c_str()), 0; }
    int exit_code = 1;
    string who = "cs336";
    try {
        const Command& command = find_command(word);
        who += " " + word;
        Options o;
        exit_code = parse_options(command, words, o) ? command.run(o) : 0;
    } catch (const Failure& failure) {
        exit_code = failure.exit_code;
        // Whoever closed the pipe has read enough: we end as others do, without a word.
        if (exit_code != 128 + SIGPIPE) { note("%s: %s", who.c_str(), failure.what()); }
    } catch (const std::exception& e) { note("%s: %s", who.c_str(), e.what()); }
    // Whoever started us sees the signal that ended us. A rank's launcher reads the code.
    if (exit_code > 128 && !is_rank()) {
        signal(exit_code - 128, SIG_DFL);
        raise(exit_code - 128);
    }
    return exit_code;
}
