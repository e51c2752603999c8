"""HTML reports, written from the files in a run's folder."""
