"""What a model costs before it runs: parameters, FLOPs and memory, for training and for inference.

Nothing is allocated and nothing is specific to an architecture: parameters come from the shapes of `init`, FLOPs and
activations from the jaxprs of the forward pass and of the training step. Beside them stands the textbook's closed form.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

# Patterns of `jax.Device.device_kind`, the first that fits counts: bytes of memory, FLOP/s of dense matrix products in
# bfloat16 and in float32 at JAX's default precision (TF32 on NVIDIA, one bfloat16 pass on a TPU). Sources: NVIDIA's data
# sheets (HGX for B200) and Ada whitepaper, without sparsity; cloud.google.com/tpu/docs/v4, v5e, v5p, v6e.
ACCELERATORS = {
    "A100.*80GB": (80e9, 312e12, 156e12),
    "A100": (40e9, 312e12, 156e12),
    "H100 PCIe": (80e9, 756e12, 378e12),
    "H100 NVL": (94e9, 835e12, 417e12),
    "H100": (80e9, 989.4e12, 494.7e12),
    "H200": (141e9, 989.4e12, 494.7e12),
    "B200": (180e9, 2250e12, 1125e12),
    "RTX 4090$": (24e9, 165.2e12, 82.6e12),
    "TPU v4$": (32e9, 275e12, 275e12),
    "TPU v5 ?(lite|e)$": (16e9, 197e12, 197e12),
    "TPU v5p?$": (95e9, 459e12, 459e12),
    "TPU v6 ?(lite|e)$": (32e9, 918e12, 918e12),
}

# What costs no FLOPs: moves or makes data, or is a transcendental, which XLA's cost analysis counts apart.
FREE = frozenset(
    "atan2 bitcast_convert_type broadcast_in_dim cbrt concatenate copy cos device_put dynamic_slice dynamic_update_slice "
    "erf exp expm1 gather iota log log1p optimization_barrier pad pow random_fold_in random_seed random_split "
    "random_unwrap random_wrap reshape rev rsqrt scatter sharding_constraint sin slice split sqrt squeeze stop_gradient "
    "tan tanh transpose".split()
)
# FLOPs of an element where it is not 1. Threefry: 20 rounds of 5 operations, and additions of keys.
EXPANDED = {"erfc": 62, "erf_inv": 37, "logistic": 3, "argmax": 9, "argmin": 9, "random_bits": 120}
# What XLA computes wherever it is read, and (by prefix) what it stores even if it is read once.
VIEWS = frozenset("broadcast_in_dim convert_element_type copy iota reshape squeeze stop_gradient transpose".split())
STORED = ("arg", "conv_", "concat", "cum", "dot_", "dynamic_", "gather", "pad", "random_", "reduce_", "rev", "scatter")
STORED += ("select_and", "sort", "top_k")
REPEATED = "rematted_computation"  # jax.checkpoint's name scope around what the backward pass computes again


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a model costs, in plain numbers.

    Attributes:
        parameters: how many each part has, and "total".
        flops: "forward" {"matmul", "other", "parts" (of matmul)} and, of one step's forward and backward pass,
            "training", see `training_flops`.
        memory: bytes. "training" {"weights", "gradients", "optimizer", "activations" (what the forward pass keeps for
            the backward pass), "total" (at the step's peak)} and "inference" {"weights", "cache", "activations" (the
            most alive at once), "total"}. Weights, gradients, optimizer and cache are exact, the others estimates.
        textbook: "parameters" V D + 12 L D^2, and "flops" of the forward pass, 2 x parameters + 4 L T D for each of the
            T tokens (arXiv 2001.08361, table 1; arXiv 2204.02311, appendix B), as far as the model has such sizes.
    """

    parameters: dict[str, int]
    flops: dict[str, dict]
    memory: dict[str, dict[str, int]]
    textbook: dict[str, int]

    def to_dict(self) -> dict[str, dict]:
        """Nested dictionaries of numbers, ready for JSON."""
        return dataclasses.asdict(self)

    def table(self) -> str:
        """The budget as aligned lines of text."""
        forward, training = self.flops["forward"], self.flops["training"]
        total, flops, book = self.parameters["total"], forward["matmul"] + forward["other"], self.textbook
        rows = [("", "parameters", "share", "forward FLOPs", "share")]
        for part in dict.fromkeys([*self.parameters, *forward["parts"]]):
            number, work = self.parameters.get(part, 0), forward["parts"].get(part, 0)
            if part != "total":
                rows.append((part, f"{number:,}", f"{number / total:.1%}", _human(work), f"{work / flops:.1%}"))
        rows.append(("element-wise operations", "", "", _human(forward["other"]), f"{forward['other'] / flops:.1%}"))
        rows.append(("total", f"{total:,}", "", _human(flops), ""))
        if book:
            row = [f"{book['parameters']:,}", f"{book['parameters'] / total - 1:+.1%}"]
            row += [_human(book["flops"]), f"{book['flops'] / flops - 1:+.1%}"] if "flops" in book else ["", ""]
            rows.append(("textbook, V D + 12 L D^2", *row))
        names = {"model": "matrix products", "matmul": "with repeated ones", "other": "element-wise operations"}
        sections = {"training step, FLOPs": {name: _human(training[key]) for key, name in names.items()}}
        for mode, memory in self.memory.items():
            sections[f"{mode}, bytes"] = {key: _human(value, 1024) for key, value in memory.items()}
        for title, section in sections.items():
            rows += [
                ("",) * 5,
                (title, *("",) * 4),
                *((f"  {key}", value, "", "", "") for key, value in section.items()),
            ]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:]))] for row in rows)
        return "\n".join("  ".join(line).rstrip() for line in lines)


