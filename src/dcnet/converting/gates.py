"""Find layers that are not feature detectors: gates on pooled maps, and the factors of low-rank adapters.

A gate (squeeze-and-excitation and the like) reads one vector for each image, pooled over the whole map, and says how
much of each channel to let through. It is recognized by the name of its class, or by its structure: a module that pools
to 1×1 and squashes, with only 1×1 convolutions in between, which lead back to the same number of channels. A class of
another name that pools in its `forward` is not detected; leave it out with `where="!…"`.
"""

from torch import nn

from dcnet.converting.candidates import CONVERTIBLE

# Classes whose layers are gates (None), or the names of those of their layers that are. Class names are in lower case;
# they are those of timm, torchvision and transformers, and names that people often give their own.
_GATES: dict[str, tuple[str, ...] | None] = dict.fromkeys(
    [
        *("semodule", "selayer", "seblock", "seunit", "squeezeexcite", "squeezeexcitecl", "squeezeexcitelayer"),
        *("squeezeexcitation", "squeezeexcitationblock", "squeezeexcitationlayer", "squeezeandexcitation"),
        *("effectivesemodule", "effectiveselayer", "esemodule", "ecamodule", "cecamodule", "ecalayer"),
        *("channelattn", "lightchannelattn", "channelattention", "gatherexcite", "globalcontext"),
        *("selectivekernelattn", "regnetselayer", "efficientnetsqueezeexcitelayer"),
    ]
)
_GATES["splitattn"] = ("fc1", "fc2")  # its `conv` is an ordinary one

_SQUASHING = (nn.Sigmoid, nn.Hardsigmoid, nn.Softmax)
_POOLING = (
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)


def gates(model: nn.Module) -> dict[nn.Module, str]:
    """Return the layers of a model that are gates, each with the reason to leave it alone."""
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        names = (kind.__name__.lower() for kind in type(module).__mro__)
        known = next((name for name in names if name in _GATES), None)
        if known is None and not _is_gate(module):
            continue
        only = None if known is None else _GATES[known]
        for name, layer in module.named_modules():
            if isinstance(layer, CONVERTIBLE) and (only is None or name.partition(".")[0] in only):
                found[layer] = (
                    f"a gate on pooled maps ({type(module).__name__}): it weighs channels, and a direction without a "
                    "magnitude says less there; where='all' converts it too"
                )
    return found


def _is_gate(module: nn.Module) -> bool:
    """Tell whether a module has the structure of a gate: it pools to 1×1, squashes, and mixes channels only.

    Its 1×1 convolutions or linear layers have to lead back to the same number of channels.
    """
    inside = list(module.modules())
    layers = [layer for layer in inside if isinstance(layer, CONVERTIBLE)]
    if not layers or not any(isinstance(one, _SQUASHING) for one in inside):
        return False
    if not any(isinstance(one, _POOLING) and _is_one(one.output_size) for one in inside):
        return False
    return all(map(_mixes_channels_only, layers)) and _channels(layers[0])[0] == _channels(layers[-1])[1]


def _is_one(size: object) -> bool:
    return all(one == 1 for one in (size if isinstance(size, tuple | list) else (size,)))


def _mixes_channels_only(layer: nn.Module) -> bool:
    kernel = getattr(layer, "kernel_size", ())
    # a Conv1d of one channel runs over the channels themselves (efficient channel attention)
    return all(size == 1 for size in kernel) or (isinstance(layer, nn.Conv1d) and _channels(layer) == (1, 1))


def _channels(layer: nn.Module) -> tuple[object, object]:
    kind = "features" if isinstance(layer, nn.Linear) else "channels"
    return getattr(layer, f"in_{kind}"), getattr(layer, f"out_{kind}")


def adapters(model: nn.Module) -> dict[nn.Module, str]:
    """Return the layers of low-rank adapters, each with the reason to leave it alone.

    They are found in modules that wrap a `base_layer`, such as peft's LoRA.
    """
    found: dict[nn.Module, str] = {}
    for wrapper in model.modules():
        base = wrapper._modules.get("base_layer")
        if not isinstance(base, CONVERTIBLE):  # other networks have a stage of that name
            continue
        for layer in wrapper.modules():
            if isinstance(layer, CONVERTIBLE) and layer is not base:
                found[layer] = (
                    f"a factor of an adapter ({type(wrapper).__name__}), added to what the layer gives; "
                    "no kernel with a direction of its own"
                )
    return found
