"""What a training run is at a step: everything that a checkpoint must hold."""

from typing import Any

import jax
from flax import struct

from lineage.train.adapters import merged


@struct.dataclass
class TrainState:
    """The state after `step` steps.

    Random numbers and batches are functions of (seed, step), so neither is part of it.
    """

    step: Any  # the number of steps done, int32
    params: Any  # that are trained: of an adaptation (see `models.adapt`), these alone
    opt_state: Any
    collections: Any  # dict: what modules update in training beside the parameters, such as running statistics, and an
    # adaptation's "base"
    ema: Any  # the exponential moving average of the parameters; None when none is kept

    def variables(self, average: bool = False) -> dict[str, Any]:
        """What `model.apply` takes; with `average`, the moving average in the parameters' place where there is one."""
        params = self.ema if average and self.ema is not None else self.params
        variables = {"params": params, **self.collections}
        return jax.jit(merged)(variables) if "base" in variables else variables
