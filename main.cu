// main.cu: the commands and their options, help, `list`, `reproduce`. Nothing is computed here.
#include "commands.h"

#include <CLI/CLI.hpp>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <new>
#include <sstream>

#include <fcntl.h>
#include <unistd.h>

static int cmd_list(const Options& o);
static int cmd_reproduce(const Options& o);

// ---------------------------------------------------------------------------------------------------------------------
// The commands, in the handout's order. `options` are keys of the option table below: `key=text` has another default
// than that table, `key!` has to be given, `key*` takes a list, since the experiment runs all of it.

struct Command {
    const char* id;
    const char *section_2025, *section_2026;  // "": that handout has no such problem; both: a tool
    int points;                               // the same in both; 0: none
    int gpus;                                 // that it measures on at full size; 0: it measures no time
    const char* what;
    const char* file;
    int (*run)(const Options&);
    std::string options;
    bool is_problem() const { return *section_2025 || *section_2026; }
};

static const std::string MODEL = "d_model d_ff num_layers num_heads vocab_size ";
static const std::string TIMED =
    "size*=small,medium,large,xl,2.7B " + MODEL + "context_length=256 batch_size steps seed trace ";
static const std::string RANKS = "nproc backend timeout ";
static const std::string CHECK = "seed " + RANKS;
static const std::string DDP =
    "size=xl " + MODEL + "context_length=512 batch_size=2 warmup steps mode=flash checkpoint seed " + RANKS;
// The defaults are the 2026 leaderboard's layer and batch, and a device of an H200 node.
static const std::string CALCS = "tokens=65536 d_model=4096 d_ff=11008 tflops=989 bandwidth_gb=450 ";

