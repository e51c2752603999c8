"""Checkpoints that are damaged, of another model, or cannot be read."""

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

from lineage.configs.atomic import sealed, unsealed
from lineage.configs.run import Checkpoint
from lineage.runs.folder import DamagedError
from lineage.train import checkpoint, reading
from lineage.train.checkpoint import Checkpoints
from lineage.train.reading import error_number, read_newest
from tests.tiers import tiered
from tests.train.checkpoints import assert_equal, flip, largest_file, restore, save, state, target

# If the read of one array fails, Orbax leaves the reads of the others unfinished.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


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


@pytest.mark.parametrize("target", ["pipe", "/dev/zero"])
@pytest.mark.parametrize("name", ["state/_METADATA", "about/_METADATA", "_CHECKPOINT_METADATA", ""])
def test_file_without_end_is_not_read(name, target, tmp_path):
    """Check the files of a checkpoint that came from somebody else, and the largest of them for no name."""
    save(tmp_path, state())
    path = tmp_path / "checkpoints" / "3" / name if name else largest_file(tmp_path)
    path.unlink(missing_ok=True)
    if target == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    for read in (restore, read_newest):
        with pytest.raises(ValueError, match=f"{path} is not a regular file"):
            read(tmp_path)


@pytest.mark.parametrize("name", ["manifest.ocdbt", "d/*"])
def test_damaged_database_is_found_before_arrays_are_read(name, tmp_path, monkeypatch):
    """Check that Orbax is not asked, since the reads that it leaves unfinished print tracebacks."""
    save(tmp_path, state())
    (path,) = (tmp_path / "checkpoints" / "3" / "state").glob(name)
    path.write_bytes(path.read_bytes()[:20])
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "metadata", None)
    for read in (restore, read_newest):
        with pytest.raises(DamagedError, match=f"checkpoints/3 is damaged.*{path.name}"):
            read(tmp_path)


@pytest.mark.parametrize("is_folder", [False, True])
def test_database_without_its_manifest_is_found_before_arrays_are_read(is_folder, tmp_path, monkeypatch):
    """Check a manifest that is missing or a folder: its database seems to be empty."""
    save(tmp_path, state())
    path = tmp_path / "checkpoints" / "3" / "state" / "manifest.ocdbt"
    path.unlink()
    if is_folder:
        path.mkdir()
    asked = []
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "metadata", lambda *args: asked.append(args))
    for read in (restore, read_newest):
        with pytest.raises(DamagedError, match=f"the description of the arrays in {path.parent} cannot be read"):
            read(tmp_path)
    assert not asked


@pytest.mark.parametrize("content", ["[" * 10**5, "[]", '{"metrics": 5}', '{"commit_timestamp_nsecs": 1e30}'])
def test_description_that_orbax_cannot_use_is_named(content, tmp_path):
    """Check that a run without the file, which Orbax does not need, is restored."""
    save(tmp_path, state())
    path = tmp_path / "checkpoints" / "3" / "_CHECKPOINT_METADATA"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{path} is damaged .*: restore or delete it.$"):
        restore(tmp_path)
    path.unlink()
    assert_equal(restore(tmp_path), state())


def test_pipe_in_place_of_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    os.mkfifo(path := tmp_path / "checkpoints" / "3")
    with pytest.raises(ValueError, match=f"{path} is not a regular file"):
        Checkpoints(tmp_path)


@tiered("at", [0.1, 0.3, 0.7, 0.9])
def test_flipped_bit_is_detected(at, tmp_path):
    save(tmp_path, state())
    path = largest_file(tmp_path)
    path.write_bytes(flip(path.read_bytes(), at))
    with pytest.raises(ValueError, match="is damaged"):
        restore(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"width": 96}, {"width": 32}, {"gate": np.ones(3)}, {"ema": None}], ids=lambda changes: str([*changes])
)
def test_checkpoint_of_another_model_raises(changes, tmp_path):
    save(tmp_path, state())
    with pytest.raises(ValueError, match=r"the checkpoint .*/checkpoints/3 is damaged or of another model"):
        restore(tmp_path, state().replace(**changes) if "ema" in changes else state(**changes))


