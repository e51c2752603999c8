"""Costs of a model before it runs: parameters, FLOPs and memory, for training and for inference.

Nothing is allocated and nothing is specific to an architecture: parameters come from the shapes of `init`, FLOPs and
activations from the jaxprs of the forward pass and of the training step. The common closed-form estimate (arXiv
2001.08361) is given for comparison.
"""

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from lineage.models.base import Model
from lineage.models.jaxpr_costs import bytes_of, flops_by_kind, flops_by_scope, peak_bytes, saved_bytes


@dataclasses.dataclass(frozen=True)
class Budget:
    """Costs of a model.

    Attributes:
        parameters: number of parameters of each module, and their "total".
        flops: "forward" and "training" (the forward and backward pass of a step), see `jaxpr_costs.flops`; and "parts",
            the FLOPs of the matrix products of the forward pass by module.
        memory: bytes. "training": "weights", "gradients", "optimizer", "activations" (kept by the forward pass for the
            backward pass), "total" (peak of the step, when not all activations and gradients are alive, but temporary
            arrays are). "inference": "weights", "cache", "activations" (their peak), "total". Activations and totals
            are estimates, the other numbers are exact.
        textbook: "parameters" V D + 12 L D^2, and "flops" of the forward pass, 2 x parameters + 4 L T D for each of the
            T tokens (arXiv 2001.08361, table 1; arXiv 2204.02311, appendix B), if the model has such sizes.
    """

    parameters: dict[str, int]
    flops: dict[str, dict[str, int]]
    memory: dict[str, dict[str, int]]
    textbook: dict[str, int]

    def table(self) -> str:
        """Return the budget as aligned lines of text."""
        counts, forward, parts, textbook = self.parameters, self.flops["forward"], self.flops["parts"], self.textbook
        total, work = counts["total"], forward["matmul"] + forward["other"]
        rows = [("", "parameters", "share", "forward FLOPs", "share")]
        for name in dict.fromkeys([*counts, *parts]):
            if name != "total":
                number, part = counts.get(name, 0), parts.get(name, 0)
                rows.append((name, f"{number:,}", f"{number / total:.1%}", human(part), f"{part / work:.1%}"))
        rows.append(("element-wise operations", "", "", human(forward["other"]), f"{forward['other'] / work:.1%}"))
        rows.append(("total", f"{total:,}", "", human(work), ""))
        if textbook:
            parameters = [f"{textbook['parameters']:,}", f"{textbook['parameters'] / total - 1:+.1%}"]
            flops = [human(textbook["flops"]), f"{textbook['flops'] / work - 1:+.1%}"]
            rows.append(("textbook, V D + 12 L D^2", *parameters, *flops))
        step = self.flops["training"]
        work = {"matrix products": step["model"], "recomputation": step["matmul"] - step["model"]}
        work |= {"element-wise operations": step["other"], "total": step["matmul"] + step["other"]}
        sections = {"training step, FLOPs": {key: human(value) for key, value in work.items() if value}}
        for mode, memory in self.memory.items():
            rest = memory["total"] - sum(size for key, size in memory.items() if key != "total")
            name = "inputs and temporary arrays" if rest >= 0 else "not needed at the same time"
            sizes = {key: size for key, size in memory.items() if key != "total"}
            sizes |= {name: rest, "total": memory["total"]}
            sections[f"{mode} on one device, bytes"] = {key: human(size, 1024) for key, size in sizes.items()}
        for title, lines in sections.items():
            rows += [("", "", "", "", ""), (title, "", "", "", "")]
            rows += [(f"  {key}", value, "", "", "") for key, value in lines.items()]
        return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines of text, with the first column aligned to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    cells = ([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:]))] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in cells)


def human(number: int | float, base: int = 1000) -> str:
    """Return a number with a unit prefix and three to six digits; base 1024 is for numbers of bytes."""
    if number < 0:
        return f"-{human(-number, base)}"
    power = min(5, int(math.log(number, base) + 1e-9)) if number else 0
    unit = " KMGTP"[power] + ("iB" if power else "B") * (base == 1024)
    return f"{number / base**power:,.2f} {unit.strip()}".rstrip() if number else "0"


