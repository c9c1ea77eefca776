"""Keys: their files, and the clients that they admit and cut, over the real intake and the real results stream."""

import contextlib
import itertools
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import zmq
import zmq.auth

from daemon.storage.results_stream import ResultsStream
from daemon.wire.endpoints import Access, CurveKeys, Gate
from daemon.wire.keys import (
    KeyFileError,
    allow,
    checked_key,
    fingerprint,
    make_key_pair,
    open_to,
    read_allow_list,
    read_public_key,
    read_server_keys,
    revoke,
)
from tests.contract.peer import frames_of
from tests.daemon.wire.wire_parts import Line, a_line, an_inspect

pytestmark = pytest.mark.not_fast("waits for sockets")

HERE = "127.0.0.1"


@dataclass
class Door:
    """A line's sockets on open endpoints, behind the gate."""

    folder: Path
    line: Line
    gate: Gate
    access: Access
    results: str
    #: One entry per heartbeat; each heartbeat says as its `backlog` how many there are with it.
    beats: list[None]


@contextmanager
def a_door(folder: Path, *clients: str) -> Iterator[Door]:
    curve = CurveKeys(make_key_pair(folder, "server")[1], folder / "allowed")
    curve.allowed_clients.mkdir()
    for name in clients:
        allow(curve.allowed_clients, name, read_public_key(make_key_pair(folder, name)[0]))
    beats: list[None] = []

    def pulse() -> tuple[str, int]:
        beats.append(None)
        return "ready", len(beats)

    with a_line(folder, curve=curve) as line:
        assert line.gate is not None
        results = ResultsStream(line.context, "tcp://0.0.0.0:*", 0, line.gate.keys)
        access = Access(line.gate, (line.intake.rebind, results.rebind), list)
        try:
            endpoint = results.start(pulse).replace("0.0.0.0", HERE)  # noqa: S104
            yield Door(folder, line, line.gate, access, endpoint, beats)
        finally:
            results.stop()


class Client:
    """A camera or a consumer with the keys of `name`; without a name, one without keys."""

    _number = itertools.count()

    def __init__(self, door: Door, kind: int, name: str | None, server: str = "server", where: str = "") -> None:
        self._door = door
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.linger = 0
        if name is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = zmq.auth.load_certificate(
                door.folder / f"{name}.key_secret"
            )
            self.socket.curve_serverkey = zmq.auth.load_certificate(door.folder / f"{server}.key")[0]
        if kind == zmq.SUB:
            self.socket.subscribe(b"")
        self.socket.connect(where or (door.results if kind == zmq.SUB else door.line.tcp))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def says_hello(self, wait_s: float = 60.0) -> bool:
        """Return True if an answer comes to a question of this call.

        The question is repeated, since a connection that was cut has to be made anew.
        """
        hello = {"type": "hello", "id": f"hello-{next(self._number)}"}
        until_s = time.monotonic() + wait_s
        while time.monotonic() < until_s:
            with contextlib.suppress(zmq.Again):  # not connected yet
                self.socket.send_multipart(frames_of(hello), zmq.NOBLOCK)
            while self.socket.poll(200):
                if json.loads(self.socket.recv_multipart()[-1])["id"] == hello["id"]:
                    return True
        return False

    def hears(self, wait_s: float = 60.0) -> bool:
        """Return True if a heartbeat comes that was made after this call."""
        before, until_s = len(self._door.beats), time.monotonic() + wait_s
        while (left_s := until_s - time.monotonic()) > 0:
            if self.socket.poll(int(left_s * 1000)) and json.loads(self.socket.recv_multipart()[1])["backlog"] > before:
                return True
        return False


# Files


