"""For the examples in docstrings, which pytest runs too: formulas that one registers are not there for later tests."""

from importlib.util import find_spec

import pytest

# which imports a package that need not be there
collect_ignore = [] if find_spec("huggingface_hub") else ["src/dcnet/training/huggingface.py"]


@pytest.fixture(autouse=True)
def formulas_of_examples(request):
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    from dcnet.formulas.catalogue import CATALOGUES

    before = {kind: dict(known) for kind, known in CATALOGUES.items()}
    yield
    for kind, known in before.items():
        CATALOGUES[kind].clear()
        CATALOGUES[kind].update(known)
