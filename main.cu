// main.cu: the command table, the options and the help. Nothing is computed here.
#include "commands.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

struct Command;
static int cmd_list(const Options& o);
static std::string parse_options(const Command& command, const std::vector<std::string>& words, Options& o);
static int cmd_reproduce(const Options& o);

// ---------------------------------------------------------------------------------------------------------------------
// Commands, in the handout's order. `options` names rows of the option table below: `name!` has to be given, and
// `name=text` is read where nothing is given, in place of the option table's own default. No default stands elsewhere.
// The handout has two editions. What they differ in has a bar in these tables: 2025's|2026's.

struct Command {
    const char* id;
    const char* section;  // empty in an edition that has no such problem, and for the tools
    int points;           // the same in both editions; 0: none
    int gpus;             // 0: the same everywhere, 1: scaled down without a GPU, 2: without two, and over Gloo
    const char* what;
    const char* file;
    int (*run)(const Options&);
    std::string options;
    bool is_check = false;  // it measures no time, and checks as much without GPUs
};
static std::string in_edition(const std::string& text, const std::string& edition) {
    size_t bar = text.find('|');
    return edition == "2026" && bar < text.size() ? text.substr(bar + 1) : text.substr(0, bar);
}

// 2025's, as the pages' names begin; "2026-" before that of a problem that only 2026 has.
static std::string section_of(const Command& c) {
    return *c.section == '|' ? "2026-" + in_edition(c.section, "2026") : in_edition(c.section, "2025");
}

static const std::string TIMED =
    "edition device sizes d_model d_ff num_layers num_heads vocab_size context_length=256|512 batch_size steps seed "
    "trace format quick ";

static const std::string RANKS = "nproc backend timeout ";
static const std::string DDP_SIZED =
    "device size=xl d_model d_ff num_layers num_heads vocab_size context_length=512 batch_size=2 warmup steps ";
static const std::string DDP_RUN = "mode=flash checkpoint seed " + RANKS + "format quick ";
static const std::string DDP_TIMED = DDP_SIZED + "autocast=fp32 " + DDP_RUN;
// The defaults are the 2026 leaderboard's layer and batch, and a device of an H200 node.
static const std::string CALCS = "batch_tokens=65536 d_model=4096 d_ff=11008 tflops=989 bandwidth_gb=450 format quick ";

static const Command COMMANDS[] = {
    {"benchmarking_script", "1.1.3|2.1.3", 4, 1, "time forward, backward and the whole step of the Transformer",
     "bench_step.cu", cmd_benchmarking_script,
     TIMED + "warmups precisions=fp32 modes=eager,flash recompute checkpoint head_chunk grad_accumulation table "
             "roofline plot"},
    {"nsys_profile", "1.1.4|2.1.4", 5, 1, "which kernels a step spends its time in", "profile.cu", cmd_nsys_profile,
     "edition device sizes=|small,xl d_model d_ff num_layers num_heads vocab_size "
     "context_lengths=128,256,512,1024|256,512,1024 batch_size warmup=2 steps=5 precisions=fp32 modes=eager "
     "ranges=forward,step top=10 seed plot trace format quick"},
    {"mixed_precision_accumulation", "1.1.5|2.1.5", 1, 0, "add 0.01 a thousand times in fp32, fp16 and bf16",
     "precision.cu", cmd_mixed_precision_accumulation, "plot_bits format quick"},
    {"benchmarking_mixed_precision", "1.1.5|2.1.5", 2, 1, "autocast's dtypes, and what fp32, tf32 and bf16 cost",
     "bench_step.cu", cmd_benchmarking_mixed_precision, TIMED + "warmup precisions=fp32,tf32,bf16 mode=flash"},
    {"memory_profiling", "1.1.6|2.1.6", 4, 1, "where a step's memory goes", "memory.cu", cmd_memory_profiling,
     "edition device sizes=2.7B|xl d_model d_ff num_layers num_heads vocab_size "
     "context_lengths=128,256,512|128,2048 batch_size seed precisions=fp32,bf16 mode=eager recompute checkpoint "
     "head_chunk "
     "out_folder format quick"},
    {"gradient_checkpointing", "|3.2.1", 4, 1, "what backward runs again instead of keeping it", "bench_checkpoint.cu",
     cmd_gradient_checkpointing,
     "edition=2026 device size=xl d_model d_ff num_layers num_heads vocab_size context_length=2048 batch_size warmup=2 "
     "steps=5 precision=fp32 mode=eager blocks seed format quick"},
    {"pytorch_attention", "1.2.1|4.1.1", 2, 1, "time and memory of plain attention", "bench_attention.cu",
     cmd_pytorch_attention, "device steps=100 plot trace format quick"},
    {"torch_compile", "1.3|4.2", 2, 1, "eager against fused kernels", "bench_step.cu", cmd_torch_compile,
     TIMED + "warmup precisions=fp32 plot"},
    {"weighted_sum", "1.3.1|4.2.1", 0, 1, "the first kernel: a weighted sum", "attention.cu", cmd_weighted_sum,
     "device trace format quick"},
    {"flash_forward", "1.3.2|4.2.2", 15, 1, "FlashAttention-2, forward", "attention.cu", cmd_flash_forward,
     "device seed trace format quick", true},
    {"flash_backward", "1.3.2|4.2.2", 5, 1, "FlashAttention-2, backward", "attention.cu", cmd_flash_backward,
     "device seed deterministic trace format quick", true},
    {"flash_benchmarking", "1.3.2|4.2.2", 5, 1, "FlashAttention-2 against plain attention", "bench_attention.cu",
     cmd_flash_benchmarking, "device plot trace format quick"},
    {"flash_leaderboard", "1.3.3|", 0, 1, "one long causal sequence, as fast as it goes", "bench_attention.cu",
     cmd_flash_leaderboard,
     "device num_heads=16 head_size=64 context_length=16384 autocast=bf16 not_causal flash_impl=all "
     "deterministic trace format quick"},
    {"distributed_communication_single_node", "2.1|5.1", 5, 2, "all-reduce: sizes, ranks, backends", "bench_ddp.cu",
     cmd_distributed_communication_single_node,
     "edition device=auto|cuda sizes_mb warmup steps " + RANKS + "format plot quick"},
    {"naive_ddp", "2.2|5.2", 5, 2, "an all-reduce for each parameter", "ddp.cu", cmd_naive_ddp,
     "edition device seed " + RANKS + "format quick", true},
    {"naive_ddp_benchmarking", "2.2|5.2", 3, 2, "what it costs", "bench_ddp.cu", cmd_naive_ddp_benchmarking,
     "edition " + DDP_TIMED + "reduce_dtype plot_step trace"},
    {"minimal_ddp_flat_benchmarking", "2.3.1|5.3.1", 2, 2, "one all-reduce for all gradients", "bench_ddp.cu",
     cmd_minimal_ddp_flat_benchmarking, "edition " + DDP_TIMED + "reduce_dtype plot_step trace"},
    {"ddp_overlap_individual_parameters", "2.3.2|5.3.2", 5, 2, "communicate while backward runs", "ddp.cu",
     cmd_ddp_overlap_individual_parameters, "edition device seed " + RANKS + "format quick", true},
    {"ddp_overlap_individual_parameters_benchmarking", "2.3.2|5.3.2", 1, 2, "what it saves", "bench_ddp.cu",
     cmd_ddp_overlap_individual_parameters_benchmarking, "edition " + DDP_TIMED + "reduce_dtype plot_step trace"},
    {"ddp_overlap_bucketed", "2.3.3|", 8, 2, "the same, in buckets", "ddp.cu", cmd_ddp_overlap_bucketed,
     "device seed bucket_size_mb=0.0001,0.0016,0.01 " + RANKS + "format quick", true},
    {"ddp_bucketed_benchmarking", "2.3.3|", 3, 2, "which size of buckets", "bench_ddp.cu",
     cmd_ddp_bucketed_benchmarking, DDP_TIMED + "bucket_size_mb reduce_dtype plot_step trace"},
    {"communication_accounting", "2.4|", 10, 0, "when communication becomes the limit", "accounting.cu",
     cmd_communication_accounting,
     "d_model=16384 d_ff=53248 num_layers=126 tokens gpu_gb tpu_gb tflops bandwidth_gb fsdp tp links_fsdp links_tp "
     "format quick"},
    {"optimizer_state_sharding", "3|6", 15, 2, "AdamW's state split over the ranks", "ddp.cu",
     cmd_optimizer_state_sharding, "edition device seed " + RANKS + "format quick", true},
    {"optimizer_state_sharding_accounting", "3|6", 5, 2, "its memory and time", "bench_ddp.cu",
     cmd_optimizer_state_sharding_accounting, "edition " + DDP_TIMED},
    {"fsdp", "|7", 15, 2, "the weights sharded, too", "ddp.cu", cmd_fsdp, "device seed " + RANKS + "format quick",
     true},
    {"fsdp_accounting", "|7", 5, 2, "its memory, and whether its gathers come in time", "bench_fsdp.cu",
     cmd_fsdp_accounting, "edition=2026 " + DDP_SIZED + "precision=fp32 " + DDP_RUN + "reduce_dtype plot_step"},
    {"alternate_ring_all_reduce", "|8.1", 1, 0, "all-reduce that sends whole tensors around a ring", "calcs.cu",
     cmd_alternate_ring_all_reduce, "tensor_mb devices bandwidth_gb=450 format quick"},
    {"data_parallel_calcs", "|8.2", 3, 0, "how many devices data parallelism can use", "calcs.cu",
     cmd_data_parallel_calcs, CALCS + "devices"},
    {"fsdp_calcs", "|8.3", 3, 0, "how many devices FSDP can use", "calcs.cu", cmd_fsdp_calcs, CALCS + "devices"},
    {"tp_calcs", "|8.4", 4, 0, "how many devices tensor parallelism can use", "calcs.cu", cmd_tp_calcs,
     CALCS + "devices"},
    {"fsdp_tp_calcs", "|8.5", 6, 0, "how many devices both together can use", "calcs.cu", cmd_fsdp_tp_calcs,
     CALCS + "fsdp=4 tp=2"},
    {"leaderboard", "|9", 10, 1, "a training step of an 8.1B model, all in bf16, as fast as it goes", "leaderboard.cu",
     cmd_leaderboard,
     "edition=2026 device size=8B d_model d_ff num_layers num_heads vocab_size context_length=32768 batch_size=2 "
     "leaderboard_warmup leaderboard_steps warmup_time rep_time precision=pure_bf16 mode=flash head_chunk=2048 "
     "leaderboard_checkpoint recompute leaderboard_grad_accumulation leaderboard_nproc backend timeout seed plot_step "
     "format quick"},
    {"list", "", 0, 0, "every problem: sections, points, command, notes page, whether it runs here", "main.cu",
     cmd_list, "memory format quick"},
    {"info", "", 0, 0, "the device, its libraries, its measured rates", "bench_step.cu", cmd_info,
     "device format quick"},
    {"train", "", 0, 0, "train on the bytes of a text, then continue it", "train.cu", cmd_train,
     "data! val_fraction d_model=128 d_ff=512 num_layers=4 num_heads=4 context_length=128 batch_size=8 steps=200 "
     "stop_at log_every save_every warmup_steps lr min_lr weight_decay max_grad_norm precision=fp32 mode=flash "
     "recompute "
     "checkpoint head_chunk seed "
     "strategy grad_accumulation nproc=1 backend timeout device save load sample temperature trace format quick"},
    {"model", "", 0, 0, "your weights and batch in, our logits, loss and gradients out", "train.cu", cmd_model,
     "weights! batch! num_heads! model_out! rope_theta update_steps=0 lr precision=fp32 mode=flash device"},
    {"attention", "", 0, 0, "your q, k, v in, our output and gradients out", "bench_attention.cu", cmd_attention,
     "inputs! attention_out! causal impl deterministic device"},
    {"reproduce", "", 0, 1, "all problems, or those that are named, each into a file of notes/output/", "main.cu",
     cmd_reproduce, "edition outputs_folder quick"},
};

