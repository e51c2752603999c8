"""Files of a run folder are written atomically."""

import subprocess
import sys

import pytest

from lineage.configs.atomic import replacing, write_atomic


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


@pytest.mark.parametrize("room", ["runs.folder", "runs.live", "runs.sweep", "runs.search", "runs.slurm", "report.run"])
def test_runs_and_reports_do_not_import_jax(room):
    code = f"import sys, lineage.{room}; print(sorted(sys.modules.keys() & {{'jax', 'flax', 'lineage.train'}}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
