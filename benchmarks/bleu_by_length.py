"""BLEU by input length for several runs on the same pairs (arXiv 1409.0473, figure 2).

    python -m benchmarks.bleu_by_length outputs/with outputs/without --split=test

The program prints a table and draws `bleu_by_length.png` in the folder of the first run.
"""

import argparse
import json
from pathlib import Path

from lineage.report import figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="workdirs")
    parser.add_argument("--split", default="test")
    options = parser.parse_args()
    written = {
        run.name: json.loads((run / "artifacts" / f"written_{options.split}.json").read_text(encoding="utf-8"))
        for run in options.runs
    }
    groups = {}
    for name, texts in written.items():
        groups[name] = texts["by_length"]
        print(f"{name}: BLEU {texts['bleu']:.2f}  {texts['signature']}")
    print("\nwords   pairs  " + "  ".join(groups))
    for rows in zip(*groups.values()):
        shortest, longest, count, _ = rows[0]
        scores = "  ".join(f"{row[3]:{len(name)}.1f}" for name, row in zip(groups, rows))
        print(f"{f'{shortest}-{longest}':6}  {count:5}  {scores}")
    figures.save(figures.bleu_by_length, groups, name="bleu_by_length", folder=options.runs[0])
    print(f"\n{options.runs[0] / 'bleu_by_length.png'}")


if __name__ == "__main__":
    main()
