"""A process that trains one cell: python -m dcnet.tables.worker FOLDER OPTIONS, the options of `train` as JSON."""

import json
import sys

from dcnet.training import Interrupted, NonFiniteLoss, Run, train


def main(folder: str, options: str) -> int:
    """Train the run in a folder; return the exit status."""
    try:
        train(Run(folder).recipe, folder, **json.loads(options))
    except (Interrupted, NonFiniteLoss) as ended:  # the folder has what there is to know
        sys.stdout.write(f"{ended}\n")
        return 0
    except (ValueError, OSError, RuntimeError) as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
