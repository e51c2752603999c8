"""Metrics of the loss of a task."""

from dataclasses import dataclass
from typing import Any

from lineage.evaluation.base import EVALUATORS, Context, Evaluator, Split


@EVALUATORS.register("loss")
@dataclass(frozen=True)
class Loss(Evaluator):
    """Metrics that the loss of the task returns, over a whole split, and metrics derived from them."""

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        """Return the metrics of a split.

        The memory of the model is empty before the first batch. The states of a batch are merged on the host while the
        next batch is computed.
        """
        step = context.step(context.task.loss, mutable=("memory",))
        merged, memory, waiting = {}, {}, None
        variables = {name: value for name, value in variables.items() if name != "memory"}
        for batch in split.batches:
            (_, _, states), memory = step({**variables, **memory}, context.teach(context.to_mesh(batch)))
            merged, waiting = _merge(merged, waiting), states
        metrics = {name: float(state.compute()) for name, state in _merge(merged, waiting).items()}
        return metrics | context.task.derived(metrics, split.facts, split.name)


def _merge(merged, states):
    if states is None:
        return merged
    states = {name: state.to_host() for name, state in states.items()}
    return {name: merged[name].merge(state) if merged else state for name, state in states.items()}
