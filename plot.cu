// plot.cu: charts as SVG. Lines on linear or logarithmic axes, stacked bars, stacked areas, timelines; title, legend,
// labels.
#include "commands.h"

#include <algorithm>

// ---------------------------------------------------------------------------------------------------------------------
// Text and colours

constexpr int WIDTH = 900, MAX_SERIES = 8;
constexpr double MARGIN = 76;   // left of the y axis, for its labels
constexpr double LETTER = 7.6;  // width of an average letter at 13 px, rather too wide: text is never measured

// Neighbours in this order differ for colour-blind eyes, too. One set is for a white page, one for a dark page.
static const char* const colours[2][MAX_SERIES] = {
    {"#2a78d6", "#1baf7a", "#eda100", "#4a3aa7", "#e34948", "#7fb8ef", "#eb6834", "#8b949e"},
    {"#3987e5", "#199e70", "#c98500", "#9085e9", "#e66767", "#245a94", "#d95926", "#6e7681"}};

static std::string style() {
    std::string css =
        "text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}"
        ".title{font-size:18px;font-weight:600}.panel{font-weight:600}.muted{fill:#59636e}"
        ".page{fill:#ffffff}.grid{stroke:#d1d9e0}.axis{stroke:#59636e}.span{stroke:#59636e;stroke-dasharray:3 3}"
        ".line{fill:none;stroke-width:2;stroke-linejoin:round}.dashed{stroke-dasharray:6 4}"
        ".slices{stroke-width:16px}.digit{fill:#000000}"
        ".peak{fill:#1f2328}.halo{paint-order:stroke;stroke:#ffffff;stroke-width:4px;stroke-linejoin:round;font-weight:"
        "600}";
    for (int dark = 0; dark < 2; dark++) {
        if (dark) {
            css +=
                "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.muted{fill:#9198a1}.page{fill:#0d1117}"
                ".grid{stroke:#2b323b}.axis,.span{stroke:#9198a1}.peak{fill:#e6edf3}.halo{stroke:#0d1117}";
        }
        for (int i = 0; i < MAX_SERIES; i++) {
            css += strprintf(".f%d{fill:%s}.s%d{stroke:%s}", i, colours[dark][i], i, colours[dark][i]);
        }
        css += dark ? "}" : "";
    }
    return "<style>" + css + "</style>\n";
}

static std::string escape(const std::string& text) {
    std::string escaped;
    for (char c : one_line(text)) {
        escaped += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : std::string(1, c);
    }
    return escaped;
}
static int colour_of(const Chart& chart, size_t k) {
    return chart.series[k].colour < 0 ? (int)k : chart.series[k].colour % MAX_SERIES;
}
static double width_of(const std::string& text) { return LETTER * text.size(); }

// anchor: start, middle or end
static std::string text_at(double x, double y, const char* anchor, const char* css, const std::string& text) {
    return strprintf("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" class=\"%s\">%s</text>\n", x, y, anchor, css,
                     escape(text).c_str());
}
static std::string line_from(double x1, double y1, double x2, double y2, const char* css) {
    return strprintf("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" class=\"%s\"/>\n", x1, y1, x2, y2, css);
}

// 12345 -> "12,345", 0.25 -> "0.25"
std::string with_commas(double value) {
    std::string text = strprintf("%.10g", value);
    if (fabs(value) < 1000 || text.find_first_not_of("0123456789") != std::string::npos) { return text; }
    for (int at = (int)text.size() - 3; at > 0; at -= 3) { text.insert(at, ","); }
    return text;
}

// ---------------------------------------------------------------------------------------------------------------------
// Axes

struct Axis {
    double low, high;    // values
    double start, stop;  // pixels
    bool log;
    double operator()(double value) const {
        double part = log ? std::log(value / low) / std::log(high / low) : (value - low) / (high - low);
        return start + part * (stop - start);
    }
};

