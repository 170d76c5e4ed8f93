"""Package: what a model was packed into, for a server."""

from __future__ import annotations

from compress.core.artifact import Artifact


class Package(Artifact):
    """A packed model, whose weights and operations were counted before it was packed."""

    def parameters(self) -> int | None:
        """Return what the packaged artifact counted."""
        return self._counted("parameters")

    def macs(self) -> int | None:
        """Return what the packaged artifact counted."""
        return self._counted("macs")

    def _counted(self, fact: str) -> int | None:
        value = self.manifest.facts.get(fact)
        return value if isinstance(value, int) else None
