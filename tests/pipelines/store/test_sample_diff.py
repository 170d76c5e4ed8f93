"""A stage that runs again for other data says how many samples differ."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from compress.data import fingerprint
from compress.data.splits import Splits
from compress.pipelines.store.local import KEPT_SPLITS, SAMPLES_FOLDER, Store, note_samples


class Listed(Dataset):
    """Samples that no tensor holds."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], torch.tensor(1)


def held(x: torch.Tensor) -> TensorDataset:
    return TensorDataset(x, torch.ones(len(x)))


X = torch.arange(40.0).reshape(20, 2)
OTHERS = {
    "3 of 20 samples differ": torch.where((torch.arange(20) % 8 == 1)[:, None], X + 0.5, X),
    "2 samples are new, 0 are gone": torch.cat([X[:1], X[:1], X]),
    "0 samples are new, 5 are gone": X[5:],
    "the same samples in another order": X.flip(0),
}


@pytest.mark.parametrize("dataset", [held, Listed])
@pytest.mark.parametrize("description", OTHERS)
def test_a_changed_split_is_described(description: str, dataset, tmp_path: Path) -> None:
    store = Store(tmp_path)
    before = Splits({"train": dataset(X), "val": dataset(X[:4])}).contents()
    now = Splits({"train": dataset(OTHERS[description]), "val": dataset(X[:4])}).contents()
    note_samples(tmp_path, before)
    store.save_last_parts("train", {"data": before.parts, "seed": 0})
    assert (
        store.explain_miss("train", {"data": now.parts, "seed": 0}, now)
        == f"data.train: {description}"
    )
    assert store.explain_miss("train", {"data": before.parts, "seed": 1}, before) == "seed 0 → 1"


@pytest.mark.parametrize(
    ("dataset", "limit"), [(held, "PIECES"), (Listed, "SAMPLED_FOR_FINGERPRINT")]
)
def test_of_a_sampled_split_the_count_is_a_lower_bound(
    dataset, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, limit, 7)  # a hash for three samples, or of every third
    store, before = Store(tmp_path), Splits({"train": dataset(X)}).contents()
    note_samples(tmp_path, before)
    store.save_last_parts("train", {"data": before.parts})

    def description(x: torch.Tensor) -> str:
        now = Splits({"train": dataset(x)}).contents()
        return store.explain_miss("train", {"data": now.parts}, now)

    changed = torch.where((torch.arange(20) < 4)[:, None], X + 0.5, X)
    assert description(changed) == "data.train: at least 2 of 20 samples differ"
    assert description(X[:12]) == "data.splits.train.samples 20 → 12"


def test_hashes_that_are_gone_leave_the_digests_and_old_ones_make_room(tmp_path: Path) -> None:
    first = Splits({"train": held(X)}).contents()
    store = Store(tmp_path)
    store.save_last_parts("train", {"data": first.parts})
    note_samples(tmp_path, first)
    for shift in range(1, KEPT_SPLITS + 1):
        now = Splits({"train": held(X + shift)}).contents()
        note_samples(tmp_path, now)
    assert len(list((tmp_path / SAMPLES_FOLDER).iterdir())) == KEPT_SPLITS
    assert store.explain_miss("train", {"data": now.parts}, now).startswith(
        "data.splits.train.sha256 "
    )


def test_long_data_are_hashed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.data.fingerprint.PIECES", 6)
    hashes = Splits({"train": held(X)}).contents().hashes["train"]
    X_with_another_end = torch.cat([X[:-1], X[-1:] + 1])
    others = Splits({"train": held(X_with_another_end)}).contents().hashes["train"]
    assert hashes.shape == (5, 2)
    assert (hashes != others).any(1).tolist() == [False] * 4 + [True]
