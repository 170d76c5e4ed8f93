"""Gates of language models without labels: how alike two models continue the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from compress.common.config import Count, Positive
from compress.common.errors import StageFailed
from compress.core.gates.gate import Gate
from compress.core.gates.outputs import paired_outputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.core.objectives.task import Task


class _NextTokenGate(Gate):
    """A gate on the scores of next tokens."""

    judges_quality: ClassVar[bool] = True
    depends_on_batch: ClassVar[bool] = True

    def unsuitable_task(self, task: Task) -> str:
        """Return why a model for the task has no next tokens."""
        if task.next_token:
            return ""
        return (
            f"compares next tokens of task: causal-lm, and a model for {task.name} gives "
            f"{task.answer}; use {task.gates[0]['gate']}"
        )


class MaxDivergence(_NextTokenGate):
    """The probabilities of the next token stay near those of the model compared with.

    Measured is the KL divergence, averaged over all positions of `val`. It needs no labels, and
    sees what perplexity averages out: tokens that became more and less likely.
    """

    gate: Literal["max_divergence"] = "max_divergence"
    nats: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Largest mean KL divergence, in nats a token."""

    limit_field: ClassVar[str] = "nats"
    rule_template: ClassVar[str] = "KL divergence of next tokens <= {nats:g} nats"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the mean KL divergence from the model before to the one after."""
        import torch
        from torch.nn.functional import kl_div, log_softmax

        total, positions = 0.0, 0
        for expected, got in paired_outputs(before, after, context):
            a, b = expected[0], got[0]
            if a.shape != b.shape or a.dim() != 3:
                raise StageFailed(
                    f"takes scores (batch, length, tokens) of both models, found {tuple(a.shape)} "
                    f"and {tuple(b.shape)}"
                )
            # In parts: float64 scores of a whole batch would take much memory.
            for one, other in zip(
                *(torch.split(x.flatten(0, 1), 256) for x in (a, b)), strict=True
            ):
                p, q = (log_softmax(x.double(), -1) for x in (one, other))
                total += float(kl_div(q, p, reduction="sum", log_target=True))
            positions += a.shape[0] * a.shape[1]
        if not positions:
            raise StageFailed("the outputs have no positions, so that there is nothing to compare")
        # NaN and infinities anywhere end in the sum, so one look is enough.
        if not torch.tensor(total).isfinite():
            raise StageFailed("the scores are not all finite")
        return total / positions


class MinEqualTokens(_NextTokenGate):
    """Both models continue the beginnings of samples alike: tokens until the first that differs.

    Each token is the likeliest one, and the mean over the samples is judged.
    """

    gate: Literal["min_equal_tokens"] = "min_equal_tokens"
    at: Positive
    """Least mean number of tokens until the first that differs."""
    tokens: Count = 64
    """Tokens that are generated after each beginning; as many count where none differs."""
    prompts: Count = 8
    """Samples of `val` whose beginnings are continued."""
    prompt_tokens: Count = 16
    """Tokens of each beginning."""

    limit_field: ClassVar[str] = "at"
    rule_template: ClassVar[str] = "equal tokens of {tokens} >= {at:g}"
    report_template: ClassVar[str] = "the first differing token comes after at least {limit:g}"
    higher_passes: ClassVar[bool] = True
    needs_data: ClassVar[bool] = True

    @model_validator(mode="after")
    def _limit_is_reachable(self) -> MinEqualTokens:
        if self.at > self.tokens:
            raise ValueError(f"at: {self.at:g} is more than the {self.tokens} tokens generated")
        return self

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the mean number of equal tokens."""
        import torch

        equal: list[int] = []
        # Not kept: each token adds the scores of a whole text, which nothing else asks for.
        opened = (context.predictor(model, kept=False) for model in (before, after))
        with next(opened) as expected, next(opened) as got:
            for prompt in self._prompts(before.signature, context):
                texts = [
                    continue_greedily(predict, before.signature, prompt, self.tokens)
                    for predict in (expected, got)
                ]
                differs = (texts[0] != texts[1]).flatten().nonzero()
                equal.append(int(differs[0]) if len(differs) else texts[0].numel())
        return float(torch.tensor(equal, dtype=torch.float64).mean())

    def _prompts(self, signature: Signature, context: Context) -> Iterator[torch.Tensor]:
        """Yield the beginnings of samples of `val`, as token ids `(1, prompt_tokens)`."""
        left = self.prompts
        for inputs in context.comparison_inputs(signature, 1):
            tokens = inputs[token_input(signature)][:, : self.prompt_tokens]
            if tokens.shape[1] and left:
                left -= 1
                yield tokens
        if left == self.prompts:
            raise StageFailed("the samples of `val` have no tokens to continue")


def token_input(signature: Signature) -> int:
    """Return which input has the token ids; raise StageFailed where others are no masks."""
    others = [i for i, spec in enumerate(signature.inputs) if spec.unmasked_value is None]
    if len(others) != 1 or "int" not in signature.inputs[others[0]].dtype:
        names = ", ".join(signature.inputs[i].name for i in others)
        raise StageFailed(f"continues models that take token ids and at most a mask, found {names}")
    return others[0]


def unmasked_inputs(signature: Signature, ids_BT: torch.Tensor) -> list[torch.Tensor]:
    """Return a model's inputs for token ids, with masks that let all of them through."""
    import torch

    everywhere = torch.ones_like(ids_BT, dtype=torch.bool)
    return [
        ids_BT
        if spec.unmasked_value is None
        else spec.as_mask(everywhere).to(getattr(torch, spec.dtype))
        for spec in signature.inputs
    ]


def continue_greedily(
    predict: Predictor, signature: Signature, prompt_BT: torch.Tensor, count: int
) -> torch.Tensor:
    """Return the likeliest next tokens after a prompt, one by one: `(batch, count)`.

    They are fewer where the signature allows no longer inputs.
    """
    import torch

    place, text_BT = token_input(signature), prompt_BT
    longest = signature.bounds(str(signature.inputs[place].shape[1])).max
    left = count if longest is None else min(count, longest - prompt_BT.shape[1])
    for _ in range(left):
        scores_BV = predict(*unmasked_inputs(signature, text_BT))[0].cpu()[:, -1]
        text_BT = torch.cat([text_BT, scores_BV.argmax(-1, keepdim=True).to(text_BT)], 1)
    return text_BT[:, prompt_BT.shape[1] :]
