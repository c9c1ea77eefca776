-- A database of revision 0002: its schema, an attempt with a reviewed image, and one that is open.
CREATE TABLE rules_versions (
    rules_version TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    loaded_at TEXT NOT NULL,
    text TEXT NOT NULL,
    CONSTRAINT pk_rules_versions PRIMARY KEY (rules_version)
);
CREATE TABLE boards (
    board_id INTEGER NOT NULL,
    board_type TEXT NOT NULL,
    serial TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    lot TEXT,
    station TEXT,
    first_seen_at TEXT NOT NULL,
    completed_at TEXT,
    expected INTEGER NOT NULL,
    inspected INTEGER DEFAULT '0' NOT NULL,
    verdict TEXT,
    reason TEXT,
    rules_version TEXT NOT NULL,
    seq INTEGER,
    failed TEXT,
    missing TEXT,
    CONSTRAINT pk_boards PRIMARY KEY (board_id),
    CONSTRAINT uq_boards_board_type_serial_attempt UNIQUE (board_type, serial, attempt),
    CONSTRAINT ck_boards_verdict CHECK (verdict IN ('pass', 'fail', 'review', 'unknown')),
    CONSTRAINT ck_boards_reason CHECK (reason IN ('complete', 'time_limit')),
    CONSTRAINT uq_boards_seq UNIQUE (seq)
);
CREATE TABLE expert_switches (
    switch_id INTEGER NOT NULL,
    at TEXT NOT NULL,
    executor TEXT NOT NULL,
    device TEXT NOT NULL,
    loaded TEXT NOT NULL,
    evicted TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    load_ms REAL NOT NULL,
    tier TEXT NOT NULL,
    cause TEXT NOT NULL,
    CONSTRAINT pk_expert_switches PRIMARY KEY (switch_id),
    CONSTRAINT ck_expert_switches_tier CHECK (tier IN ('ram', 'disk')),
    CONSTRAINT ck_expert_switches_cause CHECK (cause IN ('demand', 'prefetch', 'startup', 'pin'))
);
CREATE TABLE expert_versions (
    expert TEXT NOT NULL,
    expert_version TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    architecture TEXT NOT NULL,
    classes TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    dtype TEXT NOT NULL,
    origin TEXT NOT NULL,
    first_used_at TEXT NOT NULL,
    CONSTRAINT pk_expert_versions PRIMARY KEY (expert, expert_version)
);
CREATE TABLE stream_position (
    position_id INTEGER NOT NULL,
    last_seq INTEGER NOT NULL,
    last_inspection_id INTEGER NOT NULL,
    last_board_id INTEGER NOT NULL,
    pruned INTEGER DEFAULT '0' NOT NULL,
    CONSTRAINT pk_stream_position PRIMARY KEY (position_id),
    CONSTRAINT ck_stream_position_one_row CHECK (position_id = 1)
);
CREATE TABLE age_marks (
    running_s INTEGER NOT NULL,
    wall_s REAL NOT NULL,
    seq INTEGER NOT NULL,
    CONSTRAINT pk_age_marks PRIMARY KEY (running_s)
);
CREATE TABLE recipes (
    rules_version TEXT NOT NULL,
    board_type TEXT NOT NULL,
    time_limit_s REAL,
    positions TEXT NOT NULL,
    CONSTRAINT pk_recipes PRIMARY KEY (rules_version, board_type),
    CONSTRAINT fk_recipes_rules_version FOREIGN KEY(rules_version) REFERENCES rules_versions (rules_version)
);
CREATE TABLE inspections (
    inspection_id INTEGER NOT NULL,
    source TEXT NOT NULL,
    image_id TEXT NOT NULL,
    board_id INTEGER NOT NULL,
    component TEXT NOT NULL,
    designator TEXT NOT NULL,
    captured_at TEXT,
    accepted_at TEXT NOT NULL,
    completed_at TEXT,
    deadline_ms INTEGER,
    image_bytes INTEGER NOT NULL,
    status TEXT NOT NULL,
    verdict TEXT,
    defect TEXT,
    reason TEXT,
    late INTEGER DEFAULT '0' NOT NULL,
    rules_version TEXT NOT NULL,
    image_sha256 TEXT NOT NULL,
    image_path TEXT,
    latency_ms REAL,
    seq INTEGER,
    lot TEXT,
    station TEXT,
    surplus INTEGER,
    CONSTRAINT pk_inspections PRIMARY KEY (inspection_id),
    CONSTRAINT uq_inspections_source_image_id UNIQUE (source, image_id),
    CONSTRAINT ck_inspections_status CHECK (status IN ('accepted', 'done')),
    CONSTRAINT ck_inspections_verdict CHECK (verdict IN ('pass', 'fail', 'review', 'unknown')),
    CONSTRAINT ck_inspections_late CHECK (late IN (0, 1)),
    CONSTRAINT fk_inspections_board_id FOREIGN KEY(board_id) REFERENCES boards (board_id),
    CONSTRAINT uq_inspections_seq UNIQUE (seq)
);
CREATE TABLE generations (
    generation_id INTEGER NOT NULL,
    source TEXT NOT NULL,
    request_id TEXT NOT NULL,
    board_id INTEGER,
    model TEXT NOT NULL,
    mode TEXT,
    task TEXT,
    prompt TEXT NOT NULL,
    text TEXT,
    prompt_tokens INTEGER,
    new_tokens INTEGER,
    ttft_ms REAL,
    tpot_ms REAL,
    total_ms REAL,
    expert_fetches INTEGER,
    predictor_hit_rate REAL,
    brownout_threshold REAL,
    accepted_at TEXT NOT NULL,
    completed_at TEXT,
    status TEXT NOT NULL,
    reason TEXT,
    seq INTEGER,
    max_new_tokens INTEGER,
    deadline_ms INTEGER,
    stream INTEGER,
    slo_ms REAL,
    CONSTRAINT pk_generations PRIMARY KEY (generation_id),
    CONSTRAINT uq_generations_source_request_id UNIQUE (source, request_id),
    CONSTRAINT ck_generations_status CHECK (status IN ('accepted', 'done', 'unknown')),
    CONSTRAINT fk_generations_board_id FOREIGN KEY(board_id) REFERENCES boards (board_id),
    CONSTRAINT uq_generations_seq UNIQUE (seq)
);
CREATE TABLE pending (
    inspection_id INTEGER NOT NULL,
    task TEXT NOT NULL,
    segment INTEGER NOT NULL,
    "offset" INTEGER NOT NULL,
    length INTEGER NOT NULL,
    encoding TEXT NOT NULL,
    height INTEGER,
    width INTEGER,
    channels INTEGER,
    CONSTRAINT pk_pending PRIMARY KEY (inspection_id),
    CONSTRAINT ck_pending_task CHECK (task IN ('judge', 'keep')),
    CONSTRAINT fk_pending_inspection_id FOREIGN KEY(inspection_id) REFERENCES inspections (inspection_id)
);
CREATE TABLE stages (
    inspection_id INTEGER NOT NULL,
    step INTEGER NOT NULL,
    expert TEXT NOT NULL,
    expert_version TEXT NOT NULL,
    label TEXT,
    confidence REAL,
    device TEXT NOT NULL,
    executor TEXT NOT NULL,
    batch_id INTEGER NOT NULL,
    batch_size INTEGER NOT NULL,
    queued_ms REAL NOT NULL,
    load_ms REAL NOT NULL,
    infer_ms REAL NOT NULL,
    CONSTRAINT pk_stages PRIMARY KEY (inspection_id, step),
    CONSTRAINT fk_stages_inspection_id FOREIGN KEY(inspection_id) REFERENCES inspections (inspection_id)
);
CREATE TABLE reviews (
    review_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    inspection_id INTEGER NOT NULL,
    at TEXT NOT NULL,
    reviewer TEXT NOT NULL,
    verdict TEXT NOT NULL,
    defect TEXT,
    note TEXT,
    CONSTRAINT ck_reviews_verdict CHECK (verdict IN ('pass', 'fail', 'review', 'unknown')),
    CONSTRAINT fk_reviews_inspection_id FOREIGN KEY(inspection_id) REFERENCES inspections (inspection_id)
);
CREATE TABLE detections (
    detection_id INTEGER NOT NULL,
    inspection_id INTEGER NOT NULL,
    step INTEGER NOT NULL,
    label TEXT NOT NULL,
    confidence REAL NOT NULL,
    x1 REAL NOT NULL,
    y1 REAL NOT NULL,
    x2 REAL NOT NULL,
    y2 REAL NOT NULL,
    CONSTRAINT pk_detections PRIMARY KEY (detection_id),
    CONSTRAINT fk_detections_inspection_id_step FOREIGN KEY(inspection_id, step) REFERENCES stages (inspection_id, step)
);
CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE INDEX ix_boards_completed_at ON boards (completed_at);
CREATE INDEX ix_boards_serial ON boards (lower(serial));
CREATE INDEX ix_inspections_kept ON inspections (verdict, completed_at, image_bytes) WHERE image_path IS NOT NULL;
CREATE INDEX ix_inspections_kept_in_order ON inspections (verdict, inspection_id) WHERE image_path IS NOT NULL;
CREATE INDEX ix_inspections_board_id_surplus ON inspections (board_id, surplus);
CREATE INDEX ix_generations_board_id ON generations (board_id);
CREATE INDEX ix_reviews_inspection_id ON reviews (inspection_id);
CREATE INDEX ix_detections_inspection_id_step ON detections (inspection_id, step);
CREATE VIEW stream AS
        SELECT seq, 'inspection' AS kind, inspection_id AS key FROM inspections WHERE seq IS NOT NULL
        UNION ALL
        SELECT seq, 'board' AS kind, board_id AS key FROM boards WHERE seq IS NOT NULL
        UNION ALL
        SELECT seq, 'generation' AS kind, generation_id AS key FROM generations WHERE seq IS NOT NULL;
