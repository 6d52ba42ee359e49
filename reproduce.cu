// reproduce.cu: measures the tables of notes/ again. The pages are the list of what there is to run: between
//   <!-- begin: ./cs336 COMMAND OPTIONS -->
// and
//   <!-- end -->
// stands what this command line prints. `; tables: (b), precision fp32 or (c)` behind it selects the tables whose
// captions contain both "(b)" and "precision fp32", or "(c)"; `; without: d_ff or std` behind that leaves these columns
// out. A command line is run once, whatever the number of blocks that show it, as a process of its own.
//   <!-- answers: ./cs336 COMMAND OPTIONS -->
// begins a block for the answers that follow from the tables of this page's blocks whose command lines begin like this.
#include "answers.h"
#include "commands.h"
#include "writeup.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <unistd.h>

using Words = std::vector<std::string>;

static Words split(const std::string& text, const std::string& between) {
    Words parts;
    for (size_t start = 0, end; start <= text.size(); start = end + between.size()) {
        end = std::min(text.find(between, start), text.size());
        if (end > start) { parts.push_back(text.substr(start, end - start)); }
    }
    return parts;
}
static bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
static bool starts(const std::string& text, const std::string& with) { return text.compare(0, with.size(), with) == 0; }
static bool ends(const std::string& text, const std::string& with) {
    return text.size() >= with.size() && text.compare(text.size() - with.size(), with.size(), with) == 0;
}
static bool read_file(const std::string& path, std::string* text) {
    struct stat status;
    if (stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) { return errno = EINVAL, false; }  // a FIFO waits
    std::ifstream file(path, std::ios::binary);
    std::ostringstream all;
    all << file.rdbuf();  // of an empty file: sets failbit of `all`
    *text = all.str();
    return file.is_open() && !file.bad();
}

// ---------------------------------------------------------------------------------------------------------------------
// Pages and their blocks

struct Block {
    int line;           // of its begin marker
    size_t begin, end;  // what stands between the markers, as bytes of the page
    Words words;        // of the command line, without ./cs336
    Words tables;       // empty: all that the command prints
    Words without;      // columns of these
    bool answers;       // that follow from the tables of the blocks whose words begin with these
    bool answered;      // in a block of answers on this page: not once more below the tables
};
struct Page {
    std::string path, title, text;  // title: that of its first line, without "# "
    std::vector<Block> blocks;
};
static bool asks_about(const Block& question, const Block& block) {
    return question.answers && !block.answers && block.words.size() >= question.words.size() &&
           std::equal(question.words.begin(), question.words.end(), block.words.begin());
}

static Page page_of(const std::string& path, const std::string& text) {
    Page page{path, text.substr(0, text.find('\n')).erase(0, strlen("# ")), text, {}};
    const std::string begin = "<!-- begin", end = "<!-- end -->", close = " -->", program = "<!-- begin: ./cs336 ";
    const std::string questions = "<!-- answers: ./cs336 ";
    bool open = false;
    int number = 0;
    for (size_t at = 0, next; at < page.text.size(); at = next) {
        next = std::min(page.text.find('\n', at), page.text.size() - 1) + 1;
        std::string line = page.text.substr(at, next - at);
        while (!line.empty() && isspace((unsigned char)line.back())) { line.pop_back(); }
        number++;
        bool answers = starts(line, questions);
        if (answers) { line.replace(0, questions.size(), program); }
        if (starts(line, begin)) {
            if (open) { fail("%s:%d: the block above has no '%s'", path.c_str(), number, end.c_str()); }
            std::string rest = line.substr(0, line.size() - std::min(line.size(), close.size()));
            bool wrong = !starts(line, program) || !ends(line, close);
            auto selection = [&](const std::string& key) {  // taken from the end of `rest`
                size_t at = rest.find(key);
                Words names = at == std::string::npos ? Words() : split(rest.substr(at + key.size()), " or ");
                wrong = wrong || (at != std::string::npos && (names.empty() || answers || has(join(names, ""), ";")));
                rest.erase(std::min(at, rest.size()));
                return names;
            };
            Words without = selection("; without: "), tables = selection("; tables: ");
            Words words = split(rest.substr(std::min(rest.size(), program.size())), " ");
            if (wrong || words.empty() || has(rest, ";")) {
                fail(
                    "%s:%d: got '%s', takes '%sCOMMAND OPTIONS -->', before ' -->' also '; tables: CAPTIONS', and "
                    "behind that '; without: COLUMNS'",
                    path.c_str(), number, line.c_str(), program.c_str());
            }
            page.blocks.push_back({number, next, 0, words, tables, without, answers, false});
            open = true;
        } else if (starts(line, "<!-- end")) {
            if (!open || line != end) { fail("%s:%d: '%s' ends no block", path.c_str(), number, line.c_str()); }
            page.blocks.back().end = at;
            open = false;
        }
    }
    if (open) { fail("%s:%d: this block has no '%s'", path.c_str(), page.blocks.back().line, end.c_str()); }
    for (Block& block : page.blocks) {
        block.answered = std::any_of(page.blocks.begin(), page.blocks.end(),
                                     [&](const Block& question) { return asks_about(question, block); });
    }
    return page;
}
static Page read_page(const std::string& path) {
    std::string text;
    if (!read_file(path, &text)) { fail("%s: cannot be read: %s", path.c_str(), strerror(errno)); }
    return page_of(path, text);
}

