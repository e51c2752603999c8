"""The metrics of a task's loss."""

from dataclasses import dataclass
from typing import Any

from lineage.evaluation.base import EVALUATORS, Context, Evaluator, Split


@EVALUATORS.register("loss")
@dataclass(frozen=True)
class Loss(Evaluator):
    """The metrics that a task's loss returns, over a whole split, and those derived from them, such as perplexity."""

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        """Return the metrics, every example counted once.

        A model's memory goes from batch to batch, and is empty before the first. The states of a batch are merged on
        the host while the next batch is computed.
        """
        merged, memory, waiting = {}, {}, None
        variables = {name: value for name, value in variables.items() if name != "memory"}
        for batch in split.batches:
            context.check_batch(len(batch["mask"]) * split.batches.process_count)
            states, memory = context.loss_step({**variables, **memory}, context.teach(context.to_mesh(batch)))
            merged, waiting = _merge(merged, waiting), states
        metrics = {name: float(state.compute()) for name, state in _merge(merged, waiting).items()}
        return metrics | context.task.derived(metrics, split.facts, split.name)


def _merge(merged, states):
    if states is None:
        return merged
    states = {name: state.to_host() for name, state in states.items()}
    return {name: merged[name].merge(state) if merged else state for name, state in states.items()}