def test_a_secret_key_is_readable_by_its_owner_alone_and_nothing_is_overwritten(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        public, secret = make_key_pair(tmp_path, "camera-1")
    finally:
        os.umask(before)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(public.stat().st_mode) == 0o644
    was = secret.read_bytes(), public.read_bytes()
    for survivor in (public, secret):
        with pytest.raises(KeyFileError, match="exists already"):
            make_key_pair(tmp_path, "camera-1")
        survivor.unlink()
        survivor.write_bytes(was[survivor is public])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["camera-1.key", "camera-1.key_secret"]


@pytest.mark.parametrize("name", ["../server", "a/b", "", ".hidden", "x" * 65, "a\nb", "-rf"])
def test_a_clients_name_never_leaves_the_folder(tmp_path: Path, name: str) -> None:
    public = read_public_key(make_key_pair(tmp_path, "k")[0])
    for act in (lambda: make_key_pair(tmp_path, name), lambda: allow(tmp_path, name, public)):
        with pytest.raises(KeyFileError, match="not a name for a key"):
            act()
    with pytest.raises(KeyFileError, match="not a name for a key"):
        revoke(tmp_path, name)


def test_a_key_is_allowed_once_under_one_name(tmp_path: Path) -> None:
    first, second = (read_public_key(make_key_pair(tmp_path, name)[0]) for name in ("one", "other"))
    folder = tmp_path / "allowed"
    assert allow(folder, "one", first) == allow(folder, "one", first)
    with pytest.raises(KeyFileError, match="allowed already, as one"):
        allow(folder, "again", first)
    with pytest.raises(KeyFileError, match="revoke one first"):
        allow(folder, "one", second)
    allow(folder, "other", second)
    assert read_allow_list(folder).clients == {first: "one", second: "other"}
    revoke(folder, "one")
    with pytest.raises(KeyFileError, match="allowed are: other"):
        revoke(folder, "one")


@pytest.mark.promise(
    "Beyond this machine",
    "a file in the folder of clients that is not a key | it admits no client and blocks none; log and `coserve "
    "check` name it",
)
def test_a_file_that_is_no_key_lets_nobody_in_and_keeps_nobody_else_out(tmp_path: Path) -> None:
    public = read_public_key(make_key_pair(tmp_path, "camera")[0])
    folder = tmp_path / "allowed"
    allow(folder, "camera", public)
    (folder / "empty.key").touch()
    (folder / "short.key").write_text('public-key = "abc"\n')
    (folder / "binary.key").write_bytes(os.urandom(300))
    (folder / "folder.key").mkdir()
    (folder / "secret.key").write_bytes((tmp_path / "camera.key_secret").read_bytes())
    (folder / "notes.txt").write_text("not a key")
    listed = read_allow_list(folder)
    assert listed.clients == {public: "camera"}
    assert len(listed.problems) == 5
    secret = zmq.auth.load_certificate(tmp_path / "camera.key_secret")[1]
    assert secret is not None
    assert not any(secret.decode() in problem for problem in listed.problems)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    secret = make_key_pair(tmp_path, "server")[1]
    assert read_server_keys(secret).public.decode() == read_public_key(tmp_path / "server.key")
    for mode, who in ((0o640, "its group"), (0o604, "everybody"), (0o620, "its group"), (0o601, "everybody")):
        secret.chmod(mode)
        with pytest.raises(KeyFileError, match=f"can be read by {who}"):
            read_server_keys(secret)
    secret.chmod(0o400)
    read_server_keys(secret)


def test_the_access_list_of_a_systemd_credential_is_understood(tmp_path: Path) -> None:
    """Systemd gives the service's user a named entry; the group bits that `ls` then shows are only the mask."""
    file = make_key_pair(tmp_path, "server")[1]
    user_obj, user, group_obj, mask, other = 0x01, 0x02, 0x04, 0x10, 0x20

    def set_access_list(*entries: tuple[int, int, int]) -> None:
        body = b"".join(struct.pack("<HHI", *entry) for entry in entries)
        try:
            os.setxattr(file, "system.posix_acl_access", struct.pack("<I", 2) + body)
        except OSError as error:
            pytest.skip(f"this file system keeps no access lists ({error.strerror})")

    def entries(group_bits: int) -> list[tuple[int, int, int]]:
        bits = {user_obj: 4, user: 4, group_obj: group_bits, mask: 4, other: 0}
        return [(kind, bits[kind], 4242 if kind == user else 0xFFFFFFFF) for kind in bits]

    set_access_list(*entries(group_bits=0))
    assert stat.S_IMODE(file.stat().st_mode) == 0o440
    assert open_to(file) is None
    read_server_keys(file)
    set_access_list(*entries(group_bits=4))
    assert open_to(file) == "its group"


def test_a_key_given_as_text_is_checked_and_fingerprints_tell_keys_apart(tmp_path: Path) -> None:
    key, other_key = (read_public_key(make_key_pair(tmp_path, name)[0]) for name in ("one", "other"))
    assert checked_key(key) == key
    for wrong in ("", key[:-1], key + "x", "ü" * 40, "~" * 40, '"' * 40):
        with pytest.raises(KeyFileError, match="40 characters"):
            checked_key(wrong)
    assert fingerprint(key) != fingerprint(other_key)
    assert len(fingerprint(key)) == 19
    with pytest.raises(KeyFileError, match="stays with the client"):
        read_public_key(tmp_path / "one.key_secret")


# The door


@pytest.mark.promise(
    "Beyond this machine",
    "no key, a key that is not allowed, a wrong server key | no answer, no message, nothing published",
)
def test_only_an_allowed_key_with_the_right_server_key_gets_an_answer(tmp_path: Path) -> None:
    with a_door(tmp_path, "camera") as door:
        make_key_pair(tmp_path, "stranger")
        make_key_pair(tmp_path, "other-server")
        with (
            Client(door, zmq.DEALER, "camera") as camera,
            Client(door, zmq.DEALER, "stranger") as stranger,
            Client(door, zmq.DEALER, None) as bare,
            Client(door, zmq.DEALER, "camera", server="other-server") as misled,
            Client(door, zmq.SUB, "stranger") as spy,
            Client(door, zmq.SUB, None) as bare_spy,
            Client(door, zmq.DEALER, None, where=door.line.ipc) as neighbour,
        ):
            assert camera.says_hello()
            assert neighbour.says_hello()
            for uninvited in (stranger, bare, misled):
                assert not uninvited.says_hello(0.4)
            assert not spy.hears(1.2)
            assert not bare_spy.hears(0.1)


@pytest.mark.promise(
    "Beyond this machine",
    "a revoked key on an open connection | the connection is cut; messages it sent that were not read yet are dropped",
)
@pytest.mark.promise(
    "Access, pages and reviews",
    "A revoked client is cut, and the keys of clients and server change without a restart",
)
def test_a_revoked_client_is_cut_and_the_others_come_back_by_themselves(tmp_path: Path) -> None:
    with (
        a_door(tmp_path, "kept", "revoked") as door,
        Client(door, zmq.DEALER, "kept") as camera,
        Client(door, zmq.DEALER, "revoked") as revoked,
        Client(door, zmq.SUB, "kept") as consumer,
        Client(door, zmq.SUB, "revoked") as spy,
        Client(door, zmq.DEALER, None, where=door.line.ipc) as neighbour,
    ):
        assert camera.says_hello()
        assert revoked.says_hello()
        assert neighbour.says_hello()
        assert consumer.hears()
        assert spy.hears()
        revoke(tmp_path / "allowed", "revoked")
        assert door.access.reload() == {"clients": 1, "cut": True, "problems": []}
        assert not revoked.says_hello(1.0)
        assert not spy.hears(1.2)
        assert camera.says_hello()
        assert consumer.hears()
        assert neighbour.says_hello()
        assert door.access.problem is None


def test_what_a_revoked_client_had_sent_before_is_not_taken_either(tmp_path: Path) -> None:
    with a_door(tmp_path, "camera") as door, Client(door, zmq.DEALER, "camera") as camera:
        assert camera.says_hello()
        revoke(tmp_path / "allowed", "camera")
        door.gate.reload()  # no connection is cut yet: every single message is asked about
        camera.socket.send_multipart(frames_of(an_inspect("late"), b"\xff\xd8 whatever"))
        assert not camera.says_hello(0.6)
        assert door.line.writer.images == []


def test_the_servers_key_changes_while_it_runs(tmp_path: Path) -> None:
    with a_door(tmp_path, "camera") as door:
        with Client(door, zmq.DEALER, "camera") as camera, Client(door, zmq.SUB, "camera") as consumer:
            assert camera.says_hello()
            new = make_key_pair(tmp_path, "server-2")[1]
            new.replace(tmp_path / "server.key_secret")
            assert door.access.reload() == {"clients": 1, "cut": True, "problems": []}
            assert not camera.says_hello(0.6)
            assert not consumer.hears(1.2)
        with (
            Client(door, zmq.DEALER, "camera", server="server-2") as camera,
            Client(door, zmq.SUB, "camera", server="server-2") as consumer,
        ):
            assert camera.says_hello()
            assert consumer.hears()


@pytest.mark.promise(
    "Beyond this machine",
    "the thread that checks keys ends | no new client is admitted, the line reports `degraded`, `coserve "
    "reload` restarts the thread",
)
def test_a_dead_authenticator_lets_nobody_in_until_a_reload_starts_it_again(tmp_path: Path) -> None:
    with a_door(tmp_path, "camera") as door:
        authenticator = door.gate._authenticator
        authenticator.pipe.send(b"TERMINATE")
        authenticator.thread.join()
        authenticator.zap_socket.close()  # libzmq's own default would now let everybody in who speaks CURVE
        make_key_pair(tmp_path, "stranger")
        for name in ("camera", "stranger"):
            with Client(door, zmq.DEALER, name) as client:
                assert not client.says_hello(0.5)
        assert door.access.problem is not None
        assert "coserve reload" in door.access.problem
        door.access.reload()
        assert door.access.problem is None
        with Client(door, zmq.DEALER, "camera") as camera, Client(door, zmq.DEALER, "stranger") as stranger:
            assert camera.says_hello()
            assert not stranger.says_hello(0.4)


@pytest.mark.promise(
    "Beyond this machine",
    "an older ZeroMQ protocol without security, noise, HTTP | no answer; the line continues",
)
@pytest.mark.parametrize(
    "greeting",
    [
        b"\x01\x00" + b"\x04\x00CS1" + b'\x12\x00{"type": "hello"}',  # ZMTP 1.0: no handshake, no security
        b"\xff" + bytes(8) + b"\x7f\x01\x05" + b"\x00\x00" + b"\x01\x03CS1" + b'\x00\x11{"type": "hello"}',  # 2.0
        b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31),  # 3.0, without keys
        os.urandom(512),
        b"GET / HTTP/1.0\r\n\r\n",
    ],
    ids=["zmtp1", "zmtp2", "null", "noise", "http"],
)
def test_older_and_other_protocols_come_to_nothing_at_an_open_endpoint(tmp_path: Path, greeting: bytes) -> None:
    with a_door(tmp_path, "camera") as door:
        port = int(door.line.tcp.rsplit(":", 1)[1])
        with socket.create_connection((HERE, port), timeout=60) as peer:
            peer.sendall(greeting)
            peer.settimeout(0.4)
            answer = b""
            try:
                while chunk := peer.recv(4096):
                    answer += chunk
            except (TimeoutError, ConnectionResetError):
                pass
        assert b"welcome" not in answer
        assert b"CS1" not in answer
        with Client(door, zmq.DEALER, "camera") as camera:
            assert camera.says_hello()