def _human(number, base=1000):
    power = min(5, int(math.log(number, base) + 1e-9)) if number else 0
    return f"{number / base**power:,.2f} {' KMGTP'[power]}{'iB' if base == 1024 and power else ''}".rstrip()


def budget(
    model: nn.Module,
    inputs: tuple | dict[str, Any],
    *,
    objective: Callable[[nn.Module, Any], Any] | None = None,
    batch: Any = None,
    optimizer: Callable[[Any], Any] | None = None,
    compute_dtype: Any = None,
    cache_length: int | None = None,
) -> Budget:
    """What a model costs on inputs of these shapes, found in seconds at any size.

    Args:
        inputs: arrays or `jax.ShapeDtypeStruct`s that the model is called with, by place or by name.
        objective: what training minimises: (bound model, batch) -> loss or (loss, ...). None stands for the sum of the
            squared outputs.
        batch: what the objective is given, arrays or shapes; None is `inputs`.
        optimizer: makes the optimizer's state of the parameters, as `optax.adamw(1e-3).init`; None: Adam's two moments.
        compute_dtype: parameters and inputs are cast to it, and so inference's weights and cache have it.
        cache_length: how many tokens a row of the KV cache of inference holds; None leaves the cache out.
    """
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (tuple(inputs), {})
    key = jax.eval_shape(lambda: jax.random.key(0))
    variables = dict(jax.eval_shape(model.init, {"params": key, "dropout": key}, *args, **kwargs))
    params = variables.pop("params")

    def cast(tree):
        narrow = compute_dtype is not None
        return jax.tree.map(
            lambda x: x.astype(compute_dtype) if narrow and jnp.issubdtype(x.dtype, jnp.floating) else x, tree
        )

    def apply(params, rest, args, kwargs, **how):
        return model.apply({"params": params, **rest}, *args, **kwargs, **how)

    def squares(model, batch):
        outputs = model(**batch) if isinstance(batch, dict) else model(*batch)
        return sum(jnp.square(x.astype(jnp.float32)).sum() for x in jax.tree.leaves(outputs))

    def loss(params, rest, batch, key):
        bound = nn.apply(objective or squares, model, mutable=list(rest))
        return bound({"params": cast(params), **rest}, cast(batch), rngs={"dropout": key})[0]

    light = jax.eval_shape(cast, (params, variables, args, kwargs))
    forward = jax.make_jaxpr(apply)(*light).jaxpr
    step_inputs = (params, variables, inputs if batch is None else batch, key)
    costs, parts, counts = _flops(forward), Counter(), Counter()
    for (scope, kind), number in costs.items():
        if kind == "matmul":
            # A scope is "GPT/stack/layers.layer/layers/mlp/up": the root's class, modules, and methods after a dot.
            parts[_part([name for name in scope.split("/")[1:] if name and "." not in name])] += number
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        counts[_part([entry.key for entry in path])] += math.prod(leaf.shape)

    weights, state = _bytes(params), _bytes(variables)
    moments = 2 * weights if optimizer is None else _bytes(jax.eval_shape(optimizer, params))
    gradient = jax.make_jaxpr(jax.value_and_grad(_scalar(loss)))(*step_inputs).jaxpr
    training = {"weights": weights + state, "gradients": weights, "optimizer": moments}
    training["activations"] = _saved(_scalar(loss), *step_inputs)
    training["total"] = weights + moments + _bytes(step_inputs[1:3]) + _peak(gradient)
    inference = {"weights": _bytes(light[:2]), "cache": 0, "activations": _peak(forward)}
    if cache_length is not None:
        size = (jax.tree.leaves(inputs)[0].shape[0], cache_length)
        empty = jax.eval_shape(lambda *light: apply(*light, size, {}, method="init_cache"), *light[:2])
        inference["cache"] = _bytes(empty)
    inference["total"] = sum(inference.values()) + _bytes(light[2:])

    textbook = {}
    if hasattr(model, "depth") and hasattr(model, "width"):
        vocabulary = getattr(model, "vocab_size", None) or getattr(model, "num_classes", 0)
        textbook["parameters"] = vocabulary * model.width + 12 * model.depth * model.width**2
        sown = jax.eval_shape(lambda *light: apply(*light, mutable="intermediates")[1], *light)
        if "embedding" in sown.get("intermediates", {}):
            rows, tokens = sown["intermediates"]["embedding"][0].shape[:2]
            flops = 2 * textbook["parameters"] + 4 * model.depth * tokens * model.width
            textbook["flops"] = rows * tokens * flops
    return Budget(
        parameters=dict(counts) | {"total": counts.total()},
        flops={
            "forward": {"matmul": parts.total(), "other": costs.total() - parts.total(), "parts": dict(parts)},
            "training": _training(gradient),
        },
        memory={"training": training, "inference": inference},
        textbook=textbook,
    )


