"""The imports go one way, and `import dcnet` is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dcnet

ROOT = Path(dcnet.__file__).parent
# Each part of the package, and the parts it may import.
ALLOWED = {
    "version": set(),
    "util": set(),
    "formulas": {"util"},
    "ops": {"util", "formulas"},
    "layers": {"util", "formulas", "ops"},
    "models": {"util", "formulas", "ops", "layers"},
    "data": {"util", "formulas"},
    "training": {"util", "version", "formulas", "ops", "layers", "models", "data", "robustness"},
    "inspection": {"util", "ops", "layers", "models", "data", "robustness", "training"},
    "figures": {"util", "formulas", "ops", "inspection", "robustness", "training"},
    "explorer": {"util", "formulas", "ops", "layers"},
    "report": {"util", "version", "training", "inspection", "figures", "robustness"},
    "tables": {"util", "formulas", "training"},
    "robustness": {"util", "formulas"},
    "bench": {"util", "formulas", "ops", "layers", "models"},
    "cli": {
        *("util", "formulas", "ops", "layers", "models", "data", "training", "robustness"),
        *("inspection", "figures", "report", "explorer", "bench", "tables", ""),
    },
    "__main__": {"cli"},
    "": {"formulas", "ops", "layers", "models", "training", "robustness", "version"},  # dcnet/__init__.py
}


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    name = relative.parts[0] if len(relative.parts) > 1 else relative.stem
    return "" if name == "__init__" else name


def imported_parts(path: Path) -> set[str]:
    """The parts of dcnet a file imports, wherever in the file."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            modules |= (
                {f"{node.module}.{alias.name}" for alias in node.names}
                if node.module == "dcnet"
                else {node.module or ""}
            )
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return {module.split(".")[1] if "." in module else "" for module in modules if module.split(".")[0] == "dcnet"}


SOURCES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    part = part_of(path)
    assert part in ALLOWED, f"{part!r} has no place in the architecture yet"
    upwards = imported_parts(path) - ALLOWED[part] - {part}
    assert not upwards, f"{path.relative_to(ROOT)} imports {upwards}, which lies above it"


def test_the_test_sees_a_reversed_arrow(tmp_path):
    file = tmp_path / "norms.py"
    file.write_text("def f():\n    from dcnet.layers.conv import DecoupledConv2d\n")
    assert imported_parts(file) - ALLOWED["ops"] == {"layers"}
    file.write_text("import dcnet\n")
    assert imported_parts(file) - ALLOWED["ops"] == {""}


def test_import_is_light():
    code = """
import sys, time
start = time.perf_counter()
import dcnet
seconds = time.perf_counter() - start
suspects = ("triton", "dcnet.ops.fused", "matplotlib", "typer", "rich", "torchvision", "torch._inductor")
heavy = [name for name in suspects if name in sys.modules and name not in before]
assert not heavy, heavy
assert not torch.cuda.is_initialized()
print(seconds, of_torch)
"""
    code = (
        "import time\nstart = time.perf_counter()\nimport torch, sys\nof_torch = time.perf_counter() - "
        "start\nbefore = set(sys.modules)\n" + code
    )
    runs = []
    for _ in range(3):  # on a busy machine everything takes longer, PyTorch too
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds, of_torch = map(float, done.stdout.split())
        runs.append((seconds, of_torch))
        if seconds < max(0.3, 0.15 * of_torch):
            break
    else:
        pytest.fail(f"import dcnet takes too long (seconds, of which PyTorch): {runs}")


def test_files_fit_on_a_few_screens():
    assert {str(path): lines for path in SOURCES if (lines := len(path.read_text().splitlines())) > 300} == {}
