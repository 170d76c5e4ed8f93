"""The search of `compress auto`: predict, solve, check by a real run, correct, and again."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from compress.common.atomic_files import write_atomically
from compress.common.errors import PipelineInvalid, StageFailed
from compress.core.stage import members_of
from compress.pruning.width_harms import WidthSpace, measure_harms
from export.latency.kernel_table import TABLES, KernelTable
from pipelines.auto import float_layers
from pipelines.auto.candidates import Candidate, CheckedModel, candidate_of
from pipelines.auto.front import Front
from pipelines.auto.judge import Judge
from pipelines.auto.latency_models import FormatModel, build_format_model
from pipelines.auto.solver import Limit, Programme
from pipelines.system.machine_info import machine

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pipelines.config.auto_settings import AutoSettings, Format
    from pipelines.config.pipeline import PipelineConfig
    from pipelines.config.run_options import RunOptions

POINTS, HARMS = "points", "harms.json"
"""In the results' folder: the pipelines of the front, and what single cuts lose."""
HARMS_SHARE = 0.35
"""Share of the time that is spent on what single cuts lose."""
CHECKS_AT_LIMIT = 5
"""Models that are checked at the asked latency before other latencies are looked at."""
NARROW = 1.03
"""Ratio of two latencies between which no further model is looked for."""
BEHIND_BAD = 0.5
"""Weight of a gap of latencies whose slower end loses too much."""
ROOM = 0.99
"""Share of a limit that the solver aims at, as half of all models are slower than predicted."""


def search(
    pipeline: PipelineConfig, settings: AutoSettings, out: Path, options: RunOptions
) -> Front:
    """Look for the models that lose least under limits, until the time is over.

    Args:
        pipeline: what is made once, and data and metric.
        settings: limits, time and what is decided.
        out: folder of the results; a search that was stopped goes on where it was.
        options: who is notified.

    Raises:
        PipelineInvalid: the pipeline has stages that the search itself adds, or no data.
        StageFailed: the model cannot be traced, exported or judged, or the machine is too busy.
    """
    refuse_other_stages(pipeline)
    deadline = time.monotonic() + settings.time
    judge = Judge.from_pipeline(pipeline, settings, out, options)
    return Search(judge, settings, out).run(deadline)


