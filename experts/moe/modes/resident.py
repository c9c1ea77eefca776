"""Everything in memory: what every other mode is compared with."""

from experts.moe.arch import MoeArch
from experts.moe.errors import ModelError
from experts.moe.modes.mode import BaseMode
from experts.moe.slots import SlotCache


class Resident(BaseMode):
    """All experts are loaded at the start and stay."""

    name = "resident"

    def attach(self, cache: SlotCache, arch: MoeArch) -> None:
        super().attach(cache, arch)
        self._require(cache.budget_bytes)
        cache.fill(arch.keys())

    def resize(self, budget_bytes: int) -> None:
        self._require(budget_bytes)
        self.cache.resize(budget_bytes)

    def _require(self, budget_bytes: int) -> None:
        need_bytes = len(self.arch.keys()) * self.cache.store.expert_bytes
        if budget_bytes < need_bytes:
            message = f"mode resident keeps all experts in memory, {need_bytes} bytes, and has {budget_bytes}"
            raise ModelError(self.cache.store.folder, f"{message}; raise the model's budget or choose another mode")
