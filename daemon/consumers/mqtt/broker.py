"""A connection to an MQTT broker: aiomqtt's client, and what a delivery needs to know beyond it.

aiomqtt takes any answer to a message for a success, and knows nothing of a broker's limits; a connection that came to
nothing keeps its socket. This class passes on the broker's answers, by overriding its callbacks; the tests check that
against a real broker for the version in constraints.txt.
"""

import asyncio
import contextlib
import socket
import ssl
from typing import Any

from aiomqtt import Client, MqttCodeError, MqttError
from aiomqtt.exceptions import MqttConnectError
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from daemon.consumers.protocol import DeliveryError

#: Refusals that time may mend (MQTT 5, 2.4): unspecified or specific errors of the broker, unavailable, busy, shutting
#: down, a quota, a rate. Every other one is for a person.
_MAY_PASS = frozenset({0x80, 0x83, 0x88, 0x89, 0x8B, 0x97, 0x9F})
_FIRST_FAILURE = 0x80
#: A broker sends answers of a few bytes, since nothing is subscribed.
_MAX_PACKET_BYTES = 64 * 1024
_MAX_UNRELEASED = 16


class BrokerClient(Client):
    """`hand_over` promises the broker's reason code, `receive_maximum` is how many it takes at once."""

    receive_maximum = 65_535

    def __init__(self, *arguments: Any, **named: Any) -> None:
        limits = Properties(PacketTypes.CONNECT)
        limits.MaximumPacketSize, limits.ReceiveMaximum = _MAX_PACKET_BYTES, _MAX_UNRELEASED
        super().__init__(*arguments, properties=limits, **named)
        self._answers: dict[int, tuple[str, asyncio.Future[int]]] = {}
        #: Set when the broker sent too much, and was therefore cut.
        self.excess: TooMuchReceivedError | None = None
        self._read_socket, self._client._sock_recv = self._client._sock_recv, self._read_bounded

    def hand_over(
        self, topic: str, body: bytes, *, retain: bool, properties: Properties | None = None
    ) -> asyncio.Future[int]:
        """Publish with QoS 1; answered by the broker: a code below 0x80, or PublishRefusedError. MqttError at once."""
        info = self._client.publish(topic, body, 1, retain, properties)
        if info.rc:
            raise MqttCodeError(info.rc, "Could not publish message")
        answer: asyncio.Future[int] = self._loop.create_future()
        self._answers[info.mid] = topic, answer
        return answer

    async def publish_and_hear(self, topic: str, body: bytes, *, retain: bool) -> int:
        """Publish with QoS 1 and wait for the broker's code; MqttError if none comes in time."""
        return await self._wait_for(self.hand_over(topic, body, retain=retain), timeout=None)

    def abandon(self) -> None:
        """Let go of the socket of a connection that came to nothing, or to no orderly end."""
        with contextlib.suppress(OSError, ValueError):
            self._client._sock_close()  # paho does so at the end of its client, which aiomqtt still holds

    def _read_bounded(self, bufsize: int) -> bytes:
        """Read for paho, which asks for a whole packet at once; ConnectionError if a broker ignores our limits."""
        unreleased = len(self._client._in_messages)  # of QoS 2: paho keeps them until the broker releases them
        if bufsize > _MAX_PACKET_BYTES or unreleased > _MAX_UNRELEASED:
            text = f"it sends a packet of {bufsize} bytes" if unreleased <= _MAX_UNRELEASED else "it floods us"
            self.excess = TooMuchReceivedError(f"{text}, although nothing is subscribed: is this the right broker?")
            raise ConnectionAbortedError(str(self.excess))
        return self._read_socket(bufsize)

    def _on_publish(
        self, client: Any, userdata: Any, mid: int, reason_code: ReasonCode, properties: Properties
    ) -> None:
        topic, answer = self._answers.pop(mid, ("", None))
        if answer is not None and not answer.done():
            if reason_code.value >= _FIRST_FAILURE:
                answer.set_exception(PublishRefusedError(topic, reason_code.value))
            else:
                answer.set_result(reason_code.value)
        super()._on_publish(client, userdata, mid, reason_code, properties)

    def _on_connect(
        self, client: Any, userdata: Any, flags: Any, reason_code: ReasonCode, properties: Properties | None = None
    ) -> None:
        self.receive_maximum = getattr(properties, "ReceiveMaximum", self.receive_maximum)
        super()._on_connect(client, userdata, flags, reason_code, properties)

    def _on_disconnect(
        self, client: Any, userdata: Any, flags: Any, reason_code: ReasonCode, properties: Properties | None = None
    ) -> None:
        if not self._connected.done():
            self._connected.set_exception(self.excess or ClosedEarlyError())
        super()._on_disconnect(client, userdata, flags, reason_code, properties)
        if self._disconnected.done():
            self._disconnected.exception()  # aiomqtt forgets it if the connection was lost at once: asyncio would log


