"""Image augmentation."""
