// measure.cu: the instruments that every other file uses: errors, devices, memory, time, signals, files.
#include "gpu.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <sstream>
#include <unordered_map>

#include <cxxabi.h>
#include <fcntl.h>
#include <malloc.h>
#include <omp.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef HAVE_OPENBLAS
extern "C" char* openblas_get_corename(void);
#endif
#ifndef CS336_COMMIT
#define CS336_COMMIT "unknown"
#endif

static double to_gib(size_t bytes) { return bytes / 1073741824.0; }

// ---------------------------------------------------------------------------------------------------------------------
// Errors

std::string vstrprintf(const char* format, va_list arguments) {
    va_list again;
    va_copy(again, arguments);
    std::string text(vsnprintf(nullptr, 0, format, again), '\0');
    va_end(again);
    vsnprintf(&text[0], text.size() + 1, format, arguments);
    return text;
}

std::string strprintf(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::string text = vstrprintf(format, arguments);
    va_end(arguments);
    return text;
}

void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::string text = vstrprintf(format, arguments);
    va_end(arguments);
    throw Failure(1, text);
}

void usage_error(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::string text = vstrprintf(format, arguments);
    va_end(arguments);
    throw Failure(2, text);
}

std::string counted(const std::string& n, const std::string& what) { return n + " " + what + (n == "1" ? "" : "s"); }
std::string list_of(const std::vector<std::string>& items) {
    std::string list;
    for (size_t i = 0; i < items.size(); i++) {
        list += (i == 0 ? "" : i + 1 == items.size() ? " and " : ", ") + items[i];
    }
    return list;
}
std::string span(double least, double most, const char* format) {
    char a[64], b[64];
    snprintf(a, sizeof a, format, least), snprintf(b, sizeof b, format, most);
    return strcmp(a, b) == 0 ? a : std::string(a) + " to " + b;
}
std::string join(const std::vector<std::string>& items, const char* between) {
    std::string all;
    for (const std::string& item : items) { all += (all.empty() ? "" : between) + item; }
    return all;
}

