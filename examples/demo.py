"""Trains a plain network and three decoupled ones on handwritten digits, and draws the curves of all operators."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

import dcnet
from dcnet.figures import draw_functions

OPERATORS = {"plain CNN": None, "SphereConv": ("sphere", "cosine"), "TanhConv": ("tanh", "cosine"), "SegConv": ("seg", "square_cosine")}

console = Console()
folder = Path("runs/demo")
folder.mkdir(parents=True, exist_ok=True)
draw_functions().savefig(folder / "functions.png", dpi=150)

table = Table(title="Handwritten digits: cnn9_narrow with BatchNorm")
for column in ("network", "parameters", "accuracy", "s", "run folder"):
    table.add_column(column, no_wrap=True)
for name, operator in OPERATORS.items():
    magnitude, angular = operator or (None, "cosine")
    console.rule(f"{name}: {'⟨w, x⟩' if operator is None else f'{magnitude} + {angular}'}")
    run = dcnet.train(dcnet.make_recipe("demo", magnitude=magnitude, angular=angular), folder / name.replace(" ", "-").lower())
    result = run.result
    console.print(f"accuracy {result['accuracy']:.2f}% after {result['epochs']:g} epochs", highlight=False)
    numbers = [f"{result['parameters']:,}", f"{result['accuracy']:.2f}%", f"{result['seconds']:.1f}"]
    table.add_row(name if operator is None else f"{name}, {angular}", *numbers, str(run.folder))
console.print(table)
console.print(f"The curves of all magnitude and angular functions: {folder / 'functions.png'}", highlight=False)
console.print("A trained network again: dcnet evaluate runs/demo/tanhconv; in Python: dcnet.load('runs/demo/tanhconv')", highlight=False)
