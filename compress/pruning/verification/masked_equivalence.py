"""Verify a slice: the smaller module must give the outputs of its masked twin.

The masked twin is the unsliced module in which every weight that the slice removes is zero: also
the columns that read a removed channel, so it has no effect whatever lies between. Tracing can miss
what Python did outside the graph, such as a width written into a ``view`` or a mean over channels
computed from a shape. With ``across_norms`` the twin's statistics over channels leave out those
that are removed (:class:`KeptStatisticsTwin`).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from compress.artifacts.edits.removal import keep_indices_
from compress.common.errors import StageFailed, first_line, raise_if_resources_ran_out
from compress.common.forward import (
    copy_module,
    flatten_outputs,
    plain_attention,
    run_in_eval,
    shallow_copy,
)
from compress.common.tensor_difference import largest, largest_difference, largest_finite
from compress.core.progress import Progress, silent
from compress.data.batch import Batch
from compress.pruning.dependency.channel_groups import SlicePlan, export_graph, label_axes, trace
from compress.pruning.dependency.module_attributes import (
    AttributeReads,
    all_changes,
    attribute_key,
    certain_changes,
    combined,
    possible_changes,
)
from compress.pruning.importance.layer_calls import refused_samples

if TYPE_CHECKING:
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.pruning.channel_settings import ChannelSelection
    from compress.pruning.dependency.channel_groups import (
        AxisGraph,
        Change,
        ChannelGroup,
        GroupSlice,
        Kept,
    )

log = logging.getLogger(__name__)

Outputs: TypeAlias = tuple[torch.Tensor, ...]

LARGER_SIZE = 12
"""Size of a named axis at which a slice is verified once more; seeded examples have 8."""
ROWS = 4
"""Real samples on which a slice is verified if the batch size is dynamic. Each adds a forward pass
in float64 to every comparison."""
SAMPLES_SEARCHED = 128
"""Samples that are read to find those with extreme values, if no calibration samples are given."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference relative to the largest output: rounding alone, as exact arithmetic has none.
"""
TOLERANCE_WITH_CASTS = 1e-6
"""The same for a float64 module that casts some results to fewer bits and back."""
# Layers of large modules compute more numbers per comparison, so fewer repetitions find an error.
VARIANTS, FEW_VARIANTS, SMALL = 8, 3, 1_000_000
"""Comparisons with other signs of the weights, for modules with fewer weights than `SMALL` and for
larger ones."""
ZERO_FILLING = 0.1  # standard deviation of the random values that replace an all-zero parameter


@dataclass(frozen=True)
class VerificationInputs:
    """What a module is traced with, and its slices are compared on."""

    seeded: Sequence[torch.Tensor]
    """Seeded example, on which the module is traced."""
    others: Sequence[Sequence[torch.Tensor]] = ()
    """Inputs of other sizes; those for which the module fails are left out."""
    real: Sequence[torch.Tensor] | None = None
    """A batch of real samples, which is compared first."""
    across_norms: bool = False
    """Whether channels are removed over which normalisations take statistics."""

    @classmethod
    def from_signature(
        cls,
        signature: Signature,
        context: Context,
        selection: ChannelSelection,
        batches: Sequence[Batch] = (),
    ) -> Self:
        """Build all inputs of a model; real samples are those of :func:`real_inputs`."""
        seed, real = context.seed, real_inputs(signature, context, batches)
        others = other_sizes(signature, seed)
        return cls(signature.example(seed=seed), others, real, selection.across_norms)

    def trace(self, module: nn.Module) -> AxisGraph:
        """Trace a module's axis graph on the seeded example; StageFailed where that fails."""
        return trace(module, self.seeded, across_norms=self.across_norms)


