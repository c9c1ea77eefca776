"""Audit packages (`coserve export`): rows, pictures, rules and versions of chosen boards, with checksums of everything.

`write` makes a package, `verify` proves one.
"""
