"""Which experts of a layer run themselves and whose tokens go to a united expert (BrownoutServe §IV.C).

Line 10 of Algorithm 1 asks whether the sum has reached its target before it adds anything, which would send the busiest
experts away. The worked example is right: 12 of 20 tokens are the three busiest experts'.
"""

from collections.abc import Sequence
from dataclasses import dataclass

#: Products of a threshold and a count are not exact: 100 × 0.55 is a little more than 55, and would ask for more.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class ExpertSplit:
    """What becomes of the experts of one layer in one step. Experts without tokens appear nowhere."""

    #: Run themselves, ascending.
    originals: tuple[int, ...]
    #: Groups whose united expert runs, ascending, each with the experts it stands in for.
    united: tuple[tuple[int, tuple[int, ...]], ...] = ()
    #: Their tokens are ignored in this layer (full brownout), ascending.
    dropped: tuple[int, ...] = ()

    @property
    def accesses(self) -> int:
        """Experts that run, original and united."""
        return len(self.originals) + len(self.united)


def busiest(tokens: Sequence[int], threshold: float) -> tuple[int, ...]:
    """The shortest run of experts, most tokens first, that holds `threshold` of all tokens.

    Ties go to the lower index; experts without tokens are never named.
    """
    wanted = sum(tokens) * threshold - _ROUNDING * sum(tokens)
    chosen: list[int] = []
    held = 0
    for expert in sorted(range(len(tokens)), key=lambda one: (-tokens[one], one)):
        if held >= wanted or tokens[expert] == 0:
            break
        chosen.append(expert)
        held += tokens[expert]
    return tuple(chosen)


def split(tokens: Sequence[int], threshold: float, groups: Sequence[int] | None) -> ExpertSplit:
    """Divide the experts of a layer.

    `tokens[i]` are the tokens that chose expert i, `groups[i]` the group that expert i is united in. Without groups
    this is full brownout: what is not among the busiest is dropped. At threshold 1 every expert runs itself.
    """
    chosen = busiest(tokens, threshold)
    taken = frozenset(chosen)
    rest = [expert for expert, count in enumerate(tokens) if count and expert not in taken]
    if groups is None:
        return ExpertSplit(tuple(sorted(chosen)), dropped=tuple(rest))
    members: dict[int, list[int]] = {}
    for expert in rest:
        members.setdefault(groups[expert], []).append(expert)
    # Alone in its group an expert would be replaced by a united one without an access less: it runs itself.
    alone = [experts[0] for experts in members.values() if len(experts) == 1]
    united = [(group, tuple(experts)) for group, experts in sorted(members.items()) if len(experts) > 1]
    return ExpertSplit(tuple(sorted([*chosen, *alone])), tuple(united))


def in_order(experts: int, way: int) -> tuple[int, ...]:
    """The group of each of `experts` experts, `way` neighbours by index in each (BrownoutServe §IV.B)."""
    return tuple(expert // way for expert in range(experts))
