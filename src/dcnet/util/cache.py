"""A folder for what this machine can make again, such as compiled code."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from dcnet.util.lock import InUse, locked

SWITCH = "DCNET_NATIVE"  # in the environment: "0" builds and runs nothing that is compiled at the user's place


def native_code() -> bool:
    """Tell whether code that is compiled here may be used, by the environment."""
    return os.environ.get(SWITCH) != "0"


def cache_folder() -> Path:
    """Return where dcnet keeps such things: `dcnet` in $XDG_CACHE_HOME, or in ~/.cache."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (chosen if chosen.is_absolute() else Path.home() / ".cache") / "dcnet"


def made_once(folder: Path, name: str, make: Callable[[Path], Path]) -> Path:
    """Return the file of that name in the folder, made at its first use.

    `make` gets an empty folder to work in, and returns the file it made there. The file appears whole or not at all.
    One process makes it; others that want it wait for that one.
    """
    target = folder / name
    while not target.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # what lies here is executed
        try:
            with locked(folder):
                if target.exists():
                    break
                with TemporaryDirectory(prefix=".making-", dir=folder) as workshop:
                    os.replace(make(Path(workshop)), target)
        except InUse:
            time.sleep(0.2)
    return target
