"""What is inside the wrappers of PyTorch."""

from torch import nn

_INSIDE = "_orig_mod"  # where torch.compile keeps the model; its class would have to be imported with all of Dynamo


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile, DataParallel and DistributedDataParallel; any other as it is.

    These compute what the model inside does, but have their own names for its weights, and take `*args`.
    """
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif type(model).__name__ == "OptimizedModule" and _INSIDE in model._modules:
            model = model.get_submodule(_INSIDE)
        else:
            return model
