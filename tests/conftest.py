import os
import signal
import sys
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

# oneDNN's convolutions for AMX are wrong in half precision where a stride leaves maps of one column (plain ones too:
# torch 2.13, github.com/pytorch/pytorch/issues/169688 is of the same kind). Processes that tests start inherit this.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Without a GPU, Triton kernels run in Triton's interpreter; it must be chosen before Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import torch._dynamo
import torch._functorch.config

# This cache on disk knows our operators by name only: after a change to one it would run what another version compiled.
torch._functorch.config.enable_autograd_cache = False

# The same examples on every run, and no deadline: the first call of a torch operation is slow.
settings.register_profile("dcnet", deadline=None, derandomize=True)
settings.load_profile("dcnet")


# What a script starts in the background ignores Ctrl-C; the tests that send it are to be tested there too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _mend_torchvision():
    """Define the two operators without which torchvision, where its compiled part does not load, cannot be imported."""
    if find_spec("torchvision") is None:
        return None
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


_TORCHVISION = _mend_torchvision()  # kept: the operators go with it


def _patch_the_language_once():
    """Let Triton's interpreter patch `triton.language` once for a kernel, not again in every function that it calls.

    The second time changes nothing, and was a quarter of the time of the tests that run kernels. (Triton 3.7.1)
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch, scope = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "_LangPatchScope", None)
    if patch is None or scope is None:
        return

    def unless_patched(function):
        seen = [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]
        return scope() if seen and not any(tl.core.is_builtin(module.load) for module in seen) else patch(function)

    interpreter._patch_lang = unless_patched


_patch_the_language_once()


# Two pytest workers share two cores; fixtures of a whole module come before those of its tests.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()  # all layers share one forward, which torch.compile specializes a limited number of times


@pytest.fixture(params=["compiled", "PyTorch"])
def passes(request, monkeypatch):
    """Run a test on a CPU twice: with compiled passes, also for small maps, and with PyTorch's operations."""
    from dcnet.ops.cpu.native import compiler

    if request.param == "PyTorch":
        monkeypatch.setenv(compiler.SWITCH, "0")
        return False
    if compiler.find_compiler() is None:
        pytest.skip("there is no C compiler")
    monkeypatch.delenv(compiler.SWITCH, raising=False)
    monkeypatch.setattr(compiler, "FEWEST", 1)
    return True


@pytest.fixture
def catalogue():
    """Formulas registered during a test are forgotten after it."""
    from dcnet.formulas.catalogue import CATALOGUES

    before = {kind: dict(known) for kind, known in CATALOGUES.items()}
    yield
    for kind, known in before.items():
        CATALOGUES[kind].clear()
        CATALOGUES[kind].update(known)


@pytest.fixture
def few_digits(monkeypatch):
    """Make `digits` a quarter of itself, 320 and 80 images, for tests that do not ask how well a network learns."""
    import dcnet.data
    from dcnet.data import DataSet, Split

    whole = dcnet.data.load_data("digits")
    train, test = (Split(split.images[:n], split.labels[:n]) for split, n in ((whole.train, 320), (whole.test, 80)))
    monkeypatch.setattr(dcnet.data, "_digits", lambda: DataSet(whole.name, whole.classes, train, test))


@pytest.fixture(scope="session")
def built_host():
    """The autograd function in C++, built once and kept in the user's cache."""
    pytest.importorskip("triton")
    from dcnet.ops.fused.host import HOST
    from dcnet.util.cpp import NoCompiler

    before = HOST.module
    try:
        HOST.load(0)
    except NoCompiler as error:
        pytest.skip(str(error))
    module, HOST.module = HOST.module, before
    return module


@pytest.fixture
def compiled_also_if_small(monkeypatch):
    """Let compiled C run on maps of any size; skip where there is no compiler."""
    from dcnet.ops.cpu.native import compiler

    if compiler.find_compiler() is None:
        pytest.skip("there is no C compiler")
    monkeypatch.delenv(compiler.SWITCH, raising=False)
    monkeypatch.setattr(compiler, "FEWEST", 1)


# DCNET_NATIVE=wait: without a GPU too, every fused layer that can goes through C++, in every test.
if os.environ.get("DCNET_NATIVE") == "wait" and not torch.cuda.is_available():
    from dcnet.ops.fused.host import HOST

    HOST.launch_from_python = True
    HOST.load(0)
