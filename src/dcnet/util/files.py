"""Files that are written whole or not at all, and errors that name them."""

import contextlib
import errno
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PART = ".part"


def write_atomically(path: Path, data: bytes) -> None:
    """Write the file so that it appears whole or not at all, whenever the process or the machine is stopped.

    The data first goes into a temporary file with a unique name, so that two processes never write into the same one.
    Special files, such as /dev/stdout, are written directly.
    """
    with naming(path):
        target = Path(os.path.realpath(path))  # a link stays a link
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                file.write(data)
            return
        partial = target.with_name(f".{target.name[:200]}.{secrets.token_hex(6)}{_PART}")
        try:
            with partial.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)


def check_writable(path: Path) -> None:
    """Raise if the file cannot be written, before a long computation instead of after it."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; possible: a file, such as {path / 'NAME'}")
    try:
        if path.exists():
            with path.open("ab"):
                return
        folder = next(folder for folder in path.absolute().parents if folder.exists())
        with tempfile.TemporaryFile(dir=folder):  # missing folders are not made yet
            pass
    except OSError as error:
        raise ValueError(f"nothing can be written into {path}: {error.strerror or error}") from error


def check_writable_folder(folder: Path) -> None:
    """Raise if no file can be written into the folder, which need not exist yet."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; possible: a folder")
    try:
        there = next(there for there in (folder, *folder.absolute().parents) if there.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(f"nothing can be written into {folder}: {error.strerror or error}") from error


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Write the value as JSON, as `write_atomically` does.

    Bytes of a file's name that are not UTF-8 become JSON escapes.
    """
    write_atomically(
        path, (json.dumps(value, indent=indent, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
    )


def append_line(path: Path, line: str) -> None:
    """Add a line to the file, and wait until the disk has it; bytes that are not UTF-8 become JSON escapes."""
    with naming(path), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def remove_partial(path: Path) -> None:
    """Remove temporary files that killed writes of this file left behind; nobody else may be writing it now."""
    for left in path.parent.glob(f".{_literally(path.name[:200])}.*{_PART}"):
        left.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the folder's list of names."""
    if os.name == "nt":  # where a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Make errors of the operating system name the file; that of a full disk, for example, does not."""
    try:
        yield
    except OSError as error:
        number = errno.EIO if error.errno is None else error.errno
        raise OSError(number, error.strerror or str(error), str(path)) from error


def _literally(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
