"""That a store is away, as Spark's own file systems tell it.

Messages are those of Hadoop 3.4.1: `S3AUtils.translateException` of hadoop-aws, `NetUtils` of hadoop-common, whose
words HDFS's client has, `AbfsRestOperationException` of hadoop-azure, which prints no name of its class; and of
Google's connector, by 2.2.26.
"""

from __future__ import annotations

import re

from headrace.storage import StoreAway

#: The exception, the URI, and what Amazon's client says (once: it stands there twice).
_OF_S3A = re.compile(
    r"\b(?:java\.net\.|org\.apache\.hadoop\.net\.|org\.apache\.hadoop\.fs\.s3a\.)"
    r"((?:Connect|ConnectTimeout|NoRouteToHost|SocketTimeout|UnknownHost|Socket|AWSServiceThrottled|AWSStatus500|"
    r"AWSNoResponse|AWSApiCallTimeout|AWSClientIO)Exception): [^\n]*? on (s3a?://[^\s:,]+)(?::[^\S\n]*([^\n]*))?"
)
#: Of AWSClientIOException, which says other things, too; and of a certificate that is not trusted.
_UNANSWERED, _UNTRUSTED = "Unable to execute HTTP request", "PKIX path "
_REPEATED = re.compile(r":\s{2,}.*|:null: .*")
_CLASS = re.compile(r"^(?:[\w$]+\.)+\w+Exception: ")
#: The NameNode's address, and why.
_OF_HDFS = re.compile(
    r"\b(?:Call From \S+|No Route to Host from \s*\S+) to (\S+:\d+) failed on (?:connection|socket timeout) exception: "
    r"([^;\n]+)"
)
#: That no DataNode has a block or takes one, or that the NameNode is not ready: what is said.
_OF_HDFS_DATA = re.compile(
    r"\borg\.apache\.hadoop\.(?:hdfs\.BlockMissing|hdfs\.server\.namenode\.SafeMode|ipc\.Standby|ipc\.Retriable)"
    r"Exception\)?: ([^\n]*)"
)
#: Running, excluded by the client, since they did not take it: others are full.
_NO_DATANODE = re.compile(r"There are (\d+) datanode\(s\) running and (\d+|no) node\(s\) are excluded")
#: The codes of HTTP that say "later".
_LATER = r"(?:408|429|5(?!01|05)\d\d)"
#: What it was answered, the account's host, the container, the path.
_OF_ABFS = re.compile(
    rf'\bOperation failed: "([^"\n]*)", ({_LATER}), [A-Z]+, https?://([^/\s]+)/([^/?\s]+)([^?,\s]*)[^\n]*\brId: '
)
#: No answer, of the store or of who gives tokens for it, in a trace of this file system's; the file is not named.
_OF_ABFS_UNANSWERED = re.compile(
    rf"\bStatus code: -1 error code: null error message: [^\n]*?(HTTP Error {_LATER}\b|"
    r"java\.net\.(?:Connect|NoRouteToHost|SocketTimeout|UnknownHost|Socket)Exception: .*?)(?=java\.net\.|[;\n]|$)"
)
_AZURE = "org.apache.hadoop.fs.azurebfs."
#: The object; a code that says "later", or that there was no answer.
_OF_GCS = re.compile(
    rf"\bError [a-z]+ '?gs://([^\s']+?)'?\. reason=({_LATER} [^\n]*|[^\n]*(?:Connection refused|Connection reset|"
    r"timed out)[^\n]*)"
)


def store_away_of_spark(text: str) -> StoreAway | None:
    """The error as one of headrace's, by what Spark says; None: it is another one."""
    for found in _OF_S3A.finditer(text):
        kind, uri, rest = found[1], found[2], found[3] or ""
        if kind != "AWSClientIOException" or (_UNANSWERED in rest and _UNTRUSTED not in rest):
            said = _CLASS.sub("", _REPEATED.sub("", rest))
            where = f"s3://{uri.partition('://')[2]}"
            return StoreAway(f"{where}: the store is away ({kind} in Spark: {said}). Run this again later")
    if (found_hdfs := _OF_HDFS.search(text)) is not None:
        address, why = found_hdfs.groups()
        return StoreAway(f"hdfs://{address} does not answer Spark ({_CLASS.sub('', why)}). Run this again later")
    return _hdfs_data_away(text) or _azure_or_google_away(text)


def _hdfs_data_away(text: str) -> StoreAway | None:
    found = _OF_HDFS_DATA.search(text)
    said = None if found is None else found[1]
    for written in _NO_DATANODE.finditer(text):
        if written[1] == written[2] or written[1] == "0":
            said = written[0]
    return (
        None
        if said is None
        else StoreAway(f"HDFS serves Spark no blocks, or is not ready ({said}). Run this again later")
    )


def _azure_or_google_away(text: str) -> StoreAway | None:
    if (abfs := _OF_ABFS.search(text)) is not None:
        said, code, host, container, path = abfs.groups()
        place = f"abfss://{container}@{host}{path}"
        return StoreAway(f"{place}: the store is away ({code} {said} in Spark). Run this again later")
    if _AZURE in text and (unanswered := _OF_ABFS_UNANSWERED.search(text)) is not None:
        return StoreAway(f"abfss: the store is away ({_CLASS.sub('', unanswered[1])} in Spark). Run this again later")
    if (gcs := _OF_GCS.search(text)) is not None:
        return StoreAway(f"gs://{gcs[1]}: the store is away ({gcs[2]} in Spark). Run this again later")
    return None
