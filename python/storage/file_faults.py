"""What an error of a file system means to the user: something to mend, or a network file system that is away.

A store of objects says so itself (`headrace.storage.objects.calls`), a file system by the numbers of errno(3).
"""

from __future__ import annotations

import errno
import os

from headrace.errors import EXIT_FAILURE, EXIT_INCOMPLETE, EXIT_USER_ERROR

_MAY_NOT = {errno.EACCES, errno.EPERM}
_FULL = {errno.ENOSPC, errno.EDQUOT}
#: How NFS and its like say that their server does not answer, or has forgotten the file. Sockets say most of them, too.
_AWAY = {
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENOTCONN,
    errno.EREMOTEIO,
}
#: How Arrow names a file that it cannot open or read: its errors have the number, and no name.
_OF_ARROW = "local file '"


def told_of_file(error: OSError) -> tuple[str, int] | None:
    """The message and the exit code of an error of a file; None: of something else, or for the program to mend."""
    name = error.filename if isinstance(error.filename, str) else ""
    if not name:
        name = str(error).partition(_OF_ARROW)[2].partition("'")[0]
    if not name and error.errno not in _FULL:
        return None
    said = os.strerror(error.errno) if error.errno else ""
    where = f"{name}: {said}" if name else said
    if error.errno in _MAY_NOT:
        return f"{where}. The user of this process must be allowed to read and write there", EXIT_USER_ERROR
    if error.errno == errno.EROFS:
        return f"{where}. Mount it for writing, or choose another place", EXIT_USER_ERROR
    if error.errno == errno.ENOTDIR:
        return f"{where}. A file is where a folder should be: move it away, or choose another place", EXIT_USER_ERROR
    if error.errno in _FULL:
        return f"{where}. Make room there" if name else f"{where}. Make room below --home and TMPDIR", EXIT_USER_ERROR
    if error.errno in _AWAY:
        return f"{where}. Its file system is away. Run this again later", EXIT_INCOMPLETE
    if error.errno == errno.EIO:
        return f"{where}. Its disk, or the server of its file system, has failed: see the kernel's log", EXIT_FAILURE
    return None
