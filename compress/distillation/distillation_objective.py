"""The distillation loss: a weighted sum of terms that compare student and teacher on a batch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs
from compress.common.process import derive_seed, seeded
from compress.core.objectives.task import need_tensor
from compress.distillation.teacher import FeatureRecorder, LoadedTeacher, Teacher
from compress.distillation.terms import (
    AnyTerm,
    FeatureTerm,
    Modules,
    OutputPair,
    cosine_distance,
    terms_of,
)
from compress.training.objectives.objective import AUXILIARY_PREFIX, TargetLoss, Teaching

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.data.batch import Batch

SEARCH_SAMPLES = 256  # samples of `train` on which choices of blocks are compared

Features = dict[str, torch.Tensor]  # outputs of modules by name; "" for the model's first output

Pairs = tuple[tuple[str, str], ...]
"""Names of student and teacher modules that are compared; "" for the models' outputs."""
UNNAMED: Pairs = (("", ""),)
"""Of terms that name no modules."""


@dataclass(frozen=True)
class DistillationObjective:
    """What the loss is made of: teacher, terms, compared modules; it can be pickled."""

    teacher: Teacher
    terms: tuple[AnyTerm, ...]
    pairs: tuple[Pairs, ...]
    """The modules that each term compares, by term."""
    targets: TargetLoss
    """The task's loss on the targets."""

    @property
    def teacher_modules(self) -> tuple[str, ...]:
        """The teacher's modules whose features are needed, each once."""
        names = (name for pairs in self.pairs for _, name in pairs if name)
        return tuple(dict.fromkeys(names))

    @classmethod
    def from_teaching(
        cls, teaching: Teaching, teacher: Artifact, targets: TargetLoss
    ) -> DistillationObjective:
        """Create the objective of a training that learns from a model's outputs, and from labels.

        Raises:
            StageFailed: the task has no classes that the outputs' divergence could compare.
        """
        teaching.check_loss(targets.loss)
        terms = terms_of(teaching)
        return cls(Teacher.from_model(teacher), terms, (UNNAMED,) * len(terms), targets)

    def prepare(self, device: str) -> DistillationLoss:
        """Return the loss function; it loads the teacher at its first call."""
        return DistillationLoss(self, device)


@dataclass
class FeatureSlot:
    """A pair of features that a term compares, and the student's projection."""

    name: str
    student: str
    teacher: str
    projects: bool = False

    @property
    def is_captured(self) -> bool:
        """Whether the student returns the feature after its outputs."""
        return self.projects or bool(self.student)

    def student_feature(self, module: nn.Module, own: Features) -> torch.Tensor:
        """Return the student's feature, projected if the slot has a projection."""
        if not self.projects:
            return own[self.student]
        weight, bias = (getattr(module, f"{self.name}_{part}") for part in ("weight", "bias"))
        features = own[self.student]
        # Over the channels; for images this is a 1x1 convolution.
        axis = channel_axis(features)
        return F.linear(features.movedim(axis, -1), weight, bias).movedim(-1, axis)


