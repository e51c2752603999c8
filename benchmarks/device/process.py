"""One of several processes that train together.

python -m benchmarks.device.process COORDINATOR PROCESSES NUMBER SETTINGS
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

STEPS = 3


def losses(settings: Mapping[str, Any]) -> list[float]:
    """Return the losses of the first steps; all processes together train on the same batch as a single process."""
    import jax

    from benchmarks.device import ours
    from lineage.train.loop import compile_step
    from lineage.train.sharding import share, to_mesh

    changes, several = settings["changes"], jax.process_count() > 1
    if several:
        changes = {**changes, "mesh.data": -1}
    of = ours.experiment({**settings, "changes": changes}, jax.devices() if several else None)
    arrays = ours.random_batch(of)
    part, parts = share(of.mesh) if several else (0, 1)
    batch = to_mesh({name: array.reshape(parts, -1, *array.shape[1:])[part] for name, array in arrays.items()}, of.mesh)
    state = jax.jit(of.make_state, out_shardings=of.state_shardings)()
    step, values = compile_step(of, state), []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        values.append(float(metrics["loss"]))
    return values


def main() -> None:
    import jax

    coordinator, count, number, settings = sys.argv[1:]
    jax.distributed.initialize(coordinator, int(count), int(number), local_device_ids=[int(number)])
    values = losses(json.loads(settings))
    if number == "0":
        print(json.dumps(values))


if __name__ == "__main__":
    main()
