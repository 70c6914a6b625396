"""The running averages of a whole model: E{‖x‖} of decoupled layers together with BatchNorm's."""

import inspect
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dcnet.layers.decoupled import Decoupled, decoupled_layers
from dcnet.layers.types import Batch, Model
from dcnet.ops import distributed
from dcnet.util.compat import BatchNorm


def sync_norms_(model: Model) -> Model:
    """Take E{‖x‖} of every decoupled layer over all ranks in training, from now on; return the model.

    For BatchNorm, `nn.SyncBatchNorm.convert_sync_batchnorm` does this.

    Args:
        model: any model with decoupled layers.

    Examples:
        >>> import dcnet
        >>> dcnet.sync_norms_(dcnet.DecoupledConv2d(3, 8, 3)).sync
        True
    """
    for layer in decoupled_layers(model).values():
        layer.sync = True
    return model


def tracking_layers(model: nn.Module) -> dict[str, Decoupled | BatchNorm]:
    """Return the layers of a model that keep running averages, by name."""

    def tracks(layer: nn.Module) -> bool:
        if isinstance(layer, Decoupled):
            return layer.running_norm is not None
        return isinstance(layer, BatchNorm) and layer.running_mean is not None

    return {name: layer for name, layer in model.named_modules() if tracks(layer)}


def _averages(layer: Decoupled | BatchNorm) -> list[Tensor]:
    buffers = [layer.running_norm] if isinstance(layer, Decoupled) else [layer.running_mean, layer.running_var]
    return [buffer for buffer in buffers if buffer is not None]


def _is_synced(layer: Decoupled | BatchNorm) -> bool:
    return layer.sync if isinstance(layer, Decoupled) else isinstance(layer, nn.SyncBatchNorm)


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the running averages of a model and of their counts, by their names in its state dict."""
    layers = tracking_layers(model)
    return {
        f"{name}.{key}".lstrip("."): buffer.clone()
        for name, layer in layers.items()
        for key, buffer in layer.named_buffers(recurse=False)
    }


@torch.no_grad()
def restore_statistics_(model: nn.Module, statistics: dict[str, Tensor]) -> nn.Module:
    """Write the averages that `statistics_of` returned back into the model, and return the model.

    This works in place, since a CUDA graph refers to the buffers.
    """
    for name, buffer in statistics.items():
        model.get_buffer(name).copy_(buffer)
    return model


@torch.no_grad()
def average_statistics_(model: Model) -> Model:
    """Replace every running average by its mean over all ranks; return the model.

    Call it on all ranks, before an evaluation or a checkpoint of a model that was trained without `sync`. In
    DistributedDataParallel that needs `broadcast_buffers=False` (in newer PyTorch `forward_sync_buffers=False`): by
    default it gives all ranks the averages of rank 0 before every forward, so that there is nothing left to average.

    Args:
        model: any model with running averages, of decoupled layers or of BatchNorm.

    Examples:
        >>> import torch, dcnet
        >>> model = dcnet.DecoupledConv2d(3, 8, 3)
        >>> _ = model(torch.randn(2, 3, 8, 8))
        >>> model = dcnet.average_statistics_(model)  # of one process alone: as they were
    """
    layers = tracking_layers(model).values()
    copied = any(isinstance(m, DistributedDataParallel) and m.broadcast_buffers for m in model.modules())
    if copied and not all(map(_is_synced, layers)):
        raise ValueError(
            "DistributedDataParallel has given all ranks the averages of rank 0 before every forward: there is nothing "
            "to average. Make it with broadcast_buffers=False (forward_sync_buffers=False in newer PyTorch), "
            "or use dcnet.sync_norms_ and SyncBatchNorm"
        )
    averages = [buffer for layer in layers for buffer in _averages(layer)]
    if not averages or not distributed():
        return model
    together = torch.cat([buffer.flatten().double() for buffer in averages])  # one message
    dist.all_reduce(together)
    together /= dist.get_world_size()
    for buffer, mean in zip(averages, together.split([buffer.numel() for buffer in averages]), strict=True):
        buffer.copy_(mean.view_as(buffer))
    return model


def input_of(batch: Batch, model: nn.Module | None = None) -> Tensor:
    """Return the input of a batch: the batch itself, or the first part of a tuple or list.

    model: what is to be given the input; raises where that needs other inputs too.
    """
    if model is not None:
        _check_one_input(model)
    x = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(x, Tensor):
        raise TypeError(f"a batch must be a tensor, or a tuple or list that starts with one, got {type(x).__name__}")
    return x


def _check_one_input(model: nn.Module) -> None:
    """Raise where the model's forward needs more than one input."""
    if model._forward_pre_hooks:  # which may add the others
        return
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (ValueError, TypeError):  # of compiled code, which says nothing of its arguments
        return
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    others = [p.name for p in list(parameters)[1:] if p.kind in named and p.default is p.empty]
    if others:
        raise TypeError(
            f"a model is given the first part of a batch, and nothing else, but {type(model).__name__}.forward needs "
            f"{', '.join(map(repr, others))} too; possible: a module around the model, whose forward takes one tensor "
            "and gives the model all of its inputs"
        )


@torch.no_grad()
def recalibrate_(model: Model, batches: Iterable[Batch]) -> Model:
    """Estimate E{‖x‖} and BatchNorm's averages again, as plain means over the batches; return the model.

    Running averages lag behind weights that change quickly, and do not fit weights that were converted or averaged.
    All modules except the layers with averages run in evaluation mode (dropout is off); modes and momenta are restored
    afterward. If anything fails, the old averages stay.

    Args:
        model: any model.
        batches: inputs, or tuples or lists that start with one, such as those of a `DataLoader`. The model gets one
            tensor; put a model with several inputs into a module that takes one.

    Examples:
        >>> import torch, dcnet
        >>> model = dcnet.create_model("cnn9_narrow", in_channels=1, input_size=8)
        >>> model = dcnet.recalibrate_(model, [torch.rand(16, 1, 8, 8) for _ in range(3)])
    """
    if isinstance(batches, Tensor):  # a loop over it would take each image for a batch
        raise TypeError("batches must be an iterable of batches, got one tensor; possible: [images]")
    layers = tracking_layers(model)
    if not layers:
        return model
    modes = {module: module.training for module in model.modules()}
    momenta = {layer: layer.momentum for layer in layers.values()}
    before = statistics_of(model)
    device = next((p.device for p in model.parameters()), None)
    finished = False
    try:
        model.eval()
        for layer in layers.values():
            layer.train()
            layer.momentum = None  # a cumulative average
            layer.reset_running_stats()
        for batch in batches:
            x = input_of(batch, model)
            model(x if device is None else x.to(device))
            finished = True
        if not finished:
            raise ValueError("recalibrate_ got no batches; the averages are as they were")
    except BaseException:
        restore_statistics_(model, before)
        raise
    finally:
        for module, mode in modes.items():
            module.training = mode
        for layer, momentum in momenta.items():
            layer.momentum = momentum
    return model
