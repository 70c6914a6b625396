"""The paper's robustness tables: the same networks, under white-box and black-box attacks.

Black box: images made on another network.
"""

from typing import Any

from dcnet.tables.table import Cell, Number, Setup, Table

WHITE = Setup("white box", "fgsm,bim,pgd:steps=50:restarts=5")
AUTO = Setup("AutoAttack", "auto:batch=5000")
PREDICTED = Setup("predicted labels", "fgsm,bim", predicted=True)
# closest to the attacks of the paper's time: predicted labels, statistics as in training
OF_THE_BATCH = Setup("predicted labels and E of the batch", "fgsm,bim", predicted=True, statistics="batch")

_OPERATORS = {"Baseline": None, "SphereConv": "sphere", "BallConv": "ball", "TanhConv": "tanh", "SegConv": "seg"}
_PAPER = ("Baseline", "SphereConv", "BallConv", "TanhConv")
_TRAINING: dict[str, dict[str, Any]] = {
    "Natural": {},
    "FGSM-trained": {"adversarial": "fgsm"},
    "FGSM-trained, half clean": {"adversarial": "fgsm", "adversarial_share": 0.5},
    "TRADES-trained": {"adversarial": "trades"},
}
Numbers = dict[tuple[str, str], tuple[float, ...]]
_NUMBERS: Numbers = {  # in the order of _PAPER
    ("Natural", "none"): (85.35, 88.58, 91.13, 91.45),
    ("FGSM-trained", "none"): (83.70, 87.41, 87.47, 87.54),
}
_WHITE_NUMBERS: Numbers = {
    ("Natural", "fgsm"): (18.82, 43.64, 50.47, 52.60),
    ("Natural", "bim"): (8.67, 8.89, 7.74, 10.18),
    ("FGSM-trained", "fgsm"): (78.96, 85.98, 82.20, 81.46),
    ("FGSM-trained", "bim"): (7.96, 35.07, 17.38, 19.86),
}
_BLACK_NUMBERS: Numbers = {
    ("Natural", "fgsm"): (50.90, 56.71, 49.50, 50.61),
    ("Natural", "bim"): (36.22, 43.10, 27.48, 29.06),
    ("FGSM-trained", "fgsm"): (77.57, 76.29, 78.67, 80.38),
    ("FGSM-trained", "bim"): (78.55, 77.79, 80.59, 82.47),
}
_NETWORKS = "robustness"  # the same networks in both tables
_NAMES = {"none": "no attack", "fgsm": "FGSM", "bim": "BIM", "pgd": "PGD-50×5", "auto": "AutoAttack"}


def _cells(training: str, setup: Setup | None, numbers: Numbers, words: str = "") -> list[Cell]:
    """Return the rows of one way of training and one set-up."""
    attacks = ["none"] if setup is None else [attack.split(":")[0] for attack in setup.attacks.split(",")]
    # TRADES is slow, so only the most interesting operators
    columns = ["Baseline", "SphereConv", "TanhConv", "SegConv"] if training == "TRADES-trained" else list(_PAPER)
    cells = []
    for attack in attacks:
        papers: dict[str, Number] = dict(zip(_PAPER, numbers.get((training, attack), (None,) * 4), strict=True))
        row = f"{training}: {_NAMES[attack]}{words}"
        for column in columns:
            fields = {"magnitude": _OPERATORS[column], **_TRAINING[training]}
            cells.append(
                Cell(
                    row,
                    column,
                    fields,
                    papers.get(column),
                    None if setup is None else (setup, attack),
                    f"{training}, {column}",
                )
            )
    return cells


def _white_box() -> Table:
    cells = []
    for training in _TRAINING:
        cells += _cells(training, None, _NUMBERS) + _cells(training, WHITE, _WHITE_NUMBERS) + _cells(training, AUTO, {})
        if training in ("Natural", "FGSM-trained"):
            cells += _cells(training, PREDICTED, {}, ", predicted labels") + _cells(
                training, OF_THE_BATCH, {}, ", predicted labels, E of the batch"
            )
    note = (
        "ε = 8/255, all test images (the first 32 under the smoke schedule), "
        "true labels and running averages where nothing else is said."
    )
    return Table(
        "white-box",
        "White-box attacks, CNN-9 without BatchNorm on CIFAR-10",
        "paper-adversarial",
        tuple(cells),
        "accuracy",
        note,
        _NETWORKS,
    )


def _black_box() -> Table:
    cells = []
    for training in ("Natural", "FGSM-trained"):
        cells += _cells(training, None, _NUMBERS)
        for source, words in (("Natural", "a naturally trained"), ("FGSM-trained", "an FGSM-trained")):
            made_on = tuple({"magnitude": None, "adversarial": "none", **_TRAINING[source]}.items())
            setup = Setup(f"from {source}, Baseline", "fgsm,bim", source=made_on)
            cells += _cells(
                training,
                setup,
                _BLACK_NUMBERS,
                f", made on {words} baseline of another seed",
            )
    note = (
        "ε = 8/255. The paper does not say how the baseline that images are made on was trained: "
        "its numbers stand beside both."
    )
    return Table(
        "black-box",
        "Black-box attacks, CNN-9 without BatchNorm on CIFAR-10",
        "paper-adversarial",
        tuple(cells),
        "accuracy",
        note,
        _NETWORKS,
    )


ATTACKED = (_white_box(), _black_box())
