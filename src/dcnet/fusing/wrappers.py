"""Find the model inside PyTorch's wrappers."""

from torch import nn

from dcnet.util.compat import compiled_model


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile, DataParallel and DistributedDataParallel, or the model itself.

    These wrappers compute the same, but have other names for the weights, and take `*args`.
    """
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif (inside := compiled_model(model)) is not None:
            model = inside
        else:
            return model
