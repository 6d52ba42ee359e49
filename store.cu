// store.cu: keys and values that rank 0 serves over TCP. The ranks find each other through them, and the store knows
// which rank still lives.
//
// A frame is u32 length (little-endian), then so many bytes. A request begins with its operation:
//   H fields         hello: who I am. It has to come first, and soon; the reply is "cs336", then what is wrong, if any
//   S key \0 value   set; the reply is empty
//   G key            get; the reply is the value, and comes when somebody has set it
//   B                heartbeat; the reply is empty, or says which rank is gone
//   Q                goodbye: this rank has done its work; the reply is empty
//
// Anybody who reaches the port may connect. Until its hello is accepted a peer is a stranger: it gets little memory,
// little time, and can change nothing. One thread serves all connections, so that no stranger costs a thread.
#include "cs336.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <future>
#include <list>
#include <thread>

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

constexpr uint32_t MAX_HELLO = 1 << 16, MAX_FRAME = 1 << 26;  // bytes
constexpr size_t MAX_STRANGERS = 64;                          // connections
constexpr double HELLO_MS = 2000;                             // from the connection to an accepted hello

static std::string framed(const std::string& bytes) {
    uint32_t n = (uint32_t)bytes.size();
    return std::string((char*)&n, 4) + bytes;
}

// ---------------------------------------------------------------------------------------------------------------------
// The protocol, without sockets: the fuzz target calls it, too.

static std::string text_of(const Hello& h) {
    std::string text;
    for (const std::string& field : {h.token, h.commit, std::to_string(h.rank), std::to_string(h.world),
                                     std::to_string(h.for_heartbeats), h.command}) {
        text += field + '\0';
    }
    for (const auto& [name, value] : h.options) { text += name + '\0' + value + '\0'; }
    return text;
}

static bool parse_hello(const std::string& text, Hello* h) {
    std::vector<std::string> fields;
    for (size_t start = 0, end; (end = text.find('\0', start)) != std::string::npos; start = end + 1) {
        fields.push_back(text.substr(start, end - start));
    }
    if (fields.size() < 6 || fields.size() % 2 != 0) { return false; }
    auto number = [](const std::string& field, int* value) {
        const char* end = field.data() + field.size();
        auto result = std::from_chars(field.data(), end, *value);
        return result.ec == std::errc() && result.ptr == end;
    };
    int beats = 0;
    if (!number(fields[2], &h->rank) || !number(fields[3], &h->world) || !number(fields[4], &beats)) { return false; }
    if (beats < 0 || beats > 1) { return false; }
    h->token = fields[0], h->commit = fields[1], h->for_heartbeats = beats == 1, h->command = fields[5];
    for (size_t i = 6; i < fields.size(); i += 2) { h->options[fields[i]] = fields[i + 1]; }
    return true;
}

// The time of the comparison does not tell where two tokens differ.
static bool same_token(const std::string& a, const std::string& b) {
    unsigned char differ = a.size() != b.size();
    for (size_t i = 0; i < std::min(a.size(), b.size()); i++) { differ |= a[i] ^ b[i]; }
    return !differ;
}

// Ranks that do not run the same would compute nonsense, or wait for each other for ever. "" means that they do.
static std::string first_difference(const Hello& peer, const Hello& own) {
    std::string who = strprintf("rank %d ", peer.rank);
    if (peer.commit != own.commit) {
        return who + "was built from commit " + peer.commit + ", but rank 0 from " + own.commit;
    }
    if (peer.command != own.command) { return who + "runs " + peer.command + ", but rank 0 runs " + own.command; }
    std::map<std::string, std::string> all = own.options;
    all.insert(peer.options.begin(), peer.options.end());
    for (const auto& option : all) {
        const std::string& name = option.first;
        auto said = [&](const Hello& h) {
            auto found = h.options.find(name);
            return found == h.options.end() ? "no --" + name : "--" + name + " " + found->second;
        };
        if (said(peer) != said(own)) { return who + "has " + said(peer) + ", but rank 0 has " + said(own); }
    }
    return "";
}

