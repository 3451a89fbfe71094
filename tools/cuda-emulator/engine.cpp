// Fibers, warps and barriers.
//
// Fibers run one at a time and in an order that changes from launch to launch, so that threads that
// rely on an order nobody promised are found out. Shared memory starts as NaN.
#include "engine.hpp"

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

constexpr size_t STACK = 256 << 10;
constexpr unsigned WARP = 32;
constexpr size_t SHARED = 228 << 10;

enum class State { Ready, InWarp, InBlock, Ended };

struct Copy {
    void *to;
    const void *from;
    unsigned bytes, filled;
};

struct Fiber {
    void *stack_pointer = nullptr;
    char *stack = nullptr;
    State state = State::Ended;
    emu_dim3 thread{};
    unsigned site = 0;
    const void *in = nullptr;
    void *out = nullptr;
    void (*work)(unsigned, const void **, void **) = nullptr;
    std::vector<std::vector<Copy>> committed;
    std::vector<Copy> copies;
};

// Never destroyed: a kernel may be running when the process ends.
std::vector<Fiber> &fibers = *new std::vector<Fiber>;
Fiber *running = nullptr;
void *scheduler = nullptr;
void (*kernel)(void **) = nullptr;
void **kernel_arguments = nullptr;
const char *kernel_name = "";
std::string &failure = *new std::string;
bool failed = false;
alignas(1024) char shared[SHARED];
unsigned shared_in_use = 0;
uint64_t random_state = 0x9e3779b97f4a7c15;

unsigned random_below(unsigned n) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return unsigned(random_state >> 33) % n;
}

// Saves the callee's registers on this stack, leaves its address in `*from` and goes on on `to`.
extern "C" void emu_switch(void **from, void *to);
asm(R"(
.text
.type emu_switch, @function
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emu_switch, .-emu_switch
)");

void suspend(State state) {
    Fiber *self = running;
    self->state = state;
    emu_switch(&self->stack_pointer, scheduler);
}

void fiber_main() {
    kernel(kernel_arguments);
    suspend(State::Ended);
    abort();
}

void start(Fiber &fiber, emu_dim3 thread) {
    if (!fiber.stack) {
        void *stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED) {
            perror("cuda-emulator: stack");
            abort();
        }
        mprotect(stack, 4096, PROT_NONE);
        fiber.stack = static_cast<char *>(stack);
    }
    // Six registers, then where `ret` goes; the stack is aligned as after a call.
    auto top = reinterpret_cast<uint64_t *>(fiber.stack + STACK - 64);
    top[-1] = 0;
    top[-2] = reinterpret_cast<uint64_t>(&fiber_main);
    for (int i = 3; i <= 8; i++) top[-i] = 0;
    fiber.stack_pointer = top - 8;
    fiber.state = State::Ready;
    fiber.thread = thread;
    fiber.copies.clear();
    fiber.committed.clear();
}

void resume(Fiber &fiber) {
    running = &fiber;
    emu_threadIdx = fiber.thread;
    emu_switch(&scheduler, fiber.stack_pointer);
    running = nullptr;
}

void fail(const std::string &what) {
    if (!failed) failure = std::string(kernel_name) + ": " + what;
    failed = true;
}

// Lets the lanes of a warp go that wait at the earliest place of the program. Others wait for them:
// a warp that has parted comes together again behind the branch.
bool release_warp(Fiber *lanes, unsigned count) {
    unsigned first = ~0u;
    for (unsigned lane = 0; lane < count; lane++)
        if (lanes[lane].state == State::InWarp && lanes[lane].site < first) first = lanes[lane].site;
    if (first == ~0u) return false;
    unsigned mask = 0;
    const void *in[WARP] = {};
    void *out[WARP] = {};
    void (*work)(unsigned, const void **, void **) = nullptr;
    for (unsigned lane = 0; lane < count; lane++) {
        Fiber &fiber = lanes[lane];
        if (fiber.state != State::InWarp || fiber.site != first) continue;
        mask |= 1u << lane;
        in[lane] = fiber.in;
        out[lane] = fiber.out;
        work = fiber.work;
        fiber.state = State::Ready;
    }
    if (work) work(mask, in, out);
    return true;
}

bool release_block(unsigned threads) {
    unsigned site = 0, waiting = 0, live = 0;
    for (unsigned t = 0; t < threads; t++) {
        if (fibers[t].state == State::Ended) continue;
        live++;
        if (fibers[t].state != State::InBlock) continue;
        if (waiting && fibers[t].site != site) {
            fail("threads of a block wait at different barriers");
            return false;
        }
        site = fibers[t].site;
        waiting++;
    }
    if (!live || waiting != live) return false;
    for (unsigned t = 0; t < threads; t++)
        if (fibers[t].state == State::InBlock) fibers[t].state = State::Ready;
    return true;
}

