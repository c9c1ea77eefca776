BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0003');
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
	CONSTRAINT ck_boards_reason CHECK (reason IN ('complete', 'time_limit')), 
	CONSTRAINT ck_boards_verdict CHECK (verdict IN ('pass', 'fail', 'review', 'unknown')), 
	CONSTRAINT uq_boards_board_type_serial_attempt UNIQUE (board_type, serial, attempt), 
	CONSTRAINT uq_boards_seq UNIQUE (seq)
);
INSERT INTO "boards" VALUES(1,'mainboard-a','A-1',1,'Los 7','Straße 3','2025-01-15T08:00:00.000Z','2025-01-15T08:00:01.250Z',5,5,'fail','complete','182ad454cf8c',6,'[{"designator": "R2", "component": "R0402", "defect": "D207"}]','[]');
INSERT INTO "boards" VALUES(2,'mainboard-a','A-2',1,NULL,NULL,'2025-01-15T08:00:01.250Z','2025-01-15T08:01:02.250Z',5,1,'unknown','time_limit','182ad454cf8c',8,'[]','[{"component": "R0402", "count": 1}, {"component": "C0603", "count": 2, "designators": ["C1", "C2"]}, {"component": "QFP64", "count": 1, "designators": ["U1"]}]');
INSERT INTO "boards" VALUES(3,'mainboard-a','A-2',2,NULL,NULL,'2025-01-15T08:01:02.250Z',NULL,5,0,NULL,NULL,'182ad454cf8c',NULL,NULL,NULL);
INSERT INTO "boards" VALUES(4,'patient','P-1',1,NULL,NULL,'2025-01-15T08:01:02.250Z',NULL,3,0,NULL,NULL,'182ad454cf8c',NULL,NULL,NULL);
INSERT INTO "boards" VALUES(5,'Ünï/~ 板','码-1',1,NULL,NULL,'2025-01-15T08:01:02.250Z',NULL,1,0,NULL,NULL,'182ad454cf8c',NULL,NULL,NULL);
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
INSERT INTO "detections" VALUES(1,2,1,'bridge',0.8,1.0,2.0,30.5,40.25);
INSERT INTO "detections" VALUES(2,2,1,'void',0.5,1.0,2.0,30.5,40.25);
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
	CONSTRAINT ck_expert_switches_cause CHECK (cause IN ('demand', 'prefetch', 'startup', 'pin')), 
	CONSTRAINT ck_expert_switches_tier CHECK (tier IN ('ram', 'disk'))
);
INSERT INTO "expert_switches" VALUES(1,'2025-01-15T08:00:00.000Z','cpu','cpu','R0402','["QFP64"]',4096,1.5,'disk','demand');
INSERT INTO "expert_switches" VALUES(2,'2025-01-15T08:00:00.000Z','cpu','cpu','R0402','["QFP64"]',4096,1.5,'disk','demand');
INSERT INTO "expert_switches" VALUES(3,'2025-01-15T08:00:00.000Z','cpu','cpu','C0603','["QFP64"]',4096,1.5,'disk','demand');
INSERT INTO "expert_switches" VALUES(4,'2025-01-15T08:00:00.000Z','cpu','cpu','C0603','["QFP64"]',4096,1.5,'disk','demand');
INSERT INTO "expert_switches" VALUES(5,'2025-01-15T08:00:00.000Z','cpu','cpu','QFP64','["QFP64"]',4096,1.5,'disk','demand');
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
INSERT INTO "expert_versions" VALUES('r50','0123456789ab','0123456789ab0000000000000000000000000000000000000000000000000000','resnet18','["ok", "Lötbrücke"]',4096,'float32','','2025-01-15T08:00:00.250Z');
INSERT INTO "expert_versions" VALUES('R0402','0123456789ab','0123456789ab0000000000000000000000000000000000000000000000000000','resnet18','["ok", "Lötbrücke"]',4096,'float32','','2025-01-15T08:00:00.500Z');
INSERT INTO "expert_versions" VALUES('yolo-solder','0123456789ab','0123456789ab0000000000000000000000000000000000000000000000000000','resnet18','["ok", "Lötbrücke"]',4096,'float32','','2025-01-15T08:00:00.500Z');
INSERT INTO "expert_versions" VALUES('C0603','0123456789ab','0123456789ab0000000000000000000000000000000000000000000000000000','resnet18','["ok", "Lötbrücke"]',4096,'float32','','2025-01-15T08:00:00.750Z');
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
	seq INTEGER, max_new_tokens INTEGER, deadline_ms INTEGER, stream INTEGER, slo_ms REAL, 
	CONSTRAINT pk_generations PRIMARY KEY (generation_id), 
	CONSTRAINT ck_generations_status CHECK (status IN ('accepted', 'done', 'unknown')), 
	CONSTRAINT fk_generations_board_id FOREIGN KEY(board_id) REFERENCES boards (board_id), 
	CONSTRAINT uq_generations_seq UNIQUE (seq), 
	CONSTRAINT uq_generations_source_request_id UNIQUE (source, request_id)
);
INSERT INTO "generations" VALUES(1,'mes','g-1',NULL,'tiny',NULL,NULL,'Was ist „kalt“?',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'2025-01-15T09:00:00.000Z',NULL,'accepted',NULL,NULL,20,5000,1,900.0);
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
	CONSTRAINT pk_inspections PRIMARY KEY (inspection_id), 
	CONSTRAINT ck_inspections_status CHECK (status IN ('accepted', 'done')), 
	CONSTRAINT ck_inspections_verdict CHECK (verdict IN ('pass', 'fail', 'review', 'unknown')), 
	CONSTRAINT ck_inspections_late CHECK (late IN (0, 1)), 
	CONSTRAINT fk_inspections_board_id FOREIGN KEY(board_id) REFERENCES boards (board_id), 
	CONSTRAINT uq_inspections_seq UNIQUE (seq), 
	CONSTRAINT uq_inspections_source_image_id UNIQUE (source, image_id)
);
INSERT INTO "inspections" VALUES(1,'cam1','a/0',1,'R0402','R1',NULL,'2025-01-15T08:00:00.000Z','2025-01-15T08:00:00.250Z',NULL,2731,'done','pass',NULL,NULL,0,'182ad454cf8c','6b7495dc646dc076cceb52fae85d4bb6ae9e8800fd8a422c32974cca1d60f064',NULL,250.0,1,'Los 7','Straße 3');
INSERT INTO "inspections" VALUES(2,'cam1','a/1',1,'R0402','R2',NULL,'2025-01-15T08:00:00.250Z','2025-01-15T08:00:00.500Z',NULL,2662,'done','fail','D207',NULL,0,'182ad454cf8c','755b0e437ecf5b2d0cd42ea6a024f230d78bcc29a7335e975a8e10dca5639b1e',NULL,250.0,2,'Los 7','Straße 3');
INSERT INTO "inspections" VALUES(3,'cam1','a/2',1,'C0603','C1',NULL,'2025-01-15T08:00:00.500Z','2025-01-15T08:00:00.750Z',NULL,2701,'done','review',NULL,NULL,0,'182ad454cf8c','72238db3ed8eb1b2df2d4881de9533a777de5f98768028dca625017d8061d297',NULL,250.0,3,'Los 7','Straße 3');
INSERT INTO "inspections" VALUES(4,'cam1','a/3',1,'C0603','C2',NULL,'2025-01-15T08:00:00.750Z','2025-01-15T08:00:01.000Z',NULL,2659,'done','unknown',NULL,'bad_image',0,'182ad454cf8c','feb4a1aae9df42763e01d03dd9f3601b85adfc149be27d0c6128b30589f18247',NULL,250.0,4,'Los 7','Straße 3');
INSERT INTO "inspections" VALUES(5,'cam1','a/4',1,'QFP64','U1',NULL,'2025-01-15T08:00:01.000Z','2025-01-15T08:00:01.250Z',NULL,2608,'done','pass',NULL,NULL,0,'182ad454cf8c','4fbacc3366f3de553bc8ed2d7d2b445d7eabf43e1ec1bdc6f956e79d8df2bbf5',NULL,250.0,5,'Los 7','Straße 3');
INSERT INTO "inspections" VALUES(6,'cam1','late-1',2,'R0402','R1',NULL,'2025-01-15T08:00:01.250Z','2025-01-15T08:00:01.250Z',NULL,2603,'done','pass',NULL,NULL,0,'182ad454cf8c','0027a9751dcce6366793f5d5c9cfc64da864b97fef85fe783449c2a2018cd497',NULL,0.0,7,NULL,NULL);
INSERT INTO "inspections" VALUES(7,'cam1','late-2',2,'R0402','R2',NULL,'2025-01-15T08:01:02.250Z','2025-01-15T08:01:02.250Z',NULL,2622,'done','fail','tombstone',NULL,1,'182ad454cf8c','2aeb7d1d2e61c34abfde02997e9405b5ea01a03f65b96392a0ca996b8ba451df',NULL,0.0,9,NULL,NULL);
INSERT INTO "inspections" VALUES(8,'cam1','waits-0',3,'R0402','R1',NULL,'2025-01-15T08:01:02.250Z',NULL,60000,2659,'accepted',NULL,NULL,NULL,0,'182ad454cf8c','e8fdfcc9bb5346d2475ce0b4c0779e140f03f0aab948660fbb862763de06b6b4',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "inspections" VALUES(9,'cam1','waits-1',4,'R0402','R1',NULL,'2025-01-15T08:01:02.250Z',NULL,NULL,2630,'accepted',NULL,NULL,NULL,0,'182ad454cf8c','0a7129d6ac977967bfbe329e82d35ee481d314209859a4b3f7b09ae0790132ec',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "inspections" VALUES(10,'cam1','waits-2',4,'R0402','R2',NULL,'2025-01-15T08:01:02.250Z',NULL,NULL,2701,'accepted',NULL,NULL,NULL,0,'182ad454cf8c','4f7bf9da03d5113e7bf29042fe7a1fae182b864037bfc3c27daba2ae8af6e669',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "inspections" VALUES(11,'cam1','waits-3',4,'QFP64','U1',NULL,'2025-01-15T08:01:02.250Z',NULL,NULL,64,'accepted',NULL,NULL,NULL,0,'182ad454cf8c','fdeab9acf3710362bd2658cdc9a29e8f9c757fcf9811603a8c447cd1d9151108',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "inspections" VALUES(12,'cam:2','waits-4',5,'C0603','C9',NULL,'2025-01-15T08:01:02.250Z',NULL,NULL,192,'accepted',NULL,NULL,NULL,0,'182ad454cf8c','8b4a544837a1a0280fa8a7c82865c27a1064b3cc6281fda0753566b9bb104a87',NULL,NULL,NULL,NULL,NULL);
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
INSERT INTO "pending" VALUES(2,'keep',1,2763,2662,'image',NULL,NULL,NULL);
INSERT INTO "pending" VALUES(3,'keep',1,5441,2701,'image',NULL,NULL,NULL);
INSERT INTO "pending" VALUES(4,'keep',1,8158,2659,'image',NULL,NULL,NULL);
INSERT INTO "pending" VALUES(7,'keep',1,16076,2622,'image',NULL,NULL,NULL);
INSERT INTO "pending" VALUES(8,'judge',1,18714,2659,'image',NULL,NULL,NULL);
INSERT INTO "pending" VALUES(9,'judge',1,21389,2630,'image',NULL,NULL,NULL);
INSERT INTO "pending" VALUES(10,'judge',1,24035,2701,'image',NULL,NULL,NULL);
INSERT INTO "pending" VALUES(11,'judge',1,26752,64,'raw',8,8,1);
INSERT INTO "pending" VALUES(12,'judge',1,26832,192,'raw',8,8,3);
CREATE TABLE recipes (
	rules_version TEXT NOT NULL, 
	board_type TEXT NOT NULL, 
	time_limit_s REAL, 
	positions TEXT NOT NULL, 
	CONSTRAINT pk_recipes PRIMARY KEY (rules_version, board_type), 
	CONSTRAINT fk_recipes_rules_version FOREIGN KEY(rules_version) REFERENCES rules_versions (rules_version)
);
INSERT INTO "recipes" VALUES('182ad454cf8c','mainboard-a',60.0,'[["R0402", 2, null], ["C0603", 2, ["C1", "C2"]], ["QFP64", 1, ["U1"]]]');
INSERT INTO "recipes" VALUES('182ad454cf8c','patient',NULL,'[["R0402", 2, null], ["QFP64", 1, ["U1"]]]');
INSERT INTO "recipes" VALUES('182ad454cf8c','Ünï/~ 板',NULL,'[["C0603", 1, null]]');
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
INSERT INTO "reviews" VALUES(1,2,'2025-01-15T09:00:00.000Z','Žofie','pass',NULL,'Kratzer, kein Fehler');
INSERT INTO "reviews" VALUES(2,2,'2025-01-15T09:05:00.000Z','Žofie','fail','D207',NULL);
CREATE TABLE rules_versions (
	rules_version TEXT NOT NULL, 
	sha256 TEXT NOT NULL, 
	loaded_at TEXT NOT NULL, 
	text TEXT NOT NULL, 
	CONSTRAINT pk_rules_versions PRIMARY KEY (rules_version)
);
INSERT INTO "rules_versions" VALUES('182ad454cf8c','182ad454cf8cd79fe36401683b0fe85a8bbd133d452605f244fe21e737367b37','2025-01-15T08:00:00.000Z','boards:
  mainboard-a:
    time_limit: 60s
    components: {R0402: 2, C0603: [C1, C2], QFP64: [U1]}
  patient:
    components: {R0402: 2, QFP64: [U1]}
  "Ünï/~ 板":
    components: {C0603: 1}
classifiers:
  "*": {expert: "{component}", pass: [ok, odd, bad], review_below: 0.0, then: solder}
detectors:
  solder: {expert: yolo-solder, fail_on: {bridge: 0.99}}
defects: {bridge: D207}
');
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
INSERT INTO "stages" VALUES(1,0,'r50','0123456789ab','ok',0.97,'cpu','cpu-0',1,4,1.5,12.25,30.0);
INSERT INTO "stages" VALUES(2,0,'R0402','0123456789ab','ok',0.97,'cpu','cpu-0',1,4,1.5,12.25,30.0);
INSERT INTO "stages" VALUES(2,1,'yolo-solder','0123456789ab',NULL,0.97,'cpu','cpu-0',2,4,1.5,12.25,30.0);
INSERT INTO "stages" VALUES(3,0,'C0603','0123456789ab','Lötbrücke',0.5,'cpu','cpu-0',3,4,1.5,12.25,30.0);
INSERT INTO "stages" VALUES(5,0,'r50','0123456789ab','ok',0.97,'cpu','cpu-0',1,4,1.5,12.25,30.0);
INSERT INTO "stages" VALUES(6,0,'r50','0123456789ab','ok',0.97,'cpu','cpu-0',1,4,1.5,12.25,30.0);
INSERT INTO "stages" VALUES(7,0,'r50','0123456789ab','ok',0.97,'cpu','cpu-0',1,4,1.5,12.25,30.0);
CREATE TABLE stream_position (
	position_id INTEGER NOT NULL, 
	last_seq INTEGER NOT NULL, 
	last_inspection_id INTEGER NOT NULL, 
	last_board_id INTEGER NOT NULL, pruned INTEGER DEFAULT '0' NOT NULL, 
	CONSTRAINT pk_stream_position PRIMARY KEY (position_id), 
	CONSTRAINT ck_stream_position_one_row CHECK (position_id = 1)
);
INSERT INTO "stream_position" VALUES(1,9,12,5,0);
CREATE INDEX ix_inspections_board_id ON inspections (board_id);
CREATE INDEX ix_reviews_inspection_id ON reviews (inspection_id);
CREATE INDEX ix_detections_inspection_id_step ON detections (inspection_id, step);
CREATE INDEX ix_inspections_kept ON inspections (verdict, completed_at, image_bytes) WHERE image_path IS NOT NULL;
CREATE INDEX ix_boards_completed_at ON boards (completed_at);
CREATE INDEX ix_generations_board_id ON generations (board_id);
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
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('reviews',2);
COMMIT;
