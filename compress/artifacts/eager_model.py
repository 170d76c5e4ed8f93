"""EagerModel: a PyTorch module as a recipe plus weights; loading it unpickles no code."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from compress.artifacts.artifact import Artifact, Details
from compress.artifacts.in_process import is_in_process
from compress.checkpoint.state_dict import Weights, load_state_, zero_share
from compress.common.atomic_files import temporary_folder
from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.common.factories import imported_libraries, local_sources
from compress.common.forward import OpenedModel, opened_model, plain_attention, torch_predictor
from compress.common.signature import Signature

if TYPE_CHECKING:
    import torch

    from compress.artifacts.recipe import AnyEdit, Recipe
    from compress.common.forward import Predictor

CODE = "code"
SPARSE = 0.1  # share of zeros from which an imported checkpoint counts as pruned elsewhere
SPARSITY_KEPT = 0.5
"""Part of the share of zeros below which they are called gone: a cut may take channels of zeros."""
log = logging.getLogger(__name__)


class EagerModel(Artifact):
    """A module's recipe, its weights, and a copy of the user's source that the recipe needs."""

    kind: ClassVar[str] = "eager"
    payload: ClassVar[str] = "weights.safetensors"
    opened_with: ClassVar[tuple[str, ...]] = (
        "compress.checkpoint.safetensors_io",
        "torch.utils.serialization.config",
    )

    @classmethod
    def create(
        cls,
        path: Path,
        recipe: Recipe,
        state: Weights,
        signature: Signature,
        *,
        folder: Path | None = None,
        **details: Unpack[Details],
    ) -> EagerModel:
        """Write an artifact from a recipe, whose factory's source lies in a folder, and weights.

        The state dict may be in memory or on disk; tied tensors are stored once.
        """
        from compress.checkpoint.safetensors_io import write_safetensors

        sources = local_sources(recipe.factory, folder)
        with cls.atomic_write(path, signature, recipe=recipe, **details) as partial:
            write_safetensors(partial / cls.payload, state)
            for name, source in sources.items():
                copy = partial / CODE / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(source.read_bytes())
        return cls.from_directory(path)

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Module,
        *,
        example_inputs: Sequence[torch.Tensor] | Mapping[str, torch.Tensor] | None = None,
        factory: str | None = None,
        signature: Signature | None = None,
        arguments: dict[str, Any] | None = None,
        root: Path | None = None,
    ) -> EagerModel:
        """Write an artifact of a module in memory, and check that its recipe rebuilds it.

        Without a factory, a module that its class alone does not rebuild, or whose class cannot be
        imported, becomes an artifact that loads :attr:`only_here`. Raises PipelineInvalid: neither
        inputs nor signature given, or the factory cannot be imported; ArtifactInvalid: the factory
        builds another architecture, or one with other outputs.

        Args:
            module: a trained module; it is not changed.
            example_inputs: inputs from which the signature is inferred (first axis dynamic); a
                mapping names them as forward's parameters.
            factory: ``module:callable`` that returns the same architecture; by default the
                module's class, or its config where it is one of transformers.
            signature: the interface, where it should not be inferred.
            arguments: keyword arguments of the factory.
            root: directory of the artifact; a temporary one when left out.
        """
        from compress.artifacts.recipe_inference import rebuilding_recipe

        if signature is None:
            if example_inputs is None:
                raise PipelineInvalid("from_module needs example_inputs or a signature")
            signature = Signature.from_examples(example_inputs)
        if isinstance(example_inputs, Mapping):
            example_inputs = [example_inputs[spec.name] for spec in signature.inputs]
        inputs = tuple(example_inputs or signature.example())
        recipe, signature = rebuilding_recipe(module, factory, arguments, signature, inputs)
        if signature.state:
            log.warning("%s", signature.state.line())
        path = root or temporary_folder() / "source"
        return cls.create(path, recipe, module.state_dict(), signature)

    @property
    def has_pruned_weights(self) -> bool:
        """Whether a stage before has set single weights to zero."""
        return any(step.stage == "prune_weights" for step in self.manifest.lineage)

    @property
    def only_here(self) -> bool:
        """Whether the model can be loaded in the process that made it alone."""
        return is_in_process(self.recipe.factory)

    @property
    def memory_unavailable_reason(self) -> str:
        """Why a call's memory cannot be measured; empty where it can."""
        return "its class is defined in this process alone" if self.only_here else ""

    @property
    def recipe(self) -> Recipe:
        """How to build the module."""
        if self.manifest.recipe is None:
            raise ArtifactInvalid(f"{self.path}: the manifest of an eager model needs a recipe")
        return self.manifest.recipe

    @property
    def code(self) -> Path | None:
        """The folder with the user's source, hashed now; None if the factory is installed."""
        sources = [name for name in self.manifest.files if name.startswith(f"{CODE}/")]
        if not sources:
            return None
        self.check_files(hashed=sources)  # at each access: the caller is about to run them
        return self.path / CODE

    def modules_to_open(self) -> tuple[str, ...]:
        """Return the libraries that the recipe's code has imported into this process."""
        return (*self.opened_with, *imported_libraries(self.recipe.factory))

    def load(self, device: str = "cpu") -> torch.nn.Module:
        """Return a new module in eval mode; raise ArtifactInvalid if the weights do not fit it."""
        from compress.artifacts.uninitialized import build_to_load
        from compress.checkpoint.safetensors_io import tensors_in

        self.verify_cached()
        file = self.payload_path
        with file.open("rb", buffering=0) as stream:
            weights = tensors_in(stream)
            module = build_to_load(self.recipe, self.code, weights.keys())
            load_state_(module, weights, str(file))
        return module.eval().to(device)

    def skeleton(self) -> torch.nn.Module | None:
        """Return the module with parameters on the meta device; None if building reads them."""
        from compress.artifacts.meta_init import build_skeleton

        module = build_skeleton(self.recipe, self.code)
        return None if module is None else module.eval()

    def derive(
        self,
        path: Path,
        weights: torch.nn.Module | Weights,
        *,
        edits: Sequence[AnyEdit] = (),
        **details: Unpack[Details],
    ) -> EagerModel:
        """Write a changed version of this model: new weights, and edits of its architecture.

        The lineage and the files beside it are those of this model, unless others are given. Where
        zeros of pruned weights are gone, also of an imported checkpoint, a warning says so.

        Weights on disk (:func:`~compress.checkpoint.loading.read_state_dict`) give the same digest
        as a module with those weights; ArtifactInvalid is raised if they do not fit the recipe.
        """
        from compress.artifacts.meta_init import match_state_dict
        from compress.checkpoint.safetensors_io import read_safetensors

        recipe = self.recipe.model_copy(update={"edits": (*self.recipe.edits, *edits)})
        if isinstance(weights, Mapping):
            state = match_state_dict(weights, recipe, self.code, str(path))
        else:
            state = weights.state_dict()
        if self.has_pruned_weights or not self.is_streamed:  # whose weights take long to read
            before, after = zero_share(read_safetensors(self.payload_path)), zero_share(state)
            is_sparse = self.has_pruned_weights or before >= SPARSE
            if is_sparse and after < SPARSITY_KEPT * before:
                lost = f"most pruned weights are zero no more: {before:.1%} before, {after:.1%} now"
                facts = details.get("facts") or {}
                details["facts"] = {**facts, "warnings": [*facts.get("warnings", ()), lost]}
        details.setdefault("lineage", self.manifest.lineage)
        if details.get("carried") is None:
            details["carried"] = self.carried_files()
        return self.create(path, recipe, state, self.signature, folder=self.code, **details)

    def stored_weights(self) -> tuple[torch.nn.Module, Weights]:
        """Return the module on meta, weights on disk; ArtifactInvalid if it is built with them."""
        from compress.artifacts.meta_init import match_state_dict
        from compress.checkpoint.safetensors_io import read_safetensors

        module = self.skeleton()
        if module is None:
            raise ArtifactInvalid(
                f"{self.recipe.factory!r} computes with its weights while it builds the model, so "
                "that they cannot be read part by part; leave out `stream`"
            )
        self.verify_cached()
        state = read_safetensors(self.payload_path)
        return module, match_state_dict(state, self.recipe, self.code, str(self.payload_path))

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Load the module as a predictor for a ``with`` block."""
        with torch_predictor(self._callable_module(device), device, threads) as predict:
            yield plain_attention()(predict)

    def open_anew(self, device: str = "cpu", threads: int = 1) -> OpenedModel:
        """Load the module once more, to be timed: with attention as fused as PyTorch runs it."""
        return OpenedModel(torch_predictor(self._callable_module(device), device, threads))

    def _callable_module(self, device: str = "cpu") -> torch.nn.Module:
        """Return the module with its weights, which it reads in each call if they are on disk."""
        from compress.artifacts.meta_init import stream_weights_

        if not self.is_streamed:
            return self.load(device)
        module, weights = self.stored_weights()
        stream_weights_(module, weights, device)
        return module

    def parameters(self) -> int:
        """Count the weights, tied ones once."""
        return self._parameter_count

    @cached_property
    def _parameter_count(self) -> int:
        module = self.skeleton() if self.is_streamed else None
        return sum(p.numel() for p in (module or self.load()).parameters())

    def macs(self, sizes: Mapping[str, int] | None = None) -> int:
        """Count multiply-accumulates for one sample."""
        from compress.graph.flops import count_macs

        at = tuple((sizes or {}).items())
        if at not in self._counted:
            inputs = self.signature.example(batch=1, sizes=sizes)
            self._counted[at] = count_macs(self._callable_module(), inputs)
        return self._counted[at]

    @cached_property
    def _counted(self) -> dict[tuple[tuple[str, int], ...], int]:
        return {}
