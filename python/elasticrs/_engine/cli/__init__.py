"""The command line: its options, what a scheduler adds to them, checks before the start, the exit code."""
