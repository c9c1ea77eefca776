"""`python -m tools` is `coserve`, for children of our own commands."""

from tools.cli.main import main

if __name__ == "__main__":
    main()