// The character of UTF-8 that begins at text[i]. code -1: none does.
struct Character {
    int code, bytes;
};
static Character character_at(const std::string& text, size_t i) {
    static const int least[] = {0, 0x80, 0x800, 0x10000};  // of a character with so many bytes more
    unsigned char c = text[i];
    int more = c < 0x80 ? 0 : c < 0xc0 ? -1 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : c < 0xf8 ? 3 : -1;
    int code = more > 0 ? c & (0x3f >> more) : c;
    for (int k = 1; k <= more; k++) {
        unsigned char next = i + k < text.size() ? text[i + k] : 0;
        if ((next & 0xc0) != 0x80) { return {-1, 1}; }
        code = code << 6 | (next & 0x3f);
    }
    bool surrogate = code >= 0xd800 && code < 0xe000;
    if (more < 0 || code < least[more] || code > 0x10ffff || surrogate) { return {-1, 1}; }
    return {code, more + 1};
}
// The character ends a line, steers a terminal, or turns the direction of the text around it.
static bool steers(int code) {
    return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x61c || code == 0x200e || code == 0x200f ||
           (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
}
// Bytes that are not UTF-8, and characters of which `is_bad` is true, as \xNN.
static std::string escaped(const std::string& text, bool (*is_bad)(int code)) {
    std::string line;
    for (size_t i = 0; i < text.size();) {
        Character c = character_at(text, i);
        if (c.code >= 0 && !is_bad(c.code)) {
            line.append(text, i, c.bytes);
        } else {
            for (int k = 0; k < c.bytes; k++) { line += strprintf("\\x%02x", (unsigned char)text[i + k]); }
        }
        i += c.bytes;
    }
    return line;
}
std::string one_line(const std::string& text) { return escaped(text, steers); }
std::string as_utf8(const std::string& text) {
    return escaped(text, [](int) { return false; });
}

static bool environment_is_1(const char* name) {
    const char* value = getenv(name);
    return value && strcmp(value, "1") == 0;
}

std::string cuda_remedy(const std::string& error, const std::string& card, int sm, int driver, int runtime) {
    auto cuda = [](int version) { return strprintf("CUDA %d.%d", version / 1000, version % 1000 / 10); };
    std::string build = strprintf("make ARCH=\"-gencode arch=compute_%d,code=sm_%d\"", sm, sm);
    std::string name = card + strprintf(" (sm_%d)", sm);
    if (error == "cudaErrorInsufficientDriver" && driver == 0) {
        return "there is no NVIDIA driver here: `nvidia-smi` has to work first";
    }
    if (error == "cudaErrorInsufficientDriver") {
        return "the driver is for " + cuda(driver) + ", this build for " + cuda(runtime) +
               ": update the driver, or build with the driver's CUDA: make NVCC=" +
               strprintf("/usr/local/cuda-%d.%d/bin/nvcc", driver / 1000, driver % 1000 / 10);
    }
    if (sm == 0) { return ""; }
    if (error == "cudaErrorUnsupportedPtxVersion") {
        return "the driver, for " + cuda(driver) + ", cannot translate the PTX of " + cuda(runtime) + ", and the " +
               name + " has no code of its own in this build: " + build;
    }
    if (error != "cudaErrorNoKernelImageForDevice" && error != "cudaErrorInvalidDeviceFunction") { return ""; }
    return sm < 75 ? "the " + name + " is too old, the kernels need sm_75 (a T4): make NVCC= builds for the CPU"
                   : "this build has no code for the " + name + ": " + build;
}

#ifdef __CUDACC__
static std::string described(cudaError_t error) {
    int device = 0, driver = 0, runtime = 0;
    cudaDeviceProp card{};
    if (cudaGetDevice(&device) == cudaSuccess) { cudaGetDeviceProperties(&card, device); }
    cudaDriverGetVersion(&driver), cudaRuntimeGetVersion(&runtime);
    cudaGetLastError();  // of these
    std::string help = cuda_remedy(cudaGetErrorName(error), card.name, 10 * card.major + card.minor, driver, runtime);
    return help.empty() ? cudaGetErrorString(error) : help;
}
void cuda_check(cudaError_t error, const char* call, const char* file, int line) {
    if (error == cudaSuccess) { return; }
    cudaGetLastError();  // or the next LAUNCH_CHECK would report this error again, as its own
    std::string what = strprintf("%s:%d: %s: %s", file, line, call, described(error).c_str());
    if (error == cudaErrorMemoryAllocation) { throw OutOfMemory(0, what); }
    throw Failure(1, what);
}

void launch_check(const char* file, int line) {
    static const bool wait = environment_is_1("CS336_SYNC");
    cuda_check(cudaGetLastError(), "kernel launch", file, line);
    if (wait) { cuda_check(cudaStreamSynchronize(stream()), "kernel", file, line); }
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Names

const char* name_of(Device d) {
    static const char* const names[] = {"cpu", "cuda", "meta"};
    return names[d];
}

const char* name_of(DType t) {
    static const char* const names[] = {"float32", "float16", "bfloat16", "float64", "int32", "uint8"};
    return names[t];
}

const char* name_of(Mode m) {
    static const char* const names[] = {"eager", "fused", "flash"};
    return names[m];
}

const char* name_of(Precision p) {
    static const char* const names[] = {"fp32", "tf32", "bf16", "fp16", "pure_bf16"};
    return names[p];
}

const char* name_of(Category c) {
    static const char* const names[] = {"parameters",  "gradients", "optimizer state", "weight copies",
                                        "activations", "workspace", "inputs"};
    return names[c];
}

Mode mode_from(const std::string& name) {
    for (Mode m : {EAGER, FUSED, FLASH}) {
        if (name == name_of(m)) { return m; }
    }
    fail("mode '%s': expected eager, fused or flash", name.c_str());
}

Precision precision_from(const std::string& name) {
    for (Precision p : {FP32, TF32, PREC_BF16, PREC_FP16, PREC_PURE_BF16}) {
        if (name == name_of(p)) { return p; }
    }
    fail("precision '%s': expected fp32, tf32, bf16, fp16 or pure_bf16", name.c_str());
}

std::string lower_name(const std::string& name) {
    std::string lower = name;
    for (char& c : lower) { c = c == '-' ? '_' : (char)tolower((unsigned char)c); }
    return lower;
}
// Letters put in, left out, replaced, or swapped with the next one: the Damerau-Levenshtein distance where no letter
// changes twice.
static size_t changes_between(const std::string& a, const std::string& b) {
    std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
    for (size_t i = 0; i <= a.size(); i++) {
        for (size_t j = 0; j <= b.size(); j++) {
            d[i][j] = i + j;
            if (i == 0 || j == 0) { continue; }
            d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
            bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if (swapped) { d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1); }
        }
    }
    return d[a.size()][b.size()];
}
std::string did_you_mean(const std::string& word, const std::vector<std::string>& names) {
    const std::string typed = lower_name(word);
    if (typed.size() < 2 || typed.size() > 100) { return ""; }
    std::string nearest;
    size_t fewest = std::max<size_t>(1, typed.size() / 3);  // more make another word
    for (const std::string& name : names) {
        const std::string lower = lower_name(name);
        size_t n = lower.compare(0, typed.size(), typed) == 0 ? 1 : changes_between(typed, lower);
        if (n < fewest || (n == fewest && nearest.empty())) { fewest = n, nearest = name; }
    }
    return nearest.empty() ? "" : "; did you mean " + nearest + "?";
}

std::string full_name(const std::string& word, const std::vector<std::string>& names, const char* kind) {
    const std::string typed = lower_name(word);
    std::string start = typed;
    std::vector<std::string> found;
    while (true) {  // an unknown word is shortened until some name starts like it: these are the candidates
        for (const std::string& name : names) {
            if (typed == name) { return name; }
            if (name.compare(0, start.size(), start) == 0) { found.push_back(name); }
        }
        if (!found.empty() || start.empty()) { break; }
        start.pop_back();
    }
    if (start == typed && found.size() == 1) { return found[0]; }
    if (start == typed && !typed.empty()) {
        usage_error("%s: more than one %s starts like this; candidates: %s", word.c_str(), kind,
                    join(found, ", ").c_str());
    }
    std::string near = did_you_mean(word, names);
    usage_error("%s: no such %s%s", word.empty() ? "''" : word.c_str(), kind,
                near.empty() ? ("; candidates: " + join(found, ", ")).c_str() : near.c_str());
}

// ---------------------------------------------------------------------------------------------------------------------
// Where things run

Context context;

// What follows `key` in the first line of the file that starts with it. "" without such a file or line.
static std::string field_of(const char* path, const std::string& key) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        if (line.compare(0, key.size(), key) == 0) {
            size_t start = line.find_first_not_of(" \t:", key.size());
            return start == std::string::npos ? "" : line.substr(start);
        }
    }
    return "";
}

int cuda_devices(std::string* why) {
    static std::string reason;
    static const int devices = [] {  // asked once: it takes microseconds, and launches want to know
        int n = 0;
#ifdef __CUDACC__
        cudaError_t error = cudaGetDeviceCount(&n);
        if (error != cudaSuccess) {
            cudaGetLastError();
            n = 0;
            reason = described(error);
        } else if (n == 0) {
            reason = "the driver sees no GPU";
        }
#else
        reason = "this build is for the CPU only";
#endif
        return n;
    }();
    if (why) { *why = reason; }
    return devices;
}

#ifdef __CUDACC__
static __global__ void any_kernel() {}
#endif

