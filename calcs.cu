// calcs.cu: section 8 of the 2026 handout: how many devices work on one feed-forward layer before communication takes
// longer than the products. It is arithmetic alone; tests/test_calcs.cpp runs the layer on simulated devices and
// counts.
#include "commands.h"

#include <cctype>
#include <cmath>

// ---------------------------------------------------------------------------------------------------------------------
// Formulas. The text that a table shows is the one that is computed, so a test of the value is a test of the text.

// Numbers, letters (D_FF is one), + - / ^2 ( ) and max(a, b); what stands side by side is multiplied.
struct Formula {
    const char* at;
    const std::map<std::string, double>& letters;
    std::string numbers;  // the formula again, with the letters' values

    double sum() {
        double value = product();
        while (*at == '+' || *at == '-') {
            double sign = *at == '+' ? 1 : -1;
            numbers += strprintf(" %c ", *at++);
            value += sign * product();
        }
        return value;
    }
    double product() {
        double value = factor();
        while (*at == '/' || *at == '(' || isalnum(*at)) {
            bool divide = *at == '/';
            at += divide;
            numbers += divide ? " / " : " x ";
            double next = factor();
            value = divide ? value / next : value * next;
        }
        return value;
    }
    double factor() {
        skip_spaces();
        const char* begin = at;
        while (isalnum(*at) || *at == '_') { at++; }
        std::string word(begin, at);
        double value;
        if (*at == '(' && (word.empty() || word == "max")) {
            numbers += word;
            value = brackets();
        } else {
            value = isdigit(word[0]) ? std::stod(word) : letters.at(word);
            numbers += strprintf("%.7g", value);
        }
        if (*at == '^') {
            at += 2;
            numbers += "^2";
            value *= value;
        }
        skip_spaces();
        return value;
    }
    double brackets() {  // the largest of what commas separate
        at++, numbers += "(";
        double value = sum();
        while (*at == ',') {
            at++, numbers += ", ";
            value = std::max(value, sum());
        }
        at++, numbers += ")";
        return value;
    }
    void skip_spaces() {
        while (*at == ' ') { at++; }
    }
};

struct Calculation {
    Table table;
    std::map<std::string, double> letters;
};
static void check_range(const std::string& quantity, double value, bool fits) {
    if (fits) { return; }
    fail("%s is %g: --tflops, --bandwidth_gb or --tensor_mb is too large or too small", quantity.c_str(), value);
}
// Adds a row and returns its value. Formulas of times give seconds, which are shown in ms. A formula "N <= ..." is a
// bound: its value is what follows.
static double add_row(Calculation& c, const char* part, const std::string& quantity, const std::string& formula,
                      const std::string& unit) {
    size_t bound = formula.find("<= ");
    Formula f{formula.c_str() + (bound == std::string::npos ? 0 : bound + 3), c.letters, ""};
    double value = f.sum(), shown = unit == "ms" ? 1e3 * value : value;
    check_range(quantity, shown, std::isfinite(shown));
    bool counted = unit == "FLOP" || unit == "bytes";
    const char* format = !counted ? "%.6g" : shown == std::floor(shown) ? "%.0f" : "%.1f";
    c.table.rows.push_back({part, quantity, formula, f.numbers, strprintf(format, shown), unit});
    return value;
}

// axes: names of the numbers of devices, and their values.
static Calculation calculation(const Options& o, const std::string& of, std::map<std::string, double> letters,
                               const std::vector<std::pair<std::string, int>>& axes) {
    std::string devices;
    for (const auto& [name, n] : axes) {
        letters[name] = n;
        devices += strprintf(", %s = %d", name.c_str(), n);
    }
    double W = o.bandwidth_gb * 1e9, per_flop = W / (letters.count("C") ? letters["C"] : 1);
    check_range("W / C", per_flop, std::isnormal(per_flop));
    letters["W"] = W;
    return {{strprintf("%s: %s%s; W = %g GB/s out of each device, GB = 1e9 bytes; commit %s", o.command.c_str(),
                       of.c_str(), devices.c_str(), o.bandwidth_gb, commit().c_str()),
             {"part", "quantity", "formula", "with numbers", "value", "unit"},
             {}},
            letters};
}
static Calculation feed_forward(const Options& o, const std::vector<std::pair<std::string, int>>& axes) {
    std::map<std::string, double> letters = {
        {"B", o.tokens}, {"D", o.d_model}, {"D_FF", o.d_ff}, {"C", o.tflops * 1e12}};
    return calculation(o,
                       strprintf("y = (f(x W1) * (x W2)) W3, products only, 2 bytes per element; B = %d tokens, D = "
                                 "%d, D_FF = %d, C = %g TFLOP/s",
                                 o.tokens, o.d_model, o.d_ff, o.tflops),
                       letters, axes);
}

