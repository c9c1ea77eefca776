"""The wire (docs/protocol.md): frames, messages, sockets, keys, and the control socket's two sides.

Intake, the results stream, control and all clients import from here. Nothing here reads the configuration, the rules or
the database: it checks a message alone.
"""