Device choose_device(const std::string& want, int gpu) {
    if (want != "auto" && want != "cpu" && want != "cuda") {
        fail("device '%s': expected auto, cpu or cuda", want.c_str());
    }
    if (want == "cpu") { return CPU; }
    if (context.plan_only && context.memory < SIZE_MAX) { return CUDA; }
    std::string why;
    bool usable = cuda_devices(&why) > 0;
#ifdef __CUDACC__
    if (usable) {
        CUDA_CHECK(cudaSetDevice(gpu));
        cudaFuncAttributes attributes;
        cudaError_t error = cudaFuncGetAttributes(&attributes, any_kernel);
        usable = error != cudaErrorNoKernelImageForDevice && error != cudaErrorInvalidDeviceFunction &&
                 error != cudaErrorUnsupportedPtxVersion;
        if (!usable) { why = described(error); }
        CUDA_CHECK(usable ? error : cudaSuccess);
    }
#else
    (void)gpu;
#endif
    if (!usable) {
        if (want == "cuda") { fail("device cuda: there is none (%s)", why.c_str()); }
        if (!context.plan_only) { note("device auto: took cpu (%s)", why.c_str()); }
        return CPU;
    }
    if (want == "auto" && !context.plan_only) { note("device auto: took cuda"); }
    return CUDA;
}
bool gpu_is_imagined() { return context.plan_only && context.device == CUDA && context.memory < SIZE_MAX; }

#ifdef __CUDACC__
static thread_local cudaStream_t other = nullptr;
cudaStream_t stream() {
    static const cudaStream_t s = [] {
        cudaStream_t created;
        int least, greatest;  // collectives come first, then this stream, then what run_behind runs
        CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        CUDA_CHECK(cudaStreamCreateWithPriority(&created, cudaStreamNonBlocking, (least + greatest) / 2));
        return created;
    }();
    return other ? other : s;
}
void with_stream(cudaStream_t s, const std::function<void()>& f) {
    struct Guard {
        cudaStream_t before = other;
        ~Guard() { other = before; }
    } guard;
    other = s;
    f();
}
#endif

void synchronize() {
#ifdef __CUDACC__
    if (context.device == CUDA) { CUDA_CHECK(cudaDeviceSynchronize()); }
#endif
}

int cpu_threads() { return omp_get_max_threads(); }

// Two libraries read the environment only while the program loads, so we set what is unset and start once more.
// OpenBLAS gives a processor younger than itself the kernels of an old one (Prescott: SSE3), five times too slow.
// OpenMP's threads spin while they wait, by default. Where cores are shared (containers, CI, several ranks) they take
// the time from the threads that work: a step was seen to take 4 times as long.
void choose_cpu_settings(char** argv) {
    std::string openblas;
#if defined(HAVE_OPENBLAS) && defined(__x86_64__)
    bool old = strcmp(openblas_get_corename(), "Prescott") == 0;
    bool avx512 =
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (old && (avx512 || avx2)) { openblas = avx512 ? "SkylakeX" : "Haswell"; }
#endif
    bool restart = false;
    auto set = [&](const char* name, const std::string& value) {
        if (value.empty() || getenv(name)) { return; }
        restart = setenv(name, value.c_str(), 1) == 0 || restart;
    };
    set("OPENBLAS_CORETYPE", openblas);
    set("OMP_WAIT_POLICY", "passive");
    if (!restart) { return; }
    execv("/proc/self/exe", argv);
    note("warning: could not start anew (%s): the CPU path may be several times slower", strerror(errno));
}

#ifdef __CUDACC__
static int device_attribute(cudaDeviceAttr which, int of_an_h100) {
    int device, value;
    if (cuda_devices() == 0) { return of_an_h100; }
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
    return value;
}
int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount, 132); }
int compute_capability() {
    return 10 * device_attribute(cudaDevAttrComputeCapabilityMajor, 9) +
           device_attribute(cudaDevAttrComputeCapabilityMinor, 0);
}

static std::string gpu_description() {
    cudaDeviceProp properties;
    int device, driver, runtime;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    CUDA_CHECK(cudaDriverGetVersion(&driver));
    CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
    // The runtime only knows which CUDA the driver is made for; its own version ("580.95.05") stands in /proc.
    std::istringstream words(field_of("/proc/driver/nvidia/version", "NVRM version"));
    std::string version = strprintf("for CUDA %d.%d", driver / 1000, driver % 1000 / 10);
    int major, minor;
    for (std::string word; words >> word;) {
        if (sscanf(word.c_str(), "%d.%d", &major, &minor) == 2) {
            version = word;
            break;
        }
    }
    return strprintf("%s, driver %s, CUDA %d.%d", properties.name, version.c_str(), runtime / 1000,
                     runtime % 1000 / 10);
}
#endif