// ---------------------------------------------------------------------------------------------------------------------
// Options. A reader parses a text, typed or the tables' default, into its field of Options, and returns false where the
// text is not what it takes. CLI11 hands over the texts only: its own conversions also take signs, octal and
// hexadecimal numbers, its lists also empty items.

struct Reader {
    std::string takes;
    std::function<bool(Options&, const std::string&)> read;
    std::function<std::string(const std::string&)> hint = nullptr;  // "; ..." on what it refuses
};
template <class T>
using Parser = std::function<bool(const std::string& text, T* value)>;

template <class T>
static Reader one(T Options::*field, const std::string& takes, const Parser<T>& parse) {
    return {takes, [=](Options& o, const std::string& text) { return parse(text, &(o.*field)); }};
}
// `most`: how many items, separated by commas, it takes.
template <class T>
static Reader several(std::vector<T> Options::*field, const std::string& takes, const Parser<T>& parse,
                      size_t most = SIZE_MAX) {
    auto read = [=](Options& o, const std::string& text) {
        (o.*field).clear();
        for (size_t start = 0, comma; start <= text.size(); start = comma + 1) {
            comma = std::min(text.find(',', start), text.size());
            (o.*field).emplace_back();
            if (!parse(text.substr(start, comma - start), &(o.*field).back())) { return false; }
        }
        return (o.*field).size() <= most;
    };
    return {takes, read};
}

template <class T>
static Parser<T> whole_number(uint64_t low, uint64_t high) {
    return [=](const std::string& text, T* value) {
        errno = 0;
        uint64_t number = strtoull(text.c_str(), nullptr, 10);
        *value = (T)number;
        bool digits = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
        return digits && errno == 0 && number >= low && number <= high;
    };
}
static Reader whole(int Options::*field, int low, int high = 1 << 20) {
    return one(field, strprintf("a whole number from %d to %d", low, high), whole_number<int>(low, high));
}

static Reader one_whole(std::vector<int> Options::*field, int low) {
    return several(field, strprintf("a whole number from %d to %d", low, 1 << 20), whole_number<int>(low, 1 << 20), 1);
}
static Reader wholes(std::vector<int> Options::*field, int low, int high = 1 << 20) {
    return several(field, strprintf("whole numbers from %d to %d, separated by commas", low, high),
                   whole_number<int>(low, high));
}

static Reader head_size() {
    auto parse = [](const std::string& text, int* value) {
        return whole_number<int>(1, 1 << 20)(text, value) && flash_head_size(*value);
    };
    return one<int>(&Options::head_size, "one of 16, 32, 64, 80, 128", parse);
}
static Reader seed() {
    return one(&Options::seed, "a whole number from 0 to 18446744073709551615", whole_number<uint64_t>(0, UINT64_MAX));
}

