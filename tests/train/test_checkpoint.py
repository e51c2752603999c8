"""Checkpoints: exact restoration, retention and errors."""

import errno
import json
import os
import resource
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.configs.run import Checkpoint
from lineage.runs.folder import DamagedError, read_record
from lineage.train import checkpoint, hashes
from lineage.train.checkpoint import Checkpoints, clean, read_newest
from lineage.train.step import TrainState
from tests.tiers import tiered

# If the read of one array fails, Orbax leaves the reads of the others unfinished.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def state(step=3, width=64, **more):
    params = {"kernel": jax.random.normal(jax.random.key(step), (width, width)), "bias": jnp.ones(width)} | more
    averages = {
        "count": jnp.arange(5, dtype=jnp.int8),
        "seen": jnp.array([True, False]),
        "low": jnp.ones(3, jnp.bfloat16),
    }
    return TrainState(jnp.int32(step), params, (jnp.full(width, -0.0),), averages, jax.tree.map(jnp.copy, params))


def target(state):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state)


def save(folder, *states, metrics=(), **options):
    with Checkpoints(folder, Checkpoint(**options)) as checkpoints:
        for each, values in zip(states, metrics or [{}] * len(states)):
            checkpoints.save(each, {"adapter": {"name": "none"}}, values)


def restore(folder, like=None, step=None):
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(target(like or state()), step)


def assert_equal(restored, expected):
    for leaf, other in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == other.dtype
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes()


