"""Tolerances that follow the magnitude of the values and float32 arithmetic."""

import numpy as np
from numpy.typing import ArrayLike


def ulps(reference: ArrayLike, n: int = 40) -> float:
    """Return `n` units in the last place of float32 at the magnitude of the reference, or at 2 if it is smaller.

    The compared values are sums of about 40 terms (32 products and some residual additions) in two different orders.
    Each addition errs by at most half a unit in the last place of a partial sum, and normalized activations reach 2.
    """
    return n * float(np.spacing(np.float32(max(2.0, np.abs(np.asarray(reference)).max(initial=0.0)))))


def assert_close(actual: ArrayLike, expected: ArrayLike, n: int = 40, err_msg: str = "") -> None:
    """Assert that values differ by at most `ulps(expected, n)`."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=ulps(expected, n), err_msg=err_msg)