static std::string refusal(const StoreState& s, const Hello& peer) {
    if (!same_token(peer.token, s.own.token)) {
        return "the store of rank 0 belongs to another job (its token differs)";
    }
    if (peer.world != s.own.world) {
        return strprintf("rank %d says that there are %d ranks, but rank 0 says %d", peer.rank, peer.world,
                         s.own.world);
    }
    if (peer.rank < 0 || peer.rank >= peer.world) { return strprintf("there is no rank %d", peer.rank); }
    std::string difference = first_difference(peer, s.own);
    if (!difference.empty()) { return difference; }
    if (!peer.for_heartbeats && s.last_beat[peer.rank] > 0) {
        return strprintf("two processes say that they are rank %d", peer.rank);
    }
    return "";
}

static std::string complaint(const StoreState& s) {
    for (int r = 0; r < s.own.world; r++) {
        if (s.finished[r] || s.last_beat[r] == 0) { continue; }
        if (s.lost[r]) { return strprintf("rank %d is gone: its process has ended", r); }
        double silent = now_ms() - s.last_beat[r];
        if (silent > s.patience_ms) {
            return strprintf("rank %d has shown no sign of life for %.1f s", r, silent / 1e3);
        }
    }
    return "";
}

static void hello(StoreState& s, StorePeer& p, const std::string& text) {
    Hello peer;
    std::string wrong = parse_hello(text, &peer) ? refusal(s, peer) : "not a rank of ours";
    p.out += framed("cs336" + wrong);  // another server on this port would not say that
    p.closing = !wrong.empty();
    if (p.closing) { return; }
    p.rank = peer.rank, p.is_main = !peer.for_heartbeats;
    s.last_beat[p.rank] = now_ms();
}

static void set_value(StoreState& s, const std::string& key, const std::string& value) {
    s.values[key] = value;
    for (StorePeer& p : s.peers) {
        if (!p.waiting || p.key != key) { continue; }
        p.waiting = false;
        p.out += framed(value);
    }
}

static void answer(StoreState& s, StorePeer& p, const std::string& request) {
    std::string rest = request.substr(1), key = rest.substr(0, rest.find('\0'));
    char operation = request[0];
    if (p.rank < 0 && operation != 'H') {
        p.closing = true;
        return;
    }
    switch (operation) {
        case 'H':
            if (p.rank < 0) { return hello(s, p, rest); }
            break;
        case 'S':
            if (key.size() == rest.size()) { break; }
            set_value(s, key, rest.substr(key.size() + 1));
            p.out += framed("");
            return;
        case 'G': {
            auto found = s.values.find(key);
            p.waiting = found == s.values.end(), p.key = key;
            if (!p.waiting) { p.out += framed(found->second); }
            return;
        }
        case 'B':
            s.last_beat[p.rank] = now_ms();
            p.out += framed(complaint(s));
            return;
        case 'Q':
            s.finished[p.rank] = true;
            p.out += framed("");
            return;
    }
    p.closing = true;  // no rank of ours says that
}

void take_bytes(StoreState& s, StorePeer& p, const char* bytes, size_t n) {
    p.in.append(bytes, n);
    uint32_t length = 1;
    if (p.in.size() >= 4) { memcpy(&length, p.in.data(), 4); }
    size_t whole = 4 + (size_t)length;
    bool too_long = length == 0 || length > (p.rank < 0 ? MAX_HELLO : MAX_FRAME);
    bool too_soon = p.waiting || !p.out.empty() || p.in.size() > whole;  // a rank asks again when it has its reply
    p.closing = p.closing || too_long || too_soon;
    if (!p.closing && p.in.size() < whole) { return; }
    std::string request = p.closing ? "" : p.in.substr(4);
    p.in = std::string();
    if (!p.closing) { answer(s, p, request); }
}

