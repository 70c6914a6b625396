"""Compile Triton kernels side by side, in processes of their own, and load them.

Python's lock lets threads compile hardly more than one kernel at a time. The processes import neither PyTorch nor
dcnet, so they are ready in a fraction of a second (`compile_worker.py`). They leave compiled kernels in Triton's cache
on disk, where Triton finds them when it is asked here. So whatever goes wrong in a process costs time, and nothing
else: Triton compiles the kernel here.
"""

import io
import linecache
import marshal
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Timer
from types import FunctionType
from typing import Any

import torch
import triton

from dcnet.ops.fused.compile_worker import COMPILED, send
from dcnet.util.cache import native_code
from dcnet.util.compat_triton import cache_key, compiled_by, compiling_mode, compiling_on, is_cached, load_kernel

_SCRIPT = Path(__file__).with_name("compile_worker.py")
_IDLE = 10.0  # seconds; each process holds some 150 MB
_LONGEST = 120.0  # seconds for a kernel, which takes less than one


def most_processes() -> int:
    """Return how many processes may compile: no layer has more than eight new kernels, and ranks share processors."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # set by torchrun
    return max(1, min(8, processors // max(1, int(ranks) if ranks.isdecimal() else 1)))


class KernelCompilers:
    """Kernels that compile in the background. One that cannot be compiled raises when it is launched, not here."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._mode: Any = None
        self._lock, self._waiting = Lock(), Lock()  # backward runs in threads of its own, one for each device

    @contextmanager
    def collecting(self) -> Iterator[bool]:
        """Let kernels that are warmed up in this context compile in the background; yield whether that can be done."""
        with self._lock:  # to the end: `wait`, in another thread, must not end a mode that kernels are given to
            if self._mode is None:  # shared, so that a kernel for several layers is compiled once
                self._mode = compiling_mode(_Loading(self.workers))
            with compiling_on(self._mode) as can:
                yield can

    def wait_for(self, kernels: Iterable[Any]) -> None:
        """Wait for kernels that were warmed up."""
        for kernel in kernels:
            if hasattr(kernel, "future"):
                kernel.result(ignore_errors=True)

    def wait(self) -> None:
        """Wait for all of them, and end the processes."""
        if self._mode is None:
            return
        with self._waiting:  # a second thread goes on when the kernels are there, too
            mode = self._mode
            if mode is None:
                return
            for kernel in list(mode.future_kernels.values()):
                kernel.result(ignore_errors=True)
            with self._lock:
                self._mode = None
            mode.executor.shutdown(wait=False)


class _Loading(ThreadPoolExecutor):
    """Runs functions that return compiled kernels, and loads these on the device that was current at submission."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.processes = Processes()

    def submit(self, compile_kernel: Any, /, *_: Any, **__: Any) -> Any:
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def compile_and_load() -> Any:
            with suppress(Exception):  # it is compiled here then
                self.processes.compile(compile_kernel)
            kernel = compile_kernel()
            if device is not None:
                with torch.cuda.device(device):
                    load_kernel(kernel, with_launcher=not native_code())
            return kernel

        return super().submit(compile_and_load)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        self.processes.end_in(0.0)


class Processes:
    """Processes that fill Triton's cache. They start when they are needed, and end when they were idle for a while."""

    def __init__(self) -> None:
        self._free: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._timer, self._lock = Timer(0.0, self._end), Lock()

    def compile(self, compile_kernel: Callable[[], Any]) -> bool:
        """Compile in a process what a function of Triton would compile here; return whether that was done."""
        job = job_of(compile_kernel)
        if job is None:
            return False
        try:
            process = self._free.get_nowait()
        except Empty:
            process = _started()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b""
        watch = Timer(_LONGEST, process.kill)
        watch.daemon = True
        watch.start()
        with suppress(OSError):
            send(process.stdin, job)
            answer = process.stdout.read(1)
        watch.cancel()
        if answer:
            self._free.put(process)
            self.end_in(_IDLE)
        else:  # it has died
            _end(process)
        return answer == COMPILED

    def end_in(self, seconds: float) -> None:
        """End the processes that are idle then, unless this is called again before."""
        with self._lock:
            self._timer.cancel()
            self._timer = Timer(seconds, self._end)
            self._timer.daemon = True
            self._timer.start()

    def _end(self) -> None:
        with suppress(Empty):
            while True:
                _end(self._free.get_nowait())


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()  # that its standard input is closed is not enough: processes forked from this one have it open
    process.communicate()


def _started() -> "subprocess.Popen[bytes]":
    if not Path(sys.executable or "").name.startswith("python"):
        raise OSError(f"{sys.executable} is not Python: it is a program that Python is part of")
    # -P: the folder of the script has modules that are called like others
    path = [folder for folder in sys.path if isinstance(folder, str) and folder]
    process = subprocess.Popen(
        [sys.executable, "-P", str(_SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C is not for it: its kernels would be compiled here, while this program wants to end
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "TRITON_INTERPRET": "0"},
    )
    assert process.stdin is not None
    send(process.stdin, os.fsencode(sys.modules["dcnet"].__path__[0]))
    return process


def job_of(compile_kernel: Callable[[], Any]) -> bytes | None:
    """Return what `compile_worker.compile_job` needs; None for kernels that it cannot compile, or that are compiled."""
    wanted = compiled_by(compile_kernel)
    if wanted is None or wanted.target.backend != "cuda" or triton.knobs.compilation.always_compile:
        return None
    source, key = wanted.source, cache_key(wanted)
    if is_cached(wanted, key):  # starting a process takes much longer than loading a kernel
        return None
    same = triton.__file__, triton.__version__, source.hash(), wanted.environment
    file = io.BytesIO()
    what = source.fn, source.signature, source.constants, source.attrs, wanted.target, wanted.options
    _Pickler(file).dump((*what, triton.knobs.cache.dir, key, same))
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Writes functions of Triton as what `compile_worker` makes them of.

    Triton reads their source, which of a notebook's cell is in this process alone.
    """

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, triton.JITFunction):
            return None
        function = value.fn
        assert isinstance(function, FunctionType)
        if getattr(sys.modules.get(function.__module__), function.__name__, None) is value:
            return "named", function.__module__, function.__name__
        # a formula or an activation, see `formulas.jit`
        arithmetic = function.__globals__["m"].__name__
        code, file = marshal.dumps(function.__code__), function.__code__.co_filename
        cell = None if Path(file).is_file() else (file, linecache.getlines(file))
        return "bound", function.__module__, function.__name__, code, function.__defaults__, value.src, arithmetic, cell
