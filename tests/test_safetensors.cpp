// Tests of lib/safetensors.cu: what is written comes back; what is wrong is refused, with the file's and the tensor's
// name.
#include "test.h"

#include <csignal>
#include <cstdio>

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static std::string in_file(const std::string& header, const std::string& data) {
    uint64_t n = header.size();
    return std::string((const char*)&n, 8) + header + data;
}
static std::string failure_of(const std::function<void()>& f) {
    try {
        f();
    } catch (const Failure& failure) { return failure.what(); }
    return "nothing thrown";
}
// The message of the refusal; "" where the file was taken.
static std::string refusal(const std::string& path, const std::string& bytes) {
    write_file(path, bytes);
    try {
        load_safetensors(path);
    } catch (const Failure& failure) {
        CHECK(failure.exit_code == 1);
        std::string what = failure.what();
        CHECK(what.find(path) == 0);
        CHECK(what.find('\n') == std::string::npos);
        CHECK(what.size() < 600);
        return what;
    }
    return "";
}

static const char* const TWO =  // a valid header for 12 bytes of data
    R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[4],"data_offsets":[8,12]}})";

TEST_CASE("safetensors: no metadata is as good as null") {
    Folder folder;
    const std::string path = folder / "x.safetensors";
    save_file(path, in_file("{\"__metadata__\":null}", ""));
    CHECK(load_safetensors(path).metadata.empty());
}
TEST_CASE("safetensors: a round trip gives back every bit, name, shape and dtype") {
    Folder folder;
    std::string path = folder / "x.safetensors";
    std::vector<std::pair<std::string, FileTensor>> out;
    std::vector<Tensor> tensors;
    context = Context();
    for (DType t : {U8, F16, F64, I32, BF16, F32}) {
        tensors.push_back(empty({3, 1, 5}, t));
        for (size_t i = 0; i < 15 * size_of(t); i++) { tensors.back().data[i] = (char)(i * 37 + t); }
        out.push_back({name_of(t), describe(tensors.back())});
    }
    tensors.push_back(from_floats({2.5f}, {}));
    out.push_back({"scalar", describe(tensors.back())});
    tensors.push_back(empty({0, 4}, F32));
    out.push_back({"nothing", describe(tensors.back())});
    std::string odd = "quote \" newline \n and \u00e9";
    out.push_back({odd, describe(tensors[0])});
    save_safetensors(path, out, {{"format", "pt"}, {"step", "7"}});

    SafeTensors file = load_safetensors(path);
    CHECK(file.path == path);
    CHECK(file.tensors.size() == out.size());
    CHECK(file.metadata == std::map<std::string, std::string>{{"format", "pt"}, {"step", "7"}});
    for (const auto& [name, t] : out) {
        CAPTURE(name);
        REQUIRE(file.tensors.count(name) == 1);
        const FileTensor& in = file.tensors[name];
        CHECK(in.dtype == t.dtype);
        CHECK(in.shape == t.shape);
        REQUIRE(in.bytes == t.bytes);
        CHECK((in.bytes == 0 || memcmp(in.data, t.data, t.bytes) == 0));
    }
    CHECK(folder.files() == std::vector<std::string>{"x.safetensors"});

    // Saving over a file that was read: the reader keeps the old one.
    save_safetensors(path, {{"other", describe(tensors[0])}});
    CHECK(load_safetensors(path).tensors.count("other") == 1);
    CHECK(memcmp(file.tensors["float32"].data, tensors[5].data, 60) == 0);
}

TEST_CASE("safetensors: the bytes of a small file") {
    Folder folder;
    std::string path = folder / "x.safetensors";
    uint8_t byte = 7;
    float number = 1;
    save_safetensors(path, {{"b", {"U8", {1}, &byte, 1}}, {"a", {"F32", {}, &number, 4}}});
    std::string header =
        R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}})";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    std::string want = in_file(header, std::string("\0\0\x80\x3f\7", 5));
    CHECK(read_file(path) == want);
    save_safetensors(path, {});
    CHECK(read_file(path) == in_file("{}      ", ""));
    CHECK(load_safetensors(path).tensors.empty());
}