def training_flops(loss: Callable, params: Any, *args: Any) -> dict[str, int]:
    """FLOPs of the forward and backward pass of loss(params, *args) -> loss or (loss, ...); all may be shapes.

    "matmul" are those of matrix products and convolutions, 2 for each multiply-add, and "other" those of element-wise
    operations and reductions, as XLA's cost analysis counts them. "model" is what model FLOPs utilisation counts:
    "matmul" without what rematerialisation repeats (arXiv 2204.02311, appendix B). A causal mask saves nothing. The
    optimizer's few FLOPs for each parameter are left out.
    """
    return _training(jax.make_jaxpr(jax.value_and_grad(_scalar(loss)))(params, *args).jaxpr)


def peak_flops(device_kind: str, dtype: Any) -> float | None:
    """Peak FLOP/s of a device in matrix products of a dtype; None when `ACCELERATORS` does not know."""
    column = {"bfloat16": 1, "float16": 1, "float32": 2}.get(jnp.dtype(dtype).name)
    rows = [row for pattern, row in ACCELERATORS.items() if re.search(pattern, device_kind)]
    return rows[0][column] if rows and column else None


def _training(jaxpr):
    kinds = Counter()
    for (_, kind), number in _flops(jaxpr).items():
        kinds[kind] += number
    return {"model": kinds["matmul"], "matmul": kinds["matmul"] + kinds["repeated"], "other": kinds["other"]}


def _scalar(loss):
    def scalar(*args):
        out = loss(*args)
        return out[0] if isinstance(out, tuple) else out

    return scalar


def _part(path):
    """A part of the model by a path of names: the first one, or where layers are repeated, the one below them too."""
    if "layers" not in path:
        return path[0] if path else "the rest"
    i = path.index("layers")
    return "/".join(path[:i] + path[i + 1 : i + 2])


def _size(variable):
    return math.prod(getattr(variable.aval, "shape", ()))


