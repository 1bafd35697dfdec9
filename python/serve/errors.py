"""What a request is refused with."""

from __future__ import annotations

#: The status that a request is counted with whose client has gone before its answer, as nginx logs it.
CLIENT_GONE = 499


class RequestError(Exception):
    """A request that is answered by an error.

    Attributes:
        status: of HTTP; `grpc_service` has gRPC's code for it.
        message: what is wrong, where, and what is expected.
        retry_after: seconds after which the same request may be answered; None: it would fail again.
    """

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after = retry_after