class DistillationLoss:
    """The loss function of a distillation in one process."""

    def __init__(self, objective: DistillationObjective, device: str) -> None:
        self.objective = objective
        self.device = device
        # The mean over all samples, so that those without a label add nothing.
        self.targets_loss = objective.targets.mean(device, over_all=True)
        self.slots = [
            [
                FeatureSlot(f"{AUXILIARY_PREFIX}{i}_{j}", own, taught)
                for j, (own, taught) in enumerate(pairs)
            ]
            for i, pairs in enumerate(objective.pairs)
        ]
        """The features that each term compares; `attach_` decides which are projected."""
        # Loaded at the first call: with all outputs cached, it is never needed.
        self.teacher: LoadedTeacher | None = None

    def __call__(self, outputs: tuple[torch.Tensor, ...], batch: Batch) -> torch.Tensor:
        """Return the weighted sum of all terms."""
        teacher_features = self._teacher_features(batch)
        count = sum(slot.is_captured for slots in self.slots for slot in slots)
        own_outputs = outputs[: len(outputs) - count]
        # In float32: under autocast outputs have 16 bits, too few for exponentials and sums.
        pair = OutputPair(
            student=outputs[0].float(),
            teacher=teacher_features[""].float(),
            target=batch.target,
            student_outputs=[x.float() if x.is_floating_point() else x for x in own_outputs],
            targets_loss=self.targets_loss,
        )
        captured = iter(outputs[len(own_outputs) :])
        total = pair.student.new_zeros(())
        for term, slots in zip(self.objective.terms, self.slots, strict=True):
            if term.needs_equal_outputs:
                _need_equal_shapes(pair.student, pair.teacher)
            own = [next(captured) if slot.is_captured else outputs[0] for slot in slots]
            features = [
                (a.float(), teacher_features[slot.teacher].float())
                for a, slot in zip(own, slots, strict=True)
            ]
            compared = self._classes_first(pair) if term.compares_classes else pair
            total = total + term.weight * term.compute(compared, features)
        return total

    def _classes_first(self, pair: OutputPair) -> OutputPair:
        """Return outputs with the task's classes on axis 1, each beside its own label."""
        task = self.objective.targets.loss.task
        if task is None or not task.classes_last:
            return pair
        if not isinstance(pair.target, torch.Tensor):
            student, teacher = task.classes_first(pair.student), task.classes_first(pair.teacher)
            return replace(pair, student=student, teacher=teacher)
        labels = need_tensor(f"task: {task.name}", pair.target)
        teacher, _ = task.align(pair.teacher, labels)
        student, target = task.align(pair.student, labels)
        return replace(pair, student=student, teacher=teacher, target=target)

    def attach_(self, module: nn.Module, example: Batch) -> None:
        """Let the module return the compared features after its outputs in training, in place."""
        terms = self.objective.terms
        slots = [slot for slots in self.slots for slot in slots]
        if not any(slot.is_captured for slot in slots) and all(t.projects == "none" for t in terms):
            return
        recorder = FeatureRecorder(module, [slot.student for slot in slots if slot.student])
        with torch.no_grad():
            own = recorder.with_output(flatten_outputs(module(*example.inputs))[0])
        teacher_features = self._teacher_features(example)
        for index, (term, chosen) in enumerate(zip(terms, self.slots, strict=True)):
            for slot in chosen:
                a, b = own[slot.student], teacher_features[slot.teacher]
                differ = a.shape[channel_axis(a)] != b.shape[channel_axis(b)]
                slot.projects = term.projects == "linear" or (term.projects == "auto" and differ)
                if slot.projects:
                    _add_projection_(module, slot.name, a, b)
                if not isinstance(term, FeatureTerm):
                    continue
                if not term.compares(slot.student_feature(module, own).shape, b.shape):
                    raise StageFailed(
                        f"losses[{index}] ({term.loss}): {slot.student or 'the output'!r} of the "
                        f"student has shape {tuple(a.shape)} and {slot.teacher or 'the output'!r} "
                        f"of the teacher {tuple(b.shape)}, which cannot be compared; name others"
                    )

        def return_features(module: nn.Module, inputs: Any, output: Any) -> Any:
            if not module.training:
                recorder.features.clear()
                return None
            # After the outputs, because DistributedDataParallel finds the parameters that a loss
            # depends on from the outputs of forward.
            outputs = flatten_outputs(output)
            own = recorder.with_output(outputs[0])
            captured = (slot.student_feature(module, own) for slot in slots if slot.is_captured)
            return (*outputs, *captured)

        module.register_forward_hook(return_features)

    def _teacher_features(self, batch: Batch) -> Features:
        outputs, modules = batch.teacher_outputs, self.objective.teacher_modules
        if not outputs:
            if self.teacher is None:
                self.teacher = self.objective.teacher.load(self.device, modules)
            outputs = self.teacher(batch.inputs)
        return dict(zip(("", *modules), outputs, strict=True))


