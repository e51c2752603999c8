"""Reading of checkpoints, which verifies the hashes of the arrays and tells damage from other errors."""

import contextlib
import errno
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from flax.traverse_util import flatten_dict

from lineage.configs import schema
from lineage.configs.atomic import absolute, regular
from lineage.configs.registry import nearest
from lineage.data.fingerprint import files_below
from lineage.runs.folder import DamagedError, last_step, read_record
from lineage.train import distributed
from lineage.train.adapters import ADAPTERS
from lineage.train.step import TrainState

DESCRIPTION = "_CHECKPOINT_METADATA"  # file in the folder of a checkpoint, with its time
BLOCK = 1 << 16  # number of values hashed at a time on the host; fits a CPU's cache


def read_variables(workdir: Path) -> dict[str, Any]:
    """Return the variables of a run's model, on the host, from its newest checkpoint (see `read_newest`)."""
    state = read_newest(workdir)
    return {"params": state.adapter.apply(state.frozen, state.params), **state.collections}


def read_newest(workdir: Path) -> TrainState:
    """Return the parts of a run's newest state that its model needs, as numpy arrays on the host.

    The state has the parameters (their average if one is kept) as `params`, the collections and the adapter's frozen
    parameters; the optimizer's state and `ema` are None.
    """
    folder = absolute(workdir) / "checkpoints"
    if not last_step(workdir):
        raise FileNotFoundError(f"there is no checkpoint in {folder}.")
    return read_chosen(partial(last_step, workdir), lambda step: _read_model(folder / str(step)))


def read_chosen(choose: Callable[[], int], read: Callable[[int], Any]) -> Any:
    """Return `read(step)` of the chosen checkpoint; if it is damaged and `choose` now returns another, read that.

    A run in progress deletes checkpoints while others read them.
    """
    step = choose()
    while True:
        try:
            return read(step)
        except DamagedError:
            before, step = step, choose()
            if step == before:
                raise


def read_checkpoint(folder: Path, target: TrainState) -> TrainState:
    """Read the whole state in the folder of a step and verify its hashes; transient errors are retried once.

    If one process cannot read its part, all processes raise.

    Args:
        target: arrays, or shapes with shardings.

    Raises:
        DamagedError: the checkpoint is damaged, or its shapes are not those of the target.
        ValueError: the checkpoint was written by an earlier version.
        OSError, MemoryError: the checkpoint cannot be read, although it may be intact.
    """
    error, damage = None, f"the checkpoint {folder} is damaged or of another model than the config's"
    try:
        state, hashes = _retried(_read_state, folder, target, damage)
    except (ValueError, OSError, MemoryError) as caught:
        error = caught
    if failed := distributed.failures(error is not None):
        unread = distributed.failures(not isinstance(error, DamagedError | None))
        if unread and isinstance(error, DamagedError | None):
            error = OSError(f"process {unread[0]} cannot read its part of the checkpoint {folder}.")
        error = error or DamagedError(f"{damage}: process {failed[0]} cannot read its part")
    if error:
        raise error
    if hash_leaves(state) != hashes:
        raise DamagedError(f"{damage}: its hashes do not match")
    return state


def _retried(read, *args):
    try:
        return read(*args)
    except (OSError, MemoryError):  # may be transient
        return read(*args)


