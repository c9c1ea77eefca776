"""`coserve doctor`: what is wrong on this PC, and what to do about it. A module for each part of the PC.

Each check yields `findings.Finding`s; nothing is changed.
"""
