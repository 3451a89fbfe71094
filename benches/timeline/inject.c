// Writes down when each kernel and copy of a CUDA program ran: the driver loads this library into any program that is
// started with CUDA_INJECTION64_PATH, and CUPTI calls it with what the GPU did, and the host asked the driver for. See
// timeline.py.
#include <cupti.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static FILE *out, *calls;

static void CUPTIAPI requested(uint8_t **buffer, size_t *size, size_t *max_records) {
    *size = 8 << 20;
    *max_records = 0;
    if (posix_memalign((void **)buffer, 8, *size)) abort();
}

static void CUPTIAPI completed(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    CUpti_Activity *record = NULL;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL || record->kind == CUPTI_ACTIVITY_KIND_KERNEL) {
            KERNEL_RECORD *kernel = (KERNEL_RECORD *)record;
            fprintf(out, "%llu\t%llu\t%u\t%s\n", (unsigned long long)kernel->start, (unsigned long long)kernel->end,
                    kernel->streamId, kernel->name);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            MEMCPY_RECORD *copy = (MEMCPY_RECORD *)record;
            fprintf(out, "%llu\t%llu\t%u\tmemcpy %u, %llu bytes\n", (unsigned long long)copy->start,
                    (unsigned long long)copy->end, copy->streamId, copy->copyKind, (unsigned long long)copy->bytes);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_DRIVER) {
            CUpti_ActivityAPI *call = (CUpti_ActivityAPI *)record;
            const char *name = "?";
            cuptiGetCallbackName(CUPTI_CB_DOMAIN_DRIVER_API, call->cbid, &name);
            fprintf(calls, "%llu\t%llu\t%u\t%s\n", (unsigned long long)call->start, (unsigned long long)call->end,
                    call->threadId, name);
        }
    }
    free(buffer);
}

static void finish(void) {
    cuptiActivityFlushAll(1);
    fflush(out);
    if (calls) fflush(calls);
}

int InitializeInjection(void) {
    const char *path = getenv("TIMELINE_OUT"), *of_calls = getenv("TIMELINE_CALLS");
    char name[4096];
    if (!path) return 1;
    snprintf(name, sizeof name, "%s.%d", path, getpid());
    out = fopen(name, "w");
    if (!out) return 1;
    cuptiActivityRegisterCallbacks(requested, completed);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY);
    if (of_calls) {
        snprintf(name, sizeof name, "%s.%d", of_calls, getpid());
        calls = fopen(name, "w");
        if (!calls || cuptiActivityEnable(CUPTI_ACTIVITY_KIND_DRIVER) != CUPTI_SUCCESS) fprintf(stderr, "no calls into %s\n", name);
    }
    atexit(finish);
    return 1;
}
