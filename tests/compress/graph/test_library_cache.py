"""What torch looks up once and not again and again, with the same result."""

import io
import types
import typing
from pathlib import Path

import pytest
import sympy
import torch
from torch._export import utils
from torch._export.serde import schema, serialize
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.pt2_archive._package import load_pt2
from torch.fx import config as fx_config

from compress.common.foreign.patching import patched_attribute
from compress.graph.library_cache import (
    cached_composite_ops,
    cached_deserialization,
    cheap_shape_cache,
)
from compress.graph.torch_export import load_program, save_program
from compress.pruning.dependency.channel_groups import export_graph


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


@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec")  # torch's own check
def test_kernels_are_overridden_for_backends_of_tensors_here_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decomposed() -> tuple[str, set[str]]:
        overridden: set[str] = set()
        really = torch._ops.OpOverload.py_impl

        def register(op: torch._ops.OpOverload, key: typing.Any) -> typing.Any:
            overridden.add(key.name)
            return really(op, key)

        with monkeypatch.context() as patch:
            patch.setattr(torch._ops.OpOverload, "py_impl", register)
            return program.run_decompositions({}).graph_module.code, overridden

    layers = torch.nn.Linear(4, 8), torch.nn.ReLU(inplace=True), torch.nn.Dropout()
    program = torch.export.export(torch.nn.Sequential(*layers).eval(), (torch.rand(3, 4),))
    expected, everywhere = decomposed()
    with cached_composite_ops():
        found, here = decomposed()
    assert found == expected
    assert {"AutogradXLA", "HPU"} < everywhere
    names = ("CPU", "CUDA", "Meta")
    assert here == {*names, *(f"Autograd{n}" for n in names), "CompositeImplicitAutograd"}
    assert decomposed()[1] == everywhere, "torch's own tables stay"


class Sized(torch.nn.Module):
    """Results of symbolic sizes: views, slices, several at once; and one that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.norm(x + self.attention(x, x, x)[0])
        largest, place = x.transpose(1, 2).max(-1)
        return x.narrow(-1, 2, 4).flatten(), largest, place, x[x.sum((1, 2)) > 0] + 1


def test_shapes_are_remembered_without_making_each_result_twice(monkeypatch) -> None:
    made: list[str] = []
    really = FakeTensorMode._output_from_cache_entry

    def make(mode: FakeTensorMode, state, entry, key, operator, args) -> object:
        if operator is not None:
            made.append(operator.name())
        return really(mode, state, entry, key, operator, args)

    def traced() -> tuple[str, int, str]:
        made.clear()
        size = torch.export.Dim("batch"), torch.export.Dim("length")
        example = (torch.rand(3, 4, 8),)
        program = torch.export.export(
            Sized().eval(), example, dynamic_shapes=({0: size[0], 1: size[1]},)
        )
        sizes = "".join(str(node.meta["val"]) for node in program.graph.nodes if node.users)
        return program.graph_module.code + sizes, len(made), str(program.range_constraints)

    monkeypatch.setattr(FakeTensorMode, "_output_from_cache_entry", make)
    expected, in_torch, ranges = traced()
    with cheap_shape_cache():
        found, here, own_ranges = traced()
    assert (found, own_ranges) == (expected, ranges)
    assert 0 < here < in_torch / 3, "hits alone, and what follows the size that depends on data"


def test_a_release_without_the_attribute_is_not_patched() -> None:
    library = types.ModuleType("library")
    with patched_attribute(library, "private", 1):
        assert not hasattr(library, "private")
    assert not hasattr(library, "private")


def test_blocks_of_several_threads_may_end_in_any_order() -> None:
    library = types.ModuleType("library")
    library.value = 0  # type: ignore[attr-defined]
    first, second, third = (patched_attribute(library, "value", n) for n in (1, 2, 2))
    found = []
    for step in (first.__enter__, second.__enter__, third.__enter__):
        step()
        found.append(library.value)
    for block in (first, third, second):
        block.__exit__(None, None, None)
        found.append(library.value)
    assert found == [1, 2, 2, 2, 2, 0]
    with pytest.raises(KeyError), patched_attribute(library, "value", 1):
        raise KeyError
    assert library.value == 0


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
    with cached_deserialization():
        assert [
            serialize._dict_to_dataclass(schema.NamedArgument, one) for one in found
        ] == expected
    assert len(read) == len({*read}) == 2
    assert serialize.typing is typing


def test_symbolic_sizes_of_a_stored_graph_are_parsed_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x.relu(), x.sin().cos()], 1).exp()

    shapes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=64)}
    program = torch.export.export(Net(), (torch.rand(3, 5),), dynamic_shapes=(shapes,))
    save_program(program, file := tmp_path / "model.pt2")
    parsed: list[object] = []
    really = sympy.sympify

    def parse(expression: object, **named: object) -> object:
        parsed.append(expression)
        return really(expression, **named)

    def described(loaded: torch.export.ExportedProgram) -> list[str]:
        values = [str(node.meta.get("val")) for node in loaded.graph.nodes]
        return [*values, str(loaded.range_constraints)]

    cached_sympy = types.ModuleType("sympy")
    vars(cached_sympy).update({**vars(sympy), "sympify": parse})
    monkeypatch.setattr(serialize, "sympy", cached_sympy)
    expected = described(load_pt2(io.BytesIO(file.read_bytes())).exported_programs["model"])
    sizes = [one for one in parsed if isinstance(one, str)]
    assert len(sizes) > len({*sizes})
    parsed.clear()
    assert described(load_program(file)) == expected
    found = [one for one in parsed if isinstance(one, str)]
    assert len(found) == len({*found}) > 2


def test_a_graph_is_written_without_a_canonical_form(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("for nobody")

    monkeypatch.setattr(serialize, "canonicalize", refuse)
    program = torch.export.export(torch.nn.Linear(4, 2), (torch.rand(3, 4),))
    save_program(program, tmp_path / "model.pt2")
    with pytest.raises(AssertionError, match="for nobody"):
        torch.export.save(program, io.BytesIO())


def test_a_graph_that_channels_are_followed_in_names_no_lines_of_code() -> None:
    program = export_graph(torch.nn.Linear(4, 2), [torch.rand(3, 4)])
    (layer,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert not layer.stack_trace
    assert not fx_config.do_not_emit_stack_traces
