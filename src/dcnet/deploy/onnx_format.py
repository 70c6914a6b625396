"""ONNX: a small graph from PyTorch's exporter, and its outputs by onnxruntime."""

import json
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from dcnet.converting import conversion_of
from dcnet.deploy.check import Arguments, Runner, tensors
from dcnet.deploy.onnx_rewrites import rewrite_
from dcnet.deploy.programs import quiet
from dcnet.version import __version__

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
OPSETS = range(18, 24)


def check_packages() -> None:
    """Raise if a package for writing or checking ONNX is not installed."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ImportError(f"exporting to ONNX needs {', '.join(missing)}: pip install 'dcnet[onnx]'")


def make_onnx(program: ExportedProgram, opset: int, model: nn.Module) -> tuple[Any, bytes]:
    """Return the ONNX model of a program, and its bytes. model: the original, whose operators the file lists."""
    arguments, named = program.example_inputs or ((), {})
    single = len(tensors(arguments)) == 1
    names: dict[str, Any] = {"input_names": ["input"]} if single else {}
    if len(program.graph_signature.user_outputs) == 1:
        names["output_names"] = ["output"]
    with quiet(), torch.no_grad():
        made = torch.onnx.export(
            program, arguments, kwargs=named, dynamo=True, opset_version=opset, verbose=False, **names
        )
    assert made is not None
    proto = made.model_proto
    rewrite_(proto.graph)
    # the exporter's notes on each operation, which include paths of source files, are larger than the graph
    for part in (proto.graph, *proto.functions):
        for one in (part, *part.node):
            del one.metadata_props[:]
            one.doc_string = ""
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info, *proto.graph.initializer):
        del value.metadata_props[:]
        value.doc_string = ""
    del proto.graph.value_info[:]
    proto.producer_name, proto.producer_version = "dcnet", __version__
    note = proto.metadata_props.add()
    note.key, note.value = (
        "dcnet",
        json.dumps({"version": __version__, "layers": _operators(model)}, ensure_ascii=False),
    )
    try:
        return proto, proto.SerializeToString()
    except ValueError as error:
        raise ValueError(
            f"the model is too large for one ONNX file, which holds 2 GiB: {error}; possible: to='torch-export'"
        ) from error


def _operators(model: nn.Module) -> dict[str, str]:
    return {
        name: " + ".join(filter(None, (options["magnitude"], options["angular"], options["weighting"])))
        for name, options in conversion_of(model).items()
    }


def run_onnx(data: bytes) -> Runner:
    """Return a function that runs the model by onnxruntime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise RuntimeError(f"onnxruntime cannot load the exported model: {error}") from error
    inputs = [given.name for given in session.get_inputs()]

    def run(arguments: Arguments) -> list[Tensor]:
        values = [value.detach().cpu().numpy() for value in tensors(arguments)]
        return [torch.from_numpy(found) for found in session.run(None, dict(zip(inputs, values, strict=True)))]

    return run
