"""A process that compiles Triton kernels for another one, which finds them in Triton's cache on disk.

It is run as a script, and imports of dcnet only the files with kernels: PyTorch takes longer to import than most
kernels take to compile. From its standard input it reads, each behind its length, where the package is, and then jobs,
which are pickles. For each job it writes a byte to its standard output: whether the kernel was compiled.
"""

import io
import linecache
import marshal
import os
import pickle
import struct
import sys
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import IO, Any

COMPILED, FAILED = b"1", b"0"


def send(file: IO[bytes], data: bytes) -> None:
    """Write data behind its length."""
    file.write(struct.pack("<Q", len(data)) + data)
    file.flush()


def receive(file: IO[bytes]) -> bytes | None:
    """Return the data that `send` has written; None at the end."""
    head = file.read(8)
    return file.read(struct.unpack("<Q", head)[0]) if len(head) == 8 else None


def _prepare(package: str) -> None:
    """Let the files with kernels be imported without the packages around them, which import PyTorch."""
    import triton.language as tl

    for name in ("dcnet", "dcnet.ops", "dcnet.ops.fused", "dcnet.ops.fused.kernels"):
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = [str(Path(package, *name.split(".")[1:]))]
    instructions: Any = ModuleType("dcnet.ops.fused.instructions")
    instructions.PTX = tl.constexpr(True)  # all jobs are for NVIDIA's GPUs
    sys.modules[instructions.__name__] = instructions


class _Unpickler(pickle.Unpickler):
    """Reads what `compilers._Pickler` has written."""

    def persistent_load(self, what: tuple[Any, ...]) -> Any:
        import triton
        import triton.language as tl

        kind, module, name, *rest = what
        if kind == "named":
            return getattr(import_module(module), name)
        code, defaults, source, arithmetic, cell = rest
        if cell is not None:
            file, lines = cell
            linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
        names = {"m": import_module(arithmetic), "tl": tl}
        bound = FunctionType(marshal.loads(code), names, name, defaults)
        bound.__module__ = module
        function = triton.jit(bound)
        function._unsafe_update_src(source)
        return function


def compile_job(job: IO[bytes]) -> None:
    """Compile a job of `compilers.job_of`.

    The other process says under which key it will look for the kernel. To compute the key here would take longer than
    to import Triton, whose files, 400 MB, are a part of it. So is the version of ptxas, which the other process may
    have asked for before its environment named another one.
    """
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import ASTSource, compiler

    function, signature, constants, attributes, target, options, folder, key, same = _Unpickler(job).load()
    source = ASTSource(function, signature, constants, attributes)
    if (triton.__file__, triton.__version__, source.hash(), get_cache_invalidating_env_vars()) != same:
        raise ValueError("this process would compile something else")
    triton.knobs.cache.dir = folder
    compiler.get_cache_key = lambda *_, **__: key
    triton.compile(source, target=target, options=options)


def main() -> None:
    """Compile jobs until the standard input ends."""
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # Triton may print
    first = receive(jobs)
    if first is None:
        return
    _prepare(os.fsdecode(first))
    while (job := receive(jobs)) is not None:
        try:
            compile_job(io.BytesIO(job))
        except Exception:  # the other process compiles it itself, and says what is wrong
            answers.write(FAILED)
        else:
            answers.write(COMPILED)


if __name__ == "__main__":
    main()
