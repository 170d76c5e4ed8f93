"""Interfaces that exporters trip over: names of operators, axes that end, masks."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.export.onnx.graph import values_in_order
from compress.export.onnx.lowering import lower
from compress.export.onnx.stage import ExportOnnx
from compress.graph import torch_export
from compress.graph.torch_export import export_program
from tests.export.builders import check_parity, network, network_of

SOURCE = """
import torch
from torch import nn

class Encoder(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal = causal
        self.tokens, self.positions = nn.Embedding(50, 8), nn.Embedding(20, 8)
        self.register_buffer("places", torch.arange(20))
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, tokens, mask):
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(self.places[:length])
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2)
        seen = mask[:, None, :].bool()
        if self.causal:
            seen = seen & torch.ones(length, length, dtype=torch.bool).tril()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return self.tokens(tokens), self.head(weights @ v)

def encoder(causal=False):
    return Encoder(causal)
"""


def tokens(*outputs: str, mask: str = "attention_mask") -> Signature:
    shape = ("batch", "length")
    return Signature(
        inputs=(
            TensorSpec(name="tokens", shape=shape, dtype="int64"),
            TensorSpec(name=mask, shape=shape, dtype="int64"),
        ),
        outputs=tuple(OutputSpec(name=name) for name in outputs),
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EagerModel]:
    folder = tmp_path_factory.mktemp("encoder")
    (folder / "encoders.py").write_text(SOURCE)

    def made(name: str, signature: Signature, *, causal: bool = False) -> EagerModel:
        return network(folder / name, "encoders:encoder", signature, folder, causal=causal)

    return made


@pytest.mark.slow
def test_outputs_may_be_named_like_operators_and_axes_may_end(
    source: Callable[..., EagerModel], tmp_path: Path
) -> None:
    model = source("names", tokens("linear", "embedding"), causal=True)
    exported = ExportOnnx()(model, Context(root=tmp_path / "onnx"))
    graph = onnx.load(exported.payload_path).graph
    assert [i.name for i in graph.input] == ["tokens", "attention_mask"]
    assert [o.name for o in graph.output] == ["linear", "embedding"]
    made = [name for node in graph.node for name in node.output]
    assert len(made) == len(set(made))
    assert exported.manifest.facts["axis_limits"] == {"length": 20}
    inputs = model.signature.example(sizes={"length": 20})
    with model.open() as expected, exported.open() as got:
        for a, b in zip(expected(*inputs), got(*inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_stored_graph_still_knows_where_an_axis_ends(
    source: Callable[..., EagerModel], tmp_path: Path
) -> None:
    from compress.graph.torch_export import axis_limits

    model = source("stored", tokens("states", "logits"))
    graph = GraphModel.from_eager(model, tmp_path / "graph")
    assert axis_limits(graph.program(), graph.signature) == {"length": 20}


def test_masks_let_something_through_in_every_row() -> None:
    for size in (1, 2, 8):
        _, mask = tokens("x").example(batch=64, sizes={"length": size})
        assert mask[:, 0].all()
        assert (mask.diff(dim=1) <= 0).all(), "left-aligned"
    assert 0 < mask.double().mean() < 1
    _, other = tokens("x", mask="segments").example(batch=64)
    assert not other[:, 0].all()


def test_an_axis_that_is_baked_in_is_still_refused(tmp_path: Path) -> None:
    source = (
        "from torch import nn\n\n"
        "class Fixed(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x + nn.functional.one_hot(x.long()[:, 0] * 0, 8)[: x.shape[0], :]\n"
    )
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", "width")),))
    model = network_of(tmp_path, source, "fixed:Fixed", signature)
    with pytest.raises(StageFailed, match=r"'width' is baked in: .* \(fixed\.py, line 5: "):
        ExportOnnx()(model, Context(root=tmp_path / "onnx"))


def test_a_size_that_guards_lead_to_is_named() -> None:
    # Of a file whose recurrent layer squeezes an axis that must have one entry.
    error = RuntimeError(
        'Specializations unexpectedly required (sequence)! For more, run with "+dynamic".'
        "\n  - solving the guards generated for sequence = L['inputs'][0].size()[1] resulted in a "
        "specialized value of 384.\n"
    )
    assert torch_export._explain_failure(error, {}) == (
        "axis 'sequence' is baked in: the model's code fixes it to 384; compute it from the "
        "input's shape, or declare the number 384 instead of the name in model.inputs"
    )


def test_an_axis_is_compared_at_its_largest_size(
    source: Callable[..., EagerModel], tmp_path: Path
) -> None:
    model = source("largest", tokens("states", "logits"))

    def wrong_at(length: int) -> Callable[..., tuple[torch.Tensor, ...]]:
        def answer(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            states, logits = right(*inputs)
            return states, logits + (inputs[0].shape[1] == length)

        return answer

    context = Context(root=tmp_path / "onnx")
    with model.open() as right:
        check_parity(model, wrong_at(20), context)
        with pytest.raises(StageFailed, match=r"axis 'length' at size 20: .* answers differ"):
            check_parity(model, wrong_at(20), context, {"length": 20})
        check_parity(model, wrong_at(0), context, {"length": 20})
        check_parity(model, wrong_at(2048), context, {"length": 2048})  # too large to be tried


class Squares(torch.nn.Module):
    """Two products in float16, the first of which reads transposed heads as its second operand."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (x.half() * self.scale).unflatten(2, (2, 4))
        moved = heads.permute(2, 1, 0, 3)
        return ((heads.permute(2, 1, 3, 0) @ moved) @ moved.transpose(2, 3)).float()


def test_no_two_values_of_a_float16_graph_have_one_name() -> None:
    shape = ("batch", 6, 8)
    inputs = (TensorSpec(name="x", shape=shape),)
    signature = Signature(inputs=inputs, outputs=(OutputSpec(name="y"),))
    program = export_program(Squares().eval(), signature)
    values = {*values_in_order(lower(program, signature, None))}
    assert "Reshape" in {value.producer().op_type for value in values if value.producer()}
    assert len({value.name for value in values}) == len(values)
