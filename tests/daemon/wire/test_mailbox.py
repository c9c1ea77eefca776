"""Letters between threads: none lost, none late, none after the owner has gone."""

import select
import threading

from daemon.wire.socket_thread import Mailbox


def test_every_letter_of_many_threads_arrives_and_in_each_ones_order() -> None:
    mailbox: Mailbox[tuple[int, int]] = Mailbox()

    def write(writer: int) -> None:
        for number in range(500):
            mailbox.put((writer, number))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    received: list[tuple[int, int]] = []
    while len(received) < 2000:
        ready, _, _ = select.select([mailbox], [], [], 60)
        assert ready, "a letter lay unseen"
        received += mailbox.take_all()
    for thread in threads:
        thread.join()
    for writer in range(4):
        assert [n for w, n in received if w == writer] == list(range(500))
    assert mailbox.take_all() == []
    mailbox.close()
