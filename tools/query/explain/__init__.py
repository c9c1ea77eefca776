"""Why an image has its verdict: its record, judged once more by the rules that were kept, in words.

`run` puts it together; the database is only read.
"""
