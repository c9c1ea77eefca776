"""Answers of versions in shadow: their rows, and their comparison with the version in force and people's decisions."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Executable, and_, func, select

from daemon.storage.database.connections import among
from daemon.storage.database.reviews import DAEMON, EFFECTS, effect_of, is_newest
from daemon.storage.database.rows import Row
from daemon.storage.database.schema import inspections, reviews, shadow_answers, stages
from daemon.storage.database.transaction import Transaction
from experts.editions.candidates import Shadow
from routing_rules.routes import Judgement

_TAIL = 0.025  # of each side: the interval has 95 %
_EXAMPLES = 6
#: How many of the newest answers of the version in force are compared.
MAX_IMAGES = 50_000


def outcome_text(judgement: Judgement) -> str:
    """Return a judgement at one step as stored: pass, fail CODE, review, next STEP, or review, next STEP."""
    if judgement.next is not None:
        return f"{'review, ' if judgement.verdict == 'review' else ''}next {judgement.next.name}"
    return f"fail {judgement.defect}" if judgement.verdict == "fail" else judgement.verdict


def add_answers(tx: Transaction, answers: Sequence[Row]) -> None:
    """Add rows of `shadow_answers`, but none twice, and none of an image that was pruned meanwhile."""
    table, image = shadow_answers.c, inspections.c.inspection_id
    key = (table.inspection_id, table.expert, table.expert_version)
    new = {tuple(row[each.name] for each in key): row for row in answers}
    ids = {"ids": json.dumps([row["inspection_id"] for row in answers])}
    there = set(tx.connection.scalars(select(image).where(among(image)), ids))
    known = {tuple(row) for row in tx.connection.execute(select(*key).where(among(table.inspection_id)), ids)}
    tx.add(shadow_answers, [row for which, row in new.items() if which[0] in there and which not in known])


def shadow_report(
    ask: Callable[[Executable], Sequence[Any]], expert: str, in_force: tuple[str, str], shadow: Shadow
) -> dict[str, Any]:
    """Compare a shadow's newest answers with the version in force, named by its weights and its settings' digest.

    `ask` returns rows. `outcomes` has a row for each pair, with its newest images as (inspection_id, board_id); `low`
    and `high` are the 95 % interval (Clopper-Pearson) of `agreement`; `eligible` counts the images that the version in
    force answered since the shadow's first. `holds` says if there is what promoting asks for, `sentence` why.
    """
    from scipy.special import betaincinv  # noqa: PLC0415  half a second, for those who compare

    image, table = stages.c.inspection_id, shadow_answers.c
    is_shadow = and_(table.expert == expert, table.expert_version == shadow.version)
    answered = (stages.c.expert, stages.c.expert_version, stages.c.expert_settings)
    is_in_force = (column == value for column, value in zip(answered, (expert, *in_force), strict=True))
    columns = (inspections.c.board_id, inspections.c.verdict, table.outcome_in_service, table.outcome)
    is_decided = and_(reviews.c.inspection_id == image, reviews.c.reviewer != DAEMON, is_newest())
    query = select(image, *columns, reviews.c.verdict).join(inspections, inspections.c.inspection_id == image)
    query = query.outerjoin(shadow_answers, and_(table.inspection_id == image, table.step == stages.c.step, is_shadow))
    query = query.outerjoin(reviews, is_decided).order_by(image.desc()).limit(MAX_IMAGES)
    first = select(func.min(table.inspection_id)).where(is_shadow).scalar_subquery()
    rows = ask(query.where(*is_in_force, image >= first))

    outcomes: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    effects, reviewed = Counter[str | None](), 0
    for inspection_id, board_id, verdict, old, new, final in rows:
        if new is not None:
            outcomes[old, new].append((inspection_id, board_id))
            reviewed += final is not None
            if old != new and not new.startswith(("next ", "review, next ")):  # else the chain's end is not known
                effects[effect_of(verdict, final, new.split()[0])] += 1
    images, same = sum(map(len, outcomes.values())), sum(len(ids) for (old, new), ids in outcomes.items() if old == new)
    low = float(betaincinv(same, images - same + 1, _TAIL)) if same else 0.0
    missing = [f"{shadow.images - images} more images"] if images < shadow.images else []
    missing += [f"agreement of at least {shadow.agreement:g}"] if low < shadow.agreement else []
    sentence = f"{images} of {shadow.images} images, agreement at least {low:.4f} ({shadow.agreement:g} is asked)"
    sentence = f"does not hold yet: {sentence}; missing: {', '.join(missing)}" if missing else f"holds: {sentence}"
    report = {"expert": expert, "in_force": in_force[0], "shadow": shadow.version, "images": images}
    report |= {"eligible": len(rows), "agreement": same / images if images else None, "low": low}
    report |= {"high": float(betaincinv(same + 1, images - same, 1 - _TAIL)) if same < images else 1.0}
    report |= {"reviewed": reviewed, "effects": {name: effects[name] for name in EFFECTS}}
    return report | {
        "outcomes": [
            {"in_service": old, "shadow": new, "images": len(ids), "examples": ids[:_EXAMPLES]}
            for (old, new), ids in sorted(outcomes.items(), key=lambda item: (item[0][0] == item[0][1], -len(item[1])))
        ],
        "holds": not missing,
        "sentence": sentence,
    }
