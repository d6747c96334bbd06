"""The rules of the protocol as pure functions and tables: no I/O, no clock, no randomness.

Ids and instants are given to this package, never taken by it, so everything in it can be tested by
calling it.
"""
