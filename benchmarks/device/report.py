"""Report of `benchmarks.accelerator`."""

import json
import statistics
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.device.sections import SECTIONS

HEADER = ("", "Lineage, ms", "peer, ms", "ratio", "MFU", "MFU of the peer", "GB/s", "GB/s of the peer", "notes")
PACKAGES = ("jax", "jaxlib", "flax", "torch", "transformers", "timm")


class Report:
    """Rows, written to `rows.jsonl` and `table.md` in a folder as they are added, and `failures.txt`."""

    def __init__(self, out: Path):
        self.out, self.rows, self.device = out, [], ""
        for name in ("rows.jsonl", "failures.txt"):
            (out / name).write_text("")

    def add(
        self,
        section: str,
        row: str | None,
        facts: Mapping[str, Mapping[str, Any]],
        times: Mapping[str, Sequence[float]],
        values: Mapping[str, Any],
        errors: Mapping[str, str],
    ) -> None:
        """Add a row.

        Args:
            section, row: names; without a row name, the row is for the whole section.
            facts: facts about the row, by side ("lineage" or "peer").
            times: seconds per step in each turn, by side.
            values: results of a check; "seconds" is the time per step.
            errors: reasons for missing times or results, by side.
        """
        known = {**facts.get("peer", {}), **facts.get("lineage", {})}
        self.device = known.get("device", self.device)
        entry = {"section": section, "row": row, **values, "failed": dict(errors), "facts": known}
        if "seconds" in values:
            times = {"lineage": [values["seconds"]]}
        for side, seconds in times.items():
            if not seconds:
                continue
            middle = statistics.median(seconds)
            entry[side] = {"seconds": middle, "least": min(seconds), "most": max(seconds)}
            if "flops" in known:
                entry[side]["mfu"] = known["flops"] / middle / known["peak_flops"]
            if "bytes" in known:
                entry[side]["bandwidth"] = known["bytes"] / middle
        if "lineage" in entry and "peer" in entry:
            entry["ratio"] = statistics.median(a / b for a, b in zip(times["lineage"], times["peer"]))
        self.rows.append(entry)
        with (self.out / "rows.jsonl").open("a") as file:
            print(json.dumps(entry), file=file)
        (self.out / "table.md").write_text(self.table())
        print(" | ".join(cell for cell in cells(entry) if cell), flush=True)

    def failures(self, logs: Sequence[Path]) -> None:
        """Add the output of processes to `failures.txt`."""
        with (self.out / "failures.txt").open("a") as file:
            for log in logs:
                file.write(f"--- {log.stem}\n{log.read_text(errors='replace')[-20_000:]}\n")

    def table(self) -> str:
        """Return all rows as a Markdown table below the device and the versions of the packages."""
        lines = [HEADER, ("---",) * len(HEADER), *map(cells, self.rows)]
        return "\n".join([self.title(), "", *(f"| {' | '.join(line)} |" for line in lines), ""])

    def title(self) -> str:
        """Return the name of the device and the versions of the packages."""
        versions = []
        for name in PACKAGES:
            try:
                versions.append(f"{name} {metadata.version(name)}")
            except metadata.PackageNotFoundError:
                versions.append(f"no {name}")
        return ", ".join([self.device or "no device", *versions])


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a row of the table."""
    section = SECTIONS[row["section"]]
    pair = [row.get(side, {}) for side in ("lineage", "peer")]
    steps = row["facts"].get("steps", 1)
    milliseconds = [f"{side['seconds'] * 1e3 / steps:.3g}" if side else "" for side in pair]
    utilization = [f"{side['mfu']:.1%}" if "mfu" in side else "" for side in pair]
    bandwidth = [rate(side, row["facts"]) for side in pair]
    title = ", ".join(filter(None, (section.title, row["row"], row["facts"].get("sizes"))))
    ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
    return [title, *milliseconds, ratio, *utilization, *bandwidth, notes(row, section.peer)]


def rate(side: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Return the bandwidth in GB/s, and as a fraction of the data sheet's if the device is known."""
    if "bandwidth" not in side:
        return ""
    peak = facts["peak_bandwidth"]
    return f"{side['bandwidth'] / 1e9:,.3g}" + (f" ({side['bandwidth'] / peak:.0%})" if peak else "")


def notes(row: Mapping[str, Any], peer: str | None) -> str:
    """Return the results of a check and the errors of a row, in words."""
    parts = ["equal" if row["ok"] else "DIFFERENT"] if "ok" in row else []
    parts += [row["skipped"]] if "skipped" in row else []
    if "idle" in row:
        parts.append(f"the device is idle {row['idle']:.1%} of the time, a step of the loop takes {row['over']:+.1%}")
    for name, errors in row.get("errors", {}).items():
        parts.append(f"{name} {', '.join(f'{part} {error:.1e}' for part, error in errors.items())}")
    parts += [f"{peer if side == 'peer' else 'Lineage'}: {why}" for side, why in row["failed"].items()]
    return "; ".join(parts).replace("|", "/")
