"""The user's callbacks after steps and epochs, which get numbers and can change no result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from compress.common.dependency_recorder import recording_paused
from compress.common.errors import CompressError, StageFailed, exits_refused, first_line
from compress.common.factories import resolve
from compress.common.process import random_state_kept
from compress.training.config.training import Callbacks
from compress.training.loop.step_metrics import StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from compress.training.loop.step_metrics import TrainingRecord

EVENTS = ("on_step_end", "on_epoch_end")


class CallbackRunner:
    """Calls the user's functions once for each step and epoch, in order."""

    def __init__(self, functions: dict[str, Callable[[dict[str, Any]], object]]) -> None:
        self.functions = functions
        self.last = dict.fromkeys(EVENTS, 0)

    @classmethod
    def from_settings(cls, settings: Callbacks | str, folder: Path | None) -> Self:
        """Import the functions, or create an object of the class, from the folder of user code."""
        # Not recorded: what they read changes no artifact.
        with recording_paused(environment=True):
            if isinstance(settings, Callbacks):
                named = {event: getattr(settings, event) for event in EVENTS}
                return cls({event: resolve(n, folder) for event, n in named.items() if n})
            try:
                with exits_refused():
                    created = resolve(settings, folder)()
            except CompressError:
                raise
            except Exception as error:
                raise StageFailed(f"callbacks: {_described(settings, error)}") from error
        functions = {event: getattr(created, event, None) for event in EVENTS}
        if not any(functions.values()):
            raise StageFailed(f"callbacks: {settings} has no method {' or '.join(EVENTS)}; add one")
        return cls({event: function for event, function in functions.items() if function})

    @property
    def wants_steps(self) -> bool:
        """Whether a function is called after each step."""
        return "on_step_end" in self.functions

    def __call__(self, record: TrainingRecord) -> None:
        """Call the function for a step or an epoch; one that is trained again is left out."""
        event, number = "on_epoch_end", record.epoch
        if isinstance(record, StepRecord):
            event, number = "on_step_end", record.step
        # After a process was killed, steps since the last checkpoint are trained again.
        if event not in self.functions or number <= self.last[event]:
            return
        self.last[event] = number
        try:
            with exits_refused(), recording_paused(environment=True), random_state_kept("cpu"):
                self.functions[event](record.model_dump())
        except CompressError as error:
            raise StageFailed(f"callbacks.{event}: {error}") from error
        except Exception as error:
            where = f"{'epoch' if event == 'on_epoch_end' else 'step'} {number}"
            raise StageFailed(f"callbacks.{_described(event, error)} (after {where})") from error


def _described(what: str, error: Exception) -> str:
    return f"{what} raised {type(error).__name__}: {first_line(error)}"
