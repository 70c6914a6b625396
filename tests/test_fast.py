"""Launching again: the same arguments as Triton's own way, from the second time on without it."""

import pytest
import torch

pytest.importorskip("triton")

from dcnet.ops.fused.fast import Launcher, aligned


class Compiled:
    """What Triton gives back; notes how it is run."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.runs = []

    def run(self, *arguments):
        self.runs.append(arguments)


class Kernel:
    """A kernel as Triton hands it out; notes how it is launched."""

    def __init__(self):
        self.compiled, self.launches = Compiled(), []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.launches.append((grid, arguments, options))
            return self.compiled

        return launch


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)


def test_the_second_launch_is_direct(stream):
    kernel = Kernel()
    launcher = Launcher(kernel, (5, 2), (3, True, "H"), warps=8)
    tensors, scratch = [torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)], torch.zeros(16)
    launcher(tensors, [(scratch, 0), (scratch, 8)], 0.5)
    ((grid, arguments, options),) = kernel.launches
    assert (grid, options) == ((5, 2, 1), {"num_warps": 8})
    assert [a.data_ptr() for a in arguments[:4]] == [*(t.data_ptr() for t in tensors), scratch.data_ptr(), scratch.data_ptr() + 32]
    assert arguments[4:] == (0.5, 3, True, "H")

    others = [torch.ones(4), torch.ones(4, dtype=torch.bfloat16)]
    launcher(others, [(scratch, 4), (scratch, 0)], 0.25)
    assert len(kernel.launches) == 1
    addresses = [*(t.data_ptr() for t in others), scratch.data_ptr() + 16, scratch.data_ptr()]
    assert kernel.compiled.runs == [(5, 2, 1, 77, "function", "metadata", None, None, None, *addresses, 0.25, 3, True, "H")]


def test_unaligned_pointers_go_through_triton(stream):
    """A variant is compiled for aligned pointers; others need one of their own."""
    kernel = Kernel()
    launcher = Launcher(kernel, (1,), ())
    scratch = torch.zeros(16)
    for tensor in (torch.zeros(9)[1:], torch.zeros(8), torch.zeros(9)[1:], torch.zeros(8)):
        launcher([tensor], [(scratch, 0)])
    assert len(kernel.launches) == 3
    assert len(kernel.compiled.runs) == 1


def test_pieces_are_aligned():
    assert [aligned(size) for size in (0, 1, 4, 5)] == [0, 4, 4, 8]
