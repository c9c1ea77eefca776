"""Results over MQTT 5: each message to a topic of its own, the state of each board retained, a last will.

A message is delivered when the broker has confirmed it (QoS 1). The state of a board is sent again after a review.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from daemon.consumers.mqtt.broker import BrokerClient, PublishRefusedError
from daemon.consumers.mqtt.settings import MqttSettings
from daemon.consumers.protocol import DeliveryError, Message
from daemon.wire.keys import CredentialError
from daemon.wire.messages import encode

_ANSWER_S = 10.0
#: While the position moves, the retained status is republished this often.
_STATUS_EVERY_S = 10.0
#: After a reconnection, messages of a kind that had subscribers before wait this long for them to return.
_LISTENERS_COME_BACK_S = 60.0
_RETRY_S = 0.25
_NO_SUBSCRIBERS = 0x10  # MQTT 5, 3.4.2.1


class Mqtt:
    """A consumer (protocol.py) at the broker in `settings`. Password and certificates are read for each connection."""

    def __init__(self, settings: MqttSettings, client: str, alarms: Path) -> None:
        """`client` is our identifier, always the same, so that the broker ends a stale connection."""
        self._settings = settings
        self._identifier = client
        self._status_topic = f"{settings.prefix}/status"
        self._alarms, self._alarms_told = alarms, b""
        self._retained = Properties(PacketTypes.PUBLISH)
        if settings.retain_boards is not None:
            self._retained.MessageExpiryInterval = int(settings.retain_boards)
        self._client: BrokerClient | None = None
        self._refusal: PublishRefusedError | None = None
        self._listened: set[str] = set()
        self._has_connected = False
        self._listeners_by_s = 0.0
        self._position = self._reported = 0
        self._publish_at_s = 0.0

    async def open(self, position: int) -> None:
        will = self._status_topic, encode({"state": "offline"})
        try:
            client = BrokerClient(self._settings, self._identifier, will, answer_s=_ANSWER_S)
        except CredentialError as error:
            raise DeliveryError(str(error), "refused") from None
        try:
            await client.open()
        except BaseException:
            client.abandon()
            raise
        self._client = client
        self._refusal = None
        self._listeners_by_s = time.monotonic() + _LISTENERS_COME_BACK_S if self._has_connected else 0.0
        self._has_connected = True
        self._position, self._alarms_told = position, b""
        await self._publish_status(client)

    async def deliver(self, messages: Sequence[Message]) -> int:
        """Deliver as `Consumer` says, with as many messages in flight as the broker allows."""
        client = self._client
        assert client is not None
        await self._publish_alarms(client)
        if not messages:
            self._require_connection(client)
            if self._position != self._reported and time.monotonic() >= self._publish_at_s:
                await self._publish_status(client)
            return 0
        answers = self._published(client, messages)
        reached = before = messages[0]["seq"] - 1
        for message in messages:
            answer = await anext(answers)
            if isinstance(answer, Exception):
                self._refusal = answer if isinstance(answer, PublishRefusedError) else None
                reached = min(reached, message["seq"] - 1)  # a review and the state of its board have one `seq`
                if reached == before:
                    self._require_connection(client)
                    raise answer
                break
            if not self._is_delivered(message, answer):
                reached = min(reached, message["seq"] - 1)
                await asyncio.sleep(_RETRY_S)
                break
            reached = message["seq"]
        self._position = max(self._position, reached)
        return reached

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        try:
            if not client.lost.done():
                body = encode({"state": "offline", "position": self._position})
                with contextlib.suppress(DeliveryError):
                    await client.publish_retained(self._status_topic, body)
                await client.close()
        finally:
            client.abandon()  # also if the broker does not answer in time

    async def _published(self, client: BrokerClient, messages: Sequence[Message]) -> AsyncIterator[int | Exception]:
        """Yield the broker's answer to each, or why none came: at once if the connection is lost or silent."""
        for first in range(0, len(messages), client.window):
            answers = [self._publish(client, message) for message in messages[first : first + client.window]]
            confirmed = asyncio.ensure_future(asyncio.wait(answers))
            heard = -1
            while not (confirmed.done() or client.lost.done()):
                before, heard = heard, sum(answer.done() for answer in answers)
                if heard == before:
                    break
                await asyncio.wait((confirmed, client.lost), timeout=_ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
            for waiting in (confirmed, *answers):
                waiting.cancel()
            for outcome in await asyncio.gather(*answers, return_exceptions=True):
                yield outcome if isinstance(outcome, int | Exception) else client.no_answer()

    def _publish(self, client: BrokerClient, message: Message) -> asyncio.Future[int]:
        topic = f"{self._settings.prefix}/{message['topic'].rstrip('/')}"
        is_board = message["topic"].startswith("board/")
        final = {"final_verdict": message["verdict"]} if is_board else {}
        body = encode(final | {key: value for key, value in message.items() if key != "topic"})
        return client.publish(topic, body, retain=is_board, properties=self._retained if is_board else None)

    def _is_delivered(self, message: Message, reason_code: int) -> bool:
        """Return True if the broker accepted the message and its subscribers, if it ever had any, are back."""
        kind = message["topic"].partition("/")[0]
        if reason_code != _NO_SUBSCRIBERS:
            self._listened.add(kind)
            return True
        return kind not in self._listened or time.monotonic() > self._listeners_by_s

    def _require_connection(self, client: BrokerClient) -> None:
        if client.lost.done():
            raise self._refusal or client.lost.result()  # some brokers give a reason and hang up

    async def _publish_status(self, client: BrokerClient) -> None:
        self._publish_at_s = time.monotonic() + _STATUS_EVERY_S
        await client.publish_retained(self._status_topic, encode({"state": "online", "position": self._position}))
        self._reported = self._position

    async def _publish_alarms(self, client: BrokerClient) -> None:
        body = self._alarms.read_bytes() if self._alarms.exists() else self._alarms_told
        if body != self._alarms_told:
            await client.publish_retained(f"{self._settings.prefix}/alarms", body)
            self._alarms_told = body
