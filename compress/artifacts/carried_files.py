"""Files of a Hugging Face folder that its model carries through every stage, beside its payload.

They keep their names, so that transformers' `AutoTokenizer` and `AutoConfig` open an artifact's
folder.
"""

from __future__ import annotations

from typing import Any

CONFIG, TOKENIZER, IMAGES = "config.json", "tokenizer.json", "preprocessor_config.json"
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
TIED = "tie_word_embeddings"
"""Entry of a config: whether a language model's head is its table of embeddings."""
CARRIED_NAMES = (CONFIG, TOKENIZER, *TOKENIZER_SETTINGS, IMAGES)


def names_in(config: Any) -> tuple[str, ...]:
    """Return the names of classes in a config's `id2label`; empty where it names none.

    LABEL_0 and so on, which transformers gives to classes without names, are no names.
    """
    labels = config.get("id2label") if isinstance(config, dict) else None
    numbers = [str(i) for i in range(len(labels or ()))]
    if not isinstance(labels, dict) or len(labels) < 2 or set(labels) != set(numbers):
        return ()
    names = tuple(str(labels[number]) for number in numbers)
    return () if names == tuple(f"LABEL_{number}" for number in numbers) else names