@contextmanager
def full_disk(limit):
    """Simulate a full disk: writes beyond `limit` bytes per file fail in the operating system.

    This affects C++ and Python alike and needs no separate file system; Python ignores the accompanying signal.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_restore_is_bit_exact(tmp_path):
    save(tmp_path, state())
    assert_equal(restore(tmp_path), state())


def test_asynchronous_save_is_not_affected_by_donation(tmp_path):
    change = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0, state), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        now = state()
        checkpoints.save(now, {}, {})
        change(now)  # reuses its buffers at once
    assert_equal(restore(tmp_path), state())


def test_newest_and_best_are_kept(tmp_path):
    losses = [{"loss": 2.0}, {"loss": 1.0}, {}, {"loss": 3.0}, {"loss": 1.5}]
    save(tmp_path, *map(state, range(1, 6)), metrics=losses, keep=2, best="loss")
    with Checkpoints(tmp_path, Checkpoint(keep=2, best="loss")) as checkpoints:
        assert (checkpoints.best, checkpoints.latest) == (2, 5)
        assert_equal(checkpoints.restore(target(state()), 2), state(2))
        assert sorted(int(path.name) for path in checkpoints.folder.iterdir()) == [2, 4, 5]
    save(tmp_path, state(6), metrics=[{"loss": 0.5}], keep=2, best="loss")  # after resuming
    with Checkpoints(tmp_path, Checkpoint(keep=2, best="loss")) as checkpoints:
        assert checkpoints.best == 6


def test_best_can_be_the_highest(tmp_path):
    accuracies = [{"accuracy": 0.2}, {"accuracy": 0.9}, {"accuracy": 0.5}, {"accuracy": float("nan")}]
    save(tmp_path, *map(state, (1, 2, 3, 4)), metrics=accuracies, best="accuracy")
    with Checkpoints(tmp_path, Checkpoint(best="accuracy")) as checkpoints:
        assert (checkpoints.best, checkpoints.latest) == (2, 4)


def test_metrics_without_that_of_the_best_raise(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint\.best is 'loss': it must be one of accuracy, time"):
        save(tmp_path, state(), metrics=[{"accuracy": 1.0, "time": 2.0}], best="loss")
    save(tmp_path, state(), best="loss")  # before the first evaluation
    assert_equal(restore(tmp_path), state())


def test_entries_of_a_record_are_replaced(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state(), {"seed": 1}, {"loss": 1.0}, lines=4)
        checkpoints.wait()
        before = read_record(tmp_path / "checkpoints" / "3")
        for process, lines in ((1, 4), (0, 5)):  # the first process writes
            monkeypatch.setattr(jax, "process_index", lambda process=process: process)
            checkpoints.amend(3, lines=5)
            assert checkpoints.record(3)["lines"] == 5
            assert read_record(tmp_path / "checkpoints" / "3") == before | {"lines": lines}
    assert_equal(restore(tmp_path), state())


def test_remains_of_interrupted_saves_are_deleted(tmp_path, monkeypatch):
    partial = ".run.json.host.7.partial"
    left = [f"checkpoints/4.orbax-checkpoint-tmp-7/{partial}", partial, f"artifacts/{partial}"]
    kept = [f"checkpoints/4/{partial}", "artifacts/run.json"]
    for name in left + kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for process, expected in ((1, left + kept), (0, kept)):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        clean(tmp_path)
        assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {*expected}
    assert not [*tmp_path.glob("checkpoints/*tmp*")]


def test_saved_step_is_kept_and_unfinished_step_is_rewritten(tmp_path):
    save(tmp_path, state(3))
    save(tmp_path, state(3).replace(params=state(4).params))
    assert_equal(restore(tmp_path), state(3))
    unfinished = tmp_path / "checkpoints" / "4.orbax-checkpoint-tmp"
    (unfinished / "state.orbax-checkpoint-tmp").mkdir(parents=True)
    assert_equal(restore(tmp_path), state(3))
    save(tmp_path, state(4))
    assert_equal(restore(tmp_path), state(4))


def test_missing_checkpoint_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"there is no checkpoint in {tmp_path}"):
        restore(tmp_path)
    save(tmp_path, state())
    with pytest.raises(FileNotFoundError, match="there is no checkpoint of step 7 in"):
        restore(tmp_path, step=7)


def largest_file(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(data, at=0.5):
    place = int(len(data) * at)
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


@pytest.mark.parametrize("damage", [flip, lambda data: data[: len(data) // 2], lambda data: b"", None])
def test_damaged_checkpoint_raises(damage, tmp_path):
    save(tmp_path, state())
    path = largest_file(tmp_path)
    assert path.stat().st_size > 10_000
    if damage:
        path.write_bytes(damage(path.read_bytes()))
    else:
        path.unlink()
    with pytest.raises(ValueError, match=r"the checkpoint .*/checkpoints/3 is damaged or of another model") as error:
        restore(tmp_path)
    assert len(str(error.value)) < 500
    assert "\n" not in str(error.value)


def test_read_newest_returns_the_saved_parameters(tmp_path):
    """Check the parameters from which another run starts: the average if there is one."""
    save(tmp_path, state().replace(ema=state(4).params))
    found = read_newest(tmp_path)
    assert_equal([found.params, found.collections], [state(4).params, state().collections])
    save(tmp_path / "none", state().replace(ema=None))
    assert_equal(read_newest(tmp_path / "none").params, state().params)


@pytest.mark.parametrize("damage", [flip, lambda data: data[:99], None])
def test_read_newest_of_damaged_checkpoint_raises(damage, tmp_path):
    """Check a checkpoint without average, so that the damaged file contains the parameters."""
    save(tmp_path, state().replace(ema=None))
    path = largest_file(tmp_path)
    if damage:
        path.write_bytes(damage(path.read_bytes()))
    else:
        shutil.rmtree(tmp_path / "checkpoints" / "3" / "state")
    with pytest.raises(ValueError, match=r"the checkpoint .*/checkpoints/3 is damaged: "):
        read_newest(tmp_path)


@tiered("at", [0.1, 0.3, 0.7, 0.9])
def test_flipped_bit_is_detected(at, tmp_path):
    save(tmp_path, state())
    path = largest_file(tmp_path)
    path.write_bytes(flip(path.read_bytes(), at))
    with pytest.raises(ValueError, match="is damaged"):
        restore(tmp_path)


@pytest.mark.parametrize(
    "other", [state(width=96), state(width=32), state(gate=jnp.ones(3)), state().replace(ema=None)]
)
def test_checkpoint_of_another_model_raises(other, tmp_path):
    save(tmp_path, state())
    with pytest.raises(ValueError, match=r"the checkpoint .*/checkpoints/3 is damaged or of another model"):
        restore(tmp_path, other)


def test_full_disk_raises_and_keeps_checkpoints(tmp_path):
    save(tmp_path, state(3))
    with (
        full_disk(8_000),
        pytest.raises(OSError, match=r"a checkpoint could not be written to .*/checkpoints \(File too"),
    ):
        save(tmp_path, state(4))
    assert_equal(restore(tmp_path), state(3))
    save(tmp_path, state(4))  # there is space again
    assert_equal(restore(tmp_path, step=4), state(4))


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def flip_two_signs(words):
    words[[3, 70]] ^= 1 << 8 * words.itemsize - 1


def move_one_bit_up_and_one_down(words):
    words[3] += 4
    words[70] -= 4


def swap_two(words):
    words[[3, 70]] = words[[70, 3]]


def rotate(words):
    words[:] = np.roll(words, 1)


@pytest.mark.parametrize("corrupt", [flip_two_signs, move_one_bit_up_and_one_down, swap_two, rotate])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32"])
def test_corruption_that_keeps_the_sum_of_the_bits_is_detected(corrupt, dtype):
    right = np.asarray(jnp.arange(10, 110).astype(dtype)).copy()
    wrong = right.copy()
    corrupt(bits(wrong))
    total = 2 ** (8 * right.itemsize)
    assert bits(right).sum(dtype=np.uint64) % total == bits(wrong).sum(dtype=np.uint64) % total
    for hashed in (hashes.hash_array, lambda array: hashes.hash_leaves([array])[0]):
        assert hashed(right) != hashed(wrong)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (8, 16), (16, 8, 24)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_hash_depends_on_the_values_only(shape, dtype, monkeypatch):
    """Check equal hashes of a host's blocks, one device and any sharding, and known values of the hash."""
    monkeypatch.setattr(hashes, "BLOCK", 100)
    array = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    expected = sum(murmur(int(word) ^ murmur(index)) for index, word in enumerate(bits(np.asarray(array)))) % 2**32
    assert hashes.hash_array(np.asarray(array)) == expected
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    for spec in [(), ("a",), ("b", "a"), (None, ("a", "b"))]:
        if len(spec) <= len(shape) and 0 not in shape and shape != (1,):
            array = jax.device_put(array, jax.NamedSharding(mesh, jax.P(*spec)))
        assert hashes.hash_leaves([array]) == [expected]