static Parser<double> decimal(const std::function<bool(double)>& fits) {
    return [=](const std::string& text, double* value) {
        char* end = nullptr;
        *value = strtod(text.c_str(), &end);
        bool digits = !text.empty() && text.find_first_not_of("0123456789.eE+-") == std::string::npos && *end == 0;
        return digits && fits(*value);
    };
}
// Finite, greater than 0 (or 0 itself where zero is true), and less than `below`. is_float: as a float, too.
static Reader number(double Options::*field, bool zero = false, double below = INFINITY, bool is_float = false) {
    auto fits = [=](double value) {
        double used = is_float ? (double)(float)value : value;
        return (used > 0 || (zero && value == 0)) && used < below;
    };
    std::string takes = zero ? "a finite number, 0 or greater" : "a finite number greater than 0";
    takes += is_float ? ", in the range of float" : "";
    return one(field, takes + (below < INFINITY ? strprintf(" and less than %g", below) : ""), decimal(fits));
}
static Reader megabytes(std::vector<double> Options::*field) {
    return several(field, "numbers greater than 0 and at most 1e5, separated by commas",
                   decimal([](double value) { return value > 0 && value <= 1e5; }));
}

static Reader bytes(uint64_t Options::*field) {
    auto parse = [](const std::string& text, uint64_t* value) {
        static const std::map<std::string, double> units = {{"mib", 1 << 20}, {"m", 1 << 20}, {"gib", 1 << 30},
                                                            {"g", 1 << 30},   {"mb", 1e6},    {"gb", 1e9}};
        size_t end = std::min(text.find_first_not_of("0123456789."), text.size());
        auto unit = units.find(lower_name(text.substr(end)));
        double number;
        if (unit == units.end() || !decimal([](double n) { return n > 0 && n <= 1e6; })(text.substr(0, end), &number)) {
            return false;
        }
        *value = (uint64_t)(number * unit->second);
        return true;
    };
    return one<uint64_t>(field, "a number and its unit, MiB, GiB, MB or GB, e.g. 8GiB or, for short, 8G", parse);
}

static Parser<std::string> text_that(const std::function<bool(const std::string&)>& fits) {
    return [=](const std::string& text, std::string* value) {
        *value = text;
        return fits(text);
    };
}
static Parser<std::string> not_empty() {
    return text_that([](const std::string& text) { return !text.empty(); });
}
static bool is_among(const std::string& text, const std::vector<std::string>& names) {
    return std::find(names.begin(), names.end(), text) != names.end();
}
static Parser<std::string> among(const std::vector<std::string>& names) {
    return [=](const std::string& text, std::string* value) {
        auto same = [&](const std::string& name) { return lower_name(name) == lower_name(text); };  // 2.7b for 2.7B
        auto found = std::find_if(names.begin(), names.end(), same);
        *value = found == names.end() ? text : *found;
        return found != names.end();
    };
}
// What PyTorch, or many people, call a value of ours.
static std::string our_name(const std::string& theirs) {
    static const std::map<std::string, std::string> names = {{"gpu", "cuda"},     {"float32", "fp32"},
                                                             {"float", "fp32"},   {"bfloat16", "bf16"},
                                                             {"float16", "fp16"}, {"half", "fp16"}};
    auto found = names.find(lower_name(theirs));
    return found == names.end() ? theirs : found->second;
}
static Reader with_names(Reader reader, const std::vector<std::string>& names) {
    reader.hint = [=](const std::string& text) {
        std::string hint;
        for (const std::string& item : CLI::detail::split(text, ',')) {
            std::string value;
            if (!hint.empty() || among(names)(item, &value)) { continue; }
            hint = did_you_mean(is_among(our_name(item), names) ? our_name(item) : item, names);
        }
        return hint;
    };
    return reader;
}
static Reader name(std::string Options::*field, const std::vector<std::string>& names) {
    return with_names(one(field, "one of " + join(names, ", "), among(names)), names);
}
static Reader one_name(std::vector<std::string> Options::*field, const std::vector<std::string>& names) {
    return with_names(several(field, "one of " + join(names, ", "), among(names), 1), names);
}
static Reader names(std::vector<std::string> Options::*field, const std::vector<std::string>& names) {
    return with_names(several(field, "one or more, separated by commas, of " + join(names, ", "), among(names)), names);
}
static Reader items(std::vector<std::string> Options::*field, const char* example) {  // the command checks them
    return several(field, std::string("one or more, separated by commas, e.g. ") + example, not_empty());
}
static Reader file(std::string Options::*field) { return one(field, "a file name", not_empty()); }

static Reader checkpointing() {
    auto parse = [](const std::string& text, int* value) {
        for (int named : {CHECKPOINT_FFN, CHECKPOINT_HALF, CHECKPOINT_HALVES, CHECKPOINT_NESTED}) {
            if (text == name_of_checkpoint(named)) { return *value = named, true; }
        }
        const std::string some = name_of_checkpoint(CHECKPOINT_FFN) + ":";
        if (text.compare(0, some.size(), some) != 0) { return whole_number<int>(0, MAX_CHECKPOINT)(text, value); }
        bool is_number = whole_number<int>(1, MAX_CHECKPOINT)(text.substr(some.size()), value);
        return *value += CHECKPOINT_SOME_FFN, is_number;
    };
    return one<int>(&Options::checkpoint, "a whole number from 0 to 1048576, ffn, ffn:N, half, halves or nested",
                    parse);
}
static std::vector<std::string> implementations(std::vector<std::string> names) {
    for (const AttentionImpl& impl : attention_impls()) {
        if (!is_among(impl.name, names)) { names.push_back(impl.name); }
    }
    return names;
}

static bool is_folder(const std::string& path) {
    struct stat status;
    return stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}