// The names that a page links to in its own folder, in order, each once: [text](NAME.md) with this ending.
static Words links_of(const std::string& text, const std::string& ending) {
    Words names;
    for (size_t at = 0; (at = text.find("](", at)) != std::string::npos; at += 2) {
        std::string name = text.substr(at + 2, text.find(')', at) - at - 2);
        if (!has(name, "/") && ends(name, ending) && !std::count(names.begin(), names.end(), name)) {
            names.push_back(name);
        }
    }
    return names;
}

// The handout's order is that of notes/README.md. The front page comes last; it has no copy in another folder.
static std::vector<Page> read_pages(bool with_front_page) {
    struct stat status;
    if (stat("notes/README.md", &status) != 0) {
        usage_error("notes/README.md: not found from the current folder, which has to be the repository's");
    }
    std::vector<Page> pages = {read_page("notes/README.md")};
    for (const std::string& name : links_of(pages[0].text, ".md")) { pages.push_back(read_page("notes/" + name)); }
    if (with_front_page && stat("README.md", &status) == 0) { pages.push_back(read_page("README.md")); }
    return pages;
}

// A line of a Markdown table whose header is `header`, without these columns.
static std::string without_columns(const std::string& line, const std::string& header, const Words& without) {
    std::string kept = "|";
    Words cells = split(line, "|"), names = split(header, "|");
    for (size_t i = 0; i < cells.size(); i++) {
        std::string name = i < names.size() ? names[i] : "";
        name.erase(0, name.find_first_not_of(' '));
        name.erase(name.find_last_not_of(' ') + 1);
        if (!std::count(without.begin(), without.end(), name)) { kept += cells[i] + "|"; }
    }
    return kept;
}

// What the block shows of a command's output; "": none of its tables.
static std::string shown(const std::string& output, const Block& block) {
    if (block.tables.empty() && block.without.empty() && !block.answered) { return output; }
    Words lines;
    std::istringstream stream(output);
    for (std::string line; std::getline(stream, line);) { lines.push_back(line); }
    std::string all;
    for (size_t i = 2; i < lines.size(); i++) {  // caption, empty line, table
        if (!starts(lines[i], "|") || !lines[i - 1].empty()) { continue; }
        const std::string& caption = lines[i - 2];
        bool wanted = std::any_of(block.tables.begin(), block.tables.end(), [&](const std::string& phrases) {
            Words parts = split(phrases, ", ");
            return std::all_of(parts.begin(), parts.end(), [&](const std::string& part) { return has(caption, part); });
        });
        if (!wanted && !block.tables.empty()) { continue; }
        all += (all.empty() ? "" : "\n") + caption + "\n\n";
        const std::string header = lines[i];
        for (; i < lines.size() && starts(lines[i], "|"); i++) {
            all += without_columns(lines[i], header, block.without) + "\n";
        }
    }
    return all;
}

// ---------------------------------------------------------------------------------------------------------------------
// What to run, and whether this machine can

struct Experiment {
    Words words;  // as it is run
    std::string id, section;
    std::string cannot, failed, scaled_down;  // "", or why; scaled_down: or what was
    std::string output;
    std::string picture_option;  // with --writeup: the option that draws, or ""
    Words pictures{};            // SVG
    double seconds = -1;         // < 0: has not run
    std::string line() const { return join(words, " "); }
};

// These options are left out on too few GPUs and with --quick: a command scales down only what it was not given.
static const Words chooses_how_much = {
    "size",           "d_model",    "d_ff",         "num_layers", "num_heads",
    "context_length", "batch_size", "warmup",       "steps",      "sizes_mb",
    "bucket_size_mb", "precision",  "reduce_dtype", "mode",       "grad_accumulation",
    "checkpoint",     "head_chunk"};
