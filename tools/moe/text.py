"""The corpus as token ids of one tokenizer: a training part, and held-out files that nothing is fitted on."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experts.moe.weights.prepared import PreparedFiles
from tools.moe.corpus import DOMAINS, CorpusDocument

TRAIN, HELD_OUT = "text/train", "text/heldout"


@dataclass(frozen=True, slots=True)
class CorpusText:
    """Token ids of each domain, its files one after the other."""

    ids: dict[str, torch.Tensor]  # domain: (N,) int64
    start: dict[str, torch.Tensor]  # domain: (files + 1,) int64, first token of each file, and N

    def windows(self, domain: str, length: int, count: int) -> torch.Tensor:
        """(n, length) int64 with n ≤ count: pieces that lie evenly over the domain and do not overlap."""
        whole = self.ids[domain]
        fits = len(whole) // length
        chosen = torch.linspace(0, fits - 1, min(count, fits)).long() if fits else torch.empty(0, dtype=torch.long)
        return whole[: fits * length].view(-1, length)[chosen]


def encode(documents: Sequence[CorpusDocument], tokenizer: Any, *, held_out: bool) -> CorpusText:
    """Token ids of one side of the split; files end with the tokenizer's end of text, where it has one."""
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    ids: dict[str, torch.Tensor] = {}
    start: dict[str, torch.Tensor] = {}
    for domain in DOMAINS:
        texts = [each.text for each in documents if each.domain == domain and each.held_out == held_out]
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        files = [torch.tensor(each + end, dtype=torch.int64) for each in encoded]
        ids[domain] = torch.cat(files) if files else torch.empty(0, dtype=torch.int64)
        start[domain] = torch.tensor([0, *(len(each) for each in files)]).cumsum(0)
    return CorpusText(ids, start)


def save_text(prepared: PreparedFiles, name: str, text: CorpusText) -> None:
    """Write TRAIN or HELD_OUT beside the checkpoint."""
    tensors = {domain: ids.to(torch.int32) for domain, ids in text.ids.items()}
    tensors |= {f"{domain}.start": start for domain, start in text.start.items()}
    prepared.save(name, tensors, {"domains": list(text.ids)})


def load_text(prepared: PreparedFiles, name: str) -> CorpusText:
    """Read TRAIN or HELD_OUT. Raises ModelError where it is not there or of another checkpoint."""
    tensors, notes = prepared.load(name)
    domains: list[str] = notes["domains"]
    return CorpusText(
        {each: tensors[each].long() for each in domains}, {each: tensors[f"{each}.start"] for each in domains}
    )


def ensure_text(prepared: PreparedFiles, tokenizer: Any, documents: Callable[[], Sequence[CorpusDocument]]) -> None:
    """Write both sides for a checkpoint, and which files they were made of; does nothing where they are there."""
    if prepared.has(TRAIN) and prepared.has(HELD_OUT):
        return
    listed = documents()
    save_text(prepared, TRAIN, encode(listed, tokenizer, held_out=False))
    save_text(prepared, HELD_OUT, encode(listed, tokenizer, held_out=True))
    write_manifest(prepared.path("text/corpus", ".json"), listed)


def write_manifest(file: Path, documents: Sequence[CorpusDocument]) -> None:
    """Which files the text was cut from: domain, name, sha256 and length of what was taken, side of the split."""
    rows = [
        {
            "domain": each.domain,
            "source": each.source,
            "sha256": each.sha256,
            "characters": len(each.text),
            "held_out": each.held_out,
        }
        for each in documents
    ]
    file.write_text(json.dumps(rows, indent=1), encoding="utf-8")
