// libcuda: the driver's interface for one GPU that is this computer. Everything has happened when a
// call returns, but for asynchronous copies from host memory: they happen when the next call needs the
// GPU, as they may on hardware. Memory starts as NaN.
#include "engine.hpp"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <string>
#include <vector>

using Result = int;
using Pointer = unsigned long long;
constexpr Result SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500,
                 LAUNCH_FAILED = 719;
constexpr size_t MEMORY = size_t(16) << 30;

namespace {
std::mutex lock;
// Never destroyed: the device's thread may still run when the process ends.
auto &allocations = *new std::map<Pointer, size_t>;
size_t allocated = 0;

Result allocate(Pointer *at, size_t bytes) {
    std::lock_guard guard(lock);
    if (bytes == 0) return INVALID_VALUE;
    if (allocated + bytes > MEMORY) return OUT_OF_MEMORY;
    void *memory = aligned_alloc(512, (bytes + 511) / 512 * 512);
    if (!memory) return OUT_OF_MEMORY;
    memset(memory, 0xff, bytes);
    *at = reinterpret_cast<Pointer>(memory);
    allocations[*at] = bytes;
    allocated += bytes;
    return SUCCESS;
}

Result release(Pointer at) {
    std::lock_guard guard(lock);
    auto found = allocations.find(at);
    if (found == allocations.end()) return INVALID_VALUE;
    allocated -= found->second;
    allocations.erase(found);
    free(reinterpret_cast<void *>(at));
    return SUCCESS;
}

struct Copy {
    Pointer to;
    const void *from;
    size_t bytes;
};
std::mutex copies_lock;
auto &copies = *new std::vector<Copy>;

// Does the copies that were asked for so far.
Result settle() {
    std::lock_guard guard(copies_lock);
    for (auto &copy : copies) memcpy(reinterpret_cast<void *>(copy.to), copy.from, copy.bytes);
    copies.clear();
    return SUCCESS;
}

// With CUDA_EMULATOR_TRACE set: what the driver is asked for, line by line on stderr.
template <typename... Values> void trace(const char *format, Values... values) {
    static const bool wanted = getenv("CUDA_EMULATOR_TRACE");
    if (wanted) fprintf(stderr, format, values...);
}

struct Function {
    std::string name;
    void (*entry)(void **);
};

int attribute(int which) {
    switch (which) {
    case 1: case 2: case 3: return 1024; // threads of a block, in x, in y
    case 4: return 64;                   // in z
    case 5: return 0x7fffffff;           // blocks in x
    case 6: case 7: return 65535;
    case 8: return 48 << 10;
    case 10: return 32; // warp
    case 12: return 65536;
    case 16: return 132;  // multiprocessors
    case 39: return 2048; // threads of a multiprocessor
    case 75: return 9;    // compute capability
    case 76: return 0;
    case 81: return 228 << 10;
    case 97: return 227 << 10; // shared memory that a block may ask for
    case 115: return 1;        // memory pools
    default: return 0;
    }
}
int dummy;
} // namespace

#define HANDLE(T) typedef void *T
HANDLE(Context);
HANDLE(Stream);
HANDLE(Event);
HANDLE(Module);

struct Copy2D {
    size_t from_x, from_y;
    int from_kind;
    const void *from_host;
    Pointer from_device;
    void *from_array;
    size_t from_pitch;
    size_t to_x, to_y;
    int to_kind;
    void *to_host;
    Pointer to_device;
    void *to_array;
    size_t to_pitch;
    size_t width, height;
};

extern "C" {
Result cuInit(unsigned) { return SUCCESS; }
Result cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
Result cuDeviceGetCount(int *count) { return *count = 1, SUCCESS; }
Result cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal == 0 ? 0 : 101; }
Result cuDeviceGetName(char *name, int length, int) {
    snprintf(name, length, "NVIDIA H200 (cuda-emulator)");
    return SUCCESS;
}
Result cuDeviceGetPCIBusId(char *id, int length, int) {
    snprintf(id, length, "0000:00:00.0");
    return SUCCESS;
}
Result cuDeviceGetUuid(void *uuid, int) { return memset(uuid, 0, 16), SUCCESS; }
Result cuDeviceGetUuid_v2(void *uuid, int) { return memset(uuid, 0, 16), SUCCESS; }
Result cuDeviceTotalMem_v2(size_t *bytes, int) { return *bytes = MEMORY, SUCCESS; }
Result cuDeviceGetAttribute(int *value, int which, int) { return *value = attribute(which), 0; }
Result cuDevicePrimaryCtxRetain(Context *context, int) { return *context = &dummy, SUCCESS; }
Result cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
Result cuDeviceCanAccessPeer(int *can, int, int) { return *can = 0, SUCCESS; }
Result cuCtxSetCurrent(Context) { return SUCCESS; }
Result cuCtxPushCurrent_v2(Context) { return SUCCESS; }
Result cuCtxPopCurrent_v2(Context *context) { return *context = &dummy, SUCCESS; }
Result cuCtxGetCurrent(Context *context) { return *context = &dummy, SUCCESS; }
Result cuCtxSynchronize() { return settle(); }
Result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 0, *greatest = -5, SUCCESS;
}
Result cuGetErrorName(int error, const char **name) {
    *name = error == OUT_OF_MEMORY   ? "CUDA_ERROR_OUT_OF_MEMORY"
            : error == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED"
                                     : "CUDA_ERROR";
    return SUCCESS;
}
Result cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }

Result cuMemGetInfo_v2(size_t *free, size_t *total) {
    std::lock_guard guard(lock);
    return *free = MEMORY - allocated, *total = MEMORY, SUCCESS;
}
Result cuMemAlloc_v2(Pointer *at, size_t bytes) {
    trace("allocate %zu\n", bytes);
    return allocate(at, bytes);
}
Result cuMemAllocAsync(Pointer *at, size_t bytes, Stream) { return cuMemAlloc_v2(at, bytes); }
Result cuMemFree_v2(Pointer at) {
    trace("free\n");
    settle();
    return release(at);
}
Result cuMemFreeAsync(Pointer at, Stream) { return cuMemFree_v2(at); }
Result cuMemAllocHost_v2(void **at, size_t bytes) {
    return (*at = malloc(bytes ? bytes : 1)) ? SUCCESS : OUT_OF_MEMORY;
}
Result cuMemHostAlloc(void **at, size_t bytes, unsigned) { return cuMemAllocHost_v2(at, bytes); }
Result cuMemFreeHost(void *at) { return settle(), free(at), SUCCESS; }
Result cuMemcpyHtoDAsync_v2(Pointer to, const void *from, size_t bytes, Stream) {
    std::lock_guard guard(copies_lock);
    return copies.push_back({to, from, bytes}), SUCCESS;
}
Result cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t bytes, Stream) {
    settle();
    return memcpy(to, reinterpret_cast<void *>(from), bytes), SUCCESS;
}
Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, Stream) {
    settle();
    return memmove(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes), SUCCESS;
}
Result cuMemcpyHtoD_v2(Pointer to, const void *from, size_t bytes) {
    return cuMemcpyHtoDAsync_v2(to, from, bytes, nullptr), settle();
}
Result cuMemcpyDtoH_v2(void *to, Pointer from, size_t bytes) {
    return cuMemcpyDtoHAsync_v2(to, from, bytes, nullptr);
}
Result cuMemcpy2DAsync_v2(const Copy2D *copy, Stream) {
    settle();
    auto from = copy->from_kind == 1 ? static_cast<const char *>(copy->from_host)
                                     : reinterpret_cast<const char *>(copy->from_device);
    auto to = copy->to_kind == 1 ? static_cast<char *>(copy->to_host)
                                 : reinterpret_cast<char *>(copy->to_device);
    for (size_t row = 0; row < copy->height; row++)
        memcpy(to + row * copy->to_pitch, from + row * copy->from_pitch, copy->width);
    return SUCCESS;
}
Result cuMemsetD8Async(Pointer at, unsigned char value, size_t bytes, Stream) {
    settle();
    return memset(reinterpret_cast<void *>(at), value, bytes), SUCCESS;
}

Result cuStreamCreate(Stream *stream, unsigned) { return *stream = new char, SUCCESS; }
Result cuStreamCreateWithPriority(Stream *stream, unsigned, int) {
    return *stream = new char, SUCCESS;
}
Result cuStreamDestroy_v2(Stream stream) { return delete static_cast<char *>(stream), SUCCESS; }
Result cuStreamSynchronize(Stream) { return settle(); }
Result cuStreamQuery(Stream) { return settle(); }
Result cuStreamWaitEvent(Stream, Event, unsigned) { return SUCCESS; }
Result cuStreamIsCapturing(Stream, int *capturing) { return *capturing = 0, SUCCESS; }
Result cuEventCreate(Event *event, unsigned) { return *event = new char, SUCCESS; }
Result cuEventDestroy_v2(Event event) { return delete static_cast<char *>(event), SUCCESS; }
Result cuEventRecord(Event, Stream) { return SUCCESS; }
Result cuEventQuery(Event) { return settle(); }
Result cuEventSynchronize(Event) { return settle(); }
Result cuEventElapsedTime_v2(float *time, Event, Event) { return *time = 1, SUCCESS; }
Result cuEventElapsedTime(float *time, Event, Event) { return *time = 1, SUCCESS; }
Result cuProfilerStart() { return SUCCESS; }
Result cuProfilerStop() { return SUCCESS; }
Result cuFlushGPUDirectRDMAWrites(int, int) { return SUCCESS; }

Result cuModuleLoadData(Module *module, const void *path) {
    *module = dlopen(static_cast<const char *>(path), RTLD_NOW | RTLD_LOCAL);
    if (!*module) fprintf(stderr, "cuda-emulator: %s\n", dlerror());
    return *module ? SUCCESS : NOT_FOUND;
}
Result cuModuleUnload(Module) { return SUCCESS; }
Result cuModuleGetFunction(Function **function, Module module, const char *name) {
    auto entry = dlsym(module, (std::string("emu_entry_") + name).c_str());
    if (!entry) return NOT_FOUND;
    *function = new Function{name, reinterpret_cast<void (*)(void **)>(entry)};
    return SUCCESS;
}
Result cuFuncSetAttribute(Function *, int, int) { return SUCCESS; }
Result cuFuncGetAttribute(int *value, int, Function *) { return *value = 0, SUCCESS; }
Result cuLaunchKernel(Function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                      unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                      Stream, void **arguments, void **) {
    if (!grid_x || !grid_y || !grid_z) return INVALID_VALUE;
    settle();
    trace("launch %s %u %u %u\n", function->name.c_str(), grid_x, grid_y, grid_z);
    const char *error =
        emu_launch(function->name.c_str(), function->entry, arguments, {grid_x, grid_y, grid_z},
                   {block_x, block_y, block_z}, shared);
    if (!error) return SUCCESS;
    fprintf(stderr, "cuda-emulator: %s\n", error);
    return LAUNCH_FAILED;
}
}