static Words without_options(const Words& words, const Words& names) {
    Words fewer;
    for (size_t i = 0; i < words.size(); i++) {
        std::string name = starts(words[i], "--") ? words[i].substr(2, words[i].find('=') - 2) : "";
        if (!std::count(names.begin(), names.end(), name)) {
            fewer.push_back(words[i]);
        } else if (!has(words[i], "=")) {
            i++;  // its value
        }
    }
    return fewer;
}
static Words scaled_down(const Words& words, bool quick) {
    Words fewer = without_options(words, chooses_how_much);
    if (quick && !std::count(fewer.begin(), fewer.end(), "--quick")) { fewer.push_back("--quick"); }
    return fewer;
}

static Experiment experiment_of(const Words& words, const Options& how, const CommandParser& parse) {
    Invocation asked = parse(words);
    const Options& o = asked.options;
    bool quick = how.quick;
    if (!o.out.empty() || !o.plot.empty() || !o.trace.empty() || !o.save.empty() || asked.id == "reproduce") {
        usage_error("a block's command writes no files");
    }
    bool ranks = asked.gpus == 2 || o.nproc > 1, gloo = o.backend == "gloo";
    int gpus = cuda_devices(), n = o.ranks.empty() ? o.nproc : *std::max_element(o.ranks.begin(), o.ranks.end());
    int needs = o.device == "cpu" ? 0 : ranks ? (gloo ? 1 : n) : asked.gpus;
    Experiment e;
    e.id = asked.id, e.section = asked.section;
    if (!how.writeup.empty()) {
        e.picture_option = has(asked.takes, " plot") ? "--plot" : has(asked.takes, " out_folder") ? "--out" : "";
    }
    if (needs > gpus) {
        std::string why = needs > 1 ? strprintf("needs %d GPUs", needs) : "needs a GPU";
        // Two ranks run anywhere, over Gloo; more of them show nothing new there.
        if ((o.device == "cuda" && gpus == 0) || o.backend == "nccl" || needs > 2) { e.cannot = why; }
        e.scaled_down = gpus == 0 ? "no GPU" : strprintf("%d GPU%s", gpus, gpus == 1 ? "" : "s");
    }
    if (ranks && e.cannot.empty()) {
        Device device = gpus > 0 && o.device != "cpu" ? CUDA : CPU;
        bool nccl = !gloo && needs > 0 && why_not("nccl", device, n).empty();
        if (!nccl) { e.cannot = why_not(o.backend == "nccl" ? "nccl" : "gloo", device, n); }
        if (!nccl && !gloo && needs > 0 && needs <= gpus) { e.scaled_down = why_not("nccl", device, n); }
    }
    bool same = !e.cannot.empty() || (!quick && e.scaled_down.empty());
    e.words = same ? words : scaled_down(words, quick);
    if (!same) { parse(e.words); }  // there are commands without --quick
    return e;
}

struct Agenda {
    std::vector<Page> pages;
    std::vector<Experiment> all;          // each command line once, in the order of the pages
    std::vector<std::vector<int>> index;  // page, block -> experiment; -1: left out by --only
};
// Checks all command lines of these pages.
static Agenda make_agenda(const std::vector<Page>& pages, const Options& how, const CommandParser& parse) {
    Agenda agenda{pages, {}, {}};
    for (const Page& page : agenda.pages) {
        agenda.index.emplace_back();
        for (const Block& block : page.blocks) {
            try {
                Experiment e = experiment_of(block.words, how, parse);
                if (block.answers) {
                    agenda.index.back().push_back(-1);
                    continue;
                }
                auto same = [&](const Experiment& other) { return other.words == e.words; };
                size_t i = std::find_if(agenda.all.begin(), agenda.all.end(), same) - agenda.all.begin();
                if (i == agenda.all.size()) { agenda.all.push_back(e); }
                agenda.index.back().push_back((int)i);
            } catch (const Failure& failure) { fail("%s:%d: %s", page.path.c_str(), block.line, failure.what()); }
        }
    }
    return agenda;
}

// The pages of 2026's problems, in its order, with its sections and command lines. Of a problem that has a page for
// each edition the later one counts, 2026's. The edition decides the context length, where 2025's command line names
// one. A size that it names stays: these sizes are the same in both editions.
static std::vector<Page> pages_of_2026(const Agenda& agenda) {
    std::vector<Page> pages;
    for (size_t p = 0; p < agenda.pages.size(); p++) {
        Page page = agenda.pages[p];
        std::string title;
        for (size_t b = 0; b < page.blocks.size(); b++) {
            int i = agenda.index[p][b];
            if (i < 0 || agenda.all[i].section.empty()) { continue; }
            const Experiment& e = agenda.all[i];
            Words& words = page.blocks[b].words;
            if (ends(page.title, " " + e.id)) { title = e.section + " " + e.id; }
            if (has(e.line(), " --edition")) { continue; }
            if (!starts(page.title, "2026, ")) { words = without_options(words, {"context_length"}); }
            words.insert(words.end(), {"--edition", "2026"});
        }
        if (title.empty()) { continue; }
        auto same = [&](const Page& other) { return other.title == title; };
        pages.erase(std::remove_if(pages.begin(), pages.end(), same), pages.end());
        pages.push_back(page);
        pages.back().title = title;
    }
    auto earlier = [](const Page& a, const Page& b) {  // no section's number has two digits
        return a.title.substr(0, a.title.find(' ')) < b.title.substr(0, b.title.find(' '));
    };
    std::stable_sort(pages.begin(), pages.end(), earlier);
    return pages;
}

