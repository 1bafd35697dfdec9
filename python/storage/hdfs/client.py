"""Connections to NameNodes. Who asks is found as Hadoop's own tools find it, in each process.

Without security it is HADOOP_USER_NAME, or the user of the process. Where core-site.xml in HADOOP_CONF_DIR says
`hadoop.security.authentication` is kerberos, it is the ticket of `kinit` (KRB5CCNAME), by the library libgssapi_krb5 of
the machine, or a delegation token of HADOOP_TOKEN_FILE_LOCATION. Names of several NameNodes at once (`hdfs://cluster`)
are those of hdfs-site.xml there.
"""

from __future__ import annotations

from headrace.errors import UserError
from headrace.storage.hdfs.rpc import NameNode


def connect(authority: str) -> NameNode:
    """The connection to the NameNode at `HOST:PORT`, or to those of a name in hdfs-site.xml; asks nothing yet.

    Raises:
        UserError: the package is not installed, or the name is not known.
    """
    try:
        # 17 MB of native code, which no other store needs.
        from hdfs_native import Client
    except ImportError:
        raise UserError(
            "lake or store is in HDFS, and the package hdfs-native is not installed: run `make env`"
        ) from None

    try:
        return NameNode(f"hdfs://{authority}", Client(f"hdfs://{authority}"))
    except (OSError, RuntimeError, ValueError) as e:
        raise UserError(
            f"hdfs://{authority}: there is no such NameNode ({e}): write hdfs://HOST:PORT/FOLDER, or a name that "
            f"hdfs-site.xml in HADOOP_CONF_DIR has"
        ) from None
