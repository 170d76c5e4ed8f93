"""The callback through which a stage reports how far it is, and bars that show it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class Progress(Protocol):
    """Callback through which a stage reports how far it is."""

    def __call__(self, task: str, done: int, total: int, note: str = "") -> None:
        """Report that ``done`` of ``total`` steps of a task are done; ``note`` is shown with it."""
        ...


def silent(task: str, done: int, total: int, note: str = "") -> None:
    """Ignore the report: the default where nothing shows progress."""


@contextmanager
def progress_bars(console: Console) -> Iterator[Progress]:
    """Draw a bar on a console for each task of a block, until it is done."""
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    name = TextColumn("{task.description}", markup=False)
    last = TextColumn("{task.fields[note]}", markup=False)
    tasks: dict[str, TaskID] = {}
    with Bars(
        name, BarColumn(), last, TimeElapsedColumn(), console=console, transient=True
    ) as bars:

        def progress(task: str, done: int, total: int, note: str = "") -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total, note=note)
            bars.update(tasks[task], completed=done, total=total, note=note)
            if done >= total:
                bars.remove_task(tasks.pop(task))

        yield progress


def show_bars(wanted: bool | None = None) -> AbstractContextManager[Progress]:
    """Show the progress of a block as bars; by default on a terminal or in a notebook."""
    from rich.console import Console

    console = Console(stderr=True)
    # In a notebook rich draws bars as a widget, and without ipywidgets warns at each of them.
    drawable = console.is_terminal or (console.is_jupyter and bool(find_spec("ipywidgets")))
    shows = drawable if wanted is None else wanted
    return progress_bars(console) if shows else nullcontext(silent)
