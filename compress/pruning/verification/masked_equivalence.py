"""Proof that a cut is right: the smaller module answers as the original with the channels silenced.

Tracing can miss what Python did outside the graph: a width written into a ``view``, a mean over
channels computed from a shape, an index into channels. So no cut is trusted: it is made on a copy
and compared, on real samples where there are any and on seeded inputs, with its masked twin, in
which every entry that would go is zero. A zero row is silent whatever comes between it and its
readers, because their columns are zero too. Real samples count because a model's code may take a
branch that numbers of size 1 never reach: pixels go to 255.

Whether a cut is right depends on no value of the weights, so it is compared several times, with
other signs of them: a channel that lands on the wrong side of a border shows only where a ReLU
behind the border meets a negative number.
"""

from __future__ import annotations

import copy
import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from compress.artifacts.edits.slicing import keep_indices_
from compress.common.errors import StageFailed, first_line
from compress.common.forward import flatten_outputs, run_in_eval
from compress.common.tensor_difference import largest, largest_difference, largest_finite
from compress.data.batch import Batch
from compress.pruning.dependency.attribute_reads import AttributesRead, place_of
from compress.pruning.dependency.graph import exported
from compress.pruning.importance.layer_calls import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from compress.pruning.dependency.channel_groups import Kept
    from compress.pruning.dependency.group_slices import Value

log = logging.getLogger(__name__)

