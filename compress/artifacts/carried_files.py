"""Files of a model's source that it carries through every stage, beside its payload.

Those of a Hugging Face folder keep their names, so that transformers' `AutoTokenizer` and
`AutoConfig` open an artifact's folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

CONFIG, TOKENIZER, IMAGES = "config.json", "tokenizer.json", "preprocessor_config.json"
TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
TOKENIZER_SETTINGS = (TOKENIZER_CONFIG, "special_tokens_map.json", CHAT_TEMPLATE)
ONNX_FILE = "onnx_file.json"
"""What an ONNX file says beside its graph: `metadata`, `doc_string`, `name` of the graph, `axes`
(name in the signature → in the file), `weights` (in the state dict → in the file), and `sha256`."""
FROZEN_NAME = "{}_frozen"
"""Name, in a quantized graph, of what was computed of a weight, whose dots are underscores."""
TIED = "tie_word_embeddings"
"""Entry of a config: whether a language model's head is its table of embeddings."""
CARRIED_NAMES = (CONFIG, TOKENIZER, *TOKENIZER_SETTINGS, IMAGES, ONNX_FILE)


def chat_template_of(files: Mapping[str, bytes]) -> str | None:
    """Return a tokenizer's chat template, the default one of several, or None without any."""
    if CHAT_TEMPLATE in files:
        return files[CHAT_TEMPLATE].decode()
    source = json.loads(files.get(TOKENIZER_CONFIG, b"{}")).get("chat_template")
    if isinstance(source, list):
        source = {each["name"]: each["template"] for each in source}.get("default")
    return None if source is None else str(source)


def names_in(config: Any) -> tuple[str, ...]:
    """Return the class names in a config's `id2label`; LABEL_0 and so on are no names."""
    labels = config.get("id2label") if isinstance(config, dict) else None
    numbers = [str(i) for i in range(len(labels or ()))]
    if not isinstance(labels, dict) or len(labels) < 2 or set(labels) != set(numbers):
        return ()
    names = tuple(str(labels[number]) for number in numbers)
    return () if names == tuple(f"LABEL_{number}" for number in numbers) else names
