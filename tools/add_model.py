"""Add the network of a finished run to the trained networks that come with dcnet.

    python tools/add_model.py RUN NAME [FOLDER]

Attack the run first (dcnet attack RUN), so that the index and the metadata say how robust it is. The weights are stored
in bfloat16.
"""

import sys
from pathlib import Path

from dcnet.training import Run, add_to_hub

HUB = Path(__file__).parent.parent / "src" / "dcnet" / "hub"

if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    path = add_to_hub(Run(sys.argv[1]), sys.argv[2], *(sys.argv[3:] or [HUB]))
    print(f"written: {path}, {path.stat().st_size / 2**20:.2f} MiB")
