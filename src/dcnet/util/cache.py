"""A folder for files that can be made again, such as compiled code."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from dcnet.util.lock import InUse, locked

SWITCH = "DCNET_NATIVE"  # an environment variable; "0": do not compile code on the user's computer, or run it


def native_code() -> bool:
    """Tell whether the environment allows code that is compiled here."""
    return os.environ.get(SWITCH) != "0"


def cache_folder() -> Path:
    """Return the folder of these files: `dcnet` in $XDG_CACHE_HOME, or in ~/.cache."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (chosen if chosen.is_absolute() else Path.home() / ".cache") / "dcnet"


def made_once(folder: Path, name: str, make: Callable[[Path], Path]) -> Path:
    """Return the file of that name in the folder, made at its first use.

    `make` gets an empty folder to work in, and returns the file it made there. The file appears whole or not at all.
    One process makes it; others wait for that one.
    """
    target = folder / name
    while not target.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # only for the user, since files in it are executed
        try:
            with locked(folder):
                if target.exists():
                    break
                with TemporaryDirectory(prefix=".making-", dir=folder) as workshop:
                    os.replace(make(Path(workshop)), target)
        except InUse:
            time.sleep(0.2)
    return target