CREATE VIEW board_yield AS
        SELECT board_type, lot, substr(completed_at, 1, 10) AS day,
               count(*) AS boards,
               sum(CASE WHEN verdict = 'pass' THEN 1 ELSE 0 END) AS passed,
               sum(CASE WHEN verdict = 'fail' THEN 1 ELSE 0 END) AS failed,
               sum(CASE WHEN verdict = 'review' THEN 1 ELSE 0 END) AS review,
               sum(CASE WHEN verdict = 'unknown' THEN 1 ELSE 0 END) AS unknown,
               1.0 * sum(CASE WHEN verdict = 'pass' THEN 1 ELSE 0 END) / count(*) AS first_pass_yield
        FROM boards
        WHERE verdict IS NOT NULL AND attempt = 1
        GROUP BY board_type, lot, substr(completed_at, 1, 10);
CREATE VIEW defect_pareto AS
        SELECT board_type, component, defect, count,
               1.0 * count / sum(count) OVER (PARTITION BY board_type) AS share,
               1.0 * sum(count) OVER (
                   PARTITION BY board_type ORDER BY count DESC, component, defect ROWS UNBOUNDED PRECEDING
               ) / sum(count) OVER (PARTITION BY board_type) AS cumulative_share
        FROM (
            SELECT boards.board_type, inspections.component, inspections.defect, count(*) AS count
            FROM inspections JOIN boards ON boards.board_id = inspections.board_id
            WHERE inspections.verdict = 'fail'
            GROUP BY boards.board_type, inspections.component, inspections.defect
        ) AS counted;
