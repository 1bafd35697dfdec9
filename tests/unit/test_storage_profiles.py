"""Access to stores: profiles of AWS's shared files, and tokens of GCS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from headrace.errors import UserError
from headrace.storage import Location, location
from headrace.storage.objects import calls
from headrace.storage.objects.clients import profile_keys
from headrace.storage.objects.store import ObjectStore
from tests.gcs_server import gcs_bucket

CREDENTIALS = """
[default]
aws_access_key_id = of-default
aws_secret_access_key = hunter2
[team]
aws_access_key_id = of-team
aws_secret_access_key = hunter2
aws_session_token = t
[half]
aws_access_key_id = of-half
"""
CONFIG = """
[default]
region = eu-central-1
[profile team]
aws_access_key_id = older
[profile config]
aws_access_key_id = of-config
aws_secret_access_key = hunter2
s3 =
    addressing_style = path
[profile role]
role_arn = arn:aws:iam::1:role/x
source_profile = team
aws_access_key_id = own
aws_secret_access_key = hunter2
[profile sso]
sso_session = ours
[profile process]
credential_process = /bin/keys
[profile region]
region = eu-central-1
[team2]
aws_access_key_id = a section of no profile
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "credentials").write_text(CREDENTIALS)
    (tmp_path / "config").write_text(CONFIG)
    return {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"), "AWS_CONFIG_FILE": str(tmp_path / "config")}


@pytest.mark.parametrize(
    ("environ", "key"),
    [
        ({}, "of-default"),
        ({"AWS_PROFILE": "team"}, "of-team"),
        ({"AWS_PROFILE": "config"}, "of-config"),
        # Behind a profile in AWS's chain.
        ({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://169.254.170.2"}, "of-default"),
        ({"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/x", "AWS_PROFILE": "team"}, "of-team"),
        # Before it.
        ({"AWS_ACCESS_KEY_ID": "k", "AWS_PROFILE": "nobody"}, None),
        ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/t", "AWS_PROFILE": "team"}, None),
    ],
)
def test_whose_keys_are_taken(files: dict[str, str], environ: dict[str, str], key: str | None) -> None:
    keys = profile_keys(files | environ)
    assert keys.get("access_key_id") == key
    assert ("session_token" in keys) == (key == "of-team")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "taem",
            "AWS_PROFILE names the profile 'taem', which is not in .*config and .*credentials; did you mean 'team'",
        ),
        ("team2", "names the profile 'team2', which is not in"),
        ("role", "'role' .* gets its credentials by role_arn: .* export-credentials --profile role"),
        ("sso", "by sso_session"),
        ("process", "by credential_process"),
        ("region", "'region' .* lacks aws_access_key_id or aws_secret_access_key"),
        ("half", "'half' .* lacks"),
    ],
)
def test_a_profile_that_cannot_be_read_is_named(files: dict[str, str], name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as e:
        profile_keys(files | {"AWS_PROFILE": name, "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://169.254.170.2"})
    assert "hunter2" not in str(e.value)


def test_a_default_profile_may_be_missing_or_have_no_keys_but_not_others(files: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "credentials").unlink()
    assert profile_keys(files) == {}
    (tmp_path / "config").write_text("[default]\nsso_start_url = https://x\n")
    with pytest.raises(UserError, match=r"'default' .* by sso_start_url"):
        profile_keys(files)
    (tmp_path / "config").unlink()
    assert profile_keys(files) == {}
    (tmp_path / "config").write_text("aws_secret_access_key hunter2\n")
    with pytest.raises(UserError, match="config is no file of AWS profiles") as e:
        profile_keys(files)
    assert "hunter2" not in str(e.value)


@pytest.fixture
def bucket() -> Iterator[Any]:
    with gcs_bucket() as gcs:
        yield gcs


def test_a_put_replaces_the_generation_that_was_read_and_no_other(bucket: Any) -> None:
    """The generation counts even where the content, and so the tag, is the same again."""
    assert calls.put_new(bucket, "a/b", b"1") is not None
    assert calls.put_new(bucket, "a/b", b"1") is None
    first = calls.head(bucket, "a/b")
    assert first is not None
    assert first.version == "1"
    assert calls.put_if(bucket, "a/b", b"2", first.revision) is not None
    assert calls.put(bucket, "a/b", b"1") == first.tag
    assert calls.put_if(bucket, "a/b", b"3", first.revision) is None
    stored = calls.get(bucket, "a/b")
    assert stored is not None
    assert (stored[0], stored[1].tag, stored[1].version) == (b"1", first.tag, "3")


def test_files_are_replaced_and_added_to(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(location.STORES, "gs", ObjectStore("gs", lambda scheme, name: bucket))
    home = Location(PurePosixPath("/bucket"), "gs")
    file = home / "manifest.json"
    assert file.put_if(b"old", None)
    read = file.read_tagged()
    assert read is not None
    assert file.put_if(b"new", read[1])
    assert not file.put_if(b"late", read[1])
    assert file.read_bytes() == b"new"
    for line in ("1\n", "2\n"):
        (home / "log").append(line.encode())
    assert (home / "log").read_text() == "1\n2\n"
