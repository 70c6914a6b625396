"""A plain PyTorch loop: decoupled layers where `nn.Conv2d` would be, kernels projected to norm 1 every ten steps."""

import torch
import torch.nn.functional as F
from torch import nn

import dcnet
from dcnet.data import load_data

torch.manual_seed(0)
data = load_data("digits")
images, labels = data.train.images / 255.0, data.train.labels
model = nn.Sequential(
    dcnet.DecoupledConv2d(1, 32, 3, padding=1, magnitude="tanh", angular="cosine"),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    dcnet.DecoupledConv2d(32, 64, 3, stride=2, padding=1, magnitude="seg", angular="square_cosine"),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(64 * 16, 10),
)
optimizer = torch.optim.Adam(dcnet.parameter_groups(model, weight_decay=5e-4), lr=3e-3)
dcnet.WeightProjection(model, optimizer, every=10)
for _ in range(3):
    for batch in torch.randperm(len(labels)).split(64):
        loss = F.cross_entropy(model(images[batch]), labels[batch]) + 1e-5 * dcnet.orthogonal_penalty(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
model.eval()
with torch.no_grad():
    accuracy = (model(data.test.images / 255.0).argmax(1) == data.test.labels).float().mean()
print(f"test accuracy {100 * float(accuracy):.2f}%")