static std::vector<double> ticks_of(const Axis& axis) {
    std::vector<double> ticks;
    if (!axis.log) {  // 1, 2 or 5 times a power of ten apart, at most 6 of them
        double step = pow(10, floor(log10((axis.high - axis.low) / 6)));
        while ((axis.high - axis.low) / step > 6) { step *= (axis.high - axis.low) / (2 * step) > 6 ? 5 : 2; }
        for (double t = ceil(axis.low / step); t * step <= axis.high; t++) { ticks.push_back(t * step); }
        return ticks;
    }
    bool few = log10(axis.high / axis.low) < 2.5;
    for (double decade = pow(10, floor(log10(axis.low))); decade <= axis.high; decade *= 10) {
        for (int m : {1, 2, 5}) {
            if ((m == 1 || few) && m * decade >= axis.low && m * decade <= axis.high) { ticks.push_back(m * decade); }
        }
    }
    return ticks;
}

// The y axis, still without its pixels, that shows all values of these charts. Stacked values count with their sum.
static Axis y_axis(const std::vector<Chart>& charts) {
    double low = INFINITY, high = -INFINITY;
    for (const Chart& chart : charts) {
        for (size_t i = 0; i < chart.series[0].y.size(); i++) {
            double sum = 0;
            for (const Series& s : chart.series) {
                if (std::isnan(s.y[i])) { continue; }
                sum += s.y[i];
                low = std::min(low, s.y[i]);
                high = std::max(high, chart.kind == Chart::LINES ? s.y[i] : sum);
            }
        }
    }
    const Chart& first = charts[0];
    if (!first.log_y) {  // room for what is written on top
        return {0, high > 0 ? high * (first.peak.empty() ? 1.08 : 1.14) : 1, 0, 0, false};
    }
    if (std::isinf(low)) { return {1, 10, 0, 0, true}; }  // no value at all: what is missing still shows
    if (!(low > 0)) {
        fail("chart '%s': a logarithmic axis takes numbers greater than 0, got %g", first.title.c_str(), low);
    }
    return {low / 1.3, high * 1.3, 0, 0, true};
}

