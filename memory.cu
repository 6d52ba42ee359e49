// memory.cu: section 1.1.6. Where a step's memory goes: the log of our allocations as tables, as a timeline, and as the
// pickle that pytorch.org/memory_viz opens.
#include "commands.h"

#include <algorithm>
#include <cerrno>

#include <sys/stat.h>

static double to_mib(double bytes) { return bytes / 1048576; }
static std::string mib(double bytes) { return strprintf("%.1f", to_mib(bytes)); }

// ---------------------------------------------------------------------------------------------------------------------
// Replaying a log

size_t peak_of(const std::vector<MemoryEvent>& log, size_t* at) {
    std::map<uint64_t, size_t> held;
    size_t now = 0, peak = 0;
    for (size_t i = 0; i < log.size(); i++) {
        const MemoryEvent& e = log[i];
        auto it = held.find(e.address);
        if (e.is_alloc ? it != held.end() : it == held.end() || it->second != e.bytes) {
            fail("memory log: %s of %zu bytes at %#lx does not pair up", e.is_alloc ? "the allocation" : "the free",
                 e.bytes, (unsigned long)e.address);
        }
        if (e.is_alloc) {
            held[e.address] = e.bytes;
            now += e.bytes;
        } else {
            held.erase(it);
            now -= e.bytes;
        }
        if (now > peak && at) { *at = i; }
        peak = std::max(peak, now);
    }
    return peak;
}
static std::string path_of(const MemoryEvent& e) {  // "forward/layer/ffn"
    return e.ms == 0 ? "held" : join({e.ranges.begin(), e.ranges.end()}, "/");
}
static const char* op_of(const MemoryEvent& e) {  // a lambda has no name: its range says what it does
    return strcmp(e.at.function, "operator()") == 0 && !e.ranges.empty() ? e.ranges.back() : e.at.function;
}

// The highest point gets its label.
static void label_peak(Chart& chart) {
    double peak = 0;
    for (size_t i = 0; i < chart.x.size(); i++) {
        double sum = 0;
        for (const Series& s : chart.series) { sum += s.y[i]; }
        peak = std::max(peak, sum);
    }
    chart.peak = "peak " + with_commas(round(peak)) + " MiB";
}

// Two charts: all that is held, and what comes and goes. The latter is hard to see beside 13 GB of weights.
static std::string memory_timeline(const std::vector<MemoryEvent>& log, const std::string& title,
                                   const std::string& subtitle, bool in_ms) {
    Chart all{Chart::AREAS, "all that is held", in_ms ? "time (ms)" : "allocations and frees", "MiB", {}, {}, {}};
    Chart changing = all;
    changing.title = "of it: what comes and goes";
    std::vector<Series> categories(CATEGORIES);
    std::set<int> moving;
    double now[CATEGORIES] = {};
    for (size_t i = 0; i < log.size(); i++) {
        const MemoryEvent& e = log[i];
        now[e.category] += to_mib(e.is_alloc ? (double)e.bytes : -(double)e.bytes);
        all.x.push_back(in_ms ? e.ms : i);
        for (int c = 0; c < CATEGORIES; c++) { categories[c].y.push_back(now[c]); }
        if (e.ms == 0) { continue; }  // held before
        moving.insert(e.category);
        if (e.ranges.empty()) { continue; }  // between the phases
        if (all.spans.empty() || all.spans.back().name != e.ranges[0]) {
            all.spans.push_back({e.ranges[0], all.x.back(), 0});
        }
        all.spans.back().to = all.x.back();
    }
    changing.x = all.x, changing.spans = all.spans;
    for (int c = 0; c < CATEGORIES; c++) {
        Series& s = categories[c];
        s.name = name_of((Category)c), s.colour = c;
        if (s.y.empty() || *std::max_element(s.y.begin(), s.y.end()) == 0) { continue; }
        all.series.push_back(s);
        if (moving.count(c)) { changing.series.push_back(s); }
    }
    label_peak(all), label_peak(changing);
    return draw(title, subtitle, {all, changing});
}

// ---------------------------------------------------------------------------------------------------------------------
// snapshot.pickle. Python's pickle protocol 2: a program for a stack machine, whose last value is the object. The
// viewer knows few of its instructions; these are enough.

struct Pickle {
    std::string bytes = "\x80\x02";
    std::map<std::string, uint32_t> strings;  // written before: position in the memo
    uint32_t memo_size = 0;