def murmur(word):
    """Return the finalizer of MurmurHash3 with Python's integers."""
    word = (word ^ word >> 16) * 0x85EBCA6B % 2**32
    word = (word ^ word >> 13) * 0xC2B2AE35 % 2**32
    return word ^ word >> 16


def record_file(folder, step):
    return folder / "checkpoints" / str(step) / "about" / "metadata"


def test_flipped_bit_in_a_record_is_detected(tmp_path):
    save(tmp_path, state())
    path = record_file(tmp_path, 3)
    path.write_text(path.read_text().replace('"name": "none"', '"name": "nonf"'))
    for read in (restore, read_newest):
        with pytest.raises(ValueError, match=r"checkpoints/3 is damaged: the checksum of .*/about/metadata does not"):
            read(tmp_path)


def test_checkpoint_of_an_earlier_version_raises_and_is_kept(tmp_path):
    save(tmp_path, state(3), state(4), keep=2)
    path = record_file(tmp_path, 4)
    path.write_text(json.dumps({"next_batch": 4, "config": {}, "checksums": [1, 2]}))
    for read in (restore, read_newest):
        with pytest.raises(
            ValueError, match=r"checkpoints/4 has sums of bits .* written by an earlier version"
        ) as error:
            read(tmp_path)
        assert not isinstance(error.value, checkpoint.DamagedError)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "4"]


