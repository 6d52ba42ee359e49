// lib/safetensors.cu: tensors in files, in the format of
// https://github.com/huggingface/safetensors:
//
//   u64 N, little-endian | N bytes of JSON, padded with spaces |
//   the data of all tensors, little-endian, row-major
//   {"__metadata__": {"format": "pt"},
//    "lm_head.weight": {"dtype": "F32", "shape": [10, 4], "data_offsets": [0, 160]}, ...}
//
// Offsets count from the end of the header. The tensors cover the data exactly: no holes, no
// overlaps, nothing after the last. A file is taken as a whole or not at all, because a wrong
// weight looks just like a right one. The metadata are texts for people, which we do not read.
//
// In this order: reading a file, asking for its tensors, writing one. To read first:
// load_safetensors().
#include "lib.h"

#include <filesystem>

#include <nlohmann/json.hpp>

using nlohmann::json;
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the file's numbers are read as they are");

// Bytes, for some 100,000 tensors. The reference implementation takes ten times as many, for which
// json may need gigabytes.
constexpr uint64_t MAX_HEADER = 10000000;
// In DType's order; and I64, which no tensor of ours has.
static const char* const FILE_DTYPES[] = {"F32", "F16", "BF16", "F64", "I32", "U8", "I64"};

// Returns the dtype of this name, or one behind U8.
static DType dtype_of(const string& name) {
    return (DType)(std::find(FILE_DTYPES, std::end(FILE_DTYPES), name) - FILE_DTYPES);
}
// Returns the bytes of an element; 0 for a dtype that we do not know.
static size_t size_of_dtype(const string& dtype) {
    if (dtype == "I64") { return 8; }
    return dtype_of(dtype) <= U8 ? size_of(dtype_of(dtype)) : 0;
}

// Returns JSON from a file as an error message may have it: a text in quotes, all on one line, not
// too long.
static string shown(const json& value) {
    string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
    return text.size() <= 200 ? text : text.substr(0, 197) + "...";
}

// -------------------------------------------------------------------------------------------------
// Reading

// Returns a list of whole numbers; {-1} if it holds anything else. A number beyond int64 comes out
// negative.
static vector<int64_t> sizes_in(const json& list) {
    for (const json& value : list) {
        if (!value.is_number_unsigned()) { return {-1}; }
    }
    return list.get<vector<int64_t>>();
}

// Fills *t from the header's entry. Returns false if that is no tensor, or does not lie within the
// data, or if its data_offsets do not span as many bytes as its shape takes.
static bool read_tensor(const json& entry, const char* data, size_t data_bytes, FileTensor* t) {
    vector<int64_t> offsets;
    try {
        entry.at("dtype").get_to(t->dtype);
        t->shape = sizes_in(entry.at("shape"));
        offsets = sizes_in(entry.at("data_offsets"));
    } catch (const json::exception&) { return false; }

    t->bytes = size_of_dtype(t->dtype);
    bool fits = t->bytes > 0 && offsets.size() == 2;
    for (int64_t d : t->shape) {
        fits = fits && d >= 0 && !__builtin_mul_overflow(t->bytes, (size_t)d, &t->bytes);
    }
    if (!fits) { return false; }

    size_t begin = offsets[0], end = offsets[1];
    if (begin > end || end > data_bytes || end - begin != t->bytes) { return false; }
    t->data = data + begin;
    return true;
}

// Fails unless the tensors, in the order of their addresses, cover the data exactly.
static void check_layout(const SafeTensors& file, const char* data, size_t data_bytes) {
    set<std::tuple<const void*, size_t, string>> order;
    for (const auto& [name, t] : file.tensors) { order.emplace(t.data, t.bytes, name); }
    const char* end = data;  // where the tensors so far end
    for (const auto& [at, bytes, name] : order) {
        if (at != end) {
            fail("%s: tensor %s: a hole or an overlap before its data", file.path.c_str(),
                 shown(name).c_str());
        }
        end += bytes;
    }
    size_t all = end - data;
    if (all != data_bytes) {
        fail("%s: expected %zu bytes of data, found %zu", file.path.c_str(), all, data_bytes);
    }
}

// Returns the header's JSON, which it parses twice. The first time it only watches: nesting beyond
// three levels is refused, since later code, such as dump(), follows it by calls of calls and would
// run out of stack; and top-level names are counted. watch() returns false, so json keeps nothing;
// else it would search, at each closing bracket, all that it has kept. It also leaves out values
// then, so watch() sees names, objects and lists. A top-level name has depth 1, the header depth 0,
// an entry 1, its lists 2. The second time json keeps the last of two entries of one name: then
// there are fewer entries than names. (Of a word twice in one entry the last counts.) It ends at a
// zero byte, which no JSON has.
static json parse_header(const string& path, const string& text) {
    size_t names = 0;
    auto watch = [&](int depth, json::parse_event_t event, json&) {
        if (event == json::parse_event_t::key) {
            names += depth == 1;
        } else if (depth > 2) {
            fail("%s: header: expected no more than three levels of nesting", path.c_str());
        }
        return false;
    };
    json header = json::parse(text, watch, false);
    header = json::parse(text, nullptr, false);
    if (!header.is_object() || text.find('\0') != string::npos) {
        fail("%s: header: expected a JSON object", path.c_str());
    }
    if (names != header.size()) { fail("%s: header: a name is there twice", path.c_str()); }
    return header;
}

