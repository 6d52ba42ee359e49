// plan.cu: what an experiment runs: models, precisions, modes; and whether it fits.
#include "commands.h"
#include <algorithm>

static bool is_custom(const Options& o) { return o.d_model || o.d_ff || o.num_layers || o.num_heads; }

std::vector<ModelConfig> configs_of(const Options& o) {
    std::vector<ModelConfig> configs;
    if (is_custom(o)) {
        ModelConfig c = model_sizes[0];
        c.name = "custom";
        if (o.d_model) { c.d_model = o.d_model; }
        if (o.d_ff) { c.d_ff = o.d_ff; }
        if (o.num_layers) { c.num_layers = o.num_layers; }
        if (o.num_heads) { c.num_heads = o.num_heads; }
        configs = {c};
    } else {
        std::set<std::string> names;
        for (const std::string& size : o.size) {
            names.insert(size == "xl" && o.edition == "2026" ? "xl (2026)" : size);
        }
        for (const ModelConfig& c : model_sizes) {
            if (names.count(c.name) > 0) { configs.push_back(c); }
        }
    }
    for (ModelConfig& c : configs) {
        if (o.has("vocab_size") || is_custom(o)) { c.vocab_size = o.vocab_size; }
        check_config(c);
    }
    return configs;
}

std::string vocabulary_of(const std::vector<ModelConfig>& configs) {
    std::set<std::string> sizes;
    for (const ModelConfig& c : configs) { sizes.insert(std::to_string(c.vocab_size)); }
    return join({sizes.begin(), sizes.end()}, ",");
}

std::string size_option(const ModelConfig& c) { return c.name.substr(0, c.name.find(" (")); }

Mode fastest_mode(const ModelConfig& c, Precision precision) {
    return fastest_flash(context.device, matmul_dtype(precision), c.d_model / c.num_heads) ? FLASH : FUSED;
}
void check_mode(const ModelConfig& c, Mode mode, Precision precision) {
    if (mode == FLASH) { require_flash(context.device, matmul_dtype(precision), c.d_model / c.num_heads); }
    if (std::max(context.checkpoint, checkpointed_ffns(c)) > c.num_layers) {
        usage_error("--checkpoint: got %s, takes at most the model's %d blocks",
                    name_of_checkpoint(context.checkpoint).c_str(), c.num_layers);
    }
}
std::string name_of_checkpoint(int checkpoint) {
    int ffns = checkpoint - CHECKPOINT_SOME_FFN, blocks = checkpoint - CHECKPOINT_SOME_BLOCKS;
    return blocks <= MAX_CHECKPOINT          ? "blocks:" + std::to_string(blocks)
           : ffns <= MAX_CHECKPOINT          ? "ffn:" + std::to_string(ffns)
           : checkpoint == CHECKPOINT_FFN    ? "ffn"
           : checkpoint == CHECKPOINT_HALF   ? "half"
           : checkpoint == CHECKPOINT_HALVES ? "halves"
           : checkpoint == CHECKPOINT_NESTED ? "nested"
                                             : std::to_string(checkpoint);
}
std::string caption_of(Mode mode) {
    std::string checkpoint = context.checkpoint ? ", checkpoint " + name_of_checkpoint(context.checkpoint) : "";
    std::string head = context.head_chunk ? ", head chunk " + std::to_string(context.head_chunk) : "";
    return name_of(mode) + std::string(context.recompute ? ", recompute" : "") + checkpoint + head;
}

Mode mode_for(const Options& o, const std::string& name, const ModelConfig& c, Precision precision) {
    Mode mode = mode_from(name);
    if (!o.has("mode")) { mode = std::min(mode, fastest_mode(c, precision)); }
    check_mode(c, mode, precision);
    return mode;
}

std::vector<Precision> precisions_of(const Options& o) {
    std::vector<Precision> precisions;
    for (const std::string& name : o.precision) { precisions.push_back(precision_from(name)); }
    return precisions;
}
std::vector<Mode> modes_of(const Options& o, const std::vector<ModelConfig>& configs,
                           const std::vector<Precision>& precisions) {
    std::vector<Mode> modes;
    for (const std::string& name : o.mode) {
        modes.push_back(mode_from(name));
        for (Precision precision : precisions) {
            for (const ModelConfig& c : configs) {
                modes.back() = std::min(modes.back(), mode_for(o, name, c, precision));
            }
        }
    }
    return modes;
}
size_t run_if_fits(const std::string& row, size_t needs, const std::function<void()>& f, size_t held) {
    if (needs > held && needs - held > available_memory(context.device)) { return needs; }
    progress("%s", row.c_str());
    try {
        f();
    } catch (const OutOfMemory& e) {
        clear_tape(), note("%s: %s", row.c_str(), e.what());
        return std::max<size_t>(needs, 1);
    }
    return 0;
}

const char* name_of(Phase phase) {
    static const char* const names[] = {"forward", "forward+backward", "step", "forward with tape"};
    return names[phase];
}
std::string row_of(const ModelConfig& c, int B, int T, Phase phase) {
    return strprintf("%s, batch %d, context length %d, %s, %s %s", c.name.c_str(), B, T, name_of(phase),
                     name_of(context.precision), caption_of(context.mode).c_str());
}
