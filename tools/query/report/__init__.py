"""A board's failures in words (`coserve report`): from a template, or by a language model of the running line.

`board` reads the rows, `by_model` asks the model.
"""
