// writeup.cu: what a student hands in, as one file: Markdown, or HTML that md4c makes of it.
#include "writeup.h"

#ifdef HAVE_MD4C
#include <md4c-html.h>
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Markdown

// What a command printed, so that it reads as printed: a device's name may hold `<` or a link. Only `code` stays code:
// between single backticks, since two of them would begin another kind of code.
static std::string as_printed(const std::string& text) {
    std::string safe;
    auto in_word = [&](size_t i) { return i < text.size() && isalnum((unsigned char)text[i]); };
    for (size_t i = 0; i < text.size(); i++) {
        char c = text[i];
        size_t close = c == '`' ? text.find('`', i + 1) : std::string::npos;
        if (close != std::string::npos && close > i + 1 && text[close + 1] != '`') {
            safe += text.substr(i, close - i);
            i = close;
        } else if (strchr("\\`<>&*[]~$", c) || (c == '_' && !(i > 0 && in_word(i - 1) && in_word(i + 1)))) {
            safe += '\\';
        }
        safe += text[i];
    }
    return safe;
}

static std::string base64(const std::string& bytes) {
    const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string text;
    for (size_t i = 0; i < bytes.size(); i += 3) {
        uint32_t group = 0;
        for (size_t k = i; k < i + 3; k++) { group = group << 8 | (k < bytes.size() ? (unsigned char)bytes[k] : 0); }
        for (size_t k = 0; k < 4; k++) { text += i + k > bytes.size() ? '=' : digits[group >> (18 - 6 * k) & 63]; }
    }
    return text;
}

// The heading's anchor, as GitHub names it.
static std::string anchor_of(const std::string& heading) {
    std::string anchor;
    for (unsigned char c : heading) {
        if (isalnum(c) || c == '_' || c == '-') { anchor += (char)tolower(c); }
        if (c == ' ') { anchor += '-'; }
    }
    return anchor;
}

static std::string markdown_of(Table table) {
    table.caption = as_printed(table.caption);
    for (std::string& column : table.columns) { column = as_printed(column); }
    for (auto& row : table.rows) {
        for (std::string& cell : row) { cell = as_printed(cell); }
    }
    return format_table(table, "md") + "\n";
}

static std::string markdown_of(const WriteupProblem& problem) {
    std::string text = "## " + problem.title + "\n\n> ";
    for (char c : problem.question) { text += c == '\n' ? "\n> " : std::string(1, c); }
    text += "\n\n";
    std::vector<Answer> answers = problem.answers;
    for (Answer& answer : answers) { answer.text = as_printed(answer.text); }
    text += answers.empty() ? "This run has no tables that answer it.\n" : format_answers(answers, "md");
    for (const WriteupPart& part : problem.parts) {
        text += "\n### `" + part.command + "`\n\n";
        if (!part.remark.empty()) { text += "**" + as_printed(one_line(part.remark)) + "**\n\n"; }
        for (const Table& table : part.tables) { text += markdown_of(table); }
        for (const std::string& svg : part.pictures) {
            // As an image each SVG keeps its style to itself.
            text += "![drawn by " + part.command + "](data:image/svg+xml;base64," + base64(svg) + ")\n\n";
        }
    }
    return text + "\n";
}

std::string writeup_markdown(const std::string& summary, const std::vector<WriteupProblem>& problems,
                             const Table& runs) {
    const std::string last = "What ran";
    std::string text = "# CS336, assignment 2 (systems): write-up\n\n" + as_printed(summary) + "\n\n", contents, bodies;
    for (const WriteupProblem& problem : problems) {
        contents += "* [" + problem.title + "](#" + anchor_of(problem.title) + ")\n";
        bodies += markdown_of(problem);
    }
    contents += "* [" + last + "](#" + anchor_of(last) + ")\n";
    return text + contents + "\n" + bodies + "## " + last + "\n\n" + markdown_of(runs);
}

// ---------------------------------------------------------------------------------------------------------------------
// HTML

#ifdef HAVE_MD4C
// A wide table or picture scrolls in its own box. On paper nothing scrolls, so there cells wrap.
static const char* STYLE = R"(
:root { color-scheme: light dark; --text: #1f2328; --page: #ffffff; --muted: #59636e; --line: #d1d9e0; --soft: #f6f8fa; --link: #0969da; }
@media screen and (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --page: #0d1117; --muted: #9198a1; --line: #3d444d; --soft: #161b22; --link: #4493f8; }
}
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
main { max-width: 1100px; margin: 0 auto; padding: 16px; }
h1, h2, h3 { line-height: 1.25; }
h2 { margin-top: 2.5em; padding-top: .6em; border-top: 1px solid var(--line); }
h3 { font-size: 1em; margin-top: 2em; }
a { color: var(--link); }
ul { padding-left: 1.4em; }
h1 ~ ul { columns: 26em; }
blockquote { margin: 1em 0; padding: .1em 1em; background: var(--soft); border-left: 4px solid var(--line); }
code { font: .9em ui-monospace, monospace; }
table { display: block; width: max-content; max-width: 100%; overflow-x: auto; border-collapse: collapse; font-size: .85em;
  font-variant-numeric: tabular-nums; margin-bottom: 1.5em; }
th, td { padding: .25em .6em; border: 1px solid var(--line); white-space: nowrap; }
th { background: var(--soft); }
p:has(+ table) { color: var(--muted); font-size: .85em; margin-bottom: .4em; }
p:has(> img) { overflow-x: auto; }
img { display: block; width: 100%; min-width: 640px; max-width: 960px; height: auto; }
@media print {
  :root { color-scheme: light; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  table { display: table; width: 100%; font-size: 6pt; }
  th, td { white-space: normal; padding: .1em .2em; }
  img { min-width: 0; break-inside: avoid; }
  h2, h3, p:has(+ table) { break-after: avoid; }
}
)";

std::string writeup_html(const std::string& markdown) {
    std::string body;
    auto append = [](const MD_CHAR* text, MD_SIZE size, void* to) { ((std::string*)to)->append(text, size); };
    if (md_html(markdown.data(), (MD_SIZE)markdown.size(), append, &body, MD_FLAG_TABLES | MD_FLAG_NOHTML, 0) != 0) {
        fail("md4c: cannot make HTML of the write-up");
    }
    const std::string open = "<h2>";
    for (size_t at = 0; (at = body.find(open, at)) != std::string::npos; at += open.size()) {
        size_t from = at + open.size();
        body.replace(at, open.size(), "<h2 id=\"" + anchor_of(body.substr(from, body.find('<', from) - from)) + "\">");
    }
    return "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
           "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
           "<title>CS336 write-up</title>\n<style>" +
           std::string(STYLE) + "</style>\n</head>\n<body>\n<main>\n" + body + "</main>\n</body>\n</html>\n";
}
std::string why_no_html() { return ""; }
#else
std::string writeup_html(const std::string&) { fail("%s", why_no_html().c_str()); }
std::string why_no_html() {
    return "built without md4c (sudo apt-get install libmd4c-html0-dev libmd4c-dev, then make config and make)";
}
#endif
