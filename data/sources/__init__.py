"""Data sources: where content comes from."""
