"""Platform-specific fast implementations of functions in `models.layers`."""
