"""Kernels that are split among ranks by FSDP2 (`fully_shard`), and how to get them whole."""

import sys
from typing import Any, cast

from torch import Tensor, nn

from dcnet.layers.decoupled import Decoupled


def is_sharded(tensor: object) -> bool:
    """Tell whether a tensor is a DTensor, which may be split among ranks.

    It checks for a method, since importing the class takes long.
    """
    return hasattr(tensor, "full_tensor")


def check_shape(name: str, layer: Decoupled) -> Tensor:
    """Return the kernels of a layer; raise if FSDP1 has flattened them, so that only this rank's part is left."""
    weight, kernels = layer.weight, layer._kernels_and_groups()[0]
    if weight.dim() < 2 or weight.shape[0] != kernels:
        raise ValueError(
            f"the kernels of layer {name or '(the model itself)'!r} have the shape {tuple(weight.shape)}, not "
            f"({kernels}, …): "
            "FullyShardedDataParallel has flattened them. Use torch.distributed.fsdp.fully_shard instead, or "
            "FullyShardedDataParallel.summon_full_params around this call",
        )
    return weight


def whole_kernels(name: str, layer: Decoupled) -> Tensor:
    """Return the whole kernels of a layer, from all ranks, with gradient; call it on all ranks.

    It assumes that their gradient is the same on every rank, as that of a penalty is.
    """
    weight = check_shape(name, layer)  # read once: a parametrization computes a new one at every access
    if is_sharded(weight):
        whole: Tensor = cast(Any, weight).full_tensor()
        return whole
    return weight


def modules_of_fsdp(model: nn.Module, kind: str) -> list[Any]:
    """Return the parts of a model that FSDP manages.

    kind: "FSDPModule" (FSDP2) or "FullyShardedDataParallel" (FSDP1).
    """
    found = getattr(sys.modules.get("torch.distributed.fsdp"), kind, None)  # not imported: nothing can be sharded
    return [] if found is None else [module for module in model.modules() if isinstance(module, found)]


def reshard_(model: nn.Module) -> None:
    """Split parameters among the ranks again where FSDP2 has left them whole after a forward pass.

    Changes to whole parameters would be lost.
    """
    for module in modules_of_fsdp(model, "FSDPModule"):
        module.reshard()
