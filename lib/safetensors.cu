// lib/safetensors.cu: tensors in files, in the format of https://github.com/huggingface/safetensors:
//
//   u64 N, little-endian | N bytes of JSON, padded with spaces | the data of all tensors, little-endian, row-major
//   {"__metadata__": {"step": "7"},
//    "lm_head.weight": {"dtype": "F32", "shape": [10, 4], "data_offsets": [0, 160]}, ...}
//
// Offsets count from the end of the header. The tensors cover the data exactly: no holes, no overlaps, nothing after
// the last. A file is taken as a whole or not at all, because a wrong weight looks just like a right one.
#include "lib.h"

#include <cerrno>
#include <filesystem>

#include <nlohmann/json.hpp>

using nlohmann::json;
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the file's numbers are read as they are");

constexpr uint64_t MAX_HEADER = 100000000;  // bytes; the limit of the reference implementation
static const char* const METADATA = "__metadata__";

// Bytes per element; 0 for a dtype that we do not know.
static size_t size_of_dtype(const std::string& dtype) {
    static const std::map<std::string, size_t> sizes = {{"F64", 8},  {"I64", 8}, {"F32", 4}, {"I32", 4}, {"F16", 2},
                                                        {"BF16", 2}, {"I8", 1},  {"U8", 1},  {"BOOL", 1}};
    auto found = sizes.find(dtype);
    return found == sizes.end() ? 0 : found->second;
}

// False means that the size does not fit into a size_t.
static bool bytes_of(const std::string& dtype, const Shape& shape, size_t* bytes) {
    *bytes = size_of_dtype(dtype);
    for (int64_t d : shape) {
        if (d < 0 || __builtin_mul_overflow(*bytes, (size_t)d, bytes)) { return false; }
    }
    return true;
}

// Text from a file, fit for an error message: in quotes, on one line, not too long.
static std::string shown(const json& value) {
    std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
    return text.size() <= 120 ? text : text.substr(0, 117) + "...";
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading

using Stream = std::unique_ptr<FILE, int (*)(FILE*)>;

static Stream open_input(const std::string& path, size_t* bytes) {
    std::error_code error;
    *bytes = std::filesystem::file_size(path, error);  // an error for what is no regular file, too
    Stream file(error ? nullptr : fopen(path.c_str(), "rbe"), fclose);
    if (!file) { fail("%s: cannot be opened: %s", path.c_str(), error ? error.message().c_str() : strerror(errno)); }
    if (*bytes < 8) { fail("%s: expected at least 8 bytes, found %zu", path.c_str(), *bytes); }
    return file;
}

// The next n bytes. The file is read, not mapped: if another process cut a mapped file short, a lost page would kill
// us.
static void read_next(const std::string& path, const Stream& file, void* to, size_t n) {
    size_t got = fread(to, 1, n, file.get());
    if (got < n) { fail("%s: its last %zu bytes cannot be read", path.c_str(), n - got); }
}

struct Content {
    std::shared_ptr<Memory> data;
    std::vector<std::vector<char>> aligned;  // copies of tensors that are not aligned in the file
};

static json parse_header(const std::string& path, const std::string& text) {
    auto watch = [&](int depth, json::parse_event_t, json&) {  // the library would follow any depth
        if (depth > 3) { fail("%s: header: expected no more than three levels of nesting", path.c_str()); }
        return true;
    };
    try {
        json header = json::parse(text, watch);
        if (header.is_object()) { return header; }
    } catch (const json::exception&) {}
    fail("%s: header: expected a JSON object", path.c_str());
}

// A list of whole numbers. One that is beyond int64 comes out negative, or as too large an offset.
static bool read_sizes(const json& list, std::vector<int64_t>* sizes) {
    for (const json& value : list) {
        if (!value.is_number_unsigned()) { return false; }
        sizes->push_back(value.get<int64_t>());
    }
    return list.is_array();
}

// `where` is "PATH: tensor NAME".
static FileTensor read_tensor(const char* where, const json& entry, const char* data, size_t data_bytes) {
    static const json nothing;
    auto field = [&](const char* key) -> const json& {
        return entry.is_object() && entry.contains(key) ? entry[key] : nothing;
    };
    const json &dtype = field("dtype"), &shape = field("shape"), &data_offsets = field("data_offsets");
    FileTensor t{};
    t.dtype = dtype.is_string() ? dtype.get<std::string>() : "";
    if (size_of_dtype(t.dtype) == 0) { fail("%s: expected a known dtype, found %s", where, shown(dtype).c_str()); }
    if (!read_sizes(shape, &t.shape)) {
        fail("%s: expected a shape of whole numbers >= 0, found %s", where, shown(shape).c_str());
    }
    if (!bytes_of(t.dtype, t.shape, &t.bytes)) { fail("%s: shape %s: overflow", where, shown(shape).c_str()); }
    std::vector<int64_t> offsets;
    if (!read_sizes(data_offsets, &offsets) || offsets.size() != 2) {
        fail("%s: expected data_offsets [begin, end], found %s", where, shown(data_offsets).c_str());
    }
    size_t begin = offsets[0], end = offsets[1];
    if (begin > end || end > data_bytes) {
        fail("%s: expected data_offsets within %zu bytes of data, found [%zu, %zu]", where, data_bytes, begin, end);
    }
    if (end - begin != t.bytes) {
        fail("%s: expected %zu bytes for %s %s, found %zu", where, t.bytes, t.dtype.c_str(), shown(shape).c_str(),
             end - begin);
    }
    t.data = data + begin;
    return t;
}

static void check_layout(const SafeTensors& file, const char* data, size_t data_bytes) {
    std::vector<std::pair<const FileTensor*, const std::string*>> order;
    for (const auto& [name, t] : file.tensors) { order.push_back({&t, &name}); }
    std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
        return std::make_pair(a.first->data, a.first->bytes) < std::make_pair(b.first->data, b.first->bytes);
    });
    size_t end = 0;  // of the tensors so far
    for (const auto& [t, name] : order) {
        size_t begin = (const char*)t->data - data;
        if (begin != end) {
            fail("%s: tensor %s: expected its data at byte %zu, found it at %zu: %s", file.path.c_str(),
                 shown(*name).c_str(), end, begin, begin < end ? "it overlaps another tensor" : "there is a hole");
        }
        end += t->bytes;
    }
    if (end != data_bytes) { fail("%s: expected %zu bytes of data, found %zu", file.path.c_str(), end, data_bytes); }
}

