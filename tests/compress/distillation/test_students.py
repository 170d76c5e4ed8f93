"""Students cut from the input, and how their blocks are chosen."""

import pytest
import torch
from pydantic import ValidationError

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe import KeepBlocks
from compress.common.errors import StageFailed
from compress.distillation.stage import SomeBlocks


def test_named_layers_of_the_input_learn_and_load_again_elsewhere(school, fresh_torch):
    learnt = school.distil(school.teacher, student={"layers": [0, 3]}, epochs=3)
    assert learnt.recipe.edits == (KeepBlocks(kept={"layers": (0, 3)}),)
    assert learnt.parameters() < school.teacher.parameters()
    assert learnt.manifest.facts["blocks"] == {"in": "layers", "kept": [0, 3], "of": 4}
    x = torch.randn(3, 4)
    torch.save([x, learnt.load()(x).detach()], school.root / "expected.pt")
    code = (
        "import torch; from compress.artifacts.eager_model import EagerModel; "
        f"x, y = torch.load({str(school.root / 'expected.pt')!r}, weights_only=True); "
        f"assert torch.equal(EagerModel.from_directory({str(learnt.path)!r}).load()(x), y)"
    )
    fresh_torch(code)


def spoilt(school, harmless: set[int]) -> EagerModel:
    """Return a copy of the teacher of which some layers do nothing and the others much."""
    module = school.teacher.load()
    for index, layer in enumerate(module.layers):
        scale = 0.0 if index in harmless else 3.0
        torch.nn.init.zeros_(layer.down.bias)
        layer.down.weight.data *= scale
    return school.teacher.derive(school.root / f"spoilt{len(harmless)}", module)


@pytest.mark.parametrize("largest", [300, 1])
def test_the_layers_that_matter_are_found_by_measuring(school, monkeypatch, largest):
    monkeypatch.setattr("compress.distillation.stage.LARGEST_SEARCH", largest)
    model = spoilt(school, {0, 2})
    context = school.context(model=model)
    learnt = school.distil(model, context, teacher="model", student={"layers": 2}, epochs=1)
    facts = learnt.manifest.facts["blocks"]
    assert facts["kept"] == [1, 3]
    # All six pairs; or four models without one layer, and three without another.
    assert facts["measured"] == (6 if largest > 1 else 7)
    assert facts["nearest"][0]["distance"] == pytest.approx(0, abs=1e-6)
    assert facts["nearest"][1]["distance"] > 0.01


def test_a_student_of_another_factory_is_sealed_with_its_own_recipe(school, monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    student = {"factory": "pupils:net", "arguments": {"width": 4}}
    learnt = school.distil(school.teacher, student=student)
    assert learnt.recipe.arguments == {"width": 4}
    assert learnt.manifest.lineage[-1].inputs["input"] == school.teacher.digest


@pytest.mark.parametrize(
    ("student", "message"),
    [
        ({"layers": [0, 9]}, r"student.layers: 'layers' has 4 blocks, found \(0, 9\)"),
        ({"layers": 5}, "'layers' has 4 blocks, found 5"),
        ({"layers": [1], "blocks": "layer"}, "no list of blocks named 'layer'; those.*'layers'"),
    ],
)
def test_blocks_that_are_not_there_are_refused(school, student, message):
    with pytest.raises(StageFailed, match=message):
        school.distil(school.teacher, student=student)


def test_layers_ascend():
    with pytest.raises(ValidationError, match=r"layers ascend, each once, found \[2, 1\]"):
        SomeBlocks(layers=(2, 1))
