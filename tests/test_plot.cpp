// Tests of plot.cu, on the text of the pictures: python3's xml.dom says whether they are well-formed, and the shapes'
// coordinates are compared with those of the axes' ticks.
#include "answers.h"
#include "test.h"

#include <cstdio>
#include <cstdlib>

#include <unistd.h>

// The numbers at the # of each place in the text that looks like the pattern.
static std::vector<std::vector<double>> numbers_of(const std::string& text, const std::string& pattern) {
    std::vector<std::string> parts;  // what stands between the numbers
    for (size_t start = 0, end; start <= pattern.size(); start = end + 1) {
        end = std::min(pattern.find('#', start), pattern.size());
        parts.push_back(pattern.substr(start, end - start));
    }
    std::vector<std::vector<double>> all;
    for (size_t at = text.find(parts[0]); at != std::string::npos; at = text.find(parts[0], at + 1)) {
        std::vector<double> numbers;
        const char* p = text.c_str() + at + parts[0].size();
        for (size_t i = 1; i < parts.size(); i++) {
            char* end = nullptr;
            double number = strtod(p, &end);
            if (end == p || parts[i].compare(0, parts[i].size(), end, strnlen(end, parts[i].size())) != 0) { break; }
            numbers.push_back(number);
            p = end + parts[i].size();
        }
        if (numbers.size() + 1 == parts.size()) { all.push_back(numbers); }
    }
    return all;
}

// The line through two ticks of the y axis: pixel to value, or to its logarithm.
struct PixelScale {
    double pixel0, per_pixel, value0;
    bool log;
    explicit PixelScale(std::string svg, bool log = false) : log(log) {
        svg.erase(std::remove(svg.begin(), svg.end(), ','), svg.end());  // of 10,000
        auto ticks = numbers_of(svg, "y=\"#\" text-anchor=\"end\" class=\"ytick\">#<");
        REQUIRE(ticks.size() >= 3);
        for (auto& tick : ticks) { tick[1] = log ? std::log(tick[1]) : tick[1]; }
        pixel0 = ticks[0][0], value0 = ticks[0][1];
        per_pixel = (ticks.back()[1] - value0) / (ticks.back()[0] - pixel0);
        pixel0 -= 4.5;  // a label's baseline lies below its tick
    }
    double operator()(double pixel) const {
        double value = value0 + (pixel - pixel0) * per_pixel;
        return log ? std::exp(value) : value;
    }
};

static bool has_xml_parser() { return system("python3 -c 'import xml.dom.minidom' 2>/dev/null") == 0; }
static void check_well_formed(const std::string& svg) {
    Folder folder;
    std::string path = folder / "x.svg";
    save_file(path, svg);
    CHECK(system(("python3 -c \"import xml.dom.minidom as d, sys; d.parse(sys.argv[1])\" " + path).c_str()) == 0);
}

static Chart two_layers() {
    return {
        Chart::AREAS, "", "time (ms)", "memory (MiB)", {0, 10, 20, 40}, {}, {{"a", {1, 3, 2, 2}}, {"b", {0, 1, 4, 0}}}};
}

TEST_CASE("plot: every kind is well-formed XML, whatever the names are") {
    if (!has_xml_parser()) { return skip_this_case("no python3"); }
    Chart areas = two_layers();
    areas.spans = {{"forward & <back>", 0, 20}, {"optimizer", 20, 40}};
    areas.peak = "peak \"6\" MiB";
    Chart bars{Chart::BARS, "b", "", "ms", {}, {"<small>", "2.7B"}, {{"forward", {1, NAN}}, {"backward", {2, 3}}}};
    Chart lines{Chart::LINES, "l", "S", "ms", {128, 256, 65536}, {}, {{"naive", {0.01, NAN, 70}, true}}};
    lines.log_x = lines.log_y = true, lines.missing = "<OOM>";
    for (const std::string& svg :
         {draw("A & B", "<caption>", {areas}), draw("bars", "", {bars}), draw("lines", "", {lines, lines, lines}),
          draw("one bar", "", {share_chart("", {"x"}, {{"y", {0.5}}})})}) {
        check_well_formed(svg);
        CHECK(svg.find("prefers-color-scheme:dark") != std::string::npos);
        CHECK(svg.find("nan") == std::string::npos);
    }
}

