"""ViT, pre-trained on ImageNet-21k in 90 epochs (arXiv 2010.11929). Not run yet.

    mkdir -p imagenet21k/train
    tar -xf fall11_whole.tar -C imagenet21k/train
    (cd imagenet21k/train; for f in *.tar; do mkdir "${f%.tar}" && tar -xf "$f" -C "${f%.tar}" && rm "$f"; done)
    lineage train --config=vit_imagenet21k:B

The recipe is that of table 3; as in the authors' code, only kernels have weight decay. The argument is a variant of
models/vit.py: B, L or H. fall11_whole.tar from image-net.org contains one archive per class; 1% of the images is held
out.
"""

from lineage.configs import base


def get_config(variant: str = "B") -> base.ConfigDict:
    config = base.get_config("vit", "image_classification", "imagenet:imagenet21k", schedule="linear")
    config.model.update(variant=variant, patch_size=14 if variant == "H" else 16, num_classes=21_843, image_size=224)
    config.model.update(channels=3, head="mlp", dropout=0.1, unroll={"L": 24, "H": 32}.get(variant, 12))
    config.model.remat = "dots" if variant == "H" else None
    config.source.validation_fraction = 0.01
    config.task.update(image_size=224, augment="crop | flip")
    config.loader.update(batch_size=4096, workers=8)
    config.schedule.update(learning_rate=1e-3, warmup_steps=10_000)
    config.optimizer.update(weight_decay=0.03, no_decay=("bias$", "scale$", "token$", "^table/"), clip_norm=1.0)
    config.update(precision="bfloat16", total_epochs=90.0, log_every_steps=50, evaluate_every_steps=10_000)
    config.save_every_steps = 1000
    return config