std::string device_description() {
    if (gpu_is_imagined()) { return strprintf("a GPU with %.4g GiB free", to_gib(context.memory)); }
#ifdef __CUDACC__
    if (context.device == CUDA) { return gpu_description(); }
#endif
    if (context.device == META) { return "meta (nothing is computed)"; }
    std::string name = field_of("/proc/cpuinfo", "model name");
    std::string text = (name.empty() ? "CPU" : name) + ", " + counted(std::to_string(cpu_threads()), "thread");
#ifdef HAVE_OPENBLAS
    text += strprintf(", OpenBLAS %s", openblas_get_corename());
#endif
    return text;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory: the raw blocks

// A control group that limits memory: ours, or one around it.
struct MemoryGroup {
    std::string limit, used, stat;  // files
    const char* cached;             // field of stat
};
// Both versions can be mounted: in version 1 the memory controller has a tree of its own.
static std::vector<MemoryGroup> memory_groups(const std::string& root) {
    auto lists = [](const std::string& items, const char* item) {
        return ("," + items + ",").find("," + std::string(item) + ",") != std::string::npos;
    };
    std::vector<MemoryGroup> groups;
    std::ifstream mounts(root + "/proc/self/mountinfo");
    for (std::string line; std::getline(mounts, line);) {
        std::istringstream words(line);
        std::string word, top, folder, type, options, group;  // top: which group it is that is mounted
        words >> word >> word >> word >> top >> folder;
        while (words >> word && word != "-") {}
        words >> type >> word >> options;
        bool v1 = type == "cgroup" && lists(options, "memory");
        if (!v1 && type != "cgroup2") { continue; }
        std::ifstream ours(root + "/proc/self/cgroup");
        while (std::getline(ours, line)) {  // 4:memory:/a/b, or in version 2 0::/a/b
            size_t first = line.find(':'), second = line.find(':', first + 1);
            if (second == std::string::npos) { continue; }
            std::string controllers = line.substr(first + 1, second - first - 1);
            if (v1 ? lists(controllers, "memory") : controllers.empty()) { group = line.substr(second + 1); }
        }
        if (top != "/" && group.compare(0, top.size(), top) == 0) { group.erase(0, top.size()); }
        for (bool more = true; more;) {
            const std::string at = root + folder + group + "/", stat = at + "memory.stat";
            groups.push_back(v1 ? MemoryGroup{at + "memory.limit_in_bytes", at + "memory.usage_in_bytes", stat,
                                              "\ntotal_inactive_file "}
                                : MemoryGroup{at + "memory.max", at + "memory.current", stat, "\ninactive_file "});
            more = !group.empty();
            if (more) { group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/')); }
        }
    }
    return groups;
}

// The number behind `before`, which begins with a line's end. False: there is no such file, or no number.
static bool number_in(const char* path, const char* before, size_t* number) {
    char text[1 << 14] = "\n", *end = text + 1;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) { return false; }
    for (ssize_t n; end < text + sizeof text - 1 && (n = read(file, end, text + sizeof text - 1 - end)) > 0;) {
        end += n;
    }
    close(file);
    *end = 0;
    const char* found = strstr(text, before);
    char* behind = nullptr;
    if (found) { *number = strtoull(found + strlen(before), &behind, 10); }
    return found && behind > found + strlen(before);
}

// It uses no heap: its memory could be a piece of a large block that was freed and is about to be allocated again.
static size_t memory_left(const char* meminfo, const std::vector<MemoryGroup>& groups) {
    size_t left = 0;
    struct sysinfo info;
    if (number_in(meminfo, "\nMemAvailable:", &left)) {
        left *= 1024;
    } else if (sysinfo(&info) == 0) {
        left = (info.freeram + info.bufferram) * info.mem_unit;
    }
    for (const MemoryGroup& group : groups) {
        size_t limit, used = 0, cached = 0;
        if (!number_in(group.limit.c_str(), "\n", &limit)) { continue; }  // "max"
        number_in(group.used.c_str(), "\n", &used);
        number_in(group.stat.c_str(), group.cached, &cached);
        limit += std::min(cached, used);  // cached files count as used, but make room when memory runs short
        left = std::min(left, limit > used ? limit - used : 0);
    }
    return left;
}

size_t system_memory(const std::string& root) {
    static const std::vector<MemoryGroup> ours = memory_groups("");
    if (root.empty()) { return memory_left("/proc/meminfo", ours); }
    return memory_left((root + "/proc/meminfo").c_str(), memory_groups(root));
}

#ifdef __CUDACC__
static cudaMemPool_t memory_pool() {
    static const cudaMemPool_t pool = [] {
        int device;
        cudaMemPool_t p;
        uint64_t keep_everything = UINT64_MAX;  // by default each synchronize would give unused memory back
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaDeviceGetDefaultMemPool(&p, device));
        CUDA_CHECK(cudaMemPoolSetAttribute(p, cudaMemPoolAttrReleaseThreshold, &keep_everything));
        return p;
    }();
    return pool;
}
#endif

size_t gpu_memory_used() {
#ifdef __CUDACC__
    if (cuda_devices() > 0) {
        size_t free, total;
        CUDA_CHECK(cudaMemGetInfo(&free, &total));
        return total - free;
    }
#endif
    return 0;
}

void give_back_cached_memory() {
#ifdef __CUDACC__
    if (cuda_devices() == 0) { return; }
    CUDA_CHECK(cudaDeviceSynchronize());  // memory that was freed in stream order is given back only when the stream
                                          // gets there
    CUDA_CHECK(cudaMemPoolTrimTo(memory_pool(), 0));
#endif
}

size_t available_memory(Device d) {
    if (d == META) { return SIZE_MAX; }
    size_t allowed = SIZE_MAX;
    if (d == context.device && context.memory < SIZE_MAX) {
        allowed = context.memory - std::min(context.memory, memory_use(d).now);
    }
    if (gpu_is_imagined()) { return allowed; }
#ifdef __CUDACC__
    if (d == CUDA) {
        size_t free, total;
        uint64_t reserved, used;
        CUDA_CHECK(cudaMemGetInfo(&free, &total));
        CUDA_CHECK(cudaMemPoolGetAttribute(memory_pool(), cudaMemPoolAttrReservedMemCurrent, &reserved));
        CUDA_CHECK(cudaMemPoolGetAttribute(memory_pool(), cudaMemPoolAttrUsedMemCurrent, &used));
        return std::min<size_t>(allowed, free + (reserved - used));
    }
#endif
    malloc_trim(0);  // memory that we freed and malloc kept is available, too
    return std::min(allowed, system_memory());
}

void require_memory(size_t bytes, const std::string& what) {
    size_t available = available_memory(CPU);
    if (bytes <= available) { return; }
    throw OutOfMemory(bytes, strprintf("out of memory on cpu: %.2f GiB for %s, with %.2f GiB available", to_gib(bytes),
                                       what.c_str(), to_gib(available)));
}

// Returns null where there is not enough memory.
static void* allocate_cpu(size_t bytes) {
    // Left alone, malloc maps each large block afresh and unmaps it when freed; the kernel then zeroes every page of
    // every activation in every step. So: no mappings, and nothing goes back before available_memory() asks for it.
    // Only speed depends on it, so a malloc without these options (the sanitizers') will do.
    static const bool tuned = (mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1), true);
    (void)tuned;
    // Linux promises more memory than it has, and kills the process that touches it. The question takes some 0.2 ms, so
    // we ask once per so many bytes, and want room for as many again.
    constexpr size_t unasked_bytes = 32 << 20;
    static std::atomic<size_t> unasked{0};
    size_t needs = std::max(bytes, bytes + unasked_bytes);  // of SIZE_MAX the sum wraps
    if (bytes > unasked_bytes || (unasked += bytes) > unasked_bytes) {
        if (needs > system_memory() && needs > available_memory(CPU)) { return nullptr; }
        unasked = 0;
    }
    // The alignment to 64 bytes, a cache line and an AVX-512 register, is ours: glibc 2.36's aligned_alloc gives the
    // slack before a block to small requests, and then the freed block is too short for the next one of its size.
    char* block = (char*)malloc(bytes + 64);
    if (!block) { return nullptr; }
    char* data = (char*)(((uintptr_t)block + 64) & ~(uintptr_t)63);
    ((char**)data)[-1] = block;
    return data;
}

