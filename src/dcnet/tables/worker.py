"""A process that does one task: python -m dcnet.tables.worker FOLDER WHAT.

WHAT is JSON with `options` and `attack`.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dcnet.data import FOLDER
from dcnet.tables.runner import IN_USE
from dcnet.tables.table import Setup
from dcnet.training import Interrupted, InUse, NonFiniteLoss, Run, attack_run, train
from dcnet.training.run import read_json
from dcnet.util.files import write_json
from dcnet.util.lock import locked

_CHECKED = 200  # images of the check-up for misleading gradients
_PART = 1000  # images of a part of an attack that takes long
BEGUN = "attacks-begun.json"  # in run folders: the parts of such an attack that are done


def main(folder: str, what: str) -> int:
    """Train the run in a folder, or attack it; return the exit status."""
    torch.set_flush_denormal(True)  # as `dcnet` does
    wanted = json.loads(what)
    try:
        if wanted["attack"] is None:
            train(Run(folder).recipe, folder, **wanted["options"])
        else:
            with locked(Path(folder)):  # the process of a runner that was killed may still be at it
                how = wanted["attack"]
                setup = Setup(**how["setup"])
                _attack(Run(folder), setup, how["source"], how["images"], wanted["options"])
    except (Interrupted, NonFiniteLoss) as ended:  # the run folder has the details
        sys.stdout.write(f"{ended}\n")
        return 0
    except InUse as error:
        sys.stdout.write(f"{error}\n")
        return IN_USE
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


def _attack(run: Run, setup: Setup, source: str | None, images: int | None, options: dict[str, Any]) -> None:
    """Attack a run on its first images, or on all; the record in its folder names the set-up."""
    white = setup.source is None and not setup.predicted and setup.statistics == "running"

    def attack(first: int, limit: int | None) -> dict[str, Any]:
        return attack_run(
            run,
            setup.attacks,
            source=None if source is None else Run(source),
            limit=limit,
            first=first,
            cumulative=False,
            predicted=setup.predicted,
            statistics=setup.statistics,
            # E of the batch couples the images of a batch, so its size is that of training
            batch=run.recipe.batch if setup.statistics == "batch" else 5000 if setup.long else 500,
            check_images=min(_CHECKED, images or _CHECKED) if white and not setup.long else 0,
            **options,
        )

    result = run.result
    assert result is not None
    drawn = run.recipe.data.startswith(FOLDER)  # images of a folder, which are drawn all at once
    if setup.long and "test_images" in result and not drawn:
        found = _in_parts(run, setup, min(images or result["test_images"], result["test_images"]), attack)
    else:
        found = attack(0, images)
    run.add_attack({**found, "setup": setup.name})
    (run.folder / BEGUN).unlink(missing_ok=True)


def _in_parts(run: Run, setup: Setup, images: int, attack: Callable[[int, int], dict[str, Any]]) -> dict[str, Any]:
    """Return what an attack finds that may be stopped at any time: parts that are done are not attacked again."""
    path, of = run.folder / BEGUN, {"setup": asdict(setup), "images": images, "part": _PART, "result": run.result}
    begun = read_json(path) if path.is_file() else {}
    parts = begun["parts"] if {name: begun.get(name) for name in of} == of else []
    for first in range(len(parts) * _PART, images, _PART):
        parts.append(attack(first, min(_PART, images - first)))
        write_json(path, {**of, "parts": parts})
    return _together(parts)


def _together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of an attack from those of its parts."""
    images: int = sum(part["images"] for part in parts)

    def accuracy(of_parts: list[tuple[float, int]]) -> float:
        right: int = sum(round(percent * count / 100.0) for percent, count in of_parts)
        return 100.0 * right / images

    attacks = []
    for of_parts in zip(*(part["attacks"] for part in parts), strict=True):
        left = [(one["accuracy"], part["images"]) for one, part in zip(of_parts, parts, strict=True)]
        attacks.append(
            {
                **of_parts[0],
                "attacked": sum(one["attacked"] for one in of_parts),
                "accuracy": accuracy(left),
                "seconds": round(sum(one["seconds"] for one in of_parts), 3),
            }
        )
    clean = accuracy([(part["clean"], part["images"]) for part in parts])
    return {**parts[-1], "images": images, "clean": clean, "attacks": attacks}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
