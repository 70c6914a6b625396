"""Programs of PyTorch: `torch.export`, and its compilation ahead of time by Inductor."""

import inspect
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_map

from dcnet.deploy.check import Arguments, Runner, tensors, with_batch

DYNAMIC = ("batch", "size")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and log messages of PyTorch's exporters."""
    loggers = [
        logging.getLogger(name)
        for name in ("torch.export", "torch._export", "torch.onnx", "torch._inductor", "onnxscript")
    ]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def trace(model: nn.Module, arguments: Arguments, dynamic: tuple[str, ...]) -> ExportedProgram:
    """Return the program of a model; dynamic: which of "batch" and "size" stay free, if the model allows it."""
    if "batch" in dynamic:  # a batch of 1 would count as a constant; more than 2 is only more work
        arguments = with_batch(arguments, 2)
    shapes = None
    if dynamic:  # by the names of parameters; arguments for *args are one tuple
        bound = inspect.signature(model.forward).bind(*arguments).arguments
        shapes = {name: tree_map(lambda v: _dims(v, dynamic), value) for name, value in bound.items()}
    with torch.no_grad(), quiet():
        return torch.export.export(model, arguments, dynamic_shapes=shapes, strict=False)


def _dims(value: Any, dynamic: tuple[str, ...]) -> Any:
    if not isinstance(value, Tensor) or not value.dim():
        return None
    free = [0] if "batch" in dynamic else []
    if "size" in dynamic and value.dim() in (3, 4, 5) and value.is_floating_point():
        free += range(2, value.dim())
    return dict.fromkeys(free, Dim.AUTO)


def free_dims(program: ExportedProgram) -> list[list[int]]:
    """Return the dimensions of each input that may have any size."""
    return [[i for i, size in enumerate(shape) if not isinstance(size, int)] for shape in _shapes(program)]


def check_sizes(program: ExportedProgram) -> None:
    """Raise if the program is for small images only, although their size is free.

    Strides depend on whether a map has one pixel, and PyTorch fixes the answer for the example. ONNX has no strides; a
    program compiled by Inductor does not even check the size of its input.
    """
    sizes = [size.node.expr for shape in _shapes(program) for size in shape[2:] if not isinstance(size, int)]
    largest = [program.range_constraints[size].upper for size in sizes if size in program.range_constraints]
    if bounds := [int(bound) for bound in largest if bound.is_Integer and bound < 2**31]:
        raise ValueError(
            f"the program of PyTorch is for images of at most {min(bounds)} pixels a side, as maps in the model have "
            "one pixel then; a larger example_input frees the size"
        )


def _shapes(program: ExportedProgram) -> list[Any]:
    given = set(program.graph_signature.user_inputs)
    return [
        node.meta["val"].shape
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in given and isinstance(node.meta.get("val"), Tensor)
    ]


def save_program(program: ExportedProgram) -> bytes:
    """Return the program as bytes for `torch.export.load`."""
    file = io.BytesIO()
    with quiet():
        torch.export.save(program, file)
    return file.getvalue()


def run_program(data: bytes) -> Runner:
    """Return a function that runs the saved program."""
    with quiet():
        module = torch.export.load(io.BytesIO(data)).module()

    def run(arguments: Arguments) -> list[Tensor]:
        with torch.no_grad():
            return tensors(module(*arguments))

    return run


def compile_program(program: ExportedProgram) -> bytes:
    """Return the package for `torch._inductor.aoti_load_package`, compiled for this processor or GPU."""
    from torch._inductor import aoti_compile_and_package

    with tempfile.TemporaryDirectory() as folder, quiet(), torch.no_grad():
        try:
            path = aoti_compile_and_package(program, package_path=str(Path(folder) / "model.pt2"))
        except Exception as error:
            raise RuntimeError(
                f"Inductor cannot compile the model here ({type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else error}); it needs a C++ compiler (g++ or clang++)"
            ) from error
        return Path(path).read_bytes()


def run_package(data: bytes) -> Runner:
    """Return a function that runs the compiled package."""
    from torch._inductor import aoti_load_package

    with tempfile.TemporaryDirectory() as folder, quiet():
        path = Path(folder) / "model.pt2"
        path.write_bytes(data)
        package = aoti_load_package(str(path))
    return lambda arguments: tensors(package(*arguments))
