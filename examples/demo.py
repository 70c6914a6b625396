"""Draws every magnitude and angular function, and shows that one operator is `nn.Conv2d` itself."""

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import dcnet
from dcnet.figures import draw_functions

console = Console()
torch.manual_seed(0)

path = Path("runs/demo/functions.png")
path.parent.mkdir(parents=True, exist_ok=True)
draw_functions().savefig(path, dpi=150)
console.print(f"The curves of all magnitude and angular functions: [bold]{path}[/bold]\n")

# linear + cosine + weighting="linear" must be the plain convolution: outputs and gradients. The reference computes it
# from norms and angles; the fast path knows that it need not.
table = Table("geometry", "|Δ| output", "|Δ| ∂x", "|Δ| ∂w", title="‖w‖·‖x‖·cos θ against nn.Conv2d (float64)")
worst = 0.0
for geometry in ({"padding": 1}, {"stride": 2}, {"padding": "same", "dilation": 2}, {"groups": 4, "padding": 2, "padding_mode": "circular"}):
    plain = nn.Conv2d(8, 16, 3, bias=False, dtype=torch.float64, **geometry)
    layer = dcnet.DecoupledConv2d(
        8, 16, 3, magnitude="linear", angular="cosine", weighting="linear", impl="reference", dtype=torch.float64, **geometry
    )
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(4, 8, 12, 12, dtype=torch.float64, requires_grad=True)
    results = []
    for module in (plain, layer):
        y = module(x)
        results.append((y.detach(), *torch.autograd.grad(y.sin().sum(), (x, module.weight))))
    differences = [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]
    worst = max(worst, *differences)
    table.add_row(", ".join(f"{k}={v!r}" for k, v in geometry.items()), *(f"{d:.1e}" for d in differences))
console.print(table)
if worst > 1e-9:
    raise SystemExit(f"the decoupled layer differs from nn.Conv2d by {worst:.1e}")

console.print("\nA decoupled layer where you had a plain one:")
layer = dcnet.DecoupledConv2d(64, 128, 3, padding=1, magnitude="tanh", angular="cosine")
console.print(f"  {layer}", highlight=False)
console.print(f"  {tuple(layer(torch.randn(8, 64, 32, 32)).shape)}", highlight=False)
