"""The callback through which a stage reports how far it is, and bars that show it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars


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
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars
    from rich.table import Column

    # 12 columns of bar leave room for stage, epoch and loss on a terminal of 80.
    texts = ("{task.description}", "{task.fields[note]}")
    name, last = (TextColumn(t, markup=False, table_column=Column(no_wrap=True)) for t in texts)
    columns = (name, BarColumn(12), last, TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    # Kernels set FORCE_COLOR, by which any file would be taken for a terminal.
    target = Console(file=io.StringIO(), width=100, force_jupyter=False, force_terminal=False)
    bars = Bars(*columns, console=target if console.is_jupyter else console, transient=True)
    if console.is_jupyter:
        _draw_in_notebook(bars, target)
    with bars:

        def progress(task: str, done: int, total: int, note: str = "") -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total, note=note)
            bars.update(tasks[task], completed=done, total=total, note=note)
            if done >= total:
                bars.remove_task(tasks.pop(task))

        yield progress


def _draw_in_notebook(bars: Bars, console: Console) -> None:
    """Let bars be a text that is replaced; rich itself shows them with ipywidgets alone."""
    import IPython.display as notebook

    show: Any = notebook.display  # which IPython leaves without types
    output = show({"text/plain": ""}, raw=True, display_id=True)

    def refresh() -> None:
        with console.capture() as text:
            console.print(bars.get_renderable())
        output.update({"text/plain": text.get().rstrip()}, raw=True)

    bars.live.refresh_per_second = 2  # a notebook keeps what is sent to it
    bars.live.refresh = refresh  # type: ignore[method-assign]


def show_bars(wanted: bool | None = None) -> AbstractContextManager[Progress]:
    """Show the progress of a block as bars; by default on a terminal or in a notebook."""
    from rich.console import Console

    console = Console(stderr=True)
    shows = console.is_terminal or console.is_jupyter if wanted is None else wanted
    return progress_bars(console) if shows else nullcontext(silent)
