"""A model card: what a trained network is, its training data, how accurate and how robust it is.

It also says how far the measured robustness can be trusted.
"""

from typing import Any

from dcnet.training.recipes import recorded
from dcnet.util.text import count
from dcnet.version import __version__


def model_card(about: dict[str, Any], name: str = "NAME") -> str:
    """Return the card in Markdown, with the header that the Hugging Face hub reads.

    about: the description of a network that `save_weights` writes.
    """
    recipe, shape, result = recorded(about["recipe"]), about["shape"], about.get("result")
    operator = (
        "plain convolutions"
        if recipe.magnitude is None
        else f"`{recipe.magnitude}` magnitude, `{recipe.angular}` angle"
    )
    if recipe.weighting is not None:
        operator += f", weighting `{recipe.weighting}`"
    data = "a folder of images" if recipe.data.startswith("imagefolder:") else recipe.data
    size = shape["input_size"]
    lines = [
        *("---", "library_name: dcnet", "pipeline_tag: image-classification"),
        *("tags:", "- decoupled-networks", "- image-classification", "---"),
        f"# {recipe.model}, {operator}, trained on {data}\n",
        "A decoupled network (Liu et al., CVPR 2018): convolutions compute h(‖w‖, ‖x‖)·g(θ) in place of ⟨w, x⟩.\n",
        *("| | |", "|---|---|"),
        f"| network | `{recipe.model}` |",
        f"| operator | {operator} |",
        f"| data | {data}: {shape['num_classes']} classes, {shape['in_channels']}×{size}×{size} |",
    ]
    if about.get("conversion"):
        converted = count(len(about["conversion"]), "layer")
        lines.append(f"| converted | {converted} of a trained plain network, then fine-tuned |")
    if result is not None:
        lines += [
            f"| test accuracy | {result['accuracy']:.2f}%, after {count(result['epochs'], 'epoch')} |",
            f"| parameters | {result['parameters']:,} |",
        ]
    lines += [
        *("", "## Use\n", "Images in [0, 1] go in, logits come out; normalization is part of the network.\n"),
        *("```python", "import dcnet\n", f'model = dcnet.HubModel.from_pretrained("{name}")', "```\n"),
        *("## Robustness\n", _robustness(about.get("robustness"))),
        f"\nMade by dcnet {__version__}. The whole recipe is in `config.json`.",
    ]
    return "\n".join(lines) + "\n"


def _robustness(found: dict[str, Any] | None) -> str:
    if found is None:
        return "Not attacked: nothing is known about it. Do not expect any."
    eps = "" if found["eps"] is None else f" at ε = {255 * found['eps']:.3g}/255"
    rows = "\n".join(f"| {attack} | {accuracy:.2f}% |" for attack, accuracy in found["attacks"].items())
    verdict = found["verdict"] or "There was no check-up for misleading gradients, so these figures may say little."
    table = f"| attack{eps}, {found['images']} images | accuracy |\n|---|---|\n| none | {found['clean']:.2f}% |\n{rows}"
    return f"{table}\n\nCheck-up: {verdict}"
