/* Chunks of work for the threads that PyTorch's own operations run on.
 *
 * Python passes the function GOMP_parallel of the OpenMP library that PyTorch has loaded. A second library would have
 * its own threads, which would wait for the cores that the first one keeps busy. Chunks are handed out one by one, so
 * that a slow thread delays only one of them. */

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Parallel)(void (*function)(void *), void *data, unsigned threads, unsigned flags);
typedef int (*Chunk)(const void *arguments, long chunk); /* 0 unless memory is short */

struct work {
    Chunk chunk;
    const void *arguments;
    long chunks;
    atomic_long next;
    atomic_int failed;
};

static void take_chunks(void *data) {
    struct work *work = data;
    for (;;) {
        long chunk = atomic_fetch_add_explicit(&work->next, 1, memory_order_relaxed);
        if (chunk >= work->chunks) return;
        if (work->chunk(work->arguments, chunk)) atomic_store(&work->failed, 1);
    }
}

static int in_parallel(Chunk chunk, const void *arguments, long chunks, Parallel parallel, long threads) {
    struct work work = {chunk, arguments, chunks, 0, 0};
    if (threads > chunks) threads = chunks;
    if (parallel && threads > 1)
        parallel(take_chunks, &work, (unsigned)threads, 0);
    else
        take_chunks(&work);
    return work.failed;
}

/* Memory of a thread for the intermediate results of a chunk, kept from call to call; NULL if there is none left. It
 * starts with a cache line, so that no aligned vector crosses two lines. */
static float *scratch(size_t floats) {
    static __thread float *memory;
    static __thread size_t size;
    if (floats > size) {
        free(memory);
        memory = aligned_alloc(64, (floats + 15) / 16 * 16 * sizeof(float));
        size = memory ? floats : 0;
    }
    return memory;
}
