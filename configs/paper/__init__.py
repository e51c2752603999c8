"""Experiments at the scale of the papers.

In the commands of the headers, `hf` is that of the package huggingface_hub. Those for ImageNet-1k prepare the data set
of TFDS from ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar of image-net.org, in the folder DOWNLOADS; folders of
images are read instead with --config.source=imagenet:PATH --config.source.validation_fraction=0.01.
"""
