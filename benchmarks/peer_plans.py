"""Compiler plans of other implementations of GPT-2, for comparison with `lineage compile gpt2_openwebtext`.

python -m benchmarks.peer_plans flax --target=v5e:2x2/1 --batch=8
python -m benchmarks.peer_plans levanter --target=v5e:2x2/1 --batch=8 --remat

Each is a jitted step of AdamW with a donated state and computes in bfloat16. `flax` is a textbook implementation:
`nn.MultiHeadDotProductAttention`, `nn.LayerNorm`, `nn.Dense` and optax's cross-entropy. `levanter` is `Gpt2LMHeadModel`
of Levanter with splash attention, for TPUs only (`pip install marin-levanter GitPython`). No device is needed: see
`lineage compile`.
"""

import argparse
from collections.abc import Callable
from typing import Any

from lineage.train.compiler import targets

VOCABULARY = 50_304


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("flax", "levanter"))
    parser.add_argument("--target", default="v5e:2x2/1", help="one chip, such as v5e:2x2/1 or h100x1")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--remat", action="store_true", help="enable gradient checkpointing in Levanter")
    options = parser.parse_args()
    target = targets.parse(options.target)
    targets.prepare(target)  # before JAX is imported
    print(planned(target, options))


def planned(target: targets.Target, options: argparse.Namespace) -> str:
    """Compile a training step and return its planned time and memory."""
    import jax
    import numpy as np
    import optax

    from lineage.train.compiler.plan import Plan

    params, tokens, loss = {"flax": flax, "levanter": levanter}[options.model](options)
    optimizer = optax.adamw(6e-4)

    def step(params, moments, tokens):
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    mesh = jax.sharding.Mesh(np.array(target.devices()[:1]).reshape(1, 1, 1), ("replica", "data", "model"))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = params, jax.eval_shape(optimizer.init, params), tokens
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
    with jax.set_mesh(mesh):
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    memory, plan = compiled.memory_analysis(), Plan(compiled.as_text(), target.chip)
    bytes_used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return f"{options.model}, {target}: {plan.seconds * 1e3:.1f} ms, {bytes_used / 2**30:.1f} GiB"


def flax(options: argparse.Namespace) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """Return the shapes of the parameters and of the tokens, and the loss, of a GPT-2 built from Flax's layers."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            normed = nn.LayerNorm(dtype=jnp.bfloat16)(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=12, dtype=jnp.bfloat16)(normed, mask=mask)
            hidden = nn.Dense(4 * x.shape[-1], dtype=jnp.bfloat16)(nn.LayerNorm(dtype=jnp.bfloat16)(x))
            return x + nn.Dense(x.shape[-1], dtype=jnp.bfloat16)(nn.gelu(hidden))

    class GPT2(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(VOCABULARY, 768, dtype=jnp.bfloat16)
            x = embed(tokens) + nn.Embed(options.length, 768, dtype=jnp.bfloat16)(jnp.arange(options.length))
            mask = nn.make_causal_mask(tokens)
            for _ in range(options.depth):
                x = Block()(x, mask)
            return embed.attend(nn.LayerNorm(dtype=jnp.bfloat16)(x)).astype(jnp.float32)

    def loss(params, tokens):
        logits = GPT2().apply(params, tokens[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1]).mean()

    tokens = (jax.ShapeDtypeStruct((options.batch, options.length), jnp.int32),) * 2  # inputs and targets
    return jax.eval_shape(GPT2().init, jax.random.key(0), tokens[0]), tokens, loss


def levanter(options: argparse.Namespace) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """Return the same for the GPT-2 of Levanter, whose float32 parameters are cast to bfloat16."""
    import equinox
    import haliax
    import jax
    import jax.numpy as jnp
    import jmp
    from levanter.layers.attention import AttentionBackend, AttentionMask
    from levanter.models.gpt2 import Gpt2Config, Gpt2LMHeadModel
    from levanter.models.lm_model import LmExample

    config = Gpt2Config(
        max_seq_len=options.length,
        num_layers=options.depth,
        gradient_checkpointing=options.remat,
        attn_backend=AttentionBackend.SPLASH,
    )
    vocabulary, rows = haliax.Axis("vocab", VOCABULARY), haliax.Axis("batch", options.batch)
    precision = jmp.get_policy("p=f32,c=bfloat16")
    model = equinox.filter_eval_shape(Gpt2LMHeadModel.init, vocabulary, config, key=jax.random.key(0))
    params, static = equinox.partition(model, lambda x: hasattr(x, "dtype"))

    def loss(params, tokens):
        with haliax.axis_mapping({"batch": "data"}):
            weights = haliax.ones((rows, config.max_Pos)) * LmExample.causal_loss_mask(config.max_Pos)
            example = LmExample(tokens=tokens, loss_weight=weights, attn_mask=AttentionMask.causal())
            cast = precision.cast_to_compute(equinox.combine(params, static))
            return cast.compute_next_token_loss(example).scalar()

    tokens = jax.ShapeDtypeStruct((options.batch, options.length), jnp.int32)
    return params, haliax.NamedArray(tokens, (rows, config.max_Pos)), loss


if __name__ == "__main__":
    main()
