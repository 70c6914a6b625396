"""Every kernel goes through Triton's compiler, for a GPU that need not be there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "operator", ["tanh", pytest.param("log", marks=pytest.mark.slow), pytest.param("sphere", marks=pytest.mark.slow)]
)
def test_kernels_compile(tmp_path, operator):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, script, operator], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == {"tanh": 24, "log": 23, "sphere": 22}[operator]
    assert all(int(line.split(", ")[-1].split()[0]) > 1000 for line in lines)