@contextlib.contextmanager
def _reader(folder: Path, damage: str) -> Iterator[ocp.Checkpointer]:
    """Yield a reader that does not wait for other processes, so that a process that fails does not block them.

    Errors in the block become OSError or MemoryError if they may be transient, and otherwise DamagedError with a
    message that begins with `damage`.
    """
    index = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=index, active_processes={index})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    try:
        _ = [regular(path) for path in folder.rglob("*")]
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
            yield reader
    except (jax.errors.JaxRuntimeError, MemoryError):  # too little memory, or a lost process
        raise
    except Exception as error:  # Orbax raises exceptions of many types, including bare Exception
        for candidate in (error, unreadable(folder)):
            if (number := error_number(candidate)) not in (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
                raise OSError(number, os.strerror(number), str(folder)) from error
        reason = " ".join(str(error).split())[:200] or type(error).__name__  # an AssertionError has no text
        raise DamagedError(f"{damage}: {reason}") from error


def _tree(reader, state):
    """Return the metadata of the arrays in the folder of a state, as a tree."""
    # If the database is damaged, Orbax would leave reads unfinished, which print tracebacks when its event loop closes.
    place = {"driver": "file", "path": f"{state}/"}
    keys = tensorstore.KvStore.open({"driver": "ocdbt", "base": place}).result().list().result()
    if not keys:  # the manifest is missing or a folder
        raise ValueError(f"the description of the arrays in {state} cannot be read")
    return reader.handler.metadata(epath.Path(state)).tree


def _read_state(folder, target, damage):
    """Return the whole state, and the expected hashes of its arrays."""
    record, places = read_record(folder), ocp.checkpoint_utils.construct_restore_args(target)
    args = ocp.args.PyTreeRestore(target, restore_args=places)
    with _reader(folder, damage) as reader:
        check_size(_tree(reader, folder / "state"), folder)
        return reader.restore(folder / "state", args=args), record["hashes"]


def _read_model(folder):
    """Return the state in the folder of a step as `read_newest` does."""
    record, fields = _retried(read_fields, folder, ("ema", "collections", "frozen"))
    params = fields.get("ema") or _retried(read_fields, folder, ("params",))[1].get("params")
    if not isinstance(params, dict) or not all(hasattr(leaf, "shape") for leaf in flatten_dict(params).values()):
        raise DamagedError(f"the checkpoint {folder} is damaged: its parameters are not arrays with names")
    with _reader(folder, f"the checkpoint {folder} is damaged"):  # its record may lack an entry
        section, step = schema.tuples(record["config"]["adapter"]), record["next_batch"]
        name, adapter = section["name"], schema.build(ADAPTERS, section) if section["name"] in ADAPTERS else None
    if adapter is None:
        raise ValueError(f"{folder} has the unknown adapter {name!r}.{nearest(name, sorted(ADAPTERS))}")
    collections, frozen = fields.get("collections", {}), fields.get("frozen")
    return TrainState(step, params, None, collections, None, frozen=frozen, adapter=adapter)


def read_fields(folder: Path, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the record in the folder of a step, and fields of its state as numpy arrays with verified hashes.

    Empty fields are omitted. Raises the errors of `read_checkpoint`.
    """
    record, state = read_record(folder), absolute(folder) / "state"  # Orbax finds nothing in a relative folder
    damage = f"the checkpoint {folder} is damaged"
    with _reader(folder, damage) as reader:
        saved = _tree(reader, state)
        wanted = {name: saved[name] for name in names if saved.get(name)}
        check_size(wanted, folder)
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        args = ocp.args.PyTreeRestore(item=wanted, restore_args=kinds, partial_restore=True)
        fields = reader.restore(state, args=args) if wanted else {}
        hashes = jax.tree.unflatten(jax.tree.structure(TrainState(**saved)), record["hashes"])
    for name, value in fields.items():
        # Named tuples of an optimizer's state, such as Prodigy's, are dictionaries on disk: their fields are sorted.
        order = sorted if name == "opt_state" else list
        if order(map(hash_array, jax.tree.leaves(value))) != order(jax.tree.leaves(getattr(hashes, name))):
            raise DamagedError(f"{damage}: the hashes of {name} do not match")
    return record, fields


def hash_leaves(state: Any) -> list[int]:
    """Return a 32-bit hash of each leaf of a state, independent of its sharding; Orbax stores no hashes."""
    return [int(value) for value in jax.device_get(_device_hashes(jax.tree.leaves(state)))]


@jax.jit
def _device_hashes(leaves):
    return [_device_hash(leaf) for leaf in jax.device_put(leaves, jax.memory.Space.Device)]


def _device_hash(leaf):
    """Return the sum of a hash of each value's bits and its index; the sum does not depend on the order."""
    words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    bits = leaf if leaf.dtype == bool else jax.lax.bitcast_convert_type(leaf, words[leaf.dtype.itemsize])
    index, stride = jnp.uint32(0), 1
    for axis in reversed(range(leaf.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * np.uint32(stride % 2**32)
        stride *= leaf.shape[axis]
    return jnp.sum(_mixed(bits.astype(jnp.uint32) ^ _mixed(index)), dtype=jnp.uint32)


def hash_array(array: np.ndarray) -> int:
    """Return the same hash, computed on the host, for arrays that may not fit on a device."""
    bits, total = array.reshape(-1).view(f"u{array.itemsize}"), 0
    for start in range(0, bits.size, BLOCK):
        part = bits[start : start + BLOCK].astype(np.uint32)
        index = np.arange(len(part), dtype=np.uint32) + np.uint32(start % 2**32)
        total += int(_mixed(part ^ _mixed(index)).sum(dtype=np.uint32))
    return total % 2**32


def _mixed(words):
    """Return the finalizer of MurmurHash3 of 32-bit words, a bijection that changes half of the bits on average."""
    words = (words ^ words >> 16) * np.uint32(0x85EBCA6B)
    words = (words ^ words >> 13) * np.uint32(0xC2B2AE35)
    return words ^ words >> 16


def check_description(path: Path) -> None:
    """Raise ValueError if Orbax cannot use its description of a checkpoint, which it does not need.

    Orbax ignores a file that is missing or not JSON.
    """
    try:
        _ = ocp.path.step.Metadata(step=0, path=epath.Path(path.parent)).commit_timestamp
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({str(error)[:200]}): restore or delete it.") from None


def check_size(arrays: Any, folder: Path) -> None:
    """Raise ValueError if arrays, given by Orbax's metadata, need far more memory than the files in their folder."""
    needed = 0
    for leaf in jax.tree.leaves(arrays):
        chunk = leaf.storage.chunk_shape if leaf.storage else None  # a chunk, which is read as a whole, may be larger
        needed += max(math.prod(leaf.shape), math.prod(chunk or ())) * np.dtype(leaf.dtype).itemsize
    if needed > 10**8 + 100 * sum(path.stat().st_size for path in folder.rglob("*")):
        raise ValueError(f"its arrays would need {needed:,} bytes")


def error_number(error: BaseException | None) -> int | None:
    """Return the errno of an error or of the one that caused it; None if there is none.

    TensorStore, which reads and writes the arrays, raises ValueError with the number only in the message, and Orbax
    raises another error from it.
    """
    number: int | None = None
    while error and not number:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        number = error.errno if isinstance(error, OSError) else code and int(code[1])
        number = errno.ENOMEM if isinstance(error, MemoryError) else number
        number = errno.EAGAIN if "can't start new thread" in str(error) else number  # a plain RuntimeError
        error = error.__cause__ or error.__context__
    return number


def unreadable(folder: Path) -> OSError | None:
    """Return the error of a file or folder that cannot be opened, which Orbax may hide; None if there is none."""
    try:
        for file in files_below(folder):
            os.close(os.open(file, os.O_RDONLY | os.O_NONBLOCK))  # a pipe would block without a writer
        return None
    except OSError as error:
        return error
