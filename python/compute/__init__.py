"""C++ libraries; numbers in NumPy (lists as offsets, random numbers without state, distances); Arrow's functions."""

from __future__ import annotations

from headrace import LazyModule

#: Functions of Arrow. Operators are imported to check a spec and to plan stages, which calls none of them: the import,
#: which wraps some 260 functions, would be a tenth of the time of such a command.
pc = LazyModule("pyarrow.compute")
