"""Downloading a file of known MD5: mirrors, resumption of a partial file, unpacking what is wanted of it."""

import gzip
import hashlib
import http.client
import os
import shutil
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import IO

_PIECE = 1 << 18


def fetch(
    addresses: Sequence[str], target: Path, md5: str, progress: Callable[[str, int, int], None] | None = None
) -> Path:
    """Return the file, fetched from the first address that gives it; continue a partial one from before.

    progress: (name, bytes so far, in all).
    """
    if target.is_file() and _md5(target) == md5:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".part")
    failures = []
    tries = [*addresses, *addresses[-1:]] if partial.exists() else addresses  # what was there before may be damaged
    for address in tries:
        try:
            _continue(
                address, partial, lambda done, total: None if progress is None else progress(target.name, done, total)
            )
        except (OSError, urllib.error.URLError, http.client.HTTPException) as error:
            failures.append(f"{address}: {error}")
            continue
        if (found := _md5(partial)) == md5:
            os.replace(partial, target)
            return target
        partial.unlink()
        failures.append(f"{address}: the file has the MD5 sum {found}, expected {md5}")
    raise OSError(
        f"{target.name} could not be downloaded:\n  "
        + "\n  ".join(failures)
        + f"\nThe same command goes on where this ended. A {target.name} from "
        f"elsewhere, with the MD5 sum {md5}, can be put at {target}"
    )


def _continue(address: str, partial: Path, progress: Callable[[int, int], None]) -> None:
    """Download what is missing of the file."""
    done = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is missing, if the MD5 sum says so too
            return
        raise
    with response:
        if response.status != 206:  # the server starts from the beginning
            done = 0
        total = done + int(response.headers.get("Content-Length") or 0)
        with partial.open("ab" if done else "wb") as file:
            while piece := response.read(_PIECE):
                file.write(piece)
                done += len(piece)
                progress(done, total)
    if total and done < total:
        raise OSError(f"the connection ended after {done:,} of {total:,} bytes; the next try goes on from there")


def unpack(archive: Path, root: Path, files: Collection[str]) -> None:
    """Return those of the files that the archive holds, unpacked under the root.

    The archive is a tar file, a .gz file, or the file itself.
    """
    by_name = {Path(file).name: root / file for file in files}
    if archive.name.endswith(".tar.gz"):
        with tarfile.open(archive) as tar:
            for member in tar:
                source = tar.extractfile(member) if Path(member.name).name in by_name and member.isfile() else None
                if source is not None:
                    _write(source, by_name[Path(member.name).name])
    elif archive.name in by_name:
        with archive.open("rb") as source:
            _write(source, by_name[archive.name])
    else:
        with gzip.open(archive) as unpacked:
            _write(unpacked, by_name[archive.stem])


def _write(source: IO[bytes] | gzip.GzipFile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as file:
        shutil.copyfileobj(source, file)
    os.replace(partial, path)


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
