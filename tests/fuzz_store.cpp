// The store's protocol under libFuzzer: `make fuzz`. Each input byte below 8 ends a piece; the pieces go to the peers
// in turn. Whatever the peers say, nobody gets in without the token, and the store holds no more than it was sent.
#include "cs336.h"

#include <cstdio>
#include <cstdlib>

static void expect(bool ok, const char* what) {
    if (!ok) {
        fprintf(stderr, "not so: %s\n", what);
        abort();
    }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t n) {
    bool secret = n > 0 && bytes[0] % 2 == 1;  // else the fuzzer may learn the token, and say what a rank may say
    StoreState s = empty_store({0, false, 3, secret ? "a token that no input holds" : "", "c", "t", {}}, 1000);
    for (int i = 0; i < 4; i++) { s.peers.emplace_back(); }
    auto p = s.peers.begin();
    size_t sent = 0, held = 0;
    for (size_t start = 1, end; start < n; start = end) {
        for (end = start; end < n && bytes[end] >= 8; end++) {}
        end = std::min(n, std::max(end, start + 4 + bytes[start]));  // a frame's length may hold such bytes
        take_bytes(s, *p, (const char*)bytes + start, end - start);
        sent += end - start;
        expect(p->rank >= -1 && p->rank < 3, "a rank that there is");
        expect(!p->closing || p->in.empty(), "who is sent away leaves nothing");
        if (++p == s.peers.end()) { p = s.peers.begin(); }
    }
    for (const auto& [key, value] : s.values) { held += key.size() + value.size(); }
    for (const StorePeer& peer : s.peers) {
        held += peer.in.size() + peer.key.size();
        expect(!secret || peer.rank == -1, "without the token nobody gets in");
    }
    expect(held <= sent, "the store holds no more than it was sent");
    expect(!secret || s.values.empty(), "a stranger sets nothing");
    return 0;
}
