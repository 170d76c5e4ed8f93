"""Text from outside (manifests, checkpoints, errors, requests), made safe to print."""

from __future__ import annotations

import re

CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What a terminal obeys or cannot show: control characters (line breaks and tabs apart), marks that
turn the direction of writing, other line separators, and halves of characters."""


def printable(text: str) -> str:
    """Return a text with the characters that a terminal would obey shown as escapes.

    A further line is indented, so that no line of a message can pass for one of the tool's own.
    """
    return escaped(text).replace("\n", "\n  ")


def escaped(text: str) -> str:
    r"""Return a text with ESC as ``\x1b``, U+202E as ``\u202e`` and so on; lines stay lines."""
    return CONTROL_CHARACTERS.sub(lambda found: ascii(found[0])[1:-1], text)


def escaped_json(text: str) -> str:
    """Return JSON with the same characters as JSON's own escapes; it means the same."""
    return CONTROL_CHARACTERS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
