"""`dcnet export`: a trained network in a file for other programs."""

from pathlib import Path
from typing import Annotated

import typer

from dcnet.cli.common import DataRoot, TrainedArgument, fail, say
from dcnet.cli.own_formulas import Formulas, TrustFormulas, register
from dcnet.deploy import FORMATS
from dcnet.training import export_run


def export(
    source: TrainedArgument,
    to: Annotated[
        str,
        typer.Option(help=f"Format: {', '.join(FORMATS)}.", autocompletion=lambda: list(FORMATS), metavar="FORMAT"),
    ] = "onnx",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write; model.onnx and so on in the run folder if not given."),
    ] = None,
    half: Annotated[bool, typer.Option("--half", help="float16 instead of float32.")] = False,
    fixed: Annotated[bool, typer.Option("--fixed", help="For this batch and size of images only.")] = False,
    opset: Annotated[int, typer.Option(help="Version of ONNX's operators, 18 to 23.", metavar="N")] = 18,
    data_root: DataRoot = Path("data"),
    formulas: Formulas = None,
    trust_formulas: TrustFormulas = False,
) -> None:
    """Write a trained network for other programs: ONNX, torch.export, aoti (compiled by Inductor), or safetensors.

    The file is compared with the network itself on test images, by onnxruntime for ONNX, before it appears.
    """
    try:
        register(formulas)
        report = export_run(
            *(source, out, to),
            half=half,
            dynamic=not fixed,
            opset=opset,
            data_root=data_root,
            trust_formulas=trust_formulas,
        )
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        fail(error)
    say(report)
    if to == "torch-export":
        say(f"load it with: torch.export.load({str(report.path)!r}).module()")
