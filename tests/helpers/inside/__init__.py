"""Programs that the tests run inside a network namespace: one file each, nothing but the standard library.

Each ends when its standard input does, so that none outlives the tests, however they end.
"""
