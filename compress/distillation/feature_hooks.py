"""What modules give inside of a model: which are meant, hearing them, mapping channels."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from compress.distillation.loss_terms import AnyTerm
    from compress.distillation.output_losses import Modules

Pairs = tuple[tuple[str, str], ...]
"""Modules of the student and of the teacher that are compared; "" for the outputs."""


def pairs_of(terms: Sequence[AnyTerm], student: nn.Module, teacher: nn.Module) -> tuple[Pairs, ...]:
    """Return the modules that each term compares.

    Raises:
        StageFailed: a name is not in its model, or the teacher has fewer than the student.
    """
    return tuple(
        (("", ""),)
        if term.modules is None
        else _pairs(term.modules, student, teacher, f"losses[{i}]")
        for i, term in enumerate(terms)
    )


def _pairs(
    names: tuple[Modules, Modules], student: nn.Module, teacher: nn.Module, where: str
) -> Pairs:
    own = _found(names[0], student, f"{where}: the student")
    taught = _found(names[1], teacher, f"{where}: the teacher")
    if len(taught) < len(own):
        raise StageFailed(
            f"{where}: {len(own)} modules of the student and {len(taught)} of the teacher; name as "
            "many, or more of the teacher"
        )
    # TinyBERT's uniform map: the m-th of M goes with the (m N / M)-th of N.
    places = [(m + 1) * len(taught) // len(own) - 1 for m in range(len(own))]
    return tuple((name, taught[place]) for name, place in zip(own, places, strict=True))


def _found(wanted: Modules, module: nn.Module, where: str) -> list[str]:
    """Return the modules that names or patterns mean, in the model's order for a pattern."""
    known = [name for name, _ in module.named_modules() if name]
    found: list[str] = []
    for name in (wanted,) if isinstance(wanted, str) else wanted:
        pattern = re.compile(re.escape(name).replace(r"\*", r"[^.]+"))
        matches = [other for other in known if pattern.fullmatch(other)]
        if not matches:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else _some_of(known)
            raise StageFailed(f"{where} has no module {name!r}; {hint}")
        found += matches
    return found


def _some_of(known: Sequence[str]) -> str:
    return f"it has {', '.join(known[:8])}{' …' if len(known) > 8 else ''}"


class Recorder:
    """The tensors that named modules gave in a model's last forward pass."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        """Listen to modules from now on."""
        self.names = tuple(dict.fromkeys(names))
        self.heard: dict[str, torch.Tensor] = {}
        for name in self.names:
            module.get_submodule(name).register_forward_hook(self._hook(name))

    def take(self) -> list[torch.Tensor]:
        """Return what was heard, in the order of the names, and forget it.

        Raises:
            StageFailed: a module was not called.
        """
        heard, self.heard = self.heard, {}
        silent = next((name for name in self.names if name not in heard), None)
        if silent is not None:
            raise StageFailed(f"module {silent!r} takes no part in the model's forward pass")
        return [heard[name] for name in self.names]

    def with_output(self, output: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what was heard by name, and the model's output under an empty name."""
        return dict(zip(self.names, self.take(), strict=True)) | {"": output}

    def _hook(self, name: str) -> Any:
        def hear(module: nn.Module, inputs: object, output: Any) -> None:
            self.heard[name] = flatten_outputs(output)[0]

        return hear


def channel_axis(features: torch.Tensor) -> int:
    """Return the axis of channels: the second of images (N, C, H, W), else the last."""
    return 1 if features.dim() in (4, 5) else -1


def projected(features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return features with their channels mapped linearly, a 1x1 convolution for images."""
    axis = channel_axis(features)
    return F.linear(features.movedim(axis, -1), weight, bias).movedim(-1, axis)
