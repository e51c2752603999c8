"""Commands on SLURM jobs, with programs in place of a cluster (a real one: `tests/e2e/test_slurm.py`)."""

import json
import os

import pytest

from lineage.runs import slurm


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Return `cluster(name, script)`, which puts a shell script in place of a program."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def cluster(name, script):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return cluster


@pytest.mark.parametrize("ended", [False, True])
def test_all_jobs_are_canceled_even_if_one_has_ended(ended, cluster, tmp_path, capsys):
    cluster("squeue", "echo 7_0 PENDING; echo 7_1 RUNNING; echo 8 RUNNING")
    cluster("scancel", f"echo $@ >> {tmp_path}/canceled; [ $1 = 7_0 ] && echo no such job >&2; exit {int(ended)}")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / slurm.JOBS).write_text(json.dumps({"a": "7_0", "b": "7_1", "c": "7_2"}))
    if ended:
        with pytest.raises(ValueError, match="scancel failed for some of 2 jobs: no such job"):
            slurm.cancel(tmp_path)
    else:
        assert slurm.cancel(tmp_path) == 0
        assert capsys.readouterr().out == "2 jobs canceled\n"
    assert (tmp_path / "canceled").read_text() == "7_0\n7_1\n"
