"""The search of `compress auto`: predict, solve, check by a real run, correct, and again."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING

from compress.common.atomic_files import write_atomically
from compress.common.errors import StageFailed
from compress.pruning.allocation.solver import Limit, Programme
from compress.pruning.width_harms import WidthSpace, measure_harms
from export.latency.kernel_table import TABLES, KernelTable
from pipelines.auto.candidates import Candidate, CheckedModel, candidate_of, rungs
from pipelines.auto.cost_models import float_layers
from pipelines.auto.cost_models.latency_models import FormatModel, build_format_models
from pipelines.auto.front import Front, missed_limits
from pipelines.auto.judge import Judge
from pipelines.system.machine_info import machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from compress.pruning.width_harms import Harms
    from pipelines.auto.cost_models.tables import LatencyTables
    from pipelines.config.auto_settings import AutoSettings, Format, Runtime
    from pipelines.config.pipeline import PipelineConfig
    from pipelines.config.run_options import RunOptions

POINTS, HARMS = "points", "harms.json"
"""In the results' folder: the pipelines of the front, and what single cuts lose."""
FIRST_SHARE, HARMS_SHARE = 0.1, 0.35
"""Shares of the time after which what single cuts lose is taken as it is known: early, for a first
model, and once more."""
UNTRAINED_SHARE = 0.25
"""Share of the time after which models are trained, where `recovery` says so; what single cuts lose
matters less then."""
TRAINED_AT_ONCE = 6
"""Models of which successive halving trains the best to the end."""
CHECKS_AT_LIMIT = 5
"""Models that are checked at the asked latency before other latencies are looked at."""
NARROW = 1.03
"""Ratio of two latencies between which no further model is looked for."""
BEHIND_BAD = 0.5
"""Weight of a gap of latencies whose slower end loses too much."""
ROOM = 0.99
"""Share of a limit of latency that the solver aims at, as half of all models are slower than
predicted. Sizes follow from the widths."""


def search(
    pipeline: PipelineConfig,
    settings: AutoSettings,
    out: Path,
    options: RunOptions,
    tables: LatencyTables | None = None,
) -> Front:
    """Look for the models that lose least under limits, until the time is over.

    Args:
        pipeline: what is made once, and data and metric.
        settings: limits, time and what is decided.
        out: folder of the results; a search that was stopped goes on where it was.
        options: who is notified.
        tables: latencies of another machine, which are taken instead of measuring any here.

    Raises:
        PipelineInvalid: the pipeline has stages that the search itself adds, or no data, or the
            tables are of another model or of other calls.
        StageFailed: the model cannot be traced, exported or judged, or the machine is too busy.
        Unavailable: a runtime is not installed.
    """
    if tables is not None:
        tables.refuse_other_settings(settings, pipeline.threads)
    deadline = time.monotonic() + settings.time
    judge = Judge.from_pipeline(pipeline, settings, out, options)
    if tables is not None:
        judge.tables, judge.base_ms = tables, tables.base_ms
    return Search(judge, settings, out).run(deadline)


