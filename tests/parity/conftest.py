"""What the parity tests share: references with random weights, and their gradients in our layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from models import convert

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture
def randomise():
    """Fills every parameter: also the scales, biases, tables and tokens that start at one or zero."""

    def fill(reference, seed, scale=0.15):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                centre = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
                parameter.copy_(centre + scale * torch.randn(parameter.shape, generator=generator))
        return reference.eval()

    return fill


@pytest.fixture
def ours(tmp_path):
    """A reference as our model and variables, by way of a folder."""

    def load(reference, **settings):
        reference.save_pretrained(tmp_path / "reference")
        return convert.load(tmp_path / "reference", **settings)

    return load


@pytest.fixture
def gradients(ours):
    """The reference's gradients as our parameters: each takes its parameter's place, and the folder is loaded."""

    def collect(reference):
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.copy_(parameter.grad)
        return ours(reference)[1]["params"]

    return collect


@pytest.fixture
def assert_same_gradients():
    def check(found, expected, relative=1e-4):
        """Each within `relative` of its largest entry; a key's bias has none but rounding, for it moves no softmax."""
        largest = max(jnp.abs(value).max() for value in jax.tree.leaves(expected))
        for (path, value), other in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True):
            allowed = relative * np.abs(value).max() + 1e-7 * largest
            np.testing.assert_allclose(other, value, rtol=0, atol=allowed, err_msg=jax.tree_util.keystr(path))

    return check
