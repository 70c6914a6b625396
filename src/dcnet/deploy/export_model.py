"""`export`: write a model into a file for other programs, checked against the model itself before the file appears."""

import copy
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from dcnet.deploy import onnx_format
from dcnet.deploy.check import (
    Arguments,
    Checked,
    Runner,
    cast_inputs,
    cast_model,
    compare,
    other_batches,
    other_size,
    run_model,
    smallest_side,
    tensors,
)
from dcnet.deploy.prepare import prepare
from dcnet.deploy.programs import (
    DYNAMIC,
    check_sizes,
    compile_program,
    free_dims,
    run_package,
    run_program,
    save_program,
    trace,
)
from dcnet.deploy.weights import save_model_weights
from dcnet.fusing.running import evaluating
from dcnet.fusing.wrappers import unwrap
from dcnet.layers.types import Positional
from dcnet.util.files import write_atomically
from dcnet.util.suggest import nearest

FORMATS = {"onnx": ".onnx", "torch-export": ".pt2", "aoti": ".pt2", "safetensors": ".safetensors"}


@dataclass
class ExportReport:
    """What `export` wrote, and how it was checked.

    Attributes:
        path: the file.
        to: its format.
        bytes: its size.
        seconds: how long it took.
        dtype: of the arithmetic in it.
        dynamic: which of "batch" and "size" are free in it.
        checked: the inputs it was checked with, and how far off it was.
        opset: of ONNX.
        nodes: the number of operations in an ONNX file.
        notes: anything else to know.
        smallest: the smallest side of images in pixels, if "size" is free and this is known.
    """

    path: Path
    to: str
    bytes: int
    seconds: float
    dtype: str = ""
    dynamic: tuple[str, ...] = ()
    checked: list[Checked] = field(default_factory=list)
    opset: int | None = None
    nodes: int | None = None
    notes: list[str] = field(default_factory=list)
    smallest: int | None = None

    def __str__(self) -> str:
        length = f"{self.bytes / 1e6:.1f} MB" if self.bytes >= 1e5 else f"{self.bytes / 1e3:.1f} kB"
        about = [self.to, length, *([self.dtype] if self.dtype else [])]
        about += [f"opset {self.opset}, {self.nodes} nodes"] if self.opset is not None else []
        lines = [f"{self.path}: {', '.join(about)}, in {self.seconds:.1f} s"]
        if self.checked:
            size = "any size" + (f" from {self.smallest} pixels a side on" if (self.smallest or 1) > 1 else "")
            free = {
                ("batch", "size"): f"any batch, {size}",
                ("batch",): "any batch, this size",
                ("size",): f"this batch, {size}",
            }
            lines.append(f"  for {free.get(self.dynamic, 'this batch and size only')}")
            by = "onnxruntime" if self.to == "onnx" else "PyTorch"
            lines += [
                f"  checked with {by} on {' and '.join('×'.join(map(str, shape)) for shape in one.shapes)}: "
                f"off by {one.error:.1e} of the output"
                for one in self.checked
            ]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def export(
    model: nn.Module,
    path: str | Path,
    to: str | None = None,
    example_input: Positional | None = None,
    *,
    half: bool = False,
    dynamic: bool = True,
    opset: int = 18,
) -> ExportReport:
    """Write the model in evaluation mode into a file for other programs, and return a report of it.

    In the file each decoupled layer is one convolution, one map of norms and the few operations of its formulas;
    kernels are normalized, radii multiplied and BatchNorms folded beforehand. The model stays as it is. If anything
    fails, no file is written.

    Args:
        model: any model; if it is in torch.compile or in a data-parallel wrapper, the model inside is exported.
        path: the file to write.
        to: "onnx", "torch-export" (a program for `torch.export.load`), "aoti" (compiled for this machine by Inductor)
            or "safetensors" (weights and the conversion, for `dcnet.load_weights_`); by default, the ending of the
            path decides.
        example_input: real inputs, a tensor or a tuple of them, with which the file is checked before it appears.
        half: use float16 instead of float32 for any model; norms, angles and magnitudes are still computed in float32.
        dynamic: leave the batch and the size of images free in the file, as far as the model allows; this is checked
            too.
        opset: of ONNX.

    Examples:
        >>> import tempfile, dcnet
        >>> from pathlib import Path
        >>> model = nn.Sequential(dcnet.DecoupledConv2d(3, 8, 3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = dcnet.export(model, Path(folder) / "model.safetensors")
        >>> report.to
        'safetensors'
    """
    path = Path(path)
    to = _format(path, to)
    _check(model, path, opset)
    model = unwrap(model)
    start = time.perf_counter()
    if to == "safetensors":
        if half:
            raise ValueError("half=True: safetensors hold the weights as they are; call model.half() first")
        data = save_model_weights(model, path)
        report = ExportReport(path, to, len(data), 0.0)
    else:
        if to == "onnx":
            onnx_format.check_packages()
        arguments = _arguments(example_input, to)
        data, report = _export(model, arguments, path, to, torch.float16 if half else torch.float32, dynamic, opset)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)
    report.seconds = time.perf_counter() - start
    return report


def _format(path: Path, to: str | None) -> str:
    if to is None:
        to = next((name for name, ending in FORMATS.items() if ending == path.suffix), None)
        if to is None:
            endings = ", ".join(dict.fromkeys(FORMATS.values()))
            raise ValueError(f"{path}: what to write is not said; give to=, or a path that ends in {endings}")
    if to not in FORMATS:
        raise ValueError(f"to={to!r} is unknown.{nearest(str(to), FORMATS)} Possible: {', '.join(FORMATS)}")
    return to


