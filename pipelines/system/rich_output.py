"""The consoles that tables and bars are drawn on, and the format of log lines on a terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from compress.common.printable import escaped, printable

if TYPE_CHECKING:
    from rich.text import Text


class PlainConsole(Console):
    """A console without markup such as ``[bold]`` that escapes control characters.

    Names and messages come from untrusted files, and rich passes control characters through.
    """

    def __init__(self, **options: Any) -> None:
        """Accept rich's options except `markup`, `emoji` and `highlight`."""
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text, escaped before it is measured."""
        return super().render_str(escaped(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of what is drawn, their text escaped."""
        for segment in super().render(renderable, options):
            if segment.control is None and segment.text != "\n":
                yield Segment(escaped(segment.text), segment.style)
            else:
                yield segment


class PlainFormatter(logging.Formatter):
    """Formats log records for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's message, and its traceback below, made safe to print."""
        return printable(super().format(record))
