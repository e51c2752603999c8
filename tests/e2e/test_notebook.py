"""The notebook in `docs` runs from the first cell to the last one, and its models learn."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs" / "lineage.ipynb"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the libraries that run notebooks
def test_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("XLA_FLAGS")  # as on a laptop: one device, and compilation that optimizes
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    book = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells)  # results are made by whoever runs it
    NotebookClient(book, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    results = [eval(output["data"]["text/plain"]) for output in outputs if output["output_type"] == "execute_result"]
    digits, tuned = (result["test/accuracy"] for result in results if isinstance(result, dict))
    assert digits > 0.6  # of ten classes
    assert tuned > 0.45  # of two
