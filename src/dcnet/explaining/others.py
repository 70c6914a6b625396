"""Explanations that other people's networks have, by captum: for comparison."""

from typing import Any

from torch import Tensor, nn

from dcnet.robustness.checks import check_evaluating


def _captum() -> Any:
    try:
        from captum import attr
    except ImportError:
        raise ModuleNotFoundError(
            "Grad-CAM and integrated gradients are captum's, which is not installed; "
            "run: pip install 'dcnet[explanations]'",
            name="captum",
        ) from None
    return attr


def grad_cam(model: nn.Module, images: Tensor, target: Tensor, layer: nn.Module | None = None) -> Tensor:
    """Return Grad-CAM maps (N, H, W) of a layer, interpolated to the size of the images; none is below 0.

    layer: the last convolution if none is given.
    """
    attr = _captum()
    check_evaluating(model)
    if layer is None:
        convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        if not convolutions:
            raise ValueError(
                f"{type(model).__name__} has no two-dimensional convolution for Grad-CAM; give one as layer="
            )
        layer = convolutions[-1]
    found = attr.LayerGradCam(model, layer).attribute(images, target, relu_attributions=True)
    return attr.LayerAttribution.interpolate(found, tuple(images.shape[2:]), "bilinear").squeeze(1).detach()  # type: ignore[no-any-return]


def integrated_gradients(model: nn.Module, images: Tensor, target: Tensor, steps: int = 32) -> Tensor:
    """Return integrated gradients from a black image, in the shape of the images.

    Their sum is close to the logit minus that of the black image.
    """
    attr = _captum()
    check_evaluating(model)
    found = attr.IntegratedGradients(model).attribute(images, target=target, n_steps=steps, internal_batch_size=64)
    return found.detach()  # type: ignore[no-any-return]
