"""End at once, without torch."""

import os

os.write(1, b"ran\n")
