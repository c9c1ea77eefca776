"""Reading the results for people; `rows` is the one place that selects images. Nothing here writes the database."""
