"""For the examples in docstrings, which pytest runs too: formulas that one registers are not there for later tests."""

import pytest


@pytest.fixture(autouse=True)
def formulas_of_examples(request):
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    from dcnet.formulas.catalogue import _CATALOGUES

    before = {kind: dict(known) for kind, known in _CATALOGUES.items()}
    yield
    for kind, known in before.items():
        _CATALOGUES[kind].clear()
        _CATALOGUES[kind].update(known)
