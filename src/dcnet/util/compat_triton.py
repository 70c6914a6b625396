"""Every private name of Triton that this package uses, with the versions that have it.

A release that drops one of them breaks only this file, and `ops/fused/compile_worker.py`, which works without PyTorch.
Checked with Triton 3.6 and 3.7.
"""

import ast
import ctypes
import hashlib
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from functools import cache, partial
from threading import Lock, Thread
from typing import Any, NamedTuple


def direct_launch(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the launch function of a compiled Triton kernel, and its arguments between the stream and the kernel's.

    The three None are metadata and hooks for Triton's profiler.
    """
    return compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)


def launch_facts(compiled: Any) -> tuple[int, int, int, tuple[Any, ...]] | None:
    """Return what a plain launch of a compiled Triton kernel needs: function, threads, shared memory, argument types.

    The kernel takes the arguments whose type is not "constexpr", then two pointers to scratch memory. None where it
    needs more: scratch memory, a cluster, a cooperative launch, or a device that is not NVIDIA's.
    """
    facts = compiled.metadata
    needs = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    if facts.target.backend != "cuda" or facts.num_ctas != 1 or any(getattr(facts, name, 0) for name in needs):
        return None
    return compiled.function, 32 * facts.num_warps, facts.shared, tuple(compiled.src.signature.values())


@contextmanager
def compiling_on(mode: Any) -> Iterator[bool]:
    """Let the mode compile the Triton kernels that are warmed up in this context.

    Yield whether that can be done: not inside another such context.
    """
    from triton.runtime._async_compile import active_mode

    if active_mode.get() is not None:
        yield False
        return
    token = active_mode.set(mode)
    try:
        yield True
    finally:
        active_mode.reset(token)


def compiling_mode(executor: Executor) -> Any:
    """Return a mode for `compiling_on` that compiles each kernel once; one that cannot be compiled raises later."""
    from triton.runtime._async_compile import AsyncCompileMode

    return AsyncCompileMode(executor, ignore_errors=True)


class Compilation(NamedTuple):
    """What Triton compiles; environment: the variables that change its result."""

    source: Any
    target: Any
    options: dict[str, Any]
    environment: dict[str, str]


def compiled_by(compile_kernel: Callable[[], Any]) -> Compilation | None:
    """Return what a function compiles that a mode was given; None if unknown.

    It is a closure of `JITFunction._do_compile`, and names these four so.
    """
    known = inspect.getclosurevars(compile_kernel).nonlocals
    if not {"src", "target", "options", "env_vars"} <= set(known):
        return None
    return Compilation(known["src"], known["target"], dict(vars(known["options"])), known["env_vars"])


@cache
def hash_triton() -> None:
    """Start to hash Triton's files, 400 MB, in the background, which the key of the first kernel waits for."""
    from triton.runtime import cache as of_triton

    Thread(target=getattr(of_triton, "triton_key", None), name="dcnet: Triton's hash", daemon=True).start()


def cache_key(wanted: Compilation) -> str:
    """Return the key of a kernel in Triton's cache."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    backend = make_backend(wanted.target)
    options = backend.parse_options(dict(wanted.options))
    return str(get_cache_key(wanted.source, backend, options, wanted.environment))


def is_cached(wanted: Compilation, key: str) -> bool:
    """Tell whether Triton's cache on disk has the kernel of that key."""
    from triton.runtime.cache import get_cache_manager

    file = f"{wanted.source.name[:150]}.json"
    found = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(file)
    return found is not None and file in found


_LOADING = Lock()


class _Launcher:
    """A launcher that is built when it is first called."""

    def __init__(self, build: Callable[..., Any], *made_of: Any) -> None:
        self._build = cache(lambda: build(*made_of))

    def __call__(self, *arguments: Any) -> None:
        self._build()(*arguments)

    def __getattr__(self, name: str) -> Any:  # Inductor looks at launchers
        return getattr(self._build(), name)


def load_kernel(compiled: Any, with_launcher: bool) -> None:
    """Load a compiled Triton kernel on the current device, which would happen at its first launch otherwise.

    with_launcher: build at once what Triton launches it with; else, where a plain launch is enough, only when Triton is
    to launch it. Triton 3.6 has a C compiler make it, which takes half as long as to compile the kernel.
    """
    from triton.runtime import driver

    plain = False
    with suppress(AttributeError):  # a Triton that describes kernels in another way
        plain = launch_facts(compiled) is not None
    if with_launcher or not plain:
        compiled._init_handles()
        return
    with _LOADING:  # a kernel that others load meanwhile may get such a launcher too, which does what theirs would
        active, build = driver.active, driver.active.launcher_cls
        active.launcher_cls = partial(_Launcher, build)
        try:
            compiled._init_handles()
        finally:
            active.launcher_cls = build


def build_c_module(source: str, name: str) -> Any:
    """Build a Python extension module from C, with the compiler that Triton uses, and keep it in Triton's cache."""
    from triton.runtime.build import compile_module_from_src

    return compile_module_from_src(source, name)


def kernel_launch_address() -> int:
    """Return the address of the CUDA driver's `cuLaunchKernel`."""
    driver = ctypes.CDLL("libcuda.so.1")
    address = ctypes.cast(driver.cuLaunchKernel, ctypes.c_void_p).value
    assert address is not None
    return address


def without_annotations(function: Any) -> Any:
    """Return a Triton function with the annotations of its arguments dropped.

    Triton's compiler looks up the names in annotations as if they were used in the code. The interpreter does not.
    """
    if not hasattr(function, "_unsafe_update_src"):
        return function
    tree = ast.parse(function.src)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    for argument in definition.args.args:
        argument.annotation = None
    function._unsafe_update_src(ast.unparse(tree))
    return function
