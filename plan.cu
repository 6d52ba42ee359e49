// plan.cu: what an experiment runs, how large, and whether it fits into memory. Its captions say what was scaled down.
//
// --plan has no list of its own of what a command runs: the command does what it always does, but an Attempt, whose
// memory and FLOPs are counted on META as before each run, is written down instead of run, and print() is silent. The
// table of those rows is all that is printed; --memory only changes what available_memory() says.
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

Mode fastest_mode(const ModelConfig& c, Precision precision) {
    return fastest_flash(context.device, matmul_dtype(precision), c.d_model / c.num_heads) ? FLASH : FUSED;
}
void check_mode(const ModelConfig& c, Mode mode, Precision precision) {
    if (mode == FLASH) { require_flash(context.device, matmul_dtype(precision), c.d_model / c.num_heads); }
    if (mode == EAGER && context.recompute) { usage_error("--recompute: takes mode fused or flash; eager keeps all"); }
    if (context.head_chunk > 0 && (mode == EAGER || precision == PREC_FP16)) {
        usage_error(
            "--head_chunk: got %d with mode %s and precision %s, takes mode fused or flash, and not fp16; "
            "--head_chunk 0 makes all logits at once",
            context.head_chunk, name_of(mode), name_of(precision));
    }
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
    const bool eager = mode == EAGER;
    if (context.head_chunk > 0 && !o.has("head_chunk") && (eager || precision == PREC_FP16)) {
        usage_error("--%s: got %s, takes %s with a head chunk of %d; --head_chunk 0 makes all logits at once",
                    eager ? "mode" : "precision", eager ? "eager" : "fp16", eager ? "fused or flash" : "another",
                    context.head_chunk);
    }
    check_mode(c, mode, precision);
    return mode;
}

