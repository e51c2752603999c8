"""Encoding of a corpus: `lineage prepare` compared with `map` of Hugging Face `datasets`, with the same tokenizer.

python -m benchmarks.corpus --megabytes=1000 --workers=2

The text is Python's standard library, repeated, as JSON lines with one document each. Both programs read this file and
run in turns, in separate processes, with a BPE tokenizer that was trained on the text beforehand. The memory
is the largest sum over the processes of a program, counting shared pages once; CPU time is a fairer measure than wall
time on a machine with other work. `datasets` first converts the file to its own format, and `map` calls
`encode_batch_fast` of the library `tokenizers` for 1,000 documents at a time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lineage.data.sources.text import StandardLibrary
from lineage.data.tokenizers import BPE, Bytes
from lineage.runs.command import LAUNCH

PEER = """
import os, sys, time
os.environ |= {"HF_DATASETS_CACHE": sys.argv[3], "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
import datasets, tokenizers

def encode(rows):
    return {"ids": [found.ids for found in tokenizer.encode_batch_fast(rows["text"], add_special_tokens=False)]}

datasets.disable_progress_bars()
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[2])
texts = datasets.load_dataset("json", data_files=sys.argv[1], split="train")
texts.map(encode, batched=True, num_proc=int(sys.argv[4]), remove_columns=["text"])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100, help="size of the text")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=16_384, help="256: bytes")
    parser.add_argument("--alone", action="store_true", help="without `datasets`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, tokenizer = folder / "text.jsonl", folder / "tokenizer.json"
        documents = list(StandardLibrary(validation_fraction=0.0).documents()["train"])
        kind = BPE(options.vocab_size) if options.vocab_size > 256 else Bytes()
        kind.train(documents).save(tokenizer)
        size = write(text, documents, options.megabytes * 10**6)
        given = [f"--config.source=jsonl:{text}", "--config.source.max_bytes=0", f"--config.tokenizer={tokenizer}"]
        prepare = [*LAUNCH, "prepare", "gpt_stdlib", f"--workers={options.workers}", *given]
        rows: dict[str, list[tuple[float, float, int]]] = {}
        for number in range(options.rounds):
            cache = folder / f"tokens{number}"
            rows.setdefault("lineage prepare", []).append(measured([*prepare, f"--config.task.cache_dir={cache}"]))
            indices = (json.loads(index.read_text()) for index in cache.glob("*/index.json"))
            assert sum(shard["bytes"] for index in indices for shard in index["shards"]) == size
            if not options.alone:
                peer = [sys.executable, "-c", PEER, text, tokenizer, folder / f"cache{number}", options.workers]
                rows.setdefault("datasets map", []).append(measured(list(map(str, peer))))
    print(f"{size / 1e6:.0f} MB of text, {options.workers} workers, medians of {options.rounds} rounds")
    for name, measurements in rows.items():
        seconds, busy, memory = (statistics.median(values) for values in zip(*measurements))
        speeds = f"{size / seconds / 1e6:6.2f} MB/s {size / busy / 1e6:6.2f} MB per second of a core"
        print(f"{name:16} {speeds} {memory / 2**20:6.0f} MiB")


def write(path: Path, documents: list[str], size: int) -> int:
    """Write documents repeatedly until the texts have `size` bytes; return their number of bytes."""
    total = 0
    with path.open("w", encoding="utf-8") as file:
        while total < size:
            for document in documents:
                if total < size:
                    file.write(json.dumps({"text": document}) + "\n")
                    total += len(document.encode())
    return total


def measured(command: list[str]) -> tuple[float, float, int]:
    """Run a command; return its wall and CPU seconds, and the peak memory of its processes in bytes."""
    start, before, peak = time.perf_counter(), os.times(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, sum(map(resident, family(process.pid))))
            time.sleep(0.2)
        if process.returncode:
            raise RuntimeError(process.stderr.read())
    seconds, after = time.perf_counter() - start, os.times()
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, busy, peak


def family(process: int) -> list[int]:
    """Return the ids of a process and its descendants."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return []
    return [process, *(member for child in children for member in family(int(child)))]


def resident(process: int) -> int:
    """Return the proportional set size of a process in bytes."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


if __name__ == "__main__":
    main()
