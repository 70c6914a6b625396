"""Train a plain network and three decoupled ones on handwritten digits, attack them, and write a report."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

import dcnet
from dcnet.report import write_report
from dcnet.training import attack_run

OPERATORS = {
    "plain CNN": None,
    "SphereConv": ("sphere", "cosine"),
    "TanhConv": ("tanh", "cosine"),
    "SegConv": ("seg", "square_cosine"),
}

EPS = 0.1  # of the attacks, in units where pixels go from 0 to 1
CHECKED = 200  # images of the check-up: two standard errors are 7 points at most

console = Console(soft_wrap=True)  # so that paths and commands can be copied
folder = Path("runs/demo")

table = Table(title="Handwritten digits: cnn9_narrow with BatchNorm")
for column in ("network", "accuracy", "FGSM", "PGD", "parameters", "seconds"):
    table.add_column(column, no_wrap=True)
runs = []
for name, operator in OPERATORS.items():
    magnitude, angular = operator or (None, "cosine")
    console.rule(f"{name}: {'⟨w, x⟩' if operator is None else f'{magnitude} + {angular}'}")
    run = dcnet.train(
        dcnet.make_recipe("demo", magnitude=magnitude, angular=angular), folder / name.replace(" ", "-").lower()
    )
    runs.append(run.folder)
    result = run.result
    console.print(f"accuracy {result['accuracy']:.2f}% after {result['epochs']:g} epochs", highlight=False)
    record = next((done for done in run.attacks if done["eps"] == EPS), None)
    if record is None:
        console.print(f"attacks on all test images, and a check-up on {CHECKED} of them", highlight=False)
        # each on the survivors of the one before; the last as strong as what the check-up compares it with
        record = attack_run(
            run, "fgsm,pgd,pgd:steps=100:loss=margin", EPS, check_images=CHECKED, check_queries=100, device="cpu"
        )
        run.add_attack(record)
    under = [f"{record['attacks'][number]['accuracy']:.2f}%" for number in (0, -1)]
    numbers = [f"{result['accuracy']:.2f}%", *under, f"{result['parameters']:,}", f"{result['seconds']:.1f}"]
    table.add_row(name if operator is None else f"{name}, {angular}", *numbers)
console.print(table, soft_wrap=False)
report = write_report(runs, folder / "report")
console.print(f"Run folders: {', '.join(str(run) for run in runs)}", highlight=False)
words = f"FGSM and PGD: accuracy under attack on all {record['images']} test images, every pixel changed by up to {EPS}"
console.print(f"{words}; the report has a check-up and examples.", highlight=False)
console.print(f"A report with curves, kernels, angles, attacks and whether to believe them: {report}", highlight=False)
console.print(
    "A trained network again: dcnet evaluate runs/demo/tanhconv; in Python: dcnet.load('runs/demo/tanhconv')",
    highlight=False,
)
