"""A real mosquitto on loopback and a real subscriber."""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, Self

from paho.mqtt.client import Client, MQTTMessage, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.ports import free_port

_START_S = 60.0
_STOP_S = 60.0


def mosquitto() -> str | None:
    """Return the program, which Debian puts where only root looks; None where it is not installed."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


class Broker:
    """mosquitto in `folder`, on a port that stays its own from start to start."""

    def __init__(self, folder: Path, *settings: str, anonymous: bool = True, port: int | None = None) -> None:
        """`settings` are further lines of mosquitto.conf."""
        folder.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        self._log = folder / "mosquitto.log"
        self._config = folder / "mosquitto.conf"
        lines = [f"listener {self.port} 127.0.0.1", f"allow_anonymous {str(anonymous).lower()}"]
        lines += ["user root", "max_queued_messages 0", *settings]  # a queue without an end, as nothing is to be lost
        self._config.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGKILL)

    def start(self) -> None:
        """Start, and wait until it takes connections."""
        program = mosquitto()
        if program is None:
            raise FileNotFoundError("mosquitto is not installed: make system-tools")
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([program, "-c", str(self._config)], stdout=log, stderr=log)
        until_s = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            if self.process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"mosquitto did not start:\n{self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.02)

    def end(self, number: int = signal.SIGTERM) -> None:
        """End it by a signal, and wait."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(_STOP_S)
            self.process = None


class Subscriber:
    """A subscriber to `topics`, QoS 1, in a session that the broker keeps; it connects again by itself, soon."""

    def __init__(self, port: int, *topics: str, name: str = "mes", keeps_session: bool = True, **paho: Any) -> None:
        self._topics = topics
        self._lock = threading.Lock()
        self._messages: list[MQTTMessage] = []
        self._seqs: set[int] = set()
        self._is_subscribed = threading.Event()
        self._client = client = Client(CallbackAPIVersion.VERSION2, client_id=name, protocol=MQTTv5)
        client.on_connect = self._connected
        client.on_disconnect = lambda *_: self._is_subscribed.clear()
        client.on_subscribe = lambda *_: self._is_subscribed.set()
        client.on_message = self._receive
        client.reconnect_delay_set(0.1, 0.2)  # pyright: ignore[reportArgumentType] - whole seconds are a habit of its types
        if "username" in paho:
            client.username_pw_set(paho["username"], paho.get("password"))
        session = Properties(PacketTypes.CONNECT)
        session.SessionExpiryInterval = 3600 if keeps_session else 0
        client.connect("127.0.0.1", port, keepalive=10, clean_start=not keeps_session, properties=session)

    def __enter__(self) -> Self:
        self._client.loop_start()
        if not self._is_subscribed.wait(_START_S):
            raise RuntimeError("the broker refused the subscriber")
        return self

    def __exit__(self, *_: object) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    @property
    def messages(self) -> list[MQTTMessage]:
        """Messages that came so far, in their order."""
        with self._lock:
            return list(self._messages)

    @property
    def seqs(self) -> set[int]:
        """Numbers of the results that came so far."""
        with self._lock:
            return set(self._seqs)

    def bodies(self, topic: str = "") -> list[dict[str, Any]]:
        """Return the JSON of the messages on topics with `topic` in them."""
        return [json.loads(message.payload) for message in self.messages if topic in message.topic]

    def _connected(self, client: Client, *_: Any) -> None:
        client.subscribe([(topic, 1) for topic in self._topics])

    def _receive(self, _client: Client, _userdata: Any, message: MQTTMessage) -> None:
        seq = json.loads(message.payload).get("seq")
        with self._lock:
            self._messages.append(message)
            if seq is not None:
                self._seqs.add(seq)
