"""Origin: a model that a stage reads besides the pipeline's own, such as a teacher."""

from __future__ import annotations

from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue, PrivateAttr

from compress.artifacts.recipe import Recipe
from compress.checkpoint.loading import checkpoint_digest
from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid
from compress.common.factories import Reference, local_sources, sources_digest

if TYPE_CHECKING:
    from compress.artifacts.eager_model import EagerModel
    from compress.common.signature import Signature


class Origin(Settings):
    """A model given by its factory and its checkpoint."""

    factory: Reference
    """`module:callable` that returns the torch.nn.Module; looked up in the code folder first."""
    arguments: dict[str, JsonValue] = {}
    """Keyword arguments of the factory."""
    checkpoint: str | None = None
    """Weights, relative to the file, of any form `model.checkpoint` takes; else the factory's."""

    _code: Path | None = PrivateAttr(default=None)

    def resolve_paths(self, folder: Path, code: Path) -> Origin:
        """Return the model with a pipeline's folders; raise if its checkpoint does not exist."""
        update = {}
        if self.checkpoint is not None:
            checkpoint = (folder / self.checkpoint).absolute()
            if not checkpoint.exists():
                raise ArtifactInvalid(f"checkpoint {checkpoint}: no such file")
            update["checkpoint"] = str(checkpoint)
        resolved = self.model_copy(update=update)
        resolved._code = code
        return resolved

    def identity(self) -> dict[str, Any]:
        """Return what decides the model, for cache keys: source of the factory, weights."""
        sources = local_sources(self.factory, self._code)
        return {
            "factory": self.factory,
            "arguments": self.arguments,
            "code": sources_digest(sources) if sources else installed_version(self.factory),
            "checkpoint": checkpoint_digest(Path(self.checkpoint)) if self.checkpoint else None,
        }

    def seal(self, path: Path, signature: Signature, seed: int) -> EagerModel:
        """Write the model as an artifact; raises as :func:`import_checkpoint`."""
        from compress.artifacts.importing import import_checkpoint

        return import_checkpoint(
            path,
            Recipe(factory=self.factory, arguments=self.arguments),
            signature,
            checkpoint=Path(self.checkpoint) if self.checkpoint else None,
            folder=self._code,
            seed=seed,
        )


@cache
def installed_version(reference: str) -> str | None:
    """Return the version of the installed package that a factory or module is in."""
    package = reference.partition(":")[0].partition(".")[0]
    found = packages_distributions().get(package, ())
    return next((f"{name} {version(name)}" for name in found), None)
