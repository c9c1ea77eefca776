"""`coserve moe fixture`: train a small mixture of experts, on which the promises of the modes are measured."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from experts.moe.library import transformers
from experts.moe.weights.prepared import PreparedFiles
from tests.moe.corpus import MAX_CHARACTERS, CorpusDocument, collect
from tests.moe.evaluate import make_texts, texts_of
from tools.moe.checkpoint import progress_bars
from tools.moe.trace import encode
from tools.terminal.console import console


@dataclass(frozen=True, slots=True)
class FixtureRecipe:
    """Everything that determines the fixture except the machine's text; stored with it, and compared."""

    layers: int = 6
    width: int = 128
    experts: int = 16
    top_k: int = 2
    vocabulary: int = 2048
    characters: int = MAX_CHARACTERS  # of each domain
    window: int = 256  # tokens
    windows_of_domain: int = 4  # in each step
    steps: int = 600
    learning_rate: float = 3e-3
    balance: float = 0.02  # weight of the auxiliary loss, averaged over layers
    seed: int = 6


def make_fixture(out: Path, recipe: FixtureRecipe, text: list[CorpusDocument] | None = None) -> bool:
    """Write a checkpoint in Hugging Face format, its text and the recipe; return False if it exists already.

    `text`: the training text, found on the machine if None.
    """
    done = out / "training.json"
    if done.is_file() and json.loads(done.read_text(encoding="utf-8"))["recipe"] == asdict(recipe):
        return False
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    with console.status("text and vocabulary"):
        documents = text or collect(recipe.characters)
        tokenizer = _tokenizer(documents, recipe, part)
    _train(part, recipe, documents, tokenizer)
    make_texts(PreparedFiles(part), documents)
    (part / "training.json").write_text(json.dumps({"recipe": asdict(recipe)}, indent=1), encoding="utf-8")
    if out.exists():
        shutil.rmtree(out)
    part.rename(out)
    return True


def _tokenizer(documents: list[CorpusDocument], recipe: FixtureRecipe, part: Path) -> Any:
    """Return a byte-pair encoding over bytes, learned from the training files only."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learned.train_from_iterator((document.text for document in documents if not document.held_out), trainer)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = transformers().PreTrainedTokenizerFast(tokenizer_object=learned, padding_side="left", **special)
    tokenizer.save_pretrained(part)
    return tokenizer


def _model(recipe: FixtureRecipe) -> Any:
    torch.manual_seed(recipe.seed)
    config = transformers().MixtralConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.width,
        intermediate_size=recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=recipe.experts,
        num_experts_per_tok=recipe.top_k,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    return transformers().MixtralForCausalLM(config)


def _train(part: Path, recipe: FixtureRecipe, documents: list[CorpusDocument], tokenizer: Any) -> None:
    """Train, and write the model."""
    text = encode(texts_of(documents, held_out=False), tokenizer)
    model = _model(recipe)
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe.learning_rate, total_steps=recipe.steps, pct_start=0.06, cycle_momentum=False
    )
    with progress_bars() as progress:
        for step in range(recipe.steps):
            loss, balance = _step(model, _batch(text.ids, recipe, step), optimiser, recipe)
            schedule.step()
            progress("training", step + 1, recipe.steps, f", loss {loss:.2f}, balance {balance:.2f}")
    transformers().utils.logging.disable_progress_bar()  # the library's own
    model.save_pretrained(part)
    for file in part.glob("*.safetensors"):
        file.chmod(0o644)


def _batch(ids: dict[str, torch.Tensor], recipe: FixtureRecipe, step: int) -> torch.Tensor:
    """Return (windows, window + 1) int64, as many of each domain; determined by seed and step alone."""
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    rows: list[torch.Tensor] = []
    for whole in ids.values():
        last = len(whole) - recipe.window - 1
        starts = torch.randint(0, last, (recipe.windows_of_domain,), generator=generator)
        rows += [whole[start : start + recipe.window + 1] for start in starts.tolist()]
    return torch.stack(rows)


def _step(
    model: Any, batch: torch.Tensor, optimiser: torch.optim.Optimizer, recipe: FixtureRecipe
) -> tuple[float, float]:
    """Train one step on a batch; return the loss, and the auxiliary loss averaged over layers."""
    outputs = model.model(batch[:, :-1], output_router_logits=True, use_cache=False)
    logits = model.lm_head(outputs.last_hidden_state)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    balance = torch.stack([_imbalance(layer, recipe.top_k) for layer in outputs.router_logits]).mean()
    (loss + recipe.balance * balance).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return loss.item(), balance.item()


def _imbalance(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the auxiliary loss of one layer, 1 for an even load (Switch Transformers, equations 4 to 6).

    The library pools counts over layers first: each layer may then collapse to a few experts while the sum is even.
    """
    experts = logits.shape[-1]
    chances = torch.softmax(logits.float(), dim=-1)
    top_experts = chances.topk(top_k).indices.flatten()
    share = torch.bincount(top_experts, minlength=experts).float() / len(top_experts)
    return experts * (share * chances.mean(0)).sum()
