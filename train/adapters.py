"""Small changes of the matrices of any model, of which alone a run trains the numbers.

LoRA (arXiv 2106.09685) adds a product of two thin matrices to a matrix, Transformer-squared's singular-value
fine-tuning (SVF, arXiv 2501.06252) multiplies each of its singular values by a factor. No model knows of it: what is
trained and what is not are two trees of variables, "params" and "base", of which `merged` makes the model's own.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

KINDS = ("lora", "svf")
Axes = dict[str, tuple[int, int]]  # path of a kernel -> how many of its last axes are inputs, and then outputs


def noting(axes: Axes) -> Callable[..., Any]:
    """What `flax.linen.intercept_methods` takes: it notes the kernels of a model whose `init` it sees."""

    def note(call, args, kwargs, context):
        out, module = call(*args, **kwargs), context.module
        if context.method_name == "__call__" and module.has_variable("params", "kernel"):
            features = getattr(module, "features", 1)
            outputs = len(features) if isinstance(features, tuple) else 1
            inputs = module.get_variable("params", "kernel").ndim - outputs  # without a stack's axis, which is outside
            axes["/".join((*module.path, "kernel"))] = inputs, outputs
        return out

    return note


def begin(
    params: Any,
    axes: Axes,
    key: jax.Array,
    *,
    name: str,
    patterns: Sequence[str],
    trained: Sequence[str] = (),
    rank: int = 8,
    alpha: float = 16.0,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is trained, and the base that is not, of a model's parameters; `merged`, they are these parameters.

    Args:
        params, axes: of the model, see `noting`.
        key: of LoRA's random numbers.
        name: "lora", or "svf", whose base has no singular vectors yet: `moved` computes them.
        patterns: regular expressions of the paths of kernels that are changed.
        trained: the same of parameters that are trained as they are.
        rank, alpha: of LoRA, which adds alpha / rank times the product.

    Raises:
        ValueError: the name is unknown, an expression finds nothing, or the rank is larger than a matrix's.
    """
    if name not in KINDS:
        raise ValueError(f"adapt.name is {name!r}: it must be one of {', '.join(KINDS)}.")
    flat = flatten_dict(params, sep="/")
    for option, expressions, paths in (("patterns", patterns, axes), ("trained", trained, flat)):
        for expression in expressions:
            if not any(re.search(expression, path) for path in paths):
                what = f"no {'matrix' if paths is axes else 'parameter'}; one is {next(iter(paths), 'not there')}"
                raise ValueError(f"adapt.{option}: {expression!r} finds {what}.")
    whole = {path for path in flat if any(re.search(expression, path) for expression in trained)}
    own, parts = {path: flat[path] for path in whole}, {}
    for number, path in enumerate(sorted(axes)):
        if path in whole or not any(re.search(expression, path) for expression in patterns):
            continue
        owner, shape, (count, outputs) = path.removesuffix("/kernel"), flat[path].shape, axes[path]
        stacked = len(shape) - count - outputs
        layers, inputs, outputs = shape[:stacked], shape[stacked : stacked + count], shape[stacked + count :]
        full = min(math.prod(inputs), math.prod(outputs))
        if name == "lora":
            if not 1 <= rank <= full:
                raise ValueError(f"adapt.rank is {rank}: for {path} it must be 1 to {full}.")
            noise = jax.random.normal(jax.random.fold_in(key, number), (*layers, *inputs, rank))
            own |= {f"lora/{owner}/a": noise * math.prod(inputs) ** -0.5}
            own |= {f"lora/{owner}/b": jnp.zeros((*layers, rank, *outputs))}
        else:
            own[f"svf/{owner}/scale"] = jnp.ones((*layers, full))
            sizes = {"u": (*layers, *inputs, full), "s": (*layers, full), "v": (*layers, full, *outputs)}
            parts |= {f"svf/{owner}/{part}": jnp.zeros(size) for part, size in sizes.items()}
    base = {"params": unflatten_dict({path: flat[path] for path in flat.keys() - whole}, sep="/")}
    base |= {"factor": jnp.float32(alpha / rank)} if name == "lora" else unflatten_dict(parts, sep="/")
    return unflatten_dict(own, sep="/"), base