TEST_CASE("safetensors: a tensor that lies crooked in its file is given aligned") {
    Folder folder;
    std::string path = folder / "x.safetensors";
    for (int pad = 0; pad < 8; pad++) {
        std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                             R"("b":{"dtype":"F64","shape":[1],"data_offsets":[1,9]}})";
        double number = 2.75;
        write_file(path, in_file(header + std::string(pad, ' '), "x" + std::string((const char*)&number, 8)));
        SafeTensors file = load_safetensors(path);
        CHECK((uintptr_t)file.tensors["b"].data % 8 == 0);
        CHECK(*(const double*)file.tensors["b"].data == 2.75);
        CHECK(*(const char*)file.tensors["a"].data == 'x');
    }
}

// {"t": {...}} with the given parts, and then `data` bytes.
static std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets, int data = 8) {
    return in_file("{\"t\":{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}",
                   std::string(data, 'x'));
}

TEST_CASE("safetensors: a file may be cut short after it was read") {
    Folder folder;
    std::string path = folder / "x.safetensors";
    std::vector<uint8_t> ones(1 << 20, 1);
    save_safetensors(path, {{"a", {"U8", {1 << 20}, ones.data(), ones.size()}}});
    SafeTensors file = load_safetensors(path);
    REQUIRE(truncate(path.c_str(), 8) == 0);
    CHECK(memcmp(file.tensors["a"].data, ones.data(), ones.size()) == 0);
}

TEST_CASE("safetensors: every kind of lie is refused by name") {
    Folder folder;
    std::string path = folder / "x.safetensors";
    CHECK(refusal(path, one("\"F32\"", "[2]", "[0,8]")) == "");
    CHECK(refusal(path, in_file(TWO, std::string(12, 'x'))) == "");
    struct Case {
        std::string bytes;
        std::vector<std::string> says;
    };
    std::string deep(100000, '['), flat = std::string("{\"a\":\"") + std::string(100000, 'y') + "\"}";
    std::string overlap = TWO, hole = TWO, twice = TWO;
    overlap.replace(overlap.find("[8,12]"), 6, "[4,8]");
    hole.replace(hole.find("[8,12]"), 6, "[9,13]");
    twice.replace(twice.find("\"b\""), 3, "\"a\"");
    uint64_t huge = UINT64_MAX;
    const std::string f32 = "\"F32\"";
    const Case cases[] = {
        {"", {"8 bytes", "found 0"}},
        {"1234567", {"8 bytes", "found 7"}},
        {std::string((const char*)&huge, 8) + "{}", {"header", "18446744073709551615"}},
        {in_file("{}", "").replace(0, 1, "\3"), {"at most 2 bytes", "3"}},
        {in_file("", ""), {"JSON"}},
        {in_file("[]", ""), {"JSON object"}},
        {in_file("{", ""), {"JSON"}},
        {in_file("{}}", ""), {"JSON"}},
        {in_file("{\"a\":}", ""), {"JSON"}},
        {in_file("{\"a\":\"\xff\"}", ""), {"JSON"}},
        {in_file("{\"a\":\"\n\"}", ""), {"JSON"}},
        {in_file("{\"a\":1e999}", ""), {"JSON"}},
        {in_file("{\"a\":" + deep, ""), {"nesting"}},
        {in_file("{\"a\":" + deep + std::string(100000, ']') + "}", ""), {"nesting"}},
        {in_file("{\"a\":1}", ""), {"tensor \"a\"", "dtype", "found null"}},
        {in_file(flat, ""), {"tensor \"a\"", "dtype"}},
        {in_file("{\"a\\n\":{\"dtype\":\"F32\",\"shape\":[]}}", ""), {"tensor \"a\\n\"", "data_offsets", "found null"}},
        {one("\"F31\"", "[2]", "[0,8]"), {"tensor \"t\"", "dtype", "F31"}},
        {one("32", "[2]", "[0,8]"), {"tensor \"t\"", "dtype", "32"}},
        {one(f32, "2", "[0,8]"), {"tensor \"t\"", "shape", "found 2"}},
        {one(f32, "[-2]", "[0,8]"), {"tensor \"t\"", "shape", "[-2]"}},
        {one(f32, "[-1,-2]", "[0,8]"), {"tensor \"t\"", "shape", "[-1,-2]"}},
        {one(f32, "[2.0]", "[0,8]"), {"tensor \"t\"", "shape", "[2.0]"}},
        {one(f32, "[\"2\"]", "[0,8]"), {"tensor \"t\"", "shape"}},
        {one(f32, "[[2]]", "[0,8]"), {"nesting"}},
        {one(f32, "[9223372036854775808]", "[0,8]"), {"tensor \"t\"", "shape"}},
        {one(f32, "[4294967296,4294967296]", "[0,8]"), {"tensor \"t\"", "overflow"}},
        {one(f32, "[4611686018427387906]", "[0,8]"), {"tensor \"t\"", "overflow"}},  // 8 modulo 2^64
        {one(f32, "[3]", "[0,8]"), {"tensor \"t\"", "expected 12 bytes", "found 8"}},
        {one(f32, "[2]", "[0,7]"), {"tensor \"t\"", "expected 8 bytes", "found 7"}},
        {one(f32, "[2]", "[8,0]"), {"tensor \"t\"", "[8, 0]"}},
        {one(f32, "[3]", "[0,12]"), {"tensor \"t\"", "within 8 bytes", "[0, 12]"}},
        {one(f32, "[2]", "[-8,0]"), {"tensor \"t\"", "data_offsets"}},
        {one(f32, "[2]", "[0,8,8]"), {"tensor \"t\"", "data_offsets"}},
        {one(f32, "[2]", "[18446744073709551608,0]"), {"tensor \"t\"", "data_offsets"}},
        {one(f32, "[2]", "[0,8]", 9), {"expected 8 bytes of data", "found 9"}},
        {one(f32, "[1]", "[4,8]"), {"tensor \"t\"", "hole"}},
        {in_file(overlap, std::string(12, 'x')), {"tensor \"b\"", "overlap"}},
        {in_file(hole, std::string(13, 'x')), {"tensor \"b\"", "hole"}},
        {in_file(twice, std::string(12, 'x')), {"tensor \"a\"", "hole"}},
        {in_file("{\"__metadata__\":{\"a\":1}}", ""), {"__metadata__", "string"}},
        {in_file("{\"__metadata__\":\"a\"}", ""), {"__metadata__", "object"}},
    };
    for (const Case& c : cases) {
        std::string head = c.bytes.substr(0, 200), what = refusal(path, c.bytes);
        CAPTURE(head);
        CAPTURE(what);
        CHECK(what != "");
        for (const std::string& part : c.says) { CHECK_MESSAGE(has(what, part), part); }
    }
    auto load = [](const std::string& name) { return failure_of([&] { load_safetensors(name); }); };
    CHECK(load(folder.path) == folder.path + ": cannot be opened: Is a directory");
    CHECK(has(load("/dev/zero"), "/dev/zero: cannot be opened: "));
    std::string fifo = folder / "fifo";
    REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
    CHECK(has(load(fifo), "fifo: cannot be opened: "));  // and not: waits for a writer
    unlink(fifo.c_str());
    CHECK(has(load(folder / "none"), "/none: cannot be opened: No such file or directory"));
}

