"""A thread that carries out orders one after the other, for executors and others."""

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import structlog

T = TypeVar("T")


class Worker(Generic[T]):
    """A thread: `enter` runs once in it, before `start` returns, and `carry_out` for each order, whatever fails."""

    def __init__(self, name: str, carry_out: Callable[[T], None], enter: Callable[[], None] | None = None) -> None:
        self._orders: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._carry_out = carry_out
        self._enter = enter
        self._entered = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._log: Any = structlog.get_logger("worker")

    def start(self) -> None:
        self._thread.start()
        self._entered.wait()

    def give_order(self, order: T) -> None:
        self._orders.put(order)

    def successor(self) -> "Worker[T]":
        """Abandon this thread to its running order; return a new worker for later orders."""
        self._orders.put(None)
        successor = Worker(self._thread.name, self._carry_out, self._enter)
        successor.start()
        return successor

    def stop(self, timeout_s: float) -> bool:
        self._orders.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self._enter is not None:
                self._enter()
        finally:
            self._entered.set()
        while (order := self._orders.get()) is not None:
            try:
                self._carry_out(order)
            except Exception:  # noqa: BLE001 - one order may not stop those that follow
                self._log.exception("order_failed", thread=self._thread.name)
