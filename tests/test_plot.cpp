// Tests of plot.cu, on the text of the pictures: python3's xml.dom says whether they are well-formed, and the shapes'
// coordinates are compared with those of the axes' ticks.
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

// The line through two ticks of the y axis: pixel to value.
struct PixelScale {
    double pixel0, per_pixel, value0;
    explicit PixelScale(const std::string& svg) {
        auto ticks = numbers_of(svg, "y=\"#\" text-anchor=\"end\" class=\"ytick\">#<");
        REQUIRE(ticks.size() >= 3);
        pixel0 = ticks[0][0], value0 = ticks[0][1];
        per_pixel = (ticks.back()[1] - value0) / (ticks.back()[0] - pixel0);
        pixel0 -= 4.5;  // a label's baseline lies below its tick
    }
    double operator()(double pixel) const { return value0 + (pixel - pixel0) * per_pixel; }
};

static Chart two_layers() {
    return {
        Chart::AREAS, "", "time (ms)", "memory (MiB)", {0, 10, 20, 40}, {}, {{"a", {1, 3, 2, 2}}, {"b", {0, 1, 4, 0}}}};
}

TEST_CASE("plot: every kind is well-formed XML, whatever the names are") {
    if (system("python3 -c 'import xml.dom.minidom' 2>/dev/null") != 0) { return skip_this_case("no python3"); }
    Chart areas = two_layers();
    areas.spans = {{"forward & <back>", 0, 20}, {"optimizer", 20, 40}};
    areas.peak = "peak \"6\" MiB";
    Chart bars{Chart::BARS, "b", "", "ms", {}, {"<small>", "2.7B"}, {{"forward", {1, NAN}}, {"backward", {2, 3}}}};
    Chart lines{Chart::LINES, "l", "S", "ms", {128, 256, 65536}, {}, {{"naive", {0.01, NAN, 70}, true}}};
    lines.log_axes = true;
    Folder folder;
    std::string path = folder / "x.svg";
    for (const std::string& svg :
         {draw("A & B", "<caption>", {areas}), draw("bars", "", {bars}), draw("lines", "", {lines, lines, lines}),
          draw("one bar", "", {share_chart("", {"x"}, {{"y", {0.5}}})})}) {
        save_file(path, svg);
        CHECK(system(("python3 -c \"import xml.dom.minidom as d, sys; d.parse(sys.argv[1])\" " + path).c_str()) == 0);
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

    Chart shares = share_chart("", {"x"}, {{"a", {1}}, {"b", {3}}});
    CHECK(shares.series[0].y[0] == 25);
    CHECK(shares.series[1].y[0] == 75);
}

TEST_CASE("plot: on logarithmic axes a power is a straight line") {
    Chart chart{Chart::LINES, "", "S", "ms", {128, 256, 512, 1024}, {}, {{"s", {1, 4, 16, 64}}}};
    chart.log_axes = true;
    auto dots = numbers_of(draw("t", "", {chart}), "cx=\"#\" cy=\"#\"");
    REQUIRE(dots.size() == 4);
    for (int i = 1; i < 3; i++) {
        for (int j : {0, 1}) { CHECK(std::fabs(dots[i + 1][j] - 2 * dots[i][j] + dots[i - 1][j]) < 0.3); }
    }
    CHECK(dots[3][1] < dots[0][1]);  // upwards
    chart.series[0].y[0] = 0;
    CHECK_THROWS_AS(draw("t", "", {chart}), Failure);
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
    if (system("python3 -c 'import xml.dom.minidom' 2>/dev/null") != 0) { return skip_this_case("no python3"); }
    Folder folder;
    std::string path = folder / "x.svg";
    save_file(path, svg);
    CHECK(system(("python3 -c \"import xml.dom.minidom as d, sys; d.parse(sys.argv[1])\" " + path).c_str()) == 0);
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
