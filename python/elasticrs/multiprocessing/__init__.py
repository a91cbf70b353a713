"""Starting and watching the worker processes of one node."""
