"""The command line, a file for each topic: commands with their options and their output.

`main.app` is `coserve`. What a command calls has no options.
"""
