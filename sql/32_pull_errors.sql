-- Every error of the pull API, once.
SET client_min_messages = warning;
CREATE SCHEMA IF NOT EXISTS retrysafe;
CREATE EXTENSION IF NOT EXISTS retrysafe SCHEMA retrysafe;
SET search_path = retrysafe, public;
SELECT outbox_create_destination('errors', 'pull') > 0 AS created;
SELECT outbox_emit(null, 'e', 't', '{}') > 0 AS emitted;
RESET client_min_messages;
\set VERBOSITY default
\set SHOW_CONTEXT never

SELECT * FROM outbox_fetch('nobody');
SELECT * FROM outbox_fetch(null);
SELECT * FROM outbox_fetch('errors', 0);
SELECT * FROM outbox_fetch('errors', 10001);
SELECT * FROM outbox_fetch('errors', max_bytes => 0);
SELECT * FROM outbox_fetch('errors', lease => '1 ms');
SELECT * FROM outbox_fetch('errors', lease => '1 month');
SELECT * FROM outbox_fetch('errors', lease => null);
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT * FROM outbox_fetch('errors');
ROLLBACK;
BEGIN;
SELECT outbox_emit(null, 'f', 't', '{}') > 0 AS emitted;
SELECT * FROM outbox_fetch('errors');
ROLLBACK;
BEGIN READ ONLY;
SELECT * FROM outbox_fetch('errors');
ROLLBACK;

SELECT outbox_ack(null);
SELECT outbox_ack('');
SELECT outbox_ack('1.2.3');
SELECT outbox_nack('no batch', gen_random_uuid());
SELECT outbox_renew('no batch');
SELECT outbox_release('no batch');
SELECT outbox_ack('999999.0.1.1.0.1.1');

SELECT batch, event_id FROM outbox_fetch('errors') \gset
SELECT outbox_ack(:'batch', 0);
SELECT outbox_nack(:'batch', null);
SELECT outbox_nack(:'batch', '00000000-0000-0000-0000-000000000000');
SELECT outbox_nack(:'batch', :'event_id', retry_after => '-1 s');
SELECT outbox_renew(:'batch', '0 s');
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT outbox_ack(:'batch');
ROLLBACK;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT outbox_nack(:'batch', :'event_id');
ROLLBACK;
UPDATE outbox_shards SET lease_until = clock_timestamp();
SELECT outbox_ack(:'batch');
SELECT outbox_nack(:'batch', :'event_id');
SELECT outbox_renew(:'batch');
SELECT outbox_release(:'batch');
DELETE FROM outbox_batches;
\set VERBOSITY sqlstate
SELECT * FROM outbox_fetch('errors');

SELECT outbox_drop_destination('errors');
DELETE FROM outbox_log;
