import numpy as np
import torch

from compress.graph.layer_gram import inverse_hessian_factor


def test_the_factor_equals_numpys() -> None:
    drawn = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 9, 5)))
    drawn[1, :, 2] = 0
    moments = drawn.mT @ drawn
    before = moments.clone()
    for moment, factor in zip(
        moments.numpy(), inverse_hessian_factor(moments).numpy(), strict=True
    ):
        damped = moment + 0.01 * np.diag(moment).mean() * np.eye(5)
        damped[np.diag(moment) == 0, np.diag(moment) == 0] = 1
        assert np.allclose(factor.T @ factor, np.linalg.inv(damped), rtol=1e-10)
        assert np.array_equal(factor, np.triu(factor))
        assert (np.diag(factor) > 0).all()
    assert torch.equal(moments, before), "the caller's sums"


def test_an_input_that_is_always_zero_is_independent() -> None:
    assert torch.equal(inverse_hessian_factor(torch.zeros(3, 3)), torch.eye(3))
