"""The sections of `make attack`, in the order in which they are tried."""

from collections.abc import Callable

from benchmarks.attack.files import attack_files
from benchmarks.attack.report import Section

SECTIONS: dict[str, Callable[[str, int | None], Section]] = {"files": attack_files}
"""Name → function of words that names must hold, and of how many to try at most."""