def _need_equal_shapes(student: torch.Tensor, teacher: torch.Tensor) -> None:
    """Refuse a teacher whose output has another shape than the model's."""
    if teacher.shape != student.shape:
        raise StageFailed(
            f"the teacher's output has shape {tuple(teacher.shape)} and the model's "
            f"{tuple(student.shape)}; name a teacher with the same outputs"
        )


def pairs_of(terms: Sequence[AnyTerm], student: nn.Module, teacher: nn.Module) -> tuple[Pairs, ...]:
    """Match the student's and the teacher's modules for each term of the loss."""
    pairs: list[Pairs] = []
    for i, term in enumerate(terms):
        if term.modules is None:
            pairs.append(UNNAMED)
            continue
        own = _matching_modules(term.modules[0], student, f"losses[{i}]: the student")
        taught = _matching_modules(term.modules[1], teacher, f"losses[{i}]: the teacher")
        if len(taught) < len(own):
            raise StageFailed(
                f"losses[{i}]: {len(own)} modules of the student and {len(taught)} of the teacher; "
                "name as many, or more of the teacher"
            )
        # TinyBERT's uniform map: the m-th of M goes with the (m N / M)-th of N.
        places = [(m + 1) * len(taught) // len(own) - 1 for m in range(len(own))]
        pairs.append(tuple((name, taught[p]) for name, p in zip(own, places, strict=True)))
    return tuple(pairs)


def _matching_modules(wanted: Modules, module: nn.Module, where: str) -> list[str]:
    known = [name for name, _ in module.named_modules() if name]
    names: list[str] = []
    for name in (wanted,) if isinstance(wanted, str) else wanted:
        pattern = re.compile(re.escape(name).replace(r"\*", r"[^.]+"))
        matches = [other for other in known if pattern.fullmatch(other)]
        if not matches:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"it has {', '.join(known[:8])}{' …' if len(known) > 8 else ''}"
            if near:
                hint = f"did you mean {' or '.join(map(repr, near))}?"
            raise StageFailed(f"{where} has no module {name!r}; {hint}")
        names += matches
    return names


def channel_axis(features: torch.Tensor) -> int:
    """Return the channel axis: the second of images (N, C, H, W) and volumes, else the last."""
    return 1 if features.dim() in (4, 5) else -1


def _add_projection_(
    module: nn.Module, name: str, student: torch.Tensor, teacher: torch.Tensor
) -> None:
    """Add the parameters of a linear map to the module, in place, to be trained with its own."""
    own, wanted = (x.shape[channel_axis(x)] for x in (student, teacher))
    # From the training's seed, whether or not a teacher was loaded since and drew random numbers.
    with seeded(derive_seed(torch.initial_seed()), "cpu"):
        linear = nn.Linear(own, wanted).to(student.device)
    # Not as a submodule: a Sequential would run it.
    for part, weight in linear.named_parameters():
        module.register_parameter(f"{name}_{part}", weight)


def distance_to(
    teacher: Teacher, terms: Sequence[AnyTerm], context: Context
) -> Callable[[nn.Module], float]:
    """Return a function that measures how far a module's outputs are from a teacher's."""
    data = context.need_data("a search of blocks")
    batches = data.batches("train", limit=SEARCH_SAMPLES)
    inputs = [batch.to(context.device).inputs for batch in batches]
    count = sum(len(own[0]) for own in inputs)
    loaded = teacher.load(context.device)
    expected_outputs = [loaded(own)[0] for own in inputs]
    # By the terms that compare outputs without labels, else by cosine.
    comparing = [term for term in terms if term.needs_equal_outputs]

    @torch.no_grad()
    def distance(module: nn.Module) -> float:
        module = module.to(context.device).eval()
        total = 0.0
        for own, expected in zip(inputs, expected_outputs, strict=True):
            output = flatten_outputs(module(*own))[0]
            _need_equal_shapes(output, expected)
            pair = OutputPair(output, expected, None)
            value = sum(term.weight * term.compute(pair, []) for term in comparing)
            total += float(value if comparing else cosine_distance(output, expected)) * len(output)
        return total / count

    return distance