CREATE VIEW component_health AS
        SELECT inspections.component,
               count(*) AS inspected,
               1.0 * sum(CASE WHEN inspections.verdict = 'fail' THEN 1 ELSE 0 END) / count(*) AS fail_rate,
               1.0 * sum(CASE WHEN inspections.verdict = 'review' THEN 1 ELSE 0 END) / count(*) AS review_rate,
               1.0 * sum(CASE WHEN inspections.verdict = 'unknown' THEN 1 ELSE 0 END) / count(*) AS unknown_rate,
               avg(stages.confidence) AS mean_confidence,
               sum(CASE WHEN reviews.verdict <> inspections.verdict THEN 1 ELSE 0 END) AS overridden
        FROM inspections
        LEFT JOIN stages ON stages.inspection_id = inspections.inspection_id AND stages.step = 0
        LEFT JOIN (SELECT inspection_id, max(review_id) AS review_id FROM reviews GROUP BY inspection_id) AS newest
               ON newest.inspection_id = inspections.inspection_id
        LEFT JOIN reviews ON reviews.review_id = newest.review_id
        WHERE inspections.status = 'done'
        GROUP BY inspections.component;
CREATE VIEW latency_by_hour AS
        SELECT hour, count(*) AS inspections,
               min(CASE WHEN 100 * place >= 50 * total THEN latency_ms END) AS p50_ms,
               min(CASE WHEN 100 * place >= 95 * total THEN latency_ms END) AS p95_ms,
               max(latency_ms) AS max_ms
        FROM (
            SELECT substr(completed_at, 1, 13) AS hour, latency_ms,
                   row_number() OVER (PARTITION BY substr(completed_at, 1, 13) ORDER BY latency_ms) AS place,
                   count(*) OVER (PARTITION BY substr(completed_at, 1, 13)) AS total
            FROM inspections
            WHERE status = 'done' AND latency_ms IS NOT NULL
        ) AS ranked
        GROUP BY hour;
