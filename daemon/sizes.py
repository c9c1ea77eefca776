"""Sizes in bytes as a person reads them, on pages, in the terminal and in errors; how they write them: quantities.py.

Columns of numbers with the unit in their head, and numbers that a person is to write into a setting, are not for this.
"""


def size_text(size_bytes: float) -> str:
    """In powers of ten, three digits: `812 B`, `45 kB`, `44.8 MB`, `210 MB`, `2.0 GB`."""
    value = float(size_bytes)
    for unit, digits in (("B", 0), ("kB", 0), ("MB", 1), ("GB", 1)):
        shown = 0 if value >= 99.95 else digits
        if round(value, shown) < 1000:
            return f"{value:.{shown}f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"