// ---------------------------------------------------------------------------------------------------------------------
// The commands. A ring all-gather or reduce-scatter of S bytes sends (N - 1) / N S bytes out of each device, an
// all-reduce, being both, twice that. Forward has three products of 2 B D D_FF FLOPs: x1 = x W1, x2 = x W2, z W3.
// Backward has two for each of them.

int cmd_alternate_ring_all_reduce(const Options& o) {
    Calculation c =
        calculation(o, strprintf("S = %g MB per device", o.tensor_mb), {{"S", o.tensor_mb * 1e6}}, {{"N", o.devices}});
    add_row(c, "", "steps", "N - 1", "");
    add_row(c, "", "bytes sent per device", "(N - 1) S", "bytes");
    add_row(c, "", "time", "(N - 1) S / W", "ms");
    add_row(c, "", "steps, reduce-scatter and all-gather", "2 (N - 1)", "");
    add_row(c, "", "bytes sent per device, reduce-scatter and all-gather", "2 (N - 1) S / N", "bytes");
    add_row(c, "", "time, reduce-scatter and all-gather", "2 (N - 1) S / (N W)", "ms");
    add_row(c, "", "times as long", "N / 2", "");
    print(c.table, o.format);
    return 0;
}

int cmd_data_parallel_calcs(const Options& o) {
    Calculation c = feed_forward(o, {{"N_DP", o.devices}});
    add_row(c, "a", "FLOPs per device, backward", "12 B D D_FF / N_DP", "FLOP");
    add_row(c, "b", "bytes sent per device, backward", "12 D D_FF (N_DP - 1) / N_DP", "bytes");
    add_row(c, "b", "communication time, backward", "12 D D_FF (N_DP - 1) / (N_DP W)", "ms");
    add_row(c, "c", "computation time, backward", "12 B D D_FF / (N_DP C)", "ms");
    add_row(c, "c", "most devices, backward", "N_DP <= 1 + B W / C", "devices");
    print(c.table, o.format);
    return 0;
}

int cmd_fsdp_calcs(const Options& o) {
    Calculation c = feed_forward(o, {{"N_FSDP", o.devices}});
    add_row(c, "a", "FLOPs per device, backward", "12 B D D_FF / N_FSDP", "FLOP");
    add_row(c, "a", "FLOPs per device, forward", "6 B D D_FF / N_FSDP", "FLOP");
    add_row(c, "b", "bytes sent per device, backward", "12 D D_FF (N_FSDP - 1) / N_FSDP", "bytes");
    add_row(c, "b", "bytes sent per device, forward", "6 D D_FF (N_FSDP - 1) / N_FSDP", "bytes");
    add_row(c, "b", "communication time, backward", "12 D D_FF (N_FSDP - 1) / (N_FSDP W)", "ms");
    add_row(c, "b", "communication time, forward", "6 D D_FF (N_FSDP - 1) / (N_FSDP W)", "ms");
    add_row(c, "c", "computation time, backward", "12 B D D_FF / (N_FSDP C)", "ms");
    add_row(c, "c", "computation time, forward", "6 B D D_FF / (N_FSDP C)", "ms");
    add_row(c, "c", "most devices, backward", "N_FSDP <= 1 + B W / C", "devices");
    add_row(c, "c", "most devices, forward", "N_FSDP <= 1 + B W / C", "devices");
    print(c.table, o.format);
    return 0;
}

