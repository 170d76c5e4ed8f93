"""The stage `distill`: trains a student to match a teacher's outputs and features."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.model_source import Origin
from compress.artifacts.recipe import KeepBlocks
from compress.common.config import Count, Settings
from compress.common.errors import StageFailed, located
from compress.common.signature import Signature
from compress.core.stage import Stage
from compress.distillation.teacher import OnnxFile, Teacher
from compress.distillation.terms import AnyTerm, Labels, Term, terms_of
from compress.training.config.training import Training
from compress.training.objectives.objective import TargetLoss, Teaching, need_task_of_classes

if TYPE_CHECKING:
    import torch

    from compress.core.context import Context
    from compress.core.objectives.loss import Loss
    from compress.data.splits import Splits
    from compress.distillation.distillation_objective import DistillationObjective, Pairs

    Distance = Callable[[torch.nn.Module], float]

log = logging.getLogger(__name__)

LARGEST_SEARCH = 300
"""Up to as many choices of blocks are all measured; of more, blocks are removed one by one."""
REPORTED = 5  # best choices that are listed in the artifact's facts


class SomeBlocks(Settings):
    """The input with some of its blocks, such as a transformer's layers."""

    layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | Count
    """Blocks that stay, counted from 0; or how many: those are searched with which the model,
    before any training, answers most nearly as its teacher."""
    blocks: str | None = None
    """Name of the list of blocks; by default the one with the most."""

    @field_validator("layers")
    @classmethod
    def _ascending(cls, layers: tuple[int, ...] | int) -> tuple[int, ...] | int:
        if isinstance(layers, tuple) and list(layers) != sorted(set(layers)):
            raise ValueError(f"layers ascend, each once, found {list(layers)}")
        return layers

    def container(self, module: torch.nn.Module) -> tuple[str, int]:
        """Return the name of the list of blocks, and how many it has: at least those that stay."""
        from compress.artifacts.edits.removal import blocks_of

        known = blocks_of(module)
        if not known or (self.blocks is not None and self.blocks not in known):
            names = ", ".join(map(repr, known)) or "none"
            wanted = f" named {self.blocks!r}" if self.blocks else ""
            raise StageFailed(
                f"student.blocks: the model has no list of blocks{wanted}; those there are: {names}"
            )
        name = self.blocks or max(known, key=lambda container: known[container])
        needed = max(self.layers) + 1 if isinstance(self.layers, tuple) else self.layers
        if needed > known[name]:
            raise StageFailed(
                f"student.layers: {name!r} has {known[name]} blocks, found {self.layers}"
            )
        return name, known[name]

    def cut(
        self, model: EagerModel, path: Path, distance: Callable[[], Distance]
    ) -> tuple[EagerModel, dict[str, JsonValue]]:
        """Write the model with some of its blocks, and return facts about their choice."""
        module = model.load()
        name, count = self.container(module)
        facts: dict[str, JsonValue] = {}
        kept = self.layers
        if isinstance(kept, int):  # only a search needs the distance, for which the teacher runs
            kept, facts = choose_blocks(model, name, count, kept, distance())
        edit = KeepBlocks(kept={name: kept})
        edit.apply_(module)
        log.info("blocks %s of %d in %s stay", list(kept), count, name)
        cut = model.derive(path, module, edits=[edit])
        return cut, {"blocks": {"in": name, "kept": list(kept), "of": count, **facts}}


