"""Fusion: decoupled convolutions do the work of the modules behind them, in models that dcnet did not write."""

from dcnet.fusing.fuse import FuseReport, fuse_, unfuse_

__all__ = ["FuseReport", "fuse_", "unfuse_"]
