"""Decoupled convolutions: `nn.Conv1d/2d/3d` with the inner product replaced, and their lazy forms."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from dcnet.layers import documentation
from dcnet.layers.decoupled import Decoupled
from dcnet.layers.options import Device, LayerOptions, Options, Spec
from dcnet.ops import EPS, Geometry, convolve, known_geometry, make_geometry, patch_norm
from dcnet.util.compat import LazyConvXdMixin

Size = int | tuple[int, ...]  # one for all dimensions, or one for each


class _DecoupledConv(Decoupled):
    """Mixin; list it before `nn.ConvNd` in the bases. Its arguments are that layer's, then `Decoupled`'s."""

    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    padding_mode: str
    _conv_forward: Callable[..., Tensor]  # the plain convolution's

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: str | Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: str = "zeros",
        *,
        magnitude: Spec = "tanh",
        angular: Spec = "cosine",
        weighting: str | None = None,
        radius: str | float = "learned",
        eps: float = EPS,
        momentum: float | None = 0.1,
        sync: bool = False,
        impl: str = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._init_decoupling(LayerOptions(magnitude, angular, weighting, radius, eps, momentum, sync, impl))

    def _kernels_and_groups(self) -> tuple[int, int]:
        return self.out_channels, self.groups

    @property
    def _dims(self) -> int:
        return len(self.kernel_size)

    def _geometry(self) -> Geometry:
        make = make_geometry if torch.compiler.is_compiling() else known_geometry
        shape = (self.kernel_size, self.stride, self.padding, self.dilation)
        return make(*shape, self.groups, self.padding_mode, len(self.kernel_size))

    def _plain(self, x: Tensor, kernel: Tensor) -> Tensor:
        if self.padding_mode != "circular":
            return self._conv_forward(x, kernel, None)
        # F.pad writes copies into a tensor, and autograd's record of that does not say that it is linear
        geometry = self._geometry()
        for dim, (before, after) in enumerate(geometry.padding, x.dim() - geometry.dims):
            size = x.shape[dim]
            x = torch.cat([x.narrow(dim, size - before, before), x, x.narrow(dim, 0, after)], dim)
        return convolve(x, kernel, None, replace(geometry, padding=((0, 0),) * geometry.dims))

    def _patch_norms(self, x: Tensor) -> Tensor:
        batched = x.dim() == self.weight.dim()
        where = (self.kernel_size, self.stride, self.padding, self.dilation, self.groups, self.padding_mode, self.eps)
        norms = patch_norm(x if batched else x.unsqueeze(0), *where)
        return norms if batched else norms.squeeze(0)


class DecoupledConv1d(_DecoupledConv, nn.Conv1d):
    __doc__ = documentation.conv(1)


class DecoupledConv2d(_DecoupledConv, nn.Conv2d):
    __doc__ = documentation.conv(2)


class DecoupledConv3d(_DecoupledConv, nn.Conv3d):
    __doc__ = documentation.conv(3)


class _LazyDecoupledConv(LazyConvXdMixin):
    """Mixin; list it before a decoupled convolution in the bases. It takes `in_channels` from the first input."""

    _init_decoupling: Callable[..., None]  # the decoupled convolution's

    def __init__(
        self,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: str | Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: str = "zeros",
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **decoupling: Unpack[Options],
    ) -> None:
        if out_channels % groups:
            raise ValueError(f"out_channels={out_channels} must be divisible by groups={groups}")
        # as nn.LazyConv2d: empty tensors first, without a bias, since both are replaced at once
        super().__init__(
            0,
            0,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            False,
            padding_mode,
            device=device,
            dtype=dtype,
            **decoupling,
        )
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = UninitializedParameter(**like)
        self.out_channels = out_channels
        if bias:
            self.bias = UninitializedParameter(**like)
        self._init_decoupling(LayerOptions(**decoupling))  # again, now that the number of kernels is known


class LazyDecoupledConv1d(_LazyDecoupledConv, DecoupledConv1d):
    __doc__ = documentation.lazy(1)

    cls_to_become = DecoupledConv1d

    def _get_num_spatial_dims(self) -> int:
        return 1


class LazyDecoupledConv2d(_LazyDecoupledConv, DecoupledConv2d):
    __doc__ = documentation.lazy(2)

    cls_to_become = DecoupledConv2d

    def _get_num_spatial_dims(self) -> int:
        return 2


class LazyDecoupledConv3d(_LazyDecoupledConv, DecoupledConv3d):
    __doc__ = documentation.lazy(3)

    cls_to_become = DecoupledConv3d

    def _get_num_spatial_dims(self) -> int:
        return 3
