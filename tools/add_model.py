"""Add a trained network to those that come with dcnet.

    python tools/add_model.py SOURCE NAME [--folder FOLDER] [--attack IMAGES]

SOURCE is a finished run, or a .safetensors file of its weights: `dcnet table --keep-weights` writes such files, `dcnet
export RUN --to safetensors` does too. The weights are stored in bfloat16. The index and the metadata say how robust the
network is: what `dcnet attack RUN` has found, or, with --attack, what FGSM, PGD and the check-up find now, on that many
test images.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from dcnet.bench import render_into
from dcnet.data import load_data
from dcnet.robustness import EPS, check_up, evaluate
from dcnet.training import Run, add_to_hub
from dcnet.training.recipes import recorded
from dcnet.training.weights import Trained, summary_of, trained_by, trained_in

ROOT = Path(__file__).resolve().parent.parent
HUB, PAGE = ROOT / "src" / "dcnet" / "hub", ROOT / "docs" / "frameworks.md"
MARKS = "<!-- trained networks: begin -->", "<!-- trained networks: end -->"
ATTACKS = "fgsm,pgd"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a run folder, or a .safetensors file of its weights")
    parser.add_argument("name", help="for dcnet.load('hub:NAME'), such as cnn9-seg-cifar100")
    parser.add_argument("--folder", type=Path, default=HUB, help="of trained networks")
    parser.add_argument("--attack", type=int, default=0, metavar="IMAGES", help="attack it now, on that many images")
    parser.add_argument("--data-root", default="data", help="folder of the data sets' official files")
    options = parser.parse_args(arguments)
    try:
        found = trained_by(Run(options.source)) if options.source.is_dir() else trained_in(options.source)
        if options.attack:
            found = attacked(found, options.attack, options.data_root)
        path = add_to_hub(found, options.name, options.folder)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    if options.folder == HUB:
        render_into(PAGE, table(HUB), *MARKS)
    print(f"written: {path}, {path.stat().st_size / 2**20:.2f} MiB")
    robustness = found.about.get("robustness")
    if robustness is None:
        print("note: there is no attack on record, so nothing says how robust it is; --attack 200 attacks it now")
    else:
        print(f"robustness, {robustness['images']} images: {robustness['attacks']}; {robustness['verdict']}")


def table(folder: Path) -> str:
    """Return the list of trained networks in a folder as a table in Markdown."""
    columns = ("`dcnet.load(…)`", "data, network", "operator", "epochs", "test accuracy", "size")
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for one in json.loads((folder / "index.json").read_text()):
        what = f"`hub:{one['name']}`", f"{one['data']}, {one['model']}", one["operator"], f"{one['epochs']:.3g}"
        lines.append(f"| {' | '.join(what)} | {one['accuracy']:.2f} % | {one['bytes'] / 2**20:.1f} MiB |")
    return "\n".join(lines)


def attacked(found: Trained, count: int, data_root: str) -> Trained:
    """Return the network with a summary of attacks on the first test images, instead of the one on record."""
    if count < 1:
        raise ValueError(f"--attack {count}: give the number of images, 1 or more")
    test = load_data(recorded(found.about["recipe"]).data, data_root).test
    images, labels = test.images[:count].float() / 255.0, test.labels[:count]
    record: dict[str, Any] = evaluate(found.model, images, labels, ATTACKS, EPS)
    record["check-up"] = check_up(found.model, images, labels, EPS)
    return found._replace(about=found.about | {"robustness": summary_of([record])})


if __name__ == "__main__":
    main()
