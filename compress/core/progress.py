"""The callback through which a stage reports how far it is, and bars that show it."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars

SECONDS_BETWEEN_TEXTS = 0.5  # in a notebook, which keeps what is sent to it


class Progress(Protocol):
    """Callback through which a stage reports how far it is."""

    def __call__(self, task: str, done: int, total: int, note: str = "") -> None:
        """Report that ``done`` of ``total`` steps of a task are done; ``note`` is shown with it."""
        ...


def silent(task: str, done: int, total: int, note: str = "") -> None:
    """Ignore the report: the default where nothing shows progress."""


@contextmanager
def progress_bars(console: Console) -> Iterator[Progress]:
    """Draw a bar on a terminal or in a notebook for each task of a block, until it is done."""
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars
    from rich.table import Column

    # 12 columns of bar leave room for stage, epoch and loss on a terminal of 80.
    texts = ("{task.description}", "{task.fields[note]}")
    name, last = (TextColumn(t, markup=False, table_column=Column(no_wrap=True)) for t in texts)
    columns = (name, BarColumn(12), last, TimeElapsedColumn())
    bars = Bars(*columns, console=console, transient=True)
    tasks: dict[str, TaskID] = {}
    with _in_notebook(bars) if console.is_jupyter else bars:

        def progress(task: str, done: int, total: int, note: str = "") -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total, note=note)
            bars.update(tasks[task], completed=done, total=total, note=note)
            if done >= total:
                bars.remove_task(tasks.pop(task))

        yield progress


@contextmanager
def _in_notebook(bars: Bars) -> Iterator[None]:
    """Show bars as a text that is replaced; rich itself shows them with ipywidgets alone."""
    from IPython.display import display
    from rich.console import Console

    def text() -> dict[str, str]:
        console = Console(file=io.StringIO(), width=100, force_jupyter=False)
        console.print(bars.get_renderable())
        return {"text/plain": console.file.getvalue().rstrip()}  # type: ignore[attr-defined]

    output = display(text(), raw=True, display_id=True)
    ended = threading.Event()

    def draw() -> None:
        shown = text()
        while not ended.wait(SECONDS_BETWEEN_TEXTS):
            if (now := text()) != shown:
                output.update(shown := now, raw=True)

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        output.update({"text/plain": ""}, raw=True)


def show_bars(wanted: bool | None = None) -> AbstractContextManager[Progress]:
    """Show the progress of a block as bars; by default on a terminal or in a notebook."""
    from rich.console import Console

    console = Console(stderr=True)
    shows = console.is_terminal or console.is_jupyter if wanted is None else wanted
    return progress_bars(console) if shows else nullcontext(silent)
