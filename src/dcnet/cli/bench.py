"""`dcnet bench`: what decoupling costs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcnet.cli.common import echo, fail, say
from dcnet.util.files import check_writable
from dcnet.util.suggest import nearest

if TYPE_CHECKING:
    import torch

    from dcnet.bench import Case


def bench(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="CSV of the records; what it has is not measured again.")
    ] = Path("bench.csv"),
    what: Annotated[
        str, typer.Option(help="What to measure: all, networks or layers; or models, those of other libraries.")
    ] = "all",
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="With --what models: timm:resnet50, torchvision:resnet18@192, or module:callable of your own, which "
            "the environment has to name in DCNET_TRUST_MODELS; may be repeated."
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="With --what models: images in a batch.")] = None,
    operator: Annotated[str, typer.Option(help="With --what models.")] = "tanh + cosine",
    match: Annotated[str, typer.Option(help="Only what has this in its line, such as cnn9 or float32.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Only the figures of the README.")] = False,
    repeats: Annotated[int, typer.Option(min=3, help="How often each is timed.")] = 20,
    cpu: Annotated[bool, typer.Option("--cpu", help="Measure on the CPU even if there is a GPU.")] = False,
    commit: Annotated[
        str | None, typer.Option(help="The commit to put into the records, where the source is no repository.")
    ] = None,
    render: Annotated[
        bool, typer.Option("--render", help="Measure nothing: only make the table of what is there.")
    ] = False,
    into: Annotated[Path | None, typer.Option(help="Put the table into this file, between its marks.")] = None,
) -> None:
    """Measure what decoupling costs, as a ratio to the plain network in the same run."""
    from dcnet import bench as benchmarks
    from dcnet.bench.records import read

    if what not in (kinds := ("all", "networks", "layers", "models")):
        raise typer.BadParameter(
            f"unknown {what!r}.{nearest(what, kinds)} Possible: {', '.join(kinds)}", param_hint="--what"
        )
    if what != "models" and (model or batch):
        raise typer.BadParameter("--model and --batch go with --what models", param_hint="--what")
    if render and not out.exists():
        raise typer.BadParameter(f"{out} does not exist", param_hint="--out")
    try:
        if into is not None:
            benchmarks.around(into)  # a file without marks is better found now
        if render:
            rows = read(out)
        else:
            check_writable(out)
            device = _device(cpu)
            cuda = device.type == "cuda"
            possible = (
                benchmarks.model_cases(model or [], batch, operator, cuda)
                if what == "models"
                else benchmarks.cases(cuda, what, quick)
            )
            rows = benchmarks.run(_matching(list(possible), match), out, device, repeats, say, commit)
        table = benchmarks.render([row for row in rows if what in ("all", f"{row['what']}s")])
        if into is not None:
            benchmarks.render_into(into, table)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        fail(error)
    if into is None:
        echo(table)


def _device(cpu: bool) -> "torch.device":
    """Return what is measured on, and say so where it is the CPU."""
    import torch

    if torch.cuda.is_available() and not cpu:
        return torch.device("cuda")
    say("on the CPU: small shapes" if cpu else "no GPU: small shapes on the CPU")
    return torch.device("cpu")


def _matching(possible: list["Case"], match: str) -> list["Case"]:
    """Return the cases with this in their lines, each with its plain twin, which it is a ratio to."""
    wanted = [case for chosen in possible if match in chosen.title for case in (chosen.plain, chosen)]
    if not wanted:
        names = "; ".join(dict.fromkeys(case.name for case in possible))
        raise typer.BadParameter(
            f"nothing to measure has {match!r} in its line; possible: {names}", param_hint="--match"
        )
    return wanted
