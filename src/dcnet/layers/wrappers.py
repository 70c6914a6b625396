"""What is inside the wrappers of PyTorch."""

from torch import nn

from dcnet.util.compat import compiled_model


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile, DataParallel and DistributedDataParallel; any other as it is.

    These compute what the model inside does, but have their own names for its weights, and take `*args`.
    """
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif (inside := compiled_model(model)) is not None:
            model = inside
        else:
            return model