TEST_CASE("plot: areas are stacked, and lie where the axis says") {
    std::string svg = draw("t", "", {two_layers()});
    PixelScale value(svg);
    // One path per layer, the whole stack first; each starts at the bottom left, and goes to its first level.
    std::map<int, std::vector<double>> levels;
    for (int k : {0, 1}) {
        std::string start = strprintf("<path class=\"f%d\" d=\"M", k);
        size_t at = svg.find(start);
        REQUIRE(at != std::string::npos);
        std::string path = svg.substr(at, svg.find('>', at) - at);
        CHECK(std::fabs(value(numbers_of(path, "M# #").at(0)[1])) < 0.02);
        for (const auto& level : numbers_of(path, "V#")) { levels[k].push_back(value(level[0])); }
    }
    std::map<int, std::vector<double>> want = {
        {0, {1, 3, 2, 0}}, {1, {1, 4, 6, 0}}};  // 0: back to the bottom; the last point has no width
    for (int k : {0, 1}) {
        REQUIRE(levels[k].size() == want[k].size());
        for (size_t i = 0; i < want[k].size(); i++) { CHECK(std::fabs(levels[k][i] - want[k][i]) < 0.02); }
    }
}

TEST_CASE("plot: thinning out keeps the one highest point among 100,000") {
    Chart chart{Chart::AREAS, "", "", "", {}, {}, {{"a", {}}}};
    for (int i = 0; i < 100000; i++) {
        chart.x.push_back(i);
        chart.series[0].y.push_back(i == 77777 ? 100 : 50 + i % 2);
    }
    std::string svg = draw("t", "", {chart});
    CHECK(svg.size() < 50000);
    PixelScale value(svg);
    double highest = 0;
    for (const auto& level : numbers_of(svg, "V#")) { highest = std::max(highest, value(level[0])); }
    CHECK(std::fabs(highest - 100) < 0.3);
}

TEST_CASE("plot: bars are stacked, missing parts say OOM, shares add up to 100") {
    Chart bars{Chart::BARS, "", "", "ms", {}, {"x", "y"}, {{"a", {10, 20}}, {"b", {30, NAN}}}};
    std::string svg = draw("t", "", {bars});
    PixelScale value(svg);
    auto rects = numbers_of(svg, "<rect x=\"#\" y=\"#\" width=\"#\" height=\"#\" class=\"f#\"/>\n");
    REQUIRE(rects.size() == 3);
    double want[3][2] = {{10, 0}, {40, 10}, {20, 0}};  // top and bottom
    for (int i = 0; i < 3; i++) {
        CHECK(std::fabs(value(rects[i][1]) - want[i][0]) < 0.1);
        CHECK(std::fabs(value(rects[i][1] + rects[i][3]) - want[i][1]) < 0.1);
    }
    CHECK(rects[1][0] == rects[0][0]);
    CHECK(svg.find(">OOM<") != std::string::npos);
    CHECK(svg.find(">40<") != std::string::npos);

    auto turned = [](const std::string& first) {  // degrees, of 20 labels
        Chart many{Chart::BARS, "", "", "ms", {}, std::vector<std::string>(20, "fp32 eager"), {{"a", {}}}};
        many.bars[0] = first;
        many.series[0].y.assign(20, 1);
        std::string picture = draw("t", "", {many, many});
        auto tops = numbers_of(picture, "<rect x=\"#\" y=\"#\" width=\"#\" height=\"#\" class=\"f0\"/>\n");
        CHECK(tops.at(0)[3] > 150);  // the bars keep their room
        return numbers_of(picture, "rotate(-#)\" text-anchor=\"end\"").at(0)[0];
    };
    CHECK(turned("fp32 eager") == 35);
    CHECK(turned("fp32 eager 1024 forward") == 90);  // it would leave the page

    Chart shares = share_chart("", {"x"}, {{"a", {1}}, {"b", {3}}});
    CHECK(shares.series[0].y[0] == 25);
    CHECK(shares.series[1].y[0] == 75);
}

