"""What a section of attacks came to."""

import sys
import threading
from dataclasses import dataclass, field


@dataclass
class Section:
    """How many attacks of a kind were tried, which of them succeeded, and worst figures."""

    name: str
    tried: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    """Case → what should not have happened."""
    details: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    """Worst figures, such as seconds."""
    skipped: str = ""
    """Why nothing was tried."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, case: str, failure: str) -> None:
        """Count a case; an empty failure is one that was survived."""
        with self._lock:
            self.tried += 1
            if failure:
                self.failures[case] = failure
                print(f"! {self.name}: {case!r}: {failure}", file=sys.stderr, flush=True)

    def note(self, name: str, value: float) -> None:
        """Keep the largest of a figure's values."""
        with self._lock:
            self.figures[name] = max(self.figures.get(name, 0.0), value)

    @property
    def survived(self) -> int:
        """Attacks without success."""
        return self.tried - len(self.failures)

    def line(self) -> str:
        """Return the row of the table in docs/security.md."""
        worst = ", ".join(f"{value:.2g} {name}" for name, value in self.figures.items())
        return f"| {self.name} | {self.tried} | {self.survived} | {worst or self.skipped} |"
