"""Keys of a profile of AWS's shared files, which the library of the stores does not read.

The order is that of the default chain of AWS's SDK for Java 2, which Spark asks: the environment, a web identity's
token, a profile, the container's role, the machine's role
(https://docs.aws.amazon.com/sdk-for-java/latest/developer-guide/credentials-chain.html).
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path

from headrace.errors import UserError, nearest
from headrace.logs import hide

#: What goes before a profile.
_OVERRIDES = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
#: Settings of a profile that say where its credentials come from: those that go before its keys, and those that do not.
_ROLES = ("role_arn", "sso_session", "sso_start_url")
_ELSEWHERE = ("credential_process", "login_session")
#: The library's names of a profile's keys.
_KEYS = {
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
}


def profile_keys(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of AWS_PROFILE, or of the profile `default`; empty where others precede it, or there is no
    `default`.

    Raises:
        UserError: a file is none of profiles; AWS_PROFILE is not there or has no keys; the profile gets its credentials
            in another way, which Spark would go and this process would not.
    """
    if any(environ.get(name) for name in _OVERRIDES):
        return {}
    files = {
        Path(environ.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser(): "profile ",
        Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser(): "",
    }
    profiles: dict[str, dict[str, str]] = {}
    for file, prefix in files.items():
        for name, settings in _profiles(file, prefix).items():
            # The second file goes before the first.
            profiles.setdefault(name, {}).update(settings)
    named = environ.get("AWS_PROFILE")
    names = " and ".join(map(str, files))
    profile = profiles.get(named or "default")
    if profile is None:
        if named:
            raise UserError(
                f"AWS_PROFILE names the profile '{named}', which is not in {names}{nearest(named, profiles)}"
            )
        return {}
    keys = {argument: profile[key] for argument, key in _KEYS.items() if profile.get(key)}
    for key in keys.values():
        hide(key)
    unsupported = [key for key in (*_ROLES, *(() if keys else _ELSEWHERE)) if profile.get(key)]
    is_whole = {"access_key_id", "secret_access_key"} <= keys.keys()
    if (unsupported or keys or named) and (unsupported or not is_whole):
        reason = (
            f"gets its credentials by {unsupported[0]}"
            if unsupported
            else "lacks aws_access_key_id or aws_secret_access_key"
        )
        raise UserError(
            f"the profile '{named or 'default'}' of {names} {reason}: of profiles headrace reads keys alone. Put its "
            f"credentials into the environment: aws configure export-credentials --profile {named or 'default'} "
            f"--format env"
        )
    return keys


def _profiles(file: Path, prefix: str) -> dict[str, dict[str, str]]:
    """Return the profiles of a file; `prefix` stands before their names, but for `default`."""
    read = configparser.ConfigParser(interpolation=None, strict=False, default_section="\0")
    try:
        read.read(file, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        # The parser's own message quotes the line.
        raise UserError(f"{file} is no file of AWS profiles") from None
    return {
        section.removeprefix(prefix).strip(): dict(read[section])
        for section in read.sections()
        if section.startswith(prefix) or section == "default"
    }
