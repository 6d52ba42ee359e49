// main.cu: the command line. First come the commands with their options and defaults; then what
// each option takes and what it is for; then how the words that were typed become Options; then
// `list`, `reproduce` and `info`; main() is last.
#include "attention.h"

#include <CLI/CLI.hpp>

#include <filesystem>

using RunCommand = int(const Options& o);
// precision.cu
RunCommand cmd_mixed_precision_accumulation;
// model.cu
RunCommand cmd_benchmarking_script, cmd_benchmarking_mixed_precision, cmd_torch_compile;
RunCommand cmd_gradient_checkpointing;
// train.cu
RunCommand cmd_model, cmd_train;
// profile.cu
RunCommand cmd_nsys_profile, cmd_memory_profiling;
// attention.cu
RunCommand cmd_pytorch_attention, cmd_weighted_sum;
// flash_commands.cu
RunCommand cmd_flash_forward, cmd_flash_backward, cmd_flash_benchmarking;
RunCommand cmd_flash_leaderboard, cmd_attention;
// communication.cu
RunCommand cmd_distributed_communication_single_node, cmd_communication_accounting;
RunCommand cmd_alternate_ring_all_reduce, cmd_data_parallel_calcs, cmd_fsdp_calcs, cmd_tp_calcs,
    cmd_fsdp_tp_calcs;
// ddp.cu
RunCommand cmd_naive_ddp, cmd_naive_ddp_benchmarking, cmd_minimal_ddp_flat_benchmarking;
RunCommand cmd_ddp_overlap_individual_parameters, cmd_ddp_overlap_bucketed;
RunCommand cmd_ddp_overlap_individual_parameters_benchmarking, cmd_ddp_bucketed_benchmarking;
RunCommand cmd_optimizer_state_sharding, cmd_optimizer_state_sharding_accounting;
// fsdp.cu
RunCommand cmd_fsdp, cmd_fsdp_accounting, cmd_leaderboard;
// this file
static RunCommand cmd_list, cmd_info, cmd_reproduce;

// -------------------------------------------------------------------------------------------------
// The commands, in the handout's order
//
// Their options are written as one types them: `--steps 5` has the default 5; `--seed` alone has
// the default of add_common_options() or add_own_options() below. REQUIRED behind an option says
// that it has to be typed. LIST says that it takes several words with commas between them; the
// experiment runs all of them. Where an option stands twice, its last default counts.

static const string COMMON = "--edition --device --format --quick ";  // every command has these
static const string MODEL = "--d_model --d_ff --num_layers --num_heads --vocab_size ";
static const string TIMED =
    MODEL +
    "--size LIST small,medium,large,xl,2.7B --context_length LIST 256 --batch_size --steps --seed ";
static const string TIMED_2026 = "--size small,medium,large,xl,10B --context_length 512";
static const string TIMED_QUICK =
    "--size small --context_length 32 --batch_size 1 --warmup 2 --steps 2";
static const string RANKS = "--nproc --backend --timeout ";
static const string CHECK = RANKS + "--seed ";
static const string DDP =
    MODEL + RANKS +
    "--size xl --context_length 512 --batch_size 2 --warmup --steps --precision fp32 --mode flash "
    "--checkpoint --seed ";
// The defaults are the 2026 leaderboard's layer and batch, and a device of an H200 node.
static const string CALCS =
    "--tokens 65536 --d_model 4096 --d_ff 11008 --tflops 989 --bandwidth_gb 450 ";

struct Command {
    RunCommand* run;
    string id;
    string section_2025, section_2026;  // "": that handout has no such problem; both: a tool
    int points;                         // the same in both handouts; 0: none
    bool timed;                         // on the CPU the run is as small as with --quick
    string what;
    string options = "";
    string quick = "", in_2026 = "";  // the defaults that differ, with --quick and in edition 2026

    // edition: "2025" or "2026"
    bool is_in(const string& edition) const {
        return (edition == "2025" ? section_2025 : section_2026) != "";
    }
    bool is_problem() const { return is_in("2025") || is_in("2026"); }
    // option: "--steps"
    bool takes(const string& option) const {
        return (COMMON + options + " ").find(option + " ") != string::npos;
    }
    // Returns whether --out takes a folder; of other commands it takes a file.
    bool writes_folder() const { return run == cmd_memory_profiling || run == cmd_reproduce; }
};