CREATE VIEW expert_usage AS
        SELECT names.expert,
               coalesce(used.images, 0) AS images,
               coalesce(used.batches, 0) AS batches,
               used.mean_batch,
               coalesce(loaded.loads, 0) AS loads,
               coalesce(loaded.load_ms, 0.0) AS load_ms,
               used.load_share
        FROM (SELECT expert FROM stages UNION SELECT loaded AS expert FROM expert_switches) AS names
        LEFT JOIN (
            SELECT expert, sum(images) AS images, count(*) AS batches, avg(1.0 * batch_size) AS mean_batch,
                   sum(load_ms) / nullif(sum(load_ms) + sum(infer_ms), 0.0) AS load_share
            FROM (
                SELECT expert, executor, batch_id, count(*) AS images, max(batch_size) AS batch_size,
                       max(load_ms) AS load_ms, max(infer_ms) AS infer_ms
                FROM stages
                GROUP BY expert, executor, batch_id
            ) AS batch
            GROUP BY expert
        ) AS used ON used.expert = names.expert
        LEFT JOIN (
            SELECT loaded AS expert, count(*) AS loads, sum(load_ms) AS load_ms FROM expert_switches GROUP BY loaded
        ) AS loaded ON loaded.expert = names.expert;
CREATE VIEW false_calls AS
        SELECT inspections.component,
               sum(CASE WHEN inspections.verdict = 'fail' AND reviews.verdict = 'pass' THEN 1 ELSE 0 END)
                   AS false_calls,
               sum(CASE WHEN inspections.verdict = 'pass' AND reviews.verdict = 'fail' THEN 1 ELSE 0 END) AS escapes,
               count(*) AS reviewed
        FROM (SELECT inspection_id, max(review_id) AS review_id FROM reviews GROUP BY inspection_id) AS newest
        JOIN reviews ON reviews.review_id = newest.review_id
        JOIN inspections ON inspections.inspection_id = newest.inspection_id
        WHERE inspections.status = 'done'
        GROUP BY inspections.component;
CREATE VIEW final_verdicts AS
        SELECT inspections.inspection_id,
               CASE WHEN reviews.review_id IS NULL THEN inspections.verdict ELSE reviews.verdict END AS verdict,
               CASE WHEN reviews.review_id IS NULL THEN inspections.defect ELSE reviews.defect END AS defect,
               coalesce(reviews.reviewer, 'daemon') AS decided_by
        FROM inspections
        LEFT JOIN (SELECT inspection_id, max(review_id) AS review_id FROM reviews GROUP BY inspection_id) AS newest
               ON newest.inspection_id = inspections.inspection_id
        LEFT JOIN reviews ON reviews.review_id = newest.review_id
        WHERE inspections.status = 'done';
INSERT INTO alembic_version VALUES ('0002');
INSERT INTO stream_position VALUES (1, 4, 3, 2, 0);
INSERT INTO rules_versions VALUES ('aaaaaaaaaaaa', 'aaaa', '2026-11-22T21:00:00.000Z', 'boards: {}');
INSERT INTO recipes VALUES ('aaaaaaaaaaaa', 'a', NULL, '[["R", 1, null]]');
INSERT INTO boards (board_id, board_type, serial, attempt, first_seen_at, completed_at, expected, inspected, verdict,
    reason, rules_version, seq, failed, missing)
VALUES (1, 'a', 's', 1, '2026-11-22T21:50:38.000Z', '2026-11-22T21:50:39.000Z', 1, 1, 'fail', 'complete',
    'aaaaaaaaaaaa', 2, '[{"designator": "R1", "component": "R", "defect": "D7"}]', '[]'),
    (2, 'a', 's2', 1, '2026-11-22T21:50:39.000Z', '2026-11-22T21:50:39.000Z', 1, 1, 'fail', 'complete',
    'aaaaaaaaaaaa', 4, '[]', '[]');
INSERT INTO inspections (inspection_id, source, image_id, board_id, component, designator, accepted_at, completed_at,
    image_bytes, status, verdict, defect, rules_version, image_sha256, seq)
VALUES (1, 'c', 'i1', 1, 'R', 'R1', '2026-11-22T21:50:38.000Z', '2026-11-22T21:50:39.000Z', 1, 'done', 'fail', 'D7',
    'aaaaaaaaaaaa', 'b', 1),
    (2, 'c', 'i2', 2, 'R', 'R1', '2026-11-22T21:50:38.000Z', '2026-11-22T21:50:39.000Z', 1, 'done', 'fail', NULL,
    'aaaaaaaaaaaa', 'b', 3);
INSERT INTO reviews VALUES (1, 1, '2026-11-22T21:51:00.000Z', 'eva', 'pass', NULL, NULL),
    (2, 1, '2026-11-22T21:52:00.000Z', 'daemon', 'fail', 'D7', 'undecided again: undo of review 1 by otto'),
    (3, 2, '2026-11-22T21:52:00.000Z', 'eva', 'pass', NULL, NULL),
    (4, 2, '2026-11-22T21:53:00.000Z', 'eva', 'fail', NULL, NULL);
DELETE FROM reviews WHERE review_id = 4;
