"""Cost plan of a compiled program: durations of operations, communication and largest buffers."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from lineage.models import visited_blocks
from lineage.train.compiler.chips import Chip
from lineage.train.compiler.hlo import ARRAY, Module, Operation, dimensions, size

# Fraction of the peak assumed by the roofline for operations without a compiler estimate. Attention with dropout on
# GPUs has about 900 instructions for each pair of blocks, whose matrix products need 250 to 490 cycles.
MATMUL_EFFICIENCY, ATTENTION_EFFICIENCY, DROPOUT_EFFICIENCY = 0.75, 0.5, 0.25
LARGE = 2**26  # minimum size of listed buffers in bytes
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Operations that take no time or are hidden by other operations.
FREE = re.compile(
    r"parameter|constant|get-tuple-element|tuple|bitcast|after-all|partition-id|.*-done|copy-start|slice-start|"
    "optimization-barrier|iota|async-update|add-dependency"
)
FREE_CALL = re.compile("ConcatBitcast|AllocateBuffer|AssumeGatherIndicesInBound|GatherScatterIndicesBitpacked|Sharding")


class Row(NamedTuple):
    """Cost of an operation."""

    seconds: float  # total over all executions
    estimated: bool  # whether the compiler estimated the seconds; otherwise they are a roofline estimate
    kind: str  # HLO's name of the operation, "matmul", "f32 matmul" or the library's function
    label: str  # origin in the model
    shape: str  # shape of the result
    times: int  # number of executions


class Collective(NamedTuple):
    """Communication between the devices."""

    kind: str  # one of `COLLECTIVES`
    bytes: int  # bytes per execution
    times: int  # number of executions
    seconds: float  # seconds per execution, at the bandwidth of the interconnect
    hidden: float  # the part of the seconds that overlaps with other operations
    label: str  # origin in the model


class Buffer(NamedTuple):
    """Array of at least `LARGE` bytes that the program writes `times` times."""

    bytes: int
    times: int
    shape: str
    label: str


@dataclass
class Plan:
    """Costs of a program on a chip.

    Times are added over the entry computation and the bodies of its loops. The compiler's estimates are used if there
    are any (`estimated_cycles` on TPUs, some fusions on GPUs); gathers, scatters, custom calls and most operations on
    GPUs are estimated by a roofline: the larger of FLOPs / peak and bytes / bandwidth. Asynchronous copies are assumed
    to be hidden, and collectives as far as there is work between their start and end. Plans are for comparing programs
    for the same chip; they do not predict measured times.
    """

    text: str  # optimized HLO of the program
    chip: Chip  # target of the compilation
    rows: list[Row] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)

    def __post_init__(self):
        self.module = Module(self.text)
        self._add(self.module.entry, 1)

    @property
    def estimated(self) -> float:
        """Seconds that the compiler estimated."""
        return sum(row.seconds for row in self.rows if row.estimated)

    @property
    def roofline(self) -> float:
        """Seconds of operations without an estimate."""
        return sum(row.seconds for row in self.rows if not row.estimated)

    @property
    def exposed(self) -> float:
        """Seconds of communication that does not overlap with computation; an upper bound."""
        return sum(collective.times * (collective.seconds - collective.hidden) for collective in self.collectives)

    @property
    def seconds(self) -> float:
        """Planned seconds of the whole program."""
        return self.estimated + self.roofline + self.exposed

    def share(self, kind: str) -> float:
        """Return the fraction of the time of all kinds of operations that match a regular expression."""
        return sum(row.seconds for row in self.rows if re.search(kind, row.kind)) / max(self.seconds, 1e-12)

    def costliest(self) -> list[Row]:
        """Return the 15 most expensive operations, merged by origin and kind."""
        merged: dict[tuple[str, str], Row] = {}
        for row in self.rows:
            known = merged.get((row.label, row.kind))
            if known:
                shape = max(row, known).shape
                row = row._replace(seconds=row.seconds + known.seconds, times=row.times + known.times, shape=shape)
            merged[row.label, row.kind] = row
        return sorted(merged.values(), reverse=True)[:15]

    def _add(self, name: str, times: int) -> None:
        """Add the operations of a computation that is executed `times` times."""
        operations = self.module.computations[name]
        pending: dict[str, Collective] = {}  # started collectives; operations before their ends hide them
        for operation in operations.values():
            if operation.kind == "while":
                self._add(operation.called("body"), times * self.module.trips(operation))
            elif operation.kind == "call":
                self._add(operation.called("to_apply"), times)
            elif operation.kind == "conditional":
                self._add_slowest(operation, times)
            else:
                self._add_buffers(operation, times)
                if self._is_communication(operation, operations, pending, times):
                    continue
                seconds, estimated, kind = self._cost(operation)
                pending |= {name: begun._replace(hidden=begun.hidden + seconds) for name, begun in pending.items()}
                if seconds:
                    shape = re.sub(r"\{[^}]*\}", "", operation.shape)
                    self.rows.append(Row(seconds * times, estimated, kind, operation.label, shape, times))

    def _add_slowest(self, operation: Operation, times: int) -> None:
        """Add the slowest branch of a conditional."""
        branches = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", operation.attributes)
        if match := re.search(r"branch_computations=\{([^}]*)\}", operation.attributes):
            branches = [name.strip().lstrip("%") for name in match.group(1).split(",")]
        plans = []
        for branch in branches:
            before = len(self.rows)
            self._add(branch, times)
            plans.append(self.rows[before:])
            del self.rows[before:]
        self.rows += max(plans, key=lambda rows: sum(row.seconds for row in rows), default=[])

    def _add_buffers(self, operation: Operation, times: int) -> None:
        if operation.kind in ("parameter", "get-tuple-element", "tuple", "bitcast") or operation.kind.endswith("-done"):
            return
        for dtype, axes, _ in ARRAY.findall(operation.shape):
            shape = f"{dtype}[{axes}]"
            if (number := size(shape)) >= LARGE:
                known = self.buffers.get(shape)
                label = known.label if known else operation.label
                self.buffers[shape] = Buffer(number, times + (known.times if known else 0), shape, label)

    def _is_communication(
        self, operation: Operation, operations: Mapping[str, Operation], pending: dict[str, Collective], times: int
    ) -> bool:
        """Record a collective, or its start or end; return whether the operation does nothing else."""
        computes = operation.kind == "fusion" and operation.number("estimated_cycles") is not None
        started = next((name for name in _sources(operation, operations) if name in pending), None)
        if started and ("done" in operation.kind or "collective-done" in operation.name):
            ended = pending.pop(started)
            self.collectives.append(ended._replace(hidden=min(ended.hidden, ended.seconds)))
            return operation.kind != "fusion"
        inside = None
        if operation.kind in ("async-start", "fusion"):
            members = self.module.computations.get(operation.called(), {}).values()
            inside = next((member for member in members if member.kind.startswith(COLLECTIVES)), None)
        source = inside or operation
        kind = next((kind for kind in COLLECTIVES if source.kind.startswith(kind)), None)
        if kind is None or operation.kind.endswith("-done"):
            return kind is not None
        number = _bytes_sent(operation, inside, kind)
        seconds = number * (2 if kind == "all-reduce" else 1) / self.chip.link
        collective = Collective(kind, number, times, seconds, 0.0, operation.label)
        if operation.kind.endswith("-start") or "start" in operation.name:
            pending[operation.name] = collective
        else:
            self.collectives.append(collective)
        return not computes

    def _cost(self, operation: Operation) -> tuple[float, bool, str]:
        """Return the seconds of one execution, whether the compiler estimated them, and the kind of the operation."""
        if FREE.fullmatch(operation.kind):
            return 0.0, True, operation.kind
        flops, wide = self.module.products(operation)
        kind = operation.kind
        if flops:
            kind = "f32 matmul" if wide else "matmul"
        cycles, microseconds = operation.number("estimated_cycles"), operation.number("exec_time_us")
        if self.chip.clock and cycles is not None:
            return cycles / self.chip.clock, True, kind
        if operation.kind == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', operation.attributes)
            kind = target.group(1) if target else kind
            if FREE_CALL.fullmatch(kind):
                return 0.0, True, kind
            if cost := self._kernel(operation, kind):
                return cost, False, kind
        if microseconds is not None:
            return microseconds * 1e-6, True, kind
        peak = self.chip.float32_peak if wide else self.chip.peak
        moved = self._moved(operation, bool(flops))
        return max(flops / peak / MATMUL_EFFICIENCY, moved / self.chip.bandwidth), False, kind

    def _kernel(self, operation: Operation, kind: str) -> float | None:
        """Return the seconds of a kernel with known cost: one with a cost estimate, or attention; None for others."""
        moved = sum(size(shape, in_main_memory=True) for shape in (*operation.inputs, operation.shape))
        shapes = [dimensions(shape) for shape in operation.inputs if shape.startswith(("bf16", "f16", "f32"))]
        if cost := re.search(r'cost_estimate":\{"flops":"?(\d+)"?.*?"bytes_accessed":"?(\d+)', operation.attributes):
            flops, moved = map(int, cost.groups())
        elif kind == "tpu_custom_call" and re.search("splash|flash", operation.name):
            # Heads fill the 128 lanes; blocks that the mask excludes are skipped.
            (*batch, queries, channels), (*_, keys, _) = [s for s in shapes if len(s) >= 3][:2]
            flops = (4 if "fwd" in operation.name else 10) * prod(batch) * queries * keys * max(channels, 128)
            if visits := re.search(r"visits_(\d+)_of_(\d+)_blocks", operation.attributes):
                flops = flops * int(visits[1]) // int(visits[2])
        elif "fmha" in kind:
            batch, queries, heads, channels = shapes[0]
            flops = (10 if "Backward" in kind else 4) * batch * queries * heads * channels * shapes[1][1]
            if re.search(r'"mask_type":\s*"CAUSAL"', operation.attributes):  # tiles of 128 x 128 are skipped
                window = re.search(r'"sliding_window_length":\s*"?([1-9]\d*)', operation.attributes)
                window = window and int(window[1])
                visited, tiles = visited_blocks((queries, shapes[1][1]), (128, 128), True, window)
                flops = flops * visited // tiles
        elif known := re.search(r"attention_of_(\d+)_flops", operation.attributes):  # with dropout, in Triton
            return max(int(known[1]) / self.chip.peak / DROPOUT_EFFICIENCY, moved / self.chip.bandwidth)
        else:
            return None
        return max(flops / self.chip.peak / ATTENTION_EFFICIENCY, moved / self.chip.bandwidth)

    def _moved(self, operation: Operation, product: bool) -> int:
        """Return the bytes that an operation reads and writes in main memory."""
        read = [size(shape, in_main_memory=True) for shape in operation.inputs]
        if operation.kind in ("gather", "dynamic-slice") or "gather" in operation.name:
            return 2 * size(operation.shape)
        if operation.kind == "scatter" or "scatter" in operation.name:
            updates = sorted(read)[-2:][0] if read else 0  # without the array that they update
            return size(operation.shape) + updates
        if operation.kind == "dynamic-update-slice":
            return 2 * min(read, default=0)
        if operation.kind == "fusion" or product:
            return self.module.moved(operation)
        return sum(read) + size(operation.shape, in_main_memory=True)


def _sources(operation: Operation, operations: Mapping[str, Operation]) -> Iterator[str]:
    """Yield the operands of an operation, and the operands of its tuple elements."""
    for name in operation.operands:
        yield name
        if name in operations and operations[name].kind == "get-tuple-element":
            yield from operations[name].operands


def _bytes_sent(operation: Operation, inside: Operation | None, kind: str) -> int:
    """Return the bytes that a collective sends or receives."""
    if inside:
        return size(inside.shape)
    if operation.kind.endswith("-start") and kind in ("all-gather", "collective-permute"):
        return max((size(f"{dtype}[{axes}]") for dtype, axes, _ in ARRAY.findall(operation.shape)), default=0)
    return max(size(operation.shape), sum(map(size, operation.inputs)))
