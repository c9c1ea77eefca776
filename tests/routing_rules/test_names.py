from routing_rules.names import name_in_use


def test_a_name_holds_nothing_that_nobody_sees():
    for sign in ("\x00", "\t", "\x7f", "\x85", "\xad", "\u200b", "\u202e", "\u2028", "\u2029", "\ufeff", "\ud800"):
        assert name_in_use(f"A{sign}B") is None
    for name in ("a", "A 1/2", "Prüf\xe9", "部品", "x" * 128):
        assert name_in_use(name) == name
    for other in ("", "x" * 129, None, 5):
        assert name_in_use(other) is None


def test_a_name_is_measured_as_it_is_used():
    assert name_in_use("e\u0301" * 128) == "\xe9" * 128
