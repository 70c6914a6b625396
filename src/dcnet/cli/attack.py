"""`dcnet attack`: accuracy of a trained network under attack, and whether it can be believed."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dcnet.cli.common import DataRoot, Device, Download, TrainedArgument, fail, folder_path, say, show
from dcnet.cli.own_formulas import Formulas, TrustFormulas, register
from dcnet.formulas import parse_number
from dcnet.robustness import ATTACKS, parse_attack
from dcnet.robustness.checks import check_eps
from dcnet.robustness.evaluate import as_typed, parse_attacks, shared_norm
from dcnet.robustness.records import conditions, in_words, replaced
from dcnet.training import InUse, Run, attack_run, is_trained_file, restore_run, restored_run
from dcnet.training.progress import showing
from dcnet.util.text import printable


def attack(
    run: TrainedArgument,
    attacks: Annotated[
        str, typer.Option(help=f"Of {', '.join(ATTACKS)}, with parameters as in pgd:steps=50:restarts=5.")
    ] = "fgsm,bim,pgd",
    eps: Annotated[
        str, typer.Option(help="Largest change of a pixel, images going from 0 to 1; 8/255 is a number.")
    ] = "8/255",
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Another run folder, or file, on whose network the adversarial images are made.",
            parser=folder_path,
            metavar="RUN|FILE",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help="Only this many test images: the first ones; of an image folder drawn ones, always the same."
        ),
    ] = None,
    separate: Annotated[
        bool, typer.Option("--separate", help="Every attack sees all images, not only the survivors of the last.")
    ] = False,
    predicted: Annotated[
        bool, typer.Option("--predicted", help="Attack what the network predicts, not the true labels.")
    ] = False,
    check: Annotated[bool, typer.Option("--check/--no-check", help="The check-up for misleading gradients.")] = True,
    check_images: Annotated[int, typer.Option(min=1, help="Images of the check-up.")] = 200,
    bf16: Annotated[
        bool, typer.Option("--bf16", help="Compute in bfloat16, which is faster, and weakens attacks.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="Images at once.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Of random starts.")] = 0,
    data_root: DataRoot = Path("data"),
    download: Download = False,
    device: Device = None,
    formulas: Formulas = None,
    trust_formulas: TrustFormulas = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Overwrite earlier records of the same attack, ε, images, labels and source."),
    ] = False,
    records: Annotated[bool, typer.Option("--records", help="Only list what was recorded, with numbers.")] = False,
    forget: Annotated[str | None, typer.Option(help="Only remove records: their numbers, as in 1,3, or all.")] = None,
) -> None:
    """Attack a trained network: accuracy, clean and under each attack, with a check-up for misleading gradients.

    A run folder keeps the records; for a file of weights, one is made.
    """
    if records or forget is not None:
        _edit(run, forget)
        return
    try:
        register(formulas)
        number = parse_eps(eps)
        norm = shared_norm(parse_attacks(attacks))
        check_eps(number, norm)
        if check and number > 1.0:
            raise ValueError(f"eps={number:g}: the check-up is for ℓ∞, where ε is at most 1; do without it: --no-check")
        run = _folder_of(run, trust_formulas)
        source = None if source is None else _folder_of(source, trust_formulas)
        found = Run(run)
        earlier = found.attacks  # a damaged file is better found now
        found.check_writable()
        with showing(True) as progress:
            result = attack_run(
                found,
                attacks,
                number,
                source=None if source is None else Run(source),
                limit=limit,
                cumulative=not separate,
                predicted=predicted,
                check_images=check_images if check else 0,
                bf16=bf16,
                batch=batch,
                seed=seed,
                data_root=data_root,
                download=download,
                device=device,
                progress=progress,
            )
        _show(run, result)  # first, so that it is seen where it cannot be written
        path = found.write_attacks(replaced(found.attacks, result)) if replace else found.add_attack(result)
    except (ValueError, OSError, ImportError, InUse) as error:
        fail(error)
    say(f"added to {path}")
    if not replace and _again(earlier, result):
        say(
            "An earlier record has the same set-up; both are kept. --replace keeps the new one only, --records "
            "lists all."
        )


def _folder_of(run: Path, trust_formulas: bool = False) -> Path:
    """Return the run folder of a trained network, made if there is none."""
    if not is_trained_file(run):
        if trust_formulas:
            register(None, [run])
        return run
    made = restore_run(run, trust_formulas=trust_formulas).folder
    say(f"{run}: its run folder is {made}")
    return made


def _again(records: list[dict[str, Any]], new: dict[str, Any]) -> bool:
    """Return whether one of the attacks was recorded before under the same conditions."""
    names = {entry["attack"] for entry in new["attacks"]}
    return any(
        conditions(record) == conditions(new) and names & {entry["attack"] for entry in record["attacks"]}
        for record in records
    )


def _edit(run: Path, forget: str | None) -> None:
    """Remove the records that are named, if any, and list those that are left."""
    try:
        found = restored_run(run) if is_trained_file(run) else Run(run)
        kept = [] if found is None else found.attacks
        if forget is not None:
            gone = _numbers(forget, len(kept))
            kept = [record for number, record in enumerate(kept, 1) if number not in gone]
            if found is not None:
                path = found.write_attacks(kept)
                say(f"{len(gone)} {'record' if len(gone) == 1 else 'records'} removed from {path}")
    except (ValueError, OSError) as error:
        fail(error)
    for number, record in enumerate(kept, 1):
        say(f"{number}: {in_words(record)}")
    if not kept:
        say(f"{run} has no records of attacks")


def _numbers(text: str, count: int) -> set[int]:
    """Return the numbers of the records that are named."""
    if text == "all":
        return set(range(1, count + 1))
    named = {int(part) if part.strip().isdecimal() else 0 for part in text.split(",")}
    if not named <= set(range(1, count + 1)):
        possible = (
            "there are none"
            if count == 0
            else "possible: 1, all"
            if count == 1
            else f"possible: 1 to {count} with commas between them, all"
        )
        raise ValueError(f"--forget {text}: no such record; {possible} (--records lists them)")
    return named


def parse_eps(text: str) -> float:
    """Return ε as it is written on the command line."""
    try:
        return parse_number(text)
    except ValueError as error:
        raise ValueError(f"eps={error}") from None


def _show(run: Path, result: dict[str, Any]) -> None:
    table = Table(
        title=f"{printable(run)}: {result['images']} images{_made_on(result)}, ε = {255 * result['eps']:g}/255, "
        f"{result['labels']} labels, {_seen(result)}"
    )
    for column in ("attack", "attacked", "accuracy left", "median size", "seconds"):
        table.add_column(column, justify="left" if column == "attack" else "right")
    table.add_row("none", str(result["images"]), f"{result['clean']:.2f}%", "", "")
    for entry in result["attacks"]:
        accuracy = f"{entry['accuracy']:.2f}%" if "accuracy" in entry else ""
        name = as_typed(entry["attack"])
        table.add_row(name, str(entry["attacked"]), accuracy, _median(entry), f"{entry['seconds']:.1f}")
    show(table)
    if "check-up" in result:
        _show_check_up(run, result)


def _made_on(result: dict[str, Any]) -> str:
    return f" made on {printable(result['from'])}" if result["transfer"] else ""


def _seen(result: dict[str, Any]) -> str:
    """Say which images the attacks have seen; DeepFool, whose sizes are wanted of all, never only survivors."""
    names = [parse_attack(entry["attack"]).name for entry in result["attacks"]]
    everything = "all images" if result["labels"] == "predicted" else "all that are classified right"
    words = []
    if set(names) != {"deepfool"}:
        words.append("each on the survivors of the last" if result["cumulative"] else f"each on {everything}")
    if "deepfool" in names:
        words.append(f"DeepFool on {everything}")
    return ", ".join(words)


def _median(entry: dict[str, Any]) -> str:
    """Return the median size of perturbations with its norm; nothing where the attack is not about sizes."""
    if entry.get("median") is None:
        return ""
    norm = parse_attack(entry["attack"]).parameters.get("norm", "l2")
    return f"{entry['median']:.4f} in {'ℓ2' if norm == 'l2' else 'ℓ∞'}"


def _show_check_up(run: Path, result: dict[str, Any]) -> None:
    found = result["check-up"]
    other = f", and not the images{_made_on(result)}" if result["transfer"] else ""
    say(f"Check-up: white-box attacks on {run} itself{other}; the first {found['images']} images")
    for test in found["tests"]:
        say(f"  {'ok  ' if test['passed'] else 'FAIL'} {test['test']}: {test['words']}")
    say(f"Check-up: {found['verdict']}")
