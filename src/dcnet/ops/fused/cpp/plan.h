// What stays the same between the calls of a layer: the numbers of plan.py's `Plan`, and its packed kernels.

#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <pybind11/stl.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../launch.h"

namespace dcnet {

namespace py = pybind11;
using at::Tensor;
using Sizes = std::vector<int64_t>;

// The operands in the order of `Operands`, then what forward keeps for backward in the order in which it is saved.
enum Operand {
  X, WEIGHT, BIAS, RADIUS, MEAN_NORM, LEARNED, GAMMA, BETA, RUNNING_MEAN, RUNNING_VAR, RESIDUAL, SLOPE, ENERGY, OPERANDS
};
constexpr std::array<const char*, OPERANDS> OPERAND_NAMES = {
    "x", "weight", "bias", "radius", "mean_norm", "learned", "gamma", "beta", "running_mean", "running_var", "residual",
    "slope", "energy"};
enum Kept { DOT, NORMS, UNIT, VECTORS, OUT, KEPT };
constexpr size_t SAVED = size_t{KEPT} + size_t{OPERANDS};
constexpr size_t saved_as(Operand name) { return size_t{KEPT} + size_t{name}; }
constexpr size_t SLOTS = 40;  // at most, of a call's memory
constexpr std::array READ_BY_BACKWARD = {X, WEIGHT, BIAS, RADIUS, MEAN_NORM, LEARNED, SLOPE};

// A reference to a Python object that may be dropped in any thread, even after the interpreter has ended.
class Held {
 public:
  Held() = default;
  explicit Held(py::object object) : object_(object.release().ptr()) {}
  Held(Held&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Held& operator=(Held&& other) noexcept { std::swap(object_, other.object_); return *this; }
  ~Held() {
    if (object_ == nullptr || !Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    Py_DECREF(object_);
  }
  explicit operator bool() const { return object_ != nullptr; }
  py::handle get() const { return object_; }

 private:
  PyObject* object_ = nullptr;
};

// Call a Python function; throw its error in the form that PyTorch's engine and bindings expect.
template <class... Arguments>
py::object call(const Held& function, Arguments&&... arguments) {
  try {
    return function.get()(std::forward<Arguments>(arguments)...);
  } catch (py::error_already_set& raised) {
    raised.restore();
    python_error error;
    error.persist();
    throw error;
  }
}

inline py::object wrapped(const Tensor& tensor) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)); }

// What Python gives once, when the module is loaded (`host.py`).
struct Given {
  Held epilogue;  // (plan, track, moves) -> the kernels of forward's epilogue, or None: not packed yet
  Held backward;  // (plan, *key) -> the epilogue's kernels, those that follow, and the size of the scratch; or None
  Held in_python;  // (plan, incoming, saved, wanted) -> the gradients, computed by op.py
  Held graph_forward, graph_inference, graph_backward;  // the operators of library.py, in Python
  // The slots of a call's memory, in the order of the enums below; plan.py says where they are.
  std::vector<size_t> forward_slots, backward_slots;
};
inline Given* given = nullptr;  // never freed: backward may run while the interpreter ends

enum ForwardSlot {
  F_BATCHES = OPERANDS, F_RUNNING_NORM, F_MEAN_BATCHES, F_VECTORS, F_UNIT, F_NORMS, F_SCRATCH, F_LEFT, F_DOT, F_OUT
};
enum BackwardSlot {
  B_E = READ_BY_BACKWARD.size(), B_E_MORE, B_OF_LEFT, B_OUT, B_DOT, B_NORMS, B_UNIT, B_VECTORS, B_GRAD_D, B_OF_VECTORS,
  B_BEHIND, B_SCRATCH, B_PRODUCTS, B_GRAD_X, B_GRAD_UNIT, B_GRAD_WEIGHT
};

// Kernels that run one after the other: `Launches` of native.py. Packed, or a Python function that takes the tensors by
// slot and the floats, as in tests without a GPU.
struct Kernels {
  std::vector<uint64_t> words;
  Held function;

  explicit Kernels(py::handle packed) {
    if (!PyBytes_Check(packed.ptr())) {
      function = Held(py::reinterpret_borrow<py::object>(packed));
      return;
    }
    words.resize(PyBytes_GET_SIZE(packed.ptr()) / sizeof(uint64_t));
    memcpy(words.data(), PyBytes_AS_STRING(packed.ptr()), words.size() * sizeof(uint64_t));
  }
};

struct Backward {
  Kernels epilogue, ends, again;  // again: the dot product and the norms of a depthwise layer
  int64_t scratch;
};

