"""Making a line and putting it under systemd: answers to `init`, its files, the service's files, a daemon as a child.

`doctor` judges the PC that the line runs on.
"""