static void free_cpu(void* data) { free(((char**)data)[-1]); }

#ifdef __CUDACC__
// Where the pool holds enough, but in pieces, the driver remaps their pages into one block (measured). Pieces that the
// GPU has yet to free may not count for it, so the second attempt first waits for the GPU and gives unused pages back.
static void* allocate_cuda(size_t bytes) {
    void* data = nullptr;
    for (int attempt = 0; attempt < 2; attempt++) {
        if (attempt == 1) { give_back_cached_memory(); }
        cudaError_t error = cudaMallocFromPoolAsync(&data, bytes, memory_pool(), stream());
        if (error == cudaSuccess) { return data; }
        if (error != cudaErrorMemoryAllocation) { CUDA_CHECK(error); }
        cudaGetLastError();
    }
    return nullptr;
}

static void free_cuda(void* data) {
    cudaError_t error = cudaFreeAsync(data, stream());
    // Static tensors die after the driver has shut down, and after a fault every call fails: one line is enough.
    static bool said = false;
    if (error != cudaSuccess && error != cudaErrorCudartUnloading && !said) {
        said = true;
        note("cudaFreeAsync: %s", cudaGetErrorString(error));
    }
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Memory: the books

static MemoryUse uses[3];       // one per device
static std::mutex books_mutex;  // the last owner of a buffer may be another thread

const MemoryUse& memory_use(Device device) { return uses[device]; }

static std::set<const Memory*> live[3];

static std::atomic<bool> logging{false};
static Device logged_device;
static double log_start;
static std::vector<MemoryEvent> memory_log;

static void log_event(const Memory* m, double ms, bool is_alloc, std::vector<const char*> ranges) {
    if (m->bytes == 0 || m->device != logged_device) { return; }
    memory_log.push_back({ms, is_alloc, (uint64_t)m->data, m->bytes, m->category, std::move(ranges), m->at});
}

void start_memory_log(Device device) {
    std::lock_guard<std::mutex> lock(books_mutex);
    memory_log.clear();
    logged_device = device;
    log_start = now_ms();
    for (const Memory* m : live[device]) {
        log_event(m, 0, true, *m->op ? std::vector<const char*>{m->op} : std::vector<const char*>());
    }
    logging = true;
}

std::vector<MemoryEvent> stop_memory_log() {
    std::lock_guard<std::mutex> lock(books_mutex);
    logging = false;
    return std::move(memory_log);
}

static void book(const Memory* memory, bool comes) {
    std::lock_guard<std::mutex> lock(books_mutex);
    if (logging) { log_event(memory, now_ms() - log_start, comes, open_ranges()); }
    MemoryUse& use = uses[memory->device];
    if (comes) {
        live[memory->device].insert(memory);
    } else {
        live[memory->device].erase(memory);
    }
    use.now += comes ? memory->bytes : -memory->bytes;
    use.now_by[memory->category] += comes ? memory->bytes : -memory->bytes;
    if (memory->device == context.device) { trace_memory(use.now); }
    if (use.now > use.peak) {
        use.peak = use.now;
        std::copy_n(use.now_by, CATEGORIES, use.peak_by);
    }
}

std::vector<const Memory*> live_memory(Device device) {
    std::lock_guard<std::mutex> lock(books_mutex);
    return std::vector<const Memory*>(live[device].begin(), live[device].end());
}

void reset_peak(Device device) {
    std::lock_guard<std::mutex> lock(books_mutex);
    MemoryUse& use = uses[device];
    use.peak = use.now;
    std::copy_n(use.now_by, CATEGORIES, use.peak_by);
}
static double planned_flops;
void count_planned_flops(double flops) { planned_flops += flops; }
Prediction planned_peak(const std::function<void()>& run) {
    RestoreContext restore;
    context.widening = multiplies_copies(context.device, matmul_dtype());
    Planning planning;
    size_t before = memory_use(META).now;
    reset_peak(META);
    planned_flops = 0;
    run();
    return {memory_use(META).peak - before, planned_flops};
}

bool watched() { return is_tracing() || logging; }

static std::shared_ptr<Places> places;  // in use

void allocate_in(const std::shared_ptr<Places>& use, const std::function<void()>& f) {
    struct Use {
        explicit Use(const std::shared_ptr<Places>& use) { places = use; }
        ~Use() { places = nullptr; }
    } while_f_runs(use);
    f();
}

static void* allocate_raw(Device device, size_t bytes) {
    if (device == CUDA) {
#ifdef __CUDACC__
        return allocate_cuda(bytes);
#else
        fail("device cuda: this build is for the CPU only");
#endif
    }
    return allocate_cpu(bytes);
}

// Bytes of 0xFF are NaN in all our float formats, so whoever reads what nobody wrote shows it.
static void poison(Device device, void* data, size_t bytes) {
#ifdef __CUDACC__
    if (device == CUDA) {
        CUDA_CHECK(cudaMemsetAsync(data, 0xFF, bytes, stream()));
        return;
    }
#endif
    if (device == CPU) { memset(data, 0xFF, bytes); }
}

std::shared_ptr<Memory> allocate(Device device, size_t bytes, Category category, Source at) {
    static const bool poisoning = environment_is_1("CS336_POISON");
    auto memory = std::make_shared<Memory>();
    memory->device = device;
    memory->category = category;
    memory->op = innermost_range();
    memory->at = at;
    void* place = nullptr;
    if (places && device != CPU && bytes > 0) {
        memory->places = places, memory->number = places->take(bytes, &place), memory->placed = place;
    }
    if (device == META) {
        // An address to count offsets from, never to read; each buffer has its own, so that a log can tell them apart.
        static std::atomic<uint64_t> next{1 << 20};
        memory->data = (void*)next.fetch_add((bytes + 511) / 512 * 512);
    } else if (bytes > 0) {
        memory->data = place ? place : allocate_raw(device, bytes);
        if (!memory->data) {
            throw OutOfMemory(bytes,
                              strprintf("out of memory on %s: %.2f GiB for %s%s%s, beside %.2f GiB in use, "
                                        "with %.2f GiB available",
                                        name_of(device), to_gib(bytes), name_of(category), *memory->op ? " in " : "",
                                        memory->op, to_gib(uses[device].now), to_gib(available_memory(device))));
        }
    }
#ifdef __CUDACC__
    // A free does not wait: it is a destructor and must not throw. Its time is early by one operation at most.
    if (logging && device == CUDA) { CUDA_CHECK(cudaStreamSynchronize(stream())); }
#endif
    memory->bytes = bytes;
    if (!memory->placed) { book(memory.get(), true); }
    if (poisoning && memory->data && device != META) { poison(device, memory->data, bytes); }
    return memory;
}

Memory::~Memory() {
    if (places) { places->give(number); }
    if (placed) { return; }
    book(this, false);
    if (!data || device == META) { return; }
#ifdef __CUDACC__
    if (device == CUDA) {
        free_cuda(data);
        return;
    }
#endif
    free_cpu(data);
}

void copy_bytes(void* to, Device to_device, const void* from, Device from_device, size_t bytes) {
    if (bytes == 0 || to_device == META || from_device == META) { return; }
#ifdef __CUDACC__
    if (to_device == CUDA || from_device == CUDA) {
        CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream()));
        CUDA_CHECK(cudaStreamSynchronize(stream()));
        return;
    }
