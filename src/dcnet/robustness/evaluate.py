"""Attacks by name, one after the other, on any model. The result is a plain dict for JSON."""

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.formulas import parse_number
from dcnet.robustness.auto import auto, import_autoattack
from dcnet.robustness.checks import check, check_finite
from dcnet.robustness.deepfool import deepfool
from dcnet.robustness.gradient_attacks import EPS, bim, fgsm, pgd
from dcnet.robustness.square import square
from dcnet.util.suggest import nearest

ATTACKS: dict[str, Callable[..., Any]] = {
    "fgsm": fgsm,
    "bim": bim,
    "pgd": pgd,
    "deepfool": deepfool,
    "square": square,
    "auto": auto,
}
_NOT_SETTABLE = ("model", "images", "labels", "target", "generator", "eps")
_SHORT = {"steps": "iterations"}
_LONG = {long: short for short, long in _SHORT.items()}
_COUNTS = ("iterations", "restarts", "queries", "batch")


@dataclass(frozen=True)
class Attack:
    """An attack by name, with parameters.

    Attributes:
        name: one of `dcnet.robustness.ATTACKS`.
        parameters: by the long names, those of the attack's function.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def norm(self) -> str | None:
        """The norm of ε: "linf" or "l2"; None if the attack has no ε."""
        return None if self.name == "deepfool" else self.parameters.get("norm", "linf")

    def __str__(self) -> str:
        return ":".join([self.name, *(f"{key}={value}" for key, value in self.parameters.items())])


def as_typed(recorded: str) -> str:
    """Return an attack as users type it, with the short names of parameters; records have the long ones."""
    name, *settings = recorded.split(":")
    pairs = (setting.partition("=") for setting in settings)
    return ":".join([name, *(f"{_LONG.get(key, key)}{equals}{value}" for key, equals, value in pairs)])


def parse_attack(text: str) -> Attack:
    """Return the attack of a text such as "pgd:steps=50:restarts=5"; raise if there is no such attack or parameter.

    Args:
        text: a name of `dcnet.robustness.ATTACKS`, then parameters, each after a colon.

    Examples:
        >>> import dcnet
        >>> dcnet.robustness.parse_attack("pgd:steps=50:restarts=5").parameters
        {'iterations': 50, 'restarts': 5}
    """
    name, *settings = text.split(":")
    if name not in ATTACKS:
        raise ValueError(f"unknown attack {name!r}.{nearest(name, ATTACKS)} Known: {', '.join(ATTACKS)}")
    known = {key: p for key, p in inspect.signature(ATTACKS[name]).parameters.items() if key not in _NOT_SETTABLE}
    parameters: dict[str, Any] = {}
    for setting in settings:
        written, equals, value = setting.partition("=")
        key = _SHORT.get(written, written)
        if not equals or key not in known:
            possible = ", ".join(f"{_LONG.get(k, k)}=…" for k in known) or "none"
            raise ValueError(f"attack {text!r}: {setting!r} is no parameter of {name}. Possible: {possible}")
        parameters[key] = _parsed(text, written, value, known[key].default)
        if key in _COUNTS and parameters[key] < 1:
            raise ValueError(f"attack {text!r}: {written}={value} must be a whole number ≥ 1")
    return Attack(name, parameters)


def parse_attacks(attacks: str | Sequence[str | Attack]) -> list[Attack]:
    """Return the attacks of a text such as "fgsm,auto"; raise if one is unknown, or needs a package that is missing."""
    chosen = [
        parse_attack(part) if isinstance(part, str) else part
        for part in (attacks.split(",") if isinstance(attacks, str) else attacks)
    ]
    if any(attack.name == "auto" for attack in chosen):
        import_autoattack()
    return chosen


def shared_norm(attacks: Sequence[Attack]) -> str:
    """Return the norm of ε for these attacks: ℓ2 if no attack takes it in ℓ∞."""
    return (
        "linf" if "linf" in {attack.norm for attack in attacks} or not any(attack.norm for attack in attacks) else "l2"
    )


def _parsed(text: str, key: str, value: str, default: Any) -> Any:
    """Return the value in the type of the parameter's default; 2/255 is a number."""
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[value.lower()]
        if isinstance(default, int):
            return int(value)
        if isinstance(default, float) or default is None:
            return parse_number(value)
    except (KeyError, ValueError):
        kind = (
            "true or false"
            if isinstance(default, bool)
            else "a whole number"
            if isinstance(default, int)
            else "a number"
        )
        raise ValueError(f"attack {text!r}: {key}={value} must be {kind}") from None
    return value


