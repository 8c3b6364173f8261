-- The pull API: fetch, acknowledge, prefixes, batches that come again.
SET client_min_messages = warning;
CREATE SCHEMA IF NOT EXISTS retrysafe;
CREATE EXTENSION IF NOT EXISTS retrysafe SCHEMA retrysafe;
SET search_path = retrysafe, public;
RESET client_min_messages;
\set VERBOSITY sqlstate

SELECT outbox_create_destination('fetch', 'pull') > 0 AS created;
SELECT outbox_emit(null, 'e' || i, 'order.placed', jsonb_build_object('i', i), 'k' || i % 2, '{"h": "v"}') > 0 AS emitted
  FROM generate_series(1, 5) i;

-- In order, with everything that a publisher needs; each row names the batch.
SELECT attempt, event_type, event_key, scope, ordering_key, idempotency_key, payload, headers,
       created_at <= clock_timestamp() AS created, event_id = outbox_event_id(event_key, scope) AS event_id
  FROM outbox_fetch('fetch', 3);
-- Not acknowledged: the same again, under the same name.
SELECT batch, id FROM outbox_fetch('fetch', 3) ORDER BY id LIMIT 1 \gset
SELECT event_key, batch = :'batch' AS same_batch FROM outbox_fetch('fetch', 3);
-- A prefix, the rest, and again.
SELECT outbox_ack(:'batch', :id);
SELECT outbox_ack(:'batch');
SELECT outbox_ack(:'batch');
SELECT event_key FROM outbox_fetch('fetch');
SELECT DISTINCT batch FROM outbox_fetch('fetch') \gset
SELECT outbox_renew(:'batch', '1 hour') > clock_timestamp() + interval '59 minutes' AS renewed;
SELECT outbox_release(:'batch');
SELECT outbox_ack(:'batch');
SELECT DISTINCT batch FROM outbox_fetch('fetch') \gset
SELECT outbox_ack(:'batch');
SELECT count(*) FROM outbox_fetch('fetch');

-- A batch is a prefix by bytes, too; one event is always in it.
SELECT outbox_emit(null, 'b' || i, 'big', to_jsonb(repeat('x', 100))) > 0 AS emitted FROM generate_series(1, 3) i;
SELECT event_key FROM outbox_fetch('fetch', max_bytes => 250);
SELECT event_key FROM outbox_fetch('fetch', max_bytes => 1);

SELECT delivered, parked, total_delivered, total_parked FROM outbox_batches ORDER BY destination, shard, seq;

SELECT outbox_drop_destination('fetch');
DELETE FROM outbox_log;
