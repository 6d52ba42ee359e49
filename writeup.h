// writeup.h: what reproduce.cu gives to writeup.cu.
#pragma once
#include "cs336.h"

struct WriteupPart {  // what one command line gave
    std::string command;
    std::string remark;  // what was scaled down, or why there are no tables; or ""
    std::vector<Table> tables;
    std::vector<std::string> pictures;  // SVG
};
struct WriteupProblem {
    std::string title, question;  // both are Markdown
    std::vector<Answer> answers;
    std::vector<WriteupPart> parts;
};
// Text of measurements is escaped: it reads as it was printed. runs: the table of all command lines.
std::string writeup_markdown(const std::string& summary, const std::vector<WriteupProblem>& problems,
                             const Table& runs);
std::string writeup_html(const std::string& markdown);  // one page that loads nothing
std::string why_no_html();                              // "" in a build with md4c
