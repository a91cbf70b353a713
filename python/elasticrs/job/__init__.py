"""The user's request: options, settings, ranks, and the restart budget."""
