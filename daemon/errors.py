"""Errors split by who acts on them: ConfigError (the user), RequestError (one image), ExecutorError (one executor).

Errors of one expert are `experts.errors.ExpertError`.
"""

from collections.abc import Sequence

from routing_rules.load import Problem


class ConfigError(Exception):
    """The line cannot start, or a reload was refused: every mistake found, each with its file and line."""

    def __init__(self, problems: Sequence[Problem | str]) -> None:
        self.problems = tuple(str(problem) for problem in problems)
        super().__init__("\n".join(self.problems))


class StartError(ConfigError):
    """The configuration is right but this machine refuses it: a port in use, another daemon, a folder not writable."""

    def __init__(self, problem: str) -> None:
        super().__init__([problem])
