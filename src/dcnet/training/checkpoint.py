"""Checkpoints: tensors and a JSON state in one safetensors file.

Loading one executes nothing, and a file is never half written.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dcnet.util.files import write_atomically

FORMAT = "dcnet checkpoint 1"


def save_checkpoint(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write both."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, save(whole, {"format": FORMAT, "state": json.dumps(state)}))


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors, on the CPU, and the state."""
    with _opened(path) as (file, state):
        return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118


def load_state(path: Path) -> dict[str, Any]:
    """Return only the state, which is at the start of the file."""
    with _opened(path) as (_, state):
        return state


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    try:
        with _named_in_utf8(path) as readable, safe_open(readable, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(
                    f"{path} is not a checkpoint of ours: its format is {metadata.get('format')!r}, expected {FORMAT!r}"
                )
            yield file, json.loads(metadata["state"])
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


@contextmanager
def _named_in_utf8(path: Path) -> Iterator[Path]:
    """Yield a name of the same file in UTF-8, since safetensors opens no other names."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "link").symlink_to(path.absolute())
            yield Path(folder) / "link"
    else:
        yield path


def with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names start with the prefix, under names without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
