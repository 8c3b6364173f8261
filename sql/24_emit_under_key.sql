-- outbox_emit under an idempotency key: the transaction must own it.
SET client_min_messages = warning;
CREATE SCHEMA IF NOT EXISTS retrysafe;
CREATE EXTENSION IF NOT EXISTS retrysafe SCHEMA retrysafe;
SET search_path = retrysafe, public;
RESET client_min_messages;
\set VERBOSITY sqlstate

-- Between begin and complete, and after it.
BEGIN;
SELECT outcome FROM idem_begin('k', 'digest', 'shop');
SELECT outbox_emit('k', 'k/1', 't', '1', scope => 'shop') IS NOT NULL AS emitted;
SELECT outbox_emit('k', 'k/later', 't', '1', deliver_after => '2100-01-01', scope => 'shop') IS NULL AS delayed;
SELECT idem_complete('k', '{"order": 1}', 'shop');
SELECT outbox_emit('k', 'k/2', 't', '1', scope => 'shop') IS NOT NULL AS emitted;
SAVEPOINT s;
-- The key of another scope is another key.
SELECT outbox_emit('k', 'k/3', 't', '1');
ROLLBACK TO s;
SELECT outbox_emit('other', 'k/3', 't', '1', scope => 'shop');
ROLLBACK TO s;
COMMIT;
SELECT idempotency_key, event_key FROM outbox_log WHERE scope = 'shop' ORDER BY id;

-- A retry does not own the key, and must not emit anything new; what is there is found.
BEGIN;
SELECT outcome, response FROM idem_begin('k', 'digest', 'shop');
SELECT outbox_emit('k', 'k/1', 't', '1', scope => 'shop') IS NOT NULL AS found;
SELECT outbox_emit('k', 'k/later', 't', '1', scope => 'shop') IS NULL AS delayed;
SAVEPOINT s;
SELECT outbox_emit('k', 'k/1', 't', '2', scope => 'shop');
ROLLBACK TO s;
SELECT outbox_emit('k', 'k/3', 't', '1', scope => 'shop');
ROLLBACK TO s;
-- Without the key it is another event.
SELECT outbox_emit(null, 'k/1', 't', '1', scope => 'shop');
ROLLBACK;

-- A claim that was rolled back is lost, until the key is begun again.
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idem_begin('lost', 'digest', 'shop');
SELECT outbox_emit('lost', 'lost/1', 't', '1', scope => 'shop') IS NOT NULL AS emitted;
ROLLBACK TO s;
SELECT outbox_emit('lost', 'lost/1', 't', '1', scope => 'shop');
ROLLBACK TO s;
SELECT outcome FROM idem_begin('lost', 'digest', 'shop');
SELECT outbox_emit('lost', 'lost/1', 't', '1', scope => 'shop') IS NOT NULL AS emitted;
ROLLBACK;

DELETE FROM outbox_log WHERE scope = 'shop';
DELETE FROM outbox_scheduled WHERE scope = 'shop';
SELECT idem_forget('k', 'shop') IS NOT NULL AS forgotten;
