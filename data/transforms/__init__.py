"""Transforms: image decoding and augmentation, and the parser of pipelines such as "crop | flip"."""