def budget(
    model: Model,
    inputs: tuple,
    *,
    variables: Any = None,
    merge: Callable[[Any, Any], Any] | None = None,
    loss: Callable[[Any, Any, Any, Any], Any] | None = None,
    batch: Any = None,
    optimizer: Callable[[Any], Any] | None = None,
    compute_dtype: Any = None,
    cache_length: int | None = None,
) -> Budget:
    """Return the costs of a model for inputs of these shapes. This takes seconds at any size.

    Args:
        model: the architecture.
        inputs: arguments of the model, arrays or `jax.ShapeDtypeStruct`s.
        variables: trained "params" and other collections, arrays or shapes; None: the variables of the model.
        merge: function (params, others) -> parameters of the model, if they are not the trained "params".
        loss: function (params, others, batch, rng) -> training loss; None: the sum of squared outputs.
        batch: batch of the loss, arrays or shapes; None: `inputs`.
        optimizer: function params -> optimizer state, such as `optax.adamw(1e-3).init`; None: Adam's two moments.
        compute_dtype: dtype of parameters and inputs in computation, and of weights and cache in inference.
        cache_length: number of tokens of a sequence in the KV cache of inference; None: no cache.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    model = model.portable()
    variables = dict(variables or jax.eval_shape(model.init, {"params": key, "dropout": key}, *inputs))
    params = variables.pop("params")
    merged = jax.eval_shape(merge, params, variables) if merge else params
    rest = {name: value for name, value in variables.items() if name != "frozen"}

    def apply(params, rest, inputs, **options):
        return model.apply({"params": params, **rest}, *inputs, **options)

    cast = jax.eval_shape(partial(_cast, dtype=compute_dtype), (merged, rest, inputs))
    forward, step = jax.make_jaxpr(apply)(*cast).jaxpr, (params, variables, inputs if batch is None else batch, key)
    counts, parts = _by_part(merged, forward)
    costs, training = _training(loss or partial(_sum_of_squares, model, compute_dtype), step, optimizer)
    inference = {"weights": bytes_of(cast[:2]), "cache": 0, "activations": peak_bytes(forward)}
    if cache_length is not None:
        size = (jax.tree.leaves(inputs)[0].shape[0], cache_length, 0)
        cache = partial(apply, inputs=size, method="init_cache")
        # As leaves, because a `Cache` takes no shapes instead of arrays.
        inference["cache"] = bytes_of(jax.eval_shape(lambda *cast: jax.tree.leaves(cache(*cast)), *cast[:2]))
    inference["total"] = sum(inference.values()) + bytes_of(cast[2:])

    sown = jax.eval_shape(partial(apply, mutable="intermediates"), *cast)[1]
    textbook = _textbook(model, sown.get("intermediates", {}))
    flops = {"forward": flops_by_kind(forward), "training": costs, "parts": parts}
    return Budget(counts | {"total": counts.total()}, flops, {"training": training, "inference": inference}, textbook)


def _training(loss, step, optimizer):
    """Return the FLOPs of a training step with these inputs (parameters, others, batch, rng), and its memory."""
    params, rest, batch, _ = step
    gradient = jax.make_jaxpr(jax.value_and_grad(loss))(*step).jaxpr
    weights = bytes_of(params)
    memory = {"weights": weights + bytes_of(rest), "gradients": weights}
    memory["optimizer"] = bytes_of(jax.eval_shape(optimizer, params)) if optimizer else 2 * weights
    memory["activations"] = saved_bytes(loss, *step)
    memory["total"] = memory["weights"] + memory["optimizer"] + bytes_of(batch) + peak_bytes(gradient)
    return flops_by_kind(gradient), memory


def _cast(tree, dtype):
    """Cast the floating-point arrays of a tree to a dtype; None changes nothing."""
    return jax.tree.map(lambda x: x.astype(dtype) if dtype and jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _sum_of_squares(model, dtype, params, rest, batch, key):
    """Return the sum of the squared outputs for the inputs `batch`."""
    variables, inputs = {"params": _cast(params, dtype), **rest}, _cast(batch, dtype)
    out, _ = model.apply(variables, *inputs, mutable=list(rest), rngs={"dropout": key})
    return sum(jnp.square(x.astype(jnp.float32)).sum() for x in jax.tree.leaves(out))


def _by_part(params, forward):
    """Return the number of parameters and the FLOPs of matrix products of each module."""
    counts, parts = Counter(), Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        counts[_part([entry.key for entry in path])] += math.prod(leaf.shape)
    for (scope, kind), number in flops_by_scope(forward).items():
        # A scope is the root's class, then modules, each perhaps with a method: "GPT/stack/layers.layer/layers/mlp/up".
        part = _part([name for name, _ in itertools.groupby(re.sub(r"\.[^/]*", "", scope).split("/"))][1:])
        parts[part if part in counts else "the rest"] += number if kind == "matmul" else 0
    return counts, {part: number for part, number in parts.items() if number}


def _textbook(model, sown):
    """Return the closed-form estimate of a model with one stack of blocks; empty for other models."""
    if "embedding" not in sown or not model.depth or not model.width:
        return {}
    vocabulary = model.data_options["vocab_size"] or model.data_options["num_classes"] or 0
    parameters = vocabulary * model.width + 12 * model.depth * model.width**2
    rows, tokens = sown["embedding"][0].shape[:2]
    per_token = 2 * parameters + 4 * model.depth * tokens * model.width
    return {"parameters": parameters, "flops": rows * tokens * per_token}


def _part(path):
    """Return the module of a path of names: the first name, or for repeated layers also the name below `layers`."""
    i = path.index("layers") if "layers" in path else None
    return "/".join(path[:1] if i is None else path[:i] + path[i + 1 : i + 2])