static std::string folder_of(const std::string& path) {
    size_t slash = path.rfind('/');
    return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

static bool can_write_in(const std::string& folder) {
    return is_folder(folder) && access(folder.c_str(), W_OK | X_OK) == 0;
}
static std::string missing_folder(const std::string& path) {
    std::string folder = folder_of(real_name(path));
    if (folder.size() > 1 && folder.back() == '/') { folder.pop_back(); }
    return access(folder.c_str(), F_OK) == 0 ? "" : "; there is no folder " + folder;
}

// A file that a run writes at its end is tried before the run starts.
static Reader output(std::string Options::*field, const std::vector<std::string>& endings = {""}) {
    auto fits = [=](const std::string& text) {
        bool named = std::any_of(endings.begin(), endings.end(), [&](const std::string& ending) {
            size_t name = text.size() - std::min(text.size(), ending.size());
            return name > 0 && text.compare(name, ending.size(), ending) == 0;
        });
        struct stat status;
        bool regular = stat(text.c_str(), &status) != 0 || S_ISREG(status.st_mode);  // or it is not there
        return named && text.back() != '/' && regular && can_write_in(folder_of(real_name(text)));
    };
    std::string takes = "a file name" + (endings[0].empty() ? "" : " that ends in " + join(endings, " or "));
    takes += ", of a new or regular file in a folder that can be written to";
    return {takes, one(field, takes, text_that(fits)).read, missing_folder};
}
static Reader folder(std::string Options::*field) {
    auto parse = [](const std::string& text, std::string* value) {
        *value = text;
        while (*value != "/" && !value->empty() && value->back() == '/') { value->pop_back(); }
        bool there = access(value->c_str(), F_OK) == 0;
        return !text.empty() && can_write_in(there ? *value : folder_of(*value));
    };
    const std::string takes = "a folder that can be written to, or to be made in one";
    return {takes, one<std::string>(field, takes, parse).read, missing_folder};
}

struct Option {
    const char* key;   // in a command's row
    const char* name;  // on the command line
    Reader reader;
    const char* help;
    const char* by_default = "";  // where a command's row names none; "": there is none
};
static void read_default(Options& o, const Option& option, const std::string& text) {
    if (!text.empty() && !option.reader.read(o, text)) {
        fail("the command table: --%s does not take its default '%s'", option.name, text.c_str());
    }
}

static std::vector<Option> options_of_runs() {
    const std::vector<std::string> sizes = {"small", "medium", "large", "xl", "2.7B", "10B", "8B"};
    const std::vector<std::string> autocast = {"fp32", "tf32", "bf16", "fp16"};
    const std::vector<std::string> precisions = {"fp32", "tf32", "bf16", "fp16", "pure_bf16"};
    const char* precision_help =
        "bf16 and fp16 follow autocast's rules. pure_bf16 keeps weights, gradients and moments in bf16, too";
    const std::vector<std::string> modes = {"eager", "fused", "flash"};
    const char* mode_help =
        "eager: one kernel per operation. fused: fused kernels. flash: fused, with FlashAttention where head size and "
        "precision have one";
    return {
        {"edition", "edition", name(&Options::edition, {"2025", "2026"}),
         "the handout whose defaults are taken; xl is 1600 wide in 2025's and 2560 in 2026's", "2025"},
        {"same_edition", "edition", name(&Options::edition, {"2025", "2026"}),
         "without effect here: both handouts agree", "2025"},
        {"edition_2025", "edition", one(&Options::edition, "2025: 2026's handout has no such problem", among({"2025"})),
         "the handout", "2025"},
        {"edition_2026", "edition", name(&Options::edition, {"2025", "2026"}),
         "without effect here: only 2026's handout has this problem", "2026"},
        {"device", "device", name(&Options::device, {"auto", "cpu", "cuda"}),
         "where to run; auto takes a GPU if there is one", "auto"},
        {"sizes", "size", names(&Options::size, sizes), "models of the handout; without a GPU the default may be small",
         "small,medium,large,xl,2.7B|small,medium,large,xl,10B"},
        {"size", "size", one_name(&Options::size, sizes), "a model of the handout; without a GPU the default is small"},
        {"d_model", "d_model", whole(&Options::d_model, 1), "width of the model"},
        {"d_ff", "d_ff", whole(&Options::d_ff, 1), "width of the feed-forward layer"},
        {"num_layers", "num_layers", whole(&Options::num_layers, 1), "number of blocks"},
        {"num_heads", "num_heads", whole(&Options::num_heads, 1),
         "number of attention heads; divides d_model where there is one"},
        {"head_size", "head_size", head_size(), "D, the size of an attention head"},
        {"vocab_size", "vocab_size", whole(&Options::vocab_size, 1),
         "number of different tokens; 8B has 151936 unless this is typed", "10000"},
        {"context_length", "context_length", whole(&Options::context_length, 1), "tokens in a sequence"},
        {"context_lengths", "context_length", wholes(&Options::context_lengths, 1), "tokens in a sequence"},
        {"batch_size", "batch_size", whole(&Options::batch_size, 1), "sequences in a batch", "4"},
        {"warmups", "warmup", wholes(&Options::warmup, 0),
         "untimed steps before the timed ones; each number is measured in a run of its own", "5"},
        {"warmup", "warmup", one_whole(&Options::warmup, 0), "untimed steps before the timed ones", "5"},
        {"steps", "steps", whole(&Options::steps, 1), "steps that are timed, or trained", "10"},
        {"leaderboard_warmup", "warmup", one_whole(&Options::warmup, 0),
         "untimed steps before the timed ones, instead of --warmup_time"},
        {"leaderboard_steps", "steps", whole(&Options::steps, 1), "timed steps, instead of --rep_time"},
        {"warmup_time", "warmup_time", number(&Options::warmup_time, true, 3600),
         "seconds of untimed steps before the timed ones", "10"},
        {"rep_time", "rep_time", number(&Options::rep_time, false, 3600), "seconds of timed steps", "30"},
        {"update_steps", "steps", whole(&Options::steps, 0), "AdamW steps on the batch"},
        {"precisions", "precision", names(&Options::precision, precisions), precision_help},
        {"precision", "precision", one_name(&Options::precision, precisions), precision_help},
        {"autocast", "precision", one_name(&Options::precision, autocast), "bf16 and fp16 follow autocast's rules"},
        {"modes", "mode", names(&Options::mode, modes), mode_help},
        {"mode", "mode", one_name(&Options::mode, modes), mode_help},
        {"seed", "seed", seed(), "seed of all random numbers", "0"},
        {"format", "format", name(&Options::format, {"md", "csv"}), "format of the tables", "md"},
        {"table", "table", name(&Options::table, {"milliseconds", "seconds"}), "unit and shape of the table",
         "milliseconds"},
        {"weights", "weights", file(&Options::weights), "the state_dict, a safetensors file"},
        {"batch", "batch", file(&Options::batch), "tokens and targets of [B, T], a safetensors file"},
        {"model_out", "out", output(&Options::out),
         "safetensors file to write; it gets logits, loss, grad.<name> and param.<name>"},
        {"attention_out", "out", output(&Options::out),
         "safetensors file to write; it gets o, lse and, with do, dq, dk and dv"},
        {"out_folder", "out", folder(&Options::out), "folder for timelines (SVG) and snapshots (pickle)"},
        {"outputs_folder", "out", folder(&Options::out), "folder of the outputs", "notes/output"},
        {"plot", "plot", output(&Options::plot, {".svg"}), "draw the table as SVG, too"},
        {"plot_bits", "plot", output(&Options::plot, {".svg"}), "draw 1000 + 0.01 bit by bit, in each format"},
        {"plot_step", "plot", output(&Options::plot, {".svg"}),
         "draw what ran when in a step, on all ranks. fsdp_accounting and leaderboard draw FSDP's step, the others "
         "each "
         "way's"},
        {"trace", "trace", output(&Options::trace, {".json"}), "write what ran when, for Perfetto or chrome://tracing"},
        {"ranges", "range", items(&Options::range, "forward,step/backward/layer/attention"),
         "parts of the run that get a kernel summary"},
        {"checkpoint", "checkpoint", checkpointing(),
         "what backward runs again instead of keeping it. N: groups of N blocks. half: each half of a block. halves, "
         "nested: all blocks, one group within another. ffn: each block's feed-forward layer. ffn:N: that of N blocks. "
         "0: nothing",
         "0"},
        {"leaderboard_checkpoint", "checkpoint", checkpointing(),
         "what backward runs again, as in the other commands. On a GPU the default is the least that fits by its "
         "predicted peak: nothing, then --recompute, then with it ffn:N or ffn, then 1"},
        {"head_chunk", "head_chunk", whole(&Options::head_chunk, 0),
         "rows of the logits that head and loss compute at a time, with their gradients (modes fused and flash, not "
         "fp16). 0 takes all at once",
         "0"},
        {"rope_theta", "rope_theta", number(&Options::rope_theta, false, INFINITY, true),
         "base of the rotary embedding", "10000"},
        {"top", "top", whole(&Options::top, 1), "rows of a kernel summary", "10"},
        {"inputs", "inputs", file(&Options::inputs),
         "safetensors file of q, k, v and perhaps do (dL/do), of [B, H, S, D] or [B, S, D]"},
        {"impl", "impl", name(&Options::impl, implementations({"auto"})),
         "which row of the table of implementations runs", "auto"},
        {"flash_impl", "impl", name(&Options::impl, implementations({"all", "auto"})),
         "all takes those with tiles, auto the fastest of them", "all"},
    };
}
static std::vector<Option> options_of_training() {
    return {
        {"data", "data", file(&Options::data), "the text to train on; its bytes are the tokens"},
        {"val_fraction", "val_fraction", number(&Options::val_fraction, false, 1),
         "part at the text's end that is held out", "0.1"},
        {"warmup_steps", "warmup_steps", whole(&Options::warmup_steps, 0),
         "steps until the learning rate has grown to --lr", "20"},
        {"stop_at", "stop_at", whole(&Options::stop_at, 1),
         "last step of this run, which then ends as if interrupted, and saves"},
        {"save_every", "save_every", whole(&Options::save_every, 1), "steps from one --save to the next"},
        {"log_every", "log_every", whole(&Options::log_every, 1), "steps from one row of the table to the next", "1"},
        {"lr", "lr", number(&Options::lr, false, INFINITY, true), "learning rate", "0.001"},
        {"min_lr", "min_lr", number(&Options::min_lr, true, INFINITY, true),
         "learning rate at the end of the cosine decay", "0.0001"},
        {"weight_decay", "weight_decay", number(&Options::weight_decay, true, INFINITY, true),
         "decoupled weight decay of AdamW", "0.01"},
        {"max_grad_norm", "max_grad_norm", number(&Options::max_grad_norm), "norm to which gradients are clipped", "1"},
        {"save", "save", output(&Options::save),
         "file for weights and optimizer state, written at the end, also after Ctrl-C"},
        {"load", "load", file(&Options::load), "file that --save wrote, to go on from"},
        {"sample", "sample", whole(&Options::sample, 0), "bytes to write as a continuation", "200"},
        {"temperature", "temperature", number(&Options::temperature), "temperature of the sampling", "0.8"},
    };
}
static std::vector<Option> options_of_ranks() {
    return {
        {"strategy", "strategy", name(&Options::strategy, {"ddp", "sharded", "fsdp"}),
         "ddp: each rank holds all. sharded: the optimizer's state is split. fsdp: weights and gradients are split, "
         "too",
         "ddp"},
        {"grad_accumulation", "grad_accumulation", whole(&Options::grad_accumulation, 1, 1 << 20),
         "backward passes per step, each with its part of the batch", "1"},
        {"leaderboard_grad_accumulation", "grad_accumulation", whole(&Options::grad_accumulation, 1, 1 << 20),
         "backward passes per step and rank. On a GPU the default is one, or one per sequence where else too little "
         "fits"},
        {"nproc", "nproc", whole(&Options::nproc, 1, 64),
         "ranks (processes) to start; under torchrun and the like theirs are taken", "2"},
        {"ranks", "nproc", wholes(&Options::ranks, 1, 64),
         "numbers of ranks to compare; those that this machine cannot start are left out", "1,2,4,8"},
        {"leaderboard_nproc", "nproc", whole(&Options::nproc, 1, 64),
         "ranks (processes) to start. The default is 2 where there are two GPUs, else 1"},
        {"group_nproc", "nproc", whole(&Options::nproc, 1, 64),
         "ranks of the one group to measure. Without this and --backend there are groups of 2, 4 and 6, and on 8 GPUs "
         "also of 8",
         "2"},
        {"backend", "backend", name(&Options::backend, {"auto", "nccl", "gloo"}),
         "library of the collectives; auto takes nccl where every rank has a GPU", "auto"},
        {"reduce_dtype", "reduce_dtype", name(&Options::reduce_dtype, {"fp32", "bf16"}),
         "dtype in which gradients are sent and reduced; bf16 goes with --precision bf16", "fp32"},
        {"memory", "memory", bytes(&Options::memory),
         "with --plan: free memory of the GPU to plan for, which need not be here; with --device cpu, that of this "
         "CPU"},
        {"timeout", "timeout", number(&Options::timeout, false, 1e5), "seconds that a rank waits for the others", "60"},
        {"sizes_mb", "sizes_mb", megabytes(&Options::sizes_mb), "tensor sizes in MB (1e6 bytes)", "1,10,100,1000"},
        {"bucket_size_mb", "bucket_size_mb", megabytes(&Options::bucket_size_mb), "bucket sizes in MB (1e6 bytes)",
         "1,10,100,1000"},
    };
}
static std::vector<Option> options_of_calculations() {
    return {
        {"tokens", "tokens", whole(&Options::tokens, 1), "tokens on a device; their activations are saved for backward",
         "2048"},
        {"batch_tokens", "batch_tokens", whole(&Options::tokens, 1), "B, tokens of the whole batch, the rows of x"},
        {"devices", "devices", whole(&Options::devices, 2), "N, how many devices share the work", "8"},
        {"blocks", "blocks", whole(&Options::blocks, 1, 64), "N, blocks of the small model of part (a)", "16"},
        {"tensor_mb", "tensor_mb", number(&Options::tensor_mb), "S, the tensor that is reduced, in 1e6 bytes", "1000"},
        {"gpu_gb", "gpu_gb", number(&Options::gpu_gb), "memory of a GPU in part (a)", "80"},
        {"tpu_gb", "tpu_gb", number(&Options::tpu_gb), "memory of a chip in part (b)", "95"},
        {"tflops", "tflops", number(&Options::tflops), "C, rate of a chip, in 1e12 FLOP/s", "460"},
        {"bandwidth_gb", "bandwidth_gb", number(&Options::bandwidth_gb),
         "W, bandwidth of a link, or out of a device (section 8), in 1e9 bytes/s", "180"},
        {"fsdp", "fsdp", whole(&Options::fsdp, 1), "X or N_FSDP, chips along the FSDP axis", "16"},
        {"tp", "tp", whole(&Options::tp, 1), "Y or N_TP, chips along the tensor-parallel axis", "4"},
        {"links_fsdp", "links_fsdp", whole(&Options::links_fsdp, 1, 3), "M_X, mesh axes of the FSDP traffic", "2"},
        {"links_tp", "links_tp", whole(&Options::links_tp, 1, 3), "M_Y, mesh axes of the tensor-parallel traffic", "1"},
    };
}
static const std::vector<Option>& option_table() {
    static const std::vector<Option> table = [] {
        std::vector<Option> all = options_of_runs();
        for (const auto& more : {options_of_training(), options_of_ranks(), options_of_calculations()}) {
            all.insert(all.end(), more.begin(), more.end());
        }
        return all;
    }();
    return table;
}

struct Flag {
    const char* name;
    bool Options::*field;
    const char* help;
};
static const Flag flag_table[] = {
    {"quick", &Options::quick, "shrink the run to some seconds on two CPU cores; the caption says what was shrunk"},
    {"plan", &Options::plan,
     "run nothing; print each row's predicted peak memory, whether it fits, roughly how long it takes, and what is "
     "scaled down"},
    {"causal", &Options::causal, "query i sees keys j <= i only"},
    {"not_causal", &Options::not_causal, "every query sees all keys"},
    {"roofline", &Options::roofline, "how close each phase comes to what the matmul rate and the copy bandwidth allow"},
    {"recompute", &Options::recompute,
     "backward computes the outputs of the norms and of SwiGLU again instead of keeping them: less memory, more time "
     "(fused, flash)"},
    {"deterministic", &Options::deterministic,
     "give the same bits in every run, at some cost in flash attention's backward"},
};

// ---------------------------------------------------------------------------------------------------------------------
// list and help

static void set_context(const Options& o) {
    context.deterministic = o.deterministic, context.recompute = o.recompute, context.checkpoint = o.checkpoint;
    context.head_chunk = o.head_chunk, context.memory = o.memory, context.csv = o.format == "csv";
}
static Planned plan_of(const Command& c, const Options& o) {
    bool small = c.gpus == 0 || c.is_check;
    return plan_of_run(o, small && c.run != cmd_train ? nullptr : c.run);
}

// What a problem's command takes on this machine, as `COMMAND --plan` says it: rough minutes and GiB.
static std::vector<std::string> cost_cells(const Command& c, const Options& asked) {
    RestoreContext restore;
    Options o;
    parse_options(c, {c.id}, o);
    o.quick = asked.quick, o.memory = asked.memory;
    set_context(o);
    Planned planned = plan_of(c, o);
    if (planned.rows.empty()) { return {"< 1", "< 0.1"}; }
    auto rough = [](double x, double least) {
        return x < least ? strprintf("< %g", least) : strprintf(x < 10 ? "%.2g" : "%.0f", x);
    };
    return {std::isnan(planned.seconds) ? "-" : rough(planned.seconds / 60, 1),
            planned.bytes == 0 ? "does not fit" : rough((double)planned.bytes / (1 << 30), 0.1)};
}

static int cmd_list(const Options& o) {
    int gpus = cuda_devices();
    bool nccl = why_not("nccl", CUDA, 2).empty(), gloo = why_not("gloo", gpus > 0 ? CUDA : CPU, 2).empty();
    Table table;
    table.caption =
        "2025, 2026: that handout's section; minutes: of the products alone, GiB: of the largest run, per rank, "
        "rough, by `--plan`" +
        std::string(o.has("memory") ? ", for such a GPU per rank; runs here: on this machine" : "") +
        (gpus == 0 || !nccl ? strprintf("; scaled down: smaller, because %s",
                                        gpus == 0 ? "there is no GPU" : "two GPUs and NCCL are not there")
                            : "") +
        "; commit " + commit() + "; `cs336 <command> --help` shows a command's options";
    table.columns = {"problem", "2025",       "2026",      "points",  "command",
                     "file",    "notes page", "runs here", "minutes", "GiB"};
    for (const Command& c : COMMANDS) {
        std::string here = "yes";
        if (c.gpus == 1 && gpus == 0 && !c.is_check) { here = "scaled down"; }
        if (c.gpus == 2 && !nccl && !(gloo && c.is_check)) { here = gloo ? "scaled down" : "needs 2 GPUs"; }
        bool problem = *c.section != 0;
        table.rows.push_back({c.id, problem ? in_edition(c.section, "2025") : "tool",
                              problem ? in_edition(c.section, "2026") : "tool",
                              c.points ? std::to_string(c.points) : "", std::string("cs336 ") + c.id, c.file,
                              problem ? "notes/" + section_of(c) + "-" + c.id + ".md" : "", here});
        std::vector<std::string> cost = problem ? cost_cells(c, o) : std::vector<std::string>{"", ""};
        table.rows.back().insert(table.rows.back().end(), cost.begin(), cost.end());
    }
    print(table, o.format);
    return 0;
}

static void print_overview(FILE* to) {
    fprintf(
        to,
        "cs336: every problem of the CS336 systems assignment, worked through in C++ and CUDA\n\n"
        "usage: cs336 <command> [options]      any unambiguous beginning of a command will do, and a section's number\n"
        "       cs336 <command> --help         its options and their defaults (or: cs336 help <command>)\n"
        "       cs336 --version                the commit that this was built from\n\n"
        "  2025   2026   problem; the numbers are the handouts' sections\n");
    for (const Command& c : COMMANDS) {
        fprintf(to, "  %-6s %-6s %-47s%s\n", in_edition(c.section, "2025").c_str(),
                in_edition(c.section, "2026").c_str(), c.id, c.what);
    }
    fprintf(to, "\nexit codes: 0 done, 1 it ran and failed, 2 wrong usage\n");
}

// ---------------------------------------------------------------------------------------------------------------------
// From argv to a command and its Options

struct Section {
    std::string problem, edition;  // "": the word is no number of a section
};
// The handouts number their sections differently. The edition that was typed is looked at first, else 2025.
static Section problem_of_section(const std::string& word, const std::string& typed) {
    if (word.empty() || word.find_first_not_of("0123456789.") != std::string::npos) { return {}; }
    std::vector<std::string> below;
    const std::string first = typed == "2026" ? "2026" : "2025";
    for (const std::string& edition : {first, std::string(first == "2025" ? "2026" : "2025")}) {
        std::vector<std::string> its;
        for (const Command& c : COMMANDS) {
            const std::string section = in_edition(c.section, edition);
            if (section == word) { its.push_back(c.id); }
            if (section.compare(0, word.size() + 1, word + ".") == 0) { below.push_back(c.id); }
        }
        if (its.size() > 1) {
            usage_error("%s: more than one problem of the %s handout has this section; candidates: %s", word.c_str(),
                        edition.c_str(), join(its, ", ").c_str());
        }
        if (its.size() == 1) { return {its[0], edition}; }
        if (!typed.empty() && !below.empty()) { break; }  // what was typed stands above these
    }
    usage_error("%s: no problem has this section; %s%s", word.c_str(), below.empty() ? "" : "candidates: ",
                below.empty() ? "`cs336 list` shows them" : join(below, ", ").c_str());
}
static const Command& find_command(const std::string& word) {
    std::vector<std::string> ids;
    for (const Command& c : COMMANDS) { ids.push_back(c.id); }
    const std::string id = full_name(word, ids, "command");
    return *std::find_if(std::begin(COMMANDS), std::end(COMMANDS), [&](const Command& c) { return id == c.id; });
}
// A section's number in front becomes its problem; the 2026 handout's numbers choose that edition.
static void name_section(std::vector<std::string>& words) {
    std::string typed;
    for (size_t i = 1; i < words.size(); i++) {
        size_t end = std::min(words[i].find('='), words[i].size());
        if (words[i].compare(0, 2, "--") != 0 || lower_name(words[i].substr(2, end - 2)) != "edition") { continue; }
        typed = end < words[i].size() ? words[i].substr(end + 1) : i + 1 < words.size() ? words[i + 1] : "";
    }
    const Section section = problem_of_section(words[0], typed);
    if (section.problem.empty()) { return; }
    const bool has_both = (" " + find_command(section.problem).options).find(" edition ") != std::string::npos;
    const bool chooses = section.edition == "2026" && typed.empty() && has_both;
    note("section %s of the %s handout: took %s%s", words[0].c_str(), section.edition.c_str(), section.problem.c_str(),
         chooses ? " --edition 2026" : "");
    words[0] = section.problem;
    if (chooses) { words.insert(words.end(), {"--edition", "2026"}); }
}

static const Option& find_option(const std::string& key) {
    for (const Option& option : option_table()) {
        if (key == option.key) { return option; }
    }
    fail("the command table names an unknown option: %s", key.c_str());
}

using NewDefaults = std::vector<std::pair<const Option*, std::string>>;  // those of 2026 that are not 2025's

// Adds to app the option that one word of Command::options stands for. Its default goes to o now, its value when app
// parses. `takes` gets what it takes, for messages.
static void add_option(CLI::App& app, const std::string& word, Options& o, std::map<std::string, std::string>& takes,
                       NewDefaults& new_defaults) {
    for (const Flag& flag : flag_table) {
        if (word != flag.name) { continue; }
        auto set = [&o, &flag] { o.*flag.field = true, o.given[flag.name] = ""; };
        app.add_flag_callback(std::string("--") + flag.name, set, flag.help)
            ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
        return;
    }
    size_t end = std::min(word.find_first_of("!="), word.size());
    bool required = word.compare(end, 1, "!") == 0;
    const std::string key = word.substr(0, end);
    const Option& option = find_option(key);
    takes[std::string("--") + option.name] = option.reader.takes;
    auto default_in = [&](const char* edition) {
        std::string own = word.compare(end, 1, "=") == 0 ? in_edition(word.substr(end + 1), edition) : "";
        return own.empty() ? in_edition(option.by_default, edition) : own;
    };
    const std::string by_default = default_in("2025"), in_2026 = default_in("2026");
    bool differ = in_2026 != by_default;
    if (differ) { new_defaults.push_back({&option, in_2026}); }
    read_default(o, option, by_default);
    std::string help = std::string(option.help) + ". Takes " + option.reader.takes;
    if (!by_default.empty()) { help += " (default " + by_default + (differ ? "; 2026: " + in_2026 : "") + ")"; }
    auto read = [&o, &option](const std::string& text) {
        if (!option.reader.read(o, text)) {
            const Reader& reader = option.reader;
            usage_error("--%s: got '%s', takes %s%s", option.name, text.c_str(), reader.takes.c_str(),
                        reader.hint ? reader.hint(text).c_str() : "");
        }
        o.given[option.name] = text;
    };
    app.add_option_function<std::string>(std::string("--") + option.name, read, help)
        ->type_name(" ")
        ->required(required);
}

using NamedFiles = std::vector<std::pair<const char*, std::string>>;  // option, "" where it was not given
static NamedFiles inputs_of(const Options& o) {
    return {{"data", o.data}, {"weights", o.weights}, {"batch", o.batch}, {"inputs", o.inputs}, {"load", o.load}};
}
static void require_inputs(const Options& o) {
    for (const auto& [option, path] : inputs_of(o)) {
        if (!path.empty() && access(path.c_str(), F_OK) != 0) {
            const std::string why = strerror(errno);
            fail("--%s: got '%s': %s%s", option, path.c_str(), why.c_str(), missing_folder(path).c_str());
        }
    }
}
static NamedFiles outputs_of(const Options& o) {
    return {{"out", o.out}, {"save", o.save}, {"plot", o.plot}, {"trace", o.trace}};
}
// Tells a file from the one that takes its place: replace_file makes a new one. "": there is none.
static std::string mark_of(const std::string& path) {
    struct stat s;
    if (stat(path.c_str(), &s) != 0 || !S_ISREG(s.st_mode)) { return ""; }
    return strprintf("%llu %lld.%09ld", (unsigned long long)s.st_ino, (long long)s.st_mtim.tv_sec, s.st_mtim.tv_nsec);
}
static std::vector<std::string> marks_of(const NamedFiles& outputs) {
    std::vector<std::string> marks;
    for (const auto& output : outputs) { marks.push_back(mark_of(output.second)); }
    return marks;
}
// --out is left to the commands.
static void say_what_was_written(const NamedFiles& outputs, const std::vector<std::string>& before) {
    for (size_t i = 1; i < outputs.size() && !is_rank(); i++) {  // ranks: who has started them says it
        const auto& [option, path] = outputs[i];
        if (mark_of(path).empty() || mark_of(path) == before[i]) { continue; }
        note("--%s: wrote %s (%s bytes)", option, path.c_str(),
             with_commas((double)std::filesystem::file_size(path)).c_str());
    }
}

// Refuses, before the work, two files of one name and a file that cannot be created.
static void try_outputs(const NamedFiles& outputs) {
    std::map<std::string, const char*> taken;
    for (const auto& [option, path] : outputs) {
        if (path.empty()) { continue; }
        auto [first, is_new] = taken.emplace(real_name(path), option);
        if (!is_new) {
            usage_error("--%s: got '%s', takes another file than --%s", option, path.c_str(), first->second);
        }
        for (int stream : {STDOUT_FILENO, STDERR_FILENO}) {
            struct stat to, file;
            if (fstat(stream, &to) == 0 && stat(path.c_str(), &file) == 0 && to.st_dev == file.st_dev &&
                to.st_ino == file.st_ino) {
                usage_error("--%s: got '%s', which is where our own lines go", option, path.c_str());
            }
        }
        try {
            replace_file(is_folder(path) ? path + "/cs336" : path, nullptr);
        } catch (const Failure& failure) { usage_error("--%s: %s", option, failure.what()); }
    }
}

// --Context-length as --context_length, where only that is an option; the command by its whole name.
static std::vector<std::string> as_named(const CLI::App& app, const Command& command, std::vector<std::string> words) {
    words[0] = command.id;
    for (std::string& word : words) {
        size_t end = std::min(word.find('='), word.size());
        if (word.compare(0, 2, "--") != 0 || end < 3) { continue; }
        const std::string name = "--" + lower_name(word.substr(2, end - 2));
        if (app.get_option_no_throw(name)) { word.replace(0, end, name); }
    }
    return words;
}
static void refuse_extras(const CLI::App& app, const std::vector<std::string>& extras) {
    if (extras.empty()) { return; }
    std::vector<std::string> known, names;
    for (const CLI::Option* option : app.get_options()) {
        known.push_back(option->get_name()), names.push_back(option->get_name().substr(2));
    }
    const std::string typed = extras[0].substr(0, extras[0].find('='));
    size_t name = typed.find_first_not_of('-');
    std::string hint = name == std::string::npos ? "" : did_you_mean(typed.substr(name), names);
    if (!hint.empty()) { hint.insert(hint.rfind(' ') + 1, "--"); }
    usage_error("%s: no such option%s takes %s", extras[0].c_str(), hint.empty() ? "; it" : (hint + " It").c_str(),
                join(known, ", ").c_str());
}

// A problem takes --edition also where nothing hangs on it, so that one command line's edition fits the next.
static std::string edition_of(const Command& c) {
    if (!*c.section || c.options.compare(0, strlen("edition"), "edition") == 0) { return ""; }
    return in_edition(c.section, "2026").empty() ? " edition_2025"
           : *c.section == '|'                   ? " edition_2026"
                                                 : " same_edition";
}

// typed: what follows the program's name. Returns the help if it asks for it, else "".
static std::string parse_options(const Command& command, const std::vector<std::string>& typed, Options& o) {
    o.command = command.id;
    std::map<std::string, std::string> takes;
    NewDefaults new_defaults;
    CLI::App app(command.what, std::string("cs336 ") + command.id);
    app.set_help_flag("--help,-h", "this text");
    app.get_formatter()->column_width(32);
    app.allow_extras();  // so that the message about them is ours
    std::string options =
        command.options + edition_of(command) + (*command.section || command.run == cmd_train ? " plan memory" : "");
    for (const std::string& word : CLI::detail::split(options, ' ')) {
        if (!word.empty()) { add_option(app, word, o, takes, new_defaults); }
    }
    const std::vector<std::string> words = as_named(app, command, typed);
    o.command_line = words;
    for (size_t i = 1; i < words.size(); i++) {  // CLI11 takes --quick=true and --quick= for --quick
        for (const Flag& flag : flag_table) {
            std::string start = std::string("--") + flag.name;
            if (app.get_option_no_throw(start) && words[i].compare(0, start.size() + 1, start + "=") == 0) {
                usage_error("%s: got a value, takes none", start.c_str());
            }
        }
    }
    try {
        app.parse(std::vector<std::string>(words.rbegin(), words.rend() - 1));  // CLI11 takes them from the end
    } catch (const CLI::CallForHelp&) { return app.help(); } catch (const CLI::ParseError& e) {
        refuse_extras(app, app.remaining());  // a misspelt one may be what is missing
        std::string what = e.what();          // starts with the option
        std::string option = what.substr(0, what.find_first_of(": "));
        if (!takes.count(option)) { usage_error("%s", what.c_str()); }
        bool twice = app.get_option(option)->count() > 1;
        usage_error("%s: got %s, takes %s", option.c_str(), twice ? "it more than once" : "nothing",
                    takes[option].c_str());
    }
    for (const std::string& word : app.remaining()) {
        if (command.run != cmd_reproduce || word[0] == '-') { refuse_extras(app, {word}); }
        o.words.push_back(word);
    }
    for (const auto& [option, text] : new_defaults) {
        if (o.edition == "2026" && !o.has(option->name)) { read_default(o, *option, text); }
    }
    if (o.has("memory") && !o.plan && command.run != cmd_list) {
        usage_error("--memory: got '%s', takes --plan with it: it limits no run", o.given["memory"].c_str());
    }
    const NamedFiles outputs = outputs_of(o);
    for (const auto& in : inputs_of(o)) {
        for (const auto& out : outputs) {
            bool goes_on = strcmp(in.first, "load") == 0 && strcmp(out.first, "save") == 0;
            if (!goes_on && same_file(in.second, out.second)) {
                usage_error("--%s: got '%s', takes another file than --%s", out.first, out.second.c_str(), in.first);
            }
        }
    }
    for (const char* dimension : {"d_model", "d_ff", "num_layers", "num_heads"}) {
        if (o.has("size") && o.has(dimension)) {
            usage_error("--size: got '%s' and --%s too, takes one or the other", join(o.size, ",").c_str(), dimension);
        }
    }
    // The sizes have to fit each other. This is checked before a device is chosen and announced.
    if (app.get_option_no_throw("--size")) { configs_of(o); }
    try_outputs(outputs);
    return "";
}

static int run_command(const Command& command, const std::vector<std::string>& words) {
    Options o;
    std::string help = parse_options(command, words, o);
    if (!help.empty()) {
        printf("%s", help.c_str());
        return 0;
    }
    require_inputs(o);
    set_context(o);
    // What measures is as small as with --quick where there is no GPU, unless its sizes are typed.
    if (command.gpus > 0 && !command.is_check && (o.device == "cpu" || cuda_devices() == 0)) { o.quick = true; }
    if (o.plan) {
        print(plan_table(o, plan_of(command, o)), o.format);
        return 0;
    }
    // nsys_profile traces by itself, and so do the ranks.
    bool traced = !o.trace.empty() && command.run != cmd_nsys_profile && command.gpus != 2;
    if (traced) { start_tracing(); }
    const NamedFiles outputs = outputs_of(o);
    const std::vector<std::string> before = marks_of(outputs);
    int exit_code = command.run(o);
    if (traced) {
        Trace trace = stop_tracing();
        write_trace(o.trace, {trace},
                    strprintf("cs336 %s; %s; commit %s", join(o.command_line, " ").c_str(),
                              device_description().c_str(), commit().c_str()));
        note("--trace: the times in the tables include what tracing costs");
        if (cuda_devices() > 0 && !trace.no_kernels.empty()) {
            note("--trace: without kernels: %s", trace.no_kernels.c_str());
        }
    }
    say_what_was_written(outputs, before);
    return exit_code;
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
        const bool is_asked = asked.empty() ? !in_edition(c.section, o.edition).empty() : asked.count(c.id) > 0;
        if (!is_asked || c.run == cmd_reproduce) { continue; }
        const bool differs = *c.section != '|' && (" " + c.options).find(" edition ") != std::string::npos;
        std::vector<std::string> words = {c.id};
        if (differs) { words.insert(words.end(), {"--edition", o.edition}); }
        if (o.quick) { words.push_back("--quick"); }
        const std::string path = o.out + "/" + c.id + (differs && o.edition == "2026" ? "-2026" : "") + ".md";
        const double start = now_ms();
        const std::string result = reproduce(path, words);
        table.row(c.id, path, strprintf("%.0f", (now_ms() - start) / 1e3), result);
        failed += result.compare(0, 6, "failed") == 0;
    }
    print(table);
    return failed > 0 ? 1 : 0;
}

