// plan.cu: what an experiment runs, how large, and whether it fits into memory. Its captions say what was scaled down.
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
        // A size that the edition has made another stands in the table with the edition behind its name.
        std::set<std::string> names;
        for (const std::string& size : o.size) {
            std::string of_edition = size + " (" + o.edition + ")";
            auto is = [&](const ModelConfig& c) { return c.name == of_edition; };
            names.insert(std::any_of(model_sizes.begin(), model_sizes.end(), is) ? of_edition : size);
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
    std::vector<std::string> sizes;
    for (const ModelConfig& c : configs) {
        std::string size = std::to_string(c.vocab_size);
        if (std::find(sizes.begin(), sizes.end(), size) == sizes.end()) { sizes.push_back(size); }
    }
    return join(sizes, ",");
}

std::string size_option(const ModelConfig& c) { return c.name.substr(0, c.name.find(" (")); }

Mode mode_for(const Options& o, const std::string& name, const ModelConfig& c, Precision precision) {
    Mode mode = mode_from(name);
    if (!o.has("mode")) { mode = std::min(mode, fastest_mode(c, precision)); }
    check_mode(c, mode, precision);
    return mode;
}

void Plan::note_smaller(const std::string& words) {
    scaled_down += (scaled_down.empty() ? "; scaled down: " : ", ") + words;
}

static std::string text_of(double value) { return strprintf("%.10g", value); }
template <class T>
static std::string text_of(const std::vector<T>& values) {
    std::vector<std::string> texts;
    for (const T& value : values) { texts.push_back(text_of(value)); }
    return join(texts, ",");
}

template <class T>
void Plan::shrink(const char* name, T Options::*field, const T& to, const std::string& words) {
    if (o.has(name) || o.*field <= to) { return; }  // lists are compared item by item, a beginning is smaller
    note_smaller(words.empty() ? std::string(name) + " " + text_of(to) + " instead of " + text_of(o.*field) : words);
    o.*field = to;
}
template void Plan::shrink(const char*, double Options::*, const double&, const std::string&);
template void Plan::shrink(const char*, int Options::*, const int&, const std::string&);
template void Plan::shrink(const char*, std::vector<int> Options::*, const std::vector<int>&, const std::string&);
template void Plan::shrink(const char*, std::vector<double> Options::*, const std::vector<double>&, const std::string&);

void Plan::shrink_size() {
    if (o.has("size") || is_custom(o)) { return; }
    std::vector<std::string> names;
    for (const ModelConfig& c : configs_of(o)) { names.push_back(c.name); }
    note_smaller("size small instead of " + join(names, ","));
    o.size = {"small"};
}

void Plan::choose_models() {
    configs = configs_of(o);
    for (const std::string& name : o.precision) { precisions.push_back(precision_from(name)); }
    for (const std::string& name : o.mode) {
        modes.push_back(mode_from(name));
        for (Precision precision : precisions) {
            for (const ModelConfig& c : configs) {
                modes.back() = std::min(modes.back(), mode_for(o, name, c, precision));
            }
        }
    }
}

std::string Plan::origin() const { return device_description() + "; commit " + commit() + scaled_down; }

void Attempt::run(const std::function<void()>& f, size_t held) {
    if (needs > held && needs - held > available_memory(context.device)) { return; }
    try {
        f();
        ran = true;
    } catch (const OutOfMemory&) { clear_tape(); }
}

std::string Attempt::cell(const std::string& result) const { return ran ? result : oom_cell(needs); }
