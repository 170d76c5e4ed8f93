"""Gates on quality: the metric, and how near outputs and texts are to those of another model."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from compress.common.config import Count, Fraction, Positive, Ratio, Unmet
from compress.common.errors import StageFailed
from compress.common.lazy_modules import F, torch
from compress.common.tensor_difference import largest, largest_difference, measured
from compress.core.bounds import samples_for
from compress.core.gates.gate import Gate, Measured, describe_value
from compress.core.metrics.builtin import (
    are_shares,
    labelled_outputs,
    less_half,
    predicted_decisions,
)
from compress.core.metrics.metric import Metric, metric_class

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor, Tensors
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.core.objectives.task import Task
    from compress.core.verdict import Verdict

NO_ELEMENTS = "the outputs have no elements, so that there is nothing to compare"


def paired_outputs(
    before: Artifact, after: Artifact, context: Context
) -> Iterator[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
    """Yield both models' outputs for the same batches, on the CPU; there are as many of both."""
    with context.predictor(before) as expected, context.predictor(after) as got:
        batch_size = context.judged_batch_size(before, after)
        for inputs in context.comparison_inputs(before.signature, batch_size):
            one, other = (tuple(x.cpu() for x in run(*inputs)) for run in (expected, got))
            if len(one) != len(other):
                raise StageFailed(f"{len(one)} outputs against {len(other)}")
            yield one, other