void run_block(unsigned threads) {
    memset(shared, 0xff, shared_in_use);
    emu_dim3 thread{};
    for (unsigned t = 0; t < threads; t++) {
        start(fibers[t], thread);
        if (++thread.x == emu_blockDim.x) {
            thread.x = 0;
            if (++thread.y == emu_blockDim.y) thread.y = 0, thread.z++;
        }
    }
    std::vector<unsigned> order(threads);
    for (unsigned t = 0; t < threads; t++) order[t] = t;
    for (unsigned t = threads; t > 1; t--) std::swap(order[t - 1], order[random_below(t)]);
    while (!failed) {
        bool progress = false, live = false;
        for (unsigned t : order) {
            if (fibers[t].state != State::Ready) continue;
            resume(fibers[t]);
            if (failed) return;
            progress = true;
        }
        for (unsigned first = 0; first < threads; first += WARP)
            progress |= release_warp(&fibers[first], std::min(WARP, threads - first));
        if (failed) return;
        for (unsigned t = 0; t < threads; t++) live |= fibers[t].state != State::Ended;
        if (!live) return;
        if (release_block(threads)) continue;
        if (!progress) fail("deadlock: some threads wait at a barrier that others do not reach");
    }
}

void on_fault(int signal) {
    char text[512];
    int length = snprintf(text, sizeof text,
                          "cuda-emulator: signal %d in kernel %s, block %u %u %u, thread %u %u %u\n",
                          signal, kernel_name, emu_blockIdx.x, emu_blockIdx.y, emu_blockIdx.z,
                          emu_threadIdx.x, emu_threadIdx.y, emu_threadIdx.z);
    (void)!write(2, text, length);
    _exit(134);
}

void catch_faults() {
    static char stack[64 << 10];
    static thread_local bool done = false;
    if (done) return;
    done = true;
    stack_t alternative{};
    alternative.ss_sp = stack;
    alternative.ss_size = sizeof stack;
    sigaltstack(&alternative, nullptr);
}

} // namespace

extern "C" {
emu_dim3 emu_threadIdx, emu_blockIdx, emu_blockDim, emu_gridDim;

char *emu_shared() { return shared; }

void emu_sync_block(unsigned site) {
    running->site = site;
    suspend(State::InBlock);
}

void emu_sync_warp(unsigned site, const void *in, void *out,
                   void (*work)(unsigned, const void **, void **)) {
    Fiber *self = running;
    self->site = site, self->in = in, self->out = out, self->work = work;
    suspend(State::InWarp);
}

void emu_copy_async(void *to, const void *from, unsigned bytes, unsigned filled) {
    auto end = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
    if (end % bytes) emu_fail("cp.async: an address is not aligned to the copy's size");
    // Until it is waited for, nobody knows what is there.
    memset(to, 0xff, bytes);
    running->copies.push_back({to, from, bytes, filled});
}

void emu_copy_commit() {
    running->committed.push_back(std::move(running->copies));
    running->copies.clear();
}

void emu_copy_wait(unsigned pending) {
    auto &committed = running->committed;
    while (committed.size() > pending) {
        for (const Copy &copy : committed.front()) {
            memcpy(copy.to, copy.from, copy.filled);
            memset(static_cast<char *>(copy.to) + copy.filled, 0, copy.bytes - copy.filled);
        }
        committed.erase(committed.begin());
    }
}

void emu_fail(const char *what) {
    fail(what);
    suspend(State::Ended);
    abort();
}

const char *emu_launch(const char *name, void (*entry)(void **), void **arguments, emu_dim3 grid,
                       emu_dim3 block, unsigned shared_bytes) {
    if (shared_bytes > SHARED) return "more shared memory than a block can have";
    unsigned threads = block.x * block.y * block.z;
    if (threads == 0 || threads > 1024) return "a block has 1 to 1024 threads";
    catch_faults();
    struct sigaction action {}, segv {}, bus {};
    action.sa_handler = on_fault;
    action.sa_flags = SA_ONSTACK;
    sigaction(SIGSEGV, &action, &segv);
    sigaction(SIGBUS, &action, &bus);
    if (fibers.size() < threads) fibers.resize(threads);
    kernel = entry, kernel_arguments = arguments, kernel_name = name;
    shared_in_use = shared_bytes;
    failed = false;
    emu_gridDim = grid, emu_blockDim = block;
    for (unsigned z = 0; z < grid.z && !failed; z++)
        for (unsigned y = 0; y < grid.y && !failed; y++)
            for (unsigned x = 0; x < grid.x && !failed; x++) {
                emu_blockIdx = {x, y, z};
                run_block(threads);
            }
    sigaction(SIGSEGV, &segv, nullptr);
    sigaction(SIGBUS, &bus, nullptr);
    return failed ? failure.c_str() : nullptr;
}
}
