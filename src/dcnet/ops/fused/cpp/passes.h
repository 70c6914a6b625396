// Forward and backward of a decoupled convolution: what op.py does, for common layers.

#pragma once

#include <ATen/DeviceGuard.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "plan.h"

namespace dcnet {

using Operands = std::array<Tensor, OPERANDS>;
using SavedTensors = std::array<Tensor, SAVED>;

// Autograd records nothing inside, and autocast is off: x and the kernels already have its dtype.
struct BelowAutograd {
  c10::AutoGradMode no_grad{false};
  at::AutoDispatchBelowAutograd below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// The tensors of one call by slot, and the stream on which kernels run.
class Memory {
 public:
  Memory(const std::vector<size_t>& slots, const Tensor& x) : slots_(slots), options_(x.options().dtype(at::kFloat)) {
    if (x.is_cuda()) {
      c10::impl::VirtualGuardImpl device(x.device().type());
      stream_ = device.getStreamNativeHandle(device.getStream(x.device()));
    }
  }

  const Tensor& put(size_t name, const Tensor& tensor) {
    tensors_[slots_[name]] = tensor;
    return tensor;
  }

  void drop(size_t name) { tensors_[slots_[name]] = Tensor(); }

  Tensor floats(size_t name, at::IntArrayRef sizes) { return put(name, at::empty(sizes, options_)); }

  void run(const Kernels& kernels, std::initializer_list<float> floats = {}) const {
    if (kernels.function) return run_in_python(kernels, floats);
    uint64_t address[MOST];
    uint32_t number[MOST];
    for (size_t i = 0; i < tensors_.size(); i++)
      address[i] = tensors_[i].defined() ? reinterpret_cast<uint64_t>(tensors_[i].data_ptr()) : 0;
    memcpy(number, floats.begin(), floats.size() * sizeof(float));
    const uint64_t* word = kernels.words.data();
    int error = launch_packed(word, word + kernels.words.size(), address, number, stream_);
    if (error == NO_CONTEXT) {  // a call of CUDA's runtime makes the device's context current in this thread
      at::zeros({1}, options_);
      error = launch_packed(word, word + kernels.words.size(), address, number, stream_);
    }
    TORCH_CHECK(error == 0, "cuLaunchKernel failed with CUDA error ", error);
  }

 private:
  void run_in_python(const Kernels& kernels, std::initializer_list<float> floats) const {
    py::gil_scoped_acquire gil;
    py::tuple tensors(tensors_.size());
    for (size_t i = 0; i < tensors_.size(); i++) tensors[i] = wrapped(tensors_[i]);
    py::tuple numbers(floats.size());
    for (size_t i = 0; i < floats.size(); i++) numbers[i] = py::float_(floats.begin()[i]);
    call(kernels.function, tensors, *numbers);
  }

