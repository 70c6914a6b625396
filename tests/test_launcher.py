"""Launching again: the same arguments as Triton's own way, from the second time on without it."""

import pytest
import torch

pytest.importorskip("triton")

from dcnet.ops.fused.launcher import Changing, Launcher, Memory, Place
from dcnet.ops.fused.layout import Regions


def launch_nothing():
    """What the kernel is called after."""


class Compiled:
    """What Triton gives back; notes how it is run."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.runs = []

    def run(self, *arguments):
        self.runs.append(arguments)


class Kernel:
    """A kernel as Triton hands it out; notes how it is launched."""

    def __init__(self, *names):
        self.compiled, self.launches, self.arg_names, self.fn = Compiled(), [], names, launch_nothing

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.launches.append((grid, arguments, options))
            return self.compiled

        return launch


def test_the_second_launch_is_direct():
    kernel = Kernel("a", "b", "c", "d", "absent", "rate", "size", "FLAG", "H")
    values = {"size": 3, "H": "H", "FLAG": True, "rate": Changing(0), "absent": None}
    places = {"b": Place(0), "a": Place(1), "d": Place(2, 8), "c": Place(2)}
    launcher = Launcher(kernel, (5, 2), values | places, warps=8)
    tensors = [torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(16)]
    launcher(Memory(tensors), 0.5)
    ((grid, arguments, options),) = kernel.launches
    assert (grid, options) == ((5, 2, 1), {"num_warps": 8})
    expected = [tensors[1].data_ptr(), tensors[0].data_ptr(), tensors[2].data_ptr(), tensors[2].data_ptr() + 32]
    assert [a.data_ptr() for a in arguments[:4]] == expected
    assert arguments[4:] == (None, 0.5, 3, True, "H")

    others = [torch.ones(4), torch.ones(4, dtype=torch.bfloat16), None]
    memory, last = Memory(others), torch.zeros(16)
    memory.stream = 77
    memory.put(2, last)
    launcher(memory, 0.25)
    assert len(kernel.launches) == 1
    addresses = [others[1].data_ptr(), others[0].data_ptr(), last.data_ptr(), last.data_ptr() + 32]
    assert kernel.compiled.runs == [
        (5, 2, 1, 77, "function", "metadata", None, None, None, *addresses, None, 0.25, 3, True, "H")
    ]


def test_unaligned_pointers_go_through_triton():
    """A variant is compiled for aligned pointers; others need one of their own."""
    kernel = Kernel("a", "b")
    launcher = Launcher(kernel, (1,), {"a": Place(0), "b": Place(1)})
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


def test_a_wrong_name_is_an_error():
    with pytest.raises(TypeError, match=r"launch_nothing needs \['b'\] and knows no \['c'\]"):
        Launcher(Kernel("a", "b"), (1,), {"a": 1, "c": 2})


def test_an_operand_that_is_not_there():
    """A place must be filled before the launch."""
    with pytest.raises(AssertionError, match="launch_nothing: b is not there"):
        Launcher(Kernel("a", "b"), (1,), {"a": Place(0), "b": Place(1)})(Memory([torch.zeros(4), None]))


def test_regions_are_aligned():
    regions = Regions(nothing=0, one=1, four=4, five=5, last=1)
    assert [regions.at(name) for name in ("nothing", "one", "four", "five", "last")] == [0, 0, 4, 8, 16]
    assert regions.size == 20
    assert regions.view(torch.arange(20.0), "five").tolist() == [8.0, 9.0, 10.0, 11.0, 12.0]
    packed = Regions(start=4, packed=True, one=1, two=2)
    assert [packed.at(name) for name in ("one", "two")] == [4, 5]
    assert packed.size == 8
