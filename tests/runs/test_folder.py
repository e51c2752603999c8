"""Files of a run folder are written atomically."""

import errno
import fcntl
import io
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lineage.configs import base
from lineage.configs.atomic import MAX_DATA, MAX_JSON, in_turn, replacing, sealed, unsealed, write_atomic, write_record
from lineage.runs import data_record, folder, slurm
from lineage.runs.command import LAUNCH
from lineage.runs.metrics import GrowingMetrics
from lineage.runs.process import brief_errors


def test_failed_write_keeps_the_old_file_only(tmp_path):
    path = tmp_path / "config.json"
    assert write_atomic(path, "é") == path

    def fail():
        with replacing(path) as temporary:
            temporary.write_text("half")
            assert path.read_text(encoding="utf-8") == "é"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text(encoding="utf-8") == "é"
    with replacing(path) as temporary:
        temporary.write_bytes(b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_temporary_files_of_killed_processes_are_deleted(tmp_path):
    """Check that those of a living process are kept, also if it writes another file."""
    code = f"""
import sys
from lineage.configs.atomic import in_turn, replacing, sealed, unsealed, write_atomic, write_record
with replacing({str(tmp_path / "a")!r}) as temporary:
    temporary.write_bytes(b"half")
    print("writes", flush=True)
    sys.stdin.read()
"""
    start = [sys.executable, "-c", code]
    one, other = (subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in "ab")
    assert one.stdout.readline() == other.stdout.readline() == "writes\n"
    one.kill()
    one.communicate()
    assert len(list(tmp_path.iterdir())) == 2
    write_atomic(tmp_path / "b", "b")
    (left,) = tmp_path.glob(".a.*.partial")
    assert f".{other.pid}." in left.name
    other.communicate()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "half", "b": "b"}


def test_temporary_file_that_is_deleted_before_it_is_locked(tmp_path, monkeypatch):
    lock, deleted = fcntl.flock, []

    def raced(file, how):
        if not deleted:
            deleted.append(next(tmp_path.glob(".a.*")))
            deleted[0].unlink()
        return lock(file, how)

    monkeypatch.setattr(fcntl, "flock", raced)
    assert write_atomic(tmp_path / "a", "new").read_text() == "new"
    assert deleted


def test_files_are_on_the_disk_before_they_replace_others(tmp_path, monkeypatch):
    path, synced = tmp_path / "a", []
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((os.fstat(file).st_ino, path.read_text())))
    write_atomic(path, "new")
    assert synced == [(path.stat().st_ino, "old")]


