"""TensorBoard, as a callback."""

from typing import Any

from dcnet.training.callback import Callback
from dcnet.training.run import Run


class TensorBoard(Callback):
    """Write the metrics of every epoch for TensorBoard, into `tensorboard/` of the run folder."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:  # now rather than after the first epoch
            raise ImportError("TensorBoard is not installed: pip install 'dcnet[tensorboard]'") from error
        self._open = SummaryWriter
        self._writer: Any = None

    def begin(self, run: Run, steps: int, done: int, per_epoch: int) -> None:
        self._writer = self._open(str(run.folder / "tensorboard"))

    def epoch(self, entry: dict[str, Any]) -> None:
        for name, value in entry.items():
            if name == "learned":  # parameter, layer, five quantiles: the median is shown
                for parameter, layers in value.items():
                    for layer, quantiles in layers.items():
                        self._writer.add_scalar(f"{parameter}/{layer}", quantiles[2], entry["step"])
            elif name != "step":
                self._writer.add_scalar(name, value, entry["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
