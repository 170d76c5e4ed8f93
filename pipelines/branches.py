"""The order in which stages are walked: what one stage's failure does not concern goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.plan import SOURCE

if TYPE_CHECKING:
    from pipelines.walk import Walk


def walk_branches(walk: Walk, first_again: int) -> None:
    """Bring in the model, and walk every stage that no other one's failure keeps from running.

    Args:
        walk: the run.
        first_again: index of the first stage that runs whatever the store holds; the source is -1.

    Raises:
        CompressError: the error that decides how the run ends; the others are its notes.
    """
    with walk.outcome.noting(SOURCE):
        walk.import_model(again=first_again < 0)
    _in_turn(walk, first_again)
    error = walk.outcome.error()
    if error:
        walk.at = ""
        raise error


def _in_turn(walk: Walk, first_again: int) -> None:
    for planned in walk.plan.stages:
        stopper = walk.outcome.stopper(planned)
        if stopper:
            walk.announce(f"{planned.name}: skipped, as {stopper} did not pass")
            continue
        with walk.outcome.noting(planned.name):
            walk.step(planned, again=planned.index >= first_again)
        _tell_of_failure(walk, planned.name)


def _tell_of_failure(walk: Walk, name: str) -> None:
    if name in walk.outcome.errors and not walk.outcome.refused(name):
        walk.announce(f"{name}: failed")
