"""Processes that the tests fork are as new ones, but for torch."""

from collections.abc import Callable

import pytest


def test_nothing_of_ours_is_imported_and_nothing_stays(fresh_torch: Callable[[str], str]) -> None:
    code = """
import sys
from pathlib import Path
print(sorted({"compress", "export", "torchao", "onnx", "left"} & {*sys.modules}), Path.cwd().name)
sys.modules["left"] = sys
print("no answer", file=sys.stderr)
"""
    first = fresh_torch(code)
    assert first.startswith("[] ")
    assert fresh_torch(code) == first


def test_what_fails_is_told(fresh_torch: Callable[[str], str]) -> None:
    with pytest.raises(AssertionError, match="ValueError: broken"):
        fresh_torch("raise ValueError('broken')")
    assert fresh_torch("print(1)") == "1"
