"""Architectures of transformers, pruned without a word about them."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import KeepIndices
from compress.common.forward import run_in_eval
from compress.common.signature import TensorSpec
from compress.core.context import Context
from compress.export.onnx.stage import ExportOnnx
from compress.pruning.prune_channels import PruneChannels
from tests.compress.pruning.zoo.architectures import TRANSFORMERS
from tests.compress.pruning.zoo.registry import Case

pytestmark = pytest.mark.slow

CASES = {case.name: case for case in TRANSFORMERS}
LEAST_GAIN = 0.15
CUT_LESS = [
    "albert",
    "deberta_v2",
    "gpt2",
    "qwen3",
    "bloom",
    "swin",
    "resnet",
    "segformer",
    "mamba",
]
"""One of each kind, cut at another ratio too: numbers of heads and of channels are others."""
CUT_LESS_IN_CI = ("resnet",)
EXPORTED = ["gpt2", "qwen3", "t5", "swin", "wav2vec2"]
"""Decoders, an encoder with a decoder, images in windows, sound. CI exports pruned nets in
test_zoo.py, and decoders with their cache."""

REPEATED = (
    *("mpnet", "deberta_v2", "bloom", "falcon", "gemma", "bart", "whisper", "clip", "clip_text"),
    *("beit", "segformer", "mobilenet_v2", "swin", "vit", "wav2vec2", "mamba"),
)
"""Variants of a kind of which CI prunes bert, gpt2, qwen3, t5, resnet and convnext; nets of
test_zoo.py have their operators, state spaces too."""
COVERED_BY_OTHERS = (
    *("bert_classifier", "distilbert", "roberta", "albert", "electra"),
    *("gpt_neox", "opt", "llama", "mistral", "qwen2", "phi", "deit"),
)
"""Pruning each takes only branches of `compress`, and its model only operators, that bert, mpnet,
deberta_v2, gpt2, qwen3, gemma, falcon, bloom, t5, bart and vit do: measured by branch coverage and
torch's dispatch."""


def soaked(name: str) -> list[pytest.MarkDecorator]:
    """Return the mark of an architecture that only `make soak` tries, if it is one."""
    return [pytest.mark.soak] if name in (*COVERED_BY_OTHERS, *REPEATED) else []


Pruned = Callable[[str, float], EagerModel]


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Pruned:
    """Return a function that gives an architecture pruned at a ratio; 0 is the unpruned one."""
    root = tmp_path_factory.mktemp("architectures")

    @cache
    def prune(name: str, ratio: float) -> EagerModel:
        case, place = CASES[name], root / f"{name}-{ratio}"
        if ratio == 0:
            return import_checkpoint(
                place, case.recipe, case.signature, checkpoint=None, folder=case.folder
            )
        return PruneChannels(ratio=ratio)(prune(name, 0), Context(root=place))

    return prune


def drawn(spec: TensorSpec, batch: int, length: int) -> torch.Tensor:
    """Return an input as real data has them: any word, and padding after each text's end."""
    shape = spec.sized({"batch": batch, "sequence": length})
    if spec.name == "attention_mask":
        ends = torch.randint(1, shape[1] + 1, (batch, 1))
        return (torch.arange(shape[1]) < ends).long()
    if spec.dtype == "int64":
        return torch.randint(3, 96, shape)
    return torch.randn(shape)


def inputs_unlike_the_proofs(case: Case) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield inputs of other batch sizes and lengths than those of the proof."""
    torch.manual_seed(5)
    for batch, length in ((1, 16), (3, 5)):
        specs = [
            spec.model_copy(update={"shape": ("batch", "sequence")})
            if spec.dtype == "int64"
            else spec
            for spec in case.specs
        ]
        yield tuple(drawn(spec, batch, length) for spec in specs)


def silence_(module: torch.nn.Module, edit: KeepIndices) -> None:
    """Write zeros where the edit cuts."""
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for name, axes in edit.kept.items():
        for axis, kept in axes.items():
            silent = sorted(set(range(tensors[name].shape[axis])) - set(kept))
            with torch.no_grad():
                tensors[name].movedim(axis, 0)[silent] = 0


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        *(pytest.param(name, 0.5, marks=soaked(name)) for name in CASES),
        *(
            pytest.param(name, 0.25, marks=[pytest.mark.soak] * (name not in CUT_LESS_IN_CI))
            for name in CUT_LESS
        ),
    ],
)
def test_answers_as_its_masked_twin(name: str, ratio: float, pruned: Pruned) -> None:
    found = pruned(name, ratio)
    masked, smaller = pruned(name, 0).load().double(), found.load().double()
    (edit,) = found.recipe.edits
    silence_(masked, edit)
    for inputs in inputs_unlike_the_proofs(CASES[name]):
        doubles = [x.double() if x.is_floating_point() else x for x in inputs]
        expected, answers = run_in_eval(masked, doubles), run_in_eval(smaller, doubles)
        assert [x.shape for x in answers] == [x.shape for x in expected]
        for a, b in zip(answers, expected, strict=True):
            # Some compute parts in single precision whatever they are asked.
            assert (a - b).abs().max() <= 1e-6 * b.abs().max()


@pytest.mark.parametrize("name", [pytest.param(name, marks=soaked(name)) for name in CASES])
def test_much_is_cut(name: str, pruned: Pruned) -> None:
    assert pruned(name, 0.5).macs() <= (1 - LEAST_GAIN) * pruned(name, 0).macs()


@pytest.mark.soak
@pytest.mark.parametrize("name", EXPORTED)
def test_its_onnx_file_answers_alike(name: str, pruned: Pruned, tmp_path: Path) -> None:
    exported = ExportOnnx()(pruned(name, 0.5), Context(root=tmp_path / "onnx"))
    assert exported.parameters() < pruned(name, 0).parameters()


@pytest.mark.soak  # test_sources.py loads a pruned bert in one, and test_zoo.py its nets
def test_all_load_again_bit_identically_in_a_fresh_process(
    pruned: Pruned, fresh_torch: Callable[[str], str]
) -> None:
    models = {name: pruned(name, 0.5) for name in CASES if not soaked(name)}
    code = (
        "import json, sys, torch; torch.set_num_threads(1)\n"
        f"sys.path.insert(0, {str(Path.cwd())!r})\n"
        "from compress.artifacts.eager_model import EagerModel\n"
        "from compress.common.forward import run_in_eval\n"
        "def digest(path):\n"
        "    model = EagerModel.from_directory(path)\n"
        "    outputs = run_in_eval(model.load(), model.signature.example(seed=7))\n"
        "    return [hash(tuple(x.flatten().tolist())) for x in outputs]\n"
        f"paths = {[str(model.path) for model in models.values()]!r}\n"
        "print(json.dumps([digest(path) for path in paths]))"
    )
    found = json.loads(fresh_torch(code).splitlines()[-1])
    for model, digests in zip(models.values(), found, strict=True):
        outputs = run_in_eval(model.load(), model.signature.example(seed=7))
        assert digests == [hash(tuple(x.flatten().tolist())) for x in outputs], model.path.name