class Distill(Stage[EagerModel, EagerModel], Teaching, Training):
    """Train a model to answer as its teacher does; unlabelled data teaches too.

    A split `unlabelled` is used beside `train`, and any sample may be without a label.

        - stage: distill
          teacher: train
          epochs: 6
    """

    stage: Literal["distill"] = "distill"
    teacher: str | Origin | OnnxFile
    """Earlier stage whose model teaches, or `source`; or another model: `{factory, arguments,
    checkpoint}`, or `{onnx: file}`."""
    student: Origin | SomeBlocks | None = None
    """Model that learns: another one, `{factory, arguments, checkpoint}`, or `{layers: [0, 2, 5]}`
    of the input, or `{layers: 3}`, the best of them; the input by default."""
    losses: tuple[AnyTerm, ...] = ()
    """Terms of the loss, each with its `weight`, instead of `loss`, `temperature`, `soft_weight`
    and `hard_weight`. Those that compare the samples of a batch see the share of one process."""
    # Excluded from dumps, and so from cache keys: it changes no result.
    cache_teacher: bool | Literal["auto"] = Field(default="auto", exclude=True)
    """Whether the teacher's answers are kept on disk while the stage runs, so that it is asked once
    about each sample; `auto`: where several epochs read the same samples and no module's features
    are needed."""

    @model_validator(mode="after")
    def _one_way_to_say_the_loss(self) -> Self:
        short = sorted(name for name in Teaching.model_fields if not self.has_default(name))
        if self.losses and short:
            raise ValueError(
                f"losses says all terms, found {', '.join(short)} beside it; move it into a term "
                "({loss: kl, temperature: 4, weight: 0.9}, {loss: labels, weight: 0.1})"
            )
        if self.losses and all(term.loss == "labels" for term in self.losses):
            raise ValueError("losses has no term of the teacher; add one, or use stage: train")
        return self

    @model_validator(mode="after")
    def _features_can_be_recorded(self) -> Self:
        if self._names_modules and isinstance(self.teacher, OnnxFile):
            raise ValueError(
                "losses names modules, and of an ONNX file the outputs alone are seen; use a "
                "teacher with a factory, or losses of outputs"
            )
        if not self._names_modules and all(term.projects == "none" for term in self.losses):
            return self
        # Hooks record whole features, which no process has of a module in shards or stages.
        split = self.parallel.divides_weights
        if split or self.compile != "none":
            found = self.parallel.layout if split else f"compile: {self.compiled_part}"
            raise ValueError(
                "losses that name modules or project features need the whole model, uncompiled, in "
                f"each process, found {found}; use strategy: ddp or zero1 without compile"
            )
        return self

    needs_data: ClassVar[bool] = True

    @property
    def uses_loss(self) -> bool:
        """Whether a term compares with targets."""
        return any(isinstance(term, Labels) for term in self.terms)

    def check_loss(self, loss: Loss) -> None:
        """Refuse settings that do not go with the task's loss."""
        if self.uses_loss:
            self.check_targets_loss(loss)
        for term in self.terms:
            if isinstance(term, Term) and term.compares_classes:
                need_task_of_classes(term.loss, loss)

    @property
    def extra_inputs(self) -> tuple[str, ...]:
        """The teacher's name, where it is an earlier stage."""
        return (self.teacher,) if isinstance(self.teacher, str) else ()

    @property
    def extra_input_types(self) -> tuple[type[Artifact], ...]:
        """Any artifact, or an eager model if the losses name its modules."""
        return (EagerModel,) if self._names_modules else (Artifact,)

    @property
    def terms(self) -> tuple[AnyTerm, ...]:
        """All terms of the loss."""
        return self.losses or terms_of(self)

    def resolve_paths(self, folder: Path, code: Path) -> Self:
        """Return the same stage with the paths of teacher and student resolved."""
        changed: dict[str, Any] = {}
        for role in ("teacher", "student"):
            model = getattr(self, role)
            if isinstance(model, Origin | OnnxFile):
                changed[role] = model.resolve_paths(folder, code)
        return self.model_copy(update=changed)

    def own_settings(self) -> dict[str, Any]:
        """Return the settings that the result depends on; other models by their content."""
        settings = super().own_settings()
        for role in ("teacher", "student"):
            model = getattr(self, role)
            if isinstance(model, Origin | OnnxFile):
                settings[role] = model.identity()
        return settings

    def run(self, model: EagerModel, context: Context) -> EagerModel:
        """Train the student; its initial weights are the result if no epoch improves on them."""
        from compress.data.splits import with_unlabelled
        from compress.training.fit import fit

        context = replace(context, data=with_unlabelled(context.need_data(self.title)))
        with located(f"{self.title}: "):
            student, objective, facts = self.student_and_objective(model, context)
            context = replace(context, data=self._with_teacher_outputs(objective, context))
        trained = fit(student, self, objective, context, self.title, accept_start=True)
        lineage = self.lineage(model, teacher=objective.teacher.digest)
        facts |= trained.facts()
        return student.derive(context.root, trained.weights, lineage=lineage, facts=facts)

    def student_and_objective(
        self, model: EagerModel, context: Context
    ) -> tuple[EagerModel, DistillationObjective, dict[str, JsonValue]]:
        """Return the student before its training, what it minimizes, and facts about its blocks."""
        from compress.distillation.distillation_objective import (
            UNNAMED,
            DistillationObjective,
            distance_to,
            pairs_of,
        )

        taught_by = self.teacher_model(model, context)
        teacher = Teacher.from_model(taught_by)
        student, where = model, context.work / "student"
        facts: dict[str, JsonValue] = {}
        if isinstance(self.student, Origin):
            student = self.student.seal(where, model.signature, context.seed)
        elif self.student is not None:
            distance = partial(distance_to, teacher, self.terms, context)
            student, facts = self.student.cut(model, where, distance)

        terms = self.terms
        targets = TargetLoss.for_training(self, context, student.signature)
        self.check_loss(targets.loss)
        pairs: tuple[Pairs, ...] = (UNNAMED,) * len(terms)
        if self._names_modules:
            pairs = pairs_of(terms, student.load(), teacher.module)
        return student, DistillationObjective(teacher, terms, pairs, targets), facts

    def teacher_model(self, model: EagerModel, context: Context) -> Artifact | OnnxFile:
        """Return the teacher: an earlier stage's artifact, another model's, or an ONNX file."""
        if isinstance(self.teacher, OnnxFile):
            return self.teacher
        if isinstance(self.teacher, Origin):
            # The teacher's outputs may have other names, and be more or fewer than the student's.
            inputs = Signature(inputs=model.signature.inputs)
            return self.teacher.seal(context.work / "teacher", inputs, context.seed)
        return context.artifact(self.teacher)

    @property
    def _names_modules(self) -> bool:
        return any(term.modules is not None for term in self.losses)

    def _with_teacher_outputs(self, objective: DistillationObjective, context: Context) -> Splits:
        from compress.distillation.teacher_cache import CannotCache, with_teacher_outputs

        data = context.need_data(self.title)
        repeats = self.epochs > 1 and not objective.teacher_modules
        if self.cache_teacher is False or (self.cache_teacher == "auto" and not repeats):
            return data
        try:
            return with_teacher_outputs(objective, self, context, self.title)
        except CannotCache as error:
            if self.cache_teacher is True:
                raise StageFailed(f"cache_teacher: {error}; set cache_teacher: false") from error
            log.warning("%s: the teacher has to run in each epoch: %s", self.title, error)
            return data