StoreState empty_store(const Hello& own, double patience_ms) {
    StoreState s;
    s.own = own, s.patience_ms = patience_ms;
    s.last_beat.resize(own.world), s.lost.resize(own.world), s.finished.resize(own.world);
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// The server: a thread of rank 0's process

struct StoreServer {
    int listening;
    StoreState state;                                   // the thread's alone
    std::function<void(const std::string&)> fail_with;  // where ranks cannot connect
    std::thread thread;
    std::atomic<double> stop_by_ms{INFINITY};  // finite: it ends when all ranks are gone, or then
};

static void drop(StoreState& s, std::list<StorePeer>::iterator p) {
    close(p->fd);
    if (p->is_main) { s.lost[p->rank] = true; }
    s.peers.erase(p);
}

static void accept_one(StoreServer& server) {
    std::list<StorePeer>& peers = server.state.peers;
    int fd = accept4(server.listening, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    bool nothing = fd < 0 && (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED);
    if (nothing) { return; }
    auto stranger = [](const StorePeer& p) { return p.rank < 0; };
    if (fd < 0 || std::count_if(peers.begin(), peers.end(), stranger) >= (int)MAX_STRANGERS) {
        auto oldest = std::find_if(peers.begin(), peers.end(), stranger);
        if (oldest != peers.end()) {
            drop(server.state, oldest);  // a rank that was too slow tries again
        } else {                         // no descriptor is left: the peer waits on
            if (peers.size() < 2 * (size_t)server.state.own.world) { server.fail_with(strerror(errno)); }
            usleep(10000);
        }
    }
    if (fd < 0) { return; }
    StorePeer p;
    p.fd = fd, p.since_ms = now_ms();
    peers.push_back(p);
}

// False means that the connection has to be closed.
static bool serve(StoreState& s, StorePeer& p, short events) {
    auto later = [] { return errno == EAGAIN || errno == EINTR; };
    if (events & POLLIN) {
        char bytes[1 << 14];
        ssize_t n = recv(p.fd, bytes, sizeof bytes, 0);
        if (n == 0 || (n < 0 && !later())) { return false; }
        take_bytes(s, p, bytes, std::max<ssize_t>(n, 0));
    } else if (events & (POLLHUP | POLLRDHUP | POLLERR | POLLNVAL)) {
        return false;
    }
    if (!p.out.empty()) {
        ssize_t n = send(p.fd, p.out.data(), p.out.size(), MSG_NOSIGNAL);
        if (n < 0 && !later()) { return false; }
        p.out.erase(0, std::max<ssize_t>(n, 0));
    }
    if (p.closing && p.out.empty()) { return false; }
    return p.rank >= 0 || now_ms() - p.since_ms < HELLO_MS;
}

static bool all_gone(const StoreState& s) {
    for (int r = 0; r < s.own.world; r++) {
        if (s.last_beat[r] > 0 && !s.lost[r]) { return false; }
    }
    return true;
}

static void serve_all(StoreServer& server) {
    StoreState& s = server.state;
    while (server.stop_by_ms == INFINITY || (!all_gone(s) && now_ms() < server.stop_by_ms)) {
        std::vector<pollfd> polls = {{server.listening, POLLIN, 0}};
        for (const StorePeer& p : s.peers) {
            int events = POLLRDHUP | (!p.out.empty() ? POLLOUT : p.waiting || p.closing ? 0 : POLLIN);
            polls.push_back({p.fd, (short)events, 0});
        }
        if (poll(polls.data(), polls.size(), 100) < 0) { continue; }  // EINTR
        auto p = s.peers.begin();
        for (size_t i = 1; i < polls.size(); i++) {
            auto now = p++;
            bool keep = false;
            try {
                keep = serve(s, *now, polls[i].revents);
            } catch (const std::exception&) {}  // no memory for this peer's request
            if (!keep) { drop(s, now); }
        }
        if (polls[0].revents) { accept_one(server); }
    }
    for (const StorePeer& p : s.peers) { close(p.fd); }
}

std::shared_ptr<StoreServer> start_store(int listening, const Hello& own, double patience_ms,
                                         const std::function<void(const std::string&)>& fail_with) {
    auto server = std::make_shared<StoreServer>();
    server->listening = listening, server->fail_with = fail_with;
    server->state = empty_store(own, patience_ms);
    StoreServer* s = server.get();
    server->thread = std::thread([s] { serve_all(*s); });
    return server;
}

void stop_store_soon(StoreServer& server) { server.stop_by_ms = now_ms() + server.state.patience_ms; }
void wait_for_store(StoreServer& server) {
    server.thread.join();
    close(server.listening);
    for (int r = 0; r < server.state.own.world; r++) {
        if (!server.state.lost[r]) { fail("rank %d has shown no sign of life since its goodbye", r); }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Addresses

static bool is_loopback(const sockaddr* a) {
    if (a->sa_family == AF_INET) { return ntohl(((sockaddr_in*)a)->sin_addr.s_addr) >> 24 == 127; }
    return a->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((sockaddr_in6*)a)->sin6_addr);
}

using Addresses = std::shared_ptr<addrinfo>;
// Null, with *why, where the name is not known by the deadline. A thread asks, because a name server may take a minute.
static Addresses resolve(const std::string& address, int port, double deadline, std::string* why) {
    auto answer = std::make_shared<std::promise<std::pair<int, addrinfo*>>>();
    auto future = answer->get_future();
    std::thread([=] {
        addrinfo hint{}, *found = nullptr;
        hint.ai_socktype = SOCK_STREAM;
        int error = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hint, &found);
        answer->set_value({error, found});
    }).detach();
    double left = std::clamp(deadline - now_ms(), 0.0, 1e9);
    if (future.wait_for(std::chrono::duration<double, std::milli>(left)) != std::future_status::ready) {
        *why = "no name server has answered";
        return nullptr;
    }
    auto [error, found] = future.get();
    *why = error ? gai_strerror(error) : "";
    return error ? nullptr : Addresses(found, freeaddrinfo);
}

int listen_for_ranks(const std::string& address, int port, double deadline, bool* only_this_machine) {
    std::string why;
    Addresses found = resolve(address, port, deadline, &why);
    for (addrinfo* a = found.get(); a; a = a->ai_next) {
        int fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), yes = 1;
        // If this fails, bind() may fail, too, and says why.
        if (fd >= 0) { (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes); }
        if (fd >= 0 && bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, 512) == 0) {
            *only_this_machine = is_loopback(a->ai_addr);
            return fd;
        }
        why = strerror(errno);
        if (fd >= 0) { close(fd); }
    }
    fail("MASTER_ADDR %s, MASTER_PORT %d: rank 0 cannot listen there: %s", address.c_str(), port, why.c_str());
}

