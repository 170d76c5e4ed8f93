from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import DataReference
from compress.distillation.stage import Distill
from compress.training.stage import Train

HERE = Path(__file__).parent
FEATURES = Signature(inputs=(TensorSpec(name="features", shape=("batch", 4)),))


@dataclass
class School:
    """Where students and teachers are made, and lessons held."""

    root: Path
    teacher: EagerModel
    made: int = 0

    def make(self, factory: str = "net", seed: int = 0, **arguments) -> EagerModel:
        self.made += 1
        recipe = Recipe(factory=f"pupils:{factory}", arguments=arguments)
        path = self.root / f"model{self.made}"
        return import_checkpoint(path, recipe, FEATURES, checkpoint=None, folder=HERE, seed=seed)

    def data(self, **arguments):
        return DataReference("pupils:data", arguments, HERE, 64).load()

    def context(self, data=None, **earlier) -> Context:
        self.made += 1
        return Context(
            root=self.root / f"result{self.made}",
            data=data or self.data(),
            artifacts={"teacher": self.teacher, **earlier},
        )

    def distil(self, model, context=None, /, **settings) -> EagerModel:
        stage = Distill.model_validate(
            {"teacher": "teacher", "epochs": 2, "batch_size": 16, "learning_rate": 0.02} | settings
        )
        return stage(model, context or self.context())

    def weights(self, model: EagerModel) -> dict[str, torch.Tensor]:
        return model.load().state_dict()

    def same(self, one: EagerModel, other: EagerModel) -> bool:
        a, b = self.weights(one), self.weights(other)
        return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="package")
def trained(tmp_path_factory):
    """A teacher that is better than chance."""
    root = tmp_path_factory.mktemp("school")
    school = School(root, None)  # type: ignore[arg-type]
    model = school.make(width=16, depth=4, seed=3)
    teacher = Train(epochs=4, batch_size=16, learning_rate=0.05, label_smoothing=0)(
        model, school.context(school.data(train=320))
    )
    assert school.context().score(teacher) > 0.85
    return teacher


@pytest.fixture
def school(tmp_path, trained):
    return School(tmp_path, trained)