TEST_CASE("safetensors: cut short anywhere, or longer by a byte, a file is refused") {
    Folder folder;
    std::string path = folder / "x.safetensors", whole = in_file(TWO, std::string(12, 'x'));
    for (size_t n = 0; n < whole.size(); n++) {
        CAPTURE(n);
        CHECK(refusal(path, whole.substr(0, n)) != "");
    }
    CHECK(refusal(path, whole) == "");
    CHECK(refusal(path, whole + "x") != "");
}

TEST_CASE("safetensors: with any bit flipped a file is refused or read within its bounds") {
    Folder folder;
    std::string path = folder / "x.safetensors", whole = in_file(TWO, std::string(12, 'x'));
    int refused = 0, taken = 0;
    auto try_it = [&](const std::string& bytes) {
        if (refusal(path, bytes) != "") {
            refused++;
            return;
        }
        SafeTensors file = load_safetensors(path);
        size_t total = 0;
        for (const auto& [name, t] : file.tensors) {
            std::vector<char> copy(t.bytes);  // under the sanitizers this finds what lies outside
            if (t.bytes > 0) { memcpy(copy.data(), t.data, t.bytes); }
            total += t.bytes;
        }
        CHECK(total == 12);
        taken++;
    };
    for (size_t bit = 0; bit < 8 * whole.size(); bit++) {
        std::string bytes = whole;
        bytes[bit / 8] ^= (char)(1 << bit % 8);
        try_it(bytes);
    }
    for (int i = 0; i < 3000; i++) {  // and with several
        std::string bytes = whole;
        for (int k = 0; k < 2 + i % 7; k++) {
            int bit = random_int(8 * (int)whole.size(), 1, i, k);
            bytes[bit / 8] ^= (char)(1 << bit % 8);
        }
        try_it(bytes);
    }
    CHECK(refused > 100);
    CHECK(taken >= 8 * 12);  // the data itself may be anything
}

