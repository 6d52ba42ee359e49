// lib/table.cu: tables and answers on stdout, as Markdown, or as csv whose captions and answers are lines that begin
// with #.
#include "lib.h"

#include <cerrno>
#include <csignal>

#include <unistd.h>

std::string oom_cell(size_t bytes) { return strprintf("OOM (%.1f GiB)", bytes / 1073741824.0); }
std::string* printed_to = nullptr;

static void write_text(const std::string& text) {
    if (printed_to) {
        *printed_to += text;
        return;
    }
    end_progress();
    signal(SIGPIPE, SIG_IGN);  // or a closed pipe would kill us before fwrite could tell
    if (fwrite(text.data(), 1, text.size(), stdout) != text.size() || fflush(stdout) != 0) {
        fail("cannot write to stdout: %s", strerror(errno));
    }
}
static void write_block(const std::string& text) {  // blocks are parted by an empty line
    static bool is_first = true;
    write_text(is_first || printed_to ? text : "\n" + text);
    is_first = is_first && printed_to;
}

// Columns on the screen, if each code point takes one: all bytes of UTF-8 but continuation bytes.
static size_t width(const std::string& text) {
    return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
}
static bool is_number(const std::string& cell) {
    return cell.find_first_not_of("+-0123456789.e%x ") == std::string::npos || cell.compare(0, 3, "OOM") == 0;
}
static std::string markdown(const Table& table) {
    std::vector<size_t> widths(table.columns.size(), 3);
    std::vector<std::vector<std::string>> lines = {table.columns};
    lines.insert(lines.end(), table.rows.begin(), table.rows.end());
    std::vector<bool> right(table.columns.size(), true);  // columns of numbers
    for (size_t i = 0; i < lines.size(); i++) {
        for (size_t j = 0; j < widths.size(); j++) {
            std::string& cell = lines[i][j] = one_line(lines[i][j]);
            right[j] = right[j] && (i == 0 || is_number(cell));
            for (size_t k = 0; (k = cell.find('|', k)) != std::string::npos; k += 2) { cell.insert(k, "\\"); }
            widths[j] = std::max(widths[j], width(cell));
        }
    }
    std::string text = one_line(table.caption) + "\n\n";
    for (size_t i = 0; i < lines.size(); i++) {
        for (size_t j = 0; j < widths.size(); j++) {
            std::string spaces(widths[j] - width(lines[i][j]), ' ');
            text += "| " + (right[j] ? spaces + lines[i][j] : lines[i][j] + spaces) + " ";
        }
        text += "|\n";
        for (size_t j = 0; i == 0 && j < widths.size(); j++) {
            std::string dashes(widths[j] - 1, '-');
            text += "| " + (right[j] ? dashes + ":" : "-" + dashes) + (j + 1 < widths.size() ? " " : " |\n");
        }
    }
    return text;
}

static std::string csv_line(const std::vector<std::string>& cells) {
    std::string text;
    for (size_t j = 0; j < cells.size(); j++) {
        std::string cell = one_line(cells[j]);
        bool quoted = cell.find_first_of(",\"") != std::string::npos;
        for (size_t k = 0; (k = cell.find('"', k)) != std::string::npos; k += 2) { cell.insert(k, "\""); }
        text += (j > 0 ? "," : "") + (quoted ? "\"" + cell + "\"" : cell);
    }
    return text + "\n";
}
static std::string csv(const Table& table) {
    std::string text = "# " + one_line(table.caption) + "\n" + csv_line(table.columns);
    for (const auto& row : table.rows) { text += csv_line(row); }
    return text;
}

std::string origin() { return device_description() + "; commit " + commit() + context.sizes; }
void print(const Table& given) {
    Table table = given;
    static bool is_first = true;
    if (is_first && !printed_to) { table.caption += "; " + origin(), is_first = false; }
    for (const auto& row : table.rows) {
        if (row.size() != table.columns.size()) {
            fail("table '%s': a row has %zu cells, expected %zu", table.caption.c_str(), row.size(),
                 table.columns.size());
        }
    }
    write_block(context.csv ? csv(table) : markdown(table));
}
void answer(const char* part, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const std::string text = one_line(vstrprintf(format, arguments));
    va_end(arguments);
    const bool plain = context.csv || (!printed_to && isatty(STDOUT_FILENO));  // nobody renders a terminal's Markdown
    const std::string letter = *part ? strprintf(plain ? "(%s) " : "**(%s)** ", part) : "";
    write_block((context.csv ? "# " : "") + letter + text + "\n");
}
void sketch(const std::string& lines) {
    std::string text = context.csv ? "# " : "```\n";
    for (char c : lines) { text += context.csv && c == '\n' ? "\n# " : std::string(1, c); }
    write_block(text + (context.csv ? "\n" : "```\n"));
}