SafeTensors load_safetensors(const std::string& path) {
    size_t bytes;
    Stream input = open_input(path, &bytes);
    uint64_t header_bytes;
    read_next(path, input, &header_bytes, 8);
    size_t limit = std::min<uint64_t>(bytes - 8, MAX_HEADER);
    if (memcmp(&header_bytes, "PK\3\4", 4) == 0) {
        fail("%s: found a zip file, such as a .pt; safetensors.torch.save_file writes what is read", path.c_str());
    }
    if (header_bytes > limit) {
        fail("%s: expected a header of at most %zu bytes, found its length to be %llu", path.c_str(), limit,
             (unsigned long long)header_bytes);
    }
    std::string text(header_bytes, ' ');
    read_next(path, input, text.data(), header_bytes);
    const json header = parse_header(path, text);
    size_t data_bytes = bytes - 8 - header_bytes;
    auto content = std::make_shared<Content>();
    content->data = allocate(CPU, std::max<size_t>(data_bytes, 1), INPUTS);
    char* data = (char*)content->data->data;

    SafeTensors file;
    file.path = path;
    for (const auto& [name, entry] : header.items()) {
        if (name == METADATA) { continue; }
        std::string where = path + ": tensor " + shown(name);
        file.tensors[name] = read_tensor(where.c_str(), entry, data, data_bytes);
    }
    check_layout(file, data, data_bytes);
    read_next(path, input, data, data_bytes);
    try {
        if (header.contains(METADATA) && !header[METADATA].is_null()) { header[METADATA].get_to(file.metadata); }
    } catch (const json::exception&) { fail("%s: %s: expected an object of strings", path.c_str(), METADATA); }
    for (auto& [name, t] : file.tensors) {  // the format promises no alignment, C++ asks for it
        if ((uintptr_t)t.data % size_of_dtype(t.dtype) != 0) {
            content->aligned.emplace_back((const char*)t.data, (const char*)t.data + t.bytes);
            t.data = content->aligned.back().data();
        }
    }
    file.content = content;
    return file;
}

