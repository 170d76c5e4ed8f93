"""Running a pipeline, or foreseeing what a run would do."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from compress.core.errors import CompressError, GateRefused
from compress.core.stage import silent
from pipelines import interruption
from pipelines.disk import said_plainly
from pipelines.inputs import settle
from pipelines.joining import told_to_other_nodes
from pipelines.plan import SOURCE, Plan, make_plan
from pipelines.store import Store
from pipelines.temporary import temporary_files
from pipelines.walk import ASKED, Walk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from compress.core.stage import Progress
    from pipelines.pipeline import Pipeline
    from pipelines.report import Report, Status


def run(
    pipeline: Pipeline,
    out: Path,
    *,
    start: str | None,
    until: str | None,
    force: bool,
    progress: Progress,
    announce: Callable[[str], None],
    finished: Callable[[Report], None],
) -> Report:
    """Run a pipeline and write its report.

    Args:
        pipeline: the pipeline.
        out: directory of the results.
        start: run this stage and those after it again, whatever the store holds.
        until: stop after this stage.
        force: run every stage again.
        progress: where stages say how far they are.
        announce: where one line per stage goes.
        finished: given the report once it is written, of a refused or failed run too.

    Returns:
        The report of a run whose gates all passed.

    Raises:
        GateRefused: a gate refused; the report is written, and the artifact kept.
        CompressError: the pipeline is invalid, or a stage failed; the report says so.
    """
    plan = make_plan(pipeline, start, until)
    for warning in plan.warnings:
        announce(f"warning: {warning}")
    pipeline, data, told = settle(pipeline)
    if told:
        announce(told)
    root = out / ".store"
    with (
        said_plainly(out),
        temporary_files(),
        Store.locked(root, announce) as store,
        told_to_other_nodes(root),
    ):
        walk = Walk(pipeline, plan, out, store, data, progress, announce)
        try:
            with said_plainly(out):
                walk.import_model(force)
                for planned in plan.stages:
                    walk.step(planned, again=planned.index >= _first_again(plan, start, force))
                walk.test()
                report = walk.report("passed")
                report.write(out)
        except BaseException as error:
            report = walk.report(_status(error), str(error) or "interrupted")
            with suppress(OSError):  # on a full disk the error itself matters more
                report.write(out)
            if report.status != "interrupted" and isinstance(error, CompressError):
                finished(report)
            raise
        finished(report)
    return report


def foresee(
    pipeline: Pipeline, out: Path, *, start: str | None, until: str | None, force: bool
) -> dict[str, str]:
    """Return for each stage ``cached``, or why it would run; nothing is run.

    Raises:
        CompressError: the pipeline is invalid.
    """
    return look_ahead(pipeline, out, start=start, until=until, force=force)[0]


def look_ahead(
    pipeline: Pipeline,
    out: Path,
    *,
    start: str | None = None,
    until: str | None = None,
    force: bool = False,
) -> tuple[dict[str, str], Walk]:
    """Return what :func:`foresee` does, and a walk that holds what is cached.

    Raises:
        CompressError: the pipeline is invalid.
    """
    plan = make_plan(pipeline, start, until)
    pipeline, data, _ = settle(pipeline)
    store = Store(out / ".store")
    store.refuse_another_format()
    walk = Walk(pipeline, plan, out, store, data, silent, lambda line: None)
    foreseen: dict[str, str] = {}

    def look(name: str, parts: dict[str, Any], again: bool) -> None:
        found = None if again else store.entry(parts).load()
        if found:
            walk.artifacts[name] = found[0]
        why = ASKED if again else store.why(name, parts)
        foreseen[name] = "cached" if found else f"runs ({why})"

    look(SOURCE, walk.source_parts(), force)
    for planned in plan.stages:
        missing = [n for n in planned.reads if n not in walk.artifacts]
        if missing:
            foreseen[planned.name] = f"runs (after {missing[0]})"
        else:
            again = planned.index >= _first_again(plan, start, force)
            look(planned.name, walk.parts(planned), again)
    return foreseen, walk


def _first_again(plan: Plan, start: str | None, force: bool) -> int:
    """Return the index of the first stage that runs whatever the store holds."""
    if force:
        return 0
    return next((p.index for p in plan.stages if p.name == start), len(plan.stages))


def _status(error: BaseException) -> Status:
    if interruption.exit_code() or not isinstance(error, Exception):
        return "interrupted"
    return "refused" if isinstance(error, GateRefused) else "failed"