def run_attack(
    model: nn.Module, images: Tensor, labels: Tensor, attack: Attack, eps: float, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Return adversarial images, and the sizes of the perturbations if the attack searches for small ones."""
    function = ATTACKS[attack.name]
    takes = inspect.signature(function).parameters
    given = {"eps": eps} if "eps" in takes else {}
    if "generator" in takes:
        given["generator"] = generator  # type: ignore[assignment]
    result = function(model, images, labels, **given, **attack.parameters)
    return result if isinstance(result, tuple) else (result, None)


def evaluate(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    attacks: str | Sequence[str | Attack] = ("fgsm", "bim", "pgd"),
    eps: float = EPS,
    batch: int = 500,
    cumulative: bool = True,
    source: nn.Module | None = None,
    predicted: bool = False,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure the accuracy of a model, clean and under attacks, in percent of all images.

    Args:
        model: from images in [0, 1] to logits, in evaluation mode.
        images: (N, C, H, W), in [0, 1].
        labels: the true classes (N,).
        attacks: names with parameters, as in "fgsm,pgd:steps=50:restarts=5".
        eps: the largest change of a pixel (or the largest ℓ2 norm, for attacks with norm=l2).
        batch: images at once.
        cumulative: each attack only sees images that survived those before it, and the accuracy is that under all
            attacks so far; otherwise each attack sees every image that is classified right.
        source: another model, on which the adversarial images are made (a transfer attack).
        predicted: attack the predicted labels instead of the true ones, as older work often does. Unless `cumulative`,
            all images are attacked: one that the model gets wrong may be moved to its true class, so accuracies are
            higher.
        seed: of random starts.
        progress: called with an attack's name, how many images it has done, and how many there are.

    Returns:
        A dict that JSON can hold: the set-up, the clean accuracy, an entry for each attack, and with `cumulative` the
        worst accuracy. DeepFool gives sizes of perturbations, of all images classified right, and takes no part in the
        accuracy.
    """
    chosen = parse_attacks(attacks)
    norm = shared_norm(chosen)
    check(model, images, labels, eps, norm)
    maker = model if source is None else source
    if source is not None:
        check(source, images, labels, eps, norm)
    right = _correct(model, images, labels, batch, "on clean images")
    total = len(labels)
    result: dict[str, Any] = {
        "images": total,
        "eps": eps,
        "labels": "predicted" if predicted else "true",
        "transfer": source is not None,
        "cumulative": cumulative,
        "clean": 100.0 * int(right.sum()) / total,
        "attacks": [],
    }
    survivors = right.clone()
    for attack in chosen:
        begun = time.perf_counter()
        generator = torch.Generator(images.device).manual_seed(seed)
        # DeepFool attacks all images: only the hard ones, which need large perturbations, survive other attacks
        all_of_them = torch.ones_like(right) if predicted else right
        seen = (survivors if cumulative and attack.name != "deepfool" else all_of_them).nonzero().squeeze(1)
        sizes, held = [], torch.zeros_like(right)
        for done, part in _parts(seen, batch):
            some, their = images[part], labels[part]
            aimed = _predictions(maker, some, "on clean images") if predicted else their
            adversarial, size = run_attack(maker, some, aimed, attack, eps, generator)
            if size is None:
                held[part] = _correct(model, adversarial, their, batch, f"under {attack}")
            else:
                sizes.append(size)
            if progress is not None:
                progress(as_typed(str(attack)), done, len(seen))
        entry: dict[str, Any] = {"attack": str(attack), "attacked": len(seen)}
        if attack.name == "deepfool":
            entry |= _distribution(torch.cat(sizes) if sizes else torch.zeros(0))
        else:
            entry["accuracy"] = 100.0 * int(held.sum()) / total
            if cumulative:
                survivors = held
        entry["seconds"] = round(time.perf_counter() - begun, 3)
        result["attacks"].append(entry)
    if cumulative:
        result["worst"] = 100.0 * int(survivors.sum()) / total
    return result


def _parts(indices: Tensor, batch: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the indices in batches, with how many there are so far."""
    for start in range(0, len(indices), batch):
        part = indices[start : start + batch]
        yield start + len(part), part


@torch.no_grad()
def _predictions(model: nn.Module, images: Tensor, where: str) -> Tensor:
    return check_finite(model, model(images), where).argmax(1)


def _correct(model: nn.Module, images: Tensor, labels: Tensor, batch: int, where: str) -> Tensor:
    """Return whether the model is right for each image: (N,)."""
    parts = [
        _predictions(model, images[i : i + batch], where) == labels[i : i + batch] for i in range(0, len(labels), batch)
    ]
    return torch.cat(parts)


def _distribution(sizes: Tensor) -> dict[str, Any]:
    """Return the sorted sizes of perturbations, the median, and how many were found."""
    found = sizes[sizes.isfinite()].sort().values
    return {
        "median": float(found.median()) if len(found) else None,
        "found": len(found),
        "sizes": [round(float(s), 6) for s in found],
    }
