"""A recipe: everything that decides what a training run computes, and nothing else."""

import dataclasses
import json
import operator
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dcnet.data import AUGMENTATIONS, FOLDER, NAMES
from dcnet.formulas import parse_number
from dcnet.training.recipe_checks import check_together
from dcnet.util.suggest import nearest

DEFAULT = "default"
_COMPARED: dict[str, Callable[[float, float], bool]] = {
    "≥": operator.ge,
    ">": operator.gt,
    "≤": operator.le,
    "<": operator.lt,
}
Limit = float | None


def _option(
    default: Any,
    explanation: str,
    *possible: str,
    low: Limit = None,
    above: Limit = None,
    high: Limit = None,
    below: Limit = None,
) -> Any:
    """Return a recipe's field with its text for `--help` and its possible values: names, or limits."""
    return field(
        default=default,
        metadata={"help": explanation, "possible": possible, "limits": {"≥": low, ">": above, "≤": high, "<": below}},
    )


@dataclass(frozen=True)
class Recipe:
    """What is trained on what, and how.

    Every field is a flag of `dcnet train`. Fields that cannot be, alone or together, raise a `ValueError` that names
    them. `make_recipe` starts from a named recipe.
    """

    data: str = _option("digits", f"Data set: {', '.join(NAMES)}, or {FOLDER}PATH.")
    image_size: int | None = _option(None, "Size of the crops from an image folder (224 if not given).", low=8)
    model: str = _option(
        "cnn9_narrow", "Network: a name of dcnet.list_models(), timm:NAME, torchvision:NAME, or MODULE:CALLABLE."
    )
    magnitude: str | None = _option(
        "tanh", "Magnitude function, with parameters as in seg:beta=0.2; none for the plain network."
    )
    angular: str = _option("cosine", "Angular function, with parameters as in sigmoid:k=learned.")
    weighting: str | None = _option(None, "How ‖w‖ enters the magnitude: none, linear, joint or separate.")
    radius: str = _option("learned", "Operator radius: learned, or a number.")
    where: tuple[str, ...] = _option(
        (),
        "Restrict which layers are decoupled (default: all convolutions except gates). Patterns of names, such as "
        "`layer[1-4].*.conv2`, or `!stem*` for all others; or presets: spatial (kernels larger than 1×1), not-first, "
        "not-depthwise, all (gates too). Several patterns select more layers; every preset but all removes layers.",
    )
    norm: str | None = _option(
        DEFAULT, "Normalization: batch, none, or default for what the network has.", "batch", "none", DEFAULT
    )
    activation: str | None = _option(
        DEFAULT, "Activation: relu, prelu, none, or default.", "relu", "prelu", "none", DEFAULT
    )
    penultimate_activation: bool = _option(
        False, "Activation also after the last fully connected layer before the classifier (cnn9, cnn9_narrow)."
    )
    penultimate_norm: bool = _option(True, "Norm also after that layer (cnn9, cnn9_narrow).")
    root_activation: bool = _option(
        False, "Activation also after the first convolution of resnet32; the ImageNet networks always have it."
    )
    head: str = _option("linear", "Classifier: linear or normalized.", "linear", "normalized")
    pretrained: str | None = _option(
        None,
        "Weights to start from, of the same structure: a run folder, a .safetensors file, hub:NAME, or library for "
        "those of timm and torchvision.",
    )
    calibrate: int = _option(
        0,
        "Training batches on which a trained plain network, converted to the operator, is given back its means and "
        "deviations; 0 for none.",
        low=0,
    )

    epochs: float = _option(3.0, "Passes over the training images.", above=0, below=1e9)
    steps: int | None = _option(None, "Steps of the optimizer, instead of epochs.", low=1)
    batch: int = _option(128, "Images a step, over all devices.", low=1)
    accumulate: int = _option(1, "Parts of a device's batch, gradients of which are added up.", low=1)
    augment: str = _option(
        "none", "Augmentation: none, crop, flip, crop+flip, crop+flip+cutout or crop+flip+cutmix.", *AUGMENTATIONS
    )
    pad: int = _option(4, "Pixels of mirrored padding that crops come from.", low=0)
    cutout: int = _option(8, "Side of the square that cutout hides, in pixels.", low=1)
    label_smoothing: float = _option(0.0, "Share of the target spread over all classes.", low=0, below=1)
    loss: str = _option(
        "cross-entropy",
        "Loss: cross-entropy, or floored, the authors' log(softmax + 1e-4).",
        "cross-entropy",
        "floored",
    )

    optimizer: str = _option("adam", "Optimizer: adam or sgd.", "adam", "sgd")
    lr: float = _option(1e-3, "Learning rate, the highest of the schedule.", above=0, below=1e100)
    momentum: float = _option(0.9, "Momentum of SGD.", low=0, below=1)
    nesterov: bool = _option(False, "Nesterov's momentum.")
    weight_decay: float = _option(
        0.0,
        "ℓ2 on all but radii, learned parameters and (see decay_unweighted) unweighted decoupled kernels.",
        low=0,
        below=1e100,
    )
    decay_kernels: bool = _option(True, "Whether ordinary convolutions, such as the plain network's, decay.")
    decay_unweighted: bool = _option(
        False,
        "Whether unweighted decoupled kernels decay too. Their length does not enter the output, but the shorter a "
        "kernel, the farther a step turns it.",
    )
    decay_shortcuts: bool = _option(True, "Whether the shortcuts of residual networks decay.")
    schedule: str = _option(
        "constant", "Learning rate: constant, step, plateau or onecycle.", "constant", "step", "plateau", "onecycle"
    )
    milestones: tuple[float, ...] = _option(
        (), "Where the step schedule multiplies by gamma, as fractions of the run: 0.5,0.75."
    )
    gamma: float = _option(0.1, "Factor of the step and plateau schedules.", above=0, below=1e100)
    patience: int = _option(
        5, "Epochs without a lower training error before the plateau schedule multiplies by gamma.", low=1
    )
    threshold: float = _option(
        0.01, "Fraction by which the training error must fall to count as lower.", low=0, below=1
    )
    warmup: float = _option(0.25, "Fraction of the run in which the onecycle schedule rises.", low=0, below=1)
    clip: float | None = _option(None, "Largest norm of the gradient.", above=0)
    ema: float | None = _option(
        None,
        "Decay of an exponential moving average of the weights, which is then what is evaluated.",
        above=0,
        below=1,
    )
    recalibrate: int = _option(
        10,
        "Training batches that running averages are estimated from for each evaluation; 0 for those of training.",
        low=0,
    )

    plain_kernels: str = _option(
        "free",
        "Kernels of ordinary layers before the classifier: free, projected (as decoupled ones are), or "
        "normalized (weight normalization).",
        *("free", "projected", "normalized"),
    )
    projection: int = _option(0, "Steps between projections of unweighted kernels to norm 1; 0 for never.", low=0)
    weighted_gradients: bool = _option(False, "Multiply the gradients of unweighted kernels by ‖w‖.")
    orthogonality: float = _option(
        0.0, "Weight of the orthogonality penalty on unweighted kernels.", low=0, below=1e100
    )
    sync: bool = _option(False, "Take E{‖x‖} over the batches of all devices.")

    adversarial: str = _option(
        "none", "Adversarial training: none, fgsm, pgd or trades.", "none", "fgsm", "pgd", "trades"
    )
    adversarial_labels: str = _option(
        "true", "Labels that adversarial images are made for: true, or predicted.", "true", "predicted"
    )
    adversarial_eps: float = _option(8 / 255, "Largest change of a pixel in adversarial training.", low=0, high=1)
    adversarial_steps: int = _option(10, "Steps of pgd and trades.", low=1)
    adversarial_step: float = _option(2 / 255, "Their size.", low=0, high=1)
    adversarial_share: float = _option(
        1.0, "Share of adversarial images in the loss of fgsm and pgd; the rest is the images' own.", low=0, high=1
    )
    trades_beta: float = _option(6.0, "Weight of the divergence in trades.", low=0)

    precision: str = _option("float32", "Arithmetic: float32, tf32, bf16 or fp16.", "float32", "tf32", "bf16", "fp16")
    channels_last: bool = _option(False, "Memory order of the images.")
    compile: bool = _option(False, "Run the network through torch.compile.")
    graphs: bool | None = _option(
        None, "Repeat the training step as a CUDA graph: no waiting for the host. Auto: where it can be done."
    )
    deterministic: bool = _option(False, "Only algorithms that give the same result every time.")
    seed: int = _option(0, "Of weights, order of the images, and augmentation.", low=0, below=2**32)
    evaluate_every: int = _option(1, "Epochs between evaluations; 0 for only one at the end.", low=0)
    save_every: int = _option(
        1000,
        "Steps between checkpoints; epochs end with one too, unless that took over a twentieth of the time.",
        low=1,
    )

    def __post_init__(self) -> None:
        for entry in fields(self):
            value, possible = getattr(self, entry.name), entry.metadata["possible"]
            allowed = (
                typing.get_args(hints[entry.name])
                if isinstance(hints[entry.name], types.UnionType)
                else (hints[entry.name],)
            )
            if float in allowed and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
                object.__setattr__(self, entry.name, value)
            if entry.name == "where":
                value = _names(value)
                object.__setattr__(self, entry.name, value)
            elif isinstance(value, list) or (float in allowed and isinstance(value, str)):
                try:  # 8/255, in a file or on the command line
                    value = _number(value) if isinstance(value, str) else tuple(_number(part) for part in value)
                except ValueError as error:
                    raise ValueError(f"recipe: {entry.name}={error}") from None
                object.__setattr__(self, entry.name, value)
            kinds = tuple(typing.get_origin(kind) or kind for kind in allowed)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise ValueError(
                    f"recipe: {entry.name}={value!r} must be "
                    f"{' or '.join(getattr(k, '__name__', 'None') for k in kinds)}"
                )
            if possible and ("none" if value is None else value) not in possible:
                raise ValueError(
                    f"recipe: unknown {entry.name} {value!r}.{nearest(str(value), possible)} Possible: "
                    f"{', '.join(possible)}"
                )
            limits = [(sign, limit) for sign, limit in entry.metadata["limits"].items() if limit is not None]
            if value is not None and not all(_COMPARED[sign](value, limit) for sign, limit in limits):
                possible_values = " and ".join(f"{sign} {limit:g}" for sign, limit in limits)
                raise ValueError(f"recipe: {entry.name}={value} must be {possible_values}{_pixels(entry.name, value)}")
        check_together(self)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"

    @property
    def title(self) -> str:
        """A short name: data, network, operator."""
        operator = (
            "plain"
            if self.magnitude is None
            else "-".join(filter(None, (self.magnitude, self.angular, self.weighting)))
        )
        data = self.data if ":" not in self.data else Path(self.data.split(":", 1)[1]).name
        return "-".join(
            (
                data,
                self.model.replace(":", "_"),
                operator.replace(":", "_").replace("=", "").replace(",", "_").replace("/", "_"),
                f"seed{self.seed}",
            )
        )


