"""`dcnet attack`: accuracy of a trained network under attack, and whether it can be believed."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from dcnet.circumstances import circumstances
from dcnet.cli.common import DataRoot, Device, Download, RunArgument, console, fail, folder_path, say
from dcnet.cli.own_formulas import Formulas, TrustFormulas, register
from dcnet.data import Resident
from dcnet.robustness import ATTACKS, check_up, evaluate
from dcnet.robustness.evaluate import parse_attack, parse_number
from dcnet.training import Run, joined, open_data
from dcnet.training.progress import showing
from dcnet.training.settings import tf32
from dcnet.util.text import printable


def attack(
    run: RunArgument,
    attacks: Annotated[str, typer.Option(help=f"Of {', '.join(ATTACKS)}, with parameters as in pgd:steps=50:restarts=5.")] = "fgsm,bim,pgd",
    eps: Annotated[str, typer.Option(help="Largest change of a pixel, images going from 0 to 1; 8/255 is a number.")] = "8/255",
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Another run folder, on whose network the adversarial images are made.", parser=folder_path, metavar="RUN"),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many test images.")] = None,
    separate: Annotated[bool, typer.Option("--separate", help="Every attack sees all images, not only the survivors of the last.")] = False,
    predicted: Annotated[bool, typer.Option("--predicted", help="Attack what the network predicts, not the true labels.")] = False,
    check: Annotated[bool, typer.Option("--check/--no-check", help="The check-up for misleading gradients.")] = True,
    check_images: Annotated[int, typer.Option(min=1, help="Images of the check-up.")] = 200,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16, which is faster, and weakens attacks.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Images at once.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Of random starts.")] = 0,
    data_root: DataRoot = Path("data"),
    download: Download = False,
    device: Device = None,
    formulas: Formulas = None,
    trust_formulas: TrustFormulas = False,
) -> None:
    """Attack a trained network: accuracy, clean and under each attack, with a check-up for misleading gradients."""
    try:
        register(formulas, [run, *([] if source is None else [source])] if trust_formulas else ())
        number = parse_eps(eps)
        for part in attacks.split(","):
            parse_attack(part)
        found = Run(run)
        with joined(device) as ranks, tf32(False), torch.autocast(ranks.device.type, torch.bfloat16, enabled=bf16):
            data = open_data(found.recipe, ranks, data_root, download)
            if not isinstance(data, Resident):
                raise ValueError(f"{found.recipe.data} is too large to be attacked as a whole; use dcnet.robustness.evaluate on images of it")
            model = found.model.to(ranks.device)
            other = None if source is None else Run(source).model.to(ranks.device)
            images, labels = data.test.images[:limit].float() / 255.0, data.test.labels[:limit]
            with showing(True) as progress:
                options: dict[str, Any] = {"batch": batch, "cumulative": not separate, "predicted": predicted, "seed": seed}
                result = evaluate(model, images, labels, attacks, number, source=other, progress=progress, **options)
            if check:
                result["check-up"] = check_up(model, images[:check_images], labels[:check_images], number, seed=seed)
        result |= {"from": None if source is None else str(source), "bf16": bf16, **circumstances(ranks.device)}
    except (ValueError, FileNotFoundError, ImportError) as error:
        fail(error)
    path = found.add_attack(result)
    _show(run, result)
    say(f"added to {path}")


def parse_eps(text: str) -> float:
    """ε as it is written on the command line."""
    try:
        return parse_number(text)
    except ValueError as error:
        raise ValueError(f"eps={error}") from None


def _show(run: Path, result: dict[str, Any]) -> None:
    how = "each on the survivors of the last" if result["cumulative"] else "each on all images"
    table = Table(title=f"{printable(run)}: {result['images']} images, ε = {255 * result['eps']:g}/255, {result['labels']} labels, {how}")
    for column in ("attack", "attacked", "accuracy left", "median size", "seconds"):
        table.add_column(column, justify="left" if column == "attack" else "right")
    table.add_row("none", str(result["images"]), f"{result['clean']:.2f}%", "", "")
    for entry in result["attacks"]:
        accuracy = f"{entry['accuracy']:.2f}%" if "accuracy" in entry else ""
        median = "" if entry.get("median") is None else f"{entry['median']:.4f}"
        table.add_row(entry["attack"], str(entry["attacked"]), accuracy, median, f"{entry['seconds']:.1f}")
    console().print(table)
    if "check-up" in result:
        for test in result["check-up"]["tests"]:
            say(f"  {'ok  ' if test['passed'] else 'FAIL'} {test['test']}: {test['words']}")
        say(f"Check-up: {result['check-up']['verdict']}")
