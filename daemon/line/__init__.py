"""One line as its files describe it: settings, rules, catalog, weights and profile, read and checked together.

The start, a reload, `coserve check` and the tools all read a line through `line.line`. Nothing here opens a socket or
writes a file.
"""