def test_one_at_a_time_executes_the_block(tmp_path, monkeypatch):
    """Check that another waits and says so, and that on a file system without locks none does."""
    order, said, end = [], io.StringIO(), time.monotonic() + 20
    monkeypatch.setattr(sys, "stderr", said)

    def enter(name):
        with in_turn(tmp_path / ".lock", "it works"):
            order.append(name)

    other = threading.Thread(target=enter, args=("other",))
    with in_turn(tmp_path / ".lock", "the test"):
        other.start()
        while not said.getvalue().endswith("\n") and time.monotonic() < end:
            time.sleep(0.01)
        order.append("first")
    other.join()
    assert (order, said.getvalue()) == (["first", "other"], "waiting for another process: it works\n")

    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    enter("third")
    assert order[2:] == ["third"]


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_locks_of_somebody_else_neither_wait_nor_create_files(kind, tmp_path):
    """Check a lock file in a folder that several users share; opening a pipe would wait for its reader."""
    path = tmp_path / ".lock"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match=r"'.*/\.lock'$"), in_turn(path, "it works"):
        pass
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "growing", "checkpoints/1/about/metadata"])
@pytest.mark.parametrize("target", ["pipe", "/dev/zero"])
def test_files_without_end_are_not_read(name, target, tmp_path):
    """Check the files of a run folder that came from somebody else; reading them would take all memory, or forever."""
    (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    if target == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    reads = {
        "run.json": folder.read_json,
        "metrics.jsonl": lambda path: list(folder.parse_metrics(path)),
        "growing": lambda path: GrowingMetrics(path).read(),
    }
    read = reads.get(name, lambda path: folder.read_record(path.parents[1]))
    with pytest.raises(ValueError, match=f"{path} is not a regular file|{path} cannot be read"):
        read(path)


@pytest.mark.parametrize("name", ["run.json", "config.json"])
def test_large_files_of_json_are_not_read(name, tmp_path):
    """Check files of lists, which need 20 times as much memory."""
    (path := tmp_path / name).write_bytes(b" " * (MAX_JSON + 1))
    for read in (folder.read_json, base.read):
        with pytest.raises(ValueError, match=f"{path} is not a regular file of at most {MAX_JSON:,} bytes"):
            read(path)


def test_large_record_of_a_checkpoint_is_not_read(tmp_path):
    (path := tmp_path / "about" / "metadata").parent.mkdir()
    path.touch()
    os.truncate(path, MAX_DATA + 1)
    with pytest.raises(folder.DamagedError, match=f"not a regular file of at most {MAX_DATA:,} bytes"):
        folder.read_record(tmp_path)


@pytest.mark.parametrize("line", ["x\n#SBATCH --uid=0", "x\r", "x\x1b[2J", "x%j", "x\\y"])
def test_line_breaks_in_the_folder_of_jobs_raise(line, tmp_path):
    with pytest.raises(ValueError, match=r"workdir is '.*': it must not have line breaks, other"):
        slurm.submit([], [], tmp_path / line, {})


@pytest.mark.parametrize("room", ["runs.folder", "runs.live", "runs.sweep", "runs.search", "runs.slurm", "report.run"])
def test_runs_and_reports_do_not_import_jax(room):
    code = f"import sys, lineage.{room}; print(sorted(sys.modules.keys() & {{'jax', 'flax', 'lineage.train'}}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_checksums_of_records(tmp_path):
    write_record(tmp_path / "a.json", {"size": (1, 2)})
    actual = json.loads((tmp_path / "a.json").read_text())
    assert unsealed(actual) == unsealed({"size": [1, 2]}) == {"size": [1, 2]}  # an older one has no checksum
    with pytest.raises(ValueError, match="its checksum does not match"):
        unsealed(actual | {"size": [1, 3]})


def test_errors_name_the_file(tmp_path):
    """Check that an error without a file gets that of the block, and that one of another file keeps it."""

    def write(path):
        with replacing(path) as temporary, temporary.open("wb", buffering=0) as file:
            file.write(bytes(99))
            file.write(b"more")

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (99, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/a'$"):
            write(tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(FileNotFoundError, match=r"'.*absent/a'$"):
        write(tmp_path / "absent" / "a")
    with pytest.raises(FileNotFoundError, match=r"'.*source'$"), replacing(tmp_path / "a"):
        (tmp_path / "source").read_bytes()
    with pytest.raises(OSError, match=r"^a sentence$"), replacing(tmp_path / "a"):
        raise OSError("a sentence")
    assert not [*tmp_path.iterdir()]


def test_read_only_file_system_is_reported_with_the_file(tmp_path, monkeypatch):
    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))  # also for a file that does not exist

    monkeypatch.setattr("lineage.configs.atomic.without_links", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match=r"Read-only file system: '.*/a'"):
        write_atomic(tmp_path / "a", "new")


def test_files_do_not_get_the_numbers_of_closed_streams(tmp_path):
    script = "import sys; from lineage.runs.process import open_streams; open_streams(); sys.stderr.isatty()\n"
    script += f"with open({str(tmp_path / 'file')!r}, 'w') as file: print(file.fileno(), file=file)"
    subprocess.run(f'exec {sys.executable} -c "{script}" <&- >&- 2>&-', shell=True, check=True)
    assert int((tmp_path / "file").read_text()) > 2


COMMANDS = ("list models", "config vit_digits", "--help")  # the second one's output exceeds a buffer


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "where", "said"),
    [
        *((command, "| true", "") for command in COMMANDS),  # the reader has ended, as `head` does
        *(
            (command, "> /dev/full", "error: [Errno 28] No space left on device: 'standard output'")
            for command in COMMANDS
        ),
    ],
)
def test_output_that_cannot_be_written(command, where, said, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    script = f"set -o pipefail; {shlex.join(LAUNCH)} {command} 2> {tmp_path}/errors {where}"
    assert subprocess.run(["bash", "-c", script], env=environment).returncode == 1
    assert (tmp_path / "errors").read_text().strip().partition("\n")[0] == said


def test_errors_of_deleted_coroutines_of_orbax_are_hidden(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    with brief_errors():
        for library in ("orbax", "other"):
            coroutine = SimpleNamespace(cr_code=SimpleNamespace(co_filename=f"/lib/{library}/x.py"))
            sys.unraisablehook(SimpleNamespace(exc_value=ValueError("x"), object=coroutine))
    assert [error.object.cr_code.co_filename for error in seen] == ["/lib/other/x.py"]


def test_files_that_are_not_of_the_same_run_raise(tmp_path):
    path, data = tmp_path / "tokenizer.json", tmp_path / "data.json"
    data_record.check(tmp_path)  # there is none
    path.write_text("{}")
    with pytest.raises(ValueError, match=f"^{data}, which has the SHA-256 of tokenizer.json, is missing or incomplete"):
        data_record.check(tmp_path)
    data_record.keep({}, tmp_path)
    data_record.check(tmp_path)
    record = tmp_path / "checkpoints" / "5" / "about" / "metadata"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps(sealed({"data": 1})))
    with pytest.raises(ValueError, match=f"^the newest checkpoint in {tmp_path} is .* restore the data and {data} of"):
        data_record.check(tmp_path)
    for change in (lambda: path.write_text("[]"), path.unlink):
        change()
        with pytest.raises(ValueError, match=f"^{path} is damaged or missing: its SHA-256 is not that in data.json"):
            data_record.check(tmp_path)
    path.write_text("{}")
    write_record(facts := tmp_path / "facts.json", {"num_classes": 2})
    record.write_text(json.dumps(sealed(data_record.checksums(tmp_path))))
    data_record.check(tmp_path)
    write_record(facts, {"num_classes": 3})
    with pytest.raises(ValueError, match=f"^{facts} is not that of the newest checkpoint in {tmp_path}: restore it"):
        data_record.check(tmp_path)
    data.write_text("{")
    with pytest.raises(ValueError, match=rf"^{data} is damaged \(.*\): restore it, let the command `train` write it"):
        data_record.check(tmp_path)


def test_long_values_are_shortened_in_differences():
    differences = folder.differences({"prng": "x" * 10**6, "seed": 1}, {"prng": "y", "seed": 2})
    assert differences.startswith("prng was 'xxx")
    assert differences.endswith("x, is 'y'; seed was 1, is 2")
    assert len(differences) < 300
    path = "/data" * 100
    differences = folder.differences({"data": f"{path}/a.txt"}, {"data": f"{path}/b.txt"})
    assert re.fullmatch("data was [.]{3}[a-z/]{190,200}/a[.]txt', is [.]{3}[a-z/]{190,200}/b[.]txt'", differences)
