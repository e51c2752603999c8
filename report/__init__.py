"""HTML reports, made from the files in a run's folder."""
