"""The stage `cascade`: a compressed ONNX file that asks another one where it is unsure."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from compress.artifacts.artifact import CASCADE, CERTIFICATE, Artifact
from compress.common.config import Ratio, Unmet
from compress.common.errors import StageFailed
from compress.common.lazy_modules import np, torch
from compress.common.tensor_difference import relative_error
from compress.core.bounds import score_threshold, share_bound
from compress.core.gates.disagreement import MaxDisagreement, labels_of
from compress.core.gates.quality import paired_outputs, too_few_samples
from compress.core.metrics.builtin import are_shares, labelled_outputs
from compress.core.stage import Stage
from compress.export.onnx.stage import ROUNDING, OnnxModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from compress.common.forward import Predictor, Tensors
    from compress.core.context import Context
    from compress.data.splits import Splits
    from compress.export.onnx.cascade_graph import RowScore

    Seen: TypeAlias = tuple[NDArray[np.float32], NDArray[np.bool_]]
    """Score of each row, and whether its label is another one than the fallback's: `(rows,)`."""
logger = logging.getLogger(__name__)
CHECKED_ROWS = 32  # of `val`; half of them are answered by the fallback, if so many are
CHECKED_BATCHES = (1, 7, CHECKED_ROWS)
# Of int8 that takes half of float's time: 13 % of a ResNet-20's rows cost 1.6 times int8's mean.
LARGE_SHARE = 0.1
CLOSER = (
    "Bring the input model closer to it (calibrate on inputs as they will come; for int8 "
    "`corrections: auto` or quantize_mixed), allow a larger percent, or add samples to `val`"
)


