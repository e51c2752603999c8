"""Adapters: small trainable changes to the matrices of a frozen model.

LoRA (arXiv 2106.09685) adds the product of two low-rank matrices to a matrix; singular value fine-tuning (SVF,
Transformer-squared, arXiv 2501.06252) multiplies each singular value of a matrix by a factor. Models are
unaware of adapters: the adapter computes the model's parameters from the trained and frozen arrays of the state.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from lineage.configs.registry import Count, Range, Registry, check_expressions, check_matches, check_ranges, matches

ADAPTERS: Registry = Registry("adapter")
Kernels = dict[str, tuple[int, int]]  # path of a kernel -> numbers of its input and output axes
Params = Any


def recording(kernels: Kernels) -> Callable[..., Any]:
    """Return an interceptor for `flax.linen.intercept_methods` that records the kernels of a model during `init`."""

    def record(call, args, kwargs, context):
        out, module = call(*args, **kwargs), context.module
        if context.method_name == "__call__" and module.has_variable("params", "kernel"):
            features = getattr(module, "features", 1)
            outputs = len(features) if isinstance(features, tuple) else 1
            # A scanned stack adds its axis of layers outside the module, so that axis is not counted here.
            inputs = module.get_variable("params", "kernel").ndim - outputs
            kernels["/".join((*module.path, "kernel"))] = inputs, outputs
        return out

    return record


def adapted_path(path: str) -> str:
    """Return the path of a trained parameter in the model: without the prefix of an adapter, if it has one."""
    first, _, rest = path.partition("/")
    return rest if first in {getattr(kind, "prefix", None) for kind in ADAPTERS.values()} else path


class Matrix(NamedTuple):
    """A kernel [*layers, *inputs, *outputs] as one matrix per layer, with the sizes of its axes."""

    owner: str  # path of the module that has the kernel
    layers: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def full_rank(self) -> int:
        return min(math.prod(self.inputs), math.prod(self.outputs))


@ADAPTERS.register("none")
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Adapter:
    """Train all parameters of the model; base class of the other adapters.

    An adapter is hashable and, in a pytree, has no leaves.
    """

    def __post_init__(self):
        check_ranges("adapter", self)

    def init(self, params: Params, kernels: Kernels, key: jax.Array) -> tuple[Any, Any]:
        """Split the parameters of a model into trained and frozen ones; `apply` restores the model's parameters."""
        return params, None

    def apply(self, frozen: Any, trained: Any) -> Params:
        """Return the parameters of the model."""
        return trained

    def rebase(self, trained: Any, frozen: Any, params: Params) -> tuple[Any, Any]:
        """Return the trained and the frozen parameters for other initial parameters of the same model."""
        return params, frozen

    def reference(self, frozen: Any) -> Params | None:
        """Return the frozen parameters of the original model; None without an adapter."""
        return None


ADAPTERS.base = Adapter
NO_ADAPTER = Adapter()


