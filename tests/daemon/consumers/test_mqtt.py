"""Results to a real mosquitto and to brokers that misbehave: topics, retained messages, error texts."""

import asyncio
import json
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from daemon.consumers.mqtt import consumer as mqtt_module
from daemon.consumers.mqtt.consumer import Mqtt
from daemon.consumers.mqtt.settings import MqttSettings
from daemon.delivery import runner as runner_module
from daemon.delivery.deliveries import SharedStatusPage
from daemon.storage.database.reader import ResultsReader
from daemon.storage.database.store import Store
from daemon.storage.decisions import Decision
from tests.broker import Broker, Subscriber, mosquitto
from tests.daemon.consumers.scripted_broker import ScriptedBroker
from tests.daemon.delivery.results_database import ResultsDatabase, running
from tests.waiting import in_a_loop, soon, until

THIS = psutil.Process()
pytestmark = pytest.mark.skipif(mosquitto() is None, reason="needs mosquitto: make system-tools")


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_POLL_S", 0.01)
    monkeypatch.setattr(runner_module, "_FIRST_BACK_OFF_S", 0.1)
    monkeypatch.setattr(runner_module, "_LONGEST_BACK_OFF_S", 0.2)
    # What is over after seconds is never over here, however long this process or the broker stands still.
    monkeypatch.setattr(mqtt_module, "_ANSWER_S", 60.0)
    monkeypatch.setattr(mqtt_module, "_LISTENERS_COME_BACK_S", 600.0)
    monkeypatch.setattr(runner_module, "_DELIVER_AGAIN_S", 600.0)
    monkeypatch.setattr(runner_module, "_LAST_MESSAGES_S", 600.0)
    monkeypatch.setattr(runner_module, "_GOODBYE_S", 60.0)


class Counted(Mqtt):
    """Counts its connections, those in vain too."""

    opened = 0

    async def open(self, position: int) -> None:
        self.opened += 1
        await super().open(position)


class Bringing:
    """A database, a consumer of it, and the status page that the daemon reads."""

    def __init__(self, folder: Path, port: int, **settings: Any) -> None:
        self.database = ResultsDatabase(folder / "inspection.db")
        self.status_page = SharedStatusPage.make("test")
        settings = {"kind": "mqtt", "host": f"127.0.0.1:{port}"} | settings
        self.settings = MqttSettings.model_validate(settings)

    @asynccontextmanager
    async def running(self):
        self.consumer = Counted(self.settings, "coserve-test", self.database.file.with_name("alarms.json"))
        async with running(self.database, self.consumer, None, self.settings, status_page=self.status_page):
            yield self

    async def reached(self, seq: int) -> None:
        await soon(lambda: self.status_page.read().get("position") == seq)

    async def reports(self, state: str, *words: str) -> None:
        def matches() -> bool:
            now = self.status_page.read()
            return now.get("state") == state and all(word in (now["last_error"] or "") for word in words)

        await soon(matches)

    async def keeps_no_file_open(self) -> None:
        """After one connection in vain: three more leave nothing open. What leaks never comes down again."""
        before, opened = THIS.num_fds(), self.consumer.opened
        await soon(lambda: self.consumer.opened > opened + 3 and THIS.num_fds() <= before + 1)


@pytest.mark.promise(
    "Delivery to the plant",
    "A late subscriber receives the state of each board; the broker announces a killed consumer",
)
@in_a_loop
async def test_each_message_has_its_topic_and_a_late_subscriber_hears_the_boards_state(tmp_path: Path) -> None:
    serial = 'A+B/#\x7f"é{}'
    with Broker(tmp_path / "broker") as broker, Subscriber(broker.port, "plant/line-2/#") as mes:
        bringing = Bringing(tmp_path, broker.port, prefix="plant/line-2")
        bringing.database.grow(1, serial)
        async with bringing.running():
            await bringing.reached(3)
            await soon(lambda: len(mes.messages) == 4)
        encoded = "A%2BB%2F%23%7F%22%C3%A91"
        topics = [message.topic for message in mes.messages[:4]]
        assert topics == [
            "plant/line-2/status",
            f"plant/line-2/inspection/pair/{encoded}",
            f"plant/line-2/inspection/pair/{encoded}",
            f"plant/line-2/board/pair/{encoded}",
        ]
        with closing(ResultsReader(bringing.database.url)) as reader:
            expected = reader.results_since(0)["items"]
        for message in expected:
            message.pop("topic")
        expected[-1]["final_verdict"] = "pass"
        assert [json.loads(message.payload) for message in mes.messages[1:4]] == expected
        with Subscriber(broker.port, "plant/line-2/#", name="late", keeps_session=False) as late:
            await soon(lambda: len(late.messages) == 2)
            retained = {message.topic: message for message in late.messages}
            assert set(retained) == {"plant/line-2/status", f"plant/line-2/board/pair/{encoded}"}
            assert all(message.retain for message in retained.values())
            board = retained[f"plant/line-2/board/pair/{encoded}"]
            assert json.loads(board.payload)["verdict"] == "pass"
            assert 30 * 86400 - 600 < board.properties.MessageExpiryInterval <= 30 * 86400
            assert json.loads(retained["plant/line-2/status"].payload) == {"state": "offline", "position": 3}


