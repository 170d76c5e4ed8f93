"""Makes untrusted text (manifests, checkpoints, errors, requests) safe to print."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that a terminal interprets or cannot show: control characters except line break and
tab, marks of text direction, other line separators, and lone surrogates."""


class ShownInNotebooks:
    """Base of results that a notebook shows as a verdict, a table and a plot."""

    html_of: ClassVar[Callable[[Any], str]]
    """Renders a result; `compress` sets it, as what renders lies above the results' packages."""

    def _repr_html_(self) -> str:
        return ShownInNotebooks.html_of(self)


def printable(text: str) -> str:
    """Return a text with control characters as escapes, and further lines indented."""
    # The indentation keeps a line of a message from looking like one of the tool's own.
    return escaped(text).replace("\n", "\n  ")


def escaped(text: str) -> str:
    r"""Return a text with ESC as ``\x1b``, U+202E as ``\u202e`` and so on; lines stay lines."""
    return CONTROL_CHARACTERS.sub(lambda found: ascii(found[0])[1:-1], text)


def escape_warnings() -> None:
    """Have Python's warnings, in which libraries cite names, printed as :func:`escaped` texts."""
    plain = warnings.formatwarning
    warnings.formatwarning = lambda *given, **named: escaped(plain(*given, **named))


def escaped_json(text: str) -> str:
    """Return JSON with control characters as JSON's own escapes, of the same meaning."""
    return CONTROL_CHARACTERS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def markdown_text(text: object) -> str:
    """Return a text as Markdown of one line: no HTML, links, headings or further table cells."""
    line = escaped(str(text)).replace("\n", " ").lstrip()
    special = r"[\\<|]|\](?=[(\[:])|`(?=``)|^[#>+*~=-]"
    return re.sub(special, r"\\\g<0>", line)


def markdown_code(text: object) -> str:
    """Return a text as a Markdown code span of one line, whatever backticks it holds."""
    shown = escaped(str(text)).replace("\n", " ").replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{fence} {shown} {fence}" if "`" in shown else f"{fence}{shown}{fence}"
