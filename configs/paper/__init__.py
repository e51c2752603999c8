"""Experiments at the scale of the papers.

The command `hf` in the headers comes with the package huggingface_hub. The commands for ImageNet-1k prepare the TFDS
data set from ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar of image-net.org, in the folder DOWNLOADS. To read
folders of images instead, add --config.source=imagenet:PATH --config.source.validation_fraction=0.01.
"""
