"""Set PyTorch's global switches for a recipe, and restore them afterward."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from dcnet.training.recipe import Recipe

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_of(recipe: Recipe, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return the context to run the network under."""
    dtype = _AUTOCAST.get(recipe.precision)
    return nullcontext if dtype is None else lambda: torch.autocast(device.type, dtype=dtype)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow a GPU to round float32 factors to TF32's 10 bits, or forbid it; PyTorch allows it for convolutions."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32)
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextmanager
def settings(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Set TF32, determinism, and the seed of PyTorch's generators inside this context."""
    cuda = device.type == "cuda"
    cudnn = torch.backends.cudnn
    before = (cudnn.benchmark, cudnn.deterministic)
    deterministic = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    cudnn.benchmark, cudnn.deterministic = cuda and not recipe.deterministic, recipe.deterministic
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it to be deterministic
        torch.use_deterministic_algorithms(True)
    try:
        with tf32(recipe.precision != "float32"), torch.random.fork_rng(devices=[device] if cuda else []):
            torch.manual_seed(recipe.seed)
            yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
