"""Text generation with any decoder or encoder-decoder."""