#endif
    memcpy(to, from, bytes);
}

// ---------------------------------------------------------------------------------------------------------------------
// Time

double now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Stats stats_of(std::vector<double> values) {
    if (values.empty()) { fail("statistics of no values"); }
    std::sort(values.begin(), values.end());
    int n = values.size();
    double mean = std::accumulate(values.begin(), values.end(), 0.0) / n;
    double squares = 0;
    for (double v : values) { squares += (v - mean) * (v - mean); }
    double std = n > 1 ? std::sqrt(squares / (n - 1)) : 0;
    double median = (values[(n - 1) / 2] + values[n / 2]) / 2;
    return {mean, std, median, values.front(), values.back(), n};
}

bool level(const Stats& a, const Stats& b) {
    const double least = a.n > 1 && b.n > 1 ? 0.01 : 0.1;
    return std::fabs(a.mean - b.mean) <= std::max(std::hypot(a.std, b.std), least * std::max(a.mean, b.mean));
}
std::string how_fast(const Stats& ours, const Stats& theirs, const std::string& they, double Stats::*by) {
    const double times = theirs.*by / (ours.*by);
    if (level(ours, theirs)) { return "level with " + they + " within the noise"; }
    return times > 1 ? strprintf("%.2f times as fast as %s", times, they.c_str())
                     : strprintf("slower than %s (%.2f times as fast)", they.c_str(), times);
}

std::vector<double> time_queued_ms(int warmup, int n, const std::function<void()>& prepare,
                                   const std::function<void()>& f) {
    std::vector<double> times;
#ifdef __CUDACC__
    std::vector<cudaEvent_t> events(context.device == CUDA ? 2 * n : 0);
    for (cudaEvent_t& event : events) { CUDA_CHECK(cudaEventCreate(&event)); }
#endif
    for (int i = -warmup; i < n; i++) {
        prepare();
#ifdef __CUDACC__
        if (context.device == CUDA) {
            if (i >= 0) { CUDA_CHECK(cudaEventRecord(events[2 * i], stream())); }
            f();
            if (i >= 0) { CUDA_CHECK(cudaEventRecord(events[2 * i + 1], stream())); }
            continue;
        }
#endif
        double start = now_ms();
        f();
        if (i >= 0) { times.push_back(now_ms() - start); }
    }
    synchronize();
#ifdef __CUDACC__
    for (size_t i = 0; i < events.size(); i += 2) {
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, events[i], events[i + 1]));
        times.push_back(ms);
    }
    for (cudaEvent_t event : events) { CUDA_CHECK(cudaEventDestroy(event)); }
#endif
    return times;
}
std::vector<double> time_ms(int warmup, int n, const std::function<void()>& f) {
    std::vector<double> times;
    synchronize();  // what was queued before is not ours to count
    for (int i = -warmup; i < n; i++) {
        double start = now_ms();
        f();
        synchronize();
        if (i >= 0) { times.push_back(now_ms() - start); }
    }
    return times;
}

// ---------------------------------------------------------------------------------------------------------------------
// Lines on stderr

static bool progress_is_open = false;

void end_progress() {
    if (progress_is_open) {
        fprintf(stderr, "\r\033[K");  // back to the line's start, and erase it
        progress_is_open = false;
    }
}

void progress(const char* format, ...) {
    static const bool terminal = isatty(STDERR_FILENO);
    static double said_ms = now_ms();
    if (!terminal && now_ms() - said_ms < 5000) { return; }  // in a file, a line at most every 5 s
    said_ms = now_ms();
    va_list arguments;
    va_start(arguments, format);
    std::string text = vstrprintf(format, arguments);
    va_end(arguments);
    if (!terminal) { return note("%s", text.c_str()); }
    // No automatic wrap (?7l ... ?7h): the next '\r' would rewrite only the end of a line that wrapped.
    fprintf(stderr, "\r\033[K\033[?7l%s\033[?7h", one_line(text).c_str());
    fflush(stderr);
    progress_is_open = true;
}

