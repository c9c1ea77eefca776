"""The breaks: for each promise, the code that keeps it, what it is replaced by, and the tests that must notice."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Break:
    """`promise` begins the text of a test's mark; `find` stands once in `file`.

    `tests`, ids below tests/, are those that must notice, without them the tests with the mark.
    """

    promise: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...] = ()


_ACCESS = "daemon/dashboard/test_dashboard_access.py"
_OVERLOAD = "daemon/intake/test_overload.py"
_INTAKE = "daemon/intake/test_intake.py"
_KEYS = "daemon/wire/test_keys.py"
_JOURNAL = "daemon/storage/test_journal.py"
_HEADER = "daemon/intake/test_image_header.py"
_CONTAINMENT = "daemon/storage/test_containment.py"
_POWER = "faults/test_power_cut.py"
_SPOOL = "tools/client/test_spooling_publisher.py"
_STREAM = "daemon/storage/test_results_stream.py"
_FOLDERS = "The folders made at the first start are durable"
_MALFORMED = "Endless messages, enormous frames"
_DAMAGED = "Bytes that were cut at any offset"
_DECODER = "images"
_PIXELS = "A damaged image whose pixels are not all there"
_PICTURES = "daemon/intake/test_damaged_pictures.py"
_CSRF = "a form on another site (CSRF)"

BREAKS = (
    # Nothing accepted is lost
    Break(
        "A failed `fsync` is never",
        "daemon/storage/journal.py",
        "            failed_at = self._end\n            self._retire()\n",
        "            failed_at = self._end\n",
    ),
    Break(
        "A start never combines a log with a database",
        "daemon/storage/database_watch.py",
        " and (not self._numbers or number in self._numbers)",
        "",
        ("daemon/storage/test_database_watch.py",),
    ),
    Break(
        "A running line's database is opened with `sqlite3`",
        "daemon/storage/database_watch.py",
        "            if not is_busy:\n",
        "            _number_in(self._database)\n            if not is_busy:\n",
    ),
    Break(
        "A database that is locked, deleted, moved or replaced",
        "daemon/storage/database_watch.py",
        "            copy_connection(self._connection, copy, tell_each_second)\n",
        "            pass\n",
        ("daemon/storage/test_database_watch.py",),
    ),
    Break(
        "These tests detect a line that omits a sync",
        "daemon/storage/journal.py",
        "            os.fdatasync(writing)\n",
        "",
        (f"{_JOURNAL}::test_after_a_failed_sync_the_segment_takes_no_more_and_a_new_one_goes_on", _POWER),
    ),
    Break(
        _DAMAGED,
        "daemon/storage/journal.py",
        "if data[: _HEADER.size] != _header(payload):",
        "if False:",
        (f"{_JOURNAL}::test_any_flipped_bit_is_found_and_harms_one_record_only",),
    ),
    Break(
        _DAMAGED,
        "daemon/storage/journal.py",
        "if len(payload) != key.length:",
        "if False:",
        (f"{_JOURNAL}::test_a_segment_cut_at_any_offset_loses_only_what_was_cut",),
    ),
    Break(
        _FOLDERS,
        "experts/durable.py",
        "    sync(path.parent)\n\n\ndef replace_durably",
        "\n\ndef replace_durably",
        (_POWER,),
    ),
    Break(
        _FOLDERS,
        "experts/durable.py",
        "        os.fsync(fd)\n        if not os.path.samestat",
        "        if not os.path.samestat",
        (_POWER,),
    ),
    Break(
        "A repeated image is a `duplicate`",
        "daemon/intake/admission.py",
        "        if (known := self._reader.find(message.source, message.image_id)) is not None:",
        "        if (known := None) is not None:",
        (f"{_INTAKE}::test_a_known_image_is_a_duplicate_before_anything_else_is_looked_at",),
    ),
    Break(
        "A repeated image is a `duplicate`",
        "daemon/intake/admission.py",
        "        if (flight := self._in_flight.get(_key(message))) is not None:",
        "        if (flight := None) is not None:",
        (f"{_INTAKE}::test_a_repetition_of_an_image_in_flight_waits_for_the_disk",),
    ),
    Break(
        "An image that was not judged is `unknown`",
        "daemon/dispatch/pool.py",
        "return answer if is_finite(answer) else",
        "return answer if True else",
        ("daemon/dispatch/test_executors.py::test_an_answer_that_is_not_a_number_is_no_answer",),
    ),
    Break(
        "An image that was not judged is `unknown`",
        "daemon/dispatch/chains.py",
        "if chain.deadline_s is not None and now > chain.deadline_s:",
        "if False:",
        ("daemon/dispatch/test_drive.py",),
    ),
    Break(
        "One daemon per database",
        "daemon/host/folders.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        ("daemon/host/test_lock.py",),
    ),
    Break(
        "Nothing that one line writes",
        "daemon/storage/claims.py",
        "if line and _is_claimed(each.lock, Path(line), path):",
        "if False:",
        ("contract/test_two_lines.py::test_a_line_that_is_gone_for_good_locks_nobody_out",),
    ),
    # A full disk, and years of results
    Break(
        "Publishers get `busy` before anything fails",
        "daemon/storage/disk_space.py",
        "            if space.free_bytes < floor:",
        "            if False:",
        ("daemon/storage/test_disk_space.py",),
    ),
    Break(
        "Space for an image, its copy and its verdict",
        "daemon/storage/disk_space.py",
        '            "journal": self._arriving_bytes + self.admitted_bytes - self._admitted_before + arriving_bytes,',
        '            "journal": 0,',
        ("daemon/storage/test_disk_space.py",),
    ),
    # Overload and hostile publishers
    Break(
        "The backlog is bounded",
        "daemon/intake/backlog.py",
        "if mine.images and (mine.images >= limits.source_images or mine.bytes + size_bytes > limits.source_bytes):",
        "if False:",
    ),
    Break(
        "The backlog is bounded",
        "daemon/intake/backlog.py",
        "return self._outstanding[peer[0]] >= self.limits.credit",
        "return False",
        (f"{_INTAKE}::test_what_comes_beyond_the_credit_is_answered_busy_and_hello_costs_none",),
    ),
    Break(
        "A flooding source does not delay",
        "daemon/intake/backlog.py",
        "eighths = 8 if self._is_modest(mine, size_bytes) else 7",
        "eighths = 8",
        ("daemon/intake/test_backlog.py",),
    ),
    Break(
        "Images in memory on their way",
        "daemon/intake/backlog.py",
        "BacklogLimits(_IMAGES_IN_MEMORY, limits.in_memory, *half)",
        "BacklogLimits(_IMAGES_IN_MEMORY, 2**40, *half)",
    ),
    Break(
        "Large payloads and images",
        "daemon/intake/admission.py",
        "_LARGE_BYTES = 2**20",
        "_LARGE_BYTES = 2**40",
    ),
    Break(
        _MALFORMED,
        "daemon/wire/socket_thread.py",
        "        sock.handshake_ivl = _HANDSHAKE_MS\n",
        "        sock.handshake_ivl = 0\n",
        (f"{_OVERLOAD}::test_who_never_finishes_its_handshake_is_cut_off",),
    ),
    Break(
        _MALFORMED,
        "daemon/intake/intake.py",
        "        router.maxmsgsize = 4 * self._admission.limits.max_payload_bytes\n",
        "",
        (f"{_OVERLOAD}::test_a_frame_that_says_it_is_enormous_is_cut_before_any_of_it_is_kept",),
    ),
    Break(
        _MALFORMED,
        "daemon/wire/connection_guard.py",
        "if len(self._connections) > self._limits.connections:",
        "if False:",
        (f"{_OVERLOAD}::test_connections_beyond_the_most_are_cut_and_those_before_them_stay",),
    ),
    Break(
        _MALFORMED,
        "daemon/wire/connection_guard.py",
        '            total_bytes -= size_bytes\n            self._cut(fd, "a message that does not end")\n',
        "",
    ),
    Break(
        "The soft limit of open files",
        "daemon/app.py",
        "handle_shares(raise_handle_limit())",
        "handle_shares(4096)",
    ),
    Break(
        "Subscribers that never read",
        "daemon/storage/results_stream.py",
        "max_connections, _SUBSCRIPTION_BYTES, free",
        "max_connections, 2**30, free",
    ),
    Break(
        "100 subscribers that send 200-byte topics",
        "daemon/storage/results_stream.py",
        "    pub.rcvhwm = _WAITING_SUBSCRIPTIONS\n    pub.rcvbuf = _RECEIVE_BUFFER_BYTES\n",
        "",
    ),
    Break(
        "Connections that finish the handshake",
        "daemon/wire/connection_guard.py",
        "if not self._limits.idle_bytes_per_s:",
        "if False:",
    ),
    Break(
        "150 connections with 20 requests",
        "daemon/dashboard/site/server.py",
        'answering.count("/metrics") >= _MAX_SCRAPES',
        "False",
    ),
    Break(
        "Files of others in `quarantine/`",
        "daemon/storage/quarantine.py",
        "if not NAMES.fullmatch(path.name):",
        "if False:",
    ),
    Break(
        "A database under two names (a hard link)",
        "daemon/storage/claims.py",
        "st_nlink > 1",
        "st_nlink > 2",
    ),
    Break(
        "Subscribers that never read",
        "daemon/intake/catch_up.py",
        " if is_reading() else None",
        "",
        (f"{_OVERLOAD}::test_pages_of_results_that_a_consumer_never_reads_do_not_fill_the_memory",),
    ),
    Break(
        "Subscribers that never read",
        "daemon/intake/intake.py",
        "        router.sndhwm = _ANSWERS_PER_PEER\n",
        "        router.sndhwm = 0\n",
        (f"{_OVERLOAD}::test_the_answers_that_wait_for_a_peer_are_limited",),
    ),
    Break(
        "Subscribers that never read",
        "daemon/intake/catch_up.py",
        "max(_MIN_PAGE, _MANY_MESSAGES // questions)",
        "_MANY_MESSAGES",
        (f"{_OVERLOAD}::test_a_consumer_that_asks_and_never_reads_is_bounded_and_others_are_answered",),
    ),
    Break(
        "Subscribers that never read",
        "daemon/storage/results_stream.py",
        "    pub.sndhwm = _MESSAGES_PER_SUBSCRIBER\n",
        "    pub.sndhwm = 0\n",
        (f"{_STREAM}::test_a_subscriber_that_never_reads_has_a_bounded_queue",),
    ),
    Break(
        "Subscribers that never read",
        "daemon/storage/results_stream.py",
        "    pub.maxmsgsize = _MAX_SUBSCRIPTION_BYTES\n",
        "",
        (f"{_STREAM}::test_a_subscription_that_is_far_too_long_is_cut",),
    ),
    Break(
        "Subscribers that never read",
        "daemon/wire/socket_thread.py",
        "        sock.handshake_ivl = _HANDSHAKE_MS\n",
        "        sock.handshake_ivl = 0\n",
        (f"{_STREAM}::test_a_subscriber_that_never_finishes_its_handshake_is_disconnected",),
    ),
    Break(
        "A flood of bad images",
        "daemon/storage/quarantine.py",
        "            if self._is_flood(source, len(payload)):",
        "            if False:",
    ),
    Break(
        "Malformed frames, half greetings",
        "daemon/intake/admission.py",
        "            return self._rejected(error)\n        return message, payload",
        "            raise\n        return message, payload",
    ),
    # What can break inside
    Break(
        "An image that poisons its batch",
        "daemon/dispatch/chains.py",
        "        if chain.failures >= max_failures:\n",
        "        if False:\n",
        ("daemon/dispatch/test_drive_trouble.py", "daemon/dispatch/test_watchdog_of_executors.py"),
    ),
    Break(
        "Time in which the whole process stood still",
        "daemon/dispatch/watch.py",
        "min(now - self._checked_s, 2 * self.check_every_s)",
        "now - self._checked_s",
        (
            "daemon/dispatch/test_watchdog_of_executors.py::test_a_process_that_stood_still_makes_no_batch_hang",
            "daemon/dispatch/test_watchdog_of_executors.py::test_a_daemon_that_was_suspended_takes_no_batch_for_hung",
        ),
    ),
    Break(
        "Weights that changed",
        "experts/weights.py",
        "    if digest != spec.sha256:",
        "    if False:",
    ),
    Break(
        "weights | other weights under the same name, or a byte",
        "experts/vision/slot.py",
        "fill(begin) == known:",
        "fill(begin):",
        ("experts/vision/test_slot.py",),
    ),
    Break(
        "Setting the clock closes",
        "daemon/storage/database/inspections.py",
        "            accepted_s=tx.now_s,\n",
        "            accepted_s=tx.now_wall_s,\n",
        (
            "daemon/storage/test_containment.py::test_a_wall_clock_that_is_set_brings_no_deadline_forward_and_puts_none_off",
        ),
    ),
    # Images
    Break(_DECODER, "experts/vision/structure.py", "    if width * height > max_pixels:", "    if False:", (_HEADER,)),
    Break(_PIXELS, "experts/vision/preprocess.py", '"RGB", strict=True', '"RGB", strict=False', (_PICTURES,)),
    Break(_PIXELS, "experts/vision/jpeg.py", "    if not frame.is_complete():", "    if False:", (_PICTURES,)),
    Break(_PIXELS, "experts/vision/tiff.py", "        if size < min_bytes:", "        if False:", (_PICTURES,)),
    Break(_PIXELS, "experts/vision/tiff.py", "    _check_kind(page)\n", "", (_PICTURES,)),
    Break(
        _PIXELS,
        "experts/vision/structure.py",
        "        if kind in _ANIMATION_CHUNKS:",
        "        if False:",
        (_PICTURES,),
    ),
    Break(
        "A small file that would keep a decoder busy",
        "experts/vision/jpeg.py",
        "        if self.scans > _MAX_SCANS:",
        "        if False:",
    ),
    Break(
        _DECODER,
        "experts/vision/tiff.py",
        "        if offset < 0 or offset + size > len(data):",
        "        if False:",
        (_HEADER,),
    ),
    Break(
        "A small file that would keep a decoder busy",
        "experts/vision/structure.py",
        "        if packed > _MAX_PACKED_CHUNKS:",
        "        if False:",
    ),
    Break(
        "no key, a key that is not allowed",
        "daemon/wire/connection_guard.py",
        "    return (frames if is_allowed(str(client)) else None), fd",
        "    return frames, fd",
        (f"{_KEYS}::test_what_a_revoked_client_had_sent_before_is_not_taken_either",),
    ),
    Break(
        "a file in the folder of clients",
        "daemon/wire/keys.py",
        "            problems.append(str(error))\n            continue",
        "            raise",
    ),
    Break(
        "Clients are admitted and revoked",
        "daemon/wire/keys.py",
        "    readers = open_to(file)\n    if readers:\n        raise KeyFileError",
        "    readers = open_to(file)\n    if False:\n        raise KeyFileError",
        (f"{_KEYS}::test_a_secret_that_others_can_read_is_refused",),
    ),
    Break(
        "The HTTP token is compared",
        "daemon/wire/keys.py",
        'hmac.compare_digest(secret.strip().encode("utf-8", "replace"), self._secret)',
        "secret.strip().encode() == self._secret",
    ),
    Break(
        "a web site that points its own name",
        "daemon/dashboard/site/access.py",
        'if self._keyring.is_open and not is_loopback_name(headers["host"]):',
        "if False:",
    ),
    Break(
        "headers that are not what they should be",
        "daemon/dashboard/site/access.py",
        'origin.partition("://")[2].lower()',
        "__import__('urllib.parse').parse.urlsplit(origin).netloc",
    ),
    Break(
        _CSRF,
        "daemon/dashboard/site/access.py",
        'if method == "POST" and not self._is_same_origin(headers):',
        "if False:",
    ),
    Break(
        _CSRF,
        "daemon/dashboard/site/access.py",
        'if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":',
        "if False:",
        (f"{_ACCESS}::test_another_sites_page_may_link_here_and_not_make_us_work",),
    ),
    Break(
        "a stolen, changed or old cookie",
        "daemon/dashboard/site/access.py",
        'int(session.partition(".")[0]) > time.time()',
        "True",
    ),
    Break(
        "a stolen, changed or old cookie",
        "daemon/dashboard/site/access.py",
        'httponly=True, samesite="strict"',
        'httponly=False, samesite="lax"',
        (f"{_ACCESS}::test_the_cookie_is_not_the_token_and_neither_scripts_nor_other_sites_get_it",),
    ),
    Break(
        "a stolen, changed or old cookie",
        "daemon/dashboard/site/access.py",
        "and session not in self._ended",
        "",
        (f"{_ACCESS}::test_a_logout_ends_its_session_and_no_other_also_across_a_restart",),
    ),
    Break(
        "guessing the token",
        "daemon/dashboard/site/access.py",
        "                await asyncio.sleep(_WRONG_TOKEN_WAIT_S)\n",
        "                pass\n",
    ),
    Break(
        "silent, slow or many clients",
        "daemon/dashboard/site/server.py",
        "not self._is_answering or self.cycle.more_body or",
        "not self._is_answering or",
        (f"{_ACCESS}::test_half_sent_bodies_and_unread_answers_without_a_token_reset_no_honest_request",),
    ),
    Break(
        "silent, slow or many clients",
        "daemon/dashboard/site/server.py",
        "_KEPT_FOR_PROBES = 16",
        "_KEPT_FOR_PROBES = 0",
        (f"{_ACCESS}::test_pages_that_are_being_answered_leave_connections_for_probes",),
    ),
    Break(
        "a serial, lot or label",
        "daemon/dashboard/site/access.py",
        "\"default-src 'self'; img-src",
        '"img-src',
        (f"{_ACCESS}::test_every_answer_forbids_scripts_of_others_frames_and_guessed_types",),
    ),
    Break(
        "`../` in a picture's name",
        "daemon/dashboard/site/pictures.py",
        "file.resolve() != file or ",
        "",
        ("daemon/dashboard/test_dashboard_pages.py::test_a_row_that_points_out_of_the_images_folder_shows_nothing",),
    ),
    # Files from others
    Break(
        "catalog",
        "experts/catalog.py",
        "        outside = [part for part in _files(entry) if folders and not _lies_in(root / part, folders)]",
        "        outside = list[str]()",
        ("daemon/test_confined.py",),
    ),
    Break(
        "names: source, id, serial",
        "daemon/storage/quarantine.py",
        '    return quote(text, safe="")[:_MAX_NAME_CHARS]',
        "    return text",
        ("daemon/test_confined.py::test_sources_and_ids_never_leave_the_quarantine",),
    ),
    Break(
        "A filter is a value",
        "daemon/units.py",
        "isinstance(value, str) else value",
        "False else value",
        ("tools/query/test_results_command.py", "daemon/test_units.py"),
    ),
    # Processes beside the line, cameras
    Break(
        "A broker that sends packets of any size",
        "daemon/consumers/mqtt/broker.py",
        "        if bufsize > _MAX_PACKET_BYTES or unreleased > _MAX_UNRELEASED:",
        "        if False:",
    ),
    Break(
        "A broker that sends packets of any size",
        "daemon/delivery/__main__.py",
        "(_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES)",
        "(-1, -1)",
        (
            "daemon/consumers/test_mqtt.py::test_the_process_of_a_consumer_limits_its_memory_and_outlives_a_broker_that_floods_it",
        ),
    ),
    Break(
        "A web process or consumer that hangs",
        "daemon/host/children.py",
        "            self.process.kill()\n        elif self.is_to_hang_up",
        "            pass\n        elif self.is_to_hang_up",
        (
            "daemon/host/test_children.py::test_a_child_that_hangs_is_killed_and_started_again_whether_it_stands_waits_or_spins",
        ),
    ),
    Break(
        "A damaged spool entry",
        "tools/client/coserve_client/spool.py",
        "if content[:_OVERHEAD_BYTES] != _head(header, payload):",
        "if False:",
    ),
    Break(
        "A damaged spool entry",
        "tools/client/coserve_client/spool.py",
        "        if owner != source:\n",
        "        if False:\n",
        (f"{_SPOOL}::test_a_spool_of_another_source_is_refused",),
    ),
    Break(
        "A position file is complete or the previous one",
        "daemon/delivery/position.py",
        """        if checksum.decode("ascii", "replace") != _checksum(text):""",
        "        if False:",
        ("daemon/delivery/test_position.py",),
    ),
    # Order, commits, copies, pages
    Break(
        "A hundred connections of one source count",
        "daemon/storage/journal.py",
        "(image.source, connection)",
        "(image.source,)",
        ("daemon/storage/test_journal_thread.py",),
    ),
    Break(
        "The bytes of an image whose commit failed",
        "daemon/storage/writer.py",
        "self._cleanup.is_in_doubt = True",
        "pass",
        ("faults/test_failed_commit.py",),
    ),
    Break(
        "For a database of a newer version",
        "daemon/storage/database/migrate.py",
        "if schema not in known_schemas():",
        "if False:",
        ("daemon/storage/database/test_migrate.py",),
    ),
    Break(
        "An archive that is cut off anywhere, has a flipped bit",
        "tools/backup/restore.py",
        "        if wrong:\n            more",
        "        if False:\n            more",
        ("tools/backup/test_backup.py",),
    ),
    Break(
        "Secret keys are left out of backups",
        "tools/backup/archive.py",
        "elif is_secret and not self._with_secrets:",
        "elif False:",
        ("tools/backup/test_backup.py",),
    ),
    Break(
        "Names of experts are always shown as text",
        "daemon/dashboard/site/site.py",
        "autoescape=True",
        "autoescape=False",
        ("daemon/dashboard/pages/test_experts_page.py",),
    ),
    Break(
        "Every result of a line is at the plant's hub once",
        "daemon/consumers/plant/consumer.py",
        "async with connection.transaction():\n                await self._store(connection, fresh)",
        "if True:\n                await self._store(connection, fresh)",
        ("daemon/consumers/plant/test_hub_faults.py",),
    ),
    Break(
        "A line that was restored from a backup is reported",
        "daemon/consumers/plant/identity.py",
        'return "copy"',
        'return "same"',
        ("daemon/consumers/plant/test_line_identity.py",),
    ),
    Break(
        "Of two lines with one name",
        "daemon/consumers/plant/identity.py",
        'return "replaced" if known["accepts"] else "unknown"',
        'return "replaced"',
        ("daemon/consumers/plant/test_plant_consumer.py",),
    ),
    Break(
        "A kill at any step leaves the old or the new version",
        "daemon/line/making.py",
        "        writer.add(edition)\n        try:",
        "        writer.point(edition)\n        writer.add(edition)\n        try:",
        ("daemon/line/test_making.py",),
    ),
    Break(
        "A kill at any step leaves the old or the new version",
        "experts/editions/folder.py",
        "if rewrites is not None:",
        "if False:",
        ("daemon/line/test_making.py",),
    ),
    Break(
        "A board is judged to its end by the rules and experts",
        "daemon/dispatch/chains.py",
        "served = self._serving.served.get(image.edition)",
        "served = self._serving.current",
        ("daemon/dispatch/test_editions.py",),
    ),
    Break(
        "A replaced edition serves ten minutes",
        "daemon/line/served.py",
        "_SERVES_S = 600.0",
        "_SERVES_S = 0.0",
        ("daemon/dispatch/test_editions.py",),
    ),
    Break(
        "Ten changes in a row under load",
        "daemon/line/serving.py",
        "if number not in gone}",
        "}",
        ("daemon/dispatch/test_editions.py",),
    ),
    Break(
        "a release",
        "daemon/registry/manifest.py",
        "if is_signed_by(signed.data, signature, key):",
        "if True:",
        ("contract/test_releases_live.py",),
    ),
    Break(
        "a release",
        "daemon/registry/manifest.py",
        "if highest is not None and manifest.number < highest:",
        "if False:",
        ("contract/test_releases_live.py",),
    ),
    Break(
        "A worker with other code",
        "daemon/cluster/joining.py",
        'with chdir("/"):',
        "if True:",
        ("contract/test_cluster_faults.py::test_a_worker_with_other_code_is_refused_by_name",),
    ),
    Break(
        "A worker with other code",
        "daemon/cluster/worker.py",
        "if arrived == digest:",
        "if is_next:",
        (
            "contract/test_cluster_faults.py::test_an_expert_whose_bytes_do_not_match_is_refused_by_name_and_mended_by_its_file",
        ),
    ),
    Break(
        "A new version is at the PCs",
        "daemon/operations.py",
        "        self.prefetch(before.catalog, served.catalog)\n",
        "",
        ("contract/test_cluster_live.py::test_a_promoted_version_is_at_the_other_pc_before_an_image_needs_it",),
    ),
)
