"""Flash attention for NVIDIA GPUs with dropout on the weights and relative biases (arXiv 2307.08691), in Triton.

cuDNN's kernel, which is used otherwise, supports dropout only with a seed that is a compile-time constant. With a
causal mask, a query without any visible key gets the mean of the values in the blocks up to its own.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from lineage.models.kernels.devices import MASKED, SAVED, Shape, on_devices
from lineage.models.kernels.triton_programs import BLOCK, Pair, Program, call, tokens, with_padded_masks


def attend_padded(
    arrays: dict[str, Array], *, program: type[Program] = Program, **settings: Any
) -> Float[Array, "B T D"]:
    """Pad the last blocks of queries and keys, and attend."""
    length = arrays["query"].shape[1]
    rows, columns = (((0, 0), (0, -arrays[name].shape[1] % BLOCK), (0, 0)) for name in ("query", "key"))
    widths = {"query": rows, "key": columns, "value": columns}
    arrays = {name: jnp.pad(x, widths.get(name, 0)) for name, x in with_padded_masks(arrays).items()}
    return _attend(program, Shape(heads=1, rows=BLOCK, **settings), arrays)[:, :length]


flash = partial(on_devices, attend_padded)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(program: type[Program], shape: Shape, arrays: dict[str, Array]) -> Float[Array, "B T D"]:
    """Attend on one device, see `on_devices`; T and S are multiples of `BLOCK`."""
    return _attend_forward(program, shape, arrays)[0]


def _attend_forward(program, shape, arrays):
    query = arrays["query"]
    batch, length, width = query.shape
    statistic = jax.ShapeDtypeStruct((batch, width // shape.channels, length), jnp.float32)
    outputs = {"out": query, "largest": statistic, "total": statistic}
    results = call(program, shape, _forward, 2, arrays, outputs, length)
    results = checkpoint_name(results, SAVED)
    return results["out"], (arrays, results)


def _attend_backward(program, shape, residuals, gradient):
    arrays, results = residuals
    products = (results["out"].astype(jnp.float32) * gradient).reshape(*gradient.shape[:2], -1, shape.channels)
    delta = products.sum(axis=-1).swapaxes(1, 2)
    statistics = {"delta": delta, "largest": results["largest"], "total": results["total"]}
    inputs = arrays | statistics | {"gradient": gradient}
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    run = partial(call, program, shape)
    gradients = run(_key_gradients, 4, inputs, {"key": key, "value": value}, key.shape[1])
    gradients |= run(_query_gradients, 3, inputs, {"query": query}, query.shape[1])
    if "bias" in arrays:
        bias = jax.ShapeDtypeStruct(arrays["bias"].shape, jnp.float32)
        gradients |= run(_bias_gradients, 2, inputs, {"bias": bias}, query.shape[1], examples=len(query))
    return ({name: gradients[name].astype(x.dtype) if name in gradients else None for name, x in arrays.items()},)


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(program: Program, outputs: dict[str, Any]) -> None:
    """Write the outputs of a block of queries, and the largest score and the sum of the exponentials of each query."""
    row = program.block
    query = program.refs["query"][0, tokens(row), :]

    def visit(index, carry):
        out, largest, total = carry
        pair = program.with_keys(index)
        keys = program.keys(pair.column)
        scores = program.scores(pair, query, keys["key"])
        larger = jnp.maximum(largest, scores.max(axis=1))
        powers, factor = jnp.exp2(scores - larger[:, None]), jnp.exp2(largest - larger)
        out = out * factor[:, None] + triton.dot(program.drop(pair, powers).astype(query.dtype), keys["value"])
        return out, larger, total * factor + powers.sum(axis=1)

    start = jnp.zeros(query.shape, jnp.float32), jnp.full(BLOCK, MASKED), jnp.zeros(BLOCK)
    out, largest, total = jax.lax.fori_loop(*program.visible_keys(), visit, start)
    outputs["out"][0, tokens(row), :] = (out * (program.shape.factor / total)[:, None]).astype(query.dtype)
    outputs["largest"][0, 0, tokens(row)] = largest
    outputs["total"][0, 0, tokens(row)] = total


def _key_gradients(program: Program, outputs: dict[str, Any]) -> None:
    """Write the gradients of a block of keys and of its values."""
    column = program.block
    keys = program.keys(column)

    def visit(index, carry):
        pair = program.with_queries(index)
        queries = program.queries(pair.row)
        weights, d_scores = program.gradients(pair, queries, keys)
        d_key = triton.dot(d_scores.astype(weights.dtype), queries["query"], trans_a=True)
        return carry[0] + d_key, carry[1] + triton.dot(weights, queries["gradient"], trans_a=True)

    start = (jnp.zeros(keys["key"].shape, jnp.float32),) * 2
    d_key, d_value = jax.lax.fori_loop(*program.seeing_queries(), visit, start)
    outputs["key"][0, tokens(column), :] = (d_key * program.shape.scale).astype(keys["key"].dtype)
    outputs["value"][0, tokens(column), :] = (d_value * program.shape.factor).astype(keys["value"].dtype)


def _query_gradients(program: Program, outputs: dict[str, Any]) -> None:
    """Write the gradients of a block of queries."""
    row = program.block
    queries = program.queries(row)

    def visit(index, d_query):
        pair = program.with_keys(index)
        keys = program.keys(pair.column)
        _, d_scores = program.gradients(pair, queries, keys)
        return d_query + triton.dot(d_scores.astype(keys["key"].dtype), keys["key"])

    start = jnp.zeros(queries["query"].shape, jnp.float32)
    d_query = jax.lax.fori_loop(*program.visible_keys(), visit, start) * program.shape.scale
    outputs["query"][0, tokens(row), :] = d_query.astype(queries["query"].dtype)


def _bias_gradients(program: Program, outputs: dict[str, Any]) -> None:
    """Write the gradients of a block of rows of the bias, summed over all examples."""
    row, examples = program.block, program.refs["query"].shape[0]

    def visit(column, _):
        def add(example, total):
            queries, keys = program.queries(row, example), program.keys(column, example)
            return total + program.gradients(Pair(row, column), queries, keys, example)[1]

        zeros = jnp.zeros((BLOCK, BLOCK), jnp.float32)
        outputs["bias"][0, 0, tokens(row), tokens(column)] = jax.lax.fori_loop(0, examples, add, zeros)
        return 0

    jax.lax.fori_loop(0, program.refs["key"].shape[1] // BLOCK, visit, 0)
