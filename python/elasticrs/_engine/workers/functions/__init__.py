"""Workers that are functions: start methods, log plugins, and processes without an agent."""