static const Command COMMANDS[] = {
    {"benchmarking_script", "1.1.3", "2.1.3", 4, 1, "time forward, backward and the whole step of the Transformer",
     "bench_step.cu", cmd_benchmarking_script,
     TIMED + "warmup*=5 precision*=fp32 mode*=eager,flash checkpoint recompute head_chunk"},
    {"nsys_profile", "1.1.4", "2.1.4", 5, 1, "which kernels a step spends its time in", "profile.cu", cmd_nsys_profile,
     "size*=small,medium,large,xl,2.7B " + MODEL +
         "context_lengths=128,256,512,1024 batch_size warmup=2 steps=5 precision*=fp32 mode*=eager seed "
         "trace"},
    {"mixed_precision_accumulation", "1.1.5", "2.1.5", 1, 0, "add 0.01 a thousand times in fp32, fp16 and bf16",
     "precision.cu", cmd_mixed_precision_accumulation, ""},
    {"benchmarking_mixed_precision", "1.1.5", "2.1.5", 2, 1, "autocast's dtypes, and what fp32, tf32 and bf16 cost",
     "bench_step.cu", cmd_benchmarking_mixed_precision, TIMED + "warmup precision*=fp32,tf32,bf16 mode=flash"},
    {"memory_profiling", "1.1.6", "2.1.6", 4, 1, "where a step's memory goes", "memory.cu", cmd_memory_profiling,
     "size*=2.7B " + MODEL +
         "context_lengths=128,256,512 batch_size seed precision*=fp32,bf16 mode=eager checkpoint recompute head_chunk "
         "out_folder"},
    {"gradient_checkpointing", "", "3.2.1", 4, 1, "what backward runs again instead of keeping it",
     "bench_checkpoint.cu", cmd_gradient_checkpointing,
     "size=xl " + MODEL + "context_length=2048 batch_size warmup=2 steps=5 precision=fp32 mode=eager blocks seed"},
    {"pytorch_attention", "1.2.1", "4.1.1", 2, 1, "time and memory of plain attention", "bench_attention.cu",
     cmd_pytorch_attention, "steps=100 trace"},
    {"torch_compile", "1.3", "4.2", 2, 1, "eager against fused kernels", "bench_step.cu", cmd_torch_compile,
     TIMED + "warmup precision*=fp32"},
    {"weighted_sum", "1.3.1", "4.2.1", 0, 1, "the first kernel: a weighted sum", "attention.cu", cmd_weighted_sum,
     "trace"},
    {"flash_forward", "1.3.2", "4.2.2", 15, 0, "FlashAttention-2, forward", "attention.cu", cmd_flash_forward,
     "seed trace"},
    {"flash_backward", "1.3.2", "4.2.2", 5, 0, "FlashAttention-2, backward", "attention.cu", cmd_flash_backward,
     "seed deterministic trace"},
    {"flash_benchmarking", "1.3.2", "4.2.2", 5, 1, "FlashAttention-2 against plain attention", "bench_attention.cu",
     cmd_flash_benchmarking, "trace"},
    {"flash_leaderboard", "1.3.3", "", 0, 1, "one long causal sequence, as fast as it goes", "bench_attention.cu",
     cmd_flash_leaderboard,
     "num_heads=16 head_size context_length=16384 precision=bf16 not_causal impl=all deterministic trace"},
    {"distributed_communication_single_node", "2.1", "5.1", 5, 2, "all-reduce: sizes, ranks, backends", "bench_ddp.cu",
     cmd_distributed_communication_single_node, "sizes_mb warmup steps " + RANKS},
    {"naive_ddp", "2.2", "5.2", 5, 0, "an all-reduce for each parameter", "ddp.cu", cmd_naive_ddp, CHECK},
    {"naive_ddp_benchmarking", "2.2", "5.2", 3, 2, "what it costs", "bench_ddp.cu", cmd_naive_ddp_benchmarking,
     DDP + "precision=fp32 reduce_dtype trace"},
    {"minimal_ddp_flat_benchmarking", "2.3.1", "5.3.1", 2, 2, "one all-reduce for all gradients", "bench_ddp.cu",
     cmd_minimal_ddp_flat_benchmarking, DDP + "precision=fp32 reduce_dtype trace"},
    {"ddp_overlap_individual_parameters", "2.3.2", "5.3.2", 5, 0, "communicate while backward runs", "ddp.cu",
     cmd_ddp_overlap_individual_parameters, CHECK},
    {"ddp_overlap_individual_parameters_benchmarking", "2.3.2", "5.3.2", 1, 2, "what it saves", "bench_ddp.cu",
     cmd_ddp_overlap_individual_parameters_benchmarking, DDP + "precision=fp32 reduce_dtype trace"},
    {"ddp_overlap_bucketed", "2.3.3", "", 8, 0, "the same, in buckets", "ddp.cu", cmd_ddp_overlap_bucketed,
     "bucket_size_mb=0.0001,0.0016,0.01 " + CHECK},
    {"ddp_bucketed_benchmarking", "2.3.3", "", 3, 2, "which size of buckets", "bench_ddp.cu",
     cmd_ddp_bucketed_benchmarking, DDP + "precision=fp32 bucket_size_mb reduce_dtype trace"},
    {"communication_accounting", "2.4", "", 10, 0, "when communication becomes the limit", "accounting.cu",
     cmd_communication_accounting,
     "d_model=16384 d_ff=53248 num_layers=126 tokens=2048 gpu_gb tpu_gb tflops bandwidth_gb fsdp tp links_fsdp "
     "links_tp"},
    {"optimizer_state_sharding", "3", "6", 15, 0, "AdamW's state split over the ranks", "ddp.cu",
     cmd_optimizer_state_sharding, CHECK},
    {"optimizer_state_sharding_accounting", "3", "6", 5, 2, "its memory and time", "bench_ddp.cu",
     cmd_optimizer_state_sharding_accounting, DDP + "precision=fp32"},
    {"fsdp", "", "7", 15, 0, "the weights sharded, too", "ddp.cu", cmd_fsdp, CHECK},
    {"fsdp_accounting", "", "7", 5, 2, "its memory, and whether its gathers come in time", "bench_fsdp.cu",
     cmd_fsdp_accounting, DDP + "precision=fp32 reduce_dtype"},
    {"alternate_ring_all_reduce", "", "8.1", 1, 0, "all-reduce that sends whole tensors around a ring", "calcs.cu",
     cmd_alternate_ring_all_reduce, "tensor_mb devices bandwidth_gb=450"},
    {"data_parallel_calcs", "", "8.2", 3, 0, "how many devices data parallelism can use", "calcs.cu",
     cmd_data_parallel_calcs, CALCS + "devices"},
    {"fsdp_calcs", "", "8.3", 3, 0, "how many devices FSDP can use", "calcs.cu", cmd_fsdp_calcs, CALCS + "devices"},
    {"tp_calcs", "", "8.4", 4, 0, "how many devices tensor parallelism can use", "calcs.cu", cmd_tp_calcs,
     CALCS + "devices"},
    {"fsdp_tp_calcs", "", "8.5", 6, 0, "how many devices both together can use", "calcs.cu", cmd_fsdp_tp_calcs,
     CALCS + "fsdp=4 tp=2"},
    {"leaderboard", "", "9", 10, 1, "a training step of an 8.1B model, all in bf16, as fast as it goes",
     "leaderboard.cu", cmd_leaderboard,
     "size=8B " + MODEL +
         "context_length=32768 batch_size=2 warmup=3 steps=8 precision=pure_bf16 mode=flash "
         "head_chunk=2048 checkpoint recompute grad_accumulation seed " +
         RANKS},
    {"list", "", "", 0, 0, "every problem: sections, points, file, whether it runs here", "main.cu", cmd_list, ""},
    {"info", "", "", 0, 0, "the device, its libraries, its measured rates", "bench_step.cu", cmd_info, ""},
    {"train", "", "", 0, 0, "train on the bytes of a text, then continue it", "train.cu", cmd_train,
     "data! d_model=128 d_ff=512 num_layers=4 num_heads=4 context_length=128 batch_size=8 steps=200 lr precision=fp32 "
     "mode=flash seed save load sample trace"},
    {"model", "", "", 0, 0, "your weights and batch in, our logits, loss and gradients out", "train.cu", cmd_model,
     "weights! batch! num_heads! out! rope_theta updates lr precision=fp32 mode=flash"},
    {"attention", "", "", 0, 0, "your q, k, v in, our output and gradients out", "bench_attention.cu", cmd_attention,
     "inputs! out! causal impl deterministic"},
    {"reproduce", "", "", 0, 0, "all problems, or those that are named, each into a file of --out", "main.cu",
     cmd_reproduce, "out_folder=notes/output"},
};

