"""Examples: the NumPy code that turns content into the arrays that models are trained on."""
