"""The code of docs/your-model.md runs from the first block to the last, where its packages are installed."""

import re
from pathlib import Path

import pytest
import torch
from helpers import needs

PAGE = Path(__file__).parent.parent / "docs" / "your-model.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_page_has_the_code():
    assert len(BLOCKS) >= 7
    for word in ("decouple_", "where=", "parameter_groups", "export(model", "load_weights_", "onnxruntime", "couple_"):
        assert word in "".join(BLOCKS), word


@pytest.mark.filterwarnings("ignore")  # of other people's packages
def test_the_code_runs(tmp_path, monkeypatch):
    for name in ("timm", "onnx", "onnxscript", "onnxruntime"):
        needs(name)
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "page"}
    seen = {}
    for number, code in enumerate(BLOCKS):
        exec(compile(code, f"{PAGE}, block {number}", "exec"), scope)
        if "gates" in scope and "gates" not in seen:
            seen["gates"] = scope["gates"]
        if "session" in scope and "expected" not in seen:
            with torch.no_grad():
                seen["expected"] = scope["again"](scope["images"][:1])
    assert seen["gates"]
    assert (tmp_path / "model.onnx").is_file()
    torch.testing.assert_close(torch.from_numpy(scope["logits"]), seen["expected"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(scope["after"], scope["before"], rtol=1e-3, atol=1e-4)
    assert len(scope["report"].coupled) == 20
