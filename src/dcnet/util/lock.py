"""A lock on a folder: for one process at a time, whose name others see; it ends with the process."""

import errno
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_HELD: set[str] = set()  # by this process; the operating system would let a process lock a file twice


class InUse(RuntimeError):
    """Another process works in the folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of the folder; raise `InUse` if one is in it.

    The lock is the operating system's, on a file `.lock` in the folder, whose text says who holds it. It ends with the
    process, however that ends. Processes that this one starts do not hold it.
    """
    path = folder / LOCK
    name = os.path.realpath(path)
    if name in _HELD:
        raise _in_use(folder, _ourselves())
    handle = _locked_file(path, folder)
    _HELD.add(name)
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, (json.dumps(_ourselves()) + "\n").encode(), 0)
        yield
    finally:
        _HELD.discard(name)
        # removed while it is locked: a process that opened this file before sees that it is gone
        path.unlink(missing_ok=True)
        os.close(handle)


def _locked_file(path: Path, folder: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(handle)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        except (BlockingIOError, PermissionError):  # both mean that another process has it
            holder = _read(handle)
            os.close(handle)
            raise _in_use(folder, holder) from None
        except OSError as error:
            if error.errno in _NO_LOCKS:
                warnings.warn(
                    f"the file system of {folder} has no locks: nothing keeps a second process out of it", stacklevel=4
                )
                return handle
            os.close(handle)
            raise
        os.close(handle)  # the previous holder removed it after it was opened here


def _lock(handle: int) -> None:
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _ourselves() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}


def _read(handle: int) -> dict[str, Any]:
    """Return who holds the lock; empty if the file does not say so yet."""
    try:
        found = json.loads(os.pread(handle, 1000, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _in_use(folder: Path, holder: dict[str, Any]) -> InUse:
    who = "another process"
    if {"pid", "host", "since"} <= set(holder):
        who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    return InUse(f"{folder} is in use by {who}. Wait for it, stop it, or choose another folder")
