"""Shared constants of the rack's tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench.rack.hosts import PRIVATE
from headrace.config.installation import checkout

#: What a host has for itself.
UNSHARED = ["/tmp", "/dev/shm", "/run", str(PRIVATE)]
#: What hosts see of this machine, and must not write.
SHARED = [str(checkout()), sys.prefix, str(Path.home()), "/etc", "/var/lib", os.sep]
