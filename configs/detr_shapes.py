"""A small DETR on `shapes`: drawn circles, squares, triangles and crosses of 64x64 pixels, to be found.

python launch.py --config=configs/detr_shapes.py --workdir=runs/detr_shapes
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config("detr")
    config.model.backbone.depths = (1, 1)
    config.model.backbone.widths = (64, 128)
    config.model.backbone.stem_width = 32
    config.model.backbone.bottleneck = False
    config.model.backbone.norm = "group"
    config.model.backbone.groups = 8
    config.model.num_queries = 12
    config.model.depth = 2
    config.model.decoder_depth = 3
    config.model.width = 128
    config.model.num_heads = 4
    config.model.hidden = 256
    config.model.placement = "pre"
    config.model.dropout = 0.0

    config.data.source = "shapes"
    config.data.max_boxes = 6
    config.data.augment = "flip"
    config.data.batch_size = 32
    config.data.threads = 1

    config.objective.name = "detection"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_percent = 3.0
    config.optimizer.weight_decay = 1e-4
    config.optimizer.clip_norm = 1.0

    config.total_steps = 10_000
    config.log_every_steps = 50
    config.evaluate_every_steps = 1000
    config.save_every_steps = 1000
    return config
