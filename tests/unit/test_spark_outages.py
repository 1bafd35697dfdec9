"""A store that is away, by the words of Spark's own file systems.

As Hadoop 3.4.1 and Google's connector 2.2.26 were seen to say them, S3A, abfs and gs against a server that answered 503
and against a port where nobody listens. What HDFS says of DataNodes and of a NameNode that is not ready is by its
documented exceptions.
"""

from __future__ import annotations

import pytest
from pyspark.errors import PySparkException

from headrace.errors import EXIT_INCOMPLETE
from headrace.errors.translate import exit_message

_CLIENT = "software.amazon.awssdk.core.exception.SdkClientException: Unable to execute HTTP request: "
_STACK = "\n\tat org.apache.hadoop.fs.s3a.S3AUtils.translateException(S3AUtils.java:208)"


def client(cause: str) -> str:
    """Return the trace of a client as S3A has it, twice."""
    return f"{_CLIENT}{cause}:    {_CLIENT}{cause}: Connection refused{_STACK}"


def service(code: int) -> str:
    message = f"null (Service: S3, Status Code: {code}, Request ID: null)"
    return f"software.amazon.awssdk.services.s3.model.S3Exception: {message}:null: {message}{_STACK}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "An error occurred while calling o118.parquet.\n: java.net.ConnectException: getFileStatus on "
            f"s3a://bucket/a/b: {client('Connect to 127.0.0.1:1 [/127.0.0.1] failed: Connection refused')}",
            "s3://bucket/a/b: the store is away (ConnectException in Spark: Unable to execute HTTP request: "
            "Connect to 127.0.0.1:1 [/127.0.0.1] failed: Connection refused). Run this again later",
        ),
        (
            "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times "
            "(executor driver): org.apache.hadoop.fs.s3a.AWSServiceThrottledException: open s3a://bucket/a at 0 on "
            f"s3a://bucket/a: {service(503)}",
            "s3://bucket/a: the store is away (AWSServiceThrottledException in Spark: null (Service: S3, Status Code: "
            "503, Request ID: null)). Run this again later",
        ),
        (
            f": org.apache.hadoop.fs.s3a.AWSStatus500Exception: getFileStatus on s3a://b/_delta_log: {service(500)}",
            "s3://b/_delta_log: the store is away (AWSStatus500Exception in Spark: null (Service: S3, Status Code: "
            "500, Request ID: null)). Run this again later",
        ),
        (
            # Paths as Spark gets them of a lake at s3://.
            f": org.apache.hadoop.fs.s3a.AWSStatus500Exception: getFileStatus on s3://b/_delta_log: {service(500)}",
            "s3://b/_delta_log: the store is away (AWSStatus500Exception in Spark: null (Service: S3, Status Code: "
            "500, Request ID: null)). Run this again later",
        ),
        (
            f": org.apache.hadoop.fs.s3a.AWSNoResponseException: getFileStatus on s3a://b/_delta_log: {service(443)}",
            "s3://b/_delta_log: the store is away (AWSNoResponseException in Spark: null (Service: S3, Status Code: "
            "443, Request ID: null)). Run this again later",
        ),
        (
            f": org.apache.hadoop.fs.s3a.AWSClientIOException: open on s3a://b/a: {_CLIENT}The target server failed",
            "s3://b/a: the store is away (AWSClientIOException in Spark: Unable to execute HTTP request: The target "
            "server failed). Run this again later",
        ),
        (
            ": java.net.ConnectException: Call From vm/127.0.0.1 to localhost:8020 failed on connection exception: "
            "java.net.ConnectException: Connection refused; For more details see:  http://wiki.apache.org/hadoop/x",
            "hdfs://localhost:8020 does not answer Spark (Connection refused). Run this again later",
        ),
        (
            'An error occurred while calling o61.parquet.\n: Operation failed: "Server Busy", 503, HEAD, '
            "http://a.dfs.core.windows.net/box/a/b?upn=false&action=getStatus&timeout=90s, rId: rid-1\n\tat x",
            "abfss://box@a.dfs.core.windows.net/a/b: the store is away (503 Server Busy in Spark). Run this again "
            "later",
        ),
        (
            'Job aborted: Operation failed: "Server Busy", 429, GET, https://a.dfs.core.windows.net/box?resource=x, '
            'rId: rid-1, ServerBusy, "The server is busy."\n\tat x',
            "abfss://box@a.dfs.core.windows.net: the store is away (429 Server Busy in Spark). Run this again later",
        ),
        (
            "An error occurred while calling o61.parquet.\n: Status code: -1 error code: null error message: "
            "java.net.ConnectException: Connection refusedjava.net.ConnectException: Connection refused\n"
            "\tat org.apache.hadoop.fs.azurebfs.services.AbfsRestOperation.execute(AbfsRestOperation.java:394)",
            "abfss: the store is away (Connection refused in Spark). Run this again later",
        ),
        (
            ": java.io.IOException: Error accessing gs://bucket/a/b. reason=503 Service Unavailable\n"
            'GET http://127.0.0.1:43255/storage/v1/b/bucket/o/a%2Fb?fields=bucket\n{\n  "code" : 503,\n\tat x',
            "gs://bucket/a/b: the store is away (503 Service Unavailable in Spark). Run this again later",
        ),
        (
            ": java.io.IOException: Error accessing gs://bucket/a/b. reason=Connection refused\n\tat x",
            "gs://bucket/a/b: the store is away (Connection refused in Spark). Run this again later",
        ),
        (
            "Job aborted: org.apache.hadoop.hdfs.BlockMissingException: Could not obtain block: B file=/a\n\tat x",
            "HDFS serves Spark no blocks, or is not ready (Could not obtain block: B file=/a). Run this again later",
        ),
        (
            ": org.apache.hadoop.ipc.RemoteException(org.apache.hadoop.hdfs.server.namenode.SafeModeException): Cannot "
            "create file/a. Name node is in safe mode.\n\tat x",
            "HDFS serves Spark no blocks, or is not ready (Cannot create file/a. Name node is in safe mode.). Run this "
            "again later",
        ),
        (
            "java.io.IOException): File /a could only be written to 0 of the 1 minReplication nodes. There are 2 "
            "datanode(s) running and 2 node(s) are excluded in this operation.",
            "HDFS serves Spark no blocks, or is not ready (There are 2 datanode(s) running and 2 node(s) are "
            "excluded). Run this again later",
        ),
    ],
)
def test_a_store_that_is_away(text: str, expected: str) -> None:
    assert exit_message(PySparkException(text)) == (expected, EXIT_INCOMPLETE)


