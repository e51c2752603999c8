"""Time from the command to the first step of a run, with an empty cache and with a filled one.

`python -m benchmarks.startup vit_digits gpt_stdlib` prints the seconds of each pair of runs (see
`lineage.configs.cache`); `--root` measures another checkout, in a folder named `lineage`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
ARGUMENTS = ("--config.log_every_steps=1", "--config.evaluate_every_steps=100000", "--config.save_every_steps=100000")


def seconds(root: Path, experiment: str, cache: str) -> float:
    """Start a run, wait until it has logged its first step, kill it, and return the seconds."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION")}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, root / "launch.py", "train", f"--config={experiment}", f"--workdir={folder}/run"]
        history, start = Path(folder, "run", "metrics.jsonl"), time.monotonic()
        process = subprocess.Popen(
            [*command, *ARGUMENTS],
            env=environment | {"LINEAGE_CACHE": cache, "PYTHONPATH": str(root.resolve().parent)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not (history.exists() and history.stat().st_size):
                if process.poll() is not None:
                    raise RuntimeError(f"{experiment} ended with exit code {process.returncode}.")
                time.sleep(0.02)
            return time.monotonic() - start
        finally:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiments", nargs="+")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to measure")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for _ in range(options.repeats):
        for experiment in options.experiments:
            with tempfile.TemporaryDirectory() as cache:
                cold, warm = (seconds(options.root, experiment, cache) for _ in range(2))
            print(f"{experiment}: {cold:.1f} s, again {warm:.1f} s", flush=True)


if __name__ == "__main__":
    main()
