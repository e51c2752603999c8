"""FLOPs and memory of a function, counted in its jaxpr; nothing is allocated."""

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

# Primitives without FLOPs: those that move or create data, and transcendental ones, which XLA counts separately.
FREE = re.compile(
    "atan2|bitcast|broadcast|cbrt|concat|copy|cos|device_put|dynamic_|erf$|exp|gather|iota|log$|log1p|optimization_|pad|"
    "pow|random_(?!bits)|reshape|rev|rsqrt|scatter$|sharding|sin|slice|split|sqrt|squeeze|stop_|tan|transpose"
)
# FLOPs of an element if they are not 1. Threefry: 20 rounds of 5 operations, and additions of keys.
EXPANDED = {"erfc": 62, "erf_inv": 37, "logistic": 3, "argmax": 9, "argmin": 9, "random_bits": 120}
# Primitives whose results are recomputed by every reader, and those whose results are stored even for one reader.
VIEWS = re.compile("broadcast_in|convert_|copy|iota|reshape|squeeze|stop_|transpose")
STORED = re.compile("arg|conv_|concat|cum|dot_|dynamic_|gather|pad|random_|reduce_|rev|scatter|select_and|sort|top_k")
TEMPORARIES = {"erfc": 3}  # temporary arrays of the result's size
REPEATED = "rematted_computation"  # name scope of recomputation by jax.checkpoint


def flops(function: Callable, *args: Any) -> dict[str, int]:
    """Return the FLOPs of function(*args), such as `jax.value_and_grad(loss)`; args may be shapes.

    "matmul" counts matrix products and convolutions, with 2 FLOPs for each multiply-add; "other" counts element-wise
    operations and reductions as XLA's cost analysis does; both on all devices together. "model", for model FLOPs
    utilization, is "matmul" without rematerialization (arXiv 2204.02311, appendix B). A causal mask saves nothing. A
    `while` counts as one iteration, a `cond` as its most expensive branch.
    """
    return flops_by_kind(jax.make_jaxpr(function)(*args).jaxpr)


def flops_by_kind(jaxpr: Any) -> dict[str, int]:
    """Return the FLOPs of a jaxpr by kind, see `flops`."""
    kinds = Counter()
    for (_, kind), number in flops_by_scope(jaxpr).items():
        kinds[kind] += number
    return {"model": kinds["matmul"], "matmul": kinds["matmul"] + kinds["repeated"], "other": kinds["other"]}


def flops_by_scope(jaxpr: Any, scope: str = "", times: int = 1) -> Counter:
    """Return {(name scope, kind): FLOPs} for the kinds "matmul", "repeated" (by rematerialization) and "other"."""
    total = Counter()
    for eqn in jaxpr.eqns:
        name, bodies, path = eqn.primitive.name, _bodies(eqn), f"{scope}/{eqn.source_info.name_stack}".strip("/")
        iterations = eqn.params["length"] if name == "scan" else 1
        if name == "pallas_call":
            iterations = math.prod(eqn.params["grid_mapping"].grid)
        costs = [flops_by_scope(body, path, times * iterations) for body in bodies]
        if bodies:
            total += max(costs, key=Counter.total) if name == "cond" else sum(costs, Counter())
        elif products := _products(eqn):
            total[path, "repeated" if REPEATED in path else "matmul"] += 2 * products * times
        elif not FREE.match(name):
            total[path, "other"] += _elementwise(eqn) * times
    return total


def _bodies(eqn):
    """Return the jaxprs that an equation runs by default, without those that combine two elements."""
    if eqn.primitive.name.startswith(("reduce", "scatter")):
        return []
    bodies = list(jaxprs_in_params(eqn.params))
    return bodies[-1:] if eqn.params.get("branches_platforms") else bodies


def _products(eqn):
    """Return the multiply-adds of a matrix product or a convolution; 0 for anything else."""
    name, params, shapes = eqn.primitive.name, eqn.params, [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return math.prod(shapes[2]) * math.prod(shapes[0][i] for i in contracted)
    if name == "conv_general_dilated":
        left, right, out = ([shape[i] for i in spec] for shape, spec in zip(shapes, params["dimension_numbers"]))
        products = out[0] * out[1] * right[1]
        for i, (low, _) in enumerate(params["padding"]):
            index = np.arange(out[i + 2])[:, None] * params["window_strides"][i] - low
            index, gap = index + np.arange(right[i + 2]) * params["rhs_dilation"][i], params["lhs_dilation"][i]
            # Padding, and the zeros that dilation inserts, are not counted.
            products *= int(((index >= 0) & (index <= (left[i + 2] - 1) * gap) & (index % gap == 0)).sum())
        return products
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


def bytes_of(tree: Any) -> int:
    """Return the number of bytes of the arrays of a tree, or of their shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _variables(atoms):
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def saved_bytes(loss: Callable, params: Any, *args: Any) -> int:
    """Return the bytes of the residuals of the backward pass that depend on more than `params`."""
    jaxpr = jax.make_jaxpr(lambda p, *args: jax.vjp(lambda p: loss(p, *args), p)[1])(params, *args).jaxpr
    varying = set(jaxpr.invars[len(jax.tree.leaves(params)) :])
    for eqn in jaxpr.eqns:
        if varying.intersection(_variables(eqn.invars)):
            varying.update(eqn.outvars)
    return bytes_of([v.aval for v in varying.intersection(_variables(jaxpr.outvars)) - set(jaxpr.invars)])


def _inside(eqn, body):
    """Return the bytes that an equation needs besides its inputs and outputs; an iteration copies its results."""
    if eqn.primitive.name == "scan":
        return peak_bytes(body, kept=False)
    return peak_bytes(body) - bytes_of([v.aval for v in _variables(body.outvars)])


def peak_bytes(jaxpr: Any, kept: bool = True) -> int:
    """Return the maximum number of bytes that are alive at once, without the inputs.

    Views, and results of element-wise operations that are read once, are not stored. With `kept`, the results of the
    jaxpr are alive to the end.
    """
    readers = Counter(v for eqn in jaxpr.eqns for v in _variables(eqn.invars))
    looped = {v for eqn in jaxpr.eqns if eqn.primitive.name in ("scan", "while") for v in _variables(eqn.invars)}
    results = set(_variables(jaxpr.outvars))
    sources, stored, last = {}, set(), {}  # sources of views; variables with memory; equations of their last use
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
    alive, peak, freed = 0, 0, Counter()
    for v in stored:
        freed[last[v]] += bytes_of(v.aval)
    for i, eqn in enumerate(jaxpr.eqns):
        alive += bytes_of([v.aval for v in eqn.outvars if v in stored])
        inside = [_inside(eqn, body) for body in _bodies(eqn)]
        inside.append(TEMPORARIES.get(eqn.primitive.name, 0) * bytes_of([v.aval for v in eqn.outvars]))
        peak = max(peak, alive + max([0, *inside]))
        alive -= freed[i]
    return peak
