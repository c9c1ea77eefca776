"""Audit packages (`coserve export`): rows, pictures, rules and experts of chosen boards, checksums of every file."""
