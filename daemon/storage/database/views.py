"""The views of RESULTS.md: plain SELECTs that run on a stock sqlite3 3.38 and on PostgreSQL.

A view's text changes only together with a migration: views are dropped before one runs and made again after it.
"""

#: Name and SELECT, in the order in which they are made.
VIEWS: dict[str, str] = {
    "stream": """
        SELECT seq, 'inspection' AS kind, inspection_id AS key FROM inspections WHERE seq IS NOT NULL
        UNION ALL
        SELECT seq, 'board' AS kind, board_id AS key FROM boards WHERE seq IS NOT NULL
        UNION ALL
        SELECT seq, 'generation' AS kind, generation_id AS key FROM generations WHERE seq IS NOT NULL
    """,
    "board_yield": """
        SELECT board_type, lot, substr(completed_at, 1, 10) AS day,
               count(*) AS boards,
               sum(CASE WHEN verdict = 'pass' THEN 1 ELSE 0 END) AS passed,
               sum(CASE WHEN verdict = 'fail' THEN 1 ELSE 0 END) AS failed,
               sum(CASE WHEN verdict = 'review' THEN 1 ELSE 0 END) AS review,
               sum(CASE WHEN verdict = 'unknown' THEN 1 ELSE 0 END) AS unknown,
               1.0 * sum(CASE WHEN verdict = 'pass' THEN 1 ELSE 0 END) / count(*) AS first_pass_yield
        FROM boards
        WHERE verdict IS NOT NULL AND attempt = 1
        GROUP BY board_type, lot, substr(completed_at, 1, 10)
    """,
    "defect_pareto": """
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
        ) AS counted
    """,
    "component_health": """
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
        GROUP BY inspections.component
    """,
    "latency_by_hour": """
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
        GROUP BY hour
    """,
    "expert_usage": """
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
        ) AS loaded ON loaded.expert = names.expert
    """,
    "false_calls": """
        SELECT inspections.component,
               sum(CASE WHEN inspections.verdict = 'fail' AND reviews.verdict = 'pass' THEN 1 ELSE 0 END)
                   AS false_calls,
               sum(CASE WHEN inspections.verdict = 'pass' AND reviews.verdict = 'fail' THEN 1 ELSE 0 END) AS escapes,
               count(*) AS reviewed
        FROM (SELECT inspection_id, max(review_id) AS review_id FROM reviews GROUP BY inspection_id) AS newest
        JOIN reviews ON reviews.review_id = newest.review_id
        JOIN inspections ON inspections.inspection_id = newest.inspection_id
        WHERE inspections.status = 'done'
        GROUP BY inspections.component
    """,
    "final_verdicts": """
        SELECT inspections.inspection_id,
               CASE WHEN reviews.review_id IS NULL THEN inspections.verdict ELSE reviews.verdict END AS verdict,
               CASE WHEN reviews.review_id IS NULL THEN inspections.defect ELSE reviews.defect END AS defect,
               coalesce(reviews.reviewer, 'daemon') AS decided_by
        FROM inspections
        LEFT JOIN (SELECT inspection_id, max(review_id) AS review_id FROM reviews GROUP BY inspection_id) AS newest
               ON newest.inspection_id = inspections.inspection_id
        LEFT JOIN reviews ON reviews.review_id = newest.review_id
        WHERE inspections.status = 'done'
    """,
}
