"""Export a model of the catalog by `torch.onnx.export` alone: what peers start from.

python benchmarks/real_models/plain_export.py MODEL PACKAGES FILE
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from real_models import catalog


def main() -> None:
    name, packages, file = sys.argv[1:]
    model = catalog.MODELS[name]
    names = [spec["name"] for spec in model.input_specs()]
    batch = torch.export.Dim("batch", min=1, max=1024)
    example = tuple(
        torch.zeros(2, *spec["shape"][1:], dtype=getattr(torch, spec.get("dtype", "float32")))
        for spec in model.input_specs()
    )
    torch.onnx.export(
        catalog.load(model, Path(packages)),
        tuple(x + 1 for x in example),
        file,
        dynamo=True,
        input_names=names,
        dynamic_shapes=tuple({0: batch} for _ in names),
        external_data=False,
        verbose=False,
    )


if __name__ == "__main__":
    main()
