"""A line's experts (`coserve experts`): `look` reads what is known of them, `change` switches their versions."""