// What was typed, or read from a file, may be long and hold anything.
void note(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::string line = one_line(vstrprintf(format, arguments));
    va_end(arguments);
    constexpr size_t END = 1500;  // bytes that are shown of either end; no character is cut
    if (line.size() > 2 * END + 5) {
        size_t head = END, tail = line.size() - END;
        while ((line[head] & 0xc0) == 0x80) { head--; }
        while ((line[tail] & 0xc0) == 0x80) { tail++; }
        line.replace(head, tail - head, " ... ");
    }
    end_progress();
    fprintf(stderr, "%s\n", line.c_str());
}

// ---------------------------------------------------------------------------------------------------------------------
// Ends by a signal

static const int END_SIGNALS[] = {SIGINT, SIGTERM, SIGHUP};
static struct sigaction before_end_signals[3];
static std::atomic<int> end_signal{0};
static std::atomic<int64_t> end_signal_ms{0};
static std::atomic<bool> end_signal_says{false};

static void take_end_signal(int number) {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    int64_t ms = (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
    int none = 0, error = errno;
    if (end_signal.compare_exchange_strong(none, number)) {
        end_signal_ms = ms;
        static const char text[] = "\ncs336: finishing the step, and what --save writes; once more ends at once\n";
        if (end_signal_says && write(STDERR_FILENO, text, sizeof text - 1) < 0) { errno = error; }
    } else if (ms - end_signal_ms >= 1000) {
        remove_unfinished_files();
        signal(number, SIG_DFL);
        raise(number);
    }
    errno = error;
}
EndSignals::EndSignals(bool says) {
    end_signal = 0, end_signal_says = says;
    struct sigaction action = {};
    action.sa_handler = take_end_signal;
    action.sa_flags = SA_RESTART;
    for (int i = 0; i < 3; i++) {
        sigaction(END_SIGNALS[i], nullptr, &before_end_signals[i]);
        bool ignored = before_end_signals[i].sa_handler == SIG_IGN;  // as under nohup
        if (!ignored) { sigaction(END_SIGNALS[i], &action, nullptr); }
    }
}
EndSignals::~EndSignals() {
    for (int i = 0; i < 3; i++) { sigaction(END_SIGNALS[i], &before_end_signals[i], nullptr); }
}
int EndSignals::seen() { return end_signal; }

// ---------------------------------------------------------------------------------------------------------------------
// Files

// A signal handler may read plain arrays, but neither strings nor lists. The main thread alone writes files.
static char unfinished[4][PATH_MAX];
static volatile sig_atomic_t unfinished_files = 0;
static const int FATAL_SIGNALS[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};  // the last one is launch_ranks'
static struct sigaction before_unfinished[std::size(FATAL_SIGNALS)];

void remove_unfinished_files() {
    for (int i = 0; i < unfinished_files; i++) { unlink(unfinished[i]); }
}
static void remove_unfinished(int number) {
    remove_unfinished_files();
    raise(number);  // SA_RESETHAND: it ends us, as if we had never caught it
}

Unfinished::Unfinished(const std::string& path) {
    if (unfinished_files == 4) { fail("%s: more than 4 unfinished files", path.c_str()); }
    if (path.size() >= PATH_MAX) { fail("%s: cannot be written: %s", path.c_str(), strerror(ENAMETOOLONG)); }
    strcpy(unfinished[unfinished_files], path.c_str());
    if (++unfinished_files > 1) { return; }
    struct sigaction action = {};
    action.sa_handler = remove_unfinished;
    action.sa_flags = (int)SA_RESETHAND;
    for (size_t i = 0; i < std::size(FATAL_SIGNALS); i++) {
        sigaction(FATAL_SIGNALS[i], nullptr, &before_unfinished[i]);
        if (before_unfinished[i].sa_handler == SIG_DFL) { sigaction(FATAL_SIGNALS[i], &action, nullptr); }
    }
}
Unfinished::~Unfinished() {
    unlink(unfinished[unfinished_files - 1]);  // gone already where it took its final name
    if (--unfinished_files > 0) { return; }
    for (size_t i = 0; i < std::size(FATAL_SIGNALS); i++) {
        sigaction(FATAL_SIGNALS[i], &before_unfinished[i], nullptr);
    }
}

std::string real_name(const std::string& path) {
    namespace fs = std::filesystem;
    fs::path p = path;
    std::error_code error;
    for (int i = 0; i < 40 && fs::is_symlink(p, error); i++) {  // also one whose target is not there yet
        p = p.parent_path() / fs::read_symlink(p, error);       // an absolute one takes the folder's place
    }
    fs::path folder = fs::canonical(p.has_parent_path() ? p.parent_path() : ".", error);
    return error ? path : (folder / p.filename()).string();
}

static const char* const TEMPORARY = ".tmp.cs336.";
std::string temporary_name(const std::string& path) {  // that nobody can guess
    return real_name(path) + TEMPORARY + strprintf("%08x", std::random_device()());
}
// Removes what a killed run has left beside path. A file that is being written is locked soon after its creation.
static void remove_stale(const std::string& path) {
    std::error_code error;
    const std::filesystem::path folder = std::filesystem::path(path).parent_path();
    for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
        std::string name = entry.path().string();
        const std::string start = path + TEMPORARY;
        bool ours = name.size() == start.size() + 8 && name.compare(0, start.size(), start) == 0 &&
                    name.find_first_not_of("0123456789abcdef", start.size()) == std::string::npos;
        if (!ours) { continue; }
        int file = open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        struct stat s;
        if (file < 0) { continue; }
        bool old = fstat(file, &s) == 0 && S_ISREG(s.st_mode) && s.st_mtime < time(nullptr) - 60;
        if (old && flock(file, LOCK_EX | LOCK_NB) == 0) { unlink(name.c_str()); }
        close(file);
    }
}

