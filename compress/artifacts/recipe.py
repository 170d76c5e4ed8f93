"""Recipe: how to rebuild a module, by a factory, its arguments and edits of the architecture."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from compress.artifacts.carried_files import TIED
from compress.artifacts.edits.named_sizes import NamedCall, NamedSize, name_sizes_
from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid
from compress.common.factories import Reference, resolve
from compress.common.foreign.lock_waits import bounded_lock_waits
from compress.common.forward import outputs_by_name
from compress.common.lazy_modules import torch


class KeepIndices(Settings):
    """Channel pruning: the entries that stay along axes of parameters and buffers."""

    edit: Literal["keep_indices"] = "keep_indices"
    kept: dict[str, dict[int, tuple[int, ...]]]
    """Tensor name → axis → indices kept, ascending."""
    attributes: dict[str, JsonValue] = {}
    """Module attribute (dotted) → new value, for integers baked into a forward pass."""

    def apply_(self, module: torch.nn.Module) -> None:
        """Cut the tensors and update the modules' sizes (``out_channels`` …), in place."""
        from compress.artifacts.edits.removal import keep_indices_

        keep_indices_(module, self.kept, self.attributes)


class SplitAttention(Settings):
    """``nn.MultiheadAttention`` replaced by an equivalent module whose heads can be pruned."""

    edit: Literal["split_attention"] = "split_attention"
    modules: tuple[str, ...]
    """Names of the modules replaced; each once, wherever it is held."""

    def apply_(self, module: torch.nn.Module) -> None:
        """Replace the modules, in place."""
        from compress.artifacts.edits.split_attention import split_attention_

        split_attention_(module, self.modules)


class NameSizes(Settings):
    """Sizes in the code of modules of one class that become attributes, so that they can change."""

    edit: Literal["name_sizes"] = "name_sizes"
    calls: tuple[NamedCall, ...]
    sizes: dict[str, dict[NamedSize, int | tuple[int, ...]]]
    """Module → attribute → its value: a size, or the sizes of the parts of an axis."""

    def apply_(self, module: torch.nn.Module) -> None:
        """Replace the modules' methods and set the attributes, in place."""
        name_sizes_(module, self.calls, self.sizes)


class KeepBlocks(Settings):
    """Depth pruning: the blocks that stay in lists and sequences."""

    edit: Literal["keep_blocks"] = "keep_blocks"
    kept: dict[str, tuple[int, ...]]
    """Container of blocks → indices of the entries kept, ascending, as they were before."""

    def apply_(self, module: torch.nn.Module) -> None:
        """Remove the other blocks and update attributes that count them, in place."""
        from compress.artifacts.edits.removal import keep_blocks_

        keep_blocks_(module, self.kept)


class UntieWeights(Settings):
    """Parameters that share memory with another one, such as a tied head, made separate."""

    edit: Literal["untie_weights"] = "untie_weights"
    parameters: tuple[str, ...]

    def apply_(self, module: torch.nn.Module) -> None:
        """Copy the parameters, and set `tie_word_embeddings` of a config to false, in place."""
        from torch import nn

        for name in self.parameters:
            owner, _, key = name.rpartition(".")
            part = module.get_submodule(owner)
            value = part.get_parameter(key)
            part.register_parameter(key, nn.Parameter(value.detach().clone(), value.requires_grad))
        config: Any = getattr(module, "config", None)
        if getattr(config, TIED, False):
            setattr(config, TIED, False)


class CallByName(Settings):
    """Adapts a module to tensors in the signature's order, and selects among its outputs."""

    edit: Literal["call_by_name"] = "call_by_name"
    inputs: tuple[str, ...] = ()
    """Parameter of forward for each input, in the signature's order; by position where empty."""
    outputs: tuple[str, ...] = ()
    """Names of the outputs, in the signature's order; all outputs where empty."""

    def apply_(self, module: torch.nn.Module) -> None:
        """Adapt the module's forward, in place."""
        from compress.artifacts.edits.independent_calls import replace_forward_

        kind = type(module)
        signature = inspect.signature(kind.forward)

        def forward(own: torch.nn.Module, *tensors: torch.Tensor) -> Any:
            if self.inputs:
                output = kind.forward(own, **dict(zip(self.inputs, tensors, strict=True)))
            else:
                output = kind.forward(own, *tensors)
            if not self.outputs:
                return output
            entries = outputs_by_name(output)
            return tuple(entries[name] for name in self.outputs)

        if self.inputs:
            own_parameter, *_ = signature.parameters.values()
            any_way = inspect.Parameter.POSITIONAL_OR_KEYWORD
            each = [inspect.Parameter(name, any_way) for name in self.inputs]
            signature = inspect.Signature([own_parameter, *each])
        replace_forward_(module, forward, signature)


class IndependentCalls(Settings):
    """Calls that change neither the module nor their inputs, although its own forward does."""

    edit: Literal["independent_calls"] = "independent_calls"
    state: tuple[str, ...] = ()
    """Buffers and attributes that each call starts from and leaves as they are."""
    in_training: bool = False
    """Whether calls in training mode do, too."""
    copies_inputs: bool = False
    """Whether forward gets copies of its inputs."""

    def apply_(self, module: torch.nn.Module) -> None:
        """Replace the module's forward, in place."""
        from compress.artifacts.edits.independent_calls import make_calls_independent_

        make_calls_independent_(
            module, self.state, in_training=self.in_training, copies_inputs=self.copies_inputs
        )


AnyEdit = Annotated[
    KeepIndices
    | KeepBlocks
    | SplitAttention
    | NameSizes
    | UntieWeights
    | CallByName
    | IndependentCalls,
    Field(discriminator="edit"),
]
"""A change of an architecture; the key ``edit`` names its class."""


class Recipe(Settings):
    """A model's architecture as code plus data; never a pickled module."""

    factory: Reference
    """``module:callable`` that returns the module."""
    arguments: dict[str, JsonValue] = {}
    edits: tuple[AnyEdit, ...] = ()
    """Changes of the architecture, in the order in which they were made."""

    def build(self, folder: Path | None = None) -> torch.nn.Module:
        """Return a new module with the factory's weights; raise ArtifactInvalid if it fails."""
        factory: Any = resolve(self.factory, folder)
        try:
            with bounded_lock_waits():
                module = factory(**self.arguments)
        except (Exception, SystemExit) as error:
            raise ArtifactInvalid(
                f"factory {self.factory!r} with arguments {self.arguments}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(module, torch.nn.Module):
            raise ArtifactInvalid(
                f"factory {self.factory!r} returned {type(module).__name__}, "
                "expected torch.nn.Module"
            )
        for edit in self.edits:
            edit.apply_(module)
        return module
