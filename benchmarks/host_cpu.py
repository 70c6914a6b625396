"""What the host spends on a decoupled block, measured without a GPU: host_cpu.py [--python].

Kernels are launched to a C function that does nothing, so that what is left is Python, C++ and PyTorch's engine. The
time of the convolutions, which are real, is subtracted. CPU time of one thread, medians.
"""

import argparse
import ctypes
import os
import struct
import time

os.environ["TRITON_INTERPRET"] = "0"

import torch
from torch import Tensor, nn

import dcnet
from dcnet.layers import Block, Chain
from dcnet.ops import dispatch
from dcnet.ops.fused.host import HOST, counts
from dcnet.ops.fused.launcher import Launcher
from dcnet.ops.fused.native import Launches

LAYERS, STEPS, CHANNELS = 30, 60, 32
SHAPE = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)  # of the convolutions, as aten takes it


def pack(launches: Launches) -> bytes:
    """Return words that launch as many kernels, with as many pointers, of a function that is the number 0."""
    words = b""
    for launcher in launches.launchers:
        count, places = len(launcher.values), launcher.places
        words += struct.pack("<9Q", 0, *launcher.grid, 128, 0, count, len(places), 0) + bytes(8 * count)
        words += b"".join(struct.pack("<QQQ", *place) for place in places)
    return words


def pretend_to_have_a_gpu(in_cpp: bool) -> None:
    reasons = dispatch.reasons_against_fused
    dispatch.reasons_against_fused = lambda inputs: [r for r in reasons(inputs) if "CUDA device" not in r]
    Launcher.choose = lambda self, memory, floats: None  # type: ignore[method-assign]
    Launcher.__call__ = lambda self, memory, *floats: None  # type: ignore[method-assign]
    if in_cpp:
        HOST._kernels = pack  # type: ignore[method-assign]
        nothing = ctypes.CDLL(None).labs  # of the number 0 it is 0, which stands for success
        HOST.load(ctypes.cast(nothing, ctypes.c_void_p).value or 0)


def median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2] / LAYERS * 1e6


def step(net: nn.Module, x: Tensor) -> tuple[float, float]:
    net.zero_grad(set_to_none=True)
    start = time.thread_time()
    y = net(x)
    middle = time.thread_time()
    y.backward(torch.ones_like(y))
    return middle - start, time.thread_time() - middle


@torch.no_grad()
def convolutions(x: Tensor) -> tuple[float, float]:
    weight = torch.zeros(CHANNELS, CHANNELS, 3, 3).to(memory_format=torch.channels_last)
    start = time.thread_time()
    for _ in range(LAYERS):
        torch.convolution(x, weight, None, *SHAPE)
    middle = time.thread_time()
    for _ in range(LAYERS):
        torch.ops.aten.convolution_backward.default(x, x, weight, None, *SHAPE, (True, True, False))
    return middle - start, time.thread_time() - middle


def main() -> None:
    arguments = argparse.ArgumentParser(description="What the host spends on a decoupled block, without a GPU.")
    arguments.add_argument("--python", action="store_true", help="the autograd function in Python, not in C++")
    in_cpp = not arguments.parse_args().python
    pretend_to_have_a_gpu(in_cpp)
    torch.set_num_threads(1)

    def block() -> Block:
        conv = dcnet.DecoupledConv2d(CHANNELS, CHANNELS, 3, padding=1, magnitude="tanh", impl="fused")
        return Block(conv, nn.BatchNorm2d(CHANNELS))

    net = Chain(*[block() for _ in range(LAYERS)]).to(memory_format=torch.channels_last)
    x = torch.zeros(1, CHANNELS, 2, 2).to(memory_format=torch.channels_last)
    for _ in range(5):
        step(net, x)
    of_steps = [median(list(times)) for times in zip(*[step(net, x) for _ in range(STEPS)], strict=True)]
    alone = [median(list(times)) for times in zip(*[convolutions(x) for _ in range(STEPS)], strict=True)]
    for name, whole, part in zip(("forward", "backward"), of_steps, alone, strict=True):
        print(f"{name}: {whole - part:.1f} µs a layer (with its convolution {whole:.1f})")
    print(counts())


if __name__ == "__main__":
    main()
