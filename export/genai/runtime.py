"""onnxruntime-genai: opens a folder, generates and measures."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from compress.common.config import Count, Settings
from compress.common.errors import ArtifactInvalid, StageFailed, raised_as
from compress.common.foreign.native_runtimes import onnx_runtime_genai
from compress.common.lazy_modules import np
from compress.common.requirements import Requirement, pip_install
from compress.common.sealed_json import parse_settings
from compress.profiling.benchmark import CallTimer, NotMeasurable, unmeasurable

logger = logging.getLogger(__name__)
GREEDY_TEXT_FILE = "greedy_text.json"
INPUT_IDS, MASK = "input_ids", "attention_mask"


class CacheShape(NamedTuple):
    """Sizes of the cache, and of the attention that reads it."""

    layers: int
    heads: int
    cached_heads: int
    head_size: int
    rotary_layers: int
    """Layers whose rotary embedding is part of `GroupQueryAttention`."""


class GreedyText(NamedTuple):
    """Token ids of a prompt and of its continuation, which was compared with the source's."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    limit: float
    """Difference of two scores, by their spread, below which both tokens are right."""

    def write(self, folder: Path) -> None:
        """Write the file in a folder."""
        content = json.dumps(self._asdict())
        (folder / GREEDY_TEXT_FILE).write_text(content + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> GreedyText:
        """Return the text of a folder, which was verified; raise ArtifactInvalid without one."""
        try:
            found = json.loads((folder / GREEDY_TEXT_FILE).read_text(encoding="utf-8"))
            return cls(tuple(found["prompt"]), tuple(found["tokens"]), found["limit"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactInvalid(
                f"{folder}: has no {GREEDY_TEXT_FILE} to compare answers with "
                f"({type(error).__name__}); run export_genai again"
            ) from error

    def check(self, model: Any) -> None:
        """Generate the text up to the first near-tie; StageFailed where it becomes another."""
        if not self.tokens:  # the context has no room for any
            return
        found = [*next_tokens_unlocked(model, self.prompt, len(self.tokens), Sampling())]
        for place, (expected, chosen) in enumerate(zip(self.tokens, found, strict=False)):
            if expected != chosen:
                scores = next_scores(model, [*self.prompt, *self.tokens[:place]])
                near_tie(scores, place, expected, chosen, self.limit, "onnxruntime-genai")
                return


def near_tie(
    scores: Any, place: int, expected: int, chosen: int, limit: float, generator: str
) -> float:
    """Return how far the scores of two tokens are apart; StageFailed where they are no tie."""
    gap = float(abs(scores[expected] - scores[chosen]))
    spread = float(scores.max() - scores.min())
    if not gap <= limit * spread:  # also where a score is NaN
        raise StageFailed(
            f"{generator} generates {chosen} as token {place + 1} of the text that proves the "
            f"export, expected {expected}: their scores differ by {gap:.2g} of {spread:.3g}"
        )
    logger.info(
        "texts are equal for %d tokens; then %d and %d are near a tie: %.2g apart of %.3g",
        *(place, expected, chosen, gap, spread),
    )
    return gap


CONFIG = "genai_config.json"


class SessionOptions(Settings):
    """Options of onnxruntime's session."""

    log_id: Literal["onnxruntime-genai"] = "onnxruntime-genai"
    provider_options: tuple[()] = ()


class DecoderInputs(Settings):
    """Names of the inputs, those of the cache by layer."""

    input_ids: Literal["input_ids"] = "input_ids"
    attention_mask: Literal["attention_mask"] = "attention_mask"
    past_key_names: Literal["past_key_values.%d.key"] = "past_key_values.%d.key"
    past_value_names: Literal["past_key_values.%d.value"] = "past_key_values.%d.value"


class DecoderOutputs(Settings):
    """Names of the outputs, those of the cache by layer."""

    logits: Literal["logits"] = "logits"
    present_key_names: Literal["present.%d.key"] = "present.%d.key"
    present_value_names: Literal["present.%d.value"] = "present.%d.value"


class Decoder(Settings):
    """The ONNX file and the sizes of its cache."""

    session_options: SessionOptions = SessionOptions()
    filename: Literal["model.onnx"] = "model.onnx"
    head_size: Count
    hidden_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    num_hidden_layers: Count
    inputs: DecoderInputs = DecoderInputs()
    outputs: DecoderOutputs = DecoderOutputs()


class Model(Settings):
    """The decoder and its special tokens."""

    type: Literal["decoder"] = "decoder"
    """The name of any decoder, whatever its architecture."""
    bos_token_id: int
    eos_token_id: int | tuple[int, ...]
    pad_token_id: int
    context_length: Count
    """Tokens of a prompt and its continuation together, at most."""
    vocab_size: Count
    decoder: Decoder


class Search(Settings):
    """How tokens are chosen where no request says it."""

    do_sample: Literal[False] = False
    max_length: Count
    past_present_share_buffer: Literal[True] = True


class GenaiConfig(Settings):
    """Content of `genai_config.json`."""

    model: Model
    search: Search

    @classmethod
    def of_decoder(cls, module: Any, shape: CacheShape, context: int) -> GenaiConfig:
        """Return the settings of a decoder of transformers, for `context` tokens at most."""
        end = _token(module, "eos_token_id", 0)
        one_end = end[0] if isinstance(end, list) else end
        model = Model(
            bos_token_id=_token(module, "bos_token_id", one_end),
            eos_token_id=end,
            pad_token_id=_token(module, "pad_token_id", one_end),
            context_length=context,
            vocab_size=module.config.vocab_size,
            decoder=Decoder(
                head_size=shape.head_size,
                hidden_size=shape.heads * shape.head_size,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.cached_heads,
                num_hidden_layers=shape.layers,
            ),
        )
        return cls(model=model, search=Search(max_length=context))

    @classmethod
    def read(cls, folder: Path) -> GenaiConfig:
        """Return a folder's settings; ArtifactInvalid names an entry that is not of the schema."""
        return parse_settings(cls, (folder / CONFIG).read_bytes(), folder / CONFIG)

    def write(self, folder: Path) -> None:
        """Write the settings in a folder."""
        (folder / CONFIG).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _token(module: Any, name: str, default: int) -> Any:
    settings = (getattr(module, "generation_config", None), module.config)
    found = (getattr(one, name, None) for one in settings)
    return next((token for token in found if token is not None), default)


GENAI = Requirement(what="onnxruntime_genai", install=pip_install("genai"))
REPEATS = 5  # texts that a speed is the median of
PREFILL_TOKENS = 64
"""Tokens of a prompt that a server's `Generator` reads at once, as it holds Python's lock."""


class Sampling(NamedTuple):
    """How the next token is chosen."""

    temperature: float = 0.0
    """0 chooses the likeliest token."""
    top_p: float = 1.0
    """Chooses among the likeliest tokens that together have this probability."""
    seed: int | None = None
    """The same seed chooses the same tokens; None chooses others each time."""


class GenerationSpeed(NamedTuple):
    """How fast a folder generates."""

    first_token_ms: float
    """Time from the prompt to the first token, median."""
    tokens_per_second: float
    """Tokens after the first, in a second, by the median time of one."""


def open_folder(folder: Path, threads: int = 1) -> Any:
    """Return onnxruntime-genai's model of a folder; ArtifactInvalid where it is none."""
    GenaiConfig.read(folder)
    onnxruntime_genai = onnx_runtime_genai()
    options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    with raised_as(ArtifactInvalid, f"{folder}: onnxruntime-genai cannot open it"):
        config = onnxruntime_genai.Config(str(folder))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        return onnxruntime_genai.Model(config)


def next_tokens(
    model: Any, prompt: Sequence[int], count: int, sampling: Sampling | None = None
) -> Generator[int, None, None]:
    """Yield up to so many next tokens, by default the likeliest, until one that ends the text."""
    onnxruntime_genai = onnx_runtime_genai()
    temperature, top_p, seed = sampling or Sampling()
    options: dict[str, Any] = {"max_length": len(prompt) + count, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": float(temperature), "top_p": float(top_p), "top_k": 0}
    if seed is not None:
        options["random_seed"] = seed % 2**31  # genai's is an int of C
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(**options)
    generator = onnxruntime_genai.Generator(model, parameters)
    size = len(prompt) if sampling is None else PREFILL_TOKENS
    for start in range(0, len(prompt), size):
        generator.append_tokens(np.array(prompt[start : start + size], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
        yield int(generator.get_next_tokens()[0])


def next_tokens_unlocked(
    model: Any, prompt: Sequence[int], count: int, sampling: Sampling
) -> Generator[int, None, None]:
    """Yield as :func:`next_tokens`, without holding Python's lock while the model computes.

    genai 0.18 releases it in `Engine.run` alone. An engine of one request chooses the same tokens;
    it takes no seed.
    """
    genai = onnx_runtime_genai()
    engine = genai.Engine(model)
    events = engine.create_event_buffer(1)
    request = engine.create_request()
    options = genai.TurnOptions(request)
    options.set_max_generated_tokens(count)
    options.set_do_sample(sampling.temperature > 0)
    if sampling.temperature > 0:
        options.set_temperature(sampling.temperature)
        options.set_top_p(sampling.top_p)
        options.set_top_k(0)
    turn = request.begin_turn(np.array(prompt, np.int32), options)
    try:
        while engine.has_pending_requests():
            for event in engine.run(events):
                if event.finish_reason == genai.FinishReason.FAILED:
                    raise RuntimeError(f"onnxruntime-genai failed: {event.error_code.name}")
                if event.token is not None:
                    yield int(event.token)
    finally:
        request.cancel_turn(turn)
        request.close()


def next_scores(model: Any, tokens: Sequence[int]) -> Any:
    """Return the scores of each token after some, `(vocabulary,)`."""
    onnxruntime_genai = onnx_runtime_genai()
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(tokens) + 1, do_sample=False)
    generator = onnxruntime_genai.Generator(model, parameters)
    generator.append_tokens(np.array(tokens, np.int32))
    return generator.get_logits().reshape(-1)


def measure_speed(
    folder: Path, vocabulary: int, prompt_tokens: int, tokens: int, threads: int
) -> GenerationSpeed:
    """Return how fast a folder continues drawn tokens; StageFailed where it cannot be told."""
    model, timer = open_folder(folder, threads), CallTimer(threads)
    firsts, steps = list[float](), list[float]()
    for seed in range(REPEATS + 1):
        prompt = np.random.default_rng(seed).integers(0, vocabulary, prompt_tokens).tolist()
        step = partial(next, next_tokens(model, prompt, tokens))
        times = list[float]()
        with suppress(StopIteration):  # a text may end earlier
            for _ in range(tokens):
                times.append(timer.call(step)[1])
        if seed:  # the first text warms up
            firsts += times[:1]
            steps += times[1:]
    if not steps:
        raise StageFailed("every generated text ended before its second token")
    if timer.doubt:
        raise NotMeasurable(unmeasurable("the speed", timer.doubt))
    return GenerationSpeed(1000 * median(firsts), 1 / median(steps))
