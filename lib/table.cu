// lib/table.cu: tables and answers on stdout, as Markdown, or as csv, where captions and answers
// begin with #.
#include "lib.h"

std::string oom_cell(size_t bytes) { return strprintf("OOM (%.1f GiB)", to_gib(bytes)); }
std::string* printed_to = nullptr;

static void write_block(const std::string& block) {  // blocks are parted by an empty line
    if (printed_to) {
        *printed_to += block;
        return;
    }
    static bool is_first = true;
    const std::string text = is_first ? block : "\n" + block;
    is_first = false;
    signal(SIGPIPE, SIG_IGN);  // or a closed pipe would kill us before fwrite could tell
    if (fwrite(text.data(), 1, text.size(), stdout) != text.size() || fflush(stdout) != 0) {
        throw Failure(errno == EPIPE ? 128 + SIGPIPE : 1,
                      strprintf("cannot write to stdout: %s", strerror(errno)));
    }
}

// Columns on the screen, if each code point takes one: all bytes of UTF-8 but continuation bytes.
static size_t width(const std::string& text) {
    return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
}
static bool is_number(const std::string& cell) {
    return cell.find_first_not_of("+-0123456789.e%x ") == std::string::npos ||
           cell.compare(0, 3, "OOM") == 0;
}
static void escape(std::string& cell, char c, const char* with) {
    for (size_t at = 0; (at = cell.find(c, at)) != std::string::npos; at += 2) {
        cell.insert(at, with);
    }
}
static std::string markdown(const Table& table) {
    std::vector<std::vector<std::string>> lines = {table.columns};
    lines.insert(lines.end(), table.rows.begin(), table.rows.end());
    std::vector<size_t> widths(table.columns.size(), 3);
    std::vector<bool> right(table.columns.size(), true);  // columns of numbers
    for (size_t i = 0; i < lines.size(); i++) {
        for (size_t j = 0; j < widths.size(); j++) {
            std::string& cell = lines[i][j] = one_line(lines[i][j]);
            right[j] = right[j] && (i == 0 || is_number(cell));
            escape(cell, '|', "\\");
            widths[j] = std::max(widths[j], width(cell));
        }
    }
    std::string text = one_line(table.caption) + "\n\n", rule;
    for (size_t i = 0; i < lines.size(); i++) {
        for (size_t j = 0; j < widths.size(); j++) {
            const std::string spaces(widths[j] - width(lines[i][j]), ' '),
                dashes(widths[j] - 1, '-');
            text += "| " + (right[j] ? spaces + lines[i][j] : lines[i][j] + spaces) + " ";
            rule += "| " + (right[j] ? dashes + ": " : "-" + dashes + " ");
        }
        text += i == 0 ? "|\n" + rule + "|\n" : "|\n";
    }
    return text;
}

static std::string csv_line(const std::vector<std::string>& cells) {
    std::vector<std::string> line;
    for (const std::string& text : cells) {
        std::string cell = one_line(text);
        const bool quoted = cell.find_first_of(",\"") != std::string::npos;
        escape(cell, '"', "\"");
        line.push_back(quoted ? "\"" + cell + "\"" : cell);
    }
    return join(line, ",") + "\n";
}
static std::string csv(const Table& table) {
    std::string text = "# " + one_line(table.caption) + "\n" + csv_line(table.columns);
    for (const auto& row : table.rows) { text += csv_line(row); }
    return text;
}

std::string origin() { return device_description() + "; commit " + commit() + context.sizes; }
void print(const Table& table) {
    static bool is_first = true;
    Table t = table;
    for (const auto& row : t.rows) {
        if (row.size() != t.columns.size()) {
            fail("table '%s': a row of %zu cells", t.caption.c_str(), row.size());
        }
    }
    if (is_first && !printed_to) { t.caption += "; " + origin(), is_first = false; }
    write_block(context.csv ? csv(t) : markdown(t));
}

void answer(const char* part, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const std::string text = one_line(vstrprintf(format, arguments));
    va_end(arguments);
    // nobody renders a terminal's Markdown
    const bool plain = context.csv || (!printed_to && isatty(STDOUT_FILENO));
    const std::string letter = *part ? strprintf(plain ? "(%s) " : "**(%s)** ", part) : "";
    write_block((context.csv ? "# " : "") + letter + text + "\n");
}
void sketch(const std::string& lines) {
    std::string text = context.csv ? "# " : "```\n";
    for (char c : lines) { text += context.csv && c == '\n' ? "\n# " : std::string(1, c); }
    write_block(text + (context.csv ? "\n" : "```\n"));
}
