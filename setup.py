"""The package `lineage`, whose source is the root of the repository."""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

PACKAGES = ("configs", "data", "evaluation", "metrics", "models", "report", "runs", "tasks", "train")


class Build(build_py):
    """Build the package without this file, which lies in its folder."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if module[1] != "setup"]


setup(
    cmdclass={"build_py": Build},
    package_dir={"lineage": "."},
    packages=["lineage"] + [f"lineage.{name}" for top in PACKAGES for name in find_packages(include=[top, f"{top}.*"])],
    package_data={"lineage.report": ["*.js", "*.css"]},
)