static std::vector<std::string> noted_smaller;  // of --plan, by all plans of the command
void Plan::note_smaller(const std::string& words) {
    if (std::find(noted_smaller.begin(), noted_smaller.end(), words) == noted_smaller.end()) {
        noted_smaller.push_back(words);
    }
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

// The next smaller size of the edition.
static bool choose_smaller_size(Plan& p) {
    std::string best;
    int64_t most = 0, now = matmul_weights(p.configs[0]);
    for (const ModelConfig& c : model_sizes) {
        Options o = p.o;
        o.size = {size_option(c)};
        int64_t weights = matmul_weights(configs_of(o)[0]);
        if (weights < now && weights > most) { best = o.size[0], most = weights; }
    }
    if (!best.empty()) { p.o.size = {best}; }
    return !best.empty();
}

void Plan::shrink_to_fit(int least_batch, const std::function<bool(const Plan&)>& fits) {
    Plan p = *this;
    // A typed --checkpoint counts the blocks of the size that it was typed for.
    bool size_may_shrink = !o.has("size") && !o.has("checkpoint") && !is_custom(o);
    auto halve = [&](const char* name, int Options::*field, int least) {
        int& value = p.o.*field;
        if (o.has(name) || value <= least) { return false; }
        value = std::max(least, value / 2);
        return true;
    };
    while (!fits(p)) {
        bool smaller = (size_may_shrink && choose_smaller_size(p)) ||
                       halve("batch_size", &Options::batch_size, least_batch) ||
                       halve("context_length", &Options::context_length, 128);
        if (!smaller) {
            context.mode = modes[0];
            return;
        }
        p.choose_models();
        context.mode = p.modes[0];
    }
    auto note = [&](const char* name, const std::string& to, const std::string& from) {
        if (to != from) {
            p.note_smaller(std::string(name) + " " + to + " instead of " + from + ", which does not fit");
        }
    };
    note("size", p.configs[0].name, configs[0].name);
    note("batch_size", std::to_string(p.o.batch_size), std::to_string(o.batch_size));
    note("context_length", std::to_string(p.o.context_length), std::to_string(o.context_length));
    *this = p;
}

void Plan::choose_models() {
    configs = configs_of(o), precisions.clear(), modes.clear();
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

std::string origin(const Options& o) {
    const char* quick = !o.quick ? "" : o.has("quick") ? "; sizes of --quick" : "; no GPU: sizes of --quick";
    return device_description() + "; commit " + commit() + quick;
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

void Attempt::run(const std::string& row, double passes, const std::function<void()>& f, size_t held) {
    bool fits = needs.bytes <= held || needs.bytes - held <= available_memory(context.device);
    if (only_planned(row, needs, fits, passes, seconds) || !fits) { return; }
    progress("%s", row.c_str());
    try {
        f();
        ran = true;
    } catch (const OutOfMemory& e) { clear_tape(), note("%s: %s", row.c_str(), e.what()); }
}

std::string Attempt::cell(const std::string& result) const { return ran ? result : oom_cell(needs.bytes); }

// ---------------------------------------------------------------------------------------------------------------------
// --plan

const char* name_of(Phase phase) {
    static const char* const names[] = {"forward", "forward+backward", "step", "forward with tape"};
    return names[phase];
}
std::string ranks_of(const Communicator& c) { return c.world == 1 ? "" : strprintf("%d ranks, ", c.world); }
std::string row_of(const ModelConfig& c, int B, int T, Phase phase) {
    return strprintf("%s, batch %d, context length %d, %s, %s %s", c.name.c_str(), B, T, name_of(phase),
                     name_of(context.precision), caption_of(context.mode).c_str());
}

struct NotedRow {
    PlannedRow row;
    double flops;
    Precision precision;
};
static std::vector<NotedRow> noted_rows;

bool only_planned(const std::string& row, const Prediction& pass, bool fits, double passes, double seconds) {
    if (!context.plan_only) { return false; }
    if (context.device == META) { return true; }  // counting takes no memory
    noted_rows.push_back({{row, pass.bytes, fits, seconds}, passes * pass.flops, context.precision});
    return true;
}

constexpr double SHARE = 0.4;  // of the matmul rate, what whole steps reach, roughly
// FLOP/s; NAN: nobody knows.
static double step_rate(Precision precision) {
    static std::map<std::pair<Device, Precision>, double> measured;
    if (gpu_is_imagined()) { return NAN; }
    auto [rate, is_new] = measured.emplace(std::make_pair(context.device, precision), NAN);
    if (is_new) {
        try {
            rate->second = SHARE * 1e12 * matmul_rate(precision, context.device == CPU ? 768 : 4096, 3);
        } catch (const OutOfMemory&) {}  // somebody else fills the device: the plan is of use all the same
    }
    return rate->second;
}

Planned plan_of_run(const Options& asked, int (*run)(const Options&)) {
    RestoreContext restore;
    context.plan_only = true, context.memory = asked.memory;
    Options o = asked;
    o.plot = o.trace = o.out = o.save = "", o.roofline = false;  // nothing is written
    noted_rows.clear(), noted_smaller.clear();
    if (run) {
        run(o);
    } else {
        context.device = choose_device(o.device.empty() ? "auto" : o.device);
    }
    Planned planned{{}, device_description(), join(noted_smaller, ", "), available_memory(context.device), NAN, 0};
    for (const NotedRow& noted : noted_rows) {
        PlannedRow row = noted.row;
        double seconds = noted.flops > 0 ? noted.flops / step_rate(noted.precision) : row.seconds > 0 ? 0 : NAN;
        row.seconds = std::isnan(seconds) ? NAN : std::max(row.seconds, seconds);
        planned.rows.push_back(row);
        if (!row.fits) { continue; }
        planned.bytes = std::max(planned.bytes, row.bytes);
        if (!std::isnan(row.seconds)) {
            planned.seconds = row.seconds + (std::isnan(planned.seconds) ? 0 : planned.seconds);
        }
    }
    return planned;
}

Table plan_table(const Options& o, const Planned& p) {
    auto mib = [](double bytes) { return strprintf("%.1f", bytes / (1 << 20)); };
    auto rough = [](double seconds) {
        return std::isnan(seconds) ? "-" : strprintf(seconds < 10 ? "%.2g" : "%.0f", seconds);
    };
    const bool timed =
        std::any_of(p.rows.begin(), p.rows.end(), [](const PlannedRow& row) { return !std::isnan(row.seconds); });
    std::string seconds = timed ? strprintf(
                                      "rough seconds: of the products alone, at %.0f %% of the rate that a large "
                                      "square reaches here, without start and communication; ",
                                      100 * SHARE)
                          : o.has("memory") && !p.rows.empty()
                              ? "no rough seconds: the speed of that card is not known here; "
                              : "";
    const bool ranks = std::any_of(p.rows.begin(), p.rows.end(),
                                   [](const PlannedRow& row) { return row.row.find(" ranks, ") != std::string::npos; });
    const char* whose = !ranks            ? ""
                        : o.has("memory") ? "peaks are per rank, and each rank is taken to have one such GPU; "
                                          : "peaks are per rank; ";
    Table table{strprintf("plan of %s, nothing ran: %s, %.2f GiB available; %s%scommit %s%s", o.command.c_str(),
                          p.device.c_str(), p.available / 1073741824.0, whose, seconds.c_str(), commit().c_str(),
                          p.scaled_down.empty() ? "" : ("; scaled down: " + p.scaled_down).c_str()),
                {"row", "predicted peak MiB", "fits"},
                {}};
    if (timed) { table.columns.push_back("rough seconds"); }
    auto add = [&](std::vector<std::string> row, const std::string& time) {
        if (timed) { row.push_back(time); }
        table.rows.push_back(row);
    };
    for (const PlannedRow& row : p.rows) {
        add({row.row, mib((double)row.bytes), row.fits ? "yes" : "no"}, row.fits ? rough(row.seconds) : "");
    }
    if (p.rows.empty()) {  // as `list` says it
        table.columns.push_back("rough seconds");
        table.rows.push_back({"numbers and small tensors", "< " + mib(0.1 * (1 << 30)), "yes", "< 60"});
    }
    auto smallest = std::min_element(p.rows.begin(), p.rows.end(),
                                     [](const PlannedRow& a, const PlannedRow& b) { return a.bytes < b.bytes; });
    if (p.rows.size() > 1 && p.bytes == 0) {
        add({"nothing fits: smallest peak", mib((double)smallest->bytes), "no"}, "");
    } else if (p.rows.size() > 1) {
        add({timed ? "what fits: largest peak, all seconds" : "what fits: largest peak", mib(p.bytes), ""},
            rough(p.seconds));
    }
    return table;
}
