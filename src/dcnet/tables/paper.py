"""The tables of the paper, with its numbers, and ours beside them."""

from typing import Any

from dcnet.tables.attacked import ATTACKED
from dcnet.tables.table import NOT_CONVERGED, Cell, Number, Row, Table, grid
from dcnet.util.suggest import nearest

# The plain twin has ℓ2 on its kernels, and neither projection nor penalty.
PLAIN: dict[str, Any] = {"magnitude": None, "projection": 0, "orthogonality": 0.0}
WITHOUT_DECAY = PLAIN | {"decay_kernels": False}
_MAGNITUDES = ("sphere", "ball", "tanh", "linear", "seg", "log", "mix")
OPERATORS = {f"{name.capitalize()}Conv": Row(f"{name.capitalize()}Conv", {"magnitude": name}) for name in _MAGNITUDES}
BASELINE, BASELINE_WITHOUT_DECAY = Row("Baseline", PLAIN), Row("Baseline, no ℓ2 on kernels", WITHOUT_DECAY)
# Kernels treated as those of LinearConv are: what it gains beyond this row is not the normalized kernel's.
BASELINE_PROJECTED = Row(
    "Baseline, projected kernels",
    {"magnitude": None, "orthogonality": 0.0, "decay_kernels": False, "plain_kernels": "projected"},
)
LINEAR, COSINE, SQUARE = (
    Row(name, {"angular": angular})
    for name, angular in (("Linear", "linear"), ("Cosine", "cosine"), ("Sq. cosine", "square_cosine"))
)


def _activated(angular: Row, activation: str) -> Row:
    return Row(
        f"{angular.name}, {'ReLU' if activation == 'relu' else 'no ReLU'}", angular.fields | {"activation": activation}
    )


_CNN9 = Table(
    "cnn9",
    "Plain CNN-9 on CIFAR-100, with and without ReLU",
    "paper-cifar",
    grid(
        [BASELINE, BASELINE_WITHOUT_DECAY, BASELINE_PROJECTED, *OPERATORS.values()],
        [_activated(angular, activation) for activation in ("none", "relu") for angular in (COSINE, SQUARE)],
        {
            "Baseline": (58.24, "-", 26.01, "-"),
            "Baseline, no ℓ2 on kernels": ("-", "-", None, "-"),
            "Baseline, projected kernels": ("-", "-", None, "-"),
            "SphereConv": (33.31, 25.90, 26.00, 26.97),
            "BallConv": (31.81, 25.43, 25.18, 26.48),
            "TanhConv": (32.27, 25.27, 25.15, 26.94),
            "LinearConv": (36.49, 24.36, 24.81, 25.14),
            "SegConv": (33.57, 24.29, 24.96, 25.04),
            "LogConv": (33.62, 24.91, 25.17, 25.85),
            "MixConv": (33.46, 24.93, 25.27, 25.77),
        },
    ),
)

_NO_BATCHNORM = Table(
    "cnn9-no-batchnorm",
    "Plain CNN-9 without BatchNorm on CIFAR-100",
    "paper-cifar",
    grid(
        [
            Row(row.name, row.fields | {"norm": "none"})
            for row in (BASELINE, *(OPERATORS[name] for name in ("LinearConv", "TanhConv", "SegConv")))
        ],
        [LINEAR, COSINE, SQUARE],
        {
            "Baseline": ("-", 35.30, "-"),
            "LinearConv": (33.39, 31.76, NOT_CONVERGED),
            "TanhConv": (32.88, 31.88, 34.26),
            "SegConv": (34.69, 30.34, NOT_CONVERGED),
        },
    ),
)


def _tricks(model: str, numbers: tuple[float, ...] | None) -> tuple[Cell, ...]:
    """Return the table of weighted operators and of ways to train unweighted ones, TanhConv + cosine."""
    ways: dict[str, dict[str, Any]] = {
        "Linearly weighted": {"weighting": "linear", "projection": 0},
        "Nonlinearly weighted, joint": {"weighting": "joint", "projection": 0},
        "Nonlinearly weighted, separate": {"weighting": "separate", "projection": 0},
        "Unweighted, standard gradients": {"projection": 0},
        "Unweighted, weight projection": {},
        "Unweighted, weighted gradients": {"projection": 0, "weighted_gradients": True},
    }
    paper = numbers or (None,) * len(ways)
    return tuple(
        Cell(way, "TanhConv", {"model": model, "magnitude": "tanh", **fields}, number)
        for (way, fields), number in zip(ways.items(), paper, strict=True)
    )


