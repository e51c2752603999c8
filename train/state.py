"""The state of a training run: everything that a checkpoint must hold."""

from typing import Any

import jax
from flax import struct

from lineage.train.adapters import NO_ADAPTER, Adapter


@struct.dataclass
class TrainState:
    """The state after `step` steps.

    Random numbers and batches are functions of (seed, step), so neither is part of it.

    Attributes:
        step: number of completed steps, int32.
        params: trained parameters; with an adapter, the adapter's alone.
        opt_state: state of the optimizer.
        collections: dict of the variables that modules update in training besides the parameters, such as running
            statistics.
        ema: exponential moving average of `params`; None if none is kept.
        frozen: what the adapter does not train; None without an adapter.
        adapter: makes the model's parameters of `params` and `frozen`.
    """

    step: Any
    params: Any
    opt_state: Any
    collections: Any
    ema: Any
    frozen: Any = None
    adapter: Adapter = struct.field(pytree_node=False, default=NO_ADAPTER)

    def variables(self, average: bool = False) -> dict[str, Any]:
        """Return the variables of the model, as `model.apply` takes them.

        Args:
            average: use the exponential moving average of the parameters, if one is kept.
        """
        params = self.ema if average and self.ema is not None else self.params
        if self.frozen is not None:
            params = _apply(self.adapter, self.frozen, params)
        return {"params": params, **self.collections}


@jax.jit
def _apply(adapter, frozen, params):
    return adapter.apply(frozen, params)
