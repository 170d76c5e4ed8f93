"""onnxruntime-genai: opens a folder, generates and measures."""

from __future__ import annotations

import json
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from compress.common.errors import ArtifactInvalid, StageFailed, first_line
from compress.common.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

GENAI = Requirement(what="onnxruntime_genai", install="pip install -e '.[genai]'")
REPEATS = 5
"""Texts that a speed is the median of."""


class GenerationSpeed(NamedTuple):
    """How fast a folder generates."""

    first_token_ms: float
    """Time from the prompt to the first token, median."""
    tokens_per_second: float
    """Tokens after the first, in a second, by the median time of one."""


def open_folder(folder: Path, threads: int = 1) -> Any:
    """Return onnxruntime-genai's model of a folder; raise ArtifactInvalid if it cannot open it."""
    import onnxruntime_genai

    options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    try:
        config = onnxruntime_genai.Config(str(folder))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        return onnxruntime_genai.Model(config)
    except Exception as error:
        raise ArtifactInvalid(
            f"{folder}: onnxruntime-genai cannot open it: {first_line(error)}"
        ) from error


def next_tokens(model: Any, prompt: Sequence[int], count: int) -> Iterator[int]:
    """Yield up to so many of the likeliest next tokens, until one that ends the text."""
    import numpy as np
    import onnxruntime_genai

    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(prompt) + count, do_sample=False)
    generator = onnxruntime_genai.Generator(model, parameters)
    generator.append_tokens(np.array(prompt, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
        yield int(generator.get_next_tokens()[0])


def measure_speed(
    folder: Path, vocabulary: int, prompt_tokens: int, tokens: int, threads: int
) -> GenerationSpeed:
    """Return how fast a folder continues a prompt of drawn tokens.

    Raises:
        StageFailed: every text ended before its second token.
    """
    import numpy as np

    model = open_folder(folder, threads)
    firsts, steps = [], []
    for seed in range(REPEATS + 1):
        prompt = np.random.default_rng(seed).integers(0, vocabulary, prompt_tokens).tolist()
        times = [perf_counter()]
        times += [perf_counter() for _ in next_tokens(model, prompt, tokens)]
        if seed:  # the first text warms up
            firsts.append(times[1] - times[0])
            steps += [b - a for a, b in pairwise(times[1:])]
    if not steps:
        raise StageFailed("every generated text ended before its second token")
    return GenerationSpeed(1000 * median(firsts), 1 / median(steps))
