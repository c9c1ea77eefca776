"""Makes experts: trains on the user's images, imports networks, and proves that a file answers as its source.

Import `classifier` and `detector` (training commands), `fit` (parts of classifier training), `importer` and
`expert_file` (every expert is written there), `held_out` and `proof` (measures). Nothing here runs in the daemon.
"""

from tools.terminal.console import CommandError


class TrainingError(CommandError):
    """A training or an import cannot start or went wrong; the text names the file or value, and what to do."""
