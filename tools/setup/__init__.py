"""Making a line (`init`), its systemd service, a daemon as a child, and `doctor`, which judges the PC."""
