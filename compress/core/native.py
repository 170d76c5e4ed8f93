"""NativeModel: a module in torch.ao's own integer layers, loadable anywhere, nothing unpickled."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ValidationError

from compress.core.artifact import Artifact, Predictor, Step
from compress.core.eager import predicting, sealed_code, write_sources
from compress.core.errors import ArtifactInvalid
from compress.core.factory import local_sources
from compress.core.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from compress.core.eager import EagerModel
    from compress.core.recipe import Recipe
    from compress.core.signature import Signature

Backend = Literal["fx", "eager"]
Method = Literal["static", "dynamic", "qat"]
Engine = Literal["x86", "fbgemm", "onednn", "qnnpack"]


class Native(Settings):
    """How torch.ao turns a float module into integer layers; replayed when the model is loaded."""

    backend: Backend
    """Whether layers are found in the graph that torch.fx records, or among the submodules."""
    method: Method
    """Whether ranges are fixed, taken anew in each call, or fixed and trained for."""
    engine: Engine
    """Library of kernels whose formats the integers are for."""
    floats: tuple[str, ...] = ()
    """Names of the modules left in float."""


class NativeModel(Artifact):
    """The recipe of a float module, how torch.ao changes it, and the integers it then holds.

    It computes in integers on the CPU, whatever the device.
    """

    kind: ClassVar[str] = "native"
    payload: ClassVar[str] = "weights.safetensors"

    @classmethod
    def create(
        cls,
        path: Path,
        model: EagerModel,
        module: torch.nn.Module,
        native: Native,
        *,
        lineage: tuple[Step, ...] = (),
        facts: dict[str, Any] | None = None,
    ) -> NativeModel:
        """Seal a quantized module.

        Args:
            path: directory of the artifact.
            model: the float model that it was made from.
            module: the quantized module.
            native: how it was made.
            lineage: the stages so far.
            facts: what the producing stage found out.

        Raises:
            StageFailed: the module holds what cannot be written as plain tensors, or answers
                otherwise when it is built anew from these.
        """
        from compress.core.packed import count_weights, unpacked
        from compress.core.safetensors_file import write_safetensors
        from compress.core.torch_ao import refuse_other_answers

        state = unpacked(module)
        again = _rebuilt(model.recipe, model.code, native, model.signature, state, str(path))
        refuse_other_answers(module, again, native.engine, model.signature)
        known = {
            "native": native.model_dump(mode="json"),
            "parameters": count_weights(state),
            "macs": model.macs(),
        }
        with cls.sealing(
            path,
            model.signature,
            recipe=model.recipe,
            lineage=lineage,
            facts={**known, **(facts or {})},
        ) as partial:
            write_safetensors(partial / cls.payload, state)
            write_sources(partial, local_sources(model.recipe.factory, model.code))
        return cls.at(path)

    @property
    def recipe(self) -> Recipe:
        """How to build the float module.

        Raises:
            ArtifactInvalid: the manifest does not say.
        """
        if self.manifest.recipe is None:
            raise ArtifactInvalid(f"{self.path}: the manifest of a native model needs a recipe")
        return self.manifest.recipe

    @property
    def native(self) -> Native:
        """How torch.ao changed the float module.

        Raises:
            ArtifactInvalid: the manifest does not say, or says what is not known here.
        """
        try:
            return Native.model_validate(self.manifest.facts.get("native"))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, ("facts", "native", *first["loc"])))
            raise ArtifactInvalid(f"{self.path}: {place}: {first['msg']}") from error

    def load(self) -> torch.nn.Module:
        """Return a fresh quantized module, to be called where its engine is the one in use.

        Raises:
            ArtifactInvalid: the tensors do not fit the recipe.
            Unavailable: this torch lacks the engine.
        """
        from compress.core.files import open_regular
        from compress.core.safetensors_file import tensors_in
        from compress.core.weights import in_memory

        self.refuse_altered()
        with open_regular(self.payload_path) as stream:
            state = {name: in_memory(tensor) for name, tensor in tensors_in(stream).items()}
        return _rebuilt(
            self.recipe,
            sealed_code(self),
            self.native,
            self.signature,
            state,
            str(self.payload_path),
        )

    @contextmanager
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Give the quantized module as a predictor; it runs on the CPU whatever the device."""
        from compress.core.torch_ao import by_engine

        with predicting(self.load(), "cpu", threads) as predict:
            yield by_engine(predict, self.native.engine)

    def parameters(self) -> int:
        """Count the weights; scales and zero points are not weights."""
        return self.counts()["parameters"]

    def macs(self) -> int:
        """Count multiply-accumulates for one sample, as the float module's."""
        return self.counts()["macs"]

    def counts(self) -> dict[str, int]:
        """Return what was counted when it was made; packed weights do not tell."""
        return {name: int(str(self.fact(name))) for name in ("parameters", "macs")}


def _rebuilt(
    recipe: Recipe,
    folder: Path | None,
    native: Native,
    signature: Signature,
    state: dict[str, torch.Tensor],
    source: str,
) -> torch.nn.Module:
    """Return a float module changed as it once was, filled with plain tensors."""
    from compress.core.packed import pack_
    from compress.core.torch_ao import computing_with, converted, prepared

    module = recipe.build(folder).eval()
    with computing_with(native.engine):
        quantized = converted(prepared(module, native, signature), native)
        pack_(quantized, state, source)
    return quantized
