"""Everything in memory: what every other mode is compared with."""

from pathlib import Path

from experts.moe.arch import MoeArch
from experts.moe.cache.slots import SlotCache
from experts.moe.errors import ModelError
from experts.moe.model.mode import BaseMode


class Resident(BaseMode):
    """All experts are loaded at the start and stay."""

    name = "resident"

    def attach(self, cache: SlotCache, arch: MoeArch) -> None:
        super().attach(cache, arch)
        self.require(cache.budget_bytes, arch, cache.store.folder)
        cache.fill(arch.keys())

    def resize(self, budget_bytes: int) -> None:
        self.require(budget_bytes, self.arch, self.cache.store.folder)
        self.cache.resize(budget_bytes)

    def require(self, budget_bytes: int, arch: MoeArch, folder: Path) -> None:
        need_bytes = len(arch.keys()) * arch.expert_bytes
        if budget_bytes < need_bytes:
            message = f"mode resident keeps all experts in memory, {need_bytes} bytes, and has {budget_bytes}"
            raise ModelError(folder, f"{message}; raise the model's budget or choose another mode")