class ClosedEarlyError(MqttError):
    """The broker closed a connection before it had answered."""


class TooMuchReceivedError(MqttError):
    """The broker sent more than we announced to take."""


class PublishRefusedError(MqttError):
    """The broker answered a message with a reason why it does not take it."""

    def __init__(self, topic: str, code: int) -> None:
        super().__init__(f"{_name_of(code)} (reason code 0x{code:02X})")
        self.topic = topic
        self.code = code


def trouble(error: BaseException, where: str, *, has_tls: bool) -> DeliveryError:
    """Return an error of aiomqtt in words for a person, with the state that it leads to."""
    match error:
        case PublishRefusedError():
            reason = f"{where} does not take messages to {error.topic}: {error}"
            return DeliveryError(reason, "waiting" if error.code in _MAY_PASS else "refused")
        case MqttConnectError():
            code = error.rc.value if isinstance(error.rc, ReasonCode) else error.rc
            reason = f"{where} refuses the connection{_in_words(error.rc, code)}"
            return DeliveryError(reason, "waiting" if code in _MAY_PASS else "refused")
        case ClosedEarlyError():
            wants = "does it want a certificate of ours?" if has_tls else "does it want TLS?"
            return DeliveryError(f"{where} closes the connection before it has answered: {wants}")
        case _:
            cause = error if isinstance(error, OSError) else error.__context__
            return _trouble_on_the_way(error, cause, where, " (does it speak TLS there?)" if has_tls else "")


def _trouble_on_the_way(error: BaseException, cause: BaseException | None, where: str, hint: str) -> DeliveryError:
    """Return the error in words, by its cause: aiomqtt itself passes on no more than a text."""
    match cause:
        case ssl.SSLError():
            reason = getattr(cause, "verify_message", None) or cause.reason or str(cause)
            return DeliveryError(f"TLS with {where} fails: {reason}", "refused")
        case ConnectionRefusedError():
            reason = f"nothing listens at {where} (connection refused)"
        case socket.gaierror():
            reason = f"{where}: the name is not known here ({cause.strerror})"
        case TimeoutError():
            reason = f"{where} gives no answer in time{hint}"
        case ConnectionResetError():
            reason = f"{where} hangs up{hint}"
        case OSError():
            reason = f"{where} cannot be reached: {cause.strerror or cause}"
        case _:
            reason = f"{where}: {error}"
    return DeliveryError(reason)


def why_ended(error: BaseException | None) -> str:
    """Return the reason why a connection ended, as the end of a sentence."""
    if error is None:
        return ", and no reason was given"
    cause = error.__cause__ or error
    code = cause.rc if isinstance(cause, MqttCodeError) else cause
    if isinstance(code, ReasonCode) and code.value == _FIRST_FAILURE:  # what paho says where a socket closes
        return " without a reason: it was stopped, or the network was cut"
    return f": {code if isinstance(code, ReasonCode) else cause}"


def _in_words(reason: object, code: int | None) -> str:
    """Return a broker's reason for refusing the connection; many give only `Unspecified error`."""
    if code == _FIRST_FAILURE:
        return " and gives no reason: its log has it (user, password, client name, and what they may do)"
    return f": {reason}"


def _name_of(code: int) -> str:
    try:
        return str(ReasonCode(PacketTypes.PUBACK, identifier=code))
    except (KeyError, AssertionError):
        return "an unknown reason"
