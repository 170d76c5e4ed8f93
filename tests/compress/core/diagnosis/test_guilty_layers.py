"""The search for guilty layers, on losses that are known."""

import math
import time
from collections.abc import Callable, Collection

import pytest

from compress.core.diagnosis.layer_diagnosis import GuiltSearch, max_evaluations

LAYERS = [f"layer{i}" for i in range(20)]


def search(loses: Callable[[Collection[str]], float], ranking=LAYERS, **options) -> GuiltSearch:
    """Return a search in a model that loses by which layers are rounded."""
    return GuiltSearch(
        ranking, lambda floats: loses({n for n in ranking if n not in floats}), **options
    )


def test_layers_that_lose_are_found_the_worst_first() -> None:
    costs = {"layer4": 3.0, "layer1": 9.0, "layer17": 0.1}
    found = search(lambda rounded: sum(costs.get(n, 0.0) for n in rounded))
    assert found.guilty() == ("layer1", "layer4")
    assert found.evaluations <= max_evaluations(20)


def test_one_layer_is_enough_where_the_gate_asks_no_more() -> None:
    costs = {"layer4": 3.0, "layer0": 9.0}
    found = search(lambda rounded: sum(costs.get(n, 0.0) for n in rounded), wanted=0.7)
    assert found.guilty() == ("layer0",)


def test_a_loss_of_all_layers_alike_is_spread() -> None:
    found = search(lambda rounded: float(len(rounded)))
    assert found.guilty() == ()
    assert found.widest() == tuple(LAYERS[: len(found.widest())])
    assert 9 <= len(found.widest()) <= 10


def test_layers_that_lose_only_alone_are_put_back_together() -> None:
    # Either of them spoils all answers, so that one alone returns nothing.
    found = search(lambda rounded: 50.0 if {"layer0", "layer3"} & {*rounded} else 0.0)
    assert {*found.guilty()} == {"layer0", "layer3"}


def test_a_layer_that_costs_nothing_alone_is_not_guilty() -> None:
    # layer2 makes layer0's loss worse, and loses nothing by itself.
    def loses(rounded: Collection[str]) -> float:
        return (10.0 if "layer0" in rounded else 0.0) * (1.5 if "layer2" in rounded else 1.0)

    assert search(loses).guilty() == ("layer0",)


def test_layers_whose_losses_add_up_stay_together() -> None:
    def loses(rounded: Collection[str]) -> float:
        count = len({"layer0", "layer1", "layer2"} & {*rounded})
        return (0.0, 0.5, 1.0, 20.0)[count]

    found = search(loses, wanted=0.99)
    assert len(found.guilty()) >= 1
    assert found.recovered(found.guilty()) >= 0.9


@pytest.mark.parametrize("layers", [4, 20, 100])
def test_the_evaluations_are_within_their_budget(layers: int) -> None:
    ranking = [f"layer{i}" for i in range(layers)]
    bad = {*ranking[: layers // 4 : 2]}
    found = search(lambda rounded: float(len(bad & {*rounded})), ranking)
    found.guilty()
    assert found.evaluations <= max_evaluations(layers)


def test_a_model_without_a_finite_metric_is_explained() -> None:
    found = search(lambda rounded: math.inf if "layer3" in rounded else 0.0)
    assert found.guilty() == ("layer3",)
    assert found.recovered(["layer3"]) == 1
    assert found.recovered(["layer4"]) == 0


def test_after_the_deadline_the_set_is_not_reduced() -> None:
    costs = {"layer4": 3.0, "layer0": 9.0}
    late = search(
        lambda rounded: sum(costs.get(n, 0.0) for n in rounded), deadline=time.monotonic() - 1
    )
    assert {"layer0", "layer4"} < {*late.guilty()}