def _number(value: Any) -> Any:
    return parse_number(value) if isinstance(value, str) else value


def _names(value: Any) -> Any:
    """Return one name, or a list of them, as a tuple; raise if something in it is not a name."""
    value = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    if isinstance(value, tuple) and not all(isinstance(name, str) and name.strip("! ") for name in value):
        raise ValueError(f"recipe: where={value!r} must be patterns of names, or presets")
    return value


def _pixels(name: str, value: float) -> str:
    """Return a question if a change of a pixel seems to be given in units of 1/255."""
    return (
        f"; did you mean {value:g}/255?"
        if name in ("adversarial_eps", "adversarial_step") and 1.0 < value <= 255.0
        else ""
    )


hints = typing.get_type_hints(Recipe)
_EXAMPLES = """\
    Examples:
        >>> import dcnet
        >>> dcnet.Recipe(model="cnn9", magnitude="seg").title
        'digits-cnn9-seg-cosine-seed0'
"""
_ARGS = "".join(f"        {entry.name}: {entry.metadata['help']}\n" for entry in fields(Recipe))
Recipe.__doc__ = f"{str(Recipe.__doc__).rstrip()}\n\n    Args:\n{_ARGS}\n{_EXAMPLES}    "


def change(recipe: Recipe, **values: Any) -> Recipe:
    """Return the recipe with fields replaced."""
    for name in values:
        if name not in hints:
            raise ValueError(f"unknown recipe field {name!r}.{nearest(name, hints)} Known: {', '.join(hints)}")
    if "epochs" in values and "steps" not in values:
        values["steps"] = None
    if values.get("schedule", "step") != "step" and "milestones" not in values:
        values["milestones"] = ()  # those of the recipe were for its own schedule
    return replace(recipe, **values)