void replace_file(const std::string& path, const std::function<bool(FILE*)>& write) {
    const std::string target = real_name(path);
    struct stat before;
    bool replaces = stat(target.c_str(), &before) == 0;
    if (replaces ? access(target.c_str(), W_OK) != 0
                 : errno != ENOENT) {  // its owner forbids it, or links lead in a circle
        fail("%s: cannot be written: %s", path.c_str(), strerror(errno));
    }
    if (replaces && !S_ISREG(before.st_mode)) {
        fail("%s: cannot be written: expected a regular file", path.c_str());  // or we would replace /dev/null
    }
    remove_stale(target);
    Unfinished temporary(temporary_name(target));
    const char* name = unfinished[unfinished_files - 1];
    int descriptor = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, replaces ? 0600 : 0666);
    FILE* file = descriptor < 0 ? nullptr : fdopen(descriptor, "wb");
    bool ok = file && (!replaces || fchmod(descriptor, before.st_mode & 07777) == 0);
    if (ok) { flock(descriptor, LOCK_EX | LOCK_NB); }  // where it cannot be locked, remove_stale cannot lock it either
    if (write) {
        ok = ok && write(file) && fflush(file) == 0 && fsync(descriptor) == 0 && rename(name, target.c_str()) == 0;
    }
    int error = ok ? 0 : errno;
    if (file && fclose(file) != 0 && error == 0) { error = errno; }
    if (error != 0) { fail("%s: cannot be written: %s", path.c_str(), strerror(error)); }
    // The new name, too, has to reach the disk. Not every file system can be asked for it.
    int folder = open(target.substr(0, target.rfind('/') + 1).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (write && folder >= 0) { fsync(folder); }
    if (folder >= 0) { close(folder); }
}

bool same_file(const std::string& a, const std::string& b) {
    struct stat s, t;
    return stat(a.c_str(), &s) == 0 && stat(b.c_str(), &t) == 0 && s.st_dev == t.st_dev && s.st_ino == t.st_ino;
}
void save_file(const std::string& path, const std::string& bytes) {
    replace_file(path, [&](FILE* file) { return fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size(); });
}

// ---------------------------------------------------------------------------------------------------------------------
// Ourselves

// Ends the child and the processes that it has started: all are in its process group. NCCL's ranks get a moment to tidy
// up.
static void end_group(pid_t child) {
    kill(-child, SIGTERM);
    for (int i = 0; i < 300 && waitpid(child, nullptr, WNOHANG) == 0; i++) { usleep(10000); }
    kill(-child, SIGKILL);
    waitpid(child, nullptr, 0);  // fails where it has been waited for above
}

static std::string last_line_of(FILE* file) {
    std::string line, last;
    rewind(file);
    for (int c; (c = fgetc(file)) != EOF;) {
        if (c != '\n') {
            line += (char)c;
        } else if (!line.empty()) {
            last = line, line.clear();
        }
    }
    return line.empty() ? last : line;
}

pid_t start_ourselves(const std::vector<std::string>& arguments, char** environment, int stdout_descriptor,
                      int stderr_descriptor) {
    std::vector<char*> argv = {program_invocation_name};  // as it was typed
    for (const std::string& a : arguments) { argv.push_back((char*)a.c_str()); }
    argv.push_back(nullptr);
    const char* ourselves = "/proc/self/exe";
    if (access(ourselves, X_OK) != 0) { fail("%s: cannot be started: %s", ourselves, strerror(errno)); }
    pid_t parent = getpid(), child = fork();
    if (child < 0) { fail("fork: %s", strerror(errno)); }
    if (child > 0) { return child; }
    // Only what is safe between fork and exec: other threads may have held a lock.
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) { _exit(127); }
    if (getppid() != parent) { _exit(1); }  // which may have ended before that
    if (stdout_descriptor != STDOUT_FILENO && dup2(stdout_descriptor, STDOUT_FILENO) < 0) { _exit(127); }
    if (stderr_descriptor >= 0 && (dup2(stderr_descriptor, STDERR_FILENO) < 0 || setpgid(0, 0) != 0)) { _exit(127); }
    execve(ourselves, argv.data(), environment);
    _exit(127);
}

std::string run_ourselves(const std::vector<std::string>& arguments, const std::function<void()>& watch) {
    std::string line = "cs336";
    for (const std::string& a : arguments) { line += " " + a; }
    int ends[2];  // read, write
    if (pipe2(ends, O_CLOEXEC) != 0) { fail("pipe: %s", strerror(errno)); }
    std::unique_ptr<FILE, int (*)(FILE*)> errors(watch ? tmpfile() : nullptr, fclose);
    if (watch && !errors) { fail("tmpfile: %s", strerror(errno)); }
    pid_t child = start_ourselves(arguments, environ, ends[1], watch ? fileno(errors.get()) : -1);
    close(ends[1]);  // so that reading ends when the child closes its copy

    std::string output;
    char buffer[4096];
    ssize_t n = 0;
    try {
        while (true) {
            if (watch) { watch(); }
            pollfd p{ends[0], POLLIN, 0};
            int ready = poll(&p, 1, watch ? 1000 : -1);
            if (ready == 0 || (ready < 0 && errno == EINTR)) { continue; }
            n = read(ends[0], buffer, sizeof buffer);
            if (n == 0 || (n < 0 && errno != EINTR)) { break; }
            output.append(buffer, std::max<ssize_t>(n, 0));
        }
    } catch (...) {
        end_group(child);
        close(ends[0]);
        throw;
    }
    int read_error = n < 0 ? errno : 0;
    close(ends[0]);
    int status;
    while (waitpid(child, &status, 0) < 0) {
        if (errno != EINTR) { fail("%s: waitpid: %s", line.c_str(), strerror(errno)); }
    }
    if (WIFSIGNALED(status)) {
        fail("%s: killed by signal %d (%s)", line.c_str(), WTERMSIG(status), strsignal(WTERMSIG(status)));
    }
    if (WEXITSTATUS(status) != 0) {
        std::string why = errors ? last_line_of(errors.get()) : "";
        fail("%s",
             why.empty() ? strprintf("%s: exited with %d", line.c_str(), WEXITSTATUS(status)).c_str() : why.c_str());
    }
    if (read_error != 0) { fail("%s: cannot read its output: %s", line.c_str(), strerror(read_error)); }
    return output;
}

std::string commit() { return CS336_COMMIT; }
