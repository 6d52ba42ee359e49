// Tests of store.cu's protocol, without sockets: what a stranger says changes nothing, and ranks that do not run the
// same are refused. What strangers do to a real port stands in test_ranks.cpp.
#include "test.h"

#include <random>

static std::string frame(const std::string& bytes) {
    uint32_t n = (uint32_t)bytes.size();
    return std::string((char*)&n, 4) + bytes;
}
static std::string fields(const std::vector<std::string>& all) {
    std::string text;
    for (const std::string& field : all) { text += field + '\0'; }
    return text;
}
static const Hello own = {0, false, 2, "secret/", "abc", "naive_ddp", {{"quick", ""}, {"seed", "1"}}};
static const std::vector<std::string> good = {"secret/", "abc", "1", "2", "0", "naive_ddp", "quick", "", "seed", "1"};

struct Talk {  // of one store with several peers
    StoreState s = empty_store(own, 1000);
    StorePeer& connect() {
        s.peers.emplace_back();
        return s.peers.back();
    }
    // What p gets for these bytes.
    std::string say(StorePeer& p, const std::string& bytes) {
        take_bytes(s, p, bytes.data(), bytes.size());
        return std::move(p.out);
    }
    bool untouched() const {
        return s.values.empty() && s.last_beat == std::vector<double>(2) && s.finished == std::vector<bool>(2);
    }
};

