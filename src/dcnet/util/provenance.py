"""How a result was computed: device, versions, commit."""

import hashlib
import os
import platform
import subprocess
from pathlib import Path

import torch


def provenance(device: torch.device) -> dict[str, str]:
    """Return the provenance to store in a record."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
    )
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = ""
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
        "commit": commit(),
    }


def code_hash(folder: Path) -> str:
    """Return a hash of the Python files in the folder."""
    sources = sorted((path.name, path.read_bytes()) for path in folder.glob("*.py"))
    return hashlib.sha256(repr(sources).encode()).hexdigest()[:12]


def commit() -> str:
    """Return the commit of the source, with a + if there are changes since.

    Outside a repository, return the value of DCNET_COMMIT, or "".
    """
    where = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=where, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--", "."], cwd=where, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("DCNET_COMMIT", "")
    return head + ("+" if changed else "")
