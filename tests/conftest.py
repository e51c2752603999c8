"""For every test: eight simulated devices, signatures' shapes checked at run time, float32 products in float32, and all
the time that it needs."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"  # before jax

import hypothesis
import jax
import jaxtyping

# Before any of the packages is imported.
CHECKED = [f"lineage.{name}" for name in ("models", "metrics", "tasks", "evaluation", "train")]
jaxtyping.install_import_hook(CHECKED, "beartype.beartype")
jax.config.update("jax_default_matmul_precision", "highest")
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
