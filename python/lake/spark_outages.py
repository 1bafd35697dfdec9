"""That a store is away, as Spark tells it: of its own file systems, and of Python tasks.

Messages of the file systems are those of Hadoop 3.4.1: `S3AUtils.translateException` of hadoop-aws, and `NetUtils` of
hadoop-common, whose words HDFS's client has. A task's come with the job's, as text: only that reaches the driver.
"""

from __future__ import annotations

import re

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from headrace.storage import StoreAway

_OF_TASK = re.compile(r"headrace\.storage\.objects\.calls\.StoreAway: ([^\n]+)")
#: The last line of a task's trace, which Java's follows: the number of the system's, and the file.
_OF_FILE = re.compile(r"^\w*Error: \[Errno (\d+)\] ([^\n]*?)(?:: '([^'\n]+)')?\s*(?:^\s+at |\Z)", re.MULTILINE)
#: The exception, the URI, and what Amazon's client says (once: it stands there twice).
_OF_S3A = re.compile(
    r"\b(?:java\.net\.|org\.apache\.hadoop\.net\.|org\.apache\.hadoop\.fs\.s3a\.)"
    r"((?:Connect|ConnectTimeout|NoRouteToHost|SocketTimeout|UnknownHost|Socket|AWSServiceThrottled|AWSStatus500|"
    r"AWSNoResponse|AWSApiCallTimeout|AWSClientIO)Exception): [^\n]*? on (s3a?://[^\s:,]+)(?::[^\S\n]*([^\n]*))?"
)
#: Of AWSClientIOException, which says other things, too: that there are no credentials, for example.
_UNANSWERED = "Unable to execute HTTP request"
_REPEATED = re.compile(r":\s{2,}.*|:null: .*")
_CLASS = re.compile(r"^(?:[\w$]+\.)+\w+Exception: ")
#: The NameNode's address, and why.
_OF_HDFS = re.compile(
    r"\b(?:Call From \S+|No Route to Host from \s*\S+) to (\S+:\d+) failed on (?:connection|socket timeout) exception: "
    r"([^;\n]+)"
)


def file_error_of_spark(error: BaseException) -> OSError | None:
    """The error of a file system with which a Python task has ended; None: it is another one."""
    if not isinstance(error, (PySparkException, Py4JJavaError)):
        return None
    found = _OF_FILE.search(str(error))
    return None if found is None else OSError(int(found[1]), found[2], found[3])


def store_away_of_spark(error: BaseException) -> StoreAway | None:
    """The same error as one of headrace's; None: it is another one."""
    if not isinstance(error, (PySparkException, Py4JJavaError)):
        return None
    text = str(error)
    if (told := _OF_TASK.search(text)) is not None:
        return StoreAway(told[1])
    for found in _OF_S3A.finditer(text):
        kind, uri, rest = found[1], found[2], found[3] or ""
        if kind != "AWSClientIOException" or _UNANSWERED in rest:
            said = _CLASS.sub("", _REPEATED.sub("", rest))
            where = f"s3://{uri.partition('://')[2]}"
            return StoreAway(f"{where}: the store is away ({kind} in Spark: {said}). Run this again later")
    if (found_hdfs := _OF_HDFS.search(text)) is not None:
        address, why = found_hdfs.groups()
        return StoreAway(f"hdfs://{address} does not answer Spark ({_CLASS.sub('', why)}). Run this again later")
    return None
