"""What the user asked for: options, settings, ranks, and the budget of restarts."""
