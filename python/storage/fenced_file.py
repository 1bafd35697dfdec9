"""Files that say whose they are: an earlier holder of a lease does not write over what a later one has written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headrace.storage.lease import Fence, LeaseLost
from headrace.storage.location import Location


def put_fenced(
    file: Location, text: str, fences: Sequence[Fence], tokens_of: Callable[[str], Mapping[str, int]]
) -> None:
    """Replace a file in one step, on the condition that it is still the one that was looked at.

    Args:
        file: its place.
        text: what is to be there, which says the tokens of `fences`.
        fences: of the leases that the process holds; none: nobody else writes there.
        tokens_of: by lease, the tokens that a text says.

    Raises:
        LeaseLost: what is there was written by a later holder of one of the leases, also where that was a moment ago.
    """
    if not fences:
        file.put_text(text)
        return
    while True:
        tagged = file.read_tagged()
        tokens = {} if tagged is None else tokens_of(tagged[0].decode())
        if any(tokens.get(fence.lease, 0) > fence.token for fence in fences):
            raise LeaseLost(f"{file} was written by a later run; this one's is not. Run it again")
        if file.put_if(text.encode(), None if tagged is None else tagged[1]):
            return
