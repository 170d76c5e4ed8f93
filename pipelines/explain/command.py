"""`compress explain`, `compress repair` and `compress run --repair`: explain, repair and print.

What they run imports torch, which the file of a run may turn out not to need.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from compress.common.config import first_problem
from compress.common.errors import CompressError, GateRefused, PipelineInvalid
from compress.core.gates import rule_in_words
from compress.pipelines.config.auto_settings import Seconds
from compress.pipelines.terminal.console import current_mode, notify, print_result, show_progress

if TYPE_CHECKING:
    from compress.pipelines.results.explanation import Explanations


def explain_and_print(
    directory: Path, stage: str | None = None, gate: str | None = None, time_limit: str = "3m"
) -> None:
    """Explain refusals, or the named gates, and print that; GateRefused: no cause was found."""
    from compress.pipelines.explain.function import explain

    seconds = _seconds(time_limit)
    with show_progress() as (progress, _):
        found = explain(directory, stage, gate, seconds=seconds, progress=progress)
    print_result(found, _lines(found))
    if not any(explanation.causes for explanation in found.explanations):
        raise GateRefused(f"{directory}: no cause was found")


def repair_and_print(
    directory: Path,
    time_limit: str = "10m",
    best: bool = False,
    trains: bool = False,
    apply: bool = False,
    prints: bool = True,
) -> None:
    """Try and print repairs; PipelineInvalid: nothing refused; GateRefused: none passes."""
    from compress.pipelines.explain.function import repair
    from compress.pipelines.explain.repair import DIFFERENCE, FOLDER, REPAIRED

    seconds = _seconds(time_limit)
    with show_progress() as (progress, _):
        options = {"best": best, "trains": trains, "apply": apply}
        found = repair(directory, seconds=seconds, progress=progress, announce=notify, **options)
    lines = [*_lines(found)]
    if found.chosen is not None:
        folder = directory / FOLDER
        lines.append(f"  written {folder / DIFFERENCE}; compress run {folder / REPAIRED}")
    if prints:
        print_result(found, lines)
    if found.chosen is None:
        tried = sum(len(explanation.tried) for explanation in found.explanations)
        if not tried:
            raise GateRefused(f"{directory}: no repair is known for what was found")
        raise GateRefused(
            f"{directory}: none of {tried} repairs passes all gates; the nearest is "
            f"{found.nearest}; try more --time"
        )


@contextmanager
def repaired_on_refusal(directory: Path) -> Iterator[None]:
    """Try repairs where a gate refuses within the block, and raise the refusal all the same."""
    try:
        yield
    except GateRefused as refusal:
        try:
            repair_and_print(directory, prints=not current_mode().as_json)
        except CompressError as error:
            refusal.add_note(f"repair: {error}")
        else:
            refusal.add_note(f"repair: what passes is in {directory / 'repair' / 'pipeline.yaml'}")
        raise  # the pipeline as it stands is refused, and the exit code says so


def _lines(found: Explanations) -> Iterator[str]:
    for explanation in found.explanations:
        yield from explanation.lines(rule_in_words(explanation.verdict, explanation.metric))


def _seconds(text: str) -> float:
    try:
        return float(TypeAdapter(Seconds).validate_python(text))
    except ValidationError as error:
        raise PipelineInvalid(f"--time {text}: {first_problem(error)}") from None
