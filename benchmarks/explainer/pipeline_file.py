"""The pipeline file of a faulty network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from safetensors.torch import save_file

if TYPE_CHECKING:
    from torch import nn

CODE = Path(__file__).parents[1]


def write_pipeline(
    folder: Path, family: str, module: nn.Module, data: dict[str, Any], stages: list[dict[str, Any]]
) -> Path:
    """Write a pipeline whose model is a network of a family, and the network's weights."""
    weights = {name: value.contiguous() for name, value in module.state_dict().items()}
    save_file(weights, folder / "net.safetensors")
    content = {
        "version": 1,
        "name": "net",
        "code": str(CODE),
        "model": {
            "factory": "explainer.families:net",
            "arguments": {"family": family},
            "checkpoint": "net.safetensors",
            "inputs": [{"name": "image", "shape": ["batch", 1, 8, 8]}],
        },
        "data": data,
        "metric": "accuracy",
        "stages": stages,
    }
    (folder / "net.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return folder / "net.yaml"
