// How a kernel runs on a CPU: every thread of a block is a fiber, and fibers wait for each other
// where threads of a GPU do. What the generated code calls has C linkage.
#pragma once

struct emu_dim3 {
    unsigned x, y, z;
};

extern "C" {
extern emu_dim3 emu_threadIdx, emu_blockIdx, emu_blockDim, emu_gridDim;

// The dynamic shared memory of the running block.
char *emu_shared();
// Waits until every thread of the block that has not ended is here.
void emu_sync_block(unsigned site);
// Waits until the lanes of the warp that come by this site are here; `work` then runs once for all
// of them, with a bit for each lane and what each passed.
void emu_sync_warp(unsigned site, const void *in, void *out,
                   void (*work)(unsigned lanes, const void **in, void **out));
// Copies that have been asked for and have not been waited for.
void emu_copy_async(void *to, const void *from, unsigned bytes, unsigned filled);
void emu_copy_commit();
void emu_copy_wait(unsigned pending);
// Ends the launch with an error.
[[noreturn]] void emu_fail(const char *what);

// Runs a kernel; null, or what went wrong.
const char *emu_launch(const char *name, void (*entry)(void **), void **arguments, emu_dim3 grid,
                       emu_dim3 block, unsigned shared_bytes);
}
