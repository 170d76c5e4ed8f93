"""docs/training-patterns.md: its tests exist, its settings are valid, its figures are there."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training-patterns.md").read_text()
TESTS = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)))


@pytest.fixture(scope="module")
def patterns():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import trainer.patterns
    finally:
        sys.path.pop(0)
    return trainer.patterns


def test_each_row_has_a_test():
    rows = [line for line in PAGE.splitlines() if re.match(r"\| (?!Pattern )", line)]
    assert len(rows) > 60
    assert [row for row in rows if "::test_" not in row] == []


@pytest.mark.parametrize(("file", "name"), TESTS, ids=[name for _, name in TESTS])
def test_the_test_of_a_row_exists(file: str, name: str):
    assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE)


def test_settings_are_valid_and_have_a_figure(patterns):
    rows = patterns.read_page()
    assert len({row.name for row in rows}) == len(rows)
    measured = [row for row in rows if row.is_measured]
    assert len(measured) > 50
    for row in measured:
        training = patterns.training_of(row.settings)
        assert training.batch_size * patterns.STEPS == 256, row.name
        assert row.figure, f"{row.name}: run benchmarks/training.py patterns"