Outputs: TypeAlias = tuple[torch.Tensor, ...]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference, relative to the largest output; in exact arithmetic there is none."""
CAST_INSIDE = 1e-6
"""The same where a module of doubles casts some of them to fewer bits and back."""
VARIANTS, FEW_VARIANTS, SMALL = 8, 3, 1_000_000
"""How often a cut is compared, with other signs of the weights each time: of a module with fewer
weights than `SMALL`, or of one with more, whose layers see more numbers in each comparison."""
ZERO_FILLING = 0.1
"""Spread of the numbers in place of a parameter that is zero throughout."""


class MaskedEquivalence:
    """Compares cuts of a module with their masked twins, in double precision where it runs."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[torch.Tensor],
        others: Iterable[Sequence[torch.Tensor]] = (),
        real: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Take what is asked.

        Args:
            module: a module, which is not changed.
            inputs: seeded inputs that its forward takes.
            others: inputs of other sizes, at which a cut must be right as well: entries that are
                read at some sizes only, like late positions, do not show at others. Those that
                the module refuses, or answers with NaN, are left out.
            real: a batch of real samples, where there are any; asked first.
        """
        self.must_trace = False
        """Whether a smaller model that torch.export cannot trace is refuted, too."""
        self.must_train = False
        """Whether a smaller model that cannot run in training mode is refuted, too."""
        self._expected: tuple[Kept | None, list[Outputs]] | None = None
        try:
            self._prepare(module, inputs, torch.float64)
        except Exception:  # noqa: BLE001 - whatever a forward does when it insists on float32
            self._prepare(module, inputs, torch.float32)
        asked = [] if real is None else self._real_inputs(real)
        if not _any_nan(_answers(self._module, self._inputs)):
            asked.append(self._inputs)
        self._questions = [(variant, x) for x in asked for variant in range(self._variants)]
        self._questions += [(0, other) for other in map(self._cast, others) if self._takes(other)]

    def find_mismatch(self, kept: Kept, attributes: Mapping[str, Value]) -> str | None:
        """Return why a cut is wrong, or None when it is proven.

        Args:
            kept: tensor → axis → indices that stay.
            attributes: dotted attribute → value that goes with the cut.
        """
        reason = self._compare(lambda part: keep_indices_(part, kept, attributes), kept)
        if reason is None and self.must_train:
            reason = self.untrainable(kept, attributes)
        return reason or (self.untraced(kept, attributes) if self.must_trace else None)

    def untraced(self, kept: Kept, attributes: Mapping[str, Value]) -> str | None:
        """Return why torch.export cannot trace the smaller model, or None when it can."""
        smaller = shallow_copy(self._module)
        keep_indices_(smaller, kept, attributes)
        try:
            exported(smaller, self._inputs)
        except StageFailed as error:
            return str(error)
        return None

    def untrainable(self, kept: Kept, attributes: Mapping[str, Value]) -> str | None:
        """Return why the smaller model cannot run in training mode, or None when it can.

        Modules that run in training alone, such as auxiliary heads, are in no graph of evaluation:
        what they read must keep its size. Of a model that does not run so as it is, nothing is
        known, and None is returned.
        """
        smaller = shallow_copy(self._module)
        keep_indices_(smaller, kept, attributes)
        expected = self._in_training
        try:
            found = expected and shapes_in_training(smaller, self._inputs)
        except Exception as error:  # noqa: BLE001 - a forward may fail in any way
            return (
                f"the smaller model fails in training: {type(error).__name__}: {first_line(error)}"
            )
        if found != expected:
            return "the smaller model's outputs have another shape in training"
        return None

    @cached_property
    def _in_training(self) -> list[torch.Size] | None:
        """Shapes of the whole model's outputs in training mode, where it runs so."""
        try:
            return shapes_in_training(self._module, self._inputs)
        except Exception:  # noqa: BLE001 - a forward may fail in any way
            return None

    def is_read(self, attribute: str) -> bool:
        """Return whether the module's forward reads an attribute, given its dotted name."""
        return place_of(self._module, attribute) in self._read

    @cached_property
    def _read(self) -> AttributesRead:
        read = AttributesRead()
        with read.watching(self._module):
            _answers(self._module, self._inputs)
        return read

    def find_change_mismatch(self, change_: Callable[[nn.Module], None]) -> str | None:
        """Return why a change in place does not keep the answers, or None when it does."""
        return self._compare(change_, None)

    def _compare(self, change_: Callable[[nn.Module], None], kept: Kept | None) -> str | None:
        if not self._questions:
            return "the model itself answers NaN to all inputs: nothing can be proven"
        for variant, inputs, expected in self._expected_answers(kept):
            smaller = self._variant(variant)
            try:
                change_(smaller)
                found = _answers(smaller, inputs)
            except Exception as error:  # noqa: BLE001 - a forward may fail in any way
                return f"the smaller model fails: {type(error).__name__}: {first_line(error)}"
            if [x.shape for x in found] != [x.shape for x in expected]:
                return "the smaller model's outputs have another shape"
            worst = largest(map(_relative_difference, found, expected))
            if not worst <= self._tolerance:  # NaN is refused too
                return f"the smaller model answers otherwise than its masked twin (by {worst:.1e})"
        return None

    def _expected_answers(
        self, kept: Kept | None
    ) -> Iterator[tuple[int, Sequence[torch.Tensor], Outputs]]:
        """Yield variants, what they are asked and the masked twin's answers, once found out."""
        if self._expected is None or self._expected[0] != kept:
            self._expected = kept, []
        known = self._expected[1]
        for place, (variant, inputs) in enumerate(self._questions):
            if place == len(known):
                module = self._variant(variant)
                masked = module if kept is None else zero_masked(module, kept)
                known.append(_answers(masked, inputs))
            # Other signs may take a model where it was never meant to be, like a root of less
            # than nothing. Infinities may be masked scores, which are compared.
            if variant == 0 or not _any_nan(known[place]):
                yield variant, inputs, known[place]

    def _variant(self, variant: int) -> nn.Module:
        """Return the module, or one whose weights have other signs; it shares the rest."""
        if variant == 0:
            return shallow_copy(self._module)
        generator = torch.Generator().manual_seed(variant)
        memo: dict[int, Any] = {id(tensor): tensor for tensor in _tensors(self._module).values()}
        for parameter in self._module.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                new = parameter.detach() * signs.to(parameter.device)
                memo[id(parameter)] = nn.Parameter(new)
        return copy.deepcopy(self._module, memo)

    def _prepare(
        self, module: nn.Module, inputs: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> None:
        self._module = copy.deepcopy(module).to(dtype).eval()
        _fill_zeros_(self._module)
        self._dtype = dtype
        self._inputs = self._cast(inputs)
        with _Casts(dtype) as casts:
            _answers(self._module, self._inputs)
        weights = sum(parameter.numel() for parameter in module.parameters())
        self._variants = VARIANTS if weights < SMALL else FEW_VARIANTS
        self._tolerance = CAST_INSIDE if casts.found else TOLERANCE[dtype]

    def _cast(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [x.to(self._dtype) if x.is_floating_point() else x for x in inputs]

    def _takes(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether the module takes inputs, and does not answer NaN, which equals nothing."""
        try:
            return not _any_nan(_answers(self._module, inputs))
        except Exception:  # noqa: BLE001 - a forward refuses sizes in any way
            return False

    def _real_inputs(self, real: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return a batch of real samples as the only one to ask; none where answers are NaN.

        Raises:
            StageFailed: the module does not take the samples.
        """
        inputs = self._cast(real)
        try:
            answers = _answers(self._module, inputs)
        except Exception as error:
            raise refused(Batch(tuple(real), None), error) from error
        if _any_nan(answers):
            log.warning(
                "the model answers NaN to real samples: cuts are proven on seeded inputs alone"
            )
            return []
        return [inputs]


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices results that have fewer bits than the module."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bits = torch.finfo(dtype).bits
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        results = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(results):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self.found |= torch.finfo(leaf.dtype).bits < self._bits
        return results


@torch.no_grad()
def _fill_zeros_(module: nn.Module) -> None:
    """Give parameters that are zero throughout random values, in place.

    Whether a cut is right depends on no value, and what a zero silences could not be compared.
    """
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.is_floating_point() and not parameter.any():
            numbers = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(numbers * ZERO_FILLING)


@torch.no_grad()
def zero_masked(module: nn.Module, kept: Kept) -> nn.Module:
    """Return a copy in which all entries that a cut would remove are zero; it shares the rest."""
    tensors = _tensors(module)
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors.values()}
    for name, axes in kept.items():
        old = tensors[name]
        new = old.detach().clone()
        for axis, indices in axes.items():
            leaves = torch.ones(old.shape[axis], dtype=torch.bool, device=old.device)
            leaves[list(indices)] = False
            new.index_fill_(axis, leaves.nonzero().flatten(), 0)
        memo[id(old)] = nn.Parameter(new) if isinstance(old, nn.Parameter) else new
    return copy.deepcopy(module, memo)


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return a copy that shares its tensors; fit for surgery, which replaces them."""
    return copy.deepcopy(module, {id(tensor): tensor for tensor in _tensors(module).values()})


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _answers(module: nn.Module, inputs: Sequence[torch.Tensor]) -> Outputs:
    """Run a module, with the same random numbers every time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return run_in_eval(module, inputs)


def shapes_in_training(module: nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Size]:
    """Run a copy of a module in training mode, which changes buffers, and return output shapes."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return [x.shape for x in flatten_outputs(copy.deepcopy(module).train()(*inputs))]


def _any_nan(answers: Outputs) -> bool:
    return any(bool(x.isnan().any()) for x in answers)


def _relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest finite number that is expected."""
    return largest_difference(expected, found) / max(largest_finite(expected), 1e-12)
