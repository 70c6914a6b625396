"""The compiled launcher: several kernels with one call into `launch.c`.

From Python a launch takes some 15 µs, most of it for arguments that are the same every time. Here they are packed once.
"""

import struct
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from dcnet.ops.fused.launcher import Launcher, Memory
from dcnet.util.cache import native_code
from dcnet.util.compat_triton import build_c_module, kernel_launch_address, launch_facts

_MOST = 128  # parameters, as in launch.c
# `struct` formats that pack an argument of each Triton type into eight bytes
_FORMATS = {"fp32": "<f4x", "fp64": "<d", "i1": "<?7x", "u1": "<?7x", "i8": "<b7x", "u8": "<B7x"}
_FORMATS |= {"i16": "<h6x", "u16": "<H6x", "i32": "<i4x", "u32": "<I4x", "i64": "<q", "u64": "<Q"}


def launcher_source() -> str:
    """Return launch.c as one text, with its header: Triton builds from a text."""
    folder = files("dcnet.ops.fused")
    source, header = (folder.joinpath(name).read_text("utf-8") for name in ("launch.c", "launch.h"))
    return source.replace('#include "launch.h"\n', header)


@cache
def compiled_launcher() -> Any:
    """Return the function `launch` of launch.c, built with Triton's C compiler and kept in its cache; or None.

    Without it, kernels are launched from Python, which is slower and computes the same.
    """
    if not native_code():
        return None
    try:
        module = build_c_module(launcher_source(), "dcnet_launch")
        module.use(kernel_launch_address())
    except Exception as error:
        warnings.warn(f"kernels are launched from Python, since launch.c cannot be built: {error}", stacklevel=2)
        return None
    return module.launch


def pack(launchers: Sequence[Launcher]) -> bytes | None:
    """Return the launches in the format of launch.c; None if a variant needs more than a plain launch."""
    try:
        packed = [_pack(launcher) for launcher in launchers]
    except (AttributeError, TypeError, struct.error) as error:
        why = f"since this Triton describes them in another way: {error}"
        warnings.warn(f"kernels are launched from Python, {why}", stacklevel=2)
        return None
    return None if None in packed else b"".join(words for words in packed if words is not None)


def _pack(launcher: Launcher) -> bytes | None:
    facts = None if launcher.compiled is None else launch_facts(launcher.compiled)
    if facts is None:
        return None
    function, threads, shared, types = facts
    places = {i: (slot, offset) for i, slot, offset in launcher.places}
    changing = dict(launcher.changing)
    values: list[bytes] = []
    at: list[bytes] = []
    floats: list[bytes] = []
    for i, value, kind in _flat(launcher.values, types):
        number = len(values)
        if i in places:
            at.append(struct.pack("<QQQ", number, *places[i]))
            values.append(bytes(8))
        elif i in changing:
            if kind != "fp32":
                return None
            floats.append(struct.pack("<QQ", number, changing[i]))
            values.append(bytes(8))
        elif kind in _FORMATS:
            values.append(struct.pack(_FORMATS[kind], value))
        else:
            return None
    values += [bytes(8)] * 2  # scratch memory of Triton and its profiler, which these variants do not use
    if len(values) > _MOST:
        return None
    head = struct.pack("<9Q", function, *launcher.grid, threads, shared, len(values), len(at), len(floats))
    return b"".join([head, *values, *at, *floats])


def _flat(values: Sequence[Any], types: Sequence[Any]) -> Iterator[tuple[int, Any, str]]:
    """Yield the arguments that the compiled kernel takes: position among the values, value, type; tuples one by one."""
    for i, (value, kind) in enumerate(zip(values, types, strict=True)):
        if isinstance(kind, tuple):
            yield from ((i, v, k) for _, v, k in _flat(value, kind))
        elif kind != "constexpr":
            yield i, value, kind


class Launches:
    """Kernels that run one after the other, with one call of the compiled launcher.

    Also the first time: Triton would need a launcher of its own for each kernel, which 3.6 has a C compiler make.
    """

    __slots__ = ("launchers", "packed")

    def __init__(self, *launchers: Launcher) -> None:
        self.launchers = launchers
        self.packed: bytes | None = None  # None until it is tried; empty if the compiled launcher cannot be used

    def __call__(self, memory: Memory, *floats: float) -> None:
        """Run the kernels on the memory's stream."""
        if self.packed is None:
            self._pack(memory, floats)
        packed = self.packed
        if packed and memory.aligned and compiled_launcher()(packed, memory.addresses, memory.stream, floats):
            return
        for launcher in self.launchers:
            launcher(memory, *floats)

    def _pack(self, memory: Memory, floats: Sequence[float]) -> None:
        for launcher in self.launchers:
            launcher.choose(memory, floats)
        if self.launchers and all(launcher.variant is not None for launcher in self.launchers):
            can = compiled_launcher() is not None
            self.packed = (pack(self.launchers) if can else None) or b""
