"""`headrace pack`: the environment as an archive for executors."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.commands.screen import out
from headrace.errors import UserError
from headrace.jobs.pack.archive import pack as write
from headrace.storage import Location

_MIB = 2**20


def pack(file: Location, left_out: Sequence[str]) -> None:
    """Write the archive and say how to use it.

    Raises:
        UserError: the file's name is not one that Spark unpacks, or a package cannot go along.
    """
    if not file.name.endswith((".tar.gz", ".tgz")):
        raise UserError(f"{file}: Spark unpacks archives by their names; call it .tar.gz")
    packed = write(file, left_out)
    for who, what in packed.missed:
        out.print(f"without {what}, which {who} needs", markup=False)
    size = f"{file.size() / _MIB:,.0f} MiB, {packed.unpacked / _MIB:,.0f} unpacked"
    out.print(f"{file}: {packed.packages} packages, {packed.files:,} files, {size}", markup=False, soft_wrap=True)
    properties = f"{{spark.archives: {file}#environment, spark.pyspark.python: ./environment/bin/python}}"
    out.print(f"spark.properties: {properties}", markup=False, soft_wrap=True)