def refuse_other_stages(pipeline: PipelineConfig) -> None:
    """Raise PipelineInvalid for stages that do not leave an eager model, and without data."""
    for index, stage in enumerate(pipeline.stages):
        if "eager" not in {kind.kind for kind in members_of(stage.writes())}:
            raise PipelineInvalid(
                f"{pipeline.place('stages', index)} is {stage.stage}, and `compress auto` itself "
                "prunes, quantizes and exports; keep only stages before these, such as train"
            )
    if pipeline.data is None:
        raise PipelineInvalid(
            f"{pipeline.file}: `compress auto` decides by `val`; add a `data:` section"
        )


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
    models: dict[Format, FormatModel] = field(default_factory=dict)

    def run(self, deadline: float) -> Front:
        """Search until a deadline, or until nothing is left to try; return the front.

        The deadline is on the clock of :func:`time.monotonic`.
        """
        earlier = Front.read(self.out)
        if earlier is not None and earlier.conditions == self.judge.conditions:
            self.checked = {model.name: model for model in earlier.checked}
            self.judge.base_ms = earlier.base_ms
        self._check(Candidate("float"))
        for format in self.settings.space.formats:
            if time.monotonic() < deadline:
                self._check(Candidate(format))
        widths, context = self.settings.space.widths, self.judge.context
        if time.monotonic() < deadline:
            space = WidthSpace.empty(context.device)
            if widths is not None:
                space = WidthSpace.of_model(self.judge.model, context, **widths.model_dump())
            if self._is_feasible(space):
                programme = self._measure_space(space, deadline)
                while self.models and time.monotonic() < deadline and self._check_next(programme):
                    pass
        return self._finish()

    def _is_feasible(self, space: WidthSpace) -> bool:
        """Check the smallest model in the fastest format; return whether it meets the limits."""
        limits = self.settings.limits
        whole = [model for model in self._offered() if not model.widths]
        format = min(whole, key=lambda model: model.latency_ms).format
        smallest = {group: widths[-1] for group, widths in space.grid.items()}
        candidate = candidate_of(format, smallest, space.whole)
        self._check(candidate)
        found = self.checked.get(candidate.name)
        if found is None:
            return True
        return (limits.latency is None or found.latency_ms <= limits.latency) and (
            limits.size is None or found.bytes <= limits.size
        )

    def _measure_space(self, space: WidthSpace, deadline: float) -> Programme:
        """Measure kernels over the grid of widths, and what each single cut loses."""
        judge = self.judge
        table = KernelTable(self.out / TABLES, machine(), judge.context.threads)
        for format in self.settings.space.formats:
            whole = self.checked.get(Candidate(format).name)
            if whole is None:
                continue
            until = min(deadline, time.monotonic() + float_layers.SHARE * self.settings.time)
            layers = float_layers.measure_layer_harms(judge, whole, until)
            if not space.grid and layers is None:
                continue
            context, settings = judge.context, self.settings
            try:
                built = build_format_model(
                    format, space.grid, judge.model, context, settings, table, layers, until
                )
            except StageFailed as error:  # the other formats may do
                self.judge.options.announce(f"warning: {format} is not cut: {error}")
                continue
            built.harm = whole.loss - built.layers.total_harm
            self.models[format] = built
        for model in self.checked.values():
            self._correct(model)
        file = self.out / HARMS
        key = f"{judge.model.digest} {self.settings.space.widths}"
        try:
            content = json.loads(file.read_bytes())
            known = content["harms"] if content["key"] == key else {}
        except (OSError, ValueError, KeyError, TypeError):
            known = {}
        harms = measure_harms(
            space,
            judge.context.progress,
            judge.loss_of,
            known,
            lambda: write_atomically(file, json.dumps({"key": key, "harms": known}, indent=1)),
            min(deadline, time.monotonic() + HARMS_SHARE * self.settings.time),
        )
        return Programme(space.grid, harms)

    def _check_next(self, programme: Programme) -> bool:
        """Check the next model, and correct the prediction; return whether there was one."""
        for target_ms in self._targets():
            found = self._solve(programme, target_ms)
            if found is not None:
                candidate, predicted_ms = found
                self._check(candidate, predicted_ms)
                if candidate.name in self.checked:
                    self._correct(self.checked[candidate.name])
                return True
        return False

    def _correct(self, checked: CheckedModel) -> None:
        """Take a measured latency into account in the model of its format."""
        model = self.models.get(checked.format)
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
        good = [model for model in found if self._keeps_drop(model)]
        # A metric on some hundred samples has steps, and a model that loses a sample too many may
        # have a faster neighbour that does not: so wherever nothing was checked yet, and most
        # where the slower end of a gap is good.
        fastest = good[0].latency_ms if good else math.inf
        faster = [model for model in found if model.latency_ms <= fastest]
        below = [(self._smallest_ms(), False)]
        below += [(model.latency_ms, self._keeps_drop(model)) for model in faster]
        targets += _middles(
            (a, b, 1.0 if is_good else BEHIND_BAD) for (a, _), (b, is_good) in pairwise(below)
        )
        # Then where the front is thinnest.
        front = [model.latency_ms for model in Front.pareto(good)]
        return targets + _middles((a, b, 1.0) for a, b in pairwise(front))

    def _smallest_ms(self) -> float:
        """Return the smallest latency that the models predict."""
        return min(model.corrected()(model.smallest) for model in self.models.values())

    def _solve(self, programme: Programme, latency_ms: float) -> tuple[Candidate, float] | None:
        """Return the model that loses least below a latency, of those that were not tried."""
        best: tuple[float, Candidate, float] | None = None
        for format, model in self.models.items():
            corrected = model.corrected()
            limits = [Limit(corrected, ROOM * latency_ms)]
            if self.settings.limits.size is not None:
                limits.append(Limit(model.bytes, ROOM * self.settings.limits.size))
            known = [*(c.candidate for c in self.checked.values()), *self.failed]
            choices = (model.choice_of(c) for c in known if c.format == format)
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
            if not candidate.widths:
                raise
            self.failed[candidate] = str(error)
            return
        self.checked[candidate.name] = found
        self.judge.options.announce(Front.line(found))
        self._front().write(self.out)

    def _offered(self) -> list[CheckedModel]:
        """Return the checked models in the formats that are asked for."""
        formats = self.settings.space.formats
        return [model for model in self.checked.values() if model.format in formats]

    def _keeps_drop(self, model: CheckedModel) -> bool:
        most = self.settings.limits.max_drop
        return model.drop is not None and (most is None or model.drop <= most)

    def _front(self) -> Front:
        return Front(
            limits=self.settings.limits,
            checked=tuple(self.checked.values()),
            failed={candidate.name: why for candidate, why in self.failed.items()},
            points=tuple(model.name for model in Front.pareto(self._offered())),
            conditions=self.judge.conditions,
            base_ms=self.judge.base_ms,
        )

    def _finish(self) -> Front:
        """Confirm the models that meet all limits, the best first, and write their pipelines."""
        front = self._front()
        wanted = [model for model in self._offered() if not front.missed_limits(model)]
        by_drop = self.settings.limits.latency is not None
        wanted.sort(
            key=lambda m: (m.drop or 0.0, m.loss) if by_drop else (m.latency_ms, m.drop or 0.0)
        )
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
            self.checked[name].candidate.write_pipeline(self.judge.base, self.settings, file)
        front.write(self.out)
        return front


def _middles(gaps: Iterable[tuple[float, float, float]]) -> list[float]:
    """Return the middle of each gap between two latencies that is not narrow, the widest first.

    A gap is a lower and an upper end, and the weight of its width.
    """
    wide = [(weight * math.log(b / a), a, b) for a, b, weight in gaps if b / a > NARROW]
    return [math.sqrt(a * b) for _, a, b in sorted(wide, reverse=True)]