static void keep_only(Agenda& agenda, const Words& problems) {
    Words ids;
    std::set<std::string> wanted;
    for (const Experiment& e : agenda.all) {
        if (!std::count(ids.begin(), ids.end(), e.id)) { ids.push_back(e.id); }
    }
    for (const std::string& word : problems) { wanted.insert(full_name(word, ids, "problem for --only")); }
    std::vector<Experiment> some;
    std::vector<int> moved;
    for (const Experiment& e : agenda.all) {
        moved.push_back(wanted.count(e.id) ? (int)some.size() : -1);
        if (wanted.count(e.id)) { some.push_back(e); }
    }
    for (auto& blocks : agenda.index) {
        for (int& i : blocks) { i = i < 0 ? -1 : moved[i]; }
    }
    agenda.all = some;
}

// ---------------------------------------------------------------------------------------------------------------------
// State: what an interrupted run has done already, and how long each command took, for the estimate. It holds for one
// machine and one build, and lies as .reproduce.json in --out's folder, else in build/.

// The commit alone does not tell one uncommitted change from another.
static std::string this_build() {
    struct stat s;
    return commit() + (stat("/proc/self/exe", &s) == 0 ? strprintf(" of %lld", (long long)s.st_mtime) : "");
}
struct State {
    std::string path;
    nlohmann::json json;
};
// Takes only entries of the type that we write; the rest of the file may be anything.
static State read_state(const std::string& path, const std::string& machine, bool fresh) {
    using nlohmann::json;
    State s{path,
            {{"machine", machine},
             {"commit", this_build()},
             {"seconds", json::object()},
             {"outputs", json::object()},
             {"pictures", json::object()}}};
    std::string text;
    if (!read_file(path, &text)) { return s; }
    const json found = json::parse(text, nullptr, false);
    auto take = [&](const char* key, bool (json::*is_right)() const noexcept) {
        if (!found.contains(key) || !found[key].is_object()) { return; }
        for (const auto& [line, value] : found[key].items()) {
            if ((value.*is_right)()) { s.json[key][line] = value; }
        }
    };
    auto same = [&](const char* key) { return found.is_object() && found.contains(key) && found[key] == s.json[key]; };
    if (!same("machine")) { return s; }
    take("seconds", &json::is_number);
    if (!fresh && same("commit")) { take("outputs", &json::is_string), take("pictures", &json::is_array); }
    return s;
}
static void write_state(const State& s) {
    save_file(s.path, s.json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}
static double known_seconds(const State& s, const Experiment& e) { return s.json["seconds"].value(e.line(), -1.0); }
static int take_outputs(const State& s, std::vector<Experiment>& all) {
    int taken = 0;
    for (Experiment& e : all) {
        auto found = s.json["outputs"].find(e.line());
        if (found == s.json["outputs"].end()) { continue; }
        auto drawn = s.json["pictures"].find(e.line());
        if (!e.picture_option.empty()) {  // a run without --writeup has drawn nothing
            if (drawn == s.json["pictures"].end()) { continue; }
            for (const auto& svg : *drawn) {
                if (svg.is_string()) { e.pictures.push_back(svg); }
            }
        }
        e.output = *found, e.seconds = std::max(known_seconds(s, e), 0.0);
        taken++;
    }
    return taken;
}

static std::string machine() {
    context.device = cuda_devices() > 0 ? CUDA : CPU;
    int gpus = cuda_devices();
    return (gpus > 1 ? strprintf("%d x ", gpus) : "") + device_description();
}

// ---------------------------------------------------------------------------------------------------------------------
// Running

static volatile sig_atomic_t interrupted = 0;
constexpr double LIMIT_S = 1800;  // of one command: on an H200 the whole list takes less

static std::string duration(double seconds) {
    return seconds < 90 ? strprintf("%.0f s", std::max(seconds, 0.0)) : strprintf("%.0f min", seconds / 60);
}

// An experiment takes as long as in an earlier run. One that has no earlier run takes the mean so far.
static std::string time_left(const std::vector<Experiment>& all, size_t now, double elapsed, const State& state) {
    double sum = 0, left = 0;
    int finished = 0;
    for (const Experiment& e : all) {
        if (e.seconds >= 0) { sum += e.seconds, finished++; }
    }
    for (size_t i = now; i < all.size(); i++) {
        if (!all[i].cannot.empty() || all[i].seconds >= 0) { continue; }
        double known = known_seconds(state, all[i]);
        if (known < 0 && finished == 0) { return "no estimate yet"; }
        double whole = known >= 0 ? known : sum / finished;
        left += i == now ? std::max(whole - elapsed, 0.0) : whole;
    }
    return "about " + duration(left) + " left";
}

// The first "; scaled down: ..." of the captions; "": there is none.
static std::string scaled_down_in(const std::string& output) {
    const std::string key = "; scaled down: ";
    size_t at = output.find(key);
    if (at == std::string::npos) { return ""; }
    at += key.size();
    return output.substr(at, output.find_first_of(";\n", at) - at);
}

// The pictures in a folder. memory_profiling draws every setting: one of each phase will do, fp32 rather than bf16.
static Words pictures_in(const std::string& folder) {
    std::vector<std::pair<bool, std::string>> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
        std::string name = entry.path().filename();
        if (ends(name, ".svg")) { names.emplace_back(has(name, "_bf16"), name); }
    }
    std::sort(names.begin(), names.end());
    std::map<std::string, std::string> pictures;  // by what their names begin with: timeline_forward, timeline_step
    for (const auto& [is_bf16, name] : names) {
        std::string kind = name.substr(0, name.find_first_of("_.", sizeof "timeline_")), svg;
        if (pictures.count(kind) == 0 && read_file(folder + "/" + name, &svg)) { pictures[kind] = svg; }
    }
    Words all;
    for (const auto& [kind, svg] : pictures) { all.push_back(svg); }
    return all;
}