_RESNET_ROWS = [
    BASELINE,
    BASELINE_WITHOUT_DECAY,
    Row("Baseline, ReLU after the root", PLAIN | {"root_activation": True}),
    *OPERATORS.values(),
]
_EXTRA: dict[str, tuple[Number, ...]] = {
    "Baseline, no ℓ2 on kernels": ("-", None, "-"),
    "Baseline, ReLU after the root": ("-", None, "-"),
}


def _resnet32(name: str, title: str, base: str, numbers: dict[str, tuple[Number, ...]]) -> Table:
    rows = [Row(row.name, row.fields | {"model": "resnet32"}) for row in _RESNET_ROWS]
    return Table(name, title, base, grid(rows, [LINEAR, COSINE, SQUARE], _EXTRA | numbers))


_ADAM = _resnet32(
    "resnet32",
    "ResNet-32 on CIFAR-100, Adam",
    "paper-cifar",
    {
        "Baseline": ("-", 26.69, "-"),
        "SphereConv": (21.79, 21.44, 24.40),
        "BallConv": (21.44, 21.12, 24.31),
        "TanhConv": (21.60, 21.17, 24.77),
        "LinearConv": (21.09, 22.17, 21.31),
        "SegConv": (20.86, 20.91, 20.88),
        "LogConv": (21.84, 21.08, 22.86),
        "MixConv": (21.02, 21.28, 21.81),
    },
)
_SGD = _resnet32(
    "resnet32-sgd",
    "ResNet-32 on CIFAR-100, SGD with momentum",
    "paper-cifar-sgd",
    {
        "Baseline": ("-", 21.55, "-"),
        "SphereConv": (21.71, 21.61, 24.62),
        "BallConv": (20.96, 21.25, 24.40),
        "TanhConv": (21.07, 21.12, 24.29),
        "LinearConv": (21.43, 21.25, 20.54),
        "SegConv": (20.58, 20.61, 20.61),
        "LogConv": (21.15, 21.42, 23.10),
        "MixConv": (20.82, 21.20, 21.19),
    },
)


def _state_of_the_art() -> Table:
    normalized = {"model": "resnet32", "head": "normalized"}
    columns = [
        Row(f"{title}, {way}", {"data": data, **fields})
        for data, title in (("cifar10", "CIFAR-10"), ("cifar100", "CIFAR-100"))
        for way, fields in (("Adam", {}), ("SGD", {"optimizer": "sgd", "lr": 0.1}))
    ]
    rows = [
        Row("Baseline", PLAIN | normalized),
        Row("TanhConv, cosine", {"magnitude": "tanh", **normalized}),
        Row("LinearConv, sq. cosine", {"magnitude": "linear", "angular": "square_cosine", **normalized}),
    ]
    numbers: dict[str, tuple[Number, ...]] = {
        "TanhConv, cosine": (4.75, 4.75, 21.12, 21.12),
        "LinearConv, sq. cosine": (5.34, 5.34, 20.23, 20.23),
    }
    note = "The paper does not say by which optimizer its numbers came about: they stand in both columns."
    return Table(
        "state-of-the-art",
        "ResNet-32 with weight-normalized softmax",
        "paper-cifar",
        grid(rows, columns, numbers),
        note=note,
    )


def _imagenet() -> Table:
    columns = [
        Row("standard ResNet-18", {"model": "resnet18"}),
        Row("modified ResNet-18", {"model": "resnet18_modified"}),
        Row("modified ResNet-18, no BatchNorm", {"model": "resnet18_modified", "norm": "none"}),
    ]
    rows = [BASELINE, *(OPERATORS[name] for name in ("SphereConv", "LinearConv", "TanhConv"))]
    numbers: dict[str, tuple[Number, ...]] = {
        "Baseline": (12.63, 12.10, NOT_CONVERGED),
        "SphereConv": (12.68, 11.55, 13.30),
        "LinearConv": (11.99, 11.50, NOT_CONVERGED),
        "TanhConv": (12.47, 11.10, 12.79),
    }
    note = (
        "The paper's decoupled networks of the standard ResNet-18 start from the trained baseline: give its run "
        "folder with "
        "--set pretrained=FOLDER. The images are read from --data imagefolder:PATH."
    )
    return Table(
        "imagenet",
        "ResNet-18 on ImageNet-2012",
        "paper-imagenet",
        grid(rows, columns, numbers),
        measure="top5_error",
        note=note,
    )


