"""The supply chain: pins with hashes of all requirements, and their audit."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
EXTRAS = "test", "tpu-compile"


def pinned():
    """Return the version and the number of hashes of each pinned package."""
    text = (ROOT / ".ci" / "requirements.txt").read_text()
    found = re.findall(r"^(\S+?)==(\S+)(?: ;.*)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.M)
    assert sum(line.startswith("    --hash=") for line in text.splitlines()) == "".join(f[2] for f in found).count("\n")
    assert sum(not line.startswith((" ", "#", "--")) for line in text.splitlines()) == len(found)
    return {canonicalize_name(name.partition("[")[0]): version for name, version, _ in found}


def test_every_requirement_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *(each for extra in EXTRAS for each in project["optional-dependencies"][extra])]
    pins = pinned()
    assert len(pins) > len(needed) > 40
    for requirement in map(Requirement, needed):
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version.partition("+")[0], prereleases=True), requirement


def test_ci_installs_the_pins_and_audits_them():
    """Check that the commands of CI are those in SECURITY.md."""
    script, page = ((ROOT / name).read_text() for name in (".ci/run", "SECURITY.md"))
    assert "pip install -q --no-deps --require-hashes -r .ci/requirements.txt" in script
    assert all(f"--extra {extra}" in page for extra in EXTRAS)
    for command in (
        "cyclonedx-py environment --output-file build/sbom.json",
        "pip-audit --disable-pip --require-hashes",
    ):
        assert command in script
        assert command in page