def _bytes(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _stored_bytes(variables):
    return sum(_bytes(v.aval) for v in variables)


def _variables(atoms):
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _bodies(eqn):
    """The jaxprs that an equation runs; those that combine two elements are no such."""
    return [] if eqn.primitive.name.startswith(("reduce", "scatter")) else list(jaxprs_in_params(eqn.params))


def _flops(jaxpr, scope="", times=1):
    """{(name scope, kind): FLOPs}; kinds are "matmul", "repeated" (those that rematerialisation repeats) and "other".

    A `while` counts as one turn, for nobody knows how many it takes, and a `cond` as its dearest branch.
    """
    total = Counter()
    for eqn in jaxpr.eqns:
        name, bodies = eqn.primitive.name, _bodies(eqn)
        path = f"{scope}/{eqn.source_info.name_stack}".strip("/")
        turns = eqn.params["length"] if name == "scan" else 1
        if name == "pallas_call":
            turns = math.prod(eqn.params["grid_mapping"].grid)
        costs = [_flops(body, path, times * turns) for body in bodies]
        if name == "cond":
            total += max(costs, key=Counter.total)
        elif bodies:
            total += sum(costs, Counter())
        elif products := _products(eqn):
            total[path, "repeated" if REPEATED in path else "matmul"] += 2 * products * times
        elif name not in FREE:
            total[path, "other"] += _elementwise(eqn) * times
    return total


def _products(eqn):
    """Multiply-adds of a matrix product, a convolution or a fused attention; 0 for anything else."""
    name, params = eqn.primitive.name, eqn.params
    shapes = [getattr(v.aval, "shape", ()) for v in (*eqn.invars[:2], eqn.outvars[0])] if eqn.outvars else []
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return math.prod(shapes[2]) * math.prod(shapes[0][i] for i in contracted)
    if name == "conv_general_dilated":
        specs = params["dimension_numbers"]
        left, right, out = ([shape[i] for i in spec] for shape, spec in zip(shapes, specs))
        # Padding, and the zeros that dilation puts in between, are not multiplied.
        taps = [
            (at >= 0) & (at <= (size - 1) * gap) & (at % gap == 0)
            for size, kernel, places, (low, _), stride, gap, spread in zip(
                left[2:],
                right[2:],
                out[2:],
                params["padding"],
                params["window_strides"],
                params["lhs_dilation"],
                params["rhs_dilation"],
            )
            for at in [np.arange(places)[:, None] * stride - low + np.arange(kernel) * spread]
        ]
        return out[0] * out[1] * right[1] * math.prod(int(tap.sum()) for tap in taps)
    if name.startswith("dot_product_attention"):  # cuDNN's: [B, T, H, C] and [B, S, K, C]; 2 products, 4 backward
        return (4 if "bwd" in name else 2) * math.prod(shapes[0]) * shapes[1][1]
    return 0


def _elementwise(eqn):
    name, out = eqn.primitive.name, sum(map(_size, eqn.outvars))
    if name.startswith(("reduce_window", "select_and_")):
        return out * (math.prod(eqn.params["window_dimensions"]) - 1)
    if name.startswith("scatter"):
        return _size(eqn.invars[2])
    if name.startswith(("reduce_", "arg")) and name != "reduce_precision":
        out = _size(eqn.invars[0]) - out
    elif name == "sort":
        out *= math.ceil(math.log2(max(2, eqn.invars[0].aval.shape[eqn.params["dimension"]])))
    return out * EXPANDED.get(name, 1)


def _saved(loss, params, *args):
    """Bytes that the forward pass keeps for the backward pass; what depends on the parameters alone does not count."""
    backward = lambda params, *args: jax.vjp(lambda params: loss(params, *args), params)[1]  # noqa: E731
    jaxpr = jax.make_jaxpr(backward)(params, *args).jaxpr
    varying = set(jaxpr.invars[len(jax.tree.leaves(params)) :])
    for eqn in jaxpr.eqns:
        if varying.intersection(_variables(eqn.invars)):
            varying.update(eqn.outvars)
    return _stored_bytes(varying.intersection(_variables(jaxpr.outvars)) - set(jaxpr.invars))


def _peak(jaxpr):
    """Bytes alive at the most beside the inputs, if views and element-wise operations read once are never stored."""
    readers = Counter(v for eqn in jaxpr.eqns for v in _variables(eqn.invars))
    looped = {v for eqn in jaxpr.eqns if eqn.primitive.name in ("scan", "while") for v in _variables(eqn.invars)}
    results = set(_variables(jaxpr.outvars))
    sources, stored, last = {}, set(), {}  # what a variable is computed from; what has memory; where it is read last
    for i, eqn in enumerate(jaxpr.eqns):
        name = eqn.primitive.name
        read = {source for v in _variables(eqn.invars) for source in sources.get(v, {v})}
        last.update(dict.fromkeys(read, i))
        for v in eqn.outvars:
            fused = name in VIEWS or (readers[v] < 2 and not _bodies(eqn) and not name.startswith(STORED))
            if fused and v not in looped and (v not in results or name == "reshape"):
                sources[v] = read
            else:
                stored.add(v)
    last.update({source: len(jaxpr.eqns) for v in results for source in sources.get(v, {v})})
    alive = peak = 0
    dying = {}
    for v in stored:
        dying.setdefault(last.get(v), []).append(v)
    for i, eqn in enumerate(jaxpr.eqns):
        made = [v for v in eqn.outvars if v in stored]
        alive += _stored_bytes(made)
        inside = [_peak(body) - _stored_bytes(_variables(body.outvars)) for body in _bodies(eqn)]
        peak = max(peak, alive + max([0, *inside]))
        alive -= _stored_bytes([v for v in made if v not in last]) + _stored_bytes(dying.get(i, []))
    return peak
