"""Hidden features: modules by name pattern, and forward hooks that record them."""

from __future__ import annotations

import difflib
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from compress.distillation.terms import AnyTerm, Modules

Pairs = tuple[tuple[str, str], ...]
"""Names of student and teacher modules that are compared; "" for the models' outputs."""


def pairs_of(terms: Sequence[AnyTerm], student: nn.Module, teacher: nn.Module) -> tuple[Pairs, ...]:
    """Match the student's and the teacher's modules for each term of the loss."""
    pairs: list[Pairs] = []
    for i, term in enumerate(terms):
        if term.modules is None:
            pairs.append((("", ""),))
            continue
        own = _matching_modules(term.modules[0], student, f"losses[{i}]: the student")
        taught = _matching_modules(term.modules[1], teacher, f"losses[{i}]: the teacher")
        if len(taught) < len(own):
            raise StageFailed(
                f"losses[{i}]: {len(own)} modules of the student and {len(taught)} of the teacher; "
                "name as many, or more of the teacher"
            )
        # TinyBERT's uniform map: the m-th of M goes with the (m N / M)-th of N.
        places = [(m + 1) * len(taught) // len(own) - 1 for m in range(len(own))]
        pairs.append(tuple((name, taught[p]) for name, p in zip(own, places, strict=True)))
    return tuple(pairs)


def _matching_modules(wanted: Modules, module: nn.Module, where: str) -> list[str]:
    """Return the modules that names or patterns match, in the model's order."""
    known = [name for name, _ in module.named_modules() if name]
    names: list[str] = []
    for name in (wanted,) if isinstance(wanted, str) else wanted:
        pattern = re.compile(re.escape(name).replace(r"\*", r"[^.]+"))
        matches = [other for other in known if pattern.fullmatch(other)]
        if not matches:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"it has {', '.join(known[:8])}{' …' if len(known) > 8 else ''}"
            if near:
                hint = f"did you mean {' or '.join(map(repr, near))}?"
            raise StageFailed(f"{where} has no module {name!r}; {hint}")
        names += matches
    return names


class FeatureRecorder:
    """Forward hooks that keep the outputs of named modules in the last forward pass."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self.names = tuple(dict.fromkeys(names))
        self.features: dict[str, torch.Tensor] = {}
        for name in self.names:
            module.get_submodule(name).register_forward_hook(partial(self._record, name))

    def take(self) -> list[torch.Tensor]:
        """Return and clear the recorded features, in the order of the names."""
        # Cleared, or activations and the graph behind them would live until the next call.
        features, self.features = self.features, {}
        unused = next((name for name in self.names if name not in features), None)
        if unused is not None:
            raise StageFailed(f"module {unused!r} takes no part in the model's forward pass")
        return [features[name] for name in self.names]

    def with_output(self, output: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return and clear the features by name, with the model's output under ""."""
        return dict(zip(self.names, self.take(), strict=True)) | {"": output}

    def _record(self, name: str, module: nn.Module, inputs: object, output: Any) -> None:
        self.features[name] = flatten_outputs(output)[0]


def channel_axis(features: torch.Tensor) -> int:
    """Return the channel axis: the second of images (N, C, H, W) and volumes, else the last."""
    return 1 if features.dim() in (4, 5) else -1
