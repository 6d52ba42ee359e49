// lib/table.cu: tables and answers on stdout, as Markdown, or as csv, where captions and answers
// begin with #. In this order: how a block is written, a table as Markdown, as csv, and what
// commands call: print(), answer(), sketch(). To read first: print().
#include "lib.h"

string oom_cell(size_t bytes) { return strprintf("OOM (%.1f GiB)", to_gib(bytes)); }
string* printed_to = nullptr;

// Writes a table or an answer, parted by an empty line from what was written before. Fails if
// stdout fails; a reader that has gone (`| head`) ends us with the exit code of SIGPIPE.
static void write_block(const string& block) {
    if (context.silent) { return; }
    if (printed_to) {
        *printed_to += block;
        return;
    }

    static bool is_first = true;
    string text = is_first ? block : "\n" + block;
    is_first = false;

    signal(SIGPIPE, SIG_IGN);  // or a closed pipe would kill us before fwrite could tell
    if (fwrite(text.data(), 1, text.size(), stdout) != text.size() || fflush(stdout) != 0) {
        throw Failure(errno == EPIPE ? 128 + SIGPIPE : 1,
                      strprintf("cannot write to stdout: %s", strerror(errno)));
    }
}

// Counts columns on the screen, if each code point takes one: all bytes of UTF-8 but those that
// continue one.
static size_t width(const string& text) {
    return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
}
static bool is_number(const string& cell) {
    return cell.find_first_not_of("+-0123456789.e%x ") == string::npos ||
           cell.compare(0, 3, "OOM") == 0;
}
// Returns the cell with `with` before every special character.
static string escaped(const string& cell, char special, char with) {
    string text;
    for (char c : cell) {
        if (c == special) { text += with; }
        text += c;
    }
    return text;
}
// Returns the table as Markdown that is also legible as it is: columns are padded to one width, and
// those that hold numbers only are aligned to the right.
static string markdown(const Table& table) {
    vector<vector<string>> lines = {table.columns};
    lines.insert(lines.end(), table.rows.begin(), table.rows.end());
    vector<size_t> widths(table.columns.size(), 3);
    vector<bool> right(table.columns.size(), true);  // columns of numbers
    for (size_t i = 0; i < lines.size(); i++) {
        for (size_t j = 0; j < widths.size(); j++) {
            string& cell = lines[i][j];
            cell = one_line(cell);
            right[j] = right[j] && (i == 0 || is_number(cell));
            cell = escaped(cell, '|', '\\');
            widths[j] = max(widths[j], width(cell));
        }
    }

    string text = one_line(table.caption) + "\n\n", rule;
    for (size_t i = 0; i < lines.size(); i++) {
        for (size_t j = 0; j < widths.size(); j++) {
            string spaces(widths[j] - width(lines[i][j]), ' ');
            string dashes(widths[j] - 1, '-');
            text += "| " + (right[j] ? spaces + lines[i][j] : lines[i][j] + spaces) + " ";
            rule += "| " + (right[j] ? dashes + ": " : "-" + dashes + " ");
        }
        text += i == 0 ? "|\n" + rule + "|\n" : "|\n";
    }
    return text;
}

// Returns a line of csv (RFC 4180): a cell with a comma or a quote stands in quotes, and a quote in
// it is doubled.
static string csv_line(const vector<string>& cells) {
    vector<string> line;
    for (const string& text : cells) {
        string cell = one_line(text);
        bool quoted = cell.find_first_of(",\"") != string::npos;
        line.push_back(quoted ? "\"" + escaped(cell, '"', '"') + "\"" : cell);
    }
    return join(line, ",") + "\n";
}
static string csv(const Table& table) {
    string text = "# " + one_line(table.caption) + "\n" + csv_line(table.columns);
    for (const auto& row : table.rows) { text += csv_line(row); }
    return text;
}

string origin() { return device_description() + "; commit " + commit() + context.sizes; }

// Writes a table; the process's first one also says on what it ran. Fails if a row has too many or
// too few cells.
void print(const Table& table) {
    Table t = table;
    for (const auto& row : t.rows) {
        if (row.size() != t.columns.size()) {
            fail("table '%s': a row of %zu cells", t.caption.c_str(), row.size());
        }
    }

    static bool is_first = true;
    if (is_first && !printed_to) {
        t.caption += "; " + origin();
        is_first = false;
    }
    write_block(context.csv ? csv(t) : markdown(t));
}

// Writes an answer on one line. On a terminal and in csv its letter has no asterisks, since nobody
// renders Markdown there.
void answer(const char* part, const char* format, ...) {
    string text = one_line(FORMATTED(format));
    bool plain = context.csv || (!printed_to && isatty(STDOUT_FILENO));
    string letter;
    if (*part) { letter = strprintf(plain ? "(%s) " : "**(%s)** ", part); }
    write_block((context.csv ? "# " : "") + letter + text + "\n");
}

// Writes lines of code, or of text, between ``` and ```, or in csv each behind a #.
void sketch(const string& lines) {
    string text = context.csv ? "# " : "```\n";
    for (char c : lines) {
        if (context.csv && text.back() == '\n') { text += "# "; }
        text += c;
    }
    write_block(text + (context.csv ? "" : "```\n"));
}
