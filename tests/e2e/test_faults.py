"""Fault injection: a run with damaged files or a full disk ends with the same parameters, or raises and loses
nothing.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from lineage.configs import cli
from lineage.runs.folder import MEASURED
from lineage.train import loop, profiling
from tests.tiers import tiered

ROOT = Path(__file__).parents[2]
TOTAL, SAVE_EVERY = 20, 4


def run(workdir, data):
    """Train a small model on the texts of a folder to the end."""
    config, _ = cli.load(f"{ROOT}/tests/tiny.py:gpt")
    changes = {"source": f"text:{data}", "source.max_bytes": 0, "source.validation_fraction": 0.0, "seed": 1}
    changes |= {"total_steps": TOTAL, "save_every_steps": SAVE_EVERY, "checkpoint.keep": 2, "model.dropout": 0.1}
    cli.override(config, changes | {"model.depth": 1, "checkpoint.on_error": "continue"})
    loop.train(config, workdir, devices=jax.devices()[:1])


class Killed(BaseException):
    """Exception that simulates the death of the process; a BaseException, so that no handler catches it."""


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Share compiled functions between runs and disable reports."""
    cache = tmp_path_factory.mktemp("cache")
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    kept = {}
    budget, step = profiling.experiment_budget, loop.compile_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            profiling, "experiment_budget", lambda *args: kept.get("budget") or kept.setdefault("budget", budget(*args))
        )
        patch.setattr(loop, "compile_step", lambda *args: kept.get("step") or kept.setdefault("step", step(*args)))
        patch.setattr(loop, "write_report", lambda workdir: None)
        patch.setattr(loop.artifacts, "write_all", lambda *args: None)
        yield
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


@pytest.fixture(scope="module")
def reference(quick, tmp_path_factory):
    """Return the folder of texts and the final state of an undisturbed run."""
    folder = tmp_path_factory.mktemp("reference")
    (folder / "data").mkdir()
    for name in ("launch.py", "setup.py"):
        shutil.copy(ROOT / name, folder / "data" / f"{name}.txt")
    run(folder / "run", folder / "data")
    return folder / "data", final(folder / "run")


def final(workdir):
    """Return the bytes of the final state and the history."""
    saved = ocp.StandardCheckpointer().restore(workdir / "checkpoints" / str(TOTAL) / "state")
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    history = [{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in lines]
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(saved)], history


def saved_steps(workdir):
    return {int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdigit()}


def damage(rng, folder):
    """Damage a random file in a folder, chosen with probability proportional to size; return its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    if not files:
        return None
    path = rng.choices(files, [path.stat().st_size for path in files])[0]
    content, how = path.read_bytes(), rng.choice(("flip", "truncate", "delete"))
    place = rng.randrange(len(content))
    if how == "delete":
        path.unlink()
    else:
        rest = bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :] if how == "flip" else b""
        path.write_bytes(content[:place] + rest)
    return path


def disturbed(kind, rng, workdir, data, monkeypatch):
    """Run with a fault at a random step, and end at a random later step; return the damaged checkpoint."""
    moment = rng.randint(SAVE_EVERY + 1, TOTAL)
    end, hit = rng.randint(moment, TOTAL), []
    whole, limits = loop.TrainingLoop.run, resource.getrlimit(resource.RLIMIT_FSIZE)

    def step(self, number):
        whole(self, number)
        if number == moment and kind == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (rng.randint(1, 40_000), limits[1]))
        elif number == moment and kind == "data":
            damage(rng, data)
        elif number == moment and kind == "checkpoint":
            self.checkpoints.wait()  # so that the newest checkpoint can be damaged too
            steps = sorted(saved_steps(workdir))
            hit.append(rng.choice(steps) if steps else None)
            damage(rng, workdir / "checkpoints" / str(hit[0]))
        if number == end:
            raise Killed

    try:
        with monkeypatch.context() as patch:
            patch.setattr(loop.TrainingLoop, "run", step)
            run(workdir, data)
    except Killed:
        pass
    except OSError as error:
        if kind != "full" or "File too large" not in str(error):
            raise
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return hit


def killed(rng, workdir, data, paths):
    """Run in a separate process, and kill it at a random moment."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import runpy; "
    script += f"runpy.run_path({__file__!r})['run']({str(workdir)!r}, {str(data)!r})"
    environment = os.environ | {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}  # as in all tests
    environment |= {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONPATH": paths}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    moment, path = rng.randint(1, TOTAL), workdir / "metrics.jsonl"
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < moment):
        time.sleep(0.001)
    time.sleep(rng.random() * 0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return []


def disturb(kind, seed, reference, folder, monkeypatch, paths=""):
    """Inject a fault, rerun until the run completes, and check the result; return the error messages."""
    rng, said = random.Random(seed), []
    workdir, data = folder / "run", folder / "data"
    shutil.copytree(reference[0], data)
    hit = killed(rng, workdir, data, paths) if kind == "kill" else disturbed(kind, rng, workdir, data, monkeypatch)
    good = saved_steps(workdir) - set(hit)
    starts, first = [], loop.TrainingLoop.__init__
    with monkeypatch.context() as patch:
        patch.setattr(
            loop.TrainingLoop, "__init__", lambda self, *args: (first(self, *args), starts.append(self.start))[0]
        )
        while True:
            try:
                run(workdir, data)
                break
            except (ValueError, OSError) as error:
                said.append(str(error))
                assert "\n" not in said[-1]
                assert len(said) < 3, said
            assert good <= saved_steps(workdir), "a good checkpoint is lost"
            if "changed since the run" in said[-1]:
                assert kind == "data"
                shutil.rmtree(data)
                shutil.copytree(reference[0], data)
            else:
                assert "is damaged" in said[-1], said
                assert not good, "a good checkpoint is not used"
                shutil.rmtree(workdir / "checkpoints")
    assert starts[-1] >= max(good, default=0), "a good checkpoint is not used"
    leaves, history = final(workdir)
    assert leaves == reference[1][0]
    assert history == reference[1][1]
    return said


# Seeds that damage the newest checkpoint, or damage the data in each way before the run ends.
FAULTS = {"checkpoint": (2, 16, 18, 52), "data": (1, 4, 6, 8), "full": range(4)}


@tiered(
    ("kind", "seed"),
    [(kind, seed) for kind, seeds in FAULTS.items() for seed in seeds],
    first=lambda kind, seed: seed == FAULTS[kind][0],
)
def test_run_survives_a_fault(kind, seed, reference, tmp_path, monkeypatch):
    disturb(kind, seed, reference, tmp_path, monkeypatch)


@pytest.mark.slow
def test_run_survives_a_hundred_faults(reference, environment, tmp_path, monkeypatch):
    """Check random faults; `pytest -m slow -s tests/e2e/test_faults.py` prints the outcome of each."""
    for seed in range(100):
        kind = ("checkpoint", "checkpoint", "data", "full", "kill")[seed % 5]
        said = disturb(kind, 1000 + seed, reference, tmp_path / str(seed), monkeypatch, environment["PYTHONPATH"])
        print(seed, kind, said or "the same parameters", flush=True)
