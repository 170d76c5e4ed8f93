"""The objective of distillation: terms that compare a student with its teacher on each batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs
from compress.common.process import derive_seed, seeded
from compress.distillation.feature_hooks import Pairs, Recorder, channel_axis, projected
from compress.distillation.feature_losses import FeatureTerm
from compress.distillation.loss_terms import AnyTerm  # noqa: TC001 - a dataclass field
from compress.distillation.output_losses import OutputPair
from compress.training.objectives.objective import BESIDE, TargetLoss
from compress.training.objectives.teacher_objective import cosine_distance, need_equal_shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compress.core.stage import Context
    from compress.data.batch import Batch
    from compress.distillation.teacher import Answering, Teacher

SEARCHED_ON = 256
"""Samples of `train` on which choices of blocks are compared."""

Heard = dict[str, torch.Tensor]
"""What modules gave, by name; "" for a model's first output."""


@dataclass(frozen=True)
class Lessons:
    """A weighted sum of terms, each of which compares the student with its teacher or labels."""

    teacher: Teacher
    terms: tuple[AnyTerm, ...]
    pairs: tuple[Pairs, ...]
    """The modules that each term compares, as many as terms."""
    targets: TargetLoss
    """The loss on the targets."""

    @property
    def asked(self) -> tuple[str, ...]:
        """The teacher's modules whose outputs are needed, each once."""
        names = (name for pairs in self.pairs for _, name in pairs if name)
        return tuple(dict.fromkeys(names))

    def prepare(self, device: str) -> Lesson:
        """Return the loss function; the teacher is loaded when it is asked for the first time."""
        return Lesson(self, device)

    def slots(self) -> list[list[Slot]]:
        """Return what each term compares, before projections are known."""
        return [
            [Slot(f"{BESIDE}{i}_{j}", own, taught) for j, (own, taught) in enumerate(pairs)]
            for i, pairs in enumerate(self.pairs)
        ]


@dataclass
class Slot:
    """A pair of features that a term compares."""

    name: str
    student: str
    teacher: str
    projects: bool = False

    @property
    def is_captured(self) -> bool:
        """Whether the model hands it over behind its outputs."""
        return self.projects or bool(self.student)

    def of(self, module: nn.Module, own: Heard) -> torch.Tensor:
        """Return the student's features, through the projection where there is one."""
        if not self.projects:
            return own[self.student]
        weight, bias = (getattr(module, f"{self.name}_{part}") for part in ("weight", "bias"))
        return projected(own[self.student], weight, bias)


