"""NumPy code that turns content into examples, the arrays on which models are trained."""