// An example, nsys_profile: the problem is 1.1.4 in 2025's handout and 2.1.4 in 2026's, and worth 5
// points. It takes COMMON's options, TIMED's and those of its own row. `--context_length` takes a
// list; its default is the four lengths of the row, not TIMED's 256. `--warmup` takes one number,
// by default 2; `--batch_size` takes one, too, by default that of add_common_options(). In edition
// 2026 two sizes are the defaults, and two lengths beside the longest that fits. With --quick the
// length is 64, and the rest is TIMED_QUICK's.

#define COMMAND(name) cmd_##name, #name
static const Command COMMANDS[] = {
    {COMMAND(benchmarking_script), "1.1.3", "2.1.3", 4, true,
     "a step's time: forward, backward, optimizer",
     TIMED + "--warmup LIST 0,1,2,5 --precision LIST fp32 --mode LIST eager,flash --checkpoint",
     TIMED_QUICK + " --warmup 0,1,2", TIMED_2026},
    {COMMAND(nsys_profile), "1.1.4", "2.1.4", 5, true, "which kernels a step spends its time in",
     TIMED + "--context_length LIST 128,256,512,1024 "
             "--warmup 2 --steps 5 --precision fp32 --mode eager --trace",
     TIMED_QUICK + " --context_length 64", "--size small,xl --context_length 256,512"},
    {COMMAND(mixed_precision_accumulation), "1.1.5", "2.1.5", 1, false,
     "0.01 added a thousand times"},
    {COMMAND(benchmarking_mixed_precision), "1.1.5", "2.1.5", 2, true,
     "autocast's dtypes; fp32 against tf32, bf16",
     TIMED + "--warmup --precision LIST fp32,tf32,bf16 --mode LIST eager,flash", TIMED_QUICK,
     TIMED_2026},
    {COMMAND(memory_profiling), "1.1.6", "2.1.6", 4, false, "where a step's memory goes",
     MODEL + "--size 2.7B --context_length LIST 128,256,512 --batch_size --seed "
             "--precision LIST fp32,bf16 --mode eager --out",
     "--size small --context_length 128", "--size xl --context_length 128,2048"},
    {COMMAND(gradient_checkpointing), "", "3.2.1", 4, true,
     "what backward runs again, to keep less",
     MODEL + "--size xl --context_length 2048 --batch_size --warmup 1 --steps 2 --precision fp32 "
             "--mode eager --seed",
     // At this length a block's scores, residuals and gradients have about xl's proportions.
     "--d_model 64 --d_ff 256 --num_layers 8 --num_heads 4 --vocab_size 100 "
     "--context_length 256 --batch_size 1"},
    {COMMAND(pytorch_attention), "1.2.1", "4.1.1", 2, true, "time and memory of plain attention",
     "--steps 100", "--steps 3"},
    {COMMAND(torch_compile), "1.3", "4.2", 2, true, "eager against fused kernels",
     TIMED + "--warmup --precision LIST fp32", TIMED_QUICK, TIMED_2026},
    {COMMAND(weighted_sum), "1.3.1", "4.2.1", 0, true, "the first kernel: a weighted sum"},
    {COMMAND(flash_forward), "1.3.2", "4.2.2", 15, false, "FlashAttention-2, forward", "--seed"},
    {COMMAND(flash_backward), "1.3.2", "4.2.2", 5, false, "FlashAttention-2, backward", "--seed"},
    {COMMAND(flash_benchmarking), "1.3.2", "4.2.2", 5, true,
     "FlashAttention-2 against plain attention"},
    {COMMAND(flash_leaderboard), "1.3.3", "", 0, true, "one long sequence, as fast as it goes",
     "--d_model 1024 --num_heads 16 --context_length 16384 --precision bf16 --impl all",
     "--d_model 128 --num_heads 2 --context_length 512"},
    {COMMAND(distributed_communication_single_node), "2.1", "5.1", 5, true,
     "all-reduce: sizes, ranks, backends", RANKS + "--warmup --steps", "--warmup 1 --steps 3"},
    {COMMAND(naive_ddp), "2.2", "5.2", 5, false, "an all-reduce for each parameter", CHECK},
    {COMMAND(naive_ddp_benchmarking), "2.2", "5.2", 3, true, "what it costs", DDP + "--trace"},
    {COMMAND(minimal_ddp_flat_benchmarking), "2.3.1", "5.3.1", 2, true,
     "one all-reduce for all gradients", DDP + "--trace"},
    {COMMAND(ddp_overlap_individual_parameters), "2.3.2", "5.3.2", 5, false,
     "communicate while backward runs", CHECK},
    {COMMAND(ddp_overlap_individual_parameters_benchmarking), "2.3.2", "5.3.2", 1, true,
     "what it saves", DDP + "--trace"},
    {COMMAND(ddp_overlap_bucketed), "2.3.3", "", 8, false, "the same, in buckets",
     CHECK + "--bucket_size_mb LIST 0.0001,0.0016,0.01"},
    {COMMAND(ddp_bucketed_benchmarking), "2.3.3", "", 3, true, "which size of buckets",
     DDP + "--trace --bucket_size_mb LIST 1,10,100,1000"},
    {COMMAND(communication_accounting), "2.4", "", 10, false,
     "when communication becomes the limit",
     "--d_model 16384 --d_ff 53248 --num_layers 126 --tokens 2048 --tflops --bandwidth_gb "
     "--fsdp --tp"},
    {COMMAND(optimizer_state_sharding), "3", "6", 15, false, "AdamW's state split over the ranks",
     CHECK},
    {COMMAND(optimizer_state_sharding_accounting), "3", "6", 5, true, "its memory and time", DDP},
    {COMMAND(fsdp), "", "7", 15, false, "the weights sharded, too", CHECK},
    {COMMAND(fsdp_accounting), "", "7", 5, true, "its memory; do its gathers come in time?",
     DDP + "--trace"},
    {COMMAND(alternate_ring_all_reduce), "", "8.1", 1, false, "a ring that sends whole tensors",
     "--tensor_mb --devices --bandwidth_gb 450"},
    {COMMAND(data_parallel_calcs), "", "8.2", 3, false, "how many devices data parallelism can use",
     CALCS + "--devices"},
    {COMMAND(fsdp_calcs), "", "8.3", 3, false, "how many devices FSDP can use",
     CALCS + "--devices"},
    {COMMAND(tp_calcs), "", "8.4", 4, false, "how many devices tensor parallelism can use",
     CALCS + "--devices"},
    {COMMAND(fsdp_tp_calcs), "", "8.5", 6, false, "how many devices both together can use",
     CALCS + "--fsdp 4 --tp 2"},
    {COMMAND(leaderboard), "", "9", 10, true, "an 8.1B model's step, as fast as it goes",
     DDP + "--size 8B --context_length 32768 --warmup 3 --steps 8 --precision pure_bf16"},
    {COMMAND(list), "", "", 0, false, "every command, its sections and points"},
    {COMMAND(info), "", "", 0, false, "the device and its measured rates"},
    {COMMAND(train), "", "", 0, false, "train on a text's bytes, then continue it",
     "--data REQUIRED --d_model 128 --d_ff 512 --num_layers 4 --num_heads 4 --context_length 128 "
     "--batch_size 8 --steps 200 --lr --precision fp32 --mode flash --seed --sample",
     "--d_model 64 --d_ff 128 --num_layers 2 --context_length 32 --batch_size 4 --steps 20"},
    {COMMAND(model), "", "", 0, false, "your weights and batch in, gradients out",
     "--weights REQUIRED --batch REQUIRED --num_heads REQUIRED --out REQUIRED "
     "--rope_theta --steps 0 --lr --precision fp32 --mode flash"},
    {COMMAND(attention), "", "", 0, false, "your q, k, v in, output and gradients out",
     "--inputs REQUIRED --out REQUIRED --causal --impl"},
    {COMMAND(reproduce), "", "", 0, false,
     "all problems of an edition, or the named, each into a file", "--out notes/output"},
};

