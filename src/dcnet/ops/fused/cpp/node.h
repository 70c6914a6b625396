// The decoupled convolution as a node of autograd's graph: what autograd.py's `_Decoupled` is in Python.

#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "passes.h"

namespace dcnet {

using torch::autograd::variable_list;

inline std::atomic<int64_t> forwards{0}, backwards{0}, backwards_in_python{0};

inline bool aligned(const Tensor& tensor) {  // kernels are compiled for aligned pointers
  return !tensor.defined() || reinterpret_cast<uint64_t>(tensor.data_ptr()) % 16 == 0;
}

struct DecoupledBackward : torch::autograd::Node {
  std::shared_ptr<Plan> plan;
  std::array<torch::autograd::SavedVariable, SAVED> saved;

  std::string name() const override { return "DecoupledBackward"; }

  void save(const SavedTensors& tensors) {
    for (size_t i = 0; i < SAVED; i++) saved[i] = torch::autograd::SavedVariable(tensors[i], /*is_output=*/i == OUT);
  }

  // The engine calls this before `apply` if nobody will need the saved tensors again.
  void will_release_variables() override { last_ = true; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& one : saved) one.reset_data();
  }

  variable_list apply(variable_list&& incoming) override {
    SavedTensors tensors;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = 0; i < SAVED; i++) tensors[i] = saved[i].unpack(i == OUT ? getptr() : decltype(getptr())());
      if (last_) saved[DOT].reset_data();  // `gradients` frees it halfway
    }
    if (plan->recovers) std::swap(tensors[DOT], tensors[OUT]);
    std::array<bool, OPERANDS> wanted;
    for (size_t i = 0; i < OPERANDS; i++) wanted[i] = task_should_compute_output(i);
    Tensor e = std::move(incoming[0]), of_left = incoming.size() > 1 ? std::move(incoming[1]) : Tensor();

    BackwardKey key;
    key.energy = of_left.defined();
    key.behind = tensors[OUT].defined() && (plan->activates || key.energy);
    key.more = false;  // autograd has added them
    key.again = plan->depthwise;
    key.want_x = wanted[X];
    key.want_weight = wanted[WEIGHT];
    key.add = plan->maps == 0 || !wanted[X];
    bool usual = !c10::GradMode::is_enabled() && aligned(e) && aligned(of_left);
    for (auto& tensor : tensors) usual = usual && aligned(tensor);
    const Backward* kernels = usual ? plan->backward(key) : nullptr;
    if (kernels == nullptr) return in_python(e, of_left, tensors, wanted);
    backwards++;
    c10::OptionalDeviceGuard device(at::device_of(tensors[saved_as(X)]));
    return backward(*plan, *kernels, key, std::move(e), std::move(of_left), tensors, wanted);
  }

 private:
  bool last_ = false;

  // Compute the gradients by op.py. It is called when the kernels are not packed yet, when a tensor is not aligned, and
  // with create_graph=True, since differentiating the gradients has to raise.
  variable_list in_python(
      const Tensor& e, const Tensor& of_left, const SavedTensors& tensors, const std::array<bool, OPERANDS>& wanted) {
    backwards_in_python++;
    py::gil_scoped_acquire gil;
    py::tuple saved(SAVED), wants(wanted.size());
    for (size_t i = 0; i < SAVED; i++) saved[i] = wrapped(tensors[i]);
    for (size_t i = 0; i < OPERANDS; i++) wants[i] = py::bool_(wanted[i]);
    auto incoming = py::make_tuple(wrapped(e), wrapped(of_left));
    py::tuple found = call(given->in_python, plan->python(), incoming, saved, wants);
    variable_list gradients(OPERANDS);
    for (size_t i = 0; i < OPERANDS; i++)
      if (!found[i].is_none()) gradients[i] = THPVariable_Unpack(py::object(found[i]).ptr());
    return gradients;
  }
};

// PyTorch 2.11 counts references to nodes by shared_ptr, 2.13 by intrusive_ptr.
template <class N>
auto make_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, N>) {
    return c10::make_intrusive<N>();
  } else {
    return std::shared_ptr<N>(new N(), [](auto* node) { deleteNode(node); });
  }
}

// Return the output and its energy, undefined if there is none.
inline std::pair<Tensor, Tensor> decoupled(
    const std::shared_ptr<Plan>& plan, const Kernels& epilogue, const Operands& t, const Effects& effects) {
  forwards++;
  c10::OptionalDeviceGuard device(at::device_of(t[X]));
  bool differentiable = false;
  if (c10::GradMode::is_enabled())
    for (auto& tensor : t) differentiable = differentiable || (tensor.defined() && tensor.requires_grad());
  auto [saved, left] = forward(*plan, epilogue, t, effects, differentiable);
  Tensor out = saved[OUT];
  if (!differentiable) return {out, left};

  auto node = make_node<DecoupledBackward>();
  torch::autograd::edge_list edges(OPERANDS);
  for (size_t i = 0; i < OPERANDS; i++)
    if (t[i].defined()) edges[i] = torch::autograd::impl::gradient_edge(t[i]);
  node->set_next_edges(std::move(edges));
  node->plan = plan;
  torch::autograd::set_history(out, node);
  if (left.defined()) torch::autograd::set_history(left, node);
  // backward can often compute the output again
  if (plan->recovers) saved[DOT] = Tensor();
  else if (!t[RESIDUAL].defined() || !(plan->activates || !plan->left.empty())) saved[OUT] = Tensor();
  if (plan->depthwise) saved[DOT] = saved[NORMS] = Tensor();  // quick to compute again
  for (auto name : READ_BY_BACKWARD) saved[saved_as(name)] = t[name];
  node->save(saved);
  return {out, left};
}

}  // namespace dcnet
