-- outbox_emit without an event key: the events of a request are numbered.
SET client_min_messages = warning;
CREATE SCHEMA IF NOT EXISTS retrysafe;
CREATE EXTENSION IF NOT EXISTS retrysafe SCHEMA retrysafe;
SET search_path = retrysafe, public;
RESET client_min_messages;
\set VERBOSITY sqlstate

SELECT outbox_create_destination('numbered', 'pull') IS NOT NULL AS created; -- the log has its identity from here on
CREATE FUNCTION pg_temp.emit(k text, p jsonb) RETURNS bool LANGUAGE sql AS
  $$ SELECT outbox_emit(k, NULL, 't', p, scope => 'shop') IS NOT NULL $$;
-- What is in the log, the ids against those of the texts.
CREATE VIEW pg_temp.log AS
  SELECT idempotency_key, event_key, event_number, payload,
         event_id = outbox_event_id(coalesce(event_key, idempotency_key || '~' || event_number), scope) AS id_of_text
    FROM outbox_events WHERE scope = 'shop' ORDER BY id;

-- Between begin and complete, and after it; beside events with keys of their own, and other requests.
BEGIN;
SELECT outcome FROM idem_begin('k', 'digest', 'shop');
SELECT outcome FROM idem_begin('l', 'digest', 'shop');
SELECT outcome FROM idem_begin('k', 'digest');
SELECT outbox_emit('k', NULL, 'order.placed', '{"n": 1}', 'customer-7', '{"h": "v"}', scope => 'shop') IS NOT NULL AS emitted;
SELECT pg_temp.emit('l', '10');
SELECT outbox_emit('k', 'own', 't', '0', scope => 'shop') IS NOT NULL AS emitted;
SELECT pg_temp.emit('k', '2');
SELECT idem_complete('k', '{"order": 1}', 'shop');
-- The same content again is another event.
SELECT pg_temp.emit('k', '2');
SELECT pg_temp.emit('l', '20');
SELECT outbox_emit('k', NULL, 't', '0') IS NOT NULL AS of_another_scope;
SELECT * FROM pg_temp.log;
SELECT event_number FROM outbox_events WHERE scope = '' AND idempotency_key = 'k';
SELECT scope, idempotency_key, event_key, event_number, event_type, ordering_key, payload, headers,
       txid = pg_current_xact_id() AS own_transaction, created_at BETWEEN now() AND clock_timestamp() AS clock_time
  FROM outbox_log WHERE event_type = 'order.placed' AND scope = 'shop';
ROLLBACK;

-- The rules for emits under a key hold.
SELECT outbox_emit('k', NULL, 't', '1');
BEGIN;
SELECT outcome FROM idem_begin('k', 'digest');
SELECT idem_complete('k', '1');
COMMIT;
BEGIN;
SELECT outcome FROM idem_begin('k', 'digest');
SAVEPOINT s;
SELECT outbox_emit('k', NULL, 't', '1');
ROLLBACK TO s;
SELECT outcome FROM idem_begin('k', 'other digest');
SELECT outbox_emit('k', NULL, 't', '1');
ROLLBACK;
SELECT idem_forget('k') IS NOT NULL AS forgotten;
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idem_begin('lost', 'digest', 'shop');
SELECT pg_temp.emit('lost', '1');
ROLLBACK TO s;
SELECT pg_temp.emit('lost', '1');
ROLLBACK TO s;
SELECT outcome FROM idem_begin('lost', 'digest', 'shop');
SELECT pg_temp.emit('lost', '1');
SELECT * FROM pg_temp.log;
ROLLBACK;
-- The numbers of what is rolled back are given again.
BEGIN;
SELECT k.outcome, l.outcome FROM idem_begin('k', 'digest', 'shop') k, idem_begin('l', 'digest', 'shop') l;
SELECT pg_temp.emit('k', '1');
SAVEPOINT a;
SELECT pg_temp.emit('k', '"undone"'), pg_temp.emit('l', '"undone"'), pg_temp.emit('k', '"undone"');
ROLLBACK TO a;
SELECT pg_temp.emit('k', '2');
SAVEPOINT b;
SELECT pg_temp.emit('k', '3'), pg_temp.emit('l', '1');
SAVEPOINT c;
SELECT pg_temp.emit('k', '4');
RELEASE c;
SELECT pg_temp.emit('k', '5');
SAVEPOINT d;
SELECT pg_temp.emit('k', '"undone"');
ROLLBACK TO d;
RELEASE b;
SELECT pg_temp.emit('k', '6'), pg_temp.emit('l', '2');
SELECT * FROM pg_temp.log;
ROLLBACK TO a;
SELECT pg_temp.emit('k', '"2 again"'), pg_temp.emit('l', '"1 again"');
SELECT * FROM pg_temp.log;
ROLLBACK;
BEGIN;
SELECT outcome FROM idem_begin('k', 'digest', 'shop');
DO $$
BEGIN
  FOR i IN 1..6 LOOP
    BEGIN
      PERFORM pg_temp.emit('k', to_jsonb(i));
      IF i % 2 = 0 THEN RAISE division_by_zero; END IF;
    EXCEPTION WHEN division_by_zero THEN NULL;
    END;
  END LOOP;
