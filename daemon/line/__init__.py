"""One line as its files describe it. The start, a reload, `coserve check` and the tools read it through `line`."""
