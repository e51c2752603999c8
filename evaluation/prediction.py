"""Predictions of a trained model, as JSON objects."""

from collections.abc import Iterator
from typing import Any

from jax.experimental.multihost_utils import process_allgather

from lineage.evaluation.base import Context
from lineage.evaluation.sampling import Sampler


def predict(context: Context, variables: Any, split: str) -> Iterator[dict[str, Any]]:
    """Yield one object for each example of a split, in the format of the task.

    Raises:
        ValueError: there is no such split, or the task has no predictions.
    """
    data, task = context.data, context.task
    if split not in data.splits:
        raise ValueError(f"There is no split {split!r}: the data's splits are {', '.join(data.splits) or 'none'}.")
    batches = data.splits[split]
    if context.model.is_decoder:
        yield from _generated(context, variables, batches)
        return
    step = context.step(task.forward)
    for batch in batches:
        placed = context.to_mesh(batch)
        outputs, whole = process_allgather((step(variables, placed), placed), tiled=True)
        yield from task.predict(outputs, whole, data.facts)


def _generated(context, variables, batches):
    sampler = Sampler(context)
    for batch in batches:
        batch = process_allgather(context.to_mesh(batch), tiled=True)
        prompts, lengths, inputs = context.task.requests(batch, context.data.facts)
        written = process_allgather(sampler.generate(variables, prompts, inputs, lengths), tiled=True)
        texts = sampler.texts(prompts, written, lengths)
        yield from ({"text": text} for text, real in zip(texts, batch["mask"].any(axis=1)) if real)