TEST_CASE("store: a stranger changes nothing, and is sent away") {
    std::string key_value = std::string("gather/0/1") + '\0' + "1 1e-6";
    std::vector<std::string> requests = {
        "B",
        "Q",
        "S" + key_value,
        "Gnccl",
        "x",
        "H",
        "Hnonsense",
        "\xff ",
        std::string("Hmain\0"
                    "100 2 0",
                    13),
    };
    for (size_t i = 0; i < good.size(); i++) {  // each field wrong in several ways
        for (const char* wrong : {"", "x", "-1", "2", "99999999999999999999", "1 ", "%s"}) {
            std::vector<std::string> all = good;
            all[i] = wrong;
            if (wrong == good[i]) { continue; }
            requests.push_back("H" + fields(all));
        }
    }
    for (size_t n = 0; n < good.size(); n++) {
        requests.push_back("H" + fields(std::vector<std::string>(good.begin(), good.begin() + n)));
    }
    for (const std::string& request : requests) {
        Talk t;
        StorePeer& p = t.connect();
        INFO(request);
        t.say(p, frame(request));
        CHECK(p.rank == -1);
        CHECK(p.closing);
        CHECK(t.untouched());
        CHECK(t.say(p, frame("H" + fields(good))) == "");  // it is not listened to any more
        CHECK(p.rank == -1);
        CHECK(t.untouched());
    }
}
TEST_CASE("store: what a stranger announces takes no memory") {
    for (uint32_t n : {0u, (1u << 16) + 1, 1u << 26, UINT32_MAX}) {
        Talk t;
        StorePeer& p = t.connect();
        t.say(p, std::string((char*)&n, 4) + std::string(100, 'x'));
        CHECK(p.closing);
        CHECK(p.in.empty());
    }
    Talk t;
    StorePeer& p = t.connect();
    uint32_t n = 1 << 16;
    t.say(p, std::string((char*)&n, 4) + "Hsecret");
    CHECK(!p.closing);
    CHECK(p.in.capacity() < 100);
}
TEST_CASE("store: ranks that do not run the same are refused, and the first difference is named") {
    struct Case {
        size_t field;
        std::string value, says;
    };
    for (const Case& one : {Case{0, "other/", "belongs to another job"},
                            {0, "", "belongs to another job"},
                            {1, "def", "rank 1 was built from commit def, but rank 0 from abc"},
                            {2, "0", ""},
                            {2, "2", "there is no rank 2"},
                            {2, "-1", "there is no rank -1"},
                            {3, "3", "rank 1 says that there are 3 ranks, but rank 0 says 2"},
                            {5, "train", "rank 1 runs train, but rank 0 runs naive_ddp"},
                            {6, "recompute", "rank 1 has no --quick, but rank 0 has --quick"},
                            {8, "steps", "rank 1 has no --seed, but rank 0 has --seed 1"},
                            {9, "2", "rank 1 has --seed 2, but rank 0 has --seed 1"}}) {
        Talk t;
        StorePeer& p = t.connect();
        std::vector<std::string> all = good;
        all[one.field] = one.value;
        std::string reply = t.say(p, frame("H" + fields(all)));
        INFO(one.field << " " << one.value << ": " << reply);
        CHECK(has(reply, "cs336"));
        CHECK((reply.size() == 9) == one.says.empty());
        CHECK(has(reply, one.says));
        CHECK((p.rank >= 0) == one.says.empty());
    }
    Talk t;
    CHECK(t.say(t.connect(), frame("H" + fields(good))) == frame("cs336"));
    CHECK(has(t.say(t.connect(), frame("H" + fields(good))), "two processes say that they are rank 1"));
    std::vector<std::string> beats = good;
    beats[4] = "1";
    CHECK(t.say(t.connect(), frame("H" + fields(beats))) == frame("cs336"));
}
TEST_CASE("store: values, waiting, and bytes that come one by one") {
    Talk t;
    StorePeer &one = t.connect(), &two = t.connect();
    std::vector<std::string> zero = good;
    zero[2] = "0";
    std::string got;
    for (char c : frame("H" + fields(zero))) { got += t.say(one, std::string(1, c)); }
    CHECK(got == frame("cs336"));
    CHECK(t.say(two, frame("H" + fields(good))) == frame("cs336"));
    CHECK(t.say(one, frame("Ga")) == "");
    CHECK(one.waiting);
    CHECK(t.say(two, frame(std::string("Sb\0second", 9))) == frame(""));
    CHECK(one.waiting);
    CHECK(t.say(two, frame(std::string("Sa\0", 3))) == frame(""));
    CHECK(one.out == frame(""));
    one.out.clear();
    CHECK(t.say(one, frame("Gb")) == frame("second"));
    CHECK(t.say(two, frame("Sno value")) == "");
    CHECK(two.closing);
}
TEST_CASE("store: who asks again before its reply came is sent away") {
    for (int kind = 0; kind < 3; kind++) {
        Talk t;
        StorePeer& p = t.connect();
        std::string hello = frame("H" + fields(good)), set = frame(std::string("Sb\0x", 4));
        if (kind == 0) { t.say(p, hello + set); }
        if (kind == 1) { t.say(p, hello), t.say(p, frame("Ga")), t.say(p, set); }
        if (kind == 2) { take_bytes(t.s, p, hello.data(), hello.size()), t.say(p, set); }
        CHECK(p.closing);
        CHECK(t.s.values.empty());
    }
}
TEST_CASE("store: heartbeats say who is gone") {
    Talk t;
    StorePeer& p = t.connect();
    std::vector<std::string> beats = good;
    beats[2] = "0";
    t.say(p, frame("H" + fields(beats)));
    t.say(t.connect(), frame("H" + fields(good)));
    CHECK(t.say(p, frame("B")) == frame(""));
    t.s.last_beat[1] = now_ms() - 5000;
    CHECK(has(t.say(p, frame("B")), "rank 1 has shown no sign of life for 5.0 s"));
    t.s.lost[1] = true;
    CHECK(has(t.say(p, frame("B")), "rank 1 is gone"));
    t.s.finished[1] = true;
    CHECK(t.say(p, frame("B")) == frame(""));
}
TEST_CASE("store: a hundred thousand requests of noise") {
    std::mt19937 random(0);
    auto below = [&](int n) { return (int)(random() % n); };
    Talk t;
    for (int i = 0; i < 100000; i++) {
        if (t.s.peers.size() < 5) { t.connect(); }
        auto p = t.s.peers.begin();
        std::advance(p, below((int)t.s.peers.size()));
        std::vector<std::string> all = good;
        all[2] = std::to_string(below(2));
        std::string request = below(20) == 0 ? "H" + fields(all) : std::string(1, "HSGBQx"[below(6)]);
        for (int n = below(6); n > 0; n--) { request += (char)(below(3) ? 'a' + below(3) : below(256)); }
        std::string bytes = below(50) ? frame(request) : request;
        t.say(*p, bytes.substr(0, below(10) ? bytes.size() : below((int)bytes.size() + 1)));
        CHECK_FALSE((p->rank < -1 || p->rank > 1));
        if (p->closing || p->in.size() > 1000) { t.s.peers.erase(p); }
        if (t.s.values.size() > 1000) { t = Talk(); }
    }
}
