"""A process that does one task: python -m dcnet.tables.worker FOLDER WHAT.

WHAT is JSON with `options` and `attack`.
"""

import json
import sys
from typing import Any

import torch

from dcnet.tables.runner import IN_USE
from dcnet.training import Interrupted, InUse, NonFiniteLoss, Run, attack_run, train

_CHECKED = 200  # images of the check-up for misleading gradients


def main(folder: str, what: str) -> int:
    """Train the run in a folder, or attack it; return the exit status."""
    torch.set_flush_denormal(True)  # as `dcnet` does
    wanted = json.loads(what)
    try:
        if wanted["attack"] is None:
            train(Run(folder).recipe, folder, **wanted["options"])
        else:
            _attack(Run(folder), **wanted["attack"], options=wanted["options"])
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


def _attack(run: Run, setup: dict[str, Any], source: str | None, images: int | None, options: dict[str, Any]) -> None:
    """Attack a run on its first images, or on all; the record in its folder names the set-up."""
    white = setup["source"] is None and not setup["predicted"] and setup["statistics"] == "running"
    found = attack_run(
        run,
        setup["attacks"],
        source=None if source is None else Run(source),
        limit=images,
        cumulative=False,
        predicted=setup["predicted"],
        statistics=setup["statistics"],
        # E of the batch couples the images of a batch, so its size is that of training
        batch=run.recipe.batch if setup["statistics"] == "batch" else 5000 if "auto" in setup["attacks"] else 500,
        check_images=min(_CHECKED, images or _CHECKED) if white and "auto" not in setup["attacks"] else 0,
        **options,
    )
    run.add_attack({**found, "setup": setup["name"]})


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
