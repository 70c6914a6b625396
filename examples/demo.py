"""Trains a plain network and three decoupled ones on handwritten digits, and draws the curves of all operators."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

import dcnet
from dcnet.data import load_data
from dcnet.figures import draw_functions

OPERATORS = {"plain CNN": None, "SphereConv": ("sphere", "cosine"), "TanhConv": ("tanh", "cosine"), "SegConv": ("seg", "square_cosine")}

EPS = 0.1  # of FGSM, in units where pixels go from 0 to 1

console = Console()
test = load_data("digits").test
folder = Path("runs/demo")
folder.mkdir(parents=True, exist_ok=True)
draw_functions().savefig(folder / "functions.png", dpi=150)

table = Table(title="Handwritten digits: cnn9_narrow with BatchNorm")
for column in ("network", "accuracy", "under FGSM", "parameters", "seconds"):
    table.add_column(column, no_wrap=True)
runs = []
for name, operator in OPERATORS.items():
    magnitude, angular = operator or (None, "cosine")
    console.rule(f"{name}: {'⟨w, x⟩' if operator is None else f'{magnitude} + {angular}'}")
    run = dcnet.train(dcnet.make_recipe("demo", magnitude=magnitude, angular=angular), folder / name.replace(" ", "-").lower())
    runs.append(run.folder)
    result = run.result
    console.print(f"accuracy {result['accuracy']:.2f}% after {result['epochs']:g} epochs", highlight=False)
    attacked = dcnet.robustness.evaluate(run.model, test.images / 255.0, test.labels, "fgsm", eps=EPS)["attacks"][0]["accuracy"]
    numbers = [f"{result['accuracy']:.2f}%", f"{attacked:.2f}%", f"{result['parameters']:,}", f"{result['seconds']:.1f}"]
    table.add_row(name if operator is None else f"{name}, {angular}", *numbers)
console.print(table)
console.print(f"Run folders: {', '.join(str(run) for run in runs)}", highlight=False)
console.print(f"FGSM: every pixel changed by up to {EPS}. `dcnet attack` says more, and whether to believe it.", highlight=False)
console.print(f"The curves of all magnitude and angular functions: {folder / 'functions.png'}", highlight=False)
console.print("A trained network again: dcnet evaluate runs/demo/tanhconv; in Python: dcnet.load('runs/demo/tanhconv')", highlight=False)
