"""For every test: signatures' shapes are checked at run time, and float32 products are float32 on every device."""

import jax
import jaxtyping

# Before any of the packages is imported.
jaxtyping.install_import_hook(["models", "metrics", "train"], "beartype.beartype")
jax.config.update("jax_default_matmul_precision", "highest")
