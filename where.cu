// where.cu: `where`, from a topic to the lines of its formula, loop and kernels. The lines are those of notes/where.md,
// which tests/links.py keeps right.
#include "commands.h"

#include <algorithm>
#include <cstring>
#include <fstream>

#include <unistd.h>

static std::vector<std::string> lines_of(const std::string& path) {
    std::vector<std::string> lines;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) { lines.push_back(line); }
    return lines;
}

// The folder of the page: our own, or one above it, since ./cs336 is also build/cpu/cs336; else the current one.
static std::string root_folder() {
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path);
    std::string folder(path, n > 0 && n < (ssize_t)sizeof path ? n : 0);
    for (size_t slash; (slash = folder.rfind('/')) != std::string::npos;) {
        folder.resize(slash);
        if (access((folder + "/notes/where.md").c_str(), R_OK) == 0) { return folder + "/"; }
    }
    return "";
}

// A comment's line without its slashes, and without the number of a step ("3. ").
static std::string without_step(const std::string& line) {
    if (line.compare(0, 2, "//") != 0) { return line; }
    auto skip = [&](const char* characters, size_t from) {
        return std::min(line.find_first_not_of(characters, from), line.size());
    };
    const size_t text = skip(" ", 2), number_end = skip("0123456789", text);
    const bool has_number = number_end > text && line.compare(number_end, 2, ". ") == 0;
    return line.substr(has_number ? skip(" ", number_end + 1) : text);
}
// Does the text begin with "dx = ", "dx += ", "D_i = ", or any other gradient for x?
static bool begins_with_gradient(const std::string& text) {
    const std::string name = text.substr(0, text.find(' '));
    const bool is_gradient = name == "D_i" || (name.size() > 1 && name[0] == 'd' && isalpha((unsigned char)name[1]));
    const char* rest = text.c_str() + name.size();
    return is_gradient && (strncmp(rest, " = ", 3) == 0 || strncmp(rest, " += ", 4) == 0);
}

// Does the line assign to a name ("x = ", "x += ", "x *= "), and is it indented, or does a title stand before it
// ("SwiGLU: g = ")? A gradient is a backward's.
static bool is_formula(const std::string& line) {
    const std::string text = without_step(line);
    const size_t equals = text.find("= "), title_end = text.rfind(": ", equals);
    const bool has_title = title_end != std::string::npos && equals != std::string::npos;
    if (equals == std::string::npos || (!has_title && line.compare(0, 4, "//  ") != 0)) { return false; }
    const std::string rest = text.substr(has_title ? text.find_first_not_of(' ', title_end + 1) : 0);
    const char* after = rest.c_str() + std::min(rest.find(' '), rest.size());
    const bool assigns =
        strncmp(after, " = ", 3) == 0 || (strlen(after) > 3 && strchr("+-*/", after[1]) && after[2] == '=');
    return assigns && !begins_with_gradient(rest);
}

// The comment at the head of the section in which this line stands has the formula: the first one, or that of a
// backward, which begins with a gradient; else the first line with " = ". {its line, "formula"}, or {the comment's
// first line, "section"} where there is none.
static std::pair<int, const char*> formula_above(const std::vector<std::string>& lines, int line, bool backward) {
    while (line > 1 && lines[line - 2].compare(0, 5, "// --") != 0) { line--; }
    int formula = 0, equation = 0;  // the first lines that are one, or have one
    for (int i = line; i <= (int)lines.size() && lines[i - 1].compare(0, 2, "//") == 0; i++) {
        const std::string& text = lines[i - 1];
        if (backward && begins_with_gradient(without_step(text))) { return {i, "formula"}; }
        if (formula == 0 && is_formula(text)) { formula = i; }
        if (equation == 0 && text.find(" = ") != std::string::npos) { equation = i; }
    }
    if (formula > 0) { return {formula, "formula"}; }
    if (equation > 0) { return {equation, "formula"}; }
    return {line, "section"};
}
// The formula of such a line without what stands before and after it, and short enough for a narrow terminal.
static std::string shortened(const std::string& line) {
    constexpr size_t LONGEST = 60;
    std::string text = without_step(line);
    size_t words = text.find(":  ");
    if (words != std::string::npos && words < text.find(" = ")) { text.erase(0, words + 3); }
    text.erase(std::min(text.find("   "), text.size()));
    return text.size() <= LONGEST ? text : text.substr(0, text.rfind(' ', LONGEST - 4)) + " ...";
}

// The cells between a Markdown row's bars, without the blanks around them.
static std::vector<std::string> cells_of(const std::string& row) {
    std::vector<std::string> cells;
    for (size_t from = 1, bar; (bar = row.find('|', from)) != std::string::npos; from = bar + 1) {
        size_t first = std::min(row.find_first_not_of(' ', from), bar), last = row.find_last_not_of(' ', bar - 1);
        cells.push_back(first < bar ? row.substr(first, last + 1 - first) : "");
    }
    return cells;
}

