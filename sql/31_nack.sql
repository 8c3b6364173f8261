-- Events that fail: retries, order within a key, dead letters, and who waits for whom.
SET client_min_messages = warning;
CREATE SCHEMA IF NOT EXISTS retrysafe;
CREATE EXTENSION IF NOT EXISTS retrysafe SCHEMA retrysafe;
SET search_path = retrysafe, public;
CREATE FUNCTION pg_temp.parked() RETURNS TABLE (event_key text, state text, attempts int, waits boolean, reason text)
LANGUAGE sql AS $$
  SELECT event_key, state, attempts, retry_at > clock_timestamp(), reason FROM retrysafe.outbox_parked ORDER BY id
$$;
RESET client_min_messages;
\set VERBOSITY sqlstate

SELECT outbox_create_destination('nack', 'pull', max_attempts => 3) > 0 AS created;
SELECT count(outbox_emit(null, k || i, 't', '{}', k)) FROM generate_series(1, 3) i, unnest('{a,b}'::text[]) k;

SELECT batch, event_id FROM outbox_fetch('nack') WHERE event_key = 'a1' \gset
-- The event itself, and those behind it.
SELECT outbox_nack(:'batch', :'event_id', 'busy', '1 hour');
-- Given back is given back.
SELECT outbox_nack(:'batch', :'event_id', 'busy');
SELECT * FROM pg_temp.parked();
-- What is left of the batch.
SELECT outbox_ack(:'batch');
-- Later events of the key follow them.
SELECT count(outbox_emit(null, k || 4, 't', '{}', k)) FROM unnest('{a,b}'::text[]) k;
SELECT event_key, attempt FROM outbox_fetch('nack');
SELECT DISTINCT batch FROM outbox_fetch('nack') \gset
SELECT outbox_ack(:'batch');
SELECT * FROM pg_temp.parked();

-- The hour passes: the key comes in order, and fails in the middle.
UPDATE outbox_parked SET retry_at = clock_timestamp() WHERE state = 'retry';
SELECT event_key, attempt FROM outbox_fetch('nack');
SELECT batch, event_id FROM outbox_fetch('nack') WHERE event_key = 'a2' \gset
SELECT outbox_nack(:'batch', :'event_id', 'bad', dead => true);
SELECT outbox_ack(:'batch');
SELECT * FROM pg_temp.parked();
-- The rest of the key goes on behind a dead letter.
SELECT event_key, attempt FROM outbox_fetch('nack');
SELECT DISTINCT batch FROM outbox_fetch('nack') \gset
SELECT outbox_ack(:'batch');
SELECT * FROM pg_temp.parked();

-- Attempts run out.
SELECT outbox_emit(null, 'free', 't', '{}') > 0 AS emitted;
SELECT batch, event_id FROM outbox_fetch('nack') \gset
SELECT outbox_nack(:'batch', :'event_id', 'once', '0 s'), outbox_ack(:'batch');
SELECT batch, event_id FROM outbox_fetch('nack') \gset
SELECT outbox_nack(:'batch', :'event_id', 'twice', '0 s'), outbox_ack(:'batch');
SELECT batch, event_id, attempt FROM outbox_fetch('nack') \gset
SELECT :attempt AS attempt, outbox_nack(:'batch', :'event_id', 'three times', '0 s'), outbox_ack(:'batch');
SELECT * FROM pg_temp.parked();
SELECT count(*) FROM outbox_fetch('nack');

-- Where exhausted events block, their key stands still until an operator decides.
SELECT outbox_create_destination('blocking', 'pull', max_attempts => 1, on_exhausted => 'block') > 0 AS created;
SELECT count(outbox_emit(null, k || 5, 't', '{}', k)) FROM unnest('{a,b}'::text[]) k;
SELECT batch, event_id FROM outbox_fetch('blocking') WHERE event_key = 'a5' \gset
SELECT outbox_nack(:'batch', :'event_id', 'no'), outbox_ack(:'batch');
SELECT count(outbox_emit(null, k || 6, 't', '{}', k)) FROM unnest('{a,b}'::text[]) k;
SELECT event_key, batch FROM outbox_fetch('blocking') \gset
SELECT :'event_key' AS event_key, outbox_ack(:'batch');
SELECT count(*) FROM outbox_fetch('blocking');
SELECT outbox_retry('blocking');
SELECT event_key, attempt FROM outbox_fetch('blocking');

SELECT outbox_drop_destination('nack'), outbox_drop_destination('blocking');
DELETE FROM outbox_log;
