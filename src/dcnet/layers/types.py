"""Types of arguments that several functions share."""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)  # a function that returns the model it was given keeps its class

Positional = Tensor | tuple[Any, ...] | list[Any]  # what a model is called with: one tensor, or several arguments
ExampleInput = Positional | Mapping[str, Any]  # or named ones
Batch = Tensor | tuple[Any, ...] | list[Any]  # inputs, or a tuple or list that starts with them, as of a DataLoader
