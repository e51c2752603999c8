"""A small GPT that goes on after a date with its ISO 8601 form, and what a reward for the right one adds.

    python launch.py --config=reinforce_cldr --workdir=outputs/dates
    python launch.py --config=reinforce_cldr:svf,outputs/dates --workdir=outputs/rewarded_svf
    python launch.py --config=reinforce_cldr:lora,outputs/dates --workdir=outputs/rewarded_lora
    python launch.py --config=reinforce_cldr:likelihood,outputs/dates --workdir=outputs/taught

The base learns by likelihood and stops early; then factors of its matrices' singular values (arXiv 2501.06252), or thin
matrices, learn by REINFORCE, and the factors by likelihood. RESULTS.md has what comes of it.
"""

from ml_collections import ConfigDict

from lineage.configs import base, schema
from lineage.train.adapters import ADAPTERS


def get_config(argument: str = "base") -> ConfigDict:
    """ "base", or on top of its run "svf,RUN" and "lora,RUN" by reward, or "likelihood,RUN"."""
    stage, _, run = argument.partition(",")
    if stage not in ("base", "svf", "lora", "likelihood") or (stage == "base") == bool(run):
        raise ValueError(f"reinforce_cldr takes base, or svf|lora|likelihood,RUN, not {argument!r}.")
    config = base.get_config("gpt")
    config.model.update(depth=2, num_heads=4, width=96, max_length=64, unroll=2)
    config.data.update(source="cldr", task="continuations", tokenizer="characters", sequence_length=48)
    config.data.update(batch_size=64, evaluation_batch_size=256)
    config.objective.name = "causal_lm"
    config.optimizer.update(learning_rate=2e-3, warmup_percent=10.0, b2=0.98)
    config.update(total_steps=1000, log_every_steps=10, evaluate_every_steps=250, save_every_steps=250)
    config.sampling.update(max_new_tokens=11, temperature=0.0)
    if run:
        config.init.path = run
        config.adapter = schema.section(ADAPTERS, "lora" if stage == "lora" else "svf")
        config.optimizer.update(learning_rate=2e-3 if stage == "lora" else 1e-2, warmup_percent=5.0, b2=0.999)
        config.total_steps = 300
    if stage in ("svf", "lora"):
        config.objective.name = "reinforcement"
        config.data.batch_size = 128
        config.total_steps = 1500
    return config
