// table.cu: tables and answers on stdout, as Markdown, csv or json; on a terminal as wide as it is.
#include "cs336.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <numeric>
#include <sstream>

#include <nlohmann/json.hpp>
#include <sys/ioctl.h>
#include <unistd.h>

using Row = std::vector<std::string>;

// ---------------------------------------------------------------------------------------------------------------------
// Markdown

// As JSON defines numbers: neither "nan" nor "007" is one.
static bool is_number(const std::string& cell) {
    bool no_space =
        !cell.empty() && (isdigit((unsigned char)cell[0]) || cell[0] == '-') && isdigit((unsigned char)cell.back());
    return no_space && nlohmann::json::accept(cell);
}

// Columns on the screen, if each code point takes one: all bytes of UTF-8 but continuation bytes.
static size_t width(const std::string& text) {
    return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

// The lines of a table in Markdown, the header first: cells on one line each, bars escaped.
struct Grid {
    std::vector<Row> lines = {};
    std::vector<size_t> widths = {};
    std::vector<bool> right = {};  // columns of numbers
    size_t width() const { return std::accumulate(widths.begin(), widths.end(), 1 + 3 * widths.size()); }
};
static void add_line(Grid& grid, const Row& row) {
    bool header = grid.lines.empty();
    if (header) { grid.widths.resize(row.size(), 3), grid.right.resize(row.size(), true); }
    grid.lines.emplace_back();
    for (size_t j = 0; j < row.size(); j++) {
        std::string cell = one_line(row[j]);
        grid.right[j] = grid.right[j] && (header || cell.empty() || cell == "OOM" || is_number(cell));
        for (size_t k = 0; (k = cell.find('|', k)) != std::string::npos; k += 2) { cell.insert(k, "\\"); }
        grid.widths[j] = std::max(grid.widths[j], width(cell));
        grid.lines.back().push_back(cell);
    }
}
static Grid grid_of(const Table& table) {
    Grid grid;
    add_line(grid, table.columns);
    for (const Row& row : table.rows) { add_line(grid, row); }
    return grid;
}
static std::string markdown_line(const Grid& grid, size_t i) {
    std::string text;
    size_t columns = grid.widths.size();
    for (size_t j = 0; j < columns; j++) {
        const std::string& cell = grid.lines[i][j];
        std::string spaces(grid.widths[j] - std::min(grid.widths[j], width(cell)), ' ');
        text += "| " + (grid.right[j] ? spaces + cell : cell + spaces) + " ";
    }
    text += "|\n";
    for (size_t j = 0; i == 0 && j < columns; j++) {
        std::string dashes(grid.widths[j] - 1, '-');
        text += "| " + (grid.right[j] ? dashes + ":" : "-" + dashes) + (j + 1 < columns ? " " : " |\n");
    }
    return text;
}
static std::string markdown_lines(const Grid& grid) {
    std::string text;
    for (size_t i = 0; i < grid.lines.size(); i++) { text += markdown_line(grid, i); }
    return text;
}
static std::string format_markdown(const Table& table) {
    return one_line(table.caption) + "\n\n" + markdown_lines(grid_of(table));
}

// ---------------------------------------------------------------------------------------------------------------------
// On a terminal. What does not fit loses first the columns that hold the same in all rows, which stand above it
// instead. Then its text is wrapped. If that is not enough, it loses the columns that it names as less needed. If that
// is not enough either, the rows stand side by side, some at a time.

static bool all_columns = false;
void print_all_columns() { all_columns = true; }
size_t screen_width() {
    winsize size = {};
    bool known = !all_columns && isatty(STDOUT_FILENO) && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0;
    return known && size.ws_col > 0 ? size.ws_col : SIZE_MAX;
}

std::string wrapped(const std::string& text, size_t columns, size_t indent) {
    if (columns == SIZE_MAX) { return text; }
    std::string out;
    size_t at = indent;
    for (size_t from = 0, end; from < text.size(); from = end) {  // a word with what separates it from the one before
        size_t word = text.find_first_not_of(" \n", from);
        end = std::min(text.find_first_of(" \n", word), text.size());
        std::string gap = text.substr(from, std::min(word, text.size()) - from),
                    next = text.substr(from + gap.size(), end - from - gap.size());
        size_t line = gap.rfind('\n');
        if (line != std::string::npos) {
            at = indent + gap.size() - line - 1;
        } else if (at > indent && at + gap.size() + width(next) > columns) {
            gap = "\n" + std::string(indent, ' '), at = indent;
        } else {
            at += gap.size();
        }
        out += gap + next, at += width(next);
    }
    return out;
}

static void erase_column(Table& table, size_t j) {
    table.columns.erase(table.columns.begin() + j);
    for (Row& row : table.rows) { row.erase(row.begin() + j); }
}
// Takes them out, but for the first one; says what they hold.
static std::string take_constants(Table& table) {
    Row said;
    for (size_t j = table.columns.size(); table.rows.size() > 1 && j-- > 1;) {
        auto same = [&](const Row& row) { return row[j] == table.rows[0][j]; };
        if (!std::all_of(table.rows.begin(), table.rows.end(), same)) { continue; }
        said.insert(said.begin(), table.columns[j] + " " + (table.rows[0][j].empty() ? "-" : table.rows[0][j]));
        erase_column(table, j);
    }
    return said.empty() ? "" : "In all rows: " + join(said, "; ");
}
// The same with cells of text in several lines, if it fits then: each further line is a row with blanks beside it.
static Table with_wrapped_text(const Table& table, size_t columns) {
    constexpr size_t READABLE = 16;
    Grid grid = grid_of(table);
    std::vector<size_t> least = grid.widths;
    for (size_t j = 0; j < least.size(); j++) {
        if (grid.right[j]) { continue; }
        least[j] = std::max(std::min(least[j], READABLE), width(table.columns[j]));
        for (const Row& row : table.rows) {
            std::istringstream words(row[j]);
            for (std::string word; words >> word;) { least[j] = std::max(least[j], width(word)); }
        }
    }
    while (grid.width() > columns) {
        size_t widest = least.size();
        for (size_t j = 0; j < least.size(); j++) {
            bool can_give = grid.widths[j] > least[j];
            if (can_give && (widest == least.size() || grid.widths[j] > grid.widths[widest])) { widest = j; }
        }
        if (widest == least.size()) { return table; }
        grid.widths[widest]--;
    }
    Table result = table;
    result.rows.clear();
    for (const Row& row : table.rows) {
        size_t first = result.rows.size();
        for (size_t j = 0; j < row.size(); j++) {
            std::istringstream text(grid.right[j] ? row[j] : wrapped(one_line(row[j]), grid.widths[j]));
            std::string line;
            for (size_t i = first; std::getline(text, line) || i == first; i++) {
                if (i == result.rows.size()) { result.rows.emplace_back(row.size()); }
                result.rows[i][j] = line;
            }
        }
    }
    return result;
}
static bool fits_wrapped(const Table& table, size_t columns) {
    return grid_of(with_wrapped_text(table, columns)).width() <= columns;
}
// A table that names no columns as less needed: numbers in the middle go first, then text, since text says what a row
// is, and the last three columns are the results that the others lead to.
static Row less_needed_of(const Table& table) {
    const size_t n = table.columns.size(), results = n - std::min<size_t>(n, 3);
    const std::vector<bool> numbers = grid_of(table).right;
    Row order;
    for (bool number : {true, false}) {
        for (size_t j = results + number; j-- > 1;) {
            if (j < n && numbers[j] == number) { order.push_back(table.columns[j]); }
        }
    }
    for (size_t j = std::max<size_t>(results, 1); j < n; j++) { order.push_back(table.columns[j]); }
    return order;
}
static void take_less_needed(Table& table, size_t columns, const Row& order, Row* taken) {
    for (const std::string& name : order) {
        auto column = std::find(table.columns.begin(), table.columns.end(), name);
        if (column == table.columns.end() || fits_wrapped(table, columns)) { continue; }
        erase_column(table, column - table.columns.begin());
        taken->push_back(name);
    }
}
// Rows [first, end), a column each.
static Grid turned(const Table& table, size_t first, size_t end) {
    Grid grid;
    for (size_t j = 0; j < table.columns.size(); j++) {
        Row line = {table.columns[j]};
        for (size_t i = first; i < end; i++) { line.push_back(table.rows[i][j]); }
        add_line(grid, line);
    }
    grid.right.assign(grid.right.size(), true), grid.right[0] = false;
    return grid;
}
static std::vector<Grid> side_by_side(const Table& table, size_t columns) {
    std::vector<Grid> pieces;
    for (size_t first = 0, end; first < table.rows.size(); first = end) {
        pieces.push_back(turned(table, first, end = first + 1));
        while (end < table.rows.size()) {
            Grid more = turned(table, first, end + 1);
            if (more.width() > columns) { break; }
            pieces.back() = more, end++;
        }
    }
    return pieces;
}
static std::string for_screen(Table table, size_t columns) {
    std::string text, constants;
    Row taken;
    auto say = [&](const std::string& line) { text += line.empty() ? "" : wrapped(one_line(line), columns) + "\n\n"; };
    if (grid_of(table).width() > columns) { constants = take_constants(table); }
    take_less_needed(table, columns, table.less_needed, &taken);
    std::vector<Grid> pieces;
    if (!fits_wrapped(table, columns)) { pieces = side_by_side(table, columns); }
    if (pieces.empty() || pieces.size() > 3) {
        take_less_needed(table, columns, less_needed_of(table), &taken);
        pieces = {grid_of(with_wrapped_text(table, columns))};
    }
    say(table.caption);
    say(constants);
    say(taken.empty() ? "" : "Not shown: " + join(taken, ", ") + "; --wide shows all columns");
    for (size_t i = 0; i < pieces.size(); i++) { text += (i > 0 ? "\n" : "") + markdown_lines(pieces[i]); }
    return text;
}

// ---------------------------------------------------------------------------------------------------------------------
// In a file or a pipe

static std::string quote_csv(const std::string& value) {
    std::string cell = one_line(value);
    if (cell.find_first_of(",\"") == std::string::npos) { return cell; }
    std::string text = "\"";
    for (char c : cell) { text += c == '"' ? "\"\"" : std::string(1, c); }
    return text + "\"";
}

std::string oom_cell(size_t bytes) { return strprintf("OOM (%.1f GiB)", bytes / 1073741824.0); }

// f of each cell, with commas between
static std::string join_cells(const std::vector<std::string>& cells,
                              const std::function<std::string(const std::string&)>& f, const char* comma) {
    std::string text;
    for (size_t j = 0; j < cells.size(); j++) { text += (j ? comma : "") + f(cells[j]); }
    return text;
}

static std::string format_csv(const Table& table) {
    std::string text = "# " + one_line(table.caption) + "\n" + join_cells(table.columns, quote_csv, ",") + "\n";
    for (const auto& row : table.rows) { text += join_cells(row, quote_csv, ",") + "\n"; }
    return text;
}

// The table of format_csv's text.
Table read_csv(const std::string& text) {
    Table table;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        if (table.columns.empty() && line.compare(0, 2, "# ") == 0) {
            table.caption = line.substr(2);
            continue;
        }
        if (line.empty()) { break; }  // another table, or the answers
        std::vector<std::string> cells = {""};
        bool quoted = false;
        for (size_t i = 0; i < line.size(); i++) {
            bool quote = line[i] == '"';
            if (quote && quoted && line[i + 1] == '"') {
                cells.back() += line[++i];
            } else if (quote) {
                quoted = !quoted;
            } else if (line[i] == ',' && !quoted) {
                cells.emplace_back();
            } else {
                cells.back() += line[i];
            }
        }
        if (table.columns.empty()) {
            table.columns = cells;
        } else {
            table.rows.push_back(cells);
        }
    }
    return table;
}