int port_of(int listening) {
    sockaddr_storage a{};
    socklen_t n = sizeof a;
    if (getsockname(listening, (sockaddr*)&a, &n) != 0) { fail("getsockname: %s", strerror(errno)); }
    return ntohs(a.ss_family == AF_INET ? ((sockaddr_in*)&a)->sin_port : ((sockaddr_in6*)&a)->sin6_port);
}

// ---------------------------------------------------------------------------------------------------------------------
// The client: every rank, rank 0 as well

static bool send_all(int fd, const std::string& bytes) {
    for (size_t sent = 0; sent < bytes.size();) {
        ssize_t n = send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) { continue; }
        if (n <= 0) { return false; }
        sent += n;
    }
    return true;
}

// 1: the descriptor is ready, 0: the deadline passed, -1: poll failed, with errno
static int wait_until_ready(int fd, short events, double deadline) {
    while (true) {
        pollfd p{fd, events, 0};
        int ms = deadline == INFINITY ? -1 : (int)std::clamp(ceil(deadline - now_ms()), 0.0, 1e9);
        int ready = poll(&p, 1, ms);
        if (ready >= 0 || errno != EINTR) { return ready; }
    }
}

// 1: got it, 0: the connection is lost, -1: the deadline passed
static int receive_framed(int fd, std::string* bytes, double deadline) {
    std::string got;
    uint32_t length = 0;
    char buffer[1 << 14];
    while (got.size() < 4 || got.size() < 4 + (size_t)length) {
        int ready = wait_until_ready(fd, POLLIN, deadline);
        if (ready <= 0) { return ready == 0 ? -1 : 0; }
        size_t missing = got.size() < 4 ? 4 - got.size() : 4 + length - got.size();
        ssize_t n = recv(fd, buffer, std::min(missing, sizeof buffer), 0);
        if (n < 0 && errno == EINTR) { continue; }
        if (n <= 0) { return 0; }
        got.append(buffer, n);
        if (got.size() == 4) { memcpy(&length, got.data(), 4); }
        if (length > MAX_FRAME) { return 0; }
    }
    *bytes = got.substr(4);
    return 1;
}

