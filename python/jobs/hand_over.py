"""Files for an application on a cluster: Spark properties as Java reads them, and secrets.

Airflow loads this module by its path, in an environment without headrace: it imports the standard library alone.

A secret is never a Spark property: the history server, the web page of the application and ps show those. On YARN it
travels in a file that is its owner's alone, by `spark.yarn.dist.files`, and lies in the containers' own folders.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

#: Variable of an application's environment: the file of secrets, relative to its working folder.
VARIABLE = "HEADRACE_SECRETS"
#: JSON object of variables and values. The program of the stages reads it before anything else.
_SECRETS = "headrace-secrets.json"
#: AWS credentials: JVMs and Python read it by `AWS_SHARED_CREDENTIALS_FILE`, on the driver and on executors.
_AWS_FILE = "headrace-aws-credentials"
_AWS = {
    "AWS_ACCESS_KEY_ID": "aws_access_key_id",
    "AWS_SECRET_ACCESS_KEY": "aws_secret_access_key",
    "AWS_SESSION_TOKEN": "aws_session_token",
}
_DIST_FILES = "spark.yarn.dist.files"
#: Characters that `java.util.Properties` would change -> their escapes.
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f"}


def property_line(key: str, value: str) -> str:
    r"""Return a line of a properties file that `java.util.Properties` reads back as this key and value.

    Blanks before a value would be skipped, and `=`, `:`, blanks, `#` and `!` in a key end it or begin a comment.
    """
    escaped = "".join(_ESCAPES.get(c, c) for c in value)
    written_key = re.sub(r"[\s=:#!\\]", lambda c: _ESCAPES.get(c[0], "\\" + c[0]), key)
    return f"{written_key}=" + ("\\" if escaped.startswith(" ") else "") + escaped


def with_secrets(properties: str, folder: Path, secrets: Mapping[str, str], variables: Mapping[str, str]) -> str:
    """Return the text of a properties file for an application of YARN in cluster mode, its secrets in files.

    Args:
        properties: the text of a pipeline's properties file.
        folder: of its owner alone; the files with secrets are made there.
        secrets: variables that nobody else may see.
        variables: of the application master, which are no secrets.
    """
    public, files, places = dict(variables), list[Path](), ("spark.yarn.appMasterEnv", "spark.executorEnv")
    lines = [line for line in properties.splitlines() if line]
    of_aws = {key: secrets[name] for name, key in _AWS.items() if name in secrets}
    if of_aws:
        text = "".join(f"{key} = {value}\n" for key, value in of_aws.items())
        files.append(_private_file(folder / _AWS_FILE, f"[default]\n{text}"))
        lines += [property_line(f"{place}.AWS_SHARED_CREDENTIALS_FILE", _AWS_FILE) for place in places]
    if other_secrets := {name: value for name, value in secrets.items() if name not in _AWS}:
        files.append(_private_file(folder / _SECRETS, json.dumps(other_secrets)))
        public[VARIABLE] = _SECRETS
    if files:
        dist_lines = [line for line in lines if line.startswith(f"{_DIST_FILES}=")]
        lines = [line for line in lines if line not in dist_lines]
        listed = [*(line.partition("=")[2] for line in dist_lines), *(file.as_uri() for file in files)]
        lines.append(f"{_DIST_FILES}={','.join(listed)}")
    lines += [property_line(f"spark.yarn.appMasterEnv.{name}", value) for name, value in public.items()]
    return "\n".join(lines) + "\n"


def take_secrets(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Put the variables of the file that `with_secrets` has made into an environment; the variables.

    Raises:
        OSError: it is not there.
        ValueError: it is damaged.
    """
    name = environ.pop(VARIABLE, None)
    if name is None:
        return {}
    secrets: dict[str, str] = json.loads(Path(name).read_text(encoding="utf-8"))
    environ.update(secrets)
    return secrets


def _private_file(path: Path, text: str) -> Path:
    with open(path, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)
    return path
