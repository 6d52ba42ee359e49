// The reader of safetensors under libFuzzer: `make fuzz`. Whatever the bytes are, either the file
// is refused in one line that starts with its name, or every tensor lies within it, and the
// header's sizes are the data's.
#include "cs336.h"

#include <cstdio>
#include <cstdlib>

#include <sys/mman.h>
#include <unistd.h>

static void expect(bool ok, const char* what) {
    if (!ok) {
        fprintf(stderr, "not so: %s\n", what);
        abort();
    }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t n) {
    // a regular file that no disk sees
    static const int file = memfd_create("fuzz.safetensors", 0);
    static const string path = "/proc/self/fd/" + to_string(file);
    expect(file >= 0 && ftruncate(file, 0) == 0 && pwrite(file, bytes, n, 0) == (ssize_t)n,
           "the input is written");
    try {
        SafeTensors tensors = load_safetensors(path);
        size_t total = 0;
        for (const auto& [name, t] : tensors.tensors) {
            volatile uint8_t sum = 0;  // the sanitizer sees each byte read
            for (size_t i = 0; i < t.bytes; i++) {
                sum = (uint8_t)(sum + ((const uint8_t*)t.data)[i]);
            }
            total += t.bytes;
            try {
                require_tensor(tensors, name, {-1, 2}, {"F32", "I64"});
            } catch (const Failure&) {}
        }
        uint64_t header;
        memcpy(&header, bytes, 8);
        expect(total == n - 8 - header, "the tensors are all of the file's data");
    } catch (const Failure& failure) {
        string what = failure.what();
        expect(failure.exit_code == 1, "a bad file is a failure, not wrong usage");
        expect(what.find(path) == 0, "the line starts with the file's name");
        expect(what.size() < 1000, "the line is not too long");
        for (char c : what) {
            expect((unsigned char)c >= 0x20, "one line, without control characters");
        }
    }
    return 0;
}
