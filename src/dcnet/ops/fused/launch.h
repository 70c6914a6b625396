/* Launch several CUDA kernels that `native.py` has packed; for launch.c and for the C++ in cpp/.

   Packed launches are words of 64 bits: function, grid (3), threads, shared memory, how many parameters, places and
   floats; the parameters' values; for each place a parameter, a slot and an offset in bytes; for each float a parameter
   and its position among the floats of the call. */

#include <stdint.h>
#include <string.h>

#define MOST 128 /* parameters of a kernel, and slots of a call */
enum { FUNCTION, GRID_X, GRID_Y, GRID_Z, THREADS, SHARED, PARAMETERS, PLACES, FLOATS, HEAD };
enum { NO_CONTEXT = 201 }; /* CUDA_ERROR_INVALID_CONTEXT: this thread has not used the device yet */

/* cuLaunchKernel: a function of the driver, found at run time */
typedef int (*Launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                      void **);
static Launch launch_kernel;

static int launch_packed(const uint64_t *word, const uint64_t *end, const uint64_t *address, const uint32_t *number,
                         void *stream) {
  uint64_t value[MOST];
  void *parameter[MOST];
  while (word < end) {
    const uint64_t *head = word, *place;
    word += HEAD;
    memcpy(value, word, head[PARAMETERS] * sizeof(uint64_t));
    word += head[PARAMETERS];
    for (place = word, word += 3 * head[PLACES]; place < word; place += 3)
      value[place[0]] = address[place[1]] + place[2];
    for (place = word, word += 2 * head[FLOATS]; place < word; place += 2) value[place[0]] = number[place[1]];
    for (uint64_t i = 0; i < head[PARAMETERS]; i++) parameter[i] = &value[i];
    int error = launch_kernel((void *)head[FUNCTION], (unsigned)head[GRID_X], (unsigned)head[GRID_Y],
                              (unsigned)head[GRID_Z], (unsigned)head[THREADS], 1, 1, (unsigned)head[SHARED], stream,
                              parameter, NULL);
    if (error) return error;
  }
  return 0;
}