struct HostOutOfMemory : std::bad_alloc {
    char text[200];  // there may be no room for a string; and the range is closed when the text is read
    HostOutOfMemory() {
        const char* range = innermost_range();
        snprintf(text, sizeof text, "out of memory on the host%s%s", *range ? " in " : "", range);
    }
    const char* what() const noexcept override { return text; }
};

int main(int argc, char** argv) {
    std::set_new_handler([] { throw HostOutOfMemory(); });
    bool no_stdout = fcntl(STDOUT_FILENO, F_GETFD) < 0;
    // A closed stream is opened, or the next file that is opened would get our lines.
    for (int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd) { return 1; }
    }
    if (no_stdout) {
        note("cs336: cannot write to stdout: it is closed");
        return 1;
    }
    signal(SIGCHLD, SIG_DFL);  // whoever started us may ignore it; waitpid() would then find no children
    signal(SIGXFSZ, SIG_IGN);  // a file that grows over `ulimit -f`: the write fails, and says so
    choose_cpu_settings(argv);
    std::string word = argc > 1 ? argv[1] : "", who = "cs336";
    if (argc < 2) {
        print_overview(stderr);
        return 2;
    }
    int exit_code = 1;
    try {
        if (word == "--help" || word == "-h" || (word == "help" && argc == 2)) {
            print_overview(stdout);
            exit_code = 0;
        } else if (word == "--version" || word == "version") {
            printf("%s\n", commit().c_str());
            exit_code = 0;
        } else {
            std::vector<std::string> words = {argv + 1, argv + argc};
            if (word == "help" && argc == 3) { words = {words[1], "--help"}; }
            name_section(words);
            const Command& command = find_command(words[0]);
            who += std::string(" ") + command.id;
            exit_code = run_command(command, words);
        }
    } catch (const Failure& failure) {
        note("%s: %s", who.c_str(), failure.what());
        exit_code = failure.exit_code;
    } catch (const std::exception& e) { note("%s: %s", who.c_str(), e.what()); }
    if ((fflush(stdout) != 0 || ferror(stdout)) && exit_code == 0) {
        note("%s: cannot write to stdout: %s", who.c_str(), strerror(errno));
        exit_code = 1;
    }
    // A command that a signal has ended in order: whoever started us sees that signal, as without that order. A rank's
    // launcher reads the code.
    if (exit_code > 128 && !is_rank()) {
        signal(exit_code - 128, SIG_DFL);
        raise(exit_code - 128);
    }
    return exit_code;
}
