"""The state of a run in memory: network, optimizer, and everything else that a checkpoint needs."""

import copy
import inspect
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dcnet.layers import WeightProjection, average_statistics_, orthogonal_penalty, weight_gradients_
from dcnet.training.adversarial import adversarial_images, adversarial_loss
from dcnet.training.checkpoint import load_checkpoint, save_checkpoint, with_prefix, without_prefix
from dcnet.training.folder import same_but_length
from dcnet.training.graph import BEFORE_CAPTURE, Repeated, uses_graphs
from dcnet.training.loss import classification_loss, likeliest
from dcnet.training.optimizer import load_optimizer_tensors, make_optimizer, optimizer_tensors
from dcnet.training.plain_kernels import OrdinaryProjection
from dcnet.training.ranks import Ranks
from dcnet.training.recipe import Recipe
from dcnet.training.recipe_data import check_same_data
from dcnet.training.recipes import recorded
from dcnet.training.run import Run
from dcnet.training.schedule import Schedule
from dcnet.training.settings import autocast_of
from dcnet.training.start import Start
from dcnet.util.compat import lerp_all_


class TrainingState:
    """The state of a run, and one step of it.

    shape: what `build_model` needs to know about the data. data: what else must not change until the run is continued.
    """

    def __init__(
        self, recipe: Recipe, shape: dict[str, int], data: dict[str, Any], steps: int, ranks: Ranks, start: Start
    ) -> None:
        self.recipe, self.shape, self.data, self.ranks = recipe, shape, data, ranks
        self.graphs, self.of_graphs = uses_graphs(recipe, ranks)
        self.say: Callable[[str], None] = lambda text: None
        model, self.conversion = start.model, start.conversion
        order = torch.channels_last if recipe.channels_last else torch.contiguous_format
        self.order: torch.memory_format = order
        self.model = model.to(ranks.device, memory_format=order)  # type: ignore[call-overload]
        self.ema = _Average(self.model, recipe.ema) if recipe.ema is not None else None
        self.autocast = autocast_of(recipe, ranks.device)
        self.net: nn.Module = torch.compile(self.model) if recipe.compile else self.model  # type: ignore[assignment]
        if ranks.world > 1:
            self.net = _together(self.net, ranks.device)
        self.optimizer = make_optimizer(self.model, recipe, ranks.device, self.graphs)
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=recipe.precision == "fp16")
        self.schedule = Schedule(recipe, steps)
        kind = OrdinaryProjection if recipe.plain_kernels == "projected" else WeightProjection
        self.projection = kind(self.model, self.optimizer, every=recipe.projection) if recipe.projection else None
        if recipe.weighted_gradients:
            weight_gradients_(self.model)
        self.step, self.seconds = 0, 0.0
        # Of the epoch so far: the number of images, and, on the device to avoid waiting for it, the sums of their
        # cross-entropy and of right answers.
        self.images = 0
        self.sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
        # Also on the device: the number of the step, the first step whose loss was not finite (or −1), and a 1 from
        # then on, which stops the optimizer.
        self.device_step = torch.zeros((), dtype=torch.int64, device=ranks.device)
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=ranks.device)
        self.frozen = torch.zeros((), device=ranks.device)
        self.calibrated: dict[
            str, Tensor
        ] = {}  # averages that an evaluation at this step has used, for use when the network is loaded
        self.graph: Repeated | None = None
        self.counts = False  # whether the projection's steps are counted here, not by the optimizer's hook
        self.eager_steps = 0
        self.saved_step, self._saved_at, self._saving = -1, -math.inf, 0.0

    def train_step(self, images: Tensor, labels: Tensor) -> None:
        """Take one step of the optimizer on this rank's share of a batch, unless a loss was not finite."""
        rate = self.recipe.lr * self.schedule.factor(self.step)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        images = images.contiguous(memory_format=self.order)
        if self.graphs and self.graph is None and self.eager_steps == BEFORE_CAPTURE:
            self._record(images, labels)
        if self.graph is not None:
            self.graph(images, labels)
        else:
            self._update(images, labels)
            self.eager_steps += 1
        if self.projection is not None and self.counts:
            self.projection.count()
        self.step += 1
        self.images += len(labels)
        self.calibrated = {}

    def _record(self, images: Tensor, labels: Tensor) -> None:
        """Record a step as a graph. If that fails and the recipe does not insist, say why and continue without it."""
        self.optimizer.zero_grad(set_to_none=True)  # the graph has gradients of its own
        if self.projection is not None:
            self.projection.remove()  # the optimizer's hooks do not run in a graph
            self.counts = True
        try:
            self.graph = Repeated(self._update, images, labels)
        except RuntimeError as error:
            if self.recipe.graphs:
                raise
            self.graphs = False
            self.optimizer.zero_grad(set_to_none=True)
            self.say(f"steps are not repeated as a CUDA graph: {str(error).splitlines()[0]}")

    def _update(self, images: Tensor, labels: Tensor) -> None:
        """Do the part of a step that runs on the device, without waiting for it."""
        recipe, parts, size = self.recipe, self.recipe.accumulate, len(labels)
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=labels.device)
        for number, (some, their) in enumerate(zip(images.chunk(parts), labels.chunk(parts), strict=True)):
            last = number == parts - 1
            if isinstance(self.net, DistributedDataParallel):
                self.net.require_backward_grad_sync = last
            with self.autocast():
                if recipe.adversarial == "none":
                    logits = self.net(some)
                    loss = classification_loss(logits, their, recipe) / size
                else:
                    changed = adversarial_images(self.model, some, their, recipe)
                    loss, logits = adversarial_loss(self.net, some, changed, their, recipe)
                    loss = loss / size
            total += loss.detach()
            with torch.no_grad():
                self.sums += torch.stack(
                    [loss.detach().double() * size, (logits.argmax(1) == likeliest(their)).sum().double()]
                )
            if self.scaler.is_enabled():  # NaN makes the scaler skip the step; `frozen` is not used then
                loss = torch.where(self.bad_step >= 0, float("nan"), loss)
            if recipe.orthogonality and last:
                loss = loss + recipe.orthogonality * orthogonal_penalty(self.model)
            self.scaler.scale(loss).backward()
        self._note_non_finite(total)
        if recipe.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema is not None:
            self.ema.follow(self.model)

    def _note_non_finite(self, loss: Tensor) -> None:
        """Make the optimizer keep the weights unchanged from the first loss on that is not finite."""
        if self.ranks.world > 1:
            torch.distributed.all_reduce(loss)  # the sum is not finite if one of them is not
        self.bad_step.copy_(torch.where(loss.isfinite() | (self.bad_step >= 0), self.bad_step, self.device_step))
        self.device_step += 1
        if not self.scaler.is_enabled():  # the scaler itself skips steps with non-finite gradients
            self.frozen.copy_(self.bad_step >= 0)
            self.optimizer.found_inf = self.frozen  # type: ignore[attr-defined]

    @property
    def evaluated(self) -> nn.Module:
        """The network that is evaluated: the moving average, if there is one."""
        return self.model if self.ema is None else self.ema.model

    def epoch_means(self) -> tuple[float, float]:
        """Return mean loss and accuracy in percent of the epoch so far, over all ranks."""
        loss, right = self.ranks.sum(self.sums.clone()).tolist()
        count = max(1, self.images * self.ranks.world)
        return loss / count, 100.0 * right / count

    def local_means(self) -> tuple[float, float]:
        """Return the same over this rank's images, without waiting for other ranks."""
        loss, right = self.sums.tolist()
        return loss / max(1, self.images), 100.0 * right / max(1, self.images)

    def average_statistics(self) -> None:
        """Make the running averages of all ranks equal, also those of the moving average of the weights."""
        average_statistics_(self.model)
        if self.ema is not None:
            average_statistics_(self.ema.model)

    def check_together(self) -> None:
        """Raise unless all ranks are at the same step."""
        highest, lowest = self.ranks.agree(self.step), -self.ranks.agree(-self.step)
        if highest != lowest:
            raise ValueError(
                f"this process is at step {self.step}, others are at steps {lowest:.0f} to {highest:.0f}: "
                "they do not see the same checkpoint. The run folder must be on a file system that all nodes share",
            )

    def epoch_ended(self) -> None:
        """Start the sums of the next epoch."""
        self.images = 0
        self.sums.zero_()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save_is_due(self) -> bool:
        """Return whether it is time for a checkpoint: writing them may take up to a twentieth of a run."""
        return self.ranks.agree(time.perf_counter() - self._saved_at - 20.0 * self._saving) >= 0.0

    def save(self, run: Run) -> None:
        """Write a checkpoint; call it on all ranks, the first one writes."""
        begun, self.saved_step = time.perf_counter(), self.step
        self._write(run)
        self._saved_at = time.perf_counter()
        self._saving = self._saved_at - begun

    def _write(self, run: Run) -> None:
        self.average_statistics()
        sums = self.ranks.sum(self.sums.clone())  # ranks start again with equal shares
        if not self.ranks.first:
            return
        tensors = with_prefix("model/", self.model.state_dict()) | with_prefix(
            "optimizer/", optimizer_tensors(self.optimizer)
        )
        if self.ema is not None:
            tensors |= with_prefix("ema/", self.ema.model.state_dict())
        tensors |= with_prefix("calibrated/", self.calibrated)
        tensors |= {"random/cpu": torch.get_rng_state(), "sums": sums}
        if self.ranks.device.type == "cuda":
            tensors["random/cuda"] = torch.cuda.get_rng_state(self.ranks.device)
        state = {
            "recipe": asdict(self.recipe),
            "step": self.step,
            "images": self.images * self.ranks.world,
            "seconds": self.seconds,
            "shape": self.shape,
            "data": self.data,
            "conversion": self.conversion,
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "projection": None if self.projection is None else self.projection.state_dict(),
        }
        save_checkpoint(run.checkpoint, tensors, state)

    def restore(self, run: Run) -> None:
        """Go on from the run's checkpoint."""
        tensors, state = load_checkpoint(run.checkpoint)
        if not same_but_length(recorded(state["recipe"]), self.recipe) or state["shape"] != self.shape:
            raise ValueError(
                f"{run.checkpoint} is of another recipe, or of other data, than {run.folder / 'recipe.json'}; "
                "remove it to start again"
            )
        check_same_data(run.folder, self.recipe, state.get("data"), self.data)
        self.model.load_state_dict(without_prefix("model/", tensors))
        load_optimizer_tensors(self.optimizer, without_prefix("optimizer/", tensors))
        if self.ema is not None:
            self.ema.model.load_state_dict(without_prefix("ema/", tensors))
        self.step, self.seconds = state["step"], state["seconds"]
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        if self.projection is not None:
            self.projection.load_state_dict(state["projection"])
        torch.set_rng_state(tensors["random/cpu"])
        if "random/cuda" in tensors and self.ranks.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["random/cuda"], self.ranks.device)
        self.sums = (tensors["sums"] / self.ranks.world).to(self.ranks.device)
        self.images = state["images"] // self.ranks.world
        self.device_step.fill_(self.step)


def _together(net: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Return the network with its gradients averaged over all ranks.

    Running averages are averaged over ranks at evaluations and checkpoints.
    """
    switches = inspect.signature(DistributedDataParallel.__init__).parameters
    switch = (
        "forward_sync_buffers" if "forward_sync_buffers" in switches else "broadcast_buffers"
    )  # its name before torch 2.13
    options: dict[str, Any] = {switch: False}
    return DistributedDataParallel(net, [device] if device.type == "cuda" else None, **options)


class _Average:
    """An exponential moving average of a network, buffers included.

    PyTorch's AveragedModel asks the device whether this is the first step, which waits for a GPU.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.decay = decay

    @torch.no_grad()
    def follow(self, model: nn.Module) -> None:
        """Move one step toward the model."""
        mine, its = [*self.model.parameters(), *self.model.buffers()], [*model.parameters(), *model.buffers()]
        pairs = list(zip(mine, its, strict=True))
        floats = [(a, b) for a, b in pairs if a.is_floating_point()]
        lerp_all_([a for a, _ in floats], [b for _, b in floats], 1.0 - self.decay)
        for a, b in pairs:
            if not a.is_floating_point():
                a.copy_(b)
