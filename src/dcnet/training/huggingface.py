"""Networks on the Hugging Face hub, by the mixin of huggingface_hub.

It has `push_to_hub`, `save_pretrained` and `from_pretrained`. `dcnet.HubModel` imports this file when it is asked for.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

try:
    from huggingface_hub import ModelCard, PyTorchModelHubMixin
except ImportError as error:
    raise ImportError("the Hugging Face hub needs huggingface_hub: pip install 'dcnet[hub]'") from error

from dcnet.training.card import model_card
from dcnet.training.own_formulas import FILE as FORMULAS
from dcnet.training.recipes import recorded
from dcnet.training.run import Run, build_model
from dcnet.training.weights import check_own_formulas, read_weights, robustness_of


class HubModel(nn.Module, PyTorchModelHubMixin):  # type: ignore[misc]
    """A trained network in the form of the hub.

    The weights are in model.safetensors, recipe and conversion in config.json, and there is a model card.

    Make one with `HubModel.from_run("runs/NAME")` or `HubModel.from_pretrained("folder or owner/name")`. Files
    execute nothing: formulas of your own must be registered here, a network of your own must be trusted by
    `dcnet.trust_model`, and pickles are not loaded.

    Args:
        recipe: the fields of the recipe.
        shape: of its data: num_classes, in_channels, input_size.
        conversion: for a network that was plain first, the result of `dcnet.conversion_of`.
        result: of the run, for the model card.
        robustness: the results of attacks, for the model card.
        formulas: the source of formulas of your own, which must be registered here.
    """

    def __init__(
        self,
        recipe: dict[str, Any],
        shape: dict[str, int],
        conversion: dict[str, Any] | None = None,
        result: dict[str, Any] | None = None,
        robustness: dict[str, Any] | None = None,
        formulas: str | None = None,
    ) -> None:
        super().__init__()
        self.about = {
            "recipe": recipe,
            "shape": shape,
            "conversion": conversion,
            "result": result,
            "robustness": robustness,
        }
        chosen = recorded(recipe)
        check_own_formulas(Path("config.json"), formulas, chosen)
        self.net = build_model(chosen, shape, conversion)
        self.eval()

    @classmethod
    def from_run(cls, folder: str | Path) -> "HubModel":
        """Return the network of a run folder."""
        run = Run(folder)
        network = run.model
        own = run.folder / FORMULAS
        model = cls(
            recipe=asdict(run.recipe),
            shape=run.shape,
            conversion=None if run.conversion is None else dict(run.conversion),
            result=run.result,
            robustness=robustness_of(run),
            formulas=own.read_text(encoding="utf-8") if own.is_file() else None,
        )
        model.net.load_state_dict(network.state_dict())
        return model

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, classes) of images (N, C, H, W) in [0, 1]."""
        return self.net(x)  # type: ignore[no-any-return]

    def generate_model_card(self, *arguments: Any, **options: Any) -> Any:
        """Return the card: operator, data, accuracy, and what attacks and their check-up found."""
        return ModelCard(model_card(self.about, options.get("repo_id", "owner/name")))

    @classmethod
    def _load_as_pickle(cls, model: Any, model_file: str, map_location: str, strict: bool) -> Any:
        raise ValueError(f"{model_file} is a pickle, and pickles are never loaded; model.safetensors is needed")

    @classmethod
    def _load_as_safetensor(cls, model: Any, model_file: str, map_location: str, strict: bool) -> Any:
        tensors, _ = read_weights(model_file)
        try:
            model.load_state_dict(tensors)
        except RuntimeError as error:
            raise ValueError(f"{model_file} does not fit the recipe in config.json beside it: {error}") from error
        return model.to(map_location).eval()
