"""What the tests share: waiting on events, processes, the launcher, and a guard against leaks."""