// What 2026's handout sets otherwise. Its xl is another model, too: configs_of.
static void take_edition_2026(Options& o) {
    auto set = [&](const char* name, auto Options::*field, const auto& value) {
        if (!o.has(name)) { o.*field = value; }
    };
    if (o.command == "nsys_profile") {
        set("size", &Options::size, std::vector<std::string>{"small", "xl"});
        set("context_length", &Options::context_lengths, std::vector<int>{256, 512, 1024});
    } else if (o.command == "memory_profiling") {
        set("size", &Options::size, std::vector<std::string>{"xl"});
        set("context_length", &Options::context_lengths, std::vector<int>{128, 2048});
    } else if (o.size.size() > 1) {  // the sweeps over all sizes
        set("size", &Options::size, std::vector<std::string>{"small", "medium", "large", "xl", "10B"});
        set("context_length", &Options::context_length, 512);
    }
}
// Is the problem the same in both editions, so that one output is of both?
static bool depends_on_edition(const Command& c) {
    return *c.section_2025 && *c.section_2026 &&
           (c.options.find("size") == 0 || c.options.find(CHECK) != std::string::npos);
}

// ---------------------------------------------------------------------------------------------------------------------
// The options. A field of Options, what it takes, and what it is for.

struct OptionRow {
    const char* key;  // the name on the command line is its beginning, up to a dot
    std::string by_default, help;
    std::function<CLI::Option*(CLI::App& app, Options& o, const std::string& name, const std::string& help)> add;
};

template <class T>
static OptionRow option(const char* key, T Options::*field, const CLI::Validator& takes, const std::string& by_default,
                        const std::string& help) {
    return {key, by_default, help, [=](CLI::App& app, Options& o, const std::string& name, const std::string& text) {
                CLI::Option* added = app.add_option(name, o.*field, text)->run_callback_for_default();
                return added->transform(takes);
            }};
}
static OptionRow flag(const char* key, bool Options::*field, const std::string& help) {
    return {key, "", help, [=](CLI::App& app, Options& o, const std::string& name, const std::string& text) {
                return app.add_flag(name, o.*field, text)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
            }};
}

