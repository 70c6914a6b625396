// The Python module `dcnet_host`. `host.py` builds it, gives it plans, and calls `run` for every layer.

#include "graph.h"

#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/graph_task.h>

namespace dcnet {

std::unordered_map<std::string, std::shared_ptr<Plan>> plans;  // with the GIL
constexpr size_t MOST_PLANS = 4096;  // many may be for shapes that never come again

// Take a tensor out of a Python object; None leaves it undefined. Return whether kernels can run on it.
bool read(PyObject* object, Tensor& tensor, bool any_order = false) {
  if (object == Py_None) return true;
  if (!THPVariable_CheckExact(object)) return false;  // a subclass may compute something else
  tensor = THPVariable_Unpack(object);
  if (tensor.key_set().has(c10::DispatchKey::Python)) return false;
  return aligned(tensor) && (any_order || tensor.is_contiguous());
}

// Return the key of a plan, as in `plan_of`: the options (one object for all equal ones), and the kinds of operands.
std::string key_of(PyObject* options, const Operands& t) {
  std::string key;
  key.reserve(512);
  key.append(reinterpret_cast<const char*>(&options), sizeof options);
  add_kinds(key, t);
  return key;
}

bool read_operands(PyObject* tuple, Operands& t) {
  if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != OPERANDS) return false;
  for (int i = 0; i < OPERANDS; i++)
    if (!read(PyTuple_GET_ITEM(tuple, i), t[i], i == X || i == WEIGHT || i == RESIDUAL)) return false;
  return t[X].defined() && t[WEIGHT].defined();
}

// Take `Effects` out of a Python tuple: a running average of E{‖x‖} (`BatchMean`), BatchNorm's momentum, its count.
bool read_effects(PyObject* tuple, const Plan& plan, Effects& effects) {
  PyObject *tracked = PyTuple_GET_ITEM(tuple, 0), *momentum = PyTuple_GET_ITEM(tuple, 1);
  effects.moves = momentum != Py_None;
  if (effects.moves) effects.momentum = static_cast<float>(PyFloat_AsDouble(momentum));
  if (!read(PyTuple_GET_ITEM(tuple, 2), effects.batches)) return false;
  // activation checkpointing runs forward again inside a backward pass: this batch has been counted
  bool again = torch::autograd::get_current_graph_task_id() != -1;
  if (plan.of_batch && tracked != Py_None && PyTuple_GET_ITEM(tracked, 0) != Py_None && !again) {
    PyObject* of_mean = PyTuple_GET_ITEM(tracked, 2);
    effects.track = of_mean == Py_None ? 2 : 1;
    if (effects.track == 1) effects.mean_momentum = static_cast<float>(PyFloat_AsDouble(of_mean));
    if (!read(PyTuple_GET_ITEM(tracked, 0), effects.running_norm)) return false;
    if (!read(PyTuple_GET_ITEM(tracked, 1), effects.mean_batches)) return false;
  }
  if (PyErr_Occurred()) throw python_error();
  return true;
}

// Tell whether operations are watched (by a dispatch mode or torch.jit.trace), transformed (by torch.func), or
// differentiated in forward mode. Other code handles these cases.
bool watched() {
  using c10::DispatchKey;
  static const c10::DispatchKeySet watchers({DispatchKey::Tracer, DispatchKey::FuncTorchDynamicLayerFrontMode});
  return c10::impl::dispatch_mode_enabled() ||
         c10::impl::tls_local_dispatch_key_set().included_.has_any(watchers) ||
         torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

PyObject* run(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 3 || !PyTuple_Check(args[1]) || !PyTuple_Check(args[2]) || PyTuple_GET_SIZE(args[2]) != 3)
    throw py::type_error("run(options, operands: Operands, effects: Effects)");
  Operands t;
  if (watched() || !read_operands(args[1], t)) Py_RETURN_NONE;
  auto found = plans.find(key_of(args[0], t));
  if (found == plans.end()) Py_RETURN_NONE;
  std::shared_ptr<Plan> plan = found->second;
  if (t[RESIDUAL].defined() && t[RESIDUAL].sizes() != plan->out) Py_RETURN_NONE;  // Python broadcasts it
  Effects effects;
  if (!read_effects(args[2], *plan, effects)) Py_RETURN_NONE;
  const Kernels* epilogue = plan->epilogue(effects.track, effects.moves);
  if (epilogue == nullptr) Py_RETURN_NONE;
  std::pair<Tensor, Tensor> result;
  {
    py::gil_scoped_release released;  // a launch waits while the device's queue is full
    RECORD_FUNCTION("dcnet::decoupled", std::vector<c10::IValue>());
    result = decoupled(plan, *epilogue, t, effects);
  }
  return py::make_tuple(wrapped(result.first), wrapped(result.second)).release().ptr();
  END_HANDLE_TH_ERRORS
}

