"""What Spark needs to reach a lake or a store: S3A, and a log store that loses no commit; what a path means to it.

Credentials are found by the cloud's own chain in each JVM, and stand in no property.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headrace.errors import UserError
from headrace.storage.objects.clients import endpoint_of, region_of
from headrace.workspace import Workspace, s3_dir

_S3A = "org.apache.hadoop.fs.s3a.S3AFileSystem"
#: AWS's: environment, web identity, profile, container, machine.
_CHAIN = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
_LOG_STORE = "headrace.delta.S3ConditionalLogStore"
#: A path without a scheme is a file here, also where core-site.xml in HADOOP_CONF_DIR says that it is one in HDFS.
_LOCAL_PATHS = {"spark.hadoop.fs.defaultFS": "file:///"}
#: Of which Spark gets delegation tokens with the ticket of Kerberos: those, and the default's, which is no HDFS here.
ACCESSED = "spark.kerberos.access.hadoopFileSystems"
#: `str()` of a Location has the first, `uri` the second.
_SCHEMES = ("s3", "s3a")


def store_jars(ws: Workspace) -> list[Path]:
    """The jars that a workspace's file systems need and Spark does not bring.

    Raises:
        UserError: they were not fetched.
    """
    if "s3" not in _schemes(ws):
        return []
    jars = sorted(s3_dir().glob("*.jar"))
    if not jars:
        raise UserError(f"lake or store is in S3, and Spark's file system for it is not in {s3_dir()}: run `make s3`")
    return jars


def store_properties(ws: Workspace, environ: Mapping[str, str]) -> dict[str, str]:
    """Spark's properties for a workspace's file systems; of GCS and Azure those of their own connectors are the user's.

    Args:
        ws: the workspace.
        environ: of this process: which S3 server, and which region.
    """
    found = dict(_LOCAL_PATHS)
    if systems := [f"hdfs://{place.path.parts[1]}" for place in (ws.lake, ws.store) if place.scheme == "hdfs"]:
        found[ACCESSED] = ",".join(dict.fromkeys(systems))
    if ws.store.scheme == "hdfs":
        # What YARN brings to its containers: else in the file system of paths without a scheme.
        found["spark.yarn.stagingDir"] = str(ws.store / ".spark-staging")
    if "s3" not in _schemes(ws):
        return found
    found |= {
        "spark.hadoop.fs.s3.impl": _S3A,
        "spark.hadoop.fs.s3a.aws.credentials.provider": _CHAIN,
        **{f"spark.delta.logStore.{scheme}.impl": _LOG_STORE for scheme in _SCHEMES},
    }
    if endpoint := endpoint_of(environ):
        found |= {
            "spark.hadoop.fs.s3a.endpoint": endpoint,
            "spark.hadoop.fs.s3a.connection.ssl.enabled": str(not endpoint.startswith("http://")).lower(),
            # Buckets as names of hosts are AWS's own.
            "spark.hadoop.fs.s3a.path.style.access": "true",
        }
    if region := region_of(environ) or ("us-east-1" if endpoint_of(environ) else None):
        found["spark.hadoop.fs.s3a.endpoint.region"] = region
    return found


def _schemes(ws: Workspace) -> set[str]:
    return {ws.lake.scheme, ws.store.scheme}
