"""The search of `compress auto`: predict, solve, check by a real run, correct, and again."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed
from compress.common.sealed_json import read_state, write_state
from compress.pipelines.auto.candidate_evaluator import CandidateEvaluator
from compress.pipelines.auto.candidates import Candidate, CheckedModel, rungs
from compress.pipelines.auto.front import (
    Front,
    missed_limits,
    run_point,
    shares_of_limits,
    write_point,
    write_points,
)
from compress.pipelines.auto.search_state import BlockVariant, SearchState
from compress.pipelines.system import jsonl_log
from compress.pipelines.system.error_context import raise_unless_of_the_model
from compress.pipelines.system.machine_info import machine, versions
from compress.profiling.peak_memory import measurement_process
from compress.pruning.depth import block_search
from compress.pruning.depth.block_search import OutputErrorMeter
from compress.pruning.importance.remembered_scores import remembering_scores
from compress.pruning.latency.solver import Programme
from compress.pruning.latency.widths import WidthSpace

if TYPE_CHECKING:
    from compress.pipelines.auto.cost_models import LatencyTables
    from compress.pipelines.auto.search_state import Programmes
    from compress.pipelines.config.auto_settings import AutoSettings
    from compress.pipelines.config.pipeline import PipelineConfig
    from compress.pipelines.config.run_options import RunOptions

FIRST_SHARE, SENSITIVITY_SHARE = 0.1, 0.35
"""Shares of the time after which what single cuts lose is taken as known: early, and once more.
Of what is left, where that is more."""
RANKING_SHARE = 0.5
"""Share of the time that is left for the ranking of channels; layers in float need none of it."""
BLOCKS_SHARE = 0.5
"""Share of the time that is left after a first model, until training, for models without some
blocks; of what is left then, the same share is for what single cuts lose there."""
UNTRAINED_SHARE = 0.25
"""Share of the time after which models are trained, where `recovery` says so; what single cuts lose
matters less then. Twice as much where blocks may be removed."""
BLOCKS_FILE = "blocks.json"  # in the results' folder: the order in which blocks are removed
ORDER_SHARE = 0.1  # share of the search's time for that order
BLOCKS_COMPARED_ON = 64  # samples on which the outputs of a model without a block are compared
MAX_CHECKS_AT_LIMIT = 5
"""Models that are checked at the asked latency before other latencies are looked at."""
NARROW_GAP = 1.03  # ratio of two latencies between which no further model is looked for
OVERTIME_SHARE = 0.1
"""Share of the time, beyond it, in which models that were begun are made, and points are run."""
WEIGHT_BEHIND_BAD = 0.5  # weight of a gap of latencies whose slower end loses too much
AIMED_SHARE = 0.99
"""Share of the asked latency that the solver aims at until a model keeps to it, as half of all are
slower than predicted; from then on at all of it: the best may be predicted at the very limit."""
MAX_TRAINED_AT_ONCE = 6  # models of which successive halving trains the best to the end

Contenders: TypeAlias = list[tuple[Candidate, float | None]]
"""Models, and their predicted latencies."""


def search(
    pipeline: PipelineConfig,
    settings: AutoSettings,
    out: Path,
    options: RunOptions,
    tables: LatencyTables | None = None,
) -> Front:
    """Look for the models that lose least under limits, until the time is over.

    A search that was stopped goes on where it was, in its folder of results. `tables` are latencies
    of another machine, which are taken instead of measuring any here.
    """
    if tables is not None:
        tables.refuse_other_settings(settings, pipeline.threads)
    start = time.monotonic()
    # Memory of all candidates in one process, which imports the libraries once.
    with search_log(out), measurement_process(), remembering_scores():
        emit = jsonl_log.EventEmitter(options.announce)
        fields: dict[str, Any] = {
            "pipeline": pipeline.name,
            "versions": dict(versions()),
            "machine": dict(machine()),
            "settings": settings.model_dump(mode="json", exclude_unset=True),
        }
        line = f"{pipeline.name}: search started"
        emit("search_started", None, line, fields, is_announced=False)
        evaluator = CandidateEvaluator.from_pipeline(pipeline, settings, out, options)
        if tables is not None:
            evaluator.tables, evaluator.base_ms = tables, tables.base_ms
        begun = {"opening the model and its data": time.monotonic() - start}
        state = SearchState(evaluator, spent=begun, emit=emit)
        with state.timed("all else"):
            front = run_search(state, start + settings.time)
        front = front.model_copy(update={"spent": state.spent})
        front.write(out)
        seconds = time.monotonic() - start
        fields = {"best": front.best, "points": front.points, "seconds": seconds}
        line = f"{len(front.checked)} models checked, best: {front.best or 'none'}"
        emit("search_finished", None, line, fields, is_announced=False)
    return front


@contextmanager
def search_log(out: Path) -> Iterator[None]:
    """Append the events of a block to the log in a folder, without those of runs within it."""
    out.mkdir(parents=True, exist_ok=True)
    log = jsonl_log.LogFile(out / jsonl_log.LOG, uuid.uuid4().hex[:12], lambda: "")

    def is_innermost(_: object) -> bool:
        handlers = logging.getLogger(jsonl_log.LOGGER).handlers
        return [h for h in handlers if isinstance(h, jsonl_log.LogFile)][-1:] == [log]

    log.addFilter(is_innermost)
    with jsonl_log.log_handler(log):
        yield


def run_search(state: SearchState, deadline: float) -> Front:
    """Search until a deadline of :func:`time.monotonic`, or nothing is left to try."""
    evaluator, settings = state.evaluator, state.settings
    state.last_moment = deadline + OVERTIME_SHARE * settings.time
    earlier = Front.read(state.out)
    if earlier is not None and earlier.conditions == evaluator.conditions:
        # Figures of earlier versions, or of other limits, may lack what is needed now.
        state.checked = {
            model.name: model
            for model in earlier.checked
            if math.inf not in shares_of_limits(settings.limits, model).values()
        }
        evaluator.base_ms = earlier.base_ms
    half, most = evaluator.decided_on, settings.limits.max_drop
    points = half.points_of_sample  # of less than one sample, `max_drop` allows none
    if most and most < points:
        state.warn(
            f"half of val has {half.samples} samples, and one of them is worth {points:.3g} "
            f"points, more than max_drop {most:g}: no sample may be lost"
        )
    state.check_whole(deadline)
    if time.monotonic() >= deadline:
        state.leave_out("widths and layers in float: there was no more time; allow more --time")
    else:
        _search_variants(state, deadline)
    state.check_postponed(state.last_moment, is_last=True)
    # Of those that meet all limits, the best first is confirmed, until one passes.
    wanted = [model for model in state.offered() if not missed_limits(settings.limits, model)]
    by_loss = state.loss_decides
    wanted.sort(key=lambda m: m.loss_order if by_loss else (m.latency_ms, m.drop or 0.0))
    best = None
    for number, model in enumerate(wanted):
        if number and time.monotonic() > state.last_moment:
            state.leave_out("further models within all limits are not confirmed, for want of time")
            break
        confirmed = state.checked[model.name] = evaluator.confirm(model)
        if confirmed.confirmed_drop is None or missed_limits(settings.limits, confirmed):
            continue
        front = state.front(best=model.name)
        front.write(state.out)
        write_point(front, evaluator, confirmed)
        with state.timed("runs of points"):
            refusal = run_point(front, evaluator, confirmed)
        if refusal is None:
            best = model.name
            break
        state.refused[model.name] = refusal
    with state.timed("runs of points"):
        front = write_points(state.front(best), evaluator, best, state.last_moment)
    front.write(state.out)
    return front


def _search_variants(state: SearchState, deadline: float) -> None:
    """Check models of other depths, widths and layers in float, unless all miss the limits."""
    evaluator, now, is_ranked = state.evaluator, time.monotonic(), True
    try:
        with state.timed("ranking channels"):
            until = now + RANKING_SHARE * (deadline - now)
            whole = BlockVariant.from_model(evaluator, evaluator.model, (), until)
    except StageFailed as error:  # there was no time, or its channels cannot be followed
        raise_unless_of_the_model(error)
        state.leave_out(f"widths: {error}")
        if evaluator.tables is not None:
            return  # which have no layers in float
        is_ranked = False
        whole = BlockVariant((), evaluator.model, WidthSpace.empty(evaluator.context.device))
    if evaluator.tables is not None:
        evaluator.tables.refuse_other_model(whole.space.grid, evaluator.batch)
    state.check_postponed(deadline)
    variants = BlockVariants(state, whole)
    if state.settings.space.blocks:
        variants.find_order(deadline)
    state.is_infeasible = is_ranked and not variants.are_feasible(deadline)
    if not state.is_infeasible:
        with state.timed("latency tables"):
            state.measure_kernels(whole, deadline)
        _check_cut(state, variants, deadline)


def _check_cut(state: SearchState, variants: BlockVariants, deadline: float) -> None:
    """Check smaller models, first as they are after a refit, then trained."""
    if not (state.models or variants.shallower):
        return  # and no cut can be predicted
    seconds, recovery = state.settings.time, state.settings.space.recovery
    begin, is_left = deadline - seconds, True
    untrained_share = UNTRAINED_SHARE * (1 + bool(variants.shallower)) if recovery else 1.0
    until = begin + untrained_share * seconds
    for share in (FIRST_SHARE, min(SENSITIVITY_SHARE, untrained_share)):
        if share != FIRST_SHARE:
            now = time.monotonic()
            variants.add(now + BLOCKS_SHARE * (until - now))
        # Where what was measured before took longer than that, as a share of what is left.
        now = time.monotonic()
        measured_until = max(begin + share * seconds, now + share * (until - now))
        if len(variants.added) > 1:  # each with cuts of its own
            now = time.monotonic()
            measured_until = max(measured_until, now + BLOCKS_SHARE * (until - now))
        programmes = variants.programmes(min(deadline, measured_until))
        if state.models and time.monotonic() < until:
            is_left = _check_next(state, programmes, deadline)
    while state.models and is_left and time.monotonic() < until:
        is_left = _check_next(state, programmes, deadline)
    if state.models and recovery is not None:
        key = state.evaluator.conditions + state.settings.limits.model_dump_json()
        ends = rungs(recovery.epochs)
        Recovery(state, programmes, ends, state.out / "halvings.json", key).train(deadline)


def _check_next(state: SearchState, programmes: Programmes, deadline: float) -> bool:
    """Check the next model, and correct the prediction; return whether there was one.

    One that takes longer than there is time for, if it takes as long as others did, is passed over.
    """
    targets: list[float | None] = [*latency_targets(state)]
    if not any(map(state.is_good, state.offered())):
        # A format that loses too much as a whole may do with some layers in float.
        targets.append(None)
    known = [*(model.candidate for model in state.checked.values())]
    known += [*state.failed, *state.postponed]
    solutions = (state.solve(programmes, target_ms, known) for target_ms in targets)
    too_long = False
    for found in filter(None, solutions):
        if state.is_time_for(found.candidate, deadline):
            state.check(found.candidate, found.predicted_ms)
            return True
        too_long = True
    if too_long:
        why = "to make one takes longer than there was left"
        state.leave_out(f"further models: {why}; allow more --time")
    return False


@dataclass
class BlockVariants:
    """The models of a search with fewer and fewer blocks."""

    state: SearchState
    whole: BlockVariant
    """The model with all blocks."""
    shallower: list[tuple[str, ...]] = field(default_factory=list)
    """Blocks that may be removed, the fewest first, each time with those before."""
    added: list[BlockVariant] = field(default_factory=list)
    """Models whose widths are decided."""

    def __post_init__(self) -> None:
        self.added.append(self.whole)

    def find_order(self, deadline: float) -> None:
        """Order the blocks to remove: each time the one that changes the outputs least."""
        evaluator = self.state.evaluator
        file, key = evaluator.out / BLOCKS_FILE, evaluator.model.digest
        order = read_state(file, key, list[str])
        if order is None:
            until = time.monotonic() + ORDER_SHARE * self.state.settings.time
            order = _measured_order(evaluator, min(deadline, until))
            write_state(file, key, order)
        # 1, 2, 4 and so on of them: widths lie between, and each variant takes time.
        counts = [2**power for power in range(len(order).bit_length())]
        self.shallower = [tuple(order[:count]) for count in counts]

    def add(self, deadline: float) -> None:
        """Prepare widths without some blocks, and without more of them, where that may do."""
        for removed_blocks in self.shallower:
            if time.monotonic() > deadline:
                break
            variant = self._checked_whole(removed_blocks, deadline)
            # Where fewer channels lose even more, unless training returns it.
            limits, recovery = self.state.settings.limits, self.state.settings.space.recovery
            whole = self.state.whole_models(removed_blocks) if variant else []
            is_kept = any("max_drop" not in missed_limits(limits, model) for model in whole)
            if variant is not None and (is_kept or recovery):
                with self.state.timed("latency tables"):
                    self.state.measure_kernels(variant, deadline)
                self.added.append(variant)

    def programmes(self, deadline: float) -> Programmes:
        """Measure what single cuts lose in each variant, in equal shares of the time until then."""
        programmes: dict[tuple[str, ...], Programme] = {}
        for done, variant in enumerate(self.added):
            now = time.monotonic()
            until = now + (deadline - now) / (len(self.added) - done)
            deeper = programmes[()].loss_increase if programmes else None
            with self.state.timed("what single cuts lose"):
                losses = variant.measure_loss_increases(self.state.evaluator, until, deeper)
            programmes[variant.removed_blocks] = Programme(variant.space.grid, losses)
        return programmes

    def are_feasible(self, deadline: float) -> bool:
        """Check the smallest models; return whether one meets all limits but that of the drop."""
        limits = self.state.settings.limits
        if limits.latency is None and limits.size is None and limits.memory is None:
            return True
        if self._is_feasible(self.whole, deadline):
            return True
        fewest = self._checked_whole(self.shallower[-1], deadline) if self.shallower else None
        # A model that could not be made for want of time may be feasible.
        is_known = time.monotonic() < deadline
        return (not is_known) if fewest is None else self._is_feasible(fewest, deadline)

    def _is_feasible(self, variant: BlockVariant, deadline: float) -> bool:
        """Whether the smallest model in a format meets the limits, or that is not known."""
        state, limits = self.state, self.state.settings.limits
        smallest = ((group, widths[-1]) for group, widths in variant.space.grid.items())
        cut = tuple(sorted((g, width) for g, width in smallest if width != variant.space.whole[g]))
        removed = variant.removed_blocks
        whole = sorted(state.whole_models(removed), key=lambda model: model.latency_ms)
        for model in whole:
            candidate = Candidate(model.format, cut, runtime=model.runtime, removed_blocks=removed)
            if time.monotonic() >= deadline:
                return True
            state.check(candidate)
            found = state.checked.get(candidate.name)
            if found is None or not missed_limits(limits, found, but="max_drop"):
                return True
        return not whole

    def _checked_whole(
        self, removed_blocks: tuple[str, ...], deadline: float
    ) -> BlockVariant | None:
        """Check the model without some blocks as wide as before; None where it cannot be made."""
        self.state.check_whole(deadline, removed_blocks)
        evaluator = self.state.evaluator
        for model in self.state.offered():
            if model.removed_blocks == removed_blocks:
                folder = model.candidate.artifacts(evaluator.out) / "prune_layers"
                pruned = EagerModel.from_directory(folder)
                try:
                    return BlockVariant.from_model(evaluator, pruned, removed_blocks, deadline)
                except StageFailed as error:
                    raise_unless_of_the_model(error)
                    count = len(removed_blocks)
                    self.state.leave_out(f"widths without {count} of the blocks: {error}")
                    return None  # in other formats it is the same model
        return None


def _measured_order(evaluator: CandidateEvaluator, deadline: float) -> list[str]:
    model, context = evaluator.model, evaluator.context
    module, inputs = model.load(), model.signature.example(seed=context.seed)
    blocks = block_search.all_blocks(module)
    refused = block_search.reasons_to_stay(module, inputs, blocks)
    free = [block for block in blocks if block.name not in refused]
    half = replace(context, data=evaluator.decided_on.data)
    meter = OutputErrorMeter(module, model.signature, half, "outputs", BLOCKS_COMPARED_ON)
    progress = context.progress
    removal = block_search.search(module, free, None, meter, refused, progress, deadline)
    if not removal.steps:
        reasons = [f"{name}: {reason}" for name, reason in removal.refused.items()]
        why = reasons[0] if reasons else "no list or sequence holds two modules of one class"
        evaluator.options.announce(f"warning: auto.space.blocks: no block can be removed ({why})")
    return [block.name for block, _ in removal.steps]


def latency_targets(state: SearchState) -> list[float]:
    """Return the predicted latencies to look for models at, the most wanted first."""
    asked_ms = state.asked_ms
    found = sorted(state.offered(), key=lambda model: model.latency_ms)
    targets = []
    if asked_ms is not None:
        near = [m for m in found if m.predicted_ms and m.latency_ms <= 1.1 * asked_ms]
        if len(near) < MAX_CHECKS_AT_LIMIT:
            targets.append(aimed_at(found, asked_ms))
    good = [model for model in found if state.is_good(model)]
    # A metric on some hundred samples has steps, and a model that loses a sample too many may
    # have a faster neighbour that does not: so wherever nothing was checked yet, and most
    # where the slower end of a gap is good.
    fastest = good[0].latency_ms if good else math.inf
    faster = [model for model in found if model.latency_ms <= fastest]
    below = [(state.smallest_ms(), False)]
    below += [(model.latency_ms, state.is_good(model)) for model in faster]
    targets += _middles(
        (a, b, 1.0 if is_good_end else WEIGHT_BEHIND_BAD)
        for (a, _), (b, is_good_end) in pairwise(below)
    )
    # Then where the front is thinnest.
    front = [model.latency_ms for model in Front.pareto(good)]
    return targets + _middles((a, b, 1.0) for a, b in pairwise(front))


def aimed_at(checked: Iterable[CheckedModel], asked_ms: float) -> float:
    """Return the predicted latency that models for an asked one are solved for."""
    keeps_to_it = any(m.predicted_ms and m.latency_ms <= asked_ms for m in checked)
    return asked_ms if keeps_to_it else AIMED_SHARE * asked_ms


def _middles(gaps: Iterable[tuple[float, float, float]]) -> list[float]:
    """Return the middles of wide gaps of latencies (low, high, weight), the widest first."""
    wide = [(weight * math.log(b / a), a, b) for a, b, weight in gaps if b / a > NARROW_GAP]
    return [math.sqrt(a * b) for _, a, b in sorted(wide, reverse=True)]


@dataclass
class Recovery:
    """Trains models of a search by `space.recovery`."""

    state: SearchState
    programmes: Programmes
    ends: list[int]
    """Epochs of training after which some of the models are dropped."""
    file: Path
    key: str
    """What tells this search from others."""
    begun: list[Contenders] = field(default_factory=list)
    """Models of the successive halvings that have begun, by an earlier search too."""
    _done: int = 0
    """How many of these this search has come to the end of."""
    _seconds_per_epoch: float = 0.0
    """Of the slowest model so far, with its export and check."""

    def __post_init__(self) -> None:
        self.begun = read_state(self.file, self.key, list[Contenders]) or []

    def train(self, deadline: float) -> None:
        """Train models until a deadline on the clock of :func:`time.monotonic`, or none is left."""
        is_left = True
        while is_left and time.monotonic() < deadline:
            if not self.state.loss_decides:
                is_left = self._train_fastest(deadline)
                continue
            if self._done == len(self.begun):
                contenders = self._contenders()
                if not contenders:
                    break
                self.begun.append(contenders)
                write_state(self.file, self.key, self.begun)
            # Of one that an earlier search has begun, what was trained is not trained again.
            is_left = self._train_best(self.begun[self._done], deadline)
            self._done += 1

    def _contenders(self) -> Contenders:
        """Return the cut models within the limits that lose least, and are not trained yet.

        The best is the first: where there is time for few, these are trained. All are in the order
        of their predicted losses, also those that were checked: predictions add up what single cuts
        lose, and are far above what a model of many cuts is measured to lose.
        """
        state = self.state
        offered = state.offered()
        known = self._untrained(model for model in state.checked.values() if model.trained)
        known.update(
            model.candidate
            for model in offered
            if missed_limits(state.settings.limits, model, but="max_drop")
        )
        target_ms = None if state.asked_ms is None else aimed_at(offered, state.asked_ms)
        found: Contenders = []
        while len(found) < MAX_TRAINED_AT_ONCE:
            solved = state.solve(self.programmes, target_ms, [*known])
            if solved is None or not solved.candidate.is_smaller:
                break
            known.add(solved.candidate)
            found.append((solved.candidate, solved.predicted_ms))
        return found

    def _train_fastest(self, deadline: float) -> bool:
        """Train a model that is faster than the fastest good one, until it is good itself.

        The first is as fast as can be, as nothing else need be trained where this one is good. Each
        further one is halfway to the slowest that was trained to the end in vain, so that the
        fastest good one is found as by bisection. Returns whether there was one and time for it.
        """
        offered = self.state.offered()
        slowest_ms = max(model.latency_ms for model in offered)
        good = (model.latency_ms for model in offered if self.state.is_good(model))
        best_ms = min(good, default=slowest_ms)
        over = [m for m in offered if m.trained == self.ends[-1] or self.state.is_good(m)]
        vain = [m.latency_ms for m in over if m.trained and m.latency_ms < best_ms]
        target_ms = NARROW_GAP * self.state.smallest_ms()
        if vain:  # halfway on a logarithmic scale, as latencies differ by factors
            target_ms = math.sqrt(best_ms * max(vain))
        if best_ms < NARROW_GAP * max(vain, default=target_ms):
            return False
        known = self._untrained(model for model in over if model.trained)
        solved = self.state.solve(self.programmes, target_ms, [*known])
        while solved is None and target_ms * NARROW_GAP < best_ms:  # none that fast is small enough
            target_ms = math.sqrt(best_ms * target_ms)
            solved = self.state.solve(self.programmes, target_ms, [*known])
        if solved is None or not solved.candidate.is_smaller:
            return False
        for end in self.ends:
            trained = replace(solved.candidate, trained=end)
            if time.monotonic() < deadline:
                self.state.check(trained, solved.predicted_ms)
            found = self.state.checked.get(trained.name)
            if found is None or self.state.is_good(found):
                break
        return True

    def _train_best(self, contenders: Contenders, deadline: float) -> bool:
        """Train models by successive halving; return whether there was one and time for it.

        Only as many begin as the time allows to train to the end, by how long the first takes.
        """
        begin, before = time.monotonic(), 0
        for end in self.ends:
            reached: Contenders = []
            for candidate, predicted_ms in contenders:
                start = time.monotonic()
                if start + self._seconds_per_epoch * (end - before) > deadline:
                    break
                if reached and not before:
                    epochs = (deadline - begin) / max(self._seconds_per_epoch, 1e-9)
                    if len(reached) >= models_to_begin(len(contenders), epochs, self.ends):
                        break
                trained = replace(candidate, trained=end)
                self.state.check(trained, predicted_ms)
                taken = (time.monotonic() - start) / (end - before)
                self._seconds_per_epoch = max(self._seconds_per_epoch, taken)
                if trained.name in self.state.checked:
                    reached.append((candidate, predicted_ms))
            if not reached:
                return end > self.ends[0]
            models = [self.state.checked[replace(one, trained=end).name] for one, _ in reached]
            order = sorted((model.loss_order, i) for i, model in enumerate(models))
            contenders = [reached[i] for _, i in order[: math.ceil(len(order) / 2)]]
            before = end
        return True

    def _untrained(self, models: Iterable[CheckedModel]) -> set[Candidate]:
        """Return models as they are before training, and what is never trained."""
        whole = {Candidate(format, runtime=runtime) for format, runtime, _ in self.state.models}
        before = {replace(model.candidate, trained=0) for model in models}
        return before | {*self.state.failed} | whole


def models_to_begin(most: int, epochs: float, ends: Sequence[int]) -> int:
    """Return with how many of `most` models a successive halving takes so many epochs at most.

    `epochs` are those of all models together; after each of `ends` the better half goes on.
    """
    for count in range(most, 1, -1):
        needed, left, before = 0, count, 0
        for end in ends:
            needed += left * (end - before)
            left, before = math.ceil(left / 2), end
        if needed <= epochs:
            return count
    return 1
