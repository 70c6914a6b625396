"""The code of docs/other-tools.md runs, as far as the packages it is about are installed."""

import re
from pathlib import Path

import pytest
from helpers import needs, packages

PAGE = Path(__file__).parent.parent / "docs" / "other-tools.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.filterwarnings("ignore")  # of other people's packages
@pytest.mark.parametrize(
    "code", BLOCKS, ids=lambda code: "-".join(sorted(packages(code) - {"torch", "dcnet"})) or "dcnet"
)
def test_the_code_runs(code, tmp_path, monkeypatch, catalogue):
    for name in packages(code):
        needs(name)
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec"), scope)
    if "optimizer" in scope:
        decays = {p: group["weight_decay"] for group in scope["optimizer"].param_groups for p in group["params"]}
        assert 0.0 in decays.values()
        for p, decay in decays.items():
            if decay > 0.0:
                assert p.dim() != 4  # kernels of decoupled convolutions do not decay
    if "total" in scope:
        assert scope["total"] > 0
    if "macs" in scope:
        assert scope["macs"] >= 16 * 16 * 16 * 3 * 9


def test_the_page_has_the_code():
    assert len(BLOCKS) >= 7
    assert {"transformers", "lightning", "accelerate", "timm", "fvcore", "ptflops"} <= set().union(
        *map(packages, BLOCKS)
    )