@pytest.mark.parametrize(
    "text",
    [
        ": org.apache.hadoop.fs.s3a.AWSClientIOException: open on s3a://b/a: something else",
        f": java.io.FileNotFoundException: getFileStatus on s3a://b/a: {service(404)}",
        ': Operation failed: "Not Implemented", 501, HEAD, https://a.dfs.core.windows.net/b?x, rId: 1',
        # Of another library.
        ": Status code: -1 error code: null error message: Auth failure: HTTP Error 401; url='https://login'\n\tat x",
        ": java.io.IOException: Error accessing gs://bucket/a/b. reason=404 Not Found\nGET http://127.0.0.1/403 x",
        ": Status code: -1 error code: null error message: java.net.ConnectException: Connection refused\n\tat x",
        ": java.io.IOException: Error getting access token from metadata server at: 'http://169.254.169.254/x'",
        # Full.
        "java.io.IOException): File /a could only be written to 0 of the 1 minReplication nodes. There are 2 "
        "datanode(s) running and no node(s) are excluded in this operation.",
        # Of a file.
        ": java.nio.file.AccessDeniedException: /mnt/a",
        # A warehouse, or another executor.
        ": org.postgresql.util.PSQLException: Connection to db:5432 refused\nCaused by: java.net.ConnectException: x",
        ": java.io.IOException: Failed to connect to host/10.0.0.1:7337\nCaused by: java.net.ConnectException: x",
    ],
)
def test_what_is_another_error(text: str) -> None:
    assert exit_message(PySparkException(text)) is None


def test_what_is_no_error_of_spark_is_not_read_for_it() -> None:
    assert exit_message(ValueError("java.net.ConnectException: getFileStatus on s3a://b/a: refused")) is None
