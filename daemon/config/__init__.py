"""`coserve.yaml` and the environment variables that override it. Nothing here opens the files that it names."""
