"""The settings file of a folder for onnxruntime-genai."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from export.genai.decoder import INPUT_IDS, LOGITS, MASK, PARTS, PAST, PRESENT

if TYPE_CHECKING:
    from export.genai.decoder import CacheShape


def genai_config(module: Any, shape: CacheShape, context: int, file: str) -> dict[str, Any]:
    """Return the content of `genai_config.json` for a decoder of transformers.

    Args:
        module: the model, whose config names the special tokens.
        shape: sizes of its cache.
        context: tokens of a prompt and its continuation together, at most.
        file: name of the ONNX file.
    """
    past, present = (
        {f"{p}_names": n for p, n in zip(PARTS, names, strict=True)}
        for names in (
            [PAST.format("%d", part) for part in PARTS],
            [PRESENT.format("%d", part) for part in PARTS],
        )
    )
    end = _token(module, "eos_token_id", 0)
    one_end = end[0] if isinstance(end, list) else end
    return {
        "model": {
            # The name of any decoder, whatever its architecture.
            "type": "decoder",
            "bos_token_id": _token(module, "bos_token_id", one_end),
            "eos_token_id": end,
            "pad_token_id": _token(module, "pad_token_id", one_end),
            "context_length": context,
            "vocab_size": module.config.vocab_size,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": file,
                "head_size": shape.head_size,
                "hidden_size": shape.heads * shape.head_size,
                "num_attention_heads": shape.heads,
                "num_key_value_heads": shape.cached_heads,
                "num_hidden_layers": shape.layers,
                "inputs": {
                    "input_ids": INPUT_IDS,
                    "attention_mask": MASK,
                    **{f"past_{name}": value for name, value in past.items()},
                },
                "outputs": {
                    "logits": LOGITS,
                    **{f"present_{name}": value for name, value in present.items()},
                },
            },
        },
        "search": {
            "do_sample": False,
            "max_length": context,
            "past_present_share_buffer": True,
        },
    }


def _token(module: Any, name: str, default: int) -> Any:
    """Return a special token's id, or several, as the model generates with it."""
    for settings in (getattr(module, "generation_config", None), module.config):
        found = getattr(settings, name, None)
        if found is not None:
            return found
    return default