def record_file(folder, step):
    return folder / "checkpoints" / str(step) / "about" / "metadata"


def test_flipped_bit_in_a_record_is_detected(tmp_path):
    save(tmp_path, state())
    path = record_file(tmp_path, 3)
    path.write_text(path.read_text().replace('"name": "none"', '"name": "nonf"'))
    for read in (restore, read_newest):
        with pytest.raises(ValueError, match=r"checkpoints/3 is damaged: the checksum of .*/about/metadata does not"):
            read(tmp_path)


@pytest.mark.parametrize("part", ["array", "chunk"])
def test_arrays_that_are_larger_than_their_files_are_not_read(part, tmp_path):
    """Check a checkpoint from somebody else, whose array, or the chunk with its content, has 14 GB."""
    save(tmp_path, state().replace(ema=None))
    folder = tmp_path / "checkpoints" / "3" / "state"
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}"}).result()
    about = json.loads(store.read(b"params.kernel/zarr.json").result().value)
    about["chunk_grid"]["configuration"]["chunk_shape"] = [60_000, 60_000]
    about["shape"] = [60_000, 60_000] if part == "array" else about["shape"]
    about["codecs"][0]["configuration"]["chunk_shape"] = [60_000, 60_000]
    store.write(b"params.kernel/zarr.json", json.dumps(about).encode()).result()
    for read in (read_newest, restore):
        with pytest.raises(
            DamagedError, match=r"checkpoints/3 is damaged.*: its arrays would need 14,4\d\d,\d+,\d+ bytes"
        ):
            read(tmp_path)


def test_checkpoint_under_the_name_of_another_step_is_damaged(tmp_path):
    """Check a copy, in whose place the state of that step would otherwise not be saved."""
    save(tmp_path, state())
    shutil.copytree(tmp_path / "checkpoints" / "3", tmp_path / "checkpoints" / "8")
    with pytest.raises(DamagedError, match=r"checkpoints/8 is damaged: .*metadata is the record of step 3"):
        read_newest(tmp_path)
    assert_equal(restore(tmp_path), state())
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "8.damaged"]


ODD = [{"hashes": 5}, {"hashes": [1]}, {"config": [1]}, {"config": {}}, {"metrics": 5}, {"metrics": {"test/loss": "x"}}]
ODD += [{"next_batch": None}, {"lines": "x"}, {"lines": -1}, {"averages": 5}, {"averages": {"train/loss": [1]}}]


@pytest.mark.parametrize("entries", ODD)
def test_record_with_odd_entries_is_damaged(entries, tmp_path):
    """Check a record from somebody else, whose checksum matches."""
    save(tmp_path, state())
    path = record_file(tmp_path, 3)
    path.write_text(json.dumps(sealed(unsealed(json.loads(path.read_text())) | entries)))
    for read in (read_newest,) if entries == {"config": {}} else (restore, read_newest):
        with pytest.raises(DamagedError, match=r"the checkpoint .*/checkpoints/3 is damaged"):
            read(tmp_path)


@pytest.mark.parametrize("params", [{}, [np.float32([1])], np.float32([1]), {"kernel": [np.float32([1])]}])
def test_parameters_without_names_are_damage(params, tmp_path):
    save(tmp_path, state().replace(params=params, ema=None))
    with pytest.raises(DamagedError, match="its parameters are not arrays with names"):
        read_newest(tmp_path)


