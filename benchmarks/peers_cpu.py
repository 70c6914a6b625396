"""Compare one 3×3 layer of ours and of others on a CPU, forward + backward, as ratios to `nn.Conv2d`.

    pip install bcos torchvision; python benchmarks/peers_cpu.py [--repeats 30] [--rounds 3] [--cpu-time] [--out FILE]

B-cos is the package `bcos`, which you install yourself; without it, its rows are left out, and a message says so.
Sharpened cosine similarity has no package: its published formula is transcribed below in plain PyTorch, with its patch
norm as a convolution with ones. Ratios are of time and of peak and held memory.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from in_turns import MEMORY, chosen_clock, held_and_peak, ratios, seconds_in_turns, steps_of, write
from torch import Tensor, nn

import dcnet

SHAPE = (32, 64, 32, 32)


class SharpenedCosine(nn.Conv2d):
    """sign(⟨w, x⟩)·(|⟨w, x⟩|/((‖w‖ + q)(‖x‖ + q)))^p, p and q learned."""

    def __init__(self, inputs: int, outputs: int, kernel: int, padding: int) -> None:
        super().__init__(inputs, outputs, kernel, padding=padding, bias=False)
        self.p, self.q = nn.Parameter(torch.full((outputs,), 2.0)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        eps = 1e-6
        dot = F.conv2d(x, self.weight, padding=self.padding)
        ones = torch.ones(1, x.shape[1], *self.kernel_size)
        x_norm = (F.conv2d(x.square(), ones, padding=self.padding) + eps).sqrt() + self.q
        w_norm = (self.weight.square().sum((1, 2, 3)) + eps).sqrt() + self.q
        return dot.sign() * (dot.abs() / (x_norm * w_norm[:, None, None]) + eps) ** self.p[:, None, None]


def layers() -> dict[str, nn.Module]:
    """The layers by name; `nn.Conv2d`, the yardstick, first."""
    channels, geometry = SHAPE[1], {"padding": 1}

    def ours(magnitude: str, angular: str) -> nn.Module:
        return dcnet.DecoupledConv2d(channels, channels, 3, **geometry, magnitude=magnitude, angular=angular)

    found: dict[str, nn.Module] = {"nn.Conv2d": nn.Conv2d(channels, channels, 3, **geometry, bias=False)}
    try:
        from bcos.modules import BcosConv2d

        found["bcos, B = 2"] = BcosConv2d(channels, channels, 3, **geometry)
    except ImportError as error:
        print(f"no row of bcos: {error}")
    found["dcnet, linear + power_cosine:p=2 (B-cos)"] = ours("linear", "power_cosine")
    found["dcnet, linear + square_cosine (the same)"] = ours("linear", "square_cosine")
    found["sharpened cosine, transcribed"] = SharpenedCosine(channels, channels, 3, 1)
    found["dcnet, sphere + power_cosine:p=learned"] = ours("sphere", "power_cosine:p=learned")
    found["dcnet, tanh + cosine"] = ours("tanh", "cosine")
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--repeats", type=int, default=30, help="turns in a round")
    arguments.add_argument("--rounds", type=int, default=3, help="rounds, each a record of its own")
    arguments.add_argument("--out", type=Path, help="where to write the records, as CSV")
    arguments.add_argument("--cpu-time", action="store_true", help="on a busy machine: CPU time of one thread")
    options = arguments.parse_args()
    clock, clock_name = chosen_clock(options.cpu_time)
    torch.manual_seed(0)
    found = layers()
    steps = steps_of(found, SHAPE)
    memory = {name: held_and_peak(layer, SHAPE) for name, layer in found.items()}
    rows = []
    for number in range(1, options.rounds + 1):
        times = seconds_in_turns(steps, options.repeats, clock)
        for name, ratio in ratios(times, "nn.Conv2d").items():
            median = sorted(times[name])[len(times[name]) // 2]
            held, peak = (mine / plain for mine, plain in zip(memory[name], memory["nn.Conv2d"], strict=True))
            print(
                f"round {number}  {name:42} {1e3 * median:7.1f} ms  "
                f"time {ratio:5.2f}  peak {peak:5.2f}  held {held:5.2f}"
            )
            rows.append(
                {
                    "layer": name,
                    "shape": "×".join(map(str, SHAPE)),
                    "round": number,
                    "repeats": options.repeats,
                    "milliseconds": round(1e3 * median, 2),
                    "time": round(ratio, 3),
                    "peak MiB": round(memory[name][1], 2),
                    "peak memory": round(peak, 3),
                    "held MiB": round(memory[name][0], 2),
                    "held memory": round(held, 3),
                }
            )
    if options.out:
        write(
            options.out,
            rows,
            f"layers take turns, {clock_name}; time: median of the ratios within a turn; memory: {MEMORY}",
        )


if __name__ == "__main__":
    main()
