import shutil
import subprocess

import pytest


@pytest.fixture
def browse(tmp_path):
    """Return `browse(html, script)`, which returns the DOM of the report in a browser after running the script."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("there is no Chromium")

    def browse(html, script):
        page = tmp_path / "page.html"
        page.write_text(f"<!doctype html><meta charset=utf-8>{html}<script>{script}</script>", encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}", "--dump-dom"]
        return subprocess.run([chromium, *options, page.as_uri()], capture_output=True, text=True, check=True).stdout

    return browse
