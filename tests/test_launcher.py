"""Launching again: the same arguments as Triton's own way, from the second time on without it."""

import pytest
import torch

pytest.importorskip("triton")

from dcnet.ops.fused.launcher import Launcher, Memory, aligned


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


def test_the_second_launch_is_direct():
    kernel = Kernel()
    launcher = Launcher(kernel, (5, 2), [(1, 0), (0, 0), (2, 0), (2, 8)], (3, True, "H"), warps=8)
    tensors = [torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(16)]
    launcher(Memory(tensors), 0.5)
    ((grid, arguments, options),) = kernel.launches
    assert (grid, options) == ((5, 2, 1), {"num_warps": 8})
    expected = [tensors[1].data_ptr(), tensors[0].data_ptr(), tensors[2].data_ptr(), tensors[2].data_ptr() + 32]
    assert [a.data_ptr() for a in arguments[:4]] == expected
    assert arguments[4:] == (0.5, 3, True, "H")

    others = [torch.ones(4), torch.ones(4, dtype=torch.bfloat16), None]
    memory, last = Memory(others), torch.zeros(16)
    memory.stream = 77
    memory.put(2, last)
    launcher(memory, 0.25)
    assert len(kernel.launches) == 1
    addresses = [others[1].data_ptr(), others[0].data_ptr(), last.data_ptr(), last.data_ptr() + 32]
    assert kernel.compiled.runs == [
        (5, 2, 1, 77, "function", "metadata", None, None, None, *addresses, 0.25, 3, True, "H")
    ]


def test_unaligned_pointers_go_through_triton():
    """A variant is compiled for aligned pointers; others need one of their own."""
    kernel = Kernel()
    launcher = Launcher(kernel, (1,), [(0, 0), (1, 0)], ())
    for first, second in (
        (torch.zeros(9)[1:], torch.zeros(8)),
        (torch.zeros(8), torch.zeros(8)),
        (torch.zeros(8), torch.zeros(9)[1:]),
    ):
        memory = Memory([first, None])
        memory.put(1, second)
        launcher(memory)
    launcher(Memory([torch.zeros(8), torch.zeros(8)]))
    assert len(kernel.launches) == 3
    assert len(kernel.compiled.runs) == 1


def test_pieces_are_aligned():
    assert [aligned(size) for size in (0, 1, 4, 5)] == [0, 4, 4, 8]
