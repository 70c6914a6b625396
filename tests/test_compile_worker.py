"""Kernels are compiled by processes without PyTorch, and found in Triton's cache; what fails there is compiled here."""

import os
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue
from threading import current_thread

import pytest

pytest.importorskip("triton")

# For a GPU that is not there, with a formula of a user's own.
CODE = """
import os, pathlib, sys, time, warnings
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Driver())
from compile_kernels import launchers
from dcnet.ops.fused import compilers
import linecache, signal
if "@magnitude" in sys.argv[1]:  # a notebook's cell
    linecache.cache["<cell>"] = (len(sys.argv[1]), None, sys.argv[1].splitlines(True), "<cell>")
    exec(compile(sys.argv[1], "<cell>", "exec"), {"__name__": "__main__"})
else:
    import own
sys.path.append(pathlib.Path("folder"))

found, done, started, groups = [], [], [], []
triton.knobs.compilation.listener = lambda cache_hit, **_: found.append(cache_hit)
start, compile_there = compilers._started, compilers.Processes.compile

def begin():
    started.append(start())
    groups.append(os.getpgid(started[-1].pid))
    return started[-1]

def note(self, kernel):
    done.append(compile_there(self, kernel))

compilers._started, compilers.Processes.compile = begin, note
every = dict(launchers("doubled", "linear", None, torch.bfloat16))

def compiled(*names):
    background = compilers.KernelCompilers(2)
    with background.collecting() as can:
        assert can
        kernels = [every[name].warm_up([torch.bfloat16] * 64) for name in names]
    background.wait_for(kernels)
    background.wait()
    assert all(len(kernel.result().asm["cubin"]) > 1000 for kernel in kernels)
    with warnings.catch_warnings(action="ignore"):  # of Python 3.12, that there are threads
        child = os.fork()  # such as a process of a DataLoader, which has all files open that this one has
    if child == 0:
        time.sleep(60)
        os._exit(0)
    until = time.monotonic() + 10
    while any(process.poll() is None for process in started):  # all end by themselves
        assert time.monotonic() < until
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    assert all(group != os.getpgid(0) for group in groups)  # which Ctrl-C ends
    print(*done, *found, len(started))
    for each in (done, found, started):
        each.clear()

compiled("output", "energies", "evaluation")
for name in ("output", "energies", "evaluation"):  # as in the next run of a program
    every[name].kernel.device_caches.clear()
compiled("output", "energies", "evaluation")
# torch.compile sets these two; Triton keeps the version of ptxas, once it has asked for it
folder = pathlib.Path(os.environ["TRITON_CACHE_DIR"]).parent
other, version = folder / "ptxas", "release 12.8, V12.8.0"
lines = "#!/bin/sh", f'[ "$1" = --version ] && echo {version} && exit', f'exec {triton.knobs.nvidia.ptxas.path} "$@"'
other.write_text("\\n".join(lines))
other.chmod(0o755)
os.environ |= {"TRITON_PTXAS_PATH": str(other), "TRITON_CACHE_DIR": str(folder / "cache of torch.compile")}
compiled("product")

def with_another_environment():
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    process = begin()
    del os.environ["TRITON_DISABLE_LINE_INFO"]
    return process

compilers._started = with_another_environment
compiled("windows")
compilers._started = lambda: started.append(start()) or started[-1].send_signal(signal.SIGKILL) or started[-1]
compiled("gradients alone")  # its process dies
compilers._started = lambda: (_ for _ in ()).throw(OSError("no processes"))
compiled("gradient of x")
compilers._started, compilers._SCRIPT, compilers._LONGEST = begin, folder / "hangs.py", 0.5
compilers._SCRIPT.write_text("import time; time.sleep(1000)")
compiled("reduce")
triton.knobs.compilation.always_compile = True
compiled("activated")
triton.knobs.compilation.always_compile = False
compilers.compiled_by = lambda kernel: None
compiled("alone")  # Triton keeps its secrets
"""
OWN = '''
from dcnet import m, magnitude

@magnitude
def doubled(n, rho, alpha=1.0):
    """2α·‖x‖/ρ"""
    return 2.0 * alpha * n / rho, 2.0 * alpha / rho, -2.0 * alpha * n / (rho * rho)
'''


WARNINGS = ["-W", "error", "-W", "ignore::DeprecationWarning"]  # Triton's own, and of fork


@pytest.mark.parametrize("formula", [OWN, "in a file"], ids=["cell", "file"])
def test_processes_compile(tmp_path, formula):
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent), *sys.path])
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, *WARNINGS, "-c", CODE, formula],
        capture_output=True,
        text=True,
        env=os.environ | hidden | {"PYTHONPATH": path},
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    there, again, changed, differs, died, none, hangs, always, unknown = done.stdout.splitlines()
    assert there == "True True True True True True 2"  # done in a process, then found in the cache; by two of them
    assert again == "False False False True True True 0"  # found in the cache, without a process
    assert changed == "True True 1"
    assert differs == "False False 1"
    assert died == "False False 1"
    assert none == "False 0"
    assert hangs == "False False 1"
    assert always == unknown == "False False 0"


def test_triton_is_hashed_once_in_the_background(monkeypatch):
    from triton.runtime import cache

    from dcnet.util.compat_triton import hash_triton

    threads = SimpleQueue()
    monkeypatch.setattr(cache, "triton_key", lambda: threads.put(current_thread()))
    hash_triton.cache_clear()
    for _ in range(2):
        hash_triton()
    assert threads.get(timeout=10) is not current_thread()
    assert threads.empty()


def test_as_many_processes_as_there_are_processors(monkeypatch):
    from dcnet.ops.fused.compilers import most_processes

    for processors, ranks, expected in ((16, "", 8), (3, "1", 3), (16, "8", 2), (2, "8", 1), (2, "?", 2), (4, "0", 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=processors: set(range(count)), raising=False)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert most_processes() == expected


def test_the_script_imports_no_pytorch():
    """Which takes longer than to compile most kernels."""
    code = """
import sys
from dcnet_worker import _prepare
_prepare(sys.argv[1])
from dcnet.ops.fused.kernels import backward, depthwise, forward, norms, statistics
assert "torch" not in sys.modules
"""
    import dcnet

    package = Path(dcnet.__file__).parent
    script = package / "ops" / "fused" / "compile_worker.py"
    loader = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("dcnet_worker", {str(script)!r})
sys.modules["dcnet_worker"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["dcnet_worker"])
"""
    done = subprocess.run(
        [sys.executable, "-c", loader + code, str(package)],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