static CLI::Validator takes(const std::string& what, const std::function<bool(const std::string&)>& fits) {
    auto check = [=](std::string& text) { return fits(text) ? "" : "got '" + text + "', takes " + what; };
    return CLI::Validator(check, "");
}
static CLI::Validator whole(int least, int most = 1 << 20) {
    return takes(strprintf("a whole number from %d to %d", least, most), [=](const std::string& text) {
        char* end;
        errno = 0;
        const long value = strtol(text.c_str(), &end, 10);
        return errno == 0 && *end == 0 && isdigit((unsigned char)text[0]) && value >= least && value <= most;
    });
}
static CLI::Validator number(double below = INFINITY, bool zero = false) {
    const std::string what = zero ? "a finite number, 0 or greater" : "a finite number greater than 0";
    return takes(what + (std::isinf(below) ? "" : strprintf(" and less than %g", below)), [=](const std::string& text) {
        char* end;
        const double value = strtod(text.c_str(), &end);
        return *end == 0 && (value > 0 || (zero && value == 0)) && std::isfinite((float)value) && value < below;
    });
}
static CLI::Validator one_of(const std::vector<std::string>& names) {
    auto check = [=](std::string& text) -> std::string {
        for (const std::string& name : names) {
            if (lower_name(name) == lower_name(text)) { return text = name, ""; }  // 2.7b for 2.7B
        }
        return "got '" + text + "', takes " + join(names, ", ") + did_you_mean(text, names);
    };
    return CLI::Validator(check, "");
}
static CLI::Validator some_file() {
    return takes("a file name", [](const std::string& text) { return !text.empty(); });
}
// Tried before the work.
static CLI::Validator output() {
    auto check = [](std::string& path) -> std::string {
        std::error_code ignored;
        const auto status = std::filesystem::status(path, ignored);
        if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
            return "got '" + path + "', takes the name of a new or regular file";
        }
        try {
            replace_file(path, nullptr);
        } catch (const Failure& failure) { return failure.what(); }
        return "";
    };
    return CLI::Validator(check, "");
}
static CLI::Validator folder() {  // made by the command if it is not there
    return takes("a folder that can be written to, or be made in one", [](const std::string& text) {
        const std::filesystem::path path = std::filesystem::absolute(text).lexically_normal();
        std::error_code ignored;
        const auto there = std::filesystem::exists(path, ignored) ? path : path.parent_path();
        return std::filesystem::is_directory(there, ignored) && access(there.c_str(), W_OK | X_OK) == 0;
    });
}
static CLI::Validator checkpointing() {
    auto check = [](std::string& text) -> std::string {
        for (int named : {CHECKPOINT_FFN, CHECKPOINT_HALF, CHECKPOINT_HALVES, CHECKPOINT_NESTED}) {
            if (text == name_of_checkpoint(named)) { return text = std::to_string(named), ""; }
        }
        int first = 0, n = 0;  // ffn:N and blocks:N are entries of Checkpointing, plus N
        std::string digits = text;
        for (const auto& [kind, entry] :
             {std::pair("ffn:", CHECKPOINT_SOME_FFN), {"blocks:", CHECKPOINT_SOME_BLOCKS}}) {
            if (text.compare(0, strlen(kind), kind) == 0) { first = entry, digits = text.substr(strlen(kind)); }
        }
        const bool is_number = CLI::detail::lexical_cast(digits, n) && isdigit((unsigned char)digits[0]);
        if (!is_number || n > MAX_CHECKPOINT || (first && n == 0)) {
            return "got '" + text +
                   "', takes a whole number up to 1048576, ffn, ffn:N, blocks:N, half, halves or nested";
        }
        return text = std::to_string(first + n), "";
    };
    return CLI::Validator(check, "");
}
static std::vector<std::string> implementations() {
    std::vector<std::string> names = {"all", "auto"};
    for (const AttentionImpl& impl : table_of<AttentionImpl>()) {
        if (std::find(names.begin(), names.end(), impl.name) == names.end()) { names.push_back(impl.name); }
    }
    return names;
}