// With its pictures; without them where it has nothing to draw.
static std::string run_drawing(Experiment& e, const std::string& folder, const std::function<void()>& watch) {
    if (e.picture_option.empty()) { return run_ourselves(e.words, watch); }
    struct Scratch {
        std::string path;
        explicit Scratch(const std::string& at) : path(at) { clear(), mkdir(path.c_str(), 0777); }
        ~Scratch() { clear(); }
        void clear() {
            std::error_code ignored;
            std::filesystem::remove_all(path, ignored);
        }
    } scratch(folder);
    Words words = e.words;
    words.insert(words.end(), {e.picture_option, folder + (e.picture_option == "--plot" ? "/plot.svg" : "")});
    try {
        std::string output = run_ourselves(words, watch);
        e.pictures = pictures_in(folder);
        return output;
    } catch (const Failure& failure) {
        if (interrupted) { throw; }
        note("%s; once more, without a picture", failure.what());
    }
    return run_ourselves(e.words, watch);
}

static void run(std::vector<Experiment>& all, size_t now, State& state) {
    Experiment& e = all[now];
    double start = now_ms();
    auto elapsed = [&] { return (now_ms() - start) / 1e3; };
    auto watch = [&] {
        if (interrupted) { usage_error("interrupted"); }
        if (elapsed() > LIMIT_S) { fail("took more than %s", duration(LIMIT_S).c_str()); }
        std::string bar(20 * now / all.size(), '#');
        progress("[%-20s] %zu of %zu, %s: ./cs336 %s", bar.c_str(), now + 1, all.size(),
                 time_left(all, now, elapsed(), state).c_str(), e.line().c_str());
    };
    try {
        e.output = run_drawing(e, state.path + ".pictures", watch);
    } catch (const Failure& failure) {
        if (interrupted) { return; }
        e.failed = failure.what();
        note("./cs336 %s: %s", e.line().c_str(), e.failed.c_str());
    }
    e.seconds = elapsed();
    if (!e.failed.empty()) { return; }
    state.json["seconds"][e.line()] = e.seconds;
    state.json["outputs"][e.line()] = e.output;
    state.json["pictures"][e.line()] = e.pictures;
    write_state(state);
}

