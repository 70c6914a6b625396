/* Launch several CUDA kernels in one call from Python.

   `native.py` packs launches into words of 64 bits: function, grid (3), threads, shared memory, how many parameters,
   places and floats; the parameters' values; for each place a parameter, a slot and an offset in bytes; for each
   float a parameter and its position among the floats of the call. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MOST 128 /* parameters of a kernel, and slots of a call */
enum { FUNCTION, GRID_X, GRID_Y, GRID_Z, THREADS, SHARED, PARAMETERS, PLACES, FLOATS, HEAD };
enum { NO_CONTEXT = 201 }; /* CUDA_ERROR_INVALID_CONTEXT: this thread has not used the device yet */

typedef int (*Launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
static Launch launch_kernel;

static PyObject *use(PyObject *self, PyObject *address) {
  launch_kernel = (Launch)PyLong_AsVoidPtr(address);
  return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static int run(const uint64_t *word, const uint64_t *end, const uint64_t *address, const uint32_t *number, void *stream) {
  uint64_t value[MOST];
  void *parameter[MOST];
  while (word < end) {
    const uint64_t *head = word, *place;
    word += HEAD;
    memcpy(value, word, head[PARAMETERS] * sizeof(uint64_t));
    word += head[PARAMETERS];
    for (place = word, word += 3 * head[PLACES]; place < word; place += 3) value[place[0]] = address[place[1]] + place[2];
    for (place = word, word += 2 * head[FLOATS]; place < word; place += 2) value[place[0]] = number[place[1]];
    for (uint64_t i = 0; i < head[PARAMETERS]; i++) parameter[i] = &value[i];
    int error = launch_kernel((void *)head[FUNCTION], head[GRID_X], head[GRID_Y], head[GRID_Z], head[THREADS], 1, 1,
                              head[SHARED], stream, parameter, NULL);
    if (error) return error;
  }
  return 0;
}

static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  uint64_t address[MOST];
  uint32_t number[MOST];
  if (count != 4 || !PyBytes_Check(args[0]) || !PyList_Check(args[1]) || !PyTuple_Check(args[3]) || !launch_kernel ||
      PyList_GET_SIZE(args[1]) > MOST || PyTuple_GET_SIZE(args[3]) > MOST) {
    PyErr_SetString(PyExc_TypeError, "launch(words: bytes, addresses: list[int], stream: int, floats: tuple[float, ...])");
    return NULL;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[1]); i++) address[i] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(args[1], i));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[3]); i++) {
    float single = (float)PyFloat_AsDouble(PyTuple_GET_ITEM(args[3], i));
    memcpy(&number[i], &single, sizeof single);
  }
  void *stream = (void *)PyLong_AsUnsignedLongLong(args[2]);
  if (PyErr_Occurred()) return NULL;
  const uint64_t *word = (const uint64_t *)PyBytes_AS_STRING(args[0]);
  int error;
  Py_BEGIN_ALLOW_THREADS /* a launch waits while the device's queue is full */
  error = run(word, word + PyBytes_GET_SIZE(args[0]) / sizeof(uint64_t), address, number, stream);
  Py_END_ALLOW_THREADS
  if (error == 0 || error == NO_CONTEXT) return PyBool_FromLong(error == 0);
  return PyErr_Format(PyExc_RuntimeError, "cuLaunchKernel failed with CUDA error %d", error);
}

static PyMethodDef functions[] = {
    {"use", use, METH_O, "Use the function at this address as cuLaunchKernel."},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL,
     "Launch packed kernels; return False, with none launched, where this thread has no CUDA context yet."},
    {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "dcnet_launch", NULL, -1, functions};
PyMODINIT_FUNC PyInit_dcnet_launch(void) { return PyModule_Create(&module); }