void forget() {
  plans.clear();
  graph_plans.clear();
}

// Keep a plan for operands like these.
void learn(py::object options, py::object operands, py::object plan, const py::dict& numbers) {
  Operands t;
  if (!read_operands(operands.ptr(), t)) return;
  std::string key = key_of(options.ptr(), t);
  if (plans.count(key)) return;  // known, but `run` declined for another reason
  if (plans.size() >= MOST_PLANS) plans.clear();
  plans.emplace(std::move(key), std::make_shared<Plan>(std::move(plan), std::move(options), numbers));
}

// Keep a plan for a compiled graph's operator, forward or backward; options: as `as_arguments` spells them.
void learn_in_graph(bool backward, const std::string& options, double eps, double norm_eps, py::object operands,
                    py::object plan, const py::dict& numbers) {
  Operands t;
  if (!read_operands(operands.ptr(), t)) return;
  std::string key = graph_key(backward, options, eps, norm_eps, t);
  if (graph_plans.count(key)) return;
  if (graph_plans.size() >= MOST_PLANS) graph_plans.clear();
  graph_plans.emplace(std::move(key), std::make_shared<Plan>(std::move(plan), py::none(), numbers));
}

void use(uint64_t launch_address, const std::vector<std::string>& operands, py::object epilogue, py::object backward,
         py::object in_python, std::vector<py::object> in_graph, std::vector<size_t> forward_slots,
         std::vector<size_t> backward_slots) {
  if (operands != std::vector<std::string>(OPERAND_NAMES.begin(), OPERAND_NAMES.end()))
    throw py::value_error("the operands are not those that cpp/plan.h knows");
  for (auto* slots : {&forward_slots, &backward_slots})
    for (size_t slot : *slots)
      if (slot >= SLOTS) throw py::value_error("a call has more slots than cpp/plan.h knows");
  launch_kernel = reinterpret_cast<Launch>(launch_address);
  given = new Given{Held(std::move(epilogue)), Held(std::move(backward)), Held(std::move(in_python)),
                    Held(in_graph.at(0)), Held(in_graph.at(1)), Held(in_graph.at(2)),
                    std::move(forward_slots), std::move(backward_slots)};
  forget();
  register_in_graph();
}

py::dict counts() {
  py::dict found;
  found["plans"] = plans.size() + graph_plans.size();
  found["forward"] = forwards.load();
  found["backward"] = backwards.load();
  found["backward in Python"] = backwards_in_python.load();
  return found;
}

PyMethodDef functions[] = {
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run)), METH_FASTCALL,
     "Return the output and its energy; None, with nothing done, where Python has to do it."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace dcnet

PYBIND11_MODULE(dcnet_host, module) {
  module.def("use", &dcnet::use, "Take cuLaunchKernel's address, functions of host.py, the slots of a call's memory.");
  module.def("learn", &dcnet::learn, "Keep a plan, so that `run` finds it.");
  module.def("learn_in_graph", &dcnet::learn_in_graph, "Keep a plan for an operator of compiled graphs.");
  module.def("forget", &dcnet::forget, "Forget all plans.");
  module.def("counts", &dcnet::counts, "Return how many plans are known, and how often C++ has run.");
  if (PyModule_AddFunctions(module.ptr(), dcnet::functions) != 0) throw pybind11::error_already_set();
}
