"""Requirements of Spark: a Java on this host, and for stores S3A and a log store that loses no commit.

Credentials are found by the cloud's own chain in each JVM, and stand in no property.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from headrace.config.formats import ICEBERG_BY_PATH
from headrace.config.installation import checkout, installation, s3_dir
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.errors.stores import DEFAULT_REGION, region_of
from headrace.storage.objects.clients import HADOOP, endpoint_of

S3A = "org.apache.hadoop.fs.s3a.S3AFileSystem"
#: Property with the file system class for `s3://...`.
S3_FILES = "spark.hadoop.fs.s3.impl"
#: AWS's chain of providers: environment, web identity, profile, container, machine.
_CHAIN = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
_LOG_STORE = "headrace.delta.S3ConditionalLogStore"
#: A path without a scheme is a file here, also where core-site.xml in HADOOP_CONF_DIR says that it is one in HDFS.
_LOCAL_PATHS = {"spark.hadoop.fs.defaultFS": "file:///"}
#: Property: file systems for which Spark gets delegation tokens with the Kerberos ticket.
ACCESSED = "spark.kerberos.access.hadoopFileSystems"
#: Schemes of S3: in `str()` of a Location, and in its `uri`.
_SCHEMES = ("s3", "s3a")
#: Properties by which a user adds jars, and the name of S3A's jar.
_JARS, _HADOOP_AWS = ("spark.jars", "spark.jars.packages"), "hadoop-aws"
#: Properties that name catalogs: `spark.sql.catalog.NAME`, and that of Hive.
_CATALOG, _HIVE = "spark.sql.catalog.", "spark.sql.catalogImplementation"
#: The first major version that Spark 4 runs on.
_OLDEST = 17


def store_jars(ws: Workspace, user_properties: Mapping[str, str]) -> list[Path]:
    """Return the jars that a workspace's file systems need and Spark does not bring.

    Args:
        ws: the workspace.
        user_properties: the pipeline's own properties. Where they name a catalog, its tables may be in S3, too: then
            the jars are taken if they are there, unless the properties bring S3A themselves.

    Raises:
        UserError: they were not fetched.
    """
    catalogs = _has_catalog(user_properties) and not any(_HADOOP_AWS in user_properties.get(key, "") for key in _JARS)
    if "s3" not in ws.schemes and not catalogs:
        return []
    jars = sorted(s3_dir().glob("*.jar"))
    if not jars and "s3" in ws.schemes:
        place = "lake or store" if "s3" in (ws.lake.scheme, ws.store.scheme) else "what the pipeline reads"
        raise UserError(f"{place} is in S3, and Spark's file system for it is not in {s3_dir()}: {how_to_get_s3()}")
    return jars


def how_to_get_s3() -> str:
    """Return the advice for a host without Spark's file system for S3. An installed wheel cannot be extended."""
    if installation() == checkout():
        return "run `make s3`"
    return "this wheel was made without it; install one that `make wheel` makes of a checkout"


def store_properties(ws: Workspace, environ: Mapping[str, str], has_s3a: bool) -> dict[str, str]:
    """Spark's properties for a workspace's file systems; of GCS and Azure those of their own connectors are the user's.

    Args:
        ws: the workspace.
        environ: of this process: which S3 server, and which region.
        has_s3a: whether the session has the jars of `store_jars`.
    """
    props = dict(_LOCAL_PATHS)
    places = (ws.lake, ws.store, *ws.external_places)
    if systems := [f"hdfs://{place.path.parts[1]}" for place in places if place.scheme == "hdfs"]:
        props[ACCESSED] = ",".join(dict.fromkeys(systems))
    if ws.store.scheme != "file":
        # Staging of YARN's files, by default in the file system of paths without a scheme. Nodes fetch it by their own
        # Hadoop, which lacks the properties set here.
        staging = str(ws.store / ".spark-staging").removeprefix(ws.store.scheme)
        props["spark.yarn.stagingDir"] = HADOOP.get(ws.store.scheme, ws.store.scheme) + staging
    if not has_s3a:
        return props
    props |= {
        S3_FILES: S3A,
        "spark.hadoop.fs.s3a.aws.credentials.provider": _CHAIN,
        **{f"spark.delta.logStore.{scheme}.impl": _LOG_STORE for scheme in _SCHEMES},
    }
    if endpoint := endpoint_of(environ):
        props |= {
            "spark.hadoop.fs.s3a.endpoint": endpoint,
            "spark.hadoop.fs.s3a.connection.ssl.enabled": str(not endpoint.startswith("http://")).lower(),
            # Only AWS has buckets as names of hosts.
            "spark.hadoop.fs.s3a.path.style.access": "true",
        }
    if region := region_of(environ) or (DEFAULT_REGION if endpoint_of(environ) else None):
        props["spark.hadoop.fs.s3a.endpoint.region"] = region
    return props


def _has_catalog(user_properties: Mapping[str, str]) -> bool:
    """Return whether properties name a catalog besides that of Iceberg tables by their paths."""
    return any(key == _HIVE or (key.startswith(_CATALOG) and key not in ICEBERG_BY_PATH) for key in user_properties)


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
