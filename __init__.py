"""Lineage: the Transformer and its family in JAX and Flax."""

from collections.abc import Mapping
from os import PathLike
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lineage.train.trained import Trained

__all__ = ["load"]
__version__ = "0.1.0"


def load(
    path: str | PathLike[str],
    *,
    task: str = "",
    checkpoint: Literal["latest", "best"] = "latest",
    changes: Mapping[str, Any] = MappingProxyType({}),
    force_config: bool = False,
) -> "Trained":
    """Return the trained model in a folder, with the methods `predict`, `generate` and `embed`.

    Args:
        path: folder of a run, or folder in the layout of `transformers`.
        task: name of the task of a folder in the layout of `transformers`, such as "text_classification".
        checkpoint: checkpoint of a run; "best" is chosen by the config's `checkpoint.best`.
        changes: config keys with their values, such as {"sampling.temperature": 0.0}.
        force_config: accept changed keys on which the training of a run depends, such as "seed".

    Raises:
        FileNotFoundError: the folder has no model.
        ValueError: a file is damaged, or the model cannot do the task.
    """
    from lineage.train import trained  # imported here so that `import lineage` is fast

    return trained.load(path, task=task, checkpoint=checkpoint, changes=changes, force_config=force_config)
