// The operators of compiled graphs, which library.py defines. They run here for plans that Python has registered, else
// in Python.

#pragma once

#include <ATen/core/stack.h>
#include <torch/library.h>

#include "node.h"

namespace dcnet {

using torch::jit::Stack;
using Values = at::ArrayRef<c10::IValue>;

// Plans by `graph_key`, separately for forward and backward, which get different operands. Used with the GIL.
inline std::unordered_map<std::string, std::shared_ptr<Plan>> graph_plans;

constexpr size_t EFFECTS = 7, OPTIONS = 3;  // how many arguments; library.py spells them
constexpr size_t BEFORE = 6;  // the arguments of backward before the operands

// Add what a plan depends on besides its options: the sizes and memory orders of x and the weight; the number of maps
// that hold the energy; dtypes and devices.
inline void add_kinds(std::string& key, const Operands& t) {
  auto add = [&key](const void* data, size_t size) { key.append(static_cast<const char*>(data), size); };
  for (auto* tensor : {&t[X], &t[WEIGHT]}) {
    int64_t dims = tensor->dim();
    add(&dims, sizeof dims);
    add(tensor->sizes().data(), dims * sizeof(int64_t));
    add(tensor->strides().data(), dims * sizeof(int64_t));
  }
  int64_t maps = t[ENERGY].defined() ? t[ENERGY].size(0) : 0;
  add(&maps, sizeof maps);
  for (auto& tensor : t) {
    int16_t kind[3] = {-1, -1, -1};
    if (tensor.defined()) {
      kind[0] = static_cast<int16_t>(tensor.scalar_type());
      kind[1] = static_cast<int16_t>(tensor.device().type());
      kind[2] = tensor.device().index();
    }
    add(kind, sizeof kind);
  }
}

inline std::string graph_key(
    bool backward, const std::string& options, double eps, double norm_eps, const Operands& t) {
  std::string key(backward ? "backward" : "forward");
  key.reserve(1024);
  key += options;
  for (double number : {eps, norm_eps}) key.append(reinterpret_cast<const char*>(&number), sizeof number);
  add_kinds(key, t);
  return key;
}

inline std::shared_ptr<Plan> graph_plan(bool backward, Values options, const Operands& t) {
  auto key = graph_key(backward, options[0].toStringRef(), options[1].toDouble(), options[2].toDouble(), t);
  auto found = graph_plans.find(key);
  return found == graph_plans.end() ? nullptr : found->second;
}

// Take a tensor out of an argument; return whether kernels can run on it.
inline bool read(const c10::IValue& value, Tensor& tensor, bool any_order = false) {
  if (value.isNone()) return true;
  tensor = value.toTensor();
  return aligned(tensor) && (any_order || tensor.is_contiguous());
}

inline bool read(Values values, Operands& t) {
  bool usual = true;
  for (size_t i = 0; i < OPERANDS; i++)
    usual = read(values[i], t[i], i == X || i == WEIGHT || i == RESIDUAL) && usual;
  return usual;
}

inline py::object as_python(const c10::IValue& value) {
  if (value.isTensor()) return wrapped(value.toTensor());
  if (value.isDouble()) return py::float_(value.toDouble());
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isString()) return py::str(value.toStringRef());
  TORCH_INTERNAL_ASSERT(value.isNone(), "an argument of a kind that library.py does not declare");
  return py::none();
}

// Let library.py compute; it registers its plan for the next time.
inline void in_python(const Held& function, size_t count, Stack& stack) {
  std::vector<Tensor> results;
  {
    py::gil_scoped_acquire gil;
    auto values = torch::jit::last(stack, count);
    py::tuple arguments(count);
    for (size_t i = 0; i < count; i++) arguments[i] = as_python(values[i]);
    py::object found = call(function, *arguments);
    for (py::handle result : found) results.push_back(THPVariable_Unpack(result.ptr()));
  }
  torch::jit::drop(stack, count);
  for (auto& result : results) torch::jit::push(stack, std::move(result));
}

// Take the effects out of the arguments, and BatchNorm's averages too: where they are updated, they are among these.
inline bool read_effects(Values values, Operands& t, Effects& effects) {
  bool usual = read(values[0], effects.running_norm) && read(values[1], effects.mean_batches);
  if (effects.running_norm.defined()) effects.track = values[2].isNone() ? 2 : 1;
  if (effects.track == 1) effects.mean_momentum = static_cast<float>(values[2].toDouble());
  effects.moves = !values[6].isNone();
  if (!effects.moves) return usual;
  effects.momentum = static_cast<float>(values[6].toDouble());
  usual = read(values[3], t[RUNNING_MEAN]) && read(values[4], t[RUNNING_VAR]) && usual;
  return read(values[5], effects.batches) && usual;
}