@pytest.mark.parametrize("content", [b"", b"[]", b"crc", b"\xff", None])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_damaged_record_does_not_stop_the_choice_of_the_best(content, step, tmp_path, capsys):
    """Check the record of the best, of an old and of the newest checkpoint: the best of the others is the best."""
    losses = [{"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0}]
    save(tmp_path, *map(state, (1, 2, 3)), metrics=losses, keep=3, best="loss")
    path = record_file(tmp_path, step)
    if content == b"crc":
        path.write_text(json.dumps(json.loads(path.read_text()) | {"crc32": 0}))
    elif content is not None:
        path.write_bytes(content)
    else:
        path.unlink()
    with Checkpoints(tmp_path, Checkpoint(keep=3, best="loss")) as checkpoints:
        assert checkpoints.best == (2 if step == 1 else 1)
        checkpoints.save(state(4), {}, {"loss": 2.5})
        checkpoints.wait()
        assert_equal(checkpoints.restore(target(state()), 4), state(4))
    assert f"the checkpoint {tmp_path}/checkpoints/{step} is damaged: " in capsys.readouterr().err


class Unreadable:
    """Errors raised by the first reads of arrays."""

    def __init__(self, monkeypatch, *errors):
        self.errors, self.reads = list(errors), 0
        real = checkpoint.ocp.Checkpointer.restore

        def restore(*args, **kwargs):
            self.reads += 1
            if self.errors:
                raise self.errors.pop(0)
            return real(*args, **kwargs)

        monkeypatch.setattr(checkpoint.ocp.Checkpointer, "restore", restore)


PASSING = [
    PermissionError(errno.EACCES, "Permission denied", "d/0"),
    OSError(errno.ESTALE, "Stale file handle"),
    OSError(errno.EIO, "Input/output error"),
    ValueError(f"Error reading local file [source locations='x'] [os_error_code='{errno.EACCES}']"),
    MemoryError("Unable to allocate 8 GiB"),
]


@pytest.mark.parametrize("error", PASSING, ids=str)
@pytest.mark.parametrize("times", [1, 2])
def test_read_error_that_may_pass_costs_no_checkpoint(error, times, tmp_path, monkeypatch):
    save(tmp_path, state(3), state(4), keep=2)
    for read, expected in ((lambda: restore(tmp_path), state(4)), (lambda: read_newest(tmp_path).params, state(4).ema)):
        unreadable = Unreadable(monkeypatch, *[error] * times)
        if times == 1:
            assert_equal(read(), expected)
        else:
            with pytest.raises((OSError, MemoryError), match=r"denied|Stale|Input|allocate"):
                read()
        assert unreadable.reads == 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "4"]


def test_damage_is_not_retried(tmp_path, monkeypatch):
    save(tmp_path, state(3), state(4), keep=2)
    unreadable = Unreadable(monkeypatch, ValueError("Error decoding chunk [os_error_code='2']"))
    assert_equal(restore(tmp_path), state(3))
    assert unreadable.reads == 2


MINE, OTHER = "^mine$", "process 1 cannot read its part"


@pytest.mark.parametrize(
    ("own", "failed", "unread", "kind", "message"),
    [
        (None, [1], [], DamagedError, f"^the checkpoint folder is damaged or of another model .*: {OTHER}$"),
        (None, [1], [1], OSError, f"^{OTHER} of the checkpoint folder"),
        (DamagedError("mine"), [0, 1], [], DamagedError, MINE),
        (DamagedError("mine"), [0, 1], [1], OSError, f"^{OTHER} of the checkpoint folder"),
        (OSError("mine"), [0, 1], [0, 1], OSError, MINE),
    ],
)
def test_error_of_another_process_is_raised_by_all(own, failed, unread, kind, message, monkeypatch):
    def read(folder, target, damage):
        if own:
            raise own
        return "state", [1]

    answers, asked = [failed, unread], []
    monkeypatch.setattr(checkpoint, "_read_state", read)
    monkeypatch.setattr(checkpoint.distributed, "failures", lambda mine: asked.append(mine) or answers.pop(0))
    with pytest.raises(kind, match=message):
        checkpoint.read_checkpoint(Path("folder"), state())
    assert asked == [own is not None, isinstance(own, OSError)]


def test_reasons_of_errors(tmp_path):
    """Check errors with a number, which TensorStore gives in the text, and without."""
    full, number = os.strerror(errno.ENOSPC), "x [os_error_code='28'] y"
    long = ValueError("two\n  lines " + "x" * 999), "two lines " + "x" * 290
    with Checkpoints(tmp_path) as checkpoints:
        for error, reason in ((OSError(errno.ENOSPC, ""), full), (ValueError(number), full), long):
            with pytest.raises(OSError, match=f"\\({reason}\\)"), checkpoints._os_errors():
                raise error


def test_reader_of_a_deleted_checkpoint_takes_the_newest(tmp_path, monkeypatch):
    save(tmp_path, state(3), keep=1)
    real = checkpoint.read_record

    def rotate(folder):
        if folder.name == "3":  # the run saves, and deletes what is just read
            save(tmp_path, state(4), keep=1)
        return real(folder)

    monkeypatch.setattr(checkpoint, "read_record", rotate)
    assert_equal(read_newest(tmp_path).params, state(4).ema)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["4"]


def test_unwritable_folder_is_reported_at_once(tmp_path, monkeypatch):
    """Check that no thread of Orbax waits for a folder that cannot be created: the end would take minutes."""
    save(tmp_path / "other", state(3))  # starts the threads that the process keeps
    before, real = {thread.name for thread in threading.enumerate()}, os.mkdir

    def mkdir(path, *args, **kwargs):
        if "tmp" in Path(path).name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(OSError, match=r"a checkpoint could not be written to .*/checkpoints \(Permission denied"):
        save(tmp_path, state(3))
    started = {thread.name for thread in threading.enumerate()} - before
    assert {name for name in started if not name.startswith("asyncio_")} == set()  # asyncio keeps idle ones


def break_(folder, step):
    path = largest_file(folder / "checkpoints" / str(step))
    path.write_bytes(flip(path.read_bytes()))


def test_damaged_checkpoint_falls_back_to_the_previous_one(tmp_path):
    said = []
    save(tmp_path, state(3), state(4), state(5), keep=3)
    for step in (4, 5):
        break_(tmp_path, step)
    with Checkpoints(tmp_path, Checkpoint(keep=3)) as checkpoints:
        checkpoints.say = said.append
        assert_equal(checkpoints.restore(target(state())), state(3))
        assert checkpoints.latest == 3
        checkpoints.save(state(5), {}, {})
    for step, sentence in zip((5, 4), said, strict=True):
        assert sentence.startswith(f"the checkpoint {tmp_path}/checkpoints/{step} is damaged or of another model")
        assert sentence.endswith(f"It was renamed to {step}.damaged; the run resumes from step 3.")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "4.damaged", "5", "5.damaged"]
    assert_equal(restore(tmp_path), state(5))
    break_(tmp_path, 5)
    assert_equal(restore(tmp_path), state(3))  # the other 5.damaged makes room
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "4.damaged", "5.damaged"]


