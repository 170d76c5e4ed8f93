from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.training.config.parallel import Parallel
from compress.training.config.training import Training
from compress.training.fit import fit
from compress.training.objectives.objective import TargetLoss

pytestmark = pytest.mark.multiprocess

HERE = Path(__file__).parents[1]
ROOT = HERE.parents[2]
DIGITS = ROOT / "examples" / "digits"
WITH_FEEDBACK = ("int8", "int8-stochastic", "topk", "powersgd")
ELEMENTS = 24 * 40 + 40 + 40 * 10 + 10


@pytest.fixture(scope="module")
def records(tmp_path_factory, launch) -> list[dict]:
    """Return what two real processes saw, by setting and step."""
    folder = tmp_path_factory.mktemp("average")
    launch(HERE / "comm_hook_ranks.py", 2, folder)
    return [torch.load(folder / f"rank-{r}.pt", weights_only=True) for r in (0, 1)]


def flat(step: dict, what: str) -> torch.Tensor:
    return torch.cat([step[what][name].flatten() for name in sorted(step["own"])])


def seen(records: list[dict], setting: str, what: str, step: int) -> list[torch.Tensor]:
    return [flat(record[setting][step], what) for record in records]


@pytest.mark.parametrize("setting", ["none", "fp16", "bf16", *WITH_FEEDBACK])
def test_every_process_gets_the_same_average(records, setting) -> None:
    for step in range(3):
        first, second = seen(records, setting, "average", step)
        assert torch.equal(first, second)
        assert first.any()


@pytest.mark.parametrize(("setting", "relative"), [("none", 1e-6), ("fp16", 2e-3), ("bf16", 2e-2)])
def test_16_bits_round_and_no_more(records, setting, relative) -> None:
    exact = sum(seen(records, setting, "own", 0)) / 2
    found = seen(records, setting, "average", 0)[0]
    assert (found - exact).abs().max() <= relative * exact.abs().max()
    assert setting == "none" or not torch.equal(found, exact)


def test_int8_is_off_by_half_a_step_at_most(records) -> None:
    for name in records[0]["int8"][0]["own"]:
        own = [record["int8"][0]["own"][name] for record in records]
        step = sum(g.abs().max() for g in own) / 2 / 127
        found = records[0]["int8"][0]["average"][name]
        assert (found - sum(own) / 2).abs().max() <= 0.5001 * step


def test_stochastic_rounding_has_the_gradient_as_its_mean(records) -> None:
    for rank in records:
        roundings = rank["roundings"]
        gradient, step = roundings["gradient"], 1 / 127
        assert (roundings["one"] - gradient).abs().max() > 0.5 * step
        # Six standard deviations, of half a step at most, of the mean of 4000.
        for mean in ("sent", "means"):
            assert (roundings[mean] - gradient).abs().max() < 6 * 0.5 * step / 4000**0.5
    assert torch.equal(records[0]["roundings"]["means"], records[1]["roundings"]["means"])
    assert not torch.equal(records[0]["roundings"]["one"], records[1]["roundings"]["one"])


@pytest.mark.parametrize("setting", ["fp16", "bf16", *WITH_FEEDBACK])
def test_hooks_return_before_the_other_process_has_sent(records, setting) -> None:
    assert records[0][setting][-1]["done"] == [False]


def test_topk_sends_the_largest_entries(records) -> None:
    own = [record["topk"][0]["own"]["0.weight"].flatten() for record in records]
    expected = torch.zeros(24 * 40)
    for gradient in own:
        places = gradient.abs().topk(96).indices
        expected[places] += gradient[places] / 2
    torch.testing.assert_close(
        records[0]["topk"][0]["average"]["0.weight"].flatten(), expected, rtol=0, atol=1e-7
    )


def test_powersgd_sends_two_thin_matrices_and_vectors_whole(records) -> None:
    own = [record["powersgd"][0]["own"] for record in records]
    average = records[0]["powersgd"][0]["average"]
    assert torch.linalg.matrix_rank(average["0.weight"]) == 2
    torch.testing.assert_close(average["0.bias"], (own[0]["0.bias"] + own[1]["0.bias"]) / 2)


@pytest.mark.parametrize("setting", WITH_FEEDBACK)
def test_the_residual_is_added_to_the_next_gradient(records, setting) -> None:
    lost_before = torch.zeros(ELEMENTS)
    for step in range(3):
        wanted = sum(seen(records, setting, "own", step)) / 2 + lost_before
        lost_before = sum(seen(records, setting, "lost", step)) / 2
        average = seen(records, setting, "average", step)[0]
        assert lost_before.abs().max() > 1e-5
        torch.testing.assert_close(average + lost_before, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("setting", WITH_FEEDBACK)
def test_residuals_are_saved_and_loaded_by_each_process(records, setting) -> None:
    assert all(record[setting][-1]["loaded"] for record in records)
    ours, theirs = seen(records, setting, "lost", 2)
    assert not torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("setting", "bytes_sent"),
    [
        ("none", 4 * ELEMENTS),
        ("fp16", 2 * ELEMENTS),
        ("bf16", 2 * ELEMENTS),
        ("int8", ELEMENTS + 4 * 4),
        ("int8-stochastic", ELEMENTS + 4 * 4),
        ("topk", 8 * (96 + 4 + 40 + 1)),
        ("powersgd", 4 * (2 * (40 + 24) + 2 * (10 + 40) + 40 + 10)),
    ],
)
def test_the_bytes_sent_are_counted(records, setting, bytes_sent) -> None:
    assert [step["bytes"] for step in records[0][setting]] == [bytes_sent] * 3


def test_options_out_of_range_are_refused() -> None:
    for wrong in ({"communication": "zip"}, {"powersgd_rank": 0}, {"topk_fraction": 1.5}):
        with pytest.raises(ValidationError):
            Parallel(**wrong)


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(
        ValidationError, match="communication is for strategy: ddp, zero1, found fsdp"
    ):
        Parallel(strategy="fsdp", communication="int8")
    with pytest.raises(ValidationError, match="int8_rounding is for communication: int8, found no"):
        Parallel(int8_rounding="stochastic")
    with pytest.raises(ValidationError, match="topk remembers gradients"):
        Training(epochs=1, precision="fp16", parallel={"communication": "topk", "processes": 2})


@pytest.mark.soak
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
def test_digits_are_still_learnt(tmp_path, digits: Splits) -> None:
    signature = Signature(inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),))
    source = import_checkpoint(
        tmp_path / "source",
        Recipe(factory="models:resnet20", arguments={"width": 8}),
        signature,
        checkpoint=None,
        folder=DIGITS,
    )
    parallel = Parallel(processes=2, communication="powersgd")
    training = Training(epochs=6, parallel=parallel)
    where = Context(root=tmp_path / "train", data=digits)
    result = fit(source, training, TargetLoss(0.1), where, "train")
    assert result.kept.metric > 0.95
