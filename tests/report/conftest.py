import base64
import hashlib
import shutil
import subprocess

import pytest


@pytest.fixture
def browse(tmp_path):
    """Return `browse(html, script)`, which returns the DOM of a page in a browser after running the script.

    The page's Content-Security-Policy, which must be there, is extended by the hash of the script only.
    """
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("there is no Chromium")

    def browse(html, script):
        page = tmp_path / "page.html"
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        before, after = html.split("script-src ")
        page.write_text(f"{before}script-src 'sha256-{digest}' {after}<script>{script}</script>", encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}", "--dump-dom"]
        return subprocess.run([chromium, *options, page.as_uri()], capture_output=True, text=True, check=True).stdout

    return browse
