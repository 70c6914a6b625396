"""Measure depthwise, grouped and dilated layers of well-known networks on a CPU, forward + backward.

    python benchmarks/geometries_cpu.py [--only deeplab] [--repeats 10] [--cpu-time] [--magnitude tanh]
                                        [--angular cosine] [--out FILE]

Time and memory are ratios to `nn.Conv2d`. In these geometries a plain layer does little work for each number it reads,
so that additional work weighs more.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from in_turns import MEMORY, chosen_clock, held_and_peak, ratios, seconds_in_turns, steps_of, write
from torch import nn

import dcnet


class Geometry(NamedTuple):
    """A layer of a network, at the size its input has there."""

    network: str
    inputs: int
    outputs: int
    kernel: int
    size: int
    stride: int = 1
    dilation: int = 1
    groups: int = 1

    @property
    def options(self) -> dict[str, Any]:
        padding = self.dilation * (self.kernel // 2)
        return {"stride": self.stride, "padding": padding, "dilation": self.dilation, "groups": self.groups}

    def __str__(self) -> str:
        text = f"{self.inputs}→{self.outputs} {self.kernel}×{self.kernel} at {self.size}²"
        for name in ("stride", "dilation", "groups"):
            if getattr(self, name) > 1:
                text += f", {name} {getattr(self, name)}"
        return text


def depthwise(network: str, channels: int, kernel: int, size: int, stride: int = 1, dilation: int = 1) -> Geometry:
    return Geometry(network, channels, channels, kernel, size, stride, dilation, groups=channels)


GEOMETRIES = [
    *(depthwise("DeepLabV3+, separable ASPP", 256, 3, size, 1, rate) for size in (16, 32) for rate in (12, 24, 36)),
    *(Geometry("DeepLabV3, ASPP", 512, 64, 3, 28, 1, rate) for rate in (12, 24, 36)),
    *(Geometry("DeepLabV3, last stage", 128, 128, 3, 28, 1, rate) for rate in (2, 4)),
    *(depthwise("MobileNetV3", *layer) for layer in [(16, 3, 112), (64, 3, 112, 2), (72, 5, 56, 2), (120, 5, 28)]),
    *(depthwise("MobileNetV3", *layer) for layer in [(240, 3, 28, 2), (480, 3, 14), (672, 5, 14, 2), (960, 5, 7)]),
    *(depthwise("EfficientNet-B0", *layer) for layer in [(32, 3, 112), (96, 3, 112, 2), (144, 5, 56, 2), (240, 5, 28)]),
    *(depthwise("EfficientNet-B0", *layer) for layer in [(480, 5, 14), (1152, 5, 7)]),
    *(depthwise("ConvNeXt-T", *layer) for layer in [(96, 7, 56), (192, 7, 28), (384, 7, 14), (768, 7, 7)]),
    Geometry("ResNeXt-50", 128, 128, 3, 56, groups=32),
]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--only", default="", help="networks whose name has this in it")
    arguments.add_argument("--batch", type=int, default=4)
    arguments.add_argument("--repeats", type=int, default=10)
    arguments.add_argument("--magnitude", default="tanh")
    arguments.add_argument("--angular", default="cosine")
    arguments.add_argument("--cpu-time", action="store_true", help="on a busy machine: CPU time of one thread")
    arguments.add_argument("--out", type=Path, help="where to write the records, as CSV")
    options = arguments.parse_args()
    clock, clock_name = chosen_clock(options.cpu_time)
    operator = {"magnitude": options.magnitude, "angular": options.angular}
    chosen = [g for g in GEOMETRIES if options.only.lower() in g.network.lower()]
    if not chosen:
        networks = ", ".join(dict.fromkeys(g.network for g in GEOMETRIES))
        raise SystemExit(f"--only {options.only}: no such network; there are {networks}")
    rows = []
    for geometry in chosen:
        torch.manual_seed(0)
        shape, sizes = (
            (options.batch, geometry.inputs, geometry.size, geometry.size),
            (geometry.inputs, geometry.outputs, geometry.kernel),
        )
        layers = {
            "plain": nn.Conv2d(*sizes, **geometry.options, bias=False),
            "ours": dcnet.DecoupledConv2d(*sizes, **geometry.options, **operator),
        }
        times = seconds_in_turns(steps_of(layers, shape), options.repeats, clock)
        memory = {name: held_and_peak(layer, shape) for name, layer in layers.items()}
        row: dict[str, Any] = {"network": geometry.network, "layer": str(geometry), "batch": options.batch}
        row |= {"operator": " + ".join(operator.values()), "repeats": options.repeats}
        row |= {f"{name} ms": round(1e3 * sorted(t)[len(t) // 2], 2) for name, t in times.items()}
        row["time"] = round(ratios(times, "plain")["ours"], 2)
        for number, what in enumerate(("held", "peak")):
            row |= {f"{name} {what} MiB": round(memory[name][number], 2) for name in layers}
            row[f"{what} memory"] = round(memory["ours"][number] / memory["plain"][number], 2)
        print(
            f"{geometry.network:28} {geometry!s:42} time {row['time']:6.2f}  "
            f"peak {row['peak memory']:6.2f}  held {row['held memory']:6.2f}"
        )
        rows.append(row)
    if options.out:
        write(
            options.out,
            rows,
            f"plain and ours take turns, {clock_name}; time: median of the ratios within a turn; memory: {MEMORY}",
        )


if __name__ == "__main__":
    main()