@dataclass
class Search:
    """One search, and what it has found so far."""

    judge: Judge
    settings: AutoSettings
    out: Path
    checked: dict[str, CheckedModel] = field(default_factory=dict)
    """By name, in the order in which they were checked."""
    failed: dict[Candidate, str] = field(default_factory=dict)
    """Candidates that could not be built → why."""
    models: dict[tuple[Format, Runtime], FormatModel] = field(default_factory=dict)

    def run(self, deadline: float) -> Front:
        """Search until a deadline, or until nothing is left to try; return the front.

        The deadline is on the clock of :func:`time.monotonic`.
        """
        earlier = Front.read(self.out)
        if earlier is not None and earlier.conditions == self.judge.conditions:
            self.checked = {model.name: model for model in earlier.checked}
            self.judge.base_ms = earlier.base_ms
        self._warn_of_few_samples()
        self.check_whole(deadline)
        widths, context = self.settings.space.widths, self.judge.context
        if time.monotonic() < deadline:
            space = WidthSpace.empty(context.device)
            if widths is not None:
                chosen = widths.model_dump(exclude={"calibration_samples"})
                space = WidthSpace.of_model(self.judge.model, context, **chosen)
            if self.judge.tables is not None:
                self.judge.tables.refuse_other_model(space.grid, self.judge.batch)
            if self._is_feasible(space):
                self.measure_kernels(space, deadline)
                self._check_cut(space, deadline)
        return self._finish()

    def _warn_of_few_samples(self) -> None:
        """Warn where `max_drop` is less than what one sample of half of `val` is worth."""
        half, most = self.judge.decided_on, self.settings.limits.max_drop
        points = half.points_of_sample
        if most and most < points:
            self.judge.options.announce(
                f"warning: half of val has {half.samples} samples, and one of them is worth "
                f"{points:.3g} points, more than max_drop {most:g}: no sample may be lost"
            )

    def check_whole(self, deadline: float) -> None:
        """Check the whole model in each format and runtime, the float ONNX file first."""
        self._check(Candidate("float"))
        for runtime, format in product(self.settings.space.runtimes, self.settings.space.formats):
            if time.monotonic() < deadline:
                self._check(Candidate(format, runtime=runtime))

    def _check_cut(self, space: WidthSpace, deadline: float) -> None:
        """Check smaller models, first as they are after a refit, then trained."""
        begin, recovery = deadline - self.settings.time, self.settings.space.recovery
        untrained_share = UNTRAINED_SHARE if recovery else 1.0
        until, is_left = begin + untrained_share * self.settings.time, True
        for share in (FIRST_SHARE, min(HARMS_SHARE, untrained_share)):
            harms = self._measure_harms(space, min(deadline, begin + share * self.settings.time))
            programme = Programme(space.grid, harms)
            if self.models and time.monotonic() < until:
                is_left = self._check_next(programme)
        while self.models and is_left and time.monotonic() < until:
            is_left = self._check_next(programme)
        while self.models and recovery is not None and time.monotonic() < deadline:
            ends = rungs(recovery.epochs)
            if self._loss_decides:
                is_left = self._train_best(self._contenders(programme), ends, deadline)
            else:
                is_left = self._train_fastest(programme, ends, deadline)
            if not is_left:
                break

    def _is_feasible(self, space: WidthSpace) -> bool:
        """Check the smallest model as each whole one; return whether one meets latency and size."""
        if self.settings.limits.latency is None and self.settings.limits.size is None:
            return True
        whole = [m for m in self._offered() if not m.widths and not m.float_layers]
        smallest = {group: widths[-1] for group, widths in space.grid.items()}
        for model in sorted(whole, key=lambda model: model.latency_ms):
            candidate = candidate_of(model.format, smallest, space.whole, model.runtime)
            self._check(candidate)
            found = self.checked.get(candidate.name)
            if found is None or not missed_limits(self.settings.limits, found, but="max_drop"):
                return True
        return False

    def measure_kernels(self, space: WidthSpace, deadline: float | None = None) -> None:
        """Measure kernels over the grid of widths, in each format and runtime.

        Without a deadline, on the clock of :func:`time.monotonic`, no layer is left in float.
        """
        judge = self.judge
        table = KernelTable(self.out / TABLES, machine(), judge.context.threads)
        for format in self.settings.space.formats:
            whole = {
                runtime: checked
                for runtime in self.settings.space.runtimes
                if (checked := self.checked.get(Candidate(format, runtime=runtime).name))
            }
            if not whole:
                continue
            until = time.monotonic() + float_layers.SHARE * self.settings.time
            layers = None
            if deadline is not None and judge.tables is None and "onnx" in whole:
                until = min(deadline, until)
                layers = float_layers.measure_layer_harms(judge, whole["onnx"], until)
            if not space.grid and layers is None:
                continue
            try:
                if judge.tables is not None:
                    built = judge.tables.format_models(format, [*whole])
                else:
                    built = build_format_models(
                        *(format, [*whole], space.grid, judge.model, judge.context, self.settings),
                        *(table, judge.measure_latency_ms, layers, until),
                    )
            except StageFailed as error:  # the other formats may do
                self.judge.options.announce(f"warning: {format} is not cut: {error}")
                continue
            for model in built:
                model.harm = whole[model.runtime].loss - model.layers.total_harm
                self.models[format, model.runtime] = model
        for checked in self.checked.values():
            self._correct(checked)

    def _measure_harms(self, space: WidthSpace, deadline: float) -> Harms:
        """Measure what each single cut loses; what an earlier search measured is read."""
        judge, file = self.judge, self.out / HARMS
        key = f"{judge.model.digest} {self.settings.space.widths}"
        try:
            content = json.loads(file.read_bytes())
            known = content["harms"] if content["key"] == key else {}
        except (OSError, ValueError, KeyError, TypeError):
            known = {}
        return measure_harms(
            space,
            judge.context.progress,
            judge.loss_of,
            known,
            lambda: write_atomically(file, json.dumps({"key": key, "harms": known}, indent=1)),
            deadline,
        )

    def _check_next(self, programme: Programme) -> bool:
        """Check the next model, and correct the prediction; return whether there was one."""
        targets: list[float | None] = [*self._targets()]
        if not any(map(self._is_good, self._offered())):
            # A format that loses too much as a whole may do with some layers in float.
            targets.append(None)
        for target_ms in targets:
            known = [*(model.candidate for model in self.checked.values()), *self.failed]
            found = self._solve(programme, target_ms, known)
            if found is not None:
                candidate, predicted_ms = found
                self._check(candidate, predicted_ms)
                if candidate.name in self.checked:
                    self._correct(self.checked[candidate.name])
                return True
        return False

    def _contenders(self, programme: Programme) -> list[tuple[Candidate, float | None]]:
        """Return the cut models within the limits that lose least, and are not trained yet."""
        known = self._untrained(model for model in self.checked.values() if model.trained)
        kept = [
            model
            for model in self._offered()
            if model.widths
            and not model.trained
            and model.candidate not in known
            and not missed_limits(self.settings.limits, model, but="max_drop")
        ]
        kept.sort(key=lambda model: model.loss)
        found: list[tuple[Candidate, float | None]]
        found = [(model.candidate, model.predicted_ms) for model in kept[:TRAINED_AT_ONCE]]
        while len(found) < TRAINED_AT_ONCE:
            asked = self.settings.limits.latency
            solved = self._solve(programme, asked, [*known, *(one for one, _ in found)])
            if solved is None or not solved[0].widths:
                break
            found.append(solved)
        return found

    def _untrained(self, models: Iterable[CheckedModel]) -> set[Candidate]:
        """Return models as they are before training, and what is never trained."""
        whole = {Candidate(format, runtime=runtime) for format, runtime in self.models}
        return {replace(model.candidate, trained=0) for model in models} | {*self.failed} | whole

    def _train_fastest(self, programme: Programme, ends: list[int], deadline: float) -> bool:
        """Train a model that is faster than the fastest good one, until it is good itself.

        The first is as fast as can be, as nothing else need be trained where this one is good. Each
        further one is halfway to the slowest that was trained to the end in vain, so that the
        fastest good one is found as by bisection. Returns whether there was one and time for it.
        """
        offered = self._offered()
        slowest_ms = max(model.latency_ms for model in offered)
        good = (model.latency_ms for model in offered if self._is_good(model))
        best_ms = min(good, default=slowest_ms)
        over = [model for model in offered if model.trained == ends[-1] or self._is_good(model)]
        vain = [m.latency_ms for m in over if m.trained and m.latency_ms < best_ms]
        target_ms = NARROW * self._smallest_ms() / ROOM
        if vain:
            target_ms = math.sqrt(best_ms * max(vain))
        if best_ms < NARROW * max(vain, default=target_ms):
            return False
        known = self._untrained(model for model in over if model.trained)
        solved = self._solve(programme, target_ms, [*known])
        while solved is None and target_ms * NARROW < best_ms:  # none that fast is small enough
            target_ms = math.sqrt(best_ms * target_ms)
            solved = self._solve(programme, target_ms, [*known])
        if solved is None or not solved[0].widths:
            return False
        for end in ends:
            trained = replace(solved[0], trained=end)
            if time.monotonic() < deadline:
                self._check(trained, solved[1])
            found = self.checked.get(trained.name)
            if found is None or self._is_good(found):
                break
        return True

    def _train_best(
        self, contenders: list[tuple[Candidate, float | None]], ends: list[int], deadline: float
    ) -> bool:
        """Train models by successive halving; return whether there was one and time for it.

        Args:
            contenders: models, and their predicted latencies.
            ends: epochs after which the better half goes on.
            deadline: on the clock of :func:`time.monotonic`.
        """
        seconds_per_epoch, before = 0.0, 0
        for end in ends:
            reached = []
            for candidate, predicted_ms in contenders:
                start = time.monotonic()
                if start + seconds_per_epoch * (end - before) > deadline:
                    break
                trained = replace(candidate, trained=end)
                self._check(trained, predicted_ms)
                taken = (time.monotonic() - start) / (end - before)
                seconds_per_epoch = max(seconds_per_epoch, taken)
                if trained.name in self.checked:
                    reached.append((candidate, predicted_ms))
            if not reached:
                return end > ends[0]
            models = [self.checked[replace(one, trained=end).name] for one, _ in reached]
            order = sorted((model.loss_order, i) for i, model in enumerate(models))
            contenders = [reached[i] for _, i in order[: math.ceil(len(order) / 2)]]
            before = end
        return True

    def _correct(self, checked: CheckedModel) -> None:
        """Take a measured latency into account in the model of its format and runtime."""
        model = self.models.get((checked.format, checked.runtime))
        choice = None if model is None else model.choice_of(checked.candidate)
        if model is not None and choice is not None:
            model.correct(model.latency_ms(choice), checked.latency_ms)

    def _targets(self) -> list[float]:
        """Return the latencies to look for models at, the most wanted first."""
        limits = self.settings.limits
        found = sorted(self._offered(), key=lambda model: model.latency_ms)
        targets = []
        if limits.latency is not None:
            near = [m for m in found if m.predicted_ms and m.latency_ms <= 1.1 * limits.latency]
            if len(near) < CHECKS_AT_LIMIT:
                targets.append(limits.latency)
        good = [model for model in found if self._is_good(model)]
        # A metric on some hundred samples has steps, and a model that loses a sample too many may
        # have a faster neighbour that does not: so wherever nothing was checked yet, and most
        # where the slower end of a gap is good.
        fastest = good[0].latency_ms if good else math.inf
        faster = [model for model in found if model.latency_ms <= fastest]
        below = [(self._smallest_ms(), False)]
        below += [(model.latency_ms, self._is_good(model)) for model in faster]
        targets += _middles(
            (a, b, 1.0 if is_good else BEHIND_BAD) for (a, _), (b, is_good) in pairwise(below)
        )
        # Then where the front is thinnest.
        front = [model.latency_ms for model in Front.pareto(good)]
        return targets + _middles((a, b, 1.0) for a, b in pairwise(front))

    def _smallest_ms(self) -> float:
        """Return the smallest latency that the models predict."""
        return min(model.corrected()(model.smallest) for model in self.models.values())

    def _solve(
        self, programme: Programme, latency_ms: float | None, known: Sequence[Candidate]
    ) -> tuple[Candidate, float] | None:
        """Return the model that loses least below a latency, if it has one, besides known ones."""
        best: tuple[float, Candidate, float] | None = None
        for (format, runtime), model in self.models.items():
            corrected = model.corrected()
            limits = [] if latency_ms is None else [Limit(corrected, ROOM * latency_ms)]
            if self.settings.limits.size is not None:
                limits.append(Limit(model.bytes, self.settings.limits.size))
            same = (c for c in known if (c.format, c.runtime) == (format, runtime))
            choices = map(model.choice_of, same)
            mixed = programme.extended(model.layers.grid, model.layers.harm)
            choice = mixed.solve(limits, [tried for tried in choices if tried is not None])
            if choice is None:
                continue
            harm = mixed.total_harm(choice) + model.harm
            if best is None or harm < best[0]:
                best = harm, model.candidate(choice), corrected(choice)
        return None if best is None else best[1:]

    def _check(self, candidate: Candidate, predicted_ms: float | None = None) -> None:
        """Check a candidate, unless that was done, and write the front."""
        if candidate.name in self.checked or candidate in self.failed:
            return
        try:
            found = self.judge.check(candidate, predicted_ms)
        except StageFailed as error:
            if not candidate.widths and not candidate.float_layers and candidate.runtime == "onnx":
                raise
            if not candidate.widths:
                self.judge.options.announce(f"warning: {candidate.name} is left out: {error}")
            self.failed[candidate] = str(error)
            self.judge.options.announce(f"warning: {candidate.name} could not be made: {error}")
            return
        self.checked[candidate.name] = found
        self.judge.options.announce(Front.line(found))
        self._front().write(self.out)

    def _offered(self) -> list[CheckedModel]:
        """Return the checked models in the formats and runtimes that are asked for."""
        space = self.settings.space
        return [
            model
            for model in self.checked.values()
            if model.format in space.formats and model.runtime in space.runtimes
        ]

    @property
    def _loss_decides(self) -> bool:
        """Whether the best model is the one that loses least, and not the fastest."""
        limits = self.settings.limits
        return limits.latency is not None or limits.max_drop is None

    def _is_good(self, model: CheckedModel) -> bool:
        """Whether a model meets all limits but that of latency."""
        return not missed_limits(self.settings.limits, model, but="latency")

    def _front(self) -> Front:
        return Front(
            limits=self.settings.limits,
            checked=tuple(self.checked.values()),
            failed={candidate.name: why for candidate, why in self.failed.items()},
            points=tuple(model.name for model in Front.pareto(self._offered())),
            conditions=self.judge.conditions,
            base_ms=self.judge.base_ms,
            predicted_for=self.judge.tables.where if self.judge.tables else None,
        )

    def _finish(self) -> Front:
        """Confirm the models that meet all limits, the best first, and write their pipelines."""
        limits = self.settings.limits
        wanted = [model for model in self._offered() if not missed_limits(limits, model)]
        by_loss = self._loss_decides
        wanted.sort(key=lambda m: m.loss_order if by_loss else (m.latency_ms, m.drop or 0.0))
        most, best = self.settings.limits.max_drop, None
        for model in wanted:
            confirmed = self.judge.confirm(model)
            self.checked[model.name] = confirmed
            drop = confirmed.confirmed_drop
            if drop is not None and (most is None or drop <= most):
                best = confirmed
                break
        front = self._front().model_copy(update={"best": best.name if best else None})
        for number, name in enumerate(front.points, 1):
            file = self.out / POINTS / str(number) / "pipeline.yaml"
            model = self.checked[name]
            gate = self.judge.speedup_gate(model)
            model.candidate.write_pipeline(self.judge.base, self.settings, file, gate)
        front.write(self.out)
        return front


def _middles(gaps: Iterable[tuple[float, float, float]]) -> list[float]:
    """Return the middle of each gap between two latencies that is not narrow, the widest first.

    A gap is a lower and an upper end, and the weight of its width.
    """
    wide = [(weight * math.log(b / a), a, b) for a, b, weight in gaps if b / a > NARROW]
    return [math.sqrt(a * b) for _, a, b in sorted(wide, reverse=True)]