  const std::vector<size_t>& slots_;
  at::TensorOptions options_;
  void* stream_ = nullptr;
  std::array<Tensor, SLOTS> tensors_;
};

// Return a tensor in this memory order, copied only if it has another.
inline Tensor ordered(const Tensor& tensor, at::IntArrayRef stride) {
  if (tensor.strides() == stride) return tensor;
  return at::empty_strided(tensor.sizes(), stride, tensor.options()).copy_(tensor);
}

// What the kernels update besides their outputs: `Effects`.
struct Effects {
  int track = 0;  // the running average of E{‖x‖}: 0 not at all, 1 with a momentum, 2 cumulatively
  bool moves = false;  // BatchNorm's averages
  float mean_momentum = 0, momentum = 0;
  Tensor running_norm, mean_batches, batches;
};

// Return what is saved for backward, including the output, and the output's energy.
inline std::pair<SavedTensors, Tensor> forward(
    const Plan& plan, const Kernels& epilogue, const Operands& t, const Effects& effects, bool keep) {
  BelowAutograd guard;
  const Tensor& x = t[X];
  Memory memory(given->forward_slots, x);
  for (size_t i = 0; i < OPERANDS; i++) memory.put(i, t[i]);
  const bool counted = effects.batches.defined() || !effects.moves;  // by the caller
  memory.put(F_BATCHES, counted ? effects.batches : at::zeros({}, x.options().dtype(at::kLong)));
  memory.put(F_RUNNING_NORM, effects.running_norm);
  memory.put(F_MEAN_BATCHES, effects.mean_batches);

  SavedTensors saved;
  saved[VECTORS] = memory.floats(F_VECTORS, plan.vectors);
  if (plan.depthwise) {
    saved[DOT] = memory.put(F_DOT, at::empty_strided(plan.norms, plan.out_stride, x.options()));
    saved[NORMS] = memory.put(F_NORMS, at::empty_like(saved[DOT], x.options().dtype(at::kFloat)));
  } else {
    saved[NORMS] = memory.floats(F_NORMS, plan.norms);
  }
  memory.floats(F_SCRATCH, plan.scratch);
  saved[UNIT] = memory.put(F_UNIT, at::empty_like(t[WEIGHT], x.options()));
  Tensor left = plan.left.empty() ? Tensor() : memory.floats(F_LEFT, plan.left);
  memory.run(plan.ahead);
  if (!plan.depthwise) {
    Tensor dot = at::convolution(
        x, saved[UNIT], {}, plan.stride, plan.padding, plan.dilation, /*transposed=*/false, plan.zeros, plan.groups);
    saved[DOT] = memory.put(F_DOT, ordered(dot, plan.out_stride));
  }
  saved[OUT] = memory.put(F_OUT, keep && !plan.recovers ? at::empty_like(saved[DOT]) : saved[DOT]);
  if (t[RESIDUAL].defined()) memory.put(RESIDUAL, ordered(t[RESIDUAL], plan.out_stride));
  memory.run(epilogue, {effects.momentum, effects.mean_momentum});
  return {std::move(saved), std::move(left)};
}

// `Gradients` of operands.py; undefined where not wanted. The mean's is a part of a larger buffer.
struct Gradients {
  Tensor x, products, weight, vectors, mean, residual;
};

// The incoming gradient and the dot product are freed before the convolution's backward pass needs memory, as a plain
// network does between two nodes. keep_e: the residual's gradient is the incoming one.
inline Gradients gradients(
    const Plan& plan, const Backward& kernels, const BackwardKey& key, Tensor e, Tensor e_more, Tensor of_left,
    SavedTensors& saved, bool keep_e) {
  BelowAutograd guard;
  const Tensor &x = saved[saved_as(X)], &weight = saved[saved_as(WEIGHT)];
  Tensor dot = std::move(saved[DOT]), norms = saved[NORMS];
  if (key.again) {  // a depthwise layer's, not saved
    dot = at::empty_strided(plan.norms, plan.out_stride, x.options());
    norms = at::empty_like(dot, x.options().dtype(at::kFloat));
  }
  if (of_left.defined() && of_left.strides().slice(1) != norms.strides())
    of_left = of_left.select(0, 0).contiguous();  // the energy is the sum of the maps, so all have the same gradient

  Memory memory(given->backward_slots, x);
  for (size_t i = 0; i < READ_BY_BACKWARD.size(); i++) memory.put(i, saved[saved_as(READ_BY_BACKWARD[i])]);
  memory.put(B_E, e.defined() ? ordered(e, plan.out_stride) : at::zeros_like(dot));
  if (key.more) memory.put(B_E_MORE, ordered(e_more, plan.out_stride));
  memory.put(B_OF_LEFT, of_left);
  if (key.behind) memory.put(B_OUT, saved[OUT]);
  memory.put(B_DOT, dot);
  memory.put(B_NORMS, norms);
  memory.put(B_UNIT, saved[UNIT]);
  memory.put(B_VECTORS, saved[VECTORS]);
  const Tensor grad_d = memory.put(B_GRAD_D, at::empty_like(dot));
  const Tensor of_vectors = memory.floats(B_OF_VECTORS, plan.of_vectors);
  const Tensor behind = key.behind ? memory.put(B_BEHIND, at::empty_like(dot)) : Tensor();
  const Tensor scratch = memory.floats(B_SCRATCH, kernels.scratch);
  const Tensor products = key.add ? Tensor() : memory.floats(B_PRODUCTS, plan.positions);
  const Tensor grad_weight = key.want_weight ? memory.put(B_GRAD_WEIGHT, at::empty_like(weight)) : Tensor();
  if (key.again) memory.run(kernels.again);
  memory.run(kernels.epilogue);
  for (auto name : {B_E, B_E_MORE, B_OF_LEFT, B_OUT, B_DOT}) memory.drop(name);
  dot = e_more = of_left = saved[OUT] = Tensor();
  if (!keep_e) e = Tensor();

  auto [grad_x, grad_unit, _] = at::convolution_backward(
      grad_d, x, saved[UNIT], at::OptionalIntArrayRef(), plan.stride, plan.padding, plan.dilation,
      /*transposed=*/false, plan.zeros, plan.groups,
      {key.want_x && !plan.depthwise, key.want_weight, false});
  if (key.want_x && plan.depthwise) grad_x = at::empty_like(x);
  if (key.want_x) grad_x = memory.put(B_GRAD_X, ordered(grad_x, x.strides()));
  if (key.want_weight) memory.put(B_GRAD_UNIT, ordered(grad_unit, weight.strides()));
  memory.run(kernels.ends);
  const Tensor of_mean = plan.of_mean.size ? scratch.narrow(0, plan.of_mean.start, plan.of_mean.size) : Tensor();
  return {grad_x, products, grad_weight, of_vectors, of_mean, key.behind ? behind : e};
}

// Return the gradients in the order of the operands; undefined where not wanted.
inline std::vector<Tensor> backward(
    const Plan& plan, const Backward& kernels, const BackwardKey& key, Tensor e, Tensor of_left, SavedTensors& saved,
    const std::array<bool, OPERANDS>& wanted) {
  const bool keep_e = wanted[RESIDUAL] && !key.behind;
  const Gradients found =
      dcnet::gradients(plan, kernels, key, std::move(e), Tensor(), std::move(of_left), saved, keep_e);
  BelowAutograd guard;
  std::vector<Tensor> gradients(OPERANDS);
  for (auto name : {BIAS, RADIUS, LEARNED, GAMMA, BETA, SLOPE}) {
    if (!wanted[name]) continue;
    gradients[name] = found.vectors.narrow(0, plan.gradients[name].start, plan.gradients[name].size);
    if (name == LEARNED) gradients[name] = gradients[name].view(saved[saved_as(LEARNED)].sizes());
  }
  if (wanted[X]) gradients[X] = found.x;
  if (wanted[WEIGHT]) gradients[WEIGHT] = found.weight;
  if (wanted[MEAN_NORM] && found.mean.defined()) gradients[MEAN_NORM] = found.mean.view({plan.groups, -1}).sum(1);
  if (wanted[RESIDUAL]) gradients[RESIDUAL] = found.residual;
  if (wanted[ENERGY] && found.products.defined()) {
    Sizes sizes = found.products.sizes().vec();
    sizes.insert(sizes.begin(), plan.maps);
    gradients[ENERGY] = found.products.expand(sizes);
  }
  return gradients;
}

}  // namespace dcnet
