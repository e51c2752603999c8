"""COCO's evaluation of object detection."""

from dataclasses import dataclass
from typing import Any

from jax.experimental.multihost_utils import process_allgather

from lineage.evaluation.base import EVALUATORS, Context, Evaluator, Split
from lineage.metrics.detection import Detections, coco
from lineage.tasks.object_detection import objects_of


@EVALUATORS.register("detection")
@dataclass(frozen=True)
class Detection(Evaluator):
    """COCO's average precisions of detected objects; those by object size would need the images' original pixels."""

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        state, step = Detections.empty(split.facts.num_classes), context.step(context.task.forward)
        for batch in split.batches:
            batch = context.to_mesh(batch)
            answer = step(variables, batch)
            del batch["image"]
            batch, answer = process_allgather((batch, answer), tiled=True)
            for true, found in zip(*objects_of(batch, *answer)):
                state = state.update(len(state.images), **found, **{f"true_{name}": of for name, of in true.items()})
        result = coco(state)
        context.artifacts[f"precision_{split.label}"] = {"precision": result.curves()}
        values = result.summary()
        return {name: values[name] for name in ("ap", "ap_50", "ap_75")}
