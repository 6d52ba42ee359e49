// Tests of lib/safetensors.cu: what is written comes back; what is wrong is refused, with the
// file's and the tensor's name.
#include "test.h"

#include <csignal>
#include <cstdio>

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static string in_file(const string& header, const string& data) {
    uint64_t n = header.size();
    return string((const char*)&n, 8) + header + data;
}
// The message of the refusal; "" where the file was taken.
static string refusal(const string& path, const string& bytes) {
    write_file(path, bytes);
    const string what = failure_of([&] { load_safetensors(path); });
    if (what == "nothing thrown") { return ""; }
    CHECK(what.find("1: " + path) == 0);
    CHECK(what.find('\n') == string::npos);
    CHECK(what.size() < 600);
    return what;
}

static const char* const TWO =  // a valid header for 12 bytes of data
    R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[4],"data_offsets":[8,12]}})";

TEST_CASE("safetensors: a round trip gives back every bit, name, shape and dtype") {
    Folder folder;
    string path = folder / "x.safetensors";
    vector<pair<string, FileTensor>> out;
    vector<Tensor> tensors;
    context = Context();
    for (DType t : {U8, F16, F64, I32, BF16, F32}) {
        tensors.push_back(empty({3, 1, 5}, t));
        for (int64_t i = 0; i < 15 * size_of(t); i++) {
            tensors.back().data[i] = (char)(i * 37 + t);
        }
        out.push_back({name_of(t), describe(tensors.back())});
    }
    tensors.push_back(from_floats({2.5f}, {}));
    out.push_back({"scalar", describe(tensors.back())});
    tensors.push_back(empty({0, 4}, F32));
    out.push_back({"nothing", describe(tensors.back())});
    string odd = "quote \" newline \n and \u00e9";
    out.push_back({odd, describe(tensors[0])});
    save_safetensors(path, out);

    SafeTensors file = load_safetensors(path);
    CHECK(file.path == path);
    CHECK(file.tensors.size() == out.size());
    for (const auto& [name, t] : out) {
        REQUIRE(file.tensors.count(name) == 1);
        const FileTensor& in = file.tensors[name];
        CHECK(in.dtype == t.dtype);
        CHECK(in.shape == t.shape);
        REQUIRE(in.bytes == t.bytes);
        CHECK((in.bytes == 0 || memcmp(in.data, t.data, t.bytes) == 0));
    }
    save_safetensors(path, {});
    CHECK(read_file(path) == in_file("{\"__metadata__\":{\"format\":\"pt\"}}", ""));
    CHECK(load_safetensors(path).tensors.empty());
    CHECK(folder.files() == vector<string>{"x.safetensors"});
}

TEST_CASE("safetensors: ten times the header takes ten times as long, and a header has a limit") {
    Folder folder;
    const string path = folder / "x.safetensors";
    auto ms_of = [&](size_t bytes, int times) {
        string header = "{\"a\":[{}";
        while (header.size() < bytes) { header += ",{}"; }
        const double begin = now_ms();
        for (int i = 0; i < times; i++) {
            CHECK(has(refusal(path, in_file(header + "]}", "")), "tensor \"a\""));
        }
        return now_ms() - begin;
    };
    const double small = ms_of(10000, 10);
    double large = INFINITY;  // the best of three, since other programs run, too
    for (int i = 0; i < 3; i++) { large = min(large, ms_of(100000, 1)); }
    CHECK(large < 4 * small);  // 10, if the time grew with the square of the bytes

    CHECK(has(refusal(path, in_file(string(10000001, ' '), "")), "at most 10000000 bytes"));
}

TEST_CASE("safetensors: the bytes of a small file") {
    Folder folder;
    string path = folder / "x.safetensors";
    uint8_t byte = 7;
    float number = 1;
    save_safetensors(path, {{"b", {"U8", {1}, &byte, 1}}, {"a", {"F32", {}, &number, 4}}});
    string header =
        R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}})";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    string want = in_file(header, string("\0\0\x80\x3f\7", 5));
    CHECK(read_file(path) == want);
}

// {"t": {...}} with the given parts, and then `data` bytes.
static string one(const string& dtype, const string& shape, const string& offsets, int data = 8) {
    return in_file("{\"t\":{\"dtype\":" + dtype + ",\"shape\":" + shape +
                       ",\"data_offsets\":" + offsets + "}}",
                   string(data, 'x'));
}