TEST_CASE("plot: on logarithmic axes a power is a straight line") {
    Chart chart{Chart::LINES, "", "S", "ms", {128, 256, 512, 1024}, {}, {{"s", {1, 4, 16, 64}}}};
    chart.log_x = chart.log_y = true;
    auto dots = numbers_of(draw("t", "", {chart}), "cx=\"#\" cy=\"#\"");
    REQUIRE(dots.size() == 4);
    for (int i = 1; i < 3; i++) {
        for (int j : {0, 1}) { CHECK(std::fabs(dots[i + 1][j] - 2 * dots[i][j] + dots[i - 1][j]) < 0.3); }
    }
    CHECK(dots[3][1] < dots[0][1]);  // upwards
    chart.series[0].y[0] = 0;
    CHECK_THROWS_AS(draw("t", "", {chart}), Failure);
}

TEST_CASE("plot: where a series has no value, the chart says so in its colour, above the others") {
    Chart chart{Chart::LINES, "", "S", "ms", {1, 2, 4}, {}, {{"a", {1, NAN, NAN}}, {"b", {1, 2, NAN}}}};
    CHECK(draw("t", "", {chart}).find("OOM") == std::string::npos);
    chart.missing = "OOM";
    std::string svg = draw("t", "", {chart});
    auto marks = numbers_of(svg, "<text x=\"#\" y=\"#\" text-anchor=\"middle\" class=\"f#\">OOM<");
    auto ticks = numbers_of(svg, "<text x=\"#\" y=\"#\" text-anchor=\"middle\" class=\"xtick\">#<");
    REQUIRE(marks.size() == 3);
    REQUIRE(ticks.size() >= 3);
    CHECK(marks[0][2] == 0);
    CHECK(marks[2][2] == 1);
    CHECK(marks[0][0] < marks[1][0]);
    CHECK(marks[1][0] == marks[2][0]);
    CHECK(marks[1][1] + 13 < marks[2][1]);  // one below the other

    chart.log_x = chart.log_y = true;
    for (Series& s : chart.series) { s.y = {NAN, NAN, NAN}; }
    svg = draw("t", "", {chart});  // nothing ran
    CHECK(numbers_of(svg, "class=\"f#\">OOM<").size() == 6);
    CHECK(has(svg, "class=\"ytick\""));
}

TEST_CASE("plot: panels share a legend until one has a series of its own") {
    Chart lines{Chart::LINES, "", "S", "ms", {1, 2}, {}, {{"a", {1, 2}}, {"b", {2, 3}}}};
    Chart fewer = lines, other = lines, recoloured = lines;
    fewer.series.pop_back();
    other.series[0].name = "c";
    recoloured.series[0].colour = 5;
    auto legend_of = [](const std::vector<Chart>& panels) {
        return numbers_of(draw("t", "", panels), "text-anchor=\"start\" class=\"legend#").size() +
               numbers_of(draw("t", "", panels), "<path class=\"line s#\" d=\"M# #h20\"/>").size();
    };
    CHECK(legend_of({lines, lines, fewer}) == 2);
    CHECK(legend_of({lines, other}) == 4);
    CHECK(legend_of({lines, recoloured}) == 4);
    CHECK(legend_of({fewer, lines, lines}) == 3);
}

TEST_CASE("plot: what does not fit together is refused") {
    Chart chart = two_layers();
    chart.series[0].y.pop_back();
    CHECK_THROWS_AS(draw("t", "", {chart}), Failure);
    CHECK_THROWS_AS(draw("t", "", {}), Failure);
    chart = two_layers();
    chart.series.resize(9, chart.series[0]);
    CHECK_THROWS_AS(draw("t", "", {chart}), Failure);
}

