"""The list of planted mistakes keeps up with the code: each has one place in the source, and tests that exist."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
mutants = importlib.util.module_from_spec(spec)


@pytest.fixture(scope="module", autouse=True)
def loaded():
    import sys

    sys.modules[spec.name] = mutants  # dataclasses look there
    spec.loader.exec_module(mutants)


def test_every_mutant_has_one_place():
    found = {}
    for mutant in mutants.MUTANTS:
        path = ROOT / "src" / "dcnet" / mutant.file
        count = path.read_text().count(mutant.old) if path.is_file() else 0
        if count != 1:
            found[mutant.name] = f"{mutant.file} has {mutant.old!r} {count} times"
        assert mutant.new != mutant.old
    assert not found, "\n".join(f"{name}: {why}" for name, why in found.items())


def test_every_mutant_has_its_tests():
    missing = {
        test for mutant in mutants.MUTANTS for test in mutant.tests.split() if not (ROOT / "tests" / test).is_file()
    }
    assert not missing


def test_names_differ():
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(set(names)) == len(names)
