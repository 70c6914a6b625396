"""The base of all decoupled layers: the operator, learned radius and parameters, and the running mean norm."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from dcnet.formulas import Learnable
from dcnet.layers.linear_form import Explaining, is_explained, linear_form
from dcnet.layers.options import LayerOptions
from dcnet.layers.selection import Selector, selected
from dcnet.ops import (
    EPS,
    BatchMean,
    Geometry,
    Inputs,
    LearnedRadius,
    MeanNorm,
    Operator,
    PostOps,
    check_input,
    compute_dtype,
    decouple,
    distributed,
)
from dcnet.util.compat import buffer, parameter, recorded_by_jit

STARTS = {"raw_radius": 1.0, "running_norm": 1.0, "num_batches_tracked": 0.0}
# attributes that a decoupled layer has and a plain one does not, besides parameters and buffers
OWN_ATTRIBUTES = (
    *("operator", "radius", "eps", "momentum", "sync", "impl"),
    *("constrained", "weighted_gradient", "fusion", "explained_by", "standardization_eps"),
)


class _UnexpectedBias(str):
    """The key of a bias for a layer without one.

    The error of `load_state_dict` shows such keys; there, this one says what to do.
    """

    def __format__(self, spec: str) -> str:
        return (
            f"{self!s} (a decoupled layer has no bias by default: make it with bias=True, or convert the plain "
            "network with dcnet.decouple_, which keeps biases)"
        )


class Decoupled(nn.Module):
    """Mixin that makes a plain layer decoupled; list it before the plain layer in the bases.

    The arguments are described in `DecoupledConv2d` and `DecoupledLinear`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    raw_radius: nn.Parameter | None
    running_norm: Tensor | None
    num_batches_tracked: Tensor | None
    operator: Operator
    groups: int
    constrained = True  # whether projection, weighted gradients and penalties act on its kernels; off for a classifier
    weighted_gradient: Any = None  # set by `weight_gradients_`
    fusion: Any = None  # set by `fuse_`: the BatchNorm and activation whose work this layer does
    explained_by: tuple[Explaining, ...] = ()  # set by `dcnet.explanations`

    def _init_decoupling(self, options: LayerOptions) -> None:
        """Add what decoupling needs to a constructed plain layer; raise before anything is changed."""
        operator = options.operator()
        has_radius = operator.magnitude.formula.has_radius
        self.operator = operator
        self.radius, self.eps, self.momentum = options.radius, options.eps, options.momentum
        self.sync, self.impl = options.sync, options.impl
        kernels, groups = self._kernels_and_groups()
        like: dict[str, Any] = {"device": self.weight.device, "dtype": self.weight.dtype}
        statistics: dict[str, Any] = {"device": self.weight.device, "dtype": compute_dtype(self.weight)}
        learns_radius = has_radius and options.radius == "learned"
        self.register_parameter("raw_radius", nn.Parameter(torch.empty(kernels, **like)) if learns_radius else None)
        self.register_buffer("running_norm", torch.empty(groups, **statistics) if learns_radius else None)
        # a float like running_norm, since it is only used as a divisor
        self.register_buffer("num_batches_tracked", torch.empty((), **statistics) if learns_radius else None)
        for name in operator.learned:
            self.register_parameter(f"raw_{name}", nn.Parameter(torch.empty(kernels, **like)))
        self._reset_extras()

    def _kernels_and_groups(self) -> tuple[int, int]:
        raise NotImplementedError

    # -- what the formulas need ------------------------------------------------------------------------------------

    @property
    def magnitude(self) -> str:
        """The magnitude by name, with the parameters that are not its defaults."""
        return str(self.operator.magnitude)

    @property
    def angular(self) -> str:
        """The angular function by name, with the parameters that are not its defaults."""
        return str(self.operator.angular)

    @property
    def weighting(self) -> str | None:
        return self.operator.weighting

    @property
    def effective_weight(self) -> Tensor:
        """The kernels that are decoupled: the weight, which a subclass may prepare first."""
        return parameter(self, "weight")  # type: ignore[no-any-return]

    @property
    def effective_radius(self) -> Tensor | None:
        """ρ of each kernel, not yet times E{‖x‖}, or the literal radius: (out_channels,); None if there is none."""
        if self.raw_radius is not None:
            return LearnedRadius(self.raw_radius).rho
        return self._literal_radius(self.weight)

    def _literal_radius(self, weight: Tensor) -> Tensor | None:
        """Return the literal radius of each kernel, on the weight's device; None for a magnitude without one."""
        if not self.operator.magnitude.formula.has_radius:
            return None
        kernels = self._kernels_and_groups()[0]
        return torch.full((kernels,), float(self.radius), device=weight.device, dtype=compute_dtype(weight))

    @property
    def learned_parameters(self) -> dict[str, Tensor]:
        """The learned parameters of the formulas by name, such as k: each (out_channels,)."""
        values = {}
        for choice in (self.operator.magnitude, self.operator.angular):
            for name in choice.learned:
                raw = getattr(self, f"raw_{name}")
                bounds = choice.formula.parameters[name].range
                assert isinstance(bounds, Learnable)
                values[name] = bounds.value(raw.to(compute_dtype(raw)))
        return values

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, without the fusion, which the modules behind this layer take along."""
        return {name: value for name, value in vars(self).items() if name != "fusion"}

    @property
    def _dims(self) -> int:
        """The number of dimensions of maps besides images and channels; 0 for features. Faster than the geometry."""
        raise NotImplementedError

    def _geometry(self) -> Geometry:
        raise NotImplementedError

    def forward(self, input: Tensor, post_ops: PostOps | None = None) -> Tensor:
        """Return the decoupled map of the input, with the plain layer's shape and dtype; `post_ops` is for `Block`."""
        if isinstance(input, Proxy):
            return self._as_leaf(input)
        if self.fusion is not None and post_ops is None:
            return self.fusion.forward(self, input)  # type: ignore[no-any-return]
        return self.decouple(input, post_ops)[0]

    def decouple(
        self, x: Tensor, post_ops: PostOps | None, energy: Tensor | None = None, leave_energy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return `forward`'s result for x with this energy, and, with `leave_energy`, the result's energy or None."""
        check_input(x, "input")
        if self.explained_by and is_explained(self):
            y = linear_form(self, x)
            return y if post_ops is None else post_ops.apply(y), None
        if self.weighted_gradient is not None:
            self.weighted_gradient.of(self.weight)
        mean_norm: MeanNorm = None
        running_norm, raw_radius = buffer(self, "running_norm"), parameter(self, "raw_radius")
        if running_norm is not None:
            # An empty batch has no mean, but its rank must not let the others wait for it.
            has_mean = recorded_by_jit() or x.numel() > 0 or (self.sync and distributed())
            if self.training and has_mean:
                if (recorded_by_jit() or torch.compiler.is_compiling()) and torch.onnx.is_in_onnx_export():
                    raise RuntimeError(
                        "ONNX has no operator that moves E{‖x‖}, a decoupled layer's running average; "
                        "call model.eval() first"
                    )
                batches = buffer(self, "num_batches_tracked")
                mean_norm = BatchMean(running_norm, batches, self.momentum, self.sync)
            else:  # a copy, since backward may come after a training step that changes the average in place
                mean_norm = running_norm.clone() if torch.is_grad_enabled() or recorded_by_jit() else running_norm
        weight, bias, geometry = self.effective_weight, parameter(self, "bias"), self._geometry()
        # pass this weight on: a parametrization computes a new one at every access
        radius = self._literal_radius(weight) if raw_radius is None else LearnedRadius(raw_radius)
        operator = self.operator
        learned = self.learned_parameters if operator.learned else {}
        vectors = (weight, bias, geometry, operator, radius, mean_norm, learned)
        return decouple(Inputs(x, *vectors, self.eps, post_ops, energy, leave_energy), self.impl)

    def _as_leaf(self, x: Proxy) -> Tensor:
        """Return what `torch.fx.symbolic_trace` records: a call of this layer, as for the layers of torch.nn."""
        name = x.tracer.path_of_module(self)  # type: ignore[attr-defined]
        if not name:
            raise TypeError(
                "torch.fx records a decoupled layer as a leaf, and cannot trace one by itself; trace "
                "nn.Sequential(layer)"
            )
        leaf: Tensor = x.tracer.create_proxy("call_module", name, (x,), {})  # type: ignore[assignment]
        return leaf

    # -- state -----------------------------------------------------------------------------------------------------

    def reset_parameters(self) -> None:
        """Draw new kernels as the plain layer does, and reset radii, parameters and statistics to their start."""
        super().reset_parameters()  # type: ignore[misc]
        if "operator" in self.__dict__:  # not yet while the plain layer is being constructed
            self._reset_extras()

    def reset_running_stats(self) -> None:
        """Forget the running mean norm."""
        if self.running_norm is not None and self.num_batches_tracked is not None:
            self.running_norm.fill_(STARTS["running_norm"])
            self.num_batches_tracked.fill_(STARTS["num_batches_tracked"])

    @torch.no_grad()
    def _reset_extras(self) -> None:
        for name in self._extras():
            getattr(self, name).fill_(self._start(name))

    def _start(self, extra: str) -> float:
        """Return the initial value of an extra."""
        if extra in STARTS:
            return STARTS[extra]
        choice = next(
            c for c in (self.operator.magnitude, self.operator.angular) if extra.removeprefix("raw_") in c.learned
        )
        bounds = choice.formula.parameters[extra.removeprefix("raw_")].range
        assert isinstance(bounds, Learnable)
        return bounds.raw_start

    def _extras(self) -> list[str]:
        """Return the state-dict keys a plain layer does not have."""
        tracked = list(STARTS) if self.raw_radius is not None else []
        return tracked + [f"raw_{name}" for name in self.operator.learned]

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # A plain layer's state has no extras: they keep their values. If it has some, missing ones are errors.
        if not any(prefix + name in state_dict for name in self._extras()):
            state_dict = state_dict | {
                prefix + name: self._kept(name, state_dict.get(prefix + "weight")) for name in self._extras()
            }
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        unexpected_keys[:] = [_UnexpectedBias(key) if key == prefix + "bias" else key for key in unexpected_keys]
        self._apply(lambda t: t)  # statistics that came in half precision, with assign=True

    def _kept(self, name: str, weight: Tensor | None) -> Tensor:
        """Return the value of an extra; if it is on the meta device, its start, on the weight's device."""
        value: Tensor = getattr(self, name).detach()
        if not value.is_meta or weight is None or weight.is_meta:
            return value
        return torch.full_like(value, self._start(name), device=weight.device)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Do as nn.Module does, but keep the statistics in float32 in a half-precision layer."""
        before = {name: self._buffers.get(name) for name in ("running_norm", "num_batches_tracked")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers.get(name)
            if old is not None and new is not None and new.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = old.to(device=new.device, dtype=torch.float32)
        return self

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, magnitude={self.magnitude!r}, angular={self.angular!r}"
        if self.weighting is not None:
            text += f", weighting={self.weighting!r}"
        if self.operator.magnitude.formula.has_radius:
            text += f", radius={self.radius!r}"
        for name, default in (("eps", EPS), ("momentum", 0.1), ("sync", False), ("impl", "auto")):
            if getattr(self, name) != default:
                text += f", {name}={getattr(self, name)!r}"
        return text


def own_forward(layer: Decoupled) -> str:
    """Say where a layer has another forward than the layers of this package; "" if it does not."""
    if type(layer).forward is not Decoupled.forward:
        return f"its class, {type(layer).__name__}, has a forward of its own"
    return "somebody has put another forward on it" if "forward" in vars(layer) else ""


def decoupled_layers(model: nn.Module, where: Selector = None) -> dict[str, Decoupled]:
    """Return the decoupled layers of a model that `where` selects by name, each once."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be the module itself, got {type(model).__name__}")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Decoupled)}
    return selected(model, layers, where)
