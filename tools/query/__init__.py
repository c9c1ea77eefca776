"""Reading the results for people: `results`, `explain`, `export`, `report`, `rejudge`, without options of commands.

`rows` is the one place that selects images. Nothing here writes the database.
"""
