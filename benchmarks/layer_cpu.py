"""One 3×3 layer on a CPU, forward + backward, as a ratio to `nn.Conv2d` in the same layout and the same run.

    python benchmarks/layer_cpu.py [--repeats 15] [--json FILE]

Plain and decoupled layers take turns, so that a slow moment of the machine hits both; medians are compared.
"""

import argparse
import json
import platform
import statistics
import time

import torch
from torch import nn

import dcnet

OPERATORS = [
    ("tanh", "cosine"),
    ("tanh", "linear"),
    ("seg", "square_cosine"),
    ("tanh", "sigmoid:k=learned"),
    ("linear", "cosine"),
]
SHAPE = (32, 64, 32, 32)


def timed(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> float:
    """Seconds for one forward and backward."""
    x.grad = None
    layer.zero_grad()
    start = time.perf_counter()
    layer(x).backward(grad)
    return time.perf_counter() - start


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--repeats", type=int, default=15)
    arguments.add_argument("--json", help="where to write the measurements")
    options = arguments.parse_args()
    rows = []
    for layout, memory_format in (("contiguous", torch.contiguous_format), ("channels_last", torch.channels_last)):
        x = torch.randn(SHAPE).to(memory_format=memory_format).requires_grad_()
        grad = torch.randn(SHAPE).to(memory_format=memory_format)
        channels = SHAPE[1]
        layers: dict[str, nn.Module] = {"nn.Conv2d": nn.Conv2d(channels, channels, 3, padding=1, bias=False)}
        for magnitude, angular in OPERATORS:
            layers[f"{magnitude} + {angular}"] = dcnet.DecoupledConv2d(
                channels, channels, 3, padding=1, magnitude=magnitude, angular=angular
            )
        times: dict[str, list[float]] = {name: [] for name in layers}
        for layer in layers.values():
            layer.to(memory_format=memory_format)
            timed(layer, x, grad)
        for _ in range(options.repeats):
            for name, layer in layers.items():
                times[name].append(timed(layer, x, grad))
        plain = statistics.median(times["nn.Conv2d"])
        for name, seconds in times.items():
            median = statistics.median(seconds)
            rows.append(
                {
                    "layout": layout,
                    "operator": name,
                    "milliseconds": round(1e3 * median, 2),
                    "ratio": round(median / plain, 3),
                }
            )
            print(f"{layout:14} {name:26} {1e3 * median:8.1f} ms   {median / plain:5.2f}")
    if options.json:
        record = {
            "shape": SHAPE,
            "kernel": 3,
            "dtype": "float32",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        record |= {"machine": platform.machine(), "repeats": options.repeats, "dcnet": dcnet.__version__, "rows": rows}
        with open(options.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