static const std::vector<OptionRow>& option_table() {
    using O = Options;
    static const std::vector<OptionRow> table = {
        // Of most commands
        option("edition", &O::edition, one_of({"2025", "2026"}), "2025",
               "the handout whose sizes and lengths are the defaults; xl is 1600 wide in 2025's, 2560 in 2026's"),
        option("device", &O::device, one_of({"auto", "cpu", "cuda"}), "auto", "auto takes a GPU if there is one"),
        option("size", &O::size, one_of({"small", "medium", "large", "xl", "2.7B", "10B", "8B"}), "",
               "a model of the handout"),
        option("d_model", &O::d_model, whole(1), "", "width of the model"),
        option("d_ff", &O::d_ff, whole(1), "", "width of the feed-forward layer"),
        option("num_layers", &O::num_layers, whole(1), "", "number of blocks"),
        option("num_heads", &O::num_heads, whole(1), "", "number of attention heads"),
        option("vocab_size", &O::vocab_size, whole(1), "10000", "number of different tokens; 8B has 151936"),
        option("context_length", &O::context_length, whole(1), "", "tokens in a sequence"),
        option("context_lengths", &O::context_lengths, whole(1), "", "tokens in a sequence"),
        option("batch_size", &O::batch_size, whole(1), "4", "sequences in a batch, of each rank"),
        option("warmup", &O::warmup, whole(0), "5", "untimed steps before the timed ones"),
        option("steps", &O::steps, whole(1), "10", "steps that are timed, or trained"),
        option("updates", &O::steps, whole(0), "0", "AdamW steps on the batch"),
        option("precision", &O::precision, one_of({"fp32", "tf32", "bf16", "fp16", "pure_bf16"}), "fp32",
               "bf16 and fp16 follow autocast's rules; pure_bf16 keeps weights, gradients and moments in bf16, too"),
        option("mode", &O::mode, one_of({"eager", "fused", "flash"}), "flash",
               "eager: one kernel per operation; fused: fused kernels; flash: fused, with FlashAttention"),
        option("seed", &O::seed,
               takes("a whole number below 2^64",
                     [](const std::string& text) {
                         return text.size() < 21 && text.find_first_not_of("0123456789") == std::string::npos;
                     }),
               "0", "seed of all random numbers"),
        option("format", &O::format, one_of({"md", "csv"}), "md", "format of the tables"),
        flag("quick", &O::quick, "shrink the run to some seconds on two CPU cores; also the default without a GPU"),
        // Of a step
        option("checkpoint", &O::checkpoint, checkpointing(), "0",
               "what backward runs again instead of keeping it: groups of N blocks; half, halves or nested; the "
               "feed-forward layers (ffn) or N of them (ffn:N); those, and N blocks whole (blocks:N)"),
        flag("recompute", &O::recompute, "backward computes the norms' and SwiGLU's outputs again"),
        option("head_chunk", &O::head_chunk, whole(0), "0", "rows of the logits that exist at a time; 0: all"),
        option("grad_accumulation", &O::grad_accumulation, whole(1), "1", "backward passes per step"),
        option("trace", &O::trace, output(), "", "write what ran when, for Perfetto or chrome://tracing"),
        option("out", &O::out, output(), "", "the file to write"),
        option("out_folder", &O::out, folder(), "", "the folder to write to"),
        option("blocks", &O::blocks, whole(1, 64), "16", "N, blocks of the small model of part (a)"),
        // Attention, and what comes from files
        option("head_size", &O::head_size, one_of({"16", "32", "64", "80", "128"}), "64", "D"),
        flag("not_causal", &O::not_causal, "every query sees all keys"),
        flag("causal", &O::causal, "query i sees keys j <= i only"),
        option("impl", &O::impl, one_of(implementations()), "auto", "which implementation of attention runs"),
        flag("deterministic", &O::deterministic, "give the same bits in every run"),
        option("inputs", &O::inputs, some_file(), "", "safetensors file of q, k, v and perhaps do, [B, H, S, D]"),
        option("weights", &O::weights, some_file(), "", "the state_dict, a safetensors file"),
        option("batch", &O::batch, some_file(), "", "tokens and targets of [B, T], a safetensors file"),
        option("rope_theta", &O::rope_theta, number(), "10000", "base of the rotary embedding"),
        // Training
        option("data", &O::data, some_file(), "", "the text to train on; its bytes are the tokens"),
        option("lr", &O::lr, number(), "0.001", "learning rate"),
        option("save", &O::save, output(), "", "file for weights and optimizer state"),
        option("load", &O::load, some_file(), "", "file that --save wrote, to go on from"),
        option("sample", &O::sample, whole(0), "200", "bytes to write as a continuation"),
        // Ranks
        option("nproc", &O::nproc, whole(1, 64), "2", "ranks to start; under torchrun and the like theirs are taken"),
        option("backend", &O::backend, one_of({"auto", "nccl", "gloo"}), "auto",
               "library of the collectives; auto takes nccl where every rank has a GPU"),
        option("timeout", &O::timeout, number(1e5), "60", "seconds that a rank waits for the others"),
        option("reduce_dtype", &O::reduce_dtype, one_of({"fp32", "bf16"}), "fp32", "gradients are reduced in it"),
        option("sizes_mb", &O::sizes_mb, number(1e5), "1,10,100,1000", "tensor sizes in MB (1e6 bytes)"),
        option("bucket_size_mb", &O::bucket_size_mb, number(1e5), "1,10,100,1000", "bucket sizes in MB (1e6 bytes)"),
        // The calculations' letters
        option("tokens", &O::tokens, whole(1), "", "B, tokens of the batch (2.4 (b): on a device)"),
        option("devices", &O::devices, whole(2), "8", "N, how many devices share the work"),
        option("tensor_mb", &O::tensor_mb, number(), "1000", "S, the tensor that is reduced, in 1e6 bytes"),
        option("gpu_gb", &O::gpu_gb, number(), "80", "memory of a GPU in part (a)"),
        option("tpu_gb", &O::tpu_gb, number(), "95", "memory of a chip in part (b)"),
        option("tflops", &O::tflops, number(), "460", "C, rate of a chip, in 1e12 FLOP/s"),
        option("bandwidth_gb", &O::bandwidth_gb, number(), "180", "W, of a link, or out of a device, in 1e9 bytes/s"),
        option("fsdp", &O::fsdp, whole(1), "16", "X or N_FSDP, chips along the FSDP axis"),
        option("tp", &O::tp, whole(1), "4", "Y or N_TP, chips along the tensor-parallel axis"),
        option("links_fsdp", &O::links_fsdp, whole(1, 3), "2", "M_X, mesh axes of the FSDP traffic"),
        option("links_tp", &O::links_tp, whole(1, 3), "1", "M_Y, mesh axes of the tensor-parallel traffic"),
    };
    return table;
}