TEST_CASE("plot: neighbours in a row are joined where a pixel cannot tell them apart") {
    auto joined = [](const std::vector<Slice>& slices) {
        std::string text;
        for (const Slice& s : join_neighbours(slices, 1)) { text += strprintf("%g-%g:%d ", s.start, s.end, s.colour); }
        return text;
    };
    CHECK(joined({}) == "");
    CHECK(joined({{0, 0.2, 1}, {0.3, 0.5, 1}, {0.6, 4, 1}}) == "0-4:1 ");
    CHECK(joined({{0, 0.2, 1}, {0.8, 1, 1}}) == "0-0.2:1 0.8-1:1 ");  // the gap shows
    CHECK(joined({{0, 0.2, 1}, {0.2, 0.4, 2}, {0.4, 0.6, 1}}) == "0-0.2:1 0.2-0.4:2 0.4-0.6:1 ");
    CHECK(joined({{0, 3, 1}, {3, 6, 1}}) == "0-3:1 3-6:1 ");  // both can be seen
    CHECK(joined({{0, 3, 1}, {0.5, 0.6, 1}}) == "0-3:1 ");    // inside the one before
}

TEST_CASE("plot: timelines lie on one axis, are well-formed and stay small") {
    std::vector<Slice> kernels;  // 100,000 of 7 us, 3 us apart
    for (int i = 0; i < 100000; i++) { kernels.push_back({0.01 * i, 0.01 * i + 0.007, 1}); }
    std::vector<Timeline> timelines = {
        {"a <b>", "1 & 2", {{"x", {{0, 250, 0}, {500, 1000, 4}}}, {"y", {{250, 500, 4}}}}},
        {"thousands", "", {{"x", kernels, true}}}};
    std::string svg = draw("t", "s", timelines, {{"zero", {}, false, 0}, {"four", {}, false, 4}}, "ms");
    CHECK(svg.size() < 10000);
    auto ticks = numbers_of(svg, "<text x=\"#\" y=\"#\" text-anchor=\"middle\" class=\"xtick\">#<");
    REQUIRE(ticks.size() >= 3);
    double per_pixel = (ticks[1][2] - ticks[0][2]) / (ticks[1][0] - ticks[0][0]), zero = ticks[0][0];
    auto slices = numbers_of(svg, "M# #h#");
    REQUIRE(slices.size() == 4);
    double want[4][2] = {{0, 250}, {500, 1000}, {250, 500}, {0, 1000}};
    for (int i = 0; i < 4; i++) {
        CHECK(std::fabs((slices[i][0] - zero) * per_pixel - want[i][0]) < 0.5);
        CHECK(std::fabs((slices[i][0] + slices[i][2] - zero) * per_pixel - want[i][1]) < 1);
        CHECK(slices[i][0] + slices[i][2] <= 880);
    }
    CHECK(slices[0][1] == slices[1][1]);
    CHECK(slices[1][1] < slices[2][1]);
    CHECK(slices[2][1] < slices[3][1]);
    auto size = numbers_of(svg, "width=\"900\" height=\"#\" viewBox=\"0 0 900 #\"");
    REQUIRE(size.size() == 1);
    CHECK(size[0][0] == size[0][1]);
    CHECK(slices[3][1] + 40 < size[0][0]);
    CHECK(svg.find("class=\"f4\"") != std::string::npos);  // in the legend
    CHECK_THROWS_AS(draw("t", "", std::vector<Timeline>{{"empty", "", {{"x", {}}}}}, {}, ""), Failure);
    if (!has_xml_parser()) { return skip_this_case("no python3"); }
    check_well_formed(svg);
}

