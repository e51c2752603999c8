"""A small GPT that completes dates with their ISO 8601 form, fine-tuned with REINFORCE.

    lineage train --config=reinforce_cldr --workdir=outputs/dates
    lineage train --config=reinforce_cldr:svf,outputs/dates --workdir=outputs/rewarded_svf
    lineage train --config=reinforce_cldr:lora,outputs/dates --workdir=outputs/rewarded_lora
    lineage train --config=reinforce_cldr:likelihood,outputs/dates --workdir=outputs/likelihood

The base model is trained briefly with maximum likelihood. Then SVF factors (arXiv 2501.06252) or LoRA matrices are
trained with REINFORCE; as a baseline, SVF factors are also trained with maximum likelihood.
"""

from lineage.configs import base


def get_config(argument: str = "base") -> base.ConfigDict:
    """Return the config of a stage: "base"; "svf,RUN" or "lora,RUN" (REINFORCE); or "likelihood,RUN", where RUN is the
    workdir of the base model.
    """
    stage, _, run = argument.partition(",")
    if stage not in ("base", "svf", "lora", "likelihood") or (stage == "base") == bool(run):
        raise ValueError(f"reinforce_cldr takes base, or svf|lora|likelihood,RUN, not {argument!r}.")
    config = base.get_config("gpt", "conditional_lm", "cldr", tokenizer="characters")
    config.model.update(depth=2, num_heads=4, width=96, max_length=64, unroll=2)
    config.task.sequence_length = 48
    config.loader.update(batch_size=64, evaluation_batch_size=256)
    config.schedule.update(learning_rate=2e-3, warmup_percent=10.0)
    config.optimizer.b2 = 0.98
    config.update(total_steps=1000, log_every_steps=10, evaluate_every_steps=250, save_every_steps=250)
    config.sampling.update(max_new_tokens=11, temperature=0.0)
    if run:
        config.init.path = run
        base.replace(config, adapter="lora" if stage == "lora" else "svf")
        config.schedule.update(learning_rate=2e-3 if stage == "lora" else 1e-2, warmup_percent=5.0)
        config.optimizer.b2 = 0.999
        config.total_steps = 300
    if stage in ("svf", "lora"):
        base.choose(config, "task", "reinforcement")
        config.loader.batch_size = 128
        config.total_steps = 1500
    return config
