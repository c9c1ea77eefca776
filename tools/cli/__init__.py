"""The command line: a file for each command, with its options, one call and its output. What it calls has no options.

`main.app` is `coserve`. Nothing imports a command.
"""