// -------------------------------------------------------------------------------------------------
// The options: a field of Options, what it takes, what it is for, and its default

// Returns a validator that takes the numbers from `least` to `most`. CLI11's own ranges take NaN.
template <class T>
static CLI::Validator between(T least, T most, const char* what) {
    auto check = [=](string& text) {
        T value = 0;
        // CLI11 would read 010 as 8 and 0x10 as 16
        const bool octal = text.size() > 1 && text[0] == '0' && isalnum(text[1]);
        const bool fits =
            !octal && CLI::detail::lexical_cast(text, value) && value >= least && value <= most;
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
// Takes the name of a file that can be written. It tries that, before the work.
static const CLI::Validator OUTPUT(
    [](string& path) -> string {
        if (path.empty()) { return "takes a file's name, got ''"; }
        try {
            replace_file(path, nullptr);
        } catch (const Failure& failure) { return failure.what(); }
        return "";
    },
    "");

// Adds an option to CLI11's parser if the command takes it.
struct Adder {
    CLI::App& app;
    const Command& command;

    template <class Field>
    void operator()(const string& name, Field& field, const CLI::Validator& values,
                    const string& help, const string& by_default = "") {
        if (!command.takes(name)) { return; }
        CLI::Option* option = app.add_option(name, field, help)->transform(values)->expected(1);
        option->allow_extra_args(false)->run_callback_for_default();
        if (by_default != "") { option->default_val(by_default); }
    }
    void flag(const string& name, bool& field, const string& help) {
        if (command.takes(name)) { app.add_flag(name, field, help); }
    }
};

// Adds those that many commands take.
static void add_common_options(Adder& add, Options& o) {
    add.app.option_defaults()->group("Common options");
    add("--edition", o.edition, one_of({"2025", "2026"}),
        "the handout whose sizes are the defaults", "2025");
    add("--device", o.device, one_of({"auto", "cpu", "cuda"}),
        "auto takes a GPU if there is one (ranks: if each has one)", "auto");
    add("--size", o.size, one_of({"small", "medium", "large", "xl", "2.7B", "10B", "8B"}),
        "a model of the handout; xl is 1600 wide in 2025's, 2560 in 2026's");
    add("--d_model", o.d_model, whole(1), "width of the model");
    add("--d_ff", o.d_ff, whole(1), "width of the feed-forward layer");
    add("--num_layers", o.num_layers, whole(1), "number of blocks");
    add("--num_heads", o.num_heads, whole(1), "number of attention heads");
    add("--vocab_size", o.vocab_size, whole(1), "number of different tokens; 8B has 151936",
        "10000");
    add("--context_length", o.context_lengths, whole(1), "tokens in a sequence");
    add("--batch_size", o.batch_size, whole(1),
        "sequences in a batch, of each rank (leaderboard: of all)", "4");
    add("--warmup", o.warmup, whole(0), "untimed steps before the timed ones", "5");
    add("--steps", o.steps, whole(add.command.run == cmd_model ? 0 : 1),
        "steps that are timed, or trained", "10");
    add("--precision", o.precision, one_of({"fp32", "tf32", "bf16", "fp16", "pure_bf16"}),
        "bf16 and fp16: autocast; pure_bf16: weights, gradients and moments, too", "fp32");
    add("--mode", o.mode, one_of({"eager", "fused", "flash"}),
        "eager: a kernel per operation; flash: fused, with FlashAttention", "flash");
    add("--seed", o.seed, whole(0, INT_MAX), "seed of all random numbers", "0");
    add("--format", o.format, one_of({"md", "csv"}), "format of the tables", "md");
    add.flag(
        "--quick", o.quick,
        "shrink each run to half a minute or less on two CPU cores; on a CPU the default of most "
        "benchmarks");
}

// Adds those that few commands take, topic by topic.
static void add_own_options(Adder& add, Options& o) {
    add.app.option_defaults()->group("Its own options");

    // A step
    add("--checkpoint", o.checkpoint, CLI::Validator(),
        "what backward runs again instead of keeping it: groups of N blocks, nested, the "
        "feed-forward layers (ffn) or N of them (ffn:N); those, and N blocks whole (blocks:N); "
        "untyped, leaderboard chooses",
        "none");
    add("--trace", o.trace, OUTPUT, "the file for what ran when, for Perfetto or chrome://tracing");
    if (add.command.writes_folder()) {
        add("--out", o.out, CLI::Validator(), "the folder to write to");
    } else {
        add("--out", o.out, OUTPUT, "the file to write");
    }

    // Attention, and what comes from files
    add.flag("--causal", o.causal, "query i sees keys j <= i only");
    set<string> impls = {"auto"};
    if (add.command.run == cmd_flash_leaderboard) { impls.insert("all"); }
    for (const AttentionImpl& impl : table_of<AttentionImpl>()) { impls.insert(impl.name); }
    add("--impl", o.impl, CLI::IsMember(impls, CLI::ignore_case),
        "which implementation of attention runs", "auto");
    add("--inputs", o.inputs, CLI::ExistingFile,
        "safetensors file of q, k, v and perhaps do, [B, H, S, D] or [B, S, D]");
    add("--weights", o.weights, CLI::ExistingFile, "the state_dict, a safetensors file");
    add("--batch", o.batch, CLI::ExistingFile, "tokens and targets of [B, T], a safetensors file");
    add("--rope_theta", o.rope_theta, number(), "base of the rotary embedding", "10000");

    // Training
    add("--data", o.data, CLI::ExistingFile, "the text to train on; its bytes are the tokens");
    add("--lr", o.lr, number(), "learning rate", "0.001");
    add("--sample", o.sample, whole(0), "bytes to write as a continuation", "200");

    // Ranks
    add("--nproc", o.nproc, whole(1, 64),
        "ranks to start (all-reduce: also 4 and 6; leaderboard without two GPUs: 1); under "
        "torchrun and the like theirs are taken",
        "2");
    add("--backend", o.backend, one_of({"auto", "nccl", "gloo"}),
        "library of the collectives; auto: nccl if each rank has a GPU", "auto");
    add("--timeout", o.timeout, number(1e5), "seconds that a rank waits for the others", "60");
    add("--bucket_size_mb", o.bucket_size_mb, number(1e5), "bucket sizes in MB (1e6 bytes)");

    // The calculations' letters
    add("--tokens", o.tokens, whole(1, INT_MAX), "B, tokens of the batch (2.4 (b): on a device)");
    add("--devices", o.devices, whole(2), "N, how many devices share the work", "8");
    add("--tensor_mb", o.tensor_mb, number(), "S, the tensor that is reduced, in 1e6 bytes",
        "1000");
    add("--tflops", o.tflops, number(), "C, rate of a chip, in 1e12 FLOP/s", "460");
    add("--bandwidth_gb", o.bandwidth_gb, number(),
        "W, of a link, or out of a device, in 1e9 bytes/s", "180");
    add("--fsdp", o.fsdp, whole(1, 4096), "X or N_FSDP, chips along the FSDP axis", "16");
    add("--tp", o.tp, whole(1, 4096), "Y or N_TP, chips along the tensor-parallel axis", "4");
}

// Hands what a command's row tells of its options to CLI11: defaults, REQUIRED and LIST. An option
// that was typed keeps its value. default_val() also writes the option's field, as Adder asked by
// run_callback_for_default(): so a default may change after the words are parsed, too. CLI11 throws
// if the row names an option that was not added.
static void configure(CLI::App& app, const string& told) {
    std::istringstream words(told);
    CLI::Option* option = nullptr;
    for (string word; words >> word;) {
        if (word[0] == '-') {
            option = app.get_option(word);
        } else if (word == "REQUIRED") {
            option->required();
        } else if (word == "LIST") {
            option->delimiter(',')->expected(1, -1);  // -1: as many as there are
        } else if (option->count() == 0) {            // nobody typed it
            option->default_val(word);
        }
    }
}

// Adds the command's options to the parser, in the order in which --help shows them.
static void add_options(CLI::App& app, const Command& command, Options& o) {
    app.set_help_flag("--help,-h", "this text");
    app.get_formatter()->column_width(32);
    Adder add{app, command};
    add_common_options(add, o);
    add_own_options(add, o);
    if (command.run == cmd_reproduce) {
        app.add_option("problem", o.words, "which to run; none: all");
    }
    if (command.takes("--size")) {
        for (const char* other : {"--d_model", "--d_ff", "--num_layers", "--num_heads"}) {
            app.get_option("--size")->excludes(other);
        }
    }

    configure(app, command.options);
    if (command.is_problem() && !command.is_in("2025")) { configure(app, "--edition 2026"); }
}

// -------------------------------------------------------------------------------------------------
// From the words on the command line to Options

static const Command& find_command(const string& word) {
    for (const Command& c : COMMANDS) {
        if (word == c.id) { return c; }
    }
    usage_error("%s: no such command; `cs336 list` names them", word.empty() ? "''" : word.c_str());
}

static bool is_quick(const Command& c, const Options& o) {
    return o.quick || (c.timed && (o.device == "cpu" || cuda_devices() == 0));
}

// Parses what follows the command's id. Returns false if the words ask for help. What CLI11 does
// not take is a usage error.
static bool parse_words(CLI::App& app, const vector<string>& words) {
    for (const string& word : words) {
        // Refuses 1,,2, which CLI11 takes for 1,2, also in a file's name. The list is what stands
        // behind '=', or the whole word: npos + 1 is 0.
        const string list = "," + word.substr(word.find('=') + 1) + ",";
        if (list != ",," && list.find(",,") != string::npos) {
            usage_error("%s: a comma has nothing before or behind it", word.c_str());
        }
    }

    try {
        // CLI11 takes the words from the end.
        app.parse(vector<string>(words.rbegin(), words.rend() - 1));
    } catch (const CLI::CallForHelp&) {
        // The caller prints it.
        return false;
    } catch (const CLI::ExtrasError&) {
        const string word = app.remaining()[0];
        const char* hint = word[0] == '-' ? "" : ", and a list takes commas";
        usage_error("%s: no such option; --help lists them%s", word.c_str(), hint);
    } catch (const CLI::ParseError& e) { usage_error("%s", e.what()); }
    return true;
}

// Makes the folder that a typed --out names, if the command writes one. It is a usage error if that
// fails, or if --out names one of the input files, also by another path.
static void check_out(const Command& command, const Options& o) {
    std::error_code error;
    for (const string& input : {o.weights, o.batch, o.inputs}) {
        if (std::filesystem::equivalent(input, o.out, error)) {
            usage_error("--out: takes another file than the input");
        }
    }
    if (command.writes_folder() && o.has("out")) {
        std::filesystem::create_directories(o.out, error);
        if (error) { usage_error("--out '%s': %s", o.out.c_str(), error.message().c_str()); }
    }
}

// Sets Options and the context from `words`, the command's id and what follows. Returns false if
// the words ask for help, which is then printed.
static bool parse_options(const Command& command, const vector<string>& words, Options& o) {
    o.command = command.id;
    o.command_line = words;
    CLI::App app(command.what, "cs336 " + command.id);
    add_options(app, command, o);
    const bool runs = parse_words(app, words);
    // Only the typed words say which edition it is. --help, below, shows that edition's defaults.
    if (o.edition == "2026") { configure(app, command.in_2026); }
    if (!runs) {
        printf("%s", app.help().c_str());
        return false;
    }

    for (const CLI::Option* option : app.get_options()) {
        if (option->count()) { o.given.insert(option->get_single_name()); }
        const vector<string> values = option->results();
        if (set<string>(values.begin(), values.end()).size() < values.size()) {
            usage_error("%s: takes each value once", option->get_name().c_str());
        }
    }
    if (command.is_problem() && !command.is_in(o.edition)) {
        usage_error("--edition: got %s, whose handout has no such problem", o.edition.c_str());
    }

    o.quick = is_quick(command, o);
    if (o.quick) {
        configure(app, command.quick);  // what was typed stays
        context.sizes = "; sizes of --quick where none is typed";
    }
    if (!o.context_lengths.empty()) { o.context_length = o.context_lengths[0]; }
    // It is a usage error if the sizes do not fit each other. Ranks see that in choose_step(),
    // which first puts in the sizes of --quick.
    if (command.takes("--vocab_size") && !command.takes("--backend")) { configs_of(o); }
    check_out(command, o);
    context.checkpoint = checkpointing_from(o.checkpoint);
    context.csv = o.format == "csv";
    return true;
}

// -------------------------------------------------------------------------------------------------
// list, reproduce, info

// Prints a table of all commands.
static int cmd_list(const Options&) {
    Table table{
        "2025, 2026: that handout's section; `cs336 <command> --help` shows a command's options",
        {"command", "2025", "2026", "points", "what"}};
    for (const Command& c : COMMANDS) {
        table.row(c.id, c.section_2025, c.section_2026, c.points ? to_string(c.points) : "",
                  c.what);
    }
    print(table);
    return 0;
}

// Returns whether `text` is what a program of this commit prints on this device, at these sizes and
// in this format. Where the commit is unknown or dirty, no text is. On a GPU a text that the CPU
// printed is not: that problem runs again.
static bool is_as_now(const string& text, const string& of_commit, bool quick) {
    auto has = [&](const string& part) { return text.find(part) != string::npos; };
    if (of_commit == "unknown" || has("dirty")) { return false; }

    string here = device_description();
    // Of a CPU only the name counts: its threads stand behind it, and ranks have fewer.
    if (context.device == CPU) { here = here.substr(0, here.find(',')); }
    const bool device = has(here) || (context.device == CPU && has("meta (nothing is computed)"));

    return device && has("commit " + of_commit) && quick == has("sizes of --quick") &&
           context.csv == (text[0] == '#');
}

// Runs each problem in a process of its own and writes what it prints into a file, unless the file
// is as now. Returns 1 if one failed, else 0; a failure does not keep the others from running.
static int cmd_reproduce(const Options& o) {
    vector<const Command*> problems;
    for (const string& id : o.words) { problems.push_back(&find_command(id)); }
    for (const Command& c : COMMANDS) {
        if (o.words.empty() && c.is_in(o.edition)) { problems.push_back(&c); }
    }

    // The children open the device.
    context.device = (o.device == "cpu" || cuda_devices() == 0) ? CPU : CUDA;
    if (!o.has("out") && (o.quick || context.device == CPU)) {
        usage_error(
            "--out: is required on a CPU and with --quick; notes/output is of GPUs, at the "
            "handout's sizes");
    }

    std::filesystem::create_directories(o.out);
    int exit_code = 0;
    for (const Command* c : problems) {
        vector<string> words = {c->id, "--device", o.device, "--format", o.format};
        if (c->is_in(o.edition)) { words.insert(words.end(), {"--edition", o.edition}); }
        if (o.quick) { words.push_back("--quick"); }

        // A model's sizes are not the same in both handouts.
        const bool differs = c->is_in("2025") && c->is_in("2026") && c->takes("--size");
        const char* suffix = o.edition == "2026" && differs ? "-2026.md" : ".md";
        const string path = o.out + "/" + c->id + suffix;
        std::ostringstream before;
        before << ifstream(path).rdbuf();  // stays empty if there is no such file
        if (is_as_now(before.str(), commit(), is_quick(*c, o))) {
            note("%s: of this commit and device already", path.c_str());
            continue;
        }

        note("%s", path.c_str());
        try {
            replace_file(path, nullptr);  // fails before the work if the file cannot be written
            save_file(path, run_ourselves(words));
        } catch (const Failure& failure) {
            note("%s", failure.what());
            exit_code = 1;
        }
    }
    return exit_code;
}

// Returns the rate of the product of two [n, n] matrices, in TFLOP/s.
static double matmul_tflops(Precision precision, int64_t n) {
    context.precision = precision;
    const DType dtype = matmul_dtype();
    Tensor a = empty({n, n}, dtype), b = empty({n, n}, dtype), c = empty({n, n}, dtype);
    // With zeros a GPU draws less power and clocks higher.
    fill_normal(a, 0, 1);
    fill_normal(b, 0, 2);
    const double ms = median_ms([&] { gemm(c, a, false, b, false); });
    return 2.0 * n * n * n / ms / 1e9;
}

// Returns the rate of a copy, in GB/s; each byte is read and written.
static double copy_gb_per_s(int64_t bytes) {
    Tensor from = zeros({bytes / 4}, F32), to = zeros({bytes / 4}, F32);
    const double ms = median_ms([&] { copy_or_add(to, from, false); });
    return 2.0 * bytes / ms / 1e6;
}

// Prints this machine's ceilings. An operation takes at least its FLOPs over the rate of products,
// and at least its bytes over the rate of copies.
static int cmd_info(const Options& o) {
    choose_device(o.device);
    const bool gpu = context.device == CUDA;
    const int n = gpu ? 8192 : 1024, mib = gpu ? 1024 : 256;
    vector<Precision> precisions = {FP32};
    if (gpu) { precisions = {PREC_BF16, PREC_FP16, TF32, FP32}; }

    Table table{"info: medians of 10 runs", {"what", "measured", "peak by data sheet", "unit"}};
    table.row("GPUs", cuda_devices(), "", "");
    table.row("memory available", to_gib(available_memory(context.device)), "", "GiB");
    for (Precision p : precisions) {
        table.row(strprintf("matmul %d^3 %s", n, name_of(p)), matmul_tflops(p, n), dense_peak(p),
                  "TFLOP/s");
    }
    table.row(strprintf("copy of %d MiB, read + written", mib), copy_gb_per_s((int64_t)mib << 20),
              "", "GB/s");
    print(table);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// main

// Writes to stdout, or to stderr if there was no command.
static void print_usage(FILE* to) {
    fprintf(to,
            "cs336: every problem of the CS336 systems assignment in C++ and CUDA\n\n"
            "usage: cs336 <command> [options]\n"
            "       cs336 <command> --help         its options and their defaults\n"
            "       cs336 list                     every command\n"
            "       cs336 --version                the commit that this was built from\n\n"
            "exit codes: 0 done, 1 it ran and failed, 2 wrong usage\n");
}

// Runs a command and returns its exit code. A failure prints one line on stderr.
static int run_command(const vector<string>& words) {
    string who = "cs336";
    try {
        is_rank();  // refuses wrong variables of a launcher here, where that becomes one line
        const Command& command = find_command(words[0]);
        who += " " + command.id;
        Options o;
        return parse_options(command, words, o) ? command.run(o) : 0;
    } catch (const Failure& failure) {
        // Whoever closed the pipe has read enough: we end as others do, without a word.
        if (failure.exit_code != 128 + SIGPIPE) { note("%s: %s", who.c_str(), failure.what()); }
        return failure.exit_code;
    } catch (const std::exception& e) {
        note("%s: %s", who.c_str(), e.what());
        return 1;
    }
}

// Answers --help and --version; all other words are a command's. Returns the exit code.
int main(int argc, char** argv) {
    // If stdout or stderr is closed, the next file to be opened would take its number and our text.
    // So /dev/full takes the number. Where there is no such file, -1 is a large number and ends
    // this.
    while ((unsigned)open("/dev/full", O_RDWR) < 2) {}
    // Whoever started us may ignore SIGCHLD; waitpid() would then find no children.
    signal(SIGCHLD, SIG_DFL);
    // If a file grows over `ulimit -f`, the write fails and says so.
    signal(SIGXFSZ, SIG_IGN);
    choose_cpu_settings(argv);
    if (argc < 2) {
        print_usage(stderr);
        return 2;
    }

    const vector<string> words = {argv + 1, argv + argc};
    int exit_code = 0;
    if (words[0] == "--help" || words[0] == "-h" || words[0] == "help") {
        print_usage(stdout);
    } else if (words[0] == "--version") {
        printf("%s\n", commit().c_str());
    } else {
        exit_code = run_command(words);
    }
    // Of what was printed only tables and answers have been checked.
    if (exit_code == 0 && fflush(stdout) != 0) {
        note("cs336: cannot write to stdout: %s", strerror(errno));
        return 1;
    }

    // Whoever started us sees the signal that ended us. A rank's launcher reads the code.
    if (exit_code > 128 && !is_rank()) {
        signal(exit_code - 128, SIG_DFL);
        raise(exit_code - 128);
    }
    return exit_code;
}
