"""Plans of XLA's TPU and GPU compilers for the paper configs, kept in `plans.json`.

python -m benchmarks.plans                  # compare the rows whose compiler is installed with the record
python -m benchmarks.plans gpt2 --write     # compile the rows whose name contains gpt2, and record them
python -m benchmarks.plans --table          # print the record as a Markdown table

No device is needed: see `lineage compile`.
"""

import argparse
import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from lineage.runs.command import LAUNCH

RECORD = Path(__file__).parent / "plans.json"
KEPT = ("seconds", "utilization", "arguments", "temporaries", "peak", "fits", "exposed")  # figures in the record
KEPT += ("f32_matmul", "donated", "leaves")
WORSE = 1.03  # ratio of planned time or memory to the record above which a plan counts as worse

# Name, config, target, and changes of the config; the batch size is the total over all chips.
ROWS = {
    "gpt2 v5e": ("gpt2_openwebtext", "v5e:2x2/1", "loader.batch_size=8"),
    "gpt2 v5e 4x4 FSDP": ("gpt2_openwebtext", "v5e:4x4", "loader.batch_size=128 mesh.data=1 mesh.fsdp=-1"),
    "gpt2 H100": ("gpt2_openwebtext", "h100x1", "loader.batch_size=32"),
    "gpt2 H100 x8 FSDP": ("gpt2_openwebtext", "h100x8", "loader.batch_size=256 mesh.data=1 mesh.fsdp=-1"),
    "llama_1b H100": ("llama_1b", "h100x1", "loader.batch_size=8 grad_accum_steps=1"),
    "llama_1b H100 x8 FSDP": ("llama_1b", "h100x8", "loader.batch_size=64 grad_accum_steps=1"),
    "llama_1b v5p": ("llama_1b", "v5p:2x2x1/1", "loader.batch_size=8 grad_accum_steps=1"),
    "llama_1b v5p 2x2x1 FSDP": ("llama_1b", "v5p:2x2x1", "loader.batch_size=32 grad_accum_steps=1"),
    "llama_1b v5p 2x2x4, 32k tokens": (
        "llama_1b",
        "v5p:2x2x4",
        "loader.batch_size=2 grad_accum_steps=1 mesh.fsdp=2 mesh.context=8 model.unroll=1 "
        "model.max_length=32768 task.sequence_length=32768",
    ),
    "bert H100": ("bert_pretrain", "h100x1", "loader.batch_size=64"),
    "bert v5e": ("bert_pretrain", "v5e:2x2/1", "loader.batch_size=32"),
    "vit_s16 H100": ("vit_s16_imagenet", "h100x1", "loader.batch_size=256"),
    "vit_s16 v5e": ("vit_s16_imagenet", "v5e:2x2/1", "loader.batch_size=128"),
    "vit_l16 H100": ("vit_imagenet21k:L", "h100x1", "loader.batch_size=128"),
    "vit_l16 v5e": ("vit_imagenet21k:L", "v5e:2x2/1", "loader.batch_size=32 model.unroll=1"),
    "mae_b16 H100": ("mae_vitb16_imagenet", "h100x1", "loader.batch_size=256"),
    "mae_b16 v5e": ("mae_vitb16_imagenet", "v5e:2x2/1", "loader.batch_size=128"),
    "deit_s16 H100": ("deit_s_imagenet", "h100x1", "loader.batch_size=256"),
    "swin_t H100": ("swin_t_imagenet", "h100x1", "loader.batch_size=256"),
    "resnet50 H100": ("resnet50_imagenet", "h100x1", "loader.batch_size=256"),
    "resnet50 v5e": ("resnet50_imagenet", "v5e:2x2/1", "loader.batch_size=128"),
    "t5 H100": ("t5_c4", "h100x1", "loader.batch_size=32"),
    "t5 v5e": ("t5_c4", "v5e:2x2/1", "loader.batch_size=16"),
    "t5 11B v5p 4x4x4": (
        "t5_c4:11b",
        "v5p:4x4x4",
        "loader.batch_size=512 mesh.data=1 mesh.fsdp=16 mesh.tensor=4 model.unroll=24",
    ),
    "bart H100": ("bart_pretrain:base", "h100x1", "loader.batch_size=32 grad_accum_steps=1"),
    "bart v5e": ("bart_pretrain:base", "v5e:2x2/1", "loader.batch_size=16 grad_accum_steps=1"),
    "wmt14 big H100": ("transformer_wmt14:big", "h100x1", "loader.batch_size=128"),
    "wmt14 big v5e": ("transformer_wmt14:big", "v5e:2x2/1", "loader.batch_size=32"),
    "bigbird H100": ("bigbird_longdoc", "h100x1", "loader.batch_size=8"),
    "detr H100": ("detr_coco", "h100x1", "loader.batch_size=8"),
    "transformer_xl H100": ("transformer_xl_wikitext103", "h100x1", "loader.batch_size=60"),
    "transformer_xl v5e": ("transformer_xl_wikitext103", "v5e:2x2/1", "loader.batch_size=60"),
    "seq2seq H100": ("seq2seq_wmt14", "h100x1", "loader.batch_size=80"),
}


def arguments(name: str) -> list[str]:
    """Return the arguments of `lineage compile` for a row."""
    config, target, changes = ROWS[name]
    return [config, f"--target={target}", *(f"--config.{change}" for change in changes.split())]


def compiled(name: str) -> dict[str, Any]:
    """Compile a row in another process and return its figures; raise RuntimeError if the compilation fails."""
    done = subprocess.run([*LAUNCH, "compile", *arguments(name), "--json"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip()[-500:]}")
    figures = json.loads(done.stdout[done.stdout.index("{") :])
    counts: Counter[str] = Counter()
    for collective in figures["collectives"]:
        counts[collective["kind"]] += collective["times"]
    largest = {buffer["shape"]: buffer["bytes"] for buffer in figures["buffers"][:5]}
    return {key: figures[key] for key in KEPT} | {"collectives": dict(sorted(counts.items())), "buffers": largest}


def recorded() -> dict[str, dict[str, Any]]:
    """Return the record by row name."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def table(record: dict[str, dict[str, Any]]) -> str:
    """Return a record as a Markdown table, in the order of `ROWS`."""
    lines = ["| plan | command: `lineage compile` | GiB | ms | MFU |", "|---|---|---|---|---|"]
    for name in [name for name in ROWS if name in record]:
        row, command = record[name], " ".join(arguments(name))
        memory = f"{row['peak'] / 2**30:.1f}" if row["fits"] else f"{row['peak'] / 2**30:.1f}, too much"
        lines.append(f"| {name} | `{command}` | {memory} | {row['seconds'] * 1e3:.1f} | {row['utilization']:.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="", help="part of the names of the rows")
    parser.add_argument("--write", action="store_true", help="record what is compiled")
    parser.add_argument("--table", action="store_true", help="print the record and compile nothing")
    options = parser.parse_args()
    if options.table:
        print(table(recorded()))
        return
    for name in [name for name in ROWS if options.part in name]:
        try:
            figures = compiled(name)
        except RuntimeError as error:
            print(error)
            continue
        old = recorded().get(name)
        before = f" (recorded {old['seconds'] * 1e3:.1f} ms)" if old else ""
        print(f"{name}: {figures['seconds'] * 1e3:.1f} ms{before}, {figures['peak'] / 2**30:.1f} GiB", flush=True)
        if options.write:
            record = recorded() | {name: figures}
            text = json.dumps({key: record[key] for key in ROWS if key in record}, indent=1)
            RECORD.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
