"""A line's experts (`coserve experts`): `look` reads what is known of them, `change` puts versions in and out of force.

`line` opens the line without its daemon, `measure` and `verify` run experts on images. No file here has options.
"""
