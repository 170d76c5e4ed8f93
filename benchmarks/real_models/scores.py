"""The metric of models without classes."""

import torch
from torch.nn.functional import cosine_similarity


def cosine(outputs: torch.Tensor | dict[str, torch.Tensor], targets: torch.Tensor) -> float:
    """Return the mean cosine of each row's first output to what the float model answered."""
    if not isinstance(outputs, torch.Tensor):
        outputs = next(iter(outputs.values() if isinstance(outputs, dict) else outputs))
    return float(cosine_similarity(outputs.flatten(1), targets.flatten(1)).mean())