int cmd_tp_calcs(const Options& o) {
    Calculation c = feed_forward(o, {{"N_TP", o.devices}});
    const std::string wide = "(B, D_FF / N_TP)", one = "2 B D D_FF / N_TP";
    print({"tp_calcs (a): backward on device i, which holds W1(i), W2(i), W3(i) and saved x, x1(i), x2(i), z(i); * is "
           "element by element; commit " +
               commit(),
           {"equation", "shape", "FLOPs", "communication"},
           {{"dz(i) = dY W3(i)^T", wide, one, "none: dY is on every device, as the all-reduced y was"},
            {"dx2(i) = dz(i) * f(x1(i))", wide, "", "none"},
            {"dx1(i) = dz(i) * f'(x1(i)) * x2(i)", wide, "", "none"},
            {"dW3(i) = z(i)^T dY", "(D_FF / N_TP, D)", one, "none: the device's own rows"},
            {"dW2(i) = x^T dx2(i)", "(D, D_FF / N_TP)", one, "none: the device's own columns"},
            {"dW1(i) = x^T dx1(i)", "(D, D_FF / N_TP)", one, "none: the device's own columns"},
            {"dx(i) = dx1(i) W1(i)^T + dx2(i) W2(i)^T", "(B, D)", "4 B D D_FF / N_TP", "none: a partial sum"},
            {"dx = all-reduce(dx(i))", "(B, D)", "", "all-reduce: the sum over all devices"}}},
          o.format);
    add_row(c, "b", "FLOPs per device, forward", "6 B D D_FF / N_TP", "FLOP");
    add_row(c, "b", "FLOPs per device, backward", "12 B D D_FF / N_TP", "FLOP");
    for (const char* pass : {"forward", "backward"}) {
        add_row(c, "c", strprintf("bytes sent per device, %s", pass), "4 B D (N_TP - 1) / N_TP", "bytes");
        add_row(c, "c", strprintf("communication time, %s", pass), "4 B D (N_TP - 1) / (N_TP W)", "ms");
    }
    add_row(c, "d", "computation time, backward", "12 B D D_FF / (N_TP C)", "ms");
    add_row(c, "d", "computation time, forward", "6 B D D_FF / (N_TP C)", "ms");
    add_row(c, "d", "most devices, backward", "N_TP <= 1 + 3 D_FF W / C", "devices");
    add_row(c, "d", "most devices, forward", "N_TP <= 1 + 3 D_FF W / (2 C)", "devices");
    print(c.table, o.format);
    return 0;
}

int cmd_fsdp_tp_calcs(const Options& o) {
    Calculation c = feed_forward(o, {{"N_FSDP", o.fsdp}, {"N_TP", o.tp}});
    add_row(c, "a", "FLOPs per device, forward", "6 B D D_FF / (N_FSDP N_TP)", "FLOP");
    add_row(c, "b", "bytes sent per device, FSDP axis", "6 D D_FF (N_FSDP - 1) / (N_FSDP N_TP)", "bytes");
    add_row(c, "b", "bytes sent per device, TP axis", "4 B D (N_TP - 1) / (N_FSDP N_TP)", "bytes");
    add_row(c, "b", "communication time, FSDP axis", "6 D D_FF (N_FSDP - 1) / (N_FSDP N_TP W)", "ms");
    add_row(c, "b", "communication time, TP axis", "4 B D (N_TP - 1) / (N_FSDP N_TP W)", "ms");
    add_row(c, "b", "communication time, overlapped", "max(6 D D_FF (N_FSDP - 1), 4 B D (N_TP - 1)) / (N_FSDP N_TP W)",
            "ms");
    add_row(c, "c", "computation time, forward", "6 B D D_FF / (N_FSDP N_TP C)", "ms");
    add_row(c, "c", "most devices, FSDP axis", "N_FSDP <= 1 + B W / C", "devices");
    add_row(c, "c", "most devices, TP axis", "N_TP <= 1 + 3 D_FF W / (2 C)", "devices");
    add_row(c, "c", "most devices, overlapped", "N <= (1 + B W / C) (1 + 3 D_FF W / (2 C))", "devices");
    add_row(c, "c", "the same without each 1", "3 B D_FF (W / C)^2 / 2", "devices");
    add_row(c, "d", "communication time, not overlapped",
            "(6 D D_FF (N_FSDP - 1) + 4 B D (N_TP - 1)) / (N_FSDP N_TP W)", "ms");
    double a = c.letters["a"] = add_row(c, "d", "a", "B W / C", "");
    double b = c.letters["b"] = add_row(c, "d", "b", "3 D_FF W / (2 C)", "");
    // Where the best split would have less than one device along an axis, that axis goes.
    if (b < a / (a + 1)) {
        add_row(c, "d", "least b for TP to pay", "a / (a + 1)", "");
        add_row(c, "d", "most devices, no TP", "N <= 1 + B W / C", "devices");
    } else if (a < b / (b + 1)) {
        add_row(c, "d", "least a for FSDP to pay", "b / (b + 1)", "");
        add_row(c, "d", "most devices, no FSDP", "N <= 1 + 3 D_FF W / (2 C)", "devices");
    } else {
        c.letters["Q"] = add_row(c, "d", "Q", "3 B D_FF W / C + 3 D_FF + 2 B", "");
        add_row(c, "d", "best split, FSDP axis", "Q / (6 D_FF)", "devices");
        add_row(c, "d", "best split, TP axis", "Q / (4 B)", "devices");
        add_row(c, "d", "most devices, not overlapped", "N <= Q^2 / (24 B D_FF)", "devices");
        add_row(c, "d", "the same for large a and b", "3 B D_FF (W / C)^2 / 8", "devices");
    }
    print(c.table, o.format);
    return 0;
}
