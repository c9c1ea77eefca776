"""Facts known before an image runs: usage and successors from the rules, the initial fill, least measured times."""

from collections.abc import Iterable, Mapping, Sequence

from daemon.policy.request import ExpertFacts, PoolFacts, PoolId
from experts.spec import ArchitectureId, ExpertId, ExpertSpec
from routing_rules.routes import Routes


def expert_facts(
    specs: Iterable[ExpertSpec], routes: Routes, counted: Mapping[str, float] | None = None
) -> tuple[ExpertFacts, ...]:
    """Return the facts of every catalogued expert, by descending usage probability (CoServe §4.5), then by name.

    The heads of a family are one expert: what is loaded and batched is their backbone. A step from head to head of one
    family is no successor, since nothing has to be loaded for it. Usage that was `counted` (in a sample, or in results)
    wins over the usage expected from the rules.
    """
    usage = {**routes.usage, **(counted or {})}
    catalog = {spec.name: spec for spec in specs if spec.classes}
    family_of = {ExpertId(name): spec.resident.expert for name, spec in catalog.items()}
    families: dict[ExpertId, list[ExpertFacts]] = {}
    for name, spec in catalog.items():
        then = tuple((ExpertId(follower), share) for follower, share in routes.successors.get(name, ()))
        layout = ArchitectureId(spec.resident.layout)
        alone = ExpertFacts(spec.expert, layout, spec.weights_bytes, usage.get(name, 0.0), then)
        families.setdefault(spec.resident.expert, []).append(alone)
    sizes = resident_bytes(catalog.values())
    facts = [family_facts(family, heads, sizes[family], family_of) for family, heads in families.items()]
    return tuple(sorted(facts, key=lambda each: (-each.usage, each.expert)))


def family_facts(
    family: ExpertId, heads: Sequence[ExpertFacts], weights_bytes: int, family_of: Mapping[ExpertId, ExpertId]
) -> ExpertFacts:
    """Return the facts of a family, which may be one whole network: of all heads, weighted by usage."""
    usage = sum(head.usage for head in heads)
    then: dict[ExpertId, float] = {}
    for head in heads:
        weight = head.usage / usage if usage else 1 / len(heads)
        for name, share in head.then:
            follower = family_of.get(name, name)
            if follower != family:
                then[follower] = then.get(follower, 0.0) + weight * share
    usage = min(usage, 1.0) if len(heads) > 1 else usage
    return ExpertFacts(family, heads[0].architecture, weights_bytes, usage, tuple(then.items()))


def resident_bytes(specs: Iterable[ExpertSpec]) -> dict[ExpertId, int]:
    """Return the bytes that slots hold for these experts; a backbone's are with those of its heads."""
    sizes: dict[ExpertId, int] = {}
    for spec in specs:
        if spec.classes:
            head_bytes = 0 if spec.backbone is None else spec.weights_bytes
            sizes[spec.resident.expert] = sizes.get(spec.resident.expert, spec.resident.weights_bytes) + head_bytes
    return sizes


def initial_fill(experts: Iterable[ExpertFacts], pools: Sequence[PoolFacts]) -> dict[PoolId, tuple[ExpertId, ...]]:
    """Return experts by descending usage probability, round robin over pools until the budgets are full (CoServe §4.1).

    An expert that no longer fits its pool goes to the next that has room; experts that no rule uses stay out.
    """
    free_bytes = {pool.pool: pool.budget_bytes for pool in pools}
    fill: dict[PoolId, list[ExpertId]] = {pool.pool: [] for pool in pools}
    order = [pool.pool for pool in pools]
    used = [facts for facts in experts if facts.usage > 0.0]
    for facts in sorted(used, key=lambda each: (-each.usage, each.expert)):
        for turn, pool in enumerate(order):
            if facts.weights_bytes <= free_bytes[pool]:
                free_bytes[pool] -= facts.weights_bytes
                fill[pool].append(facts.expert)
                order = order[turn + 1 :] + order[: turn + 1]
                break
    return {pool: tuple(experts_of_pool) for pool, experts_of_pool in fill.items()}


class LeastTimes:
    """Least time of batch and load by architecture: a lower bound, so that only hopeless requests are given up."""

    def __init__(self) -> None:
        self._infer_s: dict[ArchitectureId, float] = {}
        self._load_s: dict[ArchitectureId, float] = {}

    def inferred(self, architecture: ArchitectureId, seconds: float) -> None:
        self._infer_s[architecture] = min(seconds, self._infer_s.get(architecture, seconds))

    def loaded(self, architecture: ArchitectureId, seconds: float) -> None:
        self._load_s[architecture] = min(seconds, self._load_s.get(architecture, seconds))

    def least_s(self, architecture: ArchitectureId, *, resident: bool) -> float:
        """Return the seconds from now to an answer if no other work were queued."""
        load_s = 0.0 if resident else self._load_s.get(architecture, 0.0)
        return self._infer_s.get(architecture, 0.0) + load_s