void require_no_others(const SafeTensors& file, const std::set<std::string>& names, const std::string& what) {
    for (const auto& entry : file.tensors) {
        if (!names.count(entry.first)) {
            fail("%s: tensor %s: not %s", file.path.c_str(), shown(entry.first).c_str(), what.c_str());
        }
    }
}

const FileTensor& require_tensor(const SafeTensors& file, const std::string& name, const Shape& shape,
                                 const std::set<std::string>& dtypes) {
    const std::string where = file.path + ": tensor " + shown(name);
    auto found = file.tensors.find(name);
    if (found == file.tensors.end()) {
        json names = json::array();
        for (const auto& entry : file.tensors) { names.push_back(entry.first); }
        fail("%s: not found among the file's %zu tensors: %s", where.c_str(), names.size(), shown(names).c_str());
    }
    const FileTensor& t = found->second;
    if (dtypes.count(t.dtype) == 0) {
        const std::string expected = join({dtypes.begin(), dtypes.end()}, " or ");
        fail("%s: expected dtype %s, found %s", where.c_str(), expected.c_str(), t.dtype.c_str());
    }
    bool fits = t.shape.size() == shape.size();
    for (size_t i = 0; fits && i < shape.size(); i++) { fits = shape[i] == -1 || shape[i] == t.shape[i]; }
    if (!fits) {
        std::vector<std::string> expected;
        for (int64_t d : shape) { expected.push_back(d == -1 ? "any" : std::to_string(d)); }
        fail("%s: expected shape [%s], found %s", where.c_str(), join(expected, ", ").c_str(),
             to_string(t.shape).c_str());
    }
    return t;
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing. Wide dtypes come first. Then every tensor starts at a multiple of its element size, if the data does, and
// can be used where the file is read to. The file takes its name when its bytes are on the disk.

void save_safetensors(const std::string& path, const std::vector<std::pair<std::string, FileTensor>>& tensors,
                      const std::map<std::string, std::string>& metadata) {
    auto order = tensors;
    std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
        return size_of_dtype(a.second.dtype) > size_of_dtype(b.second.dtype);
    });
    nlohmann::ordered_json header = nlohmann::ordered_json::object();
    if (!metadata.empty()) { header[METADATA] = metadata; }
    size_t end = 0;
    for (const auto& [name, t] : order) {
        size_t bytes;
        const bool known = size_of_dtype(t.dtype) > 0 && bytes_of(t.dtype, t.shape, &bytes);
        if (!known || bytes != t.bytes || (bytes > 0 && !t.data) || header.contains(name)) {
            fail("%s: tensor %s: cannot write %zu bytes as dtype '%s', shape %s", path.c_str(), shown(name).c_str(),
                 t.bytes, t.dtype.c_str(), to_string(t.shape).c_str());
        }
        header[name] = {{"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {end, end + bytes}}};
        end += bytes;
    }
    std::string text = header.dump(-1, ' ', false, json::error_handler_t::replace);
    text.resize((text.size() + 7) / 8 * 8, ' ');
    replace_file(path, [&](FILE* file) {
        uint64_t n = text.size();
        bool ok = fwrite(&n, 8, 1, file) == 1 && fwrite(text.data(), 1, n, file) == n;
        for (size_t i = 0; i < order.size() && ok; i++) {
            const FileTensor& t = order[i].second;
            ok = t.bytes == 0 || fwrite(t.data, 1, t.bytes, file) == t.bytes;
        }
        return ok;
    });
}

FileTensor describe(const Tensor& t) {
    static const std::map<DType, const char*> names = {{F32, "F32"}, {F16, "F16"}, {BF16, "BF16"},
                                                       {F64, "F64"}, {I32, "I32"}, {U8, "U8"}};
    if (!t || t.device() != CPU) { fail("describe: expected a tensor on the CPU"); }
    int64_t stride = 1;
    for (int i = (int)t.shape.size() - 1; i >= 0; i--) {
        if (t.shape[i] != 1 && t.stride[i] != stride) { fail("describe: expected a row-major tensor"); }
        stride *= t.shape[i];
    }
    return {names.at(t.dtype), t.shape, t.data, (size_t)t.size() * size_of(t.dtype)};
}