std::string ask_store(int fd, char operation, const std::string& key, const std::string& value, double deadline,
                      const std::string& waiting_for) {
    std::string reply, request = operation + key + (operation == 'S' ? '\0' + value : value);
    int result = send_all(fd, framed(request)) ? receive_framed(fd, &reply, deadline) : 0;
    if (result == 0) { throw LostTouch("rank 0 is gone: its store has closed the connection"); }
    if (result < 0) { throw LostTouch(waiting_for); }
    return reply;
}

// -1, with *why, where nobody answers by the deadline
static int dial(const Addresses& addresses, double deadline, std::string* why) {
    for (addrinfo* a = addresses.get(); a; a = a->ai_next) {
        int fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0) { fail("socket: %s", strerror(errno)); }
        int error = connect(fd, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno, on = 1;
        if (error == EINPROGRESS) {
            socklen_t n = sizeof error;
            if (wait_until_ready(fd, POLLOUT, deadline) <= 0) {
                error = ETIMEDOUT;
            } else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &n) != 0) {
                error = errno;
            }
        }
        if (error == 0 && fcntl(fd, F_SETFL, 0) == 0) {  // from now on it blocks
            // Small messages wait for no others. If this fails, they are late, not lost.
            (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
            return fd;
        }
        close(fd);
        *why = error == ECONNREFUSED ? "nothing listens" : strerror(error);
    }
    return -1;
}

int connect_to_store(const std::string& address, int port, const Hello& own, double deadline) {
    std::string where = strprintf("%s:%d", address.c_str(), port), why, request = framed("H" + text_of(own)), reply;
    std::string foreign = "what listens on " + where + " is not the store of rank 0";
    if (request.size() > MAX_HELLO) { fail("the command line is too long for ranks: %zu bytes", request.size()); }
    Addresses addresses = resolve(address, port, deadline, &why);
    if (!addresses) { throw LostTouch("rank 0 cannot be found: MASTER_ADDR " + address + ": " + why); }
    while (true) {
        int fd = dial(addresses, deadline, &why);
        if (fd >= 0) {
            int result = send_all(fd, request) ? receive_framed(fd, &reply, deadline) : 0;
            if (result < 0) {
                fail("what listens on %s does not answer: it is not the store of rank 0, or rank 0 is stopped",
                     where.c_str());
            }
            if (result == 1 && reply.compare(0, 5, "cs336") != 0) { fail("%s", foreign.c_str()); }
            if (result == 1 && reply.size() > 5) { fail("%s", reply.c_str() + 5); }
            if (result == 1) { return fd; }
            close(fd);
        }
        if (now_ms() > deadline) {
            if (fd >= 0) { fail("%s: it closes the connection", foreign.c_str()); }
            throw LostTouch(strprintf("rank 0 did not start: %s on %s", why.c_str(), where.c_str()));
        }
        usleep(10000);
    }
}
