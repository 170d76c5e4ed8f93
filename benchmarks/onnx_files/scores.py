"""What the fetched files are for, as figures from 0 to 1: the metrics of their pipelines."""

from itertools import groupby

import torch

Outputs = torch.Tensor | dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
TEXT = 0.3  # probability from which a pixel is text, in the package's own configuration
SPEECH = 0.5


def _first(outputs: Outputs) -> torch.Tensor:
    if isinstance(outputs, torch.Tensor):
        return outputs
    return next(iter(outputs.values() if isinstance(outputs, dict) else outputs))


def labels(outputs: Outputs, targets: torch.Tensor) -> float:
    """Return the share of rows with their label."""
    return float((_first(outputs).argmax(1) == targets).double().mean())


def characters(outputs: Outputs, targets: torch.Tensor) -> float:
    """Return 1 - the character error rate of lines, read by the best class of each column."""
    errors = total = 0
    for row, target in zip(_first(outputs).argmax(2).tolist(), targets.tolist(), strict=True):
        read = [number for number, _ in groupby(row) if number]
        expected = [number for number in target if number]
        errors += _distance(read, expected)
        total += len(expected)
    return 1 - errors / total


def _distance(first: list[int], second: list[int]) -> int:
    """Return the edit distance of two sequences."""
    above = list(range(len(second) + 1))
    for row, one in enumerate(first, 1):
        here = [row]
        for column, other in enumerate(second, 1):
            changed = above[column - 1] + (one != other)
            here.append(min(changed, above[column] + 1, here[-1] + 1))
        above = here
    return above[-1]


def text_pixels(outputs: Outputs, targets: torch.Tensor) -> float:
    """Return the F1 score of the pixels of text, compared with the float file's."""
    found, expected = _first(outputs) > TEXT, targets > TEXT
    both = (found & expected).sum().double()
    return float(2 * both / (found.sum() + expected.sum()).clamp(min=1))


def frames(outputs: Outputs, targets: torch.Tensor) -> float:
    """Return the share of chunks that are speech, or are not, as to the float file."""
    return float(((_first(outputs) > SPEECH) == (targets > SPEECH)).double().mean())
