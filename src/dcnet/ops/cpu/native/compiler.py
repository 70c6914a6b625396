"""Compile C with the system's compiler, once for each text, and keep the result in the user's cache folder.

The compiler is $CC, else cc, gcc or clang. Compiled libraries are in `cache_folder()/native`, one file for each text,
compiler, set of options and CPU. `DCNET_NATIVE=0` in the environment switches this off. Then PyTorch's operations
compute everything, as they also do without a compiler, and, after one warning, if a compilation fails.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import threading
import warnings
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch

from dcnet.util.cache import SWITCH, cache_folder, made_once, native_code

# No option lets the compiler assume that there is no NaN. It may ignore rounding modes and floating-point exceptions,
# as PyTorch's operations do.
_OPTIONS = [
    *("-std=gnu11", "-O3", "-fPIC", "-shared", "-fopenmp-simd", "-Wno-psabi"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
]
# The first set that the compiler accepts is used. Vectors have 32 bytes even where a CPU has longer ones: rows are
# short, and the rest at the end of a row is computed number by number.
_FOR_THIS_CPU = (("-march=native", "-mprefer-vector-width=256"), ("-march=native",), ("-mcpu=native",), ())

# Numbers in a map; PyTorch's operations compute smaller maps. The choice depends on the call alone, so that the same
# call gives the same result every time, and trying a layer on a small tensor does not have to wait for a compiler.
FEWEST = 4096


@cache
def find_compiler() -> tuple[str, ...] | None:
    """Return the command of the C compiler, None where there is none."""
    if os.environ.get("CC"):
        return tuple(shlex.split(os.environ["CC"]))
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    return None if found is None else (found,)


@cache
def parallel() -> int | None:
    """Return the address of GOMP_parallel in PyTorch's OpenMP library; None if that is another library."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


def can_run(numbers: int) -> bool:
    """Tell whether to use compiled code for maps of this size, on as many threads as PyTorch uses."""
    if numbers < FEWEST or _failed or not native_code() or find_compiler() is None:
        return False
    return torch.get_num_threads() == 1 or parallel() is not None


_failed: list[str] = []  # the reason why nothing is compiled any more
_lock = threading.Lock()
_loaded: dict[str, ctypes.CDLL | None] = {}


def compiled(source: str) -> ctypes.CDLL | None:
    """Return the library of this C text; None, after one warning, where it cannot be compiled or loaded."""
    with _lock:
        if source not in _loaded:
            try:
                _loaded[source] = _load(source)
            except (OSError, subprocess.SubprocessError, RuntimeError) as error:
                _loaded[source] = None
                _failed.append(str(error))
                slower = "decoupled layers run on PyTorch's operations, which is slower, since C could not be compiled"
                warnings.warn(f"{slower}. {error}\n{SWITCH}=0 in the environment avoids the attempt.", stacklevel=2)
        return _loaded[source]


def included(name: str) -> str:
    """Return the text of a C file of this package."""
    return files("dcnet.ops.cpu.native").joinpath(name).read_text(encoding="utf-8")


def _load(source: str) -> ctypes.CDLL:
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("There is no C compiler (cc, gcc, clang, or $CC).")
    folder = cache_folder() / "native"
    facts = (source, *compiler, *_OPTIONS, _version(compiler), _cpu())
    name = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]

    def make(workshop: Path) -> Path:
        text, made = workshop / f"{name}.c", workshop / f"{name}.so"
        text.write_text(source, encoding="utf-8")
        _run_compiler(compiler, text, made)
        os.replace(text, folder / text.name)  # so that the source can be read beside the library
        return made

    return ctypes.CDLL(str(made_once(folder, f"{name}.so", make)))


def _run_compiler(compiler: tuple[str, ...], text: Path, made: Path) -> None:
    errors = []
    for for_this_cpu in _FOR_THIS_CPU:
        command = [*compiler, *_OPTIONS, *for_this_cpu, str(text), "-o", str(made), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode == 0:
            return
        errors.append(f"The command\n  {shlex.join(command)}\nsays\n{done.stderr.strip()[:2000]}")
    raise RuntimeError(errors[0])


@cache
def _version(compiler: tuple[str, ...]) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace").stdout


@cache
def _cpu() -> str:
    """Return what identifies this CPU's instructions, since several machines may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *dict.fromkeys(line for line in lines if line.startswith(names))])