END
$$;
SELECT * FROM pg_temp.log;
-- A key that is given up and begun again in one transaction: no number comes twice.
SELECT idem_complete('k', '1', 'shop');
SELECT idem_forget('k', 'shop') IS NOT NULL AS forgotten;
SELECT outcome FROM idem_begin('k', 'digest', 'shop');
SELECT pg_temp.emit('k', '"more"');
SELECT event_number FROM outbox_events WHERE payload = '"more"';
ROLLBACK;

-- Delayed ones take their number at the emit, and are known by the text.
BEGIN;
SELECT outcome FROM idem_begin('k', 'digest', 'shop');
SELECT pg_temp.emit('k', '1');
SELECT outbox_emit('k', NULL, 't', '2', deliver_after => '2100-01-01', scope => 'shop') IS NULL AS delayed;
SELECT outbox_emit('k', NULL, 't', '2', deliver_after => '2100-01-01', scope => 'shop') IS NULL AS delayed;
SELECT pg_temp.emit('k', '4');
SELECT idempotency_key, event_key, event_id = outbox_event_id(event_key, scope) AS id_of_text
  FROM outbox_scheduled_events WHERE scope = 'shop' ORDER BY event_key;
SELECT outbox_cancel('k~2', 'shop'), outbox_cancel('k~1', 'shop'), outbox_cancel('k~2', 'shop');
SELECT pg_temp.emit('k', '5');
SELECT * FROM pg_temp.log;
SELECT event_key FROM outbox_scheduled_events WHERE scope = 'shop';
ROLLBACK;

-- No other event may have such a key.
\set VERBOSITY terse
SELECT outbox_emit(NULL, 'k~1', 't', '1');
SELECT outbox_emit(NULL, '~00', 't', '1');
SELECT outbox_emit(NULL, 'k~1', 't', '1', deliver_after => '2100-01-01');
BEGIN;
SELECT count(outbox_emit(NULL, k, 't', '1')) FROM unnest(ARRAY['k~', 'k~1x', 'k~x1', '1', '123', '~', 'k-1', U&'k~\0661']) k;
ROLLBACK;
\set VERBOSITY default
\set SHOW_CONTEXT never
SELECT outbox_emit(NULL, 'k~1', 't', '1');
SELECT outbox_emit(NULL, NULL, 't', '1');

-- A look-up by event key uses the index through the view.
BEGIN;
SET LOCAL enable_seqscan = off;
DO $$
DECLARE
  line text;
  scans int := 0;
BEGIN
  FOR line IN EXPLAIN SELECT event_id FROM outbox_events WHERE event_key = 'k' AND scope = 'shop' LOOP
    scans := scans + (line LIKE '%Index Scan using outbox_log_event_key_%')::int;
  END LOOP;
  RAISE INFO 'by event key: % pieces', scans;
END
$$;
\set VERBOSITY sqlstate
-- The rows that a session writes past the function are held to the rule of the table.
INSERT INTO outbox_log_1 (id, txid, created_at, scope, event_type) VALUES (1, '3', now(), '', 't');
ROLLBACK;
BEGIN;
INSERT INTO outbox_log_1 (id, txid, created_at, scope, event_number, event_type) VALUES (1, '3', now(), '', 1, 't');
ROLLBACK;
BEGIN;
INSERT INTO outbox_log_1 (id, txid, created_at, scope, event_number, idempotency_key, event_key, event_type)
  VALUES (1, '3', now(), '', 1, 'k', 'e', 't');
ROLLBACK;
SELECT outbox_drop_destination('numbered');
