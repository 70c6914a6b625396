"""The docstrings of the stateless operators, which share one text for any number of dimensions."""

_OPTIONS = """\
        magnitude: the function h, by name, with parameters as in "seg:beta=0.2". `dcnet.magnitudes()` lists all.
        angular: the function g, by name, with parameters as in "sigmoid:k=0.5". `dcnet.angulars()` lists all.
        weighting: how ‖w‖ enters the magnitude. None: not at all (only the direction of w counts). "linear":
            ‖w‖·h(‖x‖). "joint": h(‖w‖·‖x‖). "separate": h(‖w‖)·h(‖x‖), with α once.
        radius: ρ of magnitudes that have one: a number, or a tensor ({out},). None stands for 1.
        mean_norm: what multiplies the radius. None: nothing. "batch": the mean patch norm of this batch, one for each
            group, with gradient. Or a tensor ({groups},). Magnitudes without a radius ignore it.
        parameters: learned parameters such as k, by name, each a tensor ({out},).
        eps: added to the sum of squares in every norm.
        impl: "auto" chooses the fastest implementation that can run. Or ask for one: "reference" (slow, obvious),
            "eager" (PyTorch's operations) or "fused" (Triton kernels on CUDA, without second derivatives).
"""

_PAPER = """\
    References:
        Liu, Liu, Yu, Dai, Lin, Wang, Rehg, Song: Decoupled Networks. CVPR 2018. https://arxiv.org/abs/1804.08071
"""


def conv(dims: int) -> str:
    """Return the docstring of `decoupled_conv1d`, `2d` or `3d`."""
    sizes = ", ".join((("L",), ("H", "W"), ("D", "H", "W"))[dims - 1])
    several = {1: "an int", 2: "an int or two", 3: "an int or three"}[dims]
    example, kernel = ", ".join(["8"] * dims), ", ".join(["3"] * dims)
    return f"""Return h(‖w‖, ‖x‖)·g(θ) for every patch x and kernel w, where `F.conv{dims}d` returns ‖w‖·‖x‖·cos θ.

    `dcnet.DecoupledConv{dims}d` is the layer for it, with parameters and a running average of the mean patch norm.

    Args:
        x: the input, (N, C, {sizes}) or (C, {sizes}).
        weight: the kernels, (out_channels, C / groups, *kernel_size).
        bias: (out_channels,), added last; None for no bias.
        stride: {several}, as in `nn.Conv{dims}d`.
        padding: {several}, "same" or "valid".
        dilation: {several}.
        groups: groups of channels with kernels of their own.
        padding_mode: "zeros", "reflect", "replicate" or "circular".
{_OPTIONS.format(out="out_channels", groups="groups")}
    Shape:
        The output has the shape and dtype that `F.conv{dims}d` gives: (N, out_channels, …), or (out_channels, …) for an
        input without a batch.

    Examples:
        >>> import torch, dcnet
        >>> x, w = torch.randn(2, 3, {example}), torch.randn(16, 3, {kernel})
        >>> y = dcnet.decoupled_conv{dims}d(x, w, padding=1, magnitude="ball", angular="sigmoid:k=0.5", radius=2.0)
        >>> y.shape
        torch.Size([2, 16, {example}])

{_PAPER}    """


LINEAR = f"""Return h(‖w‖, ‖x‖)·g(θ) for every vector x and kernel w, where `F.linear` returns ‖w‖·‖x‖·cos θ.

    `dcnet.DecoupledLinear` is the layer for it, with parameters and a running average of the mean norm.

    Args:
        x: the input, (…, in_features).
        weight: the kernels, (out_features, in_features).
        bias: (out_features,), added last; None for no bias.
{_OPTIONS.format(out="out_features", groups="1")}
    Shape:
        The output is (…, out_features), in the dtype that `F.linear` gives.

    Examples:
        >>> import torch, dcnet
        >>> x, w = torch.randn(4, 20), torch.randn(10, 20)
        >>> dcnet.decoupled_linear(x, w, magnitude="linear", angular="square_cosine").shape
        torch.Size([4, 10])

{_PAPER}    """
