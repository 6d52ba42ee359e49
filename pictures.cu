// pictures.cu: the charts that follow from a command's tables, as its answers do: the same table gives the same
// picture, on the machine that measured it and on any other. The last one follows from the formats of numbers alone.
#include "answers.h"
#include "commands.h"

#include <algorithm>
#include <cmath>

constexpr int BLUE = 0, ORANGE = 6;  // of the 8 colours the pair that differs most for colour-blind eyes

using ValueOf = std::function<double(const TableRow&)>;  // NaN: the row has none
struct Line {
    std::string name;
    ValueOf y;
    bool dashed = false;
    int colour = -1;
};
static ValueOf in_column(const std::string& name, double factor = 1) {
    return [=](const TableRow& row) { return factor * row.number(name); };
}

// A panel for each title that rows have. x: a column, whose numbers ascend from row to row of a panel.
static std::vector<Chart> panels_of(const Table& table, const std::function<std::string(const TableRow&)>& title,
                                    const std::string& x, const std::vector<Line>& lines) {
    std::vector<Chart> panels;
    for (const TableRow& row : rows_of(table)) {
        auto panel = std::find_if(panels.begin(), panels.end(), [&](auto& chart) { return chart.title == title(row); });
        if (panel == panels.end()) {
            Chart chart{Chart::LINES, title(row), "", "", {}, {}, {}, true};
            for (const Line& line : lines) { chart.series.push_back({line.name, {}, line.dashed, line.colour}); }
            panel = panels.insert(panel, chart);
            panel->missing = "OOM";
        }
        panel->x.push_back(row.number(x));
        for (size_t k = 0; k < lines.size(); k++) { panel->series[k].y.push_back(lines[k].y(row)); }
    }
    return panels;
}
static std::vector<Chart> log_log(std::vector<Chart> panels, const std::string& y_label) {
    for (Chart& chart : panels) { chart.log_y = true, chart.x_label = "sequence length S", chart.y_label = y_label; }
    return panels;
}
static std::string head_size(const TableRow& row) { return "d_model " + row.text("d_model"); }

static std::vector<Chart> attention_charts(const Table& table) {
    std::vector<Chart> panels = log_log(panels_of(table, head_size, "seq_len",
                                                  {{"forward", in_column("forward_time", 1e3), false, BLUE},
                                                   {"backward", in_column("backward_time", 1e3), true, ORANGE}}),
                                        "time (ms)");
    std::vector<Chart> memory =
        log_log(panels_of(table, head_size, "seq_len", {{"", in_column("memory_usage_mb")}}), "memory (MiB)");
    for (Chart& one : memory) {  // one panel, its lines the head sizes
        one.series[0].name = one.title;
        if (&one != &memory[0]) { memory[0].series.push_back(one.series[0]); }
    }
    memory.resize(std::min(memory.size(), (size_t)1));
    for (Chart& all : memory) { all.title = "held when backward begins: inputs, and what forward saved"; }
    panels.insert(panels.end(), memory.begin(), memory.end());
    return panels;
}
static std::vector<Chart> compile_charts(const Table& table) {
    return log_log(panels_of(table, head_size, "seq_len",
                             {{"eager forward", in_column("vanilla fw (ms)"), false, BLUE},
                              {"eager backward", in_column("vanilla bw (ms)"), true, BLUE},
                              {"fused forward", in_column("compiled fw (ms)"), false, ORANGE},
                              {"fused backward", in_column("compiled bw (ms)"), true, ORANGE}}),
                   "time (ms)");
}
static std::vector<Chart> flash_charts(const Table& table) {
    auto title = [](const TableRow& row) { return row.text("dtype") + ", D " + row.text("D"); };
    return log_log(panels_of(table, title, "Seq",
                             {{"naive forward", in_column("Naive Fwd"), false, BLUE},
                              {"naive backward", in_column("Naive Bwd"), true, BLUE},
                              {"flash forward", in_column("Flash Fwd"), false, ORANGE},
                              {"flash backward", in_column("Flash Bwd"), true, ORANGE}}),
                   "time (ms)");
}

std::vector<Chart> softmax_charts(const Tables& tables) {
    auto of_time = [](const TableRow& row) {
        double softmax = row.number("softmax (ms)");
        return 100 * softmax / (softmax + row.number("products (ms)"));
    };
    auto of_flops = [](const TableRow& row) {  // the table's GFLOP of small models have few digits
        double softmax, products;
        int read = sscanf(row.text("ratio of FLOPs (5 : 4 D)").c_str(), "%lf : %lf", &softmax, &products);
        return read == 2 ? 100 * softmax / (softmax + products) : NAN;
    };
    std::vector<Chart> all;
    for (const Table& table : tables_with(tables, {"nsys_profile (e): softmax"})) {
        std::string setting = value_in(table, "precision ", ",") + " " + value_in(table, "mode ", ";");
        auto title = [&](const TableRow& row) { return "softmax in attention: " + row.text("size") + ", " + setting; };
        for (Chart& chart : panels_of(table, title, "context length",
                                      {{"softmax's share of the time", of_time, false, BLUE},
                                       {"softmax's share of the FLOPs", of_flops, true, ORANGE}})) {
            chart.x_label = "context length S", chart.y_label = "of softmax + two products (%)";
            const std::vector<double>& y = chart.series[0].y;  // none where all is one kernel
            if (!std::all_of(y.begin(), y.end(), [](double share) { return std::isnan(share); })) {
                all.push_back(chart);
            }
        }
    }
    return all;
}

