"""The imports go one way, and `import dcnet` is light."""

import ast
import importlib
import re
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
    "fusing": {"util", "ops", "layers"},
    "converting": {"util", "formulas", "ops", "layers", "fusing"},
    "models": {"util", "layers"},
    "data": {"util", "formulas"},
    "deploy": {"util", "version", "formulas", "ops", "layers", "fusing", "converting"},
    "training": {
        *("util", "version", "formulas", "ops", "layers", "fusing", "converting"),
        *("deploy", "models", "data", "robustness"),
    },
    "inspection": {"util", "ops", "layers", "models", "data", "robustness", "explaining", "training"},
    "figures": {"util", "formulas", "ops", "inspection", "robustness", "training"},
    "explorer": {"util", "formulas", "ops", "layers"},
    "report": {"util", "version", "training", "inspection", "figures", "robustness"},
    "tables": {"util", "formulas", "data", "robustness", "training", "figures"},
    "robustness": {"util", "formulas"},
    "explaining": {"util", "layers", "robustness"},
    "bench": {"util", "formulas", "ops", "layers", "fusing", "converting", "models"},
    "cli": {
        *("util", "formulas", "ops", "layers", "models", "data", "training", "robustness"),
        *("inspection", "figures", "report", "explorer", "bench", "tables", "deploy", ""),
    },
    "__main__": {"cli"},
    "": {
        "formulas",
        "ops",
        "layers",
        "fusing",
        "converting",
        "deploy",
        "models",
        "training",
        "robustness",
        "explaining",
        "version",
        # when they are asked for, and for type checkers
        *("bench", "explorer", "figures", "inspection", "report", "tables"),
    },  # dcnet/__init__.py
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


# Inside `ops`, from the ground up: a module imports only what stands before it (`fused` is imported where it is used).
OPS = [
    *("documentation", "checks", "geometry", "norms", "operator", "mean_norm", "activations", "post_ops", "inputs"),
    *("reference", "composite", "cpu", "fused", "dispatch", "api", "flops", ""),
]
FUSED = [
    *(
        "layout",
        "launcher",
        "native",
        "once",
        "graph_sums",
        "compile_worker",
        "compilers",
        "instructions",
        "triton_math",
        "triton_math16",
        "kernels",
        "formulas",
        "operands",
        "norm_plan",
        "depthwise_plan",
        "tiles",
    ),
    *("plan", "first_use", "op", "host", "library", "autograd", "api", ""),
]
CPU = [
    *(
        "chunks",
        "tanh_interpolation",
        "rewriting",
        "placement",
        "record",
        "native",
        "passes",
        "box_sum",
        "convolution",
        "depthwise",
        "native_depthwise",
        "native_layer",
        "autograd",
    ),
    "",
]


@pytest.mark.parametrize(("folder", "order"), [("ops", OPS), ("ops/fused", FUSED), ("ops/cpu", CPU)])
def test_imports_inside_ops_go_one_way(folder, order):
    package = "dcnet." + folder.replace("/", ".")
    for path in sorted((ROOT / folder).rglob("*.py")):
        inner = path.relative_to(ROOT / folder).parts
        here = inner[0].removesuffix(".py").replace("__init__", "") if len(inner) == 1 else inner[0]
        assert here in order, f"{package}.{here} has no place in the order yet"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("dcnet") for alias in node.names), f"{path}: from … import …"
            if isinstance(node, ast.ImportFrom) and (
                node.module == package or (node.module or "").startswith(package + ".")
            ):
                rest = (node.module or "").removeprefix(package).strip(".").split(".")[0]
                for name in [rest] if rest else [alias.name for alias in node.names]:
                    lower = name == here or order.index(name) < order.index(here)
                    assert lower, f"{path.relative_to(ROOT)} imports {name}, which stands above it"


PRIVATE = re.compile(
    r"\btorch\._[a-zA-Z]|\._C\b|forward_ad\._|nn\.modules\.\w+\._|from (torch|triton)\S* import _[A-Z]"
    r"|_unsafe_update_src"
)


def test_private_names_are_in_one_file():
    """Private names of PyTorch are in `util/compat.py` only, those of Triton in `util/compat_triton.py`.

    `compile_worker.py` has some too: it works without this package. PyTorch's manual itself uses
    `torch._inductor.aoti_load_package` and `torch.utils._pytree`.
    """
    files = ("util/compat.py", "util/compat_triton.py", "ops/fused/compile_worker.py")
    found = {
        f"{path.relative_to(ROOT)}:{number}": line.strip()
        for path in SOURCES
        if path.relative_to(ROOT).as_posix() not in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE.search(line.replace("torch._inductor", ""))
        and "logging" not in line
        and '"torch._export"' not in line
    }
    assert found == {}


def test_the_test_sees_a_reversed_arrow(tmp_path):
    file = tmp_path / "norms.py"
    file.write_text("def f():\n    from dcnet.layers.conv import DecoupledConv2d\n")
    assert imported_parts(file) - ALLOWED["ops"] == {"layers"}
    file.write_text("import dcnet\n")
    assert imported_parts(file) - ALLOWED["ops"] == {""}


def test_import_is_light():
    code = """
import sys, time
start = time.process_time()
import dcnet
seconds = time.process_time() - start
suspects = ("triton", "dcnet.ops.fused", "matplotlib", "typer", "rich", "torchvision", "torch._inductor")
heavy = [name for name in suspects if name in sys.modules and name not in before]
assert not heavy, heavy
assert not torch.cuda.is_initialized()
print(seconds, of_torch)
"""
    code = (
        "import time\nstart = time.process_time()\nimport torch, sys\nof_torch = time.process_time() - "
        "start\nbefore = set(sys.modules)\n" + code
    )
    runs = []
    for _ in range(3):  # CPU time; a busy machine makes everything slower, PyTorch too
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds, of_torch = map(float, done.stdout.split())
        runs.append((seconds, of_torch))
        if seconds < max(0.3, 0.3 * of_torch):
            break
    else:
        pytest.fail(f"import dcnet takes too long (seconds, of which PyTorch): {runs}")


def test_files_fit_on_a_few_screens():
    assert {str(path): lines for path in SOURCES if (lines := len(path.read_text().splitlines())) > 300} == {}


def test_kernels_have_few_parameters():
    """As many as one can read, and as ARCHITECTURE.md says."""
    functions = [
        node
        for path in (ROOT / "ops" / "fused" / "kernels").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    largest = max(len(one.args.args) + len(one.args.kwonlyargs) for one in functions)
    assert largest <= 60
    page = ROOT.parent.parent / "ARCHITECTURE.md"
    if page.is_file():
        assert f"The largest kernel has {largest} parameters." in page.read_text(encoding="utf-8")


def test_the_size_in_architecture_md(monkeypatch):
    """Made by `python tools/size.py`."""
    repository = ROOT.parent.parent
    page = repository / "ARCHITECTURE.md"
    if not page.is_file():
        pytest.skip("dcnet is installed without its repository")
    monkeypatch.syspath_prepend(str(repository / "tools"))
    size = importlib.import_module("size")
    assert page.read_text(encoding="utf-8").split(size.BEGIN)[1].split(size.END)[0].strip() == size.table()
    python = '"""Two\nlines."""\n\n# a comment\nx = """a\nb"""\n\ndef f():\n    "Do."\n    return 1  # why\n'
    assert size.lines_of_python(python) == 4
    assert size.lines_of_c("/* one\ntwo */\nint x; // three\n// four\n\n") == 1
