"""The command line, a file for each topic: commands with their options and output. `main.app` is `coserve`."""
