"""Compiler plan of a GPT-2 built from Flax's layers, for comparison with `lineage compile gpt2_openwebtext`.

python -m benchmarks.textbook --target=v5e:2x2/1 --batch=8

The model is a textbook implementation: `nn.MultiHeadDotProductAttention`, `nn.LayerNorm` and `nn.Dense` with
`dtype=bfloat16`, the mean of optax's cross-entropy, AdamW and a jitted step with a donated state. No device is
needed: see `lineage compile`.
"""

import argparse

from lineage.train.compiler import targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="v5e:2x2/1", help="one chip, such as v5e:2x2/1 or h100x1")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=12)
    options = parser.parse_args()
    target = targets.parse(options.target)
    targets.prepare(target)  # before JAX is imported
    print(planned(target, options.batch, options.length, options.depth))


def planned(target: targets.Target, batch: int, length: int, depth: int) -> str:
    """Compile a training step and return its planned time and memory."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import SingleDeviceSharding

    from lineage.train.compiler.plan import Plan

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
            embed = nn.Embed(50_304, 768, dtype=jnp.bfloat16)
            x = embed(tokens) + nn.Embed(length, 768, dtype=jnp.bfloat16)(jnp.arange(length))
            mask = nn.make_causal_mask(tokens)
            for _ in range(depth):
                x = Block()(x, mask)
            return embed.attend(nn.LayerNorm(dtype=jnp.bfloat16)(x)).astype(jnp.float32)

    model, optimizer = GPT2(), optax.adamw(6e-4)

    def step(params, moments, tokens, targets):
        def loss(params):
            logits = model.apply(params, tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    place = SingleDeviceSharding(target.devices()[0])
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    arguments = (params, jax.eval_shape(optimizer.init, params), tokens, tokens)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    memory, plan = compiled.memory_analysis(), Plan(compiled.as_text(), target.chip)
    bytes_used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return f"{target}: {plan.seconds * 1e3:.1f} ms, {bytes_used / 2**30:.1f} GiB"


if __name__ == "__main__":
    main()
