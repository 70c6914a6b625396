"""The check-up beside every robustness figure: can it be believed, or do the gradients mislead the attacks?

After Athalye et al. (2018) and Carlini et al. (2019): a failed attack only says something about the model if stronger
attacks, and attacks without gradients, fail too.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dcnet.robustness.checks import check, check_finite
from dcnet.robustness.gradient_attacks import EPS, pgd
from dcnet.robustness.losses import cross_entropy, finite_slope
from dcnet.robustness.square import square

# How much each test tolerates, in percent of the images:
STRONGER = 5.0  # fooled only by more steps, restarts and another loss
STRONGER_TEST = "stronger attack"
BLIND = 3.0  # fooled only by an attack without gradients
ONE_STEP = 10.0  # fooled by several steps, but not by one; the verdict mentions more than that
LEFT = 2.0  # still right although ε allows any image
ZERO = 5.0  # with a gradient of exactly zero


def check_up(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    eps: float = EPS,
    iterations: int = 20,
    queries: int = 500,
    batch: int = 250,
    seed: int = 0,
) -> dict[str, Any]:
    """Check whether an accuracy under attack can be believed, or whether gradients mislead the attacks.

    Args:
        model: from images in [0, 1] to logits, in evaluation mode.
        images: (N, C, H, W), in [0, 1]; a few hundred are enough.
        labels: the true classes (N,).
        eps: the largest change of a pixel.
        iterations: steps of PGD; the stronger attack takes five times as many.
        queries: of the black-box attack, for each image.
        batch: images at once.
        seed: of random starts.

    Returns:
        A dict that JSON can hold: what each test found, whether it passed, and a verdict in words.
    """
    check(model, images, labels, eps)
    generator = torch.Generator(images.device)

    def accuracy(attack: str, size: float = eps, **options: Any) -> float:
        """Return the accuracy in percent of the images, under that attack."""
        generator.manual_seed(seed)
        held = 0
        for i in range(0, len(labels), batch):
            some, their = images[i : i + batch], labels[i : i + batch]
            if attack == "square":
                some = square(model, some, their, size, queries, generator=generator)
            elif attack == "pgd":
                some = pgd(model, some, their, size, generator=generator, **{"iterations": iterations, **options})
            with torch.no_grad():
                logits = check_finite(model, model(some), "on clean images" if attack == "none" else f"under {attack}")
                held += int((logits.argmax(1) == their).sum())
        return 100.0 * held / len(labels)

    found: dict[str, Any] = {"images": len(labels), "eps": eps}
    clean = found["clean"] = accuracy("none")
    tests: list[dict[str, Any]] = []

    def add(name: str, passed: bool, words: str) -> None:
        tests.append({"test": name, "passed": passed, "words": words})

    with torch.no_grad():
        once, again = (
            torch.cat([model(images[i : i + batch]) for i in range(0, len(labels), batch)]) for _ in range(2)
        )
    add(
        "randomness",
        torch.equal(once, again),
        "two passes over the same images give " + ("the same" if torch.equal(once, again) else "different logits"),
    )
    nothing = found["eps 0"] = accuracy("pgd", 0.0, iterations=2)
    words = f"at ε = 0 the accuracy on these {len(labels)} images is {nothing:.1f}%, clean {clean:.1f}%"
    add("ε = 0", nothing == clean, words)

    lengths = _gradient_lengths(model, images, labels, batch)
    zero = found["zero gradient"] = 100.0 * float((lengths == 0.0).float().mean())
    found["gradient norm"] = {f"{q:g}%": float(lengths.double().quantile(q / 100)) for q in (5, 25, 50, 75, 95)}
    add("zero gradients", zero <= ZERO, f"the gradient is exactly zero for {zero:.1f}% of the images")

    white = found["pgd"] = accuracy("pgd")
    strong = found["pgd, stronger"] = min(
        accuracy("pgd", iterations=5 * iterations, restarts=2),
        accuracy("pgd", iterations=5 * iterations, loss="margin"),
    )
    add(
        STRONGER_TEST,
        white - strong <= STRONGER,
        f"PGD leaves {white:.1f}%, with five times the steps, restarts and another loss {strong:.1f}%",
    )
    blind = found["square"] = accuracy("square")
    add("black box", blind >= white - BLIND, f"Square, which sees no gradients, leaves {blind:.1f}%, PGD {white:.1f}%")

    found["steps"] = [
        {"steps": count, "accuracy": accuracy("pgd", iterations=count)}
        for count in sorted({1, max(1, iterations // 4)} - {iterations})
    ]
    found["steps"] += [{"steps": iterations, "accuracy": white}, {"steps": 5 * iterations, "accuracy": strong}]
    curve: dict[float, float] = {}
    for size in sorted({eps / 4, eps / 2, eps, 2 * eps, 4 * eps, 0.25, 0.5, 1.0} - {0.0}):
        if size <= 1.0 and (not curve or min(curve.values()) > 0.0):  # nothing is left to lose beyond
            curve[size] = white if size == eps else accuracy("pgd", size)
    found["curve"] = [{"eps": size, "accuracy": value} for size, value in curve.items()]
    least = min(curve.values())
    add("growing ε", least <= LEFT, f"with ε growing to 1, where any image is allowed, PGD leaves {least:.1f}%")

    failed = [test for test in tests if not test["passed"]]
    found["tests"] = tests
    found["masked"] = bool(failed)
    one_step = found["steps"][0]["accuracy"]
    if failed:
        found["verdict"] = "do not believe the accuracy under attack: " + "; ".join(test["words"] for test in failed)
    else:
        found["verdict"] = (
            f"no sign of gradient masking: the {white:.1f}% under PGD can be believed as far as these tests go"
        )
        if one_step - white > ONE_STEP:
            found["verdict"] += (
                f"; one step, as FGSM takes it, leaves {one_step:.1f}%, which says nothing about attacks with more"
            )
    return found


def _gradient_lengths(model: nn.Module, images: Tensor, labels: Tensor, batch: int) -> Tensor:
    """Return the ℓ2 norm of the cross-entropy's gradient in every image (N,)."""
    parts = [
        finite_slope(model, images[i : i + batch], labels[i : i + batch], cross_entropy)[0]
        for i in range(0, len(labels), batch)
    ]
    return torch.cat([part.flatten(1).norm(dim=1) for part in parts])