TEST_CASE("safetensors: require_tensor says what it expected and what it found") {
    Folder folder;
    std::string path = folder / "x.safetensors";
    write_file(path, in_file(TWO, std::string(12, 'x')));
    SafeTensors file = load_safetensors(path);
    CHECK(&require_tensor(file, "a", {2}, {"F32", "BF16"}) == &file.tensors["a"]);
    CHECK(&require_tensor(file, "b", {-1}, {"U8"}) == &file.tensors["b"]);
    auto message = [&](const char* name, const Shape& shape, const std::set<std::string>& dtypes) {
        std::string what = failure_of([&] { require_tensor(file, name, shape, dtypes); });
        CHECK(what.find(path) == 0);
        CHECK(has(what, name));
        return what;
    };
    CHECK(has(message("c", {2}, {"F32"}), "not found among the file's 2 tensors: [\"a\",\"b\"]"));
    CHECK(has(message("a", {2}, {"BF16", "F16"}), "expected dtype BF16 or F16, found F32"));
    CHECK(has(message("a", {3}, {"F32"}), "expected shape [3], found [2]"));
    CHECK(has(message("a", {-1, 2}, {"F32"}), "expected shape [any, 2], found [2]"));
    CHECK(has(message("a", {}, {"F32"}), "expected shape [], found [2]"));
}

TEST_CASE("safetensors: a save that fails leaves nothing, and the old file as it was") {
    Folder folder;
    std::string path = folder / "x.safetensors";
    write_file(path, "old");
    float numbers[2] = {1, 2};
    FileTensor good{"F32", {2}, numbers, 8};
    auto fails = [&](const std::string& where, const std::vector<std::pair<std::string, FileTensor>>& tensors) {
        std::string what = failure_of([&] { save_safetensors(where, tensors); });
        CHECK(has(what, where));
        CHECK(what.find('\n') == std::string::npos);
        CHECK(folder.files() == std::vector<std::string>{"x.safetensors"});
        CHECK(read_file(path) == "old");
    };
    fails(folder / "none/x.safetensors", {{"a", good}});
    fails("/proc/x.safetensors", {{"a", good}});  // nobody may write there, root included
    fails(folder.path, {{"a", good}});
    fails(path, {{"a", good}, {"a", good}});
    fails(path, {{"a", {"F33", {2}, numbers, 8}}});
    fails(path, {{"a", {"F32", {3}, numbers, 8}}});
    fails(path, {{"a", {"F32", {-2}, numbers, 8}}});
    fails(path, {{"a", {"F32", {2}, nullptr, 8}}});

    std::vector<uint8_t> big(100000);
    rlimit before, small;
    REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
    small = before;
    small.rlim_cur = 50000;  // bytes: the disk is full in the middle of the data
    signal(SIGXFSZ, SIG_IGN);
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
    std::string what = failure_of([&] { save_safetensors(path, {{"a", {"U8", {100000}, big.data(), 100000}}}); });
    setrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, SIG_DFL);
    CHECK(has(what, "cannot be written: File too large"));
    CHECK(folder.files() == std::vector<std::string>{"x.safetensors"});
    CHECK(read_file(path) == "old");

    // What is no regular file is not replaced. A FIFO stands here for /dev/null, which root could replace.
    std::string fifo = folder / "fifo";
    REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
    what = failure_of([&] { save_safetensors(fifo, {{"a", good}}); });
    CHECK(what == fifo + ": cannot be written: expected a regular file");
    struct stat status;
    CHECK(stat(fifo.c_str(), &status) == 0);
    CHECK(S_ISFIFO(status.st_mode));
    CHECK(folder.files().size() == 2);
}

TEST_CASE("safetensors: describe takes row-major tensors on the CPU") {
    context = Context();
    Tensor t = empty({2, 3}, BF16);
    FileTensor f = describe(t);
    CHECK(f.dtype == "BF16");
    CHECK(f.shape == Shape{2, 3});
    CHECK(f.data == t.data);
    CHECK(f.bytes == 12);
    CHECK(has(failure_of([&] { describe(transpose(t, 0, 1)); }), "row-major"));
    CHECK(has(failure_of([&] { describe(empty_on(META, {2}, F32)); }), "on the CPU"));
    CHECK(has(failure_of([&] { describe(Tensor()); }), "on the CPU"));
}