// Adds the option that a word of Command::options stands for, with its default.
static void add_option(CLI::App& app, const std::string& word, Options& o) {
    const size_t end = std::min(word.find_first_of("!*="), word.size()), equals = word.find('=');
    const std::string key = word.substr(0, end);
    for (const OptionRow& row : option_table()) {
        if (key != row.key) { continue; }
        const std::string name = key == "context_lengths" ? "context_length"
                                 : key == "out_folder"    ? "out"
                                 : key == "updates"       ? "steps"
                                                          : key;
        CLI::Option* added = row.add(app, o, "--" + name, row.help);
        const bool list = word.compare(end, 1, "*") == 0 || key == "context_lengths" || name == "sizes_mb" ||
                          name == "bucket_size_mb";
        added->allow_extra_args(false);  // one word each time
        if (list) { added->delimiter(','); }
        if (word.compare(end, 1, "!") == 0) { added->required(); }
        const std::string by_default = equals < word.size() ? word.substr(equals + 1) : row.by_default;
        if (!by_default.empty()) { added->default_val(by_default); }
        return;
    }
    fail("the command table names an unknown option: %s", key.c_str());
}

// ---------------------------------------------------------------------------------------------------------------------
// From the words on the command line to Options

static const Command& find_command(const std::string& word) {
    std::vector<std::string> ids;
    for (const Command& c : COMMANDS) { ids.push_back(c.id); }
    const std::string id = full_name(word, ids, "command");
    return *std::find_if(std::begin(COMMANDS), std::end(COMMANDS), [&](const Command& c) { return id == c.id; });
}

static void refuse_unknown(const CLI::App& app, const std::string& word) {
    std::vector<std::string> names;
    for (const CLI::Option* option : app.get_options()) { names.push_back(option->get_name()); }
    const std::string hint = did_you_mean(word.substr(0, word.find('=')), names);
    usage_error("%s: no such option%s It takes %s", word.c_str(), hint.empty() ? "." : hint.c_str(),
                join(names, ", ").c_str());
}

// An output must not take the place of an input, or of another output.
static void check_files(const Options& o) {
    using Named = std::vector<std::pair<const char*, std::string>>;
    Named taken = {{"data", o.data}, {"weights", o.weights}, {"batch", o.batch}, {"inputs", o.inputs}};
    for (const auto& [name, path] : taken) {
        if (!path.empty() && access(path.c_str(), F_OK) != 0) {
            fail("--%s: got '%s': %s", name, path.c_str(), strerror(errno));
        }
    }
    for (const auto& [name, path] : Named{{"out", o.out}, {"save", o.save}, {"trace", o.trace}}) {
        for (const auto& [other, its] : taken) {
            std::error_code ignored;
            if (!path.empty() && (path == its || std::filesystem::equivalent(path, its, ignored))) {
                usage_error("--%s: got '%s', takes another file than --%s", name, path.c_str(), other);
            }
        }
        taken.push_back({name, path});
    }
}

