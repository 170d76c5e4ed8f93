"""The stage `cascade`: a compressed ONNX file that asks another one where it is unsure."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from compress.artifacts.artifact import CASCADE, Artifact
from compress.common.config import Ratio, Unmet
from compress.common.errors import StageFailed
from compress.common.tensor_difference import relative_error
from compress.core.bounds import samples_for, score_threshold, share_bound
from compress.core.gates.disagreement import MaxDisagreement, labels_of
from compress.core.gates.quality import paired_outputs, too_few_samples
from compress.core.stage import Stage
from compress.export.onnx.stage import ROUNDING, OnnxModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from compress.common.forward import Predictor
    from compress.core.context import Context
    from compress.data.splits import Splits
    from compress.export.onnx.cascade_graph import RowScore

logger = logging.getLogger(__name__)
CHECKED_ROWS = 32  # of `val`; half of them are answered by the fallback, if so many are
CHECKED_BATCHES = (1, 7, CHECKED_ROWS)


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

    stage: Literal["cascade"] = CASCADE
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
        score, *seen = self._compare(model, large, halves, context)
        threshold, found = self._choose(seen)
        graph, shared = joined(
            *(read(each.payload_path, weights=True) for each in (model, large)), score, threshold
        )
        facts: dict[str, Any] = {
            **{n: v for n, v in model.manifest.facts.items() if n == "class_names"},
            "opset": graph.opset_imports[""],
            "cascade": {"threshold": threshold, "score": self.score or "margin", **found},
        }
        counts = [(each.parameters(), each.macs()) for each in (model, large)]
        (weights, macs), (more_weights, more_macs) = counts
        if weights is not None and more_weights is not None:
            facts["parameters"] = weights + more_weights - shared
        # Of a row on average.
        if macs is not None and more_macs is not None:
            facts["macs"] = macs + round(found["fallback_share"] * more_macs)
        with OnnxModel.atomic_write(
            context.root,
            model.signature,
            lineage=self.lineage(model, fallback=large.digest),
            facts=facts,
            carried=model.carried_files(),
        ) as folder:
            file = folder / OnnxModel.payload
            write(graph, file)
            example = model.signature.example()
            predict, kernels = counted_predictor(file, context.threads, example)
            facts |= kernels
            with model.open("cpu", context.threads) as one, large.open("cpu", context.threads) as b:
                rows = self._rows_to_check(halves[1], seen[1][0], threshold)
                facts["cascade"]["rows_checked"] = check_rows(predict, one, b, score, threshold, rows)
        logger.info("%s: %s", self.title, found["certificate"])
        return OnnxModel.from_directory(context.root)

    def _refuse_others(self, model: OnnxModel, large: OnnxModel, context: Context) -> None:
        """Raise StageFailed for models that no rows can be moved between."""
        own, other = model.signature, large.signature
        names = [[output.name for output in each.outputs] for each in (own, other)]
        if own.inputs != other.inputs or names[0] != names[1]:
            raise StageFailed(
                f"{self.title}: the input model and {self.fallback!r} have other inputs or outputs "
                f"({own.inputs}, {names[0]}; {other.inputs}, {names[1]}); expected two exports of "
                "models with one interface"
            )
        if own.batch_axis is None or own.state is not None or other.state is not None:
            raise StageFailed(
                f"{self.title}: takes models without a state whose inputs have a batch axis of any "
                "size, as rows are taken out of a batch"
            )
        for name, each in ((model.path.name, model), (self.fallback, large)):
            if context.batch_dependence(each).depends:
                raise StageFailed(
                    f"{self.title}: answers of {name} depend on the other rows of a batch, so that "
                    "rows cannot be taken out of it"
                )

    def _compare(
        self, model: OnnxModel, large: OnnxModel, halves: list[Splits], context: Context
    ) -> tuple[RowScore, *tuple[tuple[NDArray[np.float32], NDArray[np.bool_]], ...]]:
        """Return how rows are scored; of each half the scores, and which rows differ in a label."""
        import torch

        from compress.export.onnx.cascade_graph import RowScore

        names, how = [output.name for output in model.signature.outputs], None
        seen = []
        for half in halves:
            scores, changed = [], []
            # All samples, where a run judges quickly, too.
            own = replace(context, data=half, is_quick=False)
            for expected, answers in paired_outputs(large, model, own):
                how = how or RowScore.of(answers, names, context.task, self.score, self.title)
                scores.append(how.measure(answers))
                labels = [labels_of(dict(zip(names, x, strict=True)), own) for x in (expected, answers)]
                changed.append((labels[0] != labels[1]).any(1))
            seen.append((torch.cat(scores).numpy(), torch.cat(changed).numpy()))
        assert how is not None
        return how, *seen

    def _choose(
        self, seen: list[tuple[NDArray[np.float32], NDArray[np.bool_]]]
    ) -> tuple[float, dict[str, Any]]:
        """Return the threshold, and what both halves show of it; StageFailed where they do not."""
        limit, sure = self.percent / 100, f"{100 * self.confidence:g} %"
        asked = f"{self.title}: at most {self.percent:g} % other labels with {sure} confidence"
        (scores, changed), _ = seen
        if (threshold := score_threshold(scores, changed, limit, self.confidence)) is None:
            needed = samples_for(0.0, limit, self.confidence) or 0
            few = f"it takes {2 * needed} samples of `val`, found about {2 * len(scores)}"
            unsure = f"{int(changed.sum())} of {len(scores)} labels differ, also of the surest rows"
            raise StageFailed(f"{asked}: {few if len(scores) < needed else unsure}")
        counts = [int((c & (s > threshold)).sum()) for s, c in seen]
        samples = [len(s) for s, _ in seen]
        answered = sum(int((s > threshold).sum()) for s, _ in seen)
        bound, least = (
            share_bound(counts[1], samples[1], self.confidence),
            1 - share_bound(samples[1] - counts[1], samples[1], self.confidence),
        )
        other = f"{counts[1]} of the other {samples[1]} samples, which chose nothing, differ"
        if least > limit:
            raise StageFailed(
                f"{asked}: the threshold that {samples[0]} samples of `val` chose is refuted: "
                f"{other}, at least {100 * least:.3g} % with {sure}; are they independent?"
            )
        share = 1 - answered / sum(samples)
        return threshold, {
            "fallback_share": round(share, 6),
            "chosen_on": {"samples": samples[0], "changed": counts[0]},
            "confirmed_on": {
                "samples": samples[1],
                "changed": counts[1],
                "bound_percent": round(100 * bound, 4),
            },
            "certificate": (
                f"With {sure} confidence at most {self.percent:g} % of all inputs are labelled "
                f"otherwise than by {self.fallback} (fixed-sequence testing; {counts[0]} of "
                f"{samples[0]} samples of `val` differ). Of the samples that chose nothing, "
                f"{counts[1]} of {samples[1]} differ, which alone bounds it by {100 * bound:.3g} %. "
                f"{self.fallback} answers {100 * share:.3g} % of the samples. It assumes inputs "
                "like the samples of `val`, drawn independently of each other."
            ),
        }

    def _rows_to_check(
        self, half: Splits, scores: NDArray[np.float32], threshold: float
    ) -> Iterator[tuple[Any, ...]]:
        """Yield batches of several sizes, in which rows of either model stand beside each other."""
        import numpy as np

        answered = scores > threshold
        few = [np.flatnonzero(each)[: CHECKED_ROWS // 2] for each in (answered, ~answered)]
        order = np.random.default_rng(0).permutation(np.concatenate(few)).tolist()
        for size in CHECKED_BATCHES:
            for batch in half.read("val", order, size):
                yield batch.inputs


def check_rows(
    exported: Predictor,
    small: Predictor,
    large: Predictor,
    score: RowScore,
    threshold: float,
    batches: Iterator[tuple[Any, ...]],
) -> int:
    """Return how many rows of a cascade are its models'; StageFailed where one is not."""
    import torch

    rows = 0
    for inputs in batches:
        expected = [x.clone() for x in small(*inputs)]
        (moved,) = torch.nonzero(~(score.measure(expected) > threshold), as_tuple=True)
        if len(moved):
            for answer, own in zip(expected, large(*(x[moved] for x in inputs)), strict=True):
                answer[moved] = own
        for answer, found in zip(expected, exported(*inputs), strict=True):
            error = 0.0 if torch.equal(answer, found) else relative_error(answer, found)
            if not error <= ROUNDING:
                raise StageFailed(
                    f"the cascade's answers to {len(moved)} rows of the fallback in a batch of "
                    f"{len(inputs[0])} are not its models', by {error:.2g} of the norm"
                )
        rows += len(inputs[0])
    return rows
