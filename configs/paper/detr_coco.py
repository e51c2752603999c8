"""DETR with a ResNet-50 on COCO 2017 in 500 epochs (arXiv 2005.12872). Not run yet.

The recipe is in section 4 and appendix A.4. The paper reports 42.0 AP on the validation split, which is `test` here
because the test split of COCO has no boxes; the best checkpoint is selected on 1% of the training split. The backbone
is initialized from an ImageNet classifier: a folder in the layout of transformers or a run of `resnet50_imagenet`.
Images are padded to squares of 1333 pixels, in the paper to the largest image of the batch. The paper computes in
float32.

    pip install -e '.[prepare]'
    tfds build coco/2017 --file_format=array_record
    lineage train --config=detr_coco --config.init.path=RESNET50

The files of cocodataset.org are read instead with --config.source=coco:PATH, where PATH has the folders annotations,
train2017 and val2017, which is then the validation split.
"""

from lineage.configs import base


def get_config() -> base.ConfigDict:
    config = base.get_config("detr", "object_detection", "tfds:coco/2017", schedule="step")
    config.model.update(variant="r50", image_size=1333, unroll=6)
    config.model.num_classes = 91  # the class ids of COCO, of which 80 are used
    config.source.update(train_split="train[:99%]", validation_split="train[99%:]", test_split="validation")
    config.task.update(image_size=1333, shorter_side=800, augment="flip | crop(384, 600) | resize(480, 800)")
    config.task.update(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    config.loader.update(batch_size=64, workers=16)
    config.init.rename = (("^", "backbone/"),)
    config.schedule.update(learning_rate=1e-4, milestones_percent=(80.0,))  # after 400 epochs
    config.optimizer.update(weight_decay=1e-4, no_decay=(), clip_norm=0.1, lr_multipliers=(("backbone", 0.1),))
    config.optimizer.frozen = ("backbone/stem", "backbone/stages_0", "backbone/.*norm")
    config.update(precision="bfloat16", total_epochs=500.0, log_every_steps=50, evaluate_every_epochs=5.0)
    config.save_every_epochs = 1.0
    config.checkpoint.best = "validation/ap"
    return config
