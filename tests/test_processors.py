"""What a training says where other programs use the processors too."""

import sys

import pytest
import torch

from dcnet.training import processors
from dcnet.training.processors import SharedProcessors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems' threads wait differently")


@pytest.fixture
def said(monkeypatch):
    """Return a function that trains twenty steps of a second, and returns what was said."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)

    def train(used, threads=2, first=0.0):
        """used: seconds of processors in a step, of which the first one takes `first` more."""
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        now, lines = [0.0, 0.0], []
        monkeypatch.setattr(processors.time, "perf_counter", lambda: now[0])
        monkeypatch.setattr(processors.time, "process_time", lambda: now[1])
        watch = SharedProcessors(lines.append)
        watch.begin(None, 20, 0, 10)
        for step in range(1, 21):
            now[0] += 1.0 + (first if step == 1 else 0.0)
            now[1] += used
            watch.step(step, now[0], None)
        return lines

    return train


def test_it_is_said_once(said):
    (line,) = said(0.6)
    assert "PyTorch's 2 threads get the time of 0.6 processors" in line
    assert "GOMP_SPINCOUNT=2000" in line


def test_nothing_is_said_without_others(said):
    assert said(1.9) == []
    assert said(1.9, first=30.0) == []  # a compiler is waited for


def test_one_thread_waits_for_nobody(said):
    assert said(0.3, threads=1) == []


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_nothing_is_said_to_those_who_know(said, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert said(0.6) == []
