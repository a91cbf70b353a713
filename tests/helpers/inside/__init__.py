"""Programs that the tests run inside a network namespace. Each one is a single file that uses only the
standard library.

Each ends when its standard input does, so that none outlives the tests, however they end.
"""
