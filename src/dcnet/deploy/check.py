"""Check that an exported model computes the same as the model: on the example, on other batches and other sizes."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

Arguments = tuple[Any, ...]
Runner = Callable[[Arguments], list[Tensor]]


_MODES = {3: "linear", 4: "bilinear", 5: "trilinear"}  # of interpolation, by dimensions


def _is_image(value: Any) -> bool:
    """Tell whether an input is a batch of images, sounds or volumes, which may have any size."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() in _MODES


class Mismatch(ValueError):
    """An exported model gives different results."""


@dataclass(frozen=True)
class Checked:
    """One comparison: the shapes of the inputs, and the error relative to the size of the output."""

    shapes: tuple[tuple[int, ...], ...]
    error: float


def rms(values: list[Tensor]) -> float:
    flat = torch.cat([value.double().flatten() for value in values]) if values else torch.zeros(1)
    return float(flat.square().mean().sqrt())


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors of an output, which may be a tuple or a dict, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def run_model(model: nn.Module, arguments: Arguments) -> list[Tensor]:
    """Return the tensors of the model's output, on the CPU."""
    with torch.no_grad():
        return [value.cpu() for value in tensors(model(*arguments))]


def compare(model: nn.Module, runner: Runner, arguments: Arguments, dtype: torch.dtype) -> Checked:
    """Return how far an exported model is off; raise if that is more than rounding in its dtype explains.

    Both are compared with the model in float64. The exported model may be off by four times as much as the model itself
    in the same dtype, plus a few units in the last place.
    """
    exact = run_model(cast_model(model, torch.float64), cast_inputs(arguments, torch.float64))
    itself = run_model(cast_model(model, dtype), cast_inputs(arguments, dtype))
    found = [value.cpu() for value in runner(cast_inputs(arguments, dtype))]
    shapes = [tuple(value.shape) for value in exact]
    if [tuple(value.shape) for value in found] != shapes:
        raise Mismatch(f"the exported model gives {[tuple(v.shape) for v in found]}, the model itself {shapes}")
    size = rms(exact)
    if not torch.isfinite(torch.tensor(size)):
        raise Mismatch("the model itself gives values that are not finite for this input")
    own = rms([a.double() - b for a, b in zip(itself, exact, strict=True)])
    off = rms([a.double() - b for a, b in zip(found, exact, strict=True)])
    if own != own or own == float("inf"):
        raise Mismatch(f"the model itself gives values that are not finite in {_name(dtype)}")
    allowed = 4.0 * own + 64.0 * torch.finfo(dtype).eps * size
    if not off <= allowed:
        raise Mismatch(
            f"the exported model is off by {off / max(size, 1e-30):.2e} of the output's size, "
            f"where rounding in {_name(dtype)} explains {allowed / max(size, 1e-30):.2e}"
        )
    between = rms([a.double() - b.double() for a, b in zip(found, itself, strict=True)])
    return Checked(tuple(tuple(value.shape) for value in tensors(arguments)), between / max(size, 1e-30))


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the model in that dtype, as a copy if it has another one."""
    if all(value.dtype == dtype for value in (*model.parameters(), *model.buffers()) if value.is_floating_point()):
        return model
    return copy.deepcopy(model).to(dtype)


def cast_inputs(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    return tree_map(lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, arguments)  # type: ignore[no-any-return]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def other_batches(arguments: Arguments) -> list[Arguments]:
    """Return the same inputs as batches of another size: the first image alone, and three."""
    batch = next((len(value) for value in tensors(arguments) if value.dim()), 0)
    return [with_batch(arguments, count) for count in (1, 3) if count != batch]


def with_batch(arguments: Arguments, count: int) -> Arguments:
    """Return the inputs as a batch of that size, repeated if there are fewer."""
    batch = next((len(value) for value in tensors(arguments) if value.dim()), 0)
    if batch == 0:
        return arguments
    index = torch.arange(count) % batch
    return tree_map(  # type: ignore[no-any-return]
        lambda v: v[index.to(v.device)] if isinstance(v, Tensor) and v.dim() and len(v) == batch else v, arguments
    )


def smallest_side(runner: Runner, arguments: Arguments) -> int | None:
    """Return the smallest side of images, in pixels, with which an exported model runs, at most that of the example.

    A program of torch.export can refuse images for which a map in the model has one pixel. Return None if the inputs
    have different sides.
    """
    sides = {side for value in tensors(arguments) if _is_image(value) for side in value.shape[2:]}
    if len(sides) != 1:
        return None

    def runs(side: int) -> bool:
        def cropped(value: Any) -> Any:
            return value[(..., *[slice(side)] * (value.dim() - 2))].contiguous() if _is_image(value) else value

        try:
            runner(tree_map(cropped, arguments))
        except Exception:  # a guard of the program, or a kernel larger than its input
            return False
        return True

    refused, runs_with = 0, sides.pop()
    while runs_with - refused > 1:
        middle = (refused + runs_with) // 2
        refused, runs_with = (refused, middle) if runs(middle) else (middle, runs_with)
    return runs_with


def other_size(model: nn.Module, arguments: Arguments) -> Arguments | None:
    """Return the first images of the inputs in twice their size; None if the model itself does not accept them."""

    def resized(value: Any) -> Any:
        if not _is_image(value):
            return value
        return F.interpolate(value, [2 * size for size in value.shape[2:]], mode=_MODES[value.dim()])

    batch = next((len(value) for value in tensors(arguments) if value.dim()), 0)
    other = tree_map(resized, with_batch(arguments, min(batch, 2)))
    try:
        run_model(model, other)
    except Exception:  # a model may raise anything for a size that it does not support
        return None
    return other  # type: ignore[no-any-return]