@in_a_loop
async def test_a_review_goes_out_and_the_retained_state_of_its_board_follows_it(tmp_path: Path) -> None:
    with Broker(tmp_path / "broker") as broker, Subscriber(broker.port, "coserve/#") as mes:
        bringing = Bringing(tmp_path, broker.port)
        bringing.database.grow(1)
        with closing(Store(bringing.database.url)) as store:
            store.review(Decision(1, "Eva", None, "fail", "D1"))
            store.review(Decision(None, "Ben", None, "pass", board_id=1, note="scratch is harmless"))
        async with bringing.running():
            await bringing.reached(5)
            await soon(lambda: len(mes.messages) == 8)
        reviews, states = mes.bodies("review/"), mes.bodies("board/")
        assert [(body["seq"], body["reviewer"], body["board_verdict"]) for body in reviews] == [
            (4, "Eva", "fail"),
            (5, "Ben", "pass"),
        ]
        assert [(body["seq"], body["verdict"], body["final_verdict"]) for body in states] == [
            (3, "pass", "pass"),
            (4, "pass", "fail"),
            (5, "pass", "pass"),
        ]
        assert not any(message.retain for message in mes.messages if "/review/" in message.topic)
        with Subscriber(broker.port, "coserve/board/#", name="late", keeps_session=False) as late:
            await soon(lambda: len(late.messages) == 1)
            assert json.loads(late.messages[0].payload)["seq"] == 5


@in_a_loop
async def test_sending_waits_for_those_who_listened_before_a_broker_forgot_them(tmp_path: Path) -> None:
    with Broker(tmp_path / "broker") as broker:
        bringing = Bringing(tmp_path, broker.port)
        async with bringing.running():
            with Subscriber(broker.port, "coserve/#", name="before") as before:
                last = bringing.database.grow(30)
                await soon(lambda: len(before.seqs) == last)
                broker.end(signal.SIGKILL)
            last = bringing.database.grow(30)
            broker.start()
            await bringing.reports("connected")
            await asyncio.sleep(1.0)
            assert bringing.status_page.read()["position"] < last
            with Subscriber(broker.port, "coserve/#", name="after") as after:
                await bringing.reached(last)
                await soon(lambda: before.seqs | after.seqs == {*range(1, last + 1)})


@in_a_loop
async def test_a_wrong_password_is_refused_by_name_and_mended_without_a_restart(tmp_path: Path) -> None:
    if shutil.which("mosquitto_passwd") is None:
        pytest.skip("needs mosquitto_passwd: make system-tools")
    passwords, secret = tmp_path / "passwords", tmp_path / "secret"
    passwords.touch(mode=0o600)
    subprocess.run(["mosquitto_passwd", "-b", str(passwords), "line", "right"], check=True, capture_output=True)
    passwords.chmod(0o644)
    tmp_path.chmod(0o755)
    settings = [f"password_file {passwords}"]
    with Broker(tmp_path / "broker", *settings, anonymous=False) as broker:
        bringing = Bringing(tmp_path, broker.port, user="line", password=secret)
        bringing.database.grow(1)
        async with bringing.running():
            await bringing.reports("refused", "secret", "No such file")
            secret.write_text("right\n")
            await bringing.reports("refused", "can be read by everybody")
            secret.chmod(0o600)
            await bringing.reached(3)
            assert bringing.status_page.read()["last_error"] is None
        secret.write_text("wrong\n")
        async with bringing.running():
            await bringing.reports("refused", f"127.0.0.1:{broker.port}", "Not authorized")
        assert "wrong" not in str(bringing.status_page.read())


@pytest.mark.promise(
    "Delivery to the plant",
    "A message that the broker has not confirmed, or refuses, does not count as delivered; the messages behind "
    "it are not skipped",
)
@in_a_loop
async def test_a_topic_that_we_may_not_write_to_holds_everything_back_and_is_named(tmp_path: Path) -> None:
    """MQTT 3.1.1 knows no way to say so: there such a broker throws the message away and confirms it."""
    acl = tmp_path / "acl"
    acl.write_text("topic readwrite coserve/status\ntopic readwrite coserve/inspection/#\n")
    acl.chmod(0o644)
    tmp_path.chmod(0o755)
    with Broker(tmp_path / "broker", f"acl_file {acl}") as broker, Subscriber(broker.port, "coserve/#") as mes:
        bringing = Bringing(tmp_path, broker.port)
        bringing.database.grow(2)
        async with bringing.running():
            await bringing.reports("refused", "coserve/board/pair/S1", "Not authorized")
            assert bringing.status_page.read()["position"] <= 2
            acl.write_text("topic readwrite coserve/#\n")
            assert broker.process is not None
            broker.process.send_signal(signal.SIGHUP)
            await bringing.reached(6)
            await soon(lambda: len(mes.seqs) == 6)


