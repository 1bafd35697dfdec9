"""What pyproject.toml cannot say: every package below python/ is one below `headrace`, and what a wheel brings besides.

A wheel is made of a checkout where `make env s3` has run (`make wheel`): `headrace/share` in it holds what
`headrace.config.installation.installation` looks for at the top of a checkout.
"""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

#: Globs of `headrace/share`. Of build/native not the sanitizers' libraries, which are for tests alone.
SHARE = (
    "build.gradle",
    "conf/**/*",
    "requirements/headrace.*",
    "requirements/3.*/headrace.lock",
    "build/jars/*.jar",
    "build/s3/*.jar",
    "build/udfs/*.jar",
    "build/native/libheadrace_*.so",
    "build/native/x86-64-*/*.so",
)
LEFT_OUT = "*_asan.so"
#: Without these a day of a shipped pipeline does not run.
NEEDED = ("build/jars", "build/native", "build/udfs")


class BuildWithShare(build_py):
    """Python packages and, where they are not installed in place, `headrace/share`."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        root = Path(__file__).resolve().parent
        lacking = [folder for folder in NEEDED if not any((root / folder).glob("*"))]
        if lacking:
            raise SystemExit(f"{', '.join(lacking)} of {root}: nothing is there. Run `make env` first")
        share = Path(self.build_lib) / "headrace" / "share"
        shutil.rmtree(share, ignore_errors=True)
        for file in sorted({f for pattern in SHARE for f in root.glob(pattern)}):
            if file.is_file() and not file.match(LEFT_OUT):
                target = share / file.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target)


class PlatformWheel(bdist_wheel):
    """A wheel for one architecture: its libraries are loaded by ctypes, so no ABI of Python's is part of its name."""

    def finalize_options(self) -> None:
        self.distribution.has_ext_modules = lambda: True
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    packages=["headrace", *(f"headrace.{name}" for name in find_packages("python"))],
    cmdclass={"build_py": BuildWithShare, "bdist_wheel": PlatformWheel},
)
