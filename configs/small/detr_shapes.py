"""A small DETR that detects circles, squares, triangles and crosses in drawn images.

    lineage train --config=detr_shapes --workdir=outputs/detr_shapes

The source `shapes` draws images of 64x64 pixels, 20,000 of them for training. The metric is COCO average precision on
500 images of each other split.
"""

from lineage.configs import base


def get_config() -> base.ConfigDict:
    config = base.get_config("detr", "object_detection", "shapes")
    config.model.update(depth=2, decoder_depth=3, width=128, num_heads=4, mlp_dim=256, num_queries=12)
    config.model.update(norm_placement="pre", dropout=0.0)
    config.model.backbone.update(depths=(1, 1), widths=(64, 128), stem_width=32, bottleneck=False)
    config.model.backbone.update(norm="group", groups=8)
    config.task.update(max_boxes=6, augment="flip")
    config.loader.update(batch_size=32, threads=1)
    config.schedule.update(learning_rate=1e-3, warmup_percent=3.0)
    config.optimizer.update(weight_decay=1e-4, clip_norm=1.0)
    config.update(total_steps=6000, log_every_steps=50, evaluate_every_steps=1000, save_every_steps=1000)
    return config
