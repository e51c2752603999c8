"""Evaluators of a run."""

from collections.abc import Mapping
from typing import Any

from lineage.evaluation.base import Context, Evaluator, Split


class Evaluation:
    """Evaluators of a run, by their names in `config.evaluators`."""

    def __init__(self, context: Context, evaluators: Mapping[str, Evaluator]):
        """Raise ValueError for an evaluator that does not fit the task or the model, or whose split does not exist."""
        self.context, self.evaluators = context, evaluators
        for name, evaluator in evaluators.items():
            evaluator.check(context)
            known = list(context.data.splits)
            if evaluator.split and not evaluator.source and evaluator.split not in known:
                splits = ", ".join(known) or "none"
                raise ValueError(f"evaluators.{name}.split is {evaluator.split!r}, but the data's splits are {splits}.")
        self._opened: dict[str, Any] = {}

    def __call__(self, variables: Any, number: int | None = None) -> dict[str, float]:
        """Return the metrics of all splits, as "split/metric".

        Args:
            variables: model variables, with the EMA of the parameters if enabled.
            number: number of this evaluation in the run, starting at 1; evaluators that are not due are skipped. None:
                run all evaluators.
        """
        self.context.cache.clear()
        metrics: dict[str, float] = {}
        for name, evaluator in self.evaluators.items():
            if not evaluator.every or (number is not None and number % evaluator.every):
                continue
            for split in self._splits(name, evaluator):
                values = evaluator.measure(self.context, variables, split)
                metrics |= {f"{split.label}/{key}": value for key, value in values.items()}
        order = {split: place for place, split in enumerate(self.context.data.splits)}
        return dict(sorted(metrics.items(), key=lambda item: order.get(item[0].partition("/")[0], len(order))))

    def _splits(self, name: str, evaluator: Evaluator) -> list[Split]:
        """Return the splits that an evaluator evaluates."""
        data = self.context.data
        if evaluator.source:
            if evaluator.source not in self._opened:
                self._opened[evaluator.source] = self.context.open(evaluator.source)
            data = self._opened[evaluator.source]
        chosen = {split: batches for split, batches in data.splits.items() if evaluator.split in ("", split)}
        if not evaluator.source:
            return [Split(split, split, batches, data.facts) for split, batches in chosen.items()]
        one = len(chosen) == 1
        return [Split(name if one else f"{name}_{k}", k, batches, data.facts) for k, batches in chosen.items()]
