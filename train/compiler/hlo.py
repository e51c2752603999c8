"""Parser of optimized HLO text: computations and operations, with their sizes, FLOPs and memory traffic."""

import re
from collections import defaultdict
from math import prod
from typing import NamedTuple

BYTES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
OPERATION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")


class Operation(NamedTuple):
    """One line of HLO: `name = shape kind(operands), attributes`."""

    name: str
    shape: str
    kind: str
    operands: tuple[str, ...]
    inputs: tuple[str, ...]  # shapes of the operands
    attributes: str

    def called(self, attribute: str = "calls") -> str:
        """Return the name of the computation in an attribute, "" if there is none."""
        match = re.search(rf"{attribute}=%?([\w.\-]+)", self.attributes)
        return match.group(1) if match else ""

    def number(self, name: str) -> float | None:
        """Return a number of the backend config, such as "estimated_cycles"."""
        match = re.search(rf'"{name}":"?([\d.e\-]+)', self.attributes)
        return match and float(match.group(1))

    @property
    def label(self) -> str:
        """The last components of JAX's name stack, with the pass to which the operation belongs."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        path = re.sub(r"^jit\(\w+\)/", "", match.group(1)) if match else self.name
        path = re.sub(r"_\d+|\[\d+\]|\.\d+", "", path)
        path = re.sub(r"/(while|body|closed_call|checkpoint|layer|cond)(?=/)", "", path)
        prefix = ("backward " if "transpose(" in path else "") + ("recomputed " if "rematted" in path else "")
        return prefix + "/".join(path.split("/")[-3:])


Computation = dict[str, Operation]


class Module:
    """Computations of an optimized program.

    Attributes:
        computations: computations by name, each with its operations by name, in order.
        entry: name of the computation that is run.
        donated: number of outputs that reuse the memory of an input.
    """

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        current: Computation = {}
        # The metadata of a kernel spans several lines, of which only the first is indented.
        for line in re.sub(r"\n(?=[\"}]+[^\n])", "", text).splitlines():
            if line and not line[0].isspace() and (head := HEAD.match(line)):
                current = self.computations[head.group(2)] = {}
                self.entry = head.group(2) if head.group(1) else self.entry
            elif match := OPERATION.match(line):
                name, shape, kind, rest = match.groups()
                operands = tuple(re.findall(r"%([\w.\-]+)", rest.split("), ")[0]))
                inputs = tuple(current[operand].shape for operand in operands if operand in current)
                current[name] = Operation(name, shape, kind, operands, inputs, rest)
        aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", text)
        self.donated = aliases.group(1).count("alias)") if aliases else 0

    def trips(self, loop: Operation) -> int:
        """Return the trip count of a loop, from the compiler or else from the constant in the loop's condition."""
        if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(known.group(1))
        condition = self.computations[loop.called("condition")]
        constants = [o.attributes.split(")")[0] for o in condition.values() if o.kind == "constant"]
        return max((int(text) for text in constants if text.isdigit()), default=1)

    def products(self, operation: Operation) -> tuple[int, bool]:
        """Return the FLOPs of the matrix products in an operation, and whether any of them has float32 inputs."""
        if operation.kind == "fusion":
            inside = self.computations.get(operation.called(), {})
            parts = [self.products(member) for member in inside.values()]
            return sum(flops for flops, _ in parts), any(wide for _, wide in parts)
        library = any(name in operation.attributes[:2000] for name in ("gemm", "matmul"))
        if len(operation.inputs) < 2 or not (operation.kind in ("dot", "convolution") or library):
            return 0, False
        left, right = operation.inputs[:2]
        wide = left.startswith("f32") and right.startswith("f32")
        outputs = prod(dimensions(operation.shape))
        if operation.kind == "convolution":
            labels = re.search(r"dim_labels=\w+_(\w+)->", operation.attributes)
            kernel = dimensions(right)
            if not (labels and kernel):
                return 0, wide
            return 2 * outputs * prod(kernel) // max(kernel[labels.group(1).index("o")], 1), wide
        axes = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]"?([\d",]*)', operation.attributes)
        contracted = [int(axis) for axis in re.findall(r"\d+", axes.group(1))] if axes else [-1]
        return 2 * outputs * prod(dimensions(left)[axis] for axis in contracted), wide

    def moved(self, operation: Operation) -> int:
        """Return the bytes that an operation reads and writes; for a sliced input, only the slice is counted."""
        if not (called := operation.called()):
            return sum(map(size, operation.inputs)) + size(operation.shape)
        inside = self.computations[called]
        users: dict[str, list[tuple[int, Operation]]] = defaultdict(list)
        for member in inside.values():
            for position, name in enumerate(member.operands):
                users[name].append((position, member))

        def read(name: str) -> int | None:
            """Return the number of bytes read from a value; None if all of it is read."""
            parts = []
            for position, user in users[name]:
                if user.kind in ("dynamic-slice", "slice", "gather") and position == 0:
                    parts.append(size(user.shape))
                elif user.kind == "dynamic-update-slice" and position == 0:
                    parts.append(0)
                elif user.kind in ("bitcast", "reshape"):
                    parts.append(read(user.name))
                else:
                    return None
            return None if None in parts else sum(parts)

        total, written = 0, size(operation.shape)
        for member in inside.values():
            if member.kind == "parameter":
                part = read(member.name)
                total += size(member.shape) if part is None else min(part, size(member.shape))
            elif member.kind == "dynamic-update-slice" and member.operands[1] in inside:
                written -= size(member.shape) - size(inside[member.operands[1]].shape)
        return total + max(written, 0)


def size(shape: str, in_main_memory: bool = False) -> int:
    """Return the bytes of a shape or tuple of shapes, optionally without arrays in on-chip memory."""
    arrays = (array for array in ARRAY.findall(shape) if not (in_main_memory and "S(1)" in array[2]))
    return sum(BYTES.get(dtype, 1) * prod(map(int, filter(None, axes.split(",")))) for dtype, axes, _ in arrays)


def dimensions(shape: str) -> list[int]:
    """Return the dimensions of the first array of a shape."""
    match = ARRAY.search(shape)
    return [int(axis) for axis in match.group(2).split(",") if axis] if match else []
