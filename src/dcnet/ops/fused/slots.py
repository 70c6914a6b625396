"""The slots of a call's memory, which `forward`, `backward` and `recompute` in op.py fill in this order."""

from dcnet.ops.fused.launcher import Place
from dcnet.ops.fused.operands import READ_BY_BACKWARD, Operands

FORWARD = (
    *Operands._fields,
    *("batches", "running_norm", "mean_batches", "vectors", "unit", "norms", "scratch", "left", "dot", "out"),
)
BACKWARD = (
    *READ_BY_BACKWARD,
    *("e", "of_left", "out", "dot", "norms", "unit", "vectors", "grad_d", "of_vectors", "behind", "scratch"),
    *("products", "of_mean", "of_w_norm", "grad_x", "grad_unit", "grad_weight"),
)


def places_of(slots: tuple[str, ...]) -> dict[str, Place]:
    """Return the places of slots by name."""
    return {name: Place(i) for i, name in enumerate(slots)}
