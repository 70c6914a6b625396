"""Build Python extension modules from C++ at run time, with the user's own compiler and PyTorch's headers."""

import atexit
import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from dcnet.util.cache import cache_folder, made_once

# PyTorch's own headers ask for C++20. -O1: the code only calls PyTorch, and builds in half the time.
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-DAT_PER_OPERATOR_HEADERS")
_LIBRARIES = ("torch_python", "torch_cpu", "c10")
_LINES = 12  # of a compiler's complaints


class CannotBuild(RuntimeError):
    """There is no C++ compiler, or it fails."""


class NoCompiler(CannotBuild):
    """There is no C++ compiler."""


def build_cpp_module(name: str, sources: Mapping[str, str], main: str) -> Any:
    """Return the extension module of that name, built from sources by path; `main` is the one that includes the others.

    It is kept in the cache folder, under a hash of its sources, options and versions. Raise `CannotBuild` with the
    command and the first lines of the compiler's output.
    """
    compiler = _compiler()
    options = _options()
    made_of = [
        *sorted(sources.items()),
        *options,
        _version(*compiler),
        torch.__version__,
        sysconfig.get_config_var("SOABI"),
    ]
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()[:20]

    def make(folder: Path) -> Path:
        for path, text in sources.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        _run([*compiler, str(folder / main), "-o", str(folder / "made.so"), *options])
        return folder / "made.so"

    try:
        path = made_once(cache_folder() / f"{name}-{key}", f"{name}.so", make)
    except OSError as error:
        raise CannotBuild(f"{cache_folder()} cannot be used: {error}") from error
    return _load(name, path)


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        return chosen
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise NoCompiler("there is no C++ compiler: none of c++, g++ and clang++ is on the path, and $CXX is not set")


def _options() -> list[str]:
    root = Path(torch.__file__).parent
    headers = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [
        *_FLAGS,
        abi,
        *[f"-I{path}" for path in headers],
        f"-L{root / 'lib'}",
        *[f"-l{name}" for name in _LIBRARIES],
    ]


@cache
def _version(*compiler: str) -> str:
    return _run([*compiler, "--version"])


def _run(command: list[str]) -> str:
    """Return the output of the command, which is stopped if this process ends first."""
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        raise CannotBuild(f"{command[0]} cannot be started: {error}") from error
    atexit.register(process.kill)
    try:
        said, _ = process.communicate()
    finally:
        atexit.unregister(process.kill)
    if process.returncode != 0:
        lines = "\n".join(said.splitlines()[:_LINES])
        raise CannotBuild(f"{shlex.join(command)}\nends with status {process.returncode}:\n{lines}")
    return said


def _load(name: str, path: Path) -> Any:
    try:
        spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, str(path)))
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise CannotBuild(f"{path} cannot be loaded: {error}") from error
    return module