def other_sizes(signature: Signature, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Build inputs that are larger along one dynamic axis each, except the batch axis."""
    axes = [axis for axis in signature.dynamic_axes if axis != signature.batch_axis]
    larger = {axis: signature.bounds(axis).nearest(LARGER_SIZE) for axis in axes}
    return [signature.example(seed=seed, sizes={axis: larger[axis]}) for axis in axes]


def real_inputs(
    signature: Signature, context: Context, batches: Sequence[Batch] = ()
) -> tuple[torch.Tensor, ...] | None:
    """Return a batch of real samples with the largest and smallest values, or None without data.

    They are taken from ``batches``, calibration samples in memory, or read if there are none.
    """
    data = context.data
    if not batches and data is not None:
        for name in (data.calibration_split, "val"):
            if name in data.datasets:
                batches = list(data.batches(name, limit=SAMPLES_SEARCHED))
                break
    if not batches:
        return None
    shapes = [[x.shape[1:] for x in batch.inputs] for batch in batches]
    same_shape = [batches[i].inputs for i, own in enumerate(shapes) if own == shapes[0]]
    columns = tuple(torch.cat(column) for column in zip(*same_shape, strict=True))
    # A model's code may take other branches at extreme values, so these samples come first.
    extreme: list[int] = []
    for column in columns:
        if column.dim() > 1 and column.numel():
            numbers = column.flatten(1).double()
            extreme += [int(numbers.amax(1).argmax()), int(numbers.amin(1).argmin())]
    size = signature.inputs[0].shape[0] if signature.inputs[0].shape else ROWS
    rows = size if isinstance(size, int) else ROWS
    order = list(dict.fromkeys([*extreme, *range(len(columns[0]))]))
    chosen = torch.tensor([order[i % len(order)] for i in range(rows)])
    return tuple(column[chosen] for column in columns)


class MaskedEquivalence:
    """Compares sliced copies of a module with their masked twins, in float64 where possible."""

    def __init__(self, module: nn.Module, inputs: VerificationInputs) -> None:
        """Run the unsliced module on all inputs once, to see which of them are usable.

        The module is not changed.
        """
        self.must_trace = False
        """Whether a smaller model that torch.export cannot trace is a mismatch, too."""
        self.must_train = False
        """Whether a smaller model that cannot run in training mode is a mismatch, too."""
        self._across_norms = inputs.across_norms
        self._twins: dict[tuple[object, ...], KeptStatisticsTwin] = {}
        """Twins with statistics over kept channels, by the shapes of their inputs."""
        self._expected: tuple[Kept | None, list[Outputs]] | None = None
        try:
            self._prepare(module, inputs.seeded, torch.float64)
        except Exception:  # noqa: BLE001 - a forward that insists on float32 may fail in any way
            self._prepare(module, inputs.seeded, torch.float32)
        # Real samples first: a model's code may take a branch that values near 1 never reach, as
        # pixels go to 255.
        usable = []
        if inputs.real is not None:
            cast = self._cast(inputs.real)
            with refused_samples(Batch(tuple(inputs.real), None)):
                outputs = _outputs(self._module, cast)
            if _any_nan(outputs):
                log.warning(
                    "the model returns NaN for real samples: slices are verified on seeded inputs "
                    "only"
                )
            else:
                usable.append(cast)
        # NaN equals nothing, so outputs with NaN cannot be compared.
        if not _any_nan(_outputs(self._module, self._inputs)):
            usable.append(self._inputs)
        self._comparisons = [(variant, x) for x in usable for variant in range(self._variants)]
        """Variant of the weights' signs, and inputs, of each comparison."""
        # Entries that are read at some sizes only, like late positions, do not show at others.
        for inputs_of_size in map(self._cast, inputs.others):
            with suppress(Exception):  # a forward may refuse sizes in any way
                if self._across_norms:
                    self._twin(inputs_of_size)
                if not _any_nan(_outputs(self._module, inputs_of_size)):
                    self._comparisons.append((0, inputs_of_size))
        self._comparisons.sort(key=operator.itemgetter(0))  # a copy serves all inputs of a variant

    def find_mismatch(self, plan: SlicePlan) -> str | None:
        """Return why a slice is wrong, or None if it is verified."""
        slice_ = partial(keep_indices_, kept=plan.kept, attributes=plan.attributes)
        reason = self.find_change_mismatch(slice_, plan.kept)
        if reason is None and self.must_train:
            reason = self.untrainable(plan)
        return reason or (self.untraced(plan) if self.must_trace else None)

    def untraced(self, plan: SlicePlan) -> str | None:
        """Return why torch.export cannot trace the smaller model, or None if it can."""
        try:
            export_graph(sliced_copy(self._module, plan), self._inputs)
        except StageFailed as error:
            raise_if_resources_ran_out(error)
            return str(error)
        return None

    def untrainable(self, plan: SlicePlan) -> str | None:
        """Return why the smaller model cannot run in training mode; None if the unsliced cannot."""
        # Modules that run in training only, such as auxiliary heads, are not in the traced graph:
        # what they read must keep its size.
        smaller = sliced_copy(self._module, plan)
        reason = training_mismatch(smaller, self._inputs, self._in_training)
        return f"the smaller model {reason}" if reason else None

    @cached_property
    def _in_training(self) -> list[torch.Size] | str:
        return shapes_in_training(self._module, self._inputs)

    def is_read(self, attribute: str) -> bool:
        """Whether the module's forward reads an attribute, given its dotted name."""
        return attribute_key(self._module, attribute) in self._attribute_reads

    @cached_property
    def _attribute_reads(self) -> AttributeReads:
        reads = AttributeReads()
        with reads.recording(self._module):
            _outputs(self._module, self._inputs)
        return reads

    def find_change_mismatch(
        self, change_: Callable[[nn.Module], None], kept: Kept | None = None
    ) -> str | None:
        """Return why a change in place gives other outputs than the masked twin, or None.

        Without ``kept`` the twin is the module itself.
        """
        if not self._comparisons:
            return "the model itself answers NaN to all inputs: nothing can be proven"
        smaller, last = self._module, -1
        twins: dict[int, nn.Module] = {}
        for number, (variant, inputs) in enumerate(self._comparisons):
            try:
                if variant != last:
                    smaller, last = self._variant(variant), -1
                    change_(smaller)
                    last = variant
                found: Outputs | Exception = _outputs(smaller, inputs)
            except Exception as error:  # noqa: BLE001 - a forward may fail in any way
                raise_if_resources_ran_out(error)
                found = error
            # The twin's answers take longest, and the first do not matter where the smaller fails.
            if number or not isinstance(found, Exception):
                expected = self._expected_outputs(kept, number, twins)
                # Other signs may give a model values that it was not made for, like the square root
                # of a negative number. Infinities may be masked scores, which are compared.
                if variant and _any_nan(expected):
                    continue
            if isinstance(found, Exception):
                return f"the smaller model fails: {type(found).__name__}: {first_line(found)}"
            if [x.shape for x in found] != [x.shape for x in expected]:
                return "the smaller model's outputs have another shape"
            # 1e-12: the expected outputs may all be zero.
            worst = largest(
                largest_difference(right, own) / max(largest_finite(right), 1e-12)
                for own, right in zip(found, expected, strict=True)
            )
            if not worst <= self._tolerance:  # NaN is refused too
                return f"the smaller model answers otherwise than its masked twin (by {worst:.1e})"
        return None

    def _expected_outputs(
        self, kept: Kept | None, number: int, twins: dict[int, nn.Module]
    ) -> Outputs:
        """Return the masked twin's outputs of a comparison, cached for the last ``kept``.

        ``twins`` has at most one, which serves all inputs of its variant.
        """
        if self._expected is None or self._expected[0] != kept:
            self._expected = kept, []
        _, known = self._expected
        for variant, inputs in self._comparisons[len(known) : number + 1]:
            if variant not in twins:
                twins.clear()
                twins[variant] = self._variant(variant, kept)
            if kept is not None and self._across_norms:
                known.append(self._twin(inputs).outputs(twins[variant], kept, inputs))
            else:
                known.append(_outputs(twins[variant], inputs))
        return known[number]

    def _twin(self, inputs: Sequence[torch.Tensor]) -> KeptStatisticsTwin:
        """Return the graph of the module for the shapes of some inputs, exported once."""
        shapes = tuple(x.shape for x in inputs)
        if shapes not in self._twins:
            self._twins[shapes] = KeptStatisticsTwin(self._module, inputs)
        return self._twins[shapes]

    def _variant(self, variant: int, kept: Kept | None = None) -> nn.Module:
        """Copy the module, with other signs of weights unless ``variant`` is 0; share the rest.

        Entries that a slice which leaves ``kept`` would remove are zero in the copy.
        """
        # Whether a slice is right does not depend on the weights' values, but an index that is off
        # by some channels may only show where a ReLU that follows gets a negative number.
        generator = torch.Generator().manual_seed(variant)
        memo: dict[int, torch.Tensor] = {id(x): x for x in _tensors(self._module).values()}
        for parameter in self._module.parameters() if variant else ():
            if parameter.dim() > 1 and parameter.is_floating_point():
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                new = parameter.detach() * signs.to(parameter.device)
                memo[id(parameter)] = nn.Parameter(new)
        return zero_masked(self._module, kept or {}, memo)

    def _prepare(
        self, module: nn.Module, inputs: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> None:
        self._module = copy_module(module).to(dtype).eval()
        # Whether a slice is right does not depend on values, and zeros would hide an error.
        generator = torch.Generator().manual_seed(0)
        for parameter in self._module.parameters():
            if parameter.is_floating_point() and not parameter.any():
                numbers = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(numbers * ZERO_FILLING)
        self._dtype = dtype
        self._inputs = self._cast(inputs)
        with _LowerPrecisionDetector(dtype) as casts:
            _outputs(self._module, self._inputs)
        weights = sum(parameter.numel() for parameter in module.parameters())
        self._variants = VARIANTS if weights < SMALL else FEW_VARIANTS
        self._tolerance = TOLERANCE_WITH_CASTS if casts.found else TOLERANCE[dtype]

    def _cast(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [x.to(self._dtype) if x.is_floating_point() else x for x in inputs]


class _LowerPrecisionDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects operators whose results have fewer bits than the module."""

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
def zero_masked(
    module: nn.Module, kept: Kept, replacements: Mapping[int, torch.Tensor] | None = None
) -> nn.Module:
    """Copy a module with all entries that a slice would remove set to zero; share the rest.

    `replacements` has by the ``id`` of a tensor what the copy has in its place.
    """
    tensors = _tensors(module)
    memo = {id(tensor): tensor for tensor in tensors.values()} | dict(replacements or {})
    for name, axes in kept.items():
        old = memo[id(tensors[name])]
        new = old.detach().clone()
        for axis, indices in axes.items():
            is_removed = torch.ones(old.shape[axis], dtype=torch.bool, device=old.device)
            is_removed[list(indices)] = False
            new.index_fill_(axis, is_removed.nonzero().flatten(), 0)
        memo[id(tensors[name])] = nn.Parameter(new) if isinstance(old, nn.Parameter) else new
    return copy_module(module, memo)


def sliced_copy(module: nn.Module, plan: SlicePlan) -> nn.Module:
    """Copy a module without the channels of a plan; tensors that stay whole are shared."""
    smaller = shallow_copy(module)
    keep_indices_(smaller, plan.kept, plan.attributes)
    return smaller


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _outputs(module: nn.Module, inputs: Sequence[torch.Tensor]) -> Outputs:
    """Run a module with the same random numbers every time."""
    # Not torch.manual_seed, which seeds GPUs, too: their state is not restored here.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return run_in_eval(module, inputs)


def shapes_in_training(module: nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Size] | str:
    """Return the shapes of a module's outputs in training mode, or why it fails there."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():  # a copy: training changes buffers
            return [x.shape for x in flatten_outputs(copy_module(module).train()(*inputs))]
    except Exception as error:  # noqa: BLE001 - a forward may fail in any way
        raise_if_resources_ran_out(error)
        return f"{type(error).__name__}: {first_line(error)}"


def training_mismatch(
    smaller: nn.Module, inputs: Sequence[torch.Tensor], expected: list[torch.Size] | str
) -> str | None:
    """Return why a smaller module cannot be trained as the whole one; None where neither can.

    ``expected`` are the whole one's :func:`shapes_in_training`.
    """
    if isinstance(expected, str):
        return None
    found = shapes_in_training(smaller, inputs)
    if isinstance(found, str):
        return f"fails in training: {found}"
    return None if found == expected else "has outputs of another shape in training"


def _any_nan(outputs: Outputs) -> bool:
    return any(bool(x.isnan().any()) for x in outputs)


class KeptStatisticsTwin:
    """A module's exported graph, which runs on any weights for inputs of the same shapes.

    LayerNorm of a sliced width takes mean and variance over fewer channels than LayerNorm of the
    masked width, whose zeros count. So in the graph each normalisation gets the kept channels only.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        """Export the module."""
        self._program = export_graph(module, inputs)
        self._axes = label_axes(self._program, module, across_norms=True)

    def outputs(self, masked: nn.Module, kept: Kept, inputs: Sequence[torch.Tensor]) -> Outputs:
        """Run the graph with a masked module's weights; its norms see the kept channels."""
        removed = [torch.tensor([], dtype=torch.int64)]
        for (tensor, axis), classes in self._axes.classes.items():
            if axis in kept.get(tensor, {}):
                is_removed = torch.ones(len(classes), dtype=torch.bool)
                is_removed[list(kept[tensor][axis])] = False
                removed.append(classes[is_removed])
        seen = {}
        for node, (axis, classes) in self._axes.statistics.items():
            stays = ~torch.isin(classes, torch.cat(removed))
            if not stays.all():
                seen[node] = axis, stays.nonzero().flatten()
        tensors, given = {**self._program.constants, **_tensors(masked)}, iter(inputs)
        arguments = [
            next(given) if spec.kind is InputKind.USER_INPUT else tensors[str(spec.target)]
            for spec in self._program.graph_signature.input_specs
        ]
        graph = _KeptStatistics(self._program.graph_module, seen)
        # As run_in_eval does, and with the random numbers of _outputs.
        with torch.random.fork_rng(devices=[]), torch.inference_mode(), plain_attention():
            torch.default_generator.manual_seed(0)
            return flatten_outputs(graph.run(*arguments))


class _KeptStatistics(fx.Interpreter):
    """Gives the operators that take statistics over channels only some of these."""

    def __init__(
        self, module: fx.GraphModule, seen: Mapping[str, tuple[int, torch.Tensor]]
    ) -> None:
        """Interpret ``module``; ``seen`` has node → the axis of its input and the indices on it."""
        super().__init__(module)
        self._seen = seen

    def run_node(self, n: fx.Node) -> Any:
        """Run one operator of the graph."""
        if n.name not in self._seen:
            return super().run_node(n)
        axis, indices = self._seen[n.name]
        positional, keywords = self.fetch_args_kwargs_from_env(n)
        schema = n.target._schema  # type: ignore[union-attr]  # only ATen operators take statistics
        names = [argument.name for argument in schema.arguments]
        arguments = {**dict(zip(names, positional, strict=False)), **keywords}
        whole = arguments[names[0]]
        arguments[names[0]] = whole.index_select(axis, indices)
        shape = arguments.get("normalized_shape")
        first = whole.dim() - len(shape) if shape else axis
        if shape:
            arguments["normalized_shape"] = list(arguments[names[0]].shape[first:])
        for name in ("weight", "bias"):
            if arguments.get(name) is not None:
                arguments[name] = arguments[name].index_select(axis - first, indices)
        result = n.target(**arguments)  # type: ignore[operator]
        if "eps" not in names:  # a reduction
            return result
        return torch.zeros_like(whole).index_copy(axis, indices, result)


def verify_slices(
    module: nn.Module,
    wanted: Sequence[GroupSlice],
    pinned: Mapping[str, str],
    graph: AxisGraph,
    equivalence: MaskedEquivalence,
    progress: Progress = silent,
) -> SlicePlan:
    """Return the wanted slices that are verified together, and why the other groups stay.

    ``pinned`` gives the modules whose channels stay, known before, and why.
    """
    wanted = [replace(c, changes=certain_changes(module, c.group, graph)) for c in wanted]

    def search() -> SlicePlan:
        return _VerifiedSetSearch(module, wanted, graph, equivalence, progress).run(pinned)

    plan = search()
    # Both checks are slow and seldom fail, so they are first made of the whole plan. An attribute
    # may matter to tracing alone, which takes other paths through a model's code.
    if plan.groups and equivalence.untrainable(plan) is not None:
        equivalence.must_train = True
        plan = search()
    if plan.groups and equivalence.untraced(plan) is not None:
        equivalence.must_trace = True
        plan = search()
    return plan


@dataclass
class _VerifiedSetSearch:
    """Bisects a set of slices into those that are verified together and those refused.

    All wanted slices are compared at once with their masked twin; only if that fails, the set is
    halved, down to the single groups at fault. A module of n groups of which k cannot be sliced
    costs about k · log₂ n comparisons instead of n.
    """

    _module: nn.Module
    _wanted: Sequence[GroupSlice]
    _graph: AxisGraph
    _equivalence: MaskedEquivalence
    _progress: Progress = silent
    _refused: dict[ChannelGroup, str] = field(default_factory=dict)
    """Group → why it stays."""

    def run(self, pinned: Mapping[str, str]) -> SlicePlan:
        """Search, and return the plan of the verified slices in the order of the wanted ones."""
        verified = self._largest_verified(self._wanted) if self._wanted else []
        if self._refused:
            verified = self._with_dependents(verified)
        self._progress("verifying slices", len(self._wanted), len(self._wanted))
        order = {one.group: i for i, one in enumerate(self._wanted)}
        verified.sort(key=lambda one: order[one.group])
        refused = {group.name: reason for group, reason in reversed(self._refused.items())}
        return SlicePlan.combine(verified, {**pinned, **refused}, self._graph)

    def _largest_verified(self, slices: Sequence[GroupSlice]) -> list[GroupSlice]:
        """Return a verified subset, by bisection."""
        if len(slices) > 1:
            if self._mismatch(slices) is None:
                return list(slices)
            half = len(slices) // 2
            left = self._largest_verified(slices[:half])
            right = self._largest_verified(slices[half:])
            return self._extended(left, right) if left and right else left or right
        # A slice alone is verified with the attributes that must change with it.
        (one,), first_reason = slices, None
        is_read = self._equivalence.is_read
        for changes in possible_changes(self._module, one, self._graph, is_read):
            changed = replace(one, changes=(*one.changes, *changes))
            reason = self._mismatch([changed])
            if reason is None:
                return [changed]
            first_reason = first_reason or reason
        self._refused[one.group] = str(first_reason)
        return []

    def _extended(self, base: list[GroupSlice], more: Sequence[GroupSlice]) -> list[GroupSlice]:
        """Return a verified set, extended by those of another that are verified with it."""
        reason = self._mismatch([*base, *more])
        if reason is None:
            return [*base, *more]
        if len(more) == 1:
            self._refused[more[0].group] = f"together with other cuts, {reason}"
            return base
        half = len(more) // 2
        return self._extended(self._extended(base, more[:half]), more[half:])

    def _with_dependents(self, verified: list[GroupSlice]) -> list[GroupSlice]:
        """Add sets of slices that are wrong alone but right together."""
        # Modules may share a configuration that says how wide all of them are, or, as those of T5's
        # decoder do, a tensor that one of them makes as wide as itself. So slices that share an
        # attribute, or are of modules of the same classes, are tried together.
        modules = dict(self._module.named_modules())
        slices_of: dict[object, list[GroupSlice]] = {}
        for one in self._wanted:
            if one.group in self._refused:
                keys = {attribute_key(self._module, c.attribute) for c in self._read_changes(one)}
                owners = (name.rpartition(".")[0] for name in one.group.producer_modules)
                kind = (*(type(modules[name]) for name in owners), one.before, one.after)
                for key in (*sorted(keys), kind):
                    slices_of.setdefault(key, []).append(one)
        for candidates in filter(lambda slices: len(slices) > 1, slices_of.values()):
            # With changes of attributes that have the same names in all of them.
            read = (_last_name(change) for one in candidates for change in self._read_changes(one))
            for names in combined(list(dict.fromkeys(read))):
                together = list(verified)
                for one in candidates:
                    changes = all_changes(self._module, one, self._graph)
                    more = (change for change in changes if _last_name(change) in names)
                    together.append(replace(one, changes=(*one.changes, *more)))
                if self._mismatch(together) is None:
                    for one in candidates:
                        del self._refused[one.group]
                    return self._with_dependents(together)
        return verified

    def _read_changes(self, one: GroupSlice) -> list[Change]:
        changes = all_changes(self._module, one, self._graph)
        return [change for change in changes if self._equivalence.is_read(change.attribute)]

    def _mismatch(self, slices: Sequence[GroupSlice]) -> str | None:
        self._progress("verifying slices", len(self._refused), len(self._wanted))
        return self._equivalence.find_mismatch(SlicePlan.combine(slices, {}, self._graph))


def _last_name(change: Change) -> str:
    return change.attribute.rpartition(".")[2]
