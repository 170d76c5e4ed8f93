"""Runs a decoder with its cache in onnxruntime alone, and compares it with its source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compress.common.errors import StageFailed
from compress.common.tensor_difference import relative_error
from compress.core.gates.quality import token_input, unmasked_inputs
from compress.export.genai.runtime import INPUT_IDS, MASK, GreedyText, near_tie
from compress.export.onnx.session import exact_session
from compress.export.parity.sample_parity import tolerance_for

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.core.context import Context

    Cache = list[np.ndarray[Any, Any]]


class CachedSession:
    """A session of onnxruntime, whose calls get and return the cache."""

    def __init__(self, file: Path, threads: int) -> None:
        self.session = exact_session(file, threads)
        self.cache_inputs = [
            i for i in self.session.get_inputs() if i.name not in (INPUT_IDS, MASK)
        ]

    def __call__(self, ids_BT: torch.Tensor, cache: Cache | None = None) -> tuple[Any, Cache]:
        """Return scores `(batch, length, vocabulary)` after a cache, and the next cache."""
        if cache is None:  # before the first token
            shapes = ((len(ids_BT), i.shape[1], 0, i.shape[3]) for i in self.cache_inputs)
            cache = [np.zeros(shape, np.float32) for shape in shapes]
        total = cache[0].shape[2] + ids_BT.shape[1]
        feed = {
            INPUT_IDS: ids_BT.numpy(),
            MASK: np.ones((len(ids_BT), total), np.int64),
            **{i.name: x for i, x in zip(self.cache_inputs, cache, strict=True)},
        }
        scores, *grown = self.session.run(None, feed)
        return torch.from_numpy(scores), grown

    def continue_greedily(self, prompt_BT: torch.Tensor, count: int) -> tuple[Any, Any]:
        """Return the likeliest next tokens `(batch, count)`, and the scores that chose them."""
        scores, cache = self(prompt_BT)
        tokens, chosen_by = [], []
        for place in range(count):
            chosen_by.append(scores[:, -1])
            tokens.append(scores[:, -1].argmax(-1, keepdim=True))
            if place < count - 1:
                scores, cache = self(tokens[-1], cache)
        return torch.cat(tokens, 1), torch.stack(chosen_by, 1)


def prefill_predictor(file: Path, threads: int, signature: Signature) -> Predictor:
    """Return a predictor of the scores of whole inputs, as the model without a cache gives them.

    It refuses masks that leave out anything but the end, whose scores mean nothing.
    """
    session, place = CachedSession(file, threads), token_input(signature)

    def predict(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for spec, x in zip(signature.inputs, inputs, strict=True):
            is_mask = spec.unmasked_value is not None
            if is_mask and bool((x.eq(spec.unmasked_value or 0).int().diff(dim=1) > 0).any()):
                raise ValueError("the mask leaves out tokens at the beginning; pad at the end")
        return (session(inputs[place].cpu())[0],)

    return predict


SHAPES = ((1, 1), (2, 7), (1, 33))  # batches and lengths of drawn tokens
SAMPLES = 4  # samples of `val`
STEPS = 16  # tokens that are read one by one, and in two parts
PROMPT, GREEDY = 16, 256  # tokens of a beginning, and tokens generated after it


class CacheProof:
    """What an exported decoder has to answer as its source does."""

    def __init__(
        self,
        source: Artifact,
        session: CachedSession,
        context: Context,
        vocabulary: int,
        longest: int,
    ) -> None:
        self.source, self.session, self.context = source, session, context
        self.signature, self.vocabulary = source.signature, vocabulary
        self.place = token_input(source.signature)
        self.limit = tolerance_for(source).relative
        axis = str(source.signature.inputs[self.place].shape[1])
        self.longest = min(source.signature.bounds(axis).max or PROMPT + GREEDY, longest)

    def check(self) -> tuple[dict[str, Any], GreedyText]:
        """Return what was compared and how far it differs, for the manifest, and the greedy text.

        Raise StageFailed where the source answers otherwise, or the cache changes the answers.
        """
        with self.source.open(threads=self.context.threads) as expected:
            scores_error = self._check_scores(expected)
            facts = {"scores_error": scores_error, "steps_error": self._check_steps()}
            compared, greedy_text = self._check_greedy_text(expected)
            return facts | compared, greedy_text

    def check_scores(self) -> float:
        """Return how far scores of whole texts differ; StageFailed where it is over rounding."""
        with self.source.open(threads=self.context.threads) as expected:
            return self._check_scores(expected)

    def _check_scores(self, expected: Predictor) -> float:
        generator = torch.Generator().manual_seed(0)
        shapes = ((batch, min(length, self.longest)) for batch, length in SHAPES)
        texts = [torch.randint(0, self.vocabulary, s, generator=generator) for s in shapes]
        errors = [
            (self._error(self._scores(expected, ids), self.session(ids)[0]), ids)
            for ids in (*texts, *self._samples(SAMPLES))
        ]
        worst, text = max(errors, key=lambda pair: pair[0])
        if not worst <= self.limit:
            raise StageFailed(
                f"for {text.shape[1]} tokens the exported decoder's scores differ from the "
                f"source's by {worst:.2g} of their norm, expected at most {self.limit:g}"
            )
        return worst

    def _samples(self, count: int) -> Iterator[torch.Tensor]:
        data = self.context.data
        if data is not None and "val" in data.datasets:
            for batch in data.batches("val", 1, limit=count):
                yield batch.inputs[self.place][:, : self.longest]

    def _scores(self, predict: Predictor, ids: torch.Tensor) -> torch.Tensor:
        return predict(*unmasked_inputs(self.signature, ids))[0]

    def _error(self, expected: torch.Tensor, found: torch.Tensor) -> float:
        if expected.shape != found.shape:
            raise StageFailed(
                f"the exported decoder's scores have shape {tuple(found.shape)} and the source's "
                f"{tuple(expected.shape)}"
            )
        return relative_error(expected, found)

    def _check_steps(self) -> float:
        """Compare one call with calls of one token, and with calls of a few."""
        generator = torch.Generator().manual_seed(1)
        length, worst = min(STEPS, self.longest), 0.0
        # onnxruntime 1.32 reads several tokens after a cache for one text alone.
        for batch, size in ((2, 1), (1, max(1, length // 3))):
            ids = torch.randint(0, self.vocabulary, (batch, length), generator=generator)
            at_once, _ = self.session(ids)
            scores, cache = [], None
            for part in torch.split(ids, size, 1):
                found, cache = self.session(part, cache)
                scores.append(found)
            error = relative_error(at_once, torch.cat(scores, 1))
            if not error <= self.limit:
                raise StageFailed(
                    f"{ids.shape[1]} tokens in {len(scores)} calls have other scores than in one: "
                    f"they differ by {error:.2g} of their norm, expected at most {self.limit:g}"
                )
            worst = max(worst, error)
        return worst

    def _check_greedy_text(self, expected: Predictor) -> tuple[dict[str, Any], GreedyText]:
        """Compare the greedy text with the source's, up to the first near-tie.

        One call of the source on the whole text gives its choice at every place.
        """
        prompt = next(self._samples(1), torch.zeros(1, 1, dtype=torch.int64))
        prompt = prompt[:, : max(1, min(PROMPT, self.longest // 2))]
        count = min(GREEDY, self.longest - prompt.shape[1])
        if count < 1:
            return {"greedy_tokens": 0, "equal_tokens": 0}, GreedyText((), (), self.limit)
        tokens, scores = self.session.continue_greedily(prompt, count)
        text = torch.cat([prompt, tokens[:, :-1]], 1)
        own = self._scores(expected, text)[:, prompt.shape[1] - 1 :]
        error = self._error(own, scores)
        if not error <= self.limit:
            raise StageFailed(
                f"with the cache, {count} generated tokens have other scores than the source's: "
                f"they differ by {error:.2g} of their norm, expected at most {self.limit:g}"
            )
        differs = (own.argmax(-1) != tokens)[0].nonzero().flatten().tolist()
        facts: dict[str, Any] = {"greedy_tokens": count, "equal_tokens": count}
        if differs:
            place = int(differs[0])
            best, chosen = int(own[0, place].argmax()), int(tokens[0, place])
            generator = "the exported decoder"
            gap = near_tie(own[0, place], place, best, chosen, self.limit, generator)
            facts |= {"equal_tokens": place, "near_tie": {"tokens": [best, chosen], "gap": gap}}
        greedy = GreedyText(tuple(prompt[0].tolist()), tuple(tokens[0].tolist()), self.limit)
        return {**facts, "greedy_error": error}, greedy
