/* Launch several CUDA kernels in one call from Python: launch.h as a module. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "launch.h"

static PyObject *use(PyObject *self, PyObject *address) {
  launch_kernel = (Launch)PyLong_AsVoidPtr(address);
  return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  uint64_t address[MOST];
  uint32_t number[MOST];
  if (count != 4 || !PyBytes_Check(args[0]) || !PyList_Check(args[1]) || !PyTuple_Check(args[3]) || !launch_kernel ||
      PyList_GET_SIZE(args[1]) > MOST || PyTuple_GET_SIZE(args[3]) > MOST) {
    PyErr_SetString(PyExc_TypeError,
                    "launch(words: bytes, addresses: list[int], stream: int, floats: tuple[float, ...])");
    return NULL;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[1]); i++)
    address[i] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(args[1], i));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[3]); i++) {
    float single = (float)PyFloat_AsDouble(PyTuple_GET_ITEM(args[3], i));
    memcpy(&number[i], &single, sizeof single);
  }
  void *stream = (void *)PyLong_AsUnsignedLongLong(args[2]);
  if (PyErr_Occurred()) return NULL;
  const uint64_t *word = (const uint64_t *)PyBytes_AS_STRING(args[0]);
  int error;
  Py_BEGIN_ALLOW_THREADS /* a launch waits while the device's queue is full */
  error = launch_packed(word, word + PyBytes_GET_SIZE(args[0]) / sizeof(uint64_t), address, number, stream);
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