struct Anchor {
    std::string name, file;
    int line;
};
// Of links like [`name`](../file.cu#L12).
static std::vector<Anchor> places_in(const std::string& cell) {
    std::vector<Anchor> places;
    const std::string before = "[`", between = "`](../", hash = "#L";
    for (size_t at = 0; (at = cell.find(before, at)) != std::string::npos;) {
        size_t name = at + before.size(), link = cell.find(between, name), line = cell.find(hash, link);
        if (line == std::string::npos) { break; }
        size_t file = link + between.size();
        places.push_back(
            {cell.substr(name, link - name), cell.substr(file, line - file), atoi(cell.c_str() + line + hash.size())});
        at = line;
    }
    return places;
}

// The words of topics, and the names on the page.
static std::vector<std::string> words_of(const std::vector<std::string>& topics,
                                         const std::vector<std::string>& lines) {
    std::vector<std::string> words;
    for (const std::string& topic : topics) {
        for (size_t at = 0; (at = topic.find_first_not_of(" ,:()", at)) != std::string::npos;) {
            const size_t end = std::min(topic.find_first_of(" ,:()", at), topic.size());
            words.push_back(topic.substr(at, end - at));
            at = end;
        }
    }
    for (const std::string& line : lines) {
        for (const Anchor& place : places_in(line)) { words.push_back(place.name); }
    }
    return words;
}

// On a terminal, which may be narrow, a topic stands once, above its lines.
static void print_by_topic(const Table& table) {
    for (size_t i = 0; i < table.rows.size();) {
        const std::string topic = table.rows[i][0];
        Table its{topic, {"what", "name", "where"}, {}};
        for (; i < table.rows.size() && table.rows[i][0] == topic; i++) {
            its.rows.push_back({table.rows[i].begin() + 1, table.rows[i].end()});
        }
        print(its, "md");
    }
}

int cmd_where(const Options& o) {
    const std::string root = root_folder(), page = root + "notes/where.md";
    std::vector<std::string> columns, topics, lines = lines_of(page);
    if (lines.empty()) {
        fail("there is no notes/where.md above the program or in this folder: run it where it was built");
    }
    Table table{
        "where " + one_line(join(o.words, " ")) + "; commit " + commit(), {"topic", "what", "name", "where"}, {}};
    auto add = [&](const std::string& topic, const std::string& what, const std::string& name, const Anchor& place) {
        table.rows.push_back({topic, what, name, strprintf("%s:%d", place.file.c_str(), place.line)});
    };
    for (const std::string& line : lines) {
        if (line.compare(0, 2, "| ") != 0) { continue; }
        std::vector<std::string> cells = cells_of(line);
        if (columns.empty()) { columns = cells; }
        if (columns == cells || cells.size() != columns.size()) { continue; }
        const std::string& topic = cells[0];
        topics.push_back(topic);
        auto has = [&](const std::string& word) {  // in the topic, whatever the case, or as a name
            std::string lower = word;
            std::transform(word.begin(), word.end(), lower.begin(), [](unsigned char c) { return tolower(c); });
            return topic.find(lower) != std::string::npos || line.find("[`" + word + "`]") != std::string::npos;
        };
        if (!std::all_of(o.words.begin(), o.words.end(), has)) { continue; }
        bool is_first = true;
        for (size_t i = 1; i < cells.size(); i++) {
            for (const Anchor& place : places_in(cells[i])) {
                std::vector<std::string> source = lines_of(root + place.file);
                if (place.line < 1 || place.line > (int)source.size()) {
                    fail("%s names %s:%d, which is not there", page.c_str(), place.file.c_str(), place.line);
                }
                if (is_first) {
                    const bool backward = topic.find("backward") != std::string::npos;
                    const auto [head, what] = formula_above(source, place.line, backward);
                    add(topic, what, shortened(source[head - 1]), {"", place.file, head});
                }
                is_first = false;
                add(topic, columns[i], place.name, place);
            }
        }
    }
    if (table.rows.empty()) {
        std::string hint;
        const std::vector<std::string> known = words_of(topics, lines);
        for (const std::string& word : o.words) {
            if (hint.empty() && std::find(known.begin(), known.end(), word) == known.end()) {
                hint = did_you_mean(word, known);
            }
        }
        usage_error("got '%s'%s takes words of one of these, or none for all: %s", join(o.words, " ").c_str(),
                    hint.empty() ? "," : (hint + " It").c_str(), join(topics, "; ").c_str());
    }
    if (o.format == "md" && screen_width() < SIZE_MAX) {
        print_by_topic(table);
    } else {
        print(table, o.format);
    }
    return 0;
}
