"""The section `publish.online`: a store of keys and values from which a service reads a user's items."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import model_validator

from headrace.config.section import PathText, Section


class Online(Section):
    """The newest day's items of each user, by the user's key, for serving."""

    #: redis: a server. lmdb: a file that is mapped into the memory of who reads it.
    kind: Literal["redis", "lmdb"]
    #: redis: the server's URL without a password, such as `redis://cache:6379/0` (`rediss://` encrypts).
    url: str | None = None
    #: lmdb: the file. Default: `HOME/online/TABLE.lmdb`.
    path: PathText | None = None
    #: Where the password of Redis is (never itself): a variable's name.
    password_env: str | None = None
    #: Path of the file with the password.
    password_file: str | None = None

    @model_validator(mode="after")
    def _names_its_server(self) -> Online:
        if self.kind == "redis" and self.url is None:
            raise ValueError("kind redis needs the key 'url'")
        if self.url is not None and re.match(r"[^/]*://[^/@]*:[^/@]*@", self.url):
            raise ValueError("url has a password in it: leave it out and name password_env or password_file")
        return self
