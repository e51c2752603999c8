"""Transforms: image decoding and augmentation, and the small language that options use to name them."""
