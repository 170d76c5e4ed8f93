"""What torch looks up once and not again and again, with the same result."""

import types
import typing

import pytest
import torch
from torch._export import utils
from torch._export.serde import schema, serialize

from compress.graph.library_cache import cached_composite_ops, cached_type_hints, patched_attribute


def test_composite_operators_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    really = utils._materialize_cpp_cia_ops

    def look() -> None:
        looked.append(1)
        really()

    monkeypatch.setattr(utils, "_materialize_cpp_cia_ops", look)
    expected = utils._collect_all_valid_cia_ops()
    assert len(looked) > 1
    looked.clear()
    with cached_composite_ops():
        found = utils._collect_all_valid_cia_ops()
        assert utils._collect_all_valid_cia_ops() == found == expected
    assert looked == [1]
    assert torch.ops.aten.linear.default in found
    assert utils._materialize_cpp_cia_ops is look


def test_a_release_without_the_attribute_is_not_patched() -> None:
    library = types.ModuleType("library")
    with patched_attribute(library, "private", 1):
        assert not hasattr(library, "private")
    assert not hasattr(library, "private")


def test_type_hints_of_a_stored_graph_are_evaluated_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[object] = []
    really = typing.get_type_hints

    def reading(of: object, **named: object) -> dict[str, object]:
        read.append(of)
        return really(of, **named)

    monkeypatch.setattr(typing, "get_type_hints", reading)
    found = [{"arg": {"as_int": i}, "name": "x", "kind": None} for i in range(3)]
    expected = [serialize._dict_to_dataclass(schema.NamedArgument, one) for one in found]
    assert len(read) > len({*read})
    read.clear()
    with cached_type_hints():
        assert [
            serialize._dict_to_dataclass(schema.NamedArgument, one) for one in found
        ] == expected
    assert len(read) == len({*read}) == 2
    assert serialize.typing is typing
