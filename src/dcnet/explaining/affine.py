"""Check that an output is a linear map of the input for one image, plus constants.

Autograd's record of how the output was computed tells it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

# Operations by the names of autograd's nodes, without "Backward" and numbers. Linear in all their tensors together:
_LINEAR = """
    Add Sub Rsub Neg Sum Mean Cumsum Clone ToCopy Copys Alias AsStrided Contiguous
    View ReshapeAlias UnsafeView T Transpose Permute Squeeze Unsqueeze Expand Slice Select Split SplitWithSizes
    UnsafeSplit Unbind Cat Stack Index IndexSelect IndexPut Gather Repeat RepeatInterleave Roll Flip Narrow Unfold
    ImCol ColIm PixelShuffle PixelUnshuffle Diagonal
    ConstantPadNd ReflectionPadD ReplicationPadD AvgPoolD AdaptiveAvgPoolD MaskedFill MaskedSelect Dropout NativeDropout
    UpsampleNearestD UpsampleNearestExactD UpsampleLinearD UpsampleBilinearD UpsampleBicubicD UpsampleTrilinearD
    UpsampleBilinearDAa UpsampleBicubicDAa
"""
# Linear where the image lies now: they choose among values, or cut them off
_PIECEWISE = """
    Relu LeakyRelu Hardtanh Clamp ClampMin ClampMax Threshold Abs Where Maximum Minimum Max Min Amax Amin
    MaxPoolDWithIndices MaxPoolD AdaptiveMaxPoolD FractionalMaxPoolD MaxUnpoolD Sort Topk
"""
_ANY = {*_LINEAR.split(), *_PIECEWISE.split()}
# Linear in each factor: which of their tensors are factors. Only one of these may depend on the image
_PRODUCTS = {
    "Mul": (0, 1), "Mm": (0, 1), "Bmm": (0, 1), "Mv": (0, 1), "Dot": (0, 1), "Linear": (0, 1), "Convolution": (0, 1),
    "MkldnnConvolution": (0, 1), "CudnnConvolution": (0, 1), "SlowConvDilatedD": (0, 1), "ConvDepthwiseD": (0, 1),
    "Addmm": (1, 2), "Baddbmm": (1, 2), "Addbmm": (1, 2), "Addmv": (1, 2), "Addcmul": (1, 2),
}  # fmt: skip
_FIRST_ONLY = {"Div", "NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "Prelu", "PreluKernel", "Lerp"}


def check_affine(output: Tensor, image: Tensor, model: nn.Module, modules: Mapping[Any, str]) -> None:
    """Raise where the output depends on the image in a way that no fixed factor makes linear.

    modules: the names of the modules that gave the results of autograd's nodes, for the error.
    """
    if output.grad_fn is None:
        raise ValueError(
            f"the output of {type(model).__name__} does not depend on the images, or was detached from them"
        )
    order = _in_order(output.grad_fn)
    depends: set[Any] = set()
    for node in order:  # what an operation takes comes before it
        inputs = [number for number, (before, _) in enumerate(node.next_functions) if before in depends]
        if getattr(node, "variable", None) is image:
            depends.add(node)
        elif inputs:
            depends.add(node)
            reason = _reason_against(node, inputs)
            if reason:
                where = modules.get(node)
                place = "" if where is None else f" in {where or 'the model itself'!r} ({_class_of(model, where)})"
                raise ValueError(
                    f"the network is not a linear map for one image: {node.name()}{place} {reason}. Explanations take "
                    "decoupled and plain layers, additions, pooling, BatchNorm in evaluation, and ReLU and its kin"
                )
    if output.grad_fn not in depends:
        raise ValueError(
            f"the output of {type(model).__name__} does not depend on the images, or was detached from them"
        )


def recorder(modules: dict[Any, str], name: str) -> Callable[..., None]:
    """Return a forward hook that notes which module gave a result; the innermost module counts."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.grad_fn is not None:
            modules.setdefault(output.grad_fn, name)

    return hook


def _in_order(last: Any) -> list[Any]:
    """Return the nodes that lead to the last one, each after those whose results it takes."""
    order: list[Any] = []
    entered: set[Any] = set()
    stack = [(last, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node is not None and node not in entered:
            entered.add(node)
            stack.append((node, True))
            stack += [(before, False) for before, _ in node.next_functions]
    return order


def _operation(node: Any) -> str:
    """Return the name of an operation without digits, such as Gelu, or MaxPoolD for any number of dimensions."""
    name = node.name().rpartition("::")[2].replace("Backward", "")
    return "".join(letter for letter in name if not letter.isdigit())


def _reason_against(node: Any, inputs: list[int]) -> str:
    """Why an operation is not linear in those of its tensors that depend on the image; nothing where it is."""
    name = _operation(node)
    if "BatchNorm" in name and getattr(node, "_saved_training", False):
        return "normalizes with the statistics of the batch"
    if name in _PRODUCTS:
        factors = [number for number in inputs if number in _PRODUCTS[name]]
        return "multiplies two results that depend on the image" if len(factors) > 1 else ""
    if name in _FIRST_ONLY:
        return "" if inputs == [0] else "divides by, or scales with, what depends on the image"
    return "" if name in _ANY else "is not linear"


def _class_of(model: nn.Module, name: str) -> str:
    return type(model.get_submodule(name)).__name__
