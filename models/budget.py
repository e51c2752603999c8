"""What a model costs before it runs: parameters, FLOPs and memory, for training and for inference.

Nothing is allocated and nothing is specific to an architecture: parameters come from the shapes of `init`, FLOPs and
activations from the jaxprs of the forward pass and of the training step. Beside them stands the textbook's closed form.
"""

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params


class Accelerator(NamedTuple):
    """A device.

    Attributes:
        kind: a regular expression of its `jax.Device.device_kind`.
        memory: GB.
        bfloat16, float32: TFLOP/s of dense matrix products without sparsity, in float32 at JAX's default precision
            (TF32 on NVIDIA, one bfloat16 pass on a TPU).
    """

    kind: str
    memory: float
    bfloat16: float
    float32: float

    def peak(self, dtype: Any) -> float | None:
        """FLOP/s of matrix products of a dtype; None for others than these and float16."""
        peaks = {"bfloat16": self.bfloat16, "float16": self.bfloat16, "float32": self.float32}
        return peaks[name] * 1e12 if (name := jnp.dtype(dtype).name) in peaks else None


# From NVIDIA's data sheets (HGX for B200) and Ada whitepaper, and cloud.google.com/tpu/docs/v4, v5e, v5p, v6e. Of a
# device the first that fits counts.
ACCELERATORS = {
    "A100 80 GB": Accelerator("A100.*80GB", 80, 312, 156),
    "A100 40 GB": Accelerator("A100", 40, 312, 156),
    "H100 PCIe": Accelerator("H100 PCIe", 80, 756, 378),
    "H100 NVL": Accelerator("H100 NVL", 94, 835, 417),
    "H100": Accelerator("H100", 80, 989.4, 494.7),
    "H200": Accelerator("H200", 141, 989.4, 494.7),
    "B200": Accelerator("B200", 180, 2250, 1125),
    "RTX 4090": Accelerator("RTX 4090$", 24, 165.2, 82.6),
    "TPU v4": Accelerator("TPU v4$", 32, 275, 275),
    "TPU v5e": Accelerator("TPU v5 ?(lite|e)$", 16, 197, 197),
    "TPU v5p": Accelerator("TPU v5p?$", 95, 459, 459),
    "TPU v6e": Accelerator("TPU v6 ?(lite|e)$", 32, 918, 918),
}