def paired_scores(
    before: Artifact, after: Artifact, context: Context
) -> Iterator[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
    """Yield outputs as :func:`paired_outputs` does; those that say yes or no are above 0 for a yes.

    Shares of 0 to 1, as after a sigmoid, are made so by taking one half from them: their signs
    would all be the same. Shares are outputs of which the first model has nothing beyond 0 and 1.
    """
    pairs = paired_outputs(before, after, context)
    pair = next(pairs, None)
    # Of the first pair mostly none; else all are read, of which answers are kept.
    shares = shares_of([pair], context) if pair else frozenset()
    shares = shares and shares_of(paired_outputs(before, after, context), context)
    while pair:
        one, other = (tuple(less_half(outputs, shares)) for outputs in pair)
        yield one, other
        pair = next(pairs, None)


def shares_of(pairs: Iterable[tuple[Tensors, Tensors]], context: Context) -> frozenset[int]:
    """Return which outputs say yes or no by shares, of :func:`paired_outputs`' first models."""
    shares: frozenset[int] | None = None
    for expected, _ in pairs:
        labelled = labelled_outputs(expected, context.task)
        own = frozenset(i for i in labelled if are_shares(expected[i], context.task))
        shares = own if shares is None else shares & own
    return shares or frozenset()


def refuse_other_shapes(a: torch.Tensor, b: torch.Tensor, what: str = "outputs") -> None:
    """Raise StageFailed where two tensors cannot be compared element by element."""
    if a.shape != b.shape:
        raise StageFailed(f"{what} have shapes {tuple(a.shape)} and {tuple(b.shape)}")


def sample_cosines(expected: Tensors, got: Tensors) -> dict[int, torch.Tensor]:
    """Return the cosine between both models' vectors of each sample, by output.

    Outputs of more than one float are read, or the first where there are none; empty ones are not.
    """
    floats = [i for i, x in enumerate(expected) if x.is_floating_point()]
    vectors = [i for i in floats if expected[i].numel() > expected[i].shape[:1].numel()]
    found = {}
    for i in vectors or [0]:
        a, b = expected[i].double(), got[i].double()
        refuse_other_shapes(a, b)
        if a.numel():
            a, b = a.flatten(1), b.flatten(1)
            # Nothing turns a vector of zeros that is equal; its cosine would be 0.
            found[i] = F.cosine_similarity(a, b).masked_fill((a == b).all(1), 1.0)
    return found


def too_few_samples(
    context: Context, limit: float, confidence: float, setting: str, *, of_half: bool = False
) -> Iterator[Unmet]:
    """Yield that `val`, or half of it, cannot show that a share is below a limit, even if it is 0.

    Of an odd number of samples, the larger half.
    """
    if context.data is not None and "val" in context.data.datasets:
        samples = len(context.data.split("val"))  # type: ignore[arg-type]  # Splits admits sized ones
        samples, which = ((samples + 1) // 2, "half of ") if of_half else (samples, "")
        needed = samples_for(0.0, limit, confidence)
        if needed is not None and samples < needed:
            problem = (
                f"{which}split 'val' has {samples} samples, and it takes {needed} to show the "
                f"limit with {100 * confidence:g} % confidence, even if none of them is answered "
                f"otherwise; bring more samples, or raise {setting}"
            )
            yield Unmet((setting,), problem)


class Parity(Gate):
    """No output differs by more than `atol` in any element, on `val` (or seeded inputs)."""

    gate: Literal["parity"] = "parity"
    atol: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Largest absolute difference allowed."""

    limit_field = "atol"
    rule_template = "max |difference| <= {atol:g}"
    report_template = "outputs differ by at most {limit:g}"
    reads_all_outputs = judges_quality = depends_on_batch = True

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the largest absolute difference."""
        differences, elements, finite = [], 0, 0
        for expected, got in paired_outputs(before, after, context):
            for a, b in zip(expected, got, strict=True):
                refuse_other_shapes(a, b)
                elements += a.numel()
                finite += int(a.isfinite().sum())
                differences.append(largest_difference(*measured(a, b)))
        if not finite:
            nothing = "all outputs of the model compared with are infinite or NaN"
            raise StageFailed(nothing if elements else NO_ELEMENTS)
        worst = largest(differences)
        if not math.isfinite(worst):
            raise StageFailed("an output is NaN or infinite in one of the models alone")
        return worst


class _OutputsGate(Gate):
    # On a number of each output, of which the worst decides.
    judges_quality = depends_on_batch = higher_passes = True
    # Earlier versions read the first output alone.
    measured_as: ClassVar = {"outputs": "each"}


def _worst(found: Mapping[int, float], before: Artifact, count: int) -> Measured:
    """Return the least number, and those of a model's `count` outputs by name if it has several."""
    value = math.nan if any(map(math.isnan, found.values())) else min(found.values())
    if count == 1 or math.isnan(value):
        return Measured(value)
    names = [output.name for output in before.signature.outputs]
    return Measured(value, outputs={names[i]: number for i, number in found.items()})


class LabelAgreement(_OutputsGate):
    """The largest score of an output is the same one for at least this share of samples.

    Of a model with one score, or of several labels each: whether a score is above 0, or above one
    half where all are from 0 to 1, as after a sigmoid. The task says on which axis the classes are;
    for tokens every position counts. Of several outputs those of floats are read that have as many
    labels as the first, and the worst decides.
    """

    gate: Literal["label_agreement"] = "label_agreement"
    minimum: Fraction = 1.0
    """Fraction of samples with equal labels; 1.0 means every one."""

    limit_field = "minimum"
    rule_template = "equal labels >= {minimum:g}"
    report_template = "at least {percent:g} % of the labels are equal"
    # To earlier versions all shares after a sigmoid were a yes.
    measured_as: ClassVar = {**_OutputsGate.measured_as, "shares": "one half"}

    def measure(self, before: Artifact, after: Artifact, context: Context) -> Measured:
        """Return the fraction of equal labels, of the worst output and of each."""
        equal, total, count = Counter[int](), Counter[int](), 0
        for expected, got in paired_scores(before, after, context):
            count = len(expected)
            for i in labelled_outputs(expected, context.task):
                labels, others = (predicted_decisions(x[i], context.task) for x in (expected, got))
                refuse_other_shapes(labels, others, f"labels of output {i}")
                equal[i] += int((labels == others).sum())
                total[i] += labels.numel()
        if not total[0]:
            raise StageFailed("the outputs have no samples, so that there are no labels to compare")
        return _worst({i: equal[i] / n for i, n in total.items() if n}, before, count)

    def unsuitable_task(self, task: Task) -> str:
        """Return why a model for the task has no labels to compare."""
        if task.has_labels:
            return ""
        return (
            f"compares labels, and a model for {task.name} gives {task.answer}; use parity or "
            f"{task.gates[0]['gate']}"
        )


class MinCosine(_OutputsGate):
    """Each output of every sample points in the same direction, by the cosine.

    Of several outputs those of more than one number, floats, are read, and the worst decides.
    """

    gate: Literal["min_cosine"] = "min_cosine"
    minimum: Annotated[float, Field(ge=-1, le=1)]
    """Least cosine between the vectors of a sample; 1 means the same direction."""

    limit_field = "minimum"
    rule_template = "cosine of outputs >= {minimum:g}"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> Measured:
        """Return the least cosine of all samples of `val`, of the worst output and of each."""
        cosines, count = defaultdict[int, list[torch.Tensor]](list), 0
        for expected, got in paired_outputs(before, after, context):
            count = len(expected)
            for i, found in sample_cosines(expected, got).items():
                cosines[i].append(found)
        if not cosines:
            raise StageFailed(NO_ELEMENTS)
        least = {i: float(torch.cat(found).min()) for i, found in cosines.items()}
        return _worst(least, before, count)


class _NextTokenGate(Gate):
    judges_quality = depends_on_batch = True

    def unsuitable_task(self, task: Task) -> str:
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

    limit_field = "nats"
    rule_template = "KL divergence of next tokens <= {nats:g} nats"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the mean KL divergence from the model before to the one after."""
        total, positions = 0.0, 0
        for expected, got in paired_outputs(before, after, context):
            a, b = expected[0], got[0]
            if a.shape != b.shape or a.dim() != 3:
                raise StageFailed(
                    f"takes scores (batch, length, tokens) of both models, found {tuple(a.shape)} "
                    f"and {tuple(b.shape)}"
                )
            # In parts: float64 scores of a whole batch would take much memory.
            parts = (torch.split(x.flatten(0, 1), 256) for x in (a, b))
            for one, other in zip(*parts, strict=True):
                p, q = (F.log_softmax(x.double(), -1) for x in (one, other))
                total += float(F.kl_div(q, p, reduction="sum", log_target=True))
            positions += a.shape[0] * a.shape[1]
        if not positions:
            raise StageFailed("the outputs have no positions, so that there is nothing to compare")
        # NaN and infinities anywhere end in the sum, so one look is enough.
        if not math.isfinite(total):
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

    limit_field = "at"
    rule_template = "equal tokens of {tokens} >= {at:g}"
    report_template = "the first differing token comes after at least {limit:g}"
    higher_passes = needs_data = True

    @model_validator(mode="after")
    def _limit_is_reachable(self) -> MinEqualTokens:
        if self.at > self.tokens:
            raise ValueError(f"at: {self.at:g} is more than the {self.tokens} tokens generated")
        return self

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the mean number of equal tokens."""
        signature, equal = before.signature, list[int]()
        place = token_input(signature)
        # Not kept: each token adds the scores of a whole text, which nothing else asks for.
        opened = (context.predictor(model, kept=False) for model in (before, after))
        with next(opened) as expected, next(opened) as got:
            for inputs in context.comparison_inputs(signature, 1):
                prompt = inputs[place][:, : self.prompt_tokens]
                if not prompt.shape[1] or len(equal) == self.prompts:
                    continue
                one, other = (
                    continue_greedily(predict, signature, prompt, self.tokens)
                    for predict in (expected, got)
                )
                differs = (one != other).flatten().nonzero()
                equal.append(int(differs[0]) if len(differs) else one.numel())
        if not equal:
            raise StageFailed("the samples of `val` have no tokens to continue")
        return math.fsum(equal) / len(equal)


def token_input(signature: Signature) -> int:
    """Return which input has the token ids; raise StageFailed where others are no masks."""
    others = [i for i, spec in enumerate(signature.inputs) if spec.unmasked_value is None]
    if len(others) != 1 or "int" not in signature.inputs[others[0]].dtype:
        names = ", ".join(signature.inputs[i].name for i in others)
        raise StageFailed(f"continues models that take token ids and at most a mask, found {names}")
    return others[0]


def unmasked_inputs(signature: Signature, ids_BT: torch.Tensor) -> list[torch.Tensor]:
    """Return a model's inputs for token ids, with masks that let all of them through."""
    everywhere = torch.ones_like(ids_BT, dtype=torch.bool)
    is_mask = [spec.unmasked_value is not None for spec in signature.inputs]
    return [
        spec.as_mask(everywhere).to(getattr(torch, spec.dtype)) if masks else ids_BT
        for spec, masks in zip(signature.inputs, is_mask, strict=True)
    ]


def continue_greedily(
    predict: Predictor, signature: Signature, prompt_BT: torch.Tensor, count: int
) -> torch.Tensor:
    """Return the likeliest next tokens after a prompt, one by one: `(batch, count)`.

    They are fewer where the signature allows no longer inputs.
    """
    place, text_BT = token_input(signature), prompt_BT
    longest = signature.bounds(str(signature.inputs[place].shape[1])).max
    left = count if longest is None else min(count, longest - prompt_BT.shape[1])
    for _ in range(left):
        scores_BV = predict(*unmasked_inputs(signature, text_BT))[0].cpu()[:, -1]
        text_BT = torch.cat([text_BT, scores_BV.argmax(-1, keepdim=True).to(text_BT)], 1)
    return text_BT[:, prompt_BT.shape[1] :]


class _MetricGate(Gate):
    needs_data = judges_quality = depends_on_batch = True
    # Earlier versions stored values without intervals.
    measured_as: ClassVar = {"measured": "by part"}

    def unsuitable_metric(self, metric: str) -> str:
        is_measured = metric_class(metric).is_measured
        return "" if is_measured else "the pipeline has no metric; add `metric:`"


class MaxDrop(_MetricGate):
    """The metric on `val` gets worse by at most `points` hundredths."""

    gate: Literal["max_drop"] = "max_drop"
    points: Annotated[float, Field(allow_inf_nan=False)]
    """Largest loss allowed, in hundredths of the metric (percentage points for accuracy)."""
    confidence: Ratio | None = None
    """Judge the upper bound of the loss on all inputs like those of `val`, with this probability
    that it holds, in place of the loss on `val`. For metrics that are shares of samples, such as
    accuracy; each sample is paired with itself."""

    limit_field = "points"
    rule_template = "drop <= {points:g} hundredths of the metric"

    @property
    def rule(self) -> str:
        """The rule, with the confidence."""
        sure = f"with {100 * self.confidence:g} % confidence, " if self.confidence else ""
        return sure + super().rule

    def measure(self, before: Artifact, after: Artifact, context: Context) -> Measured:
        """Return the loss in points, negative when the result is better, or its upper bound."""
        if self.confidence is None:
            points = context.metric.drop_points(context.score(before), context.score(after))
            # Rounded: 0.98 - 0.97 must not exceed one point by a float's last bit.
            return Measured(round(points, 9), context.drop_uncertainty(before, after))
        judging = context.without_choosing_samples(after)
        scores = (judging.score_by_sample(model) for model in (before, after))
        bound = next(scores).drop_bound(next(scores), self.confidence)
        bound = bound.model_copy(update={"is_half": judging is not context})
        return Measured(bound.value, bound=bound)

    def unmet_by(self, context: Context) -> Iterator[Unmet]:
        """Yield that `val` is too small to show the limit, even if no sample changes."""
        yield from super().unmet_by(context)
        if self.confidence is not None:
            yield from too_few_samples(context, self.points / 100, self.confidence, "points")

    def unsuitable_metric(self, metric: str) -> str:
        """Return why the metric has no bound, or the points cannot be meant, or there is none."""
        kind = metric_class(metric)
        is_share = kind.is_fraction and kind.sums_and_counts is not Metric.sums_and_counts
        if self.confidence is not None and kind.is_measured and not is_share:
            return (
                f"confidence: {metric} is no share of samples, so that no bound holds without "
                "assumptions about its values; leave confidence out, or use max_disagreement"
            )
        problem = unlikely_points(self.points) if kind.is_fraction else ""
        return f"points: {problem}" if problem else super().unsuitable_metric(metric)

    @classmethod
    def rule_in_words(cls, verdict: Verdict, metric: str) -> str:
        """Return the rule: in points where 1 is best, and else in the metric's own unit."""
        kind = metric_class(metric)
        if verdict.bound:
            loss = cls.rule_in_words(verdict.model_copy(update={"bound": None}), metric)
            return f"with {100 * verdict.bound.confidence:g} % confidence {loss}"
        if not kind.in_points:
            change = "rises" if kind.higher is False else "gets worse"
            return f"{metric} {change} by at most {verdict.limit / 100:g}"
        points = "point" if verdict.limit == 1 else "points"
        return f"loses at most {verdict.limit:g} {points} of {metric}"

    @classmethod
    def value_in_words(cls, verdict: Verdict, metric: str) -> str:
        """Return the value in the unit of the rule, or why there is none."""
        if metric_class(metric).in_points:
            return describe_value(verdict, " points")
        return describe_value(verdict, "", 0.01)


class MaxRelativeDrop(_MetricGate):
    """The metric on `val` gets worse by at most `percent` of its value before."""

    gate: Literal["max_relative_drop"] = "max_relative_drop"
    percent: Annotated[float, Field(allow_inf_nan=False)]
    """Largest loss allowed, in percent of the metric before: 2 lets a perplexity of 20 become 20.4,
    and an accuracy of 0.90 become 0.882."""

    limit_field = "percent"
    rule_template = "drop <= {percent:g} % of the metric"
    report_template = "{metric} gets worse by at most {limit:g} %"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> Measured:
        """Return the loss in percent, negative when the result is better."""
        score = context.score(before)
        if score == 0:
            raise StageFailed(f"{context.metric.name} was 0 before, which has no percentage")
        points = context.metric.drop_points(score, context.score(after))
        # Of the interval the metric before is taken as given.
        interval = context.drop_uncertainty(before, after).scaled(1 / abs(score))
        return Measured(round(points / abs(score), 9), interval)


class MinMetric(_MetricGate):
    """The metric on `val` reaches a value."""

    gate: Literal["min_metric"] = "min_metric"
    at: Annotated[float, Field(allow_inf_nan=False)]
    """The value to reach, in the metric's own unit (0.975 for an accuracy of 97.5 %)."""

    limit_field = "at"
    rule_template = "metric >= {at:g}"
    report_template = "{metric} >= {limit:g}"
    higher_passes = True
    compares = False

    def measure(self, before: Artifact, after: Artifact, context: Context) -> Measured:
        """Return the metric on `val`."""
        if not context.metric.higher_is_better:
            raise StageFailed(f"metric {context.metric.name} falls with quality; use max_drop")
        score = context.score_by_sample(after)
        return Measured(score.value, score.uncertainty())

    def unsuitable_metric(self, metric: str) -> str:
        """Return why the metric, or a limit in its unit, cannot be meant."""
        kind = metric_class(metric)
        if kind.higher is False:
            return f"metric {metric} falls with quality; use max_drop"
        if kind.is_fraction and self.at > 1:
            return (
                f"at: found {self.at:g}, and {metric} is a fraction of 1; "
                f"for {self.at:g} % write {self.at / 100:g}"
            )
        return super().unsuitable_metric(metric)


def unlikely_points(points: float) -> str:
    """Return why so many points of an accuracy cannot be meant, and what to write; or nothing."""
    # Who writes 0.005 means half a point.
    if 0 < points < 0.01:
        return (
            f"{points:g} is less than a hundredth of a percentage point; points are "
            f"percentage points, so for {100 * points:g} % write {100 * points:g}"
        )
    if points > 50:
        return (
            f"{points:g} would let more than half of all answers become wrong; points "
            "are percentage points, expected at most 50"
        )
    return ""
