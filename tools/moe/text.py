"""The corpus as token ids of one tokenizer: a training part, and held-out files for measurements only."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experts.moe.arch import first_line
from experts.moe.errors import ModelError
from experts.moe.library import transformers
from experts.moe.weights.prepared import PreparedFiles
from tools.moe.corpus import DOMAINS, CorpusDocument

TRAIN, HELD_OUT = "text/train", "text/heldout"


@dataclass(frozen=True, slots=True)
class CorpusText:
    """Token ids of each domain, its files one after the other."""

    ids: dict[str, torch.Tensor]  # domain: (N,) int64
    start: dict[str, torch.Tensor]  # domain: (files + 1,) int64, first token of each file, and N

    def windows(self, domain: str, length: int, count: int) -> torch.Tensor:
        """Return at most `count` pieces, (n, length) int64, spread evenly over the domain without overlap."""
        whole = self.ids[domain]
        fits = len(whole) // length
        places = torch.linspace(0, fits - 1, min(count, fits)).long() if fits else torch.empty(0, dtype=torch.long)
        return whole[: fits * length].view(-1, length)[places]


def encode(documents: Sequence[CorpusDocument], tokenizer: Any, *, held_out: bool) -> CorpusText:
    """Return the token ids of one side of the split; files end with the tokenizer's end of text, if it has one."""
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    ids: dict[str, torch.Tensor] = {}
    start: dict[str, torch.Tensor] = {}
    for domain in DOMAINS:
        texts = [document.text for document in documents if document.domain == domain and document.held_out == held_out]
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        files = [torch.tensor(tokens + end, dtype=torch.int64) for tokens in encoded]
        ids[domain] = torch.cat(files) if files else torch.empty(0, dtype=torch.int64)
        start[domain] = torch.tensor([0, *map(len, files)]).cumsum(0)
    return CorpusText(ids, start)


def save_text(prepared: PreparedFiles, name: str, text: CorpusText) -> None:
    """Write TRAIN or HELD_OUT beside the checkpoint."""
    tensors = {domain: ids.to(torch.int32) for domain, ids in text.ids.items()}
    tensors |= {f"{domain}.start": start for domain, start in text.start.items()}
    prepared.save(name, tensors, {"domains": list(text.ids)})


def load_text(prepared: PreparedFiles, name: str) -> CorpusText:
    """Read TRAIN or HELD_OUT. Raises ModelError if it is missing or of another checkpoint."""
    tensors, notes = prepared.load(name)
    domains: list[str] = notes["domains"]
    ids = {domain: tensors[domain].long() for domain in domains}
    return CorpusText(ids, {domain: tensors[f"{domain}.start"] for domain in domains})


def read_tokenizer(folder: Path) -> Any:
    """Return a checkpoint's tokenizer. Raises ModelError."""
    try:
        return transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        message = f"its tokenizer cannot be read ({first_line(error)}); restore tokenizer.json"
        raise ModelError(folder, message) from error


def ensure_text(prepared: PreparedFiles, tokenizer: Any, documents: Callable[[], Sequence[CorpusDocument]]) -> None:
    """Write both sides for a checkpoint, and the list of their files, unless they exist."""
    if prepared.has(TRAIN) and prepared.has(HELD_OUT):
        return
    listed = documents()
    save_text(prepared, TRAIN, encode(listed, tokenizer, held_out=False))
    save_text(prepared, HELD_OUT, encode(listed, tokenizer, held_out=True))
    rows = [
        {
            "domain": document.domain,
            "source": document.source,
            "sha256": document.sha256,
            "characters": len(document.text),
            "held_out": document.held_out,
        }
        for document in listed
    ]
    prepared.path("text/corpus", ".json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
