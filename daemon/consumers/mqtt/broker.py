"""A connection to an MQTT broker: paho's client in a thread of its own, its answers in this event loop."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any

from paho.mqtt.client import Client, MQTTv5, error_string
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from daemon.consumers.mqtt.settings import MqttSettings, tls_context
from daemon.consumers.protocol import DeliveryError
from daemon.wire.keys import read_password

#: Refusals that may pass (MQTT 5, 2.4): unspecified or implementation-specific error, unavailable, busy, shutting down,
#: quota, rate. Every other one needs a person.
_MAY_PASS = frozenset({0x80, 0x83, 0x88, 0x89, 0x8B, 0x97, 0x9F})
_FIRST_FAILURE = 0x80
#: A connection silent for this long is tested, and closed after as long without an answer.
_KEEPALIVE_S = 30
#: A broker sends answers of a few bytes, since nothing is subscribed.
_MAX_PACKET_BYTES = 64 * 1024
_MAX_UNRELEASED = 16


class PublishRefusedError(DeliveryError):
    """The broker refused a message, with a reason code."""

    def __init__(self, where: str, topic: str, code: int) -> None:
        try:
            name = str(ReasonCode(PacketTypes.PUBACK, identifier=code))
        except (KeyError, AssertionError):
            name = "an unknown reason"
        reason = f"{where} does not take messages to {topic}: {name} (reason code 0x{code:02X})"
        super().__init__(reason, "waiting" if code in _MAY_PASS else "refused")


class _BoundedClient(Client):
    """Disconnects a broker that ignores our limits: paho would read a whole packet, however large."""

    excess: str | None = None

    def _sock_recv(self, bufsize: int) -> bytes:
        unreleased = len(self._in_messages)  # of QoS 2: paho keeps them until the broker releases them
        if bufsize > _MAX_PACKET_BYTES or unreleased > _MAX_UNRELEASED:
            text = f"it sends a packet of {bufsize} bytes" if unreleased <= _MAX_UNRELEASED else "it floods us"
            self.excess = f"{text}, although nothing is subscribed: is this the right broker?"
            raise ConnectionAbortedError(self.excess)
        return super()._sock_recv(bufsize)


class BrokerClient:
    """One connection, for one event loop; when it ends, `lost` is done with the error."""

    def __init__(self, settings: MqttSettings, identifier: str, will: tuple[str, bytes], *, answer_s: float) -> None:
        """Read password and certificates; CredentialError if that fails."""
        self._settings = settings
        self._server = settings.server
        self._where = "{}:{}".format(*self._server)
        self._answer_s = answer_s
        self._loop = asyncio.get_running_loop()
        self._connected: asyncio.Future[None] = self._loop.create_future()
        self.lost: asyncio.Future[DeliveryError] = self._loop.create_future()
        #: Messages that may wait for the broker's confirmation at once; it may allow fewer.
        self.window = 100
        self._answers: dict[int, tuple[str, asyncio.Future[int]]] = {}
        client = _BoundedClient(CallbackAPIVersion.VERSION2, identifier, protocol=MQTTv5, reconnect_on_failure=False)
        client.connect_timeout = answer_s
        client.max_inflight_messages_set(self.window)
        client.will_set(*will, 1, retain=True)
        if settings.user is not None:
            client.username_pw_set(settings.user, read_password(settings.password) if settings.password else None)
        if settings.tls is not None:
            client.tls_set_context(tls_context(settings.tls))
        client.on_connect = self._in_loop(self._on_connect)
        client.on_publish = self._in_loop(self._on_publish)
        client.on_disconnect = self._in_loop(self._on_disconnect)
        self._client: _BoundedClient | None = client

    async def open(self) -> None:
        assert self._client is not None
        limits = Properties(PacketTypes.CONNECT)
        limits.MaximumPacketSize, limits.ReceiveMaximum = _MAX_PACKET_BYTES, _MAX_UNRELEASED
        named: dict[str, Any] = {"keepalive": _KEEPALIVE_S, "clean_start": True, "properties": limits}
        try:
            await asyncio.to_thread(self._client.connect, *self._server, **named)
        except (OSError, ValueError) as error:
            raise self._trouble(error) from None
        self._client.loop_start()
        await self._confirmed(self._connected)

    def publish(
        self, topic: str, body: bytes, *, retain: bool, properties: Properties | None = None
    ) -> asyncio.Future[int]:
        """Publish with QoS 1; the answer is a reason code below 0x80, or DeliveryError."""
        assert self._client is not None
        answer: asyncio.Future[int] = self._loop.create_future()
        info = self._client.publish(topic, body, 1, retain, properties)
        if info.rc:
            answer.set_exception(DeliveryError(f"{self._where}: {error_string(info.rc)}"))
        else:
            self._answers[info.mid] = topic, answer
        return answer

    async def publish_retained(self, topic: str, body: bytes) -> None:
        await self._confirmed(self.publish(topic, body, retain=True))

    async def close(self) -> None:
        """Disconnect, waiting `answer_s` at most, and abandon the socket."""
        assert self._client is not None
        try:
            self._client.disconnect()
            await asyncio.wait((self.lost,), timeout=self._answer_s)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Shut the socket down; paho's thread closes it and drops the last reference to the client."""
        client, self._client = self._client, None
        sock: Any = None if client is None else client.socket()
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    async def _confirmed(self, answer: asyncio.Future[Any]) -> None:
        await asyncio.wait((answer, self.lost), timeout=self._answer_s, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            answer.result()
            return
        answer.cancel()
        raise self.lost.result() if self.lost.done() else self.no_answer()

    def _in_loop(self, call: Callable[..., None]) -> Callable[..., None]:
        def callback(*arguments: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(call, *arguments)

        return callback

    def _on_connect(self, _client: Client, _data: Any, _flags: Any, reason: ReasonCode, properties: Any) -> None:
        self.window = min(self.window, getattr(properties, "ReceiveMaximum", self.window))
        if self._connected.done():
            return
        if reason.is_failure:
            why = f": {reason}"
            if reason.value == _FIRST_FAILURE:  # many brokers give no other reason
                why = " and gives no reason: its log has it (user, password, client name, and what they may do)"
            state = "waiting" if reason.value in _MAY_PASS else "refused"
            self._connected.set_exception(DeliveryError(f"{self._where} refuses the connection{why}", state))
        else:
            self._connected.set_result(None)

    def _on_publish(self, _client: Client, _data: Any, mid: int, reason: ReasonCode, _properties: Any) -> None:
        topic, answer = self._answers.pop(mid, ("", None))
        if answer is None or answer.done():
            return
        if reason.value >= _FIRST_FAILURE:
            answer.set_exception(PublishRefusedError(self._where, topic, reason.value))
        else:
            answer.set_result(reason.value)

    def _on_disconnect(
        self, client: _BoundedClient, _data: Any, _flags: Any, reason: ReasonCode, _properties: Any
    ) -> None:
        if self.lost.done():
            return
        if client.excess is not None:
            why = f": {client.excess}"
        elif not self._connected.done():
            wants = "does it want a certificate of ours?" if self._settings.tls else "does it want TLS?"
            why = f" closes the connection before it has answered: {wants}"
        elif reason.value == _FIRST_FAILURE:  # what paho says where a socket closes
            why = " ended the connection without a reason: it was stopped, or the network was cut"
        else:
            why = f" ended the connection: {reason}"
        self.lost.set_result(DeliveryError(f"{self._where}{why}"))

    def no_answer(self) -> DeliveryError:
        return self._trouble(TimeoutError())

    def _trouble(self, error: OSError | ValueError) -> DeliveryError:
        where, hint = self._where, " (does it speak TLS there?)" if self._settings.tls else ""
        match error:
            case ssl.SSLError():
                reason = getattr(error, "verify_message", None) or error.reason or str(error)
                return DeliveryError(f"TLS with {where} fails: {reason}", "refused")
            case ConnectionRefusedError():
                reason = f"nothing listens at {where} (connection refused)"
            case socket.gaierror():
                reason = f"{where}: the name is not known here ({error.strerror})"
            case TimeoutError():
                reason = f"{where} gives no answer in time{hint}"
            case ConnectionResetError():
                reason = f"{where} hangs up{hint}"
            case OSError():
                reason = f"{where} cannot be reached: {error.strerror or error}"
            case _:
                reason = f"{where}: {error}"
        return DeliveryError(reason)