static void run_all(std::vector<Experiment>& all, State& state) {
    struct sigaction stop = {}, before[3] = {};
    const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    stop.sa_handler = [](int number) { interrupted = number; };
    for (int i = 0; i < 3; i++) {
        sigaction(signals[i], &stop, &before[i]);
        if (before[i].sa_handler == SIG_IGN) { sigaction(signals[i], &before[i], nullptr); }  // as under nohup
    }
    for (size_t i = 0; i < all.size() && !interrupted; i++) {
        if (all[i].cannot.empty() && all[i].seconds < 0) { run(all, i, state); }
    }
    for (int i = 0; i < 3; i++) { sigaction(signals[i], &before[i], nullptr); }
    if (interrupted) {
        size_t done = std::count_if(all.begin(), all.end(), [](const Experiment& e) { return e.seconds >= 0; });
        note("cs336 reproduce: interrupted; %zu of %zu are done; without --fresh the same command goes on from there",
             done, all.size());
        raise(interrupted);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// What came of it

static std::string status_of(const Experiment& e) {
    return !e.cannot.empty()        ? "could not run"
           : !e.failed.empty()      ? "failed"
           : !e.scaled_down.empty() ? "scaled down"
                                    : "ran";
}
static std::string why_of(const Experiment& e) {
    return !e.cannot.empty() ? e.cannot : !e.failed.empty() ? e.failed : e.scaled_down;
}
static int count_of(const std::vector<Experiment>& all, const std::string& status) {
    return (int)std::count_if(all.begin(), all.end(), [&](const Experiment& e) { return status_of(e) == status; });
}

// What the captions say was scaled down, and whether each block finds its tables. Only tables that a block shows count:
// beside a prediction in full, a command may run a small model. With must_find a block without its tables has failed.
static void read_outputs(Agenda& agenda, bool must_find) {
    for (size_t p = 0; p < agenda.pages.size(); p++) {
        for (size_t b = 0; b < agenda.pages[p].blocks.size(); b++) {
            if (agenda.index[p][b] < 0) { continue; }
            Experiment& e = agenda.all[agenda.index[p][b]];
            const std::string seen = shown(e.output, agenda.pages[p].blocks[b]);
            std::string from_caption = scaled_down_in(seen.empty() ? e.output : seen);
            if (!from_caption.empty()) { e.scaled_down = from_caption; }
        }
    }
    for (size_t p = 0; p < agenda.pages.size(); p++) {
        for (size_t b = 0; b < agenda.pages[p].blocks.size(); b++) {
            const Block& block = agenda.pages[p].blocks[b];
            if (agenda.index[p][b] < 0) { continue; }
            Experiment& e = agenda.all[agenda.index[p][b]];
            if (status_of(e) != "ran" || !must_find) { continue; }
            const std::string where = strprintf("%s:%d: ", agenda.pages[p].path.c_str(), block.line);
            if (shown(e.output, block).empty()) {
                e.failed = where + "none of its captions has '" + join(block.tables, " or ") + "'";
            }
            for (const std::string& column : block.without) {
                Words lines = split(e.output, "\n");
                auto has_it = [&](const std::string& line) {
                    return starts(line, "|") && without_columns(line, line, {column}) != line;
                };
                if (std::none_of(lines.begin(), lines.end(), has_it)) {
                    e.failed = where + "no table has the column " + column;
                }
            }
        }
    }
}

static Table summary_of(const std::vector<Experiment>& all, const std::string& how, const std::string& machine) {
    Table table{strprintf("reproduce%s; %s; commit %s", how.c_str(), machine.c_str(), commit().c_str()),
                {"problem", "section", "command", "status", "why", "seconds"},
                {}};
    for (const Experiment& e : all) {
        table.rows.push_back({e.id, e.section, "./cs336 " + e.line(), status_of(e), why_of(e),
                              e.seconds >= 0 ? strprintf("%.1f", e.seconds) : ""});
    }
    return table;
}

// Adds the tables of this output that are not there yet: scaled down, two command lines may have become one.
static void add_tables(Tables& tables, const std::string& output) {
    for (const Table& table : tables_in(output)) {
        auto same = [&](const Table& t) { return t.caption == table.caption && t.rows == table.rows; };
        if (std::none_of(tables.begin(), tables.end(), same)) { tables.push_back(table); }
    }
}

// The answers that follow from the tables of these blocks' contents.
static Answers answers_to(const Block& question, const std::vector<Block>& blocks, const Words& contents) {
    Tables tables;
    for (size_t b = 0; b < blocks.size(); b++) {
        if (asks_about(question, blocks[b])) { add_tables(tables, contents[b]); }
    }
    return answers_of(question.words[0], tables);
}

// The page's text with the answers that follow from its tables.
static std::string with_answers(const std::string& path, std::string text) {
    Page page = page_of(path, text);
    Words contents;
    for (const Block& block : page.blocks) { contents.push_back(text.substr(block.begin, block.end - block.begin)); }
    for (size_t b = page.blocks.size(); b-- > 0;) {
        const Block& block = page.blocks[b];
        if (!block.answers) { continue; }
        Answers answers = answers_to(block, page.blocks, contents);
        if (answers.empty()) {
            answers = {{"", "(Not measured yet. The command prints the answer for your machine.)"}};
        }
        text.replace(block.begin, block.end - block.begin, format_answers(answers, "md"));
    }
    return text;
}

// Writes the pages with the new outputs in their blocks, and the answers that follow from them: to `out`, or in place
// (""), and then only outputs that were not scaled down. Returns the number of blocks of outputs.
static int write_pages(const Agenda& agenda, const std::string& out) {
    int written = 0;
    for (size_t p = 0; p < agenda.pages.size(); p++) {
        const Page &before = agenda.pages[p], page = read_page(before.path);  // which may have been edited meanwhile
        auto same = [](const Block& x, const Block& y) {
            return x.words == y.words && x.tables == y.tables && x.without == y.without && x.answers == y.answers;
        };
        if (!std::equal(page.blocks.begin(), page.blocks.end(), before.blocks.begin(), before.blocks.end(), same)) {
            fail("%s: its markers have changed; the same command goes on with the new ones", page.path.c_str());
        }
        std::string text = page.text;
        int written_before = written;
        for (size_t b = page.blocks.size(); b-- > 0;) {  // from the end: what stands before stays where it is
            const Block& block = page.blocks[b];
            if (agenda.index[p][b] < 0) { continue; }
            const Experiment& e = agenda.all[agenda.index[p][b]];
            std::string status = status_of(e), content = shown(e.output, block);
            if (status != "ran" && (status != "scaled down" || out.empty())) { continue; }
            if (content.empty()) { content = "(no such table in this run, which was scaled down)\n"; }
            if (e.words != block.words) { content = "Run as `./cs336 " + e.line() + "`:\n\n" + content; }
            text.replace(block.begin, block.end - block.begin, content);
            written++;
        }
        text = with_answers(page.path, text);
        if (out.empty()) {
            if (text != page.text) { save_file(page.path, text); }
            continue;
        }
        std::string copy = out + page.path.substr(page.path.rfind('/')), earlier;
        // A page that this run wrote nothing into stays as an earlier one left it: with --only, other problems' pages.
        if (written == written_before && read_file(copy, &earlier)) { continue; }
        save_file(copy, text);
        for (const std::string& picture : links_of(text, ".svg")) {
            std::string bytes;
            if (read_file("notes/" + picture, &bytes)) { save_file(out + "/" + picture, bytes); }
        }
    }
    return written;
}

// ---------------------------------------------------------------------------------------------------------------------
// --writeup: per problem its page's question, and the rest from this run

// The first paragraph after the title, with the list that it introduces or is. Links lead nowhere from the file.
static std::string question_of(const Page& page) {
    Words paragraphs = split(page.text.substr(0, page.text.find("<!-- ")), "\n\n");
    if (paragraphs.size() < 2) { return ""; }
    std::string question = paragraphs[1];
    if (paragraphs.size() > 2 && starts(paragraphs[2], "* ")) { question += "\n\n" + paragraphs[2]; }
    for (size_t middle; (middle = question.find("](")) != std::string::npos;) {
        size_t open = question.rfind('[', middle), close = question.find(')', middle);
        if (open == std::string::npos || close == std::string::npos) { break; }
        question.erase(middle, close + 1 - middle).erase(open, 1);
    }
    return question;
}

// What the command lines of a page gave, each once, with the tables that any of its blocks shows.
static WriteupProblem problem_of(const Page& page, const std::vector<int>& index, const std::vector<Experiment>& all) {
    WriteupProblem problem{"", question_of(page), {}, {}};
    Words contents;
    std::map<int, size_t> part_of;
    for (size_t b = 0; b < page.blocks.size(); b++) {
        contents.emplace_back();
        if (index[b] < 0) { continue; }
        const Experiment& e = all[index[b]];
        std::string status = status_of(e), why = why_of(e);
        if (ends(page.title, " " + e.id)) { problem.title = page.title; }
        if (status == "ran" || status == "scaled down") { contents.back() = shown(e.output, page.blocks[b]); }
        if (part_of.emplace(index[b], problem.parts.size()).second) {
            bool told = why.empty() || !scaled_down_in(e.output).empty();  // by the tables' captions
            std::string remark = told ? "" : status + ": " + why;
            problem.parts.push_back({"./cs336 " + e.line(), remark, {}, e.pictures});
        }
        add_tables(problem.parts[part_of[index[b]]].tables, contents.back());
    }
    for (const Block& block : page.blocks) {
        if (!block.answers) { continue; }
        for (const Answer& answer : answers_to(block, page.blocks, contents)) { problem.answers.push_back(answer); }
    }
    return problem;
}

static void write_up(const Agenda& agenda, const Table& runs, const std::string& edition, const std::string& where,
                     const std::string& path) {
    const std::vector<Experiment>& all = agenda.all;
    std::vector<WriteupProblem> problems;
    for (size_t p = 0; p < agenda.pages.size(); p++) {
        WriteupProblem problem = problem_of(agenda.pages[p], agenda.index[p], all);
        if (!problem.title.empty()) { problems.push_back(problem); }
    }
    std::string summary = strprintf(
        "All numbers are of one run of `./cs336 reproduce%s` on %s, commit %s. Of its %zu commands %d ran in full, "
        "%d ran scaled down, %d could not run on this machine and %d failed; the last table has them all.",
        edition.c_str(), where.c_str(), commit().c_str(), all.size(), count_of(all, "ran"),
        count_of(all, "scaled down"), count_of(all, "could not run"), count_of(all, "failed"));
    std::string markdown = writeup_markdown(summary, problems, runs);
    save_file(path, ends(path, ".html") ? writeup_html(markdown) : markdown);
}

// Makes the folder if there is none; usage_error if nothing can be written there.
static void require_folder(const std::string& path) {
    if ((mkdir(path.c_str(), 0777) != 0 && errno != EEXIST) || access(path.c_str(), W_OK | X_OK) != 0) {
        usage_error("%s: cannot be written to: %s", path.c_str(), strerror(errno));
    }
}

int reproduce(const Options& o, const CommandParser& parse) {
    const bool in_2026 = o.edition == "2026";
    if (in_2026 && o.writeup.empty()) { usage_error("--edition: got 2026, takes --writeup with it: pages are 2025's"); }
    const std::string edition = in_2026 ? " --edition 2026" : "";
    const std::string out = o.out.empty() && (o.quick || in_2026) ? "build/reproduce" : o.out;
    const std::vector<Page> pages = read_pages(out.empty() || in_2026);
    Agenda agenda = make_agenda(pages, o, parse);
    if (in_2026) { agenda = make_agenda(pages_of_2026(agenda), o, parse); }
    if (!o.only.empty()) { keep_only(agenda, o.only); }
    for (const char* source : {"notes", "."}) {
        if (same_file(out, source)) {
            usage_error("--out: got %s, where the pages come from; takes another folder", out.c_str());
        }
    }
    if (o.out.empty()) { require_folder("build"); }
    if (!out.empty()) { require_folder(out); }
    if (out.empty()) { require_folder("notes"), require_folder("."); }
    for (const Page& page : pages) {
        std::string target = out.empty() ? page.path : out + "/" + page.path.substr(page.path.rfind('/') + 1);
        if (same_file(o.writeup, page.path) || (!o.writeup.empty() && real_name(o.writeup) == real_name(target))) {
            usage_error("--writeup: got %s, where a page of notes/ stands or goes; takes another file",
                        o.writeup.c_str());
        }
    }
    if (ends(o.writeup, ".html") && !why_no_html().empty()) {
        usage_error("--writeup: got %s, takes a file name that ends in .md: %s", o.writeup.c_str(),
                    why_no_html().c_str());
    }

    std::vector<Experiment>& all = agenda.all;
    const std::string where = machine();
    State state = read_state((out.empty() ? "build" : out) + "/.reproduce.json", where, o.fresh);
    replace_file(state.path, nullptr);  // before hours of work
    int kept = take_outputs(state, all);
    if (kept > 0) { note("%d of %zu were done before the interruption; --fresh runs them again", kept, all.size()); }
    run_all(all, state);
    read_outputs(agenda, !in_2026);
    int blocks = in_2026 ? 0 : write_pages(agenda, out);
    int failed = count_of(all, "failed"), reduced = count_of(all, "scaled down");
    Table runs = summary_of(all, edition + (o.quick ? " --quick" : ""), where);
    if (!o.writeup.empty()) { write_up(agenda, runs, edition, where, o.writeup); }
    for (const Experiment& e : all) {  // this run is complete
        for (const char* key : {"outputs", "pictures"}) { state.json[key].erase(e.line()); }
    }
    write_state(state);
    print(runs, o.format);
    if (!in_2026) { note("%d blocks written to %s", blocks, out.empty() ? "notes/ and README.md" : out.c_str()); }
    if (out.empty() && reduced > 0) {
        note("%d commands ran scaled down, so their tables in notes/ stay as they were; --out DIR writes copies",
             reduced);
    }
    if (failed > 0) { fail("%d of %zu commands failed", failed, all.size()); }
    return 0;
}
