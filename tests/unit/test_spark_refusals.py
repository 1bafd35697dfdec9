"""A store that refuses Spark, by the words of Spark's own file systems.

Those of S3A are as Hadoop 3.4.1 was seen to say them; of abfs and gs the form of what they say of outages was, with
other codes.
"""

from __future__ import annotations

import pytest
from pyspark.errors import PySparkException

from headrace.errors import EXIT_FAILURE, EXIT_USER_ERROR
from headrace.errors.translate import exit_message

_CALLING = "An error occurred while calling o1.parquet.\n: "
_STACK = "\n\tat org.apache.hadoop.fs.s3a.S3AUtils.translateException(S3AUtils.java:265)\n"
_ACCESS = (
    "Credentials are those of the environment or of the machine (docs/storage.md): the driver finds its own, and each "
    "executor, which needs them, too, on its host. They must allow to read, write, list and delete there"
)


def answered(code: int, message: str = "null", name: str = "null") -> str:
    """Return what S3A says of S3's answer."""
    answer = f"{message} (Service: S3, Status Code: {code}, Request ID: 893EA05DC74E9D04)"
    return f"software.amazon.awssdk.services.s3.model.S3Exception: {answer}:{name}"


def denied(rest: str, uri: str = "s3a://b/lake/a") -> str:
    return f"java.nio.file.AccessDeniedException: {uri}: {rest}{_STACK}"


_NO_CREDENTIALS = (
    "org.apache.hadoop.fs.s3a.auth.NoAuthWithAWSException: No AWS Credentials provided by DefaultCredentialsProvider : "
    "software.amazon.awssdk.core.exception.SdkClientException: Unable to load credentials from any of the providers in "
    "the chain AwsCredentialsProviderChain(credentialsProviders=[SystemPropertyCredentialsProvider()])"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"{_CALLING}{denied(f'getFileStatus on s3a://b/lake/a: {answered(403)}')}",
            f"the store refuses Spark s3://b/lake/a: 403. {_ACCESS}",
        ),
        (
            # Of a task.
            "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 times: "
            "org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading file s3://b/a."
            "\n\tat org.apache.spark.sql\nCaused by: "
            + denied(f"open s3://b/a at 0 on s3://b/a: {answered(403, 'Access Denied', 'AccessDenied')}", "s3://b/a"),
            f"the store refuses Spark s3://b/a: 403 AccessDenied: Access Denied. {_ACCESS}",
        ),
        (
            _CALLING + denied(_NO_CREDENTIALS, "s3://b/t/_delta_log"),
            f"Spark has found no credentials for s3://b/t/_delta_log. {_ACCESS}",
        ),
        (
            f"{_CALLING}org.apache.hadoop.fs.s3a.UnknownStoreException: `s3a://nowhere/lake/a': getFileStatus on "
            f"s3a://nowhere/lake/a: {answered(404, 'The specified bucket does not exist', 'NoSuchBucket')}{_STACK}",
            "s3://nowhere/lake/a: there is no bucket 'nowhere', and headrace makes none",
        ),
        (
            f"{_CALLING}org.apache.hadoop.security.AccessControlException: Permission denied: user=x, access=WRITE, "
            f'inode="/lake":hdfs:supergroup:drwxr-xr-x{_STACK}',
            'HDFS refuses Spark: Permission denied: user=x, access=WRITE, inode="/lake":hdfs:supergroup:drwxr-xr-x. '
            "The user is HADOOP_USER_NAME, or with Kerberos that of kinit's ticket, for which executors get tokens "
            "(docs/storage.md); it must be allowed to read, write, rename and delete there",
        ),
        (
            f'{_CALLING}java.nio.file.AccessDeniedException: Operation failed: "This request is not authorized", 403, '
            f"HEAD, https://a.dfs.core.windows.net/box/a/b?upn=false, rId: 1{_STACK}",
            "the store refuses Spark abfss://box@a.dfs.core.windows.net/a/b: 403 This request is not authorized. "
            f"{_ACCESS}",
        ),
        (
            f"{_CALLING}Status code: -1 error code: null error message: Auth failure: HTTP Error 401; url='https://"
            "login'\n\tat org.apache.hadoop.fs.azurebfs.services.AbfsRestOperation",
            f"Azure gives Spark no token for abfss: HTTP Error 401. {_ACCESS}",
        ),
        (
            f"{_CALLING}java.io.IOException: Error accessing gs://bucket/a/b. reason=403 Forbidden\nGET http://x{_STACK}",
            f"the store refuses Spark gs://bucket/a/b: 403 Forbidden. {_ACCESS}",
        ),
    ],
)
def test_what_the_user_mends(text: str, expected: str) -> None:
    assert exit_message(PySparkException(text)) == (expected, EXIT_USER_ERROR)


@pytest.mark.parametrize(
    ("region", "expected"),
    [
        ("eu-west-1", "a bucket that Spark asked for is in the region 'eu-west-1' and was asked for in 'eu-north-1' "),
        ("null", "a bucket that Spark asked for is in another region than 'eu-north-1' (AWS_DEFAULT_REGION): set "),
    ],
)
def test_a_bucket_of_another_region(region: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is that of `S3AUtils.translateException` of Hadoop 3.4.1."""
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    text = (
        f"org.apache.hadoop.fs.s3a.AWSRedirectException: Received permanent redirect response to region {region}.  "
        f"This likely indicates that the S3 region configured in fs.s3a.endpoint.region does not match the AWS region "
        f"containing the bucket.: null (Service: S3, Status Code: 301, Request ID: null)"
    )
    message, code = exit_message(PySparkException(f"{_CALLING}{text}{_STACK}")) or ("", 0)
    assert message.startswith(expected)
    assert "spark.hadoop.fs.s3a.endpoint.region of spark.properties" in message
    assert code == EXIT_USER_ERROR


_UNTRUSTED = (
    "Unable to execute HTTP request: PKIX path building failed: sun.security.provider.certpath."
    "SunCertPathBuilderException: unable to find valid certification path to requested target"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "AWSBadRequestException: listObjects() on s3a://b/a: "
            + answered(400, "The provided token has expired.", "ExpiredToken"),
            "s3://b/a: 400 ExpiredToken: The provided token has expired",
        ),
        (
            "AWSClientIOException: getFileStatus on s3a://b/a: software.amazon.awssdk.core.exception.SdkClientException"
            f": {_UNTRUSTED}: {_UNTRUSTED}",
            f"s3://b/a: {_UNTRUSTED}",
        ),
    ],
)
def test_what_no_later_try_changes(text: str, expected: str) -> None:
    message, code = exit_message(PySparkException(f"{_CALLING}org.apache.hadoop.fs.s3a.{text}{_STACK}")) or ("", 0)
    assert message.partition(". Run this again")[0] == expected
    assert code == EXIT_FAILURE
