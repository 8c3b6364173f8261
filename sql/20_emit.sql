-- outbox_emit: what is written, and what the same event key again does.
SET client_min_messages = warning;
CREATE SCHEMA IF NOT EXISTS retrysafe;
CREATE EXTENSION IF NOT EXISTS retrysafe SCHEMA retrysafe;
SET search_path = retrysafe, public;
RESET client_min_messages;
\set VERBOSITY sqlstate

-- One event, every column.
BEGIN;
SELECT outbox_emit(null, 'order-1', 'order.created', '{"b": 1.50, "a": [null, true, "x"]}', 'customer-7',
                   '{"tenant": "t1", "X-Trace_id": ""}', scope => 'shop') AS id \gset
SELECT id = :id AS position, txid = pg_current_xact_id() AS own_transaction, scope, idempotency_key, event_key,
       event_type, ordering_key, payload, headers, created_at BETWEEN now() AND clock_timestamp() AS clock_time
  FROM outbox_log WHERE event_key = 'order-1';
-- The same content again: the first position, and no second row. JSON is compared by its canonical text.
SELECT outbox_emit(null, 'order-1', 'order.created', '{"a":[null,true,"x"],"b":1.50}', 'customer-7', scope => 'shop') = :id AS same;
-- Headers and delivery time are not part of the content.
SELECT outbox_emit(null, 'order-1', 'order.created', '{"a":[null,true,"x"],"b":1.50}', 'customer-7',
                   '{"other": "header"}', now() + interval '1 day', 'shop') = :id AS same;
-- Another scope is another event.
SELECT outbox_emit(null, 'order-1', 'order.created', '{"b": 1.50}') > :id AS another;
SELECT count(*) FROM outbox_log WHERE event_key = 'order-1';
ROLLBACK;
SELECT count(*) FROM outbox_log WHERE event_key = 'order-1';

-- Other content: each part counts, and the transaction can go on after a savepoint.
BEGIN;
SELECT outbox_emit(null, 'e', 't', '{"n": 1.5}', 'k') AS id \gset
SAVEPOINT s;
SELECT outbox_emit(null, 'e', 'u', '{"n": 1.5}', 'k');
ROLLBACK TO s;
SELECT outbox_emit(null, 'e', 't', '{"n": 1.50}', 'k');
ROLLBACK TO s;
SELECT outbox_emit(null, 'e', 't', null, 'k');
ROLLBACK TO s;
SELECT outbox_emit(null, 'e', 't', '{"n": 1.5}', 'l');
ROLLBACK TO s;
SELECT outbox_emit(null, 'e', 't', '{"n": 1.5}');
ROLLBACK TO s;
SELECT outbox_emit('some key', 'e', 't', '{"n": 1.5}', 'k');
ROLLBACK TO s;
SELECT outbox_emit(null, 'e', 't', '{"n": 1.5}', 'k') = :id AS same;
\set VERBOSITY terse
SELECT outbox_emit(null, 'e', 't', '{"n": 1.5}');
\set VERBOSITY sqlstate
ROLLBACK;

-- Twice in one statement, and within a savepoint that is taken back.
BEGIN;
SELECT outbox_emit(null, 'twice', 't', '1') = outbox_emit(null, 'twice', 't', '1') AS same;
SAVEPOINT s;
SELECT outbox_emit(null, 'undone', 't', '1') IS NOT NULL AS emitted;
ROLLBACK TO s;
SELECT outbox_emit(null, 'undone', 't', '2') IS NOT NULL AS emitted;
SELECT event_key, payload FROM outbox_log WHERE event_key IN ('twice', 'undone') ORDER BY 1;
ROLLBACK;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT outbox_emit(null, 'twice', 't', '1') = outbox_emit(null, 'twice', 't', '1') AS same;
ROLLBACK;

-- Payloads: null is no payload, JSON null is one.
BEGIN;
SELECT outbox_emit(null, 'p' || n, 't', p) IS NOT NULL AS emitted
  FROM (VALUES (1, null), (2, 'null'), (3, '{}'), (4, '[]'), (5, '0'), (6, '""'), (7, '1.50'::jsonb),
               (8, '"\ud83d\ude00"'), (9, '9007199254740993')) v (n, p);
SELECT event_key, payload, payload IS NULL AS none FROM outbox_log WHERE event_key ~ '^p[0-9]$' ORDER BY event_key COLLATE "C";
SELECT outbox_emit(null, 'p1', 't', 'null');
ROLLBACK;

-- Event keys are compared byte by byte, whatever they hold.
BEGIN;
SELECT count(DISTINCT outbox_emit(null, k, 't', '1'))
  FROM unnest(ARRAY['K', 'k', 'k ', U&'\00E9', U&'e\0301', E'a\r\nb', E'\t', '''"%_*?\\', repeat('x', 255)]) k;
ROLLBACK;

-- The trace context of the session goes along, unless the caller gives one.
BEGIN;
SET LOCAL retrysafe.traceparent = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01';
SELECT outbox_emit(null, 'h1', 't', '1') IS NOT NULL, outbox_emit(null, 'h2', 't', '1', headers => '{"a": "b"}') IS NOT NULL,
       outbox_emit(null, 'h3', 't', '1', headers => '{"TraceParent": "mine"}') IS NOT NULL;
SELECT event_key, headers FROM outbox_log WHERE event_key IN ('h1', 'h2', 'h3') ORDER BY 1;
ROLLBACK;
SET retrysafe.traceparent = 'order-42';
SET retrysafe.traceparent = '00-4BF92F3577B34DA6A3CE929D0E0E4736-00F067AA0BA902B7-01';

-- Positions that a session had drawn ahead would be passed over by readers.
BEGIN;
ALTER SEQUENCE outbox_log_id_seq CACHE 20;
SELECT outbox_emit(null, 'ahead', 't', '1');
ROLLBACK;
BEGIN;
ALTER SEQUENCE outbox_log_id_seq CYCLE;
SELECT outbox_emit(null, 'again', 't', '1');
ROLLBACK;
SELECT outbox_emit(null, 'in order', 't', '1') IS NOT NULL AS emitted;
