/* Pieces of work for the threads that PyTorch's own operations run on.
 *
 * Python passes the function GOMP_parallel of the OpenMP library that PyTorch has loaded: a second library would bring
 * a second set of threads, which would wait for the cores that the first one keeps busy. Pieces are handed out one by
 * one, so that a thread that the machine holds up delays no more than one of them. */

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Parallel)(void (*function)(void *), void *data, unsigned threads, unsigned flags);
typedef int (*Piece)(const void *arguments, long piece); /* 0 unless memory is short */

struct work {
    Piece piece;
    const void *arguments;
    long pieces;
    atomic_long next;
    atomic_int failed;
};

static void take_pieces(void *data) {
    struct work *work = data;
    for (;;) {
        long piece = atomic_fetch_add_explicit(&work->next, 1, memory_order_relaxed);
        if (piece >= work->pieces) return;
        if (work->piece(work->arguments, piece)) atomic_store(&work->failed, 1);
    }
}

static int in_parallel(Piece piece, const void *arguments, long pieces, Parallel parallel, long threads) {
    struct work work = {piece, arguments, pieces, 0, 0};
    if (threads > pieces) threads = pieces;
    if (parallel && threads > 1)
        parallel(take_pieces, &work, (unsigned)threads, 0);
    else
        take_pieces(&work);
    return work.failed;
}

/* Memory of a thread, kept from call to call: what lies between the steps of a piece. NULL where there is none left.
 * It begins with a line of the cache, so that vectors whose number is whole lie in one line each. */
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