class Cascade(Stage[OnnxModel, OnnxModel]):
    """Answer by the input model, and rows of which it is unsure by a larger one, in one ONNX file.

    A row is answered by the model that `fallback` names where the input's score of it is not above
    a threshold. Every other sample of `val` chooses the threshold, by fixed-sequence testing (Learn
    then Test, 2021), so that the limit holds although it was chosen; the others, which chose
    nothing, confirm it. Gates on bounds judge those alone. For models that give one label a row.

        - {stage: export_onnx, name: float_onnx, input: train}
        - {stage: export_onnx, name: int8_onnx, input: quantize_static}
        - stage: cascade
          fallback: float_onnx
          percent: 0.2
    """

    stage: Literal["cascade"] = "cascade"
    fallback: str
    """Earlier stage whose ONNX file answers where the input model is unsure."""
    percent: Annotated[float, Field(gt=0, lt=100)]
    """Largest percent of all inputs that are labelled otherwise than by the fallback alone."""
    confidence: Ratio = 0.95
    """Probability, over the choice of samples, that the limit holds."""
    score: str | None = None
    """Output of the input model that is larger where it is surer, one number a row. By default the
    margin: the difference of the two largest classes, or of one logit (of several, the nearest) its
    distance from 0."""

    needs_data: ClassVar[bool] = True
    uses_loss: ClassVar[bool] = True  # its task says what the labels are

    @property
    def extra_inputs(self) -> tuple[str, ...]:
        """The fallback's name."""
        return (self.fallback,)

    @property
    def extra_input_types(self) -> tuple[type[Artifact], ...]:
        """An ONNX file."""
        return (OnnxModel,)

    def unmet_by(self, context: Context) -> Iterator[Unmet]:
        """Yield that `val` is too small, or outputs are no labels."""
        yield from super().unmet_by(context)
        limit = self.percent / 100
        yield from too_few_samples(context, limit, self.confidence, "percent", of_half=True)
        for gate in self.gates:
            if isinstance(gate, MaxDisagreement):
                asked = gate.percent / 100, gate.confidence, "gates"
                yield from too_few_samples(context, *asked, of_half=True)
        if (task := context.task) is not None and not task.has_labels:
            yield Unmet((), f"compares labels, and a model for {task.name} gives {task.answer}")

    def run(self, model: OnnxModel, context: Context) -> OnnxModel:
        """Choose the threshold, write the file and compare its rows with both models'."""
        from compress.export.onnx.cascade_graph import joined
        from compress.export.onnx.proto_io import read, write
        from compress.export.onnx.session import counted_predictor

        large: Any = context.artifact(self.fallback)
        self._refuse_others(model, large, context)
        halves = context.need_data(self.title).interleaved_parts("val", 2)
        score, seen = self._compare(model, large, halves, context)
        threshold, share, facts = self._choose(seen)
        graphs = [read(each.payload_path, weights=True) for each in (model, large)]
        graph, shared = joined(graphs[0], graphs[1], score, threshold)
        facts["parameters"] = model.parameters() + large.parameters() - shared
        if None not in (counts := (model.macs(), large.macs())):
            facts["macs"] = counts[0] + round(share * counts[1])  # of a row, on average
        if names := model.manifest.facts.get("class_names"):
            facts["class_names"] = names
        with OnnxModel.atomic_write(
            context.root,
            model.signature,
            lineage=self.lineage(model, fallback=large.digest),
            facts=facts,
            carried=model.carried_files(),
        ) as folder:
            file, threads = folder / OnnxModel.payload, context.threads
            write(graph, file)
            predict, kernels = counted_predictor(file, threads, model.signature.example())
            facts |= {"opset": graph.opset_imports[""], **kernels}
            batches = self._batches_to_check(halves[1], seen[1][0] > threshold)
            with model.open("cpu", threads) as small, large.open("cpu", threads) as other:
                rows = check_rows(predict, (small, other), score, threshold, batches)
            facts[CASCADE]["rows_checked"] = rows
        return OnnxModel.from_directory(context.root)

    def _refuse_others(self, model: OnnxModel, large: OnnxModel, context: Context) -> None:
        """Raise StageFailed for models that no rows can be moved between."""
        own, other = model.signature, large.signature
        problem = ""
        if own.inputs != other.inputs or own.outputs != other.outputs:
            names = [
                [x.name for x in each.inputs] + [x.name for x in each.outputs]
                for each in (own, other)
            ]
            problem = (
                f"the input model and {self.fallback!r} have other inputs or outputs, {names[0]} "
                f"and {names[1]}, or other types and shapes; expected two exports of one interface"
            )
        elif own.batch_axis is None or own.state is not None or other.state is not None:
            problem = "takes models without a state, whose inputs have a batch axis of any size"
        elif any(context.batch_dependence(each).depends for each in (model, large)):
            problem = "answers depend on the other rows of a batch, so that none can be taken out"
        if problem:
            raise StageFailed(f"{self.title}: {problem}")

    def _compare(
        self, model: OnnxModel, large: OnnxModel, halves: Sequence[Splits], context: Context
    ) -> tuple[RowScore, list[Seen]]:
        """Return how rows are scored, and what is seen of each half."""
        from compress.export.onnx.cascade_graph import RowScore

        names, how, seen = [output.name for output in model.signature.outputs], None, []
        only_shares = True  # of all samples
        for half in halves:
            scores, changed = [], []
            # All samples, where a run judges quickly, too.
            own = replace(context, data=half, is_quick=False)
            for pair in paired_outputs(large, model, own):
                how = how or RowScore.of(pair[1], names, context.task, self.score, self.title)
                scores.append(how.measure(pair[1]))
                labelled = labelled_outputs(pair[0], context.task)
                only_shares &= all(are_shares(pair[0][i], context.task) for i in labelled)
                labels = [labels_of(dict(zip(names, x, strict=True)), own) for x in pair]
                changed.append((labels[0] != labels[1]).any(1))
            seen.append((torch.cat(scores).numpy(), torch.cat(changed).numpy()))
        assert how is not None
        if only_shares:
            raise StageFailed(
                f"{self.title}: an output that says yes or no does so by its sign, and all of "
                f"{self.fallback}'s are from 0 to 1, as after a sigmoid, so that no label could "
                "differ; leave the sigmoid out of the model"
            )
        return how, seen

    def _choose(self, seen: Sequence[Seen]) -> tuple[float, float, dict[str, Any]]:
        """Return threshold, share of rows that fall back, and what both halves of `val` show.

        Raise StageFailed where the first half shows no threshold, or the other one refutes it.
        """
        limit, sure = self.percent / 100, f"with {100 * self.confidence:g} % confidence"
        asked = f"{self.title}: at most {self.percent:g} % other labels {sure}"
        scores, changed = seen[0]
        if (threshold := score_threshold(scores, changed, limit, self.confidence)) is None:
            raise StageFailed(
                f"{asked} cannot be shown: of {len(scores)} samples {int(changed.sum())} differ, "
                f"that of the largest score, too; {self.fallback} would have to answer all. "
                + CLOSER
            )
        sure_of = [own > threshold for own, _ in seen]
        counts = [int((c & s).sum()) for (_, c), s in zip(seen, sure_of, strict=True)]
        samples = [len(s) for s in sure_of]
        share = 1 - sum(int(s.sum()) for s in sure_of) / sum(samples)
        bound = share_bound(counts[1], samples[1], self.confidence)
        least = 1 - share_bound(samples[1] - counts[1], samples[1], self.confidence)
        if least > limit:
            raise StageFailed(
                f"{asked} is refuted: half of `val` chose a threshold, and of the other "
                f"{samples[1]} samples {counts[1]} differ, {sure} {100 * least:.3g} % or more of "
                "all; are the samples drawn independently of each other?"
            )
        if not share:
            logger.warning("%s: no sample falls back; %s is not needed", self.title, self.fallback)
        elif share > LARGE_SHARE:
            logger.warning(
                "%s: %.3g %% of `val` fall back to %s, which may cost more than the input model "
                "saves; limit the mean by min_speedup or max_latency. %s, so that fewer do",
                *(self.title, 100 * share, self.fallback, CLOSER),
            )
        certificate = (
            f"At most {self.percent:g} % of all inputs are labelled otherwise than by "
            f"{self.fallback}, {sure} (fixed-sequence testing; {counts[0]} of the {samples[0]} "
            f"samples of `val` differ that chose the threshold). Of the {samples[1]} others "
            f"{counts[1]} differ, by which alone it is at most {100 * bound:.3g} %. "
            f"{self.fallback} answers {100 * share:.3g} % of them all. It assumes inputs like the "
            "samples of `val`, drawn independently of each other."
        )
        logger.info("%s: %s", self.title, certificate)
        halves = [{"samples": n, "changed": k} for n, k in zip(samples, counts, strict=True)]
        found = {
            "threshold": threshold if math.isfinite(threshold) else None,
            "score": self.score or "margin",
            "fallback": self.fallback,
            "fallback_share": round(share, 6),
            "chosen_on": halves[0],
            "confirmed_on": {**halves[1], "bound_percent": round(100 * bound, 4)},
        }
        return threshold, share, {CASCADE: found, CERTIFICATE: certificate}

    def _batches_to_check(self, half: Splits, is_sure: NDArray[np.bool_]) -> Iterator[Tensors]:
        """Yield batches of several sizes, in which rows of either model stand beside each other."""
        few = [np.flatnonzero(rows)[: CHECKED_ROWS // 2] for rows in (is_sure, ~is_sure)]
        order = np.random.default_rng(0).permutation(np.concatenate(few)).tolist()
        for size in CHECKED_BATCHES:
            for batch in half.read("val", order, size):
                yield batch.inputs


def check_rows(
    cascade: Predictor,
    models: tuple[Predictor, Predictor],
    score: RowScore,
    threshold: float,
    batches: Iterable[Tensors],
) -> int:
    """Return how many rows of a cascade are its models'; StageFailed where one is not."""
    (small, large), rows = models, 0
    for inputs in batches:
        expected = [x.clone() for x in small(*inputs)]
        falls_back = ~(score.measure(expected) > threshold)
        if falls_back.any():
            found = large(*(x[falls_back] for x in inputs))
            for answer, other in zip(expected, found, strict=True):
                answer[falls_back] = other
        for answer, other in zip(expected, cascade(*inputs), strict=True):
            error = 0.0 if torch.equal(answer, other) else relative_error(answer, other)
            if not error <= ROUNDING:
                raise StageFailed(
                    f"in a batch of {len(inputs[0])}, of which {int(falls_back.sum())} fall back, "
                    f"the cascade answers otherwise than its models, by {error:.2g} of the norm"
                )
        rows += len(inputs[0])
    return rows