// words: the command's id and what follows. Returns the help if they ask for it, else "".
static std::string parse_options(const Command& command, const std::vector<std::string>& words, Options& o) {
    o.command = command.id, o.command_line = words;
    CLI::App app(command.what, std::string("cs336 ") + command.id);
    app.set_help_flag("--help,-h", "this text");
    app.get_formatter()->column_width(32);
    app.allow_extras();  // so that the message about them is ours
    std::istringstream keys("edition device " + command.options + " format quick");
    for (std::string key; keys >> key;) { add_option(app, key, o); }
    if (!*command.section_2025 && command.is_problem()) { o.edition = "2026"; }
    try {
        app.parse(std::vector<std::string>(words.rbegin(), words.rend() - 1));  // CLI11 takes them from the end
    } catch (const CLI::CallForHelp&) { return app.help(); } catch (const CLI::ParseError& e) {
        for (const std::string& word : app.remaining()) { refuse_unknown(app, word); }  // it may be what is missing
        usage_error("%s", e.what());
    }
    for (const std::string& word : app.remaining()) {
        if (command.run != cmd_reproduce || word[0] == '-') { refuse_unknown(app, word); }
        o.words.push_back(word);
    }
    for (const std::string& word : words) {  // CLI11 leaves empty items out
        if (word.find(",,") != std::string::npos || (!word.empty() && word.back() == ',')) {
            usage_error("got '%s', a list with an empty item", word.c_str());
        }
    }
    for (const CLI::Option* option : app.get_options()) {
        if (option->count() > 0) { o.given[option->get_name().substr(2)] = join(option->results(), ","); }
    }
    if (command.is_problem() && !*(o.edition == "2025" ? command.section_2025 : command.section_2026)) {
        usage_error("--edition: got %s, whose handout has no such problem", o.edition.c_str());
    }
    if (o.edition == "2026") { take_edition_2026(o); }
    for (const char* dimension : {"d_model", "d_ff", "num_layers", "num_heads"}) {
        if (o.has("size") && o.has(dimension)) {
            usage_error("--size: got '%s' and --%s too, takes one or the other", join(o.size, ",").c_str(), dimension);
        }
    }
    if (command.options.find(MODEL) != std::string::npos) { configs_of(o); }  // the sizes have to fit each other
    check_files(o);
    return "";
}

static int run_command(const Command& command, const std::vector<std::string>& words) {
    Options o;
    const std::string help = parse_options(command, words, o);
    if (!help.empty()) {
        printf("%s", help.c_str());
        return 0;
    }
    context.deterministic = o.deterministic, context.recompute = o.recompute, context.checkpoint = o.checkpoint;
    context.head_chunk = o.head_chunk, context.csv = o.format == "csv";
    // What measures time is as small as with --quick where there is no GPU, unless its sizes are typed.
    if (command.gpus > 0 && (o.device == "cpu" || cuda_devices() == 0)) { o.quick = true; }
    // nsys_profile traces by itself, and so do the ranks.
    const bool traced = !o.trace.empty() && command.run != cmd_nsys_profile && command.gpus != 2;
    if (traced) { start_tracing(); }
    const int exit_code = command.run(o);
    if (traced) {
        Trace trace = stop_tracing();
        write_trace(o.trace, {trace},
                    strprintf("cs336 %s; %s; commit %s", join(words, " ").c_str(), device_description().c_str(),
                              commit().c_str()));
        note("--trace: the times in the tables include what tracing costs%s",
             cuda_devices() > 0 && !trace.no_kernels.empty() ? (". Without kernels: " + trace.no_kernels).c_str() : "");
    }
    for (const auto& [name, path] : {std::make_pair("save", o.save), std::make_pair("trace", o.trace)}) {
        std::error_code failed;
        const auto bytes = std::filesystem::file_size(path, failed);
        if (!failed && !is_rank()) { note("--%s: wrote %s (%ju bytes)", name, path.c_str(), bytes); }
    }
    return exit_code;
}

// ---------------------------------------------------------------------------------------------------------------------
// list, reproduce, help

static int cmd_list(const Options&) {
    const int gpus = cuda_devices();
    const bool nccl = why_not("nccl", CUDA, 2).empty();
    Table table{"2025, 2026: that handout's section; commit " + commit() +
                    "; `cs336 <problem> --help` shows a problem's options",
                {"problem", "2025", "2026", "points", "file", "runs here"}};
    for (const Command& c : COMMANDS) {
        const bool small = c.gpus > gpus || (c.gpus == 2 && !nccl);
        table.row(c.id, c.is_problem() ? c.section_2025 : "tool", c.is_problem() ? c.section_2026 : "tool",
                  c.points ? std::to_string(c.points) : "", c.file,
                  small ? strprintf("smaller: no %s", gpus == 0 ? "GPU" : "two GPUs") : "yes");
    }
    print(table);
    return 0;
}