TEST_CASE("plot: --plot wants an .svg in a folder that exists, before anything is measured") {
    for (const char* path : {"/nonexistent/x.svg", "x.png", ".svg", "/tmp"}) {
        Run r = run_cs336({"flash_benchmarking", "--quick", "--plot", path});
        CHECK(r.exit_code == 2);
        CHECK(r.out == "");
        CHECK(r.err.find("--plot: got '" + std::string(path) + "', takes a file name that ends in .svg") !=
              std::string::npos);
    }
    Folder folder;
    std::string path = folder / "x.svg";
    Run r = run_cs336({"pytorch_attention", "--device", "cpu", "--quick", "--steps", "1", "--plot", path});
    CHECK(r.exit_code == 0);
    CHECK(access(path.c_str(), R_OK) == 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// pictures.cu, and precision.cu's: the numbers in a picture are those of the table

static Tables recorded(const char* command) {
    return tables_in(read_file(std::string("tests/fixtures/answers/") + command + ".md"));
}
using Line = std::vector<std::pair<double, double>>;  // x and y; y NaN: did not fit

static void check_panel(const std::string& svg, const std::string& title, const std::vector<Line>& lines) {
    CAPTURE(title);
    size_t at = svg.find("class=\"panel\">" + title + "<");
    REQUIRE(at != std::string::npos);
    std::string panel = svg.substr(at, svg.find("class=\"panel\">", at + 1) - at);
    PixelScale value(panel, true);
    auto dots = numbers_of(panel, "<circle cx=\"#\" cy=\"#\"");
    auto sum = [&](auto value_of) {
        double total = 0;
        for (const Line& line : lines) {
            for (auto& point : line) { total += value_of(point); }
        }
        return total;
    };
    auto is_missing = [](auto& point) { return std::isnan(point.second); };
    REQUIRE(dots.size() == sum([&](auto& point) { return !is_missing(point); }));
    CHECK(has(panel, ">OOM<") == (sum(is_missing) > 0));
    size_t next = 0;
    double left = dots.at(0)[0], first_x = lines.at(0).at(0).first, per_doubling = 0;
    for (const Line& line : lines) {
        for (auto& [x, y] : line) {
            if (std::isnan(y)) { continue; }
            auto& dot = dots[next++];
            CHECK(value(dot[1]) == doctest::Approx(y).epsilon(0.01));
            double doublings = std::log2(x / first_x);
            if (per_doubling == 0 && doublings > 0) { per_doubling = (dot[0] - left) / doublings; }
            CHECK(dot[0] == doctest::Approx(left + doublings * per_doubling).epsilon(0.002));
        }
    }
}
static Line line_of(const std::vector<TableRow>& rows, const char* x, const char* y, double factor = 1) {
    Line line;
    for (const TableRow& row : rows) { line.push_back({row.number(x), factor * row.number(y)}); }
    return line;
}

TEST_CASE("pictures: times and memory of pytorch_attention, what did not fit is marked") {
    Tables tables = recorded("pytorch_attention");
    Table& grid = tables[0];
    for (int row : {4, 19}) {  // the longest of D 16 and D 128
        for (int column : {2, 3, 4}) { grid.rows.at(row).at(column) = "N/A"; }
    }
    std::string svg = picture_of("pytorch_attention", tables);
    std::vector<Line> memory;
    for (const char* D : {"16", "32", "64", "128"}) {
        auto rows = rows_of(grid, {{"d_model", D}});
        check_panel(svg, std::string("d_model ") + D,
                    {line_of(rows, "seq_len", "forward_time", 1000), line_of(rows, "seq_len", "backward_time", 1000)});
        memory.push_back(line_of(rows, "seq_len", "memory_usage_mb"));
    }
    check_panel(svg, "held when backward begins: inputs, and what forward saved", memory);
    for (const char* words : {"time (ms)", "memory (MiB)", "sequence length S", "forward", "backward", "NVIDIA H200"}) {
        CHECK_MESSAGE(has(svg, words), words);
    }
    CHECK(numbers_of(svg, "class=\"legend\">d_model #<").size() == 4);
}

TEST_CASE("pictures: times of torch_compile and of flash_benchmarking") {
    Tables tables = recorded("torch_compile");
    std::string svg = picture_of("torch_compile", tables);
    for (const char* D : {"16", "32", "64", "128"}) {
        std::vector<Line> lines;
        for (const char* column : {"vanilla fw (ms)", "vanilla bw (ms)", "compiled fw (ms)", "compiled bw (ms)"}) {
            lines.push_back(line_of(rows_of(tables[0], {{"d_model", D}}), "seq_len", column));
        }
        check_panel(svg, std::string("d_model ") + D, lines);
    }
    tables = recorded("flash_benchmarking");
    svg = picture_of("flash_benchmarking", tables);
    for (const char* dtype : {"bfloat16", "float32"}) {
        for (const char* D : {"16", "64", "128"}) {
            auto rows = rows_of(tables[0], {{"dtype", dtype}, {"D", D}});
            std::vector<Line> lines;
            for (const char* column : {"Naive Fwd", "Naive Bwd", "Flash Fwd", "Flash Bwd"}) {
                lines.push_back(line_of(rows, "Seq", column));
            }
            if (!rows.empty()) { check_panel(svg, std::string(dtype) + ", D " + D, lines); }
        }
    }
    CHECK(picture_of("nsys_profile", recorded("nsys_profile")) == "");  // draws for itself
}

TEST_CASE("pictures: softmax's share of the time and of the FLOPs") {
    Tables tables = recorded("nsys_profile");
    for (Table& table : tables) {  // a second length for each setting, with its times exchanged
        if (!has(table.caption, "nsys_profile (e): softmax")) { continue; }
        std::vector<std::string> longer = table.rows.at(0);
        longer.at(1) = "1024";
        std::swap(longer.at(2), longer.at(3));
        table.rows.push_back(longer);
    }
    std::vector<Chart> charts = softmax_charts(tables);
    REQUIRE(charts.size() == 2);  // mode flash has one kernel for all three
    CHECK(charts[0].title == "softmax in attention: large, fp32 eager");
    CHECK(charts[0].x == std::vector<double>{256, 1024});
    REQUIRE(charts[0].series.size() == 2);
    CHECK(charts[0].series[0].y[0] == doctest::Approx(100 * 2.821 / (2.821 + 1.970)));
    CHECK(charts[0].series[0].y[1] == doctest::Approx(100 * 1.970 / (2.821 + 1.970)));
    CHECK(charts[0].series[1].y[0] == doctest::Approx(100 / 52.2));
    CHECK(charts[1].title == "softmax in attention: large, bf16 eager");
    CHECK(charts[1].series[0].y[0] == doctest::Approx(100 * 3.102 / (3.102 + 0.455)));
}

TEST_CASE("pictures: a table's hostile text is escaped") {
    if (!has_xml_parser()) { return skip_this_case("no python3"); }
    Tables tables = recorded("flash_benchmarking");
    tables[0].caption += "; <script>alert(1)</script> & \"'\x1b";
    for (auto& row : tables[0].rows) { row[2] = "<b>&"; }
    tables[0].rows.resize(3);
    std::string svg = picture_of("flash_benchmarking", tables);
    CHECK(!has(svg, "<script>"));
    CHECK(has(svg, "&lt;b&gt;&amp;, D 16"));
    check_well_formed(svg);
}

TEST_CASE("pictures: the bits of 1000 + 0.01, aligned") {
    Folder folder;
    std::string path = folder / "x.svg";
    Run r = run_cs336({"mixed_precision_accumulation", "--plot", path});
    REQUIRE(r.exit_code == 0);
    std::string svg = read_file(path);
    struct Bits {  // of 1000, of 0.01 and of their sum, as IEEE 754 has them, with the leading 1
        const char *s, *x, *sum;
    };
    const Bits expected[] = {
        {"111110100000000000000000", "101000111101011100001010", "111110100000000010100100"},  // fp32
        {"11111010000", "10100011111", "11111010000"},                                         // fp16
        {"11111010", "10100100", "11111010"}};                                                 // bf16
    auto digits = numbers_of(svg, "<text x=\"#\" y=\"#\" text-anchor=\"middle\" class=\"digit\">#<");
    size_t next = 0;
    double column = digits.at(1)[0] - digits.at(0)[0], s_at = digits.at(0)[0];
    for (const Bits& bits : expected) {
        for (const char* number : {bits.s, bits.x, bits.sum}) {
            double first = number == bits.x ? 9 + 7 : 0;  // 1000 begins at 2^9, 0.01 at 2^-7
            for (int i = 0; number[i]; i++) {
                REQUIRE(next < digits.size());
                CHECK(digits[next][2] == number[i] - '0');
                CHECK(digits[next++][0] == doctest::Approx(s_at + (first + i) * column).epsilon(0.005));
            }
        }
    }
    CHECK(next == digits.size());
    for (const char* words : {"16 of the 24 bits of x fall off", "11 of the 11 bits", "8 of the 8 bits",
                              "float16: the last bit of s is 2^-1 = 0.5"}) {
        CHECK_MESSAGE(has(svg, words), words);
    }
    if (has_xml_parser()) { check_well_formed(svg); }
}