static std::string format_json(const Table& table) {
    using nlohmann::ordered_json;
    ordered_json json = {
        {"caption", as_utf8(table.caption)}, {"columns", ordered_json::array()}, {"rows", ordered_json::array()}};
    for (const std::string& column : table.columns) { json["columns"].push_back(as_utf8(column)); }
    for (const auto& row : table.rows) {
        json["rows"].push_back(ordered_json::array());
        for (const std::string& cell : row) {
            json["rows"].back().push_back(is_number(cell) ? ordered_json::parse(cell) : ordered_json(as_utf8(cell)));
        }
    }
    return json.dump(-1, ' ', true) + "\n";  // in ASCII: nothing in it steers a terminal
}

std::string format_table(const Table& table, const std::string& format) {
    for (const auto& row : table.rows) {
        if (row.size() != table.columns.size()) {
            fail("table '%s': a row has %zu cells, expected %zu", table.caption.c_str(), row.size(),
                 table.columns.size());
        }
    }
    if (format == "md") { return format_markdown(table); }
    if (format == "csv") { return format_csv(table); }
    if (format == "json") { return format_json(table); }
    fail("format '%s': expected md, csv or json", format.c_str());
}

static bool write_out(const std::string& text) {
    end_progress();
    signal(SIGPIPE, SIG_IGN);  // or a closed pipe would kill us before fwrite could tell
    return fwrite(text.data(), 1, text.size(), stdout) == text.size() && fflush(stdout) == 0;
}
static bool print_text(std::string text, const std::string& format) {
    static bool is_first = true;
    if (!is_first && format != "json") { text = "\n" + text; }  // JSON stays one object per line
    is_first = false;
    return write_out(text);
}
static std::string why_no_output() { return strprintf("cannot write to stdout: %s", strerror(errno)); }
static std::vector<Table> printed;
const std::vector<Table>& printed_tables() { return printed; }
void print(const Table& table, const std::string& format) {
    if (context.plan_only) { return; }
    size_t columns = screen_width();
    std::string text = format_table(table, format);  // also checks it
    if (format == "md" && columns < SIZE_MAX) { text = for_screen(table, columns); }
    if (!print_text(text, format)) { fail("%s", why_no_output().c_str()); }
    printed.push_back(table);
}
void RunningTable::add(const Row& row) {
    table.rows.push_back(row);
    if (format == "json" || !failure.empty()) { return; }
    bool is_first = table.rows.size() == 1, md = format == "md";
    Grid grid;
    add_line(grid, table.columns);
    for (size_t j = 0; j < widths.size(); j++) { grid.widths[j] = std::max(grid.widths[j], widths[j]); }
    std::string head = md ? wrapped(one_line(table.caption), screen_width()) + "\n\n" + markdown_line(grid, 0)
                          : format_csv({table.caption, table.columns, {}});
    std::vector<size_t> fixed = grid.widths;
    add_line(grid, row);
    grid.widths = fixed, grid.right.assign(row.size(), true);
    bool ok = (!is_first || print_text(head, format)) &&
              write_out(md ? markdown_line(grid, 1) : join_cells(row, quote_csv, ",") + "\n");
    if (!ok) { failure = why_no_output(); }
}
void RunningTable::end() {
    if (!failure.empty()) { fail("%s", failure.c_str()); }
    if (format == "json" || table.rows.empty()) { return print(table, format); }
    printed.push_back(table);
}
std::string format_answers(const std::vector<Answer>& answers, const std::string& format) {
    std::string text;
    nlohmann::ordered_json json;
    for (const Answer& a : answers) {
        std::string part = a.part.empty() ? "" : "(" + a.part + ")";
        json["answers"][a.part] = a.text;
        if (!a.code.empty()) { json["code"][a.part] = a.code; }
        if (format == "csv") {
            text += "# " + part + (part.empty() ? "" : " ") + a.text + "\n";
            std::istringstream code(a.code);
            for (std::string line; std::getline(code, line);) { text += "# " + line + "\n"; }
        } else {
            text += (text.empty() ? "" : "\n") + (part.empty() ? "" : "**" + part + "** ") + a.text + "\n";
            text += a.code.empty() ? "" : "\n```\n" + a.code + "```\n";
        }
    }
    return format == "json" ? json.dump(-1, ' ', true) + "\n" : text;
}
void print(const std::vector<Answer>& answers, const std::string& format) {
    std::string text = wrapped(format_answers(answers, format), format == "md" ? screen_width() : SIZE_MAX);
    if (!answers.empty() && !print_text(text, format)) { fail("%s", why_no_output().c_str()); }
}
