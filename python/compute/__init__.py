"""C++ libraries, numbers in NumPy (lists as offsets, random numbers without state, distances), and Arrow's functions.

`pc` stands for `pyarrow.compute` in modules that commands import without computing anything.
"""

from __future__ import annotations

from typing import Any


class _ComputeFunctions:
    """Functions of `pyarrow.compute`, which is imported when one of them is read for the first time.

    Operators are imported to check a spec and to plan stages, which calls none of these functions: the import, which
    wraps each of some 260 functions, would be a tenth of the time of such a command.
    """

    def __getattr__(self, name: str) -> Any:
        """Return a function of `pyarrow.compute`, which is an attribute of this object from then on."""
        import pyarrow.compute

        value = getattr(pyarrow.compute, name)
        setattr(self, name, value)
        return value


pc = _ComputeFunctions()
