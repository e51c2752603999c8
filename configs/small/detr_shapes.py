"""A small DETR that detects circles, squares, triangles and crosses in drawn images.

    python launch.py --config=detr_shapes --workdir=outputs/detr_shapes

The images of the source `shapes` have 64x64 pixels. It is judged by COCO's average precision on 500 images of each
split, which are not among the 20,000 to train on: 83.6 after 37 minutes on one CPU core.
"""

from ml_collections import ConfigDict

from lineage.configs import base


def get_config() -> ConfigDict:
    config = base.get_config("detr", "object_detection", "shapes")
    config.model.backbone.depths = (1, 1)
    config.model.backbone.widths = (64, 128)
    config.model.backbone.stem_width = 32
    config.model.backbone.bottleneck = False
    config.model.backbone.norm = "group"
    config.model.backbone.groups = 8
    config.model.update(num_queries=12, depth=2, decoder_depth=3, width=128, num_heads=4, mlp_dim=256, placement="pre")
    config.model.dropout = 0.0
    config.task.update(max_boxes=6, augment="flip")
    config.loader.update(batch_size=32, threads=1)
    config.schedule.learning_rate = 1e-3
    config.optimizer.update(weight_decay=1e-4, clip_norm=1.0)
    config.schedule.warmup_percent = 3.0
    config.update(total_steps=6000, log_every_steps=50, evaluate_every_steps=1000, save_every_steps=1000)
    return config
