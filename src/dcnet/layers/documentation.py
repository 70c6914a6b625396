"""The docstrings of the layers, which share one text for any number of dimensions."""

_PAPER = """\
    References:
        Liu, Liu, Yu, Dai, Lin, Wang, Rehg, Song: Decoupled Networks. CVPR 2018. https://arxiv.org/abs/1804.08071
"""

_WHAT = """\
    A plain layer computes ⟨w, x⟩ = ‖w‖·‖x‖·cos θ for each kernel w and each {patch} x. This layer computes

        h(‖w‖, ‖x‖)·g(θ),    cos θ = ⟨w, x⟩ / (‖w‖·‖x‖)

    with a magnitude function h and an angular function g of your choice, plus the bias if there is one. `weight` and
    `bias` have the shapes and state-dict keys of the plain layer, so plain weights load. With learned extras the
    state also has `raw_radius`, `running_norm` and `num_batches_tracked` (magnitudes with a radius), and `raw_k`
    and the like (learned parameters).
"""

_OPTIONS = """\
        magnitude: the function h, by name, with parameters as in "seg:beta=0.2". `dcnet.magnitudes()` lists all; you
            can register more with `dcnet.magnitude`. The default "tanh" is α·tanh(‖x‖/ρ), the paper's running example.
        angular: the function g, by name, with parameters as in "sigmoid:k=learned". `dcnet.angulars()` lists all; you
            can register more with `dcnet.angular`. docs/choosing.md says which pairs did best in our measurements.
        weighting: how ‖w‖ enters the magnitude. None: not at all (an unweighted operator: only the direction of w
            counts). "linear": ‖w‖·h(‖x‖). "joint": h(‖w‖·‖x‖). "separate": h(‖w‖)·h(‖x‖), with α once.
        radius: ρ of magnitudes that have one. "learned": one for each kernel, in units of the mean norm E{{‖x‖}}.
            A number: the same for all kernels, in units of x. Other magnitudes ignore "learned" and refuse a number.
        eps: added to the sum of squares in every norm.
        momentum: of the running average of E{{‖x‖}}, as in `nn.BatchNorm2d`; None for a cumulative average.
        sync: take E{{‖x‖}} over all ranks in training.
        impl: "auto" chooses the fastest implementation that can run; "reference", "eager" or "fused" ask for one.
        device: where to make the parameters.
        dtype: of the parameters.
"""


def conv(dims: int) -> str:
    """Return the docstring of `DecoupledConv1d`, `2d` or `3d`."""
    space = ("L",), ("H", "W"), ("D", "H", "W")
    sizes, name = ", ".join(space[dims - 1]), f"DecoupledConv{dims}d"
    outs = ", ".join(f"{letter}_out" for letter in space[dims - 1])
    several = {1: "an int", 2: "an int or two", 3: "an int or three"}[dims]
    example, result = ", ".join(["8"] * dims), ", ".join(["4"] * dims)
    return f"""A decoupled `nn.Conv{dims}d`: h(‖w‖, ‖x‖)·g(θ) in place of the inner product ⟨w, x⟩.

{_WHAT.format(patch="patch")}
    Args:
        in_channels: channels of the input.
        out_channels: number of kernels, and channels of the output.
        kernel_size: {several}, as in `nn.Conv{dims}d`.
        stride: {several}.
        padding: {several}, "same" or "valid".
        dilation: {several}.
        groups: groups of channels with kernels of their own; each group has its own E{{‖x‖}}.
        bias: whether to add a learned bias. Off by default, other than in `nn.Conv{dims}d`.
        padding_mode: "zeros", "reflect", "replicate" or "circular".
{_OPTIONS.format()}
    Shape:
        Input (N, in_channels, {sizes}) or (in_channels, {sizes}); output (N, out_channels, {outs}) or
        (out_channels, {outs}), with sizes as in `nn.Conv{dims}d`.

    Examples:
        >>> import torch, dcnet
        >>> layer = dcnet.{name}(3, 16, 3, stride=2, padding=1, magnitude="tanh", angular="cosine")
        >>> layer(torch.randn(2, 3, {example})).shape
        torch.Size([2, 16, {result}])
        >>> layer.effective_radius.shape
        torch.Size([16])

{_PAPER}    """


def lazy(dims: int) -> str:
    """Return the docstring of a lazy convolution."""
    example, result = ", ".join(["8"] * dims), ", ".join(["6"] * dims)
    return f"""`DecoupledConv{dims}d` without `in_channels`, which it takes from the first input.

    After that the layer is a `DecoupledConv{dims}d`. All other arguments are those of `DecoupledConv{dims}d`.

    Examples:
        >>> import torch, dcnet
        >>> layer = dcnet.LazyDecoupledConv{dims}d(16, 3, magnitude="seg", angular="square_cosine")
        >>> layer(torch.randn(2, 5, {example})).shape
        torch.Size([2, 16, {result}])
        >>> type(layer).__name__, layer.in_channels
        ('DecoupledConv{dims}d', 5)
    """


LINEAR = f"""A decoupled `nn.Linear`: h(‖w‖, ‖x‖)·g(θ) in place of the inner product ⟨w, x⟩.

{_WHAT.format(patch="input vector")}
    With magnitude="linear" and angular="cosine" it is the weight-normalized softmax layer, ⟨w, x⟩/‖w‖.

    Args:
        in_features: size of an input vector.
        out_features: number of kernels, and size of an output vector.
        bias: whether to add a learned bias. Off by default, other than in `nn.Linear`.
{_OPTIONS.format()}
    Shape:
        Input (…, in_features); output (…, out_features).

    Examples:
        >>> import torch, dcnet
        >>> layer = dcnet.DecoupledLinear(20, 10, magnitude="ball", angular="linear", radius=2.0)
        >>> layer(torch.randn(4, 20)).shape
        torch.Size([4, 10])

{_PAPER}    """
