import numpy as np
import torch

from compress.graph.layer_gram import GRAM_BLOCK, add_products_, hessian_factor, mirror_


def test_the_factor_equals_numpys() -> None:
    drawn = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 9, 5)))
    drawn[1, :, 2] = 0
    moments = drawn.mT @ drawn
    before = moments.clone()
    for moment, factor in zip(moments.numpy(), hessian_factor(moments).numpy(), strict=True):
        damped = moment + 0.01 * np.diag(moment).mean() * np.eye(5)
        damped[np.diag(moment) == 0, np.diag(moment) == 0] = 1
        inverse = np.linalg.cholesky(np.linalg.inv(damped)).T
        assert np.allclose(factor, np.linalg.inv(inverse), rtol=1e-10, atol=1e-12)
        assert np.array_equal(factor, np.triu(factor))
        assert (np.diag(factor) > 0).all()
    assert torch.equal(moments, before), "the caller's sums"


def test_an_input_that_is_always_zero_is_independent() -> None:
    assert torch.equal(hessian_factor(torch.zeros(3, 3)), torch.eye(3))


def test_half_of_a_gram_matrix_gives_the_other() -> None:
    drawn = np.random.default_rng(0).standard_normal((2, 2, 5, GRAM_BLOCK * 2 + 7))
    gram = torch.zeros(2, *[drawn.shape[-1]] * 2, dtype=torch.float64)
    for columns in torch.from_numpy(drawn):
        add_products_(gram, columns)
    expected = drawn.swapaxes(-1, -2) @ drawn
    assert np.allclose(mirror_(gram).numpy(), expected.sum(0), rtol=1e-12, atol=1e-12)
