"""What the paper leaves open, as fields of a recipe."""

import pytest
import torch
from torch import nn

import dcnet
from dcnet.training import adversarial, build_model
from dcnet.training.loss import FLOOR, classification_loss
from dcnet.training.plain_kernels import ordinary_layers

SHAPE = {"num_classes": 10, "in_channels": 1, "input_size": 8}


def test_the_authors_loss():
    """−log(softmax + 1e-4) with smoothed targets, written out; the floor bounds the loss of a badly wrong image."""
    logits, labels = torch.randn(6, 10), torch.arange(6)
    recipe = dcnet.make_recipe(loss="floored", label_smoothing=0.01)
    targets = nn.functional.one_hot(labels, 10) * 0.99 + 0.001
    expected = -(targets * (logits.softmax(1) + 1e-4).log()).sum()
    torch.testing.assert_close(classification_loss(logits, labels, recipe), expected)
    wrong = torch.tensor([[0.0, 1000.0]])
    assert (
        classification_loss(wrong, torch.tensor([0]), dcnet.make_recipe(loss="floored"))
        <= -torch.tensor(FLOOR).log() + 1e-4
    )
    plain = classification_loss(logits, labels, dcnet.make_recipe(label_smoothing=0.01))
    torch.testing.assert_close(
        plain, nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.01)
    )


@pytest.mark.parametrize("kind", ["projected", "normalized"])
def test_kernels_of_the_plain_network(kind, tmp_path):
    recipe = dcnet.make_recipe(magnitude=None, plain_kernels=kind, projection=2, steps=2, batch=256)
    run = dcnet.train(recipe, tmp_path / kind, device="cpu", quiet=True)
    layers = ordinary_layers(run.model)
    assert len(layers) == 10  # nine convolutions and the layer before the classifier, which is left alone
    for layer in layers:
        assert nn.utils.parametrize.is_parametrized(layer, "weight") == (kind == "normalized")
        if kind == "projected":
            torch.testing.assert_close(layer.weight.flatten(1).norm(dim=1), torch.ones(len(layer.weight)))
    free = build_model(dcnet.make_recipe(magnitude=None), SHAPE)
    assert not torch.allclose(free.stages[0].conv.weight.flatten(1).norm(dim=1), torch.ones(32), atol=0.05)


def test_predicted_labels_in_adversarial_training():
    """Images are made for what the network says: another step where it is wrong, the same where it is right."""
    model = build_model(dcnet.make_recipe(magnitude=None), SHAPE).eval()
    images = torch.rand(8, 1, 8, 8)
    said = model(images).argmax(1)
    recipes = [dcnet.make_recipe(adversarial="fgsm", adversarial_labels=labels) for labels in ("true", "predicted")]
    for labels, same in ((said, True), ((said + 1) % 10, False)):
        true, predicted = (adversarial.adversarial_images(model, images, labels, recipe) for recipe in recipes)
        assert torch.equal(true, predicted) == same
