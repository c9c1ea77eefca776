"""The report on a trained classifier: a table of what was tried, the ten worst pictures, the confusion matrix."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from daemon.units import size_text
from tools.training.classifier import DEFECT, MIN_AUROC, ClassifierReport
from tools.training.held_out import HeldOutAnswers, Rate, claims

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WORST = 10


#: Columns of the table of what was tried.
COLUMNS = ("kind", "escapes", "false calls", "ranking", "ms", "bytes")


def figures(report: ClassifierReport) -> list[dict[str, Any]]:
    """Return the figures of each kind that was tried, for programs; `cells` has them for people."""
    return [
        {
            "kind": trial.kind,
            "images": len(trial.answers.rows),
            "wrong": int((~trial.answers.right).sum()),
            "escapes": trial.answers.escapes.count if trial.answers.good is not None else None,
            "defective": trial.answers.escapes.of,
            "false_calls": trial.answers.false_calls.count if trial.answers.good is not None else None,
            "good": trial.answers.false_calls.of,
            "auroc": trial.answers.auroc,
            "image_ms": round(trial.image_ms, 2),
            "bytes": trial.bytes,
            "seconds": round(trial.seconds, 1),
            "is_taken": trial is report.chosen,
        }
        for trial in report.trials
    ]


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row of `figures` as text, with 95 % intervals."""
    if row["escapes"] is None:
        mistakes = (f"{row['wrong']} wrong of {row['images']}", "")
    else:
        rates = Rate(row["escapes"], row["defective"]), Rate(row["false_calls"], row["good"])
        mistakes = (str(rates[0]), str(rates[1]))
    ranking = "" if row["auroc"] is None else f"{row['auroc']:.3f}"
    return (row["kind"], *mistakes, ranking, f"{row['image_ms']:.1f}", size_text(row["bytes"]))


def report_text(report: ClassifierReport, pictures: Sequence[Path]) -> str:
    """Return what the figures are worth, and where the files are."""
    data = report.data
    counts = " + ".join(f"{n} {label}" for label, n in data.counts().items())
    lines = [f"{report.file}: {report.chosen.kind} taken, from {counts}"]
    if data.good is not None:
        answers = report.chosen.answers
        if answers.auroc is not None and answers.auroc < MIN_AUROC:
            lines.append(f"its ranking is under {MIN_AUROC:.2f}, on too few pictures to refuse it: collect more first")
        if len(answers.rows):
            lines.append(claims(answers.false_calls.of, answers.escapes.of))
        if len(data.labels) == 1:
            lines.append("there are no defective pictures: how many defects it passes is not known")
    lines.append(f"the worst pictures and what was taken for what: {', '.join(map(str, pictures))}")
    return "\n".join(lines)


def draw_report(report: ClassifierReport, folder: Path) -> list[Path]:
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    answers, data = report.chosen.answers, report.data
    labels = [*data.labels, *([] if len(data.labels) > 1 else [DEFECT])]
    worst, confusion = folder / f"{report.expert}-worst.png", folder / f"{report.expert}-confusion.png"
    sheet = Figure(figsize=(12, 5.6), layout="constrained")
    sheet.suptitle(f"{report.expert}: the pictures held out that it judges worst")
    for place, axes in zip(answers.worst(_WORST), sheet.subplots(2, _WORST // 2).flat, strict=False):
        row = answers.rows[place]
        share = answers.shares[place]
        axes.imshow(data.pictures[row])
        axes.set_title(f"{labels[answers.targets[place]]}, said {labels[share.argmax()]} {share.max():.2f}", fontsize=9)
        axes.set_xlabel(data.files[row].name, fontsize=7)
    for axes in sheet.axes:
        axes.set_xticks([])
        axes.set_yticks([])
    sheet.savefig(worst, dpi=100)
    _draw_confusion(answers, labels, report.expert).savefig(confusion, dpi=100)
    return [worst, confusion]


def _draw_confusion(answers: HeldOutAnswers, labels: Sequence[str], expert: str) -> "Figure":
    from matplotlib.figure import Figure

    counts = answers.confusion()
    figure = Figure(figsize=(2.5 + 0.6 * len(labels), 2 + 0.6 * len(labels)), layout="constrained")
    axes = figure.subplots()
    axes.imshow(counts / counts.sum(1, keepdims=True).clip(1), cmap="Blues", vmin=0, vmax=1)
    for (row, column), count in np.ndenumerate(counts):
        is_dark = count > counts[row].sum() / 2
        axes.text(column, row, str(count), ha="center", va="center", color="white" if is_dark else "black")
    axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("answer")
    axes.set_ylabel("truth")
    axes.set_title(expert)
    return figure
