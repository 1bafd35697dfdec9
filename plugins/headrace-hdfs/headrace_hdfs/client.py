"""Connections to NameNodes. Who asks is found as Hadoop's own tools find it, in each process.

Without security it is HADOOP_USER_NAME, or the user of the process. Where core-site.xml in HADOOP_CONF_DIR says
`hadoop.security.authentication` is kerberos, it is the ticket of `kinit` (KRB5CCNAME), by the library libgssapi_krb5 of
the machine, or a delegation token of HADOOP_TOKEN_FILE_LOCATION. Names of several NameNodes at once (`hdfs://cluster`)
are those of hdfs-site.xml there.
"""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from headrace.errors import UserError
from headrace_hdfs.rpc import NameNode
from headrace_hdfs.timed import TimedClient


def connect(authority: str) -> NameNode:
    """Return a connection to the NameNode at `HOST:PORT`, or to those of a name in hdfs-site.xml; ask it nothing yet.

    Raises:
        UserError: the package is not installed, or the name is not known, of a host neither.
    """
    try:
        # 17 MB of native code, which no other store needs.
        from hdfs_native import Client
    except ImportError:
        raise UserError(
            f"hdfs://{authority}: the package hdfs-native is not installed: pip install headrace-hdfs"
        ) from None

    try:
        _look_up(authority)
        return NameNode(f"hdfs://{authority}", TimedClient(Client(f"hdfs://{authority}"), authority))
    except (OSError, RuntimeError, ValueError) as e:
        raise UserError(
            f"hdfs://{authority}: there is no such NameNode ({e}): write hdfs://HOST:PORT/FOLDER, or a name that "
            f"hdfs-site.xml in HADOOP_CONF_DIR has"
        ) from None


def _look_up(authority: str) -> None:
    """Look up a host.

    Raises OSError where there is none of that name: to the client that is a connection which fails.
    """
    url = urlsplit(f"hdfs://{authority}")
    if url.port is None:  # a name of hdfs-site.xml
        return
    try:
        socket.getaddrinfo(url.hostname, url.port)
    except socket.gaierror as e:
        # A server of names that does not answer is no reason to take the name for a wrong one.
        if e.errno != socket.EAI_AGAIN:
            raise