static void check_chart(const Chart& chart) {
    size_t n = chart.kind == Chart::BARS ? chart.bars.size() : chart.x.size();
    if (chart.series.empty() || chart.series.size() > MAX_SERIES) {
        fail("chart '%s': %zu series, expected 1 to %d", chart.title.c_str(), chart.series.size(), MAX_SERIES);
    }
    for (const Series& s : chart.series) {
        if (n == 0 || s.y.size() != n) {
            fail("chart '%s': series %s has %zu values, expected %zu", chart.title.c_str(), s.name.c_str(), s.y.size(),
                 n);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// What stands between the axes. Pixels count downwards, so y.start is the bottom.

static std::string draw_lines(const Chart& chart, const Axis& x, const Axis& y) {
    std::string svg;
    std::map<double, std::set<int>> missing;  // x -> colours
    for (size_t k = 0; k < chart.series.size(); k++) {
        const Series& s = chart.series[k];
        std::string path, dots;
        bool gap = true;
        for (size_t i = 0; i < s.y.size(); i++) {
            if (std::isnan(s.y[i])) {
                gap = true;
                if (!chart.missing.empty() && missing[chart.x[i]].insert(colour_of(chart, k)).second) {
                    svg += text_at(x(chart.x[i]), y.stop - 10 + 15.0 * missing[chart.x[i]].size(), "middle",
                                   strprintf("f%d", colour_of(chart, k)).c_str(), chart.missing);
                }
                continue;
            }
            path += strprintf("%s%.1f %.1f", gap ? "M" : "L", x(chart.x[i]), y(s.y[i]));
            dots += strprintf("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" class=\"f%d\"/>", x(chart.x[i]), y(s.y[i]),
                              colour_of(chart, k));
            gap = false;
        }
        svg += strprintf("<path class=\"line s%d%s\" d=\"%s\"/>%s\n", colour_of(chart, k), s.dashed ? " dashed" : "",
                         path.c_str(), dots.c_str());
    }
    return svg;
}

// Degrees by which the labels under bars are turned, so that they do not touch, nor leave the page on the left.
static double slant_of(const Chart& chart, double plot_width) {
    double slot = plot_width / chart.bars.size();
    bool fit = std::all_of(chart.bars.begin(), chart.bars.end(), [&](auto& bar) { return width_of(bar) + 6 <= slot; });
    bool slanted = slot > 24;
    for (size_t i = 0; i < chart.bars.size(); i++) {
        slanted &= width_of(chart.bars[i]) * cos(35 * M_PI / 180) < MARGIN + (i + 0.5) * slot;
    }
    return fit ? 0 : slanted ? 35 : 90;
}

static std::string draw_bars(const Chart& chart, const Axis& x, const Axis& y) {
    std::string svg;
    double slot = (x.stop - x.start) / chart.bars.size(), bar = std::min(slot * 0.7, 90.0);
    double slant = slant_of(chart, x.stop - x.start);
    for (size_t i = 0; i < chart.bars.size(); i++) {
        double middle = x.start + (i + 0.5) * slot, sum = 0;
        bool missing = false;
        for (size_t k = 0; k < chart.series.size(); k++) {
            double value = chart.series[k].y[i];
            if (std::isnan(value)) {
                missing = true;
                continue;
            }
            svg += strprintf("<rect x=\"%.1f\" y=\"%.2f\" width=\"%.1f\" height=\"%.2f\" class=\"f%d\"/>\n",
                             middle - bar / 2, y(sum + value), bar, y(sum) - y(sum + value), colour_of(chart, k));
            sum += value;
        }
        std::string top = missing ? "OOM" : sum >= 100 ? strprintf("%.0f", sum) : strprintf("%.3g", sum);
        if (width_of(top) < slot) { svg += text_at(middle, y(sum) - 6, "middle", "value", top); }
        if (slant > 0) {
            svg += strprintf("<text transform=\"translate(%.1f %.1f) rotate(%g)\" text-anchor=\"end\">%s</text>\n",
                             middle + 4, y.start + 16, -slant, escape(chart.bars[i]).c_str());
        } else {
            svg += text_at(middle, y.start + 18, "middle", "tick", chart.bars[i]);
        }
    }
    return svg;
}

static double stacked(const Chart& chart, size_t series, size_t i) {
    double sum = 0;
    for (size_t k = 0; k <= series; k++) { sum += chart.series[k].y[i]; }
    return sum;
}

// One point per pixel column: the highest of the values that fall into it or still hold there.
static std::vector<size_t> thinned(const Chart& chart, const Axis& x) {
    std::vector<size_t> chosen;
    size_t last = chart.series.size() - 1, next = 0, n = chart.x.size();
    for (double pixel = x.start; pixel < x.stop; pixel++) {
        size_t best = next ? next - 1 : 0;
        for (; next < n && x(chart.x[next]) < pixel + 1; next++) {
            if (stacked(chart, last, next) > stacked(chart, last, best)) { best = next; }
        }
        chosen.push_back(best);
    }
    return chosen;
}

static std::string draw_areas(const Chart& chart, const Axis& x, const Axis& y) {
    std::string svg;
    std::vector<size_t> points = thinned(chart, x);
    // The layers go from the whole stack down to the lowest, each from the bottom up, so that the next covers its lower
    // part.
    for (int k = (int)chart.series.size() - 1; k >= 0; k--) {
        std::string path = strprintf("M%.0f %.1f", x.start, y.start), before;
        for (size_t i = 0; i < points.size(); i++) {
            std::string level = strprintf("%.1f", y(stacked(chart, k, points[i])));
            if (level != before) { path += strprintf("H%.0fV%s", x.start + i, level.c_str()); }
            before = level;
        }
        path += strprintf("H%.1fV%.1fZ", x.stop, y.start);
        svg += strprintf("<path class=\"f%d\" d=\"%s\"/>\n", colour_of(chart, k), path.c_str());
    }
    double row_end[2] = {0, 0};  // names that would touch go to a second row
    for (const Span& span : chart.spans) {
        double from = x(span.from), to = x(span.to), middle = (from + to) / 2, half = width_of(span.name) / 2;
        middle = std::min(std::max(middle, x.start + half), x.stop - half);
        int row = middle - half < row_end[0] + 6 ? 1 : 0;
        row_end[row] = middle + half;
        for (double at : {from, to}) { svg += line_from(at, y.start, at, y.stop, "span"); }
        svg += text_at(middle, y.stop - 8 - 16 * row, "middle", "muted", span.name);
    }
    if (!chart.peak.empty()) {
        size_t last = chart.series.size() - 1, top = 0;
        for (size_t i = 0; i < chart.x.size(); i++) {
            if (stacked(chart, last, i) > stacked(chart, last, top)) { top = i; }
        }
        double px = x(chart.x[top]), py = y(stacked(chart, last, top)), half = width_of(chart.peak) / 2 + 8;
        double tx = std::min(std::max(px, x.start + half), x.stop - half);
        svg += strprintf("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" class=\"peak\"/>\n", px, py);
        svg += text_at(tx, py - 10, "middle", "halo", chart.peak);
    }
    return svg;
}

// ---------------------------------------------------------------------------------------------------------------------
// A panel, with its axes, grid and labels around what is drawn; then the page

struct Box {
    double left, top, right, bottom;
};

static double space_below(const Chart& chart, double plot_width) {
    double labels = 26;
    if (chart.kind == Chart::BARS) {
        double turned = sin(slant_of(chart, plot_width) * M_PI / 180);
        for (const std::string& bar : chart.bars) { labels = std::max(labels, 24 + turned * width_of(bar)); }
    }
    return labels + (chart.x_label.empty() ? 0 : 20);
}

static std::string draw_panel(const Chart& chart, Box box, Axis y) {
    std::string svg;
    if (!chart.title.empty()) { svg += text_at(box.left + 8, box.top + 14, "start", "panel", chart.title); }
    double above = (chart.title.empty() ? 4 : 26) + (chart.spans.empty() ? 0 : 36);
    double left = box.left + MARGIN, right = box.right - 12;
    y.start = box.bottom - space_below(chart, right - left), y.stop = box.top + above;
    Axis x{0, 1, left, right, chart.log_x};
    if (chart.kind != Chart::BARS) {
        x.low = chart.x.front(), x.high = chart.x.back();
        if (!(x.high > x.low)) { x.high = x.low * 2 + 1; }
        if (chart.kind == Chart::LINES) { x.start += 14, x.stop -= 14; }
    }
    for (double t : ticks_of(y)) {
        svg += line_from(left, y(t), right, y(t), "grid");
        svg += text_at(left - 8, y(t) + 4.5, "end", "ytick", with_commas(t));
    }
    double label_end = 0;
    for (double t : chart.kind == Chart::BARS ? std::vector<double>() : x.log ? chart.x : ticks_of(x)) {
        bool kibi = x.log && t >= 1024 && fmod(t, 1024) == 0;
        std::string label = kibi ? with_commas(t / 1024) + "K" : with_commas(t);
        svg += line_from(x(t), y.start, x(t), y.start + 5, "axis");
        if (x(t) - width_of(label) / 2 < label_end + 4) { continue; }  // the tick stays, without its label
        label_end = x(t) + width_of(label) / 2;
        svg += text_at(x(t), y.start + 19, "middle", "xtick", label);
    }
    switch (chart.kind) {
        case Chart::LINES: svg += draw_lines(chart, x, y); break;
        case Chart::BARS: svg += draw_bars(chart, x, y); break;
        case Chart::AREAS: svg += draw_areas(chart, x, y); break;
    }
    svg += line_from(left, y.start, right, y.start, "axis");
    svg += text_at((left + right) / 2, box.bottom - 4, "middle", "muted", chart.x_label);
    svg += strprintf("<text transform=\"translate(%.1f %.1f) rotate(-90)\" text-anchor=\"middle\" class=\"muted\">%s",
                     box.left + 12, (y.start + y.stop) / 2, escape(chart.y_label).c_str());
    return svg + "</text>\n";
}

static std::vector<std::string> wrap(const std::string& text, double width) {
    std::vector<std::string> lines = {""};
    for (size_t start = 0, end; start < text.size(); start = end + 1) {
        end = std::min(text.find(' ', start), text.size());
        std::string word = text.substr(start, end - start);
        if (!lines.back().empty() && width_of(lines.back() + " " + word) > width) { lines.push_back(""); }
        lines.back() += (lines.back().empty() ? "" : " ") + word;
    }
    return lines;
}

// y goes on to what stands below, in draw_legend, too.
static std::string draw_title(const std::string& title, const std::string& subtitle, double& y) {
    std::string svg = text_at(16, y = 32, "start", "title", title);
    for (const std::string& line : wrap(subtitle, WIDTH - 32)) { svg += text_at(16, y += 20, "start", "muted", line); }
    return svg;
}
static std::string draw_legend(const Chart& first, double& y) {
    std::string svg;
    double x = 16;
    y += 28;
    for (size_t k = 0; k < first.series.size(); k++) {
        const Series& s = first.series[k];
        double mark = first.kind == Chart::LINES ? 26 : 20, wide = mark + width_of(s.name) + 16;
        if (x + wide > WIDTH) { x = 16, y += 22; }
        if (first.kind == Chart::LINES) {
            svg += strprintf("<path class=\"line s%d%s\" d=\"M%.1f %.1fh20\"/>", colour_of(first, k),
                             s.dashed ? " dashed" : "", x, y - 4);
        } else {
            svg += strprintf("<rect x=\"%.1f\" y=\"%.1f\" width=\"14\" height=\"14\" rx=\"2\" class=\"f%d\"/>", x,
                             y - 11, colour_of(first, k));
        }
        svg += text_at(x + mark, y, "start", "legend", s.name);
        x += wide;
    }
    y += 16;
    return svg;
}
static std::string page(const std::string& title, int height, const std::string& svg) {
    return strprintf(
               "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
               "role=\"img\">\n<title>%s</title>\n",
               WIDTH, height, WIDTH, height, escape(title).c_str()) +
           style() + strprintf("<rect class=\"page\" width=\"%d\" height=\"%d\"/>\n", WIDTH, height) + svg + "</svg>\n";
}

static bool in_legend(const Chart& chart, const Chart& first) {
    for (size_t k = 0; k < chart.series.size(); k++) {
        bool found = false;
        for (size_t i = 0; i < first.series.size(); i++) {
            found |= chart.series[k].name == first.series[i].name && colour_of(chart, k) == colour_of(first, i);
        }
        if (!found) { return false; }
    }
    return chart.kind == first.kind;
}
// The panels under one legend.
static std::string draw_group(const std::vector<Chart>& panels, double tall, double& y) {
    bool lines = panels[0].kind == Chart::LINES;
    std::string svg = draw_legend(panels[0], y);
    int columns = panels.size() > 1 && lines ? 2 : 1;
    double wide = (double)(WIDTH - 16) / columns;
    for (const Chart& chart : panels) {  // long labels do not take the bars' room
        tall = std::max(tall, 230 + space_below(chart, wide - MARGIN - 12));
    }
    for (size_t i = 0; i < panels.size(); i++) {
        double left = 8 + wide * (i % columns), top = y + (tall + 14) * (i / columns);
        Box box{left, top, left + wide - (columns > 1 ? 8 : 0), top + tall};
        // Lines are compared from panel to panel; stacks may be of different kinds.
        svg += draw_panel(panels[i], box, y_axis(lines ? panels : std::vector<Chart>{panels[i]}));
    }
    y += (tall + 14) * ((panels.size() + columns - 1) / columns);
    return svg;
}

std::string draw(const std::string& title, const std::string& subtitle, const std::vector<Chart>& panels) {
    if (panels.empty()) { fail("chart '%s': nothing to draw", title.c_str()); }
    for (const Chart& chart : panels) { check_chart(chart); }
    double y, tall = panels.size() == 1 ? 430 : 300;
    std::string svg = draw_title(title, subtitle, y);
    for (auto from = panels.begin(); from != panels.end();) {
        auto to = std::find_if(from, panels.end(), [&](const Chart& chart) { return !in_legend(chart, *from); });
        svg += draw_group({from, to}, tall, y);
        from = to;
    }
    return page(title, (int)y, svg);
}

Chart share_chart(const std::string& title, const std::vector<std::string>& bars, std::vector<Series> classes) {
    for (size_t i = 0; i < bars.size(); i++) {
        double sum = 0;
        for (const Series& s : classes) { sum += s.y.at(i); }
        for (Series& s : classes) { s.y[i] *= 100 / sum; }
    }
    return {Chart::BARS, title, "", "share of the time (%)", {}, bars, classes};
}

// ---------------------------------------------------------------------------------------------------------------------
// Timelines

std::vector<Slice> join_neighbours(const std::vector<Slice>& slices, double pixel) {
    std::vector<Slice> joined;
    for (const Slice& s : slices) {
        bool same = !joined.empty() && joined.back().colour == s.colour && s.start - joined.back().end < pixel / 2;
        if (same && std::min(s.end - s.start, joined.back().end - joined.back().start) < pixel) {
            joined.back().end = std::max(joined.back().end, s.end);
        } else {
            joined.push_back(s);
        }
    }
    return joined;
}

// Slices are pieces of thick lines, one path per colour, since there may be thousands. Wide slices leave a seam.
static std::string draw_row(const Row& row, const Axis& x, double y) {
    std::map<int, std::string> paths;
    for (const Slice& s : join_neighbours(row.slices, x.high / (x.stop - x.start))) {
        double wide = x(s.end) - x(s.start);
        paths[s.colour] += strprintf("M%.2f %.1fh%.2f", x(s.start), y, wide > 2 ? wide - 0.4 : wide);
    }
    std::string svg = text_at(x.start - 8, y + 4.5, "end", "muted", row.name);
    for (const auto& [colour, path] : paths) {
        svg += strprintf("<path class=\"slices s%d\" d=\"%s\"/>\n", colour, path.c_str());
    }
    for (size_t i = 0; i < row.digits.size(); i++) {
        const Slice& s = row.slices.at(i);
        svg += text_at(x((s.start + s.end) / 2), y + 4.5, "middle", "digit", row.digits.substr(i, 1));
    }
    return svg;
}

std::string draw(const std::string& title, const std::string& subtitle, const std::vector<Timeline>& timelines,
                 const std::vector<Series>& legend, const std::string& x_label,
                 const std::function<std::string(double)>& tick) {
    Axis x{0, 0, 140, WIDTH - 20, false};
    for (const Timeline& t : timelines) {
        for (const Row& row : t.rows) {
            x.start = std::max(x.start, 16 + width_of(row.name) + 8);
            for (const Slice& s : row.slices) { x.high = std::max(x.high, s.end); }
        }
    }
    if (!(x.high > 0)) { fail("chart '%s': nothing to draw", title.c_str()); }
    double y;
    std::string svg = draw_title(title, subtitle, y), rows;
    svg += draw_legend({Chart::BARS, "", "", "", {}, {}, legend}, y);
    for (const Timeline& t : timelines) {
        y += 20;
        rows += text_at(16, y, "start", "panel", t.title) + text_at(x.stop, y, "end", "muted remark", t.remark);
        double top = y + 4;
        y -= 2;
        for (const Row& row : t.rows) { rows += draw_row(row, x, y += row.apart ? 24 : 18); }
        y += 12;
        for (double at : ticks_of(x)) { svg += line_from(x(at), top, x(at), y, "grid"); }
    }
    for (double at : ticks_of(x)) { svg += text_at(x(at), y + 17, "middle", "xtick", tick(at)); }
    svg += text_at((x.start + x.stop) / 2, y + 37, "middle", "muted", x_label);
    return page(title, (int)y + 48, svg + rows);
}