@pytest.mark.parametrize(
    ("script", "state", "words"),
    [
        ({"connack": None}, "waiting", "gives no answer in time"),
        ({"connack": "close"}, "waiting", "closes the connection before it has answered: does it want TLS?"),
        ({"connack": 0x86}, "refused", "refuses the connection: Bad user name or password"),
        ({"connack": 0x89}, "waiting", "Server busy"),
        ({"answer": lambda _: None}, "waiting", "gives no answer in time"),
        ({"answer": lambda number: 0 if number < 3 else 0x97}, "waiting", "Quota exceeded"),
        ({"answer": lambda number: 0 if number < 3 else 0x99}, "refused", "Payload format invalid"),
        ({"close_after": 3}, "waiting", "ended the connection without a reason: it was stopped"),
    ],
    ids=["mute", "hangs up", "password", "busy", "confirms nothing", "full", "invalid", "in the middle"],
)
@in_a_loop
async def test_a_broker_that_misbehaves_is_named_and_costs_no_file_and_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: dict[str, Any], state: str, words: str
) -> None:
    if "no answer" in words:
        monkeypatch.setattr(mqtt_module, "_ANSWER_S", 0.4)
    with ScriptedBroker(**script) as broker:
        bringing = Bringing(tmp_path, broker.port)
        bringing.database.grow(20)
        async with bringing.running():
            await bringing.reports(state, words)
            await bringing.keeps_no_file_open()
            broker.connack, broker.answer, broker.close_after = 0, lambda _: 0, None
            await bringing.reached(60)
        assert {f"coserve/board/pair/S{number}" for number in range(1, 21)} <= set(broker.topics)


GIANT = b"\x30\x80\xc2\xd7\x2f" + bytes(100_000_000)  # one message of 100 MB
UNRELEASED = b"".join(b"\x34\xeb\x07\0\1a" + number.to_bytes(2, "big") + bytes(998) for number in range(1, 40_000))


@pytest.mark.promise(
    "Delivery to the plant",
    "A broker that sends packets of any size, or messages without end, costs its consumer a few megabytes: it "
    "is cut, named and tried again",
)
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"flood": GIANT}, "sends a packet of 100000000 bytes, although nothing is subscribed"),
        ({"flood": GIANT, "connack": None}, "sends a packet of 100000000 bytes"),
        ({"flood": UNRELEASED}, "floods us, although nothing is subscribed"),
    ],
    ids=["giant", "giant at once", "never released"],
)
@in_a_loop
async def test_a_broker_that_floods_its_client_is_cut_and_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.setattr(mqtt_module, "_ANSWER_S", 1.0)
    with ScriptedBroker(**script) as broker:
        bringing = Bringing(tmp_path, broker.port)
        bringing.database.grow(20)
        async with bringing.running():
            await bringing.reports("waiting", words)
            await bringing.keeps_no_file_open()
            assert 0 < broker.flooded_bytes < len(broker.flood or b"") / 2, "what sockets hold, and no more"
            broker.connack, broker.flood = 0, None
            await bringing.reached(60)
    assert "never retrieved" not in caplog.text


@pytest.mark.test_all
def test_the_process_of_a_consumer_limits_its_memory_and_outlives_a_broker_that_floods_it(tmp_path: Path) -> None:
    with ScriptedBroker(flood=GIANT) as broker:
        database = ResultsDatabase(tmp_path / "inspection.db")
        database.grow(20)
        consumers = {"plant": {"kind": "mqtt", "host": f"127.0.0.1:{broker.port}"}}
        config = {"rules": "r", "catalog": "c", "devices": {"cpu": {"expert_memory": "1GB"}}, "consumers": consumers}
        (tmp_path / "coserve.yaml").write_text(json.dumps(config), encoding="utf-8")
        command = [sys.executable, "-m", "daemon.delivery", str(tmp_path / "coserve.yaml"), "plant"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        until(lambda: broker.connections > 1)
        assert resource.prlimit(process.pid, resource.RLIMIT_DATA) == (512 * 2**20, 512 * 2**20)
        lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines()
        (peak_kb,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        assert peak_kb < 200_000
        broker.flood = None
        until(lambda: len(set(broker.topics)) > 20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize(("receive_maximum", "limit"), [(1, 1), (7, 7), (None, 100)])
@in_a_loop
async def test_no_more_is_under_way_than_the_broker_takes_at_once(
    tmp_path: Path, receive_maximum: int | None, limit: int
) -> None:
    with ScriptedBroker(receive_maximum=receive_maximum) as broker:
        bringing = Bringing(tmp_path, broker.port)
        bringing.database.grow(100)
        async with bringing.running():
            await bringing.reached(300)
        assert broker.max_unanswered <= limit