@dataclasses.dataclass(frozen=True)
class MatrixAdapter(Adapter):
    """Base class of adapters that change matrices.

    Attributes:
        patterns: regular expressions; a kernel is adapted if its path matches one of them.
        trained: regular expressions; a parameter is trained directly if its path matches one of them.
    """

    patterns: tuple[str, ...] = ("layers/",)
    trained: tuple[str, ...] = ()

    prefix: ClassVar[str]  # key of the adapter's arrays among the trained ones

    def __post_init__(self):
        super().__post_init__()
        check_expressions("adapter.patterns", self.patterns)
        check_expressions("adapter.trained", self.trained)

    def init(self, params, kernels, key):
        flat = flatten_dict(params, sep="/")
        check_matches("adapter.patterns", self.patterns, kernels, "matrix")
        check_matches("adapter.trained", self.trained, flat)
        direct = {path for path in flat if matches(self.trained, path)}
        trained, constants = {path: flat[path] for path in direct}, {}
        for number, path in enumerate(sorted(kernels)):
            if path in direct or not matches(self.patterns, path):
                continue
            shape, (inputs, outputs) = flat[path].shape, kernels[path]
            at = len(shape) - inputs - outputs
            sizes = shape[:at], shape[at : at + inputs], shape[at + inputs :]
            matrix = Matrix(path.removesuffix("/kernel"), *sizes)
            new, constant = self._init_matrix(matrix, jax.random.fold_in(key, number))
            trained, constants = trained | new, constants | constant
        frozen = {"params": unflatten_dict({path: flat[path] for path in flat.keys() - direct}, sep="/")}
        return unflatten_dict(trained, sep="/"), frozen | unflatten_dict(constants, sep="/")

    def apply(self, frozen, trained):
        direct = dict(trained)
        factors = flatten_dict(direct.pop(self.prefix, {}), sep="/")
        constants = flatten_dict(frozen, sep="/")
        flat = flatten_dict(frozen["params"], sep="/") | flatten_dict(direct, sep="/")
        for owner in dict.fromkeys(path.rpartition("/")[0] for path in factors):
            product = self._product(owner, factors, constants)
            flat[f"{owner}/kernel"] = _add_product(flat[f"{owner}/kernel"], *product)
        return unflatten_dict(flat, sep="/")

    def rebase(self, trained, frozen, params):
        flat = flatten_dict(params, sep="/")
        trained = {path: flat.get(path, value) for path, value in flatten_dict(trained, sep="/").items()}
        frozen = flatten_dict(frozen, sep="/")
        frozen = {path: flat.get(path.removeprefix("params/"), value) for path, value in frozen.items()}
        return unflatten_dict(trained, sep="/"), unflatten_dict(frozen, sep="/")

    def reference(self, frozen):
        return frozen["params"]

    def _init_matrix(self, matrix: Matrix, key: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the trained and the frozen arrays of one matrix, by path."""
        raise NotImplementedError

    def _product(self, owner: str, factors: dict[str, Any], constants: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Return `left`, `scale` and `right` of `_add_product` for a kernel, from all trained and all frozen arrays."""
        raise NotImplementedError


@ADAPTERS.register("lora")
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class LoRA(MatrixAdapter):
    """Low-rank adaptation: W + alpha / rank A B (arXiv 2106.09685, equation 3).

    Attributes:
        rank: inner size of the products A B, 1 to the rank of the smallest adapted matrix.
        alpha: the products are scaled by alpha / rank.
    """

    prefix = "lora"
    rank: Count = 8
    alpha: Annotated[float, Range(0)] = 16.0

    def _init_matrix(self, matrix, key):
        if self.rank > matrix.full_rank:
            raise ValueError(
                f"adapter.rank is {self.rank}: for {matrix.owner}/kernel it must be 1 to {matrix.full_rank}."
            )
        noise = jax.random.normal(key, (*matrix.layers, *matrix.inputs, self.rank))
        a = noise * math.prod(matrix.inputs) ** -0.5
        b = jnp.zeros((*matrix.layers, self.rank, *matrix.outputs))
        factor = jnp.float32(self.alpha / self.rank)
        return {f"lora/{matrix.owner}/a": a, f"lora/{matrix.owner}/b": b}, {"factor": factor}

    def _product(self, owner, factors, constants):
        return factors[f"{owner}/a"], constants["factor"], factors[f"{owner}/b"]


@ADAPTERS.register("svf")
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SVF(MatrixAdapter):
    """Singular value fine-tuning: U diag(z s) V^T with trained factors z (arXiv 2501.06252, section 3.2).

    Computed as W + U diag((z - 1) s) V^T, so that the result is exactly W if all factors are 1. The singular vectors
    are zero until `rebase` computes them.
    """

    prefix = "svf"

    def _init_matrix(self, matrix, key):
        full, owner = matrix.full_rank, matrix.owner
        sizes = {"u": (*matrix.inputs, full), "s": (full,), "v": (full, *matrix.outputs)}
        vectors = {f"svf/{owner}/{part}": jnp.zeros((*matrix.layers, *size)) for part, size in sizes.items()}
        return {f"svf/{owner}/scale": jnp.ones((*matrix.layers, full))}, vectors

    def rebase(self, trained, frozen, params):
        trained, frozen = super().rebase(trained, frozen, params)
        kernels, flat = flatten_dict(params, sep="/"), flatten_dict(frozen, sep="/")
        for path in [path for path in flat if path.startswith("svf/") and path.endswith("/u")]:
            owner = path.removeprefix("svf/").removesuffix("/u")
            kernel, left, right = kernels[f"{owner}/kernel"], flat[path], flat[f"svf/{owner}/v"]
            layers = right.shape[: left.ndim + right.ndim - 2 - kernel.ndim]
            matrix = kernel.reshape(*layers, math.prod(left.shape[len(layers) : -1]), -1)
            u, s, v = jnp.linalg.svd(matrix.astype(jnp.float32), full_matrices=False)
            arrays = {"u": u.reshape(left.shape), "s": s, "v": v.reshape(right.shape)}
            flat |= {f"svf/{owner}/{part}": value for part, value in arrays.items()}
        return trained, unflatten_dict(flat, sep="/")

    def _product(self, owner, factors, constants):
        u, s, v = (constants[f"svf/{owner}/{part}"] for part in "usv")
        return u, (factors[f"{owner}/scale"] - 1) * s, v

    def mixture(self, weights: Float[Array, "K"], experts: Sequence[Any]) -> Any:
        """Return 1 + sum_k weight_k (z_k - 1) of the factors z_k of several experts (arXiv 2501.06252, section 3.2)."""
        return jax.tree.map(lambda *z: 1 + sum(weight * (factor - 1) for weight, factor in zip(weights, z)), *experts)

    def same_base(self, frozen: Any, other: Any) -> bool:
        """Return whether two adapted models have the same frozen parameters."""
        if jax.tree.structure(frozen) != jax.tree.structure(other):
            return False
        return all(jax.tree.leaves(jax.tree.map(np.array_equal, frozen, other)))


def _add_product(kernel, left, scale, right):
    """Return kernel + left diag(scale) right for each layer: [*layers, *inputs, *outputs].

    The shapes are left [*layers, *inputs, R], scale [*layers, R] or [], and right [*layers, R, *outputs].
    """
    layers, rank = kernel.shape[: left.ndim + right.ndim - 2 - kernel.ndim], left.shape[-1]
    left = left.reshape(*layers, -1, rank) * jnp.atleast_1d(scale)[..., None, :]
    product = jnp.matmul(left, right.reshape(*layers, rank, -1), precision="highest")
    return kernel + product.reshape(kernel.shape).astype(kernel.dtype)