static std::vector<Chart> scaling_charts(const Table& table) {
    std::vector<Chart> charts;
    for (const char* kind : {"weak", "strong"}) {
        Chart chart{Chart::LINES, std::string(kind) + " scaling", "ranks", "speed-up", {}, {}, {}, true, true};
        chart.series.push_back({"linear", {}, true});
        bool any = false;  // else there is no step on one rank to compare with
        for (const TableRow& row : rows_of(table, {{"Scaling", kind}})) {
            // Without sync the ranks learn apart, and a ninth line would not fit.
            if (row.text("step (ms)") == "failed" || row.text("Way") == "no sync") { continue; }
            any = any || !std::isnan(row.number("speed-up"));
            if (row.text("step (ms)").compare(0, 3, "OOM") == 0) { chart.missing = "OOM"; }
            const double n = row.number("Ranks");
            if (chart.x.empty() || chart.x.back() != n) { chart.x.push_back(n), chart.series[0].y.push_back(n); }
            auto line = std::find_if(chart.series.begin(), chart.series.end(),
                                     [&](const Series& s) { return s.name == row.text("Way"); });
            if (line == chart.series.end()) { line = chart.series.insert(line, {row.text("Way"), {}}); }
            line->y.resize(chart.x.size() - 1, NAN);
            line->y.push_back(row.number("speed-up"));
        }
        for (Series& s : chart.series) { s.y.resize(chart.x.size(), NAN); }
        if (any) { charts.push_back(chart); }
    }
    return charts;
}

std::string picture_of(const std::string& command, const Tables& tables) {
    struct Picture {
        std::string command, caption, title;  // caption: what the table's has
        std::vector<Chart> (*charts)(const Table&);
    };
    static const Picture pictures[] = {
        {"pytorch_attention", "pytorch_attention:", "Attention, one kernel per operation: time and memory against S",
         attention_charts},
        {"torch_compile", "torch_compile (a)", "Attention, eager and with a fused softmax: time against S",
         compile_charts},
        {"flash_benchmarking", "flash_benchmarking:", "Naive attention and FlashAttention-2: time against S",
         flash_charts},
        {"scaling", "scaling: size", "Data parallel training: speed-up against the number of ranks", scaling_charts}};
    for (const Picture& p : pictures) {
        const Table* table = p.command == command ? table_with(tables, {p.caption}) : nullptr;
        const std::vector<Chart> charts = table ? p.charts(*table) : std::vector<Chart>();
        if (!charts.empty()) { return draw(p.title, table->caption, charts); }
    }
    return "";
}

// ---------------------------------------------------------------------------------------------------------------------
// mixed_precision_accumulation: 1000 + 0.01 as the adder sees it. Before it adds, it shifts x until both numbers' bits
// have the same weights; bits below the last of s only decide how that one is rounded.

constexpr int TOP = 10;  // the weight 2^10 lies at 0 on the axis, lower ones to its right
enum BitColour { STORED = 0, FALLS_OFF = 6, IMPLICIT = 7 };

struct Significand {  // x = digits[0].digits[1]digits[2]... * 2^exponent
    std::string digits;
    int exponent;
};
static Significand significand_of(float x, int mantissa_bits) {  // of a positive number
    Significand s{"", std::ilogb(x)};
    for (int i = 0; i <= mantissa_bits; i++) { s.digits += (int)std::ldexp(x, i - s.exponent) % 2 ? '1' : '0'; }
    return s;
}
static Row bit_row(const char* name, float x, const Significand& s, int last) {  // last: the lowest weight that counts
    Row row{strprintf("%s = %.9g", name, x), {}, false, s.digits};
    for (int i = 0; i < (int)s.digits.size(); i++) {
        int weight = s.exponent - i, colour = weight < last ? FALLS_OFF : i == 0 ? IMPLICIT : STORED;
        row.slices.push_back({TOP - weight - 0.46, TOP - weight + 0.46, colour});
    }
    return row;
}
static Timeline alignment_in(DType format, int mantissa_bits) {
    float s = rounded(1000, format), x = rounded(0.01f, format), sum = rounded(s + x, format);
    Significand large = significand_of(s, mantissa_bits), small = significand_of(x, mantissa_bits);
    int last = large.exponent - mantissa_bits, bits = mantissa_bits + 1;
    int lost = std::clamp(last - (small.exponent - mantissa_bits), 0, bits);
    return {strprintf("%s: the last bit of s is 2^%d = %g", name_of(format), last, std::ldexp(1.0, last)),
            strprintf("%d of the %d bits of x fall off; the sum is off by %.2g", lost, bits, sum - 1000.01),
            {bit_row("s", s, large, last), bit_row("x", x, small, last),
             bit_row("s + x", sum, significand_of(sum, mantissa_bits), last)}};
}
std::string alignment_picture() {
    return draw("1000 + 0.01, aligned by exponent: what is below the last bit of s falls off",
                strprintf("Each column is a weight, each box a bit. s + x is rounded to nearest. "
                          "mixed_precision_accumulation: rounded on the CPU; commit %s",
                          commit().c_str()),
                {alignment_in(F32, 23), alignment_in(F16, 10), alignment_in(BF16, 7)},
                {{"the leading 1, not stored", {}, false, IMPLICIT},
                 {"stored bit", {}, false, STORED},
                 {"bit of x that falls off", {}, false, FALLS_OFF}},
                "weight of the bit", [](double at) { return strprintf("2^%g", TOP - at); });
}
