"""A training step as a CUDA graph: recorded once, then repeated without the host's help."""

from collections.abc import Callable

import torch
from torch import Tensor

from dcnet.training.ranks import Ranks
from dcnet.training.recipe import Recipe

BEFORE_CAPTURE = 11  # steps: PyTorch chooses algorithms in the first ones, and kernels are compiled


def uses_graphs(recipe: Recipe, ranks: Ranks) -> tuple[bool, str]:
    """Tell whether to repeat steps as a graph, with a note about it ("" if the recipe decides).

    Raise, with every reason, if the recipe asks for graphs and that is impossible.
    """
    if recipe.graphs is False:
        return False, ""
    reasons = reasons_against_graphs(recipe, ranks)
    if recipe.graphs and reasons:
        raise ValueError(
            f"graphs=True does not go here: {'; '.join(reasons)}. Train without them: graphs=False, --no-graphs"
        )
    if recipe.graphs or ranks.device.type != "cuda":
        return bool(recipe.graphs), ""
    if reasons:
        return False, f"steps are not repeated as a CUDA graph: {'; '.join(reasons)}"
    return True, f"from step {BEFORE_CAPTURE + 1} on, steps are repeated as a CUDA graph; --no-graphs to do without"


def reasons_against_graphs(recipe: Recipe, ranks: Ranks) -> list[str]:
    """Return every reason why a step cannot be recorded."""
    return [
        reason
        for applies, reason in (
            (ranks.device.type != "cuda", f"the device is {ranks.device.type}, and CUDA graphs need a GPU"),
            (ranks.world > 1, f"{ranks.world} processes train together, which have to wait for each other"),
            (recipe.compile, "compile=True has ways of its own (its mode reduce-overhead)"),
            (recipe.precision == "fp16", "precision='fp16' decides on the host whether a step is taken"),
            (
                recipe.data.startswith("imagefolder:"),
                "the images come from worker processes, which are slower than the host",
            ),
        )
        if applies
    ]


class Repeated:
    """A function of images and labels as a CUDA graph, repeated for other images and labels of the same shape."""

    def __init__(self, update: Callable[[Tensor, Tensor], None], images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images.clone(), labels.clone()
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):  # records, and does nothing
            update(self.images, self.labels)

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        self.images.copy_(images)
        self.labels.copy_(labels)
        self.graph.replay()
