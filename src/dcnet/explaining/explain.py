"""What each pixel adds to a logit, exactly."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dcnet.explaining.affine import check_affine, recorder
from dcnet.explaining.context import explanations


class Explanation(NamedTuple):
    """A logit of every image as a sum: `contributions` over all pixels and channels, plus `bias`, is `logits`.

    Attributes:
        contributions: in the shape of the images, (N, C, H, W).
        bias: what biases, BatchNorm's shifts, the mean that a network subtracts from its input, and other constants add
            (N,).
        logits: as the network gives them (N,).
        target: the classes they belong to (N,).
    """

    contributions: Tensor
    bias: Tensor
    logits: Tensor
    target: Tensor

    @property
    def maps(self) -> Tensor:
        """The contribution of every pixel, with its channels added up: (N, H, W)."""
        return self.contributions.sum(1)


def explain(model: nn.Module, images: Tensor, target: int | Sequence[int] | Tensor | None = None) -> Explanation:
    """Return what each pixel of the images adds to a logit.

    For each image the network is a linear map of that image, plus constants, with the scaling of its decoupled layers
    and the choices of ReLU and max pooling held as they are. Where some other operation makes that untrue, this raises
    and names it.

    Args:
        model: from images to logits (N, classes), in evaluation mode.
        images: (N, C, H, W).
        target: the class to explain, one for all images or one for each; by default the one that the network predicts.

    Returns:
        Contributions in the shape of the images, and the constants, which add up to the logits.

    Examples:
        >>> import torch, dcnet
        >>> model = dcnet.create_model("cnn9_narrow", in_channels=1, input_size=8).eval()
        >>> found = dcnet.explain(model, torch.rand(2, 1, 8, 8))
        >>> found.maps.shape
        torch.Size([2, 8, 8])
        >>> torch.allclose(found.maps.sum((1, 2)) + found.bias, found.logits, atol=1e-5)
        True
    """
    _check_images(images)
    modules: dict[Any, str] = {}
    with explanations(model), torch.inference_mode(False), torch.enable_grad():
        x = images.detach().clone().requires_grad_()
        handles = [module.register_forward_hook(recorder(modules, name)) for name, module in model.named_modules()]
        try:
            outputs = model(x)
        finally:
            for handle in handles:
                handle.remove()
        chosen = _chosen(outputs, target, len(images))
        logits = outputs.gather(1, chosen.unsqueeze(1)).squeeze(1)
        check_affine(logits, x, model, modules)
        (slopes,) = torch.autograd.grad(logits.sum(), x)
    contributions = slopes * images.detach()
    exact = contributions.to(torch.promote_types(contributions.dtype, torch.float32))
    logits = logits.detach()
    return Explanation(contributions, logits - exact.flatten(1).sum(1).to(logits.dtype), logits, chosen)


def _check_images(images: Tensor) -> None:
    if not isinstance(images, Tensor) or not images.is_floating_point():
        got = str(images.dtype) if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(f"images must be a tensor of floating-point numbers, got {got}")
    if images.dim() < 3 or not len(images):
        raise ValueError(f"images must be (N, C, …) with one image or more, got the shape {tuple(images.shape)}")


def _chosen(outputs: Any, target: int | Sequence[int] | Tensor | None, count: int) -> Tensor:
    """Return the class to explain for each image."""
    if not isinstance(outputs, Tensor) or outputs.dim() != 2 or len(outputs) != count:
        got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"the model must give logits ({count}, classes), got {got}")
    if target is None:
        return outputs.detach().argmax(1)
    chosen = torch.as_tensor(target, device=outputs.device)
    if chosen.dtype == torch.bool or chosen.is_floating_point() or chosen.is_complex():
        raise TypeError(f"target must be a class, or one for each image, as whole numbers; got {target!r}")
    if chosen.dim() > 1 or (chosen.dim() == 1 and len(chosen) != count):
        raise ValueError(
            f"target must be a class, or one for each of the {count} images, got the shape {tuple(chosen.shape)}"
        )
    classes = outputs.shape[1]
    if bool(((chosen < 0) | (chosen >= classes)).any()):
        raise ValueError(f"target must be a class from 0 to {classes - 1}, got {target!r}")
    return chosen.long().expand(count)