struct Region {
  int64_t start = 0, size = 0;
};

// Which of the launchers of a backward pass: the arguments of plan.py's `Plan.backward`, and whether the dot product
// and the norms are computed again.
struct BackwardKey {
  bool behind, energy, add, want_x, want_weight, more, again;
  size_t number() const {
    return behind + 2 * energy + 4 * add + 8 * want_x + 16 * want_weight + 32 * more + 64 * again;
  }
};

class Plan {
 public:
  Plan(py::object plan, py::object options, const py::dict& numbers)
      : stride(sizes(numbers["stride"])), padding(sizes(numbers["padding"])), dilation(sizes(numbers["dilation"])),
        zeros(stride.size(), 0), groups(number(numbers["groups"])), of_batch(numbers["of_batch"].cast<bool>()),
        activates(numbers["activates"].cast<bool>()), depthwise(numbers["depthwise"].cast<bool>()),
        recovers(numbers["recovers"].cast<bool>()),
        maps(number(numbers["maps"])), vectors(number(numbers["vectors"])), norms(sizes(numbers["norms"])),
        scratch(number(numbers["scratch"])), left(sizes(numbers["left"])), out(sizes(numbers["out"])),
        out_stride(sizes(numbers["out_stride"])), positions(sizes(numbers["positions"])),
        of_vectors(number(numbers["of_vectors"])), of_mean(region(numbers["of_mean"])), ahead(numbers["ahead"]),
        plan_(std::move(plan)), options_(std::move(options)) {
    auto regions = numbers["gradients"].cast<std::vector<std::pair<int64_t, int64_t>>>();
    for (size_t i = 0; i < gradients.size(); i++) gradients[i] = {regions[i].first, regions[i].second};
  }

  // Return the epilogue's kernels, or null where they are not packed yet. With the GIL.
  const Kernels* epilogue(int track, bool moves) {
    auto& found = epilogues_[2 * track + moves];
    if (!found) {
      py::object kernels = call(given->epilogue, plan_.get(), track, moves);
      // another thread may have set it while Python ran
      if (!kernels.is_none() && !found) found = std::make_unique<Kernels>(kernels);
    }
    return found.get();
  }

  // Return the launchers of a backward pass, or null. Threads of the autograd engine ask for them without the GIL.
  const Backward* backward(const BackwardKey& key) {
    auto& place = backwards_[key.number()];
    const Backward* found = place.load(std::memory_order_acquire);
    if (found != nullptr) return found;
    py::gil_scoped_acquire gil;
    py::object made = call(
        given->backward, plan_.get(), key.again, key.behind, key.energy, key.add, key.want_x, key.want_weight,
        key.more);
    if (made.is_none()) return nullptr;
    auto parts = made.cast<py::tuple>();
    auto fresh = std::make_unique<Backward>(
        Backward{Kernels(parts[0]), Kernels(parts[1]), Kernels(parts[2]), parts[3].cast<int64_t>()});
    if (place.compare_exchange_strong(found, fresh.get(), std::memory_order_acq_rel)) found = fresh.release();
    return found;  // another thread's, if that was faster
  }

  ~Plan() {
    for (auto& place : backwards_) delete place.load();
  }

  py::handle python() const { return plan_.get(); }

  const Sizes stride, padding, dilation, zeros;
  const int64_t groups;
  // whether E{‖x‖} of this batch is used; whether an activation follows; whether the kernels compute the dot product;
  // whether the output overwrites the dot product, and backward recovers that from it
  const bool of_batch, activates, depthwise, recovers;
  const int64_t maps, vectors;
  const Sizes norms;
  const int64_t scratch;
  const Sizes left, out, out_stride, positions;  // left: of the output's energy; empty if there is none
  const int64_t of_vectors;
  const Region of_mean;  // the gradient of a given E{‖x‖} in backward's scratch; empty if none was given
  std::array<Region, OPERANDS> gradients;  // of the small vectors
  const Kernels ahead;

 private:
  static int64_t number(py::handle value) { return value.cast<int64_t>(); }
  static Sizes sizes(py::handle values) { return values.cast<Sizes>(); }
  static Region region(py::handle pair) {
    auto [start, size] = pair.cast<std::pair<int64_t, int64_t>>();
    return {start, size};
  }

  Held plan_, options_;  // the options' address is a part of the key that plans are found by
  std::array<std::unique_ptr<Kernels>, 6> epilogues_;
  std::array<std::atomic<const Backward*>, 128> backwards_{};
};

}  // namespace dcnet
