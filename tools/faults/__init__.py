"""Breaking real things on purpose: a library that stands before libc and fails, delays or kills at a named call."""
