-- inbox_accept, idem_cleanup and idem_status.
SET client_min_messages = warning;
CREATE SCHEMA IF NOT EXISTS retrysafe;
CREATE EXTENSION IF NOT EXISTS retrysafe SCHEMA retrysafe;
SET search_path = retrysafe, public;
RESET client_min_messages;
\set VERBOSITY sqlstate
SELECT inbox_accept('billing', 'e1'), inbox_accept('billing', 'e1'), inbox_accept('shipping', 'e1'), inbox_accept('billing', 'E1');
-- Many at once: a set of those that are new, each once.
SELECT * FROM inbox_accept('billing', ARRAY['e3', 'e1', 'e2', 'e3']) AS accepted ORDER BY accepted;
SELECT * FROM inbox_accept('billing', ARRAY['e3', 'e1', 'e2', 'e3']);
SELECT * FROM inbox_accept('billing', '{}'::text[]);
SELECT count(*) FROM inbox_accept('bulk', ARRAY(SELECT 'e' || i FROM generate_series(1, 10000) AS i));
-- The work of a bulk consumer in one statement
SELECT m.id, m.body
  FROM (VALUES ('e2', 'old'), ('e8', 'new'), ('e9', 'new')) AS m (id, body)
 WHERE m.id IN (SELECT inbox_accept('billing', ARRAY['e2', 'e8', 'e9'])) ORDER BY m.id;
-- It takes no lock on a key, and belongs to the consumer's transaction.
BEGIN;
SELECT inbox_accept('billing', 'rolled back');
SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 21075;
ROLLBACK;
SELECT inbox_accept('billing', 'rolled back');
BEGIN READ ONLY;
SELECT inbox_accept('billing', 'read-only');
ROLLBACK;

-- Clean-up: only what has expired, and no more than asked for.
BEGIN;
SELECT count(idem_begin('short' || i, 'a', ttl => '1 microsecond')), count(idem_begin('long' || i, 'a')) FROM generate_series(1, 5) AS i;
SELECT count(*) FROM (SELECT idem_complete('short' || i), idem_complete('long' || i) FROM generate_series(1, 5) AS i) AS s;
COMMIT;
UPDATE inbox_messages SET seen_at = now() - interval '31 days' WHERE consumer = 'billing';
SELECT keys_in_progress, sessions_waiting, records_estimate >= 0 AS records, records_bytes > 0 AS bytes, records_expired,
       oldest_record_expires_at < now() AS oldest, inbox_estimate >= 0 AS messages, inbox_bytes > 0 AS inbox_bytes, inbox_expired,
       oldest_inbox_message_seen_at < now() - interval '30 days' AS oldest_message FROM idem_status;
SELECT idem_cleanup(2);
SELECT idem_cleanup();
SELECT idem_cleanup();
SELECT key FROM idempotency_records ORDER BY key;
SELECT consumer, count(*) FROM inbox_messages GROUP BY consumer ORDER BY consumer;
SELECT inbox_accept('billing', 'e1'), inbox_accept('shipping', 'e1');
SELECT records_expired, inbox_expired FROM idem_status;
BEGIN;
SELECT outcome FROM idem_begin('k', 'a');
SELECT keys_in_progress, sessions_waiting FROM idem_status;
ROLLBACK;

SELECT count(idem_forget(key, scope)) > 0 AS cleaned FROM idempotency_records;
DELETE FROM inbox_messages;