class Lesson:
    """The loss function of a distillation, in one process."""

    def __init__(self, lessons: Lessons, device: str) -> None:
        self.lessons = lessons
        self.device = device
        self.targets_loss = lessons.targets.mean(device, over_all=True)
        self.slots = lessons.slots()
        self.teacher: Answering | None = None

    def __call__(self, outputs: tuple[torch.Tensor, ...], batch: Batch) -> torch.Tensor:
        """Return the weighted sum of all terms."""
        taught = self._taught(batch)
        said = OutputPair(
            student=outputs[0].float(),
            teacher=taught[""].float(),
            target=batch.target,
            targets_loss=self.targets_loss,
        )
        count = sum(slot.is_captured for slots in self.slots for slot in slots)
        handed = iter(outputs[len(outputs) - count :])
        total = said.student.new_zeros(())
        for term, slots in zip(self.lessons.terms, self.slots, strict=True):
            if term.needs_equal_outputs:
                need_equal_shapes(said.student, said.teacher)
            own = [next(handed) if slot.is_captured else outputs[0] for slot in slots]
            pairs = [
                (a.float(), taught[slot.teacher].float())
                for a, slot in zip(own, slots, strict=True)
            ]
            total = total + term.weight * term.of(said, pairs)
        return total

    def attach_(self, module: nn.Module, example: Batch) -> None:
        """Let the module hand over, in training, the features that terms compare, in place.

        They come behind its flattened outputs: what shares gradients between processes then sees
        what they depend on. Projections become the module's own parameters.

        Raises:
            StageFailed: features cannot be compared, or a module takes no part in the forward pass.
        """
        kinds = [term.projects for term in self.lessons.terms]
        slots = [slot for slots in self.slots for slot in slots]
        if all(kind == "none" for kind in kinds) and not any(slot.is_captured for slot in slots):
            return
        recorder = Recorder(module, [slot.student for slot in slots if slot.student])
        with torch.no_grad():
            own = recorder.with_output(flatten_outputs(module(*example.inputs))[0])
        taught = self._taught(example)
        for index, (kind, chosen) in enumerate(zip(kinds, self.slots, strict=True)):
            for slot in chosen:
                a, b = own[slot.student], taught[slot.teacher]
                slot.projects = _is_projected(kind, a, b)
                if slot.projects:
                    _add_projection_(module, slot.name, a, b)
                self._refuse_other_shapes(index, slot, module, own, b)
        module.register_forward_hook(partial(self._hand_over, recorder))

    def _hand_over(self, recorder: Recorder, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not module.training:
            recorder.heard.clear()
            return None
        outputs = flatten_outputs(output)
        own = recorder.with_output(outputs[0])
        heard = (slot.of(module, own) for slots in self.slots for slot in slots if slot.is_captured)
        return (*outputs, *heard)

    def _taught(self, batch: Batch) -> Heard:
        """Return what the teacher said: kept answers, or those of the teacher itself."""
        answers = batch.teacher_outputs
        if not answers:
            if self.teacher is None:
                self.teacher = self.lessons.teacher.answering(self.device, self.lessons.asked)
            answers = self.teacher(batch.inputs)
        return dict(zip(("", *self.lessons.asked), answers, strict=True))

    def _refuse_other_shapes(
        self, index: int, slot: Slot, module: nn.Module, own: Heard, taught: torch.Tensor
    ) -> None:
        """Refuse features that the term cannot compare."""
        term = self.lessons.terms[index]
        if not isinstance(term, FeatureTerm):
            return
        if not term.compares(slot.of(module, own).shape, taught.shape):
            raise StageFailed(
                f"losses[{index}] ({term.loss}): {slot.student or 'the output'!r} of the student "
                f"has shape {tuple(own[slot.student].shape)} and {slot.teacher or 'the output'!r} "
                f"of the teacher {tuple(taught.shape)}, which cannot be compared; name others"
            )


def _is_projected(kind: str, student: torch.Tensor, teacher: torch.Tensor) -> bool:
    channels = [x.shape[channel_axis(x)] for x in (student, teacher)]
    return kind == "linear" or (kind == "auto" and channels[0] != channels[1])


def _add_projection_(
    module: nn.Module, name: str, student: torch.Tensor, teacher: torch.Tensor
) -> None:
    """Add a linear map's weights to the module, in place, as parameters of its own.

    Not as a module: a Sequential would run it.
    """
    own, taught = (x.shape[channel_axis(x)] for x in (student, teacher))
    # The training's seed, whatever was drawn since: a teacher may have been loaded or not.
    with seeded(derive_seed(torch.initial_seed()), "cpu"):
        linear = nn.Linear(own, taught).to(student.device)
    for part, weight in linear.named_parameters():
        module.register_parameter(f"{name}_{part}", weight)


def distance_to(
    teacher: Teacher, terms: Sequence[AnyTerm], context: Context
) -> Callable[[nn.Module], float]:
    """Return what measures how far a module's answers are from a teacher's, on some of `train`.

    Measured by the terms that compare outputs without labels, or by cosine where there are none.
    """
    data = context.need_data("a search of blocks")
    count = min(SEARCHED_ON, len(data.split("train")))  # type: ignore[arg-type]
    drawn = torch.randperm(
        len(data.split("train")),  # type: ignore[arg-type]
        generator=torch.Generator().manual_seed(context.seed),
    )
    batches = data.read("train", drawn[:count].tolist(), data.batch_size)
    inputs = [batch.to(context.device).inputs for batch in batches]
    answer = teacher.answering(context.device)
    taught = [answer(own)[0] for own in inputs]
    comparing = [term for term in terms if term.needs_equal_outputs]

    @torch.no_grad()
    def distance(module: nn.Module) -> float:
        module = module.to(context.device).eval()
        total = 0.0
        for own, expected in zip(inputs, taught, strict=True):
            found = flatten_outputs(module(*own))[0]
            need_equal_shapes(found, expected)
            said = OutputPair(found, expected, None)
            value = sum(term.weight * term.of(said, []) for term in comparing)
            total += float(value if comparing else cosine_distance(found, expected)) * len(found)
        return total / count

    return distance
