"""Who may ask."""

from __future__ import annotations

import hmac

from headrace.serve.errors import RequestError


class Access:
    """A token that requests must bring, `Authorization: Bearer TOKEN`; none: everybody may ask."""

    def __init__(self, token: str | None) -> None:
        self._wanted = None if token is None else b"Bearer " + token.encode()

    def check(self, authorization: bytes) -> None:
        """Raise RequestError (401) where it is not the token."""
        if self._wanted is not None and not hmac.compare_digest(authorization, self._wanted):
            raise RequestError(401, "this server asks for a token: Authorization: Bearer TOKEN")