_DECAY = {"decay_unweighted": True}
_SILENT_SQUARE = {"angular": "square_cosine", "activation": "none"}


def _cause() -> Table:
    """Return the table that separates the gain of the operator from that of the normalized kernel; not in the paper."""
    projected = {"projection": 100, "plain_kernels": "projected"}
    rows = {
        "Baseline": PLAIN,
        "Baseline, no ℓ2 on kernels": WITHOUT_DECAY,
        "Baseline, weight normalization, no ℓ2 on kernels": WITHOUT_DECAY | {"plain_kernels": "normalized"},
        "Baseline, projected, no ℓ2 on kernels": WITHOUT_DECAY | projected,
        "LinearConv, cosine": {"magnitude": "linear"},
        "LinearConv, cosine, projected": {"magnitude": "linear", "projection": 100},
        "TanhConv, cosine": {"magnitude": "tanh"},
        "SegConv, cosine": {"magnitude": "seg"},
        "SegConv, sq. cosine": {"magnitude": "seg", "angular": "square_cosine"},
        "SegConv, sq. cosine, no ReLU": {"magnitude": "seg"} | _SILENT_SQUARE,
        "LinearConv, cosine, ℓ2 on kernels": {"magnitude": "linear"} | _DECAY,
        "TanhConv, cosine, ℓ2 on kernels": {"magnitude": "tanh"} | _DECAY,
        "SegConv, cosine, ℓ2 on kernels": {"magnitude": "seg"} | _DECAY,
        "SegConv, sq. cosine, no ReLU, ℓ2 on kernels": {"magnitude": "seg"} | _SILENT_SQUARE | _DECAY,
    }
    note = "Not in the paper. LinearConv with cosine is the plain convolution with normalized kernels."
    return Table(
        "cause",
        "The operator, or the normalized kernel? CNN-9 on CIFAR-10",
        "fast-cifar",
        grid((Row(*row) for row in rows.items()), [Row("fast-cifar", {})], {}),
        note=note,
    )


def _best() -> Table:
    """Return the table of today's recipe, under which plain and decoupled networks are trained alike; ours."""
    rows = {
        "Baseline": PLAIN,
        "LinearConv, cosine": {"magnitude": "linear"} | _DECAY,
        "SegConv, cosine": {"magnitude": "seg"} | _DECAY,
        "SegConv, sq. cosine, no ReLU": {"magnitude": "seg"} | _SILENT_SQUARE | _DECAY,
        "MixConv, sq. cosine, no ReLU": {"magnitude": "mix"} | _SILENT_SQUARE | _DECAY,
    }
    columns = [Row("CIFAR-10", {"data": "cifar10"}), Row("CIFAR-100", {"data": "cifar100"})]
    note = "Not in the paper, whose best networks have 4.75 and 20.2%. All kernels have ℓ2, the decoupled ones too."
    cells = grid((Row(*row) for row in rows.items()), columns, {})
    return Table("best", "Today's recipe, ResNet-32", "best-cifar", cells, note=note)


TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        Table(
            "weighted",
            "Weighted operators and optimization tricks, ResNet-32 on CIFAR-100",
            "paper-cifar",
            _tricks("resnet32", (22.95, 23.03, 23.38, 23.09, 21.17, 21.45)),
        ),
        Table(
            "weighted-cnn9",
            "Weighted operators and optimization tricks, CNN-9 on CIFAR-100",
            "paper-cifar",
            _tricks("cnn9", None),
            note="The paper has these numbers for ResNet-32 only.",
        ),
        _NO_BATCHNORM,
        _CNN9,
        _ADAM,
        _SGD,
        _state_of_the_art(),
        _imagenet(),
        *ATTACKED,
        _cause(),
        _best(),
    )
}


def find_table(name: str) -> Table:
    """Return the table of that name."""
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}.{nearest(name, TABLES)} Known: {', '.join(TABLES)}")
    return TABLES[name]