// One problem's stdout into `path`. What this commit has written there already is left as it is. Returns what happened.
static std::string reproduce(const std::string& path, const std::vector<std::string>& words) {
    std::ifstream file(path);
    const std::string old{std::istreambuf_iterator<char>(file), {}};
    const bool settled = commit().find("dirty") == std::string::npos;
    if (settled && old.find("commit " + commit()) != std::string::npos) { return "was there"; }
    const double start = now_ms();
    auto watch = [&] { progress("%s: %.0f s", words[0].c_str(), (now_ms() - start) / 1e3); };
    try {
        save_file(path, run_ourselves(words, watch));
        return "done";
    } catch (const Failure& failure) { return std::string("failed: ") + failure.what(); }
}
// 2026's outputs of a problem that both handouts have, but not with the same defaults, stand in files of their own.
static int cmd_reproduce(const Options& o) {
    std::set<std::string> asked;
    for (const std::string& word : o.words) { asked.insert(find_command(word).id); }
    std::filesystem::create_directories(o.out);
    Table table{"reproduce: " + origin(o), {"problem", "file", "s", "result"}};
    int failed = 0;
    for (const Command& c : COMMANDS) {
        const bool in_edition = *(o.edition == "2025" ? c.section_2025 : c.section_2026);
        if (asked.empty() ? !in_edition : asked.count(c.id) == 0) { continue; }
        std::vector<std::string> words = {c.id};
        if (in_edition) { words.insert(words.end(), {"--edition", o.edition}); }
        if (o.quick) { words.push_back("--quick"); }
        const bool of_2026 = o.edition == "2026" && depends_on_edition(c);
        const std::string path = o.out + "/" + c.id + (of_2026 ? "-2026" : "") + ".md";
        const double start = now_ms();
        const std::string result = reproduce(path, words);
        table.row(c.id, path, strprintf("%.0f", (now_ms() - start) / 1e3), result);
        failed += result.compare(0, 6, "failed") == 0;
    }
    print(table);
    return failed > 0 ? 1 : 0;
}

static void print_overview(FILE* to) {
    fprintf(to,
            "cs336: every problem of the CS336 systems assignment, worked through in C++ and CUDA\n\n"
            "usage: cs336 <command> [options]\n"
            "       cs336 <command> --help         its options and their defaults\n"
            "       cs336 --version                the commit that this was built from\n\n"
            "  2025   2026   problem; the numbers are the handouts' sections\n");
    for (const Command& c : COMMANDS) {
        fprintf(to, "  %-6s %-6s %-47s%s\n", c.section_2025, c.section_2026, c.id, c.what);
    }
    fprintf(to, "\nexit codes: 0 done, 1 it ran and failed, 2 wrong usage\n");
}

int main(int argc, char** argv) {
    // A closed stream is opened, or the next file that is opened would get our lines.
    for (int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd) { return 1; }
    }
    signal(SIGCHLD, SIG_DFL);  // whoever started us may ignore it; waitpid() would then find no children
    signal(SIGXFSZ, SIG_IGN);  // a file that grows over `ulimit -f`: the write fails, and says so
    choose_cpu_settings(argv);
    const std::vector<std::string> words = {argv + 1, argv + argc};
    const std::string word = argc > 1 ? words[0] : "";
    if (argc < 2 || word == "--help" || word == "-h" || word == "help") {
        print_overview(argc < 2 ? stderr : stdout);
        return argc < 2 ? 2 : 0;
    }
    if (word == "--version") {
        printf("%s\n", commit().c_str());
        return 0;
    }
    int exit_code = 1;
    std::string who = "cs336";
    try {
        const Command& command = find_command(word);
        who += " " + word;
        exit_code = run_command(command, words);
    } catch (const Failure& failure) {
        note("%s: %s", who.c_str(), failure.what());
        exit_code = failure.exit_code;
    } catch (const std::bad_alloc&) {
        note("%s: out of memory on the host", who.c_str());
    } catch (const std::exception& e) { note("%s: %s", who.c_str(), e.what()); }
    // A command that a signal has ended in order: whoever started us sees that signal. A rank's launcher reads the
    // code.
    if (exit_code > 128 && !is_rank()) {
        signal(exit_code - 128, SIG_DFL);
        raise(exit_code - 128);
    }
    return exit_code;
}
