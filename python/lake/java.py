"""The Java of this host that Spark runs on."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from headrace.errors import UserError

#: The first major version that Spark 4 runs on.
_OLDEST = 17


def java_program() -> Path:
    """Return the program that Spark starts its JVM with: JAVA_HOME's, else the one on PATH. It may not exist."""
    home = os.environ.get("JAVA_HOME")
    return Path(home) / "bin" / "java" if home else Path(shutil.which("java") or "java")


def require_java() -> None:
    """Check that Spark can start a JVM here, without starting one.

    Raises:
        UserError: there is no Java, or one before 17; there is no bash, which Spark's scripts are written in.
    """
    program, home = java_program(), os.environ.get("JAVA_HOME")
    if shutil.which(str(program)) is None:
        place = f"JAVA_HOME is {home}, which has no bin/java" if home else "JAVA_HOME is not set, and PATH has no java"
        raise UserError(
            f"Spark needs Java: {place}. Install a JDK 17 or 21 (Debian: openjdk-17-jdk-headless), or set JAVA_HOME"
        )
    release = program.resolve().parent.parent / "release"
    text = release.read_text() if release.is_file() else ""
    version = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', text, re.MULTILINE)
    if version is not None and int(version[1]) < _OLDEST:
        raise UserError(f"Spark needs Java 17 or 21, and {program} is Java {version[1]}: set JAVA_HOME to another one")
    if shutil.which("bash") is None:
        raise UserError("Spark's scripts need bash, and PATH has none: add its folder, such as /bin, to PATH")