// decoupled_forward, or decoupled_inference, which has no effects and keeps nothing for backward.
template <bool keep>
void forward_in_graph(const c10::OperatorHandle&, Stack* stack) {
  constexpr size_t count = OPERANDS + (keep ? EFFECTS : 0) + OPTIONS;
  auto values = torch::jit::last(*stack, count);
  Operands t;
  Effects effects;
  bool usual = read(values, t);
  if constexpr (keep) usual = read_effects(values.slice(OPERANDS, EFFECTS), t, effects) && usual;
  std::shared_ptr<Plan> plan;
  const Kernels* epilogue = nullptr;
  if (usual) {
    py::gil_scoped_acquire gil;
    plan = graph_plan(false, values.slice(count - OPTIONS), t);
    // activation checkpointing runs forward again inside a backward pass: this batch has been counted
    if (plan && (!plan->of_batch || torch::autograd::get_current_graph_task_id() != -1)) effects.track = 0;
    if (plan) epilogue = plan->epilogue(effects.track, effects.moves);
  }
  if (epilogue == nullptr) return in_python(keep ? given->graph_forward : given->graph_inference, count, *stack);
  forwards++;
  c10::OptionalDeviceGuard device(at::device_of(t[X]));
  if (effects.track == 0) effects.running_norm = effects.mean_batches = Tensor();
  auto [saved, left] = forward(*plan, *epilogue, t, effects, keep);
  if (!left.defined()) left = at::empty({0}, saved[VECTORS].options());
  torch::jit::drop(*stack, count);
  torch::jit::push(*stack, saved[OUT], left);
  if constexpr (keep) torch::jit::push(*stack, saved[DOT], saved[NORMS], saved[UNIT], saved[VECTORS]);
}

inline void backward_in_graph(const c10::OperatorHandle&, Stack* stack) {
  constexpr size_t kept = size_t{VECTORS} + 1, count = BEFORE + OPERANDS + kept + OPTIONS;
  auto values = torch::jit::last(*stack, count);
  Tensor e, e_more, of_left;
  SavedTensors saved;
  Operands t;
  bool usual = read(values[0], e, true) && read(values[1], e_more, true) && read(values[2], of_left, true);
  usual = read(values[3], saved[OUT], true) && usual;
  BackwardKey key;
  key.more = e_more.defined();
  key.want_x = values[4].toBool();
  key.want_weight = values[5].toBool();
  usual = read(values.slice(BEFORE, OPERANDS), t) && usual;
  for (size_t i = 0; i < kept; i++) usual = read(values[BEFORE + OPERANDS + i], saved[i], true) && usual;
  key.behind = saved[OUT].defined();
  key.energy = of_left.defined();
  key.again = false;  // a graph keeps the dot product and the norms
  std::shared_ptr<Plan> plan;
  if (usual) {
    py::gil_scoped_acquire gil;
    plan = graph_plan(true, values.slice(count - OPTIONS), t);
  }
  // a graph adds the gradient of the norms itself, in a pass with the code that follows
  key.add = !key.want_x || (plan && plan->depthwise);
  const Backward* kernels = plan ? plan->backward(key) : nullptr;
  if (kernels == nullptr) return in_python(given->graph_backward, count, *stack);
  backwards++;
  c10::OptionalDeviceGuard device(at::device_of(t[X]));
  for (size_t i = 0; i < OPERANDS; i++) saved[saved_as(static_cast<Operand>(i))] = t[i];
  const auto floats = saved[VECTORS].options(), maps = e.options();
  Gradients found = gradients(*plan, *kernels, key, e, e_more, of_left, saved, /*keep_e=*/false);
  if (found.mean.defined()) found.mean = found.mean.clone();  // it is a part of a large buffer
  auto there = [](const Tensor& gradient, const at::TensorOptions& options) {  // operators cannot return None
    return gradient.defined() ? gradient : at::empty({0}, options);
  };
  torch::jit::drop(*stack, count);
  torch::jit::push(*stack, there(found.x, maps), there(found.products, floats), there(found.weight, maps));
  torch::jit::push(*stack, found.vectors, there(found.mean, floats), there(found.residual, maps));
}

// Run library.py's operators here from now on. The Python implementations stay, for other devices.
inline void register_in_graph() {
  static std::vector<std::unique_ptr<torch::Library>> libraries;  // registered as long as they live
  if (!libraries.empty()) return;
  for (auto key : {c10::DispatchKey::CUDA, c10::DispatchKey::CPU}) {  // on a CPU: Triton's interpreter, in tests
    libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "dcnet", key, __FILE__, __LINE__));
    auto& library = *libraries.back();
    library.impl("decoupled_forward", torch::CppFunction::makeFromBoxedFunction<&forward_in_graph<true>>());
    library.impl("decoupled_inference", torch::CppFunction::makeFromBoxedFunction<&forward_in_graph<false>>());
    library.impl("decoupled_backward", torch::CppFunction::makeFromBoxedFunction<&backward_in_graph>());
  }
}

}  // namespace dcnet