def choose_blocks(
    model: EagerModel, container: str, count: int, keep: int, distance: Distance
) -> tuple[tuple[int, ...], dict[str, JsonValue]]:
    """Return the blocks with which a model is nearest to its teacher, and facts about the search.

    ``keep`` of the ``count`` blocks in the list ``container`` stay.
    """
    known: dict[tuple[int, ...], float] = {}

    def measure(kept: tuple[int, ...]) -> float:
        module = model.load()  # anew, because the edit removes blocks in place
        KeepBlocks(kept={container: kept}).apply_(module)
        known[kept] = distance(module)
        log.info("blocks %s: %.4g from the teacher", list(kept), known[kept])
        return known[kept]

    # All choices are measured if they are few, else the least harmful block is removed repeatedly.
    if math.comb(count, keep) <= LARGEST_SEARCH:
        best = min(itertools.combinations(range(count), keep), key=measure)
    else:
        best = tuple(range(count))
        while len(best) > keep:
            best = min((best[:i] + best[i + 1 :] for i in range(len(best))), key=measure)
    final = {kept: value for kept, value in known.items() if len(kept) == keep}
    nearest = sorted(final, key=lambda kept: final[kept])[:REPORTED]
    facts: dict[str, JsonValue] = {
        "measured": len(known),
        "nearest": [{"kept": list(kept), "distance": final[kept]} for kept in nearest],
    }
    return best, facts