def _check(model: nn.Module, path: Path, opset: int) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"export takes a model, got {type(model).__name__}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the path of a file")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):  # raise before a long computation instead of after it
        raise ValueError(f"{path} cannot be written: {folder} is {'not writable' if folder.is_dir() else 'a file'}")
    if opset not in onnx_format.OPSETS:
        raise ValueError(
            f"opset={opset!r} is not possible; possible: {onnx_format.OPSETS[0]} to {onnx_format.OPSETS[-1]}"
        )


def _arguments(example_input: Positional | None, to: str) -> Arguments:
    if example_input is None:
        raise ValueError(
            f"to={to!r} needs example_input: real inputs for the model, to trace it and to check the file with"
        )
    if isinstance(example_input, Mapping):
        raise TypeError("example_input must be a tensor or a tuple of arguments; named arguments cannot be exported")
    arguments = tuple(example_input) if isinstance(example_input, tuple | list) else (example_input,)
    found = tensors(arguments)
    if not found:
        raise TypeError(f"example_input must be a tensor or a tuple of them, got {type(example_input).__name__}")
    for value in found:
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ValueError("example_input has values that are not finite; nothing could be checked with it")
        if not value.numel():
            raise ValueError(f"example_input has no values: its shape is {tuple(value.shape)}")
    return arguments


def _export(
    model: nn.Module, arguments: Arguments, path: Path, to: str, dtype: torch.dtype, dynamic: bool, opset: int
) -> tuple[bytes, ExportReport]:
    try:
        with evaluating(model):  # without gradients, so that kernels that a hook computes can be copied afterward
            expected = run_model(model, arguments)
    except Exception as error:
        raise ValueError(
            f"example_input: {type(model).__name__} cannot be called with it ({type(error).__name__}: {error})"
        ) from error
    if not expected:
        raise ValueError(f"{type(model).__name__} gives no tensor for example_input; there is nothing to export")
    original = copy.deepcopy(model).eval()
    original, arguments = cast_model(original, torch.float32), cast_inputs(arguments, torch.float32)
    ready, inputs = prepare(original, arguments).to(dtype), cast_inputs(arguments, dtype)
    notes: list[str] = []
    resized = other_size(original, arguments) if dynamic else None
    if resized is not None and _pads_by_size(original):  # exporters take forever with such nested formulas of sizes
        resized = None
        notes.append("not for any size: some layers pad by the size that their input has (SAME)")
    plans: tuple[tuple[str, ...], ...] = (DYNAMIC, DYNAMIC[:1], ()) if resized is not None else (DYNAMIC[:1], ())
    for free in plans if dynamic else ((),):
        try:
            program = trace(ready, inputs, free)
            if to != "onnx" and "size" in free:
                check_sizes(program)
            data, runner, details = _MAKERS[to](program, opset, model)
            really = _really_free(program, free)
            checked = _checks(original, runner, arguments, dtype, really, resized)
        except Exception as error:
            if not free:
                if isinstance(error, ValueError | RuntimeError | OSError | ImportError):
                    raise
                raise RuntimeError(
                    f"cannot export {type(model).__name__} to {to}: {type(error).__name__}: {error}"
                ) from error
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            notes.append(f"not for any {' and '.join(free)}: {first[:200]}")
            continue
        name = str(dtype).removeprefix("torch.")
        if to == "torch-export" and "size" in really:
            details["smallest"] = smallest_side(runner, inputs)
        return data, ExportReport(path, to, len(data), 0.0, name, really, checked, notes=notes, **details)
    raise AssertionError("unreachable")


def _pads_by_size(model: nn.Module) -> bool:
    """Tell whether a model has layers of timm that pad as TensorFlow does, or their decoupled twins."""
    return any(getattr(m, "same_pad", type(m).__name__ == "Conv2dSame") is True for m in model.modules())


def _onnx(program: ExportedProgram, opset: int, model: nn.Module) -> tuple[bytes, Runner, dict[str, Any]]:
    proto, data = onnx_format.make_onnx(program, opset, model)
    return data, onnx_format.run_onnx(data), {"opset": opset, "nodes": len(proto.graph.node)}


def _program(program: ExportedProgram, opset: int, model: nn.Module) -> tuple[bytes, Runner, dict[str, Any]]:
    data = save_program(program)
    return data, run_program(data), {}


def _package(program: ExportedProgram, opset: int, model: nn.Module) -> tuple[bytes, Runner, dict[str, Any]]:
    data = compile_program(program)
    return data, run_package(data), {}


_MAKERS = {"onnx": _onnx, "torch-export": _program, "aoti": _package}


def _really_free(program: ExportedProgram, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Return which of "batch" and "size" are free in the program: the model's code may fix either."""
    dims = free_dims(program)
    free = [any(0 in one for one in dims), any(max(one, default=0) > 0 for one in dims)]
    return tuple(name for name, is_free in zip(DYNAMIC, free, strict=True) if is_free and name in asked)


def _checks(
    model: nn.Module,
    runner: Runner,
    arguments: Arguments,
    dtype: torch.dtype,
    free: tuple[str, ...],
    resized: Arguments | None,
) -> list[Checked]:
    """Compare on the example itself, then on other batches and another size if these are free."""
    given = [arguments, *(other_batches(arguments) if "batch" in free else [])]
    if "size" in free and resized is not None:
        given.append(resized)
    return [compare(model, runner, one, dtype) for one in given]
