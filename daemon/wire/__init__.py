"""The wire (docs/protocol.md): messages, sockets, keys, control. It checks a message alone, without the rules."""
