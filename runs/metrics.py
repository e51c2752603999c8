"""Incremental, thinned reading of a long `metrics.jsonl`."""

import math
from functools import partial
from pathlib import Path
from typing import Any

from lineage.configs.atomic import regular
from lineage.runs.folder import MAX_LINE, parse_line

MAX_KEPT = 20_000  # maximum number of lines of training steps that one call keeps


class GrowingMetrics:
    """Lines of a `metrics.jsonl`; each call of `read` parses only the lines that are new since the last call.

    If there are more than `MAX_KEPT` lines, only evenly spaced lines, lines of evaluations (10 `MAX_KEPT` at most),
    lines with values that are not finite, and the last line are parsed and kept.

    Attributes:
        lines: the lines so far, in order; null is NaN.
        left_out: number of lines that were not kept.
    """

    def __init__(self, path: Path):
        self.path = path
        self._restart()

    def _restart(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self._end = self._number = 0  # numbers of bytes and lines that were read
        self.left_out = 0
        self._last = b""  # last line that was read

    def read(self) -> list[dict[str, Any]]:
        """Read the new lines, or all of them if the file has been rewritten; return all lines.

        A last line without a line break is left for the next call.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is damaged; the message names the line.
        """
        with regular(self.path).open("rb") as file:
            file.seek(self._end - len(self._last))
            if file.read(len(self._last)) != self._last or len(self.lines) > 4 * MAX_KEPT:
                self._restart()
                file.seek(0)
            sample = file.read(1 << 16)
            size = max(self.path.stat().st_size - self._end, 0)
            count = size * (sample.count(b"\n") or 1) // (len(sample) or 1)  # estimated number of new lines
            stride = max(count // MAX_KEPT, 1)
            file.seek(self._end)
            skipped, nonfinite, evaluations = b"", 0, 0
            for place, line in enumerate(iter(partial(file.readline, MAX_LINE), b"")):
                is_nonfinite, is_evaluation = b"null" in line, b'"train/' not in line
                is_long = len(line) == MAX_LINE
                nonfinite, evaluations = nonfinite + is_nonfinite, evaluations + is_evaluation
                wanted = (
                    place % stride == 0
                    or (is_nonfinite and nonfinite <= MAX_KEPT)
                    or (is_evaluation and evaluations <= 10 * MAX_KEPT)
                    or is_long
                )
                is_whole = line.endswith(b"\n") or is_long
                if not is_whole or (wanted and not self._add(line, is_last=not file.peek(1))):
                    break
                self._end, self._number = self._end + len(line), self._number + 1
                self._last, skipped = line, b"" if wanted else line
                self.left_out += not wanted
            if skipped and self._add(skipped, is_last=True):
                self.left_out -= 1
        return self.lines

    def _add(self, line: bytes, is_last: bool) -> bool:
        """Parse a line and keep it; return False if it is the last one and damaged."""
        try:
            parsed = parse_line(line, self.path, self._number + 1)
        except ValueError:
            if is_last:  # incomplete because the process was killed while writing
                return False
            raise
        self.lines.append({key: math.nan if value is None else value for key, value in parsed.items()})
        return True
