"""The package `lineage`, whose source is the repository's root."""

from setuptools import find_namespace_packages, setup

ROOMS = ("configs", "data", "evaluation", "metrics", "models", "report", "runs", "tasks", "train")

setup(
    package_dir={"lineage": "."},
    packages=[
        "lineage",
        *(f"lineage.{name}" for room in ROOMS for name in find_namespace_packages(include=[room, f"{room}.*"])),
    ],
    package_data={"lineage.report": ["*.js", "*.css"]},
)