# Primitives without FLOPs: they move or make data, or are transcendental, which XLA's cost analysis counts apart.
FREE = re.compile(
    "atan2|bitcast|broadcast|cbrt|concat|copy|cos|device_put|dynamic_|erf$|exp|gather|iota|log$|log1p|optimization_|pad|"
    "pow|random_(?!bits)|reshape|rev|rsqrt|scatter$|sharding|sin|slice|split|sqrt|squeeze|stop_|tan|transpose"
)
# FLOPs of an element where it is not 1. Threefry: 20 rounds of 5 operations, and additions of keys.
EXPANDED = {"erfc": 62, "erf_inv": 37, "logistic": 3, "argmax": 9, "argmin": 9, "random_bits": 120}
# What is computed wherever it is read, and what is stored even if it is read once.
VIEWS = re.compile("broadcast_in|convert_|copy|iota|reshape|squeeze|stop_|transpose")
STORED = re.compile("arg|conv_|concat|cum|dot_|dynamic_|gather|pad|random_|reduce_|rev|scatter|select_and|sort|top_k")
TEMPORARIES = {"erfc": 3}  # arrays of its result's size that XLA needs meanwhile
REPEATED = "rematted_computation"  # jax.checkpoint's name scope around what the backward pass computes again


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a model costs, in plain numbers.

    Attributes:
        parameters: how many each part has, and "total".
        flops: "forward" and "training" (one step's forward and backward pass), see `flops`; and "parts" of the forward
            pass's matrix products.
        memory: bytes. "training": "weights", "gradients", "optimizer", "activations" (what the forward pass keeps for
            the backward pass), "total" (at the step's peak). "inference": "weights", "cache", "activations" (the most
            alive at once), "total". Activations and totals are estimates, the others exact.
        textbook: "parameters" V D + 12 L D^2, and "flops" of the forward pass, 2 x parameters + 4 L T D for each of the
            T tokens (arXiv 2001.08361, table 1; arXiv 2204.02311, appendix B), as far as the model has such sizes.
    """

    parameters: dict[str, int]
    flops: dict[str, dict[str, int]]
    memory: dict[str, dict[str, int]]
    textbook: dict[str, int]

    def to_dict(self) -> dict[str, dict]:
        """Nested dictionaries of numbers, ready for JSON."""
        return dataclasses.asdict(self)

    def table(self) -> str:
        """The budget as aligned lines of text."""
        counts, forward, parts, book = self.parameters, self.flops["forward"], self.flops["parts"], self.textbook
        total, work = counts["total"], forward["matmul"] + forward["other"]
        rows = [("", "parameters", "share", "forward FLOPs", "share")]
        for name in dict.fromkeys([*counts, *parts]):
            if name != "total":
                number, part = counts.get(name, 0), parts.get(name, 0)
                rows.append((name, f"{number:,}", f"{number / total:.1%}", human(part), f"{part / work:.1%}"))
        rows.append(("element-wise operations", "", "", human(forward["other"]), f"{forward['other'] / work:.1%}"))
        rows.append(("total", f"{total:,}", "", human(work), ""))
        if book:
            parameters = [f"{book['parameters']:,}", f"{book['parameters'] / total - 1:+.1%}"]
            flops = [human(book["flops"]), f"{book['flops'] / work - 1:+.1%}"]
            rows.append(("textbook, V D + 12 L D^2", *parameters, *flops))
        names = {"model": "matrix products", "matmul": "with recomputation", "other": "element-wise operations"}
        sections = {"training step, FLOPs": {name: human(self.flops["training"][key]) for key, name in names.items()}}
        for mode, memory in self.memory.items():
            sections[f"{mode}, bytes"] = {key: human(value, 1024) for key, value in memory.items()}
        for title, lines in sections.items():
            rows += [("",) * 5, (title, *[""] * 4), *((f"  {key}", value, *[""] * 3) for key, value in lines.items())]
        return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines of text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    cells = ([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:]))] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in cells)


def human(number: int | float, base: int = 1000) -> str:
    """Three to six digits with a prefix; by 1,024 they are bytes."""
    power = min(5, int(math.log(number, base) + 1e-9)) if number else 0
    unit = " KMGTP"[power] + ("iB" if power else "B") * (base == 1024)
    return f"{number / base**power:,.2f} {unit.strip()}".rstrip() if number else "0"


def budget(
    model: nn.Module,
    inputs: tuple,
    *,
    objective: Callable[[nn.Module, Any], Any] | None = None,
    batch: Any = None,
    optimizer: Callable[[Any], Any] | None = None,
    variables: Any = None,
    adapter: Any = None,
    compute_dtype: Any = None,
    cache_length: int | None = None,
) -> Budget:
    """What a model costs on inputs of these shapes, found in seconds at any size.

    Args:
        inputs: arrays or `jax.ShapeDtypeStruct`s that the model is called with.
        objective: what training minimises: (bound model, batch) -> loss or (loss, ...). None stands for the sum of the
            squared outputs.
        batch: what the objective is given, arrays or shapes; None is `inputs`.
        optimizer: makes the optimizer's state of the parameters, as `optax.adamw(1e-3).init`; None: Adam's two moments.
        variables: with an adapter, arrays or shapes: its trained "params", its "frozen" ones and the model's other
            collections; None stands for the model's own variables, all of them trained.
        adapter: makes the model's parameters of the trained and the frozen ones (`adapter.apply`).
        compute_dtype: parameters and inputs are cast to it, and so inference's weights and cache have it.
        cache_length: how many tokens a row of the KV cache of inference holds; None leaves the cache out.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    # Parameters are float32, which some kernels do not take; their shapes do not depend on the kernel.
    variables = dict(variables or jax.eval_shape(model.portable().init, {"params": key, "dropout": key}, *inputs))
    params = variables.pop("params")

    def complete(params, rest):
        """Return the model's variables, and the original parameters for objectives that compare with them."""
        if adapter is None:
            return {"params": params, **rest}, {}
        rest = dict(rest)
        frozen = rest.pop("frozen")
        return {"params": adapter.apply(frozen, params), **rest}, {"reference": cast(adapter.reference(frozen))}

    def cast(tree):
        floating = lambda x: compute_dtype and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
        return jax.tree.map(lambda x: x.astype(compute_dtype) if floating(x) else x, tree)

    def apply(params, rest, inputs, **how):
        return model.apply({"params": params, **rest}, *inputs, **how)

    def squares(model, inputs):
        return sum(jnp.square(x.astype(jnp.float32)).sum() for x in jax.tree.leaves(model(*inputs)))

    def loss(params, rest, batch, key):
        whole, reference = complete(params, rest)
        function = nn.apply(objective or squares, model, mutable=[name for name in whole if name != "params"])
        out = function(whole | reference | {"params": cast(whole["params"])}, cast(batch), rngs={"dropout": key})[0]
        return out[0] if isinstance(out, tuple) else out

    whole, _ = jax.eval_shape(complete, params, variables)
    rest = {name: value for name, value in whole.items() if name != "params"}
    light = jax.eval_shape(cast, (whole["params"], rest, inputs))
    forward = jax.make_jaxpr(apply)(*light).jaxpr
    step_inputs = (params, variables, inputs if batch is None else batch, key)
    gradient = jax.make_jaxpr(jax.value_and_grad(loss))(*step_inputs).jaxpr
    counts, parts = Counter(), Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(light[0]):
        counts[_part([entry.key for entry in path])] += math.prod(leaf.shape)
    for (scope, kind), number in _flops(forward).items():
        # A scope is the root's class, then modules, each perhaps with a method: "GPT/stack/layers.layer/layers/mlp/up".
        part = _part([name for name, _ in itertools.groupby(re.sub(r"\.[^/]*", "", scope).split("/"))][1:])
        parts[part if part in counts else "the rest"] += number if kind == "matmul" else 0

    weights, state = _bytes(params), _bytes(variables)
    training = {"weights": weights + state, "gradients": weights}
    training["optimizer"] = _bytes(jax.eval_shape(optimizer, params)) if optimizer else 2 * weights
    training["activations"] = _saved(loss, *step_inputs)
    training["total"] = training["weights"] + training["optimizer"] + _bytes(step_inputs[2]) + _peak(gradient)
    inference = {"weights": _bytes(light[:2]), "cache": 0, "activations": _peak(forward)}
    if cache_length is not None:
        size = (jax.tree.leaves(inputs)[0].shape[0], cache_length)
        empty = lambda *light: jax.tree.leaves(apply(*light, size, method="init_cache"))  # noqa: E731
        inference["cache"] = _bytes(jax.eval_shape(empty, *light[:2]))
    inference["total"] = sum(inference.values()) + _bytes(light[2:])

    sown = jax.eval_shape(lambda *light: apply(*light, mutable="intermediates")[1], *light).get("intermediates", {})
    costs = {"forward": _kinds(forward), "training": _kinds(gradient), "parts": {k: v for k, v in parts.items() if v}}
    memory = {"training": training, "inference": inference}
    return Budget(counts | {"total": counts.total()}, costs, memory, _textbook(model, sown))


def _textbook(model, sown):
    """The closed form of a model of one stack of blocks, by its sizes; nothing for others."""
    if "embedding" not in sown or not model.depth or not model.width:
        return {}
    vocabulary = model.settings.get("vocab_size") or model.settings.get("num_classes", 0)
    parameters = vocabulary * model.width + 12 * model.depth * model.width**2
    rows, tokens = sown["embedding"][0].shape[:2]
    each = 2 * parameters + 4 * model.depth * tokens * model.width
    return {"parameters": parameters, "flops": rows * tokens * each}


def flops(function: Callable, *args: Any) -> dict[str, int]:
    """FLOPs of function(*args), such as `jax.value_and_grad(loss)` or a whole training step; args may be shapes.

    "matmul" are those of matrix products and convolutions, 2 for each multiply-add, and "other" those of element-wise
    operations and reductions as XLA's cost analysis counts them, on all devices together. "model" is what model FLOPs
    utilisation counts: "matmul" without what rematerialisation repeats (arXiv 2204.02311, appendix B). A causal mask
    saves nothing; a `while` counts as one turn, for nobody knows how many it takes; a `cond` as its dearest branch.
    """
    return _kinds(jax.make_jaxpr(function)(*args).jaxpr)


def peak_flops(device_kind: str, dtype: Any) -> float | None:
    """Peak FLOP/s of a device in matrix products of a dtype; None when `ACCELERATORS` does not know."""
    known = (device for device in ACCELERATORS.values() if re.search(device.kind, device_kind))
    device = next(known, None)
    return device and device.peak(dtype)


def _part(path):
    """A part of the model by a path of names: the first one, or where layers are repeated, the one below them too."""
    i = path.index("layers") if "layers" in path else None
    return "/".join(path[:1] if i is None else path[:i] + path[i + 1 : i + 2])


def _kinds(jaxpr):
    kinds = Counter()
    for (_, kind), number in _flops(jaxpr).items():
        kinds[kind] += number
    return {"model": kinds["matmul"], "matmul": kinds["matmul"] + kinds["repeated"], "other": kinds["other"]}


def _flops(jaxpr, scope="", times=1):
    """{(name scope, kind): FLOPs} of kinds "matmul", "repeated" (by rematerialisation) and "other"."""
    total = Counter()
    for eqn in jaxpr.eqns:
        name, bodies, path = eqn.primitive.name, _bodies(eqn), f"{scope}/{eqn.source_info.name_stack}".strip("/")
        turns = eqn.params["length"] if name == "scan" else 1
        if name == "pallas_call":
            turns = math.prod(eqn.params["grid_mapping"].grid)
        costs = [_flops(body, path, times * turns) for body in bodies]
        if bodies:
            total += max(costs, key=Counter.total) if name == "cond" else sum(costs, Counter())
        elif products := _products(eqn):
            total[path, "repeated" if REPEATED in path else "matmul"] += 2 * products * times
        elif not FREE.match(name):
            total[path, "other"] += _elementwise(eqn) * times
    return total


def _bodies(eqn):
    """The jaxprs that an equation runs; those that combine two elements are none."""
    return [] if eqn.primitive.name.startswith(("reduce", "scatter")) else list(jaxprs_in_params(eqn.params))


def _products(eqn):
    """Multiply-adds of a matrix product, a convolution or a fused attention; 0 for anything else."""
    name, params, shapes = eqn.primitive.name, eqn.params, [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return math.prod(shapes[2]) * math.prod(shapes[0][i] for i in contracted)
    if name == "conv_general_dilated":
        left, right, out = ([shape[i] for i in spec] for shape, spec in zip(shapes, params["dimension_numbers"]))
        products = out[0] * out[1] * right[1]
        for i, (low, _) in enumerate(params["padding"]):
            at = np.arange(out[i + 2])[:, None] * params["window_strides"][i] - low
            at, gap = at + np.arange(right[i + 2]) * params["rhs_dilation"][i], params["lhs_dilation"][i]
            # Padding, and the zeros that dilation puts in between, are not multiplied.
            products *= int(((at >= 0) & (at <= (left[i + 2] - 1) * gap) & (at % gap == 0)).sum())
        return products
    if name.startswith("dot_product_attention"):  # cuDNN's: [B, T, H, C] and [B, S, K, C]; 2 products, 4 backward
        return (4 if "bwd" in name else 2) * math.prod(shapes[0]) * shapes[1][1]
    return 0


def _elementwise(eqn):
    name, shapes = eqn.primitive.name, [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    out = math.prod(shapes[-1])
    if name.startswith(("reduce_window", "select_and_")):
        return out * (math.prod(eqn.params["window_dimensions"]) - 1)
    if name.startswith("scatter"):
        return math.prod(shapes[2])
    if name.startswith(("reduce_", "arg")) and name != "reduce_precision":
        out = math.prod(shapes[0]) - out
    elif name == "sort":
        out *= math.ceil(math.log2(max(2, shapes[0][eqn.params["dimension"]])))
    return out * EXPANDED.get(name, 1)


def _bytes(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _variables(atoms):
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _saved(loss, params, *args):
    """Bytes that the forward pass keeps for the backward pass; what depends on the parameters alone does not count."""
    jaxpr = jax.make_jaxpr(lambda p, *args: jax.vjp(lambda p: loss(p, *args), p)[1])(params, *args).jaxpr
    varying = set(jaxpr.invars[len(jax.tree.leaves(params)) :])
    for eqn in jaxpr.eqns:
        if varying.intersection(_variables(eqn.invars)):
            varying.update(eqn.outvars)
    return _bytes([v.aval for v in varying.intersection(_variables(jaxpr.outvars)) - set(jaxpr.invars)])


def _inside(eqn, body):
    """Bytes that an equation needs beside what goes in and comes out: a turn of a loop copies its results out."""
    if eqn.primitive.name == "scan":
        return _peak(body, kept=False)
    return _peak(body) - _bytes([v.aval for v in _variables(body.outvars)])


def _peak(jaxpr, kept=True):
    """Bytes alive at the most beside the inputs, if views and element-wise operations read once are never stored.

    With `kept`, its results are alive to the end.
    """
    readers = Counter(v for eqn in jaxpr.eqns for v in _variables(eqn.invars))
    looped = {v for eqn in jaxpr.eqns if eqn.primitive.name in ("scan", "while") for v in _variables(eqn.invars)}
    results = set(_variables(jaxpr.outvars))
    sources, stored, last = {}, set(), {}  # what a variable is computed from; what has memory; where it is read last
    for i, eqn in enumerate(jaxpr.eqns):
        name = eqn.primitive.name
        read = {source for v in _variables(eqn.invars) for source in sources.get(v, {v})}
        last.update(dict.fromkeys(read, i))
        for v in eqn.outvars:
            fused = VIEWS.match(name) or (readers[v] < 2 and not _bodies(eqn) and not STORED.match(name))
            if fused and v not in looped and (v not in results or name == "reshape"):
                sources[v] = read
            else:
                stored.add(v)
                last[v] = i
    if kept:
        last.update({source: len(jaxpr.eqns) for v in results for source in sources.get(v, {v})})
    alive, peak, dying = 0, 0, Counter()
    for v in stored:
        dying[last[v]] += _bytes(v.aval)
    for i, eqn in enumerate(jaxpr.eqns):
        alive += _bytes([v.aval for v in eqn.outvars if v in stored])
        inside = [_inside(eqn, body) for body in _bodies(eqn)]
        inside.append(TEMPORARIES.get(eqn.primitive.name, 0) * _bytes([v.aval for v in eqn.outvars]))
        peak = max(peak, alive + max([0, *inside]))
        alive -= dying[i]
    return peak
