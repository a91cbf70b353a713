"""What the user asked for: options, settings, ranks, the restart policy; and the words for a failure."""
