"""Fast implementations, for some platforms, of what `models.layers` computes everywhere."""