TEST_CASE("safetensors: every kind of lie is refused by name") {
    Folder folder;
    string path = folder / "x.safetensors";
    CHECK(refusal(path, one("\"F32\"", "[2]", "[0,8]")) == "");
    CHECK(refusal(path, in_file(TWO, string(12, 'x'))) == "");
    // nobody reads the metadata
    CHECK(refusal(path, in_file("{\"__metadata__\":null}", "")) == "");
    CHECK(refusal(path, in_file("{\"__metadata__\":{\"a\":1}}", "")) == "");
    CHECK(refusal(path, in_file("{\"__metadata__\":{\"a\":{\"b\":1}}}", "")) == "");
    CHECK(has(refusal(path, in_file("{\"__metadata__\":{\"a\":{\"b\":{}}}}", "")), "nesting"));
    struct Case {
        string bytes;
        vector<string> says;
    };
    string deep(100000, '['), flat = string("{\"a\":\"") + string(100000, 'y') + "\"}";
    string overlap = TWO, hole = TWO, twice = TWO;
    overlap.replace(overlap.find("[8,12]"), 6, "[4,8]");
    hole.replace(hole.find("[8,12]"), 6, "[9,13]");
    twice.replace(twice.find("\"b\""), 3, "\"a\"");
    uint64_t huge = UINT64_MAX;
    const string f32 = "\"F32\"", T = "tensor \"t\": expected a known dtype";
    const Case cases[] = {
        {"", {"its 0 bytes cannot be read"}},
        {"1234567", {"its 7 bytes cannot be read"}},
        {string((const char*)&huge, 8) + "{}", {"with a header of at most 2 bytes"}},
        {in_file("{}", "").replace(0, 1, "\3"), {"at most 2 bytes"}},
        {in_file("", ""), {"JSON"}},
        {in_file("[]", ""), {"JSON object"}},
        {in_file("{", ""), {"JSON"}},
        {in_file("{}}", ""), {"JSON"}},
        {in_file("{\"a\":}", ""), {"JSON"}},
        {in_file("{\"a\":\"\xff\"}", ""), {"JSON"}},
        {in_file("{\"a\":\"\n\"}", ""), {"JSON"}},
        {in_file("{\"a\":1e999}", ""), {"JSON"}},
        {in_file("{\"a\":" + deep, ""), {"nesting"}},
        {in_file("{\"a\":" + deep + string(100000, ']') + "}", ""), {"nesting"}},
        {in_file("{\"a\":1}", ""), {"tensor \"a\": expected a known dtype", "found 1"}},
        {in_file(flat, ""), {"tensor \"a\": expected a known dtype"}},
        {in_file("{\"a\\n\":{\"dtype\":\"F32\",\"shape\":[]}}", ""),
         {"tensor \"a\\n\": expected a known dtype"}},
        {one("\"F31\"", "[2]", "[0,8]"), {T, "F31"}},
        {one("32", "[2]", "[0,8]"), {T, "32"}},
        {one(f32, "2", "[0,8]"), {T, "\"shape\":2"}},
        {one(f32, "[-2]", "[0,8]"), {T, "[-2]"}},
        {one(f32, "[-1,-2]", "[0,8]"), {T, "[-1,-2]"}},
        {one(f32, "[2.0]", "[0,8]"), {T, "[2.0]"}},
        {one(f32, "[\"2\"]", "[0,8]"), {T, "[\"2\"]"}},
        {one(f32, "[[2]]", "[0,8]"), {"nesting"}},
        {one(f32, "[9223372036854775808]", "[0,8]"), {T, "[9223372036854775808]"}},
        {one(f32, "[4294967296,4294967296]", "[0,8]"), {T, "4294967296"}},
        // 8 bytes modulo 2^64
        {one(f32, "[4611686018427387906]", "[0,8]"), {T, "4611686018427387906"}},
        {one(f32, "[3]", "[0,8]"), {T, "[0,8]", "[3]"}},
        {one(f32, "[2]", "[0,7]"), {T, "[0,7]", "[2]"}},
        {one(f32, "[2]", "[8,0]"), {T, "[8,0]"}},
        {one(f32, "[3]", "[0,12]"), {T, "within 8,", "[0,12]"}},
        {one(f32, "[2]", "[-8,0]"), {T, "[-8,0]"}},
        {one(f32, "[2]", "[0,8,8]"), {T, "[0,8,8]"}},
        {one(f32, "[2]", "[18446744073709551608,0]"), {T, "[18446744073709551608,0]"}},
        {one(f32, "[2]", "[0,8]", 9), {"expected 8 bytes of data", "found 9"}},
        {one(f32, "[1]", "[4,8]"), {"tensor \"t\"", "hole"}},
        {in_file(overlap, string(12, 'x')), {"tensor \"b\"", "overlap"}},
        {in_file(hole, string(13, 'x')), {"tensor \"b\"", "hole"}},
        {in_file(twice, string(12, 'x')), {"header", "twice"}},
        {in_file(TWO + string("\0}", 2), string(12, 'x')), {"header", "JSON object"}},
    };
    for (const Case& c : cases) {
        string head = c.bytes.substr(0, 200), what = refusal(path, c.bytes);
        CAPTURE(head);
        CAPTURE(what);
        CHECK(what != "");
        for (const string& part : c.says) { CHECK_MESSAGE(has(what, part), part); }
    }
    auto load = [](const string& name) { return failure_of([&] { load_safetensors(name); }); };
    CHECK(load(folder.path) == "1: " + folder.path + ": cannot be opened: Is a directory");
    CHECK(has(load("/dev/zero"), "/dev/zero: cannot be opened: "));
    string fifo = folder / "fifo";
    REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
    CHECK(has(load(fifo), "fifo: cannot be opened: "));  // and not: waits for a writer
    unlink(fifo.c_str());
    CHECK(has(load(folder / "none"), "/none: cannot be opened: No such file or directory"));
}

