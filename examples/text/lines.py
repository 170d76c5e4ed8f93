"""Texts of different lengths: lines of Python's own library, and whether they are prose or code.

Bytes are the tokens, so that nothing has to be downloaded. Where a real tokenizer is slow, the
cache that pipeline.yaml names calls it once for each text.
"""

import ast
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

MODULES = ("configparser", "difflib", "heapq", "optparse")
SHORTEST, LONGEST = 8, 120


class Lines(Dataset):
    """Tokens from 1, because 0 fills up; label 1 is prose."""

    def __init__(self, lines: list[tuple[str, int]]) -> None:
        self.lines = lines

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text, label = self.lines[index]
        ids = torch.tensor(list(text.encode()[:LONGEST])) + 1
        return {"ids": ids, "labels": torch.tensor(label)}


def labelled(source: str) -> list[tuple[str, int]]:
    """Return a module's lines; those of docstrings are prose."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        value = getattr(node, "value", None)
        if isinstance(node, ast.Expr) and isinstance(getattr(value, "value", None), str):
            prose |= set(range(node.lineno, node.end_lineno + 1))
    lines = ((line.strip(), number in prose) for number, line in enumerate(source.split("\n"), 1))
    return [(line, int(label)) for line, label in lines if len(line) >= SHORTEST]


def splits() -> dict[str, Dataset]:
    library = Path(sysconfig.get_path("stdlib"))
    texts = [(library / f"{module}.py").read_text(encoding="utf-8") for module in MODULES]
    # A line that occurs in both splits would be easy to classify: each is taken once.
    lines = list(dict(line for text in texts for line in labelled(text)).items())
    parts = {"val": range(0, len(lines), 5)}
    parts["train"] = [i for i in range(len(lines)) if i % 5]
    return {name: Lines([lines[i] for i in part]) for name, part in parts.items()}
