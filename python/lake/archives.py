"""Archives that executors unpack (`spark.archives`, `headrace pack`) where they are in S3.

An executor fetches archives before the jars that the driver has for it, so it has no file system for S3 by then. So an
archive that is given as `s3://...` the driver fetches, and Spark brings it on: but on YARN, whose nodes fetch by their
own Hadoop. As `s3a://...` it is left to the executors, whose hosts then have S3A themselves.
"""

from __future__ import annotations

from headrace.errors import UserError
from headrace.storage import location_of

PROPERTY = "spark.archives"
_FETCHED = "s3://"


def at_hand(archives: str, master: str) -> str:
    """The value of `spark.archives` for Spark: those of `s3://` as files of this host.

    Args:
        archives: as the user gave it: URIs with commas between, each with `#FOLDER` where its place has another name.
        master: Spark's.

    Raises:
        UserError: one is not there.
    """
    if master == "yarn":
        return archives
    return ",".join(_local(one.strip()) for one in archives.split(","))


def _local(archive: str) -> str:
    uri, mark, folder = archive.partition("#")
    if not uri.startswith(_FETCHED):
        return archive
    try:
        return f"{location_of(uri, PROPERTY).as_plain().local_path()}{mark}{folder}"
    except FileNotFoundError as e:
        raise UserError(f"spark.properties: {PROPERTY}: there is no {uri}: make it by `headrace pack`") from e