TEST_CASE(
    "safetensors: cut short anywhere, or longer by a byte, a file is refused, and with bits "
    "flipped read within it") {
    Folder folder;
    const string path = folder / "x.safetensors", whole = in_file(TWO, string(12, 'x'));
    for (size_t n = 0; n < whole.size(); n++) {
        CHECK_MESSAGE(refusal(path, whole.substr(0, n)) != "", n);
    }
    CHECK(refusal(path, whole + "x") != "");
    int taken = 0;
    const int bits = 8 * (int)whole.size(), tries = bits + 3000;
    for (int i = 0; i < tries; i++) {  // each bit by itself, then several
        string bytes = whole;
        for (int k = 0; k < (i < bits ? 1 : 2 + i % 7); k++) {
            const int bit = i < bits ? i : random_int(bits, 1, i, k);
            bytes[bit / 8] ^= (char)(1 << bit % 8);
        }
        if (refusal(path, bytes) != "") { continue; }
        size_t total = 0;
        for (const auto& [name, t] : load_safetensors(path).tensors) { total += t.bytes; }
        CHECK(total == 12);
        taken++;
    }
    CHECK(tries - taken > 100);
    CHECK(taken >= 8 * 12);  // the data itself may be anything
}

TEST_CASE("safetensors: require_tensor says what it expected and what it found") {
    Folder folder;
    string path = folder / "x.safetensors";
    write_file(path, in_file(TWO, string(12, 'x')));
    SafeTensors file = load_safetensors(path);
    CHECK(&require_tensor(file, "a", {2}, {"F32", "BF16"}) == &file.tensors["a"]);
    CHECK(&require_tensor(file, "b", {-1}, {"U8"}) == &file.tensors["b"]);
    auto message = [&](const char* name, const Shape& shape, const set<string>& dtypes) {
        string what = failure_of([&] { require_tensor(file, name, shape, dtypes); });
        CHECK(what.find("1: " + path) == 0);
        CHECK(has(what, name));
        return what;
    };
    CHECK(has(message("c", {2}, {"F32"}), "not found among the file's 2 tensors: [\"a\",\"b\"]"));
    CHECK(has(message("a", {2}, {"BF16", "F16"}), "expected BF16 or F16 [2], found F32 [2]"));
    CHECK(has(message("a", {3}, {"F32"}), "expected F32 [3], found F32 [2]"));
    CHECK(has(message("a", {-1, 2}, {"F32"}), "expected F32 [any, 2], found F32 [2]"));
    CHECK(has(message("a", {}, {"F32"}), "expected F32 [], found F32 [2]"));
}

TEST_CASE("safetensors: a save that fails leaves nothing, and the old file as it was") {
    Folder folder;
    string path = folder / "x.safetensors";
    write_file(path, "old");
    float numbers[2] = {1, 2};
    FileTensor good{"F32", {2}, numbers, 8};
    for (const string& where :
         {folder / "none/x.safetensors", string("/proc/x.safetensors"), folder.path}) {
        const string what = failure_of([&] { save_safetensors(where, {{"a", good}}); });
        // nobody may write in /proc, root included
        CHECK(has(what, where + ": cannot be written"));
        CHECK(folder.files() == vector<string>{"x.safetensors"});
        CHECK(read_file(path) == "old");
    }

    vector<uint8_t> big(100000);
    rlimit before;
    REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
    // bytes: the disk is full in the middle of the data
    const rlimit small = {50000, before.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
    string what = failure_of([&] {
        save_safetensors(path, {{"a", {"U8", {100000}, big.data(), 100000}}});
    });
    setrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, SIG_DFL);
    CHECK(has(what, "cannot be written: File too large"));
    CHECK(folder.files() == vector<string>{"x.safetensors"});
    CHECK(read_file(path) == "old");
}