    void little_endian(uint64_t value, int n) {
        for (int i = 0; i < n; i++) { bytes += (char)(value >> (8 * i)); }
    }
    uint32_t memoize() {  // the value on top of the stack: LONG_BINPUT
        bytes += 'r';
        little_endian(memo_size, 4);
        return memo_size++;
    }
    void again(uint32_t memo) {  // LONG_BINGET
        bytes += 'j';
        little_endian(memo, 4);
    }
    void text(const std::string& s) {
        auto it = strings.find(s);
        if (it != strings.end()) { return again(it->second); }
        bytes += 'X';
        little_endian(s.size(), 4);
        bytes += s;
        strings[s] = memoize();
    }
    void integer(int64_t value) {
        if (value >= INT32_MIN && value <= INT32_MAX) {  // BININT
            bytes += 'J';
            little_endian((uint32_t)value, 4);
        } else {  // LONG1, 8 bytes
            bytes += "\x8a\x08";
            little_endian((uint64_t)value, 8);
        }
    }
    void boolean(bool value) { bytes += value ? '\x88' : '\x89'; }
    void dict(const std::function<void()>& keys_and_values) {
        bytes += "}(";
        keys_and_values();
        bytes += 'u';
    }
    // APPENDS a thousand at a time, as Python does: the viewer passes each batch as arguments of one call, and more
    // than some 100,000 of them overflow its stack.
    void list(size_t n, const std::function<void(size_t)>& item) {
        bytes += ']';
        for (size_t i = 0; i < n; i++) {
            if (i % 1000 == 0) { bytes += '('; }
            item(i);
            if (i % 1000 == 999 || i + 1 == n) { bytes += 'e'; }
        }
    }
    void number(const char* key, int64_t value) {
        text(key);
        integer(value);
    }
    void word(const char* key, const char* value) {
        text(key);
        text(value);
    }
};

