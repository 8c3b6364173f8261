-- Delayed events: kept apart until due, cancelled, emitted again.
SET client_min_messages = warning;
CREATE SCHEMA IF NOT EXISTS retrysafe;
CREATE EXTENSION IF NOT EXISTS retrysafe SCHEMA retrysafe;
SET search_path = retrysafe, public;
RESET client_min_messages;
\set VERBOSITY sqlstate

BEGIN;
SELECT outbox_emit(null, 'd', 't', '{"n": 1}', 'k', '{"h": "v"}', '2100-01-01 00:00:00+00', 's') IS NULL AS delayed;
SELECT scope, event_key, event_type, ordering_key, payload, headers, deliver_after = '2100-01-01 00:00:00+00' AS time
  FROM outbox_scheduled WHERE event_key = 'd';
SELECT count(*) FROM outbox_log WHERE event_key = 'd';
-- The same event again, delayed or not: still one, still delayed, at the first time.
SELECT outbox_emit(null, 'd', 't', '{"n": 1}', 'k', deliver_after => '2101-01-01', scope => 's') IS NULL AS delayed;
SELECT outbox_emit(null, 'd', 't', '{"n": 1}', 'k', scope => 's') IS NULL AS delayed;
SELECT count(*), min(deliver_after) = '2100-01-01 00:00:00+00' AS time FROM outbox_scheduled WHERE event_key = 'd';
SELECT count(*) FROM outbox_log WHERE event_key = 'd';
SAVEPOINT s;
SELECT outbox_emit(null, 'd', 't', '{"n": 2}', 'k', scope => 's');
ROLLBACK TO s;
-- Cancelled by its key and scope, once.
SELECT outbox_cancel('d'), outbox_cancel('other', 's');
SELECT outbox_cancel('d', 's'), outbox_cancel('d', 's');
-- A cancelled event never was: its key can be used for another one.
SELECT outbox_emit(null, 'd', 't', '{"n": 2}', scope => 's') IS NOT NULL AS emitted;
SELECT outbox_cancel('d', 's');
SELECT event_key, payload FROM outbox_log WHERE event_key = 'd';
ROLLBACK;

-- A cancellation that is taken back.
BEGIN;
SELECT outbox_emit(null, 'd', 't', '1', deliver_after => '2100-01-01') IS NULL AS delayed;
SAVEPOINT s;
SELECT outbox_cancel('d');
ROLLBACK TO s;
SELECT outbox_emit(null, 'd', 't', '1') IS NULL AS still_delayed;
SELECT outbox_cancel('d');
COMMIT;
SELECT count(*) FROM outbox_scheduled WHERE event_key = 'd';

-- Everything in one statement, under SERIALIZABLE.
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT outbox_emit(null, 'd', 't', '1', deliver_after => '2100-01-01') IS NULL AS delayed, outbox_cancel('d') AS cancelled,
       outbox_emit(null, 'd', 't', '2') IS NOT NULL AS emitted;
ROLLBACK;

-- Null: no such event.
SELECT outbox_cancel(null) IS NULL AS unknown;
