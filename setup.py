"""The one thing that pyproject.toml cannot say: every package below python/ is one below `headrace`."""

from setuptools import find_packages, setup

setup(packages=["headrace", *(f"headrace.{name}" for name in find_packages("python"))])