static const char* file_name(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

// The stack that the viewer shows: the line that allocated, then the ranges around it, innermost first.
static void write_frames(Pickle& p, const MemoryEvent& e, std::map<std::vector<const void*>, uint32_t>& written) {
    std::vector<const void*> key(e.ranges.begin(), e.ranges.end());
    key.push_back(e.at.file);
    key.push_back((const void*)(intptr_t)e.at.line);
    p.text("frames");
    auto it = written.find(key);
    if (it != written.end()) { return p.again(it->second); }
    size_t n = e.ranges.size();
    p.list(n + 1, [&](size_t i) {
        p.dict([&] {
            p.word("filename", i == 0 ? file_name(e.at.file) : "range");
            p.number("line", i == 0 ? e.at.line : (int)(n + 1 - i));
            p.word("name", i == 0 ? e.at.function : e.ranges[n - i]);
        });
    });
    written[key] = p.memoize();
}

// Each of our buffers becomes a segment of its own: the pool below is the driver's, and its segments are not known.
std::string snapshot_pickle(const std::vector<MemoryEvent>& log) {
    Pickle p;
    std::map<std::vector<const void*>, uint32_t> frames;
    std::map<uint64_t, const MemoryEvent*> held;  // at the end
    for (const MemoryEvent& e : log) {
        if (e.is_alloc) {
            held[e.address] = &e;
        } else {
            held.erase(e.address);
        }
    }
    std::vector<const MemoryEvent*> live;
    for (const auto& [address, e] : held) { live.push_back(e); }

    auto write_segment = [&](size_t i) {
        const MemoryEvent& e = *live[i];
        p.dict([&] {
            p.number("device", 0), p.number("address", e.address), p.number("stream", 0);
            for (const char* key : {"total_size", "allocated_size", "active_size", "requested_size"}) {
                p.number(key, e.bytes);
            }
            p.word("segment_type", "large");
            p.text("segment_pool_id"), p.integer(0), p.integer(0), p.bytes += '\x86';  // a tuple of two
            p.text("is_expandable"), p.boolean(false);
            write_frames(p, e, frames);
            p.text("blocks");
            p.list(1, [&](size_t) {
                p.dict([&] {
                    p.number("address", e.address), p.number("size", e.bytes), p.number("requested_size", e.bytes);
                    p.word("state", "active_allocated");
                    write_frames(p, e, frames);
                });
            });
        });
    };
    auto write_action = [&](const char* action, const MemoryEvent& e, const char* category) {
        p.dict([&] {
            p.word("action", action), p.number("addr", e.address), p.number("size", e.bytes), p.number("stream", 0);
            p.number("time_us", (int64_t)(e.ms * 1e3)), p.word("category", category);
            write_frames(p, e, frames);
        });
    };
    // An event of ours is two or three of PyTorch's. The last one is a marker of category 'unknown': where events have
    // categories and none is called so, the viewer fails.
    static const std::vector<const char*> alloc = {"segment_alloc", "alloc"},
                                          free = {"free_requested", "free_completed", "segment_free"};
    std::vector<std::pair<size_t, const char*>> actions;
    for (size_t i = 0; i < log.size(); i++) {
        for (const char* action : log[i].is_alloc ? alloc : free) { actions.push_back({i, action}); }
    }
    MemoryEvent end{log.empty() ? 0 : log.back().ms, false, 0, 0, ACTIVATIONS, {}, here()};
    p.dict([&] {
        p.text("segments");
        p.list(live.size(), write_segment);
        p.text("device_traces");
        p.list(1, [&](size_t) {
            p.list(actions.size() + 1, [&](size_t i) {
                if (i == actions.size()) { return write_action("snapshot", end, "unknown"); }
                const MemoryEvent& e = log[actions[i].first];
                write_action(actions[i].second, e, name_of(e.category));
            });
        });
    });
    return p.bytes + '.';
}

// ---------------------------------------------------------------------------------------------------------------------
// memory_profiling: one forward pass, or one step, of a model that has run before, with the log on

struct Profile : Attempt {
    ModelConfig config;
    Precision precision;
    int T;
    Phase phase;
    size_t peak = 0, peak_by[CATEGORIES] = {}, card = 0;  // bytes
    std::string peak_range = "";                          // open at the peak
    std::vector<MemoryEvent> log = {};
};

static const Phase phases[] = {FORWARD, TAPED_FORWARD, STEP};

static Profile profile_memory(const ModelConfig& c, Precision precision, int B, int T, Phase phase, uint64_t seed) {
    Profile r{{}, c, precision, T, phase};
    Device device = context.device;
    context.precision = precision;
    r.needs = predicted_peak(c, B, T, phase);
    give_back_cached_memory();  // so that the card's use is this run's
    r.run(row_of(c, B, T, phase), 2, [&] {
        Model model = random_model(c, seed);
        Batch batch = random_batch(B, T, c.vocab_size, seed);
        LossScaler scaler;
        run_phase(phase, model, batch, scaler);  // from here on gradients, moments and the libraries' own are there
        synchronize();
        reset_peak(device);
        start_memory_log(device);
        run_phase(phase, model, batch, scaler);
        r.log = stop_memory_log();
        synchronize();
        r.card = gpu_memory_used();
    });
    if (!r.ran) {
        stop_memory_log();
        return r;
    }
    const MemoryUse& use = memory_use(device);
    r.peak = use.peak;
    std::copy_n(use.peak_by, CATEGORIES, r.peak_by);
    size_t at = 0, logged = peak_of(r.log, &at);
    if (logged != r.peak) {
        fail("memory_profiling: the log's peak is %zu bytes, the allocator's %zu", logged, r.peak);
    }
    r.peak_range = path_of(r.log[at]);
    return r;
}

// ---------------------------------------------------------------------------------------------------------------------
// Its tables, (b) to (e) as the handout counts

// profiles: for each configuration one of each phase
static Table peak_table(const std::vector<Profile>& profiles, Precision precision, const std::string& caption) {
    bool meta = context.device == META, card = context.device == CUDA;
    Table table{"memory_profiling (b): precision " + std::string(name_of(precision)) + "; " + caption,
                {"size", "context length"},
                {}};
    auto add_columns = [&](const std::string& before, const std::string& step, const std::string& after) {
        for (Phase phase : phases) {
            table.columns.push_back(before + (phase == STEP ? step : name_of(phase)) + after);
        }
    };
    add_columns("", "full step", " peak MiB");
    if (!meta) { add_columns("", "full step", " predicted MiB"); }
    if (card) { add_columns("card in use, ", "step", " MiB"); }
    for (size_t i = 0; i < profiles.size(); i += std::size(phases)) {
        const Profile* first = &profiles[i];
        if (first->precision != precision) { continue; }
        std::vector<std::string> row = {first->config.name, std::to_string(first->T)};
        auto add_cells = [&](const std::function<std::string(const Profile&)>& cell) {
            for (size_t k = 0; k < std::size(phases); k++) { row.push_back(cell(first[k])); }
        };
        add_cells([](const Profile& r) { return r.cell(mib(r.peak)); });
        if (!meta) {
            add_cells([](const Profile& r) { return mib(r.needs.bytes); });
        }
        if (card) {
            add_cells([](const Profile& r) { return r.ran ? mib(r.card) : ""; });
        }
        table.rows.push_back(row);
    }
    return table;
}

static Table category_table(const std::vector<Profile>& profiles, const std::string& caption) {
    Table table{"memory_profiling (c): MiB by category at the peak; " + caption,
                {"size", "context length", "phase", "precision"},
                {}};
    for (int c = 0; c < CATEGORIES; c++) { table.columns.push_back(name_of((Category)c)); }
    table.columns.insert(table.columns.end(), {"all", "range at the peak"});
    for (const Profile& r : profiles) {
        if (!r.ran) { continue; }
        std::vector<std::string> row = {r.config.name, std::to_string(r.T), name_of(r.phase), name_of(r.precision)};
        for (size_t bytes : r.peak_by) { row.push_back(mib(bytes)); }
        row.insert(row.end(), {mib(r.peak), r.peak_range});
        table.rows.push_back(row);
    }
    return table;
}

// Autocast copies each weight that is multiplied with, at 2 bytes per element. The fused modes in bf16 need no copies,
// see WeightForm.
static Table difference_table(const std::vector<Profile>& profiles, Precision from, Precision to,
                              const std::string& origin) {
    Table table{strprintf("memory_profiling (c): what %s adds to %s's peak (MiB); %s", name_of(to), name_of(from),
                          origin.c_str()),
                {"size", "context length", "phase", "all", "of it weight copies", "2 bytes per matmul weight",
                 "activations", "the rest"},
                {}};
    for (const Profile& a : profiles) {
        for (const Profile& b : profiles) {
            bool pair = a.config.name == b.config.name && a.T == b.T && a.phase == b.phase && a.precision == from &&
                        b.precision == to && a.ran && b.ran;
            if (!pair) { continue; }
            double all = (double)b.peak - (double)a.peak;
            double copies = (double)b.peak_by[WEIGHT_COPIES] - (double)a.peak_by[WEIGHT_COPIES];
            double activations = (double)b.peak_by[ACTIVATIONS] - (double)a.peak_by[ACTIVATIONS];
            table.rows.push_back({a.config.name, std::to_string(a.T), name_of(a.phase), mib(all), mib(copies),
                                  mib(2.0 * matmul_weights(a.config)), mib(activations),
                                  mib(all - copies - activations)});
        }
    }
    return table;
}

static Table residual_table(const std::vector<Profile>& profiles, int B, const std::string& origin) {
    Table table{strprintf("memory_profiling (d): one tensor of the residual stream, batch %d: B*T*C*4 bytes; %s", B,
                          origin.c_str()),
                {"size", "context length", "precision", "B*T*C*4", "MiB", "allocated bytes", "by"},
                {}};
    for (const Profile& r : profiles) {
        if (r.phase != FORWARD || !r.ran) { continue; }
        int64_t bytes = (int64_t)B * r.T * r.config.d_model * 4;
        auto embedding = std::find_if(r.log.begin(), r.log.end(), [](const MemoryEvent& e) {
            return e.ms > 0 && e.is_alloc && !e.ranges.empty() && strcmp(e.ranges.back(), "embedding") == 0;
        });
        if (embedding == r.log.end()) { fail("memory_profiling: the log has no allocation in range embedding"); }
        const Source& at = embedding->at;
        table.rows.push_back({r.config.name, std::to_string(r.T), name_of(r.precision), std::to_string(bytes),
                              mib(bytes), std::to_string(embedding->bytes),
                              strprintf("%s %s:%d", at.function, file_name(at.file), at.line)});
    }
    return table;
}

// Allocations of the same size, category, ranges and line are one row.
static Table largest_table(const std::vector<Profile>& profiles, int rows, const std::string& origin) {
    Table table{
        strprintf("memory_profiling (e): the %d largest allocations of a forward pass; 'held': before it began; %s",
                  rows, origin.c_str()),
        {"size", "context length", "precision", "MiB each", "times", "category", "range", "op", "line"},
        {}};
    for (const Profile& r : profiles) {
        if (r.phase != FORWARD || !r.ran) { continue; }
        std::map<std::vector<std::string>, int> groups;  // the cells from "MiB each" on, without "times"
        std::vector<std::pair<size_t, std::vector<std::string>>> order;
        for (const MemoryEvent& e : r.log) {
            if (!e.is_alloc) { continue; }
            std::vector<std::string> cells = {mib(e.bytes), name_of(e.category), path_of(e), op_of(e),
                                              strprintf("%s:%d", file_name(e.at.file), e.at.line)};
            if (groups[cells]++ == 0) { order.push_back({e.bytes, cells}); }
        }
        std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
        order.resize(std::min<size_t>(order.size(), rows));
        for (const auto& [bytes, cells] : order) {
            table.rows.push_back({r.config.name, std::to_string(r.T), name_of(r.precision), cells[0],
                                  std::to_string(groups[cells]), cells[1], cells[2], cells[3], cells[4]});
        }
    }
    return table;
}

// ---------------------------------------------------------------------------------------------------------------------
// (f): what one block saves for backward. A model of 3 blocks saves just that more than one of 2.

struct Saved {
    int64_t times = 0, bytes = 0;
};
struct BlockMemory : Attempt {
    ModelConfig config;
    Precision precision;
    int T;
    std::map<std::pair<std::string, std::string>, Saved> saved = {};  // by range and op
    int64_t copies = 0;     // bytes of `saved` that are 16-bit copies of weights: they go when backward ends
    int64_t change = 0;     // of memory, while backward goes over one block
    int64_t predicted = 0;  // bytes of `saved`
    int64_t bytes() const {
        int64_t sum = 0;
        for (const auto& [place, s] : saved) { sum += s.bytes; }
        return sum;
    }
};

// Adds what the model's blocks save, `sign` times.
static void add_saved(BlockMemory& r, int blocks, int B, uint64_t seed, int sign) {
    ModelConfig c = r.config;
    c.num_layers = blocks;
    Device device = context.device;
    Model model = random_model(c, seed);
    std::vector<int64_t> left;  // bytes held when backward leaves a block, from the last block to the first
    for (const Layer& layer : model.layers) {
        layer.ln1.gradient->ready = [&] { left.push_back((int64_t)memory_use(device).now); };
    }
    std::map<uint64_t, MemoryEvent> held;  // after forward
    start_memory_log(device);
    forward_backward(model, random_batch(B, r.T, c.vocab_size, seed), 1, [&] {
        for (const MemoryEvent& e : stop_memory_log()) {
            bool ours = e.category == ACTIVATIONS || e.category == WEIGHT_COPIES;
            bool in_block = e.ranges.size() > 1 && strcmp(e.ranges[1], "layer") == 0;
            if (!e.is_alloc) {
                held.erase(e.address);
            } else if (ours && in_block) {
                held[e.address] = e;
            }
        }
    });
    for (const auto& [address, e] : held) {
        Saved& s = r.saved[{path_of(e), op_of(e)}];
        s.times += sign, s.bytes += sign * (int64_t)e.bytes;
        r.copies += e.category == WEIGHT_COPIES ? sign * (int64_t)e.bytes : 0;
    }
    r.change = left[1] - left[0];
}

static BlockMemory profile_block(const ModelConfig& c, Precision precision, int B, int T, uint64_t seed) {
    BlockMemory r{{}, c, precision, T};
    context.precision = precision;
    auto measure = [&](BlockMemory& m) { add_saved(m, 2, B, seed, -1), add_saved(m, 3, B, seed, 1); };
    {
        Planning planning;
        BlockMemory plan = r;
        measure(plan);
        r.predicted = plan.bytes();
    }
    ModelConfig largest = c;
    largest.num_layers = 3;
    r.needs = predicted_peak(largest, B, T, FORWARD_BACKWARD);
    r.run(row_of(largest, B, T, FORWARD_BACKWARD) + ", 3 blocks", 2, [&] { measure(r); });
    if (!r.ran) { stop_memory_log(); }
    return r;
}

static Table saved_table(const std::vector<BlockMemory>& blocks, const std::string& caption) {
    Table table{"memory_profiling (f): what one block saves for backward, by operation; " + caption,
                {"size", "context length", "precision", "op", "range", "times", "bytes", "%"},
                {}};
    for (const BlockMemory& r : blocks) {
        if (!r.ran) { continue; }
        using Row = std::pair<std::pair<std::string, std::string>, Saved>;
        std::vector<Row> rows(r.saved.begin(), r.saved.end());
        std::stable_sort(rows.begin(), rows.end(),
                         [](const Row& a, const Row& b) { return a.second.bytes > b.second.bytes; });
        Saved rest;
        auto add_row = [&](const std::string& op, const std::string& range, const Saved& s) {
            table.rows.push_back({r.config.name, std::to_string(r.T), name_of(r.precision), op, range,
                                  std::to_string(s.times), std::to_string(s.bytes),
                                  strprintf("%.1f", 100.0 * s.bytes / r.bytes())});
        };
        for (size_t i = 0; i < rows.size(); i++) {
            const auto& [place, s] = rows[i];
            if (i < 5) {
                add_row(place.second, place.first, s);
            } else {
                rest.times += s.times, rest.bytes += s.bytes;
            }
        }
        if (rest.times > 0) { add_row("the rest", "", rest); }
    }
    return table;
}

// Backward frees what a block saved and leaves the gradients of its parameters; the gradient of its input takes the
// place of that of its output.
static Table block_table(const std::vector<BlockMemory>& blocks, int B, const std::string& caption) {
    Table table{"memory_profiling (f): memory over one block in backward, bytes; " + caption,
                {"size", "context length", "precision", "saved", "predicted", "of it weight copies", "change",
                 "gradients: change + saved - copies", "by formula", "input's gradient"},
                {}};
    for (const BlockMemory& r : blocks) {
        int64_t C = r.config.d_model, F = r.config.d_ff;
        int64_t stream = size_of(weight_dtype(r.precision));
        bool halved = stream == 2 || (context.mode != EAGER && size_of(matmul_dtype(r.precision)) == 2);
        int64_t formula = (4 * C * C + 3 * C * F) * (halved ? 2 : 4) + 2 * C * stream;
        auto cell = [&](int64_t bytes) { return r.cell(std::to_string(bytes)); };
        table.rows.push_back({r.config.name, std::to_string(r.T), name_of(r.precision), cell(r.bytes()),
                              std::to_string(r.predicted), cell(r.copies), cell(r.change),
                              cell(r.change + r.bytes() - r.copies), std::to_string(formula),
                              std::to_string((int64_t)B * r.T * C * stream)});
    }
    return table;
}

static void write_pictures(const Profile& r, const Plan& p, const std::string& caption) {
    bool several = p.configs.size() * p.precisions.size() * p.o.context_lengths.size() > 1 || context.device == CPU;
    std::string which = several ? strprintf("_%s_%d_%s", size_option(r.config).c_str(), r.T, name_of(r.precision)) : "";
    std::string name = std::string(name_of(r.phase)) + which;
    std::string title =
        strprintf("Memory of %s: %s, context length %d, %s", r.phase == FORWARD ? "a forward pass" : "a training step",
                  r.config.name.c_str(), r.T, name_of(r.precision));
    save_file(p.o.out + "/timeline_" + name + ".svg", memory_timeline(r.log, title, caption, context.device != META));
    save_file(p.o.out + "/snapshot_" + name + ".pickle", snapshot_pickle(r.log));
}

static void print_blocks(const Plan& p, const std::string& caption) {
    if (context.checkpoint) { return; }  // a checkpoint saves its input, and may be several blocks: the answer says it
    std::vector<BlockMemory> blocks;
    for (const ModelConfig& c : p.configs) {
        for (Precision precision : p.precisions) {
            for (int T : p.o.context_lengths) {
                blocks.push_back(profile_block(c, precision, p.o.batch_size, T, p.o.seed));
            }
        }
    }
    print(saved_table(blocks, caption), p.o.format);
    print(block_table(blocks, p.o.batch_size, caption), p.o.format);
}

// Prints (b), (f) and, with_details, the other tables. how: what was measured, for the captions.
static void profile_all(const Plan& p, const std::string& how, bool with_details) {
    std::string caption = strprintf("mode %s, batch %d, vocabulary %s; %s; %s", caption_of(context.mode).c_str(),
                                    p.o.batch_size, vocabulary_of(p.configs).c_str(), how.c_str(), p.origin().c_str());
    std::vector<Profile> profiles;
    for (const ModelConfig& c : p.configs) {
        for (Precision precision : p.precisions) {
            for (int T : p.o.context_lengths) {
                for (Phase phase : phases) {
                    profiles.push_back(profile_memory(c, precision, p.o.batch_size, T, phase, p.o.seed));
                    bool drawn = phase != TAPED_FORWARD;  // the step's picture begins with it
                    if (!p.o.out.empty() && drawn && profiles.back().ran) {
                        write_pictures(profiles.back(), p, caption);
                    }
                }
            }
        }
    }
    const std::string& format = p.o.format;
    for (Precision precision : p.precisions) { print(peak_table(profiles, precision, caption), format); }
    if (with_details) {
        print(category_table(profiles, caption), format);
        for (size_t i = 1; i < p.precisions.size(); i++) {
            print(difference_table(profiles, p.precisions[0], p.precisions[i], p.origin()), format);
        }
        print(residual_table(profiles, p.o.batch_size, p.origin()), format);
        print(largest_table(profiles, 8, p.origin()), format);
    }
    print_blocks(p, caption);
    if (!p.o.out.empty()) { note("--out: wrote timelines and snapshots to %s", p.o.out.c_str()); }
}

static void print_predicted(const Plan& p) {
    Planning planning;
    profile_all(p, "predicted: every allocation counted, nothing computed", true);
}
// A card on which not even the shortest step fits shows the handout's size as predicted, and measures a smaller one.
static void make_fit(Plan& p) {
    auto fits = [](const Plan& plan, int T) {
        RestoreContext restore;
        for (Precision precision : plan.precisions) {
            context.precision = precision;
            size_t bytes = predicted_peak(plan.configs[0], plan.o.batch_size, T, STEP).bytes;
            if (bytes > available_memory(context.device)) { return false; }
        }
        return true;
    };
    const auto& lengths = p.o.context_lengths;
    if (fits(p, *std::min_element(lengths.begin(), lengths.end()))) { return; }
    Plan smaller = p;
    smaller.shrink_to_fit(
        1, [&](const Plan& plan) { return fits(plan, *std::max_element(lengths.begin(), lengths.end())); });
    if (smaller.configs[0].name == p.configs[0].name) { return; }  // the size was typed, or nothing fits
    const std::string out = p.o.out;
    p.o.out = "", context.mode = p.modes[0];
    if (!context.plan_only) { print_predicted(p); }
    p = smaller, p.o.out = out, context.mode = p.modes[0];
}

// Leaves out the precisions that the CPU's FlashAttention lacks. False: it has none of them.
static bool keep_what_runs(Plan& p) {
    std::vector<std::string> asked, kept;
    std::vector<Precision> precisions;
    for (Precision precision : p.precisions) {
        asked.push_back(name_of(precision));
        if (context.mode == FLASH && fastest_mode(p.configs[0], precision) != FLASH) { continue; }
        precisions.push_back(precision), kept.push_back(name_of(precision));
    }
    if (kept.empty()) {
        note("memory_profiling: no small model ran: the CPU's FlashAttention has no %s", join(asked, ", ").c_str());
    } else if (kept.size() < asked.size()) {
        p.note_smaller("precision " + join(kept, ",") + " instead of " + join(asked, ","));
    }
    p.precisions = precisions;
    return !kept.empty();
}

int cmd_memory_profiling(const Options& o) {
    Device device = context.device = choose_device(o.device);
    context.each_launch = true;
    if (!o.out.empty() && mkdir(o.out.c_str(), 0777) != 0 && errno != EEXIST) {
        fail("--out %s: %s", o.out.c_str(), strerror(errno));
    }
    Plan p{o};
    if (o.quick && device == CUDA) {
        p.shrink_size();
        p.shrink("context_length", &Options::context_lengths, {128});
    }
    {
        Planning planning;  // so that a precision which only a GPU has in this mode can be predicted
        p.choose_models();
    }
    context.mode = p.modes[0];
    if (device == CUDA) {
        make_fit(p);
        std::string how = strprintf("the second run of each phase; %s MiB of the card in use before the model",
                                    mib(gpu_memory_used()).c_str());
        profile_all(p, how, true);
        return 0;
    }
    print_predicted(p);
    // This model is so small that it runs at once. Its peaks show that the prediction is what happens.
    p.configs = {{"tiny", 256, 1024, 2, 4, 1000}};
    p.o.context_lengths = {64}, p.o.batch_size = 2;
    p.note_smaller("2 layers, d_model 256, d_ff 1024, 4 heads, context length 64");
    if (!keep_what_runs(p)) { return 0; }
    profile_all(p, "really run, second run of each phase", false);
    return 0;
}
