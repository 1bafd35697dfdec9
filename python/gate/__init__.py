"""Which model becomes the champion."""