def test_unknown_adapter_is_no_damage(tmp_path):
    save(tmp_path, state())
    path = record_file(tmp_path, 3)
    record = unsealed(json.loads(path.read_text()))
    record["config"]["adapter"]["name"] = "dora"
    path.write_text(json.dumps(sealed(record)))
    said = r"checkpoints/3 has the unknown adapter 'dora'\. Did you mean 'lora'\? Available: lora, none, svf\.$"
    with pytest.raises(ValueError, match=said) as error:
        read_newest(tmp_path)
    assert not isinstance(error.value, DamagedError)


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
    RuntimeError("can't start new thread"),
    MemoryError("Unable to allocate 8 GiB"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("error", PASSING, ids=str)
@pytest.mark.parametrize("times", [1, 2])
def test_read_error_that_may_pass_costs_no_checkpoint(error, times, tmp_path, monkeypatch):
    save(tmp_path, state(3), state(4), keep=2)
    for read, expected in ((lambda: restore(tmp_path), state(4)), (lambda: read_newest(tmp_path).params, state(4).ema)):
        unreadable = Unreadable(monkeypatch, *[error] * times)
        if times == 1:
            assert_equal(read(), expected)
        else:
            with pytest.raises((OSError, MemoryError), match=r"denied|Stale|Input|allocate|temporarily"):
                read()
        assert unreadable.reads == 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "4"]


def test_files_that_cannot_be_opened_cost_no_checkpoint(tmp_path):
    """Check every file and folder: of some, Orbax raises the error as the cause of another one, or hides it."""
    save(tmp_path, state(3), state(4), keep=2)
    folder, raised = tmp_path / "checkpoints" / "4", 0
    for path in sorted(folder.rglob("*")):
        path.rename(tmp_path / "kept")
        path.symlink_to(path)  # opening it fails with ELOOP, also for root
        for read in (lambda: restore(tmp_path), lambda: read_newest(tmp_path)):
            try:
                read()
            except OSError as error:
                assert error.errno == errno.ELOOP, (path, error)  # noqa: PT017
                raised += 1
        assert sorted(each.name for each in (tmp_path / "checkpoints").iterdir()) == ["3", "4"], path
        path.unlink()
        (tmp_path / "kept").rename(path)
    assert raised > 20
    assert_equal(restore(tmp_path), state(4))


@pytest.mark.parametrize(("error", "number"), [(MemoryError("x"), errno.ENOMEM), (ValueError("x"), None)])
def test_errors_that_orbax_raises_from_others(error, number):
    assert error_number(error) == number
    with pytest.raises(Exception, match="y") as actual:
        raise Exception("y") from error
    assert error_number(actual.value) == number


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
    monkeypatch.setattr(reading, "_read_state", read)
    monkeypatch.setattr(reading.distributed, "failures", lambda mine: asked.append(mine) or answers.pop(0))
    with pytest.raises(kind, match=message):
        reading.read_checkpoint(Path("folder"), state())
    assert asked == [own is not None, isinstance(own, OSError)]


def test_reasons_of_errors(tmp_path):
    """Check errors with a number, which TensorStore gives in the text, and without."""
    full, number = os.strerror(errno.ENOSPC), "x [os_error_code='28'] y"
    long = ValueError("two\n  lines " + "x" * 999), "two lines " + "x" * 290
    with Checkpoints(tmp_path) as checkpoints:
        for error, reason in ((OSError(errno.ENOSPC, ""), full), (ValueError(number), full), long):
            with pytest.raises(OSError, match=f"\\({reason}\\)"), checkpoints._os_errors():
                raise error


def break_(folder, step):
    path = largest_file(folder / "checkpoints" / str(step))
    path.write_bytes(flip(path.read_bytes()))


def test_damaged_checkpoint_falls_back_to_the_previous_one(tmp_path):
    said = []
    save(tmp_path, state(3), state(4), state(5), keep=3)
    for step in (4, 5):
        break_(tmp_path, step)
    with Checkpoints(tmp_path, Checkpoint(keep=3)) as checkpoints:
        checkpoints.notify = said.append
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
    with pytest.raises(ValueError, match=r"checkpoints/4 is damaged .*; those of steps 3 cannot be restored either$"):
        restore(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "4"]
