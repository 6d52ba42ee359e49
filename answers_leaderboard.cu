// answers_leaderboard.cu: the 2026 leaderboard's answer, from its tables.
#include "answers.h"

Answers answer_leaderboard(const Tables& tables) {
    const Table *table = table_with(tables, {"leaderboard: "}), *parts = table_with(tables, {"the parts of a step"});
    if (!table || table->rows.empty()) { return {}; }
    TableRow row = rows_of(*table)[0];
    auto gib = [&](const char* column) { return number(row.number(column) / 1024, "%.1f"); };
    std::string who = value_in(*table, "what runs again; ", ";"), each = who == "one rank" ? "" : " per rank";
    std::string what = say("A training step of {} ({} tokens per sequence, batch {}; {}) on {}", row.text("size"),
                           value_in(*table, "context length ", ","), value_in(*table, "batch ", ","),
                           value_in(*table, "precision ", ";"), who);
    if (std::isnan(row.number("mean ms"))) {
        return {{"", say("{} was not run: it would hold {} GiB{} at its peak.", what, gib("predicted peak MiB"), each) +
                         scaled_down(*table)}};
    }
    bool one = value_in(*table, " warmup, ", " step") == "1";
    std::string text = say(
        "{} takes {} ms{}: {} tokens per second, {} TFLOP/s", what, row.text("mean ms"),
        one ? ""
            : say(" in the mean (median {}, {} to {})", row.text("median ms"), row.text("min ms"), row.text("max ms")),
        row.text("tokens/s"), row.text("TFLOP/s"));
    text += std::isnan(row.number("MFU %")) ? "." : say(", an MFU of {} %.", row.text("MFU %"));
    text += say(" Its peak is {} GiB{}, predicted {}.", gib("peak MiB"), each, gib("predicted peak MiB"));
    std::vector<std::string> shares;
    if (parts) {
        for (const TableRow& part : rows_of(*parts)) {
            shares.push_back(say("{} {} ms ({} %)", part.text("part"), part.text("mean ms"), part.text("share %")));
        }
        TableRow most = largest_of(rows_of(*parts), "mean ms");
        if (most) { text += say(" Most of it is {}: {}.", most.text("part"), list_of(shares)); }
    }
    return {{"", text + scaled_down(*table)}};
}
