"""A model card and a proof show names of others; they are text there, whatever they hold."""

import pytest
from markdown_it import MarkdownIt

from compress.artifacts.artifact import Step
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.verdict import History, PastStage
from pipelines.reporting.verification_page import render_proof
from serve.packaging.provenance import Packaged, Provenance, model_card
from serve.verify import Proof

HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=//evil>",
    "![x](http://evil/pixel)",
    "[x](javascript:alert(1))",
    "`<img src=//evil>`",
    "``` <b>",
    "\\<b>",
    "a | b",
    "\\| b",
    "a\n\n# proven\n---\n",
    "[x]: http://evil\n[x]",
    "# proven",
    "> proven",
    "~~~ proven",
    "    proven",
    "a\x1b[2J\u202e",
)
PLAIN = "name"
HARMLESS = ("text", "text_special", "softbreak", "code_inline")


def rendered(text: str) -> tuple[list[str], int]:
    """Return the kinds of a document's elements, and how many cells its tables have."""
    tokens = MarkdownIt("gfm-like", {"linkify": False, "html": True}).parse(text)
    flat = [each for token in tokens for each in (token, *(token.children or ()))]
    kinds = [each.type for each in flat if each.type not in HARMLESS]
    return kinds, kinds.count("td_open")


def card(name: str) -> str:
    settings = {name: [name]}
    stage = PastStage(
        name=name,
        stage=name,
        input=name,
        settings=settings,
        kind=name,
        digest=name,
        bytes=1,
        parameters=1,
        macs=None,
        metric={"name": name, "split": name, "value": 1.0},
        verdicts=(),
    )
    history = History(
        pipeline=name,
        seed=0,
        data=name,
        versions={name: name},
        source={name: name},
        source_digest=name,
        stages=(stage,),
    )
    spec = TensorSpec.model_construct(name=name, shape=(name, 4), dtype=name)
    signature = Signature.model_construct(
        inputs=(spec,), outputs=(OutputSpec.model_construct(name=name),)
    )
    artifact = Packaged(kind=name, digest=name, payload=name, sha256=name)
    record = Provenance.model_construct(
        signature=signature,
        artifact=artifact,
        lineage=(Step(stage=name, settings=settings, inputs={"input": name}),),
        history=history,
    )
    outside = record.model_copy(update={"history": None})
    return model_card("model", record, 1) + model_card("model", outside, 1)


def proof(name: str) -> str:
    made = Proof.model_construct(
        kind="onnx", sha256="0", digest="", served_by=name, proven=[name], unproven=[name],
        replays=[],
    )  # fmt: skip
    return render_proof(made, name, ".md")


@pytest.mark.parametrize("document", [card, proof])
@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_others_make_no_html_link_heading_or_cell(name: str, document) -> None:
    assert rendered(document(name)) == rendered(document(PLAIN))


def test_names_stay_readable() -> None:
    text = card("classes [batch, 4] of `a`")
    assert "classes [batch, 4] of `a`" in text
    assert "`` classes [batch, 4] of `a` ``" in text
