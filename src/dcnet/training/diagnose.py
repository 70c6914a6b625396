"""Find the origin of a non-finite loss."""

import copy

import torch
from torch import Tensor, nn


class NonFiniteLoss(ArithmeticError):
    """Training has stopped at a loss that is NaN or infinite; `step` and `epoch` say where.

    Args:
        words: what was not finite first.
        step: the step, counted from 1.
        epoch: the epoch of the step.
    """

    def __init__(self, words: str, step: int = 0, epoch: float = 0.0) -> None:
        super().__init__(words)
        self.step, self.epoch = step, epoch


@torch.no_grad()
def first_non_finite(model: nn.Module, images: Tensor) -> str:
    """Describe what is not finite first: a parameter, the images, or the output of a layer.

    The model is not changed.
    """
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"the parameter {name!r} is not finite"
    odd = (~images.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    if odd:
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        return f"the images of that batch are not finite: number {odd[0] + 1}{more} of {len(images)} (on this device)"
    model = copy.deepcopy(model)  # the copy's running averages may change
    names = {module: name for name, module in model.named_modules()}
    found: list[str] = []

    def look(module: nn.Module, _: object, output: object) -> None:
        if not found and isinstance(output, Tensor) and not output.isfinite().all():
            found.append(
                f"the output of layer {names[module]!r} ({type(module).__name__}) is the first that is not finite"
            )

    for module in model.modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(look)
    model(images)
    return found[0] if found else "the output of every layer is finite; the loss itself is not"