def test_all_checkpoints_damaged_raises_and_keeps_them(tmp_path):
    save(tmp_path, state(3), state(4), keep=2)
    for step in (3, 4):
        break_(tmp_path, step)
    with pytest.raises(ValueError, match=r"checkpoints/4 is damaged or of another model .*; no better: 3$"):
        restore(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "4"]


def test_run_can_continue_after_a_failed_save(tmp_path, monkeypatch):
    said = []
    with Checkpoints(tmp_path, Checkpoint(keep=2, on_error="continue")) as checkpoints:
        checkpoints.say = said.append
        checkpoints.save(state(3), {}, {})
        checkpoints.wait()
        with full_disk(8_000):
            checkpoints.save(state(4), {}, {})
            checkpoints.save(state(5), {}, {})
            while checkpoints._manager.is_saving_in_progress():
                time.sleep(0.01)
        checkpoints.save(state(6), {}, {})
    full = (
        f"a checkpoint could not be written to {tmp_path}/checkpoints (File too large). Existing checkpoints are kept."
    )
    assert said == [f"{full} The run continues."] * 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "6"]  # nor unfinished ones
    for step in (3, 6):
        assert_equal(restore(tmp_path, step=step), state(step))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="it must be 'stop' in runs of several processes"):
        Checkpoints(tmp_path, Checkpoint(on_error="continue"))