def merged(variables: Mapping[str, Any]) -> dict[str, Any]:
    """A model's variables, of what is trained and a "base"; without a base, as they are.

    W + alpha / rank A B (arXiv 2106.09685, equation 3), or U diag(z s) V^T (arXiv 2501.06252, section 3.2) as
    W + U diag((z - 1) s) V^T, which is W itself where all factors z are 1.
    """
    variables = dict(variables)
    if "base" not in variables:
        return variables
    base, own = variables.pop("base"), dict(variables["params"])
    changes = {name: flatten_dict(own.pop(name), sep="/") for name in KINDS if name in own}
    flat = flatten_dict(base["params"], sep="/") | flatten_dict(own, sep="/")
    for path, left in changes.get("lora", {}).items():
        if path.endswith("/a"):
            owner = path.removesuffix("/a")
            right = changes["lora"][f"{owner}/b"]
            flat[f"{owner}/kernel"] = _plus(flat[f"{owner}/kernel"], left, base["factor"], right)
    vectors = flatten_dict(base.get("svf", {}), sep="/")
    for path, scale in changes.get("svf", {}).items():
        owner = path.removesuffix("/scale")
        u, s, v = (vectors[f"{owner}/{part}"] for part in "usv")
        flat[f"{owner}/kernel"] = _plus(flat[f"{owner}/kernel"], u, (scale - 1) * s, v)
    return variables | {"params": unflatten_dict(flat, sep="/")}


def _plus(kernel, left, scale, right):
    """kernel [*L, *inputs, *outputs] + left [*L, *inputs, R] diag(scale) right [*L, R, *outputs]; the scale is [*L, R]
    or one for all."""
    layers, rank = kernel.shape[: left.ndim + right.ndim - 2 - kernel.ndim], left.shape[-1]
    left = left.reshape(*layers, -1, rank) * jnp.atleast_1d(scale)[..., None, :]
    product = jnp.matmul(left, right.reshape(*layers, rank, -1), precision="highest")
    return kernel + product.reshape(kernel.shape).astype(kernel.dtype)


def moved(own: Mapping[str, Any], base: Mapping[str, Any], params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is trained, and the base, for other parameters of the model; SVF's singular vectors are theirs then."""
    flat = flatten_dict(params, sep="/")
    own = {path: flat.get(path, value) for path, value in flatten_dict(own, sep="/").items()}
    new = {path: flat.get(path.removeprefix("params/"), value) for path, value in flatten_dict(base, sep="/").items()}
    for path, vectors in new.items():
        if path.startswith("svf/") and path.endswith("/u"):
            owner = path.removeprefix("svf/").removesuffix("/u")
            others = new[f"svf/{owner}/v"]
            layers = others.shape[: vectors.ndim + others.ndim - 2 - flat[f"{owner}/kernel"].ndim]
            matrix = flat[f"{owner}/kernel"].reshape(*layers, math.prod(vectors.shape[len(layers) : -1]), -1)
            u, s, v = jnp.linalg.svd(matrix.astype(jnp.float32), full_matrices=False)
            found = {"u": u.reshape(vectors.shape), "s": s, "v": v.reshape(others.shape)}
            new |= {f"svf/{owner}/{part}": value for part, value in found.items()}
    return unflatten_dict(own, sep="/"), unflatten_dict(new, sep="/")


def mixture(weights: Float[Array, "K"], experts: Sequence[Any]) -> Any:
    """SVF's factors of several experts, 1 + sum_k weight_k (z_k - 1): what the weights lack to 1 is the base's part
    (arXiv 2501.06252, section 3.2, few-shot adaptation)."""
    return jax.tree.map(lambda *z: 1 + sum(weight * (each - 1) for weight, each in zip(weights, z)), *experts)
