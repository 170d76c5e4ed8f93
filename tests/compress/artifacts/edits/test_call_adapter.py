"""Inputs by name, outputs by name: whatever a forward is like, stages call it with tensors."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from compress import Context, EagerModel, GraphModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import CallByName, Recipe
from compress.artifacts.recipe_inference import fit_call
from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.common.signature import OutputSpec, Signature, TensorSpec

HERE = Path(__file__).parents[1]
X, IDS, SHIFT = torch.arange(8.0).reshape(2, 4), torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 1)


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)


def signature(*names: str, outputs: tuple[str, ...] = ()) -> Signature:
    kinds = {
        "x": TensorSpec(name="x", shape=("batch", 4)),
        "ids": TensorSpec(name="ids", shape=("batch", 2), dtype="int64"),
        "shift": TensorSpec(name="shift", shape=("batch", 1)),
    }
    inputs = tuple(kinds.get(n, TensorSpec(name=n, shape=("batch", 4))) for n in names)
    named = {"outputs": tuple(OutputSpec(name=n) for n in outputs)} if outputs else {}
    return Signature(inputs=inputs, **named)


def imported(path: Path, kind: str, *names: str, outputs: tuple[str, ...] = ()) -> EagerModel:
    return import_checkpoint(
        path,
        Recipe(factory=f"calls_here:{kind}"),
        signature(*names, outputs=outputs),
        checkpoint=None,
        folder=HERE,
    )


def named(model: EagerModel) -> list[str]:
    return [output.name for output in model.signature.outputs]


def test_inputs_reach_the_parameters_of_their_names(tmp_path, fresh_torch) -> None:
    model = imported(tmp_path / "m", "Keywords", "shift", "ids", "x")
    assert model.recipe.edits == (CallByName(inputs=("shift", "ids", "x")),)
    assert named(model) == ["scores", "both_0", "both_1"]
    whole = nn.Module.__call__
    plain = model.recipe.model_copy(update={"edits": ()}).build(HERE)
    plain.load_state_dict(model.load().state_dict())
    expected = whole(plain, X, ids=IDS, shift=SHIFT)
    with model.open() as predict:
        found = predict(SHIFT, IDS, X)
    assert torch.equal(found[0], expected["scores"])
    assert torch.equal(found[2], expected["both"][1])
    answered = fresh_torch(
        "import torch\nfrom compress import EagerModel\n"
        f"model = EagerModel.from_directory({str(tmp_path / 'm')!r})\n"
        "x, ids = torch.arange(8.0).reshape(2, 4), torch.tensor([[1, 2], [3, 4]])\n"
        "with model.open() as predict: print(predict(torch.ones(2, 1), ids, x)[0].tolist())"
    )
    assert answered == str(found[0].tolist())


@pytest.mark.slow
def test_a_graph_and_an_onnx_file_bear_the_names(tmp_path) -> None:
    import onnx

    from compress.export import ExportOnnx

    model = imported(tmp_path / "m", "Keywords", "ids", "x")
    graph = GraphModel.from_eager(model, tmp_path / "graph")
    with model.open() as predict, graph.open() as traced:
        assert torch.allclose(predict(IDS, X)[0], traced(IDS, X)[0])
    exported = onnx.load(ExportOnnx()(model, Context(root=tmp_path / "onnx")).payload_path).graph
    assert [i.name for i in exported.input] == ["ids", "x"]
    assert [o.name for o in exported.output] == ["scores", "both_0", "both_1"]


@pytest.mark.parametrize(
    ("kind", "outputs", "chosen", "names"),
    [
        ("Named", (), (), ["scores", "total"]),
        ("Named", ("total", "scores"), ("total", "scores"), ["total", "scores"]),
        ("Named", ("a", "b"), (), ["a", "b"]),
        ("Talking", ("state",), ("state",), ["state"]),
        ("Talking", ("state", "scores"), ("state", "scores"), ["state", "scores"]),
        ("Keywords", ("scores",), ("scores",), ["scores"]),
        ("Keywords", ("both_1", "scores"), ("both_1", "scores"), ["both_1", "scores"]),
    ],
)
def test_outputs_are_chosen_by_key_or_named_anew(tmp_path, kind, outputs, chosen, names) -> None:
    model = imported(tmp_path / "m", kind, "x", outputs=outputs)
    assert [edit.outputs for edit in model.recipe.edits] == ([chosen] if chosen else [])
    assert named(model) == names
    with model.open() as predict:
        assert len(predict(X)) == len(names)


def test_free_names_pass_by_position(tmp_path) -> None:
    model = imported(tmp_path / "m", "Named", "image")
    assert model.recipe.edits == ()


@pytest.mark.parametrize(
    ("kind", "names", "outputs", "error", "message"),
    [
        ("Keywords", ("ids", "image"), (), PipelineInvalid, "'ids' is a parameter .*'image' is no"),
        ("Named", ("x",), ("only",), PipelineInvalid, r"names \['only'\], and the model returns"),
        (
            "Named",
            ("x",),
            ("scores", "totl"),
            PipelineInvalid,
            r"'totl'\], and the model returns \['scores', 'total'\]",
        ),
        (
            "Talking",
            ("x",),
            (),
            ArtifactInvalid,
            "returned object, expected tensors; choose among scores, state",
        ),
        ("Keywords", ("ids",), (), ArtifactInvalid, "does not take ids .*missing 1 required"),
    ],
)
def test_what_contradicts_the_model_is_refused(tmp_path, kind, names, outputs, error, message):
    with pytest.raises(error, match=message):
        imported(tmp_path / "m", kind, *names, outputs=outputs)
    assert not (tmp_path / "m").exists()


def test_a_name_of_an_output_that_is_an_inputs_too_is_made_another() -> None:
    class Echo(nn.Module):
        def forward(self, x):
            return {"x": x, "y": x + 1}

    _, found = fit_call(Echo(), signature("x"), (X,))
    assert [o.name for o in found.outputs] == ["x_output", "y"]


def test_a_module_in_memory_in_three_lines(tmp_path) -> None:
    from calls_here import Keywords

    module = Keywords()
    source = EagerModel.from_module(module, example_inputs={"ids": IDS, "x": X})
    assert type(module) is Keywords, "the caller's module stays what it was"
    assert named(source) == ["scores", "both_0", "both_1"]
    ids = TensorSpec(name="ids", shape=("batch", 2), dtype="int64", values=(1, 4))
    assert source.signature.inputs[0] == ids
    with source.open() as predict:
        assert torch.equal(predict(IDS, X)[0], module(X, ids=IDS)["scores"])


def test_a_module_that_its_arguments_do_not_rebuild_is_refused() -> None:
    from calls_here import Keywords

    with pytest.raises(ArtifactInvalid, match=r"linear\.bias: \(5,\) instead of \(3,\)"):
        EagerModel.from_module(Keywords(5), example_inputs=(X,), arguments={})
    right = EagerModel.from_module(Keywords(5), example_inputs=(X,), arguments={"width": 5})
    assert not right.only_here
    assert EagerModel.from_module(Keywords(5), example_inputs=(X,)).only_here

    class Inner(nn.Linear):
        pass

    inner = EagerModel.from_module(Inner(4, 3), example_inputs=(X,))
    assert inner.only_here
    assert type(inner.load()) is Inner
    sys.modules.pop("calls_here")
