import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from lineage.train.sharding import AXES


@pytest.fixture
def gpu_program():
    """Return a function that lowers another for an H100, which no device needs to be, and returns the program."""

    def lower(function, *arguments):
        device = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")  # for which jaxlib 0.11 and newer ask
        ones, types = (1,) * len(AXES), (AxisType.Auto,) * len(AXES)
        with jax.sharding.use_abstract_mesh(AbstractMesh(ones, AXES, axis_types=types, abstract_device=device)):
            return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()

    return lower
