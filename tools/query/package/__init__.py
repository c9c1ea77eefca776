"""Audit packages (`coserve export`): rows, pictures, rules and experts of chosen boards, with checksums of every file.

`write.write_package` makes a package, `verify.verify_package` checks one.
"""