// Reads a file into memory and checks all that it says of itself. It is read, not mapped: if
// another process cut a mapped file short, a lost page would kill us.
SafeTensors load_safetensors(const string& path) {
    std::error_code error;  // also for what is no regular file
    size_t bytes = std::filesystem::file_size(path, error);
    ifstream input(error ? "" : path, std::ios::binary);
    if (!input) {
        fail("%s: cannot be opened: %s", path.c_str(),
             error ? error.message().c_str() : strerror(errno));
    }
    auto read_next = [&](void* to, size_t n) {
        if (!input.read((char*)to, n)) {
            fail("%s: its %zu bytes cannot be read", path.c_str(), bytes);
        }
    };

    uint64_t header_bytes;
    read_next(&header_bytes, 8);
    uint64_t limit = min<uint64_t>(bytes - 8, MAX_HEADER);
    if (header_bytes > limit) {
        fail("%s: expected a safetensors file (a .pt is none), with a header of at most %zu bytes",
             path.c_str(), limit);
    }
    string text(header_bytes, ' ');
    read_next(text.data(), header_bytes);
    json header = parse_header(path, text);

    size_t data_bytes = bytes - 8 - header_bytes;
    SafeTensors file{path, {}, allocate(CPU, max<size_t>(data_bytes, 1), INPUTS)};
    char* data = (char*)file.content->data;
    for (const auto& [name, entry] : header.items()) {
        if (name == "__metadata__") { continue; }
        if (!read_tensor(entry, data, data_bytes, &file.tensors[name])) {
            fail(
                "%s: tensor %s: expected a known dtype, and data_offsets of the shape's bytes "
                "within %zu, found %s",
                path.c_str(), shown(name).c_str(), data_bytes, shown(entry).c_str());
        }
    }
    check_layout(file, data, data_bytes);
    read_next(data, data_bytes);

    return file;
}

// Fails at the first tensor of the file that is not in `names`.
void require_no_others(const SafeTensors& file, const set<string>& names, const string& what) {
    for (const auto& [name, t] : file.tensors) {
        if (!names.count(name)) {
            fail("%s: tensor %s: not %s", file.path.c_str(), shown(name).c_str(), what.c_str());
        }
    }
}

// Returns the file's tensor of this name, or fails and says what was expected and what was found.
const FileTensor& require_tensor(const SafeTensors& file, const string& name, const Shape& shape,
                                 const set<string>& dtypes) {
    string where = file.path + ": tensor " + shown(name);
    auto found = file.tensors.find(name);
    if (found == file.tensors.end()) {
        json names = json::array();
        for (const auto& entry : file.tensors) { names.push_back(entry.first); }
        fail("%s: not found among the file's %zu tensors: %s", where.c_str(), names.size(),
             shown(names).c_str());
    }

    const FileTensor& t = found->second;
    bool fits = dtypes.count(t.dtype) > 0 && t.shape.size() == shape.size();
    for (size_t i = 0; fits && i < shape.size(); i++) {
        fits = shape[i] == -1 || shape[i] == t.shape[i];
    }
    if (!fits) {
        vector<string> sizes;
        for (int64_t d : shape) { sizes.push_back(d == -1 ? "any" : to_string(d)); }
        fail("%s: expected %s [%s], found %s %s", where.c_str(),
             join({dtypes.begin(), dtypes.end()}, " or ").c_str(), join(sizes, ", ").c_str(),
             t.dtype.c_str(), shown(t.shape).c_str());
    }
    return t;
}

// Copies a tensor of the file, which may lie at any address, to context.device, in its dtype. I64
// becomes I32, and a number that is too large for that becomes -1.
Tensor tensor_from_file(const FileTensor& f) {
    if (f.dtype == "I64") {
        vector<int64_t> wide(count(f.shape));
        memcpy(wide.data(), f.data, f.bytes);
        vector<int> values;
        for (int64_t x : wide) { values.push_back(x == (int)x ? (int)x : -1); }
        return from_ints(values, f.shape);
    }

    Tensor t = empty_on(CPU, f.shape, dtype_of(f.dtype), INPUTS);
    memcpy(t.data, f.data, f.bytes);
    return to_device(t, context.device);
}

// -------------------------------------------------------------------------------------------------
// Writing

// Writes the tensors with the wide dtypes first, so that every one starts at a multiple of its
// element size; the header is padded with spaces to a multiple of 8 bytes.
void save_safetensors(const string& path, const vector<pair<string, FileTensor>>& tensors) {
    auto order = tensors;
    std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
        return size_of_dtype(a.second.dtype) > size_of_dtype(b.second.dtype);
    });

    nlohmann::ordered_json header;
    header["__metadata__"] = {{"format", "pt"}};
    size_t end = 0;
    for (const auto& [name, t] : order) {
        header[name] = {
            {"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {end, end + t.bytes}}};
        end += t.bytes;
    }
    string text = header.dump(-1, ' ', false, json::error_handler_t::replace);
    text.resize((text.size() + 7) / 8 * 8, ' ');

    replace_file(path, [&](FILE* file) {
        uint64_t n = text.size();
        bool ok = fwrite(&n, 8, 1, file) == 1 && fwrite(text.data(), 1, n, file) == n;
        for (const auto& [name, t] : order) {
            ok = ok && (t.bytes == 0 || fwrite(t.data, 1, t.bytes, file) == t.bytes);
        }
        return ok;
    });
}

FileTensor describe(const Tensor& t) { return {FILE_DTYPES[t.dtype], t.shape, t.data, t.bytes()}; }

// Writes tensors of any device and strides, each in its dtype, as PyTorch does.
void save_tensors(const string& path, const NamedTensors& list) {
    NoGrad no_grad;
    vector<Tensor> kept;  // until the file is written
    vector<pair<string, FileTensor>> described;
    for (const auto& [name, t] : list) {
        kept.push_back(to_device(contiguous(t), CPU));
        described.push_back({name, describe(kept.back())});
    }
    save_safetensors(path, described);
}
